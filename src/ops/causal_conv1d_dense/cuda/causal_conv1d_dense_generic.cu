/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_generic.cu: the products of dense causal convolution for compute capability 8.0 and later, any
 * strides, and states. A step processes 32 of the inner axis:
 *
 *   product    rows            columns   inner axis                 A                 B
 *   FORWARD    tokens          Dout      input channel, tap         xe [t + k][i]     w [o][i][k]
 *              without y, it computes g = dy silu'(z) instead of y
 *   DX         rows r of xe    Din       output channel, tap        g [r - k][o]      w [o][i][k]
 *   DWEIGHT    Dout, one tap   Din       tokens of all sequences    g [t][o]          xe [t + k][i]
 *
 * The float32 kernels compute 64 x 64 per block and load their operands element by element. The 32 terms of a step
 * are summed separately and then added. If x and weight have the same 16-bit dtype, the tensor-core kernels compute
 * 128 x 128 per block. They load their operands by cp.async from rows that other kernels have gathered: xe, g, and
 * the weights by tap. A step stays within one tap, and for DWEIGHT within one sequence. */
#include "causal_conv1d_dense_cuda.h"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/ptx.cuh"

enum { BLOCK_K = CONV1D_DENSE_SM80_BLOCK_K, F32_THREADS = 128, MMA_THREADS = 256, WARP = 32, SUM_THREADS = 256 };
enum product { FORWARD, DX, DWEIGHT };

static __device__ __forceinline__ float load_at(const conv1d_dense_array &a, int64_t b, int64_t channel, int64_t t)
{
    return cot_load(a.data, a.dtype, b * a.stride[0] + channel * a.stride[1] + t * a.stride[2]);
}

/* Loads row r of xe: a column of the state, a token, or 0. */
static __device__ __forceinline__ float load_xe(const conv1d_dense_call &c, int64_t b, int64_t i, int64_t r)
{
    const int64_t t = r - (c.K - 1);
    if (t >= c.T || i >= c.Din)
        return 0.0f;
    if (t >= 0)
        return load_at(c.x, b, i, t);
    return c.initial_state.data != nullptr ? load_at(c.initial_state, b, i, r) : 0.0f;
}

static __device__ __forceinline__ float load_g(const conv1d_dense_call &c, int64_t b, int64_t o, int64_t t)
{
    return t >= 0 && t < c.T && o < c.Dout ? load_at(c.g, b, o, t) : 0.0f;
}

static __device__ __forceinline__ float load_weight(const conv1d_dense_call &c, int64_t o, int64_t i, int64_t k)
{
    return o < c.Dout && i < c.Din ? load_at(c.weight, o, i, k) : 0.0f;
}

/* What a block computes. b: sequence; k and split: for DWEIGHT. */
struct work_tile {
    int64_t b, k, split, row, column, first, end; /* [first, end): range of the inner axis, on tensor cores in steps */
};

static __device__ __forceinline__ int64_t k_block_count(int64_t size)
{
    return (size + BLOCK_K - 1) / BLOCK_K;
}

template <product P, int BLOCK> static __device__ __forceinline__ work_tile get_work_tile(const conv1d_dense_call &c)
{
    constexpr bool IS_MMA = BLOCK == CONV1D_DENSE_MMA_BLOCK;
    const int64_t columns = P == FORWARD ? c.Dout : c.Din;
    const int64_t rows = P == DWEIGHT ? c.Dout : P == DX ? c.K - 1 + c.T : c.T;
    const int64_t column_blocks = (columns + BLOCK - 1) / BLOCK, row_blocks = (rows + BLOCK - 1) / BLOCK;
    const int64_t rest = blockIdx.x / column_blocks / row_blocks;
    work_tile p = {};
    p.column = blockIdx.x % column_blocks * BLOCK;
    p.row = blockIdx.x / column_blocks % row_blocks * BLOCK;
    if (P == DWEIGHT) {
        const int64_t steps = IS_MMA ? c.B * k_block_count(c.T) : k_block_count(c.B * c.T),
                      step_size = IS_MMA ? 1 : BLOCK_K;
        p.k = rest % c.K;
        p.split = rest / c.K;
        p.first = p.split * steps / c.splits * step_size;
        p.end = min((p.split + 1) * steps / c.splits * step_size, IS_MMA ? steps : c.B * c.T);
    } else {
        const int64_t channels = P == DX ? c.Dout : c.Din;
        p.b = rest;
        p.end = c.K * (IS_MMA ? k_block_count(channels) : channels);
    }
    return p;
}

template <product P>
static __device__ __forceinline__ float load_a(const conv1d_dense_call &c, const work_tile &p, int64_t row, int64_t n)
{
    if (n >= p.end)
        return 0.0f;
    if (P == DWEIGHT)
        return load_g(c, n / c.T, row, n % c.T);
    if (P == DX)
        return load_g(c, p.b, n / c.K, row - n % c.K);
    return load_xe(c, p.b, n / c.K, row + n % c.K);
}

template <product P>
static __device__ __forceinline__ float load_b(const conv1d_dense_call &c, const work_tile &p, int64_t column,
                                               int64_t n)
{
    if (n >= p.end)
        return 0.0f;
    if (P == DWEIGHT)
        return load_xe(c, n / c.T, column, n % c.T + p.k);
    if (P == DX)
        return load_weight(c, n / c.K, column, n % c.K);
    return load_weight(c, column, n / c.K, n % c.K);
}

/* Stores one element of the result. */
template <product P>
static __device__ __forceinline__ void store_result(const conv1d_dense_call &c, const work_tile &p, int64_t row,
                                                    int64_t column, float sum)
{
    if (P == DWEIGHT) {
        if (row < c.Dout && column < c.Din)
            c.dweight_partials[((p.split * c.K + p.k) * c.Dout + row) * c.Din + column] = sum;
        return;
    }
    if (P == DX) {
        if (row >= c.K - 1 + c.T || column >= c.Din)
            return;
        const bool token = row >= c.K - 1;
        const conv1d_dense_array &target = token ? c.out : c.dinitial_state;
        if (target.data == nullptr)
            return;
        if (c.dfinal_state.data != nullptr && row >= c.T)
            sum += load_at(c.dfinal_state, p.b, column, row - c.T);
        cot_store(target.data, target.dtype,
                  p.b * target.stride[0] + column * target.stride[1] +
                      (token ? row - (c.K - 1) : row) * target.stride[2],
                  sum);
        return;
    }
    if (row >= c.T || column >= c.Dout)
        return;
    float z = sum;
    if (c.bias.data != nullptr)
        z += cot_load(c.bias.data, c.bias.dtype, column * c.bias.stride[0]);
    const bool is_g = c.out.data == nullptr;
    const conv1d_dense_array &target = is_g ? c.g : c.out;
    const float value = is_g     ? cot_silu_gradient<true>(load_at(c.dy, p.b, column, row), z)
                        : c.silu ? cot_silu<true>(z)
                                 : z;
    cot_store(target.data, target.dtype, p.b * target.stride[0] + column * target.stride[1] + row * target.stride[2],
              value);
}

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
            a[row * SHARED_PITCH + term] = load_a<P>(c, p, p.row + row, n + term);
            b[row * SHARED_PITCH + term] = load_b<P>(c, p, p.column + row, n + term);
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
#define PRODUCT(stem, product)              \
    F32(stem, product)                      \
    MMA(stem, product, bf16, __nv_bfloat16) \
    MMA(stem, product, f16, __half)
PRODUCT(fwd, FORWARD)
PRODUCT(dx, DX)
PRODUCT(dweight, DWEIGHT)

/* A block computes dbias of one output channel. Each thread sums every 256th token, then a tree reduces the sums of the
 * threads. */
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    causal_conv1d_dense_dbias_generic(const __grid_constant__ conv1d_dense_call c)
{
    __shared__ float sums[SUM_THREADS];
    float sum = 0.0f;
    for (int64_t n = threadIdx.x; n < c.B * c.T; n += SUM_THREADS)
        sum += load_at(c.g, n / c.T, blockIdx.x, n % c.T);
    sums[threadIdx.x] = sum;
    for (int half = SUM_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x != 0)
        return;
    const int64_t target = blockIdx.x * c.dbias.stride[0];
    const float old = c.accumulate ? cot_load(c.dbias.data, c.dbias.dtype, target) : 0.0f;
    cot_store(c.dbias.data, c.dbias.dtype, target, old + sums[0]);
}

/* The final state: the last K-1 rows of xe. */
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    causal_conv1d_dense_final_state(const __grid_constant__ conv1d_dense_call c)
{
    const int64_t n = (int64_t)blockIdx.x * SUM_THREADS + threadIdx.x, columns = c.K - 1;
    if (n >= c.B * c.Din * columns)
        return;
    const int64_t s = n % columns, i = n / columns % c.Din, b = n / columns / c.Din;
    const conv1d_dense_array &target = c.final_state;
    cot_store(target.data, target.dtype, b * target.stride[0] + i * target.stride[1] + s * target.stride[2],
              load_xe(c, b, i, c.T + s));
}
