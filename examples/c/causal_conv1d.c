/* SPDX-License-Identifier: Apache-2.0 */
#include <cotangent/cotangent.h>
#include <stdio.h>

int main(void)
{
    enum { B = 1, D = 2, T = 4, K = 3 }; /* batch, channels, time, width */
    float x[B][D][T] = {{{1, 2, 3, 4}, {1, 0, 0, 0}}}, weight[D][K] = {{1, 1, 1}, {4, 2, 1}}, y[B][D][T];

    cot_queue *queue = NULL; /* runs the work, here on all cores of the CPU */
    cot_causal_conv1d_forward_args args;
    COT_INIT(&args);
    args.x = cot_tensor_contiguous(x, COT_F32, 3, (int64_t[]){B, D, T});
    args.weight = cot_tensor_contiguous(weight, COT_F32, 2, (int64_t[]){D, K});
    args.y = cot_tensor_contiguous(y, COT_F32, 3, (int64_t[]){B, D, T});
    if (cot_queue_create(NULL, &queue) != COT_OK || cot_causal_conv1d_forward(queue, &args) != COT_OK) {
        fprintf(stderr, "%s\n", cot_error_message());
        return 1;
    }
    for (int d = 0; d < D; d++)
        printf("%g %g %g %g\n", y[0][d][0], y[0][d][1], y[0][d][2], y[0][d][3]);
    cot_queue_destroy(queue);
    return 0;
}
