/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_cuda.h: what the host hands to the CUDA kernels of this op, by value. For C and CUDA. */
#ifndef COT_CAUSAL_CONV1D_DENSE_CUDA_H
#define COT_CAUSAL_CONV1D_DENSE_CUDA_H

#include <stdint.h>

/* How the kernels for Hopper divide the work: a block has ROWS by COLUMNS of a product, half of the rows for each of its
 * two consumer groups, and takes DEPTH of the inner axis a step. */
enum {
    CONV1D_DENSE_ROWS = 128,
    CONV1D_DENSE_COLUMNS = 256,
    CONV1D_DENSE_DEPTH = 64,
    CONV1D_DENSE_STAGES = 4,
    CONV1D_DENSE_GROUPS = 3,       /* of 128 threads */
    CONV1D_DENSE_SUM_TOKENS = 256, /* that a block of dbias's sums takes */
    CONV1D_DENSE_GATHER = 32,      /* channels and tokens of a block that gathers a tensor */
    /* The portable ones: SIDE by SIDE of a product in float32, TILE by TILE on tensor cores, in steps of STEP. */
    CONV1D_DENSE_SIDE = 64,
    CONV1D_DENSE_TILE = 128,
    CONV1D_DENSE_STEP = 32
};

/* A tensor on the device; null = absent. Strides in elements: b, channel, t; of weights o, i, k. */
typedef struct conv1d_dense_array {
    void *data;
    int64_t stride[3];
    int32_t dtype;
} conv1d_dense_array;

typedef struct conv1d_dense_call {
    int64_t B, Din, Dout, T, K;
    int32_t silu, accumulate;
    int32_t out_in_vectors; /* rows of y or dx are 16-bit elements at multiples of 16 bytes */
    int32_t parts,
        chunks; /* of dweight's sums over the tokens; of dbias's, of CONV1D_DENSE_SUM_TOKENS, in a sequence */
    conv1d_dense_array weight, bias, dy, out;                                       /* out: y, or dx */
    conv1d_dense_array x, initial_state, final_state, dfinal_state, dinitial_state; /* of the portable kernels */
    conv1d_dense_array g; /* what dbias sums: dy or the workspace's */
    conv1d_dense_array dweight, dbias;
    /* What is gathered as rows of 16-bit elements: `tokens` rows for each b, PLANE elements apart; null: zeros. Rows have
     * `pitch` elements, those after `channels` zeros. */
    conv1d_dense_array from;
    int64_t channels, tokens, pitch, plane;
    void *gathered;
    void *packed;        /* weights as [K][Dout][pitch_in] */
    void *rows, *g_rows; /* the portable kernels' xe [B][K-1+T][pitch_in], g [B][T][pitch_out] */
    int64_t pitch_in, pitch_out;
    void *gradients;      /* g as [B][T][Dout] */
    float *dweight_parts; /* [parts][K][Dout][Din] */
    float *dbias_parts;   /* [B chunks][Dout] */
} conv1d_dense_call;

#endif
