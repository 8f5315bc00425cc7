/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_last.cuh: the arithmetic of the kernels for contiguous channels, however their data comes. A warp walks
 * a part of the tokens of row b for a group of 32 V channels, V to a lane, with the last W inputs (and, backward, the
 * last W g) of each channel in rings of registers: slot (t - begin) mod W holds token t, and every loop over tokens is
 * unrolled by a multiple of W, so that `u` below, the token's slot, is known when compiling. */
#ifndef COT_CAUSAL_CONV1D_LAST_CUH
#define COT_CAUSAL_CONV1D_LAST_CUH

#include "causal_conv1d_fast.cuh"

template <int V, int W> struct column {
    int64_t b, d;
    int channels; /* that there are from d on, V or more being all */
    float w[W][V], bias[V];
};

template <int V, int W>
static __device__ __forceinline__ void load_column(const conv1d_call &c, int64_t b, int64_t d, column<V, W> &col)
{
    col.b = b;
    col.d = d;
    col.channels = c.D - d < V ? (int)(c.D - d) : V;
#pragma unroll
    for (int v = 0; v < V; v++) {
        float taps[W];
        col.bias[v] = load_taps<W>(c, v < col.channels ? d + v : d, taps);
#pragma unroll
        for (int k = 0; k < W; k++)
            col.w[k][v] = taps[k];
    }
}

/* The W-1 inputs before token `begin`. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void begin_column(const conv1d_call &c, const column<V, W> &col, int begin,
                                                    float (&inputs)[W][V])
{
#pragma unroll
    for (int i = 1; i < W; i++) {
        if (PLAIN && begin > 0) {
            const int64_t at = col.b * c.x.stride[0] + (int64_t)(begin - W + i) * c.x.stride[2] + col.d;
            cot_unpack(cot_load_vector<E, V>((const E *)c.x.data + at), inputs[i]);
            continue;
        }
#pragma unroll
        for (int v = 0; v < V; v++)
            inputs[i][v] = input_at<E>(c, col.b, v < col.channels ? col.d + v : col.d, begin - W + i);
    }
}

/* z of the token in slot u. */
template <int V, int W, bool PLAIN>
static __device__ __forceinline__ void preactivate(const column<V, W> &col, const token_ids<W, PLAIN> &ids, int u,
                                                   const float (&inputs)[W][V], float (&z)[V])
{
#pragma unroll
    for (int v = 0; v < V; v++) {
        z[v] = col.bias[v];
#pragma unroll
        for (int k = 0; k < W; k++)
            z[v] = fmaf(col.w[k][v], if_same(ids, k, W - 1, inputs[(u + 1 + k) % W][v]), z[v]);
    }
}

/* y of token t, in slot u. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void convolve(const conv1d_call &c, const column<V, W> &col, int t, int u,
                                                const float (&inputs)[W][V], float (&out)[V])
{
    const token_ids<W, PLAIN> ids = load_ids<W, PLAIN>(c, col.b, t - (W - 1));
    preactivate(col, ids, u, inputs, out);
#pragma unroll
    for (int v = 0; v < V; v++) {
        if (c.silu)
            out[v] = cot_silu<sizeof(E) == 4>(out[v]);
        out[v] = if_token(ids, W - 1, out[v]);
    }
}

/* Turns dy of token t, in slot u of g, into g, and adds to the sums of dweight and dbias if the token is the part's own. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void take_gradient(const conv1d_call &c, const column<V, W> &col, int t, int u,
                                                     bool silu, bool own, const float (&inputs)[W][V], float (&g)[W][V],
                                                     float (&sums)[W + 1][V])
{
    const token_ids<W, PLAIN> ids = load_ids<W, PLAIN>(c, col.b, t - (W - 1));
    if (silu) {
        float z[V];
        preactivate(col, ids, u, inputs, z);
#pragma unroll
        for (int v = 0; v < V; v++)
            g[u][v] = cot_silu_gradient<sizeof(E) == 4>(g[u][v], z[v]);
    }
#pragma unroll
    for (int v = 0; v < V; v++)
        g[u][v] = if_token(ids, W - 1, g[u][v]);
    if (!own)
        return;
#pragma unroll
    for (int v = 0; v < V; v++) {
#pragma unroll
        for (int k = 0; k < W; k++)
            sums[k][v] =
                fmaf(g[u][v], if_token(ids, W - 1, if_same(ids, k, W - 1, inputs[(u + 1 + k) % W][v])), sums[k][v]);
        sums[W][v] += g[u][v];
    }
}

/* dx of token t - (W-1), whose last g, of token t, is in slot u. final: there is a dfinal_state. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void give_gradient(const conv1d_call &c, const column<V, W> &col, int t, int u,
                                                     bool final, const float (&g)[W][V], float (&out)[V])
{
    const int done = t - (W - 1);
    const token_ids<W, PLAIN> ids = load_ids<W, PLAIN>(c, col.b, done);
#pragma unroll
    for (int v = 0; v < V; v++) {
        out[v] = col.w[W - 1][v] * g[(u + 1) % W][v];
#pragma unroll
        for (int j = 1; j < W; j++)
            out[v] = fmaf(col.w[W - 1 - j][v], if_same(ids, j, 0, g[(u + 1 + j) % W][v]), out[v]);
        out[v] = if_token(ids, 0, out[v]);
    }
    if (final && done > (int)c.T - (int)c.K) {
#pragma unroll
        for (int v = 0; v < V; v++)
            out[v] += v < col.channels ? final_gradient(c, col.b, col.d + v, done) : 0.0f;
    }
}

/* The sums of the block's warps, which all took parts of the same group of channels, always in the same order. */
template <int V, int W>
static __device__ __forceinline__ void end_group(const conv1d_call &c, int64_t share, int64_t group,
                                                 const float (&sums)[W + 1][V],
                                                 float (&all)[CONV1D_WARPS][V][CONV1D_LANES])
{
    const int lane = threadIdx.x % CONV1D_LANES, warp = threadIdx.x / CONV1D_LANES;
#pragma unroll
    for (int k = 0; k <= W; k++) {
        __syncthreads();
#pragma unroll
        for (int v = 0; v < V; v++)
            all[warp][v][lane] = sums[k][v];
        __syncthreads();
        for (int channel = threadIdx.x; channel < CONV1D_LANES * V; channel += blockDim.x) {
            const int64_t d = group * CONV1D_LANES * V + channel;
            float sum = 0.0f;
            for (int i = 0; i < (int)blockDim.x / CONV1D_LANES; i++)
                sum += all[i][channel % V][channel / V];
            if (d < c.D)
                store_sum<W>(c, share, d, k, sum);
        }
    }
}

#endif
