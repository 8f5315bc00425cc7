/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_place_sm90.cu: what comes before the kernels for Hopper: the counter of tiles and, where sequences differ, where
 * each begins and ends (attention_place.cuh reads it). */
#include "attention_cuda.h"

#include "../../../cuda/device/fault.cuh"
#include "../../../cuda/device/ptx.cuh"

enum { PLACE_THREADS = 256 };

static __device__ __forceinline__ int64_t length_at(const attention_array &lengths, int64_t b)
{
    return ((const int32_t *)lengths.data)[b * lengths.stride[0]];
}

/* Rows of sequence b, first to end - 1; what is out of order or range is clamped, and reported. Sequence B: the rows beyond
 * the last one. */
static __device__ void rows_of(const attention_placing &c, const attention_array &cu, int b, int64_t rows,
                               int64_t longest, int64_t &first, int64_t &end)
{
    const int64_t from = length_at(cu, b), to = b < c.B ? length_at(cu, b + 1) : rows;
    if (b == 0 ? from != 0 : from < 0 || from > rows)
        cot_report_fault(c.fault, COT_FAULT_CU_SEQLENS, b);
    if (b < c.B && (to < from || to - from > longest))
        cot_report_fault(c.fault, COT_FAULT_CU_SEQLENS, b + 1);
    first = from < 0 ? 0 : from > rows ? rows : from;
    end = to < first ? first : to > rows ? rows : to;
}

/* What counts of sequence b's `whole` rows. */
static __device__ int64_t used_of(const attention_placing &c, const attention_array &used, int b, int64_t whole)
{
    if (used.data == nullptr)
        return whole;
    const int64_t count = length_at(used, b);
    if (count < 0 || count > whole)
        cot_report_fault(c.fault, COT_FAULT_SEQUSED, b);
    return count < 0 ? 0 : count > whole ? whole : count;
}

static __device__ int64_t part(int64_t used, int64_t begin, int64_t rows)
{
    return used < begin ? 0 : used - begin < rows ? used - begin : rows;
}

static __device__ attention_placed sequence_of(const attention_placing &c, int b)
{
    int64_t q = 0, q_end = c.Tq, k = 0, k_end = c.Tk;
    if (c.packed) {
        rows_of(c, c.cu_q, b, c.Tq, c.longest_q, q, q_end);
        rows_of(c, c.cu_k, b, c.Tk, c.longest_k, k, k_end);
    }
    attention_placed s = {0, 0, (int32_t)q, (int32_t)(q_end - q), 0, (int32_t)k, (int32_t)(k_end - k), 0, 0};
    if (b == c.B)
        return s;
    const int64_t used_q = used_of(c, c.used_q, b, c.packed ? q_end - q : c.q_length);
    const int64_t used_k = used_of(c, c.used_k, b, c.packed ? k_end - k : c.k_length);
    s.used_q = (int32_t)part(used_q, c.q_begin, q_end - q);
    s.used_k = (int32_t)part(used_k, c.k_begin, k_end - k);
    s.diagonal = used_k - used_q + c.q_begin - c.k_begin;
    return s;
}

/* The sum of `own` over the threads up to this one; *all: over all of them. */
static __device__ int32_t sum_up_to(int32_t own, int32_t *sums, int32_t *all)
{
    sums[threadIdx.x] = own;
    __syncthreads();
    for (int step = 1; step < PLACE_THREADS; step *= 2) {
        const int32_t other = (int)threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += other;
        __syncthreads();
    }
    const int32_t sum = sums[threadIdx.x];
    *all = sums[PLACE_THREADS - 1];
    __syncthreads();
    return sum;
}

/* One block; PLACE_THREADS sequences at a time. */
extern "C" __global__ void __launch_bounds__(PLACE_THREADS) attention_place(const __grid_constant__ attention_placing c)
{
    __shared__ int32_t sums[PLACE_THREADS];
    cot_launch_dependents();
    if (threadIdx.x == 0 && c.counter != nullptr)
        *c.counter = (uint32_t)c.blocks;
    if (c.table == nullptr)
        return;
    int32_t tiles_before = 0, blocks_before = 0;
    for (int first = 0; first <= c.sequences; first += PLACE_THREADS) {
        const int b = first + (int)threadIdx.x;
        attention_placed s = {};
        if (b < c.sequences)
            s = sequence_of(c, b);
        const int32_t tiles = (s.q_rows + c.queries - 1) / c.queries, blocks = (s.k_rows + c.keys - 1) / c.keys;
        int32_t all_tiles, all_blocks;
        s.first_tile = tiles_before + sum_up_to(tiles, sums, &all_tiles) - tiles;
        s.first_block = blocks_before + sum_up_to(blocks, sums, &all_blocks) - blocks;
        if (s.first_tile > c.most_tiles - tiles)
            s.q_rows = s.used_q = 0;
        if (b <= c.sequences)
            c.table[b] = s;
        tiles_before += all_tiles;
        blocks_before += all_blocks;
    }
}
