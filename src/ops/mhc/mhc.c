/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc.c: argument checks, kernel tables and public functions of mhc_pre, mhc_sinkhorn, mhc_post and mhc_post_pre. */
#include "mhc_problem.h"

#include "core/cpu_features.h"
#include "core/argument_checks.h"
#include "core/op_tables.h"
#include "core/status.h"

#include <inttypes.h>
#include <math.h>

/* ---- options ------------------------------------------------------------------------------------------ */

/* NaN fails the check. */
static cot_status check_eps(const char *call, const char *name, double eps)
{
    if (eps >= 0 && isfinite(eps))
        return COT_OK;
    return cot_fail(COT_INVALID_ARGUMENT, "%s: %s is %g, expected 0 or more", call, name, eps);
}

static cot_status check_iterations(const char *call, const char *name, int32_t iterations)
{
    enum { MAX_ITERATIONS = 4096 }; /* the backward's workspace grows with the iterations */
    if (iterations >= 1 && iterations <= MAX_ITERATIONS)
        return COT_OK;
    return cot_fail(COT_INVALID_ARGUMENT, "%s: %s is %d, expected 1 to %d", call, name, (int)iterations,
                    (int)MAX_ITERATIONS);
}

static cot_status check_flag(const char *call, const char *name, int32_t value)
{
    if (value == 0 || value == 1)
        return COT_OK;
    return cot_fail(COT_INVALID_ARGUMENT, "%s: %s is %d, expected 0 or 1", call, name, (int)value);
}

static cot_status check_pre_options(const char *call, double hc_eps, double post_scale, bool fused, double sinkhorn_eps,
                                    int32_t iterations)
{
    CHECK(check_eps(call, "hc_eps", hc_eps));
    if (!(post_scale > 0 && isfinite(post_scale)))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: post_scale is %g, expected more than 0", call, post_scale);
    if (!fused)
        return COT_OK;
    CHECK(check_eps(call, "sinkhorn_eps", sinkhorn_eps));
    return check_iterations(call, "sinkhorn_iterations", iterations);
}

/* ---- tensors ------------------------------------------------------------------------------------------ */

/* Checks x[B,T,n,D] and takes all sizes from it. */
static cot_status check_x(const char *call, const cot_tensor *x, mhc_sizes *sizes)
{
    static const char *const symbols[] = {"B", "T", "n", "D"};
    CHECK(cot_check_required(call, "x", x));
    CHECK(cot_check_tensor(call, "x", x, COT_FLOATS, 4, 4));
    for (int axis = 2; axis < 4; axis++)
        if (x->shape[axis] < 1)
            return cot_fail(COT_INVALID_SHAPE, "%s: x has %s=%" PRId64 ", expected 1 or more", call, symbols[axis],
                            x->shape[axis]);
    if (x->shape[2] > INT32_MAX / 4)
        return cot_fail(COT_INVALID_SHAPE, "%s: x has n=%" PRId64 ", expected at most %d", call, x->shape[2],
                        INT32_MAX / 4);
    *sizes = (mhc_sizes){.B = x->shape[0], .T = x->shape[1], .n = x->shape[2], .D = x->shape[3], .dtype = x->dtype};
    sizes->M = cot_mul(sizes->n, sizes->n + 2);
    sizes->tokens = sizes->B * sizes->T;
    return COT_OK;
}

/* A tensor of a call. Each letter of `shape` names an axis: B, T, n, D as in x; M; K = n*D; 3. */
typedef struct tensor_spec {
    const char *name;
    const cot_tensor *tensor;
    const char *shape;
    bool has_x_dtype; /* dtype of x; otherwise f32, or f64 if x is f64 */
    bool required, output;
} tensor_spec;

static cot_status check_shape(const char *call, const tensor_spec *t, const mhc_sizes *sizes, const char *source)
{
    static const struct {
        char letter;
        const char *symbol;
    } symbols[] = {{'B', "B"}, {'T', "T"}, {'n', "n"}, {'D', "D"}, {'M', "M=n*n+2n"}, {'K', "n*D"}, {'3', "3"}};
    const int64_t values[] = {sizes->B, sizes->T, sizes->n, sizes->D, sizes->M, cot_mul(sizes->n, sizes->D), 3};
    for (int axis = 0; t->shape[axis] != '\0'; axis++)
        for (int s = 0; s < COUNT(symbols); s++)
            if (symbols[s].letter == t->shape[axis])
                CHECK(cot_check_size(call, t->name, t->tensor, axis, symbols[s].symbol, source, values[s]));
    return COT_OK;
}

/* Checks shapes and dtypes of all tensors; with_data also their data pointers and overlap. */
static cot_status check_tensors(const char *call, const tensor_spec *tensors, int count, const mhc_sizes *sizes,
                                const char *source, bool with_data)
{
    const cot_dtype coefficient_dtype = sizes->dtype == COT_F64 ? COT_F64 : COT_F32;
    for (int i = 0; i < count; i++) {
        const tensor_spec *t = &tensors[i];
        if (t->required)
            CHECK(cot_check_required(call, t->name, t->tensor));
        if (!cot_is_present(t->tensor))
            continue;
        const int rank = (int)strlen(t->shape);
        CHECK(cot_check_tensor(call, t->name, t->tensor, COT_FLOATS, rank, rank));
        CHECK(check_shape(call, t, sizes, source));
        const cot_dtype expected = t->has_x_dtype ? sizes->dtype : coefficient_dtype;
        if (t->tensor->dtype != expected)
            return cot_fail(COT_INVALID_DTYPE, "%s: %s has dtype %s, expected %s (%s has %s)", call, t->name,
                            cot_dtype_name(t->tensor->dtype), cot_dtype_name(expected), source,
                            cot_dtype_name(sizes->dtype));
    }
    cot_named_tensor memory[COT_MAX_TENSORS];
    for (int i = 0; with_data && i < count; i++)
        memory[i] = (cot_named_tensor){tensors[i].name, tensors[i].tensor, tensors[i].output, false};
    return with_data ? cot_check_memory(call, memory, count) : COT_OK;
}

/* ---- the eight calls ------------------------------------------------------------------------------------ */

/* {name, tensor, shape, has_x_dtype, required, output} */
#define INPUT_LIKE_X(name, shape, required)           \
    {                                                 \
#name, &a->name, shape, true, required, false \
    }
#define INPUT(name, shape, required)                   \
    {                                                  \
#name, &a->name, shape, false, required, false \
    }
#define OUTPUT_LIKE_X(name, shape)                \
    {                                             \
#name, &a->name, shape, true, false, true \
    }
#define OUTPUT(name, shape)                        \
    {                                              \
#name, &a->name, shape, false, false, true \
    }

static cot_status validate_pre_forward(const char *call, const void *args, bool with_data, void *problem)
{
    mhc_pre_forward_problem *p = problem;
    p->args = *(const cot_mhc_pre_forward_args *)args;
    const cot_mhc_pre_forward_args *a = &p->args;
    const tensor_spec tensors[] = {
        INPUT_LIKE_X(x, "BTnD", true), INPUT(phi, "MK", true),     INPUT(alpha, "3", true), INPUT(bias, "M", true),
        INPUT(gamma, "nD", false),     OUTPUT_LIKE_X(h_in, "BTD"), OUTPUT(h_pre, "BTn"),    OUTPUT(h_post, "BTn"),
        OUTPUT(h_res_logits, "BTnn"),  OUTPUT(h_res, "BTnn"),      OUTPUT(inv_rms, "BT"),   OUTPUT(h_mix, "BTM"),
    };
    CHECK(check_eps(call, "norm_eps", a->norm_eps));
    CHECK(check_pre_options(call, a->hc_eps, a->post_scale, cot_is_present(&a->h_res), a->sinkhorn_eps,
                            a->sinkhorn_iterations));
    CHECK(check_x(call, &a->x, &p->sizes));
    return check_tensors(call, tensors, COUNT(tensors), &p->sizes, "x", with_data);
}

static cot_status validate_pre_backward(const char *call, const void *args, bool with_data, void *problem)
{
    mhc_pre_backward_problem *p = problem;
    p->args = *(const cot_mhc_pre_backward_args *)args;
    const cot_mhc_pre_backward_args *a = &p->args;
    const bool fused = cot_is_present(&a->dh_res);
    const tensor_spec tensors[] = {
        INPUT_LIKE_X(x, "BTnD", true), INPUT(phi, "MK", true),
        INPUT(alpha, "3", true),       INPUT(bias, "M", fused),
        INPUT(gamma, "nD", false),     INPUT(inv_rms, "BT", true),
        INPUT(h_mix, "BTM", true),     INPUT(h_pre, "BTn", true),
        INPUT(h_post, "BTn", true),    INPUT_LIKE_X(dh_in, "BTD", true),
        INPUT(dh_post, "BTn", true),   INPUT(dh_res_logits, "BTnn", false),
        INPUT(dh_res, "BTnn", false),  INPUT_LIKE_X(dx_post, "BTnD", false),
        OUTPUT_LIKE_X(dx, "BTnD"),     OUTPUT(dphi, "MK"),
        OUTPUT(dalpha, "3"),           OUTPUT(dbias, "M"),
        OUTPUT(dgamma, "nD"),
    };
    CHECK(check_pre_options(call, a->hc_eps, a->post_scale, fused, a->sinkhorn_eps, a->sinkhorn_iterations));
    CHECK(check_flag(call, "accumulate", a->accumulate));
    CHECK(check_x(call, &a->x, &p->sizes));
    return check_tensors(call, tensors, COUNT(tensors), &p->sizes, "x", with_data);
}

/* Checks h_res_logits[B,T,n,n] of mhc_sinkhorn, which gives all sizes. */
static cot_status check_logits(const char *call, const cot_tensor *h_res_logits, mhc_sizes *sizes)
{
    CHECK(cot_check_required(call, "h_res_logits", h_res_logits));
    CHECK(cot_check_tensor(call, "h_res_logits", h_res_logits, COT_DTYPE_BIT(COT_F32) | COT_DTYPE_BIT(COT_F64), 4, 4));
    if (h_res_logits->shape[2] < 1)
        return cot_fail(COT_INVALID_SHAPE, "%s: h_res_logits has n=%" PRId64 ", expected 1 or more", call,
                        h_res_logits->shape[2]);
    *sizes = (mhc_sizes){.B = h_res_logits->shape[0],
                         .T = h_res_logits->shape[1],
                         .n = h_res_logits->shape[2],
                         .D = 1,
                         .dtype = h_res_logits->dtype};
    sizes->tokens = sizes->B * sizes->T;
    return COT_OK;
}

static cot_status validate_sinkhorn_forward(const char *call, const void *args, bool with_data, void *problem)
{
    mhc_sinkhorn_forward_problem *p = problem;
    p->args = *(const cot_mhc_sinkhorn_forward_args *)args;
    const cot_mhc_sinkhorn_forward_args *a = &p->args;
    const tensor_spec tensors[] = {INPUT(h_res_logits, "BTnn", true), {"h_res", &a->h_res, "BTnn", false, true, true}};
    CHECK(check_eps(call, "eps", a->eps));
    CHECK(check_iterations(call, "iterations", a->iterations));
    CHECK(check_logits(call, &a->h_res_logits, &p->sizes));
    return check_tensors(call, tensors, COUNT(tensors), &p->sizes, "h_res_logits", with_data);
}

static cot_status validate_sinkhorn_backward(const char *call, const void *args, bool with_data, void *problem)
{
    mhc_sinkhorn_backward_problem *p = problem;
    p->args = *(const cot_mhc_sinkhorn_backward_args *)args;
    const cot_mhc_sinkhorn_backward_args *a = &p->args;
    const tensor_spec tensors[] = {INPUT(h_res_logits, "BTnn", true),
                                   INPUT(dh_res, "BTnn", true),
                                   {"dh_res_logits", &a->dh_res_logits, "BTnn", false, true, true}};
    CHECK(check_eps(call, "eps", a->eps));
    CHECK(check_iterations(call, "iterations", a->iterations));
    CHECK(check_logits(call, &a->h_res_logits, &p->sizes));
    return check_tensors(call, tensors, COUNT(tensors), &p->sizes, "h_res_logits", with_data);
}

static void swap_last_axes(cot_tensor *tensor)
{
    const int64_t stride = tensor->stride[2];
    tensor->stride[2] = tensor->stride[3];
    tensor->stride[3] = stride;
}

static cot_status validate_post_forward(const char *call, const void *args, bool with_data, void *problem)
{
    mhc_post_forward_problem *p = problem;
    p->args = *(const cot_mhc_post_forward_args *)args;
    cot_mhc_post_forward_args *a = &p->args;
    const tensor_spec tensors[] = {
        INPUT_LIKE_X(x, "BTnD", true), INPUT_LIKE_X(f, "BTD", true),           INPUT(h_post, "BTn", true),
        INPUT(h_res, "BTnn", true),    {"y", &a->y, "BTnD", true, true, true},
    };
    CHECK(check_flag(call, "h_res_is_out_in", a->h_res_is_out_in));
    CHECK(check_x(call, &a->x, &p->sizes));
    CHECK(check_tensors(call, tensors, COUNT(tensors), &p->sizes, "x", with_data));
    if (a->h_res_is_out_in)
        swap_last_axes(&a->h_res);
    return COT_OK;
}

static cot_status validate_post_backward(const char *call, const void *args, bool with_data, void *problem)
{
    mhc_post_backward_problem *p = problem;
    p->args = *(const cot_mhc_post_backward_args *)args;
    cot_mhc_post_backward_args *a = &p->args;
    const tensor_spec tensors[] = {
        INPUT_LIKE_X(x, "BTnD", true), INPUT_LIKE_X(f, "BTD", true),   INPUT(h_post, "BTn", true),
        INPUT(h_res, "BTnn", true),    INPUT_LIKE_X(dy, "BTnD", true), OUTPUT_LIKE_X(dx, "BTnD"),
        OUTPUT_LIKE_X(df, "BTD"),      OUTPUT(dh_post, "BTn"),         OUTPUT(dh_res, "BTnn"),
    };
    CHECK(check_flag(call, "h_res_is_out_in", a->h_res_is_out_in));
    CHECK(check_x(call, &a->x, &p->sizes));
    CHECK(check_tensors(call, tensors, COUNT(tensors), &p->sizes, "x", with_data));
    if (a->h_res_is_out_in) {
        swap_last_axes(&a->h_res);
        swap_last_axes(&a->dh_res);
    }
    return COT_OK;
}

static cot_status validate_post_pre_forward(const char *call, const void *args, bool with_data, void *problem)
{
    mhc_post_pre_forward_problem *p = problem;
    p->args = *(const cot_mhc_post_pre_forward_args *)args;
    cot_mhc_post_pre_forward_args *a = &p->args;
    const tensor_spec tensors[] = {
        INPUT_LIKE_X(x, "BTnD", true), INPUT_LIKE_X(f, "BTD", true), INPUT(h_post, "BTn", true),
        INPUT(h_res, "BTnn", true),    INPUT(phi, "MK", true),       INPUT(alpha, "3", true),
        INPUT(bias, "M", true),        INPUT(gamma, "nD", false),    {"y", &a->y, "BTnD", true, true, true},
        OUTPUT_LIKE_X(h_in, "BTD"),    OUTPUT(h_pre, "BTn"),         OUTPUT(next_h_post, "BTn"),
        OUTPUT(h_res_logits, "BTnn"),  OUTPUT(next_h_res, "BTnn"),   OUTPUT(inv_rms, "BT"),
        OUTPUT(h_mix, "BTM"),
    };
    CHECK(check_eps(call, "norm_eps", a->norm_eps));
    CHECK(check_pre_options(call, a->hc_eps, a->post_scale, cot_is_present(&a->next_h_res), a->sinkhorn_eps,
                            a->sinkhorn_iterations));
    CHECK(check_flag(call, "h_res_is_out_in", a->h_res_is_out_in));
    CHECK(check_x(call, &a->x, &p->sizes));
    CHECK(check_tensors(call, tensors, COUNT(tensors), &p->sizes, "x", with_data));
    if (a->h_res_is_out_in)
        swap_last_axes(&a->h_res);
    return COT_OK;
}

static cot_status validate_post_pre_backward(const char *call, const void *args, bool with_data, void *problem)
{
    mhc_post_pre_backward_problem *p = problem;
    p->args = *(const cot_mhc_post_pre_backward_args *)args;
    cot_mhc_post_pre_backward_args *a = &p->args;
    const bool fused = cot_is_present(&a->dnext_h_res);
    const tensor_spec tensors[] = {
        INPUT_LIKE_X(x, "BTnD", true),
        INPUT_LIKE_X(f, "BTD", true),
        INPUT(h_post, "BTn", true),
        INPUT(h_res, "BTnn", true),
        INPUT_LIKE_X(y, "BTnD", false),
        INPUT(phi, "MK", true),
        INPUT(alpha, "3", true),
        INPUT(bias, "M", fused),
        INPUT(gamma, "nD", false),
        INPUT(inv_rms, "BT", true),
        INPUT(h_mix, "BTM", true),
        INPUT(h_pre, "BTn", true),
        INPUT(next_h_post, "BTn", true),
        INPUT_LIKE_X(dh_in, "BTD", true),
        INPUT(dnext_h_post, "BTn", true),
        INPUT(dh_res_logits, "BTnn", false),
        INPUT(dnext_h_res, "BTnn", false),
        INPUT_LIKE_X(dy, "BTnD", false),
        OUTPUT_LIKE_X(dx, "BTnD"),
        OUTPUT_LIKE_X(df, "BTD"),
        OUTPUT(dh_post, "BTn"),
        OUTPUT(dh_res, "BTnn"),
        OUTPUT(dphi, "MK"),
        OUTPUT(dalpha, "3"),
        OUTPUT(dbias, "M"),
        OUTPUT(dgamma, "nD"),
    };
    CHECK(check_pre_options(call, a->hc_eps, a->post_scale, fused, a->sinkhorn_eps, a->sinkhorn_iterations));
    CHECK(check_flag(call, "accumulate", a->accumulate));
    CHECK(check_flag(call, "h_res_is_out_in", a->h_res_is_out_in));
    CHECK(check_x(call, &a->x, &p->sizes));
    CHECK(check_tensors(call, tensors, COUNT(tensors), &p->sizes, "x", with_data));
    if (a->h_res_is_out_in) {
        swap_last_axes(&a->h_res);
        swap_last_axes(&a->dh_res);
    }
    return COT_OK;
}

/* ---- tables ------------------------------------------------------------------------------------------- */

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "mhc_pre_kernels.def"
#include "mhc_sinkhorn_kernels.def"
#include "mhc_post_kernels.def"
#include "mhc_post_pre_kernels.def"
#undef COT_KERNEL_ENTRY

#include "mhc_admit.h"
#if defined(COT_CUDA)
#include "cuda/mhc_admit.h"
#endif

#define COT_KERNEL_ENTRY(direction, ...) COT_KERNEL_INITIALIZER(COT_MHC_##direction, __VA_ARGS__),
static const cot_kernel pre_kernels[] = {
#include "mhc_pre_kernels.def"
};
static const cot_kernel sinkhorn_kernels[] = {
#include "mhc_sinkhorn_kernels.def"
};
static const cot_kernel post_kernels[] = {
#include "mhc_post_kernels.def"
};
static const cot_kernel post_pre_kernels[] = {
#include "mhc_post_pre_kernels.def"
};
#undef COT_KERNEL_ENTRY

/* Tables, one entry on a line. */
/* clang-format off */
static const cot_field pre_forward_fields[] = {
    COT_FIELD(mhc_pre_forward, x, COT_INPUT),
    COT_FIELD(mhc_pre_forward, phi, COT_INPUT),
    COT_FIELD(mhc_pre_forward, alpha, COT_INPUT),
    COT_FIELD(mhc_pre_forward, bias, COT_INPUT),
    COT_FIELD(mhc_pre_forward, gamma, COT_INPUT),
    COT_FIELD(mhc_pre_forward, h_in, COT_OUTPUT),
    COT_FIELD(mhc_pre_forward, h_pre, COT_OUTPUT),
    COT_FIELD(mhc_pre_forward, h_post, COT_OUTPUT),
    COT_FIELD(mhc_pre_forward, h_res_logits, COT_OUTPUT),
    COT_FIELD(mhc_pre_forward, h_res, COT_OUTPUT),
    COT_FIELD(mhc_pre_forward, inv_rms, COT_OUTPUT),
    COT_FIELD(mhc_pre_forward, h_mix, COT_OUTPUT),
};

static const cot_field pre_backward_fields[] = {
    COT_FIELD(mhc_pre_backward, x, COT_INPUT),
    COT_FIELD(mhc_pre_backward, phi, COT_INPUT),
    COT_FIELD(mhc_pre_backward, alpha, COT_INPUT),
    COT_FIELD(mhc_pre_backward, bias, COT_INPUT),
    COT_FIELD(mhc_pre_backward, gamma, COT_INPUT),
    COT_FIELD(mhc_pre_backward, inv_rms, COT_INPUT),
    COT_FIELD(mhc_pre_backward, h_mix, COT_INPUT),
    COT_FIELD(mhc_pre_backward, h_pre, COT_INPUT),
    COT_FIELD(mhc_pre_backward, h_post, COT_INPUT),
    COT_FIELD(mhc_pre_backward, dh_in, COT_INPUT),
    COT_FIELD(mhc_pre_backward, dh_post, COT_INPUT),
    COT_FIELD(mhc_pre_backward, dh_res_logits, COT_INPUT),
    COT_FIELD(mhc_pre_backward, dh_res, COT_INPUT),
    COT_FIELD(mhc_pre_backward, dx_post, COT_INPUT),
    COT_FIELD(mhc_pre_backward, dx, COT_OUTPUT),
    COT_GRADIENT(mhc_pre_backward, dphi),
    COT_GRADIENT(mhc_pre_backward, dalpha),
    COT_GRADIENT(mhc_pre_backward, dbias),
    COT_GRADIENT(mhc_pre_backward, dgamma),
};

static const cot_field sinkhorn_forward_fields[] = {
    COT_FIELD(mhc_sinkhorn_forward, h_res_logits, COT_INPUT),
    COT_FIELD(mhc_sinkhorn_forward, h_res, COT_OUTPUT),
};

static const cot_field sinkhorn_backward_fields[] = {
    COT_FIELD(mhc_sinkhorn_backward, h_res_logits, COT_INPUT),
    COT_FIELD(mhc_sinkhorn_backward, dh_res, COT_INPUT),
    COT_FIELD(mhc_sinkhorn_backward, dh_res_logits, COT_OUTPUT),
};

static const cot_field post_forward_fields[] = {
    COT_FIELD(mhc_post_forward, x, COT_INPUT),
    COT_FIELD(mhc_post_forward, f, COT_INPUT),
    COT_FIELD(mhc_post_forward, h_post, COT_INPUT),
    COT_FIELD(mhc_post_forward, h_res, COT_INPUT),
    COT_FIELD(mhc_post_forward, y, COT_OUTPUT),
};

static const cot_field post_backward_fields[] = {
    COT_FIELD(mhc_post_backward, x, COT_INPUT),
    COT_FIELD(mhc_post_backward, f, COT_INPUT),
    COT_FIELD(mhc_post_backward, h_post, COT_INPUT),
    COT_FIELD(mhc_post_backward, h_res, COT_INPUT),
    COT_FIELD(mhc_post_backward, dy, COT_INPUT),
    COT_FIELD(mhc_post_backward, dx, COT_OUTPUT),
    COT_FIELD(mhc_post_backward, df, COT_OUTPUT),
    COT_FIELD(mhc_post_backward, dh_post, COT_OUTPUT),
    COT_FIELD(mhc_post_backward, dh_res, COT_OUTPUT),
};

static const cot_field post_pre_forward_fields[] = {
    COT_FIELD(mhc_post_pre_forward, x, COT_INPUT),
    COT_FIELD(mhc_post_pre_forward, f, COT_INPUT),
    COT_FIELD(mhc_post_pre_forward, h_post, COT_INPUT),
    COT_FIELD(mhc_post_pre_forward, h_res, COT_INPUT),
    COT_FIELD(mhc_post_pre_forward, phi, COT_INPUT),
    COT_FIELD(mhc_post_pre_forward, alpha, COT_INPUT),
    COT_FIELD(mhc_post_pre_forward, bias, COT_INPUT),
    COT_FIELD(mhc_post_pre_forward, gamma, COT_INPUT),
    COT_FIELD(mhc_post_pre_forward, y, COT_OUTPUT),
    COT_FIELD(mhc_post_pre_forward, h_in, COT_OUTPUT),
    COT_FIELD(mhc_post_pre_forward, h_pre, COT_OUTPUT),
    COT_FIELD(mhc_post_pre_forward, next_h_post, COT_OUTPUT),
    COT_FIELD(mhc_post_pre_forward, h_res_logits, COT_OUTPUT),
    COT_FIELD(mhc_post_pre_forward, next_h_res, COT_OUTPUT),
    COT_FIELD(mhc_post_pre_forward, inv_rms, COT_OUTPUT),
    COT_FIELD(mhc_post_pre_forward, h_mix, COT_OUTPUT),
};

static const cot_field post_pre_backward_fields[] = {
    COT_FIELD(mhc_post_pre_backward, x, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, f, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, h_post, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, h_res, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, y, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, phi, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, alpha, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, bias, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, gamma, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, inv_rms, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, h_mix, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, h_pre, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, next_h_post, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, dh_in, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, dnext_h_post, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, dh_res_logits, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, dnext_h_res, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, dy, COT_INPUT),
    COT_FIELD(mhc_post_pre_backward, dx, COT_OUTPUT),
    COT_FIELD(mhc_post_pre_backward, df, COT_OUTPUT),
    COT_FIELD(mhc_post_pre_backward, dh_post, COT_OUTPUT),
    COT_FIELD(mhc_post_pre_backward, dh_res, COT_OUTPUT),
    COT_GRADIENT(mhc_post_pre_backward, dphi),
    COT_GRADIENT(mhc_post_pre_backward, dalpha),
    COT_GRADIENT(mhc_post_pre_backward, dbias),
    COT_GRADIENT(mhc_post_pre_backward, dgamma),
};

static const cot_option pre_forward_options[] = {
    COT_CALL_OPTION(mhc_pre_forward, norm_eps, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_pre_forward, hc_eps, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_pre_forward, post_scale, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_pre_forward, sinkhorn_eps, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_pre_forward, sinkhorn_iterations, I32, NULL, NULL),
};

static const cot_option pre_backward_options[] = {
    COT_CALL_OPTION(mhc_pre_backward, hc_eps, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_pre_backward, post_scale, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_pre_backward, sinkhorn_eps, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_pre_backward, sinkhorn_iterations, I32, NULL, NULL),
    COT_CALL_OPTION(mhc_pre_backward, accumulate, I32, NULL, "1: gradients of parameters are added to old values"),
};

static const cot_option sinkhorn_forward_options[] = {
    COT_CALL_OPTION(mhc_sinkhorn_forward, eps, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_sinkhorn_forward, iterations, I32, NULL, NULL),
};

static const cot_option sinkhorn_backward_options[] = {
    COT_CALL_OPTION(mhc_sinkhorn_backward, eps, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_sinkhorn_backward, iterations, I32, NULL, NULL),
};

static const cot_option post_forward_options[] = {COT_CALL_OPTION(mhc_post_forward, h_res_is_out_in, I32, NULL, "1: the axes of h_res are [out,in]")};
static const cot_option post_backward_options[] = {COT_CALL_OPTION(mhc_post_backward, h_res_is_out_in, I32, NULL, "1: the axes of h_res are [out,in]")};

static const cot_option post_pre_forward_options[] = {
    COT_CALL_OPTION(mhc_post_pre_forward, norm_eps, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_post_pre_forward, hc_eps, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_post_pre_forward, post_scale, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_post_pre_forward, sinkhorn_eps, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_post_pre_forward, sinkhorn_iterations, I32, NULL, NULL),
    COT_CALL_OPTION(mhc_post_pre_forward, h_res_is_out_in, I32, NULL, "1: the axes of h_res are [out,in]"),
};

static const cot_option post_pre_backward_options[] = {
    COT_CALL_OPTION(mhc_post_pre_backward, hc_eps, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_post_pre_backward, post_scale, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_post_pre_backward, sinkhorn_eps, F64, NULL, NULL),
    COT_CALL_OPTION(mhc_post_pre_backward, sinkhorn_iterations, I32, NULL, NULL),
    COT_CALL_OPTION(mhc_post_pre_backward, accumulate, I32, NULL, "1: gradients of parameters are added to old values"),
    COT_CALL_OPTION(mhc_post_pre_backward, h_res_is_out_in, I32, NULL, "1: the axes of h_res are [out,in]"),
};

static const char pre_forward_signature[] =
    "x[B,T,n,D] phi[M,n*D] alpha[3] bias[M] gamma[n,D] h_in[B,T,D] h_pre:f32[B,T,n] h_post:f32[B,T,n] "
    "h_res_logits:f32[B,T,n,n] h_res:f32[B,T,n,n] inv_rms:f32[B,T] h_mix:f32[B,T,M]";
static const char pre_backward_signature[] =
    "x[B,T,n,D] phi[M,n*D] alpha[3] bias[M] gamma[n,D] inv_rms[B,T] h_mix[B,T,M] h_pre[B,T,n] h_post[B,T,n] "
    "dh_in[B,T,D] dh_post[B,T,n] dh_res_logits[B,T,n,n] dh_res[B,T,n,n] dx_post[B,T,n,D] dx=x dphi=phi dalpha=alpha "
    "dbias:f32[M] dgamma:f32[n,D]";
static const char sinkhorn_forward_signature[] = "h_res_logits[B,T,n,n] h_res=h_res_logits";
static const char sinkhorn_backward_signature[] = "h_res_logits[B,T,n,n] dh_res[B,T,n,n] dh_res_logits=h_res_logits";
static const char post_forward_signature[] = "x[B,T,n,D] f[B,T,D] h_post[B,T,n] h_res[B,T,n,n] y=x";
static const char post_backward_signature[] =
    "x[B,T,n,D] f[B,T,D] h_post[B,T,n] h_res[B,T,n,n] dy[B,T,n,D] dx=x df=f dh_post=h_post dh_res=h_res";

static const char post_pre_forward_signature[] =
    "x[B,T,n,D] f[B,T,D] h_post[B,T,n] h_res[B,T,n,n] phi[M,n*D] alpha[3] bias[M] gamma[n,D] y=x h_in[B,T,D] h_pre:f32[B,T,n] "
    "next_h_post:f32[B,T,n] h_res_logits:f32[B,T,n,n] next_h_res:f32[B,T,n,n] inv_rms:f32[B,T] h_mix:f32[B,T,M]";
static const char post_pre_backward_signature[] =
    "x[B,T,n,D] f[B,T,D] h_post[B,T,n] h_res[B,T,n,n] y[B,T,n,D] phi[M,n*D] alpha[3] bias[M] gamma[n,D] inv_rms[B,T] "
    "h_mix[B,T,M] h_pre[B,T,n] next_h_post[B,T,n] dh_in[B,T,D] dnext_h_post[B,T,n] dh_res_logits[B,T,n,n] dnext_h_res[B,T,n,n] "
    "dy[B,T,n,D] dx=x df=f dh_post=h_post dh_res=h_res dphi=phi dalpha=alpha dbias:f32[M] dgamma:f32[n,D]";

static void init_pre_forward(void *args)
{
    COT_MHC_PRE_FORWARD_INIT((cot_mhc_pre_forward_args *)args);
}

static void init_pre_backward(void *args)
{
    COT_MHC_PRE_BACKWARD_INIT((cot_mhc_pre_backward_args *)args);
}

static void init_sinkhorn_forward(void *args)
{
    COT_MHC_SINKHORN_INIT((cot_mhc_sinkhorn_forward_args *)args);
}

static void init_sinkhorn_backward(void *args)
{
    COT_MHC_SINKHORN_INIT((cot_mhc_sinkhorn_backward_args *)args);
}

static void init_post_pre_forward(void *args)
{
    COT_MHC_POST_PRE_FORWARD_INIT((cot_mhc_post_pre_forward_args *)args);
}

static void init_post_pre_backward(void *args)
{
    COT_MHC_POST_PRE_BACKWARD_INIT((cot_mhc_post_pre_backward_args *)args);
}

/* clang-format on */

const cot_direction cot_mhc_pre_directions[] = {
    COT_DIRECTION(mhc_pre, forward, pre_forward, .problem_size = sizeof(mhc_pre_forward_problem),
                  COT_OPTIONS(pre_forward_options), .init = init_pre_forward),
    COT_DIRECTION(mhc_pre, backward, pre_backward, .problem_size = sizeof(mhc_pre_backward_problem),
                  COT_OPTIONS(pre_backward_options), COT_ACCUMULATE(mhc_pre_backward), .init = init_pre_backward),
};
const cot_direction cot_mhc_sinkhorn_directions[] = {
    COT_DIRECTION(mhc_sinkhorn, forward, sinkhorn_forward, .problem_size = sizeof(mhc_sinkhorn_forward_problem),
                  COT_OPTIONS(sinkhorn_forward_options), .init = init_sinkhorn_forward),
    COT_DIRECTION(mhc_sinkhorn, backward, sinkhorn_backward, .problem_size = sizeof(mhc_sinkhorn_backward_problem),
                  COT_OPTIONS(sinkhorn_backward_options), .init = init_sinkhorn_backward),
};
const cot_direction cot_mhc_post_directions[] = {
    COT_DIRECTION(mhc_post, forward, post_forward, .problem_size = sizeof(mhc_post_forward_problem),
                  COT_OPTIONS(post_forward_options)),
    COT_DIRECTION(mhc_post, backward, post_backward, .problem_size = sizeof(mhc_post_backward_problem),
                  COT_OPTIONS(post_backward_options)),
};
const cot_direction cot_mhc_post_pre_directions[] = {
    COT_DIRECTION(mhc_post_pre, forward, post_pre_forward, .problem_size = sizeof(mhc_post_pre_forward_problem),
                  COT_OPTIONS(post_pre_forward_options), .init = init_post_pre_forward),
    COT_DIRECTION(mhc_post_pre, backward, post_pre_backward, .problem_size = sizeof(mhc_post_pre_backward_problem),
                  COT_OPTIONS(post_pre_backward_options), COT_ACCUMULATE(mhc_post_pre_backward),
                  .init = init_post_pre_backward),
};

const cot_op cot_mhc_pre_op = COT_OP(mhc_pre, pre_kernels);
const cot_op cot_mhc_sinkhorn_op = COT_OP(mhc_sinkhorn, sinkhorn_kernels);
const cot_op cot_mhc_post_op = COT_OP(mhc_post, post_kernels);
const cot_op cot_mhc_post_pre_op = COT_OP(mhc_post_pre, post_pre_kernels);

_Static_assert(sizeof(cot_mhc_post_pre_backward_args) <= COT_MAX_ARGS, "dispatch copies the arguments");
_Static_assert(sizeof(mhc_post_pre_backward_problem) <= COT_MAX_PROBLEM, "dispatch holds the problem");

/* ---- the public calls --------------------------------------------------------------------------------- */

COT_PUBLIC_CALL(cot_mhc_pre_forward, cot_mhc_pre_directions[COT_MHC_FORWARD])
COT_PUBLIC_CALL(cot_mhc_pre_backward, cot_mhc_pre_directions[COT_MHC_BACKWARD])
COT_PUBLIC_CALL(cot_mhc_sinkhorn_forward, cot_mhc_sinkhorn_directions[COT_MHC_FORWARD])
COT_PUBLIC_CALL(cot_mhc_sinkhorn_backward, cot_mhc_sinkhorn_directions[COT_MHC_BACKWARD])
COT_PUBLIC_CALL(cot_mhc_post_forward, cot_mhc_post_directions[COT_MHC_FORWARD])
COT_PUBLIC_CALL(cot_mhc_post_backward, cot_mhc_post_directions[COT_MHC_BACKWARD])
COT_PUBLIC_CALL(cot_mhc_post_pre_forward, cot_mhc_post_pre_directions[COT_MHC_FORWARD])
COT_PUBLIC_CALL(cot_mhc_post_pre_backward, cot_mhc_post_pre_directions[COT_MHC_BACKWARD])
