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
 *   owner        sends its token's dh_mix to all blocks: first what is known of it, then what needs dh_pre, which it adds
 *                up over the blocks, and c; and adds up the terms of dbias and dalpha
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
#include "mhc_pre_bwd_sm90.cuh"

enum { RECORD_UNITS = sizeof(token_record) / 16 };

/* With dx_post, whose tile takes the place of a slot. */
template <bool POST> struct shared_memory {
    enum { STAGES = POST ? 3 : 4 };
    unsigned char stages[STAGES][STAGE_BYTES]; /* x [stream][chunk][token][128 bytes, swizzled], then dh_in alike */
    unsigned char dx_post[POST ? N : 1][POST ? STREAM_BYTES : 1024];
    phi_fragments<GROUPS> phi;
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

static __device__ __forceinline__ int64_t first_column(void)
{
    return cot_cluster_rank() * MHC_SM90_COLUMNS + threadIdx.x / 32 * COLUMNS;
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
    arrive_as_warp(&s.partial_full);
}

template <bool POST>
static __device__ __forceinline__ void products(const mhc_call &c, shared_memory<POST> &s, int rank, int tiles)
{
    const int warp = threadIdx.x / 32;
    uint32_t second[GROUPS][6];
    load_phi<0, GROUPS / 2>(c, s, first_column(), warp, second);
    cot_cluster_wait();
    load_phi<GROUPS / 2, GROUPS>(c, s, first_column(), warp, second);
    float Q[GROUPS][OCTETS][4] = {0};
    const lane_units at = find_units(s, warp);
    cot_ring<s.STAGES> next;
    uint32_t parity = 0, turn = 0;
    int ahead = (int)(blockIdx.x / MHC_SM90_CLUSTER);
    FOR_EACH_TILE(tile, ring, tiles)
    {
        /* The first time two tiles, then one. */
        for (; ahead < tiles && ahead <= tile + MHC_SM90_CLUSTERS; ahead += MHC_SM90_CLUSTERS, next.next()) {
            cot_mbarrier_wait(&s.full[next.slot], next.parity);
            const uint32_t slot = (uint32_t)(next.slot * STAGE_BYTES);
            take_dh_pre(s, at.by_column + slot, at.by_token + slot + X_BYTES, warp, parity);
            parity ^= 1;
        }
        cot_mbarrier_wait(&s.sent[ring.slot], ring.parity);
        if (threadIdx.x == 0)
            cot_mbarrier_arrive_expect(&s.sent[ring.slot], sizeof s.records[0]);
        multiply_tile<__nv_bfloat16, POST>(c, s, at, ring, warp, turn, second, Q);
        turn ^= 1;
    }
    const int64_t d = first_column();
    if (d < c.D && (given(c.dphi) || given(c.dgamma)))
        store_Q(c, Q, (int64_t)(blockIdx.x / MHC_SM90_CLUSTER), d);
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
        arrive_as_warp(&s.partial_empty);
        parity ^= 1;
    }
}

/* Sends a share of s.own's units to all blocks: first those that dh_pre is not in, then the four others, the first of each
 * term's three and the last. */
template <bool LATE, bool POST>
static __device__ __forceinline__ void send_units(shared_memory<POST> &s, int slot, int rank)
{
    constexpr uint32_t COUNT = LATE ? 4 : RECORD_UNITS - 4;
    const uint32_t to = cot_shared_address(&s.records[slot][rank]), barrier = cot_shared_address(&s.sent[slot]);
    __syncwarp();
#pragma unroll LATE ? 2 : 1
    for (uint32_t number = threadIdx.x % 32; number < COUNT * MHC_SM90_CLUSTER; number += 32) {
        const uint32_t block = number / COUNT, which = number % COUNT;
        const uint32_t unit = LATE ? which * 3 + which / 3 : which * 3 / 2 + 1 - which / 6;
        const uint4 words = ((const uint4 *)&s.own)[unit];
        cot_store_async(cot_map_shared(to + unit * 16, block), cot_map_shared(barrier, block), words.x, words.y,
                        words.z, words.w);
    }
    __syncwarp();
}

template <bool POST> static __device__ __forceinline__ void set_terms(shared_memory<POST> &s, int j, float mix)
{
#pragma unroll
    for (int term = 0; term < TERMS; term++) {
        const __nv_bfloat16 value = __float2bfloat16_rn(mix);
        s.own.terms[term][j] = __bfloat16_as_ushort(value);
        mix -= __bfloat162float(value);
    }
}

/* All blocks wait for what is sent from here: a token's inputs are asked for a tile ahead, and all that does not depend on
 * dh_pre is worked out and sent before that has come. The slot is free by then: who left its dh_pre of the tile before is
 * done with the tile two before that. */
template <bool POST>
static __device__ __forceinline__ void own_token(const mhc_call &c, shared_memory<POST> &s, int rank, int tiles)
{
    const int lane = threadIdx.x % 32;
    const float alpha = lane < M ? load_f32(c.alpha, group_of(N, lane) * c.alpha.stride[0]) : 0.0f;
    double dbias = 0, dalpha = 0;
    cot_wait_for_kernels_before(); /* mhc_pre_dz, if any */
    const token_element value = input_element(c, lane);
    token_inputs next = load_inputs(c, value, (uint32_t)(blockIdx.x / MHC_SM90_CLUSTER * TILE + rank));
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, tiles)
    {
        const token_inputs in = next;
        next = load_inputs(c, value, (uint32_t)((tile + MHC_SM90_CLUSTERS) * TILE + rank));
        float dz = lane < N ? 0.0f : in.value;
        if (!given(c.dA) && lane >= N && lane < 2 * N)
            dz *= in.h_post * (1.0f - in.h_post / c.post_scale);
        if (lane >= N && lane < M)
            set_terms(s, lane, alpha * dz * in.inv_rms);
        if (lane < N)
            s.own.h_pre[lane] = in.value;
        send_units<false>(s, ring.slot, rank);
        const float others = sum_over_warp(alpha * dz * in.h_mix);
        const float scale = -in.inv_rms * in.inv_rms * in.inv_rms / (float)(N * c.D);
        /* From here on each lane has coefficient lane % N of h_pre. */
        const float sigma = __shfl_sync(0xffffffffu, in.value, lane % N) - c.hc_eps, slope = sigma * (1.0f - sigma);
        const float alpha_pre = __shfl_sync(0xffffffffu, alpha, 0);
        const float h_mix_pre = __shfl_sync(0xffffffffu, in.h_mix, lane % N);
        cot_mbarrier_wait(&s.gathered_full[ring.slot], ring.parity);
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive_expect(&s.gathered_full[ring.slot], sizeof s.gathered[0]);
        float dh_pre = s.gathered[ring.slot][lane / 4][lane % 4] + s.gathered[ring.slot][lane / 4 + 8][lane % 4];
#pragma unroll
        for (int width = 16; width >= 4; width /= 2)
            dh_pre += __shfl_xor_sync(0xffffffffu, dh_pre, width);
        const float dz_pre = dh_pre * slope, du = alpha_pre * dz_pre;
        float sum = du * h_mix_pre;
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        if (lane < N)
            set_terms(s, lane, du * in.inv_rms);
        if (lane == 0)
            s.own.factor = (sum + others) * scale;
        send_units<true>(s, ring.slot, rank);
        if (lane < N)
            dz = dz_pre;
        dbias += (double)dz;
        dalpha += (double)dz * (double)(in.h_mix * in.inv_rms);
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
        cot_mbarrier_init(&s.partial_full, 32 * PRODUCTS);
        cot_mbarrier_init(&s.partial_empty, 32);
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
