/* SPDX-License-Identifier: Apache-2.0
 * dropout_tiling.h: how the vector kernels divide a problem into tiles. The tiling depends on the sizes alone, so that
 * neither the instruction set nor the number of threads changes the order of a sum. For the kernels and dropout.c. */
#ifndef COT_DROPOUT_TILING_H
#define COT_DROPOUT_TILING_H

#include "ops/dropout/dropout_problem.h"

enum {
    DROPOUT_MAX_COLUMNS = 1024, /* of a tile: its bias, mask bits and sums stay in the L1 cache */
    DROPOUT_MAX_ROWS = 256,     /* of a tile */
    DROPOUT_COLUMN_UNIT = 512,  /* the width of a tile is a multiple of this: v_philox_keep writes up to 512 bits */
    DROPOUT_ROW_BLOCK = 16      /* rows of dx that are summed before they are added to the tile's sum */
};

/* The size of a tile and the number of tiles. Tiles at the end of an axis may be smaller. */
typedef struct dropout_tiling {
    int64_t rows, columns;
    int64_t row_tiles, column_tiles;
} dropout_tiling;

static inline dropout_tiling dropout_tiling_of(const dropout_sizes *sizes)
{
    dropout_tiling tiling;
    const int64_t column_tiles = cot_clamp(cot_ceil_div(sizes->D, DROPOUT_MAX_COLUMNS), 1, INT64_MAX);
    const int64_t units = cot_ceil_div(cot_ceil_div(sizes->D, column_tiles), DROPOUT_COLUMN_UNIT);
    tiling.columns = cot_clamp(units, 1, DROPOUT_MAX_COLUMNS / DROPOUT_COLUMN_UNIT) * DROPOUT_COLUMN_UNIT;
    tiling.column_tiles = cot_ceil_div(sizes->D, tiling.columns);
    /* Many tiles balance the threads' work; large tiles have less overhead. */
    const double share = (double)sizes->R * (double)sizes->D / 256;
    const int64_t elements = share > 65536 ? 65536 : share < 16384 ? 16384 : (int64_t)share;
    const int64_t width = cot_clamp(sizes->D, 1, tiling.columns);
    tiling.rows = cot_clamp(elements / width, 1, DROPOUT_MAX_ROWS);
    tiling.row_tiles = cot_ceil_div(sizes->R, tiling.rows);
    return tiling;
}

/* The tile of item `number` of cot_parallel. Neighbouring numbers are neighbouring tiles of the same rows. */
typedef struct dropout_item {
    int64_t r_begin, r_end, d_begin, d_end, row_tile;
} dropout_item;

static inline dropout_item dropout_item_at(const dropout_tiling *tiling, const dropout_sizes *sizes, int64_t number)
{
    dropout_item item = {.row_tile = number / tiling->column_tiles};
    item.r_begin = item.row_tile * tiling->rows;
    item.d_begin = number % tiling->column_tiles * tiling->columns;
    item.r_end = cot_clamp(item.r_begin + tiling->rows, 0, sizes->R);
    item.d_end = cot_clamp(item.d_begin + tiling->columns, 0, sizes->D);
    return item;
}

/* The plan of the backward: its tiling, and the bytes of the partial sums of dbias, [row_tiles][D]. */
typedef struct dropout_tiling_plan {
    dropout_tiling tiling;
    size_t bytes;
} dropout_tiling_plan;

static inline dropout_tiling_plan dropout_tiling_plan_of(const dropout_backward_problem *p)
{
    dropout_tiling_plan plan = {.tiling = dropout_tiling_of(&p->sizes)};
    if (cot_is_present(&p->args.dbias))
        plan.bytes = cot_bytes(cot_mul(plan.tiling.row_tiles, p->sizes.D), sizeof(float));
    return plan;
}

#endif
