/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_rows.cu: what the products need before and leave after themselves: weights tap by tap, the sums of
 * dweight's parts, and dbias. Sums are added in an order that follows from the shape. */
#include "causal_conv1d_dense_cuda.h"

#include "../../../cuda/device/element.cuh"

enum { LANES = 32, WARPS = 8, THREADS = LANES * WARPS, VECTOR = 8 };

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

/* [Dout,Din,K] of 16-bit elements and any strides becomes [K][Dout][pitch_in]. */
KERNEL causal_conv1d_dense_pack(const __grid_constant__ conv1d_dense_call c)
{
    const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x, i = n % c.pitch_in;
    if (n >= c.Dout * c.pitch_in)
        return;
    const uint16_t *from =
        (const uint16_t *)c.weight.data + n / c.pitch_in * c.weight.stride[0] + i * c.weight.stride[1];
    for (int64_t k = 0; k < c.K; k++)
        ((uint16_t *)c.packed)[k * c.Dout * c.pitch_in + n] = i < c.Din ? from[k * c.weight.stride[2]] : 0;
}

/* A [B,channels,tokens] tensor of any strides with its channels beside each other: a block of 32 by 32, read along the
 * tokens. */
KERNEL causal_conv1d_dense_gather(const __grid_constant__ conv1d_dense_call c)
{
    constexpr int SIDE = CONV1D_DENSE_GATHER;
    static_assert(SIDE == LANES, "a lane a token, and then a channel");
    __shared__ uint16_t tile[SIDE][SIDE + 2];
    const int64_t across = (c.pitch + SIDE - 1) / SIDE, b = blockIdx.y;
    const int64_t channel = blockIdx.x % across * SIDE, t = blockIdx.x / across * SIDE;
    const int lane = threadIdx.x % LANES;
    const uint16_t *from = (const uint16_t *)c.from.data + b * c.from.stride[0];
    uint16_t *to = (uint16_t *)c.gathered + b * c.plane;
    for (int i = threadIdx.x / LANES; i < SIDE; i += WARPS) {
        const bool there = c.from.data != nullptr && channel + i < c.channels && t + lane < c.tokens;
        tile[i][lane] = there ? from[(channel + i) * c.from.stride[1] + (t + lane) * c.from.stride[2]] : 0;
    }
    __syncthreads();
    for (int i = threadIdx.x / LANES; i < SIDE; i += WARPS)
        if (channel + lane < c.pitch && t + i < c.tokens)
            to[(t + i) * c.pitch + channel + lane] = tile[lane][i];
}

/* dweight from its parts. */
KERNEL causal_conv1d_dense_finish(const __grid_constant__ conv1d_dense_call c)
{
    const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x, size = c.Dout * c.Din;
    if (n >= size)
        return;
    const int64_t to = n / c.Din * c.dweight.stride[0] + n % c.Din * c.dweight.stride[1];
    for (int64_t k = 0; k < c.K; k++) {
        float sum = 0.0f;
        for (int64_t part = 0; part < c.parts; part++)
            sum += c.dweight_parts[(part * c.K + k) * size + n];
        const int64_t at = to + k * c.dweight.stride[2];
        const float before = c.accumulate ? cot_load(c.dweight.data, c.dweight.dtype, at) : 0.0f;
        cot_store(c.dweight.data, c.dweight.dtype, at, before + sum);
    }
}

/* Sums of g over a chunk of a sequence's tokens: a lane has eight channels, a warp every eighth token. */
template <typename E> static __device__ __forceinline__ void sum_chunk(const conv1d_dense_call &c)
{
    __shared__ float sums[WARPS][LANES * VECTOR];
    const int64_t channel = ((int64_t)blockIdx.y * LANES + threadIdx.x % LANES) * VECTOR;
    const int64_t b = blockIdx.x / c.chunks, first = blockIdx.x % c.chunks * CONV1D_DENSE_SUM_TOKENS;
    const int64_t end = min(first + CONV1D_DENSE_SUM_TOKENS, c.T);
    const E *from = (const E *)c.g.data + b * c.g.stride[0] + channel;
    float own[VECTOR] = {};
    for (int64_t t = first + threadIdx.x / LANES; channel < c.Dout && t < end; t += WARPS) {
        const cot_words<4> words = cot_load_words<4>((const uint16_t *)(from + t * c.g.stride[2]));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = cot_unpack_pair<E>(words.word[i]);
            own[2 * i] += pair.x;
            own[2 * i + 1] += pair.y;
        }
    }
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
        sums[threadIdx.x / LANES][threadIdx.x % LANES * VECTOR + i] = own[i];
    __syncthreads();
    const int64_t o = (int64_t)blockIdx.y * LANES * VECTOR + threadIdx.x;
    float sum = 0.0f;
    for (int warp = 0; warp < WARPS; warp++)
        sum += sums[warp][threadIdx.x];
    if (o < c.Dout)
        c.dbias_parts[blockIdx.x * c.Dout + o] = sum;
}

KERNEL causal_conv1d_dense_sum_bf16(const __grid_constant__ conv1d_dense_call c)
{
    sum_chunk<__nv_bfloat16>(c);
}

KERNEL causal_conv1d_dense_sum_f16(const __grid_constant__ conv1d_dense_call c)
{
    sum_chunk<__half>(c);
}

/* dbias from the chunks' sums: a warp has eight channels, four lanes each, and every lane every fourth chunk. */
KERNEL causal_conv1d_dense_dbias(const __grid_constant__ conv1d_dense_call c)
{
    const int64_t o = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 4;
    float sum = 0.0f;
    for (int64_t chunk = threadIdx.x % 4; o < c.Dout && chunk < c.B * c.chunks; chunk += 4)
        sum += c.dbias_parts[chunk * c.Dout + o];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (o >= c.Dout || threadIdx.x % 4 != 0)
        return;
    const int64_t at = o * c.dbias.stride[0];
    const float before = c.accumulate ? cot_load(c.dbias.data, c.dbias.dtype, at) : 0.0f;
    cot_store(c.dbias.data, c.dbias.dtype, at, before + sum);
}
