/* SPDX-License-Identifier: Apache-2.0
 * dropout_launch.h: how the CUDA kernels divide the work, and which problems they take. For the front and for
 * dropout_launch.c. */
#ifndef COT_DROPOUT_LAUNCH_H
#define COT_DROPOUT_LAUNCH_H

#include "../dropout_problem.h"
#include "dropout_cuda.h"

/* Tiles of columns and of rows. None of it is asked of the device, so that the workspace's size and the order of the
 * sums depend on the arguments alone. */
typedef struct dropout_cuda_plan {
    int64_t tiles, parts;
} dropout_cuda_plan;

/* SHIFTED tiles (see dropout_tile.cuh) are a group narrower, and their first one may begin 7 columns before the row. */
static inline dropout_cuda_plan dropout_cuda_divide(const dropout_sizes *sizes, int lanes, int rows, bool shifted)
{
    return (dropout_cuda_plan){
        .tiles = shifted ? cot_ceil_div(sizes->D + COT_DROPOUT_GROUP - 1, (int64_t)COT_DROPOUT_GROUP * (lanes - 1))
                         : cot_ceil_div(sizes->D, (int64_t)COT_DROPOUT_GROUP * lanes),
        .parts = cot_ceil_div(sizes->R, (int64_t)DROPOUT_THREADS / lanes * rows)};
}

static inline dropout_cuda_plan dropout_cuda_backward(const dropout_sizes *sizes, bool shifted)
{
    return shifted ? dropout_cuda_divide(sizes, DROPOUT_BWD_SHIFTED_LANES, DROPOUT_BWD_SHIFTED_ROWS, true)
                   : dropout_cuda_divide(sizes, DROPOUT_BWD_LANES, DROPOUT_BWD_ROWS, false);
}

static inline const char *admit_cuda(const void *problem)
{
    const dropout_sizes *sizes = problem;
    const int64_t groups = INT32_MAX / 2;                   /* which the kernels count in 32 bits */
    const int64_t parts = (int64_t)UINT16_MAX * UINT16_MAX; /* of a grid */
    if (sizes->dtype == COT_F64)
        return "it sums in float32, x is f64";
    return sizes->groups > groups || sizes->R / 8 > parts ? "R or D is beyond what its grid can number" : NULL;
}

static inline double cost_cuda(const void *problem)
{
    const dropout_sizes *sizes = problem;
    return 1000.0 + (double)sizes->R * (double)sizes->D;
}

/* Whether tiles are shifted depends on the data's alignment, which a call has and a question for its workspace has not:
 * so the greater of the two. */
static inline size_t workspace_cuda_bwd(const void *problem)
{
    const dropout_backward_problem *p = problem;
    const dropout_cuda_plan plain = dropout_cuda_backward(&p->sizes, false),
                            shifted = dropout_cuda_backward(&p->sizes, true);
    const int64_t lanes = cot_max(COT_PRODUCT(plain.parts, plain.tiles, DROPOUT_BWD_LANES),
                                  COT_PRODUCT(shifted.parts, shifted.tiles, DROPOUT_BWD_SHIFTED_LANES));
    return cot_is_present(&p->args.dbias) ? cot_bytes(cot_mul(lanes, COT_DROPOUT_GROUP), sizeof(float)) : 0;
}

#endif
