/* SPDX-License-Identifier: Apache-2.0
 *
 * explain.c: a dry run of a call, for each rank in turn. The group's engine counts the transfers instead of making
 * them, and nothing else touches the memory of tensors (group->dry). */
#include "explain.h"

#include "group.h"

#include "core/argument_checks.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/tensor.h"

static cot_status dry_start(cot_group *group, cot_transfer *transfer)
{
    cot_group_finished(group, transfer);
    return COT_OK;
}

static cot_status dry_wait(cot_group *group, cot_transfer *transfers, int count)
{
    (void)group, (void)transfers, (void)count;
    return COT_OK;
}

/* All ranks pass what this rank passes. */
static cot_status dry_gather(cot_group *group)
{
    for (int r = 0; r < group->size; r++)
        group->agreement[r] = group->agreement[group->rank];
    return COT_OK;
}

static void dry_end(cot_group *group)
{
    (void)group;
}

static const cot_engine engine = {.name = "a dry run",
                                  .moves_host = true,
                                  .moves_device = true,
                                  .start = dry_start,
                                  .wait = dry_wait,
                                  .gather = dry_gather,
                                  .abort = dry_end,
                                  .destroy = dry_end};

/* Gives a tensor the rows of a rank, and an address that no other tensor shares. Nothing reads or writes there. */
static void place_part(cot_tensor *t, int axis, int64_t rows, int *count)
{
    if (!cot_is_present(t))
        return;
    if (axis >= 0)
        t->shape[axis] = rows;
    *t = cot_tensor_contiguous((void *)((uintptr_t)++ * count << 44), t->dtype, t->rank, t->shape);
}

static void place_bias(cot_tensor *t, int64_t rows, int *count)
{
    place_part(t, cot_is_present(t) && t->rank == 4 && t->shape[2] != 1 ? 2 : -1, rows, count);
}

/* The arguments of a rank. */
static cot_status take_parts(cot_attention_backward_args *b, const cot_parallel_options *options, int ranks, int rank)
{
    int64_t q_rows, k_rows;
    int count = 0;
    CHECK(cot_shard_rows(options, b->q_length, ranks, rank, &q_rows));
    CHECK(cot_shard_rows(options, b->k_length, ranks, rank, &k_rows));
    cot_tensor *const q_like[] = {&b->q, &b->out, &b->dout, &b->dq}, *const k_like[] = {&b->k, &b->v, &b->dk, &b->dv};
    cot_tensor *const statistics[] = {&b->lse, &b->dlse, &b->delta};
    cot_tensor *const whole[] = {&b->sink, &b->alibi_slopes, &b->dsink, &b->dropout_seed_tensor,
                                 &b->dropout_offset_tensor};
    for (int n = 0; n < 4; n++)
        place_part(q_like[n], 1, q_rows, &count), place_part(k_like[n], 1, k_rows, &count);
    for (int n = 0; n < 3; n++)
        place_part(statistics[n], 2, q_rows, &count);
    for (int n = 0; n < 5; n++)
        place_part(whole[n], -1, 0, &count);
    place_bias(&b->bias, q_rows, &count), place_bias(&b->dbias, q_rows, &count);
    return COT_OK;
}

/* The members that the forward has, with the parts of b. */
static void set_forward(cot_attention_forward_args *f, const cot_attention_backward_args *b)
{
    f->q = b->q, f->k = b->k, f->v = b->v, f->out = b->out, f->lse = b->lse;
    f->sink = b->sink, f->alibi_slopes = b->alibi_slopes, f->bias = b->bias;
    f->dropout_seed_tensor = b->dropout_seed_tensor, f->dropout_offset_tensor = b->dropout_offset_tensor;
    f->q_length = b->q_length, f->k_length = b->k_length;
}

static cot_status run_rank(cot_group *group, cot_queue *queue, const cot_parallel_options *options,
                           const cot_attention_forward_args *forward, cot_attention_backward_args *b)
{
    CHECK(take_parts(b, options, group->size, group->rank));
    if (forward == NULL)
        return cot_parallel_attention_backward(group, queue, options, b);
    cot_attention_forward_args f = *forward;
    set_forward(&f, b);
    return cot_parallel_attention_forward(group, queue, options, &f);
}

static void add_rank(cot_parallel_cost *cost, const cot_group *group, double *most_pairs, double *pairs)
{
    cost->calls = cot_max(cost->calls, group->calls);
    cost->merges = cot_max(cost->merges, group->merges);
    cost->messages = cot_max(cost->messages, group->messages);
    cost->sent_bytes = group->sent_bytes > cost->sent_bytes ? group->sent_bytes : cost->sent_bytes;
    cost->memory_bytes = group->device_bytes > cost->memory_bytes ? group->device_bytes : cost->memory_bytes;
    *most_pairs = group->pairs > *most_pairs ? group->pairs : *most_pairs;
    *pairs += group->pairs;
}

cot_status cot_parallel_explain(cot_queue *queue, int backward, const void *args, int32_t ranks,
                                const cot_parallel_options *options, cot_parallel_cost *cost)
{
    const cot_attention_forward_args *forward = backward ? NULL : args;
    cot_attention_backward_args b;
    double most_pairs = 0, pairs = 0;
    COT_INIT(&b);
    if (backward) {
        b = *(const cot_attention_backward_args *)args;
    } else {
        b.q = forward->q, b.k = forward->k, b.v = forward->v, b.out = forward->out, b.lse = forward->lse;
        b.sink = forward->sink, b.alibi_slopes = forward->alibi_slopes, b.bias = forward->bias;
        b.dropout_seed_tensor = forward->dropout_seed_tensor, b.dropout_offset_tensor = forward->dropout_offset_tensor;
        b.cu_seqlens_q = forward->cu_seqlens_q, b.seqused_q = forward->seqused_q, b.seqused_k = forward->seqused_k;
    }
    *cost = (cot_parallel_cost){.status = COT_OK};
    if (cot_is_present(&b.cu_seqlens_q) || cot_is_present(&b.seqused_q) || cot_is_present(&b.seqused_k))
        return cot_fail(COT_UNSUPPORTED,
                        "attention over ranks is not explained for packed sequences and seqused, whose "
                        "values decide");
    b.q_length = b.q.shape[1], b.k_length = b.k.shape[1];
    for (int32_t rank = 0; rank < ranks && cost->status == COT_OK; rank++) {
        cot_group *group = cot_group_make(&engine, rank, ranks, 1);
        if (group == NULL)
            return cot_fail(COT_OUT_OF_MEMORY, "no memory for a group of %d ranks", (int)ranks);
        group->dry = true;
        cot_attention_backward_args part = b;
        cost->status = run_rank(group, queue, options, forward, &part);
        cot_error_copy(cost->refusal, sizeof cost->refusal);
        add_rank(cost, group, &most_pairs, &pairs);
        cot_group_destroy(group);
    }
    cost->balance = pairs > 0 ? most_pairs * ranks / pairs : 1;
    return COT_OK;
}
