/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_dbias.h: the backward's dbias.
 *
 * An element of dbias may be that of many heads, sequences, queries or keys, which other items differentiate. So it has
 * a pass of its own, two products and the exponentials once more: an item is a tile of dbias and sums all that its
 * elements stand for, in double, in the order of sequences and heads. */
#ifndef COT_ATTENTION_BWD_DBIAS_H
#define COT_ATTENTION_BWD_DBIAS_H

#include "attention_bwd_pairs.h"

/* k and v of TALL keys. */
typedef struct key_strip {
    _Alignas(64) mt k[TALL * ATTENTION_MAX_D], v[TALL * ATTENTION_MAX_D];
} key_strip;

typedef struct dbias_buffers {
    strip_buffers strip;
    _Alignas(64) double sums[TALL * BLOCK];
    key_strip keys;
} dbias_buffers;

_Static_assert(sizeof(dbias_buffers) <=
                   ATTENTION_BWD_SCRATCH(sizeof(mt), MT_ONE_FORM) + ATTENTION_DBIAS_SCRATCH(sizeof(mt)),
               "they lie in a slice");

/* dS^T of TALL keys from j on at a block of queries is added to sums[TALL][BLOCK]. */
static void sum_strip(const context *c, const scores *a, const key_strip *keys, strip_buffers *x, double *sums,
                      int64_t j, int64_t q_block)
{
    const attention_problem *p = c->p;
    const attention_axis queries = {p, false, BLOCK};
    const int64_t d = c->w.d, dv = c->w.dv, first = q_block * BLOCK;
    const attention_span strips =
        attention_strips(attention_queries_of_rows(&p->sizes, &a->s, j, j + TALL), first, BLOCK);
    const int64_t n = strips.end - strips.first;
    if (n == 0)
        return;
    const int64_t q_at = (attention_first_slot(&queries, a->s.b) + q_block) * p->sizes.H + a->h;
    const int64_t tile_at = mt_at(TALL, 0, strips.first);
    const query_forms q = query_forms_at(c, q_at);
    const float *lse = c->lse + q_at * BLOCK, *D = c->D + q_at * BLOCK;
    mt_product_whole(TALL, n, d, keys->k, TALL, q.qt + mt_at(d, 0, strips.first), d, x->s + tile_at, TALL, false, NULL);
    mt_product_whole(TALL, n, dv, keys->v, TALL, q.dot + mt_at(dv, 0, strips.first), dv, x->dp + tile_at, TALL, false,
                     NULL);
    const score_tile tile = {first, j, true, TALL, strips};
    const strip_options o = {.unit = v_set1(scores_unit(p)), .masked = true, .drop = a->dropout.dropped > 0};
    scores_modify(a, &tile, x->s, NULL);
    if (o.drop)
        scores_keep(a, &tile, x->keep);
    for (int64_t r = 0; r < TALL; r++)
        for (int64_t i = strips.first; i < strips.end; i += VW) {
            const int64_t at = cell(TALL, r, i);
            float values[VW];
            vf prob, ds;
            differentiate_scores(a, x, at, j + r, first + i, o, v_load(lse + i), v_load(D + i), v_load(x->dp + at),
                                 &prob, &ds);
            v_store(values, ds);
            for (int64_t lane = 0; lane < VW; lane++)
                sums[r * BLOCK + i + lane] += (double)values[lane];
        }
}

/* Blocks or strips of `all` that tile `tile` of an axis of dbias stands for: all of them where the axis has one element. */
static attention_span tile_span(int64_t size, int64_t tile, int64_t all, int64_t each)
{
    return size == 1 ? (attention_span){0, cot_ceil_div(all, each)} : (attention_span){tile, tile + 1};
}

/* The keys of a row of sums together where the axis has one element, likewise the queries. */
static void store_tile(const cot_tensor *dbias, const int64_t at[4], const double *sums, bool accumulate)
{
    const bool one_query = dbias->shape[2] == 1, one_key = dbias->shape[3] == 1;
    const int64_t rows = one_key ? 1 : cot_clamp(dbias->shape[3] - at[3], 0, TALL);
    const int64_t columns = one_query ? 1 : cot_clamp(dbias->shape[2] - at[2], 0, BLOCK);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < columns; i++) {
            const int64_t to = attention_bias_at(dbias, at[0], at[1], at[2] + i, at[3] + r);
            double sum = accumulate ? cot_load_f64(dbias->data, dbias->dtype, to) : 0;
            for (int64_t m = r; m < (one_key ? TALL : r + 1); m++)
                for (int64_t n = i; n < (one_query ? BLOCK : i + 1); n++)
                    sum += sums[m * BLOCK + n];
            cot_store_f64(dbias->data, dbias->dtype, to, sum);
        }
}

static void dbias_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const attention_sizes *z = &p->sizes;
    const int64_t *shape = p->dbias.shape;
    const int64_t q_tiles = cot_ceil_div(shape[2], BLOCK), k_tiles = cot_ceil_div(shape[3], TALL);
    const int64_t q_tile = item / k_tiles % q_tiles, k_tile = item % k_tiles;
    const int64_t at[4] = {item / k_tiles / q_tiles / shape[1], item / k_tiles / q_tiles % shape[1], q_tile * BLOCK,
                           k_tile * TALL};
    const attention_span batch = tile_span(shape[0], at[0], z->B, 1), heads = tile_span(shape[1], at[1], z->H, 1);
    dbias_buffers *const x = scratch;
    mt_state host;
    memset(x->sums, 0, sizeof x->sums);
    mt_begin(&host);
    for (int64_t b = batch.first; b < batch.end; b++) {
        const attention_sequence s = attention_sequence_at(p, b);
        const attention_span blocks = tile_span(shape[2], q_tile, s.Tq, BLOCK),
                             strips = tile_span(shape[3], k_tile, s.Tk, TALL);
        for (int64_t h = heads.first; h < heads.end; h++) {
            const scores a = scores_of(p, &s, h);
            for (int64_t strip = strips.first; strip < strips.end; strip++) {
                pack_keys(c, &s, h / (z->H / z->Hkv), strip * TALL, TALL, x->keys.k, NULL, x->keys.v, x->strip.rows[0]);
                for (int64_t q_block = blocks.first; q_block < blocks.end; q_block++)
                    sum_strip(c, &a, &x->keys, &x->strip, x->sums, strip * TALL, q_block);
            }
        }
    }
    mt_end(&host);
    store_tile(&p->dbias, at, x->sums, p->accumulate);
}

#endif
