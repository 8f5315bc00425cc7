/* SPDX-License-Identifier: Apache-2.0
 * mhc_launch.h: macros, types and functions of mhc_*_launch.c, the host files of the CUDA kernels. These decide which
 * kernels a call launches, and with what grids. */
#ifndef COT_MHC_LAUNCH_H
#define COT_MHC_LAUNCH_H

#include "../mhc_admit.h"
#include "mhc_admit.h"

#include "cuda/device.h"

#include "core/argument_checks.h"
#include "core/op_tables.h"

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "../mhc_pre_kernels.def"
#include "../mhc_sinkhorn_kernels.def"
#include "../mhc_post_kernels.def"
#include "../mhc_post_pre_kernels.def"
#undef COT_KERNEL_ENTRY

/* Returns from the caller if the launch fails. A grid without blocks is skipped. */
#define LAUNCH(queue, kernel, x, y, threads_, call)                                                                 \
    do {                                                                                                            \
        const cot_cuda_grid grid_ = {.blocks = {(unsigned)(x), (unsigned)(y), 1}, .threads = (unsigned)(threads_)}; \
        if (grid_.blocks[0] * grid_.blocks[1] != 0)                                                                 \
            CHECK(cot_cuda_launch(queue, kernel, &grid_, call));                                                    \
    } while (0)

/* ---- tables of kernels ------------------------------------------------------------------------------ */

/* clang-format off */
#define IMAGE(stem) extern const unsigned char cot_image_##stem[];
/* Indexed by dtype: f32, f16 and bf16 are 1, 2 and 3 in cot_dtype. */
#define BY_DTYPE(image, stem) \
    {{cot_image_##image, #stem "_f32", 0}, {cot_image_##image, #stem "_f16", 0}, {cot_image_##image, #stem "_bf16", 0}}
/* Indexed by dtype: f16, bf16. */
#define BY_HALF_DTYPE(image, stem) {{cot_image_##image, #stem "_f16", 0}, {cot_image_##image, #stem "_bf16", 0}}
/* Indexed by n - 1. */
#define BY_N(image, stem) \
    {{cot_image_##image, #stem "_n1", 0}, {cot_image_##image, #stem "_n2", 0}, {cot_image_##image, #stem "_n3", 0}, \
     {cot_image_##image, #stem "_n4", 0}, {cot_image_##image, #stem "_n5", 0}, {cot_image_##image, #stem "_n6", 0}, \
     {cot_image_##image, #stem "_n7", 0}, {cot_image_##image, #stem "_n8", 0}}
#define BY_N_AND_DTYPE(image, stem) \
    {BY_DTYPE(image, stem##_n1), BY_DTYPE(image, stem##_n2), BY_DTYPE(image, stem##_n3), BY_DTYPE(image, stem##_n4), \
     BY_DTYPE(image, stem##_n5), BY_DTYPE(image, stem##_n6), BY_DTYPE(image, stem##_n7), BY_DTYPE(image, stem##_n8)}
#define BY_N_AND_HALF_DTYPE(image, stem) \
    {BY_HALF_DTYPE(image, stem##_n1), BY_HALF_DTYPE(image, stem##_n2), BY_HALF_DTYPE(image, stem##_n3), \
     BY_HALF_DTYPE(image, stem##_n4), BY_HALF_DTYPE(image, stem##_n5), BY_HALF_DTYPE(image, stem##_n6), \
     BY_HALF_DTYPE(image, stem##_n7), BY_HALF_DTYPE(image, stem##_n8)}

/* Tensor-core kernels for any GPU, indexed by the class of n and by dtype: f32, f16, bf16. */
#define MMA_BY_DTYPE(stem, bytes, M) \
    {{cot_image_mhc_pre_mma, #stem "_f32", bytes(4, M)}, {cot_image_mhc_pre_mma, #stem "_f16", bytes(2, M)}, \
     {cot_image_mhc_pre_mma, #stem "_bf16", bytes(2, M)}}
#define MMA(stem, bytes) \
    {MMA_BY_DTYPE(stem##_n2, bytes, 8), MMA_BY_DTYPE(stem##_n4, bytes, 24), MMA_BY_DTYPE(stem##_n8, bytes, 80)}

/* Hopper kernels, indexed by dtype: f16, bf16. */
#define HOPPER(image, stem) \
    {{cot_image_##image, #stem "_f16", MHC_SM90_SHARED_BYTES}, {cot_image_##image, #stem "_bf16", MHC_SM90_SHARED_BYTES}}
/* By the blocks of a cluster: see cluster_index. */
#define BY_BLOCKS(image, stem)                                            \
    {{cot_image_##image, #stem "_blocks4", MHC_SM90_SHARED_BYTES},        \
     {cot_image_##image, #stem "_blocks8", MHC_SM90_SHARED_BYTES},        \
     {cot_image_##image, #stem, MHC_SM90_SHARED_BYTES}}
/* clang-format on */

/* ---- arguments -------------------------------------------------------------------------------------- */

static inline mhc_array make_array(const cot_tensor *tensor)
{
    mhc_array a = {.data = cot_is_present(tensor) ? tensor->data : NULL};
    for (int axis = 0; axis < tensor->rank && axis < 4; axis++)
        a.stride[axis] = tensor->stride[axis];
    return a;
}

static inline mhc_call init_call(const mhc_sizes *s)
{
    return (mhc_call){.tokens = s->tokens, .T = s->T, .D = s->D, .n = (int32_t)s->n};
}

static inline int64_t token_blocks(const mhc_call *c)
{
    return cot_ceil_div(c->tokens, MHC_CUDA_TOKEN_THREADS);
}

/* The generic kernels have grid-stride loops, so the grid may be smaller than the work. */
static inline int64_t generic_blocks(int64_t blocks)
{
    return blocks < INT32_MAX ? blocks : INT32_MAX;
}

static inline bool is_aligned(const cot_tensor *tensor, uintptr_t multiple)
{
    return !cot_is_present(tensor) || (uintptr_t)tensor->data % multiple == 0;
}

static inline bool all_aligned(const mhc_array *arrays, int count)
{
    for (int i = 0; i < count; i++)
        if ((uintptr_t)arrays[i].data % 16 != 0)
            return false;
    return true;
}

/* ---- shared launches (mhc_launch.c) ----------------------------------------------------------------- */

/* The box that one TMA load transfers. */
typedef struct mhc_tile_box {
    int chunks, tokens, streams;
} mhc_tile_box;

/* The box of a tile of x in pre's forward. wide: see MHC_SM90_WIDE_TILE. */
static inline mhc_tile_box mhc_sm90_fwd_box(const mhc_sizes *s, bool wide)
{
    const int columns = wide ? MHC_SM90_WIDE_COLUMNS : MHC_SM90_COLUMNS_OF((int)s->n),
              size = (int)cot_dtype_size(s->dtype);
    return (mhc_tile_box){columns * size / 128, MHC_SM90_CLUSTER_TILE(wide, size), (int)s->n};
}

/* Maps x, dh_in or dx as [stream][chunk][token][column]. */
cot_status mhc_make_tile_map(cot_queue *queue, CUtensorMap *map, const mhc_sizes *s, const cot_tensor *t,
                             mhc_tile_box box);

/* Maps the terms of phi gamma of n = 8. A box has `rows` rows of one term and stream. */
cot_status mhc_map_phi_terms(cot_queue *queue, CUtensorMap *map, const mhc_call *c, int rows);

static inline int cluster_index(int cluster_blocks)
{
    return cluster_blocks == 4 ? 0 : cluster_blocks == 8 ? 1 : 2;
}

/* The clusters of a launch whose tiles have `tile` tokens. */
static inline int64_t cluster_count(const mhc_call *c, int tile, int cluster_blocks)
{
    return cot_clamp(cot_ceil_div(c->tokens, tile), 1, MHC_SM90_CLUSTERS_OF(cluster_blocks));
}

/* call: the argument of the kernel, which contains c. */
cot_status mhc_launch_clusters(cot_queue *queue, const cot_cuda_kernel *kernel, int cluster_blocks, int tile,
                               int threads, bool dependent, const mhc_call *c, const void *call);

/* Grid: x = column slices, y = parts of the tokens. */
cot_status mhc_launch_slices(cot_queue *queue, const cot_cuda_kernel *kernel, int threads, bool dependent,
                             int64_t slices, int64_t parts, const mhc_mapped_call *call);

/* Launches one of [3][3] tensor-core kernels for any GPU, by n and dtype. */
cot_status mhc_launch_mma(cot_queue *queue, const cot_cuda_kernel kernels[3][3], const mhc_sizes *s, int64_t x,
                          int64_t y, const mhc_call *c);

/* Stores the terms of phi gamma in the workspace. */
cot_status mhc_launch_phi_terms(cot_queue *queue, const mhc_call *c);

/* Whether the rows of all tensors are whole aligned vectors. */
bool mhc_rows_vectorized(const void *problem, const cot_tensor *const tensors[], int count);

/* ---- parts of other ops ----------------------------------------------------------------------------- */

/* mhc_sinkhorn_launch.c: h_res from the logits that pre's forward stored in the workspace, if h_res is present. */
cot_status mhc_launch_fused_sinkhorn(cot_queue *queue, mhc_call *c);

/* mhc_sinkhorn_launch.c: dz of all tokens. Part of it is the gradient of Sinkhorn, if dh_res is present. Also
 * clears counter_count counters. */
cot_status mhc_launch_dz(cot_queue *queue, const mhc_call *c);

/* mhc_pre_fwd_launch.c */
mhc_call mhc_pre_forward_call(const mhc_pre_forward_problem *p);

/* mhc_pre_bwd_launch.c: pre's backward without dx. The records of all tokens stay in the workspace. */
cot_status mhc_pre_backward_records(cot_queue *queue, const mhc_pre_backward_problem *p, void *workspace, bool split);

/* The same by the cluster kernel for post_pre, which computes x of pre (y) from x and f of post. For data that is aligned to
 * 16 bytes, and one stride between all tokens. */
cot_status mhc_pre_backward_records_from_post(cot_queue *queue, const mhc_pre_backward_problem *p,
                                              const mhc_post_forward_problem *post, void *workspace);

/* mhc_post_launch.c */
mhc_call mhc_post_backward_call(const mhc_post_backward_problem *p);

#endif
