/* SPDX-License-Identifier: Apache-2.0
 *
 * bigram.h: the baseline: a bigram model, which predicts the next byte only from the last one. n(a,b) is the number of
 * times that b follows a, n(a) is its sum over b, t(a) is the number of distinct bytes that follow a. With Witten and
 * Bell's smoothing:
 *
 *     p(b|a) = (n(a,b) + t(a) p(b)) / (n(a) + t(a)),   p(b) = (n(b) + 1) / (sum n + 256)
 *
 * and p(b|a) = p(b) where a does not occur. */
#ifndef TRAIN_LM_BIGRAM_H
#define TRAIN_LM_BIGRAM_H

#include <stdint.h>

enum { BYTE_VALUES = 256 };

typedef struct bigram_model {
    double log_probability[BYTE_VALUES][BYTE_VALUES]; /* [last][next] */
} bigram_model;

void bigram_fit(bigram_model *model, const uint8_t *text, int64_t count);

/* The mean of -log p(targets[i] | inputs[i]). */
double bigram_loss(const bigram_model *model, const int32_t *inputs, const int32_t *targets, int64_t count);

#endif
