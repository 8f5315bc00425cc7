/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_common.cuh: what the fast kernels share: weights padded to W taps, sequence ids of packed tokens.
 *
 * W: the compile-time width of an instance, at least K. The first W - K taps are 0. Plain versions and the Hopper
 * kernels have W = 4, for K up to 4. General versions have W = 8, for any K up to 8. */
#ifndef COT_CAUSAL_CONV1D_COMMON_CUH
#define COT_CAUSAL_CONV1D_COMMON_CUH

#include "causal_conv1d_cuda.h"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/element.cuh"

#define CONV1D_ALL_LANES 0xffffffffu

/* The kernels of a file: body<element, width, PLAIN>. Plain versions support K up to 4, whole aligned
 * vectors and no packing, so they need few registers. General versions test these conditions at run time. `blocks`:
 * plain blocks that must fit on a multiprocessor. */
#define CONV1D_DEFINE_KERNELS(stem, body, blocks)                          \
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

/* Loads V elements, of which the first `count` exist. Plain versions call this only if all V exist. */
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

/* Loads weight[d][.] as the last K of W taps, with zeros before them. Returns bias[d]. */
template <int W> static __device__ __forceinline__ float load_taps(const conv1d_call &c, int64_t d, float (&w)[W])
{
    if (W == 4 && c.weight_packed) { /* one load for the 4 taps */
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
        const int64_t tap = k - (W - c.K);
        w[k] = tap >= 0 ? cot_load(c.weight.data, c.weight.dtype, d * c.weight.stride[0] + tap * c.weight.stride[1])
                        : 0.0f;
    }
    return c.bias.data != nullptr ? cot_load(c.bias.data, c.bias.dtype, d * c.bias.stride[0]) : 0.0f;
}

/* The sequence id of token t of batch element b: 0 without packing, -1 (padding) from T on. Positions in the initial
 * state (t < 0) have the id of the first token. */
static __device__ __forceinline__ int32_t token_id(const conv1d_call &c, int64_t b, int64_t t)
{
    if (t >= c.T)
        return -1;
    if (c.seq_idx.data == nullptr)
        return 0;
    return ((const int32_t *)c.seq_idx.data)[b * c.seq_idx.stride[0] + (t < 0 ? 0 : t) * c.seq_idx.stride[1]];
}

/* The sequence ids of N consecutive tokens. Unused in plain versions. */
template <int N, bool PLAIN> struct token_ids {
    int32_t id[PLAIN ? 1 : N];
};

template <int N, bool PLAIN>
static __device__ __forceinline__ token_ids<N, PLAIN> load_token_ids(const conv1d_call &c, int64_t b, int64_t first)
{
    token_ids<N, PLAIN> ids = {};
    if constexpr (!PLAIN) {
#pragma unroll
        for (int i = 0; i < N; i++)
            ids.id[i] = token_id(c, b, first + i);
    }
    return ids;
}

/* `value` if tokens i and j are in the same sequence, else 0. Mask inputs, not weights: an input of another sequence
 * may be NaN. */
template <int N, bool PLAIN>
static __device__ __forceinline__ float mask_other_sequence(const token_ids<N, PLAIN> &ids, int i, int j, float value)
{
    if constexpr (PLAIN)
        return value;
    else
        return i == j || ids.id[i] == ids.id[j] ? value : 0.0f;
}

/* `value`, or 0 if token i is padding. */
template <int N, bool PLAIN>
static __device__ __forceinline__ float mask_padding(const token_ids<N, PLAIN> &ids, int i, float value)
{
    if constexpr (PLAIN)
        return value;
    else
        return ids.id[i] < 0 ? 0.0f : value;
}

/* The input of channel d at position t < T. For t < 0 it comes from the initial state. */
template <typename E>
static __device__ __forceinline__ float load_input(const conv1d_call &c, int64_t b, int64_t d, int64_t t)
{
    if (t >= 0)
        return cot_to_f32(((const E *)c.x.data)[b * c.x.stride[0] + d * c.x.stride[1] + t * c.x.stride[2]]);
    const conv1d_array &state = c.initial_state;
    if (state.data == nullptr || t < 1 - c.K)
        return 0.0f;
    return cot_load(state.data, state.dtype,
                    b * state.stride[0] + d * state.stride[1] + (c.K - 1 + t) * state.stride[2]);
}

/* The term of dx[b][d][t] that comes from dfinal_state. */
static __device__ __forceinline__ float load_dfinal_state(const conv1d_call &c, int64_t b, int64_t d, int64_t t)
{
    const conv1d_array &state = c.dfinal_state;
    const int64_t state_position = t - c.T + c.K - 1;
    if (state.data == nullptr || state_position < 0 || t >= c.T)
        return 0.0f;
    if (c.seq_idx.data != nullptr) {
        const int32_t last_id = token_id(c, b, c.T - 1);
        if (last_id < 0 || token_id(c, b, t) != last_id)
            return 0.0f;
    }
    return cot_load(state.data, state.dtype,
                    b * state.stride[0] + d * state.stride[1] + state_position * state.stride[2]);
}

/* Stores the block's sum k of channel d: tap k of W for k < W, dbias for k = W. With one block per channel this is the
 * result. Else it is a partial sum for causal_conv1d_reduce. */
template <int W>
static __device__ __forceinline__ void store_sum(const conv1d_call &c, int64_t partial_index, int64_t d, int k,
                                                 float sum)
{
    if (c.partial_count != 1) {
        c.partial[(partial_index * (W + 1) + k) * c.D + d] = sum;
        return;
    }
    const conv1d_array &out = k < W ? c.dweight : c.dbias;
    const int64_t tap = k < W ? k - (W - c.K) : 0;
    if (out.data == nullptr || tap < 0)
        return;
    const int64_t offset = d * out.stride[0] + tap * out.stride[1];
    cot_store(out.data, out.dtype, offset, sum + (c.accumulate ? cot_load(out.data, out.dtype, offset) : 0.0f));
}

#endif
