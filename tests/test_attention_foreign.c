/* SPDX-License-Identifier: Apache-2.0
 *
 * test_attention_foreign.c: on a GPU, what is not a sequence's own cannot show in its results, in either direction, not
 * even numbers that are none: rows beyond seqused, and other sequences of a packed call, which share tiles with its
 * own. Without a GPU it is skipped (status 77), which ctest counts as such. */
#include "device.h"
#include "support.h"

#include "core/float16.h"
#include "cuda/memory.h"

#include <cotangent/attention.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { T = 300, H = 2, LONGEST = 256, OWN = 173 /* rows of the first sequence, those that count */ };

static cot_queue *gpu;

/* [1,T,H,columns] or packed, random, but `foreign` from row OWN on. */
static cot_tensor rows_of(bool packed, int64_t columns, double foreign, uint64_t seed)
{
    const int64_t shape[4] = {1, T, H, columns};
    cot_tensor t = cot_tensor_contiguous(NULL, COT_BF16, 4 - packed, shape + packed);
    uint16_t *host = malloc((size_t)(T * H * columns) * sizeof *host);
    assert_non_null(host);
    for (int64_t i = 0; i < T * H * columns; i++)
        cot_store_f64(host, COT_BF16, i, i / (H * columns) < OWN ? 2 * random_real(&seed) : foreign);
    assert_ok(cot_cuda_alloc(gpu, (size_t)(T * H * columns) * sizeof *host, &t.data));
    assert_ok(cot_cuda_copy_to_device(gpu, t.data, host, (size_t)(T * H * columns) * sizeof *host));
    free(host);
    return t;
}

static cot_tensor numbers(int64_t count, const int32_t *values)
{
    cot_tensor t = cot_tensor_contiguous(NULL, COT_I32, 1, &count);
    assert_ok(cot_cuda_alloc(gpu, (size_t)count * sizeof *values, &t.data));
    assert_ok(cot_cuda_copy_to_device(gpu, t.data, values, (size_t)count * sizeof *values));
    return t;
}

/* Copies the first OWN rows of a tensor to the host; returns where the next one's go. */
static uint16_t *keep_rows(uint16_t *to, const cot_tensor *t)
{
    const int64_t count = OWN * H * t->shape[t->rank - 1];
    assert_ok(cot_cuda_copy_to_host(gpu, to, t->data, (size_t)count * sizeof *to));
    return to + count;
}

/* The bytes of the first OWN rows of out, dq, dk and dv. */
static uint16_t *first_rows(bool packed, bool causal, int64_t d, int64_t dv, double foreign)
{
    const int64_t statistics[3] = {1, H, T};
    cot_attention_forward_args a;
    COT_INIT(&a);
    a.causal = causal;
    a.q = rows_of(packed, d, foreign, 1), a.k = rows_of(packed, d, foreign, 2), a.v = rows_of(packed, dv, foreign, 3);
    a.out = rows_of(packed, dv, 0, 4);
    a.lse = cot_tensor_contiguous(NULL, COT_F32, 3 - packed, statistics + packed);
    assert_ok(cot_cuda_alloc(gpu, H * T * sizeof(float), &a.lse.data));
    if (packed) {
        a.cu_seqlens_q = a.cu_seqlens_k = numbers(3, (const int32_t[]){0, OWN, T});
        a.max_seqlen_q = a.max_seqlen_k = LONGEST;
    } else {
        a.seqused_q = a.seqused_k = numbers(1, (const int32_t[]){OWN});
    }
    assert_ok(cot_attention_forward(gpu, &a));
    cot_attention_backward_args g;
    COT_INIT(&g);
    g.causal = causal;
    g.q = a.q, g.k = a.k, g.v = a.v, g.out = a.out, g.lse = a.lse;
    g.dout = rows_of(packed, dv, foreign, 5);
    g.dq = rows_of(packed, d, 0, 6), g.dk = rows_of(packed, d, 0, 7), g.dv = rows_of(packed, dv, 0, 8);
    g.cu_seqlens_q = a.cu_seqlens_q, g.cu_seqlens_k = a.cu_seqlens_k;
    g.max_seqlen_q = a.max_seqlen_q, g.max_seqlen_k = a.max_seqlen_k;
    g.seqused_q = a.seqused_q, g.seqused_k = a.seqused_k;
    assert_ok(cot_attention_backward(gpu, &g));
    uint16_t *own = malloc((size_t)(OWN * H * 2 * (d + dv)) * sizeof *own);
    assert_non_null(own);
    keep_rows(keep_rows(keep_rows(keep_rows(own, &a.out), &g.dq), &g.dk), &g.dv);
    assert_ok(cot_queue_check(gpu));
    const cot_tensor *const all[] = {&a.q,    &a.k,  &a.v,  &a.out, &a.lse,
                                     &g.dout, &g.dq, &g.dk, &g.dv,  packed ? &a.cu_seqlens_q : &a.seqused_q};
    for (size_t i = 0; i < COUNT(all); i++)
        cot_cuda_free(gpu, all[i]->data);
    return own;
}

static void foreign_rows_do_not_show(void **state)
{
    static const int64_t columns[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}, {40, 200}};
    (void)state;
    for (size_t i = 0; i < COUNT(columns); i++)
        for (int kind = 0; kind < 4; kind++) {
            const int64_t d = columns[i][0], dv = columns[i][1];
            uint16_t *zeros = first_rows(kind & 1, kind & 2, d, dv, 0);
            uint16_t *others = first_rows(kind & 1, kind & 2, d, dv, NAN);
            for (int64_t n = 0; n < OWN * H * 2 * (d + dv); n++)
                if (zeros[n] != others[n] || isnan(cot_load_f64(zeros, COT_BF16, n)))
                    fail_msg("%s%s d%d/%d: element %d is %04x beside zeros, %04x beside NaN",
                             kind & 1 ? "packed" : "seqused", kind & 2 ? "+causal" : "", (int)d, (int)dv, (int)n,
                             zeros[n], others[n]);
            free(zeros);
            free(others);
        }
}

int main(void)
{
    const int skipped = open_device_queue(&gpu);
    if (skipped)
        return skipped;
    const struct CMUnitTest tests[] = {cmocka_unit_test(foreign_rows_do_not_show)};
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cot_queue_destroy(gpu);
    return failed;
}
