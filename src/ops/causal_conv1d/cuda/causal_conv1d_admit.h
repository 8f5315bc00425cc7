/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_admit.h: launch configurations of the CUDA kernels, and which problems they support. For the kernel
 * table and for causal_conv1d_launch.c. */
#ifndef COT_CAUSAL_CONV1D_CUDA_ADMIT_H
#define COT_CAUSAL_CONV1D_CUDA_ADMIT_H

#include "../causal_conv1d_problem.h"
#include "causal_conv1d_cuda.h"

#include "core/op_tables.h"

enum { CONV1D_CUDA_MAX_K = 8 /* of the fast kernels */ };

/* Maximum of gridDim.y and gridDim.z. The sm80 kernels have grid-stride loops over more channels and batch elements. */
enum { CONV1D_CUDA_MAX_YZ = 65535 };

/* Blocks in x, y and z, warps per block, and tokens per warp. They do not depend on the device, so that the size of the
 * workspace and the order of the sums depend on the arguments alone. */
typedef struct conv1d_launch_config {
    int64_t x, y, z, warps, warp_tokens;
    int64_t shared_bytes;  /* 0: the default of the kernel */
    int64_t partial_count; /* partial sums of dweight and dbias per channel */
} conv1d_launch_config;

/* Contiguous time: x over the tokens of a row, y over channels, z over the batch. */
static inline conv1d_launch_config conv1d_sm80_channel_first_config(const conv1d_sizes *s, int64_t W, int64_t chunks)
{
    const int64_t tokens = chunks * CONV1D_LANES * (W == 4 && s->dtype == COT_F32 ? 4 : 8); /* of a warp */
    conv1d_launch_config config = {.warp_tokens = tokens};
    config.warps = cot_min(cot_ceil_div(s->T, tokens), CONV1D_WARPS);
    config.warps = config.warps > 0 ? config.warps : 1;
    config.x = cot_ceil_div(s->T, config.warps * tokens);
    config.y = cot_min(s->D, CONV1D_CUDA_MAX_YZ);
    config.z = cot_min(s->B, CONV1D_CUDA_MAX_YZ);
    config.partial_count = cot_mul(s->B, config.x);
    return config;
}

/* Contiguous channels: x over channel groups, y over tokens, z over the batch. In the forward, the warps of a block
 * process adjacent channel groups. In the backward, they process consecutive tokens of the same group. */
static inline conv1d_launch_config conv1d_sm80_fwd_channel_last_config(const conv1d_sizes *s, int64_t W)
{
    const int64_t groups = cot_ceil_div(s->D, CONV1D_LANES * (W == 4 && s->dtype != COT_F32 ? 8 : 4));
    conv1d_launch_config config = {.warps = cot_min(groups, CONV1D_WARPS), .warp_tokens = CONV1D_FWD_WARP_TOKENS};
    while (cot_ceil_div(s->T, config.warp_tokens) > CONV1D_CUDA_MAX_YZ)
        config.warp_tokens *= 2;
    config.x = cot_ceil_div(groups, config.warps > 0 ? config.warps : 1);
    config.y = cot_ceil_div(s->T, config.warp_tokens);
    config.z = cot_min(s->B, CONV1D_CUDA_MAX_YZ);
    return config;
}

static inline conv1d_launch_config conv1d_sm80_bwd_channel_last_config(const conv1d_sizes *s, int64_t W)
{
    conv1d_launch_config config = {.warp_tokens = CONV1D_BWD_WARP_TOKENS};
    while (cot_ceil_div(s->T, CONV1D_BWD_WARPS * config.warp_tokens) > CONV1D_CUDA_MAX_YZ)
        config.warp_tokens *= 2;
    config.warps = cot_min(cot_ceil_div(s->T, config.warp_tokens), CONV1D_BWD_WARPS);
    config.warps = config.warps > 0 ? config.warps : 1;
    config.x = cot_ceil_div(s->D, CONV1D_LANES * (W == 4 ? 4 : 2));
    config.y = cot_ceil_div(s->T, config.warps * config.warp_tokens);
    config.z = cot_min(s->B, CONV1D_CUDA_MAX_YZ);
    config.partial_count = cot_mul(s->B, config.y);
    return config;
}

/* On Hopper a block processes one tile, of each of `tiles` tensors. Contiguous time: a block has no more warps than
 * a row has work for. */
static inline conv1d_launch_config conv1d_sm90_channel_first_config(const conv1d_sizes *s, int64_t chunks,
                                                                    int64_t tiles)
{
    const int64_t tokens = chunks * CONV1D_LANES * (s->dtype == COT_F32 ? 4 : 8); /* of a warp */
    conv1d_launch_config config = {.y = s->D, .z = s->B};
    config.warps = cot_min(cot_ceil_div(s->T, tokens), CONV1D_SM90_WARPS);
    config.warps = config.warps > 0 ? config.warps : 1;
    config.x = cot_ceil_div(s->T, config.warps * tokens);
    config.partial_count = cot_mul(s->B, config.x);
    config.shared_bytes = tiles * CONV1D_SM90_CHANNEL_FIRST_BYTES(tiles > 1 ? CONV1D_SM90_WARPS : config.warps, chunks);
    return config;
}

static inline conv1d_launch_config conv1d_sm90_channel_last_config(const conv1d_sizes *s, int64_t warp_tokens,
                                                                   int64_t channels)
{
    const int64_t tiles = cot_ceil_div(s->T, CONV1D_SM90_WARPS * warp_tokens);
    return (conv1d_launch_config){.x = cot_ceil_div(s->D, channels),
                                  .y = tiles,
                                  .z = s->B,
                                  .warps = CONV1D_SM90_WARPS,
                                  .warp_tokens = warp_tokens,
                                  .partial_count = cot_mul(s->B, tiles)};
}

/* A small grid balances its waves of blocks badly. Below MIN_BLOCKS a block has half of the tokens, so the grid
 * doubles. */
static inline conv1d_launch_config conv1d_sm90_bwd_channel_last_config(const conv1d_sizes *s)
{
    enum { CHANNELS = CONV1D_SM90_BWD_CHANNELS, MIN_BLOCKS = 4096 };
    conv1d_launch_config config = conv1d_sm90_channel_last_config(s, CONV1D_SM90_BWD_WARP_TOKENS, CHANNELS);
    if (COT_PRODUCT(config.x, config.y, config.z) < MIN_BLOCKS)
        config = conv1d_sm90_channel_last_config(s, CONV1D_SM90_BWD_WARP_TOKENS / 2, CHANNELS);
    config.shared_bytes = 2 * (CONV1D_SM90_WARPS * config.warp_tokens + 2 * CONV1D_SM90_HALO) * CHANNELS *
                          (int64_t)cot_dtype_size(s->dtype);
    return config;
}

/* ---- entries of the kernel table ----------------------------------------------------------------------- */

static inline const char *admit_sm80_generic(const void *problem)
{
    const conv1d_sizes *sizes = problem;
    return sizes->dtype == COT_F64 ? "it computes in float32, the tensors are f64" : NULL;
}

static inline bool conv1d_cuda_contiguous_along(const cot_tensor *tensor, int axis)
{
    return !cot_is_present(tensor) || tensor->stride[axis] == 1 || tensor->shape[axis] == 1;
}

static inline const char *conv1d_portable_refusal(const conv1d_sizes *sizes, const cot_tensor *const *tensors,
                                                  int count, int axis, bool packed_states)
{
    if (sizes->dtype == COT_F64)
        return "it computes in float32, the tensors are f64";
    if (sizes->K > CONV1D_CUDA_MAX_K)
        return "it supports K up to 8";
    if (sizes->T > INT32_MAX / 2)
        return "it counts tokens of a row in 32 bits";
    for (int i = 0; i < count; i++)
        if (!conv1d_cuda_contiguous_along(tensors[i], axis))
            return axis == 2 ? "x, y, dy and dx need time contiguous" : "x, y, dy and dx need channels contiguous";
    return packed_states ? "it supports cu_seqlens without initial_state and dfinal_state" : NULL;
}

static inline const char *conv1d_portable_refusal_fwd(const void *problem, int axis)
{
    const conv1d_forward_problem *p = problem;
    return conv1d_portable_refusal(&p->sizes, (const cot_tensor *const[]){&p->args.x, &p->args.y}, 2, axis,
                                   cot_is_present(&p->args.cu_seqlens) && cot_is_present(&p->args.initial_state));
}

static inline const char *conv1d_portable_refusal_bwd(const void *problem, int axis)
{
    const conv1d_backward_problem *p = problem;
    return conv1d_portable_refusal(&p->sizes, (const cot_tensor *const[]){&p->args.x, &p->args.dy, &p->args.dx}, 3,
                                   axis,
                                   cot_is_present(&p->args.cu_seqlens) && (cot_is_present(&p->args.initial_state) ||
                                                                           cot_is_present(&p->args.dfinal_state)));
}

static inline const char *admit_sm80_fwd_channel_first(const void *problem)
{
    return conv1d_portable_refusal_fwd(problem, 2);
}

static inline const char *admit_sm80_fwd_channel_last(const void *problem)
{
    return conv1d_portable_refusal_fwd(problem, 1);
}

static inline const char *admit_sm80_bwd_channel_first(const void *problem)
{
    return conv1d_portable_refusal_bwd(problem, 2);
}

static inline const char *admit_sm80_bwd_channel_last(const void *problem)
{
    return conv1d_portable_refusal_bwd(problem, 1);
}

/* The contiguous axis holds whole vectors of 8 elements. TMA needs strides that are multiples of 16 bytes and
 * not negative. Whether the data is aligned to 16 bytes is known only at the launch: if it is not, the sm90 kernel
 * falls back to the sm80 kernel. */
static inline const char *conv1d_sm90_refusal(const conv1d_sizes *sizes, const cot_tensor *const *tensors, int count,
                                              int axis, bool packed)
{
    if (sizes->K > 4)
        return "it supports K up to 4";
    if (packed)
        return "it supports no packed sequences";
    if ((axis == 2 ? sizes->T : sizes->D) % 8 != 0)
        return axis == 2 ? "T is no multiple of 8" : "D is no multiple of 8";
    if (sizes->B > CONV1D_CUDA_MAX_YZ ||
        (axis == 2 ? sizes->D : sizes->T / (CONV1D_SM90_WARPS * CONV1D_SM90_FWD_WARP_TOKENS)) >= CONV1D_CUDA_MAX_YZ)
        return "a grid has no room for B, D or T";
    for (int i = 0; i < count; i++)
        for (int other = 0; other < 3; other++) {
            if (!cot_is_present(tensors[i]) || other == axis || tensors[i]->shape[other] <= 1)
                continue;
            if (tensors[i]->stride[other] < 0)
                return "a stride of x, y, dy or dx is negative";
            if (tensors[i]->stride[other] * (int64_t)cot_dtype_size(sizes->dtype) % 16 != 0)
                return "a stride of x, y, dy or dx is not a multiple of 16 bytes";
        }
    return NULL;
}

static inline const char *conv1d_sm90_refusal_fwd(const void *problem, int axis)
{
    const conv1d_forward_problem *p = problem;
    const cot_tensor *const tensors[] = {&p->args.x, &p->args.y};
    const bool packed = cot_is_present(&p->args.cu_seqlens) || cot_is_present(&p->args.seq_idx);
    const char *reason = conv1d_portable_refusal_fwd(problem, axis);
    return reason != NULL ? reason : conv1d_sm90_refusal(&p->sizes, tensors, 2, axis, packed);
}

static inline const char *conv1d_sm90_refusal_bwd(const void *problem, int axis)
{
    const conv1d_backward_problem *p = problem;
    const cot_tensor *const tensors[] = {&p->args.x, &p->args.dy, &p->args.dx};
    const bool packed = cot_is_present(&p->args.cu_seqlens) || cot_is_present(&p->args.seq_idx);
    const char *reason = conv1d_portable_refusal_bwd(problem, axis);
    if (reason == NULL && cot_is_present(&p->args.dfinal_state))
        reason = "it supports no dfinal_state";
    return reason != NULL ? reason : conv1d_sm90_refusal(&p->sizes, tensors, 3, axis, packed);
}

static inline const char *admit_sm90_fwd_channel_first(const void *problem)
{
    return conv1d_sm90_refusal_fwd(problem, 2);
}

static inline const char *admit_sm90_fwd_channel_last(const void *problem)
{
    return conv1d_sm90_refusal_fwd(problem, 1);
}

static inline const char *admit_sm90_bwd_channel_first(const void *problem)
{
    return conv1d_sm90_refusal_bwd(problem, 2);
}

static inline const char *admit_sm90_bwd_channel_last(const void *problem)
{
    return conv1d_sm90_refusal_bwd(problem, 1);
}

static inline double cost_sm80_channel_first(const void *problem);
static inline double cost_sm80_channel_last(const void *problem);

static inline double cost_sm90_channel_first(const void *problem)
{
    return 0.8 * cost_sm80_channel_first(problem);
}

static inline double cost_sm90_channel_last(const void *problem)
{
    return 0.8 * cost_sm80_channel_last(problem);
}

/* Elements loaded and stored, including those of partial vectors at the end of a row. */
static inline double cost_sm80_channel_first(const void *problem)
{
    const conv1d_sizes *s = problem;
    return (double)s->B * (double)s->D * (double)cot_round_up(s->T, 256);
}

static inline double cost_sm80_channel_last(const void *problem)
{
    const conv1d_sizes *s = problem;
    return (double)s->B * (double)s->T * (double)cot_round_up(s->D, 128);
}

static inline double cost_sm80_generic(const void *problem)
{
    const conv1d_sizes *s = problem;
    return 1000.0 + 300.0 * (double)s->K * (double)s->B * (double)s->D * (double)s->T;
}

/* Blocks of the im2col kernel. */
static inline double conv1d_cuda_im2col_blocks(const conv1d_sizes *s)
{
    return (double)s->B * (double)cot_ceil_div(s->D, CONV1D_IM2COL_CHANNELS) *
           (double)cot_ceil_div(s->T, CONV1D_IM2COL_TOKENS);
}

static inline const char *admit_sm80_im2col(const void *problem)
{
    const conv1d_forward_problem *p = problem;
    if (p->sizes.dtype != COT_BF16 && p->sizes.dtype != COT_F16)
        return "tensor cores would round x: it supports bf16 and f16";
    if (cot_is_present(&p->args.seq_idx) || cot_is_present(&p->args.cu_seqlens))
        return "it supports no packed sequences";
    if (p->sizes.K > CONV1D_CUDA_MAX_K)
        return "it supports K up to 8";
    if (p->sizes.T > INT32_MAX / 2 || conv1d_cuda_im2col_blocks(&p->sizes) > INT32_MAX)
        return "a grid has no room for B, D or T";
    return NULL;
}

/* Always higher than the cost of the generic kernel, which supports everything that im2col does: im2col is for
 * comparison only. */
static inline double cost_sm80_im2col(const void *problem)
{
    return 1e6 + cost_sm80_generic(problem);
}

/* Bytes of the partial sums. They are sized for the general versions, which are compiled for the maximal width only. */
static inline size_t conv1d_cuda_partial_bytes(const conv1d_sizes *s, int64_t partial_count)
{
    return partial_count > 1
               ? cot_align_up(cot_bytes(COT_PRODUCT(partial_count, CONV1D_CUDA_MAX_K + 1, s->D), sizeof(float)))
               : 0;
}

/* Bytes of seq_idx, which is computed from cu_seqlens. */
static inline size_t conv1d_cuda_seq_idx_bytes(const conv1d_sizes *s, const cot_tensor *cu_seqlens)
{
    return cot_is_present(cu_seqlens) ? cot_align_up(cot_bytes(s->T, sizeof(int32_t))) : 0;
}

static inline size_t workspace_cuda_fwd(const void *problem)
{
    const conv1d_forward_problem *p = problem;
    return conv1d_cuda_seq_idx_bytes(&p->sizes, &p->args.cu_seqlens);
}

/* The plan of a backward. width4 and width8: of the plain and the general sm80 kernels. The alignment of the data
 * decides between them, and a query for the workspace's size may have no data. sm90: of the Hopper kernels, which fall
 * back to the sm80 kernels for misaligned data. */
typedef struct conv1d_bwd_plan {
    conv1d_launch_config width4, width8, sm90;
    size_t bytes; /* enough for all of them */
} conv1d_bwd_plan;

static inline conv1d_bwd_plan conv1d_cuda_plan_bwd(const conv1d_backward_problem *p, int axis,
                                                   const conv1d_launch_config *sm90)
{
    const conv1d_sizes *s = &p->sizes;
    conv1d_bwd_plan plan = {
        .width4 = axis == 2 ? conv1d_sm80_channel_first_config(s, 4, CONV1D_BWD_CHUNKS)
                            : conv1d_sm80_bwd_channel_last_config(s, 4),
        .width8 = axis == 2 ? conv1d_sm80_channel_first_config(s, 8, CONV1D_BWD_CHUNKS)
                            : conv1d_sm80_bwd_channel_last_config(s, 8),
    };
    int64_t partial_count = cot_max(plan.width4.partial_count, plan.width8.partial_count);
    if (sm90 != NULL) {
        plan.sm90 = *sm90;
        partial_count = cot_max(partial_count, sm90->partial_count);
    }
    plan.bytes = conv1d_cuda_seq_idx_bytes(s, &p->args.cu_seqlens) + conv1d_cuda_partial_bytes(s, partial_count);
    return plan;
}

static inline conv1d_bwd_plan conv1d_sm90_plan_bwd(const conv1d_backward_problem *p, int axis)
{
    const conv1d_launch_config config = axis == 2
                                            ? conv1d_sm90_channel_first_config(&p->sizes, CONV1D_SM90_BWD_CHUNKS, 2)
                                            : conv1d_sm90_bwd_channel_last_config(&p->sizes);
    return conv1d_cuda_plan_bwd(p, axis, &config);
}

COT_PLAN(plan_sm80_bwd_channel_first, conv1d_bwd_plan, conv1d_cuda_plan_bwd(problem, 2, NULL))
COT_PLAN(plan_sm80_bwd_channel_last, conv1d_bwd_plan, conv1d_cuda_plan_bwd(problem, 1, NULL))
COT_PLAN(plan_sm90_bwd_channel_first, conv1d_bwd_plan, conv1d_sm90_plan_bwd(problem, 2))
COT_PLAN(plan_sm90_bwd_channel_last, conv1d_bwd_plan, conv1d_sm90_plan_bwd(problem, 1))

static inline size_t workspace_sm80_bwd_generic(const void *problem)
{
    const conv1d_sizes *s = problem;
    return cot_bytes(COT_PRODUCT(s->B, s->D, s->T), sizeof(float));
}

/* ---- AMD GPUs ----------------------------------------------------------------------------------------- *
 * They have the portable kernels. The backward with contiguous time has no general version there,
 * which would spill 600 registers: the generic kernel takes these calls. The alignment of the data is known in `run`
 * alone, so that its workspace suffices for both. */
static inline const char *admit_hip_bwd_channel_first(const void *problem)
{
    const conv1d_backward_problem *p = problem;
    const char *refusal = admit_sm80_bwd_channel_first(problem);
    if (refusal != NULL)
        return refusal;
    if (p->sizes.K > 4 || p->sizes.T % 8 != 0)
        return "it supports K up to 4, and T that is a multiple of 8";
    return cot_is_present(&p->args.seq_idx) || cot_is_present(&p->args.cu_seqlens) ? "it supports no packed sequences"
                                                                                   : NULL;
}

static inline conv1d_bwd_plan conv1d_hip_plan_bwd_channel_first(const conv1d_backward_problem *p)
{
    conv1d_bwd_plan plan = conv1d_cuda_plan_bwd(p, 2, NULL);
    const size_t generic = workspace_sm80_bwd_generic(p);
    plan.bytes = plan.bytes > generic ? plan.bytes : generic;
    return plan;
}

COT_PLAN(plan_hip_bwd_channel_first, conv1d_bwd_plan, conv1d_hip_plan_bwd_channel_first(problem))

#endif
