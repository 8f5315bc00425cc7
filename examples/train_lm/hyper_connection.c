/* SPDX-License-Identifier: Apache-2.0 */
#include "hyper_connection.h"

#include "op_times.h"

#include <stdio.h>
#include <stdlib.h>

static int64_t coefficient_count(hyper_sizes sizes)
{
    return sizes.streams * (sizes.streams + 2);
}

/* ---- parameters and memory ---------------------------------------------------------------------------- */

static parameter *add_parameter(parameter_table *table, int64_t index, const char *part, int64_t rows, int64_t columns)
{
    char name[PARAMETER_NAME_SIZE];
    snprintf(name, sizeof name, "blocks.%lld.mhc.%s", (long long)index, part);
    return parameter_add(table, name, rows, columns, false);
}

void hyper_register(hyper_connection *hyper, parameter_table *table, hyper_sizes sizes, int64_t index)
{
    hyper->phi = add_parameter(table, index, "phi", coefficient_count(sizes), sizes.streams * sizes.width);
    hyper->alpha = add_parameter(table, index, "alpha", 3, 0);
    hyper->bias = add_parameter(table, index, "bias", coefficient_count(sizes), 0);
    hyper->gamma = add_parameter(table, index, "gamma", sizes.streams, sizes.width);
}

void hyper_initialise(hyper_connection *hyper, hyper_sizes sizes, uint64_t seed)
{
    static const double off_diagonal = -8; /* value of h_res's logits */
    const int64_t n = sizes.streams;
    parameter_randomise(hyper->phi, seed, 1 / sqrt((double)(n * sizes.width)));
    parameter_fill(hyper->alpha, (real)0.01);
    parameter_fill(hyper->gamma, 1);
    for (int64_t j = 0; j < coefficient_count(sizes); j++) {
        const int64_t ij = j - 2 * n;
        /* sigmoid(-log(n-1)) = 1/n. For one stream, sigmoid(8) is about 1. */
        const double pre = n > 1 ? -log((double)(n - 1)) : -off_diagonal;
        hyper->bias->value[j] = (real)(j < n ? pre : ij < 0 || ij / n == ij % n ? 0 : off_diagonal);
    }
}

bool hyper_saved_allocate(hyper_saved *saved, hyper_sizes sizes, backend *b, int64_t rows)
{
    *saved = (hyper_saved){
        .x = b->op->allocate(b, rows * sizes.streams * sizes.width, b->dtype),
        .f = b->op->allocate(b, rows * sizes.width, b->dtype),
        .h_pre = b->op->allocate(b, rows * sizes.streams, b->wide),
        .h_post = b->op->allocate(b, rows * sizes.streams, b->wide),
        .h_res = b->op->allocate(b, rows * sizes.streams * sizes.streams, b->wide),
        .inv_rms = b->op->allocate(b, rows, b->wide),
        .h_mix = b->op->allocate(b, rows * coefficient_count(sizes), b->wide),
    };
    return saved->x != NULL && saved->f != NULL && saved->h_pre != NULL && saved->h_post != NULL &&
           saved->h_res != NULL && saved->inv_rms != NULL && saved->h_mix != NULL;
}

void hyper_saved_free(hyper_saved *saved, backend *b)
{
    void *const arrays[] = {saved->x,     saved->f,       saved->h_pre, saved->h_post,
                            saved->h_res, saved->inv_rms, saved->h_mix};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        b->op->release(b, arrays[i]);
    *saved = (hyper_saved){0};
}

bool hyper_scratch_allocate(hyper_scratch *scratch, hyper_sizes sizes, backend *b, int64_t rows)
{
    bool complete = true;
    for (int k = 0; k < 2; k++) {
        scratch->gradients[k] = (hyper_gradients){
            .dx_post = b->op->allocate(b, rows * sizes.streams * sizes.width, b->dtype),
            .dh_post = b->op->allocate(b, rows * sizes.streams, b->wide),
            .dh_res = b->op->allocate(b, rows * sizes.streams * sizes.streams, b->wide),
            .df = b->op->allocate(b, rows * sizes.width, b->dtype),
        };
        const hyper_gradients *g = &scratch->gradients[k];
        complete = complete && g->dx_post != NULL && g->dh_post != NULL && g->dh_res != NULL && g->df != NULL;
    }
    return complete;
}

void hyper_scratch_free(hyper_scratch *scratch, backend *b)
{
    for (int k = 0; k < 2; k++) {
        b->op->release(b, scratch->gradients[k].dx_post);
        b->op->release(b, scratch->gradients[k].dh_post);
        b->op->release(b, scratch->gradients[k].dh_res);
        b->op->release(b, scratch->gradients[k].df);
    }
    *scratch = (hyper_scratch){0};
}

/* The size of `arrays` arrays [rows,width], in bytes. */
static double bytes_of(const backend *b, hyper_sizes sizes, int64_t rows, int64_t arrays)
{
    return (double)(rows * sizes.width * arrays) * (double)cot_dtype_size(b->dtype);
}

/* ---- streams ------------------------------------------------------------------------------------------ */

void hyper_spread(hyper_sizes sizes, backend *b, int64_t rows, const void *x, void *streams)
{
    b->op->spread(b, rows, sizes.streams, sizes.width, x, streams);
}

void hyper_collect(hyper_sizes sizes, backend *b, int64_t rows, const void *streams, void *x)
{
    b->op->collect(b, rows, sizes.streams, sizes.width, streams, x);
}

/* ---- the ops: all rows are one sequence, because tokens are independent --------------------------------- */

static cot_tensor streams_tensor(const backend *b, hyper_sizes sizes, int64_t rows, void *data)
{
    return cot_tensor_contiguous(data, b->dtype, 4, (int64_t[]){1, rows, sizes.streams, sizes.width});
}

static cot_tensor layer_tensor(const backend *b, hyper_sizes sizes, int64_t rows, void *data)
{
    return cot_tensor_contiguous(data, b->dtype, 3, (int64_t[]){1, rows, sizes.width});
}

static cot_tensor vector_tensor(const backend *b, int64_t rows, int64_t size, void *data)
{
    return cot_tensor_contiguous(data, b->wide, 3, (int64_t[]){1, rows, size});
}

static cot_tensor matrix_tensor(const backend *b, hyper_sizes sizes, int64_t rows, void *data)
{
    return cot_tensor_contiguous(data, b->wide, 4, (int64_t[]){1, rows, sizes.streams, sizes.streams});
}

static cot_tensor scalar_tensor(const backend *b, int64_t rows, void *data)
{
    return cot_tensor_contiguous(data, b->wide, 2, (int64_t[]){1, rows});
}

/* The library's mhc ops read float32 parameters, whatever the dtype of the streams. */
static cot_tensor value_tensor(const backend *b, const parameter *p)
{
    return cot_tensor_contiguous(p->w_wide, b->wide, p->rank, p->shape);
}

static cot_tensor gradient_tensor(const backend *b, const parameter *p)
{
    return cot_tensor_contiguous(p->dw, b->wide, p->rank, p->shape);
}

cot_status hyper_pre(const hyper_connection *hyper, hyper_sizes sizes, backend *b, int64_t rows, hyper_saved *saved,
                     void *h_in)
{
    cot_mhc_pre_forward_args args;
    COT_MHC_PRE_FORWARD_INIT(&args);
    args.x = streams_tensor(b, sizes, rows, saved->x);
    args.phi = value_tensor(b, hyper->phi);
    args.alpha = value_tensor(b, hyper->alpha);
    args.bias = value_tensor(b, hyper->bias);
    args.gamma = value_tensor(b, hyper->gamma);
    args.h_in = layer_tensor(b, sizes, rows, h_in);
    args.h_pre = vector_tensor(b, rows, sizes.streams, saved->h_pre);
    args.h_post = vector_tensor(b, rows, sizes.streams, saved->h_post);
    args.h_res = matrix_tensor(b, sizes, rows, saved->h_res);
    args.inv_rms = scalar_tensor(b, rows, saved->inv_rms);
    args.h_mix = vector_tensor(b, rows, coefficient_count(sizes), saved->h_mix);
    return TIMED(OP_MHC_PRE_FORWARD, bytes_of(b, sizes, rows, sizes.streams + 1), cot_mhc_pre_forward(b->queue, &args));
}

cot_status hyper_post(hyper_sizes sizes, backend *b, int64_t rows, hyper_saved *saved, void *next)
{
    cot_mhc_post_forward_args args;
    COT_INIT(&args);
    args.x = streams_tensor(b, sizes, rows, saved->x);
    args.f = layer_tensor(b, sizes, rows, saved->f);
    args.h_post = vector_tensor(b, rows, sizes.streams, saved->h_post);
    args.h_res = matrix_tensor(b, sizes, rows, saved->h_res);
    args.y = streams_tensor(b, sizes, rows, next);
    return TIMED(OP_MHC_POST_FORWARD, bytes_of(b, sizes, rows, 2 * sizes.streams + 1),
                 cot_mhc_post_forward(b->queue, &args));
}

cot_status hyper_post_pre(const hyper_connection *hyper, hyper_sizes sizes, backend *b, int64_t rows,
                          hyper_saved *saved, hyper_saved *next, void *h_in)
{
    cot_mhc_post_pre_forward_args args;
    COT_MHC_POST_PRE_FORWARD_INIT(&args);
    args.x = streams_tensor(b, sizes, rows, saved->x);
    args.f = layer_tensor(b, sizes, rows, saved->f);
    args.h_post = vector_tensor(b, rows, sizes.streams, saved->h_post);
    args.h_res = matrix_tensor(b, sizes, rows, saved->h_res);
    args.phi = value_tensor(b, hyper->phi);
    args.alpha = value_tensor(b, hyper->alpha);
    args.bias = value_tensor(b, hyper->bias);
    args.gamma = value_tensor(b, hyper->gamma);
    args.y = streams_tensor(b, sizes, rows, next->x);
    args.h_in = layer_tensor(b, sizes, rows, h_in);
    args.h_pre = vector_tensor(b, rows, sizes.streams, next->h_pre);
    args.next_h_post = vector_tensor(b, rows, sizes.streams, next->h_post);
    args.next_h_res = matrix_tensor(b, sizes, rows, next->h_res);
    args.inv_rms = scalar_tensor(b, rows, next->inv_rms);
    args.h_mix = vector_tensor(b, rows, coefficient_count(sizes), next->h_mix);
    return TIMED(OP_MHC_POST_PRE_FORWARD, bytes_of(b, sizes, rows, 2 * sizes.streams + 2),
                 cot_mhc_post_pre_forward(b->queue, &args));
}

cot_status hyper_post_backward(hyper_sizes sizes, backend *b, int64_t rows, const hyper_saved *saved,
                               const hyper_gradients *gradients, void *dnext)
{
    cot_mhc_post_backward_args args;
    COT_INIT(&args);
    args.x = streams_tensor(b, sizes, rows, saved->x);
    args.f = layer_tensor(b, sizes, rows, saved->f);
    args.h_post = vector_tensor(b, rows, sizes.streams, saved->h_post);
    args.h_res = matrix_tensor(b, sizes, rows, saved->h_res);
    args.dy = streams_tensor(b, sizes, rows, dnext);
    args.dx = streams_tensor(b, sizes, rows, gradients->dx_post);
    args.df = layer_tensor(b, sizes, rows, gradients->df);
    args.dh_post = vector_tensor(b, rows, sizes.streams, gradients->dh_post);
    args.dh_res = matrix_tensor(b, sizes, rows, gradients->dh_res);
    return TIMED(OP_MHC_POST_BACKWARD, bytes_of(b, sizes, rows, 3 * sizes.streams + 2),
                 cot_mhc_post_backward(b->queue, &args));
}

cot_status hyper_post_pre_backward(const hyper_connection *hyper, hyper_sizes sizes, backend *b, int64_t rows,
                                   const hyper_saved *saved, const hyper_saved *next,
                                   const hyper_gradients *next_gradients, const hyper_gradients *gradients)
{
    cot_mhc_post_pre_backward_args args;
    COT_MHC_POST_PRE_BACKWARD_INIT(&args);
    args.accumulate = b->accumulate;
    args.x = streams_tensor(b, sizes, rows, saved->x);
    args.f = layer_tensor(b, sizes, rows, saved->f);
    args.h_post = vector_tensor(b, rows, sizes.streams, saved->h_post);
    args.h_res = matrix_tensor(b, sizes, rows, saved->h_res);
    args.phi = value_tensor(b, hyper->phi);
    args.alpha = value_tensor(b, hyper->alpha);
    args.bias = value_tensor(b, hyper->bias);
    args.gamma = value_tensor(b, hyper->gamma);
    args.inv_rms = scalar_tensor(b, rows, next->inv_rms);
    args.h_mix = vector_tensor(b, rows, coefficient_count(sizes), next->h_mix);
    args.h_pre = vector_tensor(b, rows, sizes.streams, next->h_pre);
    args.next_h_post = vector_tensor(b, rows, sizes.streams, next->h_post);
    if (cot_queue_backend(b->queue) == COT_BACKEND_CUDA) /* a CPU computes it again faster than it reads it */
        args.y = streams_tensor(b, sizes, rows, next->x);
    args.dh_in = layer_tensor(b, sizes, rows, next_gradients->df);
    args.dnext_h_post = vector_tensor(b, rows, sizes.streams, next_gradients->dh_post);
    args.dnext_h_res = matrix_tensor(b, sizes, rows, next_gradients->dh_res);
    args.dy = streams_tensor(b, sizes, rows, next_gradients->dx_post);
    args.dx = streams_tensor(b, sizes, rows, gradients->dx_post);
    args.df = layer_tensor(b, sizes, rows, gradients->df);
    args.dh_post = vector_tensor(b, rows, sizes.streams, gradients->dh_post);
    args.dh_res = matrix_tensor(b, sizes, rows, gradients->dh_res);
    args.dphi = gradient_tensor(b, hyper->phi);
    args.dalpha = gradient_tensor(b, hyper->alpha);
    args.dbias = gradient_tensor(b, hyper->bias);
    args.dgamma = gradient_tensor(b, hyper->gamma);
    return TIMED(OP_MHC_POST_PRE_BACKWARD, bytes_of(b, sizes, rows, 3 * sizes.streams + 3),
                 cot_mhc_post_pre_backward(b->queue, &args));
}

cot_status hyper_pre_backward(const hyper_connection *hyper, hyper_sizes sizes, backend *b, int64_t rows,
                              const hyper_saved *saved, const hyper_gradients *gradients, void *dx)
{
    cot_mhc_pre_backward_args args;
    COT_MHC_PRE_BACKWARD_INIT(&args);
    args.accumulate = b->accumulate;
    args.x = streams_tensor(b, sizes, rows, saved->x);
    args.phi = value_tensor(b, hyper->phi);
    args.alpha = value_tensor(b, hyper->alpha);
    args.bias = value_tensor(b, hyper->bias);
    args.gamma = value_tensor(b, hyper->gamma);
    args.inv_rms = scalar_tensor(b, rows, saved->inv_rms);
    args.h_mix = vector_tensor(b, rows, coefficient_count(sizes), saved->h_mix);
    args.h_pre = vector_tensor(b, rows, sizes.streams, saved->h_pre);
    args.h_post = vector_tensor(b, rows, sizes.streams, saved->h_post);
    args.dh_in = layer_tensor(b, sizes, rows, gradients->df);
    args.dh_post = vector_tensor(b, rows, sizes.streams, gradients->dh_post);
    args.dh_res = matrix_tensor(b, sizes, rows, gradients->dh_res);
    args.dx_post = streams_tensor(b, sizes, rows, gradients->dx_post);
    args.dx = streams_tensor(b, sizes, rows, dx);
    args.dphi = gradient_tensor(b, hyper->phi);
    args.dalpha = gradient_tensor(b, hyper->alpha);
    args.dbias = gradient_tensor(b, hyper->bias);
    args.dgamma = gradient_tensor(b, hyper->gamma);
    return TIMED(OP_MHC_PRE_BACKWARD, bytes_of(b, sizes, rows, 3 * sizes.streams + 1),
                 cot_mhc_pre_backward(b->queue, &args));
}
