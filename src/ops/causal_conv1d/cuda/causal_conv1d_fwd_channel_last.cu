/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_channel_last.cu: channels are contiguous. Blocks (x, y, z) take piece y of the tokens of row b = z;
 * their warps beside each other groups of 32 V channels beside each other, loaded AHEAD tokens in advance, raw. */
#include "causal_conv1d_last.cuh"

template <typename E, int W, bool PLAIN> static __device__ __forceinline__ void forward(const conv1d_call &c)
{
    constexpr int V = 4 * 4 / sizeof(E) > 4 && W == 4 ? 8 : 4, AHEAD = W;
    const int T = (int)c.T, length = (int)c.part_length;
    const int64_t d = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * V, stride = c.x.stride[2];
    const int begin = (int)blockIdx.y * length, end = begin + length < T ? begin + length : T;
    if (d >= c.D)
        return;
    for (int64_t b = blockIdx.z; b < c.B; b += gridDim.z) {
        const E *x = (const E *)c.x.data + b * c.x.stride[0] + begin * stride + d;
        E *y = (E *)c.y.data + b * c.y.stride[0] + begin * c.y.stride[2] + d;
        cot_vector<E, V> ahead[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++, x += stride)
            if (begin + u < end)
                ahead[u] = load_elements<E, V, PLAIN>(x, c.D - d, c.x.aligned);
        column<V, W> col;
        float inputs[W][V];
        load_column(c, b, d, col);
        begin_column<E, V, W, PLAIN>(c, col, begin, inputs);
        for (int t = begin; t < end;) {
#pragma unroll
            for (int u = 0; u < AHEAD; u++, t++, x += stride, y += c.y.stride[2]) {
                if (t >= end)
                    break;
                float out[V];
                cot_unpack(ahead[u], inputs[u]);
                if (t + AHEAD < end)
                    ahead[u] = load_elements<E, V, PLAIN>(x, c.D - d, c.x.aligned);
                convolve<E, V, W, PLAIN>(c, col, t, u, inputs, out);
                store_elements<E, V, PLAIN>(y, c.D - d, c.y.aligned, out);
            }
        }
    }
}

CONV1D_INSTANCES(causal_conv1d_fwd_channel_last, forward, 2)
