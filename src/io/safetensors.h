/* SPDX-License-Identifier: Apache-2.0
 * safetensors.h: .safetensors files: named tensors behind a JSON header.
 *
 *   8 bytes   N, the length of the header, little-endian
 *   N bytes   {"NAME": {"dtype": "F32", "shape": [2,3], "data_offsets": [begin,end]}, ..., "__metadata__": {text: text}}
 *   the rest  the elements, row-major and little-endian; offsets count from here; no gaps, no overlaps, nothing behind
 *
 * F32 F16 BF16 F64 I32 U8 are views of the file, BOOL is served as u8, I64 as i32 where every value fits. Other dtypes
 * are refused when they are asked for, so that a file that has some of them is not lost. A header may have 16 MiB. */
#ifndef COT_IO_SAFETENSORS_H
#define COT_IO_SAFETENSORS_H

#include "file.h"

typedef struct safetensors_entry {
    const char *name;
    const char *dtype; /* as the file has it */
    io_array array;    /* its dtype is COT_DTYPE_NONE where we have none for it */
    size_t begin, end; /* in the data */
    const char *unfit; /* why it cannot be served, or NULL */
    cot_tensor view;   /* once asked for */
    void *owned;       /* converted elements, or NULL */
} safetensors_entry;

typedef struct safetensors_file {
    int count;
    safetensors_entry *entries; /* in the order of their data */
    struct json_t *header;      /* holds the names */
    char *path;
    io_mapping mapping;
} safetensors_file;

/* Checks the whole header. On failure there is nothing to close. */
bool safetensors_open(safetensors_file *file, const char *path, io_error *error);
void safetensors_close(safetensors_file *file);

/* The same of bytes in memory, which must outlive the file; `name` is for messages. */
bool safetensors_parse(safetensors_file *file, const char *name, const void *bytes, size_t size, io_error *error);

/* The number of the tensor of that name, -1 if there is none. */
int safetensors_find(const safetensors_file *file, const char *name);

/* A view of tensor `number`, for reading only; valid until safetensors_close. */
bool safetensors_get(safetensors_file *file, int number, cot_tensor *view, io_error *error);

/* The same by name; a missing one is an error that names it. */
bool safetensors_get_named(safetensors_file *file, const char *name, cot_tensor *view, io_error *error);

/* An entry of __metadata__, or NULL. */
const char *safetensors_metadata(const safetensors_file *file, const char *key);

typedef struct safetensors_item {
    const char *name; /* UTF-8, all different */
    cot_tensor tensor;
} safetensors_item;

/* Writes the tensors, of any strides; those with the largest elements first, so that each lies aligned. metadata: key,
 * text, key, text, ..., NULL; or NULL. safetensors_prepare leaves the renaming to io_publish; on failure nothing is left
 * of either. */
bool safetensors_prepare(io_writer *writer, const char *path, const safetensors_item *items, int count,
                         const char *const *metadata, io_error *error);
bool safetensors_write(const char *path, const safetensors_item *items, int count, const char *const *metadata,
                       io_error *error);

#endif
