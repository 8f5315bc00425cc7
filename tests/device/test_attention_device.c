/* SPDX-License-Identifier: Apache-2.0
 *
 * test_attention_device.c: properties of attention on a GPU that `cotangent check` does not test. Attention computed by
 * key blocks and merged equals one call. Invalid index data is clamped and reported. Exit status 77, "skipped",
 * without a GPU. */
#include "device_queue.h"
#include "support.h"

#include "core/float16.h"
#include "core/tensor.h"
#include "cuda/memory.h"

#include <cotangent/attention.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TQ = 70, TK = 130, H = 4, HKV = 2, D = 64, DV = 32, PARTS = 3 };

static cot_queue *gpu;

/* ---- tensors on the device ------------------------------------------------------------------------------------- */

static cot_tensor stored(cot_dtype dtype, int rank, const int64_t *shape, uint64_t *seed)
{
    cot_tensor t = cot_tensor_contiguous(NULL, dtype, rank, shape);
    const int64_t count = cot_elements(&t);
    const size_t bytes = (size_t)count * cot_dtype_size(dtype);
    void *host = calloc((size_t)count + 1, cot_dtype_size(dtype));
    assert_non_null(host);
    for (int64_t i = 0; seed != NULL && i < count; i++)
        cot_store_f64(host, dtype, i, 2 * random_real(seed));
    assert_ok(cot_cuda_alloc(gpu, bytes, &t.data));
    assert_ok(cot_cuda_copy_to_device(gpu, t.data, host, bytes));
    free(host);
    return t;
}

static double *fetched(const cot_tensor *t)
{
    const int64_t count = cot_elements(t);
    const size_t bytes = (size_t)count * cot_dtype_size(t->dtype);
    void *host = malloc(bytes);
    double *values = malloc((size_t)count * sizeof *values);
    assert_non_null(host);
    assert_non_null(values);
    assert_ok(cot_cuda_copy_to_host(gpu, host, t->data, bytes));
    for (int64_t i = 0; i < count; i++)
        values[i] = cot_load_f64(host, t->dtype, i);
    free(host);
    return values;
}

/* Asserts that the maximum difference is at most `allowed` times the largest value. */
static void assert_close(const char *name, const cot_tensor *a, const cot_tensor *b, double allowed)
{
    double *x = fetched(a), *y = fetched(b), largest = 0, error = 0;
    for (int64_t i = 0; i < cot_elements(a); i++) {
        largest = fmax(largest, fabs(y[i]));
        error = !(fabs(x[i] - y[i]) <= error) ? fabs(x[i] - y[i]) : error;
    }
    if (!(error <= allowed * largest)) {
        print_error("%s: off by %g of %g, allowed %g of it\n", name, error, largest, allowed);
        fail();
    }
    free(x);
    free(y);
}

static cot_tensor rows_of(cot_tensor t, int64_t first, int64_t rows)
{
    t.data = (char *)t.data + (size_t)(first * t.stride[1]) * cot_dtype_size(t.dtype);
    t.shape[1] = rows;
    return t;
}

/* ---- blocks ---------------------------------------------------------------------------------------------------- */

typedef struct results {
    cot_tensor out, lse, dq, dk, dv, dsink;
} results;

static results make_results(cot_dtype dtype)
{
    return (results){
        stored(dtype, 4, (int64_t[]){1, TQ, H, DV}, NULL),   stored(COT_F32, 3, (int64_t[]){1, H, TQ}, NULL),
        stored(dtype, 4, (int64_t[]){1, TQ, H, D}, NULL),    stored(dtype, 4, (int64_t[]){1, TK, HKV, D}, NULL),
        stored(dtype, 4, (int64_t[]){1, TK, HKV, DV}, NULL), stored(COT_F32, 1, (int64_t[]){H}, NULL)};
}

static void release(cot_tensor *const tensors[], int count)
{
    for (int i = 0; i < count; i++)
        cot_cuda_free(gpu, tensors[i]->data);
}

static void free_results(results *r)
{
    release((cot_tensor *[]){&r->out, &r->lse, &r->dq, &r->dk, &r->dv, &r->dsink}, 6);
}

typedef struct inputs {
    cot_tensor q, k, v, dout, sink;
} inputs;

static void run_whole(const inputs *in, bool causal, results *r)
{
    cot_attention_forward_args f;
    COT_INIT(&f);
    f.causal = causal, f.softcap = 3;
    f.q = in->q, f.k = in->k, f.v = in->v, f.sink = in->sink, f.out = r->out, f.lse = r->lse;
    assert_ok(cot_attention_forward(gpu, &f));
    cot_attention_backward_args b;
    COT_INIT(&b);
    b.causal = causal, b.softcap = 3;
    b.q = in->q, b.k = in->k, b.v = in->v, b.sink = in->sink, b.out = r->out, b.lse = r->lse, b.dout = in->dout;
    b.dq = r->dq, b.dk = r->dk, b.dv = r->dv, b.dsink = r->dsink;
    assert_ok(cot_attention_backward(gpu, &b));
}

static void run_blocks(const inputs *in, bool causal, results *r)
{
    results part = make_results(r->out.dtype);
    cot_attention_forward_args f;
    COT_INIT(&f);
    f.causal = causal, f.softcap = 3, f.k_length = TK, f.q = in->q;
    cot_attention_merge_args m;
    COT_INIT(&m);
    m.out_a = m.out = r->out, m.lse_a = m.lse = r->lse, m.out_b = part.out, m.lse_b = part.lse;
    for (int n = 0; n < PARTS; n++) {
        f.k_begin = n * TK / PARTS;
        const int64_t rows = (n + 1) * TK / PARTS - f.k_begin;
        f.k = rows_of(in->k, f.k_begin, rows), f.v = rows_of(in->v, f.k_begin, rows);
        f.out = n == 0 ? r->out : part.out, f.lse = n == 0 ? r->lse : part.lse;
        assert_ok(cot_attention_forward(gpu, &f));
        m.sink = n == PARTS - 1 ? in->sink : (cot_tensor){0};
        if (n > 0)
            assert_ok(cot_attention_merge(gpu, &m));
    }
    cot_attention_delta_args d;
    COT_INIT(&d);
    d.out = r->out, d.dout = in->dout, d.delta = part.lse;
    assert_ok(cot_attention_delta(gpu, &d));
    cot_attention_backward_args b;
    COT_INIT(&b);
    b.causal = causal, b.softcap = 3, b.k_length = TK, b.accumulate = 1;
    b.q = in->q, b.dout = in->dout, b.lse = r->lse, b.delta = d.delta, b.dq = r->dq;
    for (int n = 0; n < PARTS; n++) {
        b.k_begin = n * TK / PARTS;
        const int64_t rows = (n + 1) * TK / PARTS - b.k_begin;
        b.k = rows_of(in->k, b.k_begin, rows), b.v = rows_of(in->v, b.k_begin, rows);
        b.dk = rows_of(r->dk, b.k_begin, rows), b.dv = rows_of(r->dv, b.k_begin, rows);
        b.sink = n == 0 ? in->sink : (cot_tensor){0}, b.dsink = n == 0 ? r->dsink : (cot_tensor){0};
        assert_ok(cot_attention_backward(gpu, &b));
    }
    free_results(&part);
}

static void blocks_equal_one_call(void **state)
{
    (void)state;
    static const cot_dtype dtypes[] = {COT_F32, COT_BF16, COT_F16};
    static const double allowed[] = {2e-5, 0x1p-5, 0x1p-8};
    for (int n = 0; n < 6; n++) {
        const cot_dtype dtype = dtypes[n % 3];
        uint64_t seed = 17;
        inputs in = {stored(dtype, 4, (int64_t[]){1, TQ, H, D}, &seed),
                     stored(dtype, 4, (int64_t[]){1, TK, HKV, D}, &seed),
                     stored(dtype, 4, (int64_t[]){1, TK, HKV, DV}, &seed),
                     stored(dtype, 4, (int64_t[]){1, TQ, H, DV}, &seed), stored(COT_F32, 1, (int64_t[]){H}, &seed)};
        results whole = make_results(dtype), blocks = make_results(dtype);
        run_whole(&in, n / 3, &whole);
        run_blocks(&in, n / 3, &blocks);
        assert_close("out", &blocks.out, &whole.out, allowed[n % 3]);
        assert_close("lse", &blocks.lse, &whole.lse, 1e-5);
        assert_close("dq", &blocks.dq, &whole.dq, allowed[n % 3]);
        assert_close("dk", &blocks.dk, &whole.dk, allowed[n % 3]);
        assert_close("dv", &blocks.dv, &whole.dv, allowed[n % 3]);
        assert_close("dsink", &blocks.dsink, &whole.dsink, allowed[n % 3]);
        free_results(&whole);
        free_results(&blocks);
        release((cot_tensor *[]){&in.q, &in.k, &in.v, &in.dout, &in.sink}, 5);
    }
}

/* ---- faults in index data --------------------------------------------------------------------------------------- */

static void faults_are_reported(void **state)
{
    (void)state;
    enum { ROWS = 400, LONGEST = 300 };
    static const int32_t packings[][4] = {
        {0, 200, 100, ROWS}, {0, 200, 300, 10000}, {0, -70, 300, ROWS}, {0, 390, ROWS, ROWS}, {0, ROWS, 0, ROWS}};
    uint64_t seed = 3;
    const cot_tensor q = stored(COT_BF16, 3, (int64_t[]){ROWS, 2, D}, &seed);
    const cot_tensor out = stored(COT_BF16, 3, (int64_t[]){ROWS, 2, D}, NULL);
    const cot_tensor cu = stored(COT_F32, 1, (int64_t[]){4}, NULL),
                     lse = stored(COT_F32, 1, (int64_t[]){2 * ROWS}, NULL);
    for (size_t n = 0; n <= COUNT(packings); n++) {
        static const int32_t good[4] = {0, 130, 130, 330};
        const int32_t *packing = n < COUNT(packings) ? packings[n] : good;
        assert_ok(cot_cuda_copy_to_device(gpu, cu.data, packing, sizeof good));
        cot_attention_forward_args f;
        COT_INIT(&f);
        f.q = f.k = f.v = q, f.out = out;
        f.cu_seqlens_q = f.cu_seqlens_k = cot_tensor_contiguous(cu.data, COT_I32, 1, (int64_t[]){4});
        f.max_seqlen_q = f.max_seqlen_k = LONGEST;
        assert_ok(cot_attention_forward(gpu, &f));
        assert_int_equal(cot_queue_check(gpu), n < COUNT(packings) ? COT_INVALID_DATA : COT_OK);
        cot_attention_backward_args b;
        COT_INIT(&b);
        b.q = b.k = b.v = b.out = b.dout = q, b.dq = out;
        b.lse = cot_tensor_contiguous(lse.data, COT_F32, 2, (int64_t[]){2, ROWS});
        b.cu_seqlens_q = b.cu_seqlens_k = f.cu_seqlens_q;
        b.max_seqlen_q = b.max_seqlen_k = LONGEST;
        assert_ok(cot_attention_backward(gpu, &b));
        assert_int_equal(cot_queue_check(gpu), n < COUNT(packings) ? COT_INVALID_DATA : COT_OK);
    }
    release((cot_tensor *[]){(cot_tensor *)&q, (cot_tensor *)&out, (cot_tensor *)&cu, (cot_tensor *)&lse}, 4);
}

int main(void)
{
    const int status = open_device_queue(&gpu);
    if (status != 0)
        return status;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_equal_one_call),
        cmocka_unit_test(faults_are_reported),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cot_queue_destroy(gpu);
    return failed;
}
