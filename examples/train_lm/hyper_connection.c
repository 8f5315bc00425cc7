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
    static const double off_diagonal = -8; /* value of A's logits */
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

bool hyper_saved_allocate(hyper_saved *saved, hyper_sizes sizes, int64_t rows)
{
    *saved = (hyper_saved){
        .x = real_allocate(rows * sizes.streams * sizes.width),
        .f = real_allocate(rows * sizes.width),
        .h_pre = real_allocate(rows * sizes.streams),
        .h_post = real_allocate(rows * sizes.streams),
        .A = real_allocate(rows * sizes.streams * sizes.streams),
        .inv_rms = real_allocate(rows),
        .h_mix = real_allocate(rows * coefficient_count(sizes)),
    };
    return saved->x != NULL && saved->f != NULL && saved->h_pre != NULL && saved->h_post != NULL && saved->A != NULL &&
           saved->inv_rms != NULL && saved->h_mix != NULL;
}

void hyper_saved_free(hyper_saved *saved)
{
    free(saved->x);
    free(saved->f);
    free(saved->h_pre);
    free(saved->h_post);
    free(saved->A);
    free(saved->inv_rms);
    free(saved->h_mix);
    *saved = (hyper_saved){0};
}

bool hyper_scratch_allocate(hyper_scratch *scratch, hyper_sizes sizes, int64_t rows)
{
    bool complete = true;
    for (int k = 0; k < 2; k++) {
        scratch->gradients[k] = (hyper_gradients){
            .dx_post = real_allocate(rows * sizes.streams * sizes.width),
            .dh_post = real_allocate(rows * sizes.streams),
            .dA = real_allocate(rows * sizes.streams * sizes.streams),
            .df = real_allocate(rows * sizes.width),
        };
        const hyper_gradients *g = &scratch->gradients[k];
        complete = complete && g->dx_post != NULL && g->dh_post != NULL && g->dA != NULL && g->df != NULL;
    }
    return complete;
}

void hyper_scratch_free(hyper_scratch *scratch)
{
    for (int k = 0; k < 2; k++) {
        free(scratch->gradients[k].dx_post);
        free(scratch->gradients[k].dh_post);
        free(scratch->gradients[k].dA);
        free(scratch->gradients[k].df);
    }
    *scratch = (hyper_scratch){0};
}

/* The size of `arrays` arrays [rows,width], in bytes. */
static double bytes_of(hyper_sizes sizes, int64_t rows, int64_t arrays)
{
    return (double)(rows * sizes.width * arrays) * sizeof(real);
}

/* ---- streams ------------------------------------------------------------------------------------------ */

void hyper_spread(hyper_sizes sizes, int64_t rows, const real *x, real *streams)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < sizes.streams; i++)
            memcpy(streams + (r * sizes.streams + i) * sizes.width, x + r * sizes.width,
                   (size_t)sizes.width * sizeof(real));
}

void hyper_collect(hyper_sizes sizes, int64_t rows, const real *streams, real *x)
{
    memset(x, 0, (size_t)(rows * sizes.width) * sizeof(real));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < sizes.streams; i++)
            for (int64_t c = 0; c < sizes.width; c++)
                x[r * sizes.width + c] += streams[(r * sizes.streams + i) * sizes.width + c];
}

/* ---- the ops: all rows are one sequence, because tokens are independent --------------------------------- */

static cot_tensor streams_tensor(hyper_sizes sizes, int64_t rows, real *data)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, 4, (int64_t[]){1, rows, sizes.streams, sizes.width});
}

static cot_tensor layer_tensor(hyper_sizes sizes, int64_t rows, real *data)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, 3, (int64_t[]){1, rows, sizes.width});
}

static cot_tensor vector_tensor(int64_t rows, int64_t size, real *data)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, 3, (int64_t[]){1, rows, size});
}

static cot_tensor matrix_tensor(hyper_sizes sizes, int64_t rows, real *data)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, 4, (int64_t[]){1, rows, sizes.streams, sizes.streams});
}

static cot_tensor scalar_tensor(int64_t rows, real *data)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, 2, (int64_t[]){1, rows});
}

static cot_tensor parameter_tensor(real *data, const parameter *p)
{
    return cot_tensor_contiguous(data, REAL_DTYPE, p->rank, p->shape);
}

cot_status hyper_pre(const hyper_connection *hyper, hyper_sizes sizes, cot_queue *queue, int64_t rows,
                     hyper_saved *saved, real *h_in)
{
    cot_mhc_pre_forward_args args;
    COT_MHC_PRE_FORWARD_INIT(&args);
    args.x = streams_tensor(sizes, rows, saved->x);
    args.phi = parameter_tensor(hyper->phi->value, hyper->phi);
    args.alpha = parameter_tensor(hyper->alpha->value, hyper->alpha);
    args.bias = parameter_tensor(hyper->bias->value, hyper->bias);
    args.gamma = parameter_tensor(hyper->gamma->value, hyper->gamma);
    args.h_in = layer_tensor(sizes, rows, h_in);
    args.h_pre = vector_tensor(rows, sizes.streams, saved->h_pre);
    args.h_post = vector_tensor(rows, sizes.streams, saved->h_post);
    args.A = matrix_tensor(sizes, rows, saved->A);
    args.inv_rms = scalar_tensor(rows, saved->inv_rms);
    args.h_mix = vector_tensor(rows, coefficient_count(sizes), saved->h_mix);
    return TIMED(OP_MHC_PRE_FORWARD, bytes_of(sizes, rows, sizes.streams + 1), cot_mhc_pre_forward(queue, &args));
}

cot_status hyper_post(hyper_sizes sizes, cot_queue *queue, int64_t rows, hyper_saved *saved, real *next)
{
    cot_mhc_post_forward_args args;
    COT_INIT(&args);
    args.x = streams_tensor(sizes, rows, saved->x);
    args.f = layer_tensor(sizes, rows, saved->f);
    args.h_post = vector_tensor(rows, sizes.streams, saved->h_post);
    args.A = matrix_tensor(sizes, rows, saved->A);
    args.y = streams_tensor(sizes, rows, next);
    return TIMED(OP_MHC_POST_FORWARD, bytes_of(sizes, rows, 2 * sizes.streams + 1), cot_mhc_post_forward(queue, &args));
}

cot_status hyper_seam(const hyper_connection *hyper, hyper_sizes sizes, cot_queue *queue, int64_t rows,
                      const hyper_saved *saved, hyper_saved *next, real *h_in)
{
    cot_mhc_seam_forward_args args;
    COT_MHC_SEAM_FORWARD_INIT(&args);
    args.x = streams_tensor(sizes, rows, saved->x);
    args.f = layer_tensor(sizes, rows, saved->f);
    args.h_post = vector_tensor(rows, sizes.streams, saved->h_post);
    args.A = matrix_tensor(sizes, rows, saved->A);
    args.phi = parameter_tensor(hyper->phi->value, hyper->phi);
    args.alpha = parameter_tensor(hyper->alpha->value, hyper->alpha);
    args.bias = parameter_tensor(hyper->bias->value, hyper->bias);
    args.gamma = parameter_tensor(hyper->gamma->value, hyper->gamma);
    args.y = streams_tensor(sizes, rows, next->x);
    args.h_in = layer_tensor(sizes, rows, h_in);
    args.h_pre = vector_tensor(rows, sizes.streams, next->h_pre);
    args.next_h_post = vector_tensor(rows, sizes.streams, next->h_post);
    args.next_A = matrix_tensor(sizes, rows, next->A);
    args.inv_rms = scalar_tensor(rows, next->inv_rms);
    args.h_mix = vector_tensor(rows, coefficient_count(sizes), next->h_mix);
    return TIMED(OP_MHC_SEAM_FORWARD, bytes_of(sizes, rows, 2 * sizes.streams + 2), cot_mhc_seam_forward(queue, &args));
}

cot_status hyper_post_backward(hyper_sizes sizes, cot_queue *queue, int64_t rows, const hyper_saved *saved,
                               const hyper_gradients *gradients, real *dnext)
{
    cot_mhc_post_backward_args args;
    COT_INIT(&args);
    args.x = streams_tensor(sizes, rows, saved->x);
    args.f = layer_tensor(sizes, rows, saved->f);
    args.h_post = vector_tensor(rows, sizes.streams, saved->h_post);
    args.A = matrix_tensor(sizes, rows, saved->A);
    args.dy = streams_tensor(sizes, rows, dnext);
    args.dx = streams_tensor(sizes, rows, gradients->dx_post);
    args.df = layer_tensor(sizes, rows, gradients->df);
    args.dh_post = vector_tensor(rows, sizes.streams, gradients->dh_post);
    args.dA = matrix_tensor(sizes, rows, gradients->dA);
    return TIMED(OP_MHC_POST_BACKWARD, bytes_of(sizes, rows, 3 * sizes.streams + 2),
                 cot_mhc_post_backward(queue, &args));
}

cot_status hyper_seam_backward(const hyper_connection *hyper, hyper_sizes sizes, cot_queue *queue, int64_t rows,
                               const hyper_saved *saved, const hyper_saved *next, const hyper_gradients *next_gradients,
                               const hyper_gradients *gradients)
{
    cot_mhc_seam_backward_args args;
    COT_MHC_SEAM_BACKWARD_INIT(&args);
    args.x = streams_tensor(sizes, rows, saved->x);
    args.f = layer_tensor(sizes, rows, saved->f);
    args.h_post = vector_tensor(rows, sizes.streams, saved->h_post);
    args.A = matrix_tensor(sizes, rows, saved->A);
    args.phi = parameter_tensor(hyper->phi->value, hyper->phi);
    args.alpha = parameter_tensor(hyper->alpha->value, hyper->alpha);
    args.bias = parameter_tensor(hyper->bias->value, hyper->bias);
    args.gamma = parameter_tensor(hyper->gamma->value, hyper->gamma);
    args.inv_rms = scalar_tensor(rows, next->inv_rms);
    args.h_mix = vector_tensor(rows, coefficient_count(sizes), next->h_mix);
    args.h_pre = vector_tensor(rows, sizes.streams, next->h_pre);
    args.next_h_post = vector_tensor(rows, sizes.streams, next->h_post);
    args.dh_in = layer_tensor(sizes, rows, next_gradients->df);
    args.dnext_h_post = vector_tensor(rows, sizes.streams, next_gradients->dh_post);
    args.dnext_A = matrix_tensor(sizes, rows, next_gradients->dA);
    args.dy = streams_tensor(sizes, rows, next_gradients->dx_post);
    args.dx = streams_tensor(sizes, rows, gradients->dx_post);
    args.df = layer_tensor(sizes, rows, gradients->df);
    args.dh_post = vector_tensor(rows, sizes.streams, gradients->dh_post);
    args.dA = matrix_tensor(sizes, rows, gradients->dA);
    args.dphi = parameter_tensor(hyper->phi->gradient, hyper->phi);
    args.dalpha = parameter_tensor(hyper->alpha->gradient, hyper->alpha);
    args.dbias = parameter_tensor(hyper->bias->gradient, hyper->bias);
    args.dgamma = parameter_tensor(hyper->gamma->gradient, hyper->gamma);
    return TIMED(OP_MHC_SEAM_BACKWARD, bytes_of(sizes, rows, 3 * sizes.streams + 3),
                 cot_mhc_seam_backward(queue, &args));
}

cot_status hyper_pre_backward(const hyper_connection *hyper, hyper_sizes sizes, cot_queue *queue, int64_t rows,
                              const hyper_saved *saved, const hyper_gradients *gradients, real *dx)
{
    cot_mhc_pre_backward_args args;
    COT_MHC_PRE_BACKWARD_INIT(&args);
    args.x = streams_tensor(sizes, rows, saved->x);
    args.phi = parameter_tensor(hyper->phi->value, hyper->phi);
    args.alpha = parameter_tensor(hyper->alpha->value, hyper->alpha);
    args.bias = parameter_tensor(hyper->bias->value, hyper->bias);
    args.gamma = parameter_tensor(hyper->gamma->value, hyper->gamma);
    args.inv_rms = scalar_tensor(rows, saved->inv_rms);
    args.h_mix = vector_tensor(rows, coefficient_count(sizes), saved->h_mix);
    args.h_pre = vector_tensor(rows, sizes.streams, saved->h_pre);
    args.h_post = vector_tensor(rows, sizes.streams, saved->h_post);
    args.dh_in = layer_tensor(sizes, rows, gradients->df);
    args.dh_post = vector_tensor(rows, sizes.streams, gradients->dh_post);
    args.dA = matrix_tensor(sizes, rows, gradients->dA);
    args.dx_post = streams_tensor(sizes, rows, gradients->dx_post);
    args.dx = streams_tensor(sizes, rows, dx);
    args.dphi = parameter_tensor(hyper->phi->gradient, hyper->phi);
    args.dalpha = parameter_tensor(hyper->alpha->gradient, hyper->alpha);
    args.dbias = parameter_tensor(hyper->bias->gradient, hyper->bias);
    args.dgamma = parameter_tensor(hyper->gamma->gradient, hyper->gamma);
    return TIMED(OP_MHC_PRE_BACKWARD, bytes_of(sizes, rows, 3 * sizes.streams + 1), cot_mhc_pre_backward(queue, &args));
}
