/* SPDX-License-Identifier: Apache-2.0
 *
 * sample_text.h: the prompt of a sample as tokens, and a sample as text. */
#ifndef TRAIN_LM_SAMPLE_TEXT_H
#define TRAIN_LM_SAMPLE_TEXT_H

#include "data.h"
#include "options.h"
#include "tokenizer.h"

typedef struct sample_text {
    tokenizer *tokenizer; /* of token files; NULL: tokens are bytes, or are printed as numbers */
    token_ids prompt;
    int64_t classes; /* the tokens that a sample may have are below this */
} sample_text;

/* Opens --tokenizer, and encodes --prompt. The prompt of token files without --prompt is the first held-out tokens. False with a
 * message that names the option. */
bool sample_text_open(sample_text *s, const options *o, const corpus *text, io_error *error);
void sample_text_close(sample_text *s);

/* Prints the prompt and the sample: as text, or as two lines of numbers. In text, control characters and what is not
 * valid UTF-8 become '?', and so does every character of the sample that is not ASCII if tokens are bytes: a sample of
 * bytes may be invalid in any encoding. The prompt's bytes are printed as they are. */
void sample_text_print(const sample_text *s, const options *o, const int32_t *tokens, int64_t count);

#endif
