/* SPDX-License-Identifier: Apache-2.0
 * dropout_cuda.h: what the host hands to the CUDA kernels of this op, by value. For C and CUDA. */
#ifndef COT_DROPOUT_CUDA_H
#define COT_DROPOUT_CUDA_H

#include "../../../core/gelu.h"

#include <stdint.h>

/* How the work is divided. A block takes a tile of 8 * LANES columns; LANES threads take a row of it together, 8
 * columns each, and a thread takes so many ROWS, as many apart as the block has rows beside each other. That number is
 * a multiple of 8, so that all rows of a thread begin at the same distance from a multiple of 16 bytes, whatever D is.
 * Blocks are short and follow each other through memory in its own order. */
enum {
    DROPOUT_THREADS = 256,
    DROPOUT_FWD_LANES = 32,
    DROPOUT_FWD_ROWS = 4,
    DROPOUT_BWD_LANES = 16,
    DROPOUT_BWD_ROWS = 16,          /* 256 rows a block: its sums of dbias are 0.8 % of bf16's bytes */
    DROPOUT_BWD_SHIFTED_LANES = 32, /* a group of a tile is idle: of 32, not of 16 */
    DROPOUT_BWD_SHIFTED_ROWS = 16,
    DROPOUT_MAX_AXES = 5
};

/* A tensor on the device; null = absent. Strides in elements. */
typedef struct dropout_array {
    void *data;
    int64_t stride[DROPOUT_MAX_AXES]; /* of the leading axes */
    int64_t step;                     /* of the last one */
    int32_t dtype;
} dropout_array;

/* One struct for all kernels of the op, each reading its part of it. Names are those of the argument structs. */
typedef struct dropout_call {
    int64_t R, D, groups;
    int64_t shape[DROPOUT_MAX_AXES]; /* of the leading axes */
    int32_t axes;                    /* how many they are; 1 but for the strided kernels */
    int32_t activation, accumulate;
    int32_t source; /* of the mask: dropout_source */
    uint32_t threshold;
    float scale;
    float slope_divisor[COT_GELU_SLOPE_DENOMINATOR_TERMS]; /* COT_GELU_SLOPE_DENOMINATOR over the scale */
    uint64_t seed, offset;                                 /* without what lies in memory */
    dropout_array seed_memory, offset_memory, given;       /* given: mask or mask_bits */
    dropout_array x, bias, residual, y, mask_out, mask_bits_out;
    dropout_array dy, dx, dbias;
    float *partial; /* [parts][tiles][8 * lanes] sums of dx, null: dbias is not wanted */
    int64_t parts, tiles;
    int32_t apart;   /* rows begin at least 16 bytes apart in all tensors of elements */
    int32_t shifted; /* which columns a tile has: see dropout_tile.cuh */
    /* The backward of SHIFTED rows: from a thread's row to its next, in groups and in bytes, and whether a mask of
     * bytes is aligned where the elements are. */
    int64_t groups_apart, dy_apart, x_apart, dx_apart, given_apart;
    int32_t given_in_step;
} dropout_call;

#endif
