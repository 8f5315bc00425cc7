/* SPDX-License-Identifier: Apache-2.0 */
#include "tensor.h"

#include "integers.h"
#include "status.h"

#include <inttypes.h>
#include <stdlib.h>

/* Sizes and offsets are kept below 2^56 bytes, so that the sums in this file cannot reach 2^63 and overflow. A size of
 * 0 counts as 1. The limit therefore holds for the products of the other sizes too. */
#define LIMIT ((int64_t)COT_MAX_BYTES)

size_t cot_dtype_size(cot_dtype dtype)
{
    switch (dtype) {
    case COT_F32: return 4;
    case COT_F16: return 2;
    case COT_BF16: return 2;
    case COT_F64: return 8;
    case COT_I32: return 4;
    case COT_U8: return 1;
    case COT_DTYPE_NONE: return 0;
    }
    return 0;
}

const char *cot_dtype_name(cot_dtype dtype)
{
    switch (dtype) {
    case COT_F32: return "f32";
    case COT_F16: return "f16";
    case COT_BF16: return "bf16";
    case COT_F64: return "f64";
    case COT_I32: return "i32";
    case COT_U8: return "u8";
    case COT_DTYPE_NONE: return "none";
    }
    return "?";
}

cot_tensor cot_tensor_contiguous(void *data, cot_dtype dtype, int rank, const int64_t *shape)
{
    cot_tensor tensor;
    memset(&tensor, 0, sizeof tensor);
    if (rank < 0 || rank > COT_MAX_RANK || (rank > 0 && shape == NULL))
        return tensor;
    tensor.data = data;
    tensor.dtype = dtype;
    tensor.rank = rank;
    int64_t stride = 1;
    for (int axis = rank - 1; axis >= 0; axis--) {
        tensor.shape[axis] = shape[axis];
        tensor.stride[axis] = stride;
        /* The call that takes the tensor refuses sizes that overflow. Here the result must only be defined. */
        if (__builtin_mul_overflow(stride, shape[axis] > 1 ? shape[axis] : 1, &stride))
            stride = INT64_MAX;
    }
    return tensor;
}

int64_t cot_elements(const cot_tensor *tensor)
{
    int64_t elements = 1;
    for (int axis = 0; axis < tensor->rank; axis++)
        elements *= tensor->shape[axis];
    return elements;
}

void cot_extent(const cot_tensor *tensor, int64_t *low, int64_t *high)
{
    const int64_t size = (int64_t)cot_dtype_size(tensor->dtype);
    *low = *high = 0;
    if (size == 0 || cot_elements(tensor) == 0)
        return;
    for (int axis = 0; axis < tensor->rank; axis++) {
        const int64_t reach = (tensor->shape[axis] - 1) * tensor->stride[axis] * size;
        *(reach < 0 ? low : high) += reach;
    }
    *high += size;
}

static void describe_dtypes(unsigned allowed, char *text, size_t size)
{
    static const cot_dtype all[] = {COT_F32, COT_F16, COT_BF16, COT_F64, COT_I32, COT_U8};
    text[0] = '\0';
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (!(allowed & COT_DTYPE_BIT(all[i])))
            continue;
        if (text[0] != '\0')
            strncat(text, " or ", size - strlen(text) - 1);
        strncat(text, cot_dtype_name(all[i]), size - strlen(text) - 1);
    }
}

static cot_status check_sizes(const char *call, const char *name, const cot_tensor *tensor)
{
    int64_t bytes = (int64_t)cot_dtype_size(tensor->dtype), reach = bytes;
    bool empty = false;
    for (int axis = 0; axis < tensor->rank; axis++) {
        if (tensor->shape[axis] < 0)
            return cot_fail(COT_INVALID_SHAPE, "%s: %s has size %" PRId64 " on axis %d, expected 0 or more", call, name,
                            tensor->shape[axis], axis);
        empty = empty || tensor->shape[axis] == 0;
    }
    for (int axis = 0; axis < tensor->rank; axis++) {
        const int64_t size = tensor->shape[axis], stride = tensor->stride[axis];
        int64_t span;
        if (__builtin_mul_overflow(bytes, size > 0 ? size : 1, &bytes) || bytes >= LIMIT)
            return cot_fail(COT_INVALID_SHAPE, "%s: %s has more than 2^56 bytes (size %" PRId64 " on axis %d)", call,
                            name, size, axis);
        if (empty || size == 1)
            continue; /* this stride is never multiplied by an index other than 0 */
        if (stride == INT64_MIN ||
            __builtin_mul_overflow((stride < 0 ? -stride : stride), (int64_t)cot_dtype_size(tensor->dtype), &span) ||
            __builtin_mul_overflow(span, size - 1, &span) || __builtin_add_overflow(reach, span, &reach) ||
            reach >= LIMIT)
            return cot_fail(COT_INVALID_SHAPE,
                            "%s: %s reaches past 2^56 bytes (size %" PRId64 ", stride %" PRId64 " on axis %d)", call,
                            name, size, stride, axis);
    }
    return COT_OK;
}

cot_status cot_check_tensor(const char *call, const char *name, const cot_tensor *tensor, unsigned allowed,
                            int min_rank, int max_rank)
{
    if (tensor->dtype == COT_DTYPE_NONE) {
        if (tensor->data != NULL || tensor->rank != 0)
            return cot_fail(COT_INVALID_DTYPE, "%s: %s has data or a rank but no dtype (an absent tensor is all zero)",
                            call, name);
        return COT_OK;
    }
    if (cot_dtype_size(tensor->dtype) == 0)
        return cot_fail(COT_INVALID_DTYPE, "%s: %s has the unknown dtype %d", call, name, (int)tensor->dtype);
    if (!(allowed & COT_DTYPE_BIT(tensor->dtype))) {
        char expected[64];
        describe_dtypes(allowed, expected, sizeof expected);
        return cot_fail(COT_INVALID_DTYPE, "%s: %s has dtype %s, expected %s", call, name,
                        cot_dtype_name(tensor->dtype), expected);
    }
    if (tensor->rank < min_rank || tensor->rank > max_rank) {
        if (min_rank == max_rank)
            return cot_fail(COT_INVALID_SHAPE, "%s: %s has %d ax%s, expected %d", call, name, (int)tensor->rank,
                            tensor->rank == 1 ? "is" : "es", min_rank);
        return cot_fail(COT_INVALID_SHAPE, "%s: %s has %d ax%s, expected %d to %d", call, name, (int)tensor->rank,
                        tensor->rank == 1 ? "is" : "es", min_rank, max_rank);
    }
    return check_sizes(call, name, tensor);
}

cot_status cot_check_required(const char *call, const char *name, const cot_tensor *tensor)
{
    return cot_is_present(tensor) ? COT_OK : cot_fail(COT_INVALID_ARGUMENT, "%s: %s is required", call, name);
}

cot_status cot_check_size(const char *call, const char *name, const cot_tensor *tensor, int axis, const char *symbol,
                          const char *source, int64_t expected)
{
    if (tensor->shape[axis] == expected)
        return COT_OK;
    return cot_fail(COT_INVALID_SHAPE, "%s: %s has %s=%" PRId64 ", %s has %s=%" PRId64, call, name, symbol,
                    tensor->shape[axis], source, symbol, expected);
}

cot_status cot_check_data(const char *call, const char *name, const cot_tensor *tensor)
{
    if (!cot_is_present(tensor) || cot_elements(tensor) == 0)
        return COT_OK;
    if (tensor->data == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: %s has null data", call, name);
    const size_t size = cot_dtype_size(tensor->dtype);
    if ((uintptr_t)tensor->data % size != 0)
        return cot_fail(COT_INVALID_LAYOUT, "%s: %s has data at %p, expected a multiple of %zu (one %s element)", call,
                        name, tensor->data, size, cot_dtype_name(tensor->dtype));
    return COT_OK;
}

/* ---- overlap ------------------------------------------------------------------------------------------ *
 * Two elements share a byte if and only if  low < sum_k i_k * stride_k < high  has a solution with
 * first_k <= i_k <= last_k. The i_k are the indices into one view and the negated indices into the other view.
 * The search is depth-first over the terms, the largest stride first. The range that the remaining terms can add leaves
 * one or two candidates at each level, for all but pathological layouts. */

typedef struct term {
    int64_t stride, first, last; /* bytes; stride > 0 */
} term;

typedef struct search {
    term terms[2 * COT_MAX_RANK];
    int64_t min_rest[2 * COT_MAX_RANK + 1], max_rest[2 * COT_MAX_RANK + 1]; /* bounds of the sum of terms k.. */
    int count;
    int64_t low, high;
    int budget;
} search;

static int by_stride_descending(const void *a, const void *b)
{
    const int64_t left = ((const term *)a)->stride, right = ((const term *)b)->stride;
    return (left < right) - (left > right);
}

/* Adds the term of an axis. `stride` counts elements of `size` bytes. */
static void add_term(search *s, int64_t stride, int64_t size, int64_t first, int64_t last)
{
    if (stride == 0 || (first == 0 && last == 0))
        return; /* the term is always 0; an unchecked stride of such an axis could overflow below */
    stride *= size;
    if (stride < 0) {
        const int64_t swapped = -first;
        stride = -stride;
        first = -last;
        last = swapped;
    }
    /* Two axes with the same stride are merged into a longer one. Without this, neighbouring slices of one array would
     * give as many candidates as they have rows. */
    for (int k = 0; k < s->count; k++) {
        if (s->terms[k].stride == stride) {
            s->terms[k].first += first;
            s->terms[k].last += last;
            return;
        }
    }
    s->terms[s->count++] = (term){stride, first, last};
}

static void finish_terms(search *s)
{
    qsort(s->terms, (size_t)s->count, sizeof *s->terms, by_stride_descending);
    s->min_rest[s->count] = s->max_rest[s->count] = 0;
    for (int k = s->count - 1; k >= 0; k--) {
        s->min_rest[k] = s->min_rest[k + 1] + s->terms[k].first * s->terms[k].stride;
        s->max_rest[k] = s->max_rest[k + 1] + s->terms[k].last * s->terms[k].stride;
    }
}

static int64_t floor_div(int64_t a, int64_t b) /* b > 0 */
{
    return a / b - (a % b < 0);
}

/* Returns whether some choice of terms k.. brings `sum` strictly between low and high. Returns true when the budget is
 * used up. */
static bool reaches(search *s, int k, int64_t sum)
{
    if (s->budget-- <= 0)
        return true;
    if (k == s->count)
        return sum > s->low && sum < s->high;
    const term *t = &s->terms[k];
    int64_t first = floor_div(s->low - sum - s->max_rest[k + 1], t->stride) + 1;
    int64_t last = -(floor_div(-(s->high - sum - s->min_rest[k + 1]), t->stride) + 1);
    first = first > t->first ? first : t->first;
    last = last < t->last ? last : t->last;
    for (int64_t i = first; i <= last; i++)
        if (reaches(s, k + 1, sum + i * t->stride))
            return true;
    return false;
}

enum { SEARCH_BUDGET = 20000 };

bool cot_same_view(const cot_tensor *a, const cot_tensor *b)
{
    bool same = a->data == b->data && a->dtype == b->dtype && a->rank == b->rank;
    for (int axis = 0; same && axis < a->rank; axis++)
        same = a->shape[axis] == b->shape[axis] && (a->shape[axis] == 1 || a->stride[axis] == b->stride[axis]);
    return same;
}

cot_status cot_check_overlap(const char *call, const char *output_name, const cot_tensor *output, const char *name,
                             const cot_tensor *tensor)
{
    if (!cot_is_present(output) || !cot_is_present(tensor) || cot_elements(output) == 0 || cot_elements(tensor) == 0)
        return COT_OK;
    int64_t low_a, high_a, low_b, high_b;
    cot_extent(output, &low_a, &high_a);
    cot_extent(tensor, &low_b, &high_b);
    const uintptr_t a = (uintptr_t)output->data, b = (uintptr_t)tensor->data;
    if (a + (uintptr_t)high_a <= b + (uintptr_t)low_b || b + (uintptr_t)high_b <= a + (uintptr_t)low_a)
        return COT_OK;
    const int64_t size_a = (int64_t)cot_dtype_size(output->dtype), size_b = (int64_t)cot_dtype_size(tensor->dtype);
    const int64_t distance = (int64_t)(a - b);
    search s = {.low = -size_a - distance, .high = size_b - distance, .budget = SEARCH_BUDGET};
    for (int axis = 0; axis < output->rank; axis++)
        add_term(&s, output->stride[axis], size_a, 0, output->shape[axis] - 1);
    for (int axis = 0; axis < tensor->rank; axis++)
        add_term(&s, tensor->stride[axis], size_b, 1 - tensor->shape[axis], 0);
    finish_terms(&s);
    if (reaches(&s, 0, 0))
        return cot_fail(COT_INVALID_LAYOUT, "%s: %s overlaps %s", call, output_name, name);
    return COT_OK;
}

cot_status cot_check_output(const char *call, const char *name, const cot_tensor *tensor)
{
    if (!cot_is_present(tensor) || cot_elements(tensor) <= 1)
        return COT_OK;
    /* Two different elements at one address differ first in some axis, by 1 .. size-1, and in any way in later axes. */
    const int64_t size = (int64_t)cot_dtype_size(tensor->dtype);
    for (int axis = 0; axis < tensor->rank; axis++) {
        if (tensor->shape[axis] == 1)
            continue;
        search s = {.low = -size, .high = size, .budget = SEARCH_BUDGET};
        bool repeated = tensor->stride[axis] == 0;
        if (!repeated) {
            add_term(&s, tensor->stride[axis], size, 1, tensor->shape[axis] - 1);
            for (int later = axis + 1; later < tensor->rank; later++)
                add_term(&s, tensor->stride[later], size, 1 - tensor->shape[later], tensor->shape[later] - 1);
            finish_terms(&s);
            repeated = reaches(&s, 0, 0);
        }
        if (repeated)
            return cot_fail(COT_INVALID_LAYOUT,
                            "%s: %s is an output but its strides give two elements one address "
                            "(axis %d, stride %" PRId64 ")",
                            call, name, axis, tensor->stride[axis]);
    }
    return COT_OK;
}
