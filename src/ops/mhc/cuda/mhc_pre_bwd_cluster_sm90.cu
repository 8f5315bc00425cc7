/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_cluster_sm90.cu: pre backward in one pass over x and dh_in, for n = 4 and bf16.
 *
 * Tiles, blocks and owners are the same as in mhc_pre_fwd_cluster_sm90.cu. With dh_res, mhc_pre_dz has already
 * stored dz in the workspace: it includes Sinkhorn's gradient. The ring has one stage for a tile. Roles:
 *
 *   producer     loads x and dh_in of the tile into shared memory; later stores dx, which replaced x there
 *   8 MMA warps  32 columns of all streams each. First compute the warp's part of dh_pre: the diagonals of dh_in x^T.
 *                Then, with the records that the owners have sent, add to Q and compute dx (mhc_pre_bwd_sm90.cuh).
 *   reducer      sums over the warps and sends each token's dh_pre to its owner
 *   owner        sends its token's record (dh_mix, h_pre, c) to all blocks: first the part that does not need dh_pre,
 *                then the part that needs dh_pre, which it sums over the blocks. It also sums the terms of dbias and
 *                dalpha.
 *   dx_post      loads dx_post, if present, one stream at a time. Its buffer replaces one stage.
 *
 *   barrier               arrivals              phase ends when
 *   full[stage]           1, the producer       x and dh_in of the tile are in shared memory
 *   partial_full          32 of each MMA warp   the warps' parts of dh_pre are in shared memory
 *   partial_empty         32, the reducer       the reducer has read them
 *   gathered_full[stage]  1, the owner          dh_pre of the owned token has arrived from all blocks
 *   records_full[stage]   1, MMA thread 0       the records of all tokens of the tile have arrived
 *   dx_full[stage]        1 of each MMA warp    dx has replaced x in shared memory
 *   post_full[stream]     1, the dx_post warp   dx_post of the stream is in shared memory
 *   post_empty[stream]    1 of each MMA warp    dx_post of the stream has been read
 *
 * A block stores into another block's stage without waiting for that block, as in the forward. The MMA warps compute
 * dh_pre one tile ahead. The exchange of dh_pre then overlaps the products of the previous tile. Registers are the
 * scarcest resource: Q and the second terms of phi gamma take 144 registers of an MMA thread. */
#include "mhc_pre_bwd_sm90.cuh"

enum { RECORD_UNITS = sizeof(token_record) / 16 };

/* Of dx: post_pre's backward computes the records and the gradients of the parameters only. */
enum data_gradient { NO_DX, DX, DX_AND_POST };

/* With DX_AND_POST, the buffer of dx_post replaces one stage. With NO_DX, a stage replaces the terms of phi gamma. */
template <data_gradient MODE> struct shared_memory {
    enum { STAGES = MODE == NO_DX ? 5 : MODE == DX ? 4 : 3 };
    unsigned char stages[STAGES][STAGE_BYTES]; /* x [stream][chunk][token][128 bytes, swizzled], then dh_in likewise */
    unsigned char dx_post[MODE == DX_AND_POST ? N : 1][MODE == DX_AND_POST ? STREAM_BYTES : 1024];
    phi_fragments<MODE == NO_DX ? 1 : GROUPS> phi;
    token_record records[STAGES][TILE], owned_record;
    float gathered[STAGES][MHC_SM90_CLUSTER_BLOCKS][N];
    float partial[MMA_WARPS][TILE][N];
    uint64_t full[STAGES], gathered_full[STAGES], records_full[STAGES], dx_full[STAGES], partial_full, partial_empty;
    uint64_t post_full[N], post_empty[N];
};
static_assert(sizeof(shared_memory<NO_DX>) <= MHC_SM90_SHARED_BYTES, "must fit in a block's shared memory");
static_assert(sizeof(shared_memory<DX>) <= MHC_SM90_SHARED_BYTES, "must fit in a block's shared memory");
static_assert(sizeof(shared_memory<DX_AND_POST>) <= MHC_SM90_SHARED_BYTES, "must fit in a block's shared memory");
extern __shared__ __align__(1024) unsigned char memory[];

#define FOR_EACH_TILE(tile, ring, count)                                         \
    cot_pipeline_state<shared_memory<MODE>::STAGES> ring;                        \
    for (int tile = (int)(blockIdx.x / MHC_SM90_CLUSTER_BLOCKS); tile < (count); \
         tile += MHC_SM90_GRID_CLUSTERS, ring.next())

/* ---- MMA warps ---------------------------------------------------------------------------------------- */

static __device__ __forceinline__ int64_t first_column(void)
{
    return cot_cluster_rank() * MHC_SM90_COLUMNS + threadIdx.x / 32 * COLUMNS;
}

/* Computes the warp's part of dh_pre. The lanes that hold the diagonals store tokens g and g+8. */
template <data_gradient MODE>
static __device__ __forceinline__ void compute_dh_pre(shared_memory<MODE> &s, uint32_t x, uint32_t dh_in, int warp,
                                                      uint32_t parity)
{
    const int lane = threadIdx.x % 32, g = lane / 4;
    const bool odd = g % 2 != 0;
    float low[N], high[N];
    uint32_t A[2][4];
    cot_ldmatrix_x4(A[0], unit_address(dh_in, 0));
    cot_ldmatrix_x4(A[1], unit_address(dh_in, 1));
#pragma unroll
    for (int i = 0; i < N; i++) {
        float sums[2][4] = {0};
#pragma unroll
        for (int step = 0; step < 2; step++) {
            uint32_t B[4];
            cot_ldmatrix_x4(B, unit_address(x, 2 * i + step));
            cot_mma_bf16(sums[0], A[step][0], A[step][1], A[step][2], A[step][3], B[0], B[1]);
            cot_mma_bf16(sums[1], A[step][0], A[step][1], A[step][2], A[step][3], B[2], B[3]);
        }
        low[i] = odd ? sums[0][1] : sums[0][0];
        high[i] = odd ? sums[1][3] : sums[1][2];
    }
    cot_mbarrier_wait(&s.partial_empty, parity ^ 1);
    if (lane % 4 == g / 2) {
        *(float4 *)s.partial[warp][g] = make_float4(low[0], low[1], low[2], low[3]);
        *(float4 *)s.partial[warp][g + 8] = make_float4(high[0], high[1], high[2], high[3]);
    }
    arrive_all_lanes(&s.partial_full);
}

template <data_gradient MODE>
static __device__ __forceinline__ void multiply(const mhc_call &c, shared_memory<MODE> &s, int rank, int tiles)
{
    const int warp = threadIdx.x / 32;
    uint32_t second_terms[GROUPS][6];
    if constexpr (MODE != NO_DX)
        load_phi<0, GROUPS / 2>(c, s, first_column(), warp, phi_scale<__nv_bfloat16, MODE == DX_AND_POST>,
                                second_terms);
    cot_cluster_wait();
    if constexpr (MODE != NO_DX)
        load_phi<GROUPS / 2, GROUPS>(c, s, first_column(), warp, phi_scale<__nv_bfloat16, MODE == DX_AND_POST>,
                                     second_terms);
    float Q[GROUPS][OCTETS][4] = {0};
    const lane_units units = find_lane_units(s, warp);
    cot_pipeline_state<shared_memory<MODE>::STAGES> next_ring;
    uint32_t parity = 0, post_parity = 0;
    int next_tile = (int)(blockIdx.x / MHC_SM90_CLUSTER_BLOCKS);
    FOR_EACH_TILE(tile, ring, tiles)
    {
        /* dh_pre is computed one tile ahead: of two tiles in the first iteration, then of one. */
        for (; next_tile < tiles && next_tile <= tile + MHC_SM90_GRID_CLUSTERS;
             next_tile += MHC_SM90_GRID_CLUSTERS, next_ring.next()) {
            cot_mbarrier_wait(&s.full[next_ring.stage], next_ring.parity);
            const uint32_t stage_offset = (uint32_t)(next_ring.stage * STAGE_BYTES);
            compute_dh_pre(s, units.by_column + stage_offset, units.by_token + stage_offset + X_BYTES, warp, parity);
            parity ^= 1;
        }
        cot_mbarrier_wait(&s.records_full[ring.stage], ring.parity);
        if (threadIdx.x == 0)
            cot_mbarrier_arrive_expect(&s.records_full[ring.stage], sizeof s.records[0]);
        if constexpr (MODE == NO_DX)
            accumulate_tile<__nv_bfloat16>(s, units, ring, Q);
        else
            multiply_tile<__nv_bfloat16, MODE == DX_AND_POST>(c, s, units, ring, warp, post_parity, second_terms, Q);
        post_parity ^= 1;
    }
    const int64_t d = first_column();
    if (d < c.D && (present(c.dphi) || present(c.dgamma)))
        store_Q(c, Q, (int64_t)(blockIdx.x / MHC_SM90_CLUSTER_BLOCKS), d);
}

/* ---- other roles -------------------------------------------------------------------------------------- */

template <data_gradient MODE> static __device__ __forceinline__ void reduce(shared_memory<MODE> &s, int rank, int tiles)
{
    const int token = threadIdx.x % 32;
    uint32_t parity = 0;
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, tiles)
    {
        cot_mbarrier_wait(&s.partial_full, parity);
        if (token < TILE) {
            float4 sum = *(const float4 *)s.partial[0][token];
#pragma unroll
            for (int warp = 1; warp < MMA_WARPS; warp++) {
                const float4 other = *(const float4 *)s.partial[warp][token];
                sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
            }
            cot_store_async(cot_mapa(cot_shared_address(s.gathered[ring.stage][rank]), token),
                            cot_mapa(cot_shared_address(&s.gathered_full[ring.stage]), token), __float_as_uint(sum.x),
                            __float_as_uint(sum.y), __float_as_uint(sum.z), __float_as_uint(sum.w));
        }
        arrive_all_lanes(&s.partial_empty);
        parity ^= 1;
    }
}

/* Sends 16-byte units of the owned record to all blocks. Units 0, 3, 6 (the first unit of each term) and 10 (factor)
 * depend on dh_pre: AFTER_DH_PRE sends these, the other call sends the rest. */
template <bool AFTER_DH_PRE, data_gradient MODE>
static __device__ __forceinline__ void send_units(shared_memory<MODE> &s, int stage, int rank)
{
    constexpr uint32_t COUNT = AFTER_DH_PRE ? 4 : RECORD_UNITS - 4;
    const uint32_t to = cot_shared_address(&s.records[stage][rank]),
                   barrier = cot_shared_address(&s.records_full[stage]);
    __syncwarp();
#pragma unroll AFTER_DH_PRE ? 2 : 1
    for (uint32_t item = threadIdx.x % 32; item < COUNT * MHC_SM90_CLUSTER_BLOCKS; item += 32) {
        const uint32_t block = item / COUNT, index = item % COUNT;
        const uint32_t unit = AFTER_DH_PRE ? index * 3 + index / 3 : index * 3 / 2 + 1 - index / 6;
        const uint4 words = ((const uint4 *)&s.owned_record)[unit];
        cot_store_async(cot_mapa(to + unit * 16, block), cot_mapa(barrier, block), words.x, words.y, words.z, words.w);
    }
    __syncwarp();
}

template <data_gradient MODE>
static __device__ __forceinline__ void set_terms(shared_memory<MODE> &s, int j, float dh_mix)
{
    dh_mix *= (float)MHC_CUDA_MIX_SCALE;
#pragma unroll
    for (int term = 0; term < TERMS; term++) {
        const __nv_bfloat16 value = __float2bfloat16_rn(dh_mix);
        s.owned_record.terms[term][j] = __bfloat16_as_ushort(value);
        dh_mix -= __bfloat162float(value);
    }
}

/* All blocks wait for the records sent from here. So a token's inputs are loaded one tile ahead, and the units that do
 * not depend on dh_pre are computed and sent before dh_pre arrives. The stage is free at that time: a block that has
 * sent dh_pre of the previous tile has finished the tile two before that one. */
template <data_gradient MODE>
static __device__ __forceinline__ void make_owned_records(const mhc_call &c, shared_memory<MODE> &s, int rank,
                                                          int tiles)
{
    const int lane = threadIdx.x % 32;
    const float alpha = lane < M ? load_f32(c.alpha, alpha_index(N, lane) * c.alpha.stride[0]) : 0.0f;
    double dbias = 0, dalpha = 0;
    cot_griddepcontrol_wait(); /* waits for mhc_pre_dz, if it was launched */
    const token_element value = input_element(c, lane);
    token_inputs next = load_inputs(c, value, (uint32_t)(blockIdx.x / MHC_SM90_CLUSTER_BLOCKS * TILE + rank));
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, tiles)
    {
        const token_inputs in = next;
        next = load_inputs(c, value, (uint32_t)((tile + MHC_SM90_GRID_CLUSTERS) * TILE + rank));
        float dz = lane < N ? 0.0f : in.value;
        if (!present(c.dh_res) && lane >= N && lane < 2 * N)
            dz *= in.h_post * (1.0f - in.h_post / c.post_scale);
        if (lane >= N && lane < M)
            set_terms(s, lane, alpha * dz * in.inv_rms);
        if (lane < N)
            s.owned_record.h_pre[lane] = in.value;
        send_units<false>(s, ring.stage, rank);
        const float post_res_sum = sum_over_warp(alpha * dz * in.h_mix);
        const float scale = -in.inv_rms * in.inv_rms * in.inv_rms / (float)(N * c.D);
        /* From here on each lane holds coefficient lane % N of h_pre. */
        const float sigma = __shfl_sync(0xffffffffu, in.value, lane % N) - c.hc_eps, slope = sigma * (1.0f - sigma);
        const float alpha_pre = __shfl_sync(0xffffffffu, alpha, 0);
        const float h_mix_pre = __shfl_sync(0xffffffffu, in.h_mix, lane % N);
        cot_mbarrier_wait(&s.gathered_full[ring.stage], ring.parity);
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive_expect(&s.gathered_full[ring.stage], sizeof s.gathered[0]);
        float dh_pre = s.gathered[ring.stage][lane / 4][lane % 4] + s.gathered[ring.stage][lane / 4 + 8][lane % 4];
#pragma unroll
        for (int width = 16; width >= 4; width /= 2)
            dh_pre += __shfl_xor_sync(0xffffffffu, dh_pre, width);
        const float dz_pre = dh_pre * slope, du = alpha_pre * dz_pre;
        float sum = du * h_mix_pre;
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        if (lane < N)
            set_terms(s, lane, du * in.inv_rms);
        if (lane == 0)
            s.owned_record.factor = (sum + post_res_sum) * scale;
        send_units<true>(s, ring.stage, rank);
        if (MODE == NO_DX) {
            if (lane < RECORD_UNITS)
                ((uint4 *)&c.records[tile * TILE + rank])[lane] = ((const uint4 *)&s.owned_record)[lane];
            __syncwarp(); /* the record is replaced after this */
        }
        if (lane < N)
            dz = dz_pre;
        dbias += (double)dz;
        dalpha += (double)dz * (double)(in.h_mix * in.inv_rms);
    }
    if (lane < M) {
        double *to = c.token_sums + ((int64_t)blockIdx.x * M + lane) * 2;
        to[0] = dbias;
        to[1] = dalpha;
    }
}

template <data_gradient MODE>
static __device__ __forceinline__ void load_tile(const mhc_mapped_call &p, shared_memory<MODE> &s, int stage, int tile,
                                                 int rank)
{
    cot_mbarrier_arrive_expect(&s.full[stage], STAGE_BYTES);
    cot_tma_load_4d(s.stages[stage], &p.x, 0, tile * TILE, rank * MHC_SM90_BLOCK_CHUNKS, 0, &s.full[stage]);
    cot_tma_load_4d(s.stages[stage] + X_BYTES, &p.dh_in, 0, tile * TILE, rank * MHC_SM90_BLOCK_CHUNKS, 0,
                    &s.full[stage]);
}

template <data_gradient MODE>
static __device__ __forceinline__ void produce(const mhc_mapped_call &p, shared_memory<MODE> &s, int rank, int tiles)
{
    cot_cluster_wait();
    if (threadIdx.x % 32 == 0) {
        const int first = (int)(blockIdx.x / MHC_SM90_CLUSTER_BLOCKS);
        for (int stage = 0; stage < s.STAGES && first + stage * MHC_SM90_GRID_CLUSTERS < tiles; stage++)
            load_tile(p, s, stage, first + stage * MHC_SM90_GRID_CLUSTERS, rank);
        FOR_EACH_TILE(tile, ring, tiles)
        {
            cot_mbarrier_wait(&s.dx_full[ring.stage], ring.parity);
            if (MODE != NO_DX && present(p.call.dx)) {
                cot_tma_store_4d(&p.dx, 0, tile * TILE, rank * MHC_SM90_BLOCK_CHUNKS, 0, s.stages[ring.stage]);
                cot_bulk_commit();
                cot_bulk_wait_read();
            }
            if (tile + s.STAGES * MHC_SM90_GRID_CLUSTERS < tiles)
                load_tile(p, s, ring.stage, tile + s.STAGES * MHC_SM90_GRID_CLUSTERS, rank);
        }
        cot_bulk_wait();
    }
    __syncwarp();
}

/* Loads each stream of dx_post as soon as the MMA warps have read that stream of the previous tile. */
static __device__ __forceinline__ void produce_dx_post(const mhc_mapped_call &p, shared_memory<DX_AND_POST> &s,
                                                       int rank, int tiles)
{
    constexpr data_gradient MODE = DX_AND_POST;
    cot_cluster_wait();
    if (threadIdx.x % 32 == 0) {
        uint32_t parity = 1;
        FOR_EACH_TILE(tile, ring, tiles)
        {
            for (int i = 0; i < N; i++) {
                cot_mbarrier_wait(&s.post_empty[i], parity);
                cot_mbarrier_arrive_expect(&s.post_full[i], STREAM_BYTES);
                cot_tma_load_4d(s.dx_post[i], &p.dx_post, 0, tile * TILE, rank * MHC_SM90_BLOCK_CHUNKS, i,
                                &s.post_full[i]);
            }
            parity ^= 1;
        }
    }
    __syncwarp();
}

template <data_gradient MODE> static __device__ __forceinline__ void backward(const mhc_mapped_call &p)
{
    shared_memory<MODE> &s = *(shared_memory<MODE> *)memory;
    const mhc_call &c = p.call;
    const int rank = (int)cot_cluster_rank(), warp = threadIdx.x / 32;
    const int tiles = (int)((c.tokens + TILE - 1) / TILE);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < s.STAGES; stage++) {
            cot_mbarrier_init(&s.full[stage], 1);
            cot_mbarrier_init(&s.gathered_full[stage], 1);
            cot_mbarrier_init(&s.records_full[stage], 1);
            cot_mbarrier_init(&s.dx_full[stage], MMA_WARPS);
            cot_mbarrier_arrive_expect(&s.gathered_full[stage], sizeof s.gathered[0]);
            cot_mbarrier_arrive_expect(&s.records_full[stage], sizeof s.records[0]);
        }
        cot_mbarrier_init(&s.partial_full, 32 * MMA_WARPS);
        cot_mbarrier_init(&s.partial_empty, 32);
        for (int i = 0; i < N; i++) {
            cot_mbarrier_init(&s.post_full[i], 1);
            cot_mbarrier_init(&s.post_empty[i], MMA_WARPS);
        }
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    cot_cluster_arrive(); /* the matching wait precedes the first store to another block */
    if (warp < MMA_WARPS) {
        cot_setmaxnreg_inc<MODE == DX ? 216 : 224>();
        multiply(c, s, rank, tiles);
    } else {
        cot_setmaxnreg_dec<MODE == DX ? 72 : 56>();
        if (warp == MMA_WARPS)
            reduce(s, rank, tiles);
        else if (warp == MMA_WARPS + 1)
            make_owned_records(c, s, rank, tiles);
        else if (warp == MMA_WARPS + 2)
            produce(p, s, rank, tiles);
        else if constexpr (MODE == DX_AND_POST)
            produce_dx_post(p, s, rank, tiles);
        else
            cot_cluster_wait();
    }
    cot_cluster_arrive(); /* no block exits while another block may still write to its shared memory */
    cot_cluster_wait();
}

extern "C" __global__ void __launch_bounds__(MHC_SM90_BWD_THREADS, 1)
    mhc_pre_bwd_cluster_sm90(const __grid_constant__ mhc_mapped_call p)
{
    backward<DX>(p);
}

/* Adds dx_post. */
extern "C" __global__ void __launch_bounds__(MHC_SM90_BWD_THREADS, 1)
    mhc_pre_bwd_cluster_post_sm90(const __grid_constant__ mhc_mapped_call p)
{
    backward<DX_AND_POST>(p);
}

/* For post_pre: without dx. Also stores the records. */
extern "C" __global__ void __launch_bounds__(MHC_SM90_BWD_THREADS, 1)
    mhc_pre_bwd_cluster_records_sm90(const __grid_constant__ mhc_mapped_call p)
{
    backward<NO_DX>(p);
}
