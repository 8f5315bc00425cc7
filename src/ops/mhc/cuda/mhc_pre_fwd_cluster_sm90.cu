/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_fwd_cluster_sm90.cu: pre forward in one pass over x, n = 4, bf16. Clusters of 16 blocks go through tiles of 16
 * tokens; block `rank` has columns [256 rank, 256 rank + 256) of all four streams, and so h_in of them, and owns token
 * `rank` of each tile. What goes around, a ring slot a tile:
 *
 *   producer   x of the tile to shared memory, one box
 *   8 products warps, 128 k each: phi gamma as three bf16 terms (float32's 24 bits) is the A operand and stays in
 *              registers, tokens are the columns of B. Nine groups of eight rows, the half m-tile left over holding the
 *              tokens themselves: its diagonal is the sums of squares.
 *   2 reducers add up the warps' sums and send each token's to its owner
 *   owner      adds up the blocks' sums, writes the token's coefficients, sends h_pre to all blocks
 *   4 h_in     warps: h_in of the block's columns, a token a warp; then the slot is free
 *
 *   barrier           arrivals                     phase ends when
 *   full[slot]        producer's one               the tile has its bytes
 *   partial_full      a warp of products           all warps' sums are there
 *   partial_empty     a reducer                    those are read
 *   gathered[slot]    owner's one                  the sums of all blocks for its token have come
 *   h_pre_full[slot]  h_in's one                   h_pre of all tokens has come
 *   empty[slot]       a warp of h_in               x is read
 *
 * A slot of another block may be written without asking: who sends for tile t+STAGES has freed its own slot of tile t,
 * so it had h_pre of all that tile's tokens, so each owner had read what was sent to it, and likewise the other way. */
#include "mhc_cuda.cuh"
#include "mhc_maps.h"

#include "../../../cuda/device/cluster.cuh"
#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/ptx.cuh"

enum {
    N = MHC_SM90_N,
    M = MHC_SM90_M,
    TILE = MHC_SM90_TILE,
    STAGES = 6,
    STAGE_BYTES = N * MHC_SM90_COLUMNS * TILE * 2,
    SUMS = 28, /* of a token: M of h_mix, the squares, padding to whole 16 bytes */
    PRODUCTS = 8,
    STEPS = 8, /* of 16 k, of a warp of products */
    TERMS = 3,
    GROUPS = TERMS * M / 8
};

struct shared_memory {
    unsigned char x[STAGES][STAGE_BYTES]; /* [stream][chunk][token][128 bytes, swizzled] */
    float partial[PRODUCTS][TILE][SUMS];
    float gathered[STAGES][MHC_SM90_CLUSTER][SUMS];
    float h_pre[STAGES][TILE][N];
    uint64_t full[STAGES], empty[STAGES], gathered_full[STAGES], h_pre_full[STAGES], partial_full, partial_empty;
};
static_assert(sizeof(shared_memory) <= MHC_SM90_SHARED_BYTES, "a block's shared memory");
extern __shared__ __align__(1024) unsigned char memory[];

/* The tiles of this block's cluster: FOR_EACH_TILE(tile, ring, count). */
#define FOR_EACH_TILE(tile, ring, count) \
    cot_ring<STAGES> ring;               \
    for (int tile = (int)(blockIdx.x / MHC_SM90_CLUSTER); tile < (count); tile += MHC_SM90_CLUSTERS, ring.next())

/* phi gamma of the warp's columns of k, as fragments of A: [step][term*3 + octet of rows][half of the step]. */
static __device__ __forceinline__ void load_phi(const mhc_call &c, int rank, int warp,
                                                uint32_t (&phi)[STEPS][GROUPS][2])
{
    const int row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int block = warp * 2 + s / 4, stream = block / MHC_SM90_CHUNKS;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int d =
                rank * MHC_SM90_COLUMNS + block % MHC_SM90_CHUNKS * MHC_SM90_CHUNK + s % 4 * 16 + half * 8 + pair;
            const bool inside = d < c.D;
            float2 gamma = {1.0f, 1.0f};
            if (given(c.gamma) && inside)
                gamma = *(const float2 *)((const float *)c.gamma.data + stream * c.gamma.stride[0] + d);
#pragma unroll
            for (int octet = 0; octet < M / 8; octet++) {
                float2 value = {0.0f, 0.0f};
                if (inside)
                    value = *(const float2 *)((const float *)c.phi.data + (octet * 8 + row) * c.phi.stride[0] +
                                              stream * c.D + d);
                uint32_t terms[TERMS];
                cot_split_bf16(value.x * gamma.x, value.y * gamma.y, terms);
#pragma unroll
                for (int t = 0; t < TERMS; t++)
                    phi[s][t * (M / 8) + octet][half] = terms[t];
            }
        }
    }
}

static __device__ __forceinline__ void products(const mhc_call &c, shared_memory &s, int rank, int tiles)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t phi[STEPS][GROUPS][2], parity = 0;
    load_phi(c, rank, warp, phi);
    cot_cluster_wait();
    /* Eight tokens at a time, two steps a load. Unit lane/8 of the lane's row, swizzled; two steps on it is at this ^ 64. */
    const uint32_t row = cot_shared_address(s.x) + (uint32_t)((warp * 2 * TILE + lane % 8) * 128) +
                         (uint32_t)((lane / 8 ^ lane % 8) * 16);
    FOR_EACH_TILE(tile, ring, tiles)
    {
        cot_mbarrier_wait(&s.full[ring.slot], ring.parity);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            float sums[4][4] = {0}, last[4] = {0};
#pragma unroll
            for (int step = 0; step < STEPS; step += 2) {
                uint32_t x[4];
                float two[4] = {0}; /* tensor cores cut sums off: added up by them alone, the squares come out low */
                cot_ldmatrix_x4(x, (row + (uint32_t)(ring.slot * STAGE_BYTES + (step / 4 * TILE + t * 8) * 128)) ^
                                       (step % 4 * 32));
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    const uint32_t(&A)[GROUPS][2] = phi[step + u];
#pragma unroll
                    for (int m = 0; m < 4; m++)
                        cot_mma_bf16(sums[m], A[2 * m][0], A[2 * m + 1][0], A[2 * m][1], A[2 * m + 1][1], x[2 * u],
                                     x[2 * u + 1]);
                    cot_mma_bf16(two, A[8][0], x[2 * u], A[8][1], x[2 * u + 1], x[2 * u], x[2 * u + 1]);
                }
#pragma unroll
                for (int i = 0; i < 4; i++)
                    last[i] += two[i];
            }
            if (t == 0)
                cot_mbarrier_wait(&s.partial_empty, parity ^ 1);
#pragma unroll
            for (int p = 0; p < 2; p++) {
                float *to = s.partial[warp][t * 8 + lane % 4 * 2 + p];
#pragma unroll
                for (int octet = 0; octet < 3; octet++) { /* the smallest terms first */
                    const int low = 6 + octet, middle = 3 + octet;
                    to[octet * 8 + lane / 4] = (low == 8 ? last[p] : sums[low / 2][low % 2 * 2 + p]) +
                                               sums[middle / 2][middle % 2 * 2 + p] +
                                               sums[octet / 2][octet % 2 * 2 + p];
                }
                if (lane % 4 * 2 + p == lane / 4)
                    to[M] = last[2 + p];
            }
        }
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive(&s.partial_full);
        parity ^= 1;
    }
}

static __device__ __forceinline__ void gather_h_in(const mhc_call &c, shared_memory &s, int rank, int tiles)
{
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int d = rank * MHC_SM90_COLUMNS + lane * 8;
    const bool inside = given(c.h_in) && d < c.D;
    __nv_bfloat16 *to = (__nv_bfloat16 *)c.h_in.data + d;
    const int64_t stride = c.h_in.stride[c.T > 1 ? 1 : 0]; /* of tokens, whatever B is */
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, tiles)
    {
        cot_mbarrier_wait(&s.full[ring.slot], ring.parity);
        cot_mbarrier_wait(&s.h_pre_full[ring.slot], ring.parity);
        if (threadIdx.x % 128 == 0)
            cot_mbarrier_arrive_expect(&s.h_pre_full[ring.slot], sizeof s.h_pre[0]);
        const int count = (int)c.tokens - tile * TILE;
#pragma unroll 2
        for (int t = warp; t < TILE; t += 4) {
            const unsigned char *x = s.x[ring.slot] + (lane / 8 * TILE + t) * 128 + ((lane % 8) ^ (t & 7)) * 16;
            const float4 h = *(const float4 *)s.h_pre[ring.slot][t];
            const float h_pre[N] = {h.x, h.y, h.z, h.w};
            float sum[8] = {0};
#pragma unroll
            for (int i = 0; i < N; i++) {
                const uint4 raw = *(const uint4 *)(x + i * MHC_SM90_CHUNKS * TILE * 128);
                const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    sum[2 * w] = fmaf(h_pre[i], __uint_as_float(words[w] << 16), sum[2 * w]);
                    sum[2 * w + 1] = fmaf(h_pre[i], __uint_as_float(words[w] & 0xffff0000u), sum[2 * w + 1]);
                }
            }
            if (inside && t < count)
                cot_store_vector<__nv_bfloat16, 8>(to + (tile * TILE + t) * stride, sum);
        }
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive(&s.empty[ring.slot]);
    }
}

static __device__ __forceinline__ void reduce(shared_memory &s, int rank, int tiles)
{
    const int thread = threadIdx.x % 64, lane = threadIdx.x % 32;
    uint32_t parity = 0;
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, tiles)
    {
        cot_mbarrier_wait(&s.partial_full, parity);
#pragma unroll
        for (int q = thread; q < TILE * SUMS / 4; q += 64) {
            const int token = q / (SUMS / 4), part = q % (SUMS / 4) * 4;
            float4 sum = *(const float4 *)&s.partial[0][token][part];
#pragma unroll
            for (int warp = 1; warp < PRODUCTS; warp++) {
                const float4 more = *(const float4 *)&s.partial[warp][token][part];
                sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
            }
            cot_store_async(cot_map_shared(cot_shared_address(&s.gathered[ring.slot][rank][part]), token),
                            cot_map_shared(cot_shared_address(&s.gathered_full[ring.slot]), token),
                            __float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z),
                            __float_as_uint(sum.w));
        }
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive(&s.partial_empty);
        parity ^= 1;
    }
}

/* Where lane j stores coefficient j. */
static __device__ __forceinline__ token_element value_element(const mhc_call &c, int j)
{
    const int ij = j - 2 * N;
    if (j < N)
        return token_element(c.h_pre, j * c.h_pre.stride[2], true);
    if (j < 2 * N)
        return token_element(c.h_post, (j - N) * c.h_post.stride[2], true);
    return token_element(c.h_res, ij / N * c.h_res.stride[2] + ij % N * c.h_res.stride[3], j < M);
}

static __device__ __forceinline__ void own_token(const mhc_call &c, shared_memory &s, int rank, int tiles)
{
    const int lane = threadIdx.x % 32;
    const bool has = lane < M;
    const float alpha = has ? load_f32(c.alpha, group_of(N, lane) * c.alpha.stride[0]) : 0.0f;
    const float bias = has ? load_f32(c.bias, lane * c.bias.stride[0]) : 0.0f;
    const token_element to_value = value_element(c, lane);
    /* Lane M, which sums up the squares, stores inv_rms. */
    const token_element to_sum =
        has ? token_element(c.h_mix, lane * c.h_mix.stride[2], true) : token_element(c.inv_rms, 0, lane == M);
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, tiles)
    {
        const uint32_t token = (uint32_t)(tile * TILE + rank), b = token / (uint32_t)c.T, t = token - b * (uint32_t)c.T;
        cot_mbarrier_wait(&s.gathered_full[ring.slot], ring.parity);
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive_expect(&s.gathered_full[ring.slot], sizeof s.gathered[0]);
        float sum = 0.0f;
        if (lane < SUMS)
#pragma unroll
            for (int block = 0; block < MHC_SM90_CLUSTER; block++)
                sum += s.gathered[ring.slot][block][lane];
        const float squares = __shfl_sync(0xffffffffu, sum, M);
        const float inv_rms = 1.0f / sqrtf(squares / (float)(N * c.D) + c.norm_eps);
        const float value = coefficient(c, N, lane, fmaf(alpha, sum * inv_rms, bias));
        uint32_t h_pre[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            h_pre[i] = __float_as_uint(__shfl_sync(0xffffffffu, value, i));
        if (lane < MHC_SM90_CLUSTER)
            cot_store_async(cot_map_shared(cot_shared_address(s.h_pre[ring.slot][rank]), lane),
                            cot_map_shared(cot_shared_address(&s.h_pre_full[ring.slot]), lane), h_pre[0], h_pre[1],
                            h_pre[2], h_pre[3]);
        if (token >= c.tokens)
            continue;
        if (to_sum.data != nullptr)
            *to_sum.at(b, t) = has ? sum : inv_rms;
        if (to_value.data != nullptr)
            *to_value.at(b, t) = value;
        if (has && lane >= 2 * N && c.logits != nullptr)
            c.logits[token * (N * N) + lane - 2 * N] = value;
    }
}

static __device__ __forceinline__ void produce(const mhc_mapped_call &p, shared_memory &s, int rank, int tiles)
{
    cot_cluster_wait();
    if (threadIdx.x % 32 == 0) {
        FOR_EACH_TILE(tile, ring, tiles)
        {
            cot_mbarrier_wait(&s.empty[ring.slot], ring.parity ^ 1);
            cot_mbarrier_arrive_expect(&s.full[ring.slot], STAGE_BYTES);
            cot_tensor_load_4d(s.x[ring.slot], &p.x, 0, tile * TILE, rank * MHC_SM90_CHUNKS, 0, &s.full[ring.slot]);
        }
    }
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(MHC_SM90_FWD_THREADS, 1)
    mhc_pre_fwd_cluster_sm90(const __grid_constant__ mhc_mapped_call p)
{
    shared_memory &s = *(shared_memory *)memory;
    const mhc_call &c = p.call;
    const int rank = (int)cot_cluster_rank(), warp = threadIdx.x / 32;
    const int tiles = (int)((c.tokens + TILE - 1) / TILE);
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < STAGES; slot++) {
            cot_mbarrier_init(&s.full[slot], 1);
            cot_mbarrier_init(&s.empty[slot], 4);
            cot_mbarrier_init(&s.gathered_full[slot], 1);
            cot_mbarrier_init(&s.h_pre_full[slot], 1);
            cot_mbarrier_arrive_expect(&s.gathered_full[slot], sizeof s.gathered[0]);
            cot_mbarrier_arrive_expect(&s.h_pre_full[slot], sizeof s.h_pre[0]);
        }
        cot_mbarrier_init(&s.partial_full, PRODUCTS);
        cot_mbarrier_init(&s.partial_empty, 2);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    cot_cluster_arrive(); /* awaited before the first store to another block */
    if (warp < PRODUCTS) {
        cot_more_registers<208>();
        products(c, s, rank, tiles);
    } else {
        cot_fewer_registers<48>();
        if (warp < PRODUCTS + 4)
            gather_h_in(c, s, rank, tiles);
        else if (warp < PRODUCTS + 6)
            reduce(s, rank, tiles);
        else if (warp == PRODUCTS + 6)
            own_token(c, s, rank, tiles);
        else
            produce(p, s, rank, tiles);
    }
    cot_cluster_arrive(); /* nobody leaves while another block may write here */
    cot_cluster_wait();
}
