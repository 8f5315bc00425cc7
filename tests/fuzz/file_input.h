/* SPDX-License-Identifier: Apache-2.0
 * file_input.h: common parts of the fuzzers of the two file formats. An input is the bytes of a file. If its first
 * byte is 'H', the input is a header with a terminating zero byte, followed by data. The harness then adds the other
 * parts of the format, so that a changed header is not refused for its length alone. */
#ifndef COT_TESTS_FUZZ_FILE_INPUT_H
#define COT_TESTS_FUZZ_FILE_INPUT_H

#include "io/file.h"

#include <stdio.h>
#include <stdlib.h>

#define REQUIRE(condition, ...)                     \
    do {                                            \
        if (!(condition)) {                         \
            fprintf(stderr, __VA_ARGS__);           \
            fprintf(stderr, " (%s)\n", #condition); \
            abort();                                \
        }                                           \
    } while (0)

/* The bytes of a file. They end at the end of their allocation, so that AddressSanitizer detects a read beyond. */
typedef struct file_input {
    unsigned char *memory, *bytes;
    size_t size;
} file_input;

/* front: the `front_size` bytes before the header. Their last `length_size` bytes receive the length of the header. */
static inline file_input make_file(const uint8_t *data, size_t size, const void *front, size_t front_size,
                                   size_t length_size)
{
    file_input file;
    const size_t shift = size % 8; /* varies the alignment */
    const bool as_is = size == 0 || data[0] != 'H';
    const uint8_t *zero = as_is ? NULL : memchr(data, 0, size);
    const size_t header = as_is ? 0 : (zero != NULL ? (size_t)(zero - data) : size) - 1;
    const size_t rest = as_is ? size : size - 1 - header - (zero != NULL);
    file.size = as_is ? size : front_size + header + rest;
    file.memory = malloc(file.size + shift);
    file.bytes = file.memory + shift;
    if (as_is) {
        if (size > 0)
            memcpy(file.bytes, data, size);
        return file;
    }
    memcpy(file.bytes, front, front_size);
    for (size_t i = 0; i < length_size; i++)
        file.bytes[front_size - length_size + i] = (unsigned char)(header >> (8 * i));
    memcpy(file.bytes + front_size, data + 1, header);
    memcpy(file.bytes + front_size + header, data + size - rest, rest);
    return file;
}

/* Requires that a refusal is one line that begins with the file's name. */
static inline void require_refusal(const io_error *error, const char *name)
{
    REQUIRE(strncmp(error->text, name, strlen(name)) == 0 && strlen(error->text) > strlen(name) + 2,
            "the message is \"%s\"", error->text);
    for (const char *c = error->text; *c != '\0'; c++)
        REQUIRE((unsigned char)*c >= ' ' && *c != 0x7f, "the message has the byte %d", *c);
}

/* Reads every element of the view. */
static inline void read_view(const cot_tensor *view, size_t file_size)
{
    const size_t size = cot_dtype_size(view->dtype);
    int64_t elements = 1;
    volatile unsigned char sum = 0;
    REQUIRE(size > 0 && view->rank >= 0 && view->rank <= COT_MAX_RANK, "dtype %d, rank %d", (int)view->dtype,
            (int)view->rank);
    for (int axis = 0; axis < view->rank; axis++) {
        REQUIRE(view->shape[axis] >= 0, "a negative size");
        elements *= view->shape[axis];
    }
    REQUIRE(elements >= 0 && (uint64_t)elements <= file_size, "%lld elements in %zu bytes", (long long)elements,
            file_size);
    REQUIRE(elements == 0 || (uintptr_t)view->data % size == 0, "misaligned data");
    for (int64_t n = 0; n < elements; n++) {
        int64_t position = 0, left = n;
        for (int axis = view->rank - 1; axis >= 0; axis--) {
            position += left % view->shape[axis] * view->stride[axis];
            left /= view->shape[axis];
        }
        for (size_t byte = 0; byte < size; byte++)
            sum = (unsigned char)(sum + ((const unsigned char *)view->data)[(size_t)position * size + byte]);
    }
}

#endif
