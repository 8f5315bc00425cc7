/* SPDX-License-Identifier: Apache-2.0
 * dropout_tiling.h: how the vector kernels cut a problem into items. The cut follows from the sizes alone, so that
 * neither the instruction set nor the number of threads changes a sum's order. For kernels and front. */
#ifndef COT_DROPOUT_TILING_H
#define COT_DROPOUT_TILING_H

#include "ops/dropout/dropout_problem.h"

enum {
    DROPOUT_MAX_COLUMNS = 1024, /* of an item: its bias, bits and sums stay in the first-level cache */
    DROPOUT_MAX_ROWS = 256,     /* of an item */
    DROPOUT_COLUMN_UNIT = 512,  /* items of more than one block are cut at multiples of this: whole draws */
    DROPOUT_ROW_BLOCK = 16      /* rows of dx that are summed before they join the item's sum */
};

/* An item is `rows` x `columns`; their numbers, the last of each smaller. */
typedef struct dropout_tiling {
    int64_t rows, columns;
    int64_t parts, blocks;
} dropout_tiling;

static inline dropout_tiling dropout_tile(const dropout_sizes *sizes)
{
    dropout_tiling tiling;
    const int64_t blocks = cot_clamp(cot_ceil_div(sizes->D, DROPOUT_MAX_COLUMNS), 1, INT64_MAX);
    const int64_t units = cot_ceil_div(cot_ceil_div(sizes->D, blocks), DROPOUT_COLUMN_UNIT);
    tiling.columns = cot_clamp(units, 1, DROPOUT_MAX_COLUMNS / DROPOUT_COLUMN_UNIT) * DROPOUT_COLUMN_UNIT;
    tiling.blocks = cot_ceil_div(sizes->D, tiling.columns);
    /* Many items share the work evenly, large ones cost less to begin. */
    const double share = (double)sizes->R * (double)sizes->D / 256;
    const int64_t elements = share > 65536 ? 65536 : share < 16384 ? 16384 : (int64_t)share;
    const int64_t width = cot_clamp(sizes->D, 1, tiling.columns);
    tiling.rows = cot_clamp(elements / width, 1, DROPOUT_MAX_ROWS);
    tiling.parts = cot_ceil_div(sizes->R, tiling.rows);
    return tiling;
}

/* What item `number` owns, in the order of memory: the blocks of a part follow one another. */
typedef struct dropout_item {
    int64_t r_begin, r_end, d_begin, d_end, part;
} dropout_item;

static inline dropout_item dropout_item_at(const dropout_tiling *tiling, const dropout_sizes *sizes, int64_t number)
{
    dropout_item item = {.part = number / tiling->blocks};
    item.r_begin = item.part * tiling->rows;
    item.d_begin = number % tiling->blocks * tiling->columns;
    item.r_end = cot_clamp(item.r_begin + tiling->rows, 0, sizes->R);
    item.d_end = cot_clamp(item.d_begin + tiling->columns, 0, sizes->D);
    return item;
}

/* Sums of dbias, [parts][D]. */
static inline size_t dropout_partial_bytes(const dropout_sizes *sizes)
{
    const dropout_tiling tiling = dropout_tile(sizes);
    return cot_bytes(cot_mul(tiling.parts, sizes->D), sizeof(float));
}

#endif
