/* SPDX-License-Identifier: Apache-2.0
 * attention_sm80.h: arguments that the host passes to the portable kernels of this op (attention_fwd_sm80.cu,
 * attention_bwd_sm80.cu, attention_bwd_one_pass_sm80.cu, attention_f32_sm80.cu, attention_delta_merge.cu), by value,
 * and their tiles. For C and CUDA. */
#ifndef COT_ATTENTION_SM80_H
#define COT_ATTENTION_SM80_H

#include <stdint.h>

enum { ATTENTION_SM80_WARPS = 4, ATTENTION_F32_WARPS = 2, ATTENTION_ROW_LANES = 8, ATTENTION_ROW_THREADS = 256 };

/* Tiles of each kernel: DO(name, columns of q and k, columns of v, slabs of 16 rows per warp, rows of the tile that the
 * block loops over, stages of that tile). Smaller sizes are filled up with zeros. The ..._score_mods kernels also have
 * softcap, ALiBi, bias and dropout. */
/* clang-format off */
#define ATTENTION_FWD_TILES(DO) \
    DO(d64, 64, 64, 2, 64, 1) DO(d128, 128, 128, 2, 48, 1) DO(d192_v128, 192, 128, 2, 48, 1) DO(d256, 256, 256, 1, 64, 1)
#define ATTENTION_FWD_TILES_SCORE_MODS(DO) DO(d128_score_mods, 128, 128, 1, 64, 1) DO(d256_score_mods, 256, 256, 1, 32, 1)
#define ATTENTION_DQ_TILES(DO) \
    DO(d64, 64, 64, 2, 64, 2) DO(d128, 128, 128, 2, 32, 2) DO(d192_v128, 192, 128, 1, 32, 2) DO(d256, 256, 256, 1, 32, 1)
#define ATTENTION_DQ_TILES_SCORE_MODS(DO) DO(d256_score_mods, 256, 256, 1, 32, 1)
/* dk and dv in one kernel, or in two kernels if the registers cannot hold both accumulators. d128 and d256 are for
 * devices with too little shared memory for ATTENTION_ONE_PASS_TILES. */
#define ATTENTION_DKV_TILES(DO) \
    DO(d64, 64, 64, 2, 32, 2) DO(d128, 128, 128, 1, 48, 2) DO(d192_v128, 192, 128, 1, 32, 2)
#define ATTENTION_DK_TILES(DO) DO(d256, 256, 256, 1, 32, 1)
#define ATTENTION_DK_TILES_SCORE_MODS(DO) DO(d256_score_mods, 256, 256, 1, 32, 1)
#define ATTENTION_DV_TILES(DO) DO(d256, 256, 256, 1, 32, 2)
#define ATTENTION_DV_TILES_SCORE_MODS(DO) DO(d256_score_mods, 256, 256, 1, 32, 2)
/* dq, dk and dv in one pass: DO(name, columns, keys of a block, queries of a tile, warps) */
#define ATTENTION_ONE_PASS_TILES(DO) DO(d64, 64, 128, 32, 4) DO(d128, 128, 128, 64, 8) DO(d256, 256, 64, 64, 8)
/* clang-format on */

enum { ATTENTION_UNBOUNDED_32 = 1 << 30 }; /* ATTENTION_UNBOUNDED in 32 bits */

/* One pass accumulates dq in float32, in the order of mma fragments: 16 rows of 8 columns are 128 floats, and element e
 * of lane l is number 32 e + l. A sequence begins at a multiple of ATTENTION_ACCUM_ROWS rows. */
enum { ATTENTION_ACCUM_ROWS = 64, ATTENTION_WORK_BYTES = 32 };

/* Tiles of the float32 kernels: 16 rows per warp, by 16 columns. */
enum { ATTENTION_F32_ROWS = 16 * ATTENTION_F32_WARPS, ATTENTION_F32_COLUMNS = 16, ATTENTION_F32_MAX_D = 256 };

/* A tensor on the device. data is null if it is absent. Strides are in elements, in this order:
 *   like q     b, t, h, c
 *   like lse   b, h, t
 *   bias       0 for broadcast axes
 * vectorized: rows are contiguous 16-bit elements in whole vectors of 16 bytes, at multiples of 16 bytes. */
typedef struct attention_view {
    void *data;
    int64_t stride[4];
    int32_t dtype, vectorized;
} attention_view;

typedef struct attention_sm80_call {
    int64_t B, H, Hkv, Tq, Tk, d, d_v; /* Tq and Tk: of the longest sequence */
    int64_t rows_q, rows_k;            /* rows of all sequences */
    int64_t q_begin, q_length, k_begin, k_length;
    int64_t tiles;       /* tiles of this launch, for one sequence and head */
    int32_t left, right; /* the window; ATTENTION_UNBOUNDED_32 is beyond any key */
    int32_t packed, accumulate;
    int32_t negative_scale; /* the scale is negative: the kernel negates the scores, score_scale is positive */
    float scale, score_scale, softcap, lse_factor; /* score_scale: factor of scores before ex2 or exp */
    uint32_t dropped;                              /* drop probability times 65536 */
    float keep_scale;                              /* 1/keep */
    int32_t pitch;                                 /* floats between rows of the float32 kernels' tiles */
    int64_t bias_shape[4];
    uint64_t seed, offset, groups;
    attention_view cu_q, cu_k, seqused_q, seqused_k, seed_tensor, offset_tensor, sink, alibi_slopes, bias;
    attention_view q, k, v, out, lse, dout, dlse, delta, dq, dk, dv, dsink, dbias;
    float *row_lse;   /* [H][rows_q] lse_factor lse; inf for queries without gradient */
    float *row_delta; /* [H][rows_q] delta */
    float *dq_accum;  /* [H][accum_rows][accum_columns]; null: two passes */
    int64_t accum_rows, accum_columns;
    int32_t stages; /* stages of q and dout */
    unsigned long long *fault;
} attention_sm80_call;

/* Arguments of the delta and merge kernels. */
typedef struct attention_delta_call {
    int64_t B, H, Tq, d_v;
    attention_view out, dout, dlse, delta;
} attention_delta_call;

typedef struct attention_merge_call {
    int64_t B, H, Tq, d_v;
    attention_view out_a, out_b, lse_a, lse_b, sink, out, lse;
} attention_merge_call;

#endif
