/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_stage.h: elements of any dtype and stride to and from rows of f32. */
#ifndef COT_CAUSAL_CONV1D_STAGE_H
#define COT_CAUSAL_CONV1D_STAGE_H

#include "causal_conv1d_pieces.h"
#include "simd/silu.h"

V_INLINE char *conv1d_at(const cot_tensor *tensor, int64_t i, int64_t j, int64_t k)
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
    return (float)cot_load_f64(conv1d_at(tensor, i, j, k), tensor->dtype, 0);
}

static inline void conv1d_store(const cot_tensor *tensor, int64_t i, int64_t j, int64_t k, float value)
{
    cot_store_f64(conv1d_at(tensor, i, j, k), tensor->dtype, 0, value);
}

/* Bytes of an element of rows that vectors take. */
V_INLINE int64_t conv1d_size(cot_dtype dtype)
{
    return dtype == COT_F32 ? 4 : 2;
}

V_INLINE void conv1d_widen_as(float *to, const char *from, cot_dtype dtype, int64_t n)
{
    const int64_t size = conv1d_size(dtype);
    int64_t i = 0;
    for (; i + VW <= n; i += VW)
        v_store(to + i, v_load_as(from + i * size, dtype));
    if (i < n)
        v_store_n(to + i, v_load_n_as(from + i * size, dtype, (int)(n - i)), (int)(n - i));
}

V_INLINE void conv1d_narrow_as(char *to, cot_dtype dtype, const float *from, int64_t n)
{
    const int64_t size = conv1d_size(dtype);
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

/* ---- instances: a loop for K = 2..8 as a constant, and for K as a variable (width 0), in every dtype --------- *
 * Under the sanitizers, where they take minutes to compile, for K = 4 and as a variable: the source is the same. */

/* clang-format off */
#if defined(COT_FEW_INSTANCES)
#define CONV1D_TABLE(row) { row(0), row(4) }
#define CONV1D_EACH_WIDTH(instances) instances(0) instances(4)
enum { CONV1D_INSTANCES = 2 };
#else
#define CONV1D_TABLE(row) { row(0), row(2), row(3), row(4), row(5), row(6), row(7), row(8) }
#define CONV1D_EACH_WIDTH(instances) \
    instances(0) instances(2) instances(3) instances(4) instances(5) instances(6) instances(7) instances(8)
enum { CONV1D_INSTANCES = 8 };
#endif
#define CONV1D_EACH_DTYPE(instance, width) instance(width, F32) instance(width, F16) instance(width, BF16)
/* clang-format on */

/* The first index of a table of instances; the second one is dtype - COT_F32. */
static inline int conv1d_instance(int64_t K)
{
    if (CONV1D_INSTANCES == 2)
        return K == 4;
    return K >= 2 && K <= 8 ? (int)K - 1 : 0;
}

/* Taps are summed in blocks of this many, as in the scalar kernel: rounding grows with the number of blocks. Called
 * before tap k is added; conv1d_taps_sum gives the sum in the end. Narrow filters of constant K compile to nothing. */
enum { CONV1D_TAP_BLOCK = 16 };

V_INLINE void conv1d_next_tap(int64_t k, vf *block, vf *before)
{
    if (k > 0 && k % CONV1D_TAP_BLOCK == 0) {
        *before = v_add(*before, *block);
        *block = v_zero();
    }
}

V_INLINE vf conv1d_taps_sum(int64_t K, vf block, vf before)
{
    return K > CONV1D_TAP_BLOCK ? v_add(before, block) : block;
}

/* Outputs beyond this footprint (bytes of the large tensors together) bypass the caches. */
enum { CONV1D_STREAM_BYTES = 8 << 20 };

static inline bool conv1d_streams(const conv1d_sizes *sizes, int tensors)
{
    return (double)tensors * (double)sizes->B * (double)sizes->D * (double)sizes->T *
               (double)cot_dtype_size(sizes->dtype) >=
           CONV1D_STREAM_BYTES;
}

/* ---- final_state -------------------------------------------------------------------------------------------- *
 * One item hands the last K-1 inputs of one span (see causal_conv1d_problem.h) on, for a block of channels. */

enum { CONV1D_STATE_BLOCK = 256 };

static inline void conv1d_final_state(const conv1d_sizes *sizes, const cot_causal_conv1d_forward_args *a, int64_t index,
                                      int64_t block)
{
    const conv1d_span span = conv1d_span_at(sizes, &a->seq_idx, &a->cu_seqlens, index);
    const int64_t columns = sizes->K - 1, begin = block * CONV1D_STATE_BLOCK;
    const int64_t end = begin + CONV1D_STATE_BLOCK < sizes->D ? begin + CONV1D_STATE_BLOCK : sizes->D;
    for (int64_t d = begin; d < end; d++)
        for (int64_t i = 0; i < columns; i++) {
            const int64_t p = span.end - columns + i;
            float value = 0;
            if (conv1d_same(&span, p, span.end - 1)) {
                if (p >= span.first)
                    value = conv1d_load(&a->x, span.b, d, p);
                else if (cot_present(&a->initial_state))
                    value = conv1d_load(&a->initial_state, span.state, d, p - span.first + columns);
            }
            conv1d_store(&a->final_state, span.state, d, i, value);
        }
}

/* Items of final_state: none, or blocks of channels of every sequence. */
static inline int64_t conv1d_state_blocks(const conv1d_sizes *sizes)
{
    return cot_ceil_div(sizes->D, CONV1D_STATE_BLOCK);
}

#endif
