/* SPDX-License-Identifier: Apache-2.0
 * file.h: the common parts of .npy and .safetensors. Files are read by mapping them, and are written completely or not
 * at all. Arrays of any byte order, alignment and integer width become views of our dtypes.
 *
 * Every function that can fail returns false and writes one line into its io_error. No function here prints or exits.
 */
#ifndef COT_IO_FILE_H
#define COT_IO_FILE_H

#include <cotangent/core.h>
#include <stdbool.h>

enum { IO_ERROR_SIZE = 512 };

/* The error message. It begins with the file's name and is one line, whatever bytes the file or its name contains. */
typedef struct io_error {
    char text[IO_ERROR_SIZE];
    bool out_of_memory; /* the failure is not the file's */
} io_error;

/* Writes "PATH: ..." and returns false. */
bool io_fail(io_error *error, const char *path, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Writes "PATH: out of memory (WHAT)", sets out_of_memory and returns false. */
bool io_no_memory(io_error *error, const char *path, const char *what);

/* ---- reading ------------------------------------------------------------------------------------------ */

/* A regular file's bytes, mapped for reading. Directories, pipes and devices are refused, and the message says which it
 * was. The bytes stay valid if io_publish replaces the file. If another program shortens a mapped file in place, the
 * process ends with SIGBUS. */
typedef struct io_mapping {
    const unsigned char *bytes;
    size_t size;
} io_mapping;

bool io_map(io_mapping *mapping, const char *path, io_error *error);
void io_unmap(io_mapping *mapping);

/* An array as it is stored in a file. */
typedef struct io_array {
    cot_tensor stored;  /* dtype of the view, shape, strides; data points at its first byte in the file */
    size_t item_size;   /* bytes of an element in the file: 8 for an int64 that becomes an i32 */
    bool is_big_endian; /* the most significant byte comes first */
} io_array;

/* Computes the bytes of the array in the file. Returns false if it has 2^56 bytes or more, which no address space
 * holds. Sizes of 0 count as 1 in this check, as in the library's own check. */
bool io_array_bytes(const io_array *array, size_t *bytes);

/* Makes a view of the array. It points at the file's bytes if they can be used directly. Otherwise, it points at
 * converted memory, *owned, which the caller frees (else NULL). Big-endian and misaligned arrays are copied. An int64
 * array becomes i32 if every value fits. Otherwise the message names the first value that does not. `what` names the
 * array in messages. */
bool io_view_array(const io_array *array, const char *path, const char *what, cot_tensor *view, void **owned,
                   io_error *error);

/* ---- writing ------------------------------------------------------------------------------------------ */

/* A file that is being written. Its data goes to PATH.partial, which io_publish renames to PATH. Until then PATH keeps
 * its old file, and readers see that one.
 *
 * A symbolic link at PATH is followed: the file that it names is replaced, and the link stays. A link to a missing file
 * is refused.
 *
 * A new file has the permissions that the umask allows. A file that replaces another one gets its permissions, but not
 * its owner, set-user-ID or set-group-ID bits. Its partial file is readable and writable only by the user.
 *
 * A PATH.partial that a killed process left is removed. A PATH.partial that a running process writes is refused, if the
 * file system has locks. */
typedef struct io_writer {
    int fd;   /* -1 = nothing to publish */
    int mode; /* permissions of the file that is replaced; -1 = none */
    char *path, *partial;
    char *backup; /* PATH.partial.old: holds the old file during io_publish */
    bool has_backup, is_renamed;
} io_writer;

/* The folder must exist. If `path` exists, it must be a regular file. On failure no partial file is left. */
bool io_open(io_writer *writer, const char *path, io_error *error);
bool io_write(io_writer *writer, const void *data, size_t bytes, io_error *error);

/* Writes all elements of a view with any strides, in row-major order, little-endian. */
bool io_write_tensor(io_writer *writer, const cot_tensor *tensor, io_error *error);

/* Writes formatted text, as printf does. */
bool io_print(io_writer *writer, io_error *error, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Renames all partial files to their paths, or none. In this order:
 *
 *   1. Each partial file is synced.
 *   2. For each file: a hard link gives the old file a second name, PATH.partial.old. If the file system has no hard
 *      links, the old file is copied. Then PATH.partial is renamed to PATH.
 *   3. The folders are synced.
 *   4. The second names, or the copies, are removed.
 *
 * If a step fails, the old files are renamed back, new files without an old one are removed, and the folders are
 * synced. This requires only rename from the file system. If renaming back also fails, PATH has the new file and
 * PATH.partial.old the old one, and the message says so.
 *
 * A process can be killed, or a machine can stop, at any time. Each PATH then has the complete old file or the complete
 * new file. Between the first and the last rename, some paths can have new files and others old ones, because no file
 * system can rename several files at once. The old files are then at PATH.partial.old. If they are copies, a machine
 * that stops can leave incomplete ones. A PATH.partial or a PATH.partial.old that is left is removed when PATH is
 * written again.
 *
 * The writers are closed in every case. */
bool io_publish(io_writer *writers, int count, io_error *error);

/* Returns whether io_open would succeed. Leaves no file. */
bool io_can_write(const char *path, io_error *error);

/* Removes the partial file of a writer that was not published. A closed writer is allowed. */
void io_abandon(io_writer *writer);

#endif
