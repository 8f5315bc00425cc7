/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_sm90.cuh: the two products of the forward on Hopper. A block takes one tile of 64 queries a consumer group
 * after another (it stays as long as there are any) and walks over the tiles of keys that they see, from the last to the
 * first:
 *
 *   S = Q K^T    P = exp2(scale_log2 S - reference)    O += P V    sum += rows of P
 *
 *   group 0     producer: one warp numbers the tiles, says what they are, and loads by TMA
 *   the others  consumers: 64 queries each; O, S and P in registers
 *
 *   barrier     arrivals (bytes)              phase ends when                        who waits
 *   q full      1 (Q)                         a tile is described, its Q is there    consumers
 *   q empty     4 a consumer group            no product reads Q any more            the producer
 *   k full      1 (K)                         a tile of K is there                   consumers
 *   k empty     4 a consumer group            S no longer reads it                   the producer
 *   v full      1 (V)                         a tile of V is there, and clean        consumers
 *   v empty     4 a consumer group            O no longer reads it                   the producer
 *   v landed    1 (V)                         a tile with foreign rows is there      the producer, which clears them
 *
 * A consumer's step j, O of the step before under way:
 *   wait K_j | issue S_j and O += P_(j+1) V_(j+1) | wait S: mask and exp2, release K_j |
 *   wait O: release V_(j+1), rescale O, pack P_j
 * Groups of a block differ in the keys that they see: where one sees nothing of a tile, it lets it pass.
 *
 * A row's reference is a maximum of its scores, times scale_log2; it follows the true one only when P would exceed 2^ROOM, so that
 * O is rarely rescaled and a row's threads rarely have to agree. Relative precision is the same, and sum and O agree. It is so
 * rare that P is made first and looked at then; a warp that finds it too large makes its scores again.
 *
 * Tiles are handed out by a counter, the long ones of a sequence first under a causal mask, so that what is left at the end is
 * short. Each sum has one order, whoever computes it. */
#ifndef COT_ATTENTION_FWD_SM90_CUH
#define COT_ATTENTION_FWD_SM90_CUH

#include "attention_maps.h"
#include "attention_place.cuh"
#include "attention_softcap.cuh"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/bulk.cuh"
#include "../../../cuda/device/cluster.cuh"
#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/quad.cuh"
#include "../../../cuda/device/wgmma.cuh"

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
        if (n == 0)
            cot_wait_for_kernels_before(); /* the counter */
        if (loader.leads())
            number = atomicAdd(c.place.counter, 1);
        for (int tile = t.end - 1; tile >= t.begin; tile--) {
            if (tile > t.begin)
                loader.load_k(t, tile - 1);
            loader.load_v(t, tile);
        }
        number = __shfl_sync(0xffffffffu, number, 0);
    }
}

/* ---- consumers ------------------------------------------------------------------------------------------- */

/* S = Q K^T of this group's queries; of 2 N keys. */
template <class F, int N>
static __device__ __forceinline__ void issue_scores(float (&scores)[N], const unsigned char *q, const unsigned char *k)
{
    const uint64_t left = cot_wgmma_k_major(cot_shared_address(q)), right = cot_wgmma_k_major(cot_shared_address(k));
    cot_wgmma_fence();
#pragma unroll
    for (int i = 0; i < F::D / 16; i++)
        cot_wgmma<typename F::E, false, false>(scores,
                                               left + i / 4 * (F::QUERIES * ROW >> 4) + i % 4 * COT_WGMMA_K_STEP,
                                               right + i / 4 * (F::KEYS * ROW >> 4) + i % 4 * COT_WGMMA_K_STEP, i > 0);
    cot_wgmma_commit();
}

/* O to a row's new reference. */
template <class F>
static __device__ __forceinline__ void rescale_output(float (&sums)[F::DV / 2], const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < F::DV / 2; i++)
        sums[i] *= factor[i / 2 % 2];
}

/* O += P V, of the keys from 16 FROM on up to 16 TO; the first time O = P V. */
template <class F, int FROM = 0, int TO = F::KEYS / 16>
static __device__ __forceinline__ void issue_output(float (&sums)[F::DV / 2], const uint32_t (&p)[F::KEYS / 4],
                                                    const unsigned char *v, bool add)
{
    const uint64_t right = cot_wgmma_mn_major(cot_shared_address(v), F::KEYS * ROW);
    cot_wgmma_fence();
#pragma unroll
    for (int i = FROM; i < TO; i++)
        cot_wgmma<typename F::E, true>(sums, p + 4 * i, right + i * COT_WGMMA_MN_STEP, add || i > FROM);
    cot_wgmma_commit();
}

/* What a row of queries knows of its scores; of this thread's two rows. */
struct row_state {
    float reference[2]; /* see above, or -inf */
    float sum[2];       /* of this thread's own P */
};

/* Scores that are not Q K^T alone: those of a negative scale, and those under softcap. */
template <class F, int N> static __device__ __forceinline__ void modify(const attention_fwd_call &c, float (&scores)[N])
{
    if (c.cap.scale != 0.0f) {
        attention_cap<N % 16 == 0 && F::GROUPS == 2 ? 16 : 8>(c.cap, scores);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        scores[i] = -scores[i]; /* a negative scale */
}

/* A thread's columns of a tile up to one: bit 2i + j is column 8i + j. */
static __device__ __forceinline__ uint32_t columns_below(int column)
{
    const int clamped = min(max(column, 0), 128), number = clamped / 8 * 2 + min(clamped % 8, 2);
    return (uint32_t)((1ull << number) - 1);
}

/* Of keys from `key` on, what a row does not see. */
template <int N>
static __device__ __forceinline__ void hide(const attention_tile &t, int key, int row, float (&scores)[N])
{
    uint32_t seen[2]; /* by this thread's two rows */
    const int column = key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int own = row + 8 * half;
        seen[half] = columns_below(min(t.last + own + 1, t.Tk) - column) & ~columns_below(t.first + own - column);
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        if (!(seen[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1))
            scores[i] = __int_as_float(0xff800000);
}

/* The least of three that are not negative: as integers, which are compared three at a time. */
static __device__ __forceinline__ float least_bits(float a, float b, float c)
{
    float d; /* not in C++: conversions to integers come before the wait for the product, which serialises it */
    asm("{\n    .reg .s32 x, y, z;\n    mov.b32 x, %1;\n    mov.b32 y, %2;\n    mov.b32 z, %3;\n    min.s32 x, x, y;\n"
        "    min.s32 x, x, z;\n    mov.b32 %0, x;\n}"
        : "=f"(d)
        : "f"(a), "f"(b), "f"(c));
    return d;
}

/* The largest of this thread's scores in each of its rows. */
template <int N> static __device__ __forceinline__ void find_largest(const float (&scores)[N], float (&most)[2])
{
    float top[8];
#pragma unroll
    for (int i = 0; i < N; i++)
        top[i % 8] = i < 8 ? scores[i] : fmaxf(top[i % 8], scores[i]);
#pragma unroll
    for (int half = 0; half < 2; half++)
        most[half] = fmaxf(fmaxf(top[2 * half], top[2 * half + 1]), fmaxf(top[2 * half + 4], top[2 * half + 5]));
}

/* Brings the references up to the largest of this thread's exponents, where that is 2^ROOM more: only then must the threads of a
 * row agree. base: what exponents are held against. Returns whether O must be multiplied by `factor`. */
template <class F, bool FIRST, int N>
static __device__ __forceinline__ bool refer(const attention_fwd_call &c, const float (&scores)[N], row_state &state,
                                             float (&base)[2], float (&factor)[2])
{
    float most[2];
    find_largest(scores, most);
    const float none = __int_as_float(0xff800000);
    bool rescale = FIRST;
    most[0] *= c.scale_log2, most[1] *= c.scale_log2;
    if (!FIRST) /* no number where no key has been seen: not so */
        rescale = __any_sync(0xffffffffu, most[0] - state.reference[0] > (float)F::ROOM ||
                                              most[1] - state.reference[1] > (float)F::ROOM);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float before = state.reference[half];
        if (rescale)
            state.reference[half] = FIRST ? cot_quad_max(most[half]) : fmaxf(cot_quad_max(most[half]), before);
        base[half] = state.reference[half] == none ? 0.0f : state.reference[half];
        if (!FIRST && rescale) {
            factor[half] = cot_ex2(before - base[half]);
            state.sum[half] *= factor[half];
        }
    }
    return rescale;
}

/* Scores become P. */
template <bool FIRST, int N>
static __device__ __forceinline__ void exponentiate(const attention_fwd_call &c, const float (&base)[2],
                                                    float (&scores)[N], row_state &state)
{
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < N; i++) {
        scores[i] = cot_ex2(fmaf(scores[i], c.scale_log2, -base[i / 2 % 2]));
        sum[i % 4] += scores[i];
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
        state.sum[half] = (FIRST ? 0.0f : state.sum[half]) + (sum[2 * half] + sum[2 * half + 1]);
}

/* Scores of which a warp's rows see all become P against the references as they are, softcap as its short series, without a look
 * at them before. A row's sum, of nothing that is negative, tells whether P was too large. The series grows with the score
 * wherever it is, so that the least P and the sum tell whether it was right: the scores' own largest squares would, too, but
 * ptxas then puts all FMA before all exponentials. Returns whether P will do; if not, the scores are gone, and small says whether
 * there is hope for the next ones. */
template <class F, int N>
static __device__ __forceinline__ bool weigh_at_once(const attention_fwd_call &c, float (&scores)[N], row_state &state,
                                                     bool &small)
{
    float sum[2] = {0.0f, 0.0f}, least[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        const int half = i / 2 % 2;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float &score = scores[i + j];
            float factor = c.scale_log2;
            if (F::ALL) {
                const float square = score * score;
                factor = fmaf(fmaf(square, c.cap.brief[2], c.cap.brief[1]), square, c.cap.brief[0]);
            }
            score = cot_ex2(fmaf(score, factor, -state.reference[half]));
        }
        if (F::ALL)
            least[half] = least_bits(least[half], scores[i], scores[i + 1]);
        sum[half] += scores[i] + scores[i + 1];
    }
    /* Not where there is no number, or no reference. */
    bool near = true, right = true;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (F::ALL) {
            const float unit = cot_ex2(-state.reference[half]);
            near = near && sum[half] <= unit * c.cap.above && least[half] >= unit * c.cap.below;
        }
        right = right && near && sum[half] <= (float)(1 << F::ROOM);
    }
    right = __all_sync(0xffffffffu, right);
#pragma unroll
    for (int half = 0; half < 2; half++)
        state.sum[half] += right ? sum[half] : 0.0f; /* sums under a branch would be left for it to make */
    if (F::ALL && !right)
        small = __all_sync(0xffffffffu, near);
    return right;
}

/* A warp's scores once more, where weigh_at_once was wrong: the other warps of the group need not know. Sixteen keys in each
 * loop, or all loads come first, for which large sizes have no registers. */
template <class F>
static __device__ __forceinline__ void score_again(float (&scores)[F::KEYS / 2], const unsigned char *q,
                                                   const unsigned char *k)
{
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % GROUP / WARP;
    const uint32_t x = cot_shared_address(q) + (warp * 16 + lane % 16) * ROW, x_unit = (lane / 16 ^ lane % 8) * 16;
    const uint32_t y = cot_shared_address(k) + (lane % 8 + lane / 16 * 8) * ROW,
                   y_unit = (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll
    for (int n = 0; n < F::KEYS / 16; n++) {
        float product[2][4] = {};
#pragma unroll 1
        for (int i = 0; i < F::D / 16; i++) {
            uint32_t rows[4], columns[4];
            cot_ldmatrix_x4(rows, x + i / 4 * (F::QUERIES * ROW) + (x_unit ^ i % 4 * 32));
            cot_ldmatrix_x4(columns, y + n * (16 * ROW) + i / 4 * (F::KEYS * ROW) + (y_unit ^ i % 4 * 32));
#pragma unroll
            for (int j = 0; j < 2; j++)
                if constexpr (cot_is_f16<typename F::E>)
                    cot_mma_f16(product[j], rows[0], rows[1], rows[2], rows[3], columns[2 * j], columns[2 * j + 1]);
                else
                    cot_mma_bf16(product[j], rows[0], rows[1], rows[2], rows[3], columns[2 * j], columns[2 * j + 1]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            scores[8 * n + i] = product[i / 4][i % 4];
    }
}

/* Scores of keys from `key` on become P in float32. ragged: some must not be seen. Returns whether O must be multiplied by
 * `factor`. */
template <class F, bool FIRST, int N>
static __device__ __forceinline__ bool weigh(const attention_fwd_call &c, const attention_tile &t, int key, int row,
                                             bool ragged, float (&scores)[N], row_state &state, float (&factor)[2])
{
    if (F::ALL)
        modify<F>(c, scores);
    if (ragged)
        hide(t, key, row, scores);
    float base[2];
    const bool rescale = refer<F, FIRST>(c, scores, state, base, factor);
    exponentiate<FIRST>(c, base, scores, state);
    return rescale;
}

template <class F, int N> static __device__ __forceinline__ void pack(uint32_t *p, const float (&scores)[N])
{
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        p[i] = cot_pack_pair<typename F::E>(scores[2 * i], scores[2 * i + 1]);
}

/* Where the rings of K and V are for a consumer. */
template <class F> struct forward_reader {
    forward_shared<F> &s;
    cot_ring<F::STAGES> k, v;

    __device__ __forceinline__ void release(uint64_t *barrier) const
    {
        __syncwarp();
        if (threadIdx.x % WARP == 0)
            cot_mbarrier_arrive(barrier);
    }

    __device__ __forceinline__ void release_k()
    {
        release(&s.k_empty[k.slot]);
        k.next();
    }

    __device__ __forceinline__ void release_v()
    {
        release(&s.v_empty[v.slot]);
        v.next();
    }

    /* Tiles of keys that this group's rows do not see. */
    __device__ __forceinline__ void skip(int tiles)
    {
        for (; tiles > 0; tiles--) {
            cot_mbarrier_wait(&s.k_full[k.slot], k.parity);
            release_k();
            cot_mbarrier_wait(&s.v_full[v.slot], v.parity);
            release_v();
        }
    }
};

/* The logarithm of a row's sum, of what its reference stands for too. */
static __device__ __forceinline__ float lse_of(const attention_fwd_call &c, float reference, float sum)
{
    return fmaf(reference, c.natural, fmaf(reference, c.natural_low, logf(sum)));
}

template <int N> struct number {
    enum { value = N };
};

/* Sixteen bytes, in their place: ordinary loads went into the branches that store, one behind the other. */
static __device__ __forceinline__ uint4 load_shared(const void *from)
{
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(cot_shared_address(from))
                 : "memory");
    return x;
}

static __device__ __forceinline__ void store_global(void *to, const uint4 &x)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

/* Rows of O over their sums; zeros where there is none, whatever O holds. A warp's rows go through `staging`, where they become
 * whole. */
template <class F>
static __device__ __forceinline__ void store_output(const attention_fwd_call &c, const attention_tile &t, int group,
                                                    unsigned char *staging, const float (&inverse)[2],
                                                    const float (&sums)[F::DV / 2])
{
    enum { UNITS = F::DV / 8 /* of a row, 16 bytes each */ };
    const int lane = threadIdx.x % WARP, first = group * 64 + threadIdx.x % GROUP / WARP * 16;
    uint16_t *const out = (uint16_t *)c.out.data + t.b * c.out.stride[0] + t.head * c.out.stride[2] +
                          (int64_t)(t.q_row + first) * c.out.stride[1];
    const auto word = [&](int half, int unit) {
        const int from = 4 * unit + 2 * half;
        return cot_pack_pair<typename F::E>(inverse[half] * sums[from], inverse[half] * sums[from + 1]);
    };
    if (F::STAGED && c.out_in_vectors) {
        enum { TOGETHER = UNITS == 12 ? 4 : UNITS, ROWS = WARP / TOGETHER /* of a row's units, and rows, at a time */ };
        unsigned char *const own = staging + (first - group * 64) * ROW;
        const uint32_t to = cot_shared_address(own) + lane % 16 * ROW, at = (lane / 16 ^ lane % 8) * 16;
        const auto put = [&](auto zeros) __attribute__((always_inline))
        {
#pragma unroll
            for (int unit = 0; unit < UNITS; unit += 2) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    words[i] = decltype(zeros)::value && inverse[i % 2] == 0.0f ? 0 : word(i % 2, unit + i / 2);
                cot_stmatrix_x4(to + unit / 8 * (F::QUERIES * ROW) + (at ^ unit % 8 * 16), words);
            }
        };
        __syncwarp(); /* all have read what was there before */
        if (__any_sync(0xffffffffu, inverse[0] == 0.0f || inverse[1] == 0.0f))
            put(number<1>{});
        else
            put(number<0>{});
        __syncwarp();
        const int below = lane / TOGETHER, rows = t.rows - first - below;
        uint16_t *const to_row = out + below * c.out.stride[1] + lane % TOGETHER * 8;
        uint4 columns[UNITS / 2];
#pragma unroll
        for (int i = 0; i < UNITS / 2; i++) {
            const int unit = i * TOGETHER % UNITS + lane % TOGETHER, r = i * TOGETHER / UNITS * ROWS + below;
            columns[i] = load_shared(own + unit / 8 * (F::QUERIES * ROW) + r * ROW + (unit % 8 ^ r % 8) * 16);
        }
#pragma unroll
        for (int i = 0; i < UNITS / 2; i++) {
            const int column = i * TOGETHER % UNITS * 8, r = i * TOGETHER / UNITS * ROWS;
            if (r < rows && column + lane % TOGETHER * 8 < c.dv)
                store_global(to_row + r * c.out.stride[1] + column, columns[i]);
        }
        return;
    }
    const int row = first + lane / 4;
    const auto shown = [&](int half, int unit) { return inverse[half] == 0.0f ? 0 : word(half, unit); };
    if (!F::STAGED && c.out_in_vectors) { /* asked once, so that the transposes overlap each other */
#pragma unroll
        for (int unit = 0; unit < UNITS; unit += 4) {
            const int column = 8 * (unit + lane % 4);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 columns = cot_quad_transpose(shown(half, unit), shown(half, unit + 1),
                                                         shown(half, unit + 2), shown(half, unit + 3));
                if (row + 8 * half < t.rows && column < c.dv)
                    *(uint4 *)(out + (row - first + 8 * half) * c.out.stride[1] + column) = columns;
            }
        }
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < F::DV / 4; i++) {
            const int column = 8 * (i / 2) + 2 * (lane % 4) + i % 2;
            if (row + 8 * half < t.rows && column < c.dv)
                out[(row - first + 8 * half) * c.out.stride[1] + column] =
                    (uint16_t)(shown(half, i / 2) >> 16 * (i % 2));
        }
}

/* out and lse of this group's rows. Nothing of this group's overlaps with it, so that it is short: a thread's two rows are
 * looked after side by side, and two lanes of a row's four take the logarithm of one each. */
template <class F>
static __device__ __forceinline__ void finish(const attention_fwd_call &c, const attention_tile &t, int group, int row,
                                              unsigned char *staging, const row_state &state,
                                              const float (&sums)[F::DV / 2])
{
    const float none = __int_as_float(0xff800000);
    float sum[2], inverse[2], lse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] = cot_quad_sum(state.sum[half]);
        sum[half] = row + 8 * half < t.used ? sum[half] : 0.0f;
        inverse[half] = sum[half] == 0.0f ? 0.0f : cot_rcp(sum[half]); /* not where it is no number: that shows */
    }
    const bool second = threadIdx.x % 2;
    const float all = second ? sum[1] : sum[0];
    float value = lse_of(c, second ? state.reference[1] : state.reference[0], all);
    asm volatile("" : "+f"(value)); /* amid what follows, not in a branch */
    value = all == 0.0f ? none : value;
    if (c.sink.data != nullptr) {
        const float sink = cot_load(c.sink.data, c.sink.dtype, t.head * c.sink.stride[0]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            lse[half] = sum[half] == 0.0f ? none : lse_of(c, state.reference[half], sum[half]);
            const float most = fmaxf(lse[half], sink);
            if (row + 8 * half < t.used && !(most == none)) {
                const float all = most + logf(expf(lse[half] - most) + expf(sink - most));
                inverse[half] *= expf(lse[half] - all);
                lse[half] = all;
            }
        }
        value = second ? lse[1] : lse[0];
    }
    if (c.out.data != nullptr)
        store_output<F>(c, t, group, staging, inverse, sums);
    const int own = row + 8 * second;
    if (c.lse.data != nullptr && threadIdx.x % 4 < 2 && own < t.rows)
        ((float *)c.lse
             .data)[t.b * c.lse.stride[0] + t.head * c.lse.stride[1] + (int64_t)(t.q_row + own) * c.lse.stride[2]] =
            value;
}

template <class F>
static __device__ __forceinline__ void consume(const attention_fwd_call &c, forward_shared<F> &s, const int group)
{
    forward_reader<F> reader = {s, {}, {}};
    const int row = group * 64 + threadIdx.x % GROUP / WARP * 16 + threadIdx.x % WARP / 4; /* of even pairs */
    float scores[F::KEYS / 2], sums[F::DV / 2], factor[2];
    uint32_t p[F::KEYS / 4];
    row_state state;
    for (uint32_t n = 0;; n++) {
        const attention_tile &t = s.tiles[n % TILES];
        cot_mbarrier_wait(&s.q_full[n % F::Q_STAGES], n / F::Q_STAGES & 1);
        const unsigned char *const q = s.q[n % F::Q_STAGES][0] + group * 64 * ROW;
        if (t.rows < 0)
            break;
        const attention_seen seen =
            F::STAGED ? t.seen[group] : seen_of<F>(t, group); /* asked of the producer: shorter */
        const int begin = seen.begin, end = seen.end, ragged_left = seen.whole[0], ragged = seen.whole[1];
        const int tiles_begin = t.begin;
        /* These products have code of their own, begun and ended in its branch, or ptxas would serialise all. */
        const bool half_first = F::HALVES && seen.half_first, half_last = F::HALVES && seen.half_last;
        /* Where softcap's scores were not small once, they need not be in the next tile. */
        bool small = !F::ALL || c.cap.nearer > 0.0f;
        reader.skip(t.end - end);
        if (end > begin) {
            cot_mbarrier_wait(&s.k_full[reader.k.slot], reader.k.parity);
            if (half_first) {
                float few[32];
                issue_scores<F>(few, q, s.k[reader.k.slot][0]);
                cot_wgmma_wait<0>();
                weigh<F, true>(c, t, (end - 1) * F::KEYS, row, true, few, state, factor);
                pack<F>(p, few);
#pragma unroll
                for (int i = 16; i < F::KEYS / 4; i++)
                    p[i] = 0;
                reader.release_k();
            } else {
                issue_scores<F>(scores, q, s.k[reader.k.slot][0]);
                cot_wgmma_wait<0>();
                reader.release_k();
                weigh<F, true>(c, t, (end - 1) * F::KEYS, row, end - 1 >= ragged || end - 1 < ragged_left, scores,
                               state, factor);
                pack<F>(p, scores);
            }
            if (end - 1 == begin)
                reader.release(&s.q_empty[n % F::Q_STAGES]);
            /* S of a tile, and O with the P before it, of which there are 16 `steps` keys. */
            const auto advance = [&](auto steps, int tile) __attribute__((always_inline))
            {
                cot_mbarrier_wait(&s.k_full[reader.k.slot], reader.k.parity);
                issue_scores<F>(scores, q, s.k[reader.k.slot][0]);
                cot_mbarrier_wait(&s.v_full[reader.v.slot], reader.v.parity);
                issue_output<F, 0, decltype(steps)::value>(sums, p, s.v[reader.v.slot][0], tile < end - 2);
                cot_wgmma_wait<1>();
                const bool whole = tile < ragged && tile >= ragged_left;
                bool rescale = false;
                const bool at_once = whole && small;
                if (!at_once || !weigh_at_once<F>(c, scores, state, small)) {
                    if (at_once)
                        score_again<F>(scores, q, s.k[reader.k.slot][0]);
                    rescale = weigh<F, false>(c, t, tile * F::KEYS, row, !whole, scores, state, factor);
                }
                reader.release_k();
                if (tile == begin)
                    reader.release(&s.q_empty[n % F::Q_STAGES]);
                cot_wgmma_wait_after(state.sum[0] + state.sum[1], &s.tiles);
                reader.release_v();
                if (rescale)
                    rescale_output<F>(sums, factor);
                pack<F>(p, scores);
            };
            int tile = end - 2;
            if (half_first && tile >= begin + half_last)
                advance(number<4>{}, tile--);
            for (; tile >= begin + half_last; tile--)
                advance(number<F::KEYS / 16>{}, tile);
            if (half_last) {
                float few[32];
                cot_mbarrier_wait(&s.k_full[reader.k.slot], reader.k.parity);
                issue_scores<F>(few, q, s.k[reader.k.slot][0] + 64 * ROW);
                cot_mbarrier_wait(&s.v_full[reader.v.slot], reader.v.parity);
                issue_output<F>(sums, p, s.v[reader.v.slot][0], begin < end - 2);
                cot_wgmma_wait<1>();
                reader.release_k();
                reader.release(&s.q_empty[n % F::Q_STAGES]);
                const bool rescale = weigh<F, false>(c, t, begin * F::KEYS + 64, row, true, few, state, factor);
                cot_wgmma_wait_after(state.sum[0] + state.sum[1], &s.tiles);
                reader.release_v();
                if (rescale)
                    rescale_output<F>(sums, factor);
                pack<F>(p + F::KEYS / 4 - 16, few);
                cot_mbarrier_wait(&s.v_full[reader.v.slot], reader.v.parity);
                issue_output<F, F::KEYS / 16 - 4>(sums, p, s.v[reader.v.slot][0], true);
            } else {
                cot_mbarrier_wait(&s.v_full[reader.v.slot], reader.v.parity);
                issue_output<F>(sums, p, s.v[reader.v.slot][0], end - 1 > begin);
            }
            cot_wgmma_wait<0>();
            reader.release_v();
        } else {
            reader.release(&s.q_empty[n % F::Q_STAGES]);
#pragma unroll
            for (int i = 0; i < F::DV / 2; i++)
                sums[i] = 0.0f;
            state.reference[0] = state.reference[1] = __int_as_float(0xff800000);
            state.sum[0] = state.sum[1] = 0.0f;
        }
        reader.skip(begin - tiles_begin);
        finish<F>(c, t, group, row, s.out[0] + group * 64 * ROW, state, sums);
    }
}

template <class F> static __device__ __forceinline__ void forward(const attention_fwd_mapped &m)
{
    static_assert(sizeof(forward_shared<F>) <=
                      ATTENTION_FWD_SHARED(F::D, F::DV, F::KEYS, F::GROUPS, F::Q_STAGES, F::STAGES),
                  "what the launch asks for");
    forward_shared<F> &s = *(forward_shared<F> *)attention_memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < F::Q_STAGES; i++)
            cot_mbarrier_init(&s.q_full[i], 1), cot_mbarrier_init(&s.q_empty[i], 4 * F::GROUPS);
        for (int i = 0; i < F::STAGES; i++) {
            cot_mbarrier_init(&s.k_full[i], 1), cot_mbarrier_init(&s.k_empty[i], 4 * F::GROUPS);
            cot_mbarrier_init(&s.v_full[i], 1), cot_mbarrier_init(&s.v_empty[i], 4 * F::GROUPS);
        }
        cot_mbarrier_init(&s.v_landed, 1);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / GROUP, 0) - 1; /* so that it is known to be uniform */
    if (group < 0) {
        cot_fewer_registers<F::PRODUCER_REGISTERS>();
        if (threadIdx.x < WARP)
            load<F>(m, s);
    } else {
        cot_more_registers<F::CONSUMER_REGISTERS>();
        consume<F>(m.call, s, group);
    }
}

#define INSTANCE(element, all, name, d, dv, keys, groups, queries, stages)              \
    extern "C" __global__ void __launch_bounds__((groups + 1) * GROUP, 1)               \
        attention_fwd_sm90_##name(const __grid_constant__ attention_fwd_mapped m)       \
    {                                                                                   \
        forward<forward_kernel<element, d, dv, keys, groups, queries, stages, all>>(m); \
    }
#define INSTANCE_BF16(name, d, dv, keys, groups, queries, stages) \
    INSTANCE(__nv_bfloat16, false, bf16_##name, d, dv, keys, groups, queries, stages)
#define INSTANCE_BF16_ALL(name, d, dv, keys, groups, queries, stages) \
    INSTANCE(__nv_bfloat16, true, bf16_##name, d, dv, keys, groups, queries, stages)
#define INSTANCE_F16_ALL(name, d, dv, keys, groups, queries, stages) \
    INSTANCE(__half, true, f16_##name, d, dv, keys, groups, queries, stages)
#define INSTANCE_F16(name, d, dv, keys, groups, queries, stages) \
    INSTANCE(__half, false, f16_##name, d, dv, keys, groups, queries, stages)

#endif
