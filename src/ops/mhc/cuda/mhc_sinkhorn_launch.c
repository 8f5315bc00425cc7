/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_sinkhorn_launch.c: launches of Sinkhorn's kernels, for mhc_sinkhorn and for pre. */
#include "mhc_launch.h"

/* clang-format off */
IMAGE(mhc_sinkhorn)
static const cot_cuda_kernel sinkhorn_forward[8] = BY_N(mhc_sinkhorn, mhc_sinkhorn_fwd);
static const cot_cuda_kernel sinkhorn_backward[8] = BY_N(mhc_sinkhorn, mhc_sinkhorn_bwd);
static const cot_cuda_kernel pre_dz[8] = BY_N(mhc_sinkhorn, mhc_pre_dz);
/* clang-format on */

/* Launches Sinkhorn's gradient, with its history in shared memory if it fits. */
static cot_status launch_gradient(cot_queue *queue, const cot_cuda_kernel *kernel, mhc_call c)
{
    const int shared_threads = mhc_cuda_history_threads(c.n, c.iterations),
              threads = shared_threads > 0 ? shared_threads : MHC_CUDA_TOKEN_THREADS;
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)cot_ceil_div(c.tokens, threads), 1, 1},
        .threads = (unsigned)threads,
        .shared_bytes = shared_threads > 0 ? (unsigned)mhc_cuda_history_bytes(c.n, c.iterations, threads) : 0,
    };
    if (shared_threads > 0)
        c.history = NULL;
    return c.tokens == 0 ? COT_OK : cot_cuda_launch(queue, kernel, &grid, &c);
}

cot_status mhc_sinkhorn_fwd_tokens_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const mhc_sinkhorn_forward_problem *p = problem;
    mhc_call c = init_call(&p->sizes);
    c.iterations = p->args.iterations;
    c.sinkhorn_eps = (float)p->args.eps;
    c.h_res_logits = make_array(&p->args.h_res_logits);
    c.h_res = make_array(&p->args.h_res);
    LAUNCH(queue, &sinkhorn_forward[c.n - 1], token_blocks(&c), 1, MHC_CUDA_TOKEN_THREADS, &c);
    return COT_OK;
}

cot_status mhc_sinkhorn_bwd_tokens_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_sinkhorn_backward_problem *p = problem;
    mhc_call c = init_call(&p->sizes);
    c.iterations = p->args.iterations;
    c.sinkhorn_eps = (float)p->args.eps;
    c.h_res_logits = make_array(&p->args.h_res_logits);
    c.dh_res = make_array(&p->args.dh_res);
    c.dh_res_logits = make_array(&p->args.dh_res_logits);
    c.history = workspace;
    return launch_gradient(queue, &sinkhorn_backward[c.n - 1], c);
}

/* Computes h_res from the logits that pre's forward stored in the workspace. */
cot_status mhc_launch_fused_sinkhorn(cot_queue *queue, mhc_call *c)
{
    if (c->h_res.data == NULL)
        return COT_OK;
    const int64_t n = c->n;
    c->h_res_logits = (mhc_array){c->logits, {c->T * n * n, n * n, n, 1}};
    LAUNCH(queue, &sinkhorn_forward[n - 1], token_blocks(c), 1, MHC_CUDA_TOKEN_THREADS, c);
    return COT_OK;
}

cot_status mhc_launch_dz(cot_queue *queue, const mhc_call *c)
{
    return launch_gradient(queue, &pre_dz[c->n - 1], *c);
}
