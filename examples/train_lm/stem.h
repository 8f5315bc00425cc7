/* SPDX-License-Identifier: Apache-2.0
 *
 * stem.h: a dense causal convolution between the embedding and the first block, by the library's causal_conv1d_dense:
 *
 *     x_0 = e + silu(conv(e) + bias)        e [rows,width]: the embedding of each byte
 */
#ifndef TRAIN_LM_STEM_H
#define TRAIN_LM_STEM_H

#include "parameters.h"

typedef struct stem {
    int64_t width, kernel;
    parameter *weight, *bias; /* [width,width*kernel], [width]; NULL in a model without a stem */
} stem;

enum { STEM_PARAMETERS = 2 };

void stem_register(stem *s, parameter_table *table, int64_t width, int64_t kernel);
void stem_initialise(stem *s, uint64_t seed);

/* x_0 from e, both [batch,time,width]. */
cot_status stem_forward(const stem *s, cot_queue *queue, int64_t batch, int64_t time, real *e, real *x);

/* dx comes in as the gradient of x_0 and leaves as that of e. `scratch` is as large. Sets the parameters' gradients. */
cot_status stem_backward(const stem *s, cot_queue *queue, int64_t batch, int64_t time, real *e, real *dx,
                         real *scratch);

/* One new token. `state`: the latest kernel-1 embeddings, brought up to date; stem_state_size elements, zero at first. */
int64_t stem_state_size(const stem *s);
cot_status stem_step(const stem *s, cot_queue *queue, real *state, real *e, real *x);

#endif
