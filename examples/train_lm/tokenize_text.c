/* SPDX-License-Identifier: Apache-2.0
 *
 * tokenize_text: writes a token file for train_lm --tokens from text files. */
#include "tokenizer_train.h"
#include "tokens.h"

#include <argp.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    EXIT_BAD_INPUT = 2,
    LEAST_TOKENS = 257,
    MOST_TOKENS = 1 << 24,
    KEY_TOKENIZER = 256,
    KEY_OUT,
    KEY_TRAIN,
    KEY_END
};

typedef struct options {
    const char *tokenizer, *out, *end;
    int32_t train; /* size of a vocabulary to train, or 0 */
    char **files;
    int file_count;
} options;

static const struct argp_option OPTIONS[] = {
    {"tokenizer", KEY_TOKENIZER, "FILE", 0, "A tokenizer.json; with --train it is written", 0},
    {"out", KEY_OUT, "FILE", 0, "The token file", 0},
    {"train", KEY_TRAIN, "N", 0, "First train a tokenizer with at most N tokens on the files", 0},
    {"end", KEY_END, "TEXT", 0, "The token at the end of each file (<|endoftext|>)", 0},
    {0},
};

/* Prints one line and returns the exit status. */
static int fail(const io_error *error)
{
    fprintf(stderr, "tokenize_text: %s\n", error->text);
    return error->out_of_memory ? EXIT_FAILURE : EXIT_BAD_INPUT;
}

static _Noreturn void refuse(const char *option, const char *text, const char *expected)
{
    fprintf(stderr, "tokenize_text: %s is \"%s\", expected %s\n", option, text, expected);
    exit(EXIT_BAD_INPUT);
}

static error_t parse_option(int key, char *text, struct argp_state *state)
{
    options *o = state->input;
    char *end;
    long number;
    switch (key) {
    case KEY_TOKENIZER: o->tokenizer = text; return 0;
    case KEY_OUT: o->out = text; return 0;
    case KEY_END: o->end = text[0] != '\0' ? text : (refuse("--end", text, "a text"), NULL); return 0;
    case KEY_TRAIN:
        errno = 0;
        number = strtol(text, &end, 10);
        if (errno != 0 || *end != '\0' || end == text || number < LEAST_TOKENS || number > MOST_TOKENS)
            refuse("--train", text, "an integer from 257 to 16777216");
        o->train = (int32_t)number;
        return 0;
    case ARGP_KEY_ARG: o->files[o->file_count++] = text; return 0;
    case ARGP_KEY_END:
        if (o->tokenizer == NULL || o->out == NULL || o->file_count == 0) {
            fprintf(stderr, "tokenize_text: %s is missing\n",
                    o->tokenizer == NULL ? "--tokenizer"
                    : o->out == NULL     ? "--out"
                                         : "FILE");
            exit(EXIT_BAD_INPUT);
        }
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp PARSER = {
    .options = OPTIONS,
    .parser = parse_option,
    .args_doc = "FILE...",
    .doc = "Writes a token file for train_lm --tokens from text files, with a byte-level BPE in a tokenizer.json.",
};

/* ---- texts --------------------------------------------------------------------------------------------------------- */

/* A mapped file as valid UTF-8. */
typedef struct text_file {
    io_mapping file;
    const char *text;
    size_t bytes;
} text_file;

static bool open_text(text_file *t, const char *path, io_error *error)
{
    if (!io_map(&t->file, path, error))
        return false;
    if (utf8_repair((const char *)t->file.bytes, t->file.size, &t->text, &t->bytes))
        return true;
    io_unmap(&t->file);
    return io_no_memory(error, path, "text");
}

static void close_text(text_file *t)
{
    if (t->text != (const char *)t->file.bytes)
        free((void *)(uintptr_t)t->text);
    io_unmap(&t->file);
}

/* ---- the two steps -------------------------------------------------------------------------------------------------- */

static bool train(const options *o, io_writer *writer, io_error *error)
{
    byte_map counts = {0};
    word_splitter *splitter = word_splitter_create(WORDS_OF_GPT2, o->tokenizer, error);
    bool good = splitter != NULL;
    for (int i = 0; good && i < o->file_count; i++) {
        text_file t;
        good = open_text(&t, o->files[i], error);
        if (good) {
            good = count_words(&counts, splitter, o->files[i], t.text, t.bytes, error);
            close_text(&t);
        }
    }
    good = good && tokenizer_train(&counts, o->train, o->end, o->tokenizer, writer, error);
    word_splitter_destroy(splitter);
    byte_map_free(&counts);
    return good;
}

/* Appends tokens to the file, in the width of its format. */
static bool write_tokens(io_writer *writer, const token_ids *ids, bool wide, io_error *error)
{
    enum { PIECE = 1 << 15 };
    uint16_t narrow[PIECE];
    if (wide)
        return io_write(writer, ids->ids, ids->count * sizeof *ids->ids, error);
    for (size_t i = 0, count; i < ids->count; i += count) {
        count = ids->count - i < PIECE ? ids->count - i : PIECE;
        for (size_t j = 0; j < count; j++)
            narrow[j] = (uint16_t)ids->ids[i + j];
        if (!io_write(writer, narrow, count * sizeof *narrow, error))
            return false;
    }
    return true;
}

static bool encode_file(tokenizer *t, const char *path, int32_t end, token_ids *ids, io_error *error)
{
    text_file text;
    if (!open_text(&text, path, error))
        return false;
    ids->count = 0;
    bool good = tokenizer_encode(t, path, text.text, text.bytes, ids, error);
    if (good && !token_ids_add(ids, end))
        good = io_no_memory(error, path, "tokens");
    close_text(&text);
    return good;
}

/* Writes the token file. Its header is written last, when the number of tokens is known. */
static bool encode(const options *o, tokenizer *t, io_writer *writer, io_error *error)
{
    const int32_t end = tokenizer_find(t, o->end);
    const bool wide = tokenizer_size(t) > 1 << 16;
    token_file_header header = {{0}};
    uint64_t count = 0;
    token_ids ids = {0};
    if (end < 0)
        return io_fail(error, o->tokenizer, "has no token \"%s\" (--end)", o->end);
    bool good = io_write(writer, &header, sizeof header, error);
    for (int i = 0; good && i < o->file_count; i++) {
        good = encode_file(t, o->files[i], end, &ids, error) && write_tokens(writer, &ids, wide, error);
        count += ids.count;
    }
    free(ids.ids);
    if (good && count > UINT32_MAX)
        return io_fail(error, o->out, "%llu tokens, a token file has at most %u", (unsigned long long)count,
                       UINT32_MAX);
    header = token_file_header_of(wide, (uint32_t)count);
    if (good && pwrite(writer->fd, &header, sizeof header, 0) != (ssize_t)sizeof header)
        return io_fail(error, o->out, "%s", strerror(errno));
    if (good)
        printf("%llu tokens, %d in the vocabulary\n", (unsigned long long)count, tokenizer_size(t));
    return good;
}

int main(int argc, char **argv)
{
    options o = {.end = "<|endoftext|>", .files = calloc((size_t)argc, sizeof *o.files)};
    io_error error = {{0}, false};
    io_writer writers[2] = {{.fd = -1}, {.fd = -1}}; /* tokens, tokenizer */
    tokenizer *t = NULL;
    if (o.files == NULL ||
        argp_parse(&PARSER, argc, argv, 0, NULL, &o) != 0) { /* argp_parse fails only without memory */
        fputs("tokenize_text: out of memory\n", stderr);
        return EXIT_FAILURE;
    }
    bool good = io_open(&writers[0], o.out, &error);
    if (good && o.train > 0)
        good = io_open(&writers[1], o.tokenizer, &error) && train(&o, &writers[1], &error);
    if (good) {
        t = tokenizer_open(o.train > 0 ? writers[1].partial : o.tokenizer, &error);
        good = t != NULL && encode(&o, t, &writers[0], &error);
    }
    tokenizer_close(t);
    free(o.files);
    if (good && io_publish(writers, o.train > 0 ? 2 : 1, &error))
        return EXIT_SUCCESS;
    for (int i = 0; !good && i < 2; i++)
        io_abandon(&writers[i]);
    return fail(&error);
}
