/* SPDX-License-Identifier: Apache-2.0
 *
 * layers.h: the layers between the matrix products, each with its backward. Arrays are row-major; a row is a token.
 * Gradients are set (=) unless a comment has +=. `store`: set or add to the gradient of a parameter. The order of sums
 * over rows depends only on the shape. */
#ifndef TRAIN_LM_LAYERS_H
#define TRAIN_LM_LAYERS_H

#include "positions.h"
#include "real.h"

#include <stdbool.h>

/* y[r] = table[tokens[r]];  y [rows,width], table [vocabulary,width]. */
void embedding_forward(int64_t rows, int64_t width, const int32_t *tokens, const real *table, real *y);

/* dtable[v] = sum of dy[r] over the rows with tokens[r] == v. order: scratch memory for `rows` indices. rows < 2^32. */
void embedding_backward(int64_t rows, int64_t width, int64_t vocabulary, const int32_t *tokens, const real *dy,
                        int64_t *order, real *dtable, matrix_store store);

/* inv_rms[r] = 1 / sqrt(mean_c x^2 + eps);  y = x * inv_rms * gain;  gain [width]. */
void rmsnorm_forward(int64_t rows, int64_t width, const real *x, const real *gain, real *y, real *inv_rms);

/* dx += inv_rms * (dy*gain - x * inv_rms^2 * mean_c(dy*gain*x));  dgain = sum_r dy * x * inv_rms.
 * partial: scratch memory for rmsnorm_partial_count(rows, width) elements. */
void rmsnorm_backward(int64_t rows, int64_t width, const real *x, const real *gain, const real *inv_rms, const real *dy,
                      real *partial, real *dx, real *dgain, matrix_store store);
int64_t rmsnorm_partial_count(int64_t rows, int64_t width);

/* LayerNorm. mean[r] = mean_c x;  inv_deviation[r] = 1 / sqrt(mean_c (x - mean)^2 + eps);
 * n = (x - mean) * inv_deviation;  y = n * gain + bias. */
void layernorm_forward(int64_t rows, int64_t width, const real *x, const real *gain, const real *bias, real *y,
                       real *mean, real *inv_deviation);

/* With g = dy * gain:  dx += inv_deviation * (g - mean_c(g) - n * mean_c(g*n));  dgain = sum_r dy * n;
 * dbias = sum_r dy. partial: scratch memory for 2 * rmsnorm_partial_count(rows, width) elements. */
void layernorm_backward(int64_t rows, int64_t width, const real *x, const real *gain, const real *mean,
                        const real *inv_deviation, const real *dy, real *partial, real *dx, real *dgain, real *dbias,
                        matrix_store store);

/* sums[c] = sum_r x[r][c], the gradient of a bias. partial: scratch memory for rmsnorm_partial_count elements. */
void column_sums(int64_t rows, int64_t width, const real *x, real *partial, real *sums, matrix_store store);

/* GELU in GPT-2's form: y = x * sigmoid(2u),  u = sqrt(2/pi) * (x + 0.044715 x^3). That is x/2 * (1 + tanh(u)). */
void gelu_forward(int64_t count, const real *x, real *y);
void gelu_backward(int64_t count, const real *x, const real *dy, real *dx);

/* Learned positions, of rows of sequences of `time` rows each. p(r) = POSITION_OF(positions, r % time).
 * x[r] += table[p(r)];  dtable[t] = sum of dy[r] over the rows with p(r) == t. dtable has `length` rows. */
void positions_forward(int64_t rows, int64_t time, row_positions positions, int64_t width, const real *table, real *x);
void positions_backward(int64_t rows, int64_t time, row_positions positions, int64_t width, int64_t length,
                        const real *dy, real *dtable, matrix_store store);

typedef enum rope_direction { ROPE_FORWARD = 1, ROPE_BACKWARD = -1 } rope_direction;

/* Rotary position embedding (RoPE), in place, on the first heads*size elements of rows of length row_length. In each
 * head, the channels j and j + size/2 are a point, which is rotated by p(r) * 10000^(-2j/size), with p(r) as above.
 * Backward rotates a gradient in the opposite direction. */
void rope(int64_t rows, int64_t time, row_positions positions, int64_t heads, int64_t size, int64_t row_length,
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
double cross_entropy(int64_t rows, int64_t mean_rows, int64_t classes, const int32_t *targets, real *logits,
                     double *row_loss, bool gradient);

#endif
