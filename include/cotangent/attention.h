/* SPDX-License-Identifier: Apache-2.0
 *
 * cotangent/attention.h: softmax(Q K^T) V, forward and backward, and two calls that combine the results of
 * blocks of keys (delta, merge).
 *
 * Symbols: B batch, Tq queries and Tk keys of a sequence, H query heads, Hkv key-value heads (H is a multiple of Hkv:
 * query head h reads key-value head h / (H/Hkv)), d the size of a query and of a key, d_v the size of a value. For
 * query i and key j of one sequence and head, with diagonal = (keys of the sequence) - (queries of the sequence):
 *
 *     x = scale * sum_c q[i,c] * k[j,c];    with softcap: y = softcap * tanh(x / softcap), else y = x
 *     s = y - alibi_slopes[h] * |i + diagonal - j| + bias[i,j]
 *     s = -inf unless j is visible:  i + diagonal - window_left <= j <= i + diagonal + window_right;
 *                                    causal: j <= i + diagonal
 *     lse[i] = log(sum_j exp(s[j]) + exp(sink[h]))              natural logarithm; without sink that term is absent
 *     P[j] = exp(s[j] - lse[i]);    out[i] = sum_j P[j] * m[i,j] / keep * v[j]
 *     m[i,j] / keep: the dropout factor, see below; 1 without dropout, 0 with dropout_p = 1
 *
 * The larger |lse| is, the less precise P is: lse is a float32, so P has a relative error of up to |lse| 2^-24. A bias
 * that is used as a mask should be -inf. With a bias of -1e9 for each visible key of a row, the backward computes P = 1
 * for each of these keys.
 *
 * Causal masks and windows are aligned to the lower right corner, where the last query meets the last key.
 * A query without a visible key gets out = 0 and lse = sink[h], or lse = -inf without a sink.
 *
 * Shapes: q [B,Tq,H,d], k [B,Tk,Hkv,d], v [B,Tk,Hkv,d_v], out [B,Tq,H,d_v], lse [B,H,Tq]. Strides are arbitrary.
 * Optimised kernels need the last axis of q, k, v, out and their gradients to be contiguous.
 * Packed sequences: cu_seqlens_q and cu_seqlens_k are i32 [B+1]. Sequence b is rows [cu_seqlens[b], cu_seqlens[b+1]) of
 * q [total_q,H,d], k [total_k,Hkv,d], v and out; lse is [H,total_q]. cu_seqlens starts at 0, never decreases and its
 * last entry is at most total_q (total_k). A sequence may be empty. max_seqlen_q and max_seqlen_k are at least the
 * lengths of the longest sequence. Rows after the last sequence are treated as rows beyond seqused (next paragraph).
 * seqused_q, seqused_k (i32 [B]) limit each sequence to its first queries and keys; diagonal is then the difference of
 * these numbers. Queries beyond seqused_q get out = 0, lse = -inf (also with a sink) and no gradient. Keys beyond
 * seqused_k get gradients of 0.
 *
 * Dtypes: q, k, v and dout have one dtype, f32, f16 or bf16. out, dq, dk and dv have q's dtype, or f32 (for blocks that
 * are merged or summed later). lse, dlse and delta are f32. sink, alibi_slopes, bias, dsink and dbias may each be
 * f32, f16 or bf16. Sums are float32. P and dS (of the backward) may be rounded to q's dtype between two products.
 * f64 (CPU): all tensors are f64. On a processor with AMX, f32 numbers below 2^-110 lose their last bits, and a product
 * with a number above 3.38e38 is NaN.
 *
 * Dropout: m[i,j] keeps an element with probability keep = 1 - P16/65536, P16 = round(65536 * dropout_p). The mask is
 * not stored. R is the number of query rows: B*Tq, or cu_seqlens_q[B]. L is the number of keys of a row: Tk, or
 * max_seqlen_k. r = h * R + row, where row is b*Tq + i, or the packed row. An element is dropped if 16 random bits are
 * less than P16. The bits come from Philox4x32-10 with the key dropout_seed and the counter {dropout_offset, n},
 * n = r * ceil(L/8) + floor(j/8). Element j uses 16 bits of word floor((j%8)/2) of the 4 words: the low half if j is
 * even. The mask is the same on every backend.
 * dropout_seed_tensor and dropout_offset_tensor, i32 [2] (low word, high word), are added to seed and offset (modulo
 * 2^64). They are read where and when the work runs, so that a captured graph can use a new mask at each replay.
 *
 * Blocks (context parallelism): the queries of a call may be rows q_begin .. q_begin+Tq of sequences of q_length
 * queries, and its keys may be rows k_begin .. k_begin+Tk of k_length keys. Masks, ALiBi, dropout and seqused then use
 * positions in the whole sequence; Tq, Tk and L in the dropout formulas are the whole lengths. bias has only the
 * rows and columns of this block. lse and out are those of the block's keys alone, without sink. cot_attention_merge
 * combines two such results. The backward of a block takes the lse and the delta of the whole sequence. It returns the
 * block's part of the gradients: the dq of a query is the sum over all blocks of keys, dk and dv of a key are sums over
 * all blocks of queries (use accumulate). Blocks cannot be combined with cu_seqlens.
 *
 * NaN and infinities follow the formulas:
 *   - A NaN in q[i], or in a visible k[j], makes lse[i] and out[i] NaN. So does a score of +inf (inf - inf).
 *   - A NaN in a visible v[j,c] makes out[i,c] NaN.
 *   - In the backward such a row makes its dq, and the dk and dv of every key that is visible to it, NaN.
 *   - Rows beyond the sequence, or beyond seqused, have no effect. Keys outside the mask have no effect on lse.
 *   - Optimised kernels multiply whole tiles (up to 256 queries by 256 keys) and give masked pairs the weight 0. If a
 *     tile contains a visible pair, a NaN or an infinity of v (forward), or of q, k, v, dout, lse or delta (backward),
 *     may make out, dq, dk and dv of other rows of that tile NaN (0 * NaN). It affects no other rows.
 *
 * Outputs may not overlap each other or any input, except where cot_attention_merge_args allows it.
 *
 * Errors, for all calls: COT_INVALID_ARGUMENT (queue, args, struct_size, a required tensor is missing, options out of
 * range or in conflict), COT_INVALID_SHAPE (sizes that do not match, H not a multiple of Hkv), COT_INVALID_DTYPE,
 * COT_INVALID_LAYOUT (misaligned data, output with repeated elements, overlap), COT_INVALID_DATA (cu_seqlens, seqused),
 * COT_UNSUPPORTED (no kernel of the backend supports the arguments, for example f64, or d or d_v above 256, on a GPU;
 * or the forced kernel does not), COT_WORKSPACE_TOO_SMALL, COT_OUT_OF_MEMORY; on a GPU also COT_WOULD_ALLOCATE and
 * COT_DEVICE_ERROR.
 */
#ifndef COTANGENT_ATTENTION_H
#define COTANGENT_ATTENTION_H

#include <cotangent/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The arguments of cot_attention_forward. The formulas are at the top of this header. */
typedef struct cot_attention_forward_args {
    size_t struct_size;
    int32_t causal;                   /* 0 or 1 */
    int32_t window;                   /* 1: window_left and window_right apply; 0: both must be 0 */
    int64_t window_left;              /* visible keys to the left of the diagonal; -1 = all */
    int64_t window_right;             /* visible keys to the right of the diagonal; -1 = all; with causal: 0 or -1 */
    double scale;                     /* magnitude 1e-30 to 1e30; 0 = 1/sqrt(d) */
    double softcap;                   /* softcap and |scale / softcap| in [1e-30, 1e30]; 0 = none */
    double dropout_p;                 /* the probability of dropping an element, in [0,1]; 0 = no dropout */
    uint64_t dropout_seed;            /* Philox key of the mask */
    uint64_t dropout_offset;          /* low half of the Philox counter */
    int64_t max_seqlen_q;             /* with cu_seqlens; else 0 */
    int64_t max_seqlen_k;             /* with cu_seqlens; else 0 */
    int64_t q_begin;                  /* block of queries: index of its first row in the whole sequence */
    int64_t q_length;                 /* block of queries: rows of the whole sequence; 0 = no block */
    int64_t k_begin;                  /* block of keys: index of its first row in the whole sequence */
    int64_t k_length;                 /* block of keys: rows of the whole sequence; 0 = no block */
    cot_tensor q;                     /* [B,Tq,H,d], packed [total_q,H,d] */
    cot_tensor k;                     /* [B,Tk,Hkv,d], packed [total_k,Hkv,d] */
    cot_tensor v;                     /* [B,Tk,Hkv,d_v], packed [total_k,Hkv,d_v] */
    cot_tensor cu_seqlens_q;          /* i32 [B+1]; with cu_seqlens_k */
    cot_tensor cu_seqlens_k;          /* i32 [B+1]; with cu_seqlens_q */
    cot_tensor seqused_q;             /* i32 [B], optional */
    cot_tensor seqused_k;             /* i32 [B], optional */
    cot_tensor sink;                  /* [H], optional: one more logit per head in the softmax, without a value */
    cot_tensor alibi_slopes;          /* [H] or [B,H], optional */
    cot_tensor bias;                  /* [B or 1, H or 1, Tq or 1, Tk or 1], packed with the max lengths; optional */
    cot_tensor dropout_seed_tensor;   /* i32 [2], optional: added to dropout_seed */
    cot_tensor dropout_offset_tensor; /* i32 [2], optional: added to dropout_offset */
    cot_tensor out;                   /* output: [B,Tq,H,d_v], packed [total_q,H,d_v]; optional */
    cot_tensor lse;                   /* output: [B,H,Tq], packed [H,total_q]; optional */
    void *workspace;                  /* NULL = memory of the queue; else workspace_bytes bytes, 64-byte aligned */
    size_t workspace_bytes;           /* size of workspace; 0 with NULL */
} cot_attention_forward_args;

/* Computes out and lse from q, k and v. */
COT_API cot_status cot_attention_forward(cot_queue *queue, const cot_attention_forward_args *args);

/* Writes the workspace size of this call in bytes. It checks the arguments as the call does, except data pointers,
 * overlaps and index data. The size grows linearly with Tq and Tk. */
COT_API cot_status cot_attention_forward_workspace(cot_queue *queue, const cot_attention_forward_args *args,
                                                   size_t *bytes);

/* The arguments of cot_attention_backward. Without dropout m = 1 and keep = 1; t = tanh(x / softcap), 0 without
 * softcap:
 *
 *     delta[i] = sum_c dout[i,c] * out[i,c] - dlse[i]          or the tensor delta, if it is given
 *     dP[j] = sum_c dout[i,c] * v[j,c] * m[i,j] / keep;        dY[j] = P[j] * (dP[j] - delta[i]);   dS = dY * (1 - t^2)
 *     dq[i] = scale * sum_j dS[i,j] * k[j]                     dk[j] = scale * sum_{h,i} dS[i,j] * q[i]
 *     dv[j] = sum_{h,i} P[i,j] * m[i,j] / keep * dout[i]       h over the query heads of the group
 *     dbias = dY, summed over the axes where bias has size 1   dsink[h] = -sum_{b,i} exp(sink[h] - lse[i]) * delta[i]
 *
 * dY is the gradient of the score y, dS that of x: they differ with softcap only. P = exp(s - lse) uses the given
 * lse. A query with lse = -inf has no gradient. */
typedef struct cot_attention_backward_args {
    size_t struct_size;
    int32_t causal;                 /* as in the forward */
    int32_t window;                 /* as in the forward */
    int64_t window_left;            /* as in the forward */
    int64_t window_right;           /* as in the forward */
    double scale;                   /* as in the forward */
    double softcap;                 /* as in the forward */
    double dropout_p;               /* as in the forward */
    uint64_t dropout_seed;          /* as in the forward */
    uint64_t dropout_offset;        /* as in the forward */
    int64_t max_seqlen_q;           /* as in the forward */
    int64_t max_seqlen_k;           /* as in the forward */
    int64_t q_begin;                /* as in the forward */
    int64_t q_length;               /* as in the forward */
    int64_t k_begin;                /* as in the forward */
    int64_t k_length;               /* as in the forward */
    int32_t accumulate;             /* 0: dq, dk, dv, dsink, dbias are set (=);  1: all are added to (+=) */
    int32_t allow_nondeterminism;   /* 1: on a GPU, some calls may sum dq in any order. The last bits of dq may then be
                                     different in each run. CPU kernels stay deterministic */
    cot_tensor q;                   /* as in the forward */
    cot_tensor k;                   /* as in the forward */
    cot_tensor v;                   /* as in the forward */
    cot_tensor cu_seqlens_q;        /* as in the forward */
    cot_tensor cu_seqlens_k;        /* as in the forward */
    cot_tensor seqused_q;           /* as in the forward */
    cot_tensor seqused_k;           /* as in the forward */
    cot_tensor sink;                /* needed only for dsink: lse includes the sink */
    cot_tensor alibi_slopes;        /* as in the forward */
    cot_tensor bias;                /* as in the forward */
    cot_tensor dropout_seed_tensor; /* as in the forward */
    cot_tensor dropout_offset_tensor; /* as in the forward */
    cot_tensor lse;                   /* [B,H,Tq], packed [H,total_q]; the forward's */
    cot_tensor out;                   /* [B,Tq,H,d_v], packed [total_q,H,d_v]; the forward's; absent with delta */
    cot_tensor dout;                  /* like out, q's dtype */
    cot_tensor dlse;                  /* like lse; optional (absent = zero); absent with delta */
    cot_tensor delta;                 /* like lse: from cot_attention_delta; replaces out and dlse */
    cot_tensor dq;                    /* output: like q; optional */
    cot_tensor dk;                    /* output: like k; optional */
    cot_tensor dv;                    /* output: like v; optional */
    cot_tensor dsink;                 /* output: [H]; optional; needs sink */
    cot_tensor dbias;                 /* output: bias's shape; optional; needs bias */
    void *workspace;                  /* as in the forward */
    size_t workspace_bytes;           /* as in the forward */
} cot_attention_backward_args;

/* Computes dq, dk, dv, dsink and dbias from the inputs and outputs of the forward. */
COT_API cot_status cot_attention_backward(cot_queue *queue, const cot_attention_backward_args *args);

/* Like cot_attention_forward_workspace. */
COT_API cot_status cot_attention_backward_workspace(cot_queue *queue, const cot_attention_backward_args *args,
                                                    size_t *bytes);

/* The arguments of cot_attention_delta: delta[i] = sum_c dout[i,c] * out[i,c] - dlse[i]. All blocks of one attention
 * use the same delta in their backward. */
typedef struct cot_attention_delta_args {
    size_t struct_size;
    cot_tensor out;   /* [B,Tq,H,d_v], packed [total_q,H,d_v] */
    cot_tensor dout;  /* like out; out and dout may have different dtypes */
    cot_tensor dlse;  /* [B,H,Tq], packed [H,total_q]; optional (absent = zero) */
    cot_tensor delta; /* output: [B,H,Tq], packed [H,total_q] */
    void *workspace;
    size_t workspace_bytes;
} cot_attention_delta_args;

/* Computes delta from out, dout and dlse. */
COT_API cot_status cot_attention_delta(cot_queue *queue, const cot_attention_delta_args *args);

/* Like cot_attention_forward_workspace. */
COT_API cot_status cot_attention_delta_workspace(cot_queue *queue, const cot_attention_delta_args *args, size_t *bytes);

/* The arguments of cot_attention_merge, which combines two results over different keys into the result over all keys:
 *
 *     lse = log(exp(lse_a) + exp(lse_b) + exp(sink))          the last term only with sink; pass sink in one merge only
 *     out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b
 *
 * A row with lse = -inf gets out = 0. out may be the same view as out_a, and lse the same view as lse_a. */
typedef struct cot_attention_merge_args {
    size_t struct_size;
    cot_tensor out_a; /* [B,Tq,H,d_v], packed [total_q,H,d_v]; any of the float dtypes */
    cot_tensor out_b; /* like out_a; any of the float dtypes */
    cot_tensor lse_a; /* [B,H,Tq], packed [H,total_q] */
    cot_tensor lse_b; /* like lse_a */
    cot_tensor sink;  /* [H], optional */
    cot_tensor out;   /* output: like out_a but for the dtype; optional */
    cot_tensor lse;   /* output: like lse_a; optional */
    void *workspace;
    size_t workspace_bytes;
} cot_attention_merge_args;

/* Computes out and lse over all keys from the results over two disjoint sets of keys. */
COT_API cot_status cot_attention_merge(cot_queue *queue, const cot_attention_merge_args *args);

/* Like cot_attention_forward_workspace. */
COT_API cot_status cot_attention_merge_workspace(cot_queue *queue, const cot_attention_merge_args *args, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
