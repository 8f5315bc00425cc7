/* SPDX-License-Identifier: Apache-2.0
 * mhc_cuda.h: what the host hands to the CUDA kernels of the three ops, by value. For C and CUDA. */
#ifndef COT_MHC_CUDA_H
#define COT_MHC_CUDA_H

#include <stdint.h>

enum {
    MHC_CUDA_MAX_N = 8,
    MHC_CUDA_MAX_M = MHC_CUDA_MAX_N * (MHC_CUDA_MAX_N + 2),
    MHC_CUDA_THREADS = 256,
    MHC_CUDA_TOKENS = 8, /* tokens that a block of pre's generic kernels takes: each phi is read once for them */
    MHC_CUDA_POST_THREADS = 256, /* of a block of post, a token a block, at most */
    MHC_CUDA_TOKEN_THREADS = 64, /* of a block of Sinkhorn's kernels, a token a thread */
    MHC_CUDA_MAX_PARTS = 16,     /* runs of tokens with a Q of their own */
    MHC_CUDA_TOKEN_PARTS = 256,  /* runs of tokens with sums of dz of their own, in the generic backward */
    MHC_CUDA_TILE_TOKENS = 64,   /* of a block of pre's tiles */
    MHC_CUDA_SLICE = 512,        /* columns of a stream that the forward's tiles add up */
    MHC_CUDA_DX_COLUMNS = 128,   /* of a stream that a block has, of dx and of Q */
    MHC_CUDA_Q_COLUMNS = 64,
    MHC_CUDA_SUM_COLUMNS = 32, /* of Q that a block adds up over the parts */
    MHC_CUDA_RUN = 16,         /* tokens that dphi adds up in one run */
    MHC_CUDA_MMA_TOKENS = 128, /* of a block on the tensor cores, and columns of a stream; tokens of a run of Q */
    MHC_CUDA_MMA_COLUMNS = 128,
    MHC_CUDA_MMA_RUN = 32
};

/* Sums of a token that a slice of the columns leaves: of h_mix and the squares, padded to whole 16 bytes. */
#define MHC_CUDA_SUMS(n) (((n) * ((n) + 2) + 4) / 4 * 4)

/* All that dx and Q need of a token, for four streams. */
typedef struct mhc_token_record {
    uint16_t terms[3][24]; /* bf16: dh_mix is their sum */
    float h_pre[4];
    float factor, unused[3]; /* c of the formulas; 16 bytes a unit, an odd number of them, suit shared memory's banks */
} mhc_token_record;

/* A tensor on the device; null = absent. Strides in elements: of b, t and what follows; of parameters, their own. */
typedef struct mhc_array {
    void *data;
    int64_t stride[4];
} mhc_array;

/* One struct for all kernels, each reading its part of it. Names are those of the argument structs. */
typedef struct mhc_call {
    int64_t tokens, T, D;
    int32_t n, iterations, accumulate;
    int32_t vectors; /* the rows of x and its like are whole aligned vectors of sixteen bytes */
    float norm_eps, hc_eps, post_scale, sinkhorn_eps;
    mhc_array x, phi, alpha, bias, gamma;
    mhc_array h_in, h_pre, h_post, h_res, A, inv_rms, h_mix;
    mhc_array dh_in, dh_post, dh_res, dA, dx_post, dx, dphi, dalpha, dbias, dgamma;
    mhc_array f, y, dy, df;
    /* Of the workspace. */
    float *logits;             /* [tokens][n*n]: fused Sinkhorn's */
    float *history;            /* [iterations][2n][tokens]: u and v after each of Sinkhorn's iterations */
    float *dz;                 /* [tokens][M] */
    float *dh_mix;             /* [tokens][M] */
    float *factor;             /* [tokens]: c of the formulas */
    float *sums;               /* [tokens][slices][MHC_CUDA_SUMS(n)] */
    mhc_token_record *records; /* [tokens, up to whole tiles]; null = not wanted */
    uint32_t *words;           /* [MHC_SM90_MADE + tiles]: what blocks tell each other */
    float *partial;            /* [parts][M][n*D]: Q of each part */
    double *token_sums;        /* [token_parts][M][2]: of dz, and of its products with h_mix inv_rms */
    int64_t parts, part_length, token_parts, slices;
} mhc_call;

#endif
