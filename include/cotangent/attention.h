/* SPDX-License-Identifier: Apache-2.0
 *
 * cotangent/attention.h: softmax(Q K^T) V, forward and backward, and the primitives that put it together from blocks.
 *
 * Symbols: B batch, Tq queries and Tk keys of a sequence, H query heads, Hkv key-value heads (H is a multiple of Hkv:
 * query head h reads key-value head h / (H/Hkv)), d the size of a query and of a key, dv that of a value. For query i
 * and key j of one sequence and head, with off = (number of its keys) - (number of its queries):
 *
 *     c = scale * sum_c q[i,c] * k[j,c];    with softcap: c = softcap * tanh(c / softcap)
 *     s = c - alibi_slopes[h] * |i + off - j| + bias[i,j]
 *     s = -inf unless j is visible:  i + off - window_left <= j <= i + off + window_right;  causal: j <= i + off
 *     lse[i] = log(sum_j exp(s[j]) + exp(sink[h]))              natural logarithm; without sink that term is absent
 *     P[j] = exp(s[j] - lse[i]);    out[i] = sum_j P[j] * m[i,j] / keep * v[j]
 *
 * A row whose largest score is far from 0 loses precision: lse is a float32 beside which the scores' differences are
 * small. P has a relative error of up to |lse| 2^-24. A bias that is meant as a mask is -inf: with -1e9 for each visible
 * key of a row, its P in the backward is 1 for each key.
 *
 * The diagonal of causal masks and windows ends in the lower right corner, where the last query meets the last key.
 * A query without a visible key gets out = 0 and lse = sink, or -inf without a sink.
 *
 * Shapes: q [B,Tq,H,d], k [B,Tk,Hkv,d], v [B,Tk,Hkv,dv], out [B,Tq,H,dv], lse [B,H,Tq]. Any strides; fast kernels
 * want the last axis of q, k, v, out and their gradients contiguous.
 * Packed sequences: with cu_seqlens_q and cu_seqlens_k (i32 [B+1]) sequence b is rows cu_seqlens[b] .. cu_seqlens[b+1]
 * of q [total_q,H,d], k [total_k,Hkv,d], v, out, and lse is [H,total_q]. They start at 0, never descend, end at most at
 * total; a sequence may be empty; max_seqlen_q and max_seqlen_k are at least the longest one's lengths. Rows beyond the
 * last sequence are treated as rows beyond seqused.
 * seqused_q, seqused_k (i32 [B]): only so many queries and keys of each sequence count, and off is their difference.
 * Queries beyond get out = 0, lse = -inf and no gradient; keys beyond get gradients of 0.
 *
 * Dtypes: q, k, v, dout alike, of f32, f16, bf16; out and dq, dk, dv as q, or f32 (for blocks that are to be merged or
 * summed); lse, dlse, delta f32; sink, alibi_slopes, bias and their gradients any of the three, each by itself. Sums
 * are float32; P and dS = P * (dP - D) may be rounded to q's dtype between two products. f64 (CPU): everything f64. Where the
 * processor has AMX, numbers of f32 below 2^-110 lose their last bits, and with one above 3.38e38 a product is NaN.
 *
 * Dropout: m[i,j] keeps an element with probability keep = 1 - P16/65536, P16 = round(65536 * dropout_p). Nothing is
 * stored: the 16 bits that are compared with P16 come from Philox4x32-10 with the key dropout_seed and the counter
 * {dropout_offset, n}, n = r * ceil(L/8) + j/8, j % 8 picking two bytes of the 16 (word (j%8)/2, its low half when j is
 * even); L is Tk or max_seqlen_k, r = h * R + row, R the number of query rows (B*Tq, or cu_seqlens_q[B]), row = b*Tq +
 * i, or the packed row. The same on every backend. dropout_seed_memory and dropout_offset_memory, i32 [2] (low word, high
 * word), are added to seed and offset (modulo 2^64); they are read where and when the work runs, so that a captured graph
 * can draw anew at each replay.
 *
 * Blocks (context parallelism): the queries of a call may be rows q_begin .. q_begin+Tq of sequences of q_length
 * queries, its keys k_begin .. k_begin+Tk of k_length. Masks, ALiBi, dropout (Tq, Tk and L above mean the whole
 * lengths there) and seqused then count in the whole sequence; bias is the block's own part. lse and out are those of
 * the block's keys alone, sink left out; cot_attention_merge puts two such results together. The backward of a block
 * takes the lse of the whole, and as delta the D of the whole, and gives that block's share of the gradients: dq is
 * their sum over the key blocks, dk and dv over the query blocks (accumulate). Not with cu_seqlens.
 *
 * NaN and infinities follow the formulas. A NaN in q[i], or in a visible k[j], makes lse[i] and out[i] NaN; one in a
 * visible v[j,c] makes out[i,c] NaN; a score of +inf makes lse[i] and out[i] NaN (inf - inf). In the backward such a row gives
 * NaN to its dq and to the dk and dv of every key that it sees. Rows beyond the sequence, or beyond seqused, never show.
 * Keys outside the mask never show in lse. Fast kernels multiply tiles of up to 256 queries and 256 keys, in which a pair
 * outside the mask has the weight 0: where a tile holds a visible pair, a NaN or an infinity of v (forward), or of q, k, v,
 * dout, lse or delta (backward), may give NaN to out, dq, dk and dv of other rows of that tile (0 * NaN), and to no others.
 *
 * Outputs may not overlap each other or any input, but for those that merge names.
 *
 * Errors, for all calls: COT_INVALID_ARGUMENT (queue, args, struct_size, a required tensor missing, options out of
 * range or in conflict), COT_INVALID_SHAPE (sizes that do not fit, H not a multiple of Hkv), COT_INVALID_DTYPE,
 * COT_INVALID_LAYOUT (misaligned data, output with repeated elements, overlap), COT_INVALID_DATA (cu_seqlens, seqused),
 * COT_UNSUPPORTED (a forced kernel refuses), COT_WORKSPACE_TOO_SMALL, COT_OUT_OF_MEMORY.
 */
#ifndef COTANGENT_ATTENTION_H
#define COTANGENT_ATTENTION_H

#include <cotangent/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The arguments of cot_attention_forward; the formulas are at the top. */
typedef struct cot_attention_forward_args {
    size_t struct_size;
    int32_t causal;                   /* 0 or 1 */
    int32_t window;                   /* 1: the two sizes below count; 0: both must be 0 */
    int64_t window_left;              /* keys to the left of the diagonal; -1 = all */
    int64_t window_right;             /* keys to the right of it; -1 = all; causal: 0 or -1 */
    double scale;                     /* 0 = 1/sqrt(d) */
    double softcap;                   /* 0 = none */
    double dropout_p;                 /* the share that is dropped, in [0,1]; 0 = none */
    uint64_t dropout_seed;            /* of the mask */
    uint64_t dropout_offset;          /* of the mask */
    int64_t max_seqlen_q;             /* with cu_seqlens; else 0 */
    int64_t max_seqlen_k;             /* with cu_seqlens; else 0 */
    int64_t q_begin;                  /* of a block of queries: its first row's number in the whole sequence */
    int64_t q_length;                 /* of a block of queries: the whole sequence's rows; 0 = the queries are whole */
    int64_t k_begin;                  /* of a block of keys, likewise */
    int64_t k_length;                 /* of a block of keys, likewise */
    cot_tensor q;                     /* [B,Tq,H,d]   packed [total_q,H,d] */
    cot_tensor k;                     /* [B,Tk,Hkv,d]        [total_k,Hkv,d] */
    cot_tensor v;                     /* [B,Tk,Hkv,dv]       [total_k,Hkv,dv] */
    cot_tensor cu_seqlens_q;          /* i32 [B+1]; with cu_seqlens_k */
    cot_tensor cu_seqlens_k;          /* i32 [B+1]; with cu_seqlens_q */
    cot_tensor seqused_q;             /* i32 [B], optional */
    cot_tensor seqused_k;             /* i32 [B], optional */
    cot_tensor sink;                  /* [H], optional: a logit beside the keys', with no value */
    cot_tensor alibi_slopes;          /* [H] or [B,H], optional */
    cot_tensor bias;                  /* [B or 1, H or 1, Tq or 1, Tk or 1], packed with the max lengths; optional */
    cot_tensor dropout_seed_memory;   /* i32 [2], optional */
    cot_tensor dropout_offset_memory; /* i32 [2], optional */
    cot_tensor out;                   /* out [B,Tq,H,dv]     [total_q,H,dv]; optional */
    cot_tensor lse;                   /* out [B,H,Tq]        [H,total_q]; optional */
    void *workspace;                  /* NULL = the queue's pool; else 64-byte aligned, workspace_bytes of it */
    size_t workspace_bytes;           /* of workspace; 0 with NULL */
} cot_attention_forward_args;

/* out and lse from q, k, v. */
COT_API cot_status cot_attention_forward(cot_queue *queue, const cot_attention_forward_args *args);

/* Writes the bytes of workspace that this call would need; checks the arguments as the call itself does, but for
 * the data pointers, the overlaps and the index data. It grows linearly with Tq and Tk. */
COT_API cot_status cot_attention_forward_workspace(cot_queue *queue, const cot_attention_forward_args *args,
                                                   size_t *bytes);

/* With m = 1, keep = 1 where there is no dropout, t = tanh(c / softcap) (0 without):
 *
 *     D[i] = sum_c dout[i,c] * out[i,c] - dlse[i]              or what delta holds
 *     dP[j] = sum_c dout[i,c] * v[j,c] * m[i,j] / keep;        dS[j] = P[j] * (dP[j] - D[i]);   dZ = dS * (1 - t^2)
 *     dq[i] = scale * sum_j dZ[i,j] * k[j]                     dk[j] = scale * sum_{h,i} dZ[i,j] * q[i]
 *     dv[j] = sum_{h,i} P[i,j] * m[i,j] / keep * dout[i]       h over the query heads of the group
 *     dbias = dS, summed over the axes where bias has size 1   dsink[h] = -sum_{b,i} exp(sink[h] - lse[i]) * D[i]
 *
 * where P = exp(s - lse) comes from the lse that is given. A query whose lse is -inf passes no gradient. */
typedef struct cot_attention_backward_args {
    size_t struct_size;
    int32_t causal;               /* options and inputs of the forward's names: as in the forward */
    int32_t window;               /* as in the forward */
    int64_t window_left;          /* as in the forward */
    int64_t window_right;         /* as in the forward */
    double scale;                 /* as in the forward */
    double softcap;               /* as in the forward */
    double dropout_p;             /* as in the forward */
    uint64_t dropout_seed;        /* as in the forward */
    uint64_t dropout_offset;      /* as in the forward */
    int64_t max_seqlen_q;         /* as in the forward */
    int64_t max_seqlen_k;         /* as in the forward */
    int64_t q_begin;              /* as in the forward */
    int64_t q_length;             /* as in the forward */
    int64_t k_begin;              /* as in the forward */
    int64_t k_length;             /* as in the forward */
    int32_t accumulate;           /* 0: gradients =;  1: all of dq, dk, dv, dsink, dbias += */
    int32_t allow_nondeterminism; /* 1: sums in any order where that is faster, other bits every run. The CPU's kernels
                                     gain nothing by it and stay deterministic */
    cot_tensor q;                 /* as in the forward */
    cot_tensor k;                 /* as in the forward */
    cot_tensor v;                 /* as in the forward */
    cot_tensor cu_seqlens_q;      /* as in the forward */
    cot_tensor cu_seqlens_k;      /* as in the forward */
    cot_tensor seqused_q;         /* as in the forward */
    cot_tensor seqused_k;         /* as in the forward */
    cot_tensor sink;              /* needed for dsink alone: lse has it */
    cot_tensor alibi_slopes;      /* as in the forward */
    cot_tensor bias;              /* as in the forward */
    cot_tensor dropout_seed_memory;   /* as in the forward */
    cot_tensor dropout_offset_memory; /* as in the forward */
    cot_tensor lse;                   /* [B,H,Tq]      packed [H,total_q], what the forward gave */
    cot_tensor out;                   /* [B,Tq,H,dv]   [total_q,H,dv], what the forward gave; absent with delta */
    cot_tensor dout;                  /* like out, q's dtype */
    cot_tensor dlse;                  /* like lse; optional (absent = zero); absent with delta */
    cot_tensor delta;                 /* like lse: D, from cot_attention_delta; in place of out and dlse */
    cot_tensor dq;                    /* out, like q; optional */
    cot_tensor dk;                    /* out, like k; optional */
    cot_tensor dv;                    /* out, like v; optional */
    cot_tensor dsink;                 /* out [H]; optional; needs sink */
    cot_tensor dbias;                 /* out, bias's shape; optional; needs bias */
    void *workspace;                  /* as in the forward */
    size_t workspace_bytes;           /* as in the forward */
} cot_attention_backward_args;

/* dq, dk, dv, dsink and dbias from what the forward had and gave. */
COT_API cot_status cot_attention_backward(cot_queue *queue, const cot_attention_backward_args *args);

/* As cot_attention_forward_workspace. */
COT_API cot_status cot_attention_backward_workspace(cot_queue *queue, const cot_attention_backward_args *args,
                                                    size_t *bytes);

/* delta[i] = sum_c dout[i,c] * out[i,c] - dlse[i]: what the backward of every block of one attention has in common. */
typedef struct cot_attention_delta_args {
    size_t struct_size;
    cot_tensor out;   /* [B,Tq,H,dv]   or [total_q,H,dv] */
    cot_tensor dout;  /* like out; dtypes of their own */
    cot_tensor dlse;  /* [B,H,Tq]      or [H,total_q]; optional (absent = zero) */
    cot_tensor delta; /* out [B,H,Tq]  or [H,total_q] */
    void *workspace;
    size_t workspace_bytes;
} cot_attention_delta_args;

/* delta from out, dout and dlse. */
COT_API cot_status cot_attention_delta(cot_queue *queue, const cot_attention_delta_args *args);

/* As cot_attention_forward_workspace. */
COT_API cot_status cot_attention_delta_workspace(cot_queue *queue, const cot_attention_delta_args *args, size_t *bytes);

/* Two results over different keys become the one over all of them:
 *
 *     lse = log(exp(lse_a) + exp(lse_b) + exp(sink))          the last term only with sink: give it once
 *     out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b
 *
 * A row where lse is -inf gets out = 0. out may be out_a and lse may be lse_a, the same view. */
typedef struct cot_attention_merge_args {
    size_t struct_size;
    cot_tensor out_a; /* [B,Tq,H,dv]   or [total_q,H,dv]; any of the float dtypes */
    cot_tensor out_b; /* like out_a; any of the float dtypes */
    cot_tensor lse_a; /* [B,H,Tq]      or [H,total_q] */
    cot_tensor lse_b; /* like lse_a */
    cot_tensor sink;  /* [H], optional */
    cot_tensor out;   /* out, like out_a but for the dtype; optional */
    cot_tensor lse;   /* out, like lse_a; optional */
    void *workspace;
    size_t workspace_bytes;
} cot_attention_merge_args;

/* out and lse over all keys from those over two disjoint sets of them. */
COT_API cot_status cot_attention_merge(cot_queue *queue, const cot_attention_merge_args *args);

/* As cot_attention_forward_workspace. */
COT_API cot_status cot_attention_merge_workspace(cot_queue *queue, const cot_attention_merge_args *args, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
