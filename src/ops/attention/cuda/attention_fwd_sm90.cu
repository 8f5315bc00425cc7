/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_sm90.cu: the forward on Hopper for d and dv up to 128; and what comes before it for all sizes, the counter of
 * tiles and, where sequences differ in length, where each begins and ends. attention_fwd_sm90.cuh has the kernel. */
#include "attention_fwd_sm90.cuh"

#include "../../../cuda/device/fault.cuh"

enum { PREPARE_THREADS = 256 };

static __device__ __forceinline__ int64_t length_at(const attention_array &lengths, int64_t b)
{
    return ((const int32_t *)lengths.data)[b * lengths.stride[0]];
}

/* Rows of sequence b, first to end - 1; what is out of order or range is clamped, and reported. Sequence B: the rows beyond
 * the last one. */
static __device__ void rows_of(const attention_fwd_call &c, const attention_array &cu, int b, int64_t rows,
                               int64_t &first, int64_t &end)
{
    const int64_t from = length_at(cu, b), to = b < c.B ? length_at(cu, b + 1) : rows;
    if (b == 0 ? from != 0 : from < 0 || from > rows)
        cot_report_fault(c.fault, COT_FAULT_CU_SEQLENS, b);
    if (b < c.B && to < from)
        cot_report_fault(c.fault, COT_FAULT_CU_SEQLENS, b + 1);
    first = from < 0 ? 0 : from > rows ? rows : from;
    end = to < first ? first : to > rows ? rows : to;
}

/* What counts of sequence b's `whole` rows. */
static __device__ int64_t used_of(const attention_fwd_call &c, const attention_array &used, int b, int64_t whole)
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

static __device__ attention_fwd_sequence sequence_of(const attention_fwd_call &c, int b)
{
    int64_t q = 0, q_end = c.Tq, k = 0, k_end = c.Tk;
    if (c.packed) {
        rows_of(c, c.cu_q, b, c.Tq, q, q_end);
        rows_of(c, c.cu_k, b, c.Tk, k, k_end);
    }
    attention_fwd_sequence s = {0, (int32_t)q, (int32_t)(q_end - q), 0, (int32_t)k, 0, 0};
    if (b == c.B)
        return s;
    const int64_t used_q = used_of(c, c.used_q, b, c.packed ? q_end - q : c.q_length);
    const int64_t used_k = used_of(c, c.used_k, b, c.packed ? k_end - k : c.k_length);
    s.used_q = (int32_t)part(used_q, c.q_begin, q_end - q);
    s.used_k = (int32_t)part(used_k, c.k_begin, k_end - k);
    s.diagonal = used_k - used_q + c.q_begin - c.k_begin;
    return s;
}

/* One block. The tiles before each sequence are a sum over threads, PREPARE_THREADS sequences at a time. */
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS)
    attention_fwd_prepare(const __grid_constant__ attention_fwd_call c)
{
    __shared__ int32_t sums[PREPARE_THREADS];
    cot_launch_dependents();
    if (threadIdx.x == 0)
        *c.counter = (uint32_t)c.blocks;
    if (c.table == nullptr)
        return;
    int32_t before = 0;
    for (int first = 0; first <= c.sequences; first += PREPARE_THREADS) {
        const int b = first + (int)threadIdx.x;
        attention_fwd_sequence s = {};
        if (b < c.sequences)
            s = sequence_of(c, b);
        const int32_t tiles = (s.q_rows + c.queries - 1) / c.queries;
        sums[threadIdx.x] = tiles;
        __syncthreads();
        for (int step = 1; step < PREPARE_THREADS; step *= 2) {
            const int32_t other = (int)threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
            __syncthreads();
            sums[threadIdx.x] += other;
            __syncthreads();
        }
        s.first_tile = before + sums[threadIdx.x] - tiles;
        if (b <= c.sequences)
            c.table[b] = s;
        before += sums[PREPARE_THREADS - 1];
        __syncthreads();
    }
}

ATTENTION_FWD_SMALL(INSTANCE_BF16)
ATTENTION_FWD_SMALL(INSTANCE_F16)
