/* SPDX-License-Identifier: Apache-2.0
 * mhc_problem.h: the problem structs that the kernels of mhc_pre, mhc_sinkhorn and mhc_post receive: validated
 * arguments and named sizes. */
#ifndef COT_MHC_PROBLEM_H
#define COT_MHC_PROBLEM_H

#include "core/op.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <cotangent/mhc.h>

/* Indices of each op's directions. */
enum { COT_MHC_FORWARD, COT_MHC_BACKWARD };

extern const cot_op cot_mhc_pre_op, cot_mhc_sinkhorn_op, cot_mhc_post_op;
extern const cot_direction cot_mhc_pre_directions[], cot_mhc_sinkhorn_directions[], cot_mhc_post_directions[];

/* Sizes as in cotangent/mhc.h. In mhc_sinkhorn D is 1. */
typedef struct mhc_sizes {
    int64_t B, T, n, D, M, tokens; /* tokens = B*T */
    cot_dtype dtype;               /* dtype of x */
} mhc_sizes;

typedef struct mhc_pre_forward_problem {
    mhc_sizes sizes; /* the first member of all problem structs */
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
    cot_mhc_post_forward_args args; /* strides of A are [in,out] for either value of A_is_out_in */
} mhc_post_forward_problem;

typedef struct mhc_post_backward_problem {
    mhc_sizes sizes;
    cot_mhc_post_backward_args args; /* likewise for A and dA */
} mhc_post_backward_problem;

/* Index in alpha of coefficient j: 0 = pre, 1 = post, 2 = res. */
static inline int64_t mhc_alpha_index(int64_t n, int64_t j)
{
    return j < n ? 0 : j < 2 * n ? 1 : 2;
}

/* Offset from data, in elements, of a token of a tensor [B,T,...]. */
static inline int64_t mhc_token_offset(const cot_tensor *tensor, int64_t token)
{
    const int64_t T = tensor->shape[1];
    return token / T * tensor->stride[0] + token % T * tensor->stride[1];
}

#endif
