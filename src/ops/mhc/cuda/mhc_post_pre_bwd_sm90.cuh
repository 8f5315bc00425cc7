/* SPDX-License-Identifier: Apache-2.0
 * mhc_post_pre_bwd_sm90.cuh: f16 terms of dh_mix and phi gamma, for the second half of post_pre's backward.
 *
 * Both have two terms, with 22 bits. A power of two scales dh_mix of each token and phi gamma of each stream of a block, so
 * that the largest element is near 2^15. Elements from 2^-17 of the largest keep the 22 bits; the error of smaller
 * elements is at most 2^-39 of the largest. The product of the second terms is left out. */
#ifndef COT_MHC_POST_PRE_BWD_SM90_CUH
#define COT_MHC_POST_PRE_BWD_SM90_CUH

#include "mhc_mma.cuh"

enum { TERMS = 2 };

/* Power-of-two factors for f16 terms of numbers of which `largest` has the largest absolute value. `up` makes it at most
 * 2^15; `down` is 1 / up. up is at most 2^max_exponent. */
struct term_scale {
    float up, down;

    __device__ __forceinline__ term_scale(float largest, int max_exponent)
    {
        const int exponent = max((int)(__float_as_uint(largest) >> 23), 127 + 14 - max_exponent); /* biased */
        up = __uint_as_float((uint32_t)(2 * 127 + 14 - exponent) << 23);
        down = __uint_as_float((uint32_t)(exponent - 14) << 23);
    }
};

static __device__ __forceinline__ float max_over_warp(float value)
{
#pragma unroll
    for (int other = 16; other > 0; other /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, other));
    return value;
}

/* Two numbers of at most 2^15 as f16 terms. */
static __device__ __forceinline__ void split_f16(float low, float high, uint32_t (&terms)[TERMS])
{
    terms[0] = cot_pack_pair<__half>(low, high);
    const float2 first = cot_unpack_pair<__half>(terms[0]);
    terms[1] = cot_pack_pair<__half>(low - first.x, high - first.y);
}

#endif
