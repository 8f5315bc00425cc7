/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_cuda.h: what the host hands to the CUDA kernels of this op, by value. For C and CUDA. */
#ifndef COT_CAUSAL_CONV1D_CUDA_H
#define COT_CAUSAL_CONV1D_CUDA_H

#include <stdint.h>

/* How the fast kernels divide the work. They are short: a warp takes little, and blocks follow each other through memory
 * in its own order, which an H200 moves a tenth faster than long runs of its own for each warp (see the README). */
enum {
    CONV1D_LANES = 32,
    CONV1D_WARPS = 8,      /* of a block, at most */
    CONV1D_FWD_CHUNKS = 4, /* contiguous time: chunks of 32 V tokens that a warp takes */
    CONV1D_BWD_CHUNKS = 4,
    CONV1D_FWD_ROWS = 32, /* contiguous channels: tokens that a warp takes */
    CONV1D_BWD_ROWS = 32,
    CONV1D_BWD_WARPS = 4,
    /* On Hopper a block has its tile brought to shared memory at once. */
    CONV1D_SM90_WARPS = 4,
    CONV1D_SM90_FWD_CHUNKS = 2, /* of a warp, contiguous time */
    CONV1D_SM90_BWD_CHUNKS = 4,
    CONV1D_SM90_FWD_ROWS = 8,  /* of a warp, contiguous channels */
    CONV1D_SM90_BWD_ROWS = 32, /* and half of that where blocks are few: see conv1d_sm90_bwd_last */
    CONV1D_SM90_FWD_V = 4,     /* channels of a lane */
    CONV1D_SM90_BWD_V = 2,     /* 64 registers instead of 120: twice the warps, which 4 channels a lane were short of */
    CONV1D_SM90_FWD_CHANNELS = CONV1D_LANES * CONV1D_SM90_FWD_V, /* of a tile */
    CONV1D_SM90_BWD_CHANNELS = CONV1D_LANES * CONV1D_SM90_BWD_V,
    CONV1D_SM90_HALO = 4, /* tokens before a tile, and after it in the backward */
    /* im2col and its product on tensor cores: a block's tile, 8 channels of it to a warp. */
    CONV1D_IM2COL_TOKENS = 128,
    CONV1D_IM2COL_CHANNELS = 64,
    CONV1D_IM2COL_THREADS = CONV1D_IM2COL_CHANNELS / 8 * CONV1D_LANES
};

/* Bytes of a tile of contiguous time, with a line of 128 bytes before and after it: only the 16 next to the tile are used,
 * but the copy engine is a twentieth slower where the two addresses differ modulo a line. */
#define CONV1D_SM90_FIRST_BYTES(warps, chunks) ((warps) * (chunks)*CONV1D_LANES * 16 + 256)

/* A tensor on the device; null = absent. Strides in elements. */
typedef struct conv1d_array {
    void *data;
    int64_t stride[3]; /* of x's kin b, d, t; of states row, d, column; of weight d, k; of vectors their own */
    int32_t dtype;
    int32_t aligned; /* rows of contiguous elements begin at multiples of 16 bytes, and so does data */
} conv1d_array;

/* One struct for all kernels of the op, each reading its part of it. Names are those of the argument structs. */
typedef struct conv1d_call {
    int64_t B, D, T, K;
    int64_t N; /* sequences of cu_seqlens, rows of conv_state */
    int64_t S; /* columns of conv_state */
    int32_t silu, accumulate;
    conv1d_array x, weight, bias, initial_state, final_state, y;
    conv1d_array dy, dfinal_state, dx, dweight, dbias, dinitial_state;
    conv1d_array conv_state;
    conv1d_array seq_idx, cu_seqlens, cache_seqlens, conv_state_indices; /* int32 */
    unsigned long long *fault;
    /* The fast kernels. */
    int32_t weight_packed; /* K = 4, and the four taps of a channel lie together and aligned */
    int64_t part_length;   /* contiguous channels: tokens that a warp takes */
    float *partial;        /* [partial_count][K+1][D] sums of dweight and dbias, K being the width compiled for */
    int64_t partial_count; /* 1: the kernel writes dweight and dbias itself */
    float *g;              /* the generic backward: [B][D][T] */
} conv1d_call;

#endif
