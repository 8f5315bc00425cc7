/* SPDX-License-Identifier: Apache-2.0
 * attention_sm80_admit.h: which problems the portable CUDA kernels support, at what cost, with how much workspace. For
 * attention.c and attention_sm80_launch.c. */
#ifndef COT_ATTENTION_SM80_ADMIT_H
#define COT_ATTENTION_SM80_ADMIT_H

#include "../attention_problem.h"
#include "attention_sm80.h"

#include "core/op_tables.h"

/* Softcap, ALiBi, bias or dropout need kernels with more registers for the scores. */
static inline bool attention_has_score_mods(const attention_problem *p)
{
    return p->sizes.softcap > 0 || p->sizes.dropped > 0 || cot_is_present(&p->alibi_slopes) || cot_is_present(&p->bias);
}

/* Requirements of every portable kernel. The smallest tile of any kernel has 16 rows. */
static inline const char *attention_portable_refusal(const attention_problem *p)
{
    const attention_sizes *sizes = &p->sizes;
    if (sizes->d_qk > 256 || sizes->d_v > 256)
        return "it supports d and d_v up to 256";
    /* The sum of a row index, the distance of two rows and ATTENTION_UNBOUNDED_32 fits in 31 bits. */
    const int64_t max_rows = INT32_MAX / 8;
    if (sizes->q_length > max_rows || sizes->k_length > max_rows ||
        (sizes->packed && (sizes->rows_q > max_rows || sizes->rows_k > max_rows)))
        return "it counts Tq and Tk in 28 bits";
    const int64_t tiles = cot_max(cot_ceil_div(cot_max(sizes->Tq, sizes->Tk), 16), 1);
    if ((double)tiles * (double)sizes->H * (double)(sizes->B + sizes->packed) > INT32_MAX)
        return "the grid would exceed 2^31 - 1 thread blocks (B, H, Tq or Tk)";
    if (cot_is_present(&p->dbias) && (double)cot_elements(&p->dbias) > INT32_MAX)
        return "the grid would exceed 2^31 - 1 thread blocks (dbias)";
    return NULL;
}

static inline const char *attention_sm80_refusal(const attention_problem *p, cot_dtype dtype)
{
    if (p->sizes.dtype != dtype)
        return dtype == COT_BF16 ? "it supports bf16 only" : "it supports f16 only";
    return attention_portable_refusal(p);
}

static inline const char *admit_bf16_sm80(const void *problem)
{
    return attention_sm80_refusal(problem, COT_BF16);
}

static inline const char *admit_f16_sm80(const void *problem)
{
    return attention_sm80_refusal(problem, COT_F16);
}

static inline const char *admit_f32_sm80(const void *problem)
{
    const attention_problem *p = problem;
    return p->sizes.dtype == COT_F64 ? "it computes in float32, the tensors are f64" : attention_portable_refusal(p);
}

static inline const char *admit_rows_sm80(const void *problem)
{
    const attention_sizes *sizes = problem;
    if (sizes->dtype == COT_F64)
        return "it computes in float32, the tensors are f64";
    return (double)sizes->B * (double)sizes->H * (double)sizes->Tq > INT32_MAX
               ? "the grid would exceed 2^31 - 1 thread blocks (B, H and Tq)"
               : NULL;
}

/* Twice the cost of the Hopper kernels for a score (cost_fwd_sm90). */
static inline double cost_sm80(const void *problem)
{
    const attention_sizes *sizes = problem;
    return 3000.0 + 2 * (double)sizes->H * (double)sizes->rows_q * (double)sizes->Tk;
}

static inline double cost_f32_sm80(const void *problem)
{
    return 20 * cost_sm80(problem);
}

/* Whether attention_bwd_one_pass_sm80.cu supports the problem, if the device has enough shared memory. For d up to 192
 * with d_v up to 128 other kernels fill up fewer columns with zeros. */
static inline bool attention_supports_one_pass(const attention_problem *p)
{
    const attention_sizes *sizes = &p->sizes;
    return !attention_has_score_mods(p) && !(sizes->d_qk > 128 && sizes->d_qk <= 192 && sizes->d_v <= 128);
}

/* Whether that pass also computes dq, in any order of blocks, if it supports the problem. */
static inline bool attention_one_pass_computes_dq(const attention_problem *p)
{
    return p->allow_nondeterminism && cot_is_present(&p->dq) && (cot_is_present(&p->dk) || cot_is_present(&p->dv));
}

/* Rows of dq_accum for one head. */
static inline int64_t attention_accum_rows(const attention_sizes *sizes)
{
    const int64_t rows = ATTENTION_ACCUM_ROWS;
    return cot_mul(rows,
                   sizes->packed ? sizes->rows_q / rows + sizes->B : cot_mul(sizes->B, cot_ceil_div(sizes->Tq, rows)));
}

/* The plan of a backward. The offsets of the workspace's regions are in bytes. lse of the rows comes first. */
typedef struct attention_sm80_bwd_plan {
    bool supports_one_pass; /* see attention_supports_one_pass */
    bool pass_computes_dq;  /* one pass computes dq, dk and dv */
    int64_t accum_rows;     /* rows of dq_accum for one head; 0 without pass_computes_dq */
    size_t row_delta, dq_accum, bytes;
} attention_sm80_bwd_plan;

static inline attention_sm80_bwd_plan attention_sm80_bwd_plan_of(const attention_problem *p, bool supports_one_pass)
{
    const attention_sizes *sizes = &p->sizes;
    const bool pass_computes_dq = supports_one_pass && attention_one_pass_computes_dq(p);
    const int64_t rows = cot_mul(sizes->H, sizes->rows_q), longest = cot_max(sizes->d_qk, sizes->d_v),
                  columns = longest <= 64    ? 64
                            : longest <= 128 ? 128
                                             : 256;
    attention_sm80_bwd_plan plan = {.supports_one_pass = supports_one_pass,
                                    .pass_computes_dq = pass_computes_dq,
                                    .accum_rows = pass_computes_dq ? attention_accum_rows(sizes) : 0};
    cot_workspace_reserve(&plan.bytes, rows, sizeof(float));
    plan.row_delta = cot_workspace_reserve(&plan.bytes, rows, sizeof(float));
    plan.dq_accum = cot_workspace_reserve(&plan.bytes, COT_PRODUCT(sizes->H, plan.accum_rows, columns), sizeof(float));
    return plan;
}

COT_PLAN(plan_bwd_f32, attention_sm80_bwd_plan, attention_sm80_bwd_plan_of(problem, false))
COT_PLAN(plan_bwd_sm80, attention_sm80_bwd_plan,
         attention_sm80_bwd_plan_of(problem, attention_supports_one_pass(problem)))

#endif
