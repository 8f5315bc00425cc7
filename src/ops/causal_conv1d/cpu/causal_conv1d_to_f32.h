/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_to_f32.h: converts elements of any dtype and stride to arrays of f32, and back.
 * docs/kernels/causal_conv1d_cpu.md defines item, piece, row, tile, column and span, and has a picture of the halo.
 * src/simd/simd.h defines V_NAME, vf, vi, vm, VW and the v_ functions. */
#ifndef COT_CAUSAL_CONV1D_TO_F32_H
#define COT_CAUSAL_CONV1D_TO_F32_H

#include "causal_conv1d_pieces.h"
#include "simd/silu.h"

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

/* ---- instances: each loop for a constant K = 2..8, and for a variable K (width 0), in every dtype --------------- *
 * Sanitizer builds have only K = 4 and the variable K, from the same source: the full set takes minutes to compile
 * there. */

/* clang-format off */
#if defined(COT_FEW_INSTANCES)
#define CONV1D_TABLE(entry) { entry(0), entry(4) }
#define CONV1D_EACH_WIDTH(define) define(0) define(4)
enum { CONV1D_INSTANCES = 2 };
#else
#define CONV1D_TABLE(entry) { entry(0), entry(2), entry(3), entry(4), entry(5), entry(6), entry(7), entry(8) }
#define CONV1D_EACH_WIDTH(define) \
    define(0) define(2) define(3) define(4) define(5) define(6) define(7) define(8)
enum { CONV1D_INSTANCES = 8 };
#endif
#define CONV1D_EACH_DTYPE(define, width) define(width, F32) define(width, F16) define(width, BF16)
/* clang-format on */

/* The first index of a table of instances. The second index is dtype - COT_F32. */
static inline int conv1d_instance_index(int64_t K)
{
    if (CONV1D_INSTANCES == 2)
        return K == 4;
    return K >= 2 && K <= 8 ? (int)K - 1 : 0;
}

/* Taps are summed in chunks of 16, as in the scalar kernel: the rounding error then grows with the number of chunks.
 * Call this before tap k is added: at the start of a chunk it adds the finished chunk to `total`. conv1d_tap_sum
 * returns the final sum. For a constant K <= 16 both compile to nothing. */
enum { CONV1D_TAP_CHUNK = 16 };

V_INLINE void conv1d_close_tap_chunk(int64_t k, vf *chunk, vf *total)
{
    if (k > 0 && k % CONV1D_TAP_CHUNK == 0) {
        *total = v_add(*total, *chunk);
        *chunk = v_zero();
    }
}

V_INLINE vf conv1d_tap_sum(int64_t K, vf chunk, vf total)
{
    return K > CONV1D_TAP_CHUNK ? v_add(total, chunk) : chunk;
}

/* AVX2, with 16 vector registers: the backward passes values through buffers in the L1 cache, not in registers. */
enum { CONV1D_FEW_REGISTERS = VW == 8 };

/* If x, y and their gradients together have at least this many bytes, outputs are written by non-temporal stores. This is
 * several times the L2 cache of a core (1 or 2 MiB). The limit for x alone, which counts as larger than the L3 cache, is
 * CONV1D_WIDE_BYTES. */
enum { CONV1D_NONTEMPORAL_BYTES = 8 << 20 };

static inline bool conv1d_uses_nontemporal_stores(const conv1d_sizes *sizes, int tensors)
{
    return (double)tensors * (double)sizes->B * (double)sizes->D * (double)sizes->T *
               (double)cot_dtype_size(sizes->dtype) >=
           CONV1D_NONTEMPORAL_BYTES;
}

/* ---- final_state -------------------------------------------------------------------------------------------- *
 * One item copies the last K-1 inputs of one span (see causal_conv1d_problem.h) to final_state, for
 * CONV1D_STATE_CHANNELS channels. */

enum { CONV1D_STATE_CHANNELS = 256 };

static inline void conv1d_store_final_state(const conv1d_sizes *sizes, const cot_causal_conv1d_forward_args *a,
                                            int64_t index, int64_t state_item)
{
    const conv1d_span span = conv1d_span_at(sizes, &a->seq_idx, &a->cu_seqlens, index);
    const int64_t positions = sizes->K - 1, begin = state_item * CONV1D_STATE_CHANNELS;
    const int64_t end = begin + CONV1D_STATE_CHANNELS < sizes->D ? begin + CONV1D_STATE_CHANNELS : sizes->D;
    for (int64_t d = begin; d < end; d++)
        for (int64_t i = 0; i < positions; i++) {
            const int64_t position = span.end - positions + i;
            float value = 0;
            if (conv1d_same_sequence(&span, position, span.end - 1)) {
                if (position >= span.first)
                    value = conv1d_load(&a->x, span.b, d, position);
                else if (cot_is_present(&a->initial_state))
                    value = conv1d_load(&a->initial_state, span.state, d, position - span.first + positions);
            }
            conv1d_store(&a->final_state, span.state, d, i, value);
        }
}

/* Items of final_state for one sequence. */
static inline int64_t conv1d_state_items(const conv1d_sizes *sizes)
{
    return cot_ceil_div(sizes->D, CONV1D_STATE_CHANNELS);
}

#endif
