/* SPDX-License-Identifier: Apache-2.0
 * test_dropout_errors.c: every reason for which dropout refuses a call. Checks the status, the exact message, and
 * that no output was written. Also tests unusual calls that are valid. */
#include "argument_checks.h"

#include <cotangent/dropout.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { A = 2, R = 3, D = 10, G = 2 };
enum { FORWARD, BACKWARD };

/* Valid arguments of both calls, f32, rank 3, with every optional tensor except input masks, and their memory. */
typedef struct fixture {
    cot_queue *queue;
    cot_dropout_forward_args f;
    cot_dropout_backward_args b;
    float x[A * R * D], bias[D], residual[A * R * D];
    uint8_t mask[A * R * D], bits[A * R * G];
    int32_t words[8];
    struct {
        double y[A * R * D], bias[D];
        uint8_t mask[A * R * D], bits[A * R * G];
    } out; /* large enough for f64 */
} fixture;

static fixture *fresh(fixture *f, const char *kernels)
{
    BEGIN(f, kernels);

    COT_INIT(&f->f);
    f->f.activation = COT_ACTIVATION_GELU_TANH;
    f->f.p = 0.25;
    f->f.x = VIEW(f->x, COT_F32, A, R, D);
    f->f.bias = VIEW(f->bias, COT_F32, D);
    f->f.residual = VIEW(f->residual, COT_F32, A, R, D);
    f->f.seed_tensor = VIEW(f->words, COT_I32, 2);
    f->f.offset_tensor = VIEW(f->words + 2, COT_I32, 2);
    f->f.y = VIEW(f->out.y, COT_F32, A, R, D);
    f->f.mask_out = VIEW(f->out.mask, COT_U8, A, R, D);
    f->f.mask_bits_out = VIEW(f->out.bits, COT_U8, A, R, G);

    COT_INIT(&f->b);
    f->b.activation = COT_ACTIVATION_GELU_TANH;
    f->b.p = 0.25;
    f->b.dy = VIEW(f->residual, COT_F32, A, R, D);
    f->b.x = f->f.x;
    f->b.bias = f->f.bias;
    f->b.seed_tensor = f->f.seed_tensor;
    f->b.offset_tensor = f->f.offset_tensor;
    f->b.dx = f->f.y;
    f->b.dbias = VIEW(f->out.bias, COT_F32, D);
    return f;
}

static cot_status call(fixture *f, int direction)
{
    return direction == FORWARD ? cot_dropout_forward(f->queue, &f->f) : cot_dropout_backward(f->queue, &f->b);
}

static cot_status query_workspace(fixture *f, int direction, size_t *bytes)
{
    return direction == FORWARD ? cot_dropout_forward_workspace(f->queue, &f->f, bytes)
                                : cot_dropout_backward_workspace(f->queue, &f->b, bytes);
}

/* ---- the call itself, options -------------------------------------------------------------------------- */

static void queue_args_and_struct_size(void **state)
{
    (void)state;
    static const char *const calls[] = {"dropout_forward", "dropout_backward"};
    static const size_t sizes[] = {sizeof(cot_dropout_forward_args), sizeof(cot_dropout_backward_args)};
    char message[256];
    fixture f;
    for (int direction = FORWARD; direction <= BACKWARD; direction++) {
        fresh(&f, NULL);
        cot_queue *queue = f.queue;
        f.queue = NULL;
        snprintf(message, sizeof message, "%s: queue is null", calls[direction]);
        assert_fails(call(&f, direction), COT_INVALID_ARGUMENT, message);
        f.queue = queue;
        snprintf(message, sizeof message, "%s_workspace: bytes is null", calls[direction]);
        assert_fails(query_workspace(&f, direction, NULL), COT_INVALID_ARGUMENT, message);
        f.f.struct_size = f.b.struct_size = 0;
        snprintf(message, sizeof message, "%s: struct_size is 0, expected %zu (use COT_INIT)", calls[direction],
                 sizes[direction]);
        REFUSED(&f, direction, SHAPE_FAULT, COT_INVALID_ARGUMENT, message);
    }
    fresh(&f, NULL);
    assert_fails(cot_dropout_forward(f.queue, NULL), COT_INVALID_ARGUMENT, "dropout_forward: args is null");
    assert_fails(cot_dropout_backward(f.queue, NULL), COT_INVALID_ARGUMENT, "dropout_backward: args is null");
    cot_queue_destroy(f.queue);
}

static void options(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "dropout_forward: p is -0.5, expected 0 to 1", f->f.p = -0.5);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "dropout_forward: p is 1.5, expected 0 to 1", f->f.p = 1.5);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "dropout_forward: p is nan, expected 0 to 1", f->f.p = NAN);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "dropout_forward: p is inf, expected 0 to 1", f->f.p = INFINITY);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "dropout_backward: p is 2, expected 0 to 1", f->b.p = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "dropout_forward: scale is -1, expected 0 (it follows from p) or a positive number", f->f.scale = -1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "dropout_forward: scale is nan, expected 0 (it follows from p) or a positive number", f->f.scale = NAN);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "dropout_backward: scale is inf, expected 0 (it follows from p) or a positive number",
           f->b.scale = INFINITY);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "dropout_forward: activation is 5, expected 0 (none), 1 (SiLU), 2 (ReLU), 3 (GELU, tanh) or 4 (GELU, erf)",
           f->f.activation = (cot_activation)5);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "dropout_backward: activation is -1, expected 0 (none), 1 (SiLU), 2 (ReLU), 3 (GELU, tanh) or 4 (GELU, erf)",
           f->b.activation = (cot_activation)-1);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "dropout_backward: accumulate is 2, expected 0 or 1",
           f->b.accumulate = 2);
    ACCEPT(FORWARD, f->f.p = 0);
    ACCEPT(FORWARD, f->f.p = 1);
    ACCEPT(FORWARD, f->f.p = 1, f->f.scale = 3);
    ACCEPT(FORWARD, f->f.p = 1e-300);
}

static void required_tensors(void **state)
{
    (void)state;
    const cot_tensor absent = {0};
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "dropout_forward: x is required", f->f.x = absent);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "dropout_backward: dy is required", f->b.dy = absent);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "dropout_backward: x is required with an activation",
           f->b.x = absent);
    ACCEPT(BACKWARD, f->b.x = absent, f->b.activation = COT_ACTIVATION_NONE);
    ACCEPT(BACKWARD, f->b.dx = absent);
    ACCEPT(BACKWARD, f->b.dbias = absent, f->b.bias = absent);
    ACCEPT(BACKWARD, f->b.dx = absent, f->b.dbias = absent);
    ACCEPT(FORWARD, f->f.y = absent);
    ACCEPT(FORWARD, f->f.y = absent, f->f.mask_out = absent, f->f.mask_bits_out = absent);
    ACCEPT(FORWARD, f->f.bias = absent, f->f.residual = absent, f->f.seed_tensor = absent, f->f.offset_tensor = absent);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "dropout_forward: bias has data or a rank but no dtype (an absent tensor is all zero)",
           f->f.bias.dtype = COT_DTYPE_NONE);
}

/* ---- ranks, sizes, dtypes ------------------------------------------------------------------------------- */

static void shapes(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: x has 0 axes, expected 1 to 6", f->f.x.rank = 0);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: x has size -1 on axis 1, expected 0 or more",
           f->f.x.shape[1] = -1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: bias has 2 axes, expected 1", f->f.bias.rank = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: bias has D=9, x has D=10",
           f->f.bias.shape[0] = 9);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: residual has 2 axes, expected 3",
           f->f.residual.rank = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: residual has size 4 on axis 1, x has 3",
           f->f.residual.shape[1] = 4);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: residual has D=5, x has D=10",
           f->f.residual.shape[2] = 5);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: y has size 1 on axis 0, x has 2",
           f->f.y.shape[0] = 1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: mask has D=2, x has D=10",
           f->f.mask = VIEW(f->bits, COT_U8, A, R, G));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: mask has 2 axes, expected 3",
           f->f.mask = VIEW(f->mask, COT_U8, A * R, D));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: mask_bits has ceil(D/8)=10, x has ceil(D/8)=2",
           f->f.mask_bits = VIEW(f->mask, COT_U8, A, R, D));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: mask_bits has size 3 on axis 0, x has 2",
           f->f.mask_bits = VIEW(f->bits, COT_U8, 3, 2, G));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: mask_out has D=9, x has D=10",
           f->f.mask_out.shape[2] = 9);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: mask_bits_out has ceil(D/8)=1, x has ceil(D/8)=2",
           f->f.mask_bits_out.shape[2] = 1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "dropout_forward: seed_tensor has size 3, expected 2 (low word, high word)", f->f.seed_tensor.shape[0] = 3);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_forward: offset_tensor has 2 axes, expected 1",
           f->f.offset_tensor = VIEW(f->words, COT_I32, 1, 2));
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_backward: x has D=9, dy has D=10", f->b.x.shape[2] = 9);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_backward: x has D=9, dy has D=10", f->b.x.shape[2] = 9,
           f->b.activation = COT_ACTIVATION_NONE);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_backward: bias has D=11, dy has D=10",
           f->b.bias.shape[0] = 11);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_backward: dx has size 4 on axis 1, dy has 3",
           f->b.dx.shape[1] = 4);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_backward: dbias has D=3, dy has D=10",
           f->b.dbias.shape[0] = 3);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "dropout_backward: mask_bits has ceil(D/8)=1, dy has ceil(D/8)=2",
           f->b.mask_bits = VIEW(f->bits, COT_U8, A, R, 1));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "dropout_forward: x has more than 2^56 bytes (size 1152921504606846976 on axis 0)",
           f->f.x.shape[0] = INT64_C(1) << 60);
}

static void masks(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "dropout_forward: mask and mask_bits are both given, expected at most one",
           f->f.mask = VIEW(f->mask, COT_U8, A, R, D), f->f.mask_bits = VIEW(f->bits, COT_U8, A, R, G));
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "dropout_backward: mask and mask_bits are both given, expected at most one",
           f->b.mask = VIEW(f->mask, COT_U8, A, R, D), f->b.mask_bits = VIEW(f->bits, COT_U8, A, R, G));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "dropout_forward: mask has dtype f32, expected u8",
           f->f.mask = VIEW(f->x, COT_F32, A, R, D));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "dropout_forward: mask_bits has dtype i32, expected u8",
           f->f.mask_bits = VIEW(f->x, COT_I32, A, R, G));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "dropout_forward: mask_out has dtype f32, expected u8",
           f->f.mask_out = VIEW(f->out.y, COT_F32, A, R, D));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "dropout_forward: seed_tensor has dtype u8, expected i32",
           f->f.seed_tensor.dtype = COT_U8);
    ACCEPT(FORWARD, f->f.mask = VIEW(f->mask, COT_U8, A, R, D));
    ACCEPT(BACKWARD, f->b.mask_bits = VIEW(f->bits, COT_U8, A, R, G));
    ACCEPT(BACKWARD, f->b.mask = VIEW(f->mask, COT_U8, A, R, D), f->b.p = 1);
}

static void dtypes(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "dropout_forward: x has dtype i32, expected f32 or f16 or bf16 or f64", f->f.x.dtype = COT_I32);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "dropout_forward: x has the unknown dtype 99",
           f->f.x.dtype = (cot_dtype)99);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "dropout_forward: y has dtype bf16, x has f32",
           f->f.y.dtype = COT_BF16);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "dropout_forward: residual has dtype f16, x has f32",
           f->f.residual.dtype = COT_F16);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "dropout_forward: bias has dtype f64, x has f32 (f64 goes with f64 only)", f->f.bias.dtype = COT_F64);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "dropout_backward: x has dtype bf16, dy has f32",
           f->b.x.dtype = COT_BF16);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "dropout_backward: dx has dtype bf16, dy has f32",
           f->b.dx.dtype = COT_BF16);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "dropout_backward: dbias has dtype f64, dy has f32 (f64 goes with f64 only)", f->b.dbias.dtype = COT_F64);
    ACCEPT(BACKWARD, f->b.dbias.dtype = COT_BF16, f->b.bias.dtype = COT_F16);
}

/* ---- memory ----------------------------------------------------------------------------------------------- */

static void memory(void **state)
{
    (void)state;
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_ARGUMENT, "dropout_forward: x has null data", f->f.x.data = NULL);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_ARGUMENT, "dropout_forward: mask_bits_out has null data",
           f->f.mask_bits_out.data = NULL);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_ARGUMENT, "dropout_forward: seed_tensor has null data",
           f->f.seed_tensor.data = NULL);
    REFUSE(BACKWARD, DATA_FAULT, COT_INVALID_ARGUMENT, "dropout_backward: dbias has null data", f->b.dbias.data = NULL);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT,
           "dropout_forward: y is an output but its strides give two elements one address (axis 1, stride 0)",
           f->f.y.stride[1] = 0);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "dropout_forward: y overlaps x", f->f.y.data = f->x + 1,
           f->f.x.shape[1] = f->f.y.shape[1] = f->f.residual.shape[1] = 1,
           f->f.mask_out.shape[1] = f->f.mask_bits_out.shape[1] = 1);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "dropout_forward: y overlaps bias", f->f.bias.data = f->out.y);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "dropout_forward: y overlaps mask_out",
           f->f.mask_out.data = f->out.y);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "dropout_forward: mask_out overlaps mask",
           f->f.mask = f->f.mask_out);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "dropout_forward: y overlaps seed_tensor",
           f->f.seed_tensor.data = f->out.y);
    REFUSE(BACKWARD, DATA_FAULT, COT_INVALID_LAYOUT, "dropout_backward: dx overlaps dbias", f->b.dbias.data = f->out.y);
    REFUSE(BACKWARD, DATA_FAULT, COT_INVALID_LAYOUT, "dropout_backward: dbias overlaps bias", f->b.bias = f->b.dbias);
    /* The pairs of arguments that may share memory, and one such pair with different strides. */
    ACCEPT(FORWARD, f->f.x = f->f.y);
    ACCEPT(FORWARD, f->f.residual = f->f.y);
    ACCEPT(BACKWARD, f->b.dy = f->b.dx);
    ACCEPT(BACKWARD, f->b.x = f->b.dx);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "dropout_forward: y overlaps x", f->f.x = f->f.y,
           f->f.x.shape[0] = f->f.x.shape[1] = 2, f->f.y.shape[1] = 2, f->f.residual.shape[1] = 2,
           f->f.mask_out.shape[1] = 2, f->f.mask_bits_out.shape[1] = 2, f->f.x.stride[1] = 2 * D, f->f.x.stride[0] = D);
}

static void misaligned_data(void **state)
{
    (void)state;
    char message[200];
    fixture space, *f = fresh(&space, NULL);
    f->f.x.data = (char *)f->x + 2;
    snprintf(message, sizeof message, "dropout_forward: x has data at %p, expected a multiple of 4 (one f32 element)",
             f->f.x.data);
    REFUSED(f, FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, message);
}

static void workspace(void **state)
{
    (void)state;
    _Alignas(64) char workspace[4096];
    size_t bytes = 0;
    char message[200];
    fixture space, *f = fresh(&space, NULL);
    assert_ok(query_workspace(f, BACKWARD, &bytes));
    assert_in_range(bytes, 1, sizeof workspace);
    f->b.workspace = workspace;
    f->b.workspace_bytes = bytes;
    assert_ok(call(f, BACKWARD));
    cot_queue_destroy(f->queue);
    f = fresh(&space, NULL);
    f->b.workspace = workspace;
    f->b.workspace_bytes = bytes - 1;
    snprintf(message, sizeof message, "dropout_backward: workspace has %zu bytes, %zu are needed", bytes - 1, bytes);
    REFUSED(f, BACKWARD, DATA_FAULT, COT_WORKSPACE_TOO_SMALL, message);
}

static void kernels(void **state)
{
    (void)state;
    fixture space, *f = fresh(&space, "dropout=dropout_fwd_scalar_f64");
    REFUSED(f, FORWARD, SHAPE_FAULT, COT_UNSUPPORTED,
            "dropout_forward: the forced kernel dropout_fwd_scalar_f64 refuses: it supports f64 only");
    f = fresh(&space, "dropout=nothing");
    REFUSED(f, BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
            "dropout_backward: the forced kernel \"nothing\" is none of dropout's");
}

/* ---- unusual valid calls ----------------------------------------------------------------------------------- */

static void no_rows(void **state)
{
    (void)state;
    fixture space, *f = fresh(&space, NULL); /* no rows: dbias is an empty sum */
    f->b.dy.shape[1] = f->b.x.shape[1] = f->b.dx.shape[1] = 0;
    f->b.dy.data = f->b.x.data = f->b.dx.data = NULL;
    assert_ok(call(f, BACKWARD));
    for (int d = 0; d < D; d++)
        assert_true(((float *)(void *)f->out.bias)[d] == 0);
    f->b.accumulate = 1;
    ((float *)(void *)f->out.bias)[3] = 7;
    assert_ok(call(f, BACKWARD));
    assert_true(((float *)(void *)f->out.bias)[3] == 7);
    cot_queue_destroy(f->queue);
}

static void empty_sizes(void **state)
{
    (void)state;
    ACCEPT(FORWARD, f->f.x.shape[0] = f->f.y.shape[0] = f->f.residual.shape[0] = 0,
           f->f.mask_out.shape[0] = f->f.mask_bits_out.shape[0] = 0);
    ACCEPT(FORWARD, f->f.x.shape[2] = f->f.y.shape[2] = f->f.residual.shape[2] = 0, f->f.bias.shape[0] = 0,
           f->f.mask_out.shape[2] = f->f.mask_bits_out.shape[2] = 0);
    ACCEPT(BACKWARD, f->b.dy.shape[2] = f->b.x.shape[2] = f->b.dx.shape[2] = 0,
           f->b.bias.shape[0] = f->b.dbias.shape[0] = 0);
}

static void one_row_of_rank_1(void **state)
{
    (void)state;
    ACCEPT(FORWARD, f->f.x = VIEW(f->x, COT_F32, D), f->f.residual = VIEW(f->residual, COT_F32, D),
           f->f.y = VIEW(f->out.y, COT_F32, D), f->f.mask_out = VIEW(f->out.mask, COT_U8, D),
           f->f.mask_bits_out = VIEW(f->out.bits, COT_U8, G));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(queue_args_and_struct_size),
        cmocka_unit_test(options),
        cmocka_unit_test(required_tensors),
        cmocka_unit_test(shapes),
        cmocka_unit_test(masks),
        cmocka_unit_test(dtypes),
        cmocka_unit_test(memory),
        cmocka_unit_test(misaligned_data),
        cmocka_unit_test(workspace),
        cmocka_unit_test(kernels),
        cmocka_unit_test(no_rows),
        cmocka_unit_test(empty_sizes),
        cmocka_unit_test(one_row_of_rank_1),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
