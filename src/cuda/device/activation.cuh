/* SPDX-License-Identifier: Apache-2.0
 * activation.cuh: the logistic function. The precise form has neither overflow nor cancellation: with a = |z| and
 * e = exp(-a) in (0, 1], sigma(a) = 1 / (1 + e) and 1 - sigma(a) = e / (1 + e), and the sign of z says which of the two
 * is sigma(z). ex2.approx and rcp.approx are off by 2^-22 and 2^-23 at most. */
#ifndef COT_CUDA_ACTIVATION_CUH
#define COT_CUDA_ACTIVATION_CUH

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

/* sigma(z), and *rest = 1 - sigma(z), to float32's last bit or so: for float32 results. */
static __device__ __forceinline__ float cot_sigmoid(float z, float *rest)
{
    const float log2e = 1.4426950408889634f, log2e_low = 1.925963033500e-8f, ln2 = 0.6931471805599453f;
    const float a = fabsf(z), t = -log2e * a;
    float e = cot_ex2(t);
    e = fmaf(e, ln2 * (fmaf(-log2e, a, -t) - log2e_low * a), e);
    const float d = 1.0f + e;
    float large = cot_rcp(d);
    large = fmaf(large, fmaf(-d, large, 1.0f), large);
    const float small = e * large;
    *rest = z >= 0.0f ? small : large;
    return z >= 0.0f ? large : small;
}

/* sigma(z) for 16-bit results, off by about (|z| + 4) 2^-24 of itself, which they do not see; 0 below -87. */
static __device__ __forceinline__ float cot_sigmoid_short(float z)
{
    return cot_rcp(1.0f + cot_ex2(-1.4426950408889634f * z));
}

/* z sigma(z) */
template <bool PRECISE> static __device__ __forceinline__ float cot_silu(float z)
{
    float rest;
    return z * (PRECISE ? cot_sigmoid(z, &rest) : cot_sigmoid_short(z));
}

/* dy d silu / dz = dy sigma(z) (1 + z (1 - sigma(z))), with 1 - sigma(z) = exp(-z) sigma(z): a subtraction would break
 * float32's sums of dweight from z = 4 on. */
template <bool PRECISE> static __device__ __forceinline__ float cot_silu_gradient(float dy, float z)
{
    if (PRECISE) {
        float rest;
        const float sigma = cot_sigmoid(z, &rest);
        return dy * (sigma * fmaf(z, rest, 1.0f));
    }
    const float e = cot_ex2(fminf(-1.4426950408889634f * z, 126.0f)); /* not infinite, or e sigma were no number */
    const float sigma = cot_rcp(1.0f + e), scaled = dy * sigma;
    return fmaf(scaled, e * sigma * z, scaled);
}

#endif
