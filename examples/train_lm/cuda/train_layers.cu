/* SPDX-License-Identifier: Apache-2.0
 *
 * train_layers.cu: embedding, RMSNorm, RoPE and gate. device_layers.h has the formulas. All kernels are bound by memory
 * bandwidth. Each reads its inputs from memory once: a second pass over a row finds the row in the L1 cache. */
#include "device_layers.h"
#include "device_vector.cuh"

/* ---- embedding ---------------------------------------------------------------------------------------- */

/* A thread copies one vector. */
template <typename E> static __device__ __forceinline__ void embedding_forward(const embedding_call &c)
{
    constexpr int N = vector_size<E>;
    const int64_t vectors = c.width / N, index = (int64_t)blockIdx.x * LAYER_THREADS + threadIdx.x;
    if (index >= c.rows * vectors)
        return;
    const int64_t row = index / vectors, column = index % vectors;
    const uint4 *table = (const uint4 *)c.table;
    ((uint4 *)c.y)[index] = table[c.tokens[row] * vectors + column];
}

/* A block sums the rows of a piece, a thread one vector of columns. */
template <typename E> static __device__ __forceinline__ void embedding_backward(const embedding_backward_call &c)
{
    constexpr int N = vector_size<E>;
    const int64_t column = ((int64_t)blockIdx.y * EMBEDDING_THREADS + threadIdx.x) * N;
    if (blockIdx.x >= c.counts[0] || column >= c.width)
        return;
    const embedding_piece piece = c.pieces[blockIdx.x];
    float sum[N] = {0};
#pragma unroll 4
    for (int i = 0; i < piece.count; i++) {
        float dy[N];
        load_floats<E>(c.dy, c.order[piece.first + i] * c.width + column, dy);
#pragma unroll
        for (int j = 0; j < N; j++)
            sum[j] += dy[j];
    }
    if (piece.partial < 0) {
        add_floats<N>(c.dtable + piece.token * c.width + column, sum);
        return;
    }
#pragma unroll
    for (int j = 0; j < N; j += 4)
        *(float4 *)(c.partials + piece.partial * c.width + column + j) =
            make_float4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3]);
}

/* A block adds the partial sums of one token in their order, a thread 4 columns. */
extern "C" __global__ void __launch_bounds__(EMBEDDING_THREADS) embedding_add_partials(const embedding_backward_call c)
{
    const int64_t column = ((int64_t)blockIdx.y * EMBEDDING_THREADS + threadIdx.x) * 4;
    if (blockIdx.x >= c.counts[1] || column >= c.width)
        return;
    const embedding_sum s = c.sums[blockIdx.x];
    float sum[4] = {0};
#pragma unroll 4
    for (int i = 0; i < s.count; i++) {
        const float4 partial = *(const float4 *)(c.partials + (s.partial + i) * c.width + column);
        sum[0] += partial.x, sum[1] += partial.y, sum[2] += partial.z, sum[3] += partial.w;
    }
    add_floats<4>(c.dtable + s.token * c.width + column, sum);
}

DEFINE_KERNELS(embedding_forward, embedding_call, LAYER_THREADS)
DEFINE_KERNELS(embedding_backward, embedding_backward_call, EMBEDDING_THREADS)

/* ---- RMSNorm ------------------------------------------------------------------------------------------ */

/* A warp computes one row. */
template <typename E> static __device__ __forceinline__ void rmsnorm_forward(const rmsnorm_call &c)
{
    constexpr int N = vector_size<E>;
    const int lane = threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * NORM_WARPS + threadIdx.x / 32, begin = row * c.width;
    if (row >= c.rows)
        return;
    float squares = 0;
    for (int64_t i = lane * N; i < c.width; i += 32 * N) {
        float x[N];
        load_floats_cached<E>(c.x, begin + i, x);
        if (c.branch != nullptr) {
            float branch[N];
            load_floats<E>(c.branch, begin + i, branch);
#pragma unroll
            for (int j = 0; j < N; j++) { /* the norm of the rounded sum, which the next block reads */
                E rounded;
                cot_from_f32(&rounded, x[j] + branch[j]);
                x[j] = cot_to_f32(rounded);
            }
            store_floats<E>(c.sum, begin + i, x);
        }
#pragma unroll
        for (int j = 0; j < N; j++)
            squares += x[j] * x[j];
    }
    const float inv_rms = 1.0f / sqrtf(warp_sum(squares) / (float)c.width + c.eps);
    if (lane == 0)
        c.inv_rms[row] = inv_rms;
    const void *s = c.branch != nullptr ? c.sum : c.x; /* a lane loads what it has stored itself */
    for (int64_t i = lane * N; i < c.width; i += 32 * N) {
        float x[N], gain[N];
        load_floats_cached<E>(s, begin + i, x);
        load_floats_cached<E>(c.gain, i, gain);
#pragma unroll
        for (int j = 0; j < N; j++)
            x[j] *= inv_rms * gain[j];
        store_floats<E>(c.y, begin + i, x);
    }
}

/* A block computes rows_a_block rows, a warp one row at a time. Each warp sums its rows' dgain in shared memory, where
 * a lane always has the same columns. */
template <typename E> static __device__ __forceinline__ void rmsnorm_backward(const rmsnorm_backward_call &c)
{
    extern __shared__ float4 shared[];
    constexpr int N = vector_size<E>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float *sums = (float *)shared;
    float *dgain = sums + warp * c.width;
    for (int64_t i = lane * N; i < c.width; i += 32 * N)
#pragma unroll
        for (int j = 0; j < N; j += 4)
            *(float4 *)(dgain + i + j) = make_float4(0, 0, 0, 0);
    const int64_t first = (int64_t)blockIdx.x * c.rows_a_block,
                  end = first + c.rows_a_block < c.rows ? first + c.rows_a_block : c.rows;
    for (int64_t row = first + warp; row < end; row += warps) {
        const int64_t begin = row * c.width;
        const float inv_rms = c.inv_rms[row];
        float dot = 0;
        for (int64_t i = lane * N; i < c.width; i += 32 * N) {
            float x[N], dy[N], gain[N];
            load_floats_cached<E>(c.x, begin + i, x);
            load_floats_cached<E>(c.dy, begin + i, dy);
            load_floats_cached<E>(c.gain, i, gain);
#pragma unroll
            for (int j = 0; j < N; j++)
                dot += dy[j] * gain[j] * x[j];
        }
        const float along_x = warp_sum(dot) * inv_rms * inv_rms / (float)c.width;
        for (int64_t i = lane * N; i < c.width; i += 32 * N) {
            float x[N], dy[N], gain[N], dx[N] = {0};
            load_floats_cached<E>(c.x, begin + i, x);
            load_floats_cached<E>(c.dy, begin + i, dy);
            load_floats_cached<E>(c.gain, i, gain);
            if (c.accumulate)
                load_floats_cached<E>(c.dx, begin + i, dx);
#pragma unroll
            for (int j = 0; j < N; j++) {
                dx[j] += inv_rms * (dy[j] * gain[j] - x[j] * along_x);
                dy[j] *= x[j] * inv_rms;
            }
            store_floats<E>(c.dx, begin + i, dx);
            add_floats<N>(dgain + i, dy);
        }
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < c.width; i += blockDim.x) {
        float sum = sums[i];
        for (int other = 1; other < warps; other++)
            sum += sums[other * c.width + i];
        c.partials[blockIdx.x * c.width + i] = sum;
    }
}

/* dgain[c] += the sum of the blocks' partial sums. A block has 32 columns, a warp a contiguous eighth of the blocks. */
extern "C" __global__ void __launch_bounds__(LAYER_THREADS) rmsnorm_add_partials(const rmsnorm_backward_call c)
{
    constexpr int WARPS = LAYER_THREADS / 32;
    __shared__ float sums[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t column = (int64_t)blockIdx.x * 32 + lane;
    const int blocks = (int)((c.rows + c.rows_a_block - 1) / c.rows_a_block), share = (blocks + WARPS - 1) / WARPS;
    float sum = 0;
    if (column < c.width)
#pragma unroll 8
        for (int block = warp * share; block < min((warp + 1) * share, blocks); block++)
            sum += c.partials[block * c.width + column];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= c.width)
        return;
#pragma unroll
    for (int other = 1; other < WARPS; other++)
        sum += sums[other][lane];
    c.dgain[column] += sum;
}

DEFINE_KERNELS(rmsnorm_forward, rmsnorm_call, 32 * NORM_WARPS)
DEFINE_KERNELS(rmsnorm_backward, rmsnorm_backward_call, 32 * NORM_WARPS)

/* ---- RoPE --------------------------------------------------------------------------------------------- */

/* A thread rotates the points of two vectors: channels j .. j+N-1 of a head, and the same channels + size/2. */
template <typename E> static __device__ __forceinline__ void rope(const rope_call &c)
{
    constexpr int N = vector_size<E>;
    const int64_t half = c.size / 2, vectors = half / N, index = (int64_t)blockIdx.x * LAYER_THREADS + threadIdx.x;
    const int64_t row = index / (c.heads * vectors);
    if (row >= c.rows)
        return;
    const int64_t head = index / vectors % c.heads, j = index % vectors * N,
                  at = row * c.row_length + head * c.size + j;
    const float4 *rotation = (const float4 *)(c.rotations + 2 * (row % c.time * half + j));
    float a[N], b[N];
    load_floats_cached<E>(c.x, at, a);
    load_floats_cached<E>(c.x, at + half, b);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        const float4 two = rotation[i / 2];
        const float cosine[2] = {two.x, two.z}, sine[2] = {c.backward ? -two.y : two.y, c.backward ? -two.w : two.w};
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float x = a[i + k], y = b[i + k];
            a[i + k] = x * cosine[k] - y * sine[k];
            b[i + k] = x * sine[k] + y * cosine[k];
        }
    }
    store_floats<E>(c.x, at, a);
    store_floats<E>(c.x, at + half, b);
}

DEFINE_KERNELS(rope, rope_call, LAYER_THREADS)

/* ---- gate --------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* A thread computes one vector. */
template <typename E> static __device__ __forceinline__ void gate_forward(const gate_call &c)
{
    constexpr int N = vector_size<E>;
    const int64_t vectors = c.inner / N, index = (int64_t)blockIdx.x * LAYER_THREADS + threadIdx.x;
    const int64_t row = index / vectors, i = index % vectors * N;
    if (row >= c.rows)
        return;
    float a[N], b[N];
    load_floats<E>(c.a, row * c.a_stride + i, a);
    load_floats<E>(c.b, row * c.b_stride + i, b);
#pragma unroll
    for (int j = 0; j < N; j++)
        a[j] *= c.silu ? b[j] * sigmoid(a[j]) : b[j];
    store_floats<E>(c.y, row * c.inner + i, a);
}

template <typename E> static __device__ __forceinline__ void gate_backward(const gate_backward_call &c)
{
    constexpr int N = vector_size<E>;
    const int64_t vectors = c.inner / N, index = (int64_t)blockIdx.x * LAYER_THREADS + threadIdx.x;
    const int64_t row = index / vectors, i = index % vectors * N;
    if (row >= c.rows)
        return;
    float a[N], b[N], dy[N];
    load_floats_cached<E>(c.a, row * c.a_stride + i, a);
    load_floats_cached<E>(c.b, row * c.b_stride + i, b);
    load_floats_cached<E>(c.dy, row * c.inner + i, dy);
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float s = c.silu ? sigmoid(a[j]) : 1.0f, slope = c.silu ? s * (1.0f + a[j] * (1.0f - s)) : 1.0f;
        const float da = dy[j] * b[j] * slope;
        b[j] = dy[j] * a[j] * s;
        a[j] = da;
    }
    store_floats<E>(c.da, row * c.da_stride + i, a);
    store_floats<E>(c.db, row * c.db_stride + i, b);
}

DEFINE_KERNELS(gate_forward, gate_call, LAYER_THREADS)
DEFINE_KERNELS(gate_backward, gate_backward_call, LAYER_THREADS)

/* ---- sums --------------------------------------------------------------------------------------------- */

/* A thread adds one vector. */
template <typename E> static __device__ __forceinline__ void add(const add_call &c)
{
    constexpr int N = vector_size<E>;
    const int64_t i = ((int64_t)blockIdx.x * LAYER_THREADS + threadIdx.x) * N;
    if (i >= c.count)
        return;
    float x[N], y[N];
    load_floats<E>(c.x, i, x);
    load_floats_cached<E>(c.y, i, y);
#pragma unroll
    for (int j = 0; j < N; j++)
        y[j] += x[j];
    store_floats<E>(c.y, i, y);
}

/* A thread copies one vector to each stream. */
template <typename E> static __device__ __forceinline__ void spread(const streams_call &c)
{
    const int64_t vectors = c.width / vector_size<E>, index = (int64_t)blockIdx.x * LAYER_THREADS + threadIdx.x;
    const int64_t row = index / vectors, column = index % vectors;
    if (row >= c.rows)
        return;
    const uint4 x = ((const uint4 *)c.x)[index];
    for (int64_t i = 0; i < c.count; i++)
        ((uint4 *)c.streams)[(row * c.count + i) * vectors + column] = x;
}

/* A thread sums one vector of all streams. */
template <typename E> static __device__ __forceinline__ void collect(const streams_call &c)
{
    constexpr int N = vector_size<E>;
    const int64_t vectors = c.width / N, index = (int64_t)blockIdx.x * LAYER_THREADS + threadIdx.x;
    const int64_t row = index / vectors, column = index % vectors * N;
    if (row >= c.rows)
        return;
    float sum[N] = {0};
    for (int64_t i = 0; i < c.count; i++) {
        float x[N];
        load_floats<E>(c.streams, (row * c.count + i) * c.width + column, x);
#pragma unroll
        for (int j = 0; j < N; j++)
            sum[j] += x[j];
    }
    store_floats<E>(c.x, row * c.width + column, sum);
}

DEFINE_KERNELS(add, add_call, LAYER_THREADS)
DEFINE_KERNELS(spread, streams_call, LAYER_THREADS)
DEFINE_KERNELS(collect, streams_call, LAYER_THREADS)
