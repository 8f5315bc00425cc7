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
    const char *x; /* row i at x + i * x_stride (bytes), channels contiguous */
    char *y;
    int64_t x_stride, y_stride;
    cot_dtype x_dtype, y_dtype;
    float *kept; /* 2K rows (conv1d_keep): weights, bias, the inputs before row 0; the walk leaves its own last ones */
    bool silu, stream;
    const int32_t *ids; /* NULL, or input i+k counts for token i only if ids[i+k] == ids[i+K-1] >= 0 */
} conv1d_columns;

static void conv1d_walk_edge(const conv1d_columns *s, int64_t channel)
{
    const int64_t K = s->K, x_size = conv1d_size(s->x_dtype), y_size = conv1d_size(s->y_dtype);
    for (int64_t c = channel; c < s->channels; c += VW) {
        const int lanes = (int)(s->channels - c < VW ? s->channels - c : VW);
        float *weight = s->kept + c * 2 * K, *history = weight + (K + 1) * VW;
        vf h[CONV1D_MAX_K];
        for (int64_t k = 0; k < K - 1; k++)
            h[k] = v_load(history + k * VW);
        for (int64_t i = 0; i < s->n; i++) {
            h[K - 1] = v_load_n_as(s->x + i * s->x_stride + c * x_size, s->x_dtype, lanes);
            vf z = v_load(weight + K * VW), before = v_zero();
            for (int64_t k = 0; k < K; k++) {
                conv1d_next_tap(k, &z, &before);
                if (s->ids == NULL || s->ids[i + k] == s->ids[i + K - 1])
                    z = v_fma(v_load(weight + k * VW), h[k], z);
            }
            z = conv1d_taps_sum(K, z, before);
            if (s->silu)
                z = v_silu_as(s->y_dtype, z);
            if (s->ids != NULL && s->ids[i + K - 1] < 0)
                z = v_zero();
            v_store_n_as(s->y + i * s->y_stride + c * y_size, s->y_dtype, z, lanes);
            for (int64_t k = 0; k < K - 1; k++)
                h[k] = h[k + 1];
        }
        for (int64_t k = 0; k < K - 1; k++)
            v_store(history + k * VW, h[k]);
    }
}

/* `count` (a constant) columns of vectors, x and y of one dtype. */
V_INLINE void conv1d_walk_vectors(const conv1d_columns *s, int64_t c, conv1d_out *out, int count, int64_t K,
                                  cot_dtype dtype)
{
    enum { MOST = 2 };
    const int64_t size = conv1d_size(dtype), n = s->n, x_stride = s->x_stride;
    const bool silu = s->silu;
    vf w[MOST][CONV1D_MAX_K], h[MOST][CONV1D_MAX_K], bias[MOST], y_row[MOST];
    float *kept = s->kept + c * 2 * K;
    for (int v = 0; v < count; v++) {
        const float *weight = kept + v * 2 * K * VW, *history = weight + (K + 1) * VW;
        for (int64_t k = 0; k < K; k++)
            w[v][k] = v_load(weight + k * VW);
        for (int64_t k = 0; k < K - 1; k++)
            h[v][k] = v_load(history + k * VW);
        bias[v] = v_load(weight + K * VW);
    }
    const char *x = s->x + c * size;
    char *y = conv1d_out_at(out, c, size);
    const int64_t y_stride = conv1d_out_stride(out);
    for (int64_t i = 0; i < n; i++) {
        conv1d_ask(x, x_stride, count * VW * size);
        V_UNROLL
        for (int v = 0; v < count; v++) {
            h[v][K - 1] = v_load_as(x + v * VW * size, dtype);
            vf z = bias[v], before = v_zero();
            V_UNROLL
            for (int64_t k = 0; k < K; k++) {
                conv1d_next_tap(k, &z, &before);
                z = v_fma(w[v][k], h[v][k], z);
            }
            z = conv1d_taps_sum(K, z, before);
            y_row[v] = silu ? v_silu_as(dtype, z) : z;
            V_UNROLL
            for (int64_t k = 0; k < K - 1; k++)
                h[v][k] = h[v][k + 1];
        }
        if (count == 2)
            v_store2_as(y, dtype, y_row[0], y_row[1]);
        else
            v_store_as(y, dtype, y_row[0]);
        conv1d_out_leave(out, count * VW * size);
        x += x_stride;
        y += y_stride;
    }
    for (int v = 0; v < count; v++)
        for (int64_t k = 0; k < K - 1; k++)
            v_store(kept + (v * 2 * K + K + 1 + k) * VW, h[v][k]);
}

/* Whole vectors; x and y of one dtype; returns the first channel not done. Two columns go at a time: a row's lines by twos. */
V_INLINE int64_t conv1d_walk_body(const conv1d_columns *s, int64_t K, cot_dtype dtype)
{
    _Alignas(CONV1D_RUN) char runs[CONV1D_RUNS];
    conv1d_out out = {
        .rows = s->y, .runs = runs, .stride = s->y_stride, .n = s->n, .channels = s->channels, .stream = s->stream};
    int64_t c = 0;
    for (int count; c + VW <= s->channels; c += count * VW) {
        count = c + 2 * VW <= s->channels ? 2 : 1;
        if (count == 2)
            conv1d_walk_vectors(s, c, &out, 2, K, dtype);
        else
            conv1d_walk_vectors(s, c, &out, 1, K, dtype);
        conv1d_out_made(&out, c + count * VW, conv1d_size(dtype));
    }
    return c;
}

#endif
