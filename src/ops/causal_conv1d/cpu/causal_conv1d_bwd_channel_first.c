/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_first.c: where time is contiguous,
 *     g[t]  = dy[t] * act'(z[t])                      z as in the forward
 *     dx[t] = sum_j w[K-1-j] * g[t+j]                 dw[k] = sum_t g[t] * xe[t+k-K+1]      db = sum_t g[t]
 *
 * Items and pieces as in the forward. A row of a piece passes through the first-level cache: x, converted to f32 where
 * it is not; then g, of K-1 tokens more than the piece has, so that no piece waits for another; then dx, which is the
 * forward's convolution of g with the weights reversed. For K = 2..4 all but the ends of a row of one sequence goes in
 * one loop, g in registers: beyond the caches, reads and writes that take turns every 64 bytes reach a copy's speed,
 * every 8 KB three quarters of it. dw and db are summed in lanes, over the pieces of the item into the workspace, and
 * over the items by causal_conv1d_reduce.h. */
#include "causal_conv1d_reduce.h"
#include "causal_conv1d_rows.h"

cot_status V_NAME(causal_conv1d_bwd_channel_first)(cot_queue *, const void *, void *);

/* ---- g, dw, db of one row ----------------------------------------------------------------------------------- */

typedef struct gradient_row {
    int64_t K;
    const float *x, *weight; /* as in conv1d_row */
    const char *dy;
    cot_dtype dtype; /* dy's */
    bool silu;
    float *g;
    vf *sums; /* K of dw and one of db */
    conv1d_ahead ahead_x, ahead_dy;
    const int32_t *ids;
    /* of the fused loop only */
    char *dx;    /* of dy's dtype */
    float *late; /* where g of the last two vectors goes */
    bool stream;
} gradient_row;

/* Tokens [begin, end) of which those before `owned` enter the sums. */
static void gradient_edge(const gradient_row *row, int64_t begin, int64_t end, int64_t owned)
{
    const int64_t K = row->K, size = conv1d_size(row->dtype);
    for (int64_t i = begin; i < end; i += VW) {
        const int n = (int)(end - i < VW ? end - i : VW);
        const int counted = (int)cot_clamp(owned - i, 0, VW);
        vf x[CONV1D_MAX_K], z = v_set1(row->weight[K]), before = v_zero();
        for (int64_t k = 0; k < K; k++) {
            conv1d_next_tap(k, &z, &before);
            x[k] = v_load_n(row->x + i + k, n);
            if (row->ids != NULL)
                x[k] = v_keep(conv1d_valid(row->ids, i, k, K - 1), x[k]);
            z = v_fma(v_set1(row->weight[k]), x[k], z);
        }
        z = conv1d_taps_sum(K, z, before);
        vf g = v_load_n_as(row->dy + i * size, row->dtype, n);
        if (row->silu)
            g = v_mul(g, v_silu_slope(z));
        vm valid = vm_first(n);
        if (row->ids != NULL)
            valid = vm_and(valid, vm_not_negative(vi_load(row->ids + i + K - 1)));
        g = v_keep(valid, g);
        v_store(row->g + i, g);
        if (counted == 0)
            continue;
        g = v_keep(vm_first(counted), g);
        for (int64_t k = 0; k < K; k++)
            row->sums[k] = v_fma(g, v_keep(vm_first(counted), x[k]), row->sums[k]);
        row->sums[K] = v_add(row->sums[K], g);
    }
}

/* A lane sums this many terms of dw and db in one run: rounding grows with the number of runs, not of terms. */
enum { SUM_TERMS = 32 };

/* (end - begin) % VW == 0 */
V_INLINE void gradient_body(const gradient_row *row, int64_t begin, int64_t end, int64_t K, cot_dtype dtype)
{
    const int64_t size = conv1d_size(dtype);
    const float *x = row->x;
    const char *dy = row->dy;
    const bool silu = row->silu;
    vf w[CONV1D_MAX_K], sums[CONV1D_MAX_K + 1];
    for (int64_t k = 0; k < K; k++)
        w[k] = v_set1(row->weight[k]);
    const vf bias = v_set1(row->weight[K]);
    const conv1d_ahead ahead_x = row->ahead_x, ahead_dy = row->ahead_dy;
    for (int64_t i = begin; i < end;) {
        const int64_t stop = end - i < SUM_TERMS * VW ? end : i + SUM_TERMS * VW;
        for (int64_t k = 0; k <= K; k++)
            sums[k] = v_zero();
        for (; i < stop; i += VW) {
            conv1d_prefetch(&ahead_x, i * size);
            conv1d_prefetch(&ahead_dy, i * size);
            vf g = v_load_as(dy + i * size, dtype);
            if (silu) {
                vf z = bias, before = v_zero();
                V_UNROLL
                for (int64_t k = 0; k < K; k++) {
                    conv1d_next_tap(k, &z, &before);
                    z = v_fma(w[k], v_load(x + i + k), z);
                }
                z = conv1d_taps_sum(K, z, before);
                g = v_mul(g, v_silu_slope(z));
            }
            v_store(row->g + i, g);
            V_UNROLL
            for (int64_t k = 0; k < K; k++)
                sums[k] = v_fma(g, v_load(x + i + k), sums[k]);
            sums[K] = v_add(sums[K], g);
        }
        for (int64_t k = 0; k <= K; k++)
            row->sums[k] = v_add(row->sums[k], sums[k]);
    }
}

#define GRADIENT(width, dtype)                                                                  \
    static void gradient_##width##_##dtype(const gradient_row *row, int64_t begin, int64_t end) \
    {                                                                                           \
        gradient_body(row, begin, end, width == 0 ? row->K : width, COT_##dtype);               \
    }
#define GRADIENTS_OF(width) CONV1D_EACH_DTYPE(GRADIENT, width)
CONV1D_EACH_WIDTH(GRADIENTS_OF)

#define GRADIENTS(width)                                                        \
    {                                                                           \
        gradient_##width##_F32, gradient_##width##_F16, gradient_##width##_BF16 \
    }
static void (*const gradients[CONV1D_INSTANCES][3])(const gradient_row *, int64_t, int64_t) = CONV1D_TABLE(GRADIENTS);

/* ---- g, dw, db and dx of one row ---------------------------------------------------------------------------- *
 * Step j of the loop computes z of vector j+1, then g of j, then all that vector j-2 takes part in: dx[t] and dw[k] both
 * need g[t+i], i < K, dw as sum_t x[t] * g[t+K-1-k]. Each step uses what earlier ones have left, or the processor would
 * have to look ahead further than it can; and holding g[t+i] takes fewer registers than holding the taps of x. */

/* Bytes besides CONV1D_NEAR, into the first-level cache. Of 1 to 4 KB in all these were best (0.85 of a copy's speed);
 * equal ones, or a second-level prefetch besides, were slower. */
enum { FUSED_AHEAD_X = 1024, FUSED_AHEAD_DY = 2048 };

/* dx of the tokens of g, of which `after` is the vector behind; adds to the sums. */
V_INLINE vf fused_finish(const vf *w, vf *sums, vf x, vf g, vf after, int64_t K)
{
    vf dx = v_mul(w[K - 1], g);
    sums[K] = v_add(sums[K], g);
    sums[K - 1] = v_fma(x, g, sums[K - 1]);
    const vf one = v_align(g, after, 1);
    dx = v_fma(w[K - 2], one, dx);
    sums[K - 2] = v_fma(x, one, sums[K - 2]);
    if (K > 2) {
        const vf two = v_align(g, after, 2);
        dx = v_fma(w[K - 3], two, dx);
        sums[K - 3] = v_fma(x, two, sums[K - 3]);
    }
    if (K > 3) {
        const vf three = v_align(g, after, 3);
        dx = v_fma(w[K - 4], three, dx);
        sums[K - 4] = v_fma(x, three, sums[K - 4]);
    }
    return dx;
}

/* z of a vector of tokens whose oldest inputs are first, second...; *x are its own inputs. */
V_INLINE vf fused_convolve(const vf *w, vf bias, vf first, vf second, int64_t K, vf *x)
{
    vf z = v_fma(w[0], first, bias);
    *x = v_align(first, second, 1);
    z = v_fma(w[1], *x, z);
    if (K > 2) {
        *x = v_align(first, second, 2);
        z = v_fma(w[2], *x, z);
    }
    if (K > 3) {
        *x = v_align(first, second, 3);
        z = v_fma(w[3], *x, z);
    }
    return z;
}

/* Tokens [begin, end), (end - begin) % (2 * VW) == 0, two vectors or more: all of their sums, dx of all but the last
 * two vectors, g of the first (into g) and of the last two (into late). */
V_INLINE void fused_body(const gradient_row *row, int64_t begin, int64_t end, int64_t K, cot_dtype dtype, bool silu)
{
    const int64_t size = conv1d_size(dtype);
    const float *x = row->x;
    const char *dy = row->dy;
    char *dx = row->dx;
    const bool stream = row->stream;
    const uintptr_t ahead_x = row->ahead_x.near + FUSED_AHEAD_X, ahead_dy = row->ahead_dy.near + FUSED_AHEAD_DY;
    float last[4 * VW] = {0}; /* inputs behind the last vector: K-1, and what is never used */
    memcpy(last + 2 * VW, x + end, (size_t)(K - 1) * sizeof *last);
    vf w[4], sums[5], out[2];
    for (int64_t k = 0; k < K; k++)
        w[k] = v_set1(row->weight[k]);
    const vf bias = v_set1(row->weight[K]);
    vf g = v_zero(), g_before = v_zero(); /* of vectors j-1, j-2 */
    const vf before = v_load_n(x + begin, (int)(K - 1));
    vf x2 = v_zero(), x1, x0; /* of j-2, j-1, j */
    x1 = K == 2 ? v_align(v_zero(), before, 1) : K == 3 ? v_align(v_zero(), before, 2) : v_align(v_zero(), before, 3);
    vf oldest = v_load(x + begin + VW);
    vf z = fused_convolve(w, bias, v_load(x + begin), oldest, K, &x0);
    for (int64_t i = begin; i < end;) {
        const int64_t stop = end - i < SUM_TERMS * VW ? end : i + SUM_TERMS * VW;
        for (int64_t k = 0; k <= K; k++)
            sums[k] = v_zero();
        for (; i < stop; i += 2 * VW) {
            const float *from = i + 2 * VW < end ? x + i : last;
            for (int64_t line = 0; line < 2 * VW * size; line += 64) {
                v_prefetch((const void *)(ahead_x + (uintptr_t)(i * size + line)));
                v_prefetch((const void *)(ahead_dy + (uintptr_t)(i * size + line)));
            }
            V_UNROLL
            for (int v = 0; v < 2; v++) {
                const vf behind = v_load(from + (v + 2) * VW);
                vf x_next;
                const vf z_next = fused_convolve(w, bias, oldest, behind, K, &x_next);
                out[v] = fused_finish(w, sums, x2, g_before, g, K);
                g_before = g;
                g = v_load_as(dy + (i + v * VW) * size, dtype);
                if (silu)
                    g = v_mul(g, v_silu_slope(z));
                z = z_next;
                oldest = behind;
                x2 = x1;
                x1 = x0;
                x0 = x_next;
            }
            char *to = dx + (i - 2 * VW) * size;
            if (i == begin)
                v_store(row->g + begin, g_before);
            else if (stream)
                v_stream2_as(to, dtype, out[0], out[1]);
            else
                v_store2_as(to, dtype, out[0], out[1]);
        }
        for (int64_t k = 0; k <= K; k++)
            row->sums[k] = v_add(row->sums[k], sums[k]);
    }
    fused_finish(w, row->sums, x2, g_before, g, K);
    fused_finish(w, row->sums, x1, g, v_zero(), K);
    v_store(row->late, g_before);
    v_store(row->late + VW, g);
}

/* The same where registers do not hold all that. On AVX2 it was a loop of 124 instructions for two vectors,
 * with spills, and the processor saw no further than four. A run of SUM_TERMS vectors passes through the first-level
 * cache instead: g first, then dx and the sums from g[t+i] as unaligned loads. Reads and writes take turns every KB. */
enum { FEW_REGISTERS = VW == 8 };

/* g of two vectors */
V_INLINE void blocked_gradients(float *g, const float *x, const char *dy, const vf *w, vf bias, int64_t K,
                                cot_dtype dtype, bool silu)
{
    enum { COUNT = 2 };
    const int64_t size = conv1d_size(dtype);
    vf z[COUNT];
    V_UNROLL
    for (int v = 0; v < COUNT; v++)
        z[v] = bias;
    V_UNROLL
    for (int64_t k = 0; silu && k < K; k++)
        for (int v = 0; v < COUNT; v++)
            z[v] = v_fma(w[k], v_load(x + v * VW + k), z[v]);
    if (silu)
        v_silu_slopes(z, COUNT);
    V_UNROLL
    for (int v = 0; v < COUNT; v++) {
        const vf gradient = v_load_as(dy + v * VW * size, dtype);
        v_store(g + v * VW, silu ? v_mul(z[v], gradient) : gradient);
    }
}

V_INLINE void blocked_body(const gradient_row *row, int64_t begin, int64_t end, int64_t K, cot_dtype dtype, bool silu)
{
    enum { BLOCK = SUM_TERMS * VW, LATE = 2 * VW };
    const int64_t size = conv1d_size(dtype);
    const float *x = row->x;
    const char *dy = row->dy;
    const bool stream = row->stream;
    const uintptr_t ahead_x = row->ahead_x.near + FUSED_AHEAD_X, ahead_dy = row->ahead_dy.near + FUSED_AHEAD_DY;
    float g[LATE + BLOCK + VW] = {0}; /* of tokens i-LATE .. i+BLOCK, behind them what is never used */
    vf w[4], sums[5];
    for (int64_t k = 0; k < K; k++)
        w[k] = v_set1(row->weight[k]);
    const vf bias = v_set1(row->weight[K]);
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t n = end - i < BLOCK ? end - i : BLOCK;
        for (int64_t j = 0; j < n; j += 2 * VW) {
            for (int64_t line = 0; line < 2 * VW * size; line += 64) {
                v_prefetch((const void *)(ahead_x + (uintptr_t)((i + j) * size + line)));
                v_prefetch((const void *)(ahead_dy + (uintptr_t)((i + j) * size + line)));
            }
            blocked_gradients(g + LATE + j, x + i + j, dy + (i + j) * size, w, bias, K, dtype, silu);
        }
        if (i == begin)
            v_store(row->g + begin, v_load(g + LATE));
        for (int64_t k = 0; k <= K; k++)
            sums[k] = v_zero();
        /* The inputs before `begin` meet its g as those of any other vector do; no dx is theirs. */
        const bool first = i == begin;
        if (first)
            for (int64_t k = 0; k < K - 1; k++)
                sums[k] = v_mul(v_load_n(x + begin + k, (int)(K - 1 - k)), v_load_n(g + LATE, (int)(K - 1 - k)));
        for (int64_t j = first ? LATE : 0; j < n; j += 2 * VW) {
            vf dx[2];
            V_UNROLL
            for (int v = 0; v < 2; v++) {
                const vf own = v_load(x + i - LATE + j + v * VW + K - 1);
                dx[v] = v_zero();
                V_UNROLL
                for (int64_t k = 0; k < K; k++) {
                    const vf later = v_load(g + j + v * VW + K - 1 - k);
                    dx[v] = k == 0 ? v_mul(w[0], later) : v_fma(w[k], later, dx[v]);
                    sums[k] = v_fma(own, later, sums[k]);
                    if (k == K - 1)
                        sums[K] = v_add(sums[K], later);
                }
            }
            char *to = row->dx + (i - LATE + j) * size;
            if (stream)
                v_stream2_as(to, dtype, dx[0], dx[1]);
            else
                v_store2_as(to, dtype, dx[0], dx[1]);
        }
        for (int64_t k = 0; k <= K; k++)
            row->sums[k] = v_add(row->sums[k], sums[k]);
        memmove(g, g + n, LATE * sizeof *g);
    }
    /* The last two vectors: their sums, with nothing behind them. */
    memset(g + LATE, 0, VW * sizeof *g);
    for (int64_t j = 0; j < LATE; j += VW) {
        const vf own = v_load(x + end - LATE + j + K - 1);
        for (int64_t k = 0; k < K; k++)
            row->sums[k] = v_fma(own, v_load(g + j + K - 1 - k), row->sums[k]);
        row->sums[K] = v_add(row->sums[K], v_load(g + j));
    }
    memcpy(row->late, g, LATE * sizeof *g);
}

/* clang-format off */
#define FUSED(width, dtype)                                                                  \
    static void fused_##width##_##dtype(const gradient_row *row, int64_t begin, int64_t end) \
    {                                                                                        \
        if (FEW_REGISTERS && row->silu)                                                   \
            blocked_body(row, begin, end, width, COT_##dtype, true);                         \
        else if (FEW_REGISTERS)                                                           \
            blocked_body(row, begin, end, width, COT_##dtype, false);                        \
        else if (row->silu)                                                                  \
            fused_body(row, begin, end, width, COT_##dtype, true);                           \
        else                                                                                 \
            fused_body(row, begin, end, width, COT_##dtype, false);                          \
    }
CONV1D_EACH_DTYPE(FUSED, 2)
CONV1D_EACH_DTYPE(FUSED, 3)
CONV1D_EACH_DTYPE(FUSED, 4)

enum { FUSED_LEAST = 2, FUSED_MOST = 4 };
static void (*const fused[FUSED_MOST + 1][3])(const gradient_row *, int64_t, int64_t) = {
    [2] = {fused_2_F32, fused_2_F16, fused_2_BF16},
    [3] = {fused_3_F32, fused_3_F16, fused_3_BF16},
    [4] = {fused_4_F32, fused_4_F16, fused_4_BF16},
};
/* clang-format on */

static void gradient(const gradient_row *row, const uint8_t *mixed, int64_t owned, int64_t halo_end)
{
    for (int64_t i = 0; i < owned;) {
        const int64_t end = i + conv1d_same_kind(mixed, i, owned);
        const int64_t last = mixed != NULL && mixed[i / CONV1D_MIXED_BLOCK] ? i : i + (end - i) / VW * VW;
        if (last > i)
            gradients[conv1d_instance(row->K)][row->dtype - COT_F32](row, i, last);
        if (end > last)
            gradient_edge(row, last, end, owned);
        i = end;
    }
    if (halo_end > owned)
        gradient_edge(row, owned, halo_end, owned);
}

/* ---- pieces ------------------------------------------------------------------------------------------------- */

typedef struct backward_context {
    const conv1d_backward_problem *problem;
    conv1d_packing packing;
    conv1d_tiling tiling;
    int64_t items;   /* without those of empty sequences */
    int64_t longest; /* tokens of a piece */
    bool direct_x, fuse, stream;
    float *partials;
} backward_context;

enum { LONGEST = CONV1D_PIECE + CONV1D_MAX_K };

/* What the rows of a piece share, and their buffers. */
typedef struct backward_piece {
    const backward_context *c;
    const conv1d_piece *piece;
    int64_t halo_end; /* tokens, from the beginning of the piece */
    int64_t edge;     /* from here on dx has a term of dfinal_state */
    bool fuse;
    int64_t fused_begin, fused_end; /* the tokens whose dx the fused loop has written */
    float *g_late; /* g of tokens from fused_end on; before fused_begin (and a vector more) it is in g */
    float late[6 * VW + 2 * CONV1D_MAX_K];
    uint8_t mixed[CONV1D_PIECE / CONV1D_MIXED_BLOCK + 1], mixed_dx[CONV1D_PIECE / CONV1D_MIXED_BLOCK + 1];
    float inputs[LONGEST + CONV1D_MAX_K + VW];
    float gradients[LONGEST], g[LONGEST + CONV1D_MAX_K + 2 * VW], outputs[CONV1D_PIECE];
} backward_piece;

/* An item's buffers, in its thread's slice of scratch. */
typedef struct backward_buffers {
    backward_piece piece;
    float weights[CONV1D_WEIGHTS], totals[CONV1D_WEIGHTS];
} backward_buffers;

_Static_assert(sizeof(backward_buffers) <= CONV1D_BWD_FIRST_SCRATCH, "they lie in a slice");

/* dfinal_state's term of position p of the span, 0 if it has none. */
static float final_term(const backward_piece *s, int64_t d, int64_t p)
{
    const cot_tensor *dfinal_state = &s->c->problem->args.dfinal_state;
    const int64_t K = s->c->problem->sizes.K, column = p - s->piece->last + K - 1;
    if (!cot_present(dfinal_state) || s->piece->state < 0 || column < 0 ||
        !conv1d_counts(s->piece, K, p, s->piece->last - 1))
        return 0;
    return conv1d_load(dfinal_state, s->piece->state, d, column);
}

/* dx of tokens [begin, end) from their g, straight into the tensor. */
static void convolve_direct(const conv1d_row *whole, const float *g, int64_t begin, int64_t end)
{
    if (begin >= end)
        return;
    conv1d_row row = *whole;
    row.n = end - begin;
    row.x = g;
    row.y = conv1d_y_at(whole, begin);
    conv1d_convolve(&row);
}

static void backward_inputs(backward_piece *s, int64_t d, const float *weight)
{
    const cot_tensor *dx = &s->c->problem->args.dx;
    const conv1d_piece *piece = s->piece;
    const int64_t K = s->c->problem->sizes.K, n = piece->end - piece->begin;
    float reversed[CONV1D_MAX_K + 1];
    for (int64_t k = 0; k < K; k++)
        reversed[k] = weight[K - 1 - k];
    reversed[K] = 0;
    const bool direct = conv1d_contiguous_time(dx);
    conv1d_row row = {.n = n,
                      .K = K,
                      .x = s->g,
                      .weight = reversed,
                      .y = direct ? (void *)conv1d_at(dx, piece->b, d, piece->begin) : s->outputs,
                      .dtype = direct ? dx->dtype : COT_F32,
                      .stream = direct && s->c->stream,
                      .ahead = conv1d_ahead_of(s->g, NULL)};
    if (piece->ids != NULL) {
        row.ids = piece->ids + K - 1;
        row.mixed = s->mixed_dx;
    }
    if (direct) { /* only a whole row has `mixed` */
        convolve_direct(&row, s->g, 0, s->fused_begin);
        convolve_direct(&row, s->g_late, s->fused_end, s->edge);
    } else if (n > 0) {
        conv1d_convolve(&row);
    }
    const int64_t done = direct ? s->edge : 0;
    if (direct && s->edge < n) {
        row.n = n - s->edge;
        row.x = s->g_late + (s->edge - s->fused_end);
        row.ids += row.ids != NULL ? s->edge : 0;
        row.y = s->outputs;
        row.dtype = COT_F32;
        row.stream = false;
        row.mixed = NULL;
        conv1d_convolve_edge(&row, 0, row.n);
    }
    for (int64_t i = s->edge; i < n; i++)
        s->outputs[i - done] += final_term(s, d, piece->begin + i);
    if (done < n)
        conv1d_scatter(conv1d_at(dx, piece->b, d, piece->begin + done), dx->dtype, dx->stride[2], s->outputs, n - done);
}

static void backward_state(const backward_piece *s, int64_t d, const float *weight)
{
    const conv1d_piece *piece = s->piece;
    const int64_t K = s->c->problem->sizes.K;
    for (int64_t i = 0; i < K - 1; i++) {
        const int64_t p = piece->first - (K - 1) + i;
        float gradient_of_column = 0;
        for (int64_t k = 0; k <= i; k++) {
            const int64_t token = i - k;
            if (token < s->halo_end && conv1d_counts(piece, K, p, piece->begin + token))
                gradient_of_column += weight[k] * s->g[token];
        }
        gradient_of_column += final_term(s, d, p);
        conv1d_store(&s->c->problem->args.dinitial_state, piece->state, d, i, gradient_of_column);
    }
}

/* g of tokens [0, halo_end) of a row that begins at token `first` of the piece, those before `owned` into the sums; dx
 * of most where one loop does it all, which a part in front of the last cannot. */
static void gradient_or_fused(backward_piece *s, int64_t d, gradient_row *row, int64_t first, int64_t owned,
                              int64_t halo_end)
{
    const cot_tensor *dx = &s->c->problem->args.dx;
    const int64_t whole = owned / (2 * VW) * (2 * VW);
    const bool to_the_end = first + owned == s->piece->end - s->piece->begin;
    if (!s->fuse || !to_the_end || whole < 4 * VW) {
        gradient(row, s->piece->ids != NULL ? s->mixed + first / CONV1D_MIXED_BLOCK : NULL, owned, halo_end);
        return;
    }
    row->dx = conv1d_at(dx, s->piece->b, d, s->piece->begin + first);
    row->stream = s->c->stream && (uintptr_t)row->dx % 64 == 0;
    row->late = s->g_late = s->late;
    fused[row->K][row->dtype - COT_F32](row, 0, whole);
    gradient_row rest = *row;
    rest.x += whole;
    rest.dy += whole * conv1d_size(row->dtype);
    rest.g = s->late + 2 * VW;
    if (whole < halo_end)
        gradient_edge(&rest, 0, halo_end - whole, owned - whole);
    s->fused_begin = first;
    s->fused_end = first + whole - 2 * VW;
}

/* g of the tokens of a piece, and of those that its dx needs behind them, into s->g; adds to the sums. */
static void backward_gradient(backward_piece *s, int64_t d, bool last_channel, const float *weight, vf *sums)
{
    const cot_causal_conv1d_backward_args *a = &s->c->problem->args;
    const conv1d_piece *piece = s->piece;
    const int64_t K = s->c->problem->sizes.K, n = piece->end - piece->begin;
    const char *next_x = last_channel ? NULL : conv1d_at(&a->x, piece->b, d + 1, piece->begin);
    const char *next_dy = last_channel ? NULL : conv1d_at(&a->dy, piece->b, d + 1, piece->begin);
    const char *dy = conv1d_at(&a->dy, piece->b, d, piece->begin);
    gradient_row row = {.K = K,
                        .weight = weight,
                        .dy = dy,
                        .dtype = a->dy.dtype,
                        .silu = a->activation == COT_ACTIVATION_SILU,
                        .ahead_dy = conv1d_ahead_in(dy),
                        .sums = sums};
    if (!conv1d_contiguous_time(&a->dy)) {
        conv1d_gather(s->gradients, dy, a->dy.dtype, a->dy.stride[2], s->halo_end);
        row.dy = (const char *)s->gradients;
        row.dtype = COT_F32;
        row.ahead_dy = conv1d_ahead_of(row.dy, next_dy);
    }
    const int64_t head = s->c->direct_x ? conv1d_head(piece, K) : n;
    const int64_t head_halo = head < n ? head : s->halo_end; /* a head that is all there is has the halo too */
    const int64_t size = conv1d_size(row.dtype);
    if (head > 0) {
        conv1d_stage_inputs(piece, &a->x, &a->initial_state, K, d, piece->begin + head_halo, s->inputs);
        row.x = s->inputs;
        row.g = s->g;
        row.ids = piece->ids;
        row.ahead_x = conv1d_ahead_of(s->inputs, next_x);
        gradient_or_fused(s, d, &row, 0, head, head_halo);
    }
    if (head < n) {
        row.x = (const float *)(const void *)conv1d_at(&a->x, piece->b, d, piece->begin) + head - (K - 1);
        row.dy += head * size;
        row.ahead_dy.near += (uintptr_t)(head * size);
        row.ahead_dy.far += (uintptr_t)(head * size);
        row.g = s->g + head;
        row.ids = piece->ids != NULL ? piece->ids + head : NULL;
        row.ahead_x = conv1d_ahead_in(row.x);
        gradient_or_fused(s, d, &row, head, n - head, s->halo_end - head);
    }
    memset(s->g_late + (s->halo_end - s->fused_end), 0, (size_t)(K - 1 + VW) * sizeof *s->g);
}

static void backward_row(backward_piece *s, int64_t d, bool last_channel, const float *weight, float *totals)
{
    const cot_causal_conv1d_backward_args *a = &s->c->problem->args;
    const int64_t K = s->c->problem->sizes.K;
    vf sums[CONV1D_MAX_K + 1];
    for (int64_t k = 0; k <= K; k++)
        sums[k] = v_zero();
    s->fused_begin = s->fused_end = 0;
    s->g_late = s->g;
    backward_gradient(s, d, last_channel, weight, sums);
    for (int64_t k = 0; k <= K; k++)
        totals[k] += v_sum(sums[k]);
    if (cot_present(&a->dx))
        backward_inputs(s, d, weight);
    if (cot_present(&a->dinitial_state) && s->piece->state >= 0 && s->piece->begin == s->piece->first)
        backward_state(s, d, weight);
}

static void zero_gradients(const backward_context *c, const conv1d_piece *piece, int64_t d_begin, int64_t d_end)
{
    static const float zeros[CONV1D_PIECE];
    const cot_causal_conv1d_backward_args *a = &c->problem->args;
    for (int64_t d = d_begin; d < d_end; d++) {
        for (int64_t t = piece->begin; cot_present(&a->dx) && t < piece->end; t += CONV1D_PIECE)
            conv1d_scatter(conv1d_at(&a->dx, piece->b, d, t), a->dx.dtype, a->dx.stride[2], zeros,
                           cot_clamp(piece->end - t, 0, CONV1D_PIECE));
        if (cot_present(&a->dinitial_state) && piece->state >= 0 && piece->begin == piece->first)
            for (int64_t i = 0; i < c->problem->sizes.K - 1; i++)
                conv1d_store(&a->dinitial_state, piece->state, d, i, 0);
    }
}

/* Channels [d_begin, d_end) of a piece. */
static void backward_block(const backward_context *c, const conv1d_piece *piece, int64_t d_begin, int64_t d_end,
                           const float *weights, float *totals, backward_piece *s)
{
    const int64_t K = c->problem->sizes.K, n = piece->end - piece->begin;
    s->c = c;
    s->piece = piece;
    s->halo_end = conv1d_halo_end(piece, K) - piece->begin;
    s->edge = n;
    s->fuse = c->fuse && piece->ids == NULL;
    if (cot_present(&c->problem->args.dfinal_state) && piece->state >= 0)
        s->edge = cot_clamp(piece->last - (K - 1) - piece->begin, 0, n);
    if (piece->ids != NULL) {
        conv1d_mark_mixed(s->mixed, piece->ids, n, K);
        conv1d_mark_mixed(s->mixed_dx, piece->ids + K - 1, n, K);
    }
    for (int64_t d = d_begin; d < d_end; d++)
        backward_row(s, d, d + 1 == d_end, weights + (d - d_begin) * (K + 1), totals + (d - d_begin) * (K + 1));
}

/* Long pieces go channel by channel, so that memory is read in one stream; in parts that fit in the buffers, unless
 * the fused loop leaves next to nothing there. */
static void backward_long(const backward_context *c, const conv1d_piece *piece, int64_t d_begin, int64_t d_end,
                          backward_buffers *x)
{
    const int64_t K = c->problem->sizes.K;
    if (piece->padding) {
        zero_gradients(c, piece, d_begin, d_end);
        return;
    }
    if (piece->end - piece->begin <= CONV1D_PIECE || (c->fuse && c->direct_x && piece->ids == NULL)) {
        backward_block(c, piece, d_begin, d_end, x->weights, x->totals, &x->piece);
        return;
    }
    for (int64_t d = d_begin; d < d_end; d++)
        for (int64_t t = piece->begin; t < piece->end; t += CONV1D_PIECE) {
            conv1d_piece part = *piece;
            part.begin = t;
            part.end = cot_clamp(t + CONV1D_PIECE, 0, piece->end);
            backward_block(c, &part, d, d + 1, x->weights + (d - d_begin) * (K + 1),
                           x->totals + (d - d_begin) * (K + 1), &x->piece);
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
    const conv1d_item own = conv1d_item_channel_first(&c->tiling, sizes, item);
    const int64_t d_begin = own.d_begin, d_end = own.d_end;
    backward_buffers *const x = scratch;
    conv1d_stage_weights(x->weights, &a->weight, &a->bias, K, d_begin, d_end);
    memset(x->totals, 0, (size_t)((d_end - d_begin) * (K + 1)) * sizeof *x->totals);
    conv1d_walk walk;
    conv1d_piece piece;
    for (int64_t b = own.b_begin; b < own.b_end; b++) {
        conv1d_start_walk(&walk, &c->packing, b, own.t_begin, own.t_end, c->longest);
        while (conv1d_next_piece(&walk, &piece))
            backward_long(c, &piece, d_begin, d_end, x);
    }
    float *partials = c->partials + own.sums * (K + 1) * sizes->D;
    for (int64_t d = d_begin; d < d_end; d++)
        for (int64_t k = 0; k <= K; k++)
            partials[k * sizes->D + d] = x->totals[(d - d_begin) * (K + 1) + k];
    if (c->stream)
        v_fence();
}

cot_status V_NAME(causal_conv1d_bwd_channel_first)(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_backward_problem *p = problem;
    const cot_causal_conv1d_backward_args *a = &p->args;
    const bool states =
        cot_present(&a->initial_state) || cot_present(&a->dfinal_state) || cot_present(&a->dinitial_state);
    const bool packed = cot_present(&a->seq_idx) || cot_present(&a->cu_seqlens);
    backward_context context = {
        .problem = p,
        .packing = conv1d_packing_of(&p->sizes, &a->seq_idx, &a->cu_seqlens, states),
        .tiling = conv1d_tile_channel_first(&p->sizes),
        .direct_x = a->x.dtype == COT_F32 && conv1d_contiguous_time(&a->x),
        .fuse = p->sizes.K >= FUSED_LEAST && p->sizes.K <= FUSED_MOST && cot_present(&a->dx) &&
                conv1d_contiguous_time(&a->dx) && conv1d_contiguous_time(&a->dy),
        .stream = conv1d_streams(&p->sizes, 3),
        .partials = workspace,
    };
    context.longest = context.packing.by_sequence || !packed ? CONV1D_MAX_PART : CONV1D_PIECE;
    context.items = conv1d_items(&context.tiling);
    int64_t items = context.items;
    if (cot_present(&a->dinitial_state) && p->sizes.K > 1)
        items += p->sizes.state_count * conv1d_state_blocks(&p->sizes);
    cot_parallel_scratch(queue, items, backward_item, &context);
    conv1d_reduce(queue, p, workspace, context.tiling.groups * context.tiling.parts);
    return COT_OK;
}
