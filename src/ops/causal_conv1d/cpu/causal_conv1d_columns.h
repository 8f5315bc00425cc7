/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_columns.h: the arithmetic of the channel-last forward and of the update. The lanes of a vector are
 * consecutive channels of one token.
 *
 * A column is one vector of channels. It is processed down the tokens, with the last K inputs in registers. So each
 * element is loaded and converted once. Between tiles of tokens those inputs stay in the column state, in the
 * L1 cache.
 *
 * Each loop exists twice. The fast loop handles whole vectors of channels, and tokens whose K inputs are all of one
 * sequence, for a constant K = 2..8 or a variable K. The general loop (`..._general`) handles the rest. */
#ifndef COT_CAUSAL_CONV1D_COLUMNS_H
#define COT_CAUSAL_CONV1D_COLUMNS_H

#include "causal_conv1d_instances.h"
#include "causal_conv1d_tiles.h"
#include "simd/silu.h"

/* A tile: y[i][c] = act(bias[c] + sum_k weight[k][c] * x[i+k-K+1][c]), i < n */
typedef struct conv1d_tile_args {
    int64_t n, K, channels;
    const char *x; /* token i at x + i * x_stride (bytes), channels contiguous */
    char *y;
    int64_t x_stride, y_stride;
    cot_dtype x_dtype, y_dtype;
    float *column_state; /* 2K vectors per column: weights, bias, K-1 inputs before token 0 (updated); see
                            conv1d_pack_vector */
    bool silu, nontemporal;
    const int32_t *seq_ids; /* NULL, or input i+k contributes to token i only if seq_ids[i+k] == seq_ids[i+K-1] >= 0 */
} conv1d_tile_args;

static void conv1d_convolve_tile_general(const conv1d_tile_args *tile, int64_t first_channel)
{
    const int64_t K = tile->K, x_size = conv1d_element_size(tile->x_dtype), y_size = conv1d_element_size(tile->y_dtype);
    for (int64_t channel = first_channel; channel < tile->channels; channel += VW) {
        const int lanes = (int)(tile->channels - channel < VW ? tile->channels - channel : VW);
        float *weight = tile->column_state + channel * 2 * K, *saved_inputs = weight + (K + 1) * VW;
        vf inputs[CONV1D_MAX_K];
        for (int64_t k = 0; k < K - 1; k++)
            inputs[k] = v_load(saved_inputs + k * VW);
        for (int64_t i = 0; i < tile->n; i++) {
            inputs[K - 1] = v_load_n_as(tile->x + i * tile->x_stride + channel * x_size, tile->x_dtype, lanes);
            vf z = v_load(weight + K * VW), total = v_zero();
            for (int64_t k = 0; k < K; k++) {
                conv1d_close_tap_chunk(k, &z, &total);
                if (tile->seq_ids == NULL || tile->seq_ids[i + k] == tile->seq_ids[i + K - 1])
                    z = v_fma(v_load(weight + k * VW), inputs[k], z);
            }
            z = conv1d_tap_sum(K, z, total);
            if (tile->silu)
                z = v_silu_as(tile->y_dtype, z);
            if (tile->seq_ids != NULL && tile->seq_ids[i + K - 1] < 0)
                z = v_zero();
            v_store_n_as(tile->y + i * tile->y_stride + channel * y_size, tile->y_dtype, z, lanes);
            for (int64_t k = 0; k < K - 1; k++)
                inputs[k] = inputs[k + 1];
        }
        for (int64_t k = 0; k < K - 1; k++)
            v_store(saved_inputs + k * VW, inputs[k]);
    }
}

/* `count` columns, a constant, 1 or 2. x and y have one dtype. */
V_INLINE void conv1d_convolve_tile_columns(const conv1d_tile_args *tile, int64_t channel, conv1d_writer *writer,
                                           int count, int64_t K, cot_dtype dtype)
{
    enum { MAX_COLUMNS = 2 };
    const int64_t size = conv1d_element_size(dtype), n = tile->n, x_stride = tile->x_stride;
    const bool silu = tile->silu;
    vf w[MAX_COLUMNS][CONV1D_MAX_K], inputs[MAX_COLUMNS][CONV1D_MAX_K], bias[MAX_COLUMNS], result[MAX_COLUMNS];
    float *column_state = tile->column_state + channel * 2 * K;
    for (int v = 0; v < count; v++) {
        const float *weight = column_state + v * 2 * K * VW, *saved_inputs = weight + (K + 1) * VW;
        for (int64_t k = 0; k < K; k++)
            w[v][k] = v_load(weight + k * VW);
        for (int64_t k = 0; k < K - 1; k++)
            inputs[v][k] = v_load(saved_inputs + k * VW);
        bias[v] = v_load(weight + K * VW);
    }
    const char *x = tile->x + channel * size;
    char *y = conv1d_writer_pointer(writer, channel, size);
    const int64_t y_stride = conv1d_writer_stride(writer);
    for (int64_t i = 0; i < n; i++) {
        conv1d_prefetch_tile(x, x_stride, count * VW * size);
        V_UNROLL
        for (int v = 0; v < count; v++) {
            inputs[v][K - 1] = v_load_as(x + v * VW * size, dtype);
            vf z = bias[v], total = v_zero();
            V_UNROLL
            for (int64_t k = 0; k < K; k++) {
                conv1d_close_tap_chunk(k, &z, &total);
                z = v_fma(w[v][k], inputs[v][k], z);
            }
            z = conv1d_tap_sum(K, z, total);
            result[v] = silu ? v_silu_as(dtype, z) : z;
            V_UNROLL
            for (int64_t k = 0; k < K - 1; k++)
                inputs[v][k] = inputs[v][k + 1];
        }
        if (count == 2)
            v_store2_as(y, dtype, result[0], result[1]);
        else
            v_store_as(y, dtype, result[0]);
        conv1d_writer_drain(writer, count * VW * size);
        x += x_stride;
        y += y_stride;
    }
    for (int v = 0; v < count; v++)
        for (int64_t k = 0; k < K - 1; k++)
            v_store(column_state + (v * 2 * K + K + 1 + k) * VW, inputs[v][k]);
}

/* Whole vectors of channels; x and y have one dtype. Returns the first channel that is not done. The loop processes two
 * adjacent columns at a time. */
V_INLINE int64_t conv1d_convolve_tile_body(const conv1d_tile_args *tile, int64_t K, cot_dtype dtype)
{
    _Alignas(CONV1D_RUN_BYTES) char run_buffers[CONV1D_RUN_BUFFERS];
    conv1d_writer writer = {.output = tile->y,
                            .run_buffers = run_buffers,
                            .stride = tile->y_stride,
                            .n = tile->n,
                            .channels = tile->channels,
                            .nontemporal = tile->nontemporal};
    int64_t channel = 0;
    for (int count; channel + VW <= tile->channels; channel += count * VW) {
        count = channel + 2 * VW <= tile->channels ? 2 : 1;
        if (count == 2)
            conv1d_convolve_tile_columns(tile, channel, &writer, 2, K, dtype);
        else
            conv1d_convolve_tile_columns(tile, channel, &writer, 1, K, dtype);
        conv1d_writer_commit(&writer, channel + count * VW, conv1d_element_size(dtype));
    }
    return channel;
}

#endif
