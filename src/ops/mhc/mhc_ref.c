/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_ref.c: the oracles: the formulas of cotangent/mhc.h as plain loops, a token at a time. All tensors come as f64,
 * row-major. Sums are long double where the compiler has one, so that f64 kernels can be judged by their own roundoff.
 *
 * Magnitudes are the same expressions with absolute terms: M(a*b) = M(a)|b| + |a|M(b), M(sigmoid(z)) = s + s(1-s)M(z),
 * and an input counts as itself. Sinkhorn's would double at each of its 2R steps that way, which says nothing: errors do
 * not, because each step is an average. Instead:
 *   - Forward, relative errors: P_ij has rho_ij = 1 + M(logit) + |logit - max|, and the average of that over its row.
 *     A step takes the average of its line (row or column), weighted by what it divides, off every element: the larger
 *     of the two stays, and a quarter is added, one roundoff of the rule's four, for the divisor.
 *     M(A) = A (2 + rho_ij + the averages of rho over row i and over column j).
 *   - Backward: a step subtracts from each element of G the average of its line. The element is then off by the roundoff
 *     of that sum's terms, and by the larger of its own error so far and its line's average of them, all divided as the
 *     element is. In the end comes 1 + the average of rho, by which the A that G was summed with is off, and what P is
 *     off by.
 * Where a factor can be subnormal (a sigmoid, a P), least_normal is part of its magnitude: 4u of that is what rounding a
 * subnormal or two costs.
 *
 * NaN and infinities follow the formulas. A magnitude that is no number beside a value that is one (0 times infinity, in a
 * derivative) becomes the value's own. Where a result is an infinity, another order of its terms may give NaN. */
#include "mhc_ref.h"

#include "core/cases.h"
#include "mhc_problem.h"

#include <math.h>
#include <stdlib.h>

typedef long double real;

static const real least_normal = 0x1p-126L; /* of f32 */

static double *values(const cot_tensor *tensor)
{
    return tensor->data;
}

/* Row `token` of a tensor [B,T,...] whose rows have `size` elements; NULL if it is absent. */
static double *row(const cot_tensor *tensor, int64_t token, int64_t size)
{
    return cot_present(tensor) ? values(tensor) + token * size : NULL;
}

static void store(double *out, double *magnitude, int64_t i, real value, real size)
{
    if (out == NULL)
        return;
    out[i] = (double)value;
    magnitude[i] = !isfinite(value) ? -1 : isfinite(size) ? (double)size : fabs((double)value);
}

/* Adds to a parameter's gradient. */
static void add(double *out, double *magnitude, int64_t i, real value, real size)
{
    if (out == NULL)
        return;
    out[i] = (double)(out[i] + value);
    magnitude[i] += isfinite(size) ? (double)size : fabs((double)value);
    if (!isfinite(out[i]))
        magnitude[i] = -1;
}

static void begin_gradient(const cot_tensor *out, const cot_tensor *magnitude, bool accumulate)
{
    for (int64_t i = 0; cot_present(out) && i < cot_elements(out); i++) {
        if (!accumulate)
            values(out)[i] = 0;
        values(magnitude)[i] = fabs(values(out)[i]);
    }
}

static real sigmoid(real z)
{
    return 1 / (1 + expl(-z));
}

/* The magnitude of sigmoid(z); at its limits no error of z passes. */
static real sigmoid_size(real z, real z_size)
{
    const real sigma = sigmoid(z), slope = sigma * sigmoid(-z);
    return sigma + (slope == 0 ? 0 : slope * z_size);
}

/* ---- sinkhorn of one token ---------------------------------------------------------------------------- */

/* steps: 0 = softmax + eps, then column, row, column, ... , column: 2*iterations in all. */
typedef struct sinkhorn {
    int64_t n, steps;
    real *P, *O;   /* [n][n]; [steps][n][n], the output of each */
    real *divisor; /* [steps][n], of each column or row; of step 0 none */
    real *P_error; /* [n][n]: of P, relative */
    real *rho;     /* [n][n]: of the last O */
    real *error;   /* [n]: an average of a row or column */
    real average;  /* of rho */
} sinkhorn;

static sinkhorn sinkhorn_make(int64_t n, int32_t iterations)
{
    sinkhorn s = {.n = n, .steps = 2 * (int64_t)iterations};
    s.P = allocate(n * n, sizeof(real));
    s.O = allocate(s.steps * n * n, sizeof(real));
    s.divisor = allocate(s.steps * n, sizeof(real));
    s.P_error = allocate(n * n, sizeof(real));
    s.rho = allocate(n * n, sizeof(real));
    s.error = allocate(n, sizeof(real));
    return s;
}

static void sinkhorn_free(sinkhorn *s)
{
    free(s->P);
    free(s->O);
    free(s->divisor);
    free(s->P_error);
    free(s->rho);
    free(s->error);
}

/* The row or column, whichever step k sums, of element (i,j). */
static int64_t line_of(int64_t k, int64_t i, int64_t j)
{
    return k % 2 == 1 ? j : i;
}

static void softmax_row(sinkhorn *s, int64_t i, const real *logits, const real *magnitudes)
{
    const int64_t n = s->n;
    real max = logits[i * n], sum = 0, average = 0;
    for (int64_t j = 1; j < n; j++)
        max = fmaxl(max, logits[i * n + j]);
    for (int64_t j = 0; j < n; j++)
        sum += s->P[i * n + j] = expl(logits[i * n + j] - max);
    for (int64_t j = 0; j < n; j++) {
        s->P[i * n + j] /= sum;
        s->rho[i * n + j] = 1;
        if (s->P[i * n + j] != 0)
            s->rho[i * n + j] += fabsl(logits[i * n + j] - max) + (magnitudes != NULL ? magnitudes[i * n + j] : 0);
        average += s->P[i * n + j] * s->rho[i * n + j];
    }
    for (int64_t j = 0; j < n; j++)
        s->P_error[i * n + j] = s->rho[i * n + j] += average;
}

static void sinkhorn_run(sinkhorn *s, const real *logits, const real *magnitudes, double eps)
{
    const int64_t n = s->n;
    for (int64_t i = 0; i < n; i++)
        softmax_row(s, i, logits, magnitudes);
    for (int64_t ij = 0; ij < n * n; ij++)
        s->O[ij] = s->P[ij] + eps;
    for (int64_t k = 1; k < s->steps; k++) {
        const real *before = s->O + (k - 1) * n * n;
        for (int64_t line = 0; line < n; line++)
            s->divisor[k * n + line] = eps;
        for (int64_t ij = 0; ij < n * n; ij++)
            s->divisor[k * n + line_of(k, ij / n, ij % n)] += before[ij];
        for (int64_t line = 0; line < n; line++)
            s->error[line] = 0;
        for (int64_t ij = 0; ij < n * n; ij++) {
            const int64_t line = line_of(k, ij / n, ij % n);
            s->O[k * n * n + ij] = before[ij] / s->divisor[k * n + line];
            s->error[line] += s->O[k * n * n + ij] * s->rho[ij];
        }
        for (int64_t ij = 0; ij < n * n; ij++)
            s->rho[ij] = fmaxl(s->rho[ij], s->error[line_of(k, ij / n, ij % n)]) + 0.25;
    }
    s->average = 0;
    for (int64_t ij = 0; ij < n * n; ij++)
        s->average += s->rho[ij] * s->O[(s->steps - 1) * n * n + ij] / (real)n;
}

static void sinkhorn_store(const sinkhorn *s, double *A, double *magnitude)
{
    const int64_t n = s->n;
    const real *O = s->O + (s->steps - 1) * n * n;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++) {
            real size = 2 + s->rho[i * n + j];
            for (int64_t k = 0; k < n; k++)
                size += O[i * n + k] * s->rho[i * n + k] + O[k * n + j] * s->rho[k * n + j];
            store(A, magnitude, i * n + j, O[i * n + j], O[i * n + j] * size);
        }
}

/* Adds the gradient of the logits to dL and its magnitude to size. */
static void sinkhorn_gradient(sinkhorn *s, const double *dA, real *dL, real *size)
{
    const int64_t n = s->n;
    real *G = allocate(n * n, sizeof(real)), *terms = allocate(n * n, sizeof(real));
    real *sum = allocate(n, sizeof(real)), *sizes = allocate(n, sizeof(real));
    for (int64_t ij = 0; ij < n * n; ij++) {
        G[ij] = dA[ij];
        terms[ij] = fabsl(G[ij]);
    }
    for (int64_t k = s->steps - 1; k >= 1; k--) {
        const real *O = s->O + k * n * n;
        for (int64_t line = 0; line < n; line++)
            sum[line] = sizes[line] = s->error[line] = 0;
        for (int64_t ij = 0; ij < n * n; ij++) {
            const int64_t line = line_of(k, ij / n, ij % n);
            sum[line] += G[ij] * O[ij];
            sizes[line] += fabsl(G[ij]) * O[ij];
            s->error[line] += terms[ij] * O[ij];
        }
        for (int64_t ij = 0; ij < n * n; ij++) {
            const int64_t line = line_of(k, ij / n, ij % n);
            G[ij] = (G[ij] - sum[line]) / s->divisor[k * n + line];
            terms[ij] = (fmaxl(terms[ij], s->error[line]) + sizes[line]) / s->divisor[k * n + line];
        }
    }
    for (int64_t i = 0; i < n; i++) {
        real total = 0, total_size = 0, absolute = 0;
        for (int64_t j = 0; j < n; j++) {
            total += G[i * n + j] * s->P[i * n + j];
            absolute += fabsl(G[i * n + j]) * s->P[i * n + j];
            total_size += terms[i * n + j] * s->P[i * n + j];
        }
        for (int64_t j = 0; j < n; j++) {
            dL[i * n + j] += s->P[i * n + j] * (G[i * n + j] - total);
            size[i * n + j] +=
                s->P[i * n + j] * (terms[i * n + j] + total_size) * (1 + s->average) +
                (s->P[i * n + j] * s->P_error[i * n + j] + least_normal) * (fabsl(G[i * n + j]) + absolute);
        }
    }
    free(G);
    free(terms);
    free(sum);
    free(sizes);
}

/* The logits of an argument in long double. */
static void widen(real *to, const double *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = from[i];
}

static void sinkhorn_forward(const void *args, void *magnitudes)
{
    const cot_mhc_sinkhorn_forward_args *a = args, *m = magnitudes;
    const int64_t n = a->h_res.shape[2], tokens = a->h_res.shape[0] * a->h_res.shape[1];
    real *logits = allocate(n * n, sizeof(real));
    sinkhorn s = sinkhorn_make(n, a->iterations);
    for (int64_t token = 0; token < tokens; token++) {
        widen(logits, row(&a->h_res, token, n * n), n * n);
        sinkhorn_run(&s, logits, NULL, a->eps);
        sinkhorn_store(&s, row(&a->A, token, n * n), row(&m->A, token, n * n));
    }
    sinkhorn_free(&s);
    free(logits);
}

static void sinkhorn_backward(const void *args, void *magnitudes)
{
    const cot_mhc_sinkhorn_backward_args *a = args, *m = magnitudes;
    const int64_t n = a->h_res.shape[2], tokens = a->h_res.shape[0] * a->h_res.shape[1];
    real *logits = allocate(3 * n * n, sizeof(real)), *dL = logits + n * n, *size = dL + n * n;
    sinkhorn s = sinkhorn_make(n, a->iterations);
    for (int64_t token = 0; token < tokens; token++) {
        widen(logits, row(&a->h_res, token, n * n), n * n);
        sinkhorn_run(&s, logits, NULL, a->eps);
        for (int64_t ij = 0; ij < n * n; ij++)
            dL[ij] = size[ij] = 0;
        sinkhorn_gradient(&s, row(&a->dA, token, n * n), dL, size);
        for (int64_t ij = 0; ij < n * n; ij++)
            store(row(&a->dh_res, token, n * n), row(&m->dh_res, token, n * n), ij, dL[ij], size[ij]);
    }
    sinkhorn_free(&s);
    free(logits);
}

/* ---- pre ---------------------------------------------------------------------------------------------- */

static void pre_forward(const void *args, void *magnitudes)
{
    const cot_mhc_pre_forward_args *a = args, *m = magnitudes;
    const int64_t n = a->x.shape[2], D = a->x.shape[3], K = n * D, M = n * (n + 2);
    const int64_t tokens = a->x.shape[0] * a->x.shape[1];
    const double *gamma = cot_present(&a->gamma) ? values(&a->gamma) : NULL;
    real *z = allocate(2 * M, sizeof(real)), *z_size = z + M;
    sinkhorn s = sinkhorn_make(n, cot_present(&a->A) ? a->sinkhorn_iterations : 1);
    for (int64_t t = 0; t < tokens; t++) {
        const double *x = row(&a->x, t, K);
        real squares = 0;
        for (int64_t k = 0; k < K; k++)
            squares += (real)x[k] * x[k];
        const real inv_rms = 1 / sqrtl(squares / (real)K + a->norm_eps);
        store(row(&a->inv_rms, t, 1), row(&m->inv_rms, t, 1), 0, inv_rms, inv_rms);
        for (int64_t j = 0; j < M; j++) {
            const double *phi = values(&a->phi) + j * K;
            real mix = 0;
            double mix_size = 0;
            for (int64_t k = 0; k < K; k++) {
                mix += (real)phi[k] * (gamma != NULL ? gamma[k] : 1) * x[k];
                mix_size += fabs(phi[k] * (gamma != NULL ? gamma[k] : 1) * x[k]);
            }
            store(row(&a->h_mix, t, M), row(&m->h_mix, t, M), j, mix, mix_size);
            const real alpha = values(&a->alpha)[mhc_group(n, j)], bias = values(&a->bias)[j];
            z[j] = alpha * mix * inv_rms + bias;
            z_size[j] = fabsl(alpha) * (mix_size + fabsl(mix)) * inv_rms + fabsl(bias);
            const real sigma = sigmoid(z[j]), size = sigmoid_size(z[j], z_size[j]) + least_normal;
            if (j < n)
                store(row(&a->h_pre, t, n), row(&m->h_pre, t, n), j, sigma + a->hc_eps, size + a->hc_eps);
            else if (j < 2 * n)
                store(row(&a->h_post, t, n), row(&m->h_post, t, n), j - n, a->post_scale * sigma, a->post_scale * size);
            else
                store(row(&a->h_res, t, n * n), row(&m->h_res, t, n * n), j - 2 * n, z[j], z_size[j]);
        }
        if (cot_present(&a->A)) {
            sinkhorn_run(&s, z + 2 * n, z_size + 2 * n, a->sinkhorn_eps);
            sinkhorn_store(&s, row(&a->A, t, n * n), row(&m->A, t, n * n));
        }
        for (int64_t d = 0; cot_present(&a->h_in) && d < D; d++) {
            real sum = 0, size = 0;
            for (int64_t i = 0; i < n; i++) {
                const real sigma = sigmoid(z[i]);
                sum += (sigma + a->hc_eps) * x[i * D + d];
                size += (sigmoid_size(z[i], z_size[i]) + a->hc_eps) * fabs(x[i * D + d]);
            }
            store(row(&a->h_in, t, D), row(&m->h_in, t, D), d, sum, size);
        }
    }
    sinkhorn_free(&s);
    free(z);
}

/* The gradient of one token's z, [M] each. */
static void pre_dz(const cot_mhc_pre_backward_args *a, sinkhorn *s, int64_t t, real *dz, real *size)
{
    const int64_t n = a->x.shape[2], D = a->x.shape[3], M = n * (n + 2);
    const double *x = row(&a->x, t, n * D), *h_mix = row(&a->h_mix, t, M);
    for (int64_t i = 0; i < n; i++) {
        real dh = 0, dh_size = 0;
        for (int64_t d = 0; d < D; d++) {
            const real term = (real)row(&a->dh_in, t, D)[d] * x[i * D + d];
            dh += term;
            dh_size += fabsl(term);
        }
        const real h = row(&a->h_pre, t, n)[i], sigma = h - a->hc_eps;
        dz[i] = dh * sigma * (1 - sigma);
        size[i] = dh_size * fabsl(sigma * (1 - sigma)) + fabsl(dh) * (h + a->hc_eps) * (1 + h + a->hc_eps);
    }
    for (int64_t o = 0; o < n; o++) {
        const real h = row(&a->h_post, t, n)[o], dh = row(&a->dh_post, t, n)[o];
        dz[n + o] = dh * h * (1 - h / a->post_scale);
        size[n + o] = fabsl(dh * h) * (1 + fabsl(h / a->post_scale));
    }
    real *dL = dz + 2 * n, *dL_size = size + 2 * n;
    for (int64_t ij = 0; ij < n * n; ij++) {
        dL[ij] = cot_present(&a->dh_res) ? row(&a->dh_res, t, n * n)[ij] : 0;
        dL_size[ij] = fabsl(dL[ij]);
    }
    if (!cot_present(&a->dA))
        return;
    real *logits = allocate(2 * n * n, sizeof(real)), *logit_size = logits + n * n;
    for (int64_t ij = 0; ij < n * n; ij++) {
        const real product = (real)values(&a->alpha)[2] * h_mix[2 * n + ij] * *row(&a->inv_rms, t, 1);
        const real bias = values(&a->bias)[2 * n + ij];
        logits[ij] = product + bias;
        logit_size[ij] = fabsl(product) + fabsl(bias);
    }
    sinkhorn_run(s, logits, logit_size, a->sinkhorn_eps);
    sinkhorn_gradient(s, row(&a->dA, t, n * n), dL, dL_size);
    free(logits);
}

static void pre_backward(const void *args, void *magnitudes)
{
    const cot_mhc_pre_backward_args *a = args, *m = magnitudes;
    const int64_t n = a->x.shape[2], D = a->x.shape[3], K = n * D, M = n * (n + 2);
    const int64_t tokens = a->x.shape[0] * a->x.shape[1];
    const double *gamma = cot_present(&a->gamma) ? values(&a->gamma) : NULL, *phi = values(&a->phi);
    begin_gradient(&a->dphi, &m->dphi, a->accumulate);
    begin_gradient(&a->dalpha, &m->dalpha, a->accumulate);
    begin_gradient(&a->dbias, &m->dbias, a->accumulate);
    begin_gradient(&a->dgamma, &m->dgamma, a->accumulate);
    real *dz = allocate(4 * M, sizeof(real)), *dz_size = dz + M, *dh_mix = dz_size + M, *dh_mix_size = dh_mix + M;
    real *dbias = allocate(2 * M, sizeof(real)), *dbias_size = dbias + M, dalpha[3] = {0}, dalpha_size[3] = {0};
    real *Q = allocate(M * K, sizeof(real)), *dx = allocate(K, sizeof(real));
    double *Q_size = allocate(M * K, sizeof(double)), *dx_size = allocate(K, sizeof(double));
    sinkhorn s = sinkhorn_make(n, cot_present(&a->dA) ? a->sinkhorn_iterations : 1);
    for (int64_t t = 0; t < tokens; t++) {
        const double *x = row(&a->x, t, K), *h_mix = row(&a->h_mix, t, M);
        const real inv_rms = *row(&a->inv_rms, t, 1);
        pre_dz(a, &s, t, dz, dz_size);
        real dinv = 0, dinv_size = 0;
        for (int64_t j = 0; j < M; j++) {
            const int64_t group = mhc_group(n, j);
            const real alpha = values(&a->alpha)[group], u = h_mix[j] * inv_rms;
            dbias[j] += dz[j];
            dbias_size[j] += dz_size[j];
            dalpha[group] += dz[j] * u;
            dalpha_size[group] += dz_size[j] * fabsl(u);
            dinv += alpha * dz[j] * h_mix[j];
            dinv_size += fabsl(alpha * h_mix[j]) * dz_size[j];
            dh_mix[j] = alpha * dz[j] * inv_rms;
            dh_mix_size[j] = fabsl(alpha * inv_rms) * dz_size[j];
        }
        const real scale = inv_rms * inv_rms * inv_rms / (real)K;
        for (int64_t k = 0; k < K; k++)
            dx[k] = 0, dx_size[k] = 0;
        for (int64_t j = 0; j < M; j++) {
            const double size = (double)dh_mix_size[j];
            for (int64_t k = 0; k < K; k++) {
                const int64_t jk = j * K + k;
                dx[k] += dh_mix[j] * phi[jk];
                dx_size[k] += size * fabs(phi[jk]);
                Q[jk] += dh_mix[j] * x[k];
                Q_size[jk] += size * fabs(x[k]);
            }
        }
        for (int64_t k = 0; cot_present(&a->dx) && k < K; k++) {
            const int64_t i = k / D, d = k % D;
            const real direct = (real)row(&a->h_pre, t, n)[i] * row(&a->dh_in, t, D)[d];
            const real post = cot_present(&a->dx_post) ? row(&a->dx_post, t, K)[k] : 0,
                       g = gamma != NULL ? gamma[k] : 1;
            store(row(&a->dx, t, K), row(&m->dx, t, K), k, g * dx[k] - dinv * scale * x[k] + direct + post,
                  fabsl(g) * dx_size[k] + dinv_size * scale * fabs(x[k]) + fabsl(direct) + fabsl(post));
        }
    }
    for (int64_t j = 0; j < M; j++)
        add(row(&a->dbias, 0, 0), row(&m->dbias, 0, 0), j, dbias[j], dbias_size[j]);
    for (int group = 0; group < 3; group++)
        add(row(&a->dalpha, 0, 0), row(&m->dalpha, 0, 0), group, dalpha[group], dalpha_size[group]);
    for (int64_t jk = 0; jk < M * K; jk++) {
        const int64_t k = jk % K;
        const real g = gamma != NULL ? gamma[k] : 1;
        add(row(&a->dphi, 0, 0), row(&m->dphi, 0, 0), jk, Q[jk] * g, Q_size[jk] * fabsl(g));
        add(row(&a->dgamma, 0, 0), row(&m->dgamma, 0, 0), k, phi[jk] * Q[jk], fabs(phi[jk]) * Q_size[jk]);
    }
    sinkhorn_free(&s);
    free(dz);
    free(dbias);
    free(Q);
    free(dx);
    free(Q_size);
    free(dx_size);
}

/* ---- post --------------------------------------------------------------------------------------------- */

/* A[i,o] in either storage. */
static int64_t in_out(int64_t n, int32_t A_is_out_in, int64_t i, int64_t o)
{
    return A_is_out_in ? o * n + i : i * n + o;
}

static void post_forward(const void *args, void *magnitudes)
{
    const cot_mhc_post_forward_args *a = args, *m = magnitudes;
    const int64_t n = a->x.shape[2], D = a->x.shape[3], tokens = a->x.shape[0] * a->x.shape[1];
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t od = 0; od < n * D; od++) {
            const int64_t o = od / D, d = od % D;
            const real first = (real)row(&a->h_post, t, n)[o] * row(&a->f, t, D)[d];
            real sum = first, size = fabsl(first);
            for (int64_t i = 0; i < n; i++) {
                const real term =
                    (real)row(&a->A, t, n * n)[in_out(n, a->A_is_out_in, i, o)] * row(&a->x, t, n * D)[i * D + d];
                sum += term;
                size += fabsl(term);
            }
            store(row(&a->y, t, n * D), row(&m->y, t, n * D), od, sum, size);
        }
}

/* sum_d a[d] * b[d] */
static void dot(double *out, double *magnitude, int64_t at, const double *a, const double *b, int64_t D)
{
    real sum = 0, size = 0;
    for (int64_t d = 0; d < D; d++) {
        sum += (real)a[d] * b[d];
        size += fabsl((real)a[d] * b[d]);
    }
    store(out, magnitude, at, sum, size);
}

static void post_backward(const void *args, void *magnitudes)
{
    const cot_mhc_post_backward_args *a = args, *m = magnitudes;
    const int64_t n = a->x.shape[2], D = a->x.shape[3], tokens = a->x.shape[0] * a->x.shape[1];
    for (int64_t t = 0; t < tokens; t++) {
        const double *x = row(&a->x, t, n * D), *dy = row(&a->dy, t, n * D), *f = row(&a->f, t, D);
        const double *A = row(&a->A, t, n * n), *h_post = row(&a->h_post, t, n);
        for (int64_t o = 0; o < n; o++) {
            dot(row(&a->dh_post, t, n), row(&m->dh_post, t, n), o, f, dy + o * D, D);
            for (int64_t i = 0; i < n; i++)
                dot(row(&a->dA, t, n * n), row(&m->dA, t, n * n), in_out(n, a->A_is_out_in, i, o), x + i * D,
                    dy + o * D, D);
        }
        for (int64_t d = 0; d < D; d++) {
            real df = 0, df_size = 0;
            for (int64_t o = 0; o < n; o++) {
                df += (real)h_post[o] * dy[o * D + d];
                df_size += fabsl((real)h_post[o] * dy[o * D + d]);
            }
            store(row(&a->df, t, D), row(&m->df, t, D), d, df, df_size);
            for (int64_t i = 0; i < n; i++) {
                real dx = 0, dx_size = 0;
                for (int64_t o = 0; o < n; o++) {
                    const real term = (real)A[in_out(n, a->A_is_out_in, i, o)] * dy[o * D + d];
                    dx += term;
                    dx_size += fabsl(term);
                }
                store(row(&a->dx, t, n * D), row(&m->dx, t, n * D), i * D + d, dx, dx_size);
            }
        }
    }
}

void (*const cot_mhc_pre_oracles[])(const void *, void *) = {pre_forward, pre_backward};
void (*const cot_mhc_sinkhorn_oracles[])(const void *, void *) = {sinkhorn_forward, sinkhorn_backward};
void (*const cot_mhc_post_oracles[])(const void *, void *) = {post_forward, post_backward};
