/* SPDX-License-Identifier: Apache-2.0
 * test_causal_conv1d_large.c: more than 2^31 elements on a GPU. All rows of the batch hold the same, so each kernel must
 * write what it writes for one row alone, to the bit, into every row beyond 2^31 elements too; dweight and dbias are those
 * of one row as often as there are rows. Exit status 77, "skipped", without a GPU or where it has too little memory. */
#include "device.h"
#include "support.h"

#include "core/float16.h"
#include "core/op.h"
#include "cuda/device.h"

#include <cotangent/causal_conv1d.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { B = 1040, D = 512, T = 4096, K = 4, ROW = D * T }; /* 2.18e9 elements */

static cot_queue *queue; /* which owns the memory */
static char *x, *dy, *out, *one;
static float *weight, *bias, *dweight, *dbias;
static uint16_t *expected, *got;

static void *device_memory(size_t bytes)
{
    void *memory;
    assert_ok(cot_cuda_alloc(queue, bytes, &memory));
    return memory;
}

/* Every row of the batch a copy of the first. */
static void fill(char *tensor, uint64_t seed)
{
    for (int i = 0; i < ROW; i++)
        expected[i] = cot_f32_to_bf16((float)random_real(&seed));
    assert_ok(cot_cuda_to_device(queue, tensor, expected, 2 * (size_t)ROW));
    for (size_t rows = 1; rows < B; rows *= 2) {
        const size_t more = 2 * rows < B ? rows : B - rows;
        assert_ok(cot_cuda_copy(queue, tensor + 2 * ROW * rows, tensor, 2 * ROW * more));
    }
}

static cot_tensor rows_of(void *data, int64_t rows, bool channel_last)
{
    cot_tensor t = cot_tensor_contiguous(data, COT_BF16, 3, (int64_t[]){rows, D, T});
    if (channel_last) {
        t.stride[1] = 1;
        t.stride[2] = D;
    }
    return t;
}

static cot_status call(cot_queue *on, bool backward, int64_t rows, bool channel_last, void *to)
{
    cot_tensor w = cot_tensor_contiguous(weight, COT_F32, 2, (int64_t[]){D, K}),
               b = cot_tensor_contiguous(bias, COT_F32, 1, (int64_t[]){D});
    if (!backward) {
        cot_causal_conv1d_forward_args args;
        COT_INIT(&args);
        args.activation = COT_ACTIVATION_SILU;
        args.x = rows_of(x, rows, channel_last);
        args.y = rows_of(to, rows, channel_last);
        args.weight = w;
        args.bias = b;
        return cot_causal_conv1d_forward(on, &args);
    }
    cot_causal_conv1d_backward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = rows_of(x, rows, channel_last);
    args.dy = rows_of(dy, rows, channel_last);
    args.dx = rows_of(to, rows, channel_last);
    args.weight = w;
    args.bias = b;
    args.dweight = cot_tensor_contiguous(dweight, COT_F32, 2, (int64_t[]){D, K});
    args.dbias = cot_tensor_contiguous(dbias, COT_F32, 1, (int64_t[]){D});
    return cot_causal_conv1d_backward(on, &args);
}

static void read_sums(float *sums)
{
    assert_ok(cot_cuda_to_host(queue, sums, dweight, sizeof(float) * D * K));
    assert_ok(cot_cuda_to_host(queue, sums + D * K, dbias, sizeof(float) * D));
}

static void check_kernel(const char *name, bool backward, bool channel_last)
{
    static const int64_t rows[] = {0, 1, B / 2, 1023, 1024, 1025, B - 1}; /* element 2^31 begins row 1024 */
    static float sums[2][D * (K + 1)];
    char forced[160];
    cot_queue_options options;
    cot_queue *on = NULL;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    options.kernels = forced;
    snprintf(forced, sizeof forced, "causal_conv1d=%s", name);
    assert_ok(cot_queue_create(&options, &on));
    memset(got, 0xff, 2 * (size_t)ROW);
    for (int i = 0; i < (int)COUNT(rows); i++)
        assert_ok(cot_cuda_to_device(on, out + 2 * ROW * rows[i], got, 2 * (size_t)ROW));
    const cot_status status = call(on, backward, 1, channel_last, one);
    if (status == COT_UNSUPPORTED) { /* of the other layout */
        cot_queue_destroy(on);
        return;
    }
    assert_ok(status);
    assert_ok(cot_cuda_to_host(on, expected, one, 2 * (size_t)ROW));
    if (backward)
        read_sums(sums[0]);
    assert_ok(call(on, backward, B, channel_last, out));
    assert_ok(cot_queue_check(on));
    for (int i = 0; i < (int)COUNT(rows); i++) {
        assert_ok(cot_cuda_to_host(on, got, out + 2 * ROW * rows[i], 2 * (size_t)ROW));
        if (memcmp(got, expected, 2 * (size_t)ROW) != 0)
            fail_msg("%s, %s: row %lld is not as row 0 alone", name, channel_last ? "channel-last" : "channel-first",
                     (long long)rows[i]);
    }
    if (backward) {
        double most = 0;
        read_sums(sums[1]);
        for (int i = 0; i < D * (K + 1); i++)
            most = fmax(most, fabs(sums[0][i]));
        for (int i = 0; i < D * (K + 1); i++)
            assert_true(fabs(sums[1][i] - B * (double)sums[0][i]) <= 1e-4 * B * most);
    }
    printf("%s, %s\n", name, channel_last ? "channel-last" : "channel-first");
    cot_queue_destroy(on);
}

static void rows_beyond_2_31_elements(void **state)
{
    (void)state;
    for (int o = 0; o < cot_op_count; o++)
        for (int k = 0; strcmp(cot_ops[o]->name, "causal_conv1d") == 0 && k < cot_ops[o]->kernel_count; k++) {
            const cot_kernel *kernel = &cot_ops[o]->kernels[k];
            for (int last = 0; kernel->backend == COT_BACKEND_CUDA && last < 2; last++)
                if (strstr(kernel->name, "_update_") == NULL)
                    check_kernel(kernel->name, strstr(kernel->name, "_bwd_") != NULL, last);
        }
}

int main(void)
{
    const int none = open_device_queue(&queue);
    if (none != 0)
        return none;
    const size_t bytes = 2 * (size_t)B * ROW,
                 needed = 3 * bytes + 2 * bytes + ((size_t)1 << 30); /* the generic's g too */
    size_t available = 0, all = 0;
    assert_ok(cot_device_enter(queue->device));
    queue->device->driver.cuMemGetInfo(&available, &all);
    cot_device_leave(queue->device);
    if (available < needed) {
        printf("skipped: %zu MB are needed, the GPU has %zu\n", needed >> 20, available >> 20);
        cot_queue_destroy(queue);
        return SKIPPED;
    }
    expected = malloc(2 * (size_t)ROW);
    got = malloc(2 * (size_t)ROW);
    x = device_memory(bytes), dy = device_memory(bytes), out = device_memory(bytes), one = device_memory(2 * ROW);
    weight = device_memory(sizeof(float) * D * K), bias = device_memory(sizeof(float) * D);
    dweight = device_memory(sizeof(float) * D * K), dbias = device_memory(sizeof(float) * D);
    fill(x, 1);
    fill(dy, 2);
    static float values[D * K];
    uint64_t seed = 3;
    for (int i = 0; i < D * K; i++)
        values[i] = (float)random_real(&seed);
    assert_ok(cot_cuda_to_device(queue, weight, values, sizeof values));
    assert_ok(cot_cuda_to_device(queue, bias, values, sizeof(float) * D));
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_beyond_2_31_elements)};
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    void *const memory[] = {x, dy, out, one, weight, bias, dweight, dbias};
    for (int i = 0; i < (int)COUNT(memory); i++)
        cot_cuda_free(queue, memory[i]);
    free(expected), free(got);
    cot_queue_destroy(queue);
    return failed;
}
