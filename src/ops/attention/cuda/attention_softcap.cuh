/* SPDX-License-Identifier: Apache-2.0
 * attention_softcap.cuh: scores under softcap: softcap * tanh(scale / softcap * q.k). */
#ifndef COT_ATTENTION_SOFTCAP_CUH
#define COT_ATTENTION_SOFTCAP_CUH

#include "../../../cuda/device/activation.cuh"

/* tanh below NEAR, off by 2^-25 of itself: a series in x^2. */
static __device__ __forceinline__ float tanh_near(float x)
{
    const float square = x * x;
    float series = -0.00657303987f;
    series = fmaf(series, square, 0.0212894218f);
    series = fmaf(series, square, -0.0539061423f);
    series = fmaf(series, square, 0.133330969f);
    series = fmaf(series, square, -0.333333319f);
    return fmaf(x * square, series, x);
}

/* Elsewhere, off by a few 2^-24: 1 - 2 / (exp(2x) + 1) with the sign put back. */
static __device__ __forceinline__ float tanh_far(float x)
{
    return copysignf(fmaf(-2.0f, cot_rcp(1.0f + cot_ex2(2.885390082f * fabsf(x))), 1.0f), x);
}

/* scores = tanh(factor * scores), which are small as a rule. A few at a time, or they take the registers of all. */
template <int N> static __device__ __forceinline__ void attention_cap(float factor, float (&scores)[N])
{
    enum { FEW = 8 };
    const float near = 0.55f;
#pragma unroll
    for (int first = 0; first < N; first += FEW) {
        float most = 0.0f;
#pragma unroll
        for (int i = first; i < first + FEW; i++) {
            scores[i] *= factor;
            most = fmaxf(most, fabsf(scores[i]));
        }
        if (__any_sync(0xffffffffu, most > near)) {
#pragma unroll
            for (int i = first; i < first + FEW; i++) {
                const float far = tanh_far(scores[i]);
                scores[i] = fabsf(scores[i]) > near ? far : tanh_near(scores[i]);
            }
        } else {
#pragma unroll
            for (int i = first; i < first + FEW; i++)
                scores[i] = tanh_near(scores[i]);
        }
    }
}

#endif
