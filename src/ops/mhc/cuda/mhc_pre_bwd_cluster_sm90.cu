/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_cluster_sm90.cu: pre backward in one pass over x and dh_in, for n = 2 and 4, f16 and bf16: the MMA warps
 * and the reducer. mhc_pre_bwd_cluster_sm90.cuh explains the kernel. The products are in mhc_pre_bwd_sm90.cuh.
 *
 * The MMA warps compute dh_pre one tile ahead. The exchange of dh_pre then overlaps the products of the previous tile.
 * Registers are the scarcest resource: dphi_part and the second terms of phi gamma take 144 registers of an MMA thread.
 */
#include "mhc_pre_bwd_cluster_sm90.cuh"

#include <type_traits>

/* With NO_DX there are no terms of phi gamma. */
struct no_terms {
    unsigned char unused[16]; /* no array or struct has size 0 */
};

/* With DX_AND_POST, the buffer of dx_post replaces one stage. */
template <typename E_, typename Sizes, data_gradient MODE, int BLOCKS, bool RECOMPUTES_Y = false>
struct bwd_traits : cluster_traits<Sizes, MODE, BLOCKS, RECOMPUTES_Y> {
    typedef E_ E;
    typedef std::conditional_t<MODE == NO_DX, no_terms, phi_fragments<Sizes::GROUPS, Sizes::OCTETS>> phi_terms;
    enum {
        WIDE = cluster_traits<Sizes, MODE, BLOCKS, RECOMPUTES_Y>::WIDE,
        N = Sizes::N,
        STAGES = WIDE            ? 3
                 : RECOMPUTES_Y  ? 4
                 : MODE == NO_DX ? (N == 2 ? 4 : 5)
                 : MODE == DX    ? 4
                                 : 3,
        POST_BUFFER = MODE == DX_AND_POST,
        RECORD_SLOTS = STAGES,
        /* Of 200 to 224 the only ones without spills. */
        MMA_REGISTERS = WIDE                            ? 208
                        : MODE != DX_AND_POST || N == 2 ? 216
                        : BLOCKS == 4                   ? 208
                                                        : 224
    };
};

/* Computes the warp's part of dh_pre: the diagonals of dh_in x^T, for 8 tokens at a time. The lanes that hold elements
 * of the diagonals store dh_pre of tokens g (low) and g + 8 (high). */
template <typename Traits>
static __device__ __forceinline__ void compute_dh_pre(shared_memory<Traits> &s, uint32_t x, uint32_t dh_in, int warp,
                                                      uint32_t parity)
{
    typedef typename Traits::sizes sizes;
    constexpr int STREAM_GROUPS = Traits::STREAM_GROUPS;
    const int lane = threadIdx.x % 32, g = lane / 4;
    const bool odd = g % 2 != 0;
    const bool stores = lane % 4 == g / 2;
    if constexpr (Traits::WIDE) {
        float sums[2][4] = {0};
#pragma unroll
        for (int chunk = 0; chunk < Traits::CHUNKS; chunk++, x += CHUNK_BYTES, dh_in += CHUNK_BYTES)
#pragma unroll
            for (int group = 0; group < 2; group++) {
                uint32_t A[4], B[4];
                cot_ldmatrix_x4(A, unit_address<sizes>(dh_in, group));
                cot_ldmatrix_x4(B, unit_address<sizes>(x, group));
                mma<typename Traits::E>(sums[0], A[0], A[1], A[2], A[3], B[0], B[1]);
                mma<typename Traits::E>(sums[1], A[0], A[1], A[2], A[3], B[2], B[3]);
            }
        cot_mbarrier_wait(&s.warp_dh_pre_empty, parity ^ 1);
        float *to = (float *)&s.warp_dh_pre[warp][g] + sizes::first_stream((uint32_t)warp); /* the others stay zero */
        if (stores)
            to[0] = odd ? sums[0][1] : sums[0][0], to[8 * 4] = odd ? sums[1][3] : sums[1][2];
    } else {
        float low[4] = {0}, high[4] = {0};
        uint32_t A[STREAM_GROUPS][4];
#pragma unroll
        for (int step = 0; step < STREAM_GROUPS; step++)
            cot_ldmatrix_x4(A[step], unit_address<sizes>(dh_in, step));
#pragma unroll
        for (int i = 0; i < Traits::N; i++) {
            float sums[2][4] = {0};
#pragma unroll
            for (int step = 0; step < STREAM_GROUPS; step++) {
                uint32_t B[4];
                cot_ldmatrix_x4(B, unit_address<sizes>(x, STREAM_GROUPS * i + step));
                mma<typename Traits::E>(sums[0], A[step][0], A[step][1], A[step][2], A[step][3], B[0], B[1]);
                mma<typename Traits::E>(sums[1], A[step][0], A[step][1], A[step][2], A[step][3], B[2], B[3]);
            }
            low[i] = odd ? sums[0][1] : sums[0][0];
            high[i] = odd ? sums[1][3] : sums[1][2];
        }
        cot_mbarrier_wait(&s.warp_dh_pre_empty, parity ^ 1);
        if (stores) {
            s.warp_dh_pre[warp][g] = make_float4(low[0], low[1], low[2], low[3]);
            s.warp_dh_pre[warp][g + 8] = make_float4(high[0], high[1], high[2], high[3]);
        }
    }
    arrive_all_lanes(&s.warp_dh_pre_full);
}

/* The reducer: sums dh_pre over the warps and sends the sums. RECOMPUTES_Y: it also loads the coefficients of post. Tile k
 * of the block has buffer k % 2. */
template <typename Traits, typename Call>
static __device__ __forceinline__ void reduce(const Call &p, shared_memory<Traits> &s, int rank, int tiles)
{
    constexpr int CLUSTERS = MHC_SM90_CLUSTERS_OF(Traits::BLOCKS);
    const int token = threadIdx.x % 32;
    uint32_t parity = 0;
    const post_coefficient_loads<Traits, 32> coefficients(p, token);
    auto load_coefficients = [&](int tile, int buffer) {
        coefficients.start((float *)s.post_coefficients[buffer], tile * Traits::TILE, (int)p.call.tokens);
        cot_cp_async_commit_group();
    };
    /* Waits for all loads. Nothing waits for a tile that does not exist. */
    auto publish_coefficients = [&](int tile, int buffer) {
        cot_cp_async_wait_group<0>();
        if (tile < tiles)
            arrive_all_lanes(&s.coefficients_full[buffer]);
    };
    if constexpr (Traits::RECOMPUTES_Y) {
        const int first = (int)(blockIdx.x / Traits::BLOCKS);
        load_coefficients(first, 0);
        load_coefficients(first + CLUSTERS, 1);
        publish_coefficients(first, 0);
        publish_coefficients(first + CLUSTERS, 1);
    }
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, tiles)
    {
        if constexpr (Traits::RECOMPUTES_Y)
            if (tile >= CLUSTERS) /* the coefficients of the first two tiles were published before the loop */
                publish_coefficients(tile + CLUSTERS, (int)parity ^ 1);
        cot_mbarrier_wait(&s.warp_dh_pre_full, parity);
        if (token < Traits::TILE) {
            float4 sum = s.warp_dh_pre[0][token];
#pragma unroll
            for (int warp = 1; warp < MMA_WARPS; warp++) {
                const float4 other = s.warp_dh_pre[warp][token];
                sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
            }
            send_dh_pre(s, ring.stage, rank, token, sum);
        }
        arrive_all_lanes(&s.warp_dh_pre_empty);
        if constexpr (Traits::RECOMPUTES_Y) /* y of the tile has been computed: its buffer is free */
            load_coefficients(tile + 2 * CLUSTERS, (int)parity);
        parity ^= 1;
    }
}

/* Computes y of the warp's columns in place of x. A lane has 16 bytes of two tokens. Four tokens that are loaded together
 * have units in both halves of the swizzled 128 bytes. */
template <typename Traits>
static __device__ __forceinline__ void compute_y(const mhc_call &c, shared_memory<Traits> &s, int stage, int warp,
                                                 cot_pipeline_state<2> &coefficients)
{
    auto is_inside = [&](int) { return first_column<Traits>() < c.D; };
    const int lane = threadIdx.x % 32, row = lane / 4, token = row / 2 + row % 2 * 4;
    cot_mbarrier_wait(&s.coefficients_full[coefficients.stage], coefficients.parity);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int offset = warp / 2 * CHUNK_BYTES + swizzled_offset(token + half * 8, warp % 2 * 4 + lane % 4);
        apply_post<Traits, 1, 1>(s.stages[stage] + offset, s.f[stage] + offset,
                                 s.post_coefficients[coefficients.stage][token + half * 8], token % 2, is_inside);
    }
    __syncwarp(); /* the products read y of other lanes */
    coefficients.next();
}

template <typename Traits>
static __device__ __forceinline__ void multiply(const mhc_call &c, shared_memory<Traits> &s, int tiles)
{
    typedef typename Traits::E E;
    constexpr data_gradient MODE = Traits::MODE;
    constexpr int OCTETS = Traits::OCTETS, GROUPS = Traits::GROUPS, CLUSTERS = MHC_SM90_CLUSTERS_OF(Traits::BLOCKS);
    const int warp = threadIdx.x / 32;
    uint32_t second_terms[GROUPS][2 * OCTETS];
    if constexpr (MODE != NO_DX) {
        load_phi<0, GROUPS>(c, s, first_column<Traits>(), warp, phi_scale<E, MODE == DX_AND_POST>, second_terms);
        arrive_all_lanes(&s.phi_loaded);
    }
    if constexpr (Traits::WIDE) /* compute_dh_pre stores one stream. The same lanes store the others as zero */
        if (const int g = threadIdx.x % 32 / 4; threadIdx.x % 4 == g / 2)
            s.warp_dh_pre[warp][g] = s.warp_dh_pre[warp][g + 8] = {0.0f, 0.0f, 0.0f, 0.0f};
    cot_cluster_wait();
    float dphi_part[GROUPS][OCTETS][4] = {0};
    lane_units units = find_lane_units(s, warp);
    /* Without this the compiler computes both from threadIdx.x again for every tile: 1 % of the time. The other modes have
     * no registers for it. */
    if (MODE == DX)
        asm volatile("" : "+r"(units.by_token), "+r"(units.by_column));
    cot_pipeline_state<Traits::STAGES> next_ring;
    cot_pipeline_state<2> coefficients;
    uint32_t parity = 0, post_parity = 0;
    int next_tile = (int)(blockIdx.x / Traits::BLOCKS);
    FOR_EACH_TILE(tile, ring, tiles)
    {
        /* dh_pre is computed one tile ahead: the first iteration computes it for two tiles, the others for one. */
        for (; next_tile < tiles && next_tile <= tile + CLUSTERS; next_tile += CLUSTERS, next_ring.next()) {
            cot_mbarrier_wait(&s.full[next_ring.stage], next_ring.parity);
            if constexpr (Traits::RECOMPUTES_Y)
                compute_y(c, s, next_ring.stage, warp, coefficients);
            const uint32_t stage_offset = (uint32_t)(next_ring.stage * Traits::STAGE_BYTES);
            compute_dh_pre(s, units.by_column + stage_offset, units.by_token + stage_offset + Traits::X_BYTES, warp,
                           parity);
            parity ^= 1;
        }
        cot_mbarrier_wait(&s.records_full[ring.stage], ring.parity);
        /* Re-arms for the stage's next tile. st.async of that tile may come first: the pending arrival keeps the phase
         * open. */
        if (threadIdx.x == 0)
            cot_mbarrier_arrive_expect(&s.records_full[ring.stage], Traits::SENT_BYTES);
        if constexpr (Traits::RECOMPUTES_Y)
            cot_fence_proxy_async(); /* TMA then replaces y */
        if constexpr (MODE == NO_DX)
            accumulate_tile<E>(s, units, ring, dphi_part);
        else
            multiply_tile<E, MODE == DX_AND_POST, cot_is_f16<E> && MODE == DX>(c, s, units, ring, warp, post_parity,
                                                                               second_terms, dphi_part);
        post_parity ^= 1;
    }
    if (present(c.dphi) || present(c.dgamma)) {
        cot_griddepcontrol_launch_dependents(); /* mhc_pre_sum_parts, which waits for this kernel, becomes resident early */
        const int64_t d = first_column<Traits>();
        if (d < c.D)
            store_dphi_part<typename Traits::sizes>(c, dphi_part, (int64_t)(blockIdx.x / Traits::BLOCKS), d);
    }
}

/* blocks: of a cluster. The suffix `_blocksN` gives it, except for 16. */
#define INSTANCE(name, element, sizes, mode, blocks)                          \
    extern "C" __global__ void __launch_bounds__(MHC_SM90_BWD_THREADS, 1)     \
        mhc_pre_bwd_cluster_##name(const __grid_constant__ mhc_mapped_call p) \
    {                                                                         \
        backward<bwd_traits<element, sizes, mode, blocks>>(p);                \
    }
/* post: adds dx_post. records and post_pre, for post_pre: no dx; they also store the records. The second of them computes
 * y from x and f of post. */
#define INSTANCES(dtype, element, suffix, blocks)                                                                  \
    INSTANCE(sm90_##dtype##suffix, element, bwd_sizes<4>, DX, blocks)                                              \
    INSTANCE(post_sm90_##dtype##suffix, element, bwd_sizes<4>, DX_AND_POST, blocks)                                \
    INSTANCE(sm90_n2_##dtype##suffix, element, bwd_sizes<2>, DX, blocks)                                           \
    INSTANCE(post_sm90_n2_##dtype##suffix, element, bwd_sizes<2>, DX_AND_POST, blocks)                             \
    INSTANCE(records_sm90_##dtype##suffix, element, bwd_sizes<4>, NO_DX, blocks)                                   \
    INSTANCE(records_sm90_n2_##dtype##suffix, element, bwd_sizes<2>, NO_DX, blocks)                                \
    extern "C" __global__ void __launch_bounds__(MHC_SM90_BWD_THREADS, 1)                                          \
        mhc_post_pre_bwd_cluster_records_sm90_##dtype##suffix(const __grid_constant__ mhc_post_pre_records_call p) \
    {                                                                                                              \
        backward<bwd_traits<element, bwd_sizes<4>, NO_DX, blocks, true>>(p);                                       \
    }
INSTANCES(f16, __half, , 16)
INSTANCES(f16, __half, _blocks8, 8)
INSTANCES(f16, __half, _blocks4, 4)
INSTANCES(bf16, __nv_bfloat16, , 16)
INSTANCES(bf16, __nv_bfloat16, _blocks8, 8)
INSTANCES(bf16, __nv_bfloat16, _blocks4, 4)
INSTANCE(records_wide_sm90_bf16, __nv_bfloat16, wide_sizes, NO_DX, 16)
