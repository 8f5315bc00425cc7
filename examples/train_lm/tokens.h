/* SPDX-License-Identifier: Apache-2.0
 *
 * tokens.h: tokens to train on, where they lie: the bytes of a text, or mapped token files.
 *
 * A token file has the format of llm.c, in little-endian order: a header of 256 int32, then the tokens. The header begins
 * with 20240520, 1 and the number of tokens for uint16 tokens, or with 20240801, 7 and that number for uint32 tokens. */
#ifndef TRAIN_LM_TOKENS_H
#define TRAIN_LM_TOKENS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Consecutive tokens, of which `size` bytes each: 1, 2 or 4. */
typedef struct token_segment {
    const void *data;
    int64_t count;
    int size;
} token_segment;

typedef struct token_list {
    token_segment *segments;
    int count;
} token_list;

/* Appends a segment. False if there is no memory. */
bool token_list_add(token_list *list, token_segment segment);
void token_list_free(token_list *list);

/* Tokens first .. first + count - 1 of a segment. */
void token_segment_copy(const token_segment *segment, int64_t first, int64_t count, int32_t *out);
token_segment token_segment_part(const token_segment *segment, int64_t first, int64_t count);

/* A segment of n tokens has (n - spare) / context windows of `context` tokens, each followed by at least one token.
 * token_list_windows: the number of windows of all segments. token_list_window: copies window number `index`, moved by
 * `offset` tokens, and as targets the tokens one later. offset < spare. */
int64_t token_list_windows(const token_list *list, int64_t context, int64_t spare);
void token_list_window(const token_list *list, int64_t context, int64_t spare, int64_t index, int64_t offset,
                       int32_t *inputs, int32_t *targets);

/* A file that is mapped into memory, not loaded. Pages are loaded when they are first used. */
typedef struct token_file {
    void *memory;
    size_t bytes;
    token_segment segment;
} token_file;

/* The header of a file with `count` tokens of 2 bytes, or with `wide` of 4 bytes. */
typedef struct token_file_header {
    int32_t words[256];
} token_file_header;
token_file_header token_file_header_of(bool wide, uint32_t count);

/* False with a message of up to `size` characters if the file is no token file, or its length is not that of the header. */
bool token_file_open(token_file *file, const char *path, char *message, size_t size);
void token_file_close(token_file *file);

#endif
