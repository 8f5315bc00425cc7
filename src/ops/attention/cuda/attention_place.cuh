/* SPDX-License-Identifier: Apache-2.0
 * attention_place.cuh: for kernels where sequences differ: finds the sequence of a tile or a
 * block, and clears what a tile holds of others. */
#ifndef COT_ATTENTION_PLACE_CUH
#define COT_ATTENTION_PLACE_CUH

#include "attention_cuda.h"

#include "../../../cuda/device/ptx.cuh"

/* The last sequence whose first tile (its member `first`) for one head, times `heads`, is not after `number`. */
static __device__ __forceinline__ int attention_sequence_of(const attention_placing &place,
                                                            int32_t attention_placed::*first, uint32_t heads,
                                                            uint32_t number)
{
    int low = 0, high = place.sequences;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if ((uint32_t)(place.table[middle].*first) * heads <= number)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* By a warp: of an operand's SLICES slices of BYTES bytes, 64 columns each, the rows from `row` on become zero, also for the
 * products. They belong to others, and 0 times what they hold need not be 0. */
template <int BYTES, int SLICES>
static __device__ __forceinline__ void attention_clear_rows(unsigned char (*slices)[BYTES], int row)
{
    for (int slice = 0; slice < SLICES; slice++)
        for (int at = row * 128 + threadIdx.x % 32 * 16; at < BYTES; at += 32 * 16)
            *(uint4 *)(slices[slice] + at) = make_uint4(0, 0, 0, 0);
    cot_proxy_fence();
    __syncwarp();
}

static __device__ __forceinline__ int attention_clamped(int64_t value, int64_t least, int64_t most)
{
    return (int)(value < least ? least : value > most ? most : value);
}

#endif
