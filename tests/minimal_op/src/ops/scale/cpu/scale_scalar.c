/* SPDX-License-Identifier: Apache-2.0
 *
 * scale_scalar.c: y[i] = factor x[i], for any stride and dtype. An item is ITEM elements. */
#include "core/float16.h"
#include "core/integers.h"
#include "../scale_problem.h"

#ifdef COT_SCALAR_F64
typedef double real;
#define NAME(stem) stem##_f64
#else
typedef float real;
#define NAME(stem) stem
#endif

cot_status NAME(scale_fwd_scalar)(cot_queue *, const void *, void *);

enum { ITEM = 4096 };

static void forward_item(void *argument, int64_t item)
{
    const scale_forward_problem *p = argument;
    const cot_tensor *x = &p->args.x, *y = &p->args.y;
    const real factor = (real)p->args.factor;
    for (int64_t i = item * ITEM; i < cot_min((item + 1) * ITEM, p->sizes.N); i++)
        cot_store_f64(y->data, y->dtype, i * y->stride[0],
                      factor * (real)cot_load_f64(x->data, x->dtype, i * x->stride[0]));
}

cot_status NAME(scale_fwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    scale_forward_problem p = *(const scale_forward_problem *)problem;
    cot_run_items(queue, cot_ceil_div(p.sizes.N, ITEM), forward_item, &p);
    return COT_OK;
}
