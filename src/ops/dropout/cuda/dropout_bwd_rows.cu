/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_bwd_rows.cu: dx = c * m * dy * act'(x + bias), and dbias[d] = sum_r dx[r,d] in the same pass. A thread sums the
 * dx of its rows before they are rounded, its block the sums of its threads, and dropout_bwd_reduce those of the blocks,
 * each in a fixed order. */
#include "dropout_tile.cuh"

constexpr int LANES = DROPOUT_BWD_LANES, ROWS = DROPOUT_BWD_ROWS, APART = DROPOUT_THREADS / LANES;
constexpr int COLUMNS = COT_DROPOUT_GROUP * LANES;
static_assert(COLUMNS <= DROPOUT_THREADS, "a thread sums a column");

template <typename E, int ACTIVATION> static __device__ __forceinline__ float slope(float z)
{
    constexpr bool PRECISE = sizeof(E) == 4;
    switch (ACTIVATION) {
    case COT_ACTIVATION_SILU: return cot_silu_slope<PRECISE>(z);
    case COT_ACTIVATION_GELU_TANH: return cot_gelu_tanh_slope<PRECISE>(z);
    default: return cot_gelu_erf_slope<PRECISE>(z);
    }
}

/* The rows that a thread has in registers at once. */
template <typename E, bool ACTIVE> constexpr int batch = (ACTIVE ? 8 : 16) / (2 * (int)sizeof(E));

template <typename E, int ACCESS, int ACTIVATION, int BATCH>
static __device__ __forceinline__ void finish(const dropout_call &c, const place &p, const walk &dx, int first,
                                              const elements<E> (&dy)[BATCH], const elements<E> (&x)[BATCH],
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
            g[j] *= c.scale;
            bool kept = keep[i] >> j & 1u;
            if (ACTIVATION == COT_ACTIVATION_RELU)
                kept = kept && !(z[j] + bias[j] <= 0.0f);
            else if (ACTIVATION != COT_ACTIVATION_NONE)
                g[j] *= slope<E, ACTIVATION>(z[j] + bias[j]);
            g[j] = kept ? g[j] : 0.0f;
            sums[j] += g[j];
        }
        if (c.dx.data != nullptr)
            store<E, ACCESS, LANES>(c, p, c.dx, dx, first, i, g);
    }
}

/* The sums of the block, by columns from the first of lane 0's group on. */
template <typename E, int ACCESS>
static __device__ __forceinline__ void sum_block(const dropout_call &c, const place &p,
                                                 const float (&sums)[COT_DROPOUT_GROUP])
{
    constexpr int N = chunk_size<E>;
    __shared__ float4 all[APART][COLUMNS / 4];
    if (ACCESS == SHIFTED) { /* rows of different shifts leave different columns out */
        for (int i = threadIdx.x; i < APART * COLUMNS / 4; i += DROPOUT_THREADS)
            all[0][i] = {0.0f, 0.0f, 0.0f, 0.0f};
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        const int first = p.relative + LANES * N * h;
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
    float *out = c.partial + (p.tile_row * c.tiles + blockIdx.x) * COLUMNS;
    if (threadIdx.x < COLUMNS) {
        float sum = 0.0f;
#pragma unroll
        for (int beside = 0; beside < APART; beside++)
            sum += ((const float *)all[beside])[threadIdx.x];
        out[threadIdx.x] = sum;
    }
}

struct walks {
    walk dy, x, dx;
};

template <typename E, int ACCESS, bool ACTIVE>
static __device__ __forceinline__ void take_batch(const dropout_call &c, const place &p, const draws &from,
                                                  const walks &w, int first, const float (&bias)[COT_DROPOUT_GROUP],
                                                  float (&sums)[COT_DROPOUT_GROUP])
{
    constexpr int BATCH = batch<E, ACTIVE>;
    elements<E> dy[BATCH], x[BATCH];
    uint32_t keep[BATCH];
    load<E, ACCESS, LANES>(c, p, c.dy, w.dy, first, true, dy);
    if (ACTIVE)
        load<E, ACCESS, LANES>(c, p, c.x, w.x, first, true, x);
    find_keep<ACCESS, LANES>(c, p, from, first, keep);
#pragma unroll
    for (int i = 0; i < BATCH; i++)
        keep[i] = keep_of_elements<E, ACCESS, LANES>(c, p, first, i, keep[i]);
    if (!ACTIVE)
        finish<E, ACCESS, COT_ACTIVATION_NONE>(c, p, w.dx, first, dy, x, bias, keep, sums);
    else if (c.activation == COT_ACTIVATION_SILU)
        finish<E, ACCESS, COT_ACTIVATION_SILU>(c, p, w.dx, first, dy, x, bias, keep, sums);
    else if (c.activation == COT_ACTIVATION_RELU)
        finish<E, ACCESS, COT_ACTIVATION_RELU>(c, p, w.dx, first, dy, x, bias, keep, sums);
    else if (c.activation == COT_ACTIVATION_GELU_TANH)
        finish<E, ACCESS, COT_ACTIVATION_GELU_TANH>(c, p, w.dx, first, dy, x, bias, keep, sums);
    else
        finish<E, ACCESS, COT_ACTIVATION_GELU_ERF>(c, p, w.dx, first, dy, x, bias, keep, sums);
}

template <typename E, int ACCESS, bool ACTIVE> static __device__ __forceinline__ void backward(const dropout_call &c)
{
    constexpr int BATCH = batch<E, ACTIVE>;
    const place p = find_place<E, ACCESS, LANES>(c, c.dy, ROWS);
    float bias[COT_DROPOUT_GROUP], sums[COT_DROPOUT_GROUP] = {0};
    cot_launch_dependents();
    if (ACTIVE)
        load_bias<E, ACCESS, LANES>(c, p, bias);
    const draws from = find_draws(c);
    walks w = {begin_walk<ACCESS, LANES>(p, c.dy, sizeof(E)), begin_walk<ACCESS, LANES>(p, c.x, sizeof(E)),
               begin_walk<ACCESS, LANES>(p, c.dx, sizeof(E))};
#pragma unroll 1
    for (int i = 0; i < ROWS; i += BATCH) {
        take_batch<E, ACCESS, ACTIVE>(c, p, from, w, i * APART, bias, sums);
        w.dy.at += BATCH * w.dy.apart;
        w.x.at += BATCH * w.x.apart;
        w.dx.at += BATCH * w.dx.apart;
    }
    if (c.partial != nullptr)
        sum_block<E, ACCESS>(c, p, sums);
}

/* The kernels, those with an activation apart: x takes registers too. */
/* clang-format off */
#define KERNELS(dtype, E) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype, 4, (backward<E, PLAIN, false>)) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype##_active, 3, (backward<E, PLAIN, true>)) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype##_shifted, 3, (backward<E, SHIFTED, false>)) \
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
    const int64_t d = (int64_t)blockIdx.x * 32 + lane, width = c.shifted ? COLUMNS - COT_DROPOUT_GROUP : COLUMNS;
    const int64_t tile = d / width, stride = c.tiles * COLUMNS;
    const int64_t own = tile * COLUMNS + d % width + (c.shifted ? COT_DROPOUT_GROUP : 0);
    const int64_t edge = d % width - width + COT_DROPOUT_GROUP; /* 1 and more: also column `edge` of the next tile */
    const bool two = c.shifted && edge > 0 && tile + 1 < c.tiles;
    float sum = 0.0f;
    cot_wait_for_kernels_before();
    if (d < c.D) {
#pragma unroll 8
        for (int64_t part = warp; part < c.parts; part += WARPS) {
            sum += c.partial[part * stride + own];
            if (two)
                sum += c.partial[part * stride + (tile + 1) * COLUMNS + edge];
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
