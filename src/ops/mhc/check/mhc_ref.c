/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_ref.c: the oracles: the formulas of cotangent/mhc.h as plain loops over tokens.
 *
 * All tensors are f64 and row-major. Sums are long double where the compiler has it, so that f64 kernels can be judged
 * by their own roundoff.
 *
 * A magnitude is the same expression with absolute terms: M(a*b) = M(a)|b| + |a|M(b), M(sigmoid(z)) = s + s(1-s)M(z).
 * The magnitude of an input is its absolute value. For Sinkhorn this rule would double the magnitude in each of the 2R
 * steps. The real errors do not grow, because each step is an average. Sinkhorn has its own rule:
 *   - Forward, relative errors: P_ij has rho_ij = 1 + M(logit) + |logit - max|, plus the average of that over its row.
 *     A step divides each element by the sum of its line (row or column). This subtracts from the element's relative
 *     error the average error of the line, weighted by the elements. The larger of the two is kept. 0.25 is added for
 *     the divisor: one roundoff of the four that the error rule allows.
 *     M(h_res) = h_res (2 + rho_ij + the averages of rho over row i and over column j).
 *   - Backward: a step subtracts from each element of G the average of its line. The element's error is then the
 *     roundoff of that sum's terms, plus the larger of its own error so far and its line's average error. Both are
 *     divided as the element is. The last step multiplies by 1 + the average of rho, for the error of the h_res that
 *     was summed with G, and adds a term for the error of P.
 * In post_pre, the x of pre is y, and the dy of post's backward is g. Both are rounded sums. M(y) and M(g) then replace
 * |x| and |dy|.
 * Where a factor can be subnormal (a sigmoid, a P, a dz, a dh_mix, a Q), min_normal is added to its magnitude: 4u of it
 * covers the rounding of one or two subnormals.
 *
 * NaN and infinities follow the formulas. If a magnitude is NaN but its value is a number (0 times infinity in a
 * derivative), the magnitude becomes the absolute value. Where a result is infinite, another order of its terms may
 * give NaN. */
#include "mhc_ref.h"

#include "cases/cases.h"
#include "../mhc_problem.h"

#include <math.h>
#include <stdlib.h>

typedef long double real;

static const real min_normal = 0x1p-126L; /* of f32 */

static double *values(const cot_tensor *tensor)
{
    return tensor->data;
}

/* Row `token`, of `count` elements, of a tensor [B,T,...]; NULL if the tensor is absent. */
static double *row(const cot_tensor *tensor, int64_t token, int64_t count)
{
    return cot_is_present(tensor) ? values(tensor) + token * count : NULL;
}

static void store(double *out, double *magnitudes, int64_t i, real value, real magnitude)
{
    if (out == NULL)
        return;
    out[i] = (double)value;
    magnitudes[i] = !isfinite(value) ? -1 : isfinite(magnitude) ? (double)magnitude : fabs((double)value);
}

/* Adds to a parameter's gradient. */
static void add(double *out, double *magnitudes, int64_t i, real value, real magnitude)
{
    if (out == NULL)
        return;
    out[i] = (double)(out[i] + value);
    magnitudes[i] += isfinite(magnitude) ? (double)magnitude : fabs((double)value);
    if (!isfinite(out[i]))
        magnitudes[i] = -1;
}

static void init_gradient(const cot_tensor *out, const cot_tensor *magnitudes, bool accumulate)
{
    for (int64_t i = 0; cot_is_present(out) && i < cot_elements(out); i++) {
        if (!accumulate)
            values(out)[i] = 0;
        values(magnitudes)[i] = fabs(values(out)[i]);
    }
}

/* The magnitude of element i of an input: its absolute value. If another function computed the input, `magnitudes` has
 * its magnitudes. */
static real input_magnitude(const double *input, const double *magnitudes, int64_t i)
{
    return magnitudes != NULL && isfinite(input[i]) ? fabs(magnitudes[i]) : fabs(input[i]);
}

static real sigmoid(real z)
{
    return 1 / (1 + expl(-z));
}

/* The magnitude of sigmoid(z). Where the slope is 0, no error of z passes through. */
static real sigmoid_magnitude(real z, real z_magnitude)
{
    const real sigma = sigmoid(z), slope = sigma * sigmoid(-z);
    return sigma + (slope == 0 ? 0 : slope * z_magnitude);
}

/* ---- Sinkhorn of one token --------------------------------------------------------------------------- */

/* Step 0 is softmax + eps. Then column and row steps alternate, from column to column: 2*iterations steps in all. */
typedef struct sinkhorn {
    int64_t n, steps;
    real *P, *O;      /* P [n][n]; O [steps][n][n], the output of each step */
    real *divisor;    /* [steps][n]: of each column or row; unused for step 0 */
    real *P_error;    /* [n][n]: relative error of P */
    real *rho;        /* [n][n]: relative error of the last O */
    real *line_error; /* [n]: average error of each row or column */
    real average;     /* average of rho */
} sinkhorn;

static sinkhorn make_sinkhorn(int64_t n, int32_t iterations)
{
    sinkhorn s = {.n = n, .steps = 2 * (int64_t)iterations};
    s.P = allocate(n * n, sizeof(real));
    s.O = allocate(s.steps * n * n, sizeof(real));
    s.divisor = allocate(s.steps * n, sizeof(real));
    s.P_error = allocate(n * n, sizeof(real));
    s.rho = allocate(n * n, sizeof(real));
    s.line_error = allocate(n, sizeof(real));
    return s;
}

static void free_sinkhorn(sinkhorn *s)
{
    free(s->P);
    free(s->O);
    free(s->divisor);
    free(s->P_error);
    free(s->rho);
    free(s->line_error);
}

/* The line of element (i,j) in step k: its column in a column step, its row in a row step. */
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

static void run_sinkhorn(sinkhorn *s, const real *logits, const real *magnitudes, double eps)
{
    const int64_t n = s->n;
    for (int64_t i = 0; i < n; i++)
        softmax_row(s, i, logits, magnitudes);
    for (int64_t ij = 0; ij < n * n; ij++)
        s->O[ij] = s->P[ij] + eps;
    for (int64_t k = 1; k < s->steps; k++) {
        const real *previous = s->O + (k - 1) * n * n;
        for (int64_t line = 0; line < n; line++)
            s->divisor[k * n + line] = eps;
        for (int64_t ij = 0; ij < n * n; ij++)
            s->divisor[k * n + line_of(k, ij / n, ij % n)] += previous[ij];
        for (int64_t line = 0; line < n; line++)
            s->line_error[line] = 0;
        for (int64_t ij = 0; ij < n * n; ij++) {
            const int64_t line = line_of(k, ij / n, ij % n);
            s->O[k * n * n + ij] = previous[ij] / s->divisor[k * n + line];
            s->line_error[line] += s->O[k * n * n + ij] * s->rho[ij];
        }
        for (int64_t ij = 0; ij < n * n; ij++)
            s->rho[ij] = fmaxl(s->rho[ij], s->line_error[line_of(k, ij / n, ij % n)]) + 0.25;
    }
    s->average = 0;
    for (int64_t ij = 0; ij < n * n; ij++)
        s->average += s->rho[ij] * s->O[(s->steps - 1) * n * n + ij] / (real)n;
}

static void store_sinkhorn(const sinkhorn *s, double *h_res, double *magnitudes)
{
    const int64_t n = s->n;
    const real *O = s->O + (s->steps - 1) * n * n;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++) {
            real magnitude = 2 + s->rho[i * n + j];
            for (int64_t k = 0; k < n; k++)
                magnitude += O[i * n + k] * s->rho[i * n + k] + O[k * n + j] * s->rho[k * n + j];
            store(h_res, magnitudes, i * n + j, O[i * n + j], O[i * n + j] * magnitude);
        }
}

/* Adds the gradient of the logits to dL and its magnitude to `magnitude`. */
static void sinkhorn_gradient(sinkhorn *s, const double *dh_res, real *dL, real *magnitude)
{
    const int64_t n = s->n;
    real *G = allocate(n * n, sizeof(real)), *errors = allocate(n * n, sizeof(real));
    real *sum = allocate(n, sizeof(real)), *sum_magnitudes = allocate(n, sizeof(real));
    for (int64_t ij = 0; ij < n * n; ij++) {
        G[ij] = dh_res[ij];
        errors[ij] = fabsl(G[ij]);
    }
    for (int64_t k = s->steps - 1; k >= 1; k--) {
        const real *O = s->O + k * n * n;
        for (int64_t line = 0; line < n; line++)
            sum[line] = sum_magnitudes[line] = s->line_error[line] = 0;
        for (int64_t ij = 0; ij < n * n; ij++) {
            const int64_t line = line_of(k, ij / n, ij % n);
            sum[line] += G[ij] * O[ij];
            sum_magnitudes[line] += fabsl(G[ij]) * O[ij];
            s->line_error[line] += errors[ij] * O[ij];
        }
        for (int64_t ij = 0; ij < n * n; ij++) {
            const int64_t line = line_of(k, ij / n, ij % n);
            G[ij] = (G[ij] - sum[line]) / s->divisor[k * n + line];
            errors[ij] = (fmaxl(errors[ij], s->line_error[line]) + sum_magnitudes[line]) / s->divisor[k * n + line];
        }
    }
    for (int64_t i = 0; i < n; i++) {
        real total = 0, total_error = 0, total_magnitude = 0;
        for (int64_t j = 0; j < n; j++) {
            total += G[i * n + j] * s->P[i * n + j];
            total_magnitude += fabsl(G[i * n + j]) * s->P[i * n + j];
            total_error += errors[i * n + j] * s->P[i * n + j];
        }
        for (int64_t j = 0; j < n; j++) {
            dL[i * n + j] += s->P[i * n + j] * (G[i * n + j] - total);
            magnitude[i * n + j] +=
                s->P[i * n + j] * (errors[i * n + j] + total_error) * (1 + s->average) +
                (s->P[i * n + j] * s->P_error[i * n + j] + min_normal) * (fabsl(G[i * n + j]) + total_magnitude);
        }
    }
    free(G);
    free(errors);
    free(sum);
    free(sum_magnitudes);
}

/* Converts the logits of an argument to long double. */
static void widen(real *to, const double *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = from[i];
}

static void sinkhorn_forward(const void *args, void *magnitudes)
{
    const cot_mhc_sinkhorn_forward_args *a = args, *m = magnitudes;
    const int64_t n = a->h_res_logits.shape[2], tokens = a->h_res_logits.shape[0] * a->h_res_logits.shape[1];
    real *logits = allocate(n * n, sizeof(real));
    sinkhorn s = make_sinkhorn(n, a->iterations);
    for (int64_t token = 0; token < tokens; token++) {
        widen(logits, row(&a->h_res_logits, token, n * n), n * n);
        run_sinkhorn(&s, logits, NULL, a->eps);
        store_sinkhorn(&s, row(&a->h_res, token, n * n), row(&m->h_res, token, n * n));
    }
    free_sinkhorn(&s);
    free(logits);
}

static void sinkhorn_backward(const void *args, void *magnitudes)
{
    const cot_mhc_sinkhorn_backward_args *a = args, *m = magnitudes;
    const int64_t n = a->h_res_logits.shape[2], tokens = a->h_res_logits.shape[0] * a->h_res_logits.shape[1];
    real *logits = allocate(3 * n * n, sizeof(real)), *dL = logits + n * n, *magnitude = dL + n * n;
    sinkhorn s = make_sinkhorn(n, a->iterations);
    for (int64_t token = 0; token < tokens; token++) {
        widen(logits, row(&a->h_res_logits, token, n * n), n * n);
        run_sinkhorn(&s, logits, NULL, a->eps);
        for (int64_t ij = 0; ij < n * n; ij++)
            dL[ij] = magnitude[ij] = 0;
        sinkhorn_gradient(&s, row(&a->dh_res, token, n * n), dL, magnitude);
        for (int64_t ij = 0; ij < n * n; ij++)
            store(row(&a->dh_res_logits, token, n * n), row(&m->dh_res_logits, token, n * n), ij, dL[ij],
                  magnitude[ij]);
    }
    free_sinkhorn(&s);
    free(logits);
}

/* ---- pre ---------------------------------------------------------------------------------------------- */

/* x_magnitudes: NULL, or those of x if it was computed. */
static void pre_forward_of(const cot_mhc_pre_forward_args *a, const cot_mhc_pre_forward_args *m,
                           const cot_tensor *x_magnitudes)
{
    const int64_t n = a->x.shape[2], D = a->x.shape[3], K = n * D, M = n * (n + 2);
    const int64_t tokens = a->x.shape[0] * a->x.shape[1];
    const double *gamma = cot_is_present(&a->gamma) ? values(&a->gamma) : NULL;
    real *z = allocate(2 * M, sizeof(real)), *z_magnitude = z + M;
    sinkhorn s = make_sinkhorn(n, cot_is_present(&a->h_res) ? a->sinkhorn_iterations : 1);
    for (int64_t t = 0; t < tokens; t++) {
        const double *x = row(&a->x, t, K), *xm = x_magnitudes != NULL ? row(x_magnitudes, t, K) : NULL;
        real squares = 0, squares_error = 0;
        for (int64_t k = 0; k < K; k++) {
            squares += (real)x[k] * x[k];
            squares_error += xm != NULL ? fabs(x[k]) * input_magnitude(x, xm, k) : 0;
        }
        const real inv_rms = 1 / sqrtl(squares / (real)K + a->norm_eps);
        /* Relative. The error of a computed x adds to the 1 of the roundoff. */
        const real inv_rms_error = 1 + inv_rms * inv_rms * squares_error / (real)K;
        store(row(&a->inv_rms, t, 1), row(&m->inv_rms, t, 1), 0, inv_rms, inv_rms * inv_rms_error);
        for (int64_t j = 0; j < M; j++) {
            const double *phi = values(&a->phi) + j * K;
            real mix = 0;
            double mix_magnitude = 0;
            for (int64_t k = 0; k < K; k++) {
                const double weight = phi[k] * (gamma != NULL ? gamma[k] : 1);
                mix += (real)phi[k] * (gamma != NULL ? gamma[k] : 1) * x[k];
                mix_magnitude += fabs(weight) * (double)input_magnitude(x, xm, k);
            }
            store(row(&a->h_mix, t, M), row(&m->h_mix, t, M), j, mix, mix_magnitude);
            const real alpha = values(&a->alpha)[mhc_alpha_index(n, j)], bias = values(&a->bias)[j];
            z[j] = alpha * mix * inv_rms + bias;
            z_magnitude[j] = fabsl(alpha) * (mix_magnitude + fabsl(mix) * inv_rms_error) * inv_rms + fabsl(bias);
            const real sigma = sigmoid(z[j]), magnitude = sigmoid_magnitude(z[j], z_magnitude[j]) + min_normal;
            if (j < n)
                store(row(&a->h_pre, t, n), row(&m->h_pre, t, n), j, sigma + a->hc_eps, magnitude + a->hc_eps);
            else if (j < 2 * n)
                store(row(&a->h_post, t, n), row(&m->h_post, t, n), j - n, a->post_scale * sigma,
                      a->post_scale * magnitude);
            else
                store(row(&a->h_res_logits, t, n * n), row(&m->h_res_logits, t, n * n), j - 2 * n, z[j],
                      z_magnitude[j]);
        }
        if (cot_is_present(&a->h_res)) {
            run_sinkhorn(&s, z + 2 * n, z_magnitude + 2 * n, a->sinkhorn_eps);
            store_sinkhorn(&s, row(&a->h_res, t, n * n), row(&m->h_res, t, n * n));
        }
        for (int64_t d = 0; cot_is_present(&a->h_in) && d < D; d++) {
            real sum = 0, magnitude = 0;
            for (int64_t i = 0; i < n; i++) {
                const real sigma = sigmoid(z[i]);
                sum += (sigma + a->hc_eps) * x[i * D + d];
                magnitude += (sigmoid_magnitude(z[i], z_magnitude[i]) + a->hc_eps) * fabs(x[i * D + d]);
                magnitude += xm != NULL ? (sigma + a->hc_eps) * input_magnitude(x, xm, i * D + d) : 0;
            }
            store(row(&a->h_in, t, D), row(&m->h_in, t, D), d, sum, magnitude);
        }
    }
    free_sinkhorn(&s);
    free(z);
}

static void pre_forward(const void *args, void *magnitudes)
{
    pre_forward_of(args, magnitudes, NULL);
}

/* The gradient of one token's z and its magnitude, [M] each. */
static void pre_dz(const cot_mhc_pre_backward_args *a, const cot_tensor *x_magnitudes, sinkhorn *s, int64_t t, real *dz,
                   real *magnitude)
{
    const int64_t n = a->x.shape[2], D = a->x.shape[3], M = n * (n + 2);
    const double *x = row(&a->x, t, n * D), *xm = x_magnitudes != NULL ? row(x_magnitudes, t, n * D) : NULL;
    const double *h_mix = row(&a->h_mix, t, M);
    for (int64_t i = 0; i < n; i++) {
        real dh = 0, dh_magnitude = 0;
        for (int64_t d = 0; d < D; d++) {
            const real dh_in = row(&a->dh_in, t, D)[d];
            dh += dh_in * x[i * D + d];
            dh_magnitude += fabsl(dh_in) * input_magnitude(x, xm, i * D + d);
        }
        const real h = row(&a->h_pre, t, n)[i], sigma = h - a->hc_eps;
        dz[i] = dh * sigma * (1 - sigma);
        magnitude[i] = dh_magnitude * fabsl(sigma * (1 - sigma)) + fabsl(dh) * (h + a->hc_eps) * (1 + h + a->hc_eps);
    }
    for (int64_t o = 0; o < n; o++) {
        const real h = row(&a->h_post, t, n)[o], dh = row(&a->dh_post, t, n)[o];
        dz[n + o] = dh * h * (1 - h / a->post_scale);
        magnitude[n + o] = fabsl(dh * h) * (1 + fabsl(h / a->post_scale)) + min_normal;
    }
    real *dL = dz + 2 * n, *dL_magnitude = magnitude + 2 * n;
    for (int64_t ij = 0; ij < n * n; ij++) {
        dL[ij] = cot_is_present(&a->dh_res_logits) ? row(&a->dh_res_logits, t, n * n)[ij] : 0;
        dL_magnitude[ij] = fabsl(dL[ij]);
    }
    if (!cot_is_present(&a->dh_res))
        return;
    real *logits = allocate(2 * n * n, sizeof(real)), *logit_magnitude = logits + n * n;
    for (int64_t ij = 0; ij < n * n; ij++) {
        const real product = (real)values(&a->alpha)[2] * h_mix[2 * n + ij] * *row(&a->inv_rms, t, 1);
        const real bias = values(&a->bias)[2 * n + ij];
        logits[ij] = product + bias;
        logit_magnitude[ij] = fabsl(product) + fabsl(bias);
    }
    run_sinkhorn(s, logits, logit_magnitude, a->sinkhorn_eps);
    sinkhorn_gradient(s, row(&a->dh_res, t, n * n), dL, dL_magnitude);
    free(logits);
}

/* x_magnitudes: NULL, or those of x if it was computed. */
static void pre_backward_of(const cot_mhc_pre_backward_args *a, const cot_mhc_pre_backward_args *m,
                            const cot_tensor *x_magnitudes)
{
    const int64_t n = a->x.shape[2], D = a->x.shape[3], K = n * D, M = n * (n + 2);
    const int64_t tokens = a->x.shape[0] * a->x.shape[1];
    const double *gamma = cot_is_present(&a->gamma) ? values(&a->gamma) : NULL, *phi = values(&a->phi);
    init_gradient(&a->dphi, &m->dphi, a->accumulate);
    init_gradient(&a->dalpha, &m->dalpha, a->accumulate);
    init_gradient(&a->dbias, &m->dbias, a->accumulate);
    init_gradient(&a->dgamma, &m->dgamma, a->accumulate);
    real *dz = allocate(4 * M, sizeof(real)), *dz_magnitude = dz + M, *dh_mix = dz_magnitude + M,
         *dh_mix_magnitude = dh_mix + M;
    real *dbias = allocate(2 * M, sizeof(real)), *dbias_magnitude = dbias + M, dalpha[3] = {0},
         dalpha_magnitude[3] = {0};
    real *Q = allocate(M * K, sizeof(real)), *dx = allocate(K, sizeof(real));
    double *Q_magnitude = allocate(M * K, sizeof(double)), *dx_magnitude = allocate(K, sizeof(double));
    sinkhorn s = make_sinkhorn(n, cot_is_present(&a->dh_res) ? a->sinkhorn_iterations : 1);
    for (int64_t t = 0; t < tokens; t++) {
        const double *x = row(&a->x, t, K), *xm = x_magnitudes != NULL ? row(x_magnitudes, t, K) : NULL;
        const double *h_mix = row(&a->h_mix, t, M);
        const real inv_rms = *row(&a->inv_rms, t, 1);
        pre_dz(a, x_magnitudes, &s, t, dz, dz_magnitude);
        real dinv = 0, dinv_magnitude = 0;
        for (int64_t j = 0; j < M; j++) {
            const int64_t group = mhc_alpha_index(n, j);
            const real alpha = values(&a->alpha)[group], u = h_mix[j] * inv_rms;
            dbias[j] += dz[j];
            dbias_magnitude[j] += dz_magnitude[j];
            dalpha[group] += dz[j] * u;
            dalpha_magnitude[group] += dz_magnitude[j] * fabsl(u);
            dinv += alpha * dz[j] * h_mix[j];
            dinv_magnitude += fabsl(alpha * h_mix[j]) * dz_magnitude[j];
            dh_mix[j] = alpha * dz[j] * inv_rms;
            dh_mix_magnitude[j] = fabsl(alpha * inv_rms) * dz_magnitude[j] + min_normal;
        }
        const real scale = inv_rms * inv_rms * inv_rms / (real)K;
        for (int64_t k = 0; k < K; k++)
            dx[k] = 0, dx_magnitude[k] = 0;
        for (int64_t j = 0; j < M; j++) {
            const double magnitude = (double)dh_mix_magnitude[j];
            for (int64_t k = 0; k < K; k++) {
                const int64_t jk = j * K + k;
                dx[k] += dh_mix[j] * phi[jk];
                dx_magnitude[k] += magnitude * fabs(phi[jk]);
                Q[jk] += dh_mix[j] * x[k];
                Q_magnitude[jk] += magnitude * fabs(x[k]);
                Q_magnitude[jk] += xm != NULL ? fabs((double)dh_mix[j]) * (double)input_magnitude(x, xm, k) : 0;
            }
        }
        for (int64_t k = 0; cot_is_present(&a->dx) && k < K; k++) {
            const int64_t i = k / D, d = k % D;
            const real direct = (real)row(&a->h_pre, t, n)[i] * row(&a->dh_in, t, D)[d];
            const real post = cot_is_present(&a->dx_post) ? row(&a->dx_post, t, K)[k] : 0,
                       g = gamma != NULL ? gamma[k] : 1;
            store(row(&a->dx, t, K), row(&m->dx, t, K), k, g * dx[k] - dinv * scale * x[k] + direct + post,
                  fabsl(g) * dx_magnitude[k] + dinv_magnitude * scale * fabs(x[k]) + fabsl(direct) + fabsl(post) +
                      (xm != NULL ? fabsl(dinv) * scale * input_magnitude(x, xm, k) : 0));
        }
    }
    for (int64_t j = 0; j < M; j++)
        add(row(&a->dbias, 0, 0), row(&m->dbias, 0, 0), j, dbias[j], dbias_magnitude[j]);
    for (int group = 0; group < 3; group++)
        add(row(&a->dalpha, 0, 0), row(&m->dalpha, 0, 0), group, dalpha[group], dalpha_magnitude[group]);
    for (int64_t jk = 0; jk < M * K; jk++) {
        const int64_t k = jk % K;
        const real g = gamma != NULL ? gamma[k] : 1;
        add(row(&a->dphi, 0, 0), row(&m->dphi, 0, 0), jk, Q[jk] * g, (Q_magnitude[jk] + min_normal) * fabsl(g));
        add(row(&a->dgamma, 0, 0), row(&m->dgamma, 0, 0), k, phi[jk] * Q[jk], fabs(phi[jk]) * Q_magnitude[jk]);
    }
    free_sinkhorn(&s);
    free(dz);
    free(dbias);
    free(Q);
    free(dx);
    free(Q_magnitude);
    free(dx_magnitude);
}

static void pre_backward(const void *args, void *magnitudes)
{
    pre_backward_of(args, magnitudes, NULL);
}

/* ---- post --------------------------------------------------------------------------------------------- */

/* Index of h_res[i,o] in either storage order. */
static int64_t h_res_index(int64_t n, int32_t h_res_is_out_in, int64_t i, int64_t o)
{
    return h_res_is_out_in ? o * n + i : i * n + o;
}

static void post_forward(const void *args, void *magnitudes)
{
    const cot_mhc_post_forward_args *a = args, *m = magnitudes;
    const int64_t n = a->x.shape[2], D = a->x.shape[3], tokens = a->x.shape[0] * a->x.shape[1];
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t od = 0; od < n * D; od++) {
            const int64_t o = od / D, d = od % D;
            const real first = (real)row(&a->h_post, t, n)[o] * row(&a->f, t, D)[d];
            real sum = first, magnitude = fabsl(first);
            for (int64_t i = 0; i < n; i++) {
                const real term = (real)row(&a->h_res, t, n * n)[h_res_index(n, a->h_res_is_out_in, i, o)] *
                                  row(&a->x, t, n * D)[i * D + d];
                sum += term;
                magnitude += fabsl(term);
            }
            store(row(&a->y, t, n * D), row(&m->y, t, n * D), od, sum, magnitude);
        }
}

/* sum_d a[d] * b[d], and its magnitude. b_magnitudes: NULL, or those of b if it was computed. */
static void dot(double *out, double *magnitudes, int64_t index, const double *a, const double *b,
                const double *b_magnitudes, int64_t D)
{
    real sum = 0, magnitude = 0;
    for (int64_t d = 0; d < D; d++) {
        sum += (real)a[d] * b[d];
        magnitude += fabs(a[d]) * input_magnitude(b, b_magnitudes, d);
    }
    store(out, magnitudes, index, sum, magnitude);
}

/* dy_magnitudes: NULL, or those of dy if it was computed. */
static void post_backward_of(const cot_mhc_post_backward_args *a, const cot_mhc_post_backward_args *m,
                             const cot_tensor *dy_magnitudes)
{
    const int64_t n = a->x.shape[2], D = a->x.shape[3], tokens = a->x.shape[0] * a->x.shape[1];
    for (int64_t t = 0; t < tokens; t++) {
        const double *x = row(&a->x, t, n * D), *dy = row(&a->dy, t, n * D), *f = row(&a->f, t, D);
        const double *h_res = row(&a->h_res, t, n * n), *h_post = row(&a->h_post, t, n);
        const double *gm = dy_magnitudes != NULL ? row(dy_magnitudes, t, n * D) : NULL;
        for (int64_t o = 0; o < n; o++) {
            const double *stream_magnitudes = gm != NULL ? gm + o * D : NULL;
            dot(row(&a->dh_post, t, n), row(&m->dh_post, t, n), o, f, dy + o * D, stream_magnitudes, D);
            for (int64_t i = 0; i < n; i++)
                dot(row(&a->dh_res, t, n * n), row(&m->dh_res, t, n * n), h_res_index(n, a->h_res_is_out_in, i, o),
                    x + i * D, dy + o * D, stream_magnitudes, D);
        }
        for (int64_t d = 0; d < D; d++) {
            real df = 0, df_magnitude = 0;
            for (int64_t o = 0; o < n; o++) {
                df += (real)h_post[o] * dy[o * D + d];
                df_magnitude += fabs(h_post[o]) * input_magnitude(dy, gm, o * D + d);
            }
            store(row(&a->df, t, D), row(&m->df, t, D), d, df, df_magnitude);
            for (int64_t i = 0; i < n; i++) {
                real dx = 0, dx_magnitude = 0;
                for (int64_t o = 0; o < n; o++) {
                    const double weight = h_res[h_res_index(n, a->h_res_is_out_in, i, o)];
                    dx += (real)weight * dy[o * D + d];
                    dx_magnitude += fabs(weight) * input_magnitude(dy, gm, o * D + d);
                }
                store(row(&a->dx, t, n * D), row(&m->dx, t, n * D), i * D + d, dx, dx_magnitude);
            }
        }
    }
}

static void post_backward(const void *args, void *magnitudes)
{
    post_backward_of(args, magnitudes, NULL);
}

/* ---- post_pre --------------------------------------------------------------------------------------------- */

/* Pre's arguments, from those of post_pre or from their magnitudes. */
static cot_mhc_pre_forward_args pre_half_forward(const cot_mhc_post_pre_forward_args *a)
{
    return mhc_pre_half_forward(&(const mhc_post_pre_forward_problem){.args = *a}).args;
}

static cot_mhc_post_forward_args post_half_forward(const cot_mhc_post_pre_forward_args *a)
{
    cot_mhc_post_forward_args post = mhc_post_half_forward(&(const mhc_post_pre_forward_problem){.args = *a}).args;
    post.h_res_is_out_in = a->h_res_is_out_in;
    return post;
}

/* y is not rounded. If x is f16 or bf16, the cases choose inputs whose y is exact in that dtype (mhc_cases.c). */
static void post_pre_forward(const void *args, void *magnitudes)
{
    cot_mhc_post_forward_args post = post_half_forward(args), post_magnitudes = post_half_forward(magnitudes);
    cot_mhc_pre_forward_args pre = pre_half_forward(args), pre_magnitudes = pre_half_forward(magnitudes);
    post_forward(&post, &post_magnitudes);
    pre_forward_of(&pre, &pre_magnitudes, &post_magnitudes.y);
}

static cot_tensor allocate_like(const cot_tensor *like)
{
    return cot_tensor_contiguous(allocate((size_t)cot_elements(like), sizeof(double)), COT_F64, like->rank,
                                 like->shape);
}

static void post_pre_backward(const void *args, void *magnitudes)
{
    const mhc_post_pre_backward_problem p = {.args = *(const cot_mhc_post_pre_backward_args *)args},
                                        m = {.args = *(const cot_mhc_post_pre_backward_args *)magnitudes};
    cot_mhc_pre_backward_args pre = mhc_pre_half_backward(&p).args, pre_magnitudes = mhc_pre_half_backward(&m).args;
    cot_mhc_post_backward_args post = mhc_post_half_backward(&p).args,
                               post_magnitudes = mhc_post_half_backward(&m).args;
    cot_mhc_post_forward_args again = mhc_post_pre_recomputation(&p).args, again_magnitudes = again;
    post.h_res_is_out_in = again.h_res_is_out_in = p.args.h_res_is_out_in;
    const bool recompute = !cot_is_present(&p.args.y);
    if (recompute) {
        again.y = pre.x = allocate_like(&p.args.x);
        again_magnitudes.y = allocate_like(&p.args.x);
        post_forward(&again, &again_magnitudes);
    }
    pre.dx = post.dy = allocate_like(&p.args.x);
    pre_magnitudes.dx = allocate_like(&p.args.x);
    pre_backward_of(&pre, &pre_magnitudes, recompute ? &again_magnitudes.y : NULL);
    post_backward_of(&post, &post_magnitudes, &pre_magnitudes.dx);
    free(pre.dx.data);
    free(pre_magnitudes.dx.data);
    if (recompute) {
        free(again.y.data);
        free(again_magnitudes.y.data);
    }
}

void (*const cot_mhc_pre_oracles[])(const void *, void *) = {pre_forward, pre_backward};
void (*const cot_mhc_sinkhorn_oracles[])(const void *, void *) = {sinkhorn_forward, sinkhorn_backward};
void (*const cot_mhc_post_oracles[])(const void *, void *) = {post_forward, post_backward};
void (*const cot_mhc_post_pre_oracles[])(const void *, void *) = {post_pre_forward, post_pre_backward};
