/* SPDX-License-Identifier: Apache-2.0
 * test_check_rules.c: tests which faults src/check/check.c detects. The test defines an op whose second kernel can have
 * one fault at a time. The op computes y = x*x and z = x/2, and the gradient of y. */
#include "support.h"

#include "check/bound_case.h"
#include "check/check.h"
#include "core/float16.h"
#include "core/queue.h"
#include "core/status.h"
#include "core/tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- the op ----------------------------------------------------------------------------------------------- */

typedef struct toy_args {
    size_t struct_size;
    cot_tensor x, dy, y, z;
    void *workspace;
    size_t workspace_bytes;
} toy_args;

typedef enum toy_fault {
    NONE,
    /* faults of the second kernel */
    WRONG_ELEMENT,
    WRONG_SECOND_OUTPUT,
    UNWRITTEN_ELEMENT,
    WORKSPACE_NOT_SET, /* assumes that the workspace is zero */
    NOISE,             /* exceeds the norm rule, but not the tolerance of any element */
    TRUNCATION,        /* truncates 16-bit outputs */
    BYTE_AFTER,        /* writes one byte after its output */
    BYTE_BEFORE,
    GAP, /* writes between the elements of an output */
    INPUT_WRITTEN,
    THREADS_CHANGE_BITS, /* different bits with one thread */
    THIRD_RUN,           /* different bits from the third run on */
    REFUSAL,             /* fails with a status */
    /* faults of both kernels, or of the oracle */
    WRONG_EVERYWHERE,
    WRONG_ORACLE,
    WRONG_GRADIENT, /* the oracle and the kernel have the same fault */
} toy_fault;

static toy_fault fault;
static int runs; /* runs of the second kernel */

static double square(double x)
{
    return fault == WRONG_EVERYWHERE ? x * x * 1.01 : x * x;
}

static void store(const cot_tensor *t, int64_t i, double value)
{
    cot_store_f64(t->data, t->dtype, i * t->stride[0], value);
}

static double load(const cot_tensor *t, int64_t i)
{
    return cot_load_f64(t->data, t->dtype, i * t->stride[0]);
}

/* Moves an element by one unit in the last place towards zero. */
static void round_toward_zero_by_one_ulp(const cot_tensor *t, int64_t i)
{
    char *at = (char *)t->data + i * t->stride[0] * (int64_t)cot_dtype_size(t->dtype);
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    bits--;
    memcpy(at, &bits, sizeof bits);
}

static cot_status forward_plain(cot_queue *queue, const void *problem, void *workspace)
{
    const toy_args *a = problem;
    (void)queue, (void)workspace;
    for (int64_t i = 0; i < a->x.shape[0]; i++) {
        store(&a->y, i, square(load(&a->x, i)));
        store(&a->z, i, load(&a->x, i) / 2);
    }
    return COT_OK;
}

static cot_status forward_faulty(cot_queue *queue, const void *problem, void *workspace)
{
    const toy_args *a = problem;
    const int64_t last = a->x.shape[0] - 1;
    const int64_t size = (int64_t)cot_dtype_size(a->y.dtype), stride = a->y.stride[0];
    char *y = a->y.data;
    runs++;
    if (fault == REFUSAL)
        return cot_fail(COT_UNSUPPORTED, "toy: not today");
    forward_plain(queue, problem, workspace);
    switch (fault) {
    case WRONG_ELEMENT: store(&a->y, 3, 1.01 * load(&a->y, 3)); break;
    case WRONG_SECOND_OUTPUT: store(&a->z, 3, 1.01 * load(&a->z, 3)); break;
    case UNWRITTEN_ELEMENT: memset(y + 7 * stride * size, 0xff, (size_t)size); break;
    case WORKSPACE_NOT_SET: store(&a->y, 5, load(&a->y, 5) + ((float *)workspace)[0]); break;
    case NOISE:
        for (int64_t i = 0; i <= last; i++)
            store(&a->y, i, load(&a->y, i) * (i % 2 ? 1 + 3 * 0x1p-24 : 1 - 3 * 0x1p-24));
        break;
    case TRUNCATION: /* truncates a rounded-up element if the truncated value is within the tolerance */
        for (int64_t i = 0; i <= last; i++) {
            const double exact = load(&a->x, i) * load(&a->x, i), above = load(&a->y, i);
            if (above <= exact)
                continue;
            round_toward_zero_by_one_ulp(&a->y, i);
            if (exact - load(&a->y, i) > 0.99 * 0x1p-8 * exact)
                store(&a->y, i, above);
        }
        break;
    case BYTE_AFTER: y[(last * stride + 1) * size] = 0; break;
    case BYTE_BEFORE: y[-1] = 0; break;
    case GAP:
        if (stride > 1)
            y[(4 * stride + 1) * size] = 0;
        break;
    case INPUT_WRITTEN: store(&a->x, 2, 0.5); break;
    case THREADS_CHANGE_BITS:
        if (cot_queue_threads(queue) == 1)
            round_toward_zero_by_one_ulp(&a->y, 1);
        break;
    case THIRD_RUN:
        if (runs > 2)
            round_toward_zero_by_one_ulp(&a->y, 1);
        break;
    default: break;
    }
    return COT_OK;
}

static cot_status backward_plain(cot_queue *queue, const void *problem, void *workspace)
{
    const toy_args *a = problem;
    (void)queue, (void)workspace;
    for (int64_t i = 0; i < a->x.shape[0]; i++)
        store(&a->z, i, (fault == WRONG_GRADIENT ? 2.001 : 2) * load(&a->x, i) * load(&a->dy, i));
    return COT_OK;
}

static cot_status validate(const char *call, const void *args, bool with_data, void *problem)
{
    (void)call, (void)with_data;
    memcpy(problem, args, sizeof(toy_args));
    return COT_OK;
}

static const char *admit(const void *problem)
{
    (void)problem;
    return NULL;
}

static const char *admit_none(const void *problem)
{
    (void)problem;
    return "it supports nothing";
}

static double cost(const void *problem)
{
    (void)problem;
    return 1;
}

static size_t workspace_bytes(const void *problem)
{
    (void)problem;
    return 64;
}

static const cot_op toy;

#define FIELD(name, member, role)                     \
    {                                                 \
        name, offsetof(toy_args, member), role, false \
    }
static const cot_field forward_fields[] = {FIELD("x", x, COT_INPUT), FIELD("y", y, COT_OUTPUT),
                                           FIELD("z", z, COT_OUTPUT)};
static const cot_field backward_fields[] = {FIELD("dy", dy, COT_INPUT), FIELD("x", x, COT_INPUT),
                                            FIELD("dx", z, COT_OUTPUT)};

#define DIRECTION(direction_name, direction_fields)                                                                 \
    {                                                                                                               \
        .name = direction_name, .call = "toy_" direction_name, .op = &toy, .args_size = sizeof(toy_args),           \
        .problem_size = sizeof(toy_args), .workspace_offset = offsetof(toy_args, workspace),                        \
        .workspace_bytes_offset = offsetof(toy_args, workspace_bytes), .signature = "", .fields = direction_fields, \
        .field_count = COUNT(direction_fields), .validate = validate                                                \
    }
static const cot_direction directions[] = {DIRECTION("forward", forward_fields),
                                           DIRECTION("backward", backward_fields)};

enum { UNKNOWN_INSTRUCTION_SET = 1 << 10 }; /* a bit without an instruction set */
static const cot_kernel kernels[] = {
    {"toy_fwd_plain", 0, COT_BACKEND_CPU, 0, COT_F32, admit, cost, forward_plain, NULL, NULL, NULL},
    {"toy_fwd_faulty", 0, COT_BACKEND_CPU, 0, COT_F32, admit, cost, forward_faulty, workspace_bytes, NULL, NULL},
    {"toy_fwd_missing", 0, COT_BACKEND_CPU, UNKNOWN_INSTRUCTION_SET, COT_F32, admit, cost, forward_plain, NULL, NULL,
     NULL},
    {"toy_fwd_idle", 0, COT_BACKEND_CPU, 0, COT_F32, admit_none, cost, forward_plain, NULL, NULL, NULL},
    {"toy_bwd_plain", 1, COT_BACKEND_CPU, 0, COT_F32, admit, cost, backward_plain, NULL, NULL, NULL},
};
static const cot_op toy = {"toy", directions, 2, kernels, COUNT(kernels)};

/* ---- its cases and its oracle ------------------------------------------------------------------------------ */

static void visit_one(cot_case_visitor *v, int direction, unsigned uses, cot_dtype dtype, int64_t size, int64_t stride)
{
    cot_case c = {.direction = direction, .uses = uses, .seed = 11, .layout = stride > 1 ? "strided" : "packed"};
    toy_args *a = (toy_args *)c.args;
    const cot_tensor plain = {.dtype = dtype, .rank = 1, .shape = {size}, .stride = {1}};
    COT_INIT(a);
    a->x = a->z = plain;
    if (direction == 0) {
        a->y = plain;
        a->y.stride[0] = stride;
    } else {
        a->dy = plain;
    }
    snprintf(c.shape, sizeof c.shape, "N%d", (int)size);
    cot_visit_case(v, &c);
}

static bool y_nondeterministic;

static bool (*visit_unordered)(void *context, const cot_case *);

static bool mark_unordered(void *context, const cot_case *c)
{
    cot_case marked = *c;
    marked.nondeterministic[1] = c->direction == 0 && y_nondeterministic;
    return visit_unordered(context, &marked);
}

static void each(bool (*visit)(void *context, const cot_case *), void *context)
{
    visit_unordered = visit;
    cot_case_visitor v = {.visit = mark_unordered, .context = context};
    visit_one(&v, 0, COT_CASE_CHECK | COT_CASE_QUICK, COT_F32, 5000, 1);
    visit_one(&v, 0, COT_CASE_CHECK | COT_CASE_QUICK, COT_F32, 20, 2);
    visit_one(&v, 0, COT_CASE_CHECK, COT_BF16, 5000, 1);
    visit_one(&v, 1, COT_CASE_CHECK | COT_CASE_QUICK, COT_F32, 300, 1);
    visit_one(&v, 1, COT_CASE_CHECK | COT_CASE_QUICK | COT_CASE_GRADIENT, COT_F64, 9, 1);
}

static void forward_oracle(const void *args, void *magnitudes)
{
    const toy_args *a = args, *of = magnitudes;
    for (int64_t i = 0; i < a->x.shape[0]; i++) {
        const double x = load(&a->x, i);
        store(&a->y, i, fault == WRONG_ORACLE ? 1.01 * x * x : x * x);
        store(&of->y, i, x * x);
        if (cot_is_present(&a->z)) {
            store(&a->z, i, x / 2);
            store(&of->z, i, fabs(x / 2));
        }
    }
}

static void backward_oracle(const void *args, void *magnitudes)
{
    const toy_args *a = args, *of = magnitudes;
    for (int64_t i = 0; i < a->x.shape[0]; i++) {
        const double slope = (fault == WRONG_GRADIENT ? 2.001 : 2) * load(&a->x, i) * load(&a->dy, i);
        store(&a->z, i, slope);
        store(&of->z, i, fabs(slope));
    }
}

static void (*const oracles[])(const void *, void *) = {forward_oracle, backward_oracle};

static int primal(int direction)
{
    return direction == 1 ? 0 : -1;
}

static void primal_options(int direction, const void *args, void *primal_args)
{
    (void)direction, (void)args, (void)primal_args;
}

static const cot_op_cases toy_cases = {.op = &toy,
                                       .each = each,
                                       .options_help = "",
                                       .oracles = oracles,
                                       .primal = primal,
                                       .primal_options = primal_options};

/* Replaces src/ops/ops.c and src/cases/cases.c: check_run iterates over these. */
const cot_op *const cot_ops[] = {&toy};
const int cot_op_count = 1;
const cot_op_cases *const cot_all_cases[] = {&toy_cases};

/* ---- running the check -------------------------------------------------------------------------------------- */

static char printed[20000];

/* Runs check_run. `printed` receives its output to stdout and stderr. */
static int64_t check(const check_options *options, toy_fault planted)
{
    FILE *file = tmpfile();
    assert_non_null(file);
    fflush(stdout);
    const int out = dup(STDOUT_FILENO), err = dup(STDERR_FILENO);
    dup2(fileno(file), STDOUT_FILENO);
    dup2(fileno(file), STDERR_FILENO);
    fault = planted;
    runs = 0;
    const int64_t failed = check_run(options);
    fault = NONE;
    fflush(stdout);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    close(out);
    close(err);
    rewind(file);
    printed[fread(printed, 1, sizeof printed - 1, file)] = '\0';
    fclose(file);
    return failed;
}

static void assert_printed(const char *text)
{
    if (strstr(printed, text) == NULL)
        fail_msg("expected '%s' in:\n%s", text, printed);
}

static const check_options default_options = {.repeat = 2, .jobs = 1};

static void passes_correct_kernels(void **state)
{
    (void)state;
    check_options o = default_options;
    for (o.jobs = 1; o.jobs <= 3; o.jobs++) {
        assert_int_equal(check(&o, NONE), 0);
        assert_null(strstr(printed, "FAILED"));
        assert_printed("toy_fwd_faulty");
        assert_printed(" 0 failed");
    }
    o.quick = true;
    assert_int_equal(check(&o, NONE), 0);
}

/* Plants each fault and checks the message; also with one thread and with --report. */
static void refuses_each_fault(void **state)
{
    (void)state;
    static const struct {
        toy_fault fault;
        const char *kernel, *only, *message;
        int repeat;
    } faults[] = {
        {WRONG_ELEMENT, "toy_fwd_faulty", "f32 packed", "y: 1 of 5000 elements beyond the tolerance", 2},
        {WRONG_SECOND_OUTPUT, "toy_fwd_faulty", "f32 packed", "z: 1 of 5000 elements beyond the tolerance", 2},
        {UNWRITTEN_ELEMENT, "toy_fwd_faulty", "strided", "y: 1 of 20 elements beyond the tolerance", 2},
        {WORKSPACE_NOT_SET, "toy_fwd_faulty", "strided", "y: 1 of 20 elements beyond the tolerance", 2},
        {NOISE, "toy_fwd_faulty", "f32 packed", "y: error norm of", 2},
        {TRUNCATION, "toy_fwd_faulty", "bf16", "y: rounding is biased by -0.", 2},
        {BYTE_AFTER, "toy_fwd_faulty", "f32 packed", "y: byte 20000 outside the tensor's elements was written", 2},
        {BYTE_BEFORE, "toy_fwd_faulty", "f32 packed", "y: byte -1 outside the tensor's elements was written", 2},
        {GAP, "toy_fwd_faulty", "strided", "y: byte 36 outside the tensor's elements was written", 2},
        {INPUT_WRITTEN, "toy_fwd_faulty", "strided", "x: an input was written", 2},
        {THREADS_CHANGE_BITS, "toy_fwd_faulty", "strided", "y: other bits in run 2 ", 2},
        {THIRD_RUN, "toy_fwd_faulty", "strided", "y: other bits in run 3 ", 3},
        {REFUSAL, "toy_fwd_faulty", "strided", "toy: not today", 2},
        {WRONG_EVERYWHERE, "toy_fwd_plain", "f32 packed", "y: 5000 of 5000 elements beyond the tolerance", 2},
        {WRONG_ORACLE, "toy_fwd_plain", "f32 packed", "y: 5000 of 5000 elements beyond the tolerance", 2},
        {WRONG_GRADIENT, "oracle", "backward", "off from finite differences by 0.000", 2},
    };
    for (size_t i = 0; i < COUNT(faults); i++) {
        char line[300];
        check_options o = default_options;
        o.only = faults[i].only;
        o.repeat = faults[i].repeat;
        assert_int_equal(check(&o, NONE), 0);
        assert_true(check(&o, faults[i].fault) > 0);
        snprintf(line, sizeof line, "FAILED %s, ", faults[i].kernel);
        assert_printed(line);
        assert_printed(faults[i].message);
        o.report = true;
        assert_true(check(&o, faults[i].fault) > 0);
        if (faults[i].fault == WRONG_GRADIENT)
            continue;
        o.kernel = faults[i].kernel; /* forced */
        assert_true(check(&o, faults[i].fault) > 0);
        assert_printed(line);
        if (faults[i].fault < WRONG_EVERYWHERE) {
            o.kernel = "toy_fwd_plain"; /* the kernel without a fault */
            assert_int_equal(check(&o, faults[i].fault), 0);
        }
    }
}

/* A failure is counted per kernel and case; it sets the exit status of the program. Each of the two quick forward
 * cases also runs with a NaN and with an infinity in x, and with one of them under --quick. */
static void counts_failures(void **state)
{
    (void)state;
    check_options o = default_options;
    assert_int_equal(check(&o, REFUSAL), 3 + 2 * 2);
    assert_printed("toy_fwd_faulty                                        0 passed    7 failed");
    o.jobs = 2;
    assert_int_equal(check(&o, REFUSAL), 3 + 2 * 2);
    o.quick = true;
    assert_int_equal(check(&o, REFUSAL), 2 + 2);
    o.only = "strided";
    assert_int_equal(check(&o, REFUSAL), 1 + 1);
}

/* Only a call whose order of summation is not fixed may return different bits in every run. */
static void allows_other_bits_where_the_order_is_open(void **state)
{
    (void)state;
    check_options o = default_options;
    o.only = "strided";
    y_nondeterministic = true;
    assert_int_equal(check(&o, THREADS_CHANGE_BITS), 0);
    assert_true(check(&o, WRONG_ELEMENT) > 0);
    y_nondeterministic = false;
    assert_int_equal(check(&o, THREADS_CHANGE_BITS), 3); /* the case itself, with a NaN, and with an infinity */
}

/* A check that ran no kernel fails. */
static void refuses_to_check_nothing(void **state)
{
    (void)state;
    static const struct {
        const char *kernel, *only, *message;
    } cases[] = {
        {NULL, "zzz", "no case's description contains 'zzz'"},
        {"zzz", NULL, "no kernel's name contains 'zzz'"},
        {"toy_bwd_plain", "forward",
         "no kernel with 'toy_bwd_plain' in its name supports a case that contains 'forward'"},
        {"toy_fwd_idle", NULL, "no kernel with 'toy_fwd_idle' in its name supports a case"},
        {"toy_fwd_missing", NULL, "this machine lacks the instruction set of every kernel in question"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        check_options o = default_options;
        o.kernel = cases[i].kernel;
        o.only = cases[i].only;
        assert_int_equal(check(&o, NONE), CHECKED_NOTHING);
        assert_printed("cotangent check: nothing was checked: ");
        assert_printed(cases[i].message);
    }
    check_options o = default_options;
    o.kernel = "toy_fwd"; /* some of these kernels run */
    assert_int_equal(check(&o, NONE), 0);
    assert_printed(" skipped\n");
    o.backend = COT_BACKEND_CUDA;
    o.kernel = NULL;
    assert_true(check(&o, NONE) != 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(passes_correct_kernels),   cmocka_unit_test(refuses_each_fault),
        cmocka_unit_test(counts_failures),          cmocka_unit_test(allows_other_bits_where_the_order_is_open),
        cmocka_unit_test(refuses_to_check_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
