/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_post_launch.c: launches of post. */
#include "mhc_launch.h"

/* clang-format off */
IMAGE(mhc_generic)
IMAGE(mhc_post)

static const cot_cuda_kernel post_forward_generic[3] = BY_DTYPE(mhc_generic, mhc_post_fwd_generic);
static const cot_cuda_kernel post_backward_generic[3] = BY_DTYPE(mhc_generic, mhc_post_bwd_generic);
static const cot_cuda_kernel post_backward_f32_generic[2] = BY_HALF_DTYPE(mhc_generic, mhc_post_bwd_f32_generic);
static const cot_cuda_kernel post_forward[8][3] = BY_N_AND_DTYPE(mhc_post, mhc_post_fwd);
static const cot_cuda_kernel post_backward[8][3] = BY_N_AND_DTYPE(mhc_post, mhc_post_bwd);
static const cot_cuda_kernel post_backward_f32[8][2] = BY_N_AND_HALF_DTYPE(mhc_post, mhc_post_bwd_f32);
/* clang-format on */

static mhc_call post_forward_call(const mhc_post_forward_problem *p)
{
    const cot_mhc_post_forward_args *a = &p->args;
    mhc_call c = init_call(&p->sizes);
    c.x = make_array(&a->x);
    c.f = make_array(&a->f);
    c.h_post = make_array(&a->h_post);
    c.h_res = make_array(&a->h_res);
    c.y = make_array(&a->y);
    return c;
}

cot_status mhc_post_fwd_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const mhc_post_forward_problem *p = problem;
    const mhc_call c = post_forward_call(p);
    LAUNCH(queue, &post_forward_generic[p->sizes.dtype - COT_F32],
           generic_blocks(cot_ceil_div(c.tokens * c.D, MHC_CUDA_THREADS)), 1, MHC_CUDA_THREADS, &c);
    return COT_OK;
}

/* Threads of a block that handles rows of D elements, `vector` elements at a time. */
static int64_t post_threads(const mhc_sizes *s)
{
    const int64_t vector = (s->n > 4 ? 8 : 16) / (int64_t)cot_dtype_size(s->dtype);
    return cot_clamp(cot_ceil_div(cot_ceil_div(s->D, vector), 32) * 32, 32, MHC_CUDA_POST_THREADS);
}

cot_status mhc_post_fwd_rows_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_post_forward_problem *p = problem;
    const mhc_call c = post_forward_call(p);
    if (!all_aligned((const mhc_array[]){c.x, c.f, c.y}, 3))
        return mhc_post_fwd_generic_sm80(queue, problem, workspace);
    LAUNCH(queue, &post_forward[c.n - 1][p->sizes.dtype - COT_F32], c.tokens, 1, post_threads(&p->sizes), &c);
    return COT_OK;
}

mhc_call mhc_post_backward_call(const mhc_post_backward_problem *p)
{
    const cot_mhc_post_backward_args *a = &p->args;
    mhc_call c = init_call(&p->sizes);
    c.x = make_array(&a->x);
    c.f = make_array(&a->f);
    c.h_post = make_array(&a->h_post);
    c.h_res = make_array(&a->h_res);
    c.dy = make_array(&a->dy);
    c.dx = make_array(&a->dx);
    c.df = make_array(&a->df);
    c.dh_post = make_array(&a->dh_post);
    c.dh_res = make_array(&a->dh_res);
    return c;
}

cot_status mhc_post_bwd_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const mhc_post_backward_problem *p = problem;
    const mhc_call c = mhc_post_backward_call(p);
    const cot_cuda_kernel *kernel = p->sizes.dtype == p->args.dy.dtype
                                        ? &post_backward_generic[p->sizes.dtype - COT_F32]
                                        : &post_backward_f32_generic[p->sizes.dtype - COT_F16];
    LAUNCH(queue, kernel, generic_blocks(c.tokens), 1, MHC_CUDA_THREADS, &c);
    return COT_OK;
}

cot_status mhc_post_bwd_rows_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_post_backward_problem *p = problem;
    const mhc_call c = mhc_post_backward_call(p);
    if (!all_aligned((const mhc_array[]){c.x, c.f, c.dy, c.dx, c.df}, 5))
        return mhc_post_bwd_generic_sm80(queue, problem, workspace);
    const cot_cuda_kernel *kernel = p->sizes.dtype == p->args.dy.dtype
                                        ? &post_backward[c.n - 1][p->sizes.dtype - COT_F32]
                                        : &post_backward_f32[c.n - 1][p->sizes.dtype - COT_F16];
    const int64_t most_threads = c.n <= 4 ? MHC_CUDA_POST_THREADS : MHC_CUDA_POST_BWD_THREADS;
    LAUNCH(queue, kernel, c.tokens, 1, cot_min(post_threads(&p->sizes), most_threads), &c);
    return COT_OK;
}
