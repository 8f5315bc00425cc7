/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_launch.c: host side of the CUDA kernels: which kernels a call launches, and with what grids. */
#include "../mhc_admit.h"
#include "mhc_admit.h"

#include "cuda/device.h"

#include "core/op_tables.h"

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "../mhc_pre_kernels.def"
#include "../mhc_sinkhorn_kernels.def"
#include "../mhc_post_kernels.def"
#include "../mhc_post_pre_kernels.def"
#undef COT_KERNEL_ENTRY

/* Returns from the caller on the first launch that fails. A grid without blocks is skipped. */
#define LAUNCH(queue, kernel, x, y, threads_, call)                                                                 \
    do {                                                                                                            \
        const cot_cuda_grid grid_ = {.blocks = {(unsigned)(x), (unsigned)(y), 1}, .threads = (unsigned)(threads_)}; \
        const cot_status status_ =                                                                                  \
            grid_.blocks[0] * grid_.blocks[1] == 0 ? COT_OK : cot_cuda_launch(queue, kernel, &grid_, call);         \
        if (status_ != COT_OK)                                                                                      \
            return status_;                                                                                         \
    } while (0)

/* ---- kernels ----------------------------------------------------------------------------------------- */

/* clang-format off */
#define IMAGE(stem) extern const unsigned char cot_image_##stem[];
IMAGE(mhc_generic)
IMAGE(mhc_pre_fwd_sm90)
IMAGE(mhc_pre_fwd_n8_sm90)
IMAGE(mhc_pre_bwd_cluster_sm90)
IMAGE(mhc_pre_bwd_f32_sm90)
IMAGE(mhc_pre_bwd_split_sm90)
IMAGE(mhc_pre_bwd_n8_sm90)
IMAGE(mhc_pre_tokens)
IMAGE(mhc_pre_mma)
IMAGE(mhc_post)
IMAGE(mhc_post_pre_bwd_sm90)
IMAGE(mhc_sinkhorn)

/* Indexed by dtype: f32, f16 and bf16 are 1, 2 and 3 in cot_dtype. */
#define BY_DTYPE(image, stem) \
    {{cot_image_##image, #stem "_f32", 0}, {cot_image_##image, #stem "_f16", 0}, {cot_image_##image, #stem "_bf16", 0}}
/* Indexed by dtype: f16, bf16. */
#define BY_HALF_DTYPE(image, stem) {{cot_image_##image, #stem "_f16", 0}, {cot_image_##image, #stem "_bf16", 0}}
/* Indexed by n - 1. */
#define BY_N(image, stem) \
    {{cot_image_##image, #stem "_n1", 0}, {cot_image_##image, #stem "_n2", 0}, {cot_image_##image, #stem "_n3", 0}, \
     {cot_image_##image, #stem "_n4", 0}, {cot_image_##image, #stem "_n5", 0}, {cot_image_##image, #stem "_n6", 0}, \
     {cot_image_##image, #stem "_n7", 0}, {cot_image_##image, #stem "_n8", 0}}
#define BY_N_AND_DTYPE(image, stem) \
    {BY_DTYPE(image, stem##_n1), BY_DTYPE(image, stem##_n2), BY_DTYPE(image, stem##_n3), BY_DTYPE(image, stem##_n4), \
     BY_DTYPE(image, stem##_n5), BY_DTYPE(image, stem##_n6), BY_DTYPE(image, stem##_n7), BY_DTYPE(image, stem##_n8)}
#define BY_N_AND_HALF_DTYPE(image, stem) \
    {BY_HALF_DTYPE(image, stem##_n1), BY_HALF_DTYPE(image, stem##_n2), BY_HALF_DTYPE(image, stem##_n3), \
     BY_HALF_DTYPE(image, stem##_n4), BY_HALF_DTYPE(image, stem##_n5), BY_HALF_DTYPE(image, stem##_n6), \
     BY_HALF_DTYPE(image, stem##_n7), BY_HALF_DTYPE(image, stem##_n8)}

static const cot_cuda_kernel pre_forward_generic[3] = BY_DTYPE(mhc_generic, mhc_pre_fwd_generic);
static const cot_cuda_kernel pre_dx_generic[3] = BY_DTYPE(mhc_generic, mhc_pre_dx_generic);
static const cot_cuda_kernel pre_dphi_generic[3] = BY_DTYPE(mhc_generic, mhc_pre_dphi_generic);
static const cot_cuda_kernel post_forward_generic[3] = BY_DTYPE(mhc_generic, mhc_post_fwd_generic);
static const cot_cuda_kernel post_backward_generic[3] = BY_DTYPE(mhc_generic, mhc_post_bwd_generic);
static const cot_cuda_kernel post_backward_f32_generic[2] = BY_HALF_DTYPE(mhc_generic, mhc_post_bwd_f32_generic);
static const cot_cuda_kernel pre_sum_parts = {cot_image_mhc_generic, "mhc_pre_sum_parts", 0};
static const cot_cuda_kernel pre_token_sums = {cot_image_mhc_generic, "mhc_pre_token_sums", 0};
static const cot_cuda_kernel sinkhorn_forward[8] = BY_N(mhc_sinkhorn, mhc_sinkhorn_fwd);
static const cot_cuda_kernel sinkhorn_backward[8] = BY_N(mhc_sinkhorn, mhc_sinkhorn_bwd);
static const cot_cuda_kernel pre_dz[8] = BY_N(mhc_sinkhorn, mhc_pre_dz);
static const cot_cuda_kernel post_forward[8][3] = BY_N_AND_DTYPE(mhc_post, mhc_post_fwd);
static const cot_cuda_kernel post_backward[8][3] = BY_N_AND_DTYPE(mhc_post, mhc_post_bwd);
static const cot_cuda_kernel post_backward_f32[8][2] = BY_N_AND_HALF_DTYPE(mhc_post, mhc_post_bwd_f32);
static const cot_cuda_kernel pre_epilogue[3] = BY_DTYPE(mhc_pre_tokens, mhc_pre_epilogue);
static const cot_cuda_kernel pre_epilogue_any[3] = BY_DTYPE(mhc_pre_tokens, mhc_pre_epilogue_any);
static const cot_cuda_kernel pre_records[3] = BY_DTYPE(mhc_pre_tokens, mhc_pre_records);
static const cot_cuda_kernel pre_records_any[3] = BY_DTYPE(mhc_pre_tokens, mhc_pre_records_any);

/* Tensor-core kernels for any GPU, indexed by the class of n and by dtype: f32, f16, bf16. */
#define PROJECT_BYTES(element, M) \
    MHC_CUDA_MMA_STAGES(MHC_CUDA_MMA_PROJECT_STAGE(element, M)) * MHC_CUDA_MMA_PROJECT_STAGE(element, M)
#define DX_BYTES(element, M) \
    MHC_CUDA_MMA_TERMS * MHC_CUDA_MMA_ROWS(M) * (MHC_CUDA_MMA_COLUMNS + 8) * 2
#define DPHI_BYTES(element, M) \
    MHC_CUDA_MMA_STAGES(MHC_CUDA_MMA_DPHI_STAGE(element, M)) * MHC_CUDA_MMA_DPHI_STAGE(element, M)
#define MMA_BY_DTYPE(stem, bytes, M) \
    {{cot_image_mhc_pre_mma, #stem "_f32", bytes(4, M)}, {cot_image_mhc_pre_mma, #stem "_f16", bytes(2, M)}, \
     {cot_image_mhc_pre_mma, #stem "_bf16", bytes(2, M)}}
#define MMA(stem, bytes) \
    {MMA_BY_DTYPE(stem##_n2, bytes, 8), MMA_BY_DTYPE(stem##_n4, bytes, 24), MMA_BY_DTYPE(stem##_n8, bytes, 80)}
static const cot_cuda_kernel pre_mma_split = {cot_image_mhc_pre_mma, "mhc_pre_mma_split", 0};
static const cot_cuda_kernel pre_mma_project[3][3] = MMA(mhc_pre_mma_project, PROJECT_BYTES);
static const cot_cuda_kernel pre_mma_dx[3][3] = MMA(mhc_pre_mma_dx, DX_BYTES);
static const cot_cuda_kernel pre_mma_dphi[3][3] = MMA(mhc_pre_mma_dphi, DPHI_BYTES);

/* Hopper kernels, indexed by dtype: f16, bf16. */
#define HOPPER(image, stem) \
    {{cot_image_##image, #stem "_f16", MHC_SM90_SHARED_BYTES}, {cot_image_##image, #stem "_bf16", MHC_SM90_SHARED_BYTES}}
/* By the blocks of a cluster: see cluster_index. */
#define BY_BLOCKS(image, stem)                                            \
    {{cot_image_##image, #stem "_blocks4", MHC_SM90_SHARED_BYTES},        \
     {cot_image_##image, #stem "_blocks8", MHC_SM90_SHARED_BYTES},        \
     {cot_image_##image, #stem, MHC_SM90_SHARED_BYTES}}
#define PRE_FWD(name) BY_BLOCKS(mhc_pre_fwd_sm90, mhc_pre_fwd_cluster_sm90_##name)
/* By n (2, 4), dtype (f32, f16, bf16) and the blocks of a cluster. */
static const cot_cuda_kernel pre_fwd_clusters[2][3][3] = {{PRE_FWD(n2_f32), PRE_FWD(n2_f16), PRE_FWD(n2_bf16)},
                                                      {PRE_FWD(f32), PRE_FWD(f16), PRE_FWD(bf16)}};
static const cot_cuda_kernel pre_fwd_wide[2] = HOPPER(mhc_pre_fwd_sm90, mhc_pre_fwd_wide_sm90);
static const cot_cuda_kernel pre_fwd_split[2] = HOPPER(mhc_pre_fwd_sm90, mhc_pre_fwd_split_sm90);
static const cot_cuda_kernel pre_fwd_n8 = {cot_image_mhc_pre_fwd_n8_sm90, "mhc_pre_fwd_n8_sm90_bf16", MHC_SM90_SHARED_BYTES};
/* By dtype (f16, bf16) and the blocks of a cluster. */
static const cot_cuda_kernel post_pre_fwd_clusters[2][3] = {
    BY_BLOCKS(mhc_pre_fwd_sm90, mhc_post_pre_fwd_cluster_sm90_f16),
    BY_BLOCKS(mhc_pre_fwd_sm90, mhc_post_pre_fwd_cluster_sm90_bf16)};
static const cot_cuda_kernel post_pre_bwd[2] = HOPPER(mhc_post_pre_bwd_sm90, mhc_post_pre_bwd_sm90);
static const cot_cuda_kernel post_pre_bwd_any[2] = HOPPER(mhc_post_pre_bwd_sm90, mhc_post_pre_bwd_any_sm90);
static const cot_cuda_kernel post_pre_sum_slices = {cot_image_mhc_post_pre_bwd_sm90, "mhc_post_pre_sum_slices", 0};
static const cot_cuda_kernel pre_bwd_split[2] = HOPPER(mhc_pre_bwd_split_sm90, mhc_pre_bwd_split_sm90);
static const cot_cuda_kernel pre_bwd_one_pass = {cot_image_mhc_pre_bwd_split_sm90, "mhc_pre_bwd_one_pass_sm90_bf16",
                                             MHC_SM90_SHARED_BYTES};
static const cot_cuda_kernel pre_bwd_one_pass_init = {cot_image_mhc_pre_bwd_split_sm90, "mhc_pre_bwd_one_pass_init", 0};
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
static const cot_cuda_kernel pre_bwd_clusters_records[3] = PRE_BWD(mhc_pre_bwd_cluster_records_sm90_bf16);
/* clang-format on */

/* ---- arguments ---------------------------------------------------------------------------------------- */

static mhc_array make_array(const cot_tensor *tensor)
{
    mhc_array a = {.data = cot_is_present(tensor) ? tensor->data : NULL};
    for (int axis = 0; axis < tensor->rank && axis < 4; axis++)
        a.stride[axis] = tensor->stride[axis];
    return a;
}

static mhc_call init_call(const mhc_sizes *s)
{
    return (mhc_call){.tokens = s->tokens, .T = s->T, .D = s->D, .n = (int32_t)s->n};
}

static int64_t token_blocks(const mhc_call *c)
{
    return cot_ceil_div(c->tokens, MHC_CUDA_TOKEN_THREADS);
}

/* The generic kernels have grid-stride loops, so the grid may be smaller than the work. */
static int64_t generic_blocks(int64_t blocks)
{
    return blocks < INT32_MAX ? blocks : INT32_MAX;
}

static bool all_aligned(const mhc_array *arrays, int count)
{
    for (int i = 0; i < count; i++)
        if ((uintptr_t)arrays[i].data % 16 != 0)
            return false;
    return true;
}

/* ---- sinkhorn ----------------------------------------------------------------------------------------- */

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
    LAUNCH(queue, &sinkhorn_backward[c.n - 1], token_blocks(&c), 1, MHC_CUDA_TOKEN_THREADS, &c);
    return COT_OK;
}

/* ---- pre, forward ------------------------------------------------------------------------------------- */

static mhc_call pre_forward_call(const mhc_pre_forward_problem *p)
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

/* Computes h_res from the logits that pre's forward stored in the workspace. */
static cot_status launch_fused_sinkhorn(cot_queue *queue, mhc_call *c)
{
    if (c->h_res.data == NULL)
        return COT_OK;
    const int64_t n = c->n;
    c->h_res_logits = (mhc_array){c->logits, {c->T * n * n, n * n, n, 1}};
    LAUNCH(queue, &sinkhorn_forward[n - 1], token_blocks(c), 1, MHC_CUDA_TOKEN_THREADS, c);
    return COT_OK;
}

cot_status mhc_pre_fwd_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_forward_problem *p = problem;
    mhc_call c = pre_forward_call(p);
    c.logits = c.h_res.data != NULL ? workspace : NULL;
    LAUNCH(queue, &pre_forward_generic[p->sizes.dtype - COT_F32],
           generic_blocks(cot_ceil_div(c.tokens, MHC_CUDA_TOKENS)), 1, MHC_CUDA_THREADS, &c);
    return launch_fused_sinkhorn(queue, &c);
}

/* The box that one TMA load transfers. */
typedef struct tile_box {
    int chunks, tokens, streams;
} tile_box;

/* Maps x, dh_in or dx as [stream][chunk][token][column]. */
static cot_status make_tile_map(cot_queue *queue, CUtensorMap *map, const mhc_sizes *s, const cot_tensor *t,
                                tile_box box)
{
    const int64_t token = s->T > 1 ? t->stride[1] : t->stride[0], streams = t->rank == 4 ? s->n : 1;
    const int64_t size = (int64_t)cot_dtype_size(s->dtype), chunk_columns = 128 / size;
    /* The driver checks strides also for axes of one element. */
    return cot_cuda_swizzled_map(
        queue, map, s->dtype, 4, t->data, (const int64_t[]){chunk_columns, s->tokens, s->D / chunk_columns, streams},
        (const int64_t[]){s->tokens > 1 ? size * token : 16, 128, streams > 1 ? size * t->stride[2] : 16},
        (const int[]){(int)chunk_columns, box.tokens, box.chunks, box.streams});
}

static bool is_aligned(const cot_tensor *tensor, uintptr_t multiple)
{
    return !cot_is_present(tensor) || (uintptr_t)tensor->data % multiple == 0;
}

static int64_t cluster_count(const mhc_call *c, int tile, int cluster_blocks)
{
    return cot_clamp(cot_ceil_div(c->tokens, tile), 1, MHC_SM90_CLUSTERS_OF(cluster_blocks));
}

static int cluster_index(int cluster_blocks)
{
    return cluster_blocks == 4 ? 0 : cluster_blocks == 8 ? 1 : 2;
}

/* call: the argument of the kernel, which contains c. */
static cot_status launch_clusters(cot_queue *queue, const cot_cuda_kernel *kernel, int cluster_blocks, int tile,
                                  int threads, bool dependent, const mhc_call *c, const void *call)
{
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)(cluster_count(c, tile, cluster_blocks) * cluster_blocks), 1, 1},
        .threads = (unsigned)threads,
        .shared_bytes = (unsigned)kernel->shared_bytes,
        .cluster = (unsigned)cluster_blocks,
        .dependent = dependent,
    };
    return cot_cuda_launch(queue, kernel, &grid, call);
}

/* Grid: x = column slices, y = parts of the tokens. */
static cot_status launch_slices(cot_queue *queue, const cot_cuda_kernel *kernel, int threads, bool dependent,
                                int64_t slices, int64_t parts, const mhc_mapped_call *call)
{
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)slices, (unsigned)parts, 1},
        .threads = (unsigned)threads,
        .shared_bytes = (unsigned)kernel->shared_bytes,
        .dependent = dependent,
    };
    return cot_cuda_launch(queue, kernel, &grid, call);
}

/* Computes the coefficients and h_in from the slices' sums, then h_res. */
static cot_status launch_finish(cot_queue *queue, mhc_call *c, const mhc_sizes *sizes, bool vectorized)
{
    LAUNCH(queue, &(vectorized ? pre_epilogue : pre_epilogue_any)[sizes->dtype - COT_F32], c->tokens, 1,
           MHC_CUDA_THREADS, c);
    return launch_fused_sinkhorn(queue, c);
}

/* Whether the rows of all tensors are whole aligned vectors. */
static bool rows_vectorized(const void *problem, const cot_tensor *const tensors[], int count)
{
    for (int i = 0; i < count; i++)
        if (cot_is_present(tensors[i]) && (uintptr_t)tensors[i]->data % 16 != 0)
            return false;
    return mhc_cuda_admit_rows(problem, tensors, count) == NULL;
}

/* Launches one of [3][3] tensor-core kernels, by n and dtype. */
static cot_status launch_mma(cot_queue *queue, const cot_cuda_kernel kernels[3][3], const mhc_sizes *s, int64_t x,
                             int64_t y, const mhc_call *c)
{
    const cot_cuda_kernel *kernel = &kernels[s->n <= 2 ? 0 : s->n <= 4 ? 1 : 2][s->dtype - COT_F32];
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)x, (unsigned)y, 1},
        .threads = MHC_CUDA_THREADS,
        .shared_bytes = (unsigned)kernel->shared_bytes,
    };
    return x * y == 0 ? COT_OK : cot_cuda_launch(queue, kernel, &grid, c);
}

/* Stores the terms of phi gamma in the workspace. */
static cot_status launch_split(cot_queue *queue, const mhc_call *c)
{
    LAUNCH(queue, &pre_mma_split, cot_ceil_div(c->n * c->term_columns / 8, MHC_CUDA_THREADS),
           MHC_CUDA_MMA_ROWS(MHC_CUDA_MMA_M(c->n)), MHC_CUDA_THREADS, c);
    return COT_OK;
}

cot_status mhc_pre_fwd_tiles_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_forward_problem *p = problem;
    const mhc_sizes *s = &p->sizes;
    const mhc_cuda_pre_fwd_plan *plan = queue->plan;
    mhc_call c = pre_forward_call(p);
    if (c.tokens == 0)
        return COT_OK;
    c.logits = c.h_res.data != NULL ? workspace : NULL;
    c.sums = (float *)((char *)workspace + plan->sums);
    c.phi_terms = (uint16_t *)((char *)workspace + plan->phi_terms);
    c.term_columns = mhc_cuda_term_columns(s);
    c.slices = plan->slices;
    c.slice_columns = (int32_t)plan->slice_columns;
    c.vectorized = rows_vectorized(problem, (const cot_tensor *const[]){&p->args.x, &p->args.h_in}, 2);
    cot_status status = launch_split(queue, &c);
    if (status == COT_OK)
        status = launch_mma(queue, pre_mma_project, s, cot_ceil_div(c.tokens, MHC_CUDA_MMA_TOKENS), c.slices, &c);
    return status == COT_OK ? launch_finish(queue, &c, s, c.vectorized) : status;
}

/* By clusters, or (split) by blocks that store the sums of one slice each. */
static cot_status forward_sm90(cot_queue *queue, const void *problem, void *workspace, bool split)
{
    const mhc_pre_forward_problem *p = problem;
    const cot_mhc_pre_forward_args *a = &p->args;
    mhc_mapped_call mapped = {.call = pre_forward_call(p)};
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
    const int columns = MHC_SM90_COLUMNS_OF(c->n), size = (int)cot_dtype_size(p->sizes.dtype);
    const bool wide = !split && c->D > mhc_sm90_cluster_max_d(&p->sizes);
    const tile_box box = {(wide ? MHC_SM90_WIDE_COLUMNS : columns) * size / 128, MHC_SM90_CLUSTER_TILE(wide, size),
                          c->n};
    const int cluster_blocks = wide ? MHC_SM90_CLUSTER_BLOCKS : mhc_sm90_cluster_blocks(&p->sizes);
    const cot_cuda_kernel *kernel =
        split  ? &pre_fwd_split[p->sizes.dtype - COT_F16]
        : wide ? &pre_fwd_wide[p->sizes.dtype - COT_F16]
               : &pre_fwd_clusters[c->n == 4][p->sizes.dtype - COT_F32][cluster_index(cluster_blocks)];
    cot_status status = make_tile_map(queue, &mapped.x, &p->sizes, &a->x, box);
    if (status == COT_OK)
        status =
            split ? launch_slices(queue, kernel, MHC_SM90_SPLIT_THREADS, false, c->slices, mhc_sm90_parts(&p->sizes),
                                  &mapped)
                  : launch_clusters(queue, kernel, cluster_blocks, box.tokens, MHC_SM90_FWD_THREADS, false, c, &mapped);
    if (status != COT_OK)
        return status;
    return split ? launch_finish(queue, c, &p->sizes, true) : launch_fused_sinkhorn(queue, c);
}

cot_status mhc_pre_fwd_cluster_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return forward_sm90(queue, problem, workspace, false);
}

cot_status mhc_pre_fwd_split_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return forward_sm90(queue, problem, workspace, true);
}

/* Maps the terms of phi gamma of n = 8. A box has `rows` rows of one term and stream. */
static cot_status map_phi_terms(cot_queue *queue, CUtensorMap *map, const mhc_call *c, int rows)
{
    const int64_t row = 2 * c->n * c->term_columns;
    return cot_cuda_swizzled_map(queue, map, COT_BF16, 4, c->phi_terms,
                                 (const int64_t[]){c->term_columns, c->n, MHC_SM90_N8_ROWS, MHC_CUDA_MMA_TERMS},
                                 (const int64_t[]){2 * c->term_columns, row, MHC_SM90_N8_ROWS * row},
                                 (const int[]){MHC_SM90_CHUNK_COLUMNS, 1, rows, 1});
}

cot_status mhc_pre_fwd_n8_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_forward_problem *p = problem;
    const cot_mhc_pre_forward_args *a = &p->args;
    const mhc_sizes *s = &p->sizes;
    const mhc_cuda_pre_fwd_plan *plan = queue->plan;
    mhc_n8_call n8 = {.call = pre_forward_call(p)};
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
    cot_status status = launch_split(queue, c);
    if (status == COT_OK)
        status = map_phi_terms(queue, &n8.phi, c, MHC_SM90_N8_ROWS / 2);
    if (status == COT_OK)
        status = make_tile_map(queue, &n8.x, s, &a->x, (tile_box){1, MHC_SM90_N8_FWD_TILE, 1});
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)mhc_sm90_n8_fwd_tiles(s), (unsigned)c->slices, 1},
        .threads = MHC_SM90_N8_FWD_THREADS,
        .shared_bytes = MHC_SM90_SHARED_BYTES,
        .cluster = 2,
    };
    if (status == COT_OK)
        status = cot_cuda_launch(queue, &pre_fwd_n8, &grid, &n8);
    return status == COT_OK ? launch_finish(queue, c, s, true) : status;
}

/* ---- pre, backward ------------------------------------------------------------------------------------ */

static mhc_call pre_backward_call(const cot_queue *queue, const mhc_pre_backward_problem *p, void *workspace)
{
    const cot_mhc_pre_backward_args *a = &p->args;
    const mhc_cuda_layout *layout = queue->plan;
    char *base = workspace;
    mhc_call c = init_call(&p->sizes);
    c.hc_eps = (float)a->hc_eps;
    c.post_scale = (float)a->post_scale;
    c.sinkhorn_eps = (float)a->sinkhorn_eps;
    c.iterations = a->sinkhorn_iterations;
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

cot_status mhc_pre_bwd_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_backward_problem *p = problem;
    const int dtype = p->sizes.dtype - COT_F32;
    mhc_call c = pre_backward_call(queue, p, workspace);
    LAUNCH(queue, &pre_dz[c.n - 1], token_blocks(&c), 1, MHC_CUDA_TOKEN_THREADS, &c);
    LAUNCH(queue, &pre_dx_generic[dtype], generic_blocks(cot_ceil_div(c.tokens, MHC_CUDA_TOKENS)), 1, MHC_CUDA_THREADS,
           &c);
    if (c.dphi.data != NULL || c.dgamma.data != NULL)
        LAUNCH(queue, &pre_dphi_generic[dtype], cot_ceil_div(c.n * c.D, MHC_CUDA_THREADS), c.parts, MHC_CUDA_THREADS,
               &c);
    if (c.dbias.data != NULL || c.dalpha.data != NULL)
        LAUNCH(queue, &pre_token_sums, c.token_parts, 1, MHC_CUDA_THREADS, &c);
    return launch_sum_parts(queue, &c);
}

_Static_assert(MHC_SM90_CLUSTERS_OF(16) * 16 <= MHC_CUDA_TOKEN_PARTS &&
                   MHC_SM90_CLUSTERS_OF(8) * 8 <= MHC_CUDA_TOKEN_PARTS &&
                   MHC_SM90_CLUSTERS_OF(4) * 4 * MHC_SM90_OWNERS(4, false) <= MHC_CUDA_TOKEN_PARTS,
               "the cluster kernel's sums of dz must fit in the workspace");
_Static_assert((int)MHC_SM90_BLOCKS <= (int)MHC_CUDA_TOKEN_PARTS,
               "the split kernel's sums of dz must fit in the workspace");

/* Makes the tensor maps of the tensors that are present, with boxes of `tokens` tokens. dx_post is ignored if dx is
 * absent. */
static cot_status map_backward(cot_queue *queue, mhc_mapped_call *mapped, const mhc_pre_backward_problem *p, int tokens)
{
    const cot_mhc_pre_backward_args *a = &p->args;
    const bool dx = cot_is_present(&a->dx), post = dx && cot_is_present(&a->dx_post);
    const int chunks = MHC_SM90_COLUMNS_OF(mapped->call.n) * (int)cot_dtype_size(p->sizes.dtype) / 128;
    const tile_box all_streams = {chunks, tokens, mapped->call.n}, one_stream = {chunks, tokens, 1};
    cot_status status = make_tile_map(queue, &mapped->x, &p->sizes, &a->x, all_streams);
    if (status == COT_OK)
        status = make_tile_map(queue, &mapped->dh_in, &p->sizes, &a->dh_in, one_stream);
    if (status == COT_OK && dx)
        status = make_tile_map(queue, &mapped->dx, &p->sizes, &a->dx, all_streams);
    if (status == COT_OK && post)
        status = make_tile_map(queue, &mapped->dx_post, &p->sizes, &a->dx_post, one_stream);
    if (!post)
        mapped->call.dx_post.data = NULL;
    return status;
}

/* Whether the data pointers of x, dh_in, dx and dx_post are aligned as TMA requires. */
static bool backward_is_aligned(const cot_mhc_pre_backward_args *a)
{
    return is_aligned(&a->x, 16) && is_aligned(&a->dh_in, 16) && is_aligned(&a->dx, 16) && is_aligned(&a->dx_post, 16);
}

/* With keep_records, dx is absent, and the records of all tokens are stored in the workspace. */
static cot_status backward_cluster(cot_queue *queue, const mhc_pre_backward_problem *p, void *workspace,
                                   bool keep_records)
{
    const cot_mhc_pre_backward_args *a = &p->args;
    mhc_mapped_call mapped = {.call = pre_backward_call(queue, p, workspace)};
    mhc_call *c = &mapped.call;
    if (!backward_is_aligned(a))
        return mhc_pre_bwd_generic_sm80(queue, p, workspace);
    if (c->tokens == 0)
        return launch_sum_parts(queue, c);
    c->dphi_part_scale = 1 / (float)MHC_CUDA_MIX_SCALE;
    const int cluster_blocks = mhc_sm90_cluster_blocks(&p->sizes), tile = mhc_sm90_bwd_tile(&p->sizes);
    c->parts = cluster_count(c, tile, cluster_blocks);
    if (c->dh_res.data != NULL)
        LAUNCH(queue, &pre_dz[c->n - 1], token_blocks(c), 1, MHC_CUDA_TOKEN_THREADS, c);
    else
        c->dz = NULL; /* the owner warps read it from dh_post and dh_res_logits */
    const cot_status status = map_backward(queue, &mapped, p, tile);
    if (status != COT_OK)
        return status;
    c->token_parts = c->parts * cluster_blocks * MHC_SM90_OWNERS(cluster_blocks, c->dx_post.data != NULL);
    const int dtype = p->sizes.dtype - COT_F32;
    const cot_cuda_kernel *kernels = keep_records              ? pre_bwd_clusters_records
                                     : c->dx_post.data != NULL ? pre_bwd_clusters_post[c->n == 4][dtype]
                                                               : pre_bwd_clusters[c->n == 4][dtype];
    const cot_status launch_status = launch_clusters(queue, &kernels[cluster_index(cluster_blocks)], cluster_blocks,
                                                     tile, MHC_SM90_BWD_THREADS, c->dh_res.data != NULL, c, &mapped);
    return launch_status == COT_OK ? launch_sum_parts(queue, c) : launch_status;
}

cot_status mhc_pre_bwd_cluster_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return backward_cluster(queue, problem, workspace, false);
}

cot_status mhc_pre_bwd_f32_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_backward_problem *p = problem;
    return backward_is_aligned(&p->args) ? backward_cluster(queue, p, workspace, false)
                                         : mhc_pre_bwd_tiles_sm80(queue, p, workspace);
}

/* dz, dh_mix and c of all tokens, and their records if c->records is not null. Then the sums of dz over parts of the
 * tokens. */
static cot_status launch_records(cot_queue *queue, const mhc_call *c, const mhc_sizes *sizes, bool vectorized)
{
    const int64_t tile = c->records != NULL ? MHC_SM90_TILE : c->mix_tile > 0 ? c->mix_tile : 1;
    if (c->dh_res.data != NULL) /* otherwise the records kernel reads it from dh_post and dh_res_logits */
        LAUNCH(queue, &pre_dz[c->n - 1], token_blocks(c), 1, MHC_CUDA_TOKEN_THREADS, c);
    LAUNCH(queue, &(vectorized ? pre_records : pre_records_any)[sizes->dtype - COT_F32],
           cot_ceil_div(c->tokens, tile) * tile, 1, MHC_CUDA_THREADS, c);
    if (c->dbias.data != NULL || c->dalpha.data != NULL)
        LAUNCH(queue, &pre_token_sums, c->token_parts, 1, MHC_CUDA_THREADS, c);
    return COT_OK;
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
    c.vectorized = rows_vectorized(problem, (const cot_tensor *const[]){&a->x, &a->dh_in, &a->dx_post, &a->dx}, 4);
    cot_status status = launch_records(queue, &c, s, c.vectorized);
    if (status != COT_OK)
        return status;
    const int64_t columns = mhc_cuda_mma_columns(s), tiles = cot_ceil_div(c.tokens, MHC_CUDA_MMA_TOKENS);
    if (c.dx.data != NULL && tiles > 0) {
        status = launch_split(queue, &c);
        if (status == COT_OK)
            status = launch_mma(queue, pre_mma_dx, s, cot_min(tiles, cot_ceil_div(MHC_CUDA_MMA_BLOCKS, columns)),
                                columns, &c);
    }
    if (status == COT_OK && (c.dphi.data != NULL || c.dgamma.data != NULL))
        status = launch_mma(queue, pre_mma_dphi, s, columns, c.parts, &c);
    return status == COT_OK ? launch_sum_parts(queue, &c) : status;
}

cot_status mhc_pre_bwd_n8_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_backward_problem *p = problem;
    const cot_mhc_pre_backward_args *a = &p->args;
    const mhc_sizes *s = &p->sizes;
    const tile_box panel = {1, MHC_SM90_N8_TILE, 1};
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
    cot_status status = launch_records(queue, c, s, true);
    if (status == COT_OK)
        status = launch_split(queue, c);
    if (status == COT_OK)
        status = map_phi_terms(queue, &n8.phi, c, MHC_SM90_N8_ROWS);
    const cot_tensor *const tensors[] = {&a->x, &a->dh_in, &a->dx, &a->dx_post};
    CUtensorMap *const maps[] = {&n8.x, &n8.dh_in, &n8.dx, &n8.dx_post};
    for (int i = 0; i < COUNT(maps) && status == COT_OK; i++)
        if (cot_is_present(tensors[i]) && tensors[i]->dtype == s->dtype)
            status = make_tile_map(queue, maps[i], s, tensors[i], panel);
    if (status != COT_OK)
        return status;
    const cot_cuda_kernel *kernel = &pre_bwd_n8[post][c->f32_dx];
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)mhc_sm90_n8_slices(s), (unsigned)c->parts, 1},
        .threads = MHC_SM90_N8_THREADS,
        .shared_bytes = (unsigned)kernel->shared_bytes,
    };
    status = cot_cuda_launch(queue, kernel, &grid, &n8);
    return status == COT_OK ? launch_sum_parts(queue, c) : status;
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
    if (c->dh_res.data != NULL)
        LAUNCH(queue, &pre_dz[c->n - 1], token_blocks(c), 1, MHC_CUDA_TOKEN_THREADS, c);
    LAUNCH(queue, &pre_bwd_one_pass_init, 1, 1, MHC_CUDA_THREADS, c);
    const cot_status status = cot_cuda_launch(queue, &pre_bwd_one_pass, &grid, mapped);
    return status == COT_OK ? launch_sum_parts(queue, c) : status;
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
    cot_status status = map_backward(queue, &mapped, p, MHC_SM90_TILE);
    if (status == COT_OK && c->D > MHC_SM90_ONE_PASS_ABOVE_D && p->sizes.dtype == COT_BF16 && c->dx_post.data == NULL)
        return launch_one_pass(queue, &mapped, &p->sizes);
    if (status == COT_OK)
        status = launch_records(queue, c, &p->sizes, true);
    if (status == COT_OK)
        status = launch_slices(
            queue, &(c->dx_post.data != NULL ? pre_bwd_split_post : pre_bwd_split)[p->sizes.dtype - COT_F16],
            MHC_SM90_BWD_THREADS, true, mhc_sm90_slices(&p->sizes), c->parts, &mapped);
    return status == COT_OK ? launch_sum_parts(queue, c) : status;
}

/* ---- post --------------------------------------------------------------------------------------------- */

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

static mhc_call post_backward_call(const mhc_post_backward_problem *p)
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
    const mhc_call c = post_backward_call(p);
    const cot_cuda_kernel *kernel = p->sizes.dtype == p->args.dy.dtype
                                        ? &post_backward_generic[p->sizes.dtype - COT_F32]
                                        : &post_backward_f32_generic[p->sizes.dtype - COT_F16];
    LAUNCH(queue, kernel, generic_blocks(c.tokens), 1, MHC_CUDA_THREADS, &c);
    return COT_OK;
}

cot_status mhc_post_bwd_rows_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_post_backward_problem *p = problem;
    const mhc_call c = post_backward_call(p);
    if (!all_aligned((const mhc_array[]){c.x, c.f, c.dy, c.dx, c.df}, 5))
        return mhc_post_bwd_generic_sm80(queue, problem, workspace);
    const cot_cuda_kernel *kernel = p->sizes.dtype == p->args.dy.dtype
                                        ? &post_backward[c.n - 1][p->sizes.dtype - COT_F32]
                                        : &post_backward_f32[c.n - 1][p->sizes.dtype - COT_F16];
    const int64_t most_threads = c.n <= 4 ? MHC_CUDA_POST_THREADS : MHC_CUDA_POST_BWD_THREADS;
    LAUNCH(queue, kernel, c.tokens, 1, cot_min(post_threads(&p->sizes), most_threads), &c);
    return COT_OK;
}

/* ---- post_pre --------------------------------------------------------------------------------------------- */

cot_status mhc_post_pre_fwd_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_post_forward_problem post = mhc_post_half_forward(problem);
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(problem);
    const cot_status status = mhc_post_fwd_generic_sm80(queue, &post, NULL);
    return status == COT_OK ? mhc_pre_fwd_generic_sm80(queue, &pre, workspace) : status;
}

/* Post, by the kernel that supports its tensors. */
static cot_status launch_post_half(cot_queue *queue, const void *problem)
{
    const mhc_post_forward_problem post = mhc_post_half_forward(problem);
    return admit_sm80_post_fwd(&post) == NULL ? mhc_post_fwd_rows_sm80(queue, &post, NULL)
                                              : mhc_post_fwd_generic_sm80(queue, &post, NULL);
}

cot_status mhc_post_pre_fwd_tiles_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(problem);
    const cot_status status = launch_post_half(queue, problem);
    return status == COT_OK ? mhc_pre_fwd_tiles_sm80(queue, &pre, workspace) : status;
}

cot_status mhc_post_pre_fwd_n8_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(problem);
    const cot_status status = launch_post_half(queue, problem);
    return status == COT_OK ? mhc_pre_fwd_n8_sm90(queue, &pre, workspace) : status;
}

cot_status mhc_post_pre_fwd_split_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(problem);
    const cot_status status = launch_post_half(queue, problem);
    return status == COT_OK ? forward_sm90(queue, &pre, workspace, mhc_sm90_pre_half_is_split(&pre)) : status;
}

cot_status mhc_post_pre_fwd_cluster_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_post_pre_forward_problem *p = problem;
    const cot_mhc_post_pre_forward_args *a = &p->args;
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(p);
    mhc_post_pre_call post_pre = {
        .call = pre_forward_call(&pre), .h_post = make_array(&a->h_post), .h_res = make_array(&a->h_res)};
    mhc_call *c = &post_pre.call;
    if (!is_aligned(&a->x, 16) || !is_aligned(&a->f, 16) || !is_aligned(&a->y, 16) || !is_aligned(&a->h_in, 16) ||
        !is_aligned(&a->phi, 8) || !is_aligned(&a->gamma, 8))
        return mhc_post_pre_fwd_generic_sm80(queue, problem, workspace);
    if (c->tokens == 0)
        return COT_OK;
    c->logits = c->h_res.data != NULL ? workspace : NULL;
    const tile_box all_streams = {MHC_SM90_BLOCK_CHUNKS, MHC_SM90_TILE, MHC_SM90_N},
                   one_stream = {MHC_SM90_BLOCK_CHUNKS, MHC_SM90_TILE, 1};
    const int cluster_blocks = mhc_sm90_cluster_blocks(&p->sizes);
    const cot_cuda_kernel *kernels = post_pre_fwd_clusters[p->sizes.dtype - COT_F16];
    cot_status status = make_tile_map(queue, &post_pre.x, &p->sizes, &a->x, all_streams);
    if (status == COT_OK)
        status = make_tile_map(queue, &post_pre.f, &p->sizes, &a->f, one_stream);
    if (status == COT_OK)
        status = make_tile_map(queue, &post_pre.y, &p->sizes, &a->y, all_streams);
    if (status == COT_OK)
        status = launch_clusters(queue, &kernels[cluster_index(cluster_blocks)], cluster_blocks, MHC_SM90_TILE,
                                 MHC_SM90_FWD_THREADS, false, c, &post_pre);
    return status == COT_OK ? launch_fused_sinkhorn(queue, c) : status;
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
    return admit_sm80_post_fwd(&post) == NULL ? mhc_post_fwd_rows_sm80(queue, &post, NULL)
                                              : mhc_post_fwd_generic_sm80(queue, &post, NULL);
}

typedef cot_status backward_function(cot_queue *queue, const void *problem, void *workspace);

/* Pre's backward, which stores g in float32, then post's backward. */
static cot_status post_pre_backward(cot_queue *queue, const mhc_post_pre_backward_problem *p, void *workspace,
                                    backward_function *pre_backward)
{
    const mhc_cuda_post_pre_layout *layout = queue->plan;
    mhc_pre_backward_problem pre = mhc_pre_half_backward(p);
    mhc_post_backward_problem post = mhc_post_half_backward(p);
    cot_status status = find_post_pre_y(queue, p, workspace, &pre.args.x);
    if (mhc_post_pre_needs_g(&p->args))
        pre.args.dx = post.args.dy = cot_tensor_contiguous((char *)workspace + layout->g, COT_F32, 4, p->args.x.shape);
    if (status == COT_OK)
        status = pre_backward(queue, &pre, workspace);
    if (status != COT_OK || !mhc_post_pre_needs_g(&p->args))
        return status;
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

/* The gradients of the parameters and the records of all tokens, for tensors whose data is not aligned. */
static cot_status launch_any_records(cot_queue *queue, const mhc_pre_backward_problem *p, void *workspace)
{
    mhc_call c = pre_backward_call(queue, p, workspace);
    cot_status status = launch_records(queue, &c, &p->sizes, false);
    if (status != COT_OK)
        return status;
    if (c.dphi.data != NULL || c.dgamma.data != NULL)
        LAUNCH(queue, &pre_dphi_generic[p->sizes.dtype - COT_F32], cot_ceil_div(c.n * c.D, MHC_CUDA_THREADS), c.parts,
               MHC_CUDA_THREADS, &c);
    return launch_sum_parts(queue, &c);
}

/* All gradients of post's half, from the records of all tokens. */
static cot_status launch_post_pre_data_gradients(cot_queue *queue, const mhc_post_pre_backward_problem *p,
                                                 void *workspace)
{
    const cot_mhc_post_pre_backward_args *a = &p->args;
    const mhc_cuda_post_pre_layout *layout = queue->plan;
    const mhc_post_backward_problem post = mhc_post_half_backward(p);
    mhc_call c = post_backward_call(&post);
    c.phi = make_array(&a->phi);
    c.gamma = make_array(&a->gamma);
    c.dh_in = make_array(&a->dh_in);
    c.dy = make_array(&a->dy);
    mhc_array *const rows[] = {&c.x, &c.f, &c.dh_in, &c.dy, &c.dx, &c.df};
    for (int i = 0; i < COUNT(rows) && c.T <= 1; i++)
        rows[i]->stride[1] = rows[i]->stride[0]; /* the stride between all tokens */
    c.records = (mhc_token_record *)((char *)workspace + layout->pre.records);
    c.slices = cot_ceil_div(c.D, MHC_SM90_POST_PRE_COLUMNS);
    const bool sums = c.dh_res.data != NULL || c.dh_post.data != NULL;
    c.post_sums = sums ? (float *)((char *)workspace + layout->sums) : NULL;
    const bool aligned = all_aligned((const mhc_array[]){c.x, c.f, c.dh_in, c.dy, c.dx, c.df}, 6);
    const cot_cuda_kernel *kernel = &(aligned ? post_pre_bwd : post_pre_bwd_any)[p->sizes.dtype - COT_F16];
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)c.slices, (unsigned)mhc_sm90_post_pre_parts(&p->sizes), 1},
        .threads = MHC_SM90_POST_PRE_THREADS,
        .shared_bytes = (unsigned)kernel->shared_bytes,
    };
    const cot_status status = cot_cuda_launch(queue, kernel, &grid, &c);
    if (status == COT_OK && sums)
        LAUNCH(queue, &post_pre_sum_slices, cot_ceil_div(c.tokens * (c.n * c.n + c.n), MHC_CUDA_THREADS), 1,
               MHC_CUDA_THREADS, &c);
    return status;
}

static cot_status post_pre_backward_sm90(cot_queue *queue, const mhc_post_pre_backward_problem *p, void *workspace,
                                         bool split)
{
    mhc_pre_backward_problem pre = mhc_pre_half_backward(p);
    pre.args.dx_post = (cot_tensor){0};
    cot_status status = find_post_pre_y(queue, p, workspace, &pre.args.x);
    if (status == COT_OK)
        status = !backward_is_aligned(&pre.args) ? launch_any_records(queue, &pre, workspace)
                 : split                         ? mhc_pre_bwd_split_sm90(queue, &pre, workspace)
                                                 : backward_cluster(queue, &pre, workspace, true);
    if (status != COT_OK || p->sizes.tokens == 0 || !mhc_post_pre_needs_g(&p->args))
        return status;
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
