/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_key_blocks_sm90.cu: the key-block kernel, the backward on Hopper for d and d_v up to 128. A thread
 * block keeps K, V, dK, dV of one key block (128 keys) on chip and loops over the query tiles that attend to it; dQ is
 * summed in memory. K and V stay in shared memory, dK and dV in registers.
 *
 * *Tile columns* (TILE_COLUMNS) are the width of a tile in shared memory: the larger of d and d_v, rounded up to 64 or
 * 128. *Used columns* (USED_COLUMNS) are those that the products and stores take: rounded up to 64, 96 or 128.
 * docs/kernels/glossary.md defines *final key block*.
 *
 * A thread block takes one key block after another (take_key_block). For each tile it loops over all query heads that
 * share the key-value head (the group). The first tiles of a key block are loaded while the previous one is computed.
 * The consumers store dK and dV while the dQ warpgroup works on the last tile of the key block. With head_split = 2, a
 * thread block takes one key block. The two thread blocks of a cluster divide the heads of the group, and add their dK
 * and dV at the end (reduce_over_heads).
 *
 * uses_pair_kernel says which calls run on attention_bwd_pairs_sm90.cu instead.
 *
 * A tile has 128 queries at 64 tile columns, and 64 queries at 128 tile columns. Formulas (f16 scales P, see dv_scale):
 *
 *   S^T = K Q^T    P = exp2(scale log2(e) S - lse_log2)    dP^T = V dO^T    dS = P (dP - delta)
 *   dV += P^T dO   dK += dS^T Q                            dQ += dS K
 *   lse_log2 = lse log2(e)    delta = sum over columns of dO O, minus dlse
 *
 * With softcap, dS also has the factor 1 - tanh^2, as in attention.h.
 * The stores multiply dK and dQ by the softmax scale, and in f16 dV by dv_scale.
 *
 *   warpgroup 0       producer: one thread (GENERAL: a warp) loads by TMA. dq_writers: three threads add finished dQ
 *                     tiles to memory
 *   warpgroup 1       dQ: one tile of 64 queries and 64 columns at a time
 *   warpgroups 2, 3   consumers: 64 keys each. P^T and dS^T are register operands of dV and dK. dS reaches dQ through
 *                     shared memory.
 *
 *   barrier         arrivals  who arrives       TMA bytes         phase ends when                     who waits
 *   kv full         1         producer          K, V              K, V and `work` of a key block are  consumers, dQ,
 *                                                                 in shared memory                    dq_writers
 *   kv empty        15        8 consumer warps, -                 nobody reads K and V any more, and  producer
 *                             4 dQ warps,                         the dq_writers have taken the work
 *                             3 dq_writers
 *   q full          1         producer          Q, lse_log2       a tile of Q is loaded               consumers
 *   q empty         8         consumer warps    -                 the dK product has read Q           producer
 *   dout full       1         producer          dO, scaled_delta  a tile of dO is loaded              consumers
 *   dout empty      8         consumer warps    -                 the dV product has read dO          producer
 *   ds full         8         consumer warps    -                 both halves of dS are stored        dQ
 *   ds empty        4         dQ warps          -                 the dQ product has read dS          consumers
 *   dq full         4         dQ warps          -                 a dQ tile is staged                 stage's dq_writer
 *   dq ready        1         stage's dq_writer sums of dQ, if    the stage may be used: it is free,  dQ
 *                                               it loads them     or (STORES_DQ) it holds the sums
 *   uncleared full  1         producer          a tile, or K, V   what needs clearing is loaded       producer
 *
 * The four parts of step j of a consumer. No wgmma is in flight at the start or at the end of a step:
 *   part 1   issue S_j^T and dK += dS_(j-1)^T Q_(j-1)
 *   part 2   wait for S, compute P; wait for dK, release Q_(j-1), pack P
 *   part 3   issue dP_j^T and dV += P_j^T dO_j
 *   part 4   wait for dP, compute dS and store it for dQ; wait for dV, release dO_j, pack dS
 * The arithmetic after a wait reads lse_log2 and scaled_delta. Some of their elements are loaded before the wait. The
 * number of free registers limits how many (LSE_PRELOADS, DELTA_PRELOADS).
 *
 * Deterministic mode: the key blocks of a query tile add their dQ tiles in a fixed order, by ascending or by
 * descending keys (dq_position_of). The first one stores its dQ tile instead, so that dq_accum need not be cleared. A
 * semaphore for each dQ tile counts the key blocks that have stored or added. The thread block of a key block waits
 * only for key blocks that were taken earlier.
 *
 * With STORES_DQ the final key block of a dQ tile does not add. Its dq_writer loads the sums of the other key blocks
 * into the stage, on the barrier `dq ready`. The dQ warpgroup adds its own dQ tile and stores dq. The kernel
 * `postprocess` is not launched.
 *
 * The versions are listed in docs/kernels/attention_bwd_key_blocks_hopper.md. STORES_DQ is set in _stores_dq and
 * _general_stores_dq, and GENERAL in _general, _general_stores_dq and _softcap. Only _stores_dq computes delta.
 *
 * In GENERAL versions a consumer skips a tile if no query of the tile attends to the consumer's keys (at the ends of a
 * window and at a diagonal). dQ then uses the other consumer's half of dS only. A tile may contain rows of other
 * sequences. Their products must be 0. Masking P to 0 is not enough, because 0 * NaN is NaN. The producer warp
 * therefore loads such a tile on the barrier `uncleared full`, clears those rows, and then arrives on the tile's full
 * barrier. */
#include "attention_bwd_delta_sm90.cuh"

constexpr uint32_t NO_UNIT_NUMBER = UINT32_MAX;

/* STORES_DQ: what the dQ warpgroup does with a dQ tile. The dq_writer of the tile's stage decides it, because the warpgroup
 * has few registers. It stores the action in shared memory before `dq ready` of the stage completes. */
enum attention_dq_action {
    STAGE_DQ,          /* stages the tile, and the dq_writer adds it to memory */
    STORE_DQ,          /* stores dq: the tile has no other key block */
    ADD_SUMS_STORE_DQ, /* adds the sums of the other key blocks, which are in the stage, and stores dq */
};

static __device__ __forceinline__ attention_dq_action dq_action_of(attention_dq_position position)
{
    return !position.is_final ? STAGE_DQ : position.earlier_units == 0 ? STORE_DQ : ADD_SUMS_STORE_DQ;
}

/* Returns the number of the thread block's next key block.
 *
 * With a counter and head_split = 1, the number comes from the counter. In deterministic mode a key block waits until
 * key blocks of lower numbers have added to dQ. The counter gives out the numbers in ascending order, and a thread
 * block computes its key blocks in that order. So the lowest unfinished key block waits for no other. The kernel cannot
 * deadlock, even if only some of its thread blocks are resident. STORES_DQ here is set in _stores_dq alone: take_shares has
 * taken the first number.
 *
 * In a cluster (head_split = 2), or without a counter, a thread block computes a single key block. The first call
 * returns own_unit_number, which backward_key_blocks has set. The second call returns NO_UNIT_NUMBER. It is beyond the
 * last key block, and ends the loop of the producer. A call has no counter if it has no query tiles, or in the
 * nondeterministic mode with head_split = 2. */
template <int TILE_COLUMNS, bool STORES_DQ>
static __device__ __forceinline__ uint32_t take_key_block(const attention_bwd_call &c,
                                                          key_block_shared<TILE_COLUMNS> &s)
{
    if (STORES_DQ) {
        const uint32_t first = s.own_unit_number;
        s.own_unit_number = NO_UNIT_NUMBER;
        return (first != NO_UNIT_NUMBER ? first : atomicAdd(c.unit_counter, 1)) - c.delta_shares;
    }
    if (c.unit_counter != nullptr && c.head_split == 1)
        return atomicAdd(c.unit_counter, 1);
    const uint32_t own = s.own_unit_number;
    s.own_unit_number = NO_UNIT_NUMBER;
    return own;
}

/* STORES_DQ: takes numbers from the counter, computes those that are shares (attention_bwd_delta_sm90.cuh), and leaves the
 * first other number in s.own_unit_number. Executed by all threads. */
template <typename E, int TILE_COLUMNS>
static __device__ __forceinline__ void take_shares(const attention_bwd_mapped_call &mapped,
                                                   key_block_shared<TILE_COLUMNS> &s)
{
    const attention_bwd_call &c = mapped.call;
    for (;;) {
        if (threadIdx.x == 0) {
            cot_griddepcontrol_wait(); /* until the counter is cleared */
            s.own_unit_number = atomicAdd(c.unit_counter, 1);
        }
        __syncthreads();
        const uint32_t number = s.own_unit_number;
        __syncthreads();
        if (number >= c.delta_shares)
            return;
        compute_delta<E, TILE_COLUMNS, ATTENTION_BWD_TILE_QUERIES(TILE_COLUMNS)>(mapped, number);
    }
}

/* With head_split = 2, a thread block of the cluster takes half of the group's heads. */
static __device__ __forceinline__ void split_heads(const attention_bwd_call &c, attention_work &w)
{
    w.query_heads /= (int)c.head_split;
    w.first_head += (int)(blockIdx.x % c.head_split) * w.query_heads;
}

/* The producer of the specialised versions. Executed by one thread. Stages and parities are computed from ring_step in
 * each step, because the thread has too few registers to keep them. load_tiles_general and load_pair_tiles have the
 * same order of waits and loads. */
template <int TILE_COLUMNS, bool STORES_DQ>
static __device__ void load_tiles(const attention_bwd_mapped_call &mapped, key_block_shared<TILE_COLUMNS> &s)
{
    constexpr int COLUMN_PANELS = TILE_COLUMNS / 64, QUERIES = key_block_shared<TILE_COLUMNS>::QUERIES;
    const attention_bwd_call &c = mapped.call;
    /* Waits for the call's earlier kernels, which clear the counter, and write lse_log2 and scaled_delta. */
    cot_griddepcontrol_wait();
    cot_fence_proxy_async_global();
    const int first_delta_row = (int)(c.B * c.H * c.tiles_per_head); /* scaled_delta follows all rows of lse_log2 */
    uint32_t units_taken = 0, ring_step = 0;
    for (;; units_taken++) {
        const uint32_t unit_number = take_key_block<TILE_COLUMNS, STORES_DQ>(c, s);
        if (unit_number >= c.unit_count) {
            s.work[units_taken % s.WORK_STAGES].first_key = END_OF_WORK;
            publish_work_only(s, units_taken);
            return;
        }
        attention_work w = work_of<QUERIES>(c, unit_number);
        split_heads(c, w);
        s.work[units_taken % s.WORK_STAGES] = w;
        prefetch_keys<TILE_COLUMNS>(mapped, w, w.first_key);
        if (STORES_DQ)
            wait_for_delta(c, w.b * (int)c.H + w.first_head);
        for (int step = 0; step < step_count(w); step++, ring_step++) {
            const uint32_t q_stage = ring_step % ATTENTION_BWD_Q_STAGES,
                           dout_stage = ring_step % ATTENTION_BWD_DOUT_STAGES;
            const attention_step step_info = step_of(c, w, step);
            const int tile = step_info.tile, head = w.first_head + step_info.head_in_group;
            const int statistics_row = (int)query_tile_base_of<false>(c, w, step_info.head_in_group) + tile;
            const uint32_t bytes = COLUMN_PANELS * s.Q_PANEL_BYTES + QUERIES * sizeof(float);
            cot_mbarrier_wait(&s.q_empty[q_stage], parity_of<ATTENTION_BWD_Q_STAGES>(ring_step) ^ 1);
            s.tile_index[q_stage] = tile;
            cot_mbarrier_arrive_expect(&s.q_full[q_stage], bytes);
            for (int panel = 0; panel < COLUMN_PANELS; panel++)
                cot_tma_load_4d(s.q[q_stage][panel], &mapped.q, panel * 64, tile * QUERIES, head, w.b,
                                &s.q_full[q_stage]);
            cot_tma_load_4d(s.lse_log2[q_stage], &mapped.statistics, 0, statistics_row, 0, 0, &s.q_full[q_stage]);
            cot_mbarrier_wait(&s.dout_empty[dout_stage], parity_of<ATTENTION_BWD_DOUT_STAGES>(ring_step) ^ 1);
            cot_mbarrier_arrive_expect(&s.dout_full[dout_stage], bytes);
            for (int panel = 0; panel < COLUMN_PANELS; panel++)
                cot_tma_load_4d(s.dout[dout_stage][panel], &mapped.dout, panel * 64, tile * QUERIES, head, w.b,
                                &s.dout_full[dout_stage]);
            cot_tma_load_4d(s.scaled_delta[dout_stage], &mapped.statistics, 0, first_delta_row + statistics_row, 0, 0,
                            &s.dout_full[dout_stage]);
            /* K and V are loaded in the first step only, after its Q and dO, so that the wait for `kv empty` (until the
             * previous key block is done) does not delay the first tile. */
            if (step > 0)
                continue;
            begin_loading_keys(s, units_taken, &s.kv_full);
            load_keys(mapped, s, w, w.first_key, &s.kv_full);
        }
        if (step_count(w) == 0)
            publish_work_only(s, units_taken);
    }
}

/* Waits for a tile that TMA loads, clears its rows from `row` on (those of other sequences), and arrives on `full`. */
template <int BYTES, int PANELS>
static __device__ __forceinline__ void wait_and_clear(uint64_t *uncleared_full, uint32_t &parity,
                                                      unsigned char (*panels)[BYTES], int row, uint64_t *full)
{
    cot_mbarrier_wait(uncleared_full, parity);
    parity ^= 1;
    attention_clear_rows<BYTES, PANELS>(panels, row);
    if (threadIdx.x == 0)
        cot_mbarrier_arrive(full);
}

/* The producer of the GENERAL versions. Differences from load_tiles:
 *   - a whole warp executes it, to clear rows of other sequences (needs_clearing, uncleared_full)
 *   - key blocks come from work_of_general, and their sequences begin at any row of the tensors
 *   - scaled_delta begins at a row that depends on the packing
 *   - `work` stays in shared memory
 *   - it does not store tile_index, because the consumers compute the tile */
template <int TILE_COLUMNS>
static __device__ void load_tiles_general(const attention_bwd_mapped_call &mapped, key_block_shared<TILE_COLUMNS> &s)
{
    constexpr int COLUMN_PANELS = TILE_COLUMNS / 64, QUERIES = key_block_shared<TILE_COLUMNS>::QUERIES;
    const attention_bwd_call &c = mapped.call;
    const bool leader = threadIdx.x == 0;
    cot_griddepcontrol_wait();
    cot_fence_proxy_async_global();
    /* scaled_delta follows all rows of lse_log2. With packed sequences their number is not B H tiles_per_head. */
    const int first_delta_row = (int)(c.scaled_delta - c.lse_log2) / QUERIES;
    uint32_t uncleared_parity = 0, units_taken = 0, ring_step = 0;
    for (;; units_taken++) {
        if (leader) {
            attention_work &next = s.work[units_taken % s.WORK_STAGES];
            if (!work_of_general<QUERIES>(c, take_key_block<TILE_COLUMNS, false>(c, s), next))
                next.first_key = END_OF_WORK;
            split_heads(c, next); /* also after the last key block, when no warp reads the heads */
        }
        __syncwarp();
        /* The threads have too few registers for a copy of w. Each step loads what it needs, all at once. */
        const attention_work &w = s.work[units_taken % s.WORK_STAGES];
        if (w.first_key == END_OF_WORK)
            break;
        if (leader)
            prefetch_keys<TILE_COLUMNS>(mapped, w, w.k_first_row + w.first_key);
        const int steps = step_count(w);
        for (int step = 0; step < steps; step++, ring_step++) {
            /* No lane may fall two uses of a stage behind the leader, because it waits for a parity. */
            __syncwarp();
            const uint32_t q_stage = ring_step % ATTENTION_BWD_Q_STAGES,
                           dout_stage = ring_step % ATTENTION_BWD_DOUT_STAGES;
            const attention_step step_info = step_of(c, w, step);
            const int tile = step_info.tile, head = w.first_head + step_info.head_in_group, b = w.b;
            const int statistics_row = (int)query_tile_base_of<true>(c, w, step_info.head_in_group) + tile;
            const uint32_t bytes = COLUMN_PANELS * s.Q_PANEL_BYTES + QUERIES * sizeof(float);
            /* No clearing is needed if all rows of the tile are used, or if the used rows end at the tensor's last row:
             * TMA then fills the rest with zeros. */
            const bool needs_clearing = !(w.q_first_row + w.used_q == c.sequences.rows_q || tile < w.used_q / QUERIES);
            const int query_row = w.q_first_row + tile * QUERIES, used = w.used_q - tile * QUERIES;
            uint64_t *q_barrier = needs_clearing ? s.uncleared_full : &s.q_full[q_stage];
            uint64_t *dout_barrier = needs_clearing ? s.uncleared_full : &s.dout_full[dout_stage];
            cot_mbarrier_wait(&s.q_empty[q_stage], parity_of<ATTENTION_BWD_Q_STAGES>(ring_step) ^ 1);
            if (leader) {
                cot_mbarrier_arrive_expect(q_barrier, bytes);
                for (int panel = 0; panel < COLUMN_PANELS; panel++)
                    cot_tma_load_4d(s.q[q_stage][panel], &mapped.q, panel * 64, query_row, head, b, q_barrier);
                cot_tma_load_4d(s.lse_log2[q_stage], &mapped.statistics, 0, statistics_row, 0, 0, q_barrier);
            }
            if (needs_clearing)
                wait_and_clear<key_block_shared<TILE_COLUMNS>::Q_PANEL_BYTES, COLUMN_PANELS>(
                    s.uncleared_full, uncleared_parity, s.q[q_stage], used, &s.q_full[q_stage]);
            cot_mbarrier_wait(&s.dout_empty[dout_stage], parity_of<ATTENTION_BWD_DOUT_STAGES>(ring_step) ^ 1);
            if (leader) {
                cot_mbarrier_arrive_expect(dout_barrier, bytes);
                for (int panel = 0; panel < COLUMN_PANELS; panel++)
                    cot_tma_load_4d(s.dout[dout_stage][panel], &mapped.dout, panel * 64, query_row, head, b,
                                    dout_barrier);
                cot_tma_load_4d(s.scaled_delta[dout_stage], &mapped.statistics, 0, first_delta_row + statistics_row, 0,
                                0, dout_barrier);
            }
            if (needs_clearing)
                wait_and_clear<key_block_shared<TILE_COLUMNS>::Q_PANEL_BYTES, COLUMN_PANELS>(
                    s.uncleared_full, uncleared_parity, s.dout[dout_stage], used, &s.dout_full[dout_stage]);
            /* As in load_tiles. */
            if (step > 0)
                continue;
            /* As for the queries above. */
            const bool keys_need_clearing =
                !(w.first_key + KEYS <= w.used_k || w.k_first_row + w.used_k == c.sequences.rows_k);
            if (leader) {
                uint64_t *kv_barrier = keys_need_clearing ? s.uncleared_full : &s.kv_full;
                begin_loading_keys(s, units_taken, kv_barrier);
                load_keys(mapped, s, w, w.k_first_row + w.first_key, kv_barrier);
            }
            static_assert(offsetof(key_block_shared<TILE_COLUMNS>, v) == sizeof s.k,
                          "V follows K: one call clears both");
            if (keys_need_clearing)
                wait_and_clear<2 * TILE_64X64_BYTES, 2 * COLUMN_PANELS>(s.uncleared_full, uncleared_parity,
                                                                        (unsigned char(*)[2 * TILE_64X64_BYTES]) s.k,
                                                                        w.used_k - w.first_key, &s.kv_full);
        }
        if (leader && steps == 0)
            publish_work_only(s, units_taken);
    }
    if (leader)
        publish_work_only(s, units_taken);
}

/* Whether this dQ tile of a step has only 32 columns: with 96 used columns, each one of odd number. */
template <int USED_COLUMNS> static __device__ __forceinline__ bool is_half_dq_tile(int dq_tile_in_step)
{
    return USED_COLUMNS == 96 && dq_tile_in_step % 2 == 1;
}

/* The dq_writer of one dQ stage adds the dQ tiles in this stage to memory. Each stage has its own dq_writer: in
 * deterministic mode it waits until its sums are in memory before it increments the semaphore, which takes about one
 * step.
 *
 * If STORES_DQ, the final key block of a dQ tile adds nothing to memory (is_final). Its dq_writer loads the sums of the
 * other key blocks into the stage. The dQ warpgroup adds its own tile to them, and stores dq.
 *
 * The dQ warpgroup waits on `dq ready` of the stage once for each dQ tile, so each dQ tile needs exactly one arrival.
 * Who arrives, and when:
 *   (1) The load of the sums, if the tile needs it (loads_sums): this key block is the tile's final one, and other key
 *       blocks have added to the tile.
 *   (2) The dq_writer at the end of the previous iteration (arrived_early), if it has added the previous dQ tile to
 *       memory, and this one needs no load.
 *   (3) Else the dq_writer at the start of this iteration: the first dQ tile of a key block, or the dQ tile after one
 *       that the dQ warpgroup has stored as dq.
 *
 *   dq_tile_in_unit   number of the dQ tile in the key block: step * DQ_TILES_PER_QUERY_TILE + dq_tile_in_step. On
 *                     return: that of the stage's first dQ tile in the next key block
 *   parity            of `dq full` for the stage's next dQ tile
 *   accum_dq_tile     index of the dQ tile in dq_accum */
template <int TILE_COLUMNS, int USED_COLUMNS, bool GENERAL, bool DETERMINISTIC, bool STORES_DQ>
static __device__ __forceinline__ void write_dq_of_key_block(const attention_bwd_mapped_call &mapped,
                                                             key_block_shared<TILE_COLUMNS> &s, const attention_work &w,
                                                             int stage, int &dq_tile_in_unit, uint32_t &parity)
{
    constexpr int DQ_TILES_PER_QUERY_TILE = key_block_shared<TILE_COLUMNS>::DQ_TILES_PER_QUERY_TILE;
    const attention_bwd_call &c = mapped.call;
    const int end = step_count(w) * DQ_TILES_PER_QUERY_TILE;
    const auto position_of = [&](int index) {
        const int tile = tile_of(c, w, index / DQ_TILES_PER_QUERY_TILE);
        attention_dq_position position =
            DETERMINISTIC ? dq_position_of<key_block_shared<TILE_COLUMNS>::QUERIES, GENERAL>(c, w, tile)
                          : NOT_FIRST_NOT_FINAL;
        position.is_final = STORES_DQ && position.is_final; /* without STORES_DQ every key block adds */
        return position;
    };
    bool arrived_early = false; /* whether the dq_writer has arrived for the dQ tile of the next iteration */
    for (; dq_tile_in_unit < end; dq_tile_in_unit += ATTENTION_BWD_DQ_STAGES, parity ^= 1) {
        const attention_step step_info = step_of(c, w, dq_tile_in_unit / DQ_TILES_PER_QUERY_TILE);
        const int dq_tile_in_step = dq_tile_in_unit % DQ_TILES_PER_QUERY_TILE;
        const int64_t accum_dq_tile =
            (query_tile_base_of<GENERAL>(c, w, step_info.head_in_group) + step_info.tile) * DQ_TILES_PER_QUERY_TILE +
            dq_tile_in_step;
        const attention_dq_position position = position_of(dq_tile_in_unit);
        const bool loads_sums = position.is_final && position.earlier_units > 0;
        if (STORES_DQ && !arrived_early)
            s.dq_action[stage] = dq_action_of(position);
        if (!loads_sums && !arrived_early) /* (3), before the wait, so that the dQ warpgroup may stage the dQ tile */
            cot_mbarrier_arrive(&s.dq_ready[stage]);
        if (DETERMINISTIC && position.earlier_units > 0)
            wait_for_earlier_units(c, accum_dq_tile, position.earlier_units);
        if (loads_sums) { /* (1) */
            cot_mbarrier_arrive_expect(&s.dq_ready[stage], sizeof s.dq[stage]);
            cot_tma_load_4d(s.dq[stage], &mapped.dq_accum, 0,
                            (int)(accum_dq_tile * (ATTENTION_BWD_DQ_TILE_FLOATS / 64)), 0, 0, &s.dq_ready[stage]);
        }
        cot_mbarrier_wait(&s.dq_full[stage], parity);
        arrived_early = false;
        if (position.is_final) /* the dQ warpgroup stores dq, so there is nothing to add */
            continue;
        if (is_half_dq_tile<USED_COLUMNS>(dq_tile_in_step))
            add_dq_tile</*HALF=*/true>(c, accum_dq_tile, s.dq[stage], position.earlier_units == 0);
        else
            add_dq_tile(c, accum_dq_tile, s.dq[stage], position.earlier_units == 0);
        if (dq_tile_in_unit + ATTENTION_BWD_DQ_STAGES < end) {
            const attention_dq_position next = position_of(dq_tile_in_unit + ATTENTION_BWD_DQ_STAGES);
            arrived_early = !next.is_final || next.earlier_units == 0;
            if (STORES_DQ && arrived_early)
                s.dq_action[stage] = dq_action_of(next);
        }
        if (arrived_early) /* (2), before release_next_unit, which waits until the sums are in memory */
            cot_mbarrier_arrive(&s.dq_ready[stage]);
        if (DETERMINISTIC)
            release_next_unit(c, accum_dq_tile);
    }
    dq_tile_in_unit -= end;
}

template <int TILE_COLUMNS, int USED_COLUMNS, bool GENERAL, bool DETERMINISTIC, bool STORES_DQ>
static __device__ void write_dq(const attention_bwd_mapped_call &mapped, key_block_shared<TILE_COLUMNS> &s, int stage)
{
    uint32_t parity = 0;
    int dq_tile_in_unit = stage;
    cot_griddepcontrol_wait(); /* until dq_accum and the semaphores are cleared */
    cot_fence_proxy_async_global();
    for (uint32_t units_taken = 0;; units_taken++) {
        cot_mbarrier_wait(&s.kv_full, parity_of<1>(units_taken));
        const attention_work w = s.work[units_taken % s.WORK_STAGES];
        cot_mbarrier_arrive(&s.kv_empty);
        if (w.first_key == END_OF_WORK)
            break;
        write_dq_of_key_block<TILE_COLUMNS, USED_COLUMNS, GENERAL, DETERMINISTIC, STORES_DQ>(mapped, s, w, stage,
                                                                                             dq_tile_in_unit, parity);
    }
    cot_bulk_wait();
}

/* Computes a dQ tile of a step, dQ = dS K, over the keys of consumers first_consumer to last_consumer. Waits on `dq
 * ready` of the stage while the products run.
 *   acc               N sums per thread. The 128 threads have the first 2 N columns of 64 queries
 *   ds_stage          the stage of dS
 *   dq_tile_in_step   i * COLUMN_PANELS + j: queries 64 i to 64 i + 63 of the tile, panel j
 *   ready             `dq ready` of the stage of the dQ tile
 *   parity            of `ready` */
template <typename E, int TILE_COLUMNS, int N>
static __device__ __forceinline__ void compute_dq_tile(key_block_shared<TILE_COLUMNS> &s, float (&acc)[N],
                                                       uint32_t ds_stage, int dq_tile_in_step, int first_consumer,
                                                       int last_consumer, uint64_t *ready, uint32_t parity)
{
    cot_wgmma_fence();
#pragma unroll
    for (int consumer = first_consumer; consumer <= last_consumer; consumer++) {
        const uint64_t a = cot_wgmma_k_major(
            cot_shared_address(s.ds[ds_stage][consumer] + dq_tile_in_step / s.COLUMN_PANELS * TILE_64X64_BYTES));
        const uint64_t b =
            cot_wgmma_mn_major(cot_shared_address(s.k[dq_tile_in_step % s.COLUMN_PANELS][consumer]), TILE_64X64_BYTES);
#pragma unroll
        for (int k = 0; k < 4; k++)
            cot_wgmma<E, false, true>(acc, a + k * COT_WGMMA_K_STEP, b + k * COT_WGMMA_MN_STEP,
                                      consumer > first_consumer || k > 0);
    }
    cot_wgmma_commit();
    cot_mbarrier_wait(ready, parity);
    cot_wgmma_wait<0>();
}

/* The dQ warpgroup stages dQ tiles for the dq_writers. If STORES_DQ and this is the tile's final key block, the
 * warpgroup adds the sums that the writer has loaded, and stores dq. */
template <typename E, int TILE_COLUMNS, int USED_COLUMNS, bool GENERAL, bool STORES_DQ>
static __device__ __forceinline__ void compute_dq_of_key_block(const attention_bwd_call &c,
                                                               key_block_shared<TILE_COLUMNS> &s,
                                                               const attention_work &w,
                                                               cot_pipeline_state<ATTENTION_BWD_DS_STAGES> &ds,
                                                               cot_pipeline_state<ATTENTION_BWD_DQ_STAGES> &dq)
{
    constexpr int DQ_TILES_PER_QUERY_TILE = key_block_shared<TILE_COLUMNS>::DQ_TILES_PER_QUERY_TILE,
                  QUERIES = key_block_shared<TILE_COLUMNS>::QUERIES;
    const int lane = threadIdx.x % WARP;
    float acc[32];
    const int steps = step_count(w);
    for (int step = 0; step < steps; step++, ds.next()) {
        /* STORES_DQ: no GQA, so a step is a tile, and no division is needed. */
        const int tile = STORES_DQ ? w.first_tile + w.tile_direction * step : tile_of(c, w, step);
        /* Consumer 0 has the lower 64 keys, consumer 1 the upper 64. A consumer stores no dS of a
         * tile that it skips. */
        const bool consumer_0_attends = !GENERAL || !fully_masked<QUERIES>(w, tile, w.first_key);
        const bool consumer_1_attends = !GENERAL || !fully_masked<QUERIES>(w, tile, w.first_key + 64);
        cot_mbarrier_wait(&s.ds_full[ds.stage], ds.parity);
        for (int dq_tile_in_step = 0; dq_tile_in_step < DQ_TILES_PER_QUERY_TILE; dq_tile_in_step++, dq.next()) {
            uint64_t *ready = &s.dq_ready[dq.stage];
            /* Releases dS and the keys after the last product that reads them. */
            const auto compute_and_release = [&](auto &sums) {
                if (consumer_0_attends && consumer_1_attends) {
                    compute_dq_tile<E, TILE_COLUMNS>(s, sums, ds.stage, dq_tile_in_step, 0, 1, ready, dq.parity);
                } else if (consumer_0_attends || consumer_1_attends) {
                    const int consumer = consumer_1_attends ? 1 : 0;
                    compute_dq_tile<E, TILE_COLUMNS>(s, sums, ds.stage, dq_tile_in_step, consumer, consumer, ready,
                                                     dq.parity);
                } else {
                    cot_mbarrier_wait(ready, dq.parity);
#pragma unroll
                    for (int i = 0; i < (int)(sizeof sums / sizeof sums[0]); i++)
                        sums[i] = 0.0f;
                }
                if (dq_tile_in_step == DQ_TILES_PER_QUERY_TILE - 1 && lane == 0) {
                    cot_mbarrier_arrive(&s.ds_empty[ds.stage]);
                    if (step == steps - 1)
                        cot_mbarrier_arrive(&s.kv_empty);
                }
            };
            if (is_half_dq_tile<USED_COLUMNS>(dq_tile_in_step)) {
                float half[16];
                compute_and_release(half);
                stage_dq_tile(s.dq[dq.stage], half, &s.dq_full[dq.stage]);
                continue;
            }
            compute_and_release(acc);
            int action = STAGE_DQ;
            if (STORES_DQ) { /* Lane 0 reads: racecheck does not know that the other lanes read before it arrives. */
                if (lane == 0)
                    action = s.dq_action[dq.stage];
                action = __shfl_sync(0xffffffffu, action, 0);
            }
            if (action == STAGE_DQ) {
                stage_dq_tile(s.dq[dq.stage], acc, &s.dq_full[dq.stage]);
                continue;
            }
            if (action == ADD_SUMS_STORE_DQ)
                add_staged_dq_tile(acc, s.dq[dq.stage]);
            __syncwarp();
            if (lane == 0)
                cot_mbarrier_arrive(&s.dq_full[dq.stage]);
            /* The only query head of the group is number 0. */
            const int row = tile * QUERIES + dq_tile_in_step / s.COLUMN_PANELS * 64 +
                            threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
            const output_rows rows = query_output_rows<GENERAL>(c, w, 0);
            store_rows_16<E, false>((E *)c.dq.data + rows.offset + dq_tile_in_step % s.COLUMN_PANELS * 64,
                                    c.dq.stride[1], rows, row, 64, c.scale, acc);
        }
    }
    if (steps == 0 && lane == 0)
        cot_mbarrier_arrive(&s.kv_empty);
}

template <typename E, int TILE_COLUMNS, int USED_COLUMNS, bool GENERAL, bool STORES_DQ>
static __device__ void compute_dq(const attention_bwd_call &c, key_block_shared<TILE_COLUMNS> &s)
{
    cot_pipeline_state<ATTENTION_BWD_DS_STAGES> ds;
    cot_pipeline_state<ATTENTION_BWD_DQ_STAGES> dq;
    for (uint32_t units_taken = 0;; units_taken++) {
        cot_mbarrier_wait(&s.kv_full, parity_of<1>(units_taken));
        const attention_work &w = s.work[units_taken % s.WORK_STAGES];
        if (w.first_key == END_OF_WORK)
            return;
        compute_dq_of_key_block<E, TILE_COLUMNS, USED_COLUMNS, GENERAL, STORES_DQ>(c, s, w, ds, dq);
    }
}

template <typename E, int TILE_COLUMNS, int USED_COLUMNS, bool GENERAL, bool SOFTCAP, bool STORES_DQ>
static __device__ __forceinline__ void backward_key_blocks(const attention_bwd_mapped_call &mapped)
{
    key_block_shared<TILE_COLUMNS> &s = *(key_block_shared<TILE_COLUMNS> *)dynamic_shared_memory;
    static_assert(sizeof s <= ATTENTION_BWD_KEY_BLOCKS_SHARED_BYTES(TILE_COLUMNS),
                  "larger than the shared memory that the host allots");
    const attention_bwd_call &c = mapped.call;
    uint32_t unit_number = blockIdx.x;
    if (c.head_split > 1) {
        unit_number = take_key_block_of_cluster(c, s.ticket);
        if (GENERAL) {
            cot_griddepcontrol_wait(); /* until seqlens is written */
            /* Beyond the last key block. Both thread blocks of a cluster take part in the reduction, or none. */
            if (unit_number >= (uint32_t)c.sequences.seqlens[c.sequences.count].key_blocks_before * (uint32_t)c.Hkv)
                return;
        }
    }
    if (threadIdx.x == 0) {
        s.own_unit_number = unit_number;
        init_barriers(s);
        cot_mbarrier_init(s.uncleared_full, 1);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    if (STORES_DQ && !GENERAL)
        take_shares<E, TILE_COLUMNS>(mapped, s);
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        cot_setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (GENERAL && threadIdx.x < WARP)
            load_tiles_general<TILE_COLUMNS>(mapped, s);
        else if (!GENERAL && threadIdx.x == 0)
            load_tiles<TILE_COLUMNS, STORES_DQ>(mapped, s);
        else if (threadIdx.x % WARP == 0 && threadIdx.x <= ATTENTION_BWD_DQ_STAGES * WARP) {
            const int stage = threadIdx.x / WARP - 1;
            if (STORES_DQ || c.deterministic)
                write_dq<TILE_COLUMNS, USED_COLUMNS, GENERAL, /*DETERMINISTIC=*/true, STORES_DQ>(mapped, s, stage);
            else
                write_dq<TILE_COLUMNS, USED_COLUMNS, GENERAL, /*DETERMINISTIC=*/false, STORES_DQ>(mapped, s, stage);
        }
        await_reduction(c);
    } else if (warpgroup == 1) {
        cot_setmaxnreg_dec<DQ_REGISTERS>();
        compute_dq<E, TILE_COLUMNS, USED_COLUMNS, GENERAL, STORES_DQ>(c, s);
        await_reduction(c);
    } else {
        cot_setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume<E, TILE_COLUMNS, USED_COLUMNS, GENERAL, SOFTCAP>(c, s);
    }
}

#define INSTANCE(name, element, used_columns, version)                                                        \
    extern "C" __global__ void __launch_bounds__(ATTENTION_BWD_WARPGROUPS *WARPGROUP, 1)                      \
        attention_bwd_##name(const __grid_constant__ attention_bwd_mapped_call mapped)                        \
    {                                                                                                         \
        backward_key_blocks<element, (used_columns + 63) / 64 * 64, used_columns, version >= VERSION_GENERAL, \
                            version == VERSION_SOFTCAP,                                                       \
                            version == VERSION_STORES_DQ || version == VERSION_GENERAL_STORES_DQ>(mapped);    \
    }
#define INSTANCES(dtype, element)                                                          \
    INSTANCE(dtype##_sm90_d64, element, 64, VERSION_SPECIALISED)                           \
    INSTANCE(dtype##_sm90_d96, element, 96, VERSION_SPECIALISED)                           \
    INSTANCE(dtype##_sm90_d128, element, 128, VERSION_SPECIALISED)                         \
    INSTANCE(dtype##_sm90_d64_stores_dq, element, 64, VERSION_STORES_DQ)                   \
    INSTANCE(dtype##_sm90_d128_stores_dq, element, 128, VERSION_STORES_DQ)                 \
    INSTANCE(dtype##_sm90_d64_general, element, 64, VERSION_GENERAL)                       \
    INSTANCE(dtype##_sm90_d96_general, element, 96, VERSION_GENERAL)                       \
    INSTANCE(dtype##_sm90_d128_general, element, 128, VERSION_GENERAL)                     \
    INSTANCE(dtype##_sm90_d128_general_stores_dq, element, 128, VERSION_GENERAL_STORES_DQ) \
    INSTANCE(dtype##_sm90_d64_softcap, element, 64, VERSION_SOFTCAP)                       \
    INSTANCE(dtype##_sm90_d128_softcap, element, 128, VERSION_SOFTCAP)
INSTANCES(bf16, __nv_bfloat16)
INSTANCES(f16, __half)
INSTANCE(bf16_sm90_d64_general_stores_dq, __nv_bfloat16, 64, VERSION_GENERAL_STORES_DQ) /* not f16: ptxas spills */
