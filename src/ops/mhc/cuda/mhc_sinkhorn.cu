/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_sinkhorn.cu: Sinkhorn and its gradient, one token a thread, n as a constant. K, G, u and v are in registers.
 *
 * The method is that of cpu/mhc_sinkhorn.h: h_res = K_ij u_i v_j with K = softmax + eps. The gradient keeps u and v of
 * every iteration, the history, in shared memory if they fit, otherwise in the workspace. The file also has the part of
 * pre's backward that needs neither x nor dh_in: dz of post and res. mhc_pre_dz also clears the
 * counters of the one-pass kernel. */
#include "mhc_cuda.cuh"
#include "mhc_sinkhorn.cuh"

#include "../../../cuda/device/ptx.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(MHC_CUDA_TOKEN_THREADS)

static __device__ __forceinline__ int64_t thread_token()
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

/* The gradient of a token. The history is in shared memory or in the workspace. */
template <int N>
static __device__ __forceinline__ void gradient(const mhc_call &c, int64_t token, const float (&logits)[N * N],
                                                float (&G)[N * N])
{
    extern __shared__ float shared_history[]; /* [iterations][2n][threads] */
    if (c.history == nullptr)
        sinkhorn_gradient<N>(c.iterations, c.sinkhorn_eps, logits, G, shared_history + threadIdx.x, blockDim.x);
    else
        sinkhorn_gradient<N>(c.iterations, c.sinkhorn_eps, logits, G, c.history + token, c.tokens);
}

/* Loads the [n,n] matrix of a token. */
template <int N>
static __device__ __forceinline__ void load_matrix(const mhc_call &c, const mhc_array &a, int64_t token,
                                                   float (&values)[N * N])
{
    const int64_t offset = token_offset(c, a, token);
#pragma unroll
    for (int ij = 0; ij < N * N; ij++)
        values[ij] = load_f32(a, offset + ij / N * a.stride[2] + ij % N * a.stride[3]);
}

template <int N>
static __device__ __forceinline__ void store_matrix(const mhc_call &c, const mhc_array &a, int64_t token,
                                                    const float (&values)[N * N])
{
    const int64_t offset = token_offset(c, a, token);
#pragma unroll
    for (int ij = 0; ij < N * N; ij++)
        store_f32(a, offset + ij / N * a.stride[2] + ij % N * a.stride[3], values[ij]);
}

template <int N> static __device__ __forceinline__ void forward(const mhc_call &c)
{
    const int64_t token = thread_token();
    if (token >= c.tokens)
        return;
    float h_res[N * N];
    load_matrix<N>(c, c.h_res_logits, token, h_res);
    sinkhorn<N>(c.iterations, c.sinkhorn_eps, h_res);
    store_matrix<N>(c, c.h_res, token, h_res);
}

template <int N> static __device__ __forceinline__ void backward(const mhc_call &c)
{
    const int64_t token = thread_token();
    if (token >= c.tokens)
        return;
    float logits[N * N], G[N * N];
    load_matrix<N>(c, c.h_res_logits, token, logits);
    load_matrix<N>(c, c.dh_res, token, G);
    gradient<N>(c, token, logits, G);
    store_matrix<N>(c, c.dh_res_logits, token, G);
}

template <int N> static __device__ __forceinline__ void pre_dz(const mhc_call &c)
{
    constexpr int M = N * N + 2 * N;
    cot_griddepcontrol_launch_dependents();
    const int64_t token = thread_token();
    for (int64_t i = token; i < c.counter_count; i += c.tokens)
        c.counters[i] = 0;
    if (token >= c.tokens)
        return;
    float *dz = c.dz + token * M;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float h_post = load_f32(c.h_post, token_offset(c, c.h_post, token) + i * c.h_post.stride[2]);
        const float dh_post = load_f32(c.dh_post, token_offset(c, c.dh_post, token) + i * c.dh_post.stride[2]);
        dz[N + i] = dh_post * h_post * (1.0f - h_post / c.post_scale);
    }
    float G[N * N] = {0};
    if (present(c.dh_res)) {
        float logits[N * N];
        const float alpha = load_f32(c.alpha, 2 * c.alpha.stride[0]);
        const float inv_rms = load_f32(c.inv_rms, token_offset(c, c.inv_rms, token));
        const int64_t offset = token_offset(c, c.h_mix, token);
#pragma unroll
        for (int ij = 0; ij < N * N; ij++)
            logits[ij] = fmaf(alpha, load_f32(c.h_mix, offset + (2 * N + ij) * c.h_mix.stride[2]) * inv_rms,
                              load_f32(c.bias, (2 * N + ij) * c.bias.stride[0]));
        load_matrix<N>(c, c.dh_res, token, G);
        gradient<N>(c, token, logits, G);
    }
    const int64_t offset = token_offset(c, c.dh_res_logits, token);
#pragma unroll
    for (int ij = 0; ij < N * N; ij++) {
        if (present(c.dh_res_logits))
            G[ij] += load_f32(c.dh_res_logits,
                              offset + ij / N * c.dh_res_logits.stride[2] + ij % N * c.dh_res_logits.stride[3]);
        dz[2 * N + ij] = G[ij];
    }
}

#define INSTANCES(n)                                                 \
    KERNEL mhc_sinkhorn_fwd_n##n(const __grid_constant__ mhc_call c) \
    {                                                                \
        forward<n>(c);                                               \
    }                                                                \
    KERNEL mhc_sinkhorn_bwd_n##n(const __grid_constant__ mhc_call c) \
    {                                                                \
        backward<n>(c);                                              \
    }                                                                \
    KERNEL mhc_pre_dz_n##n(const __grid_constant__ mhc_call c)       \
    {                                                                \
        pre_dz<n>(c);                                                \
    }

INSTANCES(1)
INSTANCES(2)
INSTANCES(3)
INSTANCES(4)
INSTANCES(5)
INSTANCES(6)
INSTANCES(7)
INSTANCES(8)
