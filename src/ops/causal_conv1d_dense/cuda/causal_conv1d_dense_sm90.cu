/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_sm90.cu: the products of dense causal convolution on Hopper. The shift of a tap is a
 * coordinate of the TMA box. TMA fills the rows before the first and after the last token with zeros. So neither
 * im2col nor padding is stored.
 *
 *   product    rows          columns   sums over                A's boxes                B's boxes
 *   FORWARD    tokens        Dout      channels of x, taps      x [t + k - (K-1)][i]     w [k][o][i], K-major
 *   COMPUTE_G  the same as FORWARD; stores g = dy silu'(z) instead of y
 *   DX         tokens        Din       channels of g, taps      g [t + j][o]             w [K-1-j][o][i], MN-major
 *   DWEIGHT    Dout, 1 tap   Din       tokens of all sequences  g [t][o], MN-major       x [t + k - (K-1)][i], MN-major
 *
 *   warpgroup 0     producer: one thread loads the 2 tiles of A and 4 of B of a step, 64 x 64 each, by TMA
 *   warpgroups 1, 2 consumers: 64 rows by 256 columns each, accumulated in registers
 *
 *   barrier    arrivals (bytes)       phase ends when        who waits
 *   full       1 (6 tiles)            a step has arrived     consumers
 *   empty      8: each consumer warp  no warp uses it        producer
 *
 * While the products of one step are in flight, a consumer waits for the operands of the next step. DWEIGHT splits
 * the tokens into ranges, by the shape alone. The partial sums go to global memory, and another kernel reduces them
 * in order. */
#include "causal_conv1d_dense_maps.h"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/bulk.cuh"
#include "../../../cuda/device/cluster.cuh"
#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/quad.cuh"
#include "../../../cuda/device/wgmma.cuh"

enum {
    BLOCK_M = CONV1D_DENSE_BLOCK_M,
    BLOCK_N = CONV1D_DENSE_BLOCK_N,
    BLOCK_K = CONV1D_DENSE_BLOCK_K,
    STAGES = CONV1D_DENSE_STAGES,
    WARPGROUP = 128,
    WARP = 32,
    TILE_BYTES = 64 * 64 * 2
};

enum product { FORWARD, COMPUTE_G, DX, DWEIGHT };

/* The launch gives 168 registers to each of 384 threads. The warpgroups redistribute them: 40 + 2 * 232 = 3 * 168. */
enum { PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232 };

extern __shared__ __align__(1024) unsigned char conv1d_dense_memory[];

struct stage_tiles {
    unsigned char a[2][TILE_BYTES], b[4][TILE_BYTES];
};

struct shared_memory {
    stage_tiles stages[STAGES];
    float bias[BLOCK_N];
    uint64_t full[STAGES], empty[STAGES];
};

/* What a block computes: rows from `row` on, columns from `column` on. Rows are tokens of sequence b, or for DWEIGHT
 * output channels of tap k. */
struct work_tile {
    int b, k, row, column, first, steps; /* first: first step of the split of DWEIGHT */
    int64_t split;
};

template <product P>
static __device__ __forceinline__ work_tile get_work_tile(const conv1d_dense_call &c, unsigned block)
{
    const unsigned column_blocks =
        (unsigned)(((P == FORWARD || P == COMPUTE_G ? c.Dout : c.Din) + BLOCK_N - 1) / BLOCK_N);
    const unsigned row_blocks = (unsigned)(((P == DWEIGHT ? c.Dout : c.T) + BLOCK_M - 1) / BLOCK_M);
    work_tile p;
    p.column = (int)(block % column_blocks) * BLOCK_N; /* consecutive blocks load the same rows */
    p.row = (int)(block / column_blocks % row_blocks) * BLOCK_M;
    const unsigned rest = block / column_blocks / row_blocks;
    p.b = p.k = 0;
    p.split = p.first = 0;
    if (P == DWEIGHT) {
        const int64_t total_steps = c.B * ((c.T + BLOCK_K - 1) / BLOCK_K);
        p.k = (int)(rest % (unsigned)c.K);
        p.split = rest / (unsigned)c.K;
        p.first = (int)(p.split * total_steps / c.splits);
        p.steps = (int)((p.split + 1) * total_steps / c.splits) - p.first;
    } else {
        p.b = (int)rest;
        p.steps = (int)(((P == DX ? c.Dout : c.Din) + BLOCK_K - 1) / BLOCK_K * c.K);
    }
    return p;
}

template <product P>
static __device__ __forceinline__ void produce(const conv1d_dense_mapped_call &m, shared_memory &s, const work_tile &p)
{
    const conv1d_dense_call &c = m.call;
    const int K = (int)c.K, chunks = (int)((c.T + BLOCK_K - 1) / BLOCK_K);
    cot_pipeline_state<STAGES> ring;
    cot_fence_proxy_async_global(); /* order TMA loads after the writes of previous kernels */
    for (int step = 0; step < p.steps; step++, ring.next()) {
        stage_tiles &to = s.stages[ring.stage];
        uint64_t *full = &s.full[ring.stage];
        cot_mbarrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
        cot_mbarrier_arrive_expect(full, sizeof(stage_tiles));
        if (P == DWEIGHT) {
            const int chunk = p.first + step, b = chunk / chunks, t = chunk % chunks * BLOCK_K;
#pragma unroll
            for (int i = 0; i < 2; i++)
                cot_tma_load_3d(to.a[i], &m.a, p.row + 64 * i, t, b, full);
#pragma unroll
            for (int i = 0; i < 4; i++)
                cot_tma_load_3d(to.b[i], &m.b, p.column + 64 * i, t + p.k - (K - 1), b, full);
        } else {
            /* The taps of a chunk of channels are consecutive, because they load nearly the same rows of A. */
            const int tap = step % K, channel = step / K * BLOCK_K, shift = P == DX ? tap : tap - (K - 1);
#pragma unroll
            for (int i = 0; i < 2; i++)
                cot_tma_load_3d(to.a[i], &m.a, channel, p.row + 64 * i + shift, p.b, full);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (P == DX)
                    cot_tma_load_3d(to.b[i], &m.b, p.column + 64 * i, channel, K - 1 - tap, full);
                else
                    cot_tma_load_3d(to.b[i], &m.b, channel, p.column + 64 * i, tap, full);
            }
        }
    }
}

/* Issues the products of a step: accumulators += A B, 64 rows by 2 x 128 columns. */
template <typename E, product P>
static __device__ __forceinline__ void issue_wgmma_step(float (&acc_left)[64], float (&acc_right)[64],
                                                        const stage_tiles &tiles, int half)
{
    constexpr bool A_MN = P == DWEIGHT, B_MN = P == DX || P == DWEIGHT;
    constexpr int A_STEP = A_MN ? COT_WGMMA_MN_STEP : COT_WGMMA_K_STEP;
    constexpr int B_STEP = B_MN ? COT_WGMMA_MN_STEP : COT_WGMMA_K_STEP;
    const uint32_t rows = cot_shared_address(tiles.a[half]), columns = cot_shared_address(tiles.b[0]);
    const uint64_t a = A_MN ? cot_wgmma_mn_major(rows, TILE_BYTES) : cot_wgmma_k_major(rows);
    const uint64_t b = B_MN ? cot_wgmma_mn_major(columns, TILE_BYTES) : cot_wgmma_k_major(columns);
    cot_wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; k++) {
        cot_wgmma<E, A_MN, B_MN>(acc_left, a + k * A_STEP, b + k * B_STEP, true);
        cot_wgmma<E, A_MN, B_MN>(acc_right, a + k * A_STEP, b + (2 * TILE_BYTES >> 4) + k * B_STEP, true);
    }
    cot_wgmma_commit();
}

/* ---- results -------------------------------------------------------------------------------------------------- */

/* The first row of the thread's accumulators. The thread has this row and row + 8, and in each group of 8 columns two
 * adjacent columns. */
template <product P> static __device__ __forceinline__ int accumulator_row(const work_tile &p)
{
    return p.row + ((int)threadIdx.x - WARPGROUP) / WARP * 16 + (int)threadIdx.x % WARP / 4;
}

/* Stores y or dx of 128 columns from `column` on, half of the block's columns. bias: of these columns, used for y
 * only. */
template <typename E, product P>
static __device__ __forceinline__ void store_output(const conv1d_dense_call &c, const work_tile &p, int column,
                                                    const float *bias, float (&sums)[64])
{
    const int row = accumulator_row<P>(p), quarter = (int)threadIdx.x % 4, channels = (int)(P == DX ? c.Din : c.Dout);
    const conv1d_dense_array &out = c.out;
#pragma unroll
    for (int i = 0; P == FORWARD && i < 64; i++) {
        const float z = sums[i] + bias[8 * (i / 4) + 2 * quarter + i % 2];
        sums[i] = c.silu ? cot_silu<false>(z) : z;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int t = row + 8 * half;
        const int64_t offset = p.b * out.stride[0] + t * out.stride[2];
        if (c.out_vectorized) {
#pragma unroll
            for (int group = 0; group < 16; group += 4) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    words[i] = cot_pack_pair<E>(sums[4 * (group + i) + 2 * half], sums[4 * (group + i) + 2 * half + 1]);
                const uint4 columns = cot_quad_transpose(words[0], words[1], words[2], words[3]);
                const int first_column = column + 8 * (group + quarter);
                if (t < c.T && first_column < channels)
                    *(uint4 *)((E *)out.data + offset + first_column) = columns;
            }
            continue;
        }
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int output_column = column + 8 * (i / 2) + 2 * quarter + i % 2;
            if (t < c.T && output_column < channels)
                cot_store(out.data, out.dtype, offset + output_column * out.stride[1],
                          sums[4 * (i / 2) + 2 * half + i % 2]);
        }
    }
}

/* Stores g = dy silu'(z + bias) of 128 columns to [B][T][Dout]. */
template <typename E>
static __device__ __forceinline__ void store_g(const conv1d_dense_call &c, const work_tile &p, int column,
                                               const float *bias, const float (&sums)[64])
{
    const int row = accumulator_row<COMPUTE_G>(p), quarter = (int)threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int t = row + 8 * half;
        const E *dy = (const E *)c.dy.data + p.b * c.dy.stride[0] + t * c.dy.stride[2];
        E *to = (E *)c.g_workspace + (p.b * c.T + t) * c.Dout;
#pragma unroll
        for (int group = 0; group < 16; group += 4) {
            const int first_column = column + 8 * (group + quarter);
            const bool in_bounds = t < c.T && first_column < c.Dout;
            uint4 loaded = make_uint4(0, 0, 0, 0);
            if (in_bounds)
                loaded = *(const uint4 *)(dy + first_column);
            const uint4 pairs =
                cot_quad_transpose(loaded.x, loaded.y, loaded.z, loaded.w); /* the layout of the accumulators */
            const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
            uint32_t g[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 dy_pair = cot_unpack_pair<E>(words[i]);
                const float *z = &sums[4 * (group + i) + 2 * half], *b = &bias[8 * (group + i) + 2 * quarter];
                g[i] = cot_pack_pair<E>(cot_silu_gradient<false>(dy_pair.x, z[0] + b[0]),
                                        cot_silu_gradient<false>(dy_pair.y, z[1] + b[1]));
            }
            const uint4 columns = cot_quad_transpose(g[0], g[1], g[2], g[3]);
            if (in_bounds)
                *(uint4 *)(to + first_column) = columns;
        }
    }
}

/* Stores partial sums of dweight, 128 columns. */
static __device__ __forceinline__ void store_dweight_partial(const conv1d_dense_call &c, const work_tile &p, int column,
                                                             const float (&sums)[64])
{
    const int row = accumulator_row<DWEIGHT>(p), quarter = (int)threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int o = row + 8 * half;
        float *to = c.dweight_partials + ((p.split * c.K + p.k) * c.Dout + o) * c.Din;
#pragma unroll
        for (int group = 0; group < 16; group++) {
            const int i = column + 8 * group + 2 * quarter;
            if (o < c.Dout && i < c.Din)
                *(float2 *)(to + i) = make_float2(sums[4 * group + 2 * half], sums[4 * group + 2 * half + 1]);
        }
    }
}

template <typename E, product P>
static __device__ __forceinline__ void consume(const conv1d_dense_call &c, shared_memory &s, const work_tile &p)
{
    const int half = (int)threadIdx.x / WARPGROUP - 1;
    float acc_left[64], acc_right[64];
#pragma unroll
    for (int i = 0; i < 64; i++)
        acc_left[i] = acc_right[i] = 0.0f;
    cot_pipeline_state<STAGES> ring;
    int previous_stage = 0;
    for (int step = 0; step < p.steps; step++) {
        cot_mbarrier_wait(&s.full[ring.stage], ring.parity);
        issue_wgmma_step<E, P>(acc_left, acc_right, s.stages[ring.stage], half);
        cot_wgmma_wait<1>();
        __syncwarp();
        if (step > 0 && threadIdx.x % WARP == 0)
            cot_mbarrier_arrive(&s.empty[previous_stage]);
        previous_stage = ring.stage;
        ring.next();
    }
    cot_wgmma_wait<0>();
    if (P == DWEIGHT) {
        store_dweight_partial(c, p, p.column, acc_left);
        store_dweight_partial(c, p, p.column + 128, acc_right);
    } else if (P == COMPUTE_G) {
        store_g<E>(c, p, p.column, s.bias, acc_left);
        store_g<E>(c, p, p.column + 128, s.bias + 128, acc_right);
    } else {
        store_output<E, P>(c, p, p.column, s.bias, acc_left);
        store_output<E, P>(c, p, p.column + 128, s.bias + 128, acc_right);
    }
}

template <typename E, product P> static __device__ __forceinline__ void run_product(const conv1d_dense_mapped_call &m)
{
    shared_memory &s = *(shared_memory *)conv1d_dense_memory;
    const conv1d_dense_call &c = m.call;
    const work_tile p = get_work_tile<P>(c, blockIdx.x);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++)
            cot_mbarrier_init(&s.full[i], 1), cot_mbarrier_init(&s.empty[i], 8);
        cot_mbarrier_init_fence();
    }
    for (int i = (int)threadIdx.x; (P == FORWARD || P == COMPUTE_G) && i < BLOCK_N; i += (int)blockDim.x)
        s.bias[i] = c.bias.data != nullptr && p.column + i < c.Dout
                        ? cot_load(c.bias.data, c.bias.dtype, (p.column + i) * c.bias.stride[0])
                        : 0.0f;
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        cot_setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            produce<P>(m, s, p);
    } else {
        cot_setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume<E, P>(c, s, p);
    }
}

#define INSTANCE(name, element, stem, product)                                                       \
    extern "C" __global__ void __launch_bounds__(CONV1D_DENSE_WARPGROUPS *WARPGROUP, 1)              \
        causal_conv1d_dense_##stem##_sm90_##name(const __grid_constant__ conv1d_dense_mapped_call m) \
    {                                                                                                \
        run_product<element, product>(m);                                                            \
    }
#define INSTANCES(name, element)          \
    INSTANCE(name, element, fwd, FORWARD) \
    INSTANCE(name, element, g, COMPUTE_G) \
    INSTANCE(name, element, dx, DX)       \
    INSTANCE(name, element, dweight, DWEIGHT)
INSTANCES(bf16, __nv_bfloat16)
INSTANCES(f16, __half)
