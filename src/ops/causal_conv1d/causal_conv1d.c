/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d.c: argument checks, the kernel table and the public functions of causal_conv1d. */
#include "causal_conv1d_problem.h"

#include "core/cpu_features.h"
#include "core/argument_checks.h"
#include "core/op_tables.h"
#include "core/status.h"

#include <inttypes.h>

/* ---- checks that the three calls share ---------------------------------------------------------------- */

/* Sets B, D, T from x, and K from weight. */
static cot_status check_x_and_weight(const char *call, const cot_tensor *x, int min_rank, const cot_tensor *weight,
                                     const cot_tensor *bias, conv1d_sizes *sizes)
{
    CHECK(cot_check_required(call, "x", x));
    CHECK(cot_check_tensor(call, "x", x, COT_FLOATS, min_rank, 3));
    CHECK(cot_check_required(call, "weight", weight));
    CHECK(cot_check_tensor(call, "weight", weight, COT_FLOATS, 2, 2));
    sizes->B = x->shape[0];
    sizes->D = x->shape[1];
    sizes->T = x->rank == 3 ? x->shape[2] : 1;
    sizes->sequence_count = sizes->B; /* check_packing changes it */
    sizes->K = weight->shape[1];
    sizes->dtype = x->dtype;
    CHECK(cot_check_size(call, "weight", weight, 0, "D", "x", sizes->D));
    if (sizes->K < 1)
        return cot_fail(COT_INVALID_SHAPE, "%s: weight has K=%" PRId64 ", expected 1 or more", call, sizes->K);
    CHECK(cot_check_tensor(call, "bias", bias, COT_FLOATS, 1, 1));
    return cot_is_present(bias) ? cot_check_size(call, "bias", bias, 0, "D", "x", sizes->D) : COT_OK;
}

/* Checks a tensor that has the shape and dtype of x: y, dy, dx. */
static cot_status check_like_x(const char *call, const char *name, const cot_tensor *tensor, const cot_tensor *x)
{
    static const char *const symbols[] = {"B", "D", "T"};
    if (!cot_is_present(tensor))
        return COT_OK;
    CHECK(cot_check_tensor(call, name, tensor, COT_FLOATS, x->rank, x->rank));
    for (int axis = 0; axis < x->rank; axis++)
        CHECK(cot_check_size(call, name, tensor, axis, symbols[axis], "x", x->shape[axis]));
    if (tensor->dtype != x->dtype)
        return cot_fail(COT_INVALID_DTYPE, "%s: %s has dtype %s, x has %s", call, name, cot_dtype_name(tensor->dtype),
                        cot_dtype_name(x->dtype));
    return COT_OK;
}

static cot_status check_state(const char *call, const char *name, const cot_tensor *tensor, const conv1d_sizes *sizes,
                              bool packed)
{
    if (!cot_is_present(tensor))
        return COT_OK;
    CHECK(cot_check_tensor(call, name, tensor, COT_FLOATS, 3, 3));
    CHECK(
        cot_check_size(call, name, tensor, 0, packed ? "N" : "B", packed ? "cu_seqlens" : "x", sizes->sequence_count));
    CHECK(cot_check_size(call, name, tensor, 1, "D", "x", sizes->D));
    return cot_check_size(call, name, tensor, 2, "K-1", "weight", sizes->K - 1);
}

static cot_status check_packing(const char *call, const cot_tensor *seq_idx, const cot_tensor *cu_seqlens,
                                conv1d_sizes *sizes)
{
    CHECK(cot_check_tensor(call, "seq_idx", seq_idx, COT_DTYPE_BIT(COT_I32), 2, 2));
    CHECK(cot_check_tensor(call, "cu_seqlens", cu_seqlens, COT_DTYPE_BIT(COT_I32), 1, 1));
    if (cot_is_present(seq_idx) && cot_is_present(cu_seqlens))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: seq_idx and cu_seqlens are both given, expected at most one", call);
    if (cot_is_present(seq_idx)) {
        CHECK(cot_check_size(call, "seq_idx", seq_idx, 0, "B", "x", sizes->B));
        CHECK(cot_check_size(call, "seq_idx", seq_idx, 1, "T", "x", sizes->T));
    }
    if (cot_is_present(cu_seqlens)) {
        if (sizes->B != 1)
            return cot_fail(COT_INVALID_SHAPE, "%s: x has B=%" PRId64 ", expected 1 with cu_seqlens", call, sizes->B);
        if (cu_seqlens->shape[0] < 1)
            return cot_fail(COT_INVALID_SHAPE, "%s: cu_seqlens has 0 entries, expected N+1", call);
        sizes->sequence_count = cu_seqlens->shape[0] - 1;
    }
    return COT_OK;
}

static cot_status check_cu_seqlens(const char *call, const cot_tensor *cu_seqlens, int64_t T)
{
    if (!cot_is_present(cu_seqlens))
        return COT_OK;
    if (conv1d_index(cu_seqlens, 0) != 0)
        return cot_fail(COT_INVALID_DATA, "%s: cu_seqlens[0] is %" PRId64 ", expected 0", call,
                        conv1d_index(cu_seqlens, 0));
    for (int64_t n = 1; n < cu_seqlens->shape[0]; n++)
        if (conv1d_index(cu_seqlens, n) < conv1d_index(cu_seqlens, n - 1))
            return cot_fail(COT_INVALID_DATA,
                            "%s: cu_seqlens[%" PRId64 "] is %" PRId64 ", less than %" PRId64 " before it", call, n,
                            conv1d_index(cu_seqlens, n), conv1d_index(cu_seqlens, n - 1));
    const int64_t last = conv1d_index(cu_seqlens, cu_seqlens->shape[0] - 1);
    if (last > T)
        return cot_fail(COT_INVALID_DATA, "%s: cu_seqlens ends at %" PRId64 ", x has T=%" PRId64, call, last, T);
    return COT_OK;
}

/* ---- the three calls ---------------------------------------------------------------------------------- */

static cot_status validate_forward(const char *call, const void *args, bool with_data, void *problem)
{
    conv1d_forward_problem *p = problem;
    p->args = *(const cot_causal_conv1d_forward_args *)args;
    const cot_causal_conv1d_forward_args *a = &p->args;
    const cot_named_tensor tensors[] = {
        COT_IN(a, x),       COT_IN(a, weight),     COT_IN(a, bias), COT_IN(a, initial_state),
        COT_IN(a, seq_idx), COT_IN(a, cu_seqlens), COT_OUT(a, y),   COT_OUT(a, final_state),
    };
    CHECK(cot_check_silu(call, a->activation));
    CHECK(check_x_and_weight(call, &a->x, 3, &a->weight, &a->bias, &p->sizes));
    CHECK(check_packing(call, &a->seq_idx, &a->cu_seqlens, &p->sizes));
    CHECK(check_state(call, "initial_state", &a->initial_state, &p->sizes, cot_is_present(&a->cu_seqlens)));
    CHECK(check_like_x(call, "y", &a->y, &a->x));
    CHECK(check_state(call, "final_state", &a->final_state, &p->sizes, cot_is_present(&a->cu_seqlens)));
    CHECK(cot_check_f64(call, &a->x, tensors, COUNT(tensors)));
    return with_data ? cot_check_memory(call, tensors, COUNT(tensors)) : COT_OK;
}

static cot_status validate_backward(const char *call, const void *args, bool with_data, void *problem)
{
    conv1d_backward_problem *p = problem;
    p->args = *(const cot_causal_conv1d_backward_args *)args;
    const cot_causal_conv1d_backward_args *a = &p->args;
    const bool packed = cot_is_present(&a->cu_seqlens);
    const cot_named_tensor tensors[] = {
        COT_IN(a, x),       COT_IN(a, weight),     COT_IN(a, bias),   COT_IN(a, initial_state),
        COT_IN(a, seq_idx), COT_IN(a, cu_seqlens), COT_IN(a, dy),     COT_IN(a, dfinal_state),
        COT_OUT(a, dx),     COT_OUT(a, dweight),   COT_OUT(a, dbias), COT_OUT(a, dinitial_state),
    };
    CHECK(cot_check_silu(call, a->activation));
    if (a->accumulate != 0 && a->accumulate != 1)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: accumulate is %d, expected 0 or 1", call, (int)a->accumulate);
    CHECK(check_x_and_weight(call, &a->x, 3, &a->weight, &a->bias, &p->sizes));
    CHECK(check_packing(call, &a->seq_idx, &a->cu_seqlens, &p->sizes));
    CHECK(check_state(call, "initial_state", &a->initial_state, &p->sizes, packed));
    CHECK(cot_check_required(call, "dy", &a->dy));
    CHECK(check_like_x(call, "dy", &a->dy, &a->x));
    CHECK(check_state(call, "dfinal_state", &a->dfinal_state, &p->sizes, packed));
    CHECK(check_like_x(call, "dx", &a->dx, &a->x));
    CHECK(cot_check_tensor(call, "dweight", &a->dweight, COT_FLOATS, 2, 2));
    if (cot_is_present(&a->dweight)) {
        CHECK(cot_check_size(call, "dweight", &a->dweight, 0, "D", "weight", p->sizes.D));
        CHECK(cot_check_size(call, "dweight", &a->dweight, 1, "K", "weight", p->sizes.K));
    }
    CHECK(cot_check_tensor(call, "dbias", &a->dbias, COT_FLOATS, 1, 1));
    if (cot_is_present(&a->dbias))
        CHECK(cot_check_size(call, "dbias", &a->dbias, 0, "D", "x", p->sizes.D));
    CHECK(check_state(call, "dinitial_state", &a->dinitial_state, &p->sizes, packed));
    CHECK(cot_check_f64(call, &a->x, tensors, COUNT(tensors)));
    return with_data ? cot_check_memory(call, tensors, COUNT(tensors)) : COT_OK;
}

/* Every index is below N, and no two batch elements use the same row of conv_state. A bitmap marks the rows of one
 * window at a time. So the check allocates nothing, for any number of rows. */
static cot_status check_state_indices(const char *call, const cot_tensor *indices, int64_t B, int64_t N)
{
    enum { WINDOW = 1 << 16 };
    uint64_t marked[WINDOW / 64];
    int64_t largest = -1; /* not N, which may be absurdly large if the rows have no channels */
    for (int64_t b = 0; b < B; b++) {
        const int64_t row = conv1d_index(indices, b);
        if (row >= N)
            return cot_fail(COT_INVALID_DATA,
                            "%s: conv_state_indices[%" PRId64 "] is %" PRId64 ", conv_state has N=%" PRId64, call, b,
                            row, N);
        largest = row > largest ? row : largest;
    }
    for (int64_t base = 0; base <= largest; base += WINDOW) {
        memset(marked, 0, sizeof marked);
        for (int64_t b = 0; b < B; b++) {
            const int64_t row = conv1d_index(indices, b) - base;
            if (row < 0 || row >= WINDOW)
                continue;
            if (marked[row / 64] >> (row % 64) & 1)
                return cot_fail(COT_INVALID_DATA,
                                "%s: conv_state_indices has %" PRId64 " twice (second at %" PRId64 ")", call,
                                row + base, b);
            marked[row / 64] |= (uint64_t)1 << (row % 64);
        }
    }
    return COT_OK;
}

static cot_status check_cache_seqlens(const char *call, const cot_tensor *cache_seqlens, int64_t B)
{
    for (int64_t b = 0; b < B; b++)
        if (conv1d_index(cache_seqlens, b) < 0)
            return cot_fail(COT_INVALID_DATA, "%s: cache_seqlens[%" PRId64 "] is %" PRId64 ", expected 0 or more", call,
                            b, conv1d_index(cache_seqlens, b));
    return COT_OK;
}

static cot_status validate_update(const char *call, const void *args, bool with_data, void *problem)
{
    conv1d_update_problem *p = problem;
    p->args = *(const cot_causal_conv1d_update_args *)args;
    cot_causal_conv1d_update_args *a = &p->args;
    const cot_named_tensor tensors[] = {
        COT_IN(a, x),           COT_IN(a, weight),        COT_IN(a, bias),
        COT_OUT(a, conv_state), COT_IN(a, cache_seqlens), COT_IN(a, conv_state_indices),
        COT_OUT(a, y),
    };
    CHECK(cot_check_silu(call, a->activation));
    CHECK(check_x_and_weight(call, &a->x, 2, &a->weight, &a->bias, &p->sizes));
    CHECK(cot_check_required(call, "conv_state", &a->conv_state));
    CHECK(cot_check_tensor(call, "conv_state", &a->conv_state, COT_FLOATS, 3, 3));
    CHECK(cot_check_size(call, "conv_state", &a->conv_state, 1, "D", "x", p->sizes.D));
    p->state_count = a->conv_state.shape[0];
    p->S = a->conv_state.shape[2];
    if (p->S < p->sizes.K - 1)
        return cot_fail(COT_INVALID_SHAPE, "%s: conv_state has S=%" PRId64 ", expected K-1=%" PRId64 " or more", call,
                        p->S, p->sizes.K - 1);
    CHECK(cot_check_tensor(call, "cache_seqlens", &a->cache_seqlens, COT_DTYPE_BIT(COT_I32), 1, 1));
    if (cot_is_present(&a->cache_seqlens)) {
        CHECK(cot_check_size(call, "cache_seqlens", &a->cache_seqlens, 0, "B", "x", p->sizes.B));
        if (p->S == 0 && p->sizes.K == 1)
            a->cache_seqlens = (cot_tensor){0}; /* a ring buffer of 0 positions needs no index */
    }
    CHECK(cot_check_tensor(call, "conv_state_indices", &a->conv_state_indices, COT_DTYPE_BIT(COT_I32), 1, 1));
    if (cot_is_present(&a->conv_state_indices))
        CHECK(cot_check_size(call, "conv_state_indices", &a->conv_state_indices, 0, "B", "x", p->sizes.B));
    else if (p->state_count < p->sizes.B)
        return cot_fail(COT_INVALID_SHAPE,
                        "%s: conv_state has N=%" PRId64 ", expected B=%" PRId64 " or more without conv_state_indices",
                        call, p->state_count, p->sizes.B);
    CHECK(cot_check_required(call, "y", &a->y));
    CHECK(check_like_x(call, "y", &a->y, &a->x));
    CHECK(cot_check_f64(call, &a->x, tensors, COUNT(tensors)));
    if (with_data)
        CHECK(cot_check_memory(call, tensors, COUNT(tensors)));
    if (a->x.rank == 2) { /* the kernels get [B,D,1] */
        a->x.rank = a->y.rank = 3;
        a->x.shape[2] = a->y.shape[2] = 1;
        a->x.stride[2] = a->y.stride[2] = 1;
    }
    return COT_OK;
}

/* ---- index data, where the host can read it ----------------------------------------------------------- */

static cot_status check_forward_data(const char *call, const void *problem)
{
    const conv1d_forward_problem *p = problem;
    return check_cu_seqlens(call, &p->args.cu_seqlens, p->sizes.T);
}

static cot_status check_backward_data(const char *call, const void *problem)
{
    const conv1d_backward_problem *p = problem;
    return check_cu_seqlens(call, &p->args.cu_seqlens, p->sizes.T);
}

static cot_status check_update_data(const char *call, const void *problem)
{
    const conv1d_update_problem *p = problem;
    if (cot_is_present(&p->args.cache_seqlens))
        CHECK(check_cache_seqlens(call, &p->args.cache_seqlens, p->sizes.B));
    if (cot_is_present(&p->args.conv_state_indices))
        CHECK(check_state_indices(call, &p->args.conv_state_indices, p->sizes.B, p->state_count));
    return COT_OK;
}

/* ---- tables ------------------------------------------------------------------------------------------- */

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "causal_conv1d_kernels.def"
#undef COT_KERNEL_ENTRY

#include "causal_conv1d_admit.h"
#include "cuda/causal_conv1d_admit.h"

static const cot_kernel kernels[] = {
#define COT_KERNEL_ENTRY(direction, ...) COT_KERNEL_INITIALIZER(COT_CAUSAL_CONV1D_##direction, __VA_ARGS__),
#include "causal_conv1d_kernels.def"
#undef COT_KERNEL_ENTRY
};

/* Tables, one entry per line. */
/* clang-format off */

static const cot_field forward_fields[] = {
    COT_FIELD(causal_conv1d_forward, x, COT_INPUT),
    COT_FIELD(causal_conv1d_forward, weight, COT_INPUT),
    COT_FIELD(causal_conv1d_forward, bias, COT_INPUT),
    COT_FIELD(causal_conv1d_forward, initial_state, COT_INPUT),
    COT_FIELD(causal_conv1d_forward, seq_idx, COT_INPUT),
    COT_FIELD(causal_conv1d_forward, cu_seqlens, COT_INPUT),
    COT_FIELD(causal_conv1d_forward, y, COT_OUTPUT),
    COT_FIELD(causal_conv1d_forward, final_state, COT_OUTPUT),
};

static const cot_field backward_fields[] = {
    COT_FIELD(causal_conv1d_backward, x, COT_INPUT),
    COT_FIELD(causal_conv1d_backward, weight, COT_INPUT),
    COT_FIELD(causal_conv1d_backward, bias, COT_INPUT),
    COT_FIELD(causal_conv1d_backward, initial_state, COT_INPUT),
    COT_FIELD(causal_conv1d_backward, seq_idx, COT_INPUT),
    COT_FIELD(causal_conv1d_backward, cu_seqlens, COT_INPUT),
    COT_FIELD(causal_conv1d_backward, dy, COT_INPUT),
    COT_FIELD(causal_conv1d_backward, dfinal_state, COT_INPUT),
    COT_FIELD(causal_conv1d_backward, dx, COT_OUTPUT),
    COT_GRADIENT(causal_conv1d_backward, dweight),
    COT_GRADIENT(causal_conv1d_backward, dbias),
    COT_FIELD(causal_conv1d_backward, dinitial_state, COT_OUTPUT),
};

static const cot_field update_fields[] = {
    COT_FIELD(causal_conv1d_update, x, COT_INPUT),
    COT_FIELD(causal_conv1d_update, weight, COT_INPUT),
    COT_FIELD(causal_conv1d_update, bias, COT_INPUT),
    COT_FIELD(causal_conv1d_update, conv_state, COT_INPUT_OUTPUT),
    COT_FIELD(causal_conv1d_update, cache_seqlens, COT_INPUT),
    COT_FIELD(causal_conv1d_update, conv_state_indices, COT_INPUT),
    COT_FIELD(causal_conv1d_update, y, COT_OUTPUT),
};

static const cot_option forward_options[] = {COT_CALL_OPTION(causal_conv1d_forward, activation, ENUM, "none silu", NULL)};
static const cot_option update_options[] = {COT_CALL_OPTION(causal_conv1d_update, activation, ENUM, "none silu", NULL)};
static const cot_option backward_options[] = {
    COT_CALL_OPTION(causal_conv1d_backward, activation, ENUM, "none silu", NULL),
    COT_CALL_OPTION(causal_conv1d_backward, accumulate, I32, NULL, "1: dweight and dbias are added to old values"),
};

static const char forward_signature[] =
    "x[B,D,T] weight[D,K] bias[D] initial_state[N|B,D,K-1] seq_idx[B,T] cu_seqlens[N+1] y=x final_state[N|B,D,K-1]";
static const char backward_signature[] =
    "x[B,D,T] weight[D,K] bias[D] initial_state[N|B,D,K-1] seq_idx[B,T] cu_seqlens[N+1] dy[B,D,T] "
    "dfinal_state[N|B,D,K-1] dx=x dweight=weight dbias:weight[D] dinitial_state[N|B,D,K-1]";
static const char update_signature[] =
    "x[B,D,T] weight[D,K] bias[D] conv_state[N,D,S] cache_seqlens[B] conv_state_indices[B] y=x";

/* clang-format on */

const cot_direction cot_causal_conv1d_directions[] = {
    COT_DIRECTION(causal_conv1d, forward, forward, .problem_size = sizeof(conv1d_forward_problem),
                  COT_OPTIONS(forward_options), .check_index_data = check_forward_data),
    COT_DIRECTION(causal_conv1d, backward, backward, .problem_size = sizeof(conv1d_backward_problem),
                  COT_OPTIONS(backward_options), COT_ACCUMULATE(causal_conv1d_backward),
                  .check_index_data = check_backward_data),
    COT_DIRECTION(causal_conv1d, update, update, .problem_size = sizeof(conv1d_update_problem),
                  COT_OPTIONS(update_options), .check_index_data = check_update_data),
};

const cot_op cot_causal_conv1d_op = COT_OP(causal_conv1d, kernels);

_Static_assert(sizeof(cot_causal_conv1d_backward_args) <= COT_MAX_ARGS, "dispatch copies the arguments");
_Static_assert(sizeof(conv1d_backward_problem) <= COT_MAX_PROBLEM, "dispatch holds the problem");

/* ---- the public calls --------------------------------------------------------------------------------- */

COT_PUBLIC_CALL(cot_causal_conv1d_forward, cot_causal_conv1d_directions[COT_CAUSAL_CONV1D_FORWARD])
COT_PUBLIC_CALL(cot_causal_conv1d_backward, cot_causal_conv1d_directions[COT_CAUSAL_CONV1D_BACKWARD])
COT_PUBLIC_CALL(cot_causal_conv1d_update, cot_causal_conv1d_directions[COT_CAUSAL_CONV1D_UPDATE])
