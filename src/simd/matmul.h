/* SPDX-License-Identifier: Apache-2.0
 *
 * matmul.h: products of small packed matrices, C = A B or C += A B with C in f32, so that a kernel built on them is
 * written once for f32 on any vectors of simd.h, and for bf16 on AMX (-DCOT_MATMUL_AMX besides -DCOT_SIMD_AVX512).
 *
 * mt is the type of an operand's elements: float, or bf16 with AMX. Operands are kept in one of two forms:
 *   A form  [m][lda]             rows, k contiguous
 *   B form  [n/MT][rows][MT]     panels of MT columns, in f32; pairs of rows interleaved, [n/MT][rows/2][MT][2], in bf16
 * Panels, because the 16 KB that a column of blocks reads would lie in a fourth of the first-level cache's sets if rows
 * were as long as the matrix (of 128 columns, f32). A part of a B form that begins at an even k and at n, a multiple of
 * MT, is at mt_b(rows, k, n). Sizes are multiples of MT (32) and the memory of whole MT x MT parts exists; operands and
 * C are 64-byte aligned with row lengths that are multiples of MT. Whoever packs fills up with zeros.
 *
 *   mt_begin(&state) mt_end(&state)            around every item that calls mt_product; mt_end puts things as they were
 *   mt_product(m, n, k, a, lda, b, rows, c, ldc, add)
 *   mt_dot(sum, a, b, n)                       sum + (a[0] b[0] + .. + a[n-1] b[n-1]), lane by lane, with the same
 *                                              roundings as mt_product makes of n <= MT_CHAIN steps
 *   mt_store_a(p, v)                           VW elements of an A-form row
 *   mt_store_a2(p, v0, v1)                     2 VW of them
 *   mt_store_b(b, rows, k, n, v0, v1)          VW elements of the B-form rows k (even) and k+1, from column n on
 *   mt_transpose(v)                            of VW vectors
 *
 * The bf16 products and conversions treat subnormal numbers as zero; sums are f32, rounded to nearest. */
#ifndef COT_SIMD_MATMUL_H
#define COT_SIMD_MATMUL_H

#include "simd.h"

enum { MT = 32 };

V_INLINE int64_t mt_b(int64_t rows, int64_t k, int64_t n)
{
    return n * rows + k * MT;
}

#if defined(COT_MATMUL_AMX)
#include "matmul_amx.h"
#else

typedef float mt;
typedef struct mt_state {
    char nothing;
} mt_state;

V_INLINE void mt_begin(mt_state *state)
{
    (void)state;
}

V_INLINE void mt_end(mt_state *state)
{
    (void)state;
}

V_INLINE void mt_store_a(mt *p, vf v)
{
    v_store(p, v);
}

V_INLINE void mt_store_a2(mt *p, vf v0, vf v1)
{
    v_store(p, v0);
    v_store(p + VW, v1);
}

V_INLINE void mt_store_b(mt *b, int64_t rows, int64_t k, int64_t n, vf v0, vf v1)
{
    mt *p = b + mt_b(rows, k, n / MT * MT) + n % MT;
    v_store(p, v0);
    v_store(p + MT, v1);
}

/* Steps that are summed in one run before they are added to C: of d = 256 in one run, the sums were off by more than
 * the plain loops' of the scalar kernels. */
enum { MT_CHAIN = 32 };

V_INLINE vf mt_dot(vf sum, const vf *a, const vf *b, int64_t n)
{
    vf run = v_zero();
    for (int64_t i = 0; i < n; i++)
        run = v_fma(a[i], b[i], run);
    return v_add(sum, run);
}

/* MT_M rows by two vectors of C stay in registers: 8 x 2 accumulators keep both FMA ports of AVX-512 busy (16 chains
 * against 2 ports times 4 cycles), and every step loads 10 vectors for 16 FMAs. AVX2 has half the registers. */
#if defined(COT_SIMD_AVX512)
enum { MT_M = 8 };
#else
enum { MT_M = 4 };
#endif

V_INLINE void mt_block(int64_t k, const float *restrict a, int64_t lda, const float *restrict b, float *restrict c,
                       int64_t ldc, bool add)
{
    vf s0[MT_M], s1[MT_M];
    V_UNROLL
    for (int i = 0; i < MT_M; i++)
        s0[i] = s1[i] = v_zero();
    for (int64_t p = 0; p < k; p++) {
        const vf b0 = v_load(b + p * MT), b1 = v_load(b + p * MT + VW);
        V_UNROLL
        for (int i = 0; i < MT_M; i++) {
            const vf x = v_set1(a[i * lda + p]);
            s0[i] = v_fma(x, b0, s0[i]);
            s1[i] = v_fma(x, b1, s1[i]);
        }
    }
    V_UNROLL
    for (int i = 0; i < MT_M; i++) {
        v_store(c + i * ldc, add ? v_add(v_load(c + i * ldc), s0[i]) : s0[i]);
        v_store(c + i * ldc + VW, add ? v_add(v_load(c + i * ldc + VW), s1[i]) : s1[i]);
    }
}

/* A panel of B stays in the first-level cache while A's rows go by. */
static inline __attribute__((unused)) void mt_product(int64_t m, int64_t n, int64_t k, const mt *a, int64_t lda,
                                                      const mt *b, int64_t rows, float *c, int64_t ldc, bool add)
{
    for (int64_t j = 0; j < n; j += 2 * VW) {
        const mt *panel = b + mt_b(rows, 0, j / MT * MT) + j % MT;
        for (int64_t p = 0; p < k; p += MT_CHAIN)
            for (int64_t i = 0; i < m; i += MT_M)
                mt_block(k - p < MT_CHAIN ? k - p : MT_CHAIN, a + i * lda + p, lda, panel + p * MT, c + i * ldc + j,
                         ldc, add || p > 0);
    }
}

#endif

/* ---- transposition ------------------------------------------------------------------------------------------ */

#if defined(COT_SIMD_AVX512)

V_INLINE void mt_transpose(vf v[VW])
{
    __m512 t[16];
    V_UNROLL
    for (int i = 0; i < 16; i += 4) { /* 4 x 4 in each quarter */
        const __m512 a = _mm512_unpacklo_ps(v[i], v[i + 1]), b = _mm512_unpackhi_ps(v[i], v[i + 1]);
        const __m512 c = _mm512_unpacklo_ps(v[i + 2], v[i + 3]), d = _mm512_unpackhi_ps(v[i + 2], v[i + 3]);
        t[i] = _mm512_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
        t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
        t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
    }
    V_UNROLL
    for (int i = 0; i < 4; i++) { /* the quarters, as 4 x 4 blocks */
        const __m512 a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
        const __m512 c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88),
                     d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
        v[i] = _mm512_shuffle_f32x4(a, c, 0x88);
        v[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
        v[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
        v[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
}

#else

V_INLINE void mt_transpose(vf v[VW])
{
    float cells[VW][VW];
    for (int i = 0; i < VW; i++)
        v_store(cells[i], v[i]);
    for (int i = 0; i < VW; i++) {
        float column[VW];
        for (int j = 0; j < VW; j++)
            column[j] = cells[j][i];
        v[i] = v_load(column);
    }
}

#endif
#endif
