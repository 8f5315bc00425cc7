/* SPDX-License-Identifier: Apache-2.0
 * attention_problem.h: the input of this op's kernels: checked arguments, their sizes, and the visible keys of each
 * query. */
#ifndef COT_ATTENTION_PROBLEM_H
#define COT_ATTENTION_PROBLEM_H

#include "core/op.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <cotangent/attention.h>

/* The indices of the op's directions. */
enum { COT_ATTENTION_FORWARD, COT_ATTENTION_BACKWARD, COT_ATTENTION_DELTA, COT_ATTENTION_MERGE };

extern const cot_op cot_attention_op;
extern const cot_direction cot_attention_directions[];

/* A window size beyond any key. */
#define ATTENTION_UNBOUNDED ((int64_t)1 << 57)

/* Symbols as in cotangent/attention.h. In a packed call Tq and Tk are the longest lengths that may occur. */
typedef struct attention_sizes {
    int64_t B, H, Hkv, Tq, Tk, d_qk, d_v;
    cot_dtype dtype; /* the dtype of q */
    bool packed;
    int64_t rows_q, rows_k; /* rows of all sequences: B*Tq or total_q; B*Tk or total_k */
    int64_t left, right;    /* query i attends to keys from -left to +right of its diagonal */
    int64_t q_begin, q_length, k_begin,
        k_length;          /* begin is 0 and length is the row count if the call is not a block */
    double scale, softcap; /* softcap 0: none */
    uint32_t dropped;      /* drop probability times 65536; 0: no dropout */
    int64_t longest_k;     /* row length of the dropout mask: k_length, or max_seqlen_k as the caller gave it */
} attention_sizes;

/* Forward and backward: the tensors of both argument structs. A tensor is absent in a direction that does not have
 * it. q, k, v, out and their gradients are [B,T,H,d]. A packed call has a batch stride of 0, and T counts the rows
 * of all sequences (see attention_sequence). lse, dlse and delta are [B,H,Tq]. */
typedef struct attention_problem {
    attention_sizes sizes; /* the first member of every problem struct of this op */
    uint64_t dropout_seed, dropout_offset;
    bool accumulate, allow_nondeterminism;
    cot_tensor q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sink, alibi_slopes, bias;
    cot_tensor dropout_seed_tensor, dropout_offset_tensor;
    cot_tensor lse, out;          /* outputs of the forward, inputs of the backward */
    cot_tensor dout, dlse, delta; /* backward only */
    cot_tensor dq, dk, dv, dsink, dbias;
} attention_problem;

/* Tensors of delta: out, dout, dlse, delta. Tensors of merge: out_a, out_b, lse_a, lse_b, sink, out, lse. The views
 * are as above; B is 1 in a packed call. */
typedef struct attention_delta_problem {
    attention_sizes sizes; /* B, H, Tq, d_v only */
    cot_attention_delta_args args;
} attention_delta_problem;

typedef struct attention_merge_problem {
    attention_sizes sizes; /* B, H, Tq, d_v only */
    cot_attention_merge_args args;
} attention_merge_problem;

/* ---- sequences ---------------------------------------------------------------------------------------- */

/* One sequence of a call: rows q_row .. q_row+q_rows of q's view, of which the first used_q are used: those below
 * seqused_q. The k members are the same for keys. The diagonal of query i is at key i + diagonal. */
typedef struct attention_sequence {
    int64_t b;
    int64_t q_row, q_rows, used_q;
    int64_t k_row, k_rows, used_k;
    int64_t diagonal;
} attention_sequence;

static inline int64_t attention_load_i32(const cot_tensor *tensor, int64_t i)
{
    return ((const int32_t *)tensor->data)[i * tensor->stride[0]];
}

/* A packed call has one more sequence with used_q = used_k = 0: it holds the rows beyond the last sequence. */
static inline int64_t attention_sequence_count(const attention_problem *p)
{
    return p->sizes.B + p->sizes.packed;
}

static inline attention_sequence attention_sequence_at(const attention_problem *p, int64_t b)
{
    const attention_sizes *sizes = &p->sizes;
    attention_sequence s = {.b = b, .q_rows = sizes->Tq, .k_rows = sizes->Tk};
    int64_t sequence_q_length = sizes->q_length, sequence_k_length = sizes->k_length;
    if (sizes->packed) {
        s.q_row = attention_load_i32(&p->cu_seqlens_q, b);
        s.k_row = attention_load_i32(&p->cu_seqlens_k, b);
        if (b == sizes->B) {
            s.q_rows = sizes->rows_q - s.q_row;
            s.k_rows = sizes->rows_k - s.k_row;
            return s;
        }
        sequence_q_length = s.q_rows = attention_load_i32(&p->cu_seqlens_q, b + 1) - s.q_row;
        sequence_k_length = s.k_rows = attention_load_i32(&p->cu_seqlens_k, b + 1) - s.k_row;
    }
    if (cot_is_present(&p->seqused_q))
        sequence_q_length = attention_load_i32(&p->seqused_q, b);
    if (cot_is_present(&p->seqused_k))
        sequence_k_length = attention_load_i32(&p->seqused_k, b);
    s.used_q = cot_clamp(sequence_q_length - sizes->q_begin, 0, s.q_rows);
    s.used_k = cot_clamp(sequence_k_length - sizes->k_begin, 0, s.k_rows);
    s.diagonal = sequence_k_length - sequence_q_length + sizes->q_begin - sizes->k_begin;
    return s;
}

/* A range [first, end) of keys or queries; empty if first >= end. */
typedef struct attention_span {
    int64_t first, end;
} attention_span;

static inline attention_span attention_visible_keys(const attention_sizes *sizes, const attention_sequence *s,
                                                    int64_t i)
{
    const int64_t key = i + s->diagonal;
    return (attention_span){cot_clamp(key - sizes->left, 0, s->used_k),
                            cot_clamp(key + sizes->right + 1, 0, s->used_k)};
}

static inline attention_span attention_visible_queries(const attention_sizes *sizes, const attention_sequence *s,
                                                       int64_t j)
{
    const int64_t query = j - s->diagonal;
    return (attention_span){cot_clamp(query - sizes->right, 0, s->used_q),
                            cot_clamp(query + sizes->left + 1, 0, s->used_q)};
}

/* ---- elements ----------------------------------------------------------------------------------------- */

/* Offsets in elements. Row `row` of head h in batch b of a [B,T,H,*] view: */
static inline int64_t attention_row_offset(const cot_tensor *t, int64_t b, int64_t row, int64_t h)
{
    return b * t->stride[0] + row * t->stride[1] + h * t->stride[2];
}

/* Row `row` of head h in batch b of a [B,H,T] view: */
static inline int64_t attention_lse_offset(const cot_tensor *t, int64_t b, int64_t h, int64_t row)
{
    return b * t->stride[0] + h * t->stride[1] + row * t->stride[2];
}

/* alibi_slopes[h] or [b,h] */
static inline int64_t attention_slope_offset(const cot_tensor *t, int64_t b, int64_t h)
{
    return t->rank == 2 ? b * t->stride[0] + h * t->stride[1] : h * t->stride[0];
}

/* bias[b,h,i,j]; an axis of size 1 is broadcast */
static inline int64_t attention_bias_offset(const cot_tensor *t, int64_t b, int64_t h, int64_t i, int64_t j)
{
    return (t->shape[0] == 1 ? 0 : b * t->stride[0]) + (t->shape[1] == 1 ? 0 : h * t->stride[1]) +
           (t->shape[2] == 1 ? 0 : i * t->stride[2]) + (t->shape[3] == 1 ? 0 : j * t->stride[3]);
}

#endif
