/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_consumer_sm90.cuh: what the key-block kernel and the pair kernel share: the shared memory of a thread
 * block, and the consumer warpgroups. attention_bwd_key_blocks_sm90.cu explains the roles, the barriers and the
 * steps. */
#ifndef COT_ATTENTION_BWD_CONSUMER_SM90_CUH
#define COT_ATTENTION_BWD_CONSUMER_SM90_CUH

#include "attention_bwd_common_sm90.cuh"

#include "../../../cuda/device/mma.cuh"

/* Registers per thread. At launch each of the 4 warpgroups has 128, 512 in total. setmaxnreg changes that:
 * 32 + 64 + 2 x 208 = 512. */
enum { PRODUCER_REGISTERS = 32, DQ_REGISTERS = 64, CONSUMER_REGISTERS = 208 };
enum {
    END_OF_WORK = -1, /* first_key of the entry of `work` that follows the last unit */
};

/* The shared memory of a thread block. PAIRS: in the pair kernel (attention_bwd_pairs_sm90.cu). */
template <int TILE_COLUMNS, bool PAIRS> struct bwd_shared {
    enum {
        COLUMN_PANELS = TILE_COLUMNS / 64,
        DQ_STAGES = PAIRS ? 1 : ATTENTION_BWD_DQ_STAGES,
        /* Unit n is the one with units_taken = n. When the producer writes the work of unit n, `kv empty` of unit n - 2
         * has completed. Warps may still read the work of unit n - 1. Consumers and dQ warps may still read that of
         * unit n - 2, because they arrive on `kv empty` before they store dK and dV, or the last rows of dq. So 3
         * entries are needed. With 4, n % WORK_STAGES is one AND. At 64 tile columns there is no shared memory for 4. */
        WORK_STAGES = PAIRS || TILE_COLUMNS == 64 ? 3 : 4,
        QUERIES = ATTENTION_BWD_TILE_QUERIES(TILE_COLUMNS),     /* queries of a tile */
        Q_PANEL_BYTES = QUERIES * 64 * 2,                       /* bytes of a panel of Q or dO */
        DQ_TILES_PER_QUERY_TILE = QUERIES / 64 * COLUMN_PANELS, /* of 64 queries by 64 columns */
    };
    /* 128 keys: 64 for each consumer. */
    unsigned char k[COLUMN_PANELS][2][TILE_64X64_BYTES], v[COLUMN_PANELS][2][TILE_64X64_BYTES];
    unsigned char q[ATTENTION_BWD_Q_STAGES][COLUMN_PANELS][Q_PANEL_BYTES];
    unsigned char dout[ATTENTION_BWD_DOUT_STAGES][COLUMN_PANELS][Q_PANEL_BYTES];
    /* [query][key], one tile for each consumer's keys. */
    unsigned char ds[ATTENTION_BWD_DS_STAGES][2][QUERIES * 64 * 2];
    /* Operands of dQ from the peer: its dS for the dQ tile that this thread block computes, and 64 columns of its K. */
    unsigned char peer_ds[PAIRS ? 2 : 0][TILE_64X64_BYTES], peer_k[PAIRS ? 2 : 0][TILE_64X64_BYTES];
    float dq[DQ_STAGES][ATTENTION_BWD_DQ_TILE_FLOATS];
    float lse_log2[ATTENTION_BWD_Q_STAGES][QUERIES], scaled_delta[ATTENTION_BWD_DOUT_STAGES][QUERIES];
    union {
        attention_work work[WORK_STAGES]; /* ring: entry n % WORK_STAGES has the work of unit n */
        cluster_ticket ticket;            /* used only until the producer writes `work` */
    };
    union { /* values in shared memory, because the consumers have no registers for them at 64 tile columns */
        int tile_index[ATTENTION_BWD_Q_STAGES]; /* specialised versions at 64 tile columns: index of the query tile in
                                                 * each Q stage */
        /* GENERAL without softcap: for each consumer warp, the ring_step of the first step that this warp does not skip
         * in the current key block. */
        uint32_t first_unskipped_ring_step[TILE_COLUMNS == 64 && !PAIRS ? 8 : 1];
    };
    /* Of thread blocks that take a single key block: its number, see take_key_block. STORES_DQ: see take_shares. */
    uint32_t own_unit_number;
    uint32_t zero;                        /* 0, see opaque_zero */
    int dq_action[PAIRS ? 0 : DQ_STAGES]; /* STORES_DQ: the attention_dq_action of the dQ tile of each stage */
    uint64_t kv_full, kv_empty, q_full[ATTENTION_BWD_Q_STAGES], q_empty[ATTENTION_BWD_Q_STAGES];
    uint64_t dout_full[ATTENTION_BWD_DOUT_STAGES], dout_empty[ATTENTION_BWD_DOUT_STAGES];
    uint64_t ds_full[ATTENTION_BWD_DS_STAGES], ds_empty[ATTENTION_BWD_DS_STAGES];
    uint64_t dq_full[DQ_STAGES], dq_ready[DQ_STAGES], uncleared_full[PAIRS ? 0 : 1];
    uint64_t peer_ds_full[PAIRS ? 1 : 0], sent_ds_empty[PAIRS ? 1 : 0], pair_full[PAIRS ? 1 : 0],
        pair_empty[PAIRS ? 1 : 0];
    uint64_t peer_q_empty[PAIRS ? ATTENTION_BWD_Q_STAGES : 0], peer_dout_empty[PAIRS ? ATTENTION_BWD_DOUT_STAGES : 0];
    uint4 unit_number[PAIRS ? 1 : 0]; /* first word: the number of the pair, which thread block 0 sends */
};

template <int TILE_COLUMNS> using key_block_shared = bwd_shared<TILE_COLUMNS, false>;
template <int TILE_COLUMNS> using pair_shared = bwd_shared<TILE_COLUMNS, true>;

/* Waits until no warp reads K and V of the previous key block any more, and then sets the expected bytes of K and V of
 * the next one. Consumers may still store dK and dV of the previous one. units_taken: the units that this thread block
 * took earlier. */
template <int TILE_COLUMNS, bool PAIRS>
static __device__ __forceinline__ void begin_loading_keys(bwd_shared<TILE_COLUMNS, PAIRS> &s, uint32_t units_taken,
                                                          uint64_t *full)
{
    cot_mbarrier_wait(&s.kv_empty, parity_of<1>(units_taken) ^ 1);
    cot_mbarrier_arrive_expect(full, sizeof s.k + sizeof s.v + sizeof s.peer_k);
}

/* Loads the panels of K and V from row key_row of the tensors on. */
template <int TILE_COLUMNS, bool PAIRS>
static __device__ __forceinline__ void load_keys(const attention_bwd_mapped_call &mapped,
                                                 bwd_shared<TILE_COLUMNS, PAIRS> &s, const attention_work &w,
                                                 int key_row, uint64_t *full)
{
    for (int panel = 0; panel < TILE_COLUMNS / 64; panel++) {
        cot_tma_load_4d(s.k[panel], &mapped.k, panel * 64, key_row, w.kv_head, w.b, full);
        cot_tma_load_4d(s.v[panel], &mapped.v, panel * 64, key_row, w.kv_head, w.b, full);
    }
}

/* Prefetches the same panels into the L2 cache. Shared memory still holds the previous key block. */
template <int TILE_COLUMNS>
static __device__ __forceinline__ void prefetch_keys(const attention_bwd_mapped_call &mapped, const attention_work &w,
                                                     int key_row)
{
    for (int panel = 0; panel < TILE_COLUMNS / 64; panel++) {
        cot_tma_prefetch_4d(&mapped.k, panel * 64, key_row, w.kv_head, w.b);
        cot_tma_prefetch_4d(&mapped.v, panel * 64, key_row, w.kv_head, w.b);
    }
}

/* Completes `kv full` without loading K and V, because no query attends to the keys or there are no more units. */
template <int TILE_COLUMNS, bool PAIRS>
static __device__ __forceinline__ void publish_work_only(bwd_shared<TILE_COLUMNS, PAIRS> &s, uint32_t units_taken)
{
    cot_mbarrier_wait(&s.kv_empty, parity_of<1>(units_taken) ^ 1);
    cot_mbarrier_arrive(&s.kv_full);
}

/* Scales in f16. lse_log2 is smaller by ATTENTION_BWD_P_EXPONENT = 8, so P is 2^8 times as large. Without a scale, f16
 * loses bits of P below 2^-14, the average P at 16384 keys, and all bits below 2^-25. The scaled P overflows f16 only
 * if P exceeds 255 (65504 / 2^8). Apart from rounding, P exceeds 1 only if the caller's lse is not that of the forward.
 * dv_scale removes the scale from dV.
 *
 * dP and delta are multiplied by ATTENTION_BWD_DP_SCALE = 2^-8 (`scaled_delta`). dS therefore has no scale. */
template <typename E> constexpr float dv_scale = cot_is_f16<E> ? 1.0f / (1 << ATTENTION_BWD_P_EXPONENT) : 1.0f;

/* P for dS, with 8 more bits than the 16-bit P that dV reads. For example P = 1/3 in bf16:
 *   P in float32                   0x3eaaaaab
 *   rounded to bf16, and the byte  0x3eab, 0xaa = -86
 *   restored                       0x3eab0000 - 86 * 2^8 = 0x3eaaaa00
 *
 * If dS used the rounded P, it would be rounded twice. If a query attends to few keys, the error would then exceed the
 * bound in docs/guide/accuracy.md.
 *
 * low_bytes[i] has the 8 bits of the mantissa that follow those of the 16-bit format, of elements 4i to 4i + 3. A
 * P that was rounded up has a byte of at least 128. As a signed number, the byte is P minus the rounded P,
 * in units of the last bit that is kept. `restore` adds the signed byte. A tie has the byte 128, whether it was rounded
 * up or down. If it was rounded down, the restored P is one unit of the 16-bit format too small.
 *
 * BIASED_BYTES: low_bytes has the byte plus 128, which is not signed. One byte permutation joins it to the rounded P,
 * and one subtraction removes the 128. In the example, 0xaa becomes 0x2a, and 0x3eab2a00 - 0x8000 = 0x3eaaaa00. This
 * saves one instruction per element. f16 has no such form, because its 8 bits are not a byte of a float32. The GENERAL
 * versions at 64 tile columns are slower with it. */
template <typename E, int N, bool BIASED_BYTES> struct saved_p {
    uint32_t low_bytes[N / 4];

    __device__ __forceinline__ void save(const float (&p)[N])
    {
        constexpr int SHIFT = cot_is_f16<E> ? 3 : 0; /* moves the bits to the second byte */
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            uint32_t bits[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                bits[j] = __float_as_uint(p[i + j]) << SHIFT;
            /* 0x0051: byte 1 of both arguments. 0x5410: the lower halves of both arguments. */
            low_bytes[i / 4] =
                __byte_perm(__byte_perm(bits[0], bits[1], 0x0051), __byte_perm(bits[2], bits[3], 0x0051), 0x5410);
            if (BIASED_BYTES)
                low_bytes[i / 4] ^= 0x80808080;
        }
    }

    /* Element i. zero: opaque_zero(), one: opaque_one(). */
    __device__ __forceinline__ float restore(const uint32_t (&packed)[N / 2], int i, uint32_t zero, uint32_t one) const
    {
        if constexpr (BIASED_BYTES) {
            /* The selector takes, from the lowest byte on: the sign of P, which fills a byte with 0, then the low byte,
             * then the rounded P. */
            const uint32_t selector = (i % 2 == 0 ? 0x1009 : 0x320b) | (4 + i % 4) << 4;
            uint32_t joined;
            asm("prmt.b32 %0, %1, %2, %3;" : "=r"(joined) : "r"(packed[i / 2]), "r"(low_bytes[i / 4]), "r"(selector));
            asm("mad.lo.u32 %0, %0, %1, %2;" : "+r"(joined) : "r"(one), "r"(0xffff8000));
            return __uint_as_float(joined);
        }
        constexpr int SHIFT = cot_is_f16<E> ? 3 : 0;
        const float2 unpacked = cot_unpack_pair<E>(packed[i / 2] + zero);
        const uint32_t sign = 8 | i % 4;
        /* The selector moves byte i % 4 to byte 1, its sign to bytes 2 and 3, and 0 to byte 0. __byte_perm has no sign
         * extension. */
        int difference;
        asm("prmt.b32 %0, %1, 0, %2;"
            : "=r"(difference)
            : "r"(low_bytes[i / 4]), "r"(sign << 12 | sign << 8 | (i % 4) << 4 | 4));
        const float rounded = i % 2 == 0 ? unpacked.x : unpacked.y;
        if (!cot_is_f16<E>)
            return __int_as_float(__float_as_int(rounded) + difference);
        /* A P that f16 rounded to 0 may have a negative byte. Then the sum is negative, and P is 0. */
        return __int_as_float(max(__float_as_int(rounded) + (difference >> SHIFT), 0));
    }

    /* With softcap: element i of P times the slope. `upper` has bits 31 to 16, low_bytes bits 15 to 8. Bits 7 to 0 do
     * not matter, so they get a copy of bits 15 to 8. The selector 0x1000 takes the lower half of `upper` for an even
     * element, 0x3200 the upper half for an odd one. */
    __device__ __forceinline__ float p_times_slope(const uint32_t (&upper)[4], int i) const
    {
        const uint32_t low_byte = 4 + i % 4; /* its digit in the selector */
        return __uint_as_float(
            __byte_perm(upper[i / 2 % 4], low_bytes[i / 4], (i % 2 == 0 ? 0x1000 : 0x3200) | low_byte << 4 | low_byte));
    }
};

/* P for dS at 96 used columns, where there are registers for P in float32. It has the functions of saved_p. With
 * saved_p, causal calls of 4096 tokens took 14 % longer on an H200. */
template <int N> struct float32_p {
    float p[N];

    __device__ __forceinline__ void save(const float (&from)[N])
    {
#pragma unroll
        for (int i = 0; i < N; i++)
            p[i] = from[i];
    }

    __device__ __forceinline__ float restore(const uint32_t (&)[N / 2], int i, uint32_t, uint32_t) const
    {
        return p[i];
    }
};

/* The type that keeps P for dS. */
template <typename E, int N, bool BIASED_BYTES, int USED_COLUMNS> struct p_for_ds {
    using type = saved_p<E, N, BIASED_BYTES>;
};
template <typename E, int N, bool BIASED_BYTES> struct p_for_ds<E, N, BIASED_BYTES, 96> {
    using type = float32_p<N>;
};

/* The members of attention_work that the steps of a consumer read. */
struct consumer_work {
    int first_key, first_tile, tile_direction, used_k, first_visible_offset, last_visible_offset;
};

/* The query tile of step `step`, as step_of computes it. */
static __device__ __forceinline__ int tile_of(const attention_bwd_call &c, const consumer_work &w, int step)
{
    return w.first_tile + w.tile_direction * (int)__umulhi(2 * (uint32_t)step, c.inverse_query_heads);
}

/* The key of this thread's accumulators 4i and 4i + 1. %tid is read again here, because few tiles need the key, and
 * it should not occupy a register. */
template <typename WORK> static __device__ __forceinline__ int thread_key(const WORK &w)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return w.first_key + (thread - 2 * WARPGROUP) / WARP * 16 + thread % WARP / 4;
}

/* How tanh is computed, by the size of the scores: see attention_bwd_softcap. */
enum { SHORT_SERIES, LONG_SERIES, TANH };

/* P with softcap, by METHOD. dS needs P times the slope 1 - tanh^2. low_bytes holds bits 15 to 8 of that product, and
 * bits 31 to 16 are stored in the buffer of dS in shared memory. key: unused by SHORT_SERIES, whose tiles have no
 * masked score. */
template <typename E, int N, int METHOD>
static __device__ __forceinline__ void compute_p_softcap_by(const attention_bwd_call &c, const consumer_work &w,
                                                            int tile, int key, const float *lse_log2, float2 first_lse,
                                                            float2 second_lse, uint32_t ds_address, float (&scores)[N],
                                                            saved_p<E, N, false> &saved)
{
    const attention_bwd_softcap &cap = c.cap;
    const float2 *lse_float2 = (const float2 *)lse_log2;
    /* Loaded one iteration ahead, because the compiler does not move loads above stores. */
    float2 next_lse[2] = {first_lse, second_lse};
#pragma unroll
    for (int k = 0; k < N / 8; k++) {
        const float2 current_lse[2] = {next_lse[0], next_lse[1]};
        if (k < N / 8 - 1)
            next_lse[0] = lse_float2[8 * k + 8], next_lse[1] = lse_float2[8 * k + 12];
        float p_times_slope[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float x = scores[8 * k + i], u = x * x,
                        lse = i % 2 == 0 ? current_lse[i / 4].x : current_lse[i / 4].y;
            float exponent, slope;
            if (METHOD == SHORT_SERIES) {
                exponent = fmaf(x, fmaf(u, cap.short_series[1], cap.short_series[0]), -lse);
                slope = fmaf(u, cap.short_slope[1], cap.short_slope[0]);
            } else if (METHOD == LONG_SERIES) {
                exponent = fmaf(x, fmaf(fmaf(u, cap.long_series[2], cap.long_series[1]), u, cap.long_series[0]), -lse);
                slope = fmaf(fmaf(u, cap.long_slope[2], cap.long_slope[1]), u, cap.long_slope[0]);
            } else {
                const float tanh_x = tanh_full_range(cap.scale * x);
                exponent = fmaf(tanh_x, cap.factor, -lse);
                slope = fmaf(-tanh_x, tanh_x, 1.0f);
            }
            float p = cot_ex2(exponent);
            if (METHOD != SHORT_SERIES && is_masked<2 * N>(w, tile, key, 8 * k + i))
                p = 0.0f;
            scores[8 * k + i] = p;
            p_times_slope[i] = p * slope;
        }
        uint32_t bits[8], upper[4];
#pragma unroll
        for (int i = 0; i < 8; i++)
            bits[i] = __float_as_uint(p_times_slope[i]);
#pragma unroll
        for (int i = 0; i < 4; i++)
            upper[i] = __byte_perm(bits[2 * i], bits[2 * i + 1], 0x7632); /* the upper halves of both words */
#pragma unroll
        for (int i = 0; i < 2; i++) /* selectors as in saved_p::save */
            saved.low_bytes[2 * k + i] = __byte_perm(__byte_perm(bits[4 * i], bits[4 * i + 1], 0x0051),
                                                     __byte_perm(bits[4 * i + 2], bits[4 * i + 3], 0x0051), 0x5410);
        cot_stmatrix_x4_trans(ds_address + k * 16 * 128, upper);
    }
}

/* Selects the method for a tile, and computes P. Most tiles are not masked and have small scores. One warp vote tests
 * both: no score is masked, and the largest sum of four squares is small. key_begin: the consumer's first key.
 * first_lse, second_lse: lse_log2 of this thread's two queries in the first and in the second octet of queries. */
template <typename E, int N>
static __device__ __forceinline__ void compute_p_softcap(const attention_bwd_call &c, const consumer_work &w, int tile,
                                                         int key_begin, const float *lse_log2, float2 first_lse,
                                                         float2 second_lse, uint32_t ds_address, float (&scores)[N],
                                                         saved_p<E, N, false> &saved)
{
    int bits = 0;
#pragma unroll
    for (int i = 0; i < N; i += 8) {
        float square_sums[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float *x = scores + i + 4 * j;
            /* The addend 2^-126 changes nothing. It keeps ptxas from sharing x[0] * x[0] with compute_p_softcap_by. If
             * ptxas 13.0 shares it, it spills 8 bytes at 128 tile columns. */
            square_sums[j] = fmaf(x[3], x[3], fmaf(x[2], x[2], fmaf(x[1], x[1], fmaf(x[0], x[0], 0x1p-126f))));
        }
        bits = max(max(bits, __float_as_int(square_sums[0])), __float_as_int(square_sums[1]));
    }
    const float max_square_sum = __int_as_float(bits); /* NaN if a score is NaN. Both comparisons below then fail */
    if (__all_sync(0xffffffffu,
                   max_square_sum <= c.cap.short_max_square && !needs_mask_general<2 * N>(w, tile, key_begin))) {
        compute_p_softcap_by<E, N, SHORT_SERIES>(c, w, tile, 0, lse_log2, first_lse, second_lse, ds_address, scores,
                                                 saved);
        return;
    }
    cot_wgmma_wait<0>(); /* until dK has read dS, because the code below needs the registers of dS */
    const int key = thread_key(w);
    if (__all_sync(0xffffffffu, max_square_sum <= c.cap.long_max_square))
        compute_p_softcap_by<E, N, LONG_SERIES>(c, w, tile, key, lse_log2, first_lse, second_lse, ds_address, scores,
                                                saved);
    else
        compute_p_softcap_by<E, N, TANH>(c, w, tile, key, lse_log2, first_lse, second_lse, ds_address, scores, saved);
}

/* dS is packed twice: here for shared memory, while the registers of P are in use, and later for dK. `volatile` keeps
 * the compiler from reusing the first result. */
template <typename E> static __device__ __forceinline__ uint32_t pack_two_volatile(float low, float high)
{
    uint32_t word;
    if constexpr (cot_is_f16<E>)
        asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else
        asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

/* Whether this consumer skips a tile because all of its scores are masked. Only in GENERAL versions. The specialised
 * versions have no windows: a key block could skip at most one tile, and testing every tile would cost more than that
 * tile. The warp vote shows ptxas that the result is uniform. */
template <int QUERIES, bool GENERAL>
static __device__ __forceinline__ bool is_skipped(const consumer_work &w, int tile, int key_begin)
{
    return GENERAL && __all_sync(0xffffffffu, fully_masked<QUERIES>(w, tile, key_begin));
}

/* ---- hiding constants from ptxas, and keeping loads in place ----------------------------------------------------- */

/* 0, but the compiler cannot prove it. `restore` adds it to the packed P. This keeps the compiler from unpacking P
 * before registers are free. Versions that do not need it get a constant 0. */
template <typename E, bool SOFTCAP, int TILE_COLUMNS, bool PAIRS>
static __device__ __forceinline__ uint32_t opaque_zero(bwd_shared<TILE_COLUMNS, PAIRS> &s)
{
    return (cot_is_f16<E> || TILE_COLUMNS == 64) && !SOFTCAP ? *(volatile uint32_t *)&s.zero : 0;
}

/* 1, but the compiler cannot prove it. `restore` subtracts with an integer multiply-add, because that does not use the
 * pipe of the permutations. With a constant 1, ptxas would replace the multiply-add by an addition. The specialised
 * versions at 128 tile columns do not need it. With softcap, `restore` is not called.
 *   64 tile columns                 opaque_zero + 1
 *   128 tile columns, GENERAL       gridDim.y, which is 1
 *   128 tile columns, specialised   the constant 1 */
template <int TILE_COLUMNS, bool GENERAL> static __device__ __forceinline__ uint32_t opaque_one(uint32_t zero)
{
    return TILE_COLUMNS == 64 ? zero + 1 : GENERAL ? gridDim.y : 1;
}

/* Loads that the compiler must not move. They stand between wgmma and its wait: while wgmma reads shared memory, a load
 * takes hundreds of cycles, and the wait hides that. In the loop of compute_ds they stay in their iteration. */
static __device__ __forceinline__ int load_pinned(const int *from)
{
    int value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(cot_shared_address(from)) : "memory");
    return value;
}

static __device__ __forceinline__ float2 load_float2_pinned(const float *from)
{
    float2 values;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(values.x), "=f"(values.y)
                 : "r"(cot_shared_address(from))
                 : "memory");
    return values;
}

/* At 64 tile columns without softcap, the first step of a key block multiplies a dS of zeros with its own tile of Q. A
 * separate first step without this product needs more registers than there are. NaN in Q reach dK in both cases,
 * because the next step multiplies the same tile with its dS. */
template <int TILE_COLUMNS, bool SOFTCAP> constexpr bool first_step_adds_zeros = TILE_COLUMNS == 64 && !SOFTCAP;

/* The ring_step of the first step that this warp does not skip in the current key block. It is in shared memory,
 * because in f16 a register for it makes ptxas spill or serialise wgmma. */
template <int TILE_COLUMNS>
static __device__ __forceinline__ volatile uint32_t &first_unskipped_ring_step_of(key_block_shared<TILE_COLUMNS> &s)
{
    return s.first_unskipped_ring_step[threadIdx.x / WARP % 8];
}

/* The template parameters of a consumer. */
template <typename E_, int TILE_COLUMNS_, int USED_COLUMNS_, bool GENERAL_, bool SOFTCAP_, bool PAIRS_>
struct consumer_traits {
    using E = E_;
    using shared = bwd_shared<TILE_COLUMNS_, PAIRS_>;
    static constexpr int TILE_COLUMNS = TILE_COLUMNS_, USED_COLUMNS = USED_COLUMNS_, QUERIES = shared::QUERIES;
    static constexpr bool GENERAL = GENERAL_, SOFTCAP = SOFTCAP_;
};

/* The registers that a thread of a consumer keeps from step to step: references to variables of `consume`, which a step
 * updates. */
template <typename T> struct consumer_registers {
    float (&dk)[T::USED_COLUMNS / 2], (&dv)[T::USED_COLUMNS / 2]; /* sums of the key block */
    uint32_t (&packed)[T::QUERIES / 4];                           /* P^T, then dS^T, in 16 bits */
    uint32_t &previous_q;   /* Q stage of the previous step, whose dS^T Q is still to be added to dK */
    int &consumer;          /* 0 or 1: which of the two consumers this is */
    int &lane_query;        /* the thread's accumulators hold queries lane_query and lane_query + 1 of each octet */
    uint32_t &ds_fragments; /* shared address of this thread's fragment in stage 0 of dS */
};

/* P of a tile, in place of its scores: in part 2 of a step without softcap. A query octet is 8 queries: one column
 * group of the accumulator. `lse_log2` holds the values of the first PRELOADS query octets, staged_lse those of the
 * tile. */
template <typename T, int PRELOADS, int N, int QUERY_OCTETS>
static __device__ __forceinline__ void compute_p(const attention_bwd_call &c, const consumer_work &w, int tile,
                                                 int key_begin, const float *staged_lse, int lane_query,
                                                 float2 (&lse_log2)[QUERY_OCTETS], float (&scores)[N])
{
    constexpr int QUERIES = T::QUERIES;
    constexpr bool GENERAL = T::GENERAL;
    if (GENERAL ? needs_mask_general<QUERIES>(w, tile, key_begin) : needs_mask<QUERIES>(c, tile, key_begin)) {
        if (GENERAL)
            apply_mask_general(w, tile, thread_key(w),
                               __int_as_float(c.softmax_scale_log2 < 0.0f ? PLUS_INFINITY_BITS : MINUS_INFINITY_BITS),
                               scores);
        else
            apply_mask(c, tile, thread_key(w), scores);
    }
#pragma unroll
    for (int query_octet = 0; query_octet < QUERY_OCTETS; query_octet++) {
        if (query_octet >= PRELOADS)
            lse_log2[query_octet] = *(const float2 *)&staged_lse[8 * query_octet + lane_query];
#pragma unroll
        for (int i = 0; i < 4; i++)
            scores[4 * query_octet + i] =
                cot_ex2(fmaf(scores[4 * query_octet + i], c.softmax_scale_log2,
                             i % 2 == 0 ? -lse_log2[query_octet].x : -lse_log2[query_octet].y));
    }
}

/* dS of a tile, in place of its dP, stored for dQ: in part 4 of a step. `scaled_delta` holds the values of the first
 * PRELOADS query octets. SOFTCAP: `upper` holds the first fragment of P times the slope. */
template <typename T, int PRELOADS, typename SAVED_P, int N, int QUERY_OCTETS>
static __device__ __forceinline__ void compute_ds(typename T::shared &s, const consumer_registers<T> &r,
                                                  uint32_t ring_step, uint32_t ds_address, const SAVED_P &saved,
                                                  float2 (&scaled_delta)[QUERY_OCTETS], uint32_t (&upper)[2][4],
                                                  float (&dp)[N])
{
    using E = typename T::E;
    constexpr int TILE_COLUMNS = T::TILE_COLUMNS;
    constexpr bool GENERAL = T::GENERAL, SOFTCAP = T::SOFTCAP;
    const uint32_t dout_stage = ring_step % ATTENTION_BWD_DOUT_STAGES, ds_stage = ring_step % ATTENTION_BWD_DS_STAGES;
    /* At 128 tile columns without softcap all of scaled_delta is loaded here, above the stores, because the compiler
     * does not move loads above stores. The other versions do not have enough registers for this. */
    constexpr bool SUBTRACT_FIRST = TILE_COLUMNS == 128 && !SOFTCAP;
    const auto load_delta = [&](int query_octet) {
        if (query_octet >= PRELOADS && query_octet < QUERY_OCTETS)
            scaled_delta[query_octet] =
                SUBTRACT_FIRST ? *(const float2 *)&s.scaled_delta[dout_stage][8 * query_octet + r.lane_query]
                               : load_float2_pinned(&s.scaled_delta[dout_stage][8 * query_octet + r.lane_query]);
    };
    const auto subtract_delta = [&](int query_octet) {
#pragma unroll
        for (int i = 4 * query_octet; i < 4 * query_octet + 4; i++) {
            const float delta_i = i % 2 == 0 ? scaled_delta[query_octet].x : scaled_delta[query_octet].y;
            dp[i] = cot_is_f16<E> ? fmaf(dp[i], ATTENTION_BWD_DP_SCALE, -delta_i) : dp[i] - delta_i;
        }
    };
    if (SUBTRACT_FIRST) {
#pragma unroll
        for (int query_octet = 0; query_octet < QUERY_OCTETS; query_octet++)
            load_delta(query_octet), subtract_delta(query_octet);
    }
    if (!SOFTCAP)
        cot_mbarrier_wait(&s.ds_empty[ds_stage], parity_of<ATTENTION_BWD_DS_STAGES>(ring_step) ^ 1);
    const uint32_t zero = opaque_zero<E, SOFTCAP>(s), one = opaque_one<TILE_COLUMNS, GENERAL>(zero);
#pragma unroll
    for (int k = 0; k < N / 8; k++) {
        if (SOFTCAP && k < N / 8 - 1)
            cot_ldmatrix_x4_trans(upper[(k + 1) % 2], ds_address + (k + 1) * 16 * 128);
        if (!SUBTRACT_FIRST) {
            if (!SOFTCAP)
                load_delta(2 * k + 2), load_delta(2 * k + 3);
            else
                load_delta(2 * k), load_delta(2 * k + 1);
            subtract_delta(2 * k), subtract_delta(2 * k + 1);
        }
#pragma unroll
        for (int i = 8 * k; i < 8 * k + 8; i++)
            if constexpr (SOFTCAP)
                dp[i] *= saved.p_times_slope(upper[k % 2], i);
            else
                dp[i] *= saved.restore(r.packed, i, zero, one);
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = pack_two_volatile<E>(dp[8 * k + 2 * i], dp[8 * k + 2 * i + 1]);
        cot_stmatrix_x4_trans(ds_address + k * 16 * 128, words);
    }
}

/* One step of a consumer, in the parts 1 to 4 that the top of attention_bwd_key_blocks_sm90.cu lists. Returns whether
 * this consumer skips the next tile.
 *   ISSUES_DK         true: issues dK += packed^T Q[previous_q]. With FIRST_STEP_ADDS_ZEROS, the first step of a key
 *                     block has packed = 0
 *   ring_step_begin   the ring_step of the key block's step 0: `step` is ring_step - ring_step_begin
 * With SOFTCAP, the upper two bytes of P times the slope are in the dS buffer of this stage, until dS overwrites them.
 * The step therefore waits for ds_empty before it computes P. */
template <typename T, bool ISSUES_DK>
static __device__ __forceinline__ bool consumer_step(const attention_bwd_call &c, typename T::shared &s,
                                                     const consumer_work &w, uint32_t ring_step_begin,
                                                     uint32_t ring_step, const consumer_registers<T> &r)
{
    using E = typename T::E;
    constexpr int TILE_COLUMNS = T::TILE_COLUMNS, QUERIES = T::QUERIES, N = QUERIES / 2, QUERY_OCTETS = QUERIES / 8;
    constexpr bool GENERAL = T::GENERAL, SOFTCAP = T::SOFTCAP;
    constexpr bool FIRST_STEP_ADDS_ZEROS = first_step_adds_zeros<TILE_COLUMNS, SOFTCAP>;
    /* How many float2 of lse_log2 and of scaled_delta are loaded before the waits. The free registers limit them. */
    constexpr int LSE_PRELOADS = SOFTCAP || (cot_is_f16<E> && TILE_COLUMNS > 64) ? 2 : 4,
                  DELTA_PRELOADS = SOFTCAP || TILE_COLUMNS == 64 ? 2 : LSE_PRELOADS;
    const int lane = threadIdx.x % WARP, key_begin = w.first_key + 64 * r.consumer;
    const uint32_t q_stage = ring_step % ATTENTION_BWD_Q_STAGES, dout_stage = ring_step % ATTENTION_BWD_DOUT_STAGES,
                   ds_stage = ring_step % ATTENTION_BWD_DS_STAGES;
    float acc[N]; /* holds S, then P, then dP, then dS */
    /* Part 1: issue S, and dK += dS^T Q of the previous step. */
    cot_mbarrier_wait(&s.q_full[q_stage], parity_of<ATTENTION_BWD_Q_STAGES>(ring_step));
    issue_gemm_abt<E, T::USED_COLUMNS>(acc, s.k[0][r.consumer], sizeof s.k[0], s.q[q_stage][0]);
    if (ISSUES_DK)
        issue_gemm_add_ab<E>(r.dk, r.packed, s.q[r.previous_q][0]);
    if (SOFTCAP)
        cot_mbarrier_wait(&s.ds_empty[ds_stage], parity_of<ATTENTION_BWD_DS_STAGES>(ring_step) ^ 1);
    const int tile = GENERAL || TILE_COLUMNS == 128 ? tile_of(c, w, (int)(ring_step - ring_step_begin))
                                                    : load_pinned(&s.tile_index[q_stage]);
    float2 lse_log2[QUERY_OCTETS];
#pragma unroll
    for (int query_octet = 0; query_octet < LSE_PRELOADS; query_octet++)
        lse_log2[query_octet] = load_float2_pinned(&s.lse_log2[q_stage][8 * query_octet + r.lane_query]);
    /* Part 2: wait for S and compute P. Wait for dK, release its Q, and pack P. */
    cot_wgmma_wait<ISSUES_DK ? 1 : 0>();
    constexpr bool BIASED_BYTES = !cot_is_f16<E> && !(TILE_COLUMNS == 64 && GENERAL);
    typename p_for_ds<E, N, BIASED_BYTES && !SOFTCAP, T::USED_COLUMNS>::type saved;
    const uint32_t ds_address = r.ds_fragments + ds_stage * (uint32_t)sizeof s.ds[0];
    if constexpr (SOFTCAP) {
        compute_p_softcap(c, w, tile, key_begin, s.lse_log2[q_stage] + r.lane_query, lse_log2[0], lse_log2[1],
                          ds_address, acc, saved);
    } else {
        compute_p<T, LSE_PRELOADS>(c, w, tile, key_begin, s.lse_log2[q_stage], r.lane_query, lse_log2, acc);
        saved.save(acc);
    }
    if (ISSUES_DK) {
        cot_wgmma_wait<0>();
        __syncwarp();
        /* In the first step of a key block (GENERAL: the first that this warp does not skip), previous_q is this step's
         * own stage, which the next step still reads. Do not release it. */
        bool is_first_unskipped_step = FIRST_STEP_ADDS_ZEROS && ring_step == ring_step_begin;
        if constexpr (FIRST_STEP_ADDS_ZEROS && GENERAL)
            is_first_unskipped_step = first_unskipped_ring_step_of(s) == ring_step;
        if (!is_first_unskipped_step && lane == 0)
            cot_mbarrier_arrive(&s.q_empty[r.previous_q]);
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        r.packed[i] = cot_pack_pair<E>(acc[2 * i], acc[2 * i + 1]);
    /* Part 3: issue dP and dV += P^T dO. */
    cot_mbarrier_wait(&s.dout_full[dout_stage], parity_of<ATTENTION_BWD_DOUT_STAGES>(ring_step));
    issue_gemm_abt<E, T::USED_COLUMNS>(acc, s.v[0][r.consumer], sizeof s.v[0], s.dout[dout_stage][0]);
    issue_gemm_add_ab<E>(r.dv, r.packed, s.dout[dout_stage][0]);
    float2 scaled_delta[QUERY_OCTETS];
    uint32_t upper[2][4];
    if (SOFTCAP) {
        __syncwarp();
        cot_ldmatrix_x4_trans(upper[0], ds_address);
    }
#pragma unroll
    for (int query_octet = 0; query_octet < DELTA_PRELOADS; query_octet++)
        scaled_delta[query_octet] = load_float2_pinned(&s.scaled_delta[dout_stage][8 * query_octet + r.lane_query]);
    /* Part 4: wait for dP, compute dS and store it for dQ. Wait for dV, release dO, and pack dS. */
    cot_wgmma_wait<1>();
    compute_ds<T, DELTA_PRELOADS>(s, r, ring_step, ds_address, saved, scaled_delta, upper, acc);
    cot_fence_proxy_async();
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.ds_full[ds_stage]);
    r.consumer = __shfl_sync(0xffffffffu, r.consumer, 0); /* see `consume` */
    const bool skip = is_skipped<QUERIES, GENERAL>(w, tile_of(c, w, (int)(ring_step - ring_step_begin) + 1), key_begin);
    cot_wgmma_wait<0>();
    __syncwarp();
    if (lane == 0)
        cot_mbarrier_arrive(&s.dout_empty[dout_stage]);
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        r.packed[i] = cot_pack_pair<E>(acc[2 * i], acc[2 * i + 1]);
    r.previous_q = q_stage;
    return skip;
}

/* One step of a consumer that skips the tile. It only waits and arrives on the barriers. The dQ warpgroup evaluates
 * fully_masked too, and leaves out this consumer's keys. */
template <int TILE_COLUMNS, bool PAIRS>
static __device__ __forceinline__ void skip_step(bwd_shared<TILE_COLUMNS, PAIRS> &s, uint32_t ring_step)
{
    const uint32_t q_stage = ring_step % ATTENTION_BWD_Q_STAGES, dout_stage = ring_step % ATTENTION_BWD_DOUT_STAGES,
                   ds_stage = ring_step % ATTENTION_BWD_DS_STAGES;
    cot_mbarrier_wait(&s.q_full[q_stage], parity_of<ATTENTION_BWD_Q_STAGES>(ring_step));
    cot_mbarrier_wait(&s.dout_full[dout_stage], parity_of<ATTENTION_BWD_DOUT_STAGES>(ring_step));
    cot_mbarrier_wait(&s.ds_empty[ds_stage], parity_of<ATTENTION_BWD_DS_STAGES>(ring_step) ^ 1);
    __syncwarp();
    if (threadIdx.x % WARP == 0) {
        cot_mbarrier_arrive(&s.q_empty[q_stage]);
        cot_mbarrier_arrive(&s.dout_empty[dout_stage]);
        cot_mbarrier_arrive(&s.ds_full[ds_stage]);
    }
}

/* Adds dK and dV of the two thread blocks that divide the query heads of a group. Thread block 1 of the cluster stores
 * its sums in the shared memory of thread block 0, in place of K, V, Q and dO. Thread block 0 adds them to its own.
 * Returns whether this thread block has the result. The other warps of both thread blocks take part in the two cluster
 * barriers when they have ended their work (await_reduction). */
template <int TILE_COLUMNS, int N>
static __device__ __forceinline__ bool reduce_over_heads(float (&dk)[N], float (&dv)[N])
{
    enum { FLOATS = 4 * 2 * WARPGROUP }; /* 4 floats of each consumer thread */
    static_assert(N / 2 * FLOATS * sizeof(float) <= offsetof(key_block_shared<TILE_COLUMNS>, ds),
                  "dK and dV do not fit");
    const float *sums = (const float *)dynamic_shared_memory + 4 * (threadIdx.x - 2 * WARPGROUP);
    const bool is_sender = cot_cluster_rank() != 0;
    cot_cluster_arrive();
    cot_cluster_wait(); /* both thread blocks have ended their steps */
    if (is_sender) {
        const uint32_t to = cot_mapa(cot_shared_address(sums), 0);
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            cot_cluster_store(to + i / 4 * FLOATS * sizeof(float), dk + i);
            cot_cluster_store(to + (N / 4 + i / 4) * FLOATS * sizeof(float), dv + i);
        }
    }
    cot_cluster_arrive();
    cot_cluster_wait();
    if (is_sender)
        return false;
#pragma unroll
    for (int i = 0; i < N; i++) {
        dk[i] += sums[i / 4 * FLOATS + i % 4];
        dv[i] += sums[(N / 4 + i / 4) * FLOATS + i % 4];
    }
    return true;
}

/* The two cluster barriers of reduce_over_heads, for the warps that are not consumers. */
static __device__ __forceinline__ void await_reduction(const attention_bwd_call &c)
{
    __syncwarp();
    for (int i = 0; i < 2 && c.head_split > 1; i++) /* no iteration if no other thread block computes the same keys */
        cot_cluster_arrive(), cot_cluster_wait();
}

/* A copy of the members that the steps read. The shuffles show ptxas that they are uniform in a warp. ptxas then keeps
 * them in uniform registers. used_k and the window are defined and read only if GENERAL. */
static __device__ __forceinline__ consumer_work uniform_work(const attention_work &from)
{
    const auto uniform = [](int x) { return __shfl_sync(0xffffffffu, x, 0); };
    return {uniform(from.first_key), uniform(from.first_tile),           uniform(from.tile_direction),
            uniform(from.used_k),    uniform(from.first_visible_offset), uniform(from.last_visible_offset)};
}

/* A consumer warpgroup: computes dK and dV of its 64 keys, of one key block after another, and stores them. */
template <typename E, int TILE_COLUMNS, int USED_COLUMNS, bool GENERAL, bool SOFTCAP, bool PAIRS>
static __device__ __forceinline__ void consume(const attention_bwd_call &c, bwd_shared<TILE_COLUMNS, PAIRS> &s)
{
    using traits = consumer_traits<E, TILE_COLUMNS, USED_COLUMNS, GENERAL, SOFTCAP, PAIRS>;
    constexpr int QUERIES = traits::QUERIES;
    constexpr bool FIRST_STEP_ADDS_ZEROS = first_step_adds_zeros<TILE_COLUMNS, SOFTCAP>;
    float dk[USED_COLUMNS / 2], dv[USED_COLUMNS / 2];
    uint32_t packed[QUERIES / 4];
    /* Uniform in a warp. The shuffle shows this to ptxas 13.0, which then computes descriptors on the uniform datapath.
     * Each step shuffles `consumer` again. Otherwise ptxas keeps all values derived from it, and there are not enough
     * registers. */
    int consumer = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP - 2, 0);
    uint32_t ds_fragments = fragment_address(s.ds[0][consumer]);
    int lane_query = 2 * (threadIdx.x % 4);
    /* Keeps the compiler from computing the variable again in each step. f16 has no register for lane_query at 64 tile
     * columns. */
    asm("" : "+r"(ds_fragments));
    if (TILE_COLUMNS == 128 || !cot_is_f16<E>)
        asm("" : "+r"(lane_query));
    uint32_t ring_step = 0, previous_q = 0;
    const consumer_registers<traits> registers = {dk, dv, packed, previous_q, consumer, lane_query, ds_fragments};
    for (uint32_t units_taken = 0;; units_taken++) {
        cot_mbarrier_wait(&s.kv_full, parity_of<1>(units_taken));
        const consumer_work w = uniform_work(s.work[units_taken % s.WORK_STAGES]);
        if (w.first_key == END_OF_WORK)
            return;
#pragma unroll
        for (int i = 0; i < USED_COLUMNS / 2; i++)
            dk[i] = dv[i] = 0.0f;
        const uint32_t ring_step_begin = ring_step;
        const uint32_t ring_step_end =
            ring_step + (uint32_t)__shfl_sync(0xffffffffu, step_count(s.work[units_taken % s.WORK_STAGES]), 0);
        const auto is_step_skipped = [&] {
            return is_skipped<QUERIES, GENERAL>(w, tile_of(c, w, (int)(ring_step - ring_step_begin)),
                                                w.first_key + 64 * consumer);
        };
        for (; ring_step < ring_step_end && is_step_skipped(); ring_step++)
            skip_step(s, ring_step);
        if constexpr (GENERAL && FIRST_STEP_ADDS_ZEROS)
            if (threadIdx.x % WARP == 0)
                first_unskipped_ring_step_of(s) = ring_step;
        if (ring_step < ring_step_end) {
            if (FIRST_STEP_ADDS_ZEROS) {
                previous_q = ring_step % ATTENTION_BWD_Q_STAGES;
#pragma unroll
                for (int i = 0; i < QUERIES / 4; i++)
                    packed[i] = 0;
            }
            bool skip = consumer_step<traits, /*ISSUES_DK=*/FIRST_STEP_ADDS_ZEROS>(c, s, w, ring_step_begin, ring_step,
                                                                                   registers);
            for (ring_step++; ring_step < ring_step_end && !skip; ring_step++)
                skip = consumer_step<traits, /*ISSUES_DK=*/true>(c, s, w, ring_step_begin, ring_step, registers);
            issue_gemm_add_ab<E>(dk, packed, s.q[previous_q][0]);
            cot_wgmma_wait<0>();
            __syncwarp();
            if (threadIdx.x % WARP == 0)
                cot_mbarrier_arrive(&s.q_empty[previous_q]);
            /* The queries that attend to a key are consecutive, so all further steps are skipped. They may be more than
             * the stages of Q. So the last tile that is not skipped is released first. Otherwise the producer would
             * wait for its release, and this warp for the producer. */
            if (GENERAL)
                for (; ring_step < ring_step_end; ring_step++)
                    skip_step(s, ring_step);
        }
        __syncwarp();
        if (threadIdx.x % WARP == 0)
            cot_mbarrier_arrive(&s.kv_empty);
        /* Only one thread block of the cluster stores the sums of both. */
        if (!PAIRS && c.head_split > 1 && !reduce_over_heads<TILE_COLUMNS>(dk, dv))
            continue;
        /* The stores read `work` again, so that its members need no registers during the steps. */
        asm volatile("" ::: "memory");
        const attention_work &out = s.work[units_taken % s.WORK_STAGES];
        const int key = thread_key(out);
        store_rows<E, GENERAL>(c, c.dv, c.dv_store_method, key_output_rows<GENERAL>(c, c.dv, out), key, 0, (int)c.d_v,
                               dv_scale<E>, dv);
        store_rows<E, GENERAL>(c, c.dk, c.dk_store_method, key_output_rows<GENERAL>(c, c.dk, out), key, 0, (int)c.d_qk,
                               c.scale, dk);
    }
}

/* Initialises the barriers that both kernels have. Executed by one thread. */
template <int TILE_COLUMNS, bool PAIRS>
static __device__ __forceinline__ void init_barriers(bwd_shared<TILE_COLUMNS, PAIRS> &s)
{
    s.zero = 0;
    cot_mbarrier_init(&s.kv_full, 1);
    cot_mbarrier_init(&s.kv_empty, 8 + 4 + s.DQ_STAGES + (PAIRS ? 1 : 0));
    for (int i = 0; i < ATTENTION_BWD_Q_STAGES; i++)
        cot_mbarrier_init(&s.q_full[i], 1), cot_mbarrier_init(&s.q_empty[i], 8);
    for (int i = 0; i < ATTENTION_BWD_DOUT_STAGES; i++)
        cot_mbarrier_init(&s.dout_full[i], 1), cot_mbarrier_init(&s.dout_empty[i], 8);
    for (int i = 0; i < ATTENTION_BWD_DS_STAGES; i++)
        cot_mbarrier_init(&s.ds_full[i], 8), cot_mbarrier_init(&s.ds_empty[i], PAIRS ? 5 : 4);
    for (int i = 0; i < s.DQ_STAGES; i++)
        cot_mbarrier_init(&s.dq_full[i], 4), cot_mbarrier_init(&s.dq_ready[i], 1);
}

#endif
