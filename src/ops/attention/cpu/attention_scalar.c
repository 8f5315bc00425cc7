/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_scalar.c: the formulas of cotangent/attention.h as plain loops, for any sizes, strides, dtypes and
 * options. They are the baseline of speed, and of the norm rule: the error of another kernel may be at most 1.5 times
 * theirs. The oracle is the reference.
 *
 * Compiled twice: with float sums (f32, f16, bf16), and with COT_SCALAR_F64 and double sums (f64). An item is one
 * sequence and query head in the forward, and one sequence and key-value head in the backward. dbias and dsink have
 * their own passes, with one item per element. At most one row of scores is stored. */
#include "core/float16.h"
#include "ops/attention/attention_dropout.h"
#include "ops/attention/attention_problem.h"

#include <math.h>

#ifdef COT_SCALAR_F64
typedef double real;
#define NAME(stem) stem##_f64
#define EXP exp
#define LOG log
#define TANH tanh
#else
typedef float real;
#define NAME(stem) stem
#define EXP expf
#define LOG logf
#define TANH tanhf
#endif

cot_status NAME(attention_fwd_scalar)(cot_queue *, const void *, void *);
cot_status NAME(attention_bwd_scalar)(cot_queue *, const void *, void *);
cot_status NAME(attention_delta_scalar)(cot_queue *, const void *, void *);
cot_status NAME(attention_merge_scalar)(cot_queue *, const void *, void *);

static inline real load(const cot_tensor *t, int64_t index)
{
    return (real)cot_load_f64(t->data, t->dtype, index);
}

static inline void store(const cot_tensor *t, int64_t index, bool accumulate, double value)
{
    if (accumulate)
        value += cot_load_f64(t->data, t->dtype, index);
    cot_store_f64(t->data, t->dtype, index, value);
}

/* A row of a tensor. Loops over rows are inlined once for each dtype, because a branch on the dtype at every element
 * would take more time than the sums. */
typedef struct elements {
    const void *data;
    cot_dtype dtype;
    int64_t offset, stride;
} elements;

static elements elements_of(const cot_tensor *t, int64_t offset)
{
    return (elements){t->data, t->dtype, offset, t->stride[3]};
}

#define EACH_DTYPE(dtype, DO)           \
    switch (dtype) {                    \
    case COT_F32: DO(COT_F32); break;   \
    case COT_BF16: DO(COT_BF16); break; \
    case COT_F16: DO(COT_F16); break;   \
    default: DO(COT_F64); break;        \
    }

static inline __attribute__((always_inline)) real dot_as(elements a, elements b, cot_dtype dtype_a, cot_dtype dtype_b,
                                                         int64_t size)
{
    real sum = 0;
    for (int64_t c = 0; c < size; c++)
        sum += (real)cot_load_f64(a.data, dtype_a, a.offset + c * a.stride) *
               (real)cot_load_f64(b.data, dtype_b, b.offset + c * b.stride);
    return sum;
}

/* The dot product of two rows of `size` columns. */
static real dot(const cot_tensor *a, int64_t a_offset, const cot_tensor *b, int64_t b_offset, int64_t size)
{
    const elements x = elements_of(a, a_offset), y = elements_of(b, b_offset);
    if (x.dtype != y.dtype)
        return dot_as(x, y, x.dtype, y.dtype, size);
#define DOT(dtype) return dot_as(x, y, dtype, dtype, size)
    EACH_DTYPE(x.dtype, DOT)
#undef DOT
}

static inline __attribute__((always_inline)) void add_as(real *sums, real factor, elements x, cot_dtype dtype,
                                                         int64_t size)
{
    for (int64_t c = 0; c < size; c++)
        sums[c] += factor * (real)cot_load_f64(x.data, dtype, x.offset + c * x.stride);
}

/* sums += factor * row */
static void add_row(real *sums, real factor, const cot_tensor *t, int64_t offset, int64_t size)
{
    const elements x = elements_of(t, offset);
#define ADD(dtype) add_as(sums, factor, x, dtype, size)
    EACH_DTYPE(x.dtype, ADD)
#undef ADD
}

/* One sequence and query head. */
typedef struct head {
    const attention_problem *p;
    attention_sequence s;
    int64_t h, hkv;
    real alibi_slope;
    attention_dropout dropout;
} head;

static head head_at(const attention_problem *p, int64_t b, int64_t h)
{
    head a = {.p = p, .s = attention_sequence_at(p, b), .h = h, .hkv = h / (p->sizes.H / p->sizes.Hkv)};
    if (cot_is_present(&p->alibi_slopes) && b < p->sizes.B)
        a.alibi_slope = load(&p->alibi_slopes, attention_slope_offset(&p->alibi_slopes, b, h));
    a.dropout = attention_dropout_of(p, &a.s, h);
    return a;
}

/* s[i,j]; *softcap_slope becomes 1 - tanh^2. */
static real score(const head *a, int64_t i, int64_t j, real *softcap_slope)
{
    const attention_problem *p = a->p;
    const attention_sizes *sizes = &p->sizes;
    real s = (real)sizes->scale * dot(&p->q, attention_row_offset(&p->q, a->s.b, a->s.q_row + i, a->h), &p->k,
                                      attention_row_offset(&p->k, a->s.b, a->s.k_row + j, a->hkv), sizes->d_qk);
    *softcap_slope = 1;
    if (sizes->softcap > 0) {
        const real t = TANH(s / (real)sizes->softcap);
        s = (real)sizes->softcap * t;
        *softcap_slope = 1 - t * t;
    }
    const int64_t distance = i + a->s.diagonal - j;
    if (cot_is_present(&p->alibi_slopes))
        s -= a->alibi_slope * (real)(distance < 0 ? -distance : distance);
    if (cot_is_present(&p->bias))
        s += load(&p->bias, attention_bias_offset(&p->bias, a->s.b, a->h, i, j));
    return s;
}

/* ---- forward ------------------------------------------------------------------------------------------ */

static void store_row(const attention_problem *p, const head *a, int64_t row, const real *out, real divisor, real lse)
{
    const int64_t offset = cot_is_present(&p->out) ? attention_row_offset(&p->out, a->s.b, row, a->h) : 0;
    for (int64_t c = 0; cot_is_present(&p->out) && c < p->sizes.d_v; c++)
        cot_store_f64(p->out.data, p->out.dtype, offset + c * p->out.stride[3], divisor == 0 ? 0 : out[c] / divisor);
    if (cot_is_present(&p->lse))
        cot_store_f64(p->lse.data, p->lse.dtype, attention_lse_offset(&p->lse, a->s.b, a->h, row), lse);
}

static void forward_row(const head *a, int64_t i, real *scores, real *out)
{
    const attention_problem *p = a->p;
    const attention_span keys = attention_visible_keys(&p->sizes, &a->s, i);
    const bool has_sink = cot_is_present(&p->sink);
    const real sink = has_sink ? load(&p->sink, a->h * p->sink.stride[0]) : -INFINITY;
    real row_max = sink, ignored;
    for (int64_t j = keys.first; j < keys.end; j++) {
        scores[j] = score(a, i, j, &ignored);
        row_max = scores[j] > row_max || isnan(scores[j]) ? scores[j] : row_max;
    }
    for (int64_t c = 0; c < p->sizes.d_v; c++)
        out[c] = 0;
    if (row_max == -INFINITY) {
        store_row(p, a, a->s.q_row + i, out, 0, -INFINITY);
        return;
    }
    real sum = has_sink ? EXP(sink - row_max) : 0;
    for (int64_t j = keys.first; j < keys.end; j++) {
        const real e = EXP(scores[j] - row_max), weight = e * (real)attention_dropout_factor(&a->dropout, i, j);
        const int64_t v_offset = attention_row_offset(&p->v, a->s.b, a->s.k_row + j, a->hkv);
        sum += e;
        add_row(out, weight, &p->v, v_offset, p->sizes.d_v);
    }
    store_row(p, a, a->s.q_row + i, out, sum, row_max + LOG(sum));
}

typedef struct context {
    const attention_problem *problem;
    real *workspace;
} context;

static void forward_item(void *argument, int64_t item)
{
    const context *c = argument;
    const attention_problem *p = c->problem;
    const head a = head_at(p, item / p->sizes.H, item % p->sizes.H);
    real *scores = c->workspace + item * (p->sizes.Tk + p->sizes.d_v), *out = scores + p->sizes.Tk;
    for (int64_t i = 0; i < a.s.used_q; i++)
        forward_row(&a, i, scores, out);
    for (int64_t i = a.s.used_q; i < a.s.q_rows; i++)
        store_row(p, &a, a.s.q_row + i, NULL, 0, -INFINITY);
}

cot_status NAME(attention_fwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {problem, workspace};
    cot_run_items(queue, attention_sequence_count(c.problem) * c.problem->sizes.H, forward_item, &c);
    return COT_OK;
}

/* ---- backward ----------------------------------------------------------------------------------------- */

/* delta of query i: computed, or read from delta. */
static real delta_of(const head *a, int64_t i)
{
    const attention_problem *p = a->p;
    const int64_t row = a->s.q_row + i;
    if (cot_is_present(&p->delta))
        return load(&p->delta, attention_lse_offset(&p->delta, a->s.b, a->h, row));
    real delta = dot(&p->dout, attention_row_offset(&p->dout, a->s.b, row, a->h), &p->out,
                     attention_row_offset(&p->out, a->s.b, row, a->h), p->sizes.d_v);
    if (cot_is_present(&p->dlse))
        delta -= load(&p->dlse, attention_lse_offset(&p->dlse, a->s.b, a->h, row));
    return delta;
}

static real lse_of(const head *a, int64_t i)
{
    return load(&a->p->lse, attention_lse_offset(&a->p->lse, a->s.b, a->h, a->s.q_row + i));
}

/* P (times the dropout factor), dY and dS of one pair. */
typedef struct pair {
    real P, dY, dS;
} pair;

static pair pair_at(const head *a, int64_t i, int64_t j, real lse, real delta)
{
    const attention_problem *p = a->p;
    real softcap_slope;
    const real P = EXP(score(a, i, j, &softcap_slope) - lse),
               factor = (real)attention_dropout_factor(&a->dropout, i, j);
    const real dP = factor * dot(&p->dout, attention_row_offset(&p->dout, a->s.b, a->s.q_row + i, a->h), &p->v,
                                 attention_row_offset(&p->v, a->s.b, a->s.k_row + j, a->hkv), p->sizes.d_v);
    const real dY = P * (dP - delta);
    return (pair){P * factor, dY, dY * softcap_slope};
}

static void backward_row(const head *a, int64_t i, real *dq, real *dk, real *dv)
{
    const attention_problem *p = a->p;
    const int64_t d = p->sizes.d_qk, row = a->s.q_row + i;
    const attention_span keys = attention_visible_keys(&p->sizes, &a->s, i);
    const real scale = (real)p->sizes.scale, lse = lse_of(a, i), delta = delta_of(a, i);
    const int64_t q_offset = attention_row_offset(&p->q, a->s.b, row, a->h),
                  dout_offset = attention_row_offset(&p->dout, a->s.b, row, a->h);
    for (int64_t c = 0; c < d; c++)
        dq[c] = 0;
    for (int64_t j = keys.first; lse != -INFINITY && j < keys.end; j++) {
        const pair x = pair_at(a, i, j, lse, delta);
        const int64_t k_offset = attention_row_offset(&p->k, a->s.b, a->s.k_row + j, a->hkv);
        add_row(dq, x.dS, &p->k, k_offset, d);
        add_row(dk + j * d, x.dS, &p->q, q_offset, d);
        add_row(dv + j * p->sizes.d_v, x.P, &p->dout, dout_offset, p->sizes.d_v);
    }
    const int64_t offset = cot_is_present(&p->dq) ? attention_row_offset(&p->dq, a->s.b, row, a->h) : 0;
    for (int64_t c = 0; cot_is_present(&p->dq) && c < d; c++)
        store(&p->dq, offset + c * p->dq.stride[3], p->accumulate, scale * dq[c]);
}

/* Stores all rows of one head of dk or dv from their sums. */
static void store_sums(const cot_tensor *t, const head *a, const real *sums, int64_t size, real factor)
{
    for (int64_t j = 0; cot_is_present(t) && j < a->s.k_rows; j++) {
        const int64_t offset = attention_row_offset(t, a->s.b, a->s.k_row + j, a->hkv);
        for (int64_t c = 0; c < size; c++)
            store(t, offset + c * t->stride[3], a->p->accumulate, factor * sums[j * size + c]);
    }
}

static void backward_item(void *argument, int64_t item)
{
    const context *c = argument;
    const attention_problem *p = c->problem;
    const attention_sizes *sizes = &p->sizes;
    const int64_t b = item / sizes->Hkv, hkv = item % sizes->Hkv, group = sizes->H / sizes->Hkv;
    const attention_sequence s = attention_sequence_at(p, b);
    /* The sums of dk and dv: one piece [Hkv][k_rows][d + d_v] per sequence. */
    const int64_t rows_before = sizes->packed ? s.k_row : b * sizes->Tk;
    real *dk = c->workspace + (rows_before * sizes->Hkv + hkv * s.k_rows) * (sizes->d_qk + sizes->d_v),
         *dv = dk + s.k_rows * sizes->d_qk;
    real *dq = c->workspace + sizes->rows_k * sizes->Hkv * (sizes->d_qk + sizes->d_v) + item * sizes->d_qk;
    for (int64_t n = 0; n < s.k_rows * (sizes->d_qk + sizes->d_v); n++)
        dk[n] = 0;
    for (int64_t h = hkv * group; h < (hkv + 1) * group; h++) {
        const head a = head_at(p, b, h);
        for (int64_t i = 0; i < s.used_q; i++)
            backward_row(&a, i, dq, dk, dv);
        for (int64_t i = s.used_q; cot_is_present(&p->dq) && i < s.q_rows; i++)
            for (int64_t n = 0; n < sizes->d_qk; n++)
                store(&p->dq, attention_row_offset(&p->dq, b, s.q_row + i, h) + n * p->dq.stride[3], p->accumulate, 0);
    }
    const head a = {.p = p, .s = s, .hkv = hkv};
    store_sums(&p->dk, &a, dk, sizes->d_qk, (real)sizes->scale);
    store_sums(&p->dv, &a, dv, sizes->d_v, 1);
}

/* One element of dsink or dbias may sum over the whole call, so it sums in double. */
static void dsink_item(void *argument, int64_t h)
{
    const attention_problem *p = argument;
    const real sink = load(&p->sink, h * p->sink.stride[0]);
    double sum = 0;
    for (int64_t b = 0; b < p->sizes.B; b++) {
        const head a = head_at(p, b, h);
        for (int64_t i = 0; i < a.s.used_q; i++) {
            const real lse = lse_of(&a, i);
            if (lse != -INFINITY)
                sum -= (double)(EXP(sink - lse) * delta_of(&a, i));
        }
    }
    store(&p->dsink, h * p->dsink.stride[0], p->accumulate, sum);
}

/* The range of an axis that an index of dbias covers. */
static attention_span bias_span(int64_t size, int64_t index, int64_t all)
{
    return size == 1 ? (attention_span){0, all} : (attention_span){index, index + 1 < all ? index + 1 : all};
}

static void dbias_item(void *argument, int64_t item)
{
    const attention_problem *p = argument;
    const int64_t *shape = p->dbias.shape;
    const int64_t j_index = item % shape[3], i_index = item / shape[3] % shape[2],
                  h_index = item / shape[3] / shape[2] % shape[1];
    const int64_t b_index = item / shape[3] / shape[2] / shape[1];
    const attention_span batch = bias_span(shape[0], b_index, p->sizes.B),
                         heads = bias_span(shape[1], h_index, p->sizes.H);
    double sum = 0;
    for (int64_t b = batch.first; b < batch.end; b++) {
        for (int64_t h = heads.first; h < heads.end; h++) {
            const head a = head_at(p, b, h);
            const attention_span rows = bias_span(shape[2], i_index, a.s.used_q);
            for (int64_t i = rows.first; i < rows.end; i++) {
                const attention_span keys = attention_visible_keys(&p->sizes, &a.s, i),
                                     key_range = bias_span(shape[3], j_index, a.s.used_k);
                const real lse = lse_of(&a, i), delta = delta_of(&a, i);
                const int64_t first = keys.first > key_range.first ? keys.first : key_range.first;
                for (int64_t j = first; lse != -INFINITY && j < key_range.end && j < keys.end; j++)
                    sum += (double)pair_at(&a, i, j, lse, delta).dY;
            }
        }
    }
    const int64_t offset = b_index * p->dbias.stride[0] + h_index * p->dbias.stride[1] + i_index * p->dbias.stride[2] +
                           j_index * p->dbias.stride[3];
    store(&p->dbias, offset, p->accumulate, sum);
}

cot_status NAME(attention_bwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {problem, workspace};
    const attention_problem *p = problem;
    if (cot_is_present(&p->dq) || cot_is_present(&p->dk) || cot_is_present(&p->dv))
        cot_run_items(queue, attention_sequence_count(p) * p->sizes.Hkv, backward_item, &c);
    if (cot_is_present(&p->dsink))
        cot_run_items(queue, p->sizes.H, dsink_item, (void *)problem);
    if (cot_is_present(&p->dbias))
        cot_run_items(queue, cot_elements(&p->dbias), dbias_item, (void *)problem);
    return COT_OK;
}

/* ---- delta and merge ---------------------------------------------------------------------------------- */

static void delta_item(void *argument, int64_t item)
{
    const attention_delta_problem *p = argument;
    const cot_attention_delta_args *a = &p->args;
    const int64_t b = item / p->sizes.H, h = item % p->sizes.H;
    for (int64_t i = 0; i < p->sizes.Tq; i++) {
        real delta = dot(&a->dout, attention_row_offset(&a->dout, b, i, h), &a->out,
                         attention_row_offset(&a->out, b, i, h), p->sizes.d_v);
        if (cot_is_present(&a->dlse))
            delta -= load(&a->dlse, attention_lse_offset(&a->dlse, b, h, i));
        store(&a->delta, attention_lse_offset(&a->delta, b, h, i), false, delta);
    }
}

cot_status NAME(attention_delta_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    const attention_sizes *sizes = problem;
    (void)workspace;
    cot_run_items(queue, sizes->B * sizes->H, delta_item, (void *)problem);
    return COT_OK;
}

static void merge_item(void *argument, int64_t item)
{
    const attention_merge_problem *p = argument;
    const cot_attention_merge_args *a = &p->args;
    const int64_t b = item / p->sizes.H, h = item % p->sizes.H;
    const real sink = cot_is_present(&a->sink) ? load(&a->sink, h * a->sink.stride[0]) : -INFINITY;
    for (int64_t i = 0; i < p->sizes.Tq; i++) {
        const real lse_a = load(&a->lse_a, attention_lse_offset(&a->lse_a, b, h, i));
        const real lse_b = load(&a->lse_b, attention_lse_offset(&a->lse_b, b, h, i));
        real max_lse = lse_a > lse_b || isnan(lse_a) ? lse_a : lse_b;
        max_lse = sink > max_lse || isnan(sink) ? sink : max_lse;
        const bool empty = max_lse == -INFINITY;
        const real weight_a = empty ? 0 : EXP(lse_a - max_lse), weight_b = empty ? 0 : EXP(lse_b - max_lse);
        const real sum = empty ? 1 : weight_a + weight_b + EXP(sink - max_lse);
        for (int64_t c = 0; cot_is_present(&a->out) && c < p->sizes.d_v; c++) {
            const real x = load(&a->out_a, attention_row_offset(&a->out_a, b, i, h) + c * a->out_a.stride[3]);
            const real y = load(&a->out_b, attention_row_offset(&a->out_b, b, i, h) + c * a->out_b.stride[3]);
            store(&a->out, attention_row_offset(&a->out, b, i, h) + c * a->out.stride[3], false,
                  empty ? 0 : (weight_a * x + weight_b * y) / sum);
        }
        if (cot_is_present(&a->lse))
            store(&a->lse, attention_lse_offset(&a->lse, b, h, i), false, empty ? -INFINITY : max_lse + LOG(sum));
    }
}

cot_status NAME(attention_merge_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    const attention_sizes *sizes = problem;
    (void)workspace;
    cot_run_items(queue, sizes->B * sizes->H, merge_item, (void *)problem);
    return COT_OK;
}
