/* SPDX-License-Identifier: Apache-2.0 */
#include "mixer_block.h"

#include "layers.h"
#include "matrix.h"
#include "op_times.h"

#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 4, QUERY_HEADS_PER_KV_HEAD = 2 }; /* GQA */

/* The number of query heads: 4, or 2 or 1 if 4 does not divide the channels. */
static int64_t query_heads(block_sizes sizes)
{
    int64_t heads = HEADS;
    while (sizes.inner % heads != 0)
        heads /= 2;
    return heads;
}

static int64_t kv_heads(block_sizes sizes)
{
    return query_heads(sizes) > QUERY_HEADS_PER_KV_HEAD ? query_heads(sizes) / QUERY_HEADS_PER_KV_HEAD : 1;
}

/* The number of channels of k, and of v, over all heads. */
static int64_t kv_width(block_sizes sizes)
{
    return sizes.inner / query_heads(sizes) * kv_heads(sizes);
}

/* ---- parameters and memory ---------------------------------------------------------------------------- */

static parameter *add_parameter(parameter_table *table, int64_t index, const char *part, int64_t rows, int64_t columns,
                                bool decays)
{
    char name[PARAMETER_NAME_SIZE];
    snprintf(name, sizeof name, "blocks.%lld.%s", (long long)index, part);
    return parameter_add(table, name, rows, columns, decays);
}

/* The number of channels in a row of mixed. */
static int64_t mixed_width(block_sizes sizes)
{
    return sizes.attention ? sizes.inner + 2 * kv_width(sizes) : 2 * sizes.inner;
}

void mixer_block_register(mixer_block *block, parameter_table *table, block_sizes sizes, int64_t index)
{
    block->gain = add_parameter(table, index, "norm.gain", sizes.width, 0, false);
    block->w_in = add_parameter(table, index, "in.weight", mixed_width(sizes), sizes.width, true);
    if (!sizes.attention) {
        block->conv_weight = add_parameter(table, index, "conv.weight", sizes.inner, sizes.kernel, false);
        block->conv_bias = add_parameter(table, index, "conv.bias", sizes.inner, 0, false);
    }
    block->w_out = add_parameter(table, index, "out.weight", sizes.width, sizes.inner, true);
}

void mixer_block_initialise(mixer_block *block, block_sizes sizes, int64_t layers, uint64_t seed)
{
    parameter_fill(block->gain, 1);
    parameter_randomise(block->w_in, seed, 1 / sqrt((double)sizes.width));
    if (!sizes.attention) {
        parameter_randomise(block->conv_weight, seed, 1 / sqrt((double)sizes.kernel));
        parameter_fill(block->conv_bias, 0);
    }
    parameter_randomise(block->w_out, seed, 1 / sqrt((double)sizes.inner * 2 * (double)layers));
}

bool mixer_block_saved_allocate(mixer_block_saved *saved, block_sizes sizes, int64_t rows)
{
    *saved = (mixer_block_saved){
        .x = real_allocate(rows * sizes.width),
        .inv_rms = real_allocate(rows),
        .normed = real_allocate(rows * sizes.width),
        .mixed = real_allocate(rows * mixed_width(sizes)),
        .mixer_out = real_allocate(rows * sizes.inner),
        .gated = real_allocate(sizes.attention ? 1 : rows * sizes.inner),
        .lse = real_allocate(sizes.attention ? rows * query_heads(sizes) : 1),
    };
    return saved->x != NULL && saved->inv_rms != NULL && saved->normed != NULL && saved->mixed != NULL &&
           saved->mixer_out != NULL && saved->gated != NULL && saved->lse != NULL;
}

void mixer_block_saved_free(mixer_block_saved *saved)
{
    free(saved->x);
    free(saved->inv_rms);
    free(saved->normed);
    free(saved->mixed);
    free(saved->mixer_out);
    free(saved->gated);
    free(saved->lse);
    *saved = (mixer_block_saved){0};
}

bool mixer_block_scratch_allocate(mixer_block_scratch *scratch, block_sizes sizes, int64_t rows)
{
    *scratch = (mixer_block_scratch){
        .dnormed = real_allocate(rows * sizes.width),
        .dmixed = real_allocate(rows * mixed_width(sizes)),
        .dinner = real_allocate(rows * sizes.inner),
        .partial = real_allocate(rmsnorm_partial_count(rows, sizes.width)),
    };
    return scratch->dnormed != NULL && scratch->dmixed != NULL && scratch->dinner != NULL && scratch->partial != NULL;
}

void mixer_block_scratch_free(mixer_block_scratch *scratch)
{
    free(scratch->dnormed);
    free(scratch->dmixed);
    free(scratch->dinner);
    free(scratch->partial);
    *scratch = (mixer_block_scratch){0};
}

/* The size of `elements` elements in bytes. */
static double bytes_of(int64_t elements)
{
    return (double)elements * sizeof(real);
}

/* ---- the convolution ---------------------------------------------------------------------------------- */

/* Channels 0 .. channels-1 of an array [batch,time,row_length], as a tensor [B,D,T] of the library. */
static cot_tensor channels_last(real *data, int64_t batch, int64_t channels, int64_t time, int64_t row_length)
{
    return (cot_tensor){.data = data,
                        .dtype = REAL_DTYPE,
                        .rank = 3,
                        .shape = {batch, channels, time},
                        .stride = {time * row_length, 1, row_length}};
}

static cot_tensor parameter_tensor(real *data, const parameter *p)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, p->rank, p->shape);
}

static cot_status convolve(const mixer_block *block, block_sizes sizes, cot_queue *queue, int64_t batch, int64_t time,
                           mixer_block_saved *saved)
{
    cot_causal_conv1d_forward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = channels_last(saved->mixed, batch, sizes.inner, time, 2 * sizes.inner);
    args.weight = parameter_tensor(block->conv_weight->value, block->conv_weight);
    args.bias = parameter_tensor(block->conv_bias->value, block->conv_bias);
    args.y = channels_last(saved->mixer_out, batch, sizes.inner, time, sizes.inner);
    return TIMED(OP_CONV1D_FORWARD, bytes_of(2 * batch * time * sizes.inner), cot_causal_conv1d_forward(queue, &args));
}

/* Reads dy from scratch->dinner, and writes dx to the first half of each row of scratch->dmixed. */
static cot_status convolve_backward(const mixer_block *block, block_sizes sizes, cot_queue *queue, int64_t batch,
                                    int64_t time, const mixer_block_saved *saved, const mixer_block_scratch *scratch)
{
    cot_causal_conv1d_backward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = channels_last(saved->mixed, batch, sizes.inner, time, 2 * sizes.inner);
    args.weight = parameter_tensor(block->conv_weight->value, block->conv_weight);
    args.bias = parameter_tensor(block->conv_bias->value, block->conv_bias);
    args.dy = channels_last(scratch->dinner, batch, sizes.inner, time, sizes.inner);
    args.dx = channels_last(scratch->dmixed, batch, sizes.inner, time, 2 * sizes.inner);
    args.dweight = parameter_tensor(block->conv_weight->gradient, block->conv_weight);
    args.dbias = parameter_tensor(block->conv_bias->gradient, block->conv_bias);
    return TIMED(OP_CONV1D_BACKWARD, bytes_of(3 * batch * time * sizes.inner),
                 cot_causal_conv1d_backward(queue, &args));
}

static cot_status convolve_step(const mixer_block *block, block_sizes sizes, cot_queue *queue, int64_t batch,
                                real *state, mixer_block_saved *saved)
{
    cot_causal_conv1d_update_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = channels_last(saved->mixed, batch, sizes.inner, 1, 2 * sizes.inner);
    args.weight = parameter_tensor(block->conv_weight->value, block->conv_weight);
    args.bias = parameter_tensor(block->conv_bias->value, block->conv_bias);
    args.conv_state = cot_tensor_contiguous(state, REAL_DTYPE, 3, (int64_t[]){batch, sizes.inner, sizes.kernel - 1});
    args.y = channels_last(saved->mixer_out, batch, sizes.inner, 1, sizes.inner);
    return cot_causal_conv1d_update(queue, &args);
}

/* ---- attention ---------------------------------------------------------------------------------------- */

/* `heads` heads of q, k, v or o, beginning at `data`, in rows of row_length elements. */
static cot_tensor heads_in_rows(block_sizes sizes, int64_t heads, real *data, int64_t batch, int64_t time,
                                int64_t row_length)
{
    const int64_t size = sizes.inner / query_heads(sizes);
    return (cot_tensor){.data = data,
                        .dtype = REAL_DTYPE,
                        .rank = 4,
                        .shape = {batch, time, heads, size},
                        .stride = {time * row_length, row_length, size, 1}};
}

/* q, k and v, or their gradients, as views of the rows of mixed. */
typedef struct qkv_views {
    cot_tensor q, k, v;
} qkv_views;

static qkv_views views_of_mixed(block_sizes sizes, real *mixed, int64_t batch, int64_t time)
{
    const int64_t row = mixed_width(sizes), heads = query_heads(sizes), kv = kv_heads(sizes);
    return (qkv_views){
        .q = heads_in_rows(sizes, heads, mixed, batch, time, row),
        .k = heads_in_rows(sizes, kv, mixed + sizes.inner, batch, time, row),
        .v = heads_in_rows(sizes, kv, mixed + sizes.inner + kv_width(sizes), batch, time, row),
    };
}

/* Rotates q and k, which are adjacent in a row, or their gradients. */
static void apply_rope(block_sizes sizes, int64_t rows, int64_t time, int64_t first, rope_direction direction,
                       real *mixed)
{
    const int64_t size = sizes.inner / query_heads(sizes);
    rope(rows, time, first, query_heads(sizes) + kv_heads(sizes), size, mixed_width(sizes), direction, mixed);
}

static cot_tensor lse_tensor(block_sizes sizes, real *data, int64_t batch, int64_t time)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, 3, (int64_t[]){batch, query_heads(sizes), time});
}

/* Two products for each pair of a query and a key that it sees. */
static double attention_flops(block_sizes sizes, int64_t batch, int64_t time)
{
    return 4 * (double)batch * (double)sizes.inner * (double)time * (double)(time + 1) / 2;
}

static cot_status attend(block_sizes sizes, cot_queue *queue, int64_t batch, int64_t time, mixer_block_saved *saved)
{
    apply_rope(sizes, batch * time, time, 0, ROPE_FORWARD, saved->mixed);
    const qkv_views in = views_of_mixed(sizes, saved->mixed, batch, time);
    cot_attention_forward_args args;
    COT_INIT(&args);
    args.causal = 1;
    args.q = in.q;
    args.k = in.k;
    args.v = in.v;
    args.out = heads_in_rows(sizes, query_heads(sizes), saved->mixer_out, batch, time, sizes.inner);
    args.lse = lse_tensor(sizes, saved->lse, batch, time);
    return TIMED(OP_ATTENTION_FORWARD, attention_flops(sizes, batch, time), cot_attention_forward(queue, &args));
}

/* Reads dout from scratch->dinner, and writes dq, dk and dv to scratch->dmixed. */
static cot_status attend_backward(block_sizes sizes, cot_queue *queue, int64_t batch, int64_t time,
                                  const mixer_block_saved *saved, const mixer_block_scratch *scratch)
{
    const qkv_views in = views_of_mixed(sizes, saved->mixed, batch, time);
    const qkv_views gradients = views_of_mixed(sizes, scratch->dmixed, batch, time);
    cot_attention_backward_args args;
    COT_INIT(&args);
    args.causal = 1;
    args.q = in.q;
    args.k = in.k;
    args.v = in.v;
    args.out = heads_in_rows(sizes, query_heads(sizes), saved->mixer_out, batch, time, sizes.inner);
    args.lse = lse_tensor(sizes, saved->lse, batch, time);
    args.dout = heads_in_rows(sizes, query_heads(sizes), scratch->dinner, batch, time, sizes.inner);
    args.dq = gradients.q;
    args.dk = gradients.k;
    args.dv = gradients.v;
    const cot_status status =
        TIMED(OP_ATTENTION_BACKWARD, 2.5 * attention_flops(sizes, batch, time), cot_attention_backward(queue, &args));
    apply_rope(sizes, batch * time, time, 0, ROPE_BACKWARD, scratch->dmixed);
    return status;
}

/* Appends the new token's key and value to the state. If the state is full, the oldest are removed. Stored keys stay
 * rotated by their own position, because attention depends only on the distance between query and key. */
static cot_status attend_step(block_sizes sizes, cot_queue *queue, int64_t max_tokens, int64_t past_tokens, real *state,
                              mixer_block_saved *saved)
{
    const int64_t width = kv_width(sizes), row = 2 * width;
    apply_rope(sizes, 1, 1, past_tokens, ROPE_FORWARD, saved->mixed);
    if (past_tokens >= max_tokens) {
        memmove(state, state + row, (size_t)((max_tokens - 1) * row) * sizeof(real));
        past_tokens = max_tokens - 1;
    }
    memcpy(state + past_tokens * row, saved->mixed + sizes.inner, (size_t)row * sizeof(real));
    cot_attention_forward_args args;
    COT_INIT(&args);
    args.causal = 1; /* the only query is that of the last token */
    args.q = views_of_mixed(sizes, saved->mixed, 1, 1).q;
    args.k = heads_in_rows(sizes, kv_heads(sizes), state, 1, past_tokens + 1, row);
    args.v = heads_in_rows(sizes, kv_heads(sizes), state + width, 1, past_tokens + 1, row);
    args.out = heads_in_rows(sizes, query_heads(sizes), saved->mixer_out, 1, 1, sizes.inner);
    return cot_attention_forward(queue, &args);
}

/* ---- the residual ------------------------------------------------------------------------------------- */

static cot_tensor rows_tensor(real *data, int64_t rows, int64_t width)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, 2, (int64_t[]){rows, width});
}

/* x_next = x + drop(x_next), without x if no_residual */
static cot_status add_residual(block_sizes sizes, cot_queue *queue, int64_t rows, const mixer_block_saved *saved,
                               real *x_next)
{
    cot_dropout_forward_args args;
    COT_INIT(&args);
    args.p = saved->drop.p;
    args.seed = saved->drop.seed;
    args.offset = saved->drop.offset;
    args.x = args.y = rows_tensor(x_next, rows, sizes.width);
    if (!sizes.no_residual)
        args.residual = rows_tensor(saved->x, rows, sizes.width);
    return TIMED(OP_DROPOUT_FORWARD, bytes_of((sizes.no_residual ? 2 : 3) * rows * sizes.width),
                 cot_dropout_forward(queue, &args));
}

/* dbranch = drop'(dx), the gradient of the dropout's input. */
static cot_status add_residual_backward(block_sizes sizes, cot_queue *queue, int64_t rows,
                                        const mixer_block_saved *saved, real *dx, real *dbranch)
{
    cot_dropout_backward_args args;
    COT_INIT(&args);
    args.p = saved->drop.p;
    args.seed = saved->drop.seed;
    args.offset = saved->drop.offset;
    args.dy = rows_tensor(dx, rows, sizes.width);
    args.dx = rows_tensor(dbranch, rows, sizes.width);
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

/* The input of w_out. */
static real *w_out_input(block_sizes sizes, const mixer_block_saved *saved)
{
    return sizes.attention ? saved->mixer_out : saved->gated;
}

static void norm_and_project_in(const mixer_block *block, block_sizes sizes, int64_t rows, mixer_block_saved *saved)
{
    rmsnorm_forward(rows, sizes.width, saved->x, block->gain->value, saved->normed, saved->inv_rms);
    linear_forward(in_shape(sizes, rows), saved->normed, block->w_in->value, saved->mixed, MATRIX_SET);
}

static cot_status project_out(const mixer_block *block, block_sizes sizes, cot_queue *queue, int64_t rows,
                              mixer_block_saved *saved, real *x_next)
{
    if (!sizes.attention)
        gate_forward(rows, sizes.inner, saved->mixer_out, saved->mixed, saved->gated);
    if (saved->drop.p > 0) {
        linear_forward(out_shape(sizes, rows), w_out_input(sizes, saved), block->w_out->value, x_next, MATRIX_SET);
        return add_residual(sizes, queue, rows, saved, x_next);
    }
    if (!sizes.no_residual)
        memcpy(x_next, saved->x, (size_t)(rows * sizes.width) * sizeof(real));
    linear_forward(out_shape(sizes, rows), w_out_input(sizes, saved), block->w_out->value, x_next,
                   sizes.no_residual ? MATRIX_SET : MATRIX_ADD);
    return COT_OK;
}

cot_status mixer_block_forward(const mixer_block *block, block_sizes sizes, cot_queue *queue, int64_t batch,
                               int64_t time, mixer_block_saved *saved, real *x_next)
{
    norm_and_project_in(block, sizes, batch * time, saved);
    const cot_status status =
        sizes.attention ? attend(sizes, queue, batch, time, saved) : convolve(block, sizes, queue, batch, time, saved);
    return status != COT_OK ? status : project_out(block, sizes, queue, batch * time, saved, x_next);
}

int64_t mixer_block_state_size(block_sizes sizes, int64_t max_tokens)
{
    return sizes.attention ? 2 * kv_width(sizes) * max_tokens : sizes.inner * (sizes.kernel - 1);
}

cot_status mixer_block_step(const mixer_block *block, block_sizes sizes, cot_queue *queue, int64_t max_tokens,
                            int64_t past_tokens, real *state, mixer_block_saved *saved, real *x_next)
{
    norm_and_project_in(block, sizes, 1, saved);
    const cot_status status = sizes.attention ? attend_step(sizes, queue, max_tokens, past_tokens, state, saved)
                                              : convolve_step(block, sizes, queue, 1, state, saved);
    return status != COT_OK ? status : project_out(block, sizes, queue, 1, saved, x_next);
}

cot_status mixer_block_backward(const mixer_block *block, block_sizes sizes, cot_queue *queue, int64_t batch,
                                int64_t time, const mixer_block_saved *saved, const mixer_block_scratch *scratch,
                                real *dx)
{
    const int64_t rows = batch * time;
    real *dbranch = saved->drop.p > 0 ? scratch->dnormed : dx; /* dnormed is not in use yet */
    cot_status status = COT_OK;
    if (dbranch != dx)
        status = add_residual_backward(sizes, queue, rows, saved, dx, dbranch);
    if (status != COT_OK)
        return status;
    linear_backward(out_shape(sizes, rows), w_out_input(sizes, saved), block->w_out->value, dbranch, scratch->dinner,
                    block->w_out->gradient);
    if (sizes.attention) {
        status = attend_backward(sizes, queue, batch, time, saved, scratch);
    } else {
        gate_backward(rows, sizes.inner, saved->mixer_out, saved->mixed, scratch->dinner, scratch->dmixed);
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
