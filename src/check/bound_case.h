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
    int32_t *integers[COT_MAX_FIELDS]; /* inputs of indices, or masks */
    double *expected[COT_MAX_FIELDS];  /* outputs */
    double *magnitudes[COT_MAX_FIELDS];
} reference;

const cot_direction *case_direction(const cot_op_cases *cases, const cot_case *c);

/* Has no tensor of the case more than `most` elements? */
bool case_is_within(const cot_direction *direction, const cot_case *c, int64_t most);

/* Draws the inputs; reference_solve runs the oracle on them. */
reference reference_make(const cot_op_cases *cases, const cot_case *c);
void reference_solve(reference *ref);
void reference_free(reference *ref);

/* The case's arguments with memory of their own, filled with the reference's inputs, outputs poisoned. */
typedef struct bound_case {
    _Alignas(16) char args[COT_MAX_ARGS];
    storage fields[COT_MAX_FIELDS];
} bound_case;

void bound_case_make(bound_case *b, const reference *ref, bool guarded);

/* For the benchmark, whose tensors are large and whose results nobody compares: random data that repeats itself. */
void bound_case_make_repeating(bound_case *b, const cot_op_cases *cases, const cot_case *c);
void bound_case_free(bound_case *b, const cot_direction *direction);

/* Runs the call on the queue, with a poisoned workspace of exactly the bytes that it asks for; on CUDA, with copies of
 * all memory on the device, which come back afterwards. */
cot_status bound_case_run(bound_case *b, const cot_direction *direction, cot_queue *queue);

/* The same call on a CUDA queue's device: a copy of every field's memory, guards included, and a poisoned workspace
 * after them, in one block. Whatever status comes back, free it. */
typedef struct device_image {
    _Alignas(16) char args[COT_MAX_ARGS];
    char *memory;
    size_t bytes, offsets[COT_MAX_FIELDS]; /* of each field's memory */
} device_image;

cot_status device_image_make(device_image *image, const bound_case *b, const cot_direction *direction, cot_queue *queue,
                             size_t workspace_bytes);

/* Copies all fields of a case of the same shapes there, and back. */
cot_status device_image_write(const device_image *image, const bound_case *b, const cot_direction *direction,
                              cot_queue *queue);
cot_status device_image_read(const device_image *image, bound_case *b, const cot_direction *direction,
                             cot_queue *queue);
/* The same for outputs alone, which is what many repeats have time for. */
cot_status device_image_read_outputs(const device_image *image, bound_case *b, const cot_direction *direction,
                                     cot_queue *queue);
void device_image_free(device_image *image, cot_queue *queue);

/* Does an output hold a value before the call? */
bool field_begins_with_value(const cot_direction *direction, const cot_field *field, const void *args);

#endif
