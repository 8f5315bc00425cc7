/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_last_sm90.cu: channels are contiguous. Block (x, y, z) takes a tile of 64 channels of row
 * b = z, of x and of dy, 2 to a lane; its warps one part of the tile's tokens after the other. dx lags 3 tokens; for the
 * last ones of its part a warp computes g of the 3 tokens after it again. Beyond T the tile has zeros, and so g. Sums of
 * dweight and dbias: lane by lane, over warps; then causal_conv1d_reduce over blocks. */
#include "causal_conv1d_last.cuh"
#include "causal_conv1d_maps.h"
#include "causal_conv1d_sm90.cuh"

/* W tokens of a part from its i-th on. FIRST: the part's first, whose dx but the last is not yet due; LAST: the tokens
 * after the part. No branch but the stores' predicate, so that the tokens' arithmetic overlaps. */
template <typename E, bool SILU, bool FIRST, bool LAST>
static __device__ __forceinline__ void take_tokens(const conv1d_call &c, const column<CONV1D_SM90_BWD_V, 4> &col,
                                                   const E *&tile, int i, int stores, E *&dx,
                                                   float (&inputs)[4][CONV1D_SM90_BWD_V],
                                                   float (&g)[4][CONV1D_SM90_BWD_V],
                                                   float (&sums)[5][CONV1D_SM90_BWD_V])
{
    constexpr int W = 4, V = CONV1D_SM90_BWD_V,
                  TILE = (2 * CONV1D_SM90_HALO + CONV1D_SM90_WARPS * CONV1D_SM90_BWD_ROWS) * CONV1D_SM90_BWD_CHANNELS;
#pragma unroll
    for (int u = 0; u < (LAST ? W - 1 : W); u++, tile += CONV1D_SM90_BWD_CHANNELS) {
        cot_unpack(*(const cot_vector<E, V> *)tile, inputs[u]);
        cot_unpack(*(const cot_vector<E, V> *)(tile + TILE), g[u]);
        take_gradient<E, V, W, true>(c, col, 0, u, SILU, !LAST, inputs, g, sums);
        if (FIRST && u < W - 1)
            continue;
        float out[V];
        give_gradient<E, V, W, true>(c, col, 0, u, false, g, out);
        if (i + u - (W - 1) < stores)
            cot_store_vector<E, V>(dx, out);
        dx += c.dx.stride[2];
    }
}

template <typename E, bool SILU>
static __device__ __forceinline__ void take_part(const conv1d_call &c, const column<CONV1D_SM90_BWD_V, 4> &col,
                                                 const E *tile, int stores, E *dx,
                                                 float (&inputs)[4][CONV1D_SM90_BWD_V],
                                                 float (&sums)[5][CONV1D_SM90_BWD_V])
{
    float g[4][CONV1D_SM90_BWD_V];
    take_tokens<E, SILU, true, false>(c, col, tile, 0, stores, dx, inputs, g, sums);
    for (int i = 4; i < CONV1D_SM90_BWD_ROWS; i += 4)
        take_tokens<E, SILU, false, false>(c, col, tile, i, stores, dx, inputs, g, sums);
    take_tokens<E, SILU, false, true>(c, col, tile, CONV1D_SM90_BWD_ROWS, stores, dx, inputs, g, sums);
}

template <typename E> static __device__ __forceinline__ void backward(const conv1d_mapped_call &m)
{
    constexpr int W = 4, V = CONV1D_SM90_BWD_V, ROWS = CONV1D_SM90_BWD_ROWS, CHANNELS = CONV1D_SM90_BWD_CHANNELS;
    constexpr int TILE_ROWS = 2 * CONV1D_SM90_HALO + CONV1D_SM90_WARPS * ROWS;
    __shared__ uint64_t full;
    const conv1d_call &c = m.call;
    const int T = (int)c.T, b = (int)blockIdx.z, tile_begin = (int)blockIdx.y * CONV1D_SM90_WARPS * ROWS;
    const E *tile = (const E *)conv1d_tile;
    if (threadIdx.x == 0) {
        const int first = (int)blockIdx.x * CHANNELS, before = tile_begin - CONV1D_SM90_HALO;
        cot_mbarrier_init(&full, 1);
        cot_mbarrier_init_fence();
        cot_mbarrier_arrive_expect(&full, 2 * TILE_ROWS * CHANNELS * (uint32_t)sizeof(E));
        cot_tensor_load_3d(conv1d_tile, &m.x, first, before, b, &full);
        cot_tensor_load_3d(conv1d_tile + TILE_ROWS * CHANNELS * sizeof(E), &m.dy, first, before, b, &full);
    }
    cot_launch_dependents();
    const int lane = threadIdx.x % CONV1D_LANES, warp = threadIdx.x / CONV1D_LANES;
    const int64_t d = (int64_t)blockIdx.x * CHANNELS + lane * V;
    const int begin = tile_begin + warp * ROWS;
    E *dx = (E *)c.dx.data + b * c.dx.stride[0] + begin * c.dx.stride[2] + d;
    const bool wants_dx = c.dx.data != nullptr && d < c.D;
    column<V, W> col;
    float inputs[W][V], sums[W + 1][V] = {{0}};
    load_column(c, b, d < c.D ? d : 0, col);
    __syncthreads();
    cot_mbarrier_wait(&full, 0);
    const int left = T - begin < ROWS ? T - begin : ROWS, stores = wants_dx ? left : 0;
    tile += (CONV1D_SM90_HALO + warp * ROWS) * CHANNELS + lane * V;
    if (begin > 0) {
#pragma unroll
        for (int i = 1; i < W; i++)
            cot_unpack(*(const cot_vector<E, V> *)(tile + (i - W) * CHANNELS), inputs[i]);
    } else {
        begin_column<E, V, W, true>(c, col, begin, inputs);
    }
    if (c.silu)
        take_part<E, true>(c, col, tile, stores, dx, inputs, sums);
    else
        take_part<E, false>(c, col, tile, stores, dx, inputs, sums);
    float(*all)[W + 1][CHANNELS] =
        (float(*)[W + 1][CHANNELS]) conv1d_tile; /* of each warp; nobody needs the tile now */
    __syncthreads();
#pragma unroll
    for (int k = 0; k <= W; k++)
#pragma unroll
        for (int v = 0; v < V; v++)
            all[warp][k][lane * V + v] = sums[k][v];
    __syncthreads();
    for (int i = threadIdx.x; i < (W + 1) * CHANNELS; i += CONV1D_SM90_WARPS * CONV1D_LANES) {
        const int k = i / CHANNELS, channel = i % CHANNELS;
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < CONV1D_SM90_WARPS; part++)
            sum += all[part][k][channel];
        if ((int64_t)blockIdx.x * CHANNELS + channel < c.D)
            store_sum<W>(c, b * gridDim.y + blockIdx.y, (int64_t)blockIdx.x * CHANNELS + channel, k, sum);
    }
}

CONV1D_INSTANCES_SM90(causal_conv1d_bwd_channel_last_sm90, backward, conv1d_mapped_call, 8)
