/* SPDX-License-Identifier: Apache-2.0
 * tensor.h: the checks of tensor arguments that the fronts share. Each returns COT_OK or fails with a message
 * "CALL: NAME ...". */
#ifndef COT_CORE_TENSOR_H
#define COT_CORE_TENSOR_H

#include <cotangent/core.h>
#include <stdbool.h>

/* Sets of dtypes, for `allowed` below. */
#define COT_DTYPE_BIT(dtype) (1u << (dtype))
#define COT_FLOATS (COT_DTYPE_BIT(COT_F32) | COT_DTYPE_BIT(COT_F16) | COT_DTYPE_BIT(COT_BF16) | COT_DTYPE_BIT(COT_F64))

static inline bool cot_present(const cot_tensor *tensor)
{
    return tensor->dtype != COT_DTYPE_NONE;
}

/* The product of the sizes. Only for tensors that passed cot_check_tensor. */
int64_t cot_elements(const cot_tensor *tensor);

/* The bytes that a view touches: [*low, *high) relative to data, 0 and 0 for an empty one. */
void cot_extent(const cot_tensor *tensor, int64_t *low, int64_t *high);

/* One tensor by itself: dtype in `allowed`, rank within [min_rank, max_rank], sizes not negative, nothing that
 * overflows. An absent tensor passes (see cot_check_required); one that is absent but not all zero does not. */
cot_status cot_check_tensor(const char *call, const char *name, const cot_tensor *tensor, unsigned allowed,
                            int min_rank, int max_rank);

cot_status cot_check_required(const char *call, const char *name, const cot_tensor *tensor);

/* Size of axis `axis`, called `symbol` (B, D, T...), must be `expected`, which is what `source` has. */
cot_status cot_check_size(const char *call, const char *name, const cot_tensor *tensor, int axis, const char *symbol,
                          const char *source, int64_t expected);

/* Data not null unless empty, aligned to the element's size. */
cot_status cot_check_data(const char *call, const char *name, const cot_tensor *tensor);

/* Are the two the same elements in the same order? The stride of an axis of one element says nothing. */
bool cot_same_view(const cot_tensor *a, const cot_tensor *b);

/* No element of an output may have the address of another one of its own, or of any other tensor's. Exact, but for
 * pathological strides where the search is cut off and the pair is refused. */
cot_status cot_check_output(const char *call, const char *name, const cot_tensor *tensor);
cot_status cot_check_overlap(const char *call, const char *output_name, const cot_tensor *output, const char *name,
                             const cot_tensor *tensor);

#endif
