/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_bwd_rows.cu: dx = c * m * dy * act'(x + bias), and dbias[d] = sum_r dx[r,d] in the same pass. A thread sums the
 * dx of its rows before they are rounded, its block the sums of its threads, and dropout_bwd_reduce those of the blocks,
 * each in a fixed order. */
#include "dropout_tile.cuh"

template <int ACCESS> constexpr int lanes = ACCESS == SHIFTED ? DROPOUT_BWD_SHIFTED_LANES : DROPOUT_BWD_LANES;
template <int ACCESS> constexpr int rows_apart = DROPOUT_THREADS / lanes<ACCESS>; /* of a thread */
template <int ACCESS> constexpr int columns = COT_DROPOUT_GROUP *lanes<ACCESS>;   /* of a tile */
static_assert(columns<SHIFTED> <= DROPOUT_THREADS, "a thread sums a column");

template <typename E, int ACTIVATION> static __device__ __forceinline__ float slope(float z)
{
    constexpr bool PRECISE = sizeof(E) == 4;
    switch (ACTIVATION) {
    case COT_ACTIVATION_SILU: return cot_silu_slope<PRECISE>(z);
    case COT_ACTIVATION_GELU_TANH: return cot_gelu_tanh_slope<PRECISE>(z);
    default: return cot_gelu_erf_slope(z);
    }
}

/* GELU's erf form with 16-bit results: the slope comes with the scale, of z in a unit of its own, and so does the bias. */
template <typename E, int ACTIVATION>
constexpr bool scaled_slope = sizeof(E) == 2 && ACTIVATION == COT_ACTIVATION_GELU_ERF;

/* The rows that a thread has in registers at once. */
template <typename E, int ACCESS, bool ACTIVE>
constexpr int batch = (ACTIVE || ACCESS == SHIFTED ? 4 : 8) / (int)sizeof(E);

/* Turns a batch of dy into dx, adds it to the sums, and writes what it can write as a whole. */
template <int ACCESS, int ACTIVATION, typename E, int BATCH>
static __device__ __forceinline__ void finish(const dropout_call &c, const place &p, const walk &dx, int first,
                                              elements<E> (&dy)[BATCH], const elements<E> (&x)[BATCH],
                                              const float (&bias)[COT_DROPOUT_GROUP], const uint32_t (&keep)[BATCH],
                                              float (&sums)[COT_DROPOUT_GROUP])
{
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        float g[COT_DROPOUT_GROUP], z[COT_DROPOUT_GROUP];
        unpack(dy[i], g);
        if (ACTIVATION != COT_ACTIVATION_NONE)
            unpack(x[i], z);
#pragma unroll
        for (int j = 0; j < COT_DROPOUT_GROUP; j++) {
            if (scaled_slope<E, ACTIVATION>)
                g[j] *= cot_gelu_erf_slope_scaled(fmaf(z[j], COT_GELU_SLOPE_UNIT, bias[j]), c.scale, c.slope_divisor);
            else
                g[j] *= c.scale;
            bool kept = keep[i] >> j & 1u;
            if (ACTIVATION == COT_ACTIVATION_RELU)
                kept = kept && !(z[j] + bias[j] <= 0.0f);
            else if (ACTIVATION != COT_ACTIVATION_NONE && !scaled_slope<E, ACTIVATION>)
                g[j] *= slope<E, ACTIVATION>(z[j] + bias[j]);
            g[j] = kept ? g[j] : 0.0f;
        }
        pack(dy[i], g);
        if (c.dx.data != nullptr)
            store<E, ACCESS, lanes<ACCESS>>(p, dx, first, i, dy[i]);
#pragma unroll
        for (int j = 0; j < COT_DROPOUT_GROUP; j++)
            sums[j] += g[j];
    }
}

/* The sums of the block, by columns from the first of lane 0's group on. */
template <typename E, int ACCESS>
static __device__ __forceinline__ void sum_block(const dropout_call &c, const place &p,
                                                 const float (&sums)[COT_DROPOUT_GROUP])
{
    constexpr int N = chunk_size<E>;
    __shared__ float4 all[rows_apart<ACCESS>][columns<ACCESS> / 4];
    if (ACCESS == SHIFTED) { /* rows of different shifts leave different columns out */
        for (int i = threadIdx.x; i < rows_apart<ACCESS> * columns<ACCESS> / 4; i += DROPOUT_THREADS)
            all[0][i] = {0.0f, 0.0f, 0.0f, 0.0f};
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        const int first = p.relative + lanes<ACCESS> * N * h;
        if (ACCESS == SHIFTED) {
#pragma unroll
            for (int j = 0; j < N; j++)
                if (has_chunk(p, h))
                    ((float *)all[p.beside])[first + j] = sums[N * h + j];
        } else {
#pragma unroll
            for (int j = 0; j < N; j += 4)
                all[p.beside][(first + j) / 4] = {sums[N * h + j], sums[N * h + j + 1], sums[N * h + j + 2],
                                                  sums[N * h + j + 3]};
        }
    }
    __syncthreads();
    float *out = c.partial + (p.tile_row * c.tiles + blockIdx.x) * columns<ACCESS>;
    if (threadIdx.x < columns<ACCESS>) {
        float sum = 0.0f;
#pragma unroll
        for (int beside = 0; beside < rows_apart<ACCESS>; beside++)
            sum += ((const float *)all[beside])[threadIdx.x];
        out[threadIdx.x] = sum;
    }
}

struct walks {
    walk dy, x, dx;

    __device__ __forceinline__ void step(int rows)
    {
        dy.at += rows * dy.apart;
        x.at += rows * x.apart;
        dx.at += rows * dx.apart;
    }
};

/* SHIFTED rows that are on their way: STAGES batches, of dy and, with an activation, of x. */
template <typename E, bool ACTIVE>
constexpr int STAGES = 16 / (batch<E, SHIFTED, ACTIVE> * (int)sizeof(E) * (ACTIVE ? 2 : 1));
template <typename E, bool ACTIVE> using ahead = batch_ahead<E, batch<E, SHIFTED, ACTIVE>>[ACTIVE ? 2 : 1];

template <typename E, bool ACTIVE>
static __device__ __forceinline__ void ask(const place &p, const walks &w, int first, ahead<E, ACTIVE> &to)
{
    if (first < DROPOUT_BWD_SHIFTED_ROWS * rows_apart<SHIFTED>) {
        ask_for<E, lanes<SHIFTED>>(p, w.dy, first, to[0]);
        if constexpr (ACTIVE)
            ask_for<E, lanes<SHIFTED>>(p, w.x, first, to[1]);
    }
    cot_copy_async_commit();
}

template <typename E, int ACCESS, bool ACTIVE>
static __device__ __forceinline__ void take_batch(const dropout_call &c, const place &p, const draws &from,
                                                  const walks &w, int first, const float (&bias)[COT_DROPOUT_GROUP],
                                                  float (&sums)[COT_DROPOUT_GROUP],
                                                  const batch_ahead<E, batch<E, ACCESS, ACTIVE>> *there)
{
    constexpr int BATCH = batch<E, ACCESS, ACTIVE>;
    elements<E> dy[BATCH], x[BATCH];
    uint32_t keep[BATCH];
    load<E, ACCESS, lanes<ACCESS>>(c, p, c.dy, w.dy, first, true, dy, there);
    if (ACTIVE)
        load<E, ACCESS, lanes<ACCESS>>(c, p, c.x, w.x, first, true, x, there != nullptr ? there + 1 : nullptr);
    find_keep<ACCESS, lanes<ACCESS>, false>(c, p, from, first, keep);
#pragma unroll
    for (int i = 0; i < BATCH; i++)
        keep[i] = keep_of_elements<E, ACCESS, lanes<ACCESS>>(c, p, first, i, keep[i]);
    if (!ACTIVE)
        finish<ACCESS, COT_ACTIVATION_NONE>(c, p, w.dx, first, dy, x, bias, keep, sums);
    else if (c.activation == COT_ACTIVATION_SILU)
        finish<ACCESS, COT_ACTIVATION_SILU>(c, p, w.dx, first, dy, x, bias, keep, sums);
    else if (c.activation == COT_ACTIVATION_RELU)
        finish<ACCESS, COT_ACTIVATION_RELU>(c, p, w.dx, first, dy, x, bias, keep, sums);
    else if (c.activation == COT_ACTIVATION_GELU_TANH)
        finish<ACCESS, COT_ACTIVATION_GELU_TANH>(c, p, w.dx, first, dy, x, bias, keep, sums);
    else
        finish<ACCESS, COT_ACTIVATION_GELU_ERF>(c, p, w.dx, first, dy, x, bias, keep, sums);
    if (c.dx.data != nullptr)
        store_parts<E, ACCESS, lanes<ACCESS>>(c, p, c.dx, w.dx, first, dy);
}

template <typename E, int ACCESS, bool ACTIVE> static __device__ __forceinline__ void backward(const dropout_call &c)
{
    constexpr int BATCH = batch<E, ACCESS, ACTIVE>,
                  ROWS = ACCESS == SHIFTED ? DROPOUT_BWD_SHIFTED_ROWS : DROPOUT_BWD_ROWS;
    const place p = find_place<E, ACCESS, lanes<ACCESS>>(c, c.dy, ROWS);
    float bias[COT_DROPOUT_GROUP], sums[COT_DROPOUT_GROUP] = {0};
    cot_launch_dependents();
    if (ACTIVE)
        load_bias<E, ACCESS, lanes<ACCESS>>(c, p, bias);
    if (scaled_slope<E, COT_ACTIVATION_GELU_ERF> && c.activation == COT_ACTIVATION_GELU_ERF) {
#pragma unroll
        for (int j = 0; j < COT_DROPOUT_GROUP; j++)
            bias[j] *= COT_GELU_SLOPE_UNIT;
    }
    const draws from = find_draws(c);
    walks w = {begin_walk<ACCESS, lanes<ACCESS>>(p, c.dy, sizeof(E)),
               begin_walk<ACCESS, lanes<ACCESS>>(p, c.x, sizeof(E)),
               begin_walk<ACCESS, lanes<ACCESS>>(p, c.dx, sizeof(E))};
    if constexpr (ACCESS == SHIFTED) {
        constexpr int AHEAD = STAGES<E, ACTIVE> - 1;
        __shared__ ahead<E, ACTIVE> stages[AHEAD + 1];
        walks next = w;
#pragma unroll
        for (int i = 0; i < AHEAD; i++, next.step(BATCH))
            ask<E, ACTIVE>(p, next, i * BATCH * rows_apart<ACCESS>, stages[i]);
#pragma unroll 1
        for (int i = 0, stage = 0; i < ROWS; i += BATCH, w.step(BATCH), next.step(BATCH)) {
            ask<E, ACTIVE>(p, next, (i + AHEAD * BATCH) * rows_apart<ACCESS>, stages[stage == 0 ? AHEAD : stage - 1]);
            cot_copy_async_wait<AHEAD>();
            take_batch<E, ACCESS, ACTIVE>(c, p, from, w, i * rows_apart<ACCESS>, bias, sums, stages[stage]);
            stage = stage == AHEAD ? 0 : stage + 1;
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < ROWS; i += BATCH, w.step(BATCH))
            take_batch<E, ACCESS, ACTIVE>(c, p, from, w, i * rows_apart<ACCESS>, bias, sums, nullptr);
    }
    if (c.partial != nullptr)
        sum_block<E, ACCESS>(c, p, sums);
}

/* The kernels, those with an activation apart: x takes registers too. */
/* clang-format off */
#define KERNELS(dtype, E) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype, 4, (backward<E, PLAIN, false>)) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype##_active, 3, (backward<E, PLAIN, true>)) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype##_shifted, 4, (backward<E, SHIFTED, false>)) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype##_shifted_active, 2, (backward<E, SHIFTED, true>)) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype##_strided, 1, (backward<E, STRIDED, false>)) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype##_strided_active, 1, (backward<E, STRIDED, true>))
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
KERNELS(f32, float)
/* clang-format on */

/* dbias from the blocks' sums. A block has 32 columns; its warps take every 8th part, and their sums are added in the
 * warps' order. A column of a SHIFTED tile's edge has sums in two tiles. */
extern "C" __global__ void __launch_bounds__(DROPOUT_THREADS) dropout_bwd_reduce(const __grid_constant__ dropout_call c)
{
    constexpr int WARPS = DROPOUT_THREADS / 32;
    __shared__ float all[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t d = (int64_t)blockIdx.x * 32 + lane, span = c.shifted ? columns<SHIFTED> : columns<PLAIN>;
    const int64_t width = c.shifted ? span - COT_DROPOUT_GROUP : span;
    const int64_t tile = d / width, stride = c.tiles * span;
    const int64_t own = tile * span + d % width + (c.shifted ? COT_DROPOUT_GROUP : 0);
    const int64_t edge = d % width - width + COT_DROPOUT_GROUP; /* 1 and more: also column `edge` of the next tile */
    const bool two = c.shifted && edge > 0 && tile + 1 < c.tiles;
    float sum = 0.0f;
    cot_wait_for_kernels_before();
    if (d < c.D) {
#pragma unroll 16
        for (int64_t part = warp; part < c.parts; part += WARPS) {
            sum += c.partial[part * stride + own];
            if (two)
                sum += c.partial[part * stride + (tile + 1) * span + edge];
        }
    }
    all[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || d >= c.D)
        return;
    for (int i = 1; i < WARPS; i++)
        sum += all[i][lane];
    const int64_t at = d * c.dbias.step;
    cot_store(c.dbias.data, c.dbias.dtype, at, sum + (c.accumulate ? cot_load(c.dbias.data, c.dbias.dtype, at) : 0.0f));
}
