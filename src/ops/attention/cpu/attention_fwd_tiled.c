/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_tiled.c: out = softmax(s) v and lse, in blocks, on the products of simd/matmul.h:
 *
 *     S = Q K^T       [TALL queries][up to BLOCK keys], float32
 *     P = exp(S - m)  m the running maximum of a row, with AMX what it was first; rounded to an operand's type (bf16 with
 *                     AMX), its sum is not
 *     O = O exp(m_before - m) + P V;      out = O / sum,  lse = m + log(sum)
 *
 * First every block of keys is packed once for all query heads that read it: K^T [d][BLOCK] and V [BLOCK][dv], both in
 * B form. Then an item is a block of queries of one head; its O stays on the stack. Blocks that no query of a strip sees
 * are skipped, and within a block the strips of keys. */
#include "attention_scores.h"

cot_status V_NAME(attention_fwd_tiled)(cot_queue *, const void *, void *);

enum { ROWS = ATTENTION_FWD_ROWS, CELLS = ROWS * ATTENTION_MAX_D / 2 }; /* of an item's q and out */

typedef struct context {
    const attention_problem *p;
    attention_fwd_layout w;
    mt *kt, *v;
} context;

/* ---- packing -------------------------------------------------------------------------------------------- */

static void pack_item(void *memory, int64_t item)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const attention_axis axis = {p, true, BLOCK};
    const int64_t hkv = item % p->sizes.Hkv;
    const attention_block block = attention_block_at(&axis, item / p->sizes.Hkv);
    mt *kt = c->kt + item * BLOCK * c->w.d, *v = c->v + item * BLOCK * c->w.dv;
    _Alignas(64) float x[STRIP * ATTENTION_MAX_D];
    for (int64_t r = 0; block.rows > 0 && r < BLOCK; r += STRIP) {
        const int64_t rows = attention_clamp(block.used - r, 0, STRIP), row = block.s.k_row + block.first + r;
        load_rows(x, c->w.d, &p->k, block.s.b, row, hkv, rows, p->sizes.d);
        pack_transposed(kt, true, r, x, c->w.d);
        load_rows(x, c->w.dv, &p->v, block.s.b, row, hkv, rows, p->sizes.dv);
        pack_b(v, r, x, c->w.dv);
    }
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
    _Alignas(64) mt prob[MT_ONE_FORM ? 1 : 2 * TALL * BLOCK]; /* two, in turns; with one form P takes the place of s */
    int64_t turn;
    _Alignas(64) float keep[TALL * BLOCK]; /* of dropout */
    bool begun[ROWS / STRIP];              /* out holds something, or what is pending */
    pending_product pending;
} rows_state;

V_INLINE mt *prob_of(rows_state *x)
{
    return MT_ONE_FORM ? (mt *)x->s : x->prob + x->turn * TALL * BLOCK;
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
                v_store(s + cell(s_rows, r, c), v_add(v_load(s + cell(s_rows, r, c)), border(low - c, high - c)));
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
            const vf m = v_set1(most[r + i]), u = v_set1(unit);
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
    const attention_sizes *z = &c->p->sizes;
    const int64_t i = first + top, n = strips.end - strips.first;
    const float unit = a->extras ? SCORE_UNIT : SCORE_UNIT * (float)z->scale;
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
        softmax_strip(x, &c->w, top, height, strips, SCORE_UNIT, true);
    else
        softmax_strip(x, &c->w, top, height, strips, unit, false);
    const mt *prob = prob_of(x);
    mt_product(height, c->w.dv, n, prob + mt_at(TALL, 0, strips.first), TALL, b->v + mt_at(BLOCK, strips.first, 0),
               BLOCK, x->out + mt_at(c->w.rows, top, 0), c->w.rows, x->begun[top / STRIP], NULL);
    for (int64_t r = top; r < top + height; r += STRIP)
        x->begun[r / STRIP] = true;
}

#if defined(COT_MATMUL_AMX)

/* ---- exponentials beside products ---------------------------------------------------------------------------------- *
 * A row's reference stays what it was first, the largest of 32 scores, unless P would be too large beside it: then the
 * strip is done again, with its maxima. So S is gone over once, out is not scaled, and P of a part of S, 32 queries and 32
 * keys, is made while the tiles are at the next part, and at P V of the strip before. */
#define TOO_LARGE 4096.0f /* for a row's sum of P over a block */

enum { HIGH = TALL / STRIP }; /* parts above each other */

/* P of a part of S, a few rows at a time. */
typedef struct part_softmax {
    const float *s, *most;
    mt *prob;
    float *sums; /* [STRIP][VW]: a row's sum, in lanes */
    float unit;
    int64_t row, step;
} part_softmax;

V_INLINE void softmax_rows(void *with)
{
    part_softmax *w = with;
    const vf unit = v_set1(w->unit);
    const int64_t end = w->row + w->step < STRIP ? w->row + w->step : STRIP;
    for (int64_t r = w->row; r < end; r++) {
        const vf most = v_set1(w->most[r]);
        const vf e = exp_scores(v_load(w->s + r * MT), unit, most),
                 f = exp_scores(v_load(w->s + r * MT + VW), unit, most);
        v_store(w->sums + r * VW, v_add(v_load(w->sums + r * VW), v_add(e, f)));
        mt_store_a2(w->prob + r * MT, e, f);
    }
    w->row = end;
}

/* Rows that have seen no key so far take their largest score here as their reference, if they see one here. */
static void refer(const float *s, float unit, float *most)
{
    for (int64_t r = 0; r < STRIP; r += VW) {
        vf v[VW];
        for (int64_t i = 0; i < VW; i++)
            v[i] = v_max(v_load(s + (r + i) * MT), v_load(s + (r + i) * MT + VW));
        const vf before = v_load(most + r), least = v_set1(-FLT_MAX);
        v_store(most + r, v_select(vm_above(before, least), before, v_max(least, v_mul(max_of_each(v), v_set1(unit)))));
    }
}

V_INLINE void add_part(const context *c, pending_product *w, part_softmax *beside)
{
    const int64_t j = w->done / HIGH * STRIP, i = w->done % HIGH * STRIP;
    mt_part(w->keys, 1, w->prob + mt_at(TALL, i, 0), TALL, w->v + mt_at(BLOCK, 0, j), w->out + mt_at(c->w.rows, i, j),
            w->add, false, softmax_rows, beside);
    w->done++;
}

static void finish_pending(const context *c, pending_product *w)
{
    part_softmax nothing = {.row = STRIP};
    while (w->done < w->parts)
        add_part(c, w, &nothing);
}

/* TALL queries from row `top` of the item on, at the keys `strips` of a block: their P V is pending then. False: P was too
 * large, and but for references nothing has changed. */
static bool attend_beside(const context *c, const scores *a, rows_state *x, int64_t first, int64_t top,
                          const key_block *b, attention_span strips, bool visible)
{
    _Alignas(64) float s[2][STRIP * STRIP], sums[TALL * VW] = {0};
    const int64_t n = strips.end - strips.first, parts = n / STRIP * HIGH;
    mt *prob = prob_of(x) + mt_at(TALL, 0, strips.first);
    pending_product *pending = &x->pending;
    part_softmax w = {.row = STRIP};
    for (int64_t part = 0; part < parts; part++) {
        const int64_t j = part / HIGH * STRIP, i = part % HIGH * STRIP, due = (part + 1) * pending->parts / parts;
        const int64_t products = c->w.d + (due - pending->done) * pending->keys;
        w.step = (STRIP * STRIP + products - 1) / products;
        mt_part(c->w.d, 1, x->q + mt_at(c->w.rows, top + i, 0), c->w.rows, b->kt + mt_at(c->w.d, 0, strips.first + j),
                s[part % 2], false, true, softmax_rows, &w);
        while (pending->done < due)
            add_part(c, pending, &w);
        w.step = STRIP;
        softmax_rows(&w);
        w = (part_softmax){.s = s[part % 2],
                           .most = x->most + top + i,
                           .prob = prob + mt_at(TALL, i, j),
                           .sums = sums + i * VW,
                           .unit = SCORE_UNIT * (float)c->p->sizes.scale};
        if (!visible)
            hide_scores(a, s[part % 2], STRIP, first + top + i, STRIP, b->first + strips.first + j,
                        (attention_span){0, STRIP});
        if (!visible || !x->begun[(top + i) / STRIP])
            refer(s[part % 2], w.unit, x->most + top + i);
    }
    w.step = STRIP;
    softmax_rows(&w);
    vf sum[TALL / VW], large = v_zero();
    for (int64_t r = 0; r < TALL / VW; r++) {
        vf v[VW];
        for (int64_t i = 0; i < VW; i++)
            v[i] = v_load(sums + (r * VW + i) * VW);
        sum[r] = sum_of_each(v);
        large = v_select(vm_above(sum[r], v_set1(TOO_LARGE)), v_set1(1), large);
    }
    *pending = (pending_product){.parts = 0};
    if (v_sum(large) > 0)
        return false;
    for (int64_t r = 0; r < TALL / VW; r++)
        v_store(x->sum + top + r * VW, v_add(v_load(x->sum + top + r * VW), sum[r]));
    *pending = (pending_product){.prob = prob,
                                 .v = b->v + mt_at(BLOCK, strips.first, 0),
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
static void attend_block(const context *c, const scores *a, rows_state *x, int64_t first, const key_block *b)
{
    const attention_sizes *z = &c->p->sizes;
    for (int64_t top = 0; top < c->w.rows; top += TALL) {
        const int64_t i = first + top;
        const attention_span strips = attention_strips(attention_keys_of_rows(z, &a->s, i, i + TALL), b->first, BLOCK);
        if (strips.first == strips.end)
            continue;
        const bool visible = all_visible(a, i, TALL, b->first, strips);
#if defined(COT_MATMUL_AMX)
        if (!a->extras && attend_beside(c, a, x, first, top, b, strips, visible))
            continue;
#endif
        if (!MT_ONE_FORM || (visible && x->begun[top / STRIP] == x->begun[top / STRIP + 1])) {
            attend_strip(c, a, x, first, top, TALL, b, strips, visible);
            continue;
        }
        for (int64_t r = 0; r < TALL; r += STRIP) {
            const attention_span own =
                attention_strips(attention_keys_of_rows(z, &a->s, i + r, i + r + STRIP), b->first, BLOCK);
            if (own.first < own.end)
                attend_strip(c, a, x, first, top + r, STRIP, b, own, all_visible(a, i + r, STRIP, b->first, own));
        }
    }
}

static void finish_rows(const context *c, rows_state *x, const attention_block *rows, int64_t h, float sink)
{
    const attention_problem *p = c->p;
    float inverse[ROWS], lse[ROWS];
    for (int64_t r = 0; r < rows->rows; r++) {
        const bool seen = r < rows->used && x->sum[r] > 0;
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

static void attend_item(void *memory, int64_t item)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const attention_axis queries = {p, false, c->w.rows}, keys = {p, true, BLOCK};
    const int64_t h = item / c->w.q_slots, hkv = h / (p->sizes.H / p->sizes.Hkv);
    /* The last queries see the most keys under a causal mask: they go first, so that no thread ends with a long one. */
    const attention_block rows = attention_block_at(&queries, c->w.q_slots - 1 - item % c->w.q_slots);
    if (rows.rows == 0)
        return;
    const scores a = scores_of(p, &rows.s, h);
    const float sink = cot_present(&p->sink) && rows.s.b < p->sizes.B
                           ? (float)cot_load_f64(p->sink.data, p->sink.dtype, h * p->sink.stride[0])
                           : -INFINITY;
    rows_state x;
    mt_state host;
    memset(x.begun, 0, sizeof x.begun);
    x.pending = (pending_product){.parts = 0};
    x.turn = 0;
    for (int64_t r = 0; r < ROWS; r++) {
        x.most[r] = sink > -INFINITY ? sink * SCORE_UNIT : -FLT_MAX;
        x.sum[r] = sink > -INFINITY ? 1 : 0;
    }
    for (int64_t r = 0; r < c->w.rows; r += STRIP) {
        _Alignas(64) float strip[STRIP * ATTENTION_MAX_D];
        load_rows(strip, c->w.d, &p->q, rows.s.b, rows.s.q_row + rows.first + r, h,
                  attention_clamp(rows.used - r, 0, STRIP), p->sizes.d);
        pack_a(x.q, c->w.rows, r, strip, c->w.d);
    }
    const attention_span seen = attention_keys_of_rows(&p->sizes, &rows.s, rows.first, rows.first + c->w.rows);
    const int64_t slot = attention_first_slot(&keys, rows.s.b);
    mt_begin(&host);
    for (int64_t block = seen.first / BLOCK; block * BLOCK < seen.end; block++) {
        const int64_t at = ((slot + block) * p->sizes.Hkv + hkv) * BLOCK;
        const key_block b = {block * BLOCK, c->kt + at * c->w.d, c->v + at * c->w.dv};
        attend_block(c, &a, &x, rows.first, &b);
    }
#if defined(COT_MATMUL_AMX)
    finish_pending(c, &x.pending);
#endif
    mt_end(&host);
    finish_rows(c, &x, &rows, h, sink);
}

cot_status V_NAME(attention_fwd_tiled)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {.p = problem};
    c.w = attention_fwd_layout_of(&c.p->sizes, sizeof(mt));
    c.kt = (mt *)((char *)workspace + c.w.kt);
    c.v = (mt *)((char *)workspace + c.w.v);
    cot_parallel(queue, c.w.k_slots * c.p->sizes.Hkv, pack_item, &c);
    cot_parallel(queue, c.w.q_slots * c.p->sizes.H, attend_item, &c);
    return COT_OK;
}
