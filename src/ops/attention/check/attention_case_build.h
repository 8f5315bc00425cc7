/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_case_build.h: builds a case from its sizes and options. */
#ifndef COT_ATTENTION_CASE_BUILD_H
#define COT_ATTENTION_CASE_BUILD_H

#include "../attention_problem.h"

#include "cases/cases.h"

typedef enum attention_layout {
    BTHD,    /* [B,T,H,d] */
    BHTD,    /* [B,H,T,d] */
    SLICE,   /* rows cut out of wider ones from an odd element on, as q, k and v of one projection */
    STRIDED, /* every second column */
    LAYOUT_COUNT
} attention_layout;

typedef struct attention_case_params {
    int direction;
    unsigned uses;
    int64_t B, H, Hkv, Tq, Tk, d, d_v;
    attention_layout layout;
    cot_dtype dtype;
    bool f32_out; /* out, dq, dk and dv are f32 */
    bool causal, window;
    int64_t left, right;
    double softcap, scale, dropout;
    bool dropout_state; /* seed and offset are partly in memory */
    bool sink, alibi, bias;
    unsigned bias_axes; /* bit n: axis n has size 1 */
    bool packed, seqused_q, seqused_k;
    bool mixed; /* benchmark only: every other packed sequence is three times as long as the others */
    int64_t q_begin, q_length, k_begin, k_length;
    bool dlse, delta, accumulate, allow_nondeterminism;
    bool no_dq, no_dkv, no_out, no_lse;
    bool low_lse; /* merge only: lse is 1000 lower than usual */
    uint64_t seed;
} attention_case_params;

enum { CHECKED = COT_CASE_CHECK | COT_CASE_CHECK_CUDA };

void attention_case_build(const attention_case_params *p, cot_case *c);

/* Builds a case and visits it. */
void attention_case_visit(cot_case_visitor *v, const attention_case_params *p);

/* Sets feature number `feature` of a case, with values drawn from *state. */
enum { ATTENTION_CASE_FEATURES = 16 };
void attention_case_add_feature(attention_case_params *p, int feature, uint64_t *state);

/* Visits the cases of a direction for GPUs alone (attention_cases_cuda.c), those of the Hopper backward, and those of the
 * benchmark (attention_cases_bench.c). */
void attention_visit_cuda_cases(cot_case_visitor *v, int direction);
void attention_visit_hopper_backward_cases(cot_case_visitor *v);
void attention_visit_bench_cases(cot_case_visitor *v, int direction);

/* Parses the command line's words of a case, and the help text for them; see cot_op_cases. */
extern const char attention_case_help[];
const char *attention_case_parse(int direction, int count, char *const words[], cot_case *c);

#endif
