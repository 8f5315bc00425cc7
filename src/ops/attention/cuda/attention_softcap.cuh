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

/* scores = cap.factor * tanh(scale * scores), which are small as a rule. FEW at a time: their squares, which the series needs,
 * tell it to one question of the warp (as integers, which are compared three at a time). */
template <int FEW, int N>
static __device__ __forceinline__ void attention_cap(const attention_softcap &cap, float (&scores)[N])
{
    static_assert(N % FEW == 0, "all of them");
#pragma unroll
    for (int first = 0; first < N; first += FEW) {
        float squares[FEW];
        int bits = 0;
#pragma unroll
        for (int i = 0; i < FEW; i++)
            squares[i] = scores[first + i] * scores[first + i];
#pragma unroll
        for (int i = 0; i < FEW; i += 2)
            bits = max(max(bits, __float_as_int(squares[i])), __float_as_int(squares[i + 1]));
        const float most = __int_as_float(bits); /* or no number: then none is small */
        if (__all_sync(0xffffffffu, most <= cap.nearer)) {
#pragma unroll
            for (int i = 0; i < FEW; i++)
                scores[first + i] *= fmaf(fmaf(squares[i], cap.brief[2], cap.brief[1]), squares[i], cap.brief[0]);
        } else if (__all_sync(0xffffffffu, most <= cap.near)) {
#pragma unroll
            for (int i = 0; i < FEW; i++)
                scores[first + i] *=
                    fmaf(fmaf(fmaf(cap.series[3], squares[i], cap.series[2]), squares[i], cap.series[1]), squares[i],
                         cap.series[0]);
        } else {
#pragma unroll
            for (int i = 0; i < FEW; i++)
                scores[first + i] = cap.factor * tanh_anywhere(cap.scale * scores[first + i]);
        }
    }
}

#endif
