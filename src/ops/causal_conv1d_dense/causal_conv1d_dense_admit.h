/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_admit.h: which problems each kernel takes, at what cost, with how much workspace. For the front.
 * Costs are core cycles, roughly; only their order matters. */
#ifndef COT_CAUSAL_CONV1D_DENSE_ADMIT_H
#define COT_CAUSAL_CONV1D_DENSE_ADMIT_H

#include "cpu/causal_conv1d_dense_scalar.h"
#include "cpu/causal_conv1d_dense_tiling.h"
#include "cuda/causal_conv1d_dense_launch.h"

/* Products of Din by Dout by K, per token. */
static inline int conv1d_dense_backward_products(const conv1d_dense_backward_problem *p)
{
    const conv1d_dense_wants want = conv1d_dense_wants_of(p);
    return want.z + want.dx + want.dweight;
}

static inline double conv1d_dense_multiplications(const conv1d_dense_sizes *z)
{
    return (double)z->B * (double)z->T * (double)z->K * (double)z->Din * (double)z->Dout;
}

/* ---- scalar kernels --------------------------------------------------------------------------------------- */

static inline const char *admit_scalar(const void *problem)
{
    const conv1d_dense_sizes *z = problem;
    return z->dtype == COT_F64 ? "it sums in float32, x is f64" : NULL;
}

static inline const char *admit_scalar_f64(const void *problem)
{
    const conv1d_dense_sizes *z = problem;
    return z->dtype == COT_F64 ? NULL : "it serves f64 only";
}

static inline double conv1d_dense_cost_scalar(const conv1d_dense_sizes *z, int products)
{
    const double loaded = (double)z->B * (double)(z->K - 1 + z->T) * (double)(z->Din + z->Dout) +
                          (double)z->K * (double)z->Din * (double)z->Dout;
    return 5.0 * products * conv1d_dense_multiplications(z) + 20.0 * loaded;
}

static inline double cost_fwd_scalar(const void *problem)
{
    return conv1d_dense_cost_scalar(problem, 1);
}

static inline double cost_bwd_scalar(const void *problem)
{
    return conv1d_dense_cost_scalar(problem, conv1d_dense_backward_products(problem));
}

static inline size_t workspace_fwd_scalar(const void *problem)
{
    return conv1d_dense_scalar_layout_of(problem, false, sizeof(float)).bytes;
}

static inline size_t workspace_fwd_scalar_f64(const void *problem)
{
    return conv1d_dense_scalar_layout_of(problem, false, sizeof(double)).bytes;
}

static inline size_t workspace_bwd_scalar(const void *problem)
{
    return conv1d_dense_scalar_layout_of(problem, true, sizeof(float)).bytes;
}

static inline size_t workspace_bwd_scalar_f64(const void *problem)
{
    return conv1d_dense_scalar_layout_of(problem, true, sizeof(double)).bytes;
}

/* ---- tiled kernels ---------------------------------------------------------------------------------------- */

static inline const char *admit_tiled(const void *problem)
{
    return admit_scalar(problem);
}

/* What it multiplies has the 16 bits of `dtype`: x, weight and a state must be of it. */
static inline const char *conv1d_dense_admit_inputs(const conv1d_dense_sizes *z, const cot_tensor *weight,
                                                    const cot_tensor *initial_state, cot_dtype dtype)
{
    if (z->dtype != dtype || weight->dtype != dtype)
        return dtype == COT_BF16 ? "it serves x and weight of bf16" : "it serves x and weight of f16";
    if (cot_is_present(initial_state) && initial_state->dtype != dtype)
        return dtype == COT_BF16 ? "it serves an initial_state of bf16" : "it serves an initial_state of f16";
    return NULL;
}

/* The tensors of the weights' and the state's gradients that are there have `dtype`. */
static inline bool conv1d_dense_gradients_are(const conv1d_dense_backward_problem *p, cot_dtype dtype)
{
    const cot_tensor *const outputs[] = {&p->args.dweight, &p->args.dinitial_state};
    for (int i = 0; i < 2; i++)
        if (cot_is_present(outputs[i]) && outputs[i]->dtype != dtype)
            return false;
    return true;
}

static inline const char *admit_fwd_tiled_amx(const void *problem)
{
    const conv1d_dense_forward_problem *p = problem;
    return conv1d_dense_admit_inputs(&p->sizes, &p->args.weight, &p->args.initial_state, COT_BF16);
}

static inline const char *admit_bwd_tiled_amx(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    if (p->args.activation == COT_ACTIVATION_SILU && !conv1d_dense_gradients_are(p, COT_BF16))
        return "it rounds g to bf16, an output is not bf16";
    return conv1d_dense_admit_inputs(&p->sizes, &p->args.weight, &p->args.initial_state, COT_BF16);
}

static inline const char *admit_fwd_tiled_amx_split(const void *problem)
{
    const conv1d_dense_forward_problem *p = problem;
    return conv1d_dense_admit_inputs(&p->sizes, &p->args.weight, &p->args.initial_state, COT_F16);
}

static inline const char *admit_bwd_tiled_amx_split(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    if (!conv1d_dense_gradients_are(p, COT_F16))
        return "its products have 16 bits, an output is not f16";
    return conv1d_dense_admit_inputs(&p->sizes, &p->args.weight, &p->args.initial_state, COT_F16);
}

/* It adds six products of terms of bf16 for 32 channels at a time: of a few channels, plain sums round less often. */
static inline const char *admit_tiled_amx_split3(const void *problem)
{
    const conv1d_dense_sizes *z = problem;
    return z->Din < 8 || z->Dout < 8 ? "it serves 8 channels or more" : admit_tiled(problem);
}

/* Whole parts are multiplied; packing takes a few cycles an element, and a fixed cost a call's passes. */
static inline double conv1d_dense_cost_tiled(const conv1d_dense_sizes *z, int products, double rate, double lanes)
{
    const double tokens = (double)z->B * (double)cot_round_up(z->T, CONV1D_PART);
    const double in = (double)cot_round_up(z->Din, CONV1D_PART), out = (double)cot_round_up(z->Dout, CONV1D_PART);
    return products * tokens * in * out * (double)z->K / rate +
           16 / lanes *
               (products * (double)z->K * in * out + (tokens + (double)z->B * (double)z->K) * (2 * in + 3 * out)) +
           4000;
}

/* The costs by instruction set: multiply-adds a cycle, and lanes. */
#define COT_COSTS(isa, rate, lanes)                                                                    \
    static inline double cost_fwd_tiled_##isa(const void *problem)                                     \
    {                                                                                                  \
        return conv1d_dense_cost_tiled(problem, 1, rate, lanes);                                       \
    }                                                                                                  \
    static inline double cost_bwd_tiled_##isa(const void *problem)                                     \
    {                                                                                                  \
        return conv1d_dense_cost_tiled(problem, conv1d_dense_backward_products(problem), rate, lanes); \
    }
COT_COSTS(scalar, 2, 2)
COT_COSTS(avx2, 12, 8)
COT_COSTS(avx512, 24, 16)
COT_COSTS(amx, 300, 16)
COT_COSTS(amx_split, 100, 8)
COT_COSTS(amx_split3, 50, 8)
#undef COT_COSTS

static inline size_t conv1d_dense_workspace_fwd(const conv1d_dense_forward_problem *p, size_t size, bool one_form)
{
    const conv1d_dense_wants want = {.z = cot_is_present(&p->args.y)};
    return conv1d_dense_layout_of(&p->sizes, want, size, one_form).bytes;
}

static inline size_t conv1d_dense_workspace_bwd(const conv1d_dense_backward_problem *p, size_t size, bool one_form)
{
    return conv1d_dense_layout_of(&p->sizes, conv1d_dense_wants_of(p), size, one_form).bytes;
}

/* By the size of an operand's element, float or up to three bf16, and whether stretches of a sum are apart. */
#define COT_WORKSPACES(name, size, one_form, apart)                 \
    static inline size_t workspace_fwd_##name(const void *problem)  \
    {                                                               \
        return conv1d_dense_workspace_fwd(problem, size, one_form); \
    }                                                               \
    static inline size_t workspace_bwd_##name(const void *problem)  \
    {                                                               \
        return conv1d_dense_workspace_bwd(problem, size, one_form); \
    }                                                               \
    static inline size_t scratch_##name(const void *problem)        \
    {                                                               \
        (void)problem;                                              \
        return CONV1D_DENSE_SCRATCH(apart);                         \
    }
COT_WORKSPACES(tiled, 4, true, true)
COT_WORKSPACES(tiled_amx, 2, false, false)
COT_WORKSPACES(tiled_amx_split, 4, false, false)
COT_WORKSPACES(tiled_amx_split3, 6, false, true)
#undef COT_WORKSPACES

#endif
