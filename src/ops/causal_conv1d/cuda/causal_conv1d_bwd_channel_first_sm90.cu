/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_first_sm90.cu: backward on Hopper, time is contiguous. Block (x, y, z) processes tile x of
 * row [b = z][d = y] of x and of dy. A warp processes its chunks from the last to the first:
 *   g   needs the W-1 previous inputs: from shared memory
 *   dx  needs the W-1 next values of g: from the next lane, for lane 31 from lane 0 of the next chunk
 *       after the warp's last chunk: recomputed
 * The part of the tile beyond T is zero-filled first, so that the loop over chunks has no branch. Branches made the
 * kernel 10 % slower.
 * The sums of dweight and dbias are accumulated per lane, then reduced over lanes and over warps.
 * causal_conv1d_reduce reduces them over blocks. */
#include "causal_conv1d_channel_first.cuh"
#include "causal_conv1d_sm90.cuh"

/* Processes the warp's chunks. t: the lane's first token of the last chunk. state_inputs: the inputs before the row,
 * from the initial state. store_end: dx of tokens before it is stored. */
template <typename E, bool SILU>
static __device__ __forceinline__ void process_chunks(const conv1d_call &c, const E *tile_x, const E *tile_dy,
                                                      const float *state_inputs, E *dx, int t, int store_end,
                                                      const float (&w)[4], float bias, float (&sums)[5])
{
    constexpr int W = 4, V = vector_elements<E, W>, CHUNK = CONV1D_LANES * V, CHUNKS = CONV1D_SM90_BWD_CHUNKS;
    const int lane = threadIdx.x % CONV1D_LANES, next_token = t - lane * V + CHUNK + lane;
    float next[W - 1];
    {
        float inputs[W], next_g = 0.0f, unused_sums[W + 1];
        if (lane < W - 1) {
#pragma unroll
            for (int k = 0; k < W; k++)
                inputs[k] = cot_to_f32(tile_x[next_token - (W - 1) + k]);
            float g[1] = {cot_to_f32(tile_dy[next_token])};
            compute_g_and_sums<E, 1, W, true>(c, 0, 0, SILU, w, bias, inputs, g, unused_sums);
            next_g = g[0];
        }
#pragma unroll
        for (int j = 0; j < W - 1; j++) /* lane 0 uses these: g after the chunk */
            next[j] = __shfl_sync(CONV1D_ALL_LANES, next_g, j);
    }
#pragma unroll
    for (int u = 0; u < CHUNKS; u++, t -= CHUNK) {
        float values[V], previous[4], inputs[W - 1 + V], g[V], after[W - 1], out[V];
        cot_unpack(*(const cot_vector<E, V> *)(tile_x + t), values);
        cot_unpack(*(const cot_vector<E, 4> *)(tile_x + t - 4), previous);
        if (u == CHUNKS - 1 && t == 0) {
#pragma unroll
            for (int i = 1; i < 4; i++)
                previous[i] = state_inputs[i];
        }
#pragma unroll
        for (int i = 0; i < W - 1 + V; i++)
            inputs[i] = i < W - 1 ? previous[i < W - 1 ? i + 1 : 0] : values[i < W - 1 ? 0 : i - (W - 1)];
        cot_unpack(*(const cot_vector<E, V> *)(tile_dy + t), g);
        compute_g_and_sums<E, V, W, true>(c, 0, t, SILU, w, bias, inputs, g, sums);
#pragma unroll
        for (int j = 0; j < W - 1; j++) {
            after[j] = __shfl_sync(CONV1D_ALL_LANES, lane == 0 ? next[j] : g[j], lane + 1);
            next[j] = g[j];
        }
        compute_dx<E, V, W, true>(c, 0, 0, t, false, w, g, after, out);
        if (t < store_end)
            cot_store_vector<E, V>(dx + t, out);
    }
}

template <typename E> static __device__ __forceinline__ void backward(const conv1d_call &c)
{
    constexpr int W = 4, V = vector_elements<E, W>, CHUNK = CONV1D_LANES * V, CHUNKS = CONV1D_SM90_BWD_CHUNKS;
    constexpr int HALO = 16 / (int)sizeof(E), LINE = 128 / (int)sizeof(E);
    constexpr int DY_OFFSET = CONV1D_SM90_WARPS * CHUNKS * CHUNK + 2 * LINE; /* from the tile of x to the tile of dy */
    __shared__ uint64_t full;
    __shared__ float state_inputs[4]; /* the inputs before the row */
    __shared__ float warp_sums[CONV1D_SM90_WARPS][W + 1];
    const int tokens = (int)blockDim.x * V * CHUNKS, T = (int)c.T, begin = (int)blockIdx.x * tokens;
    const int end = begin + tokens;
    const int64_t b = blockIdx.z, d = blockIdx.y;
    E *tile_x = (E *)conv1d_tile + LINE - begin, *tile_dy = tile_x + DY_OFFSET; /* [t] is token t */
    cot_griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        const E *x = (const E *)c.x.data + b * c.x.stride[0] + d * c.x.stride[1];
        const E *dy = (const E *)c.dy.data + b * c.dy.stride[0] + d * c.dy.stride[1];
        const int load_begin = begin > 0 ? begin - HALO : 0, load_end = end + HALO < T ? end + HALO : T;
        const uint32_t bytes = (uint32_t)(load_end - load_begin) * (uint32_t)sizeof(E);
        cot_mbarrier_init(&full, 1);
        cot_mbarrier_init_fence();
        cot_mbarrier_arrive_expect(&full, 2 * bytes);
        cot_bulk_load(tile_x + load_begin, x + load_begin, bytes, &full);
        cot_bulk_load(tile_dy + load_begin, dy + load_begin, bytes, &full);
    }
    const int lane = threadIdx.x % CONV1D_LANES, warp = threadIdx.x / CONV1D_LANES;
    if (begin == 0 && threadIdx.x < 4)
        state_inputs[threadIdx.x] = load_input<E>(c, b, d, (int)threadIdx.x - 4);
    for (int t = T + (int)threadIdx.x; t < end + HALO; t += (int)blockDim.x) {
        cot_from_f32(tile_x + t, 0.0f);
        cot_from_f32(tile_dy + t, 0.0f);
    }
    E *dx = (E *)c.dx.data + b * c.dx.stride[0] + d * c.dx.stride[1];
    float w[W], sums[W + 1] = {0};
    const float bias = load_taps<W>(c, d, w);
    __syncthreads();
    cot_mbarrier_wait(&full, 0);
    const int t = begin + ((warp + 1) * CHUNKS - 1) * CHUNK + lane * V, store_end = c.dx.data != nullptr ? T : 0;
    if (c.silu)
        process_chunks<E, true>(c, tile_x, tile_dy, state_inputs, dx, t, store_end, w, bias, sums);
    else
        process_chunks<E, false>(c, tile_x, tile_dy, state_inputs, dx, t, store_end, w, bias, sums);
    reduce_over_lanes(sums, warp_sums[warp]);
    __syncthreads();
    if (threadIdx.x <= W) {
        float sum = 0.0f;
        for (int i = 0; i < (int)blockDim.x / CONV1D_LANES; i++)
            sum += warp_sums[i][threadIdx.x];
        store_sum<W>(c, b * gridDim.x + blockIdx.x, d, threadIdx.x, sum);
    }
}

CONV1D_INSTANCES_SM90(causal_conv1d_bwd_channel_first_sm90, backward, conv1d_call, 8)
