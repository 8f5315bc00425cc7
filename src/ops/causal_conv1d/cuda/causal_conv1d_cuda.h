/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_cuda.h: the kernel parameters of this op, which the host passes by value. For C and CUDA. */
#ifndef COT_CAUSAL_CONV1D_CUDA_H
#define COT_CAUSAL_CONV1D_CUDA_H

#include <stdint.h>

/* How the fast kernels divide the work. Each warp processes few tokens, and consecutive blocks access consecutive
 * memory. On an H200 this is 10 % faster than one long run of tokens for each warp (see
 * docs/experiments/causal_conv1d.md). */
enum {
    CONV1D_LANES = 32,
    CONV1D_WARPS = 8,      /* maximum warps of a block */
    CONV1D_FWD_CHUNKS = 4, /* contiguous time: chunks per warp, of 32 V tokens each */
    CONV1D_BWD_CHUNKS = 4,
    CONV1D_FWD_WARP_TOKENS = 32, /* contiguous channels: tokens per warp */
    CONV1D_BWD_WARP_TOKENS = 32,
    CONV1D_BWD_WARPS = 4,
    /* On Hopper, TMA loads the whole tile of a block into shared memory. */
    CONV1D_SM90_WARPS = 4,
    CONV1D_SM90_FWD_CHUNKS = 2, /* contiguous time: chunks per warp */
    CONV1D_SM90_BWD_CHUNKS = 4,
    CONV1D_SM90_FWD_WARP_TOKENS = 8,  /* contiguous channels: tokens per warp */
    CONV1D_SM90_BWD_WARP_TOKENS = 32, /* halved for small grids: see conv1d_sm90_bwd_channel_last_config */
    CONV1D_SM90_FWD_V = 4,            /* channels per lane */
    CONV1D_SM90_BWD_V = 2,            /* 64 registers; 4 channels per lane need 120, which halves the warps that fit */
    CONV1D_SM90_FWD_CHANNELS = CONV1D_LANES * CONV1D_SM90_FWD_V, /* channels per tile */
    CONV1D_SM90_BWD_CHANNELS = CONV1D_LANES * CONV1D_SM90_BWD_V,
    CONV1D_SM90_HALO = 4, /* tokens before a tile; in the backward also after it */
    /* im2col and its product on tensor cores: the tile of a block. Each warp processes 8 of its channels. */
    CONV1D_IM2COL_TOKENS = 128,
    CONV1D_IM2COL_CHANNELS = 64,
    CONV1D_IM2COL_THREADS = CONV1D_IM2COL_CHANNELS / 8 * CONV1D_LANES
};

/* Bytes of a tile with contiguous time, plus 128 bytes before and after it. Only the 16 bytes next to the tile are
 * used. The full 128 bytes keep the shared and the global address equal modulo 128: otherwise the copy is 5 %
 * slower. */
#define CONV1D_SM90_CHANNEL_FIRST_BYTES(warps, chunks) ((warps) * (chunks)*CONV1D_LANES * 16 + 256)

/* A tensor on the device. data is null if the tensor is absent. Strides are in elements. */
typedef struct conv1d_array {
    void *data;
    int64_t stride[3]; /* x, y, dy, dx: b, d, t; states: row, d, column; weight: d, k */
    int32_t dtype;
    int32_t aligned; /* data and every row of contiguous elements begin at multiples of 16 bytes */
} conv1d_array;

/* The parameters of all kernels of the op. Each kernel reads some members. The names are those of the argument
 * structs. */
typedef struct conv1d_call {
    int64_t B, D, T, K;
    int64_t N; /* number of sequences in cu_seqlens, or rows of conv_state */
    int64_t S; /* columns of conv_state */
    int32_t silu, accumulate;
    conv1d_array x, weight, bias, initial_state, final_state, y;
    conv1d_array dy, dfinal_state, dx, dweight, dbias, dinitial_state;
    conv1d_array conv_state;
    conv1d_array seq_idx, cu_seqlens, cache_seqlens, conv_state_indices; /* int32 */
    unsigned long long *fault;
    /* For the fast kernels. */
    int32_t weight_packed; /* K = 4, and the 4 taps of a channel are contiguous and aligned */
    int64_t warp_tokens;   /* contiguous channels: tokens per warp */
    float *partial; /* [partial_count][W+1][D] partial sums of dweight and dbias, W: the width of the kernel instance */
    int64_t partial_count; /* 1: the kernel itself writes dweight and dbias */
    float *g;              /* dL/dz, [B][D][T]; only for the generic backward */
} conv1d_call;

#endif
