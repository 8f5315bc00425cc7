/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_dbias.h: the backward's dbias.
 *
 * An element of dbias may sum over many heads, sequences, queries or keys, which other items differentiate. So dbias
 * has its own pass, which computes two products and the exponentials again. An item is a tile of dbias. It sums
 * everything that its elements cover, in double, in the order of sequences and heads. */
#ifndef COT_ATTENTION_BWD_DBIAS_H
#define COT_ATTENTION_BWD_DBIAS_H

#include "attention_bwd_score_block.h"

/* k and v of SCORE_ROWS keys. */
typedef struct score_tile_keys {
    _Alignas(64) mt k[SCORE_ROWS * ATTENTION_MAX_D], v[SCORE_ROWS * ATTENTION_MAX_D];
} score_tile_keys;

typedef struct dbias_buffers {
    score_tile_buffers score_tile;
    _Alignas(64) double sums[SCORE_ROWS * BLOCK];
    score_tile_keys keys;
} dbias_buffers;

_Static_assert(sizeof(dbias_buffers) <=
                   ATTENTION_BWD_SCRATCH(sizeof(mt), MT_SAME_FORM) + ATTENTION_DBIAS_SCRATCH(sizeof(mt)),
               "the buffers must fit the thread's scratch");

/* Adds dY^T of keys [first_key, first_key + SCORE_ROWS) and a query block to sums[SCORE_ROWS][BLOCK]. dY is dS without
 * the slope of the softcap. */
static void add_score_tile(const context *c, const score_context *ctx, const score_tile_keys *keys,
                           score_tile_buffers *buffers, double *sums, int64_t first_key, int64_t query_block)
{
    const attention_problem *p = c->p;
    const attention_axis queries = attention_query_axis(p, BLOCK);
    const int64_t qk_size = c->layout.qk_size, v_size = c->layout.v_size, first_query = query_block * BLOCK;
    const attention_span query_range = attention_round_to_strips(
        attention_visible_queries_of_rows(&p->sizes, &ctx->sequence, first_key, first_key + SCORE_ROWS), first_query,
        BLOCK);
    const int64_t n = query_range.end - query_range.first;
    if (n == 0)
        return;
    const int64_t q_slot = (attention_first_slot(&queries, ctx->sequence.b) + query_block) * p->sizes.H + ctx->h;
    const int64_t tile_offset = mt_offset(SCORE_ROWS, 0, query_range.first);
    const query_forms q = query_forms_at(c, q_slot);
    const float *lse = c->lse + q_slot * BLOCK, *delta = c->delta + q_slot * BLOCK;
    mt_product_all_terms(SCORE_ROWS, n, qk_size, keys->k, SCORE_ROWS, q.q_t + mt_offset(qk_size, 0, query_range.first),
                         qk_size, buffers->scores + tile_offset, SCORE_ROWS, /*add=*/false, NULL);
    mt_product_all_terms(SCORE_ROWS, n, v_size, keys->v, SCORE_ROWS, q.dout_t + mt_offset(v_size, 0, query_range.first),
                         v_size, buffers->dp + tile_offset, SCORE_ROWS, /*add=*/false, NULL);
    const score_tile tile = {
        .i = first_query, .j = first_key, .keys_in_rows = true, .rows = SCORE_ROWS, .columns = query_range};
    const score_tile_options o = {
        .exp_scale = v_set1(scores_exp_scale(p)), .masked = true, .dropout = ctx->dropout.dropped > 0};
    modify_scores(ctx, &tile, buffers->scores, NULL);
    if (o.dropout)
        fill_dropout_factors(ctx, &tile, buffers->dropout_factors);
    for (int64_t r = 0; r < SCORE_ROWS; r++)
        for (int64_t i = query_range.first; i < query_range.end; i += VW) {
            const int64_t offset = panel_offset(SCORE_ROWS, r, i);
            float values[VW];
            vf prob, ds;
            compute_p_and_ds(ctx, buffers, offset, first_key + r, first_query + i, o, v_load(lse + i),
                             v_load(delta + i), v_load(buffers->dp + offset), &prob, &ds);
            v_store(values, ds);
            for (int64_t lane = 0; lane < VW; lane++)
                sums[r * BLOCK + i + lane] += (double)values[lane];
        }
}

/* The tiles of a sequence's axis that tile `tile` of dbias covers: all of them if the dbias axis has size 1. */
static attention_span tile_span(int64_t size, int64_t tile, int64_t count, int64_t tile_size)
{
    return size == 1 ? (attention_span){0, cot_ceil_div(count, tile_size)} : (attention_span){tile, tile + 1};
}

/* Stores a tile of dbias whose first element is `origin`. Sums over keys if the key axis has size 1, and likewise
 * over queries. */
static void store_tile(const cot_tensor *dbias, const int64_t origin[4], const double *sums, bool accumulate)
{
    const bool sum_queries = dbias->shape[2] == 1, sum_keys = dbias->shape[3] == 1;
    const int64_t rows = sum_keys ? 1 : cot_clamp(dbias->shape[3] - origin[3], 0, SCORE_ROWS);
    const int64_t columns = sum_queries ? 1 : cot_clamp(dbias->shape[2] - origin[2], 0, BLOCK);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < columns; i++) {
            const int64_t offset = attention_bias_offset(dbias, origin[0], origin[1], origin[2] + i, origin[3] + r);
            double sum = accumulate ? cot_load_f64(dbias->data, dbias->dtype, offset) : 0;
            for (int64_t m = r; m < (sum_keys ? SCORE_ROWS : r + 1); m++)
                for (int64_t n = i; n < (sum_queries ? BLOCK : i + 1); n++)
                    sum += sums[m * BLOCK + n];
            cot_store_f64(dbias->data, dbias->dtype, offset, sum);
        }
}

static void dbias_item(void *argument, int64_t item, void *scratch)
{
    const context *c = argument;
    const attention_problem *p = c->p;
    const attention_sizes *sizes = &p->sizes;
    const int64_t *shape = p->dbias.shape;
    const int64_t q_tiles = cot_ceil_div(shape[2], BLOCK), k_tiles = cot_ceil_div(shape[3], SCORE_ROWS);
    const int64_t q_tile = item / k_tiles % q_tiles, k_tile = item % k_tiles;
    const int64_t origin[4] = {item / k_tiles / q_tiles / shape[1], item / k_tiles / q_tiles % shape[1], q_tile * BLOCK,
                               k_tile * SCORE_ROWS};
    const attention_span batch = tile_span(shape[0], origin[0], sizes->B, 1),
                         heads = tile_span(shape[1], origin[1], sizes->H, 1);
    dbias_buffers *const buffers = scratch;
    mt_state host_tiles;
    memset(buffers->sums, 0, sizeof buffers->sums);
    mt_begin(&host_tiles);
    for (int64_t b = batch.first; b < batch.end; b++) {
        const attention_sequence s = attention_sequence_at(p, b);
        const attention_span query_blocks = tile_span(shape[2], q_tile, s.used_q, BLOCK),
                             key_tiles = tile_span(shape[3], k_tile, s.used_k, SCORE_ROWS);
        for (int64_t h = heads.first; h < heads.end; h++) {
            const score_context ctx = make_score_context(p, &s, h);
            for (int64_t key_tile = key_tiles.first; key_tile < key_tiles.end; key_tile++) {
                pack_keys(c, &s, h / (sizes->H / sizes->Hkv), key_tile * SCORE_ROWS, SCORE_ROWS, buffers->keys.k, NULL,
                          buffers->keys.v, buffers->score_tile.staging[0]);
                for (int64_t query_block = query_blocks.first; query_block < query_blocks.end; query_block++)
                    add_score_tile(c, &ctx, &buffers->keys, &buffers->score_tile, buffers->sums, key_tile * SCORE_ROWS,
                                   query_block);
            }
        }
    }
    mt_end(&host_tiles);
    store_tile(&p->dbias, origin, buffers->sums, p->accumulate);
}

#endif
