/* SPDX-License-Identifier: Apache-2.0 */
#include "storage.h"

#include "core/float16.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { GUARD = 256 };

void out_of_memory(size_t bytes)
{
    static atomic_flag is_ending = ATOMIC_FLAG_INIT;
    while (atomic_flag_test_and_set(&is_ending))
        pause();
    fprintf(stderr, "cotangent: out of memory (%zu bytes)\n", bytes);
    exit(1);
}

void *allocate(size_t count, size_t size)
{
    void *memory = calloc(count + 1, size);
    if (memory == NULL)
        out_of_memory(count * size);
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

/* The length of the last axis. Loops over all elements divide only once per row. */
static int64_t row_elements(const cot_tensor *view)
{
    return view->rank > 0 && view->shape[view->rank - 1] > 0 ? view->shape[view->rank - 1] : 1;
}

static int64_t row_stride(const cot_tensor *view)
{
    return view->rank > 0 ? view->stride[view->rank - 1] : 0;
}

storage storage_make(const cot_tensor *like, int64_t offset, bool guarded)
{
    storage s = {.view = *like};
    if (!cot_is_present(like))
        return s;
    const int64_t size = (int64_t)cot_dtype_size(like->dtype);
    int64_t low, high;
    cot_extent(like, &low, &high);
    const size_t front = cot_align_up((size_t)-low) + (size_t)(offset * size) + GUARD;
    s.bytes = cot_align_up(front + (size_t)high + GUARD);
    if (posix_memalign((void **)&s.memory, COT_ALIGNMENT, s.bytes) != 0)
        out_of_memory(s.bytes);
    memset(s.memory, POISON, s.bytes);
    s.view.data = s.memory + front;
    if (!guarded)
        return s;
    s.is_element = allocate(s.bytes, 1);
    const int64_t columns = row_elements(like), stride = row_stride(like);
    for (int64_t n = 0; n < cot_elements(like); n += columns)
        for (int64_t c = 0, position = element_position(like, n); c < columns; c++, position += stride)
            memset(s.is_element + front + (size_t)(position * size), 1, (size_t)size);
    return s;
}

void storage_free(storage *s)
{
    free(s->memory);
    free(s->is_element);
    s->memory = s->is_element = NULL;
}

bool storage_find_overrun(const storage *s, int64_t *byte)
{
    for (size_t i = 0; s->is_element != NULL && i < s->bytes; i++) {
        if (!s->is_element[i] && (unsigned char)s->memory[i] != POISON) {
            *byte = (int64_t)i - ((char *)s->view.data - s->memory);
            return true;
        }
    }
    return false;
}

double *tensor_values(const cot_tensor *view)
{
    const int64_t elements = cot_elements(view), columns = row_elements(view), stride = row_stride(view);
    double *values = allocate((size_t)elements, sizeof *values);
    for (int64_t n = 0; n < elements; n += columns)
        for (int64_t c = 0, position = element_position(view, n); c < columns; c++, position += stride)
            values[n + c] = view->dtype == COT_U8 ? ((const uint8_t *)view->data)[position]
                                                  : cot_load_f64(view->data, view->dtype, position);
    return values;
}

void tensor_store(const cot_tensor *view, const double *values)
{
    const int64_t elements = cot_elements(view), columns = row_elements(view), stride = row_stride(view);
    for (int64_t n = 0; n < elements; n += columns)
        for (int64_t c = 0, position = element_position(view, n); c < columns; c++, position += stride)
            cot_store_f64(view->data, view->dtype, position, values[n + c]);
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
