/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_fwd_tiles.c: pre forward for contiguous d and n <= 8:
 *     h_mix = W x, W = phi * gamma [M, n*D], M = n*n + 2n
 *     inv_rms = 1 / sqrt(mean x^2 + norm_eps)      z = alpha * h_mix * inv_rms + bias
 *     h_in = sum_i h_pre[i] * x[i,:]
 * and the outputs that depend on z (cotangent/mhc.h), Sinkhorn included.
 *
 * A block is up to BLOCK_TOKENS tokens. The products with W and the sums of squares are in mhc_project_vectors.h, for
 * AMX in mhc_project_amx.h. They read x once, chunk by chunk. Coefficients are computed with tokens in lanes. h_in reads
 * x again, from the L2 cache. In post_pre, x is y: a block first computes its y, and reads it from a copy in the
 * caches. */
#include "mhc_blocks.h"
#include "mhc_sinkhorn.h"
#include "simd/matmul.h"
#if defined(COT_MATMUL_AMX)
#include "mhc_project_amx.h"
#else
#include "mhc_project_vectors.h"
#endif

#include <math.h>

cot_status V_NAME(mhc_pre_fwd_tiles)(cot_queue *, const void *, void *);

enum {
#if defined(COT_MATMUL_AMX)
    FWD_SCRATCH = MHC_FWD_AMX_SCRATCH,
#else
    FWD_SCRATCH = MHC_FWD_SCRATCH,
#endif
    ITEMS_PER_THREAD = 8, /* more items than threads balance the load */
    MAX_ITEM_BLOCKS = 8
};

typedef struct forward_context {
    const mhc_pre_forward_problem *problem;
    const mhc_post_forward_problem *post; /* post_pre: computes x; NULL = x is given */
    mhc_chunks chunks;
    const void *weights;
    int64_t block_tokens, item_tokens; /* an item has several blocks when there are many tokens */
    bool stream_stores;
} forward_context;

/* The state of an item, in its thread's scratch. */
typedef struct forward_state {
    const forward_context *c;
    int64_t first_token; /* of this block */
    /* Rows 0..n-1 of h_mix become h_pre, rows n..2n-1 h_post. The other rows become h_res_logits, then h_res if it is an
     * output. */
    projection p;
    _Alignas(64) float inv_rms[BLOCK_TOKENS];
} forward_state;

_Static_assert(sizeof(forward_state) <= FWD_SCRATCH, "forward_state must fit in the thread's scratch");

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
        vf z = v_fma(alpha, v_mul(v_load(s->p.h_mix[j] + t), inv_rms), bias);
        if (j < n)
            z = v_add(mhc_sigmoid(z), v_set1((float)a->hc_eps));
        else if (j < 2 * n)
            z = v_mul(mhc_sigmoid(z), post_scale);
        v_store(s->p.h_mix[j] + t, z);
    }
}

static void sinkhorn(forward_state *s, int64_t t)
{
    const cot_mhc_pre_forward_args *a = &s->c->problem->args;
    const int64_t n = s->c->problem->sizes.n;
    vf h_res[MHC_MAX_N * MHC_MAX_N];
    for (int64_t ij = 0; ij < n * n; ij++)
        h_res[ij] = v_load(s->p.h_mix[2 * n + ij] + t);
    mhc_sinkhorn(n, a->sinkhorn_iterations, a->sinkhorn_eps, h_res);
    for (int64_t ij = 0; ij < n * n; ij++)
        v_store(s->p.h_mix[2 * n + ij] + t, h_res[ij]);
}

/* ---- h_in --------------------------------------------------------------------------------------------- */

/* Columns [d, d + vectors*VW) of h_in of one token. */
V_INLINE void compute_h_in_columns(const forward_state *s, int64_t t, char *h_in, int64_t d, cot_dtype dtype,
                                   int vectors)
{
    const mhc_pre_forward_problem *p = s->c->problem;
    const int64_t size = mhc_element_size(dtype), remaining = vectors == 4 ? 4 * VW : p->sizes.D - d;
    const char *x = s->p.x_rows[t] + d * size;
    vf sums[4];
    V_UNROLL
    for (int v = 0; v < vectors; v++)
        sums[v] = v_zero();
    for (int64_t i = 0; i < p->sizes.n; i++) {
        const vf h_pre = v_set1(s->p.h_mix[i][t]);
        const char *row = x + i * s->p.stream_stride * size;
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
        for (int64_t t = 0; t < s->p.token_count; t++) {                               \
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
    project_block(&s->p);
    const float K = (float)(n * s->c->problem->sizes.D), eps = (float)a->norm_eps;
    memset(s->inv_rms, 0, sizeof s->inv_rms);
    for (int64_t t = 0; t < s->p.token_count; t++)
        s->inv_rms[t] = 1 / sqrtf(s->p.squares[t] / K + eps);
    mhc_store_coefficients(s->inv_rms, BLOCK_TOKENS, &a->inv_rms, s->first_token, s->p.token_count, 1);
    mhc_store_coefficients(s->p.h_mix[0], BLOCK_TOKENS, &a->h_mix, s->first_token, s->p.token_count, M);
    for (int64_t t = 0; t < s->p.token_count; t += VW)
        compute_coefficients(s, t);
    mhc_store_coefficients(s->p.h_mix[0], BLOCK_TOKENS, &a->h_pre, s->first_token, s->p.token_count, n);
    mhc_store_coefficients(s->p.h_mix[n], BLOCK_TOKENS, &a->h_post, s->first_token, s->p.token_count, n);
    mhc_store_coefficients(s->p.h_mix[2 * n], BLOCK_TOKENS, &a->h_res_logits, s->first_token, s->p.token_count, n * n);
    if (cot_is_present(&a->h_in))
        h_in_functions[a->x.dtype - COT_F32](s);
    for (int64_t t = 0; cot_is_present(&a->h_res) && t < s->p.token_count; t += VW)
        sinkhorn(s, t);
    mhc_store_coefficients(s->p.h_mix[2 * n], BLOCK_TOKENS, &a->h_res, s->first_token, s->p.token_count, n * n);
}

/* Sets the rows of x of the block's tokens. */
static void set_rows(forward_state *s, int64_t end)
{
    const forward_context *c = s->c;
    const int64_t row_bytes = c->problem->sizes.n * c->problem->sizes.D * mhc_element_size(c->problem->args.x.dtype);
    char *const copy = (char *)s + FWD_SCRATCH;
    for (int64_t t = 0; t < s->p.token_count; t++) {
        const int64_t token = s->first_token + t, next = token + c->block_tokens;
        s->p.x_rows[t] = c->post != NULL ? copy + t * row_bytes : mhc_row(&c->problem->args.x, token, 0, 0);
        s->p.next_x_rows[t] = next < end && c->post == NULL ? mhc_row(&c->problem->args.x, next, 0, 0) : s->p.x_rows[t];
    }
    if (c->post != NULL)
        MHC_POST_NAME(mhc_post_fwd_tokens)(c->post, s->first_token, s->first_token + s->p.token_count, copy);
}

static void forward_item(void *context, int64_t item, void *scratch)
{
    const forward_context *c = context;
    const int64_t begin = item * c->item_tokens;
    const int64_t end = begin + cot_clamp(c->problem->sizes.tokens - begin, 0, c->item_tokens);
    forward_state *const s = scratch;
    s->c = c;
    s->p.sizes = &c->problem->sizes;
    s->p.chunks = &c->chunks;
    s->p.weights = c->weights;
    s->p.dtype = c->problem->args.x.dtype;
    s->p.stream_stride =
        c->post != NULL ? c->problem->sizes.D : c->problem->args.x.stride[2]; /* the copy is contiguous */
    mt_state host_tiles;
    mt_begin(&host_tiles);
    for (s->first_token = begin; s->first_token < end; s->first_token += c->block_tokens) {
        s->p.token_count = cot_clamp(end - s->first_token, 0, c->block_tokens);
        set_rows(s, end);
        forward_block(s);
    }
    mt_end(&host_tiles);
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
                               .block_tokens = mhc_block_tokens(p->sizes.tokens, BLOCK_UNIT, BLOCK_TOKENS),
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
