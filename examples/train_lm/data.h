/* SPDX-License-Identifier: Apache-2.0
 *
 * data.h: the data: text files or token files (tokens.h). The last 10 % of every file are held out, unless there is a
 * file for validation. Of text files, `training` is the concatenation of the first 90 % of all files, `validation` that of
 * the last 10 %. */
#ifndef TRAIN_LM_DATA_H
#define TRAIN_LM_DATA_H

#include "tokens.h"

enum { DATA_ERROR_SIZE = 512 };

typedef struct byte_string {
    uint8_t *bytes;
    int64_t count, capacity;
} byte_string;

typedef struct corpus {
    byte_string training, validation;
    token_list training_tokens, validation_tokens; /* of corpus_finish */
    token_file *token_files;                       /* [files] of token files, else NULL */
    int64_t files;
    char error[DATA_ERROR_SIZE]; /* after a call that returned false: the message, without a newline */
    bool out_of_memory;          /* the cause was missing memory, not a file */
} corpus;

/* Adds one file with any name. False if it cannot be read, is a directory or is empty. */
bool corpus_add_file(corpus *c, const char *path);

/* Adds text that needs no download: the licence texts of a Debian system, and all sources and documents below
 * `source_dir`. One of the two may be absent. Files are in the order of names, without links, hidden and build
 * folders. */
bool corpus_add_default(corpus *c, const char *source_dir);

/* Maps a token file. corpus_add_validation: all of it is held out, and nothing of the other files; call it last. */
bool corpus_add_tokens(corpus *c, const char *path);
bool corpus_add_validation(corpus *c, const char *path);

/* Sets training_tokens and validation_tokens after the last file. False if there is no memory. */
bool corpus_finish(corpus *c);

/* The number of tokens, and a hash of them; of token files, of a sample of them. */
int64_t corpus_count(const token_list *list);
uint64_t corpus_hash(const corpus *c);

void corpus_destroy(corpus *c);

/* Divides the tokens into windows of `context` inputs; the targets are one token later. An epoch visits every window once.
 * Each epoch has its own order and its own offset of the windows. A batch depends only on the seed and the step. */
typedef struct sampler {
    const token_list *tokens;
    int64_t context, windows;
    uint64_t seed;
    int64_t epoch; /* the epoch of `order` and `offset`; -1 before the first */
    int64_t offset;
    int64_t *order;
} sampler;

/* The minimum number of tokens for a batch. */
int64_t sampler_tokens_needed(int64_t batch, int64_t context);

/* The tokens must outlive the sampler. False if there is no memory. */
bool sampler_create(sampler *s, const token_list *tokens, int64_t context, uint64_t seed);
void sampler_destroy(sampler *s);

/* Sets inputs and targets [batch,context] of a step >= 0. */
void sampler_batch(sampler *s, int64_t step, int64_t batch, int32_t *inputs, int32_t *targets);

#endif
