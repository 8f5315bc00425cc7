/* SPDX-License-Identifier: Apache-2.0 */
#include "bigram.h"

#include <math.h>
#include <string.h>

static void fit_row(const int64_t *pairs, const double *unigram, double *log_probability)
{
    int64_t total = 0, distinct = 0;
    for (int b = 0; b < BYTE_VALUES; b++) {
        total += pairs[b];
        distinct += pairs[b] > 0;
    }
    for (int b = 0; b < BYTE_VALUES; b++) {
        const double smoothed = (double)pairs[b] + (double)distinct * unigram[b];
        log_probability[b] = log(total > 0 ? smoothed / (double)(total + distinct) : unigram[b]);
    }
}

void bigram_fit(bigram_model *model, const uint8_t *text, int64_t count)
{
    int64_t pairs[BYTE_VALUES][BYTE_VALUES], counts[BYTE_VALUES];
    memset(pairs, 0, sizeof pairs);
    memset(counts, 0, sizeof counts);
    for (int64_t i = 0; i < count; i++) {
        counts[text[i]]++;
        if (i > 0)
            pairs[text[i - 1]][text[i]]++;
    }
    double unigram[BYTE_VALUES];
    for (int b = 0; b < BYTE_VALUES; b++)
        unigram[b] = (double)(counts[b] + 1) / (double)(count + BYTE_VALUES);
    for (int a = 0; a < BYTE_VALUES; a++)
        fit_row(pairs[a], unigram, model->log_probability[a]);
}

double bigram_loss(const bigram_model *model, const int32_t *inputs, const int32_t *targets, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum -= model->log_probability[inputs[i]][targets[i]];
    return sum / (double)count;
}
