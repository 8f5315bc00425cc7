/* SPDX-License-Identifier: Apache-2.0
 *
 * test_floating_point_state.c: the floating-point state of the calling thread does not affect a call, and a call
 * does not change it. Every kernel that this processor can run computes small cases of its op in every rounding
 * mode, with and without flushing of subnormal numbers, with trapping exceptions. The cases come from the ops'
 * tables. */
#include "support.h"

#include "check/bound_case.h"
#include "check/check.h"
#include "core/cpu_features.h"
#include "core/tensor.h"

#include <cotangent/dropout.h>
#include <fenv.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- states ------------------------------------------------------------------------------------------- */

static const int roundings[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};

#if defined(__x86_64__)
enum { FLUSHES = 4, FLUSH_OUTPUTS = 0x8000, FLUSH_INPUTS = 0x40 }; /* MXCSR: FTZ, DAZ */
#else
enum { FLUSHES = 1 };
#endif
enum { STATES = 4 * FLUSHES };

/* Every second state traps exceptions. All states have one sticky flag set. A call must not clear it or set others. */
static void enter_state(int state)
{
    fesetround(roundings[state % 4]);
    feclearexcept(FE_ALL_EXCEPT);
    feraiseexcept(FE_UNDERFLOW);
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | (state / 4 & 1 ? FLUSH_OUTPUTS : 0) | (state / 4 & 2 ? FLUSH_INPUTS : 0));
#endif
#if defined(__GLIBC__)
    if (state % 2 != 0)
        feenableexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW);
#endif
}

typedef struct float_state {
    int rounding, raised, trapping;
    unsigned mxcsr;
    uint16_t x87_control, x87_status;
} float_state;

static float_state current_state(void)
{
    float_state now;
    memset(&now, 0, sizeof now); /* padding, because states are compared as bytes */
    now.rounding = fegetround();
    now.raised = fetestexcept(FE_ALL_EXCEPT);
#if defined(__GLIBC__)
    now.trapping = fegetexcept();
#endif
#if defined(__x86_64__)
    now.mxcsr = _mm_getcsr();
    __asm__ volatile("fnstcw %0" : "=m"(now.x87_control));
    __asm__ volatile("fnstsw %0" : "=m"(now.x87_status));
#endif
    return now;
}

static void describe_state(int state, char text[64])
{
    static const char *const names[] = {"to nearest", "downward", "upward", "toward zero"};
    snprintf(text, 64, "rounding %s%s%s%s", names[state % 4], state / 4 & 1 ? ", FTZ" : "",
             state / 4 & 2 ? ", DAZ" : "", state % 2 != 0 ? ", traps" : "");
}

/* ---- the calls ---------------------------------------------------------------------------------------- */

enum { CASES_PER_KERNEL = 3, MOST_ELEMENTS = 20000, SHOWN = 20 };

typedef struct visitor {
    const cot_op_cases *cases;
    cot_queue *explain_queue;
    int case_count[COT_MAX_KERNELS];
    int64_t calls, wrong_bits, wrong_states;
} visitor;

/* Whether the case has several elements and a last axis whose size is no power of two. For powers of two, constants
 * such as 1/sqrt(d) and 1/(1-p) are exact in every floating-point state. */
static bool has_inexact_constants(const cot_direction *direction, const cot_case *c)
{
    const cot_tensor *first = cot_field_tensor(&direction->fields[0], (void *)c->args);
    const int64_t last = first->rank > 0 ? first->shape[first->rank - 1] : 0;
    return cot_elements(first) > 1 && (last & (last - 1)) != 0;
}

static void compare_in_state(visitor *v, const reference *ref, const cot_kernel *kernel, const bound_case *expected,
                             cot_queue *queue, int state, const char *text)
{
    const cot_direction *direction = case_direction(ref->cases, ref->c);
    char in[64];
    bound_case b;
    describe_state(state, in);
    bound_case_make(&b, ref, false);
    fenv_t usual;
    fegetenv(&usual);
    enter_state(state);
    const float_state before = current_state();
    const cot_status status = bound_case_run(&b, direction, queue); /* the workspace query, then the call */
    const float_state after = current_state();
    fesetenv(&usual);
    assert_ok(status);
    v->calls++;
    if (memcmp(&before, &after, sizeof before) != 0 && v->wrong_states++ < SHOWN)
        print_error("%s, %s, %s: the caller's state changed\n", kernel->name, text, in);
    for (int f = 0; f < direction->field_count; f++) {
        const storage *got = &b.fields[f], *known = &expected->fields[f];
        if (got->memory == NULL || memcmp(got->memory, known->memory, got->bytes) == 0)
            continue;
        if (v->wrong_bits++ < SHOWN)
            print_error("%s, %s, %s: other bits in %s\n", kernel->name, text, in, direction->fields[f].name);
        break;
    }
    bound_case_free(&b, direction);
}

static void run_in_states(visitor *v, const reference *ref, const cot_kernel *kernel, const char *text)
{
    const cot_direction *direction = case_direction(ref->cases, ref->c);
    char forced[160];
    snprintf(forced, sizeof forced, "%s=%s", ref->cases->op->name, kernel->name);
    cot_queue *queues[] = {make_queue(forced, 1), make_queue(forced, 2)};
    bound_case expected;
    bound_case_make(&expected, ref, false);
    assert_ok(bound_case_run(&expected, direction, queues[0]));
    for (int state = 0; state < STATES; state++)
        compare_in_state(v, ref, kernel, &expected, queues[state / 4 % 2], state, text);
    bound_case_free(&expected, direction);
    cot_queue_destroy(queues[0]);
    cot_queue_destroy(queues[1]);
}

static bool visit(void *context, const cot_case *c)
{
    visitor *v = context;
    const cot_direction *direction = case_direction(v->cases, c);
    cot_choice choices[COT_MAX_KERNELS];
    int count = 0;
    if (!(c->uses & COT_CASE_CHECK) || !case_is_within(direction, c, MOST_ELEMENTS) ||
        !has_inexact_constants(direction, c))
        return true;
    assert_ok(cot_op_explain(direction, v->explain_queue, c->args, choices, &count));
    bool made = false;
    reference ref;
    char text[256];
    for (int i = 0; i < count; i++) {
        int *case_count = &v->case_count[choices[i].kernel - v->cases->op->kernels];
        if (choices[i].refusal != NULL || *case_count >= CASES_PER_KERNEL)
            continue;
        if (!made) {
            ref = reference_make(v->cases, c);
            describe_case(v->cases, c, text, sizeof text);
            made = true;
        }
        ++*case_count;
        run_in_states(v, &ref, choices[i].kernel, text);
    }
    if (made)
        reference_free(&ref);
    return true;
}

static void calls_do_not_see_the_callers_state(void **test_state)
{
    (void)test_state;
    for (int op = 0; op < cot_op_count; op++) {
        visitor v = {.cases = cot_all_cases[op], .explain_queue = make_queue("", 1)};
        v.cases->each(visit, &v);
        for (int k = 0; k < v.cases->op->kernel_count; k++)
            if ((v.cases->op->kernels[k].isa & ~cot_cpu_features()) == 0)
                assert_true(v.case_count[k] > 0);
        if (v.wrong_bits + v.wrong_states > 0)
            fail_msg("%s: %" PRId64 " of %" PRId64 " calls gave other bits, %" PRId64 " changed the state",
                     v.cases->op->name, v.wrong_bits, v.calls, v.wrong_states);
        cot_queue_destroy(v.explain_queue);
    }
}

/* A failed call also restores the state: without a queue, without arguments, with refused arguments. */
static void refusals_restore_the_state(void **test_state)
{
    (void)test_state;
    cot_queue *queue = make_queue("", 1);
    for (int op = 0; op < cot_op_count; op++) {
        for (int d = 0; d < cot_ops[op]->direction_count; d++) {
            const cot_direction *direction = &cot_ops[op]->directions[d];
            _Alignas(16) char args[COT_MAX_ARGS] = {0};
            memcpy(args, &direction->args_size, sizeof direction->args_size);
            for (int state = 0; state < STATES; state++) {
                size_t bytes;
                fenv_t usual;
                fegetenv(&usual);
                enter_state(state);
                const float_state before = current_state();
                const cot_status statuses[] = {
                    cot_op_run(direction, queue, args),
                    cot_op_run(direction, queue, NULL),
                    cot_op_run(direction, NULL, args),
                    cot_op_workspace(direction, queue, args, &bytes),
                    cot_op_workspace(direction, queue, args, NULL),
                };
                const float_state after = current_state();
                fesetenv(&usual);
                for (size_t i = 0; i < COUNT(statuses); i++)
                    assert_int_not_equal(statuses[i], COT_OK);
                assert_memory_equal(&before, &after, sizeof before);
            }
        }
    }
    cot_queue_destroy(queue);
}

static void the_scale_of_dropout_is_one_number(void **test_state)
{
    (void)test_state;
    for (int percent = 0; percent <= 100; percent++) {
        const double expected = cot_dropout_scale(percent / 100.0);
        for (int state = 0; state < STATES; state++) {
            fenv_t usual;
            const volatile double p = percent / 100.0; /* computed before the state changes */
            fegetenv(&usual);
            enter_state(state);
            const float_state before = current_state();
            const double got = cot_dropout_scale(p);
            const float_state after = current_state();
            fesetenv(&usual);
            assert_memory_equal(&got, &expected, sizeof got);
            assert_memory_equal(&before, &after, sizeof before);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_do_not_see_the_callers_state),
        cmocka_unit_test(refusals_restore_the_state),
        cmocka_unit_test(the_scale_of_dropout_is_one_number),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
