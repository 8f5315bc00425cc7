/* SPDX-License-Identifier: Apache-2.0
 * equal_rows.h: calls of causal_conv1d on a batch of equal rows. The results of many rows are known from those of one
 * row: y and dx are the same bit for bit, dweight and dbias are multiplied by the number of rows. */
#ifndef COT_TESTS_EQUAL_ROWS_H
#define COT_TESTS_EQUAL_ROWS_H

#include "support.h"

#include <cotangent/causal_conv1d.h>
#include <math.h>

typedef struct equal_rows {
    int64_t D, T, K;
    cot_dtype dtype; /* of x and dy */
    void *x, *dy;    /* at least as many rows as a call has */
    float *weight, *bias, *dweight, *dbias;
} equal_rows;

static inline cot_tensor view_rows(const equal_rows *r, void *data, int64_t rows, bool channel_last)
{
    cot_tensor t = cot_tensor_contiguous(data, r->dtype, 3, SHAPE(rows, r->D, r->T));
    if (channel_last) {
        t.stride[1] = 1;
        t.stride[2] = r->D;
    }
    return t;
}

static inline cot_status call_rows(cot_queue *queue, const equal_rows *r, bool backward, int64_t rows,
                                   bool channel_last, void *output)
{
    const cot_tensor weight = cot_tensor_contiguous(r->weight, COT_F32, 2, SHAPE(r->D, r->K)),
                     bias = cot_tensor_contiguous(r->bias, COT_F32, 1, SHAPE(r->D));
    if (!backward) {
        cot_causal_conv1d_forward_args args;
        COT_INIT(&args);
        args.activation = COT_ACTIVATION_SILU;
        args.x = view_rows(r, r->x, rows, channel_last);
        args.y = view_rows(r, output, rows, channel_last);
        args.weight = weight;
        args.bias = bias;
        return cot_causal_conv1d_forward(queue, &args);
    }
    cot_causal_conv1d_backward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = view_rows(r, r->x, rows, channel_last);
    args.dy = view_rows(r, r->dy, rows, channel_last);
    args.dx = view_rows(r, output, rows, channel_last);
    args.weight = weight;
    args.bias = bias;
    args.dweight = cot_tensor_contiguous(r->dweight, COT_F32, 2, SHAPE(r->D, r->K));
    args.dbias = cot_tensor_contiguous(r->dbias, COT_F32, 1, SHAPE(r->D));
    return cot_causal_conv1d_backward(queue, &args);
}

/* Asserts that the sums over `rows` rows are `rows` times those of one row. The error may be `tolerance` times the
 * largest value. */
static inline void assert_multiples(const float *one, const float *all, int count, int rows, double tolerance)
{
    double largest = 0;
    for (int i = 0; i < count; i++)
        largest = fmax(largest, fabs((double)one[i]));
    for (int i = 0; i < count; i++)
        assert_true(fabs(all[i] - rows * (double)one[i]) <= tolerance * rows * largest);
}

#endif
