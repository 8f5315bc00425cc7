/* SPDX-License-Identifier: Apache-2.0
 * test_causal_conv1d_wide.c: tensors larger than the caches on the CPU. For these, channel-last kernels use wide rows
 * (CONV1D_WIDE_BYTES). All rows of the batch are equal. Each kernel must write the same bits as for a batch of one row,
 * which is below that size. dweight and dbias are those of one row, times the number of rows. */
#include "equal_rows.h"

#include "core/op.h"
#include "ops/causal_conv1d/cpu/causal_conv1d_items.h"

#include <stdio.h>
#include <stdlib.h>

enum { B = 8, D = 2064, T = 1111, K = 4, ROW = D * T };

static float *out, *one, weight[D * K], dweight[2][D * K], dbias[2][D];
static equal_rows inputs = {.D = D, .T = T, .K = K, .dtype = COT_F32, .weight = weight, .bias = weight};

static void fill(float *tensor, uint64_t seed)
{
    for (int i = 0; i < ROW; i++)
        tensor[i] = (float)random_real(&seed);
    for (int b = 1; b < B; b++)
        memcpy(tensor + (size_t)b * ROW, tensor, sizeof(float) * ROW);
}

static cot_status call(cot_queue *queue, bool backward, int64_t rows, float *to, int sums)
{
    inputs.dweight = dweight[sums];
    inputs.dbias = dbias[sums];
    return call_rows(queue, &inputs, backward, rows, true, to);
}

/* Returns whether the kernel supports the call. */
static bool check_kernel(const char *name, bool backward)
{
    char forced[160];
    snprintf(forced, sizeof forced, "causal_conv1d=%s", name);
    cot_queue *queue = make_queue(forced, 0);
    const cot_status status = call(queue, backward, 1, one, 0);
    if (status != COT_UNSUPPORTED) {
        assert_ok(status);
        memset(out, 0xff, sizeof(float) * B * ROW);
        assert_ok(call(queue, backward, B, out, 1));
        for (int b = 0; b < B; b++)
            if (memcmp(out + (size_t)b * ROW, one, sizeof(float) * ROW) != 0)
                fail_msg("%s: row %d of %d is not as one alone", name, b, B);
        if (backward) {
            assert_multiples(dweight[0], dweight[1], D * K, B, 1e-5);
            assert_multiples(dbias[0], dbias[1], D, B, 1e-5);
        }
    }
    cot_queue_destroy(queue);
    return status != COT_UNSUPPORTED;
}

static void wide_rows_are_as_narrow_ones(void **state)
{
    (void)state;
    int supported = 0;
    for (int o = 0; o < cot_op_count; o++)
        for (int k = 0; strcmp(cot_ops[o]->name, "causal_conv1d") == 0 && k < cot_ops[o]->kernel_count; k++) {
            const cot_kernel *kernel = &cot_ops[o]->kernels[k];
            if (kernel->backend == COT_BACKEND_CPU && strstr(kernel->name, "_channel_last_") != NULL)
                supported += check_kernel(kernel->name, strstr(kernel->name, "_bwd_") != NULL);
        }
    assert_true(supported >= 2); /* the portable forward and backward always run */
}

int main(void)
{
    _Static_assert(sizeof(float) * ROW < CONV1D_WIDE_BYTES && sizeof(float) * B * ROW >= CONV1D_WIDE_BYTES,
                   "one row is narrow, all are wide");
    const size_t bytes = sizeof(float) * B * ROW, line = 64; /* aligned, so that kernels may use non-temporal stores */
    inputs.x = aligned_alloc(line, bytes), inputs.dy = aligned_alloc(line, bytes);
    out = aligned_alloc(line, bytes), one = aligned_alloc(line, sizeof(float) * ROW);
    fill(inputs.x, 1);
    fill(inputs.dy, 2);
    uint64_t seed = 3;
    for (int i = 0; i < D * K; i++)
        weight[i] = (float)random_real(&seed);
    const struct CMUnitTest tests[] = {cmocka_unit_test(wide_rows_are_as_narrow_ones)};
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(inputs.x), free(inputs.dy), free(out), free(one);
    return failed;
}
