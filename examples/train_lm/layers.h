/* SPDX-License-Identifier: Apache-2.0
 *
 * layers.h: the layers between the matrix products, each with its backward. Arrays are row-major; a row is a token.
 * Gradients are set (=) unless a comment has +=. `store`: set or add to the gradient of a parameter. The order of sums over rows depends on the shape alone. */
#ifndef TRAIN_LM_LAYERS_H
#define TRAIN_LM_LAYERS_H

#include "real.h"

#include <stdbool.h>

/* y[r] = table[bytes[r]];  y [rows,width], table [vocabulary,width]. */
void embedding_forward(int64_t rows, int64_t width, const uint8_t *bytes, const real *table, real *y);

/* dtable[v] = sum of dy[r] over the rows with bytes[r] == v. order: scratch memory for `rows` indices. */
void embedding_backward(int64_t rows, int64_t width, int64_t vocabulary, const uint8_t *bytes, const real *dy,
                        int64_t *order, real *dtable, matrix_store store);

/* inv_rms[r] = 1 / sqrt(mean_c x^2 + eps);  y = x * inv_rms * gain;  gain [width]. */
void rmsnorm_forward(int64_t rows, int64_t width, const real *x, const real *gain, real *y, real *inv_rms);

/* dx += inv_rms * (dy*gain - x * inv_rms^2 * mean_c(dy*gain*x));  dgain = sum_r dy * x * inv_rms.
 * partial: scratch memory for rmsnorm_partial_count(rows, width) elements. */
void rmsnorm_backward(int64_t rows, int64_t width, const real *x, const real *gain, const real *inv_rms, const real *dy,
                      real *partial, real *dx, real *dgain, matrix_store store);
int64_t rmsnorm_partial_count(int64_t rows, int64_t width);

typedef enum rope_direction { ROPE_FORWARD = 1, ROPE_BACKWARD = -1 } rope_direction;

/* Rotary position embedding (RoPE), in place, on the first heads*size elements of rows of length row_length. In each
 * head, the channels j and j + size/2 are a point, which is rotated by p * 10000^(-2j/size). p = first + r % time is
 * the token's position. Backward rotates a gradient in the opposite direction. */
void rope(int64_t rows, int64_t time, int64_t first, int64_t heads, int64_t size, int64_t row_length,
          rope_direction direction, real *x);

/* y = c * gate;  c and y [rows,inner]. gate is the second half of each row of mixed [rows,2*inner]. */
void gate_forward(int64_t rows, int64_t inner, const real *c, const real *mixed, real *y);

/* The second half of each row of dmixed = dy * c. dy becomes dc = dy * gate, in place. */
void gate_backward(int64_t rows, int64_t inner, const real *c, const real *mixed, real *dy, real *dmixed);

/* The same for y = silu(a) * b. a and b are the halves of each row of mixed [rows,2*inner]. */
void swiglu_forward(int64_t rows, int64_t inner, const real *mixed, real *y);
void swiglu_backward(int64_t rows, int64_t inner, const real *mixed, const real *dy, real *dmixed);

/* The sum over rows of -log softmax(logits)[target] / mean_rows. row_loss: scratch memory for `rows` values. With
 * `gradient`, logits become dlogits = (softmax - onehot(target)) / mean_rows, in place. */
double cross_entropy(int64_t rows, int64_t mean_rows, int64_t classes, const uint8_t *targets, real *logits,
                     double *row_loss, bool gradient);

#endif
