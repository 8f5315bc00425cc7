/* SPDX-License-Identifier: Apache-2.0
 * test_causal_conv1d_dense_errors.c: every reason for which causal_conv1d_dense refuses a call. Checks the status, the
 * exact message, and that no output was written. Also tests unusual calls that are valid. */
#include "argument_checks.h"

#include <cotangent/causal_conv1d_dense.h>

enum { B = 2, Din = 3, Dout = 5, T = 8, K = 4 };
enum { FORWARD, BACKWARD };

/* Valid arguments of both calls, f32, with every optional tensor, and their memory. */
typedef struct fixture {
    cot_queue *queue;
    cot_causal_conv1d_dense_forward_args f;
    cot_causal_conv1d_dense_backward_args b;
    float x[B * Din * T], weight[Dout * Din * K], bias[Dout], state[B * Din * (K - 1)], dy[B * Dout * T];
    struct {
        double y[B * Dout * T], state[B * Din * (K - 1)], weight[Dout * Din * K], bias[Dout];
    } out; /* large enough for f64 */
} fixture;

static fixture *fresh(fixture *f, const char *kernels)
{
    BEGIN(f, kernels);

    COT_INIT(&f->f);
    f->f.activation = COT_ACTIVATION_SILU;
    f->f.x = VIEW(f->x, COT_F32, B, Din, T);
    f->f.weight = VIEW(f->weight, COT_F32, Dout, Din, K);
    f->f.bias = VIEW(f->bias, COT_F32, Dout);
    f->f.initial_state = VIEW(f->state, COT_F32, B, Din, K - 1);
    f->f.y = VIEW(f->out.y, COT_F32, B, Dout, T);
    f->f.final_state = VIEW(f->out.state, COT_F32, B, Din, K - 1);

    COT_INIT(&f->b);
    f->b.activation = COT_ACTIVATION_SILU;
    f->b.x = f->f.x;
    f->b.weight = f->f.weight;
    f->b.bias = f->f.bias;
    f->b.initial_state = f->f.initial_state;
    f->b.dy = VIEW(f->dy, COT_F32, B, Dout, T);
    f->b.dfinal_state = f->f.initial_state;
    f->b.dx = VIEW(f->out.y, COT_F32, B, Din, T);
    f->b.dweight = VIEW(f->out.weight, COT_F32, Dout, Din, K);
    f->b.dbias = VIEW(f->out.bias, COT_F32, Dout);
    f->b.dinitial_state = VIEW(f->out.state, COT_F32, B, Din, K - 1);
    return f;
}

static cot_status call(fixture *f, int direction)
{
    return direction == FORWARD ? cot_causal_conv1d_dense_forward(f->queue, &f->f)
                                : cot_causal_conv1d_dense_backward(f->queue, &f->b);
}

static cot_status query_workspace(fixture *f, int direction, size_t *bytes)
{
    return direction == FORWARD ? cot_causal_conv1d_dense_forward_workspace(f->queue, &f->f, bytes)
                                : cot_causal_conv1d_dense_backward_workspace(f->queue, &f->b, bytes);
}

#define FORWARD_CALL "causal_conv1d_dense_forward: "
#define BACKWARD_CALL "causal_conv1d_dense_backward: "

static void options(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, FORWARD_CALL "activation is 2, expected 0 (none) or 1 (SiLU)",
           f->f.activation = COT_ACTIVATION_RELU);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, BACKWARD_CALL "activation is 7, expected 0 (none) or 1 (SiLU)",
           f->b.activation = (cot_activation)7);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, BACKWARD_CALL "accumulate is 2, expected 0 or 1",
           f->b.accumulate = 2);
}

static void missing(void **state)
{
    (void)state;
    const cot_tensor none = {0};
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, FORWARD_CALL "x is required", f->f.x = none);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, FORWARD_CALL "weight is required", f->f.weight = none);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, BACKWARD_CALL "x is required", f->b.x = none);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, BACKWARD_CALL "weight is required", f->b.weight = none);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, BACKWARD_CALL "dy is required", f->b.dy = none);
}

static void shapes(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, FORWARD_CALL "x has 2 axes, expected 3", f->f.x.rank = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, FORWARD_CALL "weight has 2 axes, expected 3", f->f.weight.rank = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, FORWARD_CALL "weight has Din=2, x has Din=3",
           f->f.weight.shape[1] = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, FORWARD_CALL "weight has K=0, expected 1 or more",
           f->f.weight.shape[2] = 0);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, FORWARD_CALL "bias has Dout=4, weight has Dout=5",
           f->f.bias.shape[0] = 4);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, FORWARD_CALL "initial_state has K-1=2, weight has K-1=3",
           f->f.initial_state.shape[2] = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, FORWARD_CALL "initial_state has B=1, x has B=2",
           f->f.initial_state.shape[0] = 1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, FORWARD_CALL "y has Dout=3, weight has Dout=5",
           f->f.y.shape[1] = 3);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, FORWARD_CALL "y has T=7, x has T=8", f->f.y.shape[2] = 7);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, FORWARD_CALL "final_state has Din=2, x has Din=3",
           f->f.final_state.shape[1] = 2);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, BACKWARD_CALL "dy has B=1, x has B=2", f->b.dy.shape[0] = 1);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, BACKWARD_CALL "dx has Din=2, x has Din=3", f->b.dx.shape[1] = 2);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, BACKWARD_CALL "dweight has Dout=4, weight has Dout=5",
           f->b.dweight.shape[0] = 4);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, BACKWARD_CALL "dweight has Din=2, weight has Din=3",
           f->b.dweight.shape[1] = 2);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, BACKWARD_CALL "dweight has K=3, weight has K=4",
           f->b.dweight.shape[2] = 3);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, BACKWARD_CALL "dbias has Dout=3, weight has Dout=5",
           f->b.dbias.shape[0] = 3);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, BACKWARD_CALL "dfinal_state has K-1=2, weight has K-1=3",
           f->b.dfinal_state.shape[2] = 2);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, BACKWARD_CALL "dinitial_state has Din=2, x has Din=3",
           f->b.dinitial_state.shape[1] = 2);
}

static void dtypes(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, FORWARD_CALL "x has dtype i32, expected f32 or f16 or bf16 or f64",
           f->f.x.dtype = COT_I32);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, FORWARD_CALL "y has dtype bf16, x has f32",
           f->f.y.dtype = COT_BF16);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           FORWARD_CALL "weight has dtype f64, x has f32 (f64 goes with f64 only)", f->f.weight.dtype = COT_F64);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_DTYPE, BACKWARD_CALL "dy has dtype f16, x has f32",
           f->b.dy.dtype = COT_F16);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           BACKWARD_CALL "dbias has dtype f64, x has f32 (f64 goes with f64 only)", f->b.dbias.dtype = COT_F64);
}

static void memory(void **state)
{
    (void)state;
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_ARGUMENT, FORWARD_CALL "x has null data", f->f.x.data = NULL);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, FORWARD_CALL "y overlaps x", f->f.x.data = f->out.y);
    REFUSE(BACKWARD, DATA_FAULT, COT_INVALID_LAYOUT, BACKWARD_CALL "dx overlaps dy", f->b.dy.data = f->out.y);
    REFUSE(BACKWARD, DATA_FAULT, COT_INVALID_LAYOUT,
           BACKWARD_CALL "dweight is an output but its strides give two elements one address (axis 2, stride 0)",
           f->b.dweight.stride[2] = 0);
}

/* A forced kernel that does not support the call reports why: reference kernels, or kernels of other dtypes. */
static void forced(void **state)
{
    (void)state;
    fixture space, *f = fresh(&space, "causal_conv1d_dense=causal_conv1d_dense_fwd_scalar_f64");
    REFUSED(f, FORWARD, SHAPE_FAULT, COT_UNSUPPORTED,
            FORWARD_CALL "the forced kernel causal_conv1d_dense_fwd_scalar_f64 refuses: it supports f64 only");
}

static void accepted(void **state)
{
    (void)state;
    const cot_tensor none = {0};
    ACCEPT(FORWARD, (void)f);
    ACCEPT(BACKWARD, (void)f);
    ACCEPT(FORWARD, f->f.y = none);
    ACCEPT(FORWARD, f->f.initial_state = none, f->f.bias = none);
    ACCEPT(BACKWARD, f->b.initial_state = none);
    ACCEPT(BACKWARD, f->b.dx = f->b.dinitial_state = none);
    ACCEPT(BACKWARD, f->b.dweight = f->b.dbias = none);
    /* no tokens; weights with strides of 0 */
    ACCEPT(FORWARD, f->f.x.shape[2] = f->f.y.shape[2] = 0);
    ACCEPT(BACKWARD, f->b.x.shape[2] = f->b.dy.shape[2] = f->b.dx.shape[2] = 0);
    ACCEPT(FORWARD, f->f.weight.stride[0] = f->f.weight.stride[1] = f->f.weight.stride[2] = 0);
}

/* Without input channels, y is act(bias) and the gradients of the inputs are empty. */
static void without_input_channels(void **state)
{
    (void)state;
    fixture space, *f = fresh(&space, NULL);
    f->f.activation = COT_ACTIVATION_NONE;
    f->f.initial_state = f->f.final_state = (cot_tensor){0};
    f->f.x = VIEW(NULL, COT_F32, B, 0, T);
    f->f.weight = VIEW(NULL, COT_F32, Dout, 0, K);
    for (int o = 0; o < Dout; o++)
        f->bias[o] = (float)o;
    assert_ok(cot_causal_conv1d_dense_forward(f->queue, &f->f));
    for (int i = 0; i < B * Dout * T; i++)
        assert_true(((float *)f->f.y.data)[i] == (float)(i / T % Dout));
    cot_queue_destroy(f->queue);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options),  cmocka_unit_test(missing),
        cmocka_unit_test(shapes),   cmocka_unit_test(dtypes),
        cmocka_unit_test(memory),   cmocka_unit_test(forced),
        cmocka_unit_test(accepted), cmocka_unit_test(without_input_channels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
