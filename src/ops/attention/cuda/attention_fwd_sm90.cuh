/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_sm90.cuh: the forward on Hopper, two products. A block processes one query tile after another, as long
 * as there are any. A tile has 64 queries for each consumer warpgroup. For each tile, the block loops over the key
 * tiles that its queries attend to, from the last to the first:
 *
 *   S = Q K^T    P = exp2(softmax_scale_log2 S - row_max)    O += P V    row_sum += rows of P
 *
 *   warpgroup 0   producer: one warp takes tile numbers, publishes the tiles' descriptions, and loads by TMA
 *   the others    consumers: 64 queries each. O, S and P are in registers
 *
 *   barrier           arrivals (bytes)           phase ends when                          who waits
 *   q full            1 (Q)                      a tile is described, its Q is loaded     consumers
 *   q empty           4 per consumer warpgroup   no product reads Q any more              producer
 *   k full            1 (K)                      a tile of K is loaded                    consumers
 *   k empty           4 per consumer warpgroup   S no longer reads it                     producer
 *   v full            1 (V)                      a tile of V is loaded, and clean         consumers
 *   v empty           4 per consumer warpgroup   O no longer reads it                     producer
 *   v uncleared full  1 (V)                      a tile that needs clearing is loaded     producer, clears it
 *
 * A consumer's step j. At its start, P_(j+1) is packed, its product with V_(j+1) is not yet issued, and no wgmma is in
 * flight:
 *   wait K_j | issue S_j and O += P_(j+1) V_(j+1) | wait S: mask and exp2, release K_j |
 *   wait O: release V_(j+1), rescale O, pack P_j
 * The warpgroups of a block attend to different keys. A warpgroup skips key tiles that none of its rows attends to.
 *
 * A row's row_max is a maximum of its scores, times softmax_scale_log2, but it may be stale. It is raised to the true
 * maximum only when P would exceed 2^MAX_P_LOG2. O is therefore rarely rescaled, and the threads of a row rarely
 * exchange maxima. The relative precision is the same, and row_sum and O stay consistent. Because a raise is rare,
 * unmasked tiles after the first compute P at once and test it afterwards. A warp that finds P too large recomputes its
 * scores. Other tiles find their maximum first.
 *
 * All kernels support windows and sequences of different lengths. `_softcap` kernels also support softcap and negative
 * scales. In the backward, `_softcap` also has what `_general` has.
 *
 * A counter hands out the tiles. Under a causal mask the long tiles of a sequence come first, so that the last tiles
 * are short. The order of each sum does not depend on the block that computes it. */
#ifndef COT_ATTENTION_FWD_SM90_CUH
#define COT_ATTENTION_FWD_SM90_CUH

#include "attention_fwd_load_sm90.cuh"
#include "attention_fwd_softmax_sm90.cuh"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/cluster.cuh"
#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/quad.cuh"
#include "../../../cuda/device/wgmma.cuh"

/* Issues S = Q K^T for this warpgroup's queries and 2 N keys. */
template <class F, int N>
static __device__ __forceinline__ void issue_scores(float (&scores)[N], const unsigned char *q, const unsigned char *k)
{
    const uint64_t a_desc = cot_wgmma_k_major(cot_shared_address(q)), b_desc = cot_wgmma_k_major(cot_shared_address(k));
    cot_wgmma_fence();
#pragma unroll
    for (int i = 0; i < F::D / 16; i++)
        cot_wgmma<typename F::E, false, false>(
            scores, a_desc + i / 4 * (F::QUERIES * ROW_BYTES >> 4) + i % 4 * COT_WGMMA_K_STEP,
            b_desc + i / 4 * (F::KEYS * ROW_BYTES >> 4) + i % 4 * COT_WGMMA_K_STEP, i > 0);
    cot_wgmma_commit();
}

/* Rescales O to a raised row_max. */
template <class F>
static __device__ __forceinline__ void rescale_output(float (&acc)[F::DV / 2], const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < F::DV / 2; i++)
        acc[i] *= factor[i / 2 % 2];
}

/* Issues O += P V for the keys 16 FROM to 16 TO - 1, or O = P V if not `accumulate`. */
template <class F, int FROM = 0, int TO = F::KEYS / 16>
static __device__ __forceinline__ void issue_output(float (&acc)[F::DV / 2], const uint32_t (&p)[F::KEYS / 4],
                                                    const unsigned char *v, bool accumulate)
{
    const uint64_t b_desc = cot_wgmma_mn_major(cot_shared_address(v), F::KEYS * ROW_BYTES);
    cot_wgmma_fence();
#pragma unroll
    for (int i = FROM; i < TO; i++)
        cot_wgmma<typename F::E, true>(acc, p + 4 * i, b_desc + i * COT_WGMMA_MN_STEP, accumulate || i > FROM);
    cot_wgmma_commit();
}

/* A consumer's position in the rings of K and V. */
template <class F> struct forward_consumer {
    shared_memory<F> &s;
    cot_pipeline_state<F::STAGES> k, v;

    __device__ __forceinline__ void release(uint64_t *barrier) const
    {
        __syncwarp();
        if (threadIdx.x % WARP == 0)
            cot_mbarrier_arrive(barrier);
    }

    __device__ __forceinline__ void release_k()
    {
        release(&s.k_empty[k.stage]);
        k.next();
    }

    __device__ __forceinline__ void release_v()
    {
        release(&s.v_empty[v.stage]);
        v.next();
    }

    /* Skips key tiles that none of this warpgroup's rows attends to. */
    __device__ __forceinline__ void skip_tiles(int tiles)
    {
        for (; tiles > 0; tiles--) {
            cot_mbarrier_wait(&s.k_full[k.stage], k.parity);
            release_k();
            cot_mbarrier_wait(&s.v_full[v.stage], v.parity);
            release_v();
        }
    }
};

/* lse of a row: row_max in natural units plus the logarithm of its sum. */
static __device__ __forceinline__ float lse_of(const attention_fwd_call &c, float row_max, float sum)
{
    return fmaf(row_max, c.lse_scale, fmaf(row_max, c.lse_scale_low, logf(sum)));
}

template <int N> struct int_constant {
    enum { value = N };
};

/* A 16-byte load that stays in its place. The compiler moved ordinary loads into the branches of the stores, one after
 * the other. */
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

/* Two adjacent columns of O divided by the row's sum, in 16 bits. half: which of the thread's two rows. unit: 8
 * columns. */
template <class F>
static __device__ __forceinline__ uint32_t output_pair(const float (&inverse_sum)[2], const float (&acc)[F::DV / 2],
                                                       int half, int unit)
{
    const int e = 4 * unit + 2 * half;
    return cot_pack_pair<typename F::E>(inverse_sum[half] * acc[e], inverse_sum[half] * acc[e + 1]);
}

/* The same, or 0 where the sum is 0. */
template <class F>
static __device__ __forceinline__ uint32_t output_or_zero(const float (&inverse_sum)[2], const float (&acc)[F::DV / 2],
                                                          int half, int unit)
{
    return inverse_sum[half] == 0.0f ? 0 : output_pair<F>(inverse_sum, acc, half, unit);
}

/* Passes a warp's rows of O through `staging`, where they become whole rows. `out`: the first of these rows. */
template <class F>
static __device__ __forceinline__ void store_staged(const attention_fwd_call &c, const attention_tile &t, uint16_t *out,
                                                    unsigned char *staging, int consumer_index, int warp_row,
                                                    const float (&inverse_sum)[2], const float (&acc)[F::DV / 2])
{
    const int lane = threadIdx.x % WARP;
    enum {
        UNITS = F::DV / 8,                       /* of a row, 16 bytes each */
        LANES_PER_ROW = UNITS == 12 ? 4 : UNITS, /* 96 columns: 12 units do not divide a warp */
        ROWS_PER_STEP = WARP / LANES_PER_ROW     /* units of a row, and rows, that a warp stores at a time */
    };
    unsigned char *const warp_staging = staging + (warp_row - consumer_index * 64) * ROW_BYTES;
    const uint32_t address = cot_shared_address(warp_staging) + lane % 16 * ROW_BYTES,
                   unit_offset = SWIZZLED_OFFSET(lane, lane / 16);
    const auto write_staging = [&](auto zeros) __attribute__((always_inline))
    {
#pragma unroll
        for (int unit = 0; unit < UNITS; unit += 2) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                words[i] = decltype(zeros)::value && inverse_sum[i % 2] == 0.0f
                               ? 0
                               : output_pair<F>(inverse_sum, acc, i % 2, unit + i / 2);
            cot_stmatrix_x4(address + unit / 8 * (F::QUERIES * ROW_BYTES) + (unit_offset ^ (unit % 8 * 16)), words);
        }
    };
    __syncwarp(); /* all lanes have read the previous contents */
    if (__any_sync(0xffffffffu, inverse_sum[0] == 0.0f || inverse_sum[1] == 0.0f))
        write_staging(int_constant<1>{});
    else
        write_staging(int_constant<0>{});
    __syncwarp();
    const int lane_row = lane / LANES_PER_ROW, rows = t.rows - warp_row - lane_row;
    uint16_t *const out_row = out + lane_row * c.out.stride[1] + lane % LANES_PER_ROW * 8;
    uint4 values[UNITS / 2];
#pragma unroll
    for (int i = 0; i < UNITS / 2; i++) {
        const int unit = i * LANES_PER_ROW % UNITS + lane % LANES_PER_ROW,
                  r = i * LANES_PER_ROW / UNITS * ROWS_PER_STEP + lane_row;
        values[i] = load_shared(warp_staging + unit / 8 * (F::QUERIES * ROW_BYTES) + r * ROW_BYTES +
                                SWIZZLED_OFFSET(r, unit % 8));
    }
#pragma unroll
    for (int i = 0; i < UNITS / 2; i++) {
        const int column = i * LANES_PER_ROW % UNITS * 8, r = i * LANES_PER_ROW / UNITS * ROWS_PER_STEP;
        if (r < rows && column + lane % LANES_PER_ROW * 8 < c.d_v)
            store_global(out_row + r * c.out.stride[1] + column, values[i]);
    }
}

/* Four lanes transpose their pairs to 16-byte units of O. */
template <class F>
static __device__ __forceinline__ void store_transposed(const attention_fwd_call &c, const attention_tile &t,
                                                        uint16_t *out, int warp_row, const float (&inverse_sum)[2],
                                                        const float (&acc)[F::DV / 2])
{
    enum { UNITS = F::DV / 8 /* of a row, 16 bytes each */ };
    const int lane = threadIdx.x % WARP, row = warp_row + lane / 4;
#pragma unroll
    for (int unit = 0; unit < UNITS; unit += 4) {
        const int column = 8 * (unit + lane % 4);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 values = cot_quad_transpose(output_or_zero<F>(inverse_sum, acc, half, unit),
                                                    output_or_zero<F>(inverse_sum, acc, half, unit + 1),
                                                    output_or_zero<F>(inverse_sum, acc, half, unit + 2),
                                                    output_or_zero<F>(inverse_sum, acc, half, unit + 3));
            if (row + 8 * half < t.rows && column < c.d_v)
                *(uint4 *)(out + (row - warp_row + 8 * half) * c.out.stride[1] + column) = values;
        }
    }
}

/* Element by element, for rows that are not aligned, and for float32. */
template <class F>
static __device__ __forceinline__ void store_elements(const attention_fwd_call &c, const attention_tile &t,
                                                      uint16_t *out, int warp_row, const float (&inverse_sum)[2],
                                                      const float (&acc)[F::DV / 2])
{
    const int lane = threadIdx.x % WARP, row = warp_row + lane / 4;
    if (c.out.dtype == COT_F32) { /* of a block of keys, to be merged */
        float *const out_f32 = (float *)c.out.data + (out - (uint16_t *)c.out.data);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < F::DV / 4; i++) {
                const int column = 8 * (i / 2) + 2 * (lane % 4) + i % 2;
                if (row + 8 * half < t.rows && column < c.d_v)
                    out_f32[(row - warp_row + 8 * half) * c.out.stride[1] + column] =
                        inverse_sum[half] == 0.0f ? 0.0f : inverse_sum[half] * acc[4 * (i / 2) + 2 * half + i % 2];
            }
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < F::DV / 4; i++) {
            const int column = 8 * (i / 2) + 2 * (lane % 4) + i % 2;
            if (row + 8 * half < t.rows && column < c.d_v)
                out[(row - warp_row + 8 * half) * c.out.stride[1] + column] =
                    (uint16_t)(output_or_zero<F>(inverse_sum, acc, half, i / 2) >> 16 * (i % 2));
        }
}

/* Stores rows of O divided by their sums, or zeros where the sum is 0, whatever O holds. */
template <class F>
static __device__ __forceinline__ void store_output(const attention_fwd_call &c, const attention_tile &t,
                                                    int consumer_index, unsigned char *staging,
                                                    const float (&inverse_sum)[2], const float (&acc)[F::DV / 2])
{
    const int warp_row = consumer_index * 64 + threadIdx.x % WARPGROUP / WARP * 16;
    uint16_t *const out = (uint16_t *)c.out.data + t.b * c.out.stride[0] + t.head * c.out.stride[2] +
                          (int64_t)(t.q_first_row + warp_row) * c.out.stride[1];
    if (F::STAGE_O && c.stores_out_vectors)
        store_staged<F>(c, t, out, staging, consumer_index, warp_row, inverse_sum, acc);
    else if (!F::STAGE_O && c.stores_out_vectors) /* one test outside of the loops, so that the transposes overlap */
        store_transposed<F>(c, t, out, warp_row, inverse_sum, acc);
    else
        store_elements<F>(c, t, out, warp_row, inverse_sum, acc);
}

/* Stores out and lse of this warpgroup's rows. No other work of the warpgroup overlaps with it, so it is kept short: a
 * thread processes its two rows side by side, and of the four lanes of two rows, two compute one logarithm each. */
template <class F>
static __device__ __forceinline__ void epilogue(const attention_fwd_call &c, const attention_tile &t,
                                                int consumer_index, int row, unsigned char *staging,
                                                const softmax_state &state, const float (&acc)[F::DV / 2])
{
    const float minus_infinity = __int_as_float(0xff800000);
    float sum[2], inverse_sum[2], lse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] = cot_quad_sum(state.row_sum[half]);
        sum[half] = row + 8 * half < t.used ? sum[half] : 0.0f;
        inverse_sum[half] =
            sum[half] == 0.0f ? 0.0f : cot_rcp(sum[half]); /* a NaN sum is kept, because it must show in out */
    }
    const bool odd_lane = threadIdx.x % 2;
    const float total = odd_lane ? sum[1] : sum[0];
    float value = lse_of(c, odd_lane ? state.row_max[1] : state.row_max[0], total);
    asm volatile("" : "+f"(value)); /* computed here, not moved into a branch */
    value = total == 0.0f ? minus_infinity : value;
    if (c.sink.data != nullptr) {
        const float sink = cot_load(c.sink.data, c.sink.dtype, t.head * c.sink.stride[0]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            lse[half] = sum[half] == 0.0f ? minus_infinity : lse_of(c, state.row_max[half], sum[half]);
            const float max_lse = fmaxf(lse[half], sink);
            if (row + 8 * half < t.used &&
                !(lse[half] == minus_infinity && sink == minus_infinity)) { /* fmaxf drops NaN */
                const float lse_with_sink = max_lse + logf(expf(lse[half] - max_lse) + expf(sink - max_lse));
                inverse_sum[half] *= expf(lse[half] - lse_with_sink);
                lse[half] = lse_with_sink;
            }
        }
        value = odd_lane ? lse[1] : lse[0];
    }
    if (c.out.data != nullptr)
        store_output<F>(c, t, consumer_index, staging, inverse_sum, acc);
    const int tile_row = row + 8 * odd_lane;
    if (c.lse.data != nullptr && threadIdx.x % 4 < 2 && tile_row < t.rows)
        ((float *)c.lse.data)[t.b * c.lse.stride[0] + t.head * c.lse.stride[1] +
                              (int64_t)(t.q_first_row + tile_row) * c.lse.stride[2]] = value;
}

template <class F>
static __device__ __forceinline__ void consume(const attention_fwd_call &c, shared_memory<F> &s,
                                               const int consumer_index)
{
    forward_consumer<F> consumer = {s, {}, {}};
    /* The first of the thread's two rows of the tile. The second is 8 rows below. */
    const int row = consumer_index * 64 + threadIdx.x % WARPGROUP / WARP * 16 + threadIdx.x % WARP / 4;
    float scores[F::KEYS / 2], acc[F::DV / 2], factor[2];
    uint32_t p[F::KEYS / 4];
    softmax_state state;
    for (uint32_t n = 0;; n++) {
        const attention_tile &t = s.tiles[n % TILE_STAGES];
        cot_mbarrier_wait(&s.q_full[n % F::Q_STAGES], n / F::Q_STAGES & 1);
        const unsigned char *const q = s.q[n % F::Q_STAGES][0] + consumer_index * 64 * ROW_BYTES;
        if (t.rows < 0)
            break;
        const attention_key_range range =
            F::PUBLISH_RANGES ? t.key_ranges[consumer_index] : key_range_of<F>(t, consumer_index);
        const int begin = range.begin, end = range.end, unmasked_begin = range.unmasked[0],
                  unmasked_end = range.unmasked[1];
        const int tiles_begin = t.begin;
        /* Half tiles have code of their own, because a wgmma must be issued and waited for in the same branch, or ptxas
         * serialises all of them. */
        const bool half_first_step = F::HALF_TILES && range.half_first_step,
                   half_last_step = F::HALF_TILES && range.half_last_step;
        /* Becomes false when scores exceed the range of softcap's short series. The next tile's scores
         * probably do, too. */
        bool try_fast = !F::SOFTCAP || c.cap.short_max_square > 0.0f;
        consumer.skip_tiles(t.end - end);
        if (end > begin) {
            cot_mbarrier_wait(&s.k_full[consumer.k.stage], consumer.k.parity);
            if (half_first_step) {
                float half_scores[32];
                issue_scores<F>(half_scores, q, s.k[consumer.k.stage][0]);
                cot_wgmma_wait<0>();
                softmax_step<F, true>(c, t, (end - 1) * F::KEYS, row, true, half_scores, state, factor);
                pack<F>(p, half_scores);
#pragma unroll
                for (int i = 16; i < F::KEYS / 4; i++)
                    p[i] = 0;
                consumer.release_k();
            } else {
                issue_scores<F>(scores, q, s.k[consumer.k.stage][0]);
                cot_wgmma_wait<0>();
                consumer.release_k();
                softmax_step<F, true>(c, t, (end - 1) * F::KEYS, row,
                                      end - 1 >= unmasked_end || end - 1 < unmasked_begin, scores, state, factor);
                pack<F>(p, scores);
            }
            if (end - 1 == begin)
                consumer.release(&s.q_empty[n % F::Q_STAGES]);
            /* One step: S of a key tile, and O with P of the previous step. p_chunks: P covers 16 * p_chunks keys (a
             * half tile: 64). */
            const auto attend_step = [&](auto p_chunks, int tile) __attribute__((always_inline))
            {
                cot_mbarrier_wait(&s.k_full[consumer.k.stage], consumer.k.parity);
                issue_scores<F>(scores, q, s.k[consumer.k.stage][0]);
                cot_mbarrier_wait(&s.v_full[consumer.v.stage], consumer.v.parity);
                const bool accumulate = tile < end - 2; /* not in the second step, whose P V is the first */
                issue_output<F, 0, decltype(p_chunks)::value>(acc, p, s.v[consumer.v.stage][0], accumulate);
                cot_wgmma_wait<1>();
                const bool unmasked = tile < unmasked_end && tile >= unmasked_begin;
                bool rescale = false;
                const bool fast = unmasked && try_fast;
                if (!fast || !softmax_step_fast<F>(c, scores, state, try_fast)) {
                    if (fast)
                        recompute_scores<F>(scores, q, s.k[consumer.k.stage][0]);
                    rescale = softmax_step<F, false>(c, t, tile * F::KEYS, row, !unmasked, scores, state, factor);
                }
                consumer.release_k();
                if (tile == begin)
                    consumer.release(&s.q_empty[n % F::Q_STAGES]);
                /* never stored: see wgmma.cuh */
                cot_wgmma_wait_after(state.row_sum[0] + state.row_sum[1], &s.tiles);
                consumer.release_v();
                if (rescale)
                    rescale_output<F>(acc, factor);
                pack<F>(p, scores);
            };
            int tile = end - 2;
            if (half_first_step && tile >= begin + half_last_step)
                attend_step(int_constant<4>{}, tile--);
            for (; tile >= begin + half_last_step; tile--)
                attend_step(int_constant<F::KEYS / 16>{}, tile);
            if (half_last_step) {
                float half_scores[32];
                cot_mbarrier_wait(&s.k_full[consumer.k.stage], consumer.k.parity);
                issue_scores<F>(half_scores, q, s.k[consumer.k.stage][0] + 64 * ROW_BYTES);
                cot_mbarrier_wait(&s.v_full[consumer.v.stage], consumer.v.parity);
                const bool accumulate = begin < end - 2;
                issue_output<F>(acc, p, s.v[consumer.v.stage][0], accumulate);
                cot_wgmma_wait<1>();
                consumer.release_k();
                consumer.release(&s.q_empty[n % F::Q_STAGES]);
                const bool rescale =
                    softmax_step<F, false>(c, t, begin * F::KEYS + 64, row, true, half_scores, state, factor);
                /* never stored: see wgmma.cuh */
                cot_wgmma_wait_after(state.row_sum[0] + state.row_sum[1], &s.tiles);
                consumer.release_v();
                if (rescale)
                    rescale_output<F>(acc, factor);
                pack<F>(p + F::KEYS / 4 - 16, half_scores);
                cot_mbarrier_wait(&s.v_full[consumer.v.stage], consumer.v.parity);
                issue_output<F, F::KEYS / 16 - 4>(acc, p, s.v[consumer.v.stage][0], true);
            } else {
                cot_mbarrier_wait(&s.v_full[consumer.v.stage], consumer.v.parity);
                issue_output<F>(acc, p, s.v[consumer.v.stage][0], end - 1 > begin);
            }
            cot_wgmma_wait<0>();
            consumer.release_v();
        } else {
            consumer.release(&s.q_empty[n % F::Q_STAGES]);
#pragma unroll
            for (int i = 0; i < F::DV / 2; i++)
                acc[i] = 0.0f;
            state.row_max[0] = state.row_max[1] = __int_as_float(0xff800000);
            state.row_sum[0] = state.row_sum[1] = 0.0f;
        }
        consumer.skip_tiles(begin - tiles_begin);
        epilogue<F>(c, t, consumer_index, row, s.out[0] + consumer_index * 64 * ROW_BYTES, state, acc);
    }
}

template <class F> static __device__ __forceinline__ void forward(const attention_fwd_mapped_call &mapped)
{
    static_assert(sizeof(shared_memory<F>) <=
                      ATTENTION_FWD_SHARED_BYTES(F::D, F::DV, F::KEYS, F::CONSUMERS, F::Q_STAGES, F::STAGES),
                  "larger than the shared memory that the host allots");
    shared_memory<F> &s = *(shared_memory<F> *)attention_memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < F::Q_STAGES; i++)
            cot_mbarrier_init(&s.q_full[i], 1), cot_mbarrier_init(&s.q_empty[i], 4 * F::CONSUMERS);
        for (int i = 0; i < F::STAGES; i++) {
            cot_mbarrier_init(&s.k_full[i], 1), cot_mbarrier_init(&s.k_empty[i], 4 * F::CONSUMERS);
            cot_mbarrier_init(&s.v_full[i], 1), cot_mbarrier_init(&s.v_empty[i], 4 * F::CONSUMERS);
        }
        cot_mbarrier_init(&s.v_uncleared_full, 1);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    /* The shuffle shows the compiler that `consumer_index` is uniform. */
    const int consumer_index = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0) - 1;
    if (consumer_index < 0) {
        cot_setmaxnreg_dec<F::PRODUCER_REGISTERS>();
        if (threadIdx.x < WARP)
            load<F>(mapped, s);
    } else {
        cot_setmaxnreg_inc<F::CONSUMER_REGISTERS>();
        consume<F>(mapped.call, s, consumer_index);
    }
}

#define INSTANCE(element, softcap, name, d, d_v, keys, consumers, q_stages, stages)                   \
    extern "C" __global__ void __launch_bounds__((consumers + 1) * WARPGROUP, 1)                      \
        attention_fwd_##name(const __grid_constant__ attention_fwd_mapped_call mapped)                \
    {                                                                                                 \
        forward<forward_traits<element, d, d_v, keys, consumers, q_stages, stages, softcap>>(mapped); \
    }
#define INSTANCE_BF16(name, d, d_v, keys, consumers, q_stages, stages) \
    INSTANCE(__nv_bfloat16, false, bf16_sm90_##name, d, d_v, keys, consumers, q_stages, stages)
#define INSTANCE_BF16_SOFTCAP(name, d, d_v, keys, consumers, q_stages, stages) \
    INSTANCE(__nv_bfloat16, true, bf16_sm90_##name, d, d_v, keys, consumers, q_stages, stages)
#define INSTANCE_F16_SOFTCAP(name, d, d_v, keys, consumers, q_stages, stages) \
    INSTANCE(__half, true, f16_sm90_##name, d, d_v, keys, consumers, q_stages, stages)
#define INSTANCE_F16(name, d, d_v, keys, consumers, q_stages, stages) \
    INSTANCE(__half, false, f16_sm90_##name, d, d_v, keys, consumers, q_stages, stages)

#endif
