/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_d256_sm90.cu: the backward on Hopper at d = dv = 256 (attention_bwd_sm90.cu has the formulas). dK and
 * dV of 64 keys each fill the registers of one warpgroup. A block therefore takes 64 keys, and two blocks form a
 * cluster over 128 keys. Both blocks loop over the same tiles of 64 queries and send each other their dS. Each computes
 * half of the columns of dQ, over the keys of both.
 *
 *   warpgroup 0   dQ: two slices of 64 columns, first over its own keys, then over the peer block's keys
 *   warpgroup 1   dV: S, P. P^T is the register operand of dV and goes through shared memory to warpgroup 2
 *   warpgroup 2   dK: dP, dS. dS^T is the register operand of dK and goes through shared memory, in P's place, to
 *                 warpgroup 0
 *   warpgroup 3   producer: one thread loads K and Q, one V and dO, two dq_writers add finished slices of dQ to memory
 *
 *   barrier         arrivals (bytes)              phase ends when                 who waits
 *   k full          1 (K, half of the peer's K)   K is loaded                     warpgroups 0, 1: once
 *   v full          1 (V)                         V is loaded                     warpgroup 2: once
 *   q full          1 (Q, lse_log2)               a tile of Q is loaded           warpgroups 1, 2
 *   q empty         8: 4 of S, 4 of dK            no product reads it             producer
 *   dout full       1 (128 columns; D)            a chunk of dO is loaded         warpgroups 1, 2
 *   dout empty      8: 4 of dV, 4 of dP           no product reads it             producer
 *   p full          4                             P is there                      warpgroup 2: warp i reads warp i's P
 *   ds full         4                             dS is there                     warpgroup 0
 *   ds empty        5: 4 of dQ, 1 of the peer     dS has been used, and sent      warpgroup 1
 *   peer ds full    1 (dS)                        the peer's dS is there          warpgroup 0
 *   sent ds empty   4 of the peer's dQ            the peer no longer reads ours   warpgroup 0
 *   dq full         4, one barrier a slice        a slice of dQ is staged         the slice's dq_writer
 *   dq empty        1                             the slice has been read         warpgroup 0
 *
 * P reaches warpgroup 2 in 16 bits that are finer than E, so that P in dS is not rounded twice (see
 * attention_bwd_sm90.cu). The order of blocks and the deterministic mode are as in that kernel. */
#include "attention_bwd_sm90.cuh"

#include "../../../cuda/device/mma.cuh"

/* Registers of a thread. The launch allots 512 for a thread of each warpgroup (4 x 128). setmaxnreg redistributes them:
 * 32 + 64 + 2 * 208. */
enum { PRODUCER_REGISTERS = 32, DQ_REGISTERS = 64, CONSUMER_REGISTERS = 208 };
enum {
    CHUNKS = ATTENTION_DOUT_CHUNKS,
    CLUSTER_BLOCKS = 2,
    BLOCK_KEYS = 64 /* keys */,
    CHUNK_BYTES = 2 * TILE /* 128 columns of dO */
};
static constexpr float P_SCALE_LOG2 = 4.0f, INVERSE_P_SCALE = 0x1p-4f;

struct shared_storage_d256 {
    unsigned char k[4][TILE], v[4][TILE];
    unsigned char peer_k[2][TILE]; /* the peer block's keys, columns of this block's dQ */
    unsigned char q[2][4][TILE];
    unsigned char dout[CHUNKS][2][TILE];
    unsigned char ds[TILE], peer_ds[TILE]; /* [query][key]; peer_ds: from the peer block */
    float dq[ATTENTION_DQ_SLICE];
    float lse_log2[2][QUERIES], delta[2][QUERIES];
    uint32_t low_bits[WARPGROUP]; /* for E = f16, see encode_p; 16-byte aligned */
    uint64_t k_full, v_full, q_full[2], q_empty[2], dout_full[CHUNKS], dout_empty[CHUNKS];
    uint64_t p_full, ds_full, ds_empty, peer_ds_full, sent_ds_empty, dq_full[2], dq_empty;
};

static __device__ __forceinline__ shared_storage_d256 &shared(void)
{
    return *(shared_storage_d256 *)attention_memory;
}

static __device__ void load_k_and_q(const attention_bwd_mapped &m, const attention_work &w, int rank)
{
    shared_storage_d256 &s = shared();
    const attention_bwd_call &c = m.call;
    cot_mbarrier_arrive_expect(&s.k_full, 6 * TILE);
    for (int slice = 0; slice < 4; slice++)
        cot_tma_load_4d(s.k[slice], &m.k, slice * 64, w.first_key + BLOCK_KEYS * rank, w.kv_head, w.b, &s.k_full);
    for (int slice = 0; slice < 2; slice++)
        cot_tma_load_4d(s.peer_k[slice], &m.k, (2 * rank + slice) * 64, w.first_key + BLOCK_KEYS * (rank ^ 1),
                        w.kv_head, w.b, &s.k_full);
    cot_griddepcontrol_wait();
    cot_fence_proxy_async_global();
    cot_pipeline_state<2> q;
    for (int h = 0; h < w.heads; h++) {
        const int row = (int)statistics_row_of<false>(c, w, h);
        for (int tile = w.tile_end - 1; tile >= w.tile_begin; tile--, q.next()) {
            cot_mbarrier_wait(&s.q_empty[q.stage], q.parity ^ 1);
            cot_mbarrier_arrive_expect(&s.q_full[q.stage], 4 * TILE + QUERIES * sizeof(float));
            for (int slice = 0; slice < 4; slice++)
                cot_tma_load_4d(s.q[q.stage][slice], &m.q, slice * 64, tile * QUERIES, w.first_head + h, w.b,
                                &s.q_full[q.stage]);
            cot_tma_load_4d(s.lse_log2[q.stage], &m.statistics, 0, row + tile, 0, 0, &s.q_full[q.stage]);
        }
    }
}

static __device__ void load_v_and_dout(const attention_bwd_mapped &m, const attention_work &w, int rank)
{
    shared_storage_d256 &s = shared();
    const attention_bwd_call &c = m.call;
    cot_mbarrier_arrive_expect(&s.v_full, 4 * TILE);
    for (int slice = 0; slice < 4; slice++)
        cot_tma_load_4d(s.v[slice], &m.v, slice * 64, w.first_key + BLOCK_KEYS * rank, w.kv_head, w.b, &s.v_full);
    cot_griddepcontrol_wait();
    cot_fence_proxy_async_global();
    cot_pipeline_state<CHUNKS> chunk;
    uint32_t delta_stage = 0;
    for (int h = 0; h < w.heads; h++) {
        const int row =
            (int)(c.B * c.H * c.tiles + statistics_row_of<false>(c, w, h)); /* delta follows all rows of lse_log2 */
        for (int tile = w.tile_end - 1; tile >= w.tile_begin; tile--, delta_stage ^= 1) {
            for (int half = 0; half < 2; half++, chunk.next()) {
                uint64_t *full = &s.dout_full[chunk.stage];
                cot_mbarrier_wait(&s.dout_empty[chunk.stage], chunk.parity ^ 1);
                cot_mbarrier_arrive_expect(full, half == 0 ? CHUNK_BYTES + QUERIES * sizeof(float) : CHUNK_BYTES);
                for (int slice = 0; slice < 2; slice++)
                    cot_tma_load_4d(s.dout[chunk.stage][slice], &m.dout, (2 * half + slice) * 64, tile * QUERIES,
                                    w.first_head + h, w.b, full);
                if (half == 0)
                    cot_tma_load_4d(s.delta[delta_stage], &m.statistics, 0, row + tile, 0, 0, full);
            }
        }
    }
}

/* A dq_writer: adds this block's slice 0 or 1 of each tile of dQ to memory. */
template <bool DETERMINISTIC>
static __device__ void write_dq(const attention_bwd_call &c, const attention_work &w, int rank, int slice)
{
    shared_storage_d256 &s = shared();
    const uint32_t blocks_before = w.first_key / KEYS;
    uint32_t parity = 0;
    cot_griddepcontrol_wait(); /* for the kernel that clears dq_accum */
    cot_fence_proxy_async_global();
    for (int h = 0; h < w.heads; h++) {
        for (int tile = w.tile_end - 1; tile >= w.tile_begin; tile--, parity ^= 1) {
            const int64_t slice_index = (statistics_row_of<false>(c, w, h) + tile) * 4 + 2 * rank + slice;
            add_dq_slice<DETERMINISTIC>(c, blocks_before, slice_index, s.dq, &s.dq_full[slice], parity, &s.dq_empty);
        }
    }
    cot_bulk_wait();
}

/* Issues acc = dS K, or acc += dS K, over 64 keys. dS is [query][key], K a slice of 64 columns. */
template <typename E>
static __device__ __forceinline__ void issue_dq(float (&acc)[32], const unsigned char *ds, const unsigned char *k,
                                                bool accumulate)
{
    const uint64_t a_desc = cot_wgmma_k_major(cot_shared_address(ds)),
                   b_desc = cot_wgmma_mn_major(cot_shared_address(k), TILE);
    cot_wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
        cot_wgmma<E, false, true>(acc, a_desc + step * COT_WGMMA_K_STEP, b_desc + step * COT_WGMMA_MN_STEP,
                                  accumulate || step > 0);
    cot_wgmma_commit();
}

template <typename E> static __device__ void compute_dq(const attention_work &w, int rank)
{
    shared_storage_d256 &s = shared();
    const int lane = threadIdx.x % WARP;
    const uint32_t remote_peer_ds = cot_mapa(cot_shared_address(s.peer_ds), rank ^ 1);
    const uint32_t remote_peer_ds_full = cot_mapa(cot_shared_address(&s.peer_ds_full), rank ^ 1);
    const uint32_t remote_sent_ds_empty = cot_mapa(cot_shared_address(&s.sent_ds_empty), rank ^ 1);
    const uint32_t remote_ds_empty = cot_mapa(cot_shared_address(&s.ds_empty), rank ^ 1);
    float acc[32];
    uint32_t parity = 0;
    cot_mbarrier_wait(&s.k_full, 0);
    for (int step = w.heads * (w.tile_end - w.tile_begin); step > 0; step--, parity ^= 1) {
        cot_mbarrier_wait(&s.ds_full, parity);
        if (threadIdx.x % WARPGROUP == 0) {
            cot_mbarrier_arrive_expect(&s.peer_ds_full, TILE);
            cot_mbarrier_wait(&s.sent_ds_empty, parity ^ 1);
            cot_bulk_copy_to_block(remote_peer_ds, cot_shared_address(s.ds), TILE, remote_peer_ds_full);
        }
        __syncwarp();
#pragma unroll
        for (int slice = 0; slice < 2; slice++) {
            issue_dq<E>(acc, s.ds, s.k[2 * rank + slice], false);
            if (slice == 0) {
                cot_mbarrier_wait(&s.peer_ds_full, parity);
                if (threadIdx.x % WARPGROUP == 0)
                    cot_mbarrier_arrive_remote(remote_ds_empty);
                __syncwarp();
            }
            issue_dq<E>(acc, s.peer_ds, s.peer_k[slice], true);
            cot_mbarrier_wait(&s.dq_empty, slice ^ 1);
            cot_wgmma_wait<0>();
            if (slice == 1 && lane == 0) {
                cot_mbarrier_arrive(&s.ds_empty);
                cot_mbarrier_arrive_remote(remote_sent_ds_empty);
            }
            stage_dq_slice(s.dq, acc, &s.dq_full[slice]);
        }
    }
}

/* Elements 2i and 2i + 1 of 2^4 P, as warpgroup 1 encodes and warpgroup 2 decodes them.
 *   E = bf16   as f16: 8 times finer than bf16 for P >= 2^-18
 *   E = f16    17 bits without a sign, 5 of exponent and 12 of mantissa: 4 times finer than f16, also for P >= 2^-18.
 *              The lowest bits are kept in one word for each thread. (With 11 bits of mantissa the error's norm was up
 *              to 1.03 of its bound.)
 * Both hold P up to 4095, for an lse that is not the forward's. Beyond that, dV is infinite. */
static constexpr float EXPONENT_REBIAS = 0x1p-112f; /* moves the exponent to the lowest five bits of its field */
enum { LOW_BIT = 11 };                              /* the lowest bit that is encoded */

static __device__ __forceinline__ uint32_t move_bit(uint32_t word, int from, int to)
{
    return (from < to ? word << (to - from) : word >> (from - to)) & 1u << to;
}

template <typename E>
static __device__ __forceinline__ uint32_t encode_p(float low, float high, int i, uint32_t &low_bits)
{
    if constexpr (!cot_is_f16<E>)
        return cot_pack_pair<__half>(low, high);
    const uint32_t rounding = 1u << LOW_BIT >> 1;
    const uint32_t a = __float_as_uint(low * EXPONENT_REBIAS) + rounding,
                   b = __float_as_uint(high * EXPONENT_REBIAS) + rounding;
    low_bits |= move_bit(a, LOW_BIT, 2 * i) | move_bit(b, LOW_BIT, 2 * i + 1);
    return __byte_perm(a << 4, b << 4, 0x7632);
}

template <typename E> static __device__ __forceinline__ float2 decode_p(uint32_t pair, int i, uint32_t low_bits)
{
    if constexpr (!cot_is_f16<E>)
        return cot_unpack_pair<__half>(pair);
    return make_float2(
        __uint_as_float((pair & 0xffff) << 12 | move_bit(low_bits, 2 * i, LOW_BIT)) * (1.0f / EXPONENT_REBIAS),
        __uint_as_float(pair >> 16 << 12 | move_bit(low_bits, 2 * i + 1, LOW_BIT)) * (1.0f / EXPONENT_REBIAS));
}

/* Address of this lane's row among its warp's 32 words. stmatrix and ldmatrix pass the words on, as for the fragments.
 * An ordinary store and load across the barrier is correct too, but compute-sanitizer reports it, because the warp's
 * synchronisation is optimised away. */
static __device__ __forceinline__ uint32_t low_bits_address(void)
{
    return cot_shared_address(shared().low_bits + threadIdx.x % WARPGROUP / 32 * 32 + threadIdx.x % 8 * 4);
}

/* Issues dV += P^T dO for the block's keys, half of the columns at a time. */
template <typename E>
static __device__ __forceinline__ void issue_dv(float (&dv)[2][64], const uint32_t (&packed)[16],
                                                cot_pipeline_state<CHUNKS> chunk)
{
    shared_storage_d256 &s = shared();
#pragma unroll
    for (int half = 0; half < 2; half++, chunk.next()) {
        cot_mbarrier_wait(&s.dout_full[chunk.stage], chunk.parity);
        issue_gemm_rs<E>(dv[half], packed, s.dout[chunk.stage][0]);
    }
}

/* One step of warpgroup 1. FIRST: there is no P of a previous step. chunk: the previous step's chunk of dO. */
template <typename E, bool FIRST>
static __device__ __forceinline__ void dv_step(const attention_bwd_call &c, uint32_t n, int tile, int key,
                                               cot_pipeline_state<CHUNKS> &chunk, float (&dv)[2][64],
                                               uint32_t (&packed)[16])
{
    shared_storage_d256 &s = shared();
    const int lane = threadIdx.x % WARP;
    const uint32_t q = n % 2;
    float scores[32];
    if (!FIRST)
        issue_dv<E>(dv, packed, chunk);
    cot_mbarrier_wait(&s.q_full[q], n / 2 & 1);
    /* n >> 31 is 0. Without it, the address of K would be loop-invariant, and the compiler would keep the 16
     * descriptors in registers, of which there are not enough. */
    issue_gemm_ss<E, 256>(scores, s.k[0] + (n >> 31), TILE, s.q[q][0]);
    if (!FIRST) {
        cot_wgmma_wait<2>();
        if (lane == 0)
            cot_mbarrier_arrive(&s.dout_empty[chunk.stage]);
        chunk.next();
        cot_wgmma_wait<1>();
        if (lane == 0)
            cot_mbarrier_arrive(&s.dout_empty[chunk.stage]);
        chunk.next();
    }
    cot_wgmma_wait<0>();
    if (needs_mask(c, tile, key & ~63))
        apply_mask(c, tile, key, scores);
#pragma unroll
    for (int group = 0; group < 8; group++) {
        const float2 lse_log2 = *(const float2 *)&s.lse_log2[q][8 * group + 2 * (lane % 4)];
#pragma unroll
        for (int i = 0; i < 4; i++)
            scores[4 * group + i] = cot_ex2(fmaf(scores[4 * group + i], c.scale_log2,
                                                 i % 2 == 0 ? P_SCALE_LOG2 - lse_log2.x : P_SCALE_LOG2 - lse_log2.y));
    }
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.q_empty[q]);
    cot_mbarrier_wait(&s.ds_empty, n & 1 ^ 1);
    uint32_t low_bits = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t encoded[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int e = 8 * k + 2 * i;
            packed[4 * k + i] = cot_pack_pair<E>(scores[e], scores[e + 1]);
            encoded[i] = encode_p<E>(scores[e], scores[e + 1], 4 * k + i, low_bits);
        }
        cot_stmatrix_x4_trans(fragment_address(s.ds) + k * 16 * 128, encoded);
    }
    if (cot_is_f16<E>)
        cot_stmatrix_x1(low_bits_address(), low_bits);
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.p_full);
}

template <typename E> static __device__ void compute_dv(const attention_bwd_call &c, const attention_work &w, int key)
{
    shared_storage_d256 &s = shared();
    float dv[2][64];
    uint32_t packed[16]; /* P^T */
    cot_pipeline_state<CHUNKS> chunk;
#pragma unroll
    for (int i = 0; i < 64; i++)
        dv[0][i] = dv[1][i] = 0.0f;
    const uint32_t steps = (uint32_t)(w.heads * (w.tile_end - w.tile_begin));
    cot_mbarrier_wait(&s.k_full, 0);
    if (steps > 0) {
        int tile = w.tile_end - 1;
        dv_step<E, true>(c, 0, tile, key, chunk, dv, packed);
        for (uint32_t n = 1; n < steps; n++) {
            tile = tile > w.tile_begin ? tile - 1 : w.tile_end - 1; /* of the next head */
            dv_step<E, false>(c, n, tile, key, chunk, dv, packed);
        }
        issue_dv<E>(dv, packed, chunk);
        cot_wgmma_wait<0>();
    }
    store_rows<E, false>(c, c.grad_v, c.dv_vectorized, w, key, 0, 128, INVERSE_P_SCALE, dv[0]);
    store_rows<E, false>(c, c.grad_v, c.dv_vectorized, w, key, 128, 128, INVERSE_P_SCALE, dv[1]);
}

/* Issues dP^T of a tile: V from shared memory, dO in two chunks. */
template <typename E>
static __device__ __forceinline__ void issue_dp(float (&d)[32], cot_pipeline_state<CHUNKS> chunk, uint32_t n)
{
    shared_storage_d256 &s = shared();
    cot_pipeline_state<CHUNKS> second = chunk;
    second.next();
    cot_mbarrier_wait(&s.dout_full[chunk.stage], chunk.parity);
    cot_mbarrier_wait(&s.dout_full[second.stage], second.parity);
    const uint64_t v_desc = cot_wgmma_k_major(cot_shared_address(s.v[0] + (n >> 31))); /* n >> 31: as for K */
    const uint64_t first_desc = cot_wgmma_k_major(cot_shared_address(s.dout[chunk.stage][0]));
    const uint64_t second_desc = cot_wgmma_k_major(cot_shared_address(s.dout[second.stage][0]));
    cot_wgmma_fence();
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const uint64_t b = k < 8 ? first_desc : second_desc;
        cot_wgmma<E, false, false>(d, v_desc + k / 4 * (TILE >> 4) + k % 4 * COT_WGMMA_K_STEP,
                                   b + k / 4 % 2 * (TILE >> 4) + k % 4 * COT_WGMMA_K_STEP, k > 0);
    }
    cot_wgmma_commit();
}

/* One step of warpgroup 2. FIRST: there is no dS of a previous step. */
template <typename E, bool FIRST>
static __device__ __forceinline__ void dk_step(uint32_t n, cot_pipeline_state<CHUNKS> &chunk, float (&dk)[2][64],
                                               uint32_t (&packed)[16])
{
    shared_storage_d256 &s = shared();
    const int lane = threadIdx.x % WARP;
    float scores[32];
    if (!FIRST) {
        issue_gemm_rs<E>(dk[0], packed, s.q[(n - 1) % 2][0]);
        issue_gemm_rs<E>(dk[1], packed, s.q[(n - 1) % 2][2]);
    }
    issue_dp<E>(scores, chunk, n);
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
            scores[4 * group + i] =
                fmaf(scores[4 * group + i], INVERSE_P_SCALE, -INVERSE_P_SCALE * (i % 2 == 0 ? delta.x : delta.y));
    }
    __syncwarp();
    for (int half = 0; half < 2; half++, chunk.next())
        if (lane == 0)
            cot_mbarrier_arrive(&s.dout_empty[chunk.stage]);
    cot_mbarrier_wait(&s.p_full, n & 1);
    __syncwarp();
    const uint32_t low_bits = cot_is_f16<E> ? cot_ldmatrix_x1(low_bits_address()) : 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t p[4];
        cot_ldmatrix_x4_trans(p, fragment_address(s.ds) + k * 16 * 128);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = decode_p<E>(p[i], 4 * k + i, low_bits);
            packed[4 * k + i] = cot_pack_pair<E>(pair.x * scores[8 * k + 2 * i], pair.y * scores[8 * k + 2 * i + 1]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; k++)
        cot_stmatrix_x4_trans(fragment_address(s.ds) + k * 16 * 128, packed + 4 * k);
    cot_fence_proxy_async();
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.ds_full);
}

template <typename E> static __device__ void compute_dk(const attention_bwd_call &c, const attention_work &w, int key)
{
    shared_storage_d256 &s = shared();
    float dk[2][64];
    uint32_t packed[16]; /* dS^T */
    cot_pipeline_state<CHUNKS> chunk;
#pragma unroll
    for (int i = 0; i < 64; i++)
        dk[0][i] = dk[1][i] = 0.0f;
    const uint32_t steps = (uint32_t)(w.heads * (w.tile_end - w.tile_begin));
    cot_mbarrier_wait(&s.v_full, 0);
    if (steps > 0) {
        cot_mbarrier_wait(&s.q_full[0], 0); /* dK reads Q: p_full does not make Q visible to this warpgroup */
        dk_step<E, true>(0, chunk, dk, packed);
        for (uint32_t n = 1; n < steps; n++) {
            cot_mbarrier_wait(&s.q_full[(n - 1) % 2], (n - 1) / 2 & 1);
            dk_step<E, false>(n, chunk, dk, packed);
        }
        cot_mbarrier_wait(&s.q_full[(steps - 1) % 2], (steps - 1) / 2 & 1);
        issue_gemm_rs<E>(dk[0], packed, s.q[(steps - 1) % 2][0]);
        issue_gemm_rs<E>(dk[1], packed, s.q[(steps - 1) % 2][2]);
        cot_wgmma_wait<0>();
    }
    store_rows<E, false>(c, c.grad_k, c.dk_vectorized, w, key, 0, 128, c.scale, dk[0]);
    store_rows<E, false>(c, c.grad_k, c.dk_vectorized, w, key, 128, 128, c.scale, dk[1]);
}

template <typename E> static __device__ __forceinline__ void backward(const attention_bwd_mapped &m)
{
    shared_storage_d256 &s = shared();
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
        cot_mbarrier_init(&s.peer_ds_full, 1), cot_mbarrier_init(&s.sent_ds_empty, 4),
            cot_mbarrier_init(&s.dq_empty, 1);
        cot_mbarrier_init_fence();
    }
    const attention_work w = work_of(c, blockIdx.x / CLUSTER_BLOCKS);
    cot_cluster_arrive();
    cot_cluster_wait();
    const int group = threadIdx.x / WARPGROUP;
    const int key = w.first_key + BLOCK_KEYS * rank + threadIdx.x % WARPGROUP / WARP * 16 +
                    threadIdx.x % WARP / 4; /* of even accumulator pairs */
    if (group == 0) {
        cot_setmaxnreg_dec<DQ_REGISTERS>();
        compute_dq<E>(w, rank);
    } else if (group == 1) {
        cot_setmaxnreg_inc<CONSUMER_REGISTERS>();
        compute_dv<E>(c, w, key);
    } else if (group == 2) {
        cot_setmaxnreg_inc<CONSUMER_REGISTERS>();
        compute_dk<E>(c, w, key);
    } else {
        cot_setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int role = threadIdx.x % WARPGROUP / WARP;
        if (threadIdx.x % WARP == 0) {
            if (role == 0)
                load_k_and_q(m, w, rank);
            else if (role == 1)
                load_v_and_dout(m, w, rank);
            else if (c.deterministic)
                write_dq<true>(c, w, rank, role - 2);
            else
                write_dq<false>(c, w, rank, role - 2);
        }
        __syncwarp();
    }
    cot_cluster_arrive(); /* until the peer has sent its last dS and has confirmed ours */
    cot_cluster_wait();
}

#define INSTANCE(name, element)                                                          \
    extern "C" __global__ void __launch_bounds__(ATTENTION_WARPGROUPS *WARPGROUP, 1)     \
        attention_bwd_sm90_##name##_d256(const __grid_constant__ attention_bwd_mapped m) \
    {                                                                                    \
        backward<element>(m);                                                            \
    }
INSTANCE(bf16, __nv_bfloat16)
INSTANCE(f16, __half)
