/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_launch.c: launches of pre's backward. */
#include "mhc_launch.h"

/* clang-format off */
IMAGE(mhc_generic)
IMAGE(mhc_pre_bwd_cluster_sm90)
IMAGE(mhc_pre_bwd_f32_sm90)
IMAGE(mhc_pre_bwd_split_sm90)
IMAGE(mhc_pre_bwd_n8_sm90)
IMAGE(mhc_pre_tokens)
IMAGE(mhc_pre_mma)

static const cot_cuda_kernel pre_dx_generic[3] = BY_DTYPE(mhc_generic, mhc_pre_dx_generic);
static const cot_cuda_kernel pre_dphi_generic[3] = BY_DTYPE(mhc_generic, mhc_pre_dphi_generic);
static const cot_cuda_kernel pre_sum_parts = {cot_image_mhc_generic, "mhc_pre_sum_parts", 0};
static const cot_cuda_kernel pre_token_sums = {cot_image_mhc_generic, "mhc_pre_token_sums", 0};
static const cot_cuda_kernel pre_records[3] = BY_DTYPE(mhc_pre_tokens, mhc_pre_records);
static const cot_cuda_kernel pre_records_any[3] = BY_DTYPE(mhc_pre_tokens, mhc_pre_records_any);
#define DX_BYTES(element, M) \
    MHC_CUDA_MMA_TERMS * MHC_CUDA_MMA_ROWS(M) * (MHC_CUDA_MMA_COLUMNS + 8) * 2
#define DPHI_BYTES(element, M) \
    MHC_CUDA_MMA_STAGES(MHC_CUDA_MMA_DPHI_STAGE(element, M)) * MHC_CUDA_MMA_DPHI_STAGE(element, M)
static const cot_cuda_kernel pre_mma_dx[3][3] = MMA(mhc_pre_mma_dx, DX_BYTES);
static const cot_cuda_kernel pre_mma_dphi[3][3] = MMA(mhc_pre_mma_dphi, DPHI_BYTES);
static const cot_cuda_kernel pre_bwd_split[2] = HOPPER(mhc_pre_bwd_split_sm90, mhc_pre_bwd_split_sm90);
static const cot_cuda_kernel pre_bwd_one_pass = {cot_image_mhc_pre_bwd_split_sm90, "mhc_pre_bwd_one_pass_sm90_bf16",
                                             MHC_SM90_SHARED_BYTES};
static const cot_cuda_kernel pre_bwd_split_post[2] = HOPPER(mhc_pre_bwd_split_sm90, mhc_pre_bwd_split_post_sm90);
#define PRE_BWD_N8(name) {cot_image_mhc_pre_bwd_n8_sm90, "mhc_pre_bwd_n8_" #name "sm90_bf16", MHC_SM90_SHARED_BYTES}
/* By dx_post's presence and whether dx is f32. */
static const cot_cuda_kernel pre_bwd_n8[2][2] = {{PRE_BWD_N8(), PRE_BWD_N8(f32_)}, {PRE_BWD_N8(post_), PRE_BWD_N8(post_f32_)}};
#define PRE_BWD(stem) BY_BLOCKS(mhc_pre_bwd_cluster_sm90, stem)
#define PRE_BWD_F32(stem) BY_BLOCKS(mhc_pre_bwd_f32_sm90, stem)
/* By n (2, 4), dtype (f32, f16, bf16) and the blocks of a cluster. */
#define PRE_BWD_CLUSTERS(stem)                                                     \
    {{PRE_BWD_F32(stem##_n2_f32), PRE_BWD(stem##_n2_f16), PRE_BWD(stem##_n2_bf16)}, \
     {PRE_BWD_F32(stem##_f32), PRE_BWD(stem##_f16), PRE_BWD(stem##_bf16)}}
static const cot_cuda_kernel pre_bwd_clusters[2][3][3] = PRE_BWD_CLUSTERS(mhc_pre_bwd_cluster_sm90);
static const cot_cuda_kernel pre_bwd_clusters_post[2][3][3] = PRE_BWD_CLUSTERS(mhc_pre_bwd_cluster_post_sm90);
/* By n (2, 4), dtype (f16, bf16) and the blocks of a cluster. */
static const cot_cuda_kernel pre_bwd_clusters_records[2][2][3] = {
    {PRE_BWD(mhc_pre_bwd_cluster_records_sm90_n2_f16), PRE_BWD(mhc_pre_bwd_cluster_records_sm90_n2_bf16)},
    {PRE_BWD(mhc_pre_bwd_cluster_records_sm90_f16), PRE_BWD(mhc_pre_bwd_cluster_records_sm90_bf16)}};
static const cot_cuda_kernel pre_bwd_wide_records = {cot_image_mhc_pre_bwd_cluster_sm90,
                                                 "mhc_pre_bwd_cluster_records_wide_sm90_bf16", MHC_SM90_SHARED_BYTES};
/* n = 4, by dtype (f16, bf16) and the blocks of a cluster. */
static const cot_cuda_kernel post_pre_bwd_clusters_records[2][3] = {
    PRE_BWD(mhc_post_pre_bwd_cluster_records_sm90_f16), PRE_BWD(mhc_post_pre_bwd_cluster_records_sm90_bf16)};
/* clang-format on */

static mhc_call pre_backward_call(const cot_queue *queue, const mhc_pre_backward_problem *p, void *workspace)
{
    const cot_mhc_pre_backward_args *a = &p->args;
    const mhc_cuda_layout *layout = queue->plan;
    char *base = workspace;
    mhc_call c = init_call(&p->sizes);
    c.hc_eps = (float)a->hc_eps;
    c.post_scale = (float)a->post_scale;
    c.sinkhorn_eps = (float)a->sinkhorn_eps;
    c.iterations = mhc_pre_iterations(a);
    c.accumulate = a->accumulate;
    c.x = make_array(&a->x);
    c.phi = make_array(&a->phi);
    c.alpha = make_array(&a->alpha);
    c.bias = make_array(&a->bias);
    c.gamma = make_array(&a->gamma);
    c.inv_rms = make_array(&a->inv_rms);
    c.h_mix = make_array(&a->h_mix);
    c.h_pre = make_array(&a->h_pre);
    c.h_post = make_array(&a->h_post);
    c.dh_in = make_array(&a->dh_in);
    c.dh_post = make_array(&a->dh_post);
    c.dh_res_logits = make_array(&a->dh_res_logits);
    c.dh_res = make_array(&a->dh_res);
    c.dx_post = make_array(&a->dx_post);
    c.dx = make_array(&a->dx);
    c.f32_dx = a->dx.dtype == COT_F32;
    c.dphi = make_array(&a->dphi);
    c.dalpha = make_array(&a->dalpha);
    c.dbias = make_array(&a->dbias);
    c.dgamma = make_array(&a->dgamma);
    c.dz = (float *)(base + layout->dz);
    c.dh_mix = (float *)(base + layout->dh_mix);
    c.factor = (float *)(base + layout->factor);
    c.records = (mhc_token_record *)(base + layout->records);
    c.counters = (uint32_t *)(base + layout->counters);
    c.history = (float *)(base + layout->history);
    c.dphi_parts = (float *)(base + layout->dphi_parts);
    c.token_sums = (double *)(base + layout->token_sums);
    c.dphi_part_scale = 1;
    c.parts = layout->parts;
    c.token_parts = layout->token_parts;
    c.part_length = layout->part_length;
    return c;
}

/* Computes the parameters' gradients from the sums of the parts. */
static cot_status launch_sum_parts(cot_queue *queue, const mhc_call *c)
{
    const bool any_gradient =
        c->dphi.data != NULL || c->dgamma.data != NULL || c->dbias.data != NULL || c->dalpha.data != NULL;
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)(cot_ceil_div(c->n * c->D, MHC_CUDA_SUM_COLUMNS) + 2), 1, 1},
        .threads = MHC_CUDA_THREADS,
        .dependent = true,
    };
    return any_gradient ? cot_cuda_launch(queue, &pre_sum_parts, &grid, c) : COT_OK;
}

/* dz, dh_mix and c of all tokens, and their records if c->records is not null. Then the sums of dz over parts of the
 * tokens. */
static cot_status launch_records(cot_queue *queue, const mhc_call *c, const mhc_sizes *sizes, bool vectorized)
{
    const int64_t tile = c->records != NULL ? MHC_SM90_TILE : c->mix_tile > 0 ? c->mix_tile : 1;
    if (c->dh_res.data != NULL) /* otherwise the records kernel reads it from dh_post and dh_res_logits */
        CHECK(mhc_launch_dz(queue, c));
    LAUNCH(queue, &(vectorized ? pre_records : pre_records_any)[sizes->dtype - COT_F32],
           cot_ceil_div(c->tokens, tile) * tile, 1, MHC_CUDA_THREADS, c);
    if (c->dbias.data != NULL || c->dalpha.data != NULL)
        LAUNCH(queue, &pre_token_sums, c->token_parts, 1, MHC_CUDA_THREADS, c);
    return COT_OK;
}

cot_status mhc_pre_bwd_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_backward_problem *p = problem;
    const int dtype = p->sizes.dtype - COT_F32;
    mhc_call c = pre_backward_call(queue, p, workspace);
    CHECK(mhc_launch_dz(queue, &c));
    LAUNCH(queue, &pre_dx_generic[dtype], generic_blocks(cot_ceil_div(c.tokens, MHC_CUDA_TOKENS)), 1, MHC_CUDA_THREADS,
           &c);
    if (c.dphi.data != NULL || c.dgamma.data != NULL)
        LAUNCH(queue, &pre_dphi_generic[dtype], cot_ceil_div(c.n * c.D, MHC_CUDA_THREADS), c.parts, MHC_CUDA_THREADS,
               &c);
    if (c.dbias.data != NULL || c.dalpha.data != NULL)
        LAUNCH(queue, &pre_token_sums, c.token_parts, 1, MHC_CUDA_THREADS, &c);
    return launch_sum_parts(queue, &c);
}

/* The call of the kernels that multiply by the terms of phi gamma and dh_mix. */
static mhc_call pre_backward_terms_call(const cot_queue *queue, const mhc_pre_backward_problem *p, void *workspace)
{
    const mhc_cuda_layout *layout = queue->plan;
    mhc_call c = pre_backward_call(queue, p, workspace);
    c.records = NULL;
    c.dphi_part_scale = 1 / (float)MHC_CUDA_MIX_SCALE;
    c.phi_terms = (uint16_t *)((char *)workspace + layout->phi_terms);
    c.mix_terms = (uint16_t *)((char *)workspace + layout->mix_terms);
    c.term_columns = mhc_cuda_term_columns(&p->sizes);
    return c;
}

cot_status mhc_pre_bwd_tiles_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_backward_problem *p = problem;
    const cot_mhc_pre_backward_args *a = &p->args;
    const mhc_sizes *s = &p->sizes;
    mhc_call c = pre_backward_terms_call(queue, p, workspace);
    c.vectorized = mhc_rows_vectorized(problem, (const cot_tensor *const[]){&a->x, &a->dh_in, &a->dx_post, &a->dx}, 4);
    CHECK(launch_records(queue, &c, s, c.vectorized));
    const int64_t columns = mhc_cuda_mma_columns(s), tiles = cot_ceil_div(c.tokens, MHC_CUDA_MMA_TOKENS);
    if (c.dx.data != NULL && tiles > 0) {
        CHECK(mhc_launch_phi_terms(queue, &c));
        CHECK(mhc_launch_mma(queue, pre_mma_dx, s, cot_min(tiles, cot_ceil_div(MHC_CUDA_MMA_BLOCKS, columns)), columns,
                             &c));
    }
    if (c.dphi.data != NULL || c.dgamma.data != NULL)
        CHECK(mhc_launch_mma(queue, pre_mma_dphi, s, columns, c.parts, &c));
    return launch_sum_parts(queue, &c);
}

#define CLUSTER_TOKEN_PARTS(blocks) (MHC_SM90_CLUSTERS_OF(blocks) * (blocks)*MHC_SM90_OWNERS(blocks, false, 2))
_Static_assert(CLUSTER_TOKEN_PARTS(16) <= MHC_CUDA_TOKEN_PARTS && CLUSTER_TOKEN_PARTS(8) <= MHC_CUDA_TOKEN_PARTS &&
                   CLUSTER_TOKEN_PARTS(4) <= MHC_CUDA_TOKEN_PARTS,
               "the cluster kernel's sums of dz must fit in the workspace");
_Static_assert((int)MHC_SM90_BLOCKS <= (int)MHC_CUDA_TOKEN_PARTS,
               "the split kernel's sums of dz must fit in the workspace");

/* Makes the tensor maps of the tensors that are present, with boxes of `tokens` tokens and the columns of a block. dx_post
 * is ignored if dx is absent. */
static cot_status map_backward(cot_queue *queue, mhc_mapped_call *mapped, const mhc_pre_backward_problem *p, int tokens,
                               int columns)
{
    const cot_mhc_pre_backward_args *a = &p->args;
    const bool dx = cot_is_present(&a->dx), post = dx && cot_is_present(&a->dx_post);
    const int chunks = columns * (int)cot_dtype_size(p->sizes.dtype) / 128;
    const mhc_tile_box all_streams = {chunks, tokens, mapped->call.n}, one_stream = {chunks, tokens, 1};
    CHECK(mhc_make_tile_map(queue, &mapped->x, &p->sizes, &a->x, all_streams));
    CHECK(mhc_make_tile_map(queue, &mapped->dh_in, &p->sizes, &a->dh_in, one_stream));
    if (dx)
        CHECK(mhc_make_tile_map(queue, &mapped->dx, &p->sizes, &a->dx, all_streams));
    if (post)
        CHECK(mhc_make_tile_map(queue, &mapped->dx_post, &p->sizes, &a->dx_post, one_stream));
    else
        mapped->call.dx_post.data = NULL;
    return COT_OK;
}

/* Whether the data pointers of x, dh_in, dx and dx_post are aligned as TMA requires. */
static bool backward_is_aligned(const cot_mhc_pre_backward_args *a)
{
    return is_aligned(&a->x, 16) && is_aligned(&a->dh_in, 16) && is_aligned(&a->dx, 16) && is_aligned(&a->dx_post, 16);
}

/* The arguments of the cluster kernel that computes y from x and f of post. call: all other arguments. */
static cot_status make_records_call(cot_queue *queue, mhc_post_pre_records_call *records, const mhc_call *call,
                                    const mhc_pre_backward_problem *pre, const mhc_post_forward_problem *post)
{
    const mhc_tile_box all_streams = {MHC_SM90_BLOCK_CHUNKS, MHC_SM90_TILE, MHC_SM90_N},
                       one_stream = {MHC_SM90_BLOCK_CHUNKS, MHC_SM90_TILE, 1};
    records->call = *call;
    records->h_post = make_array(&post->args.h_post);
    records->h_res = make_array(&post->args.h_res);
    CHECK(mhc_make_tile_map(queue, &records->x, &pre->sizes, &post->args.x, all_streams));
    CHECK(mhc_make_tile_map(queue, &records->f, &pre->sizes, &post->args.f, one_stream));
    return mhc_make_tile_map(queue, &records->dh_in, &pre->sizes, &pre->args.dh_in, one_stream);
}

/* With keep_records, dx is absent, and the records of all tokens are stored in the workspace. With post, x is computed
 * from the x and f of post. */
static cot_status backward_cluster(cot_queue *queue, const mhc_pre_backward_problem *p, void *workspace,
                                   bool keep_records, const mhc_post_forward_problem *post)
{
    mhc_post_pre_records_call records;
    const cot_mhc_pre_backward_args *a = &p->args;
    mhc_mapped_call mapped = {.call = pre_backward_call(queue, p, workspace)};
    mhc_call *c = &mapped.call;
    if (!backward_is_aligned(a))
        return mhc_pre_bwd_generic_sm80(queue, p, workspace);
    if (c->tokens == 0)
        return launch_sum_parts(queue, c);
    c->dphi_part_scale = 1 / (float)MHC_CUDA_MIX_SCALE;
    const bool wide = mhc_sm90_is_wide(&p->sizes); /* then without dx and post */
    const int cluster_blocks = mhc_sm90_cluster_blocks(&p->sizes), tile = mhc_sm90_bwd_tile(&p->sizes);
    c->parts = cluster_count(c, tile, cluster_blocks);
    if (c->dh_res.data != NULL)
        CHECK(mhc_launch_dz(queue, c));
    else
        c->dz = NULL; /* the owner warps read it from dh_post and dh_res_logits */
    if (post == NULL)
        CHECK(map_backward(queue, &mapped, p, tile, wide ? MHC_SM90_WIDE_COLUMNS : MHC_SM90_COLUMNS_OF(c->n)));
    c->token_parts = c->parts * cluster_blocks *
                     MHC_SM90_OWNERS(cluster_blocks, c->dx_post.data != NULL || wide, cot_dtype_size(p->sizes.dtype));
    const int dtype = p->sizes.dtype - COT_F32;
    if (post != NULL)
        CHECK(make_records_call(queue, &records, c, p, post));
    const cot_cuda_kernel *kernels = post != NULL   ? post_pre_bwd_clusters_records[p->sizes.dtype - COT_F16]
                                     : keep_records ? pre_bwd_clusters_records[c->n == 4][p->sizes.dtype - COT_F16]
                                     : c->dx_post.data != NULL ? pre_bwd_clusters_post[c->n == 4][dtype]
                                                               : pre_bwd_clusters[c->n == 4][dtype];
    const cot_cuda_kernel *kernel = wide ? &pre_bwd_wide_records : &kernels[cluster_index(cluster_blocks)];
    CHECK(mhc_launch_clusters(queue, kernel, cluster_blocks, tile, MHC_SM90_BWD_THREADS, c->dh_res.data != NULL, c,
                              post != NULL ? (const void *)&records : &mapped));
    return launch_sum_parts(queue, c);
}

cot_status mhc_pre_bwd_cluster_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return backward_cluster(queue, problem, workspace, false, NULL);
}

cot_status mhc_pre_bwd_f32_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_backward_problem *p = problem;
    return backward_is_aligned(&p->args) ? backward_cluster(queue, p, workspace, false, NULL)
                                         : mhc_pre_bwd_tiles_sm80(queue, p, workspace);
}

/* One kernel does everything except the sums over the parts. It has one block for each multiprocessor. */
static cot_status launch_one_pass(cot_queue *queue, mhc_mapped_call *mapped, const mhc_sizes *sizes)
{
    mhc_call *c = &mapped->call;
    const cot_cuda_grid grid = {
        .blocks = {MHC_SM90_BLOCKS, 1, 1},
        .threads = MHC_SM90_BWD_THREADS,
        .shared_bytes = MHC_SM90_SHARED_BYTES,
        .dependent = true,
    };
    c->slices = mhc_sm90_slices(sizes);
    c->token_parts = MHC_SM90_BLOCKS;
    c->counter_count = (int32_t)(MHC_SM90_RECORD_COUNTS + cot_ceil_div(c->tokens, MHC_SM90_TILE));
    CHECK(mhc_launch_dz(queue, c)); /* it also clears the counters, so it is launched without dh_res too */
    CHECK(cot_cuda_launch(queue, &pre_bwd_one_pass, &grid, mapped));
    return launch_sum_parts(queue, c);
}

cot_status mhc_pre_bwd_split_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_backward_problem *p = problem;
    const cot_mhc_pre_backward_args *a = &p->args;
    mhc_mapped_call mapped = {.call = pre_backward_call(queue, p, workspace)};
    mhc_call *c = &mapped.call;
    if (!backward_is_aligned(a))
        return mhc_pre_bwd_generic_sm80(queue, problem, workspace);
    c->dphi_part_scale = 1 / (float)MHC_CUDA_MIX_SCALE;
    c->parts = ((const mhc_cuda_layout *)queue->plan)->split_parts;
    if (c->tokens == 0)
        return launch_sum_parts(queue, c);
    CHECK(map_backward(queue, &mapped, p, MHC_SM90_TILE, MHC_SM90_COLUMNS));
    if (c->D > MHC_SM90_ONE_PASS_ABOVE_D && p->sizes.dtype == COT_BF16 && c->dx_post.data == NULL)
        return launch_one_pass(queue, &mapped, &p->sizes);
    CHECK(launch_records(queue, c, &p->sizes, true));
    CHECK(mhc_launch_slices(queue,
                            &(c->dx_post.data != NULL ? pre_bwd_split_post : pre_bwd_split)[p->sizes.dtype - COT_F16],
                            MHC_SM90_BWD_THREADS, true, mhc_sm90_slices(&p->sizes), c->parts, &mapped));
    return launch_sum_parts(queue, c);
}

cot_status mhc_pre_bwd_n8_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_backward_problem *p = problem;
    const cot_mhc_pre_backward_args *a = &p->args;
    const mhc_sizes *s = &p->sizes;
    const mhc_tile_box panel = {1, MHC_SM90_N8_TILE, 1};
    mhc_n8_call n8 = {.call = pre_backward_terms_call(queue, p, workspace)};
    mhc_call *c = &n8.call;
    if (!backward_is_aligned(a))
        return mhc_pre_bwd_tiles_sm80(queue, problem, workspace);
    c->parts = ((const mhc_cuda_layout *)queue->plan)->split_parts;
    c->mix_tile = MHC_SM90_N8_TILE;
    if (c->tokens == 0)
        return launch_sum_parts(queue, c);
    const bool post = c->dx.data != NULL && c->dx_post.data != NULL;
    if (!post)
        c->dx_post.data = NULL;
    CHECK(launch_records(queue, c, s, true));
    CHECK(mhc_launch_phi_terms(queue, c));
    CHECK(mhc_map_phi_terms(queue, &n8.phi, c, MHC_SM90_N8_ROWS));
    const cot_tensor *const tensors[] = {&a->x, &a->dh_in, &a->dx, &a->dx_post};
    CUtensorMap *const maps[] = {&n8.x, &n8.dh_in, &n8.dx, &n8.dx_post};
    for (int i = 0; i < COUNT(maps); i++)
        if (cot_is_present(tensors[i]) && tensors[i]->dtype == s->dtype)
            CHECK(mhc_make_tile_map(queue, maps[i], s, tensors[i], panel));
    const cot_cuda_kernel *kernel = &pre_bwd_n8[post][c->f32_dx];
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)mhc_sm90_n8_slices(s), (unsigned)c->parts, 1},
        .threads = MHC_SM90_N8_THREADS,
        .shared_bytes = (unsigned)kernel->shared_bytes,
    };
    CHECK(cot_cuda_launch(queue, kernel, &grid, &n8));
    return launch_sum_parts(queue, c);
}

/* The gradients of the parameters and the records of all tokens, for tensors whose data is not aligned. */
static cot_status launch_any_records(cot_queue *queue, const mhc_pre_backward_problem *p, void *workspace)
{
    mhc_call c = pre_backward_call(queue, p, workspace);
    CHECK(launch_records(queue, &c, &p->sizes, false));
    if (c.dphi.data != NULL || c.dgamma.data != NULL)
        LAUNCH(queue, &pre_dphi_generic[p->sizes.dtype - COT_F32], cot_ceil_div(c.n * c.D, MHC_CUDA_THREADS), c.parts,
               MHC_CUDA_THREADS, &c);
    return launch_sum_parts(queue, &c);
}

cot_status mhc_pre_backward_records(cot_queue *queue, const mhc_pre_backward_problem *p, void *workspace, bool split)
{
    if (!backward_is_aligned(&p->args))
        return launch_any_records(queue, p, workspace);
    return split ? mhc_pre_bwd_split_sm90(queue, p, workspace) : backward_cluster(queue, p, workspace, true, NULL);
}

cot_status mhc_pre_backward_records_from_post(cot_queue *queue, const mhc_pre_backward_problem *p,
                                              const mhc_post_forward_problem *post, void *workspace)
{
    return backward_cluster(queue, p, workspace, true, post);
}
