/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_common_sm90.cuh: device code that the three main kernels of the backward for Hopper share: the work of
 * a unit, wgmma products of 64 rows, masks, and additions to dQ. attention_bwd_store.cuh has the stores of dQ, dK and
 * dV. The layout of accumulators is in wgmma.cuh and, with a picture, in docs/kernels/gpu_basics.md.
 *
 * A *key block* is 128 keys of a key-value head. A *block* alone is a thread block. A *unit* is what a thread block or
 * a cluster takes at a time: a key block, in the pair kernel a pair of key blocks. It has UNIT_KEYS keys, 128 or 256.
 * unit_number numbers the units of the call, in the order in which thread blocks take them.
 *
 * Names in these kernels: `mapped` are the arguments of the launch (attention_bwd_mapped_call: tensor maps and c), c is
 * the call, w the work of the unit, s the shared memory. `statistics` are lse_log2 and scaled_delta, one row for each
 * query tile. `head` alone is a query head. `kv_head` is a key-value head of one batch element, `batch_kv_head` one of
 * all batch elements: b Hkv + kv_head. */
#ifndef COT_ATTENTION_BWD_COMMON_SM90_CUH
#define COT_ATTENTION_BWD_COMMON_SM90_CUH

#include "attention_bwd_store.cuh"
#include "attention_maps.h"
#include "attention_varlen.cuh"
#include "attention_softcap.cuh"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/bulk.cuh"
#include "../../../cuda/device/cluster.cuh"
#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/quad.cuh"
#include "../../../cuda/device/wgmma.cuh"

/* The versions of a kernel: the top of attention_bwd_key_blocks_sm90.cu explains them. The order matters: the template
 * parameter GENERAL is `version >= VERSION_GENERAL`. So GENERAL is true in _general, _general_stores_dq and _softcap, as is
 * `general` of the plan on the host. The suffix _general, VERSION_GENERAL and FIRST_GENERAL exclude the other two. */
enum attention_bwd_version {
    VERSION_SPECIALISED,
    VERSION_STORES_DQ,
    VERSION_GENERAL,
    VERSION_GENERAL_STORES_DQ,
    VERSION_SOFTCAP
};

enum { KEYS = ATTENTION_BWD_KEYS, WARPGROUP = 128, WARP = 32, TILE_64X64_BYTES = 64 * 64 * 2 /* of 16 bits */ };

constexpr uint32_t PLUS_INFINITY_BITS = 0x7f800000, MINUS_INFINITY_BITS = 0xff800000; /* of a float32 */

extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];

/* Two numbers of a step:
 *   step        counted within its unit: step_of gives its query head and tile
 *   ring_step   running total of the thread block, over all its units: not taken modulo the stages. In the wide kernel,
 *               whose thread blocks compute one unit, it equals `step`
 *
 * A step uses stage ring_step % STAGES of a ring. parity_of is the parity with which it waits on `full` of the stage: 0
 * in the first use of the stage, 1 in the second, 0 in the third. With the opposite parity, it waits on `empty` for the
 * end of the stage's previous use. docs/kernels/gpu_basics.md has an example. */
template <int STAGES> static __device__ __forceinline__ uint32_t parity_of(uint32_t ring_step)
{
    return ring_step / STAGES & 1;
}

/* The work of a unit: `tile_count` query tiles. The first is first_tile, and tile_direction is 1 (ascending) or -1
 * (descending). Each tile is taken for the query heads first_head .. first_head + query_heads - 1. These are the heads
 * that share key-value head kv_head of batch element b (the group), or with head_split = 2 half of them. */
struct attention_work {
    int b, kv_head, first_head, query_heads, first_key, tile_count, first_tile, tile_direction;
    /* Only if GENERAL: the sequence of the keys, as rows of the tensors' views. used_q, used_k: the rows below
     * seqused. */
    int q_first_row, used_q, k_first_row, k_rows, used_k;
    /* Query i attends to keys i + first_visible_offset .. i + last_visible_offset. */
    int first_visible_offset, last_visible_offset;
    int sequence_first_tile; /* index of the sequence's first query tile, among all query tiles of the call */
    int tiles_per_head;      /* query tiles of the sequence, for one head */
    bool keys_ascend;        /* only if not GENERAL: the order of units, see work_of */
};

/* Sets the query tiles [begin, end), which may be empty. */
static __device__ __forceinline__ void set_tiles(attention_work &w, int begin, int end, bool descending_tiles)
{
    w.tile_count = max(end - begin, 0);
    w.first_tile = descending_tiles ? end - 1 : begin;
    w.tile_direction = descending_tiles ? -1 : 1;
}

/* The work of unit unit_number, where all sequences have the same length. Units are numbered section by section. A
 * section has c.heads_per_section key-value heads, from first_kv_head on. The numbers of a section run over the first
 * unit of each head, then over the second of each, and so on. order_in_head is 0 for the first unit of a head.
 *
 * From section c.first_ascending_section on, the keys ascend, and with c.descending_tiles the tiles of a unit descend.
 * In the sections before, the keys descend and the tiles ascend. docs/kernels/attention_bwd_order.md has the reasons
 * and an example. */
template <int QUERIES, int UNIT_KEYS = KEYS>
static __device__ __forceinline__ attention_work work_of(const attention_bwd_call &c, unsigned unit_number)
{
    const unsigned batch_kv_heads = (unsigned)(c.B * c.Hkv),
                   units_per_head = (unsigned)((c.Tk + UNIT_KEYS - 1) / UNIT_KEYS);
    const unsigned section = unit_number / (units_per_head * (unsigned)c.heads_per_section),
                   first_kv_head = section * (unsigned)c.heads_per_section;
    const unsigned section_kv_heads = min((unsigned)c.heads_per_section, batch_kv_heads - first_kv_head),
                   number_in_section = unit_number - first_kv_head * units_per_head;
    const unsigned batch_kv_head = first_kv_head + number_in_section % section_kv_heads;
    attention_work w;
    w.b = (int)(batch_kv_head / (unsigned)c.Hkv);
    w.kv_head = (int)(batch_kv_head % (unsigned)c.Hkv);
    w.query_heads = (int)(c.H / c.Hkv);
    w.first_head = w.kv_head * w.query_heads;
    w.keys_ascend = section >= (unsigned)c.first_ascending_section;
    const unsigned order_in_head = number_in_section / section_kv_heads;
    w.first_key = (int)(w.keys_ascend ? order_in_head : units_per_head - 1 - order_in_head) * UNIT_KEYS;
    const int64_t first_query = w.first_key - c.diagonal;
    const int64_t begin = c.causal && first_query > 0 ? first_query / QUERIES : 0;
    /* first_query >= Tq: no query attends to the first key, so there are no tiles. */
    set_tiles(w, first_query < c.Tq || !c.causal ? (int)begin : (int)c.tiles_per_head, (int)c.tiles_per_head,
              w.keys_ascend && c.descending_tiles);
    return w;
}

/* The order of all sections in GENERAL versions. True: the keys ascend, and the tiles of a unit descend. False: the
 * reverse. */
static __device__ __forceinline__ bool keys_ascend_general(const attention_bwd_call &c)
{
    return c.first_ascending_section == 0;
}

/* As work_of, for sequences of different lengths and for windows. A unit is a key block here. Units are numbered
 * sequence by sequence, and inside a sequence as in work_of, in the order of keys_ascend_general. Returns false if
 * there is no unit of this number: c.unit_count is only an upper bound for these calls. */
template <int QUERIES>
static __device__ __forceinline__ bool work_of_general(const attention_bwd_call &c, unsigned unit_number,
                                                       attention_work &w)
{
    const attention_seqlen_info *seqlens = c.sequences.seqlens;
    const unsigned kv_heads = (unsigned)c.Hkv;
    if (unit_number >= (unsigned)seqlens[c.sequences.count].key_blocks_before * kv_heads)
        return false;
    const int sequence =
        attention_find_sequence(c.sequences, &attention_seqlen_info::key_blocks_before, kv_heads, unit_number);
    const attention_seqlen_info sequence_info = seqlens[sequence];
    const unsigned units_per_head =
        (unsigned)(seqlens[sequence + 1].key_blocks_before - sequence_info.key_blocks_before);
    const unsigned number_in_sequence = unit_number - (unsigned)sequence_info.key_blocks_before * kv_heads;
    const unsigned section = number_in_sequence / (units_per_head * (unsigned)c.heads_per_section),
                   first_kv_head = section * (unsigned)c.heads_per_section;
    const unsigned section_kv_heads = min((unsigned)c.heads_per_section, kv_heads - first_kv_head),
                   number_in_section = number_in_sequence - first_kv_head * units_per_head;
    w.b = c.sequences.packed ? 0 : sequence;
    w.kv_head = (int)(first_kv_head + number_in_section % section_kv_heads);
    w.query_heads = (int)(c.H / c.Hkv);
    w.first_head = w.kv_head * w.query_heads;
    const unsigned order_in_head = number_in_section / section_kv_heads;
    w.first_key = (int)(keys_ascend_general(c) ? order_in_head : units_per_head - 1 - order_in_head) * KEYS;
    w.q_first_row = sequence_info.q_first_row;
    w.used_q = sequence_info.used_q;
    w.k_first_row = sequence_info.k_first_row;
    w.k_rows = sequence_info.k_rows;
    w.used_k = sequence_info.used_k;
    w.first_visible_offset =
        attention_clamp(sequence_info.diagonal - c.left, -ATTENTION_UNBOUNDED_32, ATTENTION_UNBOUNDED_32);
    w.last_visible_offset =
        attention_clamp(sequence_info.diagonal + c.right, -ATTENTION_UNBOUNDED_32, ATTENTION_UNBOUNDED_32);
    w.sequence_first_tile = sequence_info.tiles_before * (int)c.H;
    w.tiles_per_head = seqlens[sequence + 1].tiles_before - sequence_info.tiles_before;
    /* From the first query that attends to the first key to the last query that attends to the last key. */
    const int first_query = max(w.first_key - w.last_visible_offset, 0);
    const int last_query = min(min(w.first_key + KEYS, w.used_k) - 1 - w.first_visible_offset, w.used_q - 1);
    /* empty: no query attends to any of the keys, so there are no tiles. */
    const bool empty = w.first_key >= w.used_k || last_query < first_query;
    set_tiles(w, first_query / QUERIES, empty ? 0 : last_query / QUERIES + 1, keys_ascend_general(c));
    return true;
}

/* In shared memory: where a cluster receives the number of its unit, and the barrier that completes when the number has
 * arrived. `work` later takes the same memory, because at 64 tile columns no other is free. PTX requires mbarrier.inval
 * before any other use of this memory. The kernels leave it out, because ptxas 13.0 then spills registers in 7 of the
 * 20 key-block kernels. They rely on the hardware, not on PTX: the memory is reused only after all threads have waited
 * for the barrier's only phase, and it is never an mbarrier again. Check this for each new architecture. */
struct cluster_ticket {
    uint4 unit_number; /* first word: the number */
    uint64_t full;
};

/* The number of the key block that the two thread blocks of a cluster take together. Thread block 0 takes it from the
 * counter, and sends it to the tickets of both. The counter ensures that a key block waits only for key blocks that
 * were taken earlier. Without a counter, the number is the index of the cluster. All threads of the cluster execute
 * this function, once, because it contains a cluster barrier. */
static __device__ __forceinline__ uint32_t take_key_block_of_cluster(const attention_bwd_call &c,
                                                                     cluster_ticket &ticket)
{
    const bool has_counter = c.unit_counter != nullptr,
               is_taker = has_counter && blockIdx.x % 2 == 0 && threadIdx.x == 0;
    uint32_t unit_number = 0;
    if (has_counter && threadIdx.x == 0) {
        cot_mbarrier_init(&ticket.full, 1);
        cot_mbarrier_init_fence();
        cot_mbarrier_arrive_expect(&ticket.full, sizeof ticket.unit_number);
    }
    __syncwarp();
    cot_cluster_arrive();
    if (is_taker) {
        cot_griddepcontrol_wait(); /* until the counter is cleared */
        unit_number = atomicAdd(c.unit_counter, 1);
    }
    __syncwarp();
    cot_cluster_wait(); /* the peer's barrier is initialised */
    if (!has_counter)
        return blockIdx.x / 2;
    if (is_taker)
        for (uint32_t rank = 0; rank < 2; rank++)
            cot_store_async(cot_mapa(cot_shared_address(&ticket.unit_number), rank),
                            cot_mapa(cot_shared_address(&ticket.full), rank), unit_number, 0, 0, 0);
    cot_mbarrier_wait(&ticket.full, 0);
    return *(volatile uint32_t *)&ticket.unit_number.x;
}

/* One step of a unit. */
struct attention_step {
    int head_in_group; /* the query head is first_head + head_in_group */
    int tile;          /* the query tile */
};

/* Step `step` of a unit. All heads of a tile come before its next tile. So the units of a key-value head stay at the
 * same tiles, and the L2 cache holds what they read and add to. With one head after the other, the units of a causal
 * mask would drift apart, because they have different numbers of tiles. */
static __device__ __forceinline__ attention_step step_of(const attention_bwd_call &c, const attention_work &w, int step)
{
    /* step / query_heads, by one multiplication. It is exact while step * query_heads < 2^31. The largest argument is
     * one more than the last step: query_heads * tile_count. attention_bwd_sm90_refusal therefore limits query_heads^2
     * n with n = floor(Tq / QUERIES) + 1. n is at least tile_count. */
    const int tile_number = (int)__umulhi(2 * (uint32_t)step, c.inverse_query_heads);
    return {step - tile_number * w.query_heads, w.first_tile + w.tile_direction * tile_number};
}

static __device__ __forceinline__ int tile_of(const attention_bwd_call &c, const attention_work &w, int step)
{
    return step_of(c, w, step).tile;
}

/* Steps of a unit: each of its tiles, for each of its query heads. */
static __device__ __forceinline__ int step_count(const attention_work &w)
{
    return w.query_heads * w.tile_count;
}

/* Index, among all query tiles of the call, of tile 0 of a query head. lse_log2 has one row per query tile, dq_accum
 * has DQ_TILES_PER_QUERY_TILE dQ tiles per query tile. */
template <bool GENERAL>
static __device__ __forceinline__ int64_t query_tile_base_of(const attention_bwd_call &c, const attention_work &w,
                                                             int head_in_group)
{
    if (GENERAL)
        return w.sequence_first_tile + (int64_t)(w.first_head + head_in_group) * w.tiles_per_head;
    return ((int64_t)w.b * c.H + w.first_head + head_in_group) * c.tiles_per_head;
}

/* The position of a unit in the order in which units add to a query tile of dQ, in deterministic mode. */
struct attention_dq_position {
    uint32_t earlier_units; /* the number of units that add to the tile before this one */
    bool is_final;          /* this is the final unit of the tile: see *final key block* in docs/kernels/glossary.md */
};

/* Neither the first nor the final unit of a tile. earlier_units = 1: a dq_writer adds the tile, and does not store it.
 * is_final = false: it does not load the sums.
 *
 * In the nondeterministic mode, all units add to dQ without an order, with this position. The dQ warpgroup uses it in
 * all versions without STORES_DQ, in both modes. It reads only is_final there, and stages each tile for a dq_writer. */
constexpr attention_dq_position NOT_FIRST_NOT_FINAL = {1, false};

template <int QUERIES, bool GENERAL, int UNIT_KEYS = KEYS>
static __device__ __forceinline__ attention_dq_position dq_position_of(const attention_bwd_call &c,
                                                                       const attention_work &w, int tile)
{
    const int last_visible_offset = GENERAL ? w.last_visible_offset
                                    : c.causal
                                        ? attention_clamp(c.diagonal, -ATTENTION_UNBOUNDED_32, ATTENTION_UNBOUNDED_32)
                                        : ATTENTION_UNBOUNDED_32;
    const attention_unit_range range = attention_unit_range_of(
        tile * QUERIES, QUERIES, GENERAL ? w.used_q : (int)c.Tq, GENERAL ? w.used_k : (int)c.Tk,
        GENERAL ? w.first_visible_offset : -ATTENTION_UNBOUNDED_32, last_visible_offset, UNIT_KEYS);
    const int unit_in_head = w.first_key / UNIT_KEYS;
    const bool ascending = GENERAL ? keys_ascend_general(c) : w.keys_ascend;
    return {(uint32_t)(ascending ? unit_in_head - range.first : range.last - unit_in_head),
            unit_in_head == (ascending ? range.last : range.first)};
}

/* Issues acc = A B^T, for S^T = K Q^T and dP^T = V dO^T. A has 64 rows (keys) and B 2 N rows (queries), so a thread has
 * N accumulators. Both have COLUMNS columns and are in shared memory, in panels of 64 columns. The panels of A lie
 * a_stride bytes apart. */
template <typename E, int COLUMNS, int N>
static __device__ __forceinline__ void issue_gemm_abt(float (&acc)[N], const unsigned char *a, uint32_t a_stride,
                                                      const unsigned char *b)
{
    const uint64_t a_desc = cot_wgmma_k_major(cot_shared_address(a)), b_desc = cot_wgmma_k_major(cot_shared_address(b));
    cot_wgmma_fence();
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++)
        cot_wgmma<E, false, false>(acc, a_desc + k / 4 * (a_stride >> 4) + k % 4 * COT_WGMMA_K_STEP,
                                   b_desc + k / 4 * (2 * N * 128 >> 4) + k % 4 * COT_WGMMA_K_STEP, k > 0);
    cot_wgmma_commit();
}

/* Issues acc += A B, for dK and dV. A is 64 keys by 4 W queries, in W registers of a thread. B is a tile of Q or dO. */
template <typename E, int N, int W>
static __device__ __forceinline__ void issue_gemm_add_ab(float (&acc)[N], const uint32_t (&a)[W],
                                                         const unsigned char *b)
{
    cot_wgmma_fence();
    const uint64_t b_desc = cot_wgmma_mn_major(cot_shared_address(b), 4 * W * 128);
#pragma unroll
    for (int k = 0; k < W / 4; k++)
        cot_wgmma<E, true>(acc, a + 4 * k, b_desc + k * COT_WGMMA_MN_STEP, true);
    cot_wgmma_commit();
}

/* Whether any score of query tile `tile` and keys [key_begin, key_begin + 64) is masked. */
template <int QUERIES>
static __device__ __forceinline__ bool needs_mask(const attention_bwd_call &c, int tile, int key_begin)
{
    const int diagonal_key = tile * QUERIES + (int)c.diagonal; /* the last key that the tile's first query attends to */
    return (c.causal && key_begin + 63 > diagonal_key) || key_begin + 63 >= (int)c.Tk;
}

/* Sets masked scores to -inf, or to +inf if the scale is negative, so that P = 0. `key` is the key of this thread's
 * accumulators 4i and 4i + 1. Accumulators 4i + 2 and 4i + 3 have the key `key` + 8. */
template <int N>
static __device__ __forceinline__ void apply_mask(const attention_bwd_call &c, int tile, int key, float (&scores)[N])
{
    constexpr int QUERIES = 2 * N;
    const int diagonal_key = tile * QUERIES + (int)c.diagonal, Tk = (int)c.Tk;
    const float masked = __int_as_float(c.softmax_scale_log2 < 0.0f ? PLUS_INFINITY_BITS : MINUS_INFINITY_BITS);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int query_in_tile = 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2, score_key = key + 8 * (i / 2 % 2);
        if ((c.causal && score_key > diagonal_key + query_in_tile) || score_key >= Tk)
            scores[i] = masked;
    }
}

/* WORK, here and below: attention_work, or consumer_work of attention_bwd_consumer_sm90.cuh, which has the members that
 * these functions read. */
template <int QUERIES, typename WORK>
static __device__ __forceinline__ bool needs_mask_general(const WORK &w, int tile, int key_begin)
{
    /* The first and the last key that the tile's first query attends to. */
    const int first_visible = tile * QUERIES + w.first_visible_offset,
              last_visible = tile * QUERIES + w.last_visible_offset;
    const int last_key = key_begin + 63;
    return last_key > last_visible || key_begin < first_visible + QUERIES - 1 || last_key >= w.used_k;
}

/* Whether accumulator i is masked. `key` as in apply_mask. */
template <int QUERIES, typename WORK>
static __device__ __forceinline__ bool is_masked(const WORK &w, int tile, int key, int i)
{
    const int query = tile * QUERIES + 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2, score_key = key + 8 * (i / 2 % 2);
    return score_key > query + w.last_visible_offset || score_key < query + w.first_visible_offset ||
           score_key >= w.used_k;
}

template <typename WORK, int N>
static __device__ __forceinline__ void apply_mask_general(const WORK &w, int tile, int key, float masked_score,
                                                          float (&scores)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        if (is_masked<2 * N>(w, tile, key, i))
            scores[i] = masked_score;
}

/* Whether no query of the tile attends to any of the keys [key_begin, key_begin + 64). With `|` instead of `||`, all
 * three comparisons are evaluated, without branches. */
template <int QUERIES, typename WORK>
static __device__ __forceinline__ bool fully_masked(const WORK &w, int tile, int key_begin)
{
    const int first_query = tile * QUERIES;
    return (key_begin > first_query + QUERIES - 1 + w.last_visible_offset) |
           (key_begin + 63 < first_query + w.first_visible_offset) | (key_begin >= w.used_k);
}

/* Stores a warp's 16 rows of a dQ tile to a stage in shared memory, in the order of the accumulators. With 16
 * accumulators only the first 32 columns. */
template <int N> static __device__ __forceinline__ void stage_dq_tile(float *dq, const float (&acc)[N], uint64_t *full)
{
    const int warp = threadIdx.x % WARPGROUP / WARP, lane = threadIdx.x % WARP;
    float4 *staged = (float4 *)dq + warp * 8 * WARP + lane;
#pragma unroll
    for (int i = 0; i < N / 4; i++)
        staged[i * WARP] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
    cot_fence_proxy_async();
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(full);
}

/* Waits until all earlier units have added to the dQ tile. Its semaphore then equals earlier_units. accum_dq_tile:
 * index of the dQ tile in dq_accum. */
static __device__ __forceinline__ void wait_for_earlier_units(const attention_bwd_call &c, int64_t accum_dq_tile,
                                                              uint32_t earlier_units)
{
    while (cot_load_acquire(c.dq_semaphore + accum_dq_tile) != earlier_units)
        ;
    cot_fence_proxy_async_global();
}

/* Adds a staged dQ tile to the accumulators. */
static __device__ __forceinline__ void add_staged_dq_tile(float (&acc)[32], const float *dq)
{
    const float4 *staged = (const float4 *)dq + threadIdx.x % WARPGROUP / WARP * 8 * WARP + threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float4 x = staged[i * WARP];
        acc[4 * i] += x.x, acc[4 * i + 1] += x.y, acc[4 * i + 2] += x.z, acc[4 * i + 3] += x.w;
    }
}

/* Adds a staged dQ tile to dq_accum. If `overwrite` (the first unit that adds to the tile in deterministic mode), it
 * stores the dQ tile instead. Waits until the stage has been read. HALF: only the first 32 columns. In the order of
 * accumulators they are the first half of the floats of each warp. */
template <bool HALF = false>
static __device__ __forceinline__ void add_dq_tile(const attention_bwd_call &c, int64_t accum_dq_tile, const float *dq,
                                                   bool overwrite)
{
    constexpr int PIECE_FLOATS = ATTENTION_BWD_DQ_TILE_FLOATS / (HALF ? 4 : 1);
    constexpr int BYTES = PIECE_FLOATS / (HALF ? 2 : 1) * (int)sizeof(float);
    float *accum = c.dq_accum + accum_dq_tile * ATTENTION_BWD_DQ_TILE_FLOATS;
#pragma unroll
    for (int i = 0; i < ATTENTION_BWD_DQ_TILE_FLOATS; i += PIECE_FLOATS)
        if (overwrite)
            cot_bulk_store(accum + i, dq + i, BYTES);
        else
            cot_bulk_add_f32(accum + i, dq + i, BYTES);
    cot_bulk_commit();
    cot_bulk_wait_read();
}

/* Increments the semaphore of a dQ tile when the sums of this unit are in memory. */
static __device__ __forceinline__ void release_next_unit(const attention_bwd_call &c, int64_t accum_dq_tile)
{
    cot_bulk_wait();
    cot_add_release(c.dq_semaphore + accum_dq_tile, 1);
}

/* Address of this thread's fragment of dS^T in a tile [query][key]. The fragment of the next 16 queries is 16
 * rows of 128 bytes later. The 128-byte swizzle stores the 16-byte chunk c of row r at chunk c ^ (r % 8). */
static __device__ __forceinline__ uint32_t fragment_address(const unsigned char *tile)
{
    const int lane = threadIdx.x % WARP, row = lane / 16 * 8 + lane % 8;
    const int chunk = threadIdx.x % WARPGROUP / WARP * 2 + lane / 8 % 2;
    return cot_shared_address(tile) + row * 128 + (chunk ^ lane % 8) * 16;
}

/* The rows of dK or dV of this key block's sequence and head. */
template <bool GENERAL>
static __device__ __forceinline__ output_rows key_output_rows(const attention_bwd_call &c, const attention_array &out,
                                                              const attention_work &w)
{
    return {w.b * out.stride[0] + (GENERAL ? w.k_first_row : 0) * out.stride[1] + w.kv_head * out.stride[2],
            GENERAL ? w.k_rows : (int)c.Tk, GENERAL ? w.used_k : (int)c.Tk};
}

/* The rows of dQ of a query head that the main kernel stores. GENERAL: `preprocess` clears those from used_q on. */
template <bool GENERAL>
static __device__ __forceinline__ output_rows query_output_rows(const attention_bwd_call &c, const attention_work &w,
                                                                int head_in_group)
{
    const int rows = GENERAL ? w.used_q : (int)c.Tq;
    return {w.b * c.dq.stride[0] + (GENERAL ? w.q_first_row : 0) * c.dq.stride[1] +
                (w.first_head + head_in_group) * c.dq.stride[2],
            rows, rows};
}

#endif
