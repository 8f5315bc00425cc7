/* SPDX-License-Identifier: Apache-2.0
 * dropout_admit.h: how the CUDA kernels divide the work, and which problems they support. For dropout.c and
 * dropout_launch.c. */
#ifndef COT_DROPOUT_CUDA_ADMIT_H
#define COT_DROPOUT_CUDA_ADMIT_H

#include "../dropout_problem.h"
#include "dropout_cuda.h"

#include "core/op_tables.h"

/* The number of tiles along columns and rows. It does not depend on the device, so the workspace's size and the order
 * of the sums depend on the arguments alone. */
typedef struct dropout_cuda_tiling {
    int64_t column_tiles, row_tiles;
} dropout_cuda_tiling;

/* A SHIFTED tile (see dropout_tile.cuh) is one group narrower, and the first one may begin 7 columns before the row. */
static inline dropout_cuda_tiling dropout_cuda_tiling_of(const dropout_sizes *sizes, int lanes, int rows, bool shifted)
{
    return (dropout_cuda_tiling){.column_tiles = shifted ? cot_ceil_div(sizes->D + COT_DROPOUT_GROUP - 1,
                                                                        (int64_t)COT_DROPOUT_GROUP * (lanes - 1))
                                                         : cot_ceil_div(sizes->D, (int64_t)COT_DROPOUT_GROUP * lanes),
                                 .row_tiles = cot_ceil_div(sizes->R, (int64_t)DROPOUT_THREADS / lanes * rows)};
}

static inline dropout_cuda_tiling dropout_cuda_backward_tiling(const dropout_sizes *sizes, bool shifted)
{
    return shifted ? dropout_cuda_tiling_of(sizes, DROPOUT_BWD_SHIFTED_THREADS_PER_ROW,
                                            DROPOUT_BWD_SHIFTED_ROWS_PER_THREAD, true)
                   : dropout_cuda_tiling_of(sizes, DROPOUT_BWD_THREADS_PER_ROW, DROPOUT_BWD_ROWS_PER_THREAD, false);
}

static inline const char *admit_sm80(const void *problem)
{
    const dropout_sizes *sizes = problem;
    const int64_t max_groups = INT32_MAX / 2;                       /* the kernels count groups in 32 bits */
    const int64_t max_row_tiles = (int64_t)UINT16_MAX * UINT16_MAX; /* axes y and z of a grid */
    if (sizes->dtype == COT_F64)
        return "it computes in float32, the tensors are f64";
    return sizes->groups > max_groups || sizes->R / 8 > max_row_tiles ? "R or D is beyond what its grid can number"
                                                                      : NULL;
}

static inline double cost_sm80(const void *problem)
{
    const dropout_sizes *sizes = problem;
    return 1000.0 + (double)sizes->R * (double)sizes->D;
}

/* The plan of a backward. The workspace has the larger size of plain and SHIFTED tiles: which of them a call uses depends
 * on the alignment of its data, and a query for the workspace's size has no data. */
typedef struct dropout_cuda_bwd_plan {
    dropout_cuda_tiling plain, shifted;
    size_t bytes; /* of the tiles' sums for dbias */
} dropout_cuda_bwd_plan;

static inline dropout_cuda_bwd_plan dropout_cuda_bwd_plan_of(const dropout_backward_problem *p)
{
    dropout_cuda_bwd_plan plan = {.plain = dropout_cuda_backward_tiling(&p->sizes, false),
                                  .shifted = dropout_cuda_backward_tiling(&p->sizes, true)};
    const int64_t lanes =
        cot_max(COT_PRODUCT(plan.plain.row_tiles, plan.plain.column_tiles, DROPOUT_BWD_THREADS_PER_ROW),
                COT_PRODUCT(plan.shifted.row_tiles, plan.shifted.column_tiles, DROPOUT_BWD_SHIFTED_THREADS_PER_ROW));
    plan.bytes = cot_is_present(&p->args.dbias) ? cot_bytes(cot_mul(lanes, COT_DROPOUT_GROUP), sizeof(float)) : 0;
    return plan;
}

COT_PLAN(plan_sm80_bwd, dropout_cuda_bwd_plan, dropout_cuda_bwd_plan_of(problem))

#endif
