/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_channel_first_sm90.cu: forward on Hopper, time is contiguous. Block (x, y, z) processes tile x of
 * row [b = z][d = y]. A lane loads its V tokens and the 4 previous tokens from shared memory. */
#include "causal_conv1d_channel_first.cuh"
#include "causal_conv1d_sm90.cuh"

template <typename E> static __device__ __forceinline__ void forward(const conv1d_call &c)
{
    constexpr int W = 4, V = vector_elements<E, W>, CHUNK = CONV1D_LANES * V, CHUNKS = CONV1D_SM90_FWD_CHUNKS;
    constexpr int HALO = 16 / (int)sizeof(E), LINE = 128 / (int)sizeof(E);
    __shared__ uint64_t full;
    const int tokens = (int)blockDim.x * V * CHUNKS;
    const int T = (int)c.T, begin = (int)blockIdx.x * tokens;
    const int64_t b = blockIdx.z, d = blockIdx.y;
    E *tile = (E *)conv1d_tile + LINE - begin; /* tile[t] is token t */
    cot_griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        const E *x = (const E *)c.x.data + b * c.x.stride[0] + d * c.x.stride[1];
        const int load_begin = begin > 0 ? begin - HALO : 0, load_end = begin + tokens < T ? begin + tokens : T;
        const uint32_t bytes = (uint32_t)(load_end - load_begin) * (uint32_t)sizeof(E);
        cot_mbarrier_init(&full, 1);
        cot_mbarrier_init_fence();
        cot_mbarrier_arrive_expect(&full, bytes);
        cot_griddepcontrol_wait();
        cot_bulk_load(tile + load_begin, x + load_begin, bytes, &full);
    }
    E *y = (E *)c.y.data + b * c.y.stride[0] + d * c.y.stride[1];
    float w[W];
    cot_griddepcontrol_wait();
    const float bias = load_taps<W>(c, d, w);
    __syncthreads();
    cot_mbarrier_wait(&full, 0);
    int t = begin + (int)threadIdx.x / CONV1D_LANES * CHUNKS * CHUNK + (int)threadIdx.x % CONV1D_LANES * V;
#pragma unroll
    for (int u = 0; u < CHUNKS; u++, t += CHUNK) {
        float inputs[W - 1 + V], out[V];
        if (t >= T)
            break;
        load_inputs_shared<E, V, W>(c, b, d, tile, t, inputs);
        convolve<E, V, W, true>(c, b, t, w, bias, inputs, out);
        cot_store_vector<E, V>(y + t, out);
    }
}

CONV1D_INSTANCES_SM90(causal_conv1d_fwd_channel_first_sm90, forward, conv1d_call, 8)
