/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_channel_first.cuh: arithmetic of the kernels for contiguous time. A warp processes consecutive chunks
 * of a row. A chunk has 32 V tokens, V for each lane. */
#ifndef COT_CAUSAL_CONV1D_CHANNEL_FIRST_CUH
#define COT_CAUSAL_CONV1D_CHANNEL_FIRST_CUH

#include "causal_conv1d_common.cuh"

/* Elements in the vector that a lane loads or stores (V). */
template <typename E, int W> static constexpr int vector_elements = sizeof(E) == 4 && W == 4 ? 4 : 8;

/* Puts the W-1 inputs before the lane's V inputs in front of them. The previous lane has them. Lane 0 gets them from
 * `previous` of lane 31, which holds the inputs before the chunk. Afterwards it holds those before the next chunk. */
template <int V, int W>
static __device__ __forceinline__ void shift_in_previous(const float (&values)[V], float (&previous)[W - 1],
                                                         float (&inputs)[W - 1 + V])
{
    const int lane = threadIdx.x % CONV1D_LANES;
#pragma unroll
    for (int i = 0; i < W - 1; i++) {
        const float last_values = values[V - (W - 1) + i];
        inputs[i] = __shfl_sync(CONV1D_ALL_LANES, lane == 31 ? previous[i] : last_values, lane + 31);
        previous[i] = last_values;
    }
#pragma unroll
    for (int i = 0; i < V; i++)
        inputs[W - 1 + i] = values[i];
}

/* Computes y of the V tokens from t on. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void convolve(const conv1d_call &c, int64_t b, int64_t t, const float (&w)[W],
                                                float bias, const float (&inputs)[W - 1 + V], float (&out)[V])
{
    const token_ids<W - 1 + V, PLAIN> ids = load_token_ids<W - 1 + V, PLAIN>(c, b, t - (W - 1));
#pragma unroll
    for (int i = 0; i < V; i++) {
        float z = bias;
#pragma unroll
        for (int k = 0; k < W; k++)
            z = fmaf(w[k], mask_other_sequence(ids, i + k, i + W - 1, inputs[i + k]), z);
        out[i] = mask_padding(ids, i + W - 1, z);
    }
    if (c.silu) {
#pragma unroll
        for (int i = 0; i < V; i++)
            out[i] = cot_silu<sizeof(E) == 4>(out[i]); /* silu(0) = 0, so padding stays 0 */
    }
}

/* Loads the W-1 inputs before token `begin` of row x = x[b][d]. */
template <typename E, int W, bool PLAIN>
static __device__ __forceinline__ void load_previous(const conv1d_call &c, int64_t b, int64_t d, const E *x, int begin,
                                                     float (&previous)[W - 1])
{
    if (PLAIN && begin > 0) {
        float values[4];
        cot_unpack(cot_load_vector<E, 4>(x + begin - 4), values);
#pragma unroll
        for (int i = 0; i < W - 1; i++)
            previous[i] = values[4 - (W - 1) + i];
        return;
    }
#pragma unroll
    for (int i = 0; i < W - 1; i++)
        previous[i] = load_input<E>(c, b, d, begin - (W - 1) + i);
}

/* Loads the lane's V inputs from t on, and the W-1 inputs before them, from a tile in shared memory. The tile does not
 * have the positions of the initial state: these come from global memory. */
template <typename E, int V, int W>
static __device__ __forceinline__ void load_inputs_shared(const conv1d_call &c, int64_t b, int64_t d, const E *tile,
                                                          int t, float (&inputs)[W - 1 + V])
{
    float values[V], previous[4];
    cot_unpack(*(const cot_vector<E, V> *)(tile + t), values);
    if (t > 0) {
        cot_unpack(*(const cot_vector<E, 4> *)(tile + t - 4), previous);
    } else {
#pragma unroll
        for (int i = 1; i < 4; i++)
            previous[i] = load_input<E>(c, b, d, i - 4);
    }
#pragma unroll
    for (int i = 0; i < W - 1 + V; i++)
        inputs[i] = i < W - 1 ? previous[4 - (W - 1) + (i < W - 1 ? i : 0)] : values[i < W - 1 ? 0 : i - (W - 1)];
}

/* Computes g of token t of row [b][d]. It loads the inputs one by one, for the W-1 tokens that follow the block. */
template <typename E, int W, bool PLAIN>
static __device__ __forceinline__ float recompute_g(const conv1d_call &c, int64_t b, int64_t d, int t,
                                                    const float (&w)[W], float bias, const E *dy)
{
    if (t >= c.T)
        return 0.0f;
    const token_ids<W, PLAIN> ids = load_token_ids<W, PLAIN>(c, b, t - (W - 1));
    float z = bias;
#pragma unroll
    for (int k = 0; k < W; k++)
        z = fmaf(w[k], mask_other_sequence(ids, k, W - 1, load_input<E>(c, b, d, t - (W - 1) + k)), z);
    const float g = mask_padding(ids, W - 1, cot_to_f32(dy[t]));
    return c.silu ? cot_silu_gradient<sizeof(E) == 4>(g, z) : g;
}

/* Replaces dy of the V tokens from t on by g, and adds their terms to the sums of dweight and dbias. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void compute_g_and_sums(const conv1d_call &c, int64_t b, int t, bool silu,
                                                          const float (&w)[W], float bias,
                                                          const float (&inputs)[W - 1 + V], float (&g)[V],
                                                          float (&sums)[W + 1])
{
    const token_ids<W - 1 + V, PLAIN> ids = load_token_ids<W - 1 + V, PLAIN>(c, b, t - (W - 1));
    if (silu) {
#pragma unroll
        for (int i = 0; i < V; i++) {
            float z = bias;
#pragma unroll
            for (int k = 0; k < W; k++)
                z = fmaf(w[k], mask_other_sequence(ids, i + k, i + W - 1, inputs[i + k]), z);
            g[i] = cot_silu_gradient<sizeof(E) == 4>(g[i], z);
        }
    }
#pragma unroll
    for (int i = 0; i < V; i++) {
        g[i] = mask_padding(ids, i + W - 1, g[i]);
        sums[W] += g[i];
#pragma unroll
        for (int k = 0; k < W; k++)
            sums[k] = fmaf(
                g[i], mask_padding(ids, i + W - 1, mask_other_sequence(ids, i + k, i + W - 1, inputs[i + k])), sums[k]);
    }
}

/* Computes dx of the V tokens from t on, from their g and the W-1 values of g `after` them. final: dfinal_state is
 * present. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void compute_dx(const conv1d_call &c, int64_t b, int64_t d, int t, bool final,
                                                  const float (&w)[W], const float (&g)[V], const float (&after)[W - 1],
                                                  float (&dx)[V])
{
    float gs[V + W - 1];
#pragma unroll
    for (int i = 0; i < V + W - 1; i++)
        gs[i] = i < V ? g[i < V ? i : 0] : after[i < V ? 0 : i - V];
    const token_ids<V + W - 1, PLAIN> ids = load_token_ids<V + W - 1, PLAIN>(c, b, t);
#pragma unroll
    for (int i = 0; i < V; i++) {
        dx[i] = w[W - 1] * gs[i];
#pragma unroll
        for (int j = 1; j < W; j++)
            dx[i] = fmaf(w[W - 1 - j], mask_other_sequence(ids, i + j, i, gs[i + j]), dx[i]);
        dx[i] = mask_padding(ids, i, dx[i]);
    }
    if (final && t + V > (int)c.T - (int)(c.K - 1)) {
#pragma unroll
        for (int i = 0; i < V; i++)
            dx[i] += load_dfinal_state(c, b, d, t + i);
    }
}

/* Reduces each of N values over the lanes of the warp. While a lane has several values, two lanes exchange halves of
 * them: each lane keeps one half and sends the other. 5 values take 9 shuffles instead of 25. */
template <int N> static __device__ __forceinline__ void reduce_over_lanes(const float (&values)[N], float *sums)
{
    constexpr int PADDED = N <= 8 ? 8 : 16; /* N rounded up to 8 or 16; lane 32/PADDED k ends with the sum of value k */
    static_assert(N <= 16, "v has one element per value");
    const int lane = threadIdx.x % CONV1D_LANES;
    float v[PADDED];
#pragma unroll
    for (int i = 0; i < PADDED; i++)
        v[i] = i < N ? values[i < N ? i : 0] : 0.0f;
    int distance = 16;
#pragma unroll
    for (int half = PADDED / 2; half > 0; half /= 2, distance /= 2) {
        const bool upper = (lane & distance) != 0;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float kept = upper ? v[i + half] : v[i], sent = upper ? v[i] : v[i + half];
            v[i] = kept + __shfl_xor_sync(CONV1D_ALL_LANES, sent, distance);
        }
    }
#pragma unroll
    for (; distance > 0; distance /= 2)
        v[0] += __shfl_xor_sync(CONV1D_ALL_LANES, v[0], distance);
    if (lane % (CONV1D_LANES / PADDED) == 0 && lane / (CONV1D_LANES / PADDED) < N)
        sums[lane / (CONV1D_LANES / PADDED)] = v[0];
}

#endif
