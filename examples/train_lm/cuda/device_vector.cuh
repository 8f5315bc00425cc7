/* SPDX-License-Identifier: Apache-2.0
 * device_vector.cuh: vectors of 16 bytes, and sums over a warp and a block in a fixed order. */
#ifndef TRAIN_LM_DEVICE_VECTOR_CUH
#define TRAIN_LM_DEVICE_VECTOR_CUH

#include "cuda/device/element.cuh"

#include <stdint.h>

template <typename E> constexpr int vector_size = 16 / (int)sizeof(E);

template <typename E>
static __device__ __forceinline__ void load_floats(const void *data, int64_t index, float (&values)[vector_size<E>])
{
    const cot_vector<E, vector_size<E>> v = cot_load_vector<E, vector_size<E>>((const E *)data + index);
    cot_unpack(v, values);
}

/* For data that the kernel loads a second time, or that it also stores: the load goes through the L1 cache. */
template <typename E>
static __device__ __forceinline__ void load_floats_cached(const void *data, int64_t index,
                                                          float (&values)[vector_size<E>])
{
    const uint4 words = *(const uint4 *)((const E *)data + index);
    const cot_vector<E, vector_size<E>> v = {{words.x, words.y, words.z, words.w}};
    cot_unpack(v, values);
}

template <typename E>
static __device__ __forceinline__ void store_floats(void *data, int64_t index, const float (&values)[vector_size<E>])
{
    cot_vector<E, vector_size<E>> v;
    cot_pack(v, values);
    *(uint4 *)((E *)data + index) = make_uint4(v.raw.word[0], v.raw.word[1], v.raw.word[2], v.raw.word[3]);
}

/* to[0 .. N-1] += values. */
template <int N> static __device__ __forceinline__ void add_floats(float *to, const float (&values)[N])
{
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        float4 sum = *(const float4 *)(to + i);
        sum.x += values[i], sum.y += values[i + 1], sum.z += values[i + 2], sum.w += values[i + 3];
        *(float4 *)(to + i) = sum;
    }
}

/* The sum over the lanes of a warp, the same bits in every lane. */
template <typename T> static __device__ __forceinline__ T warp_sum(T value)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

static __device__ __forceinline__ float warp_max(float value)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}

/* The sum over the threads of a block, the same bits in every thread. shared: one value per warp. All threads of the
 * block call it. */
template <typename T> static __device__ __forceinline__ T block_sum(T value, T *shared)
{
    const int warps = blockDim.x / 32;
    value = warp_sum(value);
    __syncthreads(); /* all threads have read the previous values of `shared` */
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = value;
    __syncthreads();
    T sum = shared[0];
    for (int warp = 1; warp < warps; warp++)
        sum += shared[warp];
    return sum;
}

static __device__ __forceinline__ float block_max(float value, float *shared)
{
    const int warps = blockDim.x / 32;
    value = warp_max(value);
    __syncthreads(); /* all threads have read the previous values of `shared` */
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = value;
    __syncthreads();
    float max = shared[0];
    for (int warp = 1; warp < warps; warp++)
        max = fmaxf(max, shared[warp]);
    return max;
}

/* Defines the kernels NAME_f32, NAME_f16 and NAME_bf16 from the function template NAME. */
#define DEFINE_KERNELS(name, call_type, threads)                                            \
    extern "C" __global__ void __launch_bounds__(threads) name##_f32(const call_type call)  \
    {                                                                                       \
        name<float>(call);                                                                  \
    }                                                                                       \
    extern "C" __global__ void __launch_bounds__(threads) name##_f16(const call_type call)  \
    {                                                                                       \
        name<__half>(call);                                                                 \
    }                                                                                       \
    extern "C" __global__ void __launch_bounds__(threads) name##_bf16(const call_type call) \
    {                                                                                       \
        name<__nv_bfloat16>(call);                                                          \
    }

#endif
