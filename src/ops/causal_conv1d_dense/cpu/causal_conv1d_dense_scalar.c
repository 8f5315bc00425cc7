/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_scalar.c: the formulas of cotangent/causal_conv1d_dense.h as plain loops, for any width, strides,
 * dtypes and states. The reference for the accuracy and speed of the other kernels.
 *
 * Compiled twice: with float sums (f32, f16, bf16), and with COT_SCALAR_F64 and double sums (f64).
 * xe is copied as [B][K-1+T][Din] and weight as [Dout][K][Din]. So the inputs of an output, K rows of xe, are K*Din
 * consecutive numbers, and one loop sums them. They are a row of the im2col matrix, which is not stored: its rows have
 * K*Din elements and begin Din apart. */
#include "core/float16.h"
#include "ops/causal_conv1d_dense/causal_conv1d_dense_problem.h"
#include "ops/causal_conv1d_dense/cpu/causal_conv1d_dense_scalar.h"

#include <math.h>

#ifdef COT_SCALAR_F64
typedef double real;
#define NAME(stem) stem##_f64
#define EXP exp
#else
typedef float real;
#define NAME(stem) stem
#define EXP expf
#endif

cot_status NAME(causal_conv1d_dense_fwd_scalar)(cot_queue *, const void *, void *);
cot_status NAME(causal_conv1d_dense_bwd_scalar)(cot_queue *, const void *, void *);

static inline real load3(const cot_tensor *t, int64_t i, int64_t j, int64_t k)
{
    return (real)cot_load_f64(t->data, t->dtype, i * t->stride[0] + j * t->stride[1] + k * t->stride[2]);
}

static inline void store3(const cot_tensor *t, int64_t i, int64_t j, int64_t k, real value)
{
    cot_store_f64(t->data, t->dtype, i * t->stride[0] + j * t->stride[1] + k * t->stride[2], value);
}

static inline real load1_or_zero(const cot_tensor *t, int64_t i)
{
    return cot_is_present(t) ? (real)cot_load_f64(t->data, t->dtype, i * t->stride[0]) : 0;
}

/* Returns sigma(z). Sets sigma(-z) = 1 - sigma(z) without the subtraction, which would keep only 10 bits for z = 10.
 * The argument of exp is never positive, so nothing overflows. */
static inline real sigmoid(real z, real *complement)
{
    const real e = EXP(-(z < 0 ? -z : z)), larger = 1 / (1 + e);
    *complement = z < 0 ? larger : e * larger;
    return z < 0 ? e * larger : larger;
}

/* Terms of a sum per block. Blocks are summed separately, so the rounding error of long sums grows with the number of
 * blocks, not of terms. */
enum { BLOCK = 16 };

static real dot(const real *a, int64_t a_step, const real *b, int64_t b_step, int64_t n)
{
    real total = 0;
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t end = n - begin < BLOCK ? n : begin + BLOCK;
        real block = 0;
        for (int64_t i = begin; i < end; i++)
            block += a[i * a_step] * b[i * b_step];
        total += block;
    }
    return total;
}

/* The inputs of both directions and their copies in the workspace. */
typedef struct context {
    const conv1d_dense_sizes *sizes;
    const cot_tensor *x, *weight, *bias, *initial_state;
    const conv1d_dense_forward_problem *forward;
    const conv1d_dense_backward_problem *backward;
    real *xe; /* [B][K-1+T][Din] */
    real *w;  /* [Dout][K][Din] */
    real *g;  /* [B][T][Dout] */
} context;

static void copy_inputs_item(void *memory, int64_t item)
{
    const context *c = memory;
    const conv1d_dense_sizes *sizes = c->sizes;
    const int64_t rows = sizes->K - 1 + sizes->T, b = item / rows;
    int64_t column;
    const cot_tensor *source = conv1d_dense_row_tensor(sizes, c->x, c->initial_state, item % rows, &column);
    for (int64_t i = 0; i < sizes->Din; i++)
        c->xe[item * sizes->Din + i] = source != NULL ? load3(source, b, i, column) : 0;
}

static void copy_weights_item(void *memory, int64_t o)
{
    const context *c = memory;
    for (int64_t k = 0; k < c->sizes->K; k++)
        for (int64_t i = 0; i < c->sizes->Din; i++)
            c->w[(o * c->sizes->K + k) * c->sizes->Din + i] = load3(c->weight, o, i, k);
}

static void prepare(cot_queue *queue, context *c, void *workspace)
{
    const bool has_inputs = c->sizes->Din > 0;
    const conv1d_dense_job jobs[] = {
        {has_inputs ? c->sizes->B * (c->sizes->K - 1 + c->sizes->T) : 0, copy_inputs_item, NULL},
        {has_inputs ? c->sizes->Dout : 0, copy_weights_item, NULL}};
    const conv1d_dense_scalar_layout *l = queue->plan;
    c->xe = (real *)((char *)workspace + l->xe);
    c->w = (real *)((char *)workspace + l->w);
    c->g = (real *)((char *)workspace + l->g);
    conv1d_dense_run_jobs(queue, c, jobs, 2);
}

static real compute_z(const context *c, int64_t b, int64_t o, int64_t t)
{
    const int64_t terms = c->sizes->K * c->sizes->Din;
    const real *window = c->xe + (b * (c->sizes->K - 1 + c->sizes->T) + t) * c->sizes->Din;
    return load1_or_zero(c->bias, o) + dot(c->w + o * terms, 1, window, 1, terms);
}

/* ---- forward -------------------------------------------------------------------------------------------- */

static void forward_item(void *memory, int64_t item)
{
    const context *c = memory;
    const cot_causal_conv1d_dense_forward_args *a = &c->forward->args;
    const int64_t b = item / c->sizes->T, t = item % c->sizes->T;
    for (int64_t o = 0; o < c->sizes->Dout; o++) {
        real complement;
        const real z = compute_z(c, b, o, t);
        store3(&a->y, b, o, t,
               a->activation != COT_ACTIVATION_SILU ? z
               : z == -INFINITY                     ? 0
                                                    : z * sigmoid(z, &complement));
    }
}

static void final_state_item(void *memory, int64_t item)
{
    const context *c = memory;
    const int64_t columns = c->sizes->K - 1, b = item / columns, s = item % columns;
    for (int64_t i = 0; i < c->sizes->Din; i++)
        store3(&c->forward->args.final_state, b, i, s,
               c->xe[(b * (columns + c->sizes->T) + c->sizes->T + s) * c->sizes->Din + i]);
}

cot_status NAME(causal_conv1d_dense_fwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_dense_forward_problem *p = problem;
    const cot_causal_conv1d_dense_forward_args *a = &p->args;
    context c = {&p->sizes, &a->x, &a->weight, &a->bias, &a->initial_state, p, NULL, NULL, NULL, NULL};
    const bool needs_y = cot_is_present(&a->y) && p->sizes.Dout > 0,
               needs_state = cot_is_present(&a->final_state) && p->sizes.Din > 0;
    const conv1d_dense_job jobs[] = {{needs_y ? p->sizes.B * p->sizes.T : 0, forward_item, NULL},
                                     {needs_state ? p->sizes.B * (p->sizes.K - 1) : 0, final_state_item, NULL}};
    prepare(queue, &c, workspace);
    conv1d_dense_run_jobs(queue, &c, jobs, 2);
    return COT_OK;
}

/* ---- backward ------------------------------------------------------------------------------------------- */

/* Item: g = dL/dz of all output channels of a token. */
static void g_item(void *memory, int64_t item)
{
    const context *c = memory;
    const cot_causal_conv1d_dense_backward_args *a = &c->backward->args;
    const int64_t b = item / c->sizes->T, t = item % c->sizes->T;
    for (int64_t o = 0; o < c->sizes->Dout; o++) {
        real g = load3(&a->dy, b, o, t);
        if (a->activation == COT_ACTIVATION_SILU) {
            real complement;
            const real z = compute_z(c, b, o, t), s = sigmoid(z, &complement);
            g *= isinf(z) ? s : s * (1 + z * complement);
        }
        c->g[item * c->sizes->Dout + o] = g;
    }
}

/* Item: the gradients of row r of xe, a column of the state or a token. Row r contributes to token r-k by tap k. */
static void dxe_item(void *memory, int64_t item)
{
    const context *c = memory;
    const conv1d_dense_sizes *sizes = c->sizes;
    const cot_causal_conv1d_dense_backward_args *a = &c->backward->args;
    const int64_t rows = sizes->K - 1 + sizes->T, b = item / rows, r = item % rows;
    int64_t column;
    const cot_tensor *to = conv1d_dense_row_tensor(sizes, &a->dx, &a->dinitial_state, r, &column);
    if (to == NULL || !cot_is_present(to))
        return;
    for (int64_t i = 0; i < sizes->Din; i++) {
        real gradient = 0;
        for (int64_t k = 0; k < sizes->K; k++)
            if (r - k >= 0 && r - k < sizes->T)
                gradient += dot(c->g + (b * sizes->T + r - k) * sizes->Dout, 1, c->w + k * sizes->Din + i,
                                sizes->K * sizes->Din, sizes->Dout);
        if (cot_is_present(&a->dfinal_state) && r >= sizes->T)
            gradient += load3(&a->dfinal_state, b, i, r - sizes->T);
        store3(to, b, i, column, gradient);
    }
}

static void store_gradient(const cot_tensor *out, int64_t index, bool accumulate, real value)
{
    if (accumulate)
        value += (real)cot_load_f64(out->data, out->dtype, index);
    cot_store_f64(out->data, out->dtype, index, value);
}

/* Item: dweight and dbias of one output channel, summed over the tokens of each sequence, then over the sequences. */
static void parameter_item(void *memory, int64_t o)
{
    const context *c = memory;
    const conv1d_dense_sizes *sizes = c->sizes;
    const cot_causal_conv1d_dense_backward_args *a = &c->backward->args;
    static const real one = 1;
    for (int64_t i = 0; cot_is_present(&a->dweight) && i < sizes->Din; i++)
        for (int64_t k = 0; k < sizes->K; k++) {
            real sum = 0;
            for (int64_t b = 0; b < sizes->B; b++)
                sum += dot(c->g + b * sizes->T * sizes->Dout + o, sizes->Dout,
                           c->xe + (b * (sizes->K - 1 + sizes->T) + k) * sizes->Din + i, sizes->Din, sizes->T);
            const int64_t *stride = a->dweight.stride;
            store_gradient(&a->dweight, o * stride[0] + i * stride[1] + k * stride[2], a->accumulate, sum);
        }
    if (cot_is_present(&a->dbias))
        store_gradient(&a->dbias, o * a->dbias.stride[0], a->accumulate,
                       dot(c->g + o, sizes->Dout, &one, 0, sizes->B * sizes->T));
}

cot_status NAME(causal_conv1d_dense_bwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_dense_backward_problem *p = problem;
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    context c = {&p->sizes, &a->x, &a->weight, &a->bias, &a->initial_state, NULL, p, NULL, NULL, NULL};
    const bool needs_dxe = (cot_is_present(&a->dx) || cot_is_present(&a->dinitial_state)) && p->sizes.Din > 0;
    const conv1d_dense_job jobs[] = {{needs_dxe ? p->sizes.B * (p->sizes.K - 1 + p->sizes.T) : 0, dxe_item, NULL},
                                     {p->sizes.Dout, parameter_item, NULL}};
    prepare(queue, &c, workspace);
    if (p->sizes.Dout > 0)
        cot_run_items(queue, p->sizes.B * p->sizes.T, g_item, &c);
    conv1d_dense_run_jobs(queue, &c, jobs, 2);
    return COT_OK;
}
