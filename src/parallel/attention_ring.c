/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_ring.c: the arithmetic and the transfers of attention over a group.
 *
 * Step s of line i works on the keys of line i-s. A line sends its keys and values from one buffer that does not
 * change. Two buffers receive: the transfer of step s+1 runs during the arithmetic of step s. In the backward, the
 * parts of dk and dv go back to the line of the keys after each step. Two buffers send and two receive: a part that
 * arrives in step s is added after the arithmetic of step s+1. All ranks start their transfers in the order keys 1,
 * keys 2, parts 1, keys 3, parts 2, ..., each as one batch. */
#include "attention_call.h"

#include "staging.h"

#include "core/float16.h"
#include "core/argument_checks.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/tensor.h"

#include <math.h>

enum { TAG_KEYS = 2, TAG_PARTS = 3 }; /* plus twice the step */

/* ---- the ring of keys and values ------------------------------------------------------------------------------ */

typedef struct ring {
    block own, received[2];
    cot_transfer *sends; /* [R] */
    cot_transfer receives[2];
} ring;

/* The line whose keys line `line` gets in step s, and the line that gets its keys. */
static int64_t line_before(const attention_call *c, int64_t s)
{
    return (c->line - s + c->R) % c->R;
}

static int64_t line_after(const attention_call *c, int64_t s)
{
    return (c->line + s) % c->R;
}

static bool is_needed(const attention_call *c, int64_t queries, int64_t keys)
{
    return c->needed[queries * c->R + keys];
}

static int rank_of(const attention_call *c, int64_t line)
{
    return (int)(line * c->C + c->column);
}

/* The line with the most key rows. */
static int64_t largest_line(const attention_call *c)
{
    int64_t largest = 0;
    for (int64_t line = 1; line < c->R; line++)
        if (c->k_lines[line].rows > c->k_lines[largest].rows)
            largest = line;
    return largest;
}

static cot_transfer *take_transfers(const attention_call *c, cot_arena *memory)
{
    cot_transfer *transfers = cot_arena_take_host(memory, c->R, sizeof *transfers);
    if (transfers != NULL)
        memset(transfers, 0, (size_t)c->R * sizeof *transfers);
    return transfers;
}

static void take_ring(const attention_call *c, cot_arena *memory, ring *r)
{
    memset(r, 0, sizeof *r);
    r->own = attention_take_block(c, memory, c->line, c->dtype, true, true);
    for (int n = 0; n < 2 && c->R > 1; n++)
        r->received[n] = attention_take_block(c, memory, largest_line(c), c->dtype, true, true);
    r->sends = take_transfers(c, memory);
}

/* The block of the line of step s, in the buffer of that step. */
static block block_of_step(const attention_call *c, const ring *r, int64_t s)
{
    if (s == 0)
        return r->own;
    cot_arena memory = {.base = r->received[s % 2].data};
    return attention_take_block(c, &memory, line_before(c, s), c->dtype, true, true);
}

/* Starts the transfers of step s: its keys arrive, and those of this line leave. */
static cot_status exchange_step(const attention_call *c, ring *r, int64_t s)
{
    cot_group *group = c->base.group;
    const int64_t before = line_before(c, s), after = line_after(c, s);
    const int tag = (int)(TAG_KEYS + 2 * s);
    if (s >= c->R)
        return COT_OK;
    if (is_needed(c, c->line, before)) {
        const block b = block_of_step(c, r, s);
        CHECK(cot_group_receive(group, &r->receives[s % 2], rank_of(c, before), tag, b.data, b.bytes));
    }
    if (is_needed(c, after, c->line))
        CHECK(cot_group_send(group, &r->sends[s], rank_of(c, after), tag, r->own.data, r->own.bytes));
    return cot_group_flush(group);
}

static cot_status start_ring(const attention_call *c, ring *r)
{
    CHECK(cot_group_copy(c->base.group, &r->own.k, &c->k, false));
    CHECK(cot_group_copy(c->base.group, &r->own.v, &c->v, false));
    return exchange_step(c, r, 1);
}

/* Waits for the keys of step s, and starts the transfers of step s+1. */
static cot_status begin_step(const attention_call *c, ring *r, int64_t s)
{
    if (s == 0)
        return COT_OK;
    CHECK(cot_group_wait(c->base.group, &r->receives[s % 2], 1));
    if (cot_is_staged(c->base.group)) /* each send has a copy of the keys */
        CHECK(cot_group_wait(c->base.group, &r->sends[s - 1], 1));
    return exchange_step(c, r, s + 1);
}

/* The transfers are in the frame of the caller. After an error they are taken back before that frame ends. */
static cot_status end_ring(const attention_call *c, cot_status status)
{
    return status == COT_OK ? COT_OK : cot_group_fail(c->base.group, c->base.name, status);
}

/* ---- calls of the core ---------------------------------------------------------------------------------------- */

/* Calls body for each batch and head if the call is divided into single heads, else once with -1. */
typedef cot_status head_body(const attention_call *c, void *context, const range_pair *pair, int64_t b, int64_t h);

static cot_status each_head(const attention_call *c, void *context, const range_pair *pair, head_body *body)
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

/* ---- forward -------------------------------------------------------------------------------------------------- */

typedef struct forward {
    ring r;
    cot_tensor out, lse;             /* of the keys so far, of the line's queries */
    cot_tensor block_out, block_lse; /* of one block of keys */
    bool *started;                   /* for each range of queries: out and lse have keys */
    block current;
} forward;

static cot_status attend_head(const attention_call *c, void *context, const range_pair *pair, int64_t b, int64_t h)
{
    const forward *f = context;
    const row_range *q = &pair->q;
    const bool first = !f->started[pair->q_index];
    attention_block place;
    cot_attention_forward_args x;
    attention_place(c, pair, b, h, &place);
    SET_BLOCK(&x, c, &place, q, &pair->k, &f->current, b, h);
    cot_attention_merge_args m;
    COT_INIT(&m);
    m.out_a = m.out = attention_rows_of(c, &f->out, false, b, q->row, q->rows, h);
    m.lse_a = m.lse = attention_rows_of(c, &f->lse, true, b, q->row, q->rows, h);
    m.out_b = attention_rows_of(c, &f->block_out, false, b, q->row, q->rows, h);
    m.lse_b = attention_rows_of(c, &f->block_lse, true, b, q->row, q->rows, h);
    x.out = first ? m.out : m.out_b;
    x.lse = first ? m.lse : m.lse_b;
    count_call(c, pair, h);
    c->base.group->merges += !first;
    if (c->base.group->dry)
        return COT_OK;
    CHECK(cot_attention_forward(c->base.queue, &x));
    return first ? COT_OK : cot_attention_merge(c->base.queue, &m);
}

static cot_status attend(const attention_call *c, void *context, const range_pair *pair)
{
    const forward *f = context;
    const int64_t end = pair->q_index + pair->q_count;
    bool mixed = false;
    for (int64_t i = pair->q_index; i < end; i++)
        mixed = mixed || f->started[i] != f->started[pair->q_index];
    for (int64_t i = pair->q_index; mixed && i < end; i++) { /* some rows have a result to merge with */
        range_pair part = *pair;
        part.q_index = i, part.q_count = 1, part.q = c->q_ranges[c->line].list[i];
        CHECK(attend(c, context, &part));
    }
    if (mixed)
        return COT_OK;
    CHECK(each_head(c, context, pair, attend_head));
    for (int64_t i = pair->q_index; i < end; i++)
        f->started[i] = true;
    return COT_OK;
}

/* Adds the sink to row `row` of head h: lse becomes log(exp(lse) + exp(sink)), and out shrinks. */
static void add_sink(const attention_call *c, const forward *f, int64_t b, int64_t row, int64_t h)
{
    const cot_tensor *lse = &f->lse, *out = &f->out;
    const int64_t at = b * lse->stride[0] + h * lse->stride[1] + row * lse->stride[2];
    const double before = cot_load_f64(lse->data, lse->dtype, at);
    const double sink = cot_load_f64(c->a.sink.data, c->a.sink.dtype, (c->column * c->heads + h) * c->a.sink.stride[0]);
    const double high = fmax(before, sink), low = fmin(before, sink);
    const double after = isnan(before) || isnan(sink) ? before + sink : high + log1p(exp(low - high));
    cot_store_f64(lse->data, lse->dtype, at, isinf(high) ? high : after);
    const double weight = before == -INFINITY ? 0 : exp(before - after);
    const int64_t first = b * out->stride[0] + row * out->stride[1] + h * out->stride[2];
    for (int64_t i = first; i < first + c->d_v; i++)
        cot_store_f64(out->data, out->dtype, i, weight * cot_load_f64(out->data, out->dtype, i));
}

/* The first `rows` rows of a range and batch, without the batch axis: [rows,H,*], or [H,rows] if statistic. */
static cot_tensor rows_of_range(const cot_tensor *t, bool statistic, int64_t b, int64_t row, int64_t rows)
{
    cot_tensor view = cot_slice(t, 0, b, 1);
    view = cot_slice(&view, statistic ? 2 : 1, row, rows);
    memmove(view.shape, view.shape + 1, (size_t)(view.rank - 1) * sizeof *view.shape);
    memmove(view.stride, view.stride + 1, (size_t)(view.rank - 1) * sizeof *view.stride);
    view.rank--;
    return view;
}

static cot_status add_sinks_on_device(const attention_call *c, const forward *f, const row_range *q, int64_t b,
                                      int64_t rows)
{
    const cot_tensor out = rows_of_range(&f->out, false, b, q->row, rows);
    const cot_tensor lse = rows_of_range(&f->lse, true, b, q->row, rows);
    const cot_tensor sink = cot_slice(&c->a.sink, 0, c->column * c->heads, c->heads);
    return cot_gpu_add_sink(c->base.group->gpu, &out, &lse, &sink);
}

/* Rows beyond seqused and beyond the last sequence get no sink. */
static cot_status add_sinks(const attention_call *c, const forward *f)
{
    const row_ranges *p = &c->q_ranges[c->line];
    if (c->base.group->dry)
        return COT_OK;
    for (int64_t n = 0; cot_is_present(&c->a.sink) && n < p->first[c->packed ? c->B : 1]; n++)
        for (int64_t b = 0; b < c->batches; b++) {
            const row_range *q = &p->list[n];
            const int64_t used = attention_used(c, false, c->packed ? q->b : b);
            if (c->base.group->on_device) {
                CHECK(add_sinks_on_device(c, f, q, b, cot_clamp(used - q->begin, 0, q->rows)));
                continue;
            }
            for (int64_t i = 0; i < q->rows && q->begin + i < used; i++)
                for (int64_t h = 0; h < c->heads; h++)
                    add_sink(c, f, b, q->row + i, h);
        }
    return COT_OK;
}

/* Takes the tensors of the exchange that both directions have. */
static void take_inputs(attention_call *c, cot_arena *memory, head_field fields[3])
{
    const int64_t q_rows = c->q_lines[c->line].rows, k_rows = c->k_lines[c->line].rows;
    const cot_attention_backward_args *a = &c->a;
    c->q = attention_take(memory, c->dtype, 4, (const int64_t[]){c->batches, q_rows, c->heads, c->d});
    c->k = attention_take(memory, c->dtype, 4, (const int64_t[]){c->batches, k_rows, c->kv_heads, c->d});
    c->v = attention_take(memory, c->dtype, 4, (const int64_t[]){c->batches, k_rows, c->kv_heads, c->d_v});
    fields[0] = (head_field){.local = a->q, .gathered = c->q};
    fields[1] = (head_field){.local = a->k, .gathered = c->k, .keys = true};
    fields[2] = (head_field){.local = a->v, .gathered = c->v, .keys = true};
}

static cot_status ring_forward(const attention_call *c, forward *f)
{
    CHECK(start_ring(c, &f->r));
    for (int64_t s = 0; s < c->R; s++) {
        CHECK(begin_step(c, &f->r, s));
        f->current = block_of_step(c, &f->r, s);
        CHECK(attention_each_pair(c, line_before(c, s), attend, f));
    }
    return cot_group_wait(c->base.group, f->r.sends, (int)c->R);
}

static cot_status store_forward(const attention_call *c, const forward *f, const cot_messages *after,
                                const head_field *outputs, int output_count)
{
    cot_group *group = c->base.group;
    if (c->C > 1) {
        if (cot_is_present(&c->a.out))
            CHECK(cot_group_copy(group, &outputs[0].gathered, &f->out, false));
        return attention_to_rows(c, after, outputs, output_count);
    }
    CHECK(cot_group_copy(group, &c->a.out, &f->out, false));
    return cot_group_copy(group, &c->a.lse, &f->lse, false);
}

cot_status attention_run_forward(attention_call *c, cot_arena *memory)
{
    forward f = {0};
    head_field inputs[3], outputs[2];
    cot_messages before = {0}, after = {0};
    int output_count = 0;
    const int64_t rows = c->q_lines[c->line].rows, count = c->q_ranges[c->line].first[c->packed ? c->B : 1];
    const int64_t out[] = {c->batches, rows, c->heads, c->d_v}, lse[] = {c->batches, c->heads, rows};
    c->q = c->a.q, c->k = c->a.k, c->v = c->a.v;
    attention_take_used(c, memory);
    if (c->C > 1) {
        take_inputs(c, memory, inputs);
        before = attention_take_exchange(c, memory, inputs, 3, true);
    }
    take_ring(c, memory, &f.r);
    f.out = attention_take(memory, c->sum, 4, out), f.lse = attention_take(memory, c->sum, 3, lse);
    f.block_out = attention_take(memory, c->sum, 4, out), f.block_lse = attention_take(memory, c->sum, 3, lse);
    f.started = cot_arena_take_host(memory, count, sizeof *f.started);
    if (c->C > 1) { /* the results go back to the rows in their own dtypes */
        if (cot_is_present(&c->a.out))
            outputs[output_count++] =
                (head_field){.local = c->a.out, .gathered = attention_take(memory, c->a.out.dtype, 4, out)};
        if (cot_is_present(&c->a.lse))
            outputs[output_count++] = (head_field){.local = c->a.lse, .gathered = f.lse, .statistic = true};
        after = attention_take_exchange(c, memory, outputs, output_count, false);
    }
    if (memory->counting)
        return COT_OK;

    memset(f.started, 0, (size_t)count * sizeof *f.started);
    CHECK(attention_fill_used(c));
    CHECK(cot_group_fill(c->base.group, &f.out, 0));
    CHECK(cot_group_fill(c->base.group, &f.lse, -INFINITY));
    if (c->C > 1)
        CHECK(attention_to_heads(c, &before, inputs, 3));
    CHECK(end_ring(c, ring_forward(c, &f)));
    CHECK(add_sinks(c, &f));
    return store_forward(c, &f, &after, outputs, output_count);
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

typedef struct backward {
    ring r;
    cot_tensor dq, dbias; /* sums over all keys */
    block sums;           /* dk and dv of this line's keys */
    block sent[2], received[2];
    cot_transfer sends[2], receives[2];
    block keys, gradients; /* of the current step */
} backward;

static cot_status differentiate_head(const attention_call *c, void *context, const range_pair *pair, int64_t b,
                                     int64_t h)
{
    const backward *w = context;
    const row_range *q = &pair->q, *k = &pair->k;
    attention_block place;
    cot_attention_backward_args x;
    attention_place(c, pair, b, h, &place);
    SET_BLOCK(&x, c, &place, q, k, &w->keys, b, h);
    x.accumulate = 1;
    x.allow_nondeterminism = c->a.allow_nondeterminism;
    x.lse = attention_rows_of(c, &c->lse, true, b, q->row, q->rows, h);
    x.delta = attention_rows_of(c, &c->delta, true, b, q->row, q->rows, h);
    x.dout = attention_rows_of(c, &c->dout, false, b, q->row, q->rows, h);
    x.dq = attention_rows_of(c, &w->dq, false, b, q->row, q->rows, h);
    x.dk = attention_rows_of(c, &w->gradients.k, false, b, k->row, k->rows, kv_head(c, h));
    x.dv = attention_rows_of(c, &w->gradients.v, false, b, k->row, k->rows, kv_head(c, h));
    x.dbias = attention_bias_of(c, &w->dbias, q, k);
    count_call(c, pair, h);
    if (c->base.group->dry)
        return COT_OK;
    return cot_attention_backward(c->base.queue, &x);
}

static cot_status differentiate(const attention_call *c, void *context, const range_pair *pair)
{
    return each_head(c, context, pair, differentiate_head);
}

static bool has_key_gradients(const attention_call *c)
{
    return cot_is_present(&c->a.dk) || cot_is_present(&c->a.dv);
}

static block take_gradients(const attention_call *c, cot_arena *memory, int64_t line)
{
    return attention_take_block(c, memory, line, c->sum, cot_is_present(&c->a.dk), cot_is_present(&c->a.dv));
}

/* Adds the part of step s, which line i+s has computed, to the sums. */
static cot_status add_part(const attention_call *c, backward *w, int64_t s)
{
    if (s < 1 || !has_key_gradients(c) || !is_needed(c, line_after(c, s), c->line))
        return COT_OK;
    CHECK(cot_group_wait(c->base.group, &w->receives[s % 2], 1));
    cot_arena memory = {.base = w->received[s % 2].data};
    const block part = take_gradients(c, &memory, c->line);
    CHECK(cot_group_copy(c->base.group, &w->sums.k, &part.k, true));
    return cot_group_copy(c->base.group, &w->sums.v, &part.v, true);
}

/* Points `gradients` to the sums, or to a cleared buffer that will be sent. */
static cot_status begin_part(const attention_call *c, backward *w, int64_t s)
{
    if (s == 0) {
        w->gradients = w->sums;
        return COT_OK;
    }
    if (!has_key_gradients(c))
        return COT_OK;
    CHECK(cot_group_wait(c->base.group, &w->sends[s % 2], 1)); /* of step s-2, from the same buffer */
    cot_arena memory = {.base = w->sent[s % 2].data};
    w->gradients = take_gradients(c, &memory, line_before(c, s));
    return cot_group_clear(c->base.group, w->gradients.data, w->gradients.bytes);
}

/* Starts the transfers of the parts of step s. */
static cot_status exchange_parts(const attention_call *c, backward *w, int64_t s)
{
    cot_group *group = c->base.group;
    const int64_t before = line_before(c, s), after = line_after(c, s);
    const int tag = (int)(TAG_PARTS + 2 * s);
    if (s < 1 || !has_key_gradients(c))
        return COT_OK;
    if (is_needed(c, after, c->line))
        CHECK(cot_group_receive(group, &w->receives[s % 2], rank_of(c, after), tag, w->received[s % 2].data,
                                w->sums.bytes));
    if (is_needed(c, c->line, before))
        CHECK(cot_group_send(group, &w->sends[s % 2], rank_of(c, before), tag, w->gradients.data, w->gradients.bytes));
    return cot_group_flush(group);
}

static cot_status ring_backward(const attention_call *c, backward *w)
{
    CHECK(start_ring(c, &w->r));
    for (int64_t s = 0; s < c->R; s++) {
        CHECK(begin_step(c, &w->r, s));
        CHECK(begin_part(c, w, s));
        w->keys = block_of_step(c, &w->r, s);
        CHECK(attention_each_pair(c, line_before(c, s), differentiate, w));
        CHECK(exchange_parts(c, w, s));
        CHECK(add_part(c, w, s - 1));
    }
    CHECK(add_part(c, w, c->R - 1));
    CHECK(cot_group_wait(c->base.group, w->sends, 2));
    return cot_group_wait(c->base.group, w->r.sends, (int)c->R);
}

static cot_status sum_dsink_on_device(const attention_call *c, const cot_tensor *delta, double *sums)
{
    CHECK(cot_group_clear(c->base.group, sums, (size_t)c->H * sizeof *sums));
    for (int64_t n = 0; n < c->own.first[c->packed ? c->B : 1]; n++)
        for (int64_t b = 0; b < c->batches; b++) {
            const row_range *q = &c->own.list[n];
            const int64_t used = attention_used(c, false, c->packed ? q->b : b);
            const int64_t rows = cot_clamp(used - q->begin, 0, q->rows);
            const cot_tensor lse = rows_of_range(&c->a.lse, true, b, q->row, rows);
            const cot_tensor D = rows_of_range(delta, true, b, q->row, rows);
            CHECK(cot_gpu_sum_dsink(c->base.group->gpu, sums, &lse, &D, &c->a.sink));
        }
    return COT_OK;
}

/* dsink[h] = -sum_{b,i} exp(sink[h] - lse[i]) * delta[i], over the rows of this rank. */
static cot_status sum_dsink(const attention_call *c, const cot_tensor *delta, double *sums)
{
    const cot_tensor *lse = &c->a.lse, *sink = &c->a.sink;
    if (c->base.group->dry)
        return COT_OK;
    if (c->base.group->on_device)
        return sum_dsink_on_device(c, delta, sums);
    for (int64_t h = 0; h < c->H; h++) {
        const double s = cot_load_f64(sink->data, sink->dtype, h * sink->stride[0]);
        sums[h] = 0;
        for (int64_t n = 0; n < c->own.first[c->packed ? c->B : 1]; n++)
            for (int64_t b = 0; b < c->batches; b++) {
                const row_range *q = &c->own.list[n];
                const int64_t used = attention_used(c, false, c->packed ? q->b : b);
                for (int64_t i = 0; i < q->rows && q->begin + i < used; i++) {
                    const int64_t row = q->row + i;
                    const double l = cot_load_f64(lse->data, lse->dtype,
                                                  b * lse->stride[0] + h * lse->stride[1] + row * lse->stride[2]);
                    const double D = cot_load_f64(delta->data, delta->dtype,
                                                  b * delta->stride[0] + h * delta->stride[1] + row * delta->stride[2]);
                    if (l != -INFINITY)
                        sums[h] -= exp(s - l) * D;
                }
            }
    }
    return COT_OK;
}

/* Sums of parameter gradients over all ranks, in f64. */
typedef struct parameter_sums {
    double *dsink, *dbias;
    int64_t dbias_count;
    void *memory;
} parameter_sums;

static bool shares_dbias(const attention_call *c)
{
    return cot_is_present(&c->a.dbias) && (c->packed || c->a.dbias.shape[2] == 1);
}

static parameter_sums take_parameters(const attention_call *c, cot_arena *memory)
{
    parameter_sums p = {.dbias_count = shares_dbias(c) ? cot_elements(&c->a.dbias) : 0};
    const int64_t heads = cot_is_present(&c->a.dsink) ? c->H : 0;
    p.dsink = attention_take(memory, COT_F64, 1, &heads).data;
    p.dbias = attention_take(memory, COT_F64, 1, &p.dbias_count).data;
    const int64_t bytes = (int64_t)cot_group_sum_bytes(c->base.group, COT_F64, cot_max(heads, p.dbias_count));
    p.memory = attention_take(memory, COT_U8, 1, &bytes).data;
    return p;
}

static cot_status sum_parameters(const attention_call *c, const parameter_sums *p, const cot_tensor *delta,
                                 const cot_tensor *dbias)
{
    const cot_attention_backward_args *a = &c->a;
    if (cot_is_present(&a->dsink)) {
        CHECK(sum_dsink(c, delta, p->dsink));
        CHECK(cot_group_sum(c->base.group, COT_F64, p->dsink, c->H, p->memory));
        const cot_tensor sums = cot_tensor_contiguous(p->dsink, COT_F64, 1, &c->H);
        CHECK(cot_group_copy(c->base.group, &a->dsink, &sums, a->accumulate));
    }
    if (!cot_is_present(&a->dbias))
        return COT_OK;
    cot_tensor sums = *dbias;
    if (shares_dbias(c)) {
        sums = cot_tensor_contiguous(p->dbias, COT_F64, 4, dbias->shape);
        CHECK(cot_group_copy(c->base.group, &sums, dbias, false));
        CHECK(cot_group_sum(c->base.group, COT_F64, p->dbias, p->dbias_count, p->memory));
    }
    return cot_group_copy(c->base.group, &a->dbias, &sums, a->accumulate);
}

/* D of this rank's rows. */
static cot_status find_delta(const attention_call *c, const cot_tensor *delta)
{
    cot_attention_delta_args x;
    if (cot_is_present(&c->a.delta) || c->base.group->dry)
        return COT_OK;
    COT_INIT(&x);
    x.out = c->a.out, x.dout = c->a.dout, x.dlse = c->a.dlse, x.delta = *delta;
    return cot_attention_delta(c->base.queue, &x);
}

/* The gradients of q, k and v, on their way back to the rows: with C > 1 they are summed over heads in f32 first. */
typedef struct gradient_fields {
    head_field fields[3];
    int count;
    cot_messages exchange;
    cot_tensor dk, dv; /* of this rank's rows, all heads */
} gradient_fields;

static void take_fields(const attention_call *c, const backward *w, cot_arena *memory, gradient_fields *g)
{
    const cot_attention_backward_args *a = &c->a;
    memset(g, 0, sizeof *g);
    if (cot_is_present(&a->dq))
        g->fields[g->count++] = (head_field){.local = a->dq, .gathered = w->dq, .add = a->accumulate};
    if (cot_is_present(&a->dk)) {
        g->dk = attention_take(memory, c->sum, 4, a->dk.shape);
        g->fields[g->count++] = (head_field){.local = g->dk, .gathered = w->sums.k, .keys = true, .add = true};
    }
    if (cot_is_present(&a->dv)) {
        g->dv = attention_take(memory, c->sum, 4, a->dv.shape);
        g->fields[g->count++] = (head_field){.local = g->dv, .gathered = w->sums.v, .keys = true, .add = true};
    }
    g->exchange = attention_take_exchange(c, memory, g->fields, g->count, false);
}

static cot_status store_gradients(const attention_call *c, const backward *w, gradient_fields *g)
{
    const cot_attention_backward_args *a = &c->a;
    cot_group *group = c->base.group;
    if (c->C == 1) {
        CHECK(cot_group_copy(group, &a->dq, &w->dq, a->accumulate));
        CHECK(cot_group_copy(group, &a->dk, &w->sums.k, a->accumulate));
        return cot_group_copy(group, &a->dv, &w->sums.v, a->accumulate);
    }
    CHECK(cot_group_fill(group, &g->dk, 0));
    CHECK(cot_group_fill(group, &g->dv, 0));
    CHECK(attention_to_rows(c, &g->exchange, g->fields, g->count));
    CHECK(cot_group_copy(group, &a->dk, &g->dk, a->accumulate));
    return cot_group_copy(group, &a->dv, &g->dv, a->accumulate);
}

cot_status attention_run_backward(attention_call *c, cot_arena *memory)
{
    backward w = {0};
    const cot_attention_backward_args *a = &c->a;
    head_field inputs[6];
    cot_messages before = {0};
    gradient_fields gradients = {0};
    const int64_t rows = c->q_lines[c->line].rows;
    const int64_t own_rows = c->q_ranks[c->column].rows;
    cot_tensor delta = a->delta;
    if (!cot_is_present(&delta))
        delta = attention_take(memory, c->sum, 3, (const int64_t[]){c->batches, c->H, own_rows});
    attention_take_used(c, memory);
    c->q = a->q, c->k = a->k, c->v = a->v, c->lse = a->lse, c->delta = delta, c->dout = a->dout;
    if (c->C > 1) {
        const int64_t statistic[] = {c->batches, c->heads, rows};
        take_inputs(c, memory, inputs);
        c->dout = attention_take(memory, c->dtype, 4, (const int64_t[]){c->batches, rows, c->heads, c->d_v});
        c->lse = attention_take(memory, c->sum, 3, statistic), c->delta = attention_take(memory, c->sum, 3, statistic);
        inputs[3] = (head_field){.local = a->dout, .gathered = c->dout};
        inputs[4] = (head_field){.local = a->lse, .gathered = c->lse, .statistic = true};
        inputs[5] = (head_field){.local = delta, .gathered = c->delta, .statistic = true};
        before = attention_take_exchange(c, memory, inputs, 6, true);
    }
    take_ring(c, memory, &w.r);
    if (cot_is_present(&a->dq))
        w.dq = attention_take(memory, c->sum, 4, (const int64_t[]){c->batches, rows, c->heads, c->d});
    if (cot_is_present(&a->dbias))
        w.dbias = attention_take(memory, c->sum, 4, a->dbias.shape);
    w.sums = take_gradients(c, memory, c->line);
    for (int n = 0; n < 2 && c->R > 1; n++) {
        w.sent[n] = take_gradients(c, memory, largest_line(c));
        w.received[n] = take_gradients(c, memory, c->line);
    }
    if (c->C > 1)
        take_fields(c, &w, memory, &gradients);
    const parameter_sums parameters = take_parameters(c, memory);
    if (memory->counting)
        return COT_OK;

    CHECK(attention_fill_used(c));
    CHECK(find_delta(c, &delta));
    CHECK(cot_group_fill(c->base.group, &w.dq, 0));
    CHECK(cot_group_fill(c->base.group, &w.dbias, 0));
    CHECK(cot_group_clear(c->base.group, w.sums.data, w.sums.bytes));
    if (c->C > 1)
        CHECK(attention_to_heads(c, &before, inputs, 6));
    CHECK(end_ring(c, ring_backward(c, &w)));
    CHECK(sum_parameters(c, &parameters, &delta, &w.dbias));
    return store_gradients(c, &w, &gradients);
}

/* ---- the calls ------------------------------------------------------------------------------------------------ */

static cot_status run_with_memory(void *call, cot_arena *memory)
{
    attention_call *c = call;
    return c->backward ? attention_run_backward(c, memory) : attention_run_forward(c, memory);
}

static cot_status run_call(attention_call *c)
{
    return cot_group_run(&c->base, attention_check, attention_words, run_with_memory, attention_free);
}

cot_status cot_parallel_attention_forward(cot_group *group, cot_queue *queue, const cot_parallel_options *options,
                                          const cot_attention_forward_args *args)
{
    attention_call c = {
        .base = {.name = "parallel_attention_forward", .group = group, .queue = queue}, .given = options, .args = args};
    return run_call(&c);
}

cot_status cot_parallel_attention_backward(cot_group *group, cot_queue *queue, const cot_parallel_options *options,
                                           const cot_attention_backward_args *args)
{
    attention_call c = {.base = {.name = "parallel_attention_backward", .group = group, .queue = queue},
                        .given = options,
                        .args = args,
                        .backward = true};
    return run_call(&c);
}
