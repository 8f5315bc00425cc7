/* SPDX-License-Identifier: Apache-2.0
 *
 * matmul_pack.h: between tensors of any strides and dtype and the parts of matmul.h: tiles of MT x MT float32, row by row.
 * A part of a C is such a tile where it lies.
 *
 *   mt_load_tile(tile, &view, rows, columns)   zeros beyond `rows` and `columns`
 *   mt_store_tile(&view, tile, rows, columns)  nothing beyond them
 *   mt_pack_a(a, tile)                         as MT rows of an A form; a = where the first of them begins
 *   mt_pack_a_transposed(a, tile)              column j of the tile as row j
 *   mt_activate_tile(tile, bias, silu, dtype)  act(tile + bias), bias one for a column; good enough to be rounded to dtype
 */
#ifndef COT_SIMD_MATMUL_PACK_H
#define COT_SIMD_MATMUL_PACK_H

#include "matmul.h"

/* A matrix in memory: the address of its first element, and how far the next row and column are, in elements. */
typedef struct mt_view {
    char *data;
    cot_dtype dtype;
    int64_t row, column;
} mt_view;

V_INLINE int64_t mt_size(cot_dtype dtype)
{
    return dtype == COT_F32 ? 4 : 2;
}

/* `count` runs of `length` contiguous elements, `pitch` apart, as rows. */
V_INLINE void mt_load_runs(float *tile, const char *data, cot_dtype dtype, int64_t pitch, int64_t count, int64_t length)
{
    for (int64_t r = 0; r < MT; r++)
        for (int64_t c = 0; c < MT; c += VW) {
            const char *from = data + (r * pitch + c) * mt_size(dtype);
            const int64_t left = r < count ? length - c : 0;
            v_store(tile + r * MT + c, left >= VW ? v_load_as(from, dtype)
                                       : left > 0 ? v_load_n_as(from, dtype, (int)left)
                                                  : v_zero());
        }
}

V_INLINE void mt_store_runs(char *data, cot_dtype dtype, int64_t pitch, const float *tile, int64_t count,
                            int64_t length)
{
    for (int64_t r = 0; r < count; r++)
        for (int64_t c = 0; c < length; c += VW) {
            char *to = data + (r * pitch + c) * mt_size(dtype);
            if (length - c >= VW)
                v_store_as(to, dtype, v_load(tile + r * MT + c));
            else
                v_store_n_as(to, dtype, v_load(tile + r * MT + c), (int)(length - c));
        }
}

V_INLINE void mt_transpose_tile(float *to, const float *from)
{
    for (int64_t r = 0; r < MT; r += VW)
        for (int64_t c = 0; c < MT; c += VW) {
            vf v[VW];
            for (int64_t i = 0; i < VW; i++)
                v[i] = v_load(from + (r + i) * MT + c);
            mt_transpose(v);
            for (int64_t i = 0; i < VW; i++)
                v_store(to + (c + i) * MT + r, v[i]);
        }
}

static inline __attribute__((unused)) void mt_load_tile(float *tile, const mt_view *view, int64_t rows, int64_t columns)
{
    const bool by_rows = view->column == 1, by_columns = view->row == 1;
    _Alignas(64) float turned[MT * MT];
    if (!by_rows && !by_columns) {
        for (int64_t r = 0; r < MT; r++)
            for (int64_t c = 0; c < MT; c++)
                tile[r * MT + c] = r < rows && c < columns
                                       ? (float)cot_load_f64(view->data, view->dtype, r * view->row + c * view->column)
                                       : 0;
        return;
    }
    float *to = by_rows ? tile : turned;
    const int64_t pitch = by_rows ? view->row : view->column;
    const int64_t count = by_rows ? rows : columns, length = by_rows ? columns : rows;
    if (view->dtype == COT_F32)
        mt_load_runs(to, view->data, COT_F32, pitch, count, length);
    else if (view->dtype == COT_BF16)
        mt_load_runs(to, view->data, COT_BF16, pitch, count, length);
    else
        mt_load_runs(to, view->data, COT_F16, pitch, count, length);
    if (!by_rows)
        mt_transpose_tile(tile, turned);
}

static inline __attribute__((unused)) void mt_store_tile(const mt_view *view, const float *tile, int64_t rows,
                                                         int64_t columns)
{
    const bool by_rows = view->column == 1, by_columns = view->row == 1;
    _Alignas(64) float turned[MT * MT];
    if (!by_rows && !by_columns) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++)
                cot_store_f64(view->data, view->dtype, r * view->row + c * view->column, tile[r * MT + c]);
        return;
    }
    if (!by_rows)
        mt_transpose_tile(turned, tile);
    const float *from = by_rows ? tile : turned;
    const int64_t pitch = by_rows ? view->row : view->column;
    const int64_t count = by_rows ? rows : columns, length = by_rows ? columns : rows;
    if (view->dtype == COT_F32)
        mt_store_runs(view->data, COT_F32, pitch, from, count, length);
    else if (view->dtype == COT_BF16)
        mt_store_runs(view->data, COT_BF16, pitch, from, count, length);
    else
        mt_store_runs(view->data, COT_F16, pitch, from, count, length);
}

static inline __attribute__((unused)) void mt_pack_a(mt *a, const float *tile)
{
    for (int64_t r = 0; r < MT; r++)
        for (int64_t c = 0; c < MT; c += VW)
            mt_store_a(a + r * MT, c, v_load(tile + r * MT + c));
}

static inline __attribute__((unused)) void mt_pack_a_transposed(mt *a, const float *tile)
{
    _Alignas(64) float turned[MT * MT];
    mt_transpose_tile(turned, tile);
    mt_pack_a(a, turned);
}

V_INLINE void mt_activate_tile_as(float *tile, const float *bias, bool silu, cot_dtype dtype)
{
    for (int64_t at = 0; at < MT * MT; at += VW) {
        const vf z = v_add(v_load(tile + at), v_load(bias + at % MT));
        v_store(tile + at, silu ? v_silu_as(dtype, z) : z);
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
