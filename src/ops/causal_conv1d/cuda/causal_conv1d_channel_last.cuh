/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_channel_last.cuh: arithmetic of the kernels for contiguous channels. It works on data in registers. A
 * warp processes consecutive tokens of batch element b for a group of 32 V channels, V for each lane. Ring buffers in
 * registers hold the last W inputs of each channel, and in the backward the last W values of g: slot (t - begin) mod W
 * has token t. Loops over tokens are unrolled by a multiple of W, so that the slot `u` of a token is a compile-time
 * constant. */
#ifndef COT_CAUSAL_CONV1D_CHANNEL_LAST_CUH
#define COT_CAUSAL_CONV1D_CHANNEL_LAST_CUH

#include "causal_conv1d_common.cuh"

template <int V, int W> struct lane_channels {
    int64_t b, d;
    int count; /* channels from d on that exist, at most V */
    float w[W][V], bias[V];
};

template <int V, int W>
static __device__ __forceinline__ void load_lane_channels(const conv1d_call &c, int64_t b, int64_t d,
                                                          lane_channels<V, W> &channels)
{
    channels.b = b;
    channels.d = d;
    channels.count = c.D - d < V ? (int)(c.D - d) : V;
#pragma unroll
    for (int v = 0; v < V; v++) {
        float taps[W];
        channels.bias[v] = load_taps<W>(c, v < channels.count ? d + v : d, taps);
#pragma unroll
        for (int k = 0; k < W; k++)
            channels.w[k][v] = taps[k];
    }
}

/* Loads the W-1 inputs before token `begin` into slots 1 .. W-1. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void load_previous_inputs(const conv1d_call &c, const lane_channels<V, W> &channels,
                                                            int begin, float (&inputs)[W][V])
{
#pragma unroll
    for (int i = 1; i < W; i++) {
        if (PLAIN && begin > 0) {
            const int64_t offset = channels.b * c.x.stride[0] + (int64_t)(begin - W + i) * c.x.stride[2] + channels.d;
            cot_unpack(cot_load_vector<E, V>((const E *)c.x.data + offset), inputs[i]);
            continue;
        }
#pragma unroll
        for (int v = 0; v < V; v++)
            inputs[i][v] =
                load_input<E>(c, channels.b, v < channels.count ? channels.d + v : channels.d, begin - W + i);
    }
}

/* Computes z of the token in slot u. */
template <int V, int W, bool PLAIN>
static __device__ __forceinline__ void compute_z(const lane_channels<V, W> &channels, const token_ids<W, PLAIN> &ids,
                                                 int u, const float (&inputs)[W][V], float (&z)[V])
{
#pragma unroll
    for (int v = 0; v < V; v++) {
        z[v] = channels.bias[v];
#pragma unroll
        for (int k = 0; k < W; k++)
            z[v] = fmaf(channels.w[k][v], mask_other_sequence(ids, k, W - 1, inputs[(u + 1 + k) % W][v]), z[v]);
    }
}

/* Computes y of token t, which is in slot u. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void convolve(const conv1d_call &c, const lane_channels<V, W> &channels, int t, int u,
                                                const float (&inputs)[W][V], float (&out)[V])
{
    const token_ids<W, PLAIN> ids = load_token_ids<W, PLAIN>(c, channels.b, t - (W - 1));
    compute_z(channels, ids, u, inputs, out);
#pragma unroll
    for (int v = 0; v < V; v++) {
        if (c.silu)
            out[v] = cot_silu<sizeof(E) == 4>(out[v]);
        out[v] = mask_padding(ids, W - 1, out[v]);
    }
}

/* Replaces dy of token t by g in slot u of g. Adds the terms of dweight and dbias to the sums if add_to_sums: false for
 * the tokens after those of the warp. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void compute_g_and_sums(const conv1d_call &c, const lane_channels<V, W> &channels,
                                                          int t, int u, bool silu, bool add_to_sums,
                                                          const float (&inputs)[W][V], float (&g)[W][V],
                                                          float (&sums)[W + 1][V])
{
    const token_ids<W, PLAIN> ids = load_token_ids<W, PLAIN>(c, channels.b, t - (W - 1));
    if (silu) {
        float z[V];
        compute_z(channels, ids, u, inputs, z);
#pragma unroll
        for (int v = 0; v < V; v++)
            g[u][v] = cot_silu_gradient<sizeof(E) == 4>(g[u][v], z[v]);
    }
#pragma unroll
    for (int v = 0; v < V; v++)
        g[u][v] = mask_padding(ids, W - 1, g[u][v]);
    if (!add_to_sums)
        return;
#pragma unroll
    for (int v = 0; v < V; v++) {
#pragma unroll
        for (int k = 0; k < W; k++)
            sums[k][v] =
                fmaf(g[u][v], mask_padding(ids, W - 1, mask_other_sequence(ids, k, W - 1, inputs[(u + 1 + k) % W][v])),
                     sums[k][v]);
        sums[W][v] += g[u][v];
    }
}

/* Computes dx of token t - (W-1), which needs g up to token t. g of token t is in slot u. final: dfinal_state is
 * present. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void compute_dx(const conv1d_call &c, const lane_channels<V, W> &channels, int t,
                                                  int u, bool final, const float (&g)[W][V], float (&out)[V])
{
    const int dx_token = t - (W - 1);
    const token_ids<W, PLAIN> ids = load_token_ids<W, PLAIN>(c, channels.b, dx_token);
#pragma unroll
    for (int v = 0; v < V; v++) {
        out[v] = channels.w[W - 1][v] * g[(u + 1) % W][v];
#pragma unroll
        for (int j = 1; j < W; j++)
            out[v] = fmaf(channels.w[W - 1 - j][v], mask_other_sequence(ids, j, 0, g[(u + 1 + j) % W][v]), out[v]);
        out[v] = mask_padding(ids, 0, out[v]);
    }
    if (final && dx_token > (int)c.T - (int)c.K) {
#pragma unroll
        for (int v = 0; v < V; v++)
            out[v] += v < channels.count ? load_dfinal_state(c, channels.b, channels.d + v, dx_token) : 0.0f;
    }
}

/* Reduces the sums of the block's warps in a fixed order. All warps of the block have the same group of channels. */
template <int V, int W>
static __device__ __forceinline__ void reduce_over_warps(const conv1d_call &c, int64_t partial_index, int64_t group,
                                                         const float (&sums)[W + 1][V],
                                                         float (&warp_sums)[CONV1D_WARPS][V][CONV1D_LANES])
{
    const int lane = threadIdx.x % CONV1D_LANES, warp = threadIdx.x / CONV1D_LANES;
#pragma unroll
    for (int k = 0; k <= W; k++) {
        __syncthreads();
#pragma unroll
        for (int v = 0; v < V; v++)
            warp_sums[warp][v][lane] = sums[k][v];
        __syncthreads();
        for (int channel = threadIdx.x; channel < CONV1D_LANES * V; channel += blockDim.x) {
            const int64_t d = group * CONV1D_LANES * V + channel;
            float sum = 0.0f;
            for (int i = 0; i < (int)blockDim.x / CONV1D_LANES; i++)
                sum += warp_sums[i][channel % V][channel / V];
            if (d < c.D)
                store_sum<W>(c, partial_index, d, k, sum);
        }
    }
}

#endif
