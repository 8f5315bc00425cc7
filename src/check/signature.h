/* SPDX-License-Identifier: Apache-2.0
 * signature.h: derives shapes from a direction's signature (core/op.h). */
#ifndef COT_CHECK_SIGNATURE_H
#define COT_CHECK_SIGNATURE_H

#include "cases/cases.h"

/* Gives outputs their dtype, shape and strides, derived from the inputs in args. Only the outputs whose bit (1 << field
 * number) is set in output_mask; their data stays null. An output that is like another field also gets its strides. The
 * sizes are not checked: validate does that. Returns NULL, or the reason of a failure in `why`. */
const char *shape_outputs(const cot_direction *direction, void *args, uint32_t output_mask, char *why, size_t size);

/* Returns a mask (bit 1 << field number) of the fields whose first axis is the batch: the first axis of the first
 * field, with any name. *items is the batch's size. Returns 0 if the first field has no axis before those that the
 * signature names with sizes of their own. */
uint32_t batch_fields(const cot_direction *direction, const void *args, int64_t *items);

/* A size of a call: a symbol of the signature, or "0", "1".. for the axes that "..." represents. */
typedef struct call_size {
    char name[16];
    int64_t value;
} call_size;

enum { MAX_CALL_SIZES = 24 };

/* Writes the sizes of a call, taken from its inputs. Returns the number of sizes. */
int call_sizes(const cot_direction *direction, const void *args, call_size sizes[MAX_CALL_SIZES]);

/* Gives every present tensor the shape that results from the sizes. The tensors become contiguous, but with
 * broadcast_inputs all strides of the inputs are 0. */
void resize_call(const cot_direction *direction, void *args, const call_size *sizes, int count, bool broadcast_inputs);

#endif
