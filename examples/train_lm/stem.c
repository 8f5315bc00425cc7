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
static cot_tensor channels_last(const stem *s, real *data, int64_t batch, int64_t time)
{
    return (cot_tensor){.data = data,
                        .dtype = REAL_DTYPE,
                        .rank = 3,
                        .shape = {batch, s->width, time},
                        .stride = {time * s->width, 1, s->width}};
}

static cot_tensor weight_tensor(const stem *s, real *data)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, 3, (int64_t[]){s->width, s->width, s->kernel});
}

static cot_tensor bias_tensor(const stem *s, real *data)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, 1, &s->width);
}

static cot_tensor state_tensor(const stem *s, real *data)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, 3, (int64_t[]){1, s->width, s->kernel - 1});
}

static void add_to(int64_t count, const real *addend, real *sum)
{
    for (int64_t i = 0; i < count; i++)
        sum[i] += addend[i];
}

static double flops(const stem *s, int64_t rows)
{
    return 2 * (double)rows * (double)s->width * (double)s->width * (double)s->kernel;
}

static cot_causal_conv1d_dense_forward_args forward_args(const stem *s, int64_t batch, int64_t time, real *e, real *x)
{
    cot_causal_conv1d_dense_forward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = channels_last(s, e, batch, time);
    args.weight = weight_tensor(s, s->weight->value);
    args.bias = bias_tensor(s, s->bias->value);
    args.y = channels_last(s, x, batch, time);
    return args;
}

cot_status stem_forward(const stem *s, cot_queue *queue, int64_t batch, int64_t time, real *e, real *x)
{
    const cot_causal_conv1d_dense_forward_args args = forward_args(s, batch, time, e, x);
    const cot_status status =
        TIMED(OP_CONV1D_DENSE_FORWARD, flops(s, batch * time), cot_causal_conv1d_dense_forward(queue, &args));
    add_to(batch * time * s->width, e, x);
    return status;
}

cot_status stem_backward(const stem *s, cot_queue *queue, int64_t batch, int64_t time, real *e, real *dx, real *scratch)
{
    cot_causal_conv1d_dense_backward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = channels_last(s, e, batch, time);
    args.weight = weight_tensor(s, s->weight->value);
    args.bias = bias_tensor(s, s->bias->value);
    args.dy = channels_last(s, dx, batch, time);
    args.dx = channels_last(s, scratch, batch, time);
    args.dweight = weight_tensor(s, s->weight->gradient);
    args.dbias = bias_tensor(s, s->bias->gradient);
    const cot_status status =
        TIMED(OP_CONV1D_DENSE_BACKWARD, 3 * flops(s, batch * time), cot_causal_conv1d_dense_backward(queue, &args));
    if (status == COT_OK)
        add_to(batch * time * s->width, scratch, dx);
    return status;
}

/* Memory for the old and the new state: an output may not overlap an input. */
int64_t stem_state_size(const stem *s)
{
    return s->weight != NULL ? 2 * s->width * (s->kernel - 1) : 0;
}

cot_status stem_step(const stem *s, cot_queue *queue, real *state, real *e, real *x)
{
    const int64_t half = s->width * (s->kernel - 1);
    cot_causal_conv1d_dense_forward_args args = forward_args(s, 1, 1, e, x);
    args.initial_state = state_tensor(s, state);
    args.final_state = state_tensor(s, state + half);
    const cot_status status = cot_causal_conv1d_dense_forward(queue, &args);
    memcpy(state, state + half, (size_t)half * sizeof(real));
    add_to(s->width, e, x);
    return status;
}
