/* SPDX-License-Identifier: Apache-2.0
 *
 * bigram.h: the model to beat: the next byte from the last one alone, by counting. With n(a,b) the times that b follows
 * a, n(a) their sum over b and t(a) the number of different bytes that follow a (Witten and Bell's smoothing):
 *
 *     p(b|a) = (n(a,b) + t(a) p(b)) / (n(a) + t(a)),   p(b) = (n(b) + 1) / (sum n + 256)
 *
 * and p(b|a) = p(b) where a never occurred. */
#ifndef TRAIN_LM_BIGRAM_H
#define TRAIN_LM_BIGRAM_H

#include <stdint.h>

enum { BYTE_VALUES = 256 };

typedef struct bigram_model {
    double log_probability[BYTE_VALUES][BYTE_VALUES]; /* [last][next] */
} bigram_model;

void bigram_fit(bigram_model *model, const uint8_t *text, int64_t count);

/* The mean of -log p(targets[i] | inputs[i]). */
double bigram_loss(const bigram_model *model, const uint8_t *inputs, const uint8_t *targets, int64_t count);

#endif
