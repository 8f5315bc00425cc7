/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_score_block.h: the packed operands of the backward, and its five products of a score block: the scores
 * of a key block and a query block. For attention_bwd_tiled.c. */
#ifndef COT_ATTENTION_BWD_SCORE_BLOCK_H
#define COT_ATTENTION_BWD_SCORE_BLOCK_H

#include "attention_scores.h"

typedef struct context {
    const attention_problem *p;
    attention_bwd_layout layout;
    mt *queries, *keys;
    float *lse, *delta, *dq, *dk; /* lse: times the scale of exp_scores */
} context;

/* The packed forms of a query block. They are adjacent because they are prefetched together. */
typedef struct query_forms {
    mt *q_t, *q, *dout_t, *dout; /* q^T [qk_size][BLOCK], q [BLOCK][qk_size]; dout^T, dout with v_size. All in B form */
} query_forms;

static query_forms query_forms_at(const context *c, int64_t index)
{
    mt *q_t = c->queries + index * c->layout.query_block_elements, *dout_t = q_t + 2 * BLOCK * c->layout.qk_size;
    return (query_forms){q_t, q_t + BLOCK * c->layout.qk_size, dout_t, dout_t + BLOCK * c->layout.v_size};
}

/* ---- packing -------------------------------------------------------------------------------------------- */

/* Packs keys [j, j + rows): k and v, and k^T unless kt is NULL. `staging` holds a strip of rows. */
static void pack_keys(const context *c, const attention_sequence *s, int64_t hkv, int64_t j, int64_t rows, mt *k,
                      mt *kt, mt *v, float *staging)
{
    const attention_problem *p = c->p;
    for (int64_t r = 0; r < rows; r += STRIP) {
        const int64_t used = cot_clamp(s->used_k - j - r, 0, STRIP), row = s->k_row + j + r;
        load_rows(staging, c->layout.qk_size, &p->k, s->b, row, hkv, used, p->sizes.d_qk);
        pack_a(k, rows, r, staging, c->layout.qk_size);
        if (kt != NULL)
            pack_a_transposed(kt, r, staging, c->layout.qk_size);
        load_rows(staging, c->layout.v_size, &p->v, s->b, row, hkv, used, p->sizes.d_v);
        pack_a(v, rows, r, staging, c->layout.v_size);
    }
}

/* delta[i] = sum_c dout[i,c] out[i,c] of STRIP rows, rounded like dP = dout v^T. So dP - delta is exactly 0 for a query
 * that attends to one key, because its out is v. */
static void sum_dout_out(float *delta, const float *dout, const float *out, int64_t columns)
{
    for (int64_t r = 0; r < STRIP; r += VW) {
        vf sum = v_zero();
        for (int64_t c = 0; c < columns; c += MT_K_BLOCK) {
            vf a[MT_K_BLOCK], b[MT_K_BLOCK];
            const int64_t n = columns - c < MT_K_BLOCK ? columns - c : MT_K_BLOCK;
            for (int64_t step = 0; step < n; step += VW) {
                for (int64_t i = 0; i < VW; i++) {
                    a[step + i] = v_load(dout + (r + i) * columns + c + step);
                    b[step + i] = v_load(out + (r + i) * columns + c + step);
                }
                mt_transpose(a + step);
                mt_transpose(b + step);
            }
            sum = mt_dot(sum, a, b, n);
        }
        v_store(delta + r, sum);
    }
}

/* The factor of lse. exp_scores multiplies a score by (float)scale. lse is therefore multiplied by (float)scale /
 * scale, so that both have the same rounding error, which cancels. */
static double lse_exp_scale(const attention_problem *p)
{
    return scores_exp_scale(p) / (scores_are_modified(p) ? 1 : p->sizes.scale);
}

/* Writes lse and delta of STRIP queries. A query that passes no gradient gets lse = inf, so that its P is zero. */
static void pack_statistics(const attention_problem *p, const attention_block *query_block, int64_t h, int64_t r,
                            float *lse, float *delta)
{
    const double exp_scale = lse_exp_scale(p);
    for (int64_t i = 0; i < STRIP; i++) {
        const int64_t row = query_block->sequence.q_row + query_block->first + r + i;
        lse[i] = INFINITY;
        if (r + i < query_block->used) {
            const float input_lse =
                ((const float *)p->lse.data)[attention_lse_offset(&p->lse, query_block->sequence.b, h, row)];
            lse[i] = input_lse == -INFINITY ? INFINITY : (float)(input_lse * exp_scale);
        }
        if (lse[i] == INFINITY)
            delta[i] = 0;
        else if (cot_is_present(&p->delta))
            delta[i] = ((const float *)p->delta.data)[attention_lse_offset(&p->delta, query_block->sequence.b, h, row)];
        else if (cot_is_present(&p->dlse))
            delta[i] -= ((const float *)p->dlse.data)[attention_lse_offset(&p->dlse, query_block->sequence.b, h, row)];
    }
}

static void pack_queries_item(void *argument, int64_t item, void *scratch)
{
    const context *c = argument;
    const attention_problem *p = c->p;
    const attention_axis axis = attention_query_axis(p, BLOCK);
    const int64_t h = item % p->sizes.H, first_row = item * BLOCK;
    const attention_block query_block = attention_block_at(&axis, item / p->sizes.H);
    const query_forms to = query_forms_at(c, item);
    float *const staging = scratch, *const out = staging + STRIP * ATTENTION_MAX_D;
    for (int64_t r = 0; query_block.rows > 0 && r < BLOCK; r += STRIP) {
        const int64_t rows = cot_clamp(query_block.used - r, 0, STRIP),
                      row = query_block.sequence.q_row + query_block.first + r;
        load_rows(staging, c->layout.qk_size, &p->q, query_block.sequence.b, row, h, rows, p->sizes.d_qk);
        pack_b_transposed(to.q_t, r, staging, c->layout.qk_size);
        pack_b(to.q, BLOCK, r, staging, c->layout.qk_size);
        load_rows(staging, c->layout.v_size, &p->dout, query_block.sequence.b, row, h, rows, p->sizes.d_v);
        pack_b_transposed(to.dout_t, r, staging, c->layout.v_size);
        pack_b(to.dout, BLOCK, r, staging, c->layout.v_size);
        if (!cot_is_present(&p->delta)) {
            load_rows(out, c->layout.v_size, &p->out, query_block.sequence.b, row, h, rows, p->sizes.d_v);
            sum_dout_out(c->delta + first_row + r, staging, out, c->layout.v_size);
        }
        pack_statistics(p, &query_block, h, r, c->lse + first_row + r, c->delta + first_row + r);
    }
}

/* ---- a score block ------------------------------------------------------------------------------------------- */

/* The buffers of a score tile, SCORE_ROWS keys by a query block: S^T and dP^T become P^T and dS^T. dp holds the whole
 * key block, because the product for dq reads it at once. With AMX the products read dS^T in both forms. */
typedef struct score_tile_buffers {
    _Alignas(64) float scores[SCORE_ROWS * BLOCK], dp[BLOCK * BLOCK];
    /* With one form P^T and dS^T overwrite scores and dp. Otherwise attention_bwd_overlapped.h uses these arrays as two
     * buffers, alternately; backward_score_block uses the first half of prob and ds, and all of ds_b. */
    _Alignas(64) mt prob[MT_SAME_FORM ? 1 : 2 * SCORE_ROWS * BLOCK], ds[MT_SAME_FORM ? 1 : 2 * SCORE_ROWS * BLOCK];
    _Alignas(64) mt ds_b[MT_SAME_FORM ? 1 : 2 * SCORE_ROWS * BLOCK];
    int64_t buffer;
    _Alignas(64) float softcap_slopes[SCORE_ROWS * BLOCK], dropout_factors[SCORE_ROWS * BLOCK];
    _Alignas(64) float staging[2][STRIP * ATTENTION_MAX_D]; /* rows before packing */
} score_tile_buffers;

_Static_assert(sizeof(score_tile_buffers) <= ATTENTION_BWD_SCRATCH(sizeof(mt), MT_SAME_FORM),
               "the buffers must fit the thread's scratch");

/* Pointers to the operands: P^T and dS^T of a score tile, and dS^T of the score block in B form. */
typedef struct score_tile_operands {
    mt *prob, *ds, *ds_b;
    int64_t ds_rows;
} score_tile_operands;

V_INLINE score_tile_operands score_tile_operands_at(score_tile_buffers *buffers, int64_t first_row)
{
    if (MT_SAME_FORM)
        return (score_tile_operands){(mt *)buffers->scores, (mt *)buffers->dp + mt_offset(BLOCK, first_row, 0),
                                     (mt *)buffers->dp, BLOCK};
    return (score_tile_operands){buffers->prob, buffers->ds, buffers->ds_b, SCORE_ROWS};
}

/* Constants of a score tile. For unmodified scores the bools are compile-time constants after inlining, so that unused
 * features cost nothing. */
typedef struct score_tile_options {
    vf exp_scale;
    bool masked, softcap, dropout;
} score_tile_options;

/* P^T (times the dropout factor) and dS^T of key j and queries [i, i + VW). `offset` is the position of the score in
 * its score tile. */
V_INLINE void compute_p_and_ds(const score_context *ctx, const score_tile_buffers *buffers, int64_t offset, int64_t j,
                               int64_t i, score_tile_options o, vf lse, vf delta, vf dp, vf *prob, vf *ds)
{
    *prob = exp_scores(v_load(buffers->scores + offset), o.exp_scale, lse);
    if (o.dropout)
        dp = v_mul(dp, v_load(buffers->dropout_factors + offset));
    *ds = v_mul(*prob, v_sub(dp, delta));
    if (o.dropout)
        *prob = v_mul(*prob, v_load(buffers->dropout_factors + offset));
    if (o.softcap)
        *ds = v_mul(*ds, v_load(buffers->softcap_slopes + offset));
    if (o.masked) {
        const attention_span queries = visible_queries(ctx, j);
        *prob = select_span(queries.first - i, queries.end - i, *prob, v_zero());
        *ds = select_span(queries.first - i, queries.end - i, *ds, v_zero());
    }
}

/* Computes P^T and dS^T of keys [first_key, first_key + rows), which begin at row first_row of the key block.
 * query_range is relative to first_query, where lse and delta begin. The stores take two keys and 2 VW queries at a
 * time. */
V_INLINE void compute_p_and_ds_of_score_tile(const score_context *ctx, score_tile_buffers *buffers, int64_t first_row,
                                             int64_t rows, int64_t first_key, int64_t first_query,
                                             attention_span query_range, const float *lse, const float *delta,
                                             score_tile_options o)
{
    const score_tile_operands to = score_tile_operands_at(buffers, first_row);
    for (int64_t i = query_range.first; i < query_range.end; i += 2 * VW) {
        for (int64_t r = 0; r < rows; r += 2) {
            vf prob[2][2], ds[2][2];
            V_UNROLL
            for (int64_t n = 0; n < 2; n++) {
                V_UNROLL
                for (int64_t m = 0; m < 2; m++) {
                    const vf dp = v_load(buffers->dp + panel_offset(BLOCK, first_row + r + n, i) + m * VW);
                    compute_p_and_ds(ctx, buffers, panel_offset(SCORE_ROWS, r + n, i) + m * VW, first_key + r + n,
                                     first_query + i + m * VW, o, v_load(lse + i + m * VW), v_load(delta + i + m * VW),
                                     dp, &prob[n][m], &ds[n][m]);
                }
                mt_store_a2(to.prob + panel_offset(SCORE_ROWS, r + n, i), prob[n][0], prob[n][1]);
                if (!MT_SAME_FORM)
                    mt_store_a2(to.ds + panel_offset(SCORE_ROWS, r + n, i), ds[n][0], ds[n][1]);
            }
            mt_store_b(to.ds_b, BLOCK, first_row + r, i, ds[0][0], ds[1][0]);
            mt_store_b(to.ds_b, BLOCK, first_row + r, i + VW, ds[0][1], ds[1][1]);
        }
    }
}

/* Whether every query of query_range, which is relative to first_query, attends to each of `rows` keys. */
static bool all_visible(const score_context *ctx, int64_t first_key, int64_t rows, int64_t first_query,
                        attention_span query_range)
{
    const attention_span first_queries = visible_queries(ctx, first_key),
                         last_queries = visible_queries(ctx, first_key + rows - 1);
    return last_queries.first <= first_query + query_range.first &&
           first_queries.end >= first_query + query_range.end && last_queries.first < last_queries.end;
}

/* The scores of a key block and a query block: the operands and results of their products. */
typedef struct score_block {
    int64_t first_key, first_query;
    query_forms q;
    const mt *k, *kt, *v;
    const float *lse, *delta;
    float *dq; /* [qk_size][BLOCK]; dk and dv are [BLOCK][qk_size] and [BLOCK][v_size] */
    float *dk, *dv;
    /* Whether the accumulators hold a value, for each strip of dq and for each strip of dk and dv. */
    bool *dq_initialized, *dkv_initialized;
    mt_prefetch_range *forms_prefetch, *dq_prefetch; /* operands and dq of the next query block */
} score_block;

/* Differentiates rows [first_row, first_row + rows) of the key block with the queries query_range of their block. */
static void backward_key_rows(const context *c, const score_context *ctx, const score_block *b,
                              score_tile_buffers *buffers, int64_t first_row, int64_t rows, attention_span query_range,
                              bool visible)
{
    const attention_problem *p = c->p;
    const int64_t qk_size = c->layout.qk_size, v_size = c->layout.v_size, j = b->first_key + first_row,
                  n = query_range.end - query_range.first;
    const int64_t row_offset = mt_offset(BLOCK, first_row, 0);
    const score_tile_operands operands = score_tile_operands_at(buffers, first_row);
    mt_product(rows, n, qk_size, b->k + row_offset, BLOCK, b->q.q_t + mt_offset(qk_size, 0, query_range.first), qk_size,
               buffers->scores + mt_offset(SCORE_ROWS, 0, query_range.first), SCORE_ROWS, /*add=*/false,
               b->forms_prefetch);
    mt_product_all_terms(
        rows, n, v_size, b->v + row_offset, BLOCK, b->q.dout_t + mt_offset(v_size, 0, query_range.first), v_size,
        buffers->dp + row_offset + mt_offset(BLOCK, 0, query_range.first), BLOCK, /*add=*/false, b->forms_prefetch);
    score_tile_options o = {.exp_scale = v_set1(scores_exp_scale(p)), .masked = true};
    /* Three equal calls, because each is inlined with options that are constants in its branch. So the loop for
     * unmodified scores has no code for softcap and dropout, and the one without masks has none for masks. */
    if (ctx->modified) {
        const score_tile tile = {
            .i = b->first_query, .j = j, .keys_in_rows = true, .rows = rows, .columns = query_range};
        modify_scores(ctx, &tile, buffers->scores, buffers->softcap_slopes);
        if (ctx->dropout.dropped > 0)
            fill_dropout_factors(ctx, &tile, buffers->dropout_factors);
        o.softcap = p->sizes.softcap > 0;
        o.dropout = ctx->dropout.dropped > 0;
        compute_p_and_ds_of_score_tile(ctx, buffers, first_row, rows, j, b->first_query, query_range, b->lse, b->delta,
                                       o);
    } else if (visible) {
        o.masked = false;
        compute_p_and_ds_of_score_tile(ctx, buffers, first_row, rows, j, b->first_query, query_range, b->lse, b->delta,
                                       o);
    } else {
        compute_p_and_ds_of_score_tile(ctx, buffers, first_row, rows, j, b->first_query, query_range, b->lse, b->delta,
                                       o);
    }
    mt_product(rows, v_size, n, operands.prob + mt_offset(SCORE_ROWS, 0, query_range.first), SCORE_ROWS,
               b->q.dout + mt_offset(BLOCK, query_range.first, 0), BLOCK, b->dv + row_offset, BLOCK,
               b->dkv_initialized[first_row / STRIP], b->forms_prefetch);
    mt_product(rows, qk_size, n, operands.ds + mt_offset(operands.ds_rows, 0, query_range.first), operands.ds_rows,
               b->q.q + mt_offset(BLOCK, query_range.first, 0), BLOCK, b->dk + row_offset, BLOCK,
               b->dkv_initialized[first_row / STRIP], b->forms_prefetch);
    for (int64_t r = first_row; r < first_row + rows; r += STRIP)
        b->dkv_initialized[r / STRIP] = true;
}

/* Differentiates SCORE_ROWS keys at a time, or STRIP keys where a mask edge crosses the score tile, so that fewer
 * masked scores are computed. */
static void backward_score_block(const context *c, const score_context *ctx, const score_block *b,
                                 score_tile_buffers *buffers)
{
    const attention_sizes *sizes = &c->p->sizes;
    const int64_t qk_size = c->layout.qk_size;
    attention_span keys[BLOCK / STRIP]; /* for each strip of queries: the rows of keys that contributed to it */
    for (int64_t n = 0; n < BLOCK / STRIP; n++)
        keys[n] = (attention_span){BLOCK, 0};
    for (int64_t first_row = 0, rows; first_row < BLOCK; first_row += rows) {
        const int64_t j = b->first_key + first_row;
        attention_span query_range;
        for (rows = first_row % SCORE_ROWS == 0 ? SCORE_ROWS : STRIP;; rows = STRIP) {
            query_range = attention_round_to_strips(
                attention_visible_queries_of_rows(sizes, &ctx->sequence, j, j + rows), b->first_query, BLOCK);
            if (rows == STRIP || query_range.first == query_range.end ||
                (b->dkv_initialized[first_row / STRIP] == b->dkv_initialized[first_row / STRIP + 1] &&
                 all_visible(ctx, j, rows, b->first_query, query_range)))
                break;
        }
        if (query_range.first == query_range.end)
            continue;
        backward_key_rows(c, ctx, b, buffers, first_row, rows, query_range,
                          all_visible(ctx, j, rows, b->first_query, query_range));
        for (int64_t i = query_range.first / STRIP; i < query_range.end / STRIP; i++) {
            keys[i].first = keys[i].first < first_row ? keys[i].first : first_row;
            keys[i].end = first_row + rows;
        }
    }
    const mt *ds = score_tile_operands_at(buffers, 0).ds_b;
    for (int64_t i = 0; i < BLOCK / STRIP; i++) {
        const int64_t n = keys[i].end - keys[i].first;
        if (n <= 0)
            continue;
        mt_product(qk_size, STRIP, n, b->kt + mt_offset(qk_size, 0, keys[i].first), qk_size,
                   ds + mt_offset(BLOCK, keys[i].first, i * STRIP), BLOCK, b->dq + mt_offset(qk_size, 0, i * STRIP),
                   qk_size, b->dq_initialized[i], b->dq_prefetch);
        b->dq_initialized[i] = true;
    }
}

#endif
