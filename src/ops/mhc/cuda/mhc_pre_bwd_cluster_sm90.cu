/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_cluster_sm90.cu: pre backward in one pass over x and dh_in, n = 4, bf16. Tiles, blocks and owners are those
 * of mhc_pre_fwd_cluster_sm90.cu; dz of post and res is in the workspace already (mhc_pre_dz). A ring slot a tile:
 *
 *   producer     x and dh_in of the tile to shared memory; later dx from where x was
 *   16 products  warps, 64 columns of one stream each. First the warp's part of dh_pre, the diagonal of dh_in x^T. Then,
 *                with what the owners have sent:
 *                  Q  += x^T dh_mix     dh_mix as three bf16 terms; tensor cores cut sums off, so each tile's product
 *                                       is added to Q, in registers to the end, by float32 additions
 *                  dx = dh_mix (phi gamma) + c x + h_pre dh_in
 *                                       dh_mix and phi gamma as one f16 term each, scaled by powers of two, the former
 *                                       token by token, the latter warp by warp: their rounding, 2^-12, is an eighth of
 *                                       bf16's and far below it in the sum
 *   reducer      adds up the streams' warps and sends each token's dh_pre to its owner
 *   owner        adds up the blocks' dh_pre, computes dh_mix and c of its token, sends them to all blocks, and adds up
 *                the terms of dbias and dalpha
 *
 *   barrier           arrivals                phase ends when
 *   full[slot]        producer's one          the tile has its bytes
 *   partial_full      a warp of products      all warps' parts of dh_pre are there
 *   partial_empty     the reducer             those are read
 *   gathered[slot]    owner's one             dh_pre of all blocks for its token has come
 *   sent[slot]        products' one           the records of all the tile's tokens have come
 *   done[slot]        a warp of products      dx lies where x was
 *
 * Slots of other blocks are written without asking, as in the forward. The products look one tile ahead, for dh_pre of
 * it to go around while they work on the one before. */
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
    STAGES = 4,
    BLOCK_BYTES = TILE * 128, /* a warp's columns of a tile */
    X_BYTES = N * MHC_SM90_CHUNKS * BLOCK_BYTES,
    STAGE_BYTES = X_BYTES + MHC_SM90_CHUNKS * BLOCK_BYTES,
    PRODUCTS = N * MHC_SM90_CHUNKS,
    TERMS = 3
};

/* What an owner sends. */
struct token_record {
    __half mix[M];                 /* dh_mix / unscale */
    __nv_bfloat16 terms[TERMS][M]; /* dh_mix is their sum */
    float factor, unscale, unused[2];
    float h_pre[N];
};
enum { RECORD_UNITS = sizeof(token_record) / 16 };
static_assert(sizeof(token_record) == 224, "whole units of 16 bytes");

struct shared_memory {
    unsigned char stages[STAGES][STAGE_BYTES]; /* x [stream][chunk][token][128 bytes, swizzled], then dh_in alike */
    uint2 phi[PRODUCTS][12][32];               /* fragments of B: 3 registers for each 8 columns of a warp */
    token_record records[STAGES][TILE], own;
    float gathered[STAGES][MHC_SM90_CLUSTER][N];
    float partial[PRODUCTS][TILE];
    uint64_t full[STAGES], gathered_full[STAGES], sent[STAGES], done[STAGES], partial_full, partial_empty;
};
static_assert(sizeof(shared_memory) <= MHC_SM90_SHARED_BYTES, "a block's shared memory");
extern __shared__ __align__(1024) unsigned char memory[];

#define FOR_EACH_TILE(tile, ring, count) \
    cot_ring<STAGES> ring;               \
    for (int tile = (int)(blockIdx.x / MHC_SM90_CLUSTER); tile < (count); tile += MHC_SM90_CLUSTERS, ring.next())

/* ---- products ----------------------------------------------------------------------------------------- */

/* 2^-e with which values up to `most` come to less than 2^14, and 2^e; e is limited to where both are normal. */
static __device__ __forceinline__ float scale_for(uint32_t most, float *unscale)
{
    const int exponent = min(max((int)(most >> 23), 20), 240);
    *unscale = __uint_as_float((uint32_t)(exponent - 13) << 23);
    return __uint_as_float((uint32_t)(267 - exponent) << 23);
}

static __device__ __forceinline__ uint32_t pack_halves(float low, float high)
{
    const __half2 pair = __floats2half2_rn(low, high);
    return *(const uint32_t *)&pair;
}

/* phi gamma of the warp's columns, scaled, to shared memory. Returns what products with it are to be multiplied by. */
static __device__ __forceinline__ float load_phi(const mhc_call &c, shared_memory &s, int warp, int stream, int64_t d)
{
    const int lane = threadIdx.x % 32;
    float values[8][6];
    uint32_t most = 0;
#pragma unroll
    for (int t = 0; t < 8; t++) {
        const int64_t column = d + t / 2 * 16 + lane / 8 * 4 + t % 2 * 2 + lane / 4 % 2; /* see give_dx */
        const bool inside = d < c.D;
        const float gamma = given(c.gamma) && inside
                                ? load_f32(c.gamma, stream * c.gamma.stride[0] + column * c.gamma.stride[1])
                                : 1.0f;
#pragma unroll
        for (int r = 0; r < 6; r++) {
            const int j = r / 2 * 8 + lane % 4 * 2 + r % 2;
            values[t][r] =
                inside ? load_f32(c.phi, j * c.phi.stride[0] + (stream * c.D + column) * c.phi.stride[1]) * gamma
                       : 0.0f;
            most = max(most, __float_as_uint(fabsf(values[t][r])));
        }
    }
    float unscale;
    const float scale = scale_for(__reduce_max_sync(0xffffffffu, most), &unscale);
#pragma unroll
    for (int v = 0; v < 12; v++) {
        uint32_t words[2];
#pragma unroll
        for (int w = 0; w < 2; w++) {
            const int t = (v * 2 + w) / 3, pair = (v * 2 + w) % 3 * 2;
            words[w] = pack_halves(values[t][pair] * scale, values[t][pair + 1] * scale);
        }
        s.phi[warp][v][lane] = make_uint2(words[0], words[1]);
    }
    __syncwarp();
    return unscale;
}

/* The warp's part of dh_pre of its stream, of tokens g and g+8 in the lanes that hold the diagonal. */
static __device__ __forceinline__ void take_dh_pre(shared_memory &s, uint32_t x, uint32_t dh_in, int warp,
                                                   uint32_t parity)
{
    const int lane = threadIdx.x % 32;
    const uint32_t row = (uint32_t)(lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16);
    float sums[2][4] = {0};
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t A[4], B[4];
        cot_ldmatrix_x4(A, (dh_in + row) ^ (step * 32));
        cot_ldmatrix_x4(B, (x + row) ^ (step * 32));
        cot_mma_bf16(sums[0], A[0], A[1], A[2], A[3], B[0], B[2]);
        cot_mma_bf16(sums[1], A[0], A[1], A[2], A[3], B[1], B[3]);
    }
    cot_mbarrier_wait(&s.partial_empty, parity ^ 1);
#pragma unroll
    for (int p = 0; p < 2; p++)
        if (lane % 4 * 2 + p == lane / 4) {
            s.partial[warp][lane / 4] = sums[0][p];
            s.partial[warp][lane / 4 + 8] = sums[1][2 + p];
        }
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.partial_full);
}

/* Q += x^T dh_mix: [16 columns][8 rows of phi] in each of Q's fragments. */
static __device__ __forceinline__ void take_Q(uint32_t x, uint32_t records, float (&Q)[4][OCTETS][4])
{
    const int lane = threadIdx.x % 32;
    const uint32_t token = (uint32_t)(lane % 16);
    uint32_t B[TERMS * OCTETS + 1][2];
#pragma unroll
    for (int pair = 0; pair < TERMS * OCTETS; pair += 2) {
        const int last = TERMS * OCTETS - 1, second = pair + 1 < last ? pair + 1 : last;
        uint32_t r[4];
        cot_ldmatrix_x4_trans(r, records + token * (uint32_t)sizeof(token_record) + M * 2 +
                                     (uint32_t)(lane < 16 ? pair : second) * 16);
        B[pair][0] = r[0], B[pair][1] = r[1], B[pair + 1][0] = r[2], B[pair + 1][1] = r[3];
    }
    const uint32_t row = (uint32_t)((lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16);
#pragma unroll
    for (int m = 0; m < 4; m++) {
        uint32_t A[4];
        cot_ldmatrix_x4_trans(A, (x + row) ^ (m * 32));
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++) {
            float product[4] = {0};
#pragma unroll
            for (int term = TERMS - 1; term >= 0; term--)
                cot_mma_bf16(product, A[0], A[1], A[2], A[3], B[term * OCTETS + octet][0], B[term * OCTETS + octet][1]);
#pragma unroll
            for (int i = 0; i < 4; i++)
                Q[m][octet][i] += product[i];
        }
    }
}

/* dx in the place of x. Columns are dealt out so that a lane has four neighbours of each sixteen: column p of its two of
 * product t is 16 (t / 2) + 4 q + 2 (t % 2) + p. */
template <bool POST>
static __device__ __forceinline__ void give_dx(const mhc_call &c, shared_memory &s, unsigned char *x,
                                               const unsigned char *dh_in, const token_record *records, int warp,
                                               int stream, float unscale_phi, const __nv_bfloat16 *dx_post, int count)
{
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int64_t stride = c.dx_post.stride[c.T > 1 ? 1 : 0];
    uint32_t A[6];
    float factor[2], unscale[2], h_pre[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const token_record &r = records[g + half * 8];
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++)
            A[octet * 2 + half] = *(const uint32_t *)&r.mix[octet * 8 + q * 2];
        factor[half] = r.factor;
        unscale[half] = r.unscale * unscale_phi;
        h_pre[half] = r.h_pre[stream];
    }
#pragma unroll
    for (int u = 0; u < 4; u++) { /* sixteen columns */
        uint2 more[2];
        if (POST)
#pragma unroll
            for (int half = 0; half < 2; half++)
                more[half] = g + half * 8 < count
                                 ? __ldg((const uint2 *)(dx_post + (g + half * 8) * stride + u * 16 + q * 4))
                                 : make_uint2(0, 0);
        uint32_t phi[6];
        float sums[2][4] = {0};
#pragma unroll
        for (int v = 0; v < 3; v++) {
            const uint2 words = s.phi[warp][u * 3 + v][lane];
            phi[2 * v] = words.x, phi[2 * v + 1] = words.y;
        }
#pragma unroll
        for (int t = 0; t < 2; t++) {
            cot_mma_f16(sums[t], A[0], A[1], A[2], A[3], phi[3 * t], phi[3 * t + 1]);
            cot_mma_f16_k8(sums[t], A[4], A[5], phi[3 * t + 2]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = (g + half * 8) * 128 + ((2 * u + q / 2) ^ g) * 16 + q % 2 * 8;
            const uint2 own = *(const uint2 *)(x + at), layer = *(const uint2 *)(dh_in + at);
            const uint32_t own_words[2] = {own.x, own.y}, layer_words[2] = {layer.x, layer.y};
            const uint32_t more_words[2] = {more[half].x, more[half].y};
            uint32_t out[2];
#pragma unroll
            for (int t = 0; t < 2; t++) {
                float low = sums[t][2 * half] * unscale[half], high = sums[t][2 * half + 1] * unscale[half];
                low = fmaf(factor[half], __uint_as_float(own_words[t] << 16), low);
                high = fmaf(factor[half], __uint_as_float(own_words[t] & 0xffff0000u), high);
                low = fmaf(h_pre[half], __uint_as_float(layer_words[t] << 16), low);
                high = fmaf(h_pre[half], __uint_as_float(layer_words[t] & 0xffff0000u), high);
                if (POST) {
                    low += __uint_as_float(more_words[t] << 16);
                    high += __uint_as_float(more_words[t] & 0xffff0000u);
                }
                const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
                out[t] = *(const uint32_t *)&pair;
            }
            *(uint2 *)(x + at) = make_uint2(out[0], out[1]);
        }
    }
}

static __device__ __forceinline__ void store_Q(const mhc_call &c, const float (&Q)[4][OCTETS][4], int stream, int64_t d)
{
    const int lane = threadIdx.x % 32;
    float *to = c.partial + (int64_t)(blockIdx.x / MHC_SM90_CLUSTER) * M * N * c.D + stream * c.D + d;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                to[(octet * 8 + lane % 4 * 2 + i % 2) * N * c.D + m * 16 + lane / 4 + i / 2 * 8] = Q[m][octet][i];
}

template <bool POST>
static __device__ __forceinline__ void products(const mhc_call &c, shared_memory &s, int rank, int tiles)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int stream = warp / MHC_SM90_CHUNKS, chunk = warp % MHC_SM90_CHUNKS;
    const int64_t d = rank * MHC_SM90_COLUMNS + chunk * MHC_SM90_CHUNK;
    const float unscale_phi = load_phi(c, s, warp, stream, d);
    float Q[4][OCTETS][4] = {0};
    unsigned char *x = s.stages[0] + warp * BLOCK_BYTES, *dh_in = s.stages[0] + X_BYTES + chunk * BLOCK_BYTES;
    cot_cluster_wait();
    cot_ring<STAGES> next;
    uint32_t parity = 0;
    int ahead = (int)(blockIdx.x / MHC_SM90_CLUSTER);
    FOR_EACH_TILE(tile, ring, tiles)
    {
        /* The first time two tiles, then one. */
        for (; ahead < tiles && ahead <= tile + MHC_SM90_CLUSTERS; ahead += MHC_SM90_CLUSTERS, next.next()) {
            cot_mbarrier_wait(&s.full[next.slot], next.parity);
            take_dh_pre(s, cot_shared_address(x) + (uint32_t)(next.slot * STAGE_BYTES),
                        cot_shared_address(dh_in) + (uint32_t)(next.slot * STAGE_BYTES), warp, parity);
            parity ^= 1;
        }
        cot_mbarrier_wait(&s.sent[ring.slot], ring.parity);
        if (threadIdx.x == 0)
            cot_mbarrier_arrive_expect(&s.sent[ring.slot], sizeof s.records[0]);
        take_Q(cot_shared_address(x) + (uint32_t)(ring.slot * STAGE_BYTES), cot_shared_address(s.records[ring.slot]),
               Q);
        if (given(c.dx)) {
            const int count = d < c.D ? (int)c.tokens - tile * TILE : 0;
            const __nv_bfloat16 *dx_post = (const __nv_bfloat16 *)c.dx_post.data;
            if (POST)
                dx_post += (int64_t)tile * TILE * c.dx_post.stride[c.T > 1 ? 1 : 0] + stream * c.dx_post.stride[2] + d;
            give_dx<POST>(c, s, x + ring.slot * STAGE_BYTES, dh_in + ring.slot * STAGE_BYTES, s.records[ring.slot],
                          warp, stream, unscale_phi, dx_post, count);
            cot_proxy_fence();
        }
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive(&s.done[ring.slot]);
    }
    if (d < c.D && (given(c.dphi) || given(c.dgamma)))
        store_Q(c, Q, stream, d);
}

/* ---- the others --------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void reduce(shared_memory &s, int rank, int tiles)
{
    const int token = threadIdx.x % 32;
    uint32_t parity = 0;
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, tiles)
    {
        cot_mbarrier_wait(&s.partial_full, parity);
        if (token < TILE) {
            float sum[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                sum[i] = s.partial[i * MHC_SM90_CHUNKS][token];
#pragma unroll
                for (int chunk = 1; chunk < MHC_SM90_CHUNKS; chunk++)
                    sum[i] += s.partial[i * MHC_SM90_CHUNKS + chunk][token];
            }
            cot_store_async(cot_map_shared(cot_shared_address(s.gathered[ring.slot][rank]), token),
                            cot_map_shared(cot_shared_address(&s.gathered_full[ring.slot]), token),
                            __float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                            __float_as_uint(sum[3]));
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

static __device__ __forceinline__ void send_record(shared_memory &s, int slot, int rank)
{
    const uint32_t to = cot_shared_address(&s.records[slot][rank]), barrier = cot_shared_address(&s.sent[slot]);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < RECORD_UNITS * MHC_SM90_CLUSTER / 32; r++) {
        const uint32_t number = threadIdx.x % 32 + 32 * r, block = number / RECORD_UNITS, unit = number % RECORD_UNITS;
        const uint4 words = ((const uint4 *)&s.own)[unit];
        cot_store_async(cot_map_shared(to + unit * 16, block), cot_map_shared(barrier, block), words.x, words.y,
                        words.z, words.w);
    }
    __syncwarp();
}

static __device__ __forceinline__ float load_element(const mhc_array &a, uint32_t b, uint32_t t, int i)
{
    return load_f32(a, b * a.stride[0] + t * a.stride[1] + i * a.stride[2]);
}

static __device__ __forceinline__ void own_token(const mhc_call &c, shared_memory &s, int rank, int tiles)
{
    const int lane = threadIdx.x % 32;
    const float alpha = lane < M ? load_f32(c.alpha, group_of(N, lane) * c.alpha.stride[0]) : 0.0f;
    double dbias = 0, dalpha = 0;
    cot_wait_for_kernels_before(); /* mhc_pre_dz */
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, tiles)
    {
        const uint32_t token = (uint32_t)(tile * TILE + rank), b = token / (uint32_t)c.T, t = token - b * (uint32_t)c.T;
        const bool there = token < c.tokens, has = there && lane < M;
        float dz = has && lane >= N ? c.dz[(int64_t)token * M + lane] : 0.0f;
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
        float unscale;
        const float scale = scale_for(__reduce_max_sync(0xffffffffu, __float_as_uint(fabsf(mix))), &unscale);
        if (lane < M) {
            s.own.mix[lane] = __float2half_rn(mix * scale);
            float rest = mix;
#pragma unroll
            for (int term = 0; term < TERMS; term++) {
                s.own.terms[term][lane] = __float2bfloat16_rn(rest);
                rest -= __bfloat162float(__float2bfloat16_rn(rest));
            }
        }
        if (lane < N)
            s.own.h_pre[lane] = h_pre;
        if (lane == 0) {
            s.own.factor = factor;
            s.own.unscale = unscale;
        }
        send_record(s, ring.slot, rank);
    }
    if (lane < M) {
        double *to = c.token_sums + ((int64_t)blockIdx.x * M + lane) * 2;
        to[0] = dbias;
        to[1] = dalpha;
    }
}

static __device__ __forceinline__ void load_tile(const mhc_mapped_call &p, shared_memory &s, int slot, int tile,
                                                 int rank)
{
    cot_mbarrier_arrive_expect(&s.full[slot], STAGE_BYTES);
    cot_tensor_load_4d(s.stages[slot], &p.x, 0, tile * TILE, rank * MHC_SM90_CHUNKS, 0, &s.full[slot]);
    cot_tensor_load_4d(s.stages[slot] + X_BYTES, &p.dh_in, 0, tile * TILE, rank * MHC_SM90_CHUNKS, 0, &s.full[slot]);
    if (given(p.call.dx_post))
        cot_tensor_prefetch_4d(&p.dx_post, 0, tile * TILE, rank * MHC_SM90_CHUNKS, 0);
}

static __device__ __forceinline__ void produce(const mhc_mapped_call &p, shared_memory &s, int rank, int tiles)
{
    cot_cluster_wait();
    if (threadIdx.x % 32 == 0) {
        const int first = (int)(blockIdx.x / MHC_SM90_CLUSTER);
        for (int slot = 0; slot < STAGES && first + slot * MHC_SM90_CLUSTERS < tiles; slot++)
            load_tile(p, s, slot, first + slot * MHC_SM90_CLUSTERS, rank);
        FOR_EACH_TILE(tile, ring, tiles)
        {
            cot_mbarrier_wait(&s.done[ring.slot], ring.parity);
            if (given(p.call.dx)) {
                cot_tensor_store_4d(&p.dx, 0, tile * TILE, rank * MHC_SM90_CHUNKS, 0, s.stages[ring.slot]);
                cot_bulk_commit();
                cot_bulk_wait_read();
            }
            if (tile + STAGES * MHC_SM90_CLUSTERS < tiles)
                load_tile(p, s, ring.slot, tile + STAGES * MHC_SM90_CLUSTERS, rank);
        }
        cot_bulk_wait();
    }
    __syncwarp();
}

template <bool POST> static __device__ __forceinline__ void backward(const mhc_mapped_call &p)
{
    shared_memory &s = *(shared_memory *)memory;
    const mhc_call &c = p.call;
    const int rank = (int)cot_cluster_rank(), warp = threadIdx.x / 32;
    const int tiles = (int)((c.tokens + TILE - 1) / TILE);
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < STAGES; slot++) {
            cot_mbarrier_init(&s.full[slot], 1);
            cot_mbarrier_init(&s.gathered_full[slot], 1);
            cot_mbarrier_init(&s.sent[slot], 1);
            cot_mbarrier_init(&s.done[slot], PRODUCTS);
            cot_mbarrier_arrive_expect(&s.gathered_full[slot], sizeof s.gathered[0]);
            cot_mbarrier_arrive_expect(&s.sent[slot], sizeof s.records[0]);
        }
        cot_mbarrier_init(&s.partial_full, PRODUCTS);
        cot_mbarrier_init(&s.partial_empty, 1);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    cot_cluster_arrive(); /* awaited before the first store to another block */
    if (warp < PRODUCTS) {
        cot_more_registers<104>();
        products<POST>(c, s, rank, tiles);
    } else {
        cot_fewer_registers<64>();
        if (warp == PRODUCTS)
            reduce(s, rank, tiles);
        else if (warp == PRODUCTS + 1)
            own_token(c, s, rank, tiles);
        else if (warp == PRODUCTS + 2)
            produce(p, s, rank, tiles);
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
