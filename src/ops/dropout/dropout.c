/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout.c: the checks of the arguments, the source and scale of the mask, the merging of leading axes, the tables of
 * kernels, tensors and options, and the public calls. */
#include "dropout_problem.h"

#include "core/cpu_features.h"
#include "core/float_state.h"
#include "core/argument_checks.h"
#include "core/op_tables.h"
#include "core/status.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>

/* ---- checks of both calls ----------------------------------------------------------------------------- */

static cot_status check_activation(const char *call, cot_activation activation)
{
    if ((int)activation >= COT_ACTIVATION_NONE && (int)activation <= COT_ACTIVATION_GELU_ERF)
        return COT_OK;
    return cot_fail(COT_INVALID_ARGUMENT,
                    "%s: activation is %d, expected 0 (none), 1 (SiLU), 2 (ReLU), 3 (GELU, tanh) or 4 (GELU, erf)",
                    call, (int)activation);
}

/* Checks the tensor that defines R and D: x in the forward, dy in the backward. */
static cot_status check_first(const char *call, const char *name, const cot_tensor *first, dropout_sizes *sizes)
{
    CHECK(cot_check_required(call, name, first));
    CHECK(cot_check_tensor(call, name, first, COT_FLOATS, 1, COT_MAX_RANK));
    sizes->dtype = first->dtype;
    sizes->D = first->shape[first->rank - 1];
    sizes->groups = cot_ceil_div(sizes->D, COT_DROPOUT_GROUP);
    sizes->R = 1;
    for (int axis = 0; axis < first->rank - 1; axis++)
        sizes->R *= first->shape[axis];
    return COT_OK;
}

/* Checks that the leading axes are those of `first`, and that the last one has size `last`, named `symbol`. */
static cot_status check_rows(const char *call, const char *name, const cot_tensor *tensor, unsigned dtypes,
                             const char *first_name, const cot_tensor *first, const char *symbol, int64_t last)
{
    if (!cot_is_present(tensor))
        return cot_check_tensor(call, name, tensor, dtypes, first->rank, first->rank);
    CHECK(cot_check_tensor(call, name, tensor, dtypes, first->rank, first->rank));
    for (int axis = 0; axis < first->rank - 1; axis++)
        if (tensor->shape[axis] != first->shape[axis])
            return cot_fail(COT_INVALID_SHAPE, "%s: %s has size %" PRId64 " on axis %d, %s has %" PRId64, call, name,
                            tensor->shape[axis], axis, first_name, first->shape[axis]);
    return cot_check_size(call, name, tensor, first->rank - 1, symbol, first_name, last);
}

/* Checks that a tensor has the shape and dtype of `first`. */
static cot_status check_like(const char *call, const char *name, const cot_tensor *tensor, const char *first_name,
                             const cot_tensor *first)
{
    CHECK(check_rows(call, name, tensor, COT_FLOATS, first_name, first, "D", first->shape[first->rank - 1]));
    if (cot_is_present(tensor) && tensor->dtype != first->dtype)
        return cot_fail(COT_INVALID_DTYPE, "%s: %s has dtype %s, %s has %s", call, name, cot_dtype_name(tensor->dtype),
                        first_name, cot_dtype_name(first->dtype));
    return COT_OK;
}

static cot_status check_parameter(const char *call, const char *name, const cot_tensor *tensor, const char *first_name,
                                  const dropout_sizes *sizes)
{
    CHECK(cot_check_tensor(call, name, tensor, COT_FLOATS, 1, 1));
    if (!cot_is_present(tensor))
        return COT_OK;
    CHECK(cot_check_size(call, name, tensor, 0, "D", first_name, sizes->D));
    if ((tensor->dtype == COT_F64) != (sizes->dtype == COT_F64))
        return cot_fail(COT_INVALID_DTYPE, "%s: %s has dtype %s, %s has %s (f64 goes with f64 only)", call, name,
                        cot_dtype_name(tensor->dtype), first_name, cot_dtype_name(sizes->dtype));
    return COT_OK;
}

static cot_status check_word64(const char *call, const char *name, const cot_tensor *tensor)
{
    CHECK(cot_check_tensor(call, name, tensor, COT_DTYPE_BIT(COT_I32), 1, 1));
    if (cot_is_present(tensor) && tensor->shape[0] != 2)
        return cot_fail(COT_INVALID_SHAPE, "%s: %s has size %" PRId64 ", expected 2 (low word, high word)", call, name,
                        tensor->shape[0]);
    return COT_OK;
}

/* Checks a mask, input or output, of bytes or bits. */
static cot_status check_mask(const char *call, const char *name, const cot_tensor *tensor, bool bits,
                             const char *first_name, const cot_tensor *first, const dropout_sizes *sizes)
{
    return check_rows(call, name, tensor, COT_DTYPE_BIT(COT_U8), first_name, first, bits ? "ceil(D/8)" : "D",
                      bits ? sizes->groups : sizes->D);
}

/* The scale c of a mask that is generated with probability p in [0, 1]. */
static double generated_scale(double p)
{
    const uint32_t threshold = cot_dropout_threshold(p);
    return threshold < 65536 ? 65536.0 / (65536 - threshold) : 0;
}

/* Sets the source of the mask m, and the scale c. If `scale` is 0, c is 1/(1-p) for a given mask. For a generated mask
 * it is 65536/(65536-threshold), which is exact for the probability that the threshold represents. */
static cot_status set_mask(const char *call, double p, double scale, const cot_tensor *mask,
                           const cot_tensor *mask_bits, dropout_mask *result)
{
    if (!(p >= 0 && p <= 1))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: p is %g, expected 0 to 1", call, p);
    if (!(scale >= 0 && scale <= FLT_MAX))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: scale is %g, expected 0 (it follows from p) or a positive number",
                        call, scale);
    if (cot_is_present(mask) && cot_is_present(mask_bits))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: mask and mask_bits are both given, expected at most one", call);
    const uint32_t threshold = cot_dropout_threshold(p);
    const bool given = cot_is_present(mask) || cot_is_present(mask_bits);
    result->threshold = threshold;
    result->given = cot_is_present(mask) ? *mask : *mask_bits;
    result->source = cot_is_present(mask)        ? DROPOUT_BYTES
                     : cot_is_present(mask_bits) ? DROPOUT_BITS
                     : threshold == 0            ? DROPOUT_KEEP_ALL
                     : threshold < 65536         ? DROPOUT_GENERATED
                                                 : DROPOUT_DROP_ALL;
    result->scale = scale > 0 ? scale : !given ? generated_scale(p) : p < 1 ? 1 / (1 - p) : 0;
    return COT_OK;
}

/* ---- merging of leading axes -------------------------------------------------------------------------- */

/* Whether axes `axis` and `axis`+1 of this tensor can be one axis with one stride. */
static bool mergeable(const cot_tensor *tensor, int axis)
{
    return !cot_is_present(tensor) || tensor->shape[axis + 1] == 1 || tensor->shape[axis] == 1 ||
           tensor->stride[axis] == tensor->shape[axis + 1] * tensor->stride[axis + 1];
}

static void merge_axis(cot_tensor *tensor, int axis)
{
    if (!cot_is_present(tensor))
        return;
    if (tensor->shape[axis + 1] == 1)
        tensor->stride[axis + 1] = tensor->stride[axis];
    tensor->shape[axis + 1] *= tensor->shape[axis];
    for (int i = axis; i < tensor->rank - 1; i++) {
        tensor->shape[i] = tensor->shape[i + 1];
        tensor->stride[i] = tensor->stride[i + 1];
    }
    tensor->rank--;
}

/* Merges the leading axes of all tensors as far as possible: to rank 2 if all rows are at regular distances. */
static void merge_leading_axes(cot_tensor *const *tensors, int count, int rank)
{
    for (int axis = rank - 3; axis >= 0; axis--) {
        bool all = true;
        for (int i = 0; i < count; i++)
            all = all && mergeable(tensors[i], axis);
        for (int i = 0; all && i < count; i++)
            merge_axis(tensors[i], axis);
    }
}

/* ---- the two calls ------------------------------------------------------------------------------------ */

static cot_status validate_forward(const char *call, const void *args, bool with_data, void *problem)
{
    dropout_forward_problem *p = problem;
    p->args = *(const cot_dropout_forward_args *)args;
    cot_dropout_forward_args *a = &p->args;
    const cot_named_tensor tensors[] = {
        COT_IN_PLACE_INPUT(a, x), COT_IN(a, bias),           COT_IN_PLACE_INPUT(a, residual), COT_IN(a, mask),
        COT_IN(a, mask_bits),     COT_IN(a, seed_tensor),    COT_IN(a, offset_tensor),        COT_IN_PLACE_OUTPUT(a, y),
        COT_OUT(a, mask_out),     COT_OUT(a, mask_bits_out),
    };
    CHECK(check_activation(call, a->activation));
    CHECK(check_first(call, "x", &a->x, &p->sizes));
    CHECK(check_parameter(call, "bias", &a->bias, "x", &p->sizes));
    CHECK(check_like(call, "residual", &a->residual, "x", &a->x));
    CHECK(check_mask(call, "mask", &a->mask, false, "x", &a->x, &p->sizes));
    CHECK(check_mask(call, "mask_bits", &a->mask_bits, true, "x", &a->x, &p->sizes));
    CHECK(check_word64(call, "seed_tensor", &a->seed_tensor));
    CHECK(check_word64(call, "offset_tensor", &a->offset_tensor));
    CHECK(check_like(call, "y", &a->y, "x", &a->x));
    CHECK(check_mask(call, "mask_out", &a->mask_out, false, "x", &a->x, &p->sizes));
    CHECK(check_mask(call, "mask_bits_out", &a->mask_bits_out, true, "x", &a->x, &p->sizes));
    CHECK(set_mask(call, a->p, a->scale, &a->mask, &a->mask_bits, &p->mask));
    if (with_data)
        CHECK(cot_check_memory(call, tensors, COUNT(tensors)));
    cot_tensor *const rows[] = {&a->x, &a->residual, &a->y, &a->mask_out, &a->mask_bits_out, &p->mask.given};
    merge_leading_axes(rows, COUNT(rows), a->x.rank);
    p->mask.seed = a->seed;
    p->mask.offset = a->offset;
    p->mask.seed_tensor = a->seed_tensor;
    p->mask.offset_tensor = a->offset_tensor;
    return COT_OK;
}

static cot_status validate_backward(const char *call, const void *args, bool with_data, void *problem)
{
    dropout_backward_problem *p = problem;
    p->args = *(const cot_dropout_backward_args *)args;
    cot_dropout_backward_args *a = &p->args;
    const cot_named_tensor tensors[] = {
        COT_IN_PLACE_INPUT(a, dy), COT_IN_PLACE_INPUT(a, x),   COT_IN(a, bias),
        COT_IN(a, mask),           COT_IN(a, mask_bits),       COT_IN(a, seed_tensor),
        COT_IN(a, offset_tensor),  COT_IN_PLACE_OUTPUT(a, dx), COT_OUT(a, dbias),
    };
    CHECK(check_activation(call, a->activation));
    if (a->accumulate != 0 && a->accumulate != 1)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: accumulate is %d, expected 0 or 1", call, (int)a->accumulate);
    CHECK(check_first(call, "dy", &a->dy, &p->sizes));
    if (a->activation != COT_ACTIVATION_NONE && !cot_is_present(&a->x))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: x is required with an activation", call);
    CHECK(check_like(call, "x", &a->x, "dy", &a->dy));
    CHECK(check_parameter(call, "bias", &a->bias, "dy", &p->sizes));
    CHECK(check_mask(call, "mask", &a->mask, false, "dy", &a->dy, &p->sizes));
    CHECK(check_mask(call, "mask_bits", &a->mask_bits, true, "dy", &a->dy, &p->sizes));
    CHECK(check_word64(call, "seed_tensor", &a->seed_tensor));
    CHECK(check_word64(call, "offset_tensor", &a->offset_tensor));
    CHECK(check_like(call, "dx", &a->dx, "dy", &a->dy));
    CHECK(check_parameter(call, "dbias", &a->dbias, "dy", &p->sizes));
    CHECK(set_mask(call, a->p, a->scale, &a->mask, &a->mask_bits, &p->mask));
    if (with_data)
        CHECK(cot_check_memory(call, tensors, COUNT(tensors)));
    if (a->activation == COT_ACTIVATION_NONE)
        a->x = a->bias = (cot_tensor){0};
    cot_tensor *const rows[] = {&a->dy, &a->x, &a->dx, &p->mask.given};
    merge_leading_axes(rows, COUNT(rows), a->dy.rank);
    p->mask.seed = a->seed;
    p->mask.offset = a->offset;
    p->mask.seed_tensor = a->seed_tensor;
    p->mask.offset_tensor = a->offset_tensor;
    return COT_OK;
}

/* ---- tables ------------------------------------------------------------------------------------------- */

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "dropout_kernels.def"
#undef COT_KERNEL_ENTRY

#if defined(COT_CUDA) || defined(COT_HIP)
#include "cuda/dropout_admit.h"
#endif
#include "dropout_admit.h"

static const cot_kernel kernels[] = {
#define COT_KERNEL_ENTRY(direction, ...) COT_KERNEL_INITIALIZER(COT_DROPOUT_##direction, __VA_ARGS__),
#include "dropout_kernels.def"
#undef COT_KERNEL_ENTRY
};

/* Tables, one entry per line. */
/* clang-format off */

static const cot_field forward_fields[] = {
    COT_FIELD(dropout_forward, x, COT_INPUT),
    COT_FIELD(dropout_forward, bias, COT_INPUT),
    COT_FIELD(dropout_forward, residual, COT_INPUT),
    COT_FIELD(dropout_forward, mask, COT_INPUT),
    COT_FIELD(dropout_forward, mask_bits, COT_INPUT),
    COT_FIELD(dropout_forward, seed_tensor, COT_INPUT),
    COT_FIELD(dropout_forward, offset_tensor, COT_INPUT),
    COT_FIELD(dropout_forward, y, COT_OUTPUT),
    COT_FIELD(dropout_forward, mask_out, COT_OUTPUT),
    COT_FIELD(dropout_forward, mask_bits_out, COT_OUTPUT),
};

static const cot_field backward_fields[] = {
    COT_FIELD(dropout_backward, dy, COT_INPUT),
    COT_FIELD(dropout_backward, x, COT_INPUT),
    COT_FIELD(dropout_backward, bias, COT_INPUT),
    COT_FIELD(dropout_backward, mask, COT_INPUT),
    COT_FIELD(dropout_backward, mask_bits, COT_INPUT),
    COT_FIELD(dropout_backward, seed_tensor, COT_INPUT),
    COT_FIELD(dropout_backward, offset_tensor, COT_INPUT),
    COT_FIELD(dropout_backward, dx, COT_OUTPUT),
    COT_GRADIENT(dropout_backward, dbias),
};

#define SHARED_OPTIONS(call) \
    COT_CALL_OPTION(call, activation, ENUM, "none silu relu gelu_tanh gelu_erf", NULL), \
    COT_CALL_OPTION(call, p, F64, NULL, "probability of dropping"), \
    COT_CALL_OPTION(call, scale, F64, NULL, "factor of kept elements; default 1/(1-p) for a given mask, " \
                    "65536/(65536-P) for a generated one, P = round(65536 p)"), \
    COT_CALL_OPTION(call, seed, U64, NULL, NULL), \
    COT_CALL_OPTION(call, offset, U64, NULL, NULL)

static const cot_option forward_options[] = {SHARED_OPTIONS(dropout_forward)};
static const cot_option backward_options[] = {
    SHARED_OPTIONS(dropout_backward),
    COT_CALL_OPTION(dropout_backward, accumulate, I32, NULL, "1: dbias is added to its old value"),
};

static const char forward_signature[] =
    "x[...,D] bias[D] residual[...,D] mask[...,D] mask_bits[...,D/8] seed_tensor[2] offset_tensor[2] y=x "
    "mask_out:u8[...,D] mask_bits_out:u8[...,D/8]";
static const char backward_signature[] =
    "dy[...,D] x[...,D] bias[D] mask[...,D] mask_bits[...,D/8] seed_tensor[2] offset_tensor[2] dx=dy dbias:f32[D]";

/* clang-format on */

const cot_direction cot_dropout_directions[] = {
    COT_DIRECTION(dropout, forward, forward, .problem_size = sizeof(dropout_forward_problem),
                  COT_OPTIONS(forward_options)),
    COT_DIRECTION(dropout, backward, backward, .problem_size = sizeof(dropout_backward_problem),
                  COT_OPTIONS(backward_options), COT_ACCUMULATE(dropout_backward)),
};

const cot_op cot_dropout_op = COT_OP(dropout, kernels);

_Static_assert(sizeof(cot_dropout_forward_args) <= COT_MAX_ARGS, "dispatch copies the arguments");
_Static_assert(sizeof(dropout_forward_problem) <= COT_MAX_PROBLEM, "dispatch holds the problem");
_Static_assert(sizeof(dropout_backward_problem) <= COT_MAX_PROBLEM, "dispatch holds the problem");

/* ---- the public calls --------------------------------------------------------------------------------- */

double cot_dropout_scale(double p)
{
    fenv_t host;
    cot_enter_default_float_state(&host);
    /* volatile: the compiler may move arithmetic across the calls, but not volatile accesses. */
    const volatile double given = p;
    const volatile double scale = given >= 0 && given <= 1 ? generated_scale(given) : NAN;
    cot_restore_float_state(&host);
    return scale;
}

COT_PUBLIC_CALL(cot_dropout_forward, cot_dropout_directions[COT_DROPOUT_FORWARD])
COT_PUBLIC_CALL(cot_dropout_backward, cot_dropout_directions[COT_DROPOUT_BACKWARD])
