/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense.c: argument checks, the kernel table and the public functions of causal_conv1d_dense. */
#include "causal_conv1d_dense_problem.h"

#include "core/cpu_features.h"
#include "core/argument_checks.h"
#include "core/op_tables.h"
#include "core/status.h"

#include <inttypes.h>

/* ---- checks that the two calls share ------------------------------------------------------------------- */

/* Sets B, Din, T from x, and Dout, K from weight. */
static cot_status check_x_and_weight(const char *call, const cot_tensor *x, const cot_tensor *weight,
                                     const cot_tensor *bias, conv1d_dense_sizes *sizes)
{
    CHECK(cot_check_required(call, "x", x));
    CHECK(cot_check_tensor(call, "x", x, COT_FLOATS, 3, 3));
    CHECK(cot_check_required(call, "weight", weight));
    CHECK(cot_check_tensor(call, "weight", weight, COT_FLOATS, 3, 3));
    *sizes = (conv1d_dense_sizes){x->shape[0], x->shape[1], weight->shape[0], x->shape[2], weight->shape[2], x->dtype};
    CHECK(cot_check_size(call, "weight", weight, 1, "Din", "x", sizes->Din));
    if (sizes->K < 1)
        return cot_fail(COT_INVALID_SHAPE, "%s: weight has K=%" PRId64 ", expected 1 or more", call, sizes->K);
    CHECK(cot_check_tensor(call, "bias", bias, COT_FLOATS, 1, 1));
    return cot_is_present(bias) ? cot_check_size(call, "bias", bias, 0, "Dout", "weight", sizes->Dout) : COT_OK;
}

/* Checks x, dx, y or dy: [B,channels,T] of x's dtype. */
static cot_status check_tokens(const char *call, const char *name, const cot_tensor *tensor, const char *symbol,
                               const char *source, int64_t channels, const conv1d_dense_sizes *sizes)
{
    if (!cot_is_present(tensor))
        return cot_check_tensor(call, name, tensor, COT_FLOATS, 3, 3);
    CHECK(cot_check_tensor(call, name, tensor, COT_FLOATS, 3, 3));
    CHECK(cot_check_size(call, name, tensor, 0, "B", "x", sizes->B));
    CHECK(cot_check_size(call, name, tensor, 1, symbol, source, channels));
    CHECK(cot_check_size(call, name, tensor, 2, "T", "x", sizes->T));
    if (tensor->dtype != sizes->dtype)
        return cot_fail(COT_INVALID_DTYPE, "%s: %s has dtype %s, x has %s", call, name, cot_dtype_name(tensor->dtype),
                        cot_dtype_name(sizes->dtype));
    return COT_OK;
}

static cot_status check_state(const char *call, const char *name, const cot_tensor *tensor,
                              const conv1d_dense_sizes *sizes)
{
    CHECK(cot_check_tensor(call, name, tensor, COT_FLOATS, 3, 3));
    if (!cot_is_present(tensor))
        return COT_OK;
    CHECK(cot_check_size(call, name, tensor, 0, "B", "x", sizes->B));
    CHECK(cot_check_size(call, name, tensor, 1, "Din", "x", sizes->Din));
    return cot_check_size(call, name, tensor, 2, "K-1", "weight", sizes->K - 1);
}

/* ---- the two calls -------------------------------------------------------------------------------------- */

static cot_status validate_forward(const char *call, const void *args, bool with_data, void *problem)
{
    conv1d_dense_forward_problem *p = problem;
    p->args = *(const cot_causal_conv1d_dense_forward_args *)args;
    const cot_causal_conv1d_dense_forward_args *a = &p->args;
    const conv1d_dense_sizes *sizes = &p->sizes;
    const cot_named_tensor tensors[] = {
        COT_IN(a, x),  COT_IN(a, weight),       COT_IN(a, bias), COT_IN(a, initial_state),
        COT_OUT(a, y), COT_OUT(a, final_state),
    };
    CHECK(cot_check_silu(call, a->activation));
    CHECK(check_x_and_weight(call, &a->x, &a->weight, &a->bias, &p->sizes));
    CHECK(check_state(call, "initial_state", &a->initial_state, sizes));
    CHECK(check_tokens(call, "y", &a->y, "Dout", "weight", sizes->Dout, sizes));
    CHECK(check_state(call, "final_state", &a->final_state, sizes));
    CHECK(cot_check_f64(call, &a->x, tensors, COUNT(tensors)));
    return with_data ? cot_check_memory(call, tensors, COUNT(tensors)) : COT_OK;
}

static cot_status validate_backward(const char *call, const void *args, bool with_data, void *problem)
{
    conv1d_dense_backward_problem *p = problem;
    p->args = *(const cot_causal_conv1d_dense_backward_args *)args;
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    const conv1d_dense_sizes *sizes = &p->sizes;
    const cot_named_tensor tensors[] = {
        COT_IN(a, x),      COT_IN(a, weight),          COT_IN(a, bias), COT_IN(a, initial_state),
        COT_IN(a, dy),     COT_IN(a, dfinal_state),    COT_OUT(a, dx),  COT_OUT(a, dweight),
        COT_OUT(a, dbias), COT_OUT(a, dinitial_state),
    };
    CHECK(cot_check_silu(call, a->activation));
    if (a->accumulate != 0 && a->accumulate != 1)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: accumulate is %d, expected 0 or 1", call, (int)a->accumulate);
    CHECK(check_x_and_weight(call, &a->x, &a->weight, &a->bias, &p->sizes));
    CHECK(check_state(call, "initial_state", &a->initial_state, sizes));
    CHECK(cot_check_required(call, "dy", &a->dy));
    CHECK(check_tokens(call, "dy", &a->dy, "Dout", "weight", sizes->Dout, sizes));
    CHECK(check_state(call, "dfinal_state", &a->dfinal_state, sizes));
    CHECK(check_tokens(call, "dx", &a->dx, "Din", "x", sizes->Din, sizes));
    CHECK(cot_check_tensor(call, "dweight", &a->dweight, COT_FLOATS, 3, 3));
    if (cot_is_present(&a->dweight)) {
        CHECK(cot_check_size(call, "dweight", &a->dweight, 0, "Dout", "weight", sizes->Dout));
        CHECK(cot_check_size(call, "dweight", &a->dweight, 1, "Din", "weight", sizes->Din));
        CHECK(cot_check_size(call, "dweight", &a->dweight, 2, "K", "weight", sizes->K));
    }
    CHECK(cot_check_tensor(call, "dbias", &a->dbias, COT_FLOATS, 1, 1));
    if (cot_is_present(&a->dbias))
        CHECK(cot_check_size(call, "dbias", &a->dbias, 0, "Dout", "weight", sizes->Dout));
    CHECK(check_state(call, "dinitial_state", &a->dinitial_state, sizes));
    CHECK(cot_check_f64(call, &a->x, tensors, COUNT(tensors)));
    return with_data ? cot_check_memory(call, tensors, COUNT(tensors)) : COT_OK;
}

/* ---- tables --------------------------------------------------------------------------------------------- */

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "causal_conv1d_dense_kernels.def"
#undef COT_KERNEL_ENTRY

#include "causal_conv1d_dense_admit.h"

static const cot_kernel kernels[] = {
#define COT_KERNEL_ENTRY(direction, ...) COT_KERNEL_INITIALIZER(COT_CAUSAL_CONV1D_DENSE_##direction, __VA_ARGS__),
#include "causal_conv1d_dense_kernels.def"
#undef COT_KERNEL_ENTRY
};

/* Tables: one entry per line. */
/* clang-format off */

static const cot_field forward_fields[] = {
    COT_FIELD(causal_conv1d_dense_forward, x, COT_INPUT),
    COT_FIELD(causal_conv1d_dense_forward, weight, COT_INPUT),
    COT_FIELD(causal_conv1d_dense_forward, bias, COT_INPUT),
    COT_FIELD(causal_conv1d_dense_forward, initial_state, COT_INPUT),
    COT_FIELD(causal_conv1d_dense_forward, y, COT_OUTPUT),
    COT_FIELD(causal_conv1d_dense_forward, final_state, COT_OUTPUT),
};

static const cot_field backward_fields[] = {
    COT_FIELD(causal_conv1d_dense_backward, x, COT_INPUT),
    COT_FIELD(causal_conv1d_dense_backward, weight, COT_INPUT),
    COT_FIELD(causal_conv1d_dense_backward, bias, COT_INPUT),
    COT_FIELD(causal_conv1d_dense_backward, initial_state, COT_INPUT),
    COT_FIELD(causal_conv1d_dense_backward, dy, COT_INPUT),
    COT_FIELD(causal_conv1d_dense_backward, dfinal_state, COT_INPUT),
    COT_FIELD(causal_conv1d_dense_backward, dx, COT_OUTPUT),
    COT_GRADIENT(causal_conv1d_dense_backward, dweight),
    COT_GRADIENT(causal_conv1d_dense_backward, dbias),
    COT_FIELD(causal_conv1d_dense_backward, dinitial_state, COT_OUTPUT),
};

static const cot_option forward_options[] = {COT_CALL_OPTION(causal_conv1d_dense_forward, activation, ENUM, "none silu", NULL)};
static const cot_option backward_options[] = {
    COT_CALL_OPTION(causal_conv1d_dense_backward, activation, ENUM, "none silu", NULL),
    COT_CALL_OPTION(causal_conv1d_dense_backward, accumulate, I32, NULL, "1: dweight and dbias are added to old values"),
};

static const char forward_signature[] =
    "x[B,Din,T] weight[Dout,Din,K] bias[Dout] initial_state[B,Din,K-1] y[B,Dout,T] final_state[B,Din,K-1]";
static const char backward_signature[] =
    "x[B,Din,T] weight[Dout,Din,K] bias[Dout] initial_state[B,Din,K-1] dy[B,Dout,T] dfinal_state[B,Din,K-1] dx=x "
    "dweight=weight dbias:weight[Dout] dinitial_state[B,Din,K-1]";

/* clang-format on */

const cot_direction cot_causal_conv1d_dense_directions[] = {
    COT_DIRECTION(causal_conv1d_dense, forward, forward, .problem_size = sizeof(conv1d_dense_forward_problem),
                  COT_OPTIONS(forward_options)),
    COT_DIRECTION(causal_conv1d_dense, backward, backward, .problem_size = sizeof(conv1d_dense_backward_problem),
                  COT_OPTIONS(backward_options), COT_ACCUMULATE(causal_conv1d_dense_backward)),
};

const cot_op cot_causal_conv1d_dense_op = COT_OP(causal_conv1d_dense, kernels);

_Static_assert(sizeof(cot_causal_conv1d_dense_backward_args) <= COT_MAX_ARGS, "dispatch copies the arguments");
_Static_assert(sizeof(conv1d_dense_backward_problem) <= COT_MAX_PROBLEM, "dispatch holds the problem");

/* ---- the public calls ----------------------------------------------------------------------------------- */

COT_PUBLIC_CALL(cot_causal_conv1d_dense_forward, cot_causal_conv1d_dense_directions[COT_CAUSAL_CONV1D_DENSE_FORWARD])
COT_PUBLIC_CALL(cot_causal_conv1d_dense_backward, cot_causal_conv1d_dense_directions[COT_CAUSAL_CONV1D_DENSE_BACKWARD])
