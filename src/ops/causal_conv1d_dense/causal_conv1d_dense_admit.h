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

/* What it multiplies is bf16: x, weight and a state must be, and g is rounded to it, which a float32 output would show. */
static inline const char *admit_fwd_tiled_amx(const void *problem)
{
    const conv1d_dense_forward_problem *p = problem;
    const cot_causal_conv1d_dense_forward_args *a = &p->args;
    if (p->sizes.dtype != COT_BF16 || a->weight.dtype != COT_BF16)
        return "it serves x and weight of bf16";
    return cot_present(&a->initial_state) && a->initial_state.dtype != COT_BF16 ? "it serves an initial_state of bf16"
                                                                                : NULL;
}

static inline const char *admit_bwd_tiled_amx(const void *problem)
{
    const conv1d_dense_backward_problem *p = problem;
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    const cot_tensor *const outputs[] = {&a->dweight, &a->dinitial_state};
    if (p->sizes.dtype != COT_BF16 || a->weight.dtype != COT_BF16)
        return "it serves x and weight of bf16";
    if (cot_present(&a->initial_state) && a->initial_state.dtype != COT_BF16)
        return "it serves an initial_state of bf16";
    for (int i = 0; a->activation == COT_ACTIVATION_SILU && i < 2; i++)
        if (cot_present(outputs[i]) && outputs[i]->dtype != COT_BF16)
            return "it rounds g to bf16, an output is not bf16";
    return NULL;
}

/* Whole parts are multiplied; packing takes a few cycles an element, and a fixed cost a call's passes. */
static inline double conv1d_dense_cost_tiled(const conv1d_dense_sizes *z, int products, double rate, double lanes)
{
    const double tokens = (double)z->B * (double)conv1d_dense_up(z->T, CONV1D_PART);
    const double in = (double)conv1d_dense_up(z->Din, CONV1D_PART), out = (double)conv1d_dense_up(z->Dout, CONV1D_PART);
    return products * tokens * in * out * (double)z->K / rate +
           16 / lanes * (products * (double)z->K * in * out + (tokens + (double)(z->B * z->K)) * (2 * in + 3 * out)) +
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
#undef COT_COSTS

static inline size_t conv1d_dense_workspace_fwd(const conv1d_dense_forward_problem *p, size_t size, bool one_form)
{
    const conv1d_dense_wants want = {.z = cot_present(&p->args.y)};
    return conv1d_dense_layout_of(&p->sizes, want, size, one_form).bytes;
}

static inline size_t conv1d_dense_workspace_bwd(const conv1d_dense_backward_problem *p, size_t size, bool one_form)
{
    return conv1d_dense_layout_of(&p->sizes, conv1d_dense_wants_of(p), size, one_form).bytes;
}

static inline size_t workspace_fwd_tiled(const void *problem)
{
    return conv1d_dense_workspace_fwd(problem, sizeof(float), true);
}

static inline size_t workspace_fwd_tiled_amx(const void *problem)
{
    return conv1d_dense_workspace_fwd(problem, sizeof(uint16_t), false);
}

static inline size_t workspace_bwd_tiled(const void *problem)
{
    return conv1d_dense_workspace_bwd(problem, sizeof(float), true);
}

static inline size_t workspace_bwd_tiled_amx(const void *problem)
{
    return conv1d_dense_workspace_bwd(problem, sizeof(uint16_t), false);
}

#endif
