/* SPDX-License-Identifier: Apache-2.0
 *
 * hyper_connection.h: a block between N residual streams instead of one, by the library's mhc ops. X [rows,N,width]:
 *
 *     h_in, h_post, A = pre(X)            the block's input, and its coefficients, Sinkhorn's matrix among them
 *     f               = block(h_in)       without a residual of its own
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

/* What the forward computes and the backward reads again. */
typedef struct hyper_saved {
    real *x;       /* [rows,N,width] the streams before the block */
    real *f;       /* [rows,width] the block's output */
    real *h_pre;   /* [rows,N] */
    real *h_post;  /* [rows,N] */
    real *A;       /* [rows,N,N] */
    real *inv_rms; /* [rows] */
    real *h_mix;   /* [rows,N*N+2N] */
} hyper_saved;

/* Memory that the backward of one block needs and the next may use again. */
typedef struct hyper_scratch {
    real *dx_post; /* [rows,N,width] */
    real *dh_post; /* [rows,N] */
    real *dA;      /* [rows,N,N] */
} hyper_scratch;

/* Registers the parameters around block number `index`, and fills them once they have memory: at first h_pre is 1/N and
 * h_post 1 for every stream and A almost the identity, which together are the plain residual. */
void hyper_register(hyper_connection *hyper, parameter_table *table, hyper_sizes sizes, int64_t index);
void hyper_initialise(hyper_connection *hyper, hyper_sizes sizes, uint64_t seed);

bool hyper_saved_allocate(hyper_saved *saved, hyper_sizes sizes, int64_t rows);
void hyper_saved_free(hyper_saved *saved);
bool hyper_scratch_allocate(hyper_scratch *scratch, hyper_sizes sizes, int64_t rows);
void hyper_scratch_free(hyper_scratch *scratch);

/* Every stream = x [rows,width]; and back: x = the sum of the streams. Each is the other's gradient. */
void hyper_spread(hyper_sizes sizes, int64_t rows, const real *x, real *streams);
void hyper_collect(hyper_sizes sizes, int64_t rows, const real *streams, real *x);

/* h_in from saved->x; then, with saved->f, the next streams. Both fill the rest of saved. */
cot_status hyper_pre(const hyper_connection *hyper, hyper_sizes sizes, cot_queue *queue, int64_t rows,
                     hyper_saved *saved, real *h_in);
cot_status hyper_post(hyper_sizes sizes, cot_queue *queue, int64_t rows, hyper_saved *saved, real *next);

/* df from dnext; then, with dh_in, dx, which may be where dnext was. The second sets the parameters' gradients. */
cot_status hyper_post_backward(hyper_sizes sizes, cot_queue *queue, int64_t rows, const hyper_saved *saved,
                               hyper_scratch *scratch, real *dnext, real *df);
cot_status hyper_pre_backward(const hyper_connection *hyper, hyper_sizes sizes, cot_queue *queue, int64_t rows,
                              const hyper_saved *saved, const hyper_scratch *scratch, real *dh_in, real *dx);

#endif
