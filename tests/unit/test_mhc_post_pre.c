/* SPDX-License-Identifier: Apache-2.0
 * test_mhc_post_pre.c: mhc_post_pre against mhc_post and mhc_pre, one call after the other. Every kernel must give the
 * same bits in all outputs of the forward, which fixes where y is rounded. In f32 the backward must agree too, because
 * g has the dtype of x there. In 16 bits, the gradients of the parameters agree without post's half, and y that is
 * computed again gives the same bits as y that is given. */
#include "support.h"

#include "core/float16.h"

#include <cotangent/mhc.h>
#include <stdio.h>
#include <string.h>

enum { B = 2, T = 21, D = 83, MAX_N = 8, MAX_M = MAX_N * (MAX_N + 2), TOKENS = B * T, ARRAYS = 48 };

/* Arrays of the largest size, handed out in order. */
typedef struct memory {
    float data[ARRAYS][TOKENS * MAX_N * D + MAX_M * MAX_N * D];
    int used;
    uint32_t state;
} memory;

static memory arrays;

static size_t bytes_of(const cot_tensor *t)
{
    size_t bytes = cot_dtype_size(t->dtype);
    for (int axis = 0; axis < t->rank; axis++)
        bytes *= (size_t)t->shape[axis];
    return bytes;
}

static cot_tensor output(cot_dtype dtype, int rank, const int64_t *shape)
{
    assert_true(arrays.used < ARRAYS);
    const cot_tensor t = cot_tensor_contiguous(arrays.data[arrays.used++], dtype, rank, shape);
    memset(t.data, 0x55, bytes_of(&t));
    return t;
}

/* Values from -1 to 1 that every dtype holds exactly. */
static cot_tensor input(cot_dtype dtype, int rank, const int64_t *shape)
{
    cot_tensor t = output(dtype, rank, shape);
    const size_t count = bytes_of(&t) / cot_dtype_size(dtype);
    for (size_t i = 0; i < count; i++) {
        arrays.state = arrays.state * 1664525 + 1013904223;
        cot_store_f64(t.data, dtype, (int64_t)i, (double)((int)(arrays.state >> 26) - 32) / 32);
    }
    return t;
}

#define RANK_AND_SHAPE(...) (int)COUNT(SHAPE(__VA_ARGS__)), SHAPE(__VA_ARGS__)

static void assert_same(const cot_tensor *a, const cot_tensor *b)
{
    assert_int_equal(bytes_of(a), bytes_of(b));
    assert_memory_equal(a->data, b->data, bytes_of(a));
}

/* The arguments of a case, for post_pre and for the two calls. */
typedef struct calls {
    cot_mhc_post_pre_forward_args post_pre;
    cot_mhc_post_forward_args post;
    cot_mhc_pre_forward_args pre;
} calls;

static calls forward_calls(int64_t n, cot_dtype dtype, bool out_in)
{
    const int64_t M = n * (n + 2);
    calls c;
    arrays.used = 0;
    COT_MHC_POST_PRE_FORWARD_INIT(&c.post_pre);
    COT_MHC_PRE_FORWARD_INIT(&c.pre);
    COT_INIT(&c.post);
    c.post_pre.h_res_is_out_in = c.post.h_res_is_out_in = out_in;
    c.post_pre.x = c.post.x = input(dtype, RANK_AND_SHAPE(B, T, n, D));
    c.post_pre.f = c.post.f = input(dtype, RANK_AND_SHAPE(B, T, D));
    c.post_pre.h_post = c.post.h_post = input(COT_F32, RANK_AND_SHAPE(B, T, n));
    c.post_pre.h_res = c.post.h_res = input(COT_F32, RANK_AND_SHAPE(B, T, n, n));
    c.post_pre.phi = c.pre.phi = input(COT_F32, RANK_AND_SHAPE(M, n * D));
    c.post_pre.alpha = c.pre.alpha = input(COT_F32, RANK_AND_SHAPE(3));
    c.post_pre.bias = c.pre.bias = input(COT_F32, RANK_AND_SHAPE(M));
    c.post_pre.gamma = c.pre.gamma = input(COT_F32, RANK_AND_SHAPE(n, D));
    c.post_pre.y = output(dtype, RANK_AND_SHAPE(B, T, n, D));
    c.post.y = c.pre.x = output(dtype, RANK_AND_SHAPE(B, T, n, D));
    c.post_pre.h_in = output(dtype, RANK_AND_SHAPE(B, T, D)), c.pre.h_in = output(dtype, RANK_AND_SHAPE(B, T, D));
    c.post_pre.h_pre = output(COT_F32, RANK_AND_SHAPE(B, T, n)), c.pre.h_pre = output(COT_F32, RANK_AND_SHAPE(B, T, n));
    c.post_pre.next_h_post = output(COT_F32, RANK_AND_SHAPE(B, T, n)),
    c.pre.h_post = output(COT_F32, RANK_AND_SHAPE(B, T, n));
    c.post_pre.next_h_res = output(COT_F32, RANK_AND_SHAPE(B, T, n, n)),
    c.pre.h_res = output(COT_F32, RANK_AND_SHAPE(B, T, n, n));
    c.post_pre.inv_rms = output(COT_F32, RANK_AND_SHAPE(B, T)), c.pre.inv_rms = output(COT_F32, RANK_AND_SHAPE(B, T));
    c.post_pre.h_mix = output(COT_F32, RANK_AND_SHAPE(B, T, M)), c.pre.h_mix = output(COT_F32, RANK_AND_SHAPE(B, T, M));
    return c;
}

static void check_forward(cot_queue *queue, const calls *c)
{
    assert_int_equal(cot_mhc_post_pre_forward(queue, &c->post_pre), COT_OK);
    assert_int_equal(cot_mhc_post_forward(queue, &c->post), COT_OK);
    assert_int_equal(cot_mhc_pre_forward(queue, &c->pre), COT_OK);
    assert_same(&c->post_pre.y, &c->post.y);
    assert_same(&c->post_pre.h_in, &c->pre.h_in);
    assert_same(&c->post_pre.h_pre, &c->pre.h_pre);
    assert_same(&c->post_pre.next_h_post, &c->pre.h_post);
    assert_same(&c->post_pre.next_h_res, &c->pre.h_res);
    assert_same(&c->post_pre.inv_rms, &c->pre.inv_rms);
    assert_same(&c->post_pre.h_mix, &c->pre.h_mix);
}

/* Sets the outputs of a backward of post_pre. */
static void set_gradients(cot_mhc_post_pre_backward_args *a, int64_t n)
{
    const int64_t M = n * (n + 2);
    a->dx = output(a->x.dtype, RANK_AND_SHAPE(B, T, n, D)), a->df = output(a->x.dtype, RANK_AND_SHAPE(B, T, D));
    a->dh_post = output(COT_F32, RANK_AND_SHAPE(B, T, n)), a->dh_res = output(COT_F32, RANK_AND_SHAPE(B, T, n, n));
    a->dphi = output(COT_F32, RANK_AND_SHAPE(M, n * D)), a->dalpha = output(COT_F32, RANK_AND_SHAPE(3));
    a->dbias = output(COT_F32, RANK_AND_SHAPE(M)), a->dgamma = output(COT_F32, RANK_AND_SHAPE(n, D));
}

static void check_backward(cot_queue *queue, const calls *c, int64_t n)
{
    const cot_dtype dtype = c->post_pre.x.dtype;
    cot_mhc_post_pre_backward_args post_pre, again;
    COT_MHC_POST_PRE_BACKWARD_INIT(&post_pre);
    post_pre.h_res_is_out_in = c->post_pre.h_res_is_out_in;
    post_pre.x = c->post_pre.x, post_pre.f = c->post_pre.f, post_pre.h_post = c->post_pre.h_post,
    post_pre.h_res = c->post_pre.h_res, post_pre.y = c->post_pre.y;
    post_pre.phi = c->post_pre.phi, post_pre.alpha = c->post_pre.alpha, post_pre.bias = c->post_pre.bias,
    post_pre.gamma = c->post_pre.gamma;
    post_pre.inv_rms = c->post_pre.inv_rms, post_pre.h_mix = c->post_pre.h_mix, post_pre.h_pre = c->post_pre.h_pre;
    post_pre.next_h_post = c->post_pre.next_h_post;
    arrays.used = 24; /* the outputs of the forward stay */
    post_pre.dh_in = input(dtype, RANK_AND_SHAPE(B, T, D)), post_pre.dy = input(dtype, RANK_AND_SHAPE(B, T, n, D));
    post_pre.dnext_h_post = input(COT_F32, RANK_AND_SHAPE(B, T, n)),
    post_pre.dnext_h_res = input(COT_F32, RANK_AND_SHAPE(B, T, n, n));
    again = post_pre;
    again.y = (cot_tensor){0};
    set_gradients(&post_pre, n);
    const int mark = arrays.used;
    set_gradients(&again, n);
    assert_int_equal(cot_mhc_post_pre_backward(queue, &post_pre), COT_OK);
    assert_int_equal(cot_mhc_post_pre_backward(queue, &again), COT_OK);
    const cot_tensor *const a[] = {&post_pre.dx,   &post_pre.df,     &post_pre.dh_post, &post_pre.dh_res,
                                   &post_pre.dphi, &post_pre.dalpha, &post_pre.dbias,   &post_pre.dgamma},
                            *const b[] = {&again.dx,   &again.df,     &again.dh_post, &again.dh_res,
                                          &again.dphi, &again.dalpha, &again.dbias,   &again.dgamma};
    for (int i = 0; i < 8; i++)
        assert_same(a[i], b[i]);
    /* The two calls: pre's backward, whose dx is g, then post's. */
    arrays.used = mark;
    set_gradients(&again, n);
    cot_mhc_pre_backward_args pre;
    COT_MHC_PRE_BACKWARD_INIT(&pre);
    pre.x = post_pre.y, pre.phi = post_pre.phi, pre.alpha = post_pre.alpha, pre.bias = post_pre.bias,
    pre.gamma = post_pre.gamma;
    pre.inv_rms = post_pre.inv_rms, pre.h_mix = post_pre.h_mix, pre.h_pre = post_pre.h_pre,
    pre.h_post = post_pre.next_h_post;
    pre.dh_in = post_pre.dh_in, pre.dh_post = post_pre.dnext_h_post, pre.dh_res = post_pre.dnext_h_res,
    pre.dx_post = post_pre.dy;
    pre.dx = output(dtype, RANK_AND_SHAPE(B, T, n, D));
    pre.dphi = again.dphi, pre.dalpha = again.dalpha, pre.dbias = again.dbias, pre.dgamma = again.dgamma;
    cot_mhc_post_backward_args post;
    COT_INIT(&post);
    post.h_res_is_out_in = post_pre.h_res_is_out_in;
    post.x = post_pre.x, post.f = post_pre.f, post.h_post = post_pre.h_post, post.h_res = post_pre.h_res,
    post.dy = pre.dx;
    post.dx = again.dx, post.df = again.df, post.dh_post = again.dh_post, post.dh_res = again.dh_res;
    assert_int_equal(cot_mhc_pre_backward(queue, &pre), COT_OK);
    assert_int_equal(cot_mhc_post_backward(queue, &post), COT_OK);
    for (int i = dtype == COT_F32 ? 0 : 4; i < 8; i++)
        assert_same(a[i], b[i]);
}

/* A queue whose three ops run the kernels of one family in this direction ("fwd" or "bwd"). */
static cot_queue *queue_of(const char *post_pre, const char *post, const char *direction)
{
    char kernels[256];
    const char *const pre = post_pre; /* the families of pre and post_pre have the same names */
    snprintf(kernels, sizeof kernels, "mhc_post_pre=mhc_post_pre_%s_%s,mhc_pre=mhc_pre_%s_%s,mhc_post=mhc_post_%s_%s",
             direction, post_pre, direction, pre, direction, post);
    cot_queue_options options;
    COT_INIT(&options);
    options.kernels = kernels;
    cot_queue *queue = NULL;
    assert_int_equal(cot_queue_create(&options, &queue), COT_OK);
    return queue;
}

static void post_pre_equals_two_calls(void **state)
{
    (void)state;
    static const char *const families[][2] = {
        {"scalar", "scalar"},
#if defined(__x86_64__)
        {"tiles_avx2", "rows_avx2"},
        {"tiles_avx512", "rows_avx512"},
#endif
        {"tiles_portable", "rows_portable"}
    };
    int tested = 0;
    for (size_t k = 0; k < sizeof families / sizeof *families; k++) {
        cot_queue *const forward = queue_of(families[k][0], families[k][1], "fwd");
        cot_queue *const backward = queue_of(families[k][0], families[k][1], "bwd");
        for (int64_t n = 1; n <= MAX_N; n++) {
            for (int dtype = COT_F32; dtype <= COT_BF16; dtype++) {
                const calls c = forward_calls(n, (cot_dtype)dtype, n % 2 == 0);
                if (cot_mhc_post_forward(forward, &c.post) == COT_UNSUPPORTED)
                    continue; /* the processor lacks the instruction set */
                check_forward(forward, &c);
                check_backward(backward, &c, n);
                tested++;
            }
        }
        cot_queue_destroy(forward);
        cot_queue_destroy(backward);
    }
    assert_true(tested >= 2 * MAX_N * 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(post_pre_equals_two_calls)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
