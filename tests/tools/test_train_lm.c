/* SPDX-License-Identifier: Apache-2.0
 *
 * test_train_lm.c: tests the trainer of examples/train_lm, compiled in double. Compares the backward of each layer and
 * of the model with central differences of the forward. Compares decoding with the forward. Checks that the result has
 * the same bits for every thread count. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../../examples/train_lm/backend.h"
#include "../../examples/train_lm/bigram.h"
#include "../../examples/train_lm/data.h"
#include "../../examples/train_lm/layers.h"
#include "../../examples/train_lm/matrix.h"
#include "../../examples/train_lm/model.h"
#include "../../examples/train_lm/optimizer.h"
#include "../../examples/train_lm/plot.h"
#include "../../examples/train_lm/random.h"
#include "../../examples/train_lm/sample.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* The error of a central difference with this step is about 1e-10, for a loss of about 1. */
static const double DIFFERENCE_STEP = 1e-5, RELATIVE_TOLERANCE = 1e-6, ABSOLUTE_TOLERANCE = 1e-9;

/* ---- helpers ------------------------------------------------------------------------------------------ */

static real *random_values(int64_t count, uint64_t name)
{
    real *values = real_allocate(count);
    assert_non_null(values);
    random_stream stream = random_start(7, name);
    for (int64_t i = 0; i < count; i++)
        values[i] = (real)(2 * random_unit(&stream) - 1);
    return values;
}

static void fill_tokens(int32_t *tokens, int64_t count, int vocabulary, uint64_t name)
{
    random_stream stream = random_start(11, name);
    for (int64_t i = 0; i < count; i++)
        tokens[i] = (int32_t)random_below(&stream, vocabulary);
}

static double dot(const real *a, const real *b, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* Compares a gradient with central differences of loss(context), which reads `values`. */
static void check_gradient(const char *name, double (*loss)(void *), void *context, real *values, const real *gradient,
                           int64_t count)
{
    double largest = 0;
    for (int64_t i = 0; i < count; i++)
        largest = fmax(largest, fabs((double)gradient[i]));
    for (int64_t i = 0; i < count; i++) {
        const real before = values[i];
        values[i] = (real)((double)before + DIFFERENCE_STEP);
        const double above = loss(context);
        values[i] = (real)((double)before - DIFFERENCE_STEP);
        const double below = loss(context);
        values[i] = before;
        const double difference = (above - below) / (2 * DIFFERENCE_STEP);
        const double error = fabs(difference - (double)gradient[i]);
        if (!(error <= RELATIVE_TOLERANCE * largest + ABSOLUTE_TOLERANCE))
            fail_msg("%s[%lld]: gradient %.12g, central difference %.12g", name, (long long)i, (double)gradient[i],
                     difference);
    }
}

static cot_queue *make_queue(int threads)
{
    cot_queue *queue;
    cot_queue_options options;
    COT_INIT(&options);
    options.threads = threads;
    assert_int_equal(cot_queue_create(&options, &queue), COT_OK);
    return queue;
}

/* ---- linear ------------------------------------------------------------------------------------------- */

typedef struct linear_case {
    linear_shape shape;
    real *x, *w, *y, *dy;
} linear_case;

static double linear_loss(void *context)
{
    const linear_case *c = context;
    linear_forward(c->shape, c->x, c->w, c->y, MATRIX_SET);
    return dot(c->y, c->dy, c->shape.rows * c->shape.out);
}

static void test_linear(void **state)
{
    (void)state;
    linear_case c = {.shape = {.rows = 7, .in = 5, .out = 11}};
    c.x = random_values(7 * 5, 1);
    c.w = random_values(11 * 5, 2);
    c.dy = random_values(7 * 11, 3);
    c.y = real_allocate(7 * 11);
    real *dx = random_values(7 * 5, 4), *dw = random_values(11 * 5, 5); /* to be overwritten */
    linear_backward(c.shape, c.x, c.w, c.dy, dx, dw, MATRIX_SET);
    check_gradient("linear dx", linear_loss, &c, c.x, dx, 7 * 5);
    check_gradient("linear dw", linear_loss, &c, c.w, dw, 11 * 5);
    free(c.x), free(c.w), free(c.y), free(c.dy), free(dx), free(dw);
}

/* Sizes larger than one tile and no multiple of it, compared with plain loops. MATRIX_ADD accumulates. */
static void test_linear_tiles(void **state)
{
    (void)state;
    const linear_shape shape = {.rows = 517, .in = 13, .out = 1031};
    real *x = random_values(shape.rows * shape.in, 1), *w = random_values(shape.out * shape.in, 2);
    real *y = random_values(shape.rows * shape.out, 3), *before = random_values(shape.rows * shape.out, 3);
    linear_forward(shape, x, w, y, MATRIX_ADD);
    for (int64_t r = 0; r < shape.rows; r++)
        for (int64_t o = 0; o < shape.out; o++) {
            const double expected =
                (double)before[r * shape.out + o] + dot(x + r * shape.in, w + o * shape.in, shape.in);
            assert_true(fabs(y[r * shape.out + o] - expected) <= 1e-12);
        }
    free(x), free(w), free(y), free(before);
}

/* ---- RMSNorm ------------------------------------------------------------------------------------------ */

typedef struct norm_case {
    int64_t rows, width;
    real *x, *gain, *y, *inv_rms, *dy;
} norm_case;

static double norm_loss(void *context)
{
    const norm_case *c = context;
    rmsnorm_forward(c->rows, c->width, c->x, c->gain, c->y, c->inv_rms);
    return dot(c->y, c->dy, c->rows * c->width);
}

static void test_rmsnorm(void **state)
{
    (void)state;
    norm_case c = {.rows = 131, .width = 9}; /* more rows than one block of partial sums; the last block is partial */
    const int64_t count = c.rows * c.width;
    c.x = random_values(count, 1);
    c.gain = random_values(c.width, 2);
    c.dy = random_values(count, 3);
    c.y = real_allocate(count);
    c.inv_rms = real_allocate(c.rows);
    real *dx = random_values(count, 4), *before = random_values(count, 4), *dgain = random_values(c.width, 5);
    real *partial = random_values(rmsnorm_partial_count(c.rows, c.width), 6);
    norm_loss(&c);
    rmsnorm_backward(c.rows, c.width, c.x, c.gain, c.inv_rms, c.dy, partial, dx, dgain, MATRIX_SET);
    for (int64_t i = 0; i < count; i++)
        dx[i] -= before[i]; /* dx is accumulated */
    check_gradient("rmsnorm dx", norm_loss, &c, c.x, dx, count);
    check_gradient("rmsnorm dgain", norm_loss, &c, c.gain, dgain, c.width);
    free(c.x), free(c.gain), free(c.y), free(c.inv_rms), free(c.dy);
    free(dx), free(before), free(dgain), free(partial);
}

/* ---- LayerNorm, biases, positions --------------------------------------------------------------------- */

typedef struct layernorm_case {
    int64_t rows, width;
    real *x, *gain, *bias, *y, *mean, *inv_deviation, *dy;
} layernorm_case;

static double layernorm_loss(void *context)
{
    const layernorm_case *c = context;
    layernorm_forward(c->rows, c->width, c->x, c->gain, c->bias, c->y, c->mean, c->inv_deviation);
    return dot(c->y, c->dy, c->rows * c->width);
}

static void test_layernorm(void **state)
{
    (void)state;
    layernorm_case c = {.rows = 131, .width = 9};
    const int64_t count = c.rows * c.width;
    c.x = random_values(count, 1);
    c.gain = random_values(c.width, 2);
    c.bias = random_values(c.width, 3);
    c.dy = random_values(count, 4);
    c.y = real_allocate(count);
    c.mean = real_allocate(c.rows);
    c.inv_deviation = real_allocate(c.rows);
    for (int64_t i = 0; i < count; i++)
        c.x[i] += 3; /* a mean */
    real *dx = random_values(count, 5), *before = random_values(count, 5), *dgain = random_values(c.width, 6),
         *dbias = random_values(c.width, 7), *sums = random_values(c.width, 8);
    real *partial = random_values(2 * rmsnorm_partial_count(c.rows, c.width), 9);
    layernorm_loss(&c);
    layernorm_backward(c.rows, c.width, c.x, c.gain, c.mean, c.inv_deviation, c.dy, partial, dx, dgain, dbias,
                       MATRIX_SET);
    for (int64_t i = 0; i < count; i++)
        dx[i] -= before[i]; /* dx is accumulated */
    check_gradient("layernorm dx", layernorm_loss, &c, c.x, dx, count);
    check_gradient("layernorm dgain", layernorm_loss, &c, c.gain, dgain, c.width);
    check_gradient("layernorm dbias", layernorm_loss, &c, c.bias, dbias, c.width);
    column_sums(c.rows, c.width, c.dy, partial, sums, MATRIX_SET);
    for (int64_t i = 0; i < c.width; i++)
        assert_true(fabs(sums[i] - dbias[i]) <= 1e-13);
    column_sums(c.rows, c.width, c.dy, partial, sums, MATRIX_ADD);
    for (int64_t i = 0; i < c.width; i++)
        assert_true(fabs(sums[i] - 2 * dbias[i]) <= 1e-13);
    free(c.x), free(c.gain), free(c.bias), free(c.y), free(c.mean), free(c.inv_deviation), free(c.dy);
    free(dx), free(before), free(dgain), free(dbias), free(sums), free(partial);
}

/* Against plain loops, for the rows of two pieces of a sequence. MATRIX_SET makes the other rows of the gradient 0. */
static void test_positions(void **state)
{
    (void)state;
    enum { ROWS = 6, PLACES = 3, WIDTH = 5, TABLE = 8 };
    const row_positions pieces = {.first = 2, .split = 1, .second = 6}; /* tokens 2, 6 and 7 */
    real *table = random_values(TABLE * WIDTH, 1), *x = random_values(ROWS * WIDTH, 2),
         *before = random_values(ROWS * WIDTH, 2), *dtable = random_values(TABLE * WIDTH, 3);
    positions_forward(ROWS, PLACES, pieces, WIDTH, table, x);
    for (int64_t i = 0; i < ROWS * WIDTH; i++)
        assert_true(x[i] == before[i] + table[POSITION_OF(pieces, i / WIDTH % PLACES) * WIDTH + i % WIDTH]);
    for (int times = 1; times <= 2; times++) {
        positions_backward(ROWS, PLACES, pieces, WIDTH, TABLE, x, dtable, times == 1 ? MATRIX_SET : MATRIX_ADD);
        for (int64_t i = 0; i < TABLE * WIDTH; i++) {
            const int64_t token = i / WIDTH, row = token == 2 ? 0 : token - 5;
            const real *rows = x + row * WIDTH + i % WIDTH;
            const double sum = token == 2 || token >= 6 ? times * (rows[0] + rows[PLACES * WIDTH]) : 0;
            assert_true(fabs(dtable[i] - sum) <= 1e-14);
        }
    }
    free(table), free(x), free(before), free(dtable);
}

typedef struct gelu_case {
    real *x, *y, *dy;
} gelu_case;

enum { GELU_COUNT = 40 };

static double gelu_loss(void *context)
{
    const gelu_case *c = context;
    gelu_forward(GELU_COUNT, c->x, c->y);
    return dot(c->y, c->dy, GELU_COUNT);
}

static void test_gelu(void **state)
{
    (void)state;
    gelu_case c = {random_values(GELU_COUNT, 1), real_allocate(GELU_COUNT), random_values(GELU_COUNT, 2)};
    real *dx = random_values(GELU_COUNT, 3);
    for (int i = 0; i < GELU_COUNT; i++)
        c.x[i] *= 4;
    gelu_loss(&c);
    for (int i = 0; i < GELU_COUNT; i++) /* GPT-2's form */
        assert_true(fabs(c.y[i] - 0.5 * c.x[i] *
                                      (1 + tanh(0.79788456080286536 * (c.x[i] + 0.044715 * pow(c.x[i], 3))))) <= 1e-14);
    gelu_backward(GELU_COUNT, c.x, c.dy, dx);
    check_gradient("gelu dx", gelu_loss, &c, c.x, dx, GELU_COUNT);
    free(c.x), free(c.y), free(c.dy), free(dx);
}

/* ---- embedding ---------------------------------------------------------------------------------------- */

typedef struct embedding_case {
    int64_t rows, width;
    int32_t tokens[40];
    real *table, *y, *dy;
} embedding_case;

static double embedding_loss(void *context)
{
    const embedding_case *c = context;
    embedding_forward(c->rows, c->width, c->tokens, c->table, c->y);
    return dot(c->y, c->dy, c->rows * c->width);
}

static void test_embedding(void **state)
{
    (void)state;
    enum { VOCABULARY = 13 };
    embedding_case c = {.rows = 40, .width = 6};
    fill_tokens(c.tokens, c.rows, VOCABULARY - 1, 1); /* the last token never occurs: its gradient is 0 */
    c.table = random_values(VOCABULARY * c.width, 2);
    c.dy = random_values(c.rows * c.width, 3);
    c.y = real_allocate(c.rows * c.width);
    real *dtable = random_values(VOCABULARY * c.width, 4);
    int64_t order[40];
    embedding_backward(c.rows, c.width, VOCABULARY, c.tokens, c.dy, order, dtable, MATRIX_SET);
    check_gradient("embedding", embedding_loss, &c, c.table, dtable, VOCABULARY * c.width);
    free(c.table), free(c.y), free(c.dy), free(dtable);
}

/* ---- gate --------------------------------------------------------------------------------------------- */

typedef struct gate_case {
    int64_t rows, inner;
    real *c, *mixed, *y, *dy;
} gate_case;

static double gate_loss(void *context)
{
    const gate_case *c = context;
    gate_forward(c->rows, c->inner, c->c, c->mixed, c->y);
    return dot(c->y, c->dy, c->rows * c->inner);
}

static void test_gate(void **state)
{
    (void)state;
    gate_case c = {.rows = 5, .inner = 7};
    c.c = random_values(5 * 7, 1);
    c.mixed = random_values(5 * 14, 2);
    c.dy = random_values(5 * 7, 3);
    c.y = real_allocate(5 * 7);
    real *dc = random_values(5 * 7, 3), *dmixed = real_allocate(5 * 14);
    gate_backward(c.rows, c.inner, c.c, c.mixed, dc, dmixed);
    check_gradient("gate dc", gate_loss, &c, c.c, dc, 5 * 7);
    check_gradient("gate dmixed", gate_loss, &c, c.mixed, dmixed, 5 * 14); /* its first half stays 0 */
    free(c.c), free(c.mixed), free(c.y), free(c.dy), free(dc), free(dmixed);
}

/* ---- rotary positions --------------------------------------------------------------------------------- */

/* The backward inverts the forward. The dot product of two heads depends on the distance of their tokens, not on
 * their positions. Channels after the heads and the last channel of an odd size do not change. */
static void test_rope(void **state)
{
    (void)state;
    enum { ROWS = 6, PLACES = 3, ROTATED_HEADS = 2, SIZE = 5, ROW = ROTATED_HEADS * SIZE + 2 };
    real *x = random_values(ROWS * ROW, 1), *before = random_values(ROWS * ROW, 1);
    rope(ROWS, PLACES, positions_from(7), ROTATED_HEADS, SIZE, ROW, ROPE_FORWARD, x);
    for (int64_t i = 0; i < ROWS * ROW; i++)
        assert_true((x[i] == before[i]) == (i % ROW >= ROTATED_HEADS * SIZE || i % ROW % SIZE == SIZE - 1));
    rope(ROWS, PLACES, positions_from(7), ROTATED_HEADS, SIZE, ROW, ROPE_BACKWARD, x);
    for (int64_t i = 0; i < ROWS * ROW; i++)
        assert_true(fabs(x[i] - before[i]) <= 1e-14);
    double products[2];
    for (int shift = 0; shift < 2; shift++) {
        memcpy(x, before, 2 * SIZE * sizeof *x);
        rope(1, 1, positions_from(3 + 10 * shift), 1, SIZE, SIZE, ROPE_FORWARD, x);
        rope(1, 1, positions_from(5 + 10 * shift), 1, SIZE, SIZE, ROPE_FORWARD, x + SIZE);
        products[shift] = dot(x, x + SIZE, SIZE);
    }
    assert_true(fabs(products[0] - products[1]) <= 1e-14 &&
                fabs(products[0] - dot(before, before + SIZE, SIZE)) > 1e-3);
    free(x), free(before);
}

/* ---- cross-entropy ------------------------------------------------------------------------------------ */

enum { CE_ROWS = 6, CE_CLASSES = 17 };

typedef struct ce_case {
    int32_t targets[CE_ROWS];
    real *logits;
} ce_case;

static double ce_loss(void *context)
{
    ce_case *c = context;
    double row_loss[CE_ROWS];
    return cross_entropy(CE_ROWS, CE_ROWS, CE_CLASSES, c->targets, c->logits, row_loss, false);
}

static void test_cross_entropy(void **state)
{
    (void)state;
    ce_case c;
    double row_loss[CE_ROWS];
    fill_tokens(c.targets, CE_ROWS, CE_CLASSES, 1);
    c.logits = random_values(CE_ROWS * CE_CLASSES, 2);
    for (int i = 0; i < CE_CLASSES; i++)
        c.logits[i] = 1000 + 3 * c.logits[i]; /* exp overflows unless the row's maximum is subtracted */
    real *gradient = real_allocate(CE_ROWS * CE_CLASSES);
    memcpy(gradient, c.logits, CE_ROWS * CE_CLASSES * sizeof(real));
    const double loss = cross_entropy(CE_ROWS, CE_ROWS, CE_CLASSES, c.targets, gradient, row_loss, true);
    assert_true(fabs(loss - ce_loss(&c)) <= 1e-14);
    check_gradient("cross-entropy", ce_loss, &c, c.logits, gradient, CE_ROWS * CE_CLASSES);
    free(c.logits), free(gradient);
}

/* ---- block and model ---------------------------------------------------------------------------------- */

enum { BATCH = 2, TIME = 9 };

static const model_config SMALL = {.vocabulary = 11, .width = 6, .inner = 10, .layers = 2, .kernel = 4, .context = 64};

typedef struct model_case {
    model model;
    model_pass pass;
    cot_queue *queue;
    backend b;
    int32_t inputs[BATCH * TIME], targets[BATCH * TIME];
} model_case;

/* Creates a model with random parameters, so that no gradient vanishes. */
static void model_case_create(model_case *c, model_config config)
{
    assert_true(model_create(&c->model, config, 3));
    for (int i = 0; i < c->model.parameters.count; i++)
        parameter_randomise(&c->model.parameters.items[i], 5, 0.5);
    c->queue = make_queue(2);
    backend_cpu_create(&c->b, c->queue);
    assert_true(model_pass_create(&c->pass, &c->model, &c->b, BATCH * TIME, true));
    fill_tokens(c->inputs, BATCH * TIME, (int)config.vocabulary, 1);
    fill_tokens(c->targets, BATCH * TIME, (int)config.vocabulary, 2);
}

static void model_case_destroy(model_case *c)
{
    model_pass_destroy(&c->pass);
    model_destroy(&c->model);
    backend_cpu_destroy(&c->b);
    cot_queue_destroy(c->queue);
}

typedef struct block_case {
    model_case *full;
    block_sizes sizes;
    real *next, *dnext;
} block_case;

static double block_loss(void *context)
{
    const block_case *c = context;
    model_case *m = c->full;
    assert_int_equal(
        mixer_block_forward(&m->model.blocks[0], c->sizes, &m->b, BATCH, TIME, &m->pass.blocks[0], c->next), COT_OK);
    return dot(c->next, c->dnext, BATCH * TIME * c->sizes.width);
}

static void check_block(double dropout)
{
    model_case m;
    model_case_create(&m, SMALL);
    m.pass.blocks[0].drop = (block_dropout){.p = dropout, .seed = 1, .offset = 2};
    const int64_t count = BATCH * TIME * SMALL.width;
    block_case c = {.full = &m, .sizes = {.width = SMALL.width, .inner = SMALL.inner, .kernel = SMALL.kernel}};
    c.next = real_allocate(count);
    c.dnext = random_values(count, 8);
    free(m.pass.blocks[0].x);
    m.pass.blocks[0].x = random_values(count, 9);
    real *dx = random_values(count, 8);
    block_loss(&c);
    const mixer_block *block = &m.model.blocks[0];
    assert_int_equal(mixer_block_backward(block, c.sizes, &m.b, BATCH, TIME, &m.pass.blocks[0], &m.pass.scratch, dx),
                     COT_OK);
    check_gradient("block dx", block_loss, &c, m.pass.blocks[0].x, dx, count);
    parameter *const parameters[] = {block->norm.gain, block->w_in, block->conv_weight, block->conv_bias, block->w_out};
    for (size_t i = 0; i < sizeof parameters / sizeof parameters[0]; i++)
        check_gradient(parameters[i]->name, block_loss, &c, parameters[i]->value, parameters[i]->gradient,
                       parameters[i]->count);
    free(c.next), free(c.dnext), free(dx);
    model_case_destroy(&m);
}

static void test_mixer_block(void **state)
{
    (void)state;
    check_block(0);
    check_block(0.4);
}

static double full_loss(void *context)
{
    model_case *c = context;
    c->b.op->begin(&c->b);
    assert_int_equal(model_forward(&c->model, &c->pass, BATCH, TIME, c->inputs), COT_OK);
    assert_int_equal(model_loss(&c->model, &c->pass, BATCH * TIME, c->targets), COT_OK);
    return c->b.loss;
}

static void check_model(model_config config, double dropout)
{
    model_case c;
    model_case_create(&c, config);
    c.pass.dropout = (model_dropout){.p = dropout, .seed = 1, .step = 3};
    const double loss = full_loss(&c);
    for (int64_t i = 0; i < c.model.parameters.elements; i++)
        c.model.parameters.gradients[i] = NAN; /* the backward must write every gradient */
    c.b.op->begin(&c.b);
    assert_int_equal(model_backward(&c.model, &c.pass, BATCH, TIME, BATCH * TIME, c.inputs, c.targets), COT_OK);
    assert_true(fabs(loss - c.b.loss) <= 1e-14);
    for (int i = 0; i < c.model.parameters.count; i++) {
        parameter *p = &c.model.parameters.items[i];
        check_gradient(p->name, full_loss, &c, p->value, p->gradient, p->count);
    }
    model_case_destroy(&c);
}

/* Checks that the blocks share memory with `recompute`, and that it changes no bit of the loss and the gradients. */
static void check_recompute(model_config config)
{
    model_case c;
    model_case_create(&c, config);
    parameter_table *table = &c.model.parameters;
    real *expected = real_allocate(table->elements);
    double loss = 0;
    for (int recompute = 0; recompute < 2; recompute++) {
        model_pass_destroy(&c.pass);
        c.b.recompute = recompute == 1;
        assert_true(model_pass_create(&c.pass, &c.model, &c.b, BATCH * TIME, true));
        assert_true((c.pass.blocks[0].mixed == c.pass.blocks[1].mixed) == (recompute == 1));
        c.pass.dropout = (model_dropout){.p = 0.3, .seed = 1, .step = 3};
        c.b.op->begin(&c.b);
        assert_int_equal(model_forward(&c.model, &c.pass, BATCH, TIME, c.inputs), COT_OK);
        assert_int_equal(model_backward(&c.model, &c.pass, BATCH, TIME, BATCH * TIME, c.inputs, c.targets), COT_OK);
        if (recompute == 0) {
            loss = c.b.loss;
            memcpy(expected, table->gradients, (size_t)table->elements * sizeof *expected);
        }
    }
    assert_true(c.b.loss == loss);
    assert_memory_equal(table->gradients, expected, (size_t)table->elements * sizeof *expected);
    free(expected);
    model_case_destroy(&c);
}

static void test_recompute(void **state)
{
    (void)state;
    model_config config = SMALL;
    config.layers = 3;
    config.attention = 2;
    check_recompute(config);
    config.streams = 2;
    config.dense = 3;
    config.mlp = 14;
    check_recompute(config);
    config = (model_config){.vocabulary = 11,
                            .width = 6,
                            .inner = 6,
                            .layers = 2,
                            .kernel = 4,
                            .context = 64,
                            .attention = 1,
                            .mlp = 24,
                            .heads = 2,
                            .kv_heads = 2,
                            .gpt2 = true};
    check_recompute(config);
}

static void test_model(void **state)
{
    (void)state;
    check_model(SMALL, 0);
    check_model(SMALL, 0.3);
}

static void test_model_attention(void **state)
{
    (void)state;
    model_config config = SMALL;
    config.attention = 2; /* the second block is attention, after a convolution */
    check_model(config, 0.3);
    config.inner = 12; /* four heads */
    check_model(config, 0);
    config.streams = 2; /* convolution, grouped attention, dropout and streams together */
    check_model(config, 0.3);
    config.attention = 1;
    check_model(config, 0);
    config.attention = 3; /* none of the two blocks is attention */
    check_model(config, 0);
}

/* Every step and every block draws a different mask. The same step draws the same mask again. */
static void test_dropout(void **state)
{
    (void)state;
    model_case c;
    model_case_create(&c, SMALL);
    const double without_dropout = full_loss(&c);
    double losses[4];
    for (int i = 0; i < 4; i++) {
        c.pass.dropout = (model_dropout){.p = 0.5, .seed = 1, .step = (uint64_t)i % 3};
        losses[i] = full_loss(&c);
        assert_true(losses[i] != without_dropout);
        assert_true(c.pass.blocks[0].drop.offset != c.pass.blocks[1].drop.offset);
    }
    assert_true(losses[0] != losses[1] && losses[1] != losses[2]);
    assert_true(losses[0] == losses[3]);
    c.pass.dropout = (model_dropout){0};
    assert_true(full_loss(&c) == without_dropout);
    model_case_destroy(&c);
}

/* Blocks of an MLP between the others, with heads of a given number. */
static void test_model_mlp(void **state)
{
    (void)state;
    model_config config = SMALL;
    config.mlp = 7;
    check_model(config, 0.3);
    config.attention = 1;
    config.inner = 12;
    config.heads = 3;
    config.kv_heads = 1;
    check_model(config, 0);
    config.streams = 2;
    check_model(config, 0);
}

/* Two layers of GPT-2. */
static model_config gpt2_config(void)
{
    model_config config = SMALL;
    config.gpt2 = true;
    config.attention = 1;
    config.inner = config.width;
    config.heads = config.kv_heads = 2;
    config.mlp = 4 * config.width;
    config.context = TIME;
    return config;
}

static void test_model_gpt2(void **state)
{
    (void)state;
    check_model(gpt2_config(), 0);
    check_model(gpt2_config(), 0.3);
    model_case c;
    model_case_create(&c, gpt2_config());
    assert_ptr_equal(c.model.head, c.model.embedding);
    model_case_destroy(&c);
}

/* The gradients of two micro-batches are those of one batch. */
static void check_accumulation(model_config config)
{
    model_case c;
    model_case_create(&c, config);
    const int64_t count = c.model.parameters.elements, rows = BATCH * TIME;
    real *whole = real_allocate(count);
    full_loss(&c);
    c.b.op->begin(&c.b);
    assert_int_equal(model_backward(&c.model, &c.pass, BATCH, TIME, rows, c.inputs, c.targets), COT_OK);
    const double loss = c.b.loss;
    memcpy(whole, c.model.parameters.gradients, (size_t)count * sizeof(real));
    c.b.op->begin(&c.b);
    for (int64_t i = 0; i < BATCH; i++) {
        c.b.accumulate = i > 0;
        assert_int_equal(model_forward(&c.model, &c.pass, 1, TIME, c.inputs + i * TIME), COT_OK);
        assert_int_equal(model_backward(&c.model, &c.pass, 1, TIME, rows, c.inputs + i * TIME, c.targets + i * TIME),
                         COT_OK);
    }
    assert_true(fabs(c.b.loss - loss) <= 1e-14);
    for (int64_t i = 0; i < count; i++)
        assert_true(fabs(c.model.parameters.gradients[i] - whole[i]) <= 1e-12);
    free(whole);
    model_case_destroy(&c);
}

static void test_accumulation(void **state)
{
    (void)state;
    model_config config = SMALL;
    config.attention = 2;
    config.dense = 3;
    config.streams = 2;
    config.mlp = 8;
    check_accumulation(config);
    check_accumulation(gpt2_config());
}

/* Models with hyper-connections. Together they use every gradient of the library's mhc ops. */
static void test_model_streams(void **state)
{
    (void)state;
    model_config config = SMALL;
    config.streams = 2;
    check_model(config, 0);
    check_model(config, 0.3);
    config.layers = 1;
    config.streams = 1;
    check_model(config, 0);
    config.streams = 3;
    check_model(config, 0);
}

/* The dense convolution after the embedding: alone, with streams, of width 1, and wider than the sequence. */
static void test_model_stem(void **state)
{
    (void)state;
    model_config config = SMALL;
    config.dense = 3;
    check_model(config, 0);
    config.streams = 2;
    config.attention = 2;
    check_model(config, 0.3);
    config.dense = 1;
    check_model(config, 0);
    config.dense = TIME + 3;
    check_model(config, 0);
}

/* A convolution of width 1 has no state and reads no other token. One wider than the sequence reads zeros before it. */
static void test_model_kernels(void **state)
{
    (void)state;
    model_config config = SMALL;
    config.layers = 1;
    config.kernel = 1;
    check_model(config, 0);
    config.kernel = TIME + 3;
    check_model(config, 0);
}

/* ---- decoding ----------------------------------------------------------------------------------------- */

static void check_decoding(model_config config)
{
    model_case c;
    model_decoder decoder;
    model_case_create(&c, config);
    assert_true(model_decoder_create(&decoder, &c.model, &c.b));
    assert_int_equal(model_forward(&c.model, &c.pass, 1, TIME, c.inputs), COT_OK);
    assert_int_equal(model_loss(&c.model, &c.pass, TIME, c.targets), COT_OK); /* computes the logits */
    for (int64_t t = 0; t < TIME; t++) {
        assert_int_equal(model_decoder_step(&c.model, &decoder, c.inputs[t]), COT_OK);
        for (int64_t v = 0; v < config.vocabulary; v++)
            assert_true(fabs(((real *)decoder.pass.logits)[v] - ((real *)c.pass.logits)[t * config.vocabulary + v]) <=
                        1e-12);
    }
    model_decoder_destroy(&decoder);
    model_case_destroy(&c);
}

static void test_decoding(void **state)
{
    (void)state;
    check_decoding(SMALL);
    model_config config = SMALL;
    config.kernel = 1;
    check_decoding(config);
    config = SMALL;
    config.streams = 2;
    check_decoding(config);
    config.attention = 1;
    check_decoding(config);
    config = SMALL;
    config.attention = 2;
    config.inner = 12; /* four heads */
    check_decoding(config);
    config.dense = 3;
    config.streams = 2;
    check_decoding(config);
    config.dense = 1;
    check_decoding(config);
    check_decoding(gpt2_config());
}

/* A sample of GPT-2 goes on behind the context. Its first tokens are those of a sample that ends there; what follows
 * depends on the last half of the context alone. */
static void test_long_sample(void **state)
{
    (void)state;
    enum { SHORT = TIME - 3, LONG = 2 * TIME };
    model_case c;
    model_decoder decoder;
    const int32_t prompt[] = {1, 2, 3};
    int32_t few[SHORT], many[LONG];
    model_case_create(&c, gpt2_config());
    sample_options options = {
        .prompt = prompt, .prompt_count = 3, .count = SHORT, .classes = 256, .temperature = 0, .seed = 1};
    assert_int_equal(sample_generate(&c.model, &c.b, &options, few), COT_OK);
    options.count = LONG;
    assert_int_equal(sample_generate(&c.model, &c.b, &options, many), COT_OK);
    assert_memory_equal(few, many, sizeof few);
    assert_true(model_decoder_create(&decoder, &c.model, &c.b));
    for (int64_t i = TIME - TIME / 2 - 3; i <= TIME - 3; i++) /* the prompt has 3 tokens */
        assert_int_equal(model_decoder_step(&c.model, &decoder, many[i]), COT_OK);
    assert_int_equal(sample_pick(decoder.pass.logits, c.model.config.vocabulary, 0, 0), many[TIME - 2]);
    while (decoder.tokens < TIME)
        assert_int_equal(model_decoder_step(&c.model, &decoder, 1), COT_OK);
    assert_int_equal(model_decoder_step(&c.model, &decoder, 1), COT_INVALID_SHAPE);
    model_decoder_destroy(&decoder);
    model_case_destroy(&c);
}

/* Decoding continues beyond the attention window, and older tokens have no effect. */
static void test_long_decoding(void **state)
{
    (void)state;
    model_config config = SMALL;
    model_case c;
    model_decoder all, last_reach;
    config.attention = 1;
    config.layers = 1;
    config.context = 5;
    model_case_create(&c, config);
    assert_true(model_decoder_create(&all, &c.model, &c.b) && model_decoder_create(&last_reach, &c.model, &c.b));
    for (int64_t t = 0; t < TIME; t++)
        assert_int_equal(model_decoder_step(&c.model, &all, c.inputs[t]), COT_OK);
    for (int64_t t = TIME - config.context; t < TIME; t++)
        assert_int_equal(model_decoder_step(&c.model, &last_reach, c.inputs[t]), COT_OK);
    for (int64_t v = 0; v < config.vocabulary; v++)
        assert_true(fabs(((real *)all.pass.logits)[v] - ((real *)last_reach.pass.logits)[v]) <= 1e-12);
    model_decoder_destroy(&all);
    model_decoder_destroy(&last_reach);
    model_case_destroy(&c);
}

static void test_sample_pick(void **state)
{
    (void)state;
    const real logits[] = {(real)log(0.2), (real)log(0.5), (real)log(0.3)};
    assert_int_equal(sample_pick(logits, 3, 0, 0.99), 1);
    assert_int_equal(sample_pick(logits, 3, 1, 0), 0);
    assert_int_equal(sample_pick(logits, 3, 1, 0.19), 0);
    assert_int_equal(sample_pick(logits, 3, 1, 0.21), 1);
    assert_int_equal(sample_pick(logits, 3, 1, 0.69), 1);
    assert_int_equal(sample_pick(logits, 3, 1, 0.71), 2);
    /* At temperature 1/2 the probabilities are squared: 0.04, 0.25, 0.09 of 0.38. */
    assert_int_equal(sample_pick(logits, 3, 0.5, 0.1), 0);
    assert_int_equal(sample_pick(logits, 3, 0.5, 0.11), 1);
    assert_int_equal(sample_pick(logits, 3, 0.5, 0.77), 2);
}

/* ---- training ----------------------------------------------------------------------------------------- */

/* The hash of the parameters after a few steps with several tiles and partial sums. */
static uint64_t hash_after_training(int threads, int64_t attention, int64_t streams, int64_t dense)
{
    enum { STEPS = 3, ROWS = 2 * 173 };
    const model_config config = {.vocabulary = 256,
                                 .width = 40,
                                 .inner = 300,
                                 .layers = 2,
                                 .kernel = 5,
                                 .attention = attention,
                                 .streams = streams,
                                 .dense = dense};
    const adamw_options adamw = {.beta1 = 0.9, .beta2 = 0.98, .eps = 1e-8, .weight_decay = 0.1, .clip = 0.1};
    model m;
    model_pass pass;
    backend b;
    int32_t inputs[ROWS], targets[ROWS];
    fill_tokens(inputs, ROWS, 256, 1);
    fill_tokens(targets, ROWS, 256, 2);
    omp_set_num_threads(threads);
    cot_queue *queue = make_queue(threads);
    assert_true(model_create(&m, config, 1));
    backend_cpu_create(&b, queue);
    assert_true(model_pass_create(&pass, &m, &b, ROWS, true));
    double *partial = calloc((size_t)gradient_norm_partials(&m.parameters), sizeof *partial);
    for (int step = 1; step <= STEPS; step++) {
        pass.dropout = (model_dropout){.p = 0.1, .seed = 1, .step = (uint64_t)step};
        b.op->begin(&b);
        assert_int_equal(model_forward(&m, &pass, 2, ROWS / 2, inputs), COT_OK);
        assert_int_equal(model_backward(&m, &pass, 2, ROWS / 2, ROWS, inputs, targets), COT_OK);
        adamw_step(&m.parameters, &adamw, (element_range){0, m.parameters.elements},
                   gradient_norm(&m.parameters, partial), 1e-2, step);
    }
    const uint64_t hash = parameter_table_hash(&m.parameters);
    assert_true(b.loss < 5.5); /* the model learns: a uniform guess has the loss log 256 = 5.545 */
    free(partial);
    model_pass_destroy(&pass);
    model_destroy(&m);
    backend_cpu_destroy(&b);
    cot_queue_destroy(queue);
    return hash;
}

static void test_threads(void **state)
{
    (void)state;
    const int before = omp_get_max_threads();
    static const int64_t architectures[][3] = {
        {0, 0, 0}, {1, 0, 0}, {2, 0, 0}, {2, 2, 4}}; /* attention, streams, dense */
    for (size_t i = 0; i < sizeof architectures / sizeof *architectures; i++) {
        const int64_t attention = architectures[i][0], streams = architectures[i][1], dense = architectures[i][2];
        const uint64_t expected = hash_after_training(1, attention, streams, dense);
        for (int threads = 2; threads <= (i == 0 ? 5 : 3); threads++)
            assert_true(hash_after_training(threads, attention, streams, dense) == expected);
    }
    omp_set_num_threads(before);
}

/* Several gradients, because sums in different orders often round to the same bits. */
static void test_gradient_norm_threads(void **state)
{
    (void)state;
    enum { COUNT = 100000, GRADIENTS = 20 };
    const int before = omp_get_max_threads();
    parameter_table table;
    assert_true(parameter_table_create(&table, 1));
    parameter *p = parameter_add(&table, "many", COUNT, 0, false);
    assert_true(parameter_table_allocate(&table));
    double *partial = calloc((size_t)gradient_norm_partials(&table), sizeof *partial);
    for (uint64_t name = 0; name < GRADIENTS; name++) {
        real *gradient = random_values(COUNT, name);
        memcpy(p->gradient, gradient, COUNT * sizeof(real));
        free(gradient);
        omp_set_num_threads(1);
        const double expected = gradient_norm(&table, partial);
        assert_true(fabs(expected * expected / dot(p->gradient, p->gradient, COUNT) - 1) <= 1e-12);
        for (int threads = 2; threads <= 5; threads++) {
            omp_set_num_threads(threads);
            assert_true(gradient_norm(&table, partial) == expected);
        }
    }
    omp_set_num_threads(before);
    free(partial);
    parameter_table_destroy(&table);
}

/* Compares two steps of AdamW with the formulas. */
static void test_adamw(void **state)
{
    (void)state;
    const adamw_options options = {.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-3, .weight_decay = 0.5, .clip = 1};
    parameter_table table;
    double partial[1];
    assert_true(parameter_table_create(&table, 2));
    parameter *decays = parameter_add(&table, "matrix", 1, 1, true);
    parameter *other = parameter_add(&table, "gain", 1, 0, false);
    assert_true(parameter_table_allocate(&table));
    double value = 2, without_decay = 3, m1 = 0, m2 = 0, n1 = 0, n2 = 0;
    decays->value[0] = 2;
    other->value[0] = 3;
    for (int step = 1; step <= 2; step++) {
        decays->gradient[0] = 3;
        other->gradient[0] = -4;
        const double norm = gradient_norm(&table, partial);
        assert_true(fabs(norm - 5) <= 1e-14);
        adamw_step(&table, &options, (element_range){0, table.elements}, norm, 0.1, step);
        m1 = 0.9 * m1 + 0.1 * 0.6; /* clipped to norm 1: 3/5 and -4/5 */
        m2 = 0.99 * m2 + 0.01 * 0.36;
        n1 = 0.9 * n1 - 0.1 * 0.8;
        n2 = 0.99 * n2 + 0.01 * 0.64;
        const double first = 1 - pow(0.9, step), second = 1 - pow(0.99, step);
        value -= 0.1 * (m1 / first / (sqrt(m2 / second) + 1e-3) + 0.5 * value);
        without_decay -= 0.1 * (n1 / first / (sqrt(n2 / second) + 1e-3));
        assert_true(fabs(decays->value[0] - value) <= 1e-12);
        assert_true(fabs(other->value[0] - without_decay) <= 1e-12);
    }
    parameter_table_destroy(&table);
}

static void test_learning_rate(void **state)
{
    (void)state;
    assert_true(fabs(learning_rate(1, 1, 10, 100) - 0.1) <= 1e-12);
    assert_true(fabs(learning_rate(1, 10, 10, 100) - 1) <= 1e-12);
    assert_true(fabs(learning_rate(1, 55, 10, 100) - 0.55) <= 1e-12);
    assert_true(fabs(learning_rate(1, 100, 10, 100) - 0.1) <= 1e-12);
    assert_true(fabs(learning_rate(1, 1, 0, 1) - 0.1) <= 1e-12);
}

/* ---- data --------------------------------------------------------------------------------------------- */

static void test_bigram(void **state)
{
    (void)state;
    static bigram_model bigram;
    const uint8_t text[] = "abracadabra";
    bigram_fit(&bigram, text, sizeof text - 1);
    for (int last = 0; last < BYTE_VALUES; last++) {
        double sum = 0;
        for (int next = 0; next < BYTE_VALUES; next++)
            sum += exp(bigram.log_probability[last][next]);
        assert_true(fabs(sum - 1) <= 1e-12);
    }
    /* a is followed by b twice and by c and d once each. b occurs 2 times among 11. */
    const double expected = (2 + 3 * (3.0 / 267)) / (4 + 3);
    const int32_t a = 'a', b = 'b';
    assert_true(fabs(bigram_loss(&bigram, &a, &b, 1) + log(expected)) <= 1e-12);
}

static void test_sampler(void **state)
{
    (void)state;
    enum { COUNT = 103, CONTEXT = 10, WINDOWS = 9 };
    uint8_t bytes[COUNT];
    int32_t inputs[3 * CONTEXT], targets[3 * CONTEXT];
    for (int i = 0; i < COUNT; i++)
        bytes[i] = (uint8_t)i;
    token_segment segment = {bytes, COUNT, 1};
    const token_list text = {&segment, 1};
    sampler s;
    int64_t identities = 0;
    assert_true(sampler_create(&s, &text, CONTEXT, 1));
    assert_int_equal(s.windows, WINDOWS);
    for (int epoch = 0; epoch < 20; epoch++) {
        int seen[COUNT] = {0};
        for (int step = 0; step < WINDOWS / 3; step++) {
            sampler_batch(&s, epoch * (WINDOWS / 3) + step, 3, inputs, targets);
            for (int i = 0; i < 3 * CONTEXT; i++) {
                assert_int_equal(targets[i], inputs[i] + 1);
                assert_in_range(targets[i], 1, COUNT - 1);
                assert_int_equal(seen[inputs[i]]++, 0);
            }
        }
        for (int64_t i = 0; i < WINDOWS; i++)
            identities += s.order[i] == i;
    }
    assert_in_range(identities, 1, 60); /* a random permutation has one fixed point on average */
    sampler_destroy(&s);
}

/* Windows of several segments, with tokens of each size. None crosses from one segment to the next. */
static void test_token_list(void **state)
{
    (void)state;
    enum { CONTEXT = 4, SPARE = 2, PARTS = 4 };
    const uint8_t bytes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};          /* 2 windows */
    const uint16_t halves[] = {50001, 50002, 50003, 50004, 50005, 50006}; /* 1 */
    const uint32_t words[] = {100001, 100002, 100003, 100004, 100005}, huge[] = {1, 2, 3, 4, 5, 1u << 31}; /* 0, 1 */
    const token_segment segments[PARTS] = {{bytes, 11, 1}, {words, 5, 4}, {halves, 6, 2}, {huge, 6, 4}};
    const int32_t first[] = {1, 5, 50001, 1};
    token_list list = {0};
    int32_t inputs[CONTEXT], targets[CONTEXT];
    for (int i = 0; i < PARTS; i++)
        assert_true(token_list_add(&list, segments[i]));
    assert_int_equal(corpus_count(&list), 28);
    assert_int_equal(token_list_windows(&list, CONTEXT, SPARE), 4);
    for (int64_t w = 0; w < 4; w++)
        for (int64_t offset = 0; offset < SPARE; offset++) {
            token_list_window(&list, CONTEXT, SPARE, w, offset, inputs, targets);
            for (int i = 0; i < CONTEXT; i++) {
                assert_int_equal(inputs[i], first[w] + offset + i);
                assert_int_equal(targets[i],
                                 w == 3 && offset == 1 && i == CONTEXT - 1 ? INT32_MAX : first[w] + offset + i + 1);
            }
        }
    token_list_free(&list);
}

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fputs(text, file) >= 0, 1);
    assert_int_equal(fclose(file), 0);
}

static void write_tokens(const char *path, int32_t magic, int32_t version, int32_t count, const void *data,
                         size_t bytes)
{
    int32_t header[256] = {magic, version, count};
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(header, sizeof header, 1, file), 1);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static void check_bad_tokens(const char *path, const char *expected)
{
    corpus c = {0};
    assert_false(corpus_add_tokens(&c, path));
    if (strstr(c.error, expected) == NULL || strstr(c.error, path) == NULL)
        fail_msg("\"%s\", expected \"%s\"", c.error, expected);
    corpus_destroy(&c);
}

static void test_token_files(void **state)
{
    (void)state;
    char folder[] = "/tmp/test_train_lm_XXXXXX", path[64], other[64];
    uint16_t halves[20];
    uint32_t words[10];
    for (int i = 0; i < 20; i++)
        halves[i] = (uint16_t)(65535 - i);
    for (int i = 0; i < 10; i++)
        words[i] = 1000000u + (unsigned)i;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/a.bin", folder);
    snprintf(other, sizeof other, "%s/b.bin", folder);
    write_tokens(path, 20240520, 1, 20, halves, sizeof halves);
    write_tokens(other, 20240801, 7, 10, words, sizeof words);
    corpus c = {0};
    int32_t tokens[20];
    assert_true(corpus_add_tokens(&c, path) && corpus_add_tokens(&c, other) && corpus_finish(&c));
    assert_int_equal(corpus_count(&c.training_tokens), 18 + 9);
    assert_int_equal(corpus_count(&c.validation_tokens), 2 + 1);
    const uint64_t hash = corpus_hash(&c);
    token_segment_copy(&c.training_tokens.segments[0], 0, 18, tokens);
    assert_true(tokens[0] == 65535 && tokens[17] == 65535 - 17);
    token_segment_copy(&c.validation_tokens.segments[1], 0, 1, tokens);
    assert_int_equal(tokens[0], 1000009);
    corpus_destroy(&c);
    assert_true(corpus_add_tokens(&c, path) && corpus_add_validation(&c, other) && corpus_finish(&c));
    assert_int_equal(corpus_count(&c.training_tokens), 20);
    assert_int_equal(corpus_count(&c.validation_tokens), 10);
    assert_true(corpus_hash(&c) != hash);
    corpus_destroy(&c);
    check_bad_tokens("/nowhere/at all", "No such file");
    check_bad_tokens(folder, "not a file");
    write_tokens(path, 20240520, 7, 20, halves, sizeof halves);
    check_bad_tokens(path, "is no token file: it begins with 20240520 and 7");
    write_tokens(path, 20240520, 1, 21, halves, sizeof halves);
    check_bad_tokens(path, "40 bytes of tokens, expected 42");
    write_tokens(path, 20240520, 1, 0, halves, 0);
    check_bad_tokens(path, "the file has no tokens");
    write_file(path, "short");
    check_bad_tokens(path, "5 bytes, expected the header of a token file");
    unlink(path);
    unlink(other);
    rmdir(folder);
}

static void test_corpus(void **state)
{
    (void)state;
    char folder[] = "/tmp/test_train_lm_XXXXXX", path[64], empty[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/text.md", folder);
    snprintf(empty, sizeof empty, "%s/empty.md", folder);
    write_file(path, "0123456789abcdefghij");
    write_file(empty, "");
    corpus c = {0};
    assert_true(corpus_add_file(&c, path));
    assert_true(corpus_add_file(&c, path));
    assert_int_equal(c.training.count, 36);
    assert_int_equal(c.validation.count, 4);
    assert_memory_equal(c.training.bytes, "0123456789abcdefgh0123456789abcdefgh", 36);
    assert_memory_equal(c.validation.bytes, "ijij", 4);
    assert_false(corpus_add_file(&c, folder));
    assert_non_null(strstr(c.error, folder));
    assert_false(corpus_add_file(&c, empty));
    assert_non_null(strstr(c.error, "empty"));
    assert_false(corpus_add_file(&c, "/nowhere/at all"));
    const int64_t files = c.files;
    assert_true(corpus_add_default(&c, folder)); /* skips the empty file */
    assert_true(c.files > files);
    corpus_destroy(&c);
    unlink(path);
    unlink(empty);
    rmdir(folder);
}

static void test_csv(void **state)
{
    (void)state;
    char folder[] = "/tmp/test_train_lm_XXXXXX", path[64], text[128] = "";
    assert_non_null(mkdtemp(folder));
    curve_point points[] = {{1, 5.5, NAN}, {2, 5.25, 5.125}};
    const loss_curve curve = {.points = points, .count = 2, .bigram = 2.5};
    io_error error;
    assert_true(plot_write_csv(&curve, folder, &error));
    snprintf(path, sizeof path, "%s/loss.csv", folder);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_true(fread(text, 1, sizeof text - 1, file) > 0);
    fclose(file);
    assert_string_equal(text, "step,train,validation,bigram\n1,5.5,,2.5\n2,5.25,5.125,2.5\n");
    unlink(path);
    assert_int_equal(rmdir(folder), 0); /* no other file was left */
    assert_false(plot_write_csv(&curve, folder, &error));
    assert_non_null(strstr(error.text, "/loss.csv: cannot be written: No such file or directory"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_linear_tiles),
        cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_layernorm),
        cmocka_unit_test(test_positions),
        cmocka_unit_test(test_gelu),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_gate),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_mixer_block),
        cmocka_unit_test(test_model),
        cmocka_unit_test(test_recompute),
        cmocka_unit_test(test_model_kernels),
        cmocka_unit_test(test_model_stem),
        cmocka_unit_test(test_model_mlp),
        cmocka_unit_test(test_model_gpt2),
        cmocka_unit_test(test_accumulation),
        cmocka_unit_test(test_model_streams),
        cmocka_unit_test(test_model_attention),
        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_decoding),
        cmocka_unit_test(test_long_decoding),
        cmocka_unit_test(test_long_sample),
        cmocka_unit_test(test_sample_pick),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_gradient_norm_threads),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_learning_rate),
        cmocka_unit_test(test_bigram),
        cmocka_unit_test(test_sampler),
        cmocka_unit_test(test_token_list),
        cmocka_unit_test(test_token_files),
        cmocka_unit_test(test_corpus),
        cmocka_unit_test(test_csv),
    };
    matrix_use_one_thread_per_call();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
