/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_project_vectors.h: the projection of pre's forward by vector instructions, for mhc_pre_fwd_tiles.c.
 *
 * W is packed in chunks of MHC_CHUNK columns of one stream. A vector of packed W has 4 columns of VECTOR_ROWS rows. So
 * the lanes of a sum are columns of several rows, and 6 sums hold all 24 rows of n = 4 on AVX-512. For each chunk, a
 * tile of tokens reads its x once, from the L2 cache, and multiplies it by all rows of W, in passes of up to MAX_VECTORS
 * vectors. Each load of W is used for all tokens of the tile. The first pass converts x to f32, into the L1 cache. If
 * there is one pass, f32 chunks of whole steps are read in place.
 *
 * A lane sums at most MHC_CHUNK/4 terms in one run, then the run is added to the earlier runs. The lanes are added
 * once, at the end. The next chunk of x is prefetched during the products; after the last chunk it is the first chunk
 * of the next block. */
#ifndef COT_MHC_PROJECT_VECTORS_H
#define COT_MHC_PROJECT_VECTORS_H

#include "mhc_pack.h"

enum {
    BLOCK_TOKENS = MHC_TOKENS,
    BLOCK_UNIT = 4,
    /* On AVX-512 the sums and operands of the products fit in 32 registers: 24 sums, 4 x, 1 w. Only read_columns uses
     * the 4 sums of squares, so the compiler may spill them during the products. AVX2 has 16 registers: 12 sums, 2 x,
     * 1 w. */
    TILE_TOKENS = VW == 16 ? 4 : 2,
    VECTOR_ROWS = VW / 4,  /* rows of W in a vector, with 4 columns each */
    STEP_COLUMNS = 2 * VW, /* columns that are read together */
    MAX_VECTORS = 6,       /* of W in a pass over x */
    LINE = 64              /* bytes of a cache line */
};

/* A block of up to BLOCK_TOKENS tokens. The caller sets the members up to next_x_rows. */
typedef struct projection {
    const mhc_sizes *sizes;
    const mhc_chunks *chunks;
    const void *weights; /* packed W */
    cot_dtype dtype;
    int64_t stream_stride, token_count;                           /* elements from one stream of x to the next */
    const char *x_rows[BLOCK_TOKENS], *next_x_rows[BLOCK_TOKENS]; /* of this block; of the next one, or of this one */
    _Alignas(64) float x[TILE_TOKENS][MHC_CHUNK];
    vf sums[BLOCK_TOKENS][MHC_MAX_M / VECTOR_ROWS], square_sums[BLOCK_TOKENS];
    /* The results: W x, and the sum of the squares of each token. */
    _Alignas(64) float h_mix[MHC_MAX_M][BLOCK_TOKENS], squares[BLOCK_TOKENS];
} projection;

/* ---- packed W ----------------------------------------------------------------------------------------- */

/* Columns of a chunk within D. */
static int64_t chunk_columns(const mhc_chunks *chunks, const mhc_sizes *sizes, int64_t chunk)
{
    return cot_clamp(sizes->D - chunk % chunks->per_stream * MHC_CHUNK, 0, MHC_CHUNK);
}

/* Vectors of VECTOR_ROWS rows of W. */
static int64_t vectors_of(int64_t M)
{
    return cot_ceil_div(M, VECTOR_ROWS);
}

static int64_t passes_of(int64_t M)
{
    return cot_ceil_div(vectors_of(M), MAX_VECTORS);
}

static int64_t first_vector(int64_t M, int64_t pass)
{
    return vectors_of(M) * pass / passes_of(M);
}

/* Packs a chunk of W as [passes][columns / 4][vectors of a pass][VECTOR_ROWS][4], in the order in which a pass reads
 * it. */
static void pack_chunk(void *context, int64_t chunk)
{
    const mhc_packing *p = context;
    const int64_t M = p->sizes->M;
    float *const packed = (float *)p->weights + chunk * mhc_packed_rows(M) * MHC_CHUNK;
    const int64_t columns = cot_round_up(chunk_columns(&p->chunks, p->sizes, chunk), STEP_COLUMNS);
    for (int64_t pass = 0; pass < passes_of(M); pass++) {
        const int64_t first = first_vector(M, pass), vectors = first_vector(M, pass + 1) - first;
        float *const out = packed + first * VECTOR_ROWS * MHC_CHUNK;
        for (int64_t row = 0; row < vectors * VECTOR_ROWS; row++) {
            float w[MHC_CHUNK];
            if (first * VECTOR_ROWS + row < M)
                mhc_pack_row(w, p, chunk, first * VECTOR_ROWS + row);
            else
                memset(w, 0, (size_t)columns * sizeof *w);
            for (int64_t d = 0; d < columns; d += 4)
                memcpy(out + d * vectors * VECTOR_ROWS + row * 4, w + d, 4 * sizeof *w);
        }
    }
}

/* ---- projection -------------------------------------------------------------------------------------- */

/* A chunk of x. */
typedef struct x_chunk {
    int64_t offset, columns;        /* bytes from the start of a row of x; columns within D */
    const char *const *next_x_rows; /* of the next chunk */
    int64_t next_offset;
} x_chunk;

/* How a pass reads x. Unless the source is IN_PLACE, the first pass converts x to f32, into the L1 cache. Later passes
 * read that copy. */
typedef enum x_source {
    IN_PLACE, /* f32, whole steps of STEP_COLUMNS columns, one pass */
    FROM_F32,
    FROM_F16,
    FROM_BF16,
    CONVERTED, /* by an earlier pass */
    SOURCES
} x_source;

/* Reads columns [d, d+STEP_COLUMNS) of a tile, in the first pass: converts them to f32, adds their squares, and
 * prefetches the same columns of the next chunk, `next` bytes farther. */
V_INLINE void read_columns(projection *s, vf squares[TILE_TOKENS], const char *const x[TILE_TOKENS], int64_t next,
                           int64_t d, int64_t columns, x_source source)
{
    const cot_dtype dtype = source == FROM_F16 ? COT_F16 : source == FROM_BF16 ? COT_BF16 : COT_F32;
    const int64_t size = mhc_element_size(dtype);
    V_UNROLL
    for (int a = 0; a < TILE_TOKENS; a++)
        V_UNROLL
    for (int64_t column = d; column < d + STEP_COLUMNS; column += VW) {
        const char *at = x[a] + column * size;
        const vf values = source == IN_PLACE ? v_load(at) : mhc_load_partial(at, dtype, columns - column);
        if (source != IN_PLACE)
            v_store(s->x[a] + column, values);
        squares[a] = v_fma(values, values, squares[a]);
        if (column * size % LINE < VW * size)
            v_prefetch_l2((const void *)((uintptr_t)at + (uintptr_t)next));
    }
}

/* sums[t][first+b] += x[t] . w[b] over the chunk, for tokens [t, t+TILE_TOKENS). A vector of w has 4 columns of
 * VECTOR_ROWS rows. x is read one step ahead of the products. vectors and source are constants. */
V_INLINE void project_tile(projection *s, const x_chunk *chunk, int64_t t, int64_t first, const float *w, int vectors,
                           x_source source)
{
    const char *x[TILE_TOKENS];
    vf sums[TILE_TOKENS][MAX_VECTORS], squares[TILE_TOKENS];
    V_UNROLL
    for (int a = 0; a < TILE_TOKENS; a++) {
        squares[a] = v_zero();
        x[a] = s->x_rows[t + a] + chunk->offset;
        V_UNROLL
        for (int b = 0; b < vectors; b++)
            sums[a][b] = v_zero();
    }
    /* The distance of the tile's first token serves all its tokens. It assumes equal distances; an error affects only
     * the prefetch. */
    const int64_t next = (int64_t)((uintptr_t)chunk->next_x_rows[t] - (uintptr_t)x[0]) + chunk->next_offset;
    const int64_t columns = chunk->columns;
    if (source != CONVERTED)
        read_columns(s, squares, x, next, 0, columns, source);
    for (int64_t d = 0; d < columns; d += STEP_COLUMNS) {
        if (source != CONVERTED && d + STEP_COLUMNS < columns)
            read_columns(s, squares, x, next, d + STEP_COLUMNS, columns, source);
        for (int64_t column = d; column < d + STEP_COLUMNS; column += 4) {
            vf xs[TILE_TOKENS];
            V_UNROLL
            for (int a = 0; a < TILE_TOKENS; a++)
                xs[a] = v_repeat4((source == IN_PLACE ? (const float *)x[a] : s->x[a]) + column);
            V_UNROLL
            for (int b = 0; b < vectors; b++, w += VW) {
                const vf ws = v_in_register(v_load(w));
                V_UNROLL
                for (int a = 0; a < TILE_TOKENS; a++)
                    sums[a][b] = v_fma(xs[a], ws, sums[a][b]);
            }
        }
    }
    V_UNROLL
    for (int a = 0; a < TILE_TOKENS; a++) {
        s->square_sums[t + a] = v_add(s->square_sums[t + a], squares[a]);
        V_UNROLL
        for (int b = 0; b < vectors; b++)
            s->sums[t + a][first + b] = v_add(s->sums[t + a][first + b], sums[a][b]);
    }
}

typedef void tile_projection(projection *s, const x_chunk *chunk, int64_t t, int64_t first, const float *w);

/* clang-format off */
#define PROJECT(vectors, source)                                                                                     \
    static void project_##vectors##_##source(projection *s, const x_chunk *chunk, int64_t t, int64_t first,      \
                                             const float *w)                                                        \
    {                                                                                                                \
        project_tile(s, chunk, t, first, w, vectors, source);                                                       \
    }
#define PROJECT_ALL(source) \
    PROJECT(1, source) PROJECT(2, source) PROJECT(3, source) PROJECT(4, source) PROJECT(5, source) PROJECT(6, source)
PROJECT_ALL(IN_PLACE)
PROJECT_ALL(FROM_F32)
PROJECT_ALL(FROM_F16)
PROJECT_ALL(FROM_BF16)
PROJECT_ALL(CONVERTED)

#define PROJECTIONS(source)                                                                                          \
    [source] = {NULL, project_1_##source, project_2_##source, project_3_##source, project_4_##source,               \
                project_5_##source, project_6_##source}
static tile_projection *const PROJECTIONS_OF[SOURCES][MAX_VECTORS + 1] = {
    PROJECTIONS(IN_PLACE), PROJECTIONS(FROM_F32), PROJECTIONS(FROM_F16), PROJECTIONS(FROM_BF16),
    PROJECTIONS(CONVERTED)};
/* clang-format on */

static void project_chunk(projection *s, int64_t chunk)
{
    static const x_source converting[] = {
        [COT_F32 - COT_F32] = FROM_F32, [COT_F16 - COT_F32] = FROM_F16, [COT_BF16 - COT_F32] = FROM_BF16};
    const mhc_chunks *chunks = s->chunks;
    const int64_t M = s->sizes->M, passes = passes_of(M), size = mhc_element_size(s->dtype);
    const bool last = chunk + 1 == chunks->count;
    const x_chunk x = {.offset = mhc_chunk_offset(chunks, chunk, s->stream_stride) * size,
                       .columns = chunk_columns(chunks, s->sizes, chunk),
                       .next_x_rows = last ? s->next_x_rows : s->x_rows,
                       .next_offset = last ? 0 : mhc_chunk_offset(chunks, chunk + 1, s->stream_stride) * size};
    const bool in_place = passes == 1 && s->dtype == COT_F32 && x.columns % STEP_COLUMNS == 0;
    const float *const weights = (const float *)s->weights + chunk * mhc_packed_rows(M) * MHC_CHUNK;
    for (int64_t t = 0; t < s->token_count; t += TILE_TOKENS)
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t first = first_vector(M, pass), vectors = first_vector(M, pass + 1) - first;
            const x_source source = in_place ? IN_PLACE : pass == 0 ? converting[s->dtype - COT_F32] : CONVERTED;
            PROJECTIONS_OF[source][vectors](s, &x, t, first, weights + first * VECTOR_ROWS * MHC_CHUNK);
        }
}

/* Adds the sums to h_mix and clears the sums. */
static void flush_sums(projection *s)
{
    const int64_t M = s->sizes->M;
    for (int64_t t = 0; t < s->token_count; t++)
        for (int64_t j = 0; j < M; j += VECTOR_ROWS) {
            float lanes[VW];
            v_store(lanes, s->sums[t][j / VECTOR_ROWS]);
            for (int64_t r = 0; r < VECTOR_ROWS && j + r < M; r++)
                s->h_mix[j + r][t] += (lanes[4 * r] + lanes[4 * r + 1]) + (lanes[4 * r + 2] + lanes[4 * r + 3]);
            s->sums[t][j / VECTOR_ROWS] = v_zero();
        }
}

static void project_block(projection *s)
{
    const int64_t M = s->sizes->M;
    memset(s->h_mix, 0, (size_t)M * sizeof *s->h_mix);
    /* A last tile that is not full repeats the last token. */
    for (int64_t t = s->token_count; t < cot_round_up(s->token_count, TILE_TOKENS); t++) {
        s->x_rows[t] = s->x_rows[t - 1];
        s->next_x_rows[t] = s->next_x_rows[t - 1];
    }
    for (int64_t t = 0; t < cot_round_up(s->token_count, TILE_TOKENS); t++) {
        s->square_sums[t] = v_zero();
        for (int64_t j = 0; j < M; j += VECTOR_ROWS)
            s->sums[t][j / VECTOR_ROWS] = v_zero();
    }
    for (int64_t chunk = 0; chunk < s->chunks->count; chunk++) {
        project_chunk(s, chunk);
        if (VW < 16 && (chunk + 1) % s->chunks->per_stream == 0) /* with few lanes, each lane sums more runs */
            flush_sums(s);
    }
    flush_sums(s);
    for (int64_t t = 0; t < s->token_count; t++)
        s->squares[t] = v_sum(s->square_sums[t]);
}

#endif
