/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_scalar.c: the formulas of cotangent/dropout.h as plain loops, for any strides, dtypes and source of the
 * mask. It is the baseline for the accuracy and speed of the other kernels.
 *
 * The file is compiled twice: with float arithmetic (f32, f16, bf16), and with COT_SCALAR_F64 and double (f64).
 * An item of the forward is a row. An item of the backward is a strip of columns of all rows, so that dbias is summed
 * in a fixed order. Both loop over groups of 8 columns, whose mask is one byte. */
#include "core/float16.h"
#include "ops/dropout/dropout_problem.h"

#include <math.h>

#ifdef COT_SCALAR_F64
typedef double real;
#define NAME(stem) stem##_f64
#define EXP exp
#define ERFC erfc
#else
typedef float real;
#define NAME(stem) stem
#define EXP expf
#define ERFC erfcf
#endif

cot_status NAME(dropout_fwd_scalar)(cot_queue *, const void *, void *);
cot_status NAME(dropout_bwd_scalar)(cot_queue *, const void *, void *);

enum { GROUP = COT_DROPOUT_GROUP };

static inline real load_element(const cot_tensor *t, int64_t row, int64_t d)
{
    return (real)cot_load_f64(t->data, t->dtype, row + d * t->stride[t->rank - 1]);
}

static inline void store_element(const cot_tensor *t, int64_t row, int64_t d, real value)
{
    cot_store_f64(t->data, t->dtype, row + d * t->stride[t->rank - 1], value);
}

/* Without a bias the value is -0, so that adding it keeps the sign of a zero. */
static inline real load_bias(const cot_tensor *t, int64_t i)
{
    return cot_is_present(t) ? (real)cot_load_f64(t->data, t->dtype, i * t->stride[0]) : (real)-0.0;
}

/* ---- activations -------------------------------------------------------------------------------------- */

/* sigma(z), and *complement = sigma(-z) = 1 - sigma(z). The subtraction would leave 10 correct bits at z = 10. The
 * argument of exp is never positive, so nothing overflows. */
static inline real sigmoid(real z, real *complement)
{
    const real e = EXP(-(z < 0 ? -z : z)), larger = 1 / (1 + e);
    *complement = z < 0 ? larger : e * larger;
    return z < 0 ? e * larger : larger;
}

/* (1 + tanh(u))/2 = sigma(2u): GELU_TANH is z * sigma(w(z)), w(z) = 2 sqrt(2/pi) (z + 0.044715 z^3). */
#define GELU_LINEAR ((real)1.5957691216057307)
#define GELU_CUBIC ((real)0.07135481627260024)

static inline real normal_distribution(real z)
{
    return ERFC(z * (real)-0.70710678118654752440) / 2;
}

static inline real normal_density(real z)
{
    return (real)0.39894228040143267794 * EXP(-z * z / 2);
}

static real activate(cot_activation activation, real z)
{
    real complement;
    if (z == -INFINITY && activation != COT_ACTIVATION_NONE)
        return 0; /* the limit, as in the vector kernels, where z * sigma(z) would be NaN */
    switch (activation) {
    case COT_ACTIVATION_RELU: return z > 0 ? z : z * 0; /* NaN stays NaN */
    case COT_ACTIVATION_SILU: return z * sigmoid(z, &complement);
    case COT_ACTIVATION_GELU_TANH: return z * sigmoid(z * (GELU_LINEAR + GELU_CUBIC * z * z), &complement);
    case COT_ACTIVATION_GELU_ERF: return z * normal_distribution(z);
    default: return z;
    }
}

static real activation_slope(cot_activation activation, real z)
{
    real complement, s;
    if (isinf(z) && activation != COT_ACTIVATION_NONE)
        return z > 0;
    switch (activation) {
    case COT_ACTIVATION_RELU: return z <= 0 ? 0 : 1;
    case COT_ACTIVATION_SILU: s = sigmoid(z, &complement); return s * (1 + z * complement);
    case COT_ACTIVATION_GELU_TANH:
        z = z > 100 ? 100 : z < -100 ? -100 : z; /* beyond, the complement is 0, and its factor may be infinite */
        s = sigmoid(z * (GELU_LINEAR + GELU_CUBIC * z * z), &complement);
        return s * (1 + z * complement * (GELU_LINEAR + 3 * GELU_CUBIC * z * z));
    case COT_ACTIVATION_GELU_ERF: return normal_distribution(z) + z * normal_density(z);
    default: return 1;
    }
}

/* ---- the mask ----------------------------------------------------------------------------------------- */

typedef struct mask_reader {
    const dropout_mask *mask;
    uint64_t seed, offset;
} mask_reader;

static mask_reader make_reader(const dropout_mask *mask)
{
    return (mask_reader){mask, dropout_seed(mask), dropout_offset(mask)};
}

/* The keep bits of group g of row r, which has n <= 8 columns. Bits beyond n are 0. */
static uint32_t keep_bits(const mask_reader *reader, const dropout_sizes *sizes, int64_t r, int64_t g, int64_t n)
{
    const dropout_mask *mask = reader->mask;
    const cot_tensor *given = &mask->given;
    const uint8_t *bytes = given->data;
    uint32_t keep = 0;
    switch (mask->source) {
    case DROPOUT_KEEP_ALL: keep = 0xff; break;
    case DROPOUT_DROP_ALL: keep = 0; break;
    case DROPOUT_GENERATED:
        keep = cot_dropout_keep(reader->seed, reader->offset, (uint64_t)(r * sizes->groups + g), mask->threshold);
        break;
    case DROPOUT_BYTES:
        for (int64_t j = 0; j < n; j++)
            keep |= (bytes[dropout_row_offset(given, r) + (GROUP * g + j) * given->stride[given->rank - 1]] & 1u) << j;
        break;
    case DROPOUT_BITS: keep = bytes[dropout_row_offset(given, r) + g * given->stride[given->rank - 1]]; break;
    }
    return keep & ((1u << n) - 1);
}

/* ---- forward ------------------------------------------------------------------------------------------ */

typedef struct forward_context {
    const dropout_forward_problem *problem;
    mask_reader reader;
} forward_context;

static void store_mask(const cot_dropout_forward_args *a, int64_t r, int64_t g, int64_t n, uint32_t keep)
{
    const cot_tensor *bytes = &a->mask_out, *bits = &a->mask_bits_out;
    for (int64_t j = 0; cot_is_present(bytes) && j < n; j++)
        ((uint8_t *)bytes->data)[dropout_row_offset(bytes, r) + (GROUP * g + j) * bytes->stride[bytes->rank - 1]] =
            keep >> j & 1;
    if (cot_is_present(bits))
        ((uint8_t *)bits->data)[dropout_row_offset(bits, r) + g * bits->stride[bits->rank - 1]] = (uint8_t)keep;
}

static void forward_item(void *context, int64_t r)
{
    const forward_context *c = context;
    const cot_dropout_forward_args *a = &c->problem->args;
    const dropout_sizes *sizes = &c->problem->sizes;
    const real scale = (real)c->problem->mask.scale;
    const int64_t x = dropout_row_offset(&a->x, r);
    const int64_t y = cot_is_present(&a->y) ? dropout_row_offset(&a->y, r) : 0;
    const int64_t residual = cot_is_present(&a->residual) ? dropout_row_offset(&a->residual, r) : 0;
    for (int64_t g = 0; g < sizes->groups; g++) {
        const int64_t first = GROUP * g, n = cot_min(GROUP, sizes->D - first);
        const uint32_t keep = keep_bits(&c->reader, sizes, r, g, n);
        store_mask(a, r, g, n, keep);
        for (int64_t j = 0; cot_is_present(&a->y) && j < n; j++) {
            const int64_t d = first + j;
            real value = 0;
            if ((keep >> j & 1) && scale != 0)
                value = scale * activate(a->activation, load_element(&a->x, x, d) + load_bias(&a->bias, d));
            if (cot_is_present(&a->residual))
                value += load_element(&a->residual, residual, d);
            store_element(&a->y, y, d, value);
        }
    }
}

cot_status NAME(dropout_fwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    forward_context context = {.problem = problem};
    context.reader = make_reader(&context.problem->mask);
    if (context.problem->sizes.D > 0)
        cot_run_items(queue, context.problem->sizes.R, forward_item, &context);
    return COT_OK;
}

/* ---- backward ----------------------------------------------------------------------------------------- */

/* dbias is summed in blocks of rows, so that rounding errors grow with the number of blocks instead of rows. */
enum { STRIP = 64, ROW_BLOCK = 16 };

typedef struct backward_context {
    const dropout_backward_problem *problem;
    mask_reader reader;
} backward_context;

static void store_gradient(const cot_tensor *out, int64_t index, bool accumulate, real value)
{
    if (accumulate)
        value += (real)cot_load_f64(out->data, out->dtype, index);
    cot_store_f64(out->data, out->dtype, index, value);
}

static void backward_item(void *context, int64_t item)
{
    const backward_context *c = context;
    const cot_dropout_backward_args *a = &c->problem->args;
    const dropout_sizes *sizes = &c->problem->sizes;
    const real scale = (real)c->problem->mask.scale;
    const int64_t begin = item * STRIP, end = cot_min(begin + STRIP, sizes->D);
    real block[STRIP] = {0}, total[STRIP] = {0};
    for (int64_t r = 0; r < sizes->R; r++) {
        const int64_t dy = dropout_row_offset(&a->dy, r);
        const int64_t dx = cot_is_present(&a->dx) ? dropout_row_offset(&a->dx, r) : 0;
        const int64_t x = cot_is_present(&a->x) ? dropout_row_offset(&a->x, r) : 0;
        for (int64_t first = begin; first < end; first += GROUP) {
            const int64_t n = cot_min(GROUP, end - first);
            const uint32_t keep = keep_bits(&c->reader, sizes, r, first / GROUP, n);
            for (int64_t d = first; d < first + n; d++) {
                real value = 0;
                if ((keep >> (d - first) & 1) && scale != 0) {
                    const real z =
                        a->activation != COT_ACTIVATION_NONE ? load_element(&a->x, x, d) + load_bias(&a->bias, d) : 1;
                    if (a->activation != COT_ACTIVATION_RELU || !(z <= 0)) /* ReLU gives 0 for any dy */
                        value = scale * load_element(&a->dy, dy, d) * activation_slope(a->activation, z);
                }
                if (cot_is_present(&a->dx))
                    store_element(&a->dx, dx, d, value);
                block[d - begin] += value;
            }
        }
        for (int64_t i = 0; ((r + 1) % ROW_BLOCK == 0 || r + 1 == sizes->R) && i < end - begin; i++) {
            total[i] += block[i];
            block[i] = 0;
        }
    }
    for (int64_t d = begin; cot_is_present(&a->dbias) && d < end; d++)
        store_gradient(&a->dbias, d * a->dbias.stride[0], a->accumulate, total[d - begin]);
}

cot_status NAME(dropout_bwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    backward_context context = {.problem = problem};
    context.reader = make_reader(&context.problem->mask);
    cot_run_items(queue, cot_ceil_div(context.problem->sizes.D, STRIP), backward_item, &context);
    return COT_OK;
}
