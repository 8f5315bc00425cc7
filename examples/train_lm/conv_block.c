/* SPDX-License-Identifier: Apache-2.0 */
#include "conv_block.h"

#include "layers.h"
#include "matrix.h"
#include "op_times.h"

#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 4, GROUP = 2 }; /* GROUP heads of q share one of k and v */

/* Four heads, or as many of 2 and 1 as divide the channels. */
static int64_t heads_of(block_sizes sizes)
{
    int64_t heads = HEADS;
    while (sizes.inner % heads != 0)
        heads /= 2;
    return heads;
}

static int64_t shared_heads_of(block_sizes sizes)
{
    return heads_of(sizes) > GROUP ? heads_of(sizes) / GROUP : 1;
}

/* Channels of all heads of k, and of v. */
static int64_t shared_width(block_sizes sizes)
{
    return sizes.inner / heads_of(sizes) * shared_heads_of(sizes);
}

/* ---- parameters and memory ---------------------------------------------------------------------------- */

static parameter *add(parameter_table *table, int64_t index, const char *part, int64_t rows, int64_t columns,
                      bool decays)
{
    char name[PARAMETER_NAME_SIZE];
    snprintf(name, sizeof name, "blocks.%lld.%s", (long long)index, part);
    return parameter_add(table, name, rows, columns, decays);
}

/* Channels of a row of mixed. */
static int64_t mixed_width(block_sizes sizes)
{
    return sizes.attention ? sizes.inner + 2 * shared_width(sizes) : 2 * sizes.inner;
}

void conv_block_register(conv_block *block, parameter_table *table, block_sizes sizes, int64_t index)
{
    block->gain = add(table, index, "norm.gain", sizes.width, 0, false);
    block->w_in = add(table, index, "in.weight", mixed_width(sizes), sizes.width, true);
    if (!sizes.attention) {
        block->conv_weight = add(table, index, "conv.weight", sizes.inner, sizes.kernel, false);
        block->conv_bias = add(table, index, "conv.bias", sizes.inner, 0, false);
    }
    block->w_out = add(table, index, "out.weight", sizes.width, sizes.inner, true);
}

void conv_block_initialise(conv_block *block, block_sizes sizes, int64_t layers, uint64_t seed)
{
    parameter_fill(block->gain, 1);
    parameter_randomise(block->w_in, seed, 1 / sqrt((double)sizes.width));
    if (!sizes.attention) {
        parameter_randomise(block->conv_weight, seed, 1 / sqrt((double)sizes.kernel));
        parameter_fill(block->conv_bias, 0);
    }
    parameter_randomise(block->w_out, seed, 1 / sqrt((double)sizes.inner * 2 * (double)layers));
}

bool conv_block_saved_allocate(conv_block_saved *saved, block_sizes sizes, int64_t rows)
{
    *saved = (conv_block_saved){
        .x = real_allocate(rows * sizes.width),
        .inv_rms = real_allocate(rows),
        .normed = real_allocate(rows * sizes.width),
        .mixed = real_allocate(rows * mixed_width(sizes)),
        .conv = real_allocate(rows * sizes.inner),
        .gated = real_allocate(sizes.attention ? 1 : rows * sizes.inner),
        .lse = real_allocate(sizes.attention ? rows * heads_of(sizes) : 1),
    };
    return saved->x != NULL && saved->inv_rms != NULL && saved->normed != NULL && saved->mixed != NULL &&
           saved->conv != NULL && saved->gated != NULL && saved->lse != NULL;
}

void conv_block_saved_free(conv_block_saved *saved)
{
    free(saved->x);
    free(saved->inv_rms);
    free(saved->normed);
    free(saved->mixed);
    free(saved->conv);
    free(saved->gated);
    free(saved->lse);
    *saved = (conv_block_saved){0};
}

bool conv_block_scratch_allocate(conv_block_scratch *scratch, block_sizes sizes, int64_t rows)
{
    *scratch = (conv_block_scratch){
        .dnormed = real_allocate(rows * sizes.width),
        .dmixed = real_allocate(rows * mixed_width(sizes)),
        .dinner = real_allocate(rows * sizes.inner),
        .partial = real_allocate(rmsnorm_partial_count(rows, sizes.width)),
    };
    return scratch->dnormed != NULL && scratch->dmixed != NULL && scratch->dinner != NULL && scratch->partial != NULL;
}

void conv_block_scratch_free(conv_block_scratch *scratch)
{
    free(scratch->dnormed);
    free(scratch->dmixed);
    free(scratch->dinner);
    free(scratch->partial);
    *scratch = (conv_block_scratch){0};
}

/* Bytes of so many elements. */
static double bytes_of(int64_t elements)
{
    return (double)elements * sizeof(real);
}

/* ---- the convolution ---------------------------------------------------------------------------------- */

/* Channels 0 .. channels-1 of an array [batch,time,row_length], as the library's [B,D,T]. */
static cot_tensor channels_last(real *data, int64_t batch, int64_t channels, int64_t time, int64_t row_length)
{
    return (cot_tensor){.data = data,
                        .dtype = REAL_DTYPE,
                        .rank = 3,
                        .shape = {batch, channels, time},
                        .stride = {time * row_length, 1, row_length}};
}

static cot_tensor whole(real *data, const parameter *p)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, p->rank, p->shape);
}

static cot_status convolve(const conv_block *block, block_sizes sizes, cot_queue *queue, int64_t batch, int64_t time,
                           conv_block_saved *saved)
{
    cot_causal_conv1d_forward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = channels_last(saved->mixed, batch, sizes.inner, time, 2 * sizes.inner);
    args.weight = whole(block->conv_weight->value, block->conv_weight);
    args.bias = whole(block->conv_bias->value, block->conv_bias);
    args.y = channels_last(saved->conv, batch, sizes.inner, time, sizes.inner);
    return TIMED(OP_CONV1D_FORWARD, bytes_of(2 * batch * time * sizes.inner), cot_causal_conv1d_forward(queue, &args));
}

/* dy in scratch->dinner, dx into the first halves of scratch->dmixed's rows. */
static cot_status convolve_backward(const conv_block *block, block_sizes sizes, cot_queue *queue, int64_t batch,
                                    int64_t time, const conv_block_saved *saved, const conv_block_scratch *scratch)
{
    cot_causal_conv1d_backward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = channels_last(saved->mixed, batch, sizes.inner, time, 2 * sizes.inner);
    args.weight = whole(block->conv_weight->value, block->conv_weight);
    args.bias = whole(block->conv_bias->value, block->conv_bias);
    args.dy = channels_last(scratch->dinner, batch, sizes.inner, time, sizes.inner);
    args.dx = channels_last(scratch->dmixed, batch, sizes.inner, time, 2 * sizes.inner);
    args.dweight = whole(block->conv_weight->gradient, block->conv_weight);
    args.dbias = whole(block->conv_bias->gradient, block->conv_bias);
    return TIMED(OP_CONV1D_BACKWARD, bytes_of(3 * batch * time * sizes.inner),
                 cot_causal_conv1d_backward(queue, &args));
}

static cot_status convolve_step(const conv_block *block, block_sizes sizes, cot_queue *queue, int64_t batch,
                                real *state, conv_block_saved *saved)
{
    cot_causal_conv1d_update_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = channels_last(saved->mixed, batch, sizes.inner, 1, 2 * sizes.inner);
    args.weight = whole(block->conv_weight->value, block->conv_weight);
    args.bias = whole(block->conv_bias->value, block->conv_bias);
    args.conv_state = cot_tensor_contiguous(state, REAL_DTYPE, 3, (int64_t[]){batch, sizes.inner, sizes.kernel - 1});
    args.y = channels_last(saved->conv, batch, sizes.inner, 1, sizes.inner);
    return cot_causal_conv1d_update(queue, &args);
}

/* ---- attention ---------------------------------------------------------------------------------------- */

/* `heads` heads of q, k, v or o, from `data` on in rows of `row_length` elements. */
static cot_tensor heads_in_rows(block_sizes sizes, int64_t heads, real *data, int64_t batch, int64_t time,
                                int64_t row_length)
{
    const int64_t size = sizes.inner / heads_of(sizes);
    return (cot_tensor){.data = data,
                        .dtype = REAL_DTYPE,
                        .rank = 4,
                        .shape = {batch, time, heads, size},
                        .stride = {time * row_length, row_length, size, 1}};
}

/* q, k and v, or their gradients, in rows of mixed. */
typedef struct mixed_heads {
    cot_tensor q, k, v;
} mixed_heads;

static mixed_heads heads_of_mixed(block_sizes sizes, real *mixed, int64_t batch, int64_t time)
{
    const int64_t row = mixed_width(sizes), heads = heads_of(sizes), shared = shared_heads_of(sizes);
    return (mixed_heads){
        .q = heads_in_rows(sizes, heads, mixed, batch, time, row),
        .k = heads_in_rows(sizes, shared, mixed + sizes.inner, batch, time, row),
        .v = heads_in_rows(sizes, shared, mixed + sizes.inner + shared_width(sizes), batch, time, row),
    };
}

/* Turns q and k, which lie side by side, or their gradients back. */
static void turn(block_sizes sizes, int64_t rows, int64_t time, int64_t first, rope_direction direction, real *mixed)
{
    const int64_t size = sizes.inner / heads_of(sizes);
    rope(rows, time, first, heads_of(sizes) + shared_heads_of(sizes), size, mixed_width(sizes), direction, mixed);
}

static cot_tensor statistics(block_sizes sizes, real *data, int64_t batch, int64_t time)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, 3, (int64_t[]){batch, heads_of(sizes), time});
}

/* Two products over the pairs of a query and a key that it sees. */
static double attention_flops(block_sizes sizes, int64_t batch, int64_t time)
{
    return 4 * (double)batch * (double)sizes.inner * (double)time * (double)(time + 1) / 2;
}

static cot_status attend(block_sizes sizes, cot_queue *queue, int64_t batch, int64_t time, conv_block_saved *saved)
{
    turn(sizes, batch * time, time, 0, ROPE_FORWARD, saved->mixed);
    const mixed_heads in = heads_of_mixed(sizes, saved->mixed, batch, time);
    cot_attention_forward_args args;
    COT_INIT(&args);
    args.causal = 1;
    args.q = in.q;
    args.k = in.k;
    args.v = in.v;
    args.out = heads_in_rows(sizes, heads_of(sizes), saved->conv, batch, time, sizes.inner);
    args.lse = statistics(sizes, saved->lse, batch, time);
    return TIMED(OP_ATTENTION_FORWARD, attention_flops(sizes, batch, time), cot_attention_forward(queue, &args));
}

/* dout in scratch->dinner, dq, dk and dv into scratch->dmixed. */
static cot_status attend_backward(block_sizes sizes, cot_queue *queue, int64_t batch, int64_t time,
                                  const conv_block_saved *saved, const conv_block_scratch *scratch)
{
    const mixed_heads in = heads_of_mixed(sizes, saved->mixed, batch, time);
    const mixed_heads gradients = heads_of_mixed(sizes, scratch->dmixed, batch, time);
    cot_attention_backward_args args;
    COT_INIT(&args);
    args.causal = 1;
    args.q = in.q;
    args.k = in.k;
    args.v = in.v;
    args.out = heads_in_rows(sizes, heads_of(sizes), saved->conv, batch, time, sizes.inner);
    args.lse = statistics(sizes, saved->lse, batch, time);
    args.dout = heads_in_rows(sizes, heads_of(sizes), scratch->dinner, batch, time, sizes.inner);
    args.dq = gradients.q;
    args.dk = gradients.k;
    args.dv = gradients.v;
    const cot_status status =
        TIMED(OP_ATTENTION_BACKWARD, 2.5 * attention_flops(sizes, batch, time), cot_attention_backward(queue, &args));
    turn(sizes, batch * time, time, 0, ROPE_BACKWARD, scratch->dmixed);
    return status;
}

/* The new token's key and value join those before; the oldest leave when there is no more room. Keys stay turned as they
 * are: only the distance to the query counts. */
static cot_status attend_step(block_sizes sizes, cot_queue *queue, int64_t reach, int64_t past, real *state,
                              conv_block_saved *saved)
{
    const int64_t width = shared_width(sizes), row = 2 * width;
    turn(sizes, 1, 1, past, ROPE_FORWARD, saved->mixed);
    if (past >= reach) {
        memmove(state, state + row, (size_t)((reach - 1) * row) * sizeof(real));
        past = reach - 1;
    }
    memcpy(state + past * row, saved->mixed + sizes.inner, (size_t)row * sizeof(real));
    cot_attention_forward_args args;
    COT_INIT(&args);
    args.causal = 1; /* the one query is the last token's */
    args.q = heads_of_mixed(sizes, saved->mixed, 1, 1).q;
    args.k = heads_in_rows(sizes, shared_heads_of(sizes), state, 1, past + 1, row);
    args.v = heads_in_rows(sizes, shared_heads_of(sizes), state + width, 1, past + 1, row);
    args.out = heads_in_rows(sizes, heads_of(sizes), saved->conv, 1, 1, sizes.inner);
    return cot_attention_forward(queue, &args);
}

/* ---- the residual ------------------------------------------------------------------------------------- */

static cot_tensor rows_of(real *data, int64_t rows, int64_t width)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, 2, (int64_t[]){rows, width});
}

/* x_next = x + drop(x_next), or without x where the sizes say so */
static cot_status join(block_sizes sizes, cot_queue *queue, int64_t rows, const conv_block_saved *saved, real *x_next)
{
    cot_dropout_forward_args args;
    COT_INIT(&args);
    args.p = saved->drop.p;
    args.seed = saved->drop.seed;
    args.offset = saved->drop.offset;
    args.x = args.y = rows_of(x_next, rows, sizes.width);
    if (!sizes.no_residual)
        args.residual = rows_of(saved->x, rows, sizes.width);
    return TIMED(OP_DROPOUT_FORWARD, bytes_of((sizes.no_residual ? 2 : 3) * rows * sizes.width),
                 cot_dropout_forward(queue, &args));
}

/* dbranch = drop'(dx), the gradient of what was dropped from. */
static cot_status join_backward(block_sizes sizes, cot_queue *queue, int64_t rows, const conv_block_saved *saved,
                                real *dx, real *dbranch)
{
    cot_dropout_backward_args args;
    COT_INIT(&args);
    args.p = saved->drop.p;
    args.seed = saved->drop.seed;
    args.offset = saved->drop.offset;
    args.dy = rows_of(dx, rows, sizes.width);
    args.dx = rows_of(dbranch, rows, sizes.width);
    return TIMED(OP_DROPOUT_BACKWARD, bytes_of(2 * rows * sizes.width), cot_dropout_backward(queue, &args));
}

/* ---- the block ---------------------------------------------------------------------------------------- */

static linear_shape in_shape(block_sizes sizes, int64_t rows)
{
    return (linear_shape){.rows = rows, .in = sizes.width, .out = mixed_width(sizes)};
}

static linear_shape out_shape(block_sizes sizes, int64_t rows)
{
    return (linear_shape){.rows = rows, .in = sizes.inner, .out = sizes.width};
}

/* What w_out is applied to. */
static real *inner_of(block_sizes sizes, const conv_block_saved *saved)
{
    return sizes.attention ? saved->conv : saved->gated;
}

static void before_mixing(const conv_block *block, block_sizes sizes, int64_t rows, conv_block_saved *saved)
{
    rmsnorm_forward(rows, sizes.width, saved->x, block->gain->value, saved->normed, saved->inv_rms);
    linear_forward(in_shape(sizes, rows), saved->normed, block->w_in->value, saved->mixed, MATRIX_SET);
}

static cot_status after_mixing(const conv_block *block, block_sizes sizes, cot_queue *queue, int64_t rows,
                               conv_block_saved *saved, real *x_next)
{
    if (!sizes.attention)
        gate_forward(rows, sizes.inner, saved->conv, saved->mixed, saved->gated);
    if (saved->drop.p > 0) {
        linear_forward(out_shape(sizes, rows), inner_of(sizes, saved), block->w_out->value, x_next, MATRIX_SET);
        return join(sizes, queue, rows, saved, x_next);
    }
    if (!sizes.no_residual)
        memcpy(x_next, saved->x, (size_t)(rows * sizes.width) * sizeof(real));
    linear_forward(out_shape(sizes, rows), inner_of(sizes, saved), block->w_out->value, x_next,
                   sizes.no_residual ? MATRIX_SET : MATRIX_ADD);
    return COT_OK;
}

cot_status conv_block_forward(const conv_block *block, block_sizes sizes, cot_queue *queue, int64_t batch, int64_t time,
                              conv_block_saved *saved, real *x_next)
{
    before_mixing(block, sizes, batch * time, saved);
    const cot_status status =
        sizes.attention ? attend(sizes, queue, batch, time, saved) : convolve(block, sizes, queue, batch, time, saved);
    return status != COT_OK ? status : after_mixing(block, sizes, queue, batch * time, saved, x_next);
}

int64_t conv_block_state_size(block_sizes sizes, int64_t reach)
{
    return sizes.attention ? 2 * shared_width(sizes) * reach : sizes.inner * (sizes.kernel - 1);
}

cot_status conv_block_step(const conv_block *block, block_sizes sizes, cot_queue *queue, int64_t reach, int64_t past,
                           real *state, conv_block_saved *saved, real *x_next)
{
    before_mixing(block, sizes, 1, saved);
    const cot_status status = sizes.attention ? attend_step(sizes, queue, reach, past, state, saved)
                                              : convolve_step(block, sizes, queue, 1, state, saved);
    return status != COT_OK ? status : after_mixing(block, sizes, queue, 1, saved, x_next);
}

cot_status conv_block_backward(const conv_block *block, block_sizes sizes, cot_queue *queue, int64_t batch,
                               int64_t time, const conv_block_saved *saved, const conv_block_scratch *scratch, real *dx)
{
    const int64_t rows = batch * time;
    real *dbranch = saved->drop.p > 0 ? scratch->dnormed : dx; /* dnormed is not needed until later */
    cot_status status = COT_OK;
    if (dbranch != dx)
        status = join_backward(sizes, queue, rows, saved, dx, dbranch);
    if (status != COT_OK)
        return status;
    linear_backward(out_shape(sizes, rows), inner_of(sizes, saved), block->w_out->value, dbranch, scratch->dinner,
                    block->w_out->gradient);
    if (sizes.attention) {
        status = attend_backward(sizes, queue, batch, time, saved, scratch);
    } else {
        gate_backward(rows, sizes.inner, saved->conv, saved->mixed, scratch->dinner, scratch->dmixed);
        status = convolve_backward(block, sizes, queue, batch, time, saved, scratch);
    }
    if (status != COT_OK)
        return status;
    linear_backward(in_shape(sizes, rows), saved->normed, block->w_in->value, scratch->dmixed, scratch->dnormed,
                    block->w_in->gradient);
    if (sizes.no_residual)
        memset(dx, 0, (size_t)(rows * sizes.width) * sizeof(real));
    rmsnorm_backward(rows, sizes.width, saved->x, block->gain->value, saved->inv_rms, scratch->dnormed,
                     scratch->partial, dx, block->gain->gradient);
    return COT_OK;
}
