/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_columns.h: the arithmetic of the channel-last kernels. Lanes are consecutive channels of one token; a
 * column of lanes walks down the tokens with the last K inputs in registers, so that each element is loaded, and
 * converted, once. Between tiles of tokens those inputs rest in the first-level cache.
 *
 * Each walk exists twice. The fast one takes whole vectors of channels and tokens whose K inputs are all of one
 * sequence, for K = 2..8 as a constant (or K as a variable). The other takes what is left. */
#ifndef COT_CAUSAL_CONV1D_COLUMNS_H
#define COT_CAUSAL_CONV1D_COLUMNS_H

#include "causal_conv1d_tiles.h"

/* y[i][c] = act(bias[c] + sum_k weight[k][c] * x[i+k-K+1][c]), i < n */
typedef struct conv1d_columns {
    int64_t n, K, channels;
    int64_t ld;    /* floats between the rows of weight, history, sums: whole vectors */
    const char *x; /* row i at x + i * x_stride (bytes), channels contiguous */
    char *y;
    int64_t x_stride, y_stride;
    cot_dtype x_dtype, y_dtype;
    const float *weight; /* [K+1][ld]: the bias last */
    float *history;      /* [K-1][ld]: the inputs before row 0; the walk leaves its own last ones */
    bool silu, stream;
    const int32_t *ids; /* NULL, or input i+k counts for token i only if ids[i+k] == ids[i+K-1] >= 0 */
} conv1d_columns;

static void conv1d_walk_edge(const conv1d_columns *s, int64_t channel)
{
    const int64_t K = s->K, ld = s->ld, x_size = conv1d_size(s->x_dtype), y_size = conv1d_size(s->y_dtype);
    for (int64_t c = channel; c < s->channels; c += VW) {
        const int lanes = (int)(s->channels - c < VW ? s->channels - c : VW);
        vf h[CONV1D_MAX_K];
        for (int64_t k = 0; k < K - 1; k++)
            h[k] = v_load(s->history + k * ld + c);
        for (int64_t i = 0; i < s->n; i++) {
            h[K - 1] = v_load_n_as(s->x + i * s->x_stride + c * x_size, s->x_dtype, lanes);
            vf z = v_load(s->weight + K * ld + c), before = v_zero();
            for (int64_t k = 0; k < K; k++) {
                conv1d_next_tap(k, &z, &before);
                if (s->ids == NULL || s->ids[i + k] == s->ids[i + K - 1])
                    z = v_fma(v_load(s->weight + k * ld + c), h[k], z);
            }
            z = conv1d_taps_sum(K, z, before);
            if (s->silu)
                z = v_silu(z);
            if (s->ids != NULL && s->ids[i + K - 1] < 0)
                z = v_zero();
            v_store_n_as(s->y + i * s->y_stride + c * y_size, s->y_dtype, z, lanes);
            for (int64_t k = 0; k < K - 1; k++)
                h[k] = h[k + 1];
        }
        for (int64_t k = 0; k < K - 1; k++)
            v_store(s->history + k * ld + c, h[k]);
    }
}

/* Whole vectors; x and y of one dtype; returns the first channel not done. */
V_INLINE int64_t conv1d_walk_body(const conv1d_columns *s, int64_t K, cot_dtype dtype)
{
    const int64_t ld = s->ld, size = dtype == COT_F32 ? 4 : 2, n = s->n;
    const int64_t x_stride = s->x_stride, y_stride = s->y_stride;
    const bool silu = s->silu, stream = s->stream;
    int64_t c = 0;
    for (; c + VW <= s->channels; c += VW) {
        vf w[CONV1D_MAX_K], h[CONV1D_MAX_K];
        for (int64_t k = 0; k < K; k++)
            w[k] = v_load(s->weight + k * ld + c);
        for (int64_t k = 0; k < K - 1; k++)
            h[k] = v_load(s->history + k * ld + c);
        const vf bias = v_load(s->weight + K * ld + c);
        const char *x = s->x + c * size;
        char *y = s->y + c * size;
        for (int64_t i = 0; i < n; i++) {
            v_prefetch_far(x + CONV1D_TILE * x_stride);
            h[K - 1] = v_load_as(x, dtype);
            vf z = bias, before = v_zero();
            V_UNROLL
            for (int64_t k = 0; k < K; k++) {
                conv1d_next_tap(k, &z, &before);
                z = v_fma(w[k], h[k], z);
            }
            z = conv1d_taps_sum(K, z, before);
            if (silu)
                z = v_silu(z);
            if (stream)
                v_stream_as(y, dtype, z);
            else
                v_store_as(y, dtype, z);
            V_UNROLL
            for (int64_t k = 0; k < K - 1; k++)
                h[k] = h[k + 1];
            x += x_stride;
            y += y_stride;
        }
        for (int64_t k = 0; k < K - 1; k++)
            v_store(s->history + k * ld + c, h[k]);
    }
    return c;
}

#endif
