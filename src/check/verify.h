/* SPDX-License-Identifier: Apache-2.0
 * verify.h: one call on given tensors, held against the op's oracle by the error rule. */
#ifndef COT_CHECK_VERIFY_H
#define COT_CHECK_VERIFY_H

#include "bound_case.h"
#include "compare.h"

#include <stdio.h>

/* What the oracle and the scalar kernel make of a call's inputs. */
typedef struct verification {
    cot_case c;
    reference ref;
    double *scalar[COT_MAX_FIELDS]; /* outputs of the scalar kernel, row-major */
} verification;

/* Before the call: args are those of the direction, on the host, inputs and in-out tensors with their values. Runs the
 * oracle and the scalar kernel, which takes long and about 20 bytes an element. Returns the status of the scalar kernel:
 * arguments that it refuses have no verification. */
cot_status verification_begin(verification *v, const cot_op_cases *cases, int direction, const void *args);

/* After it: output number f of args, as `kernel` wrote it; only of a field that is an output of the call. */
comparison verification_compare(const verification *v, int f, const void *args, const cot_kernel *kernel);

/* All outputs: prints a report of every output in args, as `kernel` wrote them; false if one is beyond the rule. */
bool verification_end(const verification *v, const void *args, const cot_kernel *kernel, FILE *report);

void verification_free(verification *v);

#endif
