/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_last_sm90.cu: backward on Hopper, channels are contiguous. Block (x, y, z) processes
 * token tile y of channels 64 x to 64 x + 63 of batch element b = z, 2 channels per lane. It loads this tile of x and
 * of dy. Each warp processes warp_tokens consecutive tokens of the tile, its part. dx of a token is computed 3 tokens
 * later than its g. For the last 3 dx of its part, a warp needs g of the 3 tokens after the part: it gets them from the
 * next warp. For the last warp these tokens belong to the next block: it computes their g too. Beyond T the tile is
 * zero, so g is zero there. The sums of dweight and dbias are accumulated per lane and reduced over warps.
 * causal_conv1d_reduce reduces them over blocks. */
#include "causal_conv1d_channel_last.cuh"
#include "causal_conv1d_maps.h"
#include "causal_conv1d_sm90.cuh"

constexpr int W = 4, V = CONV1D_SM90_BWD_V, CHANNELS = CONV1D_SM90_BWD_CHANNELS;

/* The state of a lane within its warp's part: ring buffers of the last W inputs and the last W values of g of its
 * channels, the sums, and its position in the tiles. */
template <typename E> struct part_state {
    float inputs[W][V], g[W][V], sums[W + 1][V];
    const E *x; /* this lane's channels of the next token, in the tile of x; dy: in the tile of dy */
    E *dy;
};

/* Computes dx of the token 3 before the one in slot u, and stores it over dy of that token, which is no longer
 * needed. Only general versions use the argument t of compute_dx and compute_g_and_sums. */
template <typename E>
static __device__ __forceinline__ void store_dx_shared(const conv1d_call &c, const lane_channels<V, W> &channels,
                                                       part_state<E> &p, int u)
{
    float out[V];
    cot_vector<E, V> packed;
    compute_dx<E, V, W, true>(c, channels, /*t*/ 0, u, /*final*/ false, p.g, out);
    cot_pack(packed, out);
    *(cot_vector<E, V> *)(p.dy - (W - 1) * CHANNELS) = packed;
}

/* Processes the next W tokens of a part. FIRST: the first W of the part, of which only the last completes a dx of
 * the part. AFTER_PART: the W-1 tokens after the part. There is no branch. All loads precede all stores, so that the
 * arithmetic of the tokens overlaps. */
template <typename E, bool SILU, bool FIRST, bool AFTER_PART>
static __device__ __forceinline__ void process_tokens(const conv1d_call &c, const lane_channels<V, W> &channels,
                                                      part_state<E> &p)
{
    constexpr int TOKENS = AFTER_PART ? W - 1 : W;
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
        compute_g_and_sums<E, V, W, true>(c, channels, /*t*/ 0, u, SILU, !AFTER_PART, p.inputs, p.g, p.sums);
        if (!FIRST || u == W - 1)
            store_dx_shared(c, channels, p, u);
    }
}

/* Loads the taps of the lane's channels. Their dtype is B. */
template <typename B>
static __device__ __forceinline__ void load_packed_taps(const void *weight, int64_t d, float (&w)[W][V])
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
static __device__ __forceinline__ void load_biases(const conv1d_array &bias, int64_t d, float (&to)[V])
{
#pragma unroll
    for (int v = 0; v < V; v++)
        to[v] = cot_to_f32(((const B *)bias.data)[(d + v) * bias.stride[0]]);
}

/* Like load_lane_channels. With packed taps, one branch on the dtype covers both channels. */
static __device__ __forceinline__ void load_packed_lane_channels(const conv1d_call &c, int64_t b, int64_t d,
                                                                 lane_channels<V, W> &channels)
{
    if (!c.weight_packed) {
        load_lane_channels(c, b, d, channels);
        return;
    }
    channels.b = b;
    channels.d = d;
    channels.count = V;
    static_assert(V == 2, "two biases");
    channels.bias[0] = channels.bias[1] = 0.0f;
    switch (c.bias.data != nullptr ? c.bias.dtype : 0) {
    case 0: break;
    case COT_F16: load_biases<__half>(c.bias, d, channels.bias); break;
    case COT_BF16: load_biases<__nv_bfloat16>(c.bias, d, channels.bias); break;
    default: load_biases<float>(c.bias, d, channels.bias);
    }
    switch (c.weight.dtype) {
    case COT_F16: load_packed_taps<__half>(c.weight.data, d, channels.w); break;
    case COT_BF16: load_packed_taps<__nv_bfloat16>(c.weight.data, d, channels.w); break;
    default: load_packed_taps<float>(c.weight.data, d, channels.w);
    }
}

/* g of the first W-1 tokens of each warp's part, for the previous warp. */
typedef float first_g_array[CONV1D_SM90_WARPS][W - 1][CHANNELS];

template <typename E, bool SILU>
static __device__ __forceinline__ void process_part(const conv1d_call &c, const lane_channels<V, W> &channels,
                                                    part_state<E> &p, first_g_array &first_g)
{
    const int lane = threadIdx.x % CONV1D_LANES, warp = threadIdx.x / CONV1D_LANES, warp_tokens = (int)c.warp_tokens;
    process_tokens<E, SILU, true, false>(c, channels, p);
#pragma unroll
    for (int u = 0; u < W - 1; u++)
#pragma unroll
        for (int v = 0; v < V; v++)
            first_g[warp][u][lane * V + v] = p.g[u][v];
    for (int i = W; i < warp_tokens; i += W)
        process_tokens<E, SILU, false, false>(c, channels, p);
    if (warp == CONV1D_SM90_WARPS - 1)
        process_tokens<E, SILU, false, true>(c, channels, p);
    __syncthreads();
    if (warp == CONV1D_SM90_WARPS - 1)
        return;
#pragma unroll
    for (int u = 0; u < W - 1; u++) {
#pragma unroll
        for (int v = 0; v < V; v++)
            p.g[u][v] = first_g[warp + 1][u][lane * V + v];
        store_dx_shared(c, channels, p, u);
        p.dy += CHANNELS;
    }
}

template <typename E> static __device__ __forceinline__ void backward(const conv1d_mapped_call &m)
{
    __shared__ uint64_t full;
    __shared__ first_g_array first_g;
    const conv1d_call &c = m.call;
    const int warp_tokens = (int)c.warp_tokens, tile_tokens = 2 * CONV1D_SM90_HALO + CONV1D_SM90_WARPS * warp_tokens;
    const int b = (int)blockIdx.z, tile_begin = (int)blockIdx.y * CONV1D_SM90_WARPS * warp_tokens;
    /* Waits until the previous kernel has ended. Then lets the next kernel (causal_conv1d_reduce) start early: it waits
     * itself, before it reads the partial sums. */
    cot_griddepcontrol_wait();
    cot_griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        const int first_channel = (int)blockIdx.x * CHANNELS, first_token = tile_begin - CONV1D_SM90_HALO;
        const uint32_t bytes = (uint32_t)(tile_tokens * CHANNELS) * (uint32_t)sizeof(E);
        cot_mbarrier_init(&full, 1);
        cot_mbarrier_init_fence();
        cot_mbarrier_arrive_expect(&full, 2 * bytes);
        cot_tma_load_3d(conv1d_tile, &m.x, first_channel, first_token, b, &full);
        cot_tma_load_3d(conv1d_tile + bytes, &m.dy, first_channel, first_token, b, &full);
    }
    const int lane = threadIdx.x % CONV1D_LANES, warp = threadIdx.x / CONV1D_LANES;
    const int64_t d = (int64_t)blockIdx.x * CHANNELS + lane * V;
    const int begin = tile_begin + warp * warp_tokens;
    part_state<E> p = {};
    p.x = (const E *)conv1d_tile + (CONV1D_SM90_HALO + warp * warp_tokens) * CHANNELS + lane * V;
    p.dy = (E *)p.x + tile_tokens * CHANNELS;
    lane_channels<V, W> channels;
    load_packed_lane_channels(c, b, d < c.D ? d : 0, channels);
    __syncthreads();
    cot_mbarrier_wait(&full, 0);
    if (begin > 0) {
#pragma unroll
        for (int i = 1; i < W; i++)
            cot_unpack(*(const cot_vector<E, V> *)(p.x + (i - W) * CHANNELS), p.inputs[i]);
    } else {
        load_previous_inputs<E, V, W, true>(c, channels, begin, p.inputs);
    }
    if (c.silu)
        process_part<E, true>(c, channels, p, first_g);
    else
        process_part<E, false>(c, channels, p, first_g);
    float(*warp_sums)[W + 1][CHANNELS] = (float(*)[W + 1][CHANNELS])
        conv1d_tile; /* in place of the tile of x, which no warp reads after the barrier in process_part */
#pragma unroll
    for (int k = 0; k <= W; k++)
#pragma unroll
        for (int v = 0; v < V; v++)
            warp_sums[warp][k][lane * V + v] = p.sums[k][v];
    cot_fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0 && c.dx.data != nullptr) {
        cot_tma_store_3d(&m.dx, (int)blockIdx.x * CHANNELS, tile_begin, b,
                         conv1d_tile + (tile_tokens + CONV1D_SM90_HALO) * CHANNELS * (int)sizeof(E));
        cot_bulk_commit();
    }
    /* A thread reduces 4 channels. D is a multiple of 8. */
    for (int i = threadIdx.x; i < (W + 1) * CHANNELS / 4; i += CONV1D_SM90_WARPS * CONV1D_LANES) {
        const int k = i / (CHANNELS / 4), channel = i % (CHANNELS / 4) * 4;
        const int64_t first_channel = (int64_t)blockIdx.x * CHANNELS + channel,
                      partial_index = b * gridDim.y + blockIdx.y;
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int other_warp = 0; other_warp < CONV1D_SM90_WARPS; other_warp++) {
            const float4 warp_sum = *(const float4 *)&warp_sums[other_warp][k][channel];
            sum = {sum.x + warp_sum.x, sum.y + warp_sum.y, sum.z + warp_sum.z, sum.w + warp_sum.w};
        }
        if (first_channel >= c.D)
            continue;
        if (c.partial_count != 1) {
            *(float4 *)&c.partial[(partial_index * (W + 1) + k) * c.D + first_channel] = sum;
        } else {
            const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                store_sum<W>(c, partial_index, first_channel + j, k, sums[j]);
        }
    }
    cot_bulk_wait_read(); /* the block may not exit before its shared memory has been read */
}

CONV1D_INSTANCES_SM90(causal_conv1d_bwd_channel_last_sm90, backward, conv1d_mapped_call, 8)
