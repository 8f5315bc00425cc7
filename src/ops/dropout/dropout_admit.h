/* SPDX-License-Identifier: Apache-2.0
 * dropout_admit.h: which problems each kernel supports, its estimated cost, its workspace. For dropout.c.
 * Costs are rough estimates in core cycles; only their order matters. */
#ifndef COT_DROPOUT_ADMIT_H
#define COT_DROPOUT_ADMIT_H

#include "cpu/dropout_items.h"

#include "core/op_tables.h"

COT_ADMIT_SCALAR(dropout_sizes)

static inline double cost_scalar(const void *problem)
{
    const dropout_sizes *sizes = problem;
    return 60.0 * (double)sizes->R * (double)sizes->D;
}

/* The vector kernels copy rows that are not contiguous to buffers, so they support any layout. */
static inline const char *admit_rows(const void *problem)
{
    return admit_scalar(problem);
}

static inline const char *admit_bf16(const void *problem)
{
    const dropout_sizes *sizes = problem;
    return sizes->dtype == COT_BF16 ? NULL : "it supports bf16 only";
}

enum {
    DROPOUT_VECTOR_CYCLES = 30, /* one vector with a generated mask */
    DROPOUT_GATHER_CYCLES = 4,  /* load or store of one element that is not contiguous */
    DROPOUT_ROW_CYCLES = 40,
    DROPOUT_ITEM_CYCLES = 1000
};

static inline double dropout_gather_cycles(const cot_tensor *tensor)
{
    const bool gathered = cot_is_present(tensor) && tensor->stride[tensor->rank - 1] != 1;
    return gathered && tensor->shape[tensor->rank - 1] > 1 ? DROPOUT_GATHER_CYCLES : 0;
}

static inline double cost_rows(const dropout_sizes *sizes, int lanes, double gather)
{
    const dropout_item_grid item_grid = dropout_item_grid_of(sizes);
    const double rows = (double)sizes->R * (double)item_grid.column_items;
    return DROPOUT_ITEM_CYCLES * (double)item_grid.row_items * (double)item_grid.column_items +
           DROPOUT_ROW_CYCLES * rows +
           DROPOUT_VECTOR_CYCLES * (double)sizes->R * (double)cot_ceil_div(sizes->D, lanes) +
           gather * (double)sizes->R * (double)sizes->D;
}

static inline double cost_fwd_rows(const void *problem, int lanes)
{
    const dropout_forward_problem *p = problem;
    return cost_rows(&p->sizes, lanes,
                     dropout_gather_cycles(&p->args.x) + dropout_gather_cycles(&p->args.residual) +
                         dropout_gather_cycles(&p->args.y) + dropout_gather_cycles(&p->mask.given));
}

static inline double cost_bwd_rows(const void *problem, int lanes)
{
    const dropout_backward_problem *p = problem;
    return cost_rows(&p->sizes, lanes,
                     dropout_gather_cycles(&p->args.dy) + dropout_gather_cycles(&p->args.x) +
                         dropout_gather_cycles(&p->args.dx) + dropout_gather_cycles(&p->mask.given));
}

COT_PLAN(plan_bwd_rows, dropout_items_plan, dropout_items_plan_of(problem))

/* The cost functions of each instruction set. `factor` scales the estimate. The portable build counts one lane per vector. */
#define COT_COSTS(isa, lanes, factor)                             \
    static inline double cost_fwd_rows_##isa(const void *problem) \
    {                                                             \
        return factor * cost_fwd_rows(problem, lanes);            \
    }                                                             \
    static inline double cost_bwd_rows_##isa(const void *problem) \
    {                                                             \
        return factor * cost_bwd_rows(problem, lanes);            \
    }
COT_COSTS(portable, 1, 1)
COT_COSTS(avx2, 8, 1)
COT_COSTS(avx512, 16, 1)
COT_COSTS(avx512bf16, 16, 0.8)
#undef COT_COSTS

#endif
