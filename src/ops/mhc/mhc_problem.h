/* SPDX-License-Identifier: Apache-2.0
 * mhc_problem.h: the problem structs that the kernels of mhc_pre, mhc_sinkhorn, mhc_post and mhc_post_pre receive:
 * validated arguments and named sizes. */
#ifndef COT_MHC_PROBLEM_H
#define COT_MHC_PROBLEM_H

#include "core/op.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <cotangent/mhc.h>

/* Indices of each op's directions. */
enum { COT_MHC_FORWARD, COT_MHC_BACKWARD };

extern const cot_op cot_mhc_pre_op, cot_mhc_sinkhorn_op, cot_mhc_post_op, cot_mhc_post_pre_op;
extern const cot_direction cot_mhc_pre_directions[], cot_mhc_sinkhorn_directions[], cot_mhc_post_directions[],
    cot_mhc_post_pre_directions[];

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
    cot_mhc_post_forward_args args; /* strides of h_res are [in,out] for either value of h_res_is_out_in */
} mhc_post_forward_problem;

typedef struct mhc_post_backward_problem {
    mhc_sizes sizes;
    cot_mhc_post_backward_args args; /* likewise for h_res and dh_res */
} mhc_post_backward_problem;

typedef struct mhc_post_pre_forward_problem {
    mhc_sizes sizes;
    cot_mhc_post_pre_forward_args args; /* strides of h_res are [in,out], as in mhc_post_forward_problem */
} mhc_post_pre_forward_problem;

typedef struct mhc_post_pre_backward_problem {
    mhc_sizes sizes;
    cot_mhc_post_pre_backward_args args; /* likewise for h_res and dh_res */
} mhc_post_pre_backward_problem;

/* ---- the halves of post_pre: problems of post and of pre ---------------------------------------------------- */

static inline mhc_post_forward_problem mhc_post_half_forward(const mhc_post_pre_forward_problem *p)
{
    const cot_mhc_post_pre_forward_args *a = &p->args;
    return (mhc_post_forward_problem){p->sizes,
                                      {.x = a->x, .f = a->f, .h_post = a->h_post, .h_res = a->h_res, .y = a->y}};
}

static inline mhc_pre_forward_problem mhc_pre_half_forward(const mhc_post_pre_forward_problem *p)
{
    const cot_mhc_post_pre_forward_args *a = &p->args;
    return (mhc_pre_forward_problem){p->sizes,
                                     {.norm_eps = a->norm_eps,
                                      .hc_eps = a->hc_eps,
                                      .post_scale = a->post_scale,
                                      .sinkhorn_eps = a->sinkhorn_eps,
                                      .sinkhorn_iterations = a->sinkhorn_iterations,
                                      .x = a->y,
                                      .phi = a->phi,
                                      .alpha = a->alpha,
                                      .bias = a->bias,
                                      .gamma = a->gamma,
                                      .h_in = a->h_in,
                                      .h_pre = a->h_pre,
                                      .h_post = a->next_h_post,
                                      .h_res_logits = a->h_res_logits,
                                      .h_res = a->next_h_res,
                                      .inv_rms = a->inv_rms,
                                      .h_mix = a->h_mix}};
}

/* The post that computes y again. y is absent: the kernel sets it. */
static inline mhc_post_forward_problem mhc_post_pre_recomputation(const mhc_post_pre_backward_problem *p)
{
    const cot_mhc_post_pre_backward_args *a = &p->args;
    return (mhc_post_forward_problem){p->sizes, {.x = a->x, .f = a->f, .h_post = a->h_post, .h_res = a->h_res}};
}

/* Pre's backward, whose dx is the gradient g of y. dx is absent: the kernel sets it. x is y, and absent if the call
 * computes y again. */
static inline mhc_pre_backward_problem mhc_pre_half_backward(const mhc_post_pre_backward_problem *p)
{
    const cot_mhc_post_pre_backward_args *a = &p->args;
    return (mhc_pre_backward_problem){p->sizes,
                                      {.hc_eps = a->hc_eps,
                                       .post_scale = a->post_scale,
                                       .sinkhorn_eps = a->sinkhorn_eps,
                                       .sinkhorn_iterations = a->sinkhorn_iterations,
                                       .accumulate = a->accumulate,
                                       .x = a->y,
                                       .phi = a->phi,
                                       .alpha = a->alpha,
                                       .bias = a->bias,
                                       .gamma = a->gamma,
                                       .inv_rms = a->inv_rms,
                                       .h_mix = a->h_mix,
                                       .h_pre = a->h_pre,
                                       .h_post = a->next_h_post,
                                       .dh_in = a->dh_in,
                                       .dh_post = a->dnext_h_post,
                                       .dh_res_logits = a->dh_res_logits,
                                       .dh_res = a->dnext_h_res,
                                       .dx_post = a->dy,
                                       .dphi = a->dphi,
                                       .dalpha = a->dalpha,
                                       .dbias = a->dbias,
                                       .dgamma = a->dgamma}};
}

/* Post's backward. dy is absent: the kernel sets it to g. */
static inline mhc_post_backward_problem mhc_post_half_backward(const mhc_post_pre_backward_problem *p)
{
    const cot_mhc_post_pre_backward_args *a = &p->args;
    return (mhc_post_backward_problem){p->sizes,
                                       {.x = a->x,
                                        .f = a->f,
                                        .h_post = a->h_post,
                                        .h_res = a->h_res,
                                        .dx = a->dx,
                                        .df = a->df,
                                        .dh_post = a->dh_post,
                                        .dh_res = a->dh_res}};
}

/* Whether the call has an output of post's backward. Otherwise g is not needed. */
static inline bool mhc_post_pre_needs_g(const cot_mhc_post_pre_backward_args *a)
{
    return cot_is_present(&a->dx) || cot_is_present(&a->df) || cot_is_present(&a->dh_post) ||
           cot_is_present(&a->dh_res);
}

/* ---- indices ------------------------------------------------------------------------------------------ */

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
