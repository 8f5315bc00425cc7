/* SPDX-License-Identifier: Apache-2.0
 * mhc_tiling.h: how the vector kernels cut a problem into items. The cut follows from the sizes alone, so that neither
 * the instruction set nor the number of threads changes a sum's order. For kernels and front. */
#ifndef COT_MHC_TILING_H
#define COT_MHC_TILING_H

#include "ops/mhc/mhc_problem.h"

enum {
    MHC_MAX_N = 8,
    MHC_MAX_M = MHC_MAX_N * (MHC_MAX_N + 2),
    MHC_MAX_LANES = 16,
    MHC_CHUNK = 256,     /* columns of one stream that pre's forward has in the first-level cache at once */
    MHC_TOKENS = 16,     /* of an item of pre's forward and of post */
    MHC_BWD_CHUNK = 64,  /* likewise of pre's backward, where W and Q are as large as x */
    MHC_BWD_TOKENS = 32, /* of a block of pre's backward; dphi adds up as many in one run */
    MHC_BWD_PARTS = 32,  /* pre's backward sums dphi over as many runs of tokens, each of at least: */
    MHC_BWD_LEAST = 128,
    MHC_SINKHORN_PARTS = 64
};

/* Bytes of what an item of pre's forward and backward keeps in its thread's slice of scratch. */
enum {
    MHC_FWD_SCRATCH = MHC_TOKENS * (4 * MHC_CHUNK + 4 * MHC_MAX_M + 16 * MHC_MAX_M + 256),
    MHC_BWD_FLOATS = MHC_BWD_CHUNK + 2 * MHC_MAX_M + 3 * MHC_MAX_N + 2 * MHC_MAX_N * MHC_MAX_N + 2, /* of a token */
    MHC_BWD_SCRATCH = MHC_BWD_TOKENS * (4 * MHC_BWD_FLOATS + 64)
};

/* Tokens of an item: fewer where there are few, so that more threads share them; no sum crosses tokens. */
static inline int64_t mhc_item_tokens(int64_t tokens)
{
    return cot_clamp(cot_round_up(cot_ceil_div(tokens, 8), 4), 4, MHC_TOKENS);
}

/* Columns of phi in chunks of one stream, `width` of them: phi * gamma is laid out as [chunks][M][width], the last of a
 * stream padded with zeros to whole vectors. */
typedef struct mhc_chunks {
    int64_t width, per_stream, count;
} mhc_chunks;

static inline mhc_chunks mhc_chunk(const mhc_sizes *sizes, int64_t width)
{
    const int64_t per_stream = cot_ceil_div(sizes->D, width);
    return (mhc_chunks){width, per_stream, cot_mul(per_stream, sizes->n)};
}

static inline int64_t mhc_weights(const mhc_sizes *sizes, const mhc_chunks *chunks)
{
    return COT_PRODUCT(chunks->count, sizes->M, chunks->width);
}

/* A run of tokens; a whole number of blocks of `block`, but for the last. */
typedef struct mhc_parts {
    int64_t count, each;
} mhc_parts;

static inline mhc_parts mhc_part(int64_t tokens, int64_t most, int64_t least, int64_t block)
{
    const int64_t wanted = cot_clamp(cot_ceil_div(tokens, least), 1, most);
    const int64_t each = cot_round_up(cot_clamp(cot_ceil_div(tokens, wanted), 1, INT64_MAX / 2), block);
    return (mhc_parts){cot_clamp(cot_ceil_div(tokens, each), 1, most), each};
}

static inline mhc_parts mhc_pre_bwd_parts(int64_t tokens)
{
    return mhc_part(tokens, MHC_BWD_PARTS, MHC_BWD_LEAST, MHC_BWD_TOKENS);
}

static inline mhc_parts mhc_sinkhorn_parts(int64_t tokens)
{
    return mhc_part(tokens, MHC_SINKHORN_PARTS, MHC_MAX_LANES, MHC_MAX_LANES);
}

/* u and v of every iteration, for MHC_MAX_LANES tokens: in floats. */
static inline int64_t mhc_history(int64_t n, int32_t iterations)
{
    return COT_PRODUCT(iterations, 2, n, MHC_MAX_LANES);
}

/* Where pre's backward keeps what, in bytes from the workspace's beginning. */
typedef struct mhc_pre_bwd_layout {
    size_t weights, Q, sums, history, bytes;
    size_t Q_part, sums_part, history_part; /* bytes of one part */
} mhc_pre_bwd_layout;

static inline mhc_pre_bwd_layout mhc_layout_pre_bwd(const mhc_sizes *sizes, int32_t iterations)
{
    const mhc_chunks chunks = mhc_chunk(sizes, MHC_BWD_CHUNK);
    const int64_t parts = mhc_pre_bwd_parts(sizes->tokens).count;
    mhc_pre_bwd_layout l = {.Q_part = cot_align(cot_bytes(mhc_weights(sizes, &chunks), sizeof(float))),
                            .sums_part = cot_align(cot_bytes(sizes->M + 3, sizeof(double))),
                            .history_part = cot_align(cot_bytes(mhc_history(sizes->n, iterations), sizeof(float)))};
    l.weights = cot_take(&l.bytes, 1, l.Q_part); /* as large */
    l.Q = cot_take(&l.bytes, parts, l.Q_part);
    l.sums = cot_take(&l.bytes, parts, l.sums_part);
    l.history = cot_take(&l.bytes, parts, l.history_part);
    return l;
}

#endif
