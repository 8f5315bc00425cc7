/* SPDX-License-Identifier: Apache-2.0
 * dropout_items.h: how the vector kernels divide a problem into items: rectangles of rows and columns. The grid of items
 * depends on the sizes alone, so that neither the instruction set nor the number of threads changes the order of a sum.
 * For the kernels and dropout.c. */
#ifndef COT_DROPOUT_ITEMS_H
#define COT_DROPOUT_ITEMS_H

#include "ops/dropout/dropout_problem.h"

enum {
    DROPOUT_MAX_COLUMNS = 1024, /* of an item: its bias, mask bits and sums stay in the L1 cache */
    DROPOUT_MAX_ROWS = 256,     /* of an item */
    DROPOUT_COLUMN_UNIT = 512,  /* the width of an item is a multiple of this: v_philox_keep writes 256 bits or fewer */
    DROPOUT_ROW_BLOCK = 16      /* rows of dx that are summed before they are added to the item's sum */
};

/* The size of an item and the number of items. Items at the end of an axis may be smaller. */
typedef struct dropout_item_grid {
    int64_t rows, columns;
    int64_t row_items, column_items;
} dropout_item_grid;

static inline dropout_item_grid dropout_item_grid_of(const dropout_sizes *sizes)
{
    dropout_item_grid item_grid;
    const int64_t column_items = cot_clamp(cot_ceil_div(sizes->D, DROPOUT_MAX_COLUMNS), 1, INT64_MAX);
    const int64_t units = cot_ceil_div(cot_ceil_div(sizes->D, column_items), DROPOUT_COLUMN_UNIT);
    item_grid.columns = cot_clamp(units, 1, DROPOUT_MAX_COLUMNS / DROPOUT_COLUMN_UNIT) * DROPOUT_COLUMN_UNIT;
    item_grid.column_items = cot_ceil_div(sizes->D, item_grid.columns);
    /* Many items balance the threads' work; large items have less overhead. */
    const double share = (double)sizes->R * (double)sizes->D / 256;
    const int64_t elements = share > 65536 ? 65536 : share < 16384 ? 16384 : (int64_t)share;
    const int64_t width = cot_clamp(sizes->D, 1, item_grid.columns);
    item_grid.rows = cot_clamp(elements / width, 1, DROPOUT_MAX_ROWS);
    item_grid.row_items = cot_ceil_div(sizes->R, item_grid.rows);
    return item_grid;
}

/* Item `number` of cot_run_items. Neighbouring numbers are neighbouring items of the same rows. */
typedef struct dropout_item {
    int64_t r_begin, r_end, d_begin, d_end, row_item;
} dropout_item;

static inline dropout_item dropout_item_at(const dropout_item_grid *item_grid, const dropout_sizes *sizes,
                                           int64_t number)
{
    dropout_item item = {.row_item = number / item_grid->column_items};
    item.r_begin = item.row_item * item_grid->rows;
    item.d_begin = number % item_grid->column_items * item_grid->columns;
    item.r_end = cot_clamp(item.r_begin + item_grid->rows, 0, sizes->R);
    item.d_end = cot_clamp(item.d_begin + item_grid->columns, 0, sizes->D);
    return item;
}

/* The plan of the backward: its item_grid, and the bytes of the partial sums of dbias, [row_items][D]. */
typedef struct dropout_items_plan {
    dropout_item_grid item_grid;
    size_t bytes;
} dropout_items_plan;

static inline dropout_items_plan dropout_items_plan_of(const dropout_backward_problem *p)
{
    dropout_items_plan plan = {.item_grid = dropout_item_grid_of(&p->sizes)};
    if (cot_is_present(&p->args.dbias))
        plan.bytes = cot_bytes(cot_mul(plan.item_grid.row_items, p->sizes.D), sizeof(float));
    return plan;
}

#endif
