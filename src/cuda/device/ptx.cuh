/* SPDX-License-Identifier: Apache-2.0
 * ptx.cuh: Hopper's instructions for moving data asynchronously, one idea a function, under the names of the PTX manual.
 * Everything here needs sm_90, but for a thread's own copies.
 *
 * A barrier's phase completes when the arrivals it was initialised for and the bytes it was told to expect have come; a
 * waiter names the phase by its parity, 0 for the first. */
#ifndef COT_CUDA_PTX_CUH
#define COT_CUDA_PTX_CUH

#include <stdint.h>

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

/* Makes initialised barriers visible to the copy engine; by the thread that initialised them, before the others are let
 * go on. */
static __device__ __forceinline__ void cot_mbarrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* One arrival, and `bytes` more to expect in this phase. */
static __device__ __forceinline__ void cot_mbarrier_arrive_expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(cot_shared_address(barrier)), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void cot_mbarrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(cot_shared_address(barrier)) : "memory");
}

/* Has the phase of this parity completed? May sleep a little before it says no. */
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

/* ---- a thread's own copies (sm_80) -------------------------------------------------------------------- */

/* BYTES, 4, 8 or 16, to an address of shared memory, through no register, where `there` is true; else zeros. */
template <int BYTES = 16>
static __device__ __forceinline__ void cot_copy_async_or_zeros(bool there, uint32_t to, const void *from)
{
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(there ? BYTES : 0),
                     "n"(BYTES)
                     : "memory");
}

static __device__ __forceinline__ void cot_copy_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until this thread's groups, but for the last LATER of them, are there for this thread. */
template <int LATER> static __device__ __forceinline__ void cot_copy_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

/* Asks for the line of this address to be brought to the second-level cache. */
static __device__ __forceinline__ void cot_prefetch(const void *line)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

/* ---- bulk copies -------------------------------------------------------------------------------------- */

/* Copies `bytes` (a multiple of 16, both addresses too) to shared memory, and counts them at the barrier. */
static __device__ __forceinline__ void cot_bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     cot_shared_address(to)),
                 "l"(from), "r"(bytes), "r"(cot_shared_address(barrier))
                 : "memory");
}

/* Copies the box of a tensor map that begins at these coordinates (innermost first; what lies outside the tensor comes as
 * zeros) to shared memory at a multiple of 128 bytes, and counts its bytes, all of them, at the barrier. */
static __device__ __forceinline__ void cot_tensor_load_3d(void *to, const void *map, int x, int y, int z,
                                                          uint64_t *barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(cot_shared_address(to)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(cot_shared_address(barrier))
        : "memory");
}

/* For data that nobody reads soon: evict-first in the second-level cache. */
static __device__ __forceinline__ uint64_t cot_evict_first(void)
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* LAST: nobody reads it soon. */
template <bool LAST = false>
static __device__ __forceinline__ void cot_tensor_load_4d(void *to, const void *map, int x, int y, int z, int w,
                                                          uint64_t *barrier)
{
    if constexpr (LAST)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(cot_shared_address(to)),
                     "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(cot_shared_address(barrier)), "l"(cot_evict_first())
                     : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
            "%5}], [%6];" ::"r"(cot_shared_address(to)),
            "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(cot_shared_address(barrier))
            : "memory");
}

/* The other way, from shared memory; in the thread's bulk group. What lies outside the tensor is not written. */
template <bool LAST = false>
static __device__ __forceinline__ void cot_tensor_store_4d(const void *map, int x, int y, int z, int w,
                                                           const void *from)
{
    if constexpr (LAST)
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2, %3, "
                     "%4}], [%5], %6;" ::"l"(map),
                     "r"(x), "r"(y), "r"(z), "r"(w), "r"(cot_shared_address(from)), "l"(cot_evict_first())
                     : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
            "r"(x), "r"(y), "r"(z), "r"(w), "r"(cot_shared_address(from))
            : "memory");
}

/* The same of three axes, for data that nobody reads soon. */
static __device__ __forceinline__ void cot_tensor_store_3d(const void *map, int x, int y, int z, const void *from)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2, %3}], [%4], "
                 "%5;" ::"l"(map),
                 "r"(x), "r"(y), "r"(z), "r"(cot_shared_address(from)), "l"(cot_evict_first())
                 : "memory");
}

static __device__ __forceinline__ void cot_bulk_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Until shared memory has been read, or all of it is done, for all of this thread's groups. */
static __device__ __forceinline__ void cot_bulk_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

static __device__ __forceinline__ void cot_bulk_wait(void)
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* What this thread stored in shared memory, the copy engine reads; by each thread, before the barrier that says so. */
static __device__ __forceinline__ void cot_proxy_fence(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- dependent launches ------------------------------------------------------------------------------- */

#ifndef COT_EVERY_GPU /* Hopper's part has to be compiled for it: COT_HOPPER_PARTS of cmake/cuda.cmake */

/* Lets a kernel that was launched as dependent on this one start. It waits for this one's results by itself. */
static __device__ __forceinline__ void cot_launch_dependents(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Waits until the kernels before have completed, and what they wrote is there. */
static __device__ __forceinline__ void cot_wait_for_kernels_before(void)
{
#if __CUDA_ARCH__ >= 900 /* for the rest the host launches nothing as dependent */
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif

/* ---- rings -------------------------------------------------------------------------------------------- */

/* Where in a ring of STAGES slots somebody is: the slot, and the parity of its phase. */
template <int STAGES> struct cot_ring {
    int slot = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next()
    {
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
    }
};

#endif
