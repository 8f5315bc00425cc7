/* SPDX-License-Identifier: Apache-2.0
 * test_causal_conv1d_errors.c: every reason for which causal_conv1d refuses a call. Checks the status, the exact
 * message, and that no output was written. Also tests unusual calls that are valid. */
#include "argument_checks.h"

#include <cotangent/causal_conv1d.h>
#include <stdio.h>
#include <stdlib.h>

enum { B = 2, D = 3, T = 8, K = 4, S = 5, N = 4 };
enum { FORWARD, BACKWARD, UPDATE };

/* Valid arguments of all three calls, f32, with every optional tensor except those of packing, and their memory. */
typedef struct fixture {
    cot_queue *queue;
    cot_causal_conv1d_forward_args f;
    cot_causal_conv1d_backward_args b;
    cot_causal_conv1d_update_args u;
    float x[B * D * T], weight[D * K], bias[D], state[B * D * (K - 1)], dy[B * D * T];
    int32_t seq_idx[B * T], cu_seqlens[B + 1], cache_seqlens[B], indices[B];
    struct {
        double y[B * D * T], state[N * D * S], weight[D * K], bias[D];
    } out; /* large enough for f64 */
} fixture;

static fixture *fresh(fixture *f, const char *kernels)
{
    BEGIN(f, kernels);
    f->cu_seqlens[1] = 3;
    f->cu_seqlens[2] = T;
    f->indices[0] = 3;
    f->indices[1] = 1;

    COT_INIT(&f->f);
    f->f.activation = COT_ACTIVATION_SILU;
    f->f.x = VIEW(f->x, COT_F32, B, D, T);
    f->f.weight = VIEW(f->weight, COT_F32, D, K);
    f->f.bias = VIEW(f->bias, COT_F32, D);
    f->f.initial_state = VIEW(f->state, COT_F32, B, D, K - 1);
    f->f.y = VIEW(f->out.y, COT_F32, B, D, T);
    f->f.final_state = VIEW(f->out.state, COT_F32, B, D, K - 1);

    COT_INIT(&f->b);
    f->b.activation = COT_ACTIVATION_SILU;
    f->b.x = f->f.x;
    f->b.weight = f->f.weight;
    f->b.bias = f->f.bias;
    f->b.initial_state = f->f.initial_state;
    f->b.dy = VIEW(f->dy, COT_F32, B, D, T);
    f->b.dfinal_state = f->f.initial_state;
    f->b.dx = VIEW(f->out.y, COT_F32, B, D, T);
    f->b.dweight = VIEW(f->out.weight, COT_F32, D, K);
    f->b.dbias = VIEW(f->out.bias, COT_F32, D);
    f->b.dinitial_state = VIEW(f->out.state, COT_F32, B, D, K - 1);

    COT_INIT(&f->u);
    f->u.activation = COT_ACTIVATION_SILU;
    f->u.x = f->f.x;
    f->u.weight = f->f.weight;
    f->u.bias = f->f.bias;
    f->u.conv_state = VIEW(f->out.state, COT_F32, N, D, S);
    f->u.y = VIEW(f->out.y, COT_F32, B, D, T);
    return f;
}

static cot_status call(fixture *f, int direction)
{
    return direction == FORWARD    ? cot_causal_conv1d_forward(f->queue, &f->f)
           : direction == BACKWARD ? cot_causal_conv1d_backward(f->queue, &f->b)
                                   : cot_causal_conv1d_update(f->queue, &f->u);
}

static cot_status query_workspace(fixture *f, int direction, size_t *bytes)
{
    return direction == FORWARD    ? cot_causal_conv1d_forward_workspace(f->queue, &f->f, bytes)
           : direction == BACKWARD ? cot_causal_conv1d_backward_workspace(f->queue, &f->b, bytes)
                                   : cot_causal_conv1d_update_workspace(f->queue, &f->u, bytes);
}

/* ---- the call itself ---------------------------------------------------------------------------------- */

static void queue_args_and_struct_size(void **state)
{
    (void)state;
    static const char *const calls[] = {"causal_conv1d_forward", "causal_conv1d_backward", "causal_conv1d_update"};
    static const size_t sizes[] = {sizeof(cot_causal_conv1d_forward_args), sizeof(cot_causal_conv1d_backward_args),
                                   sizeof(cot_causal_conv1d_update_args)};
    char message[256];
    fixture f;
    size_t bytes;
    for (int direction = FORWARD; direction <= UPDATE; direction++) {
        fresh(&f, NULL);
        cot_queue *queue = f.queue;
        f.queue = NULL;
        snprintf(message, sizeof message, "%s: queue is null", calls[direction]);
        assert_fails(call(&f, direction), COT_INVALID_ARGUMENT, message);
        assert_fails(query_workspace(&f, direction, &bytes), COT_INVALID_ARGUMENT, message);
        f.queue = queue;
        snprintf(message, sizeof message, "%s_workspace: bytes is null", calls[direction]);
        assert_fails(query_workspace(&f, direction, NULL), COT_INVALID_ARGUMENT, message);

        f.f.struct_size = f.b.struct_size = f.u.struct_size = 0;
        snprintf(message, sizeof message, "%s: struct_size is 0, expected %zu (use COT_INIT)", calls[direction],
                 sizes[direction]);
        REFUSED(&f, direction, SHAPE_FAULT, COT_INVALID_ARGUMENT, message);

        fresh(&f, NULL); /* an old struct without any tensor */
        f.f.struct_size = f.b.struct_size = f.u.struct_size = offsetof(cot_causal_conv1d_forward_args, x);
        snprintf(message, sizeof message, "%s: x is required", calls[direction]);
        REFUSED(&f, direction, SHAPE_FAULT, COT_INVALID_ARGUMENT, message);
    }
    fresh(&f, NULL);
    assert_fails(cot_causal_conv1d_forward(f.queue, NULL), COT_INVALID_ARGUMENT, "causal_conv1d_forward: args is null");
    assert_fails(cot_causal_conv1d_backward(f.queue, NULL), COT_INVALID_ARGUMENT,
                 "causal_conv1d_backward: args is null");
    assert_fails(cot_causal_conv1d_update(f.queue, NULL), COT_INVALID_ARGUMENT, "causal_conv1d_update: args is null");
    cot_queue_destroy(f.queue);

    /* A newer struct: unknown members are zero in the first call and not zero in the second. */
    struct {
        cot_causal_conv1d_forward_args known;
        int64_t unknown[2];
    } newer = {0};
    fresh(&f, NULL);
    newer.known = f.f;
    newer.known.struct_size = sizeof newer;
    assert_ok(cot_causal_conv1d_forward(f.queue, &newer.known));
    newer.unknown[1] = 1;
    snprintf(message, sizeof message,
             "causal_conv1d_forward: struct_size is %zu and byte %zu is set, but this library supports only %zu bytes",
             sizeof newer, sizeof newer - 8, sizes[FORWARD]);
    assert_fails(cot_causal_conv1d_forward(f.queue, &newer.known), COT_INVALID_ARGUMENT, message);
    cot_queue_destroy(f.queue);
}

static void options(void **state)
{
    (void)state;
    /* An older struct without the last two members: the memory at their place is ignored. */
    ACCEPT(FORWARD, f->f.struct_size = offsetof(cot_causal_conv1d_forward_args, workspace), f->f.workspace_bytes = 99);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "causal_conv1d_forward: activation is 2, expected 0 (none) or 1 (SiLU)",
           f->f.activation = (cot_activation)2);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "causal_conv1d_backward: activation is 77, expected 0 (none) or 1 (SiLU)",
           f->b.activation = (cot_activation)77);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "causal_conv1d_update: activation is 3, expected 0 (none) or 1 (SiLU)", f->u.activation = (cot_activation)3);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_backward: accumulate is 2, expected 0 or 1",
           f->b.accumulate = 2);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_backward: accumulate is -1, expected 0 or 1",
           f->b.accumulate = -1);
}

static void required_tensors(void **state)
{
    (void)state;
    const cot_tensor absent = {0};
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_forward: x is required", f->f.x = absent);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_forward: weight is required",
           f->f.weight = absent);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_backward: x is required", f->b.x = absent);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_backward: weight is required",
           f->b.weight = absent);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_backward: dy is required", f->b.dy = absent);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_update: x is required", f->u.x = absent);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_update: weight is required", f->u.weight = absent);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_update: conv_state is required",
           f->u.conv_state = absent);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_update: y is required", f->u.y = absent);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_forward: bias has data or a rank but no dtype (an absent tensor is all zero)",
           f->f.bias.dtype = COT_DTYPE_NONE);
}

/* ---- ranks, sizes, dtypes ----------------------------------------------------------------------------- */

static void forward_shapes(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: x has 2 axes, expected 3", f->f.x.rank = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "causal_conv1d_forward: x has size -1 on axis 2, expected 0 or more", f->f.x.shape[2] = -1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: weight has 3 axes, expected 2",
           f->f.weight.rank = 3);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: weight has D=2, x has D=3",
           f->f.weight.shape[0] = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: weight has K=0, expected 1 or more",
           f->f.weight.shape[1] = 0);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "causal_conv1d_forward: weight has size -4 on axis 1, expected 0 or more", f->f.weight.shape[1] = -4);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: bias has 2 axes, expected 1",
           f->f.bias.rank = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: bias has D=4, x has D=3",
           f->f.bias.shape[0] = 4);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: initial_state has 2 axes, expected 3",
           f->f.initial_state.rank = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: initial_state has B=1, x has B=2",
           f->f.initial_state.shape[0] = 1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: initial_state has D=1, x has D=3",
           f->f.initial_state.shape[1] = 1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: initial_state has K-1=4, weight has K-1=3",
           f->f.initial_state.shape[2] = 4);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: y has 2 axes, expected 3", f->f.y.rank = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: y has B=1, x has B=2", f->f.y.shape[0] = 1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: y has D=2, x has D=3", f->f.y.shape[1] = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: y has T=7, x has T=8", f->f.y.shape[2] = 7);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: final_state has K-1=2, weight has K-1=3",
           f->f.final_state.shape[2] = 2);
    /* The shape of the final state is also checked without an initial state. */
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: final_state has B=1, x has B=2",
           f->f.initial_state = (cot_tensor){0}, f->f.final_state.shape[0] = 1);
}

static void forward_dtypes(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_forward: x has dtype i32, expected f32 or f16 or bf16 or f64", f->f.x.dtype = COT_I32);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "causal_conv1d_forward: x has the unknown dtype 9",
           f->f.x.dtype = (cot_dtype)9);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_forward: weight has dtype u8, expected f32 or f16 or bf16 or f64",
           f->f.weight.dtype = COT_U8);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_forward: bias has dtype i32, expected f32 or f16 or bf16 or f64", f->f.bias.dtype = COT_I32);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "causal_conv1d_forward: y has dtype bf16, x has f32",
           f->f.y.dtype = COT_BF16);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_forward: y has dtype i32, expected f32 or f16 or bf16 or f64", f->f.y.dtype = COT_I32);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_forward: weight has dtype f64, x has f32 (f64 goes with f64 only)",
           f->f.weight.dtype = COT_F64);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_forward: final_state has dtype f64, x has f32 (f64 goes with f64 only)",
           f->f.final_state.dtype = COT_F64);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_forward: weight has dtype f32, x has f64 (f64 goes with f64 only)", f->f.x.dtype = COT_F64,
           f->f.y.dtype = COT_F64);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_forward: bias has dtype bf16, x has f64 (f64 goes with f64 only)", f->f.x.dtype = COT_F64,
           f->f.y.dtype = COT_F64, f->f.weight.dtype = COT_F64, f->f.bias.dtype = COT_BF16);
    /* Any other combination of dtypes is valid. */
    ACCEPT(FORWARD, f->f.weight.dtype = COT_BF16, f->f.bias.dtype = COT_F16, f->f.initial_state.dtype = COT_F16,
           f->f.final_state.dtype = COT_BF16);
}

static void backward_shapes_and_dtypes(void **state)
{
    (void)state;
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: dy has T=7, x has T=8",
           f->b.dy.shape[2] = 7);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: dy has 2 axes, expected 3",
           f->b.dy.rank = 2);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "causal_conv1d_backward: dy has dtype f16, x has f32",
           f->b.dy.dtype = COT_F16);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: x has 4 axes, expected 3",
           f->b.x.rank = 4);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: weight has D=4, x has D=3",
           f->b.weight.shape[0] = 4);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: bias has D=2, x has D=3",
           f->b.bias.shape[0] = 2);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "causal_conv1d_backward: initial_state has K-1=2, weight has K-1=3", f->b.initial_state.shape[2] = 2);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: dfinal_state has B=3, x has B=2",
           f->b.dfinal_state.shape[0] = 3);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: dx has D=2, x has D=3",
           f->b.dx.shape[1] = 2);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "causal_conv1d_backward: dx has dtype bf16, x has f32",
           f->b.dx.dtype = COT_BF16);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: dweight has 1 axis, expected 2",
           f->b.dweight.rank = 1);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: dweight has D=2, weight has D=3",
           f->b.dweight.shape[0] = 2);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: dweight has K=3, weight has K=4",
           f->b.dweight.shape[1] = 3);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: dbias has 2 axes, expected 1",
           f->b.dbias.rank = 2);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: dbias has D=2, x has D=3",
           f->b.dbias.shape[0] = 2);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: dinitial_state has D=4, x has D=3",
           f->b.dinitial_state.shape[1] = 4);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_backward: dweight has dtype f64, x has f32 (f64 goes with f64 only)",
           f->b.dweight.dtype = COT_F64);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_backward: dbias has dtype i32, expected f32 or f16 or bf16 or f64",
           f->b.dbias.dtype = COT_I32);
    ACCEPT(BACKWARD, f->b.dweight.dtype = COT_BF16, f->b.dbias.dtype = COT_F16, f->b.dinitial_state.dtype = COT_F16);
}

static void update_shapes_and_dtypes(void **state)
{
    (void)state;
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_update: x has 1 axis, expected 2 to 3",
           f->u.x.rank = 1);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_update: y has 3 axes, expected 2", f->u.x.rank = 2);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_update: y has T=8, x has T=7", f->u.x.shape[2] = 7);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_update: weight has K=0, expected 1 or more",
           f->u.weight.shape[1] = 0);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_update: bias has D=1, x has D=3",
           f->u.bias.shape[0] = 1);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_update: conv_state has 2 axes, expected 3",
           f->u.conv_state.rank = 2);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_update: conv_state has D=2, x has D=3",
           f->u.conv_state.shape[1] = 2);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_update: conv_state has S=2, expected K-1=3 or more",
           f->u.conv_state.shape[2] = 2);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_SHAPE,
           "causal_conv1d_update: conv_state has N=1, expected B=2 or more without conv_state_indices",
           f->u.conv_state.shape[0] = 1);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_update: cache_seqlens has B=3, x has B=2",
           f->u.cache_seqlens = VIEW(f->cache_seqlens, COT_I32, 3));
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_update: cache_seqlens has 2 axes, expected 1",
           f->u.cache_seqlens = VIEW(f->cache_seqlens, COT_I32, B, 1));
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_DTYPE, "causal_conv1d_update: cache_seqlens has dtype f32, expected i32",
           f->u.cache_seqlens = VIEW(f->cache_seqlens, COT_F32, B));
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_update: conv_state_indices has B=1, x has B=2",
           f->u.conv_state_indices = VIEW(f->indices, COT_I32, 1));
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_update: conv_state_indices has dtype u8, expected i32",
           f->u.conv_state_indices = VIEW(f->indices, COT_U8, B));
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_DTYPE, "causal_conv1d_update: y has dtype f16, x has f32",
           f->u.y.dtype = COT_F16);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_update: conv_state has dtype f64, x has f32 (f64 goes with f64 only)",
           f->u.conv_state.dtype = COT_F64);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_DTYPE,
           "causal_conv1d_update: conv_state has dtype i32, expected f32 or f16 or bf16 or f64",
           f->u.conv_state.dtype = COT_I32);
}

static void sizes_that_overflow(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "causal_conv1d_forward: x has more than 2^56 bytes (size 9223372036854775807 on axis 2)",
           f->f.x.shape[2] = INT64_MAX);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "causal_conv1d_forward: x reaches past 2^56 bytes (size 8, stride 9223372036854775807 on axis 2)",
           f->f.x.stride[2] = INT64_MAX);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "causal_conv1d_forward: x reaches past 2^56 bytes (size 2, stride -9223372036854775808 on axis 0)",
           f->f.x.stride[0] = INT64_MIN);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "causal_conv1d_backward: dweight reaches past 2^56 bytes (size 3, stride 4611686018427387904 on axis 0)",
           f->b.dweight.stride[0] = (int64_t)1 << 62);
    REFUSE(UPDATE, SHAPE_FAULT, COT_INVALID_SHAPE,
           "causal_conv1d_update: conv_state has more than 2^56 bytes (size 4611686018427387904 on axis 0)",
           f->u.conv_state.shape[0] = (int64_t)1 << 62);
    /* A broadcast over more channels than an address space has bytes. The tensors need no such memory, but the size
     * of the kernels' workspace (40 bytes per channel) is 2^64 + 24, which would wrap to 24. */
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "causal_conv1d_backward: x has more than 2^56 bytes (size 461168601842738791 on axis 1)",
           f->b = (cot_causal_conv1d_backward_args){.struct_size = sizeof f->b}, f->b.x = VIEW(NULL, COT_F32, 0, 1, 1),
           f->b.x.shape[1] = 461168601842738791, f->b.dy = f->b.x, f->b.weight = VIEW(f->weight, COT_F32, 1, 1),
           f->b.weight.shape[0] = 461168601842738791, f->b.weight.stride[0] = 0);
    /* The maximum number of channels needs more workspace than the maximum. */
    REFUSE(
        BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
        "causal_conv1d_backward: weight has the sizes [9007199254740992,1], for which a kernel needs more than 2^56 bytes of "
        "workspace",
        f->b = (cot_causal_conv1d_backward_args){.struct_size = sizeof f->b}, cot_queue_destroy(f->queue),
        f->queue = make_queue("causal_conv1d=causal_conv1d_bwd_scalar", 0), f->b.x = VIEW(NULL, COT_F32, 0, 1, 1),
        f->b.x.shape[1] = (int64_t)1 << 53, f->b.dy = f->b.x, f->b.weight = VIEW(f->weight, COT_F32, 1, 1),
        f->b.weight.shape[0] = (int64_t)1 << 53, f->b.weight.stride[0] = 0);
    /* 1/8 of that: the call reports that the memory is not available. */
    REFUSE(BACKWARD, DATA_FAULT, COT_OUT_OF_MEMORY, "the queue's pool cannot grow from 0 to 45035996273704960 bytes",
           f->b = (cot_causal_conv1d_backward_args){.struct_size = sizeof f->b}, cot_queue_destroy(f->queue),
           f->queue = make_queue("causal_conv1d=causal_conv1d_bwd_scalar", 0), f->b.x = VIEW(NULL, COT_F32, 0, 1, 1),
           f->b.x.shape[1] = (int64_t)1 << 50, f->b.dy = f->b.x, f->b.weight = VIEW(f->weight, COT_F32, 1, 1),
           f->b.weight.shape[0] = (int64_t)1 << 50, f->b.weight.stride[0] = 0);
}

/* ---- packing ------------------------------------------------------------------------------------------ */

#define SEQ_IDX(args) (args).seq_idx = VIEW(f->seq_idx, COT_I32, B, T)

/* The same problem packed into one row: B = 1, two sequences. */
#define PACK_FORWARD() f->f.x.shape[0] = f->f.y.shape[0] = 1, f->f.cu_seqlens = VIEW(f->cu_seqlens, COT_I32, B + 1)
#define PACK_BACKWARD() \
    f->b.x.shape[0] = f->b.dy.shape[0] = f->b.dx.shape[0] = 1, f->b.cu_seqlens = VIEW(f->cu_seqlens, COT_I32, B + 1)

static void packing(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "causal_conv1d_forward: seq_idx and cu_seqlens are both given, expected at most one", PACK_FORWARD(),
           f->f.seq_idx = VIEW(f->seq_idx, COT_I32, 1, T));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "causal_conv1d_forward: seq_idx has dtype f32, expected i32",
           SEQ_IDX(f->f), f->f.seq_idx.dtype = COT_F32);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: seq_idx has 1 axis, expected 2",
           SEQ_IDX(f->f), f->f.seq_idx.rank = 1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: seq_idx has B=1, x has B=2", SEQ_IDX(f->f),
           f->f.seq_idx.shape[0] = 1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: seq_idx has T=9, x has T=8", SEQ_IDX(f->f),
           f->f.seq_idx.shape[1] = 9);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "causal_conv1d_forward: cu_seqlens has dtype f32, expected i32",
           PACK_FORWARD(), f->f.cu_seqlens.dtype = COT_F32);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: cu_seqlens has 2 axes, expected 1",
           PACK_FORWARD(), f->f.cu_seqlens.rank = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: cu_seqlens has 0 entries, expected N+1",
           PACK_FORWARD(), f->f.cu_seqlens.shape[0] = 0);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: x has B=2, expected 1 with cu_seqlens",
           f->f.cu_seqlens = VIEW(f->cu_seqlens, COT_I32, B + 1));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_forward: initial_state has N=3, cu_seqlens has N=2",
           PACK_FORWARD(), f->f.initial_state.shape[0] = 3);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: dfinal_state has N=1, cu_seqlens has N=2",
           PACK_BACKWARD(), f->b.dfinal_state.shape[0] = 1);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "causal_conv1d_backward: x has B=2, expected 1 with cu_seqlens",
           f->b.cu_seqlens = VIEW(f->cu_seqlens, COT_I32, B + 1));
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_DATA, "causal_conv1d_forward: cu_seqlens[0] is 1, expected 0",
           PACK_FORWARD(), f->cu_seqlens[0] = 1);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_DATA, "causal_conv1d_forward: cu_seqlens[0] is -1, expected 0",
           PACK_FORWARD(), f->cu_seqlens[0] = -1);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_DATA, "causal_conv1d_forward: cu_seqlens[2] is 2, less than 3 before it",
           PACK_FORWARD(), f->cu_seqlens[2] = 2);
    REFUSE(BACKWARD, DATA_FAULT, COT_INVALID_DATA, "causal_conv1d_backward: cu_seqlens[1] is -5, less than 0 before it",
           PACK_BACKWARD(), f->cu_seqlens[1] = -5);
    REFUSE(BACKWARD, DATA_FAULT, COT_INVALID_DATA, "causal_conv1d_backward: cu_seqlens ends at 9, x has T=8",
           PACK_BACKWARD(), f->cu_seqlens[2] = 9);
    ACCEPT(FORWARD, PACK_FORWARD());
    ACCEPT(BACKWARD, PACK_BACKWARD());
    ACCEPT(FORWARD, SEQ_IDX(f->f));
    ACCEPT(FORWARD, SEQ_IDX(f->f), f->seq_idx[3] = INT32_MIN, f->seq_idx[4] = INT32_MAX);
}

/* ---- memory ------------------------------------------------------------------------------------------- */

static void null_and_misaligned_data(void **state)
{
    (void)state;
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_forward: x has null data", f->f.x.data = NULL);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_forward: y has null data", f->f.y.data = NULL);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_forward: cu_seqlens has null data", PACK_FORWARD(),
           f->f.cu_seqlens.data = NULL);
    REFUSE(BACKWARD, DATA_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_backward: dfinal_state has null data",
           f->b.dfinal_state.data = NULL);
    REFUSE(UPDATE, DATA_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_update: conv_state has null data",
           f->u.conv_state.data = NULL);
    REFUSE(UPDATE, DATA_FAULT, COT_INVALID_ARGUMENT, "causal_conv1d_update: conv_state_indices has null data",
           f->u.conv_state_indices = VIEW(NULL, COT_I32, B));

    char message[128];
    fixture f;
    fresh(&f, NULL);
    f.f.weight.data = (char *)f.weight + 1;
    snprintf(message, sizeof message,
             "causal_conv1d_forward: weight has data at %p, expected a multiple of 4 (one f32 element)",
             f.f.weight.data);
    REFUSED(&f, FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, message);
    fresh(&f, NULL);
    f.b.dbias.dtype = COT_BF16;
    f.b.dbias.data = (char *)f.out.bias + 3;
    snprintf(message, sizeof message,
             "causal_conv1d_backward: dbias has data at %p, expected a multiple of 2 (one bf16 element)",
             f.b.dbias.data);
    REFUSED(&f, BACKWARD, DATA_FAULT, COT_INVALID_LAYOUT, message);
}

static void overlaps(void **state)
{
    (void)state;
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT,
           "causal_conv1d_forward: y is an output but its strides give two elements one address (axis 0, stride 0)",
           f->f.y.stride[0] = 0);
    REFUSE(
        BACKWARD, DATA_FAULT, COT_INVALID_LAYOUT,
        "causal_conv1d_backward: dweight is an output but its strides give two elements one address (axis 0, stride 1)",
        f->b.dweight.stride[0] = 1);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "causal_conv1d_forward: y overlaps x", f->f.x.data = f->out.y);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "causal_conv1d_forward: y overlaps weight",
           f->f.weight.data = f->out.y);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "causal_conv1d_forward: final_state overlaps initial_state",
           f->f.initial_state.data = (float *)f->out.state + 4);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "causal_conv1d_forward: y overlaps final_state",
           f->f.final_state.data = f->out.y);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "causal_conv1d_forward: y overlaps seq_idx", SEQ_IDX(f->f),
           f->f.seq_idx.data = f->out.y);
    REFUSE(BACKWARD, DATA_FAULT, COT_INVALID_LAYOUT, "causal_conv1d_backward: dx overlaps dy", f->b.dy.data = f->out.y);
    REFUSE(BACKWARD, DATA_FAULT, COT_INVALID_LAYOUT, "causal_conv1d_backward: dweight overlaps dbias",
           f->b.dbias.data = (float *)f->out.weight + D * K - 1);
    REFUSE(BACKWARD, DATA_FAULT, COT_INVALID_LAYOUT, "causal_conv1d_backward: dinitial_state overlaps dfinal_state",
           f->b.dfinal_state.data = f->out.state);
    REFUSE(UPDATE, DATA_FAULT, COT_INVALID_LAYOUT, "causal_conv1d_update: conv_state overlaps x",
           f->u.x.data = f->out.state);
    REFUSE(UPDATE, DATA_FAULT, COT_INVALID_LAYOUT, "causal_conv1d_update: conv_state overlaps y",
           f->u.y.data = f->out.state);
    /* x and y are the two halves of the time axis of one array, or neighbouring channels of a channel-last array. */
    ACCEPT(FORWARD, f->f.x = VIEW(f->out.y, COT_F32, B, D, 4), f->f.y = f->f.x,
           f->f.x.stride[0] = f->f.y.stride[0] = D * 8, f->f.x.stride[1] = f->f.y.stride[1] = 8,
           f->f.y.data = (float *)f->out.y + 4);
    ACCEPT(BACKWARD, f->b.dx.stride[0] = T * 2 * D, f->b.dx.stride[1] = 1, f->b.dx.stride[2] = 2 * D, f->b.dy = f->b.dx,
           f->b.dy.data = (float *)f->out.y + D);
}

static void index_data(void **state)
{
    (void)state;
    REFUSE(UPDATE, DATA_FAULT, COT_INVALID_DATA, "causal_conv1d_update: cache_seqlens[1] is -1, expected 0 or more",
           f->u.cache_seqlens = VIEW(f->cache_seqlens, COT_I32, B), f->cache_seqlens[1] = -1);
    REFUSE(UPDATE, DATA_FAULT, COT_INVALID_DATA, "causal_conv1d_update: conv_state_indices[0] is 4, conv_state has N=4",
           f->u.conv_state_indices = VIEW(f->indices, COT_I32, B), f->indices[0] = 4);
    REFUSE(UPDATE, DATA_FAULT, COT_INVALID_DATA, "causal_conv1d_update: conv_state_indices has 1 twice (second at 1)",
           f->u.conv_state_indices = VIEW(f->indices, COT_I32, B), f->indices[0] = f->indices[1] = 1);
    ACCEPT(UPDATE, f->u.conv_state_indices = VIEW(f->indices, COT_I32, B));
    ACCEPT(UPDATE, f->u.conv_state_indices = VIEW(f->indices, COT_I32, B), f->indices[0] = f->indices[1] = -1);
    ACCEPT(UPDATE, f->u.cache_seqlens = VIEW(f->cache_seqlens, COT_I32, B), f->cache_seqlens[1] = INT32_MAX);
    /* With indices, the state may have fewer rows than the batch. */
    ACCEPT(UPDATE, f->u.conv_state_indices = VIEW(f->indices, COT_I32, B), f->indices[0] = -1, f->indices[1] = 0,
           f->u.conv_state.shape[0] = 1);
}

/* The check for repeated indices proceeds in windows of rows. It must find a pair at any distance, and it must be
 * fast for a conv_state with very many rows (and no channels). */
static void repeated_indices_among_many_rows(void **state)
{
    (void)state;
    static int32_t indices[4];
    static const int32_t rows[] = {0, 65535, 65536, 131071, 131072, 199999};
    fixture f;
    char message[128];
    for (size_t i = 0; i < COUNT(rows); i++) {
        fresh(&f, NULL);
        indices[0] = 65534;
        indices[1] = indices[3] = rows[i];
        indices[2] = -1;
        COT_INIT(&f.u);
        f.u.x = f.u.y = VIEW(NULL, COT_F32, 4, 0, 1);
        f.u.weight = VIEW(NULL, COT_F32, 0, 4);
        f.u.conv_state = VIEW(NULL, COT_F32, 200000, 0, 3);
        f.u.conv_state_indices = VIEW(indices, COT_I32, 4);
        snprintf(message, sizeof message, "causal_conv1d_update: conv_state_indices has %d twice (second at 3)",
                 (int)rows[i]);
        REFUSED(&f, UPDATE, DATA_FAULT, COT_INVALID_DATA, message);
        fresh(&f, NULL);
        indices[3] = 5;
        COT_INIT(&f.u);
        f.u.x = f.u.y = VIEW(NULL, COT_F32, 4, 0, 1);
        f.u.weight = VIEW(NULL, COT_F32, 0, 4);
        f.u.conv_state = VIEW(NULL, COT_F32, (int64_t)1 << 52, 0, 3);
        f.u.conv_state_indices = VIEW(indices, COT_I32, 4);
        assert_ok(call(&f, UPDATE));
        cot_queue_destroy(f.queue);
    }
}

/* ---- kernels and workspace ---------------------------------------------------------------------------- */

static void forced_kernels(void **state)
{
    (void)state;
    fixture f;
    fresh(&f, "causal_conv1d=causal_conv1d_fwd_quick");
    REFUSED(&f, FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
            "causal_conv1d_forward: the forced kernel \"causal_conv1d_fwd_quick\" is none of causal_conv1d's");
    fresh(&f, "causal_conv1d=causal_conv1d_fwd_scalar_f64");
    REFUSED(&f, FORWARD, SHAPE_FAULT, COT_UNSUPPORTED,
            "causal_conv1d_forward: the forced kernel causal_conv1d_fwd_scalar_f64 refuses: it supports f64 only");
    fresh(&f, "causal_conv1d=causal_conv1d_bwd_scalar");
    f.b = (cot_causal_conv1d_backward_args){.struct_size = sizeof f.b};
    f.b.x = VIEW(f.out.y, COT_F64, B, D, T);
    f.b.weight = VIEW(f.out.weight, COT_F64, D, K);
    f.b.dy = f.b.x;
    REFUSED(
        &f, BACKWARD, SHAPE_FAULT, COT_UNSUPPORTED,
        "causal_conv1d_backward: the forced kernel causal_conv1d_bwd_scalar refuses: it computes in float32, the tensors are f64");
}

static void workspaces(void **state)
{
    (void)state;
    static const char kernels[] = "causal_conv1d=causal_conv1d_bwd_scalar"; /* a kernel with a workspace */
    static _Alignas(64) char memory[4096];
    char message[128];
    size_t bytes = 0;
    fixture f;
    fresh(&f, kernels);
    assert_ok(query_workspace(&f, BACKWARD, &bytes));
    assert_in_range(bytes, 1, sizeof memory - 64);
    f.b.workspace_bytes = bytes;
    snprintf(message, sizeof message, "causal_conv1d_backward: workspace is null but workspace_bytes is %zu", bytes);
    REFUSED(&f, BACKWARD, DATA_FAULT, COT_INVALID_ARGUMENT, message);
    fresh(&f, kernels);
    f.b.workspace = memory;
    f.b.workspace_bytes = bytes - 1;
    snprintf(message, sizeof message, "causal_conv1d_backward: workspace has %zu bytes, %zu are needed", bytes - 1,
             bytes);
    REFUSED(&f, BACKWARD, DATA_FAULT, COT_WORKSPACE_TOO_SMALL, message);
    fresh(&f, kernels);
    f.b.workspace = memory + 8;
    f.b.workspace_bytes = bytes;
    snprintf(message, sizeof message, "causal_conv1d_backward: workspace is at %p, expected a multiple of 64",
             f.b.workspace);
    REFUSED(&f, BACKWARD, DATA_FAULT, COT_INVALID_LAYOUT, message);
    fresh(&f, kernels);
    f.b.workspace = memory;
    f.b.workspace_bytes = bytes;
    memset(memory, 0x77, sizeof memory);
    assert_ok(call(&f, BACKWARD));
    for (size_t i = bytes; i < sizeof memory; i++)
        assert_int_equal(memory[i], 0x77);
    cot_queue_destroy(f.queue);
}

static void workspace_is_asked_before_there_is_memory(void **state)
{
    (void)state;
    fixture f;
    size_t with_data, without;
    fresh(&f, NULL);
    assert_ok(query_workspace(&f, BACKWARD, &with_data));
    cot_tensor *const tensors[] = {&f.b.x,  &f.b.weight,  &f.b.bias,  &f.b.initial_state, &f.b.dy, &f.b.dfinal_state,
                                   &f.b.dx, &f.b.dweight, &f.b.dbias, &f.b.dinitial_state};
    for (size_t i = 0; i < COUNT(tensors); i++)
        tensors[i]->data = NULL;
    assert_ok(query_workspace(&f, BACKWARD, &without));
    assert_int_equal(with_data, without);
    cot_queue_destroy(f.queue);
}

/* ---- valid calls -------------------------------------------------------------------------------------- */

static void empty_sizes_are_legal(void **state)
{
    (void)state;
    ACCEPT(FORWARD, f->f.x = f->f.y = VIEW(NULL, COT_F32, 0, D, T),
           f->f.initial_state = f->f.final_state = VIEW(NULL, COT_F32, 0, D, K - 1));
    ACCEPT(FORWARD, f->f.x = f->f.y = VIEW(NULL, COT_F32, B, D, 0));
    ACCEPT(FORWARD, f->f.x = f->f.y = VIEW(NULL, COT_F32, B, 0, T), f->f.weight = VIEW(NULL, COT_F32, 0, K),
           f->f.bias = VIEW(NULL, COT_F32, 0),
           f->f.initial_state = f->f.final_state = VIEW(NULL, COT_F32, B, 0, K - 1));
    ACCEPT(FORWARD, PACK_FORWARD(), f->f.cu_seqlens.shape[0] = 1,
           f->f.initial_state = f->f.final_state = VIEW(NULL, COT_F32, 0, D, K - 1));
    ACCEPT(FORWARD, f->f.weight = VIEW(f->weight, COT_F32, D, 1),
           f->f.initial_state = f->f.final_state = VIEW(NULL, COT_F32, B, D, 0));
    ACCEPT(BACKWARD, f->b.x = f->b.dx = f->b.dy = VIEW(NULL, COT_F32, B, D, 0));
    ACCEPT(BACKWARD, f->b.x = f->b.dx = f->b.dy = VIEW(NULL, COT_F32, 0, D, T),
           f->b.initial_state = f->b.dfinal_state = f->b.dinitial_state = VIEW(NULL, COT_F32, 0, D, K - 1));
    ACCEPT(UPDATE, f->u.x = f->u.y = VIEW(NULL, COT_F32, B, D, 0));
    ACCEPT(UPDATE, f->u.x = f->u.y = VIEW(NULL, COT_F32, 0, D), f->u.conv_state = VIEW(NULL, COT_F32, 0, D, S));
    ACCEPT(UPDATE, f->u.x.rank = f->u.y.rank = 2, f->u.x.stride[1] = f->u.y.stride[1] = 1);
    /* A ring without columns is valid for K = 1 only, which has no state. */
    ACCEPT(UPDATE, f->u.weight = VIEW(f->weight, COT_F32, D, 1), f->u.conv_state = VIEW(NULL, COT_F32, B, D, 0),
           f->u.cache_seqlens = VIEW(f->cache_seqlens, COT_I32, B));
}

/* T = 0: the parameter gradients are zero (=) or unchanged (+=). The initial state becomes the final state. */
static void no_tokens_give_zero_gradients(void **state)
{
    (void)state;
    for (int accumulate = 0; accumulate <= 1; accumulate++) {
        fixture f;
        fresh(&f, NULL);
        f.b.accumulate = accumulate;
        f.b.x = f.b.dx = f.b.dy = VIEW(NULL, COT_F32, B, D, 0);
        for (int i = 0; i < B * D * (K - 1); i++)
            f.state[i] = (float)i;
        float *dweight = (float *)f.out.weight, *dbias = (float *)f.out.bias, *dstate = (float *)f.out.state;
        for (int i = 0; i < D * K; i++)
            dweight[i] = 5;
        for (int i = 0; i < D; i++)
            dbias[i] = 7;
        assert_ok(call(&f, BACKWARD));
        for (int i = 0; i < D * K; i++)
            assert_true(dweight[i] == (accumulate ? 5 : 0));
        for (int i = 0; i < D; i++)
            assert_true(dbias[i] == (accumulate ? 7 : 0));
        for (int i = 0; i < B * D * (K - 1); i++)
            assert_true(dstate[i] == (float)i); /* dfinal_state uses the memory of initial_state here */
        cot_queue_destroy(f.queue);
    }
}

static void outputs_may_be_absent(void **state)
{
    (void)state;
    const cot_tensor absent = {0};
    ACCEPT(FORWARD, f->f.final_state = absent, f->f.initial_state = absent, f->f.bias = absent);
    ACCEPT(FORWARD, f->f.y = absent);
    ACCEPT(FORWARD, f->f.y = f->f.final_state = absent);
    ACCEPT(BACKWARD, f->b.dx = absent);
    ACCEPT(BACKWARD, f->b.dx = f->b.dweight = f->b.dbias = f->b.dinitial_state = absent);
    ACCEPT(BACKWARD, f->b.initial_state = f->b.dfinal_state = f->b.bias = absent);
    ACCEPT(BACKWARD, f->b.activation = COT_ACTIVATION_NONE, f->b.bias = absent);
}

/* Inputs may be broadcast, reversed or overlapping. */
static void inputs_may_have_any_strides(void **state)
{
    (void)state;
    ACCEPT(FORWARD, f->f.x.stride[0] = 0, f->f.weight.stride[0] = 0, f->f.bias.stride[0] = 0);
    ACCEPT(FORWARD, f->f.weight.data = f->x, f->f.bias.data = f->x);
    ACCEPT(FORWARD, f->f.x.data = f->x + T - 1, f->f.x.stride[2] = -1);
    ACCEPT(BACKWARD, f->b.dy.stride[0] = f->b.dy.stride[1] = f->b.dy.stride[2] = 0);
    ACCEPT(BACKWARD, f->b.dweight.data = (float *)f->out.weight + D * K - 1, f->b.dweight.stride[0] = -K,
           f->b.dweight.stride[1] = -1);
    /* The stride of an axis of one element is ignored. */
    ACCEPT(FORWARD, f->f.x.shape[0] = f->f.y.shape[0] = 1, f->f.initial_state.shape[0] = f->f.final_state.shape[0] = 1,
           f->f.x.stride[0] = INT64_MIN, f->f.y.stride[0] = INT64_MAX, f->f.final_state.stride[0] = INT64_MAX);
}

int main(void)
{
    unsetenv("COT_KERNEL");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(queue_args_and_struct_size),
        cmocka_unit_test(options),
        cmocka_unit_test(required_tensors),
        cmocka_unit_test(forward_shapes),
        cmocka_unit_test(forward_dtypes),
        cmocka_unit_test(backward_shapes_and_dtypes),
        cmocka_unit_test(update_shapes_and_dtypes),
        cmocka_unit_test(sizes_that_overflow),
        cmocka_unit_test(packing),
        cmocka_unit_test(null_and_misaligned_data),
        cmocka_unit_test(overlaps),
        cmocka_unit_test(index_data),
        cmocka_unit_test(repeated_indices_among_many_rows),
        cmocka_unit_test(forced_kernels),
        cmocka_unit_test(workspaces),
        cmocka_unit_test(workspace_is_asked_before_there_is_memory),
        cmocka_unit_test(empty_sizes_are_legal),
        cmocka_unit_test(no_tokens_give_zero_gradients),
        cmocka_unit_test(outputs_may_be_absent),
        cmocka_unit_test(inputs_may_have_any_strides),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
