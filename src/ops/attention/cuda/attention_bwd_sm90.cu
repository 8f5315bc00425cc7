/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_sm90.cu: the backward on Hopper for d and dv up to 64 or 128, five products. A block takes 128 keys of
 * a key-value head. K and V stay in shared memory, dK and dV in registers. For every query head of the group, the block
 * loops over the tiles of 64 queries that attend to its keys:
 *
 *   S^T = K Q^T    P = exp2(scale log2(e) S - lse_log2)    dP^T = V dO^T    dS = P (dP - D)
 *   dV += P^T dO   dK += dS^T Q                            dQ += dS K
 *
 *   warpgroup 0       producer: one thread loads by TMA, three dq_writers add finished slices of dQ to memory
 *   warpgroup 1       dQ: one slice of 64 columns at a time
 *   warpgroups 2, 3   consumers: 64 keys each. P^T and dS^T are register operands of dV and dK. dS reaches dQ through
 *                     shared memory.
 *
 *   barrier         arrivals (bytes)        phase ends when                       who waits
 *   kv full         1 (K and V)             K and V are loaded                    consumers, dQ: once
 *   q full          1 (Q, lse_log2)         a tile of Q is loaded                 consumers
 *   q empty         8: 1 per consumer warp  the dK product has read Q             producer
 *   dout full       1 (dO, D)               a tile of dO is loaded                consumers
 *   dout empty      8: 1 per consumer warp  the dV product has read dO            producer
 *   ds full         8: 1 per consumer warp  both halves of dS are stored          dQ
 *   ds empty        4: 1 per dQ warp        the dQ product has read dS            consumers
 *   dq full         4: 1 per dQ warp        a slice of dQ is staged               the stage's dq_writer
 *   dq empty        1                       the dq_writer has read the slice      dQ
 *   uncleared full  1 (the tile)            a tile that needs clearing is loaded  producer
 *
 * Step j of a consumer. No wgmma is in flight at its start or at its end:
 *   1. issue S_j and dK += dS_(j-1) Q_(j-1)
 *   2. wait for S, compute P; wait for dK, release Q_(j-1), pack P
 *   3. issue dP_j and dV += P_j dO_j
 *   4. wait for dP, compute dS and store it for dQ; wait for dV, release dO_j, pack dS
 * The arithmetic after a wait reads lse_log2 and D. As many of them as the registers hold are loaded before
 * the wait.
 *
 * Deterministic mode: the blocks add to a slice of dQ in ascending order of their keys. A semaphore for each slice
 * counts the blocks that have added. A block waits only for blocks of lower blockIdx.x. This wait relies on thread
 * blocks starting in the order of blockIdx.x. CUDA does not guarantee this order, but every tested GPU keeps it.
 *
 * Each kernel has three versions:
 *
 *   plain      full and causal masks, d = dv = 64 or 128
 *   _general   also windows, sequences of different lengths, and smaller d and dv: TMA fills the other columns with 0
 *   _softcap   also softcap
 *
 * GENERAL is set in the last two. In these, a consumer skips a tile if no query of the tile attends to the consumer's
 * keys (at the ends of a window and at a diagonal). dQ then uses the other consumer's half of dS only. A tile may
 * contain rows of other sequences. Their products must be 0. Masking P to 0 is not enough, because 0 * NaN = NaN. The
 * producer warp therefore loads such a tile on the barrier `uncleared full`, clears those rows, and then arrives on the
 * tile's full barrier. */
#include "attention_bwd_sm90.cuh"

#include "../../../cuda/device/mma.cuh"

/* Registers per thread. At launch each of the 4 warpgroups has 128, 512 in total. setmaxnreg divides them anew:
 * 32 + 64 + 2 x 208 = 512. */
enum { PRODUCER_REGISTERS = 32, DQ_REGISTERS = 64, CONSUMER_REGISTERS = 208 };

template <int D> struct shared_storage {
    enum { SLICES = D / 64 };
    unsigned char k[SLICES][2][TILE], v[SLICES][2][TILE]; /* 128 keys: two tiles, one for each consumer */
    unsigned char q[ATTENTION_Q_STAGES][SLICES][TILE];
    unsigned char dout[ATTENTION_DOUT_STAGES][SLICES][TILE];
    unsigned char ds[ATTENTION_DS_STAGES][2][TILE]; /* [query][key], one tile for each consumer's keys */
    float dq[ATTENTION_DQ_STAGES][ATTENTION_DQ_SLICE];
    float lse_log2[ATTENTION_Q_STAGES][QUERIES], delta[ATTENTION_DOUT_STAGES][QUERIES];
    uint64_t kv_full, q_full[ATTENTION_Q_STAGES], q_empty[ATTENTION_Q_STAGES];
    uint64_t dout_full[ATTENTION_DOUT_STAGES], dout_empty[ATTENTION_DOUT_STAGES];
    uint64_t ds_full[ATTENTION_DS_STAGES], ds_empty[ATTENTION_DS_STAGES];
    uint64_t dq_full[ATTENTION_DQ_STAGES], dq_empty[ATTENTION_DQ_STAGES], uncleared_full;
    uint32_t opaque_zero; /* for saved_p::restore */
};

static __device__ __forceinline__ int step_count(const attention_work &w)
{
    return w.heads * (w.tile_end - w.tile_begin);
}

template <int D>
static __device__ void load(const attention_bwd_mapped &m, shared_storage<D> &s, const attention_work &w)
{
    constexpr int SLICES = D / 64;
    const attention_bwd_call &c = m.call;
    if (step_count(w) == 0)
        return;
    cot_mbarrier_arrive_expect(&s.kv_full, 4 * SLICES * TILE);
    for (int slice = 0; slice < SLICES; slice++) {
        cot_tma_load_4d(s.k[slice], &m.k, slice * 64, w.first_key, w.kv_head, w.b, &s.kv_full);
        cot_tma_load_4d(s.v[slice], &m.v, slice * 64, w.first_key, w.kv_head, w.b, &s.kv_full);
    }
    /* Waits for the call's earlier kernels, which write lse_log2 and delta. K and V are inputs: they were complete
     * before those kernels began. */
    cot_griddepcontrol_wait();
    cot_fence_proxy_async_global();
    const int delta_row = (int)(c.B * c.H * c.tiles); /* delta follows all rows of lse_log2 */
    cot_pipeline_state<ATTENTION_Q_STAGES> q;
    cot_pipeline_state<ATTENTION_DOUT_STAGES> dout;
    for (int h = 0; h < w.heads; h++) {
        const int head = w.first_head + h;
        const int row = (int)statistics_row_of<false>(c, w, h);
        for (int tile = w.tile_end - 1; tile >= w.tile_begin; tile--, q.next(), dout.next()) {
            const uint32_t bytes = SLICES * TILE + QUERIES * sizeof(float);
            cot_mbarrier_wait(&s.q_empty[q.stage], q.parity ^ 1);
            cot_mbarrier_arrive_expect(&s.q_full[q.stage], bytes);
            for (int slice = 0; slice < SLICES; slice++)
                cot_tma_load_4d(s.q[q.stage][slice], &m.q, slice * 64, tile * QUERIES, head, w.b, &s.q_full[q.stage]);
            cot_tma_load_4d(s.lse_log2[q.stage], &m.statistics, 0, row + tile, 0, 0, &s.q_full[q.stage]);
            cot_mbarrier_wait(&s.dout_empty[dout.stage], dout.parity ^ 1);
            cot_mbarrier_arrive_expect(&s.dout_full[dout.stage], bytes);
            for (int slice = 0; slice < SLICES; slice++)
                cot_tma_load_4d(s.dout[dout.stage][slice], &m.dout, slice * 64, tile * QUERIES, head, w.b,
                                &s.dout_full[dout.stage]);
            cot_tma_load_4d(s.delta[dout.stage], &m.statistics, 0, delta_row + row + tile, 0, 0,
                            &s.dout_full[dout.stage]);
        }
    }
}

/* Clears the rows of other sequences, from `row` on, in a tile that TMA loads. */
template <int BYTES, int SLICES>
static __device__ __forceinline__ void wait_and_clear(uint64_t *uncleared_full, uint32_t &parity,
                                                      unsigned char (*slices)[BYTES], int row, uint64_t *full)
{
    cot_mbarrier_wait(uncleared_full, parity);
    parity ^= 1;
    attention_clear_rows<BYTES, SLICES>(slices, row);
    if (threadIdx.x == 0)
        cot_mbarrier_arrive(full);
}

/* Executed by a whole warp, because it clears rows of other sequences. */
template <int D>
static __device__ void load_general(const attention_bwd_mapped &m, shared_storage<D> &s, const attention_work &w)
{
    constexpr int SLICES = D / 64;
    const attention_bwd_call &c = m.call;
    if (step_count(w) == 0)
        return;
    uint32_t uncleared_parity = 0;
    /* TMA fills rows after the tensor's last row with zeros. */
    const bool keys_are_clean = w.first_key + KEYS <= w.used_k || w.k_row + w.used_k == c.scheduler.Tk;
    const int first_unclean_tile = w.q_row + w.used_q == c.scheduler.Tq ? w.tile_end : w.used_q / QUERIES;
    uint64_t *kv_full = keys_are_clean ? &s.kv_full : &s.uncleared_full;
    if (threadIdx.x == 0) {
        cot_mbarrier_arrive_expect(kv_full, 4 * SLICES * TILE);
        for (int slice = 0; slice < SLICES; slice++) {
            cot_tma_load_4d(s.k[slice], &m.k, slice * 64, w.k_row + w.first_key, w.kv_head, w.b, kv_full);
            cot_tma_load_4d(s.v[slice], &m.v, slice * 64, w.k_row + w.first_key, w.kv_head, w.b, kv_full);
        }
    }
    if (!keys_are_clean) /* V follows K in shared memory: one call clears both */
        wait_and_clear<2 * TILE, 2 * SLICES>(&s.uncleared_full, uncleared_parity, (unsigned char(*)[2 * TILE]) s.k,
                                             w.used_k - w.first_key, &s.kv_full);
    const int delta_row = (int)(c.row_delta - c.lse_log2) / QUERIES; /* delta follows all rows of lse_log2 */
    cot_pipeline_state<ATTENTION_Q_STAGES> q;
    cot_pipeline_state<ATTENTION_DOUT_STAGES> dout;
    for (int h = 0; h < w.heads; h++) {
        const int head = w.first_head + h;
        const int row = (int)statistics_row_of<true>(c, w, h);
        for (int tile = w.tile_end - 1; tile >= w.tile_begin; tile--, q.next(), dout.next()) {
            const uint32_t bytes = SLICES * TILE + QUERIES * sizeof(float);
            const bool clean = tile < first_unclean_tile;
            const int query = w.q_row + tile * QUERIES, used = w.used_q - tile * QUERIES;
            uint64_t *q_barrier = clean ? &s.q_full[q.stage] : &s.uncleared_full;
            uint64_t *dout_barrier = clean ? &s.dout_full[dout.stage] : &s.uncleared_full;
            cot_mbarrier_wait(&s.q_empty[q.stage], q.parity ^ 1);
            if (threadIdx.x == 0) {
                cot_mbarrier_arrive_expect(q_barrier, bytes);
                for (int slice = 0; slice < SLICES; slice++)
                    cot_tma_load_4d(s.q[q.stage][slice], &m.q, slice * 64, query, head, w.b, q_barrier);
                cot_tma_load_4d(s.lse_log2[q.stage], &m.statistics, 0, row + tile, 0, 0, q_barrier);
            }
            if (!clean)
                wait_and_clear<TILE, SLICES>(&s.uncleared_full, uncleared_parity, s.q[q.stage], used,
                                             &s.q_full[q.stage]);
            cot_mbarrier_wait(&s.dout_empty[dout.stage], dout.parity ^ 1);
            if (threadIdx.x == 0) {
                cot_mbarrier_arrive_expect(dout_barrier, bytes);
                for (int slice = 0; slice < SLICES; slice++)
                    cot_tma_load_4d(s.dout[dout.stage][slice], &m.dout, slice * 64, query, head, w.b, dout_barrier);
                cot_tma_load_4d(s.delta[dout.stage], &m.statistics, 0, delta_row + row + tile, 0, 0, dout_barrier);
            }
            if (!clean)
                wait_and_clear<TILE, SLICES>(&s.uncleared_full, uncleared_parity, s.dout[dout.stage], used,
                                             &s.dout_full[dout.stage]);
        }
    }
}

/* A dq_writer: adds the slices of one dQ stage to memory. There is one writer for each stage: to report a slice, a
 * writer waits until the sums are in memory, which takes about one step. */
template <int D, bool GENERAL, bool DETERMINISTIC>
static __device__ void write_dq(const attention_bwd_call &c, shared_storage<D> &s, const attention_work &w, int stage)
{
    constexpr int SLICES = D / 64;
    const int tiles = w.tile_end - w.tile_begin, steps = step_count(w);
    cot_griddepcontrol_wait(); /* for the kernel that clears dq_accum */
    cot_fence_proxy_async_global();
    uint32_t parity = 0;
    for (int n = stage; n < steps * SLICES; n += ATTENTION_DQ_STAGES, parity ^= 1) {
        const int slice = n % SLICES, step = n / SLICES, tile = w.tile_end - 1 - step % tiles;
        const int64_t slice_index = (statistics_row_of<GENERAL>(c, w, step / tiles) + tile) * SLICES + slice;
        add_dq_slice<DETERMINISTIC>(c, blocks_before_of<GENERAL>(w, tile), slice_index, s.dq[stage], &s.dq_full[stage],
                                    parity, &s.dq_empty[stage]);
    }
    cot_bulk_wait();
}

/* A slice of dQ = dS K, over the consumers' halves `first` to `last` of dS and K. */
template <typename E, int D>
static __device__ __forceinline__ void compute_dq_slice(shared_storage<D> &s, float (&acc)[32], uint32_t ds, int slice,
                                                        int first, int last, uint64_t *empty, uint32_t parity)
{
    cot_wgmma_fence();
#pragma unroll
    for (int half = first; half <= last; half++) {
        const uint64_t a = cot_wgmma_k_major(cot_shared_address(s.ds[ds][half]));
        const uint64_t b = cot_wgmma_mn_major(cot_shared_address(s.k[slice][half]), TILE);
#pragma unroll
        for (int k = 0; k < 4; k++)
            cot_wgmma<E, false, true>(acc, a + k * COT_WGMMA_K_STEP, b + k * COT_WGMMA_MN_STEP, half > first || k > 0);
    }
    cot_wgmma_commit();
    cot_mbarrier_wait(empty, parity);
    cot_wgmma_wait<0>();
}

template <typename E, int D, bool GENERAL>
static __device__ void compute_dq(const attention_bwd_call &c, shared_storage<D> &s, const attention_work &w)
{
    constexpr int SLICES = D / 64;
    const int lane = threadIdx.x % WARP;
    cot_pipeline_state<ATTENTION_DS_STAGES> ds;
    cot_pipeline_state<ATTENTION_DQ_STAGES> dq;
    float acc[32];
    const int steps = step_count(w);
    if (steps > 0)
        cot_mbarrier_wait(&s.kv_full, 0);
    int tile = w.tile_end - 1;
    for (int step = 0; step < steps; step++, ds.next()) {
        const bool has_lower = !GENERAL || !fully_masked(w, tile, w.first_key);
        const bool has_upper = !GENERAL || !fully_masked(w, tile, w.first_key + 64);
        tile = next_tile(w, tile);
        cot_mbarrier_wait(&s.ds_full[ds.stage], ds.parity);
        for (int slice = 0; slice < SLICES; slice++, dq.next()) {
            uint64_t *empty = &s.dq_empty[dq.stage];
            if (has_lower && has_upper) {
                compute_dq_slice<E, D>(s, acc, ds.stage, slice, 0, 1, empty, dq.parity ^ 1);
            } else if (has_lower || has_upper) {
                compute_dq_slice<E, D>(s, acc, ds.stage, slice, has_upper, has_upper, empty, dq.parity ^ 1);
            } else {
                cot_mbarrier_wait(empty, dq.parity ^ 1);
#pragma unroll
                for (int i = 0; i < 32; i++)
                    acc[i] = 0.0f;
            }
            if (slice == SLICES - 1 && lane == 0)
                cot_mbarrier_arrive(&s.ds_empty[ds.stage]);
            stage_dq_slice(s.dq[dq.stage], acc, &s.dq_full[dq.stage]);
        }
    }
}

/* Scales in f16. lse_log2 is smaller by ATTENTION_P_SCALE_LOG2 = 8, so P is 2^8 times as large. Without a scale, f16
 * loses bits of P below 2^-14, the average P at 16384 keys, and all bits below 2^-25. P stays finite up to 255. Apart
 * from rounding, P exceeds 1 only if the caller's lse is not that of the forward. dv_scale removes the scale from dV.
 *
 * The P that multiplies dP - D is doubled again: its scale is 2^9. dP and D are multiplied by ATTENTION_DP_SCALE =
 * 2^-9. dS therefore has no scale. */
template <typename E> constexpr float dv_scale = cot_is_f16<E> ? 1.0f / (1 << ATTENTION_P_SCALE_LOG2) : 1.0f;

/* P for dS. dV uses P rounded to 16 bits. dS uses P with 8 more bits. From the rounded P, dS would be rounded twice.
 * Where a query attends to few keys, its error would then exceed the bound in docs/guide/reproducibility.md.
 *   IN_F32       there are enough registers to keep P in float32
 *   otherwise    low_bytes[i] has the next 8 bits of the mantissas of elements 4i to 4i + 3, one byte each
 * A P that was rounded up has a byte of at least 128. As a signed number, the byte is then the negative difference of P
 * from its rounded value. `restore` adds the signed byte. An example in bf16:
 *   P = 1/3                        0x3eaaaaab
 *   rounded to bf16, and the byte  0x3eab, 0xaa = -86
 *   restored                       0x3eab0000 - 86 * 2^8 = 0x3eaaaa00
 * A tie has the byte 128, whether it was rounded up or down. If it was rounded down, the restored P is one unit of the
 * 16-bit format too small. */
template <typename E, bool IN_F32> struct saved_p {
    float f32[32];
    uint32_t low_bytes[8];

    __device__ __forceinline__ void save(const float (&p)[32])
    {
        constexpr int SHIFT = cot_is_f16<E> ? 3 : 0; /* moves the bits to the second byte */
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            uint32_t bits[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                bits[j] = __float_as_uint(p[i + j]) << SHIFT;
                if (IN_F32)
                    f32[i + j] = cot_is_f16<E> ? 2.0f * p[i + j] : p[i + j];
            }
            if (!IN_F32) /* 0x0051: byte 1 of both arguments. 0x5410: the lower halves of both arguments. */
                low_bytes[i / 4] =
                    __byte_perm(__byte_perm(bits[0], bits[1], 0x0051), __byte_perm(bits[2], bits[3], 0x0051), 0x5410);
        }
    }

    /* Element i. opaque_zero is 0, but the compiler cannot prove it. This keeps the compiler from unpacking before
     * registers are free. */
    __device__ __forceinline__ float restore(const uint32_t (&packed)[16], int i, uint32_t opaque_zero) const
    {
        constexpr int SHIFT = cot_is_f16<E> ? 3 : 0, TWICE = cot_is_f16<E> ? 1 << 23 << SHIFT : 0;
        if (IN_F32)
            return f32[i];
        const float2 pair = cot_unpack_pair<E>(packed[i / 2] + opaque_zero);
        const uint32_t sign = 8 | i % 4;
        /* The selector moves byte i % 4 to byte 1, its sign to bytes 2 and 3, and 0 to byte 0. __byte_perm has no sign
         * extension. */
        int delta_bits;
        asm("prmt.b32 %0, %1, 0, %2;"
            : "=r"(delta_bits)
            : "r"(low_bytes[i / 4]), "r"(sign << 12 | sign << 8 | (i % 4) << 4 | 4));
        /* TWICE adds 1 to the exponent of P, which doubles P.
         * A P that f16 rounded to 0 becomes about 2^-126. Without TWICE, 0 plus a negative byte would be NaN.
         * Order of additions: with another order, ptxas 13.0 ran out of registers. */
        return __int_as_float(__float_as_int(i % 2 == 0 ? pair.x : pair.y) + (delta_bits + TWICE >> SHIFT));
    }

    /* With softcap: element i of P times the slope. `upper` has bits 31 to 16, low_bytes bits 15 to 8. Bits 7 to 0 do
     * not matter: they get a copy of bits 15 to 8. The selector 0x1000 takes the lower half of `upper` for an even
     * element, 0x3200 the upper half for an odd one. */
    __device__ __forceinline__ float p_times_slope(const uint32_t (&upper)[4], int i) const
    {
        if (IN_F32)
            return f32[i];
        const uint32_t third = 4 + i % 4;
        return __uint_as_float(
            __byte_perm(upper[i / 2 % 4], low_bytes[i / 4], (i % 2 == 0 ? 0x1000 : 0x3200) | third << 4 | third));
    }
};

/* The key of this thread's even accumulator pairs. %tid is read again here: few tiles need the key, so it should not
 * occupy a register. */
static __device__ __forceinline__ int thread_key(const attention_work &w)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return w.first_key + (thread - 2 * WARPGROUP) / WARP * 16 + thread % WARP / 4;
}

/* With softcap, dS needs P times the slope 1 - tanh^2. With IN_F32, `saved` holds that product in float32. Otherwise
 * low_bytes holds its bits 15 to 8, and bits 31 to 16 are stored in the buffer of dS in shared memory. */
enum { SHORT_SERIES, SERIES, EXACT }; /* the method depends on the size of the scores: see attention_bwd_softcap */

template <typename E, bool IN_F32, int METHOD>
static __device__ __forceinline__ void softcap_to_p(const attention_bwd_call &c, const attention_work &w, int tile,
                                                    int key, const float *lse_log2, float2 pair0, float2 pair1,
                                                    uint32_t ds_address, float (&scores)[32], saved_p<E, IN_F32> &saved)
{
    const attention_bwd_softcap &cap = c.cap;
    const float2 *lse_pairs = (const float2 *)lse_log2;
    float2 next[2] = {pair0, pair1}; /* loaded one iteration ahead: the compiler does not move loads above stores */
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float2 now[2] = {next[0], next[1]};
        if (k < 3)
            next[0] = lse_pairs[8 * k + 8], next[1] = lse_pairs[8 * k + 12];
        float p_times_slope[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float x = scores[8 * k + i], u = x * x, base = i % 2 == 0 ? now[i / 4].x : now[i / 4].y;
            float exponent, slope;
            if (METHOD == SHORT_SERIES) {
                exponent = fmaf(x, fmaf(u, cap.short_series[1], cap.short_series[0]), -base);
                slope = fmaf(u, cap.short_slope[1], cap.short_slope[0]);
            } else if (METHOD == SERIES) {
                exponent = fmaf(x, fmaf(fmaf(u, cap.series[2], cap.series[1]), u, cap.series[0]), -base);
                slope = fmaf(fmaf(u, cap.series_slope[2], cap.series_slope[1]), u, cap.series_slope[0]);
            } else {
                const float tanh = tanh_anywhere(cap.scale * x);
                exponent = fmaf(tanh, cap.factor, -base);
                slope = cap.slope_scale * fmaf(-tanh, tanh, 1.0f);
            }
            float p = cot_ex2(exponent);
            if (METHOD != SHORT_SERIES && is_masked(w, tile, key, 8 * k + i))
                p = 0.0f;
            scores[8 * k + i] = p;
            p_times_slope[i] = p * slope;
        }
        if (IN_F32) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                saved.f32[8 * k + i] = p_times_slope[i];
        } else {
            uint32_t bits[8], upper[4];
#pragma unroll
            for (int i = 0; i < 8; i++)
                bits[i] = __float_as_uint(p_times_slope[i]);
#pragma unroll
            for (int i = 0; i < 4; i++)
                upper[i] = __byte_perm(bits[2 * i], bits[2 * i + 1], 0x7632); /* the upper halves of both */
#pragma unroll
            for (int i = 0; i < 2; i++) /* selectors as in saved_p::save */
                saved.low_bytes[2 * k + i] = __byte_perm(__byte_perm(bits[4 * i], bits[4 * i + 1], 0x0051),
                                                         __byte_perm(bits[4 * i + 2], bits[4 * i + 3], 0x0051), 0x5410);
            cot_stmatrix_x4_trans(ds_address + k * 16 * 128, upper);
        }
    }
}

/* Selects the method for a tile. Most tiles are not masked and have small scores. The largest sum of four squares shows
 * this in one warp vote. key_begin: the consumer's first key. pair0, pair1: the first elements of lse_log2. */
template <typename E, bool IN_F32>
static __device__ __forceinline__ void softcap_to_p(const attention_bwd_call &c, const attention_work &w, int tile,
                                                    int key_begin, const float *lse_log2, float2 pair0, float2 pair1,
                                                    uint32_t ds_address, float (&scores)[32], saved_p<E, IN_F32> &saved)
{
    int bits = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
        float square_sums[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float *x = scores + i + 4 * j;
            square_sums[j] = fmaf(x[3], x[3], fmaf(x[2], x[2], fmaf(x[1], x[1], fmaf(x[0], x[0], 0x1p-126f))));
        }
        bits = max(max(bits, __float_as_int(square_sums[0])), __float_as_int(square_sums[1]));
    }
    const float max_square_sum = __int_as_float(bits); /* NaN if a score is NaN: then both comparisons below fail */
    if (__all_sync(0xffffffffu, max_square_sum <= c.cap.max_square[0] && !needs_mask_general(w, tile, key_begin))) {
        softcap_to_p<E, IN_F32, SHORT_SERIES>(c, w, tile, 0, lse_log2, pair0, pair1, ds_address, scores, saved);
        return;
    }
    cot_wgmma_wait<0>(); /* dK must have read dS: the code below needs the registers of dS */
    const int key = thread_key(w);
    if (__all_sync(0xffffffffu, max_square_sum <= c.cap.max_square[1]))
        softcap_to_p<E, IN_F32, SERIES>(c, w, tile, key, lse_log2, pair0, pair1, ds_address, scores, saved);
    else
        softcap_to_p<E, IN_F32, EXACT>(c, w, tile, key, lse_log2, pair0, pair1, ds_address, scores, saved);
}

/* dS is packed twice: here for shared memory, while the registers of P are in use, and later for dK. `volatile` keeps
 * the compiler from reusing the first result. */
template <typename E> static __device__ __forceinline__ uint32_t pack_pair_volatile(float low, float high)
{
    uint32_t pair;
    if constexpr (cot_is_f16<E>)
        asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* Whether this consumer skips a tile because all of its scores are masked. The warp vote shows ptxas that the result is
 * uniform. Without windows at most one tile of a block could be skipped, and the test of each tile would cost more. */
template <bool GENERAL>
static __device__ __forceinline__ bool is_skipped(const attention_work &w, int tile, int key_begin)
{
    return GENERAL && __all_sync(0xffffffffu, fully_masked(w, tile, key_begin));
}

/* A load that stays before the next wait for wgmma. Shared memory is busy with the operands of wgmma, so a load takes
 * hundreds of cycles. */
static __device__ __forceinline__ float2 load_pair_early(const float *from)
{
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(pair.x), "=f"(pair.y)
                 : "r"(cot_shared_address(from))
                 : "memory");
    return pair;
}

/* One step of a consumer, as in the file header. Returns whether to skip the next tile.
 *   FIRST        there is no dS of a previous step
 *   previous_q   stage of Q of the previous step
 *   half         which of the two consumers this is */
template <typename E, int D, bool GENERAL, bool SOFTCAP, bool FIRST>
static __device__ __forceinline__ bool consumer_step(const attention_bwd_call &c, shared_storage<D> &s,
                                                     const attention_work &w, uint32_t n, uint32_t &previous_q,
                                                     int tile, int &half, int lane_column, uint32_t ds_fragments,
                                                     float (&dk)[D / 2], float (&dv)[D / 2], uint32_t (&packed)[16])
{
    /* P times the slope has its upper two bytes in the dS buffer of this stage, until dS overwrites them. */
    constexpr bool P_SLOPE_IN_SHARED = SOFTCAP && D > 64;
    /* Pairs of lse_log2 and of D that are loaded before the waits. The number of registers limits them. */
    constexpr int LSE_PRELOADS = SOFTCAP || (cot_is_f16<E> && D > 64) ? 2 : 4,
                  DELTA_PRELOADS = P_SLOPE_IN_SHARED ? 2 : LSE_PRELOADS;
    const int lane = threadIdx.x % WARP, key_begin = w.first_key + 64 * half;
    const uint32_t q = n % ATTENTION_Q_STAGES, dout = n % ATTENTION_DOUT_STAGES, ds = n % ATTENTION_DS_STAGES;
    float scores[32];
    cot_mbarrier_wait(&s.q_full[q], n / ATTENTION_Q_STAGES & 1);
    issue_gemm_ss<E, D>(scores, s.k[0][half], 2 * TILE, s.q[q][0]);
    if (!FIRST)
        issue_gemm_rs<E>(dk, packed, s.q[previous_q][0]);
    if (P_SLOPE_IN_SHARED)
        cot_mbarrier_wait(&s.ds_empty[ds], n / ATTENTION_DS_STAGES & 1 ^ 1);
    float2 lse_log2[8];
#pragma unroll
    for (int group = 0; group < LSE_PRELOADS; group++)
        lse_log2[group] = load_pair_early(&s.lse_log2[q][8 * group + lane_column]);
    cot_wgmma_wait<FIRST ? 0 : 1>();
    saved_p<E, D == 64> saved;
    const uint32_t ds_address = ds_fragments + ds * (2 * TILE);
    if (SOFTCAP) {
        softcap_to_p(c, w, tile, key_begin, s.lse_log2[q] + lane_column, lse_log2[0], lse_log2[1], ds_address, scores,
                     saved);
    } else {
        if (GENERAL ? needs_mask_general(w, tile, key_begin) : needs_mask(c, tile, key_begin)) {
            if (GENERAL)
                apply_mask_general(w, tile, thread_key(w),
                                   __int_as_float(c.scale_log2 < 0.0f ? 0x7f800000 : 0xff800000), scores);
            else
                apply_mask(c, tile, thread_key(w), scores);
        }
#pragma unroll
        for (int group = 0; group < 8; group++) {
            if (group >= LSE_PRELOADS)
                lse_log2[group] = *(const float2 *)&s.lse_log2[q][8 * group + lane_column];
#pragma unroll
            for (int i = 0; i < 4; i++)
                scores[4 * group + i] = cot_ex2(
                    fmaf(scores[4 * group + i], c.scale_log2, i % 2 == 0 ? -lse_log2[group].x : -lse_log2[group].y));
        }
        saved.save(scores);
    }
    if (!FIRST) {
        cot_wgmma_wait<0>();
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive(&s.q_empty[previous_q]);
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        packed[i] = cot_pack_pair<E>(scores[2 * i], scores[2 * i + 1]);
    cot_mbarrier_wait(&s.dout_full[dout], n / ATTENTION_DOUT_STAGES & 1);
    issue_gemm_ss<E, D>(scores, s.v[0][half], 2 * TILE, s.dout[dout][0]);
    issue_gemm_rs<E>(dv, packed, s.dout[dout][0]);
    float2 delta[8];
    uint32_t upper[2][4];
    if (P_SLOPE_IN_SHARED) {
        __syncwarp();
        cot_ldmatrix_x4_trans(upper[0], ds_address);
    }
#pragma unroll
    for (int group = 0; group < DELTA_PRELOADS; group++)
        delta[group] = load_pair_early(&s.delta[dout][8 * group + lane_column]);
    cot_wgmma_wait<1>();
    const auto subtract_delta = [&](int group) {
        if (group >= DELTA_PRELOADS)
            delta[group] = *(const float2 *)&s.delta[dout][8 * group + lane_column];
#pragma unroll
        for (int i = 4 * group; i < 4 * group + 4; i++) {
            const float row_delta = i % 2 == 0 ? delta[group].x : delta[group].y;
            scores[i] = cot_is_f16<E> ? fmaf(scores[i], ATTENTION_DP_SCALE, -row_delta) : scores[i] - row_delta;
        }
    };
    /* Without P_SLOPE_IN_SHARED all groups are loaded here, above the stores: the compiler does not move loads above
     * stores. With P_SLOPE_IN_SHARED there are not enough registers. */
    if (!P_SLOPE_IN_SHARED) {
#pragma unroll
        for (int group = 0; group < 8; group++)
            subtract_delta(group);
        cot_mbarrier_wait(&s.ds_empty[ds], n / ATTENTION_DS_STAGES & 1 ^ 1);
    }
    const uint32_t opaque_zero = cot_is_f16<E> && D == 128 && !SOFTCAP ? *(volatile uint32_t *)&s.opaque_zero : 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (P_SLOPE_IN_SHARED) {
            if (k < 3)
                cot_ldmatrix_x4_trans(upper[(k + 1) % 2], ds_address + (k + 1) * 16 * 128);
            subtract_delta(2 * k), subtract_delta(2 * k + 1);
        }
#pragma unroll
        for (int i = 8 * k; i < 8 * k + 8; i++)
            scores[i] *= SOFTCAP ? saved.p_times_slope(upper[k % 2], i) : saved.restore(packed, i, opaque_zero);
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = pack_pair_volatile<E>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
        cot_stmatrix_x4_trans(ds_address + k * 16 * 128, words);
    }
    cot_fence_proxy_async();
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.ds_full[ds]);
    half = __shfl_sync(0xffffffffu, half, 0); /* see `consume` */
    const bool skip = is_skipped<GENERAL>(w, next_tile(w, tile), key_begin);
    cot_wgmma_wait<0>();
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.dout_empty[dout]);
#pragma unroll
    for (int i = 0; i < 16; i++)
        packed[i] = cot_pack_pair<E>(scores[2 * i], scores[2 * i + 1]);
    previous_q = q;
    return skip;
}

/* Step n of a consumer that skips the tile: it only waits and arrives on the barriers. The dQ warpgroup evaluates
 * fully_masked itself, and so leaves out this half of dS. */
template <int D> static __device__ __forceinline__ void skip_step(shared_storage<D> &s, uint32_t n)
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

template <typename E, int D, bool GENERAL, bool SOFTCAP>
static __device__ __forceinline__ void consume(const attention_bwd_call &c, shared_storage<D> &s,
                                               const attention_work &w)
{
    float dk[D / 2], dv[D / 2];
    uint32_t packed[16]; /* P^T, then dS^T */
    /* Uniform in a warp. The shuffle shows this to ptxas 13.0, which then computes descriptors on the uniform datapath.
     * Each step shuffles `half` again. Otherwise ptxas keeps all values derived from it, and there are not enough
     * registers. */
    int half = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP - 2, 0);
    uint32_t ds_fragments = fragment_address(s.ds[0][half]);
    int lane_column = 2 * (threadIdx.x % 4);
    asm("" : "+r"(ds_fragments), "+r"(lane_column)); /* keeps the compiler from computing them again in each step */
#pragma unroll
    for (int i = 0; i < D / 2; i++)
        dk[i] = dv[i] = 0.0f;
    const uint32_t steps = (uint32_t)step_count(w);
    if (steps > 0)
        cot_mbarrier_wait(&s.kv_full, 0);
    int tile = w.tile_end - 1;
    uint32_t n = 0, previous_q = 0; /* previous_q: the stage of Q whose dS has not yet been added to dK */
    for (; n < steps && is_skipped<GENERAL>(w, tile, w.first_key + 64 * half); n++) {
        skip_step<D>(s, n);
        tile = next_tile(w, tile);
    }
    if (n < steps) {
        bool skip = consumer_step<E, D, GENERAL, SOFTCAP, true>(c, s, w, n, previous_q, tile, half, lane_column,
                                                                ds_fragments, dk, dv, packed);
        for (n++; n < steps; n++) {
            tile = next_tile(w, tile);
            if (skip) {
                skip_step<D>(s, n);
                skip = is_skipped<GENERAL>(w, next_tile(w, tile), w.first_key + 64 * half);
            } else {
                skip = consumer_step<E, D, GENERAL, SOFTCAP, false>(c, s, w, n, previous_q, tile, half, lane_column,
                                                                    ds_fragments, dk, dv, packed);
            }
        }
        issue_gemm_rs<E>(dk, packed, s.q[previous_q][0]);
        cot_wgmma_wait<0>();
    }
    const int key = thread_key(w);
    store_rows<E, GENERAL>(c, c.grad_v, c.dv_vectorized, w, key, 0, (int)c.dv, dv_scale<E>, dv);
    store_rows<E, GENERAL>(c, c.grad_k, c.dk_vectorized, w, key, 0, (int)c.d, c.scale, dk);
}

template <typename E, int D, bool GENERAL, bool SOFTCAP>
static __device__ __forceinline__ void backward(const attention_bwd_mapped &m)
{
    shared_storage<D> &s = *(shared_storage<D> *)attention_memory;
    const attention_bwd_call &c = m.call;
    attention_work w;
    if (!GENERAL) {
        w = work_of(c, blockIdx.x);
    } else {
        cot_griddepcontrol_wait();      /* for the kernel that writes seqlens */
        cot_fence_proxy_async_global(); /* orders the TMA loads below after it */
        if (!work_of_general(c, blockIdx.x, w))
            return;
    }
    if (threadIdx.x == 0) {
        s.opaque_zero = 0;
        cot_mbarrier_init(&s.kv_full, 1), cot_mbarrier_init(&s.uncleared_full, 1);
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
    const int group = threadIdx.x / WARPGROUP;
    if (group == 0) {
        cot_setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (GENERAL && threadIdx.x < WARP)
            load_general<D>(m, s, w);
        else if (!GENERAL && threadIdx.x == 0)
            load<D>(m, s, w);
        else if (threadIdx.x % WARP == 0 && threadIdx.x <= ATTENTION_DQ_STAGES * WARP) {
            if (c.deterministic)
                write_dq<D, GENERAL, true>(c, s, w, threadIdx.x / WARP - 1);
            else
                write_dq<D, GENERAL, false>(c, s, w, threadIdx.x / WARP - 1);
        }
    } else if (group == 1) {
        cot_setmaxnreg_dec<DQ_REGISTERS>();
        compute_dq<E, D, GENERAL>(c, s, w);
    } else {
        cot_setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume<E, D, GENERAL, SOFTCAP>(c, s, w);
    }
}

#define INSTANCE(name, element, d, general, cap)                                     \
    extern "C" __global__ void __launch_bounds__(ATTENTION_WARPGROUPS *WARPGROUP, 1) \
        attention_bwd_sm90_##name(const __grid_constant__ attention_bwd_mapped m)    \
    {                                                                                \
        backward<element, d, general, cap>(m);                                       \
    }
#define INSTANCES(dtype, element)                             \
    INSTANCE(dtype##_d64, element, 64, false, false)          \
    INSTANCE(dtype##_d128, element, 128, false, false)        \
    INSTANCE(dtype##_d64_general, element, 64, true, false)   \
    INSTANCE(dtype##_d128_general, element, 128, true, false) \
    INSTANCE(dtype##_d64_softcap, element, 64, true, true)    \
    INSTANCE(dtype##_d128_softcap, element, 128, true, true)
INSTANCES(bf16, __nv_bfloat16)
INSTANCES(f16, __half)
