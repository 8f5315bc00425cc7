/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_ref.c: the oracle, in long double: the formulas of cotangent/attention.h as plain loops over whole rows of
 * scores. All tensors are f64, row-major. Sums are long double where the compiler has one. If all inputs are numbers
 * of float32 or shorter formats, sums are double, which takes much less time. Products of two inputs are exact then,
 * and the error of double sums is negligible against a tolerance of 2^-24.
 *
 * Magnitudes. Every intermediate has a magnitude: the size of its error in units of roundoff. The magnitude of a sum
 * is the sum of its terms' absolute values. The magnitude of a function's value is the function's derivative times
 * the magnitude of its argument. An error e of a score makes a relative error e of exp(score). With M(x) for the
 * magnitude of x:
 *     M(c) = |scale| sum |q k|;   M(s) = (1-t^2) M(c) + |slope (i+off-j)| + |bias| + |s|
 *     M(lse) = 1 + |lse| + sum P M(s);  M(P) = P (1 + M(s) + M(lse));  M(out) = sum M(P) |v|
 *     M(dP) = sum |dout v|;  M(delta) = sum |dout out| + |dlse|;  M(dY) = M(P) |dP - delta| + P (M(dP) + M(delta))
 *     M(dS) = M(dY) (1-t^2) + |dY| (1 + t^2 + 2 |t| (1-t^2) M(c) / softcap)
 * and so on for the gradients. In the backward lse is an input, so M(lse) = |lse| there.
 *
 * A P or dS rounded to float16 has an error of up to 2^-25, however small it is: that is half the spacing below
 * float16's normal range. The error rule allows 2^-9 of a magnitude there, so SUBNORMAL_MAGNITUDE, 2^-16, is added to
 * M(P) and M(dS). For longer formats the rule allows so little that this adds nothing, except for a P below the range
 * of float32.
 *
 * NaN and infinities follow the formulas, and keys outside the mask take no part. But kernels multiply whole tiles. A
 * pair outside the mask has the weight 0 there, and 0 times NaN is NaN. So magnitudes allow NaN (by their sign bit)
 * where such a pair shares a tile of at most TILE queries and TILE keys with a pair inside the mask. They also allow it
 * where an infinity meets a weight below MIN_WEIGHT, which a kernel may round to 0. */
#include "attention_ref.h"

#include "cases/cases.h"
#include "core/tensor.h"

#include <cotangent/attention.h>
#include <math.h>
#include <stdlib.h>

#define SUBNORMAL_MAGNITUDE 0x1p-16

#define MIN_WEIGHT 0x1p-14 /* the smallest normal number of float16 */

enum { TILE = 256 };

/* ---- the call: what forward and backward share -------------------------------------------------------------- */

typedef struct call {
    cot_attention_forward_args a; /* of a backward: the members with the same names */
    int64_t B, H, Hkv, group, d, d_v;
    bool packed, wide;  /* wide: sums are long double */
    bool has_nonfinite; /* an input holds a NaN or an infinity */
    double scale;
    int64_t dropped; /* drop probability times 65536 */
} call;

static bool all_float32(const cot_tensor *t)
{
    for (int64_t i = 0; cot_is_present(t) && i < cot_elements(t); i++)
        if (!isnan(((double *)t->data)[i]) && (double)(float)((double *)t->data)[i] != ((double *)t->data)[i])
            return false;
    return true;
}

static bool is_finite(const cot_tensor *t)
{
    return !cot_is_present(t) || cot_all_finite(t->data, cot_elements(t));
}

static call make_call(const cot_attention_forward_args *a)
{
    const bool packed = cot_is_present(&a->cu_seqlens_q);
    const int64_t *q = a->q.shape + a->q.rank - 2, *k = a->k.shape + a->k.rank - 2, *v = a->v.shape + a->v.rank - 2;
    call c = {.a = *a, .H = q[0], .Hkv = k[0], .group = q[0] / k[0], .d = q[1], .d_v = v[1], .packed = packed};
    c.B = packed ? a->cu_seqlens_q.shape[0] - 1 : a->q.shape[0];
    c.scale = a->scale != 0 ? a->scale : 1 / sqrt((double)c.d);
    c.dropped = (int64_t)floor(65536 * a->dropout_p + 0.5);
    c.has_nonfinite = !is_finite(&a->q) || !is_finite(&a->k) || !is_finite(&a->v);
    c.wide = !all_float32(&a->q) || !all_float32(&a->k) || !all_float32(&a->v);
    return c;
}

/* Sequence b. Its rows begin at q_row and k_row of all rows; the first Tq and Tk of them are used. `off` is that of
 * the header, for the whole sequence. The call's first query and key are i0 and j0 of that sequence. */
typedef struct sequence {
    int64_t b, q_row, k_row, Tq, Tk, off, i0, j0;
} sequence;

static int64_t load_i32(const cot_tensor *t, int64_t i)
{
    return ((const int32_t *)t->data)[i];
}

static int64_t clamp_length(int64_t value, int64_t max)
{
    return value < 0 ? 0 : value > max ? max : value;
}

static sequence make_sequence(const call *c, int64_t b)
{
    const cot_attention_forward_args *a = &c->a;
    const int64_t rows_q =
        c->packed ? load_i32(&a->cu_seqlens_q, b + 1) - load_i32(&a->cu_seqlens_q, b) : a->q.shape[1];
    const int64_t rows_k =
        c->packed ? load_i32(&a->cu_seqlens_k, b + 1) - load_i32(&a->cu_seqlens_k, b) : a->k.shape[1];
    sequence s = {.b = b, .i0 = a->q_begin, .j0 = a->k_begin};
    s.q_row = c->packed ? load_i32(&a->cu_seqlens_q, b) : b * rows_q;
    s.k_row = c->packed ? load_i32(&a->cu_seqlens_k, b) : b * rows_k;
    int64_t full_q = a->q_length > 0 ? a->q_length : rows_q, full_k = a->k_length > 0 ? a->k_length : rows_k;
    if (cot_is_present(&a->seqused_q))
        full_q = load_i32(&a->seqused_q, b);
    if (cot_is_present(&a->seqused_k))
        full_k = load_i32(&a->seqused_k, b);
    s.off = full_k - full_q;
    s.Tq = clamp_length(full_q - s.i0, rows_q);
    s.Tk = clamp_length(full_k - s.j0, rows_k);
    return s;
}

static double *rows_of(const cot_tensor *t, int64_t row, int64_t head)
{
    const int64_t *heads = t->shape + t->rank - 2;
    return (double *)t->data + (row * heads[0] + head) * heads[1];
}

/* The index of a query's lse, dlse or delta: [B,H,T], or packed [H,T]. */
static int64_t statistic_index(const call *c, const sequence *s, int64_t h, int64_t i)
{
    const int64_t T = c->packed ? c->a.q.shape[0] : c->a.q.shape[1];
    return c->packed ? h * T + s->q_row + i : (s->b * c->H + h) * T + i;
}

static int64_t bias_index(const cot_tensor *t, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const int64_t at[4] = {b, h, i, j};
    int64_t index = 0;
    for (int axis = 0; axis < 4; axis++)
        index = index * t->shape[axis] + (t->shape[axis] == 1 ? 0 : at[axis]);
    return index;
}

static bool visible(const call *c, const sequence *s, int64_t i, int64_t j)
{
    const int64_t right = s->j0 + j - (s->i0 + i + s->off); /* distance to the right of the diagonal */
    const cot_attention_forward_args *a = &c->a;
    if (a->causal && right > 0)
        return false;
    if (a->window && a->window_right >= 0 && right > a->window_right)
        return false;
    return !(a->window && a->window_left >= 0 && -right > a->window_left);
}

/* ---- NaN and infinities: see the head of this file ----------------------------------------------------- */

static bool row_is_finite(const cot_tensor *t, int64_t row, int64_t head)
{
    return cot_all_finite(rows_of(t, row, head), t->shape[t->rank - 1]);
}

/* Whether query i and key j may share a tile with a pair inside the mask. */
static bool share_tile(const call *c, const sequence *s, int64_t i, int64_t j)
{
    const cot_attention_forward_args *a = &c->a;
    for (int64_t row = i < TILE ? 0 : i - TILE + 1; row < i + TILE && row < s->Tq; row++) {
        const int64_t diagonal = s->i0 + row + s->off - s->j0;
        int64_t first = j < TILE ? 0 : j - TILE + 1, last = j + TILE < s->Tk ? j + TILE - 1 : s->Tk - 1;
        if (a->window && a->window_left >= 0 && diagonal - a->window_left > first)
            first = diagonal - a->window_left;
        if (a->window && a->window_right >= 0 && diagonal + a->window_right < last)
            last = diagonal + a->window_right;
        if (a->causal && diagonal < last)
            last = diagonal;
        if (first <= last)
            return true;
    }
    return false;
}

/* The maximum, or NaN if either is NaN. */
static double max_or_nan(double a, double b)
{
    return isnan(a) || a > b ? a : b;
}

/* ---- dropout ------------------------------------------------------------------------------------------------ */

static void philox(uint32_t x[4], uint32_t k0, uint32_t k1)
{
    for (int round = 0; round < 10; round++, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
        const uint64_t left = (uint64_t)0xd2511f53u * x[0], right = (uint64_t)0xcd9e8d57u * x[2];
        const uint32_t y[4] = {(uint32_t)(right >> 32) ^ x[1] ^ k0, (uint32_t)right, (uint32_t)(left >> 32) ^ x[3] ^ k1,
                               (uint32_t)left};
        memcpy(x, y, sizeof y);
    }
}

static uint64_t load_u64(const cot_tensor *t)
{
    return cot_is_present(t) ? (uint32_t)load_i32(t, 0) + ((uint64_t)(uint32_t)load_i32(t, 1) << 32) : 0;
}

static double dropout_factor(const call *c, const sequence *s, int64_t h, int64_t i, int64_t j)
{
    if (c->dropped == 0)
        return 1;
    if (c->dropped == 65536)
        return 0;
    const cot_attention_forward_args *a = &c->a;
    const uint64_t seed = a->dropout_seed + load_u64(&a->dropout_seed_tensor);
    const uint64_t offset = a->dropout_offset + load_u64(&a->dropout_offset_tensor);
    const int64_t full_q = a->q_length > 0 ? a->q_length : a->q.shape[1];
    const int64_t R = c->packed ? load_i32(&a->cu_seqlens_q, c->B) : c->B * full_q;
    const int64_t row = c->packed ? s->q_row + i : s->b * full_q + s->i0 + i, column = s->j0 + j;
    const int64_t L = c->packed ? a->max_seqlen_k : a->k_length > 0 ? a->k_length : a->k.shape[1];
    const uint64_t n = (uint64_t)((h * R + row) * ((L + 7) / 8) + column / 8);
    uint32_t x[4] = {(uint32_t)offset, (uint32_t)(offset >> 32), (uint32_t)n, (uint32_t)(n >> 32)};
    philox(x, (uint32_t)seed, (uint32_t)(seed >> 32));
    const uint32_t word = x[column % 8 / 2], draw = column % 2 ? word >> 16 : word & 0xffff;
    return draw < (uint32_t)c->dropped ? 0 : 65536.0 / (double)(65536 - c->dropped);
}

/* ---- sums --------------------------------------------------------------------------------------------------- */

/* sum a[n] b[n]; *magnitude becomes the sum of its terms' absolute values. */
static long double dot_product(const call *c, const double *a, const double *b, int64_t count, double *magnitude)
{
    double sum = 0, terms = 0;
#pragma omp simd reduction(+ : sum, terms)
    for (int64_t n = 0; n < count; n++) {
        sum += a[n] * b[n];
        terms += fabs(a[n] * b[n]);
    }
    *magnitude = terms;
    if (!c->wide)
        return sum;
    long double wide = 0;
    for (int64_t n = 0; n < count; n++)
        wide += (long double)a[n] * b[n];
    return wide;
}

static long double exponential(const call *c, long double x)
{
    return c->wide ? expl(x) : (long double)exp((double)x);
}

/* The sums of a row of an output. */
typedef struct row_sums {
    long double *wide; /* NULL if `narrow` is accurate enough */
    double *narrow, *magnitudes;
    int64_t size;
} row_sums;

static row_sums make_sums(const call *c, int64_t size)
{
    row_sums x = {.narrow = allocate(size, sizeof(double)), .magnitudes = allocate(size, sizeof(double)), .size = size};
    if (c->wide)
        x.wide = allocate(size, sizeof *x.wide);
    return x;
}

static void free_sums(row_sums *x)
{
    free(x->wide);
    free(x->narrow);
    free(x->magnitudes);
}

/* Sums start with the values of the output. */
static void load_row(row_sums *x, const double *out)
{
    for (int64_t n = 0; n < x->size; n++) {
        if (x->wide != NULL)
            x->wide[n] = out[n];
        x->narrow[n] = out[n];
        x->magnitudes[n] = fabs(out[n]);
    }
}

/* x += factor row; `magnitude` is that of factor. */
static void add_row(row_sums *x, long double factor, double magnitude, const double *row)
{
    const double narrow = (double)factor;
    for (int64_t n = 0; x->wide != NULL && n < x->size; n++)
        x->wide[n] += factor * row[n];
#pragma omp simd
    for (int64_t n = 0; n < x->size; n++) {
        x->narrow[n] += narrow * row[n];
        x->magnitudes[n] += magnitude * fabs(row[n]);
    }
}

static void store_row(const row_sums *x, double *out, double *magnitudes)
{
    for (int64_t n = 0; n < x->size; n++) {
        out[n] = x->wide != NULL ? (double)x->wide[n] : x->narrow[n];
        magnitudes[n] = x->magnitudes[n];
    }
}

/* Whether a sequence takes longer than starting threads. Finite differences make thousands of calls with short
 * sequences. */
static bool worth_threads(const call *c, const sequence *s)
{
    return c->H * s->Tq * s->Tk * (c->d + c->d_v) > 100000;
}

/* ---- scores ------------------------------------------------------------------------------------------------- */

typedef struct score {
    double s, magnitude;
    long double P;                 /* P: of the forward, dropout included */
    double slope, slope_magnitude; /* slope: ds/dc = 1 - t^2; its magnitude: from the errors of c and of tanh */
} score;

static score make_score(const call *c, const sequence *s, int64_t h, int64_t i, int64_t j)
{
    const cot_attention_forward_args *a = &c->a;
    const double *q = rows_of(&a->q, s->q_row + i, h), *k = rows_of(&a->k, s->k_row + j, h / c->group);
    double terms;
    const long double sum = dot_product(c, q, k, c->d, &terms);
    score x = {.s = (double)(c->scale * sum), .magnitude = fabs(c->scale) * terms, .slope = 1};
    if (a->softcap > 0) {
        const long double t = tanhl(c->scale * sum / a->softcap), e = coshl(c->scale * sum / a->softcap);
        x.s = (double)(a->softcap * t);
        x.slope = (double)(1 / (e * e));
        x.magnitude = x.slope == 0 ? 0 : x.magnitude * x.slope; /* at tanh's limit no error passes */
        x.slope_magnitude = (double)(1 + t * t + 2 * fabsl(t) * x.magnitude / a->softcap);
    }
    if (cot_is_present(&a->alibi_slopes)) {
        const double alibi_slope = ((double *)a->alibi_slopes.data)[a->alibi_slopes.rank == 2 ? s->b * c->H + h : h];
        const double alibi = alibi_slope * (double)llabs(s->i0 + i + s->off - (s->j0 + j));
        x.s -= alibi;
        x.magnitude += fabs(alibi);
    }
    if (cot_is_present(&a->bias)) {
        const double bias = ((double *)a->bias.data)[bias_index(&a->bias, s->b, h, i, j)];
        x.s += bias;
        x.magnitude += fabs(bias);
    }
    x.magnitude += fabs(x.s);
    return x;
}

/* ---- forward ------------------------------------------------------------------------------------------------ */

static void forward_row(const call *c, const cot_attention_forward_args *m, const sequence *s, int64_t h, int64_t i)
{
    const cot_attention_forward_args *a = &c->a;
    const double sink = cot_is_present(&a->sink) ? ((double *)a->sink.data)[h] : -INFINITY;
    score *scores = allocate(s->Tk, sizeof *scores);
    double row_max = sink;
    bool has_key = false, may_be_nan = false; /* out may be NaN: 0 times a non-finite v */
    for (int64_t j = 0; j < s->Tk; j++) {
        if (!visible(c, s, i, j)) {
            may_be_nan = may_be_nan || (c->has_nonfinite && !row_is_finite(&a->v, s->k_row + j, h / c->group) &&
                                        share_tile(c, s, i, j));
            continue;
        }
        scores[j] = make_score(c, s, h, i, j);
        row_max = max_or_nan(row_max, scores[j].s);
        has_key = true;
    }
    if (row_max == -INFINITY) {
        if (cot_is_present(&a->out) && may_be_nan)
            cot_allow_nan(rows_of(&m->out, s->q_row + i, h), c->d_v);
        free(scores);
        return;
    }
    long double sum = sink != -INFINITY ? expl((long double)sink - row_max) : 0;
    double lse_magnitude = sink != -INFINITY ? exp(sink - row_max) * fabs(sink) : 0;
    for (int64_t j = 0; j < s->Tk; j++) {
        if (!visible(c, s, i, j))
            continue;
        const long double e = exponential(c, (long double)scores[j].s - row_max);
        sum += e;
        lse_magnitude += e == 0 ? 0 : (double)e * scores[j].magnitude;
    }
    const long double lse = has_key ? row_max + logl(sum) : (long double)sink;
    lse_magnitude = lse_magnitude / (double)sum + 1 + fabs((double)lse);
    if (!has_key && !isfinite(sink))
        lse_magnitude = -1; /* allows NaN, which a kernel may give for an infinite sink */
    if (cot_is_present(&a->lse)) {
        ((double *)a->lse.data)[statistic_index(c, s, h, i)] = (double)lse;
        ((double *)m->lse.data)[statistic_index(c, s, h, i)] = lse_magnitude;
    }
    row_sums out = make_sums(c, c->d_v);
    for (int64_t j = 0; cot_is_present(&a->out) && j < s->Tk; j++) {
        if (!visible(c, s, i, j))
            continue;
        const double keep = dropout_factor(c, s, h, i, j);
        const long double P = keep == 0 ? 0 : exponential(c, scores[j].s - lse) * keep;
        if (keep == 0 && c->has_nonfinite) /* a kernel may multiply by 0, or select */
            may_be_nan = may_be_nan || isnan(lse) || !row_is_finite(&a->v, s->k_row + j, h / c->group);
        const double magnitude =
            (P == 0 ? 0 : (double)P * (1 + scores[j].magnitude + lse_magnitude)) + SUBNORMAL_MAGNITUDE;
        may_be_nan =
            may_be_nan || (c->has_nonfinite && P < MIN_WEIGHT && !row_is_finite(&a->v, s->k_row + j, h / c->group));
        if (keep != 0)
            add_row(&out, P, magnitude, rows_of(&a->v, s->k_row + j, h / c->group));
    }
    if (cot_is_present(&a->out))
        store_row(&out, rows_of(&a->out, s->q_row + i, h), rows_of(&m->out, s->q_row + i, h));
    if (cot_is_present(&a->out) && (may_be_nan || (!has_key && !isfinite(sink))))
        cot_allow_nan(rows_of(&m->out, s->q_row + i, h), c->d_v);
    free_sums(&out);
    free(scores);
}

static void set_all(const cot_tensor *t, double value)
{
    for (int64_t i = 0; cot_is_present(t) && i < cot_elements(t); i++)
        ((double *)t->data)[i] = value;
}

static void forward(const void *args, void *magnitudes)
{
    const cot_attention_forward_args *m = magnitudes;
    const call c = make_call(args);
    set_all(&c.a.out, 0);
    set_all(&m->out, 0);
    set_all(&c.a.lse, -INFINITY);
    set_all(&m->lse, 0);
    for (int64_t b = 0; b < c.B; b++) {
        const sequence s = make_sequence(&c, b);
#pragma omp parallel for schedule(dynamic, 8) if (worth_threads(&c, &s))
        for (int64_t n = 0; n < c.H * s.Tq; n++)
            forward_row(&c, m, &s, n / s.Tq, n % s.Tq);
    }
}

/* ---- backward ----------------------------------------------------------------------------------------------- */

/* A backward call and its intermediates: delta of every row, and sums of the outputs that heads or sequences share. */
typedef struct backward_state {
    call c;
    const cot_attention_backward_args *a, *m;
    double *delta, *delta_magnitude; /* row h Tq + i of a sequence */
    long double *dsink, *dbias;
} backward_state;

typedef struct pair {
    long double P, dY, dS; /* P before dropout */
    double keep, P_magnitude, dY_magnitude, dS_magnitude;
    bool zero_weight; /* dropped, or a score of -inf: a kernel may select, or multiply by 0 */
} pair;

/* Returns false if the pair is outside the mask, or if the query passes no gradient. */
static bool make_pair(const backward_state *g, const sequence *s, int64_t h, int64_t i, int64_t j, pair *x)
{
    const call *c = &g->c;
    const double lse = ((double *)g->a->lse.data)[statistic_index(c, s, h, i)];
    if (lse == -INFINITY || !visible(c, s, i, j))
        return false;
    const score y = make_score(c, s, h, i, j);
    const double delta = g->delta[h * s->Tq + i], delta_magnitude = g->delta_magnitude[h * s->Tq + i];
    double dP_magnitude;
    x->keep = dropout_factor(c, s, h, i, j);
    long double dP = dot_product(c, rows_of(&g->a->dout, s->q_row + i, h),
                                 rows_of(&g->a->v, s->k_row + j, h / c->group), c->d_v, &dP_magnitude);
    dP = x->keep == 0 ? 0 : x->keep * dP;
    dP_magnitude = x->keep == 0 ? 0 : x->keep * dP_magnitude;
    x->zero_weight = x->keep == 0 || y.s == -INFINITY;
    x->P = y.s == -INFINITY ? 0 : exponential(c, (long double)y.s - lse);
    x->dY = y.s == -INFINITY ? 0 : x->P * (dP - delta);
    x->dS = x->dY * y.slope;
    x->P_magnitude = (x->P == 0 ? 0 : (double)x->P * (1 + y.magnitude + fabs(lse))) + SUBNORMAL_MAGNITUDE;
    x->dY_magnitude = y.s == -INFINITY
                          ? 0
                          : x->P_magnitude * fabs((double)dP - delta) + (double)x->P * (dP_magnitude + delta_magnitude);
    x->dS_magnitude = x->dY_magnitude * y.slope + fabs((double)x->dY) * y.slope_magnitude + SUBNORMAL_MAGNITUDE;
    return true;
}

static void compute_D(const backward_state *g, const sequence *s, int64_t h, int64_t i)
{
    const cot_attention_backward_args *a = g->a;
    const int64_t index = statistic_index(&g->c, s, h, i);
    long double delta = 0;
    double magnitude = 0;
    if (cot_is_present(&a->delta)) {
        delta = ((double *)a->delta.data)[index];
    } else {
        delta = dot_product(&g->c, rows_of(&a->dout, s->q_row + i, h), rows_of(&a->out, s->q_row + i, h), g->c.d_v,
                            &magnitude);
        if (cot_is_present(&a->dlse)) {
            delta -= ((double *)a->dlse.data)[index];
            magnitude += fabs(((double *)a->dlse.data)[index]);
        }
    }
    g->delta[h * s->Tq + i] = (double)delta;
    g->delta_magnitude[h * s->Tq + i] = magnitude + fabs((double)delta);
}

/* Whether an input row of a query holds a NaN or an infinity. */
static bool query_has_nonfinite(const backward_state *g, const sequence *s, int64_t h, int64_t i)
{
    const cot_attention_backward_args *a = g->a;
    const int64_t index = statistic_index(&g->c, s, h, i), row = s->q_row + i;
    const double lse = ((double *)a->lse.data)[index];
    return !row_is_finite(&a->q, row, h) || !row_is_finite(&a->dout, row, h) || isnan(lse) || lse == INFINITY ||
           !isfinite(g->delta[h * s->Tq + i]);
}

static bool key_has_nonfinite(const backward_state *g, const sequence *s, int64_t hkv, int64_t j)
{
    return !row_is_finite(&g->a->k, s->k_row + j, hkv) || !row_is_finite(&g->a->v, s->k_row + j, hkv);
}

/* Whether a product with a weight of 0 may make this row of dq NaN. */
static bool query_may_get_nan(const backward_state *g, const sequence *s, int64_t h, int64_t i)
{
    bool may_get_nan = false;
    for (int64_t j = 0; g->c.has_nonfinite && !may_get_nan && j < s->Tk; j++)
        may_get_nan = (query_has_nonfinite(g, s, h, i) || key_has_nonfinite(g, s, h / g->c.group, j)) &&
                      share_tile(&g->c, s, i, j);
    return may_get_nan;
}

/* Whether a product with a weight of 0 may make these rows of dk and dv NaN. */
static bool key_may_get_nan(const backward_state *g, const sequence *s, int64_t hkv, int64_t j)
{
    bool may_get_nan = false;
    for (int64_t h = hkv * g->c.group; g->c.has_nonfinite && h < (hkv + 1) * g->c.group; h++)
        for (int64_t i = 0; !may_get_nan && i < s->Tq; i++)
            may_get_nan =
                (query_has_nonfinite(g, s, h, i) || key_has_nonfinite(g, s, hkv, j)) && share_tile(&g->c, s, i, j);
    return may_get_nan;
}

/* Computes a row of dq, and adds the query's share of dbias. */
static void query_row(const backward_state *g, const sequence *s, int64_t h, int64_t i)
{
    const call *c = &g->c;
    const cot_attention_backward_args *a = g->a;
    row_sums dq = make_sums(c, c->d);
    if (cot_is_present(&a->dq))
        load_row(&dq, rows_of(&a->dq, s->q_row + i, h));
    for (int64_t j = 0; j < s->Tk; j++) {
        pair x;
        if (!make_pair(g, s, h, i, j, &x))
            continue;
        if (cot_is_present(&a->dq))
            add_row(&dq, c->scale * x.dS, fabs(c->scale) * x.dS_magnitude, rows_of(&a->k, s->k_row + j, h / c->group));
        if (cot_is_present(&a->dbias)) {
            const int64_t index = bias_index(&a->dbias, s->b, h, i, j);
            double *magnitude = (double *)g->m->dbias.data + index;
            const bool may_be_nan =
                signbit(*magnitude) ||
                (x.zero_weight && (query_has_nonfinite(g, s, h, i) || key_has_nonfinite(g, s, h / c->group, j)));
            g->dbias[index] += x.dY;
            *magnitude = copysign(fabs(*magnitude) + x.dY_magnitude, may_be_nan ? -1 : 1);
        }
    }
    if (cot_is_present(&a->dq))
        store_row(&dq, rows_of(&a->dq, s->q_row + i, h), rows_of(&g->m->dq, s->q_row + i, h));
    if (cot_is_present(&a->dq) && query_may_get_nan(g, s, h, i))
        cot_allow_nan(rows_of(&g->m->dq, s->q_row + i, h), c->d);
    free_sums(&dq);
}

/* Computes a row of dk and of dv. */
static void key_row(const backward_state *g, const sequence *s, int64_t hkv, int64_t j)
{
    const call *c = &g->c;
    const cot_attention_backward_args *a = g->a;
    row_sums dk = make_sums(c, c->d), dv = make_sums(c, c->d_v);
    if (cot_is_present(&a->dk))
        load_row(&dk, rows_of(&a->dk, s->k_row + j, hkv));
    if (cot_is_present(&a->dv))
        load_row(&dv, rows_of(&a->dv, s->k_row + j, hkv));
    for (int64_t h = hkv * c->group; h < (hkv + 1) * c->group; h++)
        for (int64_t i = 0; i < s->Tq; i++) {
            pair x;
            if (!make_pair(g, s, h, i, j, &x))
                continue;
            add_row(&dk, c->scale * x.dS, fabs(c->scale) * x.dS_magnitude, rows_of(&a->q, s->q_row + i, h));
            if (x.keep != 0)
                add_row(&dv, x.P * x.keep, x.P_magnitude * x.keep, rows_of(&a->dout, s->q_row + i, h));
        }
    if (cot_is_present(&a->dk))
        store_row(&dk, rows_of(&a->dk, s->k_row + j, hkv), rows_of(&g->m->dk, s->k_row + j, hkv));
    if (cot_is_present(&a->dv))
        store_row(&dv, rows_of(&a->dv, s->k_row + j, hkv), rows_of(&g->m->dv, s->k_row + j, hkv));
    if (key_may_get_nan(g, s, hkv, j)) {
        if (cot_is_present(&a->dk))
            cot_allow_nan(rows_of(&g->m->dk, s->k_row + j, hkv), c->d);
        if (cot_is_present(&a->dv))
            cot_allow_nan(rows_of(&g->m->dv, s->k_row + j, hkv), c->d_v);
    }
    free_sums(&dk);
    free_sums(&dv);
}

static void add_to_dsink(const backward_state *g, const sequence *s, int64_t h, int64_t i)
{
    const double lse = ((double *)g->a->lse.data)[statistic_index(&g->c, s, h, i)];
    if (lse == -INFINITY)
        return;
    const double sink = ((double *)g->a->sink.data)[h], weight = exp(sink - lse), scale = 1 + fabs(sink) + fabs(lse);
    const double delta = g->delta[h * s->Tq + i], magnitude = g->delta_magnitude[h * s->Tq + i];
    double *total = (double *)g->m->dsink.data + h;
    /* No key is visible: a kernel's weight is 0, or NaN as in the formula. */
    const bool undefined = lse == INFINITY && sink == INFINITY;
    const bool may_be_nan = signbit(*total) || undefined || (weight < MIN_WEIGHT && !isfinite(delta));
    if (!undefined) {
        g->dsink[h] -= expl((long double)sink - lse) * delta;
        *total = fabs(*total) + (weight + SUBNORMAL_MAGNITUDE) * ((weight == 0 ? 1 : scale) * fabs(delta) + magnitude);
    }
    *total = copysign(*total, may_be_nan ? -1 : 1);
}

static void differentiate_sequence(backward_state *g, const sequence *s)
{
    const call *c = &g->c;
    const bool parallel = worth_threads(c, s);
    g->delta = allocate(c->H * s->Tq, sizeof *g->delta);
    g->delta_magnitude = allocate(c->H * s->Tq, sizeof *g->delta_magnitude);
    for (int64_t n = 0; n < c->H * s->Tq; n++) {
        compute_D(g, s, n / s->Tq, n % s->Tq);
        if (cot_is_present(&g->a->dsink))
            add_to_dsink(g, s, n / s->Tq, n % s->Tq);
    }
    /* An element of dbias may sum over heads and queries, so dbias is not parallel. */
    if (cot_is_present(&g->a->dq) || cot_is_present(&g->a->dbias)) {
#pragma omp parallel for schedule(dynamic, 8) if (parallel && !cot_is_present(&g->a->dbias))
        for (int64_t n = 0; n < c->H * s->Tq; n++)
            query_row(g, s, n / s->Tq, n % s->Tq);
    }
    if (cot_is_present(&g->a->dk) || cot_is_present(&g->a->dv)) {
#pragma omp parallel for schedule(dynamic, 8) if (parallel)
        for (int64_t n = 0; n < c->Hkv * s->Tk; n++)
            key_row(g, s, n / s->Tk, n % s->Tk);
    }
    free(g->delta);
    free(g->delta_magnitude);
}

/* Sets an output to its old values if it accumulates, else to zero, and sets the magnitudes. */
static void initialize_output(const cot_tensor *out, const cot_tensor *magnitude, bool accumulate)
{
    for (int64_t i = 0; cot_is_present(out) && i < cot_elements(out); i++) {
        double *y = (double *)out->data + i;
        *y = accumulate ? *y : 0;
        ((double *)magnitude->data)[i] = fabs(*y);
    }
}

/* Long double sums of an output, which start with its values. */
static long double *load_sums(const cot_tensor *out)
{
    if (!cot_is_present(out))
        return NULL;
    long double *sums = allocate(cot_elements(out), sizeof *sums);
    for (int64_t i = 0; i < cot_elements(out); i++)
        sums[i] = ((double *)out->data)[i];
    return sums;
}

static void store_sums(const cot_tensor *out, long double *sums)
{
    for (int64_t i = 0; cot_is_present(out) && i < cot_elements(out); i++)
        ((double *)out->data)[i] = (double)sums[i];
    free(sums);
}

static void backward(const void *args, void *magnitudes)
{
    const cot_attention_backward_args *a = args, *m = magnitudes;
    cot_attention_forward_args f = {
        .causal = a->causal,
        .window = a->window,
        .window_left = a->window_left,
        .window_right = a->window_right,
        .scale = a->scale,
        .softcap = a->softcap,
        .dropout_p = a->dropout_p,
        .dropout_seed = a->dropout_seed,
        .dropout_offset = a->dropout_offset,
        .dropout_seed_tensor = a->dropout_seed_tensor,
        .dropout_offset_tensor = a->dropout_offset_tensor,
        .max_seqlen_q = a->max_seqlen_q,
        .max_seqlen_k = a->max_seqlen_k,
        .q_begin = a->q_begin,
        .q_length = a->q_length,
        .k_begin = a->k_begin,
        .k_length = a->k_length,
        .q = a->q,
        .k = a->k,
        .v = a->v,
        .cu_seqlens_q = a->cu_seqlens_q,
        .cu_seqlens_k = a->cu_seqlens_k,
        .seqused_q = a->seqused_q,
        .seqused_k = a->seqused_k,
        .alibi_slopes = a->alibi_slopes,
        .bias = a->bias,
    };
    backward_state g = {.c = make_call(&f), .a = a, .m = m};
    g.c.wide = g.c.wide || !all_float32(&a->dout) || !all_float32(&a->out);
    for (int64_t i = 0; i < cot_elements(&a->lse); i++) /* not for -inf: that query passes no gradient */
        g.c.has_nonfinite =
            g.c.has_nonfinite || isnan(((double *)a->lse.data)[i]) || ((double *)a->lse.data)[i] == INFINITY;
    g.c.has_nonfinite = g.c.has_nonfinite || !is_finite(&a->dout) || !is_finite(&a->out) || !is_finite(&a->dlse) ||
                        !is_finite(&a->delta);
    initialize_output(&a->dq, &m->dq, a->accumulate);
    initialize_output(&a->dk, &m->dk, a->accumulate);
    initialize_output(&a->dv, &m->dv, a->accumulate);
    initialize_output(&a->dsink, &m->dsink, a->accumulate);
    initialize_output(&a->dbias, &m->dbias, a->accumulate);
    g.dsink = load_sums(&a->dsink);
    g.dbias = load_sums(&a->dbias);
    for (int64_t b = 0; b < g.c.B; b++) {
        const sequence s = make_sequence(&g.c, b);
        differentiate_sequence(&g, &s);
    }
    store_sums(&a->dsink, g.dsink);
    store_sums(&a->dbias, g.dbias);
}

/* ---- delta and merge: row r of [rows][H] and its statistic --------------------------------------------- */

/* The index of the statistic of row r (of all rows) and head h: [B,H,T], or packed [H,T]. */
static int64_t statistic_offset(const cot_tensor *first, int64_t r, int64_t h)
{
    const int64_t T = first->shape[first->rank - 3], H = first->shape[first->rank - 2];
    return (r / (T > 0 ? T : 1) * H + h) * T + r % (T > 0 ? T : 1);
}

static int64_t all_rows(const cot_tensor *t)
{
    return t->rank == 3 ? t->shape[0] : t->shape[0] * t->shape[1];
}

static void delta(const void *args, void *magnitudes)
{
    const cot_attention_delta_args *a = args, *m = magnitudes;
    const int64_t H = a->out.shape[a->out.rank - 2], d_v = a->out.shape[a->out.rank - 1];
    for (int64_t n = 0; n < all_rows(&a->out) * H; n++) {
        const int64_t index = statistic_offset(&a->out, n / H, n % H);
        const double *out = rows_of(&a->out, n / H, n % H), *dout = rows_of(&a->dout, n / H, n % H);
        const double dlse = cot_is_present(&a->dlse) ? ((double *)a->dlse.data)[index] : 0;
        long double delta = -(long double)dlse;
        double magnitude = fabs(dlse);
        for (int64_t c = 0; c < d_v; c++) {
            delta += (long double)dout[c] * out[c];
            magnitude += fabs(dout[c] * out[c]);
        }
        ((double *)a->delta.data)[index] = (double)delta;
        ((double *)m->delta.data)[index] = magnitude;
    }
}

static void merge(const void *args, void *magnitudes)
{
    const cot_attention_merge_args *a = args, *m = magnitudes;
    const int64_t H = a->out_a.shape[a->out_a.rank - 2], d_v = a->out_a.shape[a->out_a.rank - 1];
    for (int64_t n = 0; n < all_rows(&a->out_a) * H; n++) {
        const int64_t r = n / H, h = n % H, index = statistic_offset(&a->out_a, r, h);
        const double x = ((double *)a->lse_a.data)[index], y = ((double *)a->lse_b.data)[index];
        const double sink = cot_is_present(&a->sink) ? ((double *)a->sink.data)[h] : -INFINITY;
        const double max_lse = max_or_nan(max_or_nan(x, y), sink);
        const bool empty = max_lse == -INFINITY;
        const long double lse = empty ? -INFINITY
                                      : max_lse + logl(expl((long double)x - max_lse) + expl((long double)y - max_lse) +
                                                       expl((long double)sink - max_lse));
        const double magnitude = empty ? 0 : 1 + fabs((double)lse) + fabs(max_lse);
        if (cot_is_present(&a->lse)) {
            ((double *)a->lse.data)[index] = (double)lse;
            ((double *)m->lse.data)[index] = magnitude;
        }
        for (int64_t c = 0; cot_is_present(&a->out) && c < d_v; c++) {
            const double u = rows_of(&a->out_a, r, h)[c], v = rows_of(&a->out_b, r, h)[c];
            const long double weight_a = empty ? 0 : expl(x - lse), weight_b = empty ? 0 : expl(y - lse);
            const double magnitude_a = x == -INFINITY ? 0 : (double)weight_a * (1 + fabs(x) + magnitude);
            const double magnitude_b = y == -INFINITY ? 0 : (double)weight_b * (1 + fabs(y) + magnitude);
            rows_of(&a->out, r, h)[c] = empty ? 0 : (double)(weight_a * u + weight_b * v);
            rows_of(&m->out, r, h)[c] = empty ? 0 : magnitude_a * fabs(u) + magnitude_b * fabs(v);
        }
    }
}

void (*const cot_attention_oracles[])(const void *, void *) = {forward, backward, delta, merge};
