/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_wide_sm90.cu: the wide kernel, the backward on Hopper for d or d_v above 128. The formulas are in
 * attention_bwd_key_blocks_sm90.cu. dK of 64 keys and dV of 64 keys each need most registers of a warpgroup. A thread
 * block therefore takes 64 keys, and the two thread blocks of a cluster share a key block of 128 keys. In this file
 * *block* is a thread block, and the *peer* is the other block of the cluster. Both blocks loop over the same tiles of
 * 64 queries. The dQ of a tile needs the dS of both blocks. The blocks divide dQ by tiles or by columns:
 *
 *   by tiles     d and d_v up to 192. In step j, block j % 2 computes all columns of dQ, and the other block sends its
 *                dS. So a block has the time of two steps for the dQ of a tile. It holds all columns of the peer's K.
 *   by columns   d or d_v above 192, where shared memory cannot hold all columns of the peer's K. In every step, each
 *                block sends its dS and computes half of the columns of dQ.
 *
 *   warpgroup 0   dQ. By columns, it also sends dS to the peer
 *   warpgroup 1   S, P and dV. P^T is the register operand of dV. P also goes to warpgroup 2, through the buffer of dS
 *                 in shared memory
 *   warpgroup 2   dP, dS and dK. dS^T is the register operand of dK. dS also goes to warpgroup 0 and to the peer,
 *                 through shared memory, where it replaces P
 *   warpgroup 3   warp 0: producer, loads K and Q. By tiles, it also loads V and dO
 *                 warp 1: by tiles, the sender: sends dS to the peer. By columns, a producer: loads V and dO
 *                 warps 2 and 3: a dq_writer each. One adds the dQ tiles (64 queries, 64 columns) of even index to
 *                 memory, the other those of odd index
 *
 *   barrier         arrivals (bytes)              phase ends when                 who waits
 *   k full          1 (K, the peer's K)           K and the peer's K are loaded   warpgroups 0, 1: once
 *   v full          1 (V)                         V is loaded                     warpgroup 2: once
 *   q full          1 (Q, lse_log2)               a tile of Q is loaded           warpgroups 1, 2
 *   q empty         8: 4 after P, 4 after dK      Q and lse_log2 have been read   producer
 *   dout full       1 (a chunk; delta)            a chunk of dO is loaded         warpgroups 1, 2
 *   dout empty      8: 4 after dV, 4 after dP     the chunk has been read         producer
 *   p full          4 of warpgroup 1              P is stored                     warpgroup 2: warp i reads P of
 *                                                                                 warp i of warpgroup 1
 *   ds full         4 of warpgroup 2              dS is stored                    warpgroup 0, sender
 *   ds empty        by tiles: 4 of warpgroup 0    no product reads dS, and the    warpgroup 1
 *                   if this block computes the    peer has its copy, if it needs
 *                   dQ of the step, else 1 of     one
 *                   the peer. By columns: both, 5
 *   peer ds full    1 (dS)                        the peer's dS has arrived       warpgroup 0
 *   sent ds empty   4 of the peer's warpgroup 0   the peer has read the dS that   sender; by columns warpgroup 0
 *                                                 this block sent to it
 *   dq full         4 of warpgroup 0              a dQ tile is staged             the dQ tile's dq_writer
 *   dq ready        1, the dq_writer              the stage of dQ is free         warpgroup 0
 *   uncleared full  1 (the tile)                  a tile to clear is loaded       the warp that loads it
 *
 * P reaches warpgroup 2 in 16 bits with more precision than E, so that the P in dS is not rounded twice (see saved_p in
 * attention_bwd_consumer_sm90.cuh, and encode_p). The order of key blocks, the deterministic mode, the tiles to clear,
 * and the specialised, _general and _softcap versions are those of attention_bwd_key_blocks_sm90.cu. */
#include "attention_bwd_common_sm90.cuh"

#include "../../../cuda/device/mma.cuh"

static constexpr float P_EXPONENT = 4.0f, INVERSE_P_SCALE = 0x1p-4f; /* P is 2^4 times as large */

enum { QUERIES = 64, THREAD_BLOCK_KEYS = KEYS / ATTENTION_BWD_WIDE_KEY_SPLIT };

/* Shared memory of a thread block. COLUMNS: of Q and K. V_COLUMNS: of V and dO. */
template <int COLUMNS, int V_COLUMNS> struct wide_shared {
    enum {
        COLUMN_PANELS = COLUMNS / 64,
        V_PANELS = V_COLUMNS / 64,
        BY_TILES = COLUMNS <= 192,
        Q_STAGES = 2,
        TILE_CHUNKS = BY_TILES ? 1 : 2, /* a tile of dO is loaded in this many chunks of columns */
        DOUT_STAGES = BY_TILES ? 2 : 3, /* each holds one chunk */
        CHUNK_PANELS = V_PANELS / TILE_CHUNKS,
        DK_PRODUCTS = BY_TILES ? 1 : 2, /* products that compute dK, each for its share of the columns */
        DS_STAGES = BY_TILES ? 2 : 1,
        PEER_PANELS = BY_TILES ? COLUMN_PANELS : COLUMN_PANELS / 2,
        DQ_STAGES = BY_TILES ? 2 : 1,
        OWN_DQ_TILES = PEER_PANELS, /* dQ tiles that a block computes in a step */
        PRODUCER_REGISTERS = BY_TILES ? 40 : 32,
        DQ_REGISTERS = BY_TILES ? 104 : 64,
        CONSUMER_REGISTERS = BY_TILES ? 184 : 208, /* DQ + 2 * CONSUMER + PRODUCER = 4 * 128, as at launch */
    };
    unsigned char k[COLUMN_PANELS][TILE_64X64_BYTES], peer_k[PEER_PANELS][TILE_64X64_BYTES],
        v[V_PANELS][TILE_64X64_BYTES];
    unsigned char q[Q_STAGES][COLUMN_PANELS][TILE_64X64_BYTES];
    unsigned char dout[DOUT_STAGES][CHUNK_PANELS][TILE_64X64_BYTES];
    unsigned char ds[DS_STAGES][TILE_64X64_BYTES], peer_ds[TILE_64X64_BYTES]; /* [query][key]; the peer sends peer_ds */
    float dq[DQ_STAGES][ATTENTION_BWD_DQ_TILE_FLOATS];
    float lse_log2[Q_STAGES][QUERIES], delta[2][QUERIES];
    uint32_t low_bits[DS_STAGES][WARPGROUP]; /* if E is f16: the lowest bits of P, see encode_p; 16-byte aligned */
    uint64_t k_full, v_full, q_full[Q_STAGES], q_empty[Q_STAGES], dout_full[DOUT_STAGES], dout_empty[DOUT_STAGES];
    uint64_t p_full[DS_STAGES], ds_full[DS_STAGES], ds_empty[DS_STAGES], peer_ds_full, sent_ds_empty;
    uint64_t dq_full[2], dq_ready[DQ_STAGES], uncleared_full[2];
    union {
        attention_work work;   /* GENERAL: for warpgroup 3, which has too few registers for a copy */
        cluster_ticket ticket; /* used only until `work` is written */
    };
};

/* Waits until TMA has loaded a tile, clears its rows from `row` on (those of other sequences), and arrives on `full`
 * unless it is null. Executed by a warp. */
template <int PANELS>
static __device__ __forceinline__ void wait_and_clear(uint64_t *uncleared_full, uint32_t &parity,
                                                      unsigned char (*panels)[TILE_64X64_BYTES], int row,
                                                      uint64_t *full)
{
    cot_mbarrier_wait(uncleared_full, parity);
    parity ^= 1;
    attention_clear_rows<TILE_64X64_BYTES, PANELS>(panels, max(row, 0));
    if (full != nullptr && threadIdx.x % WARP == 0)
        cot_mbarrier_arrive(full);
}

/* The 64 keys of a thread block, as rows of K and V. TMA fills rows after the tensor's last row with zeros. */
struct key_rows {
    int row;    /* the first row */
    int used;   /* how many of the rows belong to the sequence; may be negative */
    bool clean; /* no row needs clearing */
};

template <bool GENERAL>
static __device__ __forceinline__ key_rows key_rows_of(const attention_bwd_call &c, const attention_work &w, int rank)
{
    const int first_key = w.first_key + THREAD_BLOCK_KEYS * rank;
    if (!GENERAL)
        return {first_key, THREAD_BLOCK_KEYS, true};
    return {w.k_first_row + first_key, w.used_k - first_key,
            first_key + THREAD_BLOCK_KEYS <= w.used_k || w.k_first_row + w.used_k == c.sequences.rows_k};
}

/* The first query tile that contains rows of another sequence; INT32_MAX if there is none. */
template <bool GENERAL>
static __device__ __forceinline__ int first_unclean_tile_of(const attention_bwd_call &c, const attention_work &w)
{
    return !GENERAL || w.q_first_row + w.used_q == c.sequences.rows_q ? INT32_MAX : w.used_q / QUERIES;
}

/* A producer. LOADS_Q: loads K, the peer's K, Q and lse_log2. LOADS_DOUT: loads V, dO and delta. Executed by one
 * thread, or if GENERAL by a warp, which clears rows of other sequences. */
template <int COLUMNS, int V_COLUMNS, bool GENERAL, bool LOADS_Q, bool LOADS_DOUT>
static __device__ void load_tiles(const attention_bwd_mapped_call &mapped, wide_shared<COLUMNS, V_COLUMNS> &s,
                                  const attention_work &w, int rank)
{
    using S = wide_shared<COLUMNS, V_COLUMNS>;
    const attention_bwd_call &c = mapped.call;
    const bool leader = threadIdx.x % WARP == 0;
    uint64_t *uncleared_full = &s.uncleared_full[LOADS_Q ? 0 : 1];
    uint32_t uncleared_parity = 0;
    const key_rows keys = key_rows_of<GENERAL>(c, w, rank);
    if (LOADS_Q) {
        const key_rows peer_keys = key_rows_of<GENERAL>(c, w, rank ^ 1);
        const bool clean = keys.clean && peer_keys.clean;
        if (leader) {
            uint64_t *full = clean ? &s.k_full : uncleared_full;
            const int peer_column = S::BY_TILES ? 0 : rank * (COLUMNS / 2);
            cot_mbarrier_arrive_expect(full, (S::COLUMN_PANELS + S::PEER_PANELS) * TILE_64X64_BYTES);
            for (int panel = 0; panel < S::COLUMN_PANELS; panel++)
                cot_tma_load_4d(s.k[panel], &mapped.k, panel * 64, keys.row, w.kv_head, w.b, full);
            for (int panel = 0; panel < S::PEER_PANELS; panel++)
                cot_tma_load_4d(s.peer_k[panel], &mapped.k, peer_column + panel * 64, peer_keys.row, w.kv_head, w.b,
                                full);
        }
        if (!clean) {
            wait_and_clear<S::COLUMN_PANELS>(uncleared_full, uncleared_parity, s.k, keys.used, nullptr);
            attention_clear_rows<TILE_64X64_BYTES, S::PEER_PANELS>(s.peer_k, max(peer_keys.used, 0));
            if (leader)
                cot_mbarrier_arrive(&s.k_full);
        }
    }
    if (LOADS_DOUT) {
        if (leader) {
            uint64_t *full = keys.clean ? &s.v_full : uncleared_full;
            cot_mbarrier_arrive_expect(full, S::V_PANELS * TILE_64X64_BYTES);
            for (int panel = 0; panel < S::V_PANELS; panel++)
                cot_tma_load_4d(s.v[panel], &mapped.v, panel * 64, keys.row, w.kv_head, w.b, full);
        }
        if (!keys.clean)
            wait_and_clear<S::V_PANELS>(uncleared_full, uncleared_parity, s.v, keys.used, &s.v_full);
    }
    if (!GENERAL) { /* GENERAL: backward_wide has waited */
        cot_griddepcontrol_wait();
        cot_fence_proxy_async_global();
    }
    const int first_delta_row = (int)(c.scaled_delta - c.lse_log2) / QUERIES; /* delta follows all rows of lse_log2 */
    const int first_unclean_tile = first_unclean_tile_of<GENERAL>(c, w);
    cot_pipeline_state<S::Q_STAGES> q;
    cot_pipeline_state<S::DOUT_STAGES> chunk;
    uint32_t delta_stage = 0;
    int tile = w.first_tile;
    for (int i = 0; i < w.tile_count; i++, tile += w.tile_direction) {
        const bool clean = tile < first_unclean_tile;
        for (int head_in_group = 0; head_in_group < w.query_heads; head_in_group++) {
            if (GENERAL) /* as in load_tiles_general of the key-block kernel */
                __syncwarp();
            /* The row of lse_log2, or without LOADS_Q the row of delta. At 256 columns, an addition of first_delta_row
             * where the row of delta is used would spill registers. */
            const int statistics_row =
                (LOADS_Q ? 0 : first_delta_row) + (int)query_tile_base_of<GENERAL>(c, w, head_in_group);
            if (LOADS_Q) {
                uint64_t *full = clean ? &s.q_full[q.stage] : uncleared_full;
                cot_mbarrier_wait(&s.q_empty[q.stage], q.parity ^ 1);
                if (leader) {
                    cot_mbarrier_arrive_expect(full, S::COLUMN_PANELS * TILE_64X64_BYTES + QUERIES * sizeof(float));
                    for (int panel = 0; panel < S::COLUMN_PANELS; panel++)
                        cot_tma_load_4d(s.q[q.stage][panel], &mapped.q, panel * 64,
                                        (GENERAL ? w.q_first_row : 0) + tile * QUERIES, w.first_head + head_in_group,
                                        w.b, full);
                    cot_tma_load_4d(s.lse_log2[q.stage], &mapped.statistics, 0, statistics_row + tile, 0, 0, full);
                }
                if (!clean)
                    wait_and_clear<S::COLUMN_PANELS>(uncleared_full, uncleared_parity, s.q[q.stage],
                                                     w.used_q - tile * QUERIES, &s.q_full[q.stage]);
                q.next();
            }
            for (int index = 0; LOADS_DOUT && index < S::TILE_CHUNKS; index++, chunk.next()) {
                uint64_t *full = clean ? &s.dout_full[chunk.stage] : uncleared_full;
                cot_mbarrier_wait(&s.dout_empty[chunk.stage], chunk.parity ^ 1);
                if (leader) {
                    const uint32_t bytes = S::CHUNK_PANELS * TILE_64X64_BYTES;
                    cot_mbarrier_arrive_expect(full, index == 0 ? bytes + QUERIES * sizeof(float) : bytes);
                    for (int panel = 0; panel < S::CHUNK_PANELS; panel++)
                        cot_tma_load_4d(
                            s.dout[chunk.stage][panel], &mapped.dout, (S::CHUNK_PANELS * index + panel) * 64,
                            (GENERAL ? w.q_first_row : 0) + tile * QUERIES, w.first_head + head_in_group, w.b, full);
                    if (index == 0)
                        cot_tma_load_4d(s.delta[delta_stage], &mapped.statistics, 0,
                                        (LOADS_Q ? first_delta_row : 0) + statistics_row + tile, 0, 0, full);
                }
                if (!clean)
                    wait_and_clear<S::CHUNK_PANELS>(uncleared_full, uncleared_parity, s.dout[chunk.stage],
                                                    w.used_q - tile * QUERIES, &s.dout_full[chunk.stage]);
            }
            delta_stage ^= 1;
        }
    }
}

/* A dq_writer: adds dQ tiles writer, writer + 2, ... of this block to memory.
 *   own_dq_tile       number of the dQ tile among those that the block computes, over all steps
 *   dq_tile_in_step   number of the dQ tile in its step: its 64 columns
 *   accum_dq_tile     index of the dQ tile in dq_accum */
template <int COLUMNS, int V_COLUMNS, bool GENERAL, bool DETERMINISTIC>
static __device__ void write_dq(const attention_bwd_call &c, wide_shared<COLUMNS, V_COLUMNS> &s,
                                const attention_work &w, int rank, int writer)
{
    using S = wide_shared<COLUMNS, V_COLUMNS>;
    const int steps = step_count(w);
    /* The steps in which this block computes dQ. By tiles these are steps rank, rank + 2, ... */
    const int own_steps = S::BY_TILES ? (steps + 1 - rank) / 2 : steps;
    uint32_t parity = 0;
    cot_griddepcontrol_wait(); /* until dq_accum is cleared */
    cot_fence_proxy_async_global();
    for (int own_dq_tile = writer; own_dq_tile < own_steps * S::OWN_DQ_TILES; own_dq_tile += 2, parity ^= 1) {
        const int step = S::BY_TILES ? 2 * (own_dq_tile / S::OWN_DQ_TILES) + rank : own_dq_tile / S::OWN_DQ_TILES;
        const int dq_tile_in_step = own_dq_tile % S::OWN_DQ_TILES + (S::BY_TILES ? 0 : rank * S::OWN_DQ_TILES);
        const attention_step step_info = step_of(c, w, step);
        const int64_t accum_dq_tile =
            (query_tile_base_of<GENERAL>(c, w, step_info.head_in_group) + step_info.tile) * S::COLUMN_PANELS +
            dq_tile_in_step;
        const uint32_t earlier_units = DETERMINISTIC
                                           ? dq_position_of<QUERIES, GENERAL>(c, w, step_info.tile).earlier_units
                                           : NOT_FIRST_NOT_FINAL.earlier_units;
        if (DETERMINISTIC && earlier_units > 0)
            wait_for_earlier_units(c, accum_dq_tile, earlier_units);
        cot_mbarrier_wait(&s.dq_full[writer], parity);
        add_dq_tile(c, accum_dq_tile, s.dq[own_dq_tile % S::DQ_STAGES], earlier_units == 0);
        cot_mbarrier_arrive(&s.dq_ready[own_dq_tile % S::DQ_STAGES]);
        if (DETERMINISTIC)
            release_next_unit(c, accum_dq_tile);
    }
    cot_bulk_wait();
}

/* Issues acc = dS K, or if `accumulate` acc += dS K, over 64 keys. ds is [query][key]. k are the panels of K with the
 * columns of acc. */
template <typename E, int N>
static __device__ __forceinline__ void issue_dq(float (&acc)[N], const unsigned char *ds, const unsigned char *k,
                                                bool accumulate)
{
    const uint64_t a_desc = cot_wgmma_k_major(cot_shared_address(ds)),
                   b_desc = cot_wgmma_mn_major(cot_shared_address(k), TILE_64X64_BYTES);
    cot_wgmma_fence();
#pragma unroll
    for (int k_step = 0; k_step < 4; k_step++)
        cot_wgmma<E, false, true>(acc, a_desc + k_step * COT_WGMMA_K_STEP, b_desc + k_step * COT_WGMMA_MN_STEP,
                                  accumulate || k_step > 0);
    cot_wgmma_commit();
}

/* Addresses in the peer's shared memory. ds: its buffer peer_ds, to which this block sends. */
struct peer_addresses {
    uint32_t ds, ds_full, sent_ds_empty, ds_empty;
};

template <int COLUMNS, int V_COLUMNS>
static __device__ __forceinline__ peer_addresses peer_addresses_of(wide_shared<COLUMNS, V_COLUMNS> &s, int rank)
{
    using S = wide_shared<COLUMNS, V_COLUMNS>;
    /* The stage of dS that the peer sends to this block. By tiles, step j uses stage j % 2, so it is that of the steps
     * in which this block computes dQ. */
    const int own_stage = S::DS_STAGES == 1 ? 0 : rank;
    return {cot_mapa(cot_shared_address(s.peer_ds), rank ^ 1), cot_mapa(cot_shared_address(&s.peer_ds_full), rank ^ 1),
            cot_mapa(cot_shared_address(&s.sent_ds_empty), rank ^ 1),
            cot_mapa(cot_shared_address(&s.ds_empty[own_stage]), rank ^ 1)};
}

/* The sender, by tiles: sends dS to the peer in the steps in which the peer computes dQ. Executed by one thread. If
 * warpgroup 0 sent between its own steps, each block would wait until the other has computed the dQ of a tile. */
template <int COLUMNS, int V_COLUMNS>
static __device__ void send_ds(wide_shared<COLUMNS, V_COLUMNS> &s, const attention_work &w, int rank)
{
    const peer_addresses peer = peer_addresses_of(s, rank);
    const int stage = rank ^ 1;
    uint32_t parity = 0;
    for (int step = rank ^ 1; step < step_count(w); step += 2, parity ^= 1) {
        cot_mbarrier_wait(&s.ds_full[stage], parity);
        cot_mbarrier_wait(&s.sent_ds_empty, parity ^ 1);
        cot_bulk_copy_to_block(peer.ds, cot_shared_address(s.ds[stage]), TILE_64X64_BYTES, peer.ds_full);
    }
}

/* Warpgroup 0, by tiles. The three dQ tiles of a step are two products: one of 128 columns, whose registers are then
 * free for one of 64. */
template <typename E, int COLUMNS, int V_COLUMNS>
static __device__ void compute_dq_by_tiles(wide_shared<COLUMNS, V_COLUMNS> &s, const attention_work &w, int rank)
{
    using S = wide_shared<COLUMNS, V_COLUMNS>;
    static_assert(COLUMNS == 192 && S::DQ_STAGES == 2 && S::DS_STAGES == 2, "three dQ tiles, as computed below");
    const int lane = threadIdx.x % WARP;
    const bool leader = threadIdx.x % WARPGROUP == 0;
    const peer_addresses peer = peer_addresses_of(s, rank);
    const int steps = step_count(w), stage = rank; /* stage: of dS, in the steps in which this block computes dQ */
    uint32_t staged_dq_tiles = 0, parity = 0;      /* staged_dq_tiles: the number of dQ tiles staged so far */
    const auto wait_dq_ready = [&](uint32_t index) { cot_mbarrier_wait(&s.dq_ready[index % 2], index / 2 & 1 ^ 1); };
    cot_mbarrier_wait(&s.k_full, 0);
    for (int step = rank; step < steps; step += 2, parity ^= 1) {
        cot_mbarrier_wait(&s.ds_full[stage], parity);
        if (leader)
            cot_mbarrier_arrive_expect(&s.peer_ds_full, TILE_64X64_BYTES);
        __syncwarp();
        {
            float acc[64];
            issue_dq<E>(acc, s.ds[stage], s.k[0], /*accumulate=*/false);
            cot_mbarrier_wait(&s.peer_ds_full, parity);
            if (leader)
                cot_mbarrier_arrive_remote(peer.ds_empty);
            __syncwarp();
            issue_dq<E>(acc, s.peer_ds, s.peer_k[0], /*accumulate=*/true);
            wait_dq_ready(staged_dq_tiles);
            cot_wgmma_wait<0>();
            float dq_tiles[2][32];
#pragma unroll
            for (int i = 0; i < 64; i++)
                dq_tiles[i / 32][i % 32] = acc[i];
            stage_dq_tile(s.dq[staged_dq_tiles % 2], dq_tiles[0], &s.dq_full[staged_dq_tiles % 2]);
            staged_dq_tiles++;
            wait_dq_ready(staged_dq_tiles);
            stage_dq_tile(s.dq[staged_dq_tiles % 2], dq_tiles[1], &s.dq_full[staged_dq_tiles % 2]);
            staged_dq_tiles++;
        }
        float acc[32];
        issue_dq<E>(acc, s.ds[stage], s.k[2], /*accumulate=*/false);
        issue_dq<E>(acc, s.peer_ds, s.peer_k[2], /*accumulate=*/true);
        wait_dq_ready(staged_dq_tiles);
        cot_wgmma_wait<0>();
        if (lane == 0) {
            cot_mbarrier_arrive(&s.ds_empty[stage]);
            cot_mbarrier_arrive_remote(peer.sent_ds_empty);
        }
        stage_dq_tile(s.dq[staged_dq_tiles % 2], acc, &s.dq_full[staged_dq_tiles % 2]);
        staged_dq_tiles++;
    }
}

/* Warpgroup 0, by columns. It also sends dS to the peer. */
template <typename E, int COLUMNS, int V_COLUMNS>
static __device__ void compute_dq_by_columns(wide_shared<COLUMNS, V_COLUMNS> &s, const attention_work &w, int rank)
{
    const int lane = threadIdx.x % WARP;
    const peer_addresses peer = peer_addresses_of(s, rank);
    float acc[32];
    uint32_t parity = 0;
    cot_mbarrier_wait(&s.k_full, 0);
    for (int steps_left = step_count(w); steps_left > 0; steps_left--, parity ^= 1) {
        cot_mbarrier_wait(&s.ds_full[0], parity);
        if (threadIdx.x % WARPGROUP == 0) {
            cot_mbarrier_arrive_expect(&s.peer_ds_full, TILE_64X64_BYTES);
            cot_mbarrier_wait(&s.sent_ds_empty, parity ^ 1);
            cot_bulk_copy_to_block(peer.ds, cot_shared_address(s.ds[0]), TILE_64X64_BYTES, peer.ds_full);
        }
        __syncwarp();
#pragma unroll
        for (int dq_tile = 0; dq_tile < 2; dq_tile++) {
            issue_dq<E>(acc, s.ds[0], s.k[2 * rank + dq_tile], /*accumulate=*/false);
            if (dq_tile == 0) {
                cot_mbarrier_wait(&s.peer_ds_full, parity);
                if (threadIdx.x % WARPGROUP == 0)
                    cot_mbarrier_arrive_remote(peer.ds_empty);
                __syncwarp();
            }
            issue_dq<E>(acc, s.peer_ds, s.peer_k[dq_tile], /*accumulate=*/true);
            cot_mbarrier_wait(&s.dq_ready[0], dq_tile ^ 1);
            cot_wgmma_wait<0>();
            if (dq_tile == 1 && lane == 0) {
                cot_mbarrier_arrive(&s.ds_empty[0]);
                cot_mbarrier_arrive_remote(peer.sent_ds_empty);
            }
            stage_dq_tile(s.dq[0], acc, &s.dq_full[dq_tile]);
        }
    }
}

/* Elements 2i and 2i + 1 of 2^4 P in one word: warpgroup 1 encodes them, warpgroup 2 decodes them.
 *   E = bf16   as f16: 8 times finer than bf16 for P >= 2^-18
 *   E = f16    17 bits without a sign, 5 of exponent and 12 of mantissa: 4 times finer than f16, also for P >= 2^-18.
 *              The lowest bits of a thread's 32 elements are one word, low_bits. (With 11 bits of mantissa the norm of
 *              the error was up to 1.03 of its bound.)
 * Both hold P up to 4095, in case lse is not that of the forward. Beyond that, dV is infinite. */
/* Times this, the exponent of a float32 fits in the lowest five bits of its field. */
static constexpr float EXPONENT_REBIAS = 0x1p-112f;
enum { LOW_BIT = 11 }; /* the lowest bit of the float32 that is encoded */

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

template <typename E> static __device__ __forceinline__ float2 decode_p(uint32_t word, int i, uint32_t low_bits)
{
    if constexpr (!cot_is_f16<E>)
        return cot_unpack_pair<__half>(word);
    return make_float2(
        __uint_as_float((word & 0xffff) << 12 | move_bit(low_bits, 2 * i, LOW_BIT)) * (1.0f / EXPONENT_REBIAS),
        __uint_as_float(word >> 16 << 12 | move_bit(low_bits, 2 * i + 1, LOW_BIT)) * (1.0f / EXPONENT_REBIAS));
}

/* The address of the row that this lane passes to stmatrix and ldmatrix, among the 32 words of its warp. These
 * instructions move the words from warpgroup 1 to warpgroup 2, as they move P and dS. An ordinary store and load across
 * the barrier would be correct too, but compute-sanitizer reports it, because the compiler removes the warp's
 * synchronisation. */
static __device__ __forceinline__ uint32_t low_bits_address(const uint32_t (&low_bits)[WARPGROUP])
{
    return cot_shared_address(low_bits + threadIdx.x % WARPGROUP / 32 * 32 + threadIdx.x % 8 * 4);
}

/* With softcap: packs P for dV, and stores P times the slope for dS. Returns their low bits. TANH: tanh is computed,
 * otherwise by the long series of attention_bwd_softcap. */
template <typename E, bool TANH>
static __device__ __forceinline__ uint32_t compute_p_softcap(const attention_bwd_softcap &cap, const attention_work &w,
                                                             int tile, int key, const float *lse_log2,
                                                             uint32_t ds_address, const float (&scores)[32],
                                                             uint32_t (&packed)[16])
{
    uint32_t low_bits = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t encoded[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float p[2], p_times_slope[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int element = 8 * k + 2 * i + j;
                const float x = scores[element], u = x * x, base = lse_log2[8 * (element / 4) + j] - P_EXPONENT;
                float exponent, slope;
                if (TANH) {
                    const float tanh_x = tanh_full_range(cap.scale * x);
                    exponent = fmaf(tanh_x, cap.factor, -base);
                    slope = fmaf(-tanh_x, tanh_x, 1.0f);
                } else {
                    exponent =
                        fmaf(x, fmaf(fmaf(u, cap.long_series[2], cap.long_series[1]), u, cap.long_series[0]), -base);
                    slope = fmaf(fmaf(u, cap.long_slope[2], cap.long_slope[1]), u, cap.long_slope[0]);
                }
                p[j] = is_masked<QUERIES>(w, tile, key, element) ? 0.0f : cot_ex2(exponent);
                p_times_slope[j] = p[j] * slope;
            }
            packed[4 * k + i] = cot_pack_pair<E>(p[0], p[1]);
            encoded[i] = encode_p<E>(p_times_slope[0], p_times_slope[1], 4 * k + i, low_bits);
        }
        cot_stmatrix_x4_trans(ds_address + k * 16 * 128, encoded);
    }
    return low_bits;
}

/* The key of this thread's accumulators 4i and 4i + 1. %tid is read again here, because few tiles need the key, and
 * it should not occupy a register. */
static __device__ __forceinline__ int thread_key(int key_begin)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return key_begin + thread % WARPGROUP / WARP * 16 + thread % WARP / 4;
}

/* Issues dV += P^T dO for the keys of the thread block, one chunk of columns at a time. */
template <typename E, int COLUMNS, int V_COLUMNS, int CHUNKS, int N>
static __device__ __forceinline__ void issue_dv(wide_shared<COLUMNS, V_COLUMNS> &s, float (&dv)[CHUNKS][N],
                                                const uint32_t (&packed)[16],
                                                cot_pipeline_state<wide_shared<COLUMNS, V_COLUMNS>::DOUT_STAGES> chunk)
{
#pragma unroll
    for (int index = 0; index < CHUNKS; index++, chunk.next()) {
        cot_mbarrier_wait(&s.dout_full[chunk.stage], chunk.parity);
        issue_gemm_add_ab<E>(dv[index], packed, s.dout[chunk.stage][0]);
    }
}

/* One step of warpgroup 1: issues dV of the previous step and S of this one, and computes P. FIRST: there is no
 * previous step. chunk: the first chunk of dO of the previous step. packed: P^T of the previous step, then of this
 * one. */
template <typename E, int COLUMNS, int V_COLUMNS, bool GENERAL, bool SOFTCAP, bool FIRST, int CHUNKS, int N>
static __device__ __forceinline__ void dv_step(const attention_bwd_call &c, wide_shared<COLUMNS, V_COLUMNS> &s,
                                               const attention_work &w, uint32_t step, int tile, int key_begin,
                                               cot_pipeline_state<wide_shared<COLUMNS, V_COLUMNS>::DOUT_STAGES> &chunk,
                                               float (&dv)[CHUNKS][N], uint32_t (&packed)[16])
{
    using S = wide_shared<COLUMNS, V_COLUMNS>;
    const int lane = threadIdx.x % WARP;
    const uint32_t q = step % S::Q_STAGES, ds = step % S::DS_STAGES;
    float scores[32];
    if (!FIRST)
        issue_dv<E>(s, dv, packed, chunk);
    cot_mbarrier_wait(&s.q_full[q], parity_of<S::Q_STAGES>(step));
    /* step >> 31 is 0. Without it, the address of K would be loop-invariant, and the compiler would keep the
     * descriptors in registers, of which there are not enough. */
    issue_gemm_abt<E, COLUMNS>(scores, s.k[0] + (step >> 31), TILE_64X64_BYTES, s.q[q][0]);
    if (!FIRST) {
        if (CHUNKS == 2) {
            cot_wgmma_wait<2>();
            if (lane == 0)
                cot_mbarrier_arrive(&s.dout_empty[chunk.stage]);
            chunk.next();
        }
        cot_wgmma_wait<1>();
        if (lane == 0)
            cot_mbarrier_arrive(&s.dout_empty[chunk.stage]);
        chunk.next();
    }
    cot_wgmma_wait<0>();
    const float *lse_log2 = &s.lse_log2[q][2 * (lane % 4)];
    if (!SOFTCAP) {
        if (GENERAL) {
            if (needs_mask_general<QUERIES>(w, tile, key_begin))
                apply_mask_general(
                    w, tile, thread_key(key_begin),
                    __int_as_float(c.softmax_scale_log2 < 0.0f ? PLUS_INFINITY_BITS : MINUS_INFINITY_BITS), scores);
        } else if (needs_mask<QUERIES>(c, tile, key_begin)) {
            apply_mask(c, tile, thread_key(key_begin), scores);
        }
#pragma unroll
        for (int query_octet = 0; query_octet < 8; query_octet++) {
            const float2 lse = *(const float2 *)&lse_log2[8 * query_octet];
#pragma unroll
            for (int i = 0; i < 4; i++)
                scores[4 * query_octet + i] = cot_ex2(fmaf(scores[4 * query_octet + i], c.softmax_scale_log2,
                                                           i % 2 == 0 ? P_EXPONENT - lse.x : P_EXPONENT - lse.y));
        }
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive(&s.q_empty[q]);
    }
    cot_mbarrier_wait(&s.ds_empty[ds], parity_of<S::DS_STAGES>(step) ^ 1);
    const uint32_t ds_address = fragment_address(s.ds[ds]);
    uint32_t low_bits = 0;
    if (SOFTCAP) {
        float square_sum = 0.0f; /* no square exceeds it; NaN if a score is NaN, and then tanh is computed */
#pragma unroll
        for (int i = 0; i < 32; i++)
            square_sum = fmaf(scores[i], scores[i], square_sum);
        if (__all_sync(0xffffffffu, square_sum <= c.cap.long_max_square))
            low_bits = compute_p_softcap<E, false>(c.cap, w, tile, thread_key(key_begin), lse_log2, ds_address, scores,
                                                   packed);
        else
            low_bits =
                compute_p_softcap<E, true>(c.cap, w, tile, thread_key(key_begin), lse_log2, ds_address, scores, packed);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t encoded[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int e = 8 * k + 2 * i;
                packed[4 * k + i] = cot_pack_pair<E>(scores[e], scores[e + 1]);
                encoded[i] = encode_p<E>(scores[e], scores[e + 1], 4 * k + i, low_bits);
            }
            cot_stmatrix_x4_trans(ds_address + k * 16 * 128, encoded);
        }
    }
    if (cot_is_f16<E>)
        cot_stmatrix_x1(low_bits_address(s.low_bits[ds]), low_bits);
    __syncwarp();
    if (lane == 0) {
        if (SOFTCAP)
            cot_mbarrier_arrive(&s.q_empty[q]);
        cot_mbarrier_arrive(&s.p_full[ds]);
    }
}

template <typename E, int COLUMNS, int V_COLUMNS, bool GENERAL, bool SOFTCAP>
static __device__ void compute_dv(const attention_bwd_call &c, wide_shared<COLUMNS, V_COLUMNS> &s,
                                  const attention_work &w, int key_begin)
{
    using S = wide_shared<COLUMNS, V_COLUMNS>;
    float dv[S::TILE_CHUNKS][S::CHUNK_PANELS * 32];
    uint32_t packed[16]; /* P^T */
    cot_pipeline_state<S::DOUT_STAGES> chunk;
#pragma unroll
    for (int index = 0; index < S::TILE_CHUNKS; index++)
#pragma unroll
        for (int i = 0; i < S::CHUNK_PANELS * 32; i++)
            dv[index][i] = 0.0f;
    const uint32_t steps = (uint32_t)step_count(w);
    cot_mbarrier_wait(&s.k_full, 0);
    if (steps > 0) {
        int tile = w.first_tile;
        dv_step<E, COLUMNS, V_COLUMNS, GENERAL, SOFTCAP, true>(c, s, w, 0, tile, key_begin, chunk, dv, packed);
        for (uint32_t step = 1; step < steps; step++) {
            tile = tile_of(c, w, (int)step);
            dv_step<E, COLUMNS, V_COLUMNS, GENERAL, SOFTCAP, false>(c, s, w, step, tile, key_begin, chunk, dv, packed);
        }
        issue_dv<E>(s, dv, packed, chunk);
        cot_wgmma_wait<0>();
    }
#pragma unroll
    for (int index = 0; index < S::TILE_CHUNKS; index++)
        store_rows<E, GENERAL>(c, c.dv, c.dv_store_method, key_output_rows<GENERAL>(c, c.dv, w), thread_key(key_begin),
                               index * S::CHUNK_PANELS * 64, (int)c.d_v - index * S::CHUNK_PANELS * 64, INVERSE_P_SCALE,
                               dv[index]);
}

/* Issues dP^T = V dO^T of a tile. chunk: the first chunk of its dO. */
template <typename E, int COLUMNS, int V_COLUMNS>
static __device__ __forceinline__ void issue_dp(wide_shared<COLUMNS, V_COLUMNS> &s, float (&dp)[32],
                                                cot_pipeline_state<wide_shared<COLUMNS, V_COLUMNS>::DOUT_STAGES> chunk,
                                                uint32_t step)
{
    using S = wide_shared<COLUMNS, V_COLUMNS>;
    const uint64_t v_desc = cot_wgmma_k_major(cot_shared_address(s.v[0] + (step >> 31))); /* step >> 31: as for K */
    uint64_t dout_desc[S::TILE_CHUNKS];
#pragma unroll
    for (int index = 0; index < S::TILE_CHUNKS; index++, chunk.next()) {
        cot_mbarrier_wait(&s.dout_full[chunk.stage], chunk.parity);
        dout_desc[index] = cot_wgmma_k_major(cot_shared_address(s.dout[chunk.stage][0]));
    }
    cot_wgmma_fence();
#pragma unroll
    for (int k = 0; k < V_COLUMNS / 16; k++) {
        const int panel = k / 4;
        cot_wgmma<E, false, false>(dp, v_desc + panel * (TILE_64X64_BYTES >> 4) + k % 4 * COT_WGMMA_K_STEP,
                                   dout_desc[panel / S::CHUNK_PANELS] +
                                       panel % S::CHUNK_PANELS * (TILE_64X64_BYTES >> 4) + k % 4 * COT_WGMMA_K_STEP,
                                   k > 0);
    }
    cot_wgmma_commit();
}

/* Issues dK += dS^T Q for the keys of the thread block. */
template <typename E, int PRODUCTS, int N>
static __device__ __forceinline__ void issue_dk(float (&dk)[PRODUCTS][N], const uint32_t (&packed)[16],
                                                const unsigned char (*q)[TILE_64X64_BYTES])
{
#pragma unroll
    for (int product = 0; product < PRODUCTS; product++)
        issue_gemm_add_ab<E>(dk[product], packed, q[product * (N / 32)]);
}

/* One step of warpgroup 2: issues dK of the previous step and dP of this one, and computes dS. FIRST: there is no
 * previous step. packed: dS^T of the previous step, then of this one. */
template <typename E, int COLUMNS, int V_COLUMNS, bool FIRST, int PRODUCTS, int N>
static __device__ __forceinline__ void dk_step(wide_shared<COLUMNS, V_COLUMNS> &s, uint32_t step,
                                               cot_pipeline_state<wide_shared<COLUMNS, V_COLUMNS>::DOUT_STAGES> &chunk,
                                               float (&dk)[PRODUCTS][N], uint32_t (&packed)[16])
{
    using S = wide_shared<COLUMNS, V_COLUMNS>;
    const int lane = threadIdx.x % WARP;
    const uint32_t ds = step % S::DS_STAGES, previous_q = (step - 1) % S::Q_STAGES;
    float dp[32];
    if (!FIRST) {
        /* Completed long ago, but p_full does not make Q visible to this warpgroup. */
        cot_mbarrier_wait(&s.q_full[previous_q], parity_of<S::Q_STAGES>(step - 1));
        issue_dk<E>(dk, packed, s.q[previous_q]);
    }
    issue_dp<E>(s, dp, chunk, step);
    if (!FIRST) {
        cot_wgmma_wait<1>();
        if (lane == 0)
            cot_mbarrier_arrive(&s.q_empty[previous_q]);
    }
    cot_wgmma_wait<0>();
#pragma unroll
    for (int query_octet = 0; query_octet < 8; query_octet++) {
        const float2 delta = *(const float2 *)&s.delta[step % 2][8 * query_octet + 2 * (lane % 4)];
#pragma unroll
        for (int i = 0; i < 4; i++)
            dp[4 * query_octet + i] =
                fmaf(dp[4 * query_octet + i], INVERSE_P_SCALE, -INVERSE_P_SCALE * (i % 2 == 0 ? delta.x : delta.y));
    }
    __syncwarp();
    for (int index = 0; index < S::TILE_CHUNKS; index++, chunk.next())
        if (lane == 0)
            cot_mbarrier_arrive(&s.dout_empty[chunk.stage]);
    cot_mbarrier_wait(&s.p_full[ds], parity_of<S::DS_STAGES>(step));
    __syncwarp();
    const uint32_t low_bits = cot_is_f16<E> ? cot_ldmatrix_x1(low_bits_address(s.low_bits[ds])) : 0;
    const uint32_t ds_address = fragment_address(s.ds[ds]);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t p[4];
        cot_ldmatrix_x4_trans(p, ds_address + k * 16 * 128);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 decoded = decode_p<E>(p[i], 4 * k + i, low_bits);
            packed[4 * k + i] = cot_pack_pair<E>(decoded.x * dp[8 * k + 2 * i], decoded.y * dp[8 * k + 2 * i + 1]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; k++)
        cot_stmatrix_x4_trans(ds_address + k * 16 * 128, packed + 4 * k);
    cot_fence_proxy_async();
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.ds_full[ds]);
}

template <typename E, int COLUMNS, int V_COLUMNS, bool GENERAL>
static __device__ void compute_dk(const attention_bwd_call &c, wide_shared<COLUMNS, V_COLUMNS> &s,
                                  const attention_work &w, int key_begin)
{
    using S = wide_shared<COLUMNS, V_COLUMNS>;
    enum { PRODUCT_COLUMNS = COLUMNS / S::DK_PRODUCTS };
    float dk[S::DK_PRODUCTS][PRODUCT_COLUMNS / 2];
    uint32_t packed[16]; /* dS^T */
    cot_pipeline_state<S::DOUT_STAGES> chunk;
#pragma unroll
    for (int product = 0; product < S::DK_PRODUCTS; product++)
#pragma unroll
        for (int i = 0; i < PRODUCT_COLUMNS / 2; i++)
            dk[product][i] = 0.0f;
    const uint32_t steps = (uint32_t)step_count(w);
    cot_mbarrier_wait(&s.v_full, 0);
    if (steps > 0) {
        dk_step<E, COLUMNS, V_COLUMNS, true>(s, 0, chunk, dk, packed);
        for (uint32_t step = 1; step < steps; step++)
            dk_step<E, COLUMNS, V_COLUMNS, false>(s, step, chunk, dk, packed);
        const uint32_t last_q = (steps - 1) % S::Q_STAGES;
        cot_mbarrier_wait(&s.q_full[last_q], parity_of<S::Q_STAGES>(steps - 1));
        issue_dk<E>(dk, packed, s.q[last_q]);
        cot_wgmma_wait<0>();
    }
#pragma unroll
    for (int product = 0; product < S::DK_PRODUCTS; product++)
        store_rows<E, GENERAL>(c, c.dk, c.dk_store_method, key_output_rows<GENERAL>(c, c.dk, w), thread_key(key_begin),
                               product * PRODUCT_COLUMNS, (int)c.d_qk - product * PRODUCT_COLUMNS, c.scale,
                               dk[product]);
}

template <typename E, int COLUMNS, int V_COLUMNS, bool GENERAL, bool SOFTCAP>
static __device__ __forceinline__ void backward_wide(const attention_bwd_mapped_call &mapped)
{
    using S = wide_shared<COLUMNS, V_COLUMNS>;
    static_assert(sizeof(S) <= ATTENTION_BWD_WIDE_SHARED_BYTES(COLUMNS, V_COLUMNS),
                  "larger than the shared memory that the host allots");
    S &s = *(S *)dynamic_shared_memory;
    const attention_bwd_call &c = mapped.call;
    const int rank = (int)cot_cluster_rank();
    if (threadIdx.x == 0) {
        cot_mbarrier_init(&s.k_full, 1), cot_mbarrier_init(&s.v_full, 1);
        for (int i = 0; i < S::Q_STAGES; i++)
            cot_mbarrier_init(&s.q_full[i], 1), cot_mbarrier_init(&s.q_empty[i], 8);
        for (int i = 0; i < S::DOUT_STAGES; i++)
            cot_mbarrier_init(&s.dout_full[i], 1), cot_mbarrier_init(&s.dout_empty[i], 8);
        for (int i = 0; i < S::DS_STAGES; i++) {
            cot_mbarrier_init(&s.p_full[i], 4), cot_mbarrier_init(&s.ds_full[i], 4);
            cot_mbarrier_init(&s.ds_empty[i], !S::BY_TILES ? 5 : i == rank ? 4 : 1);
        }
        cot_mbarrier_init(&s.peer_ds_full, 1), cot_mbarrier_init(&s.sent_ds_empty, 4);
        for (int i = 0; i < 2; i++)
            cot_mbarrier_init(&s.dq_full[i], 4), cot_mbarrier_init(&s.uncleared_full[i], 1);
        for (int i = 0; i < S::DQ_STAGES; i++)
            cot_mbarrier_init(&s.dq_ready[i], 1);
        cot_mbarrier_init_fence();
    }
    __syncwarp();
    /* The cluster barrier in this call makes the initialised mbarriers visible. */
    const uint32_t unit_number = take_key_block_of_cluster(c, s.ticket);
    attention_work w;
    if (!GENERAL) {
        w = work_of<QUERIES>(c, unit_number);
    } else {
        cot_griddepcontrol_wait();      /* until seqlens is written */
        cot_fence_proxy_async_global(); /* orders the TMA loads below after it */
        if (!work_of_general<QUERIES>(c, unit_number, w))
            return;      /* the peer returns, too */
        __syncthreads(); /* all threads have read the ticket */
        if (threadIdx.x == 0)
            s.work = w;
        __syncthreads();
    }
    const int warpgroup = threadIdx.x / WARPGROUP;
    const int key_begin = w.first_key + THREAD_BLOCK_KEYS * rank;
    if (warpgroup == 0) {
        cot_setmaxnreg_dec<S::DQ_REGISTERS>();
        if constexpr (S::BY_TILES)
            compute_dq_by_tiles<E>(s, w, rank);
        else
            compute_dq_by_columns<E>(s, w, rank);
    } else if (warpgroup == 1) {
        cot_setmaxnreg_inc<S::CONSUMER_REGISTERS>();
        compute_dv<E, COLUMNS, V_COLUMNS, GENERAL, SOFTCAP>(c, s, w, key_begin);
    } else if (warpgroup == 2) {
        cot_setmaxnreg_inc<S::CONSUMER_REGISTERS>();
        compute_dk<E, COLUMNS, V_COLUMNS, GENERAL>(c, s, w, key_begin);
    } else {
        cot_setmaxnreg_dec<S::PRODUCER_REGISTERS>();
        const int role = threadIdx.x % WARPGROUP / WARP;
        const bool leader = threadIdx.x % WARP == 0;
        const attention_work &producer_work = GENERAL ? s.work : w;
        if (role == 0) {
            if (GENERAL || leader)
                load_tiles<COLUMNS, V_COLUMNS, GENERAL, /*LOADS_Q=*/true, /*LOADS_DOUT=*/S::BY_TILES>(
                    mapped, s, producer_work, rank);
        } else if (role == 1) {
            if constexpr (S::BY_TILES) {
                if (leader)
                    send_ds(s, producer_work, rank);
            } else if (GENERAL || leader) {
                load_tiles<COLUMNS, V_COLUMNS, GENERAL, /*LOADS_Q=*/false, /*LOADS_DOUT=*/true>(mapped, s,
                                                                                                producer_work, rank);
            }
        } else if (leader) {
            if (c.deterministic)
                write_dq<COLUMNS, V_COLUMNS, GENERAL, /*DETERMINISTIC=*/true>(c, s, producer_work, rank, role - 2);
            else
                write_dq<COLUMNS, V_COLUMNS, GENERAL, /*DETERMINISTIC=*/false>(c, s, producer_work, rank, role - 2);
        }
        __syncwarp();
    }
    cot_cluster_arrive(); /* the peer may still send dS to this block, and arrive on its barriers */
    cot_cluster_wait();
}

#define INSTANCE(name, element, columns, v_columns, version)                                                        \
    extern "C" __global__ void __launch_bounds__(ATTENTION_BWD_WARPGROUPS *WARPGROUP, 1)                            \
        attention_bwd_##name(const __grid_constant__ attention_bwd_mapped_call mapped)                              \
    {                                                                                                               \
        backward_wide<element, columns, v_columns, version >= VERSION_GENERAL, version == VERSION_SOFTCAP>(mapped); \
    }
#define INSTANCES(size, element, columns, v_columns)                 \
    INSTANCE(size, element, columns, v_columns, VERSION_SPECIALISED) \
    INSTANCE(size##_general, element, columns, v_columns, VERSION_GENERAL)
INSTANCES(bf16_sm90_d192_v128, __nv_bfloat16, 192, 128)
INSTANCES(bf16_sm90_d192, __nv_bfloat16, 192, 192)
INSTANCES(bf16_sm90_d256, __nv_bfloat16, 256, 256)
INSTANCES(f16_sm90_d192_v128, __half, 192, 128)
INSTANCES(f16_sm90_d192, __half, 192, 192)
INSTANCES(f16_sm90_d256, __half, 256, 256)
INSTANCE(bf16_sm90_d192_v128_softcap, __nv_bfloat16, 192, 128, VERSION_SOFTCAP)
INSTANCE(bf16_sm90_d192_softcap, __nv_bfloat16, 192, 192, VERSION_SOFTCAP)
INSTANCE(bf16_sm90_d256_softcap, __nv_bfloat16, 256, 256, VERSION_SOFTCAP)
INSTANCE(f16_sm90_d192_v128_softcap, __half, 192, 128, VERSION_SOFTCAP)
INSTANCE(f16_sm90_d192_softcap, __half, 192, 192, VERSION_SOFTCAP)
