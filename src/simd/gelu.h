/* SPDX-License-Identifier: Apache-2.0
 * gelu.h: GELU and its derivative in the verbs of simd.h, both forms. */
#ifndef COT_SIMD_GELU_H
#define COT_SIMD_GELU_H

#include "simd.h"

/* ---- tanh form: z/2 * (1 + tanh(u)) = z * sigmoid(w), w = 2u = z * (V_GELU_LINEAR + V_GELU_CUBIC * z^2) -------- *
 * |w| is 87.31 at |z| = V_GELU_LIMIT, just within V_LOGISTIC_LIMIT; beyond it sigmoid is 2^-126 or 1. */

#define V_GELU_LINEAR 1.5957691216057307f /* 2 * sqrt(2/pi) */
#define V_GELU_CUBIC 0.07135481627260024f /* that times 0.044715 */
#define V_GELU_LIMIT 10.0f

V_INLINE vf v_gelu_exponent(vf z)
{
    return v_mul(z, v_fma(v_mul(z, z), v_set1(V_GELU_CUBIC), v_set1(V_GELU_LINEAR)));
}

V_INLINE vf v_gelu_tanh(vf z)
{
    z = v_max(v_set1(-V_GELU_LIMIT), z);
    return v_mul(z, v_sigmoid(v_gelu_exponent(v_min(v_set1(V_GELU_LIMIT), z))));
}

/* s + z * s * (1 - s) * dw/dz, with 1 - s as sigmoid(-w): the difference would be off by half a unit of 1, which z and
 * dw/dz multiply. */
V_INLINE vf v_gelu_tanh_slope(vf z)
{
    vf e;
    z = v_min(v_set1(V_GELU_LIMIT), v_max(v_set1(-V_GELU_LIMIT), z));
    const vf s = v_div(v_set1(1), v_logistic_divisor(v_gelu_exponent(z), &e));
    const vf dw = v_fma(v_mul(z, z), v_set1(3 * V_GELU_CUBIC), v_set1(V_GELU_LINEAR));
    return v_fma(v_mul(s, v_mul(z, dw)), v_mul(e, s), s);
}

/* ---- erf form: z * Phi(z), Phi the normal distribution ---------------------------------------------------------- *
 * Phi(-a) = exp(-a^2/2) * R(a) for a >= 0, where R falls slowly from 1/2 like 1/a: a polynomial in s = a/(1 + 0.3 a)
 * whose coefficients make the largest error on [0, 14.6], over R + 0.15 a, least: 2.4e-8. That weight, because what
 * an error of z does to z * Phi(z) grows so. Beyond 14.6 the result is 0 in f32. */

enum { V_GELU_TERMS = 8 };

/* For a in [0, 15]: R(a), and exp(-a^2/2). */
V_INLINE vf v_normal_tail(vf a, vf *power)
{
    static const float terms[V_GELU_TERMS] = {-0x1.988474p-2f, 0x1.0ae724p-3f,  -0x1.35e416p-6f,  -0x1.9a72e0p-12f,
                                              0x1.2d2596p-12f, 0x1.3d6f3ep-14f, -0x1.ce9d40p-16f, 0x1.316d60p-19f};
    const vf s = v_div(a, v_fma(a, v_set1(0.3f), v_set1(1)));
    vf r = v_set1(terms[V_GELU_TERMS - 1]);
    V_UNROLL
    for (int k = V_GELU_TERMS - 2; k >= 0; k--)
        r = v_fma(r, s, v_set1(terms[k]));
    *power = v_exp(v_mul(v_mul(a, a), v_set1(-0.5f)));
    return v_fma(r, s, v_set1(0.5f));
}

V_INLINE vf v_gelu_erf(vf z)
{
    vf power;
    const vf a = v_min(v_set1(15), v_abs(z));
    const vf tail = v_mul(v_normal_tail(a, &power), a);
    return v_fnma(power, tail, v_max(v_zero(), z)); /* z * Phi(-a) for z < 0, z - z * Phi(-a) otherwise */
}

/* Phi(z) + z * phi(z), which for z < 0 is q = exp(-a^2/2) * (R(a) - a/sqrt(2 pi)), and 1 - q otherwise. */
V_INLINE vf v_gelu_erf_slope(vf z)
{
    vf power;
    const vf a = v_min(v_set1(15), v_abs(z));
    const vf r = v_normal_tail(a, &power);
    const vf q = v_mul(power, v_fnma(a, v_set1(0.3989422804014327f), r));
    return v_select(vm_negative(z), q, v_sub(v_set1(1), q));
}

#endif
