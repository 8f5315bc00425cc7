/* SPDX-License-Identifier: Apache-2.0
 * matmul_amx.h: the products of matmul.h on AMX tiles of bf16 (amx-tile, amx-bf16, avx512bf16). */
#ifndef COT_SIMD_MATMUL_AMX_H
#define COT_SIMD_MATMUL_AMX_H

typedef uint16_t mt;

/* What LDTILECFG reads: all eight tiles are 16 rows of 64 bytes. */
typedef struct mt_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} mt_config;

/* What the host had in the tiles. */
typedef struct mt_state {
    _Alignas(64) mt_config config;
    _Alignas(64) char tiles[8][16][64];
} mt_state;

_Static_assert(sizeof(mt_config) == 64, "as the processor has it");

#define MT_EACH_TILE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)

/* The tiles are nobody's between calls by the ABI, but a host may use them without a compiler that knows. */
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
#define MT_LOAD(i)                 \
    if (state->config.rows[i] > 0) \
        _tile_loadd(i, state->tiles[i], 64);
    MT_EACH_TILE(MT_LOAD)
#undef MT_LOAD
}

V_INLINE void mt_store_a(mt *p, vf v)
{
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(v));
}

V_INLINE void mt_store_a2(mt *p, vf v0, vf v1)
{
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(v1, v0));
}

V_INLINE void mt_store_b(mt *b, int64_t rows, int64_t k, int64_t n, vf v0, vf v1)
{
    const __m512i zip = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(v1, v0);
    _mm512_storeu_si512(b + mt_b(rows, k, n / MT * MT) + 2 * (n % MT), _mm512_permutexvar_epi16(zip, halves));
}

/* The tile product sums the even and the odd ones of 32 terms apart and adds both to what was there. */
enum { MT_CHAIN = 32 };

V_INLINE vf mt_dot(vf sum, const vf *a, const vf *b, int64_t n)
{
    vf even = v_zero(), odd = v_zero();
    for (int64_t i = 0; i < n; i += 2) {
        even = v_fma(a[i], b[i], even);
        odd = v_fma(a[i + 1], b[i + 1], odd);
    }
    return v_add(v_add(even, odd), sum);
}

/* A part of 32 x 32 of C in four tiles: every step of 32 loads two tiles of A and two of B for four products. */
V_INLINE void mt_part(int64_t k, const mt *a, int64_t lda, const mt *b, float *c, int64_t ldc, bool add)
{
    const size_t a_row = (size_t)lda * sizeof(mt), b_row = 2 * MT * sizeof(mt), c_row = (size_t)ldc * sizeof(float);
    if (add) {
        _tile_loadd(0, c, c_row);
        _tile_loadd(1, c + 16, c_row);
        _tile_loadd(2, c + 16 * ldc, c_row);
        _tile_loadd(3, c + 16 * ldc + 16, c_row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t p = 0; p < k; p += 32) {
        _tile_loadd(4, a + p, a_row);
        _tile_loadd(6, b + p * MT, b_row);
        _tile_loadd(7, b + p * MT + 32, b_row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, a + 16 * lda + p, a_row);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_row);
    _tile_stored(1, c + 16, c_row);
    _tile_stored(2, c + 16 * ldc, c_row);
    _tile_stored(3, c + 16 * ldc + 16, c_row);
}

/* Two tiles of A and two of B a step are as much as the first-level cache delivers while the products run, and more
 * than the second-level one does: a panel of B should serve at least two parts of A. */
static inline __attribute__((unused)) void mt_product(int64_t m, int64_t n, int64_t k, const mt *a, int64_t lda,
                                                      const mt *b, int64_t rows, float *c, int64_t ldc, bool add)
{
    for (int64_t j = 0; j < n; j += MT)
        for (int64_t i = 0; i < m; i += MT)
            mt_part(k, a + i * lda, lda, b + mt_b(rows, 0, j), c + i * ldc + j, ldc, add);
}

#endif
