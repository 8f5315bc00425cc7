/* SPDX-License-Identifier: Apache-2.0
 * quad.cuh: reductions and transposition over a quad: four neighbouring lanes, which together hold a row of the
 * accumulators of an mma instruction. */
#ifndef COT_CUDA_QUAD_CUH
#define COT_CUDA_QUAD_CUH

#include <stdint.h>

static __device__ __forceinline__ float cot_quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

static __device__ __forceinline__ float cot_quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* Transposes four words of the quad's four lanes: lane l of the quad receives word l of each lane. */
static __device__ __forceinline__ uint4 cot_quad_transpose(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    const uint32_t ab = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1), cd = __shfl_xor_sync(0xffffffffu, odd ? c : d, 1);
    a = odd ? ab : a, b = odd ? b : ab, c = odd ? cd : c, d = odd ? d : cd;
    const uint32_t ac = __shfl_xor_sync(0xffffffffu, high ? a : c, 2),
                   bd = __shfl_xor_sync(0xffffffffu, high ? b : d, 2);
    return high ? make_uint4(ac, bd, c, d) : make_uint4(a, b, ac, bd);
}

#endif
