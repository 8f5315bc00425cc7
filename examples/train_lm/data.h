/* SPDX-License-Identifier: Apache-2.0
 *
 * data.h: the text. Of every file the last tenth is held out: `training` is the other nine tenths of all files, one
 * after the other, `validation` the tails. */
#ifndef TRAIN_LM_DATA_H
#define TRAIN_LM_DATA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DATA_ERROR_SIZE = 512 };

typedef struct byte_string {
    uint8_t *bytes;
    int64_t count, capacity;
} byte_string;

typedef struct corpus {
    byte_string training, validation;
    int64_t files;
    char error[DATA_ERROR_SIZE]; /* after a call that returned false: what was wrong, without a newline */
    bool out_of_memory;          /* ... and that no file is to blame */
} corpus;

/* Adds one file, whatever its name; false if it cannot be read, is a directory or is empty. */
bool corpus_add_file(corpus *c, const char *path);

/* Adds the text that needs no download: the licence texts of a Debian system, and every source and document below
 * `source_dir`. Either may be absent, not both. In name order, links and hidden or build folders left out. */
bool corpus_add_default(corpus *c, const char *source_dir);

void corpus_destroy(corpus *c);

/* Cuts a text into windows of `context` inputs and their targets, one byte later. An epoch visits every window once
 * in an order of its own, from an offset of its own; which windows form a batch is a function of the seed and the
 * step alone. */
typedef struct sampler {
    const uint8_t *bytes;
    int64_t count, context, windows;
    uint64_t seed;
    int64_t epoch; /* that `order` and `offset` belong to; -1 before the first */
    int64_t offset;
    int64_t *order;
} sampler;

/* The shortest text that fills a batch. */
int64_t sampler_bytes_needed(int64_t batch, int64_t context);

/* The text has to outlive the sampler. False if there is no memory. */
bool sampler_create(sampler *s, const byte_string *text, int64_t context, uint64_t seed);
void sampler_destroy(sampler *s);

/* inputs and targets [batch,context] of a step >= 0. */
void sampler_batch(sampler *s, int64_t step, int64_t batch, uint8_t *inputs, uint8_t *targets);

#endif
