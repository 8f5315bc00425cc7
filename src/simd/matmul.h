/* SPDX-License-Identifier: Apache-2.0
 *
 * matmul.h: products of small packed matrices, C = A B or C += A B with C in f32, so that a kernel built on them is
 * written once for f32 on any vectors of simd.h, and for bf16 on AMX (-DCOT_MATMUL_AMX besides -DCOT_SIMD_AVX512), with
 * -DCOT_MATMUL_SPLIT=2 or =3 for numbers that are sums of two or three bf16.
 *
 * mt is the type of an operand's elements: float, or bf16 or two bf16 with AMX. All matrices lie in panels of MT columns,
 * [columns/MT][rows][MT], so that a part of MT rows is contiguous wherever it lies (rows as long as the matrix, 512 bytes
 * for 128 columns, would put a column of parts in an eighth of the first-level cache's sets). A part that begins at row
 * r and at column c, a multiple of MT, is at mt_at(rows, r, c).
 *   A form  [k/MT][m][MT]
 *   B form  [n/MT][k][MT]     in bf16 with pairs of rows interleaved, [n/MT][k/2][MT][2]: r is even
 *   C       [n/MT][m][MT]     always float
 * In f32 the three are the same (MT_ONE_FORM): a C can be an operand of the next product where it lies.
 * Sizes are multiples of MT (32) and the memory of whole MT x MT parts exists, 64-byte aligned. Whoever packs fills up
 * with zeros.
 *
 *   mt_begin(&state) mt_end(&state)            around every item that calls mt_product; mt_end puts things as they were
 *   mt_product(m, n, k, a, a_rows, b, b_rows, c, c_rows, add, ahead)
 *                                              the rows are those of the whole matrices; memory in `ahead` is asked
 *                                              for meanwhile, 4 lines with every MT^3 multiplications; NULL = none
 *   mt_product_taps(.., k, taps, a, ..)        C = A_0 B_0 + .. + A_{taps-1} B_{taps-1}, A_j the rows from j on of one A of
 *                                              k columns and m + taps - 1 rows: a convolution. B has k taps rows, those of
 *                                              panel p of A's columns and tap j from row (p taps + j) MT on
 *   mt_product_whole(...)                      mt_product with the part that it leaves out of products of two bf16
 *   mt_dot(sum, a, b, n)                       sum + (a[0] b[0] + .. + a[n-1] b[n-1]), lane by lane, with the same
 *                                              roundings as mt_product_whole makes of n <= MT_CHAIN steps
 *   mt_store_a(p, column, v)                   VW elements of an A-form row of a panel, p, from this column on
 *   mt_store_a2(p, v0, v1)                     2 VW of them, with the 32-column panels of VW 16 the whole row
 *   mt_load_a(p, column)                       and back
 *   mt_store_b(b, rows, k, n, v0, v1)          VW elements of the B-form rows k (even) and k+1, from column n on
 *   mt_transpose(v)                            of VW vectors
 *
 * The bf16 products and conversions treat subnormal numbers as zero; sums are f32, rounded to nearest. */
#ifndef COT_SIMD_MATMUL_H
#define COT_SIMD_MATMUL_H

#include "simd.h"

enum { MT = 32 };

V_INLINE int64_t mt_at(int64_t rows, int64_t row, int64_t column)
{
    return column * rows + row * MT;
}

/* Memory that will be wanted next, beyond the second-level cache: [at, end). */
typedef struct mt_ahead {
    const char *at, *end;
} mt_ahead;

V_INLINE void mt_ask(mt_ahead *ahead)
{
    if (ahead != NULL && ahead->at < ahead->end) {
        v_prefetch_far(ahead->at);
        ahead->at += 64;
    }
}

#if defined(COT_MATMUL_AMX)
#include "matmul_amx.h"
#else

typedef float mt;
enum { MT_ONE_FORM = true };
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

V_INLINE void mt_store_a(mt *p, int64_t column, vf v)
{
    v_store(p + column, v);
}

V_INLINE vf mt_load_a(const mt *p, int64_t column)
{
    return v_load(p + column);
}

V_INLINE void mt_store_a2(mt *p, vf v0, vf v1)
{
    v_store(p, v0);
    v_store(p + VW, v1);
}

V_INLINE void mt_store_b(mt *b, int64_t rows, int64_t k, int64_t n, vf v0, vf v1)
{
    mt *p = b + mt_at(rows, k, n / MT * MT) + n % MT;
    v_store(p, v0);
    v_store(p + MT, v1);
}

/* Steps that are summed in one run before they are added to C, a panel of A: of d = 256 in one run, the sums were off by more than
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
 * against 2 ports times 4 cycles), and every step loads 10 vectors for 16 FMAs. AVX2 has half the registers. Half of the
 * steps are written out: a loop's end costs as much as a tenth of them. */
#if defined(COT_SIMD_AVX512)
enum { MT_M = 8 };
#else
enum { MT_M = 4 };
#endif

#if defined(__clang__)
#define MT_UNROLL
#else
#define MT_UNROLL _Pragma("GCC unroll 4")
#endif

V_INLINE void mt_block(const float *restrict a, const float *restrict b, float *restrict c, bool add)
{
    vf s0[MT_M], s1[MT_M];
    V_UNROLL
    for (int i = 0; i < MT_M; i++)
        s0[i] = s1[i] = v_zero();
    MT_UNROLL
    for (int p = 0; p < MT_CHAIN; p++) {
        const vf b0 = v_load(b + p * MT), b1 = v_load(b + p * MT + VW);
        V_UNROLL
        for (int i = 0; i < MT_M; i++) {
            const vf x = v_set1(a[i * MT + p]);
            s0[i] = v_fma(x, b0, s0[i]);
            s1[i] = v_fma(x, b1, s1[i]);
        }
    }
    V_UNROLL
    for (int i = 0; i < MT_M; i++) {
        v_store(c + i * MT, add ? v_add(v_load(c + i * MT), s0[i]) : s0[i]);
        v_store(c + i * MT + VW, add ? v_add(v_load(c + i * MT + VW), s1[i]) : s1[i]);
    }
}

/* A panel of B stays in the first-level cache while A's rows go by. */
V_INLINE void mt_product_taps(int64_t m, int64_t n, int64_t k, int64_t taps, const mt *a, int64_t a_rows, const mt *b,
                              int64_t b_rows, float *c, int64_t c_rows, bool add, mt_ahead *ahead)
{
    for (int64_t j = 0; j < n; j += MT)
        for (int64_t part = 0; part < MT; part += 2 * VW)
            for (int64_t i = 0; i < m; i += MT_M)
                for (int64_t p = 0; p < k; p += MT_CHAIN)
                    for (int64_t tap = 0; tap < taps; tap++) {
                        mt_ask(ahead);
                        mt_block(a + mt_at(a_rows, i + tap, p), b + mt_at(b_rows, p * taps + tap * MT, j) + part,
                                 c + mt_at(c_rows, i, j) + part, add || p + tap > 0);
                    }
}

#define mt_product_whole mt_product

#endif

static inline __attribute__((unused)) void mt_product(int64_t m, int64_t n, int64_t k, const mt *a, int64_t a_rows,
                                                      const mt *b, int64_t b_rows, float *c, int64_t c_rows, bool add,
                                                      mt_ahead *ahead)
{
    mt_product_taps(m, n, k, 1, a, a_rows, b, b_rows, c, c_rows, add, ahead);
}

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
