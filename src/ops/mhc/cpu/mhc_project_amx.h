/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_project_amx.h: the projection of pre's forward on AMX tiles, for bf16 x. It replaces mhc_project_vectors.h in the
 * copy of mhc_pre_fwd_tiles.c for AMX.
 *
 * W is packed as the sum of three bf16 terms, which is float32's precision. bf16 x is exact. A group is GROUP tokens, two
 * tiles. The tiles are loaded from x itself, if the group is full, its tokens have the same distance, and the chunk has
 * whole steps of STEP columns. Otherwise they are loaded from a copy that is padded with zeros. A pass multiplies the
 * group by a pair of tiles of W: 32 rows. A step of STEP columns of a pass has 12 tile products: 2 tiles of x, 2 of W, 3
 * terms, the smallest first. Between the products, vector instructions add the squares of the group and prefetch the
 * next chunk of x. The first pass does this.
 *
 * An accumulator sums MHC_AMX_CHUNK columns. Then it is added to the sums of earlier chunks in float32. A chunk of W
 * stays in the L1 cache for all groups of the block. */
#ifndef COT_MHC_PROJECT_AMX_H
#define COT_MHC_PROJECT_AMX_H

#include "mhc_pack.h"
#include "simd/matmul.h"

enum {
    BLOCK_TOKENS = MHC_AMX_TOKENS,
    BLOCK_UNIT = 32,
    GROUP = 32,                /* tokens: two tiles */
    STEP = 32,                 /* columns of a tile of x */
    PAIR_ROWS = 32,            /* rows of W in a pass: two tiles */
    TERMS = MHC_AMX_TERMS,     /* of W */
    TILE_ELEMENTS = 16 * STEP, /* bf16 of a tile */
    TILE_ROW = STEP * 2,       /* bytes of a row of a tile */
    MAX_PAIRS = (MHC_MAX_M + PAIR_ROWS - 1) / PAIR_ROWS,
    SQUARED = GROUP * STEP / MHC_AMX_CHUNK /* tokens whose squares are added in a step of a whole chunk */
};

typedef struct projection {
    const mhc_sizes *sizes;
    const mhc_chunks *chunks;
    const void *weights;
    cot_dtype dtype;
    int64_t stream_stride, token_count;
    const char *x_rows[BLOCK_TOKENS], *next_x_rows[BLOCK_TOKENS]; /* of this block; of the next one, or of this one */
    _Alignas(64) float sums[MAX_PAIRS][BLOCK_TOKENS][PAIR_ROWS], products[GROUP][PAIR_ROWS];
    _Alignas(64) uint16_t copy[GROUP][MHC_AMX_CHUNK];
    vf square_sums[BLOCK_TOKENS];
    /* The results: h_mix, and the sum of the squares of each token. */
    _Alignas(64) float h_mix[MHC_MAX_M][BLOCK_TOKENS], squares[BLOCK_TOKENS];
} projection;

/* ---- packed W ----------------------------------------------------------------------------------------- */

/* Elements of a pass over a whole chunk. */
static int64_t pass_elements(void)
{
    return (int64_t)MHC_AMX_CHUNK / STEP * TERMS * 2 * TILE_ELEMENTS;
}

/* Tiles of 16 rows of W in a pass: 2, or 1 in the last pass. */
static int64_t pass_tiles(int64_t M, int64_t pass)
{
    return cot_clamp(cot_ceil_div(M - pass * PAIR_ROWS, 16), 0, 2);
}

/* Packs a chunk of W as [passes][steps][terms, the smallest first][tiles][16 pairs of columns][16 rows][2]. */
static void pack_chunk(void *context, int64_t chunk)
{
    const mhc_packing *p = context;
    const int64_t M = p->sizes->M;
    uint16_t *const packed = (uint16_t *)p->weights + chunk * mhc_amx_weight_elements(M);
    const int64_t begin = chunk % p->chunks.per_stream * MHC_AMX_CHUNK;
    const int64_t columns = cot_round_up(cot_clamp(p->sizes->D - begin, 0, MHC_AMX_CHUNK), STEP);
    for (int64_t first = 0; first < M; first += 16) {
        const int64_t pass = first / PAIR_ROWS, tiles = pass_tiles(M, pass), tile = first % PAIR_ROWS / 16;
        float w[16][MHC_AMX_CHUNK];
        memset(w, 0, sizeof w);
        for (int64_t row = 0; row < 16 && first + row < M; row++)
            mhc_pack_row(w[row], p, chunk, first + row);
        uint16_t *const out = packed + pass * pass_elements() + tile * TILE_ELEMENTS;
        for (int64_t d = 0; d < columns; d += 16) {
            vf v[16];
            for (int row = 0; row < 16; row++)
                v[row] = v_load(w[row] + d);
            mt_transpose(v);
            uint16_t *const half = out + d / STEP * TERMS * tiles * TILE_ELEMENTS + d % STEP / 2 * STEP;
            for (int pair = 0; pair < 8; pair++)
                mt_store_terms(half + (TERMS - 1) * tiles * TILE_ELEMENTS + pair * STEP, TERMS, -tiles * TILE_ELEMENTS,
                               v[2 * pair], v[2 * pair + 1], true);
        }
    }
}

/* ---- products ----------------------------------------------------------------------------------------- */

/* A group's tokens of a chunk of x: its rows are `stride` bytes apart. */
typedef struct x_group {
    const char *x;
    int64_t stride, steps;
    int64_t next; /* bytes to the next chunk; an error affects only the prefetch */
} x_group;

/* Adds the squares of tokens [begin, end) of the group, and prefetches the next chunk. steps: g->steps, a constant in
 * the loops of whole chunks. */
V_INLINE void add_squares(vf *square_sums, const x_group *g, int64_t begin, int64_t end, int64_t steps)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    for (int64_t t = begin; t < end; t++) {
        vf evens = v_zero(), odds = v_zero();
        const char *x = g->x + t * g->stride;
        V_UNROLL
        for (int64_t step = 0; step < steps; step++, x += TILE_ROW) {
            const __m512i two = _mm512_loadu_si512(x);
            const vf even = _mm512_castsi512_ps(_mm512_slli_epi32(two, 16)),
                     odd = _mm512_castsi512_ps(_mm512_and_si512(two, upper));
            evens = v_fma(even, even, evens);
            odds = v_fma(odd, odd, odds);
            v_prefetch_l2((const void *)((uintptr_t)x + (uintptr_t)g->next));
        }
        square_sums[t] = v_add(square_sums[t], v_add(evens, odds));
    }
}

/* products = x times a pass of W: GROUP tokens, `tiles` tiles of 16 rows. Adds the squares, unless square_sums is NULL.
 * The asm barriers are needed because gcc's tile loads do not declare that they read memory. */
V_INLINE void project_tiles(projection *s, const x_group *g, const uint16_t *w, vf *square_sums, int tiles)
{
    enum { ROW = PAIR_ROWS * sizeof(float) };
    __asm__ volatile("" : : : "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < g->steps; step++) {
        _tile_loadd(4, g->x + step * TILE_ROW, g->stride);
        _tile_loadd(5, g->x + step * TILE_ROW + 16 * g->stride, g->stride);
        V_UNROLL
        for (int term = 0; term < TERMS; term++, w += tiles * TILE_ELEMENTS) {
            const int64_t t = SQUARED * step + SQUARED * term / TERMS,
                          end = SQUARED * step + SQUARED * (term + 1) / TERMS;
            _tile_loadd(6, w, TILE_ROW);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            if (square_sums != NULL)
                add_squares(square_sums, g, t, t + 1, MHC_AMX_CHUNK / STEP);
            if (tiles == 2) {
                _tile_loadd(7, w + TILE_ELEMENTS, TILE_ROW);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
            if (square_sums != NULL)
                add_squares(square_sums, g, t + 1, end, MHC_AMX_CHUNK / STEP);
        }
    }
    _tile_stored(0, s->products, ROW);
    _tile_stored(2, s->products[16], ROW);
    if (tiles == 2) {
        _tile_stored(1, s->products[0] + 16, ROW);
        _tile_stored(3, s->products[16] + 16, ROW);
    }
    __asm__ volatile("" : : : "memory");
}

static void project_group(projection *s, const x_group *g, int64_t t, const uint16_t *w)
{
    const int64_t M = s->sizes->M;
    if (g->steps * STEP < MHC_AMX_CHUNK)
        add_squares(s->square_sums + t, g, 0, GROUP, g->steps);
    for (int64_t pass = 0; pass * PAIR_ROWS < M; pass++, w += pass_elements()) {
        vf *const square_sums = pass == 0 && g->steps * STEP == MHC_AMX_CHUNK ? s->square_sums + t : NULL;
        if (pass_tiles(M, pass) == 2) {
            project_tiles(s, g, w, square_sums, 2);
            for (int64_t row = 0; row < GROUP; row++)
                for (int64_t j = 0; j < PAIR_ROWS; j += VW)
                    v_store(s->sums[pass][t + row] + j,
                            v_add(v_load(s->sums[pass][t + row] + j), v_load(s->products[row] + j)));
        } else {
            project_tiles(s, g, w, square_sums, 1);
            for (int64_t row = 0; row < GROUP; row++)
                v_store(s->sums[pass][t + row], v_add(v_load(s->sums[pass][t + row]), v_load(s->products[row])));
        }
    }
}

/* Bytes from one token of a group to the next. 0: the distances differ, or the group is not full. */
static int64_t group_stride(const projection *s, int64_t t)
{
    if (s->token_count - t < GROUP)
        return 0;
    const uintptr_t first = (uintptr_t)s->x_rows[t], stride = (uintptr_t)s->x_rows[t + 1] - first;
    for (int64_t r = 2; r < GROUP; r++)
        if ((uintptr_t)s->x_rows[t + r] - first != (uintptr_t)r * stride)
            return 0;
    return (int64_t)stride;
}

static void project_block(projection *s)
{
    const int64_t M = s->sizes->M, groups = cot_ceil_div(s->token_count, GROUP);
    int64_t strides[BLOCK_TOKENS / GROUP];
    for (int64_t pass = 0; pass * PAIR_ROWS < M; pass++)
        memset(s->sums[pass], 0, (size_t)(groups * GROUP) * sizeof *s->sums[pass]);
    for (int64_t t = 0; t < groups * GROUP; t++)
        s->square_sums[t] = v_zero();
    for (int64_t group = 0; group < groups; group++)
        strides[group] = group_stride(s, group * GROUP);
    for (int64_t chunk = 0; chunk < s->chunks->count; chunk++) {
        const int64_t columns =
            cot_clamp(s->sizes->D - chunk % s->chunks->per_stream * MHC_AMX_CHUNK, 0, MHC_AMX_CHUNK);
        const int64_t offset = mhc_chunk_offset(s->chunks, chunk, s->stream_stride) * 2;
        const bool last = chunk + 1 == s->chunks->count;
        const int64_t next_offset = last ? 0 : mhc_chunk_offset(s->chunks, chunk + 1, s->stream_stride) * 2;
        const uint16_t *const w = (const uint16_t *)s->weights + chunk * mhc_amx_weight_elements(M);
        for (int64_t t = 0; t < s->token_count; t += GROUP) {
            const char *next = (last ? s->next_x_rows : s->x_rows)[t];
            x_group g = {
                .x = s->x_rows[t] + offset, .stride = strides[t / GROUP], .steps = cot_ceil_div(columns, STEP)};
            if (g.stride == 0 || columns % STEP != 0) {
                memset(s->copy, 0, sizeof s->copy);
                for (int64_t r = 0; r < cot_min(GROUP, s->token_count - t); r++)
                    memcpy(s->copy[r], s->x_rows[t + r] + offset, (size_t)columns * 2);
                g.x = (const char *)s->copy;
                g.stride = sizeof *s->copy;
            }
            g.next = (int64_t)((uintptr_t)next - (uintptr_t)g.x) + next_offset;
            project_group(s, &g, t, w);
        }
    }
    for (int64_t t = 0; t < groups * GROUP; t++) {
        for (int64_t j = 0; j < M; j++)
            s->h_mix[j][t] = s->sums[j / PAIR_ROWS][t][j % PAIR_ROWS];
        s->squares[t] = v_sum(s->square_sums[t]);
    }
}

#endif
