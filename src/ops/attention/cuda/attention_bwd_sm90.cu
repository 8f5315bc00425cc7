/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_sm90.cu: the five products of the backward on Hopper, d up to 64 or 128. A block takes 128 keys of a
 * key-value head (K and V stay in shared memory, dK and dV in registers) and walks over the tiles of 64 queries that see
 * them, of every query head of the group:
 *
 *   S^T = K Q^T    P = exp2(scale log2(e) S - lse2)    dP^T = V dO^T    dS = P (dP - D)
 *   dV += P^T dO   dK += dS^T Q                        dQ += dS K
 *
 *   group 0     producer: a thread loads by TMA, three others add finished slices of dQ to memory
 *   group 1     dQ: a slice of 64 columns at a time
 *   groups 2, 3 consumers: 64 keys each; P^T and dS^T go from registers into dV and dK, dS through shared memory to dQ
 *
 *   barrier       arrivals (bytes)          phase ends when              who waits
 *   keys          1 (K and V)               K and V are there            consumers, dQ: once
 *   q full        1 (Q, lse2)               a tile of Q is there         consumers
 *   q empty       8: a consumer warp each   dK no longer reads it        the loader
 *   dout full     1 (dO, D)                 a tile of dO is there        consumers
 *   dout empty    8                         dV no longer reads it        the loader
 *   ds full       8                         both halves of dS are there  dQ
 *   ds empty      4: a warp of dQ each      dQ no longer reads it        consumers
 *   dq full       4                         a slice of dQ is staged      the stage's adder
 *   dq empty      1                         the slice has been read      dQ
 *
 * A consumer's step j, nothing under way at its ends:
 *   issue S_j and dK += dS_(j-1) Q_(j-1) | wait S: P | wait dK: release Q_(j-1), pack P
 *   issue dP_j and dV += P_j dO_j        | wait dP: dS, hand it to dQ | wait dV: release dO_j, pack dS
 * What the arithmetic after a wait needs from shared memory is asked for before it. In ..._all a tile that sees none of a
 * consumer's keys (at a window's ends and at a diagonal) is passed over, and dQ takes the other's half of dS alone.
 *
 * Deterministic (`ordered`): the blocks add to a slice of dQ in the order of their keys, the first ones first, which each
 * learns from a counter beside the slice. The block before it was launched earlier, so it does not wait in vain.
 *
 * Each kernel exists three times. The one named ..._all takes d and dv smaller than its tiles (the copy engine fills them up
 * with zeros), sequences that differ and windows, ..._softcap softcap besides. What a tile holds of other sequences must not
 * count, and 0 times it need not be 0: the producer's warp lets such tiles land on a barrier of its own, and clears those rows:
 *
 *   landed        1 (what is there)         a tile with foreign rows is there    the producer */
#include "attention_bwd_sm90.cuh"

#include "../../../cuda/device/mma.cuh"

/* What the launch allots, 512 of 128, shared out anew: 32 + 64 + 2 * 208. */
enum { PRODUCER_REGISTERS = 32, DQ_REGISTERS = 64, CONSUMER_REGISTERS = 208 };

template <int D> struct attention_shared {
    enum { SLICES = D / 64 };
    unsigned char k[SLICES][2][TILE], v[SLICES][2][TILE]; /* 128 keys: two tiles, one for each consumer */
    unsigned char q[ATTENTION_Q_STAGES][SLICES][TILE];
    unsigned char dout[ATTENTION_DOUT_STAGES][SLICES][TILE];
    unsigned char ds[ATTENTION_DS_STAGES][2][TILE]; /* [query][key], a tile for each consumer's keys */
    float dq[ATTENTION_DQ_STAGES][ATTENTION_DQ_SLICE];
    float lse2[ATTENTION_Q_STAGES][QUERIES], delta[ATTENTION_DOUT_STAGES][QUERIES];
    uint64_t keys, q_full[ATTENTION_Q_STAGES], q_empty[ATTENTION_Q_STAGES];
    uint64_t dout_full[ATTENTION_DOUT_STAGES], dout_empty[ATTENTION_DOUT_STAGES];
    uint64_t ds_full[ATTENTION_DS_STAGES], ds_empty[ATTENTION_DS_STAGES];
    uint64_t dq_full[ATTENTION_DQ_STAGES], dq_empty[ATTENTION_DQ_STAGES], landed;
    uint32_t zero; /* for join */
};

static __device__ __forceinline__ int steps_of(const attention_walk &w)
{
    return w.heads * (w.end - w.begin);
}

template <int D>
static __device__ void load(const attention_bwd_mapped &m, attention_shared<D> &s, const attention_walk &w)
{
    constexpr int SLICES = D / 64;
    const attention_bwd_call &c = m.call;
    if (steps_of(w) == 0)
        return;
    cot_mbarrier_arrive_expect(&s.keys, 4 * SLICES * TILE);
    for (int slice = 0; slice < SLICES; slice++) {
        cot_tensor_load_4d(s.k[slice], &m.k, slice * 64, w.first_key, w.kv_head, w.b, &s.keys);
        cot_tensor_load_4d(s.v[slice], &m.v, slice * 64, w.first_key, w.kv_head, w.b, &s.keys);
    }
    cot_wait_for_kernels_before(); /* of this call: lse2, delta. What they read is there already */
    cot_fence_async_global();
    const int deltas = (int)(c.B * c.H * c.tiles); /* rows of lse2 before them */
    cot_ring<ATTENTION_Q_STAGES> q;
    cot_ring<ATTENTION_DOUT_STAGES> dout;
    for (int h = 0; h < w.heads; h++) {
        const int head = w.first_head + h;
        const int row = (int)row_of<false>(c, w, h);
        for (int tile = w.end - 1; tile >= w.begin; tile--, q.next(), dout.next()) {
            const uint32_t bytes = SLICES * TILE + QUERIES * sizeof(float);
            cot_mbarrier_wait(&s.q_empty[q.slot], q.parity ^ 1);
            cot_mbarrier_arrive_expect(&s.q_full[q.slot], bytes);
            for (int slice = 0; slice < SLICES; slice++)
                cot_tensor_load_4d(s.q[q.slot][slice], &m.q, slice * 64, tile * QUERIES, head, w.b, &s.q_full[q.slot]);
            cot_tensor_load_4d(s.lse2[q.slot], &m.statistics, 0, row + tile, 0, 0, &s.q_full[q.slot]);
            cot_mbarrier_wait(&s.dout_empty[dout.slot], dout.parity ^ 1);
            cot_mbarrier_arrive_expect(&s.dout_full[dout.slot], bytes);
            for (int slice = 0; slice < SLICES; slice++)
                cot_tensor_load_4d(s.dout[dout.slot][slice], &m.dout, slice * 64, tile * QUERIES, head, w.b,
                                   &s.dout_full[dout.slot]);
            cot_tensor_load_4d(s.delta[dout.slot], &m.statistics, 0, deltas + row + tile, 0, 0,
                               &s.dout_full[dout.slot]);
        }
    }
}

/* Waits for what lands, clears the rows from `row` on, which are of other sequences, and says that it is there. */
template <int BYTES, int SLICES>
static __device__ __forceinline__ void clear_landed(uint64_t *landed, uint32_t &parity, unsigned char (*slices)[BYTES],
                                                    int row, uint64_t *full)
{
    cot_mbarrier_wait(landed, parity);
    parity ^= 1;
    attention_clear_rows<BYTES, SLICES>(slices, row);
    if (threadIdx.x == 0)
        cot_mbarrier_arrive(full);
}

/* `load` by a warp, which clears what is of other sequences. */
template <int D>
static __device__ void load_all(const attention_bwd_mapped &m, attention_shared<D> &s, const attention_walk &w)
{
    constexpr int SLICES = D / 64;
    const attention_bwd_call &c = m.call;
    if (steps_of(w) == 0)
        return;
    uint32_t landed = 0;
    /* Rows behind the tensor's last are zeros already. */
    const bool clean_keys = w.first_key + KEYS <= w.used_k || w.k_row + w.used_k == c.place.Tk;
    const int clean_tiles = w.q_row + w.used_q == c.place.Tq ? w.end : w.used_q / QUERIES;
    uint64_t *keys = clean_keys ? &s.keys : &s.landed;
    if (threadIdx.x == 0) {
        cot_mbarrier_arrive_expect(keys, 4 * SLICES * TILE);
        for (int slice = 0; slice < SLICES; slice++) {
            cot_tensor_load_4d(s.k[slice], &m.k, slice * 64, w.k_row + w.first_key, w.kv_head, w.b, keys);
            cot_tensor_load_4d(s.v[slice], &m.v, slice * 64, w.k_row + w.first_key, w.kv_head, w.b, keys);
        }
    }
    if (!clean_keys) /* V lies behind K */
        clear_landed<2 * TILE, 2 * SLICES>(&s.landed, landed, (unsigned char(*)[2 * TILE]) s.k, w.used_k - w.first_key,
                                           &s.keys);
    const int deltas = (int)(c.row_delta - c.lse2) / QUERIES; /* rows of lse2 before them */
    cot_ring<ATTENTION_Q_STAGES> q;
    cot_ring<ATTENTION_DOUT_STAGES> dout;
    for (int h = 0; h < w.heads; h++) {
        const int head = w.first_head + h;
        const int row = (int)row_of<true>(c, w, h);
        for (int tile = w.end - 1; tile >= w.begin; tile--, q.next(), dout.next()) {
            const uint32_t bytes = SLICES * TILE + QUERIES * sizeof(float);
            const bool clean = tile < clean_tiles;
            const int query = w.q_row + tile * QUERIES, used = w.used_q - tile * QUERIES;
            uint64_t *q_there = clean ? &s.q_full[q.slot] : &s.landed;
            uint64_t *dout_there = clean ? &s.dout_full[dout.slot] : &s.landed;
            cot_mbarrier_wait(&s.q_empty[q.slot], q.parity ^ 1);
            if (threadIdx.x == 0) {
                cot_mbarrier_arrive_expect(q_there, bytes);
                for (int slice = 0; slice < SLICES; slice++)
                    cot_tensor_load_4d(s.q[q.slot][slice], &m.q, slice * 64, query, head, w.b, q_there);
                cot_tensor_load_4d(s.lse2[q.slot], &m.statistics, 0, row + tile, 0, 0, q_there);
            }
            if (!clean)
                clear_landed<TILE, SLICES>(&s.landed, landed, s.q[q.slot], used, &s.q_full[q.slot]);
            cot_mbarrier_wait(&s.dout_empty[dout.slot], dout.parity ^ 1);
            if (threadIdx.x == 0) {
                cot_mbarrier_arrive_expect(dout_there, bytes);
                for (int slice = 0; slice < SLICES; slice++)
                    cot_tensor_load_4d(s.dout[dout.slot][slice], &m.dout, slice * 64, query, head, w.b, dout_there);
                cot_tensor_load_4d(s.delta[dout.slot], &m.statistics, 0, deltas + row + tile, 0, 0, dout_there);
            }
            if (!clean)
                clear_landed<TILE, SLICES>(&s.landed, landed, s.dout[dout.slot], used, &s.dout_full[dout.slot]);
        }
    }
}

/* Adds staged slices of dQ to memory, those of a stage: what is told to others when it has landed takes an adder about a
 * step. */
template <int D, bool ALL, bool ORDERED>
static __device__ void add(const attention_bwd_call &c, attention_shared<D> &s, const attention_walk &w, int stage)
{
    constexpr int SLICES = D / 64;
    const int tiles = w.end - w.begin, steps = steps_of(w);
    cot_wait_for_kernels_before(); /* zeros */
    cot_fence_async_global();
    uint32_t parity = 0;
    for (int n = stage; n < steps * SLICES; n += ATTENTION_DQ_STAGES, parity ^= 1) {
        const int slice = n % SLICES, step = n / SLICES, tile = w.end - 1 - step % tiles;
        const int64_t number = (row_of<ALL>(c, w, step / tiles) + tile) * SLICES + slice;
        add_slice<ORDERED>(c, turn_of<ALL>(w, tile), number, s.dq[stage], &s.dq_full[stage], parity,
                           &s.dq_empty[stage]);
    }
    cot_bulk_wait();
}

/* A slice of dQ from the consumers' halves of dS and K, `first` to `last`. */
template <typename E, int D>
static __device__ __forceinline__ void query_product(attention_shared<D> &s, float (&sums)[32], uint32_t ds, int slice,
                                                     int first, int last, uint64_t *free, uint32_t parity)
{
    cot_wgmma_fence();
#pragma unroll
    for (int half = first; half <= last; half++) {
        const uint64_t a = cot_wgmma_k_major(cot_shared_address(s.ds[ds][half]));
        const uint64_t b = cot_wgmma_mn_major(cot_shared_address(s.k[slice][half]), TILE);
#pragma unroll
        for (int k = 0; k < 4; k++)
            cot_wgmma<E, false, true>(sums, a + k * COT_WGMMA_K_STEP, b + k * COT_WGMMA_MN_STEP, half > first || k > 0);
    }
    cot_wgmma_commit();
    cot_mbarrier_wait(free, parity);
    cot_wgmma_wait<0>();
}

template <typename E, int D, bool ALL>
static __device__ void query_gradient(const attention_bwd_call &c, attention_shared<D> &s, const attention_walk &w)
{
    constexpr int SLICES = D / 64;
    const int lane = threadIdx.x % WARP;
    cot_ring<ATTENTION_DS_STAGES> ds;
    cot_ring<ATTENTION_DQ_STAGES> dq;
    float sums[32];
    const int steps = steps_of(w);
    if (steps > 0)
        cot_mbarrier_wait(&s.keys, 0);
    int tile = w.end - 1;
    for (int step = 0; step < steps; step++, ds.next()) {
        const bool lower = !ALL || !unseen(w, tile, w.first_key);
        const bool upper = !ALL || !unseen(w, tile, w.first_key + 64);
        tile = tile_after(w, tile);
        cot_mbarrier_wait(&s.ds_full[ds.slot], ds.parity);
        for (int slice = 0; slice < SLICES; slice++, dq.next()) {
            uint64_t *free = &s.dq_empty[dq.slot];
            if (lower && upper) {
                query_product<E, D>(s, sums, ds.slot, slice, 0, 1, free, dq.parity ^ 1);
            } else if (lower || upper) {
                query_product<E, D>(s, sums, ds.slot, slice, upper, upper, free, dq.parity ^ 1);
            } else {
                cot_mbarrier_wait(free, dq.parity ^ 1);
#pragma unroll
                for (int i = 0; i < 32; i++)
                    sums[i] = 0.0f;
            }
            if (slice == SLICES - 1 && lane == 0)
                cot_mbarrier_arrive(&s.ds_empty[ds.slot]);
            stage_sums(s.dq[dq.slot], sums, &s.dq_full[dq.slot]);
        }
    }
}

/* In f16 P is 2^ATTENTION_RAISE times as large as it should be (lse2 is less by that), in dS twice that (D and dP are less by
 * that): probabilities below 2^-14 would lose bits, and those of a million keys all. There is room for P up to 255, for an lse that is not the forward's. */
template <typename E> constexpr float lowered = cot_is_f16<E> ? 1.0f / (1 << ATTENTION_RAISE) : 1.0f;

/* P goes into dV rounded to 16 bits; dS takes it with 8 bits more, or the two roundings would add up to more than the
 * error rule has room for where a query sees few keys. KEPT: there are registers to keep it in float32. Else rest[i] has the
 * next 8 bits of the mantissas of elements 4i to 4i+3, a byte each, to be added with their sign (an exact tie that was
 * rounded down comes out a unit too small). */
template <typename E, bool KEPT> struct attention_weights {
    float kept[32];
    uint32_t rest[8];

    __device__ __forceinline__ void keep(const float (&p)[32])
    {
        constexpr int SHIFT = cot_is_f16<E> ? 3 : 0; /* brings the bits to the second byte */
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            uint32_t bits[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                bits[j] = __float_as_uint(p[i + j]) << SHIFT;
                if (KEPT)
                    kept[i + j] = cot_is_f16<E> ? 2.0f * p[i + j] : p[i + j];
            }
            if (!KEPT)
                rest[i / 4] =
                    __byte_perm(__byte_perm(bits[0], bits[1], 0x0051), __byte_perm(bits[2], bits[3], 0x0051), 0x5410);
        }
    }

    /* Element i: its byte, sign-extended, is added in the second byte. `zero` keeps the compiler from unpacking before
     * there is room: a zero that it cannot know. */
    __device__ __forceinline__ float join(const uint32_t (&packed)[16], int i, uint32_t zero) const
    {
        constexpr int SHIFT = cot_is_f16<E> ? 3 : 0, TWICE = cot_is_f16<E> ? 1 << 23 << SHIFT : 0;
        if (KEPT)
            return kept[i];
        const float2 pair = cot_unpack_pair<E>(packed[i / 2] + zero);
        const uint32_t sign = 8 | i % 4;
        int more; /* not __byte_perm, which has no signs */
        asm("prmt.b32 %0, %1, 0, %2;" : "=r"(more) : "r"(rest[i / 4]), "r"(sign << 12 | sign << 8 | (i % 4) << 4 | 4));
        /* Twice P, in the exponent: a P that f16 has rounded to 0 is 2^-126 then; with less than 0 it would be no number.
         * (In this order: otherwise ptxas found too few registers.) */
        return __int_as_float(__float_as_int(i % 2 == 0 ? pair.x : pair.y) + (more + TWICE >> SHIFT));
    }

    /* Under softcap: element i, whose upper bytes are of the eight in `upper`. What is below its third byte is of no account. */
    __device__ __forceinline__ float steep(const uint32_t (&upper)[4], int i) const
    {
        if (KEPT)
            return kept[i];
        const uint32_t third = 4 + i % 4;
        return __uint_as_float(
            __byte_perm(upper[i / 2 % 4], rest[i / 4], (i % 2 == 0 ? 0x1000 : 0x3200) | third << 4 | third));
    }
};

/* This thread's key, of even pairs, from its number, which is asked for anew: few tiles need it, and it takes no register. */
static __device__ __forceinline__ int own_key(const attention_walk &w)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return w.first_key + (thread - 2 * GROUP) / WARP * 16 + thread % WARP / 4;
}

/* Where softcap's slope, 1 - tanh^2, is to be in dS, that is P times the slope that dS takes. With KEPT it is what is kept;
 * else `rest` has the third bytes of it, and the upper two wait in shared memory, where dS will lie. */
enum { BRIEF, SERIES, EXACT }; /* what scores allow: see attention_bwd_softcap */

template <typename E, bool KEPT, int HOW>
static __device__ __forceinline__ void weigh_capped(const attention_bwd_call &c, const attention_walk &w, int tile,
                                                    int key, const float *lse2, float2 first, float2 second,
                                                    uint32_t to, float (&scores)[32],
                                                    attention_weights<E, KEPT> &weights)
{
    const attention_bwd_softcap &cap = c.cap;
    const float2 *at = (const float2 *)lse2;
    float2 next[2] = {first, second}; /* loads do not pass stores */
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float2 now[2] = {next[0], next[1]};
        if (k < 3)
            next[0] = at[8 * k + 8], next[1] = at[8 * k + 12];
        float steep[8]; /* P times the slope */
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float x = scores[8 * k + i], u = x * x, base = i % 2 == 0 ? now[i / 4].x : now[i / 4].y;
            float exponent, slope;
            if (HOW == BRIEF) {
                exponent = fmaf(x, fmaf(u, cap.brief[1], cap.brief[0]), -base);
                slope = fmaf(u, cap.brief_slope[1], cap.brief_slope[0]);
            } else if (HOW == SERIES) {
                exponent = fmaf(x, fmaf(fmaf(u, cap.series[2], cap.series[1]), u, cap.series[0]), -base);
                slope = fmaf(fmaf(u, cap.slope[2], cap.slope[1]), u, cap.slope[0]);
            } else {
                const float tanh = tanh_anywhere(cap.scale * x);
                exponent = fmaf(tanh, cap.factor, -base);
                slope = cap.slopes * fmaf(-tanh, tanh, 1.0f);
            }
            float p = cot_ex2(exponent);
            if (HOW != BRIEF && hidden(w, tile, key, 8 * k + i))
                p = 0.0f;
            scores[8 * k + i] = p;
            steep[i] = p * slope;
        }
        if (KEPT) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                weights.kept[8 * k + i] = steep[i];
        } else {
            uint32_t bits[8], upper[4];
#pragma unroll
            for (int i = 0; i < 8; i++)
                bits[i] = __float_as_uint(steep[i]);
#pragma unroll
            for (int i = 0; i < 4; i++)
                upper[i] = __byte_perm(bits[2 * i], bits[2 * i + 1], 0x7632);
#pragma unroll
            for (int i = 0; i < 2; i++)
                weights.rest[2 * k + i] = __byte_perm(__byte_perm(bits[4 * i], bits[4 * i + 1], 0x0051),
                                                      __byte_perm(bits[4 * i + 2], bits[4 * i + 3], 0x0051), 0x5410);
            cot_stmatrix_x4_trans(to + k * 16 * 128, upper);
        }
    }
}

/* Most tiles are seen whole and have small scores: sums of four squares tell it to one question of the warp. least: the
 * consumer's first key; first, second: the first elements of lse2. */
template <typename E, bool KEPT>
static __device__ __forceinline__ void weigh_capped(const attention_bwd_call &c, const attention_walk &w, int tile,
                                                    int least, const float *lse2, float2 first, float2 second,
                                                    uint32_t to, float (&scores)[32],
                                                    attention_weights<E, KEPT> &weights)
{
    int bits = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
        float four[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float *x = scores + i + 4 * j;
            four[j] = fmaf(x[3], x[3], fmaf(x[2], x[2], fmaf(x[1], x[1], fmaf(x[0], x[0], 0x1p-126f))));
        }
        bits = max(max(bits, __float_as_int(four[0])), __float_as_int(four[1]));
    }
    const float most = __int_as_float(bits); /* or no number: then none is small */
    if (__all_sync(0xffffffffu, most <= c.cap.near[0] && !ragged(w, tile, least))) {
        weigh_capped<E, KEPT, BRIEF>(c, w, tile, 0, lse2, first, second, to, scores, weights);
        return;
    }
    cot_wgmma_wait<0>(); /* for the registers of dS */
    const int key = own_key(w);
    if (__all_sync(0xffffffffu, most <= c.cap.near[1]))
        weigh_capped<E, KEPT, SERIES>(c, w, tile, key, lse2, first, second, to, scores, weights);
    else
        weigh_capped<E, KEPT, EXACT>(c, w, tile, key, lse2, first, second, to, scores, weights);
}

/* dS is packed twice: for shared memory, before the registers of P are free, and for dK. */
template <typename E> static __device__ __forceinline__ uint32_t pack_now(float low, float high)
{
    uint32_t pair;
    if constexpr (cot_is_f16<E>)
        asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* Whether a consumer has nothing to do with a tile. A question of the warp: ptxas takes it for one with the same answer. Without
 * windows it is one tile of a block, which is not worth a question for each. */
template <bool ALL> static __device__ __forceinline__ bool passes(const attention_walk &w, int tile, int least)
{
    return ALL && __all_sync(0xffffffffu, unseen(w, tile, least));
}

/* A load that stays before the wait for products that it stands before: shared memory, busy with the operands of products,
 * takes hundreds of cycles. */
static __device__ __forceinline__ float2 load_now(const float *at)
{
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(pair.x), "=f"(pair.y)
                 : "r"(cot_shared_address(at))
                 : "memory");
    return pair;
}

/* A step of a consumer, see above. FIRST: there is no dS of a step before, whose stage of Q is `before`. n: the step's number;
 * tile: its queries; half: which of the two consumers this is. Returns whether the next tile is to be passed over. */
template <typename E, int D, bool ALL, bool CAP, bool FIRST>
static __device__ __forceinline__ bool consume_tile(const attention_bwd_call &c, attention_shared<D> &s,
                                                    const attention_walk &w, uint32_t n, uint32_t &before, int tile,
                                                    int &half, int column, uint32_t fragments, float (&dk)[D / 2],
                                                    float (&dv)[D / 2], uint32_t (&packed)[16])
{
    constexpr bool STASH = CAP && D > 64;
    /* Pairs of lse2 and of D that are loaded before the waits: as many as there are registers for. */
    constexpr int SOON = CAP || (cot_is_f16<E> && D > 64) ? 2 : 4, SOON_D = STASH ? 2 : SOON;
    const int lane = threadIdx.x % WARP, least = w.first_key + 64 * half;
    const uint32_t q = n % ATTENTION_Q_STAGES, dout = n % ATTENTION_DOUT_STAGES, ds = n % ATTENTION_DS_STAGES;
    float scores[32];
    cot_mbarrier_wait(&s.q_full[q], n / ATTENTION_Q_STAGES & 1);
    score_product<E, D>(scores, s.k[0][half], 2 * TILE, s.q[q][0]);
    if (!FIRST)
        add_product<E>(dk, packed, s.q[before][0]);
    if (STASH)
        cot_mbarrier_wait(&s.ds_empty[ds], n / ATTENTION_DS_STAGES & 1 ^ 1);
    float2 lse2[8];
#pragma unroll
    for (int group = 0; group < SOON; group++)
        lse2[group] = load_now(&s.lse2[q][8 * group + column]);
    cot_wgmma_wait<FIRST ? 0 : 1>();
    attention_weights<E, D == 64> weights;
    const uint32_t to = fragments + ds * (2 * TILE);
    if (CAP) {
        weigh_capped(c, w, tile, least, s.lse2[q] + column, lse2[0], lse2[1], to, scores, weights);
    } else {
        if (ALL ? ragged(w, tile, least) : crossed(c, tile, least)) {
            if (ALL)
                hide_scores_all(w, tile, own_key(w), __int_as_float(c.scale_log2 < 0.0f ? 0x7f800000 : 0xff800000),
                                scores);
            else
                hide_scores(c, tile, own_key(w), scores);
        }
#pragma unroll
        for (int group = 0; group < 8; group++) {
            if (group >= SOON)
                lse2[group] = *(const float2 *)&s.lse2[q][8 * group + column];
#pragma unroll
            for (int i = 0; i < 4; i++)
                scores[4 * group + i] =
                    cot_ex2(fmaf(scores[4 * group + i], c.scale_log2, i % 2 == 0 ? -lse2[group].x : -lse2[group].y));
        }
        weights.keep(scores);
    }
    if (!FIRST) {
        cot_wgmma_wait<0>();
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive(&s.q_empty[before]);
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        packed[i] = cot_pack_pair<E>(scores[2 * i], scores[2 * i + 1]);
    cot_mbarrier_wait(&s.dout_full[dout], n / ATTENTION_DOUT_STAGES & 1);
    score_product<E, D>(scores, s.v[0][half], 2 * TILE, s.dout[dout][0]);
    add_product<E>(dv, packed, s.dout[dout][0]);
    float2 delta[8];
    uint32_t upper[2][4];
    if (STASH) {
        __syncwarp();
        cot_ldmatrix_x4_trans(upper[0], to);
    }
#pragma unroll
    for (int group = 0; group < SOON_D; group++)
        delta[group] = load_now(&s.delta[dout][8 * group + column]);
    cot_wgmma_wait<1>();
    const auto less = [&](int group) { /* dP - D */
                                       if (group >= SOON_D)
                                           delta[group] = *(const float2 *)&s.delta[dout][8 * group + column];
#pragma unroll
                                       for (int i = 4 * group; i < 4 * group + 4; i++) {
                                           const float own = i % 2 == 0 ? delta[group].x : delta[group].y;
                                           scores[i] =
                                               cot_is_f16<E> ? fmaf(scores[i], ATTENTION_LOWER, -own) : scores[i] - own;
                                       }
    };
    if (!STASH) { /* at once, before stores that loads do not pass; with the stash there are no registers */
#pragma unroll
        for (int group = 0; group < 8; group++)
            less(group);
        cot_mbarrier_wait(&s.ds_empty[ds], n / ATTENTION_DS_STAGES & 1 ^ 1);
    }
    const uint32_t zero = cot_is_f16<E> && D == 128 && !CAP ? *(volatile uint32_t *)&s.zero : 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (STASH) {
            if (k < 3)
                cot_ldmatrix_x4_trans(upper[(k + 1) % 2], to + (k + 1) * 16 * 128);
            less(2 * k), less(2 * k + 1);
        }
#pragma unroll
        for (int i = 8 * k; i < 8 * k + 8; i++)
            scores[i] *= CAP ? weights.steep(upper[k % 2], i) : weights.join(packed, i, zero);
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = pack_now<E>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
        cot_stmatrix_x4_trans(to + k * 16 * 128, words);
    }
    cot_proxy_fence();
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.ds_full[ds]);
    half = __shfl_sync(0xffffffffu, half, 0); /* see consume */
    const bool pass = passes<ALL>(w, tile_after(w, tile), least);
    cot_wgmma_wait<0>();
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.dout_empty[dout]);
#pragma unroll
    for (int i = 0; i < 16; i++)
        packed[i] = cot_pack_pair<E>(scores[2 * i], scores[2 * i + 1]);
    before = q;
    return pass;
}

/* Step n of a consumer whose keys no query of the tile sees: the barriers' share of it. dQ knows that there is no dS. */
template <int D> static __device__ __forceinline__ void skip_tile(attention_shared<D> &s, uint32_t n)
{
    const uint32_t q = n % ATTENTION_Q_STAGES, dout = n % ATTENTION_DOUT_STAGES, ds = n % ATTENTION_DS_STAGES;
    cot_mbarrier_wait(&s.q_full[q], n / ATTENTION_Q_STAGES & 1);
    cot_mbarrier_wait(&s.dout_full[dout], n / ATTENTION_DOUT_STAGES & 1);
    cot_mbarrier_wait(&s.ds_empty[ds], n / ATTENTION_DS_STAGES & 1 ^ 1);
    __syncwarp();
    if (threadIdx.x % WARP == 0) {
        cot_mbarrier_arrive(&s.q_empty[q]);
        cot_mbarrier_arrive(&s.dout_empty[dout]);
        cot_mbarrier_arrive(&s.ds_full[ds]);
    }
}

template <typename E, int D, bool ALL, bool CAP>
static __device__ __forceinline__ void consume(const attention_bwd_call &c, attention_shared<D> &s,
                                               const attention_walk &w)
{
    float dk[D / 2], dv[D / 2];
    uint32_t packed[16]; /* P^T, then dS^T */
    /* The same for a warp, as ptxas sees by the shuffle: descriptors are made by the uniform unit then. Where it did not change,
     * what follows from it would be kept, in registers that are not there. */
    int half = __shfl_sync(0xffffffffu, (int)threadIdx.x / GROUP - 2, 0);
    uint32_t fragments = fragment_address(s.ds[0][half]);
    int column = 2 * (threadIdx.x % 4);
    asm("" : "+r"(fragments), "+r"(column)); /* not to be made anew in each step */
#pragma unroll
    for (int i = 0; i < D / 2; i++)
        dk[i] = dv[i] = 0.0f;
    const uint32_t steps = (uint32_t)steps_of(w);
    if (steps > 0)
        cot_mbarrier_wait(&s.keys, 0);
    int tile = w.end - 1;
    uint32_t n = 0, before = 0; /* before: the stage of Q for the dS that dK still lacks */
    for (; n < steps && passes<ALL>(w, tile, w.first_key + 64 * half); n++) {
        skip_tile<D>(s, n);
        tile = tile_after(w, tile);
    }
    if (n < steps) {
        bool pass =
            consume_tile<E, D, ALL, CAP, true>(c, s, w, n, before, tile, half, column, fragments, dk, dv, packed);
        for (n++; n < steps; n++) {
            tile = tile_after(w, tile);
            if (pass) {
                skip_tile<D>(s, n);
                pass = passes<ALL>(w, tile_after(w, tile), w.first_key + 64 * half);
            } else {
                pass = consume_tile<E, D, ALL, CAP, false>(c, s, w, n, before, tile, half, column, fragments, dk, dv,
                                                           packed);
            }
        }
        add_product<E>(dk, packed, s.q[before][0]);
        cot_wgmma_wait<0>();
    }
    const int key = own_key(w);
    store_rows<E, ALL>(c, c.grad_v, c.dv_in_vectors, w, key, 0, (int)c.dv, lowered<E>, dv);
    store_rows<E, ALL>(c, c.grad_k, c.dk_in_vectors, w, key, 0, (int)c.d, c.scale, dk);
}

template <typename E, int D, bool ALL, bool CAP>
static __device__ __forceinline__ void backward(const attention_bwd_mapped &m)
{
    attention_shared<D> &s = *(attention_shared<D> *)attention_memory;
    const attention_bwd_call &c = m.call;
    attention_walk w;
    if (!ALL) {
        w = walk_of(c, blockIdx.x);
    } else {
        cot_wait_for_kernels_before(); /* the sequences */
        cot_fence_async_global();      /* and what else they wrote */
        if (!walk_all(c, blockIdx.x, w))
            return;
    }
    if (threadIdx.x == 0) {
        s.zero = 0;
        cot_mbarrier_init(&s.keys, 1), cot_mbarrier_init(&s.landed, 1);
        for (int i = 0; i < ATTENTION_Q_STAGES; i++)
            cot_mbarrier_init(&s.q_full[i], 1), cot_mbarrier_init(&s.q_empty[i], 8);
        for (int i = 0; i < ATTENTION_DOUT_STAGES; i++)
            cot_mbarrier_init(&s.dout_full[i], 1), cot_mbarrier_init(&s.dout_empty[i], 8);
        for (int i = 0; i < ATTENTION_DS_STAGES; i++)
            cot_mbarrier_init(&s.ds_full[i], 8), cot_mbarrier_init(&s.ds_empty[i], 4);
        for (int i = 0; i < ATTENTION_DQ_STAGES; i++)
            cot_mbarrier_init(&s.dq_full[i], 4), cot_mbarrier_init(&s.dq_empty[i], 1);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    const int group = threadIdx.x / GROUP;
    if (group == 0) {
        cot_fewer_registers<PRODUCER_REGISTERS>();
        if (ALL && threadIdx.x < WARP)
            load_all<D>(m, s, w);
        else if (!ALL && threadIdx.x == 0)
            load<D>(m, s, w);
        else if (threadIdx.x % WARP == 0 && threadIdx.x <= ATTENTION_DQ_STAGES * WARP) {
            if (c.ordered)
                add<D, ALL, true>(c, s, w, threadIdx.x / WARP - 1);
            else
                add<D, ALL, false>(c, s, w, threadIdx.x / WARP - 1);
        }
    } else if (group == 1) {
        cot_fewer_registers<DQ_REGISTERS>();
        query_gradient<E, D, ALL>(c, s, w);
    } else {
        cot_more_registers<CONSUMER_REGISTERS>();
        consume<E, D, ALL, CAP>(c, s, w);
    }
}

#define INSTANCE(name, element, d, all, cap)                                      \
    extern "C" __global__ void __launch_bounds__(ATTENTION_GROUPS *GROUP, 1)      \
        attention_bwd_sm90_##name(const __grid_constant__ attention_bwd_mapped m) \
    {                                                                             \
        backward<element, d, all, cap>(m);                                        \
    }
#define INSTANCES(dtype, element)                          \
    INSTANCE(dtype##_d64, element, 64, false, false)       \
    INSTANCE(dtype##_d128, element, 128, false, false)     \
    INSTANCE(dtype##_d64_all, element, 64, true, false)    \
    INSTANCE(dtype##_d128_all, element, 128, true, false)  \
    INSTANCE(dtype##_d64_softcap, element, 64, true, true) \
    INSTANCE(dtype##_d128_softcap, element, 128, true, true)
INSTANCES(bf16, __nv_bfloat16)
INSTANCES(f16, __half)
