/* SPDX-License-Identifier: Apache-2.0
 * test_mhc_accuracy.c: measures the accuracy of hyper-connections beyond the error rule of `cotangent check`, on the
 * kernels that dispatch chooses: the error of dx in units of bf16 and per stream, the norm error of the parameters'
 * gradients, the projection compared with float32 and TF32, and the row and column sums of Sinkhorn.
 *
 *   test_mhc_accuracy [--json FILE]                       writes the figures to FILE, for tools/make_tables.py
 *   test_mhc_accuracy --backend cuda [--json FILE]        mhc_pre on a GPU; 1000 repeats must give the same bits */
#include "support.h"

#include "bench/bench.h"
#include "bench/bench_device.h"
#include "check/bound_case.h"
#include "bench/ceiling.h"
#include "check/check.h"
#include "check/compare.h"
#include "check/random.h"
#include "core/float16.h"
#include "core/tensor.h"

#include <cotangent/mhc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

extern const cot_op_cases cot_mhc_pre_cases, cot_mhc_sinkhorn_cases;

static json_t *json_rows; /* NULL: no JSON output */
static cot_backend backend = COT_BACKEND_CPU;

static cot_queue *queue_of_backend(void)
{
    cot_queue *queue = NULL;
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = backend;
    assert_ok(cot_queue_create(&options, &queue));
    return queue;
}

/* ---- one case, computed by the oracle and by the library------------------------------------------------ */

typedef struct solved_case {
    cot_case c;
    reference ref;
    bound_case bound;
    const cot_direction *direction;
} solved_case;

static void solve(solved_case *s, const cot_op_cases *cases, int direction, int count, char *const options[])
{
    memset(s, 0, sizeof *s);
    assert_null(cases->parse(direction, count, options, &s->c));
    s->direction = &cases->op->directions[direction];
    s->ref = reference_make(cases, &s->c);
    reference_run_oracle(&s->ref);
    bound_case_make(&s->bound, &s->ref, false);
    cot_queue *queue = queue_of_backend();
    assert_ok(bound_case_run(&s->bound, s->direction, queue));
    cot_queue_destroy(queue);
}

static void finish(solved_case *s)
{
    bound_case_free(&s->bound, s->direction);
    reference_free(&s->ref);
}

static int field_of(const solved_case *s, const char *name)
{
    for (int f = 0; f < s->direction->field_count; f++)
        if (strcmp(s->direction->fields[f].name, name) == 0)
            return f;
    fail_msg("no field %s", name);
    return -1;
}

/* ---- measures ------------------------------------------------------------------------------------------- */

/* Measures the elements with `first` <= index mod `period` < `end`, for example one stream of dx. */
static error_measures measure(const solved_case *s, const char *name, int64_t first, int64_t end, int64_t period)
{
    const int f = field_of(s, name);
    const cot_tensor *view = &s->bound.fields[f].view;
    double *y = tensor_values(view);
    const error_measures m = measure_errors(y, s->ref.expected[f], cot_elements(view), first, end, period, view->dtype);
    free(y);
    return m;
}

/* Adds a row with the relative error only. The caller adds the other fields. */
static json_t *add_relative(const solved_case *s, const char *what, int64_t elements, double relative)
{
    if (json_rows == NULL)
        return NULL;
    char device[256], date[16], shape[192];
    const time_t seconds = time(NULL);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&seconds));
    if (backend == COT_BACKEND_CUDA)
        bench_device_name(device, sizeof device);
    else
        device_name(device, sizeof device);
    snprintf(shape, sizeof shape, "%s %s", s->c.shape, s->c.options);
    json_t *row = json_pack("{s:s, s:s, s:s, s:s, s:s, s:I, s:f}", "op", "mhc_accuracy", "device", device, "date", date,
                            "shape", shape, "output", what, "elements", (json_int_t)elements, "relative", relative);
    json_array_append_new(json_rows, row);
    return row;
}

static void add_row(const solved_case *s, const char *what, const error_measures *m)
{
    json_t *row = add_relative(s, what, m->elements, m->relative);
    if (row == NULL)
        return;
    json_object_set_new(row, "largest", json_real(m->largest));
    json_object_set_new(row, "max", json_real(m->max));
    json_object_set_new(row, "mean", json_real(m->mean));
    json_object_set_new(row, "above", json_integer(m->above));
    json_object_set_new(row, "below", json_integer(m->below));
    json_object_set_new(row, "rms_ulp", json_real(m->rms_ulp));
}

/* The shapes of the document that the op comes from: 128 tokens of 4 streams of 128, with its phi and with a scaled
 * phi. Also a larger shape. */
static void gradients_in_bf16(void **state)
{
    (void)state;
    static char *const cases[][8] = {
        {"T=128", "n=4", "D=128", "bf16", "phi~1", "gamma", "dh_res_logits", NULL},
        {"T=128", "n=4", "D=128", "bf16", "gamma", "dh_res_logits", NULL},
        {"T=128", "n=4", "D=1280", "bf16", "gamma", "sinkhorn", "dx_post", NULL},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        solved_case s;
        int count = 0;
        while (cases[i][count] != NULL)
            count++;
        solve(&s, &cot_mhc_pre_cases, 1, count, cases[i]);
        const cot_tensor *x = cot_field_tensor(&s.direction->fields[0], s.bound.args);
        const int64_t n = x->shape[2], D = x->shape[3];
        for (int64_t stream = 0; stream < n; stream++) {
            char name[32];
            const error_measures m = measure(&s, "dx", stream * D, (stream + 1) * D, n * D);
            snprintf(name, sizeof name, "dx, stream %d", (int)stream);
            add_row(&s, name, &m);
            assert_true(m.largest > 0 && m.rms_ulp <= 0.35);
            assert_true(m.above == 0);
        }
        static const char *const parameters[] = {"dphi", "dalpha", "dbias", "dgamma"};
        for (size_t p = 0; p < COUNT(parameters); p++) {
            const error_measures m = measure(&s, parameters[p], 0, 1, 1);
            add_row(&s, parameters[p], &m);
            assert_true(m.largest > 0 && m.relative < 1e-4);
        }
        finish(&s);
    }
}

/* ---- the projection ------------------------------------------------------------------------------------- */

/* Rounds phi to TF32: 10 bits of mantissa, to nearest. x in bf16 is exact in TF32. */
static double to_tf32(double value)
{
    const uint32_t bits = cot_f32_bits((float)value);
    return cot_f32_from_bits((bits + 0xfffu + ((bits >> 13) & 1u)) & ~0x1fffu);
}

static void project(int64_t D)
{
    char columns[32];
    snprintf(columns, sizeof columns, "D=%lld", (long long)D);
    char *const words[] = {"T=64", "n=4", columns, "bf16"};
    solved_case s;
    solve(&s, &cot_mhc_pre_cases, 0, COUNT(words), words);
    const error_measures kernel = measure(&s, "h_mix", 0, 1, 1);
    const int f = field_of(&s, "h_mix");
    const double *x = s.ref.values[field_of(&s, "x")], *phi = s.ref.values[field_of(&s, "phi")];
    const int64_t K = 4 * D, M = 24, tokens = 64;
    double plain = 0, tf32 = 0, norm = 0;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t j = 0; j < M; j++) {
            float in_float = 0;
            double in_tf32 = 0;
            for (int64_t k = 0; k < K; k++) {
                in_float += (float)phi[j * K + k] * (float)x[t * K + k];
                in_tf32 += to_tf32(phi[j * K + k]) * x[t * K + k];
            }
            const double r = s.ref.expected[f][t * M + j];
            plain += (in_float - r) * (in_float - r);
            tf32 += (in_tf32 - r) * (in_tf32 - r);
            norm += r * r;
        }
    add_row(&s, "h_mix", &kernel);
    add_relative(&s, "h_mix, one running sum in float32", kernel.elements, sqrt(plain / norm));
    add_relative(&s, "h_mix, phi rounded to TF32, exact sums", kernel.elements, sqrt(tf32 / norm));
    assert_true(kernel.relative < sqrt(plain / norm) && kernel.relative < 1e-6 &&
                kernel.relative < 0.01 * sqrt(tf32 / norm));
    finish(&s);
}

/* Shapes where all terms of phi have the same format, and shapes where Hopper's kernel stores the third terms as
 * bytes. */
static void projection(void **state)
{
    (void)state;
    project(4096);
    project(7168);
}

/* ---- repeats -------------------------------------------------------------------------------------------- */

static void repeat_both(char *D_option, int repeats)
{
    char *const words[] = {"T=250", "n=4", D_option, "bf16", "gamma", "sinkhorn", "dh_res_logits"};
    for (int direction = 0; direction < 2; direction++) {
        solved_case s;
        bound_case again;
        solve(&s, &cot_mhc_pre_cases, direction, COUNT(words), words);
        bound_case_make(&again, &s.ref, false);
        cot_queue *queue = queue_of_backend();
        for (int repeat = 0; repeat < repeats; repeat++) {
            assert_ok(bound_case_run(&again, s.direction, queue));
            for (int f = 0; f < s.direction->field_count; f++)
                if (again.fields[f].memory != NULL)
                    assert_memory_equal(again.fields[f].memory, s.bound.fields[f].memory, again.fields[f].bytes);
        }
        cot_queue_destroy(queue);
        bound_case_free(&again, s.direction);
        finish(&s);
    }
}

/* GPU kernels whose blocks wait for each other give the same bits in 1000 runs; fewer runs for wide rows. */
static void repeats(void **state)
{
    (void)state;
    char narrow[] = "D=4096", wide[] = "D=7168";
    repeat_both(narrow, 1000);
    repeat_both(wide, 200);
}

/* ---- Sinkhorn ------------------------------------------------------------------------------------------- */

enum { SINKHORN_TOKENS = 4096, MAX_N = 8 };

/* Counts the tokens with a row or column sum that differs from 1 by more than 1e-3. -1: a value is not finite. */
static int64_t count_unbalanced(int64_t n, double scale, int32_t iterations)
{
    static double normal[SINKHORN_TOKENS * MAX_N * MAX_N];
    static float logits[SINKHORN_TOKENS * MAX_N * MAX_N], h_res[SINKHORN_TOKENS * MAX_N * MAX_N];
    random_normal(7, normal, SINKHORN_TOKENS * n * n);
    for (int64_t i = 0; i < SINKHORN_TOKENS * n * n; i++) {
        const double value = scale * normal[i];
        logits[i] = (float)(value > 80 ? 80 : value < -80 ? -80 : value);
    }
    cot_queue *queue = NULL;
    assert_ok(cot_queue_create(NULL, &queue));
    cot_mhc_sinkhorn_forward_args a;
    COT_MHC_SINKHORN_INIT(&a);
    a.iterations = iterations;
    a.h_res_logits = cot_tensor_contiguous(logits, COT_F32, 4, (const int64_t[]){1, SINKHORN_TOKENS, n, n});
    a.h_res = cot_tensor_contiguous(h_res, COT_F32, 4, (const int64_t[]){1, SINKHORN_TOKENS, n, n});
    assert_ok(cot_mhc_sinkhorn_forward(queue, &a));
    cot_queue_destroy(queue);
    int64_t tokens = 0;
    for (int64_t t = 0; t < SINKHORN_TOKENS; t++) {
        double worst = 0;
        for (int64_t i = 0; i < n; i++) {
            double row = 0, column = 0;
            for (int64_t j = 0; j < n; j++) {
                row += (double)h_res[(t * n + i) * n + j];
                column += (double)h_res[(t * n + j) * n + i];
            }
            if (!isfinite(row) || !isfinite(column))
                return -1;
            worst = fmax(worst, fmax(fabs(row - 1), fabs(column - 1)));
        }
        tokens += worst > 1e-3;
    }
    return tokens;
}

static void sinkhorn_sums(void **state)
{
    (void)state;
    assert_int_equal(count_unbalanced(4, 1, 20), 0);
    for (int64_t n = 1; n <= MAX_N; n++) {
        /* With 2 or 3 streams, one token in hundreds converges more slowly, also in exact arithmetic. */
        assert_in_range(count_unbalanced(n, 1, 20), 0, SINKHORN_TOKENS / 100);
        assert_true(count_unbalanced(n, 80, 20) >= 0);
        assert_true(n == 1 || count_unbalanced(n, 1, 1) > SINKHORN_TOKENS / 2); /* one iteration is not enough */
    }
}

int main(int argc, char **argv)
{
    const char *json = NULL;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 < argc && strcmp(argv[i], "--json") == 0) {
            json = argv[i + 1];
        } else if (i + 1 < argc && strcmp(argv[i], "--backend") == 0 && strcmp(argv[i + 1], "cuda") == 0) {
            backend = COT_BACKEND_CUDA;
        } else {
            fprintf(stderr, "usage: test_mhc_accuracy [--backend cuda] [--json FILE]\n");
            return 2;
        }
    }
    if (json != NULL)
        json_rows = json_array();
    const struct CMUnitTest on_host[] = {
        cmocka_unit_test(gradients_in_bf16),
        cmocka_unit_test(projection),
        cmocka_unit_test(sinkhorn_sums),
    };
    const struct CMUnitTest on_device[] = {
        cmocka_unit_test(gradients_in_bf16),
        cmocka_unit_test(projection),
        cmocka_unit_test(repeats),
    };
    int failed = backend == COT_BACKEND_CUDA ? cmocka_run_group_tests(on_device, NULL, NULL)
                                             : cmocka_run_group_tests(on_host, NULL, NULL);
    if (json != NULL &&
        json_dump_file(json_rows, json, JSON_INDENT(1) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(4)) != 0) {
        fprintf(stderr, "test_mhc_accuracy: %s: cannot be written\n", json);
        failed++;
    }
    json_decref(json_rows);
    return failed;
}
