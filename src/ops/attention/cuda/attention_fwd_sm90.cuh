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

#include "attention_fwd_load_sm90.cuh"
#include "attention_fwd_softmax_sm90.cuh"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/cluster.cuh"
#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/quad.cuh"
#include "../../../cuda/device/wgmma.cuh"

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
            if (row + 8 * half < t.used && !(lse[half] == none && sink == none)) { /* fmaxf drops NaN */
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
