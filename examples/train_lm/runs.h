/* SPDX-License-Identifier: Apache-2.0
 *
 * runs.h: reports on several runs with the same text, steps and batches. */
#ifndef TRAIN_LM_RUNS_H
#define TRAIN_LM_RUNS_H

#include "options.h"
#include "train.h"

typedef struct finished_run {
    const architecture *arch;
    int64_t seed, parameters;
    double train, validation, bigram, tokens_per_second;
    int64_t validation_bytes;
} finished_run;

/* Prints one line per architecture: parameters, tokens per second, the validation loss of each seed and the mean.
 * `runs` is ordered by architecture, then by seed. All architectures have the same number of seeds. */
void runs_print(const finished_run *runs, int count, const options *o);

/* Writes the runs as JSON for tools/make_tables.py, as a whole or not at all (src/io/file.h). */
bool runs_write_json(const finished_run *runs, int count, const options *o, int threads, io_error *error);

#endif
