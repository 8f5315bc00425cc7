/* SPDX-License-Identifier: Apache-2.0
 * cluster.cuh: thread block clusters with distributed shared memory, and setmaxnreg, under the names of the PTX manual.
 * Needs sm_90a. */
#ifndef COT_CUDA_CLUSTER_CUH
#define COT_CUDA_CLUSTER_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t cot_cluster_rank(void)
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* Cluster barrier: every thread of the cluster arrives, then waits. Writes before the arrival are visible to all
 * threads of the cluster after the wait. */
static __device__ __forceinline__ void cot_cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

static __device__ __forceinline__ void cot_cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Maps `address`, in this block's shared memory, to the same location in the shared memory of block `rank`. */
static __device__ __forceinline__ uint32_t cot_mapa(uint32_t address, uint32_t rank)
{
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

/* Stores 16 bytes to the shared memory of a block, given by their address in the cluster (cot_mapa). */
static __device__ __forceinline__ void cot_cluster_store(uint32_t to, const float *from)
{
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(from[0]), "f"(from[1]),
                 "f"(from[2]), "f"(from[3])
                 : "memory");
}

/* Stores a word to the shared memory of a block, given by its address in the cluster (cot_mapa). */
static __device__ __forceinline__ void cot_cluster_store_word(uint32_t to, uint32_t word)
{
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

/* Stores 16 bytes to another block's shared memory. That block's barrier counts the bytes (complete_tx). */
static __device__ __forceinline__ void cot_store_async(uint32_t to, uint32_t barrier, uint32_t a, uint32_t b,
                                                       uint32_t c, uint32_t d)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier)
                 : "memory");
}

/* Copies `bytes`, a multiple of 16, to another block's shared memory. That block's barrier counts the bytes. */
static __device__ __forceinline__ void cot_bulk_copy_to_block(uint32_t to, uint32_t from, uint32_t bytes,
                                                              uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "r"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

/* Arrives at another block's barrier, given by its address in the cluster (cot_mapa). */
static __device__ __forceinline__ void cot_mbarrier_arrive_remote(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Raises (cot_setmaxnreg_inc) or lowers (cot_setmaxnreg_dec) the number of registers of each thread to COUNT. All
 * warps of the warpgroup execute it. */
template <int COUNT> static __device__ __forceinline__ void cot_setmaxnreg_inc(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> static __device__ __forceinline__ void cot_setmaxnreg_dec(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

#endif
