/* SPDX-License-Identifier: Apache-2.0
 *
 * train.h: the training run, from a corpus to a trained model and its loss curve. */
#ifndef TRAIN_LM_TRAIN_H
#define TRAIN_LM_TRAIN_H

#include "data.h"
#include "model.h"
#include "options.h"
#include "plot.h"

typedef enum train_result { TRAIN_DONE, TRAIN_OUT_OF_MEMORY, TRAIN_LIBRARY_ERROR, TRAIN_DIVERGED } train_result;

typedef struct training {
    model model;
    loss_curve curve;
    double train, validation; /* at the end; train averaged over the last steps */
    int64_t validation_bytes; /* that the validation loss and the bigram's are means over */
    double tokens_per_second; /* of training alone, without the validations */
} training;

/* Trains a new model. Destroy in every case. */
train_result train(training *t, const corpus *text, const options *o, cot_queue *queue);
void training_destroy(training *t);

#endif
