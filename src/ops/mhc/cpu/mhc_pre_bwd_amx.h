/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_amx.h: the products of pre's backward on AMX tiles, for bf16 x. It is a part of mhc_pre_bwd_tiles.c, and
 * replaces that file's vector products in its copy for AMX.
 *
 *   dx    [tokens][rows of W] times [rows of W][columns]. Two bf16 terms each of dh_mix and W, without the product of
 *         the second terms: the error of an element is at most 2^-15 of the sum of its absolute products.
 *   dphi  [rows of W][tokens] times [tokens][columns]. bf16 x is exact, dh_mix is the sum of three bf16 terms.
 *
 * A group is GROUP tokens. Two tiles are multiplied by two tiles, into four accumulators. dh_mix
 * is multiplied by 2^24 before it is split, because tile products treat subnormal numbers as zero. dphi sums all groups
 * of the block in the accumulators. During the products, vector instructions finish the result before, and prepare x of
 * the next chunk. */
#ifndef COT_MHC_PRE_BWD_AMX_H
#define COT_MHC_PRE_BWD_AMX_H

enum {
    GROUP = 32,              /* tokens: two tiles */
    HALF = 32,               /* columns: two tiles */
    PANEL_ROWS = 32,         /* rows of W that a tile of dx sums */
    TILE_ELEMENTS = 16 * 32, /* bf16 of a tile */
    TILE_ROW = 64,           /* bytes of a row of a tile */
    DX_TERMS = MHC_AMX_DX_TERMS,
    DPHI_TERMS = MHC_AMX_TERMS,
    CHUNK = MHC_AMX_BWD_CHUNK, /* columns */
    RESULT_ROW = CHUNK * sizeof(float)
};

static const float dh_mix_scale = 0x1p24f, inverse_scale = 0x1p-24f;

static int64_t panels_of(int64_t M)
{
    return cot_ceil_div(M, PANEL_ROWS);
}

static int64_t weight_elements(const backward_context *c)
{
    return mhc_amx_bwd_weight_elements(c->problem->sizes.M);
}

/* ---- packed W ----------------------------------------------------------------------------------------- */

/* Packs a chunk of W as [halves][panels][terms][tiles][16 pairs of rows][16 columns][2]. */
static void pack_chunk(void *context, int64_t chunk)
{
    const mhc_packing *p = context;
    const int64_t M = p->sizes->M;
    uint16_t *const packed = (uint16_t *)p->weights + chunk * mhc_amx_bwd_weight_elements(M);
    for (int64_t j = 0; j < panels_of(M) * PANEL_ROWS; j += 2) {
        float rows[2][CHUNK];
        memset(rows, 0, sizeof rows);
        for (int64_t r = 0; r < 2 && j + r < M; r++)
            mhc_pack_row(rows[r], p, chunk, j + r);
        for (int64_t d = 0; d < CHUNK; d += 16) {
            const int64_t panel = d / HALF * panels_of(M) + j / PANEL_ROWS;
            uint16_t *const tile = packed + (panel * DX_TERMS * 2 + d % HALF / 16) * TILE_ELEMENTS;
            mt_store_terms(tile + j % PANEL_ROWS / 2 * 32, DX_TERMS, 2 * TILE_ELEMENTS, v_load(rows[0] + d),
                           v_load(rows[1] + d), true);
        }
    }
}

/* ---- tiles of dh_mix ---------------------------------------------------------------------------------- */

/* Rows [j, j+16) and tokens [t, t+16) of 2^24 dh_mix. Rows beyond M are 0. */
V_INLINE void load_dh_mix(vf v[16], const backward_block *s, int64_t j, int64_t t)
{
    const int64_t M = s->c->problem->sizes.M;
    for (int64_t r = 0; r < 16; r++)
        v[r] = j + r < M ? v_mul(v_load(s->dh_mix[j + r] + t), v_set1(dh_mix_scale)) : v_zero();
}

/* Splits dh_mix of the block: for dx [groups][panels][terms][GROUP tokens][PANEL_ROWS], for dphi [groups][tiles of 16
 * rows][terms][16 rows][GROUP tokens]. */
static void split_dh_mix(backward_block *s)
{
    const int64_t M = s->c->problem->sizes.M;
    uint16_t *dx = s->dx_tiles, *dphi = s->dphi_tiles;
    for (int64_t group = 0; group * GROUP < s->count; group++) {
        for (int64_t panel = 0; panel < panels_of(M); panel++, dx += DX_TERMS * GROUP * PANEL_ROWS)
            for (int64_t t = 0; t < GROUP; t += 16) {
                vf low[16], high[16];
                load_dh_mix(low, s, panel * PANEL_ROWS, group * GROUP + t);
                load_dh_mix(high, s, panel * PANEL_ROWS + 16, group * GROUP + t);
                mt_transpose(low);
                mt_transpose(high);
                for (int64_t r = 0; r < 16; r++)
                    mt_store_terms(dx + (t + r) * PANEL_ROWS, DX_TERMS, GROUP * PANEL_ROWS, low[r], high[r], false);
            }
        for (int64_t j = 0; j < M; j += 16, dphi += DPHI_TERMS * TILE_ELEMENTS) {
            vf low[16], high[16];
            load_dh_mix(low, s, j, group * GROUP);
            load_dh_mix(high, s, j, group * GROUP + 16);
            for (int64_t r = 0; r < 16; r++)
                mt_store_terms(dphi + r * GROUP, DPHI_TERMS, TILE_ELEMENTS, low[r], high[r], false);
        }
    }
}

/* ---- work that overlaps the products ------------------------------------------------------------------ */

/* dx of tokens [t+begin, t+end), from 2^24 dh_mix' W. whole: all columns are within D. */
V_INLINE void store_dx(const backward_block *s, const column_chunk *chunk, float (*results)[CHUNK], int64_t t,
                       int64_t begin, int64_t end, bool whole)
{
    enum { SIZE = 2 };
    const int64_t D = s->c->problem->sizes.D, i = chunk->i, columns = whole ? CHUNK : D - chunk->d;
    const int64_t x_offset = (i * s->c->x_stream + chunk->d) * SIZE;
    const int64_t dx_offset = (i * s->c->dx_stream + chunk->d) * SIZE;
    const int64_t dx_post_offset = (i * s->c->problem->args.dx_post.stride[2] + chunk->d) * SIZE;
    const vf scale = v_set1(inverse_scale);
    for (int64_t r = begin; r < cot_min(end, s->count - t); r++) {
        const char *x = s->x_rows[t + r] + x_offset, *dh_in = s->dh_in[t + r] + chunk->d * SIZE;
        const char *dx_post = s->dx_post[t + r];
        char *out = s->dx[t + r] + dx_offset;
        const vf factor = v_set1(s->factor[t + r]), h_pre = v_set1(s->h_pre[i][t + r]);
        if (dx_post != NULL)
            v_prefetch_range(dx_post + chunk->next_dx_post, CHUNK * SIZE);
        for (int64_t d = 0; d < columns; d += 2 * VW) {
            vf dx[2];
            V_UNROLL
            for (int v = 0; v < 2; v++) {
                const int64_t at = d + v * VW, n = whole ? VW : columns - at;
                vf sum = v_mul(factor, mhc_load_partial(x + at * SIZE, COT_BF16, n));
                sum = v_fma(scale, v_load(results[r] + at), sum);
                dx[v] = v_fma(h_pre, mhc_load_partial(dh_in + at * SIZE, COT_BF16, n), sum);
                if (dx_post != NULL)
                    dx[v] = v_add(dx[v], mhc_load_partial(dx_post + dx_post_offset + at * SIZE, COT_BF16, n));
            }
            mhc_store_pair(out + d * SIZE, COT_BF16, dx[0], dx[1], columns - d, s->c->stream_stores);
        }
    }
}

/* Adds rows [j+begin, j+end) of 2^24 dh_mix x' to dphi_part. Its columns are in the order of pair_tokens. */
V_INLINE void add_dphi(const backward_block *s, const column_chunk *chunk, float (*results)[CHUNK], int64_t j,
                       int64_t begin, int64_t end)
{
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const vf scale = v_set1(inverse_scale);
    const int64_t M = s->c->problem->sizes.M;
    for (int64_t r = begin; r < cot_min(end, M - j); r++) {
        float *q = s->dphi_part + (chunk->number * M + j + r) * CHUNK;
        for (int64_t d = 0; d < chunk->columns; d += HALF, q += HALF) {
            const vf low = v_load(results[r] + d), high = v_load(results[r] + d + VW);
            const vf sums[2] = {_mm512_permutex2var_ps(low, first, high), _mm512_permutex2var_ps(low, second, high)};
            V_UNROLL
            for (int v = 0; v < 2; v++)
                v_store(q + v * VW, s->first ? v_mul(scale, sums[v]) : v_fma(scale, sums[v], v_load(q + v * VW)));
        }
    }
}

/* Interleaves the x of pairs [begin, end) of tokens: [parts of HALF columns][groups][tiles][16 pairs][16 columns][2]. A
 * tile has every other 4 columns, in the order of the unpack instructions. Tokens and columns beyond the end are 0. */
V_INLINE void pair_tokens(const backward_block *s, const column_chunk *chunk, uint16_t *x_tiles, int64_t begin,
                          int64_t end)
{
    const int64_t offset = (chunk->i * s->c->x_stream + chunk->d) * 2, D = s->c->problem->sizes.D;
    for (int64_t pair = begin; pair < end; pair++) {
        const int64_t t = 2 * pair;
        uint16_t *to = x_tiles + t / GROUP * 2 * TILE_ELEMENTS + t % GROUP * 16;
        for (int64_t d = 0; d < chunk->columns; d += HALF, to += TOKENS * HALF) {
            const int64_t columns = cot_clamp(D - chunk->d - d, 0, HALF);
            const uint32_t mask = columns == HALF ? UINT32_MAX : (1u << columns) - 1;
            __m512i first = _mm512_setzero_si512(), second = first;
            if (t < s->count)
                first = _mm512_maskz_loadu_epi16(mask, s->x_rows[t] + offset + 2 * d);
            if (t + 1 < s->count)
                second = _mm512_maskz_loadu_epi16(mask, s->x_rows[t + 1] + offset + 2 * d);
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(first, second));
            _mm512_storeu_si512(to + TILE_ELEMENTS, _mm512_unpackhi_epi16(first, second));
        }
    }
}

/* Work that overlaps the products: the rows of the last result, and the pairs of tokens of the next chunk. */
typedef enum result_kind { NO_RESULT, DX_RESULT, DPHI_RESULT } result_kind;

typedef struct overlap {
    result_kind kind;
    column_chunk chunk;
    int64_t first; /* token or row of W */
    float (*results)[CHUNK];
    const column_chunk *next; /* NULL = no pairs */
    uint16_t *next_x_tiles;
} overlap;

/* Part i of `parts` of the work. */
static void run_overlap(const backward_block *s, const overlap *o, int64_t i, int64_t parts)
{
    const int64_t begin = 32 * i / parts, end = 32 * (i + 1) / parts;
    if (o->next != NULL) {
        const int64_t pairs = cot_round_up(s->count, GROUP) / 2;
        pair_tokens(s, o->next, o->next_x_tiles, pairs * i / parts, pairs * (i + 1) / parts);
    }
    if (o->kind == DPHI_RESULT)
        add_dphi(s, &o->chunk, o->results, o->first, begin, end);
    else if (o->kind == DX_RESULT && o->chunk.d + CHUNK <= s->c->problem->sizes.D)
        store_dx(s, &o->chunk, o->results, o->first, begin, end, true);
    else if (o->kind == DX_RESULT)
        store_dx(s, &o->chunk, o->results, o->first, begin, end, false);
}

/* ---- products ----------------------------------------------------------------------------------------- */

V_INLINE void clear_tiles(void)
{
    __asm__ volatile("" : : : "memory"); /* gcc's tile loads do not declare that they read memory */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Stores the four accumulators, or the first two with 16 rows, as columns [k, k+HALF). */
V_INLINE void store_tiles(float (*results)[CHUNK], int64_t k, int rows)
{
    _tile_stored(0, results[0] + k, RESULT_ROW);
    _tile_stored(1, results[0] + k + 16, RESULT_ROW);
    if (rows == 32) {
        _tile_stored(2, results[16] + k, RESULT_ROW);
        _tile_stored(3, results[16] + k + 16, RESULT_ROW);
    }
    __asm__ volatile("" : : : "memory");
}

/* Columns [k, k+HALF) of 2^24 dh_mix' W of a group. a, w: their tiles. */
V_INLINE void multiply_dx(const backward_block *s, float (*results)[CHUNK], const uint16_t *a, const uint16_t *w,
                          int64_t panels, int64_t k, const overlap *o)
{
    enum { TWO = 2 * TILE_ELEMENTS };
    const int64_t first = 3 * panels * k / HALF, parts = 3 * panels * (CHUNK / HALF);
#define LOAD_A(term)                          \
    _tile_loadd(4, a + (term)*TWO, TILE_ROW); \
    _tile_loadd(5, a + (term)*TWO + TILE_ELEMENTS, TILE_ROW);
#define LOAD_W(term)                          \
    _tile_loadd(6, w + (term)*TWO, TILE_ROW); \
    _tile_loadd(7, w + (term)*TWO + TILE_ELEMENTS, TILE_ROW);
    clear_tiles();
    for (int64_t panel = 0; panel < panels; panel++, a += DX_TERMS * TWO, w += DX_TERMS * TWO) {
        LOAD_A(1)
        LOAD_W(0)
        MT_FOUR_PRODUCTS
        run_overlap(s, o, first + 3 * panel, parts);
        LOAD_A(0)
        MT_FOUR_PRODUCTS
        run_overlap(s, o, first + 3 * panel + 1, parts);
        LOAD_W(1)
        MT_FOUR_PRODUCTS
        run_overlap(s, o, first + 3 * panel + 2, parts);
    }
    store_tiles(results, k, 32);
#undef LOAD_A
#undef LOAD_W
}

/* Columns [k, k+HALF) of 2^24 dh_mix x' of the block, for `tiles` (2 or 1) tiles of dh_mix. */
V_INLINE void multiply_dphi(const backward_block *s, float (*results)[CHUNK], const uint16_t *a, int64_t group_elements,
                            const uint16_t *x, int tiles, int64_t k, const overlap *o)
{
    const int64_t groups = cot_ceil_div(s->count, GROUP);
    const int64_t first = DPHI_TERMS * groups * k / HALF, parts = DPHI_TERMS * groups * (CHUNK / HALF);
    clear_tiles();
    for (int64_t group = 0; group < groups; group++, a += group_elements, x += 2 * TILE_ELEMENTS) {
        _tile_loadd(6, x, TILE_ROW);
        _tile_loadd(7, x + TILE_ELEMENTS, TILE_ROW);
        for (int term = DPHI_TERMS - 1; term >= 0; term--) {
            _tile_loadd(4, a + term * TILE_ELEMENTS, TILE_ROW);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (tiles == 2) {
                _tile_loadd(5, a + (DPHI_TERMS + term) * TILE_ELEMENTS, TILE_ROW);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            run_overlap(s, o, first + DPHI_TERMS * group + DPHI_TERMS - 1 - term, parts);
        }
    }
    store_tiles(results, k, 16 * tiles);
}

/* The other one of the two buffers for results. */
static float (*other_results(backward_block *s, const overlap *o))[CHUNK]
{
    return o->results == s->results[0] ? s->results[1] : s->results[0];
}

/* All products of a chunk. `o` is the work of the product before, then of the last product. */
static void multiply_chunk(backward_block *s, const column_chunk *chunk, const uint16_t *x_tiles, overlap *o)
{
    const int64_t M = s->c->problem->sizes.M, panels = panels_of(M);
    const int64_t dphi_tile = DPHI_TERMS * TILE_ELEMENTS, dphi_group = cot_ceil_div(M, 16) * dphi_tile;
    const int64_t dx_group = panels * DX_TERMS * 2 * TILE_ELEMENTS;
    for (int64_t j = 0; s->c->need_dphi && j < M; j += 32) {
        float(*const results)[CHUNK] = other_results(s, o);
        const uint16_t *const a = s->dphi_tiles + j / 16 * dphi_tile;
        for (int64_t k = 0; k < CHUNK; k += HALF)
            if (M - j > 16)
                multiply_dphi(s, results, a, dphi_group, x_tiles + k * TOKENS, 2, k, o);
            else
                multiply_dphi(s, results, a, dphi_group, x_tiles + k * TOKENS, 1, k, o);
        *o = (overlap){.kind = DPHI_RESULT, .chunk = *chunk, .first = j, .results = results};
    }
    for (int64_t group = 0; s->c->need_dx && group * GROUP < s->count; group++) {
        float(*const results)[CHUNK] = other_results(s, o);
        const uint16_t *const a = s->dx_tiles + group * dx_group, *w = chunk->weights;
        for (int64_t k = 0; k < CHUNK; k += HALF, w += dx_group)
            multiply_dx(s, results, a, w, panels, k, o);
        *o = (overlap){.kind = DX_RESULT, .chunk = *chunk, .first = group * GROUP, .results = results};
    }
}

static void backward_chunks(backward_block *s)
{
    const int64_t pairs = cot_round_up(s->count, GROUP) / 2, count = s->c->chunks.count;
    column_chunk chunk = chunk_of_step(s, 0);
    overlap o = {.kind = NO_RESULT};
    if (s->c->need_dphi)
        pair_tokens(s, &chunk, s->x_tiles[0], 0, pairs);
    for (int64_t step = 0; step < count; step++) {
        const column_chunk next = chunk_of_step(s, cot_min(step + 1, count - 1));
        if (s->c->need_dphi && step + 1 < count) {
            o.next = &next;
            o.next_x_tiles = s->x_tiles[(step + 1) % 2];
        }
        multiply_chunk(s, &chunk, s->x_tiles[step % 2], &o);
        chunk = next;
    }
    run_overlap(s, &o, 0, 1);
}

#endif
