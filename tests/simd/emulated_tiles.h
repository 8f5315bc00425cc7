/* SPDX-License-Identifier: Apache-2.0
 *
 * emulated_tiles.h: AMX's tile instructions emulated with AVX-512, for processors without AMX. The compiler's command
 * line includes this file before the kernels that use src/simd/matmul_amx.h. All eight tiles have 16 rows of 64 bytes,
 * as in matmul_amx.h. */
#ifndef COT_EMULATED_TILES_H
#define COT_EMULATED_TILES_H

#include <immintrin.h>
#include <string.h>

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) ((void)(config))
#define _tile_storeconfig(config) memset(config, 0, 64) /* no tile is configured */
#define _tile_release() ((void)0)
#define _tile_zero(tile) memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile])
#define _tile_loadd(tile, base, stride) emulated_load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated_store(tile, base, stride)
#define _tile_dpbf16ps(c, a, b) emulated_product(c, a, b)

static _Thread_local _Alignas(64) char emulated_tiles[8][16][64];

static inline void emulated_load(int tile, const void *base, long stride)
{
    for (int row = 0; row < 16; row++)
        memcpy(emulated_tiles[tile][row], (const char *)base + row * stride, 64);
}

static inline void emulated_store(int tile, void *base, long stride)
{
    for (int row = 0; row < 16; row++)
        memcpy((char *)base + row * stride, emulated_tiles[tile][row], 64);
}

/* C += A B. Sums the 16 products of the pairs' first elements and those of the second elements separately. Then adds
 * both sums, and the result to C. */
static inline void emulated_product(int c, int a, int b)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    for (int row = 0; row < 16; row++) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int pair = 0; pair < 16; pair++) {
            int two;
            memcpy(&two, emulated_tiles[a][row] + 4 * pair, 4);
            const __m512i x = _mm512_set1_epi32(two), y = _mm512_load_si512(emulated_tiles[b][pair]);
            even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                                   _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), even);
            odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper)),
                                  _mm512_castsi512_ps(_mm512_and_si512(y, upper)), odd);
        }
        _mm512_store_ps(emulated_tiles[c][row],
                        _mm512_add_ps(_mm512_load_ps(emulated_tiles[c][row]), _mm512_add_ps(even, odd)));
    }
}

#endif
