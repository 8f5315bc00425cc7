/* SPDX-License-Identifier: Apache-2.0
 *
 * sample.h: generates text from the model, one byte at a time. */
#ifndef TRAIN_LM_SAMPLE_H
#define TRAIN_LM_SAMPLE_H

#include "model.h"

typedef struct sample_options {
    const char *prompt; /* at least one byte */
    int64_t count;      /* bytes to generate */
    double temperature; /* 0: always the most likely byte */
    uint64_t seed;
} sample_options;

/* The next byte, drawn from softmax(logits / temperature) with a uniform u in [0,1). */
int sample_pick(const real *logits, int64_t count, double temperature, double u);

/* Feeds the prompt, then writes options->count bytes to `out`. COT_OUT_OF_MEMORY if there is no memory. */
cot_status sample_generate(const model *m, backend *b, const sample_options *options, uint8_t *out);

#endif
