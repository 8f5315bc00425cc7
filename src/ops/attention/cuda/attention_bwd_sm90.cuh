/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_sm90.cuh: device code that the backward kernels for Hopper share: work of a block, wgmma products of 64
 * rows, masks, and stores of dQ, dK and dV. */
#ifndef COT_ATTENTION_BWD_SM90_CUH
#define COT_ATTENTION_BWD_SM90_CUH

#include "attention_maps.h"
#include "attention_scheduler.cuh"
#include "attention_softcap.cuh"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/bulk.cuh"
#include "../../../cuda/device/cluster.cuh"
#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/quad.cuh"
#include "../../../cuda/device/wgmma.cuh"

enum { QUERIES = ATTENTION_QUERIES, KEYS = ATTENTION_KEYS, WARPGROUP = 128, WARP = 32, TILE = 64 * 64 * 2 /* bytes */ };

extern __shared__ __align__(1024) unsigned char attention_memory[];

/* The work of a block: query heads first_head .. first_head + heads - 1 and, for each head, the query tiles
 * tile_end - 1 down to tile_begin. */
struct attention_work {
    int b, kv_head, first_head, heads, first_key, tile_begin, tile_end;
    /* Only if GENERAL: the block's sequence, as rows of the tensors' views. */
    int q_row, used_q, k_row, k_rows, used_k;
    int window_first, window_last;      /* offsets: query i attends to keys i + window_first .. i + window_last */
    int statistics_row, tiles_per_head; /* first row of lse_log2 for this sequence, rows of one head */
};

/* Blocks are numbered section by section, a section being ATTENTION_SECTION key-value heads. In a section the key block
 * is the slower index (ascending) and the head the faster one. With a causal mask the longest blocks therefore start
 * first. Blocks that add to the same rows of dQ follow each other. */
static __device__ __forceinline__ attention_work work_of(const attention_bwd_call &c, unsigned block)
{
    const unsigned heads = (unsigned)(c.B * c.Hkv), blocks = (unsigned)((c.Tk + KEYS - 1) / KEYS);
    const unsigned first_head = block / (blocks * ATTENTION_SECTION) * ATTENTION_SECTION;
    const unsigned section_heads = min((unsigned)ATTENTION_SECTION, heads - first_head),
                   index = block - first_head * blocks;
    const unsigned head = first_head + index % section_heads;
    attention_work w;
    w.b = (int)(head / (unsigned)c.Hkv);
    w.kv_head = (int)(head % (unsigned)c.Hkv);
    w.heads = (int)(c.H / c.Hkv);
    w.first_head = w.kv_head * w.heads;
    w.first_key = (int)(index / section_heads) * KEYS;
    const int64_t first_query = w.first_key - c.diagonal;
    w.tile_end = (int)c.tiles;
    w.tile_begin = c.causal && first_query > 0 ? (int)(first_query / QUERIES) : 0;
    w.tile_begin = w.tile_begin < w.tile_end ? w.tile_begin : w.tile_end;
    return w;
}

/* For sequences of different lengths, and for windows. Blocks are numbered sequence by sequence, and inside a sequence
 * as in work_of. Returns false if the grid has more blocks than there is work. */
static __device__ __forceinline__ bool work_of_general(const attention_bwd_call &c, unsigned block, attention_work &w)
{
    enum { FAR = 1 << 30 }; /* beyond any key: rows are less than half of FAR */
    const attention_seqlen_info *seqlens = c.scheduler.seqlens;
    const unsigned heads = (unsigned)c.Hkv;
    if (block >= (unsigned)seqlens[c.scheduler.sequences].first_block * heads)
        return false;
    const int sequence = attention_sequence_at(c.scheduler, &attention_seqlen_info::first_block, heads, block);
    const attention_seqlen_info s = seqlens[sequence];
    const unsigned blocks = (unsigned)(seqlens[sequence + 1].first_block - s.first_block);
    const unsigned block_in_sequence = block - (unsigned)s.first_block * heads;
    const unsigned first_head = block_in_sequence / (blocks * ATTENTION_SECTION) * ATTENTION_SECTION;
    const unsigned section_heads = min((unsigned)ATTENTION_SECTION, heads - first_head),
                   index = block_in_sequence - first_head * blocks;
    w.b = c.scheduler.packed ? 0 : sequence;
    w.kv_head = (int)(first_head + index % section_heads);
    w.heads = (int)(c.H / c.Hkv);
    w.first_head = w.kv_head * w.heads;
    w.first_key = (int)(index / section_heads) * KEYS;
    w.q_row = s.q_row;
    w.used_q = s.used_q;
    w.k_row = s.k_row;
    w.k_rows = s.k_rows;
    w.used_k = s.used_k;
    w.window_first = attention_clamp(s.diagonal - c.left, -FAR, FAR);
    w.window_last = attention_clamp(s.diagonal + c.right, -FAR, FAR);
    w.statistics_row = s.first_tile * (int)c.H;
    w.tiles_per_head = seqlens[sequence + 1].first_tile - s.first_tile;
    /* From the first query that attends to the block's first key to the last query that attends to its last key. */
    const int first_query = max(w.first_key - w.window_last, 0);
    const int last_query = min(min(w.first_key + KEYS, w.used_k) - 1 - w.window_first, w.used_q - 1);
    w.tile_begin = first_query / QUERIES;
    w.tile_end = w.first_key < w.used_k && last_query >= first_query ? last_query / QUERIES + 1 : w.tile_begin;
    return true;
}

/* The query tile after `tile`: the previous one, or the last tile of the next head. */
static __device__ __forceinline__ int next_tile(const attention_work &w, int tile)
{
    return tile > w.tile_begin ? tile - 1 : w.tile_end - 1;
}

/* The row of lse_log2 that holds tile 0 of query head h of the group. Slices of dQ use the same index. */
template <bool GENERAL>
static __device__ __forceinline__ int64_t statistics_row_of(const attention_bwd_call &c, const attention_work &w, int h)
{
    if (GENERAL)
        return w.statistics_row + (int64_t)(w.first_head + h) * w.tiles_per_head;
    return ((int64_t)w.b * c.H + w.first_head + h) * c.tiles;
}

/* The number of blocks with earlier keys that add to this query tile of dQ. */
template <bool GENERAL> static __device__ __forceinline__ uint32_t blocks_before_of(const attention_work &w, int tile)
{
    const int key_blocks_before = w.first_key / KEYS;
    return (uint32_t)(GENERAL ? key_blocks_before - max(tile * QUERIES + w.window_first, 0) / KEYS : key_blocks_before);
}

/* Issues acc = A B over HEAD_DIM columns, for S^T and dP^T. A and B are tiles of 64 rows by 64 columns in shared
 * memory. The tiles of A lie a_stride bytes apart. */
template <typename E, int HEAD_DIM>
static __device__ __forceinline__ void issue_gemm_ss(float (&acc)[32], const unsigned char *a, uint32_t a_stride,
                                                     const unsigned char *b)
{
    const uint64_t a_desc = cot_wgmma_k_major(cot_shared_address(a)), b_desc = cot_wgmma_k_major(cot_shared_address(b));
    cot_wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++)
        cot_wgmma<E, false, false>(acc, a_desc + k / 4 * (a_stride >> 4) + k % 4 * COT_WGMMA_K_STEP,
                                   b_desc + k / 4 * (TILE >> 4) + k % 4 * COT_WGMMA_K_STEP, k > 0);
    cot_wgmma_commit();
}

/* Issues acc += A B, for dK and dV. A is 64 keys by 64 queries in registers, B a tile of Q or dO. */
template <typename E, int N>
static __device__ __forceinline__ void issue_gemm_rs(float (&acc)[N], const uint32_t (&a)[16], const unsigned char *b)
{
    cot_wgmma_fence();
    const uint64_t b_desc = cot_wgmma_mn_major(cot_shared_address(b), TILE);
#pragma unroll
    for (int k = 0; k < 4; k++)
        cot_wgmma<E, true>(acc, a + 4 * k, b_desc + k * COT_WGMMA_MN_STEP, true);
    cot_wgmma_commit();
}

/* Whether any score of query tile `tile` and keys [key_begin, key_begin + 64) is masked. */
static __device__ __forceinline__ bool needs_mask(const attention_bwd_call &c, int tile, int key_begin)
{
    const int diagonal = tile * QUERIES + (int)c.diagonal; /* the last key that the tile's first query attends to */
    return (c.causal && key_begin + 63 > diagonal) || key_begin + 63 >= (int)c.Tk;
}

/* Sets masked scores to -inf, or to +inf if the scale is negative, so that P = 0. `key` is the key of this thread's
 * even accumulator pairs. Odd pairs are key + 8. */
static __device__ __forceinline__ void apply_mask(const attention_bwd_call &c, int tile, int key, float (&scores)[32])
{
    const int diagonal = tile * QUERIES + (int)c.diagonal, Tk = (int)c.Tk;
    const float masked = __int_as_float(c.scale_log2 < 0.0f ? 0x7f800000 : 0xff800000);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int query = 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2, score_key = key + 8 * (i / 2 % 2);
        if ((c.causal && score_key > diagonal + query) || score_key >= Tk)
            scores[i] = masked;
    }
}

static __device__ __forceinline__ bool needs_mask_general(const attention_work &w, int tile, int key_begin)
{
    /* The first and the last key that the tile's first query attends to. */
    const int first_visible = tile * QUERIES + w.window_first, last_visible = tile * QUERIES + w.window_last;
    const int key_last = key_begin + 63;
    return key_last > last_visible || key_begin < first_visible + QUERIES - 1 || key_last >= w.used_k;
}

/* Whether accumulator i is masked. `key` as in apply_mask. */
static __device__ __forceinline__ bool is_masked(const attention_work &w, int tile, int key, int i)
{
    const int query = tile * QUERIES + 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2, score_key = key + 8 * (i / 2 % 2);
    return score_key > query + w.window_last || score_key < query + w.window_first || score_key >= w.used_k;
}

static __device__ __forceinline__ void apply_mask_general(const attention_work &w, int tile, int key,
                                                          float masked_score, float (&scores)[32])
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        if (is_masked(w, tile, key, i))
            scores[i] = masked_score;
}

/* Whether no query of the tile attends to any of the keys [key_begin, key_begin + 64). */
static __device__ __forceinline__ bool fully_masked(const attention_work &w, int tile, int key_begin)
{
    const int query = tile * QUERIES;
    return key_begin > query + QUERIES - 1 + w.window_last | key_begin + 63 < query + w.window_first |
           key_begin >= w.used_k;
}

/* Stores a warp's 16 rows of a slice of dQ to a stage in shared memory, in the order of the accumulators. */
static __device__ __forceinline__ void stage_dq_slice(float *dq, const float (&acc)[32], uint64_t *full)
{
    const int warp = threadIdx.x % WARPGROUP / WARP, lane = threadIdx.x % WARP;
    float4 *staged = (float4 *)dq + warp * 8 * WARP + lane;
#pragma unroll
    for (int group = 0; group < 8; group++)
        staged[group * WARP] = make_float4(acc[4 * group], acc[4 * group + 1], acc[4 * group + 2], acc[4 * group + 3]);
    cot_fence_proxy_async();
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(full);
}

/* Adds a staged slice to dq_accum and frees the stage. DETERMINISTIC: waits until all blocks with earlier keys have
 * added to the slice: then its semaphore equals blocks_before. Increments the semaphore when this block's sums are in
 * memory. */
template <bool DETERMINISTIC>
static __device__ __forceinline__ void add_dq_slice(const attention_bwd_call &c, uint32_t blocks_before, int64_t slice,
                                                    const float *dq, uint64_t *full, uint32_t parity, uint64_t *empty)
{
    if (DETERMINISTIC) {
        while (cot_load_acquire(c.dq_semaphore + slice) != blocks_before)
            ;
        cot_fence_proxy_async_global();
    }
    cot_mbarrier_wait(full, parity);
    cot_bulk_add_f32(c.dq_accum + slice * ATTENTION_DQ_SLICE, dq, ATTENTION_DQ_SLICE * sizeof(float));
    cot_bulk_commit();
    cot_bulk_wait_read();
    cot_mbarrier_arrive(empty);
    if (DETERMINISTIC) {
        cot_bulk_wait();
        cot_add_release(c.dq_semaphore + slice, 1);
    }
}

/* Address of this thread's fragment of P^T or dS^T in a tile [query][key]. 16 queries further is 16 rows of 128
 * bytes. */
static __device__ __forceinline__ uint32_t fragment_address(const unsigned char *tile)
{
    const int lane = threadIdx.x % WARP, row = lane / 16 * 8 + lane % 8;
    const int unit = threadIdx.x % WARPGROUP / WARP * 2 + lane / 8 % 2;
    return cot_shared_address(tile) + row * 128 + (unit ^ lane % 8) * 16;
}

/* Stores rows of dK or dV, columns [column, column + 2 N). GENERAL: only the columns below `columns` exist, and keys
 * past used_k get 0, even where their accumulators hold 0 times NaN. */
template <typename E, bool GENERAL, int N>
static __device__ __forceinline__ void store_rows(const attention_bwd_call &c, const attention_array &out,
                                                  bool vectorized, const attention_work &w, int key, int column,
                                                  int columns, float scale, const float (&acc)[N])
{
    if (out.data == nullptr)
        return;
    const int rows = GENERAL ? w.k_rows : (int)c.Tk;
    const int64_t offset =
        w.b * out.stride[0] + (GENERAL ? w.k_row : 0) * out.stride[1] + w.kv_head * out.stride[2] + column;
    if (vectorized) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int lane_column = 8 * (threadIdx.x % 4);
            E *row = (E *)out.data + offset + (key + 8 * half) * out.stride[1] + lane_column;
#pragma unroll
            for (int group = 0; group < N / 4; group += 4) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int e = 4 * (group + i) + 2 * half;
                    words[i] = cot_pack_pair<E>(scale * acc[e], scale * acc[e + 1]);
                }
                const uint4 packed = cot_quad_transpose(words[0], words[1], words[2], words[3]);
                if (key + 8 * half < rows && (!GENERAL || 8 * group + lane_column < columns))
                    *(uint4 *)(row + 8 * group) =
                        !GENERAL || key + 8 * half < w.used_k ? packed : make_uint4(0, 0, 0, 0);
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int row = key + 8 * (i / 2 % 2), column_i = 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2;
        if (row >= rows || (GENERAL && column_i >= columns))
            continue;
        const int64_t element = offset + row * out.stride[1] + column_i;
        const float old = c.accumulate ? cot_load(out.data, out.dtype, element) : 0.0f;
        cot_store(out.data, out.dtype, element, !GENERAL || row < w.used_k ? fmaf(scale, acc[i], old) : old);
    }
}

#endif
