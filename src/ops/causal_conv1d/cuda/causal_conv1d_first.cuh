/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_first.cuh: the arithmetic of the kernels for contiguous time. A warp takes a few neighbouring chunks of a
 * row, each of 32 V tokens, V to a lane. */
#ifndef COT_CAUSAL_CONV1D_FIRST_CUH
#define COT_CAUSAL_CONV1D_FIRST_CUH

#include "causal_conv1d_fast.cuh"

/* Elements that a lane moves at once. */
template <typename E, int W> static constexpr int first_vector = sizeof(E) == 4 && W == 4 ? 4 : 8;

/* The inputs from W-1 before a lane's own V on. `before`, in lane 31: the inputs before the chunk; becomes those before
 * the next one. */
template <int V, int W>
static __device__ __forceinline__ void reach_back(const float (&own)[V], float (&before)[W - 1],
                                                  float (&inputs)[W - 1 + V])
{
    const int lane = threadIdx.x % CONV1D_LANES;
#pragma unroll
    for (int i = 0; i < W - 1; i++) {
        const float last = own[V - (W - 1) + i];
        inputs[i] = __shfl_sync(CONV1D_ALL_LANES, lane == 31 ? before[i] : last, lane + 31);
        before[i] = last;
    }
#pragma unroll
    for (int i = 0; i < V; i++)
        inputs[W - 1 + i] = own[i];
}

/* y of the V tokens at t. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void convolve(const conv1d_call &c, int64_t b, int64_t t, const float (&w)[W],
                                                float bias, const float (&inputs)[W - 1 + V], float (&out)[V])
{
    const token_ids<W - 1 + V, PLAIN> ids = load_ids<W - 1 + V, PLAIN>(c, b, t - (W - 1));
#pragma unroll
    for (int i = 0; i < V; i++) {
        float z = bias;
#pragma unroll
        for (int k = 0; k < W; k++)
            z = fmaf(w[k], if_same(ids, i + k, i + W - 1, inputs[i + k]), z);
        out[i] = if_token(ids, i + W - 1, z);
    }
    if (c.silu) {
#pragma unroll
        for (int i = 0; i < V; i++)
            out[i] = cot_silu<sizeof(E) == 4>(out[i]); /* silu(0) = 0, at padding too */
    }
}

/* The inputs before token `begin` of row x = x[b][d]. */
template <typename E, int W, bool PLAIN>
static __device__ __forceinline__ void load_before(const conv1d_call &c, int64_t b, int64_t d, const E *x, int begin,
                                                   float (&before)[W - 1])
{
    if (PLAIN && begin > 0) {
        float values[4];
        cot_unpack(cot_load_vector<E, 4>(x + begin - 4), values);
#pragma unroll
        for (int i = 0; i < W - 1; i++)
            before[i] = values[4 - (W - 1) + i];
        return;
    }
#pragma unroll
    for (int i = 0; i < W - 1; i++)
        before[i] = input_at<E>(c, b, d, begin - (W - 1) + i);
}

/* The lane's V inputs at t and the W-1 before, from a row in shared memory, which has them but for the initial state. */
template <typename E, int V, int W>
static __device__ __forceinline__ void read_inputs(const conv1d_call &c, int64_t b, int64_t d, const E *tile, int t,
                                                   float (&inputs)[W - 1 + V])
{
    float own[V], before[4];
    cot_unpack(*(const cot_vector<E, V> *)(tile + t), own);
    if (t > 0) {
        cot_unpack(*(const cot_vector<E, 4> *)(tile + t - 4), before);
    } else {
#pragma unroll
        for (int i = 1; i < 4; i++)
            before[i] = input_at<E>(c, b, d, i - 4);
    }
#pragma unroll
    for (int i = 0; i < W - 1 + V; i++)
        inputs[i] = i < W - 1 ? before[4 - (W - 1) + (i < W - 1 ? i : 0)] : own[i < W - 1 ? 0 : i - (W - 1)];
}

/* g of token t of row [b][d], its inputs read one by one: for the few that another block owns. */
template <typename E, int W, bool PLAIN>
static __device__ __forceinline__ float lone_gradient(const conv1d_call &c, int64_t b, int64_t d, int t,
                                                      const float (&w)[W], float bias, const E *dy)
{
    if (t >= c.T)
        return 0.0f;
    const token_ids<W, PLAIN> ids = load_ids<W, PLAIN>(c, b, t - (W - 1));
    float z = bias;
#pragma unroll
    for (int k = 0; k < W; k++)
        z = fmaf(w[k], if_same(ids, k, W - 1, input_at<E>(c, b, d, t - (W - 1) + k)), z);
    const float g = if_token(ids, W - 1, cot_to_f32(dy[t]));
    return c.silu ? cot_silu_gradient<sizeof(E) == 4>(g, z) : g;
}

/* Turns dy of the V tokens at t into g, and adds to the sums of dweight and dbias. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void take_gradient(const conv1d_call &c, int64_t b, int t, bool silu,
                                                     const float (&w)[W], float bias, const float (&inputs)[W - 1 + V],
                                                     float (&g)[V], float (&sums)[W + 1])
{
    const token_ids<W - 1 + V, PLAIN> ids = load_ids<W - 1 + V, PLAIN>(c, b, t - (W - 1));
    if (silu) {
#pragma unroll
        for (int i = 0; i < V; i++) {
            float z = bias;
#pragma unroll
            for (int k = 0; k < W; k++)
                z = fmaf(w[k], if_same(ids, i + k, i + W - 1, inputs[i + k]), z);
            g[i] = cot_silu_gradient<sizeof(E) == 4>(g[i], z);
        }
    }
#pragma unroll
    for (int i = 0; i < V; i++) {
        g[i] = if_token(ids, i + W - 1, g[i]);
        sums[W] += g[i];
#pragma unroll
        for (int k = 0; k < W; k++)
            sums[k] = fmaf(g[i], if_token(ids, i + W - 1, if_same(ids, i + k, i + W - 1, inputs[i + k])), sums[k]);
    }
}

/* dx of the V tokens at t, from their own g and the W-1 after. final: there is a dfinal_state. */
template <typename E, int V, int W, bool PLAIN>
static __device__ __forceinline__ void give_gradient(const conv1d_call &c, int64_t b, int64_t d, int t, bool final,
                                                     const float (&w)[W], const float (&g)[V],
                                                     const float (&after)[W - 1], float (&dx)[V])
{
    float gs[V + W - 1];
#pragma unroll
    for (int i = 0; i < V + W - 1; i++)
        gs[i] = i < V ? g[i < V ? i : 0] : after[i < V ? 0 : i - V];
    const token_ids<V + W - 1, PLAIN> ids = load_ids<V + W - 1, PLAIN>(c, b, t);
#pragma unroll
    for (int i = 0; i < V; i++) {
        dx[i] = w[W - 1] * gs[i];
#pragma unroll
        for (int j = 1; j < W; j++)
            dx[i] = fmaf(w[W - 1 - j], if_same(ids, i + j, i, gs[i + j]), dx[i]);
        dx[i] = if_token(ids, i, dx[i]);
    }
    if (final && t + V > (int)c.T - (int)(c.K - 1)) {
#pragma unroll
        for (int i = 0; i < V; i++)
            dx[i] += final_gradient(c, b, d, t + i);
    }
}

/* The warp's sums of N values. Half of the values go each way while there are several, which for 5 takes 9 shuffles
 * instead of 25. */
template <int N> static __device__ __forceinline__ void sum_over_lanes(const float (&values)[N], float *sums)
{
    constexpr int SLOTS = N <= 8 ? 8 : 16; /* lane 32/SLOTS k ends with the sum of value k */
    static_assert(N <= 16, "one slot a value");
    const int lane = threadIdx.x % CONV1D_LANES;
    float v[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        v[i] = i < N ? values[i < N ? i : 0] : 0.0f;
    int distance = 16;
#pragma unroll
    for (int half = SLOTS / 2; half > 0; half /= 2, distance /= 2) {
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
    if (lane % (CONV1D_LANES / SLOTS) == 0 && lane / (CONV1D_LANES / SLOTS) < N)
        sums[lane / (CONV1D_LANES / SLOTS)] = v[0];
}

#endif
