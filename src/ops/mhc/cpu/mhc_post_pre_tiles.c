/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_post_pre_tiles.c: post_pre (cotangent/mhc.h) for contiguous d and n <= 8, by the blocks of pre's kernels.
 *   Forward   A block of pre first computes the y of its tokens with post's rows. It stores y by non-temporal stores if
 *             y is large, and a copy in the thread's scratch. Pre reads the copy.
 *   Backward  A block of pre computes y again, if it is not given, and g in f32. Post's rows then read g.
 * So y and g of a block stay in the L2 cache: at most 16 or 32 tokens, in the copy for AMX 64. */
#include "mhc_blocks.h"

cot_status V_NAME(mhc_post_pre_fwd_tiles)(cot_queue *, const void *, void *);
cot_status V_NAME(mhc_post_pre_bwd_tiles)(cot_queue *, const void *, void *);

cot_status V_NAME(mhc_post_pre_fwd_tiles)(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(problem);
    const mhc_post_forward_problem post = mhc_post_half_forward(problem);
    return V_NAME(mhc_pre_fwd_blocks)(queue, &pre, &post, workspace);
}

/* On AMX, the f32 precision of g needs six tile products, and the AVX-512 kernel is faster. */
#if !defined(COT_MATMUL_AMX)
cot_status V_NAME(mhc_post_pre_bwd_tiles)(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_post_pre_backward_problem *p = problem;
    mhc_pre_backward_problem pre = mhc_pre_half_backward(p);
    const mhc_post_forward_problem recomputation = mhc_post_pre_recomputation(p);
    const mhc_post_backward_problem post = mhc_post_half_backward(p);
    const bool recompute = !cot_is_present(&p->args.y);
    pre.args.x.dtype = p->sizes.dtype;
    return V_NAME(mhc_pre_bwd_blocks)(queue, &pre, recompute ? &recomputation : NULL,
                                      mhc_post_pre_needs_g(&p->args) ? &post : NULL, workspace);
}
#endif
