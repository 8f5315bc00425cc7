/* SPDX-License-Identifier: Apache-2.0
 *
 * backend_cuda.c: the operations on a GPU. An operation enqueues work on the queue's stream, and neither waits nor
 * allocates, so that a CUDA graph can capture a whole step. What changes from step to step is in one block of device
 * memory, which `load` fills by one copy: the tokens, the order of the embedding's sums, the learning rate, the offset of
 * dropout. The parameters that decay come first in the arrays of parameters. */
#include "backend_cuda.h"

#include "cublaslt.h"
#include "device_layers.h"

#include "cuda/device.h"

#include "core/float16.h"
#include "core/integers.h"
#include "core/status.h"

#include <stdio.h>
#include <stdlib.h>

/* ALIGNMENT: bytes. LOGIT_ROWS: at a vocabulary of 50304, a chunk of bf16 logits has 400 MB.
 * LOGIT_ROWS_F32: the product for the gradient of the head adds a chunk of rows in one float32 sum each. The softmax of a
 * token that is rarely the target is below half an ulp of the sum of a frequent one: a longer sum loses it. */
enum { ALIGNMENT = 256, PARAMETER_ALIGNMENT = 16, LOGIT_ROWS = 4096, LOGIT_ROWS_F32 = 512, MAX_ALLOCATIONS = 16 };

static const float NORM_EPS = 1e-6f, LAYERNORM_EPS = 1e-5f;

/* The device addresses of a micro-batch. */
typedef struct device_tokens {
    int32_t *tokens, *targets;
    embedding_plan plan;
    int32_t *counts; /* the plan's counts */
} device_tokens;

/* What `load` copies, on the host (page-locked) and on the device. */
typedef struct step_memory {
    char *begin;
    adamw_rates *rates;
    int32_t *offset;        /* [2] of dropout */
    device_tokens *batches; /* [micro_batches]; an array of the host in both */
} step_memory;

typedef struct cuda_backend {
    backend base;
    cuda_options options;
    void *stream;
    cublaslt *lt;
    void *allocations[MAX_ALLOCATIONS];
    int allocation_count;
    size_t bytes;
    bool counting; /* see backend_cuda_plan_begin */
    char *arena;
    size_t arena_used, arena_bytes;
    step_memory host, device;
    size_t step_bytes;
    int32_t *next; /* scratch memory of embedding_make_plan */
    float *rotations;
    double *loss, *norm, *partials;
    int64_t elements, decaying; /* the first `decaying` elements are matrices, with weight decay */
    int64_t *offsets;           /* of each parameter in the arrays below */
    char *values;
    float *gradients;
    /* Of the elements that this rank updates: its share of the matrices, then all others, whose masters the forward
     * reads. In f32 masters are the values. */
    element_range share;
    float *masters, *moments1, *moments2;
    cot_cuda_graph *graph;
    bool warm; /* the first step has run: every workspace exists */
    cot_status (*enqueue)(void *context);
} cuda_backend;

static cuda_backend *cuda_of(backend *b)
{
    return (cuda_backend *)b; /* base is the first member */
}

/* Keeps the first failure. */
static void check(backend *b, cot_status status)
{
    if (b->status == COT_OK)
        b->status = status;
}

/* ---- memory ------------------------------------------------------------------------------------------- */

static cot_status allocate_device(cuda_backend *c, size_t bytes, void *memory)
{
    void *made = NULL;
    char text[200];
    if (c->allocation_count == MAX_ALLOCATIONS)
        return cot_fail(COT_OUT_OF_MEMORY, "cuda: more than %d allocations", MAX_ALLOCATIONS);
    const cot_status status = cot_cuda_alloc(c->base.queue, bytes, &made);
    if (status == COT_OUT_OF_MEMORY) {
        snprintf(text, sizeof text,
                 "the GPU has no room for %.2f GB more, after %.2f GB: a smaller --batch with a larger --accumulate "
                 "needs less",
                 1e-9 * (double)bytes, 1e-9 * (double)c->bytes);
        return cot_error_set(status, text);
    }
    if (status != COT_OK)
        return status;
    c->allocations[c->allocation_count++] = made;
    c->bytes += bytes;
    memcpy(memory, &made, sizeof made);
    return COT_OK;
}

static void *allocate(backend *b, int64_t count, cot_dtype dtype)
{
    cuda_backend *c = cuda_of(b);
    const size_t bytes = (size_t)cot_round_up(cot_mul(count, (int64_t)cot_dtype_size(dtype)), ALIGNMENT);
    const size_t begin = c->arena_used;
    c->arena_used += bytes;
    if (c->counting)
        return (void *)(uintptr_t)(ALIGNMENT + begin);
    return c->arena_used <= c->arena_bytes ? c->arena + begin : NULL;
}

/* The arena is freed as a whole. */
static void release(backend *b, void *memory)
{
    (void)b;
    (void)memory;
}

void backend_cuda_plan_begin(backend *b)
{
    cuda_backend *c = cuda_of(b);
    c->counting = true;
    c->arena_used = 0;
}

cot_status backend_cuda_plan_end(backend *b)
{
    cuda_backend *c = cuda_of(b);
    c->arena_bytes = c->arena_used;
    c->arena_used = 0;
    c->counting = false;
    cot_status status = allocate_device(c, c->arena_bytes, &c->arena);
    return status != COT_OK ? status : cot_cuda_memset_async(b->queue, c->arena, 0, c->arena_bytes);
}

static void zero(backend *b, int64_t count, void *x)
{
    check(b, cot_cuda_memset_async(b->queue, x, 0, (size_t)count * cot_dtype_size(b->dtype)));
}

static void add(backend *b, int64_t count, const void *x, void *y)
{
    const add_call call = {.x = x, .y = y, .count = count};
    check(b, device_add(b->queue, b->dtype, &call));
}

/* ---- layers ------------------------------------------------------------------------------------------- */

static void forward_linear(backend *b, linear_shape shape, const void *x, const void *w, const void *bias,
                           const void *residual, void *y)
{
    const cublaslt_product product = {.m = shape.rows,
                                      .n = shape.out,
                                      .k = shape.in,
                                      .a = x,
                                      .b = w,
                                      .transpose_b = true,
                                      .c = residual,
                                      .bias = bias,
                                      .d = y,
                                      .in = b->dtype,
                                      .out = b->dtype};
    check(b, cublaslt_multiply(cuda_of(b)->lt, &product));
}

static void backward_linear(backend *b, linear_shape shape, const void *x, const void *w, const void *dy, void *dx,
                            void *dw)
{
    const cublaslt_product input = {.m = shape.rows,
                                    .n = shape.in,
                                    .k = shape.out,
                                    .a = dy,
                                    .b = w,
                                    .d = dx,
                                    .in = b->dtype,
                                    .out = b->dtype},
                           weight = {.m = shape.out,
                                     .n = shape.in,
                                     .k = shape.rows,
                                     .a = dy,
                                     .transpose_a = true,
                                     .b = x,
                                     .c = dw,
                                     .d = dw,
                                     .in = b->dtype,
                                     .out = b->wide};
    check(b, cublaslt_multiply(cuda_of(b)->lt, &weight));
    check(b, cublaslt_multiply(cuda_of(b)->lt, &input));
}

static void backward_bias(backend *b, int64_t rows, int64_t width, const void *dy, void *scratch, void *dbias)
{
    const column_sums_call call = {.x = dy, .partials = scratch, .sums = dbias, .rows = rows, .width = width};
    check(b, device_column_sums(b->queue, b->dtype, &call));
}

static void forward_embedding(backend *b, int64_t rows, int64_t width, const void *inputs, const void *table,
                              const void *table_of_positions, int64_t time, row_positions positions, void *y)
{
    const device_tokens *batch = inputs;
    const embedding_call call = {.tokens = batch->tokens,
                                 .table = table,
                                 .table_of_positions = table_of_positions,
                                 .y = y,
                                 .rows = rows,
                                 .width = width,
                                 .time = time,
                                 .positions = positions};
    check(b, device_embedding_forward(b->queue, b->dtype, &call));
}

static void backward_positions(backend *b, int64_t rows, int64_t time, row_positions positions, int64_t width,
                               int64_t length, const void *dy, void *dtable)
{
    (void)length;
    const positions_backward_call call = {
        .dy = dy, .dtable = dtable, .rows = rows, .width = width, .time = time, .positions = positions};
    check(b, device_positions_backward(b->queue, b->dtype, &call));
}

static void backward_embedding(backend *b, int64_t rows, int64_t width, int64_t vocabulary, const void *inputs,
                               const void *dy, void *scratch, void *dtable)
{
    const device_tokens *batch = inputs;
    const embedding_backward_call call = {.order = batch->plan.order,
                                          .pieces = batch->plan.pieces,
                                          .sums = batch->plan.sums,
                                          .counts = batch->counts,
                                          .dy = dy,
                                          .partials = scratch,
                                          .dtable = dtable,
                                          .rows = rows,
                                          .width = width,
                                          .vocabulary = vocabulary};
    check(b, device_embedding_backward(b->queue, b->dtype, &call));
}

static void forward_rmsnorm(backend *b, int64_t rows, int64_t width, const void *x, const void *gain, void *y,
                            void *inv_rms)
{
    const rmsnorm_call call = {
        .x = x, .gain = gain, .y = y, .inv_rms = inv_rms, .rows = rows, .width = width, .eps = NORM_EPS};
    check(b, device_rmsnorm_forward(b->queue, b->dtype, &call));
}

static void backward_rmsnorm(backend *b, int64_t rows, int64_t width, const void *x, const void *gain,
                             const void *inv_rms, const void *dy, void *scratch, void *dx, void *dgain)
{
    const rmsnorm_backward_call call = {.x = x,
                                        .gain = gain,
                                        .dy = dy,
                                        .inv_rms = inv_rms,
                                        .dx = dx,
                                        .partials = scratch,
                                        .dgain = dgain,
                                        .rows = rows,
                                        .width = width,
                                        .accumulate = 1};
    check(b, device_rmsnorm_backward(b->queue, b->dtype, &call));
}

static void forward_layernorm(backend *b, int64_t rows, int64_t width, const void *x, const void *gain,
                              const void *bias, void *y, void *mean, void *inv_deviation)
{
    const layernorm_call call = {.x = x,
                                 .gain = gain,
                                 .bias = bias,
                                 .y = y,
                                 .mean = mean,
                                 .inv_deviation = inv_deviation,
                                 .rows = rows,
                                 .width = width,
                                 .eps = LAYERNORM_EPS};
    check(b, device_layernorm_forward(b->queue, b->dtype, &call));
}

static void backward_layernorm(backend *b, int64_t rows, int64_t width, const void *x, const void *gain,
                               const void *mean, const void *inv_deviation, const void *dy, void *scratch, void *dx,
                               void *dgain, void *dbias)
{
    const layernorm_backward_call call = {.x = x,
                                          .gain = gain,
                                          .dy = dy,
                                          .mean = mean,
                                          .inv_deviation = inv_deviation,
                                          .dx = dx,
                                          .partials = scratch,
                                          .dgain = dgain,
                                          .dbias = dbias,
                                          .rows = rows,
                                          .width = width,
                                          .accumulate = 1};
    check(b, device_layernorm_backward(b->queue, b->dtype, &call));
}

static void rotate(backend *b, int64_t rows, int64_t time, row_positions positions, int64_t heads, int64_t size,
                   int64_t row_length, rope_direction direction, void *x)
{
    const cuda_backend *c = cuda_of(b);
    const rope_call call = {.x = x,
                            .rotations = c->rotations,
                            .rows = rows,
                            .time = time,
                            .positions = positions,
                            .heads = heads,
                            .size = size,
                            .row_length = row_length,
                            .backward = direction == ROPE_BACKWARD};
    const int64_t last = time > positions.split ? POSITION_OF(positions, positions.split - 1) : 0,
                  end = cot_max(last, POSITION_OF(positions, time - 1)) + 1;
    if (end > c->options.time || size != c->options.head_size)
        check(b,
              cot_fail(COT_INVALID_SHAPE, "rope: %lld positions of heads of size %lld, expected %lld of %lld",
                       (long long)end, (long long)size, (long long)c->options.time, (long long)c->options.head_size));
    else
        check(b, device_rope(b->queue, b->dtype, &call));
}

/* a = c, b = the second half of each row of mixed. */
static void forward_gate(backend *b, int64_t rows, int64_t inner, const void *c, const void *mixed, void *y)
{
    const gate_call call = {.a = c,
                            .b = backend_at(b, mixed, inner),
                            .y = y,
                            .rows = rows,
                            .inner = inner,
                            .a_stride = inner,
                            .b_stride = 2 * inner};
    check(b, device_gate_forward(b->queue, b->dtype, &call));
}

static void backward_gate(backend *b, int64_t rows, int64_t inner, const void *c, const void *mixed, void *dy,
                          void *dmixed)
{
    const gate_backward_call call = {.a = c,
                                     .b = backend_at(b, mixed, inner),
                                     .dy = dy,
                                     .da = dy,
                                     .db = backend_at(b, dmixed, inner),
                                     .rows = rows,
                                     .inner = inner,
                                     .a_stride = inner,
                                     .b_stride = 2 * inner,
                                     .da_stride = inner,
                                     .db_stride = 2 * inner};
    check(b, device_gate_backward(b->queue, b->dtype, &call));
}

static void forward_swiglu(backend *b, int64_t rows, int64_t inner, const void *mixed, void *y)
{
    const gate_call call = {.a = mixed,
                            .b = backend_at(b, mixed, inner),
                            .y = y,
                            .rows = rows,
                            .inner = inner,
                            .a_stride = 2 * inner,
                            .b_stride = 2 * inner,
                            .silu = 1};
    check(b, device_gate_forward(b->queue, b->dtype, &call));
}

static void backward_swiglu(backend *b, int64_t rows, int64_t inner, const void *mixed, const void *dy, void *dmixed)
{
    const gate_backward_call call = {.a = mixed,
                                     .b = backend_at(b, mixed, inner),
                                     .dy = dy,
                                     .da = dmixed,
                                     .db = backend_at(b, dmixed, inner),
                                     .rows = rows,
                                     .inner = inner,
                                     .a_stride = 2 * inner,
                                     .b_stride = 2 * inner,
                                     .da_stride = 2 * inner,
                                     .db_stride = 2 * inner,
                                     .silu = 1};
    check(b, device_gate_backward(b->queue, b->dtype, &call));
}

static void forward_gelu(backend *b, int64_t rows, int64_t inner, const void *x, void *y)
{
    const gelu_call call = {.x = x, .y = y, .count = rows * inner};
    check(b, device_gelu_forward(b->queue, b->dtype, &call));
}

static void backward_gelu(backend *b, int64_t rows, int64_t inner, const void *x, const void *dy, void *dx)
{
    const gelu_call call = {.x = x, .dy = dy, .y = dx, .count = rows * inner};
    check(b, device_gelu_backward(b->queue, b->dtype, &call));
}

static void spread(backend *b, int64_t rows, int64_t streams, int64_t width, const void *x, void *out)
{
    const streams_call call = {(void *)(uintptr_t)x, out, rows, streams, width};
    check(b, device_spread(b->queue, b->dtype, &call));
}

static void collect(backend *b, int64_t rows, int64_t streams, int64_t width, const void *in, void *x)
{
    const streams_call call = {x, (void *)(uintptr_t)in, rows, streams, width};
    check(b, device_collect(b->queue, b->dtype, &call));
}

static void add_cross_entropy(backend *b, int64_t first, int64_t rows, int64_t mean_rows, int64_t classes,
                              const void *targets, void *logits, void *row_loss, bool gradient)
{
    const cuda_backend *c = cuda_of(b);
    const double scale = 1 / (double)mean_rows;
    const cross_entropy_call call = {.logits = logits,
                                     .targets = (const int32_t *)targets + first,
                                     .row_loss = row_loss,
                                     .rows = rows,
                                     .classes = classes,
                                     .row_length = classes,
                                     .scale = (float)(scale * c->options.loss_scale),
                                     .gradient = gradient};
    const mean_loss_call mean = {.row_loss = row_loss, .loss = c->loss, .rows = rows, .scale = scale};
    check(b, device_cross_entropy(b->queue, b->dtype, &call));
    check(b, device_mean_loss(b->queue, &mean));
}

/* The embedding's partial sums, those of a norm, and those of a bias (SUM_BLOCKS is less). */
static int64_t scratch_bytes(const backend *b, int64_t rows, int64_t width)
{
    (void)b;
    return cot_max(embedding_max_partials(rows), 2 * NORM_BLOCKS) * width * (int64_t)sizeof(float);
}

/* ---- steps -------------------------------------------------------------------------------------------- */

static void load(backend *b, int64_t rows, int64_t micro_batches, const int32_t *inputs, const int32_t *targets,
                 token_batch *batches)
{
    cuda_backend *c = cuda_of(b);
    const adamw_options *adamw = &c->options.adamw;
    const uint64_t offset = (uint64_t)(b->step * c->options.step_batches * c->options.block_count);
    *c->host.rates = (adamw_rates){
        .rate = (float)(b->step_rate / (1 - pow(adamw->beta1, (double)b->step))),
        .correction2 = (float)(1 / (1 - pow(adamw->beta2, (double)b->step))),
        .decay = (float)(b->step_rate * adamw->weight_decay),
    };
    c->host.offset[0] = (int32_t)(uint32_t)offset;
    c->host.offset[1] = (int32_t)(uint32_t)(offset >> 32);
    for (int64_t i = 0; i < micro_batches; i++) {
        device_tokens *host = &c->host.batches[i];
        memcpy(host->tokens, inputs + i * rows, (size_t)rows * sizeof *inputs);
        memcpy(host->targets, targets + i * rows, (size_t)rows * sizeof *targets);
        embedding_make_plan(&host->plan, rows, c->options.vocabulary, host->tokens, c->next);
        memcpy(host->counts, host->plan.counts, sizeof host->plan.counts);
        batches[i] = (token_batch){&c->device.batches[i], c->device.batches[i].targets};
    }
    check(b, cot_cuda_copy_to_device_async(b->queue, c->device.begin, c->host.begin, c->step_bytes));
}

/* The first step is enqueued directly: the library's pool grows, and cuBLASLt chooses algorithms. The second step is
 * captured. Calls over a group of ranks cannot be captured. */
static cot_status run(backend *b, cot_status (*enqueue)(void *context), void *context)
{
    cuda_backend *c = cuda_of(b);
    double seconds;
    cot_status status = b->status;
    if (status == COT_OK && (!c->warm || b->context.group != NULL)) {
        c->warm = true;
        return enqueue(context);
    }
    if (status == COT_OK && c->graph == NULL)
        status = cot_cuda_graph_capture(b->queue, enqueue, context, &c->graph);
    return status != COT_OK ? status : cot_cuda_graph_replay(b->queue, c->graph, &seconds);
}

static void begin(backend *b)
{
    cuda_backend *c = cuda_of(b);
    check(b, cot_cuda_memset_async(b->queue, c->loss, 0, sizeof *c->loss));
    check(b, cot_cuda_memset_async(b->queue, c->gradients, 0, (size_t)c->elements * sizeof *c->gradients));
}

static bool is_sharded(const cuda_backend *c)
{
    return c->base.shards.size > 1;
}

/* The place of an element that this rank updates in masters (not f32), moments1 and moments2. Of c->elements: the size of
 * these arrays. */
static int64_t own_index(const cuda_backend *c, int64_t element)
{
    return element < c->decaying ? element - c->share.begin : element - c->decaying + c->share.end - c->share.begin;
}

/* Updates elements begin to end - 1, of which the first `decaying` decay. */
static void update_range(backend *b, int64_t begin, int64_t end, int64_t decaying)
{
    cuda_backend *c = cuda_of(b);
    const adamw_options *adamw = &c->options.adamw;
    const int64_t own = own_index(c, begin);
    const adamw_call call = {.value = backend_at(b, c->values, begin),
                             .master = b->dtype == COT_F32 ? NULL : c->masters + own,
                             .gradient = c->gradients + begin,
                             .moment1 = c->moments1 + own,
                             .moment2 = c->moments2 + own,
                             .norm = c->norm,
                             .rates = c->device.rates,
                             .count = end - begin,
                             .decaying = decaying,
                             .beta1 = (float)adamw->beta1,
                             .beta2 = (float)adamw->beta2,
                             .eps = (float)adamw->eps};
    if (begin < end)
        check(b, device_adamw(b->queue, b->dtype, &call));
}

/* Gets the matrices that other ranks have updated. */
static void gather_values(backend *b)
{
    cuda_backend *c = cuda_of(b);
    const size_t size = cot_dtype_size(b->dtype);
    check(b, cot_cuda_memset_async(b->queue, c->values, 0, (size_t)c->share.begin * size));
    check(b, cot_cuda_memset_async(b->queue, backend_at(b, c->values, c->share.end), 0,
                                   (size_t)(c->decaying - c->share.end) * size));
    check(b, optimizer_shards_gather(&b->shards, b->queue, b->dtype, c->values, c->decaying));
}

static void update(backend *b, parameter_table *table)
{
    (void)table;
    cuda_backend *c = cuda_of(b);
    const gradient_norm_call norm = {.gradients = c->gradients,
                                     .partials = c->partials,
                                     .norm = c->norm,
                                     .count = c->elements,
                                     .unscale = 1 / c->options.loss_scale,
                                     .clip = c->options.adamw.clip};
    check(b, device_gradient_norm(b->queue, &norm));
    if (!is_sharded(c)) {
        update_range(b, 0, c->elements, c->decaying);
        return;
    }
    update_range(b, c->share.begin, c->share.end, c->share.end - c->share.begin);
    update_range(b, c->decaying, c->elements, 0);
    gather_values(b);
}

cot_tensor backend_cuda_gradients(const backend *b)
{
    const cuda_backend *c = (const cuda_backend *)b;
    return cot_tensor_contiguous(c->gradients, COT_F32, 1, &c->elements);
}

static cot_status read_loss(backend *b, double *loss)
{
    check(b, cot_cuda_copy_to_host(b->queue, loss, cuda_of(b)->loss, sizeof *loss));
    check(b, cot_queue_check(b->queue));
    return b->status;
}

/* ---- parameters --------------------------------------------------------------------------------------- */

static int64_t padded(const parameter *p)
{
    return cot_round_up(p->count, PARAMETER_ALIGNMENT);
}

static cot_status allocate_parameters(cuda_backend *c)
{
    const size_t floats = (size_t)c->elements * sizeof(float), own = (size_t)own_index(c, c->elements) * sizeof(float);
    cot_status status = allocate_device(c, (size_t)c->elements * cot_dtype_size(c->base.dtype), &c->values);
    if (c->base.dtype == COT_F32)
        c->masters = (float *)c->values;
    else if (status == COT_OK)
        status = allocate_device(c, own, &c->masters);
    if (status == COT_OK)
        status = allocate_device(c, floats, &c->gradients);
    if (status == COT_OK)
        status = allocate_device(c, own, &c->moments1);
    if (status == COT_OK)
        status = allocate_device(c, own, &c->moments2);
    if (status == COT_OK)
        status = allocate_device(c, (size_t)gradient_norm_partial_count(c->elements) * sizeof(double), &c->partials);
    return status;
}

size_t backend_cuda_bytes(const backend *b, const parameter_table *table)
{
    const cuda_backend *c = (const cuda_backend *)b;
    const size_t size = cot_dtype_size(b->dtype);
    int64_t elements = 0, decaying = 0;
    for (int i = 0; i < table->count; i++) {
        elements += padded(&table->items[i]);
        decaying += table->items[i].decays ? padded(&table->items[i]) : 0;
    }
    const element_range share = optimizer_share(&b->shards, decaying);
    const int64_t own = share.end - share.begin + elements - decaying;
    /* value and gradient; then two moments and the master, which in f32 is the value */
    return c->bytes + c->arena_used + (size_t)elements * (size + 4) + (size_t)own * (size == 4 ? 8 : 12);
}

size_t backend_cuda_bytes_now(const backend *b)
{
    return ((const cuda_backend *)b)->bytes;
}

cot_status backend_cuda_bind(backend *b, parameter_table *table)
{
    cuda_backend *c = cuda_of(b);
    c->offsets = calloc((size_t)table->count, sizeof *c->offsets);
    if (c->offsets == NULL)
        return cot_error_set(COT_OUT_OF_MEMORY, "out of memory");
    for (int decays = 1; decays >= 0; decays--)
        for (int i = 0; i < table->count; i++)
            if (table->items[i].decays == decays) {
                c->offsets[i] = c->elements;
                c->elements += padded(&table->items[i]);
                c->decaying += decays ? padded(&table->items[i]) : 0;
            }
    c->share = optimizer_share(&b->shards, c->decaying);
    const cot_status status = allocate_parameters(c);
    for (int i = 0; status == COT_OK && i < table->count; i++) {
        parameter *p = &table->items[i];
        p->w = backend_at(b, c->values, c->offsets[i]);
        p->w_wide = b->dtype == COT_F32          ? p->w
                    : p->decays && is_sharded(c) ? NULL /* matrices are not read in f32 */
                                                 : c->masters + own_index(c, c->offsets[i]);
        p->dw = c->gradients + c->offsets[i];
    }
    if (status != COT_OK)
        return status;
    b->op->upload(b, table);
    return b->status;
}

/* Copies what this rank updates from an array of all elements in host memory. */
static void upload_own(backend *b, float *to, const float *from)
{
    cuda_backend *c = cuda_of(b);
    const int64_t share = c->share.end - c->share.begin, others = c->elements - c->decaying;
    check(b, cot_cuda_copy_to_device(b->queue, to, from + c->share.begin, (size_t)share * sizeof *to));
    check(b, cot_cuda_copy_to_device(b->queue, to + share, from + c->decaying, (size_t)others * sizeof *to));
}

static void upload(backend *b, parameter_table *table)
{
    cuda_backend *c = cuda_of(b);
    float *const masters = calloc((size_t)c->elements, sizeof *masters),
                 *const moments1 = calloc((size_t)c->elements, 4), *const moments2 = calloc((size_t)c->elements, 4);
    char *const values = calloc((size_t)c->elements, cot_dtype_size(b->dtype));
    if (masters == NULL || moments1 == NULL || moments2 == NULL || values == NULL)
        check(b, cot_error_set(COT_OUT_OF_MEMORY, "out of memory"));
    for (int i = 0; b->status == COT_OK && i < table->count; i++) {
        const parameter *p = &table->items[i];
        for (int64_t j = 0; j < p->count; j++) {
            const int64_t at = c->offsets[i] + j;
            masters[at] = (float)p->value[j];
            moments1[at] = (float)p->moment1[j];
            moments2[at] = (float)p->moment2[j];
            cot_store_f64(values, b->dtype, at, (double)p->value[j]);
        }
    }
    if (b->status == COT_OK) {
        check(b, cot_cuda_copy_to_device(b->queue, c->values, values, (size_t)c->elements * cot_dtype_size(b->dtype)));
        if (b->dtype != COT_F32)
            upload_own(b, c->masters, masters);
        upload_own(b, c->moments1, moments1);
        upload_own(b, c->moments2, moments2);
    }
    free(masters), free(moments1), free(moments2), free(values);
}

/* Copies an array of what the ranks update to one of all elements, in the memory of the gradients. */
static void gather_own(backend *b, const float *from)
{
    cuda_backend *c = cuda_of(b);
    const size_t share = (size_t)(c->share.end - c->share.begin), others = (size_t)(c->elements - c->decaying);
    check(b, cot_cuda_memset_async(b->queue, c->gradients, 0, (size_t)c->decaying * sizeof *from));
    check(b, cot_cuda_copy_on_device_async(b->queue, c->gradients + c->share.begin, from, share * sizeof *from));
    check(b, optimizer_shards_gather(&b->shards, b->queue, COT_F32, c->gradients, c->decaying));
    check(b, cot_cuda_copy_on_device_async(b->queue, c->gradients + c->decaying, from + share, others * sizeof *from));
}

static void download(backend *b, parameter_table *table)
{
    cuda_backend *c = cuda_of(b);
    const float *const device[] = {c->gradients, c->masters, c->moments1, c->moments2};
    float *host = malloc((size_t)c->elements * sizeof *host);
    if (host == NULL)
        check(b, cot_error_set(COT_OUT_OF_MEMORY, "out of memory"));
    for (int part = 0; b->status == COT_OK && part < 4; part++) {
        const bool whole = !is_sharded(c) || part == 0 || (part == 1 && b->dtype == COT_F32);
        if (!whole)
            gather_own(b, device[part]);
        check(b, cot_cuda_copy_to_host(b->queue, host, whole ? device[part] : c->gradients,
                                       (size_t)c->elements * sizeof *host));
        for (int i = 0; i < table->count; i++) {
            parameter *p = &table->items[i];
            real *const to[] = {p->gradient, p->value, p->moment1, p->moment2};
            for (int64_t j = 0; j < p->count; j++)
                to[part][j] = (real)host[c->offsets[i] + j];
        }
    }
    free(host);
}

/* ---- creation ----------------------------------------------------------------------------------------- */

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

/* Divides step memory at `begin`. With begin == NULL it only counts. Returns the end. */
static uintptr_t divide_step_memory(step_memory *m, const cuda_options *o, void *begin)
{
    uintptr_t at = (uintptr_t)begin;
#define TAKE(pointer, count) \
    ((pointer) = (void *)at, at += (size_t)cot_round_up((int64_t)((size_t)(count) * sizeof *(pointer)), ALIGNMENT))
    m->begin = begin;
    TAKE(m->rates, 1);
    TAKE(m->offset, 2);
    for (int64_t i = 0; i < o->micro_batches; i++) {
        device_tokens *t = &m->batches[i];
        TAKE(t->tokens, o->rows);
        TAKE(t->targets, o->rows);
        TAKE(t->plan.order, o->rows);
        TAKE(t->plan.pieces, embedding_max_pieces(o->rows, o->vocabulary));
        TAKE(t->plan.sums, embedding_max_sums(o->rows) + 1);
        TAKE(t->counts, 2);
    }
#undef TAKE
    return at;
}

static cot_status create_step_memory(cuda_backend *c)
{
    const cuda_options *o = &c->options;
    void *host = NULL, *device = NULL;
    c->host.batches = calloc((size_t)o->micro_batches, sizeof *c->host.batches);
    c->device.batches = calloc((size_t)o->micro_batches, sizeof *c->device.batches);
    c->next = calloc((size_t)o->vocabulary + 1, sizeof *c->next);
    if (c->host.batches == NULL || c->device.batches == NULL || c->next == NULL)
        return cot_error_set(COT_OUT_OF_MEMORY, "out of memory");
    c->step_bytes = (size_t)divide_step_memory(&c->host, o, NULL);
    cot_status status = cot_cuda_alloc_host(c->base.queue, c->step_bytes, &host);
    if (status == COT_OK)
        status = allocate_device(c, c->step_bytes, &device);
    divide_step_memory(&c->host, o, host);
    divide_step_memory(&c->device, o, device);
    if (status == COT_OK)
        memset(host, 0, c->step_bytes);
    return status;
}

/* rotations[t][j] = cosine and sine of t * 10000^(-2j/size). */
static cot_status create_rotations(cuda_backend *c)
{
    const int64_t time = c->options.time, half = c->options.head_size / 2;
    const size_t bytes = (size_t)(2 * time * half) * sizeof(float);
    float *host = malloc(bytes + 1);
    if (host == NULL)
        return cot_error_set(COT_OUT_OF_MEMORY, "out of memory");
    for (int64_t t = 0; t < time; t++)
        for (int64_t j = 0; j < half; j++) {
            const double angle = (double)t * pow(10000, -(double)j / (double)half);
            host[2 * (t * half + j)] = (float)cos(angle);
            host[2 * (t * half + j) + 1] = (float)sin(angle);
        }
    cot_status status = allocate_device(c, bytes, &c->rotations);
    if (status == COT_OK)
        status = cot_cuda_copy_to_device(c->base.queue, c->rotations, host, bytes);
    free(host);
    return status;
}

static cot_status open_queue(cuda_backend *c)
{
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    options.device = c->options.device;
    cot_status status = cot_queue_create(&options, &c->base.queue);
    if (status == COT_OK)
        status = device_layers_load(c->base.queue);
    if (status == COT_OK)
        status = cot_cuda_stream_create(c->base.queue, &c->stream); /* the default stream cannot be captured */
    return status != COT_OK ? status : cot_queue_set_stream(c->base.queue, c->stream);
}

cot_status backend_cuda_create(backend **out, const cuda_options *options)
{
    cuda_backend *c = calloc(1, sizeof *c);
    void *workspace = NULL;
    *out = NULL;
    if (c == NULL)
        return cot_error_set(COT_OUT_OF_MEMORY, "out of memory");
    c->options = *options;
    c->base = (backend){.op = &OPERATIONS,
                        .dtype = options->dtype,
                        .wide = COT_F32,
                        .logit_rows = options->dtype == COT_F32 ? LOGIT_ROWS_F32 : LOGIT_ROWS,
                        .always_accumulates = true,
                        .accumulate = true};
    cot_status status = open_queue(c);
    if (status == COT_OK)
        status = allocate_device(c, CUBLASLT_WORKSPACE, &workspace);
    if (status == COT_OK)
        status = cublaslt_open(c->base.queue, workspace, &c->lt);
    if (status == COT_OK)
        status = create_step_memory(c);
    if (status == COT_OK)
        status = create_rotations(c);
    if (status == COT_OK)
        status = allocate_device(c, sizeof *c->loss, &c->loss);
    if (status == COT_OK)
        status = allocate_device(c, 2 * sizeof *c->norm, &c->norm);
    if (status != COT_OK) {
        backend_cuda_destroy(&c->base);
        return status;
    }
    c->base.step_offset = cot_tensor_contiguous(c->device.offset, COT_I32, 1, (int64_t[]){2});
    *out = &c->base;
    return COT_OK;
}

void backend_cuda_destroy(backend *b)
{
    cuda_backend *c = cuda_of(b);
    if (c == NULL)
        return;
    cublaslt_close(c->lt);
    if (b->queue != NULL) {
        cot_queue_check(b->queue); /* waits */
        cot_cuda_graph_destroy(b->queue, c->graph);
        for (int i = 0; i < c->allocation_count; i++)
            cot_cuda_free(b->queue, c->allocations[i]);
        cot_cuda_free_host(b->queue, c->host.begin);
        if (c->stream != NULL) {
            cot_queue_set_stream(b->queue, NULL);
            cot_cuda_stream_destroy(b->queue, c->stream);
        }
        cot_queue_destroy(b->queue);
    }
    free(c->host.batches);
    free(c->device.batches);
    free(c->next);
    free(c->offsets);
    free(c);
}

void backend_cuda_describe(backend *b, char *name, size_t size, size_t *free_bytes, size_t *total_bytes)
{
    size_t cache;
    cot_device *d = b->queue->device;
    *free_bytes = *total_bytes = 0;
    if (cot_cuda_describe(b->queue, name, size, &cache) != COT_OK)
        snprintf(name, size, "unknown GPU");
    if (cot_cuda_enter(d) == COT_OK) {
        d->driver.cuMemGetInfo(free_bytes, total_bytes);
        cot_cuda_leave(d);
    }
}
