/* SPDX-License-Identifier: Apache-2.0
 * ptx.cuh: instructions for asynchronous data movement, one function per instruction, under the names of the PTX
 * manual. They need sm_90, except cp.async and prefetch.
 *
 * A phase of an mbarrier completes when all expected arrivals and all expected bytes have come. The number of arrivals
 * is set at initialisation, the number of bytes by expect_tx. A waiting thread names the phase by its parity; the first
 * phase has parity 0. */
#ifndef COT_CUDA_PTX_CUH
#define COT_CUDA_PTX_CUH

#include <stdint.h>

#if !defined(__HIP__) /* hip/device/vocabulary.h has those of the portable kernels for AMD GPUs */

static __device__ __forceinline__ uint32_t cot_shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* ---- mbarrier ----------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void cot_mbarrier_init(uint64_t *barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(cot_shared_address(barrier)), "r"(arrivals)
                 : "memory");
}

/* Makes initialised barriers visible to the async proxy. The thread that initialised them executes it before the block
 * synchronises. */
static __device__ __forceinline__ void cot_mbarrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Ends the use of the memory as a barrier. */
static __device__ __forceinline__ void cot_mbarrier_invalidate(uint64_t *barrier)
{
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(cot_shared_address(barrier)) : "memory");
}

/* Arrives once and adds `bytes` to the bytes that this phase expects. */
static __device__ __forceinline__ void cot_mbarrier_arrive_expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(cot_shared_address(barrier)), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void cot_mbarrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(cot_shared_address(barrier)) : "memory");
}

/* Returns whether the phase of this parity has completed. The thread may be suspended for a short time first. */
static __device__ __forceinline__ bool cot_mbarrier_try_wait(uint64_t *barrier, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n"
                 "    .reg .pred done;\n"
                 "    mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "    selp.u32 %0, 1, 0, done;\n"
                 "}"
                 : "=r"(done)
                 : "r"(cot_shared_address(barrier)), "r"(parity)
                 : "memory");
    return done != 0;
}

static __device__ __forceinline__ void cot_mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
    while (!cot_mbarrier_try_wait(barrier, parity)) {}
}

/* ---- cp.async (sm_80) ----------------------------------------------------------------------------------- */

/* Copies BYTES (4, 8 or 16) from global to shared memory without a register. If `there` is false, it writes zeros and
 * does not read `from`. */
template <int BYTES = 16>
static __device__ __forceinline__ void cot_cp_async_zfill(bool there, uint32_t to, const void *from)
{
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(there ? BYTES : 0),
                     "n"(BYTES)
                     : "memory");
}

static __device__ __forceinline__ void cot_cp_async_commit_group(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most the PENDING latest groups of this thread are incomplete. The copied data is visible to this
 * thread only. */
template <int PENDING> static __device__ __forceinline__ void cot_cp_async_wait_group(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Arrives once when the copies that this thread has started are complete. They are then visible to the threads that wait
 * for this phase of the barrier. */
static __device__ __forceinline__ void cot_cp_async_arrive(uint64_t *barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(cot_shared_address(barrier)) : "memory");
}

/* Prefetches the line of this address into the L2 cache. */
static __device__ __forceinline__ void cot_prefetch_l2(const void *line)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

/* ---- bulk copies and TMA ------------------------------------------------------------------------------ */

/* Copies `bytes` from global to shared memory. The barrier counts them (complete_tx). `bytes` and both addresses are
 * multiples of 16. */
static __device__ __forceinline__ void cot_bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     cot_shared_address(to)),
                 "l"(from), "r"(bytes), "r"(cot_shared_address(barrier))
                 : "memory");
}

/* TMA load: copies the box of the tensor map at these coordinates (innermost axis first) to shared memory. Elements
 * outside the tensor become zeros. `to` is a multiple of 128 bytes. The barrier counts all bytes of the box. */
static __device__ __forceinline__ void cot_tma_load_3d(void *to, const void *map, int x, int y, int z,
                                                       uint64_t *barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(cot_shared_address(to)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(cot_shared_address(barrier))
        : "memory");
}

/* An L2 cache policy, evict-first, for data that is not read again soon. */
static __device__ __forceinline__ uint64_t cot_evict_first_policy(void)
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Loads a box into the L2 cache. */
static __device__ __forceinline__ void cot_tma_prefetch_4d(const void *map, int x, int y, int z, int w)
{
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x), "r"(y),
                 "r"(z), "r"(w)
                 : "memory");
}

/* EVICT_FIRST: the data is not read again soon. */
template <bool EVICT_FIRST = false>
static __device__ __forceinline__ void cot_tma_load_4d(void *to, const void *map, int x, int y, int z, int w,
                                                       uint64_t *barrier)
{
    if constexpr (EVICT_FIRST)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(cot_shared_address(to)),
                     "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(cot_shared_address(barrier)),
                     "l"(cot_evict_first_policy())
                     : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
            "%5}], [%6];" ::"r"(cot_shared_address(to)),
            "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(cot_shared_address(barrier))
            : "memory");
}

/* Loads a box to the same place in the shared memory of both blocks of a cluster. Each block's barrier, at the place of
 * `barrier`, counts the bytes. */
static __device__ __forceinline__ void cot_tma_load_4d_to_both(void *to, const void *map, int x, int y, int z, int w,
                                                               uint64_t *barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(cot_shared_address(to)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(cot_shared_address(barrier)), "h"((uint16_t)3)
                 : "memory");
}

/* TMA store: copies a box from shared memory to the tensor, as part of the thread's current bulk group. Elements
 * outside the tensor are not written. */
template <bool EVICT_FIRST = false>
static __device__ __forceinline__ void cot_tma_store_4d(const void *map, int x, int y, int z, int w, const void *from)
{
    if constexpr (EVICT_FIRST)
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2, %3, "
                     "%4}], [%5], %6;" ::"l"(map),
                     "r"(x), "r"(y), "r"(z), "r"(w), "r"(cot_shared_address(from)), "l"(cot_evict_first_policy())
                     : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
            "r"(x), "r"(y), "r"(z), "r"(w), "r"(cot_shared_address(from))
            : "memory");
}

/* The same with three axes, evict-first. */
static __device__ __forceinline__ void cot_tma_store_3d(const void *map, int x, int y, int z, const void *from)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2, %3}], [%4], "
                 "%5;" ::"l"(map),
                 "r"(x), "r"(y), "r"(z), "r"(cot_shared_address(from)), "l"(cot_evict_first_policy())
                 : "memory");
}

static __device__ __forceinline__ void cot_bulk_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Both wait for all bulk groups of this thread: cot_bulk_wait_read until the copies have read shared memory,
 * cot_bulk_wait until they are complete. */
static __device__ __forceinline__ void cot_bulk_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

static __device__ __forceinline__ void cot_bulk_wait(void)
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Makes the thread's writes to shared memory visible to the async proxy (TMA, wgmma). Each writing thread executes it
 * before it arrives on the barrier that publishes the data. */
static __device__ __forceinline__ void cot_fence_proxy_async(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- dependent launches ------------------------------------------------------------------------------- */

#ifndef COT_EVERY_GPU /* only in files with code for Hopper: *_sm90.cu and COT_HOPPER_PARTS of cmake/cuda.cmake */

/* Allows the next kernel on the stream to start, if it was launched as dependent. That kernel waits for this kernel's
 * results itself, with cot_griddepcontrol_wait. */
static __device__ __forceinline__ void cot_griddepcontrol_launch_dependents(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Waits until the preceding kernels on the stream have completed and their writes are visible. */
static __device__ __forceinline__ void cot_griddepcontrol_wait(void)
{
#if __CUDA_ARCH__ >= 900 /* on other devices the host never launches a kernel as dependent */
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif

#endif

/* ---- pipeline state ----------------------------------------------------------------------------------- */

/* The position of a producer or consumer in a circular pipeline of STAGES stages: the stage and the parity of its
 * phase. */
template <int STAGES> struct cot_pipeline_state {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next()
    {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

#endif
