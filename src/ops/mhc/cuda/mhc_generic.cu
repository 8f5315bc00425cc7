/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_generic.cu: pre and post for any strides, any dtype of x and n up to 8. Sinkhorn is in mhc_sinkhorn.cu.
 *
 * Sums are float32. A thread sums at most MAX_TERMS terms in one run. A warp adds its runs in order, then the warps'
 * sums are added.
 *   pre forward    a block handles MHC_CUDA_TOKENS tokens and ROWS rows of phi at a time, a thread columns of them
 *   pre backward   dz and dx likewise; then dphi_part, one column a thread, for each part of the tokens; then sums of
 *                  dz over parts of the tokens; then the sums over the parts
 *   post forward   a thread handles one element d of a token
 *   post backward  a block handles one token */
#include "mhc_cuda.cuh"

#include "../../../cuda/device/ptx.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(MHC_CUDA_THREADS)

enum {
    THREADS = MHC_CUDA_THREADS,
    WARPS = THREADS / 32,
    TOKENS = MHC_CUDA_TOKENS,
    ROWS = 8,
    SUMS = 64,
    MAX_TERMS = 32
};
static_assert(TOKENS * ROWS == SUMS && MHC_CUDA_MAX_N == ROWS, "all block sums must have the same size");

/* ---- sums over a block -------------------------------------------------------------------------------- */

/* State of SUMS block sums. Each thread has terms v[SUMS]; runs are added to the totals of the warp. */
struct block_sums {
    float warp[WARPS][SUMS];
};

static __device__ __forceinline__ void begin_sums(block_sums &s, float (&v)[SUMS])
{
    for (int i = threadIdx.x % 32; i < SUMS; i += 32)
        s.warp[threadIdx.x / 32][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < SUMS; i++)
        v[i] = 0.0f;
    __syncwarp();
}

/* Ends a run: adds the lanes' sums to the warp's totals. */
static __device__ __forceinline__ void add_run(block_sums &s, float (&v)[SUMS])
{
    sum_over_lanes(v);
    float *total = s.warp[threadIdx.x / 32] + threadIdx.x % 32 * (SUMS / 32);
#pragma unroll
    for (int i = 0; i < SUMS / 32; i++)
        total[i] += v[i];
#pragma unroll
    for (int i = 0; i < SUMS; i++)
        v[i] = 0.0f;
}

/* Ends the last run. Returns block sum number threadIdx.x to the first SUMS threads. */
static __device__ __forceinline__ float end_sums(block_sums &s, float (&v)[SUMS])
{
    add_run(s, v);
    __syncthreads();
    float sum = 0.0f;
    if (threadIdx.x < SUMS)
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++)
            sum += s.warp[warp][threadIdx.x];
    __syncthreads();
    return sum;
}

/* Offsets of a block's tokens in a tensor. Tokens beyond the last one use the last token's offset. */
struct token_offsets {
    int64_t offset[TOKENS];
};

static __device__ __forceinline__ token_offsets offsets_of(const mhc_call &c, const mhc_array &a, int64_t first)
{
    token_offsets o;
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
        o.offset[t] = token_offset(c, a, first + t < c.tokens ? first + t : c.tokens - 1);
    return o;
}

/* ---- pre, forward ------------------------------------------------------------------------------------- */

/* A thread's inputs of one column. They are loaded one step ahead, so that the block does not wait for memory in each
 * step. */
template <int ROWS_> struct column_step {
    float x[TOKENS], weight[ROWS_];
};

template <typename E, bool SQUARES>
static __device__ __forceinline__ void load_step(const mhc_call &c, const token_offsets &x_offsets, int M, int j, int i,
                                                 int64_t d, column_step<SQUARES ? 1 : ROWS> &step)
{
    const bool inside = i < c.n && d < c.D;
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
        step.x[t] = inside ? load_e<E>(c.x, x_offsets.offset[t] + i * c.x.stride[2] + d * c.x.stride[3]) : 0.0f;
    if (SQUARES)
        return;
    const float gamma =
        present(c.gamma) && inside ? load_f32(c.gamma, i * c.gamma.stride[0] + d * c.gamma.stride[1]) : 1.0f;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        step.weight[r] = inside && j + r < M
                             ? load_f32(c.phi, (j + r) * c.phi.stride[0] + (i * c.D + d) * c.phi.stride[1]) * gamma
                             : 0.0f;
}

/* SQUARES: the sums of squares of the block's tokens, in row 0 of the sums. Otherwise: the products with rows [j,
 * j+ROWS) of phi. */
template <typename E, bool SQUARES>
static __device__ __forceinline__ float project(const mhc_call &c, const token_offsets &x_offsets, int M, int j,
                                                block_sums &shared)
{
    float sums[SUMS];
    begin_sums(shared, sums);
    int terms = 0, i = 0;
    int64_t d = threadIdx.x;
    column_step<SQUARES ? 1 : ROWS> step, next;
    load_step<E, SQUARES>(c, x_offsets, M, j, i, d, step);
    while (i < c.n) {
        d += THREADS;
        if (d - threadIdx.x >= c.D) {
            d = threadIdx.x;
            i++;
        }
        load_step<E, SQUARES>(c, x_offsets, M, j, i, d, next);
#pragma unroll
        for (int r = 0; r < (SQUARES ? 1 : ROWS); r++)
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                sums[t * ROWS + r] = fmaf(SQUARES ? step.x[t] : step.weight[r], step.x[t], sums[t * ROWS + r]);
        step = next;
        if (++terms == MAX_TERMS) {
            add_run(shared, sums);
            terms = 0;
        }
    }
    return end_sums(shared, sums);
}

template <typename E> static __device__ __forceinline__ void pre_fwd(const mhc_call &c)
{
    __shared__ block_sums shared;
    __shared__ float h_mix[TOKENS][MHC_CUDA_MAX_M], inv_rms[TOKENS], h_pre[TOKENS][MHC_CUDA_MAX_N];
    const int n = c.n, M = n * n + 2 * n, tid = threadIdx.x;
    for (int64_t first = (int64_t)blockIdx.x * TOKENS; first < c.tokens; first += (int64_t)gridDim.x * TOKENS) {
        const int count = c.tokens - first < TOKENS ? (int)(c.tokens - first) : TOKENS;
        const token_offsets x_offsets = offsets_of(c, c.x, first);
        const float squares = project<E, true>(c, x_offsets, M, 0, shared);
        if (tid < SUMS && tid % ROWS == 0)
            inv_rms[tid / ROWS] = 1.0f / sqrtf(squares / (float)(n * c.D) + c.norm_eps);
        for (int j = 0; j < M; j += ROWS) {
            const float sum = project<E, false>(c, x_offsets, M, j, shared);
            if (tid < SUMS && j + tid % ROWS < M)
                h_mix[tid / ROWS][j + tid % ROWS] = sum;
        }
        __syncthreads();
        for (int index = tid; index < count * M; index += THREADS) {
            const int t = index / M, j = index % M;
            const float alpha = load_f32(c.alpha, alpha_index(n, j) * c.alpha.stride[0]);
            const float z = fmaf(alpha, h_mix[t][j] * inv_rms[t], load_f32(c.bias, j * c.bias.stride[0]));
            const float value = coefficient(c, n, j, z);
            store_coefficient(c, n, first + t, j, h_mix[t][j], value);
            if (j < n)
                h_pre[t][j] = value;
        }
        if (tid < count && present(c.inv_rms))
            store_f32(c.inv_rms, token_offset(c, c.inv_rms, first + tid), inv_rms[tid]);
        __syncthreads();
        if (!present(c.h_in))
            continue;
        const token_offsets h_in_offsets = offsets_of(c, c.h_in, first);
        for (int64_t d = tid; d < c.D; d += THREADS)
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                if (t >= count)
                    break;
                float sum = 0.0f;
                for (int i = 0; i < n; i++)
                    sum = fmaf(h_pre[t][i], load_e<E>(c.x, x_offsets.offset[t] + i * c.x.stride[2] + d * c.x.stride[3]),
                               sum);
                store_e<E>(c.h_in, h_in_offsets.offset[t] + d * c.h_in.stride[2], sum);
            }
    }
}

/* ---- pre, backward ------------------------------------------------------------------------------------ */

/* dh_pre [TOKENS][n], returned as block sums. */
template <typename E>
static __device__ __forceinline__ float compute_dh_pre(const mhc_call &c, const token_offsets &x_offsets,
                                                       const token_offsets &dh_in_offsets, block_sums &shared)
{
    float sums[SUMS];
    begin_sums(shared, sums);
    int terms = 0;
    for (int64_t begin = 0; begin < c.D; begin += THREADS) {
        const int64_t d = begin + threadIdx.x;
        if (d < c.D) {
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                const float dh_in = load_e<E>(c.dh_in, dh_in_offsets.offset[t] + d * c.dh_in.stride[2]);
#pragma unroll
                for (int i = 0; i < MHC_CUDA_MAX_N; i++)
                    if (i < c.n)
                        sums[t * ROWS + i] =
                            fmaf(load_e<E>(c.x, x_offsets.offset[t] + i * c.x.stride[2] + d * c.x.stride[3]), dh_in,
                                 sums[t * ROWS + i]);
            }
        }
        if (++terms == MAX_TERMS) {
            add_run(shared, sums);
            terms = 0;
        }
    }
    return end_sums(shared, sums);
}

/* Writes dx of the block's tokens in column (i, d). */
template <typename E>
static __device__ __forceinline__ void write_dx(const mhc_call &c, const token_offsets &x_offsets,
                                                const token_offsets &dh_in_offsets, int64_t first, int count, int M,
                                                int i, int64_t d, const float (*dh_mix)[MHC_CUDA_MAX_M],
                                                const float (*h_pre)[MHC_CUDA_MAX_N], const float *factor)
{
    float sum[TOKENS] = {0}, x[TOKENS], dh_in[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        x[t] = load_e<E>(c.x, x_offsets.offset[t] + i * c.x.stride[2] + d * c.x.stride[3]);
        dh_in[t] = load_e<E>(c.dh_in, dh_in_offsets.offset[t] + d * c.dh_in.stride[2]);
    }
    for (int j = 0; j < M; j += ROWS) {
        float part[TOKENS] = {0}, phi[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            phi[r] = j + r < M ? load_f32(c.phi, (j + r) * c.phi.stride[0] + (i * c.D + d) * c.phi.stride[1]) : 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (j + r < M)
#pragma unroll
                for (int t = 0; t < TOKENS; t++)
                    part[t] = fmaf(dh_mix[t][j + r], phi[r], part[t]);
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
            sum[t] += part[t];
    }
    const float gamma = present(c.gamma) ? load_f32(c.gamma, i * c.gamma.stride[0] + d * c.gamma.stride[1]) : 1.0f;
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        if (t >= count)
            break;
        const int64_t token = first + t;
        float dx = gamma * sum[t];
        dx = fmaf(factor[t], x[t], dx);
        dx = fmaf(h_pre[t][i], dh_in[t], dx);
        if (present(c.dx_post))
            dx += load_e<E>(c.dx_post,
                            token_offset(c, c.dx_post, token) + i * c.dx_post.stride[2] + d * c.dx_post.stride[3]);
        const int64_t to = token_offset(c, c.dx, token) + i * c.dx.stride[2] + d * c.dx.stride[3];
        if (c.f32_dx)
            store_f32(c.dx, to, dx);
        else
            store_e<E>(c.dx, to, dx);
    }
}

/* dz of post and res is already in the workspace. */
template <typename E> static __device__ __forceinline__ void pre_dx(const mhc_call &c)
{
    __shared__ block_sums shared;
    __shared__ float dz[TOKENS][MHC_CUDA_MAX_M], dh_mix[TOKENS][MHC_CUDA_MAX_M], h_pre[TOKENS][MHC_CUDA_MAX_N];
    __shared__ float factor[TOKENS]; /* c of the formulas */
    const int n = c.n, M = n * n + 2 * n, tid = threadIdx.x;
    for (int64_t first = (int64_t)blockIdx.x * TOKENS; first < c.tokens; first += (int64_t)gridDim.x * TOKENS) {
        const int count = c.tokens - first < TOKENS ? (int)(c.tokens - first) : TOKENS;
        const token_offsets x_offsets = offsets_of(c, c.x, first), dh_in_offsets = offsets_of(c, c.dh_in, first);
        const float dh_pre = compute_dh_pre<E>(c, x_offsets, dh_in_offsets, shared);
        const int local_token = tid / ROWS, i = tid % ROWS;
        if (tid < SUMS && local_token < count && i < n) {
            h_pre[local_token][i] =
                load_f32(c.h_pre, token_offset(c, c.h_pre, first + local_token) + i * c.h_pre.stride[2]);
            const float s = h_pre[local_token][i] - c.hc_eps;
            dz[local_token][i] = dh_pre * s * (1.0f - s);
            c.dz[(first + local_token) * M + i] = dz[local_token][i];
        }
        for (int index = tid; index < count * (M - n); index += THREADS) {
            const int t = index / (M - n), j = n + index % (M - n);
            dz[t][j] = c.dz[(first + t) * M + j];
        }
        __syncthreads();
        for (int index = tid; index < TOKENS * M; index += THREADS) {
            const int t = index / M, j = index % M, group = alpha_index(n, j);
            if (t >= count) {
                dh_mix[t][j] = 0.0f;
                continue;
            }
            const float du = load_f32(c.alpha, group * c.alpha.stride[0]) * dz[t][j];
            dh_mix[t][j] = du * load_f32(c.inv_rms, token_offset(c, c.inv_rms, first + t));
            c.dh_mix[(first + t) * M + j] = dh_mix[t][j];
        }
        __syncthreads();
        if (tid < count) {
            const float inv_rms = load_f32(c.inv_rms, token_offset(c, c.inv_rms, first + tid));
            const int64_t h_mix = token_offset(c, c.h_mix, first + tid);
            float sum = 0.0f;
            for (int j = 0; j < M; j += ROWS) {
                float part = 0.0f;
                for (int r = j; r < M && r < j + ROWS; r++) {
                    const int group = alpha_index(n, r);
                    part = fmaf(load_f32(c.alpha, group * c.alpha.stride[0]) * dz[tid][r],
                                load_f32(c.h_mix, h_mix + r * c.h_mix.stride[2]), part);
                }
                sum += part;
            }
            factor[tid] = -sum * inv_rms * inv_rms * inv_rms / (float)(n * c.D);
        }
        __syncthreads();
        for (int64_t k = tid; present(c.dx) && k < n * c.D; k += THREADS)
            write_dx<E>(c, x_offsets, dh_in_offsets, first, count, M, (int)(k / c.D), k % c.D, dh_mix, h_pre, factor);
        __syncthreads();
    }
}

/* Block (x, y): dphi_part of the columns of block x over part y of the tokens. */
template <typename E> static __device__ __forceinline__ void pre_dphi(const mhc_call &c)
{
    __shared__ float dh_mix[MHC_CUDA_RUN][MHC_CUDA_MAX_M];
    __shared__ int64_t offsets[MHC_CUDA_RUN];
    const int M = c.n * c.n + 2 * c.n;
    const int64_t K = c.n * c.D, k = (int64_t)blockIdx.x * THREADS + threadIdx.x, part = blockIdx.y;
    const int64_t begin = part * c.part_length;
    const int64_t end = begin + c.part_length < c.tokens ? begin + c.part_length : c.tokens;
    const int64_t column = k < K ? k / c.D * c.x.stride[2] + k % c.D * c.x.stride[3] : 0;
    for (int j = 0; j < M; j += ROWS) {
        float sum[ROWS] = {0};
        for (int64_t first = begin; first < end; first += MHC_CUDA_RUN) {
            const int count = end - first < MHC_CUDA_RUN ? (int)(end - first) : MHC_CUDA_RUN;
            __syncthreads();
            for (int index = threadIdx.x; index < count * ROWS; index += THREADS)
                if (j + index % ROWS < M)
                    dh_mix[index / ROWS][index % ROWS] = c.dh_mix[(first + index / ROWS) * M + j + index % ROWS];
            if (threadIdx.x < count)
                offsets[threadIdx.x] = token_offset(c, c.x, first + threadIdx.x);
            __syncthreads();
            if (k >= K)
                continue;
            float run[ROWS] = {0}, x[MHC_CUDA_RUN];
#pragma unroll
            for (int t = 0; t < MHC_CUDA_RUN; t++)
                x[t] = t < count ? load_e<E>(c.x, offsets[t] + column) : 0.0f;
#pragma unroll
            for (int t = 0; t < MHC_CUDA_RUN; t++)
                if (t < count)
#pragma unroll
                    for (int r = 0; r < ROWS; r++)
                        run[r] = fmaf(j + r < M ? dh_mix[t][r] : 0.0f, x[t], run[r]);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                sum[r] += run[r];
        }
        if (k < K)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (j + r < M)
                    c.dphi_parts[(part * M + j + r) * K + k] = sum[r];
    }
}

/* Sums of dz and of dz * h_mix * inv_rms over part blockIdx.x of the tokens. A thread handles one coefficient; the
 * block processes THREADS / M tokens at a time. */
KERNEL mhc_pre_token_sums(const __grid_constant__ mhc_call c)
{
    __shared__ double sums[THREADS][2];
    const int M = c.n * c.n + 2 * c.n, groups = THREADS / M, j = threadIdx.x % M, group = threadIdx.x / M;
    double dbias = 0, dalpha = 0;
#pragma unroll 4
    for (int64_t token = blockIdx.x + (int64_t)group * gridDim.x; group < groups && token < c.tokens;
         token += (int64_t)groups * gridDim.x) {
        const double dz = (double)c.dz[token * M + j];
        const float u = load_f32(c.h_mix, token_offset(c, c.h_mix, token) + j * c.h_mix.stride[2]) *
                        load_f32(c.inv_rms, token_offset(c, c.inv_rms, token));
        dbias += dz;
        dalpha += dz * (double)u;
    }
    sums[threadIdx.x][0] = dbias;
    sums[threadIdx.x][1] = dalpha;
    __syncthreads();
    if (group > 0)
        return;
    for (int other = 1; other < groups; other++) {
        dbias += sums[other * M + j][0];
        dalpha += sums[other * M + j][1];
    }
    double *to = c.token_sums + ((int64_t)blockIdx.x * M + j) * 2;
    to[0] = dbias;
    to[1] = dalpha;
}

/* dbias or (ALPHA) dalpha from the parts' sums: each slice of threads sums every slices-th part, then the slices are
 * added. */
template <bool ALPHA> static __device__ __forceinline__ void sum_token_parts(const mhc_call &c)
{
    __shared__ double sums[THREADS];
    const int n = c.n, M = n * n + 2 * n, slices = THREADS / M, j = threadIdx.x % M;
    double sum = 0;
    if ((int)threadIdx.x < slices * M)
#pragma unroll 8
        for (int64_t part = threadIdx.x / M; part < c.token_parts; part += slices)
            sum += c.token_sums[(part * M + j) * 2 + ALPHA];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < M) {
        for (int slice = 1; slice < slices; slice++)
            sum += sums[slice * M + j];
        sums[j] = sum;
        if (!ALPHA)
            store_gradient(c, c.dbias, j * c.dbias.stride[0], (float)sum);
    }
    __syncthreads();
    if (ALPHA && threadIdx.x < 3) {
        double dalpha = 0;
        for (int row = 0; row < M; row++)
            dalpha += alpha_index(n, row) == (int)threadIdx.x ? sums[row] : 0;
        store_gradient(c, c.dalpha, threadIdx.x * c.dalpha.stride[0], (float)dalpha);
    }
}

/* dphi and dgamma from the dphi_part of all parts, added in the order of the parts. A block handles
 * MHC_CUDA_SUM_COLUMNS columns. A warp handles every GROUPS-th row of them; several rows and parts are loaded at once.
 * The last two blocks compute dbias and dalpha. */
KERNEL mhc_pre_sum_parts(const __grid_constant__ mhc_call c)
{
    constexpr int COLUMNS = MHC_CUDA_SUM_COLUMNS, GROUPS = THREADS / COLUMNS, ROWS = 3;
    __shared__ double sums[GROUPS][COLUMNS];
    const int M = c.n * c.n + 2 * c.n, column = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS;
    const int64_t K = c.n * c.D, k = (int64_t)blockIdx.x * COLUMNS + column;
    cot_griddepcontrol_wait();
    /* After the wait: mhc_post_pre_make_operands then finds the records in memory. */
    cot_griddepcontrol_launch_dependents();
    if (blockIdx.x >= gridDim.x - 2) {
        if (blockIdx.x == gridDim.x - 2)
            sum_token_parts<false>(c);
        else
            sum_token_parts<true>(c);
        return;
    }
    const int64_t i = k / c.D, d = k % c.D;
    double dgamma = 0;
    if (k < K && (present(c.dphi) || present(c.dgamma))) {
        const float gamma = present(c.gamma) ? load_f32(c.gamma, i * c.gamma.stride[0] + d * c.gamma.stride[1]) : 1.0f;
        for (int first = group; first < M; first += ROWS * GROUPS) {
            double dphi_sum[ROWS] = {0};
            float phi[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int row = first + r * GROUPS;
                phi[r] = row < M ? load_f32(c.phi, row * c.phi.stride[0] + k * c.phi.stride[1]) : 0.0f;
            }
            const float *source = c.dphi_parts + first * K + k;
#pragma unroll 8
            for (int part = 0; part < (int)c.parts; part++, source += M * K)
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    if (first + r * GROUPS < M)
                        dphi_sum[r] += (double)source[r * GROUPS * K];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int row = first + r * GROUPS;
                dphi_sum[r] *= (double)c.dphi_part_scale;
                dgamma += (double)phi[r] * dphi_sum[r];
                if (row < M)
                    store_gradient(c, c.dphi, row * c.dphi.stride[0] + k * c.dphi.stride[1],
                                   (float)dphi_sum[r] * gamma);
            }
        }
    }
    sums[group][column] = dgamma;
    __syncthreads();
    if (group > 0 || k >= K)
        return;
#pragma unroll
    for (int g = 1; g < GROUPS; g++)
        dgamma += sums[g][column];
    store_gradient(c, c.dgamma, i * c.dgamma.stride[0] + d * c.dgamma.stride[1], (float)dgamma);
}

/* ---- post --------------------------------------------------------------------------------------------- */

template <typename E> static __device__ __forceinline__ void post_fwd(const mhc_call &c)
{
    const int n = c.n;
    for (int64_t index = (int64_t)blockIdx.x * THREADS + threadIdx.x; index < c.tokens * c.D;
         index += (int64_t)gridDim.x * THREADS) {
        const int64_t token = index / c.D, d = index % c.D;
        const int64_t x_offset = token_offset(c, c.x, token) + d * c.x.stride[3],
                      h_res_offset = token_offset(c, c.h_res, token);
        const int64_t y_offset = token_offset(c, c.y, token) + d * c.y.stride[3];
        float x[MHC_CUDA_MAX_N];
#pragma unroll
        for (int i = 0; i < MHC_CUDA_MAX_N; i++)
            x[i] = i < n ? load_e<E>(c.x, x_offset + i * c.x.stride[2]) : 0.0f;
        const float f = load_e<E>(c.f, token_offset(c, c.f, token) + d * c.f.stride[2]);
        for (int o = 0; o < n; o++) {
            float y = load_f32(c.h_post, token_offset(c, c.h_post, token) + o * c.h_post.stride[2]) * f;
#pragma unroll
            for (int i = 0; i < MHC_CUDA_MAX_N; i++)
                if (i < n)
                    y = fmaf(load_f32(c.h_res, h_res_offset + i * c.h_res.stride[2] + o * c.h_res.stride[3]), x[i], y);
            store_e<E>(c.y, y_offset + o * c.y.stride[2], y);
        }
    }
}

/* dh_post[o] in sum 0, dh_res[i,o] in sum 1+i. */
template <typename E, typename G>
static __device__ __forceinline__ void post_sums(const mhc_call &c, int64_t token, int o, float (*warp_sums)[32])
{
    float sums[32] = {0}, total = 0.0f;
    int terms = 0;
    const int64_t x_offset = token_offset(c, c.x, token), f_offset = token_offset(c, c.f, token);
    const int64_t dy_offset = token_offset(c, c.dy, token) + o * c.dy.stride[2];
    for (int64_t begin = 0; begin < c.D; begin += THREADS) {
        const int64_t d = begin + threadIdx.x;
        if (d < c.D) {
            const float dy = load_e<G>(c.dy, dy_offset + d * c.dy.stride[3]);
            sums[0] = fmaf(load_e<E>(c.f, f_offset + d * c.f.stride[2]), dy, sums[0]);
#pragma unroll
            for (int i = 0; i < MHC_CUDA_MAX_N; i++)
                if (i < c.n)
                    sums[1 + i] =
                        fmaf(load_e<E>(c.x, x_offset + i * c.x.stride[2] + d * c.x.stride[3]), dy, sums[1 + i]);
        }
        if (++terms == MAX_TERMS || begin + THREADS >= c.D) {
            sum_over_lanes(sums);
            total += sums[0];
            terms = 0;
#pragma unroll
            for (int i = 0; i < 32; i++)
                sums[i] = 0.0f;
        }
    }
    warp_sums[threadIdx.x / 32][threadIdx.x % 32] = total;
    __syncthreads();
    if (threadIdx.x <= c.n) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++)
            sum += warp_sums[warp][threadIdx.x];
        const int i = (int)threadIdx.x - 1;
        if (i < 0 && present(c.dh_post))
            store_f32(c.dh_post, token_offset(c, c.dh_post, token) + o * c.dh_post.stride[2], sum);
        if (i >= 0 && present(c.dh_res))
            store_f32(c.dh_res, token_offset(c, c.dh_res, token) + i * c.dh_res.stride[2] + o * c.dh_res.stride[3],
                      sum);
    }
    __syncthreads();
}

/* G: type of dy. In post_pre, dy is the gradient g of y in float32. */
template <typename E, typename G = E> static __device__ __forceinline__ void post_bwd(const mhc_call &c)
{
    __shared__ float warp_sums[WARPS][32];
    const int n = c.n;
    for (int64_t token = blockIdx.x; token < c.tokens; token += gridDim.x) {
        for (int o = 0; o < n && (present(c.dh_post) || present(c.dh_res)); o++)
            post_sums<E, G>(c, token, o, warp_sums);
        const int64_t dy_offset = token_offset(c, c.dy, token), h_res_offset = token_offset(c, c.h_res, token);
        for (int64_t d = threadIdx.x; d < c.D && (present(c.dx) || present(c.df)); d += THREADS) {
            float dy[MHC_CUDA_MAX_N], df = 0.0f;
#pragma unroll
            for (int o = 0; o < MHC_CUDA_MAX_N; o++)
                if (o < n) {
                    dy[o] = load_e<G>(c.dy, dy_offset + o * c.dy.stride[2] + d * c.dy.stride[3]);
                    df = fmaf(load_f32(c.h_post, token_offset(c, c.h_post, token) + o * c.h_post.stride[2]), dy[o], df);
                }
            if (present(c.df))
                store_e<E>(c.df, token_offset(c, c.df, token) + d * c.df.stride[2], df);
            for (int i = 0; i < n && present(c.dx); i++) {
                float dx = 0.0f;
#pragma unroll
                for (int o = 0; o < MHC_CUDA_MAX_N; o++)
                    if (o < n)
                        dx = fmaf(load_f32(c.h_res, h_res_offset + i * c.h_res.stride[2] + o * c.h_res.stride[3]),
                                  dy[o], dx);
                store_e<E>(c.dx, token_offset(c, c.dx, token) + i * c.dx.stride[2] + d * c.dx.stride[3], dx);
            }
        }
    }
}

/* ---- instances ---------------------------------------------------------------------------------------- */

/* blocks: minimum on a multiprocessor, 0 = the compiler's choice; chosen without register spills on every device. */
#define INSTANCE(name, suffix, element, blocks)                            \
    extern "C" __global__ void __launch_bounds__(MHC_CUDA_THREADS, blocks) \
        mhc_##name##_generic_##suffix(const __grid_constant__ mhc_call c)  \
    {                                                                      \
        name<element>(c);                                                  \
    }
#define INSTANCES(name, blocks)         \
    INSTANCE(name, f32, float, blocks)  \
    INSTANCE(name, f16, __half, blocks) \
    INSTANCE(name, bf16, __nv_bfloat16, blocks)

INSTANCES(pre_fwd, 0)
INSTANCES(pre_dx, 0)
INSTANCES(pre_dphi, 0)
INSTANCES(post_fwd, 0)
INSTANCES(post_bwd, 1)

template <typename E> static __device__ __forceinline__ void post_bwd_f32(const mhc_call &c)
{
    post_bwd<E, float>(c);
}

INSTANCE(post_bwd_f32, f16, __half, 1)
INSTANCE(post_bwd_f32, bf16, __nv_bfloat16, 1)
