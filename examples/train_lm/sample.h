/* SPDX-License-Identifier: Apache-2.0
 *
 * sample.h: generates tokens from the model, one at a time. */
#ifndef TRAIN_LM_SAMPLE_H
#define TRAIN_LM_SAMPLE_H

#include "model.h"

typedef struct sample_options {
    const int32_t *prompt;
    int64_t prompt_count; /* at least 1 */
    int64_t count;        /* tokens to generate */
    int64_t classes;      /* tokens that may be generated: the first `classes` */
    double temperature;   /* 0: always the most likely token */
    uint64_t seed;
} sample_options;

/* The next token, drawn from softmax(logits / temperature) with a uniform u in [0,1). */
int sample_pick(const real *logits, int64_t count, double temperature, double u);

/* Feeds the prompt, then writes options->count tokens to `out`. COT_OUT_OF_MEMORY if there is no memory. */
cot_status sample_generate(const model *m, backend *b, const sample_options *options, int32_t *out);

#endif
