/* SPDX-License-Identifier: Apache-2.0
 * gelu.h: both forms of GELU and their derivatives, with the vector operations of simd.h. core/gelu.h has the
 * formulas. */
#ifndef COT_SIMD_GELU_H
#define COT_SIMD_GELU_H

#include "core/gelu.h"
#include "simd.h"

V_INLINE vf v_gelu_exponent(vf z)
{
    return v_mul(z, v_fma(v_mul(z, z), v_set1(COT_GELU_CUBIC), v_set1(COT_GELU_LINEAR)));
}

V_INLINE vf v_gelu_tanh(vf z)
{
    z = v_max(v_set1(-COT_GELU_LIMIT), z);
    return v_mul(z, v_sigmoid(v_gelu_exponent(v_min(v_set1(COT_GELU_LIMIT), z))));
}

/* s + z * s * (1 - s) * dw/dz. 1 - s is computed as sigmoid(-w): the subtraction would have an error of half an ulp of
 * 1, multiplied by z and dw/dz. */
V_INLINE vf v_gelu_tanh_slope(vf z)
{
    vf e;
    z = v_min(v_set1(COT_GELU_LIMIT), v_max(v_set1(-COT_GELU_LIMIT), z));
    const vf s = v_div(v_set1(1), v_logistic_divisor(v_gelu_exponent(z), &e));
    const vf dw = v_fma(v_mul(z, z), v_set1(3 * COT_GELU_CUBIC), v_set1(COT_GELU_LINEAR));
    return v_fma(v_mul(s, v_mul(z, dw)), v_mul(e, s), s);
}

/* For a in [0, 15]: returns R(a) and sets *power to exp(-a^2/2). */
V_INLINE vf v_normal_tail(vf a, vf *power)
{
    static const float terms[COT_GELU_ERF_TERMS] = COT_GELU_ERF_COEFFICIENTS;
    const vf s = v_div(a, v_fma(a, v_set1(0.3f), v_set1(1)));
    vf r = v_set1(terms[COT_GELU_ERF_TERMS - 1]);
    V_UNROLL
    for (int k = COT_GELU_ERF_TERMS - 2; k >= 0; k--)
        r = v_fma(r, s, v_set1(terms[k]));
    *power = v_exp(v_mul(v_mul(a, a), v_set1(-0.5f)));
    return v_fma(r, s, v_set1(0.5f));
}

V_INLINE vf v_gelu_erf(vf z)
{
    vf power;
    const vf a = v_min(v_set1(COT_GELU_ERF_LIMIT), v_abs(z));
    const vf tail = v_mul(v_normal_tail(a, &power), a);
    return v_fnma(power, tail, v_max(v_zero(), z)); /* z * Phi(-a) for z < 0, z - z * Phi(-a) otherwise */
}

/* Phi(z) + z * phi(z). With q = exp(-a^2/2) * (R(a) - a/sqrt(2 pi)), this is q for z < 0 and 1 - q otherwise. */
V_INLINE vf v_gelu_erf_slope(vf z)
{
    vf power;
    const vf a = v_min(v_set1(COT_GELU_ERF_LIMIT), v_abs(z));
    const vf r = v_normal_tail(a, &power);
    const vf q = v_mul(power, v_fnma(a, v_set1(0.3989422804014327f), r));
    return v_select(vm_negative(z), q, v_sub(v_set1(1), q));
}

#endif
