/* SPDX-License-Identifier: Apache-2.0
 * safetensors.h: .safetensors files, which hold named tensors after a JSON header.
 *
 *   8 bytes   N, the length of the header, little-endian
 *   N bytes   {"NAME": {"dtype": "F32", "shape": [2,3], "data_offsets": [begin,end]}, .., "__metadata__": {TEXT: TEXT}}
 *   the rest  the elements, row-major, little-endian. Offsets count from here. No gaps or overlaps, nothing after them.
 *
 * F32 F16 BF16 F64 I32 U8 tensors are views of the file. BOOL becomes u8. I64 becomes i32 if every value fits. Other
 * dtypes are refused only when they are requested, so that the other tensors of the file can be read. A header may have
 * 16 MiB. */
#ifndef COT_IO_SAFETENSORS_H
#define COT_IO_SAFETENSORS_H

#include "file.h"

typedef struct safetensors_entry {
    const char *name;
    const char *dtype;   /* the file's name of the dtype */
    io_array array;      /* its dtype is COT_DTYPE_NONE for a dtype without an equivalent */
    size_t begin, end;   /* offsets in the data */
    const char *refusal; /* why it cannot be viewed, or NULL */
    cot_tensor view;     /* set by the first safetensors_get */
    void *owned;         /* converted elements, or NULL */
} safetensors_entry;

typedef struct safetensors_file {
    int count;
    safetensors_entry *entries; /* in the order of their offsets */
    struct json_t *header;      /* owns the names */
    char *path;
    io_mapping mapping;
} safetensors_file;

/* Checks the whole header. On failure nothing needs to be closed. */
bool safetensors_open(safetensors_file *file, const char *path, io_error *error);
void safetensors_close(safetensors_file *file);

/* Parses a file in memory, which must stay valid until safetensors_close. `name` is for messages. */
bool safetensors_parse(safetensors_file *file, const char *name, const void *bytes, size_t size, io_error *error);

/* The number of the tensor with that name, or -1 if there is none. */
int safetensors_find(const safetensors_file *file, const char *name);

/* A read-only view of tensor `number`; valid until safetensors_close. */
bool safetensors_get(safetensors_file *file, int number, cot_tensor *view, io_error *error);

/* The same by name. For a missing tensor, the message names it. */
bool safetensors_get_named(safetensors_file *file, const char *name, cot_tensor *view, io_error *error);

/* An entry of __metadata__, or NULL. */
const char *safetensors_metadata(const safetensors_file *file, const char *key);

typedef struct safetensors_item {
    const char *name; /* UTF-8; names must differ */
    cot_tensor tensor;
} safetensors_item;

/* Writes tensors with any strides. Those with the largest elements come first, which aligns each of them. metadata:
 * key, text, key, text, ..., NULL; or NULL. safetensors_prepare does not rename: io_publish does. On failure neither
 * leaves a file. */
bool safetensors_prepare(io_writer *writer, const char *path, const safetensors_item *items, int count,
                         const char *const *metadata, io_error *error);
bool safetensors_write(const char *path, const safetensors_item *items, int count, const char *const *metadata,
                       io_error *error);

#endif
