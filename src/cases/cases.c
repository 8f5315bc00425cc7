/* SPDX-License-Identifier: Apache-2.0
 * cases.c: the list of all ops' cases and oracles, for the program. */
#include "cases.h"

extern const cot_op_cases cot_attention_cases;
extern const cot_op_cases cot_causal_conv1d_cases;
extern const cot_op_cases cot_causal_conv1d_dense_cases;
extern const cot_op_cases cot_mhc_pre_cases, cot_mhc_sinkhorn_cases, cot_mhc_post_cases;
extern const cot_op_cases cot_dropout_cases;

const cot_op_cases *const cot_all_cases[] = {
    &cot_attention_cases, &cot_causal_conv1d_cases, &cot_causal_conv1d_dense_cases,
    &cot_mhc_pre_cases,   &cot_mhc_sinkhorn_cases,  &cot_mhc_post_cases,
    &cot_dropout_cases,
};
