/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_channel_last.cu: forward, channels are contiguous. Block (x, y, z) processes token range y of
 * batch element b = z. Adjacent warps process adjacent groups of 32 V channels. A warp loads x PREFETCH_TOKENS
 * tokens in advance and keeps it unconverted. */
#include "causal_conv1d_channel_last.cuh"

template <typename E, int W, bool PLAIN> static __device__ __forceinline__ void forward(const conv1d_call &c)
{
    constexpr int V = 4 * 4 / sizeof(E) > 4 && W == 4 ? 8 : 4, PREFETCH_TOKENS = W;
    const int T = (int)c.T, warp_tokens = (int)c.warp_tokens;
    const int64_t d = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * V, stride = c.x.stride[2];
    const int begin = (int)blockIdx.y * warp_tokens, end = begin + warp_tokens < T ? begin + warp_tokens : T;
    if (d >= c.D)
        return;
    for (int64_t b = blockIdx.z; b < c.B; b += gridDim.z) {
        const E *x = (const E *)c.x.data + b * c.x.stride[0] + begin * stride + d;
        E *y = (E *)c.y.data + b * c.y.stride[0] + begin * c.y.stride[2] + d;
        cot_vector<E, V> prefetched[PREFETCH_TOKENS];
#pragma unroll
        for (int u = 0; u < PREFETCH_TOKENS; u++, x += stride)
            if (begin + u < end)
                prefetched[u] = load_elements<E, V, PLAIN>(x, c.D - d, c.x.aligned);
        lane_channels<V, W> channels;
        float inputs[W][V];
        load_lane_channels(c, b, d, channels);
        load_previous_inputs<E, V, W, PLAIN>(c, channels, begin, inputs);
        for (int t = begin; t < end;) {
#pragma unroll
            for (int u = 0; u < PREFETCH_TOKENS; u++, t++, x += stride, y += c.y.stride[2]) {
                if (t >= end)
                    break;
                float out[V];
                cot_unpack(prefetched[u], inputs[u]);
                if (t + PREFETCH_TOKENS < end)
                    prefetched[u] = load_elements<E, V, PLAIN>(x, c.D - d, c.x.aligned);
                convolve<E, V, W, PLAIN>(c, channels, t, u, inputs, out);
                store_elements<E, V, PLAIN>(y, c.D - d, c.y.aligned, out);
            }
        }
    }
}

CONV1D_DEFINE_KERNELS(causal_conv1d_fwd_channel_last, forward, 2)
