/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.h: the norm in front of a block or of the head: RMSNorm, or with a bias LayerNorm. */
#ifndef TRAIN_LM_NORM_H
#define TRAIN_LM_NORM_H

#include "backend.h"

typedef struct norm_layer {
    parameter *gain, *bias; /* [width]; no bias in RMSNorm */
} norm_layer;

/* Results of the forward that the backward reads. */
typedef struct norm_saved {
    void *mean, *inv_deviation; /* [rows]; RMSNorm has no mean, and 1/rms in the place of inv_deviation */
} norm_saved;

static inline void norm_forward(const norm_layer *n, backend *b, int64_t rows, int64_t width, const void *x, void *y,
                                const norm_saved *saved)
{
    if (n->bias != NULL)
        b->op->layernorm_forward(b, rows, width, x, n->gain->w, n->bias->w, y, saved->mean, saved->inv_deviation);
    else
        b->op->rmsnorm_forward(b, rows, width, x, n->gain->w, y, saved->inv_deviation);
}

/* Adds to dx. */
static inline void norm_backward(const norm_layer *n, backend *b, int64_t rows, int64_t width, const void *x,
                                 const norm_saved *saved, const void *dy, void *scratch, void *dx)
{
    if (n->bias != NULL)
        b->op->layernorm_backward(b, rows, width, x, n->gain->w, saved->mean, saved->inv_deviation, dy, scratch, dx,
                                  n->gain->dw, n->bias->dw);
    else
        b->op->rmsnorm_backward(b, rows, width, x, n->gain->w, saved->inv_deviation, dy, scratch, dx, n->gain->dw);
}

#endif
