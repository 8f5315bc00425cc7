/* SPDX-License-Identifier: Apache-2.0
 * storage.h: the memory of one tensor under test: poisoned, with guard bytes around and between its elements. */
#ifndef COT_CHECK_STORAGE_H
#define COT_CHECK_STORAGE_H

#include "core/cases.h"

/* The byte that memory is filled with before a kernel runs: NaN in all float dtypes. */
enum { POISON = 0xff };

typedef struct storage {
    cot_tensor view; /* into the memory below */
    char *memory;    /* guard, elements with their gaps, guard */
    size_t bytes;    /* of memory, guards included */
    char *used;      /* for each byte: 1 = part of an element */
} storage;

/* Memory for a tensor of `like`'s dtype, shape and strides that begins `offset` elements after an aligned address;
 * every byte 0xff, which is NaN in all float dtypes. `guarded` also records which bytes are nobody's. An absent
 * tensor gets no memory. */
storage storage_make(const cot_tensor *like, int64_t offset, bool guarded);
void storage_free(storage *s);

/* The first byte outside the elements that is no longer 0xff, relative to the tensor's first element; false if all
 * are. Only for guarded storage. */
bool storage_overrun(const storage *s, int64_t *byte);

/* Position in elements, relative to data, of the element with this row-major number. */
int64_t element_position(const cot_tensor *view, int64_t number);

/* Row-major copies of float or u8 tensors, and back (rounded; float only). The caller frees what tensor_values returns. */
double *tensor_values(const cot_tensor *view);
void tensor_store(const cot_tensor *view, const double *values);

/* Copies row-major int32 data into an i32 or u8 view. */
void tensor_store_integers(const cot_tensor *view, const int32_t *data);

#endif
