/* SPDX-License-Identifier: Apache-2.0
 * vocabulary.h: what the portable kernels of src/ops/OP/cuda need beside C++, for AMD GPUs of 64 lanes a wave. The
 * build includes it in front of each .cu file that it compiles for gfx90a and gfx942. It replaces the headers of CUDA,
 * and the PTX instructions of src/cuda/device. No header and no library of ROCm is used.
 *
 * A warp of these kernels has 32 lanes. Two of them share a wave. Shuffles have a width of at most 32, so that a lane
 * reads from its own half of the wave only. */
#ifndef COT_HIP_VOCABULARY_H
#define COT_HIP_VOCABULARY_H

#if !defined(__HIP__) || !defined(__AMDGCN__)
#error "for device code of AMD GPUs"
#endif

#include <stdint.h>

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
/* The second argument counts blocks on CUDA and waves on AMD: it is left to the compiler. */
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define COT_DEVICE_FUNCTION static __device__ __forceinline__

/* The only parameter of a kernel, read where the launch has put it. A copy would be in memory of the thread, because
 * the kernels pass it by reference. */
#define COT_HIP_ARGUMENT(type) \
    (*(const type *)(const __attribute__((address_space(4))) type *)__builtin_amdgcn_kernarg_segment_ptr())

/* core/philox.h is for C too, and marks device code for nvcc alone. */
#pragma clang force_cuda_host_device begin
#include "core/philox.h"
#pragma clang force_cuda_host_device end

/* ---- indices ------------------------------------------------------------------------------------------ */

struct cot_hip_thread_index {
    __declspec(property(get = get_x)) unsigned x;
    COT_DEVICE_FUNCTION unsigned get_x()
    {
        return __builtin_amdgcn_workitem_id_x();
    }
};

struct cot_hip_block_index {
    __declspec(property(get = get_x)) unsigned x;
    __declspec(property(get = get_y)) unsigned y;
    __declspec(property(get = get_z)) unsigned z;
    COT_DEVICE_FUNCTION unsigned get_x()
    {
        return __builtin_amdgcn_workgroup_id_x();
    }
    COT_DEVICE_FUNCTION unsigned get_y()
    {
        return __builtin_amdgcn_workgroup_id_y();
    }
    COT_DEVICE_FUNCTION unsigned get_z()
    {
        return __builtin_amdgcn_workgroup_id_z();
    }
};

/* Sizes from the dispatch packet. It has the threads of a block as 16 bits from byte 4 on, and the threads of the grid
 * as 32 bits from byte 12 on. Only the first axis of a block has more than one thread. */
COT_DEVICE_FUNCTION unsigned cot_hip_block_threads(void)
{
    return ((const __attribute__((address_space(4))) uint16_t *)__builtin_amdgcn_dispatch_ptr())[2];
}

COT_DEVICE_FUNCTION unsigned cot_hip_grid_threads(int axis)
{
    return ((const __attribute__((address_space(4))) uint32_t *)__builtin_amdgcn_dispatch_ptr())[3 + axis];
}

struct cot_hip_block_size {
    __declspec(property(get = get_x)) unsigned x;
    COT_DEVICE_FUNCTION unsigned get_x()
    {
        return cot_hip_block_threads();
    }
};

struct cot_hip_grid_size {
    __declspec(property(get = get_x)) unsigned x;
    __declspec(property(get = get_y)) unsigned y;
    __declspec(property(get = get_z)) unsigned z;
    COT_DEVICE_FUNCTION unsigned get_x()
    {
        return cot_hip_grid_threads(0) / cot_hip_block_threads();
    }
    COT_DEVICE_FUNCTION unsigned get_y()
    {
        return cot_hip_grid_threads(1);
    }
    COT_DEVICE_FUNCTION unsigned get_z()
    {
        return cot_hip_grid_threads(2);
    }
};

static const __device__ cot_hip_thread_index threadIdx;
static const __device__ cot_hip_block_index blockIdx;
static const __device__ cot_hip_block_size blockDim;
static const __device__ cot_hip_grid_size gridDim;

COT_DEVICE_FUNCTION void __syncthreads()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

/* The lanes of a wave run in lockstep, so this only keeps the compiler from moving accesses across it. */
COT_DEVICE_FUNCTION void __syncwarp()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

/* ---- types -------------------------------------------------------------------------------------------- */

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

COT_DEVICE_FUNCTION float2 make_float2(float x, float y)
{
    return {x, y};
}

typedef _Float16 __half;
struct __nv_bfloat16 {
    uint16_t bits;
};

COT_DEVICE_FUNCTION uint32_t __float_as_uint(float value)
{
    return __builtin_bit_cast(uint32_t, value);
}

COT_DEVICE_FUNCTION float __uint_as_float(uint32_t value)
{
    return __builtin_bit_cast(float, value);
}

COT_DEVICE_FUNCTION float __half2float(__half value)
{
    return (float)value;
}

COT_DEVICE_FUNCTION __half __float2half_rn(float value)
{
    return (__half)value;
}

COT_DEVICE_FUNCTION float __bfloat162float(__nv_bfloat16 value)
{
    return __uint_as_float((uint32_t)value.bits << 16);
}

/* Rounds to nearest even. gfx90a and gfx942 have no instruction for it. */
COT_DEVICE_FUNCTION __nv_bfloat16 __float2bfloat16_rn(float value)
{
    const uint32_t bits = __float_as_uint(value);
    return {(uint16_t)(value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

struct __half2 {
    __half x, y;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

COT_DEVICE_FUNCTION float __low2float(__half2 pair)
{
    return (float)pair.x;
}

COT_DEVICE_FUNCTION float __high2float(__half2 pair)
{
    return (float)pair.y;
}

COT_DEVICE_FUNCTION float2 __half22float2(__half2 pair)
{
    return {(float)pair.x, (float)pair.y};
}

COT_DEVICE_FUNCTION __half2 __floats2half2_rn(float x, float y)
{
    return {(__half)x, (__half)y};
}

COT_DEVICE_FUNCTION __nv_bfloat162 __floats2bfloat162_rn(float x, float y)
{
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}

/* Packs two floats into one register, `low` in the lower half. */
template <typename E> COT_DEVICE_FUNCTION uint32_t cot_pack_pair(float low, float high)
{
    if constexpr (__is_same(E, __half))
        return __builtin_bit_cast(uint32_t, __floats2half2_rn(low, high));
    else
        return __builtin_bit_cast(uint32_t, __floats2bfloat162_rn(low, high));
}

/* ---- arithmetic --------------------------------------------------------------------------------------- */

COT_DEVICE_FUNCTION float fmaf(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}

COT_DEVICE_FUNCTION float fabsf(float a)
{
    return __builtin_fabsf(a);
}

COT_DEVICE_FUNCTION float fmaxf(float a, float b)
{
    return __builtin_fmaxf(a, b);
}

COT_DEVICE_FUNCTION float fminf(float a, float b)
{
    return __builtin_fminf(a, b);
}

/* v_exp_f32 and v_rcp_f32: within 1 ulp, subnormal results of the first are flushed. */
COT_DEVICE_FUNCTION float cot_ex2(float x)
{
    return __builtin_amdgcn_exp2f(x);
}

COT_DEVICE_FUNCTION float cot_rcp(float x)
{
    return __builtin_amdgcn_rcpf(x);
}

/* The maximum or minimum of two numbers. The result is NaN if either is NaN. */
COT_DEVICE_FUNCTION float cot_max_nan(float a, float b)
{
    return a != a ? a : b != b ? b : __builtin_fmaxf(a, b);
}

COT_DEVICE_FUNCTION float cot_min_nan(float a, float b)
{
    return a != a ? a : b != b ? b : __builtin_fminf(a, b);
}

COT_DEVICE_FUNCTION int max(int a, int b)
{
    return a > b ? a : b;
}

COT_DEVICE_FUNCTION int64_t min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

COT_DEVICE_FUNCTION uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift)
{
    return __builtin_amdgcn_alignbit(high, low, shift);
}

/* Byte i of the result is the byte of high:low that digit i of `selector` names, 0 to 7. v_perm_b32 numbers them
 * alike. */
COT_DEVICE_FUNCTION uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector)
{
    return __builtin_amdgcn_perm(
        high, low, (selector & 7u) | (selector & 0x70u) << 4 | (selector & 0x700u) << 8 | (selector & 0x7000u) << 12);
}

/* ---- shuffles ----------------------------------------------------------------------------------------- */

COT_DEVICE_FUNCTION int cot_hip_lane(void)
{
    return (int)__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
}

template <typename T> COT_DEVICE_FUNCTION T cot_hip_read_lane(T value, int lane)
{
    static_assert(sizeof(T) == 4, "a shuffle moves 32 bits");
    return __builtin_bit_cast(T, __builtin_amdgcn_ds_bpermute(4 * lane, __builtin_bit_cast(int, value)));
}

template <typename T> COT_DEVICE_FUNCTION T __shfl_sync(uint32_t, T value, int source, int width = 32)
{
    return cot_hip_read_lane(value, (cot_hip_lane() & ~(width - 1)) | (source & (width - 1)));
}

template <typename T> COT_DEVICE_FUNCTION T __shfl_xor_sync(uint32_t, T value, int mask)
{
    return cot_hip_read_lane(value, cot_hip_lane() ^ mask);
}

/* ---- vectors of W words: see cuda/device/element.cuh ---------------------------------------------------- */

template <int W> struct cot_words {
    uint32_t word[W];
};

template <int W> struct cot_hip_vector {
    typedef uint32_t type __attribute__((ext_vector_type(W)));
};
template <> struct cot_hip_vector<1> {
    typedef uint32_t type;
};

#define COT_HIP_GLOBAL __attribute__((address_space(1)))
#define COT_HIP_LOCAL __attribute__((address_space(3)))

template <int W> COT_DEVICE_FUNCTION cot_words<W> cot_load_words(const void *from)
{
    if constexpr (W == 8) {
        const cot_words<4> low = cot_load_words<4>(from), high = cot_load_words<4>((const uint32_t *)from + 4);
        return {low.word[0],  low.word[1],  low.word[2],  low.word[3],
                high.word[0], high.word[1], high.word[2], high.word[3]};
    } else {
        typedef typename cot_hip_vector<W>::type vector;
        return __builtin_bit_cast(cot_words<W>,
                                  __builtin_nontemporal_load((const COT_HIP_GLOBAL vector *)(const vector *)from));
    }
}

template <int W> COT_DEVICE_FUNCTION cot_words<W> cot_load_words_if(bool there, const void *from)
{
    cot_words<W> v = {};
    if (there)
        v = cot_load_words<W>(from);
    return v;
}

template <int W> COT_DEVICE_FUNCTION void cot_store_words(void *to, const cot_words<W> &v)
{
    if constexpr (W == 8) {
        cot_store_words<4>(to, {v.word[0], v.word[1], v.word[2], v.word[3]});
        cot_store_words<4>((uint32_t *)to + 4, {v.word[4], v.word[5], v.word[6], v.word[7]});
    } else {
        typedef typename cot_hip_vector<W>::type vector;
        __builtin_nontemporal_store(__builtin_bit_cast(vector, v), (COT_HIP_GLOBAL vector *)(vector *)to);
    }
}

template <int W> COT_DEVICE_FUNCTION void cot_store_words_if(bool wanted, void *to, const cot_words<W> &v)
{
    if (wanted)
        cot_store_words<W>(to, v);
}

/* ---- shared memory ------------------------------------------------------------------------------------ */

COT_DEVICE_FUNCTION uint32_t cot_shared_address(const void *pointer)
{
    return (uint32_t)(uintptr_t)(const COT_HIP_LOCAL void *)pointer;
}

template <int W> COT_DEVICE_FUNCTION cot_words<W> cot_load_shared(uint32_t from)
{
    typedef typename cot_hip_vector<W>::type vector;
    return __builtin_bit_cast(cot_words<W>, *(const COT_HIP_LOCAL vector *)from);
}

/* Copies through registers: the wait of cp.async is the compiler's s_waitcnt. */
template <int BYTES = 16> COT_DEVICE_FUNCTION void cot_cp_async_zfill(bool there, uint32_t to, const void *from)
{
    typedef typename cot_hip_vector<BYTES / 4>::type vector;
    *(COT_HIP_LOCAL vector *)to = __builtin_bit_cast(vector, cot_load_words_if<BYTES / 4>(there, from));
}

COT_DEVICE_FUNCTION void cot_cp_async_commit_group(void)
{
}

template <int PENDING> COT_DEVICE_FUNCTION void cot_cp_async_wait_group(void)
{
}

/* Neither GPU has an instruction that loads a line into the L2 cache alone. */
COT_DEVICE_FUNCTION void cot_prefetch_l2(const void *)
{
}

/* ---- launches ----------------------------------------------------------------------------------------- */

/* There are no dependent launches: a kernel starts after the end of the kernel before it. */
COT_DEVICE_FUNCTION void cot_griddepcontrol_launch_dependents(void)
{
}

COT_DEVICE_FUNCTION void cot_griddepcontrol_wait(void)
{
}

/* ---- atomics ------------------------------------------------------------------------------------------ */

COT_DEVICE_FUNCTION unsigned long long atomicCAS(unsigned long long *word, unsigned long long expected,
                                                 unsigned long long desired)
{
    __atomic_compare_exchange_n((COT_HIP_GLOBAL unsigned long long *)word, &expected, desired, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return expected;
}

#endif
