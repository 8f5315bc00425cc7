/* SPDX-License-Identifier: Apache-2.0
 *
 * tokenizer.h: byte-level BPE (byte-pair encoding), as GPT-2 has it, with the tokenizer.json of the package `tokenizers`.
 *
 * A text is encoded in four steps:
 *
 *   1. Bytes that are not valid UTF-8 become U+FFFD (utf8_repair).
 *   2. Added tokens, for example <|endoftext|>, are found in the text. They become one token each.
 *   3. A regular expression divides the text between them into words.
 *   4. Each byte of a word is a token. Of all pairs of neighbouring tokens in the list of merges, the first pair of the list is
 *      merged to one token, leftmost first, until no pair is in the list.
 *
 * Supported of tokenizer.json: model BPE without dropout, prefix, suffix and byte_fallback; pre_tokenizer ByteLevel without
 * add_prefix_space, alone or after one Split with a Regex; no normalizer; added tokens without lstrip, rstrip and
 * single_word. Truncation, padding and the post_processor are not read: they do not change the tokens of a plain text. */
#ifndef TRAIN_LM_TOKENIZER_H
#define TRAIN_LM_TOKENIZER_H

#include "io/file.h"

typedef struct tokenizer tokenizer;

/* Encoded tokens. Zeros are an empty list; free `ids`. */
typedef struct token_ids {
    int32_t *ids;
    size_t count, capacity;
} token_ids;

/* Appends a token. False if there is no memory. */
bool token_ids_add(token_ids *list, int32_t id);

/* Reads a tokenizer.json. NULL with a message if it cannot be used. Close it with tokenizer_close; NULL is allowed. */
tokenizer *tokenizer_open(const char *path, io_error *error);
void tokenizer_close(tokenizer *t);

/* The largest id, plus 1. */
int32_t tokenizer_size(const tokenizer *t);

/* The id of an added token or of the token with these bytes; -1 if there is none. */
int32_t tokenizer_find(const tokenizer *t, const char *text);

/* Appends the tokens of a text to `out`. The text must be valid UTF-8. `name` names the text in messages. False if a byte has
 * no token, or there is no memory. Not for two threads at a time: t holds a cache of words. */
bool tokenizer_encode(tokenizer *t, const char *name, const char *text, size_t bytes, token_ids *out, io_error *error);

/* The bytes of a token; no bytes if there is no token with this id. */
const char *tokenizer_bytes(const tokenizer *t, int32_t id, size_t *bytes);

/* A text as valid UTF-8. Each sequence of bytes that is not valid becomes U+FFFD: as in Python with errors="replace", a sequence is
 * the longest beginning of a character, or one byte. *repaired is `text` itself if it is valid, else memory that the caller
 * frees. False if there is no memory. */
bool utf8_repair(const char *text, size_t bytes, const char **repaired, size_t *repaired_bytes);

/* ---- words ------------------------------------------------------------------------------------------------------ */

/* A compiled regular expression that divides texts into words. */
typedef struct word_splitter word_splitter;

/* The expression of ByteLevel, which is that of GPT-2. */
extern const char WORDS_OF_GPT2[];

/* NULL with a message if the expression is not valid. */
word_splitter *word_splitter_create(const char *expression, const char *path, io_error *error);
void word_splitter_destroy(word_splitter *splitter);

/* Calls visit for each word of a valid UTF-8 text. Text that does not match is a word, too. False if visit has returned false,
 * or with a message. */
bool word_splitter_each(word_splitter *splitter, const char *name, const char *text, size_t bytes,
                        bool (*visit)(void *context, const char *word, size_t bytes), void *context, io_error *error);

/* ---- names of tokens in tokenizer.json --------------------------------------------------------------------------- */

/* tokenizer.json has a character for each byte: ASCII and Latin-1 characters that can be printed stand for themselves, the other
 * 68 bytes are U+0100 and following. token_name: writes the name of bytes, NUL-terminated, of at most 2 * bytes + 1 characters.
 * token_bytes: the inverse. Returns the number of bytes, or -1 if the name has other characters. `out` may be `name`. */
void token_name(const char *bytes, size_t count, char *name);
int64_t token_bytes(const char *name, char *out);

#endif
