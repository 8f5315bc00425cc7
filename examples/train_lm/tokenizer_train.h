/* SPDX-License-Identifier: Apache-2.0
 *
 * tokenizer_train.h: trains a byte-level BPE on texts, and writes its tokenizer.json. The result is that of BpeTrainer of the
 * package `tokenizers` with all 256 bytes as the initial alphabet and one special token.
 *
 * Each line of a text is divided into words. The most frequent pair of neighbouring tokens in all words becomes a token, and is
 * merged everywhere; of equally frequent pairs, that with the smallest ids. This repeats until the vocabulary is full, or no
 * pair is left. */
#ifndef TRAIN_LM_TOKENIZER_TRAIN_H
#define TRAIN_LM_TOKENIZER_TRAIN_H

#include "byte_map.h"
#include "tokenizer.h"

/* Adds the words of a valid UTF-8 text to `counts`: how often each word occurs. False if there is no memory. */
bool count_words(byte_map *counts, word_splitter *splitter, const char *name, const char *text, size_t bytes,
                 io_error *error);

/* Trains a vocabulary of at most `size` tokens: `end`, the 256 bytes, and merges. Writes tokenizer.json to a writer whose path is
 * `path`. Publish the writer afterwards. False if there is no memory, or the file cannot be written. */
bool tokenizer_train(const byte_map *counts, int32_t size, const char *end, const char *path, io_writer *writer,
                     io_error *error);

#endif
