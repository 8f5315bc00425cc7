/* SPDX-License-Identifier: Apache-2.0
 * attention_problem.h: what the kernels of this op are given: checked arguments, their sizes by name, and the shape of
 * the mask, sequence by sequence. */
#ifndef COT_ATTENTION_PROBLEM_H
#define COT_ATTENTION_PROBLEM_H

#include "core/op.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <cotangent/attention.h>

/* The order of the op's directions. */
enum { COT_ATTENTION_FORWARD, COT_ATTENTION_BACKWARD, COT_ATTENTION_DELTA, COT_ATTENTION_MERGE };

extern const cot_op cot_attention_op;
extern const cot_direction cot_attention_directions[];

/* Farther than any key. */
#define ATTENTION_UNBOUNDED ((int64_t)1 << 57)

/* As in the header. Packed: Tq and Tk are the longest lengths that may occur. */
typedef struct attention_sizes {
    int64_t B, H, Hkv, Tq, Tk, d, dv;
    cot_dtype dtype; /* q's */
    bool packed;
    int64_t rows_q, rows_k;                       /* of all sequences: B*Tq or total_q */
    int64_t left, right;                          /* a key is visible from -left to +right of the diagonal */
    int64_t q_begin, q_length, k_begin, k_length; /* 0 and the whole length where there are no blocks */
    double scale, softcap;                        /* softcap 0 = none */
    uint32_t dropped;                             /* of 65536; 0 = no dropout */
    int64_t longest_k;                            /* dropout's row length: k_length, or max_seqlen_k as it was given */
} attention_sizes;

/* Forward and backward: the tensors of both argument structs, absent where a direction has none. q, k, v, out and
 * their gradients are [B,T,H,d] also when packed: the batch stride is 0 then, and T counts the rows of all sequences
 * (see attention_sequence); lse and its like are [B,H,Tq]. */
typedef struct attention_problem {
    attention_sizes sizes; /* first in every problem of this op */
    uint64_t dropout_seed, dropout_offset;
    bool accumulate, allow_nondeterminism;
    cot_tensor q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sink, alibi_slopes, bias;
    cot_tensor dropout_seed_memory, dropout_offset_memory;
    cot_tensor lse, out;          /* outputs of the forward, inputs of the backward */
    cot_tensor dout, dlse, delta; /* backward only */
    cot_tensor dq, dk, dv, dsink, dbias;
} attention_problem;

/* delta: out, dout, dlse, delta. merge: out_a, out_b, lse_a, lse_b, sink, out, lse. Views as above, with B = 1 when
 * packed. */
typedef struct attention_delta_problem {
    attention_sizes sizes; /* B, H, Tq, dv */
    cot_attention_delta_args args;
} attention_delta_problem;

typedef struct attention_merge_problem {
    attention_sizes sizes; /* B, H, Tq, dv */
    cot_attention_merge_args args;
} attention_merge_problem;

/* ---- sequences ---------------------------------------------------------------------------------------- */

/* One sequence of a call: rows q_row .. q_row+q_rows of q's view, of which the first Tq count; keys alike. Query i has
 * its diagonal at key i + diagonal. */
typedef struct attention_sequence {
    int64_t b;
    int64_t q_row, q_rows, Tq;
    int64_t k_row, k_rows, Tk;
    int64_t diagonal;
} attention_sequence;

static inline int64_t attention_index(const cot_tensor *tensor, int64_t i)
{
    return ((const int32_t *)tensor->data)[i * tensor->stride[0]];
}

/* Packed calls have one more, empty one: the rows beyond the last sequence. */
static inline int64_t attention_sequence_count(const attention_problem *p)
{
    return p->sizes.B + p->sizes.packed;
}

static inline attention_sequence attention_sequence_at(const attention_problem *p, int64_t b)
{
    const attention_sizes *z = &p->sizes;
    attention_sequence s = {.b = b, .q_rows = z->Tq, .k_rows = z->Tk};
    int64_t used_q = z->q_length, used_k = z->k_length;
    if (z->packed) {
        s.q_row = attention_index(&p->cu_seqlens_q, b);
        s.k_row = attention_index(&p->cu_seqlens_k, b);
        if (b == z->B) {
            s.q_rows = z->rows_q - s.q_row;
            s.k_rows = z->rows_k - s.k_row;
            return s;
        }
        used_q = s.q_rows = attention_index(&p->cu_seqlens_q, b + 1) - s.q_row;
        used_k = s.k_rows = attention_index(&p->cu_seqlens_k, b + 1) - s.k_row;
    }
    if (cot_present(&p->seqused_q))
        used_q = attention_index(&p->seqused_q, b);
    if (cot_present(&p->seqused_k))
        used_k = attention_index(&p->seqused_k, b);
    s.Tq = cot_clamp(used_q - z->q_begin, 0, s.q_rows);
    s.Tk = cot_clamp(used_k - z->k_begin, 0, s.k_rows);
    s.diagonal = used_k - used_q + z->q_begin - z->k_begin;
    return s;
}

/* The keys that query i sees: [first, end); and the queries that see key j. Empty: first >= end. */
typedef struct attention_span {
    int64_t first, end;
} attention_span;

static inline attention_span attention_keys_of(const attention_sizes *z, const attention_sequence *s, int64_t i)
{
    const int64_t at = i + s->diagonal;
    return (attention_span){cot_clamp(at - z->left, 0, s->Tk), cot_clamp(at + z->right + 1, 0, s->Tk)};
}

static inline attention_span attention_queries_of(const attention_sizes *z, const attention_sequence *s, int64_t j)
{
    const int64_t at = j - s->diagonal;
    return (attention_span){cot_clamp(at - z->right, 0, s->Tq), cot_clamp(at + z->left + 1, 0, s->Tq)};
}

/* ---- elements ----------------------------------------------------------------------------------------- */

/* Where row `row` of head h of batch b begins, in elements; of [B,T,H,*] views. */
static inline int64_t attention_at(const cot_tensor *t, int64_t b, int64_t row, int64_t h)
{
    return b * t->stride[0] + row * t->stride[1] + h * t->stride[2];
}

/* Of [B,H,T] views. */
static inline int64_t attention_lse_at(const cot_tensor *t, int64_t b, int64_t h, int64_t row)
{
    return b * t->stride[0] + h * t->stride[1] + row * t->stride[2];
}

/* alibi_slopes[h] or [b,h] */
static inline int64_t attention_slope_at(const cot_tensor *t, int64_t b, int64_t h)
{
    return t->rank == 2 ? b * t->stride[0] + h * t->stride[1] : h * t->stride[0];
}

/* bias[b,h,i,j], an axis of size 1 standing for all of it */
static inline int64_t attention_bias_at(const cot_tensor *t, int64_t b, int64_t h, int64_t i, int64_t j)
{
    return (t->shape[0] == 1 ? 0 : b * t->stride[0]) + (t->shape[1] == 1 ? 0 : h * t->stride[1]) +
           (t->shape[2] == 1 ? 0 : i * t->stride[2]) + (t->shape[3] == 1 ? 0 : j * t->stride[3]);
}

#endif
