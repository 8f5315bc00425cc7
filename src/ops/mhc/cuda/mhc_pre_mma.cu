/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_mma.cu: the products of mhc_pre_tiles.cu on the tensor cores, for x of f16 and bf16: the same sums, of tiles of
 * TILE tokens and COLUMNS columns of a stream, of all rows of phi at once, in octets. f32 factors are sums of
 * three bf16 terms, whose products are left out from the fourth order on; x of f16 is two such terms.
 * Tensor cores cut sums off, so short runs of them are added up by float32 additions.
 *   project  a warp 16 tokens, all of a chunk's columns: sums of h_mix and squares, of a slice of MHC_CUDA_SLICE columns
 *   dx       a warp 16 tokens and half of the columns, twice
 *   dphi     a warp 16 columns: Q, over a part of the tokens */
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
static_assert(TILE == 16 * WARPS && COLUMNS == 16 * WARPS, "sixteen of either a warp");

template <typename E> constexpr int planes_of = cot_is_f16<E> ? 2 : 1;

/* Elements 16 bytes beyond the row keep the eight rows that ldmatrix reads in different banks. */
template <int WIDTH> constexpr int pitch_of = WIDTH + 8;

/* V elements of a row from column d on, zero from column D on and where the row is not there. */
template <typename E, int V>
static __device__ __forceinline__ void load_row(const mhc_call &c, const mhc_array &a, bool there, int64_t at,
                                                int64_t stride, int d, float (&values)[V])
{
    const E *from = (const E *)a.data + at;
    if (c.vectors && there && d + V <= c.D) {
        cot_unpack(cot_load_vector<E, V>(from + d), values);
    } else {
#pragma unroll
        for (int v = 0; v < V; v++)
            values[v] = there && d + v < c.D ? cot_to_f32(from[(int64_t)(d + v) * stride]) : 0.0f;
    }
}

/* Eight values as bf16 terms, one plane after the other. */
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

/* Can eight elements of a parameter's row be read as two vectors? */
static __device__ __forceinline__ bool in_vectors(const mhc_call &c, const mhc_array &a)
{
    return a.stride[1] == 1 && a.stride[0] % 4 == 0 && (uintptr_t)a.data % 16 == 0 && c.D % 8 == 0;
}

static __device__ __forceinline__ void load_eight(const mhc_call &c, const mhc_array &a, bool vectors, int64_t at,
                                                  int d, float (&values)[8])
{
    const float *from = (const float *)a.data + at;
    if (vectors && d < c.D) {
        const float4 low = *(const float4 *)from, high = *(const float4 *)(from + 4);
        values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
        values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    } else {
#pragma unroll
        for (int v = 0; v < 8; v++)
            values[v] = d + v < c.D ? from[v * a.stride[1]] : 0.0f;
    }
}

/* Eight elements of row j of phi gamma, from column d of stream i on. */
static __device__ __forceinline__ void load_phi(const mhc_call &c, bool vectors, int j, int i, int d,
                                                float (&values)[8])
{
    const int M = c.n * c.n + 2 * c.n;
#pragma unroll
    for (int v = 0; v < 8; v++)
        values[v] = 0.0f;
    if (j >= M)
        return;
    load_eight(c, c.phi, vectors, j * c.phi.stride[0] + (i * c.D + d) * c.phi.stride[1], d, values);
    if (given(c.gamma)) {
        float gamma[8];
        load_eight(c, c.gamma, vectors, i * c.gamma.stride[0] + d * c.gamma.stride[1], d, gamma);
#pragma unroll
        for (int v = 0; v < 8; v++)
            values[v] *= gamma[v];
    }
}

static __device__ __forceinline__ bool phi_in_vectors(const mhc_call &c)
{
    return in_vectors(c, c.phi) && (!given(c.gamma) || in_vectors(c, c.gamma));
}

/* ROWS of phi gamma, WIDTH columns of stream i from d on, as terms in shared memory. */
template <int ROWS, int WIDTH, int PITCH>
static __device__ __forceinline__ void stage_phi(const mhc_call &c, bool vectors, __nv_bfloat16 *phi, int i, int d)
{
    for (int number = threadIdx.x; number < ROWS * WIDTH / 8; number += THREADS) {
        const int row = number / (WIDTH / 8), column = number % (WIDTH / 8) * 8;
        float values[8];
        load_phi(c, vectors, row, i, d + column, values);
        store_terms<TERMS>(phi + row * PITCH + column, ROWS * PITCH, values);
    }
}

/* Fragments of B of two octets and sixteen of k. From rows of octets [8][k] ... */
static __device__ __forceinline__ void load_rows(uint32_t (&B)[4], const __nv_bfloat16 *from, int pitch)
{
    const int lane = threadIdx.x % 32;
    cot_ldmatrix_x4(B, cot_shared_address(from + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 8));
}

/* ... and from rows of k [16][octets]. */
static __device__ __forceinline__ void load_columns(uint32_t (&B)[4], const __nv_bfloat16 *from, int pitch)
{
    const int lane = threadIdx.x % 32;
    cot_ldmatrix_x4_trans(B, cot_shared_address(from + lane % 16 * pitch + lane / 16 * 8));
}

/* Octets `pair` and the next of c += A times their fragments of term `term`: products of the orders that count, the smallest
 * first. */
template <int OCTETS, int ROOM, int PLANES>
static __device__ __forceinline__ void multiply_octets(float (&c)[ROOM][4], const uint32_t (&A)[PLANES][4],
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
    constexpr int PLANES = planes_of<E>, EVEN = (OCTETS + 1) / 2 * 2, ROWS = EVEN * 8;
    constexpr int RUN_COLUMNS =
        PLANES > 1 ? 16 : CHUNK; /* that the tensor cores add up: more products, more is cut off */
    extern __shared__ __align__(16) unsigned char memory[];
    __nv_bfloat16 *x = (__nv_bfloat16 *)memory, *phi = x + PLANES * TILE * X_PITCH;
    const int M = c.n * c.n + 2 * c.n, S = MHC_CUDA_SUMS(c.n), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first_token = (int64_t)blockIdx.x * TILE, own = first_token + threadIdx.x / 2;
    const int slices = (int)(c.slices / c.n), i = blockIdx.y / slices, begin = blockIdx.y % slices * MHC_CUDA_SLICE;
    const int end = begin + MHC_CUDA_SLICE < c.D ? begin + MHC_CUDA_SLICE : (int)c.D;
    const bool there = own < c.tokens, vectors = phi_in_vectors(c);
    const int64_t at = there ? token_at(c, c.x, own) + i * c.x.stride[2] : 0;
    float sums[EVEN][4] = {0}, squares = 0.0f;
    for (int d = begin; d < end; d += CHUNK) {
        float run = 0.0f;
        __syncthreads();
#pragma unroll
        for (int v = 0; v < CHUNK / 16; v++) {
            const int column = threadIdx.x % 2 * (CHUNK / 2) + v * 8;
            float values[8];
            load_row<E, 8>(c, c.x, there, at, c.x.stride[3], d + column, values);
#pragma unroll
            for (int u = 0; u < 8; u++)
                run = fmaf(values[u], values[u], run);
            store_terms<PLANES>(x + threadIdx.x / 2 * X_PITCH + column, TILE * X_PITCH, values);
        }
        squares += run;
        stage_phi<ROWS, CHUNK, X_PITCH>(c, vectors, phi, i, d);
        __syncthreads();
        float part[EVEN][4] = {0};
#pragma unroll(PLANES > 1 ? 1 : CHUNK / 16)
        for (int k = 0; k < CHUNK; k += 16) {
            uint32_t A[PLANES][4];
#pragma unroll
            for (int p = 0; p < PLANES; p++)
                cot_ldmatrix_x4(
                    A[p], cot_shared_address(x + (p * TILE + warp * 16 + lane % 16) * X_PITCH + k + lane / 16 * 8));
#pragma unroll
            for (int pair = 0; pair < EVEN; pair += 2)
#pragma unroll
                for (int term = TERMS - 1; term >= 0; term--) {
                    uint32_t B[4];
                    load_rows(B, phi + (term * ROWS + pair * 8) * X_PITCH + k, X_PITCH);
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
    if (there && threadIdx.x % 2 == 0)
        c.sums[(own * c.slices + blockIdx.y) * S + M] = squares;
}

/* ---- dx ----------------------------------------------------------------------------------------------- */

enum { WIDE_PITCH = pitch_of<COLUMNS>, GROUPS = COLUMNS / 2 / 16 };

/* dh_mix of a token: two of its elements. */
static __device__ __forceinline__ float2 load_mix(const mhc_call &c, int64_t token, int M, int j)
{
    const float *from = c.dh_mix + token * M + j;
    return make_float2(token < c.tokens && j < M ? from[0] : 0.0f, token < c.tokens && j + 1 < M ? from[1] : 0.0f);
}

/* Where stream i of token t of b begins, or the row of a tensor without streams. */
static __device__ __forceinline__ int64_t row_at(const mhc_array &a, uint32_t b, uint32_t t, int i)
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
    const bool vectors = phi_in_vectors(c);
    stage_phi<ROWS, COLUMNS, WIDE_PITCH>(c, vectors, phi, i, first_column);
    __syncthreads();
    for (int half = 0; half < 2; half++) {
        const int64_t token = (int64_t)blockIdx.x * TILE + half * (TILE / 2) + warp / 2 * 16 + lane / 4; /* and 8 on */
        uint32_t A[STEPS][TERMS][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int a = 0; a < 4; a++) {
                const float2 pair = load_mix(c, token + a % 2 * 8, M, step * 16 + a / 2 * 8 + lane % 4 * 2);
                uint32_t terms[TERMS];
                cot_split_bf16(pair.x, pair.y, terms);
#pragma unroll
                for (int t = 0; t < TERMS; t++)
                    A[step][t][a] = terms[t];
            }
        float factor[2], h_pre[2];
        uint32_t b[2], of_b[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t t = token + h * 8 < c.tokens ? (uint32_t)token + h * 8 : 0;
            b[h] = t / (uint32_t)c.T, of_b[h] = t - b[h] * (uint32_t)c.T;
            factor[h] = c.factor[t];
            h_pre[h] = load_f32(c.h_pre, token_at(c, c.h_pre, t) + i * c.h_pre.stride[2]);
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
                    load_columns(B[t], phi + (t * ROWS + step * 16) * WIDE_PITCH + column, WIDE_PITCH);
#pragma unroll
                for (int order = TERMS - 1; order >= 0; order--) /* the smallest products first */
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
                    const bool there = token + h * 8 < c.tokens;
                    float x[2], dh_in[2], post[2] = {0}, out[2];
                    load_row<E, 2>(c, c.x, there, row_at(c.x, b[h], of_b[h], i), c.x.stride[3], d, x);
                    load_row<E, 2>(c, c.dh_in, there, row_at(c.dh_in, b[h], of_b[h], 0), c.dh_in.stride[2], d, dh_in);
                    if (given(c.dx_post))
                        load_row<E, 2>(c, c.dx_post, there, row_at(c.dx_post, b[h], of_b[h], i), c.dx_post.stride[3], d,
                                       post);
#pragma unroll
                    for (int v = 0; v < 2; v++)
                        out[v] = fmaf(h_pre[h], dh_in[v], fmaf(factor[h], x[v], sums[o][2 * h + v])) + post[v];
                    E *to = (E *)c.dx.data + row_at(c.dx, b[h], of_b[h], i);
                    if (there && c.vectors && d + 2 <= c.D)
                        cot_store_vector<E, 2>(to + d, out);
                    else if (there)
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
    constexpr int PLANES = planes_of<E>, EVEN = (OCTETS + 1) / 2 * 2, MIX_PITCH = pitch_of<EVEN * 8>;
    constexpr int VECTORS = COLUMNS / 8;
    extern __shared__ __align__(16) unsigned char memory[];
    __nv_bfloat16 *x = (__nv_bfloat16 *)memory, *mix = x + PLANES * RUN * WIDE_PITCH;
    const int M = c.n * c.n + 2 * c.n, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = (int)((c.D + COLUMNS - 1) / COLUMNS), i = blockIdx.x / tiles;
    const int first_column = blockIdx.x % tiles * COLUMNS;
    const int64_t part = blockIdx.y, begin = part * c.part_length, K = c.n * c.D;
    const int64_t end = begin + c.part_length < c.tokens ? begin + c.part_length : c.tokens;
    float Q[OCTETS][4] = {0};
    for (int64_t first = begin; first < end; first += RUN) {
        __syncthreads();
#pragma unroll
        for (int number = threadIdx.x; number < RUN * VECTORS; number += THREADS) {
            const int64_t token = first + number / VECTORS;
            const int column = number % VECTORS * 8;
            const bool there = token < end;
            float values[8];
            load_row<E, 8>(c, c.x, there, there ? token_at(c, c.x, token) + i * c.x.stride[2] : 0, c.x.stride[3],
                           first_column + column, values);
            store_terms<PLANES>(x + number / VECTORS * WIDE_PITCH + column, RUN * WIDE_PITCH, values);
        }
        for (int number = threadIdx.x; number < RUN * EVEN; number += THREADS) {
            const int64_t token = first + number / EVEN;
            const int j = number % EVEN * 8;
            float values[8];
#pragma unroll
            for (int v = 0; v < 8; v++)
                values[v] = token < end && j + v < M ? c.dh_mix[token * M + j + v] : 0.0f;
            store_terms<TERMS>(mix + number / EVEN * MIX_PITCH + j, RUN * MIX_PITCH, values);
        }
        __syncthreads();
        float run[OCTETS][4] = {0};
#pragma unroll
        for (int k = 0; k < RUN; k += 16) {
            uint32_t A[PLANES][4];
#pragma unroll
            for (int p = 0; p < PLANES; p++)
                cot_ldmatrix_x4_trans(A[p],
                                      cot_shared_address(x + (p * RUN + k + lane / 16 * 8 + lane % 8) * WIDE_PITCH +
                                                         warp * 16 + lane / 8 % 2 * 8));
#pragma unroll
            for (int pair = 0; pair < EVEN; pair += 2)
#pragma unroll
                for (int term = TERMS - 1; term >= 0; term--) {
                    uint32_t B[4];
                    load_columns(B, mix + (term * RUN + k) * MIX_PITCH + pair * 8, MIX_PITCH);
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

/* By the octets that rows of phi come in: n up to 2, 4, 8. blocks: of a multiprocessor, at least; without spills for each
 * device. */
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
