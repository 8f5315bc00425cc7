/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_cluster_sm90.cuh: pre backward in one pass over x and dh_in, for n = 2 and 4. The MMA warps and the
 * reducer of f16 and bf16 are in mhc_pre_bwd_cluster_sm90.cu, those of f32 in mhc_pre_bwd_f32_sm90.cu. This file has the
 * other roles.
 *
 * A token's *record* (mhc_token_record) has what the products of all blocks need: dh_mix as three terms, h_pre, and
 * factor (c of the formulas). It depends on dh_pre, which is a sum over all columns. So for each tile, every block
 * sends its part of dh_pre to the owner blocks of the tokens. Their owner warps send the records to every block.
 *
 * Tiles, blocks and owner blocks are the same as in mhc_pre_fwd_sm90.cu: a cluster has 16 blocks, or 8 for D up to
 * 2048, or 4 for D up to 1024. For a larger D, up to 7168, only the records and the gradients of the parameters are
 * computed (NO_DX), in wide blocks (wide_sizes). Block r is the owner block of the tokens r, r + BLOCKS, ... of each
 * tile. A tile of f32 has 8 tokens: half of the blocks of a cluster of 16 own none. With dh_res, mhc_pre_dz has already
 * stored dz in the workspace: it includes Sinkhorn's gradient. Each stage holds one tile. Roles:
 *
 *   producer     loads x and dh_in of the tile into shared memory (RECOMPUTES_Y: x and f of post, and dh_in). Later stores
 *                dx, which replaced x there
 *   8 MMA warps  32 columns of all streams each (n = 2: 64; wide blocks: half of the columns of one stream). RECOMPUTES_Y:
 *                they first replace x with y. f16, bf16: they then compute their part of dh_pre. When the tile's records
 *                have arrived, they add to dphi_part and compute dx
 *   reducer      f16, bf16: sums dh_pre over the warps. f32: computes dh_pre. It sends each token's sum to its owner
 *                block
 *   owner warp   makes the records of its tokens and sends them to all blocks: first what does not depend on dh_pre,
 *                then the rest, for which it sums dh_pre over the blocks. Also sums the terms of dbias and dalpha
 *   dx_post      loads dx_post, if present, one stream at a time. Its buffer replaces one stage. In f32 there is no
 *                room for a buffer: the MMA warps load dx_post from the L2 cache. Without dx_post this warp is a second
 *                owner warp, in f32 only in clusters of 4 blocks: one takes about as long for a tile as the MMA warps
 *
 *   barrier               arrivals             who waits     phase ends when
 *   full[stage]           1, the producer      MMA warps,    x and dh_in of the tile are in shared memory
 *                                              f32: reducer
 *   warp_dh_pre_full      32 of each MMA warp  reducer       f16, bf16: the warps' parts of dh_pre are in shared memory
 *   warp_dh_pre_empty     32, the reducer      MMA warps     f16, bf16: the reducer has read them
 *   dh_pre_read[stage]    32, the reducer      MMA warps     f32: the reducer has read x and dh_in of the tile
 *   phi_loaded            32 of each MMA warp  producer      the MMA warps have phi: the other stages may be loaded
 *   gathered_full[stage]  1, an owner warp     owner warps   all blocks' dh_pre of the owned tokens has arrived (bytes)
 *   records_full[slot]    1, MMA thread 0      MMA warps     the records of all tokens of the tile have arrived (bytes)
 *   stage_done[stage]     1 of each MMA warp   producer      the MMA warps have finished the stage (x holds dx, if dx
 *                                                            is an output)
 *   post_full[stream]     1, the dx_post warp  MMA warps     dx_post of the stream is in shared memory
 *   post_empty[stream]    1 of each MMA warp   dx_post warp  dx_post of the stream has been read
 *   coefficients_full[2]  32, the reducer      MMA warps     RECOMPUTES_Y: the coefficients of post of the tile are there
 *
 * A block stores into another block's memory without waiting for that block, as in the forward. The exchange of dh_pre
 * overlaps the products of an earlier tile. */
#ifndef COT_MHC_PRE_BWD_CLUSTER_SM90_CUH
#define COT_MHC_PRE_BWD_CLUSTER_SM90_CUH

#include "mhc_post_pre_sm90.cuh"
#include "mhc_pre_bwd_sm90.cuh"

enum { RECORD_UNITS = sizeof(token_record) / 16 };

/* Which terms of dx a kernel computes. NO_DX: for post_pre's backward, which needs only the records and the gradients
 * of the parameters. */
enum data_gradient { NO_DX, DX, DX_AND_POST };

/* Sizes: bwd_sizes or f32_sizes. With NO_DX, one more stage, or f, replaces the terms of phi gamma. */
template <typename Sizes, data_gradient MODE_, int BLOCKS_, bool RECOMPUTES_Y_ = false> struct cluster_traits : Sizes {
    typedef Sizes sizes;
    static constexpr data_gradient MODE = MODE_;
    /* Of post_pre with NO_DX: x of a stage is first the x of post. The MMA warps replace it with y, pre's x. */
    static constexpr bool RECOMPUTES_Y = RECOMPUTES_Y_, POST_PRE = RECOMPUTES_Y;
    static constexpr bool WIDE = (int)Sizes::BLOCK_COLUMNS > (int)MHC_SM90_COLUMNS_OF(Sizes::N);
    enum {
        BLOCKS = BLOCKS_, /* of a cluster */
        /* Tokens of a tile that a block owns: blocks from Sizes::TILE on own none. */
        OWNED = (int)Sizes::TILE < BLOCKS ? 1 : Sizes::TILE / BLOCKS,
        OWNERS = MHC_SM90_OWNERS(BLOCKS, MODE == DX_AND_POST || WIDE, Sizes::ELEMENT), /* owner warps of a block */
        /* Two owner warps share the tokens of a tile. If a block owns only one, they take turns: each has every second
         * tile. */
        TURNS = OWNED < OWNERS ? 2 : 1,
        OWNER_TOKENS = OWNED * TURNS / OWNERS, /* tokens of each owner warp */
        /* Units of a record that send_units sends after and before dh_pre, and the bytes that it sends for a tile. */
        UNITS_AFTER = 4,
        UNITS_BEFORE = Sizes::OCTETS == 1 ? 1 : RECORD_UNITS - UNITS_AFTER,
        SENT_BYTES = Sizes::TILE * 16 * (UNITS_AFTER + UNITS_BEFORE)
    };
};

/* Members that each source adds:
 *   phi_terms       terms of phi gamma in shared memory
 *   STAGES
 *   RECORD_SLOTS    tiles whose records are in shared memory, see make_owned_records
 *   POST_BUFFER     whether dx_post has a buffer in shared memory
 *   MMA_REGISTERS   registers of a thread of the MMA warps. 3 warpgroups: 65536 / 384 = 170, rounded down to a multiple
 *                   of 8: 168 each, 504 in all. The other warps have 504 - 2 MMA_REGISTERS */
template <typename Traits> struct shared_memory {
    typedef typename Traits::sizes sizes;
    enum { STAGES = Traits::STAGES, N = Traits::N, STREAM_BYTES = Traits::STREAM_BYTES };
    /* x [stream][chunk][token][128 bytes, swizzled], then dh_in likewise. */
    unsigned char stages[STAGES][Traits::STAGE_BYTES];
    /* Unused without POST_BUFFER: an array cannot have size 0. */
    unsigned char dx_post[Traits::POST_BUFFER ? N : 1][Traits::POST_BUFFER ? STREAM_BYTES : 1024];
    unsigned char f[Traits::RECOMPUTES_Y ? STAGES : 1][Traits::RECOMPUTES_Y ? STREAM_BYTES : 16]; /* of post */
    typename Traits::phi_terms phi;
    token_record records[Traits::RECORD_SLOTS][Traits::TILE], owned_records[Traits::OWNED * Traits::TURNS];
    float gathered[STAGES][Traits::OWNED][Traits::BLOCKS][4]; /* dh_pre, zero from element N on */
    float4 warp_dh_pre[MMA_WARPS][Traits::TILE];              /* likewise */
    /* RECOMPUTES_Y: of the tile and the next. Each token: the columns of h_res, then h_post. */
    post_column<Traits::N> post_coefficients[2][Traits::RECOMPUTES_Y ? Traits::TILE : 1][Traits::N + 1];
    uint64_t full[STAGES], gathered_full[STAGES], stage_done[STAGES], dh_pre_read[STAGES], warp_dh_pre_full,
        warp_dh_pre_empty;
    uint64_t records_full[Traits::RECORD_SLOTS], phi_loaded;
    uint64_t post_full[N], post_empty[N], coefficients_full[2];
};
extern __shared__ __align__(1024) unsigned char memory[];

#define FOR_EACH_TILE(tile, ring, count)                                \
    cot_pipeline_state<Traits::STAGES> ring;                            \
    for (int tile = (int)(blockIdx.x / Traits::BLOCKS); tile < (count); \
         tile += MHC_SM90_CLUSTERS_OF(Traits::BLOCKS), ring.next())

/* First column of an MMA warp in each stream. */
template <typename Traits> static __device__ __forceinline__ int64_t first_column(void)
{
    return cot_cluster_rank() * Traits::BLOCK_COLUMNS + Traits::first_column(threadIdx.x / 32);
}

/* ---- roles -------------------------------------------------------------------------------------------- */

/* Sends the block's dh_pre of a token of the tile to the token's owner block. */
template <typename Traits>
static __device__ __forceinline__ void send_dh_pre(shared_memory<Traits> &s, int stage, int rank, int token,
                                                   const float4 &dh_pre)
{
    const int owner_rank = token % Traits::BLOCKS, k = token / Traits::BLOCKS;
    cot_store_async(cot_mapa(cot_shared_address(s.gathered[stage][k][rank]), owner_rank),
                    cot_mapa(cot_shared_address(&s.gathered_full[stage]), owner_rank), __float_as_uint(dh_pre.x),
                    __float_as_uint(dh_pre.y), __float_as_uint(dh_pre.z), __float_as_uint(dh_pre.w));
}

/* Sends 16-byte units of an owner warp's records to all blocks. Units 0, 3, 6 (the first unit of each term) and 10
 * (factor) depend on dh_pre. AFTER_DH_PRE = true sends 0, 3, 6, 10; the earlier call, with false, sends the other seven
 * (n = 2: only 9). k counts the tokens that the block owns: token k of the block is token rank + k * BLOCKS of the
 * tile. first_k: the owner warp's first token, whose record is owned[0]. */
template <bool AFTER_DH_PRE, typename Traits>
static __device__ __forceinline__ void send_units(shared_memory<Traits> &s, int slot, int rank, int first_k,
                                                  const token_record *owned)
{
    constexpr uint32_t COUNT = AFTER_DH_PRE ? Traits::UNITS_AFTER : Traits::UNITS_BEFORE,
                       ITEMS = COUNT * Traits::OWNER_TOKENS * Traits::BLOCKS;
    const uint32_t to = cot_shared_address(&s.records[slot][rank + first_k * Traits::BLOCKS]),
                   barrier = cot_shared_address(&s.records_full[slot]);
    __syncwarp();
#pragma unroll AFTER_DH_PRE ? 2 : 1
    for (uint32_t item = threadIdx.x % 32; item < ITEMS; item += 32) {
        /* A copy is a record and the block that receives it. */
        const uint32_t copy = item / COUNT, index = item % COUNT;
        const uint32_t k = Traits::OWNER_TOKENS == 1 ? 0 : copy / Traits::BLOCKS,
                       block = Traits::OWNER_TOKENS == 1 ? copy : copy % Traits::BLOCKS;
        const uint32_t unit = AFTER_DH_PRE ? index * 3 + index / 3
                              : COUNT == 1 ? 9
                                           : index * 3 / 2 + 1 - index / 6; /* 0 3 6 10 : 9 : 1 2 4 5 7 8 9 */
        const uint4 words = ((const uint4 *)&owned[k])[unit];
        cot_store_async(cot_mapa(to + k * (uint32_t)(Traits::BLOCKS * sizeof(token_record)) + unit * 16, block),
                        cot_mapa(barrier, block), words.x, words.y, words.z, words.w);
    }
    __syncwarp();
}

static __device__ __forceinline__ void set_terms(token_record &record, int j, float dh_mix)
{
    dh_mix *= (float)MHC_CUDA_MIX_SCALE;
#pragma unroll
    for (int term = 0; term < TERMS; term++) {
        const __nv_bfloat16 value = __float2bfloat16_rn(dh_mix);
        record.terms[term][j] = __bfloat16_as_ushort(value);
        dh_mix -= __bfloat162float(value);
    }
}

/* Values of a token that a lane keeps until dh_pre arrives. The lane handles one coefficient of h_pre. post_res_sum:
 * the terms of factor from the coefficients of h_post and h_res. */
struct pending_token {
    float h_pre, h_mix, inv_rms, post_res_sum;
};

/* An owner warp. All blocks wait for its records. So the inputs of its tokens are loaded one tile ahead, and the units
 * that do not depend on dh_pre are computed and sent before dh_pre arrives. The slot of the records is then free in all
 * blocks: when the owner warp begins tile t of the cluster, it has dh_pre of tile t - TURNS from all blocks. A block whose
 * MMA warps compute dh_pre sends that only after they have finished tile t - TURNS - 2. With TURNS = 2 there are at least
 * 4 slots, otherwise at least 3. A block of the f32 kernel sends it as soon as the tile has been loaded, after the MMA
 * warps have finished the tile that used the stage before: tile t - 1 - STAGES. There are STAGES + 1 slots.
 *
 * With TURNS = 2, gathered_full of the tile before in the stage must be complete when the owner warp waits for tile t:
 * the other owner warp may have waited for it, and a parity does not tell phases apart that differ by 2. It is complete,
 * because that tile is t - 4 or t - 5, which the MMA warps have finished. */
template <typename Traits>
static __device__ __forceinline__ void make_owned_records(const mhc_call &c, shared_memory<Traits> &s, int owner_warp,
                                                          int rank, int tiles)
{
    constexpr int N = Traits::N, M = Traits::M, TOKENS = Traits::OWNER_TOKENS, TOKEN_LANES = 32 / TOKENS;
    constexpr int LANE_BLOCKS = TOKEN_LANES / N; /* blocks whose dh_pre the lanes of a token load at once */
    constexpr int CLUSTERS = MHC_SM90_CLUSTERS_OF(Traits::BLOCKS), STRIDE = Traits::TURNS * CLUSTERS;
    static_assert(Traits::TURNS == 1 || Traits::STAGES >= 4, "see above");
    const int lane = threadIdx.x % 32, first_k = Traits::TURNS == 2 ? 0 : owner_warp * TOKENS;
    token_record *const owned = &s.owned_records[owner_warp * TOKENS];
    const float alpha = lane < M ? load_f32(c.alpha, alpha_index(N, lane) * c.alpha.stride[0]) : 0.0f;
    const float alpha_pre = __shfl_sync(0xffffffffu, alpha, 0);
    double dbias = 0, dalpha = 0;         /* of coefficient `lane` of h_post and h_res */
    double dbias_pre = 0, dalpha_pre = 0; /* of coefficient lane % N of h_pre, over tokens lane / TOKEN_LANES */
    cot_griddepcontrol_wait();            /* waits for mhc_pre_dz, if it was launched */
    const token_element value = input_element<N>(c, lane);
    const bool second_turn = Traits::TURNS == 2 && owner_warp == 1;
    const int first_tile = (int)(blockIdx.x / Traits::BLOCKS) + (second_turn ? CLUSTERS : 0);
    token_inputs inputs[TOKENS];
    auto load_token = [&](int tile, int k) {
        inputs[k] = load_inputs<N>(c, value, (uint32_t)(tile * Traits::TILE + rank + (first_k + k) * Traits::BLOCKS));
    };
#pragma unroll
    for (int k = 0; k < TOKENS; k++)
        load_token(first_tile, k);
    cot_cluster_wait();
    cot_pipeline_state<Traits::STAGES> ring;
    cot_pipeline_state<Traits::RECORD_SLOTS> slot;
    if (second_turn)
        ring.next(), slot.next();
    for (int tile = first_tile; tile < tiles; tile += STRIDE) {
        const int record_slot = (int)Traits::RECORD_SLOTS == (int)Traits::STAGES ? ring.stage : slot.stage;
        pending_token pending = {};
#pragma unroll
        for (int k = 0; k < TOKENS; k++) {
            const token_inputs in = inputs[k];
            token_record &record = owned[k];
            float dz = lane < N ? 0.0f : in.value;
            if (!present(c.dh_res) && lane >= N && lane < 2 * N)
                dz *= in.h_post * (1.0f - in.h_post / c.post_scale);
            if (lane >= N && lane < M)
                set_terms(record, lane, alpha * dz * in.inv_rms);
            if (lane < N)
                record.h_pre[lane] = in.value;
            const pending_token token = {__shfl_sync(0xffffffffu, in.value, lane % N),
                                         __shfl_sync(0xffffffffu, in.h_mix, lane % N), in.inv_rms,
                                         sum_over_warp(alpha * dz * in.h_mix)};
            if (lane / TOKEN_LANES == k)
                pending = token;
            dbias += (double)dz;
            dalpha += (double)dz * (double)(in.h_mix * in.inv_rms);
            load_token(tile + STRIDE, k);
        }
        send_units<false>(s, record_slot, rank, first_k, owned);
        /* factor is this times the sum of du h_mix over all coefficients, where du is the gradient of h_mix inv_rms. */
        const float scale = -pending.inv_rms * pending.inv_rms * pending.inv_rms / (float)(N * c.D);
        const float sigma = pending.h_pre - c.hc_eps, slope = sigma * (1.0f - sigma);
        cot_mbarrier_wait(&s.gathered_full[ring.stage], ring.parity);
        __syncwarp();
        /* Re-arms for the stage's next tile. st.async of that tile may come first: the pending arrival keeps the phase
         * open. A second owner warp with tokens of the same tile cannot miss this phase: the next one cannot complete
         * before it has sent its records of this tile. */
        if ((Traits::TURNS == 2 || owner_warp == 0) && lane == 0)
            cot_mbarrier_arrive_expect(&s.gathered_full[ring.stage], sizeof s.gathered[0]);
        const float(*parts)[4] = s.gathered[ring.stage][first_k + lane / TOKEN_LANES];
        const int block = lane % TOKEN_LANES / N;
        float dh_pre = LANE_BLOCKS <= Traits::BLOCKS || block < Traits::BLOCKS ? parts[block][lane % N] : 0.0f;
        if (LANE_BLOCKS < Traits::BLOCKS)
            dh_pre += parts[block + LANE_BLOCKS][lane % N];
#pragma unroll
        for (int width = TOKEN_LANES / 2; width >= N; width /= 2)
            dh_pre += __shfl_xor_sync(0xffffffffu, dh_pre, width);
        const float dz_pre = dh_pre * slope, du = alpha_pre * dz_pre;
        float sum = du * pending.h_mix;
#pragma unroll
        for (int width = N / 2; width >= 1; width /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, width);
        token_record &record = owned[lane / TOKEN_LANES];
        if (lane % TOKEN_LANES < N)
            set_terms(record, lane % N, du * pending.inv_rms);
        if (lane % TOKEN_LANES == 0)
            record.factor = (sum + pending.post_res_sum) * scale;
        send_units<true>(s, record_slot, rank, first_k, owned);
#pragma unroll
        for (int turn = 0; turn < Traits::TURNS; turn++)
            ring.next(), slot.next();
        if (Traits::MODE == NO_DX) {
#pragma unroll
            for (int k = 0; k < TOKENS; k++)
                if (lane < RECORD_UNITS)
                    ((uint4 *)&c.records[tile * Traits::TILE + rank + (first_k + k) * Traits::BLOCKS])[lane] =
                        ((const uint4 *)&owned[k])[lane];
            __syncwarp(); /* the next tile replaces owned_records */
        }
        dbias_pre += (double)dz_pre;
        dalpha_pre += (double)dz_pre * (double)(pending.h_mix * pending.inv_rms);
    }
    double sums[2] = {dbias_pre, dalpha_pre};
#pragma unroll
    for (int k = 1; k < TOKENS; k++) {
        sums[0] += __shfl_down_sync(0xffffffffu, dbias_pre, k * TOKEN_LANES);
        sums[1] += __shfl_down_sync(0xffffffffu, dalpha_pre, k * TOKEN_LANES);
    }
    if (lane < M) {
        double *to = c.token_sums + (((int64_t)blockIdx.x * Traits::OWNERS + owner_warp) * M + lane) * 2;
        to[0] = lane < N ? sums[0] : dbias;
        to[1] = lane < N ? sums[1] : dalpha;
    }
}

/* Call: mhc_mapped_call or mhc_post_pre_records_call. */
template <typename Traits, typename Call>
static __device__ __forceinline__ void load_tile(const Call &p, shared_memory<Traits> &s, int stage, int tile, int rank)
{
    const int token = tile * Traits::TILE, chunk = rank * Traits::CHUNKS;
    cot_mbarrier_arrive_expect(&s.full[stage], Traits::STAGE_BYTES + (Traits::RECOMPUTES_Y ? Traits::STREAM_BYTES : 0));
    if constexpr (Traits::RECOMPUTES_Y)
        cot_tma_load_4d(s.f[stage], &p.f, 0, token, chunk, 0, &s.full[stage]);
    cot_tma_load_4d(s.stages[stage], &p.x, 0, token, chunk, 0, &s.full[stage]);
    cot_tma_load_4d(s.stages[stage] + Traits::X_BYTES, &p.dh_in, 0, token, chunk, 0, &s.full[stage]);
    if constexpr (Traits::MODE == DX_AND_POST && !Traits::POST_BUFFER)
        for (int i = 0; i < Traits::N; i++)
            cot_tma_prefetch_4d(&p.dx_post, 0, token, chunk, i);
}

template <typename Traits, typename Call>
static __device__ __forceinline__ void produce(const Call &p, shared_memory<Traits> &s, int rank, int tiles)
{
    cot_cluster_wait();
    if (threadIdx.x % 32 == 0) {
        constexpr int CLUSTERS = MHC_SM90_CLUSTERS_OF(Traits::BLOCKS);
        const int first = (int)(blockIdx.x / Traits::BLOCKS);
        /* The first products need two tiles and phi. With all stages loaded at once, phi would arrive after them. */
        for (int stage = 0; stage < s.STAGES && first + stage * CLUSTERS < tiles; stage++) {
            if (Traits::MODE != NO_DX && stage == 2)
                cot_mbarrier_wait(&s.phi_loaded, 0);
            load_tile(p, s, stage, first + stage * CLUSTERS, rank);
        }
        FOR_EACH_TILE(tile, ring, tiles)
        {
            cot_mbarrier_wait(&s.stage_done[ring.stage], ring.parity);
            if constexpr (Traits::MODE != NO_DX)
                if (present(p.call.dx)) {
                    cot_tma_store_4d(&p.dx, 0, tile * Traits::TILE, rank * Traits::CHUNKS, 0, s.stages[ring.stage]);
                    cot_bulk_commit();
                    cot_bulk_wait_read();
                }
            if (tile + s.STAGES * CLUSTERS < tiles)
                load_tile(p, s, ring.stage, tile + s.STAGES * CLUSTERS, rank);
        }
        cot_bulk_wait();
    }
    __syncwarp();
}

/* Loads each stream of dx_post as soon as the MMA warps have read that stream of the previous tile. */
template <typename Traits>
static __device__ __forceinline__ void produce_dx_post(const mhc_mapped_call &p, shared_memory<Traits> &s, int rank,
                                                       int tiles)
{
    cot_cluster_wait();
    if (threadIdx.x % 32 == 0) {
        uint32_t parity = 1;
        FOR_EACH_TILE(tile, ring, tiles)
        {
            for (int i = 0; i < s.N; i++) {
                cot_mbarrier_wait(&s.post_empty[i], parity);
                cot_mbarrier_arrive_expect(&s.post_full[i], Traits::STREAM_BYTES);
                cot_tma_load_4d(s.dx_post[i], &p.dx_post, 0, tile * Traits::TILE, rank * Traits::CHUNKS, i,
                                &s.post_full[i]);
            }
            parity ^= 1;
        }
    }
    __syncwarp();
}

template <typename Traits, typename Call> static __device__ __forceinline__ void backward(const Call &p)
{
    static_assert(sizeof(shared_memory<Traits>) <= MHC_SM90_SHARED_BYTES, "must fit in a block's shared memory");
    constexpr int OTHER_REGISTERS = 504 - 2 * Traits::MMA_REGISTERS;
    shared_memory<Traits> &s = *(shared_memory<Traits> *)memory;
    const mhc_call &c = p.call;
    const int rank = (int)cot_cluster_rank(), warp = threadIdx.x / 32;
    const int tiles = (int)((c.tokens + Traits::TILE - 1) / Traits::TILE);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < s.STAGES; stage++) {
            cot_mbarrier_init(&s.full[stage], 1);
            cot_mbarrier_init(&s.gathered_full[stage], 1);
            cot_mbarrier_init(&s.stage_done[stage], MMA_WARPS);
            cot_mbarrier_init(&s.dh_pre_read[stage], 32);
            cot_mbarrier_arrive_expect(&s.gathered_full[stage], sizeof s.gathered[0]);
        }
        for (int slot = 0; slot < Traits::RECORD_SLOTS; slot++) {
            cot_mbarrier_init(&s.records_full[slot], 1);
            cot_mbarrier_arrive_expect(&s.records_full[slot], Traits::SENT_BYTES);
        }
        cot_mbarrier_init(&s.phi_loaded, 32 * MMA_WARPS);
        cot_mbarrier_init(&s.warp_dh_pre_full, 32 * MMA_WARPS);
        cot_mbarrier_init(&s.warp_dh_pre_empty, 32);
        for (int i = 0; i < s.N; i++) {
            cot_mbarrier_init(&s.post_full[i], 1);
            cot_mbarrier_init(&s.post_empty[i], MMA_WARPS);
        }
        for (int buffer = 0; buffer < 2; buffer++)
            cot_mbarrier_init(&s.coefficients_full[buffer], 32);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    cot_cluster_arrive(); /* each role waits before its first store to another block */
    if (warp < MMA_WARPS) {
        cot_setmaxnreg_inc<Traits::MMA_REGISTERS>();
        multiply(c, s, tiles);
    } else {
        cot_setmaxnreg_dec<OTHER_REGISTERS>();
        const int owned_tiles = (int)Traits::TILE < (int)Traits::BLOCKS && rank >= Traits::TILE ? 0 : tiles;
        if (warp == MMA_WARPS)
            reduce(p, s, rank, tiles);
        else if (warp == MMA_WARPS + 1)
            make_owned_records(c, s, 0, rank, owned_tiles);
        else if (warp == MMA_WARPS + 2)
            produce(p, s, rank, tiles);
        else if constexpr (Traits::POST_BUFFER)
            produce_dx_post(p, s, rank, tiles);
        else if constexpr (Traits::OWNERS == 2)
            make_owned_records(c, s, 1, rank, owned_tiles);
        else
            cot_cluster_wait();
    }
    cot_cluster_arrive(); /* no block exits while another block may still write to its shared memory */
    cot_cluster_wait();
}

#endif
