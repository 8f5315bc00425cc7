/* SPDX-License-Identifier: Apache-2.0
 * attention_softcap.cuh: scores under softcap. */
#ifndef COT_ATTENTION_SOFTCAP_CUH
#define COT_ATTENTION_SOFTCAP_CUH

#include "attention_cuda.h"

#include "../../../cuda/device/activation.cuh"

/* 1 - 2 / (exp(2x) + 1) with the sign put back, off by a few 2^-24; next to 0 the series itself. */
static __device__ __forceinline__ float tanh_anywhere(float x)
{
    const float u = x * x, far = copysignf(fmaf(-2.0f, cot_rcp(1.0f + cot_ex2(2.885390082f * fabsf(x))), 1.0f), x);
    const float series = fmaf(fmaf(ATTENTION_TANH_C3, u, ATTENTION_TANH_C2), u, ATTENTION_TANH_C1);
    return fabsf(x) > ATTENTION_TANH_NEAR ? far : x * fmaf(series, u, ATTENTION_TANH_C0);
}

static __device__ __forceinline__ float attention_cap_near(const attention_softcap &cap, float score)
{
    const float u = score * score;
    return score * fmaf(fmaf(fmaf(cap.series[3], u, cap.series[2]), u, cap.series[1]), u, cap.series[0]);
}

/* scores = tanh(scale * scores), which are small as a rule. FEW at a time, with one question of the warp for them, which
 * stands between them: as many as there are registers for. */
template <int FEW, int N>
static __device__ __forceinline__ void attention_cap(const attention_softcap &cap, float (&scores)[N])
{
    static_assert(N % FEW == 0, "all of them");
#pragma unroll
    for (int first = 0; first < N; first += FEW) {
        float most[4] = {};
#pragma unroll
        for (int i = first; i < first + FEW; i++)
            most[i % 4] = fmaxf(most[i % 4], fabsf(scores[i]));
        if (__any_sync(0xffffffffu, fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])) > cap.near)) {
#pragma unroll
            for (int i = first; i < first + FEW; i++)
                scores[i] = tanh_anywhere(cap.scale * scores[i]);
        } else {
#pragma unroll
            for (int i = first; i < first + FEW; i++)
                scores[i] = attention_cap_near(cap, scores[i]);
        }
    }
}

#endif
