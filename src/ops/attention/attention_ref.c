/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_ref.c: the oracle: the formulas of cotangent/attention.h in double, as plain loops over whole rows of
 * scores. All tensors come as f64, row-major. Sums are long double where the compiler has one; but where all inputs are
 * numbers of float32 or shorter formats, they are double, which takes a fraction of the time: products of two inputs are exact then, and
 * what sums of double are off by is nothing to a tolerance of 2^-24.
 *
 * Magnitudes. Every intermediate carries the size of its error in units of roundoff: of a sum, the sum of its terms'
 * absolute values; of a function, its derivative times that of its argument. An error e of a score makes a relative
 * error e of exp(score), so with M(x) for the magnitude of x:
 *     M(c) = |scale| sum |q k|;   M(s) = (1-t^2) M(c) + |slope (i+off-j)| + |bias| + |s|
 *     M(lse) = 1 + |lse| + sum P M(s);  M(P) = P (1 + M(s) + M(lse));  M(out) = sum M(P) |v|
 *     M(dP) = sum |dout v|;  M(D) = sum |dout out| + |dlse|;  M(dS) = M(P) |dP - D| + P (M(dP) + M(D))
 *     M(dZ) = M(dS) (1-t^2) + |dS| (1 + t^2 + 2 |t| (1-t^2) M(c) / softcap)
 * and so on for the gradients. In the backward lse is given, so M(lse) = |lse| there. A P or dZ that is rounded to float16
 * is off by up to 2^-25 however small it is, half the spacing below that format's normal range: the error rule takes
 * 2^-9 of a magnitude there, so LOST, 2^-16, is added to M(P) and M(dZ). (Of longer formats it takes so little that
 * LOST is nothing; but for a P below float32's own range.)
 *
 * NaN and infinities follow the formulas; keys outside the mask take no part. Kernels multiply whole tiles, in which a pair
 * outside the mask has the weight 0, and 0 times NaN is NaN. So magnitudes allow NaN (by their sign bit) where such a pair
 * shares a tile of at most TILE queries and TILE keys with a pair inside the mask; and where a weight below LEAST, which a
 * kernel may round to 0, meets an infinity. */
#include "attention_ref.h"

#include "core/cases.h"
#include "core/tensor.h"

#include <cotangent/attention.h>
#include <math.h>
#include <stdlib.h>

#define LOST 0x1p-16

#define LEAST 0x1p-14 /* the least normal number of float16 */

enum { TILE = 256 };

/* ---- the call: what forward and backward share -------------------------------------------------------------- */

typedef struct call {
    cot_attention_forward_args a; /* of a backward: its members of the same names */
    int64_t B, H, Hkv, group, d, dv;
    bool packed, wide; /* wide: sums are long double */
    bool special;      /* a row of an input holds a NaN or an infinity */
    double scale;
    int64_t dropped; /* of 65536 */
} call;

static bool all_float32(const cot_tensor *t)
{
    for (int64_t i = 0; cot_present(t) && i < cot_elements(t); i++)
        if (!isnan(((double *)t->data)[i]) && (double)(float)((double *)t->data)[i] != ((double *)t->data)[i])
            return false;
    return true;
}

static bool is_finite(const cot_tensor *t)
{
    return !cot_present(t) || cot_all_finite(t->data, cot_elements(t));
}

static call make_call(const cot_attention_forward_args *a)
{
    const bool packed = cot_present(&a->cu_seqlens_q);
    const int64_t *q = a->q.shape + a->q.rank - 2, *k = a->k.shape + a->k.rank - 2, *v = a->v.shape + a->v.rank - 2;
    call c = {.a = *a, .H = q[0], .Hkv = k[0], .group = q[0] / k[0], .d = q[1], .dv = v[1], .packed = packed};
    c.B = packed ? a->cu_seqlens_q.shape[0] - 1 : a->q.shape[0];
    c.scale = a->scale != 0 ? a->scale : 1 / sqrt((double)c.d);
    c.dropped = (int64_t)floor(65536 * a->dropout_p + 0.5);
    c.special = !is_finite(&a->q) || !is_finite(&a->k) || !is_finite(&a->v);
    c.wide = !all_float32(&a->q) || !all_float32(&a->k) || !all_float32(&a->v);
    return c;
}

/* Sequence b: its rows begin at q_row and k_row of all rows; Tq and Tk of them count; `off` as in the header, of the
 * whole sequence, in which the call's first query and key have the numbers i0 and j0. */
typedef struct sequence {
    int64_t b, q_row, k_row, Tq, Tk, off, i0, j0;
} sequence;

static int64_t integer(const cot_tensor *t, int64_t i)
{
    return ((const int32_t *)t->data)[i];
}

static int64_t between(int64_t value, int64_t most)
{
    return value < 0 ? 0 : value > most ? most : value;
}

static sequence make_sequence(const call *c, int64_t b)
{
    const cot_attention_forward_args *a = &c->a;
    const int64_t rows_q = c->packed ? integer(&a->cu_seqlens_q, b + 1) - integer(&a->cu_seqlens_q, b) : a->q.shape[1];
    const int64_t rows_k = c->packed ? integer(&a->cu_seqlens_k, b + 1) - integer(&a->cu_seqlens_k, b) : a->k.shape[1];
    sequence s = {.b = b, .i0 = a->q_begin, .j0 = a->k_begin};
    s.q_row = c->packed ? integer(&a->cu_seqlens_q, b) : b * rows_q;
    s.k_row = c->packed ? integer(&a->cu_seqlens_k, b) : b * rows_k;
    int64_t whole_q = a->q_length > 0 ? a->q_length : rows_q, whole_k = a->k_length > 0 ? a->k_length : rows_k;
    if (cot_present(&a->seqused_q))
        whole_q = integer(&a->seqused_q, b);
    if (cot_present(&a->seqused_k))
        whole_k = integer(&a->seqused_k, b);
    s.off = whole_k - whole_q;
    s.Tq = between(whole_q - s.i0, rows_q);
    s.Tk = between(whole_k - s.j0, rows_k);
    return s;
}

static double *rows_of(const cot_tensor *t, int64_t row, int64_t head)
{
    const int64_t *heads = t->shape + t->rank - 2;
    return (double *)t->data + (row * heads[0] + head) * heads[1];
}

/* lse and its like of a query: [B,H,T], packed [H,T]. */
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
    const int64_t right = s->j0 + j - (s->i0 + i + s->off); /* of the diagonal */
    const cot_attention_forward_args *a = &c->a;
    if (a->causal && right > 0)
        return false;
    if (a->window && a->window_right >= 0 && right > a->window_right)
        return false;
    return !(a->window && a->window_left >= 0 && -right > a->window_left);
}

/* ---- NaN and infinities: see the top ------------------------------------------------------------------------- */

static bool row_is_finite(const cot_tensor *t, int64_t row, int64_t head)
{
    return cot_all_finite(rows_of(t, row, head), t->shape[t->rank - 1]);
}

/* May query i and key j lie in a tile with a pair inside the mask? */
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

/* max, but NaN where one of them is. */
static double larger(double a, double b)
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

static uint64_t words(const cot_tensor *t)
{
    return cot_present(t) ? (uint32_t)integer(t, 0) + ((uint64_t)(uint32_t)integer(t, 1) << 32) : 0;
}

static double kept(const call *c, const sequence *s, int64_t h, int64_t i, int64_t j)
{
    if (c->dropped == 0)
        return 1;
    if (c->dropped == 65536)
        return 0;
    const cot_attention_forward_args *a = &c->a;
    const uint64_t seed = a->dropout_seed + words(&a->dropout_seed_memory);
    const uint64_t offset = a->dropout_offset + words(&a->dropout_offset_memory);
    const int64_t whole_q = a->q_length > 0 ? a->q_length : a->q.shape[1];
    const int64_t R = c->packed ? integer(&a->cu_seqlens_q, c->B) : c->B * whole_q;
    const int64_t row = c->packed ? s->q_row + i : s->b * whole_q + s->i0 + i, column = s->j0 + j;
    const int64_t L = c->packed ? a->max_seqlen_k : a->k_length > 0 ? a->k_length : a->k.shape[1];
    const uint64_t n = (uint64_t)((h * R + row) * ((L + 7) / 8) + column / 8);
    uint32_t x[4] = {(uint32_t)offset, (uint32_t)(offset >> 32), (uint32_t)n, (uint32_t)(n >> 32)};
    philox(x, (uint32_t)seed, (uint32_t)(seed >> 32));
    const uint32_t word = x[column % 8 / 2], draw = column % 2 ? word >> 16 : word & 0xffff;
    return draw < (uint32_t)c->dropped ? 0 : 65536.0 / (double)(65536 - c->dropped);
}

/* ---- sums --------------------------------------------------------------------------------------------------- */

/* sum a[n] b[n], and the sum of its terms' absolute values. */
static long double product(const call *c, const double *a, const double *b, int64_t count, double *magnitude)
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

/* A row of an output while it is summed up. */
typedef struct row_sums {
    long double *wide; /* NULL: `narrow` will do */
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

/* Sums begin with what the output holds. */
static void begin_row(row_sums *x, const double *out)
{
    for (int64_t n = 0; n < x->size; n++) {
        if (x->wide != NULL)
            x->wide[n] = out[n];
        x->narrow[n] = out[n];
        x->magnitudes[n] = fabs(out[n]);
    }
}

/* x += factor row, where the error of factor has this magnitude. */
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

static void end_row(const row_sums *x, double *out, double *magnitudes)
{
    for (int64_t n = 0; n < x->size; n++) {
        out[n] = x->wide != NULL ? (double)x->wide[n] : x->narrow[n];
        magnitudes[n] = x->magnitudes[n];
    }
}

/* Does a sequence take longer than starting threads? Finite differences call for thousands of small ones. */
static bool long_enough(const call *c, const sequence *s)
{
    return c->H * s->Tq * s->Tk * (c->d + c->dv) > 100000;
}

/* ---- scores ------------------------------------------------------------------------------------------------- */

typedef struct score {
    double s, magnitude;
    long double P;             /* of the forward, dropout included */
    double slope, slope_error; /* ds/dc = 1 - t^2, and what an error of c and of tanh does to it */
} score;

static score make_score(const call *c, const sequence *s, int64_t h, int64_t i, int64_t j)
{
    const cot_attention_forward_args *a = &c->a;
    const double *q = rows_of(&a->q, s->q_row + i, h), *k = rows_of(&a->k, s->k_row + j, h / c->group);
    double terms;
    const long double sum = product(c, q, k, c->d, &terms);
    score x = {.s = (double)(c->scale * sum), .magnitude = fabs(c->scale) * terms, .slope = 1};
    if (a->softcap > 0) {
        const long double t = tanhl(c->scale * sum / a->softcap), e = coshl(c->scale * sum / a->softcap);
        x.s = (double)(a->softcap * t);
        x.slope = (double)(1 / (e * e));
        x.magnitude = x.slope == 0 ? 0 : x.magnitude * x.slope; /* of tanh's limit, no error passes */
        x.slope_error = (double)(1 + t * t + 2 * fabsl(t) * x.magnitude / a->softcap);
    }
    if (cot_present(&a->alibi_slopes)) {
        const double slope = ((double *)a->alibi_slopes.data)[a->alibi_slopes.rank == 2 ? s->b * c->H + h : h];
        const double fall = slope * (double)llabs(s->i0 + i + s->off - (s->j0 + j));
        x.s -= fall;
        x.magnitude += fabs(fall);
    }
    if (cot_present(&a->bias)) {
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
    const double sink = cot_present(&a->sink) ? ((double *)a->sink.data)[h] : -INFINITY;
    score *scores = allocate(s->Tk, sizeof *scores);
    double most = sink;
    bool sees_a_key = false, beside_nan = false; /* out may be NaN: 0 times a v that is no number */
    for (int64_t j = 0; j < s->Tk; j++) {
        if (!visible(c, s, i, j)) {
            beside_nan = beside_nan ||
                         (c->special && !row_is_finite(&a->v, s->k_row + j, h / c->group) && share_tile(c, s, i, j));
            continue;
        }
        scores[j] = make_score(c, s, h, i, j);
        most = larger(most, scores[j].s);
        sees_a_key = true;
    }
    if (most == -INFINITY) {
        if (cot_present(&a->out) && beside_nan)
            cot_allow_nan(rows_of(&m->out, s->q_row + i, h), c->dv);
        free(scores);
        return;
    }
    long double sum = sink != -INFINITY ? expl((long double)sink - most) : 0;
    double lse_magnitude = sink != -INFINITY ? exp(sink - most) * fabs(sink) : 0;
    for (int64_t j = 0; j < s->Tk; j++) {
        if (!visible(c, s, i, j))
            continue;
        const long double e = exponential(c, (long double)scores[j].s - most);
        sum += e;
        lse_magnitude += e == 0 ? 0 : (double)e * scores[j].magnitude;
    }
    const long double lse = sees_a_key ? most + logl(sum) : (long double)sink;
    lse_magnitude = lse_magnitude / (double)sum + 1 + fabs((double)lse);
    if (!sees_a_key && !isfinite(sink))
        lse_magnitude = -1; /* a kernel may make NaN of a sink of inf, and an out of NaN beside it */
    if (cot_present(&a->lse)) {
        ((double *)a->lse.data)[statistic_index(c, s, h, i)] = (double)lse;
        ((double *)m->lse.data)[statistic_index(c, s, h, i)] = lse_magnitude;
    }
    row_sums out = make_sums(c, c->dv);
    for (int64_t j = 0; cot_present(&a->out) && j < s->Tk; j++) {
        if (!visible(c, s, i, j))
            continue;
        const double keep = kept(c, s, h, i, j);
        const long double P = keep == 0 ? 0 : exponential(c, scores[j].s - lse) * keep;
        if (keep == 0 && c->special) /* a kernel may multiply by 0 where another one selects */
            beside_nan = beside_nan || isnan(lse) || !row_is_finite(&a->v, s->k_row + j, h / c->group);
        const double magnitude = (P == 0 ? 0 : (double)P * (1 + scores[j].magnitude + lse_magnitude)) + LOST;
        beside_nan = beside_nan || (c->special && P < LEAST && !row_is_finite(&a->v, s->k_row + j, h / c->group));
        if (keep != 0)
            add_row(&out, P, magnitude, rows_of(&a->v, s->k_row + j, h / c->group));
    }
    if (cot_present(&a->out))
        end_row(&out, rows_of(&a->out, s->q_row + i, h), rows_of(&m->out, s->q_row + i, h));
    if (cot_present(&a->out) && (beside_nan || (!sees_a_key && !isfinite(sink))))
        cot_allow_nan(rows_of(&m->out, s->q_row + i, h), c->dv);
    free_sums(&out);
    free(scores);
}

static void set_all(const cot_tensor *t, double value)
{
    for (int64_t i = 0; cot_present(t) && i < cot_elements(t); i++)
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
#pragma omp parallel for schedule(dynamic, 8) if (long_enough(&c, &s))
        for (int64_t n = 0; n < c.H * s.Tq; n++)
            forward_row(&c, m, &s, n / s.Tq, n % s.Tq);
    }
}

/* ---- backward ----------------------------------------------------------------------------------------------- */

/* A backward and what its sums need besides: of every row D, and where heads or sequences share an output, its sums. */
typedef struct differential {
    call c;
    const cot_attention_backward_args *a, *m;
    double *D, *D_magnitude; /* of row h Tq + i of a sequence */
    long double *dsink, *dbias;
} differential;

typedef struct pair {
    long double P, dS, dZ; /* P before dropout */
    double keep, P_magnitude, dS_magnitude, dZ_magnitude;
    bool weightless; /* dropped, or of a score of -inf: kernels select or multiply by 0 */
} pair;

/* False: the pair is outside the mask, or the query passes no gradient. */
static bool make_pair(const differential *g, const sequence *s, int64_t h, int64_t i, int64_t j, pair *x)
{
    const call *c = &g->c;
    const double lse = ((double *)g->a->lse.data)[statistic_index(c, s, h, i)];
    if (lse == -INFINITY || !visible(c, s, i, j))
        return false;
    const score y = make_score(c, s, h, i, j);
    const double D = g->D[h * s->Tq + i], D_magnitude = g->D_magnitude[h * s->Tq + i];
    double dP_magnitude;
    x->keep = kept(c, s, h, i, j);
    long double dP = product(c, rows_of(&g->a->dout, s->q_row + i, h), rows_of(&g->a->v, s->k_row + j, h / c->group),
                             c->dv, &dP_magnitude);
    dP = x->keep == 0 ? 0 : x->keep * dP;
    dP_magnitude = x->keep == 0 ? 0 : x->keep * dP_magnitude;
    x->weightless = x->keep == 0 || y.s == -INFINITY;
    x->P = y.s == -INFINITY ? 0 : exponential(c, (long double)y.s - lse);
    x->dS = y.s == -INFINITY ? 0 : x->P * (dP - D);
    x->dZ = x->dS * y.slope;
    x->P_magnitude = (x->P == 0 ? 0 : (double)x->P * (1 + y.magnitude + fabs(lse))) + LOST;
    x->dS_magnitude =
        y.s == -INFINITY ? 0 : x->P_magnitude * fabs((double)dP - D) + (double)x->P * (dP_magnitude + D_magnitude);
    x->dZ_magnitude = x->dS_magnitude * y.slope + fabs((double)x->dS) * y.slope_error + LOST;
    return true;
}

static void find_D(const differential *g, const sequence *s, int64_t h, int64_t i)
{
    const cot_attention_backward_args *a = g->a;
    const int64_t at = statistic_index(&g->c, s, h, i);
    long double D = 0;
    double magnitude = 0;
    if (cot_present(&a->delta)) {
        D = ((double *)a->delta.data)[at];
    } else {
        D = product(&g->c, rows_of(&a->dout, s->q_row + i, h), rows_of(&a->out, s->q_row + i, h), g->c.dv, &magnitude);
        if (cot_present(&a->dlse)) {
            D -= ((double *)a->dlse.data)[at];
            magnitude += fabs(((double *)a->dlse.data)[at]);
        }
    }
    g->D[h * s->Tq + i] = (double)D;
    g->D_magnitude[h * s->Tq + i] = magnitude + fabs((double)D);
}

/* Does the row of a query hold a NaN or an infinity, in any input that has such a row? */
static bool query_is_special(const differential *g, const sequence *s, int64_t h, int64_t i)
{
    const cot_attention_backward_args *a = g->a;
    const int64_t at = statistic_index(&g->c, s, h, i), row = s->q_row + i;
    const double lse = ((double *)a->lse.data)[at];
    return !row_is_finite(&a->q, row, h) || !row_is_finite(&a->dout, row, h) || isnan(lse) || lse == INFINITY ||
           !isfinite(g->D[h * s->Tq + i]);
}

static bool key_is_special(const differential *g, const sequence *s, int64_t hkv, int64_t j)
{
    return !row_is_finite(&g->a->k, s->k_row + j, hkv) || !row_is_finite(&g->a->v, s->k_row + j, hkv);
}

/* May a product with a weight of 0 make the row of dq a NaN? */
static bool query_meets_special(const differential *g, const sequence *s, int64_t h, int64_t i)
{
    bool met = false;
    for (int64_t j = 0; g->c.special && !met && j < s->Tk; j++)
        met = (query_is_special(g, s, h, i) || key_is_special(g, s, h / g->c.group, j)) && share_tile(&g->c, s, i, j);
    return met;
}

/* And those of dk and dv? */
static bool key_meets_special(const differential *g, const sequence *s, int64_t hkv, int64_t j)
{
    bool met = false;
    for (int64_t h = hkv * g->c.group; g->c.special && h < (hkv + 1) * g->c.group; h++)
        for (int64_t i = 0; !met && i < s->Tq; i++)
            met = (query_is_special(g, s, h, i) || key_is_special(g, s, hkv, j)) && share_tile(&g->c, s, i, j);
    return met;
}

/* A row of dq, and what the query adds to dbias. */
static void query_row(const differential *g, const sequence *s, int64_t h, int64_t i)
{
    const call *c = &g->c;
    const cot_attention_backward_args *a = g->a;
    row_sums dq = make_sums(c, c->d);
    if (cot_present(&a->dq))
        begin_row(&dq, rows_of(&a->dq, s->q_row + i, h));
    for (int64_t j = 0; j < s->Tk; j++) {
        pair x;
        if (!make_pair(g, s, h, i, j, &x))
            continue;
        if (cot_present(&a->dq))
            add_row(&dq, c->scale * x.dZ, fabs(c->scale) * x.dZ_magnitude, rows_of(&a->k, s->k_row + j, h / c->group));
        if (cot_present(&a->dbias)) {
            const int64_t at = bias_index(&a->dbias, s->b, h, i, j);
            double *magnitude = (double *)g->m->dbias.data + at;
            const bool may_be_nan =
                signbit(*magnitude) ||
                (x.weightless && (query_is_special(g, s, h, i) || key_is_special(g, s, h / c->group, j)));
            g->dbias[at] += x.dS;
            *magnitude = copysign(fabs(*magnitude) + x.dS_magnitude, may_be_nan ? -1 : 1);
        }
    }
    if (cot_present(&a->dq))
        end_row(&dq, rows_of(&a->dq, s->q_row + i, h), rows_of(&g->m->dq, s->q_row + i, h));
    if (cot_present(&a->dq) && query_meets_special(g, s, h, i))
        cot_allow_nan(rows_of(&g->m->dq, s->q_row + i, h), c->d);
    free_sums(&dq);
}

/* A row of dk and of dv. */
static void key_row(const differential *g, const sequence *s, int64_t hkv, int64_t j)
{
    const call *c = &g->c;
    const cot_attention_backward_args *a = g->a;
    row_sums dk = make_sums(c, c->d), dv = make_sums(c, c->dv);
    if (cot_present(&a->dk))
        begin_row(&dk, rows_of(&a->dk, s->k_row + j, hkv));
    if (cot_present(&a->dv))
        begin_row(&dv, rows_of(&a->dv, s->k_row + j, hkv));
    for (int64_t h = hkv * c->group; h < (hkv + 1) * c->group; h++)
        for (int64_t i = 0; i < s->Tq; i++) {
            pair x;
            if (!make_pair(g, s, h, i, j, &x))
                continue;
            add_row(&dk, c->scale * x.dZ, fabs(c->scale) * x.dZ_magnitude, rows_of(&a->q, s->q_row + i, h));
            if (x.keep != 0)
                add_row(&dv, x.P * x.keep, x.P_magnitude * x.keep, rows_of(&a->dout, s->q_row + i, h));
        }
    if (cot_present(&a->dk))
        end_row(&dk, rows_of(&a->dk, s->k_row + j, hkv), rows_of(&g->m->dk, s->k_row + j, hkv));
    if (cot_present(&a->dv))
        end_row(&dv, rows_of(&a->dv, s->k_row + j, hkv), rows_of(&g->m->dv, s->k_row + j, hkv));
    if (key_meets_special(g, s, hkv, j)) {
        if (cot_present(&a->dk))
            cot_allow_nan(rows_of(&g->m->dk, s->k_row + j, hkv), c->d);
        if (cot_present(&a->dv))
            cot_allow_nan(rows_of(&g->m->dv, s->k_row + j, hkv), c->dv);
    }
    free_sums(&dk);
    free_sums(&dv);
}

static void add_to_dsink(const differential *g, const sequence *s, int64_t h, int64_t i)
{
    const double lse = ((double *)g->a->lse.data)[statistic_index(&g->c, s, h, i)];
    if (lse == -INFINITY)
        return;
    const double sink = ((double *)g->a->sink.data)[h], weight = exp(sink - lse), scale = 1 + fabs(sink) + fabs(lse);
    const double D = g->D[h * s->Tq + i], magnitude = g->D_magnitude[h * s->Tq + i];
    double *total = (double *)g->m->dsink.data + h;
    const bool unbounded =
        lse == INFINITY && sink == INFINITY; /* no key: a kernel's weight is 0, or NaN as the formula's */
    const bool may_be_nan = signbit(*total) || unbounded || (weight < LEAST && !isfinite(D));
    if (!unbounded) {
        g->dsink[h] -= expl((long double)sink - lse) * D;
        *total = fabs(*total) + (weight + LOST) * ((weight == 0 ? 1 : scale) * fabs(D) + magnitude);
    }
    *total = copysign(*total, may_be_nan ? -1 : 1);
}

static void differentiate_sequence(differential *g, const sequence *s)
{
    const call *c = &g->c;
    const bool parallel = long_enough(c, s);
    g->D = allocate(c->H * s->Tq, sizeof *g->D);
    g->D_magnitude = allocate(c->H * s->Tq, sizeof *g->D_magnitude);
    for (int64_t n = 0; n < c->H * s->Tq; n++) {
        find_D(g, s, n / s->Tq, n % s->Tq);
        if (cot_present(&g->a->dsink))
            add_to_dsink(g, s, n / s->Tq, n % s->Tq);
    }
    /* dbias may be that of all heads and queries. */
    if (cot_present(&g->a->dq) || cot_present(&g->a->dbias)) {
#pragma omp parallel for schedule(dynamic, 8) if (parallel && !cot_present(&g->a->dbias))
        for (int64_t n = 0; n < c->H * s->Tq; n++)
            query_row(g, s, n / s->Tq, n % s->Tq);
    }
    if (cot_present(&g->a->dk) || cot_present(&g->a->dv)) {
#pragma omp parallel for schedule(dynamic, 8) if (parallel)
        for (int64_t n = 0; n < c->Hkv * s->Tk; n++)
            key_row(g, s, n / s->Tk, n % s->Tk);
    }
    free(g->D);
    free(g->D_magnitude);
}

/* An output's first values and their magnitudes: what it holds, or zero. */
static void begin_output(const cot_tensor *out, const cot_tensor *magnitude, bool accumulate)
{
    for (int64_t i = 0; cot_present(out) && i < cot_elements(out); i++) {
        double *y = (double *)out->data + i;
        *y = accumulate ? *y : 0;
        ((double *)magnitude->data)[i] = fabs(*y);
    }
}

/* Sums that begin with an output's first values, and their end. */
static long double *begin_sums(const cot_tensor *out)
{
    if (!cot_present(out))
        return NULL;
    long double *sums = allocate(cot_elements(out), sizeof *sums);
    for (int64_t i = 0; i < cot_elements(out); i++)
        sums[i] = ((double *)out->data)[i];
    return sums;
}

static void end_sums(const cot_tensor *out, long double *sums)
{
    for (int64_t i = 0; cot_present(out) && i < cot_elements(out); i++)
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
        .dropout_seed_memory = a->dropout_seed_memory,
        .dropout_offset_memory = a->dropout_offset_memory,
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
    differential g = {.c = make_call(&f), .a = a, .m = m};
    g.c.wide = g.c.wide || !all_float32(&a->dout) || !all_float32(&a->out);
    for (int64_t i = 0; i < cot_elements(&a->lse); i++) /* -inf is a query that passes no gradient */
        g.c.special = g.c.special || isnan(((double *)a->lse.data)[i]) || ((double *)a->lse.data)[i] == INFINITY;
    g.c.special =
        g.c.special || !is_finite(&a->dout) || !is_finite(&a->out) || !is_finite(&a->dlse) || !is_finite(&a->delta);
    begin_output(&a->dq, &m->dq, a->accumulate);
    begin_output(&a->dk, &m->dk, a->accumulate);
    begin_output(&a->dv, &m->dv, a->accumulate);
    begin_output(&a->dsink, &m->dsink, a->accumulate);
    begin_output(&a->dbias, &m->dbias, a->accumulate);
    g.dsink = begin_sums(&a->dsink);
    g.dbias = begin_sums(&a->dbias);
    for (int64_t b = 0; b < g.c.B; b++) {
        const sequence s = make_sequence(&g.c, b);
        differentiate_sequence(&g, &s);
    }
    end_sums(&a->dsink, g.dsink);
    end_sums(&a->dbias, g.dbias);
}

/* ---- delta and merge: of row r of [rows][H] and its statistic --------------------------------------------------- */

/* Where the statistic of row r (of all rows) and head h lies: [B,H,T], packed [H,T]. */
static int64_t statistic_of(const cot_tensor *first, int64_t r, int64_t h)
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
    const int64_t H = a->out.shape[a->out.rank - 2], dv = a->out.shape[a->out.rank - 1];
    for (int64_t n = 0; n < all_rows(&a->out) * H; n++) {
        const int64_t at = statistic_of(&a->out, n / H, n % H);
        const double *out = rows_of(&a->out, n / H, n % H), *dout = rows_of(&a->dout, n / H, n % H);
        const double dlse = cot_present(&a->dlse) ? ((double *)a->dlse.data)[at] : 0;
        long double D = -(long double)dlse;
        double magnitude = fabs(dlse);
        for (int64_t c = 0; c < dv; c++) {
            D += (long double)dout[c] * out[c];
            magnitude += fabs(dout[c] * out[c]);
        }
        ((double *)a->delta.data)[at] = (double)D;
        ((double *)m->delta.data)[at] = magnitude;
    }
}

static void merge(const void *args, void *magnitudes)
{
    const cot_attention_merge_args *a = args, *m = magnitudes;
    const int64_t H = a->out_a.shape[a->out_a.rank - 2], dv = a->out_a.shape[a->out_a.rank - 1];
    for (int64_t n = 0; n < all_rows(&a->out_a) * H; n++) {
        const int64_t r = n / H, h = n % H, at = statistic_of(&a->out_a, r, h);
        const double x = ((double *)a->lse_a.data)[at], y = ((double *)a->lse_b.data)[at];
        const double sink = cot_present(&a->sink) ? ((double *)a->sink.data)[h] : -INFINITY;
        const double most = larger(larger(x, y), sink);
        const bool none = most == -INFINITY;
        const long double lse = none ? -INFINITY
                                     : most + logl(expl((long double)x - most) + expl((long double)y - most) +
                                                   expl((long double)sink - most));
        const double magnitude = none ? 0 : 1 + fabs((double)lse) + fabs(most);
        if (cot_present(&a->lse)) {
            ((double *)a->lse.data)[at] = (double)lse;
            ((double *)m->lse.data)[at] = magnitude;
        }
        for (int64_t c = 0; cot_present(&a->out) && c < dv; c++) {
            const double u = rows_of(&a->out_a, r, h)[c], v = rows_of(&a->out_b, r, h)[c];
            const long double wx = none ? 0 : expl(x - lse), wy = none ? 0 : expl(y - lse);
            const double ex = x == -INFINITY ? 0 : (double)wx * (1 + fabs(x) + magnitude);
            const double ey = y == -INFINITY ? 0 : (double)wy * (1 + fabs(y) + magnitude);
            rows_of(&a->out, r, h)[c] = none ? 0 : (double)(wx * u + wy * v);
            rows_of(&m->out, r, h)[c] = none ? 0 : ex * fabs(u) + ey * fabs(v);
        }
    }
}

void (*const cot_attention_oracles[])(const void *, void *) = {forward, backward, delta, merge};
