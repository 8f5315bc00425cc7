/* SPDX-License-Identifier: Apache-2.0
 * attention_cuda.h: what the host hands to the CUDA kernels of this op, by value. For C and CUDA. */
#ifndef COT_ATTENTION_CUDA_H
#define COT_ATTENTION_CUDA_H

#include <stdint.h>

/* How the backward for Hopper divides the work: a block takes 128 keys, 64 for each of its two consumer groups, and walks
 * over tiles of 64 queries. */
enum {
    ATTENTION_QUERIES = 64,
    ATTENTION_KEYS = 128,
    ATTENTION_Q_STAGES = 3,
    ATTENTION_DOUT_STAGES = 2,
    ATTENTION_DS_STAGES = 2,
    ATTENTION_DQ_STAGES = 3,
    ATTENTION_SECTION = 4,     /* heads whose blocks are mixed */
    ATTENTION_DOUT_CHUNKS = 3, /* at d = 256, of 128 columns */
    ATTENTION_GROUPS = 4,      /* of 128 threads */
    ATTENTION_RAISE = 8,       /* up to d = 128 P in f16 is 2^8 times as large as it should be: attention_bwd_sm90.cu */
    ATTENTION_DQ_SLICE = 4096  /* floats of 64 queries and 64 columns of dq, in the order of wgmma's accumulators */
};

#define ATTENTION_LOWER 0x1p-9f /* takes P as dS has it back to its size, together with D */

/* A tensor on the device; null = absent. Strides in elements: of q's kin b, t, h; of lse's kin b, h, t. */
typedef struct attention_array {
    void *data;
    int64_t stride[3];
    int32_t dtype;
} attention_array;

/* How the forward for Hopper divides the work, by the sizes that a kernel has room for: DO(name, columns of q and k, of
 * v, keys of a tile, groups of 64 queries, tiles of Q, stages of K and V). Smaller sizes are filled up with zeros. */
/* clang-format off */
#define ATTENTION_FWD_SMALL(DO) DO(d64, 64, 64, 128, 3, 2, 4) DO(d96, 96, 96, 128, 2, 1, 2) DO(d128, 128, 128, 128, 2, 1, 2)
#define ATTENTION_FWD_LARGE(DO) DO(d192_v128, 192, 128, 128, 2, 1, 2) DO(d192, 192, 192, 112, 2, 1, 2) DO(d256, 256, 256, 80, 2, 1, 2)
/* Those for softcap and negative scales, whose code slows the others down. */
#define ATTENTION_FWD_SMALL_ALL(DO) DO(d64_all, 64, 64, 128, 3, 2, 4) DO(d128_all, 128, 128, 128, 2, 1, 2)
#define ATTENTION_FWD_LARGE_ALL(DO) DO(d256_all, 256, 256, 80, 2, 1, 2)
/* clang-format on */

/* Shared memory: tiles of Q, O (see STAGED), K and V, columns by 64; descriptions of tiles, and barriers. */
#define ATTENTION_FWD_SHARED(d, dv, keys, groups, queries, stages)                                       \
    (((d) + 63) / 64 * (groups) * (queries)*8192 + ((d) <= 128 ? ((dv) + 63) / 64 * (groups)*8192 : 0) + \
     (stages) * (((d) + 63) / 64 + ((dv) + 63) / 64) * (keys)*128 + 1024)

/* A sequence as the first kernel of a call writes it down where sequences differ, its lengths clamped. */
typedef struct attention_placed {
    int32_t first_tile, first_block; /* tiles of queries and blocks of keys of the sequences before it, for one head */
    int32_t q_row, q_rows, used_q;   /* rows of the tensors' views; those of them that count */
    int32_t k_row, k_rows, used_k;
    int64_t diagonal; /* query i's is key i + diagonal */
} attention_placed;

/* What that kernel needs to know: attention_place_sm90.cu. */
typedef struct attention_placing {
    int64_t q_begin, q_length, k_begin, k_length;
    int32_t B, packed;
    int32_t Tq, Tk;               /* rows of q and k; packed: of all sequences */
    int32_t longest_q, longest_k; /* packed: sequences are to be no longer */
    int32_t sequences;            /* B; packed: one more, the rows beyond the last one */
    int32_t most_tiles;           /* that there is room for: data out of order would ask for more */
    int32_t queries, keys;        /* rows of a tile and of a block */
    int32_t blocks;               /* for the counter to begin with */
    attention_array cu_q, cu_k, used_q, used_k;
    attention_placed *table; /* workspace: [sequences + 1]; null where all sequences are whole */
    uint32_t *counter;       /* workspace: the next tile; null where nobody counts */
    unsigned long long *fault;
} attention_placing;

/* tanh(x) = x (C0 + C1 x^2 + C2 x^4 + C3 x^6) up to NEAR, off by 2^-24 of it. */
#define ATTENTION_TANH_NEAR 0.375f
#define ATTENTION_TANH_C0 0.99999994f
#define ATTENTION_TANH_C1 (-0.33331975f)
#define ATTENTION_TANH_C2 0.13284503f
#define ATTENTION_TANH_C3 (-0.04827226f)

/* The same up to NEARER with less of it: x (B0 + B1 x^2 + B2 x^4), off by 1.2 2^-24 of it. */
#define ATTENTION_TANH_NEARER 0.1875f
#define ATTENTION_TANH_B0 0.99999993f
#define ATTENTION_TANH_B1 (-0.33329659f)
#define ATTENTION_TANH_B2 0.13053289f

/* softcap: a score is factor tanh(scale q.k). Where (q.k)^2 <= near, that is q.k times the polynomial in (q.k)^2 with the
 * coefficients `series`; where it is <= nearer, `brief` does: there 2 to the score is between below and above. All 0 without
 * softcap. */
typedef struct attention_softcap {
    float scale, factor, near, nearer, above, below, series[4], brief[3];
} attention_softcap;

/* softcap in the backward for Hopper, in base 2: a score is factor tanh(scale q.k). By u = (q.k)^2: where u <= near[0], that is
 * q.k times the polynomial brief[] in u, and `slopes` times 1 - tanh^2 is brief_slope[]; where u <= near[1], series[] and
 * slope[]. Both are off by less than P and dS are when they are rounded. */
typedef struct attention_bwd_softcap {
    float scale, factor, slopes, near[2], brief[2], brief_slope[2], series[3], slope[3];
} attention_bwd_softcap;

typedef struct attention_bwd_call {
    attention_placing place; /* with a table (as the kernels named ..._all want), what follows by sequence is unknown */
    int64_t B, H, Hkv, Tq, Tk, d, dv;
    int64_t tiles;       /* of ATTENTION_QUERIES queries */
    int64_t diagonal;    /* query i's is key i + diagonal */
    int64_t left, right; /* query i sees the keys i + diagonal - left .. i + diagonal + right */
    int32_t causal, ordered, accumulate;
    int32_t out_in_vectors; /* rows of out and dout are 16-bit elements at multiples of 16 bytes */
    int32_t dq_in_vectors, dk_in_vectors, dv_in_vectors; /* and nothing is accumulated */
    float scale, scale_log2;                             /* scale_log2: of scores, scale or softcap times log2(e) */
    float raise, lower; /* ATTENTION_RAISE and _LOWER where P is raised, else 0 and 1 */
    attention_bwd_softcap cap;
    attention_array lse, out, dout, dlse, delta, sink, grad_q, grad_k, grad_v, dsink;
    /* Workspace, by sequence and head. */
    float *lse2;        /* [tiles * 64] lse log2(e) - raise; inf where a query passes no gradient, and beyond Tq */
    float *row_delta;   /* [tiles * 64] D times lower, 0 beyond Tq */
    float *dq_sums;     /* [tiles][d/64][ATTENTION_DQ_SLICE] */
    uint32_t *counters; /* [tiles][d/64] blocks that have added to a slice */
} attention_bwd_call;

typedef struct attention_fwd_call {
    attention_placing place;
    int64_t left, right, diagonal; /* query i sees the keys i + diagonal - left .. i + diagonal + right */
    int32_t H, heads_of_kv, d, dv;
    int32_t tiles;              /* of a sequence; packed: not known */
    int32_t section;            /* heads whose tiles are mixed: their K and V lie in the second-level cache together */
    int32_t out_in_vectors;     /* rows of out are at multiples of 16 bytes */
    attention_softcap cap;      /* its scores are exponents */
    float scale_log2;           /* of scores, positive: |scale| times log2(e); 1 with softcap */
    float natural, natural_low; /* one unit of a score times scale_log2 is natural + natural_low in lse */
    attention_array out, lse, sink;
} attention_fwd_call;

#endif
