/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_rows.cu: kernels that run before and after the products: packing of the weights by tap,
 * gathering of tensors, the reduction of dweight's partial sums, dbias, and the final state. The order of a sum depends
 * on the shape alone. */
#include "causal_conv1d_dense_products.cuh"

enum { LANES = 32, WARPS = 8, THREADS = LANES * WARPS, VECTOR = 8 };

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

/* Packs weight [Dout,Din,K], of 16-bit elements and any strides, to [K][Dout][pitch_in]. */
KERNEL causal_conv1d_dense_pack(const __grid_constant__ conv1d_dense_call c)
{
    const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x, i = n % c.pitch_in;
    if (n >= c.Dout * c.pitch_in)
        return;
    const uint16_t *source =
        (const uint16_t *)c.weight.data + n / c.pitch_in * c.weight.stride[0] + i * c.weight.stride[1];
    for (int64_t k = 0; k < c.K; k++)
        ((uint16_t *)c.packed_weight)[k * c.Dout * c.pitch_in + n] = i < c.Din ? source[k * c.weight.stride[2]] : 0;
}

/* Copies a [B,channels,tokens] tensor of any strides to rows with contiguous channels. A block transposes a 32 x 32
 * tile in shared memory. It loads along the tokens and stores along the channels. */
KERNEL causal_conv1d_dense_gather(const __grid_constant__ conv1d_dense_call c)
{
    constexpr int SIDE = CONV1D_DENSE_GATHER_SIDE;
    static_assert(SIDE == LANES, "one lane per token of the load, and per channel of the store");
    __shared__ uint16_t tile[SIDE][SIDE + 2];
    const int64_t channel_blocks = (c.pitch + SIDE - 1) / SIDE, b = blockIdx.y;
    const int64_t channel = blockIdx.x % channel_blocks * SIDE, t = blockIdx.x / channel_blocks * SIDE;
    const int lane = threadIdx.x % LANES;
    const uint16_t *source = (const uint16_t *)c.gather_source.data + b * c.gather_source.stride[0];
    uint16_t *target = (uint16_t *)c.gather_target + b * c.plane;
    for (int i = threadIdx.x / LANES; i < SIDE; i += WARPS) {
        const bool in_bounds = c.gather_source.data != nullptr && channel + i < c.channels && t + lane < c.tokens;
        tile[i][lane] =
            in_bounds ? source[(channel + i) * c.gather_source.stride[1] + (t + lane) * c.gather_source.stride[2]] : 0;
    }
    __syncthreads();
    for (int i = threadIdx.x / LANES; i < SIDE; i += WARPS)
        if (channel + lane < c.pitch && t + i < c.tokens)
            target[(t + i) * c.pitch + channel + lane] = tile[lane][i];
}

/* Reduces the partial sums of dweight. */
KERNEL causal_conv1d_dense_reduce(const __grid_constant__ conv1d_dense_call c)
{
    const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x, size = c.Dout * c.Din;
    if (n >= size)
        return;
    const int64_t target = n / c.Din * c.dweight.stride[0] + n % c.Din * c.dweight.stride[1];
    for (int64_t k = 0; k < c.K; k++) {
        float sum = 0.0f;
        for (int64_t split = 0; split < c.splits; split++)
            sum += c.dweight_partials[(split * c.K + k) * size + n];
        const int64_t offset = target + k * c.dweight.stride[2];
        const float old = c.accumulate ? cot_load(c.dweight.data, c.dweight.dtype, offset) : 0.0f;
        cot_store(c.dweight.data, c.dweight.dtype, offset, old + sum);
    }
}

/* A block computes dbias of one output channel. Each thread sums every 256th token, then a tree reduces the sums of the
 * threads. */
KERNEL causal_conv1d_dense_dbias_generic(const __grid_constant__ conv1d_dense_call c)
{
    __shared__ float sums[THREADS];
    float sum = 0.0f;
    for (int64_t n = threadIdx.x; n < c.B * c.T; n += THREADS)
        sum += load_at(c.g, n / c.T, blockIdx.x, n % c.T);
    sums[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x != 0)
        return;
    const int64_t target = blockIdx.x * c.dbias.stride[0];
    const float old = c.accumulate ? cot_load(c.dbias.data, c.dbias.dtype, target) : 0.0f;
    cot_store(c.dbias.data, c.dbias.dtype, target, old + sums[0]);
}

/* The final state: the last K-1 rows of xe. */
KERNEL causal_conv1d_dense_final_state(const __grid_constant__ conv1d_dense_call c)
{
    const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x, columns = c.K - 1;
    if (n >= c.B * c.Din * columns)
        return;
    const int64_t s = n % columns, i = n / columns % c.Din, b = n / columns / c.Din;
    const conv1d_dense_array &target = c.final_state;
    cot_store(target.data, target.dtype, b * target.stride[0] + i * target.stride[1] + s * target.stride[2],
              load_xe(c, b, i, c.T + s));
}

#if !defined(__HIP__) /* for the Hopper kernels */

/* Sums g over a dbias chunk of a sequence. A lane has 8 channels, a warp has every 8th token. */
template <typename E> static __device__ __forceinline__ void sum_chunk(const conv1d_dense_call &c)
{
    __shared__ float sums[WARPS][LANES * VECTOR];
    const int64_t channel = ((int64_t)blockIdx.y * LANES + threadIdx.x % LANES) * VECTOR;
    const int64_t b = blockIdx.x / c.dbias_chunks, first = blockIdx.x % c.dbias_chunks * CONV1D_DENSE_DBIAS_TOKENS;
    const int64_t end = min(first + CONV1D_DENSE_DBIAS_TOKENS, c.T);
    const E *source = (const E *)c.g.data + b * c.g.stride[0] + channel;
    float lane_sums[VECTOR] = {};
    for (int64_t t = first + threadIdx.x / LANES; channel < c.Dout && t < end; t += WARPS) {
        const cot_words<4> words = cot_load_words<4>((const uint16_t *)(source + t * c.g.stride[2]));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = cot_unpack_pair<E>(words.word[i]);
            lane_sums[2 * i] += pair.x;
            lane_sums[2 * i + 1] += pair.y;
        }
    }
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
        sums[threadIdx.x / LANES][threadIdx.x % LANES * VECTOR + i] = lane_sums[i];
    __syncthreads();
    const int64_t o = (int64_t)blockIdx.y * LANES * VECTOR + threadIdx.x;
    float sum = 0.0f;
    for (int warp = 0; warp < WARPS; warp++)
        sum += sums[warp][threadIdx.x];
    if (o < c.Dout)
        c.dbias_partials[blockIdx.x * c.Dout + o] = sum;
}

KERNEL causal_conv1d_dense_sum_bf16(const __grid_constant__ conv1d_dense_call c)
{
    sum_chunk<__nv_bfloat16>(c);
}

KERNEL causal_conv1d_dense_sum_f16(const __grid_constant__ conv1d_dense_call c)
{
    sum_chunk<__half>(c);
}

/* Reduces the sums of the chunks to dbias. A warp has 8 channels with 4 lanes each. A lane has every 4th chunk. */
KERNEL causal_conv1d_dense_dbias(const __grid_constant__ conv1d_dense_call c)
{
    const int64_t o = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 4;
    float sum = 0.0f;
    for (int64_t chunk = threadIdx.x % 4; o < c.Dout && chunk < c.B * c.dbias_chunks; chunk += 4)
        sum += c.dbias_partials[chunk * c.Dout + o];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (o >= c.Dout || threadIdx.x % 4 != 0)
        return;
    const int64_t offset = o * c.dbias.stride[0];
    const float old = c.accumulate ? cot_load(c.dbias.data, c.dbias.dtype, offset) : 0.0f;
    cot_store(c.dbias.data, c.dbias.dtype, offset, old + sum);
}

#endif
