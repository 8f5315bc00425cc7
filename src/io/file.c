/* SPDX-License-Identifier: Apache-2.0 */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "both formats are mapped and written as they lie in memory");

enum { SHOWN_PATH = 240, BUFFER_SIZE = 1 << 16, OPEN_ATTEMPTS = 8 };

/* ---- messages ----------------------------------------------------------------------------------------- */

bool io_fail(io_error *error, const char *path, const char *format, ...)
{
    const size_t length = strlen(path);
    const int prefix = snprintf(error->text, sizeof error->text, "%s%s: ", length > SHOWN_PATH ? "..." : "",
                                length > SHOWN_PATH ? path + length - SHOWN_PATH : path);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text + prefix, sizeof error->text - (size_t)prefix, format, arguments);
    va_end(arguments);
    for (char *c = error->text; *c != '\0'; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            *c = '?';
    return false;
}

/* ---- mapping ------------------------------------------------------------------------------------------ */

static const char *kind_of(mode_t mode)
{
    switch (mode & S_IFMT) {
    case S_IFDIR: return "a directory";
    case S_IFIFO: return "a pipe";
    case S_IFSOCK: return "a socket";
    default: return "a device";
    }
}

static bool map_descriptor(io_mapping *mapping, int fd, const char *path, io_error *error)
{
    struct stat information;
    if (fstat(fd, &information) != 0)
        return io_fail(error, path, "%s", strerror(errno));
    if (!S_ISREG(information.st_mode))
        return io_fail(error, path, "is %s, expected a regular file", kind_of(information.st_mode));
    *mapping = (io_mapping){(const unsigned char *)"", (size_t)information.st_size};
    if (mapping->size == 0)
        return true;
    void *bytes = mmap(NULL, mapping->size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED) {
        *mapping = (io_mapping){0};
        return io_fail(error, path, "cannot be mapped: %s", strerror(errno));
    }
    mapping->bytes = bytes;
    return true;
}

bool io_map(io_mapping *mapping, const char *path, io_error *error)
{
    *mapping = (io_mapping){0};
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC); /* a pipe must not block */
    if (fd < 0)
        return io_fail(error, path, "%s", strerror(errno));
    const bool good = map_descriptor(mapping, fd, path, error);
    close(fd);
    return good;
}

void io_unmap(io_mapping *mapping)
{
    if (mapping->size > 0)
        munmap((void *)mapping->bytes, mapping->size);
    *mapping = (io_mapping){0};
}

/* ---- arrays ------------------------------------------------------------------------------------------- */

static int64_t count_elements(const cot_tensor *tensor)
{
    int64_t elements = 1;
    for (int axis = 0; axis < tensor->rank; axis++)
        elements *= tensor->shape[axis];
    return elements;
}

bool io_array_bytes(const io_array *array, size_t *bytes)
{
    int64_t total = (int64_t)array->item_size;
    for (int axis = 0; axis < array->stored.rank; axis++) {
        const int64_t size = array->stored.shape[axis];
        if (__builtin_mul_overflow(total, size > 0 ? size : 1, &total) || total >= (int64_t)1 << 56)
            return false;
    }
    *bytes = (size_t)count_elements(&array->stored) * array->item_size;
    return true;
}

static uint64_t load_item(const unsigned char *from, size_t size, bool is_big_endian)
{
    uint64_t value = 0;
    for (size_t i = 0; i < size; i++)
        value |= (uint64_t)from[is_big_endian ? size - 1 - i : i] << (8 * i);
    return value;
}

/* Element after element in the order of the file: the strides stay what they are. */
static bool convert(const io_array *array, void *to, const char *path, const char *what, io_error *error)
{
    const unsigned char *from = array->stored.data;
    const int64_t elements = count_elements(&array->stored);
    const size_t size = cot_dtype_size(array->stored.dtype);
    for (int64_t i = 0; i < elements; i++) {
        const uint64_t value = load_item(from + (size_t)i * array->item_size, array->item_size, array->is_big_endian);
        if (array->item_size > size && (int64_t)value != (int32_t)value)
            return io_fail(error, path, "%s holds the int64 %" PRId64 " (element %" PRId64 "), which no i32 can be",
                           what, (int64_t)value, i);
        memcpy((char *)to + (size_t)i * size, &value, size); /* the low bytes come first */
    }
    return true;
}

bool io_serve(const io_array *array, const char *path, const char *what, cot_tensor *view, void **owned,
              io_error *error)
{
    *view = array->stored;
    *owned = NULL;
    const size_t size = cot_dtype_size(array->stored.dtype);
    if (array->item_size == size && !array->is_big_endian && (uintptr_t)array->stored.data % size == 0)
        return true;
    void *memory = calloc((size_t)count_elements(&array->stored) + 1, size);
    if (memory == NULL)
        return io_fail(error, path, "no memory to convert %s", what);
    if (!convert(array, memory, path, what, error)) {
        free(memory);
        return false;
    }
    view->data = *owned = memory;
    return true;
}

/* ---- the partial file --------------------------------------------------------------------------------- */

static void close_writer(io_writer *writer)
{
    if (writer->fd >= 0)
        close(writer->fd);
    free(writer->path);
    free(writer->partial);
    *writer = (io_writer){.fd = -1};
}

/* Opens PATH.partial and locks it. Its last owner may have renamed it between our opening and our locking: then what we
 * hold has become the published file, and we try again. */
static bool open_partial(io_writer *writer, io_error *error)
{
    for (int attempt = 0; attempt < OPEN_ATTEMPTS; attempt++) {
        struct stat held, named;
        writer->fd =
            open(writer->partial, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, (mode_t)0666);
        if (writer->fd < 0 || fstat(writer->fd, &held) != 0)
            return io_fail(error, writer->path, "cannot be written: %s", strerror(errno));
        if (!S_ISREG(held.st_mode))
            return io_fail(error, writer->partial, "is in the way: it is %s", kind_of(held.st_mode));
        if (flock(writer->fd, LOCK_EX | LOCK_NB) != 0)
            return io_fail(error, writer->path, "another process is writing it");
        if (lstat(writer->partial, &named) == 0 && named.st_dev == held.st_dev && named.st_ino == held.st_ino) {
            if (ftruncate(writer->fd, 0) == 0)
                return true;
            return io_fail(error, writer->path, "cannot be written: %s", strerror(errno));
        }
        close(writer->fd);
        writer->fd = -1;
    }
    return io_fail(error, writer->path, "other processes are writing it");
}

bool io_open(io_writer *writer, const char *path, io_error *error)
{
    struct stat there;
    *writer = (io_writer){.fd = -1};
    if (path[0] == '\0')
        return io_fail(error, "\"\"", "is no file name");
    if (stat(path, &there) == 0 && !S_ISREG(there.st_mode))
        return io_fail(error, path, "is %s, expected a regular file or none", kind_of(there.st_mode));
    writer->path = strdup(path);
    if (writer->path == NULL || asprintf(&writer->partial, "%s.partial", path) < 0) {
        free(writer->path);
        *writer = (io_writer){.fd = -1};
        return io_fail(error, path, "no memory");
    }
    if (open_partial(writer, error))
        return true;
    close_writer(writer);
    return false;
}

bool io_write(io_writer *writer, const void *data, size_t bytes, io_error *error)
{
    for (size_t done = 0; done < bytes;) {
        const ssize_t written = write(writer->fd, (const char *)data + done, bytes - done);
        if (written < 0 && errno != EINTR)
            return io_fail(error, writer->path, "cannot be written: %s", strerror(errno));
        done += written > 0 ? (size_t)written : 0;
    }
    return true;
}

static bool is_row_major(const cot_tensor *tensor)
{
    int64_t stride = 1;
    for (int axis = tensor->rank - 1; axis >= 0; axis--) {
        if (tensor->shape[axis] != 1 && tensor->stride[axis] != stride)
            return false;
        stride *= tensor->shape[axis];
    }
    return true;
}

/* Goes on to the next row, a run along the last axis, in row-major order: moves `position`, false after the last. */
static bool next_row(const cot_tensor *tensor, int64_t *index, int64_t *position)
{
    for (int axis = tensor->rank - 2; axis >= 0; axis--) {
        *position += tensor->stride[axis];
        if (++index[axis] < tensor->shape[axis])
            return true;
        *position -= tensor->shape[axis] * tensor->stride[axis];
        index[axis] = 0;
    }
    return false;
}

bool io_write_tensor(io_writer *writer, const cot_tensor *tensor, io_error *error)
{
    const size_t size = cot_dtype_size(tensor->dtype);
    const int64_t elements = count_elements(tensor);
    if (elements == 0)
        return true;
    if (is_row_major(tensor))
        return io_write(writer, tensor->data, (size_t)elements * size, error);
    char buffer[BUFFER_SIZE];
    size_t filled = 0;
    int64_t index[COT_MAX_RANK] = {0}, position = 0;
    const int last = tensor->rank - 1;
    do {
        for (int64_t i = 0; i < tensor->shape[last]; i++) {
            memcpy(buffer + filled, (char *)tensor->data + (position + i * tensor->stride[last]) * (int64_t)size, size);
            filled += size;
            if (filled == sizeof buffer) {
                if (!io_write(writer, buffer, filled, error))
                    return false;
                filled = 0;
            }
        }
    } while (next_row(tensor, index, &position));
    return io_write(writer, buffer, filled, error);
}

void io_abandon(io_writer *writer)
{
    if (writer->fd >= 0)
        unlink(writer->partial);
    close_writer(writer);
}

/* ---- publishing --------------------------------------------------------------------------------------- */

/* With others to follow, exchanges the two names, so that it can be undone; where there is nothing at `path` yet, or on
 * a file system that cannot exchange, renames. */
static bool put_in_place(io_writer *writer, bool is_alone, io_error *error)
{
    writer->is_exchanged =
        !is_alone && renameat2(AT_FDCWD, writer->partial, AT_FDCWD, writer->path, RENAME_EXCHANGE) == 0;
    if (!writer->is_exchanged && rename(writer->partial, writer->path) != 0)
        return io_fail(error, writer->path, "cannot be put in place: %s", strerror(errno));
    return true;
}

static void take_back(const io_writer *writer)
{
    const unsigned flags = writer->is_exchanged ? RENAME_EXCHANGE : RENAME_NOREPLACE;
    renameat2(AT_FDCWD, writer->path, AT_FDCWD, writer->partial, flags);
}

/* A rename lasts once its folder is on the disk; some file systems cannot sync one, and say EINVAL. */
static bool sync_folder(const char *path, io_error *error)
{
    char folder[4096];
    const char *slash = strrchr(path, '/');
    const int length = slash == NULL ? 1 : slash == path ? 1 : (int)(slash - path);
    snprintf(folder, sizeof folder, "%.*s", length, slash == NULL ? "." : path);
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool synced = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL);
    const int cause = errno;
    if (fd >= 0)
        close(fd);
    return synced || io_fail(error, path, "its folder cannot be synced: %s", strerror(cause));
}

bool io_publish(io_writer *writers, int count, io_error *error)
{
    bool good = true;
    int placed = 0;
    for (int i = 0; i < count && good; i++)
        if (fsync(writers[i].fd) != 0)
            good = io_fail(error, writers[i].path, "cannot be written: %s", strerror(errno));
    while (good && placed < count && (good = put_in_place(&writers[placed], count == 1, error)))
        placed++;
    while (!good && placed > 0)
        take_back(&writers[--placed]);
    for (int i = 0; i < count; i++) {
        if (!good || writers[i].is_exchanged)
            unlink(writers[i].partial);
        good = good && sync_folder(writers[i].path, error);
        close_writer(&writers[i]);
    }
    return good;
}
