/* SPDX-License-Identifier: Apache-2.0
 * random_operand.cuh: random operands for the product-rate kernels. A GPU at its power limit multiplies zeros faster
 * than other numbers. */
#ifndef COT_CHECK_RANDOM_OPERAND_CUH
#define COT_CHECK_RANDOM_OPERAND_CUH

#include <stdint.h>

/* A number with mean 0 and a variance of about 1: the sum of three bytes of a hash of `index`. */
static __device__ __forceinline__ float random_operand(uint32_t index)
{
    uint32_t hash = index * 0x9e3779b9u + blockIdx.x;
    hash = (hash ^ hash >> 16) * 0x85ebca6bu;
    hash = (hash ^ hash >> 13) * 0xc2b2ae35u;
    hash ^= hash >> 16;
    return ((float)(hash & 255) + (float)(hash >> 8 & 255) + (float)(hash >> 16 & 255) - 382.5f) * (1.0f / 128);
}

#endif
