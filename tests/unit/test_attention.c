/* SPDX-License-Identifier: Apache-2.0
 * test_attention.c: properties of attention that `cotangent check` does not test.
 *
 * - Attention computed by key blocks and merged equals one call.
 * - Every kernel meets the error rule of FlashAttention's tests: the maximum error of an output, compared with float64,
 *   is at most twice that of an unfused computation in the tested dtype, with every step rounded.
 * - The workspace grows linearly. The AMX tiles of the caller are restored. */
#include "support.h"

#include "core/cpu_features.h"
#include "core/float16.h"
#include "core/op.h"
#include "ops/attention/attention_problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* One problem with sequences of equal length. The inputs are f64 values, rounded to the tested dtype. */
typedef struct fixture {
    int64_t B, H, Hkv, Tq, Tk, d, d_v;
    bool causal;
    int64_t left; /* window to the left, -1 = none */
    double softcap;
    double *q, *k, *v, *dout;
} fixture;

/* Outputs converted to f64. */
typedef struct results {
    double *out, *lse, *dq, *dk, *dv;
} results;

static double *allocate_zeros(int64_t count)
{
    double *memory = calloc((size_t)count + 1, sizeof *memory);
    assert_non_null(memory);
    return memory;
}

static double *random_normals(uint64_t *seed, int64_t count, cot_dtype dtype)
{
    double *x = allocate_zeros(count);
    for (int64_t i = 0; i < count; i++) {
        double cell;
        for (int n = 0; n < 6; n++)
            x[i] += random_real(seed) / sqrt(2);
        cot_store_f64(&cell, dtype, 0, x[i]);
        x[i] = cot_load_f64(&cell, dtype, 0);
    }
    return x;
}

static int64_t q_count(const fixture *f)
{
    return f->B * f->Tq * f->H * f->d;
}

static int64_t out_count(const fixture *f)
{
    return f->B * f->Tq * f->H * f->d_v;
}

static int64_t k_count(const fixture *f)
{
    return f->B * f->Tk * f->Hkv * f->d;
}

static int64_t v_count(const fixture *f)
{
    return f->B * f->Tk * f->Hkv * f->d_v;
}

static void fill_random(fixture *f, cot_dtype dtype)
{
    uint64_t seed = (uint64_t)(f->Tq * 1000 + f->Tk);
    f->q = random_normals(&seed, q_count(f), dtype);
    f->k = random_normals(&seed, k_count(f), dtype);
    f->v = random_normals(&seed, v_count(f), dtype);
    f->dout = random_normals(&seed, out_count(f), dtype);
}

static results make_results(const fixture *f)
{
    return (results){allocate_zeros(out_count(f)), allocate_zeros(f->B * f->H * f->Tq), allocate_zeros(q_count(f)),
                     allocate_zeros(k_count(f)), allocate_zeros(v_count(f))};
}

static void free_results(results *r)
{
    free(r->out), free(r->lse), free(r->dq), free(r->dk), free(r->dv);
}

static void free_fixture(fixture *f)
{
    free(f->q), free(f->k), free(f->v), free(f->dout);
}

/* Allocates a tensor with these values (NULL = zeros). */
static cot_tensor tensor_from_values(cot_dtype dtype, const double *values, int rank, const int64_t *shape)
{
    int64_t count = 1;
    for (int i = 0; i < rank; i++)
        count *= shape[i];
    void *data = calloc((size_t)count + 1, cot_dtype_size(dtype));
    assert_non_null(data);
    for (int64_t i = 0; values != NULL && i < count; i++)
        cot_store_f64(data, dtype, i, values[i]);
    return cot_tensor_contiguous(data, dtype, rank, shape);
}

static void tensor_to_values(const cot_tensor *t, double *values)
{
    int64_t count = 1;
    for (int i = 0; i < t->rank; i++)
        count *= t->shape[i];
    for (int64_t i = 0; i < count; i++)
        values[i] = cot_load_f64(t->data, t->dtype, i);
}

static void free_tensors(cot_tensor *const tensors[], int count)
{
    for (int i = 0; i < count; i++)
        free(tensors[i]->data);
}

#define SET_OPTIONS(args, f)                                  \
    do {                                                      \
        COT_INIT(args);                                       \
        (args)->causal = (f)->causal;                         \
        (args)->window = (f)->left >= 0;                      \
        (args)->window_left = (f)->left >= 0 ? (f)->left : 0; \
        (args)->window_right = (f)->left >= 0 ? -1 : 0;       \
        (args)->softcap = (f)->softcap;                       \
    } while (0)

/* Runs the forward and then the backward, each with its own queue. The backward uses the outputs of the forward.
 * Returns false if a queue does not support the problem. */
static bool run(const fixture *f, cot_dtype dtype, cot_queue *forward_queue, cot_queue *backward_queue, results *r)
{
    const cot_dtype statistic = dtype == COT_F64 ? COT_F64 : COT_F32;
    const int64_t *q = SHAPE(f->B, f->Tq, f->H, f->d), *k = SHAPE(f->B, f->Tk, f->Hkv, f->d);
    const int64_t *v = SHAPE(f->B, f->Tk, f->Hkv, f->d_v), *o = SHAPE(f->B, f->Tq, f->H, f->d_v);
    cot_attention_forward_args a;
    cot_attention_backward_args b;
    SET_OPTIONS(&a, f);
    SET_OPTIONS(&b, f);
    a.q = b.q = tensor_from_values(dtype, f->q, 4, q);
    a.k = b.k = tensor_from_values(dtype, f->k, 4, k);
    a.v = b.v = tensor_from_values(dtype, f->v, 4, v);
    a.out = b.out = tensor_from_values(dtype, NULL, 4, o);
    a.lse = b.lse = tensor_from_values(statistic, NULL, 3, SHAPE(f->B, f->H, f->Tq));
    b.dout = tensor_from_values(dtype, f->dout, 4, o);
    b.dq = tensor_from_values(dtype, NULL, 4, q);
    b.dk = tensor_from_values(dtype, NULL, 4, k);
    b.dv = tensor_from_values(dtype, NULL, 4, v);
    const cot_status forward = cot_attention_forward(forward_queue, &a);
    const cot_status backward = forward == COT_OK ? cot_attention_backward(backward_queue, &b) : forward;
    assert_true(backward == COT_OK || backward == COT_UNSUPPORTED);
    tensor_to_values(&a.out, r->out), tensor_to_values(&a.lse, r->lse);
    tensor_to_values(&b.dq, r->dq), tensor_to_values(&b.dk, r->dk), tensor_to_values(&b.dv, r->dv);
    free_tensors((cot_tensor *[]){&a.q, &a.k, &a.v, &a.out, &a.lse, &b.dout, &b.dq, &b.dk, &b.dv}, 9);
    return backward == COT_OK;
}

/* ---- error rule ----------------------------------------------------------------------------------- */

static double round_to(double x, cot_dtype dtype)
{
    double cell;
    cot_store_f64(&cell, dtype, 0, x);
    return cot_load_f64(&cell, dtype, 0);
}

static bool is_visible(const fixture *f, int64_t i, int64_t j)
{
    const int64_t at = i + f->Tk - f->Tq;
    return !(f->causal && j > at) && !(f->left >= 0 && j < at - f->left);
}

/* Computes the formulas as a framework without a fused kernel does: S, P, dP and dS are rounded to the dtype. */
static void run_unfused(const fixture *f, cot_dtype dtype, results *r)
{
    const int64_t group = f->H / f->Hkv;
    const double scale = 1 / sqrt((double)f->d);
    double *S = allocate_zeros(f->Tk), *P = allocate_zeros(f->Tk);
    for (int64_t n = 0; n < f->B * f->Tq * f->H; n++) {
        const int64_t h = n % f->H, i = n / f->H % f->Tq, b = n / f->H / f->Tq;
        const double *q = f->q + n * f->d, *dout = f->dout + n * f->d_v;
        double max = -INFINITY, sum = 0, D = 0;
        for (int64_t j = 0; j < f->Tk; j++) {
            const double *k = f->k + ((b * f->Tk + j) * f->Hkv + h / group) * f->d;
            double dot = 0;
            for (int64_t c = 0; c < f->d; c++)
                dot += q[c] * k[c];
            S[j] = round_to(scale * round_to(dot, dtype), dtype);
            if (f->softcap > 0)
                S[j] = round_to(f->softcap * tanh(S[j] / f->softcap), dtype);
            S[j] = is_visible(f, i, j) ? S[j] : -INFINITY;
            max = fmax(max, S[j]);
        }
        for (int64_t j = 0; max > -INFINITY && j < f->Tk; j++)
            sum += exp(S[j] - max);
        for (int64_t j = 0; j < f->Tk; j++)
            P[j] = sum > 0 ? round_to(exp(S[j] - max) / sum, dtype) : 0;
        for (int64_t c = 0; c < f->d_v; c++) {
            double out = 0;
            for (int64_t j = 0; j < f->Tk; j++)
                out += P[j] * f->v[((b * f->Tk + j) * f->Hkv + h / group) * f->d_v + c];
            r->out[n * f->d_v + c] = round_to(out, dtype);
        }
        for (int64_t j = 0; j < f->Tk; j++) { /* dP, then the backward of the softmax */
            const double *v = f->v + ((b * f->Tk + j) * f->Hkv + h / group) * f->d_v;
            double dP = 0;
            for (int64_t c = 0; c < f->d_v; c++) {
                dP += dout[c] * v[c];
                r->dv[((b * f->Tk + j) * f->Hkv + h / group) * f->d_v + c] += P[j] * dout[c];
            }
            const double t = f->softcap > 0 && S[j] > -INFINITY ? S[j] / f->softcap : 0;
            S[j] = round_to(dP, dtype);
            D += P[j] * S[j];
            P[j] = P[j] * (1 - t * t); /* factor of (dP - D): P times the softcap derivative */
        }
        for (int64_t j = 0; j < f->Tk; j++) {
            const int64_t at = ((b * f->Tk + j) * f->Hkv + h / group) * f->d;
            const double dS = round_to(P[j] * (S[j] - D), dtype);
            for (int64_t c = 0; c < f->d; c++) {
                r->dq[n * f->d + c] += scale * dS * f->k[at + c];
                r->dk[at + c] += scale * dS * q[c];
            }
        }
    }
    for (int64_t i = 0; i < q_count(f); i++)
        r->dq[i] = round_to(r->dq[i], dtype);
    for (int64_t i = 0; i < k_count(f); i++)
        r->dk[i] = round_to(r->dk[i], dtype);
    for (int64_t i = 0; i < v_count(f); i++)
        r->dv[i] = round_to(r->dv[i], dtype);
    free(S);
    free(P);
}

static double max_error(const double *x, const double *reference, int64_t count)
{
    double largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const double error = fabs(x[i] - reference[i]);
        largest = !(error <= largest) ? error : largest; /* NaN counts as the largest error */
    }
    return largest;
}

static void check_output(const char *kernel, const char *name, const fixture *f, cot_dtype dtype, const double *x,
                         const double *reference, const double *peer, int64_t count)
{
    const double tiny = 1e-5, factor = f->softcap > 0 ? 3 : 2;
    const double error = max_error(x, reference, count), allowed = factor * max_error(peer, reference, count) + tiny;
    if (error <= allowed)
        return;
    print_error("%s: %s off by %g, allowed %g (%s, B%d H%d/%d T%d/%d d%d)\n", kernel, name, error, allowed,
                cot_dtype_name(dtype), (int)f->B, (int)f->H, (int)f->Hkv, (int)f->Tq, (int)f->Tk, (int)f->d);
    fail();
}

/* Checks every forward kernel with the scalar backward and every backward kernel with the scalar forward. */
static int check_kernels(const fixture *f, cot_dtype dtype, const results *reference, const results *peer)
{
    int checked = 0;
    cot_queue *scalar_forward = make_queue("attention=attention_fwd_scalar", 0),
              *scalar_backward = make_queue("attention=attention_bwd_scalar", 0);
    for (int n = 0; n < cot_attention_op.kernel_count; n++) {
        const cot_kernel *kernel = &cot_attention_op.kernels[n];
        const bool forward = kernel->direction == COT_ATTENTION_FORWARD;
        if ((!forward && kernel->direction != COT_ATTENTION_BACKWARD) || kernel->backend != COT_BACKEND_CPU)
            continue;
        char forced[128];
        snprintf(forced, sizeof forced, "attention=%s", kernel->name);
        cot_queue *queue = make_queue(forced, 0);
        results r = make_results(f);
        if (run(f, dtype, forward ? queue : scalar_forward, forward ? scalar_backward : queue, &r)) {
            checked++;
            check_output(kernel->name, "out", f, dtype, r.out, reference->out, peer->out, out_count(f));
            check_output(kernel->name, "dq", f, dtype, r.dq, reference->dq, peer->dq, q_count(f));
            check_output(kernel->name, "dk", f, dtype, r.dk, reference->dk, peer->dk, k_count(f));
            check_output(kernel->name, "dv", f, dtype, r.dv, reference->dv, peer->dv, v_count(f));
        }
        free_results(&r);
        cot_queue_destroy(queue);
    }
    cot_queue_destroy(scalar_forward);
    cot_queue_destroy(scalar_backward);
    return checked;
}

static void errors_are_within_twice_the_unfused_ones(void **state)
{
    (void)state;
    static const int64_t lengths[][2] = {{1, 1}, {64, 128}, {239, 1}, {799, 3}, {113, 128}, {128, 217}};
    static const int64_t sizes[] = {64, 96, 128, 192, 256};
    for (size_t n = 0; n < COUNT(lengths); n++) {
        for (int dtype_index = 0; dtype_index < 2; dtype_index++) {
            const cot_dtype dtype = dtype_index ? COT_BF16 : COT_F16;
            fixture f = {.B = 1, .H = 6, .Hkv = n % 3 == 0 ? 6 : n % 3 == 1 ? 2 : 1, .left = -1};
            f.Tq = lengths[n][0], f.Tk = lengths[n][1];
            f.d = f.d_v = sizes[(n + (size_t)dtype_index) % COUNT(sizes)];
            f.H = f.Tq * f.Tk > 20000 ? 2 : 6, f.Hkv = f.H < f.Hkv ? 1 : f.Hkv;
            f.causal = n % 2, f.left = n % 4 == 2 ? 30 : -1, f.softcap = n % 5 == 4 ? 15 : 0;
            fill_random(&f, dtype);
            results reference = make_results(&f), peer = make_results(&f);
            cot_queue *exact = make_queue("", 0);
            assert_true(run(&f, COT_F64, exact, exact, &reference));
            cot_queue_destroy(exact);
            run_unfused(&f, dtype, &peer);
            assert_true(check_kernels(&f, dtype, &reference, &peer) >= 2);
            free_results(&reference);
            free_results(&peer);
            free_fixture(&f);
        }
    }
}

/* ---- blocks ------------------------------------------------------------------------------------------------ */

/* ||x - r|| */
static double distance(const double *x, const double *r, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += x[i] == r[i] ? 0 : (x[i] - r[i]) * (x[i] - r[i]);
    return sqrt(sum);
}

/* Checks the norm of the error. The bound is 1.5 times the error norm of a single call, plus a quarter of 2^-24
 * times the norm of the reference. */
static void check_norm(const char *name, int block_count, const double *x, const double *single_call,
                       const double *reference, int64_t count)
{
    const double zero = 0, error = distance(x, reference, count);
    double norm = 0;
    for (int64_t i = 0; i < count; i++)
        norm += isinf(reference[i]) ? zero : reference[i] * reference[i];
    const double bound = 1.5 * distance(single_call, reference, count) + 0.25 * 0x1p-24 * sqrt(norm);
    if (!(error <= bound)) {
        print_error("%s of %d blocks: off by %g, allowed %g\n", name, block_count, error, bound);
        fail();
    }
}

/* A view of keys [first, first + rows) of a [1,Tk,Hkv,d] tensor. */
static cot_tensor slice_keys(cot_tensor t, int64_t first, int64_t rows)
{
    t.data = (char *)t.data + (size_t)(first * t.stride[1]) * cot_dtype_size(t.dtype);
    t.shape[1] = rows;
    return t;
}

static void run_blocks(const fixture *f, int block_count, cot_dtype dtype, const double *sink, results *r)
{
    const int64_t *q = SHAPE(1, f->Tq, f->H, f->d), *k = SHAPE(1, f->Tk, f->Hkv, f->d);
    const int64_t *v = SHAPE(1, f->Tk, f->Hkv, f->d_v), *o = SHAPE(1, f->Tq, f->H, f->d_v), *s = SHAPE(1, f->H, f->Tq);
    cot_queue *queue = make_queue(NULL, 0);
    cot_attention_forward_args a;
    SET_OPTIONS(&a, f);
    a.k_length = f->Tk;
    a.q = tensor_from_values(dtype, f->q, 4, q);
    cot_tensor all_k = tensor_from_values(dtype, f->k, 4, k), all_v = tensor_from_values(dtype, f->v, 4, v),
               dout = tensor_from_values(dtype, f->dout, 4, o);
    cot_tensor sinks = tensor_from_values(dtype, sink, 1, SHAPE(f->H));
    cot_attention_merge_args m;
    COT_INIT(&m);
    m.out_a = m.out = tensor_from_values(dtype, NULL, 4, o);
    m.lse_a = m.lse = tensor_from_values(dtype, NULL, 3, s);
    m.out_b = tensor_from_values(dtype, NULL, 4, o);
    m.lse_b = tensor_from_values(dtype, NULL, 3, s);
    for (int block = 0; block < block_count; block++) {
        a.k_begin = block * f->Tk / block_count;
        const int64_t rows = (block + 1) * f->Tk / block_count - a.k_begin;
        a.k = slice_keys(all_k, a.k_begin, rows);
        a.v = slice_keys(all_v, a.k_begin, rows);
        a.out = block == 0 ? m.out : m.out_b;
        a.lse = block == 0 ? m.lse : m.lse_b;
        assert_ok(cot_attention_forward(queue, &a));
        m.sink = sink != NULL && block == block_count - 1 ? sinks : (cot_tensor){0};
        if (block > 0)
            assert_ok(cot_attention_merge(queue, &m));
    }
    cot_attention_delta_args D;
    COT_INIT(&D);
    D.out = m.out;
    D.dout = dout;
    D.delta = tensor_from_values(dtype, NULL, 3, s);
    assert_ok(cot_attention_delta(queue, &D));
    cot_attention_backward_args b;
    SET_OPTIONS(&b, f);
    b.k_length = f->Tk;
    b.accumulate = 1;
    b.q = a.q, b.dout = dout, b.lse = m.lse, b.delta = D.delta;
    b.dq = tensor_from_values(dtype, NULL, 4, q);
    cot_tensor dk = tensor_from_values(dtype, NULL, 4, k), dv = tensor_from_values(dtype, NULL, 4, v);
    for (int block = 0; block < block_count; block++) {
        b.k_begin = block * f->Tk / block_count;
        const int64_t rows = (block + 1) * f->Tk / block_count - b.k_begin;
        b.k = slice_keys(all_k, b.k_begin, rows), b.v = slice_keys(all_v, b.k_begin, rows);
        b.dk = slice_keys(dk, b.k_begin, rows), b.dv = slice_keys(dv, b.k_begin, rows);
        assert_ok(cot_attention_backward(queue, &b));
    }
    tensor_to_values(&m.out, r->out), tensor_to_values(&m.lse, r->lse);
    tensor_to_values(&b.dq, r->dq), tensor_to_values(&dk, r->dk), tensor_to_values(&dv, r->dv);
    free_tensors((cot_tensor *[]){&a.q, &all_k, &all_v, &dout, &sinks, &m.out, &m.lse, &m.out_b, &m.lse_b, &D.delta,
                                  &b.dq, &dk, &dv},
                 13);
    cot_queue_destroy(queue);
}

static void blocks_equal_one_call(void **state)
{
    (void)state;
    static const int counts[] = {2, 3, 7};
    for (int causal = 0; causal < 3; causal++) {
        fixture f = {.B = 1, .H = 4, .Hkv = 2, .Tq = 150, .Tk = 211, .d = 64, .d_v = 40, .left = causal == 2 ? 70 : -1};
        f.causal = causal > 0;
        fill_random(&f, COT_F32);
        results reference = make_results(&f), single_call = make_results(&f);
        cot_queue *queue = make_queue("", 0);
        assert_true(run(&f, COT_F64, queue, queue, &reference));
        assert_true(run(&f, COT_F32, queue, queue, &single_call));
        cot_queue_destroy(queue);
        for (size_t n = 0; n < COUNT(counts); n++) {
            results r = make_results(&f);
            run_blocks(&f, counts[n], COT_F32, NULL, &r);
            check_norm("out", counts[n], r.out, single_call.out, reference.out, out_count(&f));
            check_norm("lse", counts[n], r.lse, single_call.lse, reference.lse, f.H * f.Tq);
            check_norm("dq", counts[n], r.dq, single_call.dq, reference.dq, q_count(&f));
            check_norm("dk", counts[n], r.dk, single_call.dk, reference.dk, k_count(&f));
            check_norm("dv", counts[n], r.dv, single_call.dv, reference.dv, v_count(&f));
            free_results(&r);
        }
        free_results(&reference);
        free_results(&single_call);
        free_fixture(&f);
    }
}

/* Blocks whose last merge gets the sink equal one forward with the sink. In f64, which the scalar kernel computes. */
static void a_sink_is_merged_once(void **state)
{
    (void)state;
    fixture f = {.B = 1, .H = 2, .Hkv = 1, .Tq = 9, .Tk = 14, .d = 5, .d_v = 3, .left = -1, .causal = true};
    fill_random(&f, COT_F64);
    const double sink[2] = {0.5, -1};
    results blocks = make_results(&f), whole = make_results(&f);
    run_blocks(&f, 3, COT_F64, sink, &blocks);
    cot_attention_forward_args a;
    SET_OPTIONS(&a, &f);
    a.q = cot_tensor_contiguous(f.q, COT_F64, 4, SHAPE(1, f.Tq, f.H, f.d));
    a.k = cot_tensor_contiguous(f.k, COT_F64, 4, SHAPE(1, f.Tk, f.Hkv, f.d));
    a.v = cot_tensor_contiguous(f.v, COT_F64, 4, SHAPE(1, f.Tk, f.Hkv, f.d_v));
    a.sink = cot_tensor_contiguous((void *)sink, COT_F64, 1, SHAPE(f.H));
    a.out = cot_tensor_contiguous(whole.out, COT_F64, 4, SHAPE(1, f.Tq, f.H, f.d_v));
    a.lse = cot_tensor_contiguous(whole.lse, COT_F64, 3, SHAPE(1, f.H, f.Tq));
    cot_queue *queue = make_queue("", 0);
    assert_ok(cot_attention_forward(queue, &a));
    cot_queue_destroy(queue);
    assert_true(max_error(blocks.out, whole.out, out_count(&f)) < 1e-14);
    assert_true(max_error(blocks.lse, whole.lse, f.H * f.Tq) < 1e-14);
    free_results(&blocks);
    free_results(&whole);
    free_fixture(&f);
}

/* The workspace grows linearly with the length. */
static void workspace_is_linear(void **state)
{
    (void)state;
    static const cot_dtype dtypes[] = {COT_F32, COT_BF16};
    cot_queue *queue = make_queue("", 0);
    for (size_t n = 0; n < COUNT(dtypes); n++) {
        size_t bytes[2][2];
        for (int size = 0; size < 2; size++) {
            const int64_t T = size == 0 ? 8192 : 65536, *shape = SHAPE(1, T, 8, 128);
            const cot_tensor x = cot_tensor_contiguous(NULL, dtypes[n], 4, shape);
            const cot_tensor lse = cot_tensor_contiguous(NULL, COT_F32, 3, SHAPE(1, 8, T));
            cot_attention_forward_args a;
            COT_INIT(&a);
            a.q = a.k = a.v = a.out = x;
            a.lse = lse;
            cot_attention_backward_args b;
            COT_INIT(&b);
            b.q = b.k = b.v = b.out = b.dout = b.dq = b.dk = b.dv = x;
            b.lse = lse;
            assert_ok(cot_attention_forward_workspace(queue, &a, &bytes[size][0]));
            assert_ok(cot_attention_backward_workspace(queue, &b, &bytes[size][1]));
        }
        for (int direction = 0; direction < 2; direction++)
            assert_true(bytes[1][direction] <= 8 * bytes[0][direction] + 4096);
    }
    cot_queue_destroy(queue);
}

/* ---- AMX tiles: the caller's state is restored, and a forked child may use tiles ------------------------------- */

#if defined(__x86_64__)

#define WITH_TILES __attribute__((target("amx-tile")))

/* A tile state that a caller may have: one tile of 3 rows of 20 bytes. */
typedef struct host_tiles {
    _Alignas(64) uint8_t config[64];
    _Alignas(64) uint8_t rows[16][64];
} host_tiles;

static host_tiles example_tiles(void)
{
    host_tiles host = {.config = {1}};
    host.config[16 + 2 * 5] = 20; /* bytes per row of tile 5 */
    host.config[48 + 5] = 3;      /* rows of tile 5 */
    for (int row = 0; row < 3; row++)
        for (int byte = 0; byte < 20; byte++)
            host.rows[row][byte] = (uint8_t)(7 * row + byte + 1);
    return host;
}

WITH_TILES static void load_tiles(const host_tiles *host)
{
    _tile_loadconfig(host->config);
    _tile_loadd(5, host->rows, 64);
}

WITH_TILES static host_tiles store_tiles(bool with_rows)
{
    host_tiles host = {{0}, {{0}}};
    _tile_storeconfig(host.config);
    if (with_rows)
        _tile_stored(5, host.rows, 64);
    return host;
}

WITH_TILES static void release_tiles(void)
{
    _tile_release();
}

/* Bits of the outputs of one forward and backward in bf16. */
enum { AMX_T = 200, AMX_H = 2, AMX_D = 64, AMX_SIZE = AMX_T * AMX_H * AMX_D };
typedef struct amx_results {
    uint16_t out[AMX_SIZE], dq[AMX_SIZE], dk[AMX_SIZE], dv[AMX_SIZE];
    float lse[AMX_H * AMX_T];
} amx_results;

static void run_amx(amx_results *r, int threads)
{
    static uint16_t q[AMX_SIZE], k[AMX_SIZE], v[AMX_SIZE], dout[AMX_SIZE];
    uint16_t *const inputs[] = {q, k, v, dout};
    uint64_t seed = 5;
    for (size_t n = 0; n < COUNT(inputs); n++)
        for (int i = 0; i < AMX_SIZE; i++)
            inputs[n][i] = cot_f32_to_bf16((float)random_real(&seed));
#define BF16(data) cot_tensor_contiguous(data, COT_BF16, 4, SHAPE(1, AMX_T, AMX_H, AMX_D))
    cot_attention_forward_args f;
    COT_INIT(&f);
    f.causal = 1;
    f.q = BF16(q), f.k = BF16(k), f.v = BF16(v), f.out = BF16(r->out);
    f.lse = cot_tensor_contiguous(r->lse, COT_F32, 3, SHAPE(1, AMX_H, AMX_T));
    cot_attention_backward_args b;
    COT_INIT(&b);
    b.causal = 1;
    b.q = f.q, b.k = f.k, b.v = f.v, b.out = f.out, b.lse = f.lse, b.dout = BF16(dout);
    b.dq = BF16(r->dq), b.dk = BF16(r->dk), b.dv = BF16(r->dv);
#undef BF16
    cot_queue_options options;
    COT_INIT(&options);
    options.threads = threads;
    cot_queue *queue = NULL;
    assert_ok(cot_queue_create(&options, &queue));
    assert_ok(cot_attention_forward(queue, &f));
    assert_ok(cot_attention_backward(queue, &b));
    cot_queue_destroy(queue);
}

static void tiles_are_restored(void **state)
{
    (void)state;
    if (!(cot_cpu_features() & COT_ISA_AMX))
        skip();
    static amx_results one, three;
    const host_tiles before = example_tiles();
    load_tiles(&before);
    run_amx(&one, 1);
    const host_tiles after = store_tiles(true);
    assert_memory_equal(&before, &after, sizeof before);
    release_tiles();
    run_amx(&three, 3);
    const host_tiles none = store_tiles(false), released = {{0}, {{0}}};
    assert_memory_equal(&none, &released, sizeof none);
    assert_memory_equal(&one, &three, sizeof one);
}

static void a_forked_child_has_tiles(void **state)
{
    (void)state;
    if (!(cot_cpu_features() & COT_ISA_AMX))
        skip();
    static amx_results parent, child;
    run_amx(&parent, 2);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        run_amx(&child, 2);
        _exit(memcmp(&parent, &child, sizeof parent) == 0 ? 0 : 1);
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
#if defined(__x86_64__)
        cmocka_unit_test(tiles_are_restored),
        cmocka_unit_test(a_forked_child_has_tiles),
#endif
        cmocka_unit_test(errors_are_within_twice_the_unfused_ones),
        cmocka_unit_test(blocks_equal_one_call),
        cmocka_unit_test(a_sink_is_merged_once),
        cmocka_unit_test(workspace_is_linear),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
