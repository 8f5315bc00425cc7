/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_tiles.h: tiles of tokens by channels for the channel-last kernels: their sizes, which of their tokens
 * are of one sequence, their way from and to tensors. */
#ifndef COT_CAUSAL_CONV1D_TILES_H
#define COT_CAUSAL_CONV1D_TILES_H

#include "causal_conv1d_stage.h"

enum {
    CONV1D_TILE = 8,               /* tokens of a tile */
    CONV1D_PAD = VW == 8 ? 16 : 0, /* floats between the rows of a buffer, see conv1d_ld */
    CONV1D_RUN = 256,              /* bytes of a row, see conv1d_out */
    CONV1D_BESIDE = 128            /* bytes, see conv1d_ask */
};

/* Tokens of one walk that passes through buffers: fewer the longer the rows are. */
V_INLINE int64_t conv1d_staged_tile(int64_t channels)
{
    return channels > CONV1D_ROW ? 4 : CONV1D_TILE;
}

/* Floats from row to row of a buffer: whole vectors; where a first-level cache has 8 ways only, not a power of two, which
 * would put a column's rows of all buffers into one set of it. */
V_INLINE int64_t conv1d_ld(int64_t channels)
{
    return cot_round_up(channels, VW) + CONV1D_PAD;
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

/* ---- what a walk keeps of its channels ------------------------------------------------------------------------ *
 * Weights, windows, sums: `rows` vectors for each VW channels, which lie together, so that a column is one run of memory and
 * one page or two. As rows of all channels they were sixteen streams for the prefetchers to follow and as many pages. Row k of
 * the column that begins at channel c, a multiple of VW, is at kept + c * rows + k * VW. */

/* kept[row] = from[c * stride], c < n, zeros up to whole vectors; without `from` all of them. */
static inline void conv1d_keep(float *kept, int64_t rows, int64_t row, const char *from, cot_dtype dtype,
                               int64_t stride, int64_t n)
{
    const int64_t step = stride * (int64_t)cot_dtype_size(dtype);
    for (int64_t c = 0; c < n; c += VW) {
        float *to = kept + c * rows + row * VW;
        if (from == NULL || n - c < VW)
            v_store(to, v_zero());
        if (from != NULL)
            conv1d_gather(to, from + c * step, dtype, stride, n - c < VW ? n - c : VW);
    }
}

static inline void conv1d_keep_zeros(float *kept, int64_t rows, int64_t first, int64_t count, int64_t n)
{
    for (int64_t row = first; row < first + count; row++)
        conv1d_keep(kept, rows, row, NULL, COT_F32, 1, n);
}

/* Rows 0 .. K: weights by tap, then the bias. */
static inline void conv1d_keep_weights(float *kept, int64_t rows, const cot_tensor *weight, const cot_tensor *bias,
                                       int64_t K, int64_t d, int64_t n)
{
    const char *first = (const char *)weight->data + d * weight->stride[0] * (int64_t)cot_dtype_size(weight->dtype);
    for (int64_t k = 0; k < K; k++)
        conv1d_keep(kept, rows, k, first + k * weight->stride[1] * (int64_t)cot_dtype_size(weight->dtype),
                    weight->dtype, weight->stride[0], n);
    if (cot_present(bias))
        conv1d_keep(kept, rows, K,
                    (const char *)bias->data + d * bias->stride[0] * (int64_t)cot_dtype_size(bias->dtype), bias->dtype,
                    bias->stride[0], n);
    else
        conv1d_keep_zeros(kept, rows, K, 1, n);
}

/* Rows K+1 .. 2K-1: the K-1 inputs before a piece. */
static inline void conv1d_keep_history(float *kept, int64_t rows, const cot_tensor *x, const cot_tensor *initial_state,
                                       const conv1d_piece *piece, int64_t K, int64_t d, int64_t n)
{
    for (int64_t row = K + 1; row < 2 * K; row++) {
        const int64_t p = piece->begin - 2 * K + row, column = p - piece->first + K - 1;
        if (p >= piece->first)
            conv1d_keep(kept, rows, row, conv1d_at(x, piece->b, d, p), x->dtype, x->stride[1], n);
        else if (cot_present(initial_state) && piece->state >= 0)
            conv1d_keep(kept, rows, row, conv1d_at(initial_state, piece->state, d, column), initial_state->dtype,
                        initial_state->stride[1], n);
        else
            conv1d_keep_zeros(kept, rows, row, 1, n);
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

/* ---- a tile's way from and to memory ---------------------------------------------------------------------------- */

/* Asks, with `bytes` of a token's row, for those of the tile to come, and for what is at hand beside them: an access that jumps
 * from row to row is none that the first-level cache's prefetchers follow. */
V_INLINE void conv1d_ask(const char *row, int64_t stride, int64_t bytes)
{
    v_ask(row + CONV1D_TILE * stride, bytes);
    for (int64_t at = 0; at < bytes; at += 64)
        v_prefetch(row + CONV1D_BESIDE + at);
}

/* Where a tile's results go: to its rows, or past the caches by way of two `runs` in turns, where CONV1D_RUN bytes of each row
 * wait until all of their columns are made, and then leave while the next run is made. Single lines from row to row, which need
 * no waiting, take twice as long on a Zen 4; whole runs at once a tenth longer on an Emerald Rapids, whose fill buffers they
 * occupy. */
typedef struct conv1d_out {
    char *rows, *runs;
    int64_t stride, n, channels;
    bool stream;
    const char *from, *end; /* what is to leave */
    char *to;
} conv1d_out;

enum { CONV1D_RUNS = 2 * CONV1D_TILE * CONV1D_RUN };

V_INLINE char *conv1d_run_of(const conv1d_out *out, int64_t at)
{
    return out->runs + at / CONV1D_RUN % 2 * (CONV1D_TILE * CONV1D_RUN);
}

V_INLINE char *conv1d_out_at(const conv1d_out *out, int64_t c, int64_t size)
{
    return out->stream ? conv1d_run_of(out, c * size) + c * size % CONV1D_RUN : out->rows + c * size;
}

V_INLINE int64_t conv1d_out_stride(const conv1d_out *out)
{
    return out->stream ? CONV1D_RUN : out->stride;
}

V_INLINE void conv1d_stream_bytes(char *to, const char *from, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += 4 * VW)
        v_stream(to + at, v_load((const float *)(const void *)(from + at)));
}

/* `bytes` of a row, a divisor of CONV1D_RUN: as many as are made meanwhile. */
V_INLINE void conv1d_out_leave(conv1d_out *out, int64_t bytes)
{
    if (out->from == out->end)
        return;
    conv1d_stream_bytes(out->to, out->from, bytes);
    out->from += bytes;
    out->to += bytes;
    if ((out->from - out->runs) % CONV1D_RUN == 0)
        out->to += out->stride - CONV1D_RUN;
}

/* Columns are made, the last of whole vectors before channel `end`. */
V_INLINE void conv1d_out_made(conv1d_out *out, int64_t end, int64_t size)
{
    const int64_t bytes = (end * size - 1) % CONV1D_RUN + 1;
    const bool last = end + VW > out->channels;
    if (!out->stream || (bytes < CONV1D_RUN && !last))
        return;
    while (out->from != out->end)
        conv1d_out_leave(out, 4 * VW);
    char *to = out->rows + end * size - bytes;
    const char *from = conv1d_run_of(out, end * size - 1);
    if (!last) {
        out->from = from;
        out->end = from + out->n * CONV1D_RUN;
        out->to = to;
        return;
    }
    for (int64_t i = 0; i < out->n; i++, to += out->stride, from += CONV1D_RUN)
        conv1d_stream_bytes(to, from, bytes);
}

#endif
