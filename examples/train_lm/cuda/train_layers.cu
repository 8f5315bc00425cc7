/* SPDX-License-Identifier: Apache-2.0
 *
 * train_layers.cu: embedding, norms, RoPE, gate and GELU. device_layers.h has the formulas. All kernels are bound by memory
 * bandwidth. Each reads its inputs from memory once: a second pass over a row finds the row in the L1 cache. */
#include "device_layers.h"
#include "device_vector.cuh"

/* ---- embedding ---------------------------------------------------------------------------------------- */

/* A thread copies one vector, or adds the position's vector to it. */
template <typename E> static __device__ __forceinline__ void embedding_forward(const embedding_call &c)
{
    constexpr int N = vector_size<E>;
    const int64_t vectors = c.width / N, index = (int64_t)blockIdx.x * LAYER_THREADS + threadIdx.x;
    if (index >= c.rows * vectors)
        return;
    const int64_t row = index / vectors, column = index % vectors;
    if (c.table_of_positions == nullptr) {
        ((uint4 *)c.y)[index] = ((const uint4 *)c.table)[c.tokens[row] * vectors + column];
        return;
    }
    float y[N], position[N];
    load_floats_cached<E>(c.table, c.tokens[row] * c.width + column * N, y);
    load_floats_cached<E>(c.table_of_positions, POSITION_OF(c.positions, row % c.time) * c.width + column * N,
                          position);
#pragma unroll
    for (int j = 0; j < N; j++)
        y[j] += position[j];
    store_floats<E>(c.y, index * N, y);
}

/* A block sums the rows of one position in order, a thread one vector of columns. */
template <typename E> static __device__ __forceinline__ void positions_backward(const positions_backward_call &c)
{
    constexpr int N = vector_size<E>;
    const int64_t column = ((int64_t)blockIdx.y * EMBEDDING_THREADS + threadIdx.x) * N;
    if (column >= c.width)
        return;
    float sum[N] = {0};
#pragma unroll 4
    for (int64_t row = blockIdx.x; row < c.rows; row += c.time) {
        float dy[N];
        load_floats<E>(c.dy, row * c.width + column, dy);
#pragma unroll
        for (int j = 0; j < N; j++)
            sum[j] += dy[j];
    }
    add_floats<N>(c.dtable + POSITION_OF(c.positions, (int64_t)blockIdx.x) * c.width + column, sum);
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
DEFINE_KERNELS(positions_backward, positions_backward_call, EMBEDDING_THREADS)

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

/* A warp sets its sums to 0. */
template <typename E> static __device__ __forceinline__ void clear_sums(float *sums, int64_t width)
{
    for (int64_t i = threadIdx.x % 32 * vector_size<E>; i < width; i += 32 * vector_size<E>)
#pragma unroll
        for (int j = 0; j < vector_size<E>; j += 4)
            *(float4 *)(sums + i + j) = make_float4(0, 0, 0, 0);
}

/* The sums of all warps are added in the order of the warps, and are the block's row of `partials`. */
static __device__ __forceinline__ void store_block_sums(const float *sums, int64_t width, float *partials)
{
    const int warps = blockDim.x / 32;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = sums[i];
        for (int other = 1; other < warps; other++)
            sum += sums[other * width + i];
        partials[blockIdx.x * width + i] = sum;
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
    clear_sums<E>(dgain, c.width);
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
    store_block_sums(sums, c.width, c.partials);
}

/* A block has 32 columns, a warp a contiguous eighth of the partial sums. */
extern "C" __global__ void __launch_bounds__(LAYER_THREADS) add_partials(const add_partials_call c)
{
    constexpr int WARPS = LAYER_THREADS / 32;
    __shared__ float sums[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t column = (int64_t)blockIdx.x * 32 + lane;
    const int share = (c.blocks + WARPS - 1) / WARPS;
    float sum = 0;
    if (column < c.width)
#pragma unroll 8
        for (int block = warp * share; block < min((warp + 1) * share, c.blocks); block++)
            sum += c.partials[block * c.stride + column];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= c.width)
        return;
#pragma unroll
    for (int other = 1; other < WARPS; other++)
        sum += sums[other][lane];
    c.sums[column] += sum;
}

/* A block has 32 vectors of columns and rows_a_block rows, a warp every eighth of these rows. */
template <typename E> static __device__ __forceinline__ void column_sums(const column_sums_call &c)
{
    constexpr int N = vector_size<E>, WARPS = LAYER_THREADS / 32;
    __shared__ float sums[WARPS][32 * N];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first_column = (int64_t)blockIdx.y * 32 * N, column = first_column + lane * N;
    const int64_t first = (int64_t)blockIdx.x * c.rows_a_block,
                  end = first + c.rows_a_block < c.rows ? first + c.rows_a_block : c.rows;
    float sum[N] = {0};
    if (column < c.width)
#pragma unroll 4
        for (int64_t row = first + warp; row < end; row += WARPS) {
            float x[N];
            load_floats<E>(c.x, row * c.width + column, x);
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[j] += x[j];
        }
#pragma unroll
    for (int j = 0; j < N; j++)
        sums[warp][lane * N + j] = sum[j];
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * N && first_column + i < c.width; i += LAYER_THREADS) {
        float total = sums[0][i];
#pragma unroll
        for (int other = 1; other < WARPS; other++)
            total += sums[other][i];
        c.partials[blockIdx.x * c.width + first_column + i] = total;
    }
}

DEFINE_KERNELS(column_sums, column_sums_call, LAYER_THREADS)

DEFINE_KERNELS(rmsnorm_forward, rmsnorm_call, 32 * NORM_WARPS)
DEFINE_KERNELS(rmsnorm_backward, rmsnorm_backward_call, 32 * NORM_WARPS)

/* ---- LayerNorm ---------------------------------------------------------------------------------------- */

/* A warp computes one row. The passes after the first find the row in the L1 cache. */
template <typename E> static __device__ __forceinline__ void layernorm_forward(const layernorm_call &c)
{
    constexpr int N = vector_size<E>;
    const int lane = threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * NORM_WARPS + threadIdx.x / 32, begin = row * c.width;
    if (row >= c.rows)
        return;
    float sum = 0, squares = 0;
    for (int64_t i = lane * N; i < c.width; i += 32 * N) {
        float x[N];
        load_floats_cached<E>(c.x, begin + i, x);
#pragma unroll
        for (int j = 0; j < N; j++)
            sum += x[j];
    }
    const float mean = warp_sum(sum) / (float)c.width;
    for (int64_t i = lane * N; i < c.width; i += 32 * N) {
        float x[N];
        load_floats_cached<E>(c.x, begin + i, x);
#pragma unroll
        for (int j = 0; j < N; j++)
            squares += (x[j] - mean) * (x[j] - mean);
    }
    const float inv_deviation = 1.0f / sqrtf(warp_sum(squares) / (float)c.width + c.eps);
    if (lane == 0) {
        c.mean[row] = mean;
        c.inv_deviation[row] = inv_deviation;
    }
    for (int64_t i = lane * N; i < c.width; i += 32 * N) {
        float x[N], gain[N], bias[N];
        load_floats_cached<E>(c.x, begin + i, x);
        load_floats_cached<E>(c.gain, i, gain);
        load_floats_cached<E>(c.bias, i, bias);
#pragma unroll
        for (int j = 0; j < N; j++)
            x[j] = (x[j] - mean) * inv_deviation * gain[j] + bias[j];
        store_floats<E>(c.y, begin + i, x);
    }
}

/* As rmsnorm_backward, with two rows of sums per warp: dgain, then dbias. */
template <typename E> static __device__ __forceinline__ void layernorm_backward(const layernorm_backward_call &c)
{
    extern __shared__ float4 shared[];
    constexpr int N = vector_size<E>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float *sums = (float *)shared;
    float *dgain = sums + 2 * warp * c.width, *dbias = dgain + c.width;
    clear_sums<E>(dgain, 2 * c.width);
    const int64_t first = (int64_t)blockIdx.x * c.rows_a_block,
                  end = first + c.rows_a_block < c.rows ? first + c.rows_a_block : c.rows;
    for (int64_t row = first + warp; row < end; row += warps) {
        const int64_t begin = row * c.width;
        const float mean = c.mean[row], inv_deviation = c.inv_deviation[row];
        float sum = 0, dot = 0;
        for (int64_t i = lane * N; i < c.width; i += 32 * N) {
            float x[N], dy[N], gain[N];
            load_floats_cached<E>(c.x, begin + i, x);
            load_floats_cached<E>(c.dy, begin + i, dy);
            load_floats_cached<E>(c.gain, i, gain);
#pragma unroll
            for (int j = 0; j < N; j++) {
                sum += dy[j] * gain[j];
                dot += dy[j] * gain[j] * (x[j] - mean);
            }
        }
        const float along_one = warp_sum(sum) / (float)c.width,
                    along_n = warp_sum(dot) * inv_deviation / (float)c.width;
        for (int64_t i = lane * N; i < c.width; i += 32 * N) {
            float x[N], dy[N], gain[N], dx[N] = {0};
            load_floats_cached<E>(c.x, begin + i, x);
            load_floats_cached<E>(c.dy, begin + i, dy);
            load_floats_cached<E>(c.gain, i, gain);
            if (c.accumulate)
                load_floats_cached<E>(c.dx, begin + i, dx);
            add_floats<N>(dbias + i, dy);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float n = (x[j] - mean) * inv_deviation;
                dx[j] += inv_deviation * (dy[j] * gain[j] - along_one - n * along_n);
                dy[j] *= n;
            }
            store_floats<E>(c.dx, begin + i, dx);
            add_floats<N>(dgain + i, dy);
        }
    }
    store_block_sums(sums, 2 * c.width, c.partials);
}

DEFINE_KERNELS(layernorm_forward, layernorm_call, 32 * NORM_WARPS)
DEFINE_KERNELS(layernorm_backward, layernorm_backward_call, 32 * NORM_WARPS)

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
    const float4 *rotation = (const float4 *)(c.rotations + 2 * (POSITION_OF(c.positions, row % c.time) * half + j));
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

/* ---- GELU --------------------------------------------------------------------------------------------- */

static constexpr float GELU_SLOPE = 1.5957691216057308f /* 2 sqrt(2/pi) */, GELU_CUBIC = 0.044715f;

/* In 16 bits the fast functions, whose relative error is below 2^-19 here. */
template <typename E> static __device__ __forceinline__ float sigmoid_for(float x)
{
    return sizeof(E) == 2 ? __fdividef(1.0f, 1.0f + __expf(-x)) : sigmoid(x);
}

/* A thread computes one vector. */
template <typename E> static __device__ __forceinline__ void gelu_forward(const gelu_call &c)
{
    constexpr int N = vector_size<E>;
    const int64_t i = ((int64_t)blockIdx.x * LAYER_THREADS + threadIdx.x) * N;
    if (i >= c.count)
        return;
    float x[N];
    load_floats<E>(c.x, i, x);
#pragma unroll
    for (int j = 0; j < N; j++)
        x[j] *= sigmoid_for<E>(GELU_SLOPE * (x[j] + GELU_CUBIC * x[j] * x[j] * x[j]));
    store_floats<E>(c.y, i, x);
}

template <typename E> static __device__ __forceinline__ void gelu_backward(const gelu_call &c)
{
    constexpr int N = vector_size<E>;
    const int64_t i = ((int64_t)blockIdx.x * LAYER_THREADS + threadIdx.x) * N;
    if (i >= c.count)
        return;
    float x[N], dy[N];
    load_floats_cached<E>(c.x, i, x);
    load_floats_cached<E>(c.dy, i, dy);
#pragma unroll
    for (int j = 0; j < N; j++) {
        /* Beyond 16, s is 0 or 1, and the limit keeps x^2 finite. The factor x[j] passes a NaN on. */
        const float z = fminf(fmaxf(x[j], -16.0f), 16.0f);
        const float s = sigmoid_for<E>(GELU_SLOPE * (z + GELU_CUBIC * z * z * z));
        const float slope = GELU_SLOPE * (1.0f + 3.0f * GELU_CUBIC * z * z);
        dy[j] *= s + x[j] * s * (1.0f - s) * slope;
    }
    store_floats<E>(c.y, i, dy);
}

DEFINE_KERNELS(gelu_forward, gelu_call, LAYER_THREADS)
DEFINE_KERNELS(gelu_backward, gelu_call, LAYER_THREADS)

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
