/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_to_f32.h: converts elements of any dtype and stride to arrays of f32, and back.
 * src/simd/simd.h defines V_NAME, vf, vi, vm, VW and the v_ functions. */
#ifndef COT_CAUSAL_CONV1D_TO_F32_H
#define COT_CAUSAL_CONV1D_TO_F32_H

#include "ops/causal_conv1d/causal_conv1d_problem.h"
#include "simd/simd.h"

V_INLINE char *conv1d_element(const cot_tensor *tensor, int64_t i, int64_t j, int64_t k)
{
    const int64_t offset = i * tensor->stride[0] + j * tensor->stride[1] + k * tensor->stride[2];
    return (char *)tensor->data + offset * (int64_t)cot_dtype_size(tensor->dtype);
}

V_INLINE bool conv1d_contiguous_time(const cot_tensor *tensor)
{
    return tensor->stride[2] == 1 || tensor->shape[2] == 1;
}

static inline float conv1d_load(const cot_tensor *tensor, int64_t i, int64_t j, int64_t k)
{
    return (float)cot_load_f64(conv1d_element(tensor, i, j, k), tensor->dtype, 0);
}

static inline void conv1d_store(const cot_tensor *tensor, int64_t i, int64_t j, int64_t k, float value)
{
    cot_store_f64(conv1d_element(tensor, i, j, k), tensor->dtype, 0, value);
}

/* Element size in bytes. Only for the dtypes that the vector kernels support, of 16 and 32 bits. */
V_INLINE int64_t conv1d_element_size(cot_dtype dtype)
{
    return dtype == COT_F32 ? 4 : 2;
}

V_INLINE void conv1d_widen_as(float *to, const char *from, cot_dtype dtype, int64_t n)
{
    const int64_t size = conv1d_element_size(dtype);
    int64_t i = 0;
    for (; i + VW <= n; i += VW)
        v_store(to + i, v_load_as(from + i * size, dtype));
    if (i < n)
        v_store_n(to + i, v_load_n_as(from + i * size, dtype, (int)(n - i)), (int)(n - i));
}

V_INLINE void conv1d_narrow_as(char *to, cot_dtype dtype, const float *from, int64_t n)
{
    const int64_t size = conv1d_element_size(dtype);
    int64_t i = 0;
    for (; i + VW <= n; i += VW)
        v_store_as(to + i * size, dtype, v_load(from + i));
    if (i < n)
        v_store_n_as(to + i * size, dtype, v_load_n(from + i, (int)(n - i)), (int)(n - i));
}

V_INLINE void conv1d_gather_as(float *to, const char *from, cot_dtype dtype, int64_t stride, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = (float)cot_load_f64(from, dtype, i * stride);
}

V_INLINE void conv1d_scatter_as(char *to, cot_dtype dtype, int64_t stride, const float *from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        cot_store_f64(to, dtype, i * stride, (double)from[i]);
}

/* to[i] = from[i * stride], i < n */
static inline void conv1d_gather(float *to, const char *from, cot_dtype dtype, int64_t stride, int64_t n)
{
    if (stride == 1 || n == 1) {
        switch (dtype) {
        case COT_F32: conv1d_widen_as(to, from, COT_F32, n); return;
        case COT_BF16: conv1d_widen_as(to, from, COT_BF16, n); return;
        default: conv1d_widen_as(to, from, COT_F16, n); return;
        }
    }
    switch (dtype) {
    case COT_F32: conv1d_gather_as(to, from, COT_F32, stride, n); return;
    case COT_BF16: conv1d_gather_as(to, from, COT_BF16, stride, n); return;
    default: conv1d_gather_as(to, from, COT_F16, stride, n); return;
    }
}

/* to[i * stride] = from[i], i < n */
static inline void conv1d_scatter(char *to, cot_dtype dtype, int64_t stride, const float *from, int64_t n)
{
    if (stride == 1 || n == 1) {
        switch (dtype) {
        case COT_F32: conv1d_narrow_as(to, COT_F32, from, n); return;
        case COT_BF16: conv1d_narrow_as(to, COT_BF16, from, n); return;
        default: conv1d_narrow_as(to, COT_F16, from, n); return;
        }
    }
    switch (dtype) {
    case COT_F32: conv1d_scatter_as(to, COT_F32, stride, from, n); return;
    case COT_BF16: conv1d_scatter_as(to, COT_BF16, stride, from, n); return;
    default: conv1d_scatter_as(to, COT_F16, stride, from, n); return;
    }
}

#endif
