/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_generic.cu: the products of dense causal convolution on any device from compute capability 8.0,
 * for any strides and with states, 32 of the inner axis at a time:
 *
 *   product    rows            columns   inner axis                 A                 B
 *   FORWARD    tokens          Dout      input channel, tap         xe [t + k][i]     w [o][i][k]
 *              the same for g = dy silu'(z) in place of y, if there is no y
 *   INPUT      rows r of xe    Din       output channel, tap        g [r - k][o]      w [o][i][k]
 *   WEIGHT     Dout, a tap     Din       tokens of all sequences    g [t][o]          xe [t + k][i]
 *
 * In float32 a block has 64 x 64 and brings its operands element by element; each step's 32 terms are summed apart and
 * then added. With x and weight of one 16-bit dtype a block has 128 x 128 on tensor cores, its operands come by
 * cp.async from rows that were gathered before (xe, g, and weights tap by tap), and a step stays within a tap, or
 * within a sequence. */
#include "causal_conv1d_dense_cuda.h"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/ptx.cuh"

enum { STEP = CONV1D_DENSE_STEP, THREADS = 128, TILE_THREADS = 256, WARP = 32, SUM_THREADS = 256 };
enum product { FORWARD, INPUT, WEIGHT };

static __device__ __forceinline__ float at(const conv1d_dense_array &a, int64_t b, int64_t channel, int64_t t)
{
    return cot_load(a.data, a.dtype, b * a.stride[0] + channel * a.stride[1] + t * a.stride[2]);
}

/* Row r of xe: a column of the state, a token, or zeros. */
static __device__ __forceinline__ float input_at(const conv1d_dense_call &c, int64_t b, int64_t i, int64_t r)
{
    const int64_t t = r - (c.K - 1);
    if (t >= c.T || i >= c.Din)
        return 0.0f;
    if (t >= 0)
        return at(c.x, b, i, t);
    return c.initial_state.data != nullptr ? at(c.initial_state, b, i, r) : 0.0f;
}

static __device__ __forceinline__ float gradient_at(const conv1d_dense_call &c, int64_t b, int64_t o, int64_t t)
{
    return t >= 0 && t < c.T && o < c.Dout ? at(c.g, b, o, t) : 0.0f;
}

static __device__ __forceinline__ float weight_at(const conv1d_dense_call &c, int64_t o, int64_t i, int64_t k)
{
    return o < c.Dout && i < c.Din ? at(c.weight, o, i, k) : 0.0f;
}

/* What a block computes. */
struct place {
    int64_t b, k, part, row, column, first, end; /* [first, end): of the inner axis; on tensor cores steps of it */
};

static __device__ __forceinline__ int64_t steps_of(int64_t size)
{
    return (size + STEP - 1) / STEP;
}

template <product P, int SIDE> static __device__ __forceinline__ place place_of(const conv1d_dense_call &c)
{
    constexpr bool TILES = SIDE == CONV1D_DENSE_TILE;
    const int64_t columns = P == FORWARD ? c.Dout : c.Din;
    const int64_t rows = P == WEIGHT ? c.Dout : P == INPUT ? c.K - 1 + c.T : c.T;
    const int64_t across = (columns + SIDE - 1) / SIDE, down = (rows + SIDE - 1) / SIDE;
    const int64_t rest = blockIdx.x / across / down;
    place p = {};
    p.column = blockIdx.x % across * SIDE;
    p.row = blockIdx.x / across % down * SIDE;
    if (P == WEIGHT) {
        const int64_t steps = TILES ? c.B * steps_of(c.T) : steps_of(c.B * c.T), unit = TILES ? 1 : STEP;
        p.k = rest % c.K;
        p.part = rest / c.K;
        p.first = p.part * steps / c.parts * unit;
        p.end = min((p.part + 1) * steps / c.parts * unit, TILES ? steps : c.B * c.T);
    } else {
        const int64_t channels = P == INPUT ? c.Dout : c.Din;
        p.b = rest;
        p.end = c.K * (TILES ? steps_of(channels) : channels);
    }
    return p;
}

template <product P>
static __device__ __forceinline__ float left(const conv1d_dense_call &c, const place &p, int64_t row, int64_t n)
{
    if (n >= p.end)
        return 0.0f;
    if (P == WEIGHT)
        return gradient_at(c, n / c.T, row, n % c.T);
    if (P == INPUT)
        return gradient_at(c, p.b, n / c.K, row - n % c.K);
    return input_at(c, p.b, n / c.K, row + n % c.K);
}

template <product P>
static __device__ __forceinline__ float right(const conv1d_dense_call &c, const place &p, int64_t column, int64_t n)
{
    if (n >= p.end)
        return 0.0f;
    if (P == WEIGHT)
        return input_at(c, n / c.T, column, n % c.T + p.k);
    if (P == INPUT)
        return weight_at(c, n / c.K, column, n % c.K);
    return weight_at(c, column, n / c.K, n % c.K);
}

/* One element of the result. */
template <product P>
static __device__ __forceinline__ void finish(const conv1d_dense_call &c, const place &p, int64_t row, int64_t column,
                                              float sum)
{
    if (P == WEIGHT) {
        if (row < c.Dout && column < c.Din)
            c.dweight_parts[((p.part * c.K + p.k) * c.Dout + row) * c.Din + column] = sum;
        return;
    }
    if (P == INPUT) {
        if (row >= c.K - 1 + c.T || column >= c.Din)
            return;
        const bool token = row >= c.K - 1;
        const conv1d_dense_array &to = token ? c.out : c.dinitial_state;
        if (to.data == nullptr)
            return;
        if (c.dfinal_state.data != nullptr && row >= c.T)
            sum += at(c.dfinal_state, p.b, column, row - c.T);
        cot_store(to.data, to.dtype,
                  p.b * to.stride[0] + column * to.stride[1] + (token ? row - (c.K - 1) : row) * to.stride[2], sum);
        return;
    }
    if (row >= c.T || column >= c.Dout)
        return;
    float z = sum;
    if (c.bias.data != nullptr)
        z += cot_load(c.bias.data, c.bias.dtype, column * c.bias.stride[0]);
    const bool gradient = c.out.data == nullptr;
    const conv1d_dense_array &to = gradient ? c.g : c.out;
    const float value = gradient ? cot_silu_gradient<true>(at(c.dy, p.b, column, row), z)
                        : c.silu ? cot_silu<true>(z)
                                 : z;
    cot_store(to.data, to.dtype, p.b * to.stride[0] + column * to.stride[1] + row * to.stride[2], value);
}

/* ---- in float32 ------------------------------------------------------------------------------------------- */

template <product P> static __device__ __forceinline__ void multiply_f32(const conv1d_dense_call &c)
{
    enum { SIDE = CONV1D_DENSE_SIDE, PITCH = STEP + 1, HEIGHT = 8, WIDTH = 4 };
    __shared__ float a[SIDE * PITCH], b[SIDE * PITCH];
    const place p = place_of<P, SIDE>(c);
    const int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16 * HEIGHT;
    float sums[HEIGHT][WIDTH] = {};
    for (int64_t n = p.first; n < p.end; n += STEP) {
        for (int e = (int)threadIdx.x; e < SIDE * STEP; e += THREADS) {
            /* Neighbouring lanes have neighbouring channels where tokens are summed, else neighbouring terms. */
            const int row = P == WEIGHT ? e % SIDE : e / STEP, term = P == WEIGHT ? e / SIDE : e % STEP;
            a[row * PITCH + term] = left<P>(c, p, p.row + row, n + term);
            b[row * PITCH + term] = right<P>(c, p, p.column + row, n + term);
        }
        __syncthreads();
        float run[HEIGHT][WIDTH] = {};
#pragma unroll 4
        for (int term = 0; term < STEP; term++)
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const float own = b[(x + 16 * j) * PITCH + term];
#pragma unroll
                for (int i = 0; i < HEIGHT; i++)
                    run[i][j] = fmaf(a[(y + i) * PITCH + term], own, run[i][j]);
            }
#pragma unroll
        for (int i = 0; i < HEIGHT; i++)
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                sums[i][j] += run[i][j];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < HEIGHT; i++)
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
            finish<P>(c, p, p.row + y + i, p.column + x + 16 * j, sums[i][j]);
}

/* ---- on tensor cores -------------------------------------------------------------------------------------- */

/* An operand's tile in shared memory, 512 units of 16 bytes: its rows (of the product) with 32 terms each, or, ALONG,
 * 32 terms with 128 rows each, as it lies in memory. Units are permuted so that the eight that ldmatrix reads at once
 * are in different banks. */
template <bool ALONG> static __device__ __forceinline__ int unit_at(int row, int unit)
{
    return ALONG ? row * 16 + (unit ^ (row & 7)) : row * 4 + (unit ^ (row >> 1 & 3));
}

template <product P> constexpr bool left_along = P == WEIGHT;
template <product P> constexpr bool right_along = P != FORWARD;

/* Where a step's part of an operand lies: of row `r` of its tile elements from `column` on, or nothing. */
template <product P>
static __device__ __forceinline__ const uint16_t *left_row(const conv1d_dense_call &c, const place &p, int64_t step,
                                                           int r, int64_t &column, int64_t &end)
{
    const int64_t per = steps_of(P == FORWARD ? c.Din : P == INPUT ? c.Dout : c.T), n = step % per * STEP;
    if (P == FORWARD) {
        const int64_t t = p.row + r;
        column = n, end = t < c.T ? c.pitch_in : 0;
        return (const uint16_t *)c.rows + (p.b * (c.K - 1 + c.T) + t + step / per) * c.pitch_in;
    }
    const int64_t t = P == INPUT ? p.row + r - step / per : n + r, b = P == INPUT ? p.b : step / per;
    column = P == INPUT ? n : p.row;
    end = t >= 0 && t < c.T ? c.pitch_out : 0;
    return (const uint16_t *)c.g_rows + (b * c.T + t) * c.pitch_out;
}

template <product P>
static __device__ __forceinline__ const uint16_t *right_row(const conv1d_dense_call &c, const place &p, int64_t step,
                                                            int r, int64_t &column, int64_t &end)
{
    const int64_t per = steps_of(P == FORWARD ? c.Din : P == INPUT ? c.Dout : c.T), n = step % per * STEP;
    if (P == WEIGHT) {
        column = p.column, end = n + r < c.T ? c.pitch_in : 0;
        return (const uint16_t *)c.rows + (step / per * (c.K - 1 + c.T) + n + r + p.k) * c.pitch_in;
    }
    const int64_t o = P == FORWARD ? p.column + r : n + r;
    column = P == FORWARD ? n : p.column;
    end = o < c.Dout ? c.pitch_in : 0;
    return (const uint16_t *)c.packed + (step / per * c.Dout + o) * c.pitch_in;
}

struct tiles {
    uint4 a[CONV1D_DENSE_TILE * STEP / 8], b[CONV1D_DENSE_TILE * STEP / 8];
};

template <product P>
static __device__ __forceinline__ void ask_for(const conv1d_dense_call &c, const place &p, int64_t step, tiles &to)
{
    if (step < p.end) {
#pragma unroll
        for (int e = (int)threadIdx.x; e < CONV1D_DENSE_TILE * STEP / 8; e += TILE_THREADS) {
            constexpr int LEFT = left_along<P> ? 16 : 4, RIGHT = right_along<P> ? 16 : 4; /* units of a row */
            int64_t column, end;
            const uint16_t *from = left_row<P>(c, p, step, e / LEFT, column, end);
            column += e % LEFT * 8;
            cot_cp_async_zfill(column < end, cot_shared_address(&to.a[unit_at<left_along<P>>(e / LEFT, e % LEFT)]),
                               column < end ? from + column : (const uint16_t *)c.packed);
            from = right_row<P>(c, p, step, e / RIGHT, column, end);
            column += e % RIGHT * 8;
            cot_cp_async_zfill(column < end, cot_shared_address(&to.b[unit_at<right_along<P>>(e / RIGHT, e % RIGHT)]),
                               column < end ? from + column : (const uint16_t *)c.packed);
        }
    }
    cot_cp_async_commit_group();
}

/* Eight warps of 64 x 32. */
template <typename E, product P> static __device__ __forceinline__ void multiply_mma(const conv1d_dense_call &c)
{
    enum { STAGES = 3 };
    __shared__ tiles stages[STAGES];
    const place p = place_of<P, CONV1D_DENSE_TILE>(c);
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, y = warp % 2 * 64, x = warp / 2 * 32;
    float sums[4][4][4] = {};
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        ask_for<P>(c, p, p.first + i, stages[i]);
    int stage = 0;
    for (int64_t step = p.first; step < p.end; step++) {
        cot_cp_async_wait_group<STAGES - 2>();
        __syncthreads(); /* everybody's units are there, and everybody is done with the step before */
        ask_for<P>(c, p, step + STAGES - 1, stages[stage == 0 ? STAGES - 1 : stage - 1]);
        const tiles &t = stages[stage];
        stage = stage == STAGES - 1 ? 0 : stage + 1;
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            uint32_t left_[4][4], right_[2][4];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                if constexpr (left_along<P>)
                    cot_ldmatrix_x4_trans(
                        left_[m], cot_shared_address(
                                      &t.a[unit_at<true>(k + lane / 16 * 8 + lane % 8, y / 8 + 2 * m + lane / 8 % 2)]));
                else
                    cot_ldmatrix_x4(
                        left_[m], cot_shared_address(&t.a[unit_at<false>(y + 16 * m + lane % 16, k / 8 + lane / 16)]));
            }
#pragma unroll
            for (int j = 0; j < 2; j++) { /* two blocks of 8 columns */
                if constexpr (right_along<P>)
                    cot_ldmatrix_x4_trans(
                        right_[j],
                        cot_shared_address(
                            &t.b[unit_at<true>(k + lane / 8 % 2 * 8 + lane % 8, x / 8 + 2 * j + lane / 16)]));
                else
                    cot_ldmatrix_x4(
                        right_[j],
                        cot_shared_address(
                            &t.b[unit_at<false>(x + 16 * j + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2)]));
            }
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint32_t low = right_[j / 2][j % 2 * 2], high = right_[j / 2][j % 2 * 2 + 1];
                    if constexpr (cot_is_f16<E>)
                        cot_mma_f16(sums[m][j], left_[m][0], left_[m][1], left_[m][2], left_[m][3], low, high);
                    else
                        cot_mma_bf16(sums[m][j], left_[m][0], left_[m][1], left_[m][2], left_[m][3], low, high);
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
                finish<P>(c, p, p.row + y + 16 * m + lane / 4 + 8 * (i / 2),
                          p.column + x + 8 * j + 2 * (lane % 4) + i % 2, sums[m][j][i]);
}

#define F32(stem, product)                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                             \
        causal_conv1d_dense_##stem##_f32(const __grid_constant__ conv1d_dense_call c) \
    {                                                                                 \
        multiply_f32<product>(c);                                                     \
    }
#define MMA(stem, product, name, element)                                                    \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS)                               \
        causal_conv1d_dense_##stem##_mma_##name(const __grid_constant__ conv1d_dense_call c) \
    {                                                                                        \
        multiply_mma<element, product>(c);                                                   \
    }
#define PRODUCT(stem, product)              \
    F32(stem, product)                      \
    MMA(stem, product, bf16, __nv_bfloat16) \
    MMA(stem, product, f16, __half)
PRODUCT(fwd, FORWARD)
PRODUCT(dx, INPUT)
PRODUCT(dweight, WEIGHT)

/* dbias of an output channel: a block, each thread every 256th token, and the threads' sums by halves. */
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    causal_conv1d_dense_dbias_generic(const __grid_constant__ conv1d_dense_call c)
{
    __shared__ float sums[SUM_THREADS];
    float own = 0.0f;
    for (int64_t n = threadIdx.x; n < c.B * c.T; n += SUM_THREADS)
        own += at(c.g, n / c.T, blockIdx.x, n % c.T);
    sums[threadIdx.x] = own;
    for (int half = SUM_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x != 0)
        return;
    const int64_t to = blockIdx.x * c.dbias.stride[0];
    const float before = c.accumulate ? cot_load(c.dbias.data, c.dbias.dtype, to) : 0.0f;
    cot_store(c.dbias.data, c.dbias.dtype, to, before + sums[0]);
}

/* The last K-1 rows of xe. */
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    causal_conv1d_dense_final_state(const __grid_constant__ conv1d_dense_call c)
{
    const int64_t n = (int64_t)blockIdx.x * SUM_THREADS + threadIdx.x, columns = c.K - 1;
    if (n >= c.B * c.Din * columns)
        return;
    const int64_t s = n % columns, i = n / columns % c.Din, b = n / columns / c.Din;
    const conv1d_dense_array &to = c.final_state;
    cot_store(to.data, to.dtype, b * to.stride[0] + i * to.stride[1] + s * to.stride[2], input_at(c, b, i, c.T + s));
}
