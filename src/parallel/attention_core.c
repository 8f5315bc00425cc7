/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_core.c: calls of the core on pairs of ranges. */
#include "attention_call.h"

#include "core/argument_checks.h"
#include "core/status.h"

cot_status attention_each_head(const attention_call *c, void *context, const range_pair *pair, head_body *body)
{
    if (!c->single)
        return body(c, context, pair, -1, -1);
    for (int64_t n = 0; n < c->batches * c->heads; n++)
        CHECK(body(c, context, pair, n / c->heads, n % c->heads));
    return COT_OK;
}

/* Counts a call of the core. */
static void count_call(const attention_call *c, const range_pair *pair, int64_t h)
{
    c->base.group->calls++;
    if (c->base.group->dry)
        c->base.group->pairs += attention_pairs(c, pair) * (double)(h < 0 ? c->heads * c->batches : 1);
}

/* The key-value head that head h of this rank reads; -1 for all. */
static int64_t kv_head(const attention_call *c, int64_t h)
{
    return h < 0 ? -1 : h / (c->heads / c->kv_heads);
}

/* The members that both directions of the core have. */
#define SET_BLOCK(x, c, place, pq, pk, blk, b, h)                                                    \
    do {                                                                                             \
        COT_INIT(x);                                                                                 \
        (x)->causal = (place)->causal, (x)->window = (place)->window;                                \
        (x)->window_left = (place)->window_left, (x)->window_right = (place)->window_right;          \
        (x)->scale = (c)->a.scale, (x)->softcap = (c)->a.softcap, (x)->dropout_p = (c)->a.dropout_p; \
        (x)->dropout_seed = (c)->a.dropout_seed, (x)->dropout_offset = (c)->a.dropout_offset;        \
        (x)->dropout_seed_tensor = (c)->a.dropout_seed_tensor;                                       \
        (x)->dropout_offset_tensor = (c)->a.dropout_offset_tensor;                                   \
        (x)->q_begin = (place)->q_begin, (x)->q_length = (place)->q_length;                          \
        (x)->k_begin = (place)->k_begin, (x)->k_length = (place)->k_length;                          \
        (x)->seqused_q = (place)->seqused_q, (x)->seqused_k = (place)->seqused_k;                    \
        (x)->alibi_slopes = (place)->alibi_slopes, (x)->bias = (place)->bias;                        \
        (x)->q = attention_rows_of(c, &(c)->q, false, b, (pq)->row, (pq)->rows, h);                  \
        (x)->k = attention_rows_of(c, &(blk)->k, false, b, (pk)->row, (pk)->rows, kv_head(c, h));    \
        (x)->v = attention_rows_of(c, &(blk)->v, false, b, (pk)->row, (pk)->rows, kv_head(c, h));    \
    } while (0)

cot_status attention_core_forward(const attention_call *c, const range_pair *pair, const block *keys, int64_t b,
                                  int64_t h, const cot_attention_forward_args *outputs)
{
    attention_block place;
    cot_attention_forward_args x;
    attention_place(c, pair, b, h, &place);
    SET_BLOCK(&x, c, &place, &pair->q, &pair->k, keys, b, h);
    x.out = outputs->out, x.lse = outputs->lse, x.sink = outputs->sink;
    count_call(c, pair, h);
    return c->base.group->dry ? COT_OK : cot_attention_forward(c->base.queue, &x);
}

typedef struct core_backward {
    const block *keys;
    const gradients *to;
} core_backward;

static cot_status differentiate_head(const attention_call *c, void *context, const range_pair *pair, int64_t b,
                                     int64_t h)
{
    const core_backward *w = context;
    const row_range *q = &pair->q, *k = &pair->k;
    attention_block place;
    cot_attention_backward_args x;
    attention_place(c, pair, b, h, &place);
    SET_BLOCK(&x, c, &place, q, k, w->keys, b, h);
    x.accumulate = w->to->add;
    x.allow_nondeterminism = c->a.allow_nondeterminism;
    x.lse = attention_rows_of(c, &c->lse, true, b, q->row, q->rows, h);
    x.delta = attention_rows_of(c, &c->delta, true, b, q->row, q->rows, h);
    x.dout = attention_rows_of(c, &c->dout, false, b, q->row, q->rows, h);
    x.dq = attention_rows_of(c, &w->to->dq, false, b, q->row, q->rows, h);
    x.dk = attention_rows_of(c, &w->to->dk, false, b, k->row, k->rows, kv_head(c, h));
    x.dv = attention_rows_of(c, &w->to->dv, false, b, k->row, k->rows, kv_head(c, h));
    x.dbias = attention_bias_of(c, &w->to->dbias, q, k);
    count_call(c, pair, h);
    return c->base.group->dry ? COT_OK : cot_attention_backward(c->base.queue, &x);
}

cot_status attention_core_backward(const attention_call *c, const range_pair *pair, const block *keys,
                                   const gradients *to)
{
    core_backward w = {keys, to};
    return attention_each_head(c, &w, pair, differentiate_head);
}
