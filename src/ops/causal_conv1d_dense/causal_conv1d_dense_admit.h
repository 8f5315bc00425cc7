/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_admit.h: for each kernel, the problems that it supports, their cost, workspace and scratch.
 * For the kernel table. A cost is a rough estimate of core cycles; only the order of the costs matters. */
#ifndef COT_CAUSAL_CONV1D_DENSE_ADMIT_H
#define COT_CAUSAL_CONV1D_DENSE_ADMIT_H

#include "cpu/causal_conv1d_dense_scalar.h"
#include "cpu/causal_conv1d_dense_tiling.h"
#include "cuda/causal_conv1d_dense_admit.h"

#include "core/op_tables.h"

/* Number of products of Din x Dout x K multiplications per token: z, dx and dweight. */
static inline int conv1d_dense_backward_products(const conv1d_dense_backward_problem *p)
{
    const conv1d_dense_needs needs = conv1d_dense_backward_needs(p);
    return needs.z + needs.dx + needs.dweight;
}

static inline double conv1d_dense_multiplications(const conv1d_dense_sizes *sizes)
{
    return (double)sizes->B * (double)sizes->T * (double)sizes->K * (double)sizes->Din * (double)sizes->Dout;
}

/* ---- scalar kernels --------------------------------------------------------------------------------------- */

COT_ADMIT_SCALAR(conv1d_dense_sizes)

static inline double conv1d_dense_cost_scalar(const conv1d_dense_sizes *sizes, int products)
{
    const double loaded = (double)sizes->B * (double)(sizes->K - 1 + sizes->T) * (double)(sizes->Din + sizes->Dout) +
                          (double)sizes->K * (double)sizes->Din * (double)sizes->Dout;
    return 5.0 * products * conv1d_dense_multiplications(sizes) + 20.0 * loaded;
}

static inline double cost_fwd_scalar(const void *problem)
{
    return conv1d_dense_cost_scalar(problem, 1);
}

static inline double cost_bwd_scalar(const void *problem)
{
    return conv1d_dense_cost_scalar(problem, conv1d_dense_backward_products(problem));
}

COT_PLAN(plan_fwd_scalar, conv1d_dense_scalar_layout, conv1d_dense_scalar_layout_of(problem, false, sizeof(float)))
COT_PLAN(plan_fwd_scalar_f64, conv1d_dense_scalar_layout, conv1d_dense_scalar_layout_of(problem, false, sizeof(double)))
COT_PLAN(plan_bwd_scalar, conv1d_dense_scalar_layout, conv1d_dense_scalar_layout_of(problem, true, sizeof(float)))
COT_PLAN(plan_bwd_scalar_f64, conv1d_dense_scalar_layout, conv1d_dense_scalar_layout_of(problem, true, sizeof(double)))

/* ---- tiled kernels ---------------------------------------------------------------------------------------- */

static inline const char *admit_tiled(const void *problem)
{
    return admit_scalar(problem);
}

/* For kernels that multiply in a 16-bit dtype: x, weight and initial_state must have it. */
static inline const char *conv1d_dense_admit_inputs(const conv1d_dense_sizes *sizes, const cot_tensor *weight,
                                                    const cot_tensor *initial_state, cot_dtype dtype)
{
    if (sizes->dtype != dtype || weight->dtype != dtype)
        return dtype == COT_BF16 ? "it supports x and weight of bf16" : "it supports x and weight of f16";
    if (cot_is_present(initial_state) && initial_state->dtype != dtype)
        return dtype == COT_BF16 ? "it supports an initial_state of bf16" : "it supports an initial_state of f16";
    return NULL;
}

/* Do dweight and dinitial_state, where present, have this dtype? */
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

/* The kernel adds six products of bf16 terms for 32 channels at a time. With fewer than 8 channels, plain f32 sums have
 * fewer roundings. */
static inline const char *admit_tiled_amx_split3(const void *problem)
{
    const conv1d_dense_sizes *sizes = problem;
    return sizes->Din < 8 || sizes->Dout < 8 ? "it supports 8 channels or more" : admit_tiled(problem);
}

/* Cycles of the products, of sizes rounded up to tiles; of packing, per element; and of the passes of a call, fixed. */
static inline double conv1d_dense_cost_tiled(const conv1d_dense_sizes *sizes, int products, double rate, double lanes)
{
    const double tokens = (double)sizes->B * (double)cot_round_up(sizes->T, CONV1D_TILE);
    const double in = (double)cot_round_up(sizes->Din, CONV1D_TILE),
                 out = (double)cot_round_up(sizes->Dout, CONV1D_TILE);
    return products * tokens * in * out * (double)sizes->K / rate +
           16 / lanes *
               (products * (double)sizes->K * in * out +
                (tokens + (double)sizes->B * (double)sizes->K) * (2 * in + 3 * out)) +
           4000;
}

/* The costs by instruction set. rate: multiply-adds per cycle. lanes: of a vector. */
#define COT_COSTS(isa, rate, lanes)                                                                    \
    static inline double cost_fwd_tiled_##isa(const void *problem)                                     \
    {                                                                                                  \
        return conv1d_dense_cost_tiled(problem, 1, rate, lanes);                                       \
    }                                                                                                  \
    static inline double cost_bwd_tiled_##isa(const void *problem)                                     \
    {                                                                                                  \
        return conv1d_dense_cost_tiled(problem, conv1d_dense_backward_products(problem), rate, lanes); \
    }
COT_COSTS(portable, 2, 2)
COT_COSTS(avx2, 12, 8)
COT_COSTS(avx512, 24, 16)
COT_COSTS(amx, 300, 16)
COT_COSTS(amx_split, 100, 8)
COT_COSTS(amx_split3, 50, 8)
#undef COT_COSTS

static inline conv1d_dense_layout conv1d_dense_plan_fwd(const conv1d_dense_forward_problem *p, size_t size,
                                                        bool same_form)
{
    const conv1d_dense_needs needs = {.z = cot_is_present(&p->args.y)};
    return conv1d_dense_layout_of(&p->sizes, needs, size, same_form);
}

static inline conv1d_dense_layout conv1d_dense_plan_bwd(const conv1d_dense_backward_problem *p, size_t size,
                                                        bool same_form)
{
    return conv1d_dense_layout_of(&p->sizes, conv1d_dense_backward_needs(p), size, same_form);
}

/* size: bytes of an element of an operand, which is a float or up to three bf16. separate_sums: see
 * CONV1D_DENSE_SCRATCH. */
#define COT_WORKSPACES(name, size, same_form, separate_sums)                                        \
    COT_PLAN(plan_fwd_##name, conv1d_dense_layout, conv1d_dense_plan_fwd(problem, size, same_form)) \
    COT_PLAN(plan_bwd_##name, conv1d_dense_layout, conv1d_dense_plan_bwd(problem, size, same_form)) \
    static inline size_t scratch_##name(const void *problem)                                        \
    {                                                                                               \
        (void)problem;                                                                              \
        return CONV1D_DENSE_SCRATCH(separate_sums);                                                 \
    }
COT_WORKSPACES(tiled, 4, true, true)
COT_WORKSPACES(tiled_amx, 2, false, false)
COT_WORKSPACES(tiled_amx_split, 4, false, false)
COT_WORKSPACES(tiled_amx_split3, 6, false, true)
#undef COT_WORKSPACES

#endif
