/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_load_sm90.cuh: the forward on Hopper, the producer's part: which tiles of queries there are, what they see, and
 * their way to shared memory. attention_fwd_sm90.cuh has the whole in view. */
#ifndef COT_ATTENTION_FWD_LOAD_SM90_CUH
#define COT_ATTENTION_FWD_LOAD_SM90_CUH

#include "attention_maps.h"
#include "attention_place.cuh"

#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/ptx.cuh"

enum { GROUP = 128, WARP = 32, ROW = 128 /* bytes of 64 columns */ };

/* The kernel of a size: see ATTENTION_FWD_SMALL. */
template <typename E_, int D_, int DV_, int KEYS_, int GROUPS_, int Q_STAGES_, int STAGES_, bool ALL_>
struct forward_kernel {
    typedef E_ E;
    enum {
        D = D_,
        DV = DV_,
        KEYS = KEYS_,
        GROUPS = GROUPS_,
        Q_STAGES = Q_STAGES_,
        STAGES = STAGES_,
        ALL = ALL_,                                  /* softcap and negative scales too */
        STAGED = D_ <= 128,                          /* there is room for O in shared memory, where rows become whole */
        HALVES = KEYS == 128 && GROUPS == 2 && !ALL, /* tiles at the ends may be taken by halves */
        ROOM = cot_is_f16<E_> ? 15 : 20, /* P may be 2^ROOM, for that is how high scores may be above references */
        QUERIES = 64 * GROUPS,
        SLICES = (D + 63) / 64,
        V_SLICES = (DV + 63) / 64,
        Q_BYTES = SLICES * QUERIES * ROW,
        K_BYTES = SLICES * KEYS * ROW,
        V_BYTES = V_SLICES * KEYS * ROW,
        /* What the launch allots, shared out anew: 128 of 512 threads, 168 of 384. */
        PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 24,
        CONSUMER_REGISTERS = GROUPS == 3 ? 160 : 240
    };
};

/* What a group of a tile's queries sees: tiles of keys from begin to end, of which those from whole[0] to whole[1] hide nothing. */
struct attention_seen {
    int begin, end, whole[2];
    int half_first,
        half_last; /* no row sees the upper half of the last tile, which comes first, or the lower one of the first */
};

/* A tile of queries. Rows and keys count from the sequence's first. */
struct attention_tile {
    int b, head, kv_head;   /* b: of the tensors' views */
    int q_row;              /* in the view of q, out and lse */
    int rows, used;         /* rows to be written; those of them that count. rows < 0: there are no more tiles */
    int k_row, Tk;          /* first key in the view, number of keys */
    int first, last;        /* row i sees the keys first + i .. last + i */
    int begin, end;         /* tiles of keys */
    int clean;              /* 0: rows of the last tile beyond Tk are not this sequence's */
    attention_seen seen[3]; /* by group */
};

/* Descriptions of tiles: two may be on their way while a third is finished. */
enum { TILES = 4 };

template <class F> struct forward_shared {
    unsigned char q[F::Q_STAGES][F::SLICES][F::QUERIES * ROW];
    unsigned char k[F::STAGES][F::SLICES][F::KEYS * ROW];
    unsigned char v[F::STAGES][F::V_SLICES][F::KEYS * ROW];
    unsigned char out[F::STAGED ? F::V_SLICES : 0][F::QUERIES * ROW];
    attention_tile tiles[TILES];
    uint64_t q_full[F::Q_STAGES], q_empty[F::Q_STAGES], k_full[F::STAGES], k_empty[F::STAGES], v_full[F::STAGES],
        v_empty[F::STAGES], v_landed;
};

extern __shared__ __align__(1024) unsigned char attention_memory[];

/* ---- tiles ----------------------------------------------------------------------------------------------- */

/* Tile `number` of `heads` heads with `tiles` tiles each: its head and its place there. Sections of heads follow each
 * other; in a section the last queries come first, which see the most keys under a causal mask, then the heads. */
static __device__ __forceinline__ void place_of(const attention_fwd_call &c, uint32_t number, uint32_t tiles, int &head,
                                                int &tile)
{
    const uint32_t section = (uint32_t)c.section, first = number / (tiles * section) * section;
    const uint32_t width = min(section, (uint32_t)c.H - first), place = number - first * tiles;
    head = (int)(first + place % width);
    tile = (int)(tiles - 1 - place / width);
}

/* The keys of rows from .. to - 1 of a tile: [x, y); empty where y <= x. */
static __device__ __forceinline__ int2 keys_of(const attention_tile &t, int from, int to)
{
    if (from >= to)
        return make_int2(0, 0);
    return make_int2(min(max(t.first + from, 0), t.Tk), min(max(t.last + to, 0), t.Tk));
}

template <class F> static __device__ __forceinline__ attention_seen seen_of(const attention_tile &t, int group)
{
    attention_seen seen;
    const int2 keys = keys_of(t, group * 64, min(group * 64 + 64, t.used));
    const bool any = keys.y > keys.x;
    seen.begin = any ? keys.x / F::KEYS : t.begin;
    seen.end = any ? (keys.y + F::KEYS - 1) / F::KEYS : t.begin;
    seen.whole[0] = (max(t.first + group * 64 + 63, 0) + F::KEYS - 1) / F::KEYS;
    seen.whole[1] = max(min(t.last + group * 64 + 1, t.Tk), 0) / F::KEYS;
    seen.half_first = F::HALVES && keys.y <= seen.end * F::KEYS - 64;
    seen.half_last = F::HALVES && seen.end - 1 > seen.begin && keys.x >= seen.begin * F::KEYS + 64;
    return seen;
}

template <class F>
static __device__ __forceinline__ attention_tile tile_of(const attention_fwd_call &c, uint32_t number)
{
    enum { FAR = 1 << 30 }; /* beyond any key: rows are less than half of it */
    attention_tile t;
    int tile;
    int64_t diagonal = c.diagonal;
    if (c.place.table == nullptr) {
        const uint32_t sequence = number / (uint32_t)(c.tiles * c.H);
        place_of(c, number - sequence * (uint32_t)(c.tiles * c.H), (uint32_t)c.tiles, t.head, tile);
        t.b = (int)sequence;
        t.rows = c.place.Tq;
        t.q_row = t.k_row = 0;
        t.used = c.place.Tq;
        t.Tk = c.place.Tk;
        t.clean = 1;
    } else {
        const int low = attention_sequence_of(c.place, &attention_placed::first_tile, (uint32_t)c.H, number);
        const attention_placed s = c.place.table[low];
        place_of(c, number - (uint32_t)s.first_tile * (uint32_t)c.H,
                 (uint32_t)(c.place.table[low + 1].first_tile - s.first_tile), t.head, tile);
        t.b = c.place.packed ? 0 : low;
        t.rows = s.q_rows;
        t.used = s.used_q;
        t.q_row = s.q_row;
        t.k_row = s.k_row;
        t.Tk = s.used_k;
        t.clean = 0;
        diagonal = s.diagonal;
    }
    const int row = tile * F::QUERIES;
    t.kv_head = t.head / c.heads_of_kv;
    t.q_row += row;
    t.rows = min(t.rows - row, (int)F::QUERIES);
    t.used = min(max(t.used - row, 0), t.rows);
    diagonal += row;
    t.first = attention_clamped(diagonal - c.left, -FAR, FAR);
    t.last = attention_clamped(diagonal + c.right, -FAR, FAR);
    const int2 keys = keys_of(t, 0, t.used);
    t.begin = keys.x / F::KEYS;
    t.end = keys.y > keys.x ? (keys.y + F::KEYS - 1) / F::KEYS : t.begin;
    t.clean |= t.end * F::KEYS <= t.Tk;
    if (F::STAGED)
        for (int group = 0; group < F::GROUPS; group++)
            t.seen[group] = seen_of<F>(t, group);
    return t;
}

/* ---- the producer ---------------------------------------------------------------------------------------- */

template <class F> struct forward_loader {
    const attention_fwd_mapped &m;
    forward_shared<F> &s;
    cot_ring<F::STAGES> k, v;
    uint32_t landed;

    __device__ __forceinline__ bool leads() const
    {
        return threadIdx.x % WARP == 0;
    }

    __device__ __forceinline__ void load_k(const attention_tile &t, int tile)
    {
        cot_mbarrier_wait(&s.k_empty[k.slot], k.parity ^ 1);
        if (leads()) {
            cot_mbarrier_arrive_expect(&s.k_full[k.slot], F::K_BYTES);
            for (int slice = 0; slice < F::SLICES; slice++)
                cot_tensor_load_4d(s.k[k.slot][slice], &m.k, slice * 64, t.k_row + tile * F::KEYS, t.kv_head, t.b,
                                   &s.k_full[k.slot]);
        }
        k.next();
    }

    __device__ __forceinline__ void load_v(const attention_tile &t, int tile)
    {
        const bool clean = t.clean || tile < t.end - 1;
        uint64_t *full = &s.v_full[v.slot], *there = clean ? full : &s.v_landed;
        cot_mbarrier_wait(&s.v_empty[v.slot], v.parity ^ 1);
        if (leads()) {
            cot_mbarrier_arrive_expect(there, F::V_BYTES);
            for (int slice = 0; slice < F::V_SLICES; slice++)
                cot_tensor_load_4d(s.v[v.slot][slice], &m.v, slice * 64, t.k_row + tile * F::KEYS, t.kv_head, t.b,
                                   there);
        }
        if (!clean) {
            cot_mbarrier_wait(there, landed);
            landed ^= 1;
            attention_clear_rows<F::KEYS * ROW, F::V_SLICES>(s.v[v.slot], t.Tk - tile * F::KEYS);
            if (leads())
                cot_mbarrier_arrive(full);
        }
        v.next();
    }

    /* Tells the consumers of tile number n of this block, when they are done with the queries before. */
    __device__ __forceinline__ void publish(const attention_tile &t, uint32_t n)
    {
        uint64_t *const full = &s.q_full[n % F::Q_STAGES];
        cot_mbarrier_wait(&s.q_empty[n % F::Q_STAGES], n / F::Q_STAGES & 1 ^ 1);
        if (leads()) {
            s.tiles[n % TILES] = t;
            if (t.end > t.begin) {
                cot_mbarrier_arrive_expect(full, F::Q_BYTES);
                for (int slice = 0; slice < F::SLICES; slice++)
                    cot_tensor_load_4d(s.q[n % F::Q_STAGES][slice], &m.q, slice * 64, t.q_row, t.head, t.b, full);
            } else {
                cot_mbarrier_arrive(full);
            }
        }
    }
};

template <class F> static __device__ __forceinline__ void load(const attention_fwd_mapped &m, forward_shared<F> &s)
{
    const attention_fwd_call &c = m.call;
    forward_loader<F> loader = {m, s, {}, {}, 0};
    uint32_t total = (uint32_t)(c.place.sequences * c.tiles * c.H);
    if (c.place.table != nullptr) {
        cot_wait_for_kernels_before();
        total = (uint32_t)c.place.table[c.place.sequences].first_tile * (uint32_t)c.H;
    }
    uint32_t number = blockIdx.x;
    for (uint32_t n = 0;; n++) {
        attention_tile t;
        if (number >= total) {
            t.rows = -1;
            t.begin = t.end = t.used = 0;
            loader.publish(t, n);
            break;
        }
        t = tile_of<F>(c, number);
        if (t.end > t.begin)
            loader.load_k(t, t.end - 1); /* before the queries' room is free */
        loader.publish(t, n);
        if (c.place.counter == nullptr) {
            number = total; /* a tile for each block */
        } else {
            if (n == 0)
                cot_wait_for_kernels_before(); /* the counter */
            if (loader.leads())
                number = atomicAdd(c.place.counter, 1);
        }
        for (int tile = t.end - 1; tile >= t.begin; tile--) {
            if (tile > t.begin)
                loader.load_k(t, tile - 1);
            loader.load_v(t, tile);
        }
        number = __shfl_sync(0xffffffffu, number, 0);
    }
}

#endif
