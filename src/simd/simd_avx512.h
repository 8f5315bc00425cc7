/* SPDX-License-Identifier: Apache-2.0
 * simd_avx512.h: the operations of simd.h on AVX-512 (f, bw, dq, vl), with the bf16 extension where the compiler's
 * flags allow it. */
#ifndef COT_SIMD_SIMD_AVX512_H
#define COT_SIMD_SIMD_AVX512_H

#include <immintrin.h>

enum { VW = 16 };
typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;

/* ---- arithmetic --------------------------------------------------------------------------------------------- */

V_INLINE vf v_zero(void)
{
    return _mm512_setzero_ps();
}

V_INLINE vf v_set1(float a)
{
    return _mm512_set1_ps(a);
}

V_INLINE vf v_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}

V_INLINE vf v_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}

V_INLINE vf v_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}

/* On Sapphire Rapids (2023), a division among other instructions costs less than a reciprocal estimate with one Newton
 * step: 13.9 cycles against 14.6 for a convolution of 4 taps with SiLU. The division also rounds correctly. */
V_INLINE vf v_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}

V_INLINE vf v_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

V_INLINE vf v_fms(vf a, vf b, vf c)
{
    return _mm512_fmsub_ps(a, b, c);
}

V_INLINE vf v_fnma(vf a, vf b, vf c)
{
    return _mm512_fnmadd_ps(a, b, c);
}

/* The instruction returns its second operand when one is NaN. */
V_INLINE vf v_max(vf limit, vf a)
{
    return _mm512_max_ps(limit, a);
}

V_INLINE vf v_min(vf limit, vf a)
{
    return _mm512_min_ps(limit, a);
}

V_INLINE vf v_in_register(vf a)
{
    return a;
}

V_INLINE float v_sum(vf a)
{
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

V_INLINE vf v_sums4(vf a, vf b, vf c, vf d)
{
    const vf ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const vf cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}

#define v_align(a, b, k) _mm512_castsi512_ps(_mm512_alignr_epi32(_mm512_castps_si512(b), _mm512_castps_si512(a), (k)))

/* ---- integers and masks ------------------------------------------------------------------------------------- */

V_INLINE vi vi_load(const int32_t *p)
{
    return _mm512_loadu_si512(p);
}

V_INLINE vi vi_set1(int32_t a)
{
    return _mm512_set1_epi32(a);
}

V_INLINE vm vm_equal(vi a, vi b)
{
    return _mm512_cmpeq_epi32_mask(a, b);
}

V_INLINE vm vm_not_negative(vi a)
{
    return _mm512_cmpge_epi32_mask(a, _mm512_setzero_si512());
}

V_INLINE vm vm_first(int n)
{
    return (__mmask16)((1u << n) - 1);
}

V_INLINE vm vm_and(vm a, vm b)
{
    return (__mmask16)(a & b);
}

V_INLINE vf v_maskz(vm m, vf a)
{
    return _mm512_maskz_mov_ps(m, a);
}

/* ---- memory, f32 -------------------------------------------------------------------------------------------- */

V_INLINE vf v_load(const void *p)
{
    return _mm512_loadu_ps(p);
}

V_INLINE vf v_repeat4(const float *p)
{
    return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
}

V_INLINE vf v_load_n(const void *p, int n)
{
    return _mm512_maskz_loadu_ps(vm_first(n), p);
}

V_INLINE void v_store(void *p, vf a)
{
    _mm512_storeu_ps(p, a);
}

V_INLINE void v_store_n(void *p, vf a, int n)
{
    _mm512_mask_storeu_ps(p, vm_first(n), a);
}

V_INLINE void v_stream(void *p, vf a)
{
    _mm512_stream_ps(p, a);
}

V_INLINE void v_fence(void)
{
    _mm_sfence();
}

V_INLINE void v_prefetch(const void *p)
{
    _mm_prefetch((const char *)p, _MM_HINT_T0);
}

V_INLINE void v_prefetch_l2(const void *p)
{
    _mm_prefetch((const char *)p, _MM_HINT_T1);
}

V_INLINE vf v_gather(const float *p, int64_t stride, int n)
{
    const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i low = _mm512_mullo_epi64(lane, _mm512_set1_epi64(stride));
    const __m512i high = _mm512_add_epi64(low, _mm512_set1_epi64(8 * stride));
    const vm m = vm_first(n);
    const __m256 zero = _mm256_setzero_ps();
    const __m256 a = _mm512_mask_i64gather_ps(zero, (__mmask8)m, low, p, 4);
    const __m256 b = _mm512_mask_i64gather_ps(zero, (__mmask8)(m >> 8), high, p, 4);
    return _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1);
}

/* ---- memory, 2-byte floats ---------------------------------------------------------------------------------- */

/* 16-bit word i becomes the upper word of lane i: one permutation both widens and shifts. */
V_INLINE vf v_widen_bf16(__m256i half)
{
    const __m512i index =
        _mm512_setr_epi32(0 << 16, 1 << 16, 2 << 16, 3 << 16, 4 << 16, 5 << 16, 6 << 16, 7 << 16, 8 << 16, 9 << 16,
                          10 << 16, 11 << 16, 12 << 16, 13 << 16, 14 << 16, 15 << 16);
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, index, _mm512_castsi256_si512(half)));
}

/* Rounds to bf16 with integer instructions. */
V_INLINE __m256i v_round_bf16(vf a)
{
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000)); /* keeps NaN, as a quiet NaN */
    const __m512i index = _mm512_setr_epi32(0x00030001, 0x00070005, 0x000b0009, 0x000f000d, 0x00130011, 0x00170015,
                                            0x001b0019, 0x001f001d, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castsi512_si256(_mm512_permutexvar_epi16(index, rounded));
}

#if defined(__AVX512BF16__)
/* The conversion instruction flushes subnormals. Vectors with a subnormal lane therefore use the integer version.
 * Costs on ports 0 and 5 of Sapphire Rapids (2023): 3 slots to convert one vector, 4 for two; the integer version takes
 * 8 slots for one vector. Zeros do not count as subnormals: under a dropout mask nearly every vector has one. */
V_INLINE bool v_any_subnormal(vf a, vf b)
{
    enum { SUBNORMAL = 0x20 };
    const __mmask16 any = _mm512_fpclass_ps_mask(a, SUBNORMAL), other = _mm512_fpclass_ps_mask(b, SUBNORMAL);
    return __builtin_expect(!_mm512_kortestz(any, other), 0);
}

V_INLINE __m256i v_narrow_bf16(vf a)
{
    return v_any_subnormal(a, a) ? v_round_bf16(a) : (__m256i)_mm512_cvtneps_pbh(a);
}

V_INLINE __m512i v_narrow2_bf16(vf a, vf b)
{
    if (v_any_subnormal(a, b))
        return _mm512_inserti64x4(_mm512_castsi256_si512(v_round_bf16(a)), v_round_bf16(b), 1);
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
}
#else
V_INLINE __m256i v_narrow_bf16(vf a)
{
    return v_round_bf16(a);
}

V_INLINE __m512i v_narrow2_bf16(vf a, vf b)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(v_round_bf16(a)), v_round_bf16(b), 1);
}
#endif

V_INLINE __m256i v_narrow_f16(vf a)
{
    return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

V_INLINE vf v_load_bf16(const void *p)
{
    return v_widen_bf16(_mm256_loadu_si256(p));
}

V_INLINE vf v_load_n_bf16(const void *p, int n)
{
    return v_widen_bf16(_mm256_maskz_loadu_epi16(vm_first(n), p));
}

V_INLINE vf v_load_f16(const void *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
}

V_INLINE vf v_load_n_f16(const void *p, int n)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(vm_first(n), p));
}

V_INLINE void v_store_bf16(void *p, vf a)
{
    _mm256_storeu_si256(p, v_narrow_bf16(a));
}

V_INLINE void v_store_n_bf16(void *p, vf a, int n)
{
    _mm256_mask_storeu_epi16(p, vm_first(n), v_narrow_bf16(a));
}

V_INLINE void v_stream_bf16(void *p, vf a)
{
    _mm256_stream_si256(p, v_narrow_bf16(a));
}

V_INLINE void v_store2_bf16(void *p, vf a, vf b)
{
    _mm512_storeu_si512(p, v_narrow2_bf16(a, b));
}

V_INLINE void v_stream2_bf16(void *p, vf a, vf b)
{
    _mm512_stream_si512(p, v_narrow2_bf16(a, b));
}

V_INLINE void v_store_f16(void *p, vf a)
{
    _mm256_storeu_si256(p, v_narrow_f16(a));
}

V_INLINE void v_store_n_f16(void *p, vf a, int n)
{
    _mm256_mask_storeu_epi16(p, vm_first(n), v_narrow_f16(a));
}

V_INLINE void v_stream_f16(void *p, vf a)
{
    _mm256_stream_si256(p, v_narrow_f16(a));
}

/* ---- exp and logistic --------------------------------------------------------------------------------------- *
 * exp(x) = 2^n * 2^(j/16) * exp(r). Adding V_SIXTEENTHS rounds x*log2(e) to a multiple of 1/16. The low four bits of
 * the sum hold j. |r| <= ln(2)/32, so that a polynomial of degree 3 has an error of 0.2 ulp. */

#define V_LOG2E 0x1.715476p+0f
#define V_LN2_HIGH 0x1.62e430p-1f
#define V_LN2_LOW (-0x1.05c610p-29f)
#define V_SIXTEENTHS 0x1.8p+19f

V_INLINE vf v_exp(vf x)
{
    const __m512 table =
        _mm512_setr_ps(1.0f, 0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f, 0x1.306fe0p+0f, 0x1.3dea64p+0f,
                       0x1.4bfdaep+0f, 0x1.5ab07ep+0f, 0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f,
                       0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f);
    x = v_min(v_set1(89.0f), v_max(v_set1(-104.5f), x)); /* outside these limits exp is inf or 0 in f32 */
    const vf t = v_fma(x, v_set1(V_LOG2E), v_set1(V_SIXTEENTHS));
    const vf n = v_sub(t, v_set1(V_SIXTEENTHS)); /* a multiple of 1/16: scalef uses its floor */
    vf r = v_fnma(n, v_set1(V_LN2_HIGH), x);
    r = v_fnma(n, v_set1(V_LN2_LOW), r);
    vf p = v_fma(r, v_set1(1.0f / 6), v_set1(0.5f));
    p = v_mul(v_fma(p, r, v_set1(1.0f)), r);
    const vf power = _mm512_permutexvar_ps(_mm512_castps_si512(t), table);
    return _mm512_scalef_ps(v_fma(power, p, power), n);
}

/* Flushes subnormal results to 0: on processors of 2023 each subnormal result costs 100 cycles or more.
 * exp(x) = 2^n exp(r) with an integer n, and exp(r) = 1 + r + r^2 q(r) with |r| <= ln(2)/2. It uses no table: all
 * arguments near a table entry share the entry's rounding error, and this bias shows in long sums of products. */
#define V_INTEGERS 0x1.8p+23f

V_INLINE vf v_exp_flush(vf x)
{
    const vm normal = _mm512_cmp_ps_mask(x, v_set1(V_EXP_MIN), _CMP_NLT_UQ);
    const vf n = v_sub(v_fma(x, v_set1(V_LOG2E), v_set1(V_INTEGERS)), v_set1(V_INTEGERS));
    vf r = v_fnma(n, v_set1(V_LN2_HIGH), x);
    r = v_fnma(n, v_set1(V_LN2_LOW), r);
    vf q = v_fma(r, v_set1(0x1.6d4926p-10f), v_set1(0x1.121072p-7f));
    q = v_fma(q, r, v_set1(0x1.5554e4p-5f));
    q = v_fma(q, r, v_set1(0x1.5554d8p-3f));
    q = v_fma(q, r, v_set1(0.5f));
    q = v_fma(v_mul(r, r), q, r);
    return _mm512_maskz_scalef_ps(normal, v_add(q, v_set1(1.0f)), n);
}

/* A constant that stays in a register. Without the barrier gcc loads it again for every tile product. */
V_INLINE vf v_set1_register(float x)
{
    vf v = v_set1(x);
    __asm__("" : "+v"(v));
    return v;
}

/* 2^x, with subnormal results flushed to 0. The relative error is at most 6.2e-7; the result is exact at x = 0.
 * It is for kernels that overlap it with AMX tile products. On a processor of 2023, one of the two vector ports then
 * takes multiplications, minima and scalef, the other one takes table permutations, and both take additions.
 * The function therefore has only four operations for the first port. It computes 2^r from a square,
 * 2^r = c ((r + h)^2 + k) with |r| <= 1/32. The table contains c. */
V_INLINE vf v_exp2_flush(vf x)
{
    const __m512 table =
        _mm512_setr_ps(0x1.ebf83p-3f, 0x1.00e01cp-2f, 0x1.0c3f8ep-2f, 0x1.181fe8p-2f, 0x1.2486dcp-2f, 0x1.317a64p-2f,
                       0x1.3f00b4p-2f, 0x1.4d204ep-2f, 0x1.5bdffep-2f, 0x1.6b46d6p-2f, 0x1.7b5c3ep-2f, 0x1.8c27f2p-2f,
                       0x1.9db204p-2f, 0x1.b002ep-2f, 0x1.c32354p-2f, 0x1.d71c92p-2f);
    const vf sixteenths = v_set1_register(V_SIXTEENTHS);
    const vm normal = _mm512_cmp_ps_mask(x, v_set1_register(-126.0f), _CMP_NLT_UQ);
    const vf t = v_add(x, sixteenths), n = v_sub(t, sixteenths); /* scalef uses the floor of n */
    const vf u = v_add(v_sub(x, n), v_set1_register(0x1.715cc8p+0f));
    const vf power = _mm512_permutexvar_ps(_mm512_castps_si512(t), table);
    return _mm512_maskz_scalef_ps(normal, v_mul(v_fma(u, u, v_set1_register(0x1.0a624ap+1f)), power), n);
}

/* 2^(t - V_SIXTEENTHS), where the result is a normal number. */
V_INLINE vf v_power_of_sixteenths(vf t)
{
    /* The bits of 2^(j/16) minus j << 19: the shifted t adds j << 19 again. */
    const __m512i table = _mm512_setr_epi32(0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532,
                                            0x3f75fed7, 0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
                                            0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d);
    const __m512i bits = _mm512_castps_si512(t);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_permutexvar_epi32(bits, table), _mm512_slli_epi32(bits, 19)));
}

/* 1 + exp(-z), *e = exp(-z) */
V_INLINE vf v_logistic_divisor(vf z, vf *e)
{
    const vf t = v_fma(z, v_set1(-V_LOG2E), v_set1(V_SIXTEENTHS));
    const vf n = v_sub(t, v_set1(V_SIXTEENTHS));
    const vf r = v_fma(n, v_set1(V_LN2_HIGH), z); /* -(remainder of -z); leaving out V_LN2_LOW costs 2^-29 z */
    vf p = v_fma(r, v_set1(-1.0f / 6), v_set1(0.5f));
    p = v_fma(p, r, v_set1(-1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    const vf power = v_power_of_sixteenths(t);
    *e = v_mul(power, p);
    return v_fma(power, p, v_set1(1.0f));
}

/* silu(z) for z >= -V_LOGISTIC_LIMIT, with a relative error of 2^-16.3. The polynomial of degree 4 has an error of
 * 2^-18.5. Rounded to bf16, the result is a value that the error rule allows. The rule is tightest just above a power
 * of two, where it allows an error of 2^-16 beyond a tie.
 * It takes 9 instructions and a division. v_silu takes 13 and a division. */
V_INLINE vf v_silu_for_bf16(vf z)
{
    const vf u = v_mul(z, v_set1(-V_LOG2E));
    const vf f = _mm512_reduce_ps(u, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* u - floor(u) */
    vf p = v_fma(f, v_set1(0x1.bb7cd4p-7f), v_set1(0x1.aa13f0p-5f));
    p = v_fma(p, f, v_set1(0x1.ee798ap-3f));
    p = v_fma(p, f, v_set1(0x1.62d166p-1f));
    p = v_fma(p, f, v_set1(0x1.00002cp+0f));
    return v_div(z, v_add(_mm512_scalef_ps(p, u), v_set1(1)));
}

/* ---- signs, bits, Philox ------------------------------------------------------------------------------------ */

V_INLINE vf v_abs(vf a)
{
    return _mm512_abs_ps(a);
}

V_INLINE vf v_select(vm m, vf a, vf b)
{
    return _mm512_mask_blend_ps(m, b, a);
}

V_INLINE vm vm_negative(vf a)
{
    return _mm512_movepi32_mask(_mm512_castps_si512(a));
}

V_INLINE vm vm_above(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ);
}

V_INLINE vm vm_bits(const uint8_t *bits, int64_t first)
{
    uint16_t m;
    memcpy(&m, bits + first / 8, sizeof m);
    return m;
}

/* The vectors are interleaved: the rounds of one vector are a dependency chain of 70 cycles, longer than the window of
 * the processor's scheduler. With 4 vectors the ports are the limit: a whole dropout on cached data takes 10 % less
 * time. */
enum { V_PHILOX_VECTORS = 4, V_PHILOX_GROUPS = 8 * V_PHILOX_VECTORS };

/* Each 64-bit lane holds one group. Vectors a, b, c, d hold the group's four words in the lower halves of their lanes.
 * A 32 x 32 -> 64 bit product gives both new words at once. The upper halves of the lanes are never read.
 * The last round puts two words of a group into the two halves of one lane, so that four keep bits of a group are
 * neighbours in a compare mask. */
V_INLINE void v_philox_keep(uint8_t *bits, const v_philox *p, uint64_t i)
{
    if (v_philox_keep_if_carry(bits, p, i, V_PHILOX_GROUPS))
        return;
    const v_philox_common common = v_philox_first_rounds(p, i);
    enum { LAST = COT_PHILOX_ROUNDS - 1 };
    enum { HIGH = 0xf5, SWAPPED = 0xb1 }; /* shuffles: both halves = the upper half of the lane; halves swapped */
    enum { XOR = 0x96 };                  /* ternary logic: the xor of all three operands */
    const __m512i m0 = _mm512_set1_epi64(COT_PHILOX_M0), m1 = _mm512_set1_epi64(COT_PHILOX_M1);
    const __m512i threshold = _mm512_set1_epi16((int16_t)p->threshold);
    const __m512i first = _mm512_set1_epi64((int64_t)common.first);
    const __m512i second_a = _mm512_set1_epi64((int64_t)common.second_a);
    const __m512i second_c = _mm512_set1_epi64((int64_t)common.second_c);
    const __m512i group = _mm512_add_epi64(_mm512_set1_epi64((int64_t)i), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    __m512i a[V_PHILOX_VECTORS], b[V_PHILOX_VECTORS], c[V_PHILOX_VECTORS], d[V_PHILOX_VECTORS];
    V_UNROLL
    for (int s = 0; s < V_PHILOX_VECTORS; s++) {
        const __m512i p1 = _mm512_mul_epu32(_mm512_add_epi64(group, _mm512_set1_epi64(8 * s)), m1);
        const __m512i p0 = _mm512_mul_epu32(_mm512_xor_si512(_mm512_shuffle_epi32(p1, (_MM_PERM_ENUM)HIGH), first), m0);
        a[s] = _mm512_xor_si512(p1, second_a);
        b[s] = _mm512_set1_epi64((int64_t)common.product);
        c[s] = _mm512_xor_si512(_mm512_shuffle_epi32(p0, (_MM_PERM_ENUM)HIGH), second_c);
        d[s] = p0;
    }
    V_UNROLL
    for (int round = 2; round < LAST; round++) {
        const __m512i k0 = _mm512_set1_epi64((int64_t)p->key[round][0]);
        const __m512i k1 = _mm512_set1_epi64((int64_t)p->key[round][1]);
        V_UNROLL
        for (int s = 0; s < V_PHILOX_VECTORS; s++) {
            const __m512i p0 = _mm512_mul_epu32(a[s], m0), p1 = _mm512_mul_epu32(c[s], m1);
            a[s] = _mm512_ternarylogic_epi64(_mm512_shuffle_epi32(p1, (_MM_PERM_ENUM)HIGH), b[s], k0, XOR);
            c[s] = _mm512_ternarylogic_epi64(_mm512_shuffle_epi32(p0, (_MM_PERM_ENUM)HIGH), d[s], k1, XOR);
            b[s] = p1;
            d[s] = p0;
        }
    }
    const __m512i k0 = _mm512_set1_epi64((int64_t)p->key[LAST][0]), k1 = _mm512_set1_epi64((int64_t)p->key[LAST][1]);
    V_UNROLL
    for (int s = 0; s < V_PHILOX_VECTORS; s++) {
        const __m512i p0 = _mm512_shuffle_epi32(_mm512_mul_epu32(a[s], m0), (_MM_PERM_ENUM)SWAPPED);
        const __m512i p1 = _mm512_shuffle_epi32(_mm512_mul_epu32(c[s], m1), (_MM_PERM_ENUM)SWAPPED);
        const __m512i ab = _mm512_mask_ternarylogic_epi32(p1, 0x5555, b[s], k0, XOR);
        const __m512i cd = _mm512_mask_ternarylogic_epi32(p0, 0x5555, d[s], k1, XOR);
        const uint64_t keep = _pdep_u64(_mm512_cmpge_epu16_mask(ab, threshold), 0x0f0f0f0f0f0f0f0f) |
                              _pdep_u64(_mm512_cmpge_epu16_mask(cd, threshold), 0xf0f0f0f0f0f0f0f0);
        memcpy(bits + 8 * s, &keep, sizeof keep);
    }
}

#endif
