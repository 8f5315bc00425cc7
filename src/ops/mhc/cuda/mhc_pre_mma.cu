/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_mma.cu: the products of mhc_pre_tiles.cu on the tensor cores, for x of f16 and bf16.
 *
 * The sums are the same. A block handles tiles of TILE tokens and COLUMNS columns of a stream, and all rows of phi at
 * once, in octets. An f32 factor is a sum of three bf16 terms, and products of fourth and higher order are left out. An
 * f16 x is a sum of two bf16 terms. Tensor cores truncate sums, so they sum short runs only; float32 additions sum the
 * runs.
 *   project  a warp handles 16 tokens and all columns of a chunk: sums of h_mix and of squares over a slice of
 *            MHC_CUDA_SLICE columns
 *   dx       a warp handles 16 tokens and half of the columns, in two passes
 *   dphi     a warp handles 16 columns: Q over a part of the tokens */
#include "mhc_cuda.cuh"

#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/ptx.cuh"

enum {
    THREADS = MHC_CUDA_THREADS,
    WARPS = THREADS / 32,
    TILE = MHC_CUDA_MMA_TOKENS,
    COLUMNS = MHC_CUDA_MMA_COLUMNS,
    TERMS = 3
};
static_assert(TILE == 16 * WARPS && COLUMNS == 16 * WARPS, "each warp has 16 tokens and 16 columns");

template <typename E> constexpr int planes_of = cot_is_f16<E> ? 2 : 1;

/* 8 elements (16 bytes) of padding place the eight rows that ldmatrix reads in different banks. */
template <int WIDTH> constexpr int pitch_of = WIDTH + 8;

/* Loads V elements of a row from column d on: zero from column D on and in a row that is not valid. */
template <typename E, int V>
static __device__ __forceinline__ void load_row(const mhc_call &c, const mhc_array &a, bool valid, int64_t offset,
                                                int64_t stride, int d, float (&values)[V])
{
    const E *source = (const E *)a.data + offset;
    if (c.vectorized && valid && d + V <= c.D) {
        cot_unpack(cot_load_vector<E, V>(source + d), values);
    } else {
#pragma unroll
        for (int v = 0; v < V; v++)
            values[v] = valid && d + v < c.D ? cot_to_f32(source[(int64_t)(d + v) * stride]) : 0.0f;
    }
}

/* Stores eight values as bf16 terms, one plane for each term. */
template <int COUNT>
static __device__ __forceinline__ void store_terms(__nv_bfloat16 *to, int plane, const float (&values)[8])
{
    uint32_t terms[4][COUNT];
#pragma unroll
    for (int v = 0; v < 4; v++)
        cot_split_bf16(values[2 * v], values[2 * v + 1], terms[v]);
#pragma unroll
    for (int t = 0; t < COUNT; t++)
        *(uint4 *)(to + t * plane) = make_uint4(terms[0][t], terms[1][t], terms[2][t], terms[3][t]);
}

/* Whether eight elements of a parameter's row can be loaded as two vectors. */
static __device__ __forceinline__ bool can_load_vectors(const mhc_call &c, const mhc_array &a)
{
    return a.stride[1] == 1 && a.stride[0] % 4 == 0 && (uintptr_t)a.data % 16 == 0 && c.D % 8 == 0;
}

static __device__ __forceinline__ void load_8(const mhc_call &c, const mhc_array &a, bool vectorized, int64_t offset,
                                              int d, float (&values)[8])
{
    const float *source = (const float *)a.data + offset;
    if (vectorized && d < c.D) {
        const float4 low = *(const float4 *)source, high = *(const float4 *)(source + 4);
        values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
        values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    } else {
#pragma unroll
        for (int v = 0; v < 8; v++)
            values[v] = d + v < c.D ? source[v * a.stride[1]] : 0.0f;
    }
}

/* Loads eight elements of row j of phi gamma, from column d of stream i on. */
static __device__ __forceinline__ void load_phi(const mhc_call &c, bool vectorized, int j, int i, int d,
                                                float (&values)[8])
{
    const int M = c.n * c.n + 2 * c.n;
#pragma unroll
    for (int v = 0; v < 8; v++)
        values[v] = 0.0f;
    if (j >= M)
        return;
    load_8(c, c.phi, vectorized, j * c.phi.stride[0] + (i * c.D + d) * c.phi.stride[1], d, values);
    if (present(c.gamma)) {
        float gamma[8];
        load_8(c, c.gamma, vectorized, i * c.gamma.stride[0] + d * c.gamma.stride[1], d, gamma);
#pragma unroll
        for (int v = 0; v < 8; v++)
            values[v] *= gamma[v];
    }
}

static __device__ __forceinline__ bool can_vectorize_phi(const mhc_call &c)
{
    return can_load_vectors(c, c.phi) && (!present(c.gamma) || can_load_vectors(c, c.gamma));
}

/* Stores ROWS rows of phi gamma as terms in shared memory: WIDTH columns of stream i from d on. */
template <int ROWS, int WIDTH, int PITCH>
static __device__ __forceinline__ void stage_phi(const mhc_call &c, bool vectorized, __nv_bfloat16 *phi, int i, int d)
{
    for (int index = threadIdx.x; index < ROWS * WIDTH / 8; index += THREADS) {
        const int row = index / (WIDTH / 8), column = index % (WIDTH / 8) * 8;
        float values[8];
        load_phi(c, vectorized, row, i, d + column, values);
        store_terms<TERMS>(phi + row * PITCH + column, ROWS * PITCH, values);
    }
}

/* B fragments of two octets and 16 k, from rows that are octets: [8][k]. */
static __device__ __forceinline__ void load_B(uint32_t (&B)[4], const __nv_bfloat16 *source, int pitch)
{
    const int lane = threadIdx.x % 32;
    cot_ldmatrix_x4(B, cot_shared_address(source + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 8));
}

/* B fragments of two octets and 16 k, from rows that are k: [16][octets]. */
static __device__ __forceinline__ void load_B_trans(uint32_t (&B)[4], const __nv_bfloat16 *source, int pitch)
{
    const int lane = threadIdx.x % 32;
    cot_ldmatrix_x4_trans(B, cot_shared_address(source + lane % 16 * pitch + lane / 16 * 8));
}

/* Octets `pair` and `pair` + 1 of c += A times their fragments of term `term`. Only products up to the third order, the
 * smallest first. */
template <int OCTETS, int SIZE, int PLANES>
static __device__ __forceinline__ void multiply_octets(float (&c)[SIZE][4], const uint32_t (&A)[PLANES][4],
                                                       const uint32_t (&B)[4], int pair, int term)
{
#pragma unroll
    for (int p = PLANES - 1; p >= 0; p--)
        if (p + term < TERMS)
#pragma unroll
            for (int o = 0; o < 2; o++)
                if (pair + o < OCTETS)
                    cot_mma_bf16(c[pair + o], A[p][0], A[p][1], A[p][2], A[p][3], B[2 * o], B[2 * o + 1]);
}

/* ---- project ------------------------------------------------------------------------------------------ */

enum { CHUNK = 64, X_PITCH = pitch_of<CHUNK> };

template <typename E, int OCTETS> static __device__ __forceinline__ void project(const mhc_call &c)
{
    constexpr int PLANES = planes_of<E>, EVEN_OCTETS = (OCTETS + 1) / 2 * 2, ROWS = EVEN_OCTETS * 8;
    constexpr int RUN_COLUMNS =
        /* Columns that the tensor cores sum in one run. With f16 there are more products, and more would be
         * truncated. */
        PLANES > 1 ? 16 : CHUNK;
    extern __shared__ __align__(16) unsigned char memory[];
    __nv_bfloat16 *x = (__nv_bfloat16 *)memory, *phi = x + PLANES * TILE * X_PITCH;
    const int M = c.n * c.n + 2 * c.n, S = MHC_CUDA_SUMS(c.n), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first_token = (int64_t)blockIdx.x * TILE, load_token = first_token + threadIdx.x / 2;
    const int slices = (int)(c.slices / c.n), i = blockIdx.y / slices, begin = blockIdx.y % slices * MHC_CUDA_SLICE;
    const int end = begin + MHC_CUDA_SLICE < c.D ? begin + MHC_CUDA_SLICE : (int)c.D;
    const bool valid = load_token < c.tokens, vectorized = can_vectorize_phi(c);
    const int64_t offset = valid ? token_offset(c, c.x, load_token) + i * c.x.stride[2] : 0;
    float sums[EVEN_OCTETS][4] = {0}, squares = 0.0f;
    for (int d = begin; d < end; d += CHUNK) {
        float run = 0.0f;
        __syncthreads();
#pragma unroll
        for (int v = 0; v < CHUNK / 16; v++) {
            const int column = threadIdx.x % 2 * (CHUNK / 2) + v * 8;
            float values[8];
            load_row<E, 8>(c, c.x, valid, offset, c.x.stride[3], d + column, values);
#pragma unroll
            for (int u = 0; u < 8; u++)
                run = fmaf(values[u], values[u], run);
            store_terms<PLANES>(x + threadIdx.x / 2 * X_PITCH + column, TILE * X_PITCH, values);
        }
        squares += run;
        stage_phi<ROWS, CHUNK, X_PITCH>(c, vectorized, phi, i, d);
        __syncthreads();
        float part[EVEN_OCTETS][4] = {0};
#pragma unroll(PLANES > 1 ? 1 : CHUNK / 16)
        for (int k = 0; k < CHUNK; k += 16) {
            uint32_t A[PLANES][4];
#pragma unroll
            for (int p = 0; p < PLANES; p++)
                cot_ldmatrix_x4(
                    A[p], cot_shared_address(x + (p * TILE + warp * 16 + lane % 16) * X_PITCH + k + lane / 16 * 8));
#pragma unroll
            for (int pair = 0; pair < EVEN_OCTETS; pair += 2)
#pragma unroll
                for (int term = TERMS - 1; term >= 0; term--) {
                    uint32_t B[4];
                    load_B(B, phi + (term * ROWS + pair * 8) * X_PITCH + k, X_PITCH);
                    multiply_octets<OCTETS>(part, A, B, pair, term);
                }
            if ((k + 16) % RUN_COLUMNS == 0)
#pragma unroll
                for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
                    for (int v = 0; v < 4; v++) {
                        sums[octet][v] += part[octet][v];
                        part[octet][v] = 0.0f;
                    }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t token = first_token + warp * 16 + half * 8 + lane / 4;
        float *to = c.sums + (token * c.slices + blockIdx.y) * S;
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
            for (int v = 0; v < 2; v++) {
                const int j = octet * 8 + lane % 4 * 2 + v;
                if (token < c.tokens && j < M)
                    to[j] = sums[octet][half * 2 + v];
            }
    }
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    if (valid && threadIdx.x % 2 == 0)
        c.sums[(load_token * c.slices + blockIdx.y) * S + M] = squares;
}

/* ---- dx ----------------------------------------------------------------------------------------------- */

enum { COLUMNS_PITCH = pitch_of<COLUMNS>, GROUPS = COLUMNS / 2 / 16 };

/* Two elements of a token's dh_mix. */
static __device__ __forceinline__ float2 load_dh_mix_pair(const mhc_call &c, int64_t token, int M, int j)
{
    const float *source = c.dh_mix + token * M + j;
    return make_float2(token < c.tokens && j < M ? source[0] : 0.0f, token < c.tokens && j + 1 < M ? source[1] : 0.0f);
}

/* Offset of stream i of token (b, t), or of the row of a tensor without streams. */
static __device__ __forceinline__ int64_t row_offset(const mhc_array &a, uint32_t b, uint32_t t, int i)
{
    return b * a.stride[0] + t * a.stride[1] + i * a.stride[2];
}

template <typename E, int OCTETS> static __device__ __forceinline__ void dx(const mhc_call &c)
{
    constexpr int STEPS = (OCTETS + 1) / 2, ROWS = STEPS * 16;
    extern __shared__ __align__(16) unsigned char memory[];
    __nv_bfloat16 *phi = (__nv_bfloat16 *)memory;
    const int M = c.n * c.n + 2 * c.n, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = (int)((c.D + COLUMNS - 1) / COLUMNS), i = blockIdx.y / tiles;
    const int first_column = blockIdx.y % tiles * COLUMNS;
    const bool vectorized = can_vectorize_phi(c);
    stage_phi<ROWS, COLUMNS, COLUMNS_PITCH>(c, vectorized, phi, i, first_column);
    __syncthreads();
    for (int half = 0; half < 2; half++) {
        /* This thread handles `token` and `token` + 8. */
        const int64_t token = (int64_t)blockIdx.x * TILE + half * (TILE / 2) + warp / 2 * 16 + lane / 4;
        uint32_t A[STEPS][TERMS][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int a = 0; a < 4; a++) {
                const float2 pair = load_dh_mix_pair(c, token + a % 2 * 8, M, step * 16 + a / 2 * 8 + lane % 4 * 2);
                uint32_t terms[TERMS];
                cot_split_bf16(pair.x, pair.y, terms);
#pragma unroll
                for (int t = 0; t < TERMS; t++)
                    A[step][t][a] = terms[t];
            }
        float factor[2], h_pre[2];
        uint32_t b[2], t_in_b[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t t = token + h * 8 < c.tokens ? (uint32_t)token + h * 8 : 0;
            b[h] = t / (uint32_t)c.T, t_in_b[h] = t - b[h] * (uint32_t)c.T;
            factor[h] = c.factor[t];
            h_pre[h] = load_f32(c.h_pre, token_offset(c, c.h_pre, t) + i * c.h_pre.stride[2]);
        }
#pragma unroll 1
        for (int group = 0; group < GROUPS; group++) {
            const int column = warp % 2 * (COLUMNS / 2) + group * 16;
            float sums[2][4] = {0};
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                uint32_t B[TERMS][4];
#pragma unroll
                for (int t = 0; t < TERMS; t++)
                    load_B_trans(B[t], phi + (t * ROWS + step * 16) * COLUMNS_PITCH + column, COLUMNS_PITCH);
#pragma unroll
                for (int order = TERMS - 1; order >= 0; order--) /* smallest products first */
#pragma unroll
                    for (int t = 0; t <= order; t++)
#pragma unroll
                        for (int o = 0; o < 2; o++)
                            cot_mma_bf16(sums[o], A[step][t][0], A[step][t][1], A[step][t][2], A[step][t][3],
                                         B[order - t][2 * o], B[order - t][2 * o + 1]);
            }
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int o = 0; o < 2; o++) {
                    const int d = first_column + column + o * 8 + lane % 4 * 2;
                    const bool valid = token + h * 8 < c.tokens;
                    float x[2], dh_in[2], post[2] = {0}, out[2];
                    load_row<E, 2>(c, c.x, valid, row_offset(c.x, b[h], t_in_b[h], i), c.x.stride[3], d, x);
                    load_row<E, 2>(c, c.dh_in, valid, row_offset(c.dh_in, b[h], t_in_b[h], 0), c.dh_in.stride[2], d,
                                   dh_in);
                    if (present(c.dx_post))
                        load_row<E, 2>(c, c.dx_post, valid, row_offset(c.dx_post, b[h], t_in_b[h], i),
                                       c.dx_post.stride[3], d, post);
#pragma unroll
                    for (int v = 0; v < 2; v++)
                        out[v] = fmaf(h_pre[h], dh_in[v], fmaf(factor[h], x[v], sums[o][2 * h + v])) + post[v];
                    E *to = (E *)c.dx.data + row_offset(c.dx, b[h], t_in_b[h], i);
                    if (valid && c.vectorized && d + 2 <= c.D)
                        cot_store_vector<E, 2>(to + d, out);
                    else if (valid)
#pragma unroll
                        for (int v = 0; v < 2; v++)
                            if (d + v < c.D)
                                cot_from_f32(to + (int64_t)(d + v) * c.dx.stride[3], out[v]);
                }
        }
    }
}

/* ---- dphi --------------------------------------------------------------------------------------------- */

enum { RUN = MHC_CUDA_MMA_RUN };

template <typename E, int OCTETS> static __device__ __forceinline__ void dphi(const mhc_call &c)
{
    constexpr int PLANES = planes_of<E>, EVEN_OCTETS = (OCTETS + 1) / 2 * 2, DH_MIX_PITCH = pitch_of<EVEN_OCTETS * 8>;
    constexpr int VECTORS = COLUMNS / 8;
    extern __shared__ __align__(16) unsigned char memory[];
    __nv_bfloat16 *x = (__nv_bfloat16 *)memory, *dh_mix = x + PLANES * RUN * COLUMNS_PITCH;
    const int M = c.n * c.n + 2 * c.n, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = (int)((c.D + COLUMNS - 1) / COLUMNS), i = blockIdx.x / tiles;
    const int first_column = blockIdx.x % tiles * COLUMNS;
    const int64_t part = blockIdx.y, begin = part * c.part_length, K = c.n * c.D;
    const int64_t end = begin + c.part_length < c.tokens ? begin + c.part_length : c.tokens;
    float Q[OCTETS][4] = {0};
    for (int64_t first = begin; first < end; first += RUN) {
        __syncthreads();
#pragma unroll
        for (int index = threadIdx.x; index < RUN * VECTORS; index += THREADS) {
            const int64_t token = first + index / VECTORS;
            const int column = index % VECTORS * 8;
            const bool valid = token < end;
            float values[8];
            load_row<E, 8>(c, c.x, valid, valid ? token_offset(c, c.x, token) + i * c.x.stride[2] : 0, c.x.stride[3],
                           first_column + column, values);
            store_terms<PLANES>(x + index / VECTORS * COLUMNS_PITCH + column, RUN * COLUMNS_PITCH, values);
        }
        for (int index = threadIdx.x; index < RUN * EVEN_OCTETS; index += THREADS) {
            const int64_t token = first + index / EVEN_OCTETS;
            const int j = index % EVEN_OCTETS * 8;
            float values[8];
#pragma unroll
            for (int v = 0; v < 8; v++)
                values[v] = token < end && j + v < M ? c.dh_mix[token * M + j + v] : 0.0f;
            store_terms<TERMS>(dh_mix + index / EVEN_OCTETS * DH_MIX_PITCH + j, RUN * DH_MIX_PITCH, values);
        }
        __syncthreads();
        float run[OCTETS][4] = {0};
#pragma unroll
        for (int k = 0; k < RUN; k += 16) {
            uint32_t A[PLANES][4];
#pragma unroll
            for (int p = 0; p < PLANES; p++)
                cot_ldmatrix_x4_trans(A[p],
                                      cot_shared_address(x + (p * RUN + k + lane / 16 * 8 + lane % 8) * COLUMNS_PITCH +
                                                         warp * 16 + lane / 8 % 2 * 8));
#pragma unroll
            for (int pair = 0; pair < EVEN_OCTETS; pair += 2)
#pragma unroll
                for (int term = TERMS - 1; term >= 0; term--) {
                    uint32_t B[4];
                    load_B_trans(B, dh_mix + (term * RUN + k) * DH_MIX_PITCH + pair * 8, DH_MIX_PITCH);
                    multiply_octets<OCTETS>(run, A, B, pair, term);
                }
        }
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
            for (int v = 0; v < 4; v++)
                Q[octet][v] += run[octet][v];
    }
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            const int j = octet * 8 + lane % 4 * 2 + v % 2, d = first_column + warp * 16 + v / 2 * 8 + lane / 4;
            if (j < M && d < c.D)
                c.partial[(part * M + j) * K + i * c.D + d] = Q[octet][v];
        }
}

/* ---- instances ---------------------------------------------------------------------------------------- */

/* OCTETS is the number of octets of phi rows: n up to 2, 4 and 8. blocks: minimum on a multiprocessor, chosen without
 * register spills on every device. */
#define INSTANCE(name, suffix, element, octets, blocks)                   \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks)         \
        mhc_pre_mma_##name##_##suffix(const __grid_constant__ mhc_call c) \
    {                                                                     \
        name<element, octets>(c);                                         \
    }
#define INSTANCES(name, f16_blocks, bf16_blocks)   \
    INSTANCE(name, n2_f16, __half, 1, 2)           \
    INSTANCE(name, n2_bf16, __nv_bfloat16, 1, 2)   \
    INSTANCE(name, n4_f16, __half, 3, 2)           \
    INSTANCE(name, n4_bf16, __nv_bfloat16, 3, 2)   \
    INSTANCE(name, n8_f16, __half, 10, f16_blocks) \
    INSTANCE(name, n8_bf16, __nv_bfloat16, 10, bf16_blocks)

INSTANCES(project, 1, 1)
INSTANCES(dx, 1, 2)
INSTANCES(dphi, 2, 2)
