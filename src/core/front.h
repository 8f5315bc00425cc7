/* SPDX-License-Identifier: Apache-2.0
 * front.h: what the fronts of the ops write in short. */
#ifndef COT_CORE_FRONT_H
#define COT_CORE_FRONT_H

#include <cotangent/core.h>

#include <stdbool.h>

/* `return` on the first check that fails. */
#define CHECK(expression)                        \
    do {                                         \
        const cot_status status_ = (expression); \
        if (status_ != COT_OK)                   \
            return status_;                      \
    } while (0)

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* A tensor of one call, for the checks that concern all of them. */
typedef struct cot_named_tensor {
    const char *name;
    const cot_tensor *tensor;
    bool output;
} cot_named_tensor;

/* None or SiLU: what convolutions have. */
cot_status cot_check_silu(const char *call, cot_activation activation);

/* Either every float tensor is f64 or none is. */
cot_status cot_check_f64(const char *call, const cot_tensor *x, const cot_named_tensor *tensors, int count);

/* Data pointers, and outputs that would be written over something. */
cot_status cot_check_memory(const char *call, const cot_named_tensor *tensors, int count);

#endif
