/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_post_rows.c: post and its gradient for contiguous d:
 *     y[o,d]  = h_post[o]*f[d] + sum_i h_res[i,o]*x[i,d]    df[d]       = sum_o h_post[o]*dy[o,d]
 *     dx[i,d] = sum_o h_res[i,o]*dy[o,d]                    dh_res[i,o] = sum_d x[i,d]*dy[o,d],  dh_post the same of f
 *
 * An item is up to MHC_TOKENS tokens. Lanes are columns d. n is a constant in both directions.
 *   Forward   The n+1 inputs of a cache line of columns are read once, and all n outputs are computed from them. The
 *             stores of a line follow each other. Stores that bypass the caches take much longer when stores of other
 *             streams come between those of a line.
 *   Backward  f is handled as stream n, with h_post as its row of h_res. A chunk of columns of dy is read once for each
 *             stream. So n sums and one row of outputs fit in the registers, and the chunk stays in the L1 cache.
 * The kernels of post_pre call both directions for the tokens of a block (mhc_blocks.h). Then dy is g, in f32 for every
 * dtype. */
#include "mhc_blocks.h"
#include "mhc_rows.h"

cot_status V_NAME(mhc_post_fwd_rows)(cot_queue *, const void *, void *);
cot_status V_NAME(mhc_post_bwd_rows)(cot_queue *, const void *, void *);

enum {
    LINE = 64, /* bytes of a cache line */
    MAX_LINE_VECTORS = LINE / (VW * 2),
    STORE_VECTORS = VW == 4 ? 1 : 2 /* that the backward stores together */
};

/* Rows of one token: the n streams and f, and their outputs. NULL = not an output. */
typedef struct post_token {
    const char *x[MHC_MAX_N + 1], *dy[MHC_MAX_N];           /* x[n] is f */
    const char *next_x[MHC_MAX_N + 1], *next_dy[MHC_MAX_N]; /* rows of the next token, to be prefetched */
    char *y[MHC_MAX_N], *dx[MHC_MAX_N + 1];                 /* dx[n] is df */
    char *copy[MHC_MAX_N];                                  /* a second y, in the caches */
    float h_res[MHC_MAX_N + 1][MHC_MAX_N];                  /* [in][out]; h_res[n] is h_post */
    vf dh_res[MHC_MAX_N + 1][MHC_MAX_N];                    /* one partial sum in each lane */
    int64_t D;
    cot_dtype dtype;
    /* df has its own flag because its rows may be aligned differently from those of dx. */
    bool stream_stores, stream_df_stores, need_sums;
} post_token;

/* ---- forward ------------------------------------------------------------------------------------------ */

/* Stores the first n elements of `vectors` vectors. `vectors` is 1 or even. */
V_INLINE void store_vectors(char *p, cot_dtype dtype, const vf *a, int vectors, int64_t n, bool stream)
{
    if (vectors == 1)
        mhc_store_partial(p, dtype, a[0], n, stream);
    V_UNROLL
    for (int v = 0; v + 1 < vectors; v += 2)
        mhc_store_pair(p + v * VW * mhc_element_size(dtype), dtype, a[v], a[v + 1], n - v * VW, stream);
}

/* `vectors` vectors of columns, of which the first `remaining` columns are within D. */
V_INLINE void forward_columns(const post_token *s, int64_t d, int64_t remaining, int n, int vectors, cot_dtype dtype)
{
    const int64_t size = mhc_element_size(dtype);
    vf x[MHC_MAX_N + 1][MAX_LINE_VECTORS];
    V_UNROLL
    for (int i = 0; i <= n; i++)
        V_UNROLL
    for (int v = 0; v < vectors; v++)
        x[i][v] = mhc_load_partial(s->x[i] + (d + v * VW) * size, dtype, remaining - v * VW);
    V_UNROLL
    for (int o = 0; o < n; o++) {
        vf y[MAX_LINE_VECTORS];
        V_UNROLL
        for (int v = 0; v < vectors; v++)
            y[v] = v_mul(v_set1(s->h_res[n][o]), x[n][v]);
        V_UNROLL
        for (int i = 0; i < n; i++)
            V_UNROLL
        for (int v = 0; v < vectors; v++)
            y[v] = v_fma(v_set1(s->h_res[i][o]), x[i][v], y[v]);
        if (s->y[o] != NULL)
            store_vectors(s->y[o] + d * size, dtype, y, vectors, remaining, s->stream_stores);
        if (s->copy[o] != NULL)
            store_vectors(s->copy[o] + d * size, dtype, y, vectors, remaining, false);
    }
}

V_INLINE void prefetch_line(const post_token *s, int64_t d, int n, cot_dtype dtype)
{
    const int64_t offset = d * mhc_element_size(dtype);
    for (int i = 0; offset % LINE == 0 && i <= n; i++)
        v_prefetch_l2(s->next_x[i] + offset);
}

V_INLINE void forward_token(post_token *s, int n, cot_dtype dtype)
{
    const int vectors = LINE / (VW * (dtype == COT_F32 ? 4 : 2));
    int64_t d = 0;
    /* Portable C has no stores that bypass the caches. Its whole lines would only be more code. */
    for (; VW > 4 && d + vectors * VW <= s->D; d += vectors * VW) {
        prefetch_line(s, d, n, dtype);
        forward_columns(s, d, vectors * VW, n, vectors, dtype);
    }
    for (; d < s->D; d += VW) {
        prefetch_line(s, d, n, dtype);
        forward_columns(s, d, s->D - d, n, 1, dtype);
    }
}

/* ---- backward ----------------------------------------------------------------------------------------- */

/* Columns [begin, end) of stream i: its output, and its sums with all streams of dy. */
V_INLINE void backward_row(post_token *s, int i, int64_t begin, int64_t end, int n, cot_dtype dtype, cot_dtype dy_dtype)
{
    const int64_t size = mhc_element_size(dtype), dy_size = mhc_element_size(dy_dtype);
    const bool stream_stores = i < n ? s->stream_stores : s->stream_df_stores;
    vf sums[MHC_MAX_N];
    V_UNROLL
    for (int o = 0; o < n; o++)
        sums[o] = v_zero();
    for (int64_t d = begin; d < end; d += STORE_VECTORS * VW) {
        vf dx[STORE_VECTORS];
        V_UNROLL
        for (int v = 0; v < STORE_VECTORS; v++) {
            const int64_t column = d + v * VW, remaining = s->D - column;
            if (column * size % LINE == 0) {
                v_prefetch_l2(s->next_x[i] + column * size);
                if (i < n)
                    v_prefetch_l2(s->next_dy[i] + column * dy_size);
            }
            const vf x = mhc_load_partial(s->x[i] + column * size, dtype, remaining);
            V_UNROLL
            for (int o = 0; o < n; o++) {
                const vf dy = mhc_load_partial(s->dy[o] + column * dy_size, dy_dtype, remaining);
                sums[o] = v_fma(x, dy, sums[o]);
                dx[v] = o == 0 ? v_mul(v_set1(s->h_res[i][o]), dy) : v_fma(v_set1(s->h_res[i][o]), dy, dx[v]);
            }
        }
        if (s->dx[i] != NULL)
            store_vectors(s->dx[i] + d * size, dtype, dx, STORE_VECTORS, s->D - d, stream_stores);
    }
    V_UNROLL
    for (int o = 0; o < n; o++)
        s->dh_res[i][o] = v_add(s->dh_res[i][o], sums[o]);
}

V_INLINE void backward_token(post_token *s, int n, cot_dtype dtype, cot_dtype dy_dtype)
{
    for (int i = 0; i <= n; i++)
        for (int o = 0; o < n; o++)
            s->dh_res[i][o] = v_zero();
    for (int64_t d = 0; d < s->D; d += MHC_RUN) {
        const int64_t end = d + MHC_RUN < s->D ? d + MHC_RUN : s->D;
        for (int i = 0; i <= n; i++)
            backward_row(s, i, d, end, n, dtype, dy_dtype);
    }
}

/* ---- instances: n as a constant, in every dtype ---------------------------------------------------------- */

#define INSTANCE(n, dtype)                              \
    static void forward_##n##_##dtype(post_token *s)    \
    {                                                   \
        forward_token(s, n, COT_##dtype);               \
    }                                                   \
    static void backward_##n##_##dtype(post_token *s)   \
    {                                                   \
        backward_token(s, n, COT_##dtype, COT_##dtype); \
    }
/* The backward with dy in f32. */
#define G_INSTANCE(n, dtype)                            \
    static void backward_g_##n##_##dtype(post_token *s) \
    {                                                   \
        backward_token(s, n, COT_##dtype, COT_F32);     \
    }
#define INSTANCES(n) INSTANCE(n, F32) INSTANCE(n, F16) INSTANCE(n, BF16) G_INSTANCE(n, F16) G_INSTANCE(n, BF16)
MHC_FOR_EACH_N(INSTANCES)

/* clang-format off */
#define FORWARDS(n) {forward_##n##_F32, forward_##n##_F16, forward_##n##_BF16},
#define BACKWARDS(n) {backward_##n##_F32, backward_##n##_F16, backward_##n##_BF16},
#define G_BACKWARDS(n) {backward_##n##_F32, backward_g_##n##_F16, backward_g_##n##_BF16},
/* clang-format on */
static void (*const forwards[MHC_MAX_N][3])(post_token *) = {MHC_FOR_EACH_N(FORWARDS)};
static void (*const backwards[MHC_MAX_N][3])(post_token *) = {MHC_FOR_EACH_N(BACKWARDS)};
static void (*const g_backwards[MHC_MAX_N][3])(post_token *) = {MHC_FOR_EACH_N(G_BACKWARDS)};

/* Row of the tables for n streams. Without the clamp, gcc warns about a path with n = 0. */
static int64_t instance_row(int64_t n)
{
    return cot_clamp(n - 1, 0, MHC_MAX_N - 1);
}

/* ---- items -------------------------------------------------------------------------------------------- */

static void load_coefficients(post_token *s, const cot_tensor *h_res, const cot_tensor *h_post, int64_t token,
                              int64_t n)
{
    for (int64_t o = 0; o < n; o++) {
        for (int64_t i = 0; i < n; i++)
            s->h_res[i][o] =
                ((const float *)h_res->data)[mhc_token_offset(h_res, token) + mhc_coefficient_offset(h_res, i * n + o)];
        s->h_res[n][o] = ((const float *)h_post->data)[mhc_token_offset(h_post, token) + o * h_post->stride[2]];
    }
}

/* Row i of a token in a buffer [tokens][n][D] that begins at token `begin`. */
static char *buffer_row(void *buffer, cot_dtype dtype, const mhc_sizes *sizes, int64_t begin, int64_t token, int64_t i)
{
    return (char *)buffer + ((token - begin) * sizes->n + i) * sizes->D * mhc_element_size(dtype);
}

void V_NAME(mhc_post_fwd_tokens)(const mhc_post_forward_problem *p, int64_t begin, int64_t end, void *copy)
{
    const cot_mhc_post_forward_args *a = &p->args;
    const int64_t n = p->sizes.n;
    void (*const run)(post_token *) = forwards[instance_row(n)][a->x.dtype - COT_F32];
    post_token s = {.D = p->sizes.D, .dtype = a->x.dtype, .stream_stores = mhc_should_stream(&a->y, &p->sizes)};
    for (int64_t t = begin; t < end; t++) {
        load_coefficients(&s, &a->h_res, &a->h_post, t, n);
        const int64_t next = t + 1 < p->sizes.tokens ? t + 1 : t;
        for (int64_t i = 0; i < n; i++) {
            s.x[i] = mhc_row(&a->x, t, i, 0);
            s.next_x[i] = mhc_row(&a->x, next, i, 0);
            s.y[i] = cot_is_present(&a->y) ? mhc_row(&a->y, t, i, 0) : NULL;
            s.copy[i] = copy != NULL ? buffer_row(copy, s.dtype, &p->sizes, begin, t, i) : NULL;
        }
        s.x[n] = mhc_row(&a->f, t, 0, 0);
        s.next_x[n] = mhc_row(&a->f, next, 0, 0);
        run(&s);
    }
    if (s.stream_stores)
        v_fence();
}

/* The tokens of an item. */
typedef struct post_context {
    const void *problem;
    int64_t item_tokens;
} post_context;

static void forward_item(void *context, int64_t item)
{
    const post_context *c = context;
    const mhc_post_forward_problem *p = c->problem;
    V_NAME(mhc_post_fwd_tokens)
    (p, item * c->item_tokens, cot_clamp((item + 1) * c->item_tokens, 0, p->sizes.tokens), NULL);
}

cot_status V_NAME(mhc_post_fwd_rows)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const mhc_sizes *sizes = problem;
    post_context c = {problem, mhc_block_tokens(sizes->tokens, 4, MHC_TOKENS)};
    cot_run_items(queue, cot_ceil_div(sizes->tokens, c.item_tokens), forward_item, &c);
    return COT_OK;
}

static void store_sums(const post_token *s, const cot_mhc_post_backward_args *a, int64_t token, int64_t n)
{
    for (int64_t o = 0; o < n; o++) {
        for (int64_t i = 0; cot_is_present(&a->dh_res) && i < n; i++)
            ((float *)
                 a->dh_res.data)[mhc_token_offset(&a->dh_res, token) + mhc_coefficient_offset(&a->dh_res, i * n + o)] =
                v_sum(s->dh_res[i][o]);
        if (cot_is_present(&a->dh_post))
            ((float *)a->dh_post.data)[mhc_token_offset(&a->dh_post, token) + o * a->dh_post.stride[2]] =
                v_sum(s->dh_res[n][o]);
    }
}

void V_NAME(mhc_post_bwd_tokens)(const mhc_post_backward_problem *p, int64_t begin, int64_t end, float *g)
{
    const cot_mhc_post_backward_args *a = &p->args;
    const int64_t n = p->sizes.n;
    void (*const run)(post_token *) = (g != NULL ? g_backwards : backwards)[instance_row(n)][a->x.dtype - COT_F32];
    post_token s = {.D = p->sizes.D,
                    .dtype = a->x.dtype,
                    .stream_stores = mhc_should_stream(&a->dx, &p->sizes),
                    .stream_df_stores = mhc_should_stream(&a->df, &p->sizes)};
    for (int64_t t = begin; t < end; t++) {
        load_coefficients(&s, &a->h_res, &a->h_post, t, n);
        const int64_t next = t + 1 < p->sizes.tokens ? t + 1 : t;
        for (int64_t i = 0; i < n; i++) {
            s.x[i] = mhc_row(&a->x, t, i, 0);
            s.dy[i] = g != NULL ? buffer_row(g, COT_F32, &p->sizes, begin, t, i) : mhc_row(&a->dy, t, i, 0);
            s.next_x[i] = mhc_row(&a->x, next, i, 0);
            s.next_dy[i] = g != NULL ? s.dy[i] : mhc_row(&a->dy, next, i, 0);
            s.dx[i] = cot_is_present(&a->dx) ? mhc_row(&a->dx, t, i, 0) : NULL;
        }
        s.x[n] = mhc_row(&a->f, t, 0, 0);
        s.next_x[n] = mhc_row(&a->f, next, 0, 0);
        s.dx[n] = cot_is_present(&a->df) ? mhc_row(&a->df, t, 0, 0) : NULL;
        run(&s);
        store_sums(&s, a, t, n);
    }
    if (s.stream_stores || s.stream_df_stores)
        v_fence();
}

static void backward_item(void *context, int64_t item)
{
    const post_context *c = context;
    const mhc_post_backward_problem *p = c->problem;
    V_NAME(mhc_post_bwd_tokens)
    (p, item * c->item_tokens, cot_clamp((item + 1) * c->item_tokens, 0, p->sizes.tokens), NULL);
}

cot_status V_NAME(mhc_post_bwd_rows)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const mhc_sizes *sizes = problem;
    post_context c = {problem, mhc_block_tokens(sizes->tokens, 4, MHC_TOKENS)};
    cot_run_items(queue, cot_ceil_div(sizes->tokens, c.item_tokens), backward_item, &c);
    return COT_OK;
}
