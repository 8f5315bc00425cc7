/* SPDX-License-Identifier: Apache-2.0
 * mhc_cuda.h: the arguments that the host passes by value to the CUDA kernels of the four ops. For C and CUDA. */
#ifndef COT_MHC_CUDA_H
#define COT_MHC_CUDA_H

#include <stdint.h>

enum {
    MHC_CUDA_MAX_N = 8,
    MHC_CUDA_MAX_M = MHC_CUDA_MAX_N * (MHC_CUDA_MAX_N + 2),
    MHC_CUDA_THREADS = 256,
    MHC_CUDA_TOKENS = 8, /* tokens of a block in pre's generic kernels: the block loads each phi once for them */
    MHC_CUDA_POST_THREADS = 256,     /* maximum in a block of post; a block handles one token */
    MHC_CUDA_POST_BWD_THREADS = 128, /* the same in the backward for n > 4: three blocks on a multiprocessor overlap */
    MHC_CUDA_TOKEN_THREADS = 64,     /* maximum in a block of Sinkhorn's kernels; a thread handles one token */
    MHC_CUDA_HISTORY_BYTES = 49152,  /* maximum of Sinkhorn's history in shared memory: what every GPU gives a block */
    MHC_CUDA_MAX_PARTS = 16,         /* token ranges with a separate dphi_part, in the portable kernels and for n = 8 */
    MHC_CUDA_TOKEN_PARTS = 256,      /* token ranges with separate sums of dz */
    MHC_CUDA_SUM_COLUMNS = 32,       /* columns that one block sums over the parts */
    MHC_CUDA_RUN = 16,               /* tokens that the generic dphi sums before it adds them to the total */
    /* Tensor-core kernels of any GPU. */
    MHC_CUDA_MMA_TERMS = 3, /* bf16 terms of a float32 */
    /* Terms of dh_mix are terms of dh_mix times this number: the smallest bf16 is 2^16 times the smallest float32. */
    MHC_CUDA_MIX_SCALE = 1 << 24,
    MHC_CUDA_MMA_TOKENS = 128,  /* of a block's tile in project and dx */
    MHC_CUDA_MMA_COLUMNS = 128, /* columns of a stream in a block of dx and dphi */
    MHC_CUDA_MMA_CHUNK = 32,    /* columns of a stage of project */
    MHC_CUDA_MMA_CHUNK_PITCH = MHC_CUDA_MMA_CHUNK + 8,
    MHC_CUDA_MMA_STAGE_TOKENS = 32, /* tokens of a stage of dphi */
    MHC_CUDA_MMA_BLOCKS = 1056,     /* that dx and dphi divide the work into: 8 for each multiprocessor of an H200 */
    MHC_CUDA_MMA_BYTES = 101376,    /* shared memory of a block that every GPU has */
    MHC_CUDA_MMA_MAX_STAGES = 4
};

/* Rows of phi that the kernels multiply, in whole octets. A kernel is for n up to 2, 4 or 8. */
#define MHC_CUDA_MMA_M(n) ((n) <= 2 ? 8 : (n) <= 4 ? 24 : 80)
/* The same in whole steps of 16, in which the terms of phi and dh_mix are stored. */
#define MHC_CUDA_MMA_ROWS(M) (((M) + 15) / 16 * 16)
/* Elements of a row of x in a stage of dphi. `element` is the number of bytes of an element of x. */
#define MHC_CUDA_MMA_X_PITCH(element) (MHC_CUDA_MMA_COLUMNS + 16 / (element))
/* Bytes of a stage, and the number of stages. */
#define MHC_CUDA_MMA_PROJECT_STAGE(element, M)                      \
    ((MHC_CUDA_MMA_TOKENS * MHC_CUDA_MMA_CHUNK_PITCH) * (element) + \
     MHC_CUDA_MMA_TERMS * MHC_CUDA_MMA_ROWS(M) * MHC_CUDA_MMA_CHUNK_PITCH * 2)
#define MHC_CUDA_MMA_DPHI_STAGE(element, M)                                  \
    (MHC_CUDA_MMA_STAGE_TOKENS * MHC_CUDA_MMA_X_PITCH(element) * (element) + \
     MHC_CUDA_MMA_TERMS * MHC_CUDA_MMA_STAGE_TOKENS * (MHC_CUDA_MMA_ROWS(M) + 8) * 2)
#define MHC_CUDA_MMA_STAGES(stage_bytes)                                                               \
    (MHC_CUDA_MMA_BYTES / (stage_bytes) < MHC_CUDA_MMA_MAX_STAGES ? MHC_CUDA_MMA_BYTES / (stage_bytes) \
                                                                  : MHC_CUDA_MMA_MAX_STAGES)

/* Floats of one token's partial sums over one slice of columns: h_mix and the sum of squares, padded to a multiple of
 * 16 bytes. */
#define MHC_CUDA_SUMS(n) (((n) * ((n) + 2) + 4) / 4 * 4)

/* Floats of one token's sums over one slice of columns, of dh_res and dh_post, padded to a multiple of 16 bytes. */
#define MHC_CUDA_POST_SUMS(n) (((n) * ((n) + 1) + 3) / 4 * 4)

/* The per-token inputs of the products for dx and dphi_part, for up to four streams. */
typedef struct mhc_token_record {
    uint16_t terms[3][24]; /* three bf16 terms whose sum is dh_mix * MHC_CUDA_MIX_SCALE */
    float h_pre[4];
    /* factor: c of the formulas ("factor" in the code, where c is the call). The record is an odd number of 16-byte
     * units, which avoids shared-memory bank conflicts. */
    float factor, unused[3];
} mhc_token_record;

/* What a token's columns are multiplied by in the second half of post_pre's backward. An odd number of 16-byte units. */
typedef struct mhc_token_operands {
    uint16_t terms[2][24]; /* two f16 terms whose sum is dh_mix * MHC_CUDA_MIX_SCALE / scale */
    float h_res[4][4], h_post[4], h_pre[4];
    float factor, scale, unused[2]; /* scale: a power of two */
} mhc_token_operands;

/* A tensor on the device; null data = absent. Strides are in elements: b, t, then the remaining dimensions. Parameters
 * have the strides of their own dimensions. */
typedef struct mhc_array {
    void *data;
    int64_t stride[4];
} mhc_array;

/* One struct for all kernels. Each kernel reads only the members that it needs. Names match the argument structs. */
typedef struct mhc_call {
    int64_t tokens, T, D;
    int32_t n, iterations, accumulate;
    int32_t vectorized; /* every row of x, h_in and their gradients is a whole number of aligned 16-byte vectors */
    /* 1: pre's dx is float32 for every dtype of x. It is then the gradient g of y in post_pre's backward. */
    int32_t f32_dx;
    float norm_eps, hc_eps, post_scale, sinkhorn_eps;
    mhc_array x, phi, alpha, bias, gamma;
    mhc_array h_in, h_pre, h_post, h_res_logits, h_res, inv_rms, h_mix;
    mhc_array dh_in, dh_post, dh_res_logits, dh_res, dx_post, dx, dphi, dalpha, dbias, dgamma;
    mhc_array f, y, dy, df;
    /* Pointers into the workspace. */
    float *logits;       /* [tokens][n*n]: input of the fused Sinkhorn */
    float *history;      /* [iterations][2n][tokens]: u and v after each Sinkhorn iteration; null: in shared memory */
    float *dz;           /* [tokens][M] */
    float *dh_mix;       /* [tokens][M] */
    float *factor;       /* [tokens]: c of the formulas */
    uint16_t *phi_terms; /* [MHC_CUDA_MMA_TERMS][rows][n][term_columns]: bf16 terms of phi gamma */
    /* bf16 terms of dh_mix * MHC_CUDA_MIX_SCALE: [MHC_CUDA_MMA_TERMS][tokens][rows]; with mix_tile,
     * [tile][MHC_CUDA_MMA_TERMS][rows / 16][mix_tile tokens][16] with the 32-byte swizzle of wgmma.cuh. */
    uint16_t *mix_terms;
    float *sums;                  /* [tokens][slices][MHC_CUDA_SUMS(n)] */
    mhc_token_record *records;    /* [tokens, rounded up to whole tiles]; null = not needed */
    mhc_token_operands *operands; /* [tokens] */
    uint32_t *counters;           /* [MHC_SM90_RECORD_COUNTS + tiles]: progress shared by blocks, see mhc_maps.h */
    /* [parts][M][n*D]: dphi_part: dphi before the multiplication by gamma, over a part of the tokens, divided by
     * dphi_part_scale. */
    float *dphi_parts;
    double *token_sums; /* [token_parts][M][2]: sum of dz, and sum of dz * h_mix * inv_rms */
    float *post_sums;   /* [slices][tokens][MHC_CUDA_POST_SUMS(n)] */
    int64_t parts, part_length, token_parts, slices;
    float dphi_part_scale; /* 1, or 1 / MHC_CUDA_MIX_SCALE if dphi_part was computed from the terms of dh_mix */
    int64_t term_columns;  /* D, rounded up to MHC_CUDA_MMA_COLUMNS */
    int32_t mix_tile;      /* tokens of a tile of mix_terms; 0: no tiles */
    int32_t slice_columns; /* columns of one of the `slices`, in the kernels for any GPU */
    int32_t counter_count; /* counters that mhc_pre_dz clears */
} mhc_call;

#endif
