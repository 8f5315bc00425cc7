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
} io_error;

/* Composes "PATH: ..." and returns false. */
bool io_fail(io_error *error, const char *path, const char *format, ...) __attribute__((format(printf, 3, 4)));

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

/* A file on its way to PATH: written and synced as PATH.partial, which io_publish renames. What was at PATH before stays
 * whole until then, and is what a reader sees, whatever happens in between. A PATH.partial left behind by a process
 * that was killed is written over; one that a living process writes is refused. */
typedef struct io_writer {
    int fd; /* -1 = nothing to publish */
    char *path, *partial;
    bool is_exchanged; /* published, and what was at `path` before is now at `partial` */
} io_writer;

/* The folder must exist; what is at `path` must be a regular file, if anything. On failure nothing is left. */
bool io_open(io_writer *writer, const char *path, io_error *error);
bool io_write(io_writer *writer, const void *data, size_t bytes, io_error *error);

/* All elements of a view of any strides, in row-major order, little-endian. */
bool io_write_tensor(io_writer *writer, const cot_tensor *tensor, io_error *error);

/* Sync each writer's file, then rename them all to their places, then sync the folders. If one cannot be renamed, those
 * before it are undone (where the file system can exchange two names: the local ones of Linux can, NFS cannot). The
 * writers are closed in any case. A crash between two renames can leave new files beside old ones, each of them whole. */
bool io_publish(io_writer *writers, int count, io_error *error);

/* Removes the partial file of a writer that was not published. Harmless on a closed one. */
void io_abandon(io_writer *writer);

#endif
