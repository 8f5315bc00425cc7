/* SPDX-License-Identifier: Apache-2.0
 * test_mhc_errors.c: the reasons for which mhc_pre, mhc_sinkhorn, mhc_post and mhc_post_pre refuse a call. Checks the
 * status, the exact message, and that no output was written. Also tests unusual calls that are valid. */
#include "argument_checks.h"

#include <cotangent/mhc.h>
#include <math.h>
#include <stdio.h>

enum { B = 2, T = 3, N = 2, D = 5, M = N * (N + 2), TOKENS = B * T };
enum {
    PRE_FORWARD,
    PRE_BACKWARD,
    SINKHORN_FORWARD,
    SINKHORN_BACKWARD,
    POST_FORWARD,
    POST_BACKWARD,
    POST_PRE_FORWARD,
    POST_PRE_BACKWARD
};

/* Valid arguments of all eight calls, f32, with every optional tensor, and their memory. */
typedef struct fixture {
    cot_queue *queue;
    cot_mhc_pre_forward_args pf;
    cot_mhc_pre_backward_args pb;
    cot_mhc_sinkhorn_forward_args sf;
    cot_mhc_sinkhorn_backward_args sb;
    cot_mhc_post_forward_args of;
    cot_mhc_post_backward_args ob;
    cot_mhc_post_pre_forward_args mf;
    cot_mhc_post_pre_backward_args mb;
    float in[TOKENS * N * D + M * N * D];
    double out[9][TOKENS * N * D + M * N * D]; /* large enough for f64 */
} fixture;

#define F32(data, ...) VIEW(data, COT_F32, __VA_ARGS__)

static fixture *fresh(fixture *f, const char *kernels)
{
    BEGIN(f, kernels);
    const cot_tensor x = F32(f->in, B, T, N, D), layer = F32(f->in, B, T, D), vector = F32(f->in, B, T, N);
    const cot_tensor matrix = F32(f->in, B, T, N, N), number = F32(f->in, B, T), mix = F32(f->in, B, T, M);
    const cot_tensor phi = F32(f->in, M, N * D), alpha = F32(f->in, 3), bias = F32(f->in, M);
    const cot_tensor gamma = F32(f->in, N, D);

    COT_MHC_PRE_FORWARD_INIT(&f->pf);
    f->pf.x = x, f->pf.phi = phi, f->pf.alpha = alpha, f->pf.bias = bias, f->pf.gamma = gamma;
    f->pf.h_in = F32(f->out[0], B, T, D);
    f->pf.h_pre = F32(f->out[1], B, T, N);
    f->pf.h_post = F32(f->out[2], B, T, N);
    f->pf.h_res_logits = F32(f->out[3], B, T, N, N);
    f->pf.h_res = F32(f->out[4], B, T, N, N);
    f->pf.inv_rms = F32(f->out[5], B, T);
    f->pf.h_mix = F32(f->out[6], B, T, M);

    COT_MHC_PRE_BACKWARD_INIT(&f->pb);
    f->pb.x = x, f->pb.phi = phi, f->pb.alpha = alpha, f->pb.bias = bias, f->pb.gamma = gamma;
    f->pb.inv_rms = number, f->pb.h_mix = mix, f->pb.h_pre = vector, f->pb.h_post = vector;
    f->pb.dh_in = layer, f->pb.dh_post = vector, f->pb.dh_res_logits = matrix, f->pb.dh_res = matrix, f->pb.dx_post = x;
    f->pb.dx = F32(f->out[0], B, T, N, D);
    f->pb.dphi = F32(f->out[1], M, N * D);
    f->pb.dalpha = F32(f->out[2], 3);
    f->pb.dbias = F32(f->out[3], M);
    f->pb.dgamma = F32(f->out[4], N, D);

    COT_MHC_SINKHORN_INIT(&f->sf);
    f->sf.h_res_logits = matrix;
    f->sf.h_res = F32(f->out[0], B, T, N, N);
    COT_MHC_SINKHORN_INIT(&f->sb);
    f->sb.h_res_logits = f->sb.dh_res = matrix;
    f->sb.dh_res_logits = F32(f->out[0], B, T, N, N);

    COT_INIT(&f->of);
    f->of.x = x, f->of.f = layer, f->of.h_post = vector, f->of.h_res = matrix;
    f->of.y = F32(f->out[0], B, T, N, D);
    COT_INIT(&f->ob);
    f->ob.x = f->ob.dy = x, f->ob.f = layer, f->ob.h_post = vector, f->ob.h_res = matrix;
    f->ob.dx = F32(f->out[0], B, T, N, D);
    f->ob.df = F32(f->out[1], B, T, D);
    f->ob.dh_post = F32(f->out[2], B, T, N);
    f->ob.dh_res = F32(f->out[3], B, T, N, N);

    COT_MHC_POST_PRE_FORWARD_INIT(&f->mf);
    f->mf.x = x, f->mf.f = layer, f->mf.h_post = vector, f->mf.h_res = matrix;
    f->mf.phi = phi, f->mf.alpha = alpha, f->mf.bias = bias, f->mf.gamma = gamma;
    f->mf.y = F32(f->out[0], B, T, N, D);
    f->mf.h_in = F32(f->out[1], B, T, D);
    f->mf.h_pre = F32(f->out[2], B, T, N);
    f->mf.next_h_post = F32(f->out[3], B, T, N);
    f->mf.h_res_logits = F32(f->out[4], B, T, N, N);
    f->mf.next_h_res = F32(f->out[5], B, T, N, N);
    f->mf.inv_rms = F32(f->out[6], B, T);
    f->mf.h_mix = F32(f->out[7], B, T, M);

    COT_MHC_POST_PRE_BACKWARD_INIT(&f->mb);
    f->mb.x = f->mb.y = f->mb.dy = x, f->mb.f = layer, f->mb.h_post = vector, f->mb.h_res = matrix;
    f->mb.phi = phi, f->mb.alpha = alpha, f->mb.bias = bias, f->mb.gamma = gamma;
    f->mb.inv_rms = number, f->mb.h_mix = mix, f->mb.h_pre = vector, f->mb.next_h_post = vector;
    f->mb.dh_in = layer, f->mb.dnext_h_post = vector, f->mb.dh_res_logits = matrix, f->mb.dnext_h_res = matrix;
    f->mb.dx = F32(f->out[0], B, T, N, D);
    f->mb.df = F32(f->out[1], B, T, D);
    f->mb.dh_post = F32(f->out[2], B, T, N);
    f->mb.dh_res = F32(f->out[3], B, T, N, N);
    f->mb.dphi = F32(f->out[4], M, N * D);
    f->mb.dalpha = F32(f->out[5], 3);
    f->mb.dbias = F32(f->out[6], M);
    f->mb.dgamma = F32(f->out[7], N, D);
    return f;
}

static cot_status call(fixture *f, int which)
{
    switch (which) {
    case PRE_FORWARD: return cot_mhc_pre_forward(f->queue, &f->pf);
    case PRE_BACKWARD: return cot_mhc_pre_backward(f->queue, &f->pb);
    case SINKHORN_FORWARD: return cot_mhc_sinkhorn_forward(f->queue, &f->sf);
    case SINKHORN_BACKWARD: return cot_mhc_sinkhorn_backward(f->queue, &f->sb);
    case POST_FORWARD: return cot_mhc_post_forward(f->queue, &f->of);
    case POST_BACKWARD: return cot_mhc_post_backward(f->queue, &f->ob);
    case POST_PRE_FORWARD: return cot_mhc_post_pre_forward(f->queue, &f->mf);
    default: return cot_mhc_post_pre_backward(f->queue, &f->mb);
    }
}

static cot_status query_workspace(fixture *f, int which, size_t *bytes)
{
    switch (which) {
    case PRE_FORWARD: return cot_mhc_pre_forward_workspace(f->queue, &f->pf, bytes);
    case PRE_BACKWARD: return cot_mhc_pre_backward_workspace(f->queue, &f->pb, bytes);
    case SINKHORN_FORWARD: return cot_mhc_sinkhorn_forward_workspace(f->queue, &f->sf, bytes);
    case SINKHORN_BACKWARD: return cot_mhc_sinkhorn_backward_workspace(f->queue, &f->sb, bytes);
    case POST_FORWARD: return cot_mhc_post_forward_workspace(f->queue, &f->of, bytes);
    case POST_BACKWARD: return cot_mhc_post_backward_workspace(f->queue, &f->ob, bytes);
    case POST_PRE_FORWARD: return cot_mhc_post_pre_forward_workspace(f->queue, &f->mf, bytes);
    default: return cot_mhc_post_pre_backward_workspace(f->queue, &f->mb, bytes);
    }
}

static void structs(void **state)
{
    (void)state;
    static fixture no_tokens;
    fixture *g = fresh(&no_tokens, NULL);
    assert_fails(cot_mhc_pre_forward(g->queue, NULL), COT_INVALID_ARGUMENT, "mhc_pre_forward: args is null");
    assert_fails(cot_mhc_post_backward(NULL, &g->ob), COT_INVALID_ARGUMENT, "mhc_post_backward: queue is null");
    assert_fails(cot_mhc_sinkhorn_forward_workspace(g->queue, &g->sf, NULL), COT_INVALID_ARGUMENT,
                 "mhc_sinkhorn_forward_workspace: bytes is null");
    cot_queue_destroy(g->queue);
    char message[160];
    snprintf(message, sizeof message, "mhc_post_forward: struct_size is 0, expected %zu (use COT_INIT)",
             sizeof(cot_mhc_post_forward_args));
    REFUSE(POST_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, message, f->of.struct_size = 0);
    for (int which = PRE_FORWARD; which <= POST_PRE_BACKWARD; which++)
        ACCEPT(which, );
}

static void options(void **state)
{
    (void)state;
    REFUSE(PRE_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_pre_forward: norm_eps is -1, expected 0 or more",
           f->pf.norm_eps = -1);
    REFUSE(PRE_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_pre_forward: hc_eps is inf, expected 0 or more",
           f->pf.hc_eps = (double)INFINITY);
    REFUSE(PRE_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_pre_forward: post_scale is 0, expected more than 0",
           f->pf.post_scale = 0);
    REFUSE(PRE_BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_pre_backward: sinkhorn_eps is -2, expected 0 or more",
           f->pb.sinkhorn_eps = -2);
    REFUSE(PRE_BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "mhc_pre_backward: sinkhorn_iterations is 0, expected 1 to 4096", f->pb.sinkhorn_iterations = 0);
    REFUSE(PRE_BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_pre_backward: accumulate is 2, expected 0 or 1",
           f->pb.accumulate = 2);
    REFUSE(SINKHORN_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_sinkhorn_forward: eps is -0.5, expected 0 or more",
           f->sf.eps = -0.5);
    REFUSE(SINKHORN_BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "mhc_sinkhorn_backward: iterations is 4097, expected 1 to 4096", f->sb.iterations = 4097);
    REFUSE(POST_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_post_forward: h_res_is_out_in is 3, expected 0 or 1",
           f->of.h_res_is_out_in = 3);
    REFUSE(POST_PRE_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "mhc_post_pre_forward: norm_eps is -1, expected 0 or more", f->mf.norm_eps = -1);
    REFUSE(POST_PRE_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "mhc_post_pre_forward: h_res_is_out_in is 2, expected 0 or 1", f->mf.h_res_is_out_in = 2);
    REFUSE(POST_PRE_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "mhc_post_pre_forward: sinkhorn_iterations is 0, expected 1 to 4096", f->mf.sinkhorn_iterations = 0);
    REFUSE(POST_PRE_BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "mhc_post_pre_backward: hc_eps is -1, expected 0 or more", f->mb.hc_eps = -1);
    REFUSE(POST_PRE_BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "mhc_post_pre_backward: accumulate is -1, expected 0 or 1", f->mb.accumulate = -1);
    REFUSE(POST_PRE_BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "mhc_post_pre_backward: h_res_is_out_in is 2, expected 0 or 1", f->mb.h_res_is_out_in = 2);
    /* Without h_res, the options of Sinkhorn are ignored. */
    ACCEPT(POST_PRE_FORWARD, f->mf.next_h_res = (cot_tensor){0}, f->mf.sinkhorn_iterations = 0);
    ACCEPT(POST_PRE_BACKWARD, f->mb.dnext_h_res = f->mb.bias = (cot_tensor){0}, f->mb.sinkhorn_iterations = 0);
    ACCEPT(PRE_FORWARD, f->pf.h_res = (cot_tensor){0}, f->pf.sinkhorn_iterations = 0, f->pf.sinkhorn_eps = -1);
    ACCEPT(PRE_FORWARD, f->pf.norm_eps = 0, f->pf.hc_eps = 0, f->pf.sinkhorn_eps = 0, f->in[0] = 1);
}

static void tensors(void **state)
{
    (void)state;
    REFUSE(PRE_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_pre_forward: x is required", f->pf.x = (cot_tensor){0});
    REFUSE(PRE_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_pre_forward: phi is required",
           f->pf.phi = (cot_tensor){0});
    REFUSE(PRE_BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_pre_backward: bias is required",
           f->pb.bias = (cot_tensor){0}); /* for dh_res */
    REFUSE(PRE_BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_pre_backward: dh_in is required",
           f->pb.dh_in = (cot_tensor){0});
    REFUSE(SINKHORN_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_sinkhorn_forward: h_res is required",
           f->sf.h_res = (cot_tensor){0});
    REFUSE(POST_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_post_forward: y is required",
           f->of.y = (cot_tensor){0});
    REFUSE(POST_BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "mhc_post_backward: x has D=0, expected 1 or more",
           f->ob.x.shape[3] = 0);
    REFUSE(SINKHORN_FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "mhc_sinkhorn_forward: h_res_logits has n=0, expected 1 or more", f->sf.h_res_logits.shape[2] = 0);
    REFUSE(PRE_FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "mhc_pre_forward: x has 3 axes, expected 4", f->pf.x.rank = 3);
    REFUSE(PRE_FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "mhc_pre_forward: phi has M=n*n+2n=7, x has M=n*n+2n=8",
           f->pf.phi.shape[0] = 7);
    REFUSE(PRE_FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "mhc_pre_forward: phi has n*D=9, x has n*D=10",
           f->pf.phi.shape[1] = 9);
    REFUSE(PRE_BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "mhc_pre_backward: dalpha has 3=2, x has 3=3",
           f->pb.dalpha.shape[0] = 2);
    REFUSE(POST_BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "mhc_post_backward: dy has T=2, x has T=3",
           f->ob.dy.shape[1] = 2);
    REFUSE(SINKHORN_BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "mhc_sinkhorn_backward: dh_res has n=3, h_res_logits has n=2", f->sb.dh_res.shape[3] = 3);
    REFUSE(PRE_FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "mhc_pre_forward: h_in has dtype f32, expected bf16 (x has bf16)", f->pf.x.dtype = COT_BF16);
    REFUSE(PRE_FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "mhc_pre_forward: phi has dtype bf16, expected f32 (x has f32)",
           f->pf.phi.dtype = COT_BF16);
    REFUSE(POST_FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "mhc_post_forward: h_res has dtype f64, expected f32 (x has f32)", f->of.h_res.dtype = COT_F64);
    REFUSE(SINKHORN_FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "mhc_sinkhorn_forward: h_res_logits has dtype bf16, expected f32 or f64",
           f->sf.h_res_logits.dtype = COT_BF16);
    REFUSE(POST_FORWARD, DATA_FAULT, COT_INVALID_ARGUMENT, "mhc_post_forward: f has null data", f->of.f.data = NULL);
    REFUSE(POST_FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "mhc_post_forward: y overlaps x", f->of.y = f->of.x);
    REFUSE(POST_PRE_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_post_pre_forward: y is required",
           f->mf.y = (cot_tensor){0});
    REFUSE(POST_PRE_FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_post_pre_forward: h_res is required",
           f->mf.h_res = (cot_tensor){0});
    REFUSE(POST_PRE_FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "mhc_post_pre_forward: next_h_res has n=3, x has n=2",
           f->mf.next_h_res.shape[3] = 3);
    REFUSE(POST_PRE_FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "mhc_post_pre_forward: next_h_post has dtype bf16, expected f32 (x has f32)",
           f->mf.next_h_post.dtype = COT_BF16);
    REFUSE(POST_PRE_FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "mhc_post_pre_forward: y overlaps x", f->mf.y = f->mf.x);
    REFUSE(POST_PRE_BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_post_pre_backward: bias is required",
           f->mb.bias = (cot_tensor){0}); /* for dnext_h_res */
    REFUSE(POST_PRE_BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "mhc_post_pre_backward: f is required",
           f->mb.f = (cot_tensor){0});
    REFUSE(POST_PRE_BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "mhc_post_pre_backward: y has T=2, x has T=3",
           f->mb.y.shape[1] = 2);
    REFUSE(POST_PRE_BACKWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "mhc_post_pre_backward: dy has dtype f16, expected f32 (x has f32)", f->mb.dy.dtype = COT_F16);
    REFUSE(POST_PRE_BACKWARD, DATA_FAULT, COT_INVALID_LAYOUT, "mhc_post_pre_backward: dx overlaps dh_res",
           f->mb.dh_res.data = f->out[0]);
    REFUSE(PRE_BACKWARD, DATA_FAULT, COT_INVALID_LAYOUT, "mhc_pre_backward: dx overlaps dphi",
           f->pb.dphi.data = f->out[0]);
}

/* Each output alone, no output, no token. */
static void absent_and_empty(void **state)
{
    (void)state;
    const cot_tensor none = {0};
    ACCEPT(PRE_FORWARD, f->pf.h_in = f->pf.h_pre = f->pf.h_post = f->pf.h_res_logits = f->pf.h_res = none,
           f->pf.inv_rms = f->pf.h_mix = f->pf.gamma = none);
    ACCEPT(PRE_BACKWARD, f->pb.dx = f->pb.dphi = f->pb.dalpha = f->pb.dbias = f->pb.dgamma = none);
    ACCEPT(PRE_BACKWARD, f->pb.dh_res_logits = f->pb.dh_res = f->pb.dx_post = f->pb.bias = f->pb.gamma = none);
    ACCEPT(POST_BACKWARD, f->ob.dx = f->ob.df = f->ob.dh_post = f->ob.dh_res = none);
    ACCEPT(POST_PRE_FORWARD,
           f->mf.h_in = f->mf.h_pre = f->mf.next_h_post = f->mf.h_res_logits = f->mf.next_h_res = none,
           f->mf.inv_rms = f->mf.h_mix = f->mf.gamma = none);
    ACCEPT(POST_PRE_BACKWARD, f->mb.dx = f->mb.df = f->mb.dh_post = f->mb.dh_res = none,
           f->mb.dphi = f->mb.dalpha = f->mb.dbias = f->mb.dgamma = none);
    ACCEPT(POST_PRE_BACKWARD, f->mb.dx = f->mb.df = f->mb.dh_post = f->mb.dh_res = none);
    ACCEPT(POST_PRE_BACKWARD,
           f->mb.y = f->mb.dh_res_logits = f->mb.dnext_h_res = f->mb.dy = f->mb.bias = f->mb.gamma = none);
    /* Without tokens, the parameters' gradients are zero. No other output is written. */
    static fixture no_tokens;
    fixture *g = fresh(&no_tokens, NULL);
    float *const dphi = g->pb.dphi.data, *const dalpha = g->pb.dalpha.data, *const dbias = g->pb.dbias.data;
    float *const dgamma = g->pb.dgamma.data;
    cot_tensor *const with_tokens[] = {&g->pb.x,      &g->pb.inv_rms, &g->pb.h_mix,   &g->pb.h_pre,
                                       &g->pb.h_post, &g->pb.dh_in,   &g->pb.dh_post, &g->pb.dh_res_logits,
                                       &g->pb.dh_res, &g->pb.dx_post, &g->pb.dx};
    for (size_t i = 0; i < COUNT(with_tokens); i++)
        with_tokens[i]->shape[1] = 0;
    assert_ok(call(g, PRE_BACKWARD));
    for (int64_t i = 0; i < M * N * D; i++)
        assert_true(dphi[i] == 0);
    assert_true(dalpha[2] == 0 && dbias[M - 1] == 0 && dgamma[N * D - 1] == 0);
    assert_int_equal(*(unsigned char *)g->out[0], untouched);
    g->pb.accumulate = 1;
    dbias[0] = 7;
    assert_ok(call(g, PRE_BACKWARD));
    assert_true(dbias[0] == 7);
    cot_queue_destroy(g->queue);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(structs),
        cmocka_unit_test(options),
        cmocka_unit_test(tensors),
        cmocka_unit_test(absent_and_empty),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
