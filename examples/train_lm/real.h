/* SPDX-License-Identifier: Apache-2.0
 *
 * real.h: the element type of all parameters, activations and gradients. The program computes in float. The tests
 * compile the same sources in double with TRAIN_LM_DOUBLE, because finite differences need the precision. */
#ifndef TRAIN_LM_REAL_H
#define TRAIN_LM_REAL_H

#include <cblas.h>
#include <cotangent/cotangent.h>
#include <math.h>

#ifdef TRAIN_LM_DOUBLE
typedef double real;
#define REAL_DTYPE COT_F64
#define real_gemm cblas_dgemm
#define real_exp exp
#define real_sqrt sqrt
#else
typedef float real;
#define REAL_DTYPE COT_F32
#define real_gemm cblas_sgemm
#define real_exp expf
#define real_sqrt sqrtf
#endif

/* Whether a result overwrites the output or is added to it. */
typedef enum matrix_store { MATRIX_SET = 0, MATRIX_ADD = 1 } matrix_store;

/* Returns a zeroed, 64-byte aligned array of `count` elements, or NULL. Release it with free(). */
real *real_allocate(int64_t count);

#endif
