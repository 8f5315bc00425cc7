/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_mma.cu: pre's products on the tensor cores, for any dtype, n up to 8 and any strides.
 *
 * A block handles all rows of phi at once, in octets. A float32 factor is a sum of three bf16 terms, an f16 x is a sum
 * of two. Products of fourth and higher order are left out. Tensor cores truncate sums, so they sum short runs only;
 * float32 additions sum the runs. cp.async loads the tiles of the next steps while one step is multiplied.
 * mhc_pre_tokens.cu does the work that needs all columns of a token. It also stores the terms of dh_mix.
 *   split    the terms of phi gamma, once for a call: [term][row][stream][column], rows and columns padded with zeros
 *   project  a warp handles 16 tokens: sums of h_mix and of squares over a slice of a stream's columns
 *   dx       a warp handles 16 tokens and COLUMNS columns of a stream
 *   dphi     a warp handles 16 columns of a stream: their dphi_part over one part of the tokens */
#include "mhc_cuda.cuh"

#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/ptx.cuh"

enum {
    THREADS = MHC_CUDA_THREADS,
    WARPS = THREADS / 32,
    TILE = MHC_CUDA_MMA_TOKENS,
    COLUMNS = MHC_CUDA_MMA_COLUMNS,
    CHUNK = MHC_CUDA_MMA_CHUNK,
    RUN = MHC_CUDA_MMA_STAGE_TOKENS,
    TERMS = MHC_CUDA_MMA_TERMS
};
static_assert(TILE == 16 * WARPS && COLUMNS == 16 * WARPS, "each warp has 16 tokens and 16 columns");

/* bf16 terms of an element of x. */
template <typename E> constexpr int planes_of = sizeof(E) == 4 ? 3 : cot_is_f16<E> ? 2 : 1;
template <typename E> constexpr int vector_of = 16 / (int)sizeof(E);
/* Rows of phi in whole pairs of octets. */
template <int OCTETS> constexpr int rows_of = MHC_CUDA_MMA_ROWS(OCTETS * 8);

/* Copies 16 bytes of a row from column d on to shared memory: zero from column D on and in a row that is not valid. */
template <typename E>
static __device__ __forceinline__ void copy_vector(const mhc_call &c, E *to, const E *row, int64_t stride, bool valid,
                                                   int d)
{
    if (c.vectorized) {
        const bool inside = valid && d < c.D;
        cot_cp_async_zfill(inside, cot_shared_address(to), row + (inside ? d : 0));
    } else {
#pragma unroll
        for (int v = 0; v < vector_of<E>; v++)
            cot_from_f32(to + v, valid && d + v < c.D ? cot_to_f32(row[(int64_t)(d + v) * stride]) : 0.0f);
    }
}

/* The same as token_offset, without a division for a batch of one sequence. */
static __device__ __forceinline__ int64_t fast_token_offset(const mhc_call &c, const mhc_array &a, int64_t token)
{
    return c.tokens <= c.T ? token * a.stride[1] : token_offset(c, a, token);
}

/* ---- split -------------------------------------------------------------------------------------------- */

/* Loads eight elements of a parameter's row from column d on: zero from column D on. */
static __device__ __forceinline__ void load_8(const mhc_call &c, const mhc_array &a, int64_t offset, int d,
                                              float (&values)[8])
{
    const float *source = (const float *)a.data + offset;
    if (a.stride[1] == 1 && d + 8 <= c.D && (uintptr_t)source % 16 == 0) {
        const float4 low = *(const float4 *)source, high = *(const float4 *)(source + 4);
        values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
        values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    } else {
#pragma unroll
        for (int v = 0; v < 8; v++)
            values[v] = d + v < c.D ? source[v * a.stride[1]] : 0.0f;
    }
}

/* Grid: x = vectors of eight columns, y = rows. */
extern "C" __global__ void __launch_bounds__(THREADS) mhc_pre_mma_split(const __grid_constant__ mhc_call c)
{
    const int64_t vectors = c.term_columns / 8, vector = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int j = blockIdx.y, i = (int)(vector / vectors), d = (int)(vector % vectors) * 8;
    if (i >= c.n)
        return;
    float values[8] = {0};
    if (j < c.n * c.n + 2 * c.n) {
        load_8(c, c.phi, j * c.phi.stride[0] + (i * c.D + d) * c.phi.stride[1], d, values);
        if (present(c.gamma)) {
            float gamma[8];
            load_8(c, c.gamma, i * c.gamma.stride[0] + d * c.gamma.stride[1], d, gamma);
#pragma unroll
            for (int v = 0; v < 8; v++)
                values[v] *= gamma[v];
        }
    }
    uint32_t terms[4][TERMS];
#pragma unroll
    for (int v = 0; v < 4; v++)
        cot_split_bf16(values[2 * v], values[2 * v + 1], terms[v]);
    uint16_t *to = c.phi_terms + ((int64_t)j * c.n + i) * c.term_columns + d;
#pragma unroll
    for (int t = 0; t < TERMS; t++, to += (int64_t)gridDim.y * c.n * c.term_columns)
        *(uint4 *)to = make_uint4(terms[0][t], terms[1][t], terms[2][t], terms[3][t]);
}

/* ---- products ----------------------------------------------------------------------------------------- */

/* B fragments of two octets and 16 k, from rows that are octets: [8][k]. */
static __device__ __forceinline__ void load_B(uint32_t (&B)[4], const uint16_t *source, int pitch)
{
    const int lane = threadIdx.x % 32;
    cot_ldmatrix_x4(B, cot_shared_address(source + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 8));
}

/* B fragments of two octets and 16 k, from rows that are k: [16][octets]. */
static __device__ __forceinline__ void load_B_trans(uint32_t (&B)[4], const uint16_t *source, int pitch)
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

/* Splits the pair of elements of register r of an A fragment. */
template <typename E>
static __device__ __forceinline__ void split_pair(uint32_t (&A)[planes_of<E>][4], int r, float2 pair)
{
    uint32_t terms[planes_of<E>];
    cot_split_bf16(pair.x, pair.y, terms);
#pragma unroll
    for (int p = 0; p < planes_of<E>; p++)
        A[p][r] = terms[p];
}

/* Adds to sums. The tensor cores sum the next run from zero. */
template <int OCTETS, int SIZE>
static __device__ __forceinline__ void add_run(float (&sums)[SIZE][4], float (&run)[SIZE][4])
{
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
        for (int v = 0; v < 4; v++)
            sums[octet][v] += run[octet][v], run[octet][v] = 0.0f;
}

/* ---- project ------------------------------------------------------------------------------------------ */

enum { CHUNK_PITCH = MHC_CUDA_MMA_CHUNK_PITCH };

template <typename E, int OCTETS> struct project_stage {
    E x[TILE][CHUNK_PITCH];
    uint16_t phi[TERMS][rows_of<OCTETS>][CHUNK_PITCH];
};

/* The A fragments of 16 tokens and 16 columns, and the sums of squares of this lane's elements of both tokens. */
template <typename E>
static __device__ __forceinline__ void load_tokens(uint32_t (&A)[planes_of<E>][4], const E *x, float (&squares)[2])
{
    const int lane = threadIdx.x % 32;
    uint32_t raw[4];
    if constexpr (sizeof(E) == 2)
        cot_ldmatrix_x4(raw, cot_shared_address(x + lane % 16 * CHUNK_PITCH + lane / 16 * 8));
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float2 pair;
        if constexpr (sizeof(E) == 2)
            pair = cot_unpack_pair<E>(raw[r]);
        else
            pair = *(const float2 *)(x + (r % 2 * 8 + lane / 4) * CHUNK_PITCH + r / 2 * 8 + lane % 4 * 2);
        squares[r % 2] = fmaf(pair.y, pair.y, fmaf(pair.x, pair.x, squares[r % 2]));
        if constexpr (planes_of<E> == 1)
            A[0][r] = raw[r];
        else
            split_pair<E>(A, r, pair);
    }
}

template <typename E, int OCTETS> static __device__ __forceinline__ void project(const mhc_call &c)
{
    typedef project_stage<E, OCTETS> stage;
    constexpr int V = vector_of<E>, VECTORS = CHUNK / V, PASSES = TILE * VECTORS / THREADS, ROWS = rows_of<OCTETS>;
    constexpr int STAGES = MHC_CUDA_MMA_STAGES((int)sizeof(stage));
    extern __shared__ __align__(16) unsigned char memory[];
    stage *stages = (stage *)memory;
    const int M = c.n * c.n + 2 * c.n, S = MHC_CUDA_SUMS(c.n), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first_token = (int64_t)blockIdx.x * TILE;
    const int slices = (int)(c.slices / c.n), i = blockIdx.y / slices, begin = blockIdx.y % slices * c.slice_columns;
    const int end = begin + c.slice_columns < c.D ? begin + c.slice_columns : (int)c.D;
    const int chunks = (end - begin + CHUNK - 1) / CHUNK;
    const int load_column = threadIdx.x % VECTORS * V;
    const E *rows[PASSES];
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        const int64_t token = first_token + (threadIdx.x + p * THREADS) / VECTORS;
        rows[p] = (const E *)c.x.data + (token < c.tokens ? fast_token_offset(c, c.x, token) + i * c.x.stride[2] : 0);
    }
    auto load_stage = [&](int chunk) {
        stage &to = stages[chunk % STAGES];
        const int d = begin + chunk * CHUNK;
#pragma unroll
        for (int p = 0; p < PASSES; p++) {
            const int t = (threadIdx.x + p * THREADS) / VECTORS;
            copy_vector(c, &to.x[t][load_column], rows[p], c.x.stride[3], first_token + t < c.tokens, d + load_column);
        }
        for (int index = threadIdx.x; index < TERMS * OCTETS * CHUNK; index += THREADS) {
            const int vector = index % (CHUNK / 8), row = index / (CHUNK / 8) % (OCTETS * 8),
                      term = index / (CHUNK * OCTETS);
            cot_cp_async_zfill(true, cot_shared_address(&to.phi[term][row][vector * 8]),
                               c.phi_terms + (((int64_t)term * ROWS + row) * c.n + i) * c.term_columns + d +
                                   vector * 8);
        }
    };
#pragma unroll
    for (int chunk = 0; chunk < STAGES - 1; chunk++) {
        if (chunk < chunks)
            load_stage(chunk);
        cot_cp_async_commit_group();
    }
    float sums[OCTETS][4] = {0}, squares[2] = {0};
    for (int chunk = 0; chunk < chunks; chunk++) {
        cot_cp_async_wait_group<STAGES - 2>();
        __syncthreads(); /* all warps have read the previous chunk, whose stage is loaded next */
        if (chunk + STAGES - 1 < chunks)
            load_stage(chunk + STAGES - 1);
        cot_cp_async_commit_group();
        const stage &s = stages[chunk % STAGES];
        float run[OCTETS][4] = {0}, run_squares[2] = {0};
        /* Columns that the tensor cores sum in one run. With more than one plane there are more products, and more
         * would be truncated. */
        constexpr int RUN_COLUMNS = planes_of < E >> 1 ? 16 : CHUNK;
#pragma unroll
        for (int first = 0; first < CHUNK; first += RUN_COLUMNS) {
            uint32_t A[RUN_COLUMNS / 16][planes_of<E>][4];
#pragma unroll
            for (int k = 0; k < RUN_COLUMNS; k += 16)
                load_tokens<E>(A[k / 16], &s.x[warp * 16][first + k], run_squares);
#pragma unroll
            for (int term = TERMS - 1; term >= 0; term--)
#pragma unroll
                for (int k = 0; k < RUN_COLUMNS; k += 16)
#pragma unroll
                    for (int pair = 0; pair < OCTETS; pair += 2) {
                        uint32_t B[4];
                        load_B(B, &s.phi[term][pair * 8][first + k], CHUNK_PITCH);
                        multiply_octets<OCTETS>(run, A[k / 16], B, pair, term);
                    }
            add_run<OCTETS>(sums, run);
        }
        squares[0] += run_squares[0], squares[1] += run_squares[1];
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t token = first_token + warp * 16 + half * 8 + lane / 4;
        float *to = c.sums + (token * c.slices + blockIdx.y) * S, sum = squares[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (token >= c.tokens)
            continue;
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
            for (int v = 0; v < 2; v++) {
                const int j = octet * 8 + lane % 4 * 2 + v;
                if (j < M)
                    to[j] = sums[octet][half * 2 + v];
            }
        if (lane % 4 == 0)
            to[M] = sum;
    }
}

/* ---- dx ----------------------------------------------------------------------------------------------- */

enum { COLUMNS_PITCH = COLUMNS + 8, GROUP = 32 /* columns: a lane has eight of them, in 16 or 32 bytes */ };

/* Offset of stream i of token (b, t), or of the row of a tensor without streams. */
static __device__ __forceinline__ int64_t row_offset(const mhc_array &a, uint32_t b, uint32_t t, int i)
{
    return b * a.stride[0] + t * a.stride[1] + i * a.stride[2];
}

/* A lane's eight columns of a row. The elements are unpacked only where they are used. */
template <typename E> struct row_piece {
    cot_vector<E, 8> raw;

    __device__ __forceinline__ void load(const mhc_call &c, const mhc_array &a, int64_t offset, int64_t stride,
                                         bool valid, int d)
    {
        const E *row = (const E *)a.data + offset;
        if (c.vectorized) {
            if (valid && d < c.D)
                raw = cot_load_vector<E, 8>(row + d);
        } else {
            float values[8];
#pragma unroll
            for (int v = 0; v < 8; v++)
                values[v] = valid && d + v < c.D ? cot_to_f32(row[(int64_t)(d + v) * stride]) : 0.0f;
            cot_pack(raw, values); /* exact: the values have the type E */
        }
    }
};

/* Stores a lane's eight columns of a row of dx. */
template <typename E>
static __device__ __forceinline__ void store_piece(const mhc_call &c, int64_t offset, int d, const float (&values)[8])
{
    E *row = (E *)c.dx.data + offset;
    if (c.vectorized) {
        cot_store_vector<E, 8>(row + d, values);
    } else {
#pragma unroll
        for (int v = 0; v < 8; v++)
            if (d + v < c.D)
                cot_from_f32(row + (int64_t)(d + v) * c.dx.stride[3], values[v]);
    }
}

/* Stores the block's columns of the terms of phi gamma in shared memory. In each group of 32 columns, the columns 8 q +
 * 2 o and 8 q + 2 o + 1 become columns 2 q and 2 q + 1 of octet o. So a lane's columns of the four octets are eight
 * consecutive columns of x. */
template <int ROWS>
static __device__ __forceinline__ void stage_phi(const mhc_call &c, uint16_t *phi, int i, int first_column)
{
#pragma unroll 4
    for (int index = threadIdx.x; index < TERMS * ROWS * COLUMNS / 8; index += THREADS) {
        const int vector = index % (COLUMNS / 8), row = index / (COLUMNS / 8);
        const uint4 words =
            *(const uint4 *)(c.phi_terms + ((int64_t)row * c.n + i) * c.term_columns + first_column + vector * 8);
        uint32_t *to = (uint32_t *)(phi + row * COLUMNS_PITCH + vector / 4 * GROUP) + vector % 4;
        to[0] = words.x, to[4] = words.y, to[8] = words.z, to[12] = words.w;
    }
}

template <typename E, int OCTETS> static __device__ __forceinline__ void dx(const mhc_call &c)
{
    constexpr int ROWS = rows_of<OCTETS>, STEPS = ROWS / 16;
    extern __shared__ __align__(16) unsigned char memory[];
    uint16_t *phi = (uint16_t *)memory; /* [term][row][column] */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = blockIdx.y % c.n;
    const int first_column = blockIdx.y / c.n * COLUMNS;
    const bool post_present = present(c.dx_post);
    stage_phi<ROWS>(c, phi, i, first_column);
    __syncthreads();
    for (int64_t tile = blockIdx.x; tile * TILE < c.tokens; tile += gridDim.x) {
        /* This lane handles `token` and `token` + 8. */
        const int64_t token = tile * TILE + warp * 16 + lane / 4;
        if (token - lane / 4 >= c.tokens)
            break;
        uint32_t A[STEPS][TERMS][4];
        float factor[2], h_pre[2];
        uint32_t b[2], t_in_b[2];
        bool valid[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            valid[h] = token + h * 8 < c.tokens;
            const uint32_t t = valid[h] ? (uint32_t)token + h * 8 : 0;
            b[h] = t / (uint32_t)c.T, t_in_b[h] = t - b[h] * (uint32_t)c.T;
            factor[h] = c.factor[t];
            h_pre[h] = load_f32(c.h_pre, row_offset(c.h_pre, b[h], t_in_b[h], i));
#pragma unroll
            for (int term = 0; term < TERMS; term++) {
                const uint16_t *mix = c.mix_terms + ((int64_t)term * c.tokens + t) * ROWS + lane % 4 * 2;
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    A[step][term][h] = *(const uint32_t *)(mix + step * 16);
                    A[step][term][2 + h] = *(const uint32_t *)(mix + step * 16 + 8);
                }
            }
        }
#pragma unroll 1
        for (int group = 0; group < COLUMNS; group += GROUP) {
            const int d = first_column + group + lane % 4 * 8;
            if (first_column + group >= c.D)
                break;
            row_piece<E> x[2], dh_in[2], post[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                x[h].load(c, c.x, row_offset(c.x, b[h], t_in_b[h], i), c.x.stride[3], valid[h], d);
                dh_in[h].load(c, c.dh_in, row_offset(c.dh_in, b[h], t_in_b[h], 0), c.dh_in.stride[2], valid[h], d);
                if (post_present)
                    post[h].load(c, c.dx_post, row_offset(c.dx_post, b[h], t_in_b[h], i), c.dx_post.stride[3], valid[h],
                                 d);
            }
            float sums[4][4] = {0};
#pragma unroll
            for (int step = 0; step < STEPS; step++)
#pragma unroll
                for (int term = TERMS - 1; term >= 0; term--)
#pragma unroll
                    for (int pair = 0; pair < 4; pair += 2) {
                        uint32_t B[4];
                        load_B_trans(B, phi + (term * ROWS + step * 16) * COLUMNS_PITCH + group + pair * 8,
                                     COLUMNS_PITCH);
                        multiply_octets<4>(sums, A[step], B, pair, term);
                    }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float x_values[8], dh_in_values[8], post_values[8], out[8];
                cot_unpack(x[h].raw, x_values);
                cot_unpack(dh_in[h].raw, dh_in_values);
#pragma unroll
                for (int v = 0; v < 8; v++)
                    out[v] = fmaf(h_pre[h], dh_in_values[v],
                                  fmaf(factor[h], x_values[v], sums[v / 2][2 * h + v % 2] / MHC_CUDA_MIX_SCALE));
                if (post_present) {
                    cot_unpack(post[h].raw, post_values);
#pragma unroll
                    for (int v = 0; v < 8; v++)
                        out[v] += post_values[v];
                }
                if (!valid[h] || d >= c.D)
                    continue;
                if (sizeof(E) == 2 && c.f32_dx)
                    store_piece<float>(c, row_offset(c.dx, b[h], t_in_b[h], i), d, out);
                else
                    store_piece<E>(c, row_offset(c.dx, b[h], t_in_b[h], i), d, out);
            }
        }
    }
}

/* ---- dphi --------------------------------------------------------------------------------------------- */

/* Padding places the elements that one instruction loads in different banks. */
template <typename E> constexpr int x_pitch_of = MHC_CUDA_MMA_X_PITCH((int)sizeof(E));
template <int OCTETS> constexpr int mix_pitch_of = rows_of<OCTETS> + 8;

template <typename E, int OCTETS> struct dphi_stage {
    E x[RUN][x_pitch_of<E>];
    uint16_t dh_mix[TERMS][RUN][mix_pitch_of<OCTETS>];
};

/* The A fragments of 16 columns and 16 tokens, from rows that are tokens. */
template <typename E> static __device__ __forceinline__ void load_columns(uint32_t (&A)[planes_of<E>][4], const E *x)
{
    constexpr int PITCH = x_pitch_of<E>;
    const int lane = threadIdx.x % 32;
    uint32_t raw[4];
    if constexpr (sizeof(E) == 2)
        cot_ldmatrix_x4_trans(raw, cot_shared_address(x + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8));
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if constexpr (planes_of<E> == 1) {
            A[0][r] = raw[r];
        } else if constexpr (sizeof(E) == 2) {
            split_pair<E>(A, r, cot_unpack_pair<E>(raw[r]));
        } else {
            const E *from = x + (r / 2 * 8 + lane % 4 * 2) * PITCH + r % 2 * 8 + lane / 4;
            split_pair<E>(A, r, make_float2(from[0], from[PITCH]));
        }
    }
}

template <typename E, int OCTETS> static __device__ __forceinline__ void dphi(const mhc_call &c)
{
    typedef dphi_stage<E, OCTETS> stage;
    constexpr int V = vector_of<E>, VECTORS = COLUMNS / V, PASSES = RUN * VECTORS / THREADS, ROWS = rows_of<OCTETS>;
    constexpr int STAGES = MHC_CUDA_MMA_STAGES((int)sizeof(stage));
    extern __shared__ __align__(16) unsigned char memory[];
    stage *stages = (stage *)memory;
    const int M = c.n * c.n + 2 * c.n, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = (int)((c.D + COLUMNS - 1) / COLUMNS), i = blockIdx.x / tiles;
    const int first_column = blockIdx.x % tiles * COLUMNS, load_column = threadIdx.x % VECTORS * V;
    const int64_t part = blockIdx.y, begin = part * c.part_length, K = c.n * c.D;
    const int64_t end = begin + c.part_length < c.tokens ? begin + c.part_length : c.tokens;
    const int runs = (int)((end - begin + RUN - 1) / RUN);
    const E *x = (const E *)c.x.data + i * c.x.stride[2];
    auto load_stage = [&](int run) {
        stage &to = stages[run % STAGES];
        const int64_t first = begin + run * RUN;
#pragma unroll
        for (int p = 0; p < PASSES; p++) {
            const int t = (threadIdx.x + p * THREADS) / VECTORS;
            const bool valid = first + t < end;
            copy_vector(c, &to.x[t][load_column], x + (valid ? fast_token_offset(c, c.x, first + t) : 0), c.x.stride[3],
                        valid, first_column + load_column);
        }
        for (int index = threadIdx.x; index < TERMS * RUN * ROWS / 8; index += THREADS) {
            const int vector = index % (ROWS / 8), t = index / (ROWS / 8) % RUN, term = index / (ROWS / 8) / RUN;
            const bool valid = first + t < end;
            cot_cp_async_zfill(valid, cot_shared_address(&to.dh_mix[term][t][vector * 8]),
                               c.mix_terms + ((int64_t)term * c.tokens + (valid ? first + t : 0)) * ROWS + vector * 8);
        }
    };
#pragma unroll
    for (int run = 0; run < STAGES - 1; run++) {
        if (run < runs)
            load_stage(run);
        cot_cp_async_commit_group();
    }
    float dphi_part[OCTETS][4] = {0};
    for (int run = 0; run < runs; run++) {
        cot_cp_async_wait_group<STAGES - 2>();
        __syncthreads(); /* all warps have read the previous run, whose stage is loaded next */
        if (run + STAGES - 1 < runs)
            load_stage(run + STAGES - 1);
        cot_cp_async_commit_group();
        const stage &s = stages[run % STAGES];
        float sums[OCTETS][4] = {0};
        uint32_t A[RUN / 16][planes_of<E>][4];
#pragma unroll
        for (int k = 0; k < RUN; k += 16)
            load_columns<E>(A[k / 16], &s.x[k][warp * 16]);
#pragma unroll
        for (int term = TERMS - 1; term >= 0; term--)
#pragma unroll
            for (int k = 0; k < RUN; k += 16)
#pragma unroll
                for (int pair = 0; pair < OCTETS; pair += 2) {
                    uint32_t B[4];
                    load_B_trans(B, &s.dh_mix[term][k][pair * 8], mix_pitch_of<OCTETS>);
                    multiply_octets<OCTETS>(sums, A[k / 16], B, pair, term);
                }
        add_run<OCTETS>(dphi_part, sums);
    }
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            const int j = octet * 8 + lane % 4 * 2 + v % 2, d = first_column + warp * 16 + v / 2 * 8 + lane / 4;
            if (j < M && d < c.D)
                c.dphi_parts[(part * M + j) * K + i * c.D + d] = dphi_part[octet][v];
        }
}

/* ---- instances ---------------------------------------------------------------------------------------- */

/* OCTETS is the number of octets of phi rows: n up to 2, 4 and 8. The tables of mhc_pre_*_launch.c must have the same
 * stage sizes. blocks: minimum on a multiprocessor, chosen without register spills on every device. */
static_assert(sizeof(project_stage<float, 3>) == MHC_CUDA_MMA_PROJECT_STAGE(4, 24) &&
                  sizeof(project_stage<__half, 10>) == MHC_CUDA_MMA_PROJECT_STAGE(2, 80) &&
                  sizeof(dphi_stage<float, 10>) == MHC_CUDA_MMA_DPHI_STAGE(4, 80) &&
                  sizeof(dphi_stage<__half, 1>) == MHC_CUDA_MMA_DPHI_STAGE(2, 8),
              "the host must know the stages");
#define INSTANCE(name, suffix, element, octets, blocks)                   \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks)         \
        mhc_pre_mma_##name##_##suffix(const __grid_constant__ mhc_call c) \
    {                                                                     \
        name<element, octets>(c);                                         \
    }
#define INSTANCES(name, a, b, c, d, e, f)        \
    INSTANCE(name, n2_f32, float, 1, a)          \
    INSTANCE(name, n2_f16, __half, 1, b)         \
    INSTANCE(name, n2_bf16, __nv_bfloat16, 1, c) \
    INSTANCE(name, n4_f32, float, 3, d)          \
    INSTANCE(name, n4_f16, __half, 3, e)         \
    INSTANCE(name, n4_bf16, __nv_bfloat16, 3, f) \
    INSTANCE(name, n8_f32, float, 10, 1)         \
    INSTANCE(name, n8_f16, __half, 10, 1)        \
    INSTANCE(name, n8_bf16, __nv_bfloat16, 10, 1)

INSTANCES(project, 2, 2, 3, 2, 1, 2)
INSTANCES(dx, 2, 2, 2, 1, 2, 2)
INSTANCES(dphi, 3, 3, 3, 2, 2, 2)
