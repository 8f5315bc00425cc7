/* SPDX-License-Identifier: Apache-2.0
 * attention_sm90.h: arguments that the host passes to the Hopper kernels of this op, by value. For C and CUDA. */
#ifndef COT_ATTENTION_SM90_H
#define COT_ATTENTION_SM90_H

#include <stdint.h>

/* How the backward for Hopper divides the work: a thread block takes a key block of 128 keys, 64 for each of its two
 * consumer warpgroups, and loops over tiles of ATTENTION_BWD_TILE_QUERIES(tile_columns) queries. Above 128 tile
 * columns, the two thread blocks of a cluster take 64 keys of a key block each. */
#define ATTENTION_BWD_TILE_QUERIES(tile_columns) ((tile_columns) == 64 ? 128 : 64)
enum {
    ATTENTION_BWD_KEYS = 128,
    ATTENTION_BWD_Q_STAGES = 3,
    ATTENTION_BWD_DOUT_STAGES = 2,
    ATTENTION_BWD_DS_STAGES = 2,
    ATTENTION_BWD_DQ_STAGES = 3,
    ATTENTION_BWD_PREPROCESS_ROWS = 2, /* rows that a thread of `preprocess` handles */
    ATTENTION_BWD_WIDE_KEY_SPLIT = 2,  /* above 128 tile columns, thread blocks that divide the keys of a key block */
    ATTENTION_BWD_DELTA_WARPS = 8, /* warps of a thread block of the main kernel that compute delta of later heads */
    ATTENTION_BWD_WARPGROUPS = 4,  /* warpgroups of a thread block, 128 threads each */
    ATTENTION_BWD_P_EXPONENT = 8,  /* d and d_v up to 128: P in f16 is scaled by 2^8, see dv_scale */
    /* A dQ tile: 64 queries and 64 columns of dq, in the order of wgmma accumulators. */
    ATTENTION_BWD_DQ_TILE_FLOATS = 4096
};

/* Bytes of shared memory, for the same members as wide_shared and bwd_shared have. A 64 x 64 tile is 64 rows of 64
 * 16-bit columns. */
/* clang-format off */
enum { ATTENTION_BWD_TILE_64X64_BYTES = 64 * 64 * 2 };

/* attention_bwd_wide_sm90.cu, d and d_v up to 192: dQ by tiles. */
#define ATTENTION_BWD_WIDE_64X64_TILES_BY_TILES(d, d_v) \
    ((d) / 64           /* K of 64 keys */              \
     + (d) / 64         /* the peer's K */              \
     + (d_v) / 64       /* V of 64 keys */              \
     + 2 * ((d) / 64)   /* 2 stages of Q */             \
     + 2 * ((d_v) / 64) /* 2 stages of dO */            \
     + 2                /* 2 stages of dS */            \
     + 1                /* the peer's dS */             \
     + 2 * 2)           /* 2 stages of a dQ tile */
/* d or d_v above 192: dQ by columns. */
#define ATTENTION_BWD_WIDE_64X64_TILES_BY_COLUMNS        \
    (4       /* K of 64 keys */                          \
     + 2     /* half of the columns of the peer's K */   \
     + 4     /* V of 64 keys */                          \
     + 2 * 4 /* 2 stages of Q */                         \
     + 3 * 2 /* 3 stages of half of the columns of dO */ \
     + 1     /* dS */                                    \
     + 1     /* the peer's dS */                         \
     + 2)    /* a dQ tile */
#define ATTENTION_BWD_WIDE_SHARED_BYTES(d, d_v)                                                                     \
    (ATTENTION_BWD_TILE_64X64_BYTES *                                                                               \
         ((d) <= 192 ? ATTENTION_BWD_WIDE_64X64_TILES_BY_TILES(d, d_v) : ATTENTION_BWD_WIDE_64X64_TILES_BY_COLUMNS) \
     + 2 * 2 * 64 * 4                 /* 2 stages of lse_log2 and of delta, 64 queries each */                      \
     + ((d) <= 192 ? 2 : 1) * 128 * 4 /* low bits of P: a word for each thread of a warpgroup and stage of dS */    \
     + 512)                           /* barriers, work */

/* The members of bwd_shared that the key-block kernel and the pair kernel have in the same size. */
#define ATTENTION_BWD_COMMON_SHARED_BYTES(columns)                                                           \
    (ATTENTION_BWD_KEYS * (columns) * 2                                                       /* K */        \
     + ATTENTION_BWD_KEYS * (columns) * 2                                                     /* V */        \
     + ATTENTION_BWD_Q_STAGES * ATTENTION_BWD_TILE_QUERIES(columns) * (columns) * 2           /* Q */        \
     + ATTENTION_BWD_DOUT_STAGES * ATTENTION_BWD_TILE_QUERIES(columns) * (columns) * 2        /* dO */       \
     + ATTENTION_BWD_DS_STAGES * ATTENTION_BWD_TILE_QUERIES(columns) * ATTENTION_BWD_KEYS * 2 /* dS */       \
     + ATTENTION_BWD_Q_STAGES * ATTENTION_BWD_TILE_QUERIES(columns) * 4                       /* lse_log2 */ \
     + ATTENTION_BWD_DOUT_STAGES * ATTENTION_BWD_TILE_QUERIES(columns) * 4                    /* delta */    \
     + 512)                                                                                   /* barriers, work */

/* attention_bwd_key_blocks_sm90.cu. */
#define ATTENTION_BWD_KEY_BLOCKS_SHARED_BYTES(columns) \
    (ATTENTION_BWD_COMMON_SHARED_BYTES(columns)        \
     + ATTENTION_BWD_DQ_STAGES * ATTENTION_BWD_DQ_TILE_FLOATS * 4) /* dQ tiles */

/* attention_bwd_pairs_sm90.cu. */
#define ATTENTION_BWD_PAIRS_SHARED_BYTES(columns)                                        \
    (ATTENTION_BWD_COMMON_SHARED_BYTES(columns)                                          \
     + ATTENTION_BWD_DQ_TILE_FLOATS * 4   /* one stage of dQ tiles */                    \
     + 2 * ATTENTION_BWD_TILE_64X64_BYTES /* the peer's dS, 128 keys, 64 queries */      \
     + 2 * ATTENTION_BWD_TILE_64X64_BYTES) /* the peer's K, 128 keys, 64 columns */
/* clang-format on */

#define ATTENTION_BWD_DP_SCALE 0x1p-8f /* scale of dP and delta in f16, which removes the scale of P from dS */

/* A tensor on the device; null = absent. Strides in elements: b, t, h for tensors like q; b, h, t for tensors like
 * lse. */
typedef struct attention_array {
    void *data;
    int64_t stride[3];
    int32_t dtype;
} attention_array;

/* Tiles of the forward kernels for Hopper: DO(name, columns of q and k, columns of v, keys of a tile, consumer
 * warpgroups of 64 queries, stages of Q, stages of K and V). Smaller d and d_v are filled up with zeros. */
/* clang-format off */
#define ATTENTION_FWD_SMALL(DO) DO(d64, 64, 64, 128, 3, 2, 4) DO(d96, 96, 96, 128, 2, 1, 2) DO(d128, 128, 128, 128, 2, 1, 2)
#define ATTENTION_FWD_LARGE(DO) DO(d192_v128, 192, 128, 128, 2, 1, 2) DO(d192, 192, 192, 112, 2, 1, 2) DO(d256, 256, 256, 80, 2, 1, 2)
/* Kernels for softcap and negative scales. Their code would slow the others down. */
#define ATTENTION_FWD_SMALL_SOFTCAP(DO) DO(d64_softcap, 64, 64, 128, 3, 2, 4) DO(d128_softcap, 128, 128, 128, 2, 1, 2)
#define ATTENTION_FWD_LARGE_SOFTCAP(DO) DO(d256_softcap, 256, 256, 80, 2, 1, 2)
/* clang-format on */

/* Bytes of shared memory: Q, O (see STAGE_O), K and V in panels of 64 columns, tile descriptions, barriers. */
#define ATTENTION_FWD_SHARED_BYTES(d, d_v, keys, consumers, q_stages, stages)                                    \
    (((d) + 63) / 64 * (consumers) * (q_stages)*8192 + ((d) <= 128 ? ((d_v) + 63) / 64 * (consumers)*8192 : 0) + \
     (stages) * (((d) + 63) / 64 + ((d_v) + 63) / 64) * (keys)*128 + 1024)

/* A sequence, with its lengths clamped. The kernel attention_prepare writes these entries. */
typedef struct attention_seqlen_info {
    int32_t tiles_before, key_blocks_before; /* query tiles and key blocks of earlier sequences, for one head */
    int32_t q_first_row, q_rows, used_q;     /* rows of the tensors' views; used_q: those below seqused */
    int32_t k_first_row, k_rows, used_k;
    int64_t diagonal; /* with a causal mask, query i attends to keys up to i + diagonal */
} attention_seqlen_info;

/* The sequences of a call: their rows, the sizes of the tiles that divide them, and the counter of tiles. These are the
 * arguments of the kernel attention_prepare, which writes seqlens and tile_counter. The kernels after it read both. */
typedef struct attention_sequences {
    int64_t q_begin, q_length, k_begin, k_length;
    int32_t B, packed;
    /* Rows of q and k: packed, of all sequences; otherwise of one batch element (in attention_sizes, of all). */
    int32_t rows_q, rows_k;
    int32_t max_seqlen_q, max_seqlen_k; /* packed: the longest allowed sequence */
    int32_t count;                      /* B; packed: one more, for the rows after the last sequence */
    /* Limits on the tiles and key blocks of one head, in all sequences. Invalid cu_seqlens could exceed them. */
    int32_t max_tiles, max_key_blocks;
    int32_t tile_queries, key_block_rows; /* rows of a query tile, rows of a key block */
    int32_t grid_blocks; /* grid of the next kernel. tile_counter starts here: thread block i takes tile i first */
    attention_array cu_q, cu_k, seqused_q, seqused_k;
    attention_seqlen_info *seqlens; /* workspace: [count + 1]; null: no kernel of the call needs it */
    uint32_t *tile_counter;         /* workspace: the next tile; null if each thread block has one tile */
    unsigned long long *fault;
} attention_sequences;

/* tanh(x) = x (C0 + C1 x^2 + C2 x^4 + C3 x^6) up to SERIES_MAX, relative error 2^-24. */
#define ATTENTION_TANH_SERIES_MAX 0.375f
#define ATTENTION_TANH_C0 0.99999994f
#define ATTENTION_TANH_C1 (-0.33331975f)
#define ATTENTION_TANH_C2 0.13284503f
#define ATTENTION_TANH_C3 (-0.04827226f)

/* A shorter series up to SHORT_MAX: x (B0 + B1 x^2 + B2 x^4), relative error 1.2 * 2^-24. */
#define ATTENTION_TANH_SHORT_MAX 0.1875f
#define ATTENTION_TANH_B0 0.99999993f
#define ATTENTION_TANH_B1 (-0.33329659f)
#define ATTENTION_TANH_B2 0.13053289f

/* softcap: a score is factor tanh(scale q.k).
 *   (q.k)^2 <= long_max_square    q.k times the polynomial in (q.k)^2 with the coefficients long_series[]
 *   (q.k)^2 <= short_max_square   q.k times the polynomial with the coefficients short_series[]. 2^score is then
 *                                  between short_min_exp2 and short_max_exp2
 * All members are 0 without softcap. */
typedef struct attention_softcap {
    float scale, factor, long_max_square, short_max_square, short_max_exp2, short_min_exp2, long_series[4],
        short_series[3];
} attention_softcap;

/* softcap in the backward for Hopper, in base 2: a score is factor tanh(scale q.k). With u = (q.k)^2:
 *   u <= short_max_square   the score is q.k times the polynomial short_series[] in u, and
 *                           1 - tanh^2 is the polynomial short_slope[] in u
 *   u <= long_max_square    the same with long_series[] and long_slope[]
 * Their errors are smaller than the rounding errors of P and dS. */
typedef struct attention_bwd_softcap {
    float scale, factor;
    float short_max_square, short_series[2], short_slope[2], long_max_square, long_series[3], long_slope[3];
} attention_bwd_softcap;

/* How a kernel stores a gradient. */
enum attention_store_method {
    ATTENTION_STORE_ELEMENTS,    /* one element at a time, any strides; also 16-bit gradients that accumulate */
    ATTENTION_STORE_VECTORS_16,  /* vectors of 16-bit elements, which do not accumulate */
    ATTENTION_STORE_VECTORS_F32, /* vectors of float32 elements, which may accumulate */
};

typedef struct attention_bwd_call {
    /* If seqlens is set (..._general and ..._softcap kernels), Tq, Tk, tiles_per_head and diagonal must not be read,
     * and unit_count is an upper bound: the kernels read them from seqlens. */
    attention_sequences sequences;
    int64_t B, H, Hkv, Tq, Tk, d_qk, d_v;
    int64_t tiles_per_head; /* query tiles of one head in one sequence */
    uint32_t head_split;    /* thread blocks that divide the query heads of a unit: 1, or the 2 of a cluster */
    uint32_t unit_count;    /* units of the call: key blocks, in the pair kernel pairs of key blocks */
    /* 2^31 / query heads of a thread block, rounded up: for divisions by multiplication */
    uint32_t inverse_query_heads;
    int64_t diagonal;     /* causal: query i attends to keys up to i + diagonal */
    int64_t left, right;  /* query i attends to keys i + diagonal - left .. i + diagonal + right */
    int32_t tile_queries; /* queries of a tile: ATTENTION_BWD_TILE_QUERIES */
    int32_t causal, deterministic, accumulate;
    int32_t heads_per_section;       /* key-value heads whose units are interleaved */
    int32_t first_ascending_section; /* from this section on, units are taken by ascending keys */
    int32_t descending_tiles;        /* in those sections, the tiles of a unit are taken in descending order */
    int32_t stores_dq;               /* the main kernel stores dq: no kernel after it does */
    int32_t loads_out_vectors;       /* rows of out and dout are 16-bit elements at multiples of 16 bytes */
    int32_t dq_store_method, dk_store_method, dv_store_method; /* attention_store_method */
    float scale;
    float softmax_scale_log2; /* signed scale times log2(e); not read with softcap */
    /* Subtracted from lse_log2: scales P by 2^p_exponent. The wide kernel scales P itself (P_EXPONENT there). */
    float p_exponent;
    float dp_scale; /* dP is dp_scale times as large; 1 if it is not scaled */
    attention_bwd_softcap cap;
    attention_array lse, out, dout, dlse, delta, sink, dq, dk, dv, dsink;
    /* Workspace, by sequence and head. DQ_TILES_PER_QUERY_TILE = tile_queries / 64 * tile_columns / 64. */
    /* [tiles * tile_queries] lse in base 2: lse log2(e) - p_exponent; inf for queries without gradient and after Tq */
    float *lse_log2;
    float *scaled_delta; /* [tiles * tile_queries] delta times dp_scale, 0 after Tq */
    float *dq_accum;     /* [tiles][DQ_TILES_PER_QUERY_TILE][ATTENTION_BWD_DQ_TILE_FLOATS] */
    /* [tiles][DQ_TILES_PER_QUERY_TILE] units that have added to a dQ tile. unit_counter and delta_done follow: these
     * counter_count counters are cleared by `preprocess`. */
    uint32_t *dq_semaphore;
    int64_t counter_count;
    uint32_t *unit_counter; /* number of the next unit; null: a thread block or cluster takes that of its index */
    /* `preprocess` computes scaled_delta of the first preprocessed_heads query heads of the call (b H + h). The main kernel
     * computes that of the others, see attention_bwd_delta_sm90.cuh. There are none if delta_shares is 0. */
    int32_t preprocessed_heads;
    uint32_t delta_shares, delta_warps; /* shares of the others, and warps of all shares */
    uint32_t *delta_done;               /* [sections] warps that have finished delta of a section */
} attention_bwd_call;

typedef struct attention_fwd_call {
    attention_sequences sequences;
    int64_t left, right, diagonal; /* query i attends to keys i + diagonal - left .. i + diagonal + right */
    int32_t H, heads_per_kv_head, d_qk, d_v;
    int32_t tiles;                  /* query tiles of a sequence; packed: must not be read */
    int32_t heads_per_section;      /* heads whose tiles are interleaved */
    int32_t prefetch_distance;      /* key tiles ahead that are loaded to the L2 cache; 0: none */
    int32_t stores_out_vectors;     /* rows of out are 16-bit elements at multiples of 16 bytes */
    attention_softcap cap;          /* its scores are exponents of 2 */
    float softmax_scale_log2;       /* of scores, positive: |scale| times log2(e); 1 with softcap */
    float lse_scale, lse_scale_low; /* lse per unit of (score times softmax_scale_log2), as high and low part */
    attention_array out, lse, sink;
} attention_fwd_call;

#endif
