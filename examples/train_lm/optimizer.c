/* SPDX-License-Identifier: Apache-2.0 */
#include "optimizer.h"

enum { NORM_CHUNK = 4096 };

static const double PI = 3.14159265358979323846, FINAL_RATE = 0.1;

/* The factors of one step, in the element type. */
typedef struct adamw_factors {
    real scale, beta1, beta2, rate, correction2, eps, decay;
} adamw_factors;

int64_t gradient_norm_partials(const parameter_table *table)
{
    return (table->elements + NORM_CHUNK - 1) / NORM_CHUNK;
}

double gradient_norm(const parameter_table *table, double *partial)
{
    const int64_t chunks = gradient_norm_partials(table);
#pragma omp parallel for
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const int64_t begin = chunk * NORM_CHUNK;
        const int64_t end = begin + NORM_CHUNK < table->elements ? begin + NORM_CHUNK : table->elements;
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = begin; i < end; i++)
            sum += (double)table->gradients[i] * (double)table->gradients[i];
        partial[chunk] = sum;
    }
    double sum = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        sum += partial[chunk];
    return sqrt(sum);
}

/* Updates elements begin to end - 1. Runs on the threads of a parallel region, without a barrier between parameters. */
static void update(parameter *p, const adamw_factors *f, int64_t begin, int64_t end)
{
    const real decay = p->decays ? f->decay : 0;
    real *value = p->value, *m1 = p->moment1, *m2 = p->moment2;
    const real *gradient = p->gradient;
#pragma omp for simd schedule(static) nowait
    for (int64_t i = begin; i < end; i++) {
        const real g = gradient[i] * f->scale;
        m1[i] = f->beta1 * m1[i] + (1 - f->beta1) * g;
        m2[i] = f->beta2 * m2[i] + (1 - f->beta2) * g * g;
        value[i] -= f->rate * m1[i] / (real_sqrt(m2[i] * f->correction2) + f->eps) + decay * value[i];
    }
}

void adamw_step(parameter_table *table, const adamw_options *options, element_range share, double norm, double rate,
                int64_t step)
{
    const adamw_factors factors = {
        .scale = (real)(options->clip > 0 && norm > options->clip ? options->clip / norm : 1),
        .beta1 = (real)options->beta1,
        .beta2 = (real)options->beta2,
        .rate = (real)(rate / (1 - pow(options->beta1, (double)step))),
        .correction2 = (real)(1 / (1 - pow(options->beta2, (double)step))),
        .eps = (real)options->eps,
        .decay = (real)(rate * options->weight_decay),
    };
#pragma omp parallel
    for (int i = 0; i < table->count; i++) {
        parameter *p = &table->items[i];
        const int64_t first = p->value - table->values, last = first + p->count;
        update(p, &factors, share.begin > first ? share.begin - first : 0,
               (share.end < last ? share.end : last) - first);
    }
}

double learning_rate(double peak, int64_t step, int64_t warmup, int64_t steps)
{
    if (step < warmup)
        return peak * (double)step / (double)warmup;
    const double part = steps > warmup ? (double)(step - warmup) / (double)(steps - warmup) : 1;
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + cos(PI * part)));
}
