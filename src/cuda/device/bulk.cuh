/* SPDX-License-Identifier: Apache-2.0
 * bulk.cuh: bulk copies from shared to global memory, and synchronisation of warps and blocks. Needs sm_90. */
#ifndef COT_CUDA_BULK_CUH
#define COT_CUDA_BULK_CUH

#include "ptx.cuh"

/* Orders the thread's later bulk accesses to global memory (the async proxy) after its earlier ordinary accesses. The
 * other direction needs no fence: a completed bulk access is visible to ordinary accesses once the thread has
 * waited. */
static __device__ __forceinline__ void cot_fence_proxy_async_global(void)
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* Copies `bytes`, a multiple of 16, from shared to global memory. */
static __device__ __forceinline__ void cot_bulk_store(void *to, const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(cot_shared_address(from)),
                 "r"(bytes)
                 : "memory");
}

/* Adds floats in shared memory to floats in global memory. The order of the additions among blocks is not defined. */
static __device__ __forceinline__ void cot_bulk_add_f32(float *to, const void *from, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(cot_shared_address(from)), "r"(bytes)
                 : "memory");
}

/* Waits until at most PENDING bulk groups of this thread are incomplete. */
template <int PENDING> static __device__ __forceinline__ void cot_bulk_wait_group(void)
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* ---- synchronisation --------------------------------------------------------------------------------------- */

/* True in one lane of a converged warp. */
static __device__ __forceinline__ bool cot_elect_one(void)
{
    uint32_t elected;
    asm volatile("{\n    .reg .pred p;\n    elect.sync _|p, 0xffffffff;\n    selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

/* Synchronises `threads` threads of the block at named barrier NUMBER, 1 to 15 (__syncthreads uses 0). */
template <int NUMBER> static __device__ __forceinline__ void cot_named_barrier(uint32_t threads)
{
    asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "r"(threads) : "memory");
}

/* The same with a barrier number known at run time. cot_barrier_arrive arrives without waiting. */
static __device__ __forceinline__ void cot_barrier_sync(uint32_t number, uint32_t threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

static __device__ __forceinline__ void cot_barrier_arrive(uint32_t number, uint32_t threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* Counters in global memory that order blocks: cot_load_acquire sees all writes before the cot_add_release it reads. */
static __device__ __forceinline__ uint32_t cot_load_acquire(const uint32_t *counter)
{
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

static __device__ __forceinline__ void cot_add_release(uint32_t *counter, uint32_t value)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

/* Adds to a counter that orders nothing, and returns the value before. For atomicAdd the compiler inserts instructions that
 * wait for the result at once. */
static __device__ __forceinline__ uint32_t cot_fetch_add(uint32_t *counter, uint32_t value)
{
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
    return before;
}

#endif
