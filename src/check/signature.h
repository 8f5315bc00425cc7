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

#endif
