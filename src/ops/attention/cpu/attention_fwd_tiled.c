/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_tiled.c: out = softmax(s) v and lse, in blocks, on the products of simd/matmul.h:
 *
 *     S = Q K^T       [TALL queries][up to KEYS keys], float32
 *     P = exp(S - m)  m the running maximum of a row, with AMX what it was first; rounded to an operand's type (bf16 with
 *                     AMX), its sum is not
 *     O = O exp(m_before - m) + P V;      out = O / sum,  lse = m + log(sum)
 *
 * First the keys of a sequence and head are packed for all query heads that read them: K^T [d][KEYS] and V [KEYS][dv] of
 * every block, both in B form. Then an item is a block of queries of one head; its state lies in its thread's slice of scratch. Blocks that no query
 * of a strip sees are skipped, and within a block the strips of keys. */
#include "attention_scores.h"

#include <stdatomic.h>

cot_status V_NAME(attention_fwd_tiled)(cot_queue *, const void *, void *);

enum {
    KEYS = MT_ONE_FORM ? ATTENTION_BLOCK : ATTENTION_FWD_AMX_KEYS(sizeof(mt)), /* of a block, at most */
    ROWS = ATTENTION_FWD_ROWS,
    CELLS = ATTENTION_FWD_CELLS,
    SCALE_FIRST = MT_ONE_FORM, /* scores are scaled and rounded: the difference is 0 at the largest one */
};

typedef struct context {
    const attention_problem *p;
    attention_fwd_layout w;
    mt *kt, *v;
    int64_t chained;       /* groups that one thread each works off */
    _Atomic int64_t *next; /* of them */
} context;

/* The operands of a sequence and key-value head: of its block i, from kt + i * step * d and v + i * step * dv on. */
typedef struct packed_keys {
    mt *kt, *v;
    int64_t step;
} packed_keys;

/* ---- packing -------------------------------------------------------------------------------------------- */

static packed_keys keys_from(const context *c, int64_t number, int64_t step)
{
    return (packed_keys){c->kt + number * c->w.keys * c->w.d, c->v + number * c->w.keys * c->w.dv, step * c->w.keys};
}

/* Every block of every head has a place of its own, the heads of a block beside each other. */
static packed_keys keys_of(const context *c, int64_t b, int64_t hkv)
{
    const attention_axis axis = {c->p, true, c->w.keys};
    const int64_t heads = c->p->sizes.Hkv;
    return keys_from(c, attention_first_slot(&axis, b) * heads + hkv, heads);
}

/* x: a strip of rows. */
static void pack_block(const context *c, const attention_block *block, int64_t hkv, const packed_keys *keys, float *x)
{
    const attention_problem *p = c->p;
    const int64_t at = block->first / c->w.keys * keys->step;
    for (int64_t r = 0; r < block->used; r += STRIP) {
        const int64_t rows = cot_clamp(block->used - r, 0, STRIP), row = block->s.k_row + block->first + r;
        load_rows(x, c->w.d, &p->k, block->s.b, row, hkv, rows, p->sizes.d);
        pack_transposed(keys->kt + at * c->w.d, true, r, x, c->w.d);
        load_rows(x, c->w.dv, &p->v, block->s.b, row, hkv, rows, p->sizes.dv);
        pack_b(keys->v + at * c->w.dv, c->w.keys, r, x, c->w.dv);
    }
}

/* A group is what reads the same keys: the query heads of a key-value head of a sequence. Is it one that a
 * thread works off by itself? */
static bool chained(const context *c, int64_t b, int64_t hkv)
{
    return b * c->p->sizes.Hkv + hkv < c->chained;
}

static void pack_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const attention_axis axis = {c->p, true, c->w.keys};
    const int64_t hkv = item % c->p->sizes.Hkv;
    const attention_block block = attention_block_at(&axis, item / c->p->sizes.Hkv);
    if (block.rows == 0 || chained(c, block.s.b, hkv))
        return;
    const packed_keys keys = keys_of(c, block.s.b, hkv);
    pack_block(c, &block, hkv, &keys, scratch);
}

/* ---- softmax --------------------------------------------------------------------------------------------- */

/* P V of a strip, which is still to be added to its out. */
typedef struct pending_product {
    const mt *prob, *v;
    float *out;
    int64_t keys, parts, done;
    bool add;
} pending_product;

/* The state of an item's queries. */
typedef struct rows_state {
    _Alignas(64) mt q[CELLS];
    _Alignas(64) float out[CELLS];
    _Alignas(64) float most[ROWS], sum[ROWS]; /* of a row's scores so far, or some of them; and of exp(s - most) */
    _Alignas(64) float s[TALL * BLOCK];
    _Alignas(64) mt prob[MT_ONE_FORM ? 1 : 2 * TALL * KEYS]; /* two, in turns; with one form P takes the place of s */
    int64_t turn;
    _Alignas(64) float keep[TALL * BLOCK]; /* of dropout */
    bool begun[ROWS / STRIP];              /* out holds something, or what is pending */
    bool referred[ROWS / STRIP];           /* every row has seen a key */
    pending_product pending;
    _Alignas(64) float strip[STRIP * ATTENTION_MAX_D]; /* of the queries, before they are packed */
} rows_state;

_Static_assert(sizeof(rows_state) <= ATTENTION_FWD_SCRATCH(sizeof(mt), MT_ONE_FORM, KEYS), "it lies in a slice");

V_INLINE mt *prob_of(rows_state *x)
{
    return MT_ONE_FORM ? (mt *)x->s : x->prob + x->turn * TALL * KEYS;
}

/* The largest lane of every vector, in the lane of the vector's number; their sums. */
V_INLINE vf max_of_each(vf v[VW])
{
    mt_transpose(v);
    for (int i = 1; i < VW; i++)
        v[0] = v_max(v[i], v[0]);
    return v[0];
}

V_INLINE vf sum_of_each(vf v[VW])
{
    mt_transpose(v);
    for (int step = 1; step < VW; step *= 2)
        for (int i = 0; i < VW; i += 2 * step)
            v[i] = v_add(v[i], v[i + step]);
    return v[0];
}

/* A mask hides part of these rows and columns, s[s_rows][] from query `first` and key `key` on: -inf there. A pass of its
 * own, since few blocks have a border. */
static void hide_scores(const scores *a, float *s, int64_t s_rows, int64_t first, int64_t height, int64_t key,
                        attention_span strips)
{
    for (int64_t r = 0; r < height; r++) {
        const attention_span keys = scores_keys(a, first + r);
        const int64_t low = keys.first - key, high = keys.end - key;
        for (int64_t c = strips.first; c < strips.end; c += VW)
            if (c < low || c + VW > high)
                v_store(s + cell(s_rows, r, c), mask_scores(v_load(s + cell(s_rows, r, c)), low - c, high - c));
    }
}

/* `height` queries from row `top` on at the keys `strips` of a block: s, times `unit` in the unit of exp_scores, becomes
 * prob, most and sum move on, and out is scaled to the new maximum. */
V_INLINE void softmax_strip(rows_state *x, const attention_fwd_layout *w, int64_t top, int64_t height,
                            attention_span strips, float unit, bool drop)
{
    float *most = x->most + top, *sum = x->sum + top;
    mt *prob = prob_of(x);
    for (int64_t r = 0; r < height; r += VW) {
        vf v[VW];
        for (int64_t i = 0; i < VW; i++) {
            vf even = v_set1(-INFINITY), odd = v_set1(-INFINITY);
            for (int64_t c = strips.first; c < strips.end; c += 2 * VW) {
                float *s = x->s + cell(TALL, r + i, c);
                vf y = v_load(s), z = v_load(s + VW);
                if (SCALE_FIRST) {
                    y = v_mul(y, v_set1(unit));
                    z = v_mul(z, v_set1(unit));
                    v_store(s, y);
                    v_store(s + VW, z);
                }
                even = v_max(even, y);
                odd = v_max(odd, z);
            }
            v[i] = v_max(even, odd);
        }
        /* A row that has seen nothing keeps the least number, not -inf, so that no difference is NaN. */
        const vf before = v_load(most + r), now = v_max(before, v_mul(max_of_each(v), v_set1(SCALE_FIRST ? 1 : unit))),
                 shrink = exp_scores(before, v_set1(1), now);
        float shrinks[VW];
        v_store(most + r, now);
        v_store(shrinks, shrink);
        for (int64_t i = 0; i < VW; i++) {
            const vf m = v_set1(most[r + i]), u = v_set1(SCALE_FIRST ? 1 : unit);
            vf even = v_zero(), odd = v_zero();
            for (int64_t c = strips.first; c < strips.end; c += 2 * VW) {
                const int64_t at = cell(TALL, r + i, c);
                vf e = exp_scores(v_load(x->s + at), u, m), f = exp_scores(v_load(x->s + at + VW), u, m);
                even = v_add(even, e);
                odd = v_add(odd, f);
                if (drop) {
                    e = v_mul(e, v_load(x->keep + at));
                    f = v_mul(f, v_load(x->keep + at + VW));
                }
                mt_store_a2(prob + at, e, f);
            }
            v[i] = v_add(even, odd);
            for (int64_t c = 0; x->begun[top / STRIP] && shrinks[i] != 1 && c < w->dv; c += VW) {
                float *out = x->out + cell(w->rows, top + r + i, c);
                v_store(out, v_mul(v_load(out), v_set1(shrinks[i])));
            }
        }
        v_store(sum + r, v_fma(v_load(sum + r), shrink, sum_of_each(v)));
    }
}

/* ---- one item -------------------------------------------------------------------------------------------- */

/* Does every query of i .. i+height see every key of the block that `strips` names? */
static bool all_visible(const scores *a, int64_t i, int64_t height, int64_t block_first, attention_span strips)
{
    const attention_span top = scores_keys(a, i), bottom = scores_keys(a, i + height - 1);
    return bottom.first <= block_first + strips.first && top.end >= block_first + strips.end &&
           bottom.end >= block_first + strips.end;
}

/* A block of keys and its operands. */
typedef struct key_block {
    int64_t first;
    const mt *kt, *v;
} key_block;

/* `height` queries from row `top` of the item on, at the keys `strips` of a block. */
static void attend_strip(const context *c, const scores *a, rows_state *x, int64_t first, int64_t top, int64_t height,
                         const key_block *b, attention_span strips, bool visible)
{
    const int64_t i = first + top, n = strips.end - strips.first;
    const float unit = scores_unit(c->p);
    mt_product_whole(height, n, c->w.d, x->q + mt_at(c->w.rows, top, 0), c->w.rows,
                     b->kt + mt_at(c->w.d, 0, strips.first), c->w.d, x->s + mt_at(TALL, 0, strips.first), TALL, false,
                     NULL);
    if (a->extras) {
        const score_tile tile = {i, b->first, false, height, strips};
        scores_modify(a, &tile, x->s, NULL);
        if (a->dropout.dropped > 0)
            scores_keep(a, &tile, x->keep);
    }
    if (!visible)
        hide_scores(a, x->s, TALL, i, height, b->first, strips);
    if (a->dropout.dropped > 0)
        softmax_strip(x, &c->w, top, height, strips, unit, true);
    else
        softmax_strip(x, &c->w, top, height, strips, unit, false);
    const mt *prob = prob_of(x);
    mt_product(height, c->w.dv, n, prob + mt_at(TALL, 0, strips.first), TALL, b->v + mt_at(c->w.keys, strips.first, 0),
               c->w.keys, x->out + mt_at(c->w.rows, top, 0), c->w.rows, x->begun[top / STRIP], NULL);
    for (int64_t r = top; r < top + height; r += STRIP)
        x->begun[r / STRIP] = true;
}

#if defined(COT_MATMUL_AMX)

/* ---- exponentials beside products ---------------------------------------------------------------------------------- *
 * A row's reference stays what it was first, the largest of 32 scores, unless P would be too large beside it: then the
 * strip is done again, with its maxima. So S is gone over once, out is not scaled, and P of a part of S, 32 queries and 32
 * keys, is made a row at a time, behind every tile product of the next parts and of P V of the strip before: a row is as much
 * as a processor of 2023 does while its tiles are at a product. */
#define TOO_LARGE 4096.0f /* for a row's sum of P over a block */

enum {
    HIGH = TALL / STRIP, /* parts above each other */
    WAITING = 4,         /* parts of S that wait for their exponentials, and the next one */
};

/* A part of S, 32 queries and 32 keys, whose P is still to be made. */
typedef struct waiting_part {
    const float *s, *most;
    mt *prob;
    float *sums; /* [STRIP / 4][VW]: of four rows, as v_sums4 has them */
} waiting_part;

/* Those that wait, in a ring: what is left of the oldest, `rows` of it, and the others from `next` on. */
typedef struct softmax_queue {
    const waiting_part *ring;
    int64_t next, count;
    waiting_part at;
    int64_t rows;
    vf unit, sum[4]; /* of the last rows */
    bool busy;       /* the queue had rows when this step began */
} softmax_queue;

/* Row `row` of four. */
V_INLINE void softmax_row(softmax_queue *w, int row)
{
    const vf most = v_set1(*w->at.most);
    const vf e = exp_scores(v_load(w->at.s), w->unit, most), f = exp_scores(v_load(w->at.s + VW), w->unit, most);
    mt_store_a2(w->at.prob, e, f);
    w->sum[row] = v_add(e, f);
    w->at.s += MT;
    w->at.most++;
    w->at.prob += MT;
    if (row == 3) {
        v_store(w->at.sums, v_add(v_load(w->at.sums), v_sums4(w->sum[0], w->sum[1], w->sum[2], w->sum[3])));
        w->at.sums += VW;
        w->rows -= 4;
    }
}

V_INLINE void softmax_next(softmax_queue *w)
{
    w->at = w->ring[w->next];
    w->next = (w->next + 1) % WAITING;
    w->rows = STRIP;
    w->count--;
}

/* Is there a row for these turns? */
V_INLINE bool softmax_waits(softmax_queue *w)
{
    if (w->rows > 0)
        return true;
    if (w->count == 0)
        return false;
    softmax_next(w);
    return true;
}

/* Beside a product: a row; or two, where there are few products. */
V_INLINE void softmax_turn(void *with, int turn)
{
    softmax_queue *w = with;
    if (turn == 0)
        w->busy = softmax_waits(w);
    if (w->busy)
        softmax_row(w, turn);
}

V_INLINE void softmax_wide_turn(void *with, int turn)
{
    softmax_queue *w = with;
    if (turn % 2 == 0)
        w->busy = softmax_waits(w);
    if (w->busy) {
        softmax_row(w, turn % 2 * 2);
        softmax_row(w, turn % 2 * 2 + 1);
    }
}

/* Until the oldest is done, and no more than `count` are behind it. */
V_INLINE void softmax_until(softmax_queue *w, int64_t count)
{
    for (;;) {
        while (w->rows > 0)
            for (int row = 0; row < 4; row++)
                softmax_row(w, row);
        if (w->count <= count)
            return;
        softmax_next(w);
    }
}

/* Rows that have seen no key so far take their largest score here as their reference, if they see one here. Has every row
 * one now? */
static bool refer(const float *s, float unit, float *most)
{
    vf none = v_zero();
    for (int64_t r = 0; r < STRIP; r += VW) {
        vf v[VW];
        for (int64_t i = 0; i < VW; i++)
            v[i] = v_max(v_load(s + (r + i) * MT), v_load(s + (r + i) * MT + VW));
        const vf least = v_set1(-FLT_MAX), before = v_load(most + r);
        const vf here = v_max(least, v_mul(max_of_each(v), v_set1(unit)));
        const vf now = v_select(vm_above(before, least), before, here);
        v_store(most + r, now);
        none = v_select(vm_above(now, least), none, v_set1(1));
    }
    return v_sum(none) == 0;
}

V_INLINE void add_part(const context *c, pending_product *w, void (*turn)(void *, int), softmax_queue *beside)
{
    const int64_t j = w->done / HIGH * STRIP, i = w->done % HIGH * STRIP;
    mt_part(w->keys, 1, w->prob + mt_at(TALL, i, 0), TALL, w->v + mt_at(c->w.keys, 0, j),
            w->out + mt_at(c->w.rows, i, j), w->add, false, turn, beside);
    w->done++;
}

static void finish_pending(const context *c, pending_product *w)
{
    softmax_queue nothing = {.rows = 0};
    while (w->done < w->parts)
        add_part(c, w, softmax_turn, &nothing);
}

/* TALL queries from row `top` of the item on, at the keys of a block that they see: their P V is pending then. A turn of the
 * exponentials is a row or two, as many as the products of a part give turns for. False: P was too large, and but for references
 * nothing has changed. */
V_INLINE bool attend_beside(const context *c, const scores *a, rows_state *x, int64_t first, int64_t top,
                            const key_block *b, void (*turn)(void *, int))
{
    _Alignas(64) float s[WAITING][STRIP * STRIP], sums[TALL / 4 * VW] = {0};
    const int64_t i0 = first + top;
    const attention_span strips =
        attention_strips(attention_keys_of_rows(&c->p->sizes, &a->s, i0, i0 + TALL), b->first, c->w.keys);
    if (strips.first == strips.end)
        return true;
    const bool visible = all_visible(a, i0, TALL, b->first, strips);
    const int64_t n = strips.end - strips.first, parts = n / STRIP * HIGH;
    mt *prob = prob_of(x) + mt_at(TALL, 0, strips.first);
    pending_product *pending = &x->pending;
    waiting_part ring[WAITING];
    const float unit = scores_unit(c->p);
    softmax_queue w = {.ring = ring, .unit = v_set1(unit)};
    for (int64_t part = 0, slot = 0, due = 0; part < parts; part++, slot = (slot + 1) % WAITING) {
        const int64_t j = part / HIGH * STRIP, i = part % HIGH * STRIP;
        mt_part(c->w.d, 1, x->q + mt_at(c->w.rows, top + i, 0), c->w.rows, b->kt + mt_at(c->w.d, 0, strips.first + j),
                s[slot], false, true, turn, &w);
        const attention_span keys = {strips.first + j, strips.first + j + STRIP};
        if (!visible && !all_visible(a, i0 + i, STRIP, b->first, keys))
            hide_scores(a, s[slot], STRIP, i0 + i, STRIP, b->first + keys.first, (attention_span){0, STRIP});
        if (!x->referred[(top + i) / STRIP])
            x->referred[(top + i) / STRIP] = refer(s[slot], unit, x->most + top + i);
        ring[slot] = (waiting_part){s[slot], x->most + top + i, prob + mt_at(TALL, i, j), sums + i / 4 * VW};
        w.count++;
        for (due += pending->parts; due >= parts; due -= parts)
            add_part(c, pending, turn, &w);
        if (w.count == WAITING - 1)
            softmax_until(&w, WAITING - 2);
    }
    softmax_until(&w, 0);
    *pending = (pending_product){.parts = 0};
    float sum[TALL];
    bool large = false;
    for (int64_t r = 0; r < TALL; r++) {
        const float *lanes = sums + r / 4 * VW + r % 4;
        sum[r] = lanes[0];
        for (int64_t i = 4; i < VW; i += 4)
            sum[r] += lanes[i];
        large |= !(sum[r] <= TOO_LARGE);
    }
    if (large)
        return false;
    for (int64_t r = 0; r < TALL; r++)
        x->sum[top + r] += sum[r];
    *pending = (pending_product){.prob = prob,
                                 .v = b->v + mt_at(c->w.keys, strips.first, 0),
                                 .out = x->out + mt_at(c->w.rows, top, 0),
                                 .keys = n,
                                 .parts = c->w.dv / STRIP * HIGH,
                                 .add = x->begun[top / STRIP]};
    x->begun[top / STRIP] = x->begun[top / STRIP + 1] = true;
    x->turn = 1 - x->turn;
    return true;
}

#endif

/* TALL queries at a time; in float32 STRIP where a mask's border runs through, since less of what it hides is then worked
 * out. On AMX the shorter products cost more than that. */
static void attend_narrow_block(const context *c, const scores *a, rows_state *x, int64_t first, int64_t top,
                                const key_block *b)
{
    const attention_sizes *z = &c->p->sizes;
    const int64_t i = first + top;
    const attention_span strips = attention_strips(attention_keys_of_rows(z, &a->s, i, i + TALL), b->first, BLOCK);
    if (strips.first == strips.end)
        return;
    const bool visible = all_visible(a, i, TALL, b->first, strips);
    if (!MT_ONE_FORM || (visible && x->begun[top / STRIP] == x->begun[top / STRIP + 1])) {
        attend_strip(c, a, x, first, top, TALL, b, strips, visible);
        return;
    }
    for (int64_t r = 0; r < TALL; r += STRIP) {
        const attention_span own =
            attention_strips(attention_keys_of_rows(z, &a->s, i + r, i + r + STRIP), b->first, BLOCK);
        if (own.first < own.end)
            attend_strip(c, a, x, first, top + r, STRIP, b, own, all_visible(a, i + r, STRIP, b->first, own));
    }
}

static void attend_block(const context *c, const scores *a, rows_state *x, int64_t first, const key_block *b)
{
    for (int64_t top = 0; top < c->w.rows; top += TALL) {
#if defined(COT_MATMUL_AMX)
        if (!a->extras && (c->w.d + c->w.dv >= 8 * MT ? attend_beside(c, a, x, first, top, b, softmax_turn)
                                                      : attend_beside(c, a, x, first, top, b, softmax_wide_turn)))
            continue;
#endif
        for (int64_t key = 0; key < c->w.keys; key += BLOCK) {
            const key_block narrow = {b->first + key, b->kt + mt_at(c->w.d, 0, key), b->v + mt_at(c->w.keys, key, 0)};
            attend_narrow_block(c, a, x, first, top, &narrow);
        }
    }
}

static void finish_rows(const context *c, rows_state *x, const attention_block *rows, int64_t h, float sink)
{
    const attention_problem *p = c->p;
    float inverse[ROWS], lse[ROWS];
    for (int64_t r = 0; r < rows->rows; r++) {
        const bool seen = r < rows->used && x->sum[r] != 0; /* NaN counts */
        inverse[r] = seen ? 1 / x->sum[r] : 0;
        const bool sink_is_most = x->most[r] == sink * SCORE_UNIT; /* lse is the sink itself where no key is seen */
        lse[r] = seen ? (sink_is_most ? sink : x->most[r] / SCORE_UNIT) + logf(x->sum[r]) : -INFINITY;
        if (cot_present(&p->lse))
            ((float *)p->lse.data)[attention_lse_at(&p->lse, rows->s.b, h, rows->s.q_row + rows->first + r)] = lse[r];
        for (int64_t n = 0; (!x->begun[r / STRIP] || !seen) && n < c->w.dv; n += MT)
            memset(x->out + mt_at(c->w.rows, r, n), 0, MT * sizeof(float));
    }
    if (cot_present(&p->out))
        store_rows(&p->out, rows->s.b, rows->s.q_row + rows->first, h, rows->rows, p->sizes.dv, x->out, c->w.rows,
                   inverse, 0, false);
}

static void attend_rows(const context *c, const attention_block *rows, int64_t h, const packed_keys *packed,
                        rows_state *x)
{
    const attention_problem *p = c->p;
    const scores a = scores_of(p, &rows->s, h);
    const float sink = cot_present(&p->sink) && rows->s.b < p->sizes.B
                           ? (float)cot_load_f64(p->sink.data, p->sink.dtype, h * p->sink.stride[0])
                           : -INFINITY;
    mt_state host;
    memset(x->begun, 0, sizeof x->begun);
    memset(x->referred, 0, sizeof x->referred);
    x->pending = (pending_product){.parts = 0};
    x->turn = 0;
    for (int64_t r = 0; r < ROWS; r++) {
        x->most[r] = sink != -INFINITY ? sink * SCORE_UNIT : -FLT_MAX;
        x->sum[r] = sink != -INFINITY ? 1 + (sink - sink) : 0; /* exp(sink - most): NaN of an infinite sink */
    }
    for (int64_t r = 0; r < c->w.rows; r += STRIP) {
        load_rows(x->strip, c->w.d, &p->q, rows->s.b, rows->s.q_row + rows->first + r, h,
                  cot_clamp(rows->used - r, 0, STRIP), p->sizes.d);
        pack_a(x->q, c->w.rows, r, x->strip, c->w.d);
    }
    const attention_span seen = attention_keys_of_rows(&p->sizes, &rows->s, rows->first, rows->first + c->w.rows);
    mt_begin(&host);
    for (int64_t block = seen.first / c->w.keys; block * c->w.keys < seen.end; block++) {
        const int64_t at = block * packed->step;
        const key_block b = {block * c->w.keys, packed->kt + at * c->w.d, packed->v + at * c->w.dv};
        attend_block(c, &a, x, rows->first, &b);
    }
#if defined(COT_MATMUL_AMX)
    finish_pending(c, &x->pending);
#endif
    mt_end(&host);
    finish_rows(c, x, rows, h, sink);
}

static void attend_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const attention_axis axis = {c->p, false, c->w.rows};
    const int64_t h = item / c->w.q_slots, hkv = h / (c->p->sizes.H / c->p->sizes.Hkv);
    /* The last queries see the most keys under a causal mask: they go first, so that no thread ends with a long one. */
    const attention_block rows = attention_block_at(&axis, c->w.q_slots - 1 - item % c->w.q_slots);
    if (rows.rows == 0 || chained(c, rows.s.b, hkv))
        return;
    const packed_keys keys = keys_of(c, rows.s.b, hkv);
    attend_rows(c, &rows, h, &keys, scratch);
}

/* One group after the other, packed at the same place, which so stays in the second-level cache. */
static void attend_groups(void *memory, int64_t chain, void *scratch)
{
    const context *c = memory;
    const attention_sizes *z = &c->p->sizes;
    const attention_axis axis_k = {c->p, true, c->w.keys}, axis_q = {c->p, false, c->w.rows};
    const int64_t heads = z->H / z->Hkv, blocks = c->w.k_slots / z->B, items = c->w.q_slots / z->B;
    const packed_keys keys = keys_from(c, chain * blocks, 1);
    for (int64_t group; (group = atomic_fetch_add(c->next, 1)) < c->chained;) {
        const int64_t b = group / z->Hkv, hkv = group % z->Hkv;
        for (int64_t i = b * blocks; i < (b + 1) * blocks; i++) {
            const attention_block block = attention_block_at(&axis_k, i);
            pack_block(c, &block, hkv, &keys, scratch);
        }
        for (int64_t h = hkv * heads; h < (hkv + 1) * heads; h++)
            for (int64_t i = b * items; i < (b + 1) * items; i++) {
                const attention_block rows = attention_block_at(&axis_q, i);
                attend_rows(c, &rows, h, &keys, scratch);
            }
    }
}

/* Of many groups of equal length each thread works off some by itself. What is left, and more where a thread would wait long for
 * the last group, is packed first and then attended to by all threads together; so are sequences of different lengths, of which one
 * may be as long as all others. */
cot_status V_NAME(attention_fwd_tiled)(cot_queue *queue, const void *problem, void *workspace)
{
    _Atomic int64_t next = 0;
    context c = {.p = problem, .next = &next};
    const attention_sizes *z = &c.p->sizes;
    c.w = attention_fwd_layout_of(z, sizeof(mt), KEYS);
    c.kt = (mt *)((char *)workspace + c.w.kt);
    c.v = (mt *)((char *)workspace + c.w.v);
    const bool alike = !z->packed && !cot_present(&c.p->seqused_k) && !cot_present(&c.p->seqused_q);
    const int64_t groups = z->B * z->Hkv, threads = cot_queue_threads(queue);
    const int64_t rounds = groups / threads;
    if (alike && rounds >= 2) {
        c.chained = (rounds < 4 ? rounds - 1 : rounds) * threads;
        cot_parallel_scratch(queue, threads, attend_groups, &c);
    }
    cot_parallel_scratch(queue, c.w.k_slots * z->Hkv, pack_item, &c);
    cot_parallel_scratch(queue, c.w.q_slots * z->H, attend_item, &c);
    return COT_OK;
}
