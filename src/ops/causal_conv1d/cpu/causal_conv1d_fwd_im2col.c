/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_im2col.c: the forward as one dense matrix product, as a library with only matrix products does it:
 *
 *     patches [T][K*D]   row t: the K tokens of xe that end at token t, side by side (padding: the state, or zeros)
 *     expanded [K*D][D]  weight[d,k] at row k*D+d, column d; everything else is 0
 *     y = act(patches * expanded + bias)
 *
 * For comparison only. It takes D times the multiplications of the direct kernels, and all but 1 in D of them are by
 * zero. `patches` takes K times the bytes of x. An infinity or NaN of one channel spreads to all channels (0 times
 * infinity). The method fits a convolution with dense weights: see cotangent/causal_conv1d_dense.h. */
#include "causal_conv1d_im2col.h"
#include "simd/matmul_pack.h"

cot_status V_NAME(causal_conv1d_fwd_im2col)(cot_queue *, const void *, void *);

enum {
    TILE = CONV1D_IM2COL_TILE,
    ITEM_TOKENS = CONV1D_IM2COL_ITEM_TOKENS,
    ITEM_CHANNELS = CONV1D_IM2COL_ITEM_CHANNELS,
    TILE_ELEMENTS = TILE * TILE,
    TERMS = 1024 / sizeof(mt)
};
_Static_assert((int)TILE == (int)PANEL, "TILE must be the tile of simd/matmul.h");

typedef struct context {
    const conv1d_forward_problem *problem;
    conv1d_im2col_layout layout;
    mt *patches;  /* patches of each batch element, in the A form of simd/matmul.h */
    mt *expanded; /* expanded weights, in the B form */
} context;

/* xe at token t of channel d, t >= -(K-1). */
static double input_at(const conv1d_forward_problem *p, int64_t b, int64_t d, int64_t t)
{
    const cot_tensor *from = t >= 0 ? &p->args.x : &p->args.initial_state;
    const int64_t position = t >= 0 ? t : t + p->sizes.K - 1;
    return !cot_is_present(from) ? 0
                                 : cot_load_f64(from->data, from->dtype,
                                                b * from->stride[0] + d * from->stride[1] + position * from->stride[2]);
}

/* Loads TILE rows of xe from token t on, TILE channels from d on. t may be negative. */
static void load_input_tile(float *tile, const conv1d_forward_problem *p, int64_t b, int64_t t, int64_t d)
{
    const cot_tensor *x = &p->args.x;
    const int64_t before = t < 0 ? cot_min(-t, TILE) : 0, channels = cot_min(p->sizes.D - d, TILE);
    const int64_t first = t + before, rows = first < p->sizes.T ? cot_min(p->sizes.T - first, TILE - before) : 0;
    mt_view view = {NULL, x->dtype, x->stride[2], x->stride[1]};
    if (rows > 0)
        view.data =
            (char *)x->data + (b * x->stride[0] + d * x->stride[1] + first * x->stride[2]) * mt_element_size(x->dtype);
    mt_load_tile(tile, &view, rows, rows > 0 ? channels : 0);
    memmove(tile + before * TILE, tile, sizeof(float) * (size_t)((TILE - before) * TILE));
    for (int64_t r = 0; r < before; r++)
        for (int64_t c = 0; c < TILE; c++)
            tile[r * TILE + c] = c < channels ? (float)input_at(p, b, d + c, t + r) : 0;
}

/* Item: TILE rows of `patches`. */
static void patches_item(void *arg, int64_t index)
{
    const context *c = arg;
    const conv1d_sizes *sizes = &c->problem->sizes;
    const int64_t token_tiles = c->layout.T / TILE, b = index / token_tiles, t = index % token_tiles * TILE;
    _Alignas(64) float tile[TILE_ELEMENTS];
    for (int64_t k = 0; k < sizes->K; k++)
        for (int64_t d = 0; d < c->layout.D; d += TILE) {
            load_input_tile(tile, c->problem, b, t - (sizes->K - 1) + k, d);
            mt_pack_a(c->patches + b * c->layout.T * c->layout.D * sizes->K +
                          mt_offset(c->layout.T, t, k * c->layout.D + d),
                      tile);
        }
}

/* Item: the columns of `expanded` for TILE output channels. */
static void expand_item(void *arg, int64_t index)
{
    const context *c = arg;
    const cot_tensor *w = &c->problem->args.weight;
    const int64_t K = c->problem->sizes.K, d = index * TILE, channels = cot_min(c->problem->sizes.D - d, TILE);
    mt *panel = c->expanded + d * c->layout.D * K;
    memset(panel, 0, sizeof(mt) * (size_t)(c->layout.D * K * TILE));
    for (int64_t k = 0; k < K; k++) {
        _Alignas(64) float tile[TILE_ELEMENTS] = {0};
        for (int64_t i = 0; i < channels; i++)
            tile[i * TILE + i] = (float)cot_load_f64(w->data, w->dtype, (d + i) * w->stride[0] + k * w->stride[1]);
        for (int64_t r = 0; r < TILE; r += 2)
            for (int64_t n = 0; n < TILE; n += VW)
                mt_store_b(panel, c->layout.D * K, k * c->layout.D + d + r, n, v_load(tile + r * TILE + n),
                           v_load(tile + (r + 1) * TILE + n));
    }
}

/* Item: the product and y of ITEM_TOKENS tokens by ITEM_CHANNELS channels. */
static void product_item(void *arg, int64_t index, void *scratch)
{
    const context *c = arg;
    const cot_causal_conv1d_forward_args *a = &c->problem->args;
    const conv1d_sizes *sizes = &c->problem->sizes;
    const int64_t items_along_channels = cot_ceil_div(c->layout.D, ITEM_CHANNELS),
                  items_along_tokens = cot_ceil_div(c->layout.T, ITEM_TOKENS), terms = c->layout.D * sizes->K;
    const int64_t n0 = index % items_along_channels * ITEM_CHANNELS,
                  t0 = index / items_along_channels % items_along_tokens * ITEM_TOKENS,
                  b = index / items_along_channels / items_along_tokens;
    const int64_t tokens = cot_min(c->layout.T - t0, ITEM_TOKENS), channels = cot_min(c->layout.D - n0, ITEM_CHANNELS);
    const bool silu = a->activation == COT_ACTIVATION_SILU;
    float *const product = scratch; /* [ITEM_TOKENS][ITEM_CHANNELS], the C form of simd/matmul.h */
    _Alignas(64) float bias[TILE];
    mt_state matmul_state;
    mt_begin(&matmul_state);
    for (int64_t p = 0; p < terms; p += TERMS) /* a panel of the expanded weights stays in the L1 cache */
        mt_product(tokens, channels, cot_min(TERMS, terms - p),
                   c->patches + b * c->layout.T * terms + mt_offset(c->layout.T, t0, p), c->layout.T,
                   c->expanded + mt_offset(terms, p, n0), terms, product, ITEM_TOKENS, p > 0, NULL);
    mt_end(&matmul_state);
    for (int64_t n = n0; n < n0 + channels; n += TILE) {
        for (int64_t i = 0; i < TILE; i++)
            bias[i] = cot_is_present(&a->bias) && n + i < sizes->D
                          ? (float)cot_load_f64(a->bias.data, a->bias.dtype, (n + i) * a->bias.stride[0])
                          : 0;
        for (int64_t t = t0; t < t0 + tokens && t < sizes->T; t += TILE) {
            float *tile = product + mt_offset(ITEM_TOKENS, t - t0, n - n0);
            mt_activate_tile(tile, bias, silu, a->y.dtype);
            const mt_view to = {(char *)a->y.data + (b * a->y.stride[0] + n * a->y.stride[1] + t * a->y.stride[2]) *
                                                        mt_element_size(a->y.dtype),
                                a->y.dtype, a->y.stride[2], a->y.stride[1]};
            mt_store_tile(&to, tile, cot_min(sizes->T - t, TILE), cot_min(sizes->D - n, TILE));
        }
    }
}

/* Item: one position of the final state of one batch element. */
static void final_state_item(void *arg, int64_t index)
{
    const context *c = arg;
    const cot_tensor *to = &c->problem->args.final_state;
    const int64_t history = c->problem->sizes.K - 1, b = index / history, i = index % history;
    for (int64_t d = 0; d < c->problem->sizes.D; d++)
        cot_store_f64(to->data, to->dtype, b * to->stride[0] + d * to->stride[1] + i * to->stride[2],
                      input_at(c->problem, b, d, c->problem->sizes.T - history + i));
}

cot_status V_NAME(causal_conv1d_fwd_im2col)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {.problem = problem};
    const conv1d_sizes *sizes = &c.problem->sizes;
    c.layout = *(const conv1d_im2col_layout *)queue->plan;
    c.patches = (mt *)((char *)workspace + c.layout.patches);
    c.expanded = (mt *)((char *)workspace + c.layout.expanded);
    if (cot_is_present(&c.problem->args.y) && cot_elements(&c.problem->args.y) > 0) {
        cot_run_items(queue, sizes->B * (c.layout.T / TILE), patches_item, &c);
        cot_run_items(queue, c.layout.D / TILE, expand_item, &c);
        cot_run_items_scratch(
            queue, sizes->B * cot_ceil_div(c.layout.T, ITEM_TOKENS) * cot_ceil_div(c.layout.D, ITEM_CHANNELS),
            product_item, &c);
    }
    if (cot_is_present(&c.problem->args.final_state) && sizes->D > 0)
        cot_run_items(queue, sizes->B * (sizes->K - 1), final_state_item, &c);
    return COT_OK;
}
