/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_generic.cu: the products of dense causal convolution for compute capability 8.0 and later, any
 * strides, and states (causal_conv1d_dense_products.cuh).
 *
 * The float32 kernels compute 64 x 64 per block and load their operands element by element. The 32 terms of a step
 * are summed separately and then added. If x and weight have the same 16-bit dtype, the tensor-core kernels compute
 * 128 x 128 per block. They load their operands by cp.async from rows that other kernels have gathered: xe, g, and
 * the weights by tap. A step stays within one tap, and for DWEIGHT within one sequence. */
#include "causal_conv1d_dense_products.cuh"

#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/ptx.cuh"

enum { WARP = 32 };

/* ---- float32 ---------------------------------------------------------------------------------------------- */

template <product P> static __device__ __forceinline__ void multiply_f32(const conv1d_dense_call &c)
{
    enum { BLOCK = CONV1D_DENSE_F32_BLOCK, SHARED_PITCH = BLOCK_K + 1, HEIGHT = 8, WIDTH = 4 };
    __shared__ float a[BLOCK * SHARED_PITCH], b[BLOCK * SHARED_PITCH];
    const work_tile p = get_work_tile<P, BLOCK>(c);
    const int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16 * HEIGHT;
    float sums[HEIGHT][WIDTH] = {};
    for (int64_t n = p.first; n < p.end; n += BLOCK_K) {
        for (int e = (int)threadIdx.x; e < BLOCK * BLOCK_K; e += F32_THREADS) {
            /* Adjacent lanes load adjacent channels for DWEIGHT, else adjacent terms. */
            const int row = P == DWEIGHT ? e % BLOCK : e / BLOCK_K, term = P == DWEIGHT ? e / BLOCK : e % BLOCK_K;
            const bool in_range = n + term < p.end;
            const inner_term at = get_term<P>(c, n + term);
            a[row * SHARED_PITCH + term] = in_range ? load_a<P>(c, p, p.row + row, at) : 0.0f;
            b[row * SHARED_PITCH + term] = in_range ? load_b<P>(c, p, p.column + row, at) : 0.0f;
        }
        __syncthreads();
        float partial[HEIGHT][WIDTH] = {};
#pragma unroll 4
        for (int term = 0; term < BLOCK_K; term++)
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const float b_value = b[(x + 16 * j) * SHARED_PITCH + term];
#pragma unroll
                for (int i = 0; i < HEIGHT; i++)
                    partial[i][j] = fmaf(a[(y + i) * SHARED_PITCH + term], b_value, partial[i][j]);
            }
#pragma unroll
        for (int i = 0; i < HEIGHT; i++)
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                sums[i][j] += partial[i][j];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < HEIGHT; i++)
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
            store_result<P>(c, p, p.row + y + i, p.column + x + 16 * j, sums[i][j]);
}

/* ---- tensor cores ----------------------------------------------------------------------------------------- */

/* An operand's tile in shared memory has 512 units of 16 bytes. It is K-major (128 rows of the product with 32 terms
 * each) or MN_MAJOR (32 terms with 128 rows each), as the operand is in global memory. Units are swizzled so that
 * the 8 units that ldmatrix loads at once are in different banks. */
template <bool MN_MAJOR> static __device__ __forceinline__ int swizzled_unit(int row, int unit)
{
    return MN_MAJOR ? row * 16 + (unit ^ (row & 7)) : row * 4 + (unit ^ (row >> 1 & 3));
}

template <product P> constexpr bool a_mn_major = P == DWEIGHT;
template <product P> constexpr bool b_mn_major = P != FORWARD;

/* The address of row r of an operand's tile for a step, to load from `column` on. Elements from `end` on are zeros:
 * end is 0 if the whole row is outside of the tensor. */
template <product P>
static __device__ __forceinline__ const uint16_t *a_row(const conv1d_dense_call &c, const work_tile &p, int64_t step,
                                                        int r, int64_t &column, int64_t &end)
{
    const int64_t steps_per_group = k_block_count(P == FORWARD ? c.Din
                                                  : P == DX    ? c.Dout
                                                               : c.T),
                  n = step % steps_per_group * BLOCK_K;
    if (P == FORWARD) {
        const int64_t t = p.row + r;
        column = n, end = t < c.T ? c.pitch_in : 0;
        return (const uint16_t *)c.xe + (p.b * (c.K - 1 + c.T) + t + step / steps_per_group) * c.pitch_in;
    }
    const int64_t t = P == DX ? p.row + r - step / steps_per_group : n + r, b = P == DX ? p.b : step / steps_per_group;
    column = P == DX ? n : p.row;
    end = t >= 0 && t < c.T ? c.pitch_out : 0;
    return (const uint16_t *)c.g_tokens + (b * c.T + t) * c.pitch_out;
}

template <product P>
static __device__ __forceinline__ const uint16_t *b_row(const conv1d_dense_call &c, const work_tile &p, int64_t step,
                                                        int r, int64_t &column, int64_t &end)
{
    const int64_t steps_per_group = k_block_count(P == FORWARD ? c.Din
                                                  : P == DX    ? c.Dout
                                                               : c.T),
                  n = step % steps_per_group * BLOCK_K;
    if (P == DWEIGHT) {
        column = p.column, end = n + r < c.T ? c.pitch_in : 0;
        return (const uint16_t *)c.xe + (step / steps_per_group * (c.K - 1 + c.T) + n + r + p.k) * c.pitch_in;
    }
    const int64_t o = P == FORWARD ? p.column + r : n + r;
    column = P == FORWARD ? n : p.column;
    end = o < c.Dout ? c.pitch_in : 0;
    return (const uint16_t *)c.packed_weight + (step / steps_per_group * c.Dout + o) * c.pitch_in;
}

struct stage_tiles {
    uint4 a[CONV1D_DENSE_MMA_BLOCK * BLOCK_K / 8], b[CONV1D_DENSE_MMA_BLOCK * BLOCK_K / 8];
};

template <product P>
static __device__ __forceinline__ void load_stage(const conv1d_dense_call &c, const work_tile &p, int64_t step,
                                                  stage_tiles &target)
{
    if (step < p.end) {
#pragma unroll
        for (int e = (int)threadIdx.x; e < CONV1D_DENSE_MMA_BLOCK * BLOCK_K / 8; e += MMA_THREADS) {
            constexpr int A_UNITS = a_mn_major<P> ? 16 : 4, B_UNITS = b_mn_major<P> ? 16 : 4; /* units per row */
            int64_t column, end;
            const uint16_t *source = a_row<P>(c, p, step, e / A_UNITS, column, end);
            column += e % A_UNITS * 8;
            cot_cp_async_zfill(column < end,
                               cot_shared_address(&target.a[swizzled_unit<a_mn_major<P>>(e / A_UNITS, e % A_UNITS)]),
                               column < end ? source + column : (const uint16_t *)c.packed_weight);
            source = b_row<P>(c, p, step, e / B_UNITS, column, end);
            column += e % B_UNITS * 8;
            cot_cp_async_zfill(column < end,
                               cot_shared_address(&target.b[swizzled_unit<b_mn_major<P>>(e / B_UNITS, e % B_UNITS)]),
                               column < end ? source + column : (const uint16_t *)c.packed_weight);
        }
    }
    cot_cp_async_commit_group();
}

/* 8 warps compute 64 x 32 each. */
template <typename E, product P> static __device__ __forceinline__ void multiply_mma(const conv1d_dense_call &c)
{
    enum { STAGES = 3 };
    __shared__ stage_tiles stages[STAGES];
    const work_tile p = get_work_tile<P, CONV1D_DENSE_MMA_BLOCK>(c);
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, y = warp % 2 * 64, x = warp / 2 * 32;
    float sums[4][4][4] = {};
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        load_stage<P>(c, p, p.first + i, stages[i]);
    int stage = 0;
    for (int64_t step = p.first; step < p.end; step++) {
        cot_cp_async_wait_group<STAGES - 2>();
        __syncthreads(); /* all units of this step have arrived, and all warps have finished the previous step */
        load_stage<P>(c, p, step + STAGES - 1, stages[stage == 0 ? STAGES - 1 : stage - 1]);
        const stage_tiles &t = stages[stage];
        stage = stage == STAGES - 1 ? 0 : stage + 1;
#pragma unroll
        for (int k = 0; k < BLOCK_K; k += 16) {
            uint32_t a[4][4], b[2][4];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                if constexpr (a_mn_major<P>)
                    cot_ldmatrix_x4_trans(
                        a[m],
                        cot_shared_address(
                            &t.a[swizzled_unit<true>(k + lane / 16 * 8 + lane % 8, y / 8 + 2 * m + lane / 8 % 2)]));
                else
                    cot_ldmatrix_x4(a[m], cot_shared_address(
                                              &t.a[swizzled_unit<false>(y + 16 * m + lane % 16, k / 8 + lane / 16)]));
            }
#pragma unroll
            for (int j = 0; j < 2; j++) { /* 2 blocks of 8 columns each */
                if constexpr (b_mn_major<P>)
                    cot_ldmatrix_x4_trans(
                        b[j],
                        cot_shared_address(
                            &t.b[swizzled_unit<true>(k + lane / 8 % 2 * 8 + lane % 8, x / 8 + 2 * j + lane / 16)]));
                else
                    cot_ldmatrix_x4(
                        b[j],
                        cot_shared_address(
                            &t.b[swizzled_unit<false>(x + 16 * j + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2)]));
            }
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint32_t low = b[j / 2][j % 2 * 2], high = b[j / 2][j % 2 * 2 + 1];
                    if constexpr (cot_is_f16<E>)
                        cot_mma_f16(sums[m][j], a[m][0], a[m][1], a[m][2], a[m][3], low, high);
                    else
                        cot_mma_bf16(sums[m][j], a[m][0], a[m][1], a[m][2], a[m][3], low, high);
                }
        }
    }
    cot_cp_async_wait_group<0>();
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                store_result<P>(c, p, p.row + y + 16 * m + lane / 4 + 8 * (i / 2),
                                p.column + x + 8 * j + 2 * (lane % 4) + i % 2, sums[m][j][i]);
}

#define F32(stem, product)                                                            \
    extern "C" __global__ void __launch_bounds__(F32_THREADS)                         \
        causal_conv1d_dense_##stem##_f32(const __grid_constant__ conv1d_dense_call c) \
    {                                                                                 \
        multiply_f32<product>(c);                                                     \
    }
#define MMA(stem, product, name, element)                                                    \
    extern "C" __global__ void __launch_bounds__(MMA_THREADS)                                \
        causal_conv1d_dense_##stem##_mma_##name(const __grid_constant__ conv1d_dense_call c) \
    {                                                                                        \
        multiply_mma<element, product>(c);                                                   \
    }
CONV1D_DENSE_INSTANCES
