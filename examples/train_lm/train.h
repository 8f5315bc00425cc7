/* SPDX-License-Identifier: Apache-2.0
 *
 * train.h: the training run, from a corpus to a trained model and its loss curve. */
#ifndef TRAIN_LM_TRAIN_H
#define TRAIN_LM_TRAIN_H

#include "data.h"
#include "model.h"
#include "options.h"
#include "plot.h"

#include "io/file.h"

typedef enum train_result {
    TRAIN_DONE,
    TRAIN_OUT_OF_MEMORY,
    TRAIN_LIBRARY_ERROR,
    TRAIN_DIVERGED,
    TRAIN_BAD_CHECKPOINT, /* it cannot be gone on from, or there is one already */
    TRAIN_NO_CHECKPOINT   /* it could not be written; the one before is whole */
} train_result;

typedef struct training {
    model model;
    loss_curve curve;
    double train, validation; /* at the end; train averaged over the last steps */
    int64_t validation_bytes; /* that the validation loss and the bigram's are means over */
    double tokens_per_second; /* of training alone, without the validations; 0 if no step was left to do */
    io_error error;           /* of the last two results */
} training;

/* Trains a new model, or goes on with the one of a checkpoint. Destroy in every case. */
train_result train(training *t, const corpus *text, const options *o, cot_queue *queue);
void training_destroy(training *t);

#endif
