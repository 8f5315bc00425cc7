/* SPDX-License-Identifier: Apache-2.0
 *
 * simd.h: one vocabulary of vector verbs, so that a CPU kernel is written once and compiled once per instruction
 * set: -DCOT_SIMD_SCALAR, -DCOT_SIMD_AVX2 (avx2, fma, f16c) or -DCOT_SIMD_AVX512 (f, bw, dq, vl besides), the last
 * once more with the compiler's -mavx512bf16.
 *
 * Types: vf = VW lanes of f32, vi = VW lanes of i32, vm = VW truth values. Memory needs element alignment only, but
 * for the stream verbs. `n` is a number of lanes in [0, VW]: lanes beyond it are neither read nor written; loaded
 * they are 0.
 *
 *   v_zero v_set1 v_add v_sub v_mul v_div v_fma(a,b,c) = a*b+c   v_fms = a*b-c   v_fnma = c-a*b
 *   v_max(limit, a) v_min(limit, a)     a where it is NaN
 *   v_load v_load_n v_store v_store_n   f32;  with the suffix _bf16 or _f16: VW elements of 2 bytes, rounded to
 *                                       nearest even, subnormals kept, as core/float16.h does
 *   v_store2_bf16(p, a, b)              a and b behind it
 *   v_stream v_stream_bf16 v_stream_f16 v_stream2_bf16   non-temporal stores; the address is a multiple of the bytes
 *                                       stored; the thread calls v_fence after its last one
 *   v_prefetch v_prefetch_far           into the first-level cache; into the second-level one. Any address will do
 *   v_prefetch_write                    into the first-level cache, to be written
 *   v_ask(p, bytes)                     v_prefetch_far of all their lines
 *   v_ask_page(p, bytes)                of one line a page of what is asked for in such pieces, of where results will go, for the
 *                                       translation of its address: a store past the caches that waits for it holds up all
 *                                       that follow, and under a hypervisor it waits for two tables (a Zen 4, pages of 4 KB,
 *                                       bf16 dropout backward: two fifths of all)
 *   v_align(a, b, k)                    lanes k, k+1, ... of a followed by b, VW of them; k < VW, a constant
 *   v_gather(p, stride, n)              p[0], p[stride], ... of f32
 *   v_sum                               all lanes, in a fixed order
 *   v_sums4(a, b, c, d)                 lane 4i+k: the sum of lanes 4i .. 4i+3 of the k-th of the four, in v_sum's order
 *   vi_load vi_set1;  vm_equal vm_not_negative (of vi) vm_first(n) vm_and;  v_keep(m, a) = a where m, else +0
 *   v_exp_flush                         exp of arguments up to 88, 0 where that would be less than 2^-126
 *   v_exp2_flush                        2^x, 0 where that would be less than 2^-126; on AVX-512 alone
 *   v_exp v_sigmoid v_silu v_silu_slope;  v_gelu_tanh, v_gelu_erf and their slopes in gelu.h
 *   v_silu_as(dtype, z)                 good enough to be rounded to dtype
 *   v_abs v_select(m,a,b);  vm_negative(a) by the sign bit;  vm_above(a,b) = !(a <= b)
 *   vm_bits(bits, i)                    bits i .. i+VW-1 of an array, the least significant of a byte first; i a
 *                                       multiple of VW
 *   v_philox_keep(bits, p, i)           keep bits of the groups i .. i+V_PHILOX_GROUPS-1 of dropout, a byte each, as
 *                                       core/philox.h draws them
 */
#ifndef COT_SIMD_SIMD_H
#define COT_SIMD_SIMD_H

#include "core/float16.h"
#include "core/philox.h"

#include <stdbool.h>

/* Before loops over a constant number of steps. Clang unrolls those by itself, and warns where the number is none. */
#if defined(__clang__)
#define V_UNROLL
#else
#define V_UNROLL _Pragma("GCC unroll 16")
#endif
#define V_INLINE static inline __attribute__((always_inline, unused))

/* The logarithm of 2^-126, a little above. */
#define V_EXP_LEAST (-87.33f)

/* What v_philox_keep needs of a seed, an offset and a threshold of 1 .. 65535: the key of every round, the counter's
 * first two words; each in 64 bits, which is how the vectors take them. */
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

/* Three words of the counters are the same in all groups, the last of them but where it carries. So are a product of the
 * first round and one of the second, and this is what comes of them from group i on; it enters a and c of those rounds. */
typedef struct v_philox_common {
    uint64_t first, second_a, second_c, product;
} v_philox_common;

V_INLINE v_philox_common v_philox_begin(const v_philox *p, uint64_t i)
{
    const uint64_t product0 = COT_PHILOX_M0 * p->offset[0];
    const uint64_t product1 = COT_PHILOX_M1 * (uint64_t)(uint32_t)(product0 >> 32 ^ i >> 32 ^ p->key[0][1]);
    return (v_philox_common){.first = p->offset[1] ^ p->key[0][0],
                             .second_a = product1 >> 32 ^ p->key[1][0],
                             .second_c = product0 ^ p->key[1][1],
                             .product = product1};
}

/* Where that word carries among `groups`, draws them one by one. */
V_INLINE bool v_philox_carried(uint8_t *bits, const v_philox *p, uint64_t i, uint64_t groups)
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
#elif defined(COT_MATMUL_AMX) /* the vectors of AVX-512 with bf16, and the products of matmul_amx.h */
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
#elif defined(COT_SIMD_SCALAR)
#define V_NAME(stem) stem##_scalar
#include "simd_scalar.h"
#else
#error "define COT_SIMD_SCALAR, COT_SIMD_AVX2 or COT_SIMD_AVX512"
#endif

V_INLINE void v_prefetch_write(const void *p)
{
    __builtin_prefetch(p, 1);
}

V_INLINE void v_ask(const char *p, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += 64)
        v_prefetch_far(p + at);
}

V_INLINE void v_ask_page(const char *p, int64_t bytes)
{
    if ((uintptr_t)p % 4096 < (uintptr_t)bytes)
        v_prefetch_far(p);
}

/* ---- dtype as a parameter: free where the compiler knows it ------------------------------------------------- */

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

/* b behind a. */
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

/* ---- sigmoid and what follows from it ----------------------------------------------------------------------- *
 * Each header gives v_logistic_divisor(z, &e) = 1 + e, e = exp(-z), for |z| <= V_LOGISTIC_LIMIT, where exp is a normal
 * number, and for NaN, good to 1 ulp and 2^-29 |z|. Beyond the limit sigmoid is 2^-126 or 1; z * sigmoid(z) vanishes
 * as it should, even at -inf, because z is limited in both factors. */

#define V_LOGISTIC_LIMIT 87.33f

V_INLINE vf v_limit_below(vf z)
{
    return v_max(v_set1(-V_LOGISTIC_LIMIT), z);
}

V_INLINE vf v_limit_above(vf z)
{
    return v_min(v_set1(V_LOGISTIC_LIMIT), z);
}

V_INLINE vf v_sigmoid(vf z)
{
    vf e;
    return v_div(v_set1(1), v_logistic_divisor(v_limit_above(v_limit_below(z)), &e));
}

V_INLINE vf v_silu(vf z)
{
    vf e;
    z = v_limit_below(z);
    return v_div(z, v_logistic_divisor(v_limit_above(z), &e));
}

V_INLINE vf v_silu_as(cot_dtype dtype, vf z)
{
#if defined(COT_SIMD_AVX512)
    if (dtype == COT_BF16)
        return v_silu_for_bf16(v_limit_below(z));
#endif
    (void)dtype;
    return v_silu(z);
}

/* d silu(z) / dz = s + s * z * (1 - s), with 1 - s as e * s: the difference would be off by half a unit of 1, which z
 * multiplies, and so beyond the error rule from z = 4 on. */
V_INLINE vf v_silu_slope(vf z)
{
    vf e;
    z = v_limit_above(v_limit_below(z));
    const vf s = v_div(v_set1(1), v_logistic_divisor(z, &e));
    return v_fma(s, v_mul(z, v_mul(e, s)), s);
}

#endif
