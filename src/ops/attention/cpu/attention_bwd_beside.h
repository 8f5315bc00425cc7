/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_beside.h: the backward's arithmetic beside its products, for AMX's of two and three bf16.
 *
 * TALL keys at a block of queries after the other: P^T and dS^T of a part, 32 keys and 32 queries, are made two keys a step of
 * the tile products, of the next parts of S^T and dP^T and of dv, dk and dq of the keys before, whose products are pending
 * until then. Products of two and three bf16 are long enough to hide it all, and their terms cost it
 * more; of one bf16 they are not, and it is as fast by itself. */
#ifndef COT_ATTENTION_BWD_BESIDE_H
#define COT_ATTENTION_BWD_BESIDE_H

#include "attention_bwd_pairs.h"

enum {
    WAITING = 4, /* parts that wait for their exponentials, and the next ones */
    PENDING = (2 * TALL + BLOCK) / STRIP * ATTENTION_MAX_D / STRIP,
};

/* A part of dv, dk or dq, which is still to be added. */
typedef struct pending_part {
    const mt *a, *b;
    float *to;
    int64_t a_rows, n;
    bool add;
} pending_part;

typedef struct pending_products {
    pending_part parts[PENDING];
    int64_t count, done;
} pending_products;

/* A part whose P^T and dS^T are still to be made. */
typedef struct waiting_part {
    const float *s, *dp, *lse, *D;
    mt *prob, *ds, *ds_b;
} waiting_part;

/* Those that wait, in a ring: what is left of the oldest, `rows` of it, and the others from `next` on. */
typedef struct waiting_scores {
    const waiting_part *ring;
    int64_t next, count;
    waiting_part at;
    int64_t rows;
    vf unit, prob[2], ds[2];   /* of a key; dS^T of an even one */
    bool busy;                 /* there were rows when this step began */
    mt_ahead *ahead, *ahead_2; /* asked for meanwhile, one after the other */
} waiting_scores;

V_INLINE void scores_prob(waiting_scores *w)
{
    V_UNROLL
    for (int m = 0; m < 2; m++)
        w->prob[m] = exp_scores(v_load(w->at.s + m * VW), w->unit, v_load(w->at.lse + m * VW));
    mt_store_a2(w->at.prob, w->prob[0], w->prob[1]);
    w->at.s += MT;
    w->at.prob += MT;
}

V_INLINE void scores_ds(waiting_scores *w, vf ds[2])
{
    V_UNROLL
    for (int m = 0; m < 2; m++)
        ds[m] = v_mul(w->prob[m], v_sub(v_load(w->at.dp + m * VW), v_load(w->at.D + m * VW)));
    mt_store_a2(w->at.ds, ds[0], ds[1]);
    w->at.dp += MT;
    w->at.ds += MT;
}

/* Two keys in four turns. */
V_INLINE void scores_row(waiting_scores *w, int turn)
{
    if (turn % 2 == 0) {
        scores_prob(w);
    } else if (turn == 1) {
        scores_ds(w, w->ds);
    } else {
        vf odd[2];
        scores_ds(w, odd);
        V_UNROLL
        for (int m = 0; m < 2; m++)
            mt_store_b(w->at.ds_b, TALL, 0, m * VW, w->ds[m], odd[m]);
        w->at.ds_b += 2 * MT;
        w->rows -= 2;
    }
}

V_INLINE void scores_next(waiting_scores *w)
{
    w->at = w->ring[w->next];
    w->next = (w->next + 1) % WAITING;
    w->rows = STRIP;
    w->count--;
}

V_INLINE void scores_turn(void *with, int turn)
{
    waiting_scores *w = with;
    for (size_t line = 0; line < COT_MATMUL_SPLIT; line++)
        mt_ask(w->ahead->at < w->ahead->end ? w->ahead : w->ahead_2);
    if (turn == 0) {
        if (w->rows == 0 && w->count > 0)
            scores_next(w);
        w->busy = w->rows > 0;
    }
    if (w->busy)
        scores_row(w, turn);
}

/* Until `count` are left besides those that are done. */
V_INLINE void scores_until(waiting_scores *w, int64_t count)
{
    for (;;) {
        while (w->rows > 0)
            for (int turn = 0; turn < 4; turn++)
                scores_row(w, turn);
        if (w->count <= count)
            return;
        scores_next(w);
    }
}

V_INLINE void add_pending(pending_products *y, waiting_scores *w)
{
    const pending_part *at = &y->parts[y->done++];
    mt_part(at->n, 1, at->a, at->a_rows, at->b, at->to, at->add, false, scores_turn, w);
}

static void finish_pending(pending_products *y)
{
    mt_ahead nothing = {NULL, NULL};
    waiting_scores w = {.ahead = &nothing, .ahead_2 = &nothing};
    while (y->done < y->count)
        add_pending(y, &w);
    y->count = y->done = 0;
}

/* What each strip of TALL keys sees of a block of queries, and the other way round. */
typedef struct seen_strips {
    attention_span queries[TALL / STRIP], keys[BLOCK / STRIP];
    int64_t parts;
} seen_strips;

static seen_strips strips_seen(const context *c, const scores *a, int64_t first_key, int64_t first_query)
{
    seen_strips seen = {.parts = 0};
    for (int64_t i = 0; i < BLOCK / STRIP; i++)
        seen.keys[i] = (attention_span){TALL, 0};
    for (int64_t r = 0; r < TALL; r += STRIP) {
        const attention_span rows =
            attention_queries_of_rows(&c->p->sizes, &a->s, first_key + r, first_key + r + STRIP);
        const attention_span strips = seen.queries[r / STRIP] = attention_strips(rows, first_query, BLOCK);
        for (int64_t i = strips.first / STRIP; i < strips.end / STRIP; i++, seen.parts++) {
            seen.keys[i].first = seen.keys[i].first < r ? seen.keys[i].first : r;
            seen.keys[i].end = r + STRIP;
        }
    }
    return seen;
}

/* The products of keys from row `top` of their block on: one panel of columns after the other, since strips of keys share it, and
 * of dq^T two rows of parts. */
static void push_products(const context *c, const pair_of_blocks *b, const strip_buffers *x, const seen_strips *seen,
                          int64_t top, pending_products *pending)
{
    const int64_t d = c->w.d, dv = c->w.dv, half = x->turn * TALL * BLOCK;
    const mt *prob = x->prob + half, *ds = x->ds + half, *ds_b = x->ds_b + half;
    for (int64_t n = 0; n < dv + d; n += STRIP)
        for (int64_t r = 0; r < TALL; r += STRIP) {
            const attention_span of = seen->queries[r / STRIP];
            const mt *rows = n < dv ? prob : ds, *columns = n < dv ? b->q.dout : b->q.q;
            float *to = n < dv ? b->dv : b->dk;
            const int64_t column = n < dv ? n : n - dv;
            if (of.first < of.end)
                pending->parts[pending->count++] = (pending_part){.a = rows + mt_at(TALL, r, of.first),
                                                                  .a_rows = TALL,
                                                                  .b = columns + mt_at(BLOCK, of.first, column),
                                                                  .to = to + mt_at(BLOCK, top + r, column),
                                                                  .n = of.end - of.first,
                                                                  .add = b->begun[(top + r) / STRIP]};
        }
    for (int64_t two = 0; two < d; two += 2 * STRIP)
        for (int64_t i = 0; i < BLOCK; i += STRIP) {
            const attention_span of = seen->keys[i / STRIP];
            for (int64_t row = two; of.first < of.end && row < two + 2 * STRIP && row < d; row += STRIP)
                pending->parts[pending->count++] = (pending_part){.a = b->kt + mt_at(d, row, top + of.first),
                                                                  .a_rows = d,
                                                                  .b = ds_b + mt_at(TALL, of.first, i),
                                                                  .to = b->dq + mt_at(d, row, i),
                                                                  .n = of.end - of.first,
                                                                  .add = b->dq_begun[i / STRIP]};
        }
    for (int64_t r = 0; r < TALL / STRIP; r++)
        b->begun[top / STRIP + r] |= seen->queries[r].first < seen->queries[r].end;
    for (int64_t i = 0; i < BLOCK / STRIP; i++)
        b->dq_begun[i] |= seen->keys[i].first < seen->keys[i].end;
}

/* A mask hides part of keys j .. and queries i .., s[STRIP][STRIP]: -inf there. */
static void hide_scores(const scores *a, float *s, int64_t j, int64_t i)
{
    for (int64_t r = 0; r < STRIP; r++) {
        const attention_span seen = scores_queries(a, j + r);
        for (int64_t c = 0; c < STRIP; c += VW)
            v_store(s + r * MT + c, mask_scores(v_load(s + r * MT + c), seen.first - i - c, seen.end - i - c));
    }
}

/* TALL keys from row `top` of the block on, at the block of queries: P^T and dS^T, while what was pending is added; their own products
 * are pending then. */
static void differentiate_beside(const context *c, const scores *a, const pair_of_blocks *b, strip_buffers *x,
                                 pending_products *pending, int64_t top)
{
    /* Parts that wait take the place of the scores that differentiate_blocks has there. */
    float(*const s)[STRIP * STRIP] = (float(*)[STRIP * STRIP]) x->s;
    float(*const dp)[STRIP * STRIP] = (float(*)[STRIP * STRIP]) x->dp;
    const int64_t d = c->w.d, dv = c->w.dv, first_key = b->first_key + top;
    const seen_strips seen = strips_seen(c, a, first_key, b->first_query);
    if (seen.parts == 0)
        return;
    x->turn = 1 - x->turn;
    const int64_t half = x->turn * TALL * BLOCK;
    waiting_part ring[WAITING];
    waiting_scores w = {
        .ring = ring, .unit = v_set1(scores_unit(c->p)), .ahead = b->forms_ahead, .ahead_2 = b->dq_ahead};
    int64_t slot = 0, due = 0;
    for (int64_t i = 0; i < BLOCK; i += STRIP) {
        const attention_span keys = seen.keys[i / STRIP], queries = {i, i + STRIP};
        const int64_t n = keys.end > keys.first ? (keys.end - keys.first) / STRIP : 0;
        if (w.count + (w.rows > 0) + n > WAITING)
            scores_until(&w, WAITING - n);
        for (int64_t r = keys.first; r < keys.end; r += STRIP)
            mt_part(d, 1, b->k + mt_at(BLOCK, top + r, 0), BLOCK, b->q.qt + mt_at(d, 0, i),
                    s[(slot + (r - keys.first) / STRIP) % WAITING], false, false, scores_turn, &w);
        for (int64_t r = keys.first; r < keys.end; r += STRIP, slot = (slot + 1) % WAITING) {
            mt_part(dv, 1, b->v + mt_at(BLOCK, top + r, 0), BLOCK, b->q.dot + mt_at(dv, 0, i), dp[slot], false, true,
                    scores_turn, &w);
            if (!all_seen(a, first_key + r, STRIP, b->first_query, queries))
                hide_scores(a, s[slot], first_key + r, b->first_query + i);
            const int64_t at = half + mt_at(TALL, r, i);
            ring[slot] =
                (waiting_part){s[slot], dp[slot], b->lse + i, b->D + i, x->prob + at, x->ds + at, x->ds_b + at};
            w.count++;
        }
        for (due += n * pending->count; due >= seen.parts; due -= seen.parts)
            add_pending(pending, &w);
    }
    scores_until(&w, 0);
    pending->count = pending->done = 0;
    push_products(c, b, x, &seen, top, pending);
}

#endif
