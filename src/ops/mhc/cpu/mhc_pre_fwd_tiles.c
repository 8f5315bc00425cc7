/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_fwd_tiles.c: pre forward for contiguous d and n <= 8:
 *     h_mix = W x, W = phi * gamma [M, n*D], M = n*n + 2n
 *     inv_rms = 1 / sqrt(mean x^2 + norm_eps)      z = alpha * h_mix * inv_rms + bias
 *     h_in = sum_i h_pre[i] * x[i,:]
 * and the outputs that depend on z (cotangent/mhc.h), Sinkhorn included.
 *
 * First W is packed in chunks of MHC_CHUNK columns of one stream. A vector of packed W has 4 columns of VECTOR_ROWS
 * rows. So the lanes of a sum are columns of several rows, and 6 sums hold all 24 rows of n = 4 on AVX-512. A block
 * is up to MHC_TOKENS tokens. For each chunk, a tile of tokens reads its x once, from the L2 cache, and multiplies it
 * by all rows of W, in passes of up to MAX_VECTORS vectors. Each load of W is used for all tokens of the tile. The
 * first pass converts x to f32, into the L1 cache. If there is one pass, f32 chunks of whole steps are read in place.
 *
 * A lane sums at most MHC_CHUNK/4 terms in one run, then the run is added to the earlier runs. The lanes are added
 * once, at the end. The next chunk of x is prefetched during the products; after the last chunk it is the first chunk
 * of the next block. Coefficients are computed with tokens in lanes. h_in reads x again, from the L2 cache. In
 * post_pre, x is y: a block first computes its y, and reads it from a copy in the caches. */
#include "mhc_blocks.h"
#include "mhc_pack.h"
#include "mhc_sinkhorn.h"

#include <math.h>

cot_status V_NAME(mhc_pre_fwd_tiles)(cot_queue *, const void *, void *);

enum {
    /* On AVX-512 the sums and operands of the products fit in 32 registers: 24 sums, 4 x, 1 w. Only read_columns uses
     * the 4 sums of squares, so the compiler may spill them during the products. AVX2 has 16 registers: 12 sums, 2 x,
     * 1 w. */
    TILE_TOKENS = VW == 16 ? 4 : 2,
    VECTOR_ROWS = VW / 4,  /* rows of W in a vector, with 4 columns each */
    STEP_COLUMNS = 2 * VW, /* columns that are read together */
    MAX_VECTORS = 6,       /* of W in a pass over x */
    ITEMS_PER_THREAD = 8,  /* more items than threads balance the load */
    MAX_ITEM_BLOCKS = 8,
    LINE = 64 /* bytes of a cache line */
};

typedef struct forward_context {
    const mhc_pre_forward_problem *problem;
    const mhc_post_forward_problem *post; /* post_pre: computes x; NULL = x is given */
    mhc_chunks chunks;
    const float *weights;
    int64_t block_tokens, item_tokens; /* an item has several blocks when there are many tokens */
    bool stream_stores;
} forward_context;

/* The state of an item, in its thread's scratch. */
typedef struct forward_state {
    const forward_context *c;
    int64_t first_token, token_count;                         /* of this block */
    const char *x_rows[MHC_TOKENS], *next_x_rows[MHC_TOKENS]; /* of this block; of the next one, or of this one again */
    _Alignas(64) float x[TILE_TOKENS][MHC_CHUNK];
    vf sums[MHC_TOKENS][MHC_MAX_M / VECTOR_ROWS], squares[MHC_TOKENS];
    /* Rows 0..n-1: h_mix, then h_pre. Rows n..2n-1: h_mix, then h_post. Other rows: h_mix, then h_res_logits, then
     * h_res if it is an output. */
    _Alignas(64) float coefficients[MHC_MAX_M][MHC_TOKENS];
    _Alignas(64) float inv_rms[MHC_TOKENS];
} forward_state;

_Static_assert(sizeof(forward_state) <= MHC_FWD_SCRATCH, "forward_state must fit in the thread's scratch");

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
    float *const packed = p->weights + chunk * mhc_packed_rows(M) * MHC_CHUNK;
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

/* Elements from one stream of x to the next. The copy of y is contiguous. */
static int64_t stream_stride(const forward_context *c)
{
    return c->post != NULL ? c->problem->sizes.D : c->problem->args.x.stride[2];
}

/* Offset of a chunk in a row of x, in bytes. */
static int64_t chunk_offset(const forward_context *c, int64_t chunk)
{
    return mhc_chunk_offset(&c->chunks, chunk, stream_stride(c)) * mhc_element_size(c->problem->args.x.dtype);
}

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
V_INLINE void read_columns(forward_state *s, vf squares[TILE_TOKENS], const char *const x[TILE_TOKENS], int64_t next,
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
V_INLINE void project_tile(forward_state *s, const x_chunk *chunk, int64_t t, int64_t first, const float *w,
                           int vectors, x_source source)
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
        s->squares[t + a] = v_add(s->squares[t + a], squares[a]);
        V_UNROLL
        for (int b = 0; b < vectors; b++)
            s->sums[t + a][first + b] = v_add(s->sums[t + a][first + b], sums[a][b]);
    }
}

typedef void projection(forward_state *s, const x_chunk *chunk, int64_t t, int64_t first, const float *w);

/* clang-format off */
#define PROJECT(vectors, source)                                                                                     \
    static void project_##vectors##_##source(forward_state *s, const x_chunk *chunk, int64_t t, int64_t first,      \
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
static projection *const PROJECTIONS_OF[SOURCES][MAX_VECTORS + 1] = {
    PROJECTIONS(IN_PLACE), PROJECTIONS(FROM_F32), PROJECTIONS(FROM_F16), PROJECTIONS(FROM_BF16),
    PROJECTIONS(CONVERTED)};
/* clang-format on */

static void project_chunk(forward_state *s, int64_t chunk)
{
    static const x_source converting[] = {
        [COT_F32 - COT_F32] = FROM_F32, [COT_F16 - COT_F32] = FROM_F16, [COT_BF16 - COT_F32] = FROM_BF16};
    const forward_context *c = s->c;
    const cot_dtype dtype = c->problem->args.x.dtype;
    const int64_t M = c->problem->sizes.M, passes = passes_of(M);
    const bool last = chunk + 1 == c->chunks.count;
    const x_chunk x = {.offset = chunk_offset(c, chunk),
                       .columns = chunk_columns(&c->chunks, &c->problem->sizes, chunk),
                       .next_x_rows = last ? s->next_x_rows : s->x_rows,
                       .next_offset = last ? 0 : chunk_offset(c, chunk + 1)};
    const bool in_place = passes == 1 && dtype == COT_F32 && x.columns % STEP_COLUMNS == 0;
    const float *const weights = c->weights + chunk * mhc_packed_rows(M) * MHC_CHUNK;
    for (int64_t t = 0; t < s->token_count; t += TILE_TOKENS)
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t first = first_vector(M, pass), vectors = first_vector(M, pass + 1) - first;
            const x_source source = in_place ? IN_PLACE : pass == 0 ? converting[dtype - COT_F32] : CONVERTED;
            PROJECTIONS_OF[source][vectors](s, &x, t, first, weights + first * VECTOR_ROWS * MHC_CHUNK);
        }
}

/* Adds the sums to the coefficients and clears the sums. */
static void flush_sums(forward_state *s)
{
    const int64_t M = s->c->problem->sizes.M;
    for (int64_t t = 0; t < s->token_count; t++)
        for (int64_t j = 0; j < M; j += VECTOR_ROWS) {
            float lanes[VW];
            v_store(lanes, s->sums[t][j / VECTOR_ROWS]);
            for (int64_t r = 0; r < VECTOR_ROWS && j + r < M; r++)
                s->coefficients[j + r][t] += (lanes[4 * r] + lanes[4 * r + 1]) + (lanes[4 * r + 2] + lanes[4 * r + 3]);
            s->sums[t][j / VECTOR_ROWS] = v_zero();
        }
}

static void project_block(forward_state *s)
{
    const forward_context *c = s->c;
    const int64_t M = c->problem->sizes.M;
    memset(s->coefficients, 0, (size_t)M * sizeof *s->coefficients);
    for (int64_t t = 0; t < cot_round_up(s->token_count, TILE_TOKENS); t++) {
        s->squares[t] = v_zero();
        for (int64_t j = 0; j < M; j += VECTOR_ROWS)
            s->sums[t][j / VECTOR_ROWS] = v_zero();
    }
    for (int64_t chunk = 0; chunk < c->chunks.count; chunk++) {
        project_chunk(s, chunk);
        if (VW < 16 && (chunk + 1) % c->chunks.per_stream == 0) /* with few lanes, each lane sums more runs */
            flush_sums(s);
    }
    flush_sums(s);
    const float K = (float)(c->problem->sizes.n * c->problem->sizes.D), eps = (float)c->problem->args.norm_eps;
    memset(s->inv_rms, 0, sizeof s->inv_rms);
    for (int64_t t = 0; t < s->token_count; t++)
        s->inv_rms[t] = 1 / sqrtf(v_sum(s->squares[t]) / K + eps);
}

/* ---- coefficients ------------------------------------------------------------------------------------- */

/* Computes z and the coefficients from it, for tokens [t, t+VW) of the block. */
static void compute_coefficients(forward_state *s, int64_t t)
{
    const cot_mhc_pre_forward_args *a = &s->c->problem->args;
    const int64_t n = s->c->problem->sizes.n, M = s->c->problem->sizes.M;
    const vf inv_rms = v_load(s->inv_rms + t), post_scale = v_set1((float)a->post_scale);
    for (int64_t j = 0; j < M; j++) {
        const vf alpha = v_set1(mhc_parameter(&a->alpha, mhc_alpha_index(n, j))),
                 bias = v_set1(mhc_parameter(&a->bias, j));
        vf z = v_fma(alpha, v_mul(v_load(s->coefficients[j] + t), inv_rms), bias);
        if (j < n)
            z = v_add(mhc_sigmoid(z), v_set1((float)a->hc_eps));
        else if (j < 2 * n)
            z = v_mul(mhc_sigmoid(z), post_scale);
        v_store(s->coefficients[j] + t, z);
    }
}

static void sinkhorn(forward_state *s, int64_t t)
{
    const cot_mhc_pre_forward_args *a = &s->c->problem->args;
    const int64_t n = s->c->problem->sizes.n;
    vf h_res[MHC_MAX_N * MHC_MAX_N];
    for (int64_t ij = 0; ij < n * n; ij++)
        h_res[ij] = v_load(s->coefficients[2 * n + ij] + t);
    mhc_sinkhorn(n, a->sinkhorn_iterations, a->sinkhorn_eps, h_res);
    for (int64_t ij = 0; ij < n * n; ij++)
        v_store(s->coefficients[2 * n + ij] + t, h_res[ij]);
}

/* ---- h_in --------------------------------------------------------------------------------------------- */

/* Columns [d, d + vectors*VW) of h_in of one token. */
V_INLINE void compute_h_in_columns(const forward_state *s, int64_t t, char *h_in, int64_t d, cot_dtype dtype,
                                   int vectors)
{
    const mhc_pre_forward_problem *p = s->c->problem;
    const int64_t size = mhc_element_size(dtype), remaining = vectors == 4 ? 4 * VW : p->sizes.D - d;
    const char *x = s->x_rows[t] + d * size;
    vf sums[4];
    V_UNROLL
    for (int v = 0; v < vectors; v++)
        sums[v] = v_zero();
    for (int64_t i = 0; i < p->sizes.n; i++) {
        const vf h_pre = v_set1(s->coefficients[i][t]);
        const char *row = x + i * stream_stride(s->c) * size;
        V_UNROLL
        for (int v = 0; v < vectors; v++)
            v_prefetch(row + (4 + v) * VW * size);
        V_UNROLL
        for (int v = 0; v < vectors; v++)
            sums[v] = v_fma(h_pre, mhc_load_partial(row + v * VW * size, dtype, remaining - v * VW), sums[v]);
    }
    V_UNROLL
    for (int v = 0; v < vectors; v++)
        mhc_store_partial(h_in + (d + v * VW) * size, dtype, sums[v], remaining - v * VW, s->c->stream_stores);
}

#define COMPUTE_H_IN(dtype)                                                            \
    static void compute_h_in_##dtype(const forward_state *s)                           \
    {                                                                                  \
        const int64_t D = s->c->problem->sizes.D;                                      \
        for (int64_t t = 0; t < s->token_count; t++) {                                 \
            char *h_in = mhc_row(&s->c->problem->args.h_in, s->first_token + t, 0, 0); \
            int64_t d = 0;                                                             \
            for (; d + 4 * VW <= D; d += 4 * VW)                                       \
                compute_h_in_columns(s, t, h_in, d, COT_##dtype, 4);                   \
            for (; d < D; d += VW)                                                     \
                compute_h_in_columns(s, t, h_in, d, COT_##dtype, 1);                   \
        }                                                                              \
    }
MHC_FOR_EACH_DTYPE(COMPUTE_H_IN)

/* ---- items -------------------------------------------------------------------------------------------- */

static void forward_block(forward_state *s)
{
    static void (*const h_in_functions[])(const forward_state *) = {[COT_F32 - COT_F32] = compute_h_in_F32,
                                                                    [COT_F16 - COT_F32] = compute_h_in_F16,
                                                                    [COT_BF16 - COT_F32] = compute_h_in_BF16};
    const cot_mhc_pre_forward_args *a = &s->c->problem->args;
    const int64_t n = s->c->problem->sizes.n, M = s->c->problem->sizes.M;
    project_block(s);
    mhc_store_coefficients(s->inv_rms, MHC_TOKENS, &a->inv_rms, s->first_token, s->token_count, 1);
    mhc_store_coefficients(s->coefficients[0], MHC_TOKENS, &a->h_mix, s->first_token, s->token_count, M);
    for (int64_t t = 0; t < MHC_TOKENS; t += VW)
        compute_coefficients(s, t);
    mhc_store_coefficients(s->coefficients[0], MHC_TOKENS, &a->h_pre, s->first_token, s->token_count, n);
    mhc_store_coefficients(s->coefficients[n], MHC_TOKENS, &a->h_post, s->first_token, s->token_count, n);
    mhc_store_coefficients(s->coefficients[2 * n], MHC_TOKENS, &a->h_res_logits, s->first_token, s->token_count, n * n);
    if (cot_is_present(&a->h_in))
        h_in_functions[a->x.dtype - COT_F32](s);
    for (int64_t t = 0; cot_is_present(&a->h_res) && t < s->token_count; t += VW)
        sinkhorn(s, t);
    mhc_store_coefficients(s->coefficients[2 * n], MHC_TOKENS, &a->h_res, s->first_token, s->token_count, n * n);
}

/* Sets the rows of x of the block's tokens. padded_t is an index in the block, padded to whole tiles: a last tile that
 * is not full repeats the last token. */
static void set_rows(forward_state *s, int64_t end)
{
    const forward_context *c = s->c;
    const int64_t row_bytes = c->problem->sizes.n * c->problem->sizes.D * mhc_element_size(c->problem->args.x.dtype);
    char *const copy = (char *)s + MHC_FWD_SCRATCH;
    for (int64_t padded_t = 0; padded_t < cot_round_up(s->token_count, TILE_TOKENS); padded_t++) {
        const int64_t t = padded_t < s->token_count ? padded_t : s->token_count - 1,
                      next = s->first_token + c->block_tokens + t;
        s->x_rows[padded_t] =
            c->post != NULL ? copy + t * row_bytes : mhc_row(&c->problem->args.x, s->first_token + t, 0, 0);
        s->next_x_rows[padded_t] =
            next < end && c->post == NULL ? mhc_row(&c->problem->args.x, next, 0, 0) : s->x_rows[padded_t];
    }
    if (c->post != NULL)
        V_NAME(mhc_post_fwd_tokens)(c->post, s->first_token, s->first_token + s->token_count, copy);
}

static void forward_item(void *context, int64_t item, void *scratch)
{
    const forward_context *c = context;
    const int64_t begin = item * c->item_tokens;
    const int64_t end = begin + cot_clamp(c->problem->sizes.tokens - begin, 0, c->item_tokens);
    forward_state *const s = scratch;
    s->c = c;
    for (s->first_token = begin; s->first_token < end; s->first_token += c->block_tokens) {
        s->token_count = cot_clamp(end - s->first_token, 0, c->block_tokens);
        set_rows(s, end);
        forward_block(s);
    }
    if (c->stream_stores)
        v_fence();
}

cot_status V_NAME(mhc_pre_fwd_blocks)(cot_queue *queue, const mhc_pre_forward_problem *p,
                                      const mhc_post_forward_problem *post, void *workspace)
{
    forward_context context = {.problem = p,
                               .post = post,
                               .chunks = ((const mhc_pre_fwd_plan *)queue->plan)->chunks,
                               .weights = workspace,
                               .block_tokens = mhc_block_tokens(p->sizes.tokens),
                               .stream_stores = mhc_should_stream(&p->args.h_in, &p->sizes)};
    /* No sum crosses tokens, so the number of tokens in an item may depend on the number of threads. */
    const int64_t items = ITEMS_PER_THREAD * cot_queue_threads(queue);
    context.item_tokens =
        context.block_tokens * cot_clamp(p->sizes.tokens / context.block_tokens / items, 1, MAX_ITEM_BLOCKS);
    mhc_packing packing = {&p->sizes, &p->args.phi, &p->args.gamma, context.chunks, workspace};
    if (p->sizes.tokens > 0)
        cot_run_items(queue, context.chunks.count, pack_chunk, &packing);
    cot_run_items_scratch(queue, cot_ceil_div(p->sizes.tokens, context.item_tokens), forward_item, &context);
    return COT_OK;
}

cot_status V_NAME(mhc_pre_fwd_tiles)(cot_queue *queue, const void *problem, void *workspace)
{
    return V_NAME(mhc_pre_fwd_blocks)(queue, problem, NULL, workspace);
}
