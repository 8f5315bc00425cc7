/* SPDX-License-Identifier: Apache-2.0
 *
 * stem.h: a dense causal convolution between the embedding and the first block, with the library's causal_conv1d_dense:
 *
 *     x_0 = e + silu(conv(e) + bias)        e [rows,width]: the embedding of each byte
 */
#ifndef TRAIN_LM_STEM_H
#define TRAIN_LM_STEM_H

#include "backend.h"

typedef struct stem {
    int64_t width, kernel;
    parameter *weight, *bias; /* [width,width*kernel], [width]; NULL in a model without a stem */
} stem;

enum { STEM_PARAMETERS = 2 };

void stem_register(stem *s, parameter_table *table, int64_t width, int64_t kernel);
void stem_initialise(stem *s, uint64_t seed);

/* Computes x_0 from e, both [batch,time,width]. */
cot_status stem_forward(const stem *s, backend *b, int64_t batch, int64_t time, void *e, void *x);

/* Replaces dx, the gradient of x_0, by the gradient of e. `scratch` has the size of dx. Sets the parameters'
 * gradients. */
cot_status stem_backward(const stem *s, backend *b, int64_t batch, int64_t time, void *e, void *dx, void *scratch);

/* Computes one new token. `state` holds the last kernel-1 embeddings and is updated. It has stem_state_size elements,
 * initially zero. */
int64_t stem_state_size(const stem *s);
cot_status stem_step(const stem *s, backend *b, void *state, void *e, void *x);

#endif
