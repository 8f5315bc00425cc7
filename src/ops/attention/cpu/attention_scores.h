/* SPDX-License-Identifier: Apache-2.0
 * attention_scores.h: the tiled kernels' score modifiers (softcap, ALiBi, bias, a negative scale) and dropout, for
 * one sequence and query head. */
#ifndef COT_ATTENTION_SCORES_H
#define COT_ATTENTION_SCORES_H

#include "attention_tiles.h"

typedef struct score_context {
    const attention_problem *p;
    attention_sequence sequence;
    int64_t h;
    bool modified;     /* there is a modifier or dropout: not only a positive scale and a mask */
    float alibi_slope; /* 0: none */
    attention_dropout dropout;
} score_context;

static inline bool scores_are_modified(const attention_problem *p)
{
    return p->sizes.scale < 0 || p->sizes.softcap > 0 || p->sizes.dropped > 0 || cot_is_present(&p->alibi_slopes) ||
           cot_is_present(&p->bias);
}

/* The `scale` argument of exp_scores. Unmodified scores are raw products, so it includes the softmax scale; modified
 * scores include that scale already. */
static inline float scores_exp_scale(const attention_problem *p)
{
    return scores_are_modified(p) ? EXP_SCALE : EXP_SCALE * (float)p->sizes.scale;
}

static inline score_context make_score_context(const attention_problem *p, const attention_sequence *s, int64_t h)
{
    score_context ctx = {.p = p, .sequence = *s, .h = h, .modified = scores_are_modified(p)};
    if (cot_is_present(&p->alibi_slopes) && s->b < p->sizes.B)
        ctx.alibi_slope = (float)cot_load_f64(p->alibi_slopes.data, p->alibi_slopes.dtype,
                                              attention_slope_offset(&p->alibi_slopes, s->b, h));
    ctx.dropout = attention_dropout_of(p, s, h);
    return ctx;
}

/* The keys that query i attends to; empty for a row beyond the last query. */
V_INLINE attention_span visible_keys(const score_context *ctx, int64_t i)
{
    return i < ctx->sequence.used_q ? attention_visible_keys(&ctx->p->sizes, &ctx->sequence, i)
                                    : (attention_span){0, 0};
}

/* The queries that attend to key j; empty for a row beyond the last key. */
V_INLINE attention_span visible_queries(const score_context *ctx, int64_t j)
{
    return j < ctx->sequence.used_k ? attention_visible_queries(&ctx->p->sizes, &ctx->sequence, j)
                                    : (attention_span){0, 0};
}

/* ---- modifiers and dropout ----------------------------------------------------------------------------- */

/* The position of a tile of scores. Rows are queries in the forward and keys in the backward. */
typedef struct score_tile {
    int64_t i, j; /* query and key of element (0, 0) */
    bool keys_in_rows;
    int64_t rows;
    attention_span columns;
} score_tile;

/* tanh, within 2 ulp. Up to 1/2 it is an odd polynomial, because (1 - e) / (1 + e) would cancel there. */
V_INLINE vf tanh_vector(vf u)
{
    const vf a = v_abs(u), z = v_mul(a, a);
    vf p = v_fma(z, v_set1(0x1.1f827p-6f), v_set1(-0x1.b3c376p-5f));
    p = v_fma(z, p, v_set1(0x1.10f55cp-3f));
    p = v_fma(z, p, v_set1(-0x1.555514p-2f));
    const vf small = v_fma(v_mul(a, z), p, a);
    const vf e = v_exp_flush(v_mul(v_min(v_set1(20), a), v_set1(-2)));
    const vf large = v_div(v_sub(v_set1(1), e), v_add(v_set1(1), e));
    const vf t = v_select(vm_above(a, v_set1(0.5f)), large, small);
    return v_select(vm_negative(u), v_sub(v_zero(), t), t);
}

/* VW elements of a row of bias, `stride` apart, of which only the first n exist. */
V_INLINE vf load_bias(const cot_tensor *bias, int64_t offset, int64_t stride, int64_t n)
{
    float lanes[VW];
    if (stride == 0)
        return v_set1((float)cot_load_f64(bias->data, bias->dtype, offset));
    if (stride == 1 && n >= VW && bias->dtype == COT_F32)
        return v_load((const float *)bias->data + offset);
    if (stride == 1 && n >= VW && bias->dtype == COT_BF16)
        return v_load_bf16((const uint16_t *)bias->data + offset);
    for (int64_t lane = 0; lane < VW; lane++)
        lanes[lane] = lane >= n                ? 0
                      : bias->dtype == COT_F32 ? ((const float *)bias->data)[offset + lane * stride]
                      : bias->dtype == COT_BF16
                          ? cot_bf16_to_f32(((const uint16_t *)bias->data)[offset + lane * stride])
                          : (float)cot_load_f64(bias->data, bias->dtype, offset + lane * stride);
    return v_load(lanes);
}

/* Turns the products s into scores, in panels of SCORE_ROWS rows. softcap_slopes, if not NULL, receives the
 * derivative of the softcap. */
static void modify_scores(const score_context *ctx, const score_tile *t, float *s, float *softcap_slopes)
{
    static const float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const attention_problem *p = ctx->p;
    const vf scale = v_set1((float)p->sizes.scale), cap = v_set1((float)p->sizes.softcap),
             alibi_slope = v_set1(ctx->alibi_slope);
    const vf inverse = v_set1(1 / (float)p->sizes.softcap);
    const bool has_softcap = p->sizes.softcap > 0, has_bias = cot_is_present(&p->bias);
    const int axis = t->keys_in_rows ? 2 : 3; /* the bias axis along the tile's columns */
    const int64_t stride = has_bias && p->bias.shape[axis] > 1 ? p->bias.stride[axis] : 0;
    const int64_t bias_rows =
        t->keys_in_rows ? ctx->sequence.used_k - t->j : ctx->sequence.used_q - t->i; /* rows of the tile within bias */
    const int64_t bias_columns = t->keys_in_rows ? ctx->sequence.used_q - t->i : ctx->sequence.used_k - t->j;
    for (int64_t r = 0; r < t->rows; r++) {
        for (int64_t c = t->columns.first; c < t->columns.end; c += VW) {
            const int64_t i = t->i + (t->keys_in_rows ? c : r), j = t->j + (t->keys_in_rows ? r : c);
            const int64_t offset = panel_offset(SCORE_ROWS, r, c);
            vf y = v_mul(scale, v_load(s + offset));
            if (has_softcap) {
                const vf x = tanh_vector(v_mul(y, inverse));
                y = v_mul(cap, x);
                if (softcap_slopes != NULL)
                    v_store(softcap_slopes + offset, v_fnma(x, x, v_set1(1)));
            }
            if (ctx->alibi_slope != 0) {
                const vf distance = v_fma(v_load(lanes), v_set1(t->keys_in_rows ? 1 : -1),
                                          v_set1((float)(i + ctx->sequence.diagonal - j)));
                y = v_fnma(alibi_slope, v_abs(distance), y);
            }
            if (has_bias && r < bias_rows && c < bias_columns)
                y = v_add(y, load_bias(&p->bias, attention_bias_offset(&p->bias, ctx->sequence.b, ctx->h, i, j), stride,
                                       bias_columns - c));
            v_store(s + offset, y);
        }
    }
}

/* The keep bits of query i for 8 * `groups` keys, one byte per group of 8 keys. The first group contains key j. */
static void generate_keep_bits(const score_context *ctx, const v_philox *philox, int64_t i, int64_t j, int64_t groups,
                               uint8_t *bits)
{
    const attention_dropout *d = &ctx->dropout;
    const uint64_t first_group =
        (d->first_row + (uint64_t)i) * d->groups_per_row + (uint64_t)(d->k_begin + j) / COT_DROPOUT_GROUP;
    if (d->dropped > 65535)
        memset(bits, 0, (size_t)groups);
    else
        for (int64_t g = 0; g < groups; g += V_PHILOX_GROUPS)
            v_philox_keep(bits + g, philox, first_group + (uint64_t)g);
}

/* Fills the dropout factors of P: 1/keep or 0. A tile begins at a multiple of SCORE_ROWS keys, but its first key need
 * not begin a group of 8. So one group more than BLOCK / 8 may be generated. */
static void fill_dropout_factors(const score_context *ctx, const score_tile *t, float *factors)
{
    enum { GROUPS = BLOCK / COT_DROPOUT_GROUP + 1, BITS_BYTES = GROUPS + 32 }; /* v_philox_keep writes up to 32 */
    const attention_dropout *d = &ctx->dropout;
    const v_philox philox = v_philox_make(d->seed, d->offset, d->dropped);
    const int64_t shift = (d->k_begin + t->j) % COT_DROPOUT_GROUP; /* position of key t->j in its group */
    const float factor = (float)d->factor;
    const int64_t first = t->columns.first, end = t->columns.end;
    const int64_t keys = t->keys_in_rows ? t->rows : end;
    const int64_t groups = cot_ceil_div(shift + keys, COT_DROPOUT_GROUP);
    uint8_t bits[BITS_BYTES];
    if (!t->keys_in_rows) {
        for (int64_t r = 0; r < t->rows; r++) {
            generate_keep_bits(ctx, &philox, t->i + r, t->j, groups, bits);
            for (int64_t c = first; c < end; c++)
                factors[panel_offset(SCORE_ROWS, r, c)] = bits[(shift + c) / 8] >> (shift + c) % 8 & 1 ? factor : 0;
        }
        return;
    }
    uint8_t query_bits[GROUPS][BLOCK]; /* [group][query]: the bits of one key are contiguous */
    for (int64_t c = first; c < end; c++) {
        generate_keep_bits(ctx, &philox, t->i + c, t->j, groups, bits);
        for (int64_t g = 0; g < groups; g++)
            query_bits[g][c] = bits[g];
    }
    for (int64_t r = 0; r < t->rows; r++) {
        const uint8_t *key_bits = query_bits[(shift + r) / 8];
        const int bit = (int)((shift + r) % 8);
        for (int64_t c = first; c < end; c += PANEL)
            for (int64_t n = c; n < c + PANEL; n++)
                factors[panel_offset(SCORE_ROWS, r, c) + n - c] = key_bits[n] >> bit & 1 ? factor : 0;
    }
}

#endif
