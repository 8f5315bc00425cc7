/* SPDX-License-Identifier: Apache-2.0
 *
 * backend.h: where a model computes. The model code (model.c, mixer_block.c, stem.c, hyper_connection.c) contains the
 * order of the operations. It calls the ops of the library on the backend's queue, and everything else through the
 * table `op`. There are two backends: backend_cpu.c, and cuda/backend_cuda.c for GPUs.
 *
 * Memory of a model is an address (void *) of the backend. Only the backend loads and stores elements. Arrays are
 * row-major; a row is a token. An operation that fails stores its status in `status`, and later operations have
 * undefined results. The caller reads `status` at the end. */
#ifndef TRAIN_LM_BACKEND_H
#define TRAIN_LM_BACKEND_H

#include "context_ranks.h"
#include "layers.h"
#include "matrix.h"
#include "optimizer.h"

typedef struct backend backend;

/* The tokens of a micro-batch, in the form that the backend's operations read. backend_operations.load makes it. */
typedef struct token_batch {
    const void *inputs, *targets;
} token_batch;

typedef struct backend_operations {
    /* Zeroed memory for `count` elements; NULL without memory. */
    void *(*allocate)(backend *b, int64_t count, cot_dtype dtype);
    void (*release)(backend *b, void *memory);

    /* Arrays of the dtype `dtype`: x = 0, y += x. */
    void (*zero)(backend *b, int64_t count, void *x);
    void (*add)(backend *b, int64_t count, const void *x, void *y);

    /* Linear layers (matrix.h): y = x w^T + bias + residual; bias [out] and residual may be null. dx = dy w,
     * dw = dy^T x. bias_backward: dbias = sum over the rows of dy. */
    void (*linear_forward)(backend *b, linear_shape shape, const void *x, const void *w, const void *bias,
                           const void *residual, void *y);
    void (*linear_backward)(backend *b, linear_shape shape, const void *x, const void *w, const void *dy, void *dx,
                            void *dw);

    void (*bias_backward)(backend *b, int64_t rows, int64_t width, const void *dy, void *scratch, void *dbias);

    /* Layers (layers.h). scratch has the bytes of scratch_bytes. rmsnorm_backward and layernorm_backward add to dx.
     * embedding_forward adds the learned positions `table_of_positions`, unless it is NULL. */
    void (*embedding_forward)(backend *b, int64_t rows, int64_t width, const void *inputs, const void *table,
                              const void *table_of_positions, int64_t time, row_positions positions, void *y);
    void (*embedding_backward)(backend *b, int64_t rows, int64_t width, int64_t vocabulary, const void *inputs,
                               const void *dy, void *scratch, void *dtable);
    void (*positions_backward)(backend *b, int64_t rows, int64_t time, row_positions positions, int64_t width,
                               int64_t length, const void *dy, void *dtable);
    void (*rmsnorm_forward)(backend *b, int64_t rows, int64_t width, const void *x, const void *gain, void *y,
                            void *inv_rms);
    void (*rmsnorm_backward)(backend *b, int64_t rows, int64_t width, const void *x, const void *gain,
                             const void *inv_rms, const void *dy, void *scratch, void *dx, void *dgain);
    void (*layernorm_forward)(backend *b, int64_t rows, int64_t width, const void *x, const void *gain,
                              const void *bias, void *y, void *mean, void *inv_deviation);
    void (*layernorm_backward)(backend *b, int64_t rows, int64_t width, const void *x, const void *gain,
                               const void *mean, const void *inv_deviation, const void *dy, void *scratch, void *dx,
                               void *dgain, void *dbias);
    void (*rope)(backend *b, int64_t rows, int64_t time, row_positions positions, int64_t heads, int64_t size,
                 int64_t row_length, rope_direction direction, void *x);
    void (*gate_forward)(backend *b, int64_t rows, int64_t inner, const void *c, const void *mixed, void *y);
    void (*gate_backward)(backend *b, int64_t rows, int64_t inner, const void *c, const void *mixed, void *dy,
                          void *dmixed);
    void (*swiglu_forward)(backend *b, int64_t rows, int64_t inner, const void *mixed, void *y);
    void (*swiglu_backward)(backend *b, int64_t rows, int64_t inner, const void *mixed, const void *dy, void *dmixed);
    void (*gelu_forward)(backend *b, int64_t rows, int64_t inner, const void *x, void *y);
    void (*gelu_backward)(backend *b, int64_t rows, int64_t inner, const void *x, const void *dy, void *dx);
    void (*spread)(backend *b, int64_t rows, int64_t streams, int64_t width, const void *x, void *out);
    void (*collect)(backend *b, int64_t rows, int64_t streams, int64_t width, const void *in, void *x);

    /* Adds to the loss: the sum over the rows first .. first + rows - 1 of -log softmax(logits)[target] / mean_rows.
     * With `gradient`, the logits become the gradient of that sum, in place. */
    void (*cross_entropy)(backend *b, int64_t first, int64_t rows, int64_t mean_rows, int64_t classes,
                          const void *targets, void *logits, void *row_loss, bool gradient);

    /* The bytes of `scratch` of the backward functions. */
    int64_t (*scratch_bytes)(const backend *b, int64_t rows, int64_t width);

    /* A step: load copies the tokens of `micro_batches` micro-batches, each of `rows` rows, and fills `batches`. run
     * executes enqueue(context), which calls begin, the model's functions and update; on a GPU from the second step on
     * as a CUDA graph, unless other ranks hold a part of the rows. begin sets the loss to 0. update applies AdamW with
     * the rate and the number of `step_rate` and `step`; with `shards`, all ranks call it. read_loss waits for the
     * result. */
    void (*load)(backend *b, int64_t rows, int64_t micro_batches, const int32_t *inputs, const int32_t *targets,
                 token_batch *batches);
    cot_status (*run)(backend *b, cot_status (*enqueue)(void *context), void *context);
    void (*begin)(backend *b);
    void (*update)(backend *b, parameter_table *table);
    cot_status (*read_loss)(backend *b, double *loss);

    /* Copies the masters and moments from and to the host arrays of the table; download also the gradients. With
     * `shards`, all ranks call download. It overwrites the gradients in the backend's memory. */
    void (*download)(backend *b, parameter_table *table);
    void (*upload)(backend *b, parameter_table *table);
} backend_operations;

struct backend {
    const backend_operations *op;
    cot_queue *queue;        /* of the library's ops */
    context_ranks context;   /* the ranks that hold the rows of a sequence; set by the caller */
    cot_dtype dtype, wide;   /* of values and activations; of gradients, masters and statistics such as lse */
    int64_t logit_rows;      /* rows of logits that exist at a time; 0: all */
    bool recompute;          /* blocks store only their input, and the backward runs their forward again */
    bool always_accumulates; /* gradients of parameters are zeroed by `begin` and always added to */
    bool accumulate;         /* += instead of = for the gradients of parameters */
    cot_tensor step_offset;  /* i32 [2] in the backend's memory, for dropout's offset_tensor; absent: the offset of a
                               * block is complete */
    double step_rate;        /* learning rate of the current step */
    int64_t step;            /* its number, from 1 */
    double loss;             /* CPU: the loss since `begin` */
    adamw_options adamw;     /* CPU: of update */
    optimizer_shards shards; /* the ranks that share the optimiser; set by the caller */
    double *partial;         /* CPU: scratch memory of update */
    cot_status status;       /* the first failure */
};

/* The address `elements` elements of the dtype after x. */
static inline void *backend_at(const backend *b, const void *x, int64_t elements)
{
    return (char *)(uintptr_t)x + elements * (int64_t)cot_dtype_size(b->dtype);
}

/* The CPU backend. The queue must outlive it. */
void backend_cpu_create(backend *b, cot_queue *queue);
void backend_cpu_destroy(backend *b);

#endif
