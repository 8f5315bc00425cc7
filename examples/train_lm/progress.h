/* SPDX-License-Identifier: Apache-2.0
 *
 * progress.h: shows the progress of training: on a terminal a bar that is redrawn, otherwise a line from time to
 * time. */
#ifndef TRAIN_LM_PROGRESS_H
#define TRAIN_LM_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct progress {
    bool quiet, terminal;
    int64_t steps, tokens_per_step;
    int64_t resumed_at;       /* steps that were done before the resume */
    double start, drawn;      /* seconds */
    double loss;              /* moving average over the last steps */
    double flops, peak_flops; /* per token, and per second of the GPU; peak_flops 0: unknown */
    double gigabytes;         /* of device memory; 0: none */
} progress;

/* The seconds of a monotonic clock. */
double progress_now(void);

/* Set flops, peak_flops and gigabytes before, or leave them 0. */
void progress_start(progress *p, int64_t steps, int64_t tokens_per_step, bool quiet);

/* Call progress_recall for each step before the resume, in order, then progress_resumed, which prints the step. */
void progress_recall(progress *p, int64_t step, double loss);
void progress_resumed(const progress *p);

/* Call after each step, with its training loss. Steps count from 1. */
void progress_step(progress *p, int64_t step, double loss);

/* Call after a validation. */
void progress_validation(const progress *p, int64_t step, double train, double validation);

/* Clears the bar. */
void progress_end(const progress *p);

#endif
