/* SPDX-License-Identifier: Apache-2.0
 * cases.c: the array of all ops' cases and oracles, for the program. */
#include "cases.h"

#define COT_OP_ENTRY(op) extern const cot_op_cases cot_##op##_cases;
#include "ops/ops.def"
#undef COT_OP_ENTRY

const cot_op_cases *const cot_all_cases[] = {
#define COT_OP_ENTRY(op) &cot_##op##_cases,
#include "ops/ops.def"
#undef COT_OP_ENTRY
};
