/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_admit.h: which problems the CUDA kernels support, their cost and workspace. For the kernel
 * table and for causal_conv1d_dense_launch.c. */
#ifndef COT_CAUSAL_CONV1D_DENSE_CUDA_ADMIT_H
#define COT_CAUSAL_CONV1D_DENSE_CUDA_ADMIT_H

#include "../causal_conv1d_dense_problem.h"
#include "causal_conv1d_dense_cuda.h"

#include "core/op_tables.h"

/* Does the tensor have contiguous channels, and strides in multiples of 16 bytes? TMA needs both. Other tensors are
 * gathered in the workspace first. */
static inline bool conv1d_dense_has_tma_strides(const cot_tensor *tensor)
{
    if (cot_elements(tensor) == 0)
        return true;
    if (tensor->stride[1] != 1)
        return false;
    for (int axis = 0; axis < 3; axis += 2)
        if (tensor->shape[axis] > 1 &&
            (tensor->stride[axis] <= 0 || tensor->stride[axis] * (int64_t)cot_dtype_size(tensor->dtype) % 16 != 0))
            return false;
    return true;
}

/* Does its data also begin at a multiple of 16 bytes? (In a workspace query, data may be NULL.) */
static inline bool conv1d_dense_has_tma_layout(const cot_tensor *tensor)
{
    return conv1d_dense_has_tma_strides(tensor) && (cot_elements(tensor) == 0 || (uintptr_t)tensor->data % 16 == 0);
}

/* Blocks of the gather kernel, for each b. */
static inline int64_t conv1d_dense_gather_blocks(int64_t tokens, int64_t channels)
{
    return cot_ceil_div(tokens, CONV1D_DENSE_GATHER_SIDE) * cot_ceil_div(channels, CONV1D_DENSE_GATHER_SIDE);
}

/* Elements of a row in the workspace: channels rounded up to 16 bytes. */
static inline int64_t conv1d_dense_pitch(int64_t channels)
{
    return cot_round_up(channels, 8);
}

/* Are the strides right for TMA, but not the address? Such a tensor has no place in the workspace to be gathered to. */
static inline bool conv1d_dense_misaligned(const cot_tensor *tensor)
{
    return conv1d_dense_has_tma_strides(tensor) && !conv1d_dense_has_tma_layout(tensor);
}

/* Checks of x, weight and the sizes for both directions. */
static inline const char *conv1d_dense_admit_sm90(const conv1d_dense_sizes *sizes, const cot_tensor *x,
                                                  const cot_tensor *weight)
{
    const int64_t max = INT32_MAX / 8;
    if ((sizes->dtype != COT_BF16 && sizes->dtype != COT_F16) || weight->dtype != sizes->dtype)
        return "it supports x and weight of one 16-bit dtype";
    if (sizes->Din % 8 != 0 || sizes->Dout % 8 != 0 || sizes->Din == 0 || sizes->Dout == 0)
        return "it supports Din and Dout in multiples of 8";
    if (conv1d_dense_misaligned(x))
        return "x does not begin at a multiple of 16 bytes";
    if (sizes->B > 65535 || sizes->T > max || sizes->K > 65535 || sizes->Din > max || sizes->Dout > max ||
        (double)sizes->B * (double)(sizes->T + CONV1D_DENSE_BLOCK_M) > max ||
        (double)sizes->K * (double)sizes->Din * (double)sizes->Dout > (double)INT64_MAX / 64 ||
        (double)sizes->K * (double)(sizes->Din + sizes->Dout) > max ||
        conv1d_dense_gather_blocks(sizes->T, sizes->Din > sizes->Dout ? sizes->Din : sizes->Dout) > INT32_MAX)
        return "it counts tokens and steps in 32 bits";
    return NULL;
}

static inline const char *admit_fwd_sm90(const void *problem)
{
    const conv1d_dense_forward_problem *p = problem;
    const cot_causal_conv1d_dense_forward_args *a = &p->args;
    if (cot_is_present(&a->initial_state) || cot_is_present(&a->final_state))
        return "it has no states";
    return conv1d_dense_admit_sm90(&p->sizes, &a->x, &a->weight);
}

static inline const char *conv1d_dense_admit_bwd_sm90(const conv1d_dense_backward_problem *p)
{
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    const bool silu = a->activation == COT_ACTIVATION_SILU;
    if (cot_is_present(&a->initial_state) || cot_is_present(&a->dfinal_state) || cot_is_present(&a->dinitial_state))
        return "it has no states";
    if (cot_is_present(&a->dweight) && a->dweight.dtype != p->sizes.dtype)
        return "it sums on tensor cores, which is less than float32: it supports dweight of x's dtype";
    if (silu && cot_is_present(&a->dbias) && a->dbias.dtype != p->sizes.dtype)
        return "it rounds g to 16 bits, dbias is not of x's dtype";
    if (conv1d_dense_misaligned(&a->dy))
        return "dy does not begin at a multiple of 16 bytes";
    return conv1d_dense_admit_sm90(&p->sizes, &a->x, &a->weight);
}

static inline const char *admit_bwd_bf16_sm90(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    return p->sizes.dtype != COT_BF16 ? "it supports bf16 only" : conv1d_dense_admit_bwd_sm90(p);
}

static inline const char *admit_bwd_f16_sm90(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    return p->sizes.dtype != COT_F16 ? "it supports f16 only" : conv1d_dense_admit_bwd_sm90(p);
}

/* ---- any device, any strides, states ------------------------------------------------------------------------ */

static inline const char *conv1d_dense_admit_generic(const conv1d_dense_sizes *sizes)
{
    const double block = CONV1D_DENSE_F32_BLOCK, in = (double)sizes->Din / block + 1,
                 out = (double)sizes->Dout / block + 1;
    const double rows = ((double)sizes->T + (double)sizes->K) / block + 1, max = INT32_MAX / 2;
    if (sizes->dtype == COT_F64)
        return "it computes in float32, the tensors are f64";
    if (rows * (double)sizes->B * (in > out ? in : out) > max || 16 * in * out * (double)sizes->K > max ||
        (double)sizes->B * (double)sizes->Din * (double)sizes->K > max)
        return "a grid has no room for so many blocks";
    return NULL;
}

static inline const char *admit_generic_sm80(const void *problem)
{
    return conv1d_dense_admit_generic(problem);
}

static inline const char *conv1d_dense_admit_mma(const conv1d_dense_sizes *sizes, const cot_tensor *weight,
                                                 const cot_tensor *state)
{
    if ((sizes->dtype != COT_BF16 && sizes->dtype != COT_F16) || weight->dtype != sizes->dtype ||
        (cot_is_present(state) && state->dtype != sizes->dtype))
        return "it supports x, weight and initial_state of one 16-bit dtype";
    const int64_t max = INT32_MAX / 8;
    if (sizes->B > 65535 || sizes->T > max || sizes->K > max || sizes->Din > max || sizes->Dout > max ||
        conv1d_dense_gather_blocks(sizes->T + sizes->K, (sizes->Din > sizes->Dout ? sizes->Din : sizes->Dout) + 8) >
            INT32_MAX ||
        (double)sizes->Dout * (double)(sizes->Din + 8) > INT32_MAX)
        return "a grid has no room for so many blocks";
    return conv1d_dense_admit_generic(sizes);
}

static inline const char *admit_fwd_mma_sm80(const void *problem)
{
    const conv1d_dense_forward_problem *p = problem;
    return conv1d_dense_admit_mma(&p->sizes, &p->args.weight, &p->args.initial_state);
}

static inline const char *conv1d_dense_admit_bwd_mma(const conv1d_dense_backward_problem *p)
{
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    const cot_dtype dtype = p->sizes.dtype;
    if ((cot_is_present(&a->dweight) && a->dweight.dtype != dtype) ||
        (cot_is_present(&a->dinitial_state) && a->dinitial_state.dtype != dtype))
        return "it sums on tensor cores, which is less than float32: it supports gradients of x's dtype";
    if (a->activation == COT_ACTIVATION_SILU && cot_is_present(&a->dbias) && a->dbias.dtype != dtype)
        return "it rounds g to 16 bits, dbias is not of x's dtype";
    return conv1d_dense_admit_mma(&p->sizes, &a->weight, &a->initial_state);
}

static inline const char *admit_bwd_mma_bf16_sm80(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    return p->sizes.dtype != COT_BF16 ? "it supports bf16 only" : conv1d_dense_admit_bwd_mma(p);
}

static inline const char *admit_bwd_mma_f16_sm80(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    return p->sizes.dtype != COT_F16 ? "it supports f16 only" : conv1d_dense_admit_bwd_mma(p);
}

static inline double cost_generic_sm80(const void *problem)
{
    const conv1d_dense_sizes *sizes = problem;
    return 40000 +
           (double)sizes->B * (double)sizes->T * (double)sizes->K * (double)sizes->Din * (double)sizes->Dout / 5000;
}

static inline double cost_mma_sm80(const void *problem)
{
    const conv1d_dense_sizes *sizes = problem;
    return 40000 +
           (double)sizes->B * (double)sizes->T * (double)sizes->K * (double)sizes->Din * (double)sizes->Dout / 40000;
}

static inline double cost_sm90(const void *problem)
{
    const conv1d_dense_sizes *sizes = problem;
    return 10000 +
           (double)sizes->B * (double)sizes->T * (double)sizes->K * (double)sizes->Din * (double)sizes->Dout / 200000;
}

/* Workspace layout: offsets in bytes, and the numbers of splits and dbias chunks. */
typedef struct conv1d_dense_cuda_layout {
    int64_t splits, chunks;
    size_t packed_weight, g, dweight, dbias, x, dy, bytes;
} conv1d_dense_cuda_layout;

/* dy is NULL in the forward. */
static inline conv1d_dense_cuda_layout conv1d_dense_sm90_layout(const conv1d_dense_sizes *sizes, bool silu,
                                                                const cot_tensor *x, const cot_tensor *dy)
{
    enum {
        TARGET_BLOCKS = 264,
        MIN_STEPS = 8,
        MAX_SPLITS = 16
    }; /* TARGET_BLOCKS fill a device twice; MIN_STEPS: per block */
    conv1d_dense_cuda_layout l = {.chunks = cot_ceil_div(sizes->T, CONV1D_DENSE_DBIAS_TOKENS)};
    const int64_t steps = cot_mul(sizes->B, cot_ceil_div(sizes->T, CONV1D_DENSE_BLOCK_K));
    const double blocks = (double)sizes->K * (double)cot_ceil_div(sizes->Dout, CONV1D_DENSE_BLOCK_M) *
                          (double)cot_ceil_div(sizes->Din, CONV1D_DENSE_BLOCK_N);
    l.splits = blocks >= TARGET_BLOCKS ? 1 : (int64_t)(TARGET_BLOCKS / (blocks > 1 ? blocks : 1));
    l.splits = l.splits > MAX_SPLITS ? MAX_SPLITS : l.splits;
    l.splits = l.splits > steps / MIN_STEPS ? steps / MIN_STEPS : l.splits;
    l.splits = l.splits < 1 ? 1 : l.splits;
    l.packed_weight = cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->K, sizes->Dout, sizes->Din), 2);
    l.x = cot_workspace_reserve(&l.bytes,
                                COT_PRODUCT(sizes->B, sizes->T, conv1d_dense_has_tma_strides(x) ? 0 : sizes->Din), 2);
    if (dy != NULL) {
        l.dy = cot_workspace_reserve(
            &l.bytes, COT_PRODUCT(sizes->B, sizes->T, conv1d_dense_has_tma_strides(dy) ? 0 : sizes->Dout), 2);
        l.g = cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->B, sizes->T, silu ? sizes->Dout : 0), 2);
        l.dweight =
            cot_workspace_reserve(&l.bytes, COT_PRODUCT(l.splits, sizes->K, sizes->Dout, sizes->Din), sizeof(float));
        l.dbias = cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->B, l.chunks, sizes->Dout), sizeof(float));
    }
    return l;
}

/* Workspace layout of the float32 sm80 kernels. element_size: bytes of an element of g. block: side of the square of a
 * product that a block computes. */
static inline conv1d_dense_cuda_layout conv1d_dense_generic_layout(const conv1d_dense_sizes *sizes, bool silu,
                                                                   size_t element_size, int64_t block)
{
    enum { TARGET_BLOCKS = 264, MIN_STEPS = 4, MAX_SPLITS = 16 };
    conv1d_dense_cuda_layout l = {0};
    const double steps = (double)sizes->B * (double)sizes->T / CONV1D_DENSE_SM80_BLOCK_K / MIN_STEPS;
    const double blocks =
        (double)sizes->K * (double)cot_ceil_div(sizes->Dout, block) * (double)cot_ceil_div(sizes->Din, block);
    l.splits = blocks >= TARGET_BLOCKS ? 1 : (int64_t)(TARGET_BLOCKS / (blocks > 1 ? blocks : 1));
    l.splits = l.splits > MAX_SPLITS ? MAX_SPLITS : l.splits;
    l.splits = (double)l.splits > steps ? (int64_t)steps : l.splits;
    l.splits = l.splits < 1 ? 1 : l.splits;
    l.g = cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->B, sizes->T, silu ? sizes->Dout : 0), element_size);
    l.dweight =
        cot_workspace_reserve(&l.bytes, COT_PRODUCT(l.splits, sizes->K, sizes->Dout, sizes->Din), sizeof(float));
    return l;
}

/* Workspace layout of the sm80 tensor-core kernels, which also need gathered operands: xe, and g. */
static inline conv1d_dense_cuda_layout conv1d_dense_mma_layout(const conv1d_dense_sizes *sizes, bool silu,
                                                               bool backward)
{
    conv1d_dense_cuda_layout l = {0};
    if (backward)
        l = conv1d_dense_generic_layout(sizes, silu, 2, CONV1D_DENSE_MMA_BLOCK);
    l.packed_weight =
        cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->K, sizes->Dout, conv1d_dense_pitch(sizes->Din)), 2);
    l.x = cot_workspace_reserve(&l.bytes,
                                COT_PRODUCT(sizes->B, sizes->K - 1 + sizes->T, conv1d_dense_pitch(sizes->Din)), 2);
    if (backward)
        l.dy = cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->B, sizes->T, conv1d_dense_pitch(sizes->Dout)), 2);
    return l;
}

static inline bool conv1d_dense_has_silu(const conv1d_dense_backward_problem *p)
{
    return p->args.activation == COT_ACTIVATION_SILU;
}

static inline conv1d_dense_cuda_layout conv1d_dense_sm90_plan_fwd(const conv1d_dense_forward_problem *p)
{
    return conv1d_dense_sm90_layout(&p->sizes, false, &p->args.x, NULL);
}

static inline conv1d_dense_cuda_layout conv1d_dense_sm90_plan_bwd(const conv1d_dense_backward_problem *p)
{
    return conv1d_dense_sm90_layout(&p->sizes, conv1d_dense_has_silu(p), &p->args.x, &p->args.dy);
}

COT_PLAN(plan_bwd_generic_sm80, conv1d_dense_cuda_layout,
         conv1d_dense_generic_layout(problem, conv1d_dense_has_silu(problem), sizeof(float), CONV1D_DENSE_F32_BLOCK))
COT_PLAN(plan_fwd_mma_sm80, conv1d_dense_cuda_layout, conv1d_dense_mma_layout(problem, false, false))
COT_PLAN(plan_bwd_mma_sm80, conv1d_dense_cuda_layout,
         conv1d_dense_mma_layout(problem, conv1d_dense_has_silu(problem), true))
COT_PLAN(plan_fwd_sm90, conv1d_dense_cuda_layout, conv1d_dense_sm90_plan_fwd(problem))
COT_PLAN(plan_bwd_sm90, conv1d_dense_cuda_layout, conv1d_dense_sm90_plan_bwd(problem))

#endif
