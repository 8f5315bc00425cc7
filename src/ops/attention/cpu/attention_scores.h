/* SPDX-License-Identifier: Apache-2.0
 * attention_scores.h: what scores have besides the product, for the tiled kernels: masks, softcap, ALiBi, bias and
 * dropout, for one sequence and query head. */
#ifndef COT_ATTENTION_SCORES_H
#define COT_ATTENTION_SCORES_H

#include "attention_tiles.h"

typedef struct scores {
    const attention_problem *p;
    attention_sequence s;
    int64_t h;
    bool extras; /* there is more than a positive scale and a mask */
    float slope; /* of ALiBi, 0 = none */
    attention_dropout dropout;
} scores;

static inline bool scores_have_extras(const attention_problem *p)
{
    return p->sizes.scale < 0 || p->sizes.softcap > 0 || p->sizes.dropped > 0 || cot_present(&p->alibi_slopes) ||
           cot_present(&p->bias);
}

/* What exp_scores multiplies products with, or, with extras, the scores that were made of them. */
static inline float scores_unit(const attention_problem *p)
{
    return scores_have_extras(p) ? SCORE_UNIT : SCORE_UNIT * (float)p->sizes.scale;
}

static inline scores scores_of(const attention_problem *p, const attention_sequence *s, int64_t h)
{
    scores a = {.p = p, .s = *s, .h = h, .extras = scores_have_extras(p)};
    if (cot_present(&p->alibi_slopes) && s->b < p->sizes.B)
        a.slope = (float)cot_load_f64(p->alibi_slopes.data, p->alibi_slopes.dtype,
                                      attention_slope_at(&p->alibi_slopes, s->b, h));
    a.dropout = attention_dropout_of(p, s, h);
    return a;
}

/* The keys that query i sees; none for a row beyond the last query. */
V_INLINE attention_span scores_keys(const scores *a, int64_t i)
{
    return i < a->s.Tq ? attention_keys_of(&a->p->sizes, &a->s, i) : (attention_span){0, 0};
}

/* The queries that see key j; none for a row beyond the last key. */
V_INLINE attention_span scores_queries(const scores *a, int64_t j)
{
    return j < a->s.Tk ? attention_queries_of(&a->p->sizes, &a->s, j) : (attention_span){0, 0};
}

/* ---- extras ------------------------------------------------------------------------------------------------------ */

/* Where element (row, column) of a tile of scores lies: queries in rows (forward) or keys in rows (backward). */
typedef struct score_tile {
    int64_t i, j; /* of element (0, 0) */
    bool keys_in_rows;
    int64_t rows;
    attention_span columns;
} score_tile;

/* An odd polynomial up to 1/2, where the other form would lose what it subtracts from 1; both good to 2 ulp. */
V_INLINE vf tanh_of(vf u)
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

/* VW elements of a row of bias, `stride` apart, the first n of which are there. */
V_INLINE vf bias_lanes(const cot_tensor *bias, int64_t at, int64_t stride, int64_t n)
{
    float lanes[VW];
    if (stride == 0)
        return v_set1((float)cot_load_f64(bias->data, bias->dtype, at));
    if (stride == 1 && n >= VW && bias->dtype == COT_F32)
        return v_load((const float *)bias->data + at);
    if (stride == 1 && n >= VW && bias->dtype == COT_BF16)
        return v_load_bf16((const uint16_t *)bias->data + at);
    for (int64_t lane = 0; lane < VW; lane++)
        lanes[lane] = lane >= n                 ? 0
                      : bias->dtype == COT_F32  ? ((const float *)bias->data)[at + lane * stride]
                      : bias->dtype == COT_BF16 ? cot_bf16_to_f32(((const uint16_t *)bias->data)[at + lane * stride])
                                                : (float)cot_load_f64(bias->data, bias->dtype, at + lane * stride);
    return v_load(lanes);
}

/* Products, in panels of TALL rows, become scores; caps, where not NULL, becomes the derivative of the softcap. */
static void scores_modify(const scores *a, const score_tile *t, float *s, float *caps)
{
    static const float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const attention_problem *p = a->p;
    const vf scale = v_set1((float)p->sizes.scale), cap = v_set1((float)p->sizes.softcap), slope = v_set1(a->slope);
    const vf inverse = v_set1(1 / (float)p->sizes.softcap);
    const bool capped = p->sizes.softcap > 0, bias = cot_present(&p->bias);
    const int axis = t->keys_in_rows ? 2 : 3; /* of bias, along columns */
    const int64_t stride = bias && p->bias.shape[axis] > 1 ? p->bias.stride[axis] : 0;
    const int64_t rows = t->keys_in_rows ? a->s.Tk - t->j : a->s.Tq - t->i; /* that have a bias */
    const int64_t columns = t->keys_in_rows ? a->s.Tq - t->i : a->s.Tk - t->j;
    for (int64_t r = 0; r < t->rows; r++) {
        for (int64_t c = t->columns.first; c < t->columns.end; c += VW) {
            const int64_t i = t->i + (t->keys_in_rows ? c : r), j = t->j + (t->keys_in_rows ? r : c);
            const int64_t at = cell(TALL, r, c);
            vf y = v_mul(scale, v_load(s + at));
            if (capped) {
                const vf x = tanh_of(v_mul(y, inverse));
                y = v_mul(cap, x);
                if (caps != NULL)
                    v_store(caps + at, v_fnma(x, x, v_set1(1)));
            }
            if (a->slope != 0) {
                const vf distance =
                    v_fma(v_load(lanes), v_set1(t->keys_in_rows ? 1 : -1), v_set1((float)(i + a->s.diagonal - j)));
                y = v_fnma(slope, v_abs(distance), y);
            }
            if (bias && r < rows && c < columns)
                y = v_add(y,
                          bias_lanes(&p->bias, attention_bias_at(&p->bias, a->s.b, a->h, i, j), stride, columns - c));
            v_store(s + at, y);
        }
    }
}

/* The keep bits of a query at the 8 `groups` of keys from the group of key j on, a byte each. */
static void keep_bytes(const scores *a, const v_philox *philox, int64_t i, int64_t j, int64_t groups, uint8_t *bits)
{
    const attention_dropout *d = &a->dropout;
    const uint64_t n = (d->row + (uint64_t)i) * d->groups + (uint64_t)(d->k_begin + j) / COT_DROPOUT_GROUP;
    if (d->dropped > 65535)
        memset(bits, 0, (size_t)groups);
    else
        for (int64_t g = 0; g < groups; g += V_PHILOX_GROUPS)
            v_philox_keep(bits + g, philox, n + (uint64_t)g);
}

/* What dropout multiplies P with. A tile begins at a multiple of TALL keys; of a block of keys, one more group is drawn. */
static void scores_keep(const scores *a, const score_tile *t, float *keep)
{
    enum { GROUPS = BLOCK / COT_DROPOUT_GROUP + 1, ROOM = GROUPS + 32 };
    const attention_dropout *d = &a->dropout;
    const v_philox philox = v_philox_make(d->seed, d->offset, d->dropped);
    const int64_t shift = (d->k_begin + t->j) % COT_DROPOUT_GROUP; /* of key t->j in its group */
    const float factor = (float)d->factor;
    const int64_t first = t->columns.first, end = t->columns.end;
    const int64_t keys = t->keys_in_rows ? t->rows : end;
    const int64_t groups = cot_ceil_div(shift + keys, COT_DROPOUT_GROUP);
    uint8_t bits[ROOM];
    if (!t->keys_in_rows) {
        for (int64_t r = 0; r < t->rows; r++) {
            keep_bytes(a, &philox, t->i + r, t->j, groups, bits);
            for (int64_t c = first; c < end; c++)
                keep[cell(TALL, r, c)] = bits[(shift + c) / 8] >> (shift + c) % 8 & 1 ? factor : 0;
        }
        return;
    }
    uint8_t columns[GROUPS][BLOCK]; /* transposed, so that the queries of a key lie together */
    for (int64_t c = first; c < end; c++) {
        keep_bytes(a, &philox, t->i + c, t->j, groups, bits);
        for (int64_t g = 0; g < groups; g++)
            columns[g][c] = bits[g];
    }
    for (int64_t r = 0; r < t->rows; r++) {
        const uint8_t *of_key = columns[(shift + r) / 8];
        const int bit = (int)((shift + r) % 8);
        for (int64_t c = first; c < end; c += MT)
            for (int64_t n = c; n < c + MT; n++)
                keep[cell(TALL, r, c) + n - c] = of_key[n] >> bit & 1 ? factor : 0;
    }
}

#endif
