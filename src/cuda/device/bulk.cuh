/* SPDX-License-Identifier: Apache-2.0
 * bulk.cuh: runs of bytes that leave shared memory by the copy engine, and how blocks and warps take turns. Needs sm_90. */
#ifndef COT_CUDA_BULK_CUH
#define COT_CUDA_BULK_CUH

#include "ptx.cuh"

/* Orders this thread's bulk accesses to global memory after what it has seen before. (The other way needs nothing: a
 * bulk access that has been waited for is seen by ordinary ones.) */
static __device__ __forceinline__ void cot_fence_async_global(void)
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* A run of bytes, a multiple of 16, from shared to global memory. */
static __device__ __forceinline__ void cot_bulk_store(void *to, const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(cot_shared_address(from)),
                 "r"(bytes)
                 : "memory");
}

/* The same, added to the floats that lie there; the order among blocks is whoever comes first. */
static __device__ __forceinline__ void cot_bulk_add_f32(float *to, const void *from, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(cot_shared_address(from)), "r"(bytes)
                 : "memory");
}

/* Waits until all but PENDING groups of this thread have landed. */
template <int PENDING> static __device__ __forceinline__ void cot_bulk_wait_but(void)
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* ---- threads --------------------------------------------------------------------------------------------- */

/* One lane of a converged warp. */
static __device__ __forceinline__ bool cot_elect(void)
{
    uint32_t elected;
    asm volatile("{\n    .reg .pred p;\n    elect.sync _|p, 0xffffffff;\n    selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

/* Barrier NUMBER (1 to 15; 0 is __syncthreads) for `threads` threads of the block. */
template <int NUMBER> static __device__ __forceinline__ void cot_named_barrier(uint32_t threads)
{
    asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "r"(threads) : "memory");
}

/* The same with a number known at run time; and an arrival there that does not wait. */
static __device__ __forceinline__ void cot_barrier_sync(uint32_t number, uint32_t threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

static __device__ __forceinline__ void cot_barrier_arrive(uint32_t number, uint32_t threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* Counters in global memory that order blocks. */
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

#endif
