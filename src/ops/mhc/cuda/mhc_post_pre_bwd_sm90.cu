/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_post_pre_bwd_sm90.cu: the second half of post_pre's backward for n = 4, f16 and bf16: g and the gradients of
 * post, from the records that pre's backward has stored. g stays in registers.
 *
 *   g = dh_mix (phi gamma) + factor y + h_pre dh_in + dy
 *   df = h_post g,  dx = h_res g       stored
 *   dh_post = f g,  dh_res = x g      summed over the block's columns; mhc_post_pre_sum_slices adds the slices
 *
 * factor is c of mhc.h. y is computed again from x and f, and rounded.
 *
 * Block (x, y) has 128 columns of all four streams. Its warps have every (8 gridDim.y)-th tile of 16 tokens and never
 * wait for each other after the terms of phi gamma are in shared memory. A step of a warp is 32 columns of its tile. A
 * lane handles 8 columns of two tokens. cp.async copies the inputs of the next step while a step is multiplied. Each
 * lane copies what it reads itself; only records and coefficients are read by other lanes of the warp.
 *
 * dh_mix and phi gamma have three bf16 terms each. The products of terms i and j (from 0) with i + j > 2 are left out:
 * g has float32 precision. */
#include "mhc_mma.cuh"

enum {
    N = MHC_SM90_N,
    M = MHC_SM90_M,
    TILE = MHC_SM90_TILE,
    COLUMNS = MHC_SM90_POST_PRE_COLUMNS,
    GROUP_COLUMNS = 32, /* columns of a step */
    COLUMN_GROUPS = COLUMNS / GROUP_COLUMNS,
    THREADS = MHC_SM90_POST_PRE_THREADS,
    WARPS = THREADS / 32,
    TERMS = 3,
    PITCH = COLUMNS + 8, /* elements of a row of phi: an odd number of 16-byte units */
    SUMS = N * N + N,
    LANE_SUMS = SUMS / 4, /* a token has four lanes */
    RECORD_UNITS = sizeof(mhc_token_record) / 16,
    X = 0, /* first pieces of the tensors */
    DY = N,
    F = 2 * N,
    DH_IN = 2 * N + 1,
    PIECES = 2 * N + 2
};

struct warp_memory {
    uint4 pieces[2][PIECES][32];       /* of each lane: 8 columns of two tokens */
    mhc_token_record records[2][TILE]; /* of this tile and the next */
    float coefficients[2][TILE][SUMS]; /* h_res[i][o], then h_post */
};
struct shared_memory {
    uint16_t phi[TERMS][N][M][PITCH]; /* the columns of a group are permuted, see stage_phi */
    warp_memory warps[WARPS];
};
static_assert(sizeof(shared_memory) <= MHC_SM90_SHARED_BYTES, "must fit in a block's shared memory");
extern __shared__ __align__(16) unsigned char memory[];

/* The terms of phi gamma / MHC_CUDA_MIX_SCALE of the block's columns. In each group of 32 columns, the columns 8 q + 2
 * o and 8 q + 2 o + 1 become columns 2 q and 2 q + 1 of octet o. So a lane's columns of the four octets are eight
 * consecutive columns of x. */
static __device__ __forceinline__ void stage_phi(const mhc_call &c, shared_memory &s, int first_column)
{
#pragma unroll 4
    for (int index = threadIdx.x; index < N * M * COLUMNS / 2; index += THREADS) {
        const int column = index % (COLUMNS / 2) * 2, row = index / (COLUMNS / 2), i = row / M, j = row % M;
        const int64_t d = first_column + column;
        float values[2] = {0, 0};
#pragma unroll
        for (int v = 0; v < 2; v++)
            if (d < c.D) {
                const float gamma =
                    present(c.gamma) ? load_f32(c.gamma, i * c.gamma.stride[0] + (d + v) * c.gamma.stride[1]) : 1.0f;
                values[v] = load_f32(c.phi, j * c.phi.stride[0] + (i * c.D + d + v) * c.phi.stride[1]) *
                            (gamma / MHC_CUDA_MIX_SCALE);
            }
        uint32_t terms[TERMS];
        cot_split_bf16(values[0], values[1], terms);
        const int to = column / GROUP_COLUMNS * GROUP_COLUMNS + column % 8 / 2 * 8 + column % GROUP_COLUMNS / 8 * 2;
#pragma unroll
        for (int term = 0; term < TERMS; term++)
            *(uint32_t *)&s.phi[term][i][j][to] = terms[term];
    }
    __syncthreads();
}

/* Offset of a token in a tensor whose tokens have one stride. */
static __device__ __forceinline__ int64_t row_offset(const mhc_array &a, uint32_t token)
{
    return token * a.stride[1];
}

/* The first of the lane's two tokens of a tile. The other one is 8 further. */
static __device__ __forceinline__ uint32_t lane_token(int tile)
{
    return (uint32_t)tile * TILE + threadIdx.x % 32 / 4;
}

/* Like cot_cp_async_zfill. Loads the whole line of 128 bytes into the L2 cache: the next step copies its other half. */
static __device__ __forceinline__ void copy_with_line(bool there, uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}

/* VECTOR: all rows are whole aligned vectors. Otherwise the data of a tensor is aligned to its elements only. */
template <typename E, bool VECTOR>
static __device__ __forceinline__ void copy_piece(uint4 *to, const mhc_array &a, int64_t offset, bool valid)
{
    const E *from = (const E *)a.data + offset;
    if (VECTOR) {
        copy_with_line(valid, cot_shared_address(to), from); /* does not read if not valid */
    } else {
#pragma unroll 1
        for (int v = 0; v < 8; v++)
            cot_from_f32((E *)to + v, valid ? cot_to_f32(from[v]) : 0.0f);
    }
}

/* Begins to copy the lane's inputs of columns d to d + 7. */
template <typename E, bool VECTOR>
static __device__ __forceinline__ void copy_inputs(const mhc_call &c, warp_memory &s, int tile, int d)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t token = lane_token(tile) + half * 8;
        const bool valid = token < c.tokens;
#pragma unroll
        for (int i = 0; i < N; i++)
            copy_piece<E, VECTOR>(&s.pieces[half][X + i][lane], c.x, row_offset(c.x, token) + i * c.x.stride[2] + d,
                                  valid);
        copy_piece<E, VECTOR>(&s.pieces[half][F][lane], c.f, row_offset(c.f, token) + d, valid);
        copy_piece<E, VECTOR>(&s.pieces[half][DH_IN][lane], c.dh_in, row_offset(c.dh_in, token) + d, valid);
        if (present(c.dy))
#pragma unroll
            for (int i = 0; i < N; i++)
                copy_piece<E, VECTOR>(&s.pieces[half][DY + i][lane], c.dy,
                                      row_offset(c.dy, token) + i * c.dy.stride[2] + d, valid);
    }
}

/* Begins to copy the records and the coefficients of a tile. */
static __device__ __forceinline__ void copy_tokens(const mhc_call &c, warp_memory &s, int buffer, int64_t tile)
{
    const int lane = threadIdx.x % 32;
    for (int index = lane; index < TILE * RECORD_UNITS; index += 32)
        cot_cp_async_zfill(tile * TILE + index / RECORD_UNITS < c.tokens,
                           cot_shared_address((uint4 *)s.records[buffer] + index),
                           (const uint4 *)(c.records + tile * TILE) + index);
    const int64_t token = tile * TILE + lane % TILE;
    const bool valid = token < c.tokens;
    const int64_t h_res = valid ? token_offset(c, c.h_res, token) : 0,
                  h_post = valid ? token_offset(c, c.h_post, token) : 0;
    float *const to = s.coefficients[buffer][lane % TILE];
#pragma unroll
    for (int index = 0; index < SUMS; index += 2) { /* the upper half of the warp has the odd ones */
        const int ij = index + lane / TILE;
        const float *from =
            ij < N * N ? (const float *)c.h_res.data + h_res + ij / N * c.h_res.stride[2] + ij % N * c.h_res.stride[3]
                       : (const float *)c.h_post.data + h_post + (ij - N * N) * c.h_post.stride[2];
        cot_cp_async_zfill<4>(valid, cot_shared_address(to + ij), from);
    }
}

/* A token's coefficients. */
struct token_coefficients {
    float h_res[N][N], h_post[N], h_pre[N], factor;

    __device__ __forceinline__ token_coefficients(const warp_memory &s, int buffer, int token)
    {
        const float4 *from = (const float4 *)s.coefficients[buffer][token];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float4 row = from[i];
            h_res[i][0] = row.x, h_res[i][1] = row.y, h_res[i][2] = row.z, h_res[i][3] = row.w;
        }
        const float4 post = from[N], pre = *(const float4 *)s.records[buffer][token].h_pre;
        h_post[0] = post.x, h_post[1] = post.y, h_post[2] = post.z, h_post[3] = post.w;
        h_pre[0] = pre.x, h_pre[1] = pre.y, h_pre[2] = pre.z, h_pre[3] = pre.w;
        factor = s.records[buffer][token].factor;
    }
};

static __device__ __forceinline__ uint32_t word_of(const uint4 &v, int w)
{
    return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w;
}

/* The same words, computed from c.n == N, which the compiler does not know. Otherwise it keeps the unpacked elements
 * from begin_g to finish_step, which take twice as many registers. */
static __device__ __forceinline__ uint4 hide(const mhc_call &c, const uint4 &v)
{
    const uint32_t zero = (uint32_t)c.n ^ N;
    return make_uint4(v.x ^ zero, v.y ^ zero, v.z ^ zero, v.w ^ zero);
}

/* g without the products: c y + h_pre dh_in + dy. x and f stay in registers for the sums. */
template <typename E>
static __device__ __forceinline__ void begin_g(const warp_memory &s, int buffer, uint4 (&x)[2][N], uint4 (&f)[2],
                                               float (&g)[N][4][4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const token_coefficients k(s, buffer, lane / 4 + half * 8);
        const uint4 dh_in = s.pieces[half][DH_IN][lane];
        uint4 dy[N];
        f[half] = s.pieces[half][F][lane];
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[half][i] = s.pieces[half][X + i][lane];
            dy[i] = s.pieces[half][DY + i][lane];
        }
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const float2 f_pair = cot_unpack_pair<E>(word_of(f[half], w)), dh = cot_unpack_pair<E>(word_of(dh_in, w));
            float2 x_pairs[N];
#pragma unroll
            for (int i = 0; i < N; i++)
                x_pairs[i] = cot_unpack_pair<E>(word_of(x[half][i], w));
#pragma unroll
            for (int o = 0; o < N; o++) {
                float low = k.h_post[o] * f_pair.x, high = k.h_post[o] * f_pair.y;
#pragma unroll
                for (int i = 0; i < N; i++) {
                    low = fmaf(k.h_res[i][o], x_pairs[i].x, low);
                    high = fmaf(k.h_res[i][o], x_pairs[i].y, high);
                }
                const float2 y = cot_unpack_pair<E>(cot_pack_pair<E>(low, high)),
                             from_dy = cot_unpack_pair<E>(word_of(dy[o], w));
                g[o][w][2 * half] = fmaf(k.h_pre[o], dh.x, fmaf(k.factor, y.x, from_dy.x));
                g[o][w][2 * half + 1] = fmaf(k.h_pre[o], dh.y, fmaf(k.factor, y.y, from_dy.y));
            }
        }
    }
}

/* Adds the products of the smallest terms first. Tensor cores truncate sums: 12 products are added to each element of
 * g. */
static __device__ __forceinline__ void add_products(const shared_memory &s, const warp_memory &w, int buffer, int group,
                                                    float (&g)[N][4][4])
{
    const int lane = threadIdx.x % 32;
    const uint32_t record = cot_shared_address(&w.records[buffer][lane % TILE]);
    uint32_t A[TERMS][4], octet2[TERMS + 1][2];
#pragma unroll
    for (int term = 0; term < TERMS; term++)
        cot_ldmatrix_x4(A[term], record + (uint32_t)(term * M * 2 + lane / 16 * 16));
#pragma unroll
    for (int term = 0; term < TERMS; term += 2) {
        uint32_t r[4];
        const int other = term + 1 < TERMS ? term + 1 : term;
        cot_ldmatrix_x4(r, record + (uint32_t)((lane < 16 ? term : other) * M * 2 + 32));
        octet2[term][0] = r[0], octet2[term][1] = r[1], octet2[term + 1][0] = r[2], octet2[term + 1][1] = r[3];
    }
#pragma unroll
    for (int o = 0; o < N; o++) {
#pragma unroll
        for (int term = TERMS - 1; term >= 0; term--) {
            uint32_t B[2][4], last[4];
            const uint16_t *phi = s.phi[term][o][0] + group * GROUP_COLUMNS;
#pragma unroll
            for (int pair = 0; pair < 2; pair++)
                cot_ldmatrix_x4_trans(B[pair], cot_shared_address(phi + (lane / 8 % 2 * 8 + lane % 8) * PITCH +
                                                                  pair * 16 + lane / 16 * 8));
            cot_ldmatrix_x4_trans(last, cot_shared_address(phi + (16 + lane % 8) * PITCH + lane / 8 * 8));
#pragma unroll
            for (int mix = TERMS - 1 - term; mix >= 0; mix--) {
#pragma unroll
                for (int octet = 0; octet < 4; octet++)
                    cot_mma_bf16_k8(g[o][octet], octet2[mix][0], octet2[mix][1], last[octet]);
#pragma unroll
                for (int octet = 0; octet < 4; octet++)
                    cot_mma_bf16(g[o][octet], A[mix][0], A[mix][1], A[mix][2], A[mix][3], B[octet / 2][octet % 2 * 2],
                                 B[octet / 2][octet % 2 * 2 + 1]);
            }
        }
    }
}

template <typename E, bool VECTOR>
static __device__ __forceinline__ void store_piece(const mhc_array &a, int64_t offset, const uint32_t (&words)[4])
{
    E *to = (E *)a.data + offset;
    if (VECTOR) {
        cot_store_words<4>(to, {{words[0], words[1], words[2], words[3]}});
    } else {
#pragma unroll
        for (int v = 0; v < 8; v++)
            to[v] = ((const E *)words)[v];
    }
}

/* Adds the values of the four lanes of a token. Each lane keeps the sums of five of them. */
static __device__ __forceinline__ void add_lane_sums(const float (&values)[SUMS], float (&sums)[LANE_SUMS])
{
    const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
    float lane_pair_sums[2 * LANE_SUMS];
#pragma unroll
    for (int k = 0; k < 2 * LANE_SUMS; k++) {
        const float kept = upper ? values[k + 2 * LANE_SUMS] : values[k],
                    sent = upper ? values[k] : values[k + 2 * LANE_SUMS];
        lane_pair_sums[k] = kept + __shfl_xor_sync(0xffffffffu, sent, 2);
    }
#pragma unroll
    for (int k = 0; k < LANE_SUMS; k++) {
        const float kept = odd ? lane_pair_sums[k + LANE_SUMS] : lane_pair_sums[k],
                    sent = odd ? lane_pair_sums[k] : lane_pair_sums[k + LANE_SUMS];
        sums[k] += kept + __shfl_xor_sync(0xffffffffu, sent, 1);
    }
}

/* dx and df of the lane's columns, and their part of the sums. */
template <typename E, bool VECTOR>
static __device__ __forceinline__ void finish_step(const mhc_call &c, const warp_memory &s, int buffer, int tile, int d,
                                                   const uint4 (&x)[2][N], const uint4 (&f)[2],
                                                   const float (&g)[N][4][4], float (&sums)[2][LANE_SUMS])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const token_coefficients k(s, buffer, (int)threadIdx.x % 32 / 4 + half * 8);
        const uint4 f_words = hide(c, f[half]);
        uint4 x_words[N];
        uint32_t df[4], dx[N][4];
        float step_sums[SUMS] = {0};
#pragma unroll
        for (int i = 0; i < N; i++)
            x_words[i] = hide(c, x[half][i]);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const float2 f_pair = cot_unpack_pair<E>(word_of(f_words, w));
            float low = 0.0f, high = 0.0f;
#pragma unroll
            for (int o = 0; o < N; o++) {
                low = fmaf(k.h_post[o], g[o][w][2 * half], low);
                high = fmaf(k.h_post[o], g[o][w][2 * half + 1], high);
                step_sums[N * N + o] = fmaf(f_pair.x, g[o][w][2 * half], step_sums[N * N + o]);
                step_sums[N * N + o] = fmaf(f_pair.y, g[o][w][2 * half + 1], step_sums[N * N + o]);
            }
            df[w] = cot_pack_pair<E>(low, high);
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float2 x_pair = cot_unpack_pair<E>(word_of(x_words[i], w));
                low = high = 0.0f;
#pragma unroll
                for (int o = 0; o < N; o++) {
                    low = fmaf(k.h_res[i][o], g[o][w][2 * half], low);
                    high = fmaf(k.h_res[i][o], g[o][w][2 * half + 1], high);
                    step_sums[i * N + o] = fmaf(x_pair.x, g[o][w][2 * half], step_sums[i * N + o]);
                    step_sums[i * N + o] = fmaf(x_pair.y, g[o][w][2 * half + 1], step_sums[i * N + o]);
                }
                dx[i][w] = cot_pack_pair<E>(low, high);
            }
        }
        add_lane_sums(step_sums, sums[half]);
        const uint32_t token = lane_token(tile) + half * 8;
        if (token >= c.tokens)
            continue;
        if (present(c.df))
            store_piece<E, VECTOR>(c.df, row_offset(c.df, token) + d, df);
        if (present(c.dx))
#pragma unroll
            for (int i = 0; i < N; i++)
                store_piece<E, VECTOR>(c.dx, row_offset(c.dx, token) + i * c.dx.stride[2] + d, dx[i]);
    }
}

static __device__ __forceinline__ void store_sums(const mhc_call &c, int64_t tile, const float (&sums)[2][LANE_SUMS])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t token = tile * TILE + lane / 4 + half * 8;
        if (token >= c.tokens || c.post_sums == nullptr)
            continue;
        float *to = c.post_sums + (blockIdx.x * c.tokens + token) * SUMS + lane % 4 * LANE_SUMS;
#pragma unroll
        for (int k = 0; k < LANE_SUMS; k++)
            to[k] = sums[half][k];
    }
}

template <typename E, bool VECTOR> static __device__ __forceinline__ void backward(const mhc_call &c)
{
    shared_memory &s = *(shared_memory *)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_column = blockIdx.x * COLUMNS;
    const int tiles = (int)((c.tokens + TILE - 1) / TILE), tile_stride = gridDim.y * WARPS;
    const int groups = c.D - first_column < COLUMNS ? (int)(c.D - first_column) / GROUP_COLUMNS : (int)COLUMN_GROUPS;
    const int lane_column = first_column + lane % 4 * 8;
    warp_memory &w = s.warps[warp];
    int tile = blockIdx.y * WARPS + warp, buffer = 0;
    for (int i = 0; i < 2 * N && !present(c.dy); i++)
        w.pieces[i / N][DY + i % N][lane] = make_uint4(0, 0, 0, 0);
    if (tile < tiles) {
        copy_tokens(c, w, 0, tile);
        copy_inputs<E, VECTOR>(c, w, tile, lane_column);
    }
    cot_cp_async_commit_group();
    stage_phi(c, s, first_column);
    for (; tile < tiles; tile += tile_stride, buffer ^= 1) {
        float sums[2][LANE_SUMS] = {0};
#pragma unroll 1
        for (int group = 0; group < groups; group++) {
            const bool last = group + 1 == groups;
            const int next_tile = last ? tile + tile_stride : tile, next_group = last ? 0 : group + 1;
            uint4 x[2][N], f[2];
            float g[N][4][4];
            cot_cp_async_wait_group<0>();
            __syncwarp(); /* other lanes have copied records and coefficients */
            begin_g<E>(w, buffer, x, f, g);
            __syncwarp(); /* all lanes have read the inputs, and the records of the tile before */
            if (next_tile < tiles) {
                if (last)
                    copy_tokens(c, w, buffer ^ 1, next_tile);
                copy_inputs<E, VECTOR>(c, w, next_tile, lane_column + next_group * GROUP_COLUMNS);
            }
            cot_cp_async_commit_group();
            add_products(s, w, buffer, group, g);
            finish_step<E, VECTOR>(c, w, buffer, tile, lane_column + group * GROUP_COLUMNS, x, f, g, sums);
        }
        store_sums(c, tile, sums);
    }
}

#define INSTANCE(name, element, vector)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ mhc_call c) \
    {                                                                                                 \
        backward<element, vector>(c);                                                                 \
    }

INSTANCE(mhc_post_pre_bwd_sm90_f16, __half, true)
INSTANCE(mhc_post_pre_bwd_sm90_bf16, __nv_bfloat16, true)
INSTANCE(mhc_post_pre_bwd_any_sm90_f16, __half, false)
INSTANCE(mhc_post_pre_bwd_any_sm90_bf16, __nv_bfloat16, false)

/* Adds the sums of the slices in order. A thread has one of the n*n + n sums of a token. */
extern "C" __global__ void __launch_bounds__(THREADS) mhc_post_pre_sum_slices(const __grid_constant__ mhc_call c)
{
    const int64_t index = (int64_t)blockIdx.x * THREADS + threadIdx.x, token = index / SUMS;
    const int ij = (int)(index % SUMS);
    if (token >= c.tokens)
        return;
    float sum = 0.0f;
#pragma unroll 8
    for (int64_t slice = 0; slice < c.slices; slice++)
        sum += c.post_sums[slice * c.tokens * SUMS + index];
    if (ij < N * N && present(c.dh_res))
        store_f32(c.dh_res,
                  token_offset(c, c.dh_res, token) + ij / N * c.dh_res.stride[2] + ij % N * c.dh_res.stride[3], sum);
    if (ij >= N * N && present(c.dh_post))
        store_f32(c.dh_post, token_offset(c, c.dh_post, token) + (ij - N * N) * c.dh_post.stride[2], sum);
}
