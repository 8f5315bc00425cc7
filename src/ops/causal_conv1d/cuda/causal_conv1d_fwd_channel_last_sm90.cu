/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_channel_last_sm90.cu: forward on Hopper, channels are contiguous. Block (x, y, z) processes token
 * tile y of channels 128 x to 128 x + 127 of batch element b = z, 4 channels per lane. Each warp processes
 * CONV1D_SM90_FWD_WARP_TOKENS consecutive tokens of the tile. */
#include "causal_conv1d_channel_last.cuh"
#include "causal_conv1d_maps.h"
#include "causal_conv1d_sm90.cuh"

template <typename E> static __device__ __forceinline__ void forward(const conv1d_mapped_call &m)
{
    constexpr int W = 4, V = CONV1D_SM90_FWD_V, WARP_TOKENS = CONV1D_SM90_FWD_WARP_TOKENS,
                  CHANNELS = CONV1D_SM90_FWD_CHANNELS;
    constexpr int TILE_ROWS = CONV1D_SM90_HALO + CONV1D_SM90_WARPS * WARP_TOKENS;
    __shared__ uint64_t full;
    const conv1d_call &c = m.call;
    const int T = (int)c.T, b = (int)blockIdx.z, tile_begin = (int)blockIdx.y * CONV1D_SM90_WARPS * WARP_TOKENS;
    cot_griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        cot_mbarrier_init(&full, 1);
        cot_mbarrier_init_fence();
        cot_mbarrier_arrive_expect(&full, TILE_ROWS * CHANNELS * (uint32_t)sizeof(E));
        cot_griddepcontrol_wait();
        cot_tma_load_3d(conv1d_tile, &m.x, (int)blockIdx.x * CHANNELS, tile_begin - CONV1D_SM90_HALO, b, &full);
    }
    const int lane = threadIdx.x % CONV1D_LANES, warp = threadIdx.x / CONV1D_LANES;
    const int64_t d = (int64_t)blockIdx.x * CHANNELS + lane * V;
    const int begin = tile_begin + warp * WARP_TOKENS;
    E *y = (E *)c.y.data + b * c.y.stride[0] + begin * c.y.stride[2] + d;
    const E *tile = (const E *)conv1d_tile + (CONV1D_SM90_HALO + warp * WARP_TOKENS) * CHANNELS + lane * V;
    lane_channels<V, W> channels;
    float inputs[W][V];
    cot_griddepcontrol_wait();
    load_lane_channels(c, b, d < c.D ? d : 0, channels);
    __syncthreads();
    cot_mbarrier_wait(&full, 0);
    if (d >= c.D)
        return;
    if (begin > 0) {
#pragma unroll
        for (int i = 1; i < W; i++)
            cot_unpack(*(const cot_vector<E, V> *)(tile + (i - W) * CHANNELS), inputs[i]);
    } else {
        load_previous_inputs<E, V, W, true>(c, channels, begin, inputs);
    }
    for (int t = begin; t < begin + WARP_TOKENS;) {
#pragma unroll
        for (int u = 0; u < W; u++, t++, tile += CHANNELS, y += c.y.stride[2]) {
            float out[V];
            cot_unpack(*(const cot_vector<E, V> *)tile, inputs[u]);
            convolve<E, V, W, true>(c, channels, t, u, inputs, out);
            cot_store_vector_if<E, V>(t < T, y, out);
        }
    }
}

CONV1D_INSTANCES_SM90(causal_conv1d_fwd_channel_last_sm90, forward, conv1d_mapped_call, 5)
