/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_first.cu: time is contiguous. Blocks (x, y, z) take a piece of row [b = z][d = y], a warp
 * CONV1D_BWD_CHUNKS chunks of it, all loaded before the first is used.
 *   g   needs the W-1 inputs before: from the lane to the left, for lane 0 from lane 31 of the chunk before
 *   dx  needs the W-1 g after: from the lane to the right, for lane 31 from lane 0 of the chunk after, for the warp's
 *       last chunk through shared memory, and for the block's last chunk they are computed again
 * Sums of dweight and dbias: lane by lane, over lanes, over warps; then causal_conv1d_reduce over blocks. */
#include "causal_conv1d_first.cuh"

template <typename E, int W, bool PLAIN> static __device__ __forceinline__ void backward(const conv1d_call &c)
{
    constexpr int V = first_vector<E, W>, CHUNK = CONV1D_LANES * V, CHUNKS = CONV1D_BWD_CHUNKS;
    __shared__ float heads[CONV1D_WARPS + 1][W - 1]; /* the first g of each warp, and of the next block */
    __shared__ float all[CONV1D_WARPS][W + 1];
    const int T = (int)c.T, lane = threadIdx.x % CONV1D_LANES;
    const int warp = threadIdx.x / CONV1D_LANES, warps = blockDim.x / CONV1D_LANES;
    const int begin = (int)(blockIdx.x * warps + warp) * CHUNKS * CHUNK;
    const int block_end = (int)(blockIdx.x + 1) * warps * CHUNKS * CHUNK;
    for (int64_t b = blockIdx.z; b < c.B; b += gridDim.z) {
        for (int64_t d = blockIdx.y; d < c.D; d += gridDim.y) {
            const E *x = (const E *)c.x.data + b * c.x.stride[0] + d * c.x.stride[1];
            const E *dy = (const E *)c.dy.data + b * c.dy.stride[0] + d * c.dy.stride[1];
            E *dx = (E *)c.dx.data + b * c.dx.stride[0] + d * c.dx.stride[1];
            const int t = begin + lane * V;
            cot_vector<E, V> raw_x[CHUNKS] = {}, raw_dy[CHUNKS] = {};
#pragma unroll
            for (int u = 0; u < CHUNKS; u++) {
                if (t + u * CHUNK < T) {
                    raw_x[u] = load_elements<E, V, PLAIN>(x + t + u * CHUNK, T - t - u * CHUNK, c.x.aligned);
                    raw_dy[u] = load_elements<E, V, PLAIN>(dy + t + u * CHUNK, T - t - u * CHUNK, c.dy.aligned);
                }
            }
            float w[W], before[W - 1], g[CHUNKS][V], sums[W + 1] = {0};
            if (begin < T)
                load_before<E, W, PLAIN>(c, b, d, x, begin, before);
            const float bias = load_taps<W>(c, d, w);
            if (warp == warps - 1 && lane < W - 1)
                heads[warps][lane] =
                    block_end < T ? lone_gradient<E, W, PLAIN>(c, b, d, block_end + lane, w, bias, dy) : 0.0f;
#pragma unroll
            for (int u = 0; u < CHUNKS; u++) {
                float own[V], inputs[W - 1 + V];
                cot_unpack(raw_x[u], own);
                cot_unpack(raw_dy[u], g[u]);
                reach_back<V, W>(own, before, inputs);
                if (t + u * CHUNK < T)
                    take_gradient<E, V, W, PLAIN>(c, b, t + u * CHUNK, c.silu, w, bias, inputs, g[u], sums);
            }
            if (lane == 0) {
#pragma unroll
                for (int j = 0; j < W - 1; j++)
                    heads[warp][j] = g[0][j];
            }
            sum_over_lanes<W + 1>(sums, all[warp]);
            __syncthreads();
            if (threadIdx.x <= W) {
                float sum = 0.0f;
                for (int i = 0; i < warps; i++)
                    sum += all[i][threadIdx.x];
                store_sum<W>(c, b * gridDim.x + blockIdx.x, d, threadIdx.x, sum);
            }
            if (c.dx.data != nullptr) {
#pragma unroll
                for (int u = 0; u < CHUNKS; u++) {
                    float after[W - 1], out[V];
#pragma unroll
                    for (int j = 0; j < W - 1; j++) {
                        const float next = u + 1 < CHUNKS ? g[u + 1 < CHUNKS ? u + 1 : u][j] : heads[warp + 1][j];
                        after[j] = __shfl_sync(CONV1D_ALL_LANES, lane == 0 ? next : g[u][j], lane + 1);
                    }
                    if (t + u * CHUNK >= T)
                        continue;
                    give_gradient<E, V, W, PLAIN>(c, b, d, t + u * CHUNK, c.dfinal_state.data != nullptr, w, g[u],
                                                  after, out);
                    store_elements<E, V, PLAIN>(dx + t + u * CHUNK, T - t - u * CHUNK, c.dx.aligned, out);
                }
            }
            if (gridDim.y < c.D || gridDim.z < c.B)
                __syncthreads(); /* before the next row's heads and sums */
        }
    }
}

CONV1D_INSTANCES(causal_conv1d_bwd_channel_first, backward, 1)
