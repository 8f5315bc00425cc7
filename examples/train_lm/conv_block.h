/* SPDX-License-Identifier: Apache-2.0
 *
 * conv_block.h: the block that mixes tokens by a causal convolution, or by attention. x [rows,width], E = inner, rows =
 * batch*time:
 *
 *     n      = rmsnorm(x) * gain
 *     [u|g]  = n w_in^T                   w_in [2E,width]
 *     c      = silu(conv(u))              depthwise, causal along time: weight [E,kernel], bias [E]
 *     x_next = x + drop((c * g) w_out^T)  w_out [width,E]; without x where the sizes say so; drop: nothing but in training
 *
 * With attention, in H heads of E/H channels for the queries and H/2 for keys and values (two heads of q read one of k):
 *
 *     [q|k|v] = n w_in^T                  w_in [2E,width]: E rows for q, E/2 each for k and v
 *     o       = attention(R q, R k, v)    causal; R turns each head by its token's place (RoPE, layers.h)
 *     x_next  = x + drop(o w_out^T)
 */
#ifndef TRAIN_LM_CONV_BLOCK_H
#define TRAIN_LM_CONV_BLOCK_H

#include "parameters.h"

typedef struct block_sizes {
    int64_t width, inner, kernel;
    bool no_residual;
    bool attention; /* in place of the convolution */
} block_sizes;

typedef struct conv_block {
    parameter *gain, *w_in, *conv_weight, *conv_bias, *w_out; /* those of the convolution NULL with attention */
} conv_block;

enum { CONV_BLOCK_PARAMETERS = 5 };

/* The dropout of one block in one step. The mask follows from seed and offset, so there is no state to keep: the backward
 * draws it again, and so does a training that is resumed. */
typedef struct block_dropout {
    double p; /* 0: none */
    uint64_t seed, offset;
} block_dropout;

/* What the forward computes and the backward reads again. */
typedef struct conv_block_saved {
    block_dropout drop; /* set by the caller of the forward */
    real *x;            /* [rows,width] the block's input */
    real *inv_rms;      /* [rows] */
    real *normed;       /* [rows,width] n */
    real *mixed;        /* [rows,2E] u in the first half of each row, g in the second; or R q, R k and v */
    real *conv;         /* [rows,E] c, or o */
    real *gated;        /* [rows,E] c * g */
    real *lse;          /* [batch,heads,time] of attention */
} conv_block_saved;

/* Memory that the backward of one block needs and the next may use again. */
typedef struct conv_block_scratch {
    real *dnormed; /* [rows,width] */
    real *dmixed;  /* [rows,mixed] */
    real *dinner;  /* [rows,E] */
    real *partial; /* rmsnorm_partial_count(rows, width) */
} conv_block_scratch;

/* Registers block number `index`'s parameters, and fills them once they have memory. The output product starts
 * small, by 1/sqrt(2*layers), so that the residual stream's size hardly depends on the depth. */
void conv_block_register(conv_block *block, parameter_table *table, block_sizes sizes, int64_t index);
void conv_block_initialise(conv_block *block, block_sizes sizes, int64_t layers, uint64_t seed);

bool conv_block_saved_allocate(conv_block_saved *saved, block_sizes sizes, int64_t rows);
void conv_block_saved_free(conv_block_saved *saved);
bool conv_block_scratch_allocate(conv_block_scratch *scratch, block_sizes sizes, int64_t rows);
void conv_block_scratch_free(conv_block_scratch *scratch);

/* x_next from saved->x; fills the rest of saved. */
cot_status conv_block_forward(const conv_block *block, block_sizes sizes, cot_queue *queue, int64_t batch, int64_t time,
                              conv_block_saved *saved, real *x_next);

/* dx comes in as the gradient of x_next and leaves as that of x. Sets the parameters' gradients. */
cot_status conv_block_backward(const conv_block *block, block_sizes sizes, cot_queue *queue, int64_t batch,
                               int64_t time, const conv_block_saved *saved, const conv_block_scratch *scratch,
                               real *dx);

/* What decoding one sequence keeps of a block: the convolution's latest inputs [E,kernel-1], or turned keys and values of
 * up to `reach` tokens. In elements. */
int64_t conv_block_state_size(block_sizes sizes, int64_t reach);

/* One new token: x_next from saved->x. `state` is brought up to date; before there were `past` tokens, of which
 * attention sees the latest reach - 1 and the new one. */
cot_status conv_block_step(const conv_block *block, block_sizes sizes, cot_queue *queue, int64_t reach, int64_t past,
                           real *state, conv_block_saved *saved, real *x_next);

#endif
