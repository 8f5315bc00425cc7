/* SPDX-License-Identifier: Apache-2.0
 * gelu.h: the numbers of GELU's two forms, for host vectors (src/simd/gelu.h) and devices (src/cuda/device). */
#ifndef COT_CORE_GELU_H
#define COT_CORE_GELU_H

/* ---- tanh form: z/2 * (1 + tanh(u)) = z * sigmoid(w), w = 2u = z * (COT_GELU_LINEAR + COT_GELU_CUBIC * z^2) ---- *
 * |w| is 87.31 at |z| = COT_GELU_LIMIT; beyond it sigmoid is 2^-126 or 1 in f32. */
#define COT_GELU_LINEAR 1.5957691216057307f /* 2 * sqrt(2/pi) */
#define COT_GELU_CUBIC 0.07135481627260024f /* that times 0.044715 */
#define COT_GELU_LIMIT 10.0f

/* ---- erf form: z * Phi(z), Phi the normal distribution ---------------------------------------------------------- *
 * Phi(-a) = exp(-a^2/2) * R(a) for a >= 0, where R falls slowly from 1/2 like 1/a: 1/2 and a polynomial in
 * s = a/(1 + 0.3 a) whose coefficients make the largest error on [0, 14.6], over R + 0.15 a, least: 2.4e-8. That weight,
 * because what an error of z does to z * Phi(z) grows so. Beyond 14.6 the result is 0 in f32. */
#define COT_GELU_ERF_LIMIT 15.0f
#define COT_GELU_ERF_TERMS 8
/* The coefficients of s, s^2, ... */
#define COT_GELU_ERF_COEFFICIENTS                                                                             \
    {                                                                                                         \
        -0x1.988474p-2f, 0x1.0ae724p-3f, -0x1.35e416p-6f, -0x1.9a72e0p-12f, 0x1.2d2596p-12f, 0x1.3d6f3ep-14f, \
            -0x1.ce9d40p-16f, 0x1.316d60p-19f                                                                 \
    }

#endif
