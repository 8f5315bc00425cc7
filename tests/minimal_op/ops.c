/* SPDX-License-Identifier: Apache-2.0
 * ops.c: the arrays of ops and cases for a program with the op `scale` alone, in place of those from src/ops/ops.def. */
#include "cases/cases.h"
#include "src/ops/scale/scale_problem.h"

extern const cot_op_cases cot_scale_cases;

const cot_op *const cot_ops[] = {&cot_scale_op};
const int cot_op_count = 1;
const cot_op_cases *const cot_all_cases[] = {&cot_scale_cases};
