/* SPDX-License-Identifier: Apache-2.0
 * attention_softcap.cuh: scores under softcap: softcap * tanh(scale / softcap * q.k). */
#ifndef COT_ATTENTION_SOFTCAP_CUH
#define COT_ATTENTION_SOFTCAP_CUH

#include "../../../cuda/device/activation.cuh"

/* tanh up to NEAR, the series in x^2 off by 2^-26. Where it is not enough: 1 - 2 / (exp(2x) + 1) with the sign put back, off by
 * a few 2^-24. */
#define ATTENTION_CAP_NEAR 0.5f

static __device__ __forceinline__ float tanh_near(float x)
{
    const float square = x * x;
    float series = 0.0172569936f;
    series = fmaf(series, square, -0.0530529518f);
    series = fmaf(series, square, 0.133259873f);
    series = fmaf(series, square, -0.333331484f);
    return fmaf(x * square, series, x);
}

static __device__ __forceinline__ float tanh_anywhere(float x)
{
    const float far = copysignf(fmaf(-2.0f, cot_rcp(1.0f + cot_ex2(2.885390082f * fabsf(x))), 1.0f), x);
    return fabsf(x) > ATTENTION_CAP_NEAR ? far : tanh_near(x);
}

/* scores = tanh(factor * scores), which are small as a rule. FEW at a time, with one question of the warp for them, which
 * stands between them: as many as there are registers for. */
template <int FEW, int N> static __device__ __forceinline__ void attention_cap(float factor, float (&scores)[N])
{
    static_assert(N % FEW == 0, "all of them");
#pragma unroll
    for (int first = 0; first < N; first += FEW) {
        float most[4] = {};
#pragma unroll
        for (int i = first; i < first + FEW; i++) {
            scores[i] *= factor;
            most[i % 4] = fmaxf(most[i % 4], fabsf(scores[i]));
        }
        const float all = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
        if (__any_sync(0xffffffffu, all > ATTENTION_CAP_NEAR)) {
#pragma unroll
            for (int i = first; i < first + FEW; i++)
                scores[i] = tanh_anywhere(scores[i]);
        } else {
#pragma unroll
            for (int i = first; i < first + FEW; i++)
                scores[i] = tanh_near(scores[i]);
        }
    }
}

#endif
