/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_post_pre_bwd_tokens_sm90.cu: work per token of post_pre's backward on Hopper, for n = 2 and 4:
 *
 *   mhc_post_pre_make_operands  before mhc_post_pre_bwd_sm90: what a token's columns are multiplied by
 *   mhc_post_pre_sum_slices     after it: dh_res and dh_post from the sums of the column slices */
#include "mhc_post_pre_bwd_sm90.cuh"

/* The operands of a token, made by a warp. A lane has one of the M elements of dh_mix and one of the other numbers. */
template <int N> static __device__ __forceinline__ void make_operands(const mhc_call &c, int64_t token)
{
    constexpr int M = N * (N + 2), SUMS = N * N + N;
    const int lane = threadIdx.x % 32;
    const mhc_token_record &record = c.records[token];
    mhc_token_operands &to = c.operands[token];
    float mix = 0.0f;
    for (int term = 2; term >= 0 && lane < M; term--)
        mix += __uint_as_float((uint32_t)__ldcg(&record.terms[term][lane]) << 16);
    const term_scale scale(max_over_warp(fabsf(mix)), 62);
    uint32_t terms[TERMS];
    split_f16(mix * scale.up, 0.0f, terms);
#pragma unroll
    for (int term = 0; term < TERMS; term++)
        if (lane < M)
            to.terms[term][lane] = (uint16_t)terms[term];
    const int64_t h_res = token_offset(c, c.h_res, token), h_post = token_offset(c, c.h_post, token);
    if (lane < N * N)
        to.h_res[lane / N][lane % N] =
            load_f32(c.h_res, h_res + lane / N * c.h_res.stride[2] + lane % N * c.h_res.stride[3]);
    else if (lane < SUMS)
        to.h_post[lane - N * N] = load_f32(c.h_post, h_post + (lane - N * N) * c.h_post.stride[2]);
    else if (lane < SUMS + N)
        to.h_pre[lane - SUMS] = __ldcg(&record.h_pre[lane - SUMS]);
    else if (lane == SUMS + N)
        to.factor = __ldcg(&record.factor);
    else if (lane == SUMS + N + 1)
        to.scale = scale.down;
}

/* It may start while mhc_pre_sum_parts runs: that kernel has then waited for the records. make_operands loads them from the
 * L2 cache. */
extern "C" __global__ void __launch_bounds__(MHC_CUDA_THREADS)
    mhc_post_pre_make_operands(const __grid_constant__ mhc_call c)
{
    const int64_t token = (int64_t)blockIdx.x * (MHC_CUDA_THREADS / 32) + threadIdx.x / 32;
    cot_griddepcontrol_launch_dependents();
    if (token < c.tokens && c.n == 2)
        make_operands<2>(c, token);
    else if (token < c.tokens)
        make_operands<4>(c, token);
    cot_griddepcontrol_wait(); /* the next kernels then wait for mhc_pre_sum_parts too */
}

/* Adds the sums of the slices in order. A thread has one of the sums of a token. */
template <int N> static __device__ __forceinline__ void sum_slices(const mhc_call &c)
{
    constexpr int SUMS = MHC_CUDA_POST_SUMS(N);
    const int64_t index = (int64_t)blockIdx.x * MHC_CUDA_THREADS + threadIdx.x, token = index / SUMS;
    const int ij = (int)(index % SUMS);
    if (token >= c.tokens || ij >= N * N + N)
        return;
    cot_griddepcontrol_wait();
    float sum = 0.0f;
#pragma unroll 8
    for (int64_t slice = 0; slice < c.slices; slice++)
        sum += c.post_sums[slice * c.tokens * SUMS + index];
    if (ij < N * N && present(c.dh_res))
        store_f32(c.dh_res,
                  token_offset(c, c.dh_res, token) + ij / N * c.dh_res.stride[2] + ij % N * c.dh_res.stride[3], sum);
    if (ij >= N * N && present(c.dh_post))
        store_f32(c.dh_post, token_offset(c, c.dh_post, token) + (ij - N * N) * c.dh_post.stride[2], sum);
}

extern "C" __global__ void __launch_bounds__(MHC_CUDA_THREADS)
    mhc_post_pre_sum_slices(const __grid_constant__ mhc_call c)
{
    if (c.n == 2)
        sum_slices<2>(c);
    else
        sum_slices<4>(c);
}
