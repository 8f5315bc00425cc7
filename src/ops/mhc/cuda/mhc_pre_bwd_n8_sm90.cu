/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_n8_sm90.cu: dx and dphi_part of pre backward on Hopper for n = 8, bf16, D a multiple of 64. With 80 rows of
 * phi, the products take longer than memory, so they are wgmma of whole tiles. mhc_pre_mma.cu split phi gamma into terms
 * before, and mhc_pre_tokens.cu made the terms of dh_mix.
 *
 * Block (x, y) has 64 columns of four streams, and every gridDim.y-th tile of 64 tokens, from tile y on. A panel is
 * [64 tokens][64 columns] of one stream. For each panel:
 *
 *   dx        [64 tokens][64 columns] = dh_mix [64][80] phi gamma [80][64], the products of their first two terms without
 *             that of the second terms, then + factor x + h_pre dh_in (+ dx_post)
 *   dphi_part [64 columns][80 rows] += x^T [64][64 tokens] dh_mix [64][80], all three terms of dh_mix. The tensor cores
 *             truncate their sums, so they sum one tile only, and float32 additions sum the tiles.
 *
 *   producer          one thread loads the terms of phi gamma, x, dh_in and the terms of dh_mix. It stores dx, which
 *                     replaces x in shared memory
 *   2 dx warpgroups   dx of two panels each. While one warpgroup adds the other terms of dx, the other one multiplies:
 *                     one warpgroup alone did not overlap these (docs/experiments/mhc.md)
 *   dphi warpgroup    dphi_part of all panels, in registers
 *
 *   barrier                  arrivals                    who waits      phase ends when
 *   phi_full                 1, the producer             dx             the terms of phi gamma are loaded
 *   x_full[stage][panel]     1, the producer             dphi, then dx  x is loaded
 *   x_read[stage][panel]     1 of each dphi warp         dx             x^T has been read, so that dx may replace x
 *   dx_ready[stage][panel]   1 of each dx warp           producer       dx is in the place of x
 *   mix_full[stage]          1, the producer             dx, dphi       dh_in and dh_mix are loaded
 *   mix_empty[stage]         1 of each dx and dphi warp  producer       they have been read */
#include "mhc_mma.cuh"

#include "../../../cuda/device/bulk.cuh"
#include "../../../cuda/device/wgmma.cuh"

enum {
    N = 8,
    ROWS = MHC_SM90_N8_ROWS,
    TERMS = MHC_CUDA_MMA_TERMS,
    PHI_TERMS = 2,
    TILE = MHC_SM90_N8_TILE,
    COLUMNS = MHC_SM90_CHUNK_COLUMNS,
    PANELS = MHC_SM90_N8_STREAMS,
    STAGES = 2,
    DX_WARPGROUPS = 2,
    DX_PANELS = PANELS / DX_WARPGROUPS, /* of a warpgroup */
    WARPGROUP = 128,
    PANEL_BYTES = TILE * COLUMNS * 2,
    PHI_BYTES = ROWS * COLUMNS * 2, /* of one term of a panel */
    MIX_STEPS = ROWS / 16,
    MIX_STEP_BYTES = TILE * 32 /* [64 tokens][16 rows of phi] */
};
enum { DPHI_WARPGROUP = DX_WARPGROUPS, PRODUCER_WARPGROUP };

struct shared_memory {
    unsigned char phi[PHI_TERMS][PANELS][PHI_BYTES];             /* [row][column], 128-byte swizzle */
    unsigned char x[STAGES][PANELS][PANEL_BYTES];                /* [token][column], 128-byte swizzle */
    unsigned char dh_in[STAGES][PANEL_BYTES];                    /* the same */
    unsigned char mix[STAGES][TERMS][MIX_STEPS][MIX_STEP_BYTES]; /* [token][row of phi], 32-byte swizzle */
    uint64_t phi_full, x_full[STAGES][PANELS], x_read[STAGES][PANELS], dx_ready[STAGES][PANELS], mix_full[STAGES],
        mix_empty[STAGES];
};
static_assert(sizeof(shared_memory) <= MHC_SM90_SHARED_BYTES, "must fit in a block's shared memory");
extern __shared__ __align__(1024) unsigned char memory[];

/* The same as swizzled_offset, for rows of 32 bytes and the 32-byte swizzle. */
static __device__ __forceinline__ int mix_offset(int row, int unit)
{
    return row * 32 + ((unit ^ row / 4 % 2) * 16);
}

/* ---- producer ----------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void produce(const mhc_n8_call &p, shared_memory &s, int chunk, int first_stream)
{
    const mhc_call &c = p.call;
    const int tiles = (int)((c.tokens + TILE - 1) / TILE);
    cot_mbarrier_arrive_expect(&s.phi_full, sizeof s.phi);
    for (int term = 0; term < PHI_TERMS; term++)
        for (int panel = 0; panel < PANELS; panel++)
            cot_tma_load_4d(s.phi[term][panel], &p.phi, chunk * COLUMNS, first_stream + panel, 0, term, &s.phi_full);
    cot_pipeline_state<STAGES> ring;
    const int stride = (int)gridDim.y;
    for (int tile = blockIdx.y; tile < tiles + STAGES * stride; tile += stride, ring.next()) {
        const int old_tile = tile - STAGES * stride; /* of the same stage */
        const bool stores = old_tile >= 0 && old_tile < tiles, loads = tile < tiles;
        /* Half of the panels at a time: dx goes, x of the next tile comes. */
        for (int first = 0; first < PANELS; first += PANELS / 2) {
            for (int panel = first; stores && panel < first + PANELS / 2; panel++) {
                cot_mbarrier_wait(&s.dx_ready[ring.stage][panel], ring.parity ^ 1);
                if (present(c.dx) && !c.f32_dx)
                    cot_tma_store_4d(&p.dx, 0, old_tile * TILE, chunk, first_stream + panel, s.x[ring.stage][panel]);
            }
            cot_bulk_commit();
            if (loads && first > 0) {
                cot_mbarrier_wait(&s.mix_empty[ring.stage], ring.parity ^ 1);
                cot_mbarrier_arrive_expect(&s.mix_full[ring.stage], sizeof s.dh_in[0] + sizeof s.mix[0]);
                cot_tma_load_4d(s.dh_in[ring.stage], &p.dh_in, 0, tile * TILE, chunk, 0, &s.mix_full[ring.stage]);
                cot_bulk_load(s.mix[ring.stage], (const unsigned char *)c.mix_terms + tile * (int64_t)sizeof s.mix[0],
                              sizeof s.mix[0], &s.mix_full[ring.stage]);
            }
            cot_bulk_wait_read();
            for (int panel = first; loads && panel < first + PANELS / 2; panel++) {
                uint64_t *const full = &s.x_full[ring.stage][panel];
                if (present(c.dx_post)) /* the dx warpgroup reads it from the L2 cache */
                    cot_tma_prefetch_4d(&p.dx_post, 0, tile * TILE, chunk, first_stream + panel);
                cot_mbarrier_arrive_expect(full, PANEL_BYTES);
                cot_tma_load_4d(s.x[ring.stage][panel], &p.x, 0, tile * TILE, chunk, first_stream + panel, full);
            }
        }
    }
}

/* ---- consumers ---------------------------------------------------------------------------------------- */

/* Issues dx / MHC_CUDA_MIX_SCALE of SUMS / 32 panels, the smallest products first. mix: the warp's fragments of the first
 * term of dh_mix. There are no registers for the second term, which is read from shared memory. */
template <int SUMS>
static __device__ __forceinline__ void issue_dx(float (&dx)[SUMS], const shared_memory &s, int stage, int first_panel,
                                                const uint32_t (&mix)[MIX_STEPS][4])
{
    const uint64_t phi_0 = cot_wgmma_mn_major(cot_shared_address(s.phi[0][first_panel]), PHI_BYTES),
                   phi_1 = cot_wgmma_mn_major(cot_shared_address(s.phi[1][first_panel]), PHI_BYTES),
                   mix_1 = cot_wgmma_k_major_32(cot_shared_address(s.mix[stage][1]));
    cot_wgmma_fence();
#pragma unroll
    for (int step = 0; step < MIX_STEPS; step++)
        cot_wgmma<__nv_bfloat16, false, true>(dx, mix_1 + step * (MIX_STEP_BYTES >> 4),
                                              phi_0 + step * COT_WGMMA_MN_STEP, step > 0);
#pragma unroll
    for (int step = 0; step < MIX_STEPS; step++)
        cot_wgmma<__nv_bfloat16, true>(dx, mix[step], phi_1 + step * COT_WGMMA_MN_STEP, true);
#pragma unroll
    for (int step = 0; step < MIX_STEPS; step++)
        cot_wgmma<__nv_bfloat16, true>(dx, mix[step], phi_0 + step * COT_WGMMA_MN_STEP, true);
    cot_wgmma_commit();
}

/* Issues the tile's part of dphi_part. x: the warp's fragments of x^T. */
static __device__ __forceinline__ void issue_dphi(float (&dphi)[ROWS / 2], const shared_memory &s, int stage,
                                                  const uint32_t (&x)[TILE / 16][4])
{
    cot_wgmma_fence();
#pragma unroll
    for (int term = TERMS - 1; term >= 0; term--) {
        const uint64_t mix = cot_wgmma_mn_major_32(cot_shared_address(s.mix[stage][term]), MIX_STEP_BYTES);
#pragma unroll
        for (int step = 0; step < TILE / 16; step++)
            cot_wgmma<__nv_bfloat16, true>(dphi, x[step], mix + step * COT_WGMMA_MN_STEP_32,
                                           term < TERMS - 1 || step > 0);
    }
    cot_wgmma_commit();
}

/* Scalars of a thread's two tokens of a tile: those of its rows of the accumulators. */
struct token_pair {
    float factor[2], h_pre[2];

    __device__ __forceinline__ void load(const mhc_call &c, int first, int stream)
    {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int token = first + 8 * half < c.tokens ? first + 8 * half : 0; /* dx of the others is not stored */
            factor[half] = c.factor[token];
            h_pre[half] = load_f32(c.h_pre, token_offset(c, c.h_pre, token) + stream * c.h_pre.stride[2]);
        }
    }
};

/* A thread's pairs of dx_post in a panel, in the layout of the accumulators. */
struct post_pairs {
    uint32_t pair[COLUMNS / 8][2];

    __device__ __forceinline__ void load(const mhc_call &c, int first, int stream, int column)
    {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int token = first + 8 * half < c.tokens ? first + 8 * half : 0;
            const uint32_t *row =
                (const uint32_t *)((const __nv_bfloat16 *)c.dx_post.data + token_offset(c, c.dx_post, token) +
                                   stream * c.dx_post.stride[2] + column);
#pragma unroll
            for (int unit = 0; unit < COLUMNS / 8; unit++)
                asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(pair[unit][half]) : "l"(row + 4 * unit));
        }
    }
};

/* Where a thread stores its pairs of an f32 dx in a panel: rows of its two tokens, null beyond the last token. */
struct f32_rows {
    float *row[2];

    __device__ __forceinline__ f32_rows(const mhc_call &c, int first, int stream, int column)
    {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int token = first + 8 * half;
            row[half] = present(c.dx) && token < c.tokens
                            ? (float *)c.dx.data + token_offset(c, c.dx, token) + stream * c.dx.stride[2] + column
                            : nullptr;
        }
    }
};

/* Replaces the warp's tokens of x by dx, or (F32_DX) stores dx. sums: of the products, from element `first` on. */
template <bool ADD_POST, bool F32_DX, int SUMS>
static __device__ __forceinline__ void finish_dx(const float (&sums)[SUMS], int first, unsigned char *x,
                                                 const unsigned char *dh_in, const token_pair &tokens,
                                                 const post_pairs &post, const f32_rows &to)
{
    const int lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
#pragma unroll
    for (int unit = 0; unit < COLUMNS / 8; unit += 2) {
        const int offset = swizzled_offset(row, unit + lane / 16);
        uint32_t x_pairs[4], dh_in_pairs[4], out[4];
        cot_ldmatrix_x4(x_pairs, cot_shared_address(x + offset));
        cot_ldmatrix_x4(dh_in_pairs, cot_shared_address(dh_in + offset));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int half = i % 2, e = first + 4 * (unit + i / 2) + 2 * half;
            const float2 x_value = cot_unpack_pair<__nv_bfloat16>(x_pairs[i]),
                         dh_in_value = cot_unpack_pair<__nv_bfloat16>(dh_in_pairs[i]);
            constexpr float scale = 1.0f / MHC_CUDA_MIX_SCALE;
            float2 value = {
                fmaf(tokens.h_pre[half], dh_in_value.x, fmaf(tokens.factor[half], x_value.x, scale * sums[e])),
                fmaf(tokens.h_pre[half], dh_in_value.y, fmaf(tokens.factor[half], x_value.y, scale * sums[e + 1]))};
            if (ADD_POST) {
                const float2 post_value = cot_unpack_pair<__nv_bfloat16>(post.pair[unit + i / 2][half]);
                value.x += post_value.x, value.y += post_value.y;
            }
            if (!F32_DX)
                out[i] = cot_pack_pair<__nv_bfloat16>(value.x, value.y);
            else if (to.row[half] != nullptr)
                *(float2 *)(to.row[half] + 8 * (unit + i / 2)) = value;
        }
        if (!F32_DX)
            cot_stmatrix_x4(cot_shared_address(x + offset), out);
    }
}

static __device__ __forceinline__ void arrive_from_warp(uint64_t *barrier)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        cot_mbarrier_arrive(barrier);
}

template <bool ADD_POST, bool F32_DX>
static __device__ __forceinline__ void compute_dx(const mhc_n8_call &p, shared_memory &s, int first_panel, int chunk,
                                                  int first_stream)
{
    constexpr int AT_ONCE = ADD_POST || F32_DX ? 1 : DX_PANELS; /* panels; else there are no registers for two */
    const mhc_call &c = p.call;
    const int tiles = (int)((c.tokens + TILE - 1) / TILE), lane = threadIdx.x % 32,
              warp_row = threadIdx.x % WARPGROUP / 32 * 16, mix_lane = mix_offset(warp_row + lane % 16, lane / 16);
    cot_pipeline_state<STAGES> ring;
    cot_mbarrier_wait(&s.phi_full, 0);
    for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y, ring.next()) {
        const int first_token = tile * TILE + warp_row + lane / 4;
        uint32_t mix[MIX_STEPS][4];
        cot_mbarrier_wait(&s.mix_full[ring.stage], ring.parity);
#pragma unroll
        for (int step = 0; step < MIX_STEPS; step++)
            cot_ldmatrix_x4(mix[step], cot_shared_address(s.mix[ring.stage][0][step] + mix_lane));
#pragma unroll 1
        for (int first = first_panel; first < first_panel + DX_PANELS; first += AT_ONCE) {
            float dx[AT_ONCE * COLUMNS / 2];
            issue_dx(dx, s, ring.stage, first, mix);
            cot_wgmma_wait<0>();
#pragma unroll
            for (int panel = first; panel < first + AT_ONCE; panel++) {
                token_pair tokens;
                post_pairs post;
                tokens.load(c, first_token, first_stream + panel);
                if (ADD_POST)
                    post.load(c, first_token, first_stream + panel, chunk * COLUMNS + lane % 4 * 2);
                cot_mbarrier_wait(&s.x_full[ring.stage][panel], ring.parity);
                cot_mbarrier_wait(&s.x_read[ring.stage][panel], ring.parity);
                const f32_rows to(c, first_token, first_stream + panel, chunk * COLUMNS + lane % 4 * 2);
                finish_dx<ADD_POST, F32_DX>(dx, (panel - first) * COLUMNS / 2, s.x[ring.stage][panel],
                                            s.dh_in[ring.stage], tokens, post, to);
                cot_fence_proxy_async();
                arrive_from_warp(&s.dx_ready[ring.stage][panel]);
            }
        }
        arrive_from_warp(&s.mix_empty[ring.stage]);
    }
}

static __device__ __forceinline__ void compute_dphi(const mhc_n8_call &p, shared_memory &s, int chunk, int first_stream)
{
    const mhc_call &c = p.call;
    const int tiles = (int)((c.tokens + TILE - 1) / TILE), lane = threadIdx.x % 32,
              warp_row = threadIdx.x % WARPGROUP / 32 * 16;
    /* ldmatrix, transposed: a lane's row of the fragments of x^T */
    const int x_lane = swizzled_offset(lane / 16 * 8 + lane % 8, warp_row / 8 + lane / 8 % 2);
    float dphi_part[PANELS][ROWS / 2] = {{0}};
    cot_pipeline_state<STAGES> ring;
    for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y, ring.next()) {
        cot_mbarrier_wait(&s.mix_full[ring.stage], ring.parity);
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
            uint32_t x[TILE / 16][4];
            float dphi[ROWS / 2];
            cot_mbarrier_wait(&s.x_full[ring.stage][panel], ring.parity);
#pragma unroll
            for (int step = 0; step < TILE / 16; step++)
                cot_ldmatrix_x4_trans(x[step], cot_shared_address(s.x[ring.stage][panel] + step * 16 * 128 + x_lane));
            arrive_from_warp(&s.x_read[ring.stage][panel]);
            issue_dphi(dphi, s, ring.stage, x);
            cot_wgmma_wait<0>();
#pragma unroll
            for (int e = 0; e < ROWS / 2; e++)
                dphi_part[panel][e] += dphi[e];
        }
        arrive_from_warp(&s.mix_empty[ring.stage]);
    }
    if (!present(c.dphi) && !present(c.dgamma))
        return;
    const int64_t K = N * c.D;
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
        for (int e = 0; e < ROWS / 2; e++) {
            const int j = e / 4 * 8 + lane % 4 * 2 + e % 2, column = warp_row + lane / 4 + e / 2 % 2 * 8;
            c.dphi_parts[((int64_t)blockIdx.y * ROWS + j) * K + (first_stream + panel) * c.D + chunk * COLUMNS +
                         column] = dphi_part[panel][e];
        }
}

template <bool ADD_POST, bool F32_DX> static __device__ __forceinline__ void backward(const mhc_n8_call &p)
{
    shared_memory &s = *(shared_memory *)memory;
    const int chunk = blockIdx.x / (N / PANELS), first_stream = blockIdx.x % (N / PANELS) * PANELS;
    if (threadIdx.x == 0) {
        cot_mbarrier_init(&s.phi_full, 1);
        for (int stage = 0; stage < STAGES; stage++) {
            for (int panel = 0; panel < PANELS; panel++) {
                cot_mbarrier_init(&s.x_full[stage][panel], 1);
                cot_mbarrier_init(&s.x_read[stage][panel], WARPGROUP / 32);
                cot_mbarrier_init(&s.dx_ready[stage][panel], WARPGROUP / 32);
            }
            cot_mbarrier_init(&s.mix_full[stage], 1);
            cot_mbarrier_init(&s.mix_empty[stage], (DX_WARPGROUPS + 1) * WARPGROUP / 32);
        }
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    /* The shuffle shows the compiler that `warpgroup` is uniform. */
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    if (warpgroup == PRODUCER_WARPGROUP) {
        cot_setmaxnreg_dec<24>();
        if (threadIdx.x == PRODUCER_WARPGROUP * WARPGROUP)
            produce(p, s, chunk, first_stream);
    } else if (warpgroup == DPHI_WARPGROUP) {
        cot_setmaxnreg_inc<232>();
        compute_dphi(p, s, chunk, first_stream);
    } else {
        cot_setmaxnreg_dec<128>();
        compute_dx<ADD_POST, F32_DX>(p, s, warpgroup * DX_PANELS, chunk, first_stream);
    }
}

#define INSTANCE(name, add_post, f32_dx)                                 \
    extern "C" __global__ void __launch_bounds__(MHC_SM90_N8_THREADS, 1) \
        mhc_pre_bwd_##name(const __grid_constant__ mhc_n8_call p)        \
    {                                                                    \
        backward<add_post, f32_dx>(p);                                   \
    }
INSTANCE(n8_sm90_bf16, false, false)
INSTANCE(n8_post_sm90_bf16, true, false)
/* dx is g of post_pre's backward. */
INSTANCE(n8_f32_sm90_bf16, false, true)
INSTANCE(n8_post_f32_sm90_bf16, true, true)
