/* SPDX-License-Identifier: Apache-2.0
 *
 * matrix.h: the three products of a linear layer y = x w^T, with x [rows,in], w [out,in], y [rows,out], row-major.
 *
 * Every product is cut into tiles of its output. The tiles depend on the shape alone, each is one call of a BLAS that
 * runs on one thread, and no sum is ever split between tiles: the bits do not depend on the number of threads. */
#ifndef TRAIN_LM_MATRIX_H
#define TRAIN_LM_MATRIX_H

#include "real.h"

/* Whether a result replaces what was there or is added to it. */
typedef enum matrix_store { MATRIX_SET = 0, MATRIX_ADD = 1 } matrix_store;

/* The sizes of one linear layer applied to `rows` rows. */
typedef struct linear_shape {
    int64_t rows, in, out;
} linear_shape;

/* Makes the BLAS run every call on the thread that makes it. Call once before the first product. */
void matrix_use_one_thread_per_call(void);

/* y = x w^T, or y += x w^T. */
void linear_forward(linear_shape shape, const real *x, const real *w, real *y, matrix_store store);

/* dx = dy w and dw = dy^T x, side by side: neither may overlap an input. */
void linear_backward(linear_shape shape, const real *x, const real *w, const real *dy, real *dx, real *dw);

#endif
