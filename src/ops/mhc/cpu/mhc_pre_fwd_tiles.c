/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_fwd_tiles.c: pre forward for contiguous d and n <= 8:
 *     h_mix = W x, W = phi * gamma [M, n*D]      inv_rms = 1 / sqrt(mean x^2 + norm_eps)
 *     z = alpha * h_mix * inv_rms + bias         h_in = sum_i h_pre[i] * x[i,:]
 * and the outputs that depend on z (cotangent/mhc.h), Sinkhorn included.
 *
 * First W is packed in chunks of MHC_CHUNK columns of one stream. A block is up to MHC_TOKENS tokens. For each chunk, a
 * block converts its x to f32 in the L1 cache and multiplies it by 4 rows of W at a time. A step loads 4+TILE vectors
 * along the columns and does 4*TILE FMAs, one per (token, row of W).
 *
 * After each run of a chunk the lanes are reduced by 4, and the result is added to the sums of the earlier runs. So no
 * lane sums more than 32 terms in one run. Unreduced sums of n = 4 would take 24 KiB on AVX-512 and leave the L1 cache.
 *
 * During the product the next chunk is prefetched; after the last chunk it is the first chunk of the next block.
 * Coefficients are computed with tokens in lanes. h_in reads x again, from the L2 cache. In post_pre, x is y: a block
 * first computes its y, and reads it from a copy in the caches. */
#include "mhc_blocks.h"
#include "mhc_pack.h"
#include "mhc_sinkhorn.h"

#include <math.h>

cot_status V_NAME(mhc_pre_fwd_tiles)(cot_queue *, const void *, void *);

enum {
    TILE = VW == 16 ? 4 : 2, /* tokens: 4*TILE sums and the operands fit in 32 or 16 registers */
    ROWS = 4,
    ITEMS_PER_THREAD = 8, /* more items than threads balance the load */
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
typedef struct forward_block {
    const forward_context *c;
    int64_t token, count;
    const char *x_rows[MHC_TOKENS], *next_x_rows[MHC_TOKENS]; /* of this block; of the next one, NULL = none */
    _Alignas(64) float x[MHC_TOKENS][MHC_CHUNK];
    vf sums[MHC_TOKENS][MHC_MAX_M / ROWS], squares[MHC_TOKENS];
    /* First h_mix, then z. At the end h_pre, h_post, and h_res if it is an output. */
    _Alignas(64) float coefficients[MHC_MAX_M][MHC_TOKENS];
    _Alignas(64) float inv_rms[MHC_TOKENS];
} forward_block;

_Static_assert(sizeof(forward_block) <= MHC_FWD_SCRATCH, "forward_block must fit in the thread's scratch");

/* ---- projection -------------------------------------------------------------------------------------- */

/* sums[t][j] += x[t] . w[j], with lanes along columns [begin, end). tokens and rows are constants. */
V_INLINE void project_run(forward_block *s, int64_t t, int64_t j, const float *w, int64_t begin, int64_t end,
                          int tokens, int rows)
{
    const float *x = s->x[t];
    vf sums[TILE][ROWS];
    V_UNROLL
    for (int a = 0; a < tokens; a++)
        V_UNROLL
    for (int b = 0; b < ROWS; b++)
        sums[a][b] = v_zero();
    for (int64_t d = begin; d < end; d += VW) {
        vf xs[TILE];
        V_UNROLL
        for (int a = 0; a < tokens; a++)
            xs[a] = v_load(x + a * MHC_CHUNK + d);
        V_UNROLL
        for (int b = 0; b < rows; b++) {
            const vf ws = v_load(w + b * MHC_CHUNK + d);
            V_UNROLL
            for (int a = 0; a < tokens; a++)
                sums[a][b] = v_fma(xs[a], ws, sums[a][b]);
        }
    }
    V_UNROLL
    for (int a = 0; a < tokens; a++) {
        const vf lane_sums = v_sums4(sums[a][0], sums[a][1], sums[a][2], sums[a][3]);
        s->sums[t + a][j / ROWS] = v_add(s->sums[t + a][j / ROWS], lane_sums);
    }
}

V_INLINE void project(forward_block *s, int64_t t, int64_t j, const float *w, int64_t columns, int tokens, int rows)
{
    for (int64_t d = 0; d < columns; d += MHC_RUN)
        project_run(s, t, j, w, d, d + MHC_RUN < columns ? d + MHC_RUN : columns, tokens, rows);
}

V_INLINE void project_rows(forward_block *s, int64_t t, int64_t j, const float *w, int64_t columns, int tokens)
{
    switch (s->c->problem->sizes.M - j) {
    case 1: project(s, t, j, w, columns, tokens, 1); break;
    case 2: project(s, t, j, w, columns, tokens, 2); break;
    case 3: project(s, t, j, w, columns, tokens, 3); break;
    default: project(s, t, j, w, columns, tokens, ROWS); break;
    }
}

/* Elements from one stream of x to the next. The copy of y is contiguous. */
static int64_t stream_stride(const forward_context *c)
{
    return c->post != NULL ? c->problem->sizes.D : c->problem->args.x.stride[2];
}

/* Offset of a chunk in a row of x, in bytes. */
static int64_t chunk_offset(const forward_context *c, int64_t chunk)
{
    const int64_t i = chunk / c->chunks.per_stream, d = chunk % c->chunks.per_stream * MHC_CHUNK;
    return (i * stream_stride(c) + d) * mhc_element_size(c->problem->args.x.dtype);
}

/* Prefetches `lines` cache lines of each of TILE rows, from `offset` on. Inline, because the compiler would treat a
 * function as one without effect and remove it. */
V_INLINE void prefetch_rows(const char *const *rows, int64_t offset, int64_t lines)
{
    for (int a = 0; a < TILE; a++)
        for (int64_t line = 0; line < lines; line++)
            v_prefetch_l2((const void *)((uintptr_t)rows[a] + (uintptr_t)(offset + line * LINE)));
}

static void project_chunk(forward_block *s, int64_t chunk)
{
    const forward_context *c = s->c;
    const int64_t M = c->problem->sizes.M, groups = cot_ceil_div(M, ROWS);
    const int64_t begin = chunk % c->chunks.per_stream * MHC_CHUNK;
    const int64_t columns = cot_round_up(cot_clamp(c->problem->sizes.D - begin, 0, MHC_CHUNK), 4 * VW);
    const bool last = chunk + 1 == c->chunks.count;
    const char *const *next = last ? s->next_x_rows : s->x_rows;
    const int64_t offset = last ? 0 : chunk_offset(c, chunk + 1);
    const int64_t lines = next[0] != NULL ? MHC_CHUNK * mhc_element_size(c->problem->args.x.dtype) / LINE : 0;
    const int64_t group_lines = cot_ceil_div(lines, groups);
    for (int64_t j = 0; j < M; j += ROWS) {
        const float *w = c->weights + (chunk * M + j) * MHC_CHUNK;
        int64_t t = 0;
        for (; t + TILE <= s->count; t += TILE) {
            prefetch_rows(next + t, offset + j / ROWS * group_lines * LINE, group_lines);
            project_rows(s, t, j, w, columns, TILE);
        }
        for (; t < s->count; t++)
            project_rows(s, t, j, w, columns, 1);
    }
}

/* Converts a chunk of x to f32, with zeros up to a multiple of 4 vectors, and sums its squares. */
V_INLINE void convert_chunk(forward_block *s, int64_t chunk, int64_t columns, cot_dtype dtype)
{
    const int64_t offset = chunk_offset(s->c, chunk), size = mhc_element_size(dtype);
    for (int64_t t = 0; t < s->count; t++) {
        const char *source = s->x_rows[t] + offset;
        vf squares[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
        for (int64_t d = 0; d < columns; d += 4 * VW) {
            const int64_t remaining = columns - d >= 4 * VW ? 4 * VW : columns - d;
            V_UNROLL
            for (int v = 0; v < 4; v++) {
                const vf x = mhc_load_partial(source + (d + v * VW) * size, dtype, remaining - v * VW);
                v_store(s->x[t] + d + v * VW, x);
                squares[v] = v_fma(x, x, squares[v]);
            }
        }
        const vf sum = v_add(v_add(squares[0], squares[1]), v_add(squares[2], squares[3]));
        s->squares[t] = v_add(s->squares[t], sum);
    }
}

#define CONVERT(dtype)                                                                  \
    static void convert_chunk_##dtype(forward_block *s, int64_t chunk, int64_t columns) \
    {                                                                                   \
        convert_chunk(s, chunk, columns, COT_##dtype);                                  \
    }
MHC_FOR_EACH_DTYPE(CONVERT)

/* Adds the sums to the coefficients and clears them. v_sums4: lane k has sums of row k % 4. */
static void flush_sums(forward_block *s)
{
    for (int64_t t = 0; t < s->count; t++)
        for (int64_t j = 0; j < s->c->problem->sizes.M; j += ROWS) {
            float lanes[VW];
            v_store(lanes, s->sums[t][j / ROWS]);
            for (int k = 0; k < VW; k++)
                s->coefficients[j + k % ROWS][t] += lanes[k];
            s->sums[t][j / ROWS] = v_zero();
        }
}

static void project_block(forward_block *s)
{
    static void (*const converters[])(forward_block *, int64_t, int64_t) = {[COT_F32 - COT_F32] = convert_chunk_F32,
                                                                            [COT_F16 - COT_F32] = convert_chunk_F16,
                                                                            [COT_BF16 - COT_F32] = convert_chunk_BF16};
    const forward_context *c = s->c;
    const int64_t M = c->problem->sizes.M;
    memset(s->coefficients, 0, (size_t)cot_round_up(M, ROWS) * sizeof *s->coefficients);
    for (int64_t t = 0; t < s->count; t++) {
        s->squares[t] = v_zero();
        for (int64_t j = 0; j < M; j += ROWS)
            s->sums[t][j / ROWS] = v_zero();
    }
    for (int64_t chunk = 0; chunk < c->chunks.count; chunk++) {
        const int64_t begin = chunk % c->chunks.per_stream * MHC_CHUNK;
        converters[c->problem->args.x.dtype - COT_F32](s, chunk, cot_clamp(c->problem->sizes.D - begin, 0, MHC_CHUNK));
        project_chunk(s, chunk);
        if (VW < 16 && (chunk + 1) % c->chunks.per_stream == 0) /* with few lanes, each lane sums more runs */
            flush_sums(s);
    }
    flush_sums(s);
    const float K = (float)(c->problem->sizes.n * c->problem->sizes.D), eps = (float)c->problem->args.norm_eps;
    memset(s->inv_rms, 0, sizeof s->inv_rms);
    for (int64_t t = 0; t < s->count; t++)
        s->inv_rms[t] = 1 / sqrtf(v_sum(s->squares[t]) / K + eps);
}

/* ---- coefficients ------------------------------------------------------------------------------------- */

/* Computes z and the coefficients from it, for tokens [t, t+VW) of the block. */
static void compute_coefficients(forward_block *s, int64_t t)
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

static void sinkhorn(forward_block *s, int64_t t)
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
V_INLINE void compute_h_in_columns(const forward_block *s, int64_t t, char *h_in, int64_t d, cot_dtype dtype,
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

#define COMPUTE_H_IN(dtype)                                                      \
    static void compute_h_in_##dtype(const forward_block *s)                     \
    {                                                                            \
        const int64_t D = s->c->problem->sizes.D;                                \
        for (int64_t t = 0; t < s->count; t++) {                                 \
            char *h_in = mhc_row(&s->c->problem->args.h_in, s->token + t, 0, 0); \
            int64_t d = 0;                                                       \
            for (; d + 4 * VW <= D; d += 4 * VW)                                 \
                compute_h_in_columns(s, t, h_in, d, COT_##dtype, 4);             \
            for (; d < D; d += VW)                                               \
                compute_h_in_columns(s, t, h_in, d, COT_##dtype, 1);             \
        }                                                                        \
    }
MHC_FOR_EACH_DTYPE(COMPUTE_H_IN)

/* ---- items -------------------------------------------------------------------------------------------- */

static void forward_tokens(forward_block *s)
{
    static void (*const h_in_functions[])(const forward_block *) = {[COT_F32 - COT_F32] = compute_h_in_F32,
                                                                    [COT_F16 - COT_F32] = compute_h_in_F16,
                                                                    [COT_BF16 - COT_F32] = compute_h_in_BF16};
    const cot_mhc_pre_forward_args *a = &s->c->problem->args;
    const int64_t n = s->c->problem->sizes.n, M = s->c->problem->sizes.M;
    project_block(s);
    mhc_store_tile(s->inv_rms, MHC_TOKENS, &a->inv_rms, s->token, s->count, 1);
    mhc_store_tile(s->coefficients[0], MHC_TOKENS, &a->h_mix, s->token, s->count, M);
    for (int64_t t = 0; t < MHC_TOKENS; t += VW)
        compute_coefficients(s, t);
    mhc_store_tile(s->coefficients[0], MHC_TOKENS, &a->h_pre, s->token, s->count, n);
    mhc_store_tile(s->coefficients[n], MHC_TOKENS, &a->h_post, s->token, s->count, n);
    mhc_store_tile(s->coefficients[2 * n], MHC_TOKENS, &a->h_res_logits, s->token, s->count, n * n);
    if (cot_is_present(&a->h_in))
        h_in_functions[a->x.dtype - COT_F32](s);
    for (int64_t t = 0; cot_is_present(&a->h_res) && t < s->count; t += VW)
        sinkhorn(s, t);
    mhc_store_tile(s->coefficients[2 * n], MHC_TOKENS, &a->h_res, s->token, s->count, n * n);
}

/* Sets the rows of x of the block's tokens. */
static void set_rows(forward_block *s, int64_t end)
{
    const forward_context *c = s->c;
    const int64_t row_bytes = c->problem->sizes.n * c->problem->sizes.D * mhc_element_size(c->problem->args.x.dtype);
    char *const copy = (char *)s + MHC_FWD_SCRATCH;
    for (int64_t t = 0; t < s->count; t++) {
        const int64_t next = s->token + c->block_tokens + t;
        s->x_rows[t] = c->post != NULL ? copy + t * row_bytes : mhc_row(&c->problem->args.x, s->token + t, 0, 0);
        s->next_x_rows[t] = next < end && c->post == NULL ? mhc_row(&c->problem->args.x, next, 0, 0) : NULL;
    }
    if (c->post != NULL)
        V_NAME(mhc_post_fwd_tokens)(c->post, s->token, s->token + s->count, copy);
}

static void forward_item(void *context, int64_t item, void *scratch)
{
    const forward_context *c = context;
    const int64_t begin = item * c->item_tokens;
    const int64_t end = begin + cot_clamp(c->problem->sizes.tokens - begin, 0, c->item_tokens);
    forward_block *const s = scratch;
    s->c = c;
    for (s->token = begin; s->token < end; s->token += c->block_tokens) {
        s->count = cot_clamp(end - s->token, 0, c->block_tokens);
        set_rows(s, end);
        forward_tokens(s);
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
        cot_run_items(queue, context.chunks.count, mhc_pack_item, &packing);
    cot_run_items_scratch(queue, cot_ceil_div(p->sizes.tokens, context.item_tokens), forward_item, &context);
    return COT_OK;
}

cot_status V_NAME(mhc_pre_fwd_tiles)(cot_queue *queue, const void *problem, void *workspace)
{
    return V_NAME(mhc_pre_fwd_blocks)(queue, problem, NULL, workspace);
}
