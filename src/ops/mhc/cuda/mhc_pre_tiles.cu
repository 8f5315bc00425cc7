/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_tiles.cu: pre's products for x of f32, any strides and n up to 8, on the CUDA cores.
 *
 * A block handles many tokens for each element of phi that it loads. It processes the rows of phi in groups of ROWS and
 * reads x again for each group, then from the L2 cache. mhc_pre_tokens.cu does the work that needs all columns of a
 * token.
 *   project  sums of h_mix and of squares over a slice of MHC_CUDA_SLICE columns of a stream
 *   dx       dx of tiles of tokens and columns of a stream
 *   dphi     Q of some columns of a stream over a part of the tokens */
#include "mhc_cuda.cuh"

enum { THREADS = MHC_CUDA_THREADS, WARPS = THREADS / 32, TOKENS = MHC_CUDA_TILE_TOKENS };

/* Loads V elements of a row from column d on: zero from column D on. */
template <typename E, int V>
static __device__ __forceinline__ void load_row(const mhc_call &c, const mhc_array &a, int64_t offset, int64_t stride,
                                                int d, float (&values)[V])
{
    const E *source = (const E *)a.data + offset;
    if (c.vectorized && d + V <= c.D) {
        constexpr int VECTOR = V * sizeof(E) > 16 ? 16 / (int)sizeof(E) : V;
#pragma unroll
        for (int p = 0; p < V; p += VECTOR) {
            float vector[VECTOR];
            cot_unpack(cot_load_vector<E, VECTOR>(source + d + p), vector);
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                values[p + i] = vector[i];
        }
    } else {
#pragma unroll
        for (int v = 0; v < V; v++)
            values[v] = d + v < c.D ? cot_to_f32(source[(int64_t)(d + v) * stride]) : 0.0f;
    }
}

template <typename E, int V>
static __device__ __forceinline__ void store_row(const mhc_call &c, const mhc_array &a, int64_t offset, int64_t stride,
                                                 int d, const float (&values)[V])
{
    E *to = (E *)a.data + offset;
    if (c.vectorized && d + V <= c.D) {
        cot_store_vector<E, V>(to + d, values);
    } else {
#pragma unroll
        for (int v = 0; v < V; v++)
            if (d + v < c.D)
                cot_from_f32(to + (int64_t)(d + v) * stride, values[v]);
    }
}

static __device__ __forceinline__ float load_phi(const mhc_call &c, int j, int i, int d)
{
    return load_f32(c.phi, j * c.phi.stride[0] + (i * c.D + d) * c.phi.stride[1]);
}

static __device__ __forceinline__ float load_gamma(const mhc_call &c, int i, int d)
{
    return present(c.gamma) ? load_f32(c.gamma, i * c.gamma.stride[0] + d * c.gamma.stride[1]) : 1.0f;
}

/* ---- project ------------------------------------------------------------------------------------------ */

enum { CHUNK = 32, WARP_COLUMNS = CHUNK / WARPS, LANE_TOKENS = TOKENS / 8, LOAD_COLUMNS = TOKENS * CHUNK / THREADS };
static_assert(LOAD_COLUMNS == CHUNK / 4, "a thread loads 1/4 of a token's columns");

/* A chunk of columns in shared memory. A thread loads a quarter of a token's columns and some elements of phi. */
template <int ROWS> struct chunk {
    float x[TOKENS][CHUNK + 4], phi[ROWS][CHUNK + 4];
};

template <int ROWS> struct prefetched {
    float x[LOAD_COLUMNS], phi[ROWS * CHUNK / THREADS];
};

template <typename E, int ROWS>
static __device__ __forceinline__ void prefetch_chunk(const mhc_call &c, int64_t offset, bool valid, int first, int i,
                                                      int d, prefetched<ROWS> &values)
{
    const int M = c.n * c.n + 2 * c.n;
#pragma unroll
    for (int v = 0; v < LOAD_COLUMNS; v++)
        values.x[v] = 0.0f;
    if (valid)
        load_row<E, LOAD_COLUMNS>(c, c.x, offset, c.x.stride[3], d + (int)threadIdx.x % 4 * LOAD_COLUMNS, values.x);
    const int column = d + (int)threadIdx.x % CHUNK;
    const int j = first + (int)threadIdx.x / CHUNK;
    const float gamma = column < c.D ? load_gamma(c, i, column) : 0.0f;
    const float *phi = (const float *)c.phi.data + j * c.phi.stride[0] + (i * c.D + column) * c.phi.stride[1];
#pragma unroll
    for (int r = 0; r < ROWS * CHUNK / THREADS; r++, phi += THREADS / CHUNK * c.phi.stride[0])
        values.phi[r] = j + r * (THREADS / CHUNK) < M && column < c.D ? *phi * gamma : 0.0f;
}

template <int ROWS> static __device__ __forceinline__ void store_chunk(const prefetched<ROWS> &values, chunk<ROWS> &to)
{
    float *x = to.x[threadIdx.x / 4] + threadIdx.x % 4 * LOAD_COLUMNS;
#pragma unroll
    for (int v = 0; v < LOAD_COLUMNS; v += 4)
        *(float4 *)(x + v) = make_float4(values.x[v], values.x[v + 1], values.x[v + 2], values.x[v + 3]);
#pragma unroll
    for (int r = 0; r < ROWS * CHUNK / THREADS; r++)
        to.phi[(threadIdx.x + r * THREADS) / CHUNK][threadIdx.x % CHUNK] = values.phi[r];
}

/* A warp handles one eighth of each chunk's columns. A lane handles eight tokens and a quarter of the rows. */
template <typename E, int ROWS> static __device__ __forceinline__ void project(const mhc_call &c)
{
    constexpr int LANE_ROWS = ROWS / 4;
    __shared__ union {
        chunk<ROWS> chunks[2];
        float sums[WARPS / 2][ROWS][TOKENS + 1];
    } s;
    const int M = c.n * c.n + 2 * c.n, S = MHC_CUDA_SUMS(c.n), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first_token = (int64_t)blockIdx.x * TOKENS, load_token = first_token + threadIdx.x / 4;
    const int slices = (int)(c.slices / c.n), i = blockIdx.y / slices;
    const int begin = blockIdx.y % slices * MHC_CUDA_SLICE;
    const int end = begin + MHC_CUDA_SLICE < c.D ? begin + MHC_CUDA_SLICE : (int)c.D;
    const bool valid = load_token < c.tokens;
    const int64_t offset = valid ? token_offset(c, c.x, load_token) + i * c.x.stride[2] : 0;
    for (int first = 0; first < M; first += ROWS) {
        float sums[LANE_TOKENS][LANE_ROWS] = {0}, squares = 0.0f;
        prefetched<ROWS> next;
        prefetch_chunk<E>(c, offset, valid, first, i, begin, next);
        int buffer = 0;
        for (int d = begin; d < end; d += CHUNK, buffer ^= 1) {
            chunk<ROWS> &current = s.chunks[buffer];
            float run = 0.0f;
#pragma unroll
            for (int v = 0; v < LOAD_COLUMNS; v++)
                run = fmaf(next.x[v], next.x[v], run);
            squares += run;
            store_chunk(next, current);
            __syncthreads(); /* the readers of this buffer two chunks ago finished before the previous barrier */
            if (d + CHUNK < end)
                prefetch_chunk<E>(c, offset, valid, first, i, d + CHUNK, next);
#pragma unroll
            for (int k = warp * WARP_COLUMNS; k < (warp + 1) * WARP_COLUMNS; k += 2) {
                float2 x[LANE_TOKENS];
#pragma unroll
                for (int t = 0; t < LANE_TOKENS; t++)
                    x[t] = *(const float2 *)&current.x[t * 8 + lane % 8][k];
#pragma unroll
                for (int r = 0; r < LANE_ROWS; r++) {
                    const float2 phi = *(const float2 *)&current.phi[lane / 8 * LANE_ROWS + r][k];
#pragma unroll
                    for (int t = 0; t < LANE_TOKENS; t++)
                        sums[t][r] = fmaf(x[t].y, phi.y, fmaf(x[t].x, phi.x, sums[t][r]));
                }
            }
        }
        /* The upper half of the warps adds its sums to those of the lower half. Then the partial sums are added in warp
         * order. */
#pragma unroll
        for (int half = 1; half >= 0; half--) {
            __syncthreads();
            if (warp / (WARPS / 2) == half)
#pragma unroll
                for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
                    for (int t = 0; t < LANE_TOKENS; t++) {
                        float *to = &s.sums[warp % (WARPS / 2)][lane / 8 * LANE_ROWS + r][t * 8 + lane % 8];
                        *to = half == 1 ? sums[t][r] : sums[t][r] + *to;
                    }
        }
        __syncthreads();
        for (int index = threadIdx.x; index < ROWS * TOKENS; index += THREADS) {
            const int r = index % ROWS, t = index / ROWS;
            float sum = s.sums[0][r][t];
#pragma unroll
            for (int w = 1; w < WARPS / 2; w++)
                sum += s.sums[w][r][t];
            if (first + r < M && first_token + t < c.tokens)
                c.sums[((first_token + t) * c.slices + blockIdx.y) * S + first + r] = sum;
        }
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        squares += __shfl_xor_sync(0xffffffffu, squares, 2);
        if (first == 0 && valid && threadIdx.x % 4 == 0)
            c.sums[(load_token * c.slices + blockIdx.y) * S + M] = squares;
        __syncthreads();
    }
}

/* ---- dx ----------------------------------------------------------------------------------------------- */

enum { DX_COLUMNS = MHC_CUDA_DX_COLUMNS, DX_TOKENS = TOKENS / WARPS };
static_assert(DX_COLUMNS == 4 * 32, "four elements per lane");

/* A warp handles eight tokens, a lane four columns. */
template <typename E, int ROWS> static __device__ __forceinline__ void dx(const mhc_call &c)
{
    __shared__ float phi[ROWS][DX_COLUMNS], dh_mix[ROWS][TOKENS];
    const int M = c.n * c.n + 2 * c.n, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first_token = (int64_t)blockIdx.x * TOKENS;
    const int tiles = (int)((c.D + DX_COLUMNS - 1) / DX_COLUMNS), i = blockIdx.y / tiles;
    const int first_column = blockIdx.y % tiles * DX_COLUMNS, d = first_column + lane * 4;
    float sums[DX_TOKENS][4] = {0};
    for (int first = 0; first < M; first += ROWS) {
        __syncthreads();
        for (int index = threadIdx.x; index < ROWS * DX_COLUMNS; index += THREADS) {
            const int j = first + index / DX_COLUMNS;
            const int column = first_column + index % DX_COLUMNS;
            phi[index / DX_COLUMNS][index % DX_COLUMNS] = j < M && column < c.D ? load_phi(c, j, i, column) : 0.0f;
        }
        for (int index = threadIdx.x; index < ROWS * TOKENS; index += THREADS) {
            const int r = index % ROWS, t = index / ROWS;
            dh_mix[r][t] =
                first + r < M && first_token + t < c.tokens ? c.dh_mix[(first_token + t) * M + first + r] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int octet = 0; octet < ROWS; octet += 8) {
            float part[DX_TOKENS][4] = {0};
#pragma unroll
            for (int r = 0; r < 8; r++) {
                const float4 p = *(const float4 *)&phi[octet + r][lane * 4];
                float mix[DX_TOKENS];
#pragma unroll
                for (int t = 0; t < DX_TOKENS; t += 4) {
                    const float4 mix4 = *(const float4 *)&dh_mix[octet + r][warp * DX_TOKENS + t];
                    mix[t] = mix4.x, mix[t + 1] = mix4.y, mix[t + 2] = mix4.z, mix[t + 3] = mix4.w;
                }
#pragma unroll
                for (int t = 0; t < DX_TOKENS; t++) {
                    part[t][0] = fmaf(mix[t], p.x, part[t][0]);
                    part[t][1] = fmaf(mix[t], p.y, part[t][1]);
                    part[t][2] = fmaf(mix[t], p.z, part[t][2]);
                    part[t][3] = fmaf(mix[t], p.w, part[t][3]);
                }
            }
#pragma unroll
            for (int t = 0; t < DX_TOKENS; t++)
#pragma unroll
                for (int v = 0; v < 4; v++)
                    sums[t][v] += part[t][v];
        }
    }
    float gamma[4];
#pragma unroll
    for (int v = 0; v < 4; v++)
        gamma[v] = d + v < c.D ? load_gamma(c, i, d + v) : 0.0f;
        /* Four tokens at a time: all their inputs are loaded before any is used. */
#pragma unroll
    for (int group = 0; group < DX_TOKENS; group += 4) {
        float x[4][4], dh_in[4][4], post[4][4], factor[4], h_pre[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const int64_t token = first_token + warp * DX_TOKENS + group + t;
            if (token < c.tokens) {
                factor[t] = c.factor[token];
                h_pre[t] = load_f32(c.h_pre, token_offset(c, c.h_pre, token) + i * c.h_pre.stride[2]);
                load_row<E, 4>(c, c.x, token_offset(c, c.x, token) + i * c.x.stride[2], c.x.stride[3], d, x[t]);
                load_row<E, 4>(c, c.dh_in, token_offset(c, c.dh_in, token), c.dh_in.stride[2], d, dh_in[t]);
                if (present(c.dx_post))
                    load_row<E, 4>(c, c.dx_post, token_offset(c, c.dx_post, token) + i * c.dx_post.stride[2],
                                   c.dx_post.stride[3], d, post[t]);
            }
        }
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const int64_t token = first_token + warp * DX_TOKENS + group + t;
            if (token < c.tokens) {
                float out[4];
#pragma unroll
                for (int v = 0; v < 4; v++) {
                    out[v] = fmaf(h_pre[t], dh_in[t][v], fmaf(factor[t], x[t][v], gamma[v] * sums[group + t][v]));
                    if (present(c.dx_post))
                        out[v] += post[t][v];
                }
                store_row<E, 4>(c, c.dx, token_offset(c, c.dx, token) + i * c.dx.stride[2], c.dx.stride[3], d, out);
            }
        }
    }
}

/* ---- dphi --------------------------------------------------------------------------------------------- */

enum { Q_COLUMNS = MHC_CUDA_Q_COLUMNS, Q_TOKENS = WARPS * MHC_CUDA_RUN };
static_assert(Q_COLUMNS == 2 * 32, "two elements per lane");

/* Loads the warp's run of x: two columns of each token; zero for tokens from `end` on. */
template <typename E>
static __device__ __forceinline__ void load_run(const mhc_call &c, int64_t first, int64_t end, int i, int d,
                                                float (&x)[MHC_CUDA_RUN][2])
{
    const uint32_t T = (uint32_t)c.T;
    uint32_t t_in_b = (uint32_t)first % T;
    int64_t offset = token_offset(c, c.x, first) + i * c.x.stride[2];
#pragma unroll
    for (int t = 0; t < MHC_CUDA_RUN; t++) {
        x[t][0] = x[t][1] = 0.0f;
        if (first + t < end)
            load_row<E, 2>(c, c.x, offset, c.x.stride[3], d, x[t]);
        offset += c.x.stride[1];
        if (++t_in_b == T) {
            t_in_b = 0;
            offset += c.x.stride[0] - T * c.x.stride[1];
        }
    }
}

/* A warp handles every eighth run of tokens, a lane two columns. The next run is loaded while the current one is
 * summed. */
template <typename E, int ROWS> static __device__ __forceinline__ void dphi(const mhc_call &c)
{
    __shared__ union {
        float dh_mix[Q_TOKENS][ROWS];
        float sums[WARPS / 2][ROWS][Q_COLUMNS];
    } s;
    const int M = c.n * c.n + 2 * c.n, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = (int)((c.D + Q_COLUMNS - 1) / Q_COLUMNS), i = blockIdx.x / tiles;
    const int first_column = blockIdx.x % tiles * Q_COLUMNS, d = first_column + lane * 2;
    const int64_t part = blockIdx.y, begin = part * c.part_length, K = c.n * c.D;
    const int64_t end = begin + c.part_length < c.tokens ? begin + c.part_length : c.tokens;
    for (int first = 0; first < M; first += ROWS) {
        float Q[ROWS][2] = {0}, next[MHC_CUDA_RUN][2];
        load_run<E>(c, begin + warp * MHC_CUDA_RUN, end, i, d, next);
        for (int64_t token = begin; token < end; token += Q_TOKENS) {
            __syncthreads();
            for (int index = threadIdx.x; index < ROWS * Q_TOKENS; index += THREADS) {
                const int r = index % ROWS, t = index / ROWS;
                s.dh_mix[t][r] = first + r < M && token + t < end ? c.dh_mix[(token + t) * M + first + r] : 0.0f;
            }
            __syncthreads();
            float run[ROWS][2] = {0}, x[MHC_CUDA_RUN][2];
#pragma unroll
            for (int t = 0; t < MHC_CUDA_RUN; t++)
                x[t][0] = next[t][0], x[t][1] = next[t][1];
            load_run<E>(c, token + Q_TOKENS + warp * MHC_CUDA_RUN, end, i, d, next);
#pragma unroll
            for (int t = 0; t < MHC_CUDA_RUN; t++)
#pragma unroll
                for (int r = 0; r < ROWS; r += 4) {
                    const float4 mix = *(const float4 *)&s.dh_mix[warp * MHC_CUDA_RUN + t][r];
                    const float mix4[4] = {mix.x, mix.y, mix.z, mix.w};
#pragma unroll
                    for (int q = 0; q < 4; q++) {
                        run[r + q][0] = fmaf(mix4[q], x[t][0], run[r + q][0]);
                        run[r + q][1] = fmaf(mix4[q], x[t][1], run[r + q][1]);
                    }
                }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                Q[r][0] += run[r][0];
                Q[r][1] += run[r][1];
            }
        }
#pragma unroll
        for (int half = 1; half >= 0; half--) {
            __syncthreads();
            if (warp / (WARPS / 2) == half)
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    float2 *to = (float2 *)&s.sums[warp % (WARPS / 2)][r][lane * 2];
                    *to = half == 1 ? make_float2(Q[r][0], Q[r][1]) : make_float2(Q[r][0] + to->x, Q[r][1] + to->y);
                }
        }
        __syncthreads();
        for (int index = threadIdx.x; index < ROWS * Q_COLUMNS; index += THREADS) {
            const int r = index / Q_COLUMNS, column = index % Q_COLUMNS;
            float sum = s.sums[0][r][column];
#pragma unroll
            for (int w = 1; w < WARPS / 2; w++)
                sum += s.sums[w][r][column];
            if (first + r < M && first_column + column < c.D)
                c.partial[(part * M + first + r) * K + i * c.D + first_column + column] = sum;
        }
        __syncthreads();
    }
}

/* ---- instances ---------------------------------------------------------------------------------------- */

/* Rows at a time: the kernels named `few` are for n up to 2. blocks: minimum on a multiprocessor. */
#define INSTANCE(name, suffix, element, rows, blocks)                       \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks)           \
        mhc_pre_tiles_##name##_##suffix(const __grid_constant__ mhc_call c) \
    {                                                                       \
        name<element, rows>(c);                                             \
    }
#define INSTANCES(name, blocks)            \
    INSTANCE(name, f32, float, 24, blocks) \
    INSTANCE(name, few_f32, float, 8, blocks)

INSTANCES(project, 2)
INSTANCES(dx, 2)
INSTANCES(dphi, 1)
