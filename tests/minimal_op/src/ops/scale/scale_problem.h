/* SPDX-License-Identifier: Apache-2.0
 * scale_problem.h: what the kernels of this op receive. */
#ifndef COT_SCALE_PROBLEM_H
#define COT_SCALE_PROBLEM_H

#include "core/op.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <cotangent/scale.h>

enum { COT_SCALE_FORWARD };

extern const cot_op cot_scale_op;
extern const cot_direction cot_scale_directions[];

typedef struct scale_sizes {
    int64_t N;
    cot_dtype dtype; /* of x and y */
} scale_sizes;

typedef struct scale_forward_problem {
    scale_sizes sizes;
    cot_scale_forward_args args;
} scale_forward_problem;

#endif
