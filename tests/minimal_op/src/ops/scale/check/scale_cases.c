/* SPDX-License-Identifier: Apache-2.0
 *
 * scale_cases.c: the cases that check and bench run: sizes around the edge of an item, all dtypes, strides. */
#include "../scale_problem.h"
#include "cases/case_words.h"
#include "cases/cases.h"
#include "scale_ref.h"

#include <stdio.h>

typedef struct case_shape {
    int64_t N, stride;
    cot_dtype dtype;
} case_shape;

static void build(const case_shape *p, unsigned uses, cot_case *c)
{
    *c = (cot_case){.direction = COT_SCALE_FORWARD, .uses = uses, .seed = 1, .flops = (double)p->N};
    cot_scale_forward_args *a = (cot_scale_forward_args *)c->args;
    COT_INIT(a);
    a->factor = 0.7f; /* exact in float, so that all kernels multiply by the same number */
    a->x = cot_tensor_contiguous(NULL, p->dtype, 1, &p->N);
    a->y = a->x;
    a->x.stride[0] = p->stride;
    c->layout = p->stride == 1 ? "contiguous" : "strided";
    snprintf(c->shape, sizeof c->shape, "N%lld", (long long)p->N);
}

static void visit_cases(bool (*visit)(void *context, const cot_case *), void *context)
{
    static const int64_t sizes[] = {0, 1, 4095, 4096, 4097, 1 << 22};
    static const cot_dtype dtypes[] = {COT_F32, COT_F16, COT_BF16, COT_F64};
    cot_case_visitor visitor = {.visit = visit, .context = context};
    cot_case c;
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++)
        for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
            for (int64_t stride = 1; stride < 3; stride++) {
                const bool large = sizes[n] > 4097;
                build(&(case_shape){sizes[n], stride, dtypes[d]},
                      large ? COT_CASE_BENCH : COT_CASE_CHECK | COT_CASE_QUICK, &c);
                cot_visit_case(&visitor, &c);
            }
}

static const char *parse(int direction, int count, char *const words[], cot_case *c)
{
    static const cot_text_option sizes[] = {
        {"N", offsetof(case_shape, N)}, {"stride", offsetof(case_shape, stride)}, {0}};
    case_shape p = {.N = 1 << 20, .stride = 1, .dtype = COT_F32};
    (void)direction;
    for (int i = 0; i < count; i++)
        if (!cot_parse_size(&p, sizes, words[i]) && !cot_parse_float_dtype(&p.dtype, words[i]))
            return words[i];
    build(&p, COT_CASE_CHECK | COT_CASE_BENCH, c);
    return NULL;
}

static int primal(int direction)
{
    (void)direction;
    return -1; /* no direction is a gradient */
}

const cot_op_cases cot_scale_cases = {
    .op = &cot_scale_op,
    .each = visit_cases,
    .parse = parse,
    .options_help = "N=1048576 stride=1, f32 f16 bf16 f64",
    .oracles = cot_scale_oracles,
    .primal = primal,
};
