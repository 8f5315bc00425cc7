/* SPDX-License-Identifier: Apache-2.0
 * group_rows.h: the parameters of the kernels of group_rows.cu. For host and device code. */
#ifndef COT_PARALLEL_GROUP_ROWS_H
#define COT_PARALLEL_GROUP_ROWS_H

#include <cotangent/core.h>

enum {
    COT_ROWS_THREADS = 256,
    COT_ROWS_VECTOR = 8, /* elements of a thread with a contiguous last axis */
    COT_ROWS_SOURCES = 64
};

/* A copy between two views of one shape. Unit n is elements n * vector .. of the last axis. */
typedef struct cot_rows_copy {
    void *to;
    const void *from; /* NULL: `value` is stored */
    double value;
    int32_t to_dtype, from_dtype, rank, add;
    int32_t vector; /* elements of a unit: COT_ROWS_VECTOR, or 1 */
    int64_t units;
    int64_t shape[COT_MAX_RANK], to_stride[COT_MAX_RANK], from_stride[COT_MAX_RANK];
} cot_rows_copy;

/* Sums of the elements of `count` f32 tensors with the strides of rows.from. */
typedef struct cot_rows_sum {
    cot_rows_copy rows;
    const void *from[COT_ROWS_SOURCES];
    int32_t count;
} cot_rows_sum;

/* Adds the sink to rows 0 .. rows of one batch. out [rows,H,d_v] and lse [H,rows] are f32. */
typedef struct cot_rows_sink {
    float *out, *lse;
    const void *sink;
    int32_t sink_dtype;
    int64_t rows, heads, d_v, sink_stride;
    int64_t out_stride[2] /* row, head; d_v is contiguous */, lse_stride[2] /* head, row */;
} cot_rows_sink;

/* sums[h] -= sum of exp(sink[h] - lse[h,i]) * delta[h,i] over rows 0 .. rows. */
typedef struct cot_rows_dsink {
    double *sums;
    const float *lse, *delta;
    const void *sink;
    int32_t sink_dtype;
    int64_t rows, heads, sink_stride;
    int64_t lse_stride[2], delta_stride[2]; /* head, row */
} cot_rows_dsink;

/* to[n] = from[n * stride] clamped to begin .. end, minus begin. */
typedef struct cot_rows_clamp {
    int32_t *to;
    const int32_t *from;
    int64_t count, stride, begin, end;
} cot_rows_clamp;

#endif
