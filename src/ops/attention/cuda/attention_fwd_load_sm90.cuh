/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_load_sm90.cuh: the forward on Hopper, the producer: which query tiles there are, which keys they attend
 * to, and TMA loads. attention_fwd_sm90.cuh describes the whole kernel. */
#ifndef COT_ATTENTION_FWD_LOAD_SM90_CUH
#define COT_ATTENTION_FWD_LOAD_SM90_CUH

#include "attention_maps.h"
#include "attention_varlen.cuh"

#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/ptx.cuh"

enum { WARPGROUP = 128, WARP = 32, ROW_BYTES = 128 /* bytes of 64 columns */ };

/* Compile-time parameters of a kernel: see ATTENTION_FWD_SMALL. */
template <typename E_, int D_, int DV_, int KEYS_, int CONSUMERS_, int Q_STAGES_, int STAGES_, bool SOFTCAP_>
struct forward_traits {
    typedef E_ E;
    enum {
        D = D_,
        DV = DV_,
        KEYS = KEYS_,
        CONSUMERS = CONSUMERS_,
        Q_STAGES = Q_STAGES_,
        STAGES = STAGES_,
        SOFTCAP = SOFTCAP_, /* also negative scales */
        /* Up to d = 128 the producer computes the key ranges of the warpgroups. Above, each consumer computes its
         * own. */
        PUBLISH_RANGES = D_ <= 128,
        STAGE_O = D_ <= 128, /* O goes through shared memory, where it becomes whole rows, if there is space for it */
        /* The first and the last step may take half of a key tile. */
        HALF_TILES = KEYS == 128 && CONSUMERS == 2 && !SOFTCAP,
        /* P may reach 2^MAX_P_LOG2, because scores may exceed row_max by this exponent. */
        MAX_P_LOG2 = cot_is_f16<E_> ? 15 : 20,
        QUERIES = 64 * CONSUMERS,
        PANELS = (D + 63) / 64,
        V_PANELS = (DV + 63) / 64,
        Q_BYTES = PANELS * QUERIES * ROW_BYTES,
        K_BYTES = PANELS * KEYS * ROW_BYTES,
        V_BYTES = V_PANELS * KEYS * ROW_BYTES,
        /* Registers of a thread. The launch allots 128 for a thread of each of 4 warpgroups, or 168 for 3 warpgroups.
         * setmaxnreg redistributes them. */
        PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 24,
        CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 240
    };
};

/* The keys that a warpgroup's 64 queries attend to: key tiles begin to end - 1. Tiles unmasked[0] to unmasked[1] - 1
 * need no mask. */
struct attention_key_range {
    int begin, end, unmasked[2];
    /* half_first_step: no row attends to the upper half of the last key tile, which comes first. half_last_step: no row
     * attends to the lower half of the first key tile, which comes last. */
    int half_first_step, half_last_step;
};

/* A query tile. Rows and keys count from the first of the sequence. */
struct attention_tile {
    int b, head, kv_head; /* b: batch index in the tensors' views */
    int q_first_row;      /* in the view of q, out and lse */
    int rows, used;       /* rows to be written; rows below seqused. rows < 0: there are no more tiles */
    int k_first_row, Tk;  /* first key in the view, number of keys */
    /* Row i attends to keys i + first_visible_offset .. i + last_visible_offset. */
    int first_visible_offset, last_visible_offset;
    int begin, end;                    /* key tiles [begin, end) */
    int tail_clean;                    /* 0: rows of the last key tile beyond Tk belong to another sequence */
    attention_key_range key_ranges[3]; /* for each consumer warpgroup; only with PUBLISH_RANGES */
};

/* Descriptions of tiles: two may be published while consumers finish a third. 3, rounded up to a power of two for
 * n % TILE_STAGES. */
enum { TILE_STAGES = 4 };

template <class F> struct shared_memory {
    unsigned char q[F::Q_STAGES][F::PANELS][F::QUERIES * ROW_BYTES];
    unsigned char k[F::STAGES][F::PANELS][F::KEYS * ROW_BYTES];
    unsigned char v[F::STAGES][F::V_PANELS][F::KEYS * ROW_BYTES];
    unsigned char out[F::STAGE_O ? F::V_PANELS : 1][F::STAGE_O ? F::QUERIES * ROW_BYTES : 16]; /* no array is empty */
    attention_tile tiles[TILE_STAGES];
    uint64_t q_full[F::Q_STAGES], q_empty[F::Q_STAGES], k_full[F::STAGES], k_empty[F::STAGES], v_full[F::STAGES],
        v_empty[F::STAGES], v_uncleared_full;
};

extern __shared__ __align__(1024) unsigned char attention_memory[];

/* The 128-byte swizzle: the byte offset in row `row` of a panel at which its 16-byte unit `unit` is. A macro, because
 * nvcc compiles a function to other instructions. */
#define SWIZZLED_OFFSET(row, unit) (((unit) ^ ((row) % 8)) * 16)

/* ---- tiles ----------------------------------------------------------------------------------------------- */

/* Head and query tile of tile number `tile_number` among the tiles of `heads` heads, `tiles` for each head. Tiles are
 * numbered section by section. A section has c.heads_per_section heads, from section_head on. In a section the tile is
 * the slower index and the head the faster one. Tiles count down, because under a causal mask the last queries attend
 * to the most keys. */
static __device__ __forceinline__ void tile_position(const attention_fwd_call &c, uint32_t tile_number, uint32_t tiles,
                                                     uint32_t heads, int &head, int &tile)
{
    const uint32_t heads_per_section = (uint32_t)c.heads_per_section,
                   section_head = tile_number / (tiles * heads_per_section) * heads_per_section;
    const uint32_t section_heads = min(heads_per_section, heads - section_head),
                   position = tile_number - section_head * tiles;
    head = (int)(section_head + position % section_heads);
    tile = (int)(tiles - 1 - position / section_heads);
}

/* The keys of rows from .. to - 1 of a tile: [x, y), empty where y <= x. */
static __device__ __forceinline__ int2 key_span(const attention_tile &t, int from, int to)
{
    if (from >= to)
        return make_int2(0, 0);
    return make_int2(min(max(t.first_visible_offset + from, 0), t.Tk), min(max(t.last_visible_offset + to, 0), t.Tk));
}

template <class F>
static __device__ __forceinline__ attention_key_range key_range_of(const attention_tile &t, int consumer_index)
{
    attention_key_range range;
    const int2 keys = key_span(t, consumer_index * 64, min(consumer_index * 64 + 64, t.used));
    const bool any = keys.y > keys.x;
    range.begin = any ? keys.x / F::KEYS : t.begin;
    range.end = any ? (keys.y + F::KEYS - 1) / F::KEYS : t.begin;
    range.unmasked[0] = (max(t.first_visible_offset + consumer_index * 64 + 63, 0) + F::KEYS - 1) / F::KEYS;
    range.unmasked[1] = max(min(t.last_visible_offset + consumer_index * 64 + 1, t.Tk), 0) / F::KEYS;
    range.half_first_step = F::HALF_TILES && keys.y <= range.end * F::KEYS - 64;
    range.half_last_step = F::HALF_TILES && range.end - 1 > range.begin && keys.x >= range.begin * F::KEYS + 64;
    return range;
}

template <class F>
static __device__ __forceinline__ attention_tile tile_of(const attention_fwd_call &c, uint32_t tile_number)
{
    attention_tile t;
    int tile;
    int64_t diagonal = c.diagonal;
    if (c.sequences.seqlens == nullptr) {
        int head; /* among those of all sequences */
        tile_position(c, tile_number, (uint32_t)c.tiles, (uint32_t)(c.sequences.count * c.H), head, tile);
        t.b = head / c.H;
        t.head = head - t.b * c.H;
        t.rows = c.sequences.rows_q;
        t.q_first_row = t.k_first_row = 0;
        t.used = c.sequences.rows_q;
        t.Tk = c.sequences.rows_k;
        t.tail_clean = 1;
    } else {
        const int sequence =
            attention_find_sequence(c.sequences, &attention_seqlen_info::tiles_before, (uint32_t)c.H, tile_number);
        const attention_seqlen_info s = c.sequences.seqlens[sequence];
        tile_position(c, tile_number - (uint32_t)s.tiles_before * (uint32_t)c.H,
                      (uint32_t)(c.sequences.seqlens[sequence + 1].tiles_before - s.tiles_before), (uint32_t)c.H,
                      t.head, tile);
        t.b = c.sequences.packed ? 0 : sequence;
        t.rows = s.q_rows;
        t.used = s.used_q;
        t.q_first_row = s.q_first_row;
        t.k_first_row = s.k_first_row;
        t.Tk = s.used_k;
        t.tail_clean = 0;
        diagonal = s.diagonal;
    }
    const int row = tile * F::QUERIES;
    t.kv_head = t.head / c.heads_per_kv_head;
    t.q_first_row += row;
    t.rows = min(t.rows - row, (int)F::QUERIES);
    t.used = min(max(t.used - row, 0), t.rows);
    diagonal += row;
    t.first_visible_offset = attention_clamp(diagonal - c.left, -ATTENTION_UNBOUNDED_32, ATTENTION_UNBOUNDED_32);
    t.last_visible_offset = attention_clamp(diagonal + c.right, -ATTENTION_UNBOUNDED_32, ATTENTION_UNBOUNDED_32);
    const int2 keys = key_span(t, 0, t.used);
    t.begin = keys.x / F::KEYS;
    t.end = keys.y > keys.x ? (keys.y + F::KEYS - 1) / F::KEYS : t.begin;
    t.tail_clean |= t.end * F::KEYS <= t.Tk;
    if (F::PUBLISH_RANGES)
        for (int consumer_index = 0; consumer_index < F::CONSUMERS; consumer_index++)
            t.key_ranges[consumer_index] = key_range_of<F>(t, consumer_index);
    return t;
}

/* ---- the producer ---------------------------------------------------------------------------------------- */

template <class F> struct forward_producer {
    const attention_fwd_mapped_call &mapped;
    shared_memory<F> &s;
    cot_pipeline_state<F::STAGES> k, v;
    uint32_t uncleared_parity;

    __device__ __forceinline__ bool is_leader() const
    {
        return threadIdx.x % WARP == 0;
    }

    __device__ __forceinline__ void load_k(const attention_tile &t, int tile)
    {
        cot_mbarrier_wait(&s.k_empty[k.stage], k.parity ^ 1);
        if (is_leader()) {
            cot_mbarrier_arrive_expect(&s.k_full[k.stage], F::K_BYTES);
            for (int panel = 0; panel < F::PANELS; panel++)
                cot_tma_load_4d(s.k[k.stage][panel], &mapped.k, panel * 64, t.k_first_row + tile * F::KEYS, t.kv_head,
                                t.b, &s.k_full[k.stage]);
        }
        k.next();
    }

    __device__ __forceinline__ void load_v(const attention_tile &t, int tile)
    {
        const bool clean = t.tail_clean || tile < t.end - 1;
        uint64_t *full = &s.v_full[v.stage], *barrier = clean ? full : &s.v_uncleared_full;
        cot_mbarrier_wait(&s.v_empty[v.stage], v.parity ^ 1);
        if (is_leader()) {
            cot_mbarrier_arrive_expect(barrier, F::V_BYTES);
            for (int panel = 0; panel < F::V_PANELS; panel++)
                cot_tma_load_4d(s.v[v.stage][panel], &mapped.v, panel * 64, t.k_first_row + tile * F::KEYS, t.kv_head,
                                t.b, barrier);
        }
        if (!clean) {
            cot_mbarrier_wait(barrier, uncleared_parity);
            uncleared_parity ^= 1;
            attention_clear_rows<F::KEYS * ROW_BYTES, F::V_PANELS>(s.v[v.stage], t.Tk - tile * F::KEYS);
            if (is_leader())
                cot_mbarrier_arrive(full);
        }
        v.next();
    }

    /* Loads a tile of K and V to the L2 cache. The block that is ahead of the others of its head waits for memory, and
     * two stages are too few to hide that. */
    __device__ __forceinline__ void prefetch(const attention_tile &t, int tile)
    {
        if (!is_leader())
            return;
        for (int panel = 0; panel < F::PANELS; panel++)
            cot_tma_prefetch_4d(&mapped.k, panel * 64, t.k_first_row + tile * F::KEYS, t.kv_head, t.b);
        for (int panel = 0; panel < F::V_PANELS; panel++)
            cot_tma_prefetch_4d(&mapped.v, panel * 64, t.k_first_row + tile * F::KEYS, t.kv_head, t.b);
    }

    /* Publishes tile number n of this block to the consumers and loads its Q, once the stage of Q is empty. */
    __device__ __forceinline__ void publish(const attention_tile &t, uint32_t n)
    {
        uint64_t *const full = &s.q_full[n % F::Q_STAGES];
        cot_mbarrier_wait(&s.q_empty[n % F::Q_STAGES], n / F::Q_STAGES & 1 ^ 1);
        if (is_leader()) {
            s.tiles[n % TILE_STAGES] = t;
            if (t.end > t.begin) {
                cot_mbarrier_arrive_expect(full, F::Q_BYTES);
                for (int panel = 0; panel < F::PANELS; panel++)
                    cot_tma_load_4d(s.q[n % F::Q_STAGES][panel], &mapped.q, panel * 64, t.q_first_row, t.head, t.b,
                                    full);
            } else {
                cot_mbarrier_arrive(full);
            }
        }
    }
};

template <class F>
static __device__ __forceinline__ void load(const attention_fwd_mapped_call &mapped, shared_memory<F> &s)
{
    const attention_fwd_call &c = mapped.call;
    forward_producer<F> producer = {mapped, s, {}, {}, 0};
    uint32_t total = (uint32_t)(c.sequences.count * c.tiles * c.H);
    if (c.sequences.seqlens != nullptr) {
        cot_griddepcontrol_wait();
        total = (uint32_t)c.sequences.seqlens[c.sequences.count].tiles_before * (uint32_t)c.H;
    }
    uint32_t tile_number = blockIdx.x;
    for (uint32_t n = 0;; n++) {
        attention_tile t;
        if (tile_number >= total) {
            t.rows = -1;
            t.begin = t.end = t.used = 0;
            producer.publish(t, n);
            break;
        }
        t = tile_of<F>(c, tile_number);
        if (t.end > t.begin)
            producer.load_k(t, t.end - 1); /* K first, because the stage of Q may not be empty yet */
        producer.publish(t, n);
        if (c.sequences.tile_counter == nullptr) {
            tile_number = total; /* each block has one tile */
        } else {
            if (n == 0)
                cot_griddepcontrol_wait(); /* until tile_counter is set */
            if (producer.is_leader())
                tile_number = atomicAdd(c.sequences.tile_counter, 1);
        }
        for (int tile = t.end - 1; tile >= t.begin; tile--) {
            /* No lane may fall two uses of a stage behind the leader, because it waits for a parity. */
            __syncwarp();
            if (c.prefetch_distance > 0 && tile - c.prefetch_distance >= t.begin)
                producer.prefetch(t, tile - c.prefetch_distance);
            if (tile > t.begin)
                producer.load_k(t, tile - 1);
            producer.load_v(t, tile);
        }
        tile_number = __shfl_sync(0xffffffffu, tile_number, 0);
    }
}

#endif
