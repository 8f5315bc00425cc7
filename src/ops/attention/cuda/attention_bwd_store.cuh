/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_store.cuh: stores accumulators of wgmma as rows of dq, dk or dv. */
#ifndef COT_ATTENTION_BWD_STORE_CUH
#define COT_ATTENTION_BWD_STORE_CUH

#include "attention_sm90.h"

#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/quad.cuh"

/* Rows of a gradient that a warpgroup stores: rows of [b][row][head], from `offset` (in elements) on. */
struct output_rows {
    int64_t offset;
    int rows, used; /* rows that exist; GENERAL: rows from `used` on get 0 (with `accumulate` they keep their
                      * values), even where their accumulators hold NaN */
};

/* 16-bit elements, not accumulated: a quad transposes its accumulators, so that a lane has 8 adjacent columns. */
template <typename E, bool GENERAL, int N>
static __device__ __forceinline__ void store_rows_16(E *data, int64_t stride, const output_rows &to, int row,
                                                     int columns, float scale, const float (&acc)[N])
{
#pragma unroll
    for (int row_half = 0; row_half < 2; row_half++) {
        const int lane_column = 8 * (threadIdx.x % 4);
        E *const row_data = data + (row + 8 * row_half) * stride + lane_column;
#pragma unroll
        for (int column_group = 0; column_group < N / 4; column_group += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int e = 4 * (column_group + i) + 2 * row_half;
                words[i] = cot_pack_pair<E>(scale * acc[e], scale * acc[e + 1]);
            }
            const uint4 packed = cot_quad_transpose(words[0], words[1], words[2], words[3]);
            if (row + 8 * row_half < to.rows && (!GENERAL || 8 * column_group + lane_column < columns))
                *(uint4 *)(row_data + 8 * column_group) =
                    !GENERAL || row + 8 * row_half < to.used ? packed : make_uint4(0, 0, 0, 0);
        }
    }
}

/* Adds two floats to global memory. The L2 cache adds, so the thread does not wait and needs no old value. */
static __device__ __forceinline__ void add_global(float *to, float2 x)
{
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x.x), "f"(x.y) : "memory");
}

/* Floats: the quad stores 32 adjacent bytes of a row. `accumulate` adds them in the L2 cache, because a load would need
 * registers that the kernels do not have. */
template <bool GENERAL, int N>
static __device__ __forceinline__ void store_rows_f32(bool accumulate, float *data, int64_t stride,
                                                      const output_rows &to, int row, int columns, float scale,
                                                      const float (&acc)[N])
{
    unsigned thread = threadIdx.x;
    /* Read again at 64 tile columns (N = 32): a register that lived during the steps would spill another one. */
    if (N == 32)
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int lane_column = 2 * (int)(thread % 4);
#pragma unroll
    for (int row_half = 0; row_half < 2; row_half++) {
        const int r = row + 8 * row_half;
        float *const row_data = data + r * stride + lane_column;
        const bool used = !GENERAL || r < to.used;
        if (r >= to.rows || (accumulate && !used))
            continue;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const float2 x = make_float2(used ? scale * acc[4 * i + 2 * row_half] : 0.0f,
                                         used ? scale * acc[4 * i + 2 * row_half + 1] : 0.0f);
            if (GENERAL && 8 * i + lane_column >= columns)
                continue;
            if (accumulate)
                add_global(row_data + 8 * i, x);
            else
                *(float2 *)(row_data + 8 * i) = x;
        }
    }
}

/* Stores 64 rows, columns [column, column + 2 N). `row` is the row of this thread's accumulators 4i and 4i + 1.
 * Accumulators 4i + 2 and 4i + 3 have `row` + 8. GENERAL: only the columns below `columns` exist. FLOATS = false leaves
 * store_rows_f32 out, for the warpgroup of dq: it gets 16-bit rows only (stores_dq), and would spill. */
template <typename E, bool GENERAL, bool FLOATS = true, int N>
static __device__ __forceinline__ void store_rows(const attention_bwd_call &c, const attention_array &out,
                                                  int32_t method, const output_rows &to, int row, int column,
                                                  int columns, float scale, const float (&acc)[N])
{
    if (out.data == nullptr)
        return;
    const int64_t offset = to.offset + column;
    if (method == ATTENTION_STORE_VECTORS_16) {
        store_rows_16<E, GENERAL>((E *)out.data + offset, out.stride[1], to, row, columns, scale, acc);
        return;
    }
    if (FLOATS && method == ATTENTION_STORE_VECTORS_F32) {
        store_rows_f32<GENERAL>(c.accumulate, (float *)out.data + offset, out.stride[1], to, row, columns, scale, acc);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int row_i = row + 8 * (i / 2 % 2), column_i = 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2;
        if (row_i >= to.rows || (GENERAL && column_i >= columns))
            continue;
        const int64_t element = offset + row_i * out.stride[1] + column_i;
        const float old = c.accumulate ? cot_load(out.data, out.dtype, element) : 0.0f;
        cot_store(out.data, out.dtype, element, !GENERAL || row_i < to.used ? fmaf(scale, acc[i], old) : old);
    }
}

#endif
