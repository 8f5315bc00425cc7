/* SPDX-License-Identifier: Apache-2.0
 *
 * optimizer.h: AdamW with gradient clipping, and the schedule of the learning rate. */
#ifndef TRAIN_LM_OPTIMIZER_H
#define TRAIN_LM_OPTIMIZER_H

#include "parameters.h"
#include "optimizer_shards.h"

typedef struct adamw_options {
    double beta1, beta2, eps, weight_decay;
    double clip; /* largest norm, to which larger gradients are scaled down; 0 = no limit */
} adamw_options;

/* The square root of the sum of squares of all gradients, summed in double in a fixed order. partial: scratch memory
 * for gradient_norm_partials(table) values. */
double gradient_norm(const parameter_table *table, double *partial);
int64_t gradient_norm_partials(const parameter_table *table);

/* Update number `step` (the first is 1), with G the gradient scaled by min(1, clip/norm):
 *     m1 = beta1*m1 + (1-beta1)*G      m2 = beta2*m2 + (1-beta2)*G^2
 *     value -= rate * (m1/(1-beta1^step) / (sqrt(m2/(1-beta2^step)) + eps) + weight_decay*value)
 * with weight_decay only for parameters that decay. Only the elements of `share`, of the arrays of the table, change. */
void adamw_step(parameter_table *table, const adamw_options *options, element_range share, double norm, double rate,
                int64_t step);

/* Linear warm-up to `peak` over the first `warmup` of `steps` steps, then half a cosine down to peak/10. step >= 1. */
double learning_rate(double peak, int64_t step, int64_t warmup, int64_t steps);

#endif
