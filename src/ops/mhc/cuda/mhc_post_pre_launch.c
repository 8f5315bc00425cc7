/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_post_pre_launch.c: launches of post_pre: kernels of its own, or those of post and pre. */
#include "mhc_launch.h"

/* clang-format off */
IMAGE(mhc_pre_fwd_sm90)
IMAGE(mhc_post_pre_bwd_sm90)
IMAGE(mhc_post_pre_bwd_tokens_sm90)

#define POST_PRE_FWD(name) BY_BLOCKS(mhc_pre_fwd_sm90, mhc_post_pre_fwd_cluster_sm90_##name)
/* By n (2, 4), dtype (f32, f16, bf16) and the blocks of a cluster. */
static const cot_cuda_kernel post_pre_fwd_clusters[2][3][3] = {
    {POST_PRE_FWD(n2_f32), POST_PRE_FWD(n2_f16), POST_PRE_FWD(n2_bf16)},
    {POST_PRE_FWD(f32), POST_PRE_FWD(f16), POST_PRE_FWD(bf16)}};
static const cot_cuda_kernel post_pre_fwd_wide[2] = HOPPER(mhc_pre_fwd_sm90, mhc_post_pre_fwd_wide_sm90);
/* By n (2, 4) and dtype (f16, bf16). */
#define POST_PRE_BWD(stem) \
    {HOPPER(mhc_post_pre_bwd_sm90, stem##_n2), HOPPER(mhc_post_pre_bwd_sm90, stem)}
static const cot_cuda_kernel post_pre_bwd[2][2] = POST_PRE_BWD(mhc_post_pre_bwd_sm90);
static const cot_cuda_kernel post_pre_bwd_any[2][2] = POST_PRE_BWD(mhc_post_pre_bwd_any_sm90);
static const cot_cuda_kernel post_pre_make_operands = {cot_image_mhc_post_pre_bwd_tokens_sm90, "mhc_post_pre_make_operands", 0};
static const cot_cuda_kernel post_pre_sum_slices = {cot_image_mhc_post_pre_bwd_tokens_sm90, "mhc_post_pre_sum_slices", 0};
/* clang-format on */

cot_status mhc_post_pre_fwd_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_post_forward_problem post = mhc_post_half_forward(problem);
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(problem);
    CHECK(mhc_post_fwd_generic_sm80(queue, &post, NULL));
    return mhc_pre_fwd_generic_sm80(queue, &pre, workspace);
}

/* Post, by the kernel that supports its tensors. */
static cot_status post_forward(cot_queue *queue, const mhc_post_forward_problem *post)
{
    return admit_sm80_post_fwd(post) == NULL ? mhc_post_fwd_rows_sm80(queue, post, NULL)
                                             : mhc_post_fwd_generic_sm80(queue, post, NULL);
}

typedef cot_status direction_function(cot_queue *queue, const void *problem, void *workspace);

/* Post's forward, then pre's. */
static cot_status post_pre_forward(cot_queue *queue, const void *problem, void *workspace,
                                   direction_function *pre_forward)
{
    const mhc_post_forward_problem post = mhc_post_half_forward(problem);
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(problem);
    CHECK(post_forward(queue, &post));
    return pre_forward(queue, &pre, workspace);
}

cot_status mhc_post_pre_fwd_tiles_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return post_pre_forward(queue, problem, workspace, mhc_pre_fwd_tiles_sm80);
}

cot_status mhc_post_pre_fwd_n8_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return post_pre_forward(queue, problem, workspace, mhc_pre_fwd_n8_sm90);
}

cot_status mhc_post_pre_fwd_split_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(problem);
    return post_pre_forward(queue, problem, workspace,
                            mhc_sm90_pre_half_is_split(&pre) ? mhc_pre_fwd_split_sm90 : mhc_pre_fwd_cluster_sm90);
}

cot_status mhc_post_pre_fwd_cluster_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_post_pre_forward_problem *p = problem;
    const cot_mhc_post_pre_forward_args *a = &p->args;
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(p);
    mhc_post_pre_call post_pre = {
        .call = mhc_pre_forward_call(&pre), .h_post = make_array(&a->h_post), .h_res = make_array(&a->h_res)};
    mhc_call *c = &post_pre.call;
    if (!is_aligned(&a->x, 16) || !is_aligned(&a->f, 16) || !is_aligned(&a->y, 16) || !is_aligned(&a->h_in, 16) ||
        !is_aligned(&a->phi, 8) || !is_aligned(&a->gamma, 8))
        return mhc_post_pre_fwd_generic_sm80(queue, problem, workspace);
    if (c->tokens == 0)
        return COT_OK;
    c->logits = c->h_res.data != NULL ? workspace : NULL;
    const bool wide = mhc_sm90_is_wide(&p->sizes);
    const mhc_tile_box all_streams = mhc_sm90_fwd_box(&p->sizes, wide),
                       one_stream = {all_streams.chunks, all_streams.tokens, 1};
    const int cluster_blocks = mhc_sm90_cluster_blocks(&p->sizes);
    const cot_cuda_kernel *kernel =
        wide ? &post_pre_fwd_wide[p->sizes.dtype - COT_F16]
             : &post_pre_fwd_clusters[c->n == 4][p->sizes.dtype - COT_F32][cluster_index(cluster_blocks)];
    CHECK(mhc_make_tile_map(queue, &post_pre.x, &p->sizes, &a->x, all_streams));
    CHECK(mhc_make_tile_map(queue, &post_pre.f, &p->sizes, &a->f, one_stream));
    CHECK(mhc_make_tile_map(queue, &post_pre.y, &p->sizes, &a->y, all_streams));
    CHECK(mhc_launch_clusters(queue, kernel, cluster_blocks, all_streams.tokens, MHC_SM90_FWD_THREADS, false, c,
                              &post_pre));
    return mhc_launch_fused_sinkhorn(queue, c);
}

/* Computes y in the workspace if it is not an input. Returns y. */
static cot_status find_post_pre_y(cot_queue *queue, const mhc_post_pre_backward_problem *p, void *workspace,
                                  cot_tensor *y)
{
    const mhc_cuda_post_pre_layout *layout = queue->plan;
    *y = p->args.y;
    if (cot_is_present(y))
        return COT_OK;
    mhc_post_forward_problem post = mhc_post_pre_recomputation(p);
    post.args.y = *y = cot_tensor_contiguous((char *)workspace + layout->y, p->sizes.dtype, 4, p->args.x.shape);
    return post_forward(queue, &post);
}

/* Pre's backward, which stores g in float32, then post's backward. */
static cot_status post_pre_backward(cot_queue *queue, const mhc_post_pre_backward_problem *p, void *workspace,
                                    direction_function *pre_backward)
{
    const mhc_cuda_post_pre_layout *layout = queue->plan;
    mhc_pre_backward_problem pre = mhc_pre_half_backward(p);
    mhc_post_backward_problem post = mhc_post_half_backward(p);
    CHECK(find_post_pre_y(queue, p, workspace, &pre.args.x));
    if (mhc_post_pre_needs_g(&p->args))
        pre.args.dx = post.args.dy = cot_tensor_contiguous((char *)workspace + layout->g, COT_F32, 4, p->args.x.shape);
    CHECK(pre_backward(queue, &pre, workspace));
    if (!mhc_post_pre_needs_g(&p->args))
        return COT_OK;
    return admit_sm80_post_bwd(&post) == NULL ? mhc_post_bwd_rows_sm80(queue, &post, NULL)
                                              : mhc_post_bwd_generic_sm80(queue, &post, NULL);
}

cot_status mhc_post_pre_bwd_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return post_pre_backward(queue, problem, workspace, mhc_pre_bwd_generic_sm80);
}

cot_status mhc_post_pre_bwd_tiles_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return post_pre_backward(queue, problem, workspace, mhc_pre_bwd_tiles_sm80);
}

cot_status mhc_post_pre_bwd_n8_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return post_pre_backward(queue, problem, workspace, mhc_pre_bwd_n8_sm90);
}

cot_status mhc_post_pre_bwd_f32_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return post_pre_backward(queue, problem, workspace, mhc_pre_bwd_f32_sm90);
}

/* All gradients of post's half, from the records of all tokens. The kernel before is mhc_pre_sum_parts, if it has any
 * gradients to store. */
static cot_status launch_post_pre_data_gradients(cot_queue *queue, const mhc_post_pre_backward_problem *p,
                                                 void *workspace)
{
    const cot_mhc_post_pre_backward_args *a = &p->args;
    const mhc_cuda_post_pre_layout *layout = queue->plan;
    const mhc_post_backward_problem post = mhc_post_half_backward(p);
    mhc_post_pre_backward_call call = {.call = mhc_post_backward_call(&post)};
    mhc_call *c = &call.call;
    c->phi = make_array(&a->phi);
    c->gamma = make_array(&a->gamma);
    c->dh_in = make_array(&a->dh_in);
    c->dy = make_array(&a->dy);
    c->records = (mhc_token_record *)((char *)workspace + layout->pre.records);
    c->operands = (mhc_token_operands *)((char *)workspace + layout->operands);
    c->slices = cot_ceil_div(c->D, MHC_SM90_POST_PRE_COLUMNS);
    const bool sums = c->dh_res.data != NULL || c->dh_post.data != NULL;
    c->post_sums = sums ? (float *)((char *)workspace + layout->sums) : NULL;
    const struct {
        const cot_tensor *tensor;
        mhc_array *array;
        CUtensorMap *map;
    } rows[] = {{&a->x, &c->x, &call.x},    {&a->f, &c->f, &call.f},    {&a->dh_in, &c->dh_in, &call.dh_in},
                {&a->dy, &c->dy, &call.dy}, {&a->dx, &c->dx, &call.dx}, {&a->df, &c->df, &call.df}};
    bool aligned = true;
    for (int i = 0; i < COUNT(rows); i++) {
        aligned = aligned && is_aligned(rows[i].tensor, 16);
        if (c->T <= 1)
            rows[i].array->stride[1] = rows[i].array->stride[0]; /* the stride between all tokens */
    }
    for (int i = 0; i < COUNT(rows) && aligned; i++) {
        const mhc_tile_box box = {MHC_SM90_POST_PRE_COLUMNS / MHC_SM90_CHUNK_COLUMNS, MHC_SM90_TILE,
                                  rows[i].tensor->rank == 4 ? c->n : 1};
        if (cot_is_present(rows[i].tensor))
            CHECK(mhc_make_tile_map(queue, rows[i].map, &p->sizes, rows[i].tensor, box));
    }
    const bool sum_parts = cot_is_present(&a->dphi) || cot_is_present(&a->dgamma) || cot_is_present(&a->dbias) ||
                           cot_is_present(&a->dalpha);
    const cot_cuda_kernel *kernel = &(aligned ? post_pre_bwd : post_pre_bwd_any)[c->n == 4][p->sizes.dtype - COT_F16];
    const cot_cuda_grid operands_grid = {
        .blocks = {(unsigned)cot_ceil_div(c->tokens, MHC_CUDA_THREADS / 32), 1, 1},
        .threads = MHC_CUDA_THREADS,
        .dependent = sum_parts,
    };
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)c->slices, (unsigned)mhc_sm90_post_pre_parts(&p->sizes), 1},
        .threads = MHC_SM90_POST_PRE_THREADS,
        .shared_bytes = (unsigned)kernel->shared_bytes,
        .dependent = true,
    };
    const cot_cuda_grid slices_grid = {
        .blocks = {(unsigned)cot_ceil_div(c->tokens * MHC_CUDA_POST_SUMS(c->n), MHC_CUDA_THREADS), 1, 1},
        .threads = MHC_CUDA_THREADS,
        .dependent = true,
    };
    CHECK(cot_cuda_launch(queue, &post_pre_make_operands, &operands_grid, c));
    CHECK(cot_cuda_launch(queue, kernel, &grid, &call));
    return sums ? cot_cuda_launch(queue, &post_pre_sum_slices, &slices_grid, c) : COT_OK;
}

/* Whether the cluster kernel of the records may compute y. */
static bool records_from_post(const mhc_post_pre_backward_problem *p, bool split)
{
    const cot_mhc_post_pre_backward_args *a = &p->args;
    return !split && p->sizes.n == MHC_SM90_N && !mhc_sm90_is_wide(&p->sizes) && !cot_is_present(&a->y) &&
           is_aligned(&a->x, 16) && is_aligned(&a->f, 16) && is_aligned(&a->dh_in, 16) &&
           mhc_cuda_uniform_token_stride(&a->h_res) && mhc_cuda_uniform_token_stride(&a->h_post);
}

static cot_status post_pre_backward_sm90(cot_queue *queue, const mhc_post_pre_backward_problem *p, void *workspace,
                                         bool split)
{
    mhc_pre_backward_problem pre = mhc_pre_half_backward(p);
    pre.args.dx_post = (cot_tensor){0};
    if (records_from_post(p, split)) {
        const mhc_post_forward_problem post = mhc_post_pre_recomputation(p);
        CHECK(mhc_pre_backward_records_from_post(queue, &pre, &post, workspace));
    } else {
        CHECK(find_post_pre_y(queue, p, workspace, &pre.args.x));
        CHECK(mhc_pre_backward_records(queue, &pre, workspace, split));
    }
    if (p->sizes.tokens == 0 || !mhc_post_pre_needs_g(&p->args))
        return COT_OK;
    return launch_post_pre_data_gradients(queue, p, workspace);
}

cot_status mhc_post_pre_bwd_cluster_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return post_pre_backward_sm90(queue, problem, workspace, false);
}

cot_status mhc_post_pre_bwd_split_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return post_pre_backward_sm90(queue, problem, workspace, true);
}
