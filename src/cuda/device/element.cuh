/* SPDX-License-Identifier: Apache-2.0
 * element.cuh: loads and stores elements of the float dtypes: single elements with a dtype known at run time, and
 * vectors of up to 32 bytes with a dtype known at compile time. Arithmetic is float32. Outputs are rounded once, to
 * nearest even. */
#ifndef COT_CUDA_ELEMENT_CUH
#define COT_CUDA_ELEMENT_CUH

#include <cotangent/core.h>
#if !defined(__HIP__) /* hip/device/vocabulary.h has these types for AMD GPUs, and the PTX instructions below */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

static __device__ __forceinline__ float cot_to_f32(float value)
{
    return value;
}

static __device__ __forceinline__ float cot_to_f32(__half value)
{
    return __half2float(value);
}

static __device__ __forceinline__ float cot_to_f32(__nv_bfloat16 value)
{
    return __bfloat162float(value);
}

static __device__ __forceinline__ void cot_from_f32(float *element, float value)
{
    *element = value;
}

static __device__ __forceinline__ void cot_from_f32(__half *element, float value)
{
    *element = __float2half_rn(value);
}

static __device__ __forceinline__ void cot_from_f32(__nv_bfloat16 *element, float value)
{
    *element = __float2bfloat16_rn(value);
}

/* ---- one element, dtype at run time ------------------------------------------------------------------- */

static __device__ __forceinline__ float cot_load(const void *data, int dtype, int64_t index)
{
    switch (dtype) {
    case COT_F16: return cot_to_f32(((const __half *)data)[index]);
    case COT_BF16: return cot_to_f32(((const __nv_bfloat16 *)data)[index]);
    default: return ((const float *)data)[index];
    }
}

static __device__ __forceinline__ void cot_store(void *data, int dtype, int64_t index, float value)
{
    switch (dtype) {
    case COT_F16: cot_from_f32((__half *)data + index, value); break;
    case COT_BF16: cot_from_f32((__nv_bfloat16 *)data + index, value); break;
    default: ((float *)data)[index] = value;
    }
}

/* ---- pairs of 16-bit elements in a register ------------------------------------------------------------- */

template <typename E> static constexpr bool cot_is_f16 = false;
template <> constexpr bool cot_is_f16<__half> = true;

#if !defined(__HIP__)

/* Packs two floats into one register, `low` in the lower half, and unpacks them. */
template <typename E> static __device__ __forceinline__ uint32_t cot_pack_pair(float low, float high)
{
    uint32_t pair;
    if constexpr (cot_is_f16<E>)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#endif

template <typename E> static __device__ __forceinline__ float2 cot_unpack_pair(uint32_t pair)
{
    if constexpr (cot_is_f16<E>)
        return __half22float2(*(const __half2 *)&pair);
    else
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

/* ---- vectors of W 32-bit words, unpacked to floats only where they are used ------------------------------ *
 * A packed vector takes 1/4 to 1/2 of the registers of the floats that it unpacks to. This leaves registers for more
 * loads in flight. */

#if !defined(__HIP__)

template <int W> struct cot_words {
    uint32_t word[W];
};

/* For data that is read once: the load does not allocate in the L1 cache. */
template <int W> static __device__ __forceinline__ cot_words<W> cot_load_words(const void *from)
{
    cot_words<W> v;
    static_assert(W == 1 || W == 2 || W == 4 || W == 8, "whole vector loads");
    if constexpr (W == 1)
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v.word[0]) : "l"(from));
    if constexpr (W == 2)
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(v.word[0]), "=r"(v.word[1])
                     : "l"(from));
    if constexpr (W >= 4) {
#pragma unroll
        for (int i = 0; i < W; i += 4)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.word[i]), "=r"(v.word[i + 1]), "=r"(v.word[i + 2]), "=r"(v.word[i + 3])
                         : "l"((const uint32_t *)from + i));
    }
    return v;
}

/* The same if `there` is true. Otherwise nothing is read, and the vector is undefined. The load is predicated: without
 * a branch, the loads of several vectors can be issued back to back. */
template <int W> static __device__ __forceinline__ cot_words<W> cot_load_words_if(bool there, const void *from)
{
    cot_words<W> v;
    static_assert(W == 1 || W == 2 || W == 4, "whole vector loads");
    if constexpr (W == 1)
        asm volatile("{\n"
                     "    .reg .pred there;\n"
                     "    setp.ne.b32 there, %2, 0;\n"
                     "    @there ld.global.nc.L1::no_allocate.u32 %0, [%1];\n"
                     "}"
                     : "=r"(v.word[0])
                     : "l"(from), "r"((uint32_t)there));
    if constexpr (W == 2)
        asm volatile("{\n"
                     "    .reg .pred there;\n"
                     "    setp.ne.b32 there, %3, 0;\n"
                     "    @there ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n"
                     "}"
                     : "=r"(v.word[0]), "=r"(v.word[1])
                     : "l"(from), "r"((uint32_t)there));
    if constexpr (W == 4)
        asm volatile("{\n"
                     "    .reg .pred there;\n"
                     "    setp.ne.b32 there, %5, 0;\n"
                     "    @there ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                     "}"
                     : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                     : "l"(from), "r"((uint32_t)there));
    return v;
}

/* Loads from an address in shared memory. */
template <int W> static __device__ __forceinline__ cot_words<W> cot_load_shared(uint32_t from)
{
    cot_words<W> v;
    static_assert(W == 1 || W == 2 || W == 4, "whole vector loads");
    if constexpr (W == 1)
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v.word[0]) : "r"(from) : "memory");
    if constexpr (W == 2)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.word[0]), "=r"(v.word[1]) : "r"(from) : "memory");
    if constexpr (W == 4)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                     : "r"(from)
                     : "memory");
    return v;
}

/* For data that is not read again soon: evict-first in the L2 cache. An H200 writes such lines back a few per cent
 * faster. */
template <int W> static __device__ __forceinline__ void cot_store_words(void *to, const cot_words<W> &v)
{
    if constexpr (W == 1)
        asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(to), "r"(v.word[0]) : "memory");
    if constexpr (W == 2)
        asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]) : "memory");
    if constexpr (W >= 4) {
#pragma unroll
        for (int i = 0; i < W; i += 4)
            asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"((uint32_t *)to + i), "r"(v.word[i]),
                         "r"(v.word[i + 1]), "r"(v.word[i + 2]), "r"(v.word[i + 3])
                         : "memory");
    }
}

/* The same if `wanted` is true, predicated. */
template <int W> static __device__ __forceinline__ void cot_store_words_if(bool wanted, void *to, const cot_words<W> &v)
{
    static_assert(W == 1 || W == 2 || W == 4, "whole vector stores");
    if constexpr (W == 1)
        asm volatile("{\n"
                     "    .reg .pred wanted;\n"
                     "    setp.ne.b32 wanted, %2, 0;\n"
                     "    @wanted st.global.cs.u32 [%0], %1;\n"
                     "}" ::"l"(to),
                     "r"(v.word[0]), "r"((uint32_t)wanted)
                     : "memory");
    if constexpr (W == 2)
        asm volatile("{\n"
                     "    .reg .pred wanted;\n"
                     "    setp.ne.b32 wanted, %3, 0;\n"
                     "    @wanted st.global.cs.v2.u32 [%0], {%1, %2};\n"
                     "}" ::"l"(to),
                     "r"(v.word[0]), "r"(v.word[1]), "r"((uint32_t)wanted)
                     : "memory");
    if constexpr (W == 4)
        asm volatile("{\n"
                     "    .reg .pred wanted;\n"
                     "    setp.ne.b32 wanted, %5, 0;\n"
                     "    @wanted st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};\n"
                     "}" ::"l"(to),
                     "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]), "r"((uint32_t)wanted)
                     : "memory");
}

#endif

/* V elements of type E. */
template <typename E, int V> struct cot_vector {
    static constexpr int words = V * (int)sizeof(E) / 4;
    cot_words<words> raw;
};

template <int V> static __device__ __forceinline__ void cot_unpack(const cot_vector<float, V> &v, float (&values)[V])
{
#pragma unroll
    for (int i = 0; i < V; i++)
        values[i] = __uint_as_float(v.raw.word[i]);
}

template <int V>
static __device__ __forceinline__ void cot_unpack(const cot_vector<__nv_bfloat16, V> &v, float (&values)[V])
{
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
        values[2 * i] = __uint_as_float(v.raw.word[i] << 16);
        values[2 * i + 1] = __uint_as_float(v.raw.word[i] & 0xffff0000u);
    }
}

template <int V> static __device__ __forceinline__ void cot_unpack(const cot_vector<__half, V> &v, float (&values)[V])
{
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
        const __half2 pair = *(const __half2 *)&v.raw.word[i];
        values[2 * i] = __low2float(pair);
        values[2 * i + 1] = __high2float(pair);
    }
}

template <int V> static __device__ __forceinline__ void cot_pack(cot_vector<float, V> &v, const float (&values)[V])
{
#pragma unroll
    for (int i = 0; i < V; i++)
        v.raw.word[i] = __float_as_uint(values[i]);
}

template <int V>
static __device__ __forceinline__ void cot_pack(cot_vector<__nv_bfloat16, V> &v, const float (&values)[V])
{
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
        v.raw.word[i] = *(const uint32_t *)&pair;
    }
}

template <int V> static __device__ __forceinline__ void cot_pack(cot_vector<__half, V> &v, const float (&values)[V])
{
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
        const __half2 pair = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
        v.raw.word[i] = *(const uint32_t *)&pair;
    }
}

/* Loads all V elements. `from` must be aligned to the size of the vector. */
template <typename E, int V> static __device__ __forceinline__ cot_vector<E, V> cot_load_vector(const E *from)
{
    cot_vector<E, V> v;
    v.raw = cot_load_words<cot_vector<E, V>::words>(from);
    return v;
}

template <typename E, int V> static __device__ __forceinline__ void cot_store_vector(E *to, const float (&values)[V])
{
    cot_vector<E, V> v;
    cot_pack(v, values);
    cot_store_words<cot_vector<E, V>::words>(to, v.raw);
}

template <typename E, int V>
static __device__ __forceinline__ void cot_store_vector_if(bool wanted, E *to, const float (&values)[V])
{
    cot_vector<E, V> v;
    cot_pack(v, values);
    cot_store_words_if<cot_vector<E, V>::words>(wanted, to, v.raw);
}

/* Loads from[0] .. from[count-1], at most V elements, one by one; the remaining elements are 0. For the tail of a row
 * and for unaligned data. */
template <typename E, int V>
static __device__ __forceinline__ cot_vector<E, V> cot_load_partial(const E *from, int64_t count)
{
    float values[V];
    cot_vector<E, V> v;
#pragma unroll
    for (int i = 0; i < V; i++)
        values[i] = i < count ? cot_to_f32(from[i]) : 0.0f;
    cot_pack(v, values);
    return v;
}

template <typename E, int V>
static __device__ __forceinline__ void cot_store_partial(E *to, int64_t count, const float (&values)[V])
{
#pragma unroll
    for (int i = 0; i < V; i++)
        if (i < count)
            cot_from_f32(to + i, values[i]);
}

#endif
