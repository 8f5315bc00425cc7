/* SPDX-License-Identifier: Apache-2.0
 * storage.h: the memory of one tensor under test. It is filled with POISON and has guard bytes before, after and
 * between the elements. */
#ifndef COT_CHECK_STORAGE_H
#define COT_CHECK_STORAGE_H

#include "cases/cases.h"

/* Memory is filled with this byte before a kernel runs. The bytes 0xff are a NaN in every float dtype. */
enum { POISON = 0xff };

typedef struct storage {
    cot_tensor view;  /* points into the memory below */
    char *memory;     /* a guard, the elements with their gaps, a guard */
    size_t bytes;     /* bytes of `memory`, including the guards */
    char *is_element; /* guarded storage: 1 for each byte that is part of an element */
} storage;

/* Allocates memory for a tensor with the dtype, shape and strides of `like`, filled with POISON. The tensor begins
 * `offset` elements after an aligned address. `guarded` also records which bytes belong to elements. An absent tensor
 * gets no memory. */
storage storage_make(const cot_tensor *like, int64_t offset, bool guarded);
void storage_free(storage *s);

/* Finds the first byte outside the elements that is no longer POISON, relative to the tensor's first element. Returns
 * false if there is none. For guarded storage only. */
bool storage_find_overrun(const storage *s, int64_t *byte);

/* Position of the element with this row-major number, in elements relative to data. */
int64_t element_position(const cot_tensor *view, int64_t number);

/* tensor_values returns a row-major copy of a float or u8 tensor, which the caller frees. tensor_store rounds row-major
 * values to a float tensor. */
double *tensor_values(const cot_tensor *view);
void tensor_store(const cot_tensor *view, const double *values);

/* Copies row-major int32 data into an i32 or u8 view. */
void tensor_store_integers(const cot_tensor *view, const int32_t *data);

#endif
