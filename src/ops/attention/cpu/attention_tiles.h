/* SPDX-License-Identifier: Apache-2.0
 * attention_tiles.h: what the tiled kernels share: rows of any dtype as float32, packed into operands, masks, and what
 * scores have besides the product. */
#ifndef COT_ATTENTION_TILES_H
#define COT_ATTENTION_TILES_H

#include "attention_tiling.h"
#include "ops/attention/attention_dropout.h"
#include "simd/matmul.h"

#include <float.h>
#include <math.h>

enum { BLOCK = ATTENTION_BLOCK, STRIP = ATTENTION_STRIP, TALL = ATTENTION_TALL };
_Static_assert((int)STRIP == (int)MT, "strips are what products take");

/* Where an element of a matrix in panels of `rows` rows lies. */
V_INLINE int64_t cell(int64_t rows, int64_t row, int64_t column)
{
    return mt_at(rows, row, column / MT * MT) + column % MT;
}

/* ---- rows ---------------------------------------------------------------------------------------------- */

V_INLINE void load_rows_as(float *x, int64_t ld, const cot_tensor *t, cot_dtype dtype, int64_t at, int64_t rows,
                           int64_t columns)
{
    const int64_t size = dtype == COT_F32 ? 4 : 2;
    for (int64_t r = 0; r < STRIP; r++) {
        const char *from = (const char *)t->data + (at + r * t->stride[1]) * size;
        for (int64_t c = 0; c < columns * size; c += 64) /* the strip after this one: its rows lie far apart */
            v_prefetch(from + STRIP * t->stride[1] * size + c);
        for (int64_t c = 0; c < ld; c += VW) {
            const int64_t n = r < rows ? cot_clamp(columns - c, 0, VW) : 0;
            v_store(x + r * ld + c, n == VW ? v_load_as(from + c * size, dtype)
                                    : n > 0 ? v_load_n_as(from + c * size, dtype, (int)n)
                                            : v_zero());
        }
    }
}

/* STRIP rows from row `row` of head h as float32, [STRIP][ld]: `rows` of them, and `columns`, are there, the rest is
 * zero. The last axis of t is contiguous. */
static void load_rows(float *x, int64_t ld, const cot_tensor *t, int64_t b, int64_t row, int64_t h, int64_t rows,
                      int64_t columns)
{
    const int64_t at = attention_at(t, b, row, h);
    if (t->dtype == COT_F32)
        load_rows_as(x, ld, t, COT_F32, at, rows, columns);
    else if (t->dtype == COT_BF16)
        load_rows_as(x, ld, t, COT_BF16, at, rows, columns);
    else
        load_rows_as(x, ld, t, COT_F16, at, rows, columns);
}

V_INLINE void store_rows_as(const cot_tensor *t, cot_dtype dtype, int64_t at, int64_t rows, int64_t columns,
                            const float *x, int64_t x_rows, const float *factors, float factor, bool accumulate)
{
    const int64_t size = dtype == COT_F32 ? 4 : 2;
    for (int64_t r = 0; r < rows; r++) {
        char *to = (char *)t->data + (at + r * t->stride[1]) * size;
        const vf f = v_set1(factors != NULL ? factors[r] : factor);
        for (int64_t c = 0; c < columns; c += VW) {
            const int n = (int)cot_clamp(columns - c, 0, VW);
            const vf y = v_load(x + cell(x_rows, r, c));
            if (accumulate)
                v_store_n_as(to + c * size, dtype, v_fma(f, y, v_load_n_as(to + c * size, dtype, n)), n);
            else if (n == VW)
                v_store_as(to + c * size, dtype, v_mul(f, y));
            else
                v_store_n_as(to + c * size, dtype, v_mul(f, y), n);
        }
    }
}

/* factor * x, in panels of x_rows rows, to rows of t, `accumulate` adding what is there. */
static void store_rows(const cot_tensor *t, int64_t b, int64_t row, int64_t h, int64_t rows, int64_t columns,
                       const float *x, int64_t x_rows, const float *factors, float factor, bool accumulate)
{
    const int64_t at = attention_at(t, b, row, h);
    if (t->dtype == COT_F32)
        store_rows_as(t, COT_F32, at, rows, columns, x, x_rows, factors, factor, accumulate);
    else if (t->dtype == COT_BF16)
        store_rows_as(t, COT_BF16, at, rows, columns, x, x_rows, factors, factor, accumulate);
    else
        store_rows_as(t, COT_F16, at, rows, columns, x, x_rows, factors, factor, accumulate);
}

/* ---- packing: STRIP rows x[STRIP][columns] become rows `row` .. of an operand --------------------------------- */

/* A form, [rows][columns] */
static inline __attribute__((unused)) void pack_a(mt *a, int64_t rows, int64_t row, const float *x, int64_t columns)
{
    for (int64_t c = 0; c < columns; c += VW)
        for (int64_t r = 0; r < STRIP; r++)
            mt_store_a(a + mt_at(rows, row + r, c / MT * MT), c % MT, v_load(x + r * columns + c));
}

/* B form, [rows][columns] */
static inline __attribute__((unused)) void pack_b(mt *b, int64_t rows, int64_t row, const float *x, int64_t columns)
{
    for (int64_t r = 0; r < STRIP; r += 2)
        for (int64_t c = 0; c < columns; c += VW)
            mt_store_b(b, rows, row + r, c, v_load(x + r * columns + c), v_load(x + (r + 1) * columns + c));
}

/* The transpose, [columns][..], in A form or in B form. */
V_INLINE void pack_transposed(mt *to, bool b_form, int64_t row, const float *x, int64_t columns)
{
    vf v[VW];
    for (int64_t c = 0; c < columns; c += VW) {
        for (int64_t r = 0; r < STRIP; r += VW) {
            for (int64_t i = 0; i < VW; i++)
                v[i] = v_load(x + (r + i) * columns + c);
            mt_transpose(v);
            for (int64_t i = 0; i < VW; i += 2) {
                if (b_form) {
                    mt_store_b(to, columns, c + i, row + r, v[i], v[i + 1]);
                } else {
                    mt *at = to + mt_at(columns, c + i, row);
                    mt_store_a(at, r, v[i]);
                    mt_store_a(at + MT, r, v[i + 1]);
                }
            }
        }
    }
}

/* ---- exponentials ----------------------------------------------------------------------------------------- *
 * exp_scores takes s times `unit`, less what is given in that unit: natural ones, or, where P is rounded to 16 bits anyhow,
 * powers of 2, which save the argument's reduction by ln(2) in two parts. SCORE_UNIT is that of 1. */

#if defined(COT_MATMUL_AMX) && !(defined(COT_MATMUL_SPLIT) && COT_MATMUL_SPLIT == 3)
#define SCORE_UNIT V_LOG2E
V_INLINE vf exp_scores(vf s, vf unit, vf less)
{
    return v_exp2_flush(v_fms(s, unit, less));
}
#else
#define SCORE_UNIT 1.0f
V_INLINE vf exp_scores(vf s, vf unit, vf less)
{
    return v_exp_flush(v_fms(s, unit, less));
}
#endif

/* ---- masks ---------------------------------------------------------------------------------------------- */

/* a in lanes [first, end), b elsewhere. A select, so that a NaN outside the mask is dropped. */
V_INLINE vf select_span(int64_t first, int64_t end, vf a, vf b)
{
    const vm before = vm_first((int)cot_clamp(first, 0, VW)), up_to = vm_first((int)cot_clamp(end, 0, VW));
    return v_select(before, b, v_select(up_to, a, b));
}

/* Scores, with -inf outside lanes [first, end). */
V_INLINE vf mask_scores(vf s, int64_t first, int64_t end)
{
    return select_span(first, end, s, v_set1(-INFINITY));
}

#endif
