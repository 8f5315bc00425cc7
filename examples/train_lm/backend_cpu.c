/* SPDX-License-Identifier: Apache-2.0
 *
 * backend_cpu.c: the operations on the CPU, for the element type of real.h. */
#include "backend.h"

#include <stdlib.h>

static matrix_store gradient_store(const backend *b)
{
    return b->accumulate ? MATRIX_ADD : MATRIX_SET;
}

static void *allocate(backend *b, int64_t count, cot_dtype dtype)
{
    (void)b;
    const int64_t size = (int64_t)cot_dtype_size(dtype);
    return real_allocate((count * size + (int64_t)sizeof(real) - 1) / (int64_t)sizeof(real));
}

static void release(backend *b, void *memory)
{
    (void)b;
    free(memory);
}

static void zero(backend *b, int64_t count, void *x)
{
    (void)b;
    memset(x, 0, (size_t)count * sizeof(real));
}

static void add(backend *b, int64_t count, const void *x, void *y)
{
    (void)b;
    const real *addend = x;
    real *sum = y;
    for (int64_t i = 0; i < count; i++)
        sum[i] += addend[i];
}

static void forward_linear(backend *b, linear_shape shape, const void *x, const void *w, const void *bias,
                           const void *residual, void *y)
{
    const size_t row = (size_t)shape.out * sizeof(real);
    if (residual != NULL && residual != y)
        memcpy(y, residual, (size_t)shape.rows * row);
    for (int64_t r = 0; bias != NULL && r < shape.rows; r++) {
        if (residual != NULL)
            add(b, shape.out, bias, (real *)y + r * shape.out);
        else
            memcpy((real *)y + r * shape.out, bias, row);
    }
    linear_forward(shape, x, w, y, residual != NULL || bias != NULL ? MATRIX_ADD : MATRIX_SET);
}

static void backward_linear(backend *b, linear_shape shape, const void *x, const void *w, const void *dy, void *dx,
                            void *dw)
{
    linear_backward(shape, x, w, dy, dx, dw, gradient_store(b));
}

static void backward_bias(backend *b, int64_t rows, int64_t width, const void *dy, void *scratch, void *dbias)
{
    column_sums(rows, width, dy, scratch, dbias, gradient_store(b));
}

static void forward_embedding(backend *b, int64_t rows, int64_t width, const void *inputs, const void *table,
                              const void *table_of_positions, int64_t time, row_positions positions, void *y)
{
    (void)b;
    embedding_forward(rows, width, inputs, table, y);
    if (table_of_positions != NULL)
        positions_forward(rows, time, positions, width, table_of_positions, y);
}

static void backward_embedding(backend *b, int64_t rows, int64_t width, int64_t vocabulary, const void *inputs,
                               const void *dy, void *scratch, void *dtable)
{
    embedding_backward(rows, width, vocabulary, inputs, dy, scratch, dtable, gradient_store(b));
}

static void backward_positions(backend *b, int64_t rows, int64_t time, row_positions positions, int64_t width,
                               int64_t length, const void *dy, void *dtable)
{
    positions_backward(rows, time, positions, width, length, dy, dtable, gradient_store(b));
}

static void forward_rmsnorm(backend *b, int64_t rows, int64_t width, const void *x, const void *gain, void *y,
                            void *inv_rms)
{
    (void)b;
    rmsnorm_forward(rows, width, x, gain, y, inv_rms);
}

static void backward_rmsnorm(backend *b, int64_t rows, int64_t width, const void *x, const void *gain,
                             const void *inv_rms, const void *dy, void *scratch, void *dx, void *dgain)
{
    rmsnorm_backward(rows, width, x, gain, inv_rms, dy, scratch, dx, dgain, gradient_store(b));
}

static void forward_layernorm(backend *b, int64_t rows, int64_t width, const void *x, const void *gain,
                              const void *bias, void *y, void *mean, void *inv_deviation)
{
    (void)b;
    layernorm_forward(rows, width, x, gain, bias, y, mean, inv_deviation);
}

static void backward_layernorm(backend *b, int64_t rows, int64_t width, const void *x, const void *gain,
                               const void *mean, const void *inv_deviation, const void *dy, void *scratch, void *dx,
                               void *dgain, void *dbias)
{
    layernorm_backward(rows, width, x, gain, mean, inv_deviation, dy, scratch, dx, dgain, dbias, gradient_store(b));
}

static void rotate(backend *b, int64_t rows, int64_t time, row_positions positions, int64_t heads, int64_t size,
                   int64_t row_length, rope_direction direction, void *x)
{
    (void)b;
    rope(rows, time, positions, heads, size, row_length, direction, x);
}

static void forward_gate(backend *b, int64_t rows, int64_t inner, const void *c, const void *mixed, void *y)
{
    (void)b;
    gate_forward(rows, inner, c, mixed, y);
}

static void backward_gate(backend *b, int64_t rows, int64_t inner, const void *c, const void *mixed, void *dy,
                          void *dmixed)
{
    (void)b;
    gate_backward(rows, inner, c, mixed, dy, dmixed);
}

static void forward_swiglu(backend *b, int64_t rows, int64_t inner, const void *mixed, void *y)
{
    (void)b;
    swiglu_forward(rows, inner, mixed, y);
}

static void backward_swiglu(backend *b, int64_t rows, int64_t inner, const void *mixed, const void *dy, void *dmixed)
{
    (void)b;
    swiglu_backward(rows, inner, mixed, dy, dmixed);
}

static void forward_gelu(backend *b, int64_t rows, int64_t inner, const void *x, void *y)
{
    (void)b;
    gelu_forward(rows * inner, x, y);
}

static void backward_gelu(backend *b, int64_t rows, int64_t inner, const void *x, const void *dy, void *dx)
{
    (void)b;
    gelu_backward(rows * inner, x, dy, dx);
}

static void spread(backend *b, int64_t rows, int64_t streams, int64_t width, const void *x, void *out)
{
    (void)b;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < streams; i++)
            memcpy((real *)out + (r * streams + i) * width, (const real *)x + r * width, (size_t)width * sizeof(real));
}

static void collect(backend *b, int64_t rows, int64_t streams, int64_t width, const void *in, void *x)
{
    zero(b, rows * width, x);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < streams; i++)
            add(b, width, (const real *)in + (r * streams + i) * width, (real *)x + r * width);
}

static void add_cross_entropy(backend *b, int64_t first, int64_t rows, int64_t mean_rows, int64_t classes,
                              const void *targets, void *logits, void *row_loss, bool gradient)
{
    b->loss += cross_entropy(rows, mean_rows, classes, (const int32_t *)targets + first, logits, row_loss, gradient);
}

/* The embedding sorts rows, the norm has partial sums. */
static int64_t scratch_bytes(const backend *b, int64_t rows, int64_t width)
{
    (void)b;
    const int64_t order = rows * (int64_t)sizeof(int64_t),
                  sums = 2 * rmsnorm_partial_count(rows, width) * (int64_t)sizeof(real);
    return order > sums ? order : sums;
}

/* ---- steps -------------------------------------------------------------------------------------------- */

static void load(backend *b, int64_t rows, int64_t micro_batches, const int32_t *inputs, const int32_t *targets,
                 token_batch *batches)
{
    (void)b;
    for (int64_t i = 0; i < micro_batches; i++)
        batches[i] = (token_batch){inputs + i * rows, targets + i * rows};
}

static cot_status run(backend *b, cot_status (*enqueue)(void *context), void *context)
{
    (void)b;
    return enqueue(context);
}

static void begin(backend *b)
{
    b->loss = 0;
}

/* Gets the elements of other ranks' shares. What this rank has of them is old. */
static void gather(backend *b, real *array, int64_t count)
{
    const element_range own = optimizer_share(&b->shards, count);
    if (b->shards.size <= 1 || b->status != COT_OK)
        return;
    memset(array, 0, (size_t)own.begin * sizeof *array);
    memset(array + own.end, 0, (size_t)(count - own.end) * sizeof *array);
    b->status = optimizer_shards_gather(&b->shards, NULL, REAL_DTYPE, array, count);
}

static void update(backend *b, parameter_table *table)
{
    if (b->partial == NULL)
        b->partial = calloc((size_t)gradient_norm_partials(table), sizeof *b->partial);
    if (b->partial == NULL) {
        b->status = cot_error_set(COT_OUT_OF_MEMORY, "out of memory");
        return;
    }
    const element_range own = optimizer_share(&b->shards, table->elements);
    adamw_step(table, &b->adamw, own, gradient_norm(table, b->partial), b->step_rate, b->step);
    gather(b, table->values, table->elements);
}

static cot_status read_loss(backend *b, double *loss)
{
    *loss = b->loss;
    return b->status;
}

/* The model reads the host arrays themselves. Only moments of other ranks are missing. */
static void download(backend *b, parameter_table *table)
{
    gather(b, table->moments1, table->elements);
    gather(b, table->moments2, table->elements);
}

static void upload(backend *b, parameter_table *table)
{
    (void)b;
    (void)table;
}

static const backend_operations OPERATIONS = {
    .allocate = allocate,
    .release = release,
    .zero = zero,
    .add = add,
    .linear_forward = forward_linear,
    .linear_backward = backward_linear,
    .bias_backward = backward_bias,
    .embedding_forward = forward_embedding,
    .embedding_backward = backward_embedding,
    .positions_backward = backward_positions,
    .rmsnorm_forward = forward_rmsnorm,
    .rmsnorm_backward = backward_rmsnorm,
    .layernorm_forward = forward_layernorm,
    .layernorm_backward = backward_layernorm,
    .rope = rotate,
    .gate_forward = forward_gate,
    .gate_backward = backward_gate,
    .swiglu_forward = forward_swiglu,
    .swiglu_backward = backward_swiglu,
    .gelu_forward = forward_gelu,
    .gelu_backward = backward_gelu,
    .spread = spread,
    .collect = collect,
    .cross_entropy = add_cross_entropy,
    .scratch_bytes = scratch_bytes,
    .load = load,
    .run = run,
    .begin = begin,
    .update = update,
    .read_loss = read_loss,
    .download = download,
    .upload = upload,
};

void backend_cpu_create(backend *b, cot_queue *queue)
{
    *b = (backend){.op = &OPERATIONS, .queue = queue, .dtype = REAL_DTYPE, .wide = REAL_DTYPE};
}

void backend_cpu_destroy(backend *b)
{
    free(b->partial);
    *b = (backend){0};
}
