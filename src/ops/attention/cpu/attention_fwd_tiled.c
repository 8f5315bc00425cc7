/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_tiled.c: out = softmax(s) v and lse, in blocks, on the products of simd/matmul.h:
 *
 *     S = Q K^T       [TALL queries][up to BLOCK keys], float32
 *     P = exp(S - m)  m the running maximum of a row; rounded to an operand's type (bf16 with AMX), its sum is not
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

/* The state of an item's queries. */
typedef struct rows_state {
    _Alignas(64) mt q[CELLS];
    _Alignas(64) float out[CELLS];
    _Alignas(64) float most[ROWS], sum[ROWS]; /* of a row's scores so far, and of exp(s - most) */
    _Alignas(64) float s[TALL * BLOCK];
    _Alignas(64) mt prob[TALL * BLOCK];
    _Alignas(64) float keep[TALL * BLOCK]; /* of dropout */
    bool begun[ROWS / TALL];               /* out holds something */
} rows_state;

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

/* One strip of queries, of which `first` is the first, at the keys `strips` of a block: s becomes prob, most and sum
 * move on, and out is scaled to the new maximum. */
V_INLINE void softmax_strip(const scores *a, rows_state *x, int64_t strip, int64_t first, int64_t block_first,
                            attention_span strips, int64_t dv, bool plain)
{
    const float scale = plain ? (float)a->p->sizes.scale : 1;
    float *most = x->most + strip * TALL, *sum = x->sum + strip * TALL;
    for (int64_t r = 0; r < TALL; r += VW) {
        vf v[VW];
        for (int64_t i = 0; i < VW; i++) {
            float *s = x->s + (r + i) * BLOCK;
            const attention_span keys = scores_keys(a, first + r + i);
            const int64_t low = keys.first - block_first, high = keys.end - block_first;
            v[i] = v_set1(-INFINITY);
            for (int64_t c = strips.first; c < strips.end; c += VW) {
                vf y = v_mul(v_load(s + c), v_set1(scale));
                if (c < low || c + VW > high)
                    y = v_add(y, border(low - c, high - c));
                v_store(s + c, y);
                v[i] = v_max(v[i], y);
            }
        }
        /* A row that has seen nothing keeps the least number, not -inf, so that no difference is NaN. */
        const vf before = v_load(most + r), now = v_max(before, max_of_each(v)),
                 shrink = v_exp_flush(v_sub(before, now));
        float shrinks[VW];
        v_store(most + r, now);
        v_store(shrinks, shrink);
        for (int64_t i = 0; i < VW; i++) {
            const float *s = x->s + (r + i) * BLOCK;
            mt *prob = x->prob + (r + i) * BLOCK;
            const vf m = v_set1(most[r + i]);
            v[i] = v_zero();
            for (int64_t c = strips.first; c < strips.end; c += 2 * VW) {
                vf e = v_exp_flush(v_sub(v_load(s + c), m)), f = v_exp_flush(v_sub(v_load(s + c + VW), m));
                v[i] = v_add(v[i], v_add(e, f));
                if (!plain && a->dropout.dropped > 0) {
                    e = v_mul(e, v_load(x->keep + (r + i) * BLOCK + c));
                    f = v_mul(f, v_load(x->keep + (r + i) * BLOCK + c + VW));
                }
                mt_store_a2(prob + c, e, f);
            }
            float *out = x->out + (strip * TALL + r + i) * dv;
            for (int64_t c = 0; x->begun[strip] && shrinks[i] != 1 && c < dv; c += VW)
                v_store(out + c, v_mul(v_load(out + c), v_set1(shrinks[i])));
        }
        v_store(sum + r, v_fma(v_load(sum + r), shrink, sum_of_each(v)));
    }
}

/* ---- one item -------------------------------------------------------------------------------------------- */

static void attend_block(const context *c, const scores *a, rows_state *x, int64_t first, int64_t block, const mt *kt,
                         const mt *v)
{
    const attention_sizes *z = &c->p->sizes;
    const bool plain = !a->extras;
    for (int64_t strip = 0; strip < c->w.rows / TALL; strip++) {
        const int64_t i = first + strip * TALL;
        const attention_span strips =
            attention_strips(attention_keys_of_rows(z, &a->s, i, i + TALL), block * BLOCK, BLOCK);
        const int64_t n = strips.end - strips.first;
        if (n == 0)
            continue;
        mt_product(TALL, n, c->w.d, x->q + strip * TALL * c->w.d, c->w.d, kt + mt_b(c->w.d, 0, strips.first), c->w.d,
                   x->s + strips.first, BLOCK, false);
        if (!plain) {
            const score_tile tile = {i, block * BLOCK, false, strips};
            scores_modify(a, &tile, x->s, NULL);
            if (a->dropout.dropped > 0)
                scores_keep(a, &tile, x->keep);
            softmax_strip(a, x, strip, i, block * BLOCK, strips, c->w.dv, false);
        } else {
            softmax_strip(a, x, strip, i, block * BLOCK, strips, c->w.dv, true);
        }
        mt_product(TALL, c->w.dv, n, x->prob + strips.first, BLOCK, v + mt_b(BLOCK, strips.first, 0), BLOCK,
                   x->out + strip * TALL * c->w.dv, c->w.dv, x->begun[strip]);
        x->begun[strip] = true;
    }
}

static void finish_rows(const context *c, rows_state *x, const attention_block *rows, int64_t h)
{
    const attention_problem *p = c->p;
    float inverse[ROWS], lse[ROWS];
    for (int64_t r = 0; r < rows->rows; r++) {
        const bool seen = r < rows->used && x->sum[r] > 0;
        inverse[r] = seen ? 1 / x->sum[r] : 0;
        lse[r] = seen ? x->most[r] + logf(x->sum[r]) : -INFINITY;
        if (cot_present(&p->lse))
            ((float *)p->lse.data)[attention_lse_at(&p->lse, rows->s.b, h, rows->s.q_row + rows->first + r)] = lse[r];
        if (!x->begun[r / TALL] || !seen)
            memset(x->out + r * c->w.dv, 0, (size_t)c->w.dv * sizeof(float));
    }
    if (cot_present(&p->out))
        store_rows(&p->out, rows->s.b, rows->s.q_row + rows->first, h, rows->rows, p->sizes.dv, x->out, c->w.dv,
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
    for (int64_t r = 0; r < ROWS; r++) {
        x.most[r] = sink > -INFINITY ? sink : -FLT_MAX;
        x.sum[r] = sink > -INFINITY ? 1 : 0;
    }
    for (int64_t r = 0; r < c->w.rows; r += STRIP) {
        _Alignas(64) float strip[STRIP * ATTENTION_MAX_D];
        load_rows(strip, c->w.d, &p->q, rows.s.b, rows.s.q_row + rows.first + r, h,
                  attention_clamp(rows.used - r, 0, STRIP), p->sizes.d);
        pack_a(x.q, r, strip, c->w.d);
    }
    const attention_span seen = attention_keys_of_rows(&p->sizes, &rows.s, rows.first, rows.first + c->w.rows);
    const int64_t slot = attention_first_slot(&keys, rows.s.b);
    mt_begin(&host);
    for (int64_t block = seen.first / BLOCK; block * BLOCK < seen.end; block++) {
        const int64_t at = ((slot + block) * p->sizes.Hkv + hkv) * BLOCK;
        attend_block(c, &a, &x, rows.first, block, c->kt + at * c->w.d, c->v + at * c->w.dv);
    }
    mt_end(&host);
    finish_rows(c, &x, &rows, h);
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
