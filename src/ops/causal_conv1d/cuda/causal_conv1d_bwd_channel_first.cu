/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_first.cu: backward, time is contiguous. Block (x, y, z) processes token range x of
 * row [b = z][d = y]. A warp loads its CONV1D_BWD_CHUNKS chunks before it uses the first.
 *   g   needs the W-1 previous inputs: from the previous lane, for lane 0 from lane 31 of the previous chunk
 *   dx  needs the W-1 next values of g: from the next lane, for lane 31 from lane 0 of the next chunk
 *       after the warp's last chunk: from the next warp through shared memory
 *       after the block's last chunk: recomputed
 * The sums of dweight and dbias are accumulated per lane, then reduced over lanes and over warps.
 * causal_conv1d_reduce reduces them over blocks. */
#include "causal_conv1d_channel_first.cuh"

template <typename E, int W, bool PLAIN> static __device__ __forceinline__ void backward(const conv1d_call &c)
{
    constexpr int V = vector_elements<E, W>, CHUNK = CONV1D_LANES * V, CHUNKS = CONV1D_BWD_CHUNKS;
    __shared__ float first_g[CONV1D_WARPS + 1]
                            [W - 1]; /* g of the first tokens of each warp; the last entry: those of the next block */
    __shared__ float warp_sums[CONV1D_WARPS][W + 1];
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
            float w[W], previous[W - 1], g[CHUNKS][V], sums[W + 1] = {0};
            if (begin < T)
                load_previous<E, W, PLAIN>(c, b, d, x, begin, previous);
            const float bias = load_taps<W>(c, d, w);
            if (warp == warps - 1 && lane < W - 1)
                first_g[warps][lane] =
                    block_end < T ? recompute_g<E, W, PLAIN>(c, b, d, block_end + lane, w, bias, dy) : 0.0f;
#pragma unroll
            for (int u = 0; u < CHUNKS; u++) {
                float values[V], inputs[W - 1 + V];
                cot_unpack(raw_x[u], values);
                cot_unpack(raw_dy[u], g[u]);
                shift_in_previous<V, W>(values, previous, inputs);
                if (t + u * CHUNK < T)
                    compute_g_and_sums<E, V, W, PLAIN>(c, b, t + u * CHUNK, c.silu, w, bias, inputs, g[u], sums);
            }
            if (lane == 0) {
#pragma unroll
                for (int j = 0; j < W - 1; j++)
                    first_g[warp][j] = g[0][j];
            }
            reduce_over_lanes<W + 1>(sums, warp_sums[warp]);
            __syncthreads();
            if (threadIdx.x <= W) {
                float sum = 0.0f;
                for (int i = 0; i < warps; i++)
                    sum += warp_sums[i][threadIdx.x];
                store_sum<W>(c, b * gridDim.x + blockIdx.x, d, threadIdx.x, sum);
            }
            if (c.dx.data != nullptr) {
#pragma unroll
                for (int u = 0; u < CHUNKS; u++) {
                    float after[W - 1], out[V];
#pragma unroll
                    for (int j = 0; j < W - 1; j++) {
                        const float next = u + 1 < CHUNKS ? g[u + 1 < CHUNKS ? u + 1 : u][j] : first_g[warp + 1][j];
                        after[j] = __shfl_sync(CONV1D_ALL_LANES, lane == 0 ? next : g[u][j], lane + 1);
                    }
                    if (t + u * CHUNK >= T)
                        continue;
                    compute_dx<E, V, W, PLAIN>(c, b, d, t + u * CHUNK, c.dfinal_state.data != nullptr, w, g[u], after,
                                               out);
                    store_elements<E, V, PLAIN>(dx + t + u * CHUNK, T - t - u * CHUNK, c.dx.aligned, out);
                }
            }
            if (gridDim.y < c.D || gridDim.z < c.B)
                __syncthreads(); /* before the next row overwrites first_g and warp_sums */
        }
    }
}

#if defined(__HIP__) /* the general versions would spill 600 registers there: cuda/causal_conv1d_admit.h */
CONV1D_INSTANCE(causal_conv1d_bwd_channel_first_bf16, backward, 1, __nv_bfloat16, 4, true)
CONV1D_INSTANCE(causal_conv1d_bwd_channel_first_f16, backward, 1, __half, 4, true)
CONV1D_INSTANCE(causal_conv1d_bwd_channel_first_f32, backward, 1, float, 4, true)
#else
CONV1D_DEFINE_KERNELS(causal_conv1d_bwd_channel_first, backward, 1)
#endif
