/* SPDX-License-Identifier: Apache-2.0
 * ops.c: the array of all ops of the library, from ops.def. */
#include "core/op.h"

#define COT_OP_ENTRY(op) extern const cot_op cot_##op##_op;
#include "ops.def"
#undef COT_OP_ENTRY

const cot_op *const cot_ops[] = {
#define COT_OP_ENTRY(op) &cot_##op##_op,
#include "ops.def"
#undef COT_OP_ENTRY
};
const int cot_op_count = (int)(sizeof cot_ops / sizeof *cot_ops);
