/* SPDX-License-Identifier: Apache-2.0
 * attention_tiles.h: helpers of the tiled kernels: loads and stores of rows in any dtype, packing of operands,
 * exponentials and masks. */
#ifndef COT_ATTENTION_TILES_H
#define COT_ATTENTION_TILES_H

#include "attention_partition.h"
#include "ops/attention/attention_dropout.h"
#include "simd/matmul.h"

#include <float.h>
#include <math.h>

enum { BLOCK = ATTENTION_BLOCK, STRIP = ATTENTION_STRIP, SCORE_ROWS = ATTENTION_SCORE_ROWS };
_Static_assert((int)STRIP == (int)PANEL, "products work on whole strips");

/* The offset of element (row, column) in a matrix stored in panels of PANEL columns and `rows` rows. */
V_INLINE int64_t panel_offset(int64_t rows, int64_t row, int64_t column)
{
    return mt_offset(rows, row, column / PANEL * PANEL) + column % PANEL;
}

/* ---- rows ---------------------------------------------------------------------------------------------- */

V_INLINE void load_rows_as(float *x, int64_t ld, const cot_tensor *t, cot_dtype dtype, int64_t offset, int64_t rows,
                           int64_t columns)
{
    const int64_t size = dtype == COT_F32 ? 4 : 2;
    for (int64_t r = 0; r < STRIP; r++) {
        const char *source = (const char *)t->data + (offset + r * t->stride[1]) * size;
        for (int64_t c = 0; c < columns * size; c += 64) /* prefetches the next strip, because its rows are far apart */
            v_prefetch(source + STRIP * t->stride[1] * size + c);
        for (int64_t c = 0; c < ld; c += VW) {
            const int64_t n = r < rows ? cot_clamp(columns - c, 0, VW) : 0;
            v_store(x + r * ld + c, n == VW ? v_load_as(source + c * size, dtype)
                                    : n > 0 ? v_load_n_as(source + c * size, dtype, (int)n)
                                            : v_zero());
        }
    }
}

/* Loads rows [row, row + STRIP) of head h into x[STRIP][ld] as float32. Elements outside `rows` and `columns`
 * become zero. The last axis of t is contiguous. */
static void load_rows(float *x, int64_t ld, const cot_tensor *t, int64_t b, int64_t row, int64_t h, int64_t rows,
                      int64_t columns)
{
    const int64_t offset = attention_row_offset(t, b, row, h);
    if (t->dtype == COT_F32)
        load_rows_as(x, ld, t, COT_F32, offset, rows, columns);
    else if (t->dtype == COT_BF16)
        load_rows_as(x, ld, t, COT_BF16, offset, rows, columns);
    else
        load_rows_as(x, ld, t, COT_F16, offset, rows, columns);
}

V_INLINE void store_rows_as(const cot_tensor *t, cot_dtype dtype, int64_t offset, int64_t rows, int64_t columns,
                            const float *x, int64_t panel_rows, const float *row_factors, float factor, bool accumulate)
{
    const int64_t size = dtype == COT_F32 ? 4 : 2;
    for (int64_t r = 0; r < rows; r++) {
        char *target = (char *)t->data + (offset + r * t->stride[1]) * size;
        const vf f = v_set1(row_factors != NULL ? row_factors[r] : factor);
        for (int64_t c = 0; c < columns; c += VW) {
            const int n = (int)cot_clamp(columns - c, 0, VW);
            const vf y = v_load(x + panel_offset(panel_rows, r, c));
            if (accumulate)
                v_store_n_as(target + c * size, dtype, v_fma(f, y, v_load_n_as(target + c * size, dtype, n)), n);
            else if (n == VW)
                v_store_as(target + c * size, dtype, v_mul(f, y));
            else
                v_store_n_as(target + c * size, dtype, v_mul(f, y), n);
        }
    }
}

/* Stores factor * x to rows of t, or adds it to them if `accumulate`. x is in panels of panel_rows rows. row_factors,
 * if not NULL, replaces `factor` with one factor per row. */
static void store_rows(const cot_tensor *t, int64_t b, int64_t row, int64_t h, int64_t rows, int64_t columns,
                       const float *x, int64_t panel_rows, const float *row_factors, float factor, bool accumulate)
{
    const int64_t offset = attention_row_offset(t, b, row, h);
    if (t->dtype == COT_F32)
        store_rows_as(t, COT_F32, offset, rows, columns, x, panel_rows, row_factors, factor, accumulate);
    else if (t->dtype == COT_BF16)
        store_rows_as(t, COT_BF16, offset, rows, columns, x, panel_rows, row_factors, factor, accumulate);
    else
        store_rows_as(t, COT_F16, offset, rows, columns, x, panel_rows, row_factors, factor, accumulate);
}

/* ---- packing: x[STRIP][columns] becomes rows `row` .. row+STRIP of an operand -------------------------- */

/* A form, [rows][columns] */
static inline __attribute__((unused)) void pack_a(mt *a, int64_t rows, int64_t row, const float *x, int64_t columns)
{
    for (int64_t c = 0; c < columns; c += VW)
        for (int64_t r = 0; r < STRIP; r++)
            mt_store_a(a + mt_offset(rows, row + r, c / PANEL * PANEL), c % PANEL, v_load(x + r * columns + c));
}

/* B form, [rows][columns] */
static inline __attribute__((unused)) void pack_b(mt *b, int64_t rows, int64_t row, const float *x, int64_t columns)
{
    for (int64_t r = 0; r < STRIP; r += 2)
        for (int64_t c = 0; c < columns; c += VW)
            mt_store_b(b, rows, row + r, c, v_load(x + r * columns + c), v_load(x + (r + 1) * columns + c));
}

/* The transpose of x, in A form or in B form. x becomes columns `row` .. row+STRIP of an operand of `columns` rows. */
V_INLINE void pack_transposed(mt *operand, bool b_form, int64_t row, const float *x, int64_t columns)
{
    vf v[VW];
    for (int64_t c = 0; c < columns; c += VW) {
        for (int64_t r = 0; r < STRIP; r += VW) {
            for (int64_t i = 0; i < VW; i++)
                v[i] = v_load(x + (r + i) * columns + c);
            mt_transpose(v);
            for (int64_t i = 0; i < VW; i += 2) {
                if (b_form) {
                    mt_store_b(operand, columns, c + i, row + r, v[i], v[i + 1]);
                } else {
                    mt *panel_row = operand + mt_offset(columns, c + i, row);
                    mt_store_a(panel_row, r, v[i]);
                    mt_store_a(panel_row + PANEL, r, v[i + 1]);
                }
            }
        }
    }
}

V_INLINE void pack_a_transposed(mt *a, int64_t row, const float *x, int64_t columns)
{
    pack_transposed(a, /*b_form=*/false, row, x, columns);
}

V_INLINE void pack_b_transposed(mt *b, int64_t row, const float *x, int64_t columns)
{
    pack_transposed(b, /*b_form=*/true, row, x, columns);
}

/* ---- exponentials ----------------------------------------------------------------------------------------- *
 * exp_scores returns base^(s * scale - shift). The base is e, or 2 where P is rounded to 16 bits anyway. Base 2 is
 * cheaper, because its range reduction needs no multiplication by ln(2), which has two parts. EXP_SCALE is log2(e) for
 * base 2 and 1 for base e, so base^(score * EXP_SCALE) = exp(score). Row maxima and lse are kept multiplied by
 * EXP_SCALE. */

#if defined(COT_MATMUL_AMX) && !(defined(COT_MATMUL_SPLIT) && COT_MATMUL_SPLIT == 3)
#define EXP_SCALE V_LOG2E
V_INLINE vf exp_scores(vf s, vf scale, vf shift)
{
    return v_exp2_flush(v_fms(s, scale, shift));
}
#else
#define EXP_SCALE 1.0f
V_INLINE vf exp_scores(vf s, vf scale, vf shift)
{
    return v_exp_flush(v_fms(s, scale, shift));
}
#endif

/* ---- masks ---------------------------------------------------------------------------------------------- */

/* a in lanes [first, end), b elsewhere. This is a select, not a product, so that a NaN outside the mask is dropped. */
V_INLINE vf select_span(int64_t first, int64_t end, vf a, vf b)
{
    const vm before = vm_first((int)cot_clamp(first, 0, VW)), up_to = vm_first((int)cot_clamp(end, 0, VW));
    return v_select(before, b, v_select(up_to, a, b));
}

/* The scores in lanes [first, end), -inf elsewhere. */
V_INLINE vf mask_scores(vf s, int64_t first, int64_t end)
{
    return select_span(first, end, s, v_set1(-INFINITY));
}

#endif
