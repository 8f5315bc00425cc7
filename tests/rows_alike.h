/* SPDX-License-Identifier: Apache-2.0
 * rows_alike.h: calls of causal_conv1d on a batch whose rows all hold the same, so that the results of many rows must be those of one
 * alone: y and dx to the bit, dweight and dbias as often as there are rows. */
#ifndef COT_TESTS_ROWS_ALIKE_H
#define COT_TESTS_ROWS_ALIKE_H

#include "support.h"

#include <cotangent/causal_conv1d.h>
#include <math.h>

typedef struct rows_alike {
    int64_t D, T, K;
    cot_dtype dtype; /* of x and dy */
    void *x, *dy;    /* as many rows as a call has */
    float *weight, *bias, *dweight, *dbias;
} rows_alike;

static inline cot_tensor some_rows(const rows_alike *r, void *data, int64_t rows, bool channel_last)
{
    cot_tensor t = cot_tensor_contiguous(data, r->dtype, 3, SHAPE(rows, r->D, r->T));
    if (channel_last) {
        t.stride[1] = 1;
        t.stride[2] = r->D;
    }
    return t;
}

static inline cot_status call_rows(cot_queue *queue, const rows_alike *r, bool backward, int64_t rows,
                                   bool channel_last, void *to)
{
    const cot_tensor weight = cot_tensor_contiguous(r->weight, COT_F32, 2, SHAPE(r->D, r->K)),
                     bias = cot_tensor_contiguous(r->bias, COT_F32, 1, SHAPE(r->D));
    if (!backward) {
        cot_causal_conv1d_forward_args args;
        COT_INIT(&args);
        args.activation = COT_ACTIVATION_SILU;
        args.x = some_rows(r, r->x, rows, channel_last);
        args.y = some_rows(r, to, rows, channel_last);
        args.weight = weight;
        args.bias = bias;
        return cot_causal_conv1d_forward(queue, &args);
    }
    cot_causal_conv1d_backward_args args;
    COT_INIT(&args);
    args.activation = COT_ACTIVATION_SILU;
    args.x = some_rows(r, r->x, rows, channel_last);
    args.dy = some_rows(r, r->dy, rows, channel_last);
    args.dx = some_rows(r, to, rows, channel_last);
    args.weight = weight;
    args.bias = bias;
    args.dweight = cot_tensor_contiguous(r->dweight, COT_F32, 2, SHAPE(r->D, r->K));
    args.dbias = cot_tensor_contiguous(r->dbias, COT_F32, 1, SHAPE(r->D));
    return cot_causal_conv1d_backward(queue, &args);
}

/* Sums over `rows` rows beside those of one, off by `tolerance` of the largest at most. */
static inline void assert_multiples(const float *one, const float *all, int count, int rows, double tolerance)
{
    double most = 0;
    for (int i = 0; i < count; i++)
        most = fmax(most, fabs((double)one[i]));
    for (int i = 0; i < count; i++)
        assert_true(fabs(all[i] - rows * (double)one[i]) <= tolerance * rows * most);
}

#endif
