/* SPDX-License-Identifier: Apache-2.0
 *
 * train.h: a training run, from a corpus to a trained model and its loss curve. */
#ifndef TRAIN_LM_TRAIN_H
#define TRAIN_LM_TRAIN_H

#include "data.h"
#include "model.h"
#include "options.h"
#include "plot.h"
#include "ranks.h"

#include "io/file.h"

typedef enum train_result {
    TRAIN_DONE,
    TRAIN_OUT_OF_MEMORY,
    TRAIN_LIBRARY_ERROR,
    TRAIN_DIVERGED,
    TRAIN_BAD_OPTION,     /* `option` is unusable, for the reason in `error` */
    TRAIN_BAD_CHECKPOINT, /* the checkpoint cannot be resumed, or exists already without --resume */
    TRAIN_NO_CHECKPOINT   /* the checkpoint could not be written; the previous one is intact */
} train_result;

typedef struct training {
    model model;
    loss_curve curve;
    double train, validation; /* final losses; train is a mean over the last steps */
    int64_t validation_bytes; /* the validation loss and the bigram's loss are means over these bytes or tokens */
    double tokens_per_second; /* without the validations; 0 if no step was left */
    bool stopped;             /* by SIGINT, before the last step */
    const char *option;       /* of TRAIN_BAD_OPTION */
    io_error error;           /* for the last three values of train_result */
} training;

/* SIGINT then ends training after the current step, as if it were the last one. A second SIGINT ends the process. */
void train_catch_interrupt(void);

/* Trains a new model, or resumes from a checkpoint. o->accumulate is a multiple of r->size / r->context_size. Call
 * training_destroy in every case. */
train_result train(training *t, const corpus *text, const options *o, const ranks *r, cot_queue *queue);
void training_destroy(training *t);

#endif
