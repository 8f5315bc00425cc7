/* SPDX-License-Identifier: Apache-2.0 */
#include "tokens.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER_BYTES = sizeof(token_file_header) };

/* What a header begins with, and the bytes of a token. */
static const struct {
    int32_t magic, version;
    int size;
} FORMATS[] = {{20240520, 1, 2}, {20240801, 7, 4}};

/* ---- lists -------------------------------------------------------------------------------------------- */

bool token_list_add(token_list *list, token_segment segment)
{
    token_segment *grown = realloc(list->segments, (size_t)(list->count + 1) * sizeof *grown);
    if (grown == NULL)
        return false;
    list->segments = grown;
    list->segments[list->count++] = segment;
    return true;
}

void token_list_free(token_list *list)
{
    free(list->segments);
    *list = (token_list){0};
}

void token_segment_copy(const token_segment *segment, int64_t first, int64_t count, int32_t *out)
{
    const uint8_t *bytes = segment->data;
    for (int64_t i = first; i < first + count; i++) {
        uint16_t half;
        uint32_t word;
        if (segment->size == 1) {
            word = bytes[i];
        } else if (segment->size == 2) {
            memcpy(&half, bytes + 2 * i, sizeof half);
            word = half;
        } else {
            memcpy(&word, bytes + 4 * i, sizeof word);
        }
        *out++ = word <= INT32_MAX ? (int32_t)word : INT32_MAX; /* larger than any vocabulary */
    }
}

token_segment token_segment_part(const token_segment *segment, int64_t first, int64_t count)
{
    return (token_segment){(const uint8_t *)segment->data + first * segment->size, count, segment->size};
}

static int64_t windows_of(const token_segment *segment, int64_t context, int64_t spare)
{
    return segment->count > spare ? (segment->count - spare) / context : 0;
}

int64_t token_list_windows(const token_list *list, int64_t context, int64_t spare)
{
    int64_t windows = 0;
    for (int i = 0; i < list->count; i++)
        windows += windows_of(&list->segments[i], context, spare);
    return windows;
}

void token_list_window(const token_list *list, int64_t context, int64_t spare, int64_t index, int64_t offset,
                       int32_t *inputs, int32_t *targets)
{
    const token_segment *segment = list->segments;
    for (; index >= windows_of(segment, context, spare); segment++)
        index -= windows_of(segment, context, spare);
    token_segment_copy(segment, offset + index * context, context, inputs);
    token_segment_copy(segment, offset + index * context + 1, context, targets);
}

/* ---- files -------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 3, 4))) static bool fail(char *message, size_t size, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, size, format, arguments);
    va_end(arguments);
    return false;
}

token_file_header token_file_header_of(bool wide, uint32_t count)
{
    return (token_file_header){{FORMATS[wide].magic, FORMATS[wide].version, (int32_t)count}};
}

/* Maps the whole file. */
static bool map(token_file *file, int descriptor, const char *path, char *message, size_t size)
{
    struct stat information;
    if (fstat(descriptor, &information) != 0)
        return fail(message, size, "%s: %s", path, strerror(errno));
    if (!S_ISREG(information.st_mode))
        return fail(message, size, "%s: not a file", path);
    if (information.st_size < HEADER_BYTES)
        return fail(message, size, "%s: %lld bytes, expected the header of a token file (%d bytes)", path,
                    (long long)information.st_size, HEADER_BYTES);
    void *memory = mmap(NULL, (size_t)information.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (memory == MAP_FAILED)
        return fail(message, size, "%s: %s", path, strerror(errno));
    file->memory = memory;
    file->bytes = (size_t)information.st_size;
    return true;
}

static bool read_header(token_file *file, const char *path, char *message, size_t size)
{
    int32_t header[3];
    memcpy(header, file->memory, sizeof header);
    const uint32_t count = (uint32_t)header[2];
    for (size_t i = 0; i < sizeof FORMATS / sizeof *FORMATS; i++)
        if (header[0] == FORMATS[i].magic && header[1] == FORMATS[i].version)
            file->segment = (token_segment){(uint8_t *)file->memory + HEADER_BYTES, count, FORMATS[i].size};
    if (file->segment.size == 0)
        return fail(message, size,
                    "%s: is no token file: it begins with %d and %d, expected 20240520 and 1, or 20240801 and 7", path,
                    header[0], header[1]);
    const uint64_t expected = (uint64_t)count * (uint64_t)file->segment.size, found = file->bytes - HEADER_BYTES;
    if (found != expected)
        return fail(message, size, "%s: %llu bytes of tokens, expected %llu for the %u tokens of its header", path,
                    (unsigned long long)found, (unsigned long long)expected, count);
    return true;
}

bool token_file_open(token_file *file, const char *path, char *message, size_t size)
{
    *file = (token_file){0};
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return fail(message, size, "%s: %s", path, strerror(errno));
    const bool mapped = map(file, descriptor, path, message, size);
    close(descriptor);
    if (mapped && read_header(file, path, message, size))
        return true;
    token_file_close(file);
    return false;
}

void token_file_close(token_file *file)
{
    if (file->memory != NULL)
        munmap(file->memory, file->bytes);
    *file = (token_file){0};
}
