/* SPDX-License-Identifier: Apache-2.0
 * test_parallel_faults.c: faults of a rank. Every rank gets an error in time, and a refused call writes nothing. */
#include "support.h"

#include "parallel/group.h"
#include "parallel/mailbox.h"

#include <cotangent/parallel.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { RANKS = 3, T = 24, H = 2, D = 8, MAX_ROWS = 16 };

typedef struct rank_call {
    int rank;
    cot_group *group;
    cot_parallel_options options;
    cot_attention_forward_args args;
    float q[MAX_ROWS][H][D], k[MAX_ROWS][H][D], v[MAX_ROWS][H][D], out[MAX_ROWS][H][D], lse[H][MAX_ROWS];
    float sink[H];
    void (*before)(struct rank_call *call); /* what the rank does wrong, before its call */
    bool calls;                             /* whether it calls at all */
    cot_status status;
    char message[512];
    double seconds;
} rank_call;

static void set_up(rank_call *call, int rank, cot_group *group)
{
    int64_t rows;
    *call = (rank_call){.rank = rank, .group = group, .calls = true};
    COT_INIT(&call->options);
    call->options.cut = COT_CUT_ZIGZAG;
    assert_ok(cot_shard_rows(&call->options, T, RANKS, rank, &rows));
    COT_INIT(&call->args);
    call->args.causal = 1;
    call->args.q_length = call->args.k_length = T;
    call->args.q = cot_tensor_contiguous(call->q, COT_F32, 4, SHAPE(1, rows, H, D));
    call->args.k = cot_tensor_contiguous(call->k, COT_F32, 4, SHAPE(1, rows, H, D));
    call->args.v = cot_tensor_contiguous(call->v, COT_F32, 4, SHAPE(1, rows, H, D));
    call->args.out = cot_tensor_contiguous(call->out, COT_F32, 4, SHAPE(1, rows, H, D));
    call->args.lse = cot_tensor_contiguous(call->lse, COT_F32, 3, SHAPE(1, H, rows));
    for (int i = 0; i < MAX_ROWS * H * D; i++)
        (&call->q[0][0][0])[i] = (&call->k[0][0][0])[i] = (&call->v[0][0][0])[i] = (float)((i + rank) % 7) - 3;
    memset(call->out, 0xff, sizeof call->out);
}

static void *run_rank(void *memory)
{
    rank_call *call = memory;
    cot_queue *queue = make_queue(NULL, 1);
    if (call->before != NULL)
        call->before(call);
    const double begin = cot_seconds();
    if (call->calls)
        call->status = cot_parallel_attention_forward(call->group, queue, &call->options, &call->args);
    call->seconds = cot_seconds() - begin;
    cot_error_copy(call->message, sizeof call->message);
    cot_queue_destroy(queue);
    return NULL;
}

static void run_all(rank_call calls[RANKS])
{
    pthread_t threads[RANKS];
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(pthread_create(&threads[rank], NULL, run_rank, &calls[rank]), 0);
    for (int rank = 0; rank < RANKS; rank++)
        pthread_join(threads[rank], NULL);
}

static void make_group(cot_group *groups[RANKS], rank_call calls[RANKS], double timeout)
{
    cot_group_options options;
    COT_INIT(&options);
    options.timeout = timeout;
    assert_ok(cot_group_create_local(RANKS, &options, groups));
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(cot_group_rank(groups[rank]), rank);
        assert_int_equal(cot_group_size(groups[rank]), RANKS);
        set_up(&calls[rank], rank, groups[rank]);
    }
}

static void destroy_group(cot_group *groups[RANKS])
{
    for (int rank = 0; rank < RANKS; rank++)
        cot_group_destroy(groups[rank]);
}

static void expect(const rank_call *call, cot_status status, const char *message)
{
    if (call->status != status || strcmp(call->message, message) != 0)
        fail_msg("rank %d: got %s \"%s\"\nexpected %s \"%s\"", call->rank, cot_status_name(call->status), call->message,
                 cot_status_name(status), message);
}

static void expect_untouched(const rank_call *call)
{
    const unsigned char *bytes = (const unsigned char *)call->out;
    for (size_t i = 0; i < sizeof call->out; i++)
        assert_int_equal(bytes[i], 0xff);
}

/* After a refusal the group goes on. */
static void expect_that_a_call_works(cot_group *groups[RANKS], rank_call calls[RANKS])
{
    for (int rank = 0; rank < RANKS; rank++)
        set_up(&calls[rank], rank, groups[rank]);
    run_all(calls);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(calls[rank].status, COT_OK);
}

static void other_options(rank_call *call)
{
    call->args.causal = 0;
}

static void other_cut(rank_call *call)
{
    call->options.cut = COT_CUT_STRIPED;
    call->options.stripe = 4;
}

static void other_division(rank_call *call)
{
    call->options.all_gather = 1;
}

static void other_sink(rank_call *call)
{
    call->sink[1] = 1;
}

static void other_scale(rank_call *call)
{
    call->args.scale = 0.5;
}

static void without_lse(rank_call *call)
{
    call->args.lse = (cot_tensor){0};
}

static void ranks_with_other_arguments_are_named(void **state)
{
    (void)state;
    static const struct {
        void (*before)(rank_call *);
        const char *name;
    } faults[] = {{other_options, "causal"}, {other_cut, "cut"},     {other_division, "all_gather"},
                  {other_sink, "sink"},      {other_scale, "scale"}, {without_lse, "lse"}};
    static rank_call calls[RANKS];
    cot_group *groups[RANKS];
    make_group(groups, calls, 0);
    for (size_t n = 0; n < COUNT(faults); n++) {
        char message[256];
        for (int rank = 0; rank < RANKS; rank++) {
            set_up(&calls[rank], rank, groups[rank]);
            calls[rank].args.sink = cot_tensor_contiguous(calls[rank].sink, COT_F32, 1, SHAPE(H));
        }
        calls[2].before = faults[n].before;
        run_all(calls);
        snprintf(message, sizeof message, "parallel_attention_forward: rank 2 passes another value of %s than rank 0",
                 faults[n].name);
        for (int rank = 0; rank < RANKS; rank++) {
            expect(&calls[rank], COT_PEER_ERROR, message);
            expect_untouched(&calls[rank]);
        }
    }
    expect_that_a_call_works(groups, calls);
    destroy_group(groups);
}

static void with_a_short_k(rank_call *call)
{
    call->args.k.shape[1]--;
}

/* Tensors with the rows of the whole instead of those of the rank. */
static void with_the_whole_v(rank_call *call)
{
    call->args.v.shape[1] = 24;
}

static void with_the_whole_out(rank_call *call)
{
    call->args.out.shape[1] = 24;
}

static void with_the_whole_lse(rank_call *call)
{
    call->args.lse.shape[2] = 24;
}

static void with_the_whole_bias(rank_call *call)
{
    static float bias[24 * 24];
    call->args.bias = cot_tensor_contiguous(bias, COT_F32, 4, SHAPE(1, 1, 24, 24));
}

static void with_head_ranks(rank_call *call)
{
    call->options.head_ranks = 2;
}

static void with_many_head_ranks(rank_call *call)
{
    call->options.head_ranks = INT32_MAX;
}

static void with_a_bad_all_gather(rank_call *call)
{
    call->options.all_gather = 2;
}

static void with_a_workspace(rank_call *call)
{
    call->args.workspace_bytes = 64;
}

static void with_a_block(rank_call *call)
{
    call->args.q_begin = 1;
}

static void with_a_bad_softcap(rank_call *call)
{
    call->args.softcap = -1;
}

static void with_out_over_q(rank_call *call)
{
    call->args.out = call->args.q;
}

static void refused_arguments_reach_all_ranks(void **state)
{
    (void)state;
    static const struct {
        void (*before)(rank_call *);
        cot_status status;
        const char *message;
    } faults[] = {
        {with_a_short_k, COT_INVALID_SHAPE,
         "parallel_attention_forward: k has 7 rows, expected 8, the part of rank 1 of k_length 24"},
        {with_the_whole_v, COT_INVALID_SHAPE,
         "parallel_attention_forward: v has 24 on axis 1, expected 8, the rows of this rank"},
        {with_the_whole_out, COT_INVALID_SHAPE,
         "parallel_attention_forward: out has 24 on axis 1, expected 8, the rows of this rank"},
        {with_the_whole_lse, COT_INVALID_SHAPE,
         "parallel_attention_forward: lse has 24 on axis 2, expected 8, the rows of this rank"},
        {with_the_whole_bias, COT_INVALID_SHAPE,
         "parallel_attention_forward: bias has 24 on axis 2, expected 8, the rows of this rank"},
        {with_many_head_ranks, COT_INVALID_ARGUMENT,
         "parallel_attention_forward: head_ranks is 2147483647, expected a divisor of the group's 3 ranks"},
        {with_head_ranks, COT_INVALID_ARGUMENT,
         "parallel_attention_forward: head_ranks is 2, expected a divisor of the group's 3 ranks"},
        {with_a_bad_all_gather, COT_INVALID_ARGUMENT, "parallel_attention_forward: all_gather is 2, expected 0 or 1"},
        {with_a_workspace, COT_INVALID_ARGUMENT,
         "parallel_attention_forward: workspace is given, expected none (the queue's pool serves it)"},
        {with_a_block, COT_INVALID_ARGUMENT, "parallel_attention_forward: q_begin is 1, expected 0"},
        {with_a_bad_softcap, COT_INVALID_ARGUMENT,
         "attention_forward: softcap is -1, expected 0 (none) or 1e-30 to 1e30"},
        {with_out_over_q, COT_INVALID_LAYOUT, "parallel_attention_forward: out overlaps q"},
    };
    static rank_call calls[RANKS];
    cot_group *groups[RANKS];
    make_group(groups, calls, 0);
    for (size_t n = 0; n < COUNT(faults); n++) {
        char message[512];
        for (int rank = 0; rank < RANKS; rank++)
            set_up(&calls[rank], rank, groups[rank]);
        calls[1].before = faults[n].before;
        run_all(calls);
        snprintf(message, sizeof message, "parallel_attention_forward: rank 1 refuses its arguments: %s",
                 faults[n].message);
        expect(&calls[0], COT_PEER_ERROR, message);
        expect(&calls[1], faults[n].status, faults[n].message);
        expect(&calls[2], COT_PEER_ERROR, message);
        for (int rank = 0; rank < RANKS; rank++)
            expect_untouched(&calls[rank]);
    }
    expect_that_a_call_works(groups, calls);
    destroy_group(groups);
}

static void stays_away(rank_call *call)
{
    call->calls = false;
}

static void a_silent_rank_ends_the_wait(void **state)
{
    (void)state;
    static rank_call calls[RANKS];
    cot_group *groups[RANKS];
    make_group(groups, calls, 0.25);
    calls[1].before = stays_away;
    run_all(calls);
    for (int rank = 0; rank < RANKS; rank += 2) {
        assert_int_equal(calls[rank].status, COT_PEER_ERROR);
        assert_non_null(strstr(calls[rank].message, "waited 0.25 seconds for rank"));
        assert_true(calls[rank].seconds < 5);
        expect_untouched(&calls[rank]);
    }
    calls[1].before = NULL, calls[1].calls = true;
    run_rank(&calls[1]); /* it comes too late */
    assert_int_equal(calls[1].status, COT_PEER_ERROR);
    destroy_group(groups);
}

static void leaves(rank_call *call)
{
    cot_group_destroy(call->group);
    call->calls = false;
}

static void a_rank_that_leaves_breaks_the_group(void **state)
{
    (void)state;
    static rank_call calls[RANKS];
    cot_group *groups[RANKS];
    make_group(groups, calls, 0);
    calls[2].before = leaves;
    run_all(calls);
    expect(&calls[0], COT_PEER_ERROR, "the group is broken: rank 2 has left the group");
    expect(&calls[1], COT_PEER_ERROR, "the group is broken: rank 2 has left the group");
    assert_true(calls[0].seconds < 5 && calls[1].seconds < 5);
    set_up(&calls[0], 0, groups[0]);
    run_rank(&calls[0]);
    expect(&calls[0], COT_PEER_ERROR, "parallel_attention_forward: the group is broken: rank 2 has left the group");
    cot_group_destroy(groups[0]);
    cot_group_destroy(groups[1]);
}

static void aborts(rank_call *call)
{
    assert_ok(cot_group_abort(call->group, "no data"));
}

static void an_abort_reaches_all_ranks(void **state)
{
    (void)state;
    static rank_call calls[RANKS];
    cot_group *groups[RANKS];
    make_group(groups, calls, 0);
    calls[0].before = aborts;
    run_all(calls);
    expect(&calls[0], COT_PEER_ERROR, "parallel_attention_forward: the group is broken: rank 0: no data");
    expect(&calls[1], COT_PEER_ERROR, "the group is broken: rank 0: no data");
    expect(&calls[2], COT_PEER_ERROR, "the group is broken: rank 0: no data");
    destroy_group(groups);
}

static void *no_memory(void *context, size_t bytes)
{
    (void)context, (void)bytes;
    return NULL;
}

/* The core fails on one rank after the ranks have agreed: its queue has no workspace. */
static void *run_without_memory(void *memory)
{
    rank_call *call = memory;
    cot_queue *queue = make_queue("attention=attention_fwd_tiled_avx2", 1);
    assert_ok(cot_queue_set_allocator(queue, no_memory, NULL));
    call->status = cot_parallel_attention_forward(call->group, queue, &call->options, &call->args);
    cot_error_copy(call->message, sizeof call->message);
    cot_queue_destroy(queue);
    return NULL;
}

/* Runs a call that fails on one rank. Returns false if it does not fail there: without AVX2, or if no workspace is needed. */
static bool run_with_a_failure(cot_group *groups[RANKS], rank_call calls[RANKS], int failing, int32_t all_gather)
{
    pthread_t threads[RANKS];
    make_group(groups, calls, 0);
    for (int rank = 0; rank < RANKS; rank++) {
        calls[rank].options.all_gather = all_gather;
        assert_int_equal(
            pthread_create(&threads[rank], NULL, rank == failing ? run_without_memory : run_rank, &calls[rank]), 0);
    }
    for (int rank = 0; rank < RANKS; rank++)
        pthread_join(threads[rank], NULL);
    if (calls[failing].status == COT_UNSUPPORTED || calls[failing].status == COT_OK)
        return false;
    assert_int_equal(calls[failing].status, COT_OUT_OF_MEMORY);
    return true;
}

static void a_failure_during_the_call_reaches_all_ranks(void **state)
{
    (void)state;
    static rank_call calls[RANKS];
    cot_group *groups[RANKS];
    if (!run_with_a_failure(groups, calls, 1, 0)) {
        destroy_group(groups);
        skip();
    }
    for (int rank = 0; rank < RANKS; rank += 2) {
        assert_int_equal(calls[rank].status, COT_PEER_ERROR);
        assert_non_null(strstr(calls[rank].message, "rank 1: parallel_attention_forward failed: attention_forward"));
    }
    destroy_group(groups);
}

/* The rank that fails lends its memory to the others, or has borrowed that of rank 0. The other ranks learn of the failure
 * in this call or in the next one. */
static void a_failure_ends_what_ranks_have_lent(void **state)
{
    (void)state;
    static rank_call calls[RANKS];
    cot_group *groups[RANKS];
    for (int failing = 0; failing < RANKS; failing++) {
        const bool failed = run_with_a_failure(groups, calls, failing, 1);
        for (int rank = 0; failed && rank < RANKS; rank++) {
            assert_true(calls[rank].seconds < 5);
            assert_int_equal(cot_group_all_reduce(groups[rank], NULL, &calls[rank].args.q), COT_PEER_ERROR);
            assert_non_null(strstr(cot_error_message(), "parallel_attention_forward failed: attention_forward"));
        }
        destroy_group(groups);
    }
}

/* ---- the other functions --------------------------------------------------------------------------------------- */

typedef struct sum_call {
    cot_group *group;
    int rank;
    cot_status status;
    float values[5];
} sum_call;

static void *run_sum(void *memory)
{
    sum_call *call = memory;
    for (int i = 0; i < 5; i++)
        call->values[i] = (float)(call->rank + 1) * (float)(i + 1);
    call->values[4] = call->rank == 0 ? 0x1p60f : call->rank == 1 ? 1 : -0x1p60f;
    cot_tensor t = cot_tensor_contiguous(call->values, COT_F32, 1, SHAPE(5));
    cot_queue *queue = make_queue(NULL, 1);
    call->status = cot_group_all_reduce(call->group, queue, &t);
    cot_queue_destroy(queue);
    return NULL;
}

static void sums_are_in_the_order_of_the_ranks(void **state)
{
    (void)state;
    cot_group *groups[RANKS];
    sum_call calls[RANKS];
    pthread_t threads[RANKS];
    assert_ok(cot_group_create_local(RANKS, NULL, groups));
    for (int rank = 0; rank < RANKS; rank++) {
        calls[rank] = (sum_call){.group = groups[rank], .rank = rank};
        assert_int_equal(pthread_create(&threads[rank], NULL, run_sum, &calls[rank]), 0);
    }
    for (int rank = 0; rank < RANKS; rank++)
        pthread_join(threads[rank], NULL);
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(calls[rank].status, COT_OK);
        for (int i = 0; i < 4; i++)
            assert_true(calls[rank].values[i] == (float)(6 * (i + 1)));
        assert_true(calls[rank].values[4] == 0); /* (2^60 + 1) - 2^60 in f64 */
    }
    destroy_group(groups);
}

static void groups_refuse_wrong_arguments(void **state)
{
    (void)state;
    cot_group *groups[2];
    cot_group_options options;
    COT_INIT(&options);
    options.timeout = -1;
    assert_fails(cot_group_create_local(0, NULL, groups), COT_INVALID_ARGUMENT,
                 "cot_group_create_local: ranks is 0, expected 1 to 1024");
    assert_fails(cot_group_create_local(2, NULL, NULL), COT_INVALID_ARGUMENT, "cot_group_create_local: groups is null");
    assert_fails(cot_group_create_local(2, &options, groups), COT_INVALID_ARGUMENT,
                 "cot_group_create_local: options.timeout is -1, expected 0 (30 seconds) to 1e9");
    assert_fails(cot_group_all_reduce(NULL, NULL, NULL), COT_INVALID_ARGUMENT, "cot_group_all_reduce: group is null");
    assert_fails(cot_group_abort(NULL, NULL), COT_INVALID_ARGUMENT, "cot_group_abort: group is null");
    assert_fails(cot_parallel_attention_forward(NULL, NULL, NULL, NULL), COT_INVALID_ARGUMENT,
                 "parallel_attention_forward: group is null");
    assert_fails(cot_group_check(NULL), COT_INVALID_ARGUMENT, "cot_group_check: group is null");
    assert_int_equal(cot_group_rank(NULL), -1);
    assert_int_equal(cot_group_size(NULL), 0);
    cot_group_destroy(NULL);
    assert_ok(cot_group_create_local(1, NULL, groups));
    cot_queue *queue = make_queue(NULL, 1);
    assert_fails(cot_group_all_reduce(groups[0], queue, NULL), COT_INVALID_ARGUMENT,
                 "cot_group_all_reduce: tensor is null");
    assert_fails(cot_group_all_reduce(groups[0], NULL, NULL), COT_INVALID_ARGUMENT,
                 "cot_group_all_reduce: tensor is null");
    assert_fails(cot_parallel_attention_forward(groups[0], queue, NULL, NULL), COT_INVALID_ARGUMENT,
                 "parallel_attention_forward: args is null");
    assert_ok(cot_group_check(groups[0]));
    assert_fails(cot_parallel_attention_backward(groups[0], queue, NULL, NULL), COT_INVALID_ARGUMENT,
                 "parallel_attention_backward: args is null");
    cot_queue_destroy(queue);
    cot_group_destroy(groups[0]);
}

/* The parts of all ranks are the whole sequence, each row once, and the balanced cuts are balanced. */
static void cuts_cover_every_row_once(void **state)
{
    (void)state;
    for (int cut = 0; cut < 3; cut++)
        for (int64_t length = 0; length < 70; length += 1 + length / 9)
            for (int ranks = 1; ranks <= 9; ranks++) {
                cot_parallel_options options;
                int32_t whole[70], part[70], again[70];
                COT_INIT(&options);
                options.cut = (cot_cut)cut;
                options.stripe = cut == COT_CUT_STRIPED ? 1 + length % 4 : 0;
                for (int i = 0; i < 70; i++)
                    whole[i] = i, again[i] = -1;
                const cot_tensor all = cot_tensor_contiguous(whole, COT_I32, 1, &length);
                const cot_tensor collected = cot_tensor_contiguous(again, COT_I32, 1, &length);
                int64_t sum = 0;
                for (int rank = 0; rank < ranks; rank++) {
                    int64_t rows, positions[70];
                    assert_ok(cot_shard_rows(&options, length, ranks, rank, &rows));
                    assert_ok(cot_shard_positions(&options, length, ranks, rank, positions));
                    const cot_tensor mine = cot_tensor_contiguous(part, COT_I32, 1, &rows);
                    assert_ok(cot_shard(&options, ranks, rank, 0, &all, &mine));
                    for (int64_t i = 0; i < rows; i++)
                        assert_true(part[i] == positions[i] && (i == 0 || positions[i] > positions[i - 1]));
                    assert_ok(cot_unshard(&options, ranks, rank, 0, &mine, &collected));
                    sum += rows;
                }
                assert_true(sum == length);
                assert_memory_equal(whole, again, (size_t)length * sizeof *whole);
            }
}

static void cuts_refuse_wrong_arguments(void **state)
{
    (void)state;
    cot_parallel_options options;
    int64_t rows;
    float x[4];
    const cot_tensor whole = cot_tensor_contiguous(x, COT_F32, 1, SHAPE(4));
    const cot_tensor part = cot_tensor_contiguous(x, COT_F32, 1, SHAPE(3));
    COT_INIT(&options);
    assert_fails(cot_shard_rows(&options, 8, 2, 2, &rows), COT_INVALID_ARGUMENT,
                 "cot_shard_rows: rank is 2, expected 0 to 1");
    assert_fails(cot_shard_rows(&options, 8, 0, 0, &rows), COT_INVALID_ARGUMENT,
                 "cot_shard_rows: ranks is 0, expected 1 to 65536");
    assert_fails(cot_shard_rows(&options, -1, 2, 0, &rows), COT_INVALID_SHAPE,
                 "cot_shard_rows: the whole sequence has -1 rows, expected 0 to 2^40");
    assert_fails(cot_shard_rows(&options, 8, 2, 0, NULL), COT_INVALID_ARGUMENT, "cot_shard_rows: rows is null");
    assert_fails(cot_shard(&options, 2, 0, 0, &whole, &part), COT_INVALID_SHAPE,
                 "cot_shard: part has 3 on axis 0, expected 2");
    assert_fails(cot_shard(&options, 2, 0, 1, &whole, &part), COT_INVALID_ARGUMENT,
                 "cot_shard: axis is 1, expected 0 to 0");
    assert_fails(cot_shard(&options, 1, 0, 0, &whole, &whole), COT_INVALID_LAYOUT, "cot_shard: part overlaps whole");
    options.stripe = 4;
    assert_fails(cot_shard_rows(&options, 8, 2, 0, &rows), COT_INVALID_ARGUMENT,
                 "cot_shard_rows: stripe is 4, expected 0 without the striped cut");
    options.cut = (cot_cut)3;
    assert_fails(cot_shard_rows(&options, 8, 2, 0, &rows), COT_INVALID_ARGUMENT,
                 "cot_shard_rows: cut is 3, expected 0 (contiguous), 1 (zigzag) or 2 (striped)");
    options.struct_size = 0;
    assert_fails(cot_shard_rows(&options, 8, 2, 0, &rows), COT_INVALID_ARGUMENT, NULL);
}

/* ---- transfers that are functions of the caller ---------------------------------------------------------------- */

static void make_mailboxes(cot_group *groups[RANKS], rank_call calls[RANKS], double timeout, const mailbox_fault *fault)
{
    cot_group_options options;
    COT_INIT(&options);
    options.timeout = timeout;
    assert_ok(mailbox_groups(RANKS, &options, fault, groups, NULL));
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(cot_group_rank(groups[rank]), rank);
        assert_int_equal(cot_group_size(groups[rank]), RANKS);
        set_up(&calls[rank], rank, groups[rank]);
    }
}

/* All ranks fail in time with this text in their messages, and so does the next call. */
static void expect_failure(rank_call calls[RANKS], const char *text)
{
    run_all(calls);
    for (int rank = 0; rank < RANKS; rank++) {
        if (!calls[rank].calls)
            continue;
        if (calls[rank].status != COT_PEER_ERROR)
            fail_msg("rank %d: got %s, expected an error with \"%s\"", rank, cot_status_name(calls[rank].status), text);
        if (strstr(calls[rank].message, text) == NULL)
            fail_msg("rank %d: got \"%s\", expected \"%s\"", rank, calls[rank].message, text);
        assert_true(calls[rank].seconds < 5);
        assert_int_equal(cot_group_all_reduce(calls[rank].group, NULL, &calls[rank].args.q), COT_PEER_ERROR);
        assert_non_null(strstr(cot_error_message(), "the group is broken: "));
    }
}

static void custom_transfers_that_fail_break_the_group(void **state)
{
    (void)state;
    static const struct {
        mailbox_fault fault;
        const char *text;
    } faults[] = {{{1, 5, 0}, "rank 1: a transfer with rank 0 did not start: no cable"},
                  {{1, 9, 0}, "did not start: no cable"},
                  {{2, 0, 5}, "rank 2: waited for rank 0: the cable broke"},
                  {{0, 0, 5}, "the cable broke"}};
    static rank_call calls[RANKS];
    cot_group *groups[RANKS];
    for (size_t n = 0; n < 2 * COUNT(faults); n++) {
        make_mailboxes(groups, calls, 0, &faults[n / 2].fault);
        for (int rank = 0; rank < RANKS; rank++)
            calls[rank].options.all_gather = n % 2;
        expect_failure(calls, faults[n / 2].text);
        destroy_group(groups);
        assert_int_equal(mailbox_contexts(), 0);
    }
}

static void custom_transfers_that_never_end_break_the_group(void **state)
{
    (void)state;
    static rank_call calls[RANKS];
    cot_group *groups[RANKS];
    make_mailboxes(groups, calls, 1, NULL);
    calls[2].calls = false;
    expect_failure(calls, "time is up");
    destroy_group(groups);
    make_mailboxes(groups, calls, 0, NULL);
    calls[2].calls = false;
    assert_ok(cot_group_abort(groups[2], "no data"));
    expect_failure(calls, "rank 2: no data");
    destroy_group(groups);
    assert_int_equal(mailbox_contexts(), 0);
}

static void custom_groups_that_fail_at_once_keep_the_context(void **state)
{
    (void)state;
    cot_group *groups[RANKS];
    cot_status statuses[RANKS];
    assert_int_equal(mailbox_groups(RANKS, NULL, &(mailbox_fault){1, 1, 0}, groups, statuses), COT_PEER_ERROR);
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(statuses[rank], COT_PEER_ERROR);
        assert_null(groups[rank]);
    }
    assert_int_equal(mailbox_contexts(), 0);
}

static cot_status no_start(void *context, int32_t receive, int32_t peer, int32_t tag, void *data, size_t bytes,
                           void **transfer)
{
    (void)context, (void)receive, (void)peer, (void)tag, (void)data, (void)bytes, (void)transfer;
    return COT_UNSUPPORTED;
}

static cot_status no_wait(void *context, void *transfer, double timeout)
{
    (void)context, (void)transfer, (void)timeout;
    return COT_UNSUPPORTED;
}

static int32_t no_abort(void *context, const char *reason)
{
    (void)context, (void)reason;
    return 1;
}

static void count_destroy(void *context)
{
    ++*(int *)context;
}

static void custom_groups_check_their_arguments(void **state)
{
    (void)state;
    int destroyed = 0;
    cot_group *group = NULL;
    cot_group_callbacks f = {sizeof f, &destroyed, no_start, no_wait, no_abort, count_destroy}, wrong;
    assert_fails(cot_group_create_custom(NULL, 0, 1, NULL, &group), COT_INVALID_ARGUMENT,
                 "cot_group_create_custom: callbacks is null");
    assert_fails(cot_group_create_custom(&f, 0, 1, NULL, NULL), COT_INVALID_ARGUMENT,
                 "cot_group_create_custom: out is null");
    assert_fails(cot_group_create_custom(&f, 0, 0, NULL, &group), COT_INVALID_ARGUMENT,
                 "cot_group_create_custom: size is 0, expected 1 to 1048576");
    assert_fails(cot_group_create_custom(&f, 2, 2, NULL, &group), COT_INVALID_ARGUMENT,
                 "cot_group_create_custom: rank is 2, expected 0 to 1");
    wrong = f, wrong.wait = NULL;
    assert_fails(cot_group_create_custom(&wrong, 0, 1, NULL, &group), COT_INVALID_ARGUMENT,
                 "cot_group_create_custom: callbacks.wait is null");
    wrong = f, wrong.struct_size = 0;
    assert_fails(cot_group_create_custom(&wrong, 0, 1, NULL, &group), COT_INVALID_ARGUMENT,
                 "cot_group_create_custom: callbacks.struct_size is 0, expected 48 (use COT_INIT)");
    assert_null(group);
    assert_int_equal(destroyed, 0);
    assert_ok(cot_group_create_custom(&f, 0, 1, NULL, &group));
    cot_group_destroy(group);
    assert_int_equal(destroyed, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_with_other_arguments_are_named),
        cmocka_unit_test(refused_arguments_reach_all_ranks),
        cmocka_unit_test(a_silent_rank_ends_the_wait),
        cmocka_unit_test(a_rank_that_leaves_breaks_the_group),
        cmocka_unit_test(an_abort_reaches_all_ranks),
        cmocka_unit_test(a_failure_during_the_call_reaches_all_ranks),
        cmocka_unit_test(a_failure_ends_what_ranks_have_lent),
        cmocka_unit_test(sums_are_in_the_order_of_the_ranks),
        cmocka_unit_test(groups_refuse_wrong_arguments),
        cmocka_unit_test(custom_transfers_that_fail_break_the_group),
        cmocka_unit_test(custom_transfers_that_never_end_break_the_group),
        cmocka_unit_test(custom_groups_that_fail_at_once_keep_the_context),
        cmocka_unit_test(custom_groups_check_their_arguments),
        cmocka_unit_test(cuts_cover_every_row_once),
        cmocka_unit_test(cuts_refuse_wrong_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
