/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_fwd_launch.c: launches of pre's forward. */
#include "mhc_launch.h"

/* clang-format off */
IMAGE(mhc_generic)
IMAGE(mhc_pre_fwd_sm90)
IMAGE(mhc_pre_fwd_n8_sm90)
IMAGE(mhc_pre_tokens)
IMAGE(mhc_pre_mma)

static const cot_cuda_kernel pre_forward_generic[3] = BY_DTYPE(mhc_generic, mhc_pre_fwd_generic);
static const cot_cuda_kernel pre_epilogue[3] = BY_DTYPE(mhc_pre_tokens, mhc_pre_epilogue);
static const cot_cuda_kernel pre_epilogue_any[3] = BY_DTYPE(mhc_pre_tokens, mhc_pre_epilogue_any);
#define PROJECT_BYTES(element, M) \
    MHC_CUDA_MMA_STAGES(MHC_CUDA_MMA_PROJECT_STAGE(element, M)) * MHC_CUDA_MMA_PROJECT_STAGE(element, M)
static const cot_cuda_kernel pre_mma_project[3][3] = MMA(mhc_pre_mma_project, PROJECT_BYTES);
#define PRE_FWD(name) BY_BLOCKS(mhc_pre_fwd_sm90, mhc_pre_fwd_cluster_sm90_##name)
/* By n (2, 4), dtype (f32, f16, bf16) and the blocks of a cluster. */
static const cot_cuda_kernel pre_fwd_clusters[2][3][3] = {{PRE_FWD(n2_f32), PRE_FWD(n2_f16), PRE_FWD(n2_bf16)},
                                                      {PRE_FWD(f32), PRE_FWD(f16), PRE_FWD(bf16)}};
static const cot_cuda_kernel pre_fwd_wide[2] = HOPPER(mhc_pre_fwd_sm90, mhc_pre_fwd_wide_sm90);
static const cot_cuda_kernel pre_fwd_split[2] = HOPPER(mhc_pre_fwd_sm90, mhc_pre_fwd_split_sm90);
static const cot_cuda_kernel pre_fwd_n8 = {cot_image_mhc_pre_fwd_n8_sm90, "mhc_pre_fwd_n8_sm90_bf16", MHC_SM90_SHARED_BYTES};
/* clang-format on */

mhc_call mhc_pre_forward_call(const mhc_pre_forward_problem *p)
{
    const cot_mhc_pre_forward_args *a = &p->args;
    mhc_call c = init_call(&p->sizes);
    c.norm_eps = (float)a->norm_eps;
    c.hc_eps = (float)a->hc_eps;
    c.post_scale = (float)a->post_scale;
    c.sinkhorn_eps = (float)a->sinkhorn_eps;
    c.iterations = a->sinkhorn_iterations;
    c.x = make_array(&a->x);
    c.phi = make_array(&a->phi);
    c.alpha = make_array(&a->alpha);
    c.bias = make_array(&a->bias);
    c.gamma = make_array(&a->gamma);
    c.h_in = make_array(&a->h_in);
    c.h_pre = make_array(&a->h_pre);
    c.h_post = make_array(&a->h_post);
    c.h_res_logits = make_array(&a->h_res_logits);
    c.h_res = make_array(&a->h_res);
    c.inv_rms = make_array(&a->inv_rms);
    c.h_mix = make_array(&a->h_mix);
    return c;
}

cot_status mhc_pre_fwd_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_forward_problem *p = problem;
    mhc_call c = mhc_pre_forward_call(p);
    c.logits = c.h_res.data != NULL ? workspace : NULL;
    LAUNCH(queue, &pre_forward_generic[p->sizes.dtype - COT_F32],
           generic_blocks(cot_ceil_div(c.tokens, MHC_CUDA_TOKENS)), 1, MHC_CUDA_THREADS, &c);
    return mhc_launch_fused_sinkhorn(queue, &c);
}

/* Computes the coefficients and h_in from the slices' sums, then h_res. */
static cot_status launch_finish(cot_queue *queue, mhc_call *c, const mhc_sizes *sizes, bool vectorized)
{
    LAUNCH(queue, &(vectorized ? pre_epilogue : pre_epilogue_any)[sizes->dtype - COT_F32], c->tokens, 1,
           MHC_CUDA_THREADS, c);
    return mhc_launch_fused_sinkhorn(queue, c);
}

cot_status mhc_pre_fwd_tiles_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_forward_problem *p = problem;
    const mhc_sizes *s = &p->sizes;
    const mhc_cuda_pre_fwd_plan *plan = queue->plan;
    mhc_call c = mhc_pre_forward_call(p);
    if (c.tokens == 0)
        return COT_OK;
    c.logits = c.h_res.data != NULL ? workspace : NULL;
    c.sums = (float *)((char *)workspace + plan->sums);
    c.phi_terms = (uint16_t *)((char *)workspace + plan->phi_terms);
    c.term_columns = mhc_cuda_term_columns(s);
    c.slices = plan->slices;
    c.slice_columns = (int32_t)plan->slice_columns;
    c.vectorized = mhc_rows_vectorized(problem, (const cot_tensor *const[]){&p->args.x, &p->args.h_in}, 2);
    CHECK(mhc_launch_phi_terms(queue, &c));
    CHECK(mhc_launch_mma(queue, pre_mma_project, s, cot_ceil_div(c.tokens, MHC_CUDA_MMA_TOKENS), c.slices, &c));
    return launch_finish(queue, &c, s, c.vectorized);
}

/* By clusters, or (split) by blocks that store the sums of one slice each. */
static cot_status forward_sm90(cot_queue *queue, const void *problem, void *workspace, bool split)
{
    const mhc_pre_forward_problem *p = problem;
    const cot_mhc_pre_forward_args *a = &p->args;
    mhc_mapped_call mapped = {.call = mhc_pre_forward_call(p)};
    mhc_call *c = &mapped.call;
    if (!is_aligned(&a->x, 16) || !is_aligned(&a->h_in, 16) || !is_aligned(&a->phi, 8) || !is_aligned(&a->gamma, 8))
        return mhc_pre_fwd_generic_sm80(queue, problem, workspace);
    if (c->tokens == 0)
        return COT_OK;
    c->logits = c->h_res.data != NULL ? workspace : NULL;
    if (split) {
        const mhc_cuda_pre_fwd_plan *plan = queue->plan;
        c->sums = (float *)((char *)workspace + plan->sums);
        c->slices = plan->slices;
    }
    const bool wide = !split && mhc_sm90_is_wide(&p->sizes);
    const mhc_tile_box box = mhc_sm90_fwd_box(&p->sizes, wide);
    const int cluster_blocks = mhc_sm90_cluster_blocks(&p->sizes);
    CHECK(mhc_make_tile_map(queue, &mapped.x, &p->sizes, &a->x, box));
    if (split) {
        CHECK(mhc_launch_slices(queue, &pre_fwd_split[p->sizes.dtype - COT_F16], MHC_SM90_SPLIT_THREADS, false,
                                c->slices, mhc_sm90_parts(&p->sizes), &mapped));
        return launch_finish(queue, c, &p->sizes, true);
    }
    const cot_cuda_kernel *kernel =
        wide ? &pre_fwd_wide[p->sizes.dtype - COT_F16]
             : &pre_fwd_clusters[c->n == 4][p->sizes.dtype - COT_F32][cluster_index(cluster_blocks)];
    CHECK(mhc_launch_clusters(queue, kernel, cluster_blocks, box.tokens, MHC_SM90_FWD_THREADS, false, c, &mapped));
    return mhc_launch_fused_sinkhorn(queue, c);
}

cot_status mhc_pre_fwd_cluster_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return forward_sm90(queue, problem, workspace, false);
}

cot_status mhc_pre_fwd_split_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return forward_sm90(queue, problem, workspace, true);
}

cot_status mhc_pre_fwd_n8_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_forward_problem *p = problem;
    const cot_mhc_pre_forward_args *a = &p->args;
    const mhc_sizes *s = &p->sizes;
    const mhc_cuda_pre_fwd_plan *plan = queue->plan;
    mhc_n8_call n8 = {.call = mhc_pre_forward_call(p)};
    mhc_call *c = &n8.call;
    if (!is_aligned(&a->x, 16) || !is_aligned(&a->h_in, 16))
        return mhc_pre_fwd_tiles_sm80(queue, problem, workspace);
    if (c->tokens == 0)
        return COT_OK;
    c->logits = c->h_res.data != NULL ? workspace : NULL;
    c->sums = (float *)((char *)workspace + plan->sums);
    c->phi_terms = (uint16_t *)((char *)workspace + plan->phi_terms);
    c->term_columns = mhc_cuda_term_columns(s);
    c->slices = plan->n8_slices;
    CHECK(mhc_launch_phi_terms(queue, c));
    CHECK(mhc_map_phi_terms(queue, &n8.phi, c, MHC_SM90_N8_ROWS / 2));
    CHECK(mhc_make_tile_map(queue, &n8.x, s, &a->x, (mhc_tile_box){1, MHC_SM90_N8_FWD_TILE, 1}));
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)mhc_sm90_n8_fwd_tiles(s), (unsigned)c->slices, 1},
        .threads = MHC_SM90_N8_FWD_THREADS,
        .shared_bytes = MHC_SM90_SHARED_BYTES,
        .cluster = 2,
    };
    CHECK(cot_cuda_launch(queue, &pre_fwd_n8, &grid, &n8));
    return launch_finish(queue, c, s, true);
}
