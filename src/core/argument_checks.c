/* SPDX-License-Identifier: Apache-2.0 */
#include "argument_checks.h"

#include "status.h"
#include "tensor.h"

cot_status cot_check_silu(const char *call, cot_activation activation)
{
    if (activation == COT_ACTIVATION_NONE || activation == COT_ACTIVATION_SILU)
        return COT_OK;
    return cot_fail(COT_INVALID_ARGUMENT, "%s: activation is %d, expected 0 (none) or 1 (SiLU)", call, (int)activation);
}

cot_status cot_check_f64(const char *call, const cot_tensor *x, const cot_named_tensor *tensors, int count)
{
    for (int i = 0; i < count; i++) {
        const cot_dtype dtype = tensors[i].tensor->dtype;
        if (dtype != COT_DTYPE_NONE && dtype != COT_I32 && (dtype == COT_F64) != (x->dtype == COT_F64))
            return cot_fail(COT_INVALID_DTYPE, "%s: %s has dtype %s, x has %s (f64 goes with f64 only)", call,
                            tensors[i].name, cot_dtype_name(dtype), cot_dtype_name(x->dtype));
    }
    return COT_OK;
}

/* The bytes [low, high) that a tensor covers. low = high: none. */
typedef struct memory_range {
    uintptr_t low, high;
} memory_range;

static memory_range range_of(const cot_tensor *tensor)
{
    int64_t low, high;
    cot_extent(tensor, &low, &high);
    const uintptr_t data = (uintptr_t)tensor->data;
    return (memory_range){data + (uintptr_t)low, data + (uintptr_t)high};
}

static bool may_be_same(const cot_named_tensor *output, const cot_named_tensor *other)
{
    return output->in_place && other->in_place && !other->output && cot_same_view(output->tensor, other->tensor);
}

cot_status cot_check_memory(const char *call, const cot_named_tensor *tensors, int count)
{
    memory_range ranges[COT_MAX_TENSORS];
    for (int i = 0; i < count; i++) {
        CHECK(cot_check_data(call, tensors[i].name, tensors[i].tensor));
        if (tensors[i].output)
            CHECK(cot_check_output(call, tensors[i].name, tensors[i].tensor));
        ranges[i] = range_of(tensors[i].tensor);
    }
    /* Most pairs lie apart, so that a comparison of their ranges suffices. */
    for (int i = 0; i < count; i++)
        for (int j = 0; tensors[i].output && j < count; j++)
            if (j != i && ranges[i].low < ranges[j].high && ranges[j].low < ranges[i].high &&
                !may_be_same(&tensors[i], &tensors[j]))
                CHECK(cot_check_overlap(call, tensors[i].name, tensors[i].tensor, tensors[j].name, tensors[j].tensor));
    return COT_OK;
}
