/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_split_sm90.cu: dx and dphi_part of pre backward. f16 and bf16, n = 4, D a multiple of 64 up to
 * 33792 (132 slices of 256 columns).
 *
 * A tile is 16 tokens. Slice s is columns [256 s, 256 s + 256) of all four streams. A record has the values of a token
 * that the products need: it comes from x and dh_in. No block waits for another block's products. Two versions:
 *
 *   split     Block (x, y) has slice x and every gridDim.y-th tile, from tile y on. mhc_pre_tokens.cu made the records
 *             before.
 *   ONE_PASS  (bf16 without dx_post, for a D where a second read of x from memory would take long.) Block i has slice
 *             i % slices and part i / slices: every parts-th tile, from tile i / slices on. Teams of three warps in
 *             this kernel make the records. Blocks whose part is `parts` or more are spare: they only make records.
 *
 * Each stage holds one tile. Roles:
 *
 *   producer     loads x, dh_in and the records of the tile into shared memory; later stores dx, which replaced x there
 *   8 MMA warps  32 columns of all streams each: mhc_pre_bwd_sm90.cuh
 *   dx_post      loads dx_post, if present, one stream at a time. Its buffer replaces one stage.
 *   team         ONE_PASS: makes records. Its memory replaces one stage.
 *
 *   barrier             arrivals             who waits     phase ends when
 *   full[stage]         1, the producer      MMA warps     the tile is in shared memory
 *   stage_done[stage]   1 of each MMA warp   producer      the MMA warps have finished the stage (x holds dx, if dx
 *                                                          is an output)
 *   post_full[stream]   1, the dx_post warp  MMA warps     dx_post of the stream is in shared memory
 *   post_empty[stream]  1 of each MMA warp   dx_post warp  dx_post of the stream has been read
 *
 * Teams (ONE_PASS). Each block that has tiles has one team, a spare block has four. A team takes the next token, reads
 * all of its x and dh_in, and stores its record in global memory. When the 16 records of a tile are stored, the
 * producers load them. x and dh_in are then still in the L2 cache, because teams run at most ROUNDS_AHEAD rounds of
 * tiles ahead of the producers. The record of a token does not depend on the team that makes it: the order of its sums
 * is fixed.
 *
 *   counter              written by                     meaning
 *   NEXT_TOKEN           teams, +1 each                 the next token to take
 *   FURTHEST_TILE        producers of the first slice   the furthest tile that one of them waits for or has loaded
 *   RECORD_COUNTS[tile]  teams, +1 for each token       16: all records of the tile are stored
 *
 * The kernel before, mhc_pre_dz, clears the counters.
 *
 * Progress does not depend on how many blocks, or which blocks, are resident at once: the resident teams take the
 * tokens in order. Take the first token without a record, in tile t. All records of earlier tiles exist, so no producer
 * waits for a tile before t. The producer of the block whose team holds the token therefore advances until this team
 * may continue. The team makes the record. Teams of spare blocks follow the producers of other blocks and wait for a
 * limited time only. */
#include "mhc_pre_bwd_sm90.cuh"

#include "../../../cuda/device/bulk.cuh"

typedef bwd_sizes<MHC_SM90_N> sizes_of_n4;
enum {
    N = sizes_of_n4::N,
    M = sizes_of_n4::M,
    OCTETS = sizes_of_n4::OCTETS,
    STREAM_BYTES = sizes_of_n4::STREAM_BYTES,
    X_BYTES = sizes_of_n4::X_BYTES,
    STAGE_BYTES = sizes_of_n4::STAGE_BYTES,
    COLUMNS = sizes_of_n4::COLUMNS
};

/* Groups whose second terms of phi gamma stay in registers. */
template <bool ADD_POST> constexpr int register_groups = ADD_POST ? 5 : 7;

enum {
    TEAM_WARPS = 3,
    TEAM = 32 * TEAM_WARPS,
    TEAMS = MHC_SM90_BWD_THREADS / TEAM, /* of a spare block */
    /* Entries of a team thread's cp.async ring, and the same in a spare block. */
    DEPTH = 5,
    SPARE_DEPTH = 7,
    /* Rounds of tiles (c.parts tiles each) that teams may be ahead of the producers. With fewer rounds the producers wait for
     * the teams, with more the L2 cache loses some tiles before their second read. */
    ROUNDS_AHEAD = 5,
    MAX_POLLS = 1 << 14 /* polls of a team in a spare block; a poll usually takes 0.1 us */
};
static_assert(MMA_WARPS + 1 + TEAM_WARPS == MHC_SM90_BWD_THREADS / 32,
              "a block has the MMA warps, the producer and a team");

/* Shared memory of a team. The arrays of two are indexed by the parity of the token's number in the team: some warps
 * may start the next token while others finish this one. units is the cp.async ring. An entry has 8 columns of dh_in
 * and of each stream of x for each thread; a thread reads only its own data. */
template <int DEPTH> struct team_memory {
    uint4 units[DEPTH][1 + N][TEAM];
    float dh_pre[2][TEAM_WARPS][N];
    double dz[TEAM_WARPS - 1][M][2]; /* at the end: sums of the other warps */
    int next_token[2];
};
template <> struct team_memory<0> {
};

/* The buffer of dx_post, or a team's memory, replaces one stage. */
template <bool ADD_POST, bool ONE_PASS> struct shared_memory {
    typedef sizes_of_n4 sizes;
    enum { STAGES = ADD_POST || ONE_PASS ? 3 : 4 };
    unsigned char stages[STAGES][STAGE_BYTES]; /* x [stream][chunk][token][128 bytes, swizzled], then dh_in likewise */
    unsigned char dx_post[ADD_POST ? N : 1][ADD_POST ? STREAM_BYTES : 16];
    phi_fragments<COLUMN_GROUPS, OCTETS> phi;
    phi_fragments<COLUMN_GROUPS - register_groups<ADD_POST>, OCTETS> second;
    token_record records[STAGES][TILE];
    uint64_t full[STAGES], stage_done[STAGES], post_full[N], post_empty[N];
    team_memory<ONE_PASS ? DEPTH : 0> team;
    int producer_tile; /* the producer's current tile, read by the team of the same block */
};
static_assert(sizeof(shared_memory<false, false>) <= MHC_SM90_SHARED_BYTES, "must fit in a block's shared memory");
static_assert(sizeof(shared_memory<true, false>) <= MHC_SM90_SHARED_BYTES, "must fit in a block's shared memory");
static_assert(TEAMS * sizeof(team_memory<SPARE_DEPTH>) <= MHC_SM90_SHARED_BYTES, "must fit in a block's shared memory");
static_assert(sizeof(shared_memory<false, true>) <= MHC_SM90_SHARED_BYTES, "must fit in a block's shared memory");
extern __shared__ __align__(1024) unsigned char memory[];

/* A block's slice, its part of the tiles, and the number of parts. They are computed at each use to save registers. */
template <bool ONE_PASS> static __device__ __forceinline__ int slice_of(const mhc_call &c)
{
    return (int)(ONE_PASS ? blockIdx.x % (uint32_t)c.slices : blockIdx.x);
}

template <bool ONE_PASS> static __device__ __forceinline__ int part_of(const mhc_call &c)
{
    return (int)(ONE_PASS ? blockIdx.x / (uint32_t)c.slices : blockIdx.y);
}

template <bool ONE_PASS> static __device__ __forceinline__ int parts_of(const mhc_call &c)
{
    return (int)(ONE_PASS ? (uint32_t)c.parts : gridDim.y);
}

/* Declares `ring` in the scope around it, and begins the loop over the block's tiles below `count`. The function that
 * uses it has the template parameters ADD_POST and ONE_PASS. */
#define FOR_EACH_TILE(tile, ring, c, count)                             \
    cot_pipeline_state<shared_memory<ADD_POST, ONE_PASS>::STAGES> ring; \
    for (int tile = part_of<ONE_PASS>(c); tile < (count); tile += parts_of<ONE_PASS>(c), ring.next())

template <bool ONE_PASS> static __device__ __forceinline__ int64_t first_column(const mhc_call &c)
{
    return slice_of<ONE_PASS>(c) * MHC_SM90_COLUMNS + threadIdx.x / 32 * COLUMNS;
}

template <typename E, bool ADD_POST, bool ONE_PASS>
static __device__ __forceinline__ void multiply(const mhc_call &c, shared_memory<ADD_POST, ONE_PASS> &s, int tiles)
{
    const int warp = threadIdx.x / 32;
    uint32_t second_terms[register_groups<ADD_POST>][2 * OCTETS];
    load_phi<0, COLUMN_GROUPS / 2>(c, s, first_column<ONE_PASS>(c), warp, phi_scale<E, ADD_POST>, second_terms);
    load_phi<COLUMN_GROUPS / 2, COLUMN_GROUPS>(c, s, first_column<ONE_PASS>(c), warp, phi_scale<E, ADD_POST>,
                                               second_terms);
    float dphi_part[COLUMN_GROUPS][OCTETS][4] = {0};
    const lane_units units = find_lane_units(s, warp);
    uint32_t post_parity = 0;
    FOR_EACH_TILE(tile, ring, c, tiles)
    {
        cot_mbarrier_wait(&s.full[ring.stage], ring.parity);
        multiply_tile<E, ADD_POST, false>(c, s, units, ring, warp, post_parity, second_terms, dphi_part);
        post_parity ^= 1;
    }
    const int64_t d = first_column<ONE_PASS>(c);
    if (d < c.D && (present(c.dphi) || present(c.dgamma)))
        store_dphi_part<sizes_of_n4>(c, dphi_part, part_of<ONE_PASS>(c), d);
}

/* Waits until all records of a tile are in global memory and visible to the copy engine (async proxy). */
static __device__ __forceinline__ void wait_for_records(const mhc_call &c, int tile)
{
    while (cot_load_acquire(c.counters + MHC_SM90_RECORD_COUNTS + tile) != TILE)
        __nanosleep(32);
    cot_fence_proxy_async_global();
}

/* With ONE_PASS x and dh_in were read shortly before, and no block will read them again. */
template <bool ONE_PASS, bool ADD_POST>
static __device__ __forceinline__ void load_tile(const mhc_mapped_call &p, shared_memory<ADD_POST, ONE_PASS> &s,
                                                 int stage, int tile)
{
    const int slice = slice_of<ONE_PASS>(p.call), chunk = slice * MHC_SM90_BLOCK_CHUNKS;
    if (ONE_PASS) {
        *(volatile int *)&s.producer_tile = tile;
        if (slice == 0)
            atomicMax(p.call.counters + MHC_SM90_FURTHEST_TILE, (uint32_t)tile);
        wait_for_records(p.call, tile);
    }
    cot_mbarrier_arrive_expect(&s.full[stage], STAGE_BYTES + sizeof s.records[0]);
    cot_tma_load_4d<ONE_PASS>(s.stages[stage], &p.x, 0, tile * TILE, chunk, 0, &s.full[stage]);
    cot_tma_load_4d<ONE_PASS>(s.stages[stage] + X_BYTES, &p.dh_in, 0, tile * TILE, chunk, 0, &s.full[stage]);
    cot_bulk_load(s.records[stage], p.call.records + (int64_t)tile * TILE, sizeof s.records[0], &s.full[stage]);
}

template <bool ONE_PASS, bool ADD_POST>
static __device__ __forceinline__ void produce(const mhc_mapped_call &p, shared_memory<ADD_POST, ONE_PASS> &s,
                                               int tiles)
{
    const int first = part_of<ONE_PASS>(p.call), step = parts_of<ONE_PASS>(p.call);
    if (threadIdx.x % 32 == 0) {
        /* Waits for the kernel that writes the records or clears the counters. The code before it reads only inputs. */
        cot_griddepcontrol_wait();
        for (int stage = 0; stage < s.STAGES && first + stage * step < tiles; stage++)
            load_tile<ONE_PASS>(p, s, stage, first + stage * step);
        FOR_EACH_TILE(tile, ring, p.call, tiles)
        {
            cot_mbarrier_wait(&s.stage_done[ring.stage], ring.parity);
            if (present(p.call.dx)) {
                cot_tma_store_4d<ONE_PASS>(&p.dx, 0, tile * TILE, slice_of<ONE_PASS>(p.call) * MHC_SM90_BLOCK_CHUNKS, 0,
                                           s.stages[ring.stage]);
                cot_bulk_commit();
                cot_bulk_wait_read();
            }
            if (tile + s.STAGES * step < tiles)
                load_tile<ONE_PASS>(p, s, ring.stage, tile + s.STAGES * step);
        }
        if (ONE_PASS)
            *(volatile int *)&s.producer_tile = tiles;
        cot_bulk_wait();
    }
    __syncwarp();
}

/* Loads each stream of dx_post as soon as the MMA warps have read that stream of the previous tile. */
static __device__ __forceinline__ void produce_dx_post(const mhc_mapped_call &p, shared_memory<true, false> &s,
                                                       int tiles)
{
    constexpr bool ADD_POST = true, ONE_PASS = false;
    if (threadIdx.x % 32 == 0) {
        uint32_t parity = 1;
        FOR_EACH_TILE(tile, ring, p.call, tiles)
        {
            for (int i = 0; i < N; i++) {
                cot_mbarrier_wait(&s.post_empty[i], parity);
                cot_mbarrier_arrive_expect(&s.post_full[i], STREAM_BYTES);
                cot_tma_load_4d(s.dx_post[i], &p.dx_post, 0, tile * TILE, (int)blockIdx.x * MHC_SM90_BLOCK_CHUNKS, i,
                                &s.post_full[i]);
            }
            parity ^= 1;
        }
    }
    __syncwarp();
}

/* ---- records ------------------------------------------------------------------------------------------ */

/* Synchronizes the threads of one team. */
static __device__ __forceinline__ void sync_team(int team)
{
    cot_barrier_sync((uint32_t)team + 1, TEAM);
}

/* Dot product of eight columns of a stream with those of dh_in. */
template <typename E> static __device__ __forceinline__ float dot_8(const uint32_t (&x)[4], const uint32_t (&dh_in)[4])
{
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const float2 a = cot_unpack_pair<E>(x[w]), b = cot_unpack_pair<E>(dh_in[w]);
        sum = fmaf(a.x, b.x, sum);
        sum = fmaf(a.y, b.y, sum);
    }
    return sum;
}

/* The thread's part of a token's dh_pre. */
template <typename E, int DEPTH>
static __device__ __forceinline__ void accumulate_dh_pre(const mhc_call &c, uint4 (&units)[DEPTH][1 + N][TEAM],
                                                         int64_t token, int thread, float (&sums)[N])
{
    const E *x = (const E *)c.x.data + token_offset(c, c.x, token),
            *dh_in = (const E *)c.dh_in.data + token_offset(c, c.dh_in, token);
    const int D = (int)c.D;
    int entry = 0;
    for (int d = thread * 8 - DEPTH * TEAM * 8; d < D; d += TEAM * 8) {
        if (d >= 0) {
            cot_cp_async_wait_group<DEPTH - 1>();
            const uint4 b = units[entry][0][thread];
#pragma unroll
            for (int i = 0; i < N; i++) {
                const uint4 a = units[entry][1 + i][thread];
                sums[i] += dot_8<E>({a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w});
            }
        }
        const int next_d = d + DEPTH * TEAM * 8;
        if (next_d < D) {
            cot_cp_async_zfill<>(true, cot_shared_address(&units[entry][0][thread]), dh_in + next_d);
#pragma unroll
            for (int i = 0; i < N; i++)
                cot_cp_async_zfill<>(true, cot_shared_address(&units[entry][1 + i][thread]),
                                     x + i * c.x.stride[2] + next_d);
        }
        cot_cp_async_commit_group();
        entry = entry + 1 < DEPTH ? entry + 1 : 0;
    }
}

/* Stores a token's record, made from dh_pre and the lane's coefficient inputs. Stores dz for the sums over all
 * tokens. */
static __device__ __forceinline__ void make_record(const mhc_call &c, int token, const token_inputs &in, float alpha,
                                                   const float (&sums)[TEAM_WARPS][N])
{
    const int lane = threadIdx.x % 32;
    mhc_token_record *record = &c.records[token];
    const float sigma = in.value - c.hc_eps;
    float dz = in.value;
    if (lane < N)
        dz = (sums[0][lane] + sums[1][lane] + sums[2][lane]) * sigma * (1.0f - sigma);
    else if (!present(c.dh_res) && lane < 2 * N)
        dz *= in.h_post * (1.0f - in.h_post / c.post_scale);
    const float du = alpha * dz;
    const float sum = sum_over_warp(du * in.h_mix);
    if (lane < M) {
        float rest = du * in.inv_rms * (float)MHC_CUDA_MIX_SCALE;
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
    if (lane == 0)
        cot_add_release(c.counters + MHC_SM90_RECORD_COUNTS + token / TILE, 1u);
}

/* The tile that the producers have reached. producer_tile: of this block's producer; null = spare block. */
static __device__ __forceinline__ int reached_tile(const mhc_call &c, const int *producer_tile)
{
    return producer_tile != nullptr ? *(const volatile int *)producer_tile
                                    : (int)*(const volatile uint32_t *)(c.counters + MHC_SM90_FURTHEST_TILE);
}

/* The loop of one team over its tokens. producer_tile: of this block's producer; null = spare block. */
template <typename E, int DEPTH>
static __device__ __forceinline__ void make_records(const mhc_call &c, team_memory<DEPTH> &s, int team, int warp,
                                                    int tiles, const int *producer_tile)
{
    const int lane = threadIdx.x % 32;
    const bool leader = warp == 0 && lane == 0;
    const float alpha = lane < M ? load_f32(c.alpha, alpha_index(N, lane) * c.alpha.stride[0]) : 0.0f;
    const token_element value = input_element<N>(c, lane);
    cot_griddepcontrol_wait();
    if (leader)
        s.next_token[0] = (int)cot_fetch_add(c.counters + MHC_SM90_NEXT_TOKEN, 1u);
    sync_team(team);
    for (uint32_t count = 0;; count++) {
        const int token = s.next_token[count % 2];
        const bool writer = warp == (int)(count % TEAM_WARPS);
        if (token / TILE >= tiles)
            break;
        int next_token = 0;
        if (leader)
            next_token = (int)cot_fetch_add(c.counters + MHC_SM90_NEXT_TOKEN, 1u);
        token_inputs in = {};
        if (writer)
            in = load_inputs<N>(c, value, (uint32_t)token);
        for (int polls = 0; producer_tile != nullptr || polls < MAX_POLLS; polls++) {
            if (token / TILE - ROUNDS_AHEAD * (int)c.parts <= reached_tile(c, producer_tile))
                break;
            __nanosleep(64);
        }
        float sums[N] = {0};
        if (token < c.tokens)
            accumulate_dh_pre<E>(c, s.units, token, warp * 32 + lane, sums);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float sum = sum_over_warp(sums[i]);
            if (lane == 0)
                s.dh_pre[count % 2][warp][i] = sum;
        }
        if (leader)
            s.next_token[(count + 1) % 2] = next_token;
        sync_team(team);
        if (writer)
            make_record(c, token, in, alpha, s.dh_pre[count % 2]);
    }
}

/* This block's part of the sums of dz over the tokens. First waits for all records. */
template <int DEPTH>
static __device__ __forceinline__ void sum_dz(const mhc_call &c, team_memory<DEPTH> &s, int warp, int tiles)
{
    const int lane = threadIdx.x % 32;
    const token_element h_mix(c.h_mix, lane * c.h_mix.stride[2], true), inv_rms(c.inv_rms, 0, true);
    double dbias = 0, dalpha = 0;
    for (int tile = warp * 32 + lane; tile < tiles; tile += TEAM)
        while (cot_load_acquire(c.counters + MHC_SM90_RECORD_COUNTS + tile) != TILE)
            __nanosleep(64);
    sync_team(0);
    if (lane < M) {
#pragma unroll 4
        for (int token = (int)blockIdx.x * TEAM_WARPS + warp; token < (int)c.tokens;
             token += MHC_SM90_BLOCKS * TEAM_WARPS) {
            const uint32_t b = (uint32_t)token / (uint32_t)c.T, t = (uint32_t)token - b * (uint32_t)c.T;
            const double dz = (double)__ldcg(c.dz + (int64_t)token * M + lane);
            dbias += dz;
            dalpha += dz * (double)(*h_mix.address(b, t) * *inv_rms.address(b, t));
        }
        if (warp > 0) {
            s.dz[warp - 1][lane][0] = dbias;
            s.dz[warp - 1][lane][1] = dalpha;
        }
    }
    sync_team(0);
    if (warp == 0 && lane < M) {
        double *to = c.token_sums + ((int64_t)blockIdx.x * M + lane) * 2;
        to[0] = dbias + s.dz[0][lane][0] + s.dz[1][lane][0];
        to[1] = dalpha + s.dz[0][lane][1] + s.dz[1][lane][1];
    }
}

/* ---- blocks ------------------------------------------------------------------------------------------- */

template <typename E, bool ADD_POST, bool ONE_PASS>
static __device__ __forceinline__ void backward(const mhc_mapped_call &p)
{
    shared_memory<ADD_POST, ONE_PASS> &s = *(shared_memory<ADD_POST, ONE_PASS> *)memory;
    const mhc_call &c = p.call;
    const int warp = threadIdx.x / 32;
    const int tiles = (int)((c.tokens + TILE - 1) / TILE);
    if (ONE_PASS && part_of<ONE_PASS>(c) >= parts_of<ONE_PASS>(c)) { /* spare block */
        const int team = threadIdx.x / TEAM;
        team_memory<SPARE_DEPTH> &team_state = ((team_memory<SPARE_DEPTH> *)memory)[team];
        make_records<E>(c, team_state, team, warp % TEAM_WARPS, tiles, nullptr);
        if (team == 0)
            sum_dz(c, team_state, warp, tiles);
        return;
    }
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < s.STAGES; stage++) {
            cot_mbarrier_init(&s.full[stage], 1);
            cot_mbarrier_init(&s.stage_done[stage], MMA_WARPS);
        }
        for (int i = 0; i < N; i++) {
            cot_mbarrier_init(&s.post_full[i], 1);
            cot_mbarrier_init(&s.post_empty[i], MMA_WARPS);
        }
        s.producer_tile = part_of<ONE_PASS>(c);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    if (warp < MMA_WARPS) {
        cot_setmaxnreg_inc<216>();
        multiply<E, ADD_POST, ONE_PASS>(c, s, tiles);
    } else {
        cot_setmaxnreg_dec<72>();
        if (warp == MMA_WARPS)
            produce<ONE_PASS>(p, s, tiles);
        else if constexpr (ONE_PASS) {
            make_records<E>(c, s.team, 0, warp - (MMA_WARPS + 1), tiles, &s.producer_tile);
            sum_dz(c, s.team, warp - (MMA_WARPS + 1), tiles);
        } else if constexpr (ADD_POST)
            if (warp == MMA_WARPS + 1)
                produce_dx_post(p, s, tiles);
    }
}

#define INSTANCE(name, element, add_post, one_pass)                       \
    extern "C" __global__ void __launch_bounds__(MHC_SM90_BWD_THREADS, 1) \
        mhc_pre_bwd_##name(const __grid_constant__ mhc_mapped_call p)     \
    {                                                                     \
        backward<element, add_post, one_pass>(p);                         \
    }
INSTANCE(split_sm90_f16, __half, false, false)
INSTANCE(split_sm90_bf16, __nv_bfloat16, false, false)
INSTANCE(split_post_sm90_f16, __half, true, false)
INSTANCE(split_post_sm90_bf16, __nv_bfloat16, true, false)
INSTANCE(one_pass_sm90_bf16, __nv_bfloat16, false, true)
