/* SPDX-License-Identifier: Apache-2.0
 * mhc_cuda.cuh: tensor access, pre's coefficients and warp reductions for the CUDA kernels of the four ops. */
#ifndef COT_MHC_CUDA_CUH
#define COT_MHC_CUDA_CUH

#include "mhc_cuda.h"

#include "../../../cuda/device/element.cuh"

static __device__ __forceinline__ bool present(const mhc_array &a)
{
    return a.data != nullptr;
}

/* Offset from data, in elements, of a token of a tensor [B,T,...]. There are fewer than 2^31 tokens. */
static __device__ __forceinline__ int64_t token_offset(const mhc_call &c, const mhc_array &a, int64_t token)
{
    const uint32_t T = (uint32_t)c.T, b = (uint32_t)token / T;
    return b * a.stride[0] + ((uint32_t)token - b * T) * a.stride[1];
}

/* One element of every token, for loops over tokens. The part of the address that does not depend on the token is
 * computed once. */
struct token_element {
    float *data; /* null = this lane has no element */
    int64_t stride_b, stride_t;

    __device__ __forceinline__ token_element(const mhc_array &a, int64_t offset, bool valid)
        : data(valid && present(a) ? (float *)a.data + offset : nullptr), stride_b(a.stride[0]), stride_t(a.stride[1])
    {
    }
    __device__ __forceinline__ float *address(uint32_t b, uint32_t t) const
    {
        return data + b * stride_b + t * stride_t;
    }
};

static __device__ __forceinline__ float load_f32(const mhc_array &a, int64_t offset)
{
    return ((const float *)a.data)[offset];
}

static __device__ __forceinline__ void store_f32(const mhc_array &a, int64_t offset, float value)
{
    ((float *)a.data)[offset] = value;
}

template <typename E> static __device__ __forceinline__ float load_e(const mhc_array &a, int64_t offset)
{
    return cot_to_f32(((const E *)a.data)[offset]);
}

template <typename E> static __device__ __forceinline__ void store_e(const mhc_array &a, int64_t offset, float value)
{
    cot_from_f32((E *)a.data + offset, value);
}

static __device__ __forceinline__ void store_gradient(const mhc_call &c, const mhc_array &a, int64_t offset,
                                                      float value)
{
    if (present(a))
        store_f32(a, offset, c.accumulate ? load_f32(a, offset) + value : value);
}

/* ---- pre's coefficients ------------------------------------------------------------------------------- */

/* Index in alpha of coefficient j. */
static __device__ __forceinline__ int alpha_index(int n, int j)
{
    return j < n ? 0 : j < 2 * n ? 1 : 2;
}

/* The relative error stays small down to subnormal results, because the outputs are f32. */
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
    if (present(c.h_mix))
        store_f32(c.h_mix, token_offset(c, c.h_mix, token) + j * c.h_mix.stride[2], h_mix);
    if (j < n) {
        if (present(c.h_pre))
            store_f32(c.h_pre, token_offset(c, c.h_pre, token) + j * c.h_pre.stride[2], value);
    } else if (j < 2 * n) {
        if (present(c.h_post))
            store_f32(c.h_post, token_offset(c, c.h_post, token) + (j - n) * c.h_post.stride[2], value);
    } else {
        const int ij = j - 2 * n;
        if (present(c.h_res_logits))
            store_f32(c.h_res_logits,
                      token_offset(c, c.h_res_logits, token) + ij / n * c.h_res_logits.stride[2] +
                          ij % n * c.h_res_logits.stride[3],
                      value);
        if (c.logits != nullptr)
            c.logits[token * n * n + ij] = value;
    }
}

/* dz of coefficient j, except for h_pre (then 0). With dh_res, mhc_pre_dz has stored dz in the workspace: it includes
 * Sinkhorn's gradient. */
static __device__ __forceinline__ float load_dz(const mhc_call &c, int n, int64_t token, int j)
{
    if (j < n)
        return 0.0f;
    if (present(c.dh_res))
        return c.dz[token * (n * n + 2 * n) + j];
    if (j < 2 * n) {
        const float h_post = load_f32(c.h_post, token_offset(c, c.h_post, token) + (j - n) * c.h_post.stride[2]);
        return load_f32(c.dh_post, token_offset(c, c.dh_post, token) + (j - n) * c.dh_post.stride[2]) * h_post *
               (1.0f - h_post / c.post_scale);
    }
    const int ij = j - 2 * n;
    return present(c.dh_res_logits)
               ? load_f32(c.dh_res_logits, token_offset(c, c.dh_res_logits, token) +
                                               ij / n * c.dh_res_logits.stride[2] + ij % n * c.dh_res_logits.stride[3])
               : 0.0f;
}

/* ---- reductions over a warp ---------------------------------------------------------------------------- */

/* Sums V values over the lanes of a warp by recursive halving. In each step a lane sends the half of its values that
 * its partner keeps. Afterwards v[0] to v[V/32-1] of lane l hold the sums of elements l*V/32 and following. */
template <int V, int WIDTH = 16> static __device__ __forceinline__ void sum_over_lanes(float (&v)[V])
{
    static_assert(V % 32 == 0, "each lane must hold the same number of sums");
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
