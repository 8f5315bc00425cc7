/* SPDX-License-Identifier: Apache-2.0
 * bound_case.h: a case with memory: the same inputs for the oracle (f64, row-major) and for a kernel (the case's own
 * dtypes and strides). */
#ifndef COT_CHECK_BOUND_CASE_H
#define COT_CHECK_BOUND_CASE_H

#include "storage.h"

/* The inputs of a case, rounded to their dtypes, and what the oracle makes of them. */
typedef struct reference {
    const cot_op_cases *cases;
    const cot_case *c;
    double *values[COT_MAX_FIELDS];    /* inputs, and outputs that begin with a value (accumulate, in-out) */
    int32_t *integers[COT_MAX_FIELDS]; /* index inputs */
    double *expected[COT_MAX_FIELDS];  /* outputs */
    double *magnitudes[COT_MAX_FIELDS];
} reference;

const cot_direction *case_direction(const cot_op_cases *cases, const cot_case *c);

/* Draws the inputs; reference_solve runs the oracle on them. */
reference reference_make(const cot_op_cases *cases, const cot_case *c);
void reference_solve(reference *ref);
void reference_free(reference *ref);

/* The case's arguments with memory of their own, filled with the reference's inputs, outputs poisoned. */
typedef struct bound_case {
    _Alignas(16) char args[COT_MAX_ARGS];
    storage fields[COT_MAX_FIELDS];
    void *workspace; /* of the last set_workspace */
} bound_case;

void bound_case_make(bound_case *b, const reference *ref, bool guarded);
void bound_case_free(bound_case *b, const cot_direction *direction);

/* Gives the arguments a poisoned workspace of this size, or none at all if it is 0. */
void bound_case_set_workspace(bound_case *b, const cot_direction *direction, size_t bytes);

/* Does an output hold a value before the call? */
bool field_begins_with_value(const cot_direction *direction, const cot_field *field, const void *args);

#endif
