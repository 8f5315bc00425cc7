/* SPDX-License-Identifier: Apache-2.0
 * mhc_admit.h: how the CUDA kernels divide the work, which problems they admit, at what cost and with how much
 * workspace. For mhc.c and the launches. */
#ifndef COT_MHC_CUDA_ADMIT_H
#define COT_MHC_CUDA_ADMIT_H

#include "../mhc_problem.h"
#include "mhc_cuda.h"
#include "mhc_maps.h"

/* ---- kernels without clusters ------------------------------------------------------------------------- */

/* Numbers of column slices and of token parts. Part p has tiles p, p + parts, p + 2 parts, ... Both depend only on the
 * shape. */
static inline int64_t mhc_sm90_slices(const mhc_sizes *s)
{
    return cot_ceil_div(s->D, MHC_SM90_COLUMNS);
}

static inline int64_t mhc_sm90_parts(const mhc_sizes *s)
{
    const int64_t slices = mhc_sm90_slices(s), tiles = cot_ceil_div(s->tokens, MHC_SM90_TILE);
    const int64_t max_parts = slices > 0 ? cot_clamp(MHC_SM90_BLOCKS / slices, 1, MHC_SM90_BLOCKS) : 1;
    return tiles < max_parts ? tiles : max_parts;
}

/* ---- tensor-core kernels for any GPU ------------------------------------------------------------------ */

static inline int64_t mhc_cuda_term_columns(const mhc_sizes *s)
{
    return cot_round_up(s->D, MHC_CUDA_MMA_COLUMNS);
}

static inline int64_t mhc_cuda_phi_terms(const mhc_sizes *s)
{
    return COT_PRODUCT(MHC_CUDA_MMA_TERMS, MHC_CUDA_MMA_ROWS(MHC_CUDA_MMA_M(s->n)), s->n, mhc_cuda_term_columns(s));
}

/* Column tiles of all streams in dx and dphi. */
static inline int64_t mhc_cuda_mma_columns(const mhc_sizes *s)
{
    return s->n * cot_ceil_div(s->D, MHC_CUDA_MMA_COLUMNS);
}

/* Columns of a stream in one of the forward's partial sums. Long slices give few sums, short slices many blocks. */
static inline int64_t mhc_cuda_slice_columns(const mhc_sizes *s)
{
    const int64_t tiles = cot_ceil_div(s->tokens, MHC_CUDA_MMA_TOKENS);
    int64_t columns = 2048;
    while (columns > 256 && cot_mul(tiles, s->n * cot_ceil_div(s->D, columns)) < MHC_CUDA_MMA_BLOCKS / 4)
        columns /= 2;
    return columns;
}

/* The largest D of a cluster without wide blocks. */
static inline int64_t mhc_sm90_cluster_max_d(const mhc_sizes *s)
{
    return MHC_SM90_CLUSTER_BLOCKS * MHC_SM90_COLUMNS_OF(s->n);
}

/* Whether clusters need wide blocks. */
static inline bool mhc_sm90_is_wide(const mhc_sizes *s)
{
    return s->D > mhc_sm90_cluster_max_d(s);
}

/* Whether the cluster kernels are for this n. */
static inline bool mhc_sm90_has_clusters(const mhc_sizes *s)
{
    return s->n == MHC_SM90_N || s->n == 2;
}

/* The blocks of a cluster. */
static inline int mhc_sm90_cluster_blocks(const mhc_sizes *s)
{
    const int64_t columns = MHC_SM90_COLUMNS_OF(s->n);
    return s->D <= 4 * columns ? 4 : s->D <= 8 * columns ? 8 : MHC_SM90_CLUSTER_BLOCKS;
}

/* ---- pre for n = 8 on Hopper -------------------------------------------------------------------------- */

/* Whether the kernels have these sizes and this dtype. */
static inline bool mhc_sm90_is_n8(const mhc_sizes *s)
{
    return s->n == MHC_SM90_N8 && s->dtype == COT_BF16 && s->D % MHC_SM90_CHUNK_COLUMNS == 0;
}

/* Column slices of the backward: 64 columns of some of the streams. */
static inline int64_t mhc_sm90_n8_slices(const mhc_sizes *s)
{
    return s->D / MHC_SM90_CHUNK_COLUMNS * (MHC_SM90_N8 / MHC_SM90_N8_STREAMS);
}

/* The number of divisions, from 1 to `most`, with which `blocks` blocks for each division keep most multiprocessors of an
 * H200 busy, when each has one block at a time. More divisions must keep 5 % more busy than fewer. */
static inline int64_t mhc_sm90_best_divisions(int64_t blocks, int64_t most)
{
    int64_t best = cot_min(most, 1);
    double best_use = 0;
    for (int64_t divisions = 1; divisions <= most; divisions++) {
        const int64_t count = cot_mul(blocks, divisions);
        const double use = (double)count / (double)cot_round_up(count, MHC_SM90_BLOCKS);
        if (use > best_use + 0.05)
            best = divisions, best_use = use;
    }
    return best;
}

/* Parts of the tokens in the backward. Few parts are better: each loads phi once more, and has a dphi_part. */
static inline int64_t mhc_sm90_n8_parts(const mhc_sizes *s)
{
    const int64_t slices = cot_max(mhc_sm90_n8_slices(s), 1), tiles = cot_ceil_div(s->tokens, MHC_SM90_N8_TILE);
    return mhc_sm90_best_divisions(slices,
                                   cot_min(tiles, cot_max(cot_ceil_div(MHC_SM90_BLOCKS, slices), MHC_CUDA_MAX_PARTS)));
}

/* Blocks along the tokens in the forward: whole pairs. */
static inline int64_t mhc_sm90_n8_fwd_tiles(const mhc_sizes *s)
{
    return cot_round_up(cot_ceil_div(s->tokens, MHC_SM90_N8_FWD_TILE), 2);
}

/* Slices of the inputs in the forward. */
static inline int64_t mhc_sm90_n8_fwd_slices(const mhc_sizes *s)
{
    return mhc_sm90_best_divisions(mhc_sm90_n8_fwd_tiles(s),
                                   cot_min(MHC_SM90_N8_MAX_SLICES, s->n * s->D / MHC_SM90_CHUNK_COLUMNS));
}

/* ---- pre's backward ----------------------------------------------------------------------------------- */

/* Tokens of a tile of the cluster kernels. */
static inline int mhc_sm90_bwd_tile(const mhc_sizes *s)
{
    return MHC_SM90_CLUSTER_TILE(false, (int)cot_dtype_size(s->dtype));
}

/* Bytes of u and v after each Sinkhorn iteration, for `tokens` tokens. */
static inline size_t mhc_cuda_history_bytes(int64_t n, int32_t iterations, int64_t tokens)
{
    return cot_bytes(COT_PRODUCT(2, n, iterations, tokens), sizeof(float));
}

/* Threads of a block of Sinkhorn's gradient whose history fits in shared memory. 0: it does not fit. */
static inline int mhc_cuda_history_threads(int64_t n, int32_t iterations)
{
    int threads = MHC_CUDA_TOKEN_THREADS;
    while (threads >= 32 && mhc_cuda_history_bytes(n, iterations, threads) > MHC_CUDA_HISTORY_BYTES)
        threads /= 2;
    return threads >= 32 ? threads : 0;
}

/* Floats of the history in the workspace. */
static inline int64_t mhc_cuda_workspace_history(int64_t n, int32_t iterations, int64_t tokens)
{
    return mhc_cuda_history_threads(n, iterations) > 0 ? 0 : COT_PRODUCT(2, n, iterations, tokens);
}

/* Offsets in the workspace, in bytes. The parts depend only on the shape, so the order of sums does too. */
typedef struct mhc_cuda_layout {
    int64_t parts, part_length, token_parts;
    int64_t split_parts; /* of the split and n8 kernels, see mhc_sm90_parts and mhc_sm90_n8_parts; 0 without them */
    size_t dz, dh_mix, factor, phi_terms, mix_terms, records, counters, history, token_sums, dphi_parts, bytes;
} mhc_cuda_layout;

static inline mhc_cuda_layout mhc_cuda_layout_pre_bwd(const mhc_sizes *s, int32_t iterations, bool mma)
{
    const int64_t tiles = mhc_sm90_has_clusters(s) ? cot_ceil_div(s->tokens, MHC_SM90_TILE) : 0;
    mhc_cuda_layout l = {0};
    l.dz = cot_workspace_reserve(&l.bytes, cot_mul(s->tokens, s->M), sizeof(float));
    l.dh_mix = cot_workspace_reserve(&l.bytes, cot_mul(s->tokens, s->M), sizeof(float));
    l.factor = cot_workspace_reserve(&l.bytes, s->tokens, sizeof(float));
    if (mma) {
        l.phi_terms = cot_workspace_reserve(&l.bytes, mhc_cuda_phi_terms(s), sizeof(uint16_t));
        l.mix_terms = cot_workspace_reserve(
            &l.bytes,
            COT_PRODUCT(MHC_CUDA_MMA_TERMS, cot_round_up(s->tokens, s->n == MHC_SM90_N8 ? MHC_SM90_N8_TILE : 1),
                        MHC_CUDA_MMA_ROWS(MHC_CUDA_MMA_M(s->n))),
            sizeof(uint16_t));
    }
    l.records = cot_workspace_reserve(&l.bytes, cot_mul(tiles, MHC_SM90_TILE), sizeof(mhc_token_record));
    l.counters = cot_workspace_reserve(&l.bytes, MHC_SM90_RECORD_COUNTS + tiles, sizeof(uint32_t));
    const int64_t most_parts =
        cot_clamp(cot_ceil_div(MHC_CUDA_MMA_BLOCKS, mhc_cuda_mma_columns(s)), 1, MHC_CUDA_MAX_PARTS);
    l.part_length = cot_round_up(cot_ceil_div(s->tokens, most_parts), MHC_CUDA_RUN);
    l.parts = s->tokens > 0 ? cot_ceil_div(s->tokens, l.part_length) : 0;
    l.token_parts = cot_clamp(s->tokens, 0, MHC_CUDA_TOKEN_PARTS);
    /* The cluster kernel stores one part for each cluster, and sums of dz for each block of the clusters. */
    const int64_t clusters =
        cot_min(cot_ceil_div(s->tokens, mhc_sm90_bwd_tile(s)), MHC_SM90_CLUSTERS_OF(mhc_sm90_cluster_blocks(s)));
    l.split_parts = s->n == MHC_SM90_N ? mhc_sm90_parts(s) : mhc_sm90_is_n8(s) ? mhc_sm90_n8_parts(s) : 0;
    const int64_t max_parts = cot_max(l.split_parts, cot_max(clusters, l.parts));
    l.history = cot_workspace_reserve(&l.bytes, mhc_cuda_workspace_history(s->n, iterations, s->tokens), sizeof(float));
    l.token_sums = cot_workspace_reserve(&l.bytes, COT_PRODUCT(MHC_CUDA_TOKEN_PARTS, s->M, 2), sizeof(double));
    l.dphi_parts = cot_workspace_reserve(&l.bytes, COT_PRODUCT(max_parts, s->M, s->n, s->D), sizeof(float));
    return l;
}

/* ---- admission, cost and workspace ------------------------------------------------------------------- */

static inline const char *admit_sm80(const void *problem)
{
    const mhc_sizes *sizes = problem;
    if (sizes->dtype == COT_F64)
        return "it computes in float32, the tensors are f64";
    if (sizes->tokens > INT32_MAX / 2)
        return "it supports fewer than 2^30 tokens";
    return sizes->n > MHC_CUDA_MAX_N ? "it supports n up to 8" : NULL;
}

/* NULL if all rows are contiguous and aligned to 16 bytes, apart from the data pointers. The alignment of the pointers
 * is known only when the kernel runs. It then falls back to the generic kernels, or those for n = 8 and the f32
 * backward to the tiled ones. */
static inline const char *mhc_cuda_admit_rows(const void *problem, const cot_tensor *const tensors[], int count)
{
    const mhc_sizes *sizes = problem;
    if (admit_sm80(problem) != NULL)
        return admit_sm80(problem);
    if (sizes->D % 8 != 0 || sizes->D > INT32_MAX / 2)
        return "D must be a multiple of 8, below 2^30";
    for (int i = 0; i < count; i++) {
        const int last = tensors[i]->rank - 1;
        if (!cot_is_present(tensors[i]))
            continue;
        if (tensors[i]->stride[last] != 1)
            return "the axis D must be contiguous";
        for (int axis = 0; axis < last; axis++)
            if (tensors[i]->shape[axis] > 1 &&
                tensors[i]->stride[axis] * (int64_t)cot_dtype_size(sizes->dtype) % 16 != 0)
                return "rows must begin at multiples of 16 bytes";
    }
    return NULL;
}

/* Tiled kernels of pre: the column tiles are the grid's y dimension. */
static inline const char *admit_sm80_pre_tiles(const void *problem)
{
    const mhc_sizes *sizes = problem;
    if (admit_sm80(problem) != NULL)
        return admit_sm80(problem);
    return sizes->D > 65535 / MHC_CUDA_MAX_N * MHC_CUDA_MMA_COLUMNS ? "it supports D up to 1048448" : NULL;
}

static inline const char *admit_sm80_post_fwd(const void *problem)
{
    const cot_mhc_post_forward_args *a = &((const mhc_post_forward_problem *)problem)->args;
    return mhc_cuda_admit_rows(problem, (const cot_tensor *const[]){&a->x, &a->f, &a->y}, 3);
}

static inline const char *admit_sm80_post_bwd(const void *problem)
{
    const cot_mhc_post_backward_args *a = &((const mhc_post_backward_problem *)problem)->args;
    return mhc_cuda_admit_rows(problem, (const cot_tensor *const[]){&a->x, &a->f, &a->dy, &a->dx, &a->df}, 5);
}

/* Whether all tokens of a tensor [B,T,...] have one positive stride from the first to the last. */
static inline bool mhc_cuda_uniform_token_stride(const cot_tensor *t)
{
    if (!cot_is_present(t) || t->shape[0] * t->shape[1] <= 1)
        return true;
    const int64_t stride = t->shape[1] > 1 ? t->stride[1] : t->stride[0];
    return stride > 0 && (t->shape[0] <= 1 || t->shape[1] <= 1 || t->stride[0] == t->shape[1] * t->stride[1]);
}

/* Whether the rows of a parameter with two axes can be read two floats at a time, apart from the alignment of the data
 * pointer. */
static inline bool mhc_cuda_has_float2_rows(const cot_tensor *t)
{
    return !cot_is_present(t) || (t->stride[1] == 1 && t->stride[0] % 2 == 0);
}

/* The layout that all Hopper kernels require. tensors: [B,T,n,D] or [B,T,D]. */
static inline const char *mhc_sm90_admit_layout(const void *problem, const cot_tensor *const tensors[], int count,
                                                const cot_tensor *phi, const cot_tensor *gamma)
{
    const mhc_sizes *sizes = problem;
    if (sizes->D % MHC_SM90_CHUNK_COLUMNS != 0)
        return "D must be a multiple of 64";
    if (!mhc_cuda_has_float2_rows(phi) || !mhc_cuda_has_float2_rows(gamma))
        return "rows of phi and gamma must be contiguous, and begin at multiples of 8 bytes";
    for (int i = 0; i < count; i++) {
        if (!mhc_cuda_uniform_token_stride(tensors[i]))
            return "the stride between all tokens must be the same and positive";
        if (cot_is_present(tensors[i]) && tensors[i]->rank == 4 && tensors[i]->stride[2] <= 0)
            return "the stride between streams must be positive";
    }
    return mhc_cuda_admit_rows(problem, tensors, count);
}

/* Admission of the Hopper kernels for n = 4. */
static inline const char *mhc_sm90_admit(const void *problem, const cot_tensor *const tensors[], int count,
                                         const cot_tensor *phi, const cot_tensor *gamma)
{
    const mhc_sizes *sizes = problem;
    if (sizes->n != MHC_SM90_N || (sizes->dtype != COT_BF16 && sizes->dtype != COT_F16))
        return "n must be 4, and the dtype f16 or bf16";
    if (sizes->D > MHC_SM90_BLOCKS * MHC_SM90_COLUMNS)
        return "it supports D up to 33792";
    return mhc_sm90_admit_layout(problem, tensors, count, phi, gamma);
}

static inline const char *admit_sm90_pre_fwd_split(const void *problem)
{
    const cot_mhc_pre_forward_args *a = &((const mhc_pre_forward_problem *)problem)->args;
    return mhc_sm90_admit(problem, (const cot_tensor *const[]){&a->x, &a->h_in}, 2, &a->phi, &a->gamma);
}

static inline const char *admit_sm90_pre_bwd_split(const void *problem)
{
    const cot_mhc_pre_backward_args *a = &((const mhc_pre_backward_problem *)problem)->args;
    return mhc_sm90_admit(problem, (const cot_tensor *const[]){&a->x, &a->dh_in, &a->dx_post, &a->dx}, 4, &a->phi,
                          &a->gamma);
}

static inline const char *admit_sm90_pre_fwd(const void *problem)
{
    const mhc_sizes *sizes = problem;
    const cot_mhc_pre_forward_args *a = &((const mhc_pre_forward_problem *)problem)->args;
    if (!mhc_sm90_has_clusters(sizes) || sizes->dtype == COT_F64)
        return "n must be 2 or 4, and the dtype f32, f16 or bf16";
    const bool has_wide_blocks = sizes->n == MHC_SM90_N && sizes->dtype != COT_F32;
    if (sizes->D > (has_wide_blocks ? MHC_SM90_WIDE_MAX_D : mhc_sm90_cluster_max_d(sizes)))
        return has_wide_blocks ? "it supports D up to 7168"
               : sizes->n == 2 ? "it supports D up to 8192"
                               : "in f32, it supports D up to 4096";
    return mhc_sm90_admit_layout(problem, (const cot_tensor *const[]){&a->x, &a->h_in}, 2, &a->phi, &a->gamma);
}

/* Pre's backward in clusters, apart from the dtype. */
static inline const char *mhc_sm90_admit_bwd_clusters(const void *problem)
{
    const mhc_sizes *sizes = problem;
    const cot_mhc_pre_backward_args *a = &((const mhc_pre_backward_problem *)problem)->args;
    if (!mhc_sm90_has_clusters(sizes))
        return "n must be 2 or 4";
    if (sizes->D > mhc_sm90_cluster_max_d(sizes))
        return sizes->n == 2 ? "it supports D up to 8192" : "it supports D up to 4096";
    return mhc_sm90_admit_layout(problem, (const cot_tensor *const[]){&a->x, &a->dh_in, &a->dx_post, &a->dx}, 4,
                                 &a->phi, &a->gamma);
}

static inline const char *admit_sm90_pre_bwd(const void *problem)
{
    const cot_dtype dtype = ((const mhc_sizes *)problem)->dtype;
    return dtype == COT_BF16 || dtype == COT_F16 ? mhc_sm90_admit_bwd_clusters(problem)
                                                 : "the dtype must be f16 or bf16";
}

static inline const char *admit_sm90_pre_bwd_f32(const void *problem)
{
    return ((const mhc_sizes *)problem)->dtype == COT_F32 ? mhc_sm90_admit_bwd_clusters(problem)
                                                          : "the dtype must be f32";
}

/* Admission of the Hopper kernels for n = 8. phi and gamma may have any strides. */
static inline const char *mhc_sm90_admit_n8(const void *problem, const cot_tensor *const tensors[], int count)
{
    const cot_tensor none = {0};
    if (!mhc_sm90_is_n8(problem))
        return "n must be 8, the dtype bf16, and D a multiple of 64";
    if (admit_sm80_pre_tiles(problem) != NULL)
        return admit_sm80_pre_tiles(problem);
    return mhc_sm90_admit_layout(problem, tensors, count, &none, &none);
}

static inline const char *admit_sm90_pre_fwd_n8(const void *problem)
{
    const cot_mhc_pre_forward_args *a = &((const mhc_pre_forward_problem *)problem)->args;
    return mhc_sm90_admit_n8(problem, (const cot_tensor *const[]){&a->x, &a->h_in}, 2);
}

static inline const char *admit_sm90_pre_bwd_n8(const void *problem)
{
    const cot_mhc_pre_backward_args *a = &((const mhc_pre_backward_problem *)problem)->args;
    return mhc_sm90_admit_n8(problem, (const cot_tensor *const[]){&a->x, &a->dh_in, &a->dx_post, &a->dx}, 4);
}

/* Only the order of the costs matters. */
static inline double cost_sm80_generic(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return 256 + 80 * (double)sizes->D;
}

static inline double cost_sm80_tiles(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return 256 + 8 * (double)sizes->D;
}

/* The time of a tile depends only on the number of blocks that process it. */
static inline double cost_sm90_pre_bwd(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return mhc_sm90_cluster_blocks(sizes) * MHC_SM90_COLUMNS_OF(sizes->n);
}

/* With wide blocks too. */
static inline double cost_sm90_wide(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return mhc_sm90_is_wide(sizes) ? MHC_SM90_WIDE_MAX_D : cost_sm90_pre_bwd(problem);
}

/* x is read twice, but all blocks have work for any D. */
static inline double cost_sm90_split(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return 256 + 1.6 * (double)sizes->D;
}

static inline double cost_sm80_fast(const void *problem)
{
    (void)problem;
    return 1;
}

static inline size_t workspace_cuda_pre_fwd(const void *problem)
{
    const mhc_pre_forward_problem *p = problem;
    return cot_is_present(&p->args.h_res)
               ? cot_bytes(COT_PRODUCT(p->sizes.tokens, p->sizes.n, p->sizes.n), sizeof(float))
               : 0;
}

/* The plan of a forward whose blocks take slices of the streams: the slices' sums follow the logits. */
typedef struct mhc_cuda_pre_fwd_plan {
    int64_t slices;
    int64_t slice_columns;         /* of the tensor-core kernels, see mhc_cuda_slice_columns */
    int64_t n8_slices;             /* of the kernel for n = 8 */
    size_t sums, phi_terms, bytes; /* offsets of the sums and of the terms of phi gamma; of the whole workspace */
} mhc_cuda_pre_fwd_plan;

static inline mhc_cuda_pre_fwd_plan mhc_cuda_plan_pre_fwd(const mhc_pre_forward_problem *p, int64_t slices, bool mma)
{
    const int64_t n = p->sizes.n, logits = cot_is_present(&p->args.h_res) ? COT_PRODUCT(p->sizes.tokens, n, n) : 0;
    mhc_cuda_pre_fwd_plan plan = {.slices = slices};
    cot_workspace_reserve(&plan.bytes, logits, sizeof(float));
    plan.sums =
        cot_workspace_reserve(&plan.bytes, COT_PRODUCT(p->sizes.tokens, slices, MHC_CUDA_SUMS(n)), sizeof(float));
    if (mma)
        plan.phi_terms = cot_workspace_reserve(&plan.bytes, mhc_cuda_phi_terms(&p->sizes), sizeof(uint16_t));
    return plan;
}

/* Only the last slice of a stream can be partial. */
static inline mhc_cuda_pre_fwd_plan mhc_cuda_plan_pre_fwd_tiles(const mhc_pre_forward_problem *p)
{
    const mhc_sizes *s = &p->sizes;
    const int64_t columns = mhc_cuda_slice_columns(s);
    mhc_cuda_pre_fwd_plan plan = mhc_cuda_plan_pre_fwd(p, s->n * cot_ceil_div(s->D, columns), true);
    plan.slice_columns = columns;
    return plan;
}

/* Of the n8 kernel and of the one that it falls back to. */
static inline mhc_cuda_pre_fwd_plan mhc_cuda_plan_pre_fwd_n8(const mhc_pre_forward_problem *p)
{
    const mhc_cuda_pre_fwd_plan tiles = mhc_cuda_plan_pre_fwd_tiles(p);
    const int64_t n8_slices = mhc_sm90_n8_fwd_slices(&p->sizes);
    mhc_cuda_pre_fwd_plan plan = mhc_cuda_plan_pre_fwd(p, cot_max(tiles.slices, n8_slices), true);
    plan.n8_slices = n8_slices;
    plan.slices = tiles.slices;
    plan.slice_columns = tiles.slice_columns;
    return plan;
}

COT_PLAN(plan_sm90_pre_fwd_n8, mhc_cuda_pre_fwd_plan, mhc_cuda_plan_pre_fwd_n8(problem))
COT_PLAN(plan_sm80_pre_fwd_tiles, mhc_cuda_pre_fwd_plan, mhc_cuda_plan_pre_fwd_tiles(problem))
COT_PLAN(plan_sm90_pre_fwd_split, mhc_cuda_pre_fwd_plan,
         mhc_cuda_plan_pre_fwd(problem, mhc_sm90_slices(problem), false))

static inline mhc_cuda_layout mhc_cuda_plan_pre_bwd(const mhc_pre_backward_problem *p, bool mma)
{
    return mhc_cuda_layout_pre_bwd(&p->sizes, mhc_pre_iterations(&p->args), mma);
}

COT_PLAN(plan_cuda_pre_bwd, mhc_cuda_layout, mhc_cuda_plan_pre_bwd(problem, false))
COT_PLAN(plan_sm80_pre_bwd_tiles, mhc_cuda_layout, mhc_cuda_plan_pre_bwd(problem, true))

/* ---- post_pre --------------------------------------------------------------------------------------------- */

static inline size_t workspace_cuda_post_pre_fwd(const void *problem)
{
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(problem);
    return workspace_cuda_pre_fwd(&pre);
}

static inline mhc_cuda_pre_fwd_plan mhc_cuda_plan_post_pre_fwd_tiles(const mhc_post_pre_forward_problem *p)
{
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(p);
    return mhc_cuda_plan_pre_fwd_tiles(&pre);
}

/* Whether the second of two kernels, pre, is the split kernel and not the cluster kernel. */
static inline bool mhc_sm90_pre_half_is_split(const mhc_pre_forward_problem *pre)
{
    return admit_sm90_pre_fwd(pre) != NULL ||
           (admit_sm90_pre_fwd_split(pre) == NULL && cost_sm90_split(pre) < cost_sm90_wide(pre));
}

static inline mhc_cuda_pre_fwd_plan mhc_sm90_plan_post_pre_fwd_split(const mhc_post_pre_forward_problem *p)
{
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(p);
    return mhc_cuda_plan_pre_fwd(&pre, mhc_sm90_pre_half_is_split(&pre) ? mhc_sm90_slices(&p->sizes) : 0, false);
}

static inline mhc_cuda_pre_fwd_plan mhc_sm90_plan_post_pre_fwd_n8(const mhc_post_pre_forward_problem *p)
{
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(p);
    return mhc_cuda_plan_pre_fwd_n8(&pre);
}

COT_PLAN(plan_sm90_post_pre_fwd_n8, mhc_cuda_pre_fwd_plan, mhc_sm90_plan_post_pre_fwd_n8(problem))
COT_PLAN(plan_sm80_post_pre_fwd_tiles, mhc_cuda_pre_fwd_plan, mhc_cuda_plan_post_pre_fwd_tiles(problem))
COT_PLAN(plan_sm90_post_pre_fwd_split, mhc_cuda_pre_fwd_plan, mhc_sm90_plan_post_pre_fwd_split(problem))

/* Layout of the workspace of post_pre's backward: that of pre's backward, then y if it is computed again; g if one
 * kernel stores it for another; or the sums of the column slices for dh_res and dh_post, and the tokens' operands. */
typedef struct mhc_cuda_post_pre_layout {
    mhc_cuda_layout pre;
    size_t y, g, sums, operands, bytes; /* byte offsets; the size of the whole */
} mhc_cuda_post_pre_layout;

static inline mhc_cuda_post_pre_layout mhc_cuda_layout_post_pre(const mhc_post_pre_backward_problem *p, bool mma,
                                                                bool fused)
{
    const mhc_pre_backward_problem pre = mhc_pre_half_backward(p);
    const mhc_sizes *s = &p->sizes;
    const int64_t elements = COT_PRODUCT(s->tokens, s->n, s->D);
    const bool sums = cot_is_present(&p->args.dh_res) || cot_is_present(&p->args.dh_post);
    mhc_cuda_post_pre_layout l = {.pre = mhc_cuda_plan_pre_bwd(&pre, mma)};
    l.bytes = l.pre.bytes;
    l.y = cot_workspace_reserve(&l.bytes, cot_is_present(&p->args.y) ? 0 : elements, cot_dtype_size(s->dtype));
    l.g = cot_workspace_reserve(&l.bytes, !fused && mhc_post_pre_needs_g(&p->args) ? elements : 0, sizeof(float));
    if (fused && sums)
        l.sums = cot_workspace_reserve(
            &l.bytes, COT_PRODUCT(cot_ceil_div(s->D, MHC_SM90_POST_PRE_COLUMNS), s->tokens, MHC_CUDA_POST_SUMS(s->n)),
            sizeof(float));
    if (fused && mhc_post_pre_needs_g(&p->args))
        l.operands = cot_workspace_reserve(&l.bytes, s->tokens, sizeof(mhc_token_operands));
    return l;
}

COT_PLAN(plan_sm80_post_pre_bwd, mhc_cuda_post_pre_layout, mhc_cuda_layout_post_pre(problem, false, false))
COT_PLAN(plan_sm80_post_pre_bwd_tiles, mhc_cuda_post_pre_layout, mhc_cuda_layout_post_pre(problem, true, false))
COT_PLAN(plan_sm90_post_pre_bwd, mhc_cuda_post_pre_layout, mhc_cuda_layout_post_pre(problem, false, true))

/* Blocks of a column slice in the kernel of post_pre's data gradients. If one block for each multiprocessor leaves many
 * multiprocessors without a block, three times as many blocks divide the work. */
static inline int64_t mhc_sm90_post_pre_parts(const mhc_sizes *s)
{
    const int64_t slices = cot_ceil_div(s->D, MHC_SM90_POST_PRE_COLUMNS), blocks = MHC_SM90_BLOCKS / slices * slices;
    const int64_t parts = (blocks > MHC_SM90_BLOCKS * 9 / 10 ? 1 : 3) * MHC_SM90_BLOCKS / slices;
    return cot_clamp(cot_ceil_div(s->tokens, MHC_SM90_TILE), 1, cot_max(parts, 1));
}

/* The layout of the tensors of post. */
static inline const char *mhc_sm90_admit_post_half(const void *problem)
{
    const cot_mhc_post_pre_backward_args *a = &((const mhc_post_pre_backward_problem *)problem)->args;
    return mhc_sm90_admit_layout(problem,
                                 (const cot_tensor *const[]){&a->x, &a->f, &a->y, &a->dh_in, &a->dy, &a->dx, &a->df}, 7,
                                 &a->phi, &a->gamma);
}

static inline const char *admit_sm90_post_pre_bwd_split(const void *problem)
{
    const mhc_pre_backward_problem pre = mhc_pre_half_backward(problem);
    const char *reason = admit_sm90_pre_bwd_split(&pre);
    return reason == NULL ? mhc_sm90_admit_post_half(problem) : reason;
}

/* In clusters. Pre's half makes records only, so for bf16 it has wide blocks too. */
static inline const char *admit_sm90_post_pre_bwd(const void *problem)
{
    const mhc_sizes *sizes = problem;
    if (!mhc_sm90_has_clusters(sizes) || (sizes->dtype != COT_F16 && sizes->dtype != COT_BF16))
        return "n must be 2 or 4, and the dtype f16 or bf16";
    if (sizes->n == MHC_SM90_N && sizes->dtype == COT_BF16)
        return sizes->D > MHC_SM90_WIDE_MAX_D ? "it supports D up to 7168" : mhc_sm90_admit_post_half(problem);
    if (sizes->D > mhc_sm90_cluster_max_d(sizes))
        return sizes->n == 2 ? "it supports D up to 8192" : "in f16, it supports D up to 4096";
    return mhc_sm90_admit_post_half(problem);
}

static inline const char *admit_sm90_post_pre_fwd_n8(const void *problem)
{
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(problem);
    return admit_sm90_pre_fwd_n8(&pre);
}

static inline const char *admit_sm90_post_pre_bwd_n8(const void *problem)
{
    const mhc_pre_backward_problem pre = mhc_pre_half_backward(problem);
    return admit_sm90_pre_bwd_n8(&pre);
}

static inline const char *admit_sm90_post_pre_bwd_f32(const void *problem)
{
    const mhc_pre_backward_problem pre = mhc_pre_half_backward(problem);
    return admit_sm90_pre_bwd_f32(&pre);
}

static inline const char *admit_sm90_post_pre_fwd_split(const void *problem)
{
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(problem);
    const char *reason = admit_sm90_pre_fwd(&pre);
    return reason == NULL || admit_sm90_pre_fwd_split(&pre) == NULL ? NULL : reason;
}

static inline const char *admit_sm90_post_pre_fwd(const void *problem)
{
    const mhc_post_pre_forward_problem *p = problem;
    const cot_mhc_post_pre_forward_args *a = &p->args;
    const mhc_pre_forward_problem pre = mhc_pre_half_forward(p);
    const char *reason = admit_sm90_pre_fwd(&pre);
    if (reason != NULL)
        return reason;
    if (!mhc_cuda_uniform_token_stride(&a->h_res) || !mhc_cuda_uniform_token_stride(&a->h_post))
        return "the stride between all tokens of h_res and h_post must be the same and positive";
    return mhc_sm90_admit_layout(problem, (const cot_tensor *const[]){&a->x, &a->f}, 2, &a->phi, &a->gamma);
}

static inline size_t workspace_sm80_sinkhorn_bwd(const void *problem)
{
    const mhc_sinkhorn_backward_problem *p = problem;
    return cot_bytes(mhc_cuda_workspace_history(p->sizes.n, p->args.iterations, p->sizes.tokens), sizeof(float));
}

#endif
