/* SPDX-License-Identifier: Apache-2.0 */
#include "layers.h"

#include <stdlib.h>

static const real NORM_EPS = (real)1e-6, LAYERNORM_EPS = (real)1e-5;

/* Sums over rows go over blocks of ROW_BLOCK rows first, then over the blocks. */
enum { ROW_BLOCK = 64 };

/* ---- embedding ---------------------------------------------------------------------------------------- */

void embedding_forward(int64_t rows, int64_t width, const int32_t *tokens, const real *table, real *y)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++)
        memcpy(y + r * width, table + tokens[r] * width, (size_t)width * sizeof(real));
}

/* An entry of `order` has the token in its upper and the row in its lower 32 bits. */
static int32_t token_of(int64_t entry)
{
    return (int32_t)(entry >> 32);
}

static int by_token_and_row(const void *a, const void *b)
{
    const int64_t first = *(const int64_t *)a, second = *(const int64_t *)b;
    return (first > second) - (first < second);
}

/* The first entry of each token sums the token's rows, in order. */
void embedding_backward(int64_t rows, int64_t width, int64_t vocabulary, const int32_t *tokens, const real *dy,
                        int64_t *order, real *dtable, matrix_store store)
{
    for (int64_t r = 0; r < rows; r++)
        order[r] = (int64_t)tokens[r] << 32 | r;
    qsort(order, (size_t)rows, sizeof *order, by_token_and_row);
    if (store == MATRIX_SET)
        memset(dtable, 0, (size_t)(vocabulary * width) * sizeof(real));
#pragma omp parallel for schedule(dynamic, 16)
    for (int64_t first = 0; first < rows; first++) {
        const int32_t token = token_of(order[first]);
        if (first > 0 && token_of(order[first - 1]) == token)
            continue;
        real *sum = dtable + token * width;
        for (int64_t i = first; i < rows && token_of(order[i]) == token; i++) {
            const real *row = dy + (order[i] & UINT32_MAX) * width;
            for (int64_t c = 0; c < width; c++)
                sum[c] += row[c];
        }
    }
}

/* ---- RMSNorm ------------------------------------------------------------------------------------------ */

void rmsnorm_forward(int64_t rows, int64_t width, const real *x, const real *gain, real *y, real *inv_rms)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const real *in = x + r * width;
        real *out = y + r * width;
        real squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t c = 0; c < width; c++)
            squares += in[c] * in[c];
        const real scale = 1 / real_sqrt(squares / (real)width + NORM_EPS);
        inv_rms[r] = scale;
        for (int64_t c = 0; c < width; c++)
            out[c] = in[c] * scale * gain[c];
    }
}

static int64_t row_blocks(int64_t rows)
{
    return (rows + ROW_BLOCK - 1) / ROW_BLOCK;
}

int64_t rmsnorm_partial_count(int64_t rows, int64_t width)
{
    return row_blocks(rows) * width;
}

/* sums[c] = the sum over the blocks of partial[block][c], in order. */
static void add_partials(int64_t blocks, int64_t stride, const real *partial, int64_t width, real *sums,
                         matrix_store store)
{
    if (store == MATRIX_SET)
        memset(sums, 0, (size_t)width * sizeof(real));
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t c = 0; c < width; c++)
            sums[c] += partial[block * stride + c];
}

static void rmsnorm_backward_row(int64_t width, const real *x, const real *gain, real inv_rms, const real *dy, real *dx,
                                 real *dgain)
{
    real dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t c = 0; c < width; c++)
        dot += dy[c] * gain[c] * x[c];
    const real along_x = dot * inv_rms * inv_rms / (real)width;
    for (int64_t c = 0; c < width; c++) {
        dx[c] += inv_rms * (dy[c] * gain[c] - x[c] * along_x);
        dgain[c] += dy[c] * x[c] * inv_rms;
    }
}

void rmsnorm_backward(int64_t rows, int64_t width, const real *x, const real *gain, const real *inv_rms, const real *dy,
                      real *partial, real *dx, real *dgain, matrix_store store)
{
    const int64_t blocks = row_blocks(rows);
#pragma omp parallel for
    for (int64_t block = 0; block < blocks; block++) {
        real *sum = partial + block * width;
        memset(sum, 0, (size_t)width * sizeof(real));
        const int64_t end = (block + 1) * ROW_BLOCK < rows ? (block + 1) * ROW_BLOCK : rows;
        for (int64_t r = block * ROW_BLOCK; r < end; r++)
            rmsnorm_backward_row(width, x + r * width, gain, inv_rms[r], dy + r * width, dx + r * width, sum);
    }
    add_partials(blocks, width, partial, width, dgain, store);
}

/* ---- LayerNorm and biases ----------------------------------------------------------------------------- */

void layernorm_forward(int64_t rows, int64_t width, const real *x, const real *gain, const real *bias, real *y,
                       real *mean, real *inv_deviation)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const real *in = x + r * width;
        real *out = y + r * width;
        real sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < width; c++)
            sum += in[c];
        const real centre = sum / (real)width;
#pragma omp simd reduction(+ : squares)
        for (int64_t c = 0; c < width; c++)
            squares += (in[c] - centre) * (in[c] - centre);
        const real scale = 1 / real_sqrt(squares / (real)width + LAYERNORM_EPS);
        mean[r] = centre;
        inv_deviation[r] = scale;
        for (int64_t c = 0; c < width; c++)
            out[c] = (in[c] - centre) * scale * gain[c] + bias[c];
    }
}

static void layernorm_backward_row(int64_t width, const real *x, const real *gain, real mean, real inv_deviation,
                                   const real *dy, real *dx, real *dgain, real *dbias)
{
    real sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
    for (int64_t c = 0; c < width; c++) {
        sum += dy[c] * gain[c];
        dot += dy[c] * gain[c] * ((x[c] - mean) * inv_deviation);
    }
    const real along_one = sum / (real)width, along_n = dot / (real)width;
    for (int64_t c = 0; c < width; c++) {
        const real n = (x[c] - mean) * inv_deviation;
        dx[c] += inv_deviation * (dy[c] * gain[c] - along_one - n * along_n);
        dgain[c] += dy[c] * n;
        dbias[c] += dy[c];
    }
}

void layernorm_backward(int64_t rows, int64_t width, const real *x, const real *gain, const real *mean,
                        const real *inv_deviation, const real *dy, real *partial, real *dx, real *dgain, real *dbias,
                        matrix_store store)
{
    const int64_t blocks = row_blocks(rows);
#pragma omp parallel for
    for (int64_t block = 0; block < blocks; block++) {
        real *sum = partial + block * 2 * width; /* of dgain, then of dbias */
        memset(sum, 0, (size_t)(2 * width) * sizeof(real));
        const int64_t end = (block + 1) * ROW_BLOCK < rows ? (block + 1) * ROW_BLOCK : rows;
        for (int64_t r = block * ROW_BLOCK; r < end; r++)
            layernorm_backward_row(width, x + r * width, gain, mean[r], inv_deviation[r], dy + r * width,
                                   dx + r * width, sum, sum + width);
    }
    add_partials(blocks, 2 * width, partial, width, dgain, store);
    add_partials(blocks, 2 * width, partial + width, width, dbias, store);
}

void column_sums(int64_t rows, int64_t width, const real *x, real *partial, real *sums, matrix_store store)
{
    const int64_t blocks = row_blocks(rows);
#pragma omp parallel for
    for (int64_t block = 0; block < blocks; block++) {
        real *sum = partial + block * width;
        memset(sum, 0, (size_t)width * sizeof(real));
        const int64_t end = (block + 1) * ROW_BLOCK < rows ? (block + 1) * ROW_BLOCK : rows;
        for (int64_t r = block * ROW_BLOCK; r < end; r++)
            for (int64_t c = 0; c < width; c++)
                sum[c] += x[r * width + c];
    }
    add_partials(blocks, width, partial, width, sums, store);
}

/* ---- learned positions -------------------------------------------------------------------------------- */

void positions_forward(int64_t rows, int64_t time, row_positions positions, int64_t width, const real *table, real *x)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const real *position = table + POSITION_OF(positions, r % time) * width;
        for (int64_t c = 0; c < width; c++)
            x[r * width + c] += position[c];
    }
}

void positions_backward(int64_t rows, int64_t time, row_positions positions, int64_t width, int64_t length,
                        const real *dy, real *dtable, matrix_store store)
{
    if (store == MATRIX_SET)
        memset(dtable, 0, (size_t)(length * width) * sizeof(real));
#pragma omp parallel for
    for (int64_t t = 0; t < time; t++) {
        real *sum = dtable + POSITION_OF(positions, t) * width;
        for (int64_t r = t; r < rows; r += time)
            for (int64_t c = 0; c < width; c++)
                sum[c] += dy[r * width + c];
    }
}

/* ---- rotary positions --------------------------------------------------------------------------------- */

static void rope_row(double position, int64_t heads, int64_t size, double direction, real *x)
{
    const int64_t half = size / 2; /* with an odd size the last channel does not change */
    const double frequency_ratio = pow(10000, -2.0 / (double)size);
    double angle = direction * position;
    for (int64_t j = 0; j < half; j++, angle *= frequency_ratio) {
        const real c = (real)cos(angle), s = (real)sin(angle);
        for (real *head = x + j; head < x + heads * size; head += size) {
            const real a = head[0], b = head[half];
            head[0] = a * c - b * s;
            head[half] = a * s + b * c;
        }
    }
}

void rope(int64_t rows, int64_t time, row_positions positions, int64_t heads, int64_t size, int64_t row_length,
          rope_direction direction, real *x)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++)
        rope_row((double)POSITION_OF(positions, r % time), heads, size, direction, x + r * row_length);
}

/* ---- gate --------------------------------------------------------------------------------------------- */

void gate_forward(int64_t rows, int64_t inner, const real *c, const real *mixed, real *y)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const real *gate = mixed + (2 * r + 1) * inner;
        for (int64_t i = 0; i < inner; i++)
            y[r * inner + i] = c[r * inner + i] * gate[i];
    }
}

void gate_backward(int64_t rows, int64_t inner, const real *c, const real *mixed, real *dy, real *dmixed)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const real *gate = mixed + (2 * r + 1) * inner, *value = c + r * inner;
        real *dgate = dmixed + (2 * r + 1) * inner, *d = dy + r * inner;
        for (int64_t i = 0; i < inner; i++) {
            dgate[i] = d[i] * value[i];
            d[i] *= gate[i];
        }
    }
}

static real sigmoid(real x)
{
    return 1 / (1 + real_exp(-x));
}

void swiglu_forward(int64_t rows, int64_t inner, const real *mixed, real *y)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const real *a = mixed + 2 * r * inner, *b = a + inner;
        for (int64_t i = 0; i < inner; i++)
            y[r * inner + i] = a[i] * sigmoid(a[i]) * b[i];
    }
}

void swiglu_backward(int64_t rows, int64_t inner, const real *mixed, const real *dy, real *dmixed)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const real *a = mixed + 2 * r * inner, *b = a + inner, *d = dy + r * inner;
        real *da = dmixed + 2 * r * inner, *db = da + inner;
        for (int64_t i = 0; i < inner; i++) {
            const real s = sigmoid(a[i]);
            da[i] = d[i] * b[i] * s * (1 + a[i] * (1 - s));
            db[i] = d[i] * a[i] * s;
        }
    }
}

static const real GELU_SLOPE = (real)1.5957691216057308 /* 2 sqrt(2/pi) */, GELU_CUBIC = (real)0.044715;

void gelu_forward(int64_t count, const real *x, real *y)
{
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++)
        y[i] = x[i] * sigmoid(GELU_SLOPE * (x[i] + GELU_CUBIC * x[i] * x[i] * x[i]));
}

void gelu_backward(int64_t count, const real *x, const real *dy, real *dx)
{
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++) {
        /* Beyond 32, s is 0 or 1, and the limit keeps x^2 finite. The factor x[i] passes a NaN on. */
        const real z = x[i] > 32 ? 32 : x[i] < -32 ? -32 : x[i];
        const real s = sigmoid(GELU_SLOPE * (z + GELU_CUBIC * z * z * z));
        const real slope = GELU_SLOPE * (1 + 3 * GELU_CUBIC * z * z);
        dx[i] = dy[i] * (s + x[i] * s * (1 - s) * slope);
    }
}

/* ---- cross-entropy ------------------------------------------------------------------------------------ */

static double cross_entropy_row(int64_t classes, int target, real *logits, real scale, bool gradient)
{
    real max_logit = logits[0];
    for (int64_t v = 1; v < classes; v++)
        max_logit = logits[v] > max_logit ? logits[v] : max_logit;
    const double shifted_target = (double)(logits[target] - max_logit);
    double sum = 0;
    for (int64_t v = 0; v < classes; v++) {
        const real e = real_exp(logits[v] - max_logit);
        sum += (double)e;
        if (gradient)
            logits[v] = e;
    }
    if (gradient) {
        const real factor = (real)((double)scale / sum);
        for (int64_t v = 0; v < classes; v++)
            logits[v] *= factor;
        logits[target] -= scale;
    }
    return log(sum) - shifted_target;
}

double cross_entropy(int64_t rows, int64_t mean_rows, int64_t classes, const int32_t *targets, real *logits,
                     double *row_loss, bool gradient)
{
    const real scale = 1 / (real)mean_rows;
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++)
        row_loss[r] = cross_entropy_row(classes, targets[r], logits + r * classes, scale, gradient);
    double sum = 0;
    for (int64_t r = 0; r < rows; r++)
        sum += row_loss[r];
    return sum / (double)mean_rows;
}
