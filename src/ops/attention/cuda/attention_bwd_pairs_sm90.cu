/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_pairs_sm90.cu: the pair kernel, the backward on Hopper by pairs of key blocks, d = d_v = 64 or 128.
 * uses_pair_kernel says which calls run on it. A *pair* is two adjacent key blocks of a key-value head, 256 keys. A
 * cluster of two thread blocks takes one pair after another. In this file *block* is a thread block: block r of the
 * cluster computes dK and dV of key block r of the pair, with the consumers of attention_bwd_key_blocks_sm90.cu, which
 * has the formulas, the roles and the steps. The *peer* is the other block of the cluster. The two blocks share three
 * things:
 *
 *   dQ        A block computes one of the two dQ tiles of a step, over the keys of the pair. The peer's dQ tile needs
 *             the dS of this block too, so the block sends that dS to the peer. Compared with the key-block kernel, a
 *             block stages half as many dQ tiles and adds half as many to memory.
 *   Q, dO     A block loads half of a tile into the shared memory of both blocks (multicast).
 *   the pair  Block 0 takes the pair from the counter, and sends its number to block 1.
 *
 * Block r computes dQ tile r. At 64 tile columns these are queries 64 r to 64 r + 63 of the tile, at 128 tile columns
 * the columns 64 r to 64 r + 63. Block r loads the same part of a tile of Q and dO: half r.
 *
 *   warpgroup 0       producer: one thread loads by TMA, one adds dQ tiles to memory, one sends dS
 *   warpgroup 1       dQ
 *   warpgroups 2, 3   consumers: 64 keys each
 *
 * Barriers. q full, q empty, dout full, dout empty and dq ready are those of attention_bwd_key_blocks_sm90.cu,
 * uncleared full is absent. "Remote": the peer arrives.
 *
 *   barrier           arrivals (bytes)          phase ends when                          who waits
 *   kv full           1 (K, V, part of peer K)  K, V, the columns of the peer's K that   consumers, dQ, dq_writer,
 *                                               dQ reads, and `work` are there           sender
 *   kv empty          14: 8 consumer warps,     nobody reads K, V and peer K any more,   producer
 *                     4 dQ warps, dq_writer,    and dq_writer and sender have taken
 *                     sender                    the work of the pair
 *   ds full           8: 1 per consumer warp    both halves of dS are stored             dQ, sender
 *   ds empty          5: 4 dQ warps, 1 remote   dQ has read dS and the peer has its copy consumers
 *   peer ds full      1 (dS of the peer)        the peer's dS is there                   dQ
 *   sent ds empty     4 remote: its dQ warps    the peer has read the dS sent to it      sender
 *   dq full           4: 1 per dQ warp          a dQ tile is staged                      dq_writer
 *   peer q empty      1 remote: its producer    the peer's stage of Q may be loaded      producer
 *   peer dout empty   1 remote: its producer    the peer's stage of dO may be loaded     producer
 *   pair full         1 (the number)            block 1 has the number of its pair       producer of block 1
 *   pair empty        1 remote: its producer    block 1 has read the number              producer of block 0
 *
 * Deterministic mode as in attention_bwd_key_blocks_sm90.cu, with pairs in place of key blocks. A pair waits only for
 * pairs that were taken earlier. The versions that store dq are for deterministic calls without GQA and without a
 * causal mask: the final pair of a dQ tile does not add to dq_accum. Its dQ warpgroup adds the sums of the other pairs,
 * and stores dq. */
#include "attention_bwd_delta_sm90.cuh"

enum { PAIR_KEYS = 2 * KEYS };

/* STORES_DQ: takes numbers from the counter, computes those that are shares (attention_bwd_delta_sm90.cuh), and leaves the
 * first other number in s.own_unit_number. Executed by all threads of the cluster. Block 0 takes a number and stores it in
 * both blocks. */
template <typename E, int TILE_COLUMNS>
static __device__ __forceinline__ void take_shares(const attention_bwd_mapped_call &mapped,
                                                   pair_shared<TILE_COLUMNS> &s, int rank)
{
    const attention_bwd_call &c = mapped.call;
    for (;;) {
        if (rank == 0 && threadIdx.x == 0) {
            cot_griddepcontrol_wait(); /* until the counter is cleared */
            const uint32_t number = atomicAdd(c.unit_counter, 1);
            s.own_unit_number = number;
            cot_cluster_store_word(cot_mapa(cot_shared_address(&s.own_unit_number), 1), number);
        }
        __syncwarp();
        cot_cluster_arrive();
        cot_cluster_wait();
        const uint32_t number = *(volatile uint32_t *)&s.own_unit_number;
        if (number >= c.delta_shares)
            return;
        /* The rank is read again, because ptxas would spill it. */
        compute_delta<E, TILE_COLUMNS, 64>(mapped, 2 * number + cot_cluster_rank());
        cot_cluster_arrive();
        cot_cluster_wait(); /* both blocks have read the number */
    }
}

/* Returns the number of the cluster's next pair. Block 0 takes it from the counter and sends it to block 1. STORES_DQ:
 * take_shares has taken the first number. */
template <int TILE_COLUMNS, bool STORES_DQ>
static __device__ __forceinline__ uint32_t take_pair(const attention_bwd_call &c, pair_shared<TILE_COLUMNS> &s,
                                                     int rank, uint32_t units_taken)
{
    if (rank == 0) {
        const uint32_t unit_number =
            (STORES_DQ && units_taken == 0 ? s.own_unit_number : atomicAdd(c.unit_counter, 1)) - c.delta_shares;
        cot_mbarrier_wait(s.pair_empty, parity_of<1>(units_taken) ^ 1);
        cot_store_async(cot_mapa(cot_shared_address(s.unit_number), 1), cot_mapa(cot_shared_address(s.pair_full), 1),
                        unit_number, 0, 0, 0);
        return unit_number;
    }
    cot_mbarrier_arrive_expect(s.pair_full, sizeof s.unit_number);
    cot_mbarrier_wait(s.pair_full, parity_of<1>(units_taken));
    const uint32_t unit_number = *(volatile uint32_t *)&s.unit_number[0].x;
    cot_mbarrier_arrive_remote(cot_mapa(cot_shared_address(s.pair_empty), 0));
    return unit_number;
}

/* Opens a stage for the halves that both blocks load. The producer of each block executes it when the stage is free in
 * its block. It sets the expected bytes of `full`, arrives on the peer's `peer_empty`, and waits until the peer has
 * done the same. Then both halves may be loaded. `peer_empty` is a barrier of the stage. earlier_uses: how often the
 * stage was used before. */
static __device__ __forceinline__ void open_stage_in_both(uint64_t *peer_empty, int rank, uint32_t earlier_uses,
                                                          uint64_t *full, uint32_t bytes)
{
    cot_mbarrier_arrive_expect(full, bytes);
    cot_mbarrier_arrive_remote(cot_mapa(cot_shared_address(peer_empty), rank ^ 1));
    cot_mbarrier_wait(peer_empty, earlier_uses & 1);
}

/* The producer. Executed by one thread. Differences from load_tiles of the key-block kernel:
 *   - `work` stays in shared memory, because the thread has few registers
 *   - each block loads half of a tile into the shared memory of both blocks (open_stage_in_both)
 *   - it also loads a part of the peer's K */
template <int TILE_COLUMNS, bool STORES_DQ>
static __device__ void load_pair_tiles(const attention_bwd_mapped_call &mapped, pair_shared<TILE_COLUMNS> &s, int rank)
{
    constexpr int COLUMN_PANELS = TILE_COLUMNS / 64, QUERIES = pair_shared<TILE_COLUMNS>::QUERIES;
    const attention_bwd_call &c = mapped.call;
    /* Waits for the call's earlier kernels, which clear the counter, and write lse_log2 and scaled_delta. */
    cot_griddepcontrol_wait();
    cot_fence_proxy_async_global();
    const int first_delta_row = (int)(c.B * c.H * c.tiles_per_head); /* scaled_delta follows all rows of lse_log2 */
    const int column = TILE_COLUMNS == 64 ? 0 : 64 * rank,
              row_in_tile = TILE_COLUMNS == 64 ? 64 * rank : 0; /* origin of this block's half within the tile */
    uint32_t ring_step = 0;
    for (uint32_t units_taken = 0;; units_taken++) {
        const uint32_t unit_number = take_pair<TILE_COLUMNS, STORES_DQ>(c, s, rank, units_taken);
        attention_work &w = s.work[units_taken % s.WORK_STAGES];
        if (unit_number >= c.unit_count) {
            w.first_key = END_OF_WORK;
            publish_work_only(s, units_taken);
            return;
        }
        w = work_of<QUERIES, PAIR_KEYS>(c, unit_number);
        w.first_key += rank * KEYS;
        prefetch_keys<TILE_COLUMNS>(mapped, w, w.first_key);
        if (STORES_DQ)
            wait_for_delta(c, w.b * (int)c.H + w.first_head);
        for (int step = 0; step < step_count(w); step++, ring_step++) {
            const uint32_t q_stage = ring_step % ATTENTION_BWD_Q_STAGES,
                           dout_stage = ring_step % ATTENTION_BWD_DOUT_STAGES;
            const attention_step step_info = step_of(c, w, step);
            const int tile = step_info.tile, head = w.first_head + step_info.head_in_group, b = w.b;
            const int statistics_row = (int)query_tile_base_of<false>(c, w, step_info.head_in_group) + tile,
                      query = tile * QUERIES + row_in_tile;
            const uint32_t bytes = COLUMN_PANELS * s.Q_PANEL_BYTES + QUERIES * sizeof(float);
            const uint32_t q_earlier_uses = ring_step / ATTENTION_BWD_Q_STAGES,
                           dout_earlier_uses = ring_step / ATTENTION_BWD_DOUT_STAGES;
            cot_mbarrier_wait(&s.q_empty[q_stage], parity_of<ATTENTION_BWD_Q_STAGES>(ring_step) ^ 1);
            s.tile_index[q_stage] = tile; /* before the arrival on q_full, for which the consumers wait */
            open_stage_in_both(&s.peer_q_empty[q_stage], rank, q_earlier_uses, &s.q_full[q_stage], bytes);
            cot_tma_load_4d_to_both(s.q[q_stage][0] + rank * TILE_64X64_BYTES, &mapped.q, column, query, head, b,
                                    &s.q_full[q_stage]);
            cot_tma_load_4d(s.lse_log2[q_stage], &mapped.statistics, 0, statistics_row, 0, 0, &s.q_full[q_stage]);
            cot_mbarrier_wait(&s.dout_empty[dout_stage], parity_of<ATTENTION_BWD_DOUT_STAGES>(ring_step) ^ 1);
            open_stage_in_both(&s.peer_dout_empty[dout_stage], rank, dout_earlier_uses, &s.dout_full[dout_stage],
                               bytes);
            cot_tma_load_4d_to_both(s.dout[dout_stage][0] + rank * TILE_64X64_BYTES, &mapped.dout, column, query, head,
                                    b, &s.dout_full[dout_stage]);
            cot_tma_load_4d(s.scaled_delta[dout_stage], &mapped.statistics, 0, first_delta_row + statistics_row, 0, 0,
                            &s.dout_full[dout_stage]);
            /* K and V are loaded in the first step only, after its Q and dO, so that the wait for `kv empty` (until the
             * previous pair is done) does not delay the first tile. */
            if (step > 0)
                continue;
            begin_loading_keys(s, units_taken, &s.kv_full);
            const int peer_first_key = w.first_key ^ KEYS; /* a pair begins at a multiple of 256 keys */
            cot_tma_load_4d(s.peer_k, &mapped.k, column, peer_first_key, w.kv_head, b, &s.kv_full);
            load_keys(mapped, s, w, w.first_key, &s.kv_full);
        }
        if (step_count(w) == 0)
            publish_work_only(s, units_taken);
    }
}

/* The position of a pair in the order in which pairs add to dQ. It is the same for all tiles, because STORES_DQ is only
 * for calls without a causal mask. So any QUERIES and any tile give it, and 64 and 0 are
 * arbitrary. */
static __device__ __forceinline__ attention_dq_position position_of_pair(const attention_bwd_call &c,
                                                                         const attention_work &w)
{
    return dq_position_of<64, /*GENERAL=*/false, PAIR_KEYS>(c, w, 0);
}

/* The dq_writer adds the dQ tiles of this block to memory. If STORES_DQ, the final pair of a dQ tile does not add. Its
 * dq_writer loads the sums of the other pairs into the stage, and the dQ warpgroup stores dq. Executed by one
 * thread. */
template <int TILE_COLUMNS, bool DETERMINISTIC, bool STORES_DQ>
static __device__ void write_pair_dq(const attention_bwd_mapped_call &mapped, pair_shared<TILE_COLUMNS> &s, int rank)
{
    constexpr int QUERIES = pair_shared<TILE_COLUMNS>::QUERIES;
    const attention_bwd_call &c = mapped.call;
    cot_griddepcontrol_wait(); /* until dq_accum and the semaphores are cleared */
    cot_fence_proxy_async_global();
    uint32_t parity = 0;
    for (uint32_t units_taken = 0;; units_taken++) {
        cot_mbarrier_wait(&s.kv_full, parity_of<1>(units_taken));
        const attention_work w = s.work[units_taken % s.WORK_STAGES];
        cot_mbarrier_arrive(&s.kv_empty);
        if (w.first_key == END_OF_WORK)
            break;
        const bool is_final = STORES_DQ && position_of_pair(c, w).is_final;
        const int steps = step_count(w);
        for (int step = 0; step < steps; step++, parity ^= 1) {
            const attention_step step_info = step_of(c, w, step);
            const int64_t query_tile = query_tile_base_of<false>(c, w, step_info.head_in_group) + step_info.tile,
                          accum_dq_tile = query_tile * s.DQ_TILES_PER_QUERY_TILE + rank;
            const attention_dq_position position =
                DETERMINISTIC ? dq_position_of<QUERIES, /*GENERAL=*/false, PAIR_KEYS>(c, w, step_info.tile)
                              : NOT_FIRST_NOT_FINAL;
            const bool loads_sums = is_final && position.earlier_units > 0;
            if (!loads_sums && (step == 0 || is_final)) /* after the other steps the dq_writer has arrived already */
                cot_mbarrier_arrive(&s.dq_ready[0]);
            if (DETERMINISTIC && position.earlier_units > 0)
                wait_for_earlier_units(c, accum_dq_tile, position.earlier_units);
            if (loads_sums) {
                cot_mbarrier_arrive_expect(&s.dq_ready[0], sizeof s.dq[0]);
                cot_tma_load_4d(s.dq[0], &mapped.dq_accum, 0,
                                (int)(accum_dq_tile * (ATTENTION_BWD_DQ_TILE_FLOATS / 64)), 0, 0, &s.dq_ready[0]);
            }
            cot_mbarrier_wait(&s.dq_full[0], parity);
            if (is_final) /* the dQ warpgroup stores dq, so there is nothing to add */
                continue;
            add_dq_tile(c, accum_dq_tile, s.dq[0], position.earlier_units == 0);
            if (step + 1 < steps) /* before release_next_unit, which waits until the sums are in memory */
                cot_mbarrier_arrive(&s.dq_ready[0]);
            if (DETERMINISTIC)
                release_next_unit(c, accum_dq_tile);
        }
    }
    cot_bulk_wait();
}

/* The sender copies this block's dS of the peer's dQ tile to the peer. Executed by one thread. */
template <int TILE_COLUMNS> static __device__ void send_ds(pair_shared<TILE_COLUMNS> &s, int rank)
{
    const uint32_t peer_ds = cot_mapa(cot_shared_address(s.peer_ds), rank ^ 1),
                   peer_ds_full = cot_mapa(cot_shared_address(s.peer_ds_full), rank ^ 1);
    cot_pipeline_state<ATTENTION_BWD_DS_STAGES> ds;
    uint32_t parity = 0;
    for (uint32_t units_taken = 0;; units_taken++) {
        cot_mbarrier_wait(&s.kv_full, parity_of<1>(units_taken));
        const attention_work &w = s.work[units_taken % s.WORK_STAGES];
        const int steps = w.first_key == END_OF_WORK ? -1 : step_count(w);
        cot_mbarrier_arrive(&s.kv_empty);
        if (steps < 0)
            return;
        for (int step = 0; step < steps; step++, ds.next(), parity ^= 1) {
            cot_mbarrier_wait(&s.ds_full[ds.stage], ds.parity);
            cot_mbarrier_wait(s.sent_ds_empty, parity ^ 1);
            for (int consumer = 0; consumer < 2; consumer++)
                cot_bulk_copy_to_block(peer_ds + consumer * TILE_64X64_BYTES,
                                       cot_shared_address(s.ds[ds.stage][consumer]) +
                                           (TILE_COLUMNS == 64 ? (rank ^ 1) * TILE_64X64_BYTES : 0),
                                       TILE_64X64_BYTES, peer_ds_full);
        }
    }
}

/* Issues acc = dS K, or if `accumulate` acc += dS K, over 128 keys. `ds` and `k` are those of the first 64 keys. Those
 * of the others lie ds_stride and TILE_64X64_BYTES bytes later. */
template <typename E>
static __device__ __forceinline__ void issue_dq(float (&acc)[32], const unsigned char *ds, int ds_stride,
                                                const unsigned char *k, bool accumulate)
{
    cot_wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint64_t a = cot_wgmma_k_major(cot_shared_address(ds + i / 4 * ds_stride)),
                       b = cot_wgmma_mn_major(cot_shared_address(k + i / 4 * TILE_64X64_BYTES), TILE_64X64_BYTES);
        cot_wgmma<E, false, true>(acc, a + i % 4 * COT_WGMMA_K_STEP, b + i % 4 * COT_WGMMA_MN_STEP,
                                  accumulate || i > 0);
    }
    cot_wgmma_commit();
}

/* The dQ warpgroup stages dQ tiles for the dq_writer. If STORES_DQ and this is the final pair, the warpgroup adds the
 * sums that the dq_writer has loaded, and stores dq. */
template <typename E, int TILE_COLUMNS, bool STORES_DQ>
static __device__ void compute_pair_dq(const attention_bwd_call &c, pair_shared<TILE_COLUMNS> &s, int rank)
{
    constexpr int QUERIES = pair_shared<TILE_COLUMNS>::QUERIES;
    const int lane = threadIdx.x % WARP;
    const bool leader = threadIdx.x % WARPGROUP == 0;
    const uint32_t peer_ds_empty = cot_mapa(cot_shared_address(s.ds_empty), rank ^ 1),
                   peer_sent_ds_empty = cot_mapa(cot_shared_address(s.sent_ds_empty), rank ^ 1);
    cot_pipeline_state<ATTENTION_BWD_DS_STAGES> ds;
    uint32_t parity = 0;
    for (uint32_t units_taken = 0;; units_taken++) {
        cot_mbarrier_wait(&s.kv_full, parity_of<1>(units_taken));
        const attention_work &w = s.work[units_taken % s.WORK_STAGES];
        if (w.first_key == END_OF_WORK)
            return;
        float acc[32];
        /* STORES_DQ: the rows of dq, and the row of this thread. Read once, before the steps. There is one query head
         * for each key-value head, so a step is a tile, and the head is number 0 of the group. */
        const attention_dq_position position = STORES_DQ ? position_of_pair(c, w) : NOT_FIRST_NOT_FINAL;
        const output_rows rows = query_output_rows</*GENERAL=*/false>(c, w, 0);
        const int row_step = w.tile_direction * QUERIES;
        int row = w.first_tile * QUERIES + (TILE_COLUMNS == 64 ? 64 * rank : 0) + threadIdx.x % WARPGROUP / WARP * 16 +
                  lane / 4;
        for (int steps_left = step_count(w); steps_left > 0; steps_left--, ds.next(), parity ^= 1) {
            cot_mbarrier_wait(&s.ds_full[ds.stage], ds.parity);
            if (leader)
                cot_mbarrier_arrive_expect(s.peer_ds_full, sizeof s.peer_ds);
            __syncwarp();
            issue_dq<E>(acc, s.ds[ds.stage][0] + (TILE_COLUMNS == 64 ? rank * TILE_64X64_BYTES : 0), sizeof s.ds[0][0],
                        s.k[TILE_COLUMNS == 64 ? 0 : rank][0], /*accumulate=*/false);
            cot_mbarrier_wait(s.peer_ds_full, parity);
            if (leader)
                cot_mbarrier_arrive_remote(peer_ds_empty + ds.stage * sizeof(uint64_t));
            __syncwarp();
            issue_dq<E>(acc, s.peer_ds[0], TILE_64X64_BYTES, s.peer_k[0], /*accumulate=*/true);
            cot_wgmma_wait<1>();
            if (lane == 0)
                cot_mbarrier_arrive(&s.ds_empty[ds.stage]);
            cot_mbarrier_wait(&s.dq_ready[0], parity);
            cot_wgmma_wait<0>();
            if (lane == 0) {
                cot_mbarrier_arrive_remote(peer_sent_ds_empty);
                if (steps_left == 1)
                    cot_mbarrier_arrive(&s.kv_empty);
            }
            if (!position.is_final) { /* the dq_writer adds the tile to memory */
                stage_dq_tile(s.dq[0], acc, &s.dq_full[0]);
                continue;
            }
            if (position.earlier_units > 0)
                add_staged_dq_tile(acc, s.dq[0]);
            __syncwarp();
            if (lane == 0)
                cot_mbarrier_arrive(&s.dq_full[0]);
            store_rows_16<E, false>((E *)c.dq.data + rows.offset + (TILE_COLUMNS == 64 ? 0 : 64 * rank), c.dq.stride[1],
                                    rows, row, 64, c.scale, acc);
            row += row_step;
        }
        if (step_count(w) == 0 && lane == 0)
            cot_mbarrier_arrive(&s.kv_empty);
    }
}

template <typename E, int TILE_COLUMNS, bool STORES_DQ>
static __device__ __forceinline__ void backward_pairs(const attention_bwd_mapped_call &mapped)
{
    pair_shared<TILE_COLUMNS> &s = *(pair_shared<TILE_COLUMNS> *)dynamic_shared_memory;
    static_assert(sizeof s <= ATTENTION_BWD_PAIRS_SHARED_BYTES(TILE_COLUMNS), "shared memory");
    const attention_bwd_call &c = mapped.call;
    const int rank = (int)cot_cluster_rank();
    if (threadIdx.x == 0) {
        init_barriers(s);
        cot_mbarrier_init(s.peer_ds_full, 1), cot_mbarrier_init(s.sent_ds_empty, 4);
        cot_mbarrier_init(s.pair_full, 1), cot_mbarrier_init(s.pair_empty, 1);
        for (int i = 0; i < ATTENTION_BWD_Q_STAGES; i++)
            cot_mbarrier_init(&s.peer_q_empty[i], 1);
        for (int i = 0; i < ATTENTION_BWD_DOUT_STAGES; i++)
            cot_mbarrier_init(&s.peer_dout_empty[i], 1);
        cot_mbarrier_init_fence();
    }
    cot_cluster_arrive();
    cot_cluster_wait();
    if (STORES_DQ)
        take_shares<E, TILE_COLUMNS>(mapped, s, rank);
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        cot_setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            load_pair_tiles<TILE_COLUMNS, STORES_DQ>(mapped, s, rank);
        } else if (threadIdx.x == WARP) {
            if (STORES_DQ || c.deterministic)
                write_pair_dq<TILE_COLUMNS, /*DETERMINISTIC=*/true, STORES_DQ>(mapped, s, rank);
            else
                write_pair_dq<TILE_COLUMNS, /*DETERMINISTIC=*/false, /*STORES_DQ=*/false>(mapped, s, rank);
        } else if (threadIdx.x == 2 * WARP) {
            send_ds<TILE_COLUMNS>(s, rank);
        }
    } else if (warpgroup == 1) {
        cot_setmaxnreg_dec<DQ_REGISTERS>();
        compute_pair_dq<E, TILE_COLUMNS, STORES_DQ>(c, s, rank);
    } else {
        cot_setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume<E, TILE_COLUMNS, TILE_COLUMNS, /*GENERAL=*/false, /*SOFTCAP=*/false>(c, s);
    }
    __syncwarp();
    cot_cluster_arrive();
    cot_cluster_wait(); /* the peer no longer accesses this block's shared memory */
}

#define INSTANCE(name, element, columns, stores_dq)                                      \
    extern "C" __global__ void __launch_bounds__(ATTENTION_BWD_WARPGROUPS *WARPGROUP, 1) \
        attention_bwd_##name(const __grid_constant__ attention_bwd_mapped_call mapped)   \
    {                                                                                    \
        backward_pairs<element, columns, stores_dq>(mapped);                             \
    }
#define INSTANCES(dtype, element)                          \
    INSTANCE(dtype##_sm90_d64_pairs, element, 64, false)   \
    INSTANCE(dtype##_sm90_d128_pairs, element, 128, false) \
    INSTANCE(dtype##_sm90_d128_pairs_stores_dq, element, 128, true)
INSTANCES(bf16, __nv_bfloat16)
INSTANCES(f16, __half)
INSTANCE(bf16_sm90_d64_pairs_stores_dq, __nv_bfloat16, 64, true) /* not in f16: ptxas 13.0 spills a register */
