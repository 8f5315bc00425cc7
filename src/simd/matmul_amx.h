/* SPDX-License-Identifier: Apache-2.0
 * matmul_amx.h: the products of matmul.h on AMX tiles of bf16 (amx-tile, amx-bf16, avx512bf16). */
#ifndef COT_SIMD_MATMUL_AMX_H
#define COT_SIMD_MATMUL_AMX_H

#if defined(COT_MATMUL_SPLIT)
/* A number as the sum of COT_MATMUL_SPLIT (2 or 3) bf16 terms. Each term is the remainder after the earlier terms,
 * rounded to bf16.
 * The terms of 32 numbers are stored in planes: an A-form row of a panel is 32 first terms, then 32 second terms, and
 * so on. Two B-form rows are 32 pairs of first terms, then 32 pairs of second terms, and so on. */
typedef struct mt {
    uint16_t terms[COT_MATMUL_SPLIT];
} mt;
#else
typedef uint16_t mt;
#endif
enum { MT_SAME_FORM = false };

/* The operand of LDTILECFG. mt_begin configures eight tiles of 16 rows of 64 bytes. */
typedef struct mt_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} mt_config;

/* The tile registers of the host program. */
typedef struct mt_state {
    _Alignas(64) mt_config config;
    _Alignas(64) char tiles[8][16][64];
} mt_state;

_Static_assert(sizeof(mt_config) == 64, "must be the 64 bytes that LDTILECFG reads");

#define MT_EACH_TILE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)

/* The ABI says that no tile register survives a call. The host program may still use tiles across calls, for example in
 * assembly, so that mt_begin saves them. */
V_INLINE void mt_begin(mt_state *state)
{
    _Alignas(64) mt_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = 16;
    }
    _tile_storeconfig(&state->config);
#define MT_SAVE(i)                 \
    if (state->config.rows[i] > 0) \
        _tile_stored(i, state->tiles[i], 64);
    if (state->config.palette != 0) {
        MT_EACH_TILE(MT_SAVE)
    }
#undef MT_SAVE
    _tile_loadconfig(&config);
}

V_INLINE void mt_end(mt_state *state)
{
    if (state->config.palette == 0) {
        _tile_release();
        return;
    }
    _tile_loadconfig(&state->config);
#define MT_RESTORE(i)              \
    if (state->config.rows[i] > 0) \
        _tile_loadd(i, state->tiles[i], 64);
    MT_EACH_TILE(MT_RESTORE)
#undef MT_RESTORE
}

V_INLINE __m512i mt_interleave(__m512i halves)
{
    const __m512i zip = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(zip, halves);
}

/* The tile instruction sums the even and the odd ones of 32 products separately, then adds both sums to the
 * accumulator. */
enum { MT_K_BLOCK = 32 };

V_INLINE vf mt_dot_terms(vf sum, const vf *a, const vf *b, int64_t n)
{
    vf even = v_zero(), odd = v_zero();
    for (int64_t i = 0; i < n; i += 2) {
        even = v_fma(a[i], b[i], even);
        odd = v_fma(a[i + 1], b[i + 1], odd);
    }
    return v_add(v_add(even, odd), sum);
}

/* v rounded to the nearest bf16, ties away from zero, as float32. It uses integer instructions: converting to bf16 and
 * back takes twice as long. A NaN may become a number, but its remainder (mt_remainder) is NaN. */
V_INLINE vf mt_round_term(vf v)
{
    const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(0x8000));
    return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32((int)0xffff0000)));
}

V_INLINE vf mt_remainder(vf v)
{
    return v_sub(v, mt_round_term(v));
}

/* Term `term` of `terms`, before the conversion to bf16. The last one keeps a NaN: mt_round_term would turn some into 0. */
V_INLINE vf mt_term(vf v, int64_t term, int64_t terms)
{
    const vf rounded = mt_round_term(v);
    return term + 1 < terms ? rounded : _mm512_mask_mov_ps(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), v);
}

/* Stores the terms of the 32 numbers v0, v1, `distance` elements apart, the largest first. With `pairs`, v0 and v1 are
 * interleaved. */
V_INLINE void mt_store_terms(uint16_t *to, int64_t terms, int64_t distance, vf v0, vf v1, bool pairs)
{
    for (int64_t term = 0; term < terms; term++, v0 = mt_remainder(v0), v1 = mt_remainder(v1)) {
        const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(mt_term(v1, term, terms), mt_term(v0, term, terms));
        _mm512_storeu_si512(to + term * distance, pairs ? mt_interleave(halves) : halves);
    }
}

#define MT_FOUR_PRODUCTS     \
    _tile_dpbf16ps(0, 4, 6); \
    _tile_dpbf16ps(1, 4, 7); \
    _tile_dpbf16ps(2, 5, 6); \
    _tile_dpbf16ps(3, 5, 7);

#if defined(COT_MATMUL_SPLIT)

V_INLINE void mt_store_a(mt *p, int64_t column, vf v)
{
    uint16_t *to = (uint16_t *)p + column;
    for (int term = 0; term < COT_MATMUL_SPLIT; term++, v = mt_remainder(v))
        _mm256_storeu_si256((__m256i *)(to + term * PANEL),
                            (__m256i)_mm512_cvtneps_pbh(mt_term(v, term, COT_MATMUL_SPLIT)));
}

/* The sum is exact: the terms' mantissas do not overlap. */
V_INLINE vf mt_load_a(const mt *p, int64_t column)
{
    const uint16_t *from = (const uint16_t *)p + column;
    vf v = v_load_bf16(from);
    for (int term = 1; term < COT_MATMUL_SPLIT; term++)
        v = v_add(v, v_load_bf16(from + term * PANEL));
    return v;
}

V_INLINE void mt_store_a2(mt *p, vf v0, vf v1)
{
    mt_store_terms((uint16_t *)p, COT_MATMUL_SPLIT, PANEL, v0, v1, false);
}

V_INLINE void mt_store_b(mt *b, int64_t rows, int64_t k, int64_t n, vf v0, vf v1)
{
    uint16_t *to = (uint16_t *)(b + mt_offset(rows, k, n / PANEL * PANEL)) + 2 * (n % PANEL);
    mt_store_terms(to, COT_MATMUL_SPLIT, 2 * PANEL, v0, v1, true);
}

#define MT_LOAD_A(term)                           \
    _tile_loadd(4, a_tile + (term)*PANEL, A_ROW); \
    _tile_loadd(5, a_tile + 16 * A_ROW / 2 + (term)*PANEL, A_ROW);
#define MT_LOAD_B(term)                               \
    _tile_loadd(6, b_tile + (term)*2 * PANEL, B_ROW); \
    _tile_loadd(7, b_tile + (term)*2 * PANEL + 32, B_ROW);

/* One step along k: four tile products for each pair of terms that matters. The order of the pairs keeps the number of
 * tile loads low. */
#if COT_MATMUL_SPLIT == 3
/* Six of the nine pairs of terms. The pairs left out add less than 2^-24 of a product. */
#define MT_K_STEP(a, b, all_terms)                                                       \
    {                                                                                    \
        const uint16_t *a_tile = (const uint16_t *)(a), *b_tile = (const uint16_t *)(b); \
        MT_LOAD_A(2)                                                                     \
        MT_LOAD_B(0)                                                                     \
        MT_FOUR_PRODUCTS                                                                 \
        overlap(context, 0);                                                             \
        MT_LOAD_A(1)                                                                     \
        MT_FOUR_PRODUCTS                                                                 \
        MT_LOAD_A(0)                                                                     \
        MT_FOUR_PRODUCTS                                                                 \
        overlap(context, 1);                                                             \
        MT_LOAD_B(1)                                                                     \
        MT_FOUR_PRODUCTS                                                                 \
        MT_LOAD_A(1)                                                                     \
        MT_FOUR_PRODUCTS                                                                 \
        overlap(context, 2);                                                             \
        MT_LOAD_A(0)                                                                     \
        MT_LOAD_B(2)                                                                     \
        MT_FOUR_PRODUCTS                                                                 \
        overlap(context, 3);                                                             \
    }

/* The pairs of terms in the order of MT_K_STEP: {term of B, term of A}. */
static const int mt_dot_term_order[][2] = {{0, 2}, {0, 1}, {0, 0}, {1, 0}, {1, 1}, {2, 0}};
#else
/* Three of the four pairs of terms. The pair left out, the two second terms, adds less than 2^-16 of a product.
 * `all_terms` includes this pair. */
#define MT_K_STEP(a, b, all_terms)                                                       \
    {                                                                                    \
        const uint16_t *a_tile = (const uint16_t *)(a), *b_tile = (const uint16_t *)(b); \
        MT_LOAD_A(1)                                                                     \
        if (all_terms) {                                                                 \
            MT_LOAD_B(1)                                                                 \
            MT_FOUR_PRODUCTS                                                             \
        }                                                                                \
        overlap(context, 0);                                                             \
        MT_LOAD_B(0)                                                                     \
        MT_FOUR_PRODUCTS                                                                 \
        overlap(context, 1);                                                             \
        MT_LOAD_A(0)                                                                     \
        MT_FOUR_PRODUCTS                                                                 \
        overlap(context, 2);                                                             \
        MT_LOAD_B(1)                                                                     \
        MT_FOUR_PRODUCTS                                                                 \
        overlap(context, 3);                                                             \
    }

/* The pairs of terms in the order of MT_K_STEP: {term of B, term of A}. */
static const int mt_dot_term_order[][2] = {{1, 1}, {0, 1}, {0, 0}, {1, 0}};
#endif

/* Sums in the same order as MT_K_STEP with `all_terms`, where b is the operand in A form. */
V_INLINE vf mt_dot(vf sum, const vf *a, const vf *b, int64_t n)
{
    vf a_terms[COT_MATMUL_SPLIT][MT_K_BLOCK], b_terms[COT_MATMUL_SPLIT][MT_K_BLOCK];
    for (int64_t i = 0; i < n; i++) {
        vf x = a[i], y = b[i];
        for (int term = 0; term < COT_MATMUL_SPLIT; term++, x = mt_remainder(x), y = mt_remainder(y)) {
            a_terms[term][i] = mt_term(x, term, COT_MATMUL_SPLIT);
            b_terms[term][i] = mt_term(y, term, COT_MATMUL_SPLIT);
        }
    }
    for (size_t i = 0; i < sizeof mt_dot_term_order / sizeof *mt_dot_term_order; i++)
        sum = mt_dot_terms(sum, a_terms[mt_dot_term_order[i][0]], b_terms[mt_dot_term_order[i][1]], n);
    return sum;
}

#else

V_INLINE void mt_store_a(mt *p, int64_t column, vf v)
{
    _mm256_storeu_si256((__m256i *)(p + column), (__m256i)_mm512_cvtneps_pbh(v));
}

V_INLINE vf mt_load_a(const mt *p, int64_t column)
{
    return v_load_bf16(p + column);
}

V_INLINE void mt_store_a2(mt *p, vf v0, vf v1)
{
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(v1, v0));
}

V_INLINE void mt_store_b(mt *b, int64_t rows, int64_t k, int64_t n, vf v0, vf v1)
{
    _mm512_storeu_si512(b + mt_offset(rows, k, n / PANEL * PANEL) + 2 * (n % PANEL),
                        mt_interleave((__m512i)_mm512_cvtne2ps_pbh(v1, v0)));
}

V_INLINE vf mt_dot(vf sum, const vf *a, const vf *b, int64_t n)
{
    return mt_dot_terms(sum, a, b, n);
}

/* One step of 32 along k: loads two tiles of A and two of B for four tile products. */
#define MT_K_STEP(a, b, all_terms)                  \
    {                                               \
        const mt *a_tile = (a), *b_tile = (b);      \
        _tile_loadd(4, a_tile, A_ROW);              \
        _tile_loadd(6, b_tile, B_ROW);              \
        _tile_loadd(7, b_tile + 32, B_ROW);         \
        _tile_dpbf16ps(0, 4, 6);                    \
        overlap(context, 0);                        \
        _tile_loadd(5, a_tile + 16 * PANEL, A_ROW); \
        _tile_dpbf16ps(1, 4, 7);                    \
        overlap(context, 1);                        \
        _tile_dpbf16ps(2, 5, 6);                    \
        overlap(context, 2);                        \
        _tile_dpbf16ps(3, 5, 7);                    \
        overlap(context, 3);                        \
    }

#endif

/* Computes a result tile of C, 32 x 32 elements, in four tile registers. It calls overlap(context, 0) to
 * overlap(context, 3) once in every PANEL^3 multiplications, for work that overlaps the tile products, such as vector
 * arithmetic or prefetches. The asm barrier is needed because gcc's tile loads do not declare that they read memory. */
V_INLINE void mt_product_result_tile(int64_t k, int64_t taps, const mt *a, int64_t a_rows, const mt *b, float *c,
                                     bool add, bool all_terms, void (*overlap)(void *context, int step), void *context)
{
    (void)all_terms;
    enum { A_ROW = PANEL * sizeof(mt), B_ROW = 2 * PANEL * sizeof(mt), C_ROW = PANEL * sizeof(float) };
    __asm__ volatile("" : : : "memory");
    if (add) {
        _tile_loadd(0, c, C_ROW);
        _tile_loadd(1, c + 16, C_ROW);
        _tile_loadd(2, c + 16 * PANEL, C_ROW);
        _tile_loadd(3, c + 16 * PANEL + 16, C_ROW);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t p = 0; p < k; p += PANEL)
        for (int64_t tap = 0; tap < taps; tap++, b += PANEL * PANEL)
            MT_K_STEP(a + mt_offset(a_rows, tap, p), b, all_terms)
    _tile_stored(0, c, C_ROW);
    _tile_stored(1, c + 16, C_ROW);
    _tile_stored(2, c + 16 * PANEL, C_ROW);
    _tile_stored(3, c + 16 * PANEL + 16, C_ROW);
}

V_INLINE void mt_prefetch_step(void *prefetch, int step)
{
    (void)step;
    mt_prefetch_next(prefetch);
}

/* A step loads two AMX tiles of A and two of B. The L1 cache just delivers them at the rate of the products. The L2
 * cache does not: a panel of B should be used for at least two strips of PANEL rows of A. */
V_INLINE void mt_product_result_tiles(int64_t m, int64_t n, int64_t k, int64_t taps, const mt *a, int64_t a_rows,
                                      const mt *b, int64_t b_rows, float *c, int64_t c_rows, bool add, bool all_terms,
                                      mt_prefetch_range *prefetch)
{
    for (int64_t j = 0; j < n; j += PANEL)
        for (int64_t i = 0; i < m; i += PANEL)
            mt_product_result_tile(k, taps, a + mt_offset(a_rows, i, 0), a_rows, b + mt_offset(b_rows, 0, j),
                                   c + mt_offset(c_rows, i, j), add, all_terms, mt_prefetch_step, prefetch);
}

V_INLINE void mt_product_taps(int64_t m, int64_t n, int64_t k, int64_t taps, const mt *a, int64_t a_rows, const mt *b,
                              int64_t b_rows, float *c, int64_t c_rows, bool add, mt_prefetch_range *prefetch)
{
    mt_product_result_tiles(m, n, k, taps, a, a_rows, b, b_rows, c, c_rows, add, false, prefetch);
}

static inline __attribute__((unused)) void mt_product_all_terms(int64_t m, int64_t n, int64_t k, const mt *a,
                                                                int64_t a_rows, const mt *b, int64_t b_rows, float *c,
                                                                int64_t c_rows, bool add, mt_prefetch_range *prefetch)
{
    mt_product_result_tiles(m, n, k, 1, a, a_rows, b, b_rows, c, c_rows, add, true, prefetch);
}

#endif
