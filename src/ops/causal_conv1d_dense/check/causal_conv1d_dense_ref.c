/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_ref.c: the oracle: the formulas of cotangent/causal_conv1d_dense.h in double, as plain loops.
 * All tensors are f64 and row-major here. Sums are long double where the compiler has one.
 *
 * Magnitudes: M(z) = |bias| + sum |weight * xe| + n/64 sqrt(sum (weight * xe)^2) for n terms. The last term is for
 * tensor cores: they truncate the sum each time they add 16 terms to it. So there are n/16 errors to one side. On
 * average, each is u of the running sum, u being that of float32. The error rule allows 4 u of a magnitude. Without
 * the last term, 1 of 52800 results exceeded the bound, by a factor of 1.39 (float16, 2112 terms). The effect of a
 * unit of error in z on silu(z) = z*s and on its derivative is bounded by the absolute values of the terms of their
 * derivatives, with s = sigma(z):
 *     M(y) = M(z) * s * (1 + |z| * (1 - s))
 *     M(g) = |dy| * (s * (1 + |z| * (1 - s)) + M(z) * s * (1 - s) * (2 + |z|)) */
#include "causal_conv1d_dense_ref.h"

#include "../causal_conv1d_dense_problem.h"
#include "cases/cases.h"

#include <math.h>
#include <stdlib.h>

static double *values(const cot_tensor *tensor)
{
    return tensor->data;
}

static double *element_at(const cot_tensor *tensor, int64_t i, int64_t j, int64_t k)
{
    return values(tensor) + (i * tensor->shape[1] + j) * tensor->shape[2] + k;
}

/* The inputs of both directions. */
typedef struct inputs {
    int64_t B, Din, Dout, T, K;
    const cot_tensor *x, *weight, *bias, *initial_state;
} inputs;

static inputs make_inputs(const cot_tensor *x, const cot_tensor *weight, const cot_tensor *bias,
                          const cot_tensor *initial_state)
{
    return (inputs){x->shape[0], x->shape[1], weight->shape[0], x->shape[2], weight->shape[2], x,
                    weight,      bias,        initial_state};
}

/* The input of channel i at time t, t >= -(K-1). */
static double load_xe(const inputs *in, int64_t b, int64_t i, int64_t t)
{
    if (t >= 0)
        return *element_at(in->x, b, i, t);
    return cot_is_present(in->initial_state) ? *element_at(in->initial_state, b, i, t + in->K - 1) : 0;
}

static long double compute_z(const inputs *in, int64_t b, int64_t o, int64_t t, double *magnitude)
{
    long double z = cot_is_present(in->bias) ? values(in->bias)[o] : 0, squares = 0;
    *magnitude = fabsl(z);
    for (int64_t k = 0; k < in->K; k++)
        for (int64_t i = 0; i < in->Din; i++) {
            const long double term =
                (long double)*element_at(in->weight, o, i, k) * load_xe(in, b, i, t - (in->K - 1) + k);
            z += term;
            *magnitude += fabsl(term);
            squares += term * term;
        }
    *magnitude += (double)(in->Din * in->K) / 64 * sqrt((double)squares);
    return z;
}

static long double sigmoid(long double z)
{
    return 1 / (1 + expl(-z));
}

/* Kernels clamp z to about -87. There, silu and its derivative differ from their limits by about this. */
#define SILU_LIMIT_ERROR 0x1p-97

/* ---- NaN and infinities ---------------------------------------------------------------------------------- *
 * They follow the formulas, with the limits of silu at infinity. Magnitudes allow NaN (by their sign bit) where a
 * kernel may return NaN instead:
 *   - at the ends of a sequence: the formulas leave a term out, a kernel may multiply by 0, and 0 times NaN is NaN
 *   - in z * sigma(z) at infinity
 *   - for infinities, if operands are split into several bf16 terms */

static bool is_finite(const cot_tensor *t)
{
    return !cot_is_present(t) || cot_all_finite(values(t), cot_elements(t));
}

static void allow_nan(const cot_tensor *magnitude)
{
    if (cot_is_present(magnitude))
        cot_allow_nan(values(magnitude), cot_elements(magnitude));
}

static void allow_nan_for_infinities(const cot_tensor *result, const cot_tensor *magnitude)
{
    for (int64_t i = 0; cot_is_present(magnitude) && i < cot_elements(magnitude); i++)
        if (isinf(values(result)[i]))
            values(magnitude)[i] = -1;
}

static void forward(const void *args, void *magnitudes)
{
    const cot_causal_conv1d_dense_forward_args *a = args;
    const cot_causal_conv1d_dense_forward_args *m = magnitudes;
    const inputs in = make_inputs(&a->x, &a->weight, &a->bias, &a->initial_state);
    for (int64_t b = 0; b < in.B; b++) {
        for (int64_t o = 0; cot_is_present(&a->y) && o < in.Dout; o++)
            for (int64_t t = 0; t < in.T; t++) {
                double magnitude;
                const double z = (double)compute_z(&in, b, o, t, &magnitude);
                const bool silu = a->activation == COT_ACTIVATION_SILU;
                const long double s = sigmoid(z), slope = s * (1 + fabs(z) * sigmoid(-z));
                *element_at(&a->y, b, o, t) = silu ? (double)(z * s) : z;
                *element_at(&m->y, b, o, t) = magnitude * (silu ? (double)slope : 1);
                if (silu && isinf(z)) {
                    *element_at(&a->y, b, o, t) = z > 0 ? z : 0;
                    *element_at(&m->y, b, o, t) = -SILU_LIMIT_ERROR;
                }
            }
        for (int64_t i = 0; cot_is_present(&a->final_state) && i < in.Din; i++)
            for (int64_t s = 0; s < in.K - 1; s++) {
                const double value = load_xe(&in, b, i, in.T - (in.K - 1) + s);
                *element_at(&a->final_state, b, i, s) = value;
                *element_at(&m->final_state, b, i, s) = fabs(value);
            }
    }
    allow_nan_for_infinities(&a->y, &m->y);
    if (!is_finite(&a->weight))
        allow_nan(&m->y);
}

/* Computes g = dL/dz of every output, [B,Dout,T], followed by its magnitudes. */
static double *compute_g(const inputs *in, cot_activation activation, const cot_tensor *dy)
{
    const int64_t count = in->B * in->Dout * in->T;
    double *g = allocate(2 * (size_t)count, sizeof *g);
    for (int64_t n = 0; n < count; n++) {
        const int64_t t = n % in->T, o = n / in->T % in->Dout, b = n / in->T / in->Dout;
        long double factor = 1, bound = 1;
        if (activation == COT_ACTIVATION_SILU) {
            double magnitude;
            const double z = (double)compute_z(in, b, o, t, &magnitude);
            const long double s = sigmoid(z), complement = sigmoid(-z); /* 1 - s would cancel */
            factor = s * (1 + z * complement);
            bound = s * (1 + fabs(z) * complement) + magnitude * s * complement * (2 + fabs(z));
            if (isinf(z))
                factor = z > 0, bound = factor + SILU_LIMIT_ERROR;
        }
        g[n] = (double)(values(dy)[n] * factor);
        g[count + n] = (double)(fabs(values(dy)[n]) * bound);
    }
    return g;
}

/* A sum, and the sum of the bounds of its terms. */
typedef struct sum {
    long double value;
    double bound;
} sum;

/* The gradient of input channel i at time t. The input contributes to token t+j by tap K-1-j, and to final_state, where
 * column s is time T-(K-1)+s. */
static sum xe_gradient(const inputs *in, const double *g, const cot_tensor *dfinal_state, int64_t b, int64_t i,
                       int64_t t)
{
    const int64_t count = in->B * in->Dout * in->T, s = t - in->T + in->K - 1;
    sum total = {0, 0};
    for (int64_t j = 0; j < in->K; j++)
        for (int64_t o = 0; t + j >= 0 && t + j < in->T && o < in->Dout; o++) {
            const double weight = *element_at(in->weight, o, i, in->K - 1 - j);
            const int64_t n = (b * in->Dout + o) * in->T + t + j;
            total.value += (long double)weight * g[n];
            total.bound += fabs(weight) * g[count + n];
        }
    if (cot_is_present(dfinal_state) && s >= 0) {
        total.value += *element_at(dfinal_state, b, i, s);
        total.bound += fabs(*element_at(dfinal_state, b, i, s));
    }
    return total;
}

/* The sum over all tokens of g[o] times the input of channel i at tap k. For i < 0: the sum of g[o]. */
static sum token_sum(const inputs *in, const double *g, int64_t o, int64_t i, int64_t k)
{
    const int64_t count = in->B * in->Dout * in->T;
    sum total = {0, 0};
    for (int64_t b = 0; b < in->B; b++)
        for (int64_t t = 0; t < in->T; t++) {
            const int64_t n = (b * in->Dout + o) * in->T + t;
            const double factor = i < 0 ? 1 : load_xe(in, b, i, t - (in->K - 1) + k);
            total.value += (long double)g[n] * factor;
            total.bound += g[count + n] * fabs(factor);
        }
    return total;
}

static void store(double *out, double *magnitude, bool accumulate, sum s)
{
    const double old = accumulate ? *out : 0;
    *out = (double)(old + s.value);
    *magnitude = fabs(old) + s.bound;
}

static void backward(const void *args, void *magnitudes)
{
    const cot_causal_conv1d_dense_backward_args *a = args;
    const cot_causal_conv1d_dense_backward_args *m = magnitudes;
    const inputs in = make_inputs(&a->x, &a->weight, &a->bias, &a->initial_state);
    double *g = compute_g(&in, a->activation, &a->dy);
    for (int64_t b = 0; b < in.B; b++)
        for (int64_t i = 0; i < in.Din; i++) {
            for (int64_t t = 0; cot_is_present(&a->dx) && t < in.T; t++)
                store(element_at(&a->dx, b, i, t), element_at(&m->dx, b, i, t), false,
                      xe_gradient(&in, g, &a->dfinal_state, b, i, t));
            for (int64_t s = 0; cot_is_present(&a->dinitial_state) && s < in.K - 1; s++)
                store(element_at(&a->dinitial_state, b, i, s), element_at(&m->dinitial_state, b, i, s), false,
                      xe_gradient(&in, g, &a->dfinal_state, b, i, s - (in.K - 1)));
        }
    for (int64_t o = 0; o < in.Dout; o++) {
        for (int64_t i = 0; cot_is_present(&a->dweight) && i < in.Din; i++)
            for (int64_t k = 0; k < in.K; k++)
                store(element_at(&a->dweight, o, i, k), element_at(&m->dweight, o, i, k), a->accumulate,
                      token_sum(&in, g, o, i, k));
        if (cot_is_present(&a->dbias))
            store(values(&a->dbias) + o, values(&m->dbias) + o, a->accumulate, token_sum(&in, g, o, -1, 0));
    }
    free(g);
    const bool weight_special = !is_finite(&a->weight);
    const bool special = weight_special || !is_finite(&a->x) || !is_finite(&a->dy) || !is_finite(&a->initial_state) ||
                         !is_finite(&a->bias);
    allow_nan_for_infinities(&a->dx, &m->dx);
    if (special) /* dweight sums over all tokens, including the ends */
        allow_nan(&m->dweight);
    if (special && a->activation == COT_ACTIVATION_SILU) { /* silu may make g NaN, which all gradients sum */
        allow_nan(&m->dx);
        allow_nan(&m->dinitial_state);
        allow_nan(&m->dbias);
    }
    if (weight_special) {
        allow_nan(&m->dx);
        allow_nan(&m->dinitial_state);
    }
}

void (*const cot_causal_conv1d_dense_oracles[])(const void *, void *) = {forward, backward};
