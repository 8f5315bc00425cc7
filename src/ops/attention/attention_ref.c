/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_ref.c: the oracle: the formulas of cotangent/attention.h in double, as plain loops over whole rows of
 * scores. All tensors come as f64, row-major. Sums are long double where the compiler has one.
 *
 * Magnitudes. Every intermediate carries the size of its error in units of roundoff: of a sum, the sum of its terms'
 * absolute values; of a function, its derivative times that of its argument. An error e of a score makes a relative
 * error e of exp(score), so with M(x) for the magnitude of x:
 *     M(c) = |scale| sum |q k|;   M(s) = (1-t^2) M(c) + |slope (i+off-j)| + |bias| + |s|
 *     M(lse) = 1 + |lse| + sum P M(s);  M(P) = P (1 + M(s) + M(lse));  M(out) = sum M(P) |v|
 *     M(dP) = sum |dout v|;  M(D) = sum |dout out| + |dlse|;  M(dS) = M(P) |dP - D| + P (M(dP) + M(D))
 *     M(dZ) = M(dS) (1-t^2) + |dS| (1 + t^2 + 2 |t| (1-t^2) M(c) / softcap)
 * and so on for the gradients. In the backward lse is given, so M(lse) = |lse| there. A P below the smallest normal
 * number of float32, 2^-126, may be lost altogether, which LOST adds to M(P): the error rule takes 2^-22 of it. */
#include "attention_ref.h"

#include "core/tensor.h"

#include <cotangent/attention.h>
#include <math.h>
#include <stdlib.h>

#define LOST 0x1p-104

static void *allocate(int64_t count, size_t size)
{
    void *memory = calloc((size_t)count + 1, size);
    if (memory == NULL)
        abort(); /* the oracle is part of a test program: without it there is nothing to compare with */
    return memory;
}

/* ---- the call: what forward and backward share -------------------------------------------------------------- */

typedef struct call {
    cot_attention_forward_args a; /* of a backward: its members of the same names */
    int64_t B, H, Hkv, group, d, dv;
    bool packed;
    double scale;
    int64_t dropped; /* of 65536 */
} call;

static call make_call(const cot_attention_forward_args *a)
{
    const bool packed = cot_present(&a->cu_seqlens_q);
    const int64_t *q = a->q.shape + a->q.rank - 2, *k = a->k.shape + a->k.rank - 2, *v = a->v.shape + a->v.rank - 2;
    call c = {.a = *a, .H = q[0], .Hkv = k[0], .group = q[0] / k[0], .d = q[1], .dv = v[1], .packed = packed};
    c.B = packed ? a->cu_seqlens_q.shape[0] - 1 : a->q.shape[0];
    c.scale = a->scale != 0 ? a->scale : 1 / sqrt((double)c.d);
    c.dropped = (int64_t)floor(65536 * a->dropout_p + 0.5);
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
    long double sum = 0;
    double terms = 0;
    for (int64_t n = 0; n < c->d; n++) {
        sum += (long double)q[n] * k[n];
        terms += fabs(q[n] * k[n]);
    }
    score x = {.s = (double)(c->scale * sum), .magnitude = fabs(c->scale) * terms, .slope = 1};
    if (a->softcap > 0) {
        const long double t = tanhl(c->scale * sum / a->softcap), e = coshl(c->scale * sum / a->softcap);
        x.s = (double)(a->softcap * t);
        x.slope = (double)(1 / (e * e));
        x.slope_error = (double)(1 + t * t + 2 * fabsl(t) * x.slope * x.magnitude / a->softcap);
        x.magnitude *= x.slope;
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

/* `scores` has room for all keys, `sums` for a row of out. */
static void forward_row(const call *c, const cot_attention_forward_args *m, const sequence *s, int64_t h, int64_t i,
                        score *scores, long double *sums)
{
    const cot_attention_forward_args *a = &c->a;
    const double sink = cot_present(&a->sink) ? ((double *)a->sink.data)[h] : -INFINITY;
    double most = sink;
    for (int64_t j = 0; j < s->Tk; j++) {
        scores[j].s = -INFINITY;
        if (!visible(c, s, i, j))
            continue;
        scores[j] = make_score(c, s, h, i, j);
        most = fmax(most, scores[j].s);
    }
    if (most == -INFINITY)
        return;
    long double sum = sink > -INFINITY ? expl((long double)sink - most) : 0;
    double lse_magnitude = sink > -INFINITY ? exp(sink - most) * fabs(sink) : 0;
    for (int64_t j = 0; j < s->Tk; j++) {
        if (scores[j].s == -INFINITY)
            continue;
        sum += expl((long double)scores[j].s - most);
        lse_magnitude += exp(scores[j].s - most) * scores[j].magnitude;
    }
    const long double lse = most + logl(sum);
    lse_magnitude = lse_magnitude / (double)sum + 1 + fabs((double)lse);
    if (cot_present(&a->lse)) {
        ((double *)a->lse.data)[statistic_index(c, s, h, i)] = (double)lse;
        ((double *)m->lse.data)[statistic_index(c, s, h, i)] = lse_magnitude;
    }
    for (int64_t j = 0; j < s->Tk; j++)
        scores[j].P = scores[j].s > -INFINITY ? expl(scores[j].s - lse) * kept(c, s, h, i, j) : 0;
    if (!cot_present(&a->out))
        return;
    double *out = rows_of(&a->out, s->q_row + i, h), *magnitudes = rows_of(&m->out, s->q_row + i, h);
    for (int64_t n = 0; n < c->dv; n++)
        sums[n] = 0;
    for (int64_t j = 0; j < s->Tk; j++) {
        if (scores[j].s == -INFINITY)
            continue;
        const double *v = rows_of(&a->v, s->k_row + j, h / c->group);
        const double magnitude = (double)scores[j].P * (1 + scores[j].magnitude + lse_magnitude) + LOST;
        for (int64_t n = 0; n < c->dv; n++) {
            sums[n] += scores[j].P * v[n];
            magnitudes[n] += magnitude * fabs(v[n]);
        }
    }
    for (int64_t n = 0; n < c->dv; n++)
        out[n] = (double)sums[n];
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
#pragma omp parallel for
        for (int64_t h = 0; h < c.H; h++) {
            score *scores = allocate(s.Tk, sizeof *scores);
            long double *sums = allocate(c.dv, sizeof *sums);
            for (int64_t i = 0; i < s.Tq; i++)
                forward_row(&c, m, &s, h, i, scores, sums);
            free(scores);
            free(sums);
        }
    }
}

/* ---- backward ----------------------------------------------------------------------------------------------- */

/* Sums of the gradients, in the layout of their tensors. */
typedef struct sums {
    long double *dq, *dk, *dv, *dsink, *dbias;
} sums;

static void backward_pair(const call *c, const cot_attention_backward_args *a, const cot_attention_backward_args *m,
                          const sums *sum, const sequence *s, int64_t h, int64_t i, int64_t j, double lse, double D,
                          double D_magnitude)
{
    const score x = make_score(c, s, h, i, j);
    if (x.s == -INFINITY)
        return;
    const double *q = rows_of(&a->q, s->q_row + i, h), *k = rows_of(&a->k, s->k_row + j, h / c->group);
    const double *dout = rows_of(&a->dout, s->q_row + i, h), *v = rows_of(&a->v, s->k_row + j, h / c->group);
    const double keep = kept(c, s, h, i, j);
    long double dP = 0;
    double dP_magnitude = 0;
    for (int64_t n = 0; n < c->dv; n++) {
        dP += (long double)dout[n] * v[n] * keep;
        dP_magnitude += fabs(dout[n] * v[n]) * keep;
    }
    const long double P = expl((long double)x.s - lse), dS = P * (dP - D), dZ = dS * x.slope;
    const double P_magnitude = (double)P * (1 + x.magnitude + fabs(lse)) + LOST;
    const double dS_magnitude = P_magnitude * fabs((double)dP - D) + (double)P * (dP_magnitude + D_magnitude);
    const double dZ_magnitude = dS_magnitude * x.slope + fabs((double)dS) * x.slope_error;
    const int64_t q_at = q - (double *)a->q.data, k_at = k - (double *)a->k.data, v_at = v - (double *)a->v.data;
    for (int64_t n = 0; n < c->d; n++) {
        if (cot_present(&a->dq)) {
            sum->dq[q_at + n] += (long double)c->scale * dZ * k[n];
            ((double *)m->dq.data)[q_at + n] += fabs(c->scale * k[n]) * dZ_magnitude;
        }
        if (cot_present(&a->dk)) {
            sum->dk[k_at + n] += (long double)c->scale * dZ * q[n];
            ((double *)m->dk.data)[k_at + n] += fabs(c->scale * q[n]) * dZ_magnitude;
        }
    }
    for (int64_t n = 0; cot_present(&a->dv) && n < c->dv; n++) {
        sum->dv[v_at + n] += P * keep * dout[n];
        ((double *)m->dv.data)[v_at + n] += P_magnitude * keep * fabs(dout[n]);
    }
    if (cot_present(&a->dbias)) {
        const int64_t at = bias_index(&a->dbias, s->b, h, i, j);
        sum->dbias[at] += dS;
        ((double *)m->dbias.data)[at] += dS_magnitude;
    }
}

static void backward_row(const call *c, const cot_attention_backward_args *a, const cot_attention_backward_args *m,
                         const sums *sum, const sequence *s, int64_t h, int64_t i)
{
    const int64_t at = statistic_index(c, s, h, i);
    const double lse = ((double *)a->lse.data)[at];
    if (lse == -INFINITY)
        return;
    long double D = 0;
    double magnitude = 0;
    if (cot_present(&a->delta)) {
        D = ((double *)a->delta.data)[at];
    } else {
        const double *dout = rows_of(&a->dout, s->q_row + i, h), *out = rows_of(&a->out, s->q_row + i, h);
        for (int64_t n = 0; n < c->dv; n++) {
            D += (long double)dout[n] * out[n];
            magnitude += fabs(dout[n] * out[n]);
        }
        if (cot_present(&a->dlse)) {
            D -= ((double *)a->dlse.data)[at];
            magnitude += fabs(((double *)a->dlse.data)[at]);
        }
    }
    magnitude += fabs((double)D);
    for (int64_t j = 0; j < s->Tk; j++)
        if (visible(c, s, i, j))
            backward_pair(c, a, m, sum, s, h, i, j, lse, (double)D, magnitude);
    if (cot_present(&a->dsink)) {
        const double sink = ((double *)a->sink.data)[h], weight = exp(sink - lse) + LOST;
        sum->dsink[h] -= expl((long double)sink - lse) * D;
        ((double *)m->dsink.data)[h] += weight * ((1 + fabs(sink) + fabs(lse)) * fabs((double)D) + magnitude);
    }
}

/* An output's sums, beginning with what it holds or with zero; its magnitudes alike. */
static long double *begin_sums(const cot_tensor *out, const cot_tensor *magnitude, bool accumulate)
{
    if (!cot_present(out))
        return NULL;
    long double *sums_of = allocate(cot_elements(out), sizeof(long double));
    for (int64_t i = 0; i < cot_elements(out); i++) {
        sums_of[i] = accumulate ? ((double *)out->data)[i] : 0;
        ((double *)magnitude->data)[i] = fabs((double)sums_of[i]);
    }
    return sums_of;
}

static void end_sums(const cot_tensor *out, long double *sums_of)
{
    for (int64_t i = 0; cot_present(out) && i < cot_elements(out); i++)
        ((double *)out->data)[i] = (double)sums_of[i];
    free(sums_of);
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
    const call c = make_call(&f);
    const sums sum = {
        .dq = begin_sums(&a->dq, &m->dq, a->accumulate),
        .dk = begin_sums(&a->dk, &m->dk, a->accumulate),
        .dv = begin_sums(&a->dv, &m->dv, a->accumulate),
        .dsink = begin_sums(&a->dsink, &m->dsink, a->accumulate),
        .dbias = begin_sums(&a->dbias, &m->dbias, a->accumulate),
    };
    for (int64_t b = 0; b < c.B; b++) {
        const sequence s = make_sequence(&c, b);
        /* Heads of one group share dk and dv, all of them perhaps dbias. */
#pragma omp parallel for if (!cot_present(&a->dbias))
        for (int64_t hkv = 0; hkv < c.Hkv; hkv++)
            for (int64_t h = hkv * c.group; h < (hkv + 1) * c.group; h++)
                for (int64_t i = 0; i < s.Tq; i++)
                    backward_row(&c, a, m, &sum, &s, h, i);
    }
    end_sums(&a->dq, sum.dq);
    end_sums(&a->dk, sum.dk);
    end_sums(&a->dv, sum.dv);
    end_sums(&a->dsink, sum.dsink);
    end_sums(&a->dbias, sum.dbias);
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
        const double most = fmax(fmax(x, y), sink);
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
            rows_of(&a->out, r, h)[c] = (double)(wx * u + wy * v);
            rows_of(&m->out, r, h)[c] = ex * fabs(u) + ey * fabs(v);
        }
    }
}

void (*const cot_attention_oracles[])(const void *, void *) = {forward, backward, delta, merge};
