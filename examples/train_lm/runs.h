/* SPDX-License-Identifier: Apache-2.0
 *
 * runs.h: several runs on the same text with the same budget, side by side. */
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

/* A line an architecture: parameters, tokens a second, the validation loss of every seed and their mean. The runs come
 * architecture by architecture, each with the same number of seeds. */
void runs_print(const finished_run *runs, int count, const options *o);

/* The runs as JSON, for tools/make_tables.py, written as src/io/file.h has it. */
bool runs_write_json(const finished_run *runs, int count, const options *o, int threads, io_error *error);

#endif
