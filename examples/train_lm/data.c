/* SPDX-License-Identifier: Apache-2.0 */
#include "data.h"

#include "hash.h"
#include "random.h"

#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    HELD_OUT_DIVISOR = 10,
    MAX_FOLDER_DEPTH = 16,
    MAX_PATH_LENGTH = 4096,
    FIRST_CAPACITY = 1 << 16,
    HASH_BLOCK = 4096,
    HASH_BLOCKS = 256
};

static const char LICENCE_TEXTS[] = "/usr/share/common-licenses";

/* ---- files -------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static bool fail(corpus *c, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(c->error, sizeof c->error, format, arguments);
    va_end(arguments);
    return false;
}

/* For a system call that has just failed. */
static bool fail_with_errno(corpus *c, const char *path)
{
    c->out_of_memory = errno == ENOMEM;
    return fail(c, "%s: %s", path, strerror(errno));
}

/* Makes sure that `extra` bytes can be appended. False if there is no memory. */
static bool reserve(byte_string *s, int64_t extra)
{
    int64_t capacity = s->capacity > 0 ? s->capacity : FIRST_CAPACITY;
    while (capacity - s->count < extra)
        capacity *= 2;
    if (capacity == s->capacity)
        return true;
    uint8_t *grown = realloc(s->bytes, (size_t)capacity);
    if (grown == NULL)
        return false;
    s->bytes = grown;
    s->capacity = capacity;
    return true;
}

/* Appends the rest of a stream. False with errno set on failure. */
static bool read_all(FILE *file, byte_string *s)
{
    while (reserve(s, FIRST_CAPACITY)) {
        s->count += (int64_t)fread(s->bytes + s->count, 1, FIRST_CAPACITY, file);
        if (ferror(file))
            return false;
        if (feof(file))
            return true;
    }
    return false;
}

static bool move_tail(byte_string *from, int64_t begin, byte_string *to)
{
    const int64_t count = from->count - begin;
    if (!reserve(to, count))
        return false;
    memcpy(to->bytes + to->count, from->bytes + begin, (size_t)count);
    to->count += count;
    from->count = begin;
    return true;
}

bool corpus_add_file(corpus *c, const char *path)
{
    const int64_t begin = c->training.count;
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return fail_with_errno(c, path);
    errno = 0;
    const bool complete = read_all(file, &c->training) || fail_with_errno(c, path);
    fclose(file);
    if (!complete)
        return false;
    const int64_t count = c->training.count - begin;
    if (count == 0)
        return fail(c, "%s: the file is empty", path);
    if (!move_tail(&c->training, c->training.count - count / HELD_OUT_DIVISOR, &c->validation))
        return fail_with_errno(c, path);
    c->files++;
    return true;
}

void corpus_destroy(corpus *c)
{
    free(c->training.bytes);
    free(c->validation.bytes);
    for (int64_t i = 0; c->token_files != NULL && i < c->files; i++)
        token_file_close(&c->token_files[i]);
    free(c->token_files);
    token_list_free(&c->training_tokens);
    token_list_free(&c->validation_tokens);
    *c = (corpus){0};
}

/* ---- the default text --------------------------------------------------------------------------------- */

static bool is_source_name(const char *name)
{
    static const char *const endings[] = {".c", ".h", ".cu", ".cuh", ".py", ".md", ".def", ".txt", "Makefile"};
    const size_t length = strlen(name);
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
        const size_t ending = strlen(endings[i]);
        if (length >= ending && strcmp(name + length - ending, endings[i]) == 0)
            return true;
    }
    return false;
}

/* Sorts by bytes, independent of the locale. */
static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static bool add_folder(corpus *c, const char *folder, bool every_name, int depth);

/* Adds one entry of a folder. Entries that are not source text are skipped. */
static bool add_entry(corpus *c, const char *folder, const char *name, bool every_name, int depth)
{
    char path[MAX_PATH_LENGTH];
    struct stat information;
    if (name[0] == '.' || snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path)
        return true;
    if (lstat(path, &information) != 0)
        return true;
    if (S_ISDIR(information.st_mode))
        return strcmp(name, "build") == 0 || depth == MAX_FOLDER_DEPTH || add_folder(c, path, every_name, depth + 1);
    if (!S_ISREG(information.st_mode) || information.st_size == 0 || !(every_name || is_source_name(name)))
        return true;
    return corpus_add_file(c, path);
}

/* A folder that does not exist adds nothing. */
static bool add_folder(corpus *c, const char *folder, bool every_name, int depth)
{
    struct dirent **entries;
    const int count = scandir(folder, &entries, NULL, by_name);
    if (count < 0)
        return errno != ENOMEM || fail_with_errno(c, folder);
    bool good = true;
    for (int i = 0; i < count; i++) {
        good = good && add_entry(c, folder, entries[i]->d_name, every_name, depth);
        free(entries[i]);
    }
    free(entries);
    return good;
}

bool corpus_add_default(corpus *c, const char *source_dir)
{
    if (!add_folder(c, LICENCE_TEXTS, true, 0) || !add_folder(c, source_dir, false, 0))
        return false;
    return c->files > 0 || fail(c, "no text in %s nor in --source-dir %s", LICENCE_TEXTS, source_dir);
}

/* ---- token files -------------------------------------------------------------------------------------- */

static bool no_memory(corpus *c)
{
    errno = ENOMEM;
    return fail_with_errno(c, "the tokens");
}

static bool open_tokens(corpus *c, const char *path)
{
    token_file *grown = realloc(c->token_files, (size_t)(c->files + 1) * sizeof *grown);
    if (grown == NULL)
        return no_memory(c);
    c->token_files = grown;
    if (!token_file_open(&c->token_files[c->files], path, c->error, sizeof c->error))
        return false;
    c->files++;
    return true;
}

bool corpus_add_tokens(corpus *c, const char *path)
{
    if (!open_tokens(c, path))
        return false;
    const token_segment *all = &c->token_files[c->files - 1].segment;
    const int64_t held_out = all->count / HELD_OUT_DIVISOR, count = all->count - held_out;
    if (all->count == 0)
        return fail(c, "%s: the file has no tokens", path);
    return (token_list_add(&c->training_tokens, token_segment_part(all, 0, count)) &&
            token_list_add(&c->validation_tokens, token_segment_part(all, count, held_out))) ||
           no_memory(c);
}

bool corpus_add_validation(corpus *c, const char *path)
{
    for (int i = 0; i < c->training_tokens.count; i++)
        c->training_tokens.segments[i] = c->token_files[i].segment;
    token_list_free(&c->validation_tokens);
    return open_tokens(c, path) &&
           (token_list_add(&c->validation_tokens, c->token_files[c->files - 1].segment) || no_memory(c));
}

bool corpus_finish(corpus *c)
{
    const token_segment training = {c->training.bytes, c->training.count, 1},
                        validation = {c->validation.bytes, c->validation.count, 1};
    return c->token_files != NULL ||
           (token_list_add(&c->training_tokens, training) && token_list_add(&c->validation_tokens, validation)) ||
           no_memory(c);
}

int64_t corpus_count(const token_list *list)
{
    int64_t count = 0;
    for (int i = 0; i < list->count; i++)
        count += list->segments[i].count;
    return count;
}

/* The hash of up to HASH_BLOCKS blocks at equal distances, and of the size. */
static uint64_t hash_sample(uint64_t hash, const token_segment *segment)
{
    const uint8_t *bytes = segment->data;
    const int64_t size = segment->count * segment->size, blocks = (size + HASH_BLOCK - 1) / HASH_BLOCK,
                  count = blocks < HASH_BLOCKS ? blocks : HASH_BLOCKS;
    hash = hash_bytes(hash, &size, sizeof size);
    for (int64_t i = 0; i < count; i++) {
        const int64_t begin = i * blocks / count * HASH_BLOCK, left = size - begin;
        hash = hash_bytes(hash, bytes + begin, (size_t)(left < HASH_BLOCK ? left : HASH_BLOCK));
    }
    return hash;
}

uint64_t corpus_hash(const corpus *c)
{
    uint64_t hash = HASH_START;
    for (int i = 0; c->token_files != NULL && i < c->training_tokens.count; i++)
        hash = hash_sample(hash, &c->training_tokens.segments[i]);
    for (int i = 0; c->token_files != NULL && i < c->validation_tokens.count; i++)
        hash = hash_sample(hash, &c->validation_tokens.segments[i]);
    if (c->training.count > 0)
        hash = hash_bytes(hash, c->training.bytes, (size_t)c->training.count);
    if (c->validation.count > 0)
        hash = hash_bytes(hash, c->validation.bytes, (size_t)c->validation.count);
    return hash;
}

/* ---- batches ------------------------------------------------------------------------------------------ */

int64_t sampler_tokens_needed(int64_t batch, int64_t context)
{
    return (batch + 1) * context;
}

bool sampler_create(sampler *s, const token_list *tokens, int64_t context, uint64_t seed)
{
    /* An offset of up to context-1 and the last target must fit behind the last window of a segment. */
    *s = (sampler){.tokens = tokens,
                   .context = context,
                   .windows = token_list_windows(tokens, context, context),
                   .seed = seed,
                   .epoch = -1};
    s->order = calloc((size_t)s->windows, sizeof *s->order);
    return s->order != NULL;
}

void sampler_destroy(sampler *s)
{
    free(s->order);
    *s = (sampler){0};
}

static void start_epoch(sampler *s, int64_t epoch)
{
    random_stream stream = random_start(s->seed, (uint64_t)epoch);
    s->epoch = epoch;
    s->offset = random_below(&stream, s->context);
    for (int64_t i = 0; i < s->windows; i++) {
        const int64_t j = random_below(&stream, i + 1);
        s->order[i] = s->order[j];
        s->order[j] = i;
    }
}

void sampler_batch(sampler *s, int64_t step, int64_t batch, int32_t *inputs, int32_t *targets)
{
    for (int64_t b = 0; b < batch; b++) {
        const int64_t number = step * batch + b;
        if (number / s->windows != s->epoch)
            start_epoch(s, number / s->windows);
        token_list_window(s->tokens, s->context, s->context, s->order[number % s->windows], s->offset,
                          inputs + b * s->context, targets + b * s->context);
    }
}
