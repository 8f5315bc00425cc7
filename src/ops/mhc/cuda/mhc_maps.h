/* SPDX-License-Identifier: Apache-2.0
 * mhc_maps.h: constants and arguments (tensor maps) of pre's kernels for Hopper. For C and CUDA. */
#ifndef COT_MHC_MAPS_H
#define COT_MHC_MAPS_H

#include "mhc_cuda.h"

#include <cuda.h>

/* A cluster processes a tile of tokens. Each block of the cluster has some columns d of all streams, and holds its part
 * of phi. The forward keeps it in registers; the backward keeps the first terms in shared memory. A smaller D has
 * smaller clusters: otherwise some blocks would have no columns. The numbers are for n = 4, bf16 and f16, unless their
 * comment says otherwise. */
enum {
    MHC_SM90_N = 4,
    MHC_SM90_M = MHC_SM90_N * (MHC_SM90_N + 2),
    MHC_SM90_CLUSTER_BLOCKS = 16,
    MHC_SM90_BLOCKS = 132,       /* multiprocessors of an H200. n = 4: maximum in kernels without clusters */
    MHC_SM90_TILE = 16,          /* tokens: each block of a cluster of 16 owns one */
    MHC_SM90_CHUNK_COLUMNS = 64, /* columns in 128 bytes */
    MHC_SM90_BLOCK_CHUNKS = 4,   /* chunks of a block in each stream */
    MHC_SM90_COLUMNS = MHC_SM90_CHUNK_COLUMNS * MHC_SM90_BLOCK_CHUNKS,
    MHC_SM90_K = MHC_SM90_N * MHC_SM90_COLUMNS, /* columns of a block in all streams, for any n and dtype */
    MHC_SM90_MAX_D = MHC_SM90_CLUSTER_BLOCKS * MHC_SM90_COLUMNS,
    /* For a larger D: more columns in a block. In the forward, fewer tokens in a tile. */
    MHC_SM90_WIDE_TILE = 8,
    MHC_SM90_WIDE_BLOCK_CHUNKS = 7,
    MHC_SM90_WIDE_COLUMNS = MHC_SM90_WIDE_BLOCK_CHUNKS * MHC_SM90_CHUNK_COLUMNS,
    MHC_SM90_WIDE_MAX_D = MHC_SM90_CLUSTER_BLOCKS * MHC_SM90_WIDE_COLUMNS,
    MHC_SM90_SHARED_BYTES = 232448, /* maximum of a block */
    MHC_SM90_FWD_THREADS = 512,
    MHC_SM90_BWD_THREADS = 384,
    MHC_SM90_SPLIT_THREADS = 384,    /* of the split forward */
    MHC_SM90_POST_PRE_COLUMNS = 128, /* of each stream, in a block of post_pre's backward */
    MHC_SM90_POST_PRE_THREADS = 384,
    /* Pre for n = 8. In the backward, a block has 64 columns of N8_STREAMS streams. */
    MHC_SM90_N8 = 8,
    MHC_SM90_N8_ROWS = MHC_SM90_N8 * (MHC_SM90_N8 + 2),
    MHC_SM90_N8_STREAMS = 4,
    MHC_SM90_N8_TILE = 64, /* tokens of the backward */
    MHC_SM90_N8_THREADS = 512,
    MHC_SM90_N8_FWD_TILE = 128, /* tokens of a block of the forward */
    MHC_SM90_N8_FWD_THREADS = 384,
    MHC_SM90_N8_MAX_SLICES = 64, /* of the forward */
    /* Beyond this D the split backward makes the token records in the same kernel and reads x once from memory. */
    MHC_SM90_ONE_PASS_ABOVE_D = 4096,
    /* Indices in mhc_call's counters: the next token without a record, the furthest tile that a producer has reached,
     * and the number of records that are ready in each tile. */
    MHC_SM90_NEXT_TOKEN = 0,
    MHC_SM90_FURTHEST_TILE = 1,
    MHC_SM90_RECORD_COUNTS = 2
};

/* Columns of a block in each of n streams. */
#define MHC_SM90_COLUMNS_OF(n) (MHC_SM90_K / (n))
/* Tokens of a tile of a cluster kernel. wide: see MHC_SM90_WIDE_TILE. element: bytes of an element of x. */
#define MHC_SM90_CLUSTER_TILE(wide, element) ((wide) || (element) == 4 ? MHC_SM90_WIDE_TILE : MHC_SM90_TILE)
/* The most clusters that an H100 or H200 holds at once, by their number of blocks. */
#define MHC_SM90_CLUSTERS_OF(blocks) ((blocks) == 16 ? 7 : (blocks) == 8 ? 15 : 30)
/* Owner warps of a block of pre's backward. A kernel that adds dx_post has one: its fourth warp loads dx_post, or in f32
 * has no work. Wide blocks and f32 have too few stages for owner warps that take turns (make_owned_records): wide blocks
 * have one, and f32 has two only in clusters of 4 blocks. one: adds dx_post, or wide. element: bytes of an element of x. */
#define MHC_SM90_OWNERS(blocks, one, element) (!(one) && ((blocks) == 4 || (element) < 4) ? 2 : 1)

/* Each map describes its tensor as [stream][chunk][token][column of the chunk]. */
typedef struct mhc_mapped_call {
    CUtensorMap x, dh_in, dx, dx_post;
    mhc_call call;
} mhc_mapped_call;

/* phi: the terms of phi gamma, [term][row][stream][column]. */
typedef struct mhc_n8_call {
    CUtensorMap x, dh_in, dx, dx_post, phi;
    mhc_call call;
} mhc_n8_call;

/* The call is pre's: its h_post and h_res are those of the next layer. */
typedef struct mhc_post_pre_call {
    CUtensorMap x, f, y;
    mhc_call call;
    mhc_array h_post, h_res; /* of post; h_res[in,out] */
} mhc_post_pre_call;

/* For the records of post_pre's backward, if y is computed again. The call is pre's. */
typedef struct mhc_post_pre_records_call {
    CUtensorMap x, f, dh_in;
    mhc_call call;
    mhc_array h_post, h_res; /* of post; h_res[in,out] */
} mhc_post_pre_records_call;

/* The call is post's, with phi, gamma, dh_in and the records of pre. */
typedef struct mhc_post_pre_backward_call {
    CUtensorMap x, f, dh_in, dy, dx, df;
    mhc_call call;
} mhc_post_pre_backward_call;

#endif
