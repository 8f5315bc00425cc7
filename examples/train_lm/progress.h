/* SPDX-License-Identifier: Apache-2.0
 *
 * progress.h: where the training stands: a bar that redraws itself on a terminal, a plain line every so often
 * elsewhere. */
#ifndef TRAIN_LM_PROGRESS_H
#define TRAIN_LM_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct progress {
    bool quiet, terminal;
    int64_t steps, tokens_per_step;
    int64_t resumed_at;  /* steps that were done before this process began */
    double start, drawn; /* seconds */
    double loss;         /* of the latest steps, averaged */
} progress;

/* Seconds of a clock that only goes forward. */
double progress_now(void);

void progress_start(progress *p, int64_t steps, int64_t tokens_per_step, bool quiet);

/* For each step that was done before, in order, with its training loss; then tells where the run goes on. */
void progress_recall(progress *p, int64_t step, double loss);
void progress_resumed(const progress *p);

/* After step `step` (the first is 1) with its training loss. */
void progress_step(progress *p, int64_t step, double loss);

/* After a validation. */
void progress_validation(const progress *p, int64_t step, double train, double validation);

/* Clears the bar. */
void progress_end(const progress *p);

#endif
