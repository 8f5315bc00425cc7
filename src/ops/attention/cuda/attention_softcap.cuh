/* SPDX-License-Identifier: Apache-2.0
 * attention_softcap.cuh: softcap of scores. */
#ifndef COT_ATTENTION_SOFTCAP_CUH
#define COT_ATTENTION_SOFTCAP_CUH

#include "attention_sm90.h"

#include "../../../cuda/device/activation.cuh"

/* tanh: 1 - 2 / (exp(2x) + 1) with the sign of x, error a few 2^-24. Near 0 the series. */
static __device__ __forceinline__ float tanh_full_range(float x)
{
    const float u = x * x, exact = copysignf(fmaf(-2.0f, cot_rcp(1.0f + cot_ex2(2.885390082f * fabsf(x))), 1.0f), x);
    const float series = fmaf(fmaf(ATTENTION_TANH_C3, u, ATTENTION_TANH_C2), u, ATTENTION_TANH_C1);
    return fabsf(x) > ATTENTION_TANH_SERIES_MAX ? exact : x * fmaf(series, u, ATTENTION_TANH_C0);
}

/* scores = cap.factor * tanh(cap.scale * scores). Scores are usually small, for which a series is enough. The squares
 * of CHUNK scores, which the series needs anyway, show this in one warp vote. They are compared as integers, because
 * the GPU compares three integers at a time. */
template <int CHUNK, int N>
static __device__ __forceinline__ void attention_cap(const attention_softcap &cap, float (&scores)[N])
{
    static_assert(N % CHUNK == 0, "all of them");
#pragma unroll
    for (int begin = 0; begin < N; begin += CHUNK) {
        float squares[CHUNK];
        int bits = 0;
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            squares[i] = scores[begin + i] * scores[begin + i];
#pragma unroll
        for (int i = 0; i < CHUNK; i += 2)
            bits = max(max(bits, __float_as_int(squares[i])), __float_as_int(squares[i + 1]));
        const float max_square = __int_as_float(bits); /* NaN if a score is NaN: then both comparisons fail */
        if (__all_sync(0xffffffffu, max_square <= cap.short_max_square)) {
#pragma unroll
            for (int i = 0; i < CHUNK; i++)
                scores[begin + i] *=
                    fmaf(fmaf(squares[i], cap.short_series[2], cap.short_series[1]), squares[i], cap.short_series[0]);
        } else if (__all_sync(0xffffffffu, max_square <= cap.long_max_square)) {
#pragma unroll
            for (int i = 0; i < CHUNK; i++)
                scores[begin + i] *=
                    fmaf(fmaf(fmaf(cap.long_series[3], squares[i], cap.long_series[2]), squares[i], cap.long_series[1]),
                         squares[i], cap.long_series[0]);
        } else {
#pragma unroll
            for (int i = 0; i < CHUNK; i++)
                scores[begin + i] = cap.factor * tanh_full_range(cap.scale * scores[begin + i]);
        }
    }
}

#endif
