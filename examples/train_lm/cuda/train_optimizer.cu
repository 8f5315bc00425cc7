/* SPDX-License-Identifier: Apache-2.0
 *
 * train_optimizer.cu: cross-entropy, gradient norm and AdamW. device_layers.h has the formulas. */
#include "device_layers.h"
#include "device_vector.cuh"

#include <float.h>

/* ---- cross-entropy ------------------------------------------------------------------------------------ */

/* A block computes one row in two passes. The first pass computes the maximum and the sum of exponentials together, with
 * a correction of the sum where the maximum rises. The second pass finds the row in the L2 cache. */
template <typename E> static __device__ __forceinline__ void cross_entropy(const cross_entropy_call &c)
{
    constexpr int N = vector_size<E>;
    __shared__ float shared[LAYER_THREADS / 32];
    const int64_t row = blockIdx.x, begin = row * c.row_length;
    const int target = c.targets[row];
    const float target_logit = cot_to_f32(((const E *)c.logits)[begin + target]);
    float row_max = -FLT_MAX, row_sum = 0;
    for (int64_t i = threadIdx.x * N; i < c.classes; i += LAYER_THREADS * N) {
        float x[N];
        load_floats_cached<E>(c.logits, begin + i, x);
        float max = row_max;
#pragma unroll
        for (int j = 0; j < N; j++) {
            x[j] = i + j < c.classes ? x[j] : -INFINITY;
            max = fmaxf(max, x[j]);
        }
        row_sum *= expf(row_max - max);
        row_max = max;
#pragma unroll
        for (int j = 0; j < N; j++)
            row_sum += expf(x[j] - max);
    }
    const float max = block_max(row_max, shared), sum = block_sum(row_sum * expf(row_max - max), shared);
    if (threadIdx.x == 0)
        c.row_loss[row] = logf(sum) - (target_logit - max);
    if (!c.gradient)
        return;
    const float factor = c.scale / sum;
    for (int64_t i = threadIdx.x * N; i < c.row_length; i += LAYER_THREADS * N) {
        float x[N];
        load_floats_cached<E>(c.logits, begin + i, x);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float p = expf(x[j] - max) * factor;
            x[j] = i + j >= c.classes ? 0.0f : i + j == target ? p - c.scale : p;
        }
        store_floats<E>(c.logits, begin + i, x);
    }
}

DEFINE_KERNELS(cross_entropy, cross_entropy_call, LAYER_THREADS)

/* One block. */
extern "C" __global__ void __launch_bounds__(LAYER_THREADS) mean_loss(const mean_loss_call c)
{
    __shared__ double shared[LAYER_THREADS / 32];
    double sum = 0;
    for (int64_t row = threadIdx.x; row < c.rows; row += LAYER_THREADS)
        sum += (double)c.row_loss[row];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        *c.loss += c.scale * sum;
}

/* ---- gradient norm ------------------------------------------------------------------------------------ */

/* A block sums the squares of a chunk. */
extern "C" __global__ void __launch_bounds__(LAYER_THREADS) gradient_squares(const gradient_norm_call c)
{
    __shared__ double shared[LAYER_THREADS / 32];
    const int64_t begin = (int64_t)blockIdx.x * SQUARES_CHUNK;
    double sum = 0;
#pragma unroll
    for (int i = 0; i < SQUARES_CHUNK; i += 4 * LAYER_THREADS) {
        const int64_t index = begin + i + 4 * threadIdx.x;
        if (index < c.count) {
            float g[4];
            load_floats<float>(c.gradients, index, g);
#pragma unroll
            for (int j = 0; j < 4; j++)
                sum += (double)g[j] * (double)g[j];
        }
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        c.partials[blockIdx.x] = sum;
}

/* One block. */
extern "C" __global__ void __launch_bounds__(LAYER_THREADS) gradient_norm(const gradient_norm_call c)
{
    __shared__ double shared[LAYER_THREADS / 32];
    const int64_t partials = (c.count + SQUARES_CHUNK - 1) / SQUARES_CHUNK;
    double sum = 0;
    for (int64_t i = threadIdx.x; i < partials; i += LAYER_THREADS)
        sum += c.partials[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x > 0)
        return;
    const double norm = sqrt(sum) * c.unscale;
    c.norm[0] = norm;
    c.norm[1] = c.clip > 0 && norm > c.clip ? c.unscale * (c.clip / norm) : c.unscale;
}

/* ---- AdamW -------------------------------------------------------------------------------------------- */

/* A thread updates 4 elements. */
template <typename E> static __device__ __forceinline__ void adamw(const adamw_call &c)
{
    const int64_t index = ((int64_t)blockIdx.x * LAYER_THREADS + threadIdx.x) * 4;
    if (index >= c.count || !isfinite(c.norm[0]))
        return;
    float *master = sizeof(E) == 4 ? (float *)c.value : c.master;
    const adamw_rates rates = *c.rates;
    const float scale = (float)c.norm[1], decay = index < c.decaying ? rates.decay : 0.0f;
    float value[4], g[4], m1[4], m2[4];
    load_floats_cached<float>(master, index, value);
    load_floats<float>(c.gradient, index, g);
    load_floats_cached<float>(c.moment1, index, m1);
    load_floats_cached<float>(c.moment2, index, m2);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        g[i] *= scale;
        m1[i] = c.beta1 * m1[i] + (1.0f - c.beta1) * g[i];
        m2[i] = c.beta2 * m2[i] + (1.0f - c.beta2) * g[i] * g[i];
        value[i] -= rates.rate * m1[i] / (sqrtf(m2[i] * rates.correction2) + c.eps) + decay * value[i];
    }
    store_floats<float>(master, index, value);
    store_floats<float>(c.moment1, index, m1);
    store_floats<float>(c.moment2, index, m2);
    if (sizeof(E) == 2)
        *(uint2 *)((E *)c.value + index) =
            make_uint2(cot_pack_pair<E>(value[0], value[1]), cot_pack_pair<E>(value[2], value[3]));
}

DEFINE_KERNELS(adamw, adamw_call, LAYER_THREADS)
