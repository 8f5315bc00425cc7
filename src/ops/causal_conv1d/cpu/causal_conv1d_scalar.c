/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_scalar.c: the formulas of cotangent/causal_conv1d.h as plain loops, for any width, strides, dtypes,
 * sequences and states. The accuracy and speed of the other kernels are compared with these.
 *
 * Compiled twice: with float sums (f32, f16, bf16), and with COT_SCALAR_F64 and double sums (f64). A forward item is
 * one channel of one span. A backward item is one channel of all spans, so that dweight and dbias are summed in one
 * fixed order. */
#include "core/float16.h"
#include "ops/causal_conv1d/causal_conv1d_problem.h"

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

cot_status NAME(causal_conv1d_fwd_scalar)(cot_queue *, const void *, void *);
cot_status NAME(causal_conv1d_bwd_scalar)(cot_queue *, const void *, void *);
cot_status NAME(causal_conv1d_update_scalar)(cot_queue *, const void *, void *);

static inline real load3(const cot_tensor *t, int64_t i, int64_t j, int64_t k)
{
    return (real)cot_load_f64(t->data, t->dtype, i * t->stride[0] + j * t->stride[1] + k * t->stride[2]);
}

static inline void store3(const cot_tensor *t, int64_t i, int64_t j, int64_t k, real value)
{
    cot_store_f64(t->data, t->dtype, i * t->stride[0] + j * t->stride[1] + k * t->stride[2], value);
}

static inline real load2(const cot_tensor *t, int64_t i, int64_t j)
{
    return (real)cot_load_f64(t->data, t->dtype, i * t->stride[0] + j * t->stride[1]);
}

static inline real load1_or_zero(const cot_tensor *t, int64_t i)
{
    return cot_is_present(t) ? (real)cot_load_f64(t->data, t->dtype, i * t->stride[0]) : 0;
}

/* sigma(z), and sigma(-z) = 1 - sigma(z). A subtraction would keep only 10 bits of it for z = 10. The argument of exp
 * is never positive, so exp cannot overflow. */
static inline real sigmoid(real z, real *complement)
{
    const real e = EXP(-(z < 0 ? -z : z)), larger = 1 / (1 + e);
    *complement = z < 0 ? larger : e * larger;
    return z < 0 ? e * larger : larger;
}

static inline real activate(cot_activation activation, real z)
{
    real complement;
    if (activation == COT_ACTIVATION_SILU)
        return z == -INFINITY ? 0 : z * sigmoid(z, &complement);
    return z;
}

/* xe at position p: a token, or a position of the initial state for first-K+1 <= p < first. */
static inline real input_at(const conv1d_sizes *sizes, const conv1d_span *span, const cot_tensor *x,
                            const cot_tensor *initial_state, int64_t d, int64_t p)
{
    if (p >= span->first)
        return load3(x, span->b, d, p);
    return cot_is_present(initial_state) ? load3(initial_state, span->state, d, p - span->first + sizes->K - 1) : 0;
}

/* Long sums are summed in chunks, so that the rounding error grows with the number of chunks, not of terms. Without
 * chunks, a sum of 150 taps was out of the check's tolerance for 1 output in 20000. */
enum { TAP_CHUNK = 16, TOKEN_CHUNK = 16 };

static real convolve(const conv1d_sizes *sizes, const conv1d_span *span, const cot_tensor *x,
                     const cot_tensor *initial_state, const cot_tensor *weight, real bias, int64_t d, int64_t t)
{
    real z = bias, chunk = 0;
    for (int64_t k = 0; k < sizes->K; k++) {
        const int64_t p = t - (sizes->K - 1) + k;
        if (conv1d_contributes(span, p, t))
            chunk += load2(weight, d, k) * input_at(sizes, span, x, initial_state, d, p);
        if ((k + 1) % TAP_CHUNK == 0) {
            z += chunk;
            chunk = 0;
        }
    }
    return z + chunk;
}

/* ---- forward ------------------------------------------------------------------------------------------ */

static void forward_item(void *context, int64_t index)
{
    const conv1d_forward_problem *problem = context;
    const cot_causal_conv1d_forward_args *a = &problem->args;
    const conv1d_sizes *sizes = &problem->sizes;
    const int64_t d = index % sizes->D;
    const conv1d_span span = conv1d_span_at(sizes, &a->seq_idx, &a->cu_seqlens, index / sizes->D);
    const real bias = load1_or_zero(&a->bias, d);
    for (int64_t t = span.first; cot_is_present(&a->y) && t < span.end; t++) {
        if (conv1d_sequence_id(&span, t) < 0) {
            store3(&a->y, span.b, d, t, 0);
            continue;
        }
        const real z = convolve(sizes, &span, &a->x, &a->initial_state, &a->weight, bias, d, t);
        store3(&a->y, span.b, d, t, activate(a->activation, z));
    }
    for (int64_t i = 0; cot_is_present(&a->final_state) && span.state >= 0 && i < sizes->K - 1; i++) {
        const int64_t p = span.end - (sizes->K - 1) + i;
        const bool counts = conv1d_contributes(&span, p, span.end - 1);
        store3(&a->final_state, span.state, d, i, counts ? input_at(sizes, &span, &a->x, &a->initial_state, d, p) : 0);
    }
}

cot_status NAME(causal_conv1d_fwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    conv1d_forward_problem *p = (conv1d_forward_problem *)problem;
    cot_run_items(queue, conv1d_span_count(&p->sizes, &p->args.cu_seqlens) * p->sizes.D, forward_item, p);
    return COT_OK;
}

/* ---- backward ----------------------------------------------------------------------------------------- */

typedef struct backward_context {
    const conv1d_backward_problem *problem;
    real *workspace; /* [D][3K+2] */
} backward_context;

/* The sums of one channel, K of dweight and one of dbias: of the current chunk, and of all finished chunks. */
typedef struct channel_sums {
    real *chunk, *total;
    int64_t K, terms;
} channel_sums;

static void close_chunk(channel_sums *sums)
{
    for (int64_t k = 0; k <= sums->K; k++) {
        sums->total[k] += sums->chunk[k];
        sums->chunk[k] = 0;
    }
    sums->terms = 0;
}

/* dL/dz of token t. */
static real gradient_of_z(const conv1d_backward_problem *problem, const conv1d_span *span, real bias, int64_t d,
                          int64_t t)
{
    const cot_causal_conv1d_backward_args *a = &problem->args;
    const real dy = load3(&a->dy, span->b, d, t);
    if (a->activation == COT_ACTIVATION_NONE)
        return dy;
    const real z = convolve(&problem->sizes, span, &a->x, &a->initial_state, &a->weight, bias, d, t);
    real complement;
    const real s = sigmoid(z, &complement);
    return isinf(z) ? dy * s : dy * s * (1 + z * complement);
}

static void backward_span(const conv1d_backward_problem *problem, const conv1d_span *span, int64_t d, real *ring,
                          channel_sums *sums)
{
    const cot_causal_conv1d_backward_args *a = &problem->args;
    const conv1d_sizes *sizes = &problem->sizes;
    const int64_t K = sizes->K;
    const real bias = load1_or_zero(&a->bias, d);
    /* From the last token to the first: at position p the ring holds g[p] .. g[p+K-1], g[t] at index t mod K. */
    for (int64_t p = span->end - 1; p >= span->first - (K - 1); p--) {
        const bool token = p >= span->first;
        if (token) {
            const bool padding = conv1d_sequence_id(span, p) < 0;
            const real g = padding ? 0 : gradient_of_z(problem, span, bias, d, p);
            ring[p % K] = g;
            for (int64_t k = 0; !padding && k < K; k++)
                if (conv1d_contributes(span, p - (K - 1) + k, p))
                    sums->chunk[k] += g * input_at(sizes, span, &a->x, &a->initial_state, d, p - (K - 1) + k);
            sums->chunk[K] += g;
            if (++sums->terms == TOKEN_CHUNK)
                close_chunk(sums);
        }
        if (token ? !cot_is_present(&a->dx) : !cot_is_present(&a->dinitial_state) || span->state < 0)
            continue;
        real gradient = 0, chunk = 0;
        for (int64_t j = token ? 0 : span->first - p; j < K && p + j < span->end; j++) {
            if (conv1d_contributes(span, p, p + j))
                chunk += load2(&a->weight, d, K - 1 - j) * ring[(p + j) % K];
            if ((j + 1) % TAP_CHUNK == 0) {
                gradient += chunk;
                chunk = 0;
            }
        }
        gradient += chunk;
        const int64_t state_position = p - span->end + K - 1;
        if (cot_is_present(&a->dfinal_state) && span->state >= 0 && state_position >= 0 &&
            conv1d_contributes(span, p, span->end - 1))
            gradient += load3(&a->dfinal_state, span->state, d, state_position);
        if (token)
            store3(&a->dx, span->b, d, p, gradient);
        else
            store3(&a->dinitial_state, span->state, d, p - span->first + K - 1, gradient);
    }
}

static void store_gradient(const cot_tensor *out, int64_t index, bool accumulate, real value)
{
    if (accumulate)
        value += (real)cot_load_f64(out->data, out->dtype, index);
    cot_store_f64(out->data, out->dtype, index, value);
}

static void backward_item(void *context, int64_t d)
{
    const backward_context *c = context;
    const cot_causal_conv1d_backward_args *a = &c->problem->args;
    const int64_t K = c->problem->sizes.K;
    real *ring = c->workspace + d * (3 * K + 2);
    channel_sums sums = {.chunk = ring + K, .total = ring + 2 * K + 1, .K = K, .terms = 0};
    for (int64_t i = 0; i < 3 * K + 2; i++)
        ring[i] = 0;
    const int64_t spans = conv1d_span_count(&c->problem->sizes, &a->cu_seqlens);
    for (int64_t s = 0; s < spans; s++) {
        const conv1d_span span = conv1d_span_at(&c->problem->sizes, &a->seq_idx, &a->cu_seqlens, s);
        backward_span(c->problem, &span, d, ring, &sums);
        close_chunk(&sums);
    }
    for (int64_t k = 0; cot_is_present(&a->dweight) && k < K; k++)
        store_gradient(&a->dweight, d * a->dweight.stride[0] + k * a->dweight.stride[1], a->accumulate, sums.total[k]);
    if (cot_is_present(&a->dbias))
        store_gradient(&a->dbias, d * a->dbias.stride[0], a->accumulate, sums.total[K]);
}

cot_status NAME(causal_conv1d_bwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    backward_context context = {problem, workspace};
    cot_run_items(queue, context.problem->sizes.D, backward_item, &context);
    return COT_OK;
}

/* ---- update ------------------------------------------------------------------------------------------- */

static void update_item(void *context, int64_t index)
{
    const conv1d_update_problem *problem = context;
    const cot_causal_conv1d_update_args *a = &problem->args;
    const int64_t K = problem->sizes.K, T = problem->sizes.T, S = problem->S;
    const int64_t b = index / problem->sizes.D, d = index % problem->sizes.D;
    const int64_t row = cot_is_present(&a->conv_state_indices) ? conv1d_index(&a->conv_state_indices, b) : b;
    if (row < 0) {
        for (int64_t t = 0; t < T; t++)
            store3(&a->y, b, d, t, 0);
        return;
    }
    const bool is_ring = cot_is_present(&a->cache_seqlens);
    const int64_t start = is_ring ? conv1d_index(&a->cache_seqlens, b) % S : S; /* the position of x[0] in a state */
    const real bias = load1_or_zero(&a->bias, d);
    for (int64_t t = 0; t < T; t++) {
        real z = bias;
        for (int64_t k = 0; k < K; k++) {
            const int64_t p = t - (K - 1) + k;
            const int64_t position = start + p; /* in the state, for p < 0 */
            const real input =
                p >= 0 ? load3(&a->x, b, d, p) : load3(&a->conv_state, row, d, position < 0 ? position + S : position);
            z += load2(&a->weight, d, k) * input;
        }
        store3(&a->y, b, d, t, activate(a->activation, z));
    }
    if (is_ring) {
        for (int64_t t = T > S ? T - S : 0; t < T; t++)
            store3(&a->conv_state, row, d, (start + t) % S, load3(&a->x, b, d, t));
        return;
    }
    for (int64_t position = 0; position < S; position++) {
        const int64_t source = position + T;
        store3(&a->conv_state, row, d, position,
               source < S ? load3(&a->conv_state, row, d, source) : load3(&a->x, b, d, source - S));
    }
}

cot_status NAME(causal_conv1d_update_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    conv1d_update_problem *p = (conv1d_update_problem *)problem;
    cot_run_items(queue, p->sizes.B * p->sizes.D, update_item, p);
    return COT_OK;
}
