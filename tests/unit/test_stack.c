/* SPDX-License-Identifier: Apache-2.0
 *
 * test_stack.c: calls fit into small stacks. musl gives a thread 128 KB. Every kernel that this processor can run
 * may use at most 64 KB in every case, counted from the public call. For other kernels, the compiler limits the
 * frame size (CMakeLists.txt). The cases come from the ops' tables. */
#include "support.h"

#include "check/bound_case.h"
#include "check/check.h"
#include "core/cpu_features.h"
#include "core/tensor.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum {
    MAX_DEPTH_BYTES = 64 << 10,
    MUSL_STACK_BYTES = 128 << 10, /* default of musl */
    PAINTED_BYTES = 1 << 20,      /* stack for measurements, large enough for a kernel that exceeds the limit */
    PAINT = 0xa5,
    MAX_ELEMENTS = 20000
};

typedef struct call {
    const cot_direction *direction;
    cot_queue *queue;
    bound_case *b; /* NULL: the thread makes no call */
    cot_status status;
    char message[256];
} call;

static void *run_call(void *memory)
{
    call *c = memory;
    if (c->b == NULL)
        return NULL;
    c->status = bound_case_run(c->b, c->direction, c->queue);
    cot_error_copy(c->message, sizeof c->message); /* the message is thread-local */
    return NULL;
}

/* Runs the call in a thread with this stack. Returns the number of stack bytes that were used. */
static int64_t run_on_stack(char *stack, size_t bytes, call *c)
{
    pthread_attr_t attributes;
    pthread_t thread;
    char painted[64];
    memset(painted, PAINT, sizeof painted);
    memset(stack, PAINT, bytes);
    assert_int_equal(pthread_attr_init(&attributes), 0);
    assert_int_equal(pthread_attr_setstack(&attributes, stack, bytes), 0);
    assert_int_equal(pthread_create(&thread, &attributes, run_call, c), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    pthread_attr_destroy(&attributes);
    size_t untouched = 0;
    while (untouched < bytes && memcmp(stack + untouched, painted, sizeof painted) == 0)
        untouched += sizeof painted;
    return (int64_t)(bytes - untouched);
}

/* Allocates a stack with an inaccessible guard page below it. */
static char *make_stack(size_t bytes)
{
    enum { GUARD = 4096 };
    char *memory = mmap(NULL, GUARD + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    assert_int_equal(mprotect(memory, GUARD, PROT_NONE), 0);
    return memory + GUARD;
}

typedef struct visitor {
    const cot_op_cases *cases;
    cot_queue *explain_queue;
    unsigned uses;
    int threads;
    char *stack;
    size_t stack_bytes;
    int64_t empty_thread_depth, calls; /* depth of a thread without a call; number of calls */
    int64_t deepest[COT_MAX_KERNELS];
    char deepest_case[COT_MAX_KERNELS][256];
} visitor;

static void run_kernel(visitor *v, const reference *ref, const cot_kernel *kernel, const char *text)
{
    char forced[160];
    snprintf(forced, sizeof forced, "%s=%s", ref->cases->op->name, kernel->name);
    cot_queue *queue = make_queue(forced, v->threads);
    bound_case b;
    bound_case_make(&b, ref, false);
    call c = {.direction = case_direction(ref->cases, ref->c), .queue = queue, .b = &b};
    const int64_t depth = run_on_stack(v->stack, v->stack_bytes, &c) - v->empty_thread_depth;
    if (c.status != COT_OK)
        fail_msg("%s, %s: %s", kernel->name, text, c.message);
    const int64_t k = kernel - v->cases->op->kernels;
    if (depth > v->deepest[k]) {
        v->deepest[k] = depth;
        snprintf(v->deepest_case[k], sizeof v->deepest_case[k], "%s", text);
    }
    v->calls++;
    bound_case_free(&b, c.direction);
    cot_queue_destroy(queue);
}

static bool visit(void *context, const cot_case *c)
{
    visitor *v = context;
    const cot_direction *direction = case_direction(v->cases, c);
    cot_choice choices[COT_MAX_KERNELS];
    int count = 0;
    char text[256];
    if (!(c->uses & v->uses) || !case_is_within(direction, c, MAX_ELEMENTS))
        return true;
    assert_ok(cot_op_explain(direction, v->explain_queue, c->args, choices, &count));
    describe_case(v->cases, c, text, sizeof text);
    reference ref = reference_make(v->cases, c);
    for (int i = 0; i < count; i++)
        if (choices[i].refusal == NULL)
            run_kernel(v, &ref, choices[i].kernel, text);
    reference_free(&ref);
    return true;
}

static void no_kernel_goes_deeper_than_64_KB(void **state)
{
    (void)state;
    char *stack = make_stack(PAINTED_BYTES);
    call empty = {.b = NULL};
    int64_t too_deep = 0;
    for (int op = 0; op < cot_op_count; op++) {
        visitor v = {.cases = cot_all_cases[op],
                     .explain_queue = make_queue("", 1),
                     .uses = COT_CASE_CHECK,
                     .threads = 1, /* one thread: the whole call uses the painted stack */
                     .stack = stack,
                     .stack_bytes = PAINTED_BYTES,
                     .empty_thread_depth = run_on_stack(stack, PAINTED_BYTES, &empty)};
        v.cases->each(visit, &v);
        assert_true(v.calls > 0);
        for (int k = 0; k < v.cases->op->kernel_count; k++) {
            const cot_kernel *kernel = &v.cases->op->kernels[k];
            if ((kernel->isa & ~cot_cpu_features()) == 0)
                assert_true(v.deepest[k] > 0);
            if (v.deepest[k] > MAX_DEPTH_BYTES) {
                too_deep++;
                print_error("%s goes %" PRId64 " KB deep: %s\n", kernel->name, v.deepest[k] >> 10, v.deepest_case[k]);
            }
            if (getenv("COT_TEST_VERBOSE") != NULL)
                print_message("%-48s %6" PRId64 " bytes, %s\n", kernel->name, v.deepest[k], v.deepest_case[k]);
        }
        cot_queue_destroy(v.explain_queue);
    }
    if (too_deep > 0)
        fail_msg("%" PRId64 " kernels go deeper than %d KB", too_deep, MAX_DEPTH_BYTES >> 10);
}

/* Tests the caller's stack and those of OpenMP's threads. For the latter, OMP_STACKSIZE=128k must be set before the
 * program starts. */
static void calls_run_in_stacks_of_128_KB(void **state)
{
    (void)state;
    const char *size = getenv("OMP_STACKSIZE");
    if (size == NULL || strcmp(size, "128k") != 0)
        fail_msg("OMP_STACKSIZE is %s, expected 128k", size != NULL ? size : "not set");
    char *stack = make_stack(MUSL_STACK_BYTES);
    for (int op = 0; op < cot_op_count; op++) {
        visitor v = {.cases = cot_all_cases[op],
                     .explain_queue = make_queue("", 1),
                     .uses = COT_CASE_QUICK,
                     .threads = 3,
                     .stack = stack,
                     .stack_bytes = MUSL_STACK_BYTES};
        v.cases->each(visit, &v);
        assert_true(v.calls > 0);
        cot_queue_destroy(v.explain_queue);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_kernel_goes_deeper_than_64_KB),
        cmocka_unit_test(calls_run_in_stacks_of_128_KB),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
