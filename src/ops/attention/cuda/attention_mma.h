/* SPDX-License-Identifier: Apache-2.0
 * attention_mma.h: what the host hands to the portable kernels of this op (attention_fwd_mma.cu, attention_bwd_mma.cu,
 * attention_f32.cu, attention_rows.cu), by value, and how they divide the work. For C and CUDA. */
#ifndef COT_ATTENTION_MMA_H
#define COT_ATTENTION_MMA_H

#include <stdint.h>

enum { ATTENTION_MMA_WARPS = 4, ATTENTION_F32_WARPS = 2, ATTENTION_ROW_LANES = 8, ATTENTION_ROW_THREADS = 256 };

/* The tiles of each kernel: DO(name, columns of q and k, of v, slabs of 16 rows a warp, rows of the other side's tile,
 * stages of that tile). Sizes between are filled up with zeros. The _all ones have softcap, ALiBi, bias and dropout too. */
/* clang-format off */
#define ATTENTION_FWD_TILES(DO) \
    DO(d64, 64, 64, 2, 64, 1) DO(d128, 128, 128, 2, 48, 1) DO(d192_v128, 192, 128, 2, 48, 1) DO(d256, 256, 256, 1, 64, 1)
#define ATTENTION_FWD_TILES_ALL(DO) DO(d128_all, 128, 128, 1, 64, 1) DO(d256_all, 256, 256, 1, 32, 1)
#define ATTENTION_DQ_TILES(DO) \
    DO(d64, 64, 64, 2, 64, 2) DO(d128, 128, 128, 2, 32, 2) DO(d192_v128, 192, 128, 1, 32, 2) DO(d256, 256, 256, 1, 32, 1)
#define ATTENTION_DQ_TILES_ALL(DO) DO(d256_all, 256, 256, 1, 32, 1)
/* dk and dv at once, or each by itself where the sums of both have no room in registers. d128 and d256 are for devices with
 * too little shared memory for ATTENTION_ONCE_TILES. */
#define ATTENTION_DKV_TILES(DO) \
    DO(d64, 64, 64, 2, 32, 2) DO(d128, 128, 128, 1, 48, 2) DO(d192_v128, 192, 128, 1, 32, 2)
#define ATTENTION_DK_TILES(DO) DO(d256, 256, 256, 1, 32, 1)
#define ATTENTION_DK_TILES_ALL(DO) DO(d256_all, 256, 256, 1, 32, 1)
#define ATTENTION_DV_TILES(DO) DO(d256, 256, 256, 1, 32, 2)
#define ATTENTION_DV_TILES_ALL(DO) DO(d256_all, 256, 256, 1, 32, 2)
/* dq, dk and dv in one pass: DO(name, columns, keys of a block, queries of a tile, warps) */
#define ATTENTION_ONCE_TILES(DO) DO(d64, 64, 128, 32, 4) DO(d128, 128, 128, 64, 8) DO(d256, 256, 64, 64, 8)
/* clang-format on */

enum { ATTENTION_FAR = 1 << 30 };

/* In one pass dq is summed in float32 as the tensor cores have it: 16 rows of 8 columns are 128 floats, element e of lane l
 * the (32 e + l)th. A sequence begins at a multiple of ATTENTION_SUM_ROWS rows. */
enum { ATTENTION_SUM_ROWS = 64, ATTENTION_WALK_BYTES = 32 };

/* The float32 kernels: 16 rows a warp, 16 of the other side. */
enum { ATTENTION_F32_ROWS = 16 * ATTENTION_F32_WARPS, ATTENTION_F32_COLUMNS = 16, ATTENTION_F32_MAX_D = 256 };

/* A tensor on the device; null = absent. Strides in elements: of q's kin b, t, h, c; of lse's kin b, h, t; of bias 0
 * where it is broadcast. vectors: rows are runs of 16-bit elements at multiples of 16 bytes, whole vectors of them. */
typedef struct attention_view {
    void *data;
    int64_t stride[4];
    int32_t dtype, vectors;
} attention_view;

typedef struct attention_mma_call {
    int64_t B, H, Hkv, Tq, Tk, d, dv; /* Tq and Tk: of the longest sequence */
    int64_t rows_q, rows_k;           /* of all sequences */
    int64_t q_begin, q_length, k_begin, k_length;
    int64_t tiles;       /* of this launch, a sequence and head */
    int32_t left, right; /* ATTENTION_FAR is farther than any key */
    int32_t packed, accumulate;
    int32_t negative;                              /* the scale is: scores change their signs and it does */
    float scale, score_scale, softcap, lse_factor; /* score_scale: what scores are multiplied with before ex2 or exp */
    uint32_t dropped;                              /* of 65536 */
    float kept;                                    /* 1/keep */
    int32_t pitch;                                 /* floats from row to row in the float32 kernels' tiles */
    int64_t bias_shape[4];
    uint64_t seed, offset, groups;
    attention_view cu_q, cu_k, used_q, used_k, seed_memory, offset_memory, sink, slopes, bias;
    attention_view q, k, v, out, lse, dout, dlse, delta, grad_q, grad_k, grad_v, dsink, dbias;
    float *row_lse;   /* [H][rows_q] lse_factor lse; inf where a query passes no gradient */
    float *row_delta; /* [H][rows_q] D */
    float *dq_sums;   /* [H][sum_rows][sum_columns]; null: two passes */
    int64_t sum_rows, sum_columns;
    int32_t stages; /* of q and dout */
    unsigned long long *fault;
} attention_mma_call;

/* delta and merge, by rows. */
typedef struct attention_delta_call {
    int64_t B, H, Tq, dv;
    attention_view out, dout, dlse, delta;
} attention_delta_call;

typedef struct attention_merge_call {
    int64_t B, H, Tq, dv;
    attention_view out_a, out_b, lse_a, lse_b, sink, out, lse;
} attention_merge_call;

#endif
