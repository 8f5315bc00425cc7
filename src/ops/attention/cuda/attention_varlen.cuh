/* SPDX-License-Identifier: Apache-2.0
 * attention_varlen.cuh: for kernels whose sequences may differ in length: finds the sequence of a query tile or a key
 * block, clears rows of other sequences from a tile, and finds the units that a query tile attends to. */
#ifndef COT_ATTENTION_VARLEN_CUH
#define COT_ATTENTION_VARLEN_CUH

#include "attention_sm90.h"

#include "../../../cuda/device/ptx.cuh"

/* ATTENTION_UNBOUNDED in 32 bits. It is beyond any key, because rows are less than half of it. */
enum { ATTENTION_UNBOUNDED_32 = 1 << 30 };

/* Returns the index of the sequence that has query tile or key block `number`, where a sequence has those of `heads`
 * heads: the last sequence with (tiles or key blocks before it) * heads <= number. `before_member` selects tiles_before
 * or key_blocks_before, which count those of one head. */
static __device__ __forceinline__ int attention_find_sequence(const attention_sequences &sequences,
                                                              int32_t attention_seqlen_info::*before_member,
                                                              uint32_t heads, uint32_t number)
{
    int low = 0, high = sequences.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if ((uint32_t)(sequences.seqlens[middle].*before_member) * heads <= number)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Executed by a warp. Clears row `row` and all later rows in the PANELS panels of an operand. A panel has BYTES bytes
 * and 64 columns. The rows belong to other sequences, and 0 times their values need not be 0. The proxy fence makes the
 * zeros visible to wgmma. */
template <int BYTES, int PANELS>
static __device__ __forceinline__ void attention_clear_rows(unsigned char (*panels)[BYTES], int row)
{
    for (int panel = 0; panel < PANELS; panel++)
        for (int at = row * 128 + threadIdx.x % 32 * 16; at < BYTES; at += 32 * 16)
            *(uint4 *)(panels[panel] + at) = make_uint4(0, 0, 0, 0);
    cot_fence_proxy_async();
    __syncwarp();
}

/* The units of the backward (a key block, or a pair of key blocks) to which a query tile attends, numbered by keys
 * within the head. None if last < first. */
struct attention_unit_range {
    int first, last;
};

/* The range for the tile that begins at query first_query, of `queries` queries. Query i attends to the keys i +
 * first_visible_offset .. i + last_visible_offset that are below used_k. unit_keys: keys of a unit. */
static __device__ __forceinline__ attention_unit_range attention_unit_range_of(int first_query, int queries, int used_q,
                                                                               int used_k, int first_visible_offset,
                                                                               int last_visible_offset,
                                                                               int unit_keys = ATTENTION_BWD_KEYS)
{
    const int last_query = min(first_query + queries, used_q) - 1;
    const int first_key = max(first_query + first_visible_offset, 0),
              last_key = min(last_query + last_visible_offset, used_k - 1);
    if (last_query < first_query || last_key < first_key)
        return {0, -1};
    return {first_key / unit_keys, last_key / unit_keys};
}

static __device__ __forceinline__ int attention_clamp(int64_t value, int64_t low, int64_t high)
{
    return (int)(value < low ? low : value > high ? high : value);
}

#endif
