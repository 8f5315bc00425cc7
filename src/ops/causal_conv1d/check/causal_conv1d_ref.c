/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_ref.c: the oracle: the formulas of cotangent/causal_conv1d.h in double, as plain loops.
 *
 * Each sequence is laid out as in the formulas: xe = [initial_state, x]. An array of the same length holds the sequence
 * id of each position, so that packing is one comparison. All tensors are f64 and row-major here. Sums are long double
 * where the compiler has one, so that f64 kernels are judged by their own roundoff only.
 *
 * Magnitudes: M(z) = |bias| + sum |weight * xe|. The effect of a unit of error in z on silu(z) = z*s and on its
 * derivative is bounded by the absolute values of the terms of their derivatives, with s = sigma(z):
 *     M(y) = M(z) * s * (1 + |z| * (1 - s))
 *     M(g) = |dy| * (s * (1 + |z| * (1 - s)) + M(z) * s * (1 - s) * (2 + |z|))
 *
 * NaN and infinities follow the formulas, with the limits of silu at infinity. A kernel may multiply by 0 where the
 * formulas leave a term out, and 0 times NaN is NaN. This happens at the ends of a sequence, in taps that a kernel adds
 * to round up the width, and in z * sigma(z) at infinity. So magnitudes allow NaN (by their sign bit)
 *   - in all results of a channel whose weights hold a NaN or an infinity;
 *   - in dweight and dbias of a channel with one in x, dy or a state;
 *   - in y and dx of tokens within max_tap_distance of one, in the same sequence.
 * NaN is never allowed in tokens of other sequences. */
#include "causal_conv1d_ref.h"

#include "cases/cases.h"
#include "../causal_conv1d_problem.h"

#include <math.h>
#include <stdlib.h>

/* One channel of one sequence. Positions 0 .. K-2 are the state, position K-1+t is token t. */
typedef struct channel {
    int64_t K, length, positions;
    bool has_state; /* without a state, positions 0 .. K-2 are no terms of any sum */
    double *xe;
    int64_t *sequence_id;                      /* sequence of each position; negative = padding */
    double *z, *z_magnitude, *g, *g_magnitude; /* [length] */
} channel;

static double *values(const cot_tensor *tensor)
{
    return tensor->data;
}

static double *row_at(const cot_tensor *tensor, int64_t i, int64_t j)
{
    return values(tensor) + (i * tensor->shape[1] + j) * tensor->shape[2];
}

static channel make_channel(int64_t K, int64_t length)
{
    channel c = {.K = K, .length = length, .positions = K - 1 + length};
    c.xe = allocate(c.positions, sizeof(double));
    c.sequence_id = allocate(c.positions, sizeof(int64_t));
    c.z = allocate(4 * length, sizeof(double));
    c.z_magnitude = c.z + length;
    c.g = c.z_magnitude + length;
    c.g_magnitude = c.g + length;
    return c;
}

static void free_channel(channel *c)
{
    free(c->xe);
    free(c->sequence_id);
    free(c->z);
}

/* One sequence of a call: row b of x, tokens [first, first + length), row `state` of the states. */
typedef struct sequence {
    int64_t b, first, length, state;
} sequence;

typedef struct layout {
    int64_t B, D, T, K;
    const cot_tensor *seq_idx, *cu_seqlens;
} layout;

static int64_t sequence_count(const layout *l)
{
    return cot_is_present(l->cu_seqlens) ? l->cu_seqlens->shape[0] - 1 : l->B;
}

static sequence sequence_at(const layout *l, int64_t index)
{
    if (!cot_is_present(l->cu_seqlens))
        return (sequence){index, 0, l->T, index};
    const int32_t *starts = l->cu_seqlens->data;
    return (sequence){0, starts[index], starts[index + 1] - starts[index], index};
}

static void load_channel(channel *c, const layout *l, const sequence *s, const cot_tensor *x, const cot_tensor *state,
                         int64_t d)
{
    const int32_t *ids = cot_is_present(l->seq_idx) && s->length > 0 ? (int32_t *)l->seq_idx->data + s->b * l->T : NULL;
    c->has_state = cot_is_present(state);
    for (int64_t i = 0; i < c->positions; i++) {
        const int64_t t = i - (c->K - 1);
        if (t >= 0)
            c->xe[i] = row_at(x, s->b, d)[s->first + t];
        else
            c->xe[i] = cot_is_present(state) ? row_at(state, s->state, d)[i] : 0;
        c->sequence_id[i] = ids != NULL ? ids[t >= 0 ? t : 0] : 0;
    }
}

/* Does position i contribute to token t? */
static bool contributes(const channel *c, int64_t i, int64_t t)
{
    const int64_t id = c->sequence_id[c->K - 1 + t];
    return id >= 0 && c->sequence_id[i] == id;
}

/* Is position i a term of a sum for token t? */
static bool is_term(const channel *c, int64_t i, int64_t t)
{
    return contributes(c, i, t) && (c->has_state || i >= c->K - 1);
}

/* Does position i belong to the sequence of the last token? Without tokens, the final state is the initial state. */
static bool is_final(const channel *c, int64_t i)
{
    return c->length == 0 || contributes(c, i, c->length - 1);
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
    return c->sequence_id[c->K - 1 + t] < 0;
}

static long double sigmoid(double z)
{
    return 1 / (1 + expl(-z));
}

/* Kernels clamp z to about -87. There, silu and its derivative differ from their limits by about this. */
#define SILU_LIMIT_ERROR 0x1p-97

static void activate(const channel *c, cot_activation activation, int64_t t, double *y, double *magnitude)
{
    const double z = c->z[t];
    if (activation == COT_ACTIVATION_SILU && isinf(z)) {
        *y = z > 0 ? z : 0;
        *magnitude = -SILU_LIMIT_ERROR;
        return;
    }
    const long double s = sigmoid(z);
    const bool silu = activation == COT_ACTIVATION_SILU;
    *y = silu ? (double)(z * s) : z;
    *magnitude = c->z_magnitude[t] * (silu ? (double)(s * (1 + fabs(z) * sigmoid(-z))) : 1);
}

/* Allows NaN in row i of a magnitude [.., D, count]. Does nothing if the tensor is absent. */
static void allow_nan(const cot_tensor *magnitude, int64_t i, int64_t count)
{
    if (cot_is_present(magnitude))
        cot_allow_nan(values(magnitude) + i * count, count);
}

/* The largest distance in tokens between a position and an output that a kernel's taps connect. CUDA kernels round the
 * width up to 8. */
static int64_t max_tap_distance(const channel *c)
{
    return (c->K <= 8 ? 8 : c->K) - 1;
}

/* Is there a NaN or an infinity in positions [first, last], in the sequence of `position`? Checks xe, and g and z of
 * tokens. */
static bool nonfinite_near(const channel *c, int64_t position, int64_t first, int64_t last)
{
    for (int64_t i = first < 0 ? 0 : first; i <= last && i < c->positions; i++) {
        const int64_t t = i - (c->K - 1);
        if (c->sequence_id[i] == c->sequence_id[position] &&
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
    for (int64_t i = 0; cot_is_present(&a->y) && i < cot_elements(&a->y); i++)
        values(&a->y)[i] = values(&m->y)[i] = 0; /* for padding; tokens are written below */
    for (int64_t n = 0; n < sequence_count(&l) * l.D; n++) {
        const sequence s = sequence_at(&l, n / l.D);
        const int64_t d = n % l.D;
        channel c = make_channel(l.K, s.length);
        load_channel(&c, &l, &s, &a->x, &a->initial_state, d);
        compute_z(&c, values(&a->weight) + d * l.K, cot_is_present(&a->bias) ? values(&a->bias)[d] : 0);
        for (int64_t t = 0; cot_is_present(&a->y) && t < c.length; t++) {
            if (is_padding(&c, t))
                continue;
            double *magnitude = row_at(&m->y, s.b, d) + s.first + t;
            activate(&c, a->activation, t, row_at(&a->y, s.b, d) + s.first + t, magnitude);
            if (nonfinite_near(&c, l.K - 1 + t, l.K - 1 + t - max_tap_distance(&c),
                               t - 1)) /* in a tap beyond the width K */
                *magnitude = copysign(*magnitude, -1);
        }
        for (int64_t i = 0; cot_is_present(&a->final_state) && i < l.K - 1; i++) {
            const double value = is_final(&c, c.length + i) ? c.xe[c.length + i] : 0;
            row_at(&a->final_state, s.state, d)[i] = value;
            row_at(&m->final_state, s.state, d)[i] = fabs(value);
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
                factor = z > 0, magnitude = factor + SILU_LIMIT_ERROR;
        }
        c->g[t] = is_padding(c, t) ? 0 : (double)(dy[t] * factor);
        c->g_magnitude[t] = is_padding(c, t) ? 0 : (double)(fabs(dy[t]) * magnitude);
    }
}

/* The gradient of position i of xe, from the tokens that it contributes to and from final_state. */
static double column_gradient(const channel *c, int64_t i, const double *weight, const double *dfinal_state,
                              double *magnitude)
{
    long double gradient = 0;
    *magnitude = 0;
    for (int64_t k = 0; k < c->K; k++) {
        const int64_t t = i - k;
        if (t < 0 || t >= c->length || !contributes(c, i, t))
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

/* Adds the sum over the tokens of g[t] * xe[t+k], or of g[t] for k < 0. */
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
    for (int64_t i = 0; cot_is_present(out) && i < cot_elements(out); i++) {
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
    bool *nonfinite = allocate(l.D, sizeof *nonfinite); /* the data of the channel holds a NaN or an infinity */
    for (int64_t n = 0; n < sequence_count(&l) * l.D; n++) {
        const sequence s = sequence_at(&l, n / l.D);
        const int64_t d = n % l.D;
        const double *weight = values(&a->weight) + d * l.K;
        channel c = make_channel(l.K, s.length);
        load_channel(&c, &l, &s, &a->x, &a->initial_state, d);
        compute_z(&c, weight, cot_is_present(&a->bias) ? values(&a->bias)[d] : 0);
        compute_g(&c, a->activation, row_at(&a->dy, s.b, d) + s.first);
        const double *dfinal = cot_is_present(&a->dfinal_state) ? row_at(&a->dfinal_state, s.state, d) : NULL;
        nonfinite[d] = nonfinite[d] || !cot_all_finite(c.xe, c.positions) || !cot_all_finite(c.g, c.length) ||
                       !cot_all_finite(c.z, c.length);
        for (int64_t i = 0; i < c.positions; i++) {
            double magnitude;
            const double gradient = column_gradient(&c, i, weight, dfinal, &magnitude);
            const int64_t t = i - (l.K - 1);
            if (nonfinite_near(&c, i, i - max_tap_distance(&c), i + max_tap_distance(&c)))
                magnitude = copysign(magnitude, -1);
            if (t >= 0 && cot_is_present(&a->dx)) {
                row_at(&a->dx, s.b, d)[s.first + t] = gradient;
                row_at(&m->dx, s.b, d)[s.first + t] = magnitude;
            } else if (t < 0 && cot_is_present(&a->dinitial_state)) {
                row_at(&a->dinitial_state, s.state, d)[i] = gradient;
                row_at(&m->dinitial_state, s.state, d)[i] = magnitude;
            }
        }
        for (int64_t k = 0; cot_is_present(&a->dweight) && k < l.K; k++)
            add_sum(&c, k, values(&a->dweight) + d * l.K + k, values(&m->dweight) + d * l.K + k);
        if (cot_is_present(&a->dbias))
            add_sum(&c, -1, values(&a->dbias) + d, values(&m->dbias) + d);
        free_channel(&c);
    }
    for (int64_t d = 0; d < l.D; d++) {
        const bool weight_nonfinite = !cot_all_finite(values(&a->weight) + d * l.K, l.K);
        if (nonfinite[d] || weight_nonfinite) {
            allow_nan(&m->dweight, d, l.K);
            allow_nan(&m->dbias, d, 1);
        }
        if (!weight_nonfinite)
            continue;
        for (int64_t b = 0; b < l.B; b++)
            allow_nan(&m->dx, b * l.D + d, l.T);
        for (int64_t n = 0; n < sequence_count(&l); n++)
            allow_nan(&m->dinitial_state, n * l.D + d, l.K - 1);
    }
    free(nonfinite);
}

/* One row and channel of an update: the history and x form one channel of K-1+T positions, as in the forward. */
static void update_channel(const cot_causal_conv1d_update_args *a, const cot_causal_conv1d_update_args *m, int64_t b,
                           int64_t row, int64_t d)
{
    const int64_t T = a->x.rank == 3 ? a->x.shape[2] : 1, K = a->weight.shape[1], S = a->conv_state.shape[2];
    const bool ring = cot_is_present(&a->cache_seqlens) && S > 0;
    const int64_t start = ring ? ((int32_t *)a->cache_seqlens.data)[b] : S;
    const double *x = values(&a->x) + (b * a->x.shape[1] + d) * T;
    double *state = row_at(&a->conv_state, row, d);
    channel c = make_channel(K, T);
    c.has_state = true;
    for (int64_t i = 0; i < K - 1; i++) {
        const int64_t position = start - (K - 1) + i;
        c.xe[i] = state[ring ? (position % S + S) % S : position];
    }
    for (int64_t t = 0; t < T; t++)
        c.xe[K - 1 + t] = x[t];
    compute_z(&c, values(&a->weight) + d * K, cot_is_present(&a->bias) ? values(&a->bias)[d] : 0);
    for (int64_t t = 0; t < T; t++) {
        const int64_t i = (b * a->x.shape[1] + d) * T + t;
        activate(&c, a->activation, t, values(&a->y) + i, values(&m->y) + i);
        if (nonfinite_near(&c, K - 1 + t, K - 1 + t - max_tap_distance(&c), t - 1))
            values(&m->y)[i] = copysign(values(&m->y)[i], -1);
    }
    for (int64_t t = 0; ring && t < T; t++)
        state[(start + t) % S] = x[t];
    for (int64_t position = 0; !ring && position < S; position++)
        state[position] = position + T < S ? state[position + T] : x[position + T - S];
    free_channel(&c);
}

static void update(const void *args, void *magnitudes)
{
    const cot_causal_conv1d_update_args *a = args;
    const cot_causal_conv1d_update_args *m = magnitudes;
    for (int64_t i = 0; i < cot_elements(&a->y); i++)
        values(&a->y)[i] = values(&m->y)[i] = 0;
    for (int64_t b = 0; b < a->x.shape[0]; b++) {
        const int64_t row = cot_is_present(&a->conv_state_indices) ? ((int32_t *)a->conv_state_indices.data)[b] : b;
        for (int64_t d = 0; row >= 0 && d < a->x.shape[1]; d++)
            update_channel(a, m, b, row, d);
    }
    for (int64_t i = 0; i < cot_elements(&a->conv_state); i++)
        values(&m->conv_state)[i] = fabs(values(&a->conv_state)[i]);
}

void (*const cot_causal_conv1d_oracles[])(const void *, void *) = {forward, backward, update};
