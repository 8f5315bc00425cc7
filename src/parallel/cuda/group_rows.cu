/* SPDX-License-Identifier: Apache-2.0
 *
 * group_rows.cu: what calls over a group do with rows beside the ops: strided copies with conversion and addition, the
 * sink, and the offsets of packed sequences in a window. All are bound by memory. The numbers are those of the host
 * code in rows.c and attention_ring.c: sums are f64 and rounded once. */
#include "parallel/cuda/group_rows.h"

#include "cuda/device/element.cuh"

typedef unsigned long long word64;

static __device__ __forceinline__ double load(const void *data, int dtype, int64_t i)
{
    return dtype == COT_F64 ? ((const double *)data)[i] : (double)cot_load(data, dtype, i);
}

/* Rounds once, from f64. */
static __device__ __forceinline__ void store(void *data, int dtype, int64_t i, double value)
{
    switch (dtype) {
    case COT_F64: ((double *)data)[i] = value; break;
    case COT_F16: ((__half *)data)[i] = __double2half(value); break;
    case COT_BF16: ((__nv_bfloat16 *)data)[i] = __double2bfloat16(value); break;
    default: ((float *)data)[i] = (float)value;
    }
}

static __device__ __forceinline__ void move(void *to, int64_t t, const void *from, int64_t f, int dtype)
{
    switch (dtype) {
    case COT_F64: ((word64 *)to)[t] = ((const word64 *)from)[f]; break;
    case COT_F16:
    case COT_BF16: ((uint16_t *)to)[t] = ((const uint16_t *)from)[f]; break;
    case COT_U8: ((uint8_t *)to)[t] = ((const uint8_t *)from)[f]; break;
    default: ((uint32_t *)to)[t] = ((const uint32_t *)from)[f];
    }
}

/* Eight contiguous elements, aligned to 16 bytes or to their size. */
static __device__ __forceinline__ void load_vector(const void *data, int dtype, int64_t i, double v[COT_ROWS_VECTOR])
{
    if (dtype == COT_F16 || dtype == COT_BF16) {
        const uint4 words = *(const uint4 *)((const uint16_t *)data + i);
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float2 pair =
                dtype == COT_F16 ? cot_unpack_pair<__half>(word[n]) : cot_unpack_pair<__nv_bfloat16>(word[n]);
            v[2 * n] = pair.x, v[2 * n + 1] = pair.y;
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < COT_ROWS_VECTOR; n += 4) {
        if (dtype == COT_F64) {
#pragma unroll
            for (int m = 0; m < 4; m += 2) {
                const double2 pair = *(const double2 *)((const double *)data + i + n + m);
                v[n + m] = pair.x, v[n + m + 1] = pair.y;
            }
        } else {
            const float4 four = *(const float4 *)((const float *)data + i + n);
            v[n] = four.x, v[n + 1] = four.y, v[n + 2] = four.z, v[n + 3] = four.w;
        }
    }
}

template <typename E> static __device__ __forceinline__ uint32_t round_pair(double low, double high);
template <> __device__ __forceinline__ uint32_t round_pair<__half>(double low, double high)
{
    return (uint32_t)__half_as_ushort(__double2half(high)) << 16 | __half_as_ushort(__double2half(low));
}
template <> __device__ __forceinline__ uint32_t round_pair<__nv_bfloat16>(double low, double high)
{
    return (uint32_t)__bfloat16_as_ushort(__double2bfloat16(high)) << 16 | __bfloat16_as_ushort(__double2bfloat16(low));
}

static __device__ __forceinline__ void store_vector(void *data, int dtype, int64_t i, const double v[COT_ROWS_VECTOR])
{
    if (dtype == COT_F16 || dtype == COT_BF16) {
        uint32_t word[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            word[n] = dtype == COT_F16 ? round_pair<__half>(v[2 * n], v[2 * n + 1])
                                       : round_pair<__nv_bfloat16>(v[2 * n], v[2 * n + 1]);
        *(uint4 *)((uint16_t *)data + i) = make_uint4(word[0], word[1], word[2], word[3]);
        return;
    }
#pragma unroll
    for (int n = 0; n < COT_ROWS_VECTOR; n += 4) {
        if (dtype == COT_F64) {
#pragma unroll
            for (int m = 0; m < 4; m += 2)
                *(double2 *)((double *)data + i + n + m) = make_double2(v[n + m], v[n + m + 1]);
        } else {
            *(float4 *)((float *)data + i + n) =
                make_float4((float)v[n], (float)v[n + 1], (float)v[n + 2], (float)v[n + 3]);
        }
    }
}

static __device__ __forceinline__ void copy_vector(const cot_rows_copy &c, int64_t to, int64_t from)
{
    if (c.from != nullptr && !c.add && c.to_dtype == c.from_dtype) { /* i32 too */
        const int size = c.to_dtype == COT_F64 ? 8 : c.to_dtype == COT_F16 || c.to_dtype == COT_BF16 ? 2 : 4;
        const uint4 *source = (const uint4 *)((const char *)c.from + from * size);
        uint4 *target = (uint4 *)((char *)c.to + to * size);
        for (int n = 0; n < size / 2; n++)
            target[n] = source[n];
        return;
    }
    double v[COT_ROWS_VECTOR], old[COT_ROWS_VECTOR];
    if (c.from != nullptr)
        load_vector(c.from, c.from_dtype, from, v);
    else
#pragma unroll
        for (int n = 0; n < COT_ROWS_VECTOR; n++)
            v[n] = c.value;
    if (c.add) {
        load_vector(c.to, c.to_dtype, to, old);
#pragma unroll
        for (int n = 0; n < COT_ROWS_VECTOR; n++)
            v[n] += old[n];
    }
    store_vector(c.to, c.to_dtype, to, v);
}

static __device__ __forceinline__ void copy_element(const cot_rows_copy &c, int64_t to, int64_t from)
{
    if (c.from != nullptr && !c.add && c.to_dtype == c.from_dtype) {
        move(c.to, to, c.from, from, c.to_dtype);
        return;
    }
    const double x = c.from != nullptr ? load(c.from, c.from_dtype, from) : c.value;
    store(c.to, c.to_dtype, to, c.add ? load(c.to, c.to_dtype, to) + x : x);
}

/* The first elements of a unit, in both views. */
static __device__ __forceinline__ void find_unit(const cot_rows_copy &c, int64_t unit, int64_t &to, int64_t &from)
{
    int64_t rest = unit;
    to = from = 0;
    for (int axis = c.rank - 1; axis >= 0; axis--) {
        const int64_t units = axis == c.rank - 1 ? c.shape[axis] / c.vector : c.shape[axis];
        const int64_t index = axis > 0 ? rest % units : rest;
        const int64_t element = axis == c.rank - 1 ? index * c.vector : index;
        rest /= units;
        to += element * c.to_stride[axis], from += element * c.from_stride[axis];
    }
}

extern "C" __global__ void __launch_bounds__(COT_ROWS_THREADS)
    cot_group_copy_rows(const __grid_constant__ cot_rows_copy c)
{
    const int64_t step = (int64_t)gridDim.x * COT_ROWS_THREADS;
    for (int64_t unit = (int64_t)blockIdx.x * COT_ROWS_THREADS + threadIdx.x; unit < c.units; unit += step) {
        int64_t to, from;
        find_unit(c, unit, to, from);
        if (c.vector > 1)
            copy_vector(c, to, from);
        else
            copy_element(c, to, from);
    }
}

/* -0 + x is x for every x, also for -0. */
static __device__ __forceinline__ void sum_vector(const cot_rows_sum &c, int64_t to, int64_t from)
{
    double sums[COT_ROWS_VECTOR];
    if (c.rows.add)
        load_vector(c.rows.to, c.rows.to_dtype, to, sums);
    else
#pragma unroll
        for (int i = 0; i < COT_ROWS_VECTOR; i++)
            sums[i] = -0.0;
#pragma unroll 4 /* the loads of 4 tensors are under way together */
    for (int n = 0; n < c.count; n++) {
        double v[COT_ROWS_VECTOR];
        load_vector(c.from[n], COT_F32, from, v);
#pragma unroll
        for (int i = 0; i < COT_ROWS_VECTOR; i++)
            sums[i] += v[i];
    }
    store_vector(c.rows.to, c.rows.to_dtype, to, sums);
}

static __device__ __forceinline__ void sum_element(const cot_rows_sum &c, int64_t to, int64_t from)
{
    double sum = c.rows.add ? load(c.rows.to, c.rows.to_dtype, to) : -0.0;
    for (int n = 0; n < c.count; n++)
        sum += ((const float *)c.from[n])[from];
    store(c.rows.to, c.rows.to_dtype, to, sum);
}

extern "C" __global__ void __launch_bounds__(COT_ROWS_THREADS)
    cot_group_sum_rows(const __grid_constant__ cot_rows_sum c)
{
    const int64_t step = (int64_t)gridDim.x * COT_ROWS_THREADS;
    for (int64_t unit = (int64_t)blockIdx.x * COT_ROWS_THREADS + threadIdx.x; unit < c.rows.units; unit += step) {
        int64_t to, from;
        find_unit(c.rows, unit, to, from);
        if (c.rows.vector > 1)
            sum_vector(c, to, from);
        else
            sum_element(c, to, from);
    }
}

/* A warp for each row of a head. lse becomes log(exp(lse) + exp(sink)), and out shrinks. */
extern "C" __global__ void __launch_bounds__(COT_ROWS_THREADS)
    cot_group_add_sink(const __grid_constant__ cot_rows_sink c)
{
    const int64_t item = ((int64_t)blockIdx.x * COT_ROWS_THREADS + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (item >= c.rows * c.heads)
        return;
    const int64_t row = item / c.heads, h = item % c.heads;
    float *const lse = c.lse + h * c.lse_stride[0] + row * c.lse_stride[1];
    const double before = *lse, sink = cot_load(c.sink, c.sink_dtype, h * c.sink_stride), infinity = (double)INFINITY;
    double weight = 0;
    if (lane == 0) {
        const double high = fmax(before, sink), low = fmin(before, sink);
        const double after = isnan(before) || isnan(sink) ? before + sink : high + log1p(exp(low - high));
        *lse = (float)(isinf(high) ? high : after);
        weight = before == -infinity ? 0 : exp(before - after);
    }
    weight = __shfl_sync(0xffffffffu, weight, 0);
    float *const out = c.out + row * c.out_stride[0] + h * c.out_stride[1];
    for (int64_t i = lane; i < c.d_v; i += 32)
        out[i] = (float)(weight * out[i]);
}

/* A block for each head. Its threads add rows in a fixed order. */
extern "C" __global__ void __launch_bounds__(COT_ROWS_THREADS)
    cot_group_sum_dsink(const __grid_constant__ cot_rows_dsink c)
{
    __shared__ double parts[COT_ROWS_THREADS];
    const int64_t h = blockIdx.x;
    const double sink = cot_load(c.sink, c.sink_dtype, h * c.sink_stride);
    double sum = 0;
    for (int64_t i = threadIdx.x; i < c.rows; i += COT_ROWS_THREADS) {
        const double lse = c.lse[h * c.lse_stride[0] + i * c.lse_stride[1]];
        if (lse != -(double)INFINITY)
            sum -= exp(sink - lse) * c.delta[h * c.delta_stride[0] + i * c.delta_stride[1]];
    }
    parts[threadIdx.x] = sum;
    __syncthreads();
    for (int half = COT_ROWS_THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            parts[threadIdx.x] += parts[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        c.sums[h] += parts[0];
}

extern "C" __global__ void __launch_bounds__(COT_ROWS_THREADS)
    cot_group_clamp_offsets(const __grid_constant__ cot_rows_clamp c)
{
    for (int64_t n = (int64_t)blockIdx.x * COT_ROWS_THREADS + threadIdx.x; n < c.count;
         n += (int64_t)gridDim.x * COT_ROWS_THREADS) {
        const int64_t offset = c.from[n * c.stride];
        c.to[n] = (int32_t)((offset < c.begin ? c.begin : offset > c.end ? c.end : offset) - c.begin);
    }
}
