/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_last.c: where channels are contiguous, or where there are few tokens,
 *     g[t]  = dy[t] * act'(z[t])                      z as in the forward
 *     dx[t] = sum_j w[K-1-j] * g[t+j]                 dw[k] = sum_t g[t] * xe[t+k-K+1]      db = sum_t g[t]
 *
 * Items and tiles as in the forward. One walk down the tokens does everything: at step i it has the last K inputs
 * and the last K of g, adds to the sums, and finishes dx of token i-K+1. A piece therefore takes K-1 steps more than
 * it has tokens: what they finish before its first token is dinitial_state's or the piece's before it. Sums of a tile
 * are added to the item's, and those, from the workspace, by causal_conv1d_reduce.h. */
#include "causal_conv1d_reduce.h"
#include "causal_conv1d_tiles.h"

cot_status V_NAME(causal_conv1d_bwd_channel_last)(cot_queue *, const void *, void *);

typedef struct backward_columns {
    int64_t n, K, channels;
    const char *x, *dy; /* NULL: no tokens here, g = 0 */
    char *dx;           /* row i is that of token i-K+1 */
    int64_t x_stride, dy_stride, dx_stride;
    cot_dtype dtype, dx_dtype; /* of x and dy; of dx */
    float *kept;               /* see kept_rows */
    int64_t sums;              /* the first of the rows of those that the tile's are added to */
    bool silu, stream;
    const int32_t *ids;
} backward_columns;

/* What is kept of a column (conv1d_keep): K weights and the bias, K-1 of x before row 0, K-1 of g, K+1 sums, and as many for
 * those that nobody wants. */
V_INLINE int64_t kept_rows(int64_t K)
{
    return 5 * K + 1;
}

V_INLINE int64_t row_of_g(int64_t K)
{
    return 2 * K;
}

V_INLINE int64_t row_of_sums(int64_t K, bool wanted)
{
    return wanted ? 3 * K - 1 : 4 * K;
}

/* Where the rows of a column begin. */
typedef struct kept_column {
    const float *weight;
    float *history, *g, *sums;
} kept_column;

V_INLINE kept_column kept_column_at(const backward_columns *s, int64_t channel, int64_t K)
{
    float *first = s->kept + channel * kept_rows(K);
    return (kept_column){first, first + (K + 1) * VW, first + row_of_g(K) * VW, first + s->sums * VW};
}

V_INLINE conv1d_out results_of(const backward_columns *s, char *runs)
{
    return (conv1d_out){
        .rows = s->dx, .runs = runs, .stride = s->dx_stride, .n = s->n, .channels = s->channels, .stream = s->stream};
}

static void walk_edge(const backward_columns *s, int64_t channel)
{
    const int64_t K = s->K, size = conv1d_size(s->dtype), dx_size = conv1d_size(s->dx_dtype);
    for (int64_t c = channel; c < s->channels; c += VW) {
        const int lanes = (int)(s->channels - c < VW ? s->channels - c : VW);
        const kept_column kept = kept_column_at(s, c, K);
        vf h[CONV1D_MAX_K], g[CONV1D_MAX_K], sums[CONV1D_MAX_K + 1];
        for (int64_t k = 0; k < K - 1; k++) {
            h[k] = v_load(kept.history + k * VW);
            g[k] = v_load(kept.g + k * VW);
        }
        for (int64_t k = 0; k <= K; k++)
            sums[k] = v_zero();
        for (int64_t i = 0; i < s->n; i++) {
            const int32_t *ids = s->ids != NULL ? s->ids + i : NULL;
            h[K - 1] = g[K - 1] = v_zero();
            if (s->x != NULL) {
                h[K - 1] = v_load_n_as(s->x + i * s->x_stride + c * size, s->dtype, lanes);
                if (ids == NULL || ids[K - 1] >= 0)
                    g[K - 1] = v_load_n_as(s->dy + i * s->dy_stride + c * size, s->dtype, lanes);
                vf z = v_load(kept.weight + K * VW), before = v_zero();
                for (int64_t k = 0; s->silu && k < K; k++) {
                    conv1d_next_tap(k, &z, &before);
                    if (ids == NULL || ids[k] == ids[K - 1])
                        z = v_fma(v_load(kept.weight + k * VW), h[k], z);
                }
                z = conv1d_taps_sum(K, z, before);
                if (s->silu && (ids == NULL || ids[K - 1] >= 0))
                    g[K - 1] = v_mul(g[K - 1], v_silu_slope(z));
                for (int64_t k = 0; k < K; k++)
                    if (ids == NULL || (ids[k] == ids[K - 1] && ids[k] >= 0))
                        sums[k] = v_fma(g[K - 1], h[k], sums[k]);
                sums[K] = v_add(sums[K], g[K - 1]);
            }
            vf dx = v_zero(), before = v_zero();
            for (int64_t j = 0; j < K; j++) {
                conv1d_next_tap(j, &dx, &before);
                if (ids == NULL || (ids[j] == ids[0] && ids[0] >= 0))
                    dx = v_fma(v_load(kept.weight + (K - 1 - j) * VW), g[j], dx);
            }
            dx = conv1d_taps_sum(K, dx, before);
            v_store_n_as(s->dx + i * s->dx_stride + c * dx_size, s->dx_dtype, dx, lanes);
            for (int64_t k = 0; k < K - 1; k++) {
                h[k] = h[k + 1];
                g[k] = g[k + 1];
            }
        }
        for (int64_t k = 0; k < K - 1; k++) {
            v_store(kept.history + k * VW, h[k]);
            v_store(kept.g + k * VW, g[k]);
        }
        for (int64_t k = 0; k <= K; k++)
            v_store(kept.sums + k * VW, v_add(v_load(kept.sums + k * VW), sums[k]));
    }
}

/* ---- where registers are few: AVX2 ---------------------------------------------------------------------------- *
 * K weights, K+1 sums and two windows do not fit in 16 registers at once. So a tile's columns pass through buffers of the
 * first-level cache: x and dy, of which g is made in place, then dx and the sums. Two columns go at a time: they are a
 * cache line, which is read once and may be streamed. */

/* dy to g, of `turns` tokens, which take turns as v_silu_slopes does. */
V_INLINE void column_slopes(float *g, const float *h, const vf *w, vf bias, int turns, int64_t K)
{
    vf z[4], before[4];
    V_UNROLL
    for (int v = 0; v < turns; v++) {
        z[v] = bias;
        before[v] = v_zero();
    }
    V_UNROLL
    for (int64_t k = 0; k < K; k++)
        for (int v = 0; v < turns; v++) {
            conv1d_next_tap(k, &z[v], &before[v]);
            z[v] = v_fma(w[k], v_load(h + (v + k) * VW), z[v]);
        }
    V_UNROLL
    for (int v = 0; v < turns; v++)
        z[v] = conv1d_taps_sum(K, z[v], before[v]);
    v_silu_slopes(z, turns);
    V_UNROLL
    for (int v = 0; v < turns; v++)
        v_store(g + v * VW, v_mul(z[v], v_load(g + v * VW)));
}

enum { ROWS = CONV1D_MAX_K + CONV1D_TILE };

/* A tile's `count` columns, 1 or 2, to the buffers, behind what they have of the tokens before; and dx back. */
V_INLINE void stage_columns(const backward_columns *s, int64_t channel, int count, int64_t K, cot_dtype dtype,
                            float h[2][ROWS * VW], float g[2][ROWS * VW])
{
    const int64_t size = conv1d_size(dtype), bytes = count * VW * size;
    const char *x = s->x + channel * size, *dy = s->dy + channel * size;
    for (int64_t i = K - 1; i < K - 1 + s->n; i++, x += s->x_stride, dy += s->dy_stride) {
        conv1d_ask(x, s->x_stride, bytes);
        conv1d_ask(dy, s->dy_stride, bytes);
        for (int v = 0; v < count; v++) {
            v_store(h[v] + i * VW, v_load_as(x + v * VW * size, dtype));
            v_store(g[v] + i * VW, v_load_as(dy + v * VW * size, dtype));
        }
    }
}

V_INLINE void unstage_columns(conv1d_out *out, int64_t c, int count, cot_dtype dtype, float dx[2][CONV1D_TILE * VW])
{
    char *to = conv1d_out_at(out, c, conv1d_size(dtype));
    for (int64_t i = 0; i < out->n; i++, to += conv1d_out_stride(out)) {
        if (count == 2)
            v_store2_as(to, dtype, v_load(dx[0] + i * VW), v_load(dx[1] + i * VW));
        else
            v_store_as(to, dtype, v_load(dx[0] + i * VW));
        conv1d_out_leave(out, count * VW * conv1d_size(dtype));
    }
}

/* One column, of n <= CONV1D_TILE tokens. */
V_INLINE void walk_buffered(const backward_columns *s, int64_t c, int64_t K, bool silu, float *h, float *g, float *dx)
{
    const int64_t n = s->n;
    const kept_column kept = kept_column_at(s, c, K);
    vf w[CONV1D_MAX_K], sums[CONV1D_MAX_K + 1];
    for (int64_t k = 0; k < K; k++)
        w[k] = v_load(kept.weight + k * VW);
    for (int64_t k = 0; k < K - 1; k++) {
        v_store(h + k * VW, v_load(kept.history + k * VW));
        v_store(g + k * VW, v_load(kept.g + k * VW));
    }
    const vf bias = v_load(kept.weight + K * VW);
    int64_t token = silu ? 0 : n;
    for (; token + 4 <= n; token += 4)
        column_slopes(g + (K - 1 + token) * VW, h + token * VW, w, bias, 4, K);
    for (; token < n; token++)
        column_slopes(g + (K - 1 + token) * VW, h + token * VW, w, bias, 1, K);
    for (int64_t k = 0; k <= K; k++)
        sums[k] = v_zero();
    for (int64_t i = 0; i < n; i++) {
        const vf own = v_load(g + (K - 1 + i) * VW);
        vf out = v_zero(), before = v_zero();
        V_UNROLL
        for (int64_t k = 0; k < K; k++) {
            conv1d_next_tap(k, &out, &before);
            sums[k] = v_fma(own, v_load(h + (i + k) * VW), sums[k]);
            out = v_fma(w[K - 1 - k], v_load(g + (i + k) * VW), out);
        }
        sums[K] = v_add(sums[K], own);
        v_store(dx + i * VW, conv1d_taps_sum(K, out, before));
    }
    for (int64_t k = 0; k < K - 1; k++) {
        v_store(kept.history + k * VW, v_load(h + (n + k) * VW));
        v_store(kept.g + k * VW, v_load(g + (n + k) * VW));
    }
    for (int64_t k = 0; k <= K; k++)
        v_store(kept.sums + k * VW, v_add(v_load(kept.sums + k * VW), sums[k]));
}

V_INLINE int64_t walk_columns(const backward_columns *s, int64_t K, cot_dtype dtype)
{
    float h[2][ROWS * VW], g[2][ROWS * VW], dx[2][CONV1D_TILE * VW];
    _Alignas(CONV1D_RUN) char runs[CONV1D_RUNS];
    conv1d_out out = results_of(s, runs);
    int64_t c = 0;
    for (int count; c + VW <= s->channels; c += count * VW) {
        count = c + 2 * VW <= s->channels ? 2 : 1;
        if (count == 2)
            stage_columns(s, c, 2, K, dtype, h, g);
        else
            stage_columns(s, c, 1, K, dtype, h, g);
        for (int v = 0; v < count; v++)
            if (s->silu)
                walk_buffered(s, c + v * VW, K, true, h[v], g[v], dx[v]);
            else
                walk_buffered(s, c + v * VW, K, false, h[v], g[v], dx[v]);
        if (count == 2)
            unstage_columns(&out, c, 2, dtype, dx);
        else
            unstage_columns(&out, c, 1, dtype, dx);
        conv1d_out_made(&out, c + count * VW, conv1d_size(dtype));
    }
    return c;
}

/* ---- where they are not --------------------------------------------------------------------------------------- */

/* Tokens by which sums and dx follow the slopes: what waits for a slope, a chain of 70 cycles, occupies the scheduler, and
 * the next token's chain stays outside. */
enum { BEHIND = 1 };

/* Whole vectors of tokens that enter the sums; one dtype; returns the first channel not done. */
V_INLINE int64_t walk_body(const backward_columns *shared, int64_t K, cot_dtype dtype)
{
    const backward_columns own = *shared, *s = &own; /* one that no store can change stays in registers */
    const int64_t size = conv1d_size(dtype), n = s->n;
    _Alignas(CONV1D_RUN) char runs[CONV1D_RUNS];
    conv1d_out out = results_of(s, runs);
    const int64_t dx_stride = conv1d_out_stride(&out);
    int64_t c = 0;
    for (; c + VW <= s->channels; c += VW) {
        const kept_column kept = kept_column_at(s, c, K);
        vf w[CONV1D_MAX_K], h[CONV1D_MAX_K + BEHIND], g[CONV1D_MAX_K + BEHIND], sums[CONV1D_MAX_K + 1];
        for (int64_t k = 0; k < K; k++) {
            w[k] = v_load(kept.weight + k * VW);
            sums[k] = v_zero();
        }
        for (int64_t k = 0; k < K + BEHIND; k++)
            h[k] = g[k] = v_zero();
        for (int64_t k = 0; k < K - 1; k++) {
            h[BEHIND + k] = v_load(kept.history + k * VW);
            g[BEHIND + k] = v_load(kept.g + k * VW);
        }
        const vf bias = v_load(kept.weight + K * VW);
        sums[K] = v_zero();
        const char *x = s->x + c * size, *dy = s->dy + c * size;
        char *dx = conv1d_out_at(&out, c, size);
        for (int64_t i = 0; i < n + BEHIND; i++) {
            if (i < n) {
                conv1d_ask(x, s->x_stride, VW * size);
                conv1d_ask(dy, s->dy_stride, VW * size);
                h[BEHIND + K - 1] = v_load_as(x, dtype);
                g[BEHIND + K - 1] = v_load_as(dy, dtype);
                x += s->x_stride;
                dy += s->dy_stride;
                if (s->silu) {
                    vf z = bias, before = v_zero();
                    V_UNROLL
                    for (int64_t k = 0; k < K; k++) {
                        conv1d_next_tap(k, &z, &before);
                        z = v_fma(w[k], h[BEHIND + k], z);
                    }
                    g[BEHIND + K - 1] = v_mul(g[BEHIND + K - 1], v_silu_slope(conv1d_taps_sum(K, z, before)));
                }
            }
            if (i >= BEHIND) {
                vf result = v_zero(), before = v_zero();
                V_UNROLL
                for (int64_t k = 0; k < K; k++) {
                    conv1d_next_tap(k, &result, &before);
                    sums[k] = v_fma(g[K - 1], h[k], sums[k]);
                    result = v_fma(w[K - 1 - k], g[k], result);
                }
                sums[K] = v_add(sums[K], g[K - 1]);
                v_store_as(dx, dtype, conv1d_taps_sum(K, result, before));
                dx += dx_stride;
                conv1d_out_leave(&out, VW * size);
            }
            V_UNROLL
            for (int64_t k = 0; k < K - 1 + BEHIND; k++) {
                h[k] = h[k + 1];
                g[k] = g[k + 1];
            }
        }
        conv1d_out_made(&out, c + VW, size);
        for (int64_t k = 0; k < K - 1; k++) {
            v_store(kept.history + k * VW, h[k]);
            v_store(kept.g + k * VW, g[k]);
        }
        for (int64_t k = 0; k <= K; k++)
            v_store(kept.sums + k * VW, v_add(v_load(kept.sums + k * VW), sums[k]));
    }
    return c;
}

#define WALK(width, dtype)                                                  \
    static int64_t walk_##width##_##dtype(const backward_columns *s)        \
    {                                                                       \
        if (VW == 8)                                                        \
            return walk_columns(s, width == 0 ? s->K : width, COT_##dtype); \
        return walk_body(s, width == 0 ? s->K : width, COT_##dtype);        \
    }
#define WALKS_OF(width) CONV1D_EACH_DTYPE(WALK, width)
CONV1D_EACH_WIDTH(WALKS_OF)

#define WALKS(width)                                                \
    {                                                               \
        walk_##width##_F32, walk_##width##_F16, walk_##width##_BF16 \
    }
static int64_t (*const walks[CONV1D_INSTANCES][3])(const backward_columns *) = CONV1D_TABLE(WALKS);

/* ---- pieces ------------------------------------------------------------------------------------------------- */

typedef struct backward_context {
    const conv1d_backward_problem *problem;
    conv1d_packing packing;
    conv1d_tiling tiling;
    int64_t items; /* without those of empty sequences */
    bool direct_inputs, direct, stream;
    float *partials;
} backward_context;

/* An item's state, in its thread's slice of scratch. */
typedef struct backward_block {
    const backward_context *c;
    int64_t d, channels, ld;
    _Alignas(64) float kept[CONV1D_BWD_KEPT];
    float x[CONV1D_STAGED], dy[CONV1D_STAGED], dx[CONV1D_STAGED];
} backward_block;

_Static_assert(sizeof(backward_block) <= CONV1D_BWD_LAST_SCRATCH, "it lies in a slice");

/* Where the steps of a piece change what they do; tokens from the beginning of the piece. */
typedef struct backward_steps {
    int64_t n;        /* its own tokens: they enter the sums */
    int64_t halo_end; /* steps from here on have no token */
    int64_t edge;     /* dx has a term of dfinal_state from this token on */
    int64_t count;    /* of steps */
} backward_steps;

/* Do the steps from i on finish rows that are not wanted here? */
static bool discards(const backward_block *s, const conv1d_piece *piece, int64_t i)
{
    const cot_causal_conv1d_backward_args *a = &s->c->problem->args;
    if (i >= s->c->problem->sizes.K - 1)
        return !cot_present(&a->dx);
    return !cot_present(&a->dinitial_state) || piece->state < 0 || piece->begin != piece->first;
}

/* Sends what steps [i, i+n) left in the buffer where it belongs. */
static void finish_rows(backward_block *s, const conv1d_piece *piece, int64_t i, int64_t n)
{
    const cot_causal_conv1d_backward_args *a = &s->c->problem->args;
    const int64_t K = s->c->problem->sizes.K;
    for (int64_t r = 0; r < n; r++) {
        const int64_t p = piece->begin + i + r - (K - 1), column = p - piece->last + K - 1;
        const bool token = p >= piece->begin;
        float *row = s->dx + r * s->ld;
        if (cot_present(&a->dfinal_state) && piece->state >= 0 && column >= 0 &&
            conv1d_counts(piece, K, p, piece->last - 1))
            for (int64_t c = 0; c < s->channels; c++)
                row[c] += conv1d_load(&a->dfinal_state, piece->state, s->d + c, column);
        if (token)
            conv1d_scatter_tile(row, s->ld, &a->dx, piece->b, s->d, s->channels, p, 1);
        else
            conv1d_scatter_tile(row, s->ld, &a->dinitial_state, piece->state, s->d, s->channels,
                                p - piece->first + K - 1, 1);
    }
}

/* Steps [i, i+n), all of one kind. */
static void backward_tile(backward_block *s, const conv1d_piece *piece, const backward_steps *steps, int64_t i,
                          int64_t n, bool plain)
{
    const backward_context *c = s->c;
    const cot_causal_conv1d_backward_args *a = &c->problem->args;
    const int64_t K = c->problem->sizes.K, token = piece->begin + i, size = conv1d_size(a->x.dtype);
    const bool direct = c->direct && i >= K - 1 && i < steps->edge + K - 1;
    const bool discarded = discards(s, piece, i);
    backward_columns columns = {.n = n,
                                .K = K,
                                .channels = s->channels,
                                .dtype = COT_F32,
                                .dx = (char *)s->dx,
                                .dx_stride = s->ld * 4,
                                .dx_dtype = COT_F32,
                                .kept = s->kept,
                                .sums = row_of_sums(K, i < steps->n),
                                .silu = a->activation == COT_ACTIVATION_SILU,
                                .stream = direct && c->stream,
                                .ids = plain ? NULL : piece->ids + i};
    if (i < steps->halo_end && c->direct_inputs) {
        columns.x = conv1d_at(&a->x, piece->b, s->d, token);
        columns.dy = conv1d_at(&a->dy, piece->b, s->d, token);
        columns.x_stride = a->x.stride[2] * size;
        columns.dy_stride = a->dy.stride[2] * size;
        columns.dtype = a->x.dtype;
    } else if (i < steps->halo_end) {
        conv1d_gather_tile(s->x, s->ld, &a->x, piece->b, s->d, s->channels, token, n);
        conv1d_gather_tile(s->dy, s->ld, &a->dy, piece->b, s->d, s->channels, token, n);
        columns.x = (const char *)s->x;
        columns.dy = (const char *)s->dy;
        columns.x_stride = columns.dy_stride = s->ld * 4;
    }
    if (direct) {
        columns.dx = conv1d_at(&a->dx, piece->b, s->d, token - (K - 1));
        columns.dx_stride = a->dx.stride[2] * size;
        columns.dx_dtype = a->dx.dtype;
    } else if (discarded) {
        columns.dx_dtype = columns.dtype; /* of no matter, but the fast walk has one dtype only */
    }
    const bool fast = plain && columns.x != NULL && columns.dx_dtype == columns.dtype;
    const int64_t done = fast ? walks[conv1d_instance(K)][columns.dtype - COT_F32](&columns) : 0;
    if (done < s->channels)
        walk_edge(&columns, done);
    if (!direct && !discarded)
        finish_rows(s, piece, i, n);
}

static void zero_gradients(backward_block *s, const conv1d_piece *piece)
{
    const cot_causal_conv1d_backward_args *a = &s->c->problem->args;
    memset(s->dx, 0, (size_t)s->ld * sizeof *s->dx);
    for (int64_t t = piece->begin; cot_present(&a->dx) && t < piece->end; t++)
        conv1d_scatter_tile(s->dx, s->ld, &a->dx, piece->b, s->d, s->channels, t, 1);
    if (cot_present(&a->dinitial_state) && piece->state >= 0 && piece->begin == piece->first)
        for (int64_t i = 0; i < s->c->problem->sizes.K - 1; i++)
            conv1d_scatter_tile(s->dx, s->ld, &a->dinitial_state, piece->state, s->d, s->channels, i, 1);
}

/* The first step after i where something changes. */
static int64_t next_change(const backward_steps *steps, int64_t K, int64_t i, int64_t longest)
{
    const int64_t changes[] = {K - 1, steps->n, steps->halo_end, steps->edge + K - 1, steps->count};
    int64_t end = i + longest;
    for (size_t k = 0; k < sizeof changes / sizeof *changes; k++)
        if (changes[k] > i && changes[k] < end)
            end = changes[k];
    return end;
}

static void backward_piece(backward_block *s, const conv1d_piece *piece)
{
    const backward_context *c = s->c;
    const cot_causal_conv1d_backward_args *a = &c->problem->args;
    const int64_t K = c->problem->sizes.K;
    if (piece->padding) {
        zero_gradients(s, piece);
        return;
    }
    conv1d_keep_history(s->kept, kept_rows(K), &a->x, &a->initial_state, piece, K, s->d, s->channels);
    conv1d_keep_zeros(s->kept, kept_rows(K), row_of_g(K), K - 1, s->channels);
    backward_steps steps = {.n = piece->end - piece->begin};
    const bool outputs = cot_present(&a->dx) || cot_present(&a->dinitial_state);
    steps.count = steps.n + (outputs ? K - 1 : 0);
    steps.halo_end = conv1d_halo_end(piece, K) - piece->begin;
    steps.edge = steps.n;
    if (cot_present(&a->dfinal_state) && piece->state >= 0)
        steps.edge = cot_clamp(piece->last - (K - 1) - piece->begin, 0, steps.n);
    for (int64_t i = 0; i < steps.count;) {
        bool plain;
        const bool direct = c->direct && i >= K - 1 && i < steps.edge + K - 1;
        const int64_t end = next_change(&steps, K, i, direct ? CONV1D_TILE : conv1d_staged_tile(s->channels));
        const int64_t n = conv1d_plain_run(piece->ids, i, end, K, &plain);
        backward_tile(s, piece, &steps, i, n, plain);
        i += n;
    }
}

static void backward_item(void *context, int64_t item, void *scratch)
{
    const backward_context *c = context;
    const cot_causal_conv1d_backward_args *a = &c->problem->args;
    const conv1d_sizes *sizes = &c->problem->sizes;
    const int64_t K = sizes->K;
    if (item >= c->items) {
        const int64_t blocks = conv1d_state_blocks(sizes);
        conv1d_empty_sequence(c->problem, (item - c->items) / blocks, (item - c->items) % blocks);
        return;
    }
    const conv1d_item own = conv1d_item_channel_last(&c->tiling, sizes, item);
    backward_block *const s = scratch;
    s->c = c;
    s->d = own.d_begin;
    s->channels = own.d_end - own.d_begin;
    s->ld = conv1d_ld(s->channels);
    conv1d_keep_weights(s->kept, kept_rows(K), &a->weight, &a->bias, K, s->d, s->channels);
    conv1d_keep_zeros(s->kept, kept_rows(K), row_of_sums(K, true), 2 * (K + 1), s->channels);
    conv1d_walk walk;
    conv1d_piece piece;
    for (int64_t b = own.b_begin; b < own.b_end; b++) {
        conv1d_start_walk(&walk, &c->packing, b, own.t_begin, own.t_end, CONV1D_PIECE);
        while (conv1d_next_piece(&walk, &piece))
            backward_piece(s, &piece);
    }
    float *partials = c->partials + own.sums * (K + 1) * sizes->D + s->d;
    for (int64_t at = 0; at < s->channels; at += VW) {
        const float *sums = s->kept + at * kept_rows(K) + row_of_sums(K, true) * VW;
        for (int64_t k = 0; k <= K; k++)
            v_store_n(partials + k * sizes->D + at, v_load(sums + k * VW), (int)cot_clamp(s->channels - at, 0, VW));
    }
    if (c->stream)
        v_fence();
}

cot_status V_NAME(causal_conv1d_bwd_channel_last)(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_backward_problem *p = problem;
    const cot_causal_conv1d_backward_args *a = &p->args;
    const bool states =
        cot_present(&a->initial_state) || cot_present(&a->dfinal_state) || cot_present(&a->dinitial_state);
    backward_context context = {
        .problem = p,
        .packing = conv1d_packing_of(&p->sizes, &a->seq_idx, &a->cu_seqlens, states),
        .tiling = conv1d_tile_channel_last(&p->sizes),
        .direct_inputs = conv1d_rows_contiguous(&a->x) && conv1d_rows_contiguous(&a->dy),
        .partials = workspace,
    };
    context.direct = context.direct_inputs && cot_present(&a->dx) && conv1d_rows_contiguous(&a->dx);
    context.stream = context.direct && conv1d_rows_stream(&a->dx) && conv1d_streams(&p->sizes, 3);
    context.items = conv1d_items(&context.tiling);
    int64_t items = context.items;
    if (cot_present(&a->dinitial_state) && p->sizes.K > 1)
        items += p->sizes.state_count * conv1d_state_blocks(&p->sizes);
    cot_parallel_scratch(queue, items, backward_item, &context);
    conv1d_reduce(queue, p, workspace, context.tiling.groups * context.tiling.parts);
    return COT_OK;
}
