/* SPDX-License-Identifier: Apache-2.0
 * mhc_cuda.cuh: access to tensors, and sums over a block, for the kernels of the three ops. */
#ifndef COT_MHC_CUDA_CUH
#define COT_MHC_CUDA_CUH

#include "mhc_cuda.h"

#include "../../../cuda/device/element.cuh"

static __device__ __forceinline__ bool given(const mhc_array &a)
{
    return a.data != nullptr;
}

/* Element 0 of a token of a tensor [B,T,...], in elements from data. There are less than 2^31 tokens. */
static __device__ __forceinline__ int64_t token_at(const mhc_call &c, const mhc_array &a, int64_t token)
{
    const uint32_t T = (uint32_t)c.T, b = (uint32_t)token / T;
    return b * a.stride[0] + ((uint32_t)token - b * T) * a.stride[1];
}

/* A lane's element of every token, for loops over tokens: what does not change with the token is worked out before. */
struct token_element {
    float *data; /* null = the lane has none */
    int64_t stride_b, stride_t;

    __device__ __forceinline__ token_element(const mhc_array &a, int64_t offset, bool has)
        : data(has && given(a) ? (float *)a.data + offset : nullptr), stride_b(a.stride[0]), stride_t(a.stride[1])
    {
    }
    __device__ __forceinline__ float *at(uint32_t b, uint32_t t) const
    {
        return data + b * stride_b + t * stride_t;
    }
};

static __device__ __forceinline__ float load_f32(const mhc_array &a, int64_t at)
{
    return ((const float *)a.data)[at];
}

static __device__ __forceinline__ void store_f32(const mhc_array &a, int64_t at, float value)
{
    ((float *)a.data)[at] = value;
}

template <typename E> static __device__ __forceinline__ float load_e(const mhc_array &a, int64_t at)
{
    return cot_to_f32(((const E *)a.data)[at]);
}

template <typename E> static __device__ __forceinline__ void store_e(const mhc_array &a, int64_t at, float value)
{
    cot_from_f32((E *)a.data + at, value);
}

static __device__ __forceinline__ void store_gradient(const mhc_call &c, const mhc_array &a, int64_t at, float value)
{
    if (given(a))
        store_f32(a, at, c.accumulate ? load_f32(a, at) + value : value);
}

/* ---- pre's coefficients ------------------------------------------------------------------------------- */

/* The index of coefficient j's alpha. */
static __device__ __forceinline__ int group_of(int n, int j)
{
    return j < n ? 0 : j < 2 * n ? 1 : 2;
}

/* Accurate relative to itself down to subnormals, as the outputs are f32. */
static __device__ __forceinline__ float sigmoid(float z)
{
    const float e = expf(-fabsf(z)), larger = 1.0f / (1.0f + e);
    return z < 0.0f ? e * larger : larger;
}

/* h_pre, h_post or a logit from z. */
static __device__ __forceinline__ float coefficient(const mhc_call &c, int n, int j, float z)
{
    return j < n ? sigmoid(z) + c.hc_eps : j < 2 * n ? c.post_scale * sigmoid(z) : z;
}

static __device__ __forceinline__ void store_coefficient(const mhc_call &c, int n, int64_t token, int j, float h_mix,
                                                         float value)
{
    if (given(c.h_mix))
        store_f32(c.h_mix, token_at(c, c.h_mix, token) + j * c.h_mix.stride[2], h_mix);
    if (j < n) {
        if (given(c.h_pre))
            store_f32(c.h_pre, token_at(c, c.h_pre, token) + j * c.h_pre.stride[2], value);
    } else if (j < 2 * n) {
        if (given(c.h_post))
            store_f32(c.h_post, token_at(c, c.h_post, token) + (j - n) * c.h_post.stride[2], value);
    } else {
        const int ij = j - 2 * n;
        if (given(c.h_res))
            store_f32(c.h_res, token_at(c, c.h_res, token) + ij / n * c.h_res.stride[2] + ij % n * c.h_res.stride[3],
                      value);
        if (c.logits != nullptr)
            c.logits[token * n * n + ij] = value;
    }
}

/* dz of a coefficient but those of h_pre: from mhc_pre_dz if Sinkhorn's gradient is in it. */
static __device__ __forceinline__ float dz_of(const mhc_call &c, int n, int64_t token, int j)
{
    if (j < n)
        return 0.0f;
    if (given(c.dA))
        return c.dz[token * (n * n + 2 * n) + j];
    if (j < 2 * n) {
        const float h_post = load_f32(c.h_post, token_at(c, c.h_post, token) + (j - n) * c.h_post.stride[2]);
        return load_f32(c.dh_post, token_at(c, c.dh_post, token) + (j - n) * c.dh_post.stride[2]) * h_post *
               (1.0f - h_post / c.post_scale);
    }
    const int ij = j - 2 * n;
    return given(c.dh_res) ? load_f32(c.dh_res, token_at(c, c.dh_res, token) + ij / n * c.dh_res.stride[2] +
                                                    ij % n * c.dh_res.stride[3])
                           : 0.0f;
}

/* ---- sums over a warp --------------------------------------------------------------------------------- */

/* Adds up V values over the lanes of a warp, by halves: each step sends away those that the lane's other half keeps.
 * Lane l is left with the sums of elements l*V/32 and those after it, in v[0] to v[V/32-1]. */
template <int V, int WIDTH = 16> static __device__ __forceinline__ void sum_over_lanes(float (&v)[V])
{
    static_assert(V % 32 == 0, "a whole number of sums for each lane");
    constexpr int HALF = V / 32 * WIDTH;
    const bool upper = threadIdx.x & WIDTH;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const float kept = upper ? v[i + HALF] : v[i], sent = upper ? v[i] : v[i + HALF];
        v[i] = kept + __shfl_xor_sync(0xffffffffu, sent, WIDTH);
    }
    if constexpr (WIDTH > 1)
        sum_over_lanes<V, WIDTH / 2>(v);
}

#endif
