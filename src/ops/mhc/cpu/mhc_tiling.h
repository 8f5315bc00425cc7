/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_tiling.h: how the CPU vector kernels divide a problem into blocks, parts and items. The number of threads does
 * not change the order of a sum. The vector width does. For mhc.c and the kernels. */
#ifndef COT_MHC_TILING_H
#define COT_MHC_TILING_H

#include "ops/mhc/mhc_problem.h"

enum {
    MHC_MAX_N = 8,
    MHC_MAX_M = MHC_MAX_N * (MHC_MAX_N + 2),
    MHC_MAX_LANES = 16,
    MHC_CHUNK = 512,     /* columns of one stream that pre's forward multiplies in one run */
    MHC_TOKENS = 16,     /* maximum in a block of pre's forward and in an item of post */
    MHC_BWD_CHUNK = 64,  /* columns in the L1 cache in pre's backward, where W and dphi_part are as large as x */
    MHC_BWD_TOKENS = 32, /* maximum in a block of pre's backward; dphi sums a block in one run */
    /* Pre's backward has parts of the tokens with separate sums of dphi: one part for each MHC_BWD_PART_TOKENS tokens,
     * at most MHC_BWD_PARTS parts. */
    MHC_BWD_PARTS = 32,
    MHC_BWD_PART_TOKENS = 128,
    MHC_SINKHORN_PARTS = 64,
    /* AMX: columns of a chunk of pre's forward, maximum tokens of a block, and bf16 terms. */
    MHC_AMX_CHUNK = 128,
    MHC_AMX_TOKENS = 64,
    MHC_AMX_BWD_CHUNK = 128,
    MHC_AMX_TERMS = 3,
    MHC_AMX_DX_TERMS = 2 /* of dh_mix and W in dx, which is rounded to bf16 */
};

/* Bytes of the state of pre's forward and backward in a thread's scratch. */
enum {
    /* x of a tile of 4 tokens; for each token: coefficients, sums, and a few values. */
    MHC_FWD_SCRATCH = 4 * 4 * MHC_CHUNK + MHC_TOKENS * (4 * MHC_MAX_M + 16 * MHC_MAX_M + 256),
    /* For each token: sums of h_mix, coefficients, squares and pointers. For 32 tokens: products and a copy of x. */
    MHC_FWD_AMX_SCRATCH = MHC_AMX_TOKENS * (4 * (96 + MHC_MAX_M) + 64 + 32) + 32 * (4 * 32 + 2 * MHC_AMX_CHUNK) + 512,
    /* For each token. */
    MHC_BWD_FLOATS = MHC_BWD_CHUNK + 2 * MHC_MAX_M + 3 * MHC_MAX_N + 2 * MHC_MAX_N * MHC_MAX_N + 2,
    MHC_BWD_SCRATCH = MHC_BWD_TOKENS * (4 * MHC_BWD_FLOATS + 64),
    /* bf16 elements of the tiles of dh_mix for dx and for dphi, and of x. */
    MHC_AMX_DX_ELEMENTS = MHC_AMX_TOKENS * 96 * MHC_AMX_DX_TERMS,
    MHC_AMX_DPHI_ELEMENTS = MHC_AMX_TOKENS * MHC_MAX_M * MHC_AMX_TERMS,
    MHC_BWD_AMX_SCRATCH = MHC_AMX_TOKENS * (4 * (MHC_BWD_FLOATS - MHC_BWD_CHUNK) + 64) +
                          2 * (MHC_AMX_DX_ELEMENTS + MHC_AMX_DPHI_ELEMENTS + MHC_AMX_TOKENS * 2 * MHC_AMX_BWD_CHUNK) +
                          2 * 4 * 32 * MHC_AMX_BWD_CHUNK
};

/* Bytes of the rows of a block of pre's backward in a thread's scratch. */
static inline size_t mhc_block_bytes(const mhc_sizes *sizes, int64_t tokens, cot_dtype dtype)
{
    return cot_align_up(cot_bytes(COT_PRODUCT(tokens, sizes->n, sizes->D), cot_dtype_size(dtype)));
}

/* Tokens of a block of pre's forward, and of an item of post: a multiple of `unit`. With few tokens there are fewer, so
 * that more threads have work. No sum crosses tokens. */
static inline int64_t mhc_block_tokens(int64_t tokens, int64_t unit, int64_t max_tokens)
{
    return cot_clamp(cot_round_up(cot_ceil_div(tokens, 8), unit), unit, max_tokens);
}

/* Chunks of `width` columns of phi; a chunk lies in one stream. phi * gamma is packed chunk by chunk. The last chunk of
 * each stream is padded with zeros to whole groups of 4 vectors. */
typedef struct mhc_chunks {
    int64_t width, per_stream, count;
} mhc_chunks;

static inline mhc_chunks mhc_split_columns(const mhc_sizes *sizes, int64_t width)
{
    const int64_t per_stream = cot_ceil_div(sizes->D, width);
    return (mhc_chunks){width, per_stream, cot_mul(per_stream, sizes->n)};
}

/* Elements from the start of a token's streams to a chunk. stream_stride: elements from one stream to the next. */
static inline int64_t mhc_chunk_offset(const mhc_chunks *chunks, int64_t chunk, int64_t stream_stride)
{
    return chunk / chunks->per_stream * stream_stride + chunk % chunks->per_stream * chunks->width;
}

static inline int64_t mhc_weight_elements(const mhc_sizes *sizes, const mhc_chunks *chunks)
{
    return COT_PRODUCT(chunks->count, sizes->M, chunks->width);
}

/* Token ranges. Each has a multiple of `block` tokens, except the last. */
typedef struct mhc_parts {
    int64_t count, part_tokens;
} mhc_parts;

static inline mhc_parts mhc_split_tokens(int64_t tokens, int64_t max_parts, int64_t tokens_per_part, int64_t block)
{
    const int64_t parts = cot_clamp(cot_ceil_div(tokens, tokens_per_part), 1, max_parts);
    const int64_t part_tokens = cot_round_up(cot_clamp(cot_ceil_div(tokens, parts), 1, INT64_MAX / 2), block);
    return (mhc_parts){cot_clamp(cot_ceil_div(tokens, part_tokens), 1, max_parts), part_tokens};
}

static inline mhc_parts mhc_pre_bwd_parts(int64_t tokens)
{
    return mhc_split_tokens(tokens, MHC_BWD_PARTS, MHC_BWD_PART_TOKENS, MHC_BWD_TOKENS);
}

static inline mhc_parts mhc_sinkhorn_parts(int64_t tokens)
{
    return mhc_split_tokens(tokens, MHC_SINKHORN_PARTS, MHC_MAX_LANES, MHC_MAX_LANES);
}

/* Floats for u and v of every iteration, for MHC_MAX_LANES tokens. */
static inline int64_t mhc_history_floats(int64_t n, int32_t iterations)
{
    return COT_PRODUCT(iterations, 2, n, MHC_MAX_LANES);
}

/* The plan of pre's forward. The workspace has the packed phi * gamma. */
typedef struct mhc_pre_fwd_plan {
    mhc_chunks chunks;
    size_t bytes;
} mhc_pre_fwd_plan;

/* Rows of W as pre's forward packs them: whole vectors of up to 4 rows. */
static inline int64_t mhc_packed_rows(int64_t M)
{
    return cot_round_up(M, 4);
}

static inline mhc_pre_fwd_plan mhc_pre_fwd_plan_of(const mhc_sizes *sizes)
{
    const mhc_chunks chunks = mhc_split_columns(sizes, MHC_CHUNK);
    const int64_t elements = COT_PRODUCT(chunks.count, mhc_packed_rows(sizes->M), MHC_CHUNK);
    return (mhc_pre_fwd_plan){chunks, cot_bytes(elements, sizeof(float))};
}

/* bf16 elements of a chunk of W as AMX tiles: a last pass of 16 rows uses the first part of its space. */
static inline int64_t mhc_amx_weight_elements(int64_t M)
{
    return cot_round_up(M, 32) * MHC_AMX_TERMS * MHC_AMX_CHUNK;
}

static inline mhc_pre_fwd_plan mhc_pre_fwd_amx_plan_of(const mhc_sizes *sizes)
{
    const mhc_chunks chunks = mhc_split_columns(sizes, MHC_AMX_CHUNK);
    const int64_t elements = cot_mul(chunks.count, mhc_amx_weight_elements(sizes->M));
    return (mhc_pre_fwd_plan){chunks, cot_bytes(elements, sizeof(uint16_t))};
}

/* The plan of Sinkhorn's backward. The workspace has the history of each part. */
typedef struct mhc_sinkhorn_bwd_plan {
    mhc_parts parts;
    size_t bytes;
} mhc_sinkhorn_bwd_plan;

static inline mhc_sinkhorn_bwd_plan mhc_sinkhorn_bwd_plan_of(const mhc_sinkhorn_backward_problem *p)
{
    const mhc_parts parts = mhc_sinkhorn_parts(p->sizes.tokens);
    const int64_t floats = cot_mul(parts.count, mhc_history_floats(p->sizes.n, p->args.iterations));
    return (mhc_sinkhorn_bwd_plan){parts, cot_bytes(floats, sizeof(float))};
}

/* The plan of pre's backward, with byte offsets in the workspace. */
typedef struct mhc_pre_bwd_layout {
    mhc_chunks chunks;
    mhc_parts parts;
    size_t weights, dphi_parts, sums, history, bytes;
    size_t dphi_part_bytes, sums_part, history_part; /* bytes of one part */
} mhc_pre_bwd_layout;

/* bf16 elements of a chunk of W as AMX tiles for pre's backward, which sum 32 rows. */
static inline int64_t mhc_amx_bwd_weight_elements(int64_t M)
{
    return cot_round_up(M, 32) * MHC_AMX_DX_TERMS * MHC_AMX_BWD_CHUNK;
}

/* weight_elements, weight_size: of a chunk of W. */
static inline mhc_pre_bwd_layout mhc_layout_pre_bwd(const mhc_sizes *sizes, int32_t iterations, int64_t chunk_columns,
                                                    int64_t weight_elements, size_t weight_size)
{
    const mhc_chunks chunks = mhc_split_columns(sizes, chunk_columns);
    const mhc_parts parts = mhc_pre_bwd_parts(sizes->tokens);
    mhc_pre_bwd_layout l = {
        .chunks = chunks,
        .parts = parts,
        .dphi_part_bytes = cot_align_up(cot_bytes(mhc_weight_elements(sizes, &chunks), sizeof(float))),
        .sums_part = cot_align_up(cot_bytes(sizes->M + 3, sizeof(double))),
        .history_part = cot_align_up(cot_bytes(mhc_history_floats(sizes->n, iterations), sizeof(float)))};
    l.weights = cot_workspace_reserve(&l.bytes, cot_mul(chunks.count, weight_elements), weight_size);
    l.dphi_parts = cot_workspace_reserve(&l.bytes, parts.count, l.dphi_part_bytes);
    l.sums = cot_workspace_reserve(&l.bytes, parts.count, l.sums_part);
    l.history = cot_workspace_reserve(&l.bytes, parts.count, l.history_part);
    return l;
}

#endif
