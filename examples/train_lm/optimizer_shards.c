/* SPDX-License-Identifier: Apache-2.0 */
#include "optimizer_shards.h"

#include <cotangent/parallel.h>

element_range optimizer_share(const optimizer_shards *s, int64_t count)
{
    enum { UNIT = 64 }; /* elements: a share of any dtype begins at a whole vector */
    if (s->size <= 1)
        return (element_range){0, count};
    const int64_t share = ((count + s->size - 1) / s->size + UNIT - 1) / UNIT * UNIT;
    const int64_t begin = s->rank * share < count ? s->rank * share : count;
    return (element_range){begin, count - begin < share ? count : begin + share};
}

/* The sum of an element and zeros is the element. */
cot_status optimizer_shards_gather(const optimizer_shards *s, cot_queue *queue, cot_dtype dtype, void *array,
                                   int64_t count)
{
    const cot_tensor tensor = cot_tensor_contiguous(array, dtype, 1, &count);
    return s->size <= 1 || count == 0 ? COT_OK : cot_group_all_reduce(s->group, queue, &tensor);
}
