/* SPDX-License-Identifier: Apache-2.0
 * gelu.h: the constants of both forms of GELU, for CPU vectors (src/simd/gelu.h) and device code (src/cuda/device). */
#ifndef COT_CORE_GELU_H
#define COT_CORE_GELU_H

/* ---- tanh form: z/2 * (1 + tanh(u)) = z * sigmoid(w), w = 2u = z * (COT_GELU_LINEAR + COT_GELU_CUBIC * z^2) ---- *
 * |w| is 87.31 at |z| = COT_GELU_LIMIT; beyond it sigmoid is 2^-126 or 1 in f32. */
#define COT_GELU_LINEAR 1.5957691216057307f /* 2 * sqrt(2/pi) */
#define COT_GELU_CUBIC 0.07135481627260024f /* COT_GELU_LINEAR * 0.044715 */
#define COT_GELU_LIMIT 10.0f

/* ---- erf form: z * Phi(z), Phi the normal distribution ---------------------------------------------------------- *
 * Phi(-a) = exp(-a^2/2) * R(a) for a >= 0. R falls slowly from 1/2, like 1/a. R is approximated by 1/2 plus a
 * polynomial in s = a/(1 + 0.3 a). The coefficients minimise the maximum of (error of R) / (R + 0.15 a) on [0, 14.6],
 * which is 2.4e-8. The weight grows with a as the effect of a rounding error of z on z * Phi(z) does. Beyond 14.6 the
 * result is 0 in f32. */
#define COT_GELU_ERF_LIMIT 15.0f
#define COT_GELU_ERF_TERMS 8
/* The coefficients of s, s^2, ... */
#define COT_GELU_ERF_COEFFICIENTS                                                                             \
    {                                                                                                         \
        -0x1.988474p-2f, 0x1.0ae724p-3f, -0x1.35e416p-6f, -0x1.9a72e0p-12f, 0x1.2d2596p-12f, 0x1.3d6f3ep-14f, \
            -0x1.ce9d40p-16f, 0x1.316d60p-19f                                                                 \
    }

/* The derivative of the erf form, for 16-bit results: q for z < 0, 1 - q otherwise. q = exp2(-w^2) P(|w|) / D(|w|) with
 * w = COT_GELU_SLOPE_UNIT * z: this scale saves a multiplication of the square.
 * P and D minimise the maximum error on |z| <= 13.3. It is 2^-23.6 of the terms of the derivative plus 0.3 of the
 * effect of a rounding error of z. Beyond 13.3, q is 0 in f32. The coefficients are those of 1, |w|, |w|^2, ... */
#define COT_GELU_SLOPE_UNIT 0x1.b2da4ep-1f /* sqrt(log2(e) / 2) */
#define COT_GELU_SLOPE_NUMERATOR                                                           \
    {                                                                                      \
        0x1.000000p-1f, -0x1.f3dcdap-3f, -0x1.348768p-1f, -0x1.57fe3ap-2f, -0x1.0fc5cap-4f \
    }
#define COT_GELU_SLOPE_DENOMINATOR                                     \
    {                                                                  \
        0x1.000000p+0f, 0x1.6406fep+0f, 0x1.6de082p-1f, 0x1.2156e2p-3f \
    }
#define COT_GELU_SLOPE_DENOMINATOR_TERMS 4 /* number of coefficients of the denominator D */

#endif
