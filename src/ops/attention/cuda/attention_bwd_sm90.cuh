/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_sm90.cuh: what the backward's kernels for Hopper have in common: how blocks and their walks are numbered,
 * products of 64 rows, masks, and rows of results. */
#ifndef COT_ATTENTION_BWD_SM90_CUH
#define COT_ATTENTION_BWD_SM90_CUH

#include "attention_maps.h"
#include "attention_place.cuh"
#include "attention_softcap.cuh"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/bulk.cuh"
#include "../../../cuda/device/cluster.cuh"
#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/quad.cuh"
#include "../../../cuda/device/wgmma.cuh"

enum { QUERIES = ATTENTION_QUERIES, KEYS = ATTENTION_KEYS, GROUP = 128, WARP = 32, TILE = 64 * 64 * 2 /* bytes */ };

extern __shared__ __align__(1024) unsigned char attention_memory[];

/* What the block's groups walk over: heads first .. first + heads, of each the tiles end - 1 down to begin. */
struct attention_walk {
    int b, kv_head, first_head, heads, first_key, begin, end;
    /* Of its sequence, where sequences differ: rows of the tensors' views. */
    int q_row, used_q, k_row, k_rows, used_k;
    int first, last; /* query i sees the keys first + i .. last + i */
    int row, tiles;  /* lse2's first row, and its rows for one head */
};

/* Blocks are numbered by sections of heads, in a section by keys from the first on, then by head: with a causal mask the
 * long ones come first, and the blocks that add to the same rows of dQ come one after another. */
static __device__ __forceinline__ attention_walk walk_of(const attention_bwd_call &c, unsigned block)
{
    const unsigned heads = (unsigned)(c.B * c.Hkv), blocks = (unsigned)((c.Tk + KEYS - 1) / KEYS);
    const unsigned first = block / (blocks * ATTENTION_SECTION) * ATTENTION_SECTION;
    const unsigned width = min((unsigned)ATTENTION_SECTION, heads - first), number = block - first * blocks;
    const unsigned head = first + number % width;
    attention_walk w;
    w.b = (int)(head / (unsigned)c.Hkv);
    w.kv_head = (int)(head % (unsigned)c.Hkv);
    w.heads = (int)(c.H / c.Hkv);
    w.first_head = w.kv_head * w.heads;
    w.first_key = (int)(number / width) * KEYS;
    const int64_t first_query = w.first_key - c.diagonal;
    w.end = (int)c.tiles;
    w.begin = c.causal && first_query > 0 ? (int)(first_query / QUERIES) : 0;
    w.begin = w.begin < w.end ? w.begin : w.end;
    return w;
}

/* The same where sequences differ, and with windows: the blocks of a sequence follow those of the one before. False: there
 * are fewer blocks. */
static __device__ __forceinline__ bool walk_all(const attention_bwd_call &c, unsigned block, attention_walk &w)
{
    enum { FAR = 1 << 30 }; /* beyond any key: rows are less than half of it */
    const attention_placed *table = c.place.table;
    const unsigned heads = (unsigned)c.Hkv;
    if (block >= (unsigned)table[c.place.sequences].first_block * heads)
        return false;
    const int low = attention_sequence_of(c.place, &attention_placed::first_block, heads, block);
    const attention_placed s = table[low];
    const unsigned blocks = (unsigned)(table[low + 1].first_block - s.first_block);
    const unsigned own = block - (unsigned)s.first_block * heads;
    const unsigned first = own / (blocks * ATTENTION_SECTION) * ATTENTION_SECTION;
    const unsigned width = min((unsigned)ATTENTION_SECTION, heads - first), number = own - first * blocks;
    w.b = c.place.packed ? 0 : low;
    w.kv_head = (int)(first + number % width);
    w.heads = (int)(c.H / c.Hkv);
    w.first_head = w.kv_head * w.heads;
    w.first_key = (int)(number / width) * KEYS;
    w.q_row = s.q_row;
    w.used_q = s.used_q;
    w.k_row = s.k_row;
    w.k_rows = s.k_rows;
    w.used_k = s.used_k;
    w.first = attention_clamped(s.diagonal - c.left, -FAR, FAR);
    w.last = attention_clamped(s.diagonal + c.right, -FAR, FAR);
    w.row = s.first_tile * (int)c.H;
    w.tiles = table[low + 1].first_tile - s.first_tile;
    /* Queries from the first that sees the first key to the last that sees the last one. */
    const int from = max(w.first_key - w.last, 0);
    const int to = min(min(w.first_key + KEYS, w.used_k) - 1 - w.first, w.used_q - 1);
    w.begin = from / QUERIES;
    w.end = w.first_key < w.used_k && to >= from ? to / QUERIES + 1 : w.begin;
    return true;
}

/* The tile after that one, of the next head where need be. */
static __device__ __forceinline__ int tile_after(const attention_walk &w, int tile)
{
    return tile > w.begin ? tile - 1 : w.end - 1;
}

/* The row of lse2 of query head h of the group, tile 0; the slices of dQ are numbered alike. */
template <bool ALL>
static __device__ __forceinline__ int64_t row_of(const attention_bwd_call &c, const attention_walk &w, int h)
{
    if (ALL)
        return w.row + (int64_t)(w.first_head + h) * w.tiles;
    return ((int64_t)w.b * c.H + w.first_head + h) * c.tiles;
}

/* How many blocks with earlier keys see a tile of queries. */
template <bool ALL> static __device__ __forceinline__ uint32_t turn_of(const attention_walk &w, int tile)
{
    const int before = w.first_key / KEYS;
    return (uint32_t)(ALL ? before - max(tile * QUERIES + w.first, 0) / KEYS : before);
}

/* d = A B over D columns, A and B in tiles of 64 rows and columns, A's `apart` bytes from each other: S^T and dP^T. */
template <typename E, int D>
static __device__ __forceinline__ void score_product(float (&d)[32], const unsigned char *a, uint32_t apart,
                                                     const unsigned char *b)
{
    const uint64_t left = cot_wgmma_k_major(cot_shared_address(a)), right = cot_wgmma_k_major(cot_shared_address(b));
    cot_wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        cot_wgmma<E, false, false>(d, left + k / 4 * (apart >> 4) + k % 4 * COT_WGMMA_K_STEP,
                                   right + k / 4 * (TILE >> 4) + k % 4 * COT_WGMMA_K_STEP, k > 0);
    cot_wgmma_commit();
}

/* sums += A B, A the 64 keys by 64 queries in registers, B a tile of Q or dO: dK and dV. */
template <typename E, int N>
static __device__ __forceinline__ void add_product(float (&sums)[N], const uint32_t (&a)[16], const unsigned char *b)
{
    cot_wgmma_fence();
    const uint64_t right = cot_wgmma_mn_major(cot_shared_address(b), TILE);
#pragma unroll
    for (int k = 0; k < 4; k++)
        cot_wgmma<E, true>(sums, a + 4 * k, right + k * COT_WGMMA_MN_STEP, true);
    cot_wgmma_commit();
}

/* Whether some query of the tile does not see all of the 64 keys from `least` on. */
static __device__ __forceinline__ bool crossed(const attention_bwd_call &c, int tile, int least)
{
    const int diagonal = tile * QUERIES + (int)c.diagonal; /* the last key that the tile's first query sees */
    return (c.causal && least + 63 > diagonal) || least + 63 >= (int)c.Tk;
}

/* Where a query of the tile must not see a key, the score becomes one that gives P = 0. key: of this thread's even pairs. */
static __device__ __forceinline__ void hide_scores(const attention_bwd_call &c, int tile, int key, float (&scores)[32])
{
    const int diagonal = tile * QUERIES + (int)c.diagonal, Tk = (int)c.Tk;
    const float hidden = __int_as_float(c.scale_log2 < 0.0f ? 0x7f800000 : 0xff800000);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int column = 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2, own = key + 8 * (i / 2 % 2);
        if ((c.causal && own > diagonal + column) || own >= Tk)
            scores[i] = hidden;
    }
}

/* The same where sequences differ, and with windows: whether some query of the tile does not see all of a consumer's keys. */
static __device__ __forceinline__ bool ragged(const attention_walk &w, int tile, int least)
{
    const int first = tile * QUERIES + w.first, last = tile * QUERIES + w.last; /* of the tile's first query */
    const int most = least + 63;
    return most > last || least < first + QUERIES - 1 || most >= w.used_k;
}

/* Of this thread's score i. */
static __device__ __forceinline__ bool hidden(const attention_walk &w, int tile, int key, int i)
{
    const int query = tile * QUERIES + 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2, own = key + 8 * (i / 2 % 2);
    return own > query + w.last || own < query + w.first || own >= w.used_k;
}

static __device__ __forceinline__ void hide_scores_all(const attention_walk &w, int tile, int key, float value,
                                                       float (&scores)[32])
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        if (hidden(w, tile, key, i))
            scores[i] = value;
}

/* Whether no query of the tile sees any of the 64 keys from `least` on. */
static __device__ __forceinline__ bool unseen(const attention_walk &w, int tile, int least)
{
    const int query = tile * QUERIES;
    return least > query + QUERIES - 1 + w.last | least + 63 < query + w.first | least >= w.used_k;
}

/* A warp's 16 rows of a slice of dQ to where an adder takes them, in the accumulators' order. */
static __device__ __forceinline__ void stage_sums(float *dq, const float (&sums)[32], uint64_t *full)
{
    const int warp = threadIdx.x % GROUP / WARP, lane = threadIdx.x % WARP;
    float4 *staged = (float4 *)dq + warp * 8 * WARP + lane;
#pragma unroll
    for (int group = 0; group < 8; group++)
        staged[group * WARP] =
            make_float4(sums[4 * group], sums[4 * group + 1], sums[4 * group + 2], sums[4 * group + 3]);
    cot_proxy_fence();
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(full);
}

/* Adds a staged slice, number `number` of all, to memory, and hands the stage back. In order: the blocks with earlier keys
 * all see the tile, and have added to the slice when its counter says as many, `turn`; that this one has, it tells when its
 * sums have landed. */
template <bool ORDERED>
static __device__ __forceinline__ void add_slice(const attention_bwd_call &c, uint32_t turn, int64_t number,
                                                 const float *dq, uint64_t *full, uint32_t parity, uint64_t *empty)
{
    if (ORDERED) {
        while (cot_load_acquire(c.counters + number) != turn)
            ;
        cot_fence_async_global();
    }
    cot_mbarrier_wait(full, parity);
    cot_bulk_add_f32(c.dq_sums + number * ATTENTION_DQ_SLICE, dq, ATTENTION_DQ_SLICE * sizeof(float));
    cot_bulk_commit();
    cot_bulk_wait_read();
    cot_mbarrier_arrive(empty);
    if (ORDERED) {
        cot_bulk_wait();
        cot_add_release(c.counters + number, 1);
    }
}

/* Where this thread's fragments of P^T or dS^T lie in a tile [query][key]: 16 queries further are 16 rows of 128 bytes. */
static __device__ __forceinline__ uint32_t fragment_address(const unsigned char *tile)
{
    const int lane = threadIdx.x % WARP, row = lane / 16 * 8 + lane % 8;
    const int unit = threadIdx.x % GROUP / WARP * 2 + lane / 8 % 2;
    return cot_shared_address(tile) + row * 128 + (unit ^ lane % 8) * 16;
}

/* Stores rows of dK or dV, 2 N columns from `column` on. ALL: the columns end at `columns`, and keys past the used ones get 0,
 * also where their sums hold 0 times NaN. */
template <typename E, bool ALL, int N>
static __device__ __forceinline__ void store_rows(const attention_bwd_call &c, const attention_array &out, bool vectors,
                                                  const attention_walk &w, int key, int column, int columns,
                                                  float scale, const float (&sums)[N])
{
    if (out.data == nullptr)
        return;
    const int rows = ALL ? w.k_rows : (int)c.Tk;
    const int64_t at = w.b * out.stride[0] + (ALL ? w.k_row : 0) * out.stride[1] + w.kv_head * out.stride[2] + column;
    if (vectors) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int own = 8 * (threadIdx.x % 4);
            E *row = (E *)out.data + at + (key + 8 * half) * out.stride[1] + own;
#pragma unroll
            for (int group = 0; group < N / 4; group += 4) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int from = 4 * (group + i) + 2 * half;
                    words[i] = cot_pack_pair<E>(scale * sums[from], scale * sums[from + 1]);
                }
                const uint4 eight = cot_quad_transpose(words[0], words[1], words[2], words[3]);
                if (key + 8 * half < rows && (!ALL || 8 * group + own < columns))
                    *(uint4 *)(row + 8 * group) = !ALL || key + 8 * half < w.used_k ? eight : make_uint4(0, 0, 0, 0);
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int row = key + 8 * (i / 2 % 2), own = 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2;
        if (row >= rows || (ALL && own >= columns))
            continue;
        const int64_t to = at + row * out.stride[1] + own;
        const float before = c.accumulate ? cot_load(out.data, out.dtype, to) : 0.0f;
        cot_store(out.data, out.dtype, to, !ALL || row < w.used_k ? fmaf(scale, sums[i], before) : before);
    }
}

#endif
