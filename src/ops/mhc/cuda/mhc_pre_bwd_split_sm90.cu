/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_split_sm90.cu: pre backward's dx and Q, n = 4, f16 and bf16, for any D. Block (x, y) has columns
 * [256 x, 256 x + 256) of all four streams, and every so many tiles of 16 tokens; no block waits for another's products,
 * since the records of all tokens have been made before from x and dh_in. A ring slot a tile:
 *
 *   producer     x, dh_in and the records of the tile to shared memory; later dx from where x was
 *   8 products   warps, 32 columns of all streams each: mhc_pre_bwd_sm90.cuh
 *   post         brings dx_post, if given, a stream at a time; its tile takes the place of a slot
 *
 *   barrier            arrivals                phase ends when
 *   full[slot]         producer's one          the tile has its bytes
 *   done[slot]         a warp of products      dx lies where x was
 *   post_full[stream]  post's one              dx_post of the stream has come
 *   post_empty[stream] a warp of products      it is read
 *
 * The records come from mhc_pre_tokens.cu or, ONCE, for a D whose second reading of x would take long, from teams of three
 * warps in this kernel: one in each block with a slice, four in each block that is left over, which does nothing else. A
 * team takes the next token, reads all of its x and dh_in, and leaves its record in global memory; the 16th of a tile
 * lets the producers load that, and then x and dh_in are in the second-level cache still. So teams are held to AHEAD turns
 * of tiles before the producers. What a token's record is does not depend on who makes it: its sums have one order.
 *
 *   word            written by                     means
 *   ticket          teams, one more each           the next token to take
 *   wanted          producers of the first slice   the furthest tile that one of them waits for or has
 *   made[tile]      teams, one more a token        all of its records are there when it is 16
 *
 * Nothing depends on how many blocks are there at once, or on which: tokens are taken in their order, by teams that are
 * there. The first token that is not done yet is of a tile that its team's own producer comes to want, since nobody waits
 * for an earlier one; and teams of a block that is left over, which go by another's producer, are held for a moment only. */
#include "mhc_pre_bwd_sm90.cuh"

#include "../../../cuda/device/bulk.cuh"

/* Groups whose second terms of phi gamma stay in registers. */
template <bool POST> constexpr int held_of = POST ? 5 : 7;

enum {
    TEAM_WARPS = 3,
    TEAM = 32 * TEAM_WARPS,
    TEAMS = MHC_SM90_BWD_THREADS / TEAM, /* of a block that is left over */
    DEPTH = 5, /* units of columns that a thread of a team has on its way; in a block that is left over */
    LEFT_OVER_DEPTH = 7,
    AHEAD = 6,         /* turns of all slices' producers together: with 2, 3, 4 of them teams were waited for */
    PATIENCE = 1 << 14 /* looks of a team in a block that is left over, a tenth of a microsecond each as a rule */
};
static_assert(PRODUCTS + 1 + TEAM_WARPS == MHC_SM90_BWD_THREADS / 32,
              "a block's warps: products, the producer, a team");

/* Of a token and, while some are still at that, of the next one; units: what the threads have asked for, DEPTH times eight
 * columns of x and dh_in each, which a thread reads itself. */
template <int DEPTH> struct team_memory {
    uint4 units[DEPTH][1 + N][TEAM];
    float dh_pre[2][TEAM_WARPS][N];
    double dz[TEAM_WARPS - 1][M][2]; /* in the end: of the other warps */
    int next[2];
};
template <> struct team_memory<0> {
};

/* With dx_post, or a team, in the place of a slot. */
template <bool POST, bool ONCE> struct shared_memory {
    enum { STAGES = POST || ONCE ? 3 : 4 };
    unsigned char stages[STAGES][STAGE_BYTES]; /* x [stream][chunk][token][128 bytes, swizzled], then dh_in alike */
    unsigned char dx_post[POST ? N : 1][POST ? STREAM_BYTES : 16];
    phi_fragments<GROUPS> phi;
    phi_fragments<GROUPS - held_of<POST>> second;
    token_record records[STAGES][TILE];
    uint64_t full[STAGES], done[STAGES], post_full[N], post_empty[N];
    team_memory<ONCE ? DEPTH : 0> team;
    int wanted; /* by the producer: for the team of the same block */
};
static_assert(sizeof(shared_memory<false, false>) <= MHC_SM90_SHARED_BYTES, "a block's shared memory");
static_assert(sizeof(shared_memory<true, false>) <= MHC_SM90_SHARED_BYTES, "a block's shared memory");
static_assert(TEAMS * sizeof(team_memory<LEFT_OVER_DEPTH>) <= MHC_SM90_SHARED_BYTES, "a block's shared memory");
static_assert(sizeof(shared_memory<false, true>) <= MHC_SM90_SHARED_BYTES, "a block's shared memory");
extern __shared__ __align__(1024) unsigned char memory[];

/* A block's slice, its part of the tiles and how many parts there are, which are at hand without a register. */
template <bool ONCE> static __device__ __forceinline__ int slice_of(const mhc_call &c)
{
    return (int)(ONCE ? blockIdx.x % (uint32_t)c.slices : blockIdx.x);
}

template <bool ONCE> static __device__ __forceinline__ int part_of(const mhc_call &c)
{
    return (int)(ONCE ? blockIdx.x / (uint32_t)c.slices : blockIdx.y);
}

template <bool ONCE> static __device__ __forceinline__ int parts_of(const mhc_call &c)
{
    return (int)(ONCE ? (uint32_t)c.parts : gridDim.y);
}

#define FOR_EACH_TILE(tile, ring, c, count) \
    cot_ring<s.STAGES> ring;                \
    for (int tile = part_of<ONCE>(c); tile < (count); tile += parts_of<ONCE>(c), ring.next())

template <bool ONCE> static __device__ __forceinline__ int64_t first_column(const mhc_call &c)
{
    return slice_of<ONCE>(c) * MHC_SM90_COLUMNS + threadIdx.x / 32 * COLUMNS;
}

template <typename E, bool POST, bool ONCE>
static __device__ __forceinline__ void products(const mhc_call &c, shared_memory<POST, ONCE> &s, int tiles)
{
    const int warp = threadIdx.x / 32;
    uint32_t second[held_of<POST>][6];
    load_phi<0, GROUPS / 2>(c, s, first_column<ONCE>(c), warp, second);
    load_phi<GROUPS / 2, GROUPS>(c, s, first_column<ONCE>(c), warp, second);
    float Q[GROUPS][OCTETS][4] = {0};
    const lane_units at = find_units(s, warp);
    uint32_t turn = 0;
    FOR_EACH_TILE(tile, ring, c, tiles)
    {
        cot_mbarrier_wait(&s.full[ring.slot], ring.parity);
        multiply_tile<E, POST>(c, s, at, ring, warp, turn, second, Q);
        turn ^= 1;
    }
    const int64_t d = first_column<ONCE>(c);
    if (d < c.D && (given(c.dphi) || given(c.dgamma)))
        store_Q(c, Q, part_of<ONCE>(c), d);
}

/* Until all of a tile's records are in global memory, for the copy engine too. */
static __device__ __forceinline__ void wait_for_records(const mhc_call &c, int tile)
{
    while (cot_load_acquire(c.words + MHC_SM90_MADE + tile) != TILE)
        __nanosleep(32);
    cot_fence_async_global();
}

/* x and dh_in of a tile whose records are made in this kernel were read a moment ago, and nobody reads them again. */
template <bool ONCE, bool POST>
static __device__ __forceinline__ void load_tile(const mhc_mapped_call &p, shared_memory<POST, ONCE> &s, int slot,
                                                 int tile)
{
    const int slice = slice_of<ONCE>(p.call), chunk = slice * MHC_SM90_CHUNKS;
    if (ONCE) {
        *(volatile int *)&s.wanted = tile;
        if (slice == 0)
            atomicMax(p.call.words + MHC_SM90_WANTED, (uint32_t)tile);
        wait_for_records(p.call, tile);
    }
    cot_mbarrier_arrive_expect(&s.full[slot], STAGE_BYTES + sizeof s.records[0]);
    cot_tensor_load_4d<ONCE>(s.stages[slot], &p.x, 0, tile * TILE, chunk, 0, &s.full[slot]);
    cot_tensor_load_4d<ONCE>(s.stages[slot] + X_BYTES, &p.dh_in, 0, tile * TILE, chunk, 0, &s.full[slot]);
    cot_bulk_load(s.records[slot], p.call.records + (int64_t)tile * TILE, sizeof s.records[0], &s.full[slot]);
}

template <bool ONCE, bool POST>
static __device__ __forceinline__ void produce(const mhc_mapped_call &p, shared_memory<POST, ONCE> &s, int tiles)
{
    const int first = part_of<ONCE>(p.call), step = parts_of<ONCE>(p.call);
    if (threadIdx.x % 32 == 0) {
        cot_wait_for_kernels_before(); /* of the records or the words; what is done before needs the inputs alone */
        for (int slot = 0; slot < s.STAGES && first + slot * step < tiles; slot++)
            load_tile<ONCE>(p, s, slot, first + slot * step);
        FOR_EACH_TILE(tile, ring, p.call, tiles)
        {
            cot_mbarrier_wait(&s.done[ring.slot], ring.parity);
            if (given(p.call.dx)) {
                cot_tensor_store_4d<ONCE>(&p.dx, 0, tile * TILE, slice_of<ONCE>(p.call) * MHC_SM90_CHUNKS, 0,
                                          s.stages[ring.slot]);
                cot_bulk_commit();
                cot_bulk_wait_read();
            }
            if (tile + s.STAGES * step < tiles)
                load_tile<ONCE>(p, s, ring.slot, tile + s.STAGES * step);
        }
        if (ONCE)
            *(volatile int *)&s.wanted = tiles;
        cot_bulk_wait();
    }
    __syncwarp();
}

/* dx_post, a stream at a time as soon as that of the tile before is read. */
static __device__ __forceinline__ void produce_dx_post(const mhc_mapped_call &p, shared_memory<true, false> &s,
                                                       int tiles)
{
    constexpr bool ONCE = false;
    if (threadIdx.x % 32 == 0) {
        uint32_t parity = 1;
        FOR_EACH_TILE(tile, ring, p.call, tiles)
        {
            for (int i = 0; i < N; i++) {
                cot_mbarrier_wait(&s.post_empty[i], parity);
                cot_mbarrier_arrive_expect(&s.post_full[i], STREAM_BYTES);
                cot_tensor_load_4d(s.dx_post[i], &p.dx_post, 0, tile * TILE, (int)blockIdx.x * MHC_SM90_CHUNKS, i,
                                   &s.post_full[i]);
            }
            parity ^= 1;
        }
    }
    __syncwarp();
}

/* ---- records ------------------------------------------------------------------------------------------ */

/* The teams' threads meet, of one team each. */
static __device__ __forceinline__ void meet(int team)
{
    cot_barrier_sync((uint32_t)team + 1, TEAM);
}

/* Sums of a stream's eight columns with dh_in's. */
template <typename E>
static __device__ __forceinline__ float multiply_eight(const uint32_t (&x)[4], const uint32_t (&dh_in)[4])
{
    float run = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const float2 a = cot_unpack_pair<E>(x[w]), b = cot_unpack_pair<E>(dh_in[w]);
        run = fmaf(a.x, b.x, run);
        run = fmaf(a.y, b.y, run);
    }
    return run;
}

/* The thread's share of dh_pre of a token. */
template <typename E, int DEPTH>
static __device__ __forceinline__ void add_up_dh_pre(const mhc_call &c, uint4 (&units)[DEPTH][1 + N][TEAM],
                                                     int64_t token, int thread, float (&sums)[N])
{
    const E *x = (const E *)c.x.data + token_at(c, c.x, token),
            *dh_in = (const E *)c.dh_in.data + token_at(c, c.dh_in, token);
    const int D = (int)c.D;
    int slot = 0;
    for (int d = thread * 8 - DEPTH * TEAM * 8; d < D; d += TEAM * 8) {
        if (d >= 0) {
            cot_copy_async_wait<DEPTH - 1>();
            const uint4 b = units[slot][0][thread];
#pragma unroll
            for (int i = 0; i < N; i++) {
                const uint4 a = units[slot][1 + i][thread];
                sums[i] += multiply_eight<E>({a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w});
            }
        }
        const int ahead = d + DEPTH * TEAM * 8;
        if (ahead < D) {
            cot_copy_async_or_zeros<>(true, cot_shared_address(&units[slot][0][thread]), dh_in + ahead);
#pragma unroll
            for (int i = 0; i < N; i++)
                cot_copy_async_or_zeros<>(true, cot_shared_address(&units[slot][1 + i][thread]),
                                          x + i * c.x.stride[2] + ahead);
        }
        cot_copy_async_commit();
        slot = slot + 1 < DEPTH ? slot + 1 : 0;
    }
}

/* A token's record from dh_pre and what a lane has of its coefficients, and dz for the sums over all tokens. */
static __device__ __forceinline__ void make_record(const mhc_call &c, int token, const token_inputs &in, float alpha,
                                                   const float (&sums)[TEAM_WARPS][N])
{
    const int lane = threadIdx.x % 32;
    mhc_token_record *record = &c.records[token];
    const float sigma = in.value - c.hc_eps;
    float dz = in.value;
    if (lane < N)
        dz = (sums[0][lane] + sums[1][lane] + sums[2][lane]) * sigma * (1.0f - sigma);
    else if (!given(c.dA) && lane < 2 * N)
        dz *= in.h_post * (1.0f - in.h_post / c.post_scale);
    const float du = alpha * dz;
    const float sum = sum_over_warp(du * in.h_mix);
    if (lane < M) {
        float rest = du * in.inv_rms;
#pragma unroll
        for (int term = 0; term < TERMS; term++) {
            const __nv_bfloat16 value = __float2bfloat16_rn(rest);
            record->terms[term][lane] = __bfloat16_as_ushort(value);
            rest -= __bfloat162float(value);
        }
        if (token < c.tokens)
            c.dz[token * M + lane] = dz;
    }
    if (lane < N)
        record->h_pre[lane] = in.value;
    if (lane == 0)
        record->factor = -sum * in.inv_rms * in.inv_rms * in.inv_rms / (float)(N * c.D);
    __syncwarp();
    if (lane == 0) {
        __threadfence();
        atomicAdd(c.words + MHC_SM90_MADE + token / TILE, 1u);
    }
}

/* One team, from its first token to its last. wanted: of this block's producer; null = the block is left over. */
template <typename E, int DEPTH>
static __device__ __forceinline__ void make_records(const mhc_call &c, team_memory<DEPTH> &s, int team, int warp,
                                                    int tiles, const int *wanted)
{
    const int lane = threadIdx.x % 32;
    const bool first = warp == 0 && lane == 0;
    const float alpha = lane < M ? load_f32(c.alpha, group_of(N, lane) * c.alpha.stride[0]) : 0.0f;
    const token_element value = input_element(c, lane);
    cot_wait_for_kernels_before();
    if (first)
        s.next[0] = (int)atomicAdd(c.words + MHC_SM90_TICKET, 1u);
    meet(team);
    for (uint32_t count = 0;; count++) {
        const int token = s.next[count % 2];
        const bool writer = warp == (int)(count % TEAM_WARPS);
        if (token / TILE >= tiles)
            break;
        int next = 0;
        if (first)
            next = (int)atomicAdd(c.words + MHC_SM90_TICKET, 1u);
        token_inputs in = {};
        if (writer)
            in = load_inputs(c, value, (uint32_t)token);
        for (int looks = 0; wanted != nullptr || looks < PATIENCE; looks++) {
            if (token / TILE - AHEAD * (int)c.parts <=
                (wanted != nullptr ? *(const volatile int *)wanted : (int)cot_load_acquire(c.words + MHC_SM90_WANTED)))
                break;
            __nanosleep(64);
        }
        float sums[N] = {0};
        if (token < c.tokens)
            add_up_dh_pre<E>(c, s.units, token, warp * 32 + lane, sums);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float sum = sum_over_warp(sums[i]);
            if (lane == 0)
                s.dh_pre[count % 2][warp][i] = sum;
        }
        if (first)
            s.next[(count + 1) % 2] = next;
        meet(team);
        if (writer)
            make_record(c, token, in, alpha, s.dh_pre[count % 2]);
    }
}

/* A block's share of the sums of dz over the tokens, once the records of all are there. */
template <int DEPTH>
static __device__ __forceinline__ void add_up_dz(const mhc_call &c, team_memory<DEPTH> &s, int warp, int tiles)
{
    const int lane = threadIdx.x % 32;
    const token_element h_mix(c.h_mix, lane * c.h_mix.stride[2], true), inv_rms(c.inv_rms, 0, true);
    double dbias = 0, dalpha = 0;
    for (int tile = warp * 32 + lane; tile < tiles; tile += TEAM)
        while (cot_load_acquire(c.words + MHC_SM90_MADE + tile) != TILE)
            __nanosleep(64);
    meet(0);
    if (lane < M) {
#pragma unroll 4
        for (int token = (int)blockIdx.x * TEAM_WARPS + warp; token < (int)c.tokens;
             token += MHC_SM90_BLOCKS * TEAM_WARPS) {
            const uint32_t b = (uint32_t)token / (uint32_t)c.T, t = (uint32_t)token - b * (uint32_t)c.T;
            const double dz = (double)__ldcg(c.dz + (int64_t)token * M + lane);
            dbias += dz;
            dalpha += dz * (double)(*h_mix.at(b, t) * *inv_rms.at(b, t));
        }
        if (warp > 0) {
            s.dz[warp - 1][lane][0] = dbias;
            s.dz[warp - 1][lane][1] = dalpha;
        }
    }
    meet(0);
    if (warp == 0 && lane < M) {
        double *to = c.token_sums + ((int64_t)blockIdx.x * M + lane) * 2;
        to[0] = dbias + s.dz[0][lane][0] + s.dz[1][lane][0];
        to[1] = dalpha + s.dz[0][lane][1] + s.dz[1][lane][1];
    }
}

/* ---- blocks ------------------------------------------------------------------------------------------- */

template <typename E, bool POST, bool ONCE> static __device__ __forceinline__ void backward(const mhc_mapped_call &p)
{
    shared_memory<POST, ONCE> &s = *(shared_memory<POST, ONCE> *)memory;
    const mhc_call &c = p.call;
    const int warp = threadIdx.x / 32;
    const int tiles = (int)((c.tokens + TILE - 1) / TILE);
    if (ONCE && part_of<ONCE>(c) >= parts_of<ONCE>(c)) { /* left over */
        const int team = threadIdx.x / TEAM;
        team_memory<LEFT_OVER_DEPTH> &own = ((team_memory<LEFT_OVER_DEPTH> *)memory)[team];
        make_records<E>(c, own, team, warp % TEAM_WARPS, tiles, nullptr);
        if (team == 0)
            add_up_dz(c, own, warp, tiles);
        return;
    }
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < s.STAGES; slot++) {
            cot_mbarrier_init(&s.full[slot], 1);
            cot_mbarrier_init(&s.done[slot], PRODUCTS);
        }
        for (int i = 0; i < N; i++) {
            cot_mbarrier_init(&s.post_full[i], 1);
            cot_mbarrier_init(&s.post_empty[i], PRODUCTS);
        }
        s.wanted = part_of<ONCE>(c);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    if (warp < PRODUCTS) {
        cot_more_registers<216>();
        products<E, POST, ONCE>(c, s, tiles);
    } else {
        cot_fewer_registers<72>();
        if (warp == PRODUCTS)
            produce<ONCE>(p, s, tiles);
        else if constexpr (ONCE) {
            make_records<E>(c, s.team, 0, warp - (PRODUCTS + 1), tiles, &s.wanted);
            add_up_dz(c, s.team, warp - (PRODUCTS + 1), tiles);
        } else if constexpr (POST)
            if (warp == PRODUCTS + 1)
                produce_dx_post(p, s, tiles);
    }
}

/* Nothing is made, taken or wanted yet. */
extern "C" __global__ void __launch_bounds__(MHC_CUDA_THREADS)
    mhc_pre_bwd_once_begin(const __grid_constant__ mhc_call c)
{
    const int64_t count = MHC_SM90_MADE + (c.tokens + TILE - 1) / TILE;
    for (int64_t at = threadIdx.x; at < count; at += MHC_CUDA_THREADS)
        c.words[at] = 0;
}

#define INSTANCE(name, element, post, once)                               \
    extern "C" __global__ void __launch_bounds__(MHC_SM90_BWD_THREADS, 1) \
        mhc_pre_bwd_##name(const __grid_constant__ mhc_mapped_call p)     \
    {                                                                     \
        backward<element, post, once>(p);                                 \
    }
INSTANCE(split_sm90_f16, __half, false, false)
INSTANCE(split_sm90_bf16, __nv_bfloat16, false, false)
INSTANCE(split_post_sm90_f16, __half, true, false)
INSTANCE(split_post_sm90_bf16, __nv_bfloat16, true, false)
INSTANCE(once_sm90_bf16, __nv_bfloat16, false, true)
