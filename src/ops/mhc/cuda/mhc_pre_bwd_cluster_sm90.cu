/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_cluster_sm90.cu: pre backward in one pass over x and dh_in, n = 4, bf16. Tiles, blocks and owners are those
 * of mhc_pre_fwd_cluster_sm90.cu; what Sinkhorn gives to dz is in the workspace already (mhc_pre_dz). A ring slot a tile:
 *
 *   producer     x and dh_in of the tile to shared memory; later dx from where x was
 *   8 products   warps, 32 columns of all streams each. First the warp's part of dh_pre, the diagonals of dh_in x^T. Then,
 *                with what the owners have sent:
 *                  Q  += x^T dh_mix     dh_mix as three bf16 terms; tensor cores cut sums off, so each tile's product
 *                                       is added to Q, in registers to the end, by float32 additions
 *                  dx = dh_mix (phi gamma) + c x + h_pre dh_in (+ dx_post)
 *                                       dh_mix and phi gamma as two bf16 terms each, without the product of the second
 *                                       ones: off by at most 2^-15 of each product (the op's README, "Precision")
 *   reducer      adds up the warps and sends each token's dh_pre to its owner
 *   owner        adds up the blocks' dh_pre, computes dh_mix and c of its token, sends them to all blocks, and adds up
 *                the terms of dbias and dalpha
 *   post         brings dx_post, if given, a stream at a time; its tile takes the place of a slot
 *
 *   barrier            arrivals                phase ends when
 *   full[slot]         producer's one          the tile has its bytes
 *   partial_full       a warp of products      all warps' parts of dh_pre are there
 *   partial_empty      the reducer             those are read
 *   gathered[slot]     owner's one             dh_pre of all blocks for its token has come
 *   sent[slot]         products' one           the records of all the tile's tokens have come
 *   done[slot]         a warp of products      dx lies where x was
 *   post_full[stream]  post's one              dx_post of the stream has come
 *   post_empty[stream] a warp of products      it is read
 *
 * Slots of other blocks are written without asking, as in the forward. The products look one tile ahead, for dh_pre of
 * it to go around while they work on the one before. Registers are what there is least of: Q and the second terms of phi
 * gamma take 144 of a product thread's. */
#include "mhc_cuda.cuh"
#include "mhc_maps.h"

#include "../../../cuda/device/cluster.cuh"
#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/ptx.cuh"

enum {
    N = MHC_SM90_N,
    M = MHC_SM90_M,
    OCTETS = M / 8,
    TILE = MHC_SM90_TILE,
    BLOCK_BYTES = TILE * 128, /* a chunk of a tile */
    STREAM_BYTES = MHC_SM90_CHUNKS * BLOCK_BYTES,
    X_BYTES = N * STREAM_BYTES,
    STAGE_BYTES = X_BYTES + MHC_SM90_CHUNKS * BLOCK_BYTES,
    COLUMNS = 32, /* of a warp of products, in each stream */
    GROUPS = N * COLUMNS / 16,
    PRODUCTS = MHC_SM90_COLUMNS / COLUMNS,
    TERMS = 3
};

/* What an owner sends. */
struct token_record {
    __nv_bfloat16 terms[TERMS][M]; /* dh_mix is their sum */
    float h_pre[N];
    float factor, unused[3];
};
enum { RECORD_UNITS = sizeof(token_record) / 16 };
static_assert(sizeof(token_record) == 176, "whole units of 16 bytes, an odd number of them");

/* With dx_post, whose tile takes the place of a slot. */
template <bool POST> struct shared_memory {
    enum { STAGES = POST ? 3 : 4 };
    unsigned char stages[STAGES][STAGE_BYTES]; /* x [stream][chunk][token][128 bytes, swizzled], then dh_in alike */
    unsigned char dx_post[POST ? N : 1][POST ? STREAM_BYTES : 1024];
    uint2 phi[PRODUCTS][GROUPS][3][32]; /* first terms: fragments of B, 6 registers for each group of a warp */
    token_record records[STAGES][TILE], own;
    float gathered[STAGES][MHC_SM90_CLUSTER][N];
    float partial[PRODUCTS][TILE][N];
    uint64_t full[STAGES], gathered_full[STAGES], sent[STAGES], done[STAGES], partial_full, partial_empty;
    uint64_t post_full[N], post_empty[N];
};
static_assert(sizeof(shared_memory<false>) <= MHC_SM90_SHARED_BYTES, "a block's shared memory");
static_assert(sizeof(shared_memory<true>) <= MHC_SM90_SHARED_BYTES, "a block's shared memory");
extern __shared__ __align__(1024) unsigned char memory[];

#define FOR_EACH_TILE(tile, ring, count) \
    cot_ring<s.STAGES> ring;             \
    for (int tile = (int)(blockIdx.x / MHC_SM90_CLUSTER); tile < (count); tile += MHC_SM90_CLUSTERS, ring.next())

/* ---- products ----------------------------------------------------------------------------------------- */

/* A warp's groups are of sixteen columns: two of each stream, group / 2. */
static __device__ __forceinline__ constexpr int column_of(int group)
{
    return group % 2 * 16;
}

static __device__ __forceinline__ int64_t first_column(void)
{
    return cot_cluster_rank() * MHC_SM90_COLUMNS + threadIdx.x / 32 * COLUMNS;
}

/* phi gamma of the warp's columns as two bf16 terms: the first to shared memory, the second to registers. */
template <int BEGIN, int END, bool POST>
static __device__ __forceinline__ void load_phi(const mhc_call &c, shared_memory<POST> &s, int warp,
                                                uint32_t (&second)[GROUPS][6])
{
    const int lane = threadIdx.x % 32;
    const int64_t d = first_column();
    const bool inside = d < c.D;
#pragma unroll
    for (int group = BEGIN; group < END; group++) {
        uint32_t first[6];
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const int64_t column = d + column_of(group) + t * 8 + lane / 4;
            const float gamma = given(c.gamma) && inside
                                    ? load_f32(c.gamma, group / 2 * c.gamma.stride[0] + column * c.gamma.stride[1])
                                    : 1.0f;
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++) {
                float values[2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int j = octet * 8 + lane % 4 * 2 + r;
                    values[r] =
                        inside ? load_f32(c.phi, j * c.phi.stride[0] + (group / 2 * c.D + column) * c.phi.stride[1]) *
                                     gamma
                               : 0.0f;
                }
                uint32_t terms[2];
                cot_split_bf16(values[0], values[1], terms);
                first[octet < 2 ? 2 * t + octet : 4 + t] = terms[0];
                second[group][octet < 2 ? 2 * t + octet : 4 + t] = terms[1];
            }
        }
#pragma unroll
        for (int v = 0; v < 3; v++)
            s.phi[warp][group][v][lane] = make_uint2(first[2 * v], first[2 * v + 1]);
    }
    __syncwarp();
}

/* The unit of sixteen bytes of a group that a lane names to ldmatrix: rows are the tile's tokens. */
static __device__ __forceinline__ uint32_t unit_of(uint32_t first, int group)
{
    return (first ^ (uint32_t)(group % 2 * 32)) + (uint32_t)(group / 2 * STREAM_BYTES);
}

/* The warp's part of dh_pre, of tokens g and g+8 in the lanes that hold the diagonals. */
template <bool POST>
static __device__ __forceinline__ void take_dh_pre(shared_memory<POST> &s, uint32_t x, uint32_t dh_in, int warp,
                                                   uint32_t parity)
{
    const int lane = threadIdx.x % 32, g = lane / 4;
    const bool odd = g % 2 != 0;
    float low[N], high[N];
    uint32_t A[2][4];
    cot_ldmatrix_x4(A[0], unit_of(dh_in, 0));
    cot_ldmatrix_x4(A[1], unit_of(dh_in, 1));
#pragma unroll
    for (int i = 0; i < N; i++) {
        float sums[2][4] = {0};
#pragma unroll
        for (int step = 0; step < 2; step++) {
            uint32_t B[4];
            cot_ldmatrix_x4(B, unit_of(x, 2 * i + step));
            cot_mma_bf16(sums[0], A[step][0], A[step][1], A[step][2], A[step][3], B[0], B[1]);
            cot_mma_bf16(sums[1], A[step][0], A[step][1], A[step][2], A[step][3], B[2], B[3]);
        }
        low[i] = odd ? sums[0][1] : sums[0][0];
        high[i] = odd ? sums[1][3] : sums[1][2];
    }
    cot_mbarrier_wait(&s.partial_empty, parity ^ 1);
    if (lane % 4 == g / 2) {
        *(float4 *)s.partial[warp][g] = make_float4(low[0], low[1], low[2], low[3]);
        *(float4 *)s.partial[warp][g + 8] = make_float4(high[0], high[1], high[2], high[3]);
    }
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.partial_full);
}

/* Q += x^T dh_mix: [16 columns][8 rows of phi] in each of Q's fragments. */
static __device__ __forceinline__ void take_Q(uint32_t x, uint32_t records, float (&Q)[GROUPS][OCTETS][4])
{
    const int lane = threadIdx.x % 32;
    const uint32_t token = (uint32_t)(lane % 16);
    uint32_t B[TERMS * OCTETS + 1][2];
#pragma unroll
    for (int pair = 0; pair < TERMS * OCTETS; pair += 2) {
        const int last = TERMS * OCTETS - 1, second = pair + 1 < last ? pair + 1 : last;
        uint32_t r[4];
        cot_ldmatrix_x4_trans(r, records + token * (uint32_t)sizeof(token_record) +
                                     (uint32_t)(lane < 16 ? pair : second) * 16);
        B[pair][0] = r[0], B[pair][1] = r[1], B[pair + 1][0] = r[2], B[pair + 1][1] = r[3];
    }
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        uint32_t A[4];
        float product[OCTETS][4] = {0};
        cot_ldmatrix_x4_trans(A, unit_of(x, group));
#pragma unroll
        for (int term = TERMS - 1; term >= 0; term--)
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++)
                cot_mma_bf16(product[octet], A[0], A[1], A[2], A[3], B[term * OCTETS + octet][0],
                             B[term * OCTETS + octet][1]);
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                Q[group][octet][i] += product[octet][i];
    }
}

/* dx in the place of x. */
template <bool POST>
static __device__ __forceinline__ void give_dx(const mhc_call &c, shared_memory<POST> &s, uint32_t x, uint32_t dh_in,
                                               uint32_t dx_post, const cot_ring<shared_memory<POST>::STAGES> &ring,
                                               int warp, uint32_t turn, const uint32_t (&second)[GROUPS][6])
{
    const int lane = threadIdx.x % 32, g = lane / 4;
    const token_record *records = s.records[ring.slot];
    const float factor[2] = {records[g].factor, records[g + 8].factor};
    /* dh_mix, first and second terms: octets 0 and 1 of either, octet 2 of both. */
    uint32_t A[2][4], last[4], layer[2][4];
    const uint32_t record = cot_shared_address(&records[lane % 16]);
    cot_ldmatrix_x4(A[0], record + (uint32_t)(lane / 16) * 16);
    cot_ldmatrix_x4(A[1], record + (uint32_t)(OCTETS + lane / 16) * 16);
    cot_ldmatrix_x4(last, record + (uint32_t)(2 + lane / 16 * OCTETS) * 16);
    cot_ldmatrix_x4(layer[0], unit_of(dh_in, 0));
    cot_ldmatrix_x4(layer[1], unit_of(dh_in, 1));
    /* Long over; but without a wait here the compiler loads ahead into more registers than there are. */
    if (!POST)
        cot_mbarrier_wait(&s.full[ring.slot], ring.parity);
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        uint32_t phi[6], own[4], more[4];
        float sums[2][4] = {0};
#pragma unroll
        for (int v = 0; v < 3; v++) {
            const uint2 words = s.phi[warp][group][v][lane];
            phi[2 * v] = words.x, phi[2 * v + 1] = words.y;
        }
#pragma unroll
        for (int t = 0; t < 2; t++) /* the smallest products first */
            cot_mma_bf16_k8(sums[t], last[0], last[1], second[group][4 + t]);
#pragma unroll
        for (int t = 0; t < 2; t++)
            cot_mma_bf16_k8(sums[t], last[2], last[3], phi[4 + t]);
#pragma unroll
        for (int t = 0; t < 2; t++)
            cot_mma_bf16(sums[t], A[0][0], A[0][1], A[0][2], A[0][3], second[group][2 * t], second[group][2 * t + 1]);
#pragma unroll
        for (int t = 0; t < 2; t++)
            cot_mma_bf16(sums[t], A[1][0], A[1][1], A[1][2], A[1][3], phi[2 * t], phi[2 * t + 1]);
#pragma unroll
        for (int t = 0; t < 2; t++)
            cot_mma_bf16_k8(sums[t], last[0], last[1], phi[4 + t]);
#pragma unroll
        for (int t = 0; t < 2; t++)
            cot_mma_bf16(sums[t], A[0][0], A[0][1], A[0][2], A[0][3], phi[2 * t], phi[2 * t + 1]);
        const float h_pre[2] = {records[g].h_pre[group / 2], records[g + 8].h_pre[group / 2]};
        cot_ldmatrix_x4(own, unit_of(x, group));
        if (POST) {
            if (group % 2 == 0)
                cot_mbarrier_wait(&s.post_full[group / 2], turn);
            cot_ldmatrix_x4(more, unit_of(dx_post, group));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) { /* tokens g and g+8 of columns 2q and 2q+1, then of 8 columns on */
            const int half = i % 2, t = i / 2;
            const uint32_t word = layer[group % 2][i];
            float low = sums[t][2 * half], high = sums[t][2 * half + 1];
            low = fmaf(factor[half], __uint_as_float(own[i] << 16), low);
            high = fmaf(factor[half], __uint_as_float(own[i] & 0xffff0000u), high);
            low = fmaf(h_pre[half], __uint_as_float(word << 16), low);
            high = fmaf(h_pre[half], __uint_as_float(word & 0xffff0000u), high);
            if (POST) {
                low += __uint_as_float(more[i] << 16);
                high += __uint_as_float(more[i] & 0xffff0000u);
            }
            const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
            own[i] = *(const uint32_t *)&pair;
        }
        cot_stmatrix_x4(unit_of(x, group), own);
        if (POST && group % 2 != 0) {
            __syncwarp();
            if (lane == 0)
                cot_mbarrier_arrive(&s.post_empty[group / 2]);
        }
    }
}

static __device__ __forceinline__ void store_Q(const mhc_call &c, const float (&Q)[GROUPS][OCTETS][4], int64_t d)
{
    const int lane = threadIdx.x % 32;
    float *to = c.partial + (int64_t)(blockIdx.x / MHC_SM90_CLUSTER) * M * N * c.D + d;
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                to[((octet * 8 + lane % 4 * 2 + i % 2) * N + group / 2) * c.D + column_of(group) + lane / 4 +
                   i / 2 * 8] = Q[group][octet][i];
}

template <bool POST>
static __device__ __forceinline__ void products(const mhc_call &c, shared_memory<POST> &s, int rank, int tiles)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = warp / 2;
    uint32_t second[GROUPS][6];
    load_phi<0, GROUPS / 2>(c, s, warp, second);
    cot_cluster_wait();
    load_phi<GROUPS / 2, GROUPS>(c, s, warp, second);
    float Q[GROUPS][OCTETS][4] = {0};
    /* The units of sixteen bytes, of the first group, that the lane names to ldmatrix: for A, tokens first; for B and for
     * A's transpose, columns first. */
    const uint32_t block = cot_shared_address(s.stages[0]) + (uint32_t)(chunk * BLOCK_BYTES);
    const uint32_t by_token = block + (uint32_t)(lane % 16 * 128 + ((warp % 2 * 4 + lane / 16) ^ lane % 8) * 16);
    const uint32_t by_column =
        block + (uint32_t)((lane / 16 * 8 + lane % 8) * 128 + ((warp % 2 * 4 + lane / 8 % 2) ^ lane % 8) * 16);
    cot_ring<s.STAGES> next;
    const uint32_t dx_post = cot_shared_address(s.dx_post[0]) - cot_shared_address(s.stages[0]);
    uint32_t parity = 0, turn = 0;
    int ahead = (int)(blockIdx.x / MHC_SM90_CLUSTER);
    FOR_EACH_TILE(tile, ring, tiles)
    {
        /* The first time two tiles, then one. */
        for (; ahead < tiles && ahead <= tile + MHC_SM90_CLUSTERS; ahead += MHC_SM90_CLUSTERS, next.next()) {
            cot_mbarrier_wait(&s.full[next.slot], next.parity);
            const uint32_t slot = (uint32_t)(next.slot * STAGE_BYTES);
            take_dh_pre(s, by_column + slot, by_token + slot + X_BYTES, warp, parity);
            parity ^= 1;
        }
        cot_mbarrier_wait(&s.sent[ring.slot], ring.parity);
        if (threadIdx.x == 0)
            cot_mbarrier_arrive_expect(&s.sent[ring.slot], sizeof s.records[0]);
        const uint32_t slot = (uint32_t)(ring.slot * STAGE_BYTES);
        take_Q(by_column + slot, cot_shared_address(s.records[ring.slot]), Q);
        if (given(c.dx)) {
            give_dx<POST>(c, s, by_token + slot, by_token + slot + X_BYTES, by_token + dx_post, ring, warp, turn,
                          second);
            cot_proxy_fence();
        }
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive(&s.done[ring.slot]);
        turn ^= 1;
    }
    const int64_t d = first_column();
    if (d < c.D && (given(c.dphi) || given(c.dgamma)))
        store_Q(c, Q, d);
}

/* ---- the others --------------------------------------------------------------------------------------- */

template <bool POST> static __device__ __forceinline__ void reduce(shared_memory<POST> &s, int rank, int tiles)
{
    const int token = threadIdx.x % 32;
    uint32_t parity = 0;
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, tiles)
    {
        cot_mbarrier_wait(&s.partial_full, parity);
        if (token < TILE) {
            float4 sum = *(const float4 *)s.partial[0][token];
#pragma unroll
            for (int warp = 1; warp < PRODUCTS; warp++) {
                const float4 more = *(const float4 *)s.partial[warp][token];
                sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
            }
            cot_store_async(cot_map_shared(cot_shared_address(s.gathered[ring.slot][rank]), token),
                            cot_map_shared(cot_shared_address(&s.gathered_full[ring.slot]), token),
                            __float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z),
                            __float_as_uint(sum.w));
        }
        __syncwarp();
        if (token == 0)
            cot_mbarrier_arrive(&s.partial_empty);
        parity ^= 1;
    }
}

static __device__ __forceinline__ float sum_over_warp(float value)
{
#pragma unroll
    for (int width = 16; width >= 1; width /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, width);
    return value;
}

template <bool POST> static __device__ __forceinline__ void send_record(shared_memory<POST> &s, int slot, int rank)
{
    const uint32_t to = cot_shared_address(&s.records[slot][rank]), barrier = cot_shared_address(&s.sent[slot]);
    __syncwarp();
#pragma unroll
    for (uint32_t number = threadIdx.x % 32; number < RECORD_UNITS * MHC_SM90_CLUSTER; number += 32) {
        const uint32_t block = number / RECORD_UNITS, unit = number % RECORD_UNITS;
        const uint4 words = ((const uint4 *)&s.own)[unit];
        cot_store_async(cot_map_shared(to + unit * 16, block), cot_map_shared(barrier, block), words.x, words.y,
                        words.z, words.w);
    }
    __syncwarp();
}

static __device__ __forceinline__ float load_element(const mhc_array &a, uint32_t b, uint32_t t, int i, int j = 0)
{
    return load_f32(a, b * a.stride[0] + t * a.stride[1] + i * a.stride[2] + j * a.stride[3]);
}

/* dz of a coefficient but those of h_pre: from mhc_pre_dz if Sinkhorn's gradient is in it. */
static __device__ __forceinline__ float load_dz(const mhc_call &c, uint32_t token, uint32_t b, uint32_t t, int j)
{
    if (j < N)
        return 0.0f;
    if (c.dz != nullptr)
        return c.dz[(int64_t)token * M + j];
    if (j < 2 * N) {
        const float h_post = load_element(c.h_post, b, t, j - N);
        return load_element(c.dh_post, b, t, j - N) * h_post * (1.0f - h_post / c.post_scale);
    }
    const int ij = j - 2 * N;
    return given(c.dh_res) ? load_element(c.dh_res, b, t, ij / N, ij % N) : 0.0f;
}

template <bool POST>
static __device__ __forceinline__ void own_token(const mhc_call &c, shared_memory<POST> &s, int rank, int tiles)
{
    const int lane = threadIdx.x % 32;
    const float alpha = lane < M ? load_f32(c.alpha, group_of(N, lane) * c.alpha.stride[0]) : 0.0f;
    double dbias = 0, dalpha = 0;
    cot_wait_for_kernels_before(); /* mhc_pre_dz, if any */
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, tiles)
    {
        const uint32_t token = (uint32_t)(tile * TILE + rank), b = token / (uint32_t)c.T, t = token - b * (uint32_t)c.T;
        const bool there = token < c.tokens, has = there && lane < M;
        float dz = has ? load_dz(c, token, b, t, lane) : 0.0f;
        const float h_mix = has ? load_element(c.h_mix, b, t, lane) : 0.0f;
        const float inv_rms = there ? load_element(c.inv_rms, b, t, 0) : 0.0f;
        const float h_pre = there && lane < N ? load_element(c.h_pre, b, t, lane) : 0.0f;
        cot_mbarrier_wait(&s.gathered_full[ring.slot], ring.parity);
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive_expect(&s.gathered_full[ring.slot], sizeof s.gathered[0]);
        float dh_pre = s.gathered[ring.slot][lane / 4][lane % 4] + s.gathered[ring.slot][lane / 4 + 8][lane % 4];
#pragma unroll
        for (int width = 16; width >= 4; width /= 2)
            dh_pre += __shfl_xor_sync(0xffffffffu, dh_pre, width);
        if (lane < N && there) {
            const float sigma = h_pre - c.hc_eps;
            dz = dh_pre * sigma * (1.0f - sigma);
        }
        const float du = alpha * dz, mix = du * inv_rms;
        const float factor = -sum_over_warp(du * h_mix) * inv_rms * inv_rms * inv_rms / (float)(N * c.D);
        dbias += (double)dz;
        dalpha += (double)dz * (double)(h_mix * inv_rms);
        if (lane < M) {
            float rest = mix;
#pragma unroll
            for (int term = 0; term < TERMS; term++) {
                s.own.terms[term][lane] = __float2bfloat16_rn(rest);
                rest -= __bfloat162float(__float2bfloat16_rn(rest));
            }
        }
        if (lane < N)
            s.own.h_pre[lane] = h_pre;
        if (lane == 0)
            s.own.factor = factor;
        send_record(s, ring.slot, rank);
    }
    if (lane < M) {
        double *to = c.token_sums + ((int64_t)blockIdx.x * M + lane) * 2;
        to[0] = dbias;
        to[1] = dalpha;
    }
}

template <bool POST>
static __device__ __forceinline__ void load_tile(const mhc_mapped_call &p, shared_memory<POST> &s, int slot, int tile,
                                                 int rank)
{
    cot_mbarrier_arrive_expect(&s.full[slot], STAGE_BYTES);
    cot_tensor_load_4d(s.stages[slot], &p.x, 0, tile * TILE, rank * MHC_SM90_CHUNKS, 0, &s.full[slot]);
    cot_tensor_load_4d(s.stages[slot] + X_BYTES, &p.dh_in, 0, tile * TILE, rank * MHC_SM90_CHUNKS, 0, &s.full[slot]);
}

template <bool POST>
static __device__ __forceinline__ void produce(const mhc_mapped_call &p, shared_memory<POST> &s, int rank, int tiles)
{
    cot_cluster_wait();
    if (threadIdx.x % 32 == 0) {
        const int first = (int)(blockIdx.x / MHC_SM90_CLUSTER);
        for (int slot = 0; slot < s.STAGES && first + slot * MHC_SM90_CLUSTERS < tiles; slot++)
            load_tile(p, s, slot, first + slot * MHC_SM90_CLUSTERS, rank);
        FOR_EACH_TILE(tile, ring, tiles)
        {
            cot_mbarrier_wait(&s.done[ring.slot], ring.parity);
            if (given(p.call.dx)) {
                cot_tensor_store_4d(&p.dx, 0, tile * TILE, rank * MHC_SM90_CHUNKS, 0, s.stages[ring.slot]);
                cot_bulk_commit();
                cot_bulk_wait_read();
            }
            if (tile + s.STAGES * MHC_SM90_CLUSTERS < tiles)
                load_tile(p, s, ring.slot, tile + s.STAGES * MHC_SM90_CLUSTERS, rank);
        }
        cot_bulk_wait();
    }
    __syncwarp();
}

/* dx_post, a stream at a time as soon as that of the tile before is read. */
static __device__ __forceinline__ void produce_dx_post(const mhc_mapped_call &p, shared_memory<true> &s, int rank,
                                                       int tiles)
{
    cot_cluster_wait();
    if (threadIdx.x % 32 == 0) {
        uint32_t parity = 1;
        FOR_EACH_TILE(tile, ring, tiles)
        {
            for (int i = 0; i < N; i++) {
                cot_mbarrier_wait(&s.post_empty[i], parity);
                cot_mbarrier_arrive_expect(&s.post_full[i], STREAM_BYTES);
                cot_tensor_load_4d(s.dx_post[i], &p.dx_post, 0, tile * TILE, rank * MHC_SM90_CHUNKS, i,
                                   &s.post_full[i]);
            }
            parity ^= 1;
        }
    }
    __syncwarp();
}

template <bool POST> static __device__ __forceinline__ void backward(const mhc_mapped_call &p)
{
    shared_memory<POST> &s = *(shared_memory<POST> *)memory;
    const mhc_call &c = p.call;
    const int rank = (int)cot_cluster_rank(), warp = threadIdx.x / 32;
    const int tiles = (int)((c.tokens + TILE - 1) / TILE);
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < s.STAGES; slot++) {
            cot_mbarrier_init(&s.full[slot], 1);
            cot_mbarrier_init(&s.gathered_full[slot], 1);
            cot_mbarrier_init(&s.sent[slot], 1);
            cot_mbarrier_init(&s.done[slot], PRODUCTS);
            cot_mbarrier_arrive_expect(&s.gathered_full[slot], sizeof s.gathered[0]);
            cot_mbarrier_arrive_expect(&s.sent[slot], sizeof s.records[0]);
        }
        cot_mbarrier_init(&s.partial_full, PRODUCTS);
        cot_mbarrier_init(&s.partial_empty, 1);
        for (int i = 0; i < N; i++) {
            cot_mbarrier_init(&s.post_full[i], 1);
            cot_mbarrier_init(&s.post_empty[i], PRODUCTS);
        }
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    cot_cluster_arrive(); /* awaited before the first store to another block */
    if (warp < PRODUCTS) {
        cot_more_registers<POST ? 224 : 216>();
        products<POST>(c, s, rank, tiles);
    } else {
        cot_fewer_registers<POST ? 56 : 72>();
        if (warp == PRODUCTS)
            reduce(s, rank, tiles);
        else if (warp == PRODUCTS + 1)
            own_token(c, s, rank, tiles);
        else if (warp == PRODUCTS + 2)
            produce(p, s, rank, tiles);
        else if constexpr (POST)
            produce_dx_post(p, s, rank, tiles);
        else
            cot_cluster_wait();
    }
    cot_cluster_arrive(); /* nobody leaves while another block may write here */
    cot_cluster_wait();
}

extern "C" __global__ void __launch_bounds__(MHC_SM90_BWD_THREADS, 1)
    mhc_pre_bwd_cluster_sm90(const __grid_constant__ mhc_mapped_call p)
{
    backward<false>(p);
}

/* With dx_post. */
extern "C" __global__ void __launch_bounds__(MHC_SM90_BWD_THREADS, 1)
    mhc_pre_bwd_cluster_post_sm90(const __grid_constant__ mhc_mapped_call p)
{
    backward<true>(p);
}
