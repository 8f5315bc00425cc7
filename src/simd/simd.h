/* SPDX-License-Identifier: Apache-2.0
 *
 * simd.h: portable vector operations for CPU kernels.
 *
 * A kernel is written once and compiled once per instruction set: -DCOT_SIMD_PORTABLE, -DCOT_SIMD_AVX2 (avx2, fma, f16c)
 * or -DCOT_SIMD_AVX512 (also f, bw, dq, vl). The AVX-512 variant is compiled a second time with -mavx512bf16.
 *
 * Types: vf = VW lanes of f32, vi = VW lanes of i32, vm = a mask of VW lanes.
 * Memory accesses need element alignment only. The stream operations need more, see below.
 * `n` is a number of lanes in [0, VW]. Lanes from n on are neither read nor written. A load sets them to 0.
 *
 *   v_zero v_set1 v_add v_sub v_mul v_div v_fma(a,b,c) = a*b+c   v_fms = a*b-c   v_fnma = c-a*b
 *   v_max(limit, a) v_min(limit, a)     maximum, minimum; the result is NaN where a is NaN
 *   v_load v_load_n v_store v_store_n   f32 elements. With the suffix _bf16 or _f16: VW elements of 2 bytes, rounded to
 *                                       nearest even, subnormals kept, as in core/float16.h
 *   v_store2_bf16(p, a, b)              stores a at p and b directly after it
 *   v_stream v_stream_bf16 v_stream_f16 v_stream2_bf16
 *                                       non-temporal stores. The address is a multiple of the number of bytes stored.
 *                                       The thread calls v_fence after its last one
 *   v_prefetch v_prefetch_l2            prefetch one line into the L1 cache; into the L2 cache. Any address is allowed
 *   v_prefetch_write                    prefetch one line into the L1 cache for writing
 *   v_prefetch_range(p, bytes)          v_prefetch_l2 of all lines of [p, p + bytes)
 *   v_prefetch_page(p, bytes)           v_prefetch_l2(p) if p lies in the first `bytes` bytes of a 4 KB page. Called
 *                                       for each piece of `bytes` of an output, it prefetches one line of each page.
 *                                       This loads the page's address translation before the non-temporal stores. A
 *                                       non-temporal store that waits for a translation blocks all later stores. Under
 *                                       a hypervisor it waits for two page tables. (Zen 4, pages of 4 KB, bf16 dropout
 *                                       backward: this waiting was 40 % of the time)
 *   v_align(a, b, k)                    lanes k .. k+VW-1 of the 2 VW lanes of a followed by b; k < VW is a constant
 *   v_gather(p, stride, n)              p[0], p[stride], ..., p[(n-1) stride] of f32
 *   v_in_register(a)                    a. On AVX2 the compiler keeps it in a register, and does not load it again as an
 *                                       operand of each instruction that uses it
 *   v_repeat4(p)                        p[0], p[1], p[2], p[3] of f32, repeated through all lanes
 *   v_sum                               sum of all lanes, in a fixed order
 *   v_sums4(a, b, c, d)                 lane 4i+k is the sum of lanes 4i .. 4i+3 of argument k, in v_sum's order
 *   vi_load vi_set1;  vm_equal vm_not_negative (of vi) vm_first(n) vm_and;  v_maskz(m, a) = a where m, else +0
 *   v_exp_flush                         exp of arguments up to 88; results below 2^-126 become 0
 *   v_exp2_flush                        2^x; results below 2^-126 become 0. AVX-512 only
 *   v_exp v_sigmoid v_silu v_silu_slope (the derivative);  v_gelu_tanh, v_gelu_erf and their slopes are in gelu.h
 *   v_silu_as(dtype, z)                 accurate enough for a result that is rounded to dtype
 *   v_abs v_select(m,a,b);  vm_negative(a) tests the sign bit;  vm_above(a,b) = !(a <= b)
 *   vm_bits(bits, i)                    bits i .. i+VW-1 of an array of bytes, least significant bit of a byte first;
 *                                       i is a multiple of VW
 *   v_philox_keep(bits, p, i)           keep bits of the dropout groups i .. i+V_PHILOX_GROUPS-1, one byte a group, the
 *                                       same bits as core/philox.h
 */
#ifndef COT_SIMD_SIMD_H
#define COT_SIMD_SIMD_H

#include "core/float16.h"
#include "core/philox.h"

#include <stdbool.h>

/* Unrolls a loop with a constant number of steps. Clang does so without a pragma, and warns about a pragma that it
 * cannot apply. */
#if defined(__clang__)
#define V_UNROLL
#else
#define V_UNROLL _Pragma("GCC unroll 16")
#endif
#define V_INLINE static inline __attribute__((always_inline, unused))

/* Slightly above log(2^-126). */
#define V_EXP_MIN (-87.33f)

/* Parameters of v_philox_keep, from a seed, an offset and a threshold in 1 .. 65535: the key of every round and the
 * first two words of the counter. Each word takes 64 bits, ready to be broadcast to 64-bit lanes. */
typedef struct v_philox {
    uint64_t key[COT_PHILOX_ROUNDS][2], offset[2];
    uint32_t threshold;
} v_philox;

V_INLINE v_philox v_philox_make(uint64_t seed, uint64_t offset, uint32_t threshold)
{
    v_philox p = {.offset = {offset & UINT32_MAX, offset >> 32}, .threshold = threshold};
    for (uint32_t round = 0; round < COT_PHILOX_ROUNDS; round++) {
        p.key[round][0] = (uint32_t)seed + round * COT_PHILOX_W0;
        p.key[round][1] = (uint32_t)(seed >> 32) + round * COT_PHILOX_W1;
    }
    return p;
}

/* The counters of neighbouring groups differ in word 2 only (i mod 2^32), unless the increment carries into word 3.
 * One product of round 1 and one of round 2 are therefore the same for all groups. This struct holds the terms that
 * these products and the keys contribute to words a and c in these two rounds, for the groups from i on. */
typedef struct v_philox_common {
    uint64_t first, second_a, second_c, product;
} v_philox_common;

V_INLINE v_philox_common v_philox_first_rounds(const v_philox *p, uint64_t i)
{
    const uint64_t product0 = COT_PHILOX_M0 * p->offset[0];
    const uint64_t product1 = COT_PHILOX_M1 * (uint64_t)(uint32_t)(product0 >> 32 ^ i >> 32 ^ p->key[0][1]);
    return (v_philox_common){.first = p->offset[1] ^ p->key[0][0],
                             .second_a = product1 >> 32 ^ p->key[1][0],
                             .second_c = product0 ^ p->key[1][1],
                             .product = product1};
}

/* If the counter carries into word 3 within these groups: draws the groups one by one and returns true. */
V_INLINE bool v_philox_keep_if_carry(uint8_t *bits, const v_philox *p, uint64_t i, uint64_t groups)
{
    if (__builtin_expect(i >> 32 == (i + groups - 1) >> 32, 1))
        return false;
    for (uint64_t g = 0; g < groups; g++)
        bits[g] = (uint8_t)cot_dropout_keep(p->key[0][0] | p->key[0][1] << 32, p->offset[0] | p->offset[1] << 32, i + g,
                                            p->threshold);
    return true;
}

/* V_NAME(stem) is the name of a function that is compiled once per instruction set. */
#if defined(COT_SIMD_AVX512)
#if defined(COT_MATMUL_AMX) && defined(COT_MATMUL_SPLIT) && COT_MATMUL_SPLIT == 3
#define V_NAME(stem) stem##_amx_split3
#elif defined(COT_MATMUL_AMX) && defined(COT_MATMUL_SPLIT)
#define V_NAME(stem) stem##_amx_split
#elif defined(COT_MATMUL_AMX) /* AVX-512 with bf16, and the matrix products of matmul_amx.h */
#define V_NAME(stem) stem##_amx
#elif defined(__AVX512BF16__)
#define V_NAME(stem) stem##_avx512bf16
#else
#define V_NAME(stem) stem##_avx512
#endif
#include "simd_avx512.h"
#elif defined(COT_SIMD_AVX2)
#define V_NAME(stem) stem##_avx2
#include "simd_avx2.h"
#elif defined(COT_SIMD_PORTABLE)
#define V_NAME(stem) stem##_portable
#include "simd_portable.h"
#else
#error "define COT_SIMD_PORTABLE, COT_SIMD_AVX2 or COT_SIMD_AVX512"
#endif

V_INLINE void v_prefetch_write(const void *p)
{
    __builtin_prefetch(p, 1);
}

V_INLINE void v_prefetch_range(const char *p, int64_t bytes)
{
    for (int64_t line = 0; line < bytes; line += 64)
        v_prefetch_l2(p + line);
}

V_INLINE void v_prefetch_page(const char *p, int64_t bytes)
{
    if ((uintptr_t)p % 4096 < (uintptr_t)bytes)
        v_prefetch_l2(p);
}

/* ---- dtype as a parameter: no cost where it is a compile-time constant ---------------------------------------- */

V_INLINE vf v_load_as(const void *p, cot_dtype dtype)
{
    return dtype == COT_F32 ? v_load(p) : dtype == COT_BF16 ? v_load_bf16(p) : v_load_f16(p);
}

V_INLINE vf v_load_n_as(const void *p, cot_dtype dtype, int n)
{
    return dtype == COT_F32 ? v_load_n(p, n) : dtype == COT_BF16 ? v_load_n_bf16(p, n) : v_load_n_f16(p, n);
}

V_INLINE void v_store_as(void *p, cot_dtype dtype, vf a)
{
    if (dtype == COT_F32)
        v_store(p, a);
    else if (dtype == COT_BF16)
        v_store_bf16(p, a);
    else
        v_store_f16(p, a);
}

V_INLINE void v_stream_as(void *p, cot_dtype dtype, vf a)
{
    if (dtype == COT_F32)
        v_stream(p, a);
    else if (dtype == COT_BF16)
        v_stream_bf16(p, a);
    else
        v_stream_f16(p, a);
}

/* Stores a at p and b directly after it. */
V_INLINE void v_store2_as(void *p, cot_dtype dtype, vf a, vf b)
{
    if (dtype == COT_BF16) {
        v_store2_bf16(p, a, b);
        return;
    }
    v_store_as(p, dtype, a);
    v_store_as((char *)p + VW * (dtype == COT_F32 ? 4 : 2), dtype, b);
}

V_INLINE void v_stream2_as(void *p, cot_dtype dtype, vf a, vf b)
{
    if (dtype == COT_BF16) {
        v_stream2_bf16(p, a, b);
        return;
    }
    v_stream_as(p, dtype, a);
    v_stream_as((char *)p + VW * (dtype == COT_F32 ? 4 : 2), dtype, b);
}

V_INLINE void v_store_n_as(void *p, cot_dtype dtype, vf a, int n)
{
    if (dtype == COT_F32)
        v_store_n(p, a, n);
    else if (dtype == COT_BF16)
        v_store_n_bf16(p, a, n);
    else
        v_store_n_f16(p, a, n);
}

/* ---- sigmoid, SiLU and its derivative ----------------------------------------------------------------------- *
 * Each instruction set's header defines v_logistic_divisor(z, &e) = 1 + e with e = exp(-z). It takes NaN and
 * |z| <= V_LOGISTIC_LIMIT, where exp(-z) is a normal number. Its error is at most 1 ulp plus 2^-29 |z|.
 * Beyond the limit, sigmoid is 2^-126 or 1. z * sigmoid(z) goes to 0 even at z = -inf, because both factors use the
 * clamped z. */

#define V_LOGISTIC_LIMIT 87.33f

V_INLINE vf v_clamp_low(vf z)
{
    return v_max(v_set1(-V_LOGISTIC_LIMIT), z);
}

V_INLINE vf v_clamp_high(vf z)
{
    return v_min(v_set1(V_LOGISTIC_LIMIT), z);
}

V_INLINE vf v_sigmoid(vf z)
{
    vf e;
    return v_div(v_set1(1), v_logistic_divisor(v_clamp_high(v_clamp_low(z)), &e));
}

V_INLINE vf v_silu(vf z)
{
    vf e;
    z = v_clamp_low(z);
    return v_div(z, v_logistic_divisor(v_clamp_high(z), &e));
}

V_INLINE vf v_silu_as(cot_dtype dtype, vf z)
{
#if defined(COT_SIMD_AVX512)
    if (dtype == COT_BF16)
        return v_silu_for_bf16(v_clamp_low(z));
#endif
    (void)dtype;
    return v_silu(z);
}

/* d silu(z) / dz = s + s * z * (1 - s). 1 - s is computed as e * s: the subtraction would have an error of half an ulp
 * of 1. z multiplies this error, and from z = 4 on it would break the error rule. */
V_INLINE vf v_silu_slope(vf z)
{
    vf e;
    z = v_clamp_high(v_clamp_low(z));
    const vf s = v_div(v_set1(1), v_logistic_divisor(z, &e));
    return v_fma(s, v_mul(z, v_mul(e, s)), s);
}

#endif
