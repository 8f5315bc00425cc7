/* SPDX-License-Identifier: Apache-2.0 */
#include "mixer_block.h"

#include "op_times.h"

#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 4, QUERY_HEADS_PER_KV_HEAD = 2 }; /* GQA */

static const double GPT2_DEVIATION = 0.02; /* of GPT-2's initial weights */

/* 4, or 2 or 1 if 4 does not divide the channels. */
int64_t mixer_block_query_heads(block_sizes sizes)
{
    if (sizes.heads > 0)
        return sizes.heads;
    int64_t heads = HEADS;
    while (sizes.inner % heads != 0)
        heads /= 2;
    return heads;
}

static int64_t kv_heads(block_sizes sizes)
{
    if (sizes.kv_heads > 0)
        return sizes.kv_heads;
    return mixer_block_query_heads(sizes) > QUERY_HEADS_PER_KV_HEAD
               ? mixer_block_query_heads(sizes) / QUERY_HEADS_PER_KV_HEAD
               : 1;
}

/* The number of channels of k, and of v, over all heads. */
static int64_t kv_width(block_sizes sizes)
{
    return sizes.inner / mixer_block_query_heads(sizes) * kv_heads(sizes);
}

static bool has_convolution(block_sizes sizes)
{
    return !sizes.attention && !sizes.mlp;
}

/* ---- parameters and memory ---------------------------------------------------------------------------- */

static parameter *add_parameter(parameter_table *table, int64_t index, const char *part, int64_t rows, int64_t columns,
                                bool decays)
{
    char name[PARAMETER_NAME_SIZE];
    snprintf(name, sizeof name, "blocks.%lld.%s", (long long)index, part);
    return parameter_add(table, name, rows, columns, decays);
}

int64_t mixer_block_mixed_width(block_sizes sizes)
{
    if (sizes.attention)
        return sizes.inner + 2 * kv_width(sizes);
    return sizes.gpt2 ? sizes.inner : 2 * sizes.inner;
}

void mixer_block_register(mixer_block *block, parameter_table *table, block_sizes sizes, int64_t index)
{
    block->norm.gain = add_parameter(table, index, "norm.gain", sizes.width, 0, false);
    block->w_in = add_parameter(table, index, "in.weight", mixer_block_mixed_width(sizes), sizes.width, true);
    if (sizes.gpt2) {
        block->norm.bias = add_parameter(table, index, "norm.bias", sizes.width, 0, false);
        block->bias_in = add_parameter(table, index, "in.bias", mixer_block_mixed_width(sizes), 0, false);
        block->bias_out = add_parameter(table, index, "out.bias", sizes.width, 0, false);
    }
    if (has_convolution(sizes)) {
        block->conv_weight = add_parameter(table, index, "conv.weight", sizes.inner, sizes.kernel, false);
        block->conv_bias = add_parameter(table, index, "conv.bias", sizes.inner, 0, false);
    }
    block->w_out = add_parameter(table, index, "out.weight", sizes.width, sizes.inner, true);
}

void mixer_block_initialise(mixer_block *block, block_sizes sizes, int64_t layers, uint64_t seed)
{
    parameter_fill(block->norm.gain, 1);
    if (sizes.gpt2) {
        parameter *const zeros[] = {block->norm.bias, block->bias_in, block->bias_out};
        for (size_t i = 0; i < sizeof zeros / sizeof *zeros; i++)
            parameter_fill(zeros[i], 0);
        parameter_randomise(block->w_in, seed, GPT2_DEVIATION);
        parameter_randomise(block->w_out, seed, GPT2_DEVIATION / sqrt((double)layers)); /* `layers` counts blocks */
        return;
    }
    parameter_randomise(block->w_in, seed, 1 / sqrt((double)sizes.width));
    if (has_convolution(sizes)) {
        parameter_randomise(block->conv_weight, seed, 1 / sqrt((double)sizes.kernel));
        parameter_fill(block->conv_bias, 0);
    }
    parameter_randomise(block->w_out, seed, 1 / sqrt((double)sizes.inner * 2 * (double)layers));
}

/* The elements of each member of mixer_block_saved but x. */
typedef struct saved_counts {
    int64_t mean, inv_deviation, normed, mixed, mixer_out, gated, lse;
} saved_counts;

static saved_counts counts_of(block_sizes sizes, int64_t rows)
{
    return (saved_counts){.mean = sizes.gpt2 ? rows : 1,
                          .inv_deviation = rows,
                          .normed = rows * sizes.width,
                          .mixed = rows * mixer_block_mixed_width(sizes),
                          .mixer_out = sizes.mlp ? 1 : rows * sizes.inner,
                          .gated = sizes.attention ? 1 : rows * sizes.inner,
                          .lse = sizes.attention ? rows * mixer_block_query_heads(sizes) : 1};
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static saved_counts larger_counts(saved_counts a, saved_counts b)
{
    return (saved_counts){.mean = larger(a.mean, b.mean),
                          .inv_deviation = larger(a.inv_deviation, b.inv_deviation),
                          .normed = larger(a.normed, b.normed),
                          .mixed = larger(a.mixed, b.mixed),
                          .mixer_out = larger(a.mixer_out, b.mixer_out),
                          .gated = larger(a.gated, b.gated),
                          .lse = larger(a.lse, b.lse)};
}

/* Allocates all members but x. */
static bool allocate_members(mixer_block_saved *saved, saved_counts counts, backend *b)
{
    saved->norm.mean = b->op->allocate(b, counts.mean, b->wide);
    saved->norm.inv_deviation = b->op->allocate(b, counts.inv_deviation, b->wide);
    saved->normed = b->op->allocate(b, counts.normed, b->dtype);
    saved->mixed = b->op->allocate(b, counts.mixed, b->dtype);
    saved->mixer_out = b->op->allocate(b, counts.mixer_out, b->dtype);
    saved->gated = b->op->allocate(b, counts.gated, b->dtype);
    saved->lse = b->op->allocate(b, counts.lse, b->wide);
    return saved->norm.mean != NULL && saved->norm.inv_deviation != NULL && saved->normed != NULL &&
           saved->mixed != NULL && saved->mixer_out != NULL && saved->gated != NULL && saved->lse != NULL;
}

bool mixer_block_saved_allocate(mixer_block_saved *saved, block_sizes sizes, backend *b, int64_t rows)
{
    *saved = (mixer_block_saved){.x = b->op->allocate(b, rows * sizes.width, b->dtype)};
    return allocate_members(saved, counts_of(sizes, rows), b) && saved->x != NULL;
}

bool mixer_block_shared_allocate(mixer_block_saved *shared, const block_sizes *sizes, int64_t count, backend *b,
                                 int64_t rows)
{
    saved_counts counts = {0};
    for (int64_t i = 0; i < count; i++)
        counts = larger_counts(counts, counts_of(sizes[i], rows));
    *shared = (mixer_block_saved){0};
    return allocate_members(shared, counts, b);
}

bool mixer_block_saved_share(mixer_block_saved *saved, const mixer_block_saved *shared, block_sizes sizes, backend *b,
                             int64_t rows)
{
    *saved = *shared;
    saved->x = b->op->allocate(b, rows * sizes.width, b->dtype);
    return saved->x != NULL;
}

void mixer_block_saved_free(mixer_block_saved *saved, backend *b)
{
    void *const arrays[] = {saved->x,      saved->norm.mean, saved->norm.inv_deviation,
                            saved->normed, saved->mixed,     saved->mixer_out,
                            saved->gated,  saved->lse};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        b->op->release(b, arrays[i]);
    *saved = (mixer_block_saved){0};
}

bool mixer_block_scratch_allocate(mixer_block_scratch *scratch, backend *b, int64_t rows, int64_t width, int64_t inner,
                                  int64_t mixed, int64_t kernel)
{
    const bool keeps_gradients = b->context.rank == 0;
    *scratch = (mixer_block_scratch){
        .dnormed = b->op->allocate(b, rows * width, b->dtype),
        .dmixed = b->op->allocate(b, rows * mixed, b->dtype),
        .dinner = b->op->allocate(b, rows * inner, b->dtype),
        .sums = b->op->allocate(b, b->op->scratch_bytes(b, rows, mixed > width ? mixed : width), COT_U8),
        .unused_gradients = keeps_gradients ? NULL : b->op->allocate(b, inner * (kernel + 1), b->wide),
    };
    return (keeps_gradients || scratch->unused_gradients != NULL) && scratch->dnormed != NULL &&
           scratch->dmixed != NULL && scratch->dinner != NULL && scratch->sums != NULL;
}

void mixer_block_scratch_free(mixer_block_scratch *scratch, backend *b)
{
    void *const arrays[] = {scratch->dnormed, scratch->dmixed, scratch->dinner, scratch->sums,
                            scratch->unused_gradients};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        b->op->release(b, arrays[i]);
    *scratch = (mixer_block_scratch){0};
}

/* The size of `elements` elements in bytes. */
static double bytes_of(const backend *b, int64_t elements)
{
    return (double)elements * (double)cot_dtype_size(b->dtype);
}

/* ---- the convolution ---------------------------------------------------------------------------------- */

/* Channels 0 .. channels-1 of an array [batch,time,row_length], as a tensor [B,D,T] of the library. */
static cot_tensor channels_last(const backend *b, void *data, int64_t batch, int64_t channels, int64_t time,
                                int64_t row_length)
{
    return (cot_tensor){.data = data,
                        .dtype = b->dtype,
                        .rank = 3,
                        .shape = {batch, channels, time},
                        .stride = {time * row_length, 1, row_length}};
}

static cot_tensor value_tensor(const backend *b, const parameter *p)
{
    return cot_tensor_contiguous(p->w, b->dtype, p->rank, p->shape);
}

static cot_tensor gradient_tensor(const backend *b, const parameter *p)
{
    return cot_tensor_contiguous(p->dw, b->wide, p->rank, p->shape);
}

static cot_status convolve(const mixer_block *block, block_sizes sizes, backend *b, int64_t batch, int64_t time,
                           mixer_block_saved *saved)
{
    cot_causal_conv1d_forward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = channels_last(b, saved->mixed, batch, sizes.inner, time, 2 * sizes.inner);
    args.weight = value_tensor(b, block->conv_weight);
    args.bias = value_tensor(b, block->conv_bias);
    args.y = channels_last(b, saved->mixer_out, batch, sizes.inner, time, sizes.inner);
    return TIMED(OP_CONV1D_FORWARD, bytes_of(b, 2 * batch * time * sizes.inner),
                 context_causal_conv1d_forward(&b->context, b->queue, &args));
}

/* Reads dy from scratch->dinner, and writes dx to the first half of each row of scratch->dmixed. With context parallelism
 * every rank gets dweight and dbias of all ranks. The ranks add their gradients later, so that only one may keep these. */
static cot_status convolve_backward(const mixer_block *block, block_sizes sizes, backend *b, int64_t batch,
                                    int64_t time, const mixer_block_saved *saved, const mixer_block_scratch *scratch)
{
    cot_causal_conv1d_backward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.accumulate = b->accumulate;
    args.x = channels_last(b, saved->mixed, batch, sizes.inner, time, 2 * sizes.inner);
    args.weight = value_tensor(b, block->conv_weight);
    args.bias = value_tensor(b, block->conv_bias);
    args.dy = channels_last(b, scratch->dinner, batch, sizes.inner, time, sizes.inner);
    args.dx = channels_last(b, scratch->dmixed, batch, sizes.inner, time, 2 * sizes.inner);
    args.dweight = gradient_tensor(b, block->conv_weight);
    args.dbias = gradient_tensor(b, block->conv_bias);
    if (b->context.rank > 0) {
        if (!b->accumulate) { /* of a CPU, where gradients have the dtype of values */
            b->op->zero(b, block->conv_weight->count, block->conv_weight->dw);
            b->op->zero(b, block->conv_bias->count, block->conv_bias->dw);
        }
        args.dweight.data = scratch->unused_gradients;
        args.dbias.data =
            (char *)scratch->unused_gradients + sizes.inner * sizes.kernel * (int64_t)cot_dtype_size(b->wide);
    }
    return TIMED(OP_CONV1D_BACKWARD, bytes_of(b, 3 * batch * time * sizes.inner),
                 context_causal_conv1d_backward(&b->context, b->queue, &args));
}

static cot_status convolve_step(const mixer_block *block, block_sizes sizes, backend *b, int64_t batch, void *state,
                                mixer_block_saved *saved)
{
    cot_causal_conv1d_update_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = channels_last(b, saved->mixed, batch, sizes.inner, 1, 2 * sizes.inner);
    args.weight = value_tensor(b, block->conv_weight);
    args.bias = value_tensor(b, block->conv_bias);
    args.conv_state = cot_tensor_contiguous(state, b->dtype, 3, (int64_t[]){batch, sizes.inner, sizes.kernel - 1});
    args.y = channels_last(b, saved->mixer_out, batch, sizes.inner, 1, sizes.inner);
    return cot_causal_conv1d_update(b->queue, &args);
}

/* ---- attention ---------------------------------------------------------------------------------------- */

/* `heads` heads of q, k, v or o, beginning at `data`, in rows of row_length elements. */
static cot_tensor heads_in_rows(const backend *b, block_sizes sizes, int64_t heads, void *data, int64_t batch,
                                int64_t time, int64_t row_length)
{
    const int64_t size = sizes.inner / mixer_block_query_heads(sizes);
    return (cot_tensor){.data = data,
                        .dtype = b->dtype,
                        .rank = 4,
                        .shape = {batch, time, heads, size},
                        .stride = {time * row_length, row_length, size, 1}};
}

/* q, k and v, or their gradients, as views of the rows of mixed. */
typedef struct qkv_views {
    cot_tensor q, k, v;
} qkv_views;

static qkv_views views_of_mixed(const backend *b, block_sizes sizes, void *mixed, int64_t batch, int64_t time)
{
    const int64_t row = mixer_block_mixed_width(sizes), heads = mixer_block_query_heads(sizes), kv = kv_heads(sizes);
    return (qkv_views){
        .q = heads_in_rows(b, sizes, heads, mixed, batch, time, row),
        .k = heads_in_rows(b, sizes, kv, backend_at(b, mixed, sizes.inner), batch, time, row),
        .v = heads_in_rows(b, sizes, kv, backend_at(b, mixed, sizes.inner + kv_width(sizes)), batch, time, row),
    };
}

/* Rotates q and k, which are adjacent in a row, or their gradients. */
static void apply_rope(backend *b, block_sizes sizes, int64_t rows, int64_t time, row_positions positions,
                       rope_direction direction, void *mixed)
{
    const int64_t size = sizes.inner / mixer_block_query_heads(sizes);
    b->op->rope(b, rows, time, positions, mixer_block_query_heads(sizes) + kv_heads(sizes), size,
                mixer_block_mixed_width(sizes), direction, mixed);
}

static cot_tensor lse_tensor(const backend *b, block_sizes sizes, void *data, int64_t batch, int64_t time)
{
    return cot_tensor_contiguous(data, b->wide, 3, (int64_t[]){batch, mixer_block_query_heads(sizes), time});
}

/* Two products for each pair of a query and a key that it attends to. */
static double attention_flops(block_sizes sizes, int64_t batch, int64_t time)
{
    return 4 * (double)batch * (double)sizes.inner * (double)time * (double)(time + 1) / 2;
}

static cot_status attend(block_sizes sizes, backend *b, int64_t batch, int64_t time, mixer_block_saved *saved)
{
    if (!sizes.gpt2)
        apply_rope(b, sizes, batch * time, time, b->context.positions, ROPE_FORWARD, saved->mixed);
    const qkv_views in = views_of_mixed(b, sizes, saved->mixed, batch, time);
    cot_attention_forward_args args;
    COT_INIT(&args);
    args.causal = 1;
    args.q = in.q;
    args.k = in.k;
    args.v = in.v;
    args.out = heads_in_rows(b, sizes, mixer_block_query_heads(sizes), saved->mixer_out, batch, time, sizes.inner);
    args.lse = lse_tensor(b, sizes, saved->lse, batch, time);
    return TIMED(OP_ATTENTION_FORWARD, attention_flops(sizes, batch, time),
                 context_attention_forward(&b->context, b->queue, &args));
}

/* Reads dout from scratch->dinner, and writes dq, dk and dv to scratch->dmixed. */
static cot_status attend_backward(block_sizes sizes, backend *b, int64_t batch, int64_t time,
                                  const mixer_block_saved *saved, const mixer_block_scratch *scratch)
{
    const qkv_views in = views_of_mixed(b, sizes, saved->mixed, batch, time);
    const qkv_views gradients = views_of_mixed(b, sizes, scratch->dmixed, batch, time);
    cot_attention_backward_args args;
    COT_INIT(&args);
    args.causal = 1;
    args.q = in.q;
    args.k = in.k;
    args.v = in.v;
    args.out = heads_in_rows(b, sizes, mixer_block_query_heads(sizes), saved->mixer_out, batch, time, sizes.inner);
    args.lse = lse_tensor(b, sizes, saved->lse, batch, time);
    args.dout = heads_in_rows(b, sizes, mixer_block_query_heads(sizes), scratch->dinner, batch, time, sizes.inner);
    args.dq = gradients.q;
    args.dk = gradients.k;
    args.dv = gradients.v;
    const cot_status status = TIMED(OP_ATTENTION_BACKWARD, 2.5 * attention_flops(sizes, batch, time),
                                    context_attention_backward(&b->context, b->queue, &args));
    if (!sizes.gpt2)
        apply_rope(b, sizes, batch * time, time, b->context.positions, ROPE_BACKWARD, scratch->dmixed);
    return status;
}

/* Appends the new token's key and value to the state. If the state is full, the oldest are removed. Stored keys stay
 * rotated by their own position, because attention depends only on the distance between query and key. */
static cot_status attend_step(block_sizes sizes, backend *b, int64_t max_tokens, int64_t past_tokens, void *state,
                              mixer_block_saved *saved)
{
    const int64_t width = kv_width(sizes), row = 2 * width;
    if (!sizes.gpt2)
        apply_rope(b, sizes, 1, 1, positions_from(past_tokens), ROPE_FORWARD, saved->mixed);
    if (past_tokens >= max_tokens) {
        memmove(state, (real *)state + row, (size_t)((max_tokens - 1) * row) * sizeof(real));
        past_tokens = max_tokens - 1;
    }
    memcpy((real *)state + past_tokens * row, (real *)saved->mixed + sizes.inner, (size_t)row * sizeof(real));
    cot_attention_forward_args args;
    COT_INIT(&args);
    args.causal = 1; /* the only query is that of the last token */
    args.q = views_of_mixed(b, sizes, saved->mixed, 1, 1).q;
    args.k = heads_in_rows(b, sizes, kv_heads(sizes), state, 1, past_tokens + 1, row);
    args.v = heads_in_rows(b, sizes, kv_heads(sizes), (real *)state + width, 1, past_tokens + 1, row);
    args.out = heads_in_rows(b, sizes, mixer_block_query_heads(sizes), saved->mixer_out, 1, 1, sizes.inner);
    return cot_attention_forward(b->queue, &args);
}

/* ---- the residual ------------------------------------------------------------------------------------- */

static cot_tensor rows_tensor(const backend *b, void *data, int64_t rows, int64_t width)
{
    return cot_tensor_contiguous(data, b->dtype, 2, (int64_t[]){rows, width});
}

/* x_next = x + drop(x_next), without x if no_residual */
static cot_status add_residual(block_sizes sizes, backend *b, int64_t rows, const mixer_block_saved *saved,
                               void *x_next)
{
    cot_dropout_forward_args args;
    COT_INIT(&args);
    args.p = saved->drop.p;
    args.seed = saved->drop.seed;
    args.offset = saved->drop.offset;
    args.offset_tensor = b->step_offset;
    args.x = args.y = rows_tensor(b, x_next, rows, sizes.width);
    if (!sizes.no_residual)
        args.residual = rows_tensor(b, saved->x, rows, sizes.width);
    return TIMED(OP_DROPOUT_FORWARD, bytes_of(b, (sizes.no_residual ? 2 : 3) * rows * sizes.width),
                 cot_dropout_forward(b->queue, &args));
}

/* dbranch = drop'(dx), the gradient of the dropout's input. */
static cot_status add_residual_backward(block_sizes sizes, backend *b, int64_t rows, const mixer_block_saved *saved,
                                        void *dx, void *dbranch)
{
    cot_dropout_backward_args args;
    COT_INIT(&args);
    args.p = saved->drop.p;
    args.seed = saved->drop.seed;
    args.offset = saved->drop.offset;
    args.offset_tensor = b->step_offset;
    args.dy = rows_tensor(b, dx, rows, sizes.width);
    args.dx = rows_tensor(b, dbranch, rows, sizes.width);
    return TIMED(OP_DROPOUT_BACKWARD, bytes_of(b, 2 * rows * sizes.width), cot_dropout_backward(b->queue, &args));
}

/* ---- the block ---------------------------------------------------------------------------------------- */

/* What the backend reads; NULL without the parameter. */
static const void *value_of(const parameter *p)
{
    return p != NULL ? p->w : NULL;
}

static linear_shape in_shape(block_sizes sizes, int64_t rows)
{
    return (linear_shape){.rows = rows, .in = sizes.width, .out = mixer_block_mixed_width(sizes)};
}

static linear_shape out_shape(block_sizes sizes, int64_t rows)
{
    return (linear_shape){.rows = rows, .in = sizes.inner, .out = sizes.width};
}

/* The input of w_out. */
static void *w_out_input(block_sizes sizes, const mixer_block_saved *saved)
{
    return sizes.attention ? saved->mixer_out : saved->gated;
}

static void norm_and_project_in(const mixer_block *block, block_sizes sizes, backend *b, int64_t rows,
                                mixer_block_saved *saved)
{
    norm_forward(&block->norm, b, rows, sizes.width, saved->x, saved->normed, &saved->norm);
    b->op->linear_forward(b, in_shape(sizes, rows), saved->normed, block->w_in->w, value_of(block->bias_in), NULL,
                          saved->mixed);
}

/* Sets saved->gated, unless the block has attention. */
static void activate(block_sizes sizes, backend *b, int64_t rows, mixer_block_saved *saved)
{
    if (sizes.mlp && sizes.gpt2)
        b->op->gelu_forward(b, rows, sizes.inner, saved->mixed, saved->gated);
    else if (sizes.mlp)
        b->op->swiglu_forward(b, rows, sizes.inner, saved->mixed, saved->gated);
    else if (!sizes.attention)
        b->op->gate_forward(b, rows, sizes.inner, saved->mixer_out, saved->mixed, saved->gated);
}

static cot_status project_out(const mixer_block *block, block_sizes sizes, backend *b, int64_t rows,
                              mixer_block_saved *saved, void *x_next)
{
    const bool drops = saved->drop.p > 0; /* then the dropout adds the residual */
    b->op->linear_forward(b, out_shape(sizes, rows), w_out_input(sizes, saved), block->w_out->w,
                          value_of(block->bias_out), drops || sizes.no_residual ? NULL : saved->x, x_next);
    return drops ? add_residual(sizes, b, rows, saved, x_next) : COT_OK;
}

cot_status mixer_block_recompute(const mixer_block *block, block_sizes sizes, backend *b, int64_t batch, int64_t time,
                                 mixer_block_saved *saved)
{
    cot_status status = COT_OK;
    norm_and_project_in(block, sizes, b, batch * time, saved);
    if (sizes.attention)
        status = attend(sizes, b, batch, time, saved);
    else if (!sizes.mlp)
        status = convolve(block, sizes, b, batch, time, saved);
    if (status == COT_OK)
        activate(sizes, b, batch * time, saved);
    return status;
}

cot_status mixer_block_forward(const mixer_block *block, block_sizes sizes, backend *b, int64_t batch, int64_t time,
                               mixer_block_saved *saved, void *x_next)
{
    const cot_status status = mixer_block_recompute(block, sizes, b, batch, time, saved);
    return status != COT_OK ? status : project_out(block, sizes, b, batch * time, saved, x_next);
}

int64_t mixer_block_state_size(block_sizes sizes, int64_t max_tokens)
{
    return sizes.mlp ? 0 : sizes.attention ? 2 * kv_width(sizes) * max_tokens : sizes.inner * (sizes.kernel - 1);
}

cot_status mixer_block_step(const mixer_block *block, block_sizes sizes, backend *b, int64_t max_tokens,
                            int64_t past_tokens, void *state, mixer_block_saved *saved, void *x_next)
{
    cot_status status = COT_OK;
    norm_and_project_in(block, sizes, b, 1, saved);
    if (sizes.attention)
        status = attend_step(sizes, b, max_tokens, past_tokens, state, saved);
    else if (!sizes.mlp)
        status = convolve_step(block, sizes, b, 1, state, saved);
    if (status == COT_OK)
        activate(sizes, b, 1, saved);
    return status != COT_OK ? status : project_out(block, sizes, b, 1, saved, x_next);
}

cot_status mixer_block_backward(const mixer_block *block, block_sizes sizes, backend *b, int64_t batch, int64_t time,
                                const mixer_block_saved *saved, const mixer_block_scratch *scratch, void *dx)
{
    const int64_t rows = batch * time;
    void *dbranch = saved->drop.p > 0 ? scratch->dnormed : dx; /* dnormed is not in use yet */
    cot_status status = COT_OK;
    if (dbranch != dx)
        status = add_residual_backward(sizes, b, rows, saved, dx, dbranch);
    if (status != COT_OK)
        return status;
    if (sizes.gpt2)
        b->op->bias_backward(b, rows, sizes.width, dbranch, scratch->sums, block->bias_out->dw);
    b->op->linear_backward(b, out_shape(sizes, rows), w_out_input(sizes, saved), block->w_out->w, dbranch,
                           scratch->dinner, block->w_out->dw);
    if (sizes.attention) {
        status = attend_backward(sizes, b, batch, time, saved, scratch);
    } else if (sizes.mlp && sizes.gpt2) {
        b->op->gelu_backward(b, rows, sizes.inner, saved->mixed, scratch->dinner, scratch->dmixed);
    } else if (sizes.mlp) {
        b->op->swiglu_backward(b, rows, sizes.inner, saved->mixed, scratch->dinner, scratch->dmixed);
    } else {
        b->op->gate_backward(b, rows, sizes.inner, saved->mixer_out, saved->mixed, scratch->dinner, scratch->dmixed);
        status = convolve_backward(block, sizes, b, batch, time, saved, scratch);
    }
    if (status != COT_OK)
        return status;
    if (sizes.gpt2)
        b->op->bias_backward(b, rows, mixer_block_mixed_width(sizes), scratch->dmixed, scratch->sums,
                             block->bias_in->dw);
    b->op->linear_backward(b, in_shape(sizes, rows), saved->normed, block->w_in->w, scratch->dmixed, scratch->dnormed,
                           block->w_in->dw);
    if (sizes.no_residual)
        b->op->zero(b, rows * sizes.width, dx);
    norm_backward(&block->norm, b, rows, sizes.width, saved->x, &saved->norm, scratch->dnormed, scratch->sums, dx);
    return COT_OK;
}
