/* SPDX-License-Identifier: Apache-2.0
 * attention_admit.h: which problems each kernel admits, its cost and its workspace. For attention.c. Costs are
 * approximate core cycles; only their order matters. */
#ifndef COT_ATTENTION_ADMIT_H
#define COT_ATTENTION_ADMIT_H

#include "cpu/attention_partition.h"

#include "core/op_tables.h"

COT_ADMIT_SCALAR(attention_sizes)

/* Pairs of a query and a key, as if all were visible. The visible share is the same for every kernel. */
static inline double attention_pairs(const attention_sizes *sizes)
{
    return (double)sizes->H * (double)sizes->rows_q * (double)sizes->Tk;
}

static inline double cost_fwd_scalar(const void *problem)
{
    const attention_sizes *sizes = problem;
    return attention_pairs(sizes) * (40 + 8 * (double)(sizes->d_qk + sizes->d_v));
}

static inline double cost_bwd_scalar(const void *problem)
{
    const attention_sizes *sizes = problem;
    return attention_pairs(sizes) * (60 + 20 * (double)(sizes->d_qk + sizes->d_v));
}

/* Of the scalar kernels and the GPU kernels of delta and merge. */
static inline double cost_rows(const void *problem)
{
    const attention_sizes *sizes = problem;
    return 10.0 * (double)sizes->B * (double)sizes->Tq * (double)sizes->H * (double)sizes->d_v;
}

/* The vectorised kernels of delta and merge. */
static inline const char *attention_admit_rows(const attention_sizes *sizes, const cot_tensor *const tensors[3])
{
    if (sizes->dtype == COT_F64)
        return "it computes in float32, the tensors are f64";
    for (int i = 0; i < 3; i++)
        if (cot_is_present(tensors[i]) && tensors[i]->stride[3] != 1 && tensors[i]->shape[3] > 1)
            return "the last axis of a tensor is not contiguous";
    return NULL;
}

static inline const char *admit_delta_rows(const void *problem)
{
    const attention_delta_problem *p = problem;
    return attention_admit_rows(&p->sizes, (const cot_tensor *const[]){&p->args.out, &p->args.dout, &p->args.out});
}

static inline const char *admit_merge_rows(const void *problem)
{
    const attention_merge_problem *p = problem;
    return attention_admit_rows(&p->sizes, (const cot_tensor *const[]){&p->args.out_a, &p->args.out_b, &p->args.out});
}

/* This kernel differs from the AVX-512 one only in its stores, so it admits only bf16 outputs. */
static inline const char *admit_merge_bf16(const void *problem)
{
    const attention_merge_problem *p = problem;
    if (cot_is_present(&p->args.out) && p->args.out.dtype != COT_BF16)
        return "it stores bf16";
    return admit_merge_rows(problem);
}

static inline double attention_cost_rows(const void *problem, double cycles)
{
    const attention_sizes *sizes = problem;
    return cycles * (double)sizes->B * (double)sizes->Tq * (double)sizes->H * (10 + (double)sizes->d_v);
}

static inline double cost_rows_portable(const void *problem)
{
    return attention_cost_rows(problem, 4);
}

static inline double cost_rows_avx2(const void *problem)
{
    return attention_cost_rows(problem, 0.5);
}

static inline double cost_rows_avx512(const void *problem)
{
    return attention_cost_rows(problem, 0.25);
}

static inline double cost_rows_avx512bf16(const void *problem)
{
    return attention_cost_rows(problem, 0.2);
}

/* Forward: for every sequence and head, one row of scores and one row of out. */
static inline size_t workspace_fwd_scalar(const void *problem)
{
    const attention_sizes *sizes = problem;
    return cot_bytes(COT_PRODUCT(sizes->B + sizes->packed, sizes->H, sizes->Tk + sizes->d_v), sizeof(double));
}

/* Backward: for every sequence and key-value head, dk and dv of all rows, and one row of dq. */
static inline size_t workspace_bwd_scalar(const void *problem)
{
    const attention_sizes *sizes = problem;
    const int64_t sums = COT_PRODUCT(sizes->rows_k, sizes->Hkv, sizes->d_qk + sizes->d_v);
    return cot_bytes(cot_add(sums, COT_PRODUCT(sizes->B + sizes->packed, sizes->Hkv, sizes->d_qk)), sizeof(double));
}

/* ---- tiled kernels --------------------------------------------------------------------------------------- */

static inline const char *attention_admit_tiled(const attention_problem *p)
{
    const attention_sizes *sizes = &p->sizes;
    const cot_tensor *const rows[] = {&p->q, &p->k, &p->v, &p->out, &p->dout, &p->dq, &p->dk, &p->dv};
    if (sizes->dtype == COT_F64)
        return "it computes in float32, the tensors are f64";
    if (sizes->d_qk > ATTENTION_MAX_D || sizes->d_v > ATTENTION_MAX_D)
        return "it supports d and d_v up to 256";
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (cot_is_present(rows[i]) && rows[i]->stride[3] != 1 && rows[i]->shape[3] > 1)
            return "the last axis of a tensor is not contiguous";
    return NULL;
}

static inline const char *admit_tiled(const void *problem)
{
    return attention_admit_tiled(problem);
}

/* These kernels round P and dS to 16 bits between two products. A float32 output would show that. */
static inline const char *attention_admit_16_bits(const attention_problem *p, const char *rounds)
{
    const cot_tensor *const outputs[] = {&p->out, &p->dq, &p->dk, &p->dv};
    const bool backward = cot_is_present(&p->dout);
    for (size_t i = backward; i < sizeof outputs / sizeof *outputs; i++)
        if (cot_is_present(outputs[i]) && outputs[i]->dtype == COT_F32)
            return rounds;
    return attention_admit_tiled(p);
}

static inline const char *admit_tiled_amx(const void *problem)
{
    const attention_problem *p = problem;
    if (p->sizes.dtype != COT_BF16)
        return "it supports bf16 only";
    return attention_admit_16_bits(p, "it rounds P to bf16, an output is f32");
}

static inline const char *admit_tiled_split(const void *problem)
{
    const attention_problem *p = problem;
    if (p->sizes.dtype != COT_F16)
        return "it supports f16 only";
    return attention_admit_16_bits(p, "it rounds P to two bf16, an output is f32");
}

static inline const char *admit_tiled_split3(const void *problem)
{
    const attention_problem *p = problem;
    if (p->sizes.dtype != COT_F32)
        return "it supports f32 only";
    return attention_admit_tiled(p);
}

/* Whole strips are computed. `rate` is multiply-adds per cycle, `softmax` is cycles per pair. */
static inline double attention_cost_tiled(const attention_problem *p, double multiplications, double rate,
                                          double softmax)
{
    const attention_sizes *sizes = &p->sizes;
    softmax += (sizes->softcap > 0 ? 50 : 0) + (sizes->dropped > 0 ? 10 : 0) +
               (cot_is_present(&p->bias) || cot_is_present(&p->alibi_slopes) ? 10 : 0);
    const double sequences = (double)sizes->B + 1;
    const double rows_q = (double)sizes->H * ((double)sizes->rows_q + sequences * ATTENTION_STRIP);
    const double rows_k = (double)sizes->Hkv * ((double)sizes->rows_k + sequences * ATTENTION_BLOCK);
    const double pairs = rows_q * (double)cot_round_up(sizes->Tk, ATTENTION_STRIP);
    /* dbias computes two of the five products again, and it sums in double. */
    if (cot_is_present(&p->dbias)) {
        multiplications *= 1.4;
        softmax += 5;
    }
    return pairs * (multiplications / rate + softmax) + (rows_q + rows_k) * (double)(sizes->d_qk + sizes->d_v) + 20000;
}

/* `size` is the bytes of an operand's element: a float, or one to three bf16. `keys` is the maximum keys of a forward
 * block. */
#define COT_WORKSPACES(name, size, one_form, keys)                                                \
    COT_PLAN(plan_fwd_##name, attention_fwd_layout, attention_fwd_layout_of(problem, size, keys)) \
    COT_PLAN(plan_bwd_##name, attention_bwd_layout, attention_bwd_layout_of(problem, size))       \
    static inline size_t scratch_fwd_##name(const void *problem)                                  \
    {                                                                                             \
        (void)problem;                                                                            \
        return ATTENTION_FWD_SCRATCH(size, one_form, keys);                                       \
    }                                                                                             \
    static inline size_t scratch_bwd_##name(const void *problem)                                  \
    {                                                                                             \
        const attention_problem *p = problem;                                                     \
        return ATTENTION_BWD_SCRATCH(size, one_form) +                                            \
               (cot_is_present(&p->dbias) ? ATTENTION_DBIAS_SCRATCH(size) : 0);                   \
    }
COT_WORKSPACES(tiled, 4, true, ATTENTION_BLOCK)
COT_WORKSPACES(tiled_amx, 2, false, ATTENTION_FWD_AMX_KEYS(2))
COT_WORKSPACES(tiled_amx_split, 4, false, ATTENTION_FWD_AMX_KEYS(4))
COT_WORKSPACES(tiled_amx_split3, 6, false, ATTENTION_FWD_AMX_KEYS(6))
#undef COT_WORKSPACES

/* Costs by instruction set: multiply-adds per cycle, and effective lanes of the softmax. For a score the softmax
 * takes 16 / lanes cycles in the forward and 20 / lanes in the backward. */
#define COT_COSTS(isa, rate, lanes)                                                                           \
    static inline double cost_fwd_tiled_##isa(const void *problem)                                            \
    {                                                                                                         \
        const attention_sizes *sizes = problem;                                                               \
        return attention_cost_tiled(problem, (double)(sizes->d_qk + sizes->d_v), rate, 16.0 / lanes);         \
    }                                                                                                         \
    static inline double cost_bwd_tiled_##isa(const void *problem)                                            \
    {                                                                                                         \
        const attention_sizes *sizes = problem;                                                               \
        return attention_cost_tiled(problem, (double)(3 * sizes->d_qk + 2 * sizes->d_v), rate, 20.0 / lanes); \
    }
COT_COSTS(portable, 2, 2)
COT_COSTS(avx2, 12, 8)
COT_COSTS(avx512, 24, 16)
COT_COSTS(amx, 300, 16)
COT_COSTS(amx_split, 100, 8)
COT_COSTS(amx_split3, 40, 8)
#undef COT_COSTS

#endif
