/* SPDX-License-Identifier: Apache-2.0
 * test_parallel_local.c: every case of the ops that can be cut, on groups of 1, 2, 3, 4 and 8 ranks that are threads of
 * this process. Of the groups with 2 and 4 ranks, there are also two whose transfers are functions of the test. The
 * results meet the error rule of the single call, and two runs give the same bytes.
 *
 *   test_parallel_local [--backend cuda [--devices N]] [--every N] [TEXT]
 *
 * --backend cuda: 2 and 4 ranks are streams of N GPUs (1), on which the ranks take turns. The transfers of the test go
 * through host memory then. --every N: each Nth case. TEXT: only cases whose description contains it. Exit status 77:
 * there are fewer GPUs. */
#include "support.h"

#include "parallel/mailbox.h"
#include "device/device_queue.h"
#include "parallel/sharded.h"

#include "check/check.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_RANKS = 8 };

typedef struct thread_call {
    rank_case *r;
    const whole_case *w;
    cot_group *group;
    int device;
} thread_call;

static int devices = 1;

static void *run_rank(void *memory)
{
    const thread_call *call = memory;
    rank_case_run(call->r, call->w, call->group, call->device);
    return NULL;
}

/* Runs all ranks. The groups are used again for the next call. */
static void run_ranks(rank_case *r, const whole_case *w, cot_group **groups, int ranks)
{
    pthread_t threads[MAX_RANKS];
    thread_call calls[MAX_RANKS];
    for (int rank = 0; rank < ranks; rank++) {
        calls[rank] = (thread_call){&r[rank], w, groups[rank], rank % devices};
        assert_int_equal(pthread_create(&threads[rank], NULL, run_rank, &calls[rank]), 0);
    }
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
    for (int rank = 0; rank < ranks; rank++)
        if (r[rank].status != COT_OK) {
            char text[512];
            describe_case(sharded_cases(w->op), &w->c, text, sizeof text);
            fail_msg("%s: ranks %d cut %d stripe %d head_ranks %d all_gather %d: rank %d: %s: %s", text, ranks,
                     (int)r->options.cut, (int)r->options.stripe, (int)r->options.head_ranks,
                     (int)r->options.all_gather, rank, cot_status_name(r[rank].status), r[rank].message);
        }
}

static bool check_ranks(const whole_case *w, cot_group **groups, int ranks, const cot_parallel_options *options)
{
    rank_case r[MAX_RANKS], again[MAX_RANKS];
    bool equal = true;
    whole_case_reset(w);
    for (int rank = 0; rank < ranks; rank++) {
        rank_case_make(&r[rank], w, options, ranks, rank);
        rank_case_make(&again[rank], w, options, ranks, rank);
    }
    run_ranks(r, w, groups, ranks);
    run_ranks(again, w, groups, ranks);
    for (int rank = 0; rank < ranks; rank++) {
        equal = equal && rank_case_equal(&r[rank], &again[rank], w);
        rank_case_collect(&r[rank], w, ranks, rank);
    }
    const bool good = whole_case_check(w, options, ranks);
    for (int rank = 0; rank < ranks; rank++) {
        rank_case_free(&r[rank], w);
        rank_case_free(&again[rank], w);
    }
    if (!equal)
        print_error("ranks %d cut %d head_ranks %d all_gather %d: the second run gave other bytes\n", ranks,
                    (int)options->cut, (int)options->head_ranks, (int)options->all_gather);
    return good && equal;
}

enum { LOCAL = 5 }; /* the first groups are local, the others custom */
static const int sizes[] = {1, 2, 3, 4, 8, 2, 4};
static const size_t on_gpus[] = {1, 3, 5, 6};
static cot_group *all_groups[COUNT(sizes)][MAX_RANKS];
static const char *only;
static int all_calls, every = 1;

typedef struct progress {
    const sharded_op *op;
    int seen, calls, failures;
    uint64_t state;
} progress;

static bool visit(void *context, const cot_case *c)
{
    progress *p = context;
    char text[512];
    describe_case(sharded_cases(p->op), c, text, sizeof text);
    if (!sharded_admits(p->op, c) || (only != NULL && strstr(text, only) == NULL))
        return true;
    if (p->seen++ % every != 0)
        return true;
    whole_case w;
    if (!whole_case_make(&w, p->op, c))
        fail_msg("%s: %s", text, cot_error_message());
    /* The cases are many: one or two of the groups each. */
    for (int n = 0; n < (c->uses & COT_CASE_QUICK && p->op == &sharded_attention ? 2 : 1); n++) {
        cot_parallel_options options;
        size_t size = (size_t)cot_draw_below(&p->state, COUNT(sizes));
        if (sharded_backend == COT_BACKEND_CUDA)
            size = on_gpus[size % COUNT(on_gpus)];
        if (!p->op->draw(c, sizes[size], &p->state, &options))
            continue;
        p->calls++;
        p->failures += !check_ranks(&w, all_groups[size], sizes[size], &options);
    }
    whole_case_free(&w);
    return true;
}

static void check_op(const sharded_op *op)
{
    progress p = {.op = op, .state = 7};
    sharded_cases(op)->each(visit, &p);
    printf("%s: %d calls, %d failures\n", op->name, p.calls, p.failures);
    all_calls += p.calls;
    assert_true(p.calls > 0 || only != NULL);
    assert_int_equal(p.failures, 0);
}

static void attention_equals_the_single_call(void **state)
{
    (void)state;
    check_op(&sharded_attention);
}

static void causal_conv1d_equals_the_single_call(void **state)
{
    (void)state;
    check_op(&sharded_causal_conv1d);
}

static int make_groups(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(sizes); n++)
        if ((n < LOCAL ? cot_group_create_local(sizes[n], NULL, all_groups[n])
                       : mailbox_groups(sizes[n], NULL, NULL, all_groups[n], NULL)) != COT_OK)
            return -1;
    return 0;
}

static int destroy_groups(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(sizes); n++)
        for (int rank = 0; rank < sizes[n]; rank++)
            cot_group_destroy(all_groups[n][rank]);
    return 0;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--backend") == 0 && i + 1 < argc)
            sharded_backend = strcmp(argv[++i], "cuda") == 0 ? COT_BACKEND_CUDA : COT_BACKEND_CPU;
        else if (strcmp(argv[i], "--devices") == 0 && i + 1 < argc)
            devices = atoi(argv[++i]);
        else if (strcmp(argv[i], "--every") == 0 && i + 1 < argc)
            every = atoi(argv[++i]);
        else
            only = argv[i];
    }
    for (int device = 0; sharded_backend == COT_BACKEND_CUDA && device < devices; device++) {
        cot_queue *queue;
        const int skipped = open_queue_of_device(device, &queue);
        if (skipped)
            return skipped;
        cot_queue_destroy(queue);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_equals_the_single_call),
        cmocka_unit_test(causal_conv1d_equals_the_single_call),
    };
    const int failed = cmocka_run_group_tests(tests, make_groups, destroy_groups);
    return failed > 0 || all_calls == 0;
}
