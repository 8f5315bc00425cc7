/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_tiles.h: tiles of tokens by channels for the channel-last kernels: sizes, sequences, loads and
 * stores. */
#ifndef COT_CAUSAL_CONV1D_TILES_H
#define COT_CAUSAL_CONV1D_TILES_H

#include "causal_conv1d_pieces.h"
#include "causal_conv1d_to_f32.h"

enum {
    CONV1D_TILE_TOKENS = 8,                  /* tokens of a tile */
    CONV1D_PITCH_PADDING = VW == 8 ? 16 : 0, /* floats added to each token of a buffer, see conv1d_pitch */
    CONV1D_RUN_BYTES = 256,                  /* bytes of a token that are stored together, see conv1d_writer */
    CONV1D_TILE_L1_DISTANCE = 128            /* bytes, see conv1d_prefetch_tile */
};

/* Number of tokens of a tile that passes through buffers: fewer if a token has many channels. */
V_INLINE int64_t conv1d_buffered_tile_tokens(int64_t channels)
{
    return channels > CONV1D_CHANNEL_LAST_ITEM_CHANNELS ? 4 : CONV1D_TILE_TOKENS;
}

/* Leading dimension of a buffer in floats: whole vectors of channels. Padding keeps it from being a power of two where
 * the L1 cache has only 8 ways. Else the tokens of a column, in all buffers, would map to one set
 * of that cache. */
V_INLINE int64_t conv1d_pitch(int64_t channels)
{
    return cot_round_up(channels, VW) + CONV1D_PITCH_PADDING;
}

/* Whether token i and the K-1 inputs before it are of one sequence, and not padding. */
V_INLINE bool conv1d_single_sequence(const int32_t *seq_ids, int64_t i, int64_t K)
{
    bool single_sequence = seq_ids[i] >= 0;
    for (int64_t k = 1; k < K; k++)
        single_sequence = single_sequence && seq_ids[i + k] == seq_ids[i];
    return single_sequence;
}

/* Number of tokens of [i, end) until conv1d_single_sequence changes its value. Writes the value to *single_sequence. */
static inline int64_t conv1d_single_sequence_run(const int32_t *seq_ids, int64_t i, int64_t end, int64_t K,
                                                 bool *single_sequence)
{
    *single_sequence = seq_ids == NULL || conv1d_single_sequence(seq_ids, i, K);
    if (seq_ids == NULL)
        return end - i;
    int64_t run_end = i + 1;
    while (run_end < end && conv1d_single_sequence(seq_ids, run_end, K) == *single_sequence)
        run_end++;
    return run_end - i;
}

/* to[i][0..channels) = token begin+i of the tensor, in f32, i < n */
static inline void conv1d_gather_tile(float *to, int64_t pitch, const cot_tensor *tensor, int64_t b, int64_t d,
                                      int64_t channels, int64_t begin, int64_t n)
{
    const char *from = conv1d_element(tensor, b, d, begin);
    const int64_t channel_stride = tensor->stride[1], token_stride = tensor->stride[2];
    const int64_t size = (int64_t)cot_dtype_size(tensor->dtype);
    if (channel_stride != 1 && token_stride == 1 && tensor->dtype == COT_F32) {
        for (int64_t channel = 0; channel < channels; channel++)
            for (int64_t i = 0; i < n; i++)
                to[i * pitch + channel] = ((const float *)(const void *)from)[channel * channel_stride + i];
        return;
    }
    for (int64_t i = 0; i < n; i++)
        conv1d_gather(to + i * pitch, from + i * token_stride * size, tensor->dtype, channel_stride, channels);
}

static inline void conv1d_scatter_tile(const float *from, int64_t pitch, const cot_tensor *tensor, int64_t b, int64_t d,
                                       int64_t channels, int64_t begin, int64_t n)
{
    char *to = conv1d_element(tensor, b, d, begin);
    const int64_t channel_stride = tensor->stride[1], token_stride = tensor->stride[2];
    const int64_t size = (int64_t)cot_dtype_size(tensor->dtype);
    for (int64_t i = 0; i < n; i++)
        conv1d_scatter(to + i * token_stride * size, tensor->dtype, channel_stride, from + i * pitch, channels);
}

/* ---- state carried along a column ------------------------------------------------------------------------------ *
 * A column is VW channels. A kernel processes it tile by tile, down the tokens. The column state holds its weights, its
 * last inputs and its sums: `vector_count` vectors of VW floats. The vectors of one column are adjacent, so that a
 * column is one memory range and lies in one or two pages. An earlier layout kept one array of 2048 channels for each
 * weight, input and sum. It needed 16 hardware-prefetch streams and 16 pages. Vector k of the column at channel c, a
 * multiple of VW, is at
 *     column_state + c * vector_count + k * VW */

/* Sets vector number `vector` of each column: channel c is from[c * stride], c < n, then zeros up to a whole vector. If
 * `from` is NULL, all elements are zero. */
static inline void conv1d_pack_vector(float *column_state, int64_t vector_count, int64_t vector, const char *from,
                                      cot_dtype dtype, int64_t stride, int64_t n)
{
    const int64_t step = stride * (int64_t)cot_dtype_size(dtype);
    for (int64_t channel = 0; channel < n; channel += VW) {
        float *to = column_state + channel * vector_count + vector * VW;
        if (from == NULL || n - channel < VW)
            v_store(to, v_zero());
        if (from != NULL)
            conv1d_gather(to, from + channel * step, dtype, stride, n - channel < VW ? n - channel : VW);
    }
}

static inline void conv1d_pack_zeros(float *column_state, int64_t vector_count, int64_t first, int64_t count, int64_t n)
{
    for (int64_t vector = first; vector < first + count; vector++)
        conv1d_pack_vector(column_state, vector_count, vector, NULL, COT_F32, 1, n);
}

/* Sets vectors 0 .. K: the weights by tap, then the bias. */
static inline void conv1d_pack_weights(float *column_state, int64_t vector_count, const cot_tensor *weight,
                                       const cot_tensor *bias, int64_t K, int64_t d, int64_t n)
{
    const char *first = (const char *)weight->data + d * weight->stride[0] * (int64_t)cot_dtype_size(weight->dtype);
    for (int64_t k = 0; k < K; k++)
        conv1d_pack_vector(column_state, vector_count, k,
                           first + k * weight->stride[1] * (int64_t)cot_dtype_size(weight->dtype), weight->dtype,
                           weight->stride[0], n);
    if (cot_is_present(bias))
        conv1d_pack_vector(column_state, vector_count, K,
                           (const char *)bias->data + d * bias->stride[0] * (int64_t)cot_dtype_size(bias->dtype),
                           bias->dtype, bias->stride[0], n);
    else
        conv1d_pack_zeros(column_state, vector_count, K, 1, n);
}

/* Sets vectors K+1 .. 2K-1: the K-1 inputs before a piece. */
static inline void conv1d_pack_history(float *column_state, int64_t vector_count, const cot_tensor *x,
                                       const cot_tensor *initial_state, const conv1d_piece *piece, int64_t K, int64_t d,
                                       int64_t n)
{
    for (int64_t vector = K + 1; vector < 2 * K; vector++) {
        const int64_t position = piece->begin - 2 * K + vector, state_position = position - piece->valid_begin + K - 1;
        if (position >= piece->valid_begin)
            conv1d_pack_vector(column_state, vector_count, vector, conv1d_element(x, piece->b, d, position), x->dtype,
                               x->stride[1], n);
        else if (cot_is_present(initial_state) && piece->state >= 0)
            conv1d_pack_vector(column_state, vector_count, vector,
                               conv1d_element(initial_state, piece->state, d, state_position), initial_state->dtype,
                               initial_state->stride[1], n);
        else
            conv1d_pack_zeros(column_state, vector_count, vector, 1, n);
    }
}

V_INLINE bool conv1d_contiguous_channels(const cot_tensor *tensor)
{
    return tensor->stride[1] == 1 || tensor->shape[1] == 1;
}

/* Whether every token can be stored with non-temporal stores. Tokens of 2-byte elements cannot: the arithmetic of those
 * kernels already takes as long as the memory transfers, and copying through the run buffers would add to it. */
static inline bool conv1d_nontemporal_tokens(const cot_tensor *tensor)
{
    if (tensor->dtype != COT_F32)
        return false;
    const uintptr_t bytes = VW > 1 ? 64 : 4; /* a cache line */
    const uintptr_t size = cot_dtype_size(tensor->dtype);
    return (uintptr_t)tensor->data % bytes == 0 && (uintptr_t)tensor->stride[2] * size % bytes == 0 &&
           (uintptr_t)tensor->stride[0] * size % bytes == 0;
}

/* ---- loads and stores of a tile -------------------------------------------------------------------------------- */

/* `token` points to `bytes` of a token. Prefetches the same bytes of the next tile into the L2 cache, and the
 * bytes CONV1D_TILE_L1_DISTANCE further on in the token into the L1 cache. The L1 cache's own
 * prefetchers do not follow accesses that jump from token to token. */
V_INLINE void conv1d_prefetch_tile(const char *token, int64_t stride, int64_t bytes)
{
    v_prefetch_range(token + CONV1D_TILE_TOKENS * stride, bytes);
    for (int64_t offset = 0; offset < bytes; offset += 64)
        v_prefetch(token + CONV1D_TILE_L1_DISTANCE + offset);
}

/* Stores the results of a tile: directly to the tensor, or by non-temporal stores through run buffers. A run is
 * CONV1D_RUN_BYTES of a token. The two run buffers alternate: results fill the runs of one buffer column by column,
 * while the other buffer drains to memory. Storing single lines from token to token needs no buffer, but takes twice as
 * long on a Zen 4. Storing whole runs at once takes 10 % longer on an Emerald Rapids, because it occupies the fill
 * buffers. */
typedef struct conv1d_writer {
    char *output, *run_buffers;
    int64_t stride, n, channels;
    bool nontemporal;
    const char *pending, *pending_end; /* the filled part of a run buffer that is not stored yet */
    char *pending_to;
} conv1d_writer;

enum { CONV1D_RUN_BUFFERS = 2 * CONV1D_TILE_TOKENS * CONV1D_RUN_BYTES };

V_INLINE char *conv1d_run_buffer(const conv1d_writer *writer, int64_t offset)
{
    return writer->run_buffers + offset / CONV1D_RUN_BYTES % 2 * (CONV1D_TILE_TOKENS * CONV1D_RUN_BYTES);
}

V_INLINE char *conv1d_writer_pointer(const conv1d_writer *writer, int64_t channel, int64_t size)
{
    return writer->nontemporal ? conv1d_run_buffer(writer, channel * size) + channel * size % CONV1D_RUN_BYTES
                               : writer->output + channel * size;
}

V_INLINE int64_t conv1d_writer_stride(const conv1d_writer *writer)
{
    return writer->nontemporal ? CONV1D_RUN_BYTES : writer->stride;
}

V_INLINE void conv1d_store_nontemporal(char *to, const char *from, int64_t bytes)
{
    for (int64_t offset = 0; offset < bytes; offset += 4 * VW)
        v_stream(to + offset, v_load((const float *)(const void *)(from + offset)));
}

/* Stores the next `bytes` of the pending run buffer. `bytes` divides CONV1D_RUN_BYTES. Callers pass the number of bytes
 * that they have just written to the other buffer. */
V_INLINE void conv1d_writer_drain(conv1d_writer *writer, int64_t bytes)
{
    if (writer->pending == writer->pending_end)
        return;
    conv1d_store_nontemporal(writer->pending_to, writer->pending, bytes);
    writer->pending += bytes;
    writer->pending_to += bytes;
    if ((writer->pending - writer->run_buffers) % CONV1D_RUN_BYTES == 0)
        writer->pending_to += writer->stride - CONV1D_RUN_BYTES;
}

/* The results of the columns before channel `end` are complete. If this fills the run buffer, the buffer becomes
 * pending. If this is the last whole column, the results are stored at once. */
V_INLINE void conv1d_writer_commit(conv1d_writer *writer, int64_t end, int64_t size)
{
    const int64_t bytes = (end * size - 1) % CONV1D_RUN_BYTES + 1;
    const bool last_column = end + VW > writer->channels;
    if (!writer->nontemporal || (bytes < CONV1D_RUN_BYTES && !last_column))
        return;
    while (writer->pending != writer->pending_end)
        conv1d_writer_drain(writer, 4 * VW);
    char *to = writer->output + end * size - bytes;
    const char *from = conv1d_run_buffer(writer, end * size - 1);
    if (!last_column) {
        writer->pending = from;
        writer->pending_end = from + writer->n * CONV1D_RUN_BYTES;
        writer->pending_to = to;
        return;
    }
    for (int64_t i = 0; i < writer->n; i++, to += writer->stride, from += CONV1D_RUN_BYTES)
        conv1d_store_nontemporal(to, from, bytes);
}

#endif
