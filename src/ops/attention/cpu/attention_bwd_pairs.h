/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_pairs.h: what the backward multiplies, packed, and its five products of a block of keys and a block of queries.
 * For attention_bwd_tiled.c. */
#ifndef COT_ATTENTION_BWD_PAIRS_H
#define COT_ATTENTION_BWD_PAIRS_H

#include "attention_scores.h"

typedef struct context {
    const attention_problem *p;
    attention_bwd_layout w;
    mt *queries, *keys;
    float *lse, *D, *dq, *dk; /* lse in the unit of exp_scores */
} context;

/* The forms of a block of queries, which lie together because they are fetched together. */
typedef struct query_forms {
    mt *qt, *q, *dot, *dout; /* q^T [d][BLOCK], q [BLOCK][d] and the same of dout, all in B form */
} query_forms;

static query_forms query_forms_at(const context *c, int64_t number)
{
    mt *at = c->queries + number * c->w.record, *dot = at + 2 * BLOCK * c->w.d;
    return (query_forms){at, at + BLOCK * c->w.d, dot, dot + BLOCK * c->w.dv};
}

/* ---- packing -------------------------------------------------------------------------------------------- */

/* `height` keys from key j on: k and v, and k^T unless NULL. x: a strip of rows. */
static void pack_keys(const context *c, const attention_sequence *s, int64_t hkv, int64_t j, int64_t height, mt *k,
                      mt *kt, mt *v, float *x)
{
    const attention_problem *p = c->p;
    for (int64_t r = 0; r < height; r += STRIP) {
        const int64_t rows = cot_clamp(s->Tk - j - r, 0, STRIP), row = s->k_row + j + r;
        load_rows(x, c->w.d, &p->k, s->b, row, hkv, rows, p->sizes.d);
        pack_a(k, height, r, x, c->w.d);
        if (kt != NULL)
            pack_transposed(kt, false, r, x, c->w.d);
        load_rows(x, c->w.dv, &p->v, s->b, row, hkv, rows, p->sizes.dv);
        pack_a(v, height, r, x, c->w.dv);
    }
}

/* sum_c dout[i,c] out[i,c] of STRIP rows, with the roundings of dP = dout v^T: of a query that sees one key out is v, and
 * dP - D is 0, as it should be. */
static void sum_products(float *D, const float *dout, const float *out, int64_t columns)
{
    for (int64_t r = 0; r < STRIP; r += VW) {
        vf sum = v_zero();
        for (int64_t c = 0; c < columns; c += MT_CHAIN) {
            vf a[MT_CHAIN], b[MT_CHAIN];
            const int64_t n = columns - c < MT_CHAIN ? columns - c : MT_CHAIN;
            for (int64_t part = 0; part < n; part += VW) {
                for (int64_t i = 0; i < VW; i++) {
                    a[part + i] = v_load(dout + (r + i) * columns + c + part);
                    b[part + i] = v_load(out + (r + i) * columns + c + part);
                }
                mt_transpose(a + part);
                mt_transpose(b + part);
            }
            sum = mt_dot(sum, a, b, n);
        }
        v_store(D + r, sum);
    }
}

/* What lse is multiplied with: the unit of exp_scores with its rounding, which scores have too, so that it cancels. */
static double lse_unit(const attention_problem *p)
{
    return scores_unit(p) / (scores_have_extras(p) ? 1 : p->sizes.scale);
}

/* lse and D of STRIP queries. One that passes no gradient gets lse = inf, which makes its P zero. */
static void pack_statistics(const attention_problem *p, const attention_block *block, int64_t h, int64_t r, float *lse,
                            float *D)
{
    const double unit = lse_unit(p);
    for (int64_t i = 0; i < STRIP; i++) {
        const int64_t row = block->s.q_row + block->first + r + i;
        lse[i] = INFINITY;
        if (r + i < block->used) {
            const float given = ((const float *)p->lse.data)[attention_lse_at(&p->lse, block->s.b, h, row)];
            lse[i] = given == -INFINITY ? INFINITY : (float)(given * unit);
        }
        if (lse[i] == INFINITY)
            D[i] = 0;
        else if (cot_present(&p->delta))
            D[i] = ((const float *)p->delta.data)[attention_lse_at(&p->delta, block->s.b, h, row)];
        else if (cot_present(&p->dlse))
            D[i] -= ((const float *)p->dlse.data)[attention_lse_at(&p->dlse, block->s.b, h, row)];
    }
}

static void pack_queries_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const attention_axis axis = {p, false, BLOCK};
    const int64_t h = item % p->sizes.H, at = item * BLOCK;
    const attention_block block = attention_block_at(&axis, item / p->sizes.H);
    const query_forms to = query_forms_at(c, item);
    float *const x = scratch, *const out = x + STRIP * ATTENTION_MAX_D;
    for (int64_t r = 0; block.rows > 0 && r < BLOCK; r += STRIP) {
        const int64_t rows = cot_clamp(block.used - r, 0, STRIP), row = block.s.q_row + block.first + r;
        load_rows(x, c->w.d, &p->q, block.s.b, row, h, rows, p->sizes.d);
        pack_transposed(to.qt, true, r, x, c->w.d);
        pack_b(to.q, BLOCK, r, x, c->w.d);
        load_rows(x, c->w.dv, &p->dout, block.s.b, row, h, rows, p->sizes.dv);
        pack_transposed(to.dot, true, r, x, c->w.dv);
        pack_b(to.dout, BLOCK, r, x, c->w.dv);
        if (!cot_present(&p->delta)) {
            load_rows(out, c->w.dv, &p->out, block.s.b, row, h, rows, p->sizes.dv);
            sum_products(c->D + at + r, x, out, c->w.dv);
        }
        pack_statistics(p, &block, h, r, c->lse + at + r, c->D + at + r);
    }
}

/* ---- a block of keys and a block of queries --------------------------------------------------------------------- */

/* A strip of keys at a block of queries, [TALL][BLOCK]: S^T and dP^T become P^T and dS^T, for the product for dq those
 * of the whole block of keys. With AMX, dS^T is wanted in both forms. */
typedef struct strip_buffers {
    _Alignas(64) float s[TALL * BLOCK], dp[BLOCK * BLOCK];
    /* Otherwise in place. There is room for two strips, in turns. */
    _Alignas(64) mt prob[MT_ONE_FORM ? 1 : 2 * TALL * BLOCK], ds[MT_ONE_FORM ? 1 : 2 * TALL * BLOCK];
    _Alignas(64) mt ds_b[MT_ONE_FORM ? 1 : 2 * TALL * BLOCK];
    int64_t turn;
    _Alignas(64) float caps[TALL * BLOCK], keep[TALL * BLOCK]; /* of softcap and dropout */
    _Alignas(64) float rows[2][STRIP * ATTENTION_MAX_D];       /* before they are packed */
} strip_buffers;

_Static_assert(sizeof(strip_buffers) <= ATTENTION_BWD_SCRATCH(sizeof(mt), MT_ONE_FORM), "they lie in a slice");

/* Operands where they lie: P^T and dS^T of a strip, and dS^T of the block in B form. */
typedef struct strip_operands {
    mt *prob, *ds, *ds_b;
    int64_t ds_rows;
} strip_operands;

V_INLINE strip_operands operands_of(strip_buffers *x, int64_t top)
{
    if (MT_ONE_FORM)
        return (strip_operands){(mt *)x->s, (mt *)x->dp + mt_at(BLOCK, top, 0), (mt *)x->dp, BLOCK};
    return (strip_operands){x->prob, x->ds, x->ds_b, TALL};
}

/* What is constant in a strip. The last three at compile time, so that what is not there costs nothing. */
typedef struct strip_options {
    vf unit;
    bool masked, cap, drop;
} strip_options;

/* P^T (times what dropout makes of it) and dZ^T of key j and VW queries from i on; s and dp are there, and `at` is their
 * place in the tile. */
V_INLINE void differentiate_scores(const scores *a, const strip_buffers *x, int64_t at, int64_t j, int64_t i,
                                   strip_options o, vf lse, vf D, vf dp, vf *prob, vf *ds)
{
    *prob = exp_scores(v_load(x->s + at), o.unit, lse);
    if (o.drop)
        dp = v_mul(dp, v_load(x->keep + at));
    *ds = v_mul(*prob, v_sub(dp, D));
    if (o.drop)
        *prob = v_mul(*prob, v_load(x->keep + at));
    if (o.cap)
        *ds = v_mul(*ds, v_load(x->caps + at));
    if (o.masked) {
        const attention_span seen = scores_queries(a, j);
        *prob = select_span(seen.first - i, seen.end - i, *prob, v_zero());
        *ds = select_span(seen.first - i, seen.end - i, *ds, v_zero());
    }
}

/* `height` keys from row `top` of the block on, the first of which is j, and queries first + [strips); lse and D are those of query `first` on. Two keys and 2 VW queries at a
 * time, which is what the stores want. */
V_INLINE void differentiate_strip(const scores *a, strip_buffers *x, int64_t top, int64_t height, int64_t j,
                                  int64_t first, attention_span strips, const float *lse, const float *D,
                                  strip_options o)
{
    const strip_operands to = operands_of(x, top);
    for (int64_t i = strips.first; i < strips.end; i += 2 * VW) {
        for (int64_t r = 0; r < height; r += 2) {
            vf prob[2][2], ds[2][2];
            V_UNROLL
            for (int64_t n = 0; n < 2; n++) {
                V_UNROLL
                for (int64_t m = 0; m < 2; m++) {
                    const vf dp = v_load(x->dp + cell(BLOCK, top + r + n, i) + m * VW);
                    differentiate_scores(a, x, cell(TALL, r + n, i) + m * VW, j + r + n, first + i + m * VW, o,
                                         v_load(lse + i + m * VW), v_load(D + i + m * VW), dp, &prob[n][m], &ds[n][m]);
                }
                mt_store_a2(to.prob + cell(TALL, r + n, i), prob[n][0], prob[n][1]);
                if (!MT_ONE_FORM)
                    mt_store_a2(to.ds + cell(TALL, r + n, i), ds[n][0], ds[n][1]);
            }
            mt_store_b(to.ds_b, BLOCK, top + r, i, ds[0][0], ds[1][0]);
            mt_store_b(to.ds_b, BLOCK, top + r, i + VW, ds[0][1], ds[1][1]);
        }
    }
}

/* Does every key of j .. j+height see every query of first + [strips)? */
static bool all_seen(const scores *a, int64_t j, int64_t height, int64_t first, attention_span strips)
{
    const attention_span top = scores_queries(a, j), bottom = scores_queries(a, j + height - 1);
    return bottom.first <= first + strips.first && top.end >= first + strips.end && bottom.first < bottom.end;
}

/* The operands of one block of keys and one of queries. */
typedef struct pair_of_blocks {
    int64_t first_key, first_query;
    query_forms q;
    const mt *k, *kt, *v;
    const float *lse, *D;
    float *dq; /* [d][BLOCK]; dk, dv [BLOCK][d] */
    float *dk, *dv;
    bool *dq_begun, *begun;           /* of each strip of dq; of dk and dv */
    mt_ahead *forms_ahead, *dq_ahead; /* of the next block of queries */
} pair_of_blocks;

/* `height` keys from row `top` of the block on, at the queries `strips` of their block. */
static void differentiate_keys(const context *c, const scores *a, const pair_of_blocks *b, strip_buffers *x,
                               int64_t top, int64_t height, attention_span strips, bool seen)
{
    const attention_problem *p = c->p;
    const int64_t d = c->w.d, dv = c->w.dv, j = b->first_key + top, n = strips.end - strips.first;
    const int64_t at = mt_at(BLOCK, top, 0);
    const strip_operands operands = operands_of(x, top);
    mt_product(height, n, d, b->k + at, BLOCK, b->q.qt + mt_at(d, 0, strips.first), d,
               x->s + mt_at(TALL, 0, strips.first), TALL, false, b->forms_ahead);
    mt_product_whole(height, n, dv, b->v + at, BLOCK, b->q.dot + mt_at(dv, 0, strips.first), dv,
                     x->dp + at + mt_at(BLOCK, 0, strips.first), BLOCK, false, b->forms_ahead);
    strip_options o = {.unit = v_set1(scores_unit(p)), .masked = true};
    if (a->extras) {
        const score_tile tile = {b->first_query, j, true, height, strips};
        scores_modify(a, &tile, x->s, x->caps);
        if (a->dropout.dropped > 0)
            scores_keep(a, &tile, x->keep);
        o.cap = p->sizes.softcap > 0;
        o.drop = a->dropout.dropped > 0;
        differentiate_strip(a, x, top, height, j, b->first_query, strips, b->lse, b->D, o);
    } else if (seen) {
        o.masked = false;
        differentiate_strip(a, x, top, height, j, b->first_query, strips, b->lse, b->D, o);
    } else {
        differentiate_strip(a, x, top, height, j, b->first_query, strips, b->lse, b->D, o);
    }
    mt_product(height, dv, n, operands.prob + mt_at(TALL, 0, strips.first), TALL,
               b->q.dout + mt_at(BLOCK, strips.first, 0), BLOCK, b->dv + at, BLOCK, b->begun[top / STRIP],
               b->forms_ahead);
    mt_product(height, d, n, operands.ds + mt_at(operands.ds_rows, 0, strips.first), operands.ds_rows,
               b->q.q + mt_at(BLOCK, strips.first, 0), BLOCK, b->dk + at, BLOCK, b->begun[top / STRIP], b->forms_ahead);
    for (int64_t r = top; r < top + height; r += STRIP)
        b->begun[r / STRIP] = true;
}

/* TALL keys at a time; STRIP where a mask's border runs through, since less of what it hides is then worked out. */
static void differentiate_blocks(const context *c, const scores *a, const pair_of_blocks *b, strip_buffers *x)
{
    const attention_sizes *z = &c->p->sizes;
    const int64_t d = c->w.d;
    attention_span keys[BLOCK / STRIP]; /* of each strip of queries: the strips of keys that it saw */
    for (int64_t n = 0; n < BLOCK / STRIP; n++)
        keys[n] = (attention_span){BLOCK, 0};
    for (int64_t top = 0, height; top < BLOCK; top += height) {
        const int64_t j = b->first_key + top;
        attention_span strips;
        for (height = top % TALL == 0 ? TALL : STRIP;; height = STRIP) {
            strips = attention_strips(attention_queries_of_rows(z, &a->s, j, j + height), b->first_query, BLOCK);
            if (height == STRIP || strips.first == strips.end ||
                (b->begun[top / STRIP] == b->begun[top / STRIP + 1] && all_seen(a, j, height, b->first_query, strips)))
                break;
        }
        if (strips.first == strips.end)
            continue;
        differentiate_keys(c, a, b, x, top, height, strips, all_seen(a, j, height, b->first_query, strips));
        for (int64_t i = strips.first / STRIP; i < strips.end / STRIP; i++) {
            keys[i].first = keys[i].first < top ? keys[i].first : top;
            keys[i].end = top + height;
        }
    }
    const mt *ds = operands_of(x, 0).ds_b;
    for (int64_t i = 0; i < BLOCK / STRIP; i++) {
        const int64_t n = keys[i].end - keys[i].first;
        if (n <= 0)
            continue;
        mt_product(d, STRIP, n, b->kt + mt_at(d, 0, keys[i].first), d, ds + mt_at(BLOCK, keys[i].first, i * STRIP),
                   BLOCK, b->dq + mt_at(d, 0, i * STRIP), d, b->dq_begun[i], b->dq_ahead);
        b->dq_begun[i] = true;
    }
}

#endif
