/* SPDX-License-Identifier: Apache-2.0
 *
 * test_train_layers.c: the trainer's kernels and products (examples/train_lm/cuda) against plain loops in double, by
 * the error rule of src/check/compare.h, for each dtype. Exit status 77, "skipped", without a GPU. */
#include "device_queue.h"
#include "support.h"

#include "check/compare.h"
#include "core/float16.h"
#include "cuda/memory.h"
#include "../../examples/train_lm/cuda/cublaslt.h"
#include "../../examples/train_lm/cuda/device_layers.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_ARRAYS = 24 };

static cot_queue *queue;
static uint64_t seed;

static const cot_dtype dtypes[] = {COT_F32, COT_F16, COT_BF16};

/* ---- arrays ------------------------------------------------------------------------------------------- */

/* An array in device memory. `value` has the elements in double: of an input what the device has, of an output what
 * the device should compute. `magnitude` is the sum of the absolute values of the terms. */
typedef struct array {
    cot_dtype dtype;
    int64_t count;
    void *device;
    double *value, *magnitude;
} array;

static array arrays[MAX_ARRAYS]; /* of the current test */
static int array_count;

static void copy_to_device(const array *a)
{
    const size_t size = cot_dtype_size(a->dtype);
    char *bytes = malloc((size_t)a->count * size + 1);
    assert_non_null(bytes);
    for (int64_t i = 0; i < a->count; i++)
        cot_store_f64(bytes, a->dtype, i, a->value[i]);
    for (int64_t i = 0; i < a->count; i++) /* the device has the rounded value */
        a->value[i] = cot_load_f64(bytes, a->dtype, i);
    assert_ok(cot_cuda_copy_to_device(queue, a->device, bytes, (size_t)a->count * size));
    free(bytes);
}

static array *make_array(cot_dtype dtype, int64_t count)
{
    assert_true(array_count < MAX_ARRAYS);
    array *a = &arrays[array_count++];
    *a = (array){.dtype = dtype, .count = count};
    assert_ok(cot_cuda_alloc(queue, (size_t)count * cot_dtype_size(dtype), &a->device));
    a->value = calloc((size_t)count, sizeof *a->value);
    a->magnitude = calloc((size_t)count, sizeof *a->magnitude);
    assert_true(a->value != NULL && a->magnitude != NULL);
    return a;
}

/* Random numbers of [-scale, scale). */
static array *make_random(cot_dtype dtype, int64_t count, double scale)
{
    array *a = make_array(dtype, count);
    for (int64_t i = 0; i < count; i++)
        a->value[i] = scale * random_real(&seed);
    copy_to_device(a);
    for (int64_t i = 0; i < count; i++)
        a->magnitude[i] = fabs(a->value[i]);
    return a;
}

/* An output that a kernel must overwrite. */
static array *make_output(cot_dtype dtype, int64_t count)
{
    array *a = make_array(dtype, count);
    assert_ok(cot_cuda_memset_async(queue, a->device, 0xff, (size_t)count * cot_dtype_size(dtype)));
    return a;
}

static void *copy_ints(const int32_t *values, int64_t count)
{
    array *a = make_array(COT_I32, count);
    assert_ok(cot_cuda_copy_to_device(queue, a->device, values, (size_t)count * sizeof *values));
    return a->device;
}

static void *make_scratch(int64_t bytes)
{
    array *a = make_output(COT_U8, bytes);
    return a->device;
}

/* Adds a term to the expected value of an element. */
static void add_term(array *a, int64_t i, double term)
{
    a->value[i] += term;
    a->magnitude[i] += fabs(term);
}

/* Compares what the device computed with the expected values. */
static void check_array(const array *a, const char *name)
{
    const size_t size = cot_dtype_size(a->dtype);
    char *bytes = malloc((size_t)a->count * size);
    double *got = calloc((size_t)a->count, sizeof *got);
    assert_true(bytes != NULL && got != NULL);
    assert_ok(cot_queue_check(queue));
    assert_ok(cot_cuda_copy_to_host(queue, bytes, a->device, (size_t)a->count * size));
    for (int64_t i = 0; i < a->count; i++)
        got[i] = cot_load_f64(bytes, a->dtype, i);
    const comparison c = compare(got, a->value, a->magnitude, NULL, a->count, a->dtype, COT_F32, 1);
    if (c.failed)
        print_error("%s %s: element %lld is %.9g, expected %.9g; %lld of %lld differ\n", name, cot_dtype_name(a->dtype),
                    (long long)c.worst_element, got[c.worst_element], a->value[c.worst_element],
                    (long long)c.violations, (long long)a->count);
    free(bytes);
    free(got);
    assert_false(c.failed);
}

static void free_arrays(void)
{
    while (array_count > 0) {
        array *a = &arrays[--array_count];
        cot_cuda_free(queue, a->device);
        free(a->value);
        free(a->magnitude);
    }
}

static int begin(void **state)
{
    (void)state;
    seed = 36;
    return 0;
}

static int end(void **state)
{
    (void)state;
    free_arrays();
    return 0;
}

static double rounded(cot_dtype dtype, double value)
{
    char bytes[8];
    cot_store_f64(bytes, dtype, 0, value);
    return cot_load_f64(bytes, dtype, 0);
}

/* ---- the layers --------------------------------------------------------------------------------------- */

enum { ROWS = 300, WIDTH = 72, VOCABULARY = 20 };

/* Token 3 has half of the rows, so that it has several pieces; token 19 has none. */
static void draw_tokens(int32_t tokens[ROWS])
{
    for (int r = 0; r < ROWS; r++)
        tokens[r] = r % 2 == 0 ? 3 : (int32_t)random_int(&seed, 0, VOCABULARY - 2);
}

static void check_embedding(cot_dtype dtype)
{
    int32_t tokens[ROWS], order[ROWS], next[VOCABULARY + 1];
    embedding_piece pieces[ROWS / EMBEDDING_PIECE + VOCABULARY];
    embedding_sum sums[ROWS / EMBEDDING_PIECE];
    assert_true(embedding_max_pieces(ROWS, VOCABULARY) <= (int64_t)COUNT(pieces));
    assert_true(embedding_max_sums(ROWS) <= (int64_t)COUNT(sums));
    draw_tokens(tokens);
    const array *table = make_random(dtype, VOCABULARY * WIDTH, 1), *dy = make_random(dtype, ROWS * WIDTH, 1);
    array *y = make_output(dtype, ROWS * WIDTH), *dtable = make_random(COT_F32, VOCABULARY * WIDTH, 1);
    for (int64_t i = 0; i < ROWS * WIDTH; i++) {
        y->value[i] = table->value[tokens[i / WIDTH] * WIDTH + i % WIDTH];
        add_term(dtable, tokens[i / WIDTH] * WIDTH + i % WIDTH, dy->value[i]);
    }
    const embedding_call forward = {
        .tokens = copy_ints(tokens, ROWS), .table = table->device, .y = y->device, .rows = ROWS, .width = WIDTH};
    assert_ok(device_embedding_forward(queue, dtype, &forward));
    embedding_plan plan = {.order = order, .pieces = pieces, .sums = sums};
    embedding_make_plan(&plan, ROWS, VOCABULARY, tokens, next);
    assert_int_equal(plan.counts[1], 1);
    const embedding_backward_call backward = {
        .order = copy_ints(order, ROWS),
        .pieces = copy_ints((const int32_t *)pieces, 4 * (int64_t)COUNT(pieces)),
        .sums = copy_ints((const int32_t *)sums, 3 * (int64_t)COUNT(sums)),
        .counts = copy_ints(plan.counts, 2),
        .dy = dy->device,
        .partials = make_scratch(embedding_max_partials(ROWS) * WIDTH * 4),
        .dtable = dtable->device,
        .rows = ROWS,
        .width = WIDTH,
        .vocabulary = VOCABULARY,
    };
    assert_ok(device_embedding_backward(queue, dtype, &backward));
    check_array(y, "embedding y");
    check_array(dtable, "embedding dtable");
}

static void check_rmsnorm(cot_dtype dtype, int64_t rows, int64_t width, bool accumulate)
{
    const array *x = make_random(dtype, rows * width, 1), *branch = make_random(dtype, rows * width, 1),
                *gain = make_random(dtype, width, 2), *dy = make_random(dtype, rows * width, 1);
    array *sum = make_output(dtype, rows * width), *y = make_output(dtype, rows * width),
          *inv_rms = make_output(COT_F32, rows), *dgain = make_random(COT_F32, width, 1),
          *dx = accumulate ? make_random(dtype, rows * width, 1) : make_output(dtype, rows * width);
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0, dot = 0, dot_magnitude = 0;
        for (int64_t i = r * width; i < (r + 1) * width; i++) {
            sum->value[i] = rounded(dtype, x->value[i] + branch->value[i]);
            squares += sum->value[i] * sum->value[i];
            dot += dy->value[i] * gain->value[i % width] * sum->value[i];
            dot_magnitude += fabs(dy->value[i] * gain->value[i % width] * sum->value[i]);
        }
        const double scale = 1 / sqrt(squares / (double)width + 1e-6), cube = scale * scale * scale / (double)width;
        add_term(inv_rms, r, scale);
        for (int64_t i = r * width, c = 0; c < width; i++, c++) {
            add_term(y, i, sum->value[i] * scale * gain->value[c]);
            add_term(dx, i, scale * dy->value[i] * gain->value[c]);
            add_term(dx, i, -sum->value[i] * dot * cube);
            dx->magnitude[i] += fabs(sum->value[i]) * (dot_magnitude - fabs(dot)) * cube;
            add_term(dgain, c, dy->value[i] * sum->value[i] * scale);
        }
    }
    const rmsnorm_call forward = {.x = x->device,
                                  .branch = branch->device,
                                  .sum = sum->device,
                                  .gain = gain->device,
                                  .y = y->device,
                                  .inv_rms = inv_rms->device,
                                  .rows = rows,
                                  .width = width,
                                  .eps = 1e-6f};
    assert_ok(device_rmsnorm_forward(queue, dtype, &forward));
    const rmsnorm_backward_call backward = {.x = sum->device,
                                            .gain = gain->device,
                                            .dy = dy->device,
                                            .inv_rms = inv_rms->device,
                                            .dx = dx->device,
                                            .partials = make_scratch(NORM_BLOCKS * width * 4),
                                            .dgain = dgain->device,
                                            .rows = rows,
                                            .width = width,
                                            .accumulate = accumulate};
    assert_ok(device_rmsnorm_backward(queue, dtype, &backward));
    check_array(sum, "rmsnorm sum");
    check_array(inv_rms, "rmsnorm inv_rms");
    check_array(y, "rmsnorm y");
    check_array(dx, "rmsnorm dx");
    check_array(dgain, "rmsnorm dgain");
}

static void check_layernorm(cot_dtype dtype, int64_t rows, int64_t width, bool accumulate)
{
    const array *x = make_random(dtype, rows * width, 1), *gain = make_random(dtype, width, 2),
                *bias = make_random(dtype, width, 1), *dy = make_random(dtype, rows * width, 1);
    array *y = make_output(dtype, rows * width), *mean = make_output(COT_F32, rows),
          *inv_deviation = make_output(COT_F32, rows), *dgain = make_random(COT_F32, width, 1),
          *dbias = make_random(COT_F32, width, 1),
          *dx = accumulate ? make_random(dtype, rows * width, 1) : make_output(dtype, rows * width);
    for (int64_t r = 0; r < rows; r++) {
        const double *xr = x->value + r * width, *dyr = dy->value + r * width;
        double sum = 0, magnitude = 0, squares = 0, g_sum = 0, g_dot = 0, g_magnitude = 0;
        for (int64_t c = 0; c < width; c++)
            sum += xr[c], magnitude += fabs(xr[c]);
        const double centre = sum / (double)width;
        for (int64_t c = 0; c < width; c++)
            squares += (xr[c] - centre) * (xr[c] - centre);
        const double scale = 1 / sqrt(squares / (double)width + 1e-5);
        mean->value[r] = centre, mean->magnitude[r] = magnitude / (double)width;
        add_term(inv_deviation, r, scale);
        for (int64_t c = 0; c < width; c++) {
            const double n = (xr[c] - centre) * scale, g = dyr[c] * gain->value[c];
            g_sum += g, g_dot += g * n, g_magnitude += fabs(g) * (1 + fabs(n));
            add_term(y, r * width + c, n * gain->value[c]);
            add_term(y, r * width + c, bias->value[c]);
            add_term(dgain, c, dyr[c] * n);
            add_term(dbias, c, dyr[c]);
        }
        for (int64_t c = 0; c < width; c++) {
            const double n = (xr[c] - centre) * scale;
            add_term(dx, r * width + c, scale * dyr[c] * gain->value[c]);
            dx->value[r * width + c] -= scale * (g_sum + n * g_dot) / (double)width;
            dx->magnitude[r * width + c] += scale * (1 + fabs(n)) * g_magnitude / (double)width;
        }
    }
    const layernorm_call forward = {.x = x->device,
                                    .gain = gain->device,
                                    .bias = bias->device,
                                    .y = y->device,
                                    .mean = mean->device,
                                    .inv_deviation = inv_deviation->device,
                                    .rows = rows,
                                    .width = width,
                                    .eps = 1e-5f};
    assert_ok(device_layernorm_forward(queue, dtype, &forward));
    const layernorm_backward_call backward = {.x = x->device,
                                              .gain = gain->device,
                                              .dy = dy->device,
                                              .mean = mean->device,
                                              .inv_deviation = inv_deviation->device,
                                              .dx = dx->device,
                                              .partials = make_scratch(2 * NORM_BLOCKS * width * 4),
                                              .dgain = dgain->device,
                                              .dbias = dbias->device,
                                              .rows = rows,
                                              .width = width,
                                              .accumulate = accumulate};
    assert_ok(device_layernorm_backward(queue, dtype, &backward));
    check_array(mean, "layernorm mean");
    check_array(inv_deviation, "layernorm inv_deviation");
    check_array(y, "layernorm y");
    check_array(dx, "layernorm dx");
    check_array(dgain, "layernorm dgain");
    check_array(dbias, "layernorm dbias");
}

static void check_column_sums(cot_dtype dtype, int64_t rows, int64_t width)
{
    const array *x = make_random(dtype, rows * width, 1);
    array *sums = make_random(COT_F32, width, 1);
    for (int64_t i = 0; i < rows * width; i++)
        add_term(sums, i % width, x->value[i]);
    const column_sums_call call = {.x = x->device,
                                   .partials = make_scratch(SUM_BLOCKS * width * 4),
                                   .sums = sums->device,
                                   .rows = rows,
                                   .width = width};
    assert_ok(device_column_sums(queue, dtype, &call));
    check_array(sums, "column_sums");
}

/* Rows of sequences of which a rank holds two pieces. */
static const row_positions pieces = {.first = 3, .split = 4, .second = 10};

/* The embedding with positions, and the gradient of the positions. */
static void check_positions(cot_dtype dtype)
{
    enum { TIME = 7, LENGTH = 13, BATCH = 5, TOKENS = BATCH * TIME };
    int32_t tokens[TOKENS];
    const array *table = make_random(dtype, VOCABULARY * WIDTH, 1), *positions = make_random(dtype, LENGTH * WIDTH, 1),
                *dy = make_random(dtype, TOKENS * WIDTH, 1);
    array *y = make_output(dtype, TOKENS * WIDTH), *dtable = make_random(COT_F32, LENGTH * WIDTH, 1);
    for (int r = 0; r < TOKENS; r++)
        tokens[r] = (int32_t)random_int(&seed, 0, VOCABULARY - 1);
    for (int64_t i = 0; i < TOKENS * WIDTH; i++) {
        add_term(y, i, table->value[tokens[i / WIDTH] * WIDTH + i % WIDTH]);
        const int64_t position = POSITION_OF(pieces, i / WIDTH % TIME);
        add_term(y, i, positions->value[position * WIDTH + i % WIDTH]);
        add_term(dtable, position * WIDTH + i % WIDTH, dy->value[i]);
    }
    const embedding_call forward = {.tokens = copy_ints(tokens, TOKENS),
                                    .table = table->device,
                                    .table_of_positions = positions->device,
                                    .y = y->device,
                                    .rows = TOKENS,
                                    .width = WIDTH,
                                    .time = TIME,
                                    .positions = pieces};
    assert_ok(device_embedding_forward(queue, dtype, &forward));
    const positions_backward_call backward = {
        .dy = dy->device, .dtable = dtable->device, .rows = TOKENS, .width = WIDTH, .time = TIME, .positions = pieces};
    assert_ok(device_positions_backward(queue, dtype, &backward));
    check_array(y, "embedding with positions y");
    check_array(dtable, "positions dtable");
}

static void check_gelu(cot_dtype dtype)
{
    const int64_t count = 37 * WIDTH;
    const array *x = make_random(dtype, count, 6), *dy = make_random(dtype, count, 1);
    array *y = make_output(dtype, count), *dx = make_output(dtype, count);
    x->value[0] = dtype == COT_F16 ? -6e4 : -1e30; /* exp overflows: y is -0 */
    copy_to_device(x);
    for (int64_t i = 0; i < count; i++) {
        const double v = x->value[i], u = 1.5957691216057308 * (v + 0.044715 * v * v * v), s = 1 / (1 + exp(-u)),
                     slope = 1.5957691216057308 * (1 + 3 * 0.044715 * v * v);
        const double relative = 1 + fabs(u) * (1 - s); /* the sigmoid's relative error grows with its argument */
        y->value[i] = s == 0 ? 0 : v * s, y->magnitude[i] = s == 0 ? 0 : fabs(v) * s * relative;
        dx->value[i] = s == 0 ? 0 : dy->value[i] * (s + v * s * (1 - s) * slope);
        dx->magnitude[i] = s == 0 ? 0 : fabs(dy->value[i]) * relative * (s + fabs(v) * s * slope); /* of 1 - s: 1 */
    }
    const gelu_call forward = {.x = x->device, .y = y->device, .count = count},
                    backward = {.x = x->device, .dy = dy->device, .y = dx->device, .count = count};
    assert_ok(device_gelu_forward(queue, dtype, &forward));
    assert_ok(device_gelu_backward(queue, dtype, &backward));
    check_array(y, "gelu y");
    check_array(dx, "gelu dx");
}

/* Three heads of 32 channels are rotated; the last 8 channels of a row are not. */
static void check_rope(cot_dtype dtype, bool backward)
{
    enum { TIME = 7, TOKENS = 13, BATCH = 2, HEADS = 3, SIZE = 32, LENGTH = HEADS * SIZE + 8 };
    array *x = make_random(dtype, BATCH * TIME * LENGTH, 1), *rotations = make_array(COT_F32, TOKENS * SIZE);
    for (int64_t i = 0; i < TOKENS * SIZE / 2; i++) {
        const double angle = (double)(i / (SIZE / 2)) * pow(10000, -2.0 * (double)(i % (SIZE / 2)) / SIZE);
        rotations->value[2 * i] = cos(angle), rotations->value[2 * i + 1] = sin(angle);
    }
    copy_to_device(rotations);
    for (int64_t row = 0; row < BATCH * TIME; row++)
        for (int64_t i = 0; i < HEADS * SIZE / 2; i++) {
            const int64_t j = i % (SIZE / 2), at = row * LENGTH + i / (SIZE / 2) * SIZE + j;
            const double *rotation = rotations->value + 2 * (POSITION_OF(pieces, row % TIME) * (SIZE / 2) + j);
            const double c = rotation[0], s = backward ? -rotation[1] : rotation[1];
            const double a = x->value[at], b = x->value[at + SIZE / 2];
            x->value[at] = a * c - b * s, x->value[at + SIZE / 2] = a * s + b * c;
            x->magnitude[at] = fabs(a * c) + fabs(b * s), x->magnitude[at + SIZE / 2] = fabs(a * s) + fabs(b * c);
        }
    const rope_call call = {.x = x->device,
                            .rotations = rotations->device,
                            .rows = BATCH * TIME,
                            .time = TIME,
                            .positions = pieces,
                            .heads = HEADS,
                            .size = SIZE,
                            .row_length = LENGTH,
                            .backward = backward};
    assert_ok(device_rope(queue, dtype, &call));
    check_array(x, "rope x");
}

/* a and b are the halves of the rows of one array, as the product of the layer before writes them. */
static void check_gate(cot_dtype dtype, bool silu)
{
    const int64_t rows = 37, inner = WIDTH;
    const int size = (int)cot_dtype_size(dtype);
    const array *mixed = make_random(dtype, rows * 2 * inner, 4), *dy = make_random(dtype, rows * inner, 1);
    array *y = make_output(dtype, rows * inner), *dmixed = make_output(dtype, rows * 2 * inner);
    for (int64_t i = 0; i < rows * inner; i++) {
        const int64_t at = i / inner * 2 * inner + i % inner;
        const double a = mixed->value[at], b = mixed->value[at + inner], s = silu ? 1 / (1 + exp(-a)) : 1;
        add_term(y, i, a * s * b);
        add_term(dmixed, at, dy->value[i] * b * s);
        if (silu)
            add_term(dmixed, at, dy->value[i] * b * s * a * (1 - s));
        add_term(dmixed, at + inner, dy->value[i] * a * s);
    }
    char *half = (char *)mixed->device + inner * size, *dhalf = (char *)dmixed->device + inner * size;
    const gate_call forward = {.a = mixed->device,
                               .b = half,
                               .y = y->device,
                               .rows = rows,
                               .inner = inner,
                               .a_stride = 2 * inner,
                               .b_stride = 2 * inner,
                               .silu = silu};
    assert_ok(device_gate_forward(queue, dtype, &forward));
    const gate_backward_call backward = {.a = mixed->device,
                                         .b = half,
                                         .dy = dy->device,
                                         .da = dmixed->device,
                                         .db = dhalf,
                                         .rows = rows,
                                         .inner = inner,
                                         .a_stride = 2 * inner,
                                         .b_stride = 2 * inner,
                                         .da_stride = 2 * inner,
                                         .db_stride = 2 * inner,
                                         .silu = silu};
    assert_ok(device_gate_backward(queue, dtype, &backward));
    check_array(y, "gate y");
    check_array(dmixed, "gate dmixed");
}

static void check_cross_entropy(cot_dtype dtype, int64_t classes, int64_t row_length, bool gradient)
{
    const int64_t rows = 9;
    const double scale = 0.25;
    int32_t targets[9];
    array *logits = make_random(dtype, rows * row_length, 8), *row_loss = make_output(COT_F32, rows),
          *loss = make_random(COT_F64, 1, 1);
    for (int64_t r = 0; r < rows; r++) {
        double *x = logits->value + r * row_length, *m = logits->magnitude + r * row_length, sum = 0;
        targets[r] = r == 0 ? (int32_t)classes - 1 : (int32_t)random_int(&seed, 0, classes - 1);
        for (int64_t i = 0; i < classes; i++)
            sum += exp(x[i]);
        row_loss->value[r] = log(sum) - x[targets[r]];
        row_loss->magnitude[r] = fabs(log(sum)) + 16; /* the loss is a difference of logits of up to 8 */
        add_term(loss, 0, row_loss->value[r] * scale);
        loss->magnitude[0] += row_loss->magnitude[r];
        for (int64_t i = 0; gradient && i < row_length; i++) {
            const double p = i < classes ? exp(x[i]) / sum * scale : 0, onehot = i == targets[r] ? scale : 0;
            x[i] = p - onehot;
            m[i] = 16 * p + onehot; /* the relative error of the exponential grows with its argument */
        }
    }
    const cross_entropy_call call = {.logits = logits->device,
                                     .targets = copy_ints(targets, rows),
                                     .row_loss = row_loss->device,
                                     .rows = rows,
                                     .classes = classes,
                                     .row_length = row_length,
                                     .scale = (float)scale,
                                     .gradient = gradient};
    assert_ok(device_cross_entropy(queue, dtype, &call));
    const mean_loss_call mean = {.row_loss = row_loss->device, .loss = loss->device, .rows = rows, .scale = scale};
    assert_ok(device_mean_loss(queue, &mean));
    check_array(row_loss, "cross_entropy row_loss");
    check_array(logits, "cross_entropy logits");
    check_array(loss, "mean_loss");
}

static void check_optimizer(cot_dtype dtype, double clip)
{
    const int64_t count = 2 * SQUARES_CHUNK + 1028, decaying = 1 << 13;
    const double beta1 = (double)0.9f, beta2 = (double)0.98f, eps = (double)1e-8f, unscale = 0.5;
    float rates[3] = {3e-3f, 1.5f, 1e-4f};
    array *value = make_output(dtype, count), *master = make_random(COT_F32, count, 1),
          *m1 = make_random(COT_F32, count, 0.1), *m2 = make_array(COT_F32, count), *norm = make_output(COT_F64, 2);
    const array *gradient = make_random(COT_F32, count, 1);
    void *device_rates = make_scratch(sizeof rates);
    assert_ok(cot_cuda_copy_to_device(queue, device_rates, rates, sizeof rates));
    double squares = 0;
    for (int64_t i = 0; i < count; i++) {
        m2->value[i] = 0.1 + 0.1 * random_real(&seed);
        squares += gradient->value[i] * gradient->value[i];
    }
    copy_to_device(m2);
    norm->value[0] = norm->magnitude[0] = sqrt(squares) * unscale;
    norm->value[1] = norm->magnitude[1] = clip > 0 && norm->value[0] > clip ? unscale * clip / norm->value[0] : unscale;
    for (int64_t i = 0; i < count; i++) {
        const double g = gradient->value[i] * norm->value[1], old = master->value[i], old_m1 = m1->value[i];
        m1->value[i] = beta1 * old_m1 + (1 - beta1) * g;
        m1->magnitude[i] = fabs(beta1 * old_m1) + fabs((1 - beta1) * g);
        m2->value[i] = m2->magnitude[i] = beta2 * m2->value[i] + (1 - beta2) * g * g;
        const double factor = (double)rates[0] / (sqrt(m2->value[i] * (double)rates[1]) + eps),
                     decay = i < decaying ? (double)rates[2] * old : 0;
        master->value[i] = old - (m1->value[i] * factor + decay);
        master->magnitude[i] = fabs(old) + m1->magnitude[i] * factor + fabs(decay);
        value->value[i] = master->value[i], value->magnitude[i] = master->magnitude[i];
    }
    const gradient_norm_call norm_call = {.gradients = gradient->device,
                                          .partials = make_scratch(8 * gradient_norm_partial_count(count)),
                                          .norm = norm->device,
                                          .count = count,
                                          .unscale = unscale,
                                          .clip = clip};
    assert_ok(device_gradient_norm(queue, &norm_call));
    const adamw_call call = {.value = dtype == COT_F32 ? master->device : value->device,
                             .master = dtype == COT_F32 ? NULL : master->device,
                             .gradient = gradient->device,
                             .moment1 = m1->device,
                             .moment2 = m2->device,
                             .norm = norm->device,
                             .rates = device_rates,
                             .count = count,
                             .decaying = decaying,
                             .beta1 = 0.9f,
                             .beta2 = 0.98f,
                             .eps = 1e-8f};
    assert_ok(device_adamw(queue, dtype, &call));
    check_array(norm, "gradient norm");
    check_array(m1, "adamw m1");
    check_array(m2, "adamw m2");
    check_array(master, "adamw master");
    if (dtype != COT_F32)
        check_array(value, "adamw value");
}

/* ---- the tests ---------------------------------------------------------------------------------------- */

static void embedding_sums_rows_of_each_token(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(dtypes); i++, free_arrays())
        check_embedding(dtypes[i]);
}

static void rmsnorm_matches_its_formula(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(dtypes); i++, free_arrays()) {
        check_rmsnorm(dtypes[i], 37, WIDTH, false);
        free_arrays();
        check_rmsnorm(dtypes[i], 5, 1032, true); /* several vectors per lane */
    }
    check_rmsnorm(COT_BF16, 2100, 8, true); /* blocks of 8 rows */
    free_arrays();
    check_rmsnorm(COT_F32, 5, 4096, false); /* two warps a block */
    free_arrays();
    check_rmsnorm(COT_F32, 3, 8192, false); /* one warp a block */
}

static void layernorm_matches_its_formula(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(dtypes); i++, free_arrays()) {
        check_layernorm(dtypes[i], 37, WIDTH, false);
        free_arrays();
        check_layernorm(dtypes[i], 5, 1032, true); /* several vectors per lane */
    }
    check_layernorm(COT_BF16, 2100, 8, true); /* blocks of 8 rows */
    free_arrays();
    check_layernorm(COT_F32, 5, 2048, false); /* two warps a block */
    free_arrays();
    check_layernorm(COT_F32, 3, 6144, false); /* one warp a block */
}

static void columns_are_summed(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(dtypes); i++, free_arrays()) {
        check_column_sums(dtypes[i], 3, 8);    /* most lanes and warps have nothing */
        check_column_sums(dtypes[i], 37, 520); /* several blocks of columns, the last partial */
    }
    check_column_sums(COT_BF16, 4200, 16); /* blocks of 16 rows, the last partial */
}

static void positions_are_added_and_summed(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(dtypes); i++, free_arrays())
        check_positions(dtypes[i]);
}

static void gelu_matches_its_formula(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(dtypes); i++, free_arrays())
        check_gelu(dtypes[i]);
}

static void rope_rotates_both_ways(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(dtypes); i++, free_arrays()) {
        check_rope(dtypes[i], false);
        check_rope(dtypes[i], true);
    }
}

static void gate_matches_its_formula(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(dtypes); i++, free_arrays()) {
        check_gate(dtypes[i], false);
        check_gate(dtypes[i], true);
    }
}

static void cross_entropy_replaces_logits_by_their_gradient(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(dtypes); i++, free_arrays()) {
        check_cross_entropy(dtypes[i], 5, 8, true); /* most threads have no class */
        check_cross_entropy(dtypes[i], 2501, 2512, true);
        check_cross_entropy(dtypes[i], 64, 64, false);
    }
}

static void adamw_updates_masters_and_values(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(dtypes); i++, free_arrays()) {
        check_optimizer(dtypes[i], 1);
        free_arrays();
        check_optimizer(dtypes[i], 0);
    }
}

/* Sums of streams and copies to streams. */
static void streams_are_summed_and_filled(void **state)
{
    (void)state;
    enum { TOKENS = 5, STREAMS = 3, WIDTH_OF_STREAM = 24 };
    for (size_t d = 0; d < COUNT(dtypes); d++, free_arrays()) {
        const array *x = make_random(dtypes[d], TOKENS * WIDTH_OF_STREAM, 1);
        array *y = make_random(dtypes[d], TOKENS * WIDTH_OF_STREAM, 1), *sum = make_output(dtypes[d], y->count),
              *streams = make_output(dtypes[d], STREAMS * y->count);
        const streams_call spread = {x->device, streams->device, TOKENS, STREAMS, WIDTH_OF_STREAM},
                           collect = {sum->device, streams->device, TOKENS, STREAMS, WIDTH_OF_STREAM};
        const add_call add = {x->device, y->device, y->count};
        assert_ok(device_spread(queue, dtypes[d], &spread));
        assert_ok(device_collect(queue, dtypes[d], &collect));
        assert_ok(device_add(queue, dtypes[d], &add));
        for (int64_t i = 0; i < y->count; i++) {
            add_term(y, i, x->value[i]);
            for (int64_t s = 0; s < STREAMS; s++) {
                add_term(sum, i, x->value[i]);
                add_term(streams, (i / WIDTH_OF_STREAM * STREAMS + s) * WIDTH_OF_STREAM + i % WIDTH_OF_STREAM,
                         x->value[i]);
            }
        }
        check_array(streams, "spread");
        check_array(sum, "collect");
        check_array(y, "add");
    }
}

/* d = op(a) op(b) + c + bias, of each dtype, with results of the same dtype and of float32. */
static void check_product(cublaslt *l, cot_dtype in, cot_dtype out, int which)
{
    enum { M = 24, N = 40, K = 56 };
    const bool transpose_a = which & 1, transpose_b = which & 2, adds = which & 4, has_bias = which & 8;
    const array *a = make_random(in, M * K, 1), *b = make_random(in, K * N, 1), *c = make_random(out, M * N, 1),
                *bias = make_random(out, N, 1);
    array *d = make_output(out, M * N);
    const cublaslt_product product = {.m = M,
                                      .n = N,
                                      .k = K,
                                      .transpose_a = transpose_a,
                                      .transpose_b = transpose_b,
                                      .in = in,
                                      .out = out,
                                      .a = a->device,
                                      .b = b->device,
                                      .c = adds ? c->device : NULL,
                                      .bias = has_bias ? bias->device : NULL,
                                      .d = d->device};
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < N; j++) {
            if (adds)
                add_term(d, i * N + j, c->value[i * N + j]);
            if (has_bias)
                add_term(d, i * N + j, bias->value[j]);
            for (int64_t k = 0; k < K; k++)
                add_term(d, i * N + j,
                         a->value[transpose_a ? k * M + i : i * K + k] * b->value[transpose_b ? j * K + k : k * N + j]);
        }
    assert_ok(cublaslt_multiply(l, &product));
    check_array(d, "product");
    free_arrays();
}

static void products_match_their_formula(void **state)
{
    (void)state;
    cublaslt *l;
    void *workspace;
    assert_ok(cot_cuda_alloc(queue, CUBLASLT_WORKSPACE, &workspace));
    const cot_status status = cublaslt_open(queue, workspace, &l);
    if (status == COT_NO_DEVICE) {
        print_message("skipped: %s\n", cot_error_message());
        cot_cuda_free(queue, workspace);
        skip();
    }
    assert_ok(status);
    for (size_t i = 0; i < COUNT(dtypes); i++)
        for (int which = 0; which < 16; which++) {
            check_product(l, dtypes[i], dtypes[i], which);
            if (which < 8) /* gradients of weights have no bias */
                check_product(l, dtypes[i], COT_F32, which);
        }
    cublaslt_close(l);
    cot_cuda_free(queue, workspace);
}

static void partial_vectors_are_refused(void **state)
{
    (void)state;
    const rmsnorm_call norm = {.rows = 1, .width = 12};
    assert_fails(device_rmsnorm_forward(queue, COT_BF16, &norm), COT_INVALID_SHAPE,
                 "rmsnorm_forward: width is 12, expected a positive multiple of 8");
    const layernorm_backward_call layernorm = {.rows = 1, .width = 6152};
    assert_fails(device_layernorm_backward(queue, COT_F32, &layernorm), COT_INVALID_SHAPE,
                 "layernorm_backward: width is 6152, expected at most 6144");
    const column_sums_call sums = {.rows = 1, .width = 12};
    assert_fails(device_column_sums(queue, COT_F16, &sums), COT_INVALID_SHAPE,
                 "column_sums: width is 12, expected a positive multiple of 8");
    const gelu_call gelu = {.count = 3};
    assert_fails(device_gelu_forward(queue, COT_F32, &gelu), COT_INVALID_SHAPE,
                 "gelu_forward: count is 3, expected a positive multiple of 4");
    const rope_call rope = {.rows = 1, .time = 1, .heads = 1, .size = 20, .row_length = 24};
    assert_fails(device_rope(queue, COT_F16, &rope), COT_INVALID_SHAPE,
                 "rope: size / 2 is 10, expected a positive multiple of 8");
    const cross_entropy_call loss = {.rows = 1, .classes = 9, .row_length = 8};
    assert_fails(device_cross_entropy(queue, COT_F32, &loss), COT_INVALID_SHAPE,
                 "cross_entropy: classes is 9, expected 1 to row_length = 8");
    const embedding_call embedding = {.rows = 1, .width = 8};
    assert_fails(device_embedding_forward(queue, COT_F64, &embedding), COT_INVALID_DTYPE,
                 "embedding_forward: dtype is f64, expected f32, f16 or bf16");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, end)

int main(void)
{
    const int none = open_device_queue(&queue);
    if (none != 0)
        return none;
    if (device_layers_load(queue) != COT_OK) {
        fprintf(stderr, "%s\n", cot_error_message());
        return 1;
    }
    const struct CMUnitTest tests[] = {
        TEST(embedding_sums_rows_of_each_token),
        TEST(rmsnorm_matches_its_formula),
        TEST(layernorm_matches_its_formula),
        TEST(columns_are_summed),
        TEST(positions_are_added_and_summed),
        TEST(gelu_matches_its_formula),
        TEST(rope_rotates_both_ways),
        TEST(gate_matches_its_formula),
        TEST(cross_entropy_replaces_logits_by_their_gradient),
        TEST(adamw_updates_masters_and_values),
        TEST(streams_are_summed_and_filled),
        TEST(products_match_their_formula),
        TEST(partial_vectors_are_refused),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cot_queue_destroy(queue);
    return failed;
}
