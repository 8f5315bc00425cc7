/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_launch.h: which problems the CUDA kernels take, at what cost, with how much workspace. For the
 * front and for causal_conv1d_dense_launch.c. */
#ifndef COT_CAUSAL_CONV1D_DENSE_LAUNCH_H
#define COT_CAUSAL_CONV1D_DENSE_LAUNCH_H

#include "../causal_conv1d_dense_problem.h"
#include "causal_conv1d_dense_cuda.h"

/* Has the tensor contiguous channels, and strides in multiples of 16 bytes? The copy engine steps over such tokens;
 * others are gathered in the workspace first. */
static inline bool conv1d_dense_strides_step(const cot_tensor *tensor)
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

/* And do its data begin at one, as far as that is known? A question for workspace need not say. */
static inline bool conv1d_dense_steps(const cot_tensor *tensor)
{
    return conv1d_dense_strides_step(tensor) && (cot_elements(tensor) == 0 || (uintptr_t)tensor->data % 16 == 0);
}

/* How many blocks gather so many tokens of so many channels, for each b. */
static inline int64_t conv1d_dense_gather_blocks(int64_t tokens, int64_t channels)
{
    return cot_ceil_div(tokens, CONV1D_DENSE_GATHER) * cot_ceil_div(channels, CONV1D_DENSE_GATHER);
}

/* Channels that rows of the workspace have, in units of 16 bytes. */
static inline int64_t conv1d_dense_pitch(int64_t channels)
{
    return cot_round_up(channels, 8);
}

/* Strides that step from data that do not: no room was asked for. */
static inline bool conv1d_dense_misaligned(const cot_tensor *tensor)
{
    return conv1d_dense_strides_step(tensor) && !conv1d_dense_steps(tensor);
}

/* What both directions want of x, the weights and the sizes. */
static inline const char *conv1d_dense_refuse_sm90(const conv1d_dense_sizes *z, const cot_tensor *x,
                                                   const cot_tensor *weight)
{
    const int64_t most = INT32_MAX / 8;
    if ((z->dtype != COT_BF16 && z->dtype != COT_F16) || weight->dtype != z->dtype)
        return "it serves x and weight of one 16-bit dtype";
    if (z->Din % 8 != 0 || z->Dout % 8 != 0 || z->Din == 0 || z->Dout == 0)
        return "it serves Din and Dout in multiples of 8";
    if (conv1d_dense_misaligned(x))
        return "x does not begin at a multiple of 16 bytes";
    if (z->B > 65535 || z->T > most || z->K > 65535 || z->Din > most || z->Dout > most ||
        (double)z->B * (double)(z->T + CONV1D_DENSE_ROWS) > most ||
        (double)z->K * (double)z->Din * (double)z->Dout > (double)INT64_MAX / 64 ||
        (double)z->K * (double)(z->Din + z->Dout) > most ||
        conv1d_dense_gather_blocks(z->T, z->Din > z->Dout ? z->Din : z->Dout) > INT32_MAX)
        return "it counts tokens and steps in 32 bits";
    return NULL;
}

static inline const char *admit_fwd_sm90(const void *problem)
{
    const conv1d_dense_forward_problem *p = problem;
    const cot_causal_conv1d_dense_forward_args *a = &p->args;
    if (cot_is_present(&a->initial_state) || cot_is_present(&a->final_state))
        return "it has no states";
    return conv1d_dense_refuse_sm90(&p->sizes, &a->x, &a->weight);
}

static inline const char *conv1d_dense_refuse_bwd_sm90(const conv1d_dense_backward_problem *p)
{
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    const bool silu = a->activation == COT_ACTIVATION_SILU;
    if (cot_is_present(&a->initial_state) || cot_is_present(&a->dfinal_state) || cot_is_present(&a->dinitial_state))
        return "it has no states";
    if (cot_is_present(&a->dweight) && a->dweight.dtype != p->sizes.dtype)
        return "it sums on tensor cores, which is less than float32: it serves dweight of x's dtype";
    if (silu && cot_is_present(&a->dbias) && a->dbias.dtype != p->sizes.dtype)
        return "it rounds g to 16 bits, dbias is not of x's dtype";
    if (conv1d_dense_misaligned(&a->dy))
        return "dy does not begin at a multiple of 16 bytes";
    return conv1d_dense_refuse_sm90(&p->sizes, &a->x, &a->weight);
}

static inline const char *admit_bwd_bf16_sm90(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    return p->sizes.dtype != COT_BF16 ? "it serves bf16" : conv1d_dense_refuse_bwd_sm90(p);
}

static inline const char *admit_bwd_f16_sm90(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    return p->sizes.dtype != COT_F16 ? "it serves f16" : conv1d_dense_refuse_bwd_sm90(p);
}

/* ---- any device, any strides, states ------------------------------------------------------------------------ */

static inline const char *conv1d_dense_refuse_generic(const conv1d_dense_sizes *z)
{
    const double side = CONV1D_DENSE_SIDE, in = (double)z->Din / side + 1, out = (double)z->Dout / side + 1;
    const double rows = ((double)z->T + (double)z->K) / side + 1, most = INT32_MAX / 2;
    if (z->dtype == COT_F64)
        return "it sums in float32, x is f64";
    if (rows * (double)z->B * (in > out ? in : out) > most || 16 * in * out * (double)z->K > most ||
        (double)z->B * (double)z->Din * (double)z->K > most)
        return "a grid has no room for so many blocks";
    return NULL;
}

static inline const char *admit_generic_sm80(const void *problem)
{
    return conv1d_dense_refuse_generic(problem);
}

static inline const char *conv1d_dense_refuse_mma(const conv1d_dense_sizes *z, const cot_tensor *weight,
                                                  const cot_tensor *state)
{
    if ((z->dtype != COT_BF16 && z->dtype != COT_F16) || weight->dtype != z->dtype ||
        (cot_is_present(state) && state->dtype != z->dtype))
        return "it serves x, weight and initial_state of one 16-bit dtype";
    const int64_t most = INT32_MAX / 8;
    if (z->B > 65535 || z->T > most || z->K > most || z->Din > most || z->Dout > most ||
        conv1d_dense_gather_blocks(z->T + z->K, (z->Din > z->Dout ? z->Din : z->Dout) + 8) > INT32_MAX ||
        (double)z->Dout * (double)(z->Din + 8) > INT32_MAX)
        return "a grid has no room for so many blocks";
    return conv1d_dense_refuse_generic(z);
}

static inline const char *admit_fwd_mma_sm80(const void *problem)
{
    const conv1d_dense_forward_problem *p = problem;
    return conv1d_dense_refuse_mma(&p->sizes, &p->args.weight, &p->args.initial_state);
}

static inline const char *conv1d_dense_refuse_bwd_mma(const conv1d_dense_backward_problem *p)
{
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    const cot_dtype dtype = p->sizes.dtype;
    if ((cot_is_present(&a->dweight) && a->dweight.dtype != dtype) ||
        (cot_is_present(&a->dinitial_state) && a->dinitial_state.dtype != dtype))
        return "it sums on tensor cores, which is less than float32: it serves gradients of x's dtype";
    if (a->activation == COT_ACTIVATION_SILU && cot_is_present(&a->dbias) && a->dbias.dtype != dtype)
        return "it rounds g to 16 bits, dbias is not of x's dtype";
    return conv1d_dense_refuse_mma(&p->sizes, &a->weight, &a->initial_state);
}

static inline const char *admit_bwd_mma_bf16_sm80(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    return p->sizes.dtype != COT_BF16 ? "it serves bf16" : conv1d_dense_refuse_bwd_mma(p);
}

static inline const char *admit_bwd_mma_f16_sm80(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    return p->sizes.dtype != COT_F16 ? "it serves f16" : conv1d_dense_refuse_bwd_mma(p);
}

static inline double cost_generic_sm80(const void *problem)
{
    const conv1d_dense_sizes *z = problem;
    return 40000 + (double)z->B * (double)z->T * (double)z->K * (double)z->Din * (double)z->Dout / 5000;
}

static inline double cost_mma_sm80(const void *problem)
{
    const conv1d_dense_sizes *z = problem;
    return 40000 + (double)z->B * (double)z->T * (double)z->K * (double)z->Din * (double)z->Dout / 40000;
}

static inline double cost_sm90(const void *problem)
{
    const conv1d_dense_sizes *z = problem;
    return 10000 + (double)z->B * (double)z->T * (double)z->K * (double)z->Din * (double)z->Dout / 200000;
}

/* The parts of the workspace, in bytes from its beginning. */
typedef struct conv1d_dense_cuda_parts {
    int64_t parts, chunks;
    size_t packed, gradients, dweight, dbias, x, dy, bytes;
} conv1d_dense_cuda_parts;

/* dy: of a backward, else NULL. */
static inline conv1d_dense_cuda_parts conv1d_dense_cuda_parts_of(const conv1d_dense_sizes *z, bool silu,
                                                                 const cot_tensor *x, const cot_tensor *dy)
{
    enum { FILLED = 264, LEAST = 8, MOST = 16 }; /* blocks that fill a device twice; steps a block; parts */
    conv1d_dense_cuda_parts l = {.chunks = cot_ceil_div(z->T, CONV1D_DENSE_SUM_TOKENS)};
    const int64_t steps = cot_mul(z->B, cot_ceil_div(z->T, CONV1D_DENSE_DEPTH));
    const double blocks = (double)z->K * (double)cot_ceil_div(z->Dout, CONV1D_DENSE_ROWS) *
                          (double)cot_ceil_div(z->Din, CONV1D_DENSE_COLUMNS);
    l.parts = blocks >= FILLED ? 1 : (int64_t)(FILLED / (blocks > 1 ? blocks : 1));
    l.parts = l.parts > MOST ? MOST : l.parts;
    l.parts = l.parts > steps / LEAST ? steps / LEAST : l.parts;
    l.parts = l.parts < 1 ? 1 : l.parts;
    l.packed = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->K, z->Dout, z->Din), 2);
    l.x = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, z->T, conv1d_dense_strides_step(x) ? 0 : z->Din), 2);
    if (dy != NULL) {
        l.dy = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, z->T, conv1d_dense_strides_step(dy) ? 0 : z->Dout), 2);
        l.gradients = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, z->T, silu ? z->Dout : 0), 2);
        l.dweight = cot_workspace_reserve(&l.bytes, COT_PRODUCT(l.parts, z->K, z->Dout, z->Din), sizeof(float));
        l.dbias = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, l.chunks, z->Dout), sizeof(float));
    }
    return l;
}

/* Of the portable kernels; `size` is that of an element of g, `side` that of a block's part of a product. */
static inline conv1d_dense_cuda_parts conv1d_dense_generic_parts_of(const conv1d_dense_sizes *z, bool silu, size_t size,
                                                                    int64_t side)
{
    enum { FILLED = 264, LEAST = 4, MOST = 16 };
    conv1d_dense_cuda_parts l = {0};
    const double steps = (double)z->B * (double)z->T / CONV1D_DENSE_STEP / LEAST;
    const double blocks = (double)z->K * (double)cot_ceil_div(z->Dout, side) * (double)cot_ceil_div(z->Din, side);
    l.parts = blocks >= FILLED ? 1 : (int64_t)(FILLED / (blocks > 1 ? blocks : 1));
    l.parts = l.parts > MOST ? MOST : l.parts;
    l.parts = (double)l.parts > steps ? (int64_t)steps : l.parts;
    l.parts = l.parts < 1 ? 1 : l.parts;
    l.gradients = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, z->T, silu ? z->Dout : 0), size);
    l.dweight = cot_workspace_reserve(&l.bytes, COT_PRODUCT(l.parts, z->K, z->Dout, z->Din), sizeof(float));
    return l;
}

/* On tensor cores what is multiplied is gathered besides: x as xe, dy as g. */
static inline conv1d_dense_cuda_parts conv1d_dense_mma_parts_of(const conv1d_dense_sizes *z, bool silu, bool backward)
{
    conv1d_dense_cuda_parts l = {0};
    if (backward)
        l = conv1d_dense_generic_parts_of(z, silu, 2, CONV1D_DENSE_TILE);
    l.packed = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->K, z->Dout, conv1d_dense_pitch(z->Din)), 2);
    l.x = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, z->K - 1 + z->T, conv1d_dense_pitch(z->Din)), 2);
    if (backward)
        l.dy = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, z->T, conv1d_dense_pitch(z->Dout)), 2);
    return l;
}

static inline size_t workspace_bwd_generic_sm80(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    return conv1d_dense_generic_parts_of(&p->sizes, p->args.activation == COT_ACTIVATION_SILU, sizeof(float),
                                         CONV1D_DENSE_SIDE)
        .bytes;
}

static inline size_t workspace_fwd_mma_sm80(const void *problem)
{
    return conv1d_dense_mma_parts_of(problem, false, false).bytes;
}

static inline size_t workspace_bwd_mma_sm80(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    return conv1d_dense_mma_parts_of(&p->sizes, p->args.activation == COT_ACTIVATION_SILU, true).bytes;
}

static inline size_t workspace_fwd_sm90(const void *problem)
{
    const conv1d_dense_forward_problem *p = problem;
    return conv1d_dense_cuda_parts_of(&p->sizes, false, &p->args.x, NULL).bytes;
}

static inline size_t workspace_bwd_sm90(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    return conv1d_dense_cuda_parts_of(&p->sizes, p->args.activation == COT_ACTIVATION_SILU, &p->args.x, &p->args.dy)
        .bytes;
}

#endif
