/* SPDX-License-Identifier: Apache-2.0
 *
 * scale.c: the checks of the arguments, the tables, the public calls. */
#include "scale_problem.h"

#include "core/argument_checks.h"
#include "core/cpu_features.h"
#include "core/op_tables.h"
#include "core/status.h"

static cot_status validate_forward(const char *call, const void *args, bool with_data, void *problem)
{
    scale_forward_problem *p = problem;
    p->args = *(const cot_scale_forward_args *)args;
    const cot_scale_forward_args *a = &p->args;
    const cot_named_tensor tensors[] = {COT_IN_PLACE_INPUT(a, x), COT_IN_PLACE_OUTPUT(a, y)};
    CHECK(cot_check_required(call, "x", &a->x));
    CHECK(cot_check_tensor(call, "x", &a->x, COT_FLOATS, 1, 1));
    p->sizes.N = a->x.shape[0];
    p->sizes.dtype = a->x.dtype;
    CHECK(cot_check_required(call, "y", &a->y));
    CHECK(cot_check_tensor(call, "y", &a->y, COT_DTYPE_BIT(a->x.dtype), 1, 1));
    CHECK(cot_check_size(call, "y", &a->y, 0, "N", "x", p->sizes.N));
    return with_data ? cot_check_memory(call, tensors, COUNT(tensors)) : COT_OK;
}

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "scale_kernels.def"
#undef COT_KERNEL_ENTRY

#include "scale_admit.h"

static const cot_kernel kernels[] = {
#define COT_KERNEL_ENTRY(direction, ...) COT_KERNEL_INITIALIZER(COT_SCALE_##direction, __VA_ARGS__),
#include "scale_kernels.def"
#undef COT_KERNEL_ENTRY
};

/* clang-format off */
static const cot_field forward_fields[] = {
    COT_FIELD(scale_forward, x, COT_INPUT),
    COT_FIELD(scale_forward, y, COT_OUTPUT),
};
static const cot_option forward_options[] = {COT_CALL_OPTION(scale_forward, factor, F64, NULL, NULL)};
static const char forward_signature[] = "x[N] y=x";
/* clang-format on */

const cot_direction cot_scale_directions[] = {
    COT_DIRECTION(scale, forward, forward, .problem_size = sizeof(scale_forward_problem), COT_OPTIONS(forward_options)),
};

const cot_op cot_scale_op = COT_OP(scale, kernels);

COT_PUBLIC_CALL(cot_scale_forward, cot_scale_directions[COT_SCALE_FORWARD])
