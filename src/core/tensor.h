/* SPDX-License-Identifier: Apache-2.0
 * tensor.h: the checks of tensor arguments that all ops share. Each returns COT_OK, or fails with a message
 * "CALL: NAME ...". */
#ifndef COT_CORE_TENSOR_H
#define COT_CORE_TENSOR_H

#include <cotangent/core.h>
#include <stdbool.h>

/* Sets of dtypes, for `allowed` below. */
#define COT_DTYPE_BIT(dtype) (1u << (dtype))
#define COT_FLOATS (COT_DTYPE_BIT(COT_F32) | COT_DTYPE_BIT(COT_F16) | COT_DTYPE_BIT(COT_BF16) | COT_DTYPE_BIT(COT_F64))

static inline bool cot_is_present(const cot_tensor *tensor)
{
    return tensor->dtype != COT_DTYPE_NONE;
}

/* The number of elements. Only for tensors that have passed cot_check_tensor. */
int64_t cot_elements(const cot_tensor *tensor);

/* The range of bytes that a view covers, [*low, *high) relative to data. An empty view has *low = *high = 0. */
void cot_extent(const cot_tensor *tensor, int64_t *low, int64_t *high);

/* Checks one tensor: its dtype is in `allowed`, its rank in [min_rank, max_rank], its sizes are not negative, and no
 * size or offset overflows. An absent tensor passes (see cot_check_required), unless it has data or a rank. */
cot_status cot_check_tensor(const char *call, const char *name, const cot_tensor *tensor, unsigned allowed,
                            int min_rank, int max_rank);

cot_status cot_check_required(const char *call, const char *name, const cot_tensor *tensor);

/* Checks that axis `axis`, called `symbol` in messages (B, D, T...), has the size `expected`, as tensor `source`
 * has. */
cot_status cot_check_size(const char *call, const char *name, const cot_tensor *tensor, int axis, const char *symbol,
                          const char *source, int64_t expected);

/* Checks that data is aligned to the element size, and is not null unless the tensor is empty or absent. */
cot_status cot_check_data(const char *call, const char *name, const cot_tensor *tensor);

/* Returns whether both views have the same elements in the same order. The stride of an axis of size 1 is ignored. */
bool cot_same_view(const cot_tensor *a, const cot_tensor *b);

/* cot_check_output checks that no two elements of an output share memory. cot_check_overlap checks that an output
 * shares no memory with another tensor. Both are exact, except for pathological strides: there the search stops early,
 * and the call is refused. */
cot_status cot_check_output(const char *call, const char *name, const cot_tensor *tensor);
cot_status cot_check_overlap(const char *call, const char *output_name, const cot_tensor *output, const char *name,
                             const cot_tensor *tensor);

#endif
