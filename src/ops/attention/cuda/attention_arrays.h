/* SPDX-License-Identifier: Apache-2.0
 * attention_arrays.h: tensors as the kernels of this op are given them, on the host. */
#ifndef COT_ATTENTION_ARRAYS_H
#define COT_ATTENTION_ARRAYS_H

#include "attention_launch.h"
#include "cuda/device.h"

#include <math.h>

static inline attention_array attention_array_of(const cot_tensor *tensor)
{
    attention_array a = {.data = cot_present(tensor) ? tensor->data : NULL, .dtype = tensor->dtype};
    for (int axis = 0; axis < tensor->rank && axis < 3; axis++)
        a.stride[axis] = tensor->stride[axis];
    return a;
}

/* Boxes of `rows` rows and 64 columns of [B,T,H,d]. The driver wants sizes and strides even where nothing is read. */
static inline cot_status attention_map_rows(cot_queue *queue, CUtensorMap *map, const cot_tensor *t, int rows,
                                            void *somewhere)
{
    const int64_t size = (int64_t)cot_dtype_size(t->dtype);
    int64_t sizes[4] = {t->shape[3], t->shape[1], t->shape[2], t->shape[0]};
    int64_t strides[3] = {t->stride[1] * size, t->stride[2] * size, t->stride[0] * size};
    for (int axis = 0; axis < 4; axis++)
        sizes[axis] = sizes[axis] > 0 ? sizes[axis] : 1;
    for (int axis = 0; axis < 3; axis++)
        strides[axis] = sizes[axis + 1] > 1 ? strides[axis] : 16;
    const bool empty = cot_elements(t) == 0;
    return cot_cuda_swizzled_map(queue, map, t->dtype, 4, empty ? somewhere : t->data, sizes, strides,
                                 (const int[]){64, rows, 1, 1});
}

/* Rows of 16-bit elements that begin at multiples of 16 bytes. */
static inline bool attention_in_vectors(const cot_tensor *t)
{
    return cot_present(t) && cot_dtype_size(t->dtype) == 2 && (uintptr_t)t->data % 16 == 0 && attention_steps(t);
}

static inline cot_status attention_launch(cot_queue *queue, const cot_cuda_kernel *kernel, cot_cuda_grid grid,
                                          const void *call)
{
    grid.shared_bytes = (unsigned)kernel->shared_bytes;
    return cot_cuda_launch(queue, kernel, &grid, call);
}

/* What the first kernel of a call needs to know, but for how its tiles are cut and where it writes. */
static inline attention_placing attention_placing_of(cot_queue *queue, const attention_problem *p)
{
    const attention_sizes *z = &p->sizes;
    return (attention_placing){
        .q_begin = z->q_begin,
        .q_length = z->q_length,
        .k_begin = z->k_begin,
        .k_length = z->k_length,
        .B = (int32_t)z->B,
        .packed = z->packed,
        .Tq = (int32_t)(z->packed ? z->rows_q : z->Tq),
        .Tk = (int32_t)(z->packed ? z->rows_k : z->Tk),
        .longest_q = (int32_t)(z->Tq < INT32_MAX ? z->Tq : INT32_MAX),
        .longest_k = (int32_t)(z->Tk < INT32_MAX ? z->Tk : INT32_MAX),
        .sequences = (int32_t)attention_sequence_count(p),
        .most_tiles = INT32_MAX,
        .cu_q = attention_array_of(&p->cu_seqlens_q),
        .cu_k = attention_array_of(&p->cu_seqlens_k),
        .used_q = attention_array_of(&p->seqused_q),
        .used_k = attention_array_of(&p->seqused_k),
        .fault = cot_cuda_fault_word(queue),
    };
}

static inline cot_status attention_launch_place(cot_queue *queue, const attention_placing *place)
{
    extern const unsigned char cot_image_attention_place_sm90[];
    static const cot_cuda_kernel kernel = {cot_image_attention_place_sm90, "attention_place", 0};
    return attention_launch(queue, &kernel, (cot_cuda_grid){.blocks = {1, 1, 1}, .threads = 256}, place);
}

/* A score is `factor` times the tanh. The powers of scale / softcap are in the series' coefficients, where they are float32's
 * normal numbers; else no score is near. */
static inline attention_softcap attention_softcap_of(const attention_sizes *z, float factor)
{
    attention_softcap cap = {0};
    if (z->softcap > 0) {
        const double scale = z->scale / z->softcap, square = scale * scale, most = 16384, all = scale * (double)factor;
        const bool normal = fabs(scale) > 1 / most && fabs(scale) < most;
        cap.scale = (float)scale;
        cap.factor = factor;
        cap.near = normal ? (float)(ATTENTION_TANH_NEAR * ATTENTION_TANH_NEAR / square) : -1;
        cap.nearer = normal ? (float)(ATTENTION_TANH_NEARER * ATTENTION_TANH_NEARER / square) : -1;
        cap.below = (float)exp2(-(double)factor * tanh(ATTENTION_TANH_NEARER));
        cap.above = (float)fmin(exp2((double)factor * tanh(ATTENTION_TANH_NEARER)), 0x1p126);
        cap.series[0] = (float)(ATTENTION_TANH_C0 * all);
        cap.series[1] = (float)(ATTENTION_TANH_C1 * all * square);
        cap.series[2] = (float)(ATTENTION_TANH_C2 * all * square * square);
        cap.series[3] = (float)(ATTENTION_TANH_C3 * all * square * square * square);
        cap.brief[0] = (float)(ATTENTION_TANH_B0 * all);
        cap.brief[1] = (float)(ATTENTION_TANH_B1 * all * square);
        cap.brief[2] = (float)(ATTENTION_TANH_B2 * all * square * square);
    }
    return cap;
}

#endif
