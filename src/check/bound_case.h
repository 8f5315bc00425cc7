/* SPDX-License-Identifier: Apache-2.0
 * bound_case.h: a case with memory. The oracle (f64, row-major) and a kernel (the case's own dtypes and strides) get
 * the same inputs. */
#ifndef COT_CHECK_BOUND_CASE_H
#define COT_CHECK_BOUND_CASE_H

#include "storage.h"

/* The inputs of a case, rounded to their dtypes, and the outputs that the oracle computes from them. */
typedef struct reference {
    const cot_op_cases *cases;
    const cot_case *c;
    double *values[COT_MAX_FIELDS];    /* inputs, and outputs with an initial value (accumulate, in-out) */
    int32_t *integers[COT_MAX_FIELDS]; /* integer inputs: indices or masks */
    double *expected[COT_MAX_FIELDS];  /* outputs */
    double *magnitudes[COT_MAX_FIELDS];
} reference;

const cot_direction *case_direction(const cot_op_cases *cases, const cot_case *c);

/* Returns whether every tensor of the case has at most `max_elements` elements. */
bool case_is_within(const cot_direction *direction, const cot_case *c, int64_t max_elements);

/* Fills the inputs with random numbers. reference_run_oracle runs the oracle on them. */
reference reference_make(const cot_op_cases *cases, const cot_case *c);
void reference_run_oracle(reference *ref);
void reference_free(reference *ref);

/* The case's arguments with their own memory: the inputs of a reference, and outputs filled with POISON. */
typedef struct bound_case {
    _Alignas(16) char args[COT_MAX_ARGS];
    storage fields[COT_MAX_FIELDS];
} bound_case;

void bound_case_make(bound_case *b, const reference *ref, bool guarded);

/* For the benchmark: fills the tensors with one short random sequence that repeats. Large tensors are filled quickly,
 * and no results are compared. */
void bound_case_make_repeating(bound_case *b, const cot_op_cases *cases, const cot_case *c);
void bound_case_free(bound_case *b, const cot_direction *direction);

/* Runs the call on the queue. The workspace has exactly the bytes that the kernel requests, filled with POISON. On CUDA
 * the call runs on copies of all memory in device memory, which are copied back afterwards. */
cot_status bound_case_run(bound_case *b, const cot_direction *direction, cot_queue *queue);

/* The arguments of a bound case in the memory of a CUDA queue's device. One block holds a copy of every field's memory,
 * guards included, and then the workspace, filled with POISON. Free an image even if making it failed. */
typedef struct device_image {
    _Alignas(16) char args[COT_MAX_ARGS];
    char *memory;
    size_t bytes, offsets[COT_MAX_FIELDS]; /* where the copy of each field's memory begins */
} device_image;

cot_status device_image_make(device_image *image, const bound_case *b, const cot_direction *direction, cot_queue *queue,
                             size_t workspace_bytes);

/* Copy all fields of a case to the image, and back. The case must have the shapes that the image was made for. */
cot_status device_image_write(const device_image *image, const bound_case *b, const cot_direction *direction,
                              cot_queue *queue);
cot_status device_image_read(const device_image *image, bound_case *b, const cot_direction *direction,
                             cot_queue *queue);
/* Copies only the outputs back, which is faster when a call is repeated many times. */
cot_status device_image_read_outputs(const device_image *image, bound_case *b, const cot_direction *direction,
                                     cot_queue *queue);
void device_image_free(device_image *image, cot_queue *queue);

/* Returns whether the call reads the field: an input, an in-out tensor, or an output that it accumulates into. */
bool field_has_initial_value(const cot_direction *direction, const cot_field *field, const void *args);

#endif
