/* SPDX-License-Identifier: Apache-2.0
 *
 * test_attention_foreign.c: on a GPU, rows that do not belong to a sequence have no effect on its results, forward and
 * backward, not even as NaN: rows beyond seqused, and rows of other sequences of a packed call in the same tiles. Exit
 * status 77, "skipped", without a GPU. */
#include "device_queue.h"
#include "support.h"

#include "core/float16.h"
#include "cuda/memory.h"

#include <cotangent/attention.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { T = 300, H = 2, LONGEST = 256, VALID_ROWS = 173 /* rows of the first sequence */ };

static cot_queue *gpu;

/* A tensor [1,T,H,columns], or packed. It is random up to row VALID_ROWS and `fill_value` from there on. */
static cot_tensor random_rows(bool packed, int64_t columns, double fill_value, uint64_t seed)
{
    const int64_t shape[4] = {1, T, H, columns};
    cot_tensor t = cot_tensor_contiguous(NULL, COT_BF16, 4 - packed, shape + packed);
    uint16_t *host = malloc((size_t)(T * H * columns) * sizeof *host);
    assert_non_null(host);
    for (int64_t i = 0; i < T * H * columns; i++)
        cot_store_f64(host, COT_BF16, i, i / (H * columns) < VALID_ROWS ? 2 * random_real(&seed) : fill_value);
    assert_ok(cot_cuda_alloc(gpu, (size_t)(T * H * columns) * sizeof *host, &t.data));
    assert_ok(cot_cuda_copy_to_device(gpu, t.data, host, (size_t)(T * H * columns) * sizeof *host));
    free(host);
    return t;
}

static cot_tensor index_tensor(int64_t count, const int32_t *values)
{
    cot_tensor t = cot_tensor_contiguous(NULL, COT_I32, 1, &count);
    assert_ok(cot_cuda_alloc(gpu, (size_t)count * sizeof *values, &t.data));
    assert_ok(cot_cuda_copy_to_device(gpu, t.data, values, (size_t)count * sizeof *values));
    return t;
}

/* Copies the first VALID_ROWS rows of a tensor to the host. Returns the position after them. */
static uint16_t *copy_valid_rows(uint16_t *to, const cot_tensor *t)
{
    const int64_t count = VALID_ROWS * H * t->shape[t->rank - 1];
    assert_ok(cot_cuda_copy_to_host(gpu, to, t->data, (size_t)count * sizeof *to));
    return to + count;
}

/* Runs the forward and the backward. Returns the first VALID_ROWS rows of out, dq, dk and dv. */
static uint16_t *run_valid_rows(bool packed, bool causal, int64_t d, int64_t d_v, double fill_value)
{
    const int64_t statistics[3] = {1, H, T};
    cot_attention_forward_args a;
    COT_INIT(&a);
    a.causal = causal;
    a.q = random_rows(packed, d, fill_value, 1), a.k = random_rows(packed, d, fill_value, 2),
    a.v = random_rows(packed, d_v, fill_value, 3);
    a.out = random_rows(packed, d_v, 0, 4);
    a.lse = cot_tensor_contiguous(NULL, COT_F32, 3 - packed, statistics + packed);
    assert_ok(cot_cuda_alloc(gpu, H * T * sizeof(float), &a.lse.data));
    if (packed) {
        a.cu_seqlens_q = a.cu_seqlens_k = index_tensor(3, (const int32_t[]){0, VALID_ROWS, T});
        a.max_seqlen_q = a.max_seqlen_k = LONGEST;
    } else {
        a.seqused_q = a.seqused_k = index_tensor(1, (const int32_t[]){VALID_ROWS});
    }
    assert_ok(cot_attention_forward(gpu, &a));
    cot_attention_backward_args g;
    COT_INIT(&g);
    g.causal = causal;
    g.q = a.q, g.k = a.k, g.v = a.v, g.out = a.out, g.lse = a.lse;
    g.dout = random_rows(packed, d_v, fill_value, 5);
    g.dq = random_rows(packed, d, 0, 6), g.dk = random_rows(packed, d, 0, 7), g.dv = random_rows(packed, d_v, 0, 8);
    g.cu_seqlens_q = a.cu_seqlens_q, g.cu_seqlens_k = a.cu_seqlens_k;
    g.max_seqlen_q = a.max_seqlen_q, g.max_seqlen_k = a.max_seqlen_k;
    g.seqused_q = a.seqused_q, g.seqused_k = a.seqused_k;
    assert_ok(cot_attention_backward(gpu, &g));
    uint16_t *valid = malloc((size_t)(VALID_ROWS * H * 2 * (d + d_v)) * sizeof *valid);
    assert_non_null(valid);
    copy_valid_rows(copy_valid_rows(copy_valid_rows(copy_valid_rows(valid, &a.out), &g.dq), &g.dk), &g.dv);
    assert_ok(cot_queue_check(gpu));
    const cot_tensor *const all[] = {&a.q,    &a.k,  &a.v,  &a.out, &a.lse,
                                     &g.dout, &g.dq, &g.dk, &g.dv,  packed ? &a.cu_seqlens_q : &a.seqused_q};
    for (size_t i = 0; i < COUNT(all); i++)
        cot_cuda_free(gpu, all[i]->data);
    return valid;
}

static void other_rows_have_no_effect(void **state)
{
    static const int64_t columns[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}, {40, 200}};
    (void)state;
    for (size_t i = 0; i < COUNT(columns); i++)
        for (int kind = 0; kind < 4; kind++) {
            const int64_t d = columns[i][0], d_v = columns[i][1];
            uint16_t *zeros = run_valid_rows(kind & 1, kind & 2, d, d_v, 0);
            uint16_t *others = run_valid_rows(kind & 1, kind & 2, d, d_v, NAN);
            for (int64_t n = 0; n < VALID_ROWS * H * 2 * (d + d_v); n++)
                if (zeros[n] != others[n] || isnan(cot_load_f64(zeros, COT_BF16, n)))
                    fail_msg("%s%s d%d/%d: element %d is %04x beside zeros, %04x beside NaN",
                             kind & 1 ? "packed" : "seqused", kind & 2 ? "+causal" : "", (int)d, (int)d_v, (int)n,
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(other_rows_have_no_effect)};
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cot_queue_destroy(gpu);
    return failed;
}
