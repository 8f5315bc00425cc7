/* SPDX-License-Identifier: Apache-2.0
 * io_folder.h: common parts of the tests of src/io: a temporary folder, emptied after each test, and memory images. */
#ifndef COT_TESTS_IO_FOLDER_H
#define COT_TESTS_IO_FOLDER_H

#include "support.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[64];

static inline int make_folder(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/cotangent-io-XXXXXX");
    return mkdtemp(folder) == NULL;
}

/* Counts the names in the folder that do not begin with ".". Writes them to `names`, separated by spaces. */
static inline int list_folder(char *names, size_t size)
{
    DIR *directory = opendir(folder);
    int count = 0;
    names[0] = '\0';
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        if (entry->d_name[0] == '.')
            continue;
        if (count++ > 0)
            strncat(names, " ", size - strlen(names) - 1);
        strncat(names, entry->d_name, size - strlen(names) - 1);
    }
    closedir(directory);
    return count;
}

static inline const char *in_folder(const char *name)
{
    static char paths[4][160];
    static int next;
    next = (next + 1) % 4;
    snprintf(paths[next], sizeof paths[next], "%s/%s", folder, name);
    return paths[next];
}

static inline int empty_folder(void **state)
{
    (void)state;
    DIR *directory = opendir(folder);
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;)
        if (entry->d_name[0] != '.' && unlinkat(dirfd(directory), entry->d_name, 0) != 0)
            unlinkat(dirfd(directory), entry->d_name, AT_REMOVEDIR);
    return closedir(directory);
}

static inline int remove_folder(void **state)
{
    empty_folder(state);
    return rmdir(folder);
}

static inline void write_bytes(const char *path, const void *bytes, size_t size)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static inline size_t read_bytes(const char *path, void *bytes, size_t size)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    const size_t bytes_read = fread(bytes, 1, size, file);
    fclose(file);
    return bytes_read;
}

#define IN_FOLDER(test) cmocka_unit_test_teardown(test, empty_folder)

/* A file in a separate allocation, so that the sanitizer detects a read beyond its end. */
typedef struct image {
    unsigned char *bytes;
    size_t size;
} image;

/* Builds a file image: the length of the header in `width` bytes at offset `at`, then the header and the data. The
 * caller writes the bytes before `at`. */
static inline image image_of(size_t at, size_t width, const char *header, const void *data, size_t size)
{
    const size_t length = strlen(header), begin = at + width;
    image i = {malloc(begin + length + size), begin + length + size};
    for (size_t b = 0; b < width; b++)
        i.bytes[at + b] = (unsigned char)((uint64_t)length >> (8 * b));
    memcpy(i.bytes + begin, header, length);
    if (size > 0)
        memcpy(i.bytes + begin + length, data, size);
    return i;
}

#endif
