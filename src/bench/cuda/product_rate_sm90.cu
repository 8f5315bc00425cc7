/* SPDX-License-Identifier: Apache-2.0
 *
 * product_rate_sm90.cu: the rate of Hopper's matrix products (wgmma) with both operands in shared memory. The kernels
 * do nothing else: no loads from global memory, no other arithmetic. `cotangent bench` prints this rate as the ceiling.
 */
#include "cuda/device/wgmma.cuh"
#include "product_rate.h"
#include "random_operand.cuh"

template <typename E> static __device__ __forceinline__ void repeat_products(const product_rate_call &c)
{
    constexpr int M = WGMMA_RATE_M, N = WGMMA_RATE_N, K = WGMMA_RATE_K;
    extern __shared__ char shared[];
    E *a = (E *)(((uintptr_t)shared + 1023) / 1024 * 1024), *b = a + M * K;
    for (int i = threadIdx.x; i < (M + N) * K; i += WGMMA_RATE_THREADS)
        cot_from_f32(&a[i], random_operand(i));
    cot_fence_proxy_async();
    __syncthreads();
    const uint32_t a_address = cot_shared_address(a) + threadIdx.x / 128 * 64 * 128, b_address = cot_shared_address(b);
    float d[N / 2] = {};
    for (int repeat = 0; repeat < c.repeats; repeat++) {
        cot_wgmma_fence();
#pragma unroll
        for (int tile = 0; tile < K / 64; tile++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                cot_wgmma<E, false, false>(d, cot_wgmma_k_major(a_address + tile * M * 128) + k * COT_WGMMA_K_STEP,
                                           cot_wgmma_k_major(b_address + tile * N * 128) + k * COT_WGMMA_K_STEP, true);
        cot_wgmma_commit();
        cot_wgmma_wait<0>();
    }
    if (c.sum != nullptr)
        for (int i = 0; i < N / 2; i++)
            c.sum[i] = d[i];
}

extern "C" __global__ void __launch_bounds__(WGMMA_RATE_THREADS)
    product_rate_wgmma_bf16(const __grid_constant__ product_rate_call c)
{
    repeat_products<__nv_bfloat16>(c);
}

extern "C" __global__ void __launch_bounds__(WGMMA_RATE_THREADS)
    product_rate_wgmma_f16(const __grid_constant__ product_rate_call c)
{
    repeat_products<__half>(c);
}
