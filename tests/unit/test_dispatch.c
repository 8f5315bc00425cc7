/* SPDX-License-Identifier: Apache-2.0
 * test_dispatch.c: tests the dispatch of a call with an op of its own: the copy of the arguments, the choice of a
 * kernel, the workspace. */
#include "support.h"

#include "core/cpu_features.h"
#include "core/op.h"
#include "core/queue.h"
#include "core/status.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- an op whose kernels only record their call------------------------------------------------------- */

typedef struct toy_args {
    size_t struct_size;
    int32_t size, refuse_all;
    void *workspace;
    size_t workspace_bytes;
} toy_args;

/* Records the last call. */
static struct {
    const char *kernel;
    void *workspace;
    toy_args args;
    bool with_data;
    int plan[4];
} last_call;

static const char *admit_any(const void *problem)
{
    return ((const toy_args *)problem)->refuse_all ? "it was told to" : NULL;
}

static const char *admit_large(const void *problem)
{
    return ((const toy_args *)problem)->size < 10 ? "size is below 10" : admit_any(problem);
}

static double cost_slow(const void *problem)
{
    (void)problem;
    return 100;
}

static double cost_fast(const void *problem)
{
    (void)problem;
    return 10;
}

static double cost_setup(const void *problem)
{
    return 60 + ((const toy_args *)problem)->size; /* between the costs of the two other kernels, or above both */
}

static size_t workspace_of_size(const void *problem)
{
    return (size_t)((const toy_args *)problem)->size;
}

static int plans;

/* Writes a plan that depends on the problem. */
static size_t plan_of_size(const void *problem, void *plan)
{
    const int size = ((const toy_args *)problem)->size;
    memcpy(plan, (const int[4]){size, size + 1, size + 2, ++plans}, 4 * sizeof(int));
    return 3 * (size_t)size;
}

#define RUN(name)                                                                  \
    static cot_status name(cot_queue *queue, const void *problem, void *workspace) \
    {                                                                              \
        (void)queue;                                                               \
        last_call.kernel = #name;                                                  \
        last_call.workspace = workspace;                                           \
        last_call.args = *(const toy_args *)problem;                               \
        return COT_OK;                                                             \
    }
RUN(toy_slow)
RUN(toy_large)
RUN(toy_setup)
RUN(toy_twin)
RUN(toy_avx2)
RUN(toy_avx512)
RUN(toy_cuda)
RUN(toy_back)

static cot_status toy_planned(cot_queue *queue, const void *problem, void *workspace)
{
    (void)problem;
    last_call.kernel = "toy_planned";
    last_call.workspace = workspace;
    memcpy(last_call.plan, queue->plan, sizeof last_call.plan);
    return COT_OK;
}

static cot_status validate_toy(const char *call, const void *args, bool with_data, void *problem)
{
    const toy_args *a = args;
    last_call.with_data = with_data;
    if (a->size < 0)
        return cot_fail(COT_INVALID_SHAPE, "%s: size is %d, expected 0 or more", call, (int)a->size);
    *(toy_args *)problem = *a;
    return COT_OK;
}

static const cot_op toy;

static const cot_direction directions[] = {
    {.name = "forward",
     .call = "toy_forward",
     .op = &toy,
     .args_size = sizeof(toy_args),
     .problem_size = sizeof(toy_args),
     .workspace_offset = offsetof(toy_args, workspace),
     .workspace_bytes_offset = offsetof(toy_args, workspace_bytes),
     .validate = validate_toy},
    {.name = "backward",
     .call = "toy_backward",
     .op = &toy,
     .args_size = sizeof(toy_args),
     .problem_size = sizeof(toy_args),
     .workspace_offset = offsetof(toy_args, workspace),
     .workspace_bytes_offset = offsetof(toy_args, workspace_bytes),
     .validate = validate_toy},
    {.name = "update",
     .call = "toy_update",
     .op = &toy,
     .args_size = sizeof(toy_args),
     .problem_size = sizeof(toy_args),
     .workspace_offset = offsetof(toy_args, workspace),
     .workspace_bytes_offset = offsetof(toy_args, workspace_bytes),
     .validate = validate_toy},
};

/* clang-format off */
#define ROW(direction_, name_, backend_, isa_, admit_, cost_, workspace_) \
    {.name = #name_, .direction = direction_, .backend = backend_, .isa = isa_, .intermediate = COT_F32, \
     .admit = admit_, .cost = cost_, .workspace = workspace_, .run = name_}
static const cot_kernel kernels[] = {
    ROW(0, toy_slow, COT_BACKEND_CPU, 0, admit_any, cost_slow, NULL),
    ROW(0, toy_large, COT_BACKEND_CPU, 0, admit_large, cost_fast, workspace_of_size),
    ROW(0, toy_setup, COT_BACKEND_CPU, 0, admit_any, cost_setup, NULL),
    ROW(0, toy_twin, COT_BACKEND_CPU, 0, admit_large, cost_fast, NULL),
    ROW(0, toy_avx2, COT_BACKEND_CPU, COT_ISA_AVX2, admit_any, cost_slow, NULL),
    ROW(0, toy_avx512, COT_BACKEND_CPU, COT_ISA_AVX2 | COT_ISA_AVX512, admit_any, cost_slow, NULL),
    ROW(0, toy_cuda, COT_BACKEND_CUDA, 0, admit_any, cost_fast, NULL),
    ROW(1, toy_back, COT_BACKEND_CPU, 0, admit_any, cost_slow, workspace_of_size),
    {.name = "toy_planned", .direction = 2, .backend = COT_BACKEND_CPU, .intermediate = COT_F32,
     .admit = admit_any, .cost = cost_slow, .plan = plan_of_size, .run = toy_planned},
};
/* clang-format on */

static const cot_op toy = {
    .name = "toy",
    .directions = directions,
    .direction_count = COUNT(directions),
    .kernels = kernels,
    .kernel_count = COUNT(kernels),
};

static const cot_direction *const forward = &directions[0], *const backward = &directions[1],
                                  *const update = &directions[2];

static cot_queue *new_queue(const char *kernels_)
{
    cot_queue *queue = make_queue(kernels_, 0);
    memset(&last_call, 0, sizeof last_call);
    return queue;
}

static toy_args of_size(int32_t size)
{
    return (toy_args){.struct_size = sizeof(toy_args), .size = size};
}

/* ---- the argument struct ------------------------------------------------------------------------------ */

static void queue_and_args_are_required(void **state)
{
    (void)state;
    cot_queue *queue = new_queue("");
    const toy_args args = of_size(1);
    size_t bytes = 77;
    assert_fails(cot_op_run(forward, NULL, &args), COT_INVALID_ARGUMENT, "toy_forward: queue is null");
    assert_fails(cot_op_run(forward, queue, NULL), COT_INVALID_ARGUMENT, "toy_forward: args is null");
    assert_fails(cot_op_workspace(forward, NULL, &args, &bytes), COT_INVALID_ARGUMENT, "toy_forward: queue is null");
    assert_fails(cot_op_workspace(forward, queue, NULL, &bytes), COT_INVALID_ARGUMENT, "toy_forward: args is null");
    assert_fails(cot_op_workspace(forward, queue, &args, NULL), COT_INVALID_ARGUMENT,
                 "toy_forward_workspace: bytes is null");
    assert_int_equal(bytes, 77);
    assert_null(last_call.kernel);
    cot_queue_destroy(queue);
}

static void older_and_newer_structs_are_understood(void **state)
{
    (void)state;
    cot_queue *queue = new_queue("");
    char message[160];
    static const size_t impossible[] = {0, 1, sizeof(size_t), COT_MAX_ARGS + 1, SIZE_MAX};
    for (size_t i = 0; i < COUNT(impossible); i++) {
        toy_args args = of_size(1);
        args.struct_size = impossible[i];
        snprintf(message, sizeof message, "toy_forward: struct_size is %zu, expected %zu (use COT_INIT)", impossible[i],
                 sizeof args);
        assert_fails(cot_op_run(forward, queue, &args), COT_INVALID_ARGUMENT, message);
    }

    /* An older struct ends after `size`. The memory after it must not be read. */
    toy_args older = of_size(3);
    older.struct_size = offsetof(toy_args, refuse_all);
    older.refuse_all = 1;
    older.workspace = &older;
    assert_ok(cot_op_run(forward, queue, &older));
    assert_string_equal(last_call.kernel, "toy_setup");
    assert_int_equal(last_call.args.size, 3);
    assert_int_equal(last_call.args.refuse_all, 0);
    assert_null(last_call.args.workspace);

    /* A newer struct has unknown members. They are accepted if they are zero. */
    struct {
        toy_args known;
        char unknown[COT_MAX_ARGS - sizeof(toy_args)];
    } newer = {.known = of_size(4)};
    newer.known.struct_size = sizeof newer;
    assert_ok(cot_op_run(forward, queue, &newer));
    assert_int_equal(last_call.args.size, 4);
    newer.unknown[5] = 1;
    snprintf(message, sizeof message,
             "toy_forward: struct_size is %zu and byte %zu is set, but this library supports only %zu bytes",
             sizeof newer, sizeof(toy_args) + 5, sizeof(toy_args));
    assert_fails(cot_op_run(forward, queue, &newer), COT_INVALID_ARGUMENT, message);
    cot_queue_destroy(queue);
}

static void the_front_decides(void **state)
{
    (void)state;
    cot_queue *queue = new_queue("");
    size_t bytes = 77;
    toy_args args = of_size(-1);
    assert_fails(cot_op_run(forward, queue, &args), COT_INVALID_SHAPE, "toy_forward: size is -1, expected 0 or more");
    assert_true(last_call.with_data);
    assert_fails(cot_op_workspace(forward, queue, &args, &bytes), COT_INVALID_SHAPE,
                 "toy_forward: size is -1, expected 0 or more");
    assert_false(last_call.with_data);
    assert_int_equal(bytes, 77);
    assert_null(last_call.kernel);
    cot_queue_destroy(queue);
}

/* ---- the choice --------------------------------------------------------------------------------------- */

static void the_cheapest_kernel_that_admits_is_taken(void **state)
{
    (void)state;
    cot_queue *queue = new_queue("");
    toy_args args = of_size(0);
    assert_ok(cot_op_run(forward, queue, &args)); /* costs: 100, refused, 60, refused */
    assert_string_equal(last_call.kernel, "toy_setup");
    args.size = 10; /* costs: 100, 10, 70, 10; the first of two equal kernels wins */
    assert_ok(cot_op_run(forward, queue, &args));
    assert_string_equal(last_call.kernel, "toy_large");
    assert_ok(cot_op_run(backward, queue, &args));
    assert_string_equal(last_call.kernel, "toy_back");
    cot_queue_destroy(queue);
}

static void no_kernel_is_an_error(void **state)
{
    (void)state;
    cot_queue *queue = new_queue("");
    toy_args args = of_size(0);
    args.refuse_all = 1;
    last_call.kernel = NULL;
    assert_fails(cot_op_run(forward, queue, &args), COT_UNSUPPORTED,
                 "toy_forward: no kernel of this backend supports these arguments");
    assert_null(last_call.kernel);
    cot_queue_destroy(queue);
}

static void explain_gives_every_reason(void **state)
{
    (void)state;
    cot_queue *queue = new_queue("");
    cot_choice choices[COT_MAX_KERNELS];
    int count = 0;
    toy_args args = of_size(5);
    queue->isa = COT_ISA_AVX2;
    assert_ok(cot_op_explain(forward, queue, &args, choices, &count));
    assert_int_equal(count, 7);
    static const char *const reasons[] = {
        NULL,
        "size is below 10",
        NULL,
        "size is below 10",
        NULL,
        "this processor lacks AVX-512 (f, bw, dq, vl) or BMI2",
        "it is a kernel of another backend",
    };
    for (int k = 0; k < count; k++) {
        assert_ptr_equal(choices[k].kernel, &kernels[k]);
        assert_int_equal(choices[k].chosen, k == 2);
        if (reasons[k] == NULL)
            assert_null(choices[k].refusal);
        else
            assert_string_equal(choices[k].refusal, reasons[k]);
    }
    assert_true(choices[2].cost == 65);

    queue->isa = COT_ISA_PORTABLE;
    args.size = 20;
    assert_ok(cot_op_explain(forward, queue, &args, choices, &count));
    assert_string_equal(choices[4].refusal, "this processor lacks AVX2, FMA or F16C");
    assert_string_equal(choices[5].refusal, "this processor lacks AVX-512 (f, bw, dq, vl) or BMI2");
    assert_true(choices[1].chosen);
    assert_int_equal(choices[1].workspace_bytes, 20);
    assert_int_equal(choices[3].workspace_bytes, 0);
    cot_queue_destroy(queue);
}

static void a_forced_kernel_runs_or_reports_why_not(void **state)
{
    (void)state;
    toy_args args = of_size(20);
    cot_queue *queue = new_queue("other=x,toy=toy_slow");
    assert_ok(cot_op_run(forward, queue, &args));
    assert_string_equal(last_call.kernel, "toy_slow");
    assert_ok(cot_op_run(backward, queue, &args)); /* a forced name applies to its direction only */
    assert_string_equal(last_call.kernel, "toy_back");
    cot_queue_destroy(queue);

    static const struct {
        const char *kernels;
        cot_status status;
        const char *message;
    } cases[] = {
        {"toy=toy_large", COT_UNSUPPORTED, "toy_forward: the forced kernel toy_large refuses: size is below 10"},
        {"toy=toy_avx512", COT_UNSUPPORTED,
         "toy_forward: the forced kernel toy_avx512 refuses: this processor lacks AVX-512 (f, bw, dq, vl) or BMI2"},
        {"toy=toy_cuda", COT_UNSUPPORTED,
         "toy_forward: the forced kernel toy_cuda refuses: it is a kernel of another backend"},
        {"toy=toy_slo", COT_INVALID_ARGUMENT, "toy_forward: the forced kernel \"toy_slo\" is none of toy's"},
        {"toy=toy_slow2", COT_INVALID_ARGUMENT, "toy_forward: the forced kernel \"toy_slow2\" is none of toy's"},
    };
    args.size = 5;
    for (size_t i = 0; i < COUNT(cases); i++) {
        queue = new_queue(cases[i].kernels);
        queue->isa = COT_ISA_AVX2;
        size_t bytes = 77;
        assert_fails(cot_op_run(forward, queue, &args), cases[i].status, cases[i].message);
        assert_fails(cot_op_workspace(forward, queue, &args, &bytes), cases[i].status, cases[i].message);
        assert_int_equal(bytes, 77);
        assert_null(last_call.kernel);
        cot_queue_destroy(queue);
    }
}

/* ---- the workspace ------------------------------------------------------------------------------------ */

static void the_callers_workspace_is_checked_and_used(void **state)
{
    (void)state;
    static _Alignas(COT_ALIGNMENT) char memory[256];
    cot_queue *queue = new_queue("");
    char message[128];
    size_t bytes = 0;
    toy_args args = of_size(100);
    assert_ok(cot_op_workspace(forward, queue, &args, &bytes));
    assert_int_equal(bytes, 100);

    args.workspace_bytes = 100;
    assert_fails(cot_op_run(forward, queue, &args), COT_INVALID_ARGUMENT,
                 "toy_forward: workspace is null but workspace_bytes is 100");
    args.workspace = memory;
    args.workspace_bytes = 99;
    assert_fails(cot_op_run(forward, queue, &args), COT_WORKSPACE_TOO_SMALL,
                 "toy_forward: workspace has 99 bytes, 100 are needed");
    args.workspace = memory + 32;
    args.workspace_bytes = 200;
    snprintf(message, sizeof message, "toy_forward: workspace is at %p, expected a multiple of 64", args.workspace);
    assert_fails(cot_op_run(forward, queue, &args), COT_INVALID_LAYOUT, message);
    assert_null(last_call.kernel);
    args.workspace = memory;
    args.workspace_bytes = 100;
    assert_ok(cot_op_run(forward, queue, &args));
    assert_ptr_equal(last_call.workspace, memory);
    assert_null(queue->pool);

    /* Without the caller's workspace, the pool is used. A kernel that needs none gets none. */
    args = of_size(100);
    assert_ok(cot_op_run(forward, queue, &args));
    assert_non_null(last_call.workspace);
    assert_ptr_equal(last_call.workspace, queue->pool);
    args = of_size(5);
    assert_ok(cot_op_run(forward, queue, &args));
    assert_null(last_call.workspace);
    cot_queue_destroy(queue);
}

static void isa_names(void **state)
{
    (void)state;
    assert_string_equal(cot_isa_name(COT_ISA_PORTABLE), "portable");
    assert_string_equal(cot_isa_name(COT_ISA_AVX2), "avx2");
    assert_string_equal(cot_isa_name(COT_ISA_AVX2 | COT_ISA_AVX512), "avx512");
    assert_string_equal(cot_isa_name(COT_ISA_AVX2 | COT_ISA_AVX512 | COT_ISA_AVX512BF16), "avx512bf16");
    const uint32_t isa = cot_cpu_features();
    assert_true(!(isa & COT_ISA_AVX512) || (isa & COT_ISA_AVX2)); /* a level includes those below */
    assert_true(!(isa & COT_ISA_AVX512BF16) || (isa & COT_ISA_AVX512));
}

typedef struct allocator {
    int calls;
    size_t bytes;
    void *memory;
    pthread_t thread;
} allocator;

static void *allocate(void *context, size_t bytes)
{
    allocator *a = context;
    a->calls++;
    a->bytes = bytes;
    a->thread = pthread_self();
    return a->memory;
}

static void the_queues_allocator_gives_the_workspace(void **state)
{
    (void)state;
    static _Alignas(COT_ALIGNMENT) char memory[256];
    cot_queue *queue = new_queue("");
    char message[128];
    size_t bytes = 0;
    allocator a = {.memory = memory};
    toy_args args = of_size(100);
    assert_fails(cot_queue_set_allocator(NULL, allocate, &a), COT_INVALID_ARGUMENT,
                 "cot_queue_set_allocator: queue is null");
    assert_ok(cot_queue_set_allocator(queue, allocate, &a));
    assert_ok(cot_op_workspace(forward, queue, &args, &bytes)); /* a query allocates nothing */
    assert_int_equal(a.calls, 0);
    assert_ok(cot_op_run(forward, queue, &args));
    assert_int_equal(a.calls, 1);
    assert_int_equal(a.bytes, bytes);
    assert_true(pthread_equal(a.thread, pthread_self()));
    assert_ptr_equal(last_call.workspace, memory);
    assert_null(queue->pool);

    /* It is not called for a kernel without workspace, for the caller's own workspace, or for a refused call. */
    args = of_size(5);
    assert_ok(cot_op_run(forward, queue, &args));
    assert_null(last_call.workspace);
    static _Alignas(COT_ALIGNMENT) char own[256];
    args = of_size(100);
    args.workspace = own;
    args.workspace_bytes = sizeof own;
    assert_ok(cot_op_run(forward, queue, &args));
    assert_ptr_equal(last_call.workspace, own);
    args = of_size(100);
    args.workspace_bytes = 100;
    assert_fails(cot_op_run(forward, queue, &args), COT_INVALID_ARGUMENT,
                 "toy_forward: workspace is null but workspace_bytes is 100");
    args = of_size(-1);
    assert_fails(cot_op_run(forward, queue, &args), COT_INVALID_SHAPE, "toy_forward: size is -1, expected 0 or more");
    assert_int_equal(a.calls, 1);

    /* What it returns is checked before the kernel runs. */
    args = of_size(100);
    last_call.kernel = NULL;
    a.memory = NULL;
    assert_fails(cot_op_run(forward, queue, &args), COT_OUT_OF_MEMORY,
                 "toy_forward: the queue's allocator has no workspace of 100 bytes");
    a.memory = memory + 32;
    snprintf(message, sizeof message,
             "toy_forward: the queue's allocator returned a workspace at %p, expected a multiple of 64", a.memory);
    assert_fails(cot_op_run(forward, queue, &args), COT_INVALID_LAYOUT, message);
    assert_null(last_call.kernel);
    assert_int_equal(a.calls, 3);

    /* Without the allocator, the pool again. */
    assert_ok(cot_queue_set_allocator(queue, NULL, NULL));
    assert_ok(cot_op_run(forward, queue, &args));
    assert_int_equal(a.calls, 3);
    assert_ptr_equal(last_call.workspace, queue->pool);
    cot_queue_destroy(queue);
}

/* Runs another call on the queue, which has another plan. */
static void *allocate_and_call(void *context, size_t bytes)
{
    static _Alignas(COT_ALIGNMENT) char memory[2][256];
    cot_queue *queue = context;
    toy_args args = of_size(7);
    args.workspace = memory[1];
    args.workspace_bytes = sizeof memory[1];
    assert_ok(cot_op_run(update, queue, &args));
    assert_int_equal(last_call.plan[0], 7);
    assert_true(bytes <= sizeof memory[0]);
    return memory[0];
}

static void an_allocator_may_use_the_queue(void **state)
{
    (void)state;
    cot_queue *queue = new_queue("");
    const toy_args args = of_size(20);
    assert_ok(cot_queue_set_allocator(queue, allocate_and_call, queue));
    assert_ok(cot_op_run(update, queue, &args));
    assert_int_equal(last_call.plan[0], 20);
    cot_queue_destroy(queue);
}

static void a_call_plans_once(void **state)
{
    (void)state;
    cot_queue *queue = new_queue("");
    toy_args args = of_size(20);
    size_t bytes = 0;
    assert_ok(cot_op_workspace(update, queue, &args, &bytes));
    assert_int_equal(bytes, 60);
    plans = 0;
    assert_ok(cot_op_run(update, queue, &args));
    assert_string_equal(last_call.kernel, "toy_planned");
    assert_memory_equal(last_call.plan, ((const int[4]){20, 21, 22, 1}), sizeof last_call.plan);
    assert_int_equal(plans, 1);
    assert_null(queue->plan);
    cot_queue_destroy(queue);
}

int main(void)
{
    unsetenv("COT_KERNEL");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(queue_and_args_are_required),
        cmocka_unit_test(older_and_newer_structs_are_understood),
        cmocka_unit_test(the_front_decides),
        cmocka_unit_test(the_cheapest_kernel_that_admits_is_taken),
        cmocka_unit_test(no_kernel_is_an_error),
        cmocka_unit_test(explain_gives_every_reason),
        cmocka_unit_test(a_forced_kernel_runs_or_reports_why_not),
        cmocka_unit_test(the_callers_workspace_is_checked_and_used),
        cmocka_unit_test(the_queues_allocator_gives_the_workspace),
        cmocka_unit_test(an_allocator_may_use_the_queue),
        cmocka_unit_test(a_call_plans_once),
        cmocka_unit_test(isa_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
