/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_last_sm90.cu: channels are contiguous. Block (x, y, z) takes a tile of 64 channels of row
 * b = z, of x and of dy, 2 to a lane; its warps one part of the tile's tokens after the other. dx lags 3 tokens; for
 * the last ones of its part a warp takes g of the 3 tokens after it from the next warp, and the last warp computes them
 * again. Beyond T the tile has zeros, and so g. Sums of dweight and dbias: lane by lane, over warps; then
 * causal_conv1d_reduce over blocks. */
#include "causal_conv1d_last.cuh"
#include "causal_conv1d_maps.h"
#include "causal_conv1d_sm90.cuh"

constexpr int W = 4, V = CONV1D_SM90_BWD_V, CHANNELS = CONV1D_SM90_BWD_CHANNELS;

/* What a lane has of its part: the last W inputs and the last W g of its channels, and where their dx go. */
template <typename E> struct part {
    float inputs[W][V], g[W][V], sums[W + 1][V];
    const E *x; /* of the next token, in the tile */
    E *dy;
};

/* dx of the token three before the one in slot u, where its dy was: nobody needs that now. */
template <typename E>
static __device__ __forceinline__ void give_dx(const conv1d_call &c, const column<V, W> &col, part<E> &p, int u)
{
    float out[V];
    cot_vector<E, V> packed;
    give_gradient<E, V, W, true>(c, col, 0, u, false, p.g, out);
    cot_pack(packed, out);
    *(cot_vector<E, V> *)(p.dy - (W - 1) * CHANNELS) = packed;
}

/* W tokens of a part from its i-th on. FIRST: the part's first, whose dx but the last is not yet due; AFTER: the tokens
 * after the part. No branch, and no load that has to follow a token's store, so that the tokens' arithmetic
 * overlaps. */
template <typename E, bool SILU, bool FIRST, bool AFTER>
static __device__ __forceinline__ void take_tokens(const conv1d_call &c, const column<V, W> &col, part<E> &p)
{
    constexpr int TOKENS = AFTER ? W - 1 : W;
    cot_vector<E, V> x[TOKENS], dy[TOKENS];
#pragma unroll
    for (int u = 0; u < TOKENS; u++) {
        x[u] = *(const cot_vector<E, V> *)(p.x + u * CHANNELS);
        dy[u] = *(const cot_vector<E, V> *)(p.dy + u * CHANNELS);
    }
#pragma unroll
    for (int u = 0; u < TOKENS; u++, p.x += CHANNELS, p.dy += CHANNELS) {
        cot_unpack(x[u], p.inputs[u]);
        cot_unpack(dy[u], p.g[u]);
        take_gradient<E, V, W, true>(c, col, 0, u, SILU, !AFTER, p.inputs, p.g, p.sums);
        if (!FIRST || u == W - 1)
            give_dx(c, col, p, u);
    }
}

/* Taps and biases of the lane's channels, of dtype B. */
template <typename B>
static __device__ __forceinline__ void load_both_taps(const void *weight, int64_t d, float (&w)[W][V])
{
    cot_vector<B, 4> raw[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        if constexpr (sizeof(B) == 4)
            *(uint4 *)&raw[v] = ((const uint4 *)weight)[d + v];
        else
            *(uint2 *)&raw[v] = ((const uint2 *)weight)[d + v];
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        float taps[W];
        cot_unpack(raw[v], taps);
#pragma unroll
        for (int k = 0; k < W; k++)
            w[k][v] = taps[k];
    }
}

template <typename B>
static __device__ __forceinline__ void load_both_biases(const conv1d_array &bias, int64_t d, float (&to)[V])
{
#pragma unroll
    for (int v = 0; v < V; v++)
        to[v] = cot_to_f32(((const B *)bias.data)[(d + v) * bias.stride[0]]);
}

/* load_column, with one branch for both channels where their taps lie together. */
static __device__ __forceinline__ void load_channels(const conv1d_call &c, int64_t b, int64_t d, column<V, W> &col)
{
    if (!c.weight_packed) {
        load_column(c, b, d, col);
        return;
    }
    col.b = b;
    col.d = d;
    col.channels = V;
    col.bias[0] = col.bias[1] = 0.0f;
    switch (c.bias.data != nullptr ? c.bias.dtype : 0) {
    case 0: break;
    case COT_F16: load_both_biases<__half>(c.bias, d, col.bias); break;
    case COT_BF16: load_both_biases<__nv_bfloat16>(c.bias, d, col.bias); break;
    default: load_both_biases<float>(c.bias, d, col.bias);
    }
    switch (c.weight.dtype) {
    case COT_F16: load_both_taps<__half>(c.weight.data, d, col.w); break;
    case COT_BF16: load_both_taps<__nv_bfloat16>(c.weight.data, d, col.w); break;
    default: load_both_taps<float>(c.weight.data, d, col.w);
    }
}

/* g of the first tokens of each warp's part, which the warp before needs too. */
typedef float edges[CONV1D_SM90_WARPS][W - 1][CHANNELS];

template <typename E, bool SILU>
static __device__ __forceinline__ void take_part(const conv1d_call &c, const column<V, W> &col, part<E> &p,
                                                 edges &first_g)
{
    const int lane = threadIdx.x % CONV1D_LANES, warp = threadIdx.x / CONV1D_LANES, rows = (int)c.part_length;
    take_tokens<E, SILU, true, false>(c, col, p);
#pragma unroll
    for (int u = 0; u < W - 1; u++)
#pragma unroll
        for (int v = 0; v < V; v++)
            first_g[warp][u][lane * V + v] = p.g[u][v];
    for (int i = W; i < rows; i += W)
        take_tokens<E, SILU, false, false>(c, col, p);
    if (warp == CONV1D_SM90_WARPS - 1)
        take_tokens<E, SILU, false, true>(c, col, p);
    __syncthreads();
    if (warp == CONV1D_SM90_WARPS - 1)
        return;
#pragma unroll
    for (int u = 0; u < W - 1; u++) {
#pragma unroll
        for (int v = 0; v < V; v++)
            p.g[u][v] = first_g[warp + 1][u][lane * V + v];
        give_dx(c, col, p, u);
        p.dy += CHANNELS;
    }
}

template <typename E> static __device__ __forceinline__ void backward(const conv1d_mapped_call &m)
{
    __shared__ uint64_t full;
    __shared__ edges first_g;
    const conv1d_call &c = m.call;
    const int rows = (int)c.part_length, tile_rows = 2 * CONV1D_SM90_HALO + CONV1D_SM90_WARPS * rows;
    const int b = (int)blockIdx.z, tile_begin = (int)blockIdx.y * CONV1D_SM90_WARPS * rows;
    cot_griddepcontrol_wait();
    cot_griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        const int first = (int)blockIdx.x * CHANNELS, before = tile_begin - CONV1D_SM90_HALO;
        const uint32_t bytes = (uint32_t)(tile_rows * CHANNELS) * (uint32_t)sizeof(E);
        cot_mbarrier_init(&full, 1);
        cot_mbarrier_init_fence();
        cot_mbarrier_arrive_expect(&full, 2 * bytes);
        cot_tma_load_3d(conv1d_tile, &m.x, first, before, b, &full);
        cot_tma_load_3d(conv1d_tile + bytes, &m.dy, first, before, b, &full);
    }
    const int lane = threadIdx.x % CONV1D_LANES, warp = threadIdx.x / CONV1D_LANES;
    const int64_t d = (int64_t)blockIdx.x * CHANNELS + lane * V;
    const int begin = tile_begin + warp * rows;
    part<E> p = {};
    p.x = (const E *)conv1d_tile + (CONV1D_SM90_HALO + warp * rows) * CHANNELS + lane * V;
    p.dy = (E *)p.x + tile_rows * CHANNELS;
    column<V, W> col;
    load_channels(c, b, d < c.D ? d : 0, col);
    __syncthreads();
    cot_mbarrier_wait(&full, 0);
    if (begin > 0) {
#pragma unroll
        for (int i = 1; i < W; i++)
            cot_unpack(*(const cot_vector<E, V> *)(p.x + (i - W) * CHANNELS), p.inputs[i]);
    } else {
        begin_column<E, V, W, true>(c, col, begin, p.inputs);
    }
    if (c.silu)
        take_part<E, true>(c, col, p, first_g);
    else
        take_part<E, false>(c, col, p, first_g);
    float(*all)[W + 1][CHANNELS] =
        (float(*)[W + 1][CHANNELS]) conv1d_tile; /* of each warp; nobody needs the tile of x now */
#pragma unroll
    for (int k = 0; k <= W; k++)
#pragma unroll
        for (int v = 0; v < V; v++)
            all[warp][k][lane * V + v] = p.sums[k][v];
    cot_fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0 && c.dx.data != nullptr) {
        cot_tma_store_3d(&m.dx, (int)blockIdx.x * CHANNELS, tile_begin, b,
                         conv1d_tile + (tile_rows + CONV1D_SM90_HALO) * CHANNELS * (int)sizeof(E));
        cot_bulk_commit();
    }
    /* Four channels a thread: D is a multiple of 8. */
    for (int i = threadIdx.x; i < (W + 1) * CHANNELS / 4; i += CONV1D_SM90_WARPS * CONV1D_LANES) {
        const int k = i / (CHANNELS / 4), channel = i % (CHANNELS / 4) * 4;
        const int64_t first = (int64_t)blockIdx.x * CHANNELS + channel, share = b * gridDim.y + blockIdx.y;
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int warp_of = 0; warp_of < CONV1D_SM90_WARPS; warp_of++) {
            const float4 part = *(const float4 *)&all[warp_of][k][channel];
            sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
        }
        if (first >= c.D)
            continue;
        if (c.partial_count != 1) {
            *(float4 *)&c.partial[(share * (W + 1) + k) * c.D + first] = sum;
        } else {
            const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                store_sum<W>(c, share, first + j, k, sums[j]);
        }
    }
    cot_bulk_wait_read(); /* the block's shared memory must last that long */
}

CONV1D_INSTANCES_SM90(causal_conv1d_bwd_channel_last_sm90, backward, conv1d_mapped_call, 8)
