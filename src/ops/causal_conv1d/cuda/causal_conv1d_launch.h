/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_launch.h: how the CUDA kernels divide the work, and which problems they take. For the front and for
 * causal_conv1d_launch.c. */
#ifndef COT_CAUSAL_CONV1D_LAUNCH_H
#define COT_CAUSAL_CONV1D_LAUNCH_H

#include "../causal_conv1d_problem.h"
#include "causal_conv1d_cuda.h"

enum { CONV1D_CUDA_MAX_K = 8 /* of the fast kernels */ };

/* The grid's y and z go no further; the kernels take every so many rows then. */
enum { CONV1D_CUDA_MAX_YZ = 65535 };

/* Blocks in x, y and z, and the tokens that a warp takes. None of it is asked of the device, so that the workspace's
 * size and the order of the sums depend on the arguments alone. */
typedef struct conv1d_cuda_plan {
    int64_t x, y, z, warps, part_length;
    int64_t shared_bytes; /* 0: what the kernel asks for */
    int64_t shares;       /* sums of dweight and dbias that the blocks leave to be added up */
} conv1d_cuda_plan;

/* Contiguous time: x along a row, y over channels, z over the batch. */
static inline conv1d_cuda_plan conv1d_cuda_first(const conv1d_sizes *s, int64_t W, int64_t chunks)
{
    const int64_t tokens = chunks * CONV1D_LANES * (W == 4 && s->dtype == COT_F32 ? 4 : 8); /* of a warp */
    conv1d_cuda_plan plan = {.part_length = tokens};
    plan.warps = cot_min(cot_ceil_div(s->T, tokens), CONV1D_WARPS);
    plan.warps = plan.warps > 0 ? plan.warps : 1;
    plan.x = cot_ceil_div(s->T, plan.warps * tokens);
    plan.y = cot_min(s->D, CONV1D_CUDA_MAX_YZ);
    plan.z = cot_min(s->B, CONV1D_CUDA_MAX_YZ);
    plan.shares = cot_mul(s->B, plan.x);
    return plan;
}

/* Contiguous channels: x over groups of them, y along the tokens, z over the batch. Forward, a block's warps take
 * groups beside each other; backward, the same group, one part of the tokens after the other. */
static inline conv1d_cuda_plan conv1d_cuda_fwd_last(const conv1d_sizes *s, int64_t W)
{
    const int64_t groups = cot_ceil_div(s->D, CONV1D_LANES * (W == 4 && s->dtype != COT_F32 ? 8 : 4));
    conv1d_cuda_plan plan = {.warps = cot_min(groups, CONV1D_WARPS), .part_length = CONV1D_FWD_ROWS};
    while (cot_ceil_div(s->T, plan.part_length) > CONV1D_CUDA_MAX_YZ)
        plan.part_length *= 2;
    plan.x = cot_ceil_div(groups, plan.warps > 0 ? plan.warps : 1);
    plan.y = cot_ceil_div(s->T, plan.part_length);
    plan.z = cot_min(s->B, CONV1D_CUDA_MAX_YZ);
    return plan;
}

static inline conv1d_cuda_plan conv1d_cuda_bwd_last(const conv1d_sizes *s, int64_t W)
{
    conv1d_cuda_plan plan = {.part_length = CONV1D_BWD_ROWS};
    while (cot_ceil_div(s->T, CONV1D_BWD_WARPS * plan.part_length) > CONV1D_CUDA_MAX_YZ)
        plan.part_length *= 2;
    plan.warps = cot_min(cot_ceil_div(s->T, plan.part_length), CONV1D_BWD_WARPS);
    plan.warps = plan.warps > 0 ? plan.warps : 1;
    plan.x = cot_ceil_div(s->D, CONV1D_LANES * (W == 4 ? 4 : 2));
    plan.y = cot_ceil_div(s->T, plan.warps * plan.part_length);
    plan.z = cot_min(s->B, CONV1D_CUDA_MAX_YZ);
    plan.shares = cot_mul(s->B, plan.y);
    return plan;
}

/* On Hopper: a block a tile. Contiguous time: of no more warps than a row has work for, of `tiles` tensors. */
static inline conv1d_cuda_plan conv1d_sm90_first(const conv1d_sizes *s, int64_t chunks, int64_t tiles)
{
    const int64_t tokens = chunks * CONV1D_LANES * (s->dtype == COT_F32 ? 4 : 8); /* of a warp */
    conv1d_cuda_plan plan = {.y = s->D, .z = s->B};
    plan.warps = cot_min(cot_ceil_div(s->T, tokens), CONV1D_SM90_WARPS);
    plan.warps = plan.warps > 0 ? plan.warps : 1;
    plan.x = cot_ceil_div(s->T, plan.warps * tokens);
    plan.shares = cot_mul(s->B, plan.x);
    plan.shared_bytes = tiles * CONV1D_SM90_FIRST_BYTES(tiles > 1 ? CONV1D_SM90_WARPS : plan.warps, chunks);
    return plan;
}

static inline conv1d_cuda_plan conv1d_sm90_last(const conv1d_sizes *s, int64_t rows, int64_t channels)
{
    const int64_t tiles = cot_ceil_div(s->T, CONV1D_SM90_WARPS * rows);
    return (conv1d_cuda_plan){.x = cot_ceil_div(s->D, channels),
                              .y = tiles,
                              .z = s->B,
                              .warps = CONV1D_SM90_WARPS,
                              .part_length = rows,
                              .shares = cot_mul(s->B, tiles)};
}

/* Few blocks would take turns unevenly: twice as many of half as many tokens then. */
static inline conv1d_cuda_plan conv1d_sm90_bwd_last(const conv1d_sizes *s)
{
    enum { CHANNELS = CONV1D_SM90_BWD_CHANNELS, MANY = 4096 };
    conv1d_cuda_plan plan = conv1d_sm90_last(s, CONV1D_SM90_BWD_ROWS, CHANNELS);
    if (COT_PRODUCT(plan.x, plan.y, plan.z) < MANY)
        plan = conv1d_sm90_last(s, CONV1D_SM90_BWD_ROWS / 2, CHANNELS);
    plan.shared_bytes = 2 * (CONV1D_SM90_WARPS * plan.part_length + 2 * CONV1D_SM90_HALO) * CHANNELS *
                        (int64_t)cot_dtype_size(s->dtype);
    return plan;
}

/* ---- rows --------------------------------------------------------------------------------------------- */

static inline const char *admit_cuda_generic(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    return sizes->dtype == COT_F64 ? "it sums in float32, x is f64" : NULL;
}

static inline bool conv1d_cuda_runs_along(const cot_tensor *tensor, int axis)
{
    return !cot_is_present(tensor) || tensor->stride[axis] == 1 || tensor->shape[axis] == 1;
}

static inline const char *conv1d_cuda_refuse(const conv1d_sizes *sizes, const cot_tensor *const *tensors, int count,
                                             int axis, bool packed_states)
{
    if (sizes->dtype == COT_F64)
        return "it sums in float32, x is f64";
    if (sizes->K > CONV1D_CUDA_MAX_K)
        return "it serves K up to 8";
    if (sizes->T > INT32_MAX / 2)
        return "it counts tokens of a row in 32 bits";
    for (int i = 0; i < count; i++)
        if (!conv1d_cuda_runs_along(tensors[i], axis))
            return axis == 2 ? "x, y, dy and dx need time contiguous" : "x, y, dy and dx need channels contiguous";
    return packed_states ? "it serves cu_seqlens without initial_state and dfinal_state" : NULL;
}

static inline const char *conv1d_cuda_refuse_forward(const void *problem, int axis)
{
    const conv1d_forward_problem *p = problem;
    return conv1d_cuda_refuse(&p->sizes, (const cot_tensor *const[]){&p->args.x, &p->args.y}, 2, axis,
                              cot_is_present(&p->args.cu_seqlens) && cot_is_present(&p->args.initial_state));
}

static inline const char *conv1d_cuda_refuse_backward(const void *problem, int axis)
{
    const conv1d_backward_problem *p = problem;
    return conv1d_cuda_refuse(&p->sizes, (const cot_tensor *const[]){&p->args.x, &p->args.dy, &p->args.dx}, 3, axis,
                              cot_is_present(&p->args.cu_seqlens) &&
                                  (cot_is_present(&p->args.initial_state) || cot_is_present(&p->args.dfinal_state)));
}

static inline const char *admit_cuda_fwd_first(const void *problem)
{
    return conv1d_cuda_refuse_forward(problem, 2);
}

static inline const char *admit_cuda_fwd_last(const void *problem)
{
    return conv1d_cuda_refuse_forward(problem, 1);
}

static inline const char *admit_cuda_bwd_first(const void *problem)
{
    return conv1d_cuda_refuse_backward(problem, 2);
}

static inline const char *admit_cuda_bwd_last(const void *problem)
{
    return conv1d_cuda_refuse_backward(problem, 1);
}

/* The copy engine moves multiples of 16 bytes. Whether the data begins at one, a row learns only when it runs: then it
 * leaves a call that does not to the kernels for any device. */
static inline const char *conv1d_sm90_refuse(const conv1d_sizes *sizes, const cot_tensor *const *tensors, int count,
                                             int axis, bool packed)
{
    if (sizes->K > 4)
        return "it serves K up to 4";
    if (packed)
        return "it serves no packed sequences";
    if ((axis == 2 ? sizes->T : sizes->D) % 8 != 0)
        return axis == 2 ? "T is no multiple of 8" : "D is no multiple of 8";
    if (sizes->B > CONV1D_CUDA_MAX_YZ ||
        (axis == 2 ? sizes->D : sizes->T / (CONV1D_SM90_WARPS * CONV1D_SM90_FWD_ROWS)) >= CONV1D_CUDA_MAX_YZ)
        return "a grid has no room for B, D or T";
    for (int i = 0; i < count; i++)
        for (int other = 0; other < 3; other++)
            if (cot_is_present(tensors[i]) && other != axis && tensors[i]->shape[other] > 1 &&
                (tensors[i]->stride[other] < 0 ||
                 tensors[i]->stride[other] * (int64_t)cot_dtype_size(sizes->dtype) % 16 != 0))
                return "strides of x, y, dy or dx are no multiples of 16 bytes";
    return NULL;
}

static inline const char *conv1d_sm90_refuse_forward(const void *problem, int axis)
{
    const conv1d_forward_problem *p = problem;
    const cot_tensor *const tensors[] = {&p->args.x, &p->args.y};
    const bool packed = cot_is_present(&p->args.cu_seqlens) || cot_is_present(&p->args.seq_idx);
    const char *refusal = conv1d_cuda_refuse_forward(problem, axis);
    return refusal != NULL ? refusal : conv1d_sm90_refuse(&p->sizes, tensors, 2, axis, packed);
}

static inline const char *conv1d_sm90_refuse_backward(const void *problem, int axis)
{
    const conv1d_backward_problem *p = problem;
    const cot_tensor *const tensors[] = {&p->args.x, &p->args.dy, &p->args.dx};
    const bool packed = cot_is_present(&p->args.cu_seqlens) || cot_is_present(&p->args.seq_idx);
    const char *refusal = conv1d_cuda_refuse_backward(problem, axis);
    if (refusal == NULL && cot_is_present(&p->args.dfinal_state))
        refusal = "it serves no dfinal_state";
    return refusal != NULL ? refusal : conv1d_sm90_refuse(&p->sizes, tensors, 3, axis, packed);
}

static inline const char *admit_sm90_fwd_first(const void *problem)
{
    return conv1d_sm90_refuse_forward(problem, 2);
}

static inline const char *admit_sm90_fwd_last(const void *problem)
{
    return conv1d_sm90_refuse_forward(problem, 1);
}

static inline const char *admit_sm90_bwd_first(const void *problem)
{
    return conv1d_sm90_refuse_backward(problem, 2);
}

static inline const char *admit_sm90_bwd_last(const void *problem)
{
    return conv1d_sm90_refuse_backward(problem, 1);
}

static inline double cost_cuda_first(const void *problem);
static inline double cost_cuda_last(const void *problem);

static inline double cost_sm90_first(const void *problem)
{
    return 0.8 * cost_cuda_first(problem);
}

static inline double cost_sm90_last(const void *problem)
{
    return 0.8 * cost_cuda_last(problem);
}

/* Elements moved, those that a vector is too wide for included. */
static inline double cost_cuda_first(const void *problem)
{
    const conv1d_sizes *s = problem;
    return (double)s->B * (double)s->D * (double)cot_round_up(s->T, 256);
}

static inline double cost_cuda_last(const void *problem)
{
    const conv1d_sizes *s = problem;
    return (double)s->B * (double)s->T * (double)cot_round_up(s->D, 128);
}

static inline double cost_cuda_generic(const void *problem)
{
    const conv1d_sizes *s = problem;
    return 1000.0 + 300.0 * (double)s->K * (double)s->B * (double)s->D * (double)s->T;
}

/* Blocks of im2col and its product. */
static inline double conv1d_cuda_im2col_blocks(const conv1d_sizes *s)
{
    return (double)s->B * (double)cot_ceil_div(s->D, CONV1D_IM2COL_CHANNELS) *
           (double)cot_ceil_div(s->T, CONV1D_IM2COL_TOKENS);
}

static inline const char *admit_cuda_im2col(const void *problem)
{
    const conv1d_forward_problem *p = problem;
    if (p->sizes.dtype != COT_BF16 && p->sizes.dtype != COT_F16)
        return "tensor cores would round x: it serves bf16 and f16";
    if (cot_is_present(&p->args.seq_idx) || cot_is_present(&p->args.cu_seqlens))
        return "it serves no packed sequences";
    if (p->sizes.K > CONV1D_CUDA_MAX_K)
        return "it serves K up to 8";
    if (p->sizes.T > INT32_MAX / 2 || conv1d_cuda_im2col_blocks(&p->sizes) > INT32_MAX)
        return "a grid has no room for B, D or T";
    return NULL;
}

/* More than that of the generic kernel, which serves all that this one does: it is there to be compared with. */
static inline double cost_cuda_im2col(const void *problem)
{
    return 1e6 + cost_cuda_generic(problem);
}

/* The general kernels are compiled for the greatest width alone, so the partial sums are sized for it. */
static inline size_t conv1d_cuda_partial_bytes(const conv1d_sizes *s, int64_t shares)
{
    return shares > 1 ? cot_align_up(cot_bytes(COT_PRODUCT(shares, CONV1D_CUDA_MAX_K + 1, s->D), sizeof(float))) : 0;
}

/* seq_idx made from cu_seqlens. */
static inline size_t conv1d_cuda_id_bytes(const conv1d_sizes *s, const cot_tensor *cu_seqlens)
{
    return cot_is_present(cu_seqlens) ? cot_align_up(cot_bytes(s->T, sizeof(int32_t))) : 0;
}

static inline size_t workspace_cuda_fwd(const void *problem)
{
    const conv1d_forward_problem *p = problem;
    return conv1d_cuda_id_bytes(&p->sizes, &p->args.cu_seqlens);
}

static inline size_t conv1d_cuda_bwd_bytes(const conv1d_backward_problem *p, const conv1d_cuda_plan *narrow,
                                           const conv1d_cuda_plan *wide)
{
    const int64_t shares = narrow->shares > wide->shares ? narrow->shares : wide->shares;
    return conv1d_cuda_id_bytes(&p->sizes, &p->args.cu_seqlens) + conv1d_cuda_partial_bytes(&p->sizes, shares);
}

static inline size_t workspace_cuda_bwd_first(const void *problem)
{
    const conv1d_cuda_plan narrow = conv1d_cuda_first(problem, 4, CONV1D_BWD_CHUNKS);
    const conv1d_cuda_plan wide = conv1d_cuda_first(problem, 8, CONV1D_BWD_CHUNKS);
    return conv1d_cuda_bwd_bytes(problem, &narrow, &wide);
}

static inline size_t workspace_cuda_bwd_last(const void *problem)
{
    const conv1d_cuda_plan narrow = conv1d_cuda_bwd_last(problem, 4), wide = conv1d_cuda_bwd_last(problem, 8);
    return conv1d_cuda_bwd_bytes(problem, &narrow, &wide);
}

/* Enough for the kernels for any device too. */
static inline size_t workspace_sm90_bwd_first(const void *problem)
{
    const conv1d_cuda_plan plan = conv1d_sm90_first(problem, CONV1D_SM90_BWD_CHUNKS, 2);
    const size_t own = conv1d_cuda_bwd_bytes(problem, &plan, &plan), any = workspace_cuda_bwd_first(problem);
    return own > any ? own : any;
}

static inline size_t workspace_sm90_bwd_last(const void *problem)
{
    const conv1d_cuda_plan plan = conv1d_sm90_bwd_last(problem);
    const size_t own = conv1d_cuda_bwd_bytes(problem, &plan, &plan), any = workspace_cuda_bwd_last(problem);
    return own > any ? own : any;
}

static inline size_t workspace_cuda_bwd_generic(const void *problem)
{
    const conv1d_sizes *s = problem;
    return cot_bytes(COT_PRODUCT(s->B, s->D, s->T), sizeof(float));
}

#endif
