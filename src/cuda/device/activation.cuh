/* SPDX-License-Identifier: Apache-2.0
 * activation.cuh: SiLU and GELU, and their derivatives.
 *
 * Each function has two forms. PRECISE is accurate to about the last bit of float32, for float32 results. The other
 * form has an error of a few 2^-23, which rounding to 16 bits hides.
 *
 * The precise sigma(z) = 1 / (1 + exp(-z)) has neither overflow nor cancellation. With a = |z| and e = exp(-a) in (0,
 * 1], it computes sigma(a) = 1 / (1 + e) and 1 - sigma(a) = e / (1 + e). For z >= 0, sigma(z) is the first, else the
 * second. The errors of ex2.approx and rcp.approx are at most 2^-22 and 2^-23. */
#ifndef COT_CUDA_ACTIVATION_CUH
#define COT_CUDA_ACTIVATION_CUH

#include "../../core/gelu.h"

#if !defined(__HIP__) /* hip/device/vocabulary.h has them for AMD GPUs */

static __device__ __forceinline__ float cot_ex2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float cot_rcp(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The maximum or minimum of two numbers. The result is NaN if either is NaN. */
static __device__ __forceinline__ float cot_max_nan(float a, float b)
{
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

static __device__ __forceinline__ float cot_min_nan(float a, float b)
{
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

#endif

/* sigma(z), and *complement = 1 - sigma(z), accurate to about the last bit of float32. */
static __device__ __forceinline__ float cot_sigmoid(float z, float *complement)
{
    const float log2e = 1.4426950408889634f, log2e_low = 1.925963033500e-8f, ln2 = 0.6931471805599453f;
    const float a = fabsf(z), t = -log2e * a;
    float e = cot_ex2(t);
    e = fmaf(e, ln2 * (fmaf(-log2e, a, -t) - log2e_low * a), e);
    const float d = 1.0f + e;
    float large = cot_rcp(d);
    large = fmaf(large, fmaf(-d, large, 1.0f), large);
    const float small = e * large;
    *complement = z >= 0.0f ? small : large;
    return z >= 0.0f ? large : small;
}

/* sigma(z) for 16-bit results. Its relative error is about (|z| + 4) 2^-24. It is 0 for z below -87. */
static __device__ __forceinline__ float cot_sigmoid_approx(float z)
{
    return cot_rcp(1.0f + cot_ex2(-1.4426950408889634f * z));
}

/* z sigma(z) */
template <bool PRECISE> static __device__ __forceinline__ float cot_silu(float z)
{
    float complement;
    return z * (PRECISE ? cot_sigmoid(z, &complement) : cot_sigmoid_approx(z));
}

/* dy d silu / dz = dy sigma(z) (1 + z (1 - sigma(z))). 1 - sigma(z) is computed as exp(-z) sigma(z). From z = 4 on, the
 * subtraction would make the float32 sums of dweight too inaccurate. */
template <bool PRECISE> static __device__ __forceinline__ float cot_silu_gradient(float dy, float z)
{
    if (PRECISE) {
        float complement;
        const float sigma = cot_sigmoid(z, &complement);
        return dy * (sigma * fmaf(z, complement, 1.0f));
    }
    z = cot_max_nan(-87.33f, z); /* below -87.33, also for z = -inf, e would be inf and e * sigma NaN */
    const float e = cot_ex2(-1.4426950408889634f * z);
    const float sigma = cot_rcp(1.0f + e), scaled = dy * sigma;
    return fmaf(scaled, e * sigma * z, scaled);
}

/* sigma(z) (1 + z (1 - sigma(z))) */
template <bool PRECISE> static __device__ __forceinline__ float cot_silu_slope(float z)
{
    return cot_silu_gradient<PRECISE>(1.0f, z);
}

/* ---- GELU: core/gelu.h has the formulas ------------------------------------------------------------------ */

/* sigma(w) and *complement = 1 - sigma(w), w = z * (COT_GELU_LINEAR + COT_GELU_CUBIC * z^2), for |z| <=
 * COT_GELU_LIMIT. */
template <bool PRECISE> static __device__ __forceinline__ float cot_gelu_sigma(float z, float *complement)
{
    if (PRECISE)
        return cot_sigmoid(z * fmaf(z * z, COT_GELU_CUBIC, COT_GELU_LINEAR), complement);
    const float log2e = 1.4426950408889634f;
    const float e = cot_ex2(z * fmaf(z * z, -log2e * COT_GELU_CUBIC, -log2e * COT_GELU_LINEAR));
    const float sigma = cot_rcp(1.0f + e);
    *complement = e * sigma;
    return sigma;
}

template <bool PRECISE> static __device__ __forceinline__ float cot_gelu_tanh(float z)
{
    float complement;
    z = cot_max_nan(-COT_GELU_LIMIT, z);
    return z * cot_gelu_sigma<PRECISE>(cot_min_nan(COT_GELU_LIMIT, z), &complement);
}

/* s + z s (1 - s) dw/dz */
template <bool PRECISE> static __device__ __forceinline__ float cot_gelu_tanh_slope(float z)
{
    float complement;
    z = cot_min_nan(COT_GELU_LIMIT, cot_max_nan(-COT_GELU_LIMIT, z));
    const float s = cot_gelu_sigma<PRECISE>(z, &complement);
    return fmaf(s * (z * fmaf(z * z, 3 * COT_GELU_CUBIC, COT_GELU_LINEAR)), complement, s);
}

/* For a in [0, COT_GELU_ERF_LIMIT]: returns R(a) and sets *power to exp(-a^2/2). */
template <bool PRECISE> static __device__ __forceinline__ float cot_normal_tail(float a, float *power)
{
    constexpr float terms[COT_GELU_ERF_TERMS] = COT_GELU_ERF_COEFFICIENTS;
    const float half_log2e = 0.7213475204444817f, half_log2e_low = 9.629815168e-9f, ln2 = 0.6931471805599453f;
    const float s = a * cot_rcp(fmaf(a, 0.3f, 1.0f)), square = a * a, t = -half_log2e * square;
    float r = terms[COT_GELU_ERF_TERMS - 1];
#pragma unroll
    for (int k = COT_GELU_ERF_TERMS - 2; k >= 0; k--)
        r = fmaf(r, s, terms[k]);
    *power = cot_ex2(t);
    if (PRECISE) /* corrects the rounding error of the exponent t */
        *power = fmaf(*power, ln2 * (fmaf(-half_log2e, square, -t) - half_log2e_low * square), *power);
    return fmaf(r, s, 0.5f);
}

/* z Phi(-a) for z < 0, z - z Phi(-a) otherwise, a = |z| */
template <bool PRECISE> static __device__ __forceinline__ float cot_gelu_erf(float z)
{
    float power;
    const float a = cot_min_nan(COT_GELU_ERF_LIMIT, fabsf(z));
    const float tail = cot_normal_tail<PRECISE>(a, &power) * a;
    return fmaf(-power, tail, cot_max_nan(0.0f, z));
}

/* Phi(z) + z phi(z). With q = exp(-a^2/2) (R(a) - a / sqrt(2 pi)), this is q for z < 0 and 1 - q otherwise. */
static __device__ __forceinline__ float cot_gelu_erf_slope(float z)
{
    float power;
    const float a = cot_min_nan(COT_GELU_ERF_LIMIT, fabsf(z));
    const float r = cot_normal_tail<true>(a, &power);
    const float q = power * fmaf(-0.3989422804014327f, a, r);
    return z < 0.0f ? q : 1.0f - q;
}

/* `scale` times the derivative of GELU (erf form), for 16-bit results. w is COT_GELU_SLOPE_UNIT * z. core/gelu.h has
 * the formula. `denominator_terms` are the coefficients of the denominator divided by `scale`, so that scaling costs no
 * instruction per element. */
static __device__ __forceinline__ float cot_gelu_erf_slope_scaled(float w, float scale, const float *denominator_terms)
{
    constexpr float numerator_terms[] = COT_GELU_SLOPE_NUMERATOR;
    const float a = cot_min_nan(COT_GELU_ERF_LIMIT, fabsf(w));
    float numerator = numerator_terms[4], denominator = fmaf(denominator_terms[3], a, denominator_terms[2]);
#pragma unroll
    for (int k = 3; k >= 0; k--)
        numerator = fmaf(numerator, a, numerator_terms[k]);
    denominator = fmaf(fmaf(denominator, a, denominator_terms[1]), a, denominator_terms[0]);
    float slope = cot_ex2(-w * w) * (numerator * cot_rcp(denominator));
    if (!(w < 0.0f))
        slope = scale - slope;
    return slope;
}

#endif
