/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_pieces.h: divides the tokens of an item into pieces, and says which tokens contribute to which.
 *
 * A piece is a range of tokens [begin, end) of one batch element that a kernel handles at once. Tokens outside of
 * [valid_begin, valid_end) never contribute to tokens of the piece. If seq_ids is NULL, all tokens of the piece, and
 * the K-1 tokens on each side that lie in [valid_begin, valid_end), are of one sequence (fast path). Else seq_ids[i] is
 * the sequence of token begin-K+1+i.
 *
 * With cu_seqlens, pieces end at the ends of sequences in two cases: if there are states, because a piece
 * uses the state of one sequence only; and if sequences are long on average. */
#ifndef COT_CAUSAL_CONV1D_PIECES_H
#define COT_CAUSAL_CONV1D_PIECES_H

#include "causal_conv1d_items.h"

/* Number of tokens of an average sequence below which sequences share pieces. */
enum { CONV1D_LONG_SEQUENCE = 256 };

/* How the tokens of a call are divided into sequences. */
typedef struct conv1d_packing {
    const conv1d_sizes *sizes;
    const cot_tensor *seq_idx, *cu_seqlens;
    bool split_at_sequences; /* whether pieces end where the sequences of cu_seqlens end */
} conv1d_packing;

static inline conv1d_packing conv1d_packing_of(const conv1d_sizes *sizes, const cot_tensor *seq_idx,
                                               const cot_tensor *cu_seqlens, bool has_states)
{
    conv1d_packing packing = {sizes, seq_idx, cu_seqlens, false};
    packing.split_at_sequences =
        cot_is_present(cu_seqlens) && (has_states || sizes->T / CONV1D_LONG_SEQUENCE >= sizes->sequence_count);
    return packing;
}

typedef struct conv1d_piece {
    int64_t b, begin, end;
    int64_t valid_begin, valid_end;
    int64_t state; /* index along axis 0 of the state tensors; -1: the piece has no states */
    bool padding;  /* whether every token is padding */
    /* seq_ids[i] is the sequence of token begin-K+1+i, i <= end-begin+2K-3; negative = padding */
    const int32_t *seq_ids;
} conv1d_piece;

/* Iterates over the pieces of tokens [position, end) of batch element b. */
typedef struct conv1d_piece_iterator {
    const conv1d_packing *packing;
    int64_t b, position, end, max_tokens;
    int64_t sequence; /* with split_at_sequences: index of a sequence at or before `position` */
    int32_t seq_ids[CONV1D_ROW_BUFFER_TOKENS + 2 * CONV1D_MAX_K + 64];
} conv1d_piece_iterator;

/* Index of the sequence of cu_seqlens that holds token t. Returns sequence_count for padding after the last
 * sequence. */
static inline int64_t conv1d_find_sequence(const conv1d_packing *packing, int64_t t)
{
    int64_t low = 0, high = packing->sizes->sequence_count; /* the answer is in [low, high] */
    while (low < high) {
        const int64_t mid = (low + high) / 2;
        if (conv1d_index(packing->cu_seqlens, mid + 1) > t)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

static inline void conv1d_begin_pieces(conv1d_piece_iterator *it, const conv1d_packing *packing, int64_t b,
                                       int64_t begin, int64_t end, int64_t max_tokens)
{
    it->packing = packing;
    it->b = b;
    it->position = begin;
    it->end = end;
    it->max_tokens = max_tokens;
    it->sequence = packing->split_at_sequences ? conv1d_find_sequence(packing, begin) : 0;
}

/* Writes the sequence ids of tokens [low, high) to seq_ids[0..]. Returns true if all of them are one sequence and not
 * padding. */
static inline bool conv1d_load_ids(conv1d_piece_iterator *it, int64_t low, int64_t high, int32_t *seq_ids)
{
    const conv1d_packing *packing = it->packing;
    if (cot_is_present(packing->seq_idx)) {
        const int32_t *ids = (const int32_t *)packing->seq_idx->data + it->b * packing->seq_idx->stride[0];
        const int64_t stride = packing->seq_idx->stride[1];
        for (int64_t t = low; t < high; t++)
            seq_ids[t - low] = ids[t * stride];
    } else {
        const int64_t N = packing->sizes->sequence_count;
        int64_t sequence = conv1d_find_sequence(packing, low);
        for (int64_t t = low; t < high;) {
            while (sequence < N && conv1d_index(packing->cu_seqlens, sequence + 1) <= t)
                sequence++;
            int64_t end = sequence < N ? conv1d_index(packing->cu_seqlens, sequence + 1) : high;
            for (end = end < high ? end : high; t < end; t++)
                seq_ids[t - low] = sequence < N ? (int32_t)sequence : -1;
        }
    }
    int32_t different = 0;
    for (int64_t i = 0; i < high - low; i++)
        different |= seq_ids[i] ^ seq_ids[0];
    return different == 0 && seq_ids[0] >= 0;
}

/* Sets piece->seq_ids, unless all tokens are of one sequence, and piece->padding. */
static inline void conv1d_label_tokens(conv1d_piece_iterator *it, conv1d_piece *piece)
{
    const int64_t K = it->packing->sizes->K;
    const int64_t begin = piece->begin - (K - 1), end = piece->end + (K - 1);
    const int64_t low = begin > piece->valid_begin ? begin : piece->valid_begin,
                  high = end < piece->valid_end ? end : piece->valid_end;
    int32_t *seq_ids = it->seq_ids + (low - begin);
    if (conv1d_load_ids(it, low, high, seq_ids))
        return;
    for (int64_t i = 0; i < low - begin; i++) /* positions of the state belong to the first token's sequence */
        it->seq_ids[i] = seq_ids[0];
    for (int64_t i = high - begin; i < end - begin; i++)
        it->seq_ids[i] = -1;
    piece->seq_ids = it->seq_ids;
    piece->padding = true;
    for (int64_t i = 0; i < piece->end - piece->begin && piece->padding; i++)
        piece->padding = it->seq_ids[K - 1 + i] < 0;
}

/* Sets *piece to the next piece. Returns false if none is left. */
static inline bool conv1d_next_piece(conv1d_piece_iterator *it, conv1d_piece *piece)
{
    const conv1d_packing *packing = it->packing;
    if (it->position >= it->end)
        return false;
    const int64_t left = it->end - it->position;
    *piece = (conv1d_piece){.b = it->b,
                            .begin = it->position,
                            .end = it->position + (left < it->max_tokens ? left : it->max_tokens),
                            .valid_begin = 0,
                            .valid_end = packing->sizes->T,
                            .state = it->b};
    if (packing->split_at_sequences) {
        const int64_t N = packing->sizes->sequence_count;
        while (it->sequence < N && conv1d_index(packing->cu_seqlens, it->sequence + 1) <= piece->begin)
            it->sequence++;
        const bool padding = it->sequence == N;
        piece->state = padding ? -1 : it->sequence;
        piece->padding = padding;
        piece->valid_begin = conv1d_index(packing->cu_seqlens, it->sequence);
        if (!padding)
            piece->valid_end = conv1d_index(packing->cu_seqlens, it->sequence + 1);
        piece->end = piece->end < piece->valid_end ? piece->end : piece->valid_end;
    } else if (cot_is_present(packing->seq_idx) || cot_is_present(packing->cu_seqlens)) {
        if (cot_is_present(packing->cu_seqlens))
            piece->state = -1;
        conv1d_label_tokens(it, piece);
    }
    it->position = piece->end;
    return true;
}

/* Whether position `from` contributes to position `to`. Both are within K-1 tokens of the piece, `to` in [valid_begin,
 * valid_end). */
static inline bool conv1d_contributes_in_piece(const conv1d_piece *piece, int64_t K, int64_t from, int64_t to)
{
    if (piece->padding)
        return false;
    if (piece->seq_ids == NULL)
        return true;
    const int32_t *seq_ids = piece->seq_ids + (K - 1) - piece->begin;
    return seq_ids[to] >= 0 && seq_ids[from] == seq_ids[to];
}

/* End of the tokens whose z the backward needs for the piece: up to K-1 tokens after the piece. */
static inline int64_t conv1d_halo_end(const conv1d_piece *piece, int64_t K)
{
    return piece->end + K - 1 < piece->valid_end ? piece->end + K - 1 : piece->valid_end;
}

#endif
