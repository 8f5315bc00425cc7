/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_admit.h: which problems each kernel takes, at what cost, with how much workspace. For the front.
 * Costs are core cycles, roughly; only their order matters. */
#ifndef COT_CAUSAL_CONV1D_ADMIT_H
#define COT_CAUSAL_CONV1D_ADMIT_H

#include "causal_conv1d_problem.h"

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
    return (size_t)sizes->D * (size_t)(3 * sizes->K + 2) * sizeof(double);
}

#endif
