/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_admit.h: for each CPU kernel, the problems that it supports, their cost, workspace and scratch. For the
 * kernel table. A cost is a rough estimate of core cycles; only the order of the costs matters. */
#ifndef COT_CAUSAL_CONV1D_ADMIT_H
#define COT_CAUSAL_CONV1D_ADMIT_H

#include "cpu/causal_conv1d_im2col.h"
#include "cpu/causal_conv1d_items.h"

#include "core/op_tables.h"

COT_ADMIT_SCALAR(conv1d_sizes)

static inline double cost_scalar(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    return 20.0 * (double)sizes->K * (double)sizes->B * (double)sizes->D * (double)sizes->T;
}

/* For every channel: a ring of K values of g, and two levels (chunk and total) of the K+1 sums of dweight and dbias. */
static inline size_t workspace_bwd_scalar(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    return cot_bytes(cot_mul(sizes->D, cot_add(cot_mul(3, sizes->K), 2)), sizeof(double));
}

/* ---- vector kernels ------------------------------------------------------------------------------------ *
 * These kernels stage elements that are not contiguous. So they admit any layout, and the cost prefers the layout that
 * a kernel is written for. */

static inline const char *admit_simd(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    if (sizes->dtype == COT_F64)
        return "it computes in float32, the tensors are f64";
    return sizes->K > CONV1D_MAX_K ? "it supports K up to 32" : NULL;
}

/* The bf16 kernels differ by their bf16 instructions only, which do not help other dtypes. */
static inline const char *admit_bf16(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    return sizes->dtype == COT_BF16 ? admit_simd(problem) : "it supports bf16 only";
}

/* Cycles of one vector: conversions and SiLU, and the taps. */
static inline double conv1d_vector_cycles(const conv1d_sizes *sizes)
{
    return 20 + 2 * (double)sizes->K;
}

enum {
    CONV1D_STRIDED_CYCLES = 2, /* an element that is not contiguous, to load or to store */
    CONV1D_LINE_CYCLES = 8,    /* the same, if each element is in a cache line of its own */
    CONV1D_PIECE_CYCLES = 250, /* the start of a piece of one channel */
    CONV1D_ITEM_CYCLES = 1000
};

/* Extra starts of a piece inside a row: one for every sequence of cu_seqlens, if there are states. */
static inline double conv1d_restarts(const conv1d_sizes *sizes, const cot_tensor *cu_seqlens, bool states)
{
    return cot_is_present(cu_seqlens) && states ? (double)sizes->sequence_count : 0;
}

static inline double cost_channel_first(const conv1d_sizes *sizes, int lanes, double gather_cycles, double restarts)
{
    const conv1d_item_grid grid = conv1d_item_grid_channel_first(sizes);
    const double rows = (double)sizes->B * (double)sizes->D;
    const double pieces = rows * (double)cot_ceil_div(sizes->T, CONV1D_ROW_BUFFER_TOKENS) + restarts * (double)sizes->D;
    const double vectors = rows * (double)cot_ceil_div(sizes->T, lanes);
    return CONV1D_ITEM_CYCLES * (double)conv1d_item_count(&grid) + pieces * CONV1D_PIECE_CYCLES +
           vectors * conv1d_vector_cycles(sizes) + rows * (double)sizes->T * gather_cycles;
}

/* Each part and each restart takes `extra_steps` in addition to its tokens: K-1 in the backward. */
static inline double cost_channel_last(const conv1d_sizes *sizes, int lanes, double gather_cycles, double restarts,
                                       int64_t extra_steps)
{
    const conv1d_item_grid grid = conv1d_item_grid_channel_last(sizes);
    const double tokens = (double)sizes->B * (double)sizes->T;
    const double steps = tokens + ((double)sizes->B * (double)grid.items_along_tokens + restarts) * (double)extra_steps;
    return CONV1D_ITEM_CYCLES * (double)conv1d_item_count(&grid) +
           steps * (double)cot_ceil_div(sizes->D, lanes) * conv1d_vector_cycles(sizes) +
           tokens * (double)sizes->D * gather_cycles;
}

/* Cycles per element to load from or store to a tensor, for a kernel whose vectors run along this axis. */
static inline double conv1d_gather_cycles(const cot_tensor *tensor, int axis)
{
    if (!cot_is_present(tensor) || tensor->stride[axis] == 1 || tensor->shape[axis] == 1)
        return 0;
    const int64_t stride = tensor->stride[axis];
    return stride < 16 && stride > -16 ? CONV1D_STRIDED_CYCLES : CONV1D_LINE_CYCLES;
}

static inline double cost_forward(const void *problem, int lanes, int axis)
{
    const conv1d_forward_problem *p = problem;
    const cot_causal_conv1d_forward_args *a = &p->args;
    const double gather_cycles = conv1d_gather_cycles(&a->x, axis) + conv1d_gather_cycles(&a->y, axis);
    const double restarts = conv1d_restarts(&p->sizes, &a->cu_seqlens, cot_is_present(&a->initial_state));
    return axis == 2 ? cost_channel_first(&p->sizes, lanes, gather_cycles, restarts)
                     : cost_channel_last(&p->sizes, lanes, gather_cycles, restarts, 0);
}

static inline double cost_backward(const void *problem, int lanes, int axis)
{
    const conv1d_backward_problem *p = problem;
    const cot_causal_conv1d_backward_args *a = &p->args;
    const double gather_cycles =
        conv1d_gather_cycles(&a->x, axis) + conv1d_gather_cycles(&a->dy, axis) + conv1d_gather_cycles(&a->dx, axis);
    const bool states =
        cot_is_present(&a->initial_state) || cot_is_present(&a->dfinal_state) || cot_is_present(&a->dinitial_state);
    const double restarts = conv1d_restarts(&p->sizes, &a->cu_seqlens, states);
    return axis == 2 ? cost_channel_first(&p->sizes, lanes, gather_cycles, restarts)
                     : cost_channel_last(&p->sizes, lanes, gather_cycles, restarts, p->sizes.K - 1);
}

static inline double cost_update(const void *problem, int lanes)
{
    return cost_channel_last(problem, lanes, 2 * CONV1D_STRIDED_CYCLES, 0, 0);
}

COT_PLAN(plan_bwd_channel_first, conv1d_items_plan,
         conv1d_items_plan_of(conv1d_item_grid_channel_first(problem), problem))
COT_PLAN(plan_bwd_channel_last, conv1d_items_plan,
         conv1d_items_plan_of(conv1d_item_grid_channel_last(problem), problem))

static inline size_t scratch_channel_first(const void *problem)
{
    (void)problem;
    return CONV1D_CHANNEL_FIRST_SCRATCH_BYTES;
}

static inline size_t scratch_bwd_channel_first(const void *problem)
{
    (void)problem;
    return CONV1D_BWD_CHANNEL_FIRST_SCRATCH_BYTES;
}

static inline size_t scratch_channel_last(const void *problem)
{
    (void)problem;
    return CONV1D_CHANNEL_LAST_SCRATCH_BYTES;
}

static inline size_t scratch_bwd_channel_last(const void *problem)
{
    (void)problem;
    return CONV1D_BWD_CHANNEL_LAST_SCRATCH_BYTES;
}

/* ---- im2col: a matrix product of columns with expanded weights ------------------------------------------------ */

static inline const char *admit_im2col(const void *problem)
{
    const conv1d_forward_problem *p = problem;
    if (cot_is_present(&p->args.seq_idx) || cot_is_present(&p->args.cu_seqlens))
        return "it does not support packed sequences";
    if (p->sizes.D > CONV1D_IM2COL_MAX_D)
        return "it multiplies D by D: it supports D up to 1024";
    if (p->sizes.K > CONV1D_IM2COL_MAX_K)
        return "it writes every input K times: it supports K up to 8";
    return admit_scalar(problem);
}

/* Products of bf16 are exact. Other dtypes would be rounded to bf16 first. */
static inline const char *admit_im2col_amx(const void *problem)
{
    const conv1d_forward_problem *p = problem;
    const cot_causal_conv1d_forward_args *a = &p->args;
    const bool state = cot_is_present(&a->initial_state) && a->initial_state.dtype != COT_BF16;
    if (p->sizes.dtype != COT_BF16 || a->weight.dtype != COT_BF16 || state)
        return "it supports x, weight and initial_state of bf16";
    return admit_im2col(problem);
}

/* Always higher than the cost of the scalar kernel, which supports everything that im2col does: im2col is for
 * comparison only. */
static inline double cost_im2col(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    return 1e6 + (1 + (double)sizes->D) * cost_scalar(problem);
}

COT_PLAN(plan_im2col, conv1d_im2col_layout, conv1d_im2col_layout_of(problem, sizeof(float)))
COT_PLAN(plan_im2col_amx, conv1d_im2col_layout, conv1d_im2col_layout_of(problem, sizeof(uint16_t)))

static inline size_t scratch_im2col(const void *problem)
{
    (void)problem;
    return CONV1D_IM2COL_ITEM_TOKENS * CONV1D_IM2COL_ITEM_CHANNELS * sizeof(float);
}

/* The cost functions by instruction set. `factor` scales the cycles. The portable build counts one lane per vector,
 * because the compiler may not vectorise it. */
#define COT_COSTS(isa, lanes, factor)                                      \
    static inline double cost_fwd_channel_first_##isa(const void *problem) \
    {                                                                      \
        return (factor)*cost_forward(problem, lanes, 2);                   \
    }                                                                      \
    static inline double cost_fwd_channel_last_##isa(const void *problem)  \
    {                                                                      \
        return (factor)*cost_forward(problem, lanes, 1);                   \
    }                                                                      \
    static inline double cost_bwd_channel_first_##isa(const void *problem) \
    {                                                                      \
        return (factor)*cost_backward(problem, lanes, 2);                  \
    }                                                                      \
    static inline double cost_bwd_channel_last_##isa(const void *problem)  \
    {                                                                      \
        return (factor)*cost_backward(problem, lanes, 1);                  \
    }                                                                      \
    static inline double cost_update_channels_##isa(const void *problem)   \
    {                                                                      \
        return (factor)*cost_update(problem, lanes);                       \
    }
COT_COSTS(portable, 1, 1.0)
COT_COSTS(avx2, 8, 1.0)
COT_COSTS(avx512, 16, 1.0)
COT_COSTS(avx512bf16, 16, 0.8)
#undef COT_COSTS

#endif
