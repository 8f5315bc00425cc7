/* SPDX-License-Identifier: Apache-2.0
 * npy.h: NumPy's .npy files, versions 1 to 3 (numpy.lib.format): one array each.
 *
 *   read     f4 f8 f2 i4 u1 of either byte order, b1 as u8, i8 as i32 where every value fits; row-major and Fortran
 *            order (as strides); up to COT_MAX_RANK axes, sizes of 0 and no axes at all
 *   bf16     has no descriptor of NumPy's own: it is '<V2' (read and written) or '|V2' (read), as ml_dtypes saves it.
 *            In NumPy: a.view(ml_dtypes.bfloat16), or a.view(np.uint16) << 16 as the bits of float32.
 *   refused  by name: everything else, and a file with fewer or more bytes than its shape says */
#ifndef COT_IO_NPY_H
#define COT_IO_NPY_H

#include "file.h"

typedef struct npy_file {
    cot_tensor tensor; /* a view, for reading only; valid until npy_close */
    io_mapping mapping;
    void *owned; /* converted elements, or NULL */
} npy_file;

/* On failure there is nothing to close. */
bool npy_open(npy_file *file, const char *path, io_error *error);
void npy_close(npy_file *file);

/* The same of bytes in memory, which must outlive the file; `name` is for messages. */
bool npy_parse(npy_file *file, const char *name, const void *bytes, size_t size, io_error *error);

/* Writes the tensor, of any strides, in row-major order. npy_prepare leaves the renaming to io_publish; on failure
 * nothing is left of either. */
bool npy_prepare(io_writer *writer, const char *path, const cot_tensor *tensor, io_error *error);
bool npy_write(const char *path, const cot_tensor *tensor, io_error *error);

#endif
