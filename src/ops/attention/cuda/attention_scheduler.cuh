/* SPDX-License-Identifier: Apache-2.0
 * attention_scheduler.cuh: for kernels whose sequences differ in length: finds the sequence of a tile or a block, and
 * clears rows of other sequences from a tile. */
#ifndef COT_ATTENTION_SCHEDULER_CUH
#define COT_ATTENTION_SCHEDULER_CUH

#include "attention_cuda.h"

#include "../../../cuda/device/ptx.cuh"

/* The last sequence with first * heads <= number. `first_member` selects first_tile or first_block, which count one
 * head. */
static __device__ __forceinline__ int attention_sequence_at(const attention_scheduler &scheduler,
                                                            int32_t attention_seqlen_info::*first_member,
                                                            uint32_t heads, uint32_t number)
{
    int low = 0, high = scheduler.sequences;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if ((uint32_t)(scheduler.seqlens[middle].*first_member) * heads <= number)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Executed by a warp. Clears row `row` and all later rows in the SLICES slices of an operand. A slice has BYTES bytes
 * and 64 columns. The rows belong to other sequences, and 0 times their values need not be 0. The proxy fence makes the
 * zeros visible to wgmma. */
template <int BYTES, int SLICES>
static __device__ __forceinline__ void attention_clear_rows(unsigned char (*slices)[BYTES], int row)
{
    for (int slice = 0; slice < SLICES; slice++)
        for (int at = row * 128 + threadIdx.x % 32 * 16; at < BYTES; at += 32 * 16)
            *(uint4 *)(slices[slice] + at) = make_uint4(0, 0, 0, 0);
    cot_fence_proxy_async();
    __syncwarp();
}

static __device__ __forceinline__ int attention_clamp(int64_t value, int64_t low, int64_t high)
{
    return (int)(value < low ? low : value > high ? high : value);
}

#endif
