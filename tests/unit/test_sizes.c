/* SPDX-License-Identifier: Apache-2.0
 *
 * test_sizes.c: extreme sizes. Every size of every op's calls takes powers of two up to 2^62, alone and in pairs. The
 * other sizes are 1 or those of a case.
 *
 * An op either refuses the sizes with a message, or every kernel that admits them computes a cost and a workspace
 * without overflow. UndefinedBehaviorSanitizer detects signed overflow. A size_t product that wraps would let the
 * workspace shrink while a size grows, which the test detects. No call is executed, because the tensors do not fit
 * into memory. */
#include "support.h"

#include "check/check.h"
#include "check/signature.h"
#include "core/integers.h"
#include "core/tensor.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

static const int64_t extremes[] = {0,
                                   1,
                                   3,
                                   (int64_t)1 << 16,
                                   ((int64_t)1 << 31) - 1,
                                   (int64_t)1 << 32,
                                   (int64_t)1 << 40,
                                   (int64_t)1 << 47,
                                   (int64_t)1 << 52,
                                   ((int64_t)1 << 54) - 1,
                                   ((int64_t)1 << 56) - 1,
                                   (int64_t)1 << 62,
                                   INT64_MAX};
/* Fewer values, for pairs of sizes. */
static const int64_t extremes_for_pairs[] = {
    0, (int64_t)1 << 20, (int64_t)1 << 28, (int64_t)1 << 44, (int64_t)1 << 52, (int64_t)1 << 62};

typedef struct visitor {
    const cot_op_cases *cases;
    cot_queue *queue;
    int visited[8]; /* visited cases of each direction */
    int64_t refused, accepted, too_large;
} visitor;

/* Queries every kernel of both backends for a call that validate accepts. workspaces[k] becomes the workspace of
 * kernel k, or 0 if the kernel does not admit the call. */
static void query_kernels(const cot_direction *direction, const void *problem, size_t workspaces[COT_MAX_KERNELS])
{
    _Alignas(16) char plan[COT_MAX_PLAN];
    for (int k = 0; k < direction->op->kernel_count; k++) {
        const cot_kernel *kernel = &direction->op->kernels[k];
        workspaces[k] = 0;
        if (&direction->op->directions[kernel->direction] != direction || kernel->admit(problem) != NULL)
            continue;
        const double cost = kernel->cost(problem);
        if (!(cost >= 0) || isinf(cost))
            fail_msg("%s: its cost is %g", kernel->name, cost);
        workspaces[k] = cot_kernel_plan(kernel, problem, plan);
    }
}

static bool query_workspace(visitor *v, const cot_direction *direction, const void *args,
                            size_t workspaces[COT_MAX_KERNELS])
{
    _Alignas(16) char copy[COT_MAX_ARGS], problem[COT_MAX_PROBLEM];
    memcpy(copy, args, sizeof copy);
    memset(workspaces, 0, COT_MAX_KERNELS * sizeof *workspaces);
    const cot_status status = direction->validate(direction->call, copy, false, problem);
    size_t bytes = 0;
    const cot_status query_status = cot_op_workspace(direction, v->queue, args, &bytes);
    if (status == COT_OK) {
        v->accepted++;
        query_kernels(direction, problem, workspaces);
        if (query_status == COT_OK && bytes > COT_MAX_BYTES)
            fail_msg("%s: its workspace has %zu bytes", direction->call, bytes);
        if (query_status != COT_OK)
            v->too_large++;
    } else {
        v->refused++;
        assert_int_equal(query_status, status);
    }
    if (query_status != COT_OK && strncmp(cot_error_message(), direction->call, strlen(direction->call)) != 0)
        fail_msg("a message does not begin with %s: %s", direction->call, cot_error_message());
    return status == COT_OK;
}

/* mhc's symbols M and n*D are functions of n and D. attention's B is the axis of "...". */
static void derive(call_size *sizes, int count)
{
    const call_size *n = NULL, *D = NULL, *first = NULL;
    for (int i = 0; i < count; i++) {
        n = strcmp(sizes[i].name, "n") == 0 ? &sizes[i] : n;
        D = strcmp(sizes[i].name, "D") == 0 ? &sizes[i] : D;
        first = strcmp(sizes[i].name, "0") == 0 ? &sizes[i] : first;
    }
    for (int i = 0; i < count; i++) {
        if (n != NULL && strcmp(sizes[i].name, "M") == 0)
            sizes[i].value = cot_mul(n->value, cot_add(n->value, 2));
        if (n != NULL && D != NULL && strcmp(sizes[i].name, "n*D") == 0)
            sizes[i].value = cot_mul(n->value, D->value);
        if (first != NULL && strcmp(sizes[i].name, "B") == 0)
            sizes[i].value = first->value;
    }
}

static bool query_sizes(visitor *v, const cot_direction *direction, const cot_case *c, const call_size *sizes,
                        int count, size_t workspaces[COT_MAX_KERNELS])
{
    _Alignas(16) char args[COT_MAX_ARGS];
    call_size derived[MAX_CALL_SIZES];
    memcpy(args, c->args, sizeof args);
    memcpy(derived, sizes, sizeof derived);
    derive(derived, count);
    resize_call(direction, args, derived, count, true);
    return query_workspace(v, direction, args, workspaces);
}

/* One size grows. The workspace may shrink to 1/16 of the largest before it, because a few kernels use fewer parts
 * for a larger size. */
static void grow(visitor *v, const cot_direction *direction, const cot_case *c, call_size *sizes, int count, int i)
{
    const int64_t original = sizes[i].value;
    size_t before[COT_MAX_KERNELS] = {0}, now[COT_MAX_KERNELS];
    for (size_t e = 0; e < COUNT(extremes); e++) {
        sizes[i].value = extremes[e];
        if (!query_sizes(v, direction, c, sizes, count, now))
            continue;
        for (int k = 0; k < direction->op->kernel_count; k++) {
            if (now[k] != 0 && now[k] < before[k] / 16)
                fail_msg("%s: the workspace shrinks from %zu to %zu bytes as %s grows to %" PRId64,
                         direction->op->kernels[k].name, before[k], now[k], sizes[i].name, extremes[e]);
            before[k] = now[k] > before[k] ? now[k] : before[k];
        }
    }
    sizes[i].value = original;
}

static void pair(visitor *v, const cot_direction *direction, const cot_case *c, call_size *sizes, int count, int i,
                 int j)
{
    const int64_t original_i = sizes[i].value, original_j = sizes[j].value;
    size_t workspaces[COT_MAX_KERNELS];
    for (size_t a = 0; a < COUNT(extremes_for_pairs); a++)
        for (size_t b = 0; b < COUNT(extremes_for_pairs); b++) {
            sizes[i].value = extremes_for_pairs[a];
            sizes[j].value = extremes_for_pairs[b];
            query_sizes(v, direction, c, sizes, count, workspaces);
        }
    sizes[i].value = original_i;
    sizes[j].value = original_j;
}

/* Numeric options: extents such as windows, and numbers of repetitions. */
static void grow_options(visitor *v, const cot_direction *direction, const cot_case *c)
{
    size_t workspaces[COT_MAX_KERNELS];
    for (int o = 0; o < direction->option_count; o++) {
        const bool wide = direction->options[o].kind == COT_OPTION_I64;
        if (!wide && direction->options[o].kind != COT_OPTION_I32)
            continue;
        for (size_t e = 0; e < COUNT(extremes); e++) {
            _Alignas(16) char args[COT_MAX_ARGS];
            const int32_t narrow = (int32_t)cot_min(extremes[e], INT32_MAX);
            memcpy(args, c->args, sizeof args);
            memcpy(args + direction->options[o].offset, wide ? (const void *)&extremes[e] : &narrow, wide ? 8 : 4);
            query_workspace(v, direction, args, workspaces);
        }
    }
}

/* The maximum number of iterations of mhc. Its workspace grows with them. */
static void use_max_iterations(const cot_direction *direction, cot_case *c)
{
    const int32_t max_iterations = 4096;
    for (int o = 0; o < direction->option_count; o++)
        if (strstr(direction->options[o].name, "iterations") != NULL)
            memcpy(c->args + direction->options[o].offset, &max_iterations, sizeof max_iterations);
}

static bool visit(void *context, const cot_case *c)
{
    enum { CASES = 60 }; /* cases per direction */
    visitor *v = context;
    const cot_direction *direction = &v->cases->op->directions[c->direction];
    if (!(c->uses & COT_CASE_QUICK) || v->visited[c->direction]++ >= CASES)
        return true;
    grow_options(v, direction, c);
    for (int ones = 0; ones < 2; ones++) {
        call_size sizes[MAX_CALL_SIZES];
        cot_case original = *c;
        const int count = call_sizes(direction, c->args, sizes);
        assert_true(count > 0);
        if (ones)
            use_max_iterations(direction, &original);
        for (int i = 0; ones && i < count; i++)
            sizes[i].value = 1;
        for (int i = 0; i < count; i++) {
            grow(v, direction, &original, sizes, count, i);
            for (int j = 0; j < i; j++)
                pair(v, direction, &original, sizes, count, i, j);
        }
    }
    return true;
}

static void extreme_sizes_overflow_nothing(void **state)
{
    (void)state;
    for (int op = 0; op < cot_op_count; op++) {
        visitor v = {.cases = cot_all_cases[op], .queue = make_queue("", 2)};
        v.cases->each(visit, &v);
        print_message("%s: %" PRId64 " sizes refused, %" PRId64 " accepted, %" PRId64 " of them without workspace\n",
                      v.cases->op->name, v.refused, v.accepted, v.too_large);
        assert_true(v.refused > 0 && v.accepted > 0);
        cot_queue_destroy(v.queue);
    }
}

/* ---- core/integers.h ------------------------------------------------------------------------------------ */

static void integers_do_not_overflow(void **state)
{
    (void)state;
    assert_int_equal(cot_ceil_div(0, 7), 0);
    assert_int_equal(cot_ceil_div(14, 7), 2);
    assert_int_equal(cot_ceil_div(15, 7), 3);
    assert_int_equal(cot_ceil_div(INT64_MAX, 2), (int64_t)1 << 62);
    assert_int_equal(cot_round_up(0, 32), 0);
    assert_int_equal(cot_round_up(33, 32), 64);
    assert_int_equal(cot_round_up(INT64_MAX, 32), COT_HUGE);
    assert_int_equal(cot_mul((int64_t)1 << 31, (int64_t)1 << 30), (int64_t)1 << 61);
    assert_int_equal(cot_mul((int64_t)1 << 31, (int64_t)1 << 31), COT_HUGE);
    assert_int_equal(cot_mul((int64_t)1 << 32, (int64_t)1 << 62), COT_HUGE);
    assert_int_equal(cot_mul(COT_HUGE, 0), 0);
    assert_int_equal(cot_add(COT_HUGE, COT_HUGE), COT_HUGE);
    assert_int_equal(cot_add(INT64_MAX, INT64_MAX), COT_HUGE);
    assert_int_equal(COT_PRODUCT(2, 3, 5), 30);
    assert_int_equal(COT_PRODUCT((int64_t)1 << 40, (int64_t)1 << 40, 4), COT_HUGE);
    size_t at = 3;
    assert_int_equal(cot_workspace_reserve(&at, 10, 4), 3);
    assert_int_equal(at, 3 + 64);
    cot_workspace_reserve(&at, COT_HUGE, 8);
    assert_true(at > COT_MAX_BYTES && at <= (size_t)COT_HUGE);
    cot_workspace_reserve(&at, COT_HUGE, 8);
    assert_true(at > COT_MAX_BYTES && at <= (size_t)COT_HUGE);
    assert_int_equal(cot_min(3, -4), -4);
    assert_int_equal(cot_max(3, -4), 3);
    assert_int_equal(cot_clamp(9, 0, 5), 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(integers_do_not_overflow),
        cmocka_unit_test(extreme_sizes_overflow_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
