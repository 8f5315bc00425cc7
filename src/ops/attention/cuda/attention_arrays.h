/* SPDX-License-Identifier: Apache-2.0
 * attention_arrays.h: host code that turns tensors into kernel arguments and tensor maps. It also launches kernels
 * (`attention_launch`, `attention_launch_prepare`). */
#ifndef COT_ATTENTION_ARRAYS_H
#define COT_ATTENTION_ARRAYS_H

#include "attention_sm90_admit.h"
#include "cuda/device.h"

#include <math.h>

static inline attention_array attention_array_of(const cot_tensor *tensor)
{
    attention_array a = {.data = cot_is_present(tensor) ? tensor->data : NULL, .dtype = tensor->dtype};
    for (int axis = 0; axis < tensor->rank && axis < 3; axis++)
        a.stride[axis] = tensor->stride[axis];
    return a;
}

/* Encodes a tensor map of [B,T,H,d] with boxes of `rows` rows and 64 columns. The driver checks sizes and strides even
 * where nothing is read. */
static inline cot_status attention_encode_row_map(cot_queue *queue, CUtensorMap *map, const cot_tensor *t, int rows,
                                                  void *placeholder)
{
    const int64_t size = (int64_t)cot_dtype_size(t->dtype);
    int64_t sizes[4] = {t->shape[3], t->shape[1], t->shape[2], t->shape[0]};
    int64_t strides[3] = {t->stride[1] * size, t->stride[2] * size, t->stride[0] * size};
    for (int axis = 0; axis < 4; axis++)
        sizes[axis] = sizes[axis] > 0 ? sizes[axis] : 1;
    for (int axis = 0; axis < 3; axis++)
        strides[axis] = sizes[axis + 1] > 1 ? strides[axis] : 16;
    const bool empty = cot_elements(t) == 0;
    return cot_cuda_swizzled_map(queue, map, t->dtype, 4, empty ? placeholder : t->data, sizes, strides,
                                 (const int[]){64, rows, 1, 1});
}

/* Whether attention_has_aligned_rows holds and elements have 16 bits. */
static inline bool attention_has_vectors_16(const cot_tensor *t)
{
    return attention_has_aligned_rows(t) && cot_dtype_size(t->dtype) == 2;
}

static inline cot_status attention_launch(cot_queue *queue, const cot_cuda_kernel *kernel, cot_cuda_grid grid,
                                          const void *call)
{
    grid.shared_bytes = (unsigned)kernel->shared_bytes;
    return cot_cuda_launch(queue, kernel, &grid, call);
}

/* The sequences of a call, without the sizes of tiles and the pointers into the workspace. */
static inline attention_sequences attention_sequences_of(cot_queue *queue, const attention_problem *p)
{
    const attention_sizes *sizes = &p->sizes;
    return (attention_sequences){
        .q_begin = sizes->q_begin,
        .q_length = sizes->q_length,
        .k_begin = sizes->k_begin,
        .k_length = sizes->k_length,
        .B = (int32_t)sizes->B,
        .packed = sizes->packed,
        .rows_q = (int32_t)(sizes->packed ? sizes->rows_q : sizes->Tq),
        .rows_k = (int32_t)(sizes->packed ? sizes->rows_k : sizes->Tk),
        .max_seqlen_q = (int32_t)(sizes->Tq < INT32_MAX ? sizes->Tq : INT32_MAX),
        .max_seqlen_k = (int32_t)(sizes->Tk < INT32_MAX ? sizes->Tk : INT32_MAX),
        .count = (int32_t)attention_sequence_count(p),
        .max_tiles = INT32_MAX,
        .max_key_blocks = INT32_MAX,
        .cu_q = attention_array_of(&p->cu_seqlens_q),
        .cu_k = attention_array_of(&p->cu_seqlens_k),
        .seqused_q = attention_array_of(&p->seqused_q),
        .seqused_k = attention_array_of(&p->seqused_k),
        .fault = cot_cuda_fault_word(queue),
    };
}

static inline cot_status attention_launch_prepare(cot_queue *queue, const attention_sequences *sequences)
{
    extern const unsigned char cot_image_attention_prepare_sm90[];
    static const cot_cuda_kernel kernel = {cot_image_attention_prepare_sm90, "attention_prepare", 0};
    return attention_launch(queue, &kernel, (cot_cuda_grid){.blocks = {1, 1, 1}, .threads = 256}, sequences);
}

/* A score is `factor` times tanh. The coefficients of the series contain powers of scale / softcap, if those are normal
 * float32 numbers. Otherwise no score uses the series. */
static inline attention_softcap attention_softcap_of(const attention_sizes *sizes, float factor)
{
    attention_softcap cap = {0};
    if (sizes->softcap > 0) {
        const double scale = sizes->scale / sizes->softcap, square = scale * scale, max_scale = 16384,
                     linear = scale * (double)factor;
        const bool normal = fabs(scale) > 1 / max_scale && fabs(scale) < max_scale;
        cap.scale = (float)scale;
        cap.factor = factor;
        cap.long_max_square = normal ? (float)(ATTENTION_TANH_SERIES_MAX * ATTENTION_TANH_SERIES_MAX / square) : -1;
        cap.short_max_square = normal ? (float)(ATTENTION_TANH_SHORT_MAX * ATTENTION_TANH_SHORT_MAX / square) : -1;
        cap.short_min_exp2 = (float)exp2(-(double)factor * tanh(ATTENTION_TANH_SHORT_MAX));
        cap.short_max_exp2 = (float)fmin(exp2((double)factor * tanh(ATTENTION_TANH_SHORT_MAX)), 0x1p126);
        cap.long_series[0] = (float)(ATTENTION_TANH_C0 * linear);
        cap.long_series[1] = (float)(ATTENTION_TANH_C1 * linear * square);
        cap.long_series[2] = (float)(ATTENTION_TANH_C2 * linear * square * square);
        cap.long_series[3] = (float)(ATTENTION_TANH_C3 * linear * square * square * square);
        cap.short_series[0] = (float)(ATTENTION_TANH_B0 * linear);
        cap.short_series[1] = (float)(ATTENTION_TANH_B1 * linear * square);
        cap.short_series[2] = (float)(ATTENTION_TANH_B2 * linear * square * square);
    }
    return cap;
}

#endif
