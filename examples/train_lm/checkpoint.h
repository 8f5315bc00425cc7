/* SPDX-License-Identifier: Apache-2.0
 *
 * checkpoint.h: all that a run needs to go on as if it had never stopped, in one .safetensors file:
 *
 *     NAME, NAME.moment1, NAME.moment2    every parameter and AdamW's moments of it
 *     curve.train, curve.validation       f64 [step]: the losses so far
 *     metadata                            the options that the losses depend on, and a hash of the text
 *
 * The step is the length of the curve. Where the next batch lies in the text and what is drawn for it are functions of
 * the seed and the step alone (data.h), so neither has a state that would have to be kept. */
#ifndef TRAIN_LM_CHECKPOINT_H
#define TRAIN_LM_CHECKPOINT_H

#include "data.h"
#include "options.h"
#include "parameters.h"
#include "plot.h"

#include "io/file.h"

enum { CHECKPOINT_TEXTS = 32, CHECKPOINT_TEXT_SIZE = 32 };

/* What a run is a function of: name, text, name, text, ..., NULL. */
typedef struct run_identity {
    const char *pairs[2 * CHECKPOINT_TEXTS + 1];
    char texts[CHECKPOINT_TEXTS][CHECKPOINT_TEXT_SIZE];
} run_identity;

void run_identity_make(run_identity *identity, const options *o, const corpus *text);

/* Replaces the file as a whole: at every moment there is the old one or the new one. */
bool checkpoint_write(const char *path, const run_identity *identity, const parameter_table *table,
                      const loss_curve *curve, io_error *error);

/* Fills parameters, moments and the curve, whose points have room for `steps`. False, with nothing changed that would
 * matter, for a file that is damaged or belongs to another run: the message says which option or tensor differs. */
bool checkpoint_read(const char *path, const run_identity *identity, const parameter_table *table, int64_t steps,
                     loss_curve *curve, io_error *error);

#endif
