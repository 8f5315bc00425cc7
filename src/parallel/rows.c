/* SPDX-License-Identifier: Apache-2.0 */
#include "rows.h"

#include "core/float16.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/tensor.h"

#include <inttypes.h>

cot_tensor cot_slice(const cot_tensor *tensor, int axis, int64_t begin, int64_t size)
{
    cot_tensor view = *tensor;
    if (!cot_is_present(tensor))
        return view;
    if (view.data != NULL)
        view.data = (char *)view.data + begin * view.stride[axis] * (int64_t)cot_dtype_size(view.dtype);
    view.shape[axis] = size;
    return view;
}

/* Calls body for every row of the last axis, with the offsets of the row in elements. */
typedef void row_body(const cot_tensor *to, int64_t to_offset, const cot_tensor *from, int64_t from_offset, int count,
                      bool add);

/* from: `count` tensors with the same strides. */
static void each_row(const cot_tensor *to, const cot_tensor *from, int count, bool add, row_body *body)
{
    int64_t index[COT_MAX_RANK] = {0};
    if (cot_elements(to) == 0)
        return;
    for (;;) {
        int64_t to_offset = 0, from_offset = 0;
        int axis;
        for (axis = 0; axis < to->rank - 1; axis++)
            to_offset += index[axis] * to->stride[axis], from_offset += index[axis] * from->stride[axis];
        body(to, to_offset, from, from_offset, count, add);
        for (axis = to->rank - 2; axis >= 0 && ++index[axis] == to->shape[axis]; axis--)
            index[axis] = 0;
        if (axis < 0)
            return;
    }
}

static void copy_row(const cot_tensor *to, int64_t to_offset, const cot_tensor *from, int64_t from_offset, int one,
                     bool add)
{
    (void)one;
    const int last = to->rank - 1;
    const int64_t count = last >= 0 ? to->shape[last] : 1;
    const int64_t to_stride = last >= 0 ? to->stride[last] : 1, from_stride = last >= 0 ? from->stride[last] : 1;
    const size_t size = cot_dtype_size(to->dtype);
    const bool dense = to_stride == 1 && from_stride == 1;
    if (dense && to->dtype == COT_F32 && from->dtype == COT_F32 && add) {
        float *y = (float *)to->data + to_offset;
        const float *x = (const float *)from->data + from_offset;
        for (int64_t i = 0; i < count; i++)
            y[i] += x[i];
    } else if (dense && to->dtype == from->dtype && !add) {
        memcpy((char *)to->data + to_offset * (int64_t)size, (const char *)from->data + from_offset * (int64_t)size,
               (size_t)count * size);
    } else if (to->dtype == from->dtype && !add) {
        for (int64_t i = 0; i < count; i++)
            memcpy((char *)to->data + (to_offset + i * to_stride) * (int64_t)size,
                   (const char *)from->data + (from_offset + i * from_stride) * (int64_t)size, size);
    } else {
        for (int64_t i = 0; i < count; i++) {
            const double sum = add ? cot_load_f64(to->data, to->dtype, to_offset + i * to_stride) : 0;
            const double x = cot_load_f64(from->data, from->dtype, from_offset + i * from_stride);
            cot_store_f64(to->data, to->dtype, to_offset + i * to_stride, add ? sum + x : x);
        }
    }
}

void cot_copy_tensor(const cot_tensor *to, const cot_tensor *from, bool add)
{
    each_row(to, from, 1, add, copy_row);
}

void cot_fill_tensor(const cot_tensor *to, double value)
{
    cot_tensor from = *to;
    from.dtype = COT_F64;
    from.data = &value;
    memset(from.stride, 0, sizeof from.stride);
    each_row(to, &from, 1, false, copy_row);
}

enum { SUM_BLOCK = 256 };

/* Elements first .. first+count of a row. */
static void add_block(double sums[SUM_BLOCK], const cot_tensor *from, int64_t offset, int64_t stride, int64_t count)
{
    if (from->dtype == COT_F32 && stride == 1) {
        const float *x = (const float *)from->data + offset;
        for (int64_t i = 0; i < count; i++)
            sums[i] += x[i];
        return;
    }
    for (int64_t i = 0; i < count; i++)
        sums[i] += cot_load_f64(from->data, from->dtype, offset + i * stride);
}

/* -0 + x is x for every x, also for -0. */
static void sum_row(const cot_tensor *to, int64_t to_offset, const cot_tensor *from, int64_t from_offset, int count,
                    bool add)
{
    const int last = to->rank - 1;
    const int64_t size = to->shape[last], to_stride = to->stride[last], from_stride = from->stride[last];
    for (int64_t first = 0; first < size; first += SUM_BLOCK) {
        const int64_t elements = cot_min(size - first, SUM_BLOCK), at = to_offset + first * to_stride;
        double sums[SUM_BLOCK];
        for (int64_t i = 0; i < elements; i++)
            sums[i] = add ? cot_load_f64(to->data, to->dtype, at + i * to_stride) : -0.0;
        for (int n = 0; n < count; n++)
            add_block(sums, &from[n], from_offset + first * from_stride, from_stride, elements);
        for (int64_t i = 0; i < elements; i++)
            cot_store_f64(to->data, to->dtype, at + i * to_stride, sums[i]);
    }
}

void cot_sum_tensors(const cot_tensor *to, const cot_tensor from[], int count, bool add)
{
    each_row(to, from, count, add, sum_row);
}

/* FNV-1a over 8 bytes at a time. */
static uint64_t mix(uint64_t hash, uint64_t word)
{
    return (hash ^ word) * 0x100000001b3u ^ hash >> 29;
}

int64_t cot_hash_tensor(const cot_tensor *tensor)
{
    uint64_t hash = 0xcbf29ce484222325u;
    if (!cot_is_present(tensor))
        return 0;
    hash = mix(mix(hash, (uint64_t)tensor->dtype), (uint64_t)tensor->rank);
    for (int axis = 0; axis < tensor->rank; axis++)
        hash = mix(hash, (uint64_t)tensor->shape[axis]);
    const int64_t elements = cot_elements(tensor);
    const size_t size = cot_dtype_size(tensor->dtype);
    for (int64_t n = 0; tensor->data != NULL && n < elements; n++) {
        int64_t offset = 0, rest = n;
        uint64_t word = 0;
        for (int axis = tensor->rank - 1; axis >= 0; axis--)
            offset += rest % tensor->shape[axis] * tensor->stride[axis], rest /= tensor->shape[axis];
        memcpy(&word, (const char *)tensor->data + offset * (int64_t)size, size);
        hash = mix(hash, word);
    }
    return (int64_t)(hash | 1);
}

cot_status cot_widen(const char *call, const char *name, cot_tensor *tensor, int axis, int64_t part, int64_t whole)
{
    if (!cot_is_present(tensor) || axis >= tensor->rank)
        return COT_OK;
    if (tensor->shape[axis] != part)
        return cot_fail(COT_INVALID_SHAPE,
                        "%s: %s has %" PRId64 " on axis %d, expected %" PRId64 ", the rows of this rank", call, name,
                        tensor->shape[axis], axis, part);
    tensor->shape[axis] = whole;
    return COT_OK;
}

void *cot_arena_take(cot_arena *arena, int64_t count, size_t size)
{
    const size_t offset = cot_workspace_reserve(&arena->used, count, size);
    return arena->base != NULL ? arena->base + offset : NULL;
}

void *cot_arena_take_host(cot_arena *arena, int64_t count, size_t size)
{
    const size_t offset = cot_workspace_reserve(&arena->host_used, count, size);
    return arena->host != NULL ? arena->host + offset : NULL;
}

cot_status cot_copy_args(const char *call, const char *member, const void *args, size_t size, void *copy)
{
    size_t given;
    memcpy(&given, args, sizeof given);
    if (given <= sizeof given || given > 4096)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: %s is %zu, expected %zu (use COT_INIT)", call, member, given, size);
    for (size_t byte = size; byte < given; byte++)
        if (((const char *)args)[byte] != 0)
            return cot_fail(COT_INVALID_ARGUMENT,
                            "%s: %s is %zu and byte %zu is set, but this library supports only %zu bytes", call, member,
                            given, byte, size);
    memset(copy, 0, size);
    memcpy(copy, args, given < size ? given : size);
    memcpy(copy, &size, sizeof size);
    return COT_OK;
}
