/* SPDX-License-Identifier: Apache-2.0
 * test_causal_conv1d_large.c: tensors of more than 2^31 elements on a GPU. All rows of the batch are equal. Each kernel
 * must write the same bits into every row as it writes for a batch of one row. dweight and dbias are those of one row,
 * times the number of rows. Exit status 77, "skipped", without a GPU or with too little GPU memory. */
#include "device_queue.h"
#include "equal_rows.h"

#include "core/float16.h"
#include "core/op.h"
#include "cuda/device.h"

#include <stdio.h>
#include <stdlib.h>

enum { B = 1040, D = 512, T = 4096, K = 4, ROW = D * T }; /* 2.18e9 elements */

static cot_queue *queue; /* owns the memory */
static char *out, *single;
static equal_rows inputs = {.D = D, .T = T, .K = K, .dtype = COT_BF16};
static uint16_t *expected, *got;

static void *device_memory(size_t bytes)
{
    void *memory;
    assert_ok(cot_cuda_alloc(queue, bytes, &memory));
    return memory;
}

/* Fills the first row and copies it to every other row of the batch. */
static void fill(char *tensor, uint64_t seed)
{
    for (int i = 0; i < ROW; i++)
        expected[i] = cot_f32_to_bf16((float)random_real(&seed));
    assert_ok(cot_cuda_copy_to_device(queue, tensor, expected, 2 * (size_t)ROW));
    for (size_t rows = 1; rows < B; rows *= 2) {
        const size_t more = 2 * rows < B ? rows : B - rows;
        assert_ok(cot_cuda_copy_on_device_async(queue, tensor + 2 * ROW * rows, tensor, 2 * ROW * more));
    }
}

static void read_sums(float *sums)
{
    assert_ok(cot_cuda_copy_to_host(queue, sums, inputs.dweight, sizeof(float) * D * K));
    assert_ok(cot_cuda_copy_to_host(queue, sums + D * K, inputs.dbias, sizeof(float) * D));
}

static void check_kernel(const char *name, bool backward, bool channel_last)
{
    static const int64_t rows[] = {0, 1, B / 2, 1023, 1024, 1025, B - 1}; /* row 1024 begins at element 2^31 */
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
        assert_ok(cot_cuda_copy_to_device(on, out + 2 * ROW * rows[i], got, 2 * (size_t)ROW));
    const cot_status status = call_rows(on, &inputs, backward, 1, channel_last, single);
    if (status == COT_UNSUPPORTED) { /* a kernel of the other layout */
        cot_queue_destroy(on);
        return;
    }
    assert_ok(status);
    assert_ok(cot_cuda_copy_to_host(on, expected, single, 2 * (size_t)ROW));
    if (backward)
        read_sums(sums[0]);
    assert_ok(call_rows(on, &inputs, backward, B, channel_last, out));
    assert_ok(cot_queue_check(on));
    for (int i = 0; i < (int)COUNT(rows); i++) {
        assert_ok(cot_cuda_copy_to_host(on, got, out + 2 * ROW * rows[i], 2 * (size_t)ROW));
        if (memcmp(got, expected, 2 * (size_t)ROW) != 0)
            fail_msg("%s, %s: row %lld is not as row 0 alone", name, channel_last ? "channel-last" : "channel-first",
                     (long long)rows[i]);
    }
    if (backward) {
        read_sums(sums[1]);
        assert_multiples(sums[0], sums[1], D * (K + 1), B, 1e-4);
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
                 needed = 3 * bytes + 2 * bytes + ((size_t)1 << 30); /* also the buffer g of the generic kernel */
    size_t available = 0, all = 0;
    assert_ok(cot_cuda_enter(queue->device));
    queue->device->driver.cuMemGetInfo(&available, &all);
    cot_cuda_leave(queue->device);
    if (available < needed) {
        printf("skipped: %zu MB are needed, the GPU has %zu\n", needed >> 20, available >> 20);
        cot_queue_destroy(queue);
        return SKIPPED;
    }
    expected = malloc(2 * (size_t)ROW);
    got = malloc(2 * (size_t)ROW);
    out = device_memory(bytes), single = device_memory(2 * ROW);
    inputs.x = device_memory(bytes), inputs.dy = device_memory(bytes);
    inputs.weight = device_memory(sizeof(float) * D * K), inputs.bias = device_memory(sizeof(float) * D);
    inputs.dweight = device_memory(sizeof(float) * D * K), inputs.dbias = device_memory(sizeof(float) * D);
    fill(inputs.x, 1);
    fill(inputs.dy, 2);
    static float values[D * K];
    uint64_t seed = 3;
    for (int i = 0; i < D * K; i++)
        values[i] = (float)random_real(&seed);
    assert_ok(cot_cuda_copy_to_device(queue, inputs.weight, values, sizeof values));
    assert_ok(cot_cuda_copy_to_device(queue, inputs.bias, values, sizeof(float) * D));
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_beyond_2_31_elements)};
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    void *const memory[] = {out, single, inputs.x, inputs.dy, inputs.weight, inputs.bias, inputs.dweight, inputs.dbias};
    for (int i = 0; i < (int)COUNT(memory); i++)
        cot_cuda_free(queue, memory[i]);
    free(expected), free(got);
    cot_queue_destroy(queue);
    return failed;
}
