/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_last.cu: backward, channels are contiguous. Block (x, y, z) processes channel group x
 * and token range y of batch element b = z. Each warp of the block processes warp_tokens consecutive tokens of the
 * range. A warp loads x and dy PREFETCH_TOKENS tokens in advance and keeps them unconverted. dx of a token is
 * computed W-1 tokens later than its g. For its last dx, a warp recomputes g of the W-1 tokens after its own. The
 * sums of dweight and dbias are accumulated per lane and reduced over warps. causal_conv1d_reduce reduces them over
 * blocks. */
#include "causal_conv1d_channel_last.cuh"

template <typename E, int W, bool PLAIN> static __device__ __forceinline__ void backward(const conv1d_call &c)
{
    constexpr int V = W == 4 ? 4 : 2, PREFETCH_TOKENS = W;
    __shared__ float warp_sums[CONV1D_WARPS][V][CONV1D_LANES];
    const int T = (int)c.T, warp_tokens = (int)c.warp_tokens;
    const int64_t d = ((int64_t)blockIdx.x * CONV1D_LANES + threadIdx.x % CONV1D_LANES) * V;
    const bool has_dx = c.dx.data != nullptr;
    const int part = (int)blockIdx.y * (blockDim.x / CONV1D_LANES) + threadIdx.x / CONV1D_LANES;
    const int begin = part * warp_tokens, end = begin + warp_tokens < T ? begin + warp_tokens : T;
    const int g_end = has_dx ? end + W - 1 : end; /* end of the tokens whose g is needed */
    const int load_end = g_end < T ? g_end : T;
    for (int64_t b = blockIdx.z; b < c.B; b += gridDim.z) {
        float sums[W + 1][V] = {{0}};
        if (d < c.D && begin < T) {
            const E *x = (const E *)c.x.data + b * c.x.stride[0] + begin * c.x.stride[2] + d;
            const E *dy = (const E *)c.dy.data + b * c.dy.stride[0] + begin * c.dy.stride[2] + d;
            E *dx = (E *)c.dx.data + b * c.dx.stride[0] + begin * c.dx.stride[2] + d;
            cot_vector<E, V> prefetched_x[PREFETCH_TOKENS], prefetched_dy[PREFETCH_TOKENS];
#pragma unroll
            for (int u = 0; u < PREFETCH_TOKENS; u++, x += c.x.stride[2], dy += c.dy.stride[2]) {
                if (begin + u < load_end) {
                    prefetched_x[u] = load_elements<E, V, PLAIN>(x, c.D - d, c.x.aligned);
                    prefetched_dy[u] = load_elements<E, V, PLAIN>(dy, c.D - d, c.dy.aligned);
                }
            }
            lane_channels<V, W> channels;
            float inputs[W][V], g[W][V];
            load_lane_channels(c, b, d, channels);
            load_previous_inputs<E, V, W, PLAIN>(c, channels, begin, inputs);
            for (int t = begin; t < g_end;) {
#pragma unroll
                for (int u = 0; u < PREFETCH_TOKENS; u++, t++, x += c.x.stride[2], dy += c.dy.stride[2]) {
                    if (t >= g_end)
                        break;
                    if (t < T) {
                        cot_unpack(prefetched_x[u], inputs[u]);
                        cot_unpack(prefetched_dy[u], g[u]);
                        if (t + PREFETCH_TOKENS < load_end) {
                            prefetched_x[u] = load_elements<E, V, PLAIN>(x, c.D - d, c.x.aligned);
                            prefetched_dy[u] = load_elements<E, V, PLAIN>(dy, c.D - d, c.dy.aligned);
                        }
                        compute_g_and_sums<E, V, W, PLAIN>(c, channels, t, u, c.silu, t < end, inputs, g, sums);
                    } else {
#pragma unroll
                        for (int v = 0; v < V; v++)
                            g[u][v] = 0.0f;
                    }
                    if (!has_dx || t - (W - 1) < begin)
                        continue;
                    float out[V];
                    compute_dx<E, V, W, PLAIN>(c, channels, t, u, c.dfinal_state.data != nullptr, g, out);
                    store_elements<E, V, PLAIN>(dx, c.D - d, c.dx.aligned, out);
                    dx += c.dx.stride[2];
                }
            }
        }
        reduce_over_warps<V, W>(c, b * gridDim.y + blockIdx.y, blockIdx.x, sums, warp_sums);
    }
}

CONV1D_DEFINE_KERNELS(causal_conv1d_bwd_channel_last, backward, 1)
