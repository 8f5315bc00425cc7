/* SPDX-License-Identifier: Apache-2.0
 * program.c: a caller in the common subset of C99, C11 and C++17. It is compiled as each of them and linked with the
 * shared or the static library. The declarations have C linkage in C++, and COT_INIT works in all three languages. */
#include <cotangent/cotangent.h>
#include <stdio.h>

int main(void)
{
    float x[4] = {1, 2, 3, 4}, weight[2] = {10, 1}, y[4] = {0, 0, 0, 0};
    const int64_t shape[3] = {1, 1, 4}, weight_shape[2] = {1, 2};
    cot_queue_options options;
    cot_queue *queue = NULL;
    cot_causal_conv1d_forward_args args;
    COT_INIT(&options);
    options.threads = 1;
    COT_INIT(&args);
    args.x = cot_tensor_contiguous(x, COT_F32, 3, shape);
    args.weight = cot_tensor_contiguous(weight, COT_F32, 2, weight_shape);
    args.y = cot_tensor_contiguous(y, COT_F32, 3, shape);
    if (cot_queue_create(&options, &queue) != COT_OK || cot_causal_conv1d_forward(queue, &args) != COT_OK) {
        printf("%s\n", cot_error_message());
        return 1;
    }
    cot_queue_destroy(queue);
    printf("%s: %g %g %g %g\n", cot_version(), (double)y[0], (double)y[1], (double)y[2], (double)y[3]);
    return !(y[0] == 1 && y[1] == 12 && y[2] == 23 && y[3] == 34);
}
