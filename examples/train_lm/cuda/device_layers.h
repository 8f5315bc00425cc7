/* SPDX-License-Identifier: Apache-2.0
 *
 * device_layers.h: the layers between the matrix products, the loss and the optimiser, on a CUDA queue. For C and CUDA.
 *
 * A function enqueues kernels on the queue's stream and allocates nothing, so that a CUDA graph can capture it. Pointers
 * are device memory, aligned to 16 bytes. Arrays are row-major; a row is a token. E is the dtype of the call: f32, f16
 * or bf16. Arithmetic is float32, and every result is rounded once. Gradients of parameters are float32 and are added
 * to (+=): the caller sets them to zero before the first micro-batch of a step.
 *
 * A thread moves vectors of 16 bytes: 4 elements of f32, 8 of f16 or bf16. Widths, row lengths and halves of heads are
 * multiples of a vector; another size is refused with COT_INVALID_SHAPE. The order of a sum depends only on the shape.
 * No kernel uses atomic operations. */
#ifndef TRAIN_LM_DEVICE_LAYERS_H
#define TRAIN_LM_DEVICE_LAYERS_H

#include "../positions.h"

#include <cotangent/core.h>

enum {
    LAYER_THREADS = 256,
    EMBEDDING_THREADS = 128, /* threads of a block of the embedding's backward, one vector each */
    EMBEDDING_PIECE = 64,    /* maximum number of rows that one block of the embedding's backward sums */
    NORM_WARPS = 4,          /* rows that a block of RMSNorm computes at a time; a wide backward has fewer */
    NORM_BLOCKS = 512,       /* maximum number of blocks of RMSNorm's backward, and of its partial sums */
    NORM_SHARED = 48 * 1024, /* shared memory that every GPU gives a block; the backward has one row of sums per warp */
    NORM_MAX_WIDTH = NORM_SHARED / 4,
    LAYERNORM_MAX_WIDTH = NORM_SHARED / 8, /* its backward has two rows of sums per warp */
    SUM_BLOCKS = 512,                      /* maximum number of blocks of column_sums along the rows */
    SQUARES_CHUNK = 8192                   /* elements whose squares one block sums */
};

/* ---- embedding ---------------------------------------------------------------------------------------- */

/* y[r] = table[tokens[r]] + table_of_positions[p(r)], with p(r) = POSITION_OF(positions, r % time);  tokens [rows], table
 * [vocabulary,width], y [rows,width], table_of_positions [length,width] or null. The caller has checked that the tokens
 * are less than the vocabulary. */
typedef struct embedding_call {
    const int32_t *tokens;
    const void *table, *table_of_positions;
    void *y;
    int64_t rows, width, time;
    row_positions positions;
} embedding_call;

/* dtable[t] += sum of dy[r] over the rows with p(r) == t;  dy [rows,width], dtable [length,width] float32. */
typedef struct positions_backward_call {
    const void *dy;
    float *dtable;
    int64_t rows, width, time;
    row_positions positions;
} positions_backward_call;

/* Up to EMBEDDING_PIECE rows of one token: order[first] .. order[first + count - 1]. `partial` is the index of the
 * piece's partial sum, or -1 if the token has no other piece. */
typedef struct embedding_piece {
    int32_t first, count, token, partial;
} embedding_piece;

/* The partial sums partial .. partial + count - 1 belong to one token. */
typedef struct embedding_sum {
    int32_t partial, count, token;
} embedding_sum;

/* The order of the sums of the embedding's gradient. The host computes it from the tokens of a batch. */
typedef struct embedding_plan {
    int32_t *order;          /* [rows] the rows sorted by token; rows of the same token keep their order */
    embedding_piece *pieces; /* [embedding_max_pieces] */
    embedding_sum *sums;     /* [embedding_max_sums] */
    int32_t counts[2];       /* of pieces and of sums */
} embedding_plan;

/* dtable[v] += sum of dy[r] over the rows of token v;  dy [rows,width], dtable [vocabulary,width] float32. The grid
 * depends only on the shape, so that a captured graph serves every batch: counts[0] of the pieces and counts[1] of the
 * sums are used. */
typedef struct embedding_backward_call {
    const int32_t *order;
    const embedding_piece *pieces;
    const embedding_sum *sums;
    const int32_t *counts; /* [2] */
    const void *dy;
    float *partials; /* [embedding_max_partials,width] */
    float *dtable;
    int64_t rows, width, vocabulary;
} embedding_backward_call;

/* ---- RMSNorm ------------------------------------------------------------------------------------------ */

/* s = x + branch rounded to E, or x without a branch;  inv_rms[r] = 1 / sqrt(mean_c s^2 + eps);  y = s * inv_rms * gain.
 * The residual addition is part of the norm: it costs no pass of its own. */
typedef struct rmsnorm_call {
    const void *x, *branch; /* [rows,width]; branch may be null */
    void *sum;              /* [rows,width] s; null without a branch. May be x */
    const void *gain;       /* [width] */
    void *y;                /* [rows,width] */
    float *inv_rms;         /* [rows] */
    int64_t rows, width;
    float eps;
} rmsnorm_call;

/* dx = inv_rms * (dy*gain - x * inv_rms^2 * mean_c(dy*gain*x));  dgain[c] += sum_r dy * x * inv_rms. */
typedef struct rmsnorm_backward_call {
    const void *x, *gain, *dy;
    const float *inv_rms;
    void *dx;
    float *partials; /* [NORM_BLOCKS,width] */
    float *dgain;    /* [width] */
    int64_t rows, width;
    int32_t accumulate;   /* dx += instead of dx = */
    int32_t rows_a_block; /* set by the launch function */
} rmsnorm_backward_call;

/* ---- LayerNorm ---------------------------------------------------------------------------------------- */

/* mean[r] = mean_c x;  inv_deviation[r] = 1 / sqrt(mean_c (x - mean)^2 + eps);  n = (x - mean) * inv_deviation;
 * y = n * gain + bias. */
typedef struct layernorm_call {
    const void *x;           /* [rows,width] */
    const void *gain, *bias; /* [width] */
    void *y;                 /* [rows,width] */
    float *mean, *inv_deviation;
    int64_t rows, width;
    float eps;
} layernorm_call;

/* With g = dy * gain:  dx = inv_deviation * (g - mean_c(g) - n * mean_c(g*n));  dgain[c] += sum_r dy * n;
 * dbias[c] += sum_r dy. */
typedef struct layernorm_backward_call {
    const void *x, *gain, *dy;
    const float *mean, *inv_deviation;
    void *dx;
    float *partials;      /* [NORM_BLOCKS,2,width] */
    float *dgain, *dbias; /* [width] */
    int64_t rows, width;
    int32_t accumulate;   /* dx += instead of dx = */
    int32_t rows_a_block; /* set by the launch function */
} layernorm_backward_call;

/* ---- sums over rows ----------------------------------------------------------------------------------- */

/* sums[c] += sum_r x[r][c];  x [rows,width]. The gradient of a bias. */
typedef struct column_sums_call {
    const void *x;
    float *partials; /* [SUM_BLOCKS,width] */
    float *sums;     /* [width] */
    int64_t rows, width;
    int32_t rows_a_block; /* set by the launch function */
} column_sums_call;

/* sums[c] += the sum over the blocks of partials[block][c], in order. */
typedef struct add_partials_call {
    const float *partials; /* [blocks,stride] */
    float *sums;           /* [width] */
    int64_t width, stride;
    int32_t blocks;
} add_partials_call;

/* ---- RoPE --------------------------------------------------------------------------------------------- */

/* Rotary position embedding, in place, on the first heads*size elements of rows of length row_length. The channels j and
 * j + size/2 of a head are a point, which is rotated by the angle of (p(r), j). rotations[t][j] is the cosine and the sine
 * of the angle of (t, j). Backward rotates in the opposite direction. */
typedef struct rope_call {
    void *x;                /* [rows,row_length] */
    const float *rotations; /* [length,size/2,2] */
    int64_t rows, time, heads, size, row_length;
    row_positions positions;
    int32_t backward;
} rope_call;

/* ---- gate --------------------------------------------------------------------------------------------- */

/* y = f(a) * b, with f(a) = silu(a) (SwiGLU) or a. Strides are in elements, from one row to the next. */
typedef struct gate_call {
    const void *a, *b;
    void *y; /* [rows,inner] */
    int64_t rows, inner, a_stride, b_stride;
    int32_t silu;
} gate_call;

/* da = dy * b * f'(a);  db = dy * f(a). da may be dy or a, and db may be b. */
typedef struct gate_backward_call {
    const void *a, *b, *dy; /* dy [rows,inner] */
    void *da, *db;
    int64_t rows, inner, a_stride, b_stride, da_stride, db_stride;
    int32_t silu;
} gate_backward_call;

/* ---- GELU --------------------------------------------------------------------------------------------- */

/* y = x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3); or with dy: y = dy * the derivative of that. y may be x or
 * dy. */
typedef struct gelu_call {
    const void *x, *dy; /* [count]; dy only in the backward */
    void *y;
    int64_t count;
} gelu_call;

/* ---- sums --------------------------------------------------------------------------------------------- */

/* y += x. */
typedef struct add_call {
    const void *x;
    void *y;
    int64_t count;
} add_call;

/* spread: streams[r][i] = x[r] for each stream i. collect: x[r] = sum over i of streams[r][i]. */
typedef struct streams_call {
    void *x;       /* [rows,width] */
    void *streams; /* [rows,count,width] */
    int64_t rows, count, width;
} streams_call;

/* ---- cross-entropy ------------------------------------------------------------------------------------ */

/* row_loss[r] = -log softmax(logits[r])[targets[r]] of a chunk of rows. With `gradient`, the logits become
 * dlogits = (softmax - onehot(target)) * scale, and the columns from `classes` on become 0. The chunk's logits stay in
 * one buffer, which the next chunk overwrites: the whole logits never exist. */
typedef struct cross_entropy_call {
    void *logits;           /* [rows,row_length] */
    const int32_t *targets; /* [rows] */
    float *row_loss;        /* [rows] */
    int64_t rows, classes, row_length;
    float scale; /* usually 1 / rows of the whole batch, times the loss scale of f16 */
    int32_t gradient;
} cross_entropy_call;

/* *loss += scale * sum of row_loss. */
typedef struct mean_loss_call {
    const float *row_loss;
    double *loss;
    int64_t rows;
    double scale;
} mean_loss_call;

/* ---- optimiser ---------------------------------------------------------------------------------------- */

/* norm[0] = sqrt(sum gradients^2) * unscale;  norm[1] = unscale * min(1, clip / norm[0]), by which adamw scales the
 * gradients. clip = 0: no limit. */
typedef struct gradient_norm_call {
    const float *gradients;
    double *partials; /* [gradient_norm_partial_count(count)] */
    double *norm;     /* [2] */
    int64_t count;    /* a multiple of 4 */
    double unscale, clip;
} gradient_norm_call;

/* The factors that change from step to step. They are in device memory, so that one captured graph serves all steps. */
typedef struct adamw_rates {
    float rate;        /* rate / (1 - beta1^step) */
    float correction2; /* 1 / (1 - beta2^step) */
    float decay;       /* rate * weight_decay */
} adamw_rates;

/* With G = gradient * norm[1]:
 *     m1 = beta1*m1 + (1-beta1)*G      m2 = beta2*m2 + (1-beta2)*G^2
 *     master -= rate * m1 / (sqrt(m2 * correction2) + eps) + decay * master
 *     value = master, rounded to E
 * Only the first `decaying` elements decay. In f32 the values are the masters. A norm that is not finite, of gradients
 * that have overflowed, changes nothing. */
typedef struct adamw_call {
    void *value;   /* [count] */
    float *master; /* [count]; null in f32 */
    const float *gradient;
    float *moment1, *moment2;
    const double *norm;
    const adamw_rates *rates;
    int64_t count, decaying; /* multiples of 4 */
    float beta1, beta2, eps;
} adamw_call;

/* ---- functions of the host ------------------------------------------------------------------------------ */

#ifndef __CUDACC__

/* Loads the kernels of this file into the queue. Call it once, before any capture. */
cot_status device_layers_load(cot_queue *queue);

cot_status device_embedding_forward(cot_queue *queue, cot_dtype dtype, const embedding_call *call);
cot_status device_embedding_backward(cot_queue *queue, cot_dtype dtype, const embedding_backward_call *call);
cot_status device_positions_backward(cot_queue *queue, cot_dtype dtype, const positions_backward_call *call);
cot_status device_rmsnorm_forward(cot_queue *queue, cot_dtype dtype, const rmsnorm_call *call);
cot_status device_rmsnorm_backward(cot_queue *queue, cot_dtype dtype, const rmsnorm_backward_call *call);
cot_status device_layernorm_forward(cot_queue *queue, cot_dtype dtype, const layernorm_call *call);
cot_status device_layernorm_backward(cot_queue *queue, cot_dtype dtype, const layernorm_backward_call *call);
cot_status device_column_sums(cot_queue *queue, cot_dtype dtype, const column_sums_call *call);
cot_status device_rope(cot_queue *queue, cot_dtype dtype, const rope_call *call);
cot_status device_gate_forward(cot_queue *queue, cot_dtype dtype, const gate_call *call);
cot_status device_gate_backward(cot_queue *queue, cot_dtype dtype, const gate_backward_call *call);
cot_status device_gelu_forward(cot_queue *queue, cot_dtype dtype, const gelu_call *call);
cot_status device_gelu_backward(cot_queue *queue, cot_dtype dtype, const gelu_call *call);
cot_status device_add(cot_queue *queue, cot_dtype dtype, const add_call *call);
cot_status device_spread(cot_queue *queue, cot_dtype dtype, const streams_call *call);
cot_status device_collect(cot_queue *queue, cot_dtype dtype, const streams_call *call);
cot_status device_cross_entropy(cot_queue *queue, cot_dtype dtype, const cross_entropy_call *call);
cot_status device_mean_loss(cot_queue *queue, const mean_loss_call *call);
cot_status device_gradient_norm(cot_queue *queue, const gradient_norm_call *call);
cot_status device_adamw(cot_queue *queue, cot_dtype dtype, const adamw_call *call);

/* Sizes of the arrays of a plan, and of the scratch memory of the backward. */
int64_t embedding_max_pieces(int64_t rows, int64_t vocabulary);
int64_t embedding_max_sums(int64_t rows);
int64_t embedding_max_partials(int64_t rows);
int64_t gradient_norm_partial_count(int64_t count);

/* Fills the arrays of the plan, which are host memory. next: scratch memory for vocabulary + 1 indices. */
void embedding_make_plan(embedding_plan *plan, int64_t rows, int64_t vocabulary, const int32_t *tokens, int32_t *next);

#endif
#endif
