/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_d256_sm90.cu: the five products of the backward on Hopper at d = 256 (attention_bwd_sm90.cu has the
 * formulas). dK and dV of 64 keys take all registers of a consumer group each, so that a block takes 64 keys and two
 * blocks form a cluster over 128. Both walk over the same tiles of 64 queries, and send each other their dS: each makes
 * half the columns of dQ, over the keys of both.
 *
 *   group 0     dQ: two slices of 64 columns, over its own keys and then over the other block's
 *   group 1     dV: S, P; P^T goes from registers into dV, and through shared memory to group 2
 *   group 2     dK: dP, dS; dS^T goes from registers into dK, and through shared memory, over P, to group 0
 *   group 3     producer: a thread loads K and Q, another V and dO, two add finished slices of dQ to memory
 *
 *   barrier       arrivals (bytes)              phase ends when               who waits
 *   k             1 (K, the other block's half) K is there                    groups 0, 1: once
 *   v             1 (V)                         V is there                    group 2: once
 *   q full        1 (Q, lse2)                   a tile of Q is there          groups 1, 2
 *   q empty       8: 4 of S, 4 of dK            no product reads it           the loader
 *   dout full     1 (128 columns; D)            a chunk of dO is there        groups 1, 2
 *   dout empty    8: 4 of dV, 4 of dP           no product reads it           the loader
 *   p full        4                             P is there                    group 2, the same warps
 *   ds full       4                             dS is there                   group 0
 *   ds empty      5: 4 of dQ, 1 of the other    dS has been used, and sent    group 1
 *   sent full     1 (dS)                        the other's dS is there       group 0
 *   sent empty    4 of the other's dQ           it no longer reads ours       group 0
 *   dq full       4, one barrier a slice        a slice of dQ is staged       the slice's adder
 *   dq empty      1                             the slice has been read       group 0
 *
 * P is handed on in sixteen bits that round it finer than E does, so that dS takes a P that is not rounded twice (see the
 * other kernel). Order and determinism are as there. */
#include "attention_bwd_sm90.cuh"

#include "../../../cuda/device/mma.cuh"

/* What the launch allots, 512 of 128, shared out anew: 32 + 64 + 2 * 208. */
enum { PRODUCER_REGISTERS = 32, DQ_REGISTERS = 64, CONSUMER_REGISTERS = 208 };
enum { CHUNKS = ATTENTION_DOUT_CHUNKS, PAIR = 2, OWN = 64 /* keys */, HALF = 2 * TILE /* 128 columns */ };
static constexpr float UP = 4.0f, DOWN = 0x1p-4f;

struct attention_shared_d256 {
    unsigned char k[4][TILE], v[4][TILE];
    unsigned char other_k[2][TILE]; /* the other block's keys, this one's columns of dQ */
    unsigned char q[2][4][TILE];
    unsigned char dout[CHUNKS][2][TILE];
    unsigned char ds[TILE], sent[TILE]; /* [query][key]; sent: the other block's */
    float dq[ATTENTION_DQ_SLICE];
    float lse2[2][QUERIES], delta[2][QUERIES];
    uint32_t lasts[GROUP]; /* for E = f16, see hand_on; 16-byte aligned */
    uint64_t k_full, v_full, q_full[2], q_empty[2], dout_full[CHUNKS], dout_empty[CHUNKS];
    uint64_t p_full, ds_full, ds_empty, sent_full, sent_empty, dq_full[2], dq_empty;
};

static __device__ __forceinline__ attention_shared_d256 &shared(void)
{
    return *(attention_shared_d256 *)attention_memory;
}

static __device__ void load_keys_and_queries(const attention_bwd_mapped &m, const attention_walk &w, int rank)
{
    attention_shared_d256 &s = shared();
    const attention_bwd_call &c = m.call;
    cot_mbarrier_arrive_expect(&s.k_full, 6 * TILE);
    for (int slice = 0; slice < 4; slice++)
        cot_tensor_load_4d(s.k[slice], &m.k, slice * 64, w.first_key + OWN * rank, w.kv_head, w.b, &s.k_full);
    for (int slice = 0; slice < 2; slice++)
        cot_tensor_load_4d(s.other_k[slice], &m.k, (2 * rank + slice) * 64, w.first_key + OWN * (rank ^ 1), w.kv_head,
                           w.b, &s.k_full);
    cot_wait_for_kernels_before();
    cot_fence_async_global();
    cot_ring<2> q;
    for (int h = 0; h < w.heads; h++) {
        const int row = (int)row_of<false>(c, w, h);
        for (int tile = w.end - 1; tile >= w.begin; tile--, q.next()) {
            cot_mbarrier_wait(&s.q_empty[q.slot], q.parity ^ 1);
            cot_mbarrier_arrive_expect(&s.q_full[q.slot], 4 * TILE + QUERIES * sizeof(float));
            for (int slice = 0; slice < 4; slice++)
                cot_tensor_load_4d(s.q[q.slot][slice], &m.q, slice * 64, tile * QUERIES, w.first_head + h, w.b,
                                   &s.q_full[q.slot]);
            cot_tensor_load_4d(s.lse2[q.slot], &m.statistics, 0, row + tile, 0, 0, &s.q_full[q.slot]);
        }
    }
}

static __device__ void load_values_and_gradients(const attention_bwd_mapped &m, const attention_walk &w, int rank)
{
    attention_shared_d256 &s = shared();
    const attention_bwd_call &c = m.call;
    cot_mbarrier_arrive_expect(&s.v_full, 4 * TILE);
    for (int slice = 0; slice < 4; slice++)
        cot_tensor_load_4d(s.v[slice], &m.v, slice * 64, w.first_key + OWN * rank, w.kv_head, w.b, &s.v_full);
    cot_wait_for_kernels_before();
    cot_fence_async_global();
    cot_ring<CHUNKS> chunk;
    uint32_t turn = 0;
    for (int h = 0; h < w.heads; h++) {
        const int row = (int)(c.B * c.H * c.tiles + row_of<false>(c, w, h)); /* after all of lse2 */
        for (int tile = w.end - 1; tile >= w.begin; tile--, turn ^= 1) {
            for (int half = 0; half < 2; half++, chunk.next()) {
                uint64_t *full = &s.dout_full[chunk.slot];
                cot_mbarrier_wait(&s.dout_empty[chunk.slot], chunk.parity ^ 1);
                cot_mbarrier_arrive_expect(full, half == 0 ? HALF + QUERIES * sizeof(float) : HALF);
                for (int slice = 0; slice < 2; slice++)
                    cot_tensor_load_4d(s.dout[chunk.slot][slice], &m.dout, (2 * half + slice) * 64, tile * QUERIES,
                                       w.first_head + h, w.b, full);
                if (half == 0)
                    cot_tensor_load_4d(s.delta[turn], &m.statistics, 0, row + tile, 0, 0, full);
            }
        }
    }
}

/* Adds this block's slice 0 or 1 of each tile of dQ to memory, as in the other kernel. */
template <bool ORDERED>
static __device__ void add(const attention_bwd_call &c, const attention_walk &w, int rank, int slice)
{
    attention_shared_d256 &s = shared();
    const uint32_t turn = w.first_key / KEYS;
    uint32_t parity = 0;
    cot_wait_for_kernels_before(); /* zeros */
    cot_fence_async_global();
    for (int h = 0; h < w.heads; h++) {
        for (int tile = w.end - 1; tile >= w.begin; tile--, parity ^= 1) {
            const int64_t number = (row_of<false>(c, w, h) + tile) * 4 + 2 * rank + slice;
            add_slice<ORDERED>(c, turn, number, s.dq, &s.dq_full[slice], parity, &s.dq_empty);
        }
    }
    cot_bulk_wait();
}

/* sums (+)= dS K over 64 keys, dS [query][key], K a slice of 64 columns. */
template <typename E>
static __device__ __forceinline__ void query_product(float (&sums)[32], const unsigned char *ds, const unsigned char *k,
                                                     bool add)
{
    const uint64_t left = cot_wgmma_k_major(cot_shared_address(ds)),
                   right = cot_wgmma_mn_major(cot_shared_address(k), TILE);
    cot_wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
        cot_wgmma<E, false, true>(sums, left + step * COT_WGMMA_K_STEP, right + step * COT_WGMMA_MN_STEP,
                                  add || step > 0);
    cot_wgmma_commit();
}

template <typename E> static __device__ void query_gradient(const attention_walk &w, int rank)
{
    attention_shared_d256 &s = shared();
    const int lane = threadIdx.x % WARP;
    const uint32_t other_sent = cot_map_shared(cot_shared_address(s.sent), rank ^ 1);
    const uint32_t other_sent_full = cot_map_shared(cot_shared_address(&s.sent_full), rank ^ 1);
    const uint32_t other_sent_empty = cot_map_shared(cot_shared_address(&s.sent_empty), rank ^ 1);
    const uint32_t other_ds_empty = cot_map_shared(cot_shared_address(&s.ds_empty), rank ^ 1);
    float sums[32];
    uint32_t parity = 0;
    cot_mbarrier_wait(&s.k_full, 0);
    for (int step = w.heads * (w.end - w.begin); step > 0; step--, parity ^= 1) {
        cot_mbarrier_wait(&s.ds_full, parity);
        if (threadIdx.x % GROUP == 0) {
            cot_mbarrier_arrive_expect(&s.sent_full, TILE);
            cot_mbarrier_wait(&s.sent_empty, parity ^ 1);
            cot_bulk_copy_to_block(other_sent, cot_shared_address(s.ds), TILE, other_sent_full);
        }
        __syncwarp();
#pragma unroll
        for (int slice = 0; slice < 2; slice++) {
            query_product<E>(sums, s.ds, s.k[2 * rank + slice], false);
            if (slice == 0) {
                cot_mbarrier_wait(&s.sent_full, parity);
                if (threadIdx.x % GROUP == 0)
                    cot_mbarrier_arrive_at(other_ds_empty);
                __syncwarp();
            }
            query_product<E>(sums, s.sent, s.other_k[slice], true);
            cot_mbarrier_wait(&s.dq_empty, slice ^ 1);
            cot_wgmma_wait<0>();
            if (slice == 1 && lane == 0) {
                cot_mbarrier_arrive(&s.ds_empty);
                cot_mbarrier_arrive_at(other_sent_empty);
            }
            stage_sums(s.dq, sums, &s.dq_full[slice]);
        }
    }
}

/* Elements 2i and 2i + 1 of 2^4 P as group 1 hands them on, and as group 2 takes them. Where E is bf16, as f16: eight times
 * finer from P = 2^-18 on. Where E is f16, without a sign, five bits of exponent and twelve of mantissa: four times finer,
 * and from P = 2^-18 on too; of the seventeen bits the last are kept in a word a thread. (With eleven of mantissa the error's
 * norm was up to 1.03 of its bound.) Either has room up to P = 4095, for an lse that is not the forward's; beyond, dV is
 * infinite. */
static constexpr float SMALL = 0x1p-112f; /* takes the exponent to its five lowest bits */
enum { LAST = 11 };                       /* the last bit that is handed on */

static __device__ __forceinline__ uint32_t moved(uint32_t word, int from, int to)
{
    return (from < to ? word << (to - from) : word >> (from - to)) & 1u << to;
}

template <typename E> static __device__ __forceinline__ uint32_t hand_on(float low, float high, int i, uint32_t &lasts)
{
    if constexpr (!cot_is_f16<E>)
        return cot_pack_pair<__half>(low, high);
    const uint32_t half = 1u << LAST >> 1;
    const uint32_t a = __float_as_uint(low * SMALL) + half, b = __float_as_uint(high * SMALL) + half;
    lasts |= moved(a, LAST, 2 * i) | moved(b, LAST, 2 * i + 1);
    return __byte_perm(a << 4, b << 4, 0x7632);
}

template <typename E> static __device__ __forceinline__ float2 take(uint32_t pair, int i, uint32_t lasts)
{
    if constexpr (!cot_is_f16<E>)
        return cot_unpack_pair<__half>(pair);
    return make_float2(__uint_as_float((pair & 0xffff) << 12 | moved(lasts, 2 * i, LAST)) * (1.0f / SMALL),
                       __uint_as_float(pair >> 16 << 12 | moved(lasts, 2 * i + 1, LAST)) * (1.0f / SMALL));
}

/* Of this lane's row of its warp's 32 words. A matrix instruction hands them on as it does the fragments: an ordinary store
 * and load across the barrier is right too, but compute-sanitizer reports it, for the warp's synchronisation is optimised away. */
static __device__ __forceinline__ uint32_t lasts_address(void)
{
    return cot_shared_address(shared().lasts + threadIdx.x % GROUP / 32 * 32 + threadIdx.x % 8 * 4);
}

/* dV of a block's keys += P^T dO, half the columns at a time. */
template <typename E>
static __device__ __forceinline__ void add_values(float (&dv)[2][64], const uint32_t (&packed)[16],
                                                  cot_ring<CHUNKS> chunk)
{
    attention_shared_d256 &s = shared();
#pragma unroll
    for (int half = 0; half < 2; half++, chunk.next()) {
        cot_mbarrier_wait(&s.dout_full[chunk.slot], chunk.parity);
        add_product<E>(dv[half], packed, s.dout[chunk.slot][0]);
    }
}

/* A step of group 1. FIRST: there is no P of a step before. chunk: of dO, of the step before. */
template <typename E, bool FIRST>
static __device__ __forceinline__ void weigh_tile(const attention_bwd_call &c, uint32_t n, int tile, int key,
                                                  cot_ring<CHUNKS> &chunk, float (&dv)[2][64], uint32_t (&packed)[16])
{
    attention_shared_d256 &s = shared();
    const int lane = threadIdx.x % WARP;
    const uint32_t q = n % 2;
    float scores[32];
    if (!FIRST)
        add_values<E>(dv, packed, chunk);
    cot_mbarrier_wait(&s.q_full[q], n / 2 & 1);
    /* n >> 31 is 0: a K that stood still would have its sixteen descriptors kept, in registers that are not there. */
    score_product<E, 256>(scores, s.k[0] + (n >> 31), TILE, s.q[q][0]);
    if (!FIRST) {
        cot_wgmma_wait<2>();
        if (lane == 0)
            cot_mbarrier_arrive(&s.dout_empty[chunk.slot]);
        chunk.next();
        cot_wgmma_wait<1>();
        if (lane == 0)
            cot_mbarrier_arrive(&s.dout_empty[chunk.slot]);
        chunk.next();
    }
    cot_wgmma_wait<0>();
    if (crossed(c, tile, key & ~63))
        hide_scores(c, tile, key, scores);
#pragma unroll
    for (int group = 0; group < 8; group++) {
        const float2 lse2 = *(const float2 *)&s.lse2[q][8 * group + 2 * (lane % 4)];
#pragma unroll
        for (int i = 0; i < 4; i++)
            scores[4 * group + i] =
                cot_ex2(fmaf(scores[4 * group + i], c.scale_log2, i % 2 == 0 ? UP - lse2.x : UP - lse2.y));
    }
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.q_empty[q]);
    cot_mbarrier_wait(&s.ds_empty, n & 1 ^ 1);
    uint32_t lasts = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t finer[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = 8 * k + 2 * i;
            packed[4 * k + i] = cot_pack_pair<E>(scores[at], scores[at + 1]);
            finer[i] = hand_on<E>(scores[at], scores[at + 1], 4 * k + i, lasts);
        }
        cot_stmatrix_x4_trans(fragment_address(s.ds) + k * 16 * 128, finer);
    }
    if (cot_is_f16<E>)
        cot_stmatrix_x1(lasts_address(), lasts);
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.p_full);
}

template <typename E>
static __device__ void value_gradient(const attention_bwd_call &c, const attention_walk &w, int key)
{
    attention_shared_d256 &s = shared();
    float dv[2][64];
    uint32_t packed[16]; /* P^T */
    cot_ring<CHUNKS> chunk;
#pragma unroll
    for (int i = 0; i < 64; i++)
        dv[0][i] = dv[1][i] = 0.0f;
    const uint32_t steps = (uint32_t)(w.heads * (w.end - w.begin));
    cot_mbarrier_wait(&s.k_full, 0);
    if (steps > 0) {
        int tile = w.end - 1;
        weigh_tile<E, true>(c, 0, tile, key, chunk, dv, packed);
        for (uint32_t n = 1; n < steps; n++) {
            tile = tile > w.begin ? tile - 1 : w.end - 1; /* of the next head */
            weigh_tile<E, false>(c, n, tile, key, chunk, dv, packed);
        }
        add_values<E>(dv, packed, chunk);
        cot_wgmma_wait<0>();
    }
    store_rows<E, false>(c, c.grad_v, c.dv_in_vectors, w, key, 0, 128, DOWN, dv[0]);
    store_rows<E, false>(c, c.grad_v, c.dv_in_vectors, w, key, 128, 128, DOWN, dv[1]);
}

/* dP^T of a tile: V from shared memory, dO in two chunks. */
template <typename E>
static __device__ __forceinline__ void gradient_product(float (&d)[32], cot_ring<CHUNKS> chunk, uint32_t n)
{
    attention_shared_d256 &s = shared();
    cot_ring<CHUNKS> second = chunk;
    second.next();
    cot_mbarrier_wait(&s.dout_full[chunk.slot], chunk.parity);
    cot_mbarrier_wait(&s.dout_full[second.slot], second.parity);
    const uint64_t values = cot_wgmma_k_major(cot_shared_address(s.v[0] + (n >> 31))); /* as for K */
    const uint64_t first = cot_wgmma_k_major(cot_shared_address(s.dout[chunk.slot][0]));
    const uint64_t last = cot_wgmma_k_major(cot_shared_address(s.dout[second.slot][0]));
    cot_wgmma_fence();
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const uint64_t b = k < 8 ? first : last;
        cot_wgmma<E, false, false>(d, values + k / 4 * (TILE >> 4) + k % 4 * COT_WGMMA_K_STEP,
                                   b + k / 4 % 2 * (TILE >> 4) + k % 4 * COT_WGMMA_K_STEP, k > 0);
    }
    cot_wgmma_commit();
}

/* A step of group 2. FIRST: there is no dS of a step before. */
template <typename E, bool FIRST>
static __device__ __forceinline__ void gradient_tile(uint32_t n, cot_ring<CHUNKS> &chunk, float (&dk)[2][64],
                                                     uint32_t (&packed)[16])
{
    attention_shared_d256 &s = shared();
    const int lane = threadIdx.x % WARP;
    float scores[32];
    if (!FIRST) {
        add_product<E>(dk[0], packed, s.q[(n - 1) % 2][0]);
        add_product<E>(dk[1], packed, s.q[(n - 1) % 2][2]);
    }
    gradient_product<E>(scores, chunk, n);
    if (!FIRST) {
        cot_wgmma_wait<1>();
        if (lane == 0)
            cot_mbarrier_arrive(&s.q_empty[(n - 1) % 2]);
    }
    cot_wgmma_wait<0>();
#pragma unroll
    for (int group = 0; group < 8; group++) {
        const float2 delta = *(const float2 *)&s.delta[n % 2][8 * group + 2 * (lane % 4)];
#pragma unroll
        for (int i = 0; i < 4; i++)
            scores[4 * group + i] = fmaf(scores[4 * group + i], DOWN, -DOWN * (i % 2 == 0 ? delta.x : delta.y));
    }
    __syncwarp();
    for (int half = 0; half < 2; half++, chunk.next())
        if (lane == 0)
            cot_mbarrier_arrive(&s.dout_empty[chunk.slot]);
    cot_mbarrier_wait(&s.p_full, n & 1);
    __syncwarp();
    const uint32_t lasts = cot_is_f16<E> ? cot_ldmatrix_x1(lasts_address()) : 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t p[4];
        cot_ldmatrix_x4_trans(p, fragment_address(s.ds) + k * 16 * 128);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = take<E>(p[i], 4 * k + i, lasts);
            packed[4 * k + i] = cot_pack_pair<E>(pair.x * scores[8 * k + 2 * i], pair.y * scores[8 * k + 2 * i + 1]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; k++)
        cot_stmatrix_x4_trans(fragment_address(s.ds) + k * 16 * 128, packed + 4 * k);
    cot_proxy_fence();
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.ds_full);
}

template <typename E> static __device__ void key_gradient(const attention_bwd_call &c, const attention_walk &w, int key)
{
    attention_shared_d256 &s = shared();
    float dk[2][64];
    uint32_t packed[16]; /* dS^T */
    cot_ring<CHUNKS> chunk;
#pragma unroll
    for (int i = 0; i < 64; i++)
        dk[0][i] = dk[1][i] = 0.0f;
    const uint32_t steps = (uint32_t)(w.heads * (w.end - w.begin));
    cot_mbarrier_wait(&s.v_full, 0);
    if (steps > 0) {
        cot_mbarrier_wait(&s.q_full[0], 0); /* dK reads Q: group 2 sees it by the barrier, not through P */
        gradient_tile<E, true>(0, chunk, dk, packed);
        for (uint32_t n = 1; n < steps; n++) {
            cot_mbarrier_wait(&s.q_full[(n - 1) % 2], (n - 1) / 2 & 1);
            gradient_tile<E, false>(n, chunk, dk, packed);
        }
        cot_mbarrier_wait(&s.q_full[(steps - 1) % 2], (steps - 1) / 2 & 1);
        add_product<E>(dk[0], packed, s.q[(steps - 1) % 2][0]);
        add_product<E>(dk[1], packed, s.q[(steps - 1) % 2][2]);
        cot_wgmma_wait<0>();
    }
    store_rows<E, false>(c, c.grad_k, c.dk_in_vectors, w, key, 0, 128, c.scale, dk[0]);
    store_rows<E, false>(c, c.grad_k, c.dk_in_vectors, w, key, 128, 128, c.scale, dk[1]);
}

template <typename E> static __device__ __forceinline__ void backward(const attention_bwd_mapped &m)
{
    attention_shared_d256 &s = shared();
    const attention_bwd_call &c = m.call;
    const int rank = (int)cot_cluster_rank();
    if (threadIdx.x == 0) {
        cot_mbarrier_init(&s.k_full, 1), cot_mbarrier_init(&s.v_full, 1);
        for (int i = 0; i < 2; i++)
            cot_mbarrier_init(&s.q_full[i], 1), cot_mbarrier_init(&s.q_empty[i], 8),
                cot_mbarrier_init(&s.dq_full[i], 4);
        for (int i = 0; i < CHUNKS; i++)
            cot_mbarrier_init(&s.dout_full[i], 1), cot_mbarrier_init(&s.dout_empty[i], 8);
        cot_mbarrier_init(&s.p_full, 4), cot_mbarrier_init(&s.ds_full, 4), cot_mbarrier_init(&s.ds_empty, 5);
        cot_mbarrier_init(&s.sent_full, 1), cot_mbarrier_init(&s.sent_empty, 4), cot_mbarrier_init(&s.dq_empty, 1);
        cot_mbarrier_init_fence();
    }
    const attention_walk w = walk_of(c, blockIdx.x / PAIR);
    cot_cluster_arrive();
    cot_cluster_wait();
    const int group = threadIdx.x / GROUP;
    const int key =
        w.first_key + OWN * rank + threadIdx.x % GROUP / WARP * 16 + threadIdx.x % WARP / 4; /* even pairs' */
    if (group == 0) {
        cot_fewer_registers<DQ_REGISTERS>();
        query_gradient<E>(w, rank);
    } else if (group == 1) {
        cot_more_registers<CONSUMER_REGISTERS>();
        value_gradient<E>(c, w, key);
    } else if (group == 2) {
        cot_more_registers<CONSUMER_REGISTERS>();
        key_gradient<E>(c, w, key);
    } else {
        cot_fewer_registers<PRODUCER_REGISTERS>();
        const int role = threadIdx.x % GROUP / WARP;
        if (threadIdx.x % WARP == 0) {
            if (role == 0)
                load_keys_and_queries(m, w, rank);
            else if (role == 1)
                load_values_and_gradients(m, w, rank);
            else if (c.ordered)
                add<true>(c, w, rank, role - 2);
            else
                add<false>(c, w, rank, role - 2);
        }
        __syncwarp();
    }
    cot_cluster_arrive(); /* until the other block has sent its last, and told that it has ours */
    cot_cluster_wait();
}

#define INSTANCE(name, element)                                                          \
    extern "C" __global__ void __launch_bounds__(ATTENTION_GROUPS *GROUP, 1)             \
        attention_bwd_sm90_##name##_d256(const __grid_constant__ attention_bwd_mapped m) \
    {                                                                                    \
        backward<element>(m);                                                            \
    }
INSTANCE(bf16, __nv_bfloat16)
INSTANCE(f16, __half)
