/* SPDX-License-Identifier: Apache-2.0
 *
 * hyper_connection.h: connects a block to N residual streams instead of one, with the library's mhc ops. X
 * [rows,N,width]:
 *
 *     h_in, h_post, A = pre(X)            the block's input, and the coefficients; A is Sinkhorn's matrix
 *     f               = block(h_in)       without its own residual
 *     X_next          = h_post f + A^T X
 */
#ifndef TRAIN_LM_HYPER_CONNECTION_H
#define TRAIN_LM_HYPER_CONNECTION_H

#include "parameters.h"

typedef struct hyper_sizes {
    int64_t streams, width;
} hyper_sizes;

typedef struct hyper_connection {
    parameter *phi, *alpha, *bias, *gamma;
} hyper_connection;

enum { HYPER_CONNECTION_PARAMETERS = 4 };

/* Results of the forward that the backward reads. */
typedef struct hyper_saved {
    real *x;       /* [rows,N,width] the streams before the block */
    real *f;       /* [rows,width] the block's output */
    real *h_pre;   /* [rows,N] */
    real *h_post;  /* [rows,N] */
    real *A;       /* [rows,N,N] */
    real *inv_rms; /* [rows] */
    real *h_mix;   /* [rows,N*N+2N] */
} hyper_saved;

/* Scratch memory of the backward. All blocks can share it. */
typedef struct hyper_scratch {
    real *dx_post; /* [rows,N,width] */
    real *dh_post; /* [rows,N] */
    real *dA;      /* [rows,N,N] */
} hyper_scratch;

/* Adds the parameters of block `index` to the table, and initialises them once they have memory. Initially h_pre is 1/N
 * and h_post is 1 for every stream, and A is almost the identity. This is equal to a plain residual. */
void hyper_register(hyper_connection *hyper, parameter_table *table, hyper_sizes sizes, int64_t index);
void hyper_initialise(hyper_connection *hyper, hyper_sizes sizes, uint64_t seed);

bool hyper_saved_allocate(hyper_saved *saved, hyper_sizes sizes, int64_t rows);
void hyper_saved_free(hyper_saved *saved);
bool hyper_scratch_allocate(hyper_scratch *scratch, hyper_sizes sizes, int64_t rows);
void hyper_scratch_free(hyper_scratch *scratch);

/* hyper_spread: every stream = x [rows,width]. hyper_collect: x = sum of the streams. Each is the other's gradient. */
void hyper_spread(hyper_sizes sizes, int64_t rows, const real *x, real *streams);
void hyper_collect(hyper_sizes sizes, int64_t rows, const real *streams, real *x);

/* hyper_pre computes h_in from saved->x and sets the coefficients in `saved`. Then hyper_post computes the next
 * streams, with saved->f. */
cot_status hyper_pre(const hyper_connection *hyper, hyper_sizes sizes, cot_queue *queue, int64_t rows,
                     hyper_saved *saved, real *h_in);
cot_status hyper_post(hyper_sizes sizes, cot_queue *queue, int64_t rows, hyper_saved *saved, real *next);

/* hyper_post_backward computes df from dnext. Then hyper_pre_backward computes dx from dh_in; dx may be the memory of
 * dnext. It also sets the parameters' gradients. */
cot_status hyper_post_backward(hyper_sizes sizes, cot_queue *queue, int64_t rows, const hyper_saved *saved,
                               hyper_scratch *scratch, real *dnext, real *df);
cot_status hyper_pre_backward(const hyper_connection *hyper, hyper_sizes sizes, cot_queue *queue, int64_t rows,
                              const hyper_saved *saved, const hyper_scratch *scratch, real *dh_in, real *dx);

#endif
