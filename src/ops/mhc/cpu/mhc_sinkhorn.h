/* SPDX-License-Identifier: Apache-2.0
 * mhc_sinkhorn.h: Sinkhorn's iterations and their gradient, VW tokens at a time, one token a lane.
 *
 * h_res = K_ij u_i v_j with K = softmax + eps. The steps change only u or v. So an iteration costs 2n*n products and 2n
 * divisions, and rounding errors do not accumulate in the n*n elements. The backward uses G~ = G u v in place of the
 * gradient G of a step's output. The gradient of a step that divided row i is
 *     G~_ij -= S_i u_i v_j,   S_i = sum_j G~_ij K_ij
 * with u and v after that step; columns likewise. So only u and v of all iterations have to be stored. */
#ifndef COT_MHC_SINKHORN_H
#define COT_MHC_SINKHORN_H

#include "mhc_rows.h"

/* K from logits, in place. Also stores P, unless P is NULL. */
static inline void mhc_softmax(int64_t n, vf eps, vf *kernel, vf *P)
{
    for (int64_t i = 0; i < n; i++) {
        vf *row = kernel + i * n, row_max = row[0], sum = v_zero();
        for (int64_t j = 1; j < n; j++)
            row_max = v_max(row_max, row[j]);
        for (int64_t j = 0; j < n; j++) {
            row[j] = v_exp(v_sub(row[j], row_max));
            sum = v_add(sum, row[j]);
        }
        for (int64_t j = 0; j < n; j++) {
            row[j] = v_div(row[j], sum);
            if (P != NULL)
                P[i * n + j] = row[j];
            row[j] = v_add(row[j], eps);
        }
    }
}

/* Computes u and v after the last iteration. Stores u and v after each iteration in history [iterations][2n][VW],
 * unless NULL. */
static inline void mhc_iterate(int64_t n, int32_t iterations, vf eps, const vf *kernel, vf *u, vf *v, float *history)
{
    for (int64_t i = 0; i < n; i++)
        u[i] = v[i] = v_set1(1);
    for (int32_t r = 0; r < iterations; r++) {
        for (int64_t i = 0; r > 0 && i < n; i++) { /* the first iteration has no row step */
            vf sum = v_zero();
            for (int64_t j = 0; j < n; j++)
                sum = v_fma(kernel[i * n + j], v[j], sum);
            u[i] = v_div(u[i], v_fma(sum, u[i], eps));
        }
        for (int64_t j = 0; j < n; j++) {
            vf sum = v_zero();
            for (int64_t i = 0; i < n; i++)
                sum = v_fma(kernel[i * n + j], u[i], sum);
            v[j] = v_div(v[j], v_fma(sum, v[j], eps));
        }
        for (int64_t i = 0; history != NULL && i < n; i++) {
            v_store(history + (2 * r * n + i) * VW, u[i]);
            v_store(history + ((2 * r + 1) * n + i) * VW, v[i]);
        }
    }
}

/* h_res from logits, in place. */
static inline void mhc_sinkhorn(int64_t n, int32_t iterations, double eps_, vf *h_res)
{
    vf u[MHC_MAX_N], v[MHC_MAX_N];
    const vf eps = v_set1((float)eps_);
    mhc_softmax(n, eps, h_res, NULL);
    mhc_iterate(n, iterations, eps, h_res, u, v, NULL);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++)
            h_res[i * n + j] = v_mul(v_mul(h_res[i * n + j], u[i]), v[j]);
}

/* G holds dh_res and becomes the gradient of the logits. Overwrites the logits. */
static inline void mhc_sinkhorn_gradient(int64_t n, int32_t iterations, double eps_, vf *logits, vf *G, float *history)
{
    vf P[MHC_MAX_N * MHC_MAX_N], u[MHC_MAX_N], v[MHC_MAX_N], *kernel = logits;
    const vf eps = v_set1((float)eps_);
    mhc_softmax(n, eps, kernel, P);
    mhc_iterate(n, iterations, eps, kernel, u, v, history);
    for (int64_t ij = 0; ij < n * n; ij++)
        G[ij] = v_mul(v_mul(G[ij], u[ij / n]), v[ij % n]);
    for (int32_t r = iterations - 1; r >= 0; r--) {
        for (int64_t i = 0; i < n; i++) {
            u[i] = v_load(history + (2 * r * n + i) * VW);
            v[i] = v_load(history + ((2 * r + 1) * n + i) * VW);
        }
        for (int64_t j = 0; j < n; j++) {
            vf sum = v_zero();
            for (int64_t i = 0; i < n; i++)
                sum = v_fma(G[i * n + j], kernel[i * n + j], sum);
            sum = v_mul(sum, v[j]);
            for (int64_t i = 0; i < n; i++)
                G[i * n + j] = v_fnma(sum, u[i], G[i * n + j]);
        }
        if (r == 0)
            break;
        for (int64_t j = 0; j < n; j++)
            v[j] = v_load(history + ((2 * r - 1) * n + j) * VW);
        for (int64_t i = 0; i < n; i++) {
            vf sum = v_zero();
            for (int64_t j = 0; j < n; j++)
                sum = v_fma(G[i * n + j], kernel[i * n + j], sum);
            sum = v_mul(sum, u[i]);
            for (int64_t j = 0; j < n; j++)
                G[i * n + j] = v_fnma(sum, v[j], G[i * n + j]);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        vf sum = v_zero();
        for (int64_t j = 0; j < n; j++)
            sum = v_fma(G[i * n + j], P[i * n + j], sum);
        for (int64_t j = 0; j < n; j++)
            G[i * n + j] = v_mul(P[i * n + j], v_sub(G[i * n + j], sum));
    }
}

#endif
