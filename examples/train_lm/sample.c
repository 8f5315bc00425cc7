/* SPDX-License-Identifier: Apache-2.0 */
#include "sample.h"

#include "random.h"

enum { BYTES = 256, SAMPLE_STREAM = 0x53414d50 }; /* selects the random stream of the sample */

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

static cot_status generate(const model *m, model_decoder *decoder, const sample_options *options, uint8_t *out)
{
    random_stream stream = random_start(options->seed, SAMPLE_STREAM);
    const int64_t bytes = m->config.vocabulary < BYTES ? m->config.vocabulary : BYTES; /* other tokens are no text */
    cot_status status = COT_OK;
    for (const char *byte = options->prompt; *byte != '\0' && status == COT_OK; byte++)
        status = model_decoder_step(m, decoder, (uint8_t)*byte);
    for (int64_t i = 0; i < options->count && status == COT_OK; i++) {
        out[i] = (uint8_t)sample_pick(decoder->pass.logits, bytes, options->temperature, random_unit(&stream));
        status = model_decoder_step(m, decoder, out[i]);
    }
    return status;
}

cot_status sample_generate(const model *m, backend *b, const sample_options *options, uint8_t *out)
{
    model_decoder decoder;
    cot_status status = COT_OUT_OF_MEMORY;
    if (model_decoder_create(&decoder, m, b))
        status = generate(m, &decoder, options, out);
    model_decoder_destroy(&decoder);
    return status;
}
