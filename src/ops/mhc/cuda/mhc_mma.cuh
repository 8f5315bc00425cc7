/* SPDX-License-Identifier: Apache-2.0
 * mhc_mma.cuh: pre's kernels for Hopper: products by the type of x's elements, and which tiles a block goes through. */
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

/* A warp is done with what it stored in or read from shared memory: 32 arrivals, since racecheck follows a lane that arrives
 * and not one that another arrives for. */
static __device__ __forceinline__ void arrive_as_warp(uint64_t *barrier)
{
    __syncwarp(); /* one instruction for all of them */
    cot_mbarrier_arrive(barrier);
}

/* What a block has: slice `rank` of the columns, and every so many tiles. Clusters have a block for each slice that there
 * may be; without them x of the grid are the slices that there are. */
struct block_share {
    int rank, first, step, tiles;
};

template <bool SPLIT, int TILE> static __device__ __forceinline__ block_share share_of(const mhc_call &c)
{
    const int tiles = (int)((c.tokens + TILE - 1) / TILE);
    if (SPLIT)
        return {(int)blockIdx.x, (int)blockIdx.y, (int)gridDim.y, tiles};
    return {(int)cot_cluster_rank(), (int)(blockIdx.x / MHC_SM90_CLUSTER), MHC_SM90_CLUSTERS, tiles};
}

#endif
