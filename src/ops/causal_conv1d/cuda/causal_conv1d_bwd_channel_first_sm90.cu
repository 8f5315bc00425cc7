/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_first_sm90.cu: time is contiguous. Block (x, y, z) takes tile x of row [b = z][d = y], of x
 * and of dy; a warp walks its chunks from the last to the first, for
 *   g   needs the W-1 inputs before: from shared memory
 *   dx  needs the W-1 g after: from the lane to the right, for lane 31 from lane 0 of the chunk after; those after the
 *       warp's last chunk are computed again
 * What is missing of the tile beyond T is made zero first, so that the walk has no branch: with them it took a tenth
 * longer.
 * Sums of dweight and dbias: lane by lane, over lanes, over warps; then causal_conv1d_reduce over blocks. */
#include "causal_conv1d_first.cuh"
#include "causal_conv1d_sm90.cuh"

/* The warp's chunks; t: the lane's first token of the last one. head: the inputs before the row. */
template <typename E, bool SILU>
static __device__ __forceinline__ void take_chunks(const conv1d_call &c, const E *tile_x, const E *tile_dy,
                                                   const float *head, E *dx, int t, int stores_end, const float (&w)[4],
                                                   float bias, float (&sums)[5])
{
    constexpr int W = 4, V = first_vector<E, W>, CHUNK = CONV1D_LANES * V, CHUNKS = CONV1D_SM90_BWD_CHUNKS;
    const int lane = threadIdx.x % CONV1D_LANES, next_token = t - lane * V + CHUNK + lane;
    float next[W - 1];
    {
        float inputs[W], lone = 0.0f, none[W + 1];
        if (lane < W - 1) {
#pragma unroll
            for (int k = 0; k < W; k++)
                inputs[k] = cot_to_f32(tile_x[next_token - (W - 1) + k]);
            float g[1] = {cot_to_f32(tile_dy[next_token])};
            take_gradient<E, 1, W, true>(c, 0, 0, SILU, w, bias, inputs, g, none);
            lone = g[0];
        }
#pragma unroll
        for (int j = 0; j < W - 1; j++) /* in lane 0: g that follows the chunk */
            next[j] = __shfl_sync(CONV1D_ALL_LANES, lone, j);
    }
#pragma unroll
    for (int u = 0; u < CHUNKS; u++, t -= CHUNK) {
        float own[V], before[4], inputs[W - 1 + V], g[V], after[W - 1], out[V];
        cot_unpack(*(const cot_vector<E, V> *)(tile_x + t), own);
        cot_unpack(*(const cot_vector<E, 4> *)(tile_x + t - 4), before);
        if (u == CHUNKS - 1 && t == 0) {
#pragma unroll
            for (int i = 1; i < 4; i++)
                before[i] = head[i];
        }
#pragma unroll
        for (int i = 0; i < W - 1 + V; i++)
            inputs[i] = i < W - 1 ? before[i < W - 1 ? i + 1 : 0] : own[i < W - 1 ? 0 : i - (W - 1)];
        cot_unpack(*(const cot_vector<E, V> *)(tile_dy + t), g);
        take_gradient<E, V, W, true>(c, 0, t, SILU, w, bias, inputs, g, sums);
#pragma unroll
        for (int j = 0; j < W - 1; j++) {
            after[j] = __shfl_sync(CONV1D_ALL_LANES, lane == 0 ? next[j] : g[j], lane + 1);
            next[j] = g[j];
        }
        give_gradient<E, V, W, true>(c, 0, 0, t, false, w, g, after, out);
        if (t < stores_end)
            cot_store_vector<E, V>(dx + t, out);
    }
}

template <typename E> static __device__ __forceinline__ void backward(const conv1d_call &c)
{
    constexpr int W = 4, V = first_vector<E, W>, CHUNK = CONV1D_LANES * V, CHUNKS = CONV1D_SM90_BWD_CHUNKS;
    constexpr int PAD = 16 / (int)sizeof(E), LINE = 128 / (int)sizeof(E);
    constexpr int DISTANCE = CONV1D_SM90_WARPS * CHUNKS * CHUNK + 2 * LINE; /* of the tile of dy from that of x */
    __shared__ uint64_t full;
    __shared__ float head[4]; /* the inputs before the row */
    __shared__ float all[CONV1D_SM90_WARPS][W + 1];
    const int tokens = (int)blockDim.x * V * CHUNKS, T = (int)c.T, begin = (int)blockIdx.x * tokens;
    const int end = begin + tokens;
    const int64_t b = blockIdx.z, d = blockIdx.y;
    E *tile_x = (E *)conv1d_tile + LINE - begin, *tile_dy = tile_x + DISTANCE; /* [t] is token t */
    cot_griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        const E *x = (const E *)c.x.data + b * c.x.stride[0] + d * c.x.stride[1];
        const E *dy = (const E *)c.dy.data + b * c.dy.stride[0] + d * c.dy.stride[1];
        const int low = begin > 0 ? begin - PAD : 0, high = end + PAD < T ? end + PAD : T;
        const uint32_t bytes = (uint32_t)(high - low) * (uint32_t)sizeof(E);
        cot_mbarrier_init(&full, 1);
        cot_mbarrier_init_fence();
        cot_mbarrier_arrive_expect(&full, 2 * bytes);
        cot_bulk_load(tile_x + low, x + low, bytes, &full);
        cot_bulk_load(tile_dy + low, dy + low, bytes, &full);
    }
    const int lane = threadIdx.x % CONV1D_LANES, warp = threadIdx.x / CONV1D_LANES;
    if (begin == 0 && threadIdx.x < 4)
        head[threadIdx.x] = input_at<E>(c, b, d, (int)threadIdx.x - 4);
    for (int t = T + (int)threadIdx.x; t < end + PAD; t += (int)blockDim.x) {
        cot_from_f32(tile_x + t, 0.0f);
        cot_from_f32(tile_dy + t, 0.0f);
    }
    E *dx = (E *)c.dx.data + b * c.dx.stride[0] + d * c.dx.stride[1];
    float w[W], sums[W + 1] = {0};
    const float bias = load_taps<W>(c, d, w);
    __syncthreads();
    cot_mbarrier_wait(&full, 0);
    const int t = begin + ((warp + 1) * CHUNKS - 1) * CHUNK + lane * V, stores_end = c.dx.data != nullptr ? T : 0;
    if (c.silu)
        take_chunks<E, true>(c, tile_x, tile_dy, head, dx, t, stores_end, w, bias, sums);
    else
        take_chunks<E, false>(c, tile_x, tile_dy, head, dx, t, stores_end, w, bias, sums);
    sum_over_lanes(sums, all[warp]);
    __syncthreads();
    if (threadIdx.x <= W) {
        float sum = 0.0f;
        for (int i = 0; i < (int)blockDim.x / CONV1D_LANES; i++)
            sum += all[i][threadIdx.x];
        store_sum<W>(c, b * gridDim.x + blockIdx.x, d, threadIdx.x, sum);
    }
}

CONV1D_INSTANCES_SM90(causal_conv1d_bwd_channel_first_sm90, backward, conv1d_call, 8)
