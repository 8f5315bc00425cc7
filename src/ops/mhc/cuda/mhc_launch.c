/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_launch.c: tensor maps and launches that the host files of the CUDA kernels share. */
#include "mhc_launch.h"

IMAGE(mhc_pre_mma)
static const cot_cuda_kernel pre_mma_split = {cot_image_mhc_pre_mma, "mhc_pre_mma_split", 0};

cot_status mhc_make_tile_map(cot_queue *queue, CUtensorMap *map, const mhc_sizes *s, const cot_tensor *t,
                             mhc_tile_box box)
{
    const int64_t token = s->T > 1 ? t->stride[1] : t->stride[0], streams = t->rank == 4 ? s->n : 1;
    const int64_t size = (int64_t)cot_dtype_size(s->dtype), chunk_columns = 128 / size;
    /* The driver checks strides also for axes of one element. */
    return cot_cuda_swizzled_map(
        queue, map, s->dtype, 4, t->data, (const int64_t[]){chunk_columns, s->tokens, s->D / chunk_columns, streams},
        (const int64_t[]){s->tokens > 1 ? size * token : 16, 128, streams > 1 ? size * t->stride[2] : 16},
        (const int[]){(int)chunk_columns, box.tokens, box.chunks, box.streams});
}

cot_status mhc_map_phi_terms(cot_queue *queue, CUtensorMap *map, const mhc_call *c, int rows)
{
    const int64_t row = 2 * c->n * c->term_columns;
    return cot_cuda_swizzled_map(queue, map, COT_BF16, 4, c->phi_terms,
                                 (const int64_t[]){c->term_columns, c->n, MHC_SM90_N8_ROWS, MHC_CUDA_MMA_TERMS},
                                 (const int64_t[]){2 * c->term_columns, row, MHC_SM90_N8_ROWS * row},
                                 (const int[]){MHC_SM90_CHUNK_COLUMNS, 1, rows, 1});
}

cot_status mhc_launch_clusters(cot_queue *queue, const cot_cuda_kernel *kernel, int cluster_blocks, int tile,
                               int threads, bool dependent, const mhc_call *c, const void *call)
{
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)(cluster_count(c, tile, cluster_blocks) * cluster_blocks), 1, 1},
        .threads = (unsigned)threads,
        .shared_bytes = (unsigned)kernel->shared_bytes,
        .cluster = (unsigned)cluster_blocks,
        .dependent = dependent,
    };
    return cot_cuda_launch(queue, kernel, &grid, call);
}

cot_status mhc_launch_slices(cot_queue *queue, const cot_cuda_kernel *kernel, int threads, bool dependent,
                             int64_t slices, int64_t parts, const mhc_mapped_call *call)
{
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)slices, (unsigned)parts, 1},
        .threads = (unsigned)threads,
        .shared_bytes = (unsigned)kernel->shared_bytes,
        .dependent = dependent,
    };
    return cot_cuda_launch(queue, kernel, &grid, call);
}

cot_status mhc_launch_mma(cot_queue *queue, const cot_cuda_kernel kernels[3][3], const mhc_sizes *s, int64_t x,
                          int64_t y, const mhc_call *c)
{
    const cot_cuda_kernel *kernel = &kernels[s->n <= 2 ? 0 : s->n <= 4 ? 1 : 2][s->dtype - COT_F32];
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)x, (unsigned)y, 1},
        .threads = MHC_CUDA_THREADS,
        .shared_bytes = (unsigned)kernel->shared_bytes,
    };
    return x * y == 0 ? COT_OK : cot_cuda_launch(queue, kernel, &grid, c);
}

cot_status mhc_launch_phi_terms(cot_queue *queue, const mhc_call *c)
{
    LAUNCH(queue, &pre_mma_split, cot_ceil_div(c->n * c->term_columns / 8, MHC_CUDA_THREADS),
           MHC_CUDA_MMA_ROWS(MHC_CUDA_MMA_M(c->n)), MHC_CUDA_THREADS, c);
    return COT_OK;
}

bool mhc_rows_vectorized(const void *problem, const cot_tensor *const tensors[], int count)
{
    for (int i = 0; i < count; i++)
        if (cot_is_present(tensors[i]) && (uintptr_t)tensors[i]->data % 16 != 0)
            return false;
    return mhc_cuda_admit_rows(problem, tensors, count) == NULL;
}
