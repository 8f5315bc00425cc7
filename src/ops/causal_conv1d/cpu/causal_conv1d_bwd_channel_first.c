/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_first.c: where time is contiguous,
 *     g[t]  = dy[t] * act'(z[t])                      z as in the forward
 *     dx[t] = sum_j w[K-1-j] * g[t+j]                 dw[k] = sum_t g[t] * xe[t+k-K+1]      db = sum_t g[t]
 *
 * Items and pieces as in the forward. A row of a piece passes through the first-level cache: x, converted to f32 where
 * it is not; then g, of K-1 tokens more than the piece has, so that no piece waits for another; then dx, which is the
 * forward's convolution of g with the weights reversed. dw and db are summed in lanes, over the pieces of the item into
 * the workspace, and over the items by causal_conv1d_reduce.h. */
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
} gradient_row;

/* Tokens [begin, end) of which those before `owned` enter the sums. */
static void gradient_edge(const gradient_row *row, int64_t begin, int64_t end, int64_t owned)
{
    const int64_t K = row->K, size = row->dtype == COT_F32 ? 4 : 2;
    for (int64_t i = begin; i < end; i += VW) {
        const int n = (int)(end - i < VW ? end - i : VW);
        const int counted = (int)conv1d_clamp(owned - i, 0, VW);
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
    const int64_t size = dtype == COT_F32 ? 4 : 2;
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
CONV1D_EACH_INSTANCE(GRADIENT)

#define GRADIENTS(width)                                                        \
    {                                                                           \
        gradient_##width##_F32, gradient_##width##_F16, gradient_##width##_BF16 \
    }
static void (*const gradients[8][3])(const gradient_row *, int64_t, int64_t) = {
    GRADIENTS(0), GRADIENTS(2), GRADIENTS(3), GRADIENTS(4), GRADIENTS(5), GRADIENTS(6), GRADIENTS(7), GRADIENTS(8),
};

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
    bool direct_x, stream;
    float *partials;
} backward_context;

enum { LONGEST = CONV1D_PIECE + CONV1D_MAX_K };

/* What the rows of a piece share, and their buffers. */
typedef struct backward_piece {
    const backward_context *c;
    const conv1d_piece *piece;
    int64_t halo_end; /* tokens, from the beginning of the piece */
    int64_t edge;     /* from here on dx has a term of dfinal_state */
    uint8_t mixed[CONV1D_PIECE / CONV1D_MIXED_BLOCK + 1], mixed_dx[CONV1D_PIECE / CONV1D_MIXED_BLOCK + 1];
    float inputs[LONGEST + CONV1D_MAX_K + VW];
    float gradients[LONGEST], g[LONGEST + CONV1D_MAX_K + 2 * VW], outputs[CONV1D_PIECE];
} backward_piece;

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
    conv1d_row row = {.n = direct ? s->edge : n,
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
    if (row.n > 0)
        conv1d_convolve(&row);
    if (direct && s->edge < n) {
        row.n = n - s->edge;
        row.x += s->edge;
        row.ids += row.ids != NULL ? s->edge : 0;
        row.y = s->outputs + s->edge;
        row.dtype = COT_F32;
        row.stream = false;
        row.mixed = NULL;
        conv1d_convolve_edge(&row, 0, row.n);
    }
    for (int64_t i = s->edge; i < n; i++)
        s->outputs[i] += final_term(s, d, piece->begin + i);
    const int64_t done = direct ? s->edge : 0;
    if (done < n)
        conv1d_scatter(conv1d_at(dx, piece->b, d, piece->begin + done), dx->dtype, dx->stride[2], s->outputs + done,
                       n - done);
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
    const int64_t size = row.dtype == COT_F32 ? 4 : 2;
    if (head > 0) {
        conv1d_stage_inputs(piece, &a->x, &a->initial_state, K, d, piece->begin + head_halo, s->inputs);
        row.x = s->inputs;
        row.g = s->g;
        row.ids = piece->ids;
        row.ahead_x = conv1d_ahead_of(s->inputs, next_x);
        gradient(&row, piece->ids != NULL ? s->mixed : NULL, head, head_halo);
    }
    if (head < n) {
        row.x = (const float *)(const void *)conv1d_at(&a->x, piece->b, d, piece->begin) + head - (K - 1);
        row.dy += head * size;
        row.ahead_dy.near += (uintptr_t)(head * size);
        row.ahead_dy.far += (uintptr_t)(head * size);
        row.g = s->g + head;
        row.ids = piece->ids != NULL ? piece->ids + head : NULL;
        row.ahead_x = conv1d_ahead_in(row.x);
        gradient(&row, piece->ids != NULL ? s->mixed + (head > 0) : NULL, n - head, s->halo_end - head);
    }
    memset(s->g + s->halo_end, 0, (size_t)(K - 1 + VW) * sizeof *s->g);
}

static void backward_row(backward_piece *s, int64_t d, bool last_channel, const float *weight, float *totals)
{
    const cot_causal_conv1d_backward_args *a = &s->c->problem->args;
    const int64_t K = s->c->problem->sizes.K;
    vf sums[CONV1D_MAX_K + 1];
    for (int64_t k = 0; k <= K; k++)
        sums[k] = v_zero();
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
                           conv1d_clamp(piece->end - t, 0, CONV1D_PIECE));
        if (cot_present(&a->dinitial_state) && piece->state >= 0 && piece->begin == piece->first)
            for (int64_t i = 0; i < c->problem->sizes.K - 1; i++)
                conv1d_store(&a->dinitial_state, piece->state, d, i, 0);
    }
}

/* Channels [d_begin, d_end) of tokens that fit in the buffers. */
static void backward_block(const backward_context *c, const conv1d_piece *piece, int64_t d_begin, int64_t d_end,
                           const float *weights, float *totals)
{
    const int64_t K = c->problem->sizes.K, n = piece->end - piece->begin;
    backward_piece s;
    s.c = c;
    s.piece = piece;
    s.halo_end = conv1d_halo_end(piece, K) - piece->begin;
    s.edge = n;
    if (cot_present(&c->problem->args.dfinal_state) && piece->state >= 0)
        s.edge = conv1d_clamp(piece->last - (K - 1) - piece->begin, 0, n);
    if (piece->ids != NULL) {
        conv1d_mark_mixed(s.mixed, piece->ids, n, K);
        conv1d_mark_mixed(s.mixed_dx, piece->ids + K - 1, n, K);
    }
    for (int64_t d = d_begin; d < d_end; d++)
        backward_row(&s, d, d + 1 == d_end, weights + (d - d_begin) * (K + 1), totals + (d - d_begin) * (K + 1));
}

/* Long pieces go channel by channel, so that memory is read in one stream. */
static void backward_long(const backward_context *c, const conv1d_piece *piece, int64_t d_begin, int64_t d_end,
                          const float *weights, float *totals)
{
    const int64_t K = c->problem->sizes.K;
    if (piece->padding) {
        zero_gradients(c, piece, d_begin, d_end);
        return;
    }
    if (piece->end - piece->begin <= CONV1D_PIECE) {
        backward_block(c, piece, d_begin, d_end, weights, totals);
        return;
    }
    for (int64_t d = d_begin; d < d_end; d++)
        for (int64_t t = piece->begin; t < piece->end; t += CONV1D_PIECE) {
            conv1d_piece part = *piece;
            part.begin = t;
            part.end = conv1d_clamp(t + CONV1D_PIECE, 0, piece->end);
            backward_block(c, &part, d, d + 1, weights + (d - d_begin) * (K + 1), totals + (d - d_begin) * (K + 1));
        }
}

static void backward_item(void *context, int64_t item)
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
    float weights[CONV1D_MAX_BLOCK * (CONV1D_MAX_K + 1)], totals[CONV1D_MAX_BLOCK * (CONV1D_MAX_K + 1)];
    conv1d_stage_weights(weights, &a->weight, &a->bias, K, d_begin, d_end);
    memset(totals, 0, (size_t)((d_end - d_begin) * (K + 1)) * sizeof *totals);
    conv1d_walk walk;
    conv1d_piece piece;
    for (int64_t b = own.b_begin; b < own.b_end; b++) {
        conv1d_start_walk(&walk, &c->packing, b, own.t_begin, own.t_end, c->longest);
        while (conv1d_next_piece(&walk, &piece))
            backward_long(c, &piece, d_begin, d_end, weights, totals);
    }
    float *partials = c->partials + own.sums * (K + 1) * sizes->D;
    for (int64_t d = d_begin; d < d_end; d++)
        for (int64_t k = 0; k <= K; k++)
            partials[k * sizes->D + d] = totals[(d - d_begin) * (K + 1) + k];
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
        .stream = conv1d_streams(&p->sizes, 3),
        .partials = workspace,
    };
    context.longest = context.packing.by_sequence || !packed ? CONV1D_MAX_PART : CONV1D_PIECE;
    context.items = context.tiling.groups * context.tiling.parts * context.tiling.blocks;
    int64_t items = context.items;
    if (cot_present(&a->dinitial_state) && p->sizes.K > 1)
        items += p->sizes.state_count * conv1d_state_blocks(&p->sizes);
    cot_parallel(queue, items, backward_item, &context);
    conv1d_reduce(queue, p, workspace, context.tiling.groups * context.tiling.parts);
    return COT_OK;
}
