/* SPDX-License-Identifier: Apache-2.0
 * mhc_problem.h: what the kernels of mhc_pre, mhc_sinkhorn and mhc_post are given: checked arguments and their sizes by
 * name. */
#ifndef COT_MHC_PROBLEM_H
#define COT_MHC_PROBLEM_H

#include "core/op.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <cotangent/mhc.h>

/* The order of each op's directions. */
enum { COT_MHC_FORWARD, COT_MHC_BACKWARD };

extern const cot_op cot_mhc_pre_op, cot_mhc_sinkhorn_op, cot_mhc_post_op;
extern const cot_direction cot_mhc_pre_directions[], cot_mhc_sinkhorn_directions[], cot_mhc_post_directions[];

/* Sizes as in the header; D is 1 in sinkhorn's. */
typedef struct mhc_sizes {
    int64_t B, T, n, D, M, tokens; /* tokens = B*T */
    cot_dtype dtype;               /* x's */
} mhc_sizes;

typedef struct mhc_pre_forward_problem {
    mhc_sizes sizes; /* first in all problems */
    cot_mhc_pre_forward_args args;
} mhc_pre_forward_problem;

typedef struct mhc_pre_backward_problem {
    mhc_sizes sizes;
    cot_mhc_pre_backward_args args;
} mhc_pre_backward_problem;

typedef struct mhc_sinkhorn_forward_problem {
    mhc_sizes sizes;
    cot_mhc_sinkhorn_forward_args args;
} mhc_sinkhorn_forward_problem;

typedef struct mhc_sinkhorn_backward_problem {
    mhc_sizes sizes;
    cot_mhc_sinkhorn_backward_args args;
} mhc_sinkhorn_backward_problem;

typedef struct mhc_post_forward_problem {
    mhc_sizes sizes;
    cot_mhc_post_forward_args args; /* A[in,out], whatever A_is_out_in says */
} mhc_post_forward_problem;

typedef struct mhc_post_backward_problem {
    mhc_sizes sizes;
    cot_mhc_post_backward_args args; /* the same, and dA */
} mhc_post_backward_problem;

/* The group of coefficient j, which is alpha's index: pre, post, res. */
static inline int64_t mhc_group(int64_t n, int64_t j)
{
    return j < n ? 0 : j < 2 * n ? 1 : 2;
}

/* Element 0 of token number `token` of a tensor [B,T,...], counted in elements from data. */
static inline int64_t mhc_token(const cot_tensor *tensor, int64_t token)
{
    const int64_t T = tensor->shape[1];
    return token / T * tensor->stride[0] + token % T * tensor->stride[1];
}

#endif
