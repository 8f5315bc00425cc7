/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_last.cu: channels are contiguous. Blocks (x, y, z) take group x of channels and piece y of
 * the tokens of row b = z, their warps one part of the piece after the other, x and dy loaded AHEAD tokens in advance,
 * raw. dx lags W-1 tokens; for the last ones of its part a warp computes g of the W-1 tokens after it, which another
 * part owns. Sums of dweight and dbias: lane by lane, over warps; then causal_conv1d_reduce over blocks. */
#include "causal_conv1d_last.cuh"

template <typename E, int W, bool PLAIN> static __device__ __forceinline__ void backward(const conv1d_call &c)
{
    constexpr int V = W == 4 ? 4 : 2, AHEAD = W;
    __shared__ float all[CONV1D_WARPS][V][CONV1D_LANES];
    const int T = (int)c.T, length = (int)c.part_length;
    const int64_t d = ((int64_t)blockIdx.x * CONV1D_LANES + threadIdx.x % CONV1D_LANES) * V;
    const bool wants_dx = c.dx.data != nullptr;
    const int part = (int)blockIdx.y * (blockDim.x / CONV1D_LANES) + threadIdx.x / CONV1D_LANES;
    const int begin = part * length, end = begin + length < T ? begin + length : T;
    const int lagging = wants_dx ? end + W - 1 : end; /* one past the last g that is needed */
    const int loaded = lagging < T ? lagging : T;
    for (int64_t b = blockIdx.z; b < c.B; b += gridDim.z) {
        float sums[W + 1][V] = {{0}};
        if (d < c.D && begin < T) {
            const E *x = (const E *)c.x.data + b * c.x.stride[0] + begin * c.x.stride[2] + d;
            const E *dy = (const E *)c.dy.data + b * c.dy.stride[0] + begin * c.dy.stride[2] + d;
            E *dx = (E *)c.dx.data + b * c.dx.stride[0] + begin * c.dx.stride[2] + d;
            cot_vector<E, V> ahead_x[AHEAD], ahead_dy[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; u++, x += c.x.stride[2], dy += c.dy.stride[2]) {
                if (begin + u < loaded) {
                    ahead_x[u] = load_elements<E, V, PLAIN>(x, c.D - d, c.x.aligned);
                    ahead_dy[u] = load_elements<E, V, PLAIN>(dy, c.D - d, c.dy.aligned);
                }
            }
            column<V, W> col;
            float inputs[W][V], g[W][V];
            load_column(c, b, d, col);
            begin_column<E, V, W, PLAIN>(c, col, begin, inputs);
            for (int t = begin; t < lagging;) {
#pragma unroll
                for (int u = 0; u < AHEAD; u++, t++, x += c.x.stride[2], dy += c.dy.stride[2]) {
                    if (t >= lagging)
                        break;
                    if (t < T) {
                        cot_unpack(ahead_x[u], inputs[u]);
                        cot_unpack(ahead_dy[u], g[u]);
                        if (t + AHEAD < loaded) {
                            ahead_x[u] = load_elements<E, V, PLAIN>(x, c.D - d, c.x.aligned);
                            ahead_dy[u] = load_elements<E, V, PLAIN>(dy, c.D - d, c.dy.aligned);
                        }
                        take_gradient<E, V, W, PLAIN>(c, col, t, u, c.silu, t < end, inputs, g, sums);
                    } else {
#pragma unroll
                        for (int v = 0; v < V; v++)
                            g[u][v] = 0.0f;
                    }
                    if (!wants_dx || t - (W - 1) < begin)
                        continue;
                    float out[V];
                    give_gradient<E, V, W, PLAIN>(c, col, t, u, c.dfinal_state.data != nullptr, g, out);
                    store_elements<E, V, PLAIN>(dx, c.D - d, c.dx.aligned, out);
                    dx += c.dx.stride[2];
                }
            }
        }
        end_group<V, W>(c, b * gridDim.y + blockIdx.y, blockIdx.x, sums, all);
    }
}

CONV1D_INSTANCES(causal_conv1d_bwd_channel_last, backward, 1)
