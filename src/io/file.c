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

enum { MAX_PRINTED_PATH = 240, BUFFER_SIZE = 1 << 16, OPEN_ATTEMPTS = 8 };

/* ---- messages ----------------------------------------------------------------------------------------- */

static void keep_on_one_line(io_error *error)
{
    for (char *c = error->text; *c != '\0'; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            *c = '?';
}

bool io_fail(io_error *error, const char *path, const char *format, ...)
{
    error->out_of_memory = false;
    const size_t length = strlen(path);
    const int prefix = snprintf(error->text, sizeof error->text, "%s%s: ", length > MAX_PRINTED_PATH ? "..." : "",
                                length > MAX_PRINTED_PATH ? path + length - MAX_PRINTED_PATH : path);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text + prefix, sizeof error->text - (size_t)prefix, format, arguments);
    va_end(arguments);
    keep_on_one_line(error);
    return false;
}

bool io_no_memory(io_error *error, const char *path, const char *what)
{
    io_fail(error, path, "out of memory (%s)", what);
    error->out_of_memory = true;
    return false;
}

/* Fails with errno, which the last system call has set. */
static bool fail_with_errno(io_error *error, const char *path, const char *what)
{
    const int error_number = errno;
    return error_number == ENOMEM ? io_no_memory(error, path, what)
                                  : io_fail(error, path, "%s: %s", what, strerror(error_number));
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
        return fail_with_errno(error, path, "cannot be mapped");
    }
    mapping->bytes = bytes;
    return true;
}

bool io_map(io_mapping *mapping, const char *path, io_error *error)
{
    *mapping = (io_mapping){0};
    const int fd =
        open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC); /* O_NONBLOCK: opening a pipe must not wait */
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

static uint64_t load_item(const unsigned char *bytes, size_t size, bool is_big_endian)
{
    uint64_t value = 0;
    for (size_t i = 0; i < size; i++)
        value |= (uint64_t)bytes[is_big_endian ? size - 1 - i : i] << (8 * i);
    return value;
}

/* Converts the elements in the file's order, so the strides do not change. */
static bool convert(const io_array *array, void *target, const char *path, const char *what, io_error *error)
{
    const unsigned char *source = array->stored.data;
    const int64_t elements = count_elements(&array->stored);
    const size_t size = cot_dtype_size(array->stored.dtype);
    for (int64_t i = 0; i < elements; i++) {
        const uint64_t value = load_item(source + (size_t)i * array->item_size, array->item_size, array->is_big_endian);
        if (array->item_size > size && (int64_t)value != (int32_t)value)
            return io_fail(error, path, "%s holds the int64 %" PRId64 " (element %" PRId64 "), which no i32 can be",
                           what, (int64_t)value, i);
        memcpy((char *)target + (size_t)i * size, &value, size); /* little-endian: the low bytes come first */
    }
    return true;
}

bool io_view_array(const io_array *array, const char *path, const char *what, cot_tensor *view, void **owned,
                   io_error *error)
{
    *view = array->stored;
    *owned = NULL;
    const size_t size = cot_dtype_size(array->stored.dtype);
    if (array->item_size == size && !array->is_big_endian && (uintptr_t)array->stored.data % size == 0)
        return true;
    void *memory = calloc((size_t)count_elements(&array->stored) + 1, size);
    if (memory == NULL)
        return io_no_memory(error, path, "to convert it");
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
    free(writer->backup);
    *writer = (io_writer){.fd = -1};
}

static bool is_same_file(int fd, const char *name)
{
    struct stat open_file, path_file;
    return fstat(fd, &open_file) == 0 && lstat(name, &path_file) == 0 && path_file.st_dev == open_file.st_dev &&
           path_file.st_ino == open_file.st_ino;
}

/* Tries to lock the file. Succeeds on file systems without locks. */
static bool try_lock(int fd)
{
    return flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

/* Removes the partial file of a process that was killed. A read-only file can be locked too, except on NFS. */
static bool remove_leftover(const io_writer *writer, io_error *error)
{
    const int flags = O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
    struct stat leftover;
    int fd = open(writer->partial, O_RDWR | flags);
    if (fd < 0 && errno == EACCES)
        fd = open(writer->partial, O_RDONLY | flags);
    if (fd < 0)
        return errno == ENOENT || fail_with_errno(error, writer->partial, "is in the way");
    bool good = true;
    if (fstat(fd, &leftover) == 0 && !S_ISREG(leftover.st_mode))
        good = io_fail(error, writer->partial, "is in the way: it is %s", kind_of(leftover.st_mode));
    else if (!try_lock(fd))
        good = io_fail(error, writer->path, "another process is writing it");
    else if (is_same_file(fd, writer->partial) && unlink(writer->partial) != 0)
        good = fail_with_errno(error, writer->partial, "is in the way");
    close(fd);
    return good;
}

/* Creates PATH.partial and locks it. Another process can remove our file as a leftover before we lock it. Then we try
 * again. */
static bool open_partial(io_writer *writer, io_error *error)
{
    const mode_t mode = writer->mode >= 0 ? 0600 : 0666;
    for (int attempt = 0; attempt < OPEN_ATTEMPTS; attempt++) {
        writer->fd = open(writer->partial, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode);
        if (writer->fd < 0 && errno == EEXIST) {
            if (!remove_leftover(writer, error))
                return false;
            continue;
        }
        if (writer->fd < 0)
            return fail_with_errno(error, writer->path, "cannot be written");
        if (try_lock(writer->fd) && is_same_file(writer->fd, writer->partial))
            return true;
        close(writer->fd);
        writer->fd = -1;
    }
    return io_fail(error, writer->path, "other processes are writing it");
}

/* Returns the path of the file to write: `path`, or the file that a symbolic link at `path` names. */
static char *resolve_link(const char *path, io_error *error)
{
    struct stat status;
    const bool is_link = lstat(path, &status) == 0 && S_ISLNK(status.st_mode);
    char *target = is_link ? realpath(path, NULL) : strdup(path);
    if (target == NULL && is_link && errno == ENOENT)
        io_fail(error, path, "is a symbolic link to a file that is not there");
    else if (target == NULL)
        fail_with_errno(error, path, "cannot be written");
    return target;
}

bool io_open(io_writer *writer, const char *path, io_error *error)
{
    struct stat status;
    *writer = (io_writer){.fd = -1, .mode = -1};
    if (path[0] == '\0')
        return io_fail(error, "\"\"", "is no file name");
    if (stat(path, &status) == 0) {
        if (!S_ISREG(status.st_mode))
            return io_fail(error, path, "is %s, expected a regular file or none", kind_of(status.st_mode));
        writer->mode = (int)(status.st_mode & (S_IRWXU | S_IRWXG | S_IRWXO));
    }
    writer->path = resolve_link(path, error);
    bool good = writer->path != NULL;
    if (good && (asprintf(&writer->partial, "%s.partial", writer->path) < 0 ||
                 asprintf(&writer->backup, "%s.old", writer->partial) < 0))
        good = io_no_memory(error, path, "for its name");
    if (good && open_partial(writer, error))
        return true;
    close_writer(writer);
    return false;
}

bool io_can_write(const char *path, io_error *error)
{
    io_writer writer;
    if (!io_open(&writer, path, error))
        return false;
    io_abandon(&writer);
    return true;
}

bool io_write(io_writer *writer, const void *data, size_t bytes, io_error *error)
{
    for (size_t done = 0; done < bytes;) {
        const ssize_t written = write(writer->fd, (const char *)data + done, bytes - done);
        if (written < 0 && errno != EINTR)
            return fail_with_errno(error, writer->path, "cannot be written");
        done += written > 0 ? (size_t)written : 0;
    }
    return true;
}

bool io_print(io_writer *writer, io_error *error, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int printed = vdprintf(writer->fd, format, arguments);
    va_end(arguments);
    return printed >= 0 || fail_with_errno(error, writer->path, "cannot be written");
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

/* Moves `position` to the next row (a run along the last axis) in row-major order. Returns false after the last row. */
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

/* Sets the permissions. Ignores failures: a file system without permissions has none to set. */
static void set_mode(int fd, int mode)
{
    if (mode >= 0)
        fchmod(fd, (mode_t)mode);
}

static bool finish_file(const io_writer *writer, io_error *error)
{
    set_mode(writer->fd, writer->mode);
    return fsync(writer->fd) == 0 || fail_with_errno(error, writer->path, "cannot be written");
}

/* Copies the old file to the backup path, for file systems without hard links. */
static bool copy_to_backup(io_writer *writer, io_error *error)
{
    io_mapping old;
    if (!io_map(&old, writer->path, error))
        return false;
    io_writer copy = {.fd = open(writer->backup, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600),
                      .path = writer->backup};
    bool good = copy.fd >= 0 || fail_with_errno(error, writer->backup, "cannot be written");
    if (good) {
        writer->has_backup = true;
        set_mode(copy.fd, writer->mode);
        good = io_write(&copy, old.bytes, old.size, error);
        close(copy.fd);
    }
    io_unmap(&old);
    return good;
}

/* Gives the old file, if it exists, a second name. */
static bool make_backup(io_writer *writer, io_error *error)
{
    unlink(writer->backup);
    writer->has_backup = link(writer->path, writer->backup) == 0;
    return writer->has_backup || errno == ENOENT || copy_to_backup(writer, error);
}

static bool replace_file(io_writer *writer, io_error *error)
{
    if (!make_backup(writer, error))
        return false;
    writer->is_renamed = rename(writer->partial, writer->path) == 0;
    return writer->is_renamed || fail_with_errno(error, writer->path, "cannot be put in place");
}

/* Renames the old file back. If that fails, the old file stays under its second name, and the message says where. */
static void restore_file(io_writer *writer, io_error *error)
{
    if (!writer->is_renamed || (writer->has_backup ? rename(writer->backup, writer->path) : unlink(writer->path)) == 0)
        return;
    const size_t length = strlen(error->text);
    snprintf(error->text + length, sizeof error->text - length, "; %s is the new file%s%s", writer->path,
             writer->has_backup ? ", the old one is " : "", writer->has_backup ? writer->backup : "");
    keep_on_one_line(error);
    writer->has_backup = false;
}

/* A rename is permanent after its folder is synced. Some file systems cannot sync a folder and return EINVAL. */
static bool sync_folder(const char *path, io_error *error)
{
    char folder[4096];
    const char *slash = strrchr(path, '/');
    const int length = slash == NULL ? 1 : slash == path ? 1 : (int)(slash - path);
    snprintf(folder, sizeof folder, "%.*s", length, slash == NULL ? "." : path);
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool synced = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL);
    const int error_number = errno;
    if (fd >= 0)
        close(fd);
    return synced || io_fail(error, path, "its folder cannot be synced: %s", strerror(error_number));
}

bool io_publish(io_writer *writers, int count, io_error *error)
{
    bool good = true;
    for (int i = 0; i < count && good; i++)
        good = finish_file(&writers[i], error);
    for (int i = 0; i < count && good; i++)
        good = replace_file(&writers[i], error);
    for (int i = 0; i < count && good; i++)
        good = sync_folder(writers[i].path, error);
    for (int i = count - 1; i >= 0 && !good; i--)
        restore_file(&writers[i], error);
    for (int i = 0; i < count; i++) {
        io_error ignored;
        if (!good) {
            unlink(writers[i].partial);
            sync_folder(writers[i].path, &ignored);
        }
        if (writers[i].has_backup)
            unlink(writers[i].backup);
        close_writer(&writers[i]);
    }
    return good;
}
