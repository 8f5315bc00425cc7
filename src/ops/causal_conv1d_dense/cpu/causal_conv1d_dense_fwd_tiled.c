/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_fwd_tiled.c: the forward y = act(z + bias), on the products of simd/matmul.h. z [T][Dout] is
 * the sum of K products, of the rows of xe from k on with W_k. xe and the weights are packed once. An item computes
 * BLOCK_ROWS tokens by BLOCK_COLUMNS output channels. Its z stays in the thread's scratch memory until bias and SiLU
 * are applied. */
#include "causal_conv1d_dense_products.h"

cot_status V_NAME(causal_conv1d_dense_fwd_tiled)(cot_queue *, const void *, void *);

typedef struct context {
    operands o; /* first */
    const conv1d_dense_forward_problem *p;
} context;

static void forward_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const operands *o = &c->o;
    const cot_causal_conv1d_dense_forward_args *a = &c->p->args;
    const output_block blk = block_at(o, o->l.Dout, item);
    const bool silu = a->activation == COT_ACTIVATION_SILU;
    product_buffers *const buffers = scratch;
    float *const z = buffers->product;
    _Alignas(64) float bias[TILE];
    multiply_z(o, &blk, buffers);
    for (int64_t n = 0; n < blk.columns; n += TILE) {
        load_bias(bias, o, blk.n + n);
        for (int64_t r = 0; r < blk.rows && blk.t + r < o->sizes->T; r += TILE) {
            float *tile = z + mt_offset(BLOCK_ROWS, r, n);
            mt_activate_tile(tile, bias, silu, a->y.dtype);
            const mt_view to = tokens_view(&a->y, blk.b, blk.t + r, blk.n + n);
            mt_store_tile(&to, tile, cot_min(o->sizes->T - blk.t - r, TILE), cot_min(o->sizes->Dout - blk.n - n, TILE));
        }
    }
}

/* Item: a column of the final state. */
static void final_state_item(void *memory, int64_t item)
{
    const context *c = memory;
    const conv1d_dense_sizes *sizes = c->o.sizes;
    const cot_tensor *to = &c->p->args.final_state;
    const int64_t b = item / (sizes->K - 1), s = item % (sizes->K - 1);
    int64_t column;
    const cot_tensor *source = conv1d_dense_row_tensor(sizes, c->o.inputs, c->o.initial_state, sizes->T + s, &column);
    for (int64_t i = 0; i < sizes->Din; i++)
        cot_store_f64(to->data, to->dtype, b * to->stride[0] + i * to->stride[1] + s * to->stride[2],
                      source == NULL
                          ? 0
                          : cot_load_f64(source->data, source->dtype,
                                         b * source->stride[0] + i * source->stride[1] + column * source->stride[2]));
}

cot_status V_NAME(causal_conv1d_dense_fwd_tiled)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {.p = problem};
    const cot_causal_conv1d_dense_forward_args *a = &c.p->args;
    c.o = (operands){.sizes = &c.p->sizes,
                     .l = *(const conv1d_dense_layout *)queue->plan,
                     .inputs = &a->x,
                     .initial_state = &a->initial_state,
                     .weight = &a->weight,
                     .bias = &a->bias};
    const bool y = cot_is_present(&a->y) && cot_elements(&a->y) > 0;
    const bool state = cot_is_present(&a->final_state) && c.p->sizes.Din > 0;
    c.o.x = y ? (mt *)((char *)workspace + c.o.l.x) : NULL;
    c.o.w = y ? (mt *)((char *)workspace + c.o.l.w) : NULL;
    const conv1d_dense_job pack[] = {{pack_inputs_item_count(&c.o), pack_inputs_item, NULL},
                                     {pack_weights_item_count(&c.o), NULL, pack_weights_item},
                                     {state ? c.p->sizes.B * (c.p->sizes.K - 1) : 0, final_state_item, NULL}};
    conv1d_dense_run_jobs(queue, &c, pack, 3);
    if (y)
        cot_run_items_scratch(queue, block_count(&c.o, c.o.l.Dout), forward_item, &c);
    return COT_OK;
}
