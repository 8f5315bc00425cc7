/* SPDX-License-Identifier: Apache-2.0
 *
 * product_rate.cu: the rate of matrix products by mma.sync and of float32 FMAs, with all operands in registers. */
#include "cuda/device/element.cuh"
#include "cuda/device/mma.cuh"
#include "product_rate.h"
#include "random_operand.cuh"

#define KERNEL(name, threads)                             \
    extern "C" __global__ void __launch_bounds__(threads) \
        product_rate_##name(const __grid_constant__ product_rate_call c)

template <typename E> static __device__ __forceinline__ uint32_t random_pair(uint32_t index)
{
    return cot_pack_pair<E>(random_operand(2 * index), random_operand(2 * index + 1));
}

template <typename E> static __device__ __forceinline__ void repeat_products(const product_rate_call &c)
{
    constexpr int ROWS = MMA_RATE_M / 16, COLUMNS = MMA_RATE_N / 8;
    uint32_t a[ROWS][4], b[COLUMNS][2];
    float d[ROWS][COLUMNS][4] = {};
#pragma unroll
    for (int i = 0; i < ROWS * 4; i++)
        a[i / 4][i % 4] = random_pair<E>(i * MMA_RATE_THREADS + threadIdx.x);
#pragma unroll
    for (int i = 0; i < COLUMNS * 2; i++)
        b[i / 2][i % 2] = random_pair<E>((ROWS * 4 + i) * MMA_RATE_THREADS + threadIdx.x);
    for (int repeat = 0; repeat < c.repeats; repeat++)
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                if constexpr (cot_is_f16<E>)
                    cot_mma_f16(d[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j][0], b[j][1]);
                else
                    cot_mma_bf16(d[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j][0], b[j][1]);
    if (c.sum != nullptr)
#pragma unroll
        for (int i = 0; i < ROWS * COLUMNS * 4; i++)
            c.sum[i] = d[i / 4 / COLUMNS][i / 4 % COLUMNS][i % 4];
}

KERNEL(mma_bf16, MMA_RATE_THREADS)
{
    repeat_products<__nv_bfloat16>(c);
}

KERNEL(mma_f16, MMA_RATE_THREADS)
{
    repeat_products<__half>(c);
}

KERNEL(fma_f32, FMA_RATE_THREADS)
{
    float a[FMA_RATE_M], b[FMA_RATE_N], d[FMA_RATE_M][FMA_RATE_N] = {};
#pragma unroll
    for (int i = 0; i < FMA_RATE_M; i++)
        a[i] = random_operand(i * FMA_RATE_THREADS + threadIdx.x);
#pragma unroll
    for (int j = 0; j < FMA_RATE_N; j++)
        b[j] = random_operand((FMA_RATE_M + j) * FMA_RATE_THREADS + threadIdx.x);
    for (int repeat = 0; repeat < c.repeats; repeat++)
#pragma unroll
        for (int i = 0; i < FMA_RATE_M; i++)
#pragma unroll
            for (int j = 0; j < FMA_RATE_N; j++)
                d[i][j] = fmaf(a[i], b[j], d[i][j]);
    if (c.sum != nullptr)
#pragma unroll
        for (int i = 0; i < FMA_RATE_M * FMA_RATE_N; i++)
            c.sum[i] = d[i / FMA_RATE_N][i % FMA_RATE_N];
}
