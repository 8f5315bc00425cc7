/* SPDX-License-Identifier: Apache-2.0
 *
 * matmul.h: products of small packed matrices, C = A B or C += A B, with C in f32.
 *
 * A kernel that uses them is written once. It is compiled for f32 on any vectors of simd.h, and for bf16 on AMX
 * (-DCOT_SIMD_AVX512 -DCOT_MATMUL_AMX). With -DCOT_MATMUL_SPLIT=2 or =3 as well, an element is a sum of two or three
 * bf16.
 *
 * mt stands for "matmul type": the element type of the operands A and B, float, or on AMX bf16 or a sum of bf16. The
 * prefix mt_ marks the functions and types of this file. PANEL (32) is the width of a panel.
 * All matrices are stored in panels of PANEL columns, [columns/PANEL][rows][PANEL]. A square of PANEL x PANEL elements
 * is therefore contiguous. (In a row-major matrix of 128 float columns, a row takes 512 bytes, and a column of squares
 * would map to 1/8 of the L1 cache's sets.) The element in row r and column c, c a multiple of PANEL, has the offset
 * mt_offset(rows, r, c).
 *   A form  [k/PANEL][m][PANEL]
 *   B form  [n/PANEL][k][PANEL]  on AMX with pairs of rows interleaved, [n/PANEL][k/2][PANEL][2]; then r is even
 *   C       [n/PANEL][m][PANEL]  always float
 * In f32 the three forms are the same (MT_SAME_FORM): a C can be an operand of the next product without packing.
 * Sizes are multiples of PANEL (32). The caller pads with zeros, and whole squares are allocated, 64-byte aligned.
 *
 *   mt_begin(&state) mt_end(&state)            enclose every work item that calls mt_product. mt_end restores the tile
 *                                              registers of the host program
 *   mt_product(m, n, k, a, a_rows, b, b_rows, c, c_rows, add, prefetch)
 *                                              C = A B, or C += A B with `add`. a_rows, b_rows, c_rows are the rows of
 *                                              the whole matrices, of which A, B and C may be sections. Prefetches
 *                                              the range `prefetch`, 4 lines per PANEL^3 multiplications; NULL = no
 *                                              prefetch
 *   mt_product_taps(.., k, taps, a, ..)        C = A_0 B_0 + .. + A_{taps-1} B_{taps-1}, a convolution. A_j is the rows
 *                                              from j on of one A with k columns and m + taps - 1 rows. B has k taps
 *                                              rows: tap j of panel p of A's columns is the rows from
 *                                              (p taps + j) PANEL on
 *   mt_product_all_terms(...)                  mt_product with the product of the two low terms, which mt_product
 *                                              leaves out where an element is a sum of two bf16
 *   mt_dot(sum, a, b, n)                       sum + (a[0] b[0] + .. + a[n-1] b[n-1]), lane by lane, n <= MT_K_BLOCK,
 *                                              with the same roundings as mt_product_all_terms
 *   mt_store_a(p, column, v)                   stores VW elements to columns column .. of the row p of an A-form panel
 *   mt_store_a2(p, v0, v1)                     stores columns 0 .. 2 VW-1 of that row; with VW = 16 this is the whole
 *                                              row
 *   mt_load_a(p, column)                       loads what mt_store_a stored
 *   mt_store_b(b, rows, k, n, v0, v1)          stores columns n .. n+VW-1 of rows k (even) and k+1 in B form
 *   mt_transpose(v)                            transposes VW vectors
 *
 * The bf16 products and conversions treat subnormal numbers as zero. Sums are f32, rounded to nearest. */
#ifndef COT_SIMD_MATMUL_H
#define COT_SIMD_MATMUL_H

#include "simd.h"

enum { PANEL = 32 };

V_INLINE int64_t mt_offset(int64_t rows, int64_t row, int64_t column)
{
    return column * rows + row * PANEL;
}

/* Memory to prefetch into the L2 cache: [next, end). */
typedef struct mt_prefetch_range {
    const char *next, *end;
} mt_prefetch_range;

/* Prefetches the next line of the range. */
V_INLINE void mt_prefetch_next(mt_prefetch_range *prefetch)
{
    if (prefetch != NULL && prefetch->next < prefetch->end) {
        v_prefetch_l2(prefetch->next);
        prefetch->next += 64;
    }
}

#if defined(COT_MATMUL_AMX)
#include "matmul_amx.h"
#else

typedef float mt;
enum { MT_SAME_FORM = true };
typedef struct mt_state {
    char unused;
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
    mt *p = b + mt_offset(rows, k, n / PANEL * PANEL) + n % PANEL;
    v_store(p, v0);
    v_store(p + PANEL, v1);
}

/* The number of steps along k that are summed before the sum is added to C: one panel of A. Summing all of d = 256 in
 * one chain gave larger errors than the plain loops of the scalar kernels. */
enum { MT_K_BLOCK = 32 };

V_INLINE vf mt_dot(vf sum, const vf *a, const vf *b, int64_t n)
{
    vf run = v_zero();
    for (int64_t i = 0; i < n; i++)
        run = v_fma(a[i], b[i], run);
    return v_add(sum, run);
}

/* Register block: MT_BLOCK_ROWS rows by two vectors of C. With AVX-512, 8 x 2 accumulators keep both FMA ports busy: 16
 * dependency chains, where 2 ports with a latency of 4 cycles need 8. A step loads 10 vectors for 16 FMAs. AVX2 has
 * half the registers.
 * The loop over the steps is unrolled 4 times: the loop overhead of a rolled loop costs 10 %. */
#if defined(COT_SIMD_AVX512)
enum { MT_BLOCK_ROWS = 8 };
#else
enum { MT_BLOCK_ROWS = 4 };
#endif

#if defined(__clang__)
#define MT_UNROLL
#else
#define MT_UNROLL _Pragma("GCC unroll 4")
#endif

V_INLINE void mt_block(const float *restrict a, const float *restrict b, float *restrict c, bool add)
{
    vf s0[MT_BLOCK_ROWS], s1[MT_BLOCK_ROWS];
    V_UNROLL
    for (int i = 0; i < MT_BLOCK_ROWS; i++)
        s0[i] = s1[i] = v_zero();
    MT_UNROLL
    for (int p = 0; p < MT_K_BLOCK; p++) {
        const vf b0 = v_load(b + p * PANEL), b1 = v_load(b + p * PANEL + VW);
        V_UNROLL
        for (int i = 0; i < MT_BLOCK_ROWS; i++) {
            const vf x = v_set1(a[i * PANEL + p]);
            s0[i] = v_fma(x, b0, s0[i]);
            s1[i] = v_fma(x, b1, s1[i]);
        }
    }
    V_UNROLL
    for (int i = 0; i < MT_BLOCK_ROWS; i++) {
        v_store(c + i * PANEL, add ? v_add(v_load(c + i * PANEL), s0[i]) : s0[i]);
        v_store(c + i * PANEL + VW, add ? v_add(v_load(c + i * PANEL + VW), s1[i]) : s1[i]);
    }
}

/* Loop order: a panel of B stays in the L1 cache while the rows of A pass. */
V_INLINE void mt_product_taps(int64_t m, int64_t n, int64_t k, int64_t taps, const mt *a, int64_t a_rows, const mt *b,
                              int64_t b_rows, float *c, int64_t c_rows, bool add, mt_prefetch_range *prefetch)
{
    for (int64_t j = 0; j < n; j += PANEL)
        for (int64_t strip = 0; strip < PANEL; strip += 2 * VW)
            for (int64_t i = 0; i < m; i += MT_BLOCK_ROWS)
                for (int64_t p = 0; p < k; p += MT_K_BLOCK)
                    for (int64_t tap = 0; tap < taps; tap++) {
                        mt_prefetch_next(prefetch);
                        mt_block(a + mt_offset(a_rows, i + tap, p),
                                 b + mt_offset(b_rows, p * taps + tap * PANEL, j) + strip,
                                 c + mt_offset(c_rows, i, j) + strip, add || p + tap > 0);
                    }
}

#define mt_product_all_terms mt_product

#endif

static inline __attribute__((unused)) void mt_product(int64_t m, int64_t n, int64_t k, const mt *a, int64_t a_rows,
                                                      const mt *b, int64_t b_rows, float *c, int64_t c_rows, bool add,
                                                      mt_prefetch_range *prefetch)
{
    mt_product_taps(m, n, k, 1, a, a_rows, b, b_rows, c, c_rows, add, prefetch);
}

/* ---- transposition ------------------------------------------------------------------------------------------ */

#if defined(COT_SIMD_AVX512)

V_INLINE void mt_transpose(vf v[VW])
{
    __m512 t[16];
    V_UNROLL
    for (int i = 0; i < 16; i += 4) { /* transposes the 4 x 4 block in each 128-bit lane */
        const __m512 a = _mm512_unpacklo_ps(v[i], v[i + 1]), b = _mm512_unpackhi_ps(v[i], v[i + 1]);
        const __m512 c = _mm512_unpacklo_ps(v[i + 2], v[i + 3]), d = _mm512_unpackhi_ps(v[i + 2], v[i + 3]);
        t[i] = _mm512_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
        t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
        t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
    }
    V_UNROLL
    for (int i = 0; i < 4; i++) { /* transposes the 4 x 4 grid of these blocks */
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
