/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_admit.h: which problems each kernel takes, at what cost, with how much workspace. For the front.
 * Costs are core cycles, roughly; only their order matters. */
#ifndef COT_CAUSAL_CONV1D_ADMIT_H
#define COT_CAUSAL_CONV1D_ADMIT_H

#include "cpu/causal_conv1d_im2col.h"
#include "cpu/causal_conv1d_tiling.h"

static inline const char *admit_scalar(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    return sizes->dtype == COT_F64 ? "it sums in float32, x is f64" : NULL;
}

static inline const char *admit_scalar_f64(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    return sizes->dtype == COT_F64 ? NULL : "it serves f64 only";
}

static inline double cost_scalar(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    return 20.0 * (double)sizes->K * (double)sizes->B * (double)sizes->D * (double)sizes->T;
}

/* A ring of K values of g, and K+1 sums of dweight and dbias in two levels, for every channel. */
static inline size_t workspace_bwd_scalar(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    return cot_bytes(cot_mul(sizes->D, cot_add(cot_mul(3, sizes->K), 2)), sizeof(double));
}

/* ---- vector kernels ------------------------------------------------------------------------------------ *
 * They stage what is not contiguous, so they admit any layout; the cost says which layout they are for. */

static inline const char *admit_simd(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    if (sizes->dtype == COT_F64)
        return "it sums in float32, x is f64";
    return sizes->K > CONV1D_MAX_K ? "it serves K up to 32" : NULL;
}

/* The instructions that a bf16 kernel has besides are of no use to other dtypes. */
static inline const char *admit_bf16(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    return sizes->dtype == COT_BF16 ? admit_simd(problem) : "it serves bf16 only";
}

/* Cycles of one vector: conversions and SiLU, and the taps. */
static inline double conv1d_vector_cycles(const conv1d_sizes *sizes)
{
    return 20 + 2 * (double)sizes->K;
}

enum {
    CONV1D_GATHER_CYCLES = 2, /* an element that is not contiguous, one way */
    CONV1D_FAR_CYCLES = 8,    /* the same, if each lies in a cache line of its own */
    CONV1D_ROW_CYCLES = 250,  /* the beginning of a row of one channel */
    CONV1D_ITEM_CYCLES = 1000
};

/* How often the work begins anew in the middle of a row: at every sequence of cu_seqlens if it has states. */
static inline double conv1d_beginnings(const conv1d_sizes *sizes, const cot_tensor *cu_seqlens, bool states)
{
    return cot_present(cu_seqlens) && states ? (double)sizes->state_count : 0;
}

static inline double cost_channel_first(const conv1d_sizes *sizes, int lanes, double gather, double beginnings)
{
    const conv1d_tiling tiling = conv1d_tile_channel_first(sizes);
    const double rows = (double)sizes->B * (double)sizes->D;
    const double pieces = rows * (double)cot_ceil_div(sizes->T, CONV1D_PIECE) + beginnings * (double)sizes->D;
    const double vectors = rows * (double)cot_ceil_div(sizes->T, lanes);
    return CONV1D_ITEM_CYCLES * (double)conv1d_items(&tiling) + pieces * CONV1D_ROW_CYCLES +
           vectors * conv1d_vector_cycles(sizes) + rows * (double)sizes->T * gather;
}

/* `more` steps besides the tokens of each part and beginning: the backward's K-1. */
static inline double cost_channel_last(const conv1d_sizes *sizes, int lanes, double gather, double beginnings,
                                       int64_t more)
{
    const conv1d_tiling tiling = conv1d_tile_channel_last(sizes);
    const double rows = (double)sizes->B * (double)sizes->T;
    const double steps = rows + ((double)sizes->B * (double)tiling.parts + beginnings) * (double)more;
    return CONV1D_ITEM_CYCLES * (double)conv1d_items(&tiling) +
           steps * (double)cot_ceil_div(sizes->D, lanes) * conv1d_vector_cycles(sizes) +
           rows * (double)sizes->D * gather;
}

/* Cycles an element takes to or from a tensor whose vectors run along this axis. */
static inline double conv1d_gather_cycles(const cot_tensor *tensor, int axis)
{
    if (!cot_present(tensor) || tensor->stride[axis] == 1 || tensor->shape[axis] == 1)
        return 0;
    const int64_t stride = tensor->stride[axis];
    return stride < 16 && stride > -16 ? CONV1D_GATHER_CYCLES : CONV1D_FAR_CYCLES;
}

static inline double cost_forward(const void *problem, int lanes, int axis)
{
    const conv1d_forward_problem *p = problem;
    const cot_causal_conv1d_forward_args *a = &p->args;
    const double gather = conv1d_gather_cycles(&a->x, axis) + conv1d_gather_cycles(&a->y, axis);
    const double beginnings = conv1d_beginnings(&p->sizes, &a->cu_seqlens, cot_present(&a->initial_state));
    return axis == 2 ? cost_channel_first(&p->sizes, lanes, gather, beginnings)
                     : cost_channel_last(&p->sizes, lanes, gather, beginnings, 0);
}

static inline double cost_backward(const void *problem, int lanes, int axis)
{
    const conv1d_backward_problem *p = problem;
    const cot_causal_conv1d_backward_args *a = &p->args;
    const double gather =
        conv1d_gather_cycles(&a->x, axis) + conv1d_gather_cycles(&a->dy, axis) + conv1d_gather_cycles(&a->dx, axis);
    const bool states =
        cot_present(&a->initial_state) || cot_present(&a->dfinal_state) || cot_present(&a->dinitial_state);
    const double beginnings = conv1d_beginnings(&p->sizes, &a->cu_seqlens, states);
    return axis == 2 ? cost_channel_first(&p->sizes, lanes, gather, beginnings)
                     : cost_channel_last(&p->sizes, lanes, gather, beginnings, p->sizes.K - 1);
}

static inline double cost_update(const void *problem, int lanes)
{
    return cost_channel_last(problem, lanes, 2 * CONV1D_GATHER_CYCLES, 0, 0);
}

static inline size_t workspace_bwd_channel_first(const void *problem)
{
    const conv1d_tiling tiling = conv1d_tile_channel_first(problem);
    return conv1d_partial_bytes(&tiling, problem);
}

static inline size_t workspace_bwd_channel_last(const void *problem)
{
    const conv1d_tiling tiling = conv1d_tile_channel_last(problem);
    return conv1d_partial_bytes(&tiling, problem);
}

static inline size_t scratch_channel_first(const void *problem)
{
    (void)problem;
    return CONV1D_FIRST_SCRATCH;
}

static inline size_t scratch_bwd_channel_first(const void *problem)
{
    (void)problem;
    return CONV1D_BWD_FIRST_SCRATCH;
}

static inline size_t scratch_channel_last(const void *problem)
{
    (void)problem;
    return CONV1D_LAST_SCRATCH;
}

static inline size_t scratch_bwd_channel_last(const void *problem)
{
    (void)problem;
    return CONV1D_BWD_LAST_SCRATCH;
}

/* ---- the product of im2col's columns with expanded weights ---------------------------------------------------- */

static inline const char *admit_im2col(const void *problem)
{
    const conv1d_forward_problem *p = problem;
    if (cot_present(&p->args.seq_idx) || cot_present(&p->args.cu_seqlens))
        return "it has no packed sequences";
    if (p->sizes.D > CONV1D_IM2COL_MAX_D)
        return "it multiplies D by D: it serves D up to 1024";
    if (p->sizes.K > CONV1D_IM2COL_MAX_K)
        return "it writes every input K times: it serves K up to 8";
    return admit_scalar(problem);
}

/* Products of bf16 are exact; other dtypes would be rounded before. */
static inline const char *admit_im2col_amx(const void *problem)
{
    const conv1d_forward_problem *p = problem;
    const cot_causal_conv1d_forward_args *a = &p->args;
    const bool state = cot_present(&a->initial_state) && a->initial_state.dtype != COT_BF16;
    if (p->sizes.dtype != COT_BF16 || a->weight.dtype != COT_BF16 || state)
        return "it serves x, weight and initial_state of bf16";
    return admit_im2col(problem);
}

/* More than that of the scalar kernel, which serves all that this one does: it is there to be compared with. */
static inline double cost_im2col(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    return 1e6 + (1 + (double)sizes->D) * cost_scalar(problem);
}

static inline size_t workspace_im2col(const void *problem)
{
    return conv1d_im2col_layout_of(problem, sizeof(float)).bytes;
}

static inline size_t workspace_im2col_amx(const void *problem)
{
    return conv1d_im2col_layout_of(problem, sizeof(uint16_t)).bytes;
}

static inline size_t scratch_im2col(const void *problem)
{
    (void)problem;
    return CONV1D_IM2COL_ROWS * CONV1D_IM2COL_COLUMNS * sizeof(float);
}

/* The costs by instruction set; `share` is the part of the other sets' cycles. A lane of plain C costs what a vector
 * does where the compiler finds none. */
#define COT_COSTS(isa, lanes, share)                                       \
    static inline double cost_fwd_channel_first_##isa(const void *problem) \
    {                                                                      \
        return (share)*cost_forward(problem, lanes, 2);                    \
    }                                                                      \
    static inline double cost_fwd_channel_last_##isa(const void *problem)  \
    {                                                                      \
        return (share)*cost_forward(problem, lanes, 1);                    \
    }                                                                      \
    static inline double cost_bwd_channel_first_##isa(const void *problem) \
    {                                                                      \
        return (share)*cost_backward(problem, lanes, 2);                   \
    }                                                                      \
    static inline double cost_bwd_channel_last_##isa(const void *problem)  \
    {                                                                      \
        return (share)*cost_backward(problem, lanes, 1);                   \
    }                                                                      \
    static inline double cost_update_channels_##isa(const void *problem)   \
    {                                                                      \
        return (share)*cost_update(problem, lanes);                        \
    }
COT_COSTS(scalar, 1, 1.0)
COT_COSTS(avx2, 8, 1.0)
COT_COSTS(avx512, 16, 1.0)
COT_COSTS(avx512bf16, 16, 0.8)
#undef COT_COSTS

#endif
