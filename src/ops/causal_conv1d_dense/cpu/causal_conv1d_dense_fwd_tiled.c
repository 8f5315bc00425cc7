/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_fwd_tiled.c: y = act(z + bias), z [T][Dout] as K products of xe's rows from k on with W_k, on the
 * products of simd/matmul.h. xe and the weights are packed once; an item is ROWS tokens by COLUMNS output channels,
 * whose z stays in its thread's slice of scratch until bias and SiLU have been applied. */
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
    const block k = block_at(o, o->l.Dout, item);
    const bool silu = a->activation == COT_ACTIVATION_SILU;
    product_buffers *const x = scratch;
    float *const z = x->product;
    _Alignas(64) float bias[PART];
    multiply_z(o, &k, x);
    for (int64_t n = 0; n < k.columns; n += PART) {
        load_bias(bias, o, k.n + n);
        for (int64_t r = 0; r < k.rows && k.t + r < o->z->T; r += PART) {
            float *tile = z + mt_offset(ROWS, r, n);
            mt_activate_tile(tile, bias, silu, a->y.dtype);
            const mt_view to = tokens_view(&a->y, k.b, k.t + r, k.n + n);
            mt_store_tile(&to, tile, cot_min(o->z->T - k.t - r, PART), cot_min(o->z->Dout - k.n - n, PART));
        }
    }
}

/* Item: a column of the final state. */
static void final_state_item(void *memory, int64_t item)
{
    const context *c = memory;
    const conv1d_dense_sizes *z = c->o.z;
    const cot_tensor *to = &c->p->args.final_state;
    const int64_t b = item / (z->K - 1), s = item % (z->K - 1);
    int64_t column;
    const cot_tensor *from = conv1d_dense_row(z, c->o.inputs, c->o.initial_state, z->T + s, &column);
    for (int64_t i = 0; i < z->Din; i++)
        cot_store_f64(to->data, to->dtype, b * to->stride[0] + i * to->stride[1] + s * to->stride[2],
                      from == NULL
                          ? 0
                          : cot_load_f64(from->data, from->dtype,
                                         b * from->stride[0] + i * from->stride[1] + column * from->stride[2]));
}

cot_status V_NAME(causal_conv1d_dense_fwd_tiled)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {.p = problem};
    const cot_causal_conv1d_dense_forward_args *a = &c.p->args;
    const conv1d_dense_wants want = {.z = cot_is_present(&a->y)};
    c.o = (operands){.z = &c.p->sizes,
                     .l = conv1d_dense_layout_of(&c.p->sizes, want, sizeof(mt), MT_SAME_FORM),
                     .inputs = &a->x,
                     .initial_state = &a->initial_state,
                     .weight = &a->weight,
                     .bias = &a->bias};
    const bool y = cot_is_present(&a->y) && cot_elements(&a->y) > 0;
    const bool state = cot_is_present(&a->final_state) && c.p->sizes.Din > 0;
    c.o.x = y ? (mt *)((char *)workspace + c.o.l.x) : NULL;
    c.o.w = y ? (mt *)((char *)workspace + c.o.l.w) : NULL;
    const conv1d_dense_job pack[] = {{pack_inputs_items(&c.o), pack_inputs_item, NULL},
                                     {pack_weights_items(&c.o), NULL, pack_weights_item},
                                     {state ? c.p->sizes.B * (c.p->sizes.K - 1) : 0, final_state_item, NULL}};
    conv1d_dense_run(queue, &c, pack, 3);
    if (y)
        cot_parallel_scratch(queue, block_count(&c.o, c.o.l.Dout), forward_item, &c);
    return COT_OK;
}
