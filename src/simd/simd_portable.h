/* SPDX-License-Identifier: Apache-2.0
 * simd_portable.h: the operations of simd.h in plain C, for any processor. A vector is a GNU C vector of 4 lanes. The
 * compiler maps it to the processor's vectors (SSE2, NEON) or to single floats. */
#ifndef COT_SIMD_SIMD_PORTABLE_H
#define COT_SIMD_SIMD_PORTABLE_H

enum { VW = 4 };
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef vi vm; /* each lane is all ones or all zeros */

/* ---- arithmetic --------------------------------------------------------------------------------------------- */

V_INLINE vf v_zero(void)
{
    return (vf){0, 0, 0, 0};
}

V_INLINE vf v_set1(float a)
{
    return (vf){a, a, a, a};
}

V_INLINE vf v_add(vf a, vf b)
{
    return a + b;
}

V_INLINE vf v_sub(vf a, vf b)
{
    return a - b;
}

V_INLINE vf v_mul(vf a, vf b)
{
    return a * b;
}

V_INLINE vf v_div(vf a, vf b)
{
    return a / b;
}

V_INLINE vf v_fma(vf a, vf b, vf c)
{
    return a * b + c; /* fused only where the processor has the instruction: elsewhere fmaf would be a library call */
}

V_INLINE vf v_fms(vf a, vf b, vf c)
{
    return a * b - c;
}

V_INLINE vf v_fnma(vf a, vf b, vf c)
{
    return c - a * b;
}

V_INLINE vf v_select(vm m, vf a, vf b)
{
    return (vf)((m & (vi)a) | (~m & (vi)b));
}

V_INLINE vf v_max(vf limit, vf a)
{
    return v_select((vm)(limit > a), limit, a);
}

V_INLINE vf v_min(vf limit, vf a)
{
    return v_select((vm)(limit < a), limit, a);
}

V_INLINE vf v_in_register(vf a)
{
    return a;
}

V_INLINE float v_sum(vf a)
{
    return (a[0] + a[2]) + (a[1] + a[3]);
}

V_INLINE vf v_sums4(vf a, vf b, vf c, vf d)
{
    return (vf){v_sum(a), v_sum(b), v_sum(c), v_sum(d)};
}

V_INLINE vf v_align(vf a, vf b, int k)
{
    vf c;
    for (int i = 0; i < VW; i++)
        c[i] = i + k < VW ? a[i + k] : b[i + k - VW];
    return c;
}

/* ---- integers and masks ------------------------------------------------------------------------------------- */

V_INLINE vi vi_load(const int32_t *p)
{
    vi a;
    memcpy(&a, p, sizeof a);
    return a;
}

V_INLINE vi vi_set1(int32_t a)
{
    return (vi){a, a, a, a};
}

V_INLINE vm vm_equal(vi a, vi b)
{
    return (vm)(a == b);
}

V_INLINE vm vm_not_negative(vi a)
{
    return (vm)(a >= 0);
}

V_INLINE vm vm_first(int n)
{
    return (vm)((vi){0, 1, 2, 3} < vi_set1(n));
}

V_INLINE vm vm_and(vm a, vm b)
{
    return a & b;
}

V_INLINE vf v_maskz(vm m, vf a)
{
    return (vf)(m & (vi)a);
}

/* ---- memory ------------------------------------------------------------------------------------------------- */

V_INLINE vf v_load(const void *p)
{
    vf a;
    memcpy(&a, p, sizeof a);
    return a;
}

V_INLINE void v_store(void *p, vf a)
{
    memcpy(p, &a, sizeof a);
}

V_INLINE void v_stream(void *p, vf a)
{
    v_store(p, a);
}

V_INLINE void v_fence(void)
{
}

V_INLINE void v_prefetch(const void *p)
{
    __builtin_prefetch(p);
}

V_INLINE void v_prefetch_l2(const void *p)
{
    __builtin_prefetch(p, 0, 2);
}

V_INLINE vf v_gather(const float *p, int64_t stride, int n)
{
    vf a;
    for (int i = 0; i < VW; i++)
        a[i] = i < n ? p[i * stride] : 0;
    return a;
}

V_INLINE vf v_repeat4(const float *p)
{
    return (vf){p[0], p[1], p[2], p[3]};
}

V_INLINE vf v_load_n(const void *p, int n)
{
    return v_gather(p, 1, n);
}

V_INLINE void v_store_n(void *p, vf a, int n)
{
    for (int i = 0; i < n; i++)
        ((float *)p)[i] = a[i];
}

V_INLINE vf v_load_n_bf16(const void *p, int n)
{
    vf a;
    for (int i = 0; i < VW; i++)
        a[i] = i < n ? cot_bf16_to_f32(((const uint16_t *)p)[i]) : 0;
    return a;
}

V_INLINE vf v_load_n_f16(const void *p, int n)
{
    vf a;
    for (int i = 0; i < VW; i++)
        a[i] = i < n ? cot_f16_to_f32(((const uint16_t *)p)[i]) : 0;
    return a;
}

V_INLINE void v_store_n_bf16(void *p, vf a, int n)
{
    for (int i = 0; i < n; i++)
        ((uint16_t *)p)[i] = cot_f32_to_bf16(a[i]);
}

V_INLINE void v_store_n_f16(void *p, vf a, int n)
{
    for (int i = 0; i < n; i++)
        ((uint16_t *)p)[i] = cot_f32_to_f16(a[i]);
}

V_INLINE vf v_load_bf16(const void *p)
{
    return v_load_n_bf16(p, VW);
}

V_INLINE vf v_load_f16(const void *p)
{
    return v_load_n_f16(p, VW);
}

V_INLINE void v_store_bf16(void *p, vf a)
{
    v_store_n_bf16(p, a, VW);
}

V_INLINE void v_store_f16(void *p, vf a)
{
    v_store_n_f16(p, a, VW);
}

V_INLINE void v_stream_bf16(void *p, vf a)
{
    v_store_n_bf16(p, a, VW);
}

V_INLINE void v_store2_bf16(void *p, vf a, vf b)
{
    v_store_bf16(p, a);
    v_store_bf16((char *)p + 2 * VW, b);
}

V_INLINE void v_stream2_bf16(void *p, vf a, vf b)
{
    v_stream_bf16(p, a);
    v_stream_bf16((char *)p + 2 * VW, b);
}

V_INLINE void v_stream_f16(void *p, vf a)
{
    v_store_n_f16(p, a, VW);
}

/* ---- exp and logistic --------------------------------------------------------------------------------------- *
 * exp(x) = 2^n * exp(r). Adding V_INTEGERS rounds x*log2(e) to an integer n. The low bits of the sum hold n. */

#define V_LOG2E 0x1.715476p+0f
#define V_LN2_HIGH 0x1.62e400p-1f /* short enough that n * V_LN2_HIGH is exact without a fused operation */
#define V_LN2_LOW 0x1.7f7d1cp-20f
#define V_INTEGERS 0x1.8p+23f

/* exp(r) for |r| <= ln(2)/2 */
V_INLINE vf v_exp_remainder(vf r)
{
    vf p = v_fma(r, v_set1(1.0f / 5040), v_set1(1.0f / 720));
    p = v_fma(p, r, v_set1(1.0f / 120));
    p = v_fma(p, r, v_set1(1.0f / 24));
    p = v_fma(p, r, v_set1(1.0f / 6));
    p = v_fma(p, r, v_set1(0.5f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_fma(p, r, v_set1(1.0f));
}

V_INLINE vf v_power_of_two(vi exponent)
{
    return (vf)((exponent + 127) << 23);
}

V_INLINE vf v_exp(vf x)
{
    x = v_min(v_set1(89.0f), v_max(v_set1(-104.5f), x)); /* outside these limits exp is inf or 0 in f32 */
    const vf t = v_fma(x, v_set1(V_LOG2E), v_set1(V_INTEGERS));
    const vf n = v_sub(t, v_set1(V_INTEGERS));
    const vf r = v_fnma(n, v_set1(V_LN2_LOW), v_fnma(n, v_set1(V_LN2_HIGH), x));
    /* Two factors: 2^128 and powers below 2^-126 are not normal floats. */
    const vi whole = (vi)t - (vi)v_set1(V_INTEGERS), half = whole >> 1;
    return v_mul(v_mul(v_exp_remainder(r), v_power_of_two(whole - half)), v_power_of_two(half));
}

V_INLINE vf v_exp_flush(vf x)
{
    return v_maskz((vm) ~(x < v_set1(V_EXP_MIN)), v_exp(v_max(v_set1(V_EXP_MIN), x)));
}

/* 1 + exp(-z), *e = exp(-z) */
V_INLINE vf v_logistic_divisor(vf z, vf *e)
{
    const vf t = v_fma(z, v_set1(-V_LOG2E), v_set1(V_INTEGERS));
    const vf n = v_sub(t, v_set1(V_INTEGERS));
    const vf r = v_fma(n, v_set1(V_LN2_LOW), v_fma(n, v_set1(V_LN2_HIGH), z));
    const vf power = v_power_of_two((vi)t - (vi)v_set1(V_INTEGERS));
    const vf p = v_exp_remainder(v_sub(v_zero(), r));
    *e = v_mul(power, p);
    return v_fma(power, p, v_set1(1.0f));
}

/* ---- signs, bits, Philox ------------------------------------------------------------------------------------ */

V_INLINE vf v_abs(vf a)
{
    return (vf)((vi)a & 0x7fffffff);
}

V_INLINE vm vm_negative(vf a)
{
    return (vm)((vi)a < 0);
}

V_INLINE vm vm_above(vf a, vf b)
{
    return ~(vm)(a <= b);
}

V_INLINE vm vm_bits(const uint8_t *bits, int64_t first)
{
    const int32_t four = bits[first / 8] >> (first % 8);
    return (vm)((vi_set1(four) & (vi){1, 2, 4, 8}) != 0);
}

enum { V_PHILOX_GROUPS = 1 };

V_INLINE void v_philox_keep(uint8_t *bits, const v_philox *p, uint64_t i)
{
    uint32_t a = (uint32_t)p->offset[0], b = (uint32_t)p->offset[1], c = (uint32_t)i, d = (uint32_t)(i >> 32);
    for (int round = 0; round < COT_PHILOX_ROUNDS; round++) {
        const uint64_t p0 = (uint64_t)a * COT_PHILOX_M0, p1 = (uint64_t)c * COT_PHILOX_M1;
        a = (uint32_t)(p1 >> 32) ^ b ^ (uint32_t)p->key[round][0];
        b = (uint32_t)p1;
        c = (uint32_t)(p0 >> 32) ^ d ^ (uint32_t)p->key[round][1];
        d = (uint32_t)p0;
    }
    const uint32_t words[4] = {a, b, c, d};
    uint32_t keep = 0;
    V_UNROLL
    for (int k = 0; k < 4; k++)
        keep |= (uint32_t)((words[k] & 0xffff) >= p->threshold) << (2 * k) | (uint32_t)(words[k] >> 16 >= p->threshold)
                                                                                 << (2 * k + 1);
    *bits = (uint8_t)keep;
}

#endif
