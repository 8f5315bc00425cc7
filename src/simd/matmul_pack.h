/* SPDX-License-Identifier: Apache-2.0
 *
 * matmul_pack.h: copies between strided tensors of any dtype and tiles of PANEL x PANEL float32, stored row by row.
 * A tile of a C matrix (matmul.h) already has this layout.
 *
 *   mt_load_tile(tile, &view, rows, columns)   loads rows x columns elements, the rest of the tile is 0
 *   mt_store_tile(&view, tile, rows, columns)  stores only rows x columns elements
 *   mt_pack_a(a, tile)                         converts the tile to PANEL rows of an A-form panel, the first of them at
 *                                              a
 *   mt_pack_a_transposed(a, tile)              the same for the transposed tile
 *   mt_activate_tile(tile, bias, silu, dtype)  act(tile + bias), one bias per column; accurate enough to round to dtype
 */
#ifndef COT_SIMD_MATMUL_PACK_H
#define COT_SIMD_MATMUL_PACK_H

#include "matmul.h"

/* A matrix in memory: the address of its first element and its strides in elements. */
typedef struct mt_view {
    char *data;
    cot_dtype dtype;
    int64_t row_stride, column_stride;
} mt_view;

V_INLINE int64_t mt_element_size(cot_dtype dtype)
{
    return dtype == COT_F32 ? 4 : 2;
}

/* Loads `count` rows of `length` contiguous elements, `pitch` elements apart. */
V_INLINE void mt_load_rows(float *tile, const char *data, cot_dtype dtype, int64_t pitch, int64_t count, int64_t length)
{
    for (int64_t r = 0; r < PANEL; r++)
        for (int64_t c = 0; c < PANEL; c += VW) {
            const char *from = data + (r * pitch + c) * mt_element_size(dtype);
            const int64_t rest = r < count ? length - c : 0;
            v_store(tile + r * PANEL + c, rest >= VW ? v_load_as(from, dtype)
                                          : rest > 0 ? v_load_n_as(from, dtype, (int)rest)
                                                     : v_zero());
        }
}

V_INLINE void mt_store_rows(char *data, cot_dtype dtype, int64_t pitch, const float *tile, int64_t count,
                            int64_t length)
{
    for (int64_t r = 0; r < count; r++)
        for (int64_t c = 0; c < length; c += VW) {
            char *to = data + (r * pitch + c) * mt_element_size(dtype);
            if (length - c >= VW)
                v_store_as(to, dtype, v_load(tile + r * PANEL + c));
            else
                v_store_n_as(to, dtype, v_load(tile + r * PANEL + c), (int)(length - c));
        }
}

V_INLINE void mt_transpose_tile(float *to, const float *from)
{
    for (int64_t r = 0; r < PANEL; r += VW)
        for (int64_t c = 0; c < PANEL; c += VW) {
            vf v[VW];
            for (int64_t i = 0; i < VW; i++)
                v[i] = v_load(from + (r + i) * PANEL + c);
            mt_transpose(v);
            for (int64_t i = 0; i < VW; i++)
                v_store(to + (c + i) * PANEL + r, v[i]);
        }
}

static inline __attribute__((unused)) void mt_load_tile(float *tile, const mt_view *view, int64_t rows, int64_t columns)
{
    const bool rows_contiguous = view->column_stride == 1, columns_contiguous = view->row_stride == 1;
    _Alignas(64) float transposed[PANEL * PANEL];
    if (!rows_contiguous && !columns_contiguous) {
        for (int64_t r = 0; r < PANEL; r++)
            for (int64_t c = 0; c < PANEL; c++)
                tile[r * PANEL + c] =
                    r < rows && c < columns
                        ? (float)cot_load_f64(view->data, view->dtype, r * view->row_stride + c * view->column_stride)
                        : 0;
        return;
    }
    float *to = rows_contiguous ? tile : transposed;
    const int64_t pitch = rows_contiguous ? view->row_stride : view->column_stride;
    const int64_t count = rows_contiguous ? rows : columns, length = rows_contiguous ? columns : rows;
    if (view->dtype == COT_F32)
        mt_load_rows(to, view->data, COT_F32, pitch, count, length);
    else if (view->dtype == COT_BF16)
        mt_load_rows(to, view->data, COT_BF16, pitch, count, length);
    else
        mt_load_rows(to, view->data, COT_F16, pitch, count, length);
    if (!rows_contiguous)
        mt_transpose_tile(tile, transposed);
}

static inline __attribute__((unused)) void mt_store_tile(const mt_view *view, const float *tile, int64_t rows,
                                                         int64_t columns)
{
    const bool rows_contiguous = view->column_stride == 1, columns_contiguous = view->row_stride == 1;
    _Alignas(64) float transposed[PANEL * PANEL];
    if (!rows_contiguous && !columns_contiguous) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++)
                cot_store_f64(view->data, view->dtype, r * view->row_stride + c * view->column_stride,
                              tile[r * PANEL + c]);
        return;
    }
    if (!rows_contiguous)
        mt_transpose_tile(transposed, tile);
    const float *from = rows_contiguous ? tile : transposed;
    const int64_t pitch = rows_contiguous ? view->row_stride : view->column_stride;
    const int64_t count = rows_contiguous ? rows : columns, length = rows_contiguous ? columns : rows;
    if (view->dtype == COT_F32)
        mt_store_rows(view->data, COT_F32, pitch, from, count, length);
    else if (view->dtype == COT_BF16)
        mt_store_rows(view->data, COT_BF16, pitch, from, count, length);
    else
        mt_store_rows(view->data, COT_F16, pitch, from, count, length);
}

static inline __attribute__((unused)) void mt_pack_a(mt *a, const float *tile)
{
    for (int64_t r = 0; r < PANEL; r++)
        for (int64_t c = 0; c < PANEL; c += VW)
            mt_store_a(a + r * PANEL, c, v_load(tile + r * PANEL + c));
}

static inline __attribute__((unused)) void mt_pack_a_transposed(mt *a, const float *tile)
{
    _Alignas(64) float transposed[PANEL * PANEL];
    mt_transpose_tile(transposed, tile);
    mt_pack_a(a, transposed);
}

V_INLINE void mt_activate_tile_as(float *tile, const float *bias, bool silu, cot_dtype dtype)
{
    for (int64_t i = 0; i < PANEL * PANEL; i += VW) {
        const vf z = v_add(v_load(tile + i), v_load(bias + i % PANEL));
        v_store(tile + i, silu ? v_silu_as(dtype, z) : z);
    }
}

static inline __attribute__((unused)) void mt_activate_tile(float *tile, const float *bias, bool silu, cot_dtype dtype)
{
    if (dtype == COT_BF16)
        mt_activate_tile_as(tile, bias, silu, COT_BF16);
    else
        mt_activate_tile_as(tile, bias, silu, COT_F32);
}

#endif
