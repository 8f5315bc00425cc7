/* SPDX-License-Identifier: Apache-2.0
 * file.h: what .npy and .safetensors share: files that are read by mapping them and written whole or not at all, and
 * arrays of any byte order, alignment and width of integer, served as views of our dtypes.
 *
 * Every function that can fail returns false and leaves one line in its io_error. Nothing here prints or exits. */
#ifndef COT_IO_FILE_H
#define COT_IO_FILE_H

#include <cotangent/core.h>
#include <stdbool.h>

enum { IO_ERROR_SIZE = 512 };

/* What was wrong, beginning with the file's name: one line, whatever bytes the file or its name holds. */
typedef struct io_error {
    char text[IO_ERROR_SIZE];
    bool out_of_memory; /* the file is not to blame */
} io_error;

/* Composes "PATH: ..." and returns false. */
bool io_fail(io_error *error, const char *path, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Composes "PATH: out of memory (WHAT)", sets out_of_memory and returns false. */
bool io_no_memory(io_error *error, const char *path, const char *what);

/* ---- reading ------------------------------------------------------------------------------------------ */

/* A regular file's bytes, mapped for reading; a directory, a pipe or a device is refused by name. They stay valid when
 * the file is replaced as io_publish does it; whoever shortens a mapped file in place ends the process (SIGBUS). */
typedef struct io_mapping {
    const unsigned char *bytes;
    size_t size;
} io_mapping;

bool io_map(io_mapping *mapping, const char *path, io_error *error);
void io_unmap(io_mapping *mapping);

/* An array as it lies in a file. */
typedef struct io_array {
    cot_tensor stored;  /* the dtype to be served as, shape, strides; data points at the file's first byte of it */
    size_t item_size;   /* bytes of an element in the file: 8 for an int64 that is to be served as i32 */
    bool is_big_endian; /* the most significant byte comes first */
} io_array;

/* The bytes of an array of that shape in the file; false if they are more than an address space holds (2^56). A size of
 * 0 counts as 1 in that, as it does in the library's own check. */
bool io_array_bytes(const io_array *array, size_t *bytes);

/* A view of the array: of the file's own bytes where they can be used as they are; else of converted memory, *owned,
 * which the caller frees (NULL otherwise). Big-endian and misaligned arrays are copied; an int64 is served as i32 if
 * every value fits, and is refused by the first that does not. `what` names the array in messages. */
bool io_serve(const io_array *array, const char *path, const char *what, cot_tensor *view, void **owned,
              io_error *error);

/* ---- writing ------------------------------------------------------------------------------------------ */

/* A file on its way to PATH. It is written as PATH.partial, which io_publish renames. Until then PATH keeps its old
 * file, and readers see that one.
 *
 * A symbolic link at PATH is written through: the file that it names is replaced, and the link stays. A link to a file that is
 * not there is refused.
 *
 * A new file has the permissions that the umask leaves it. A file that replaces another one has that one's permissions
 * (not its owner, set-user-ID or set-group-ID bits), and its partial file is the user's alone.
 *
 * A PATH.partial that a killed process left behind is removed. One that a living process writes is refused, where the file
 * system has locks. */
typedef struct io_writer {
    int fd;   /* -1 = nothing to publish */
    int mode; /* of the file that is replaced; -1 = none */
    char *path, *partial;
    char *previous; /* PATH.partial.old: the old file while io_publish works */
    bool is_kept, is_placed;
} io_writer;

/* The folder must exist; what is at `path` must be a regular file, if anything. On failure nothing is left. */
bool io_open(io_writer *writer, const char *path, io_error *error);
bool io_write(io_writer *writer, const void *data, size_t bytes, io_error *error);

/* All elements of a view of any strides, in row-major order, little-endian. */
bool io_write_tensor(io_writer *writer, const cot_tensor *tensor, io_error *error);

/* A printf into the file. */
bool io_print(io_writer *writer, io_error *error, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Puts all files in place, or none. In this order:
 *
 *   1. Each partial file is synced.
 *   2. For each file: the old file gets a second name, PATH.partial.old, by a hard link. Where the file system has no hard
 *      links, the old file is copied. Then PATH.partial is renamed to PATH.
 *   3. The folders are synced.
 *   4. The second names, or the copies, are removed.
 *
 * If a step fails, the old files are renamed back, new ones are removed where there was none, and the folders are synced. This
 * needs no more of a file system than rename. Where even the renaming back fails, PATH has the new file, PATH.partial.old the old
 * one, and the message says so.
 *
 * A process that is killed, or a machine that stops, at any moment leaves at each PATH the old file or the new one, each of
 * them whole. Between the first and the last rename, some paths can have new files and others old ones: no file system can
 * rename several files at once. The old files are then at PATH.partial.old (of copies, a machine that
 * stops can leave a part). A PATH.partial or a PATH.partial.old that is left behind
 * is removed when PATH is written again.
 *
 * The writers are closed in any case. */
bool io_publish(io_writer *writers, int count, io_error *error);

/* Whether io_open would succeed; leaves nothing. */
bool io_can_write(const char *path, io_error *error);

/* Removes the partial file of a writer that was not published. Harmless on a closed one. */
void io_abandon(io_writer *writer);

#endif
