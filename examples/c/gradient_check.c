/* SPDX-License-Identifier: Apache-2.0
 * gradient_check.c: compares every gradient of a causal convolution with SiLU with central differences of the forward.
 * In f64, which the CPU kernels support for this purpose. */
#include <cotangent/cotangent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { B = 2, D = 3, T = 7, K = 4 }; /* batch, channels, time, width */

static double x[B][D][T], weight[D][K], bias[D], dy[B][D][T];
static double dx[B][D][T], dweight[D][K], dbias[D];
static cot_queue *queue;

static void check_status(cot_status status)
{
    if (status == COT_OK)
        return;
    fprintf(stderr, "%s: %s\n", cot_status_name(status), cot_error_message());
    exit(1);
}

static cot_tensor view(void *data, int rank, int64_t a, int64_t b, int64_t c)
{
    return cot_tensor_contiguous(data, COT_F64, rank, (int64_t[]){a, b, c});
}

/* sum(y * dy). The backward computes the gradient of this sum from dy. */
static double loss(void)
{
    static double y[B][D][T];
    cot_causal_conv1d_forward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = view(x, 3, B, D, T);
    args.weight = view(weight, 2, D, K, 0);
    args.bias = view(bias, 1, D, 0, 0);
    args.y = view(y, 3, B, D, T);
    check_status(cot_causal_conv1d_forward(queue, &args));
    double sum = 0;
    for (int i = 0; i < B * D * T; i++)
        sum += (&y[0][0][0])[i] * (&dy[0][0][0])[i];
    return sum;
}

/* Compares a gradient with central differences of the loss for each value. Returns the largest error. */
static double check_gradient(const char *name, double *values, const double *gradient, int count)
{
    const double step = 1e-5;
    double largest = 0;
    for (int i = 0; i < count; i++) {
        const double value = values[i];
        values[i] = value + step;
        const double above = loss();
        values[i] = value - step;
        const double below = loss();
        values[i] = value;
        largest = fmax(largest, fabs((above - below) / (2 * step) - gradient[i]));
    }
    printf("%-8s %3d values, agrees with central differences: %s\n", name, count, largest < 1e-8 ? "yes" : "NO");
    return largest;
}

static void fill(double *values, int count, double seed)
{
    for (int i = 0; i < count; i++)
        values[i] = sin(seed + 1.7 * i);
}

int main(void)
{
    cot_queue_options options;
    COT_INIT(&options);
    options.threads = 1; /* the work is too small for more threads; the bits do not depend on it */
    check_status(cot_queue_create(&options, &queue));
    fill(&x[0][0][0], B * D * T, 1);
    fill(&weight[0][0], D * K, 2);
    fill(bias, D, 3);
    fill(&dy[0][0][0], B * D * T, 4);

    cot_causal_conv1d_backward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = view(x, 3, B, D, T);
    args.weight = view(weight, 2, D, K, 0);
    args.bias = view(bias, 1, D, 0, 0);
    args.dy = view(dy, 3, B, D, T);
    args.dx = view(dx, 3, B, D, T); /* a gradient that is not needed can be left out */
    args.dweight = view(dweight, 2, D, K, 0);
    args.dbias = view(dbias, 1, D, 0, 0);
    check_status(cot_causal_conv1d_backward(queue, &args));

    double largest = check_gradient("dx", &x[0][0][0], &dx[0][0][0], B * D * T);
    largest = fmax(largest, check_gradient("dweight", &weight[0][0], &dweight[0][0], D * K));
    largest = fmax(largest, check_gradient("dbias", bias, dbias, D));
    cot_queue_destroy(queue);
    return largest < 1e-8 ? 0 : 1;
}
