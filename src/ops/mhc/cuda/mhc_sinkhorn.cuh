/* SPDX-License-Identifier: Apache-2.0
 * mhc_sinkhorn.cuh: Sinkhorn's iterations and their gradient for one token in one thread's registers. See
 * cpu/mhc_sinkhorn.h for the method. */
#ifndef COT_MHC_SINKHORN_CUH
#define COT_MHC_SINKHORN_CUH

#include "../../../cuda/device/activation.cuh"

#include <stdint.h>

/* a / b; the last bit is wrong in a few cases. The iterations are one chain of divisions, and exact divisions take
 * three times as long. */
static __device__ __forceinline__ float divide(float a, float b)
{
    const float r = cot_rcp(b), q = a * r;
    return fmaf(fmaf(-b, q, a), r, q);
}

/* K = softmax(logits) over rows, + eps, in place. */
template <int N> static __device__ __forceinline__ void softmax(float eps, float (&K)[N * N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        float row_max = K[i * N], sum = 0.0f;
#pragma unroll
        for (int j = 1; j < N; j++)
            row_max = fmaxf(row_max, K[i * N + j]);
#pragma unroll
        for (int j = 0; j < N; j++)
            sum += K[i * N + j] = expf(K[i * N + j] - row_max);
#pragma unroll
        for (int j = 0; j < N; j++)
            K[i * N + j] = K[i * N + j] / sum + eps;
    }
}

/* One iteration. The first iteration has no row step (rows = false). */
template <int N>
static __device__ __forceinline__ void sinkhorn_iteration(bool rows, float eps, const float (&K)[N * N], float (&u)[N],
                                                          float (&v)[N])
{
    if (rows) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < N; j++)
                sum = fmaf(K[i * N + j], v[j], sum);
            u[i] = divide(u[i], fmaf(sum, u[i], eps));
        }
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++)
            sum = fmaf(K[i * N + j], u[i], sum);
        v[j] = divide(v[j], fmaf(sum, v[j], eps));
    }
}

/* h_res from the logits, in place. */
template <int N> static __device__ __forceinline__ void sinkhorn(int iterations, float eps, float (&h_res)[N * N])
{
    float u[N], v[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        u[i] = v[i] = 1.0f;
    softmax<N>(eps, h_res);
#pragma unroll 1
    for (int r = 0; r < iterations; r++)
        sinkhorn_iteration<N>(r > 0, eps, h_res, u, v);
#pragma unroll
    for (int ij = 0; ij < N * N; ij++)
        h_res[ij] = h_res[ij] * u[ij / N] * v[ij % N];
}

/* Loads u and v after iteration r. */
template <int N>
static __device__ __forceinline__ void load_scales(const float *history, int64_t stride, int r, float (&u)[N],
                                                   float (&v)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        u[i] = history[(2 * r * N + i) * stride];
        v[i] = history[((2 * r + 1) * N + i) * stride];
    }
}

/* G holds dh_res and becomes the gradient of the logits. history: element 0 of [iterations][2n], with `stride` between
 * elements. */
template <int N>
static __device__ __forceinline__ void sinkhorn_gradient(int iterations, float eps, const float (&logits)[N * N],
                                                         float (&G)[N * N], float *history, int64_t stride)
{
    float K[N * N], u[N], v[N], u_previous[N], v_previous[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        u[i] = v[i] = 1.0f;
#pragma unroll
    for (int ij = 0; ij < N * N; ij++)
        K[ij] = logits[ij];
    softmax<N>(eps, K);
#pragma unroll 1
    for (int r = 0; r < iterations; r++) {
        sinkhorn_iteration<N>(r > 0, eps, K, u, v);
#pragma unroll
        for (int i = 0; i < N; i++) {
            history[(2 * r * N + i) * stride] = u[i];
            history[((2 * r + 1) * N + i) * stride] = v[i];
        }
    }
#pragma unroll
    for (int ij = 0; ij < N * N; ij++)
        G[ij] = G[ij] * u[ij / N] * v[ij % N];
    if (iterations > 1)
        load_scales<N>(history, stride, iterations - 2, u_previous, v_previous);
#pragma unroll 1
    for (int r = iterations - 1;; r--) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < N; i++)
                sum = fmaf(G[i * N + j], K[i * N + j], sum);
            sum *= v[j];
#pragma unroll
            for (int i = 0; i < N; i++)
                G[i * N + j] = fmaf(-sum, u[i], G[i * N + j]);
        }
        if (r == 0)
            break;
#pragma unroll
        for (int i = 0; i < N; i++) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < N; j++)
                sum = fmaf(G[i * N + j], K[i * N + j], sum);
            sum *= u[i];
#pragma unroll
            for (int j = 0; j < N; j++)
                G[i * N + j] = fmaf(-sum, v_previous[j], G[i * N + j]);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            u[i] = u_previous[i];
            v[i] = v_previous[i];
        }
        if (r > 1) /* loaded one iteration before use */
            load_scales<N>(history, stride, r - 2, u_previous, v_previous);
    }
    /* Compute P again, because K - eps would lose elements much smaller than eps. */
#pragma unroll
    for (int ij = 0; ij < N * N; ij++)
        K[ij] = logits[ij];
    softmax<N>(0.0f, K);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < N; j++)
            sum = fmaf(G[i * N + j], K[i * N + j], sum);
#pragma unroll
        for (int j = 0; j < N; j++)
            G[i * N + j] = K[i * N + j] * (G[i * N + j] - sum);
    }
}

#endif
