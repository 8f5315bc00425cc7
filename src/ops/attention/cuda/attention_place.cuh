/* SPDX-License-Identifier: Apache-2.0
 * attention_place.cuh: finds the sequence of a tile or a block where sequences differ. */
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

static __device__ __forceinline__ int attention_clamped(int64_t value, int64_t least, int64_t most)
{
    return (int)(value < least ? least : value > most ? most : value);
}

#endif
