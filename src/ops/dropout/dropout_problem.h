/* SPDX-License-Identifier: Apache-2.0
 * dropout_problem.h: the input of this op's kernels: checked arguments, sizes by name, the source of the mask. */
#ifndef COT_DROPOUT_PROBLEM_H
#define COT_DROPOUT_PROBLEM_H

#include "dropout_source.h"

#include "core/op.h"
#include "core/philox.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <cotangent/dropout.h>

/* The directions, in the order of cot_dropout_directions. */
enum { COT_DROPOUT_FORWARD, COT_DROPOUT_BACKWARD };

extern const cot_op cot_dropout_op;
extern const cot_direction cot_dropout_directions[];

typedef struct dropout_sizes {
    int64_t R, D;
    int64_t groups;  /* ceil(D/8), the number of bytes in a row of mask_bits */
    cot_dtype dtype; /* of x, y, residual, dy and dx */
} dropout_sizes;

/* The mask m, and the factor c as `scale`. With scale 0 every element is dropped, for any m. */
typedef struct dropout_mask {
    dropout_source source;
    uint32_t threshold; /* for GENERATED, 1 to 65535 */
    double scale;
    uint64_t seed, offset;                 /* seed_tensor and offset_tensor are added to them */
    cot_tensor given;                      /* for BYTES and BITS */
    cot_tensor seed_tensor, offset_tensor; /* for GENERATED; may be absent */
} dropout_mask;

/* Leading axes are merged where all tensors allow it: contiguous tensors become [R,D] or [R,groups]. */
typedef struct dropout_forward_problem {
    dropout_sizes sizes; /* the first member of both problems */
    dropout_mask mask;
    cot_dropout_forward_args args;
} dropout_forward_problem;

/* x and bias are absent if there is no activation. */
typedef struct dropout_backward_problem {
    dropout_sizes sizes;
    dropout_mask mask;
    cot_dropout_backward_args args;
} dropout_backward_problem;

/* The offset of row r of a tensor, in elements. */
static inline int64_t dropout_row_offset(const cot_tensor *tensor, int64_t r)
{
    int64_t position = 0;
    for (int axis = tensor->rank - 2; axis > 0; axis--) {
        position += r % tensor->shape[axis] * tensor->stride[axis];
        r /= tensor->shape[axis];
    }
    return tensor->rank > 1 ? position + r * tensor->stride[0] : position;
}

/* The value of seed_tensor or offset_tensor, two 32-bit words; 0 if absent. */
static inline uint64_t dropout_load_u64(const cot_tensor *words)
{
    if (!cot_is_present(words))
        return 0;
    const uint32_t *word = words->data;
    return word[0] | (uint64_t)word[words->stride[0]] << 32;
}

static inline uint64_t dropout_seed(const dropout_mask *mask)
{
    return mask->seed + dropout_load_u64(&mask->seed_tensor);
}

static inline uint64_t dropout_offset(const dropout_mask *mask)
{
    return mask->offset + dropout_load_u64(&mask->offset_tensor);
}

#endif
