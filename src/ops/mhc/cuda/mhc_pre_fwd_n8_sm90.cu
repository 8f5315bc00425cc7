/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_fwd_n8_sm90.cu: the projection of pre forward on Hopper for n = 8, bf16, D a multiple of 64: partial sums of
 * h_mix and of squares. mhc_pre_mma.cu split phi gamma into three bf16 terms before. mhc_pre_tokens.cu sums over the
 * slices afterwards, and reads x again for h_in.
 *
 * Block (x, y) has 128 tokens and slice y of the inputs k, in chunks of 64 columns of one stream. The two blocks of a
 * cluster have the same slice: each loads half of phi and sends it to both.
 *
 *   h_mix [64 tokens][80 rows] += x [64][64 columns] phi gamma^T [64][80], all three terms
 *
 *   producer      one thread loads x and half of the terms of phi gamma
 *   2 consumers   warpgroups, 64 tokens each. x is in registers for the products of the three terms, and for the squares.
 *                 The tensor cores truncate their sums, so they sum RUN chunks only, and float32 additions sum the runs
 *
 *   barrier        arrivals                           who waits   phase ends when
 *   full[stage]    1, the producer                    consumers   x and both halves of phi are loaded
 *   empty[stage]   1 of each consumer warp of a pair  producer    the consumers of both blocks have read the stage */
#include "mhc_mma.cuh"

#include "../../../cuda/device/wgmma.cuh"

enum {
    N = 8,
    ROWS = MHC_SM90_N8_ROWS,
    SUMS = MHC_CUDA_SUMS(N),
    TERMS = MHC_CUDA_MMA_TERMS,
    TILE = MHC_SM90_N8_FWD_TILE,
    COLUMNS = MHC_SM90_CHUNK_COLUMNS,
    CONSUMERS = TILE / 64,
    STAGES = 4,
    RUN = 2, /* chunks */
    WARPGROUP = 128,
    HALF_ROWS = ROWS / 2,
    ROW_BYTES = COLUMNS * 2
};

struct shared_memory {
    unsigned char x[STAGES][TILE * ROW_BYTES];          /* [token][column], 128-byte swizzle */
    unsigned char phi[STAGES][TERMS][ROWS * ROW_BYTES]; /* [row][column], the same */
    uint64_t full[STAGES], empty[STAGES];
};
static_assert(sizeof(shared_memory) <= MHC_SM90_SHARED_BYTES, "must fit in a block's shared memory");
extern __shared__ __align__(1024) unsigned char memory[];

/* The chunks of the block's slice: [begin, end). Chunk i is columns 64 (i % (D / 64)) of stream i / (D / 64). */
struct chunk_range {
    int begin, end;

    __device__ __forceinline__ explicit chunk_range(const mhc_call &c)
    {
        const int chunks = N * (int)(c.D / COLUMNS), slices = (int)c.slices, slice = (int)blockIdx.y;
        begin = (int)((int64_t)chunks * slice / slices);
        end = (int)((int64_t)chunks * (slice + 1) / slices);
    }
};

static __device__ __forceinline__ void produce(const mhc_n8_call &p, shared_memory &s, const chunk_range &range)
{
    const int stream_chunks = (int)(p.call.D / COLUMNS), half = (int)cot_cluster_rank() * HALF_ROWS;
    cot_pipeline_state<STAGES> ring;
    for (int i = range.begin; i < range.end; i++, ring.next()) {
        const int stream = i / stream_chunks, chunk = i - stream * stream_chunks;
        uint64_t *const full = &s.full[ring.stage];
        cot_mbarrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
        cot_mbarrier_arrive_expect(full, sizeof s.x[0] + sizeof s.phi[0]);
        for (int term = 0; term < TERMS; term++)
            cot_tma_load_4d_to_both(s.phi[ring.stage][term] + half * ROW_BYTES, &p.phi, chunk * COLUMNS, stream, half,
                                    term, full);
        cot_tma_load_4d(s.x[ring.stage], &p.x, 0, (int)blockIdx.x * TILE, chunk, stream, full);
    }
}

static __device__ __forceinline__ void consume(const mhc_n8_call &p, shared_memory &s, int consumer,
                                               const chunk_range &range)
{
    const mhc_call &c = p.call;
    const int lane = threadIdx.x % 32, warp_row = consumer * 64 + threadIdx.x % WARPGROUP / 32 * 16;
    const int x_row = warp_row + lane % 16;
    const uint32_t peer_empty = cot_mapa(cot_shared_address(s.empty), cot_cluster_rank() ^ 1);
    float sums[ROWS / 2] = {0}, squares[2] = {0};
    cot_pipeline_state<STAGES> ring;
    for (int i = range.begin; i < range.end; i += RUN) {
        float run[ROWS / 2], run_squares[2] = {0};
#pragma unroll
        for (int part = 0; part < RUN; part++) {
            if (i + part >= range.end)
                break;
            uint32_t x[COLUMNS / 16][4];
            cot_mbarrier_wait(&s.full[ring.stage], ring.parity);
#pragma unroll
            for (int step = 0; step < COLUMNS / 16; step++)
                cot_ldmatrix_x4(x[step],
                                cot_shared_address(s.x[ring.stage] + swizzled_offset(x_row, step * 2 + lane / 16)));
            cot_wgmma_fence();
#pragma unroll
            for (int term = TERMS - 1; term >= 0; term--) {
                const uint64_t phi = cot_wgmma_k_major(cot_shared_address(s.phi[ring.stage][term]));
#pragma unroll
                for (int step = 0; step < COLUMNS / 16; step++)
                    cot_wgmma<__nv_bfloat16, false>(run, x[step], phi + step * COT_WGMMA_K_STEP,
                                                    part > 0 || term < TERMS - 1 || step > 0);
            }
            cot_wgmma_commit();
#pragma unroll
            for (int step = 0; step < COLUMNS / 16; step++)
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const float2 pair = cot_unpack_pair<__nv_bfloat16>(x[step][r]);
                    run_squares[r % 2] = fmaf(pair.y, pair.y, fmaf(pair.x, pair.x, run_squares[r % 2]));
                }
            cot_wgmma_wait<0>();
            __syncwarp();
            if (lane == 0) {
                cot_mbarrier_arrive(&s.empty[ring.stage]);
                cot_mbarrier_arrive_remote(peer_empty + ring.stage * (uint32_t)sizeof(uint64_t));
            }
            ring.next();
        }
#pragma unroll
        for (int e = 0; e < ROWS / 2; e++)
            sums[e] += run[e];
        squares[0] += run_squares[0], squares[1] += run_squares[1];
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t token = (int64_t)blockIdx.x * TILE + warp_row + lane / 4 + 8 * half;
        float *to = c.sums + (token * c.slices + blockIdx.y) * SUMS, sum = squares[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (token >= c.tokens)
            continue;
#pragma unroll
        for (int octet = 0; octet < ROWS / 8; octet++)
            *(float2 *)(to + octet * 8 + lane % 4 * 2) =
                make_float2(sums[octet * 4 + half * 2], sums[octet * 4 + half * 2 + 1]);
        if (lane % 4 == 0)
            to[ROWS] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(MHC_SM90_N8_FWD_THREADS, 1)
    mhc_pre_fwd_n8_sm90_bf16(const __grid_constant__ mhc_n8_call p)
{
    shared_memory &s = *(shared_memory *)memory;
    const chunk_range range(p.call);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            cot_mbarrier_init(&s.full[stage], 1);
            cot_mbarrier_init(&s.empty[stage], 2 * CONSUMERS * WARPGROUP / 32);
        }
        cot_mbarrier_init_fence();
    }
    __syncwarp();
    cot_cluster_arrive(); /* the peer's loads and arrivals need these barriers */
    cot_cluster_wait();
    /* The shuffle shows the compiler that `warpgroup` is uniform. */
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    if (warpgroup == CONSUMERS) {
        cot_setmaxnreg_dec<24>();
        if (threadIdx.x == CONSUMERS * WARPGROUP)
            produce(p, s, range);
    } else {
        cot_setmaxnreg_inc<240>();
        consume(p, s, warpgroup, range);
    }
    __syncwarp();         /* the barrier needs whole warps */
    cot_cluster_arrive(); /* no block exits while the other may still write to its shared memory */
    cot_cluster_wait();
}
