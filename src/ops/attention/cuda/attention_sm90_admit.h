/* SPDX-License-Identifier: Apache-2.0
 * attention_sm90_admit.h: which problems the Hopper kernels of both directions support, at what cost, with how much
 * workspace. For attention.c and the host code of these kernels. */
#ifndef COT_ATTENTION_SM90_ADMIT_H
#define COT_ATTENTION_SM90_ADMIT_H

#include "../attention_problem.h"
#include "attention_sm90.h"

#include "core/op_tables.h"

#include <math.h>

/* Whether TMA can load the tensor: contiguous rows, data and strides at multiples of 16 bytes. (A query for the
 * workspace's size may leave data null, which passes.) */
static inline bool attention_tma_aligned(const cot_tensor *tensor)
{
    if (!cot_is_present(tensor) || cot_elements(tensor) == 0)
        return true;
    if ((uintptr_t)tensor->data % 16 != 0)
        return false;
    for (int a = 0; a < 3; a++)
        if (tensor->shape[a] > 1 &&
            (tensor->stride[a] <= 0 || tensor->stride[a] * (int64_t)cot_dtype_size(tensor->dtype) % 16 != 0))
            return false;
    return tensor->stride[3] == 1;
}

/* Whether rows begin at multiples of 16 bytes. */
static inline bool attention_has_aligned_rows(const cot_tensor *t)
{
    return cot_is_present(t) && (uintptr_t)t->data % 16 == 0 && attention_tma_aligned(t);
}

static inline bool attention_rows_contiguous(const cot_tensor *tensor)
{
    return !cot_is_present(tensor) || tensor->stride[3] == 1;
}

/* ---- forward ------------------------------------------------------------------------------------------- */

/* Upper bound of the call's query tiles. */
static inline double attention_fwd_tiles(const attention_sizes *sizes)
{
    return ((double)sizes->rows_q / 128 + (double)sizes->B + 1) * (double)sizes->H;
}

static inline const char *attention_fwd_sm90_refusal(const attention_problem *p)
{
    const attention_sizes *sizes = &p->sizes;
    if (sizes->d_qk > 256 || sizes->d_v > 256)
        return "it supports d and d_v up to 256";
    if (sizes->dropped > 0 || cot_is_present(&p->alibi_slopes) || cot_is_present(&p->bias))
        return "it supports no dropout, ALiBi or bias";
    if (sizes->B > INT32_MAX / 64 || sizes->H > INT32_MAX / 64 || sizes->rows_q > INT32_MAX / 4 ||
        sizes->rows_k > INT32_MAX / 4 || attention_fwd_tiles(sizes) > INT32_MAX / 4)
        return "it counts rows and tiles in 32 bits";
    if (!attention_tma_aligned(&p->q) || !attention_tma_aligned(&p->k) || !attention_tma_aligned(&p->v))
        return "q, k and v need a contiguous last axis, and data and other strides at multiples of 16 bytes";
    if (!attention_rows_contiguous(&p->out))
        return "out needs a contiguous last axis";
    return NULL;
}

static inline const char *admit_fwd_bf16_sm90(const void *problem)
{
    const attention_problem *p = problem;
    return p->sizes.dtype != COT_BF16 ? "it supports bf16 only" : attention_fwd_sm90_refusal(p);
}

static inline const char *admit_fwd_f16_sm90(const void *problem)
{
    const attention_problem *p = problem;
    return p->sizes.dtype != COT_F16 ? "it supports f16 only" : attention_fwd_sm90_refusal(p);
}

static inline double cost_fwd_sm90(const void *problem)
{
    const attention_sizes *sizes = problem;
    return 1000.0 + (double)sizes->H * (double)sizes->rows_q * (double)sizes->Tk;
}

/* Whether sequences differ in length, so that the kernel attention_prepare must write seqlens. */
static inline bool attention_is_varlen(const attention_problem *p)
{
    return p->sizes.packed || cot_is_present(&p->seqused_q) || cot_is_present(&p->seqused_k);
}

/* The plan of a forward. The workspace begins with the tile counter. */
typedef struct attention_sm90_fwd_plan {
    bool varlen;           /* see attention_is_varlen */
    size_t seqlens, bytes; /* offset of seqlens; size of the whole workspace */
} attention_sm90_fwd_plan;

static inline attention_sm90_fwd_plan attention_sm90_fwd_plan_of(const attention_problem *p)
{
    attention_sm90_fwd_plan plan = {.varlen = attention_is_varlen(p)};
    cot_workspace_reserve(&plan.bytes, 1, sizeof(int32_t));
    plan.seqlens = cot_workspace_reserve(&plan.bytes, plan.varlen ? attention_sequence_count(p) + 1 : 0,
                                         sizeof(attention_seqlen_info));
    return plan;
}

COT_PLAN(plan_fwd_sm90, attention_sm90_fwd_plan, attention_sm90_fwd_plan_of(problem))

/* ---- backward ------------------------------------------------------------------------------------------ */

/* Tile columns: the width of the kernel's tiles of Q and K in shared memory. */
static inline int64_t attention_bwd_tile_columns(const attention_sizes *sizes)
{
    const int64_t columns = sizes->d_qk > sizes->d_v ? sizes->d_qk : sizes->d_v;
    return columns <= 64 ? 64 : columns <= 128 ? 128 : columns <= 192 ? 192 : 256;
}

/* Used columns: those that the products compute. The key-block kernel leaves out the last 32 of 128 tile columns if d
 * and d_v are at most 96. */
static inline int64_t attention_bwd_used_columns(const attention_sizes *sizes)
{
    const int64_t columns = attention_bwd_tile_columns(sizes);
    return columns == 128 && sizes->d_qk <= 96 && sizes->d_v <= 96 ? 96 : columns;
}

/* Queries of a tile. */
static inline int64_t attention_bwd_tile_queries(const attention_sizes *sizes)
{
    return ATTENTION_BWD_TILE_QUERIES(attention_bwd_tile_columns(sizes));
}

/* Query tiles of one head, in all sequences of the batch. An upper bound if sequences differ in length. */
static inline int64_t attention_bwd_batch_tiles_per_head(const attention_problem *p)
{
    const attention_sizes *sizes = &p->sizes;
    if (sizes->packed)
        return sizes->rows_q / attention_bwd_tile_queries(sizes) + attention_sequence_count(p);
    return cot_mul(sizes->B, cot_ceil_div(sizes->Tq, attention_bwd_tile_queries(sizes)));
}

/* Key blocks of one head, in all sequences of the batch. An upper bound if sequences differ in length. */
static inline int64_t attention_bwd_batch_key_blocks_per_head(const attention_problem *p)
{
    const attention_sizes *sizes = &p->sizes;
    if (sizes->packed)
        return sizes->rows_k / ATTENTION_BWD_KEYS + attention_sequence_count(p);
    return cot_mul(sizes->B, cot_ceil_div(sizes->Tk, ATTENTION_BWD_KEYS));
}

/* Whether d and d_v are the columns that a kernel computes. */
static inline bool attention_bwd_fills_used_columns(const attention_sizes *sizes)
{
    return (sizes->d_qk == sizes->d_v && sizes->d_qk == attention_bwd_used_columns(sizes)) ||
           (sizes->d_qk == 192 && sizes->d_v == 128);
}

/* Whether the call needs the ..._general or ..._softcap kernels: sequences of different lengths, windows, softcap, or
 * d or d_v below the used columns. */
static inline bool attention_bwd_needs_general(const attention_problem *p)
{
    const attention_sizes *sizes = &p->sizes;
    const int64_t unbounded = sizes->q_length + sizes->k_length;
    return !attention_bwd_fills_used_columns(sizes) || attention_is_varlen(p) || sizes->softcap > 0 ||
           sizes->left < unbounded || (sizes->right != 0 && sizes->right < unbounded);
}

static inline const char *attention_bwd_sm90_refusal(const attention_problem *p)
{
    const attention_sizes *sizes = &p->sizes;
    if (sizes->d_qk > 256 || sizes->d_v > 256)
        return "it supports d and d_v up to 256";
    if (attention_bwd_tile_columns(sizes) == 256 && sizes->softcap > 0 && sizes->dtype == COT_F16)
        return "f16 with softcap and d or d_v above 192 needs more registers than there are";
    if (sizes->dropped > 0 || cot_is_present(&p->alibi_slopes) || cot_is_present(&p->bias))
        return "it supports no dropout, ALiBi or bias";
    if (sizes->B > INT32_MAX / 64 || sizes->H > INT32_MAX / 64 || sizes->q_length > INT32_MAX / 4 ||
        sizes->k_length > INT32_MAX / 4 ||
        (double)attention_bwd_batch_key_blocks_per_head(p) * (double)sizes->Hkv > INT32_MAX / 4)
        return "it counts sequences, heads, queries, keys and key blocks in 32 bits";
    const double gqa_group = (double)sizes->H / (double)cot_max(sizes->Hkv, 1);
    if (gqa_group * gqa_group * (double)(sizes->Tq / attention_bwd_tile_queries(sizes) + 1) > INT32_MAX)
        return "H / Hkv and Tq are too large: see docs/kernels/attention_bwd_hopper.md#limits"; /* and step_of */
    if (attention_bwd_needs_general(p) &&
        (sizes->rows_q > INT32_MAX / 4 || sizes->rows_k > INT32_MAX / 4 ||
         (double)attention_bwd_batch_tiles_per_head(p) * (double)sizes->H > INT32_MAX / 64))
        return "it counts rows and tiles in 32 bits";
    if (!attention_tma_aligned(&p->q) || !attention_tma_aligned(&p->k) || !attention_tma_aligned(&p->v) ||
        !attention_tma_aligned(&p->dout))
        return "q, k, v and dout need a contiguous last axis, and data and other strides at multiples of 16 bytes";
    if (!attention_rows_contiguous(&p->out) || !attention_rows_contiguous(&p->dq) ||
        !attention_rows_contiguous(&p->dk) || !attention_rows_contiguous(&p->dv))
        return "out, dq, dk and dv need a contiguous last axis";
    return NULL;
}

static inline const char *admit_bwd_bf16_sm90(const void *problem)
{
    const attention_problem *p = problem;
    return p->sizes.dtype != COT_BF16 ? "it supports bf16 only" : attention_bwd_sm90_refusal(p);
}

static inline const char *admit_bwd_f16_sm90(const void *problem)
{
    const attention_problem *p = problem;
    return p->sizes.dtype != COT_F16 ? "it supports f16 only" : attention_bwd_sm90_refusal(p);
}

static inline double cost_bwd_sm90(const void *problem)
{
    const attention_sizes *sizes = problem;
    return 1000.0 + (double)sizes->H * (double)sizes->rows_q * (double)sizes->Tk;
}

/* The diagonal of a call whose sequences have the same length: query i attends to keys up to i + diagonal. */
static inline int64_t attention_diagonal(const attention_sizes *sizes)
{
    return sizes->k_length - sizes->q_length + sizes->q_begin - sizes->k_begin;
}

/* The plan of a backward: the kernels' tiles, and the offsets of the workspace's regions in bytes. */
typedef struct attention_sm90_bwd_plan {
    bool general;                       /* see attention_bwd_needs_general */
    int64_t tile_columns, tile_queries; /* the size of a tile */
    int64_t batch_tiles_per_head;       /* query tiles of one head, of all sequences */
    int64_t tiles;                      /* query tiles of all heads */
    int64_t dq_tiles;                   /* dQ tiles of all heads: 64 queries by 64 columns each */
    size_t lse_log2, scaled_delta, dq_accum, counters, seqlens, bytes;
    int64_t counter_count; /* of the region counters: dq_semaphore, unit_counter, delta_done */
} attention_sm90_bwd_plan;

static inline attention_sm90_bwd_plan attention_sm90_bwd_plan_of(const attention_problem *p)
{
    attention_sm90_bwd_plan plan = {.general = attention_bwd_needs_general(p),
                                    .tile_columns = attention_bwd_tile_columns(&p->sizes),
                                    .tile_queries = attention_bwd_tile_queries(&p->sizes),
                                    .batch_tiles_per_head = attention_bwd_batch_tiles_per_head(p)};
    plan.tiles = cot_mul(p->sizes.H, plan.batch_tiles_per_head);
    plan.dq_tiles = cot_mul(plan.tiles, plan.tile_queries / 64 * (plan.tile_columns / 64));
    const int64_t rows = cot_mul(plan.tiles, plan.tile_queries), dq_tiles = plan.dq_tiles;
    const int64_t sequences = plan.general ? attention_sequence_count(p) + 1 : 0;
    plan.lse_log2 = cot_workspace_reserve(&plan.bytes, rows, sizeof(float));
    plan.scaled_delta = cot_workspace_reserve(&plan.bytes, rows, sizeof(float));
    plan.dq_accum = cot_workspace_reserve(&plan.bytes, cot_mul(dq_tiles, ATTENTION_BWD_DQ_TILE_FLOATS), sizeof(float));
    plan.counter_count = cot_add(dq_tiles, cot_add(1, cot_mul(p->sizes.B, p->sizes.H)));
    plan.counters = cot_workspace_reserve(&plan.bytes, plan.counter_count, sizeof(uint32_t));
    plan.seqlens = cot_workspace_reserve(&plan.bytes, sequences, sizeof(attention_seqlen_info));
    return plan;
}

COT_PLAN(plan_bwd_sm90, attention_sm90_bwd_plan, attention_sm90_bwd_plan_of(problem))

#endif
