/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_tiles.c: the gradients of pre (cotangent/mhc.h) for contiguous d and n <= 8:
 *     dh_pre[i] = dh_in . x[i,:]            then dz, dh_mix and c of a token, Sinkhorn's gradient included
 *     dx = dh_mix' W + c x + h_pre dh_in (+ dx_post),  W = phi * gamma        Q = sum_tokens dh_mix x'
 *     dphi = Q gamma,  dgamma = sum_j phi Q,  dbias = sum dz,  dalpha = sum dz h_mix inv_rms
 * In the code, c is `factor`, and Q over a part of the tokens is dphi_part.
 *
 * First W is packed in chunks of MHC_BWD_CHUNK columns of one stream. An item is one of at most MHC_BWD_PARTS token
 * ranges (parts) and has a separate dphi_part in the workspace. At the end these are summed in double, in the order of
 * the parts. A part processes its tokens in blocks of BLOCK. A chunk of a block's x is converted to f32 in the
 * L1 cache and used twice. For dx, TILE tokens by VECTORS vectors are the sums over the rows of W. For dphi, ROWS rows
 * by VECTORS vectors are the sums over the block's tokens, which are then added to dphi_part. A chunk is as narrow as
 * possible, so that its x, W and dphi_part fit in the L1 cache together. Each of them is contiguous. Rows that are a
 * power of two apart would share a few sets of that cache. The copy for AMX has its own products, in mhc_pre_bwd_amx.h.
 *
 * In post_pre, x is y. A block can compute its y again, before all else. Its dx is g, in f32, from which it computes
 * post's backward at the end. Both stay in the thread's scratch. */
#include "mhc_blocks.h"
#include "mhc_pack.h"
#include "mhc_sinkhorn.h"
#include "simd/matmul.h"

cot_status V_NAME(mhc_pre_bwd_tiles)(cot_queue *, const void *, void *);

/* TILE*VECTORS and ROWS*VECTORS sums and the operands fit in 32 or 16 registers. Stores that bypass the caches must write
 * whole lines together. Two vectors of bf16 on AVX2 are half a line. */
enum {
#if defined(COT_MATMUL_AMX)
    TOKENS = MHC_AMX_TOKENS, /* in lanes of the coefficients */
    SCRATCH = MHC_BWD_AMX_SCRATCH,
    CHUNK_COLUMNS = MHC_AMX_BWD_CHUNK,
    BLOCK = TOKENS,
#else
    TOKENS = MHC_BWD_TOKENS,
    SCRATCH = MHC_BWD_SCRATCH,
    CHUNK_COLUMNS = MHC_BWD_CHUNK,
    BLOCK = VW == 16 ? TOKENS : 24, /* tokens */
#endif
    TILE = VW == 16 ? 4 : 3, /* tokens */
    ROWS = VW == 16 ? 4 : 3, /* rows of dphi_part */
    VECTORS = 4
};

/* An element of packed W. */
#if defined(COT_MATMUL_AMX)
typedef uint16_t weight;
#else
typedef float weight;
#endif

typedef struct backward_context {
    const mhc_pre_backward_problem *problem;
    const mhc_post_forward_problem *recomputation; /* post_pre: computes x again; NULL = x is given */
    const mhc_post_backward_problem *post;         /* post_pre: reads g; NULL = dx is an output */
    mhc_chunks chunks;
    mhc_parts parts;
    mhc_pre_bwd_layout layout;
    char *workspace;
    bool stream_stores, need_dphi; /* need_dphi: dphi or dgamma is an output */
    bool need_dx;                  /* dx is an output, or g is needed */
    int64_t x_stream, dx_stream;   /* elements from one stream of x to the next, and of dx */
} backward_context;

/* The state of a part, in its thread's scratch. Coefficients have tokens in lanes. */
typedef struct backward_block {
    const backward_context *c;
    int64_t token, count;
    const char *x_rows[TOKENS], *dh_in[TOKENS], *dx_post[TOKENS]; /* NULL = absent */
    char *dx[TOKENS];
    char *y_copy; /* post_pre: the y that is computed again [tokens][n][D] */
    float *g;     /* post_pre: the gradient of y [tokens][n][D] */
    bool first;   /* first block of its part: dphi_part is stored, not accumulated */
    float *dphi_part, *history;
    double *sums; /* [M] for dbias, then [3] for dalpha */
#if defined(COT_MATMUL_AMX)
    /* Tiles of dh_mix; tiles of x of this chunk and of the next; results of two products (mhc_pre_bwd_amx.h). */
    _Alignas(64) uint16_t dx_tiles[MHC_AMX_DX_ELEMENTS],
        dphi_tiles[MHC_AMX_DPHI_ELEMENTS], x_tiles[2][TOKENS * CHUNK_COLUMNS];
    _Alignas(64) float results[2][32][CHUNK_COLUMNS];
#else
    _Alignas(64) float x[TOKENS][CHUNK_COLUMNS];
#endif
    _Alignas(64) float dh_mix[MHC_MAX_M][TOKENS]; /* the rows of pre hold dh_pre first */
    _Alignas(64) float h_mix[MHC_MAX_M][TOKENS], h_pre[MHC_MAX_N][TOKENS];
    _Alignas(64) float h_post[MHC_MAX_N][TOKENS], dh_post[MHC_MAX_N][TOKENS];
    _Alignas(64) float dh_res_logits[MHC_MAX_N * MHC_MAX_N][TOKENS], dh_res[MHC_MAX_N * MHC_MAX_N][TOKENS];
    _Alignas(64) float inv_rms[TOKENS], factor[TOKENS];
} backward_block;

_Static_assert(sizeof(backward_block) <= SCRATCH, "backward_block must fit in the thread's scratch");

/* ---- dh_pre ------------------------------------------------------------------------------------------- */

V_INLINE float dot(const char *a, const char *b, int64_t D, cot_dtype dtype)
{
    const int64_t size = mhc_element_size(dtype);
    vf total = v_zero();
    for (int64_t begin = 0; begin < D; begin += 2 * MHC_RUN) { /* even and odd vectors: two runs at a time */
        const int64_t end = begin + 2 * MHC_RUN < D ? begin + 2 * MHC_RUN : D;
        vf even = v_zero(), odd = v_zero();
        for (int64_t d = begin; d < end; d += 2 * VW) {
            even =
                v_fma(mhc_load_partial(a + d * size, dtype, D - d), mhc_load_partial(b + d * size, dtype, D - d), even);
            odd = v_fma(mhc_load_partial(a + (d + VW) * size, dtype, D - d - VW),
                        mhc_load_partial(b + (d + VW) * size, dtype, D - d - VW), odd);
        }
        total = v_add(total, v_add(even, odd));
    }
    return v_sum(total);
}

#define DOTS(dtype)                                                                                            \
    static void dots_##dtype(backward_block *s)                                                                \
    {                                                                                                          \
        const mhc_pre_backward_problem *p = s->c->problem;                                                     \
        const int64_t stream_offset = s->c->x_stream * mhc_element_size(COT_##dtype);                          \
        for (int64_t t = 0; t < s->count; t++)                                                                 \
            for (int64_t i = 0; i < p->sizes.n; i++)                                                           \
                s->dh_mix[i][t] = dot(s->dh_in[t], s->x_rows[t] + i * stream_offset, p->sizes.D, COT_##dtype); \
    }
MHC_FOR_EACH_DTYPE(DOTS)

/* ---- coefficients ------------------------------------------------------------------------------------- */

/* Adds Sinkhorn's gradient to dh_res_logits, for tokens [t, t+VW) of the block. */
static void sinkhorn_gradient(backward_block *s, int64_t t)
{
    const cot_mhc_pre_backward_args *a = &s->c->problem->args;
    const int64_t n = s->c->problem->sizes.n;
    const vf alpha = v_set1(mhc_parameter(&a->alpha, 2)), inv_rms = v_load(s->inv_rms + t);
    vf logits[MHC_MAX_N * MHC_MAX_N], G[MHC_MAX_N * MHC_MAX_N];
    for (int64_t ij = 0; ij < n * n; ij++) {
        const vf bias = v_set1(mhc_parameter(&a->bias, 2 * n + ij));
        logits[ij] = v_fma(alpha, v_mul(v_load(s->h_mix[2 * n + ij] + t), inv_rms), bias);
        G[ij] = v_load(s->dh_res[ij] + t);
    }
    mhc_sinkhorn_gradient(n, a->sinkhorn_iterations, a->sinkhorn_eps, logits, G, s->history);
    for (int64_t ij = 0; ij < n * n; ij++)
        v_store(s->dh_res_logits[ij] + t, v_add(v_load(s->dh_res_logits[ij] + t), G[ij]));
}

/* dz_j of tokens [t, t+VW). */
static vf compute_dz(const backward_block *s, int64_t j, int64_t t)
{
    const cot_mhc_pre_backward_args *a = &s->c->problem->args;
    const int64_t n = s->c->problem->sizes.n;
    const vf one = v_set1(1);
    if (j < n) {
        const vf sigma = v_sub(v_load(s->h_pre[j] + t), v_set1((float)a->hc_eps));
        return v_mul(v_mul(v_load(s->dh_mix[j] + t), sigma), v_sub(one, sigma));
    }
    if (j < 2 * n) {
        const vf h = v_load(s->h_post[j - n] + t);
        return v_mul(v_mul(v_load(s->dh_post[j - n] + t), h), v_sub(one, v_div(h, v_set1((float)a->post_scale))));
    }
    return v_load(s->dh_res_logits[j - 2 * n] + t);
}

/* Computes dh_mix and c of every token, and the block's part of dbias and dalpha. Beyond the last token all values are
 * 0. */
static void compute_coefficients(backward_block *s)
{
    const mhc_sizes *sizes = &s->c->problem->sizes;
    const cot_mhc_pre_backward_args *a = &s->c->problem->args;
    const int64_t n = sizes->n, M = sizes->M;
    const vf K = v_set1((float)(n * sizes->D));
    vf dinv[TOKENS / VW];
    for (int64_t g = 0; g < TOKENS / VW; g++)
        dinv[g] = v_zero();
    for (int64_t j = 0; j < M; j++) {
        const int64_t group = mhc_alpha_index(n, j);
        const vf alpha = v_set1(mhc_parameter(&a->alpha, group));
        vf dbias = v_zero(), dalpha = v_zero();
        for (int64_t g = 0; g < TOKENS / VW; g++) {
            const vf dz = compute_dz(s, j, g * VW), h_mix = v_load(s->h_mix[j] + g * VW);
            const vf inv_rms = v_load(s->inv_rms + g * VW), du = v_mul(alpha, dz);
            dbias = v_add(dbias, dz);
            dalpha = v_fma(dz, v_mul(h_mix, inv_rms), dalpha);
            dinv[g] = v_fma(du, h_mix, dinv[g]);
            v_store(s->dh_mix[j] + g * VW, v_mul(du, inv_rms));
        }
        s->sums[j] += (double)v_sum(dbias);
        s->sums[M + group] += (double)v_sum(dalpha);
    }
    for (int64_t g = 0; g < TOKENS / VW; g++) {
        const vf inv_rms = v_load(s->inv_rms + g * VW);
        const vf cube = v_mul(v_mul(inv_rms, inv_rms), inv_rms);
        v_store(s->factor + g * VW, v_sub(v_zero(), v_div(v_mul(dinv[g], cube), K)));
    }
}

static void load_coefficients(backward_block *s)
{
    const cot_mhc_pre_backward_args *a = &s->c->problem->args;
    const int64_t n = s->c->problem->sizes.n, M = s->c->problem->sizes.M;
    memset(s->dh_mix, 0, (size_t)n * sizeof *s->dh_mix);
    mhc_load_coefficients(s->inv_rms, TOKENS, &a->inv_rms, s->token, s->count, 1);
    mhc_load_coefficients(s->h_mix[0], TOKENS, &a->h_mix, s->token, s->count, M);
    mhc_load_coefficients(s->h_pre[0], TOKENS, &a->h_pre, s->token, s->count, n);
    mhc_load_coefficients(s->h_post[0], TOKENS, &a->h_post, s->token, s->count, n);
    mhc_load_coefficients(s->dh_post[0], TOKENS, &a->dh_post, s->token, s->count, n);
    mhc_load_coefficients(s->dh_res_logits[0], TOKENS, &a->dh_res_logits, s->token, s->count, n * n);
    if (!cot_is_present(&a->dh_res))
        return;
    mhc_load_coefficients(s->dh_res[0], TOKENS, &a->dh_res, s->token, s->count, n * n);
    for (int64_t t = 0; t < s->count; t += VW)
        sinkhorn_gradient(s, t);
}

/* ---- chunks of columns -------------------------------------------------------------------------------- */

/* A chunk of `columns` columns of stream i, from column d on. The last columns may be beyond D. */
typedef struct column_chunk {
    int64_t number, i, d, columns;
    int64_t next_dx_post; /* bytes from a token's dx_post to that of the next chunk */
    const weight *weights;
} column_chunk;

/* Elements of a chunk of packed W. */
static int64_t weight_elements(const backward_context *c);

/* The same columns of all streams follow each other, so that their dh_in stays in the L1 cache. */
static column_chunk chunk_of_step(const backward_block *s, int64_t step)
{
    const mhc_pre_backward_problem *p = s->c->problem;
    const mhc_chunks *chunks = &s->c->chunks;
    const int64_t n = p->sizes.n, number = step % n * chunks->per_stream + step / n;
    const int64_t next_step = cot_min(step + 1, chunks->count - 1);
    const int64_t next = next_step % n * chunks->per_stream + next_step / n;
    column_chunk chunk = {.number = number,
                          .i = number / chunks->per_stream,
                          .d = number % chunks->per_stream * CHUNK_COLUMNS,
                          .weights = (const weight *)s->c->workspace + number * weight_elements(s->c)};
    chunk.next_dx_post = mhc_chunk_offset(chunks, next, p->args.dx_post.stride[2]) * mhc_element_size(p->args.x.dtype);
    chunk.columns = cot_round_up(cot_clamp(p->sizes.D - chunk.d, 0, CHUNK_COLUMNS), 4 * VW);
    return chunk;
}

#if defined(COT_MATMUL_AMX)
#include "mhc_pre_bwd_amx.h"
#else
/* dx of tokens [t, t+TILE) and VECTORS vectors, from column k of the chunk on. whole: all columns are within D. */
V_INLINE void dx_tile(const backward_block *s, const column_chunk *chunk, int64_t t, int64_t k, cot_dtype dtype,
                      cot_dtype dx_dtype, bool whole)
{
    const mhc_pre_backward_problem *p = s->c->problem;
    const cot_mhc_pre_backward_args *a = &p->args;
    const int64_t element_size = mhc_element_size(dtype), dx_size = mhc_element_size(dx_dtype);
    const int64_t remaining = whole ? VECTORS * VW : p->sizes.D - chunk->d - k;
    const int tokens = (int)cot_clamp(s->count - t, 0, TILE);
    vf dx[TILE][VECTORS];
    V_UNROLL
    for (int r = 0; r < TILE; r++)
        V_UNROLL
    for (int v = 0; v < VECTORS; v++)
        dx[r][v] = v_zero();
    const float *w = chunk->weights + k;
    for (int64_t j = 0; j < p->sizes.M; j++, w += CHUNK_COLUMNS) {
        vf dh_mix[TILE];
        V_UNROLL
        for (int r = 0; r < TILE; r++)
            dh_mix[r] = v_set1(s->dh_mix[j][t + r]);
        V_UNROLL
        for (int v = 0; v < VECTORS; v++) {
            const vf ws = v_in_register(v_load(w + v * VW));
            V_UNROLL
            for (int r = 0; r < TILE; r++)
                dx[r][v] = v_fma(dh_mix[r], ws, dx[r][v]);
        }
    }
    if (s->dx_post[t] != NULL) /* without this prefetch the f32 kernel took 1.5 times as long */
        for (int r = 0; r < tokens; r++)
            v_prefetch_range(s->dx_post[t + r] + chunk->next_dx_post + k * element_size, VECTORS * VW * element_size);
    V_UNROLL
    for (int r = 0; r < TILE; r++) {
        if (r >= tokens)
            break;
        const char *dh_in = s->dh_in[t + r] + (chunk->d + k) * element_size, *dx_post = s->dx_post[t + r];
        char *out = s->dx[t + r] + (chunk->i * s->c->dx_stream + chunk->d + k) * dx_size;
        dx_post = dx_post != NULL ? dx_post + (chunk->i * a->dx_post.stride[2] + chunk->d + k) * element_size : NULL;
        const vf factor = v_set1(s->factor[t + r]), h_pre = v_set1(s->h_pre[chunk->i][t + r]);
        V_UNROLL
        for (int v = 0; v < VECTORS; v++) {
            vf sum = v_fma(factor, v_load(s->x[t + r] + k + v * VW), dx[r][v]);
            sum = v_fma(h_pre, mhc_load_partial(dh_in + v * VW * element_size, dtype, remaining - v * VW), sum);
            if (dx_post != NULL)
                sum = v_add(sum, mhc_load_partial(dx_post + v * VW * element_size, dtype, remaining - v * VW));
            dx[r][v] = sum;
        }
        V_UNROLL
        for (int v = 0; v < VECTORS; v += 2)
            mhc_store_pair(out + v * VW * dx_size, dx_dtype, dx[r][v], dx[r][v + 1], remaining - v * VW,
                           s->c->stream_stores);
    }
}

/* ---- dphi --------------------------------------------------------------------------------------------- */

/* Adds the block's tokens to ROWS rows by VECTORS vectors of dphi_part. */
V_INLINE void accumulate_dphi_tile(const backward_block *s, const column_chunk *chunk, int64_t j, int64_t k, int rows)
{
    /* Prefetch dphi_part, which is not in the L1 cache. It arrives before the sums are complete. */
    float *dphi_part = s->dphi_part + (chunk->number * s->c->problem->sizes.M + j) * CHUNK_COLUMNS + k;
    vf sums[ROWS][VECTORS];
    V_UNROLL
    for (int r = 0; r < rows; r++)
        V_UNROLL
    for (int v = 0; v < VECTORS; v++)
        v_prefetch(dphi_part + r * CHUNK_COLUMNS + v * VW);
    V_UNROLL
    for (int r = 0; r < rows; r++)
        V_UNROLL
    for (int v = 0; v < VECTORS; v++)
        sums[r][v] = v_zero();
    for (int64_t t = 0; t < s->count; t++) {
        vf dh_mix[ROWS];
        V_UNROLL
        for (int r = 0; r < rows; r++)
            dh_mix[r] = v_set1(s->dh_mix[j + r][t]);
        V_UNROLL
        for (int v = 0; v < VECTORS; v++) {
            const vf x = v_in_register(v_load(s->x[t] + k + v * VW));
            V_UNROLL
            for (int r = 0; r < rows; r++)
                sums[r][v] = v_fma(dh_mix[r], x, sums[r][v]);
        }
    }
    V_UNROLL
    for (int r = 0; r < rows; r++)
        V_UNROLL
    for (int v = 0; v < VECTORS; v++) {
        float *q = dphi_part + r * CHUNK_COLUMNS + v * VW;
        v_store(q, s->first ? sums[r][v] : v_add(v_load(q), sums[r][v]));
    }
}

static void accumulate_dphi_chunk(const backward_block *s, const column_chunk *chunk)
{
    const int64_t M = s->c->problem->sizes.M;
    for (int64_t j = 0; j < M; j += ROWS)
        for (int64_t k = 0; k < chunk->columns; k += VECTORS * VW)
            switch (M - j) {
            case 1: accumulate_dphi_tile(s, chunk, j, k, 1); break;
            case 2: accumulate_dphi_tile(s, chunk, j, k, 2); break;
            case 3: accumulate_dphi_tile(s, chunk, j, k, cot_min(3, ROWS)); break;
            default: accumulate_dphi_tile(s, chunk, j, k, ROWS); break;
            }
}

/* Converts a chunk of x to f32 and, if dx is needed, computes its dx. */
#define DX_CHUNK(dtype)                                                                                \
    static void dx_chunk_##dtype(backward_block *s, const column_chunk *chunk)                         \
    {                                                                                                  \
        const mhc_pre_backward_problem *p = s->c->problem;                                             \
        const int64_t offset = (chunk->i * s->c->x_stream + chunk->d) * mhc_element_size(COT_##dtype); \
        for (int64_t t = 0; t < s->count; t++)                                                         \
            mhc_convert_row(s->x[t], s->x_rows[t] + offset, COT_##dtype,                               \
                            cot_clamp(p->sizes.D - chunk->d, 0, CHUNK_COLUMNS));                       \
        for (int64_t k = 0; s->c->need_dx && k < chunk->columns; k += VECTORS * VW)                    \
            for (int64_t t = 0; t < s->count; t += TILE)                                               \
                if (s->c->post != NULL)                                                                \
                    dx_tile(s, chunk, t, k, COT_##dtype, COT_F32, false);                              \
                else if (VW > 4 && chunk->d + k + VECTORS * VW <= p->sizes.D)                          \
                    dx_tile(s, chunk, t, k, COT_##dtype, COT_##dtype, true);                           \
                else                                                                                   \
                    dx_tile(s, chunk, t, k, COT_##dtype, COT_##dtype, false);                          \
    }
MHC_FOR_EACH_DTYPE(DX_CHUNK)

static void backward_chunks(backward_block *s)
{
    static void (*const dx_chunks[])(backward_block *, const column_chunk *) = {dx_chunk_F32, dx_chunk_F16,
                                                                                dx_chunk_BF16};
    const mhc_chunks *chunks = &s->c->chunks;
    for (int64_t step = 0; step < chunks->count; step++) {
        const column_chunk chunk = chunk_of_step(s, step);
        dx_chunks[s->c->problem->args.x.dtype - COT_F32](s, &chunk);
        if (s->c->need_dphi)
            accumulate_dphi_chunk(s, &chunk);
    }
}

static void pack_chunk(void *context, int64_t chunk)
{
    const mhc_packing *p = context;
    for (int64_t j = 0; j < p->sizes->M; j++)
        mhc_pack_row((float *)p->weights + (chunk * p->sizes->M + j) * CHUNK_COLUMNS, p, chunk, j);
}

static int64_t weight_elements(const backward_context *c)
{
    return c->problem->sizes.M * CHUNK_COLUMNS;
}

#endif

/* ---- blocks and parts --------------------------------------------------------------------------------- */

/* Sets the rows of the block's tokens. */
static void set_rows(backward_block *s)
{
    const backward_context *c = s->c;
    const cot_mhc_pre_backward_args *a = &c->problem->args;
    const int64_t row = c->problem->sizes.n * c->problem->sizes.D;
    for (int64_t t = 0; t < s->count; t++) {
        s->x_rows[t] = c->recomputation != NULL ? s->y_copy + t * row * mhc_element_size(a->x.dtype)
                                                : mhc_row(&a->x, s->token + t, 0, 0);
        s->dh_in[t] = mhc_row(&a->dh_in, s->token + t, 0, 0);
        s->dx_post[t] = cot_is_present(&a->dx_post) ? mhc_row(&a->dx_post, s->token + t, 0, 0) : NULL;
        s->dx[t] = c->post != NULL ? (char *)(s->g + t * row) : c->need_dx ? mhc_row(&a->dx, s->token + t, 0, 0) : NULL;
    }
}

static void backward_part(void *context, int64_t part, void *scratch)
{
    static void (*const dots[])(backward_block *) = {dots_F32, dots_F16, dots_BF16};
    const backward_context *c = context;
    const mhc_pre_backward_problem *p = c->problem;
    const int64_t end = cot_clamp((part + 1) * c->parts.part_tokens, 0, p->sizes.tokens);
    backward_block *const s = scratch;
    s->c = c;
    s->y_copy = (char *)s + SCRATCH;
    s->g = (float *)(s->y_copy + (c->recomputation != NULL ? mhc_block_bytes(&p->sizes, TOKENS, p->sizes.dtype) : 0));
    s->dphi_part = (float *)(c->workspace + c->layout.dphi_parts + (size_t)part * c->layout.dphi_part_bytes);
    s->sums = (double *)(c->workspace + c->layout.sums + (size_t)part * c->layout.sums_part);
    s->history = (float *)(c->workspace + c->layout.history + (size_t)part * c->layout.history_part);
    s->first = true;
    mt_state host_tiles;
    mt_begin(&host_tiles);
    for (int64_t j = 0; j < p->sizes.M + 3; j++)
        s->sums[j] = 0;
    for (s->token = part * c->parts.part_tokens; s->token < end; s->token += BLOCK) {
        s->count = cot_clamp(end - s->token, 0, BLOCK);
        set_rows(s);
        if (c->recomputation != NULL)
            MHC_POST_NAME(mhc_post_fwd_tokens)(c->recomputation, s->token, s->token + s->count, s->y_copy);
        load_coefficients(s);
        dots[p->args.x.dtype - COT_F32](s);
        compute_coefficients(s);
#if defined(COT_MATMUL_AMX)
        split_dh_mix(s);
#endif
        if (c->need_dx || c->need_dphi)
            backward_chunks(s);
        if (c->post != NULL)
            MHC_POST_NAME(mhc_post_bwd_tokens)(c->post, s->token, s->token + s->count, s->g);
        s->first = false;
    }
    mt_end(&host_tiles);
    if (c->stream_stores)
        v_fence();
}

/* ---- gradients of the parameters --------------------------------------------------------------------- */

static void store_gradient(const cot_tensor *out, int64_t offset, bool accumulate, double value)
{
    float *gradient = (float *)out->data + offset;
    *gradient = (float)(accumulate ? value + (double)*gradient : value);
}

/* Columns of one chunk of dphi and dgamma. With 0 tokens there are no parts. */
static void reduce_chunk(const backward_context *c, int64_t number)
{
    const mhc_pre_backward_problem *p = c->problem;
    const cot_mhc_pre_backward_args *a = &p->args;
    const int64_t M = p->sizes.M, i = number / c->chunks.per_stream;
    const int64_t d = number % c->chunks.per_stream * CHUNK_COLUMNS;
    const int64_t columns = cot_clamp(p->sizes.D - d, 0, CHUNK_COLUMNS);
    const int64_t parts = p->sizes.tokens > 0 ? c->parts.count : 0;
    double dgamma[CHUNK_COLUMNS] = {0};
    for (int64_t j = 0; j < M; j++) {
        double dphi_sum[CHUNK_COLUMNS] = {0};
        for (int64_t part = 0; part < parts; part++) {
            const float *dphi_part =
                (const float *)(c->workspace + c->layout.dphi_parts + (size_t)part * c->layout.dphi_part_bytes) +
                (number * M + j) * CHUNK_COLUMNS;
            for (int64_t k = 0; k < columns; k++)
                dphi_sum[k] += (double)dphi_part[k];
        }
        for (int64_t k = 0; k < columns; k++) {
            const int64_t column = i * p->sizes.D + d + k;
            const double gamma =
                cot_is_present(&a->gamma)
                    ? (double)((const float *)a->gamma.data)[i * a->gamma.stride[0] + (d + k) * a->gamma.stride[1]]
                    : 1;
            dgamma[k] +=
                (double)((const float *)a->phi.data)[j * a->phi.stride[0] + column * a->phi.stride[1]] * dphi_sum[k];
            if (cot_is_present(&a->dphi))
                store_gradient(&a->dphi, j * a->dphi.stride[0] + column * a->dphi.stride[1], a->accumulate,
                               gamma * dphi_sum[k]);
        }
    }
    for (int64_t k = 0; cot_is_present(&a->dgamma) && k < columns; k++)
        store_gradient(&a->dgamma, i * a->dgamma.stride[0] + (d + k) * a->dgamma.stride[1], a->accumulate, dgamma[k]);
}

/* Items 0 to chunks-1 are chunks; the last item is dbias and dalpha. */
static void reduce_item(void *context, int64_t item)
{
    const backward_context *c = context;
    const cot_mhc_pre_backward_args *a = &c->problem->args;
    const int64_t M = c->problem->sizes.M;
    if (item < c->chunks.count) {
        if (c->need_dphi)
            reduce_chunk(c, item);
        return;
    }
    for (int64_t j = 0; j < M + 3; j++) {
        const cot_tensor *out = j < M ? &a->dbias : &a->dalpha;
        double sum = 0;
        for (int64_t part = 0; part < c->parts.count; part++)
            sum += ((const double *)(c->workspace + c->layout.sums + (size_t)part * c->layout.sums_part))[j];
        if (cot_is_present(out))
            store_gradient(out, (j < M ? j : j - M) * out->stride[0], a->accumulate, sum);
    }
}

cot_status V_NAME(mhc_pre_bwd_blocks)(cot_queue *queue, const mhc_pre_backward_problem *p,
                                      const mhc_post_forward_problem *recomputation,
                                      const mhc_post_backward_problem *post, void *workspace)
{
    const cot_mhc_pre_backward_args *a = &p->args;
    const mhc_pre_bwd_layout *layout = queue->plan;
    backward_context context = {
        .problem = p,
        .recomputation = recomputation,
        .post = post,
        .chunks = layout->chunks,
        .parts = layout->parts,
        .layout = *layout,
        .workspace = workspace,
        .stream_stores = post == NULL && mhc_should_stream(&a->dx, &p->sizes),
        .need_dphi = cot_is_present(&a->dphi) || cot_is_present(&a->dgamma),
        .need_dx = post != NULL || cot_is_present(&a->dx),
        .x_stream = recomputation != NULL ? p->sizes.D : a->x.stride[2],
        .dx_stream = post != NULL ? p->sizes.D : a->dx.stride[2],
    };
    mhc_packing packing = {&p->sizes, &a->phi, &a->gamma, context.chunks, workspace};
    if (p->sizes.tokens > 0 && context.need_dx)
        cot_run_items(queue, context.chunks.count, pack_chunk, &packing);
    cot_run_items_scratch(queue, context.parts.count, backward_part, &context);
    cot_run_items(queue, context.chunks.count + 1, reduce_item, &context);
    return COT_OK;
}

cot_status V_NAME(mhc_pre_bwd_tiles)(cot_queue *queue, const void *problem, void *workspace)
{
    return V_NAME(mhc_pre_bwd_blocks)(queue, problem, NULL, NULL, workspace);
}
