/* SPDX-License-Identifier: Apache-2.0 */
#include "sample_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 256, PROMPT_TOKENS = 8 };

static const char DEFAULT_PROMPT[] = "The ";

/* Appends the tokens of a segment, at most `most`. */
static bool add_tokens(token_ids *prompt, const token_segment *segment, int64_t most, io_error *error)
{
    for (int64_t i = 0; i < segment->count && i < most; i++) {
        int32_t token;
        token_segment_copy(segment, i, 1, &token);
        if (!token_ids_add(prompt, token))
            return io_no_memory(error, "--prompt", "tokens");
    }
    return true;
}

static bool open_tokenizer(sample_text *s, const options *o, io_error *error)
{
    io_error reason;
    s->tokenizer = tokenizer_open(o->tokenizer, &reason);
    if (s->tokenizer == NULL) {
        io_fail(error, "--tokenizer", "%s", reason.text);
        error->out_of_memory = reason.out_of_memory;
        return false;
    }
    s->classes = tokenizer_size(s->tokenizer);
    if (s->classes > o->vocabulary)
        return io_fail(error, "--tokenizer", "%s has %lld tokens, --vocabulary is %lld", o->tokenizer,
                       (long long)s->classes, (long long)o->vocabulary);
    return true;
}

/* Encodes --prompt, which may be any bytes. */
static bool encode_prompt(sample_text *s, const options *o, io_error *error)
{
    const char *text;
    size_t bytes;
    if (!utf8_repair(o->prompt, strlen(o->prompt), &text, &bytes))
        return io_no_memory(error, "--prompt", "text");
    const bool good = tokenizer_encode(s->tokenizer, "--prompt", text, bytes, &s->prompt, error);
    if (text != o->prompt)
        free((void *)(uintptr_t)text);
    return good;
}

bool sample_text_open(sample_text *s, const options *o, const corpus *text, io_error *error)
{
    *s = (sample_text){.classes = o->tokens ? o->vocabulary : BYTES};
    if (o->tokenizer != NULL && !open_tokenizer(s, o, error))
        return false;
    if (o->tokens && o->prompt == NULL)
        return add_tokens(&s->prompt, &text->validation_tokens.segments[0], PROMPT_TOKENS, error);
    if (o->tokens)
        return encode_prompt(s, o, error);
    const char *prompt = o->prompt != NULL ? o->prompt : DEFAULT_PROMPT;
    return add_tokens(&s->prompt, &(token_segment){prompt, (int64_t)strlen(prompt), 1}, INT64_MAX, error);
}

void sample_text_close(sample_text *s)
{
    tokenizer_close(s->tokenizer);
    free(s->prompt.ids);
    *s = (sample_text){0};
}

static bool is_control(unsigned char c)
{
    return (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f;
}

/* The bytes of tokens may end inside a character, so all of them are joined first. */
static void print_text(const tokenizer *t, const int32_t *tokens, int64_t count)
{
    char *joined = NULL;
    size_t bytes = 0, repaired_bytes, size;
    const char *repaired;
    FILE *stream = open_memstream(&joined, &bytes);
    if (stream == NULL)
        return;
    for (int64_t i = 0; i < count; i++) {
        const char *token = tokenizer_bytes(t, tokens[i], &size);
        fwrite(token, 1, size, stream);
    }
    if (fclose(stream) == 0 && utf8_repair(joined, bytes, &repaired, &repaired_bytes)) {
        for (size_t i = 0; i < repaired_bytes; i++)
            putchar(is_control((unsigned char)repaired[i]) ? '?' : repaired[i]);
        if (repaired != joined)
            free((void *)(uintptr_t)repaired);
    }
    free(joined);
}

void sample_text_print(const sample_text *s, const options *o, const int32_t *tokens, int64_t count)
{
    if (s->tokenizer != NULL) {
        print_text(s->tokenizer, tokens, count);
        return;
    }
    for (int64_t i = 0; i < count; i++)
        if (o->tokens)
            printf("%s%d", i == 0 ? "" : i == (int64_t)s->prompt.count ? "\n" : " ", tokens[i]);
        else
            putchar(i >= (int64_t)s->prompt.count && (tokens[i] >= 0x80 || is_control((unsigned char)tokens[i]))
                        ? '?'
                        : tokens[i]);
}
