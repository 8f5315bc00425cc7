/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_problem.h: the problem structs that the kernels of this op get: checked arguments, and their sizes by
 * name. */
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

/* B, D, T, K are the sizes of cotangent/causal_conv1d.h. sequence_count is N with cu_seqlens, else B: with seq_idx, the
 * sequences of a batch element count as one and share a state. A state tensor, where present, is [sequence_count, D,
 * K-1]. A tensor that the header allows with two numbers of axes has the larger number here. */
typedef struct conv1d_sizes {
    int64_t B, D, T, K, sequence_count;
    cot_dtype dtype; /* dtype of x */
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
    conv1d_sizes sizes;
    int64_t state_count, S;             /* conv_state is [state_count, D, S] */
    cot_causal_conv1d_update_args args; /* x and y as [B,D,T] */
} conv1d_update_problem;

/* Element i of an i32 tensor with one axis, at any stride. */
static inline int64_t conv1d_index(const cot_tensor *tensor, int64_t i)
{
    return ((const int32_t *)tensor->data)[i * tensor->stride[0]];
}

/* ---- sequences ---------------------------------------------------------------------------------------- *
 * seq_idx and cu_seqlens answer one question: which tokens contribute to which outputs? A `conv1d_span` holds the
 * tokens [first, end) of one batch element. No token outside of the span contributes to a token inside. Within the
 * span, conv1d_contributes says whether position p contributes to position t. Positions first-K+1 .. first-1 are those
 * of the initial state. */
typedef struct conv1d_span {
    int64_t b, first, end;  /* tokens [first, end) of batch element b */
    int64_t state;          /* index along axis 0 of the state tensors; -1: padding, whose tokens contribute nowhere */
    const int32_t *seq_idx; /* seq_idx of batch element b; NULL if absent */
    int64_t seq_idx_stride;
} conv1d_span;

/* The number of spans of a problem. */
static inline int64_t conv1d_span_count(const conv1d_sizes *sizes, const cot_tensor *cu_seqlens)
{
    return cot_is_present(cu_seqlens) ? sizes->sequence_count + 1 : sizes->B;
}

static inline conv1d_span conv1d_span_at(const conv1d_sizes *sizes, const cot_tensor *seq_idx,
                                         const cot_tensor *cu_seqlens, int64_t span_index)
{
    conv1d_span span = {.b = span_index, .first = 0, .end = sizes->T, .state = span_index};
    if (cot_is_present(cu_seqlens)) {
        const bool padding = span_index == sizes->sequence_count;
        span.b = 0;
        span.first = conv1d_index(cu_seqlens, span_index);
        span.end = padding ? sizes->T : conv1d_index(cu_seqlens, span_index + 1);
        span.state = padding ? -1 : span_index;
    } else if (cot_is_present(seq_idx) && sizes->T > 0) {
        span.seq_idx = (const int32_t *)seq_idx->data + span_index * seq_idx->stride[0];
        span.seq_idx_stride = seq_idx->stride[1];
    }
    return span;
}

/* The sequence of position t of the span; negative for padding. Positions of the initial state (t < first) belong to
 * the sequence of the first token. */
static inline int32_t conv1d_sequence_id(const conv1d_span *span, int64_t t)
{
    if (span->seq_idx == NULL || span->first == span->end)
        return span->state < 0 ? -1 : 0;
    return span->seq_idx[(t < span->first ? span->first : t) * span->seq_idx_stride];
}

/* Whether position p (a token, or in the initial state) contributes to position t. */
static inline bool conv1d_contributes(const conv1d_span *span, int64_t p, int64_t t)
{
    const int32_t sequence = conv1d_sequence_id(span, t);
    return sequence >= 0 && sequence == conv1d_sequence_id(span, p);
}

#endif
