/* SPDX-License-Identifier: Apache-2.0
 * silu.h: SiLU and its derivative for several vectors at once. They serve loops in which one vector's dependency chain
 * fills the processor's scheduler. */
#ifndef COT_SIMD_SILU_H
#define COT_SIMD_SILU_H

#include "simd.h"

/* v_logistic_divisor of up to 4 vectors, interleaved: d[v] = 1 + e[v], e[v] = exp(-z[v]). */
#if defined(COT_SIMD_AVX2)
V_INLINE void v_logistic_divisors(const vf *z, vf *e, vf *d, int count)
{
    vf n[4], r[4], p[4];
    V_UNROLL
    for (int v = 0; v < count; v++)
        n[v] = v_fma(z[v], v_set1(-V_LOG2E), v_set1(V_EIGHTHS));
    V_UNROLL
    for (int v = 0; v < count; v++)
        r[v] = v_fma(v_sub(n[v], v_set1(V_EIGHTHS)), v_set1(V_LN2_HIGH), z[v]);
    V_UNROLL
    for (int v = 0; v < count; v++)
        n[v] = v_power_of_eighths(_mm256_castps_si256(n[v]));
    V_UNROLL
    for (int v = 0; v < count; v++)
        p[v] = v_fma(r[v], v_set1(1.0f / 24), v_set1(-1.0f / 6));
    V_UNROLL
    for (int v = 0; v < count; v++)
        p[v] = v_fma(p[v], r[v], v_set1(0.5f));
    V_UNROLL
    for (int v = 0; v < count; v++)
        p[v] = v_fma(p[v], r[v], v_set1(-1.0f));
    V_UNROLL
    for (int v = 0; v < count; v++)
        p[v] = v_fma(p[v], r[v], v_set1(1.0f));
    V_UNROLL
    for (int v = 0; v < count; v++) {
        d[v] = v_fma(n[v], p[v], v_set1(1.0f));
        e[v] = v_mul(n[v], p[v]);
    }
}
#elif defined(COT_SIMD_AVX512)
V_INLINE void v_logistic_divisors(const vf *z, vf *e, vf *d, int count)
{
    vf n[4], r[4], p[4];
    V_UNROLL
    for (int v = 0; v < count; v++)
        n[v] = v_fma(z[v], v_set1(-V_LOG2E), v_set1(V_SIXTEENTHS));
    V_UNROLL
    for (int v = 0; v < count; v++)
        r[v] = v_fma(v_sub(n[v], v_set1(V_SIXTEENTHS)), v_set1(V_LN2_HIGH), z[v]);
    V_UNROLL
    for (int v = 0; v < count; v++)
        n[v] = v_power_of_sixteenths(n[v]);
    V_UNROLL
    for (int v = 0; v < count; v++)
        p[v] = v_fma(r[v], v_set1(-1.0f / 6), v_set1(0.5f));
    V_UNROLL
    for (int v = 0; v < count; v++)
        p[v] = v_fma(p[v], r[v], v_set1(-1.0f));
    V_UNROLL
    for (int v = 0; v < count; v++)
        p[v] = v_fma(p[v], r[v], v_set1(1.0f));
    V_UNROLL
    for (int v = 0; v < count; v++) {
        d[v] = v_fma(n[v], p[v], v_set1(1.0f));
        e[v] = v_mul(n[v], p[v]);
    }
}
#else
V_INLINE void v_logistic_divisors(const vf *z, vf *e, vf *d, int count)
{
    for (int v = 0; v < count; v++)
        d[v] = v_logistic_divisor(z[v], &e[v]);
}
#endif

/* v_silu_slope and v_silu_as of `count` vectors in place; `count` is a constant up to 4. The vectors are interleaved:
 * one vector's dependency chain of 70 cycles fills the scheduler before the next vector's instructions enter it. */
V_INLINE void v_silu_slopes(vf *z, int count)
{
    vf e[4], d[4];
    V_UNROLL
    for (int v = 0; v < count; v++)
        z[v] = v_clamp_high(v_clamp_low(z[v]));
    v_logistic_divisors(z, e, d, count);
    V_UNROLL
    for (int v = 0; v < count; v++)
        d[v] = v_div(v_set1(1), d[v]);
    V_UNROLL
    for (int v = 0; v < count; v++)
        z[v] = v_mul(z[v], v_mul(e[v], d[v]));
    V_UNROLL
    for (int v = 0; v < count; v++)
        z[v] = v_fma(d[v], z[v], d[v]);
}

V_INLINE void v_silus_as(cot_dtype dtype, vf *z, int count)
{
#if defined(COT_SIMD_AVX2)
    vf e[4], d[4];
    V_UNROLL
    for (int v = 0; v < count; v++) {
        z[v] = v_clamp_low(z[v]);
        e[v] = v_clamp_high(z[v]);
    }
    v_logistic_divisors(e, e, d, count);
    V_UNROLL
    for (int v = 0; v < count; v++)
        z[v] = v_div(z[v], d[v]);
    (void)dtype;
#else
    for (int v = 0; v < count; v++)
        z[v] = v_silu_as(dtype, z[v]);
#endif
}

#endif
