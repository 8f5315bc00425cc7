/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_prepare_sm90.cu: the kernel attention_prepare, which runs before the Hopper kernels. It sets the tile
 * counter. If sequences differ in length, it also writes where each sequence begins and ends (seqlens). */
#include "attention_sm90.h"

#include "../../../cuda/device/fault.cuh"
#include "../../../cuda/device/ptx.cuh"

enum { THREADS = 256 };

static __device__ __forceinline__ int64_t length_at(const attention_array &lengths, int64_t b)
{
    return ((const int32_t *)lengths.data)[b * lengths.stride[0]];
}

/* Rows first to end - 1 of sequence b. Values out of order or range are clamped and reported. Sequence B holds the rows
 * after the last sequence. */
static __device__ void rows_of(const attention_sequences &c, const attention_array &cu, int b, int64_t rows,
                               int64_t max_seqlen, int64_t &first, int64_t &end)
{
    const int64_t from = length_at(cu, b), to = b < c.B ? length_at(cu, b + 1) : rows;
    if (b == 0 ? from != 0 : from < 0 || from > rows)
        cot_report_fault(c.fault, COT_FAULT_CU_SEQLENS, b);
    if (b < c.B && (to < from || to - from > max_seqlen))
        cot_report_fault(c.fault, COT_FAULT_CU_SEQLENS, b + 1);
    first = from < 0 ? 0 : from > rows ? rows : from;
    end = to < first ? first : to > rows ? rows : to;
    if (b < c.B && end - first > max_seqlen)
        end = first + max_seqlen;
}

/* The number of sequence b's `rows` rows that are below seqused. */
static __device__ int64_t used_of(const attention_sequences &c, const attention_array &used, int b, int64_t rows)
{
    if (used.data == nullptr)
        return rows;
    const int64_t count = length_at(used, b);
    if (count < 0 || count > rows)
        cot_report_fault(c.fault, COT_FAULT_SEQUSED, b);
    return count < 0 ? 0 : count > rows ? rows : count;
}

static __device__ int64_t used_in_part(int64_t used, int64_t begin, int64_t rows)
{
    return used < begin ? 0 : used - begin < rows ? used - begin : rows;
}

static __device__ attention_seqlen_info sequence_of(const attention_sequences &c, int b)
{
    int64_t q = 0, q_end = c.rows_q, k = 0, k_end = c.rows_k;
    if (c.packed) {
        rows_of(c, c.cu_q, b, c.rows_q, c.max_seqlen_q, q, q_end);
        rows_of(c, c.cu_k, b, c.rows_k, c.max_seqlen_k, k, k_end);
    }
    attention_seqlen_info s = {0, 0, (int32_t)q, (int32_t)(q_end - q), 0, (int32_t)k, (int32_t)(k_end - k), 0, 0};
    if (b == c.B)
        return s;
    const int64_t sequence_q_length = used_of(c, c.seqused_q, b, c.packed ? q_end - q : c.q_length);
    const int64_t sequence_k_length = used_of(c, c.seqused_k, b, c.packed ? k_end - k : c.k_length);
    s.used_q = (int32_t)used_in_part(sequence_q_length, c.q_begin, q_end - q);
    s.used_k = (int32_t)used_in_part(sequence_k_length, c.k_begin, k_end - k);
    s.diagonal = sequence_k_length - sequence_q_length + c.q_begin - c.k_begin;
    return s;
}

/* Inclusive prefix sum of `value` over the thread block's threads. *total: the sum over all threads. */
static __device__ int64_t inclusive_scan(int32_t value, int64_t *sums, int64_t *total)
{
    sums[threadIdx.x] = value;
    __syncthreads();
    for (int step = 1; step < THREADS; step *= 2) {
        const int64_t other = (int)threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += other;
        __syncthreads();
    }
    const int64_t sum = sums[threadIdx.x];
    *total = sums[THREADS - 1];
    __syncthreads();
    return sum;
}

/* One thread block, which processes THREADS sequences at a time. cu_seqlens out of order can describe more rows than
 * the tensors have. A sequence that exceeds max_tiles or max_key_blocks then loses its rows. */
extern "C" __global__ void __launch_bounds__(THREADS) attention_prepare(const __grid_constant__ attention_sequences c)
{
    __shared__ int64_t sums[THREADS];
    cot_griddepcontrol_launch_dependents();
    if (threadIdx.x == 0 && c.tile_counter != nullptr)
        *c.tile_counter = (uint32_t)c.grid_blocks;
    if (c.seqlens == nullptr)
        return;
    int64_t earlier_tiles = 0, earlier_key_blocks = 0;
    for (int first = 0; first <= c.count; first += THREADS) {
        const int b = first + (int)threadIdx.x;
        attention_seqlen_info s = {};
        if (b < c.count)
            s = sequence_of(c, b);
        const int32_t tiles = (s.q_rows + c.tile_queries - 1) / c.tile_queries,
                      key_blocks = (s.k_rows + c.key_block_rows - 1) / c.key_block_rows;
        int64_t total_tiles, total_key_blocks;
        const int64_t tiles_before = earlier_tiles + inclusive_scan(tiles, sums, &total_tiles) - tiles,
                      key_blocks_before =
                          earlier_key_blocks + inclusive_scan(key_blocks, sums, &total_key_blocks) - key_blocks;
        if (tiles_before > c.max_tiles - tiles)
            s.q_rows = s.used_q = 0;
        if (key_blocks_before > c.max_key_blocks - key_blocks)
            s.k_rows = s.used_k = 0;
        s.tiles_before = (int32_t)min(tiles_before, (int64_t)c.max_tiles);
        s.key_blocks_before = (int32_t)min(key_blocks_before, (int64_t)c.max_key_blocks);
        if (b <= c.count)
            c.seqlens[b] = s;
        earlier_tiles += total_tiles;
        earlier_key_blocks += total_key_blocks;
    }
}
