/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_plan.h: a case before its tensors are laid out: sizes and choices by name. */
#ifndef COT_ATTENTION_PLAN_H
#define COT_ATTENTION_PLAN_H

#include "attention_problem.h"

#include "core/cases.h"

typedef enum attention_layout {
    BTHD,    /* [B,T,H,d] */
    BHTD,    /* [B,H,T,d] */
    SLICE,   /* rows cut out of wider ones, from an odd element on: q, k and v of one projection */
    STRIDED, /* every second column */
    LAYOUT_COUNT
} attention_layout;

typedef struct attention_plan {
    int direction;
    unsigned uses;
    int64_t B, H, Hkv, Tq, Tk, d, dv;
    attention_layout layout;
    cot_dtype dtype;
    bool f32_out; /* out, dq, dk, dv in f32 */
    bool causal, window;
    int64_t left, right;
    double softcap, scale, dropout;
    bool dropout_state; /* seed and offset from memory too */
    bool sink, alibi, bias;
    unsigned bias_axes; /* bit n: axis n is broadcast */
    bool packed, seqused_q, seqused_k;
    bool mixed; /* of the benchmark's packed sequences every other one is three times as long as the others */
    int64_t q_begin, q_length, k_begin, k_length;
    bool dlse, delta, accumulate, any_order;
    bool no_dq, no_dkv, no_out, no_lse;
    bool low_lse; /* of merge: 1000 below what it is otherwise */
    uint64_t seed;
} attention_plan;

enum { CHECKED = COT_CASE_CHECK | COT_CASE_CHECK_CUDA };

extern const cot_dtype attention_float_dtypes[4];

void attention_plan_build(const attention_plan *p, cot_case *c);

/* A case of the command line, and what its words may be; see cot_op_cases. */
extern const char attention_plan_words[];
const char *attention_plan_parse(int direction, int count, char *const words[], cot_case *c);

#endif
