/* SPDX-License-Identifier: Apache-2.0
 * npy.h: NumPy's .npy files, versions 1 to 3 (numpy.lib.format). Each holds one array.
 *
 *   read     f4 f8 f2 i4 u1 of either byte order, b1 as u8, i8 as i32 if every value fits; row-major order, and Fortran
 *            order by strides; up to COT_MAX_RANK axes, also none, and sizes of 0
 *   bf16     NumPy has no descriptor for it: it is '<V2' (read and written) or '|V2' (read), as ml_dtypes saves it.
 *            In NumPy: a.view(ml_dtypes.bfloat16), or a.view(np.uint16) << 16 as the bits of float32.
 *   refused  everything else, by name, and a file with fewer or more bytes than its shape requires */
#ifndef COT_IO_NPY_H
#define COT_IO_NPY_H

#include "file.h"

typedef struct npy_file {
    cot_tensor tensor; /* a read-only view; valid until npy_close */
    io_mapping mapping;
    void *owned; /* converted elements, or NULL */
} npy_file;

/* On failure nothing needs to be closed. */
bool npy_open(npy_file *file, const char *path, io_error *error);
void npy_close(npy_file *file);

/* Parses a file in memory, which must stay valid until npy_close. `name` is for messages. */
bool npy_parse(npy_file *file, const char *name, const void *bytes, size_t size, io_error *error);

/* Writes a tensor with any strides in row-major order. npy_prepare does not rename: io_publish does. On failure neither
 * leaves a file. */
bool npy_prepare(io_writer *writer, const char *path, const cot_tensor *tensor, io_error *error);
bool npy_write(const char *path, const cot_tensor *tensor, io_error *error);

#endif
