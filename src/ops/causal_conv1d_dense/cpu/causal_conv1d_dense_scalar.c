/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_scalar.c: the formulas of cotangent/causal_conv1d_dense.h as plain loops, for any width, strides,
 * dtypes and states. The measure of the other kernels' accuracy and speed.
 *
 * Compiled twice: with float sums (f32, f16, bf16), and with COT_SCALAR_F64 and double sums (f64).
 * xe is laid out as [B][K-1+T][Din] and the weights as [Dout][K][Din]: then what an output sees, K rows of xe, is one
 * run of K*Din numbers, and its sum one loop. A row of im2col's matrix, without the matrix: rows K*Din long that begin
 * Din apart. */
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

/* sigma(z), and sigma(-z) = 1 - sigma(z) without the subtraction, which for z = 10 would leave 10 bits. exp never
 * sees a positive argument, so nothing overflows. */
static inline real sigmoid(real z, real *complement)
{
    const real e = EXP(-(z < 0 ? -z : z)), larger = 1 / (1 + e);
    *complement = z < 0 ? larger : e * larger;
    return z < 0 ? e * larger : larger;
}

/* Long sums pass through blocks, so that rounding grows with the number of blocks, not of terms. */
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

/* What both directions lay out. */
typedef struct context {
    const conv1d_dense_sizes *z;
    const cot_tensor *x, *weight, *bias, *initial_state;
    const conv1d_dense_forward_problem *forward;
    const conv1d_dense_backward_problem *backward;
    real *xe; /* [B][K-1+T][Din] */
    real *w;  /* [Dout][K][Din] */
    real *g;  /* [B][T][Dout] */
} context;

static void lay_out_inputs(void *memory, int64_t item)
{
    const context *c = memory;
    const conv1d_dense_sizes *z = c->z;
    const int64_t rows = z->K - 1 + z->T, b = item / rows;
    int64_t column;
    const cot_tensor *from = conv1d_dense_row(z, c->x, c->initial_state, item % rows, &column);
    for (int64_t i = 0; i < z->Din; i++)
        c->xe[item * z->Din + i] = from != NULL ? load3(from, b, i, column) : 0;
}

static void lay_out_weights(void *memory, int64_t o)
{
    const context *c = memory;
    for (int64_t k = 0; k < c->z->K; k++)
        for (int64_t i = 0; i < c->z->Din; i++)
            c->w[(o * c->z->K + k) * c->z->Din + i] = load3(c->weight, o, i, k);
}

static void lay_out(cot_queue *queue, context *c, void *workspace)
{
    const bool some = c->z->Din > 0;
    const conv1d_dense_job jobs[] = {{some ? c->z->B * (c->z->K - 1 + c->z->T) : 0, lay_out_inputs, NULL},
                                     {some ? c->z->Dout : 0, lay_out_weights, NULL}};
    const conv1d_dense_scalar_layout l = conv1d_dense_scalar_layout_of(c->z, c->backward != NULL, sizeof(real));
    c->xe = (real *)((char *)workspace + l.xe);
    c->w = (real *)((char *)workspace + l.w);
    c->g = (real *)((char *)workspace + l.g);
    conv1d_dense_run(queue, c, jobs, 2);
}

static real z_at(const context *c, int64_t b, int64_t o, int64_t t)
{
    const int64_t terms = c->z->K * c->z->Din;
    const real *window = c->xe + (b * (c->z->K - 1 + c->z->T) + t) * c->z->Din;
    return load1_or_zero(c->bias, o) + dot(c->w + o * terms, 1, window, 1, terms);
}

/* ---- forward -------------------------------------------------------------------------------------------- */

static void forward_item(void *memory, int64_t item)
{
    const context *c = memory;
    const cot_causal_conv1d_dense_forward_args *a = &c->forward->args;
    const int64_t b = item / c->z->T, t = item % c->z->T;
    for (int64_t o = 0; o < c->z->Dout; o++) {
        real complement;
        const real z = z_at(c, b, o, t);
        store3(&a->y, b, o, t,
               a->activation != COT_ACTIVATION_SILU ? z
               : z == -INFINITY                     ? 0
                                                    : z * sigmoid(z, &complement));
    }
}

static void final_state_item(void *memory, int64_t item)
{
    const context *c = memory;
    const int64_t columns = c->z->K - 1, b = item / columns, s = item % columns;
    for (int64_t i = 0; i < c->z->Din; i++)
        store3(&c->forward->args.final_state, b, i, s, c->xe[(b * (columns + c->z->T) + c->z->T + s) * c->z->Din + i]);
}

cot_status NAME(causal_conv1d_dense_fwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_dense_forward_problem *p = problem;
    const cot_causal_conv1d_dense_forward_args *a = &p->args;
    context c = {&p->sizes, &a->x, &a->weight, &a->bias, &a->initial_state, p, NULL, NULL, NULL, NULL};
    const bool y = cot_is_present(&a->y) && p->sizes.Dout > 0,
               state = cot_is_present(&a->final_state) && p->sizes.Din > 0;
    const conv1d_dense_job jobs[] = {{y ? p->sizes.B * p->sizes.T : 0, forward_item, NULL},
                                     {state ? p->sizes.B * (p->sizes.K - 1) : 0, final_state_item, NULL}};
    lay_out(queue, &c, workspace);
    conv1d_dense_run(queue, &c, jobs, 2);
    return COT_OK;
}

/* ---- backward ------------------------------------------------------------------------------------------- */

/* dL/dz of all output channels of a token. */
static void gradient_item(void *memory, int64_t item)
{
    const context *c = memory;
    const cot_causal_conv1d_dense_backward_args *a = &c->backward->args;
    const int64_t b = item / c->z->T, t = item % c->z->T;
    for (int64_t o = 0; o < c->z->Dout; o++) {
        real g = load3(&a->dy, b, o, t);
        if (a->activation == COT_ACTIVATION_SILU) {
            real complement;
            const real z = z_at(c, b, o, t), s = sigmoid(z, &complement);
            g *= isinf(z) ? s : s * (1 + z * complement);
        }
        c->g[item * c->z->Dout + o] = g;
    }
}

/* The gradients of row r of xe, a column of the state or a token: through tap k from token r-k. */
static void input_item(void *memory, int64_t item)
{
    const context *c = memory;
    const conv1d_dense_sizes *z = c->z;
    const cot_causal_conv1d_dense_backward_args *a = &c->backward->args;
    const int64_t rows = z->K - 1 + z->T, b = item / rows, r = item % rows;
    int64_t column;
    const cot_tensor *to = conv1d_dense_row(z, &a->dx, &a->dinitial_state, r, &column);
    if (to == NULL || !cot_is_present(to))
        return;
    for (int64_t i = 0; i < z->Din; i++) {
        real gradient = 0;
        for (int64_t k = 0; k < z->K; k++)
            if (r - k >= 0 && r - k < z->T)
                gradient += dot(c->g + (b * z->T + r - k) * z->Dout, 1, c->w + k * z->Din + i, z->K * z->Din, z->Dout);
        if (cot_is_present(&a->dfinal_state) && r >= z->T)
            gradient += load3(&a->dfinal_state, b, i, r - z->T);
        store3(to, b, i, column, gradient);
    }
}

static void store_gradient(const cot_tensor *out, int64_t index, bool accumulate, real value)
{
    if (accumulate)
        value += (real)cot_load_f64(out->data, out->dtype, index);
    cot_store_f64(out->data, out->dtype, index, value);
}

/* dweight and dbias of one output channel: sums over the tokens of a sequence, and over the sequences. */
static void parameter_item(void *memory, int64_t o)
{
    const context *c = memory;
    const conv1d_dense_sizes *z = c->z;
    const cot_causal_conv1d_dense_backward_args *a = &c->backward->args;
    static const real one = 1;
    for (int64_t i = 0; cot_is_present(&a->dweight) && i < z->Din; i++)
        for (int64_t k = 0; k < z->K; k++) {
            real sum = 0;
            for (int64_t b = 0; b < z->B; b++)
                sum += dot(c->g + b * z->T * z->Dout + o, z->Dout, c->xe + (b * (z->K - 1 + z->T) + k) * z->Din + i,
                           z->Din, z->T);
            const int64_t *stride = a->dweight.stride;
            store_gradient(&a->dweight, o * stride[0] + i * stride[1] + k * stride[2], a->accumulate, sum);
        }
    if (cot_is_present(&a->dbias))
        store_gradient(&a->dbias, o * a->dbias.stride[0], a->accumulate, dot(c->g + o, z->Dout, &one, 0, z->B * z->T));
}

cot_status NAME(causal_conv1d_dense_bwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_dense_backward_problem *p = problem;
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    context c = {&p->sizes, &a->x, &a->weight, &a->bias, &a->initial_state, NULL, p, NULL, NULL, NULL};
    const bool inputs = (cot_is_present(&a->dx) || cot_is_present(&a->dinitial_state)) && p->sizes.Din > 0;
    const conv1d_dense_job jobs[] = {{inputs ? p->sizes.B * (p->sizes.K - 1 + p->sizes.T) : 0, input_item, NULL},
                                     {p->sizes.Dout, parameter_item, NULL}};
    lay_out(queue, &c, workspace);
    if (p->sizes.Dout > 0)
        cot_parallel(queue, p->sizes.B * p->sizes.T, gradient_item, &c);
    conv1d_dense_run(queue, &c, jobs, 2);
    return COT_OK;
}
