/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_tiles.h: tiles of tokens by channels for the channel-last kernels: their sizes, which of their tokens
 * are of one sequence, their way from and to tensors. */
#ifndef COT_CAUSAL_CONV1D_TILES_H
#define COT_CAUSAL_CONV1D_TILES_H

#include "causal_conv1d_stage.h"

enum {
    CONV1D_TILE = 8,                /* tokens of a tile */
    CONV1D_PAD = VW == 8 ? 16 : 0,  /* floats between the rows of a buffer, see conv1d_ld */
    CONV1D_RUN = 256,               /* bytes of a row, see conv1d_out */
    CONV1D_STAGED = 4 * (2048 + 16) /* floats of a tile whose rows pass through a buffer */
};

/* Tokens of one walk that passes through buffers: fewer the longer the rows are. */
V_INLINE int64_t conv1d_staged_tile(int64_t channels)
{
    return channels > CONV1D_ROW ? 2 : CONV1D_TILE;
}

V_INLINE int64_t conv1d_round_up(int64_t channels)
{
    return (channels + VW - 1) / VW * VW;
}

/* Floats from row to row of a buffer: whole vectors; where a first-level cache has 8 ways only, not a power of two, which
 * would put a column's rows of all buffers into one set of it. */
V_INLINE int64_t conv1d_ld(int64_t channels)
{
    return conv1d_round_up(channels) + CONV1D_PAD;
}

/* Is token i of one sequence with the K-1 inputs before it? */
V_INLINE bool conv1d_plain(const int32_t *ids, int64_t i, int64_t K)
{
    bool plain = ids[i] >= 0;
    for (int64_t k = 1; k < K; k++)
        plain = plain && ids[i + k] == ids[i];
    return plain;
}

/* The tokens of [i, end) up to the next change between plain and not; *plain is what they are. */
static inline int64_t conv1d_plain_run(const int32_t *ids, int64_t i, int64_t end, int64_t K, bool *plain)
{
    *plain = ids == NULL || conv1d_plain(ids, i, K);
    if (ids == NULL)
        return end - i;
    int64_t stop = i + 1;
    while (stop < end && conv1d_plain(ids, stop, K) == *plain)
        stop++;
    return stop - i;
}

/* to[r][0..channels) = rows [begin, begin+n) of the tensor, in f32 */
static inline void conv1d_gather_tile(float *to, int64_t ld, const cot_tensor *tensor, int64_t b, int64_t d,
                                      int64_t channels, int64_t begin, int64_t n)
{
    const char *from = conv1d_at(tensor, b, d, begin);
    const int64_t channel = tensor->stride[1], token = tensor->stride[2];
    const int64_t size = (int64_t)cot_dtype_size(tensor->dtype);
    if (channel != 1 && token == 1 && tensor->dtype == COT_F32) {
        for (int64_t c = 0; c < channels; c++)
            for (int64_t r = 0; r < n; r++)
                to[r * ld + c] = ((const float *)(const void *)from)[c * channel + r];
        return;
    }
    for (int64_t r = 0; r < n; r++)
        conv1d_gather(to + r * ld, from + r * token * size, tensor->dtype, channel, channels);
}

static inline void conv1d_scatter_tile(const float *from, int64_t ld, const cot_tensor *tensor, int64_t b, int64_t d,
                                       int64_t channels, int64_t begin, int64_t n)
{
    char *to = conv1d_at(tensor, b, d, begin);
    const int64_t channel = tensor->stride[1], token = tensor->stride[2];
    const int64_t size = (int64_t)cot_dtype_size(tensor->dtype);
    for (int64_t r = 0; r < n; r++)
        conv1d_scatter(to + r * token * size, tensor->dtype, channel, from + r * ld, channels);
}

/* Zeros for whole vectors of channels. */
static inline void conv1d_clear_planes(float *planes, int64_t rows, int64_t K, int64_t channels)
{
    for (int64_t k = 0; k < rows; k++)
        memset(planes + k * conv1d_plane(K), 0, (size_t)conv1d_round_up(channels) * sizeof *planes);
}

/* [K+1]: weights by tap, then the bias */
static inline void conv1d_stage_planes(float *planes, const cot_tensor *weight, const cot_tensor *bias, int64_t K,
                                       int64_t d, int64_t channels)
{
    const int64_t ld = conv1d_plane(K);
    conv1d_clear_planes(planes, K + 1, K, channels);
    for (int64_t c = 0; c < channels; c++)
        for (int64_t k = 0; k < K; k++)
            planes[k * ld + c] =
                (float)cot_load_f64(weight->data, weight->dtype, (d + c) * weight->stride[0] + k * weight->stride[1]);
    if (cot_present(bias))
        conv1d_gather(planes + K * ld, (char *)bias->data + d * bias->stride[0] * (int64_t)cot_dtype_size(bias->dtype),
                      bias->dtype, bias->stride[0], channels);
}

/* The K-1 inputs before a piece. */
static inline void conv1d_stage_history(float *history, const cot_tensor *x, const cot_tensor *initial_state,
                                        const conv1d_piece *piece, int64_t K, int64_t d, int64_t channels)
{
    conv1d_clear_planes(history, K - 1, K, channels);
    for (int64_t i = 0; i < K - 1; i++, history += conv1d_plane(K)) {
        const int64_t p = piece->begin - (K - 1) + i;
        if (p >= piece->first) {
            conv1d_gather(history, conv1d_at(x, piece->b, d, p), x->dtype, x->stride[1], channels);
        } else if (cot_present(initial_state) && piece->state >= 0) {
            const int64_t column = p - piece->first + K - 1;
            conv1d_gather(history, conv1d_at(initial_state, piece->state, d, column), initial_state->dtype,
                          initial_state->stride[1], channels);
        }
    }
}

V_INLINE bool conv1d_rows_contiguous(const cot_tensor *tensor)
{
    return tensor->stride[1] == 1 || tensor->shape[1] == 1;
}

/* May all rows be streamed? Those of 2-byte elements are not: their kernels take as long as the memory does already, and what
 * the runs cost on the way comes on top. */
static inline bool conv1d_rows_stream(const cot_tensor *tensor)
{
    if (tensor->dtype != COT_F32)
        return false;
    const uintptr_t bytes = VW > 1 ? 64 : 4; /* a cache line */
    const uintptr_t size = cot_dtype_size(tensor->dtype);
    return (uintptr_t)tensor->data % bytes == 0 && (uintptr_t)tensor->stride[2] * size % bytes == 0 &&
           (uintptr_t)tensor->stride[0] * size % bytes == 0;
}

/* A tile is walked down its columns, but the next one is asked for along its rows, as many lines with a column as that has, so
 * that memory sees long runs. */
typedef struct conv1d_asked {
    int64_t row, channel; /* of the next tile: what is before has been asked for */
} conv1d_asked;

/* Where that is in a tensor whose tile, of tokens with `stride` bytes from one to the next, begins at `tile`. */
V_INLINE const char *conv1d_asked_at(const conv1d_asked *asked, const char *tile, int64_t stride, int64_t size)
{
    return tile + (CONV1D_TILE + asked->row) * stride + asked->channel * size;
}

/* Where a tile's results go: to its rows, or past the caches by way of `runs`, where CONV1D_RUN bytes of each row wait until
 * all of their columns are made. Single lines from row to row, which need no waiting, took half as long again as these runs of
 * four on a Zen 4, and four times as long as plain stores where a vector is half a line. */
typedef struct conv1d_out {
    char *rows, *runs;
    int64_t stride, n, channels;
    bool stream;
} conv1d_out;

V_INLINE char *conv1d_out_at(const conv1d_out *out, int64_t c, int64_t size)
{
    return out->stream ? out->runs + c * size % CONV1D_RUN : out->rows + c * size;
}

V_INLINE int64_t conv1d_out_stride(const conv1d_out *out)
{
    return out->stream ? CONV1D_RUN : out->stride;
}

/* `count` columns are made, the last of whole vectors before channel `end`, and the next tile's part of the same length has
 * been asked for. Of the results' one line a page is (v_ask_page). */
V_INLINE void conv1d_out_made(const conv1d_out *out, int64_t end, int count, int64_t size, conv1d_asked *asked)
{
    const int64_t lanes = out->n * count * VW, bytes = (end * size - 1) % CONV1D_RUN + 1;
    if (out->stream)
        v_ask_page(conv1d_asked_at(asked, out->rows, out->stride, size), lanes * size);
    asked->channel += lanes;
    while (asked->channel >= out->channels) {
        asked->channel -= out->channels;
        asked->row++;
    }
    if (!out->stream || (bytes < CONV1D_RUN && end + VW <= out->channels))
        return;
    char *to = out->rows + end * size - bytes;
    const char *from = out->runs;
    for (int64_t i = 0; i < out->n; i++, to += out->stride, from += CONV1D_RUN)
        for (int64_t at = 0; at < bytes; at += 4 * VW)
            v_stream(to + at, v_load((const float *)(const void *)(from + at)));
}

#endif
