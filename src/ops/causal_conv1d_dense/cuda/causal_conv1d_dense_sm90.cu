/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_sm90.cu: the products of dense causal convolution on Hopper. The shift of a tap is a coordinate
 * of the copy engine's box, which brings zeros for what lies before the first token and after the last: no columns, no
 * padding.
 *
 *   product    rows          columns   sums over                A's boxes                    B's boxes
 *   FORWARD    tokens        Dout      channels of x, taps      x [t + k - (K-1)][i]         w [k][o][i], K-major
 *   GRADIENT   the same; g = dy silu'(z) in place of y
 *   INPUT      tokens        Din       channels of g, taps      g [t + j][o]                 w [K-1-j][o][i], MN-major
 *   WEIGHT     Dout, a tap   Din       tokens of all sequences  g [t][o], MN-major           x [t + k - (K-1)][i],
 *                                                                                            MN-major
 *
 *   group 0     producer: a thread loads a step's two tiles of A and four of B, 64 x 64 each, by TMA
 *   groups 1, 2 consumers: 64 rows by 256 columns each, in registers
 *
 *   barrier    arrivals (bytes)       phase ends when       who waits
 *   full       1 (six tiles)          a step is there       consumers
 *   empty      8: a consumer's warp   nobody reads it       the loader
 *
 * A consumer keeps one step's products under way while it waits for the next one's operands. WEIGHT's tokens are cut
 * into parts by the shape alone; their sums go to memory, and another kernel adds them in their order. */
#include "causal_conv1d_dense_maps.h"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/bulk.cuh"
#include "../../../cuda/device/cluster.cuh"
#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/quad.cuh"
#include "../../../cuda/device/wgmma.cuh"

enum {
    ROWS = CONV1D_DENSE_ROWS,
    COLUMNS = CONV1D_DENSE_COLUMNS,
    DEPTH = CONV1D_DENSE_DEPTH,
    STAGES = CONV1D_DENSE_STAGES,
    GROUP = 128,
    WARP = 32,
    TILE = 64 * 64 * 2 /* bytes */
};

enum product { FORWARD, GRADIENT, INPUT, WEIGHT };

/* What the launch allots, 384 of 168, shared out anew: 40 + 2 * 232. */
enum { PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232 };

extern __shared__ __align__(1024) unsigned char conv1d_dense_memory[];

struct stage {
    unsigned char a[2][TILE], b[4][TILE];
};

struct shared {
    stage stages[STAGES];
    float bias[COLUMNS];
    uint64_t full[STAGES], empty[STAGES];
};

/* What a block computes: rows from `row` on (of sequence b, or output channels of tap k), columns from `column` on. */
struct place {
    int b, k, row, column, first, steps; /* first: of a part of WEIGHT's */
    int64_t part;
};

template <product P> static __device__ __forceinline__ place place_of(const conv1d_dense_call &c, unsigned block)
{
    const unsigned across = (unsigned)(((P == FORWARD || P == GRADIENT ? c.Dout : c.Din) + COLUMNS - 1) / COLUMNS);
    const unsigned down = (unsigned)(((P == WEIGHT ? c.Dout : c.T) + ROWS - 1) / ROWS);
    place p;
    p.column = (int)(block % across) * COLUMNS; /* blocks beside each other read the same rows */
    p.row = (int)(block / across % down) * ROWS;
    const unsigned rest = block / across / down;
    p.b = p.k = 0;
    p.part = p.first = 0;
    if (P == WEIGHT) {
        const int64_t all = c.B * ((c.T + DEPTH - 1) / DEPTH);
        p.k = (int)(rest % (unsigned)c.K);
        p.part = rest / (unsigned)c.K;
        p.first = (int)(p.part * all / c.parts);
        p.steps = (int)((p.part + 1) * all / c.parts) - p.first;
    } else {
        p.b = (int)rest;
        p.steps = (int)(((P == INPUT ? c.Dout : c.Din) + DEPTH - 1) / DEPTH * c.K);
    }
    return p;
}

template <product P>
static __device__ __forceinline__ void load(const conv1d_dense_mapped &m, shared &s, const place &p)
{
    const conv1d_dense_call &c = m.call;
    const int K = (int)c.K, chunks = (int)((c.T + DEPTH - 1) / DEPTH);
    cot_pipeline_state<STAGES> ring;
    cot_fence_proxy_async_global(); /* what kernels before wrote */
    for (int step = 0; step < p.steps; step++, ring.next()) {
        stage &to = s.stages[ring.stage];
        uint64_t *full = &s.full[ring.stage];
        cot_mbarrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
        cot_mbarrier_arrive_expect(full, sizeof(stage));
        if (P == WEIGHT) {
            const int at = p.first + step, b = at / chunks, t = at % chunks * DEPTH;
#pragma unroll
            for (int i = 0; i < 2; i++)
                cot_tma_load_3d(to.a[i], &m.a, p.row + 64 * i, t, b, full);
#pragma unroll
            for (int i = 0; i < 4; i++)
                cot_tma_load_3d(to.b[i], &m.b, p.column + 64 * i, t + p.k - (K - 1), b, full);
        } else {
            /* The taps of a channel follow each other: what they read of A is nearly the same. */
            const int tap = step % K, channel = step / K * DEPTH, shift = P == INPUT ? tap : tap - (K - 1);
#pragma unroll
            for (int i = 0; i < 2; i++)
                cot_tma_load_3d(to.a[i], &m.a, channel, p.row + 64 * i + shift, p.b, full);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (P == INPUT)
                    cot_tma_load_3d(to.b[i], &m.b, p.column + 64 * i, channel, K - 1 - tap, full);
                else
                    cot_tma_load_3d(to.b[i], &m.b, channel, p.column + 64 * i, tap, full);
            }
        }
    }
}

/* sums += A B of a step: 64 rows, 2 x 128 columns. */
template <typename E, product P>
static __device__ __forceinline__ void add_step(float (&left)[64], float (&right)[64], const stage &from, int half)
{
    constexpr bool A_MN = P == WEIGHT, B_MN = P == INPUT || P == WEIGHT;
    constexpr int A_STEP = A_MN ? COT_WGMMA_MN_STEP : COT_WGMMA_K_STEP;
    constexpr int B_STEP = B_MN ? COT_WGMMA_MN_STEP : COT_WGMMA_K_STEP;
    const uint32_t rows = cot_shared_address(from.a[half]), columns = cot_shared_address(from.b[0]);
    const uint64_t a = A_MN ? cot_wgmma_mn_major(rows, TILE) : cot_wgmma_k_major(rows);
    const uint64_t b = B_MN ? cot_wgmma_mn_major(columns, TILE) : cot_wgmma_k_major(columns);
    cot_wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        cot_wgmma<E, A_MN, B_MN>(left, a + k * A_STEP, b + k * B_STEP, true);
        cot_wgmma<E, A_MN, B_MN>(right, a + k * A_STEP, b + (2 * TILE >> 4) + k * B_STEP, true);
    }
    cot_wgmma_commit();
}

/* ---- results -------------------------------------------------------------------------------------------------- */

/* Where a thread's accumulators lie: rows `row` and row + 8, columns 8 group + column and the one after it. */
template <product P> static __device__ __forceinline__ int own_row(const place &p)
{
    return p.row + ((int)threadIdx.x - GROUP) / WARP * 16 + (int)threadIdx.x % WARP / 4;
}

/* y or dx of 128 columns from `column` on, half of the block's; bias: theirs, or null. */
template <typename E, product P>
static __device__ __forceinline__ void store_tokens(const conv1d_dense_call &c, const place &p, int column,
                                                    const float *bias, float (&sums)[64])
{
    const int row = own_row<P>(p), quarter = (int)threadIdx.x % 4, channels = (int)(P == INPUT ? c.Din : c.Dout);
    const conv1d_dense_array &out = c.out;
#pragma unroll
    for (int i = 0; P == FORWARD && i < 64; i++) {
        const float z = sums[i] + bias[8 * (i / 4) + 2 * quarter + i % 2];
        sums[i] = c.silu ? cot_silu<false>(z) : z;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int t = row + 8 * half;
        const int64_t at = p.b * out.stride[0] + t * out.stride[2];
        if (c.out_in_vectors) {
#pragma unroll
            for (int group = 0; group < 16; group += 4) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    words[i] = cot_pack_pair<E>(sums[4 * (group + i) + 2 * half], sums[4 * (group + i) + 2 * half + 1]);
                const uint4 columns = cot_quad_transpose(words[0], words[1], words[2], words[3]);
                const int from = column + 8 * (group + quarter);
                if (t < c.T && from < channels)
                    *(uint4 *)((E *)out.data + at + from) = columns;
            }
            continue;
        }
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int own = column + 8 * (i / 2) + 2 * quarter + i % 2;
            if (t < c.T && own < channels)
                cot_store(out.data, out.dtype, at + own * out.stride[1], sums[4 * (i / 2) + 2 * half + i % 2]);
        }
    }
}

/* g = dy silu'(z + bias) of 128 columns, to [B][T][Dout]. */
template <typename E>
static __device__ __forceinline__ void store_gradients(const conv1d_dense_call &c, const place &p, int column,
                                                       const float *bias, const float (&sums)[64])
{
    const int row = own_row<GRADIENT>(p), quarter = (int)threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int t = row + 8 * half;
        const E *dy = (const E *)c.dy.data + p.b * c.dy.stride[0] + t * c.dy.stride[2];
        E *to = (E *)c.gradients + (p.b * c.T + t) * c.Dout;
#pragma unroll
        for (int group = 0; group < 16; group += 4) {
            const int from = column + 8 * (group + quarter);
            const bool there = t < c.T && from < c.Dout;
            uint4 loaded = make_uint4(0, 0, 0, 0);
            if (there)
                loaded = *(const uint4 *)(dy + from);
            const uint4 pairs =
                cot_quad_transpose(loaded.x, loaded.y, loaded.z, loaded.w); /* as the accumulators lie */
            const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
            uint32_t g[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 own = cot_unpack_pair<E>(words[i]);
                const float *z = &sums[4 * (group + i) + 2 * half], *b = &bias[8 * (group + i) + 2 * quarter];
                g[i] = cot_pack_pair<E>(cot_silu_gradient<false>(own.x, z[0] + b[0]),
                                        cot_silu_gradient<false>(own.y, z[1] + b[1]));
            }
            const uint4 columns = cot_quad_transpose(g[0], g[1], g[2], g[3]);
            if (there)
                *(uint4 *)(to + from) = columns;
        }
    }
}

/* A part of dweight's sums, 128 columns. */
static __device__ __forceinline__ void store_sums(const conv1d_dense_call &c, const place &p, int column,
                                                  const float (&sums)[64])
{
    const int row = own_row<WEIGHT>(p), quarter = (int)threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int o = row + 8 * half;
        float *to = c.dweight_parts + ((p.part * c.K + p.k) * c.Dout + o) * c.Din;
#pragma unroll
        for (int group = 0; group < 16; group++) {
            const int i = column + 8 * group + 2 * quarter;
            if (o < c.Dout && i < c.Din)
                *(float2 *)(to + i) = make_float2(sums[4 * group + 2 * half], sums[4 * group + 2 * half + 1]);
        }
    }
}

template <typename E, product P>
static __device__ __forceinline__ void consume(const conv1d_dense_call &c, shared &s, const place &p)
{
    const int half = (int)threadIdx.x / GROUP - 1;
    float left[64], right[64];
#pragma unroll
    for (int i = 0; i < 64; i++)
        left[i] = right[i] = 0.0f;
    cot_pipeline_state<STAGES> ring;
    int before = 0;
    for (int step = 0; step < p.steps; step++) {
        cot_mbarrier_wait(&s.full[ring.stage], ring.parity);
        add_step<E, P>(left, right, s.stages[ring.stage], half);
        cot_wgmma_wait<1>();
        __syncwarp();
        if (step > 0 && threadIdx.x % WARP == 0)
            cot_mbarrier_arrive(&s.empty[before]);
        before = ring.stage;
        ring.next();
    }
    cot_wgmma_wait<0>();
    if (P == WEIGHT) {
        store_sums(c, p, p.column, left);
        store_sums(c, p, p.column + 128, right);
    } else if (P == GRADIENT) {
        store_gradients<E>(c, p, p.column, s.bias, left);
        store_gradients<E>(c, p, p.column + 128, s.bias + 128, right);
    } else {
        store_tokens<E, P>(c, p, p.column, s.bias, left);
        store_tokens<E, P>(c, p, p.column + 128, s.bias + 128, right);
    }
}

template <typename E, product P> static __device__ __forceinline__ void multiply(const conv1d_dense_mapped &m)
{
    shared &s = *(shared *)conv1d_dense_memory;
    const conv1d_dense_call &c = m.call;
    const place p = place_of<P>(c, blockIdx.x);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++)
            cot_mbarrier_init(&s.full[i], 1), cot_mbarrier_init(&s.empty[i], 8);
        cot_mbarrier_init_fence();
    }
    for (int i = (int)threadIdx.x; (P == FORWARD || P == GRADIENT) && i < COLUMNS; i += (int)blockDim.x)
        s.bias[i] = c.bias.data != nullptr && p.column + i < c.Dout
                        ? cot_load(c.bias.data, c.bias.dtype, (p.column + i) * c.bias.stride[0])
                        : 0.0f;
    __syncthreads();
    if (threadIdx.x < GROUP) {
        cot_setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            load<P>(m, s, p);
    } else {
        cot_setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume<E, P>(c, s, p);
    }
}

#define INSTANCE(name, element, stem, product)                                                  \
    extern "C" __global__ void __launch_bounds__(CONV1D_DENSE_GROUPS *GROUP, 1)                 \
        causal_conv1d_dense_##stem##_sm90_##name(const __grid_constant__ conv1d_dense_mapped m) \
    {                                                                                           \
        multiply<element, product>(m);                                                          \
    }
#define INSTANCES(name, element)          \
    INSTANCE(name, element, fwd, FORWARD) \
    INSTANCE(name, element, g, GRADIENT)  \
    INSTANCE(name, element, dx, INPUT)    \
    INSTANCE(name, element, dweight, WEIGHT)
INSTANCES(bf16, __nv_bfloat16)
INSTANCES(f16, __half)
