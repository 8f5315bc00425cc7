/* SPDX-License-Identifier: Apache-2.0
 * verify.h: compares one call on given tensors with the op's oracle, by the error rule. */
#ifndef COT_CHECK_VERIFY_H
#define COT_CHECK_VERIFY_H

#include "bound_case.h"
#include "compare.h"

#include <stdio.h>

/* The results of the oracle and of the scalar kernel for a call's inputs. */
typedef struct verification {
    cot_case c;
    reference ref;
    double *scalar[COT_MAX_FIELDS]; /* outputs of the scalar kernel, row-major */
} verification;

/* Call it before the call that is verified. args are the direction's arguments in host memory, with values in all
 * inputs and in-out tensors. Runs the oracle and the scalar kernel, which is slow and needs about 20 bytes per element.
 * Returns the scalar kernel's status: arguments that it refuses cannot be verified. */
cot_status verification_begin(verification *v, const cot_op_cases *cases, int direction, const void *args);

/* The dtype to which the kernel rounds before it rounds an output. */
cot_dtype intermediate_of(const cot_tensor *view, const cot_kernel *kernel);

/* Compares output number f of a call, as `kernel` wrote it, with the results of the oracle and of the scalar kernel.
 * view: the output in host memory; y: its values. */
comparison compare_output(const reference *ref, const double *scalar, const void *args, int f, const cot_kernel *kernel,
                          const cot_tensor *view, const double *y);

/* Compares output number f of args, as `kernel` wrote it, after the call. Field f must be an output of the call. */
comparison verification_compare(const verification *v, int f, const void *args, const cot_kernel *kernel);

/* Compares all outputs in args, as `kernel` wrote them, and prints a report of each. Returns false if an output
 * violates the rule. */
bool verification_end(const verification *v, const void *args, const cot_kernel *kernel, FILE *report);

void verification_free(verification *v);

#endif
