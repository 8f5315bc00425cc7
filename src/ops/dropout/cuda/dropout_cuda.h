/* SPDX-License-Identifier: Apache-2.0
 * dropout_cuda.h: the parameters that the host passes by value to the CUDA kernels of this op. For C and CUDA. */
#ifndef COT_DROPOUT_CUDA_H
#define COT_DROPOUT_CUDA_H

#include "../dropout_source.h"

#include "../../../core/gelu.h"

#include <stdint.h>

/* How the work is divided. A tile has 8 * THREADS_PER_ROW columns, and THREADS_PER_ROW threads of a block share a row, 8
 * columns each. DROPOUT_..._THREADS_PER_ROW below are the values of THREADS_PER_ROW. A thread has ROWS_PER_THREAD rows,
 * one in each pass of the block. A pass has ROWS_PER_PASS = DROPOUT_THREADS / THREADS_PER_ROW rows, so this is the
 * distance between two rows of a thread. It is a multiple of 8, so all rows of a thread have the same distance from a
 * multiple of 16 bytes, for every D. A block has few rows, and the blocks run through memory in the order of
 * addresses. */
enum {
    DROPOUT_THREADS = 256,
    DROPOUT_FWD_THREADS_PER_ROW = 32,
    DROPOUT_FWD_ROWS_PER_THREAD = 4,
    DROPOUT_BWD_THREADS_PER_ROW = 16,
    DROPOUT_BWD_ROWS_PER_THREAD =
        16, /* 256 rows in a block: its partial sums of dbias are 0.8 % of the bytes of bf16 */
    DROPOUT_BWD_SHIFTED_THREADS_PER_ROW = 32, /* one group of a tile is idle: 1 of 32 instead of 1 of 16 */
    DROPOUT_BWD_SHIFTED_ROWS_PER_THREAD = 16,
    DROPOUT_MAX_AXES = 5
};

/* How a kernel accesses rows. This is the version of docs/kernels/dropout_gpu.md. */
enum dropout_access { PLAIN, SHIFTED, STRIDED };

/* A tensor on the device. data null: absent. Strides are in elements. */
typedef struct dropout_array {
    void *data;
    int64_t stride[DROPOUT_MAX_AXES]; /* strides of the leading axes */
    int64_t column_stride;            /* stride of the last axis */
    int32_t dtype;
} dropout_array;

/* One struct for all kernels of the op. Each kernel reads only some members. Names are those of the argument
 * structs. */
typedef struct dropout_call {
    int64_t R, D, groups;
    int64_t shape[DROPOUT_MAX_AXES]; /* sizes of the leading axes */
    int32_t axes;                    /* number of leading axes; the kernels other than the strided ones require 1 */
    int32_t activation, accumulate;
    int32_t source; /* of the mask: a dropout_source */
    uint32_t threshold;
    float scale;
    float slope_denominator[COT_GELU_SLOPE_DENOMINATOR_TERMS]; /* COT_GELU_SLOPE_DENOMINATOR divided by the scale */
    uint64_t seed, offset;                                     /* seed_tensor and offset_tensor are added to them */
    dropout_array seed_tensor, offset_tensor, given_mask;      /* given_mask: mask or mask_bits */
    dropout_array x, bias, residual, y, mask_out, mask_bits_out;
    dropout_array dy, dx, dbias;
    float *partial_sums; /* [row_tiles][column_tiles][8 * THREADS_PER_ROW] sums of dx; null: no dbias */
    int64_t row_tiles, column_tiles;
    int32_t pitch_at_least_16; /* in all tensors of x's dtype, rows begin at least 16 bytes apart */
    int32_t shifted;           /* the tiles are SHIFTED: see dropout_tile.cuh */
    /* For the backward with SHIFTED rows: the distance from a thread's row to its next row, in groups and in bytes. */
    int64_t groups_per_pass, dy_pass_bytes, x_pass_bytes, dx_pass_bytes, given_mask_pass_bytes;
    int32_t mask_bytes_aligned; /* the N mask bytes of a chunk of N elements begin at a multiple of N bytes */
} dropout_call;

#endif
