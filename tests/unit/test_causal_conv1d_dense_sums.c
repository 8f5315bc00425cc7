/* SPDX-License-Identifier: Apache-2.0
 * test_causal_conv1d_dense_sums.c: the error of long sums in float32, over input channels, output channels and tokens.
 *
 * The error rule of `cotangent check` is wide for sums of thousands of terms, because it counts their magnitudes. The
 * kernels meet a narrower bound: 1.5 times the error of plain loops (see Numerics in the README of the op). */
#include "support.h"

#include "core/op.h"

#include <cotangent/causal_conv1d_dense.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_ELEMENTS = 1024 * 16 * 4 }; /* elements of a tensor */

typedef struct problem {
    int64_t Din, Dout, T, K;
} problem;

static float x[MAX_ELEMENTS], weight[MAX_ELEMENTS], dy[MAX_ELEMENTS], y[MAX_ELEMENTS], dx[MAX_ELEMENTS],
    dweight[MAX_ELEMENTS];
static double exact_y[MAX_ELEMENTS], exact_dx[MAX_ELEMENTS], exact_dweight[MAX_ELEMENTS];

static void make(const problem *p)
{
    memset(exact_y, 0, sizeof exact_y);
    memset(exact_dx, 0, sizeof exact_dx);
    memset(exact_dweight, 0, sizeof exact_dweight);
    for (int64_t o = 0; o < p->Dout; o++)
        for (int64_t i = 0; i < p->Din; i++)
            for (int64_t k = 0; k < p->K; k++)
                for (int64_t t = p->K - 1 - k; t < p->T; t++) {
                    const int64_t w = (o * p->Din + i) * p->K + k, from = i * p->T + t + k - p->K + 1;
                    exact_y[o * p->T + t] += (double)weight[w] * x[from];
                    exact_dx[from] += (double)weight[w] * dy[o * p->T + t];
                    exact_dweight[w] += (double)x[from] * dy[o * p->T + t];
                }
}

static double error_norm(const float *out, const double *exact, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (out[i] - exact[i]) * (out[i] - exact[i]);
    return sqrt(sum);
}

/* Computes the errors of y, or of dx and dweight. Returns whether the kernel supports the call. */
static bool run(const char *name, const problem *p, double errors[2])
{
    const bool backward = strstr(name, "_bwd_") != NULL;
    const cot_tensor of_x = cot_tensor_contiguous(x, COT_F32, 3, SHAPE(1, p->Din, p->T)),
                     of_weight = cot_tensor_contiguous(weight, COT_F32, 3, SHAPE(p->Dout, p->Din, p->K));
    char forced[160];
    cot_status status;
    snprintf(forced, sizeof forced, "causal_conv1d_dense=%s", name);
    cot_queue *queue = make_queue(forced, 0);
    if (backward) {
        cot_causal_conv1d_dense_backward_args args;
        COT_INIT(&args);
        args.x = of_x;
        args.weight = of_weight;
        args.dy = cot_tensor_contiguous(dy, COT_F32, 3, SHAPE(1, p->Dout, p->T));
        args.dx = cot_tensor_contiguous(dx, COT_F32, 3, SHAPE(1, p->Din, p->T));
        args.dweight = cot_tensor_contiguous(dweight, COT_F32, 3, SHAPE(p->Dout, p->Din, p->K));
        status = cot_causal_conv1d_dense_backward(queue, &args);
    } else {
        cot_causal_conv1d_dense_forward_args args;
        COT_INIT(&args);
        args.x = of_x;
        args.weight = of_weight;
        args.y = cot_tensor_contiguous(y, COT_F32, 3, SHAPE(1, p->Dout, p->T));
        status = cot_causal_conv1d_dense_forward(queue, &args);
    }
    cot_queue_destroy(queue);
    if (status == COT_UNSUPPORTED)
        return false;
    assert_ok(status);
    errors[0] = backward ? error_norm(dx, exact_dx, p->Din * p->T) : error_norm(y, exact_y, p->Dout * p->T);
    errors[1] = backward ? error_norm(dweight, exact_dweight, p->Dout * p->Din * p->K) : 0;
    return true;
}

static void long_sums_are_as_good_as_plain_loops(void **state)
{
    static const problem problems[] = {{1024, 16, 60, 4}, {16, 1024, 60, 4}, {8, 8, 8192, 2}};
    (void)state;
    for (int n = 0; n < 3; n++) {
        double plain[2][2];
        int supported = 0;
        make(&problems[n]);
        assert_true(run("causal_conv1d_dense_fwd_scalar", &problems[n], plain[0]));
        assert_true(run("causal_conv1d_dense_bwd_scalar", &problems[n], plain[1]));
        for (int o = 0; o < cot_op_count; o++)
            for (int k = 0; strcmp(cot_ops[o]->name, "causal_conv1d_dense") == 0 && k < cot_ops[o]->kernel_count; k++) {
                const cot_kernel *kernel = &cot_ops[o]->kernels[k];
                double errors[2];
                if (kernel->backend != COT_BACKEND_CPU || !run(kernel->name, &problems[n], errors))
                    continue;
                supported++;
                const double *bound = plain[strstr(kernel->name, "_bwd_") != NULL];
                for (int i = 0; i < 2; i++)
                    if (!(errors[i] <= 1.5 * bound[i]))
                        fail_msg("%s, problem %d, output %d: error %.3g, of plain loops %.3g", kernel->name, n, i,
                                 errors[i], bound[i]);
            }
        assert_true(supported >= 4); /* the scalar and the portable kernel of each direction */
    }
}

int main(void)
{
    uint64_t seed = 1;
    for (int i = 0; i < MAX_ELEMENTS; i++) {
        x[i] = (float)random_real(&seed);
        weight[i] = (float)random_real(&seed);
        dy[i] = (float)random_real(&seed);
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(long_sums_are_as_good_as_plain_loops)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
