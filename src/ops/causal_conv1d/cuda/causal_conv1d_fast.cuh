/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_fast.cuh: what the fast kernels share: parameters widened to W taps, ids of packed tokens. */
#ifndef COT_CAUSAL_CONV1D_FAST_CUH
#define COT_CAUSAL_CONV1D_FAST_CUH

#include "causal_conv1d_cuda.h"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/element.cuh"

#define CONV1D_ALL_LANES 0xffffffffu

/* The kernels of a file: body<element, width, PLAIN>. PLAIN kernels are for K up to 4, whole aligned vectors and no
 * packing, which keeps their registers few; the general ones ask at run time. `blocks`: that many of the PLAIN ones are
 * to fit on a multiprocessor. */
#define CONV1D_INSTANCES(stem, body, blocks)                               \
    CONV1D_INSTANCE(stem##_bf16, body, blocks, __nv_bfloat16, 4, true)     \
    CONV1D_INSTANCE(stem##_bf16_general, body, 1, __nv_bfloat16, 8, false) \
    CONV1D_INSTANCE(stem##_f16, body, blocks, __half, 4, true)             \
    CONV1D_INSTANCE(stem##_f16_general, body, 1, __half, 8, false)         \
    CONV1D_INSTANCE(stem##_f32, body, blocks, float, 4, true)              \
    CONV1D_INSTANCE(stem##_f32_general, body, 1, float, 8, false)
#define CONV1D_INSTANCE(name, body, blocks, element, width, plain)                   \
    extern "C" __global__ void __launch_bounds__(CONV1D_WARPS *CONV1D_LANES, blocks) \
        name(const __grid_constant__ conv1d_call c)                                  \
    {                                                                                \
        body<element, width, plain>(c);                                              \
    }

/* V elements, of which `count` are there (all or none in a PLAIN kernel, which asks for none it does not need). */
template <typename E, int V, bool PLAIN>
static __device__ __forceinline__ cot_vector<E, V> load_elements(const E *from, int64_t count, bool aligned)
{
    if (PLAIN || (aligned && count >= V))
        return cot_load_vector<E, V>(from);
    return cot_load_partial<E, V>(from, count);
}

template <typename E, int V, bool PLAIN>
static __device__ __forceinline__ void store_elements(E *to, int64_t count, bool aligned, const float (&values)[V])
{
    if (PLAIN || (aligned && count >= V))
        cot_store_vector<E, V>(to, values);
    else
        cot_store_partial<E, V>(to, count, values);
}

/* weight[d][.] as the last K of W taps, and bias[d]. */
template <int W> static __device__ __forceinline__ float load_taps(const conv1d_call &c, int64_t d, float (&w)[W])
{
    if (W == 4 && c.weight_packed) { /* four taps at once */
        if (c.weight.dtype == COT_F32) {
            const float4 v = ((const float4 *)c.weight.data)[d];
            w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
        } else {
            cot_vector<__nv_bfloat16, 4> v;
            float taps[4];
            *(uint2 *)&v = ((const uint2 *)c.weight.data)[d];
            if (c.weight.dtype == COT_F16)
                cot_unpack(*(const cot_vector<__half, 4> *)&v, taps);
            else
                cot_unpack(v, taps);
            w[0] = taps[0], w[1] = taps[1], w[2] = taps[2], w[3] = taps[3];
        }
        return c.bias.data != nullptr ? cot_load(c.bias.data, c.bias.dtype, d * c.bias.stride[0]) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < W; k++) {
        const int64_t own = k - (W - c.K);
        w[k] = own >= 0 ? cot_load(c.weight.data, c.weight.dtype, d * c.weight.stride[0] + own * c.weight.stride[1])
                        : 0.0f;
    }
    return c.bias.data != nullptr ? cot_load(c.bias.data, c.bias.dtype, d * c.bias.stride[0]) : 0.0f;
}

/* The id of token t of row b, 0 without packing; columns of the initial state have the first token's, what lies beyond
 * T is padding. */
static __device__ __forceinline__ int32_t token_id(const conv1d_call &c, int64_t b, int64_t t)
{
    if (t >= c.T)
        return -1;
    if (c.seq_idx.data == nullptr)
        return 0;
    return ((const int32_t *)c.seq_idx.data)[b * c.seq_idx.stride[0] + (t < 0 ? 0 : t) * c.seq_idx.stride[1]];
}

/* The ids of N neighbouring tokens, for the comparison of two of them; nothing at all in PLAIN kernels. */
template <int N, bool PLAIN> struct token_ids {
    int32_t id[PLAIN ? 1 : N];
};

template <int N, bool PLAIN>
static __device__ __forceinline__ token_ids<N, PLAIN> load_ids(const conv1d_call &c, int64_t b, int64_t first)
{
    token_ids<N, PLAIN> ids = {};
    if constexpr (!PLAIN) {
#pragma unroll
        for (int i = 0; i < N; i++)
            ids.id[i] = token_id(c, b, first + i);
    }
    return ids;
}

/* `value` if tokens i and j are of one sequence, else 0. For inputs, not weights: an input of another sequence may be
 * NaN. */
template <int N, bool PLAIN>
static __device__ __forceinline__ float if_same(const token_ids<N, PLAIN> &ids, int i, int j, float value)
{
    if constexpr (PLAIN)
        return value;
    else
        return i == j || ids.id[i] == ids.id[j] ? value : 0.0f;
}

/* `value`, or 0 if token i is padding. */
template <int N, bool PLAIN>
static __device__ __forceinline__ float if_token(const token_ids<N, PLAIN> &ids, int i, float value)
{
    if constexpr (PLAIN)
        return value;
    else
        return ids.id[i] < 0 ? 0.0f : value;
}

/* The input of channel d at position t < T, before 0 the initial state's. */
template <typename E>
static __device__ __forceinline__ float input_at(const conv1d_call &c, int64_t b, int64_t d, int64_t t)
{
    if (t >= 0)
        return cot_to_f32(((const E *)c.x.data)[b * c.x.stride[0] + d * c.x.stride[1] + t * c.x.stride[2]]);
    const conv1d_array &state = c.initial_state;
    if (state.data == nullptr || t < 1 - c.K)
        return 0.0f;
    return cot_load(state.data, state.dtype,
                    b * state.stride[0] + d * state.stride[1] + (c.K - 1 + t) * state.stride[2]);
}

/* What dfinal_state adds to dx[b][d][t]. */
static __device__ __forceinline__ float final_gradient(const conv1d_call &c, int64_t b, int64_t d, int64_t t)
{
    const conv1d_array &state = c.dfinal_state;
    const int64_t column = t - c.T + c.K - 1;
    if (state.data == nullptr || column < 0 || t >= c.T)
        return 0.0f;
    if (c.seq_idx.data != nullptr) {
        const int32_t last = token_id(c, b, c.T - 1);
        if (last < 0 || token_id(c, b, t) != last)
            return 0.0f;
    }
    return cot_load(state.data, state.dtype, b * state.stride[0] + d * state.stride[1] + column * state.stride[2]);
}

/* The block's sum k of channel d (k < W: of tap k of W, k = W: of dbias): the result itself if the channel has but one
 * block, else for causal_conv1d_reduce. */
template <int W>
static __device__ __forceinline__ void store_sum(const conv1d_call &c, int64_t share, int64_t d, int k, float sum)
{
    if (c.partial_count != 1) {
        c.partial[(share * (W + 1) + k) * c.D + d] = sum;
        return;
    }
    const conv1d_array &out = k < W ? c.dweight : c.dbias;
    const int64_t own = k < W ? k - (W - c.K) : 0;
    if (out.data == nullptr || own < 0)
        return;
    const int64_t at = d * out.stride[0] + own * out.stride[1];
    cot_store(out.data, out.dtype, at, sum + (c.accumulate ? cot_load(out.data, out.dtype, at) : 0.0f));
}

#endif
