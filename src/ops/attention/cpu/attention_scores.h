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

static inline scores scores_of(const attention_problem *p, const attention_sequence *s, int64_t h)
{
    scores a = {.p = p, .s = *s, .h = h};
    a.extras = p->sizes.scale < 0 || p->sizes.softcap > 0 || p->sizes.dropped > 0 || cot_present(&p->alibi_slopes) ||
               cot_present(&p->bias);
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

/* ---- extras, element by element: about 50 cycles with softcap, 10 without, where a scalar kernel takes 2000 -------- */

/* Where element (row, column) of a tile of scores lies: queries in rows (forward) or keys in rows (backward). */
typedef struct score_tile {
    int64_t i, j; /* of element (0, 0) */
    bool keys_in_rows;
    attention_span columns;
} score_tile;

/* Products become scores; caps, where not NULL, becomes the derivative of the softcap. */
static void scores_modify(const scores *a, const score_tile *t, float *s, float *caps)
{
    const attention_problem *p = a->p;
    const float scale = (float)p->sizes.scale, cap = (float)p->sizes.softcap;
    const bool bias = cot_present(&p->bias);
    for (int64_t r = 0; r < TALL; r++) {
        for (int64_t c = t->columns.first; c < t->columns.end; c++) {
            const int64_t i = t->i + (t->keys_in_rows ? c : r), j = t->j + (t->keys_in_rows ? r : c);
            const int64_t distance = i + a->s.diagonal - j;
            float y = scale * s[r * BLOCK + c];
            if (cap > 0) {
                const float x = tanhf(y / cap);
                y = cap * x;
                if (caps != NULL)
                    caps[r * BLOCK + c] = 1 - x * x;
            }
            y -= a->slope * (float)(distance < 0 ? -distance : distance);
            if (bias && i < a->s.Tq && j < a->s.Tk)
                y += (float)cot_load_f64(p->bias.data, p->bias.dtype, attention_bias_at(&p->bias, a->s.b, a->h, i, j));
            s[r * BLOCK + c] = y;
        }
    }
}

/* What dropout multiplies P with, 8 keys of a query at a time. */
static void scores_keep(const scores *a, const score_tile *t, float *keep)
{
    const int64_t rows = t->keys_in_rows ? t->columns.end : TALL, columns = t->keys_in_rows ? TALL : t->columns.end;
    const int64_t first_row = t->keys_in_rows ? t->columns.first : 0, first = t->keys_in_rows ? 0 : t->columns.first;
    const attention_dropout *d = &a->dropout;
    for (int64_t row = first_row; row < rows; row++) {
        uint64_t group = UINT64_MAX;
        uint32_t bits = 0;
        for (int64_t column = first; column < columns; column++) {
            const uint64_t key = (uint64_t)(d->k_begin + t->j + column);
            const uint64_t n = (d->row + (uint64_t)(t->i + row)) * d->groups + key / COT_DROPOUT_GROUP;
            if (n != group)
                bits = cot_dropout_keep(d->seed, d->offset, group = n, d->dropped);
            keep[t->keys_in_rows ? column * BLOCK + row : row * BLOCK + column] =
                bits >> (key % COT_DROPOUT_GROUP) & 1 ? (float)d->factor : 0;
        }
    }
}

#endif
