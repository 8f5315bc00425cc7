/* SPDX-License-Identifier: Apache-2.0
 * mhc_admit.h: which problems each kernel takes, at what cost, with how much workspace. For the front and the kernels.
 * Costs are core cycles, roughly; only their order matters. */
#ifndef COT_MHC_ADMIT_H
#define COT_MHC_ADMIT_H

#include "mhc_problem.h"

/* Products of the projection, of one pass over x, of Sinkhorn; as sizes that a double holds. */
static inline double mhc_elements(const mhc_sizes *sizes)
{
    return (double)sizes->tokens * (double)sizes->n * (double)sizes->D;
}

/* ---- scalar kernels ----------------------------------------------------------------------------------- */

enum { MHC_SCALAR_PARTS = 64 };

static inline int64_t mhc_scalar_parts(const mhc_sizes *sizes)
{
    return mhc_clamp(sizes->tokens, 1, MHC_SCALAR_PARTS);
}

static inline const char *admit_scalar(const void *problem)
{
    return ((const mhc_sizes *)problem)->dtype == COT_F64 ? "it sums in float32, x is f64" : NULL;
}

static inline const char *admit_scalar_f64(const void *problem)
{
    return ((const mhc_sizes *)problem)->dtype == COT_F64 ? NULL : "it serves f64 only";
}

static inline double cost_pre_scalar(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return 20 * (double)sizes->M * mhc_elements(sizes);
}

static inline double cost_sinkhorn_scalar(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return 100 * (double)sizes->n * mhc_elements(sizes);
}

static inline double cost_post_scalar(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return 20 * (double)(sizes->n + 1) * mhc_elements(sizes);
}

/* Sinkhorn's scratch in numbers: K, u, v; and K, G, P, and u and v of every iteration. */
static inline int64_t mhc_scalar_sinkhorn_fwd(int64_t n)
{
    return n * n + 2 * n;
}

static inline int64_t mhc_scalar_sinkhorn_bwd(int64_t n, int32_t iterations)
{
    return iterations == 0 ? 0 : 3 * n * n + 2 * ((int64_t)iterations + 1) * n;
}

/* Iterations of the Sinkhorn fused into pre's backward, 0 without. */
static inline int32_t mhc_pre_iterations(const cot_mhc_pre_backward_args *a)
{
    return cot_present(&a->dA) ? a->sinkhorn_iterations : 0;
}

static inline size_t workspace_sinkhorn_fwd_scalar(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return (size_t)(mhc_scalar_parts(sizes) * mhc_scalar_sinkhorn_fwd(sizes->n)) * sizeof(double);
}

static inline size_t workspace_sinkhorn_bwd_scalar(const void *problem)
{
    const mhc_sinkhorn_backward_problem *p = problem;
    return (size_t)(mhc_scalar_parts(&p->sizes) * mhc_scalar_sinkhorn_bwd(p->sizes.n, p->args.iterations)) *
           sizeof(double);
}

static inline size_t workspace_pre_fwd_scalar(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return (size_t)(mhc_scalar_parts(sizes) * (mhc_scalar_sinkhorn_fwd(sizes->n) + sizes->n)) * sizeof(double);
}

/* dz and dh_mix of every token besides. */
static inline size_t workspace_pre_bwd_scalar(const void *problem)
{
    const mhc_pre_backward_problem *p = problem;
    const int64_t sinkhorn = mhc_scalar_sinkhorn_bwd(p->sizes.n, mhc_pre_iterations(&p->args));
    return (size_t)(p->sizes.tokens * 2 * p->sizes.M + mhc_scalar_parts(&p->sizes) * sinkhorn) * sizeof(double);
}

#endif
