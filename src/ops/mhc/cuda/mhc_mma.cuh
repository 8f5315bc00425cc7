/* SPDX-License-Identifier: Apache-2.0
 * mhc_mma.cuh: helpers of pre's kernels for Hopper: the MMA for x's element type, and the schedule of tiles of a
 * block. */
#ifndef COT_MHC_MMA_CUH
#define COT_MHC_MMA_CUH

#include "mhc_cuda.cuh"
#include "mhc_maps.h"

#include "../../../cuda/device/cluster.cuh"
#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/ptx.cuh"

template <typename E>
static __device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                           uint32_t b0, uint32_t b1)
{
    if constexpr (cot_is_f16<E>)
        cot_mma_f16(c, a0, a1, a2, a3, b0, b1);
    else
        cot_mma_bf16(c, a0, a1, a2, a3, b0, b1);
}

/* Byte offset of 16-byte unit `unit` of row `row` in a tile with rows of 128 bytes and the 128-byte swizzle. */
static __device__ __forceinline__ int swizzled_offset(int row, int unit)
{
    return row * 128 + ((unit ^ row % 8) * 16);
}

/* Signals that the warp has finished reading or writing a part of shared memory. All 32 lanes arrive:
 * compute-sanitizer's racecheck tracks only lanes that arrive themselves. */
static __device__ __forceinline__ void arrive_all_lanes(uint64_t *barrier)
{
    __syncwarp(); /* the lanes then arrive in one instruction */
    cot_mbarrier_arrive(barrier);
}

/* The work of a block: column slice column_block, and tiles first, first + stride, ... below `tiles`. In a cluster
 * kernel column_block is the block's rank in the cluster, without clusters (SPLIT) it is blockIdx.x. */
struct tile_schedule {
    int column_block, first, stride, tiles;
};

template <bool SPLIT, int TILE, int BLOCKS>
static __device__ __forceinline__ tile_schedule make_schedule(const mhc_call &c)
{
    const int tiles = (int)((c.tokens + TILE - 1) / TILE);
    if (SPLIT)
        return {(int)blockIdx.x, (int)blockIdx.y, (int)gridDim.y, tiles};
    return {(int)cot_cluster_rank(), (int)(blockIdx.x / BLOCKS), MHC_SM90_CLUSTERS_OF(BLOCKS), tiles};
}

#endif
