/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_ref.c: the oracle: the formulas of cotangent/causal_conv1d.h in double, as plain loops.
 *
 * Each sequence is laid out as in the formulas: xe = [initial_state, x], with the number of the sequence that each
 * column belongs to beside it, so that packing is one comparison. All tensors come as f64, row-major.
 * Sums are long double where the compiler has one, so that f64 kernels can be judged by their own roundoff.
 *
 * Magnitudes: M(z) = |bias| + sum |weight * xe|. What a unit of error in z does to silu(z) = z*s and to its derivative
 * is bounded by the absolute values of the terms of their derivatives, with s = sigma(z):
 *     M(y) = M(z) * s * (1 + |z| * (1 - s))
 *     M(g) = |dy| * (s * (1 + |z| * (1 - s)) + M(z) * s * (1 - s) * (2 + |z|))
 *
 * NaN and infinities follow the formulas, with silu's limits at infinity. Kernels may multiply by a 0 in place of a term that
 * the formulas leave out, and 0 times NaN is NaN: where a sequence ends or another one begins; in taps that a width is rounded
 * up with; in z * sigma(z) at infinity. So magnitudes allow NaN (by their sign bit)
 *   - in all results of a channel whose weights hold a NaN or an infinity;
 *   - in its dweight and dbias for one in x, dy or a state;
 *   - in y and dx of the tokens within `reach` of it, of the same sequence.
 * Other sequences' tokens never show. */
#include "causal_conv1d_ref.h"

#include "core/cases.h"
#include "causal_conv1d_problem.h"

#include <math.h>
#include <stdlib.h>

/* One channel of one sequence: columns 0 .. K-2 are the state, column K-1+t is token t. */
typedef struct channel {
    int64_t K, length, columns;
    bool has_state; /* without one columns 0 .. K-2 are no terms of any sum */
    double *xe;
    int64_t *belongs;                          /* to which sequence; negative = to none */
    double *z, *z_magnitude, *g, *g_magnitude; /* [length] */
} channel;

static double *values(const cot_tensor *tensor)
{
    return tensor->data;
}

static double *at3(const cot_tensor *tensor, int64_t i, int64_t j)
{
    return values(tensor) + (i * tensor->shape[1] + j) * tensor->shape[2];
}

static channel make_channel(int64_t K, int64_t length)
{
    channel c = {.K = K, .length = length, .columns = K - 1 + length};
    c.xe = allocate(c.columns, sizeof(double));
    c.belongs = allocate(c.columns, sizeof(int64_t));
    c.z = allocate(4 * length, sizeof(double));
    c.z_magnitude = c.z + length;
    c.g = c.z_magnitude + length;
    c.g_magnitude = c.g + length;
    return c;
}

static void free_channel(channel *c)
{
    free(c->xe);
    free(c->belongs);
    free(c->z);
}

/* Where the sequences of a call lie: row b of x, tokens [first, first + length), row `state` of the states. */
typedef struct sequence {
    int64_t b, first, length, state;
} sequence;

typedef struct layout {
    int64_t B, D, T, K;
    const cot_tensor *seq_idx, *cu_seqlens;
} layout;

static int64_t sequence_count(const layout *l)
{
    return cot_present(l->cu_seqlens) ? l->cu_seqlens->shape[0] - 1 : l->B;
}

static sequence sequence_at(const layout *l, int64_t index)
{
    if (!cot_present(l->cu_seqlens))
        return (sequence){index, 0, l->T, index};
    const int32_t *starts = l->cu_seqlens->data;
    return (sequence){0, starts[index], starts[index + 1] - starts[index], index};
}

static void load_channel(channel *c, const layout *l, const sequence *s, const cot_tensor *x, const cot_tensor *state,
                         int64_t d)
{
    const int32_t *ids = cot_present(l->seq_idx) && s->length > 0 ? (int32_t *)l->seq_idx->data + s->b * l->T : NULL;
    c->has_state = cot_present(state);
    for (int64_t i = 0; i < c->columns; i++) {
        const int64_t t = i - (c->K - 1);
        if (t >= 0)
            c->xe[i] = at3(x, s->b, d)[s->first + t];
        else
            c->xe[i] = cot_present(state) ? at3(state, s->state, d)[i] : 0;
        c->belongs[i] = ids != NULL ? ids[t >= 0 ? t : 0] : 0;
    }
}

/* Does column i count for token t? */
static bool counts(const channel *c, int64_t i, int64_t t)
{
    const int64_t own = c->belongs[c->K - 1 + t];
    return own >= 0 && c->belongs[i] == own;
}

/* Is column i a term of a sum for token t? */
static bool is_term(const channel *c, int64_t i, int64_t t)
{
    return counts(c, i, t) && (c->has_state || i >= c->K - 1);
}

/* Does column i belong to the sequence of the last token? Without any token the state is handed through. */
static bool is_final(const channel *c, int64_t i)
{
    return c->length == 0 || counts(c, i, c->length - 1);
}

static void compute_z(channel *c, const double *weight, double bias)
{
    for (int64_t t = 0; t < c->length; t++) {
        long double z = bias;
        c->z_magnitude[t] = fabs(bias);
        for (int64_t k = 0; k < c->K; k++) {
            if (!is_term(c, t + k, t))
                continue;
            z += (long double)weight[k] * c->xe[t + k];
            c->z_magnitude[t] += fabs(weight[k] * c->xe[t + k]);
        }
        c->z[t] = (double)z;
    }
}

static bool is_padding(const channel *c, int64_t t)
{
    return c->belongs[c->K - 1 + t] < 0;
}

static long double sigmoid(double z)
{
    return 1 / (1 + expl(-z));
}

/* Kernels limit z to about -87, where silu and its derivative are this close to their limits. */
#define LEAST_SILU 0x1p-97

static void activate(const channel *c, cot_activation activation, int64_t t, double *y, double *magnitude)
{
    const double z = c->z[t];
    if (activation == COT_ACTIVATION_SILU && isinf(z)) {
        *y = z > 0 ? z : 0;
        *magnitude = -LEAST_SILU;
        return;
    }
    const long double s = sigmoid(z);
    const bool silu = activation == COT_ACTIVATION_SILU;
    *y = silu ? (double)(z * s) : z;
    *magnitude = c->z_magnitude[t] * (silu ? (double)(s * (1 + fabs(z) * sigmoid(-z))) : 1);
}

/* Row i of a magnitude [.., D, count]; none, if it is absent. */
static void allow_nan(const cot_tensor *magnitude, int64_t i, int64_t count)
{
    if (cot_present(magnitude))
        cot_allow_nan(values(magnitude) + i * count, count);
}

/* How many tokens away a column may meet a tap: kernels of a GPU round widths up to 8. */
static int64_t reach(const channel *c)
{
    return (c->K <= 8 ? 8 : c->K) - 1;
}

/* Is there a NaN or an infinity among columns [first, last] of column `own`'s sequence? Of tokens g and z count too. */
static bool near_special(const channel *c, int64_t own, int64_t first, int64_t last)
{
    for (int64_t i = first < 0 ? 0 : first; i <= last && i < c->columns; i++) {
        const int64_t t = i - (c->K - 1);
        if (c->belongs[i] == c->belongs[own] &&
            (!isfinite(c->xe[i]) || (t >= 0 && (!isfinite(c->g[t]) || !isfinite(c->z[t])))))
            return true;
    }
    return false;
}

static void forward(const void *args, void *magnitudes)
{
    const cot_causal_conv1d_forward_args *a = args;
    const cot_causal_conv1d_forward_args *m = magnitudes;
    const layout l = {a->x.shape[0], a->x.shape[1], a->x.shape[2], a->weight.shape[1], &a->seq_idx, &a->cu_seqlens};
    for (int64_t i = 0; cot_present(&a->y) && i < cot_elements(&a->y); i++)
        values(&a->y)[i] = values(&m->y)[i] = 0; /* padding; the rest is written below */
    for (int64_t n = 0; n < sequence_count(&l) * l.D; n++) {
        const sequence s = sequence_at(&l, n / l.D);
        const int64_t d = n % l.D;
        channel c = make_channel(l.K, s.length);
        load_channel(&c, &l, &s, &a->x, &a->initial_state, d);
        compute_z(&c, values(&a->weight) + d * l.K, cot_present(&a->bias) ? values(&a->bias)[d] : 0);
        for (int64_t t = 0; cot_present(&a->y) && t < c.length; t++) {
            if (is_padding(&c, t))
                continue;
            double *magnitude = at3(&m->y, s.b, d) + s.first + t;
            activate(&c, a->activation, t, at3(&a->y, s.b, d) + s.first + t, magnitude);
            if (near_special(&c, l.K - 1 + t, l.K - 1 + t - reach(&c),
                             t - 1)) /* in a tap that is not the width's own */
                *magnitude = copysign(*magnitude, -1);
        }
        for (int64_t i = 0; cot_present(&a->final_state) && i < l.K - 1; i++) {
            const double value = is_final(&c, c.length + i) ? c.xe[c.length + i] : 0;
            at3(&a->final_state, s.state, d)[i] = value;
            at3(&m->final_state, s.state, d)[i] = fabs(value);
        }
        free_channel(&c);
    }
    for (int64_t bd = 0; bd < l.B * l.D; bd++)
        if (!cot_all_finite(values(&a->weight) + bd % l.D * l.K, l.K))
            allow_nan(&m->y, bd, l.T);
}

static void compute_g(channel *c, cot_activation activation, const double *dy)
{
    for (int64_t t = 0; t < c->length; t++) {
        long double factor = 1, magnitude = 1;
        if (activation == COT_ACTIVATION_SILU) {
            const double z = c->z[t];
            const long double s = sigmoid(z), complement = sigmoid(-z); /* 1 - s would cancel */
            factor = s * (1 + z * complement);
            magnitude = s * (1 + fabs(z) * complement) + c->z_magnitude[t] * s * complement * (2 + fabs(z));
            if (isinf(z))
                factor = z > 0, magnitude = factor + LEAST_SILU;
        }
        c->g[t] = is_padding(c, t) ? 0 : (double)(dy[t] * factor);
        c->g_magnitude[t] = is_padding(c, t) ? 0 : (double)(fabs(dy[t]) * magnitude);
    }
}

/* The gradient of column i of xe, through the tokens that it counts for and through final_state. */
static double column_gradient(const channel *c, int64_t i, const double *weight, const double *dfinal_state,
                              double *magnitude)
{
    long double gradient = 0;
    *magnitude = 0;
    for (int64_t k = 0; k < c->K; k++) {
        const int64_t t = i - k;
        if (t < 0 || t >= c->length || !counts(c, i, t))
            continue;
        gradient += (long double)weight[k] * c->g[t];
        *magnitude += fabs(weight[k]) * c->g_magnitude[t];
    }
    if (dfinal_state != NULL && i >= c->length && is_final(c, i)) {
        gradient += dfinal_state[i - c->length];
        *magnitude += fabs(dfinal_state[i - c->length]);
    }
    return (double)gradient;
}

/* Adds the sum over the tokens of g[t] * xe[t+k], or for k < 0 of g[t]. */
static void add_sum(const channel *c, int64_t k, double *sum, double *magnitude)
{
    long double part = 0;
    for (int64_t t = 0; t < c->length; t++) {
        if (k >= 0 && !is_term(c, t + k, t))
            continue;
        const double factor = k >= 0 ? c->xe[t + k] : 1;
        part += (long double)c->g[t] * factor;
        *magnitude += c->g_magnitude[t] * fabs(factor);
    }
    *sum += (double)part;
}

static void clear_output(const cot_tensor *out, const cot_tensor *magnitude, bool accumulate)
{
    for (int64_t i = 0; cot_present(out) && i < cot_elements(out); i++) {
        if (!accumulate)
            values(out)[i] = 0;
        values(magnitude)[i] = fabs(values(out)[i]);
    }
}

static void backward(const void *args, void *magnitudes)
{
    const cot_causal_conv1d_backward_args *a = args;
    const cot_causal_conv1d_backward_args *m = magnitudes;
    const layout l = {a->x.shape[0], a->x.shape[1], a->x.shape[2], a->weight.shape[1], &a->seq_idx, &a->cu_seqlens};
    clear_output(&a->dx, &m->dx, false);
    clear_output(&a->dinitial_state, &m->dinitial_state, false);
    clear_output(&a->dweight, &m->dweight, a->accumulate);
    clear_output(&a->dbias, &m->dbias, a->accumulate);
    bool *special = allocate(l.D, sizeof *special); /* the channel's data holds a NaN or an infinity */
    for (int64_t n = 0; n < sequence_count(&l) * l.D; n++) {
        const sequence s = sequence_at(&l, n / l.D);
        const int64_t d = n % l.D;
        const double *weight = values(&a->weight) + d * l.K;
        channel c = make_channel(l.K, s.length);
        load_channel(&c, &l, &s, &a->x, &a->initial_state, d);
        compute_z(&c, weight, cot_present(&a->bias) ? values(&a->bias)[d] : 0);
        compute_g(&c, a->activation, at3(&a->dy, s.b, d) + s.first);
        const double *dfinal = cot_present(&a->dfinal_state) ? at3(&a->dfinal_state, s.state, d) : NULL;
        special[d] = special[d] || !cot_all_finite(c.xe, c.columns) || !cot_all_finite(c.g, c.length) ||
                     !cot_all_finite(c.z, c.length);
        for (int64_t i = 0; i < c.columns; i++) {
            double magnitude;
            const double gradient = column_gradient(&c, i, weight, dfinal, &magnitude);
            const int64_t t = i - (l.K - 1);
            if (near_special(&c, i, i - reach(&c), i + reach(&c)))
                magnitude = copysign(magnitude, -1);
            if (t >= 0 && cot_present(&a->dx)) {
                at3(&a->dx, s.b, d)[s.first + t] = gradient;
                at3(&m->dx, s.b, d)[s.first + t] = magnitude;
            } else if (t < 0 && cot_present(&a->dinitial_state)) {
                at3(&a->dinitial_state, s.state, d)[i] = gradient;
                at3(&m->dinitial_state, s.state, d)[i] = magnitude;
            }
        }
        for (int64_t k = 0; cot_present(&a->dweight) && k < l.K; k++)
            add_sum(&c, k, values(&a->dweight) + d * l.K + k, values(&m->dweight) + d * l.K + k);
        if (cot_present(&a->dbias))
            add_sum(&c, -1, values(&a->dbias) + d, values(&m->dbias) + d);
        free_channel(&c);
    }
    for (int64_t d = 0; d < l.D; d++) {
        const bool weight_special = !cot_all_finite(values(&a->weight) + d * l.K, l.K);
        if (special[d] || weight_special) {
            allow_nan(&m->dweight, d, l.K);
            allow_nan(&m->dbias, d, 1);
        }
        if (!weight_special)
            continue;
        for (int64_t b = 0; b < l.B; b++)
            allow_nan(&m->dx, b * l.D + d, l.T);
        for (int64_t n = 0; n < sequence_count(&l); n++)
            allow_nan(&m->dinitial_state, n * l.D + d, l.K - 1);
    }
    free(special);
}

/* One row and channel of an update: history and x make one channel of K-1+T columns, as in the forward. */
static void update_channel(const cot_causal_conv1d_update_args *a, const cot_causal_conv1d_update_args *m, int64_t b,
                           int64_t row, int64_t d)
{
    const int64_t T = a->x.rank == 3 ? a->x.shape[2] : 1, K = a->weight.shape[1], S = a->conv_state.shape[2];
    const bool ring = cot_present(&a->cache_seqlens) && S > 0;
    const int64_t start = ring ? ((int32_t *)a->cache_seqlens.data)[b] : S;
    const double *x = values(&a->x) + (b * a->x.shape[1] + d) * T;
    double *state = at3(&a->conv_state, row, d);
    channel c = make_channel(K, T);
    c.has_state = true;
    for (int64_t i = 0; i < K - 1; i++) {
        const int64_t position = start - (K - 1) + i;
        c.xe[i] = state[ring ? (position % S + S) % S : position];
    }
    for (int64_t t = 0; t < T; t++)
        c.xe[K - 1 + t] = x[t];
    compute_z(&c, values(&a->weight) + d * K, cot_present(&a->bias) ? values(&a->bias)[d] : 0);
    for (int64_t t = 0; t < T; t++) {
        const int64_t i = (b * a->x.shape[1] + d) * T + t;
        activate(&c, a->activation, t, values(&a->y) + i, values(&m->y) + i);
        if (near_special(&c, K - 1 + t, K - 1 + t - reach(&c), t - 1))
            values(&m->y)[i] = copysign(values(&m->y)[i], -1);
    }
    for (int64_t t = 0; ring && t < T; t++)
        state[(start + t) % S] = x[t];
    for (int64_t column = 0; !ring && column < S; column++)
        state[column] = column + T < S ? state[column + T] : x[column + T - S];
    free_channel(&c);
}

static void update(const void *args, void *magnitudes)
{
    const cot_causal_conv1d_update_args *a = args;
    const cot_causal_conv1d_update_args *m = magnitudes;
    for (int64_t i = 0; i < cot_elements(&a->y); i++)
        values(&a->y)[i] = values(&m->y)[i] = 0;
    for (int64_t b = 0; b < a->x.shape[0]; b++) {
        const int64_t row = cot_present(&a->conv_state_indices) ? ((int32_t *)a->conv_state_indices.data)[b] : b;
        for (int64_t d = 0; row >= 0 && d < a->x.shape[1]; d++)
            update_channel(a, m, b, row, d);
    }
    for (int64_t i = 0; i < cot_elements(&a->conv_state); i++)
        values(&m->conv_state)[i] = fabs(values(&a->conv_state)[i]);
}

void (*const cot_causal_conv1d_oracles[])(const void *, void *) = {forward, backward, update};
