/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_products.cuh: what the portable kernels of dense causal convolution share: the operands of the
 * products, element by element, and the store of a result. For any strides, and states. A step processes 32 of the
 * inner axis:
 *
 *   product    rows            columns   inner axis                 A                 B
 *   FORWARD    tokens          Dout      input channel, tap         xe [t + k][i]     w [o][i][k]
 *              without y, it computes g = dy silu'(z) instead of y
 *   DX         rows r of xe    Din       output channel, tap        g [r - k][o]      w [o][i][k]
 *   DWEIGHT    Dout, one tap   Din       tokens of all sequences    g [t][o]          xe [t + k][i] */
#ifndef COT_CAUSAL_CONV1D_DENSE_PRODUCTS_CUH
#define COT_CAUSAL_CONV1D_DENSE_PRODUCTS_CUH

#include "causal_conv1d_dense_cuda.h"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/element.cuh"

enum { BLOCK_K = CONV1D_DENSE_SM80_BLOCK_K, F32_THREADS = 128, MMA_THREADS = 256 };
enum product { FORWARD, DX, DWEIGHT };

static __device__ __forceinline__ float load_at(const conv1d_dense_array &a, int64_t b, int64_t channel, int64_t t)
{
    return cot_load(a.data, a.dtype, b * a.stride[0] + channel * a.stride[1] + t * a.stride[2]);
}

/* Loads row r of xe: a column of the state, a token, or 0. */
static __device__ __forceinline__ float load_xe(const conv1d_dense_call &c, int64_t b, int64_t i, int64_t r)
{
    const int64_t t = r - (c.K - 1);
    if (t >= c.T || i >= c.Din)
        return 0.0f;
    if (t >= 0)
        return load_at(c.x, b, i, t);
    return c.initial_state.data != nullptr ? load_at(c.initial_state, b, i, r) : 0.0f;
}

static __device__ __forceinline__ float load_g(const conv1d_dense_call &c, int64_t b, int64_t o, int64_t t)
{
    return t >= 0 && t < c.T && o < c.Dout ? load_at(c.g, b, o, t) : 0.0f;
}

static __device__ __forceinline__ float load_weight(const conv1d_dense_call &c, int64_t o, int64_t i, int64_t k)
{
    return o < c.Dout && i < c.Din ? load_at(c.weight, o, i, k) : 0.0f;
}

/* What a block computes. b: sequence; k and split: for DWEIGHT. */
struct work_tile {
    int64_t b, k, split, row, column, first, end; /* [first, end): range of the inner axis, on tensor cores in steps */
};

static __device__ __forceinline__ int64_t k_block_count(int64_t size)
{
    return (size + BLOCK_K - 1) / BLOCK_K;
}

template <product P, int BLOCK> static __device__ __forceinline__ work_tile get_work_tile(const conv1d_dense_call &c)
{
    constexpr bool IS_MMA = BLOCK == CONV1D_DENSE_MMA_BLOCK;
    const int64_t columns = P == FORWARD ? c.Dout : c.Din;
    const int64_t rows = P == DWEIGHT ? c.Dout : P == DX ? c.K - 1 + c.T : c.T;
    const int64_t column_blocks = (columns + BLOCK - 1) / BLOCK, row_blocks = (rows + BLOCK - 1) / BLOCK;
    const int64_t rest = blockIdx.x / column_blocks / row_blocks;
    work_tile p = {};
    p.column = blockIdx.x % column_blocks * BLOCK;
    p.row = blockIdx.x / column_blocks % row_blocks * BLOCK;
    if (P == DWEIGHT) {
        const int64_t steps = IS_MMA ? c.B * k_block_count(c.T) : k_block_count(c.B * c.T),
                      step_size = IS_MMA ? 1 : BLOCK_K;
        p.k = rest % c.K;
        p.split = rest / c.K;
        p.first = p.split * steps / c.splits * step_size;
        p.end = min((p.split + 1) * steps / c.splits * step_size, IS_MMA ? steps : c.B * c.T);
    } else {
        const int64_t channels = P == DX ? c.Dout : c.Din;
        p.b = rest;
        p.end = c.K * (IS_MMA ? k_block_count(channels) : channels);
    }
    return p;
}

/* A term of the inner axis of the float32 products: a sequence and a token for DWEIGHT, else a channel and a tap. */
struct inner_term {
    int64_t outer, inner;
};

template <product P> static __device__ __forceinline__ inner_term get_term(const conv1d_dense_call &c, int64_t n)
{
    const int64_t size = P == DWEIGHT ? c.T : c.K;
    return {n / size, n % size};
}

template <product P>
static __device__ __forceinline__ float load_a(const conv1d_dense_call &c, const work_tile &p, int64_t row,
                                               const inner_term &n)
{
    if (P == DWEIGHT)
        return load_g(c, n.outer, row, n.inner);
    if (P == DX)
        return load_g(c, p.b, n.outer, row - n.inner);
    return load_xe(c, p.b, n.outer, row + n.inner);
}

template <product P>
static __device__ __forceinline__ float load_b(const conv1d_dense_call &c, const work_tile &p, int64_t column,
                                               const inner_term &n)
{
    if (P == DWEIGHT)
        return load_xe(c, n.outer, column, n.inner + p.k);
    if (P == DX)
        return load_weight(c, n.outer, column, n.inner);
    return load_weight(c, column, n.outer, n.inner);
}

/* Stores one element of the result. */
template <product P>
static __device__ __forceinline__ void store_result(const conv1d_dense_call &c, const work_tile &p, int64_t row,
                                                    int64_t column, float sum)
{
    if (P == DWEIGHT) {
        if (row < c.Dout && column < c.Din)
            c.dweight_partials[((p.split * c.K + p.k) * c.Dout + row) * c.Din + column] = sum;
        return;
    }
    if (P == DX) {
        if (row >= c.K - 1 + c.T || column >= c.Din)
            return;
        const bool token = row >= c.K - 1;
        const conv1d_dense_array &target = token ? c.out : c.dinitial_state;
        if (target.data == nullptr)
            return;
        if (c.dfinal_state.data != nullptr && row >= c.T)
            sum += load_at(c.dfinal_state, p.b, column, row - c.T);
        cot_store(target.data, target.dtype,
                  p.b * target.stride[0] + column * target.stride[1] +
                      (token ? row - (c.K - 1) : row) * target.stride[2],
                  sum);
        return;
    }
    if (row >= c.T || column >= c.Dout)
        return;
    float z = sum;
    if (c.bias.data != nullptr)
        z += cot_load(c.bias.data, c.bias.dtype, column * c.bias.stride[0]);
    const bool is_g = c.out.data == nullptr;
    const conv1d_dense_array &target = is_g ? c.g : c.out;
    const float value = is_g     ? cot_silu_gradient<true>(load_at(c.dy, p.b, column, row), z)
                        : c.silu ? cot_silu<true>(z)
                                 : z;
    cot_store(target.data, target.dtype, p.b * target.stride[0] + column * target.stride[1] + row * target.stride[2],
              value);
}

/* All kernels of the products. The caller defines F32(stem, product) and MMA(stem, product, name, element): one kernel. */
#define CONV1D_DENSE_PRODUCT(stem, product) \
    F32(stem, product)                      \
    MMA(stem, product, bf16, __nv_bfloat16) \
    MMA(stem, product, f16, __half)
#define CONV1D_DENSE_INSTANCES         \
    CONV1D_DENSE_PRODUCT(fwd, FORWARD) \
    CONV1D_DENSE_PRODUCT(dx, DX)       \
    CONV1D_DENSE_PRODUCT(dweight, DWEIGHT)

#endif
