/* SPDX-License-Identifier: Apache-2.0
 *
 * hyper_connection.h: connects a block to N residual streams instead of one, with the library's mhc ops. X
 * [rows,N,width]:
 *
 *     h_in, h_post, h_res = pre(X)        the block's input, and the coefficients; h_res is Sinkhorn's matrix
 *     f                   = block(h_in)   without its own residual
 *     X_next              = h_post f + h_res^T X
 *
 * X_next of a block and pre of the next block are one op, mhc_post_pre.
 */
#ifndef TRAIN_LM_HYPER_CONNECTION_H
#define TRAIN_LM_HYPER_CONNECTION_H

#include "backend.h"

typedef struct hyper_sizes {
    int64_t streams, width;
} hyper_sizes;

typedef struct hyper_connection {
    parameter *phi, *alpha, *bias, *gamma;
} hyper_connection;

enum { HYPER_CONNECTION_PARAMETERS = 4 };

/* Results of the forward that the backward reads. */
typedef struct hyper_saved {
    void *x;       /* [rows,N,width] the streams before the block */
    void *f;       /* [rows,width] the block's output */
    void *h_pre;   /* [rows,N] */
    void *h_post;  /* [rows,N] */
    void *h_res;   /* [rows,N,N] */
    void *inv_rms; /* [rows] */
    void *h_mix;   /* [rows,N*N+2N] */
} hyper_saved;

/* Gradients in front of a block: those of its f or h_in, and what post's half has computed for pre's half. */
typedef struct hyper_gradients {
    void *dx_post; /* [rows,N,width] */
    void *dh_post; /* [rows,N] */
    void *dh_res;  /* [rows,N,N] */
    void *df;      /* [rows,width]: df, which the block's backward replaces by dh_in */
} hyper_gradients;

/* Scratch memory of the backward. All blocks can share it. Block i has gradients[i % 2]: mhc_post_pre reads those of
 * block i and sets those of block i-1. */
typedef struct hyper_scratch {
    hyper_gradients gradients[2];
} hyper_scratch;

/* Adds the parameters of block `index` to the table, and initialises them once they have memory. Initially h_pre is 1/N
 * and h_post is 1 for every stream, and h_res is almost the identity. This is equal to a plain residual. */
void hyper_register(hyper_connection *hyper, parameter_table *table, hyper_sizes sizes, int64_t index);
void hyper_initialise(hyper_connection *hyper, hyper_sizes sizes, uint64_t seed);

bool hyper_saved_allocate(hyper_saved *saved, hyper_sizes sizes, backend *b, int64_t rows);
void hyper_saved_free(hyper_saved *saved, backend *b);
bool hyper_scratch_allocate(hyper_scratch *scratch, hyper_sizes sizes, backend *b, int64_t rows);
void hyper_scratch_free(hyper_scratch *scratch, backend *b);

/* hyper_spread: every stream = x [rows,width]. hyper_collect: x = sum of the streams. Each is the other's gradient. */
void hyper_spread(hyper_sizes sizes, backend *b, int64_t rows, const void *x, void *streams);
void hyper_collect(hyper_sizes sizes, backend *b, int64_t rows, const void *streams, void *x);

/* hyper_pre computes h_in of the first block from saved->x, and sets the coefficients in `saved`. hyper_post computes
 * the streams behind the last block, with saved->f. Between two blocks, hyper_post_pre computes next->x from `saved`,
 * then h_in and the coefficients of the next block. hyper: of the block whose pre it is. */
cot_status hyper_pre(const hyper_connection *hyper, hyper_sizes sizes, backend *b, int64_t rows, hyper_saved *saved,
                     void *h_in);
cot_status hyper_post_pre(const hyper_connection *hyper, hyper_sizes sizes, backend *b, int64_t rows,
                          hyper_saved *saved, hyper_saved *next, void *h_in);
cot_status hyper_post(hyper_sizes sizes, backend *b, int64_t rows, hyper_saved *saved, void *next);

/* hyper_post_backward computes gradients->df of the last block from dnext. hyper_pre_backward computes dx of the first
 * block from gradients->df, which has become dh_in; dx may be the memory of dnext. Between two blocks,
 * hyper_post_pre_backward computes the gradients of the block before from `next`. The last two also set the parameters'
 * gradients. */
cot_status hyper_post_backward(hyper_sizes sizes, backend *b, int64_t rows, const hyper_saved *saved,
                               const hyper_gradients *gradients, void *dnext);
cot_status hyper_post_pre_backward(const hyper_connection *hyper, hyper_sizes sizes, backend *b, int64_t rows,
                                   const hyper_saved *saved, const hyper_saved *next,
                                   const hyper_gradients *next_gradients, const hyper_gradients *gradients);
cot_status hyper_pre_backward(const hyper_connection *hyper, hyper_sizes sizes, backend *b, int64_t rows,
                              const hyper_saved *saved, const hyper_gradients *gradients, void *dx);

#endif
