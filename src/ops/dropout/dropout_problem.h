/* SPDX-License-Identifier: Apache-2.0
 * dropout_problem.h: what the kernels of this op are given: checked arguments, their sizes by name, the mask's
 * source. */
#ifndef COT_DROPOUT_PROBLEM_H
#define COT_DROPOUT_PROBLEM_H

#include "core/op.h"
#include "core/philox.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <cotangent/dropout.h>

/* The order of the op's directions. */
enum { COT_DROPOUT_FORWARD, COT_DROPOUT_BACKWARD };

extern const cot_op cot_dropout_op;
extern const cot_direction cot_dropout_directions[];

typedef struct dropout_sizes {
    int64_t R, D;
    int64_t groups;  /* ceil(D/8): the bytes of a row of mask_bits */
    cot_dtype dtype; /* x's, and so y's, residual's, dy's, dx's */
} dropout_sizes;

typedef enum dropout_source {
    DROPOUT_KEEP_ALL,
    DROPOUT_DRAWN,
    DROPOUT_DROP_ALL,
    DROPOUT_BYTES,
    DROPOUT_BITS
} dropout_source;

/* m and c. With scale 0 nothing reaches the output, whatever m is. */
typedef struct dropout_mask {
    dropout_source source;
    uint32_t threshold; /* of DRAWN, 1 .. 65535 */
    double scale;
    uint64_t seed, offset;                 /* without what lies in memory */
    cot_tensor given;                      /* BYTES or BITS */
    cot_tensor seed_memory, offset_memory; /* DRAWN */
} dropout_mask;

/* Leading axes that every tensor walks alike are merged: what is contiguous comes as [R,D], [R,groups]. */
typedef struct dropout_forward_problem {
    dropout_sizes sizes; /* first in both problems */
    dropout_mask mask;
    cot_dropout_forward_args args;
} dropout_forward_problem;

/* x and bias are absent where the activation does not need them. */
typedef struct dropout_backward_problem {
    dropout_sizes sizes;
    dropout_mask mask;
    cot_dropout_backward_args args;
} dropout_backward_problem;

/* Where row r of a tensor begins, in elements. */
static inline int64_t dropout_row(const cot_tensor *tensor, int64_t r)
{
    int64_t position = 0;
    for (int axis = tensor->rank - 2; axis > 0; axis--) {
        position += r % tensor->shape[axis] * tensor->stride[axis];
        r /= tensor->shape[axis];
    }
    return tensor->rank > 1 ? position + r * tensor->stride[0] : position;
}

/* Both words of seed_memory or offset_memory; 0 if it is absent. */
static inline uint64_t dropout_word64(const cot_tensor *words)
{
    if (!cot_is_present(words))
        return 0;
    const uint32_t *word = words->data;
    return word[0] | (uint64_t)word[words->stride[0]] << 32;
}

static inline uint64_t dropout_seed(const dropout_mask *mask)
{
    return mask->seed + dropout_word64(&mask->seed_memory);
}

static inline uint64_t dropout_offset(const dropout_mask *mask)
{
    return mask->offset + dropout_word64(&mask->offset_memory);
}

#endif
