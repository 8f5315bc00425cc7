/* SPDX-License-Identifier: Apache-2.0 */
#include "sample.h"

#include "random.h"

#include <stdlib.h>
#include <string.h>

enum { SAMPLE_STREAM = 0x53414d50 }; /* selects the random stream of the sample */

static int argmax(const real *logits, int64_t count)
{
    int best = 0;
    for (int64_t v = 1; v < count; v++)
        if (logits[v] > logits[best])
            best = (int)v;
    return best;
}

int sample_pick(const real *logits, int64_t count, double temperature, double u)
{
    const int best = argmax(logits, count);
    if (temperature <= 0)
        return best;
    double sum = 0;
    for (int64_t v = 0; v < count; v++)
        sum += exp((double)(logits[v] - logits[best]) / temperature);
    double remaining = u * sum;
    for (int64_t v = 0; v < count; v++) {
        remaining -= exp((double)(logits[v] - logits[best]) / temperature);
        if (remaining < 0)
            return (int)v;
    }
    return best; /* reached only through rounding */
}

/* Feeds token number `index` of a text. A model with learned positions has none behind its context: the decoder then
 * restarts with the last half of a context. */
static cot_status feed(const model *m, model_decoder *decoder, const int32_t *text, int64_t index)
{
    const int64_t context = m->config.context;
    cot_status status = COT_OK;
    if (m->config.gpt2 && decoder->tokens == context) {
        model_decoder_restart(m, decoder);
        for (int64_t i = index - context / 2; i < index && status == COT_OK; i++)
            status = model_decoder_step(m, decoder, text[i]);
    }
    return status != COT_OK ? status : model_decoder_step(m, decoder, text[index]);
}

/* text: the prompt, and memory for the sample behind it. */
static cot_status generate(const model *m, model_decoder *decoder, const sample_options *options, int32_t *text)
{
    random_stream stream = random_start(options->seed, SAMPLE_STREAM);
    const int64_t classes = m->config.vocabulary < options->classes ? m->config.vocabulary : options->classes;
    cot_status status = COT_OK;
    for (int64_t i = 0; i < options->prompt_count + options->count && status == COT_OK; i++) {
        if (i >= options->prompt_count)
            text[i] = sample_pick(decoder->pass.logits, classes, options->temperature, random_unit(&stream));
        status = feed(m, decoder, text, i);
    }
    return status;
}

cot_status sample_generate(const model *m, backend *b, const sample_options *options, int32_t *out)
{
    model_decoder decoder;
    const size_t prompt = (size_t)options->prompt_count, count = (size_t)options->count;
    int32_t *text = calloc(prompt + count + 1, sizeof *text);
    cot_status status = COT_OUT_OF_MEMORY;
    if (model_decoder_create(&decoder, m, b) && text != NULL) {
        if (prompt > 0)
            memcpy(text, options->prompt, prompt * sizeof *text);
        status = generate(m, &decoder, options, text);
    }
    if (status == COT_OK)
        memcpy(out, text + prompt, count * sizeof *out);
    model_decoder_destroy(&decoder);
    free(text);
    return status;
}
