/* SPDX-License-Identifier: Apache-2.0 */
#include "stem.h"

#include "op_times.h"

void stem_register(stem *s, parameter_table *table, int64_t width, int64_t kernel)
{
    s->width = width;
    s->kernel = kernel;
    s->weight = parameter_add(table, "stem.weight", width, width * kernel, true);
    s->bias = parameter_add(table, "stem.bias", width, 0, false);
}

void stem_initialise(stem *s, uint64_t seed)
{
    parameter_randomise(s->weight, seed, 1 / sqrt((double)(s->width * s->kernel)));
    parameter_fill(s->bias, 0);
}

/* An array [batch,time,width] as a tensor [B,D,T] of the library. */
static cot_tensor channels_last(const backend *b, const stem *s, void *data, int64_t batch, int64_t time)
{
    return (cot_tensor){.data = data,
                        .dtype = b->dtype,
                        .rank = 3,
                        .shape = {batch, s->width, time},
                        .stride = {time * s->width, 1, s->width}};
}

static cot_tensor weight_tensor(const stem *s, void *data, cot_dtype dtype)
{
    return cot_tensor_contiguous(data, dtype, 3, (int64_t[]){s->width, s->width, s->kernel});
}

static cot_tensor bias_tensor(const stem *s, void *data, cot_dtype dtype)
{
    return cot_tensor_contiguous(data, dtype, 1, &s->width);
}

static cot_tensor state_tensor(const stem *s, void *data)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, 3, (int64_t[]){1, s->width, s->kernel - 1});
}

static double flops(const stem *s, int64_t rows)
{
    return 2 * (double)rows * (double)s->width * (double)s->width * (double)s->kernel;
}

static cot_causal_conv1d_dense_forward_args forward_args(const backend *b, const stem *s, int64_t batch, int64_t time,
                                                         void *e, void *x)
{
    cot_causal_conv1d_dense_forward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = channels_last(b, s, e, batch, time);
    args.weight = weight_tensor(s, s->weight->w, b->dtype);
    args.bias = bias_tensor(s, s->bias->w, b->dtype);
    args.y = channels_last(b, s, x, batch, time);
    return args;
}

cot_status stem_forward(const stem *s, backend *b, int64_t batch, int64_t time, void *e, void *x)
{
    const cot_causal_conv1d_dense_forward_args args = forward_args(b, s, batch, time, e, x);
    const cot_status status =
        TIMED(OP_CONV1D_DENSE_FORWARD, flops(s, batch * time), cot_causal_conv1d_dense_forward(b->queue, &args));
    b->op->add(b, batch * time * s->width, e, x);
    return status;
}

cot_status stem_backward(const stem *s, backend *b, int64_t batch, int64_t time, void *e, void *dx, void *scratch)
{
    cot_causal_conv1d_dense_backward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.accumulate = b->accumulate;
    args.x = channels_last(b, s, e, batch, time);
    args.weight = weight_tensor(s, s->weight->w, b->dtype);
    args.bias = bias_tensor(s, s->bias->w, b->dtype);
    args.dy = channels_last(b, s, dx, batch, time);
    args.dx = channels_last(b, s, scratch, batch, time);
    args.dweight = weight_tensor(s, s->weight->dw, b->wide);
    args.dbias = bias_tensor(s, s->bias->dw, b->wide);
    const cot_status status =
        TIMED(OP_CONV1D_DENSE_BACKWARD, 3 * flops(s, batch * time), cot_causal_conv1d_dense_backward(b->queue, &args));
    if (status == COT_OK)
        b->op->add(b, batch * time * s->width, scratch, dx);
    return status;
}

/* Memory for the old and the new state: an output may not overlap an input. */
int64_t stem_state_size(const stem *s)
{
    return s->weight != NULL ? 2 * s->width * (s->kernel - 1) : 0;
}

cot_status stem_step(const stem *s, backend *b, void *state, void *e, void *x)
{
    const int64_t half = s->width * (s->kernel - 1);
    cot_causal_conv1d_dense_forward_args args = forward_args(b, s, 1, 1, e, x);
    args.initial_state = state_tensor(s, state);
    args.final_state = state_tensor(s, (real *)state + half);
    const cot_status status = cot_causal_conv1d_dense_forward(b->queue, &args);
    memcpy(state, (real *)state + half, (size_t)half * sizeof(real));
    b->op->add(b, s->width, e, x);
    return status;
}
