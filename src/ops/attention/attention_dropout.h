/* SPDX-License-Identifier: Apache-2.0
 * attention_dropout.h: which elements of P dropout keeps, by the formula of cotangent/attention.h. */
#ifndef COT_ATTENTION_DROPOUT_H
#define COT_ATTENTION_DROPOUT_H

#include "attention_problem.h"
#include "core/philox.h"

/* The dropout mask of one sequence and query head. */
typedef struct attention_dropout {
    uint64_t seed, offset;
    uint64_t first_row;      /* r of query 0 in the header's formula */
    uint64_t groups_per_row; /* groups of 8 keys in a row */
    int64_t k_begin;         /* the mask's column of key 0 */
    uint32_t dropped;        /* drop probability times 65536; 0: everything is kept */
    double factor;           /* 1/keep; 0 if everything is dropped */
} attention_dropout;

/* An i32 [2] tensor (low, high) as one number; 0 if absent. */
static inline uint64_t attention_load_u64(const cot_tensor *t)
{
    if (!cot_is_present(t))
        return 0;
    return (uint64_t)(uint32_t)attention_load_i32(t, 0) | (uint64_t)(uint32_t)attention_load_i32(t, 1) << 32;
}

static inline attention_dropout attention_dropout_of(const attention_problem *p, const attention_sequence *s, int64_t h)
{
    const attention_sizes *sizes = &p->sizes;
    attention_dropout a = {.dropped = sizes->dropped, .factor = 1};
    if (sizes->dropped == 0)
        return a;
    a.seed = p->dropout_seed + attention_load_u64(&p->dropout_seed_tensor);
    a.offset = p->dropout_offset + attention_load_u64(&p->dropout_offset_tensor);
    const int64_t R = sizes->packed ? attention_load_i32(&p->cu_seqlens_q, sizes->B) : sizes->B * sizes->q_length;
    a.first_row = (uint64_t)(h * R + (sizes->packed ? s->q_row : s->b * sizes->q_length + sizes->q_begin));
    a.groups_per_row = (uint64_t)cot_ceil_div(sizes->longest_k, COT_DROPOUT_GROUP);
    a.k_begin = sizes->k_begin;
    a.factor = sizes->dropped < 65536 ? 65536.0 / (65536 - sizes->dropped) : 0;
    return a;
}

/* m[i,j] / keep: the factor of P[i,j] */
static inline double attention_dropout_factor(const attention_dropout *a, int64_t i, int64_t j)
{
    if (a->dropped == 0)
        return 1;
    const uint64_t column = (uint64_t)(a->k_begin + j);
    const uint64_t group = (a->first_row + (uint64_t)i) * a->groups_per_row + column / COT_DROPOUT_GROUP;
    const uint32_t keep = cot_dropout_keep(a->seed, a->offset, group, a->dropped);
    return keep >> (column % COT_DROPOUT_GROUP) & 1 ? a->factor : 0;
}

#endif
