/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_problem.h: what the kernels of this op are given: checked arguments and their sizes by name. */
#ifndef COT_CAUSAL_CONV1D_PROBLEM_H
#define COT_CAUSAL_CONV1D_PROBLEM_H

#include "core/op.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <cotangent/causal_conv1d.h>

/* The order of the op's directions. */
enum { COT_CAUSAL_CONV1D_FORWARD, COT_CAUSAL_CONV1D_BACKWARD, COT_CAUSAL_CONV1D_UPDATE };

extern const cot_op cot_causal_conv1d_op;
extern const cot_direction cot_causal_conv1d_directions[];

/* B, D, T, K as in the header. States, where present, are [state_count, D, K-1]; state_count is B, or N with
 * cu_seqlens. Tensors that the header allows in two ranks are brought to the higher one. */
typedef struct conv1d_sizes {
    int64_t B, D, T, K, state_count;
    cot_dtype dtype; /* x's */
} conv1d_sizes;

typedef struct conv1d_forward_problem {
    conv1d_sizes sizes; /* first in all three problems */
    cot_causal_conv1d_forward_args args;
} conv1d_forward_problem;

typedef struct conv1d_backward_problem {
    conv1d_sizes sizes;
    cot_causal_conv1d_backward_args args;
} conv1d_backward_problem;

typedef struct conv1d_update_problem {
    conv1d_sizes sizes;                 /* state_count: rows of conv_state */
    int64_t S;                          /* columns of conv_state */
    cot_causal_conv1d_update_args args; /* x and y as [B,D,T] */
} conv1d_update_problem;

/* cu_seqlens[n] of any stride. */
static inline int64_t conv1d_index(const cot_tensor *tensor, int64_t i)
{
    return ((const int32_t *)tensor->data)[i * tensor->stride[0]];
}

/* ---- sequences ---------------------------------------------------------------------------------------- *
 * Both ways of packing come down to one question: which tokens count for which? A `conv1d_sequences` is the span
 * [first, end) of one batch row in which tokens may count for each other, with the row of the states that belongs
 * to it; within it conv1d_same says whether position p counts for position t. Positions first-K+1 .. first-1 are the
 * columns 0 .. K-2 of the initial state. */
typedef struct conv1d_span {
    int64_t b, first, end;
    int64_t state;          /* row of the states, -1 = padding after the last sequence: no token counts at all */
    const int32_t *seq_idx; /* of batch row b, NULL without */
    int64_t seq_idx_stride;
} conv1d_span;

/* The number of spans of a problem, and span number `index` of it. */
static inline int64_t conv1d_span_count(const conv1d_sizes *sizes, const cot_tensor *cu_seqlens)
{
    return cot_present(cu_seqlens) ? sizes->state_count + 1 : sizes->B;
}

static inline conv1d_span conv1d_span_at(const conv1d_sizes *sizes, const cot_tensor *seq_idx,
                                         const cot_tensor *cu_seqlens, int64_t index)
{
    conv1d_span span = {.b = index, .first = 0, .end = sizes->T, .state = index};
    if (cot_present(cu_seqlens)) {
        const bool padding = index == sizes->state_count;
        span.b = 0;
        span.first = conv1d_index(cu_seqlens, index);
        span.end = padding ? sizes->T : conv1d_index(cu_seqlens, index + 1);
        span.state = padding ? -1 : index;
    } else if (cot_present(seq_idx) && sizes->T > 0) {
        span.seq_idx = (const int32_t *)seq_idx->data + index * seq_idx->stride[0];
        span.seq_idx_stride = seq_idx->stride[1];
    }
    return span;
}

/* The sequence that position t of the span belongs to, negative for padding. Columns of the initial state
 * (t < first) belong to the first token's. */
static inline int32_t conv1d_sequence_of(const conv1d_span *span, int64_t t)
{
    if (span->seq_idx == NULL || span->first == span->end)
        return span->state < 0 ? -1 : 0;
    return span->seq_idx[(t < span->first ? span->first : t) * span->seq_idx_stride];
}

/* Does position p (a token, or a column of the initial state) count for position t? */
static inline bool conv1d_same(const conv1d_span *span, int64_t p, int64_t t)
{
    const int32_t sequence = conv1d_sequence_of(span, t);
    return sequence >= 0 && sequence == conv1d_sequence_of(span, p);
}

#endif
