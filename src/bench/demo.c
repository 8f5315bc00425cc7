/* SPDX-License-Identifier: Apache-2.0 */
#include "demo.h"

#include "bench.h"
#include "bench_device.h"
#include "check/check.h"
#include "core/queue.h"
#include "core/tensor.h"
#include "check/verify.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_WORDS = 32, MAX_TEXT = 256, MAX_JOBS = 24 };

/* One call. `words` are those of `cotangent bench OP DIRECTION`. */
typedef struct job {
    const char *what, *op, *direction, *words;
    const char *kernel; /* part of the name (without such a kernel the job is skipped); NULL = what a call takes */
} job;

typedef struct demo_state demo_state;

typedef struct demo {
    const char *number, *title;
    /* Added to the words for verification. The oracle is slow, and sizes that do not divide into tiles test more. */
    const char *verify_words;
    const char *aligned_words; /* the same for kernels that refuse such sizes. May be NULL */
    const char *quick;         /* the same for all calls, with --quick */
    const job *jobs;
    int job_count;
    void (*figures)(demo_state *state);
    /* Compares a job's outputs with their oracle. Returns false if they violate the demo's own bounds. May be NULL. */
    bool (*inspect)(demo_state *state, int number, const verification *v, const void *args);
} demo;

struct demo_state {
    const demo_options *options;
    const demo *d;
    json_t *rows, *measured[MAX_JOBS]; /* the row of each job, borrowed from rows; NULL = the job was skipped */
    bool good, used_aligned_words;     /* used_aligned_words: some kernel was verified at aligned_words */
};

/* ---- cases and kernels ---------------------------------------------------------------------------------- */

static const cot_op_cases *cases_of(const job *j, int *direction)
{
    int op = 0;
    while (strcmp(cot_ops[op]->name, j->op) != 0)
        op++;
    for (*direction = 0; strcmp(cot_ops[op]->directions[*direction].name, j->direction) != 0;)
        ++*direction;
    return cot_all_cases[op];
}

/* Makes the case of the job's words and of extra_words, which override them. */
static void make_case(const job *j, const char *extra_words, cot_case *c)
{
    char text[2 * MAX_TEXT], *words[MAX_WORDS], *rest = text;
    int count = 0, direction;
    const cot_op_cases *cases = cases_of(j, &direction);
    snprintf(text, sizeof text, "%s %s", j->words, extra_words != NULL ? extra_words : "");
    for (char *word; count < MAX_WORDS && (word = strtok_r(rest, " ", &rest)) != NULL;)
        words[count++] = word;
    const char *unknown = cases->parse(direction, count, words, c);
    if (unknown != NULL) { /* an error in the tables below, which every test of a demo finds */
        fprintf(stderr, "cotangent: '%s' describes no case of %s\n", unknown, j->op);
        abort();
    }
    c->uses |= COT_CASE_CHECK | COT_CASE_BENCH | COT_CASE_BENCH_CUDA;
}

static cot_queue *make_queue(const demo_state *s, const char *op, const cot_kernel *kernel)
{
    char forced[160];
    cot_queue_options options;
    COT_INIT(&options);
    snprintf(forced, sizeof forced, "%s=%s", op, kernel != NULL ? kernel->name : "");
    options.backend = s->options->backend;
    options.kernels = kernel != NULL ? forced : NULL;
    cot_queue *queue = NULL;
    if (cot_queue_create(&options, &queue) != COT_OK) {
        fprintf(stderr, "cotangent: %s\n", cot_error_message());
        exit(1);
    }
    return queue;
}

/* The kernel of the job for this case. NULL with *status = COT_OK if there is no kernel of that name. Of several named
 * kernels with the same cost it is the last one: later kernels are for better instruction sets. */
static const cot_kernel *find_kernel(const demo_state *s, const job *j, const cot_case *c, cot_status *status)
{
    cot_choice choices[COT_MAX_KERNELS];
    int direction, count = 0;
    const cot_op_cases *cases = cases_of(j, &direction);
    cot_queue *queue = make_queue(s, j->op, NULL);
    *status = cot_op_explain(&cases->op->directions[direction], queue, c->args, choices, &count);
    cot_queue_destroy(queue);
    const cot_kernel *chosen = NULL;
    double cost = INFINITY;
    for (int i = 0; *status == COT_OK && i < count; i++) {
        const bool named =
            j->kernel != NULL && choices[i].refusal == NULL && strstr(choices[i].kernel->name, j->kernel);
        if ((named && choices[i].cost <= cost) || (j->kernel == NULL && choices[i].chosen)) {
            chosen = choices[i].kernel;
            cost = choices[i].cost;
        }
    }
    return chosen;
}

/* ---- one job -------------------------------------------------------------------------------------------- */

static bool is_output(const verification *v, int f)
{
    return v->ref.expected[f] != NULL;
}

/* Returns the largest error of the outputs, as a fraction of its tolerance. Above 1, or NaN, is a failure, and its line
 * is printed. */
static double worst_tolerance_ratio(demo_state *s, int number, const verification *v, const void *args,
                                    const cot_kernel *kernel)
{
    const cot_direction *direction = case_direction(v->ref.cases, &v->c);
    double worst = 0;
    for (int f = 0; f < direction->field_count; f++) {
        if (!is_output(v, f))
            continue;
        const comparison c = verification_compare(v, f, args, kernel);
        worst = fmax(worst, c.worst_ratio);
        if (c.failed) {
            char text[192];
            comparison_line(&c, text, sizeof text);
            printf("  FAILED: %s, %s: %s\n", s->d->jobs[number].what, direction->fields[f].name, text);
            s->good = false;
        }
    }
    if (s->d->inspect != NULL && !s->d->inspect(s, number, v, args))
        s->good = false;
    return worst;
}

static double number_of(const demo_state *s, int number, const char *key)
{
    return s->measured[number] != NULL ? json_number_value(json_object_get(s->measured[number], key)) : NAN;
}

static void verify_case(demo_state *s, int number, const cot_case *c, const cot_kernel *kernel)
{
    const job *j = &s->d->jobs[number];
    int direction;
    const cot_op_cases *cases = cases_of(j, &direction);
    cot_queue *queue = make_queue(s, j->op, kernel);
    reference ref = reference_make(cases, c);
    bound_case b;
    verification v;
    bound_case_make(&b, &ref, false);
    cot_status status = verification_begin(&v, cases, direction, b.args);
    memcpy(v.c.shared, c->shared, sizeof c->shared);
    if (status == COT_OK)
        status = bound_case_run(&b, &cases->op->directions[direction], queue);
    if (status == COT_OK) {
        const double worst = worst_tolerance_ratio(s, number, &v, b.args, kernel),
                     previous = number_of(s, number, "verified");
        json_object_set_new(s->measured[number], "verified", json_real(worst < previous ? previous : worst));
    } else {
        printf("  FAILED: %s: %s\n", j->what, cot_error_message());
        s->good = false;
    }
    verification_free(&v);
    bound_case_free(&b, &cases->op->directions[direction]);
    reference_free(&ref);
    cot_queue_destroy(queue);
}

/* Verifies the kernel that was measured, at sizes that it supports. If it refuses odd sizes, the kernel that a call
 * takes for those is also verified. */
static void verify_job(demo_state *s, int number, const cot_kernel *kernel)
{
    const job *j = &s->d->jobs[number];
    cot_case c;
    cot_status status;
    job measured = *j, any = *j;
    measured.kernel = kernel->name;
    any.kernel = NULL;
    make_case(j, s->options->quick ? s->d->quick : s->d->verify_words, &c);
    if (s->d->aligned_words != NULL && find_kernel(s, &measured, &c, &status) != kernel) {
        verify_case(s, number, &c, find_kernel(s, &any, &c, &status));
        make_case(j, s->d->aligned_words, &c);
        s->used_aligned_words = true;
    }
    verify_case(s, number, &c, kernel);
}

static void run_job(demo_state *s, int number)
{
    const job *j = &s->d->jobs[number];
    cot_case c;
    cot_status status;
    make_case(j, s->options->quick ? s->d->quick : NULL, &c);
    const cot_kernel *kernel = find_kernel(s, j, &c, &status);
    if (status != COT_OK) {
        printf("  FAILED: %s: %s\n", j->what, cot_error_message());
        s->good = false;
    }
    if (kernel == NULL)
        return;
    const bench_options options = {
        .op = j->op, .kernel = kernel->name, .one = &c, .backend = s->options->backend, .brief = s->options->quick};
    json_t *rows = bench_run(&options), *row;
    size_t index;
    json_array_foreach(rows, index, row)
    {
        if (strcmp(json_string_value(json_object_get(row, "kernel")), kernel->name) != 0)
            continue; /* another kernel, with a longer name */
        json_object_set_new(row, "demo", json_string(s->d->number));
        json_object_set_new(row, "what", json_string(j->what));
        json_array_append(s->rows, row);
        s->measured[number] = row;
    }
    json_decref(rows);
    if (s->measured[number] == NULL)
        s->good = false; /* bench has printed why */
    else if (s->options->verify)
        verify_job(s, number, kernel);
}

/* ---- printing ------------------------------------------------------------------------------------------- */

static const char *text_of(const json_t *row, const char *key)
{
    return json_string_value(json_object_get(row, key));
}

static void print_head(const demo_state *s)
{
    const json_t *first = json_array_get(s->rows, 0);
    if (first == NULL)
        return;
    printf("%s: %s (docs/original_specifications.md)\n%s, commit %s, %s", s->d->number, s->d->title,
           text_of(first, "device"), text_of(first, "commit"), text_of(first, "date"));
    if (s->options->verify)
        printf("; compared with the oracle%s%s%s%s", s->d->verify_words != NULL && !s->options->quick ? " at " : "",
               s->d->verify_words != NULL && !s->options->quick ? s->d->verify_words : "",
               s->used_aligned_words ? " and, where a kernel requires it, " : "",
               s->used_aligned_words ? s->d->aligned_words : "");
    printf("\n\n%-30s %-42s %-24s %9s %9s %8s %9s %10s\n", "", "kernel", "shape", "ms", "GB/s", "of copy", "FLOP/byte",
           "tolerance");
}

static void print_row(const demo_state *s, int number)
{
    const json_t *row = s->measured[number], *verified = json_object_get(row, "verified");
    char tolerance[32] = "-";
    if (verified != NULL)
        snprintf(tolerance, sizeof tolerance, "%.2g", json_number_value(verified));
    printf("%-30s %-42s %-24s %9.4f %9.2f %7.1f%% %9.2f %10s\n", text_of(row, "what"), text_of(row, "kernel"),
           text_of(row, "shape"), number_of(s, number, "ms"), number_of(s, number, "gbps"),
           100 * number_of(s, number, "ratio"), number_of(s, number, "flops") / number_of(s, number, "bytes"),
           tolerance);
}

/* Appends a row with a figure of the document and the same figure of this run. */
static void add_figure(demo_state *s, const char *name, const char *document, const char *here)
{
    const json_t *first = json_array_get(s->rows, 0);
    json_array_append_new(s->rows, json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s}", "demo", s->d->number, "figure",
                                             name, "document", document, "here", here, "device",
                                             text_of(first, "device"), "date", text_of(first, "date"), "commit",
                                             text_of(first, "commit"), "backend", text_of(first, "backend")));
}

static void print_figures(const demo_state *s)
{
    size_t index;
    const json_t *row;
    printf("\n%-44s %-36s %s\n", "figure", "the document", "here");
    json_array_foreach(s->rows, index, row)
    {
        if (json_object_get(row, "figure") != NULL)
            printf("%-44s %-36s %s\n", text_of(row, "figure"), text_of(row, "document"), text_of(row, "here"));
    }
}

/* ---- 000: causal conv1d, backward ------------------------------------------------------------------------ */

/* Pairs without and with SiLU, then a series of sizes. */
#define CONV "causal_conv1d", "backward"
static const job jobs_000[] = {
    {"f32 K=2", CONV, "f32 D=256 K=2 bias", NULL},
    {"f32 K=2 SiLU", CONV, "f32 D=256 K=2 bias silu", NULL},
    {"f32 K=3", CONV, "f32 D=256 K=3 bias", NULL},
    {"f32 K=3 SiLU", CONV, "f32 D=256 K=3 bias silu", NULL},
    {"f32 K=4", CONV, "f32 D=256 K=4 bias", NULL},
    {"f32 K=4 SiLU", CONV, "f32 D=256 K=4 bias silu", NULL},
    {"f16 K=2", CONV, "f16 D=256 K=2 bias", NULL},
    {"f16 K=2 SiLU", CONV, "f16 D=256 K=2 bias silu", NULL},
    {"f16 K=3", CONV, "f16 D=256 K=3 bias", NULL},
    {"f16 K=3 SiLU", CONV, "f16 D=256 K=3 bias silu", NULL},
    {"f16 K=4", CONV, "f16 D=256 K=4 bias", NULL},
    {"f16 K=4 SiLU", CONV, "f16 D=256 K=4 bias silu", NULL},
    {"f32 K=4, 1/32 of the size", CONV, "f32 B=1 D=64 T=512 bias", NULL},
    {"f32 K=4, 1/4 of the size", CONV, "f32 B=1 D=128 T=2048 bias", NULL},
    {"f32 K=4, 4 times the size", CONV, "f32 B=4 D=512 T=2048 bias", NULL},
    {"f16 K=4, 1/32 of the size", CONV, "f16 B=1 D=64 T=512 bias", NULL},
    {"f16 K=4, 1/4 of the size", CONV, "f16 B=1 D=128 T=2048 bias", NULL},
    {"f16 K=4, 4 times the size", CONV, "f16 B=4 D=512 T=2048 bias", NULL},
};
enum { PAIRS_000 = 12, F32_K4 = 4, F16_K4 = 10, SIZES_000 = 18 };

static void figures_000(demo_state *s)
{
    char text[MAX_TEXT];
    int best = 0;
    double fastest = INFINITY, slowest = 0, min_added = INFINITY, max_added = -INFINITY;
    for (int i = 0; i < SIZES_000; i++) {
        best = number_of(s, i, "ratio") > number_of(s, best, "ratio") ? i : best;
        fastest = fmin(fastest, 1e3 * number_of(s, i, "ms"));
        slowest = fmax(slowest, 1e3 * number_of(s, i, "ms"));
    }
    for (int i = 0; i < PAIRS_000; i += 2) {
        const double added = number_of(s, i + 1, "ms") / number_of(s, i, "ms") - 1;
        min_added = fmin(min_added, added);
        max_added = fmax(max_added, added);
    }
    snprintf(text, sizeof text, "%.1f GB/s, %.0f %% of the copy of as many bytes", number_of(s, best, "gbps"),
             100 * number_of(s, best, "ratio"));
    add_figure(s, "bandwidth, the best of the rows", "2300 GB/s, 43 % of the peak", text);
    snprintf(text, sizeof text, "%.0f to %.0f us", fastest, slowest);
    add_figure(s, "time of a call", "5 to 135 us", text);
    snprintf(text, sizeof text, "%+.0f to %+.0f %%", 100 * min_added, 100 * max_added);
    add_figure(s, "time that SiLU adds", "+30 to +50 %", text);
    snprintf(text, sizeof text, "%.2f; in f16 %.2f", number_of(s, F32_K4, "flops") / number_of(s, F32_K4, "bytes"),
             number_of(s, F16_K4, "flops") / number_of(s, F16_K4, "bytes"));
    add_figure(s, "FLOP/byte, f32, K = 4, without SiLU", "0.67: dx alone, of all the bytes", text);
    snprintf(text, sizeof text, "%.2f times as fast; at 4 times the size %.2f",
             number_of(s, F32_K4, "ms") / number_of(s, F16_K4, "ms"),
             number_of(s, PAIRS_000 + 2, "ms") / number_of(s, PAIRS_000 + 5, "ms"));
    add_figure(s, "f16 beside f32, K = 4", "faster in large problems", text);
}

/* ---- 001: attention, backward ---------------------------------------------------------------------------- */

#define ATTENTION "attention", "backward"
static const job jobs_001[] = {
    {"d=64 full", ATTENTION, "bf16 H=4 T=1024 d=64", NULL},
    {"d=64 causal", ATTENTION, "bf16 H=4 T=1024 d=64 causal", NULL},
    {"d=128 full", ATTENTION, "bf16 H=4 T=1024 d=128", NULL},
    {"d=128 causal", ATTENTION, "bf16 H=4 T=1024 d=128 causal", NULL},
    {"d=128 causal, nondeterministic", ATTENTION, "bf16 H=4 T=1024 d=128 causal nondeterministic", NULL},
    {"d=128 causal, 2 of k's heads", ATTENTION, "bf16 H=4 T=1024 d=128 causal Hkv=2", NULL},
    {"d=128 local, 256 keys back", ATTENTION, "bf16 H=4 T=1024 d=128 left=256 right=0", NULL},
    {"d=128 softcap", ATTENTION, "bf16 H=4 T=1024 d=128 causal softcap=20", NULL},
    {"d=256 causal", ATTENTION, "bf16 H=4 T=1024 d=256 causal", NULL},
};
enum { D128_FULL = 2, D128_CAUSAL, D128_NONDETERMINISTIC };

static void figures_001(demo_state *s)
{
    char text[MAX_TEXT];
    snprintf(text, sizeof text, "%.3f TFLOP/s", number_of(s, D128_FULL, "tflops"));
    add_figure(s, "five products of visible pairs, d=128 full", "none", text);
    snprintf(text, sizeof text, "%.3f TFLOP/s", number_of(s, D128_CAUSAL, "tflops"));
    add_figure(s, "the same, causal", "none", text);
    snprintf(text, sizeof text, "%.2f of the time in order",
             number_of(s, D128_NONDETERMINISTIC, "ms") / number_of(s, D128_CAUSAL, "ms"));
    add_figure(s, "dq summed up in any order", "faster; not reproducible", text);
}

/* ---- 002: dropout and bias, backward --------------------------------------------------------------------- */

#define DROPOUT "dropout", "backward"
static const job jobs_002[] = {
    {"f32, stored mask", DROPOUT, "f32 mask bias", NULL},
    {"f32, stored mask of bits", DROPOUT, "f32 mask_bits bias", NULL},
    {"f32, mask generated again", DROPOUT, "f32 generated bias", NULL},
    {"f16, stored mask", DROPOUT, "f16 mask bias", NULL},
    {"f16, stored mask of bits", DROPOUT, "f16 mask_bits bias", NULL},
    {"f16, mask generated again", DROPOUT, "f16 generated bias", NULL},
};
enum { F32_STORED, F32_DRAWN = 2, F16_STORED, F16_DRAWN = 5 };

static void figures_002(demo_state *s)
{
    char text[MAX_TEXT];
    snprintf(text, sizeof text, "%.0f %%, in f16 %.0f %%", 100 * number_of(s, F32_STORED, "ratio"),
             100 * number_of(s, F16_STORED, "ratio"));
    add_figure(s, "of the copy of as many bytes, stored mask", "none", text);
    snprintf(text, sizeof text, "%.2f of the time, in f16 %.2f",
             number_of(s, F32_DRAWN, "ms") / number_of(s, F32_STORED, "ms"),
             number_of(s, F16_DRAWN, "ms") / number_of(s, F16_STORED, "ms"));
    add_figure(s, "mask generated again, beside a stored one", "stored only", text);
}

/* ---- 003: causal conv1d, forward ------------------------------------------------------------------------- */

#define FORWARD "causal_conv1d", "forward"
static const job jobs_003[] = {
    {"fused, direct", FORWARD, "f16 channel-last B=2 D=256 T=256 K=4 bias silu", NULL},
    {"fused, im2col", FORWARD, "f16 channel-last B=2 D=256 T=256 K=4 bias silu", "im2col"},
    {"fused, direct, channel-first", FORWARD, "f16 B=2 D=256 T=256 K=4 bias silu", NULL},
    {"without SiLU", FORWARD, "f16 channel-last B=2 D=256 T=256 K=4 bias", NULL},
    {"apart: the convolution", FORWARD, "f16 channel-last B=2 D=256 T=256 K=4", NULL},
    {"apart: bias and SiLU", "dropout", "forward", "f16 R=512 D=256 p=0 bias silu", NULL},
};
enum { FUSED, IM2COL, WITHOUT_SILU = 3, SEPARATE_CONV, SEPARATE_BIAS_SILU };

static void figures_003(demo_state *s)
{
    char text[MAX_TEXT] = "no such row on this backend";
    if (s->measured[IM2COL] != NULL)
        snprintf(text, sizeof text, "%.1f times the time of the direct row",
                 number_of(s, IM2COL, "ms") / number_of(s, FUSED, "ms"));
    add_figure(s, "padding, im2col and matrix product", "\"high throughput\"", text);
    add_figure(s, "products a value", "K C = 1024, with the zeros", "K = 4 in the direct rows");
    snprintf(text, sizeof text, "%+.0f %%", 100 * (number_of(s, FUSED, "ms") / number_of(s, WITHOUT_SILU, "ms") - 1));
    add_figure(s, "time that SiLU adds", "about +5 %", text);
    snprintf(text, sizeof text, "%.2f of the time",
             (number_of(s, SEPARATE_CONV, "ms") + number_of(s, SEPARATE_BIAS_SILU, "ms")) / number_of(s, FUSED, "ms"));
    add_figure(s, "bias and SiLU apart, beside fused", "4 passes over memory for 2", text);
}

/* ---- 004: hyper-connections, backward -------------------------------------------------------------------- */

static const job jobs_004[] = {
    {"phi not scaled", "mhc_pre", "backward", "bf16 T=128 n=4 D=128 phi~1 gamma dh_res_logits", NULL},
    {"phi scaled", "mhc_pre", "backward", "bf16 T=128 n=4 D=128 gamma dh_res_logits", NULL},
};
enum { DOCUMENT_JOB };
/* dx within rounding, the parameters' gradients within f32 sums. The bounds are those of
 * tests/unit/test_mhc_accuracy.c. */
static const double max_ulp = 0.35, max_relative = 1e-4;

static void add_dx_figures(demo_state *s, const char *what, const error_measures *m, const char *const documents[4])
{
    char name[96], text[MAX_TEXT];
    snprintf(name, sizeof name, "%smax error of dx", what);
    snprintf(text, sizeof text, "%.3g, of values up to %.3g", m->max, m->largest);
    add_figure(s, name, documents[0], text);
    snprintf(name, sizeof name, "%smean error of dx", what);
    snprintf(text, sizeof text, "%.2g", m->mean);
    add_figure(s, name, documents[1], text);
    snprintf(name, sizeof name, "%selements off by more than 1.0", what);
    snprintf(text, sizeof text, "%lld of %lld", (long long)m->above, (long long)m->elements);
    add_figure(s, name, documents[2], text);
    snprintf(name, sizeof name, "%selements off by less than 0.1", what);
    snprintf(text, sizeof text, "%.1f %%", 100 * (double)m->below / (double)m->elements);
    add_figure(s, name, documents[3], text);
}

/* Reproduces the document's error: its launch computed only stream 0, and the other streams stayed zero. */
static void add_fault_figures(demo_state *s, const double *y, const double *r, const cot_tensor *dx)
{
    static const char *const documents[] = {"45.25", "2.36", "32179 of 65536", "about 20 %"};
    const int64_t elements = cot_elements(dx), D = dx->shape[3], n = dx->shape[2];
    double *faulty = allocate((size_t)elements, sizeof *faulty);
    for (int64_t i = 0; i < elements; i++)
        faulty[i] = i / D % n == 0 ? y[i] : 0;
    const error_measures m = measure_errors(faulty, r, elements, 0, elements, elements, dx->dtype);
    add_dx_figures(s, "stream 0 alone: ", &m, documents);
    free(faulty);
}

static bool inspect_dx(demo_state *s, const verification *v, const cot_tensor *dx, int f)
{
    static const char *const documents[] = {"0.25", "0.0063", "0 of 65536", "about 99.9 %"};
    const int64_t elements = cot_elements(dx), D = dx->shape[3], n = dx->shape[2];
    const double *r = v->ref.expected[f];
    double *y = tensor_values(dx);
    bool good = true;
    add_fault_figures(s, y, r, dx);
    const error_measures all = measure_errors(y, r, elements, 0, elements, elements, dx->dtype);
    add_dx_figures(s, "", &all, documents);
    for (int64_t i = 0; i < n; i++) {
        char name[64], text[MAX_TEXT];
        const error_measures m = measure_errors(y, r, elements, i * D, (i + 1) * D, n * D, dx->dtype);
        snprintf(name, sizeof name, "dx of stream %d, units of bf16", (int)i);
        snprintf(text, sizeof text, "rms %.2g, max error %.3g", m.rms_ulp, m.max);
        add_figure(s, name, i == 0 ? "\"no error\"" : "max error 10 to 32", text);
        good = good && m.above == 0 && m.rms_ulp <= max_ulp;
    }
    free(y);
    return good;
}

static bool inspect_004(demo_state *s, int number, const verification *v, const void *args)
{
    static const struct {
        const char *name, *document;
    } parameters[] = {{"dphi", "max error < 1e-5"},
                      {"dalpha", "max error < 1e-4"},
                      {"dbias", "max error < 1e-5"},
                      {"dgamma", "max error < 1e-4"}};
    const cot_direction *direction = case_direction(v->ref.cases, &v->c);
    bool good = true;
    if (number != DOCUMENT_JOB)
        return true;
    const int f = cot_field_index(direction, "dx");
    good = inspect_dx(s, v, cot_field_tensor(&direction->fields[f], (void *)args), f);
    for (size_t i = 0; i < sizeof parameters / sizeof *parameters; i++) {
        char text[MAX_TEXT];
        const int g = cot_field_index(direction, parameters[i].name);
        const cot_tensor *view = cot_field_tensor(&direction->fields[g], (void *)args);
        const int64_t elements = cot_elements(view);
        double *y = tensor_values(view);
        const error_measures m = measure_errors(y, v->ref.expected[g], elements, 0, elements, elements, view->dtype);
        snprintf(text, sizeof text, "max error %.2g, of values up to %.3g; relative %.2g", m.max, m.largest,
                 m.relative);
        add_figure(s, parameters[i].name, parameters[i].document, text);
        good = good && m.relative <= max_relative;
        free(y);
    }
    if (!good)
        printf("  FAILED: more than %g units of bf16 in dx, or than %g of the norm elsewhere\n", max_ulp, max_relative);
    return good;
}

/* ---- all of them ----------------------------------------------------------------------------------------- */

#define JOBS(number) jobs_##number, sizeof jobs_##number / sizeof *jobs_##number
static const demo demos[] = {
    {"000", "causal conv1d, backward", "B=3 D=70 T=517", "B=3 D=70 T=520", "B=2 D=20 T=70", JOBS(000), figures_000,
     NULL},
    {"001", "attention, backward", "H=4 T=193", NULL, "H=2 T=40", JOBS(001), figures_001, NULL},
    {"002", "dropout and bias, backward", "R=519 D=330", NULL, "R=70 D=33", JOBS(002), figures_002, NULL},
    {"003", "causal conv1d, forward", NULL, NULL, "D=40", JOBS(003), figures_003, NULL},
    {"004", "hyper-connections, backward", NULL, NULL, NULL, JOBS(004), NULL, inspect_004},
};
const char demo_numbers[] = "000 001 002 003 004";

static const demo *find_demo(const char *number)
{
    for (size_t i = 0; i < sizeof demos / sizeof *demos; i++)
        if (strcmp(demos[i].number, number) == 0)
            return &demos[i];
    return NULL;
}

const char *demo_title(const char *number)
{
    const demo *d = find_demo(number);
    return d != NULL ? d->title : NULL;
}

static bool has_kernels(const char *name, cot_backend backend)
{
    for (int i = 0; i < cot_op_count; i++)
        for (int k = 0; k < cot_ops[i]->kernel_count; k++)
            if (strcmp(cot_ops[i]->name, name) == 0 && cot_ops[i]->kernels[k].backend == backend)
                return true;
    return false;
}

const char *demo_missing_op(const char *number, cot_backend backend)
{
    const demo *d = find_demo(number);
    for (int i = 0; i < d->job_count; i++)
        if (!has_kernels(d->jobs[i].op, backend))
            return d->jobs[i].op;
    return NULL;
}

json_t *demo_run(const demo_options *options, bool *good)
{
    demo_state s = {.options = options, .d = find_demo(options->number), .rows = json_array(), .good = true};
    for (int i = 0; i < s.d->job_count; i++) {
        if (options->progress != NULL)
            options->progress(options->context, (double)i / s.d->job_count, s.d->jobs[i].what);
        run_job(&s, i);
    }
    if (options->progress != NULL)
        options->progress(options->context, 1, "");
    print_head(&s);
    for (int i = 0; i < s.d->job_count; i++)
        if (s.measured[i] != NULL)
            print_row(&s, i);
    if (s.d->figures != NULL && json_array_size(s.rows) > 0)
        s.d->figures(&s);
    if (json_array_size(s.rows) > 0)
        print_figures(&s);
    printf("\n%s\n", !s.good ? "FAILED" : options->verify ? "within the bounds" : "not compared with the oracle");
    *good = s.good;
    return s.rows;
}
