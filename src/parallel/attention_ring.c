/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_ring.c: keys and values in a ring.
 *
 * Step s of line i works on the keys of line i-s. A line sends its keys and values from one buffer that does not
 * change. Two buffers receive: the transfer of step s+1 runs during the arithmetic of step s. In the backward, the
 * parts of dk and dv go back to the line of the keys after each step. Two buffers send and two receive: a part that
 * arrives in step s is added after the arithmetic of step s+1. All ranks start their transfers in the order keys 1,
 * keys 2, parts 1, keys 3, parts 2, ..., each as one batch. */
#include "attention_call.h"

#include "staging.h"

#include "core/argument_checks.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/tensor.h"

#include <math.h>

/* ---- the ring of keys and values ------------------------------------------------------------------------------ */

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

static void take_ring(const attention_call *c, cot_arena *memory, key_ring *r)
{
    memset(r, 0, sizeof *r);
    r->own = attention_take_block(c, memory, c->line, c->dtype, true, true);
    for (int n = 0; n < 2 && c->R > 1; n++)
        r->received[n] = attention_take_block(c, memory, largest_line(c), c->dtype, true, true);
    r->sends = take_transfers(c, memory);
}

/* The block of the line of step s, in the buffer of that step. */
static block block_of_step(const attention_call *c, const key_ring *r, int64_t s)
{
    if (s == 0)
        return r->own;
    cot_arena memory = {.base = r->received[s % 2].data};
    return attention_take_block(c, &memory, line_before(c, s), c->dtype, true, true);
}

/* Starts the transfers of step s: its keys arrive, and those of this line leave. */
static cot_status exchange_step(const attention_call *c, key_ring *r, int64_t s)
{
    cot_group *group = c->base.group;
    const int64_t before = line_before(c, s), after = line_after(c, s);
    const int tag = (int)(TAG_KEYS + 2 * s);
    if (s >= c->R)
        return COT_OK;
    if (is_needed(c, c->line, before)) {
        const block b = block_of_step(c, r, s);
        CHECK(cot_group_receive(group, &r->receives[s % 2], attention_rank_of(c, before), tag, b.data, b.bytes));
    }
    if (is_needed(c, after, c->line))
        CHECK(cot_group_send(group, &r->sends[s], attention_rank_of(c, after), tag, r->own.data, r->own.bytes));
    return cot_group_flush(group);
}

static cot_status start_ring(const attention_call *c, key_ring *r)
{
    CHECK(cot_group_copy(c->base.group, &r->own.k, &c->k, false));
    CHECK(cot_group_copy(c->base.group, &r->own.v, &c->v, false));
    return exchange_step(c, r, 1);
}

/* Waits for the keys of step s, and starts the transfers of step s+1. */
static cot_status begin_step(const attention_call *c, key_ring *r, int64_t s)
{
    if (s == 0)
        return COT_OK;
    CHECK(cot_group_wait(c->base.group, &r->receives[s % 2], 1));
    if (cot_is_staged(c->base.group)) /* each send has a copy of the keys */
        CHECK(cot_group_wait(c->base.group, &r->sends[s - 1], 1));
    return exchange_step(c, r, s + 1);
}

/* ---- forward -------------------------------------------------------------------------------------------------- */

static cot_status attend_head(const attention_call *c, void *context, const range_pair *pair, int64_t b, int64_t h)
{
    const ring_forward *f = context;
    const row_range *q = &pair->q;
    const bool first = !f->started[pair->q_index];
    cot_attention_forward_args x;
    cot_attention_merge_args m;
    COT_INIT(&x);
    COT_INIT(&m);
    m.out_a = m.out = attention_rows_of(c, &f->to.out, false, b, q->row, q->rows, h);
    m.lse_a = m.lse = attention_rows_of(c, &f->to.lse, true, b, q->row, q->rows, h);
    m.out_b = attention_rows_of(c, &f->block_out, false, b, q->row, q->rows, h);
    m.lse_b = attention_rows_of(c, &f->block_lse, true, b, q->row, q->rows, h);
    x.out = first ? m.out : m.out_b;
    x.lse = first ? m.lse : m.lse_b;
    c->base.group->merges += !first;
    CHECK(attention_core_forward(c, pair, &f->current, b, h, &x));
    return first || c->base.group->dry ? COT_OK : cot_attention_merge(c->base.queue, &m);
}

static cot_status attend(const attention_call *c, void *context, const range_pair *pair)
{
    const ring_forward *f = context;
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
    CHECK(attention_each_head(c, context, pair, attend_head));
    for (int64_t i = pair->q_index; i < end; i++)
        f->started[i] = true;
    return COT_OK;
}

void attention_take_ring_forward(const attention_call *c, cot_arena *memory, const results *to, ring_forward *f)
{
    const int64_t count = c->q_ranges[c->line].first[c->packed ? c->B : 1];
    take_ring(c, memory, &f->r);
    f->to = *to;
    f->block_out = attention_take(memory, c->sum, 4, to->out.shape);
    f->block_lse = attention_take(memory, c->sum, 3, to->lse.shape);
    f->started = cot_arena_take_host(memory, count, sizeof *f->started);
    if (f->started != NULL)
        memset(f->started, 0, (size_t)count * sizeof *f->started);
}

cot_status attention_ring_forward(const attention_call *c, ring_forward *f)
{
    CHECK(cot_group_fill(c->base.group, &f->to.out, 0));
    CHECK(cot_group_fill(c->base.group, &f->to.lse, -INFINITY));
    CHECK(start_ring(c, &f->r));
    for (int64_t s = 0; s < c->R; s++) {
        CHECK(begin_step(c, &f->r, s));
        f->current = block_of_step(c, &f->r, s);
        CHECK(attention_each_pair(c, line_before(c, s), attend, f));
    }
    return cot_group_wait(c->base.group, f->r.sends, (int)c->R);
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

static cot_status differentiate(const attention_call *c, void *context, const range_pair *pair)
{
    const ring_backward *w = context;
    return attention_core_backward(c, pair, &w->keys, &w->to);
}

static block take_gradients(const attention_call *c, cot_arena *memory, int64_t line)
{
    return attention_take_block(c, memory, line, c->sum, cot_is_present(&c->a.dk), cot_is_present(&c->a.dv));
}

/* Adds the part of step s, which line i+s has computed, to the sums. */
static cot_status add_part(const attention_call *c, ring_backward *w, int64_t s)
{
    if (s < 1 || !attention_has_key_gradients(c) || !is_needed(c, line_after(c, s), c->line))
        return COT_OK;
    CHECK(cot_group_wait(c->base.group, &w->receives[s % 2], 1));
    cot_arena memory = {.base = w->received[s % 2].data};
    const block part = take_gradients(c, &memory, c->line);
    CHECK(cot_group_copy(c->base.group, &w->sums.k, &part.k, true));
    return cot_group_copy(c->base.group, &w->sums.v, &part.v, true);
}

/* Points dk and dv to the sums, or to a cleared buffer that will be sent. */
static cot_status begin_part(const attention_call *c, ring_backward *w, int64_t s)
{
    block part = w->sums;
    if (s > 0 && attention_has_key_gradients(c)) {
        CHECK(cot_group_wait(c->base.group, &w->sends[s % 2], 1)); /* of step s-2, from the same buffer */
        cot_arena memory = {.base = w->sent[s % 2].data};
        part = take_gradients(c, &memory, line_before(c, s));
        CHECK(cot_group_clear(c->base.group, part.data, part.bytes));
    }
    w->to.dk = part.k, w->to.dv = part.v;
    w->part = part;
    return COT_OK;
}

/* Starts the transfers of the parts of step s. */
static cot_status exchange_parts(const attention_call *c, ring_backward *w, int64_t s)
{
    cot_group *group = c->base.group;
    const int64_t before = line_before(c, s), after = line_after(c, s);
    const int tag = (int)(TAG_PARTS + 2 * s);
    if (s < 1 || !attention_has_key_gradients(c))
        return COT_OK;
    if (is_needed(c, after, c->line))
        CHECK(cot_group_receive(group, &w->receives[s % 2], attention_rank_of(c, after), tag, w->received[s % 2].data,
                                w->sums.bytes));
    if (is_needed(c, c->line, before))
        CHECK(cot_group_send(group, &w->sends[s % 2], attention_rank_of(c, before), tag, w->part.data, w->part.bytes));
    return cot_group_flush(group);
}

void attention_take_ring_backward(const attention_call *c, cot_arena *memory, const gradients *to, const block *sums,
                                  ring_backward *w)
{
    take_ring(c, memory, &w->r);
    w->to = *to, w->sums = *sums;
    w->to.add = true;
    for (int n = 0; n < 2 && c->R > 1; n++) {
        w->sent[n] = take_gradients(c, memory, largest_line(c));
        w->received[n] = take_gradients(c, memory, c->line);
    }
}

cot_status attention_ring_backward(const attention_call *c, ring_backward *w)
{
    CHECK(cot_group_fill(c->base.group, &w->to.dq, 0));
    CHECK(cot_group_fill(c->base.group, &w->to.dbias, 0));
    CHECK(cot_group_clear(c->base.group, w->sums.data, w->sums.bytes));
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
