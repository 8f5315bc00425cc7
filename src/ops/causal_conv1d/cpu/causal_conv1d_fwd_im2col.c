/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_im2col.c: the forward as one dense matrix product, the way of a library that has nothing but products:
 *
 *     columns [T][K*D]   row t: the K rows of xe that end at token t, beside each other (padding: the state, or zeros)
 *     expanded [K*D][D]  weight[d,k] at row k*D+d, column d; everything else is 0
 *     y = act(columns expanded + bias)
 *
 * For comparison: D times the multiplications of the direct kernels, all but one in D of them by zero, and K times x's
 * bytes for the columns. An infinity or NaN of one channel reaches all of them (0 times infinity). What the method is right
 * for, weights that are not zero, is cotangent/causal_conv1d_dense.h. */
#include "causal_conv1d_im2col.h"
#include "simd/matmul_pack.h"

cot_status V_NAME(causal_conv1d_fwd_im2col)(cot_queue *, const void *, void *);

enum {
    PART = CONV1D_IM2COL_PART,
    ROWS = CONV1D_IM2COL_ROWS,
    COLUMNS = CONV1D_IM2COL_COLUMNS,
    CELLS = PART * PART,
    STEP = 1024 / sizeof(mt)
};
_Static_assert((int)PART == (int)MT, "parts are what products take");

typedef struct context {
    const conv1d_forward_problem *p;
    conv1d_im2col_layout l;
    mt *columns;  /* [B] A form */
    mt *expanded; /* B form */
} context;

/* xe at token t of channel d, t >= -(K-1). */
static double input_at(const conv1d_forward_problem *p, int64_t b, int64_t d, int64_t t)
{
    const cot_tensor *from = t >= 0 ? &p->args.x : &p->args.initial_state;
    const int64_t column = t >= 0 ? t : t + p->sizes.K - 1;
    return !cot_present(from) ? 0
                              : cot_load_f64(from->data, from->dtype,
                                             b * from->stride[0] + d * from->stride[1] + column * from->stride[2]);
}

/* PART rows of xe from token t on, which may be before the first one. */
static void load_inputs(float *tile, const conv1d_forward_problem *p, int64_t b, int64_t t, int64_t d)
{
    const cot_tensor *x = &p->args.x;
    const int64_t before = t < 0 ? cot_min(-t, PART) : 0, channels = cot_min(p->sizes.D - d, PART);
    const int64_t first = t + before, rows = first < p->sizes.T ? cot_min(p->sizes.T - first, PART - before) : 0;
    mt_view view = {NULL, x->dtype, x->stride[2], x->stride[1]};
    if (rows > 0)
        view.data = (char *)x->data + (b * x->stride[0] + d * x->stride[1] + first * x->stride[2]) * mt_size(x->dtype);
    mt_load_tile(tile, &view, rows, rows > 0 ? channels : 0);
    memmove(tile + before * PART, tile, sizeof(float) * (size_t)((PART - before) * PART));
    for (int64_t r = 0; r < before; r++)
        for (int64_t c = 0; c < PART; c++)
            tile[r * PART + c] = c < channels ? (float)input_at(p, b, d + c, t + r) : 0;
}

/* Item: PART rows of the columns. */
static void columns_item(void *memory, int64_t item)
{
    const context *c = memory;
    const conv1d_sizes *z = &c->p->sizes;
    const int64_t strips = c->l.T / PART, b = item / strips, t = item % strips * PART;
    _Alignas(64) float tile[CELLS];
    for (int64_t k = 0; k < z->K; k++)
        for (int64_t d = 0; d < c->l.D; d += PART) {
            load_inputs(tile, c->p, b, t - (z->K - 1) + k, d);
            mt_pack_a(c->columns + b * c->l.T * c->l.D * z->K + mt_at(c->l.T, t, k * c->l.D + d), tile);
        }
}

/* Item: the columns of PART output channels. */
static void expand_item(void *memory, int64_t item)
{
    const context *c = memory;
    const cot_tensor *w = &c->p->args.weight;
    const int64_t K = c->p->sizes.K, d = item * PART, channels = cot_min(c->p->sizes.D - d, PART);
    mt *panel = c->expanded + d * c->l.D * K;
    memset(panel, 0, sizeof(mt) * (size_t)(c->l.D * K * PART));
    for (int64_t k = 0; k < K; k++) {
        _Alignas(64) float tile[CELLS] = {0};
        for (int64_t i = 0; i < channels; i++)
            tile[i * PART + i] = (float)cot_load_f64(w->data, w->dtype, (d + i) * w->stride[0] + k * w->stride[1]);
        for (int64_t r = 0; r < PART; r += 2)
            for (int64_t n = 0; n < PART; n += VW)
                mt_store_b(panel, c->l.D * K, k * c->l.D + d + r, n, v_load(tile + r * PART + n),
                           v_load(tile + (r + 1) * PART + n));
    }
}

/* Item: ROWS tokens by COLUMNS channels. */
static void product_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const cot_causal_conv1d_forward_args *a = &c->p->args;
    const conv1d_sizes *z = &c->p->sizes;
    const int64_t across = cot_ceil_div(c->l.D, COLUMNS), down = cot_ceil_div(c->l.T, ROWS), terms = c->l.D * z->K;
    const int64_t n0 = item % across * COLUMNS, t0 = item / across % down * ROWS, b = item / across / down;
    const int64_t rows = cot_min(c->l.T - t0, ROWS), columns = cot_min(c->l.D - n0, COLUMNS);
    const bool silu = a->activation == COT_ACTIVATION_SILU;
    float *const product = scratch; /* [ROWS][COLUMNS], as C of simd/matmul.h */
    _Alignas(64) float bias[PART];
    mt_state host;
    mt_begin(&host);
    for (int64_t p = 0; p < terms; p += STEP) /* a panel of the expanded weights stays in the first-level cache */
        mt_product(rows, columns, cot_min(STEP, terms - p), c->columns + b * c->l.T * terms + mt_at(c->l.T, t0, p),
                   c->l.T, c->expanded + mt_at(terms, p, n0), terms, product, ROWS, p > 0, NULL);
    mt_end(&host);
    for (int64_t n = n0; n < n0 + columns; n += PART) {
        for (int64_t i = 0; i < PART; i++)
            bias[i] = cot_present(&a->bias) && n + i < z->D
                          ? (float)cot_load_f64(a->bias.data, a->bias.dtype, (n + i) * a->bias.stride[0])
                          : 0;
        for (int64_t t = t0; t < t0 + rows && t < z->T; t += PART) {
            float *tile = product + mt_at(ROWS, t - t0, n - n0);
            mt_activate_tile(tile, bias, silu, a->y.dtype);
            const mt_view to = {(char *)a->y.data + (b * a->y.stride[0] + n * a->y.stride[1] + t * a->y.stride[2]) *
                                                        mt_size(a->y.dtype),
                                a->y.dtype, a->y.stride[2], a->y.stride[1]};
            mt_store_tile(&to, tile, cot_min(z->T - t, PART), cot_min(z->D - n, PART));
        }
    }
}

/* Item: a column of the final state. */
static void final_state_item(void *memory, int64_t item)
{
    const context *c = memory;
    const cot_tensor *to = &c->p->args.final_state;
    const int64_t history = c->p->sizes.K - 1, b = item / history, i = item % history;
    for (int64_t d = 0; d < c->p->sizes.D; d++)
        cot_store_f64(to->data, to->dtype, b * to->stride[0] + d * to->stride[1] + i * to->stride[2],
                      input_at(c->p, b, d, c->p->sizes.T - history + i));
}

cot_status V_NAME(causal_conv1d_fwd_im2col)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {.p = problem};
    const conv1d_sizes *z = &c.p->sizes;
    c.l = conv1d_im2col_layout_of(z, sizeof(mt));
    c.columns = (mt *)((char *)workspace + c.l.columns);
    c.expanded = (mt *)((char *)workspace + c.l.expanded);
    if (cot_present(&c.p->args.y) && cot_elements(&c.p->args.y) > 0) {
        cot_parallel(queue, z->B * (c.l.T / PART), columns_item, &c);
        cot_parallel(queue, c.l.D / PART, expand_item, &c);
        cot_parallel_scratch(queue, z->B * cot_ceil_div(c.l.T, ROWS) * cot_ceil_div(c.l.D, COLUMNS), product_item, &c);
    }
    if (cot_present(&c.p->args.final_state) && z->D > 0)
        cot_parallel(queue, z->B * (z->K - 1), final_state_item, &c);
    return COT_OK;
}
