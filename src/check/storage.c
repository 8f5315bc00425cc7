/* SPDX-License-Identifier: Apache-2.0 */
#include "storage.h"

#include "core/float16.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <stdio.h>
#include <stdlib.h>

enum { GUARD = 256 };

void *allocate(size_t count, size_t size)
{
    void *memory = calloc(count + 1, size);
    if (memory == NULL) {
        fprintf(stderr, "cotangent: no memory for %zu elements of %zu bytes\n", count, size);
        exit(1);
    }
    return memory;
}

int64_t element_position(const cot_tensor *view, int64_t number)
{
    int64_t position = 0;
    for (int axis = view->rank - 1; axis >= 0; axis--) {
        position += number % view->shape[axis] * view->stride[axis];
        number /= view->shape[axis];
    }
    return position;
}

storage storage_make(const cot_tensor *like, int64_t offset, bool guarded)
{
    storage s = {.view = *like};
    if (!cot_present(like))
        return s;
    const int64_t size = (int64_t)cot_dtype_size(like->dtype);
    int64_t low, high;
    cot_extent(like, &low, &high);
    const size_t front = cot_align((size_t)-low) + (size_t)(offset * size) + GUARD;
    s.bytes = cot_align(front + (size_t)high + GUARD);
    if (posix_memalign((void **)&s.memory, COT_ALIGNMENT, s.bytes) != 0) {
        fprintf(stderr, "cotangent: no memory for %zu bytes\n", s.bytes);
        exit(1);
    }
    memset(s.memory, POISON, s.bytes);
    s.view.data = s.memory + front;
    if (!guarded)
        return s;
    s.used = allocate(s.bytes, 1);
    for (int64_t n = 0; n < cot_elements(like); n++)
        memset(s.used + front + (size_t)(element_position(like, n) * size), 1, (size_t)size);
    return s;
}

void storage_free(storage *s)
{
    free(s->memory);
    free(s->used);
    s->memory = s->used = NULL;
}

bool storage_overrun(const storage *s, int64_t *byte)
{
    for (size_t i = 0; s->used != NULL && i < s->bytes; i++) {
        if (!s->used[i] && (unsigned char)s->memory[i] != POISON) {
            *byte = (int64_t)i - ((char *)s->view.data - s->memory);
            return true;
        }
    }
    return false;
}

double *tensor_values(const cot_tensor *view)
{
    const int64_t elements = cot_elements(view);
    double *values = allocate((size_t)elements, sizeof *values);
    for (int64_t n = 0; n < elements; n++) {
        const int64_t position = element_position(view, n);
        values[n] = view->dtype == COT_U8 ? ((const uint8_t *)view->data)[position]
                                          : cot_load_f64(view->data, view->dtype, position);
    }
    return values;
}

void tensor_store(const cot_tensor *view, const double *values)
{
    for (int64_t n = 0; n < cot_elements(view); n++)
        cot_store_f64(view->data, view->dtype, element_position(view, n), values[n]);
}

void tensor_store_integers(const cot_tensor *view, const int32_t *data)
{
    for (int64_t n = 0; n < cot_elements(view); n++) {
        const int64_t position = element_position(view, n);
        if (view->dtype == COT_U8)
            ((uint8_t *)view->data)[position] = (uint8_t)data[n];
        else
            ((int32_t *)view->data)[position] = data[n];
    }
}
