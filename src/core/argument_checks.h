/* SPDX-License-Identifier: Apache-2.0
 * argument_checks.h: helpers for the argument checks of the ops (src/ops/OP/OP.c). */
#ifndef COT_CORE_ARGUMENT_CHECKS_H
#define COT_CORE_ARGUMENT_CHECKS_H

#include <cotangent/core.h>

#include <stdbool.h>

/* Returns from the function with the status of a check that fails. */
#define CHECK(expression)                        \
    do {                                         \
        const cot_status status_ = (expression); \
        if (status_ != COT_OK)                   \
            return status_;                      \
    } while (0)

/* A tensor argument with its name, for checks over all tensors of a call. */
typedef struct cot_named_tensor {
    const char *name;
    const cot_tensor *tensor;
    bool output;
    bool in_place; /* an output may be the same view as an input, if both have this flag */
} cot_named_tensor;

/* Entries for a member of the argument struct *args. */
/* clang-format off */
#define COT_IN(args, member) {#member, &(args)->member, false, false}
#define COT_OUT(args, member) {#member, &(args)->member, true, false}
#define COT_IN_PLACE_INPUT(args, member) {#member, &(args)->member, false, true}
#define COT_IN_PLACE_OUTPUT(args, member) {#member, &(args)->member, true, true}
/* clang-format on */

enum { COT_MAX_TENSORS = 32 }; /* of a call */

/* Accepts the activations of the convolutions: none and SiLU. */
cot_status cot_check_silu(const char *call, cot_activation activation);

/* Checks that either every float tensor is f64, as x, or none is. */
cot_status cot_check_f64(const char *call, const cot_tensor *x, const cot_named_tensor *tensors, int count);

/* Checks the data pointers, and that no output overlaps itself or another tensor. count: up to COT_MAX_TENSORS. */
cot_status cot_check_memory(const char *call, const cot_named_tensor *tensors, int count);

#endif
