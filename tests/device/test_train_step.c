/* SPDX-License-Identifier: Apache-2.0
 *
 * test_train_step.c: steps of the trainer on the GPU against the same steps on the CPU: the loss, the gradient of every
 * parameter, and the parameters after the update. Several architectures, in each dtype. Exit status 77, "skipped",
 * without a GPU or without cuBLASLt. */
#include "device_queue.h"
#include "support.h"

#include "../../examples/train_lm/cuda/backend_cuda.h"
#include "../../examples/train_lm/model.h"
#include "../../examples/train_lm/random.h"

#include "cuda/device.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    BATCH = 2,
    TIME = 16,
    MICRO_BATCHES = 2,
    ROWS = BATCH * TIME,
    BYTES = MICRO_BATCHES * ROWS,
    STEPS = 3,
    CHUNK = 24
};

static const double RATE = 1e-3;
static const adamw_options ADAMW = {.beta1 = 0.9, .beta2 = 0.98, .eps = 1e-8, .weight_decay = 0.1, .clip = 1};

/* A model with its memory on one backend. */
typedef struct side {
    model model;
    model_pass pass;
    backend *b;
    token_batch batches[MICRO_BATCHES];
    double dropout;
    bool recompute;
    size_t bytes; /* backend_cuda_bytes */
} side;

static cot_status enqueue_step(void *context)
{
    side *s = context;
    const int64_t first = s->b->step_offset.data != NULL ? 0 : s->b->step * MICRO_BATCHES;
    cot_status status = COT_OK;
    s->b->op->begin(s->b);
    for (int64_t i = 0; i < MICRO_BATCHES && status == COT_OK; i++) {
        s->b->accumulate = s->b->always_accumulates || i > 0;
        s->pass.dropout = (model_dropout){.p = s->dropout, .seed = 5, .step = (uint64_t)(first + i)};
        status = model_forward(&s->model, &s->pass, BATCH, TIME, s->batches[i].inputs);
        if (status == COT_OK)
            status =
                model_backward(&s->model, &s->pass, BATCH, TIME, BYTES, s->batches[i].inputs, s->batches[i].targets);
    }
    if (status == COT_OK)
        s->b->op->update(s->b, &s->model.parameters);
    return status != COT_OK ? status : s->b->status;
}

static double run_step(side *s, int64_t step, const int32_t *inputs, const int32_t *targets)
{
    double loss = NAN;
    s->b->step = step;
    s->b->step_rate = RATE;
    s->b->op->load(s->b, ROWS, MICRO_BATCHES, inputs, targets, s->batches);
    assert_ok(s->b->op->run(s->b, enqueue_step, s));
    assert_ok(s->b->op->read_loss(s->b, &loss));
    s->b->op->download(s->b, &s->model.parameters);
    return loss;
}

static void create_model(side *s, model_config config)
{
    assert_true(model_create(&s->model, config, 3));
    for (int i = 0; i < s->model.parameters.count; i++) { /* no gradient vanishes; the ranges are those of training */
        parameter *p = &s->model.parameters.items[i];
        if (p == s->model.head)
            parameter_randomise(p, 5, 0.1);
    }
}

/* A backend for `rows` rows a micro-batch. logit_rows: 0: the backend's own. */
static void create_cuda(side *s, model_config config, cot_dtype dtype, double loss_scale, int64_t rows,
                        int64_t micro_batches, int64_t logit_rows)
{
    create_model(s, config);
    const cuda_options options = {.dtype = dtype,
                                  .rows = rows,
                                  .micro_batches = micro_batches,
                                  .step_batches = micro_batches,
                                  .time = TIME,
                                  .head_size = config.inner / model_heads(&s->model),
                                  .vocabulary = config.vocabulary,
                                  .width = config.width,
                                  .block_count = s->model.block_count,
                                  .loss_scale = loss_scale,
                                  .adamw = ADAMW};
    assert_ok(backend_cuda_create(&s->b, &options));
    if (logit_rows > 0)
        s->b->logit_rows = logit_rows;
    s->b->recompute = s->recompute;
    backend_cuda_plan_begin(s->b);
    assert_true(model_pass_create(&s->pass, &s->model, s->b, rows, true));
    model_pass_destroy(&s->pass);
    s->bytes = backend_cuda_bytes(s->b, &s->model.parameters);
    assert_true(s->bytes > 0);
    assert_ok(backend_cuda_plan_end(s->b));
    assert_ok(backend_cuda_bind(s->b, &s->model.parameters));
    assert_true(fabs((double)backend_cuda_bytes_now(s->b) - (double)s->bytes) <= 0.05 * (double)s->bytes);
    assert_true(model_pass_create(&s->pass, &s->model, s->b, rows, true));
}

static void destroy_side(side *s)
{
    model_pass_destroy(&s->pass);
    model_destroy(&s->model);
}

/* The norm of a - b / scale, divided by the norm of b / scale. */
static double relative_error(const real *a, const real *b, double scale, int64_t count)
{
    double difference = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        const double exact = (double)a[i], got = (double)b[i] / scale;
        difference += (got - exact) * (got - exact);
        size += exact * exact;
    }
    return size > 0 ? sqrt(difference / size) : difference > 0 ? INFINITY : 0;
}

/* The root mean square of the differences of all values, divided by the learning rate: AdamW moves an element by about the
 * rate per step, whatever the size of its gradient. */
static double drift(const parameter_table *a, const parameter_table *b)
{
    double sum = 0;
    for (int64_t i = 0; i < a->elements; i++)
        sum += ((double)a->values[i] - (double)b->values[i]) * ((double)a->values[i] - (double)b->values[i]);
    return sqrt(sum / (double)a->elements) / RATE;
}

static void fill_tokens(int32_t inputs[BYTES], int32_t targets[BYTES])
{
    random_stream stream = random_start(11, 1);
    for (int i = 0; i < BYTES; i++) {
        inputs[i] =
            (int32_t)(random_below(&stream, 4) == 0 ? 7 : random_below(&stream, 64)); /* one token is frequent */
        targets[i] = (int32_t)random_below(&stream, 64);
    }
}

static void check_steps(model_config config, cot_dtype dtype, double dropout)
{
    /* The unit roundoff of the dtype, times the depth of the sums of rounded values that lead to a gradient. */
    const double tolerance = dtype == COT_F32 ? 2e-5 : dtype == COT_F16 ? 2e-2 : 1e-1;
    const double largest_drift = dtype == COT_F32 ? 0.05 : 0.5; /* rounding changes the sign of small gradients */
    const double loss_scale = dtype == COT_F16 ? 64 : 1;
    backend cpu_backend;
    cot_queue *cpu_queue;
    int32_t inputs[BYTES], targets[BYTES];
    side cpu = {.dropout = dropout}, gpu = {.dropout = dropout};
    fill_tokens(inputs, targets);
    assert_ok(cot_queue_create(NULL, &cpu_queue));
    backend_cpu_create(&cpu_backend, cpu_queue);
    cpu_backend.adamw = ADAMW;
    cpu.b = &cpu_backend;
    create_model(&cpu, config);
    assert_true(model_pass_create(&cpu.pass, &cpu.model, cpu.b, ROWS, true));
    create_cuda(&gpu, config, dtype, loss_scale, ROWS, MICRO_BATCHES, CHUNK);
    for (int64_t step = 1; step <= STEPS; step++) { /* the second step is captured, the third is replayed */
        const double expected = run_step(&cpu, step, inputs, targets), loss = run_step(&gpu, step, inputs, targets);
        if (!(fabs(loss - expected) <= tolerance * expected / 10))
            fail_msg("step %d in %s: the loss is %.9g, expected %.9g", (int)step, cot_dtype_name(dtype), loss,
                     expected);
        for (int i = 0; i < cpu.model.parameters.count; i++) {
            const parameter *a = &cpu.model.parameters.items[i], *b = &gpu.model.parameters.items[i];
            const double error = relative_error(a->gradient, b->gradient, loss_scale, a->count);
            if (!(error <= tolerance * (double)step))
                fail_msg("step %d in %s: the gradient of %s has an error of %g", (int)step, cot_dtype_name(dtype),
                         a->name, error);
        }
        const double drifted = drift(&cpu.model.parameters, &gpu.model.parameters);
        if (!(drifted <= largest_drift * (double)step))
            fail_msg("step %d in %s: the parameters differ by %g rates", (int)step, cot_dtype_name(dtype), drifted);
    }
    destroy_side(&cpu);
    destroy_side(&gpu);
    backend_cuda_destroy(gpu.b);
    backend_cpu_destroy(&cpu_backend);
    cot_queue_destroy(cpu_queue);
}

static const model_config SMALL = {
    .vocabulary = 64, .width = 32, .inner = 64, .layers = 2, .kernel = 4, .context = TIME};

static const cot_dtype DTYPES[] = {COT_F32, COT_F16, COT_BF16};

/* Convolution, attention with grouped heads, dropout. */
static void hybrid_steps_match_the_cpu(void **state)
{
    (void)state;
    model_config config = SMALL;
    config.attention = 2;
    for (size_t i = 0; i < COUNT(DTYPES); i++)
        check_steps(config, DTYPES[i], 0.2);
}

static model_config gpt2_config(void)
{
    model_config config = SMALL;
    config.gpt2 = true;
    config.attention = 1;
    config.layers = 2;
    config.inner = config.width;
    config.heads = config.kv_heads = 2;
    config.mlp = 4 * config.width;
    return config;
}

/* GPT-2. The head reads the embedding, so that the ranges of both are those of training. */
static void gpt2_steps_match_the_cpu(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(DTYPES); i++)
        check_steps(gpt2_config(), DTYPES[i], i == 0 ? 0.2 : 0);
}

/* Attention and MLPs, as in Llama. */
static void transformer_steps_match_the_cpu(void **state)
{
    (void)state;
    model_config config = SMALL;
    config.attention = 1;
    config.layers = 1;
    config.inner = 32;
    config.heads = config.kv_heads = 2;
    config.mlp = 88;
    for (size_t i = 0; i < COUNT(DTYPES); i++)
        check_steps(config, DTYPES[i], 0);
}

/* Streams and the dense convolution. */
static void connected_steps_match_the_cpu(void **state)
{
    (void)state;
    model_config config = SMALL;
    config.streams = 2;
    config.dense = 4;
    check_steps(config, COT_F32, 0.1);
    check_steps(config, COT_BF16, 0.1);
}

/* ---- recomputation -------------------------------------------------------------------------------------- */

/* With `recompute`, a model needs less memory, and the losses and parameters of all steps have the same bits. */
static void check_recompute(model_config config, cot_dtype dtype)
{
    int32_t inputs[BYTES], targets[BYTES];
    side plain = {.dropout = 0.2}, less = {.dropout = 0.2, .recompute = true};
    fill_tokens(inputs, targets);
    create_cuda(&plain, config, dtype, 1, ROWS, MICRO_BATCHES, CHUNK);
    create_cuda(&less, config, dtype, 1, ROWS, MICRO_BATCHES, CHUNK);
    assert_true(less.bytes < plain.bytes);
    const parameter_table *expected = &plain.model.parameters, *table = &less.model.parameters;
    for (int64_t step = 1; step <= STEPS; step++) {
        assert_true(run_step(&plain, step, inputs, targets) == run_step(&less, step, inputs, targets));
        assert_memory_equal(expected->gradients, table->gradients, (size_t)table->elements * sizeof(real));
        assert_memory_equal(expected->values, table->values, (size_t)table->elements * sizeof(real));
    }
    destroy_side(&plain);
    destroy_side(&less);
    backend_cuda_destroy(plain.b);
    backend_cuda_destroy(less.b);
}

static void recomputed_steps_have_the_same_bits(void **state)
{
    (void)state;
    model_config config = SMALL;
    config.layers = 3;
    config.attention = 2;
    check_recompute(config, COT_BF16);
    config.streams = 2;
    config.mlp = 40;
    check_recompute(config, COT_F32);
    check_recompute(gpt2_config(), COT_BF16);
}

/* ---- long sums ------------------------------------------------------------------------------------------ */

enum { LONG_BATCH = 256, LONG_ROWS = LONG_BATCH * TIME, FREQUENT = 7 };

static cot_status enqueue_long(void *context)
{
    side *s = context;
    s->b->op->begin(s->b);
    s->b->accumulate = true;
    cot_status status = model_forward(&s->model, &s->pass, LONG_BATCH, TIME, s->batches[0].inputs);
    if (status == COT_OK)
        status = model_backward(&s->model, &s->pass, LONG_BATCH, TIME, LONG_ROWS, s->batches[0].inputs,
                                s->batches[0].targets);
    return status != COT_OK ? status : s->b->status;
}

/* The gradient of the head in double, from the head's input. */
static void exact_head_gradient(const side *s, const float *normed, const int32_t *targets, double *gradient)
{
    const int64_t width = s->model.config.width, classes = s->model.config.vocabulary;
    const real *head = s->model.head->value;
    double p[64];
    assert_true(classes <= (int64_t)COUNT(p));
    for (int64_t r = 0; r < LONG_ROWS; r++) {
        double sum = 0;
        for (int64_t v = 0; v < classes; v++) {
            double logit = 0;
            for (int64_t c = 0; c < width; c++)
                logit += (double)head[v * width + c] * (double)normed[r * width + c];
            sum += p[v] = exp(logit);
        }
        for (int64_t v = 0; v < classes; v++)
            for (int64_t c = 0; c < width; c++)
                gradient[v * width + c] += (p[v] / sum - (v == targets[r])) / LONG_ROWS * (double)normed[r * width + c];
    }
}

/* Where one token is often the target, a float32 sum of all rows has an error that grows with their number. */
static void head_gradient_of_many_rows(void **state)
{
    (void)state;
    static int32_t inputs[LONG_ROWS], targets[LONG_ROWS];
    const model_config config = {.vocabulary = 64, .width = 16, .inner = 16, .layers = 1, .kernel = 4, .context = TIME};
    side gpu = {0};
    double loss = NAN, difference = 0, size = 0;
    random_stream stream = random_start(12, 1);
    for (int i = 0; i < LONG_ROWS; i++) {
        inputs[i] = (int32_t)(random_below(&stream, 4) > 0 ? FREQUENT : random_below(&stream, 64));
        targets[i] = (int32_t)(random_below(&stream, 4) > 0 ? FREQUENT : random_below(&stream, 64));
    }
    create_cuda(&gpu, config, COT_F32, 1, LONG_ROWS, 1, 0);
    const int64_t count = gpu.model.head->count;
    gpu.b->step = 1;
    gpu.b->op->load(gpu.b, LONG_ROWS, 1, inputs, targets, gpu.batches);
    assert_ok(gpu.b->op->run(gpu.b, enqueue_long, &gpu));
    assert_ok(gpu.b->op->read_loss(gpu.b, &loss));
    gpu.b->op->download(gpu.b, &gpu.model.parameters);
    float *normed = malloc((size_t)(LONG_ROWS * config.width) * sizeof *normed);
    double *exact = calloc((size_t)count, sizeof *exact);
    assert_true(normed != NULL && exact != NULL);
    assert_ok(cot_cuda_copy_to_host(gpu.b->queue, normed, gpu.pass.normed,
                                    (size_t)(LONG_ROWS * config.width) * sizeof *normed));
    exact_head_gradient(&gpu, normed, targets, exact);
    for (int64_t i = 0; i < count; i++) {
        const double error = (double)gpu.model.head->gradient[i] - exact[i];
        difference += error * error;
        size += exact[i] * exact[i];
    }
    if (!(sqrt(difference / size) <= 2e-6)) /* 8.4e-6 in one sum of all rows */
        fail_msg("the head's gradient of %d rows has an error of %g", LONG_ROWS, sqrt(difference / size));
    free(normed);
    free(exact);
    destroy_side(&gpu);
    backend_cuda_destroy(gpu.b);
}

int main(void)
{
    cot_queue *queue;
    backend *b;
    const int none = open_device_queue(&queue);
    if (none != 0)
        return none;
    cot_queue_destroy(queue);
    matrix_use_one_thread_per_call();
    const cuda_options smallest = {.dtype = COT_F32, .rows = 1, .micro_batches = 1, .vocabulary = 1, .loss_scale = 1};
    if (backend_cuda_create(&b, &smallest) != COT_OK) {
        printf("skipped: %s\n", cot_error_message());
        return SKIPPED;
    }
    backend_cuda_destroy(b);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hybrid_steps_match_the_cpu),
        cmocka_unit_test(transformer_steps_match_the_cpu),
        cmocka_unit_test(gpt2_steps_match_the_cpu),
        cmocka_unit_test(connected_steps_match_the_cpu),
        cmocka_unit_test(recomputed_steps_have_the_same_bits),
        cmocka_unit_test(head_gradient_of_many_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
