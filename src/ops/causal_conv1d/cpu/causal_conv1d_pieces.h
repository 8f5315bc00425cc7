/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_pieces.h: the tokens of an item in pieces, and which of them count for which.
 *
 * A piece is a range of tokens of one batch row that a kernel handles at once. Tokens outside [first, last) never
 * count for its own. Within, either all are of one sequence (ids is NULL: the fast path), or ids names the sequence
 * of each. With cu_seqlens, pieces end where sequences do if there are states (then each sequence's states border
 * on a piece) or if sequences are long on average. */
#ifndef COT_CAUSAL_CONV1D_PIECES_H
#define COT_CAUSAL_CONV1D_PIECES_H

#include "causal_conv1d_tiling.h"

/* Sequences of fewer tokens than this on average share pieces. */
enum { CONV1D_LONG_SEQUENCE = 256 };

typedef struct conv1d_packing {
    const conv1d_sizes *sizes;
    const cot_tensor *seq_idx, *cu_seqlens;
    bool by_sequence; /* pieces end where the sequences of cu_seqlens do */
} conv1d_packing;

static inline conv1d_packing conv1d_packing_of(const conv1d_sizes *sizes, const cot_tensor *seq_idx,
                                               const cot_tensor *cu_seqlens, bool states)
{
    conv1d_packing packing = {sizes, seq_idx, cu_seqlens, false};
    packing.by_sequence = cot_present(cu_seqlens) && (states || sizes->T / CONV1D_LONG_SEQUENCE >= sizes->state_count);
    return packing;
}

typedef struct conv1d_piece {
    int64_t b, begin, end;
    int64_t first, last;
    int64_t state;      /* row of the states, -1 = no states here */
    bool padding;       /* no token counts at all */
    const int32_t *ids; /* ids[i] is the sequence of token begin-K+1+i, negative = padding; up to end+K-2 */
} conv1d_piece;

/* Walks through tokens [position, stop) of row b. */
typedef struct conv1d_walk {
    const conv1d_packing *packing;
    int64_t b, position, stop, longest;
    int64_t sequence; /* of cu_seqlens, at position */
    int32_t ids[CONV1D_PIECE + 2 * CONV1D_MAX_K + 64];
} conv1d_walk;

/* The sequence of cu_seqlens that token t lies in; N = the padding behind the last one. */
static inline int64_t conv1d_find_sequence(const conv1d_packing *packing, int64_t t)
{
    int64_t low = 0, high = packing->sizes->state_count; /* the answer lies in [low, high] */
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (conv1d_index(packing->cu_seqlens, middle + 1) > t)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static inline void conv1d_start_walk(conv1d_walk *walk, const conv1d_packing *packing, int64_t b, int64_t begin,
                                     int64_t stop, int64_t longest)
{
    walk->packing = packing;
    walk->b = b;
    walk->position = begin;
    walk->stop = stop;
    walk->longest = longest;
    walk->sequence = 0;
    if (cot_present(packing->cu_seqlens) && begin < stop) {
        const int64_t K = packing->sizes->K;
        walk->sequence = conv1d_find_sequence(packing, begin < K - 1 ? 0 : begin - (K - 1));
    }
}

/* Writes the ids of the window of tokens [low, high) to ids[0..]; true if it is one sequence. */
static inline bool conv1d_read_ids(conv1d_walk *walk, int64_t low, int64_t high, int32_t *ids)
{
    const conv1d_packing *packing = walk->packing;
    if (cot_present(packing->seq_idx)) {
        const int32_t *row = (const int32_t *)packing->seq_idx->data + walk->b * packing->seq_idx->stride[0];
        const int64_t stride = packing->seq_idx->stride[1];
        for (int64_t t = low; t < high; t++)
            ids[t - low] = row[t * stride];
    } else {
        const int64_t N = packing->sizes->state_count;
        int64_t sequence = conv1d_find_sequence(packing, low);
        for (int64_t t = low; t < high;) {
            while (sequence < N && conv1d_index(packing->cu_seqlens, sequence + 1) <= t)
                sequence++;
            int64_t end = sequence < N ? conv1d_index(packing->cu_seqlens, sequence + 1) : high;
            for (end = end < high ? end : high; t < end; t++)
                ids[t - low] = sequence < N ? (int32_t)sequence : -1;
        }
    }
    int32_t different = 0;
    for (int64_t i = 0; i < high - low; i++)
        different |= ids[i] ^ ids[0];
    return different == 0 && ids[0] >= 0;
}

static inline void conv1d_name_tokens(conv1d_walk *walk, conv1d_piece *piece)
{
    const int64_t K = walk->packing->sizes->K;
    const int64_t begin = piece->begin - (K - 1), end = piece->end + (K - 1);
    const int64_t low = begin > piece->first ? begin : piece->first, high = end < piece->last ? end : piece->last;
    int32_t *ids = walk->ids + (low - begin);
    if (conv1d_read_ids(walk, low, high, ids))
        return;
    for (int64_t i = 0; i < low - begin; i++) /* the states' columns are of the first token's sequence */
        walk->ids[i] = ids[0];
    for (int64_t i = high - begin; i < end - begin; i++)
        walk->ids[i] = -1;
    piece->ids = walk->ids;
    piece->padding = true;
    for (int64_t i = 0; i < piece->end - piece->begin && piece->padding; i++)
        piece->padding = walk->ids[K - 1 + i] < 0;
}

/* The next piece; false when there is none left. */
static inline bool conv1d_next_piece(conv1d_walk *walk, conv1d_piece *piece)
{
    const conv1d_packing *packing = walk->packing;
    if (walk->position >= walk->stop)
        return false;
    const int64_t left = walk->stop - walk->position;
    *piece = (conv1d_piece){.b = walk->b,
                            .begin = walk->position,
                            .end = walk->position + (left < walk->longest ? left : walk->longest),
                            .first = 0,
                            .last = packing->sizes->T,
                            .state = walk->b};
    if (packing->by_sequence) {
        const int64_t N = packing->sizes->state_count;
        while (walk->sequence < N && conv1d_index(packing->cu_seqlens, walk->sequence + 1) <= piece->begin)
            walk->sequence++;
        const bool padding = walk->sequence == N;
        piece->state = padding ? -1 : walk->sequence;
        piece->padding = padding;
        piece->first = conv1d_index(packing->cu_seqlens, walk->sequence);
        if (!padding)
            piece->last = conv1d_index(packing->cu_seqlens, walk->sequence + 1);
        piece->end = piece->end < piece->last ? piece->end : piece->last;
    } else if (cot_present(packing->seq_idx) || cot_present(packing->cu_seqlens)) {
        if (cot_present(packing->cu_seqlens))
            piece->state = -1;
        conv1d_name_tokens(walk, piece);
    }
    walk->position = piece->end;
    return true;
}

/* Does position p count for position t? Both within K-1 of the piece, t in [first, last). */
static inline bool conv1d_counts(const conv1d_piece *piece, int64_t K, int64_t p, int64_t t)
{
    if (piece->padding)
        return false;
    if (piece->ids == NULL)
        return true;
    const int32_t *ids = piece->ids + (K - 1) - piece->begin;
    return ids[t] >= 0 && ids[p] == ids[t];
}

/* The tokens whose z the backward needs for a piece end here: K-1 beyond its own. */
static inline int64_t conv1d_halo_end(const conv1d_piece *piece, int64_t K)
{
    return piece->end + K - 1 < piece->last ? piece->end + K - 1 : piece->last;
}

#endif
