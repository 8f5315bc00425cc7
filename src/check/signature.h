/* SPDX-License-Identifier: Apache-2.0
 * signature.h: what a direction's signature (core/op.h) says about the outputs of a call. */
#ifndef COT_CHECK_SIGNATURE_H
#define COT_CHECK_SIGNATURE_H

#include "core/cases.h"

/* Gives every output whose bit (1 << number of the field) is in `wanted` its dtype, shape and strides from the inputs
 * that the arguments have; its data stays null. An output that is like another field also has its strides. The sizes
 * are not checked: validate does that. Returns NULL, or why not, in `why`. */
const char *shape_outputs(const cot_direction *direction, void *args, uint32_t wanted, char *why, size_t size);

/* Which fields of a call have the batch as their first axis (bit 1 << number of the field), that is the first axis of the
 * first field, whatever it is called; *items: its size. 0 if the first field has no axis before those that the signature
 * names with sizes of their own. */
uint32_t batch_fields(const cot_direction *direction, const void *args, int64_t *items);

/* A size of a call: a symbol of the signature, or "0", "1".. for the axes that "..." stands for. */
typedef struct call_size {
    char name[16];
    int64_t value;
} call_size;

enum { MAX_CALL_SIZES = 24 };

/* The sizes of a call, as its inputs have them; returns how many. */
int call_sizes(const cot_direction *direction, const void *args, call_size sizes[MAX_CALL_SIZES]);

/* Gives every tensor that the call has the shape that the signature makes of the sizes. The strides become those of a
 * contiguous tensor, or with broadcast_inputs 0 in every input. */
void resize_call(const cot_direction *direction, void *args, const call_size *sizes, int count, bool broadcast_inputs);

#endif
