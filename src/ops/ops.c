/* SPDX-License-Identifier: Apache-2.0
 * ops.c: the list of all ops of the library. */
#include "core/op.h"
#include "ops/attention/attention_problem.h"
#include "ops/causal_conv1d/causal_conv1d_problem.h"
#include "ops/causal_conv1d_dense/causal_conv1d_dense_problem.h"
#include "ops/dropout/dropout_problem.h"
#include "ops/mhc/mhc_problem.h"

const cot_op *const cot_ops[] = {
    &cot_attention_op, &cot_causal_conv1d_op, &cot_causal_conv1d_dense_op, &cot_mhc_pre_op, &cot_mhc_sinkhorn_op,
    &cot_mhc_post_op,  &cot_dropout_op,
};
const int cot_op_count = (int)(sizeof cot_ops / sizeof *cot_ops);
