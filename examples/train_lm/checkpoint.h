/* SPDX-License-Identifier: Apache-2.0
 *
 * checkpoint.h: the full state of a run in one .safetensors file. A resumed run continues as if it had never stopped.
 *
 *     NAME, NAME.moment1, NAME.moment2    every parameter and its AdamW moments
 *     curve.train, curve.validation       f64 [step]: the losses so far
 *     metadata                            the options that the losses depend on, and a hash of the text
 *
 * The step is the length of the curve. The next batch and its random numbers depend only on the seed and the step
 * (data.h), so the file holds no state for them. */
#ifndef TRAIN_LM_CHECKPOINT_H
#define TRAIN_LM_CHECKPOINT_H

#include "data.h"
#include "options.h"
#include "parameters.h"
#include "plot.h"

#include "io/file.h"

enum { CHECKPOINT_TEXTS = 32, CHECKPOINT_TEXT_SIZE = 32 };

/* The options and the text that define a run, as pairs: name, value, name, value, ..., NULL. */
typedef struct run_identity {
    const char *pairs[2 * CHECKPOINT_TEXTS + 1];
    const char
        *defaults[CHECKPOINT_TEXTS]; /* the value of an option that a file lacks; NULL: it must have the option */
    char texts[CHECKPOINT_TEXTS][CHECKPOINT_TEXT_SIZE];
} run_identity;

void run_identity_make(run_identity *identity, const options *o, const corpus *text);

/* Replaces the file as a whole: at any time either the old or the new file exists. */
bool checkpoint_write(const char *path, const run_identity *identity, const parameter_table *table,
                      const loss_curve *curve, io_error *error);

/* Reads parameters, moments and the curve, which has memory for `steps` points. False if the file is damaged or belongs
 * to another run; the message names the option or tensor that differs. The parameters are unchanged then. */
bool checkpoint_read(const char *path, const run_identity *identity, const parameter_table *table, int64_t steps,
                     loss_curve *curve, io_error *error);

#endif
