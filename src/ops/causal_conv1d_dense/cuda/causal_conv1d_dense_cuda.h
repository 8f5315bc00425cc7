/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_cuda.h: the kernel parameters of this op, which the host passes by value. For C and CUDA. */
#ifndef COT_CAUSAL_CONV1D_DENSE_CUDA_H
#define COT_CAUSAL_CONV1D_DENSE_CUDA_H

#include <stdint.h>

/* How the Hopper kernels divide the work: a block computes BLOCK_M rows by BLOCK_N columns of a product. Each of its
 * two consumer warpgroups has half of the rows. A step processes BLOCK_K of the inner axis. */
enum {
    CONV1D_DENSE_BLOCK_M = 128,
    CONV1D_DENSE_BLOCK_N = 256,
    CONV1D_DENSE_BLOCK_K = 64,
    CONV1D_DENSE_STAGES = 4,
    CONV1D_DENSE_WARPGROUPS = 3,     /* of 128 threads */
    CONV1D_DENSE_DBIAS_TOKENS = 256, /* a dbias chunk: tokens that a block sums */
    CONV1D_DENSE_GATHER_SIDE = 32,   /* channels and tokens per block of the gather kernel */
    /* The sm80 kernels: the side of the square that a block computes (F32: in float32, MMA: on tensor cores), and its
     * step of the inner axis. */
    CONV1D_DENSE_F32_BLOCK = 64,
    CONV1D_DENSE_MMA_BLOCK = 128,
    CONV1D_DENSE_SM80_BLOCK_K = 32
};

/* A tensor on the device. data is null if the tensor is absent. Strides are in elements: b, channel, t; of weights
 * o, i, k. */
typedef struct conv1d_dense_array {
    void *data;
    int64_t stride[3];
    int32_t dtype;
} conv1d_dense_array;

typedef struct conv1d_dense_call {
    int64_t B, Din, Dout, T, K;
    int32_t silu, accumulate;
    int32_t out_vectorized; /* y or dx has contiguous channels, and rows that begin at multiples of 16 bytes */
    int32_t splits,
        dbias_chunks; /* splits: of dweight's sums over the tokens, as in split-K; dbias_chunks: per sequence */
    conv1d_dense_array weight, bias, dy, out;                                       /* out: y or dx */
    conv1d_dense_array x, initial_state, final_state, dfinal_state, dinitial_state; /* for the sm80 kernels */
    conv1d_dense_array g;                                                           /* dy, or g_workspace */
    conv1d_dense_array dweight, dbias;
    /* For the gather kernel, which copies 16-bit elements into rows with contiguous channels: `tokens` rows for each b.
     * The rows of consecutive b are `plane` elements apart. A row has `pitch` elements, with zeros after `channels`.
     * gather_source.data null: only zeros. */
    conv1d_dense_array gather_source;
    int64_t channels, tokens, pitch, plane;
    void *gather_target;
    void *packed_weight; /* [K][Dout][pitch_in] */
    void *xe, *g_tokens; /* for the sm80 kernels: [B][K-1+T][pitch_in] and [B][T][pitch_out] */
    int64_t pitch_in, pitch_out;
    void *g_workspace;       /* g as [B][T][Dout] */
    float *dweight_partials; /* [splits][K][Dout][Din] */
    float *dbias_partials;   /* [B dbias_chunks][Dout] */
} conv1d_dense_call;

#endif
