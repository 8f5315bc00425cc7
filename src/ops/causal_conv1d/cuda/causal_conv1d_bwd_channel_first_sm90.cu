/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_first_sm90.cu: time is contiguous. Block (x, y, z) takes tile x of row [b = z][d = y], of x
 * and of dy; a warp walks its chunks from the last to the first, for
 *   g   needs the W-1 inputs before: from shared memory
 *   dx  needs the W-1 g after: from the lane to the right, for lane 31 from lane 0 of the chunk after; those after the
 *       warp's last chunk are computed again
 * Sums of dweight and dbias: lane by lane, over lanes, over warps; then causal_conv1d_reduce over blocks. */
#include "causal_conv1d_first.cuh"
#include "causal_conv1d_sm90.cuh"

template <typename E> static __device__ __forceinline__ void backward(const conv1d_call &c)
{
    constexpr int W = 4, V = first_vector<E, W>, CHUNK = CONV1D_LANES * V, CHUNKS = CONV1D_SM90_BWD_CHUNKS;
    constexpr int TOKENS = CONV1D_SM90_WARPS * CHUNKS * CHUNK, PAD = 16 / (int)sizeof(E);
    __shared__ uint64_t full;
    __shared__ float all[CONV1D_SM90_WARPS][W + 1];
    const int T = (int)c.T, begin = (int)blockIdx.x * TOKENS;
    const int64_t b = blockIdx.z, d = blockIdx.y;
    E *tile_x = (E *)conv1d_tile + PAD - begin; /* [t] is token t */
    E *tile_dy = tile_x + TOKENS + 2 * PAD;
    if (threadIdx.x == 0) {
        const E *x = (const E *)c.x.data + b * c.x.stride[0] + d * c.x.stride[1];
        const E *dy = (const E *)c.dy.data + b * c.dy.stride[0] + d * c.dy.stride[1];
        const int low = begin > 0 ? begin - PAD : 0, high = begin + TOKENS + PAD < T ? begin + TOKENS + PAD : T;
        const uint32_t bytes = (uint32_t)(high - low) * (uint32_t)sizeof(E);
        cot_mbarrier_init(&full, 1);
        cot_mbarrier_init_fence();
        cot_mbarrier_arrive_expect(&full, 2 * bytes);
        cot_bulk_load(tile_x + low, x + low, bytes, &full);
        cot_bulk_load(tile_dy + low, dy + low, bytes, &full);
    }
    const int lane = threadIdx.x % CONV1D_LANES, warp = threadIdx.x / CONV1D_LANES;
    E *dx = (E *)c.dx.data + b * c.dx.stride[0] + d * c.dx.stride[1];
    float w[W], sums[W + 1] = {0}, after[W - 1], next[W - 1];
    const float bias = load_taps<W>(c, d, w);
    __syncthreads();
    cot_mbarrier_wait(&full, 0);
    const int warp_end = begin + (warp + 1) * CHUNKS * CHUNK;
    float lone = 0.0f;
    if (lane < W - 1 && warp_end + lane < T) {
        float z = bias;
#pragma unroll
        for (int k = 0; k < W; k++)
            z = fmaf(w[k], cot_to_f32(tile_x[warp_end + lane - (W - 1) + k]), z);
        lone = cot_to_f32(tile_dy[warp_end + lane]);
        lone = c.silu ? cot_silu_gradient<sizeof(E) == 4>(lone, z) : lone;
    }
#pragma unroll
    for (int j = 0; j < W - 1; j++) /* in lane 0: g that follows the chunk */
        next[j] = __shfl_sync(CONV1D_ALL_LANES, lone, j);
    int t = warp_end - CHUNK + lane * V;
#pragma unroll
    for (int u = 0; u < CHUNKS; u++, t -= CHUNK) {
        float inputs[W - 1 + V], g[V], out[V];
        if (t - lane * V >= T)
            continue;
        if (t < T) {
            read_inputs<E, V, W>(c, b, d, tile_x, t, inputs);
            cot_unpack(*(const cot_vector<E, V> *)(tile_dy + t), g);
            take_gradient<E, V, W, true>(c, b, t, c.silu, w, bias, inputs, g, sums);
        } else {
#pragma unroll
            for (int i = 0; i < V; i++)
                g[i] = 0.0f;
        }
#pragma unroll
        for (int j = 0; j < W - 1; j++) {
            after[j] = __shfl_sync(CONV1D_ALL_LANES, lane == 0 ? next[j] : g[j], lane + 1);
            next[j] = g[j];
        }
        if (c.dx.data == nullptr || t >= T)
            continue;
        give_gradient<E, V, W, true>(c, b, d, t, false, w, g, after, out);
        cot_store_vector<E, V>(dx + t, out);
    }
    sum_over_lanes(sums);
    if (lane == 0) {
#pragma unroll
        for (int k = 0; k <= W; k++)
            all[warp][k] = sums[k];
    }
    __syncthreads();
    if (threadIdx.x <= W) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < CONV1D_SM90_WARPS; i++)
            sum += all[i][threadIdx.x];
        store_sum<W>(c, b * gridDim.x + blockIdx.x, d, threadIdx.x, sum);
    }
}

CONV1D_INSTANCES_SM90(causal_conv1d_bwd_channel_first_sm90, backward, conv1d_call, 5)
