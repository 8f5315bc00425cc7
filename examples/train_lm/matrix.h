/* SPDX-License-Identifier: Apache-2.0
 *
 * matrix.h: the three products of a linear layer y = x w^T, with x [rows,in], w [out,in], y [rows,out], row-major.
 *
 * Each product is divided into tiles of its output, which depend only on the shape. A tile is one call of a BLAS that
 * runs on one thread, and no sum is split between tiles. So the bits do not depend on the number of threads. */
#ifndef TRAIN_LM_MATRIX_H
#define TRAIN_LM_MATRIX_H

#include "real.h"

/* The sizes of one linear layer applied to `rows` rows. */
typedef struct linear_shape {
    int64_t rows, in, out;
} linear_shape;

/* Makes the BLAS run each call on the calling thread. Call it once before the first product. */
void matrix_use_one_thread_per_call(void);

/* y = x w^T, or y += x w^T. */
void linear_forward(linear_shape shape, const real *x, const real *w, real *y, matrix_store store);

/* dx = dy w and dw = dy^T x, computed at the same time: neither may overlap an input. store: of dw. */
void linear_backward(linear_shape shape, const real *x, const real *w, const real *dy, real *dx, real *dw,
                     matrix_store store);

#endif
