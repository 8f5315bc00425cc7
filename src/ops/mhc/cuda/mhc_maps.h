/* SPDX-License-Identifier: Apache-2.0
 * mhc_maps.h: what pre's kernels for Hopper are handed, and how they divide the work. For C and CUDA. */
#ifndef COT_MHC_MAPS_H
#define COT_MHC_MAPS_H

#include "mhc_cuda.h"

#include <cuda.h>

/* n = 4, bf16 or f16. A cluster takes a tile of tokens, each of its blocks some columns d of it in all four streams: their part
 * of phi stays in the block's registers. Seven clusters of sixteen are what an H200 holds at once. */
enum {
    MHC_SM90_N = 4,
    MHC_SM90_M = MHC_SM90_N * (MHC_SM90_N + 2),
    MHC_SM90_CLUSTER = 16,
    MHC_SM90_CLUSTERS = 7,
    MHC_SM90_BLOCKS = 132, /* at most, where there are no clusters */
    MHC_SM90_TILE = 16,    /* tokens: one for each block to own */
    MHC_SM90_CHUNK = 64,   /* columns in 128 bytes */
    MHC_SM90_CHUNKS = 4,   /* of a block */
    MHC_SM90_COLUMNS = MHC_SM90_CHUNK * MHC_SM90_CHUNKS,
    MHC_SM90_MAX_D = MHC_SM90_CLUSTER * MHC_SM90_COLUMNS,
    MHC_SM90_WIDE_TILE = 8, /* the same where a cluster's blocks have more columns, in the forward */
    MHC_SM90_WIDE_CHUNKS = 7,
    MHC_SM90_WIDE_MAX_D = MHC_SM90_CLUSTER * MHC_SM90_WIDE_CHUNKS * MHC_SM90_CHUNK,
    MHC_SM90_SHARED_BYTES = 232448, /* all that a block may have */
    MHC_SM90_FWD_THREADS = 512,
    MHC_SM90_BWD_THREADS = 384,
    MHC_SM90_SPLIT_THREADS = 384, /* of the forward */
    MHC_SM90_ONCE_MIN_D = 4096,   /* beyond this the backward without clusters makes the records as it goes */
    /* Where in mhc_call's words: the next token, the furthest tile wanted, each tile's count of records. */
    MHC_SM90_TICKET = 0,
    MHC_SM90_WANTED = 1,
    MHC_SM90_MADE = 2
};

/* The maps see tensors as [stream][chunk][token][column of the chunk]. */
typedef struct mhc_mapped_call {
    CUtensorMap x, dh_in, dx, dx_post;
    mhc_call call;
} mhc_mapped_call;

#endif
