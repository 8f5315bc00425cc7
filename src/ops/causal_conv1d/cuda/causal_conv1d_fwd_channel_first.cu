/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_channel_first.cu: forward, time is contiguous. Block (x, y, z) processes token range x of
 * row [b = z][d = y]. A warp loads its CONV1D_FWD_CHUNKS chunks before it uses the first. */
#include "causal_conv1d_channel_first.cuh"

template <typename E, int W, bool PLAIN> static __device__ __forceinline__ void forward(const conv1d_call &c)
{
    constexpr int V = vector_elements<E, W>, CHUNK = CONV1D_LANES * V, CHUNKS = CONV1D_FWD_CHUNKS;
    const int T = (int)c.T, warp = (int)(blockIdx.x * (blockDim.x / CONV1D_LANES) + threadIdx.x / CONV1D_LANES);
    const int begin = warp * CHUNKS * CHUNK;
    if (begin >= T)
        return;
    for (int64_t b = blockIdx.z; b < c.B; b += gridDim.z) {
        for (int64_t d = blockIdx.y; d < c.D; d += gridDim.y) {
            const E *x = (const E *)c.x.data + b * c.x.stride[0] + d * c.x.stride[1];
            E *y = (E *)c.y.data + b * c.y.stride[0] + d * c.y.stride[1];
            int t = begin + (int)threadIdx.x % CONV1D_LANES * V;
            cot_vector<E, V> raw[CHUNKS];
#pragma unroll
            for (int u = 0; u < CHUNKS; u++)
                if (t + u * CHUNK < T)
                    raw[u] = load_elements<E, V, PLAIN>(x + t + u * CHUNK, T - t - u * CHUNK, c.x.aligned);
            float w[W], previous[W - 1];
            load_previous<E, W, PLAIN>(c, b, d, x, begin, previous);
            const float bias = load_taps<W>(c, d, w);
#pragma unroll
            for (int u = 0; u < CHUNKS; u++, t += CHUNK) {
                float values[V], inputs[W - 1 + V], out[V];
                cot_unpack(raw[u], values);
                shift_in_previous<V, W>(values, previous, inputs);
                if (t >= T)
                    continue;
                convolve<E, V, W, PLAIN>(c, b, t, w, bias, inputs, out);
                store_elements<E, V, PLAIN>(y + t, T - t, c.y.aligned, out);
            }
        }
    }
}

CONV1D_DEFINE_KERNELS(causal_conv1d_fwd_channel_first, forward, 4)
