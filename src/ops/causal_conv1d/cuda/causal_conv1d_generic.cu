/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_generic.cu: every feature, any width, any strides: a thread an element, dtypes at run time. The fast
 * kernels leave to these what is rare or small: states, update, index data.
 *
 * The backward has three steps, since dx and dweight both need g of other tokens: g into the workspace, then dx, then
 * the sums of dweight and dbias, each by one block in a fixed order. */
#include "causal_conv1d_cuda.h"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/fault.cuh"
#include "../../../cuda/device/ptx.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(256)

/* ---- access ------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ bool given(const conv1d_array &a)
{
    return a.data != nullptr;
}

static __device__ __forceinline__ float load3(const conv1d_array &a, int64_t i, int64_t j, int64_t k)
{
    return cot_load(a.data, a.dtype, i * a.stride[0] + j * a.stride[1] + k * a.stride[2]);
}

static __device__ __forceinline__ void store3(const conv1d_array &a, int64_t i, int64_t j, int64_t k, float value)
{
    cot_store(a.data, a.dtype, i * a.stride[0] + j * a.stride[1] + k * a.stride[2], value);
}

static __device__ __forceinline__ int64_t load_index(const conv1d_array &a, int64_t i, int64_t j)
{
    return ((const int32_t *)a.data)[i * a.stride[0] + j * a.stride[1]];
}

/* ---- sequences ---------------------------------------------------------------------------------------- *
 * The sequence that token t of row b belongs to: positions [first, end), a row of the states (-1 = padding: no token
 * counts), and, with seq_idx, an id. Entries of cu_seqlens beyond [0,T] are clamped, so that no fault in them leads out
 * of a tensor. */
struct sequence {
    int64_t b, first, end, state;
    int32_t id;
};

static __device__ int64_t boundary(const conv1d_call &c, int64_t n)
{
    const int64_t at = load_index(c.cu_seqlens, n, 0);
    return at < 0 ? 0 : at > c.T ? c.T : at;
}

static __device__ sequence sequence_of(const conv1d_call &c, int64_t b, int64_t t)
{
    sequence s = {b, 0, c.T, b, 0};
    if (given(c.seq_idx)) {
        s.id = (int32_t)load_index(c.seq_idx, b, t);
    } else if (given(c.cu_seqlens)) {
        int64_t low = -1, high = c.N; /* the last n with boundary(n) <= t */
        while (high - low > 1) {
            const int64_t middle = low + (high - low) / 2;
            if (boundary(c, middle) <= t)
                low = middle;
            else
                high = middle;
        }
        s.state = low;
        s.first = low < 0 ? 0 : boundary(c, low);
        s.end = low < 0 ? c.T : boundary(c, low + 1);
        if (low < 0 || t >= s.end)
            s.state = s.id = -1;
    }
    return s;
}

/* The sequence of row `row` of the states. */
static __device__ sequence sequence_of_state(const conv1d_call &c, int64_t row)
{
    sequence s = {row, 0, c.T, row, 0};
    if (given(c.cu_seqlens)) {
        s.b = 0;
        s.first = boundary(c, row);
        s.end = boundary(c, row + 1);
        s.end = s.end < s.first ? s.first : s.end;
    }
    return s;
}

/* The id of position p of s; columns of the initial state have the first token's. */
static __device__ int32_t id_at(const conv1d_call &c, const sequence &s, int64_t p)
{
    return given(c.seq_idx) && s.end > s.first ? (int32_t)load_index(c.seq_idx, s.b, p < s.first ? s.first : p) : s.id;
}

/* Does position p count for token t, both within s? */
static __device__ bool counts(const conv1d_call &c, const sequence &s, int64_t p, int64_t t)
{
    const int32_t id = id_at(c, s, t);
    return id >= 0 && (p == t || id_at(c, s, p) == id);
}

/* The input at position p of s, the columns of the initial state lying before its first token. */
static __device__ float input_at(const conv1d_call &c, const sequence &s, int64_t d, int64_t p)
{
    if (p >= s.first)
        return load3(c.x, s.b, d, p);
    return given(c.initial_state) ? load3(c.initial_state, s.state, d, c.K - 1 + p - s.first) : 0.0f;
}

/* Sums over taps go through partial sums of so many: over a hundred taps one float32 sum would stray. */
enum { TAPS = 16 };

/* z at a token that is no padding. */
static __device__ float preactivation(const conv1d_call &c, const sequence &s, int64_t d, int64_t t)
{
    float z = given(c.bias) ? load3(c.bias, d, 0, 0) : 0.0f;
    for (int64_t begin = 0; begin < c.K; begin += TAPS) {
        float part = 0.0f;
        for (int64_t k = begin; k < c.K && k < begin + TAPS; k++) {
            const int64_t p = t - (c.K - 1) + k;
            if (counts(c, s, p, t))
                part = fmaf(load3(c.weight, d, k, 0), input_at(c, s, d, p), part);
        }
        z += part;
    }
    return z;
}

/* The gradient with respect to z; 0 at padding. */
static __device__ float gradient(const conv1d_call &c, const sequence &s, int64_t d, int64_t t)
{
    if (id_at(c, s, t) < 0)
        return 0.0f;
    const float dy = load3(c.dy, s.b, d, t);
    return c.silu ? cot_silu_gradient<true>(dy, preactivation(c, s, d, t)) : dy;
}

/* ---- numbering the elements --------------------------------------------------------------------------- *
 * A thread takes every so many elements of [rows][D][columns], neighbours along whichever axis x has contiguous. */
struct element {
    int64_t row, d, column;
};

static __device__ element element_at(int64_t number, int64_t D, int64_t columns, bool channels_inside)
{
    element e;
    if (channels_inside) {
        e.d = number % D;
        e.column = number / D % columns;
    } else {
        e.column = number % columns;
        e.d = number / columns % D;
    }
    e.row = number / columns / D;
    return e;
}

#define FOR_EACH_ELEMENT(e, c, rows, columns)                                                                   \
    for (int64_t number_ = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, count_ = (rows) * (c).D * (columns); \
         number_ < count_; number_ += (int64_t)gridDim.x * blockDim.x)                                          \
        if (const element e = element_at(number_, (c).D, columns, (c).x.stride[1] == 1); true)

/* ---- kernels ------------------------------------------------------------------------------------------ */

/* Reports entry n of cu_seqlens if it is out of order or range. */
static __device__ void check_boundary(const conv1d_call &c, int64_t n)
{
    const int64_t at = load_index(c.cu_seqlens, n, 0), before = n > 0 ? load_index(c.cu_seqlens, n - 1, 0) : 0;
    if (n == 0 ? at != 0 : at < before || at > c.T)
        cot_report_fault(c.fault, COT_FAULT_CU_SEQLENS, n);
}

KERNEL causal_conv1d_check_seqlens(const __grid_constant__ conv1d_call c)
{
    for (int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; n <= c.N; n += (int64_t)gridDim.x * blockDim.x)
        check_boundary(c, n);
}

/* seq_idx from cu_seqlens, for the fast kernels; reports faults too. */
KERNEL causal_conv1d_expand_seqlens(const __grid_constant__ conv1d_call c)
{
    const int64_t stride = (int64_t)gridDim.x * blockDim.x;
    conv1d_call unpacked = c;
    unpacked.seq_idx.data = nullptr;
    for (int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; n < c.T || n <= c.N; n += stride) {
        if (n < c.T)
            ((int32_t *)c.seq_idx.data)[n] = (int32_t)sequence_of(unpacked, 0, n).state;
        if (n <= c.N)
            check_boundary(c, n);
    }
}

KERNEL causal_conv1d_forward_generic(const __grid_constant__ conv1d_call c)
{
    FOR_EACH_ELEMENT(e, c, c.B, c.T)
    {
        const sequence s = sequence_of(c, e.row, e.column);
        float y = 0.0f;
        if (s.id >= 0) {
            y = preactivation(c, s, e.d, e.column);
            y = c.silu ? cot_silu<true>(y) : y;
        }
        store3(c.y, e.row, e.d, e.column, y);
    }
}

KERNEL causal_conv1d_final_state(const __grid_constant__ conv1d_call c)
{
    FOR_EACH_ELEMENT(e, c, c.N, c.K - 1)
    {
        const sequence s = sequence_of_state(c, e.row);
        const int64_t p = s.end - (c.K - 1) + e.column;
        const bool kept = s.end == s.first || counts(c, s, p, s.end - 1);
        store3(c.final_state, e.row, e.d, e.column, kept ? input_at(c, s, e.d, p) : 0.0f);
    }
}

KERNEL causal_conv1d_gradient_generic(const __grid_constant__ conv1d_call c)
{
    FOR_EACH_ELEMENT(e, c, c.B, c.T)
    c.g[(e.row * c.D + e.d) * c.T + e.column] = gradient(c, sequence_of(c, e.row, e.column), e.d, e.column);
}

KERNEL causal_conv1d_dx_generic(const __grid_constant__ conv1d_call c)
{
    FOR_EACH_ELEMENT(e, c, c.B, c.T)
    {
        const int64_t t = e.column;
        const sequence s = sequence_of(c, e.row, t);
        const float *g = c.g + (e.row * c.D + e.d) * c.T;
        float dx = 0.0f;
        if (s.id >= 0) {
            for (int64_t begin = 0; begin < c.K; begin += TAPS) {
                float part = 0.0f;
                for (int64_t j = begin; j < c.K && j < begin + TAPS && t + j < s.end; j++)
                    if (counts(c, s, t, t + j))
                        part = fmaf(load3(c.weight, e.d, c.K - 1 - j, 0), g[t + j], part);
                dx += part;
            }
            const int64_t column = t - s.end + c.K - 1;
            if (given(c.dfinal_state) && column >= 0 && counts(c, s, t, s.end - 1))
                dx += load3(c.dfinal_state, s.state, e.d, column);
        }
        store3(c.dx, e.row, e.d, t, dx);
    }
}

/* Computes g again, for the few tokens that see the state: so it serves the fast kernels too. */
KERNEL causal_conv1d_dinitial_state(const __grid_constant__ conv1d_call c)
{
    FOR_EACH_ELEMENT(e, c, c.N, c.K - 1)
    {
        const sequence s = sequence_of_state(c, e.row);
        const int64_t i = e.column, length = s.end - s.first, p = s.first - (c.K - 1) + i;
        float sum = 0.0f;
        for (int64_t begin = 0; begin <= i; begin += TAPS) {
            float part = 0.0f;
            for (int64_t j = begin; j <= i && j < begin + TAPS && j < length; j++)
                if (counts(c, s, p, s.first + j))
                    part = fmaf(load3(c.weight, e.d, i - j, 0), gradient(c, s, e.d, s.first + j), part);
            sum += part;
        }
        if (given(c.dfinal_state) && i >= length && (length == 0 || counts(c, s, p, s.end - 1)))
            sum += load3(c.dfinal_state, e.row, e.d, i - length);
        store3(c.dinitial_state, e.row, e.d, i, sum);
    }
}

/* Block (d, k) sums dweight[d][k]; k = K: dbias[d]. */
KERNEL causal_conv1d_dweight_generic(const __grid_constant__ conv1d_call c)
{
    __shared__ float sums[256];
    const int64_t d = blockIdx.x % c.D, k = blockIdx.x / c.D;
    const conv1d_array &out = k < c.K ? c.dweight : c.dbias;
    if (!given(out))
        return;
    float sum = 0.0f;
    for (int64_t n = threadIdx.x; n < c.B * c.T; n += 256) {
        const int64_t b = n / c.T, t = n % c.T, p = t - (c.K - 1) + k;
        const float g = c.g[(b * c.D + d) * c.T + t];
        if (k == c.K) {
            sum += g;
        } else {
            const sequence s = sequence_of(c, b, t);
            if (s.id >= 0 && counts(c, s, p, t))
                sum = fmaf(g, input_at(c, s, d, p), sum);
        }
    }
    sums[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x != 0)
        return;
    const int64_t column = k < c.K ? k : 0;
    store3(out, d, column, 0, sums[0] + (c.accumulate ? load3(out, d, column, 0) : 0.0f));
}

/* Sums the partial sums of the fast kernels, which may still be running when this one starts. Block (x, k) takes sum k
 * of 32 channels: each warp every so many shares, then the warps' sums in their order. W: the width the partial sums
 * were compiled for; taps beyond K are zeros in front. */
template <int W> static __device__ __forceinline__ void reduce(const conv1d_call &c)
{
    constexpr int BATCH = 8;
    __shared__ float all[CONV1D_WARPS][CONV1D_LANES];
    const int lane = threadIdx.x % CONV1D_LANES, warp = threadIdx.x / CONV1D_LANES, k = (int)blockIdx.y;
    const int64_t d = (int64_t)blockIdx.x * CONV1D_LANES + lane;
    const conv1d_array &out = k < W ? c.dweight : c.dbias;
    const int64_t column = k < W ? k - (W - c.K) : 0;
    if (column < 0 || !given(out))
        return;
    /* All addresses first, and with them the parameters: a prefetch is what the compiler does not move behind the
     * wait. */
    const float *from = c.partial + (warp * (W + 1) + k) * c.D + d;
    const int64_t step = CONV1D_WARPS * (W + 1) * c.D, to = d * out.stride[0] + column * out.stride[1];
    const int count = d < c.D ? ((int)c.partial_count - warp + CONV1D_WARPS - 1) / CONV1D_WARPS : 0;
    if (count > 0)
        cot_prefetch_l2(from);
    if (warp == 0 && d < c.D)
        cot_prefetch_l2((const char *)out.data + to * (out.dtype == COT_F32 ? 4 : 2));
    cot_griddepcontrol_wait();
    cot_griddepcontrol_launch_dependents(); /* not earlier: their blocks would take the place of the first kernel's last ones */
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < count; i += BATCH) {
        float parts[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++, from += step)
            parts[j] = i + j < count ? *from : 0.0f;
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            sum += parts[j];
    }
    all[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || d >= c.D)
        return;
#pragma unroll
    for (int i = 1; i < CONV1D_WARPS; i++)
        sum += all[i][lane];
    store3(out, d, column, 0, sum + (c.accumulate ? load3(out, d, column, 0) : 0.0f));
}

#define REDUCE(width)                                                           \
    KERNEL causal_conv1d_reduce_k##width(const __grid_constant__ conv1d_call c) \
    {                                                                           \
        reduce<width>(c);                                                       \
    }
REDUCE(4)
REDUCE(8)

/* A thread a channel of a row: its tokens in order, then the state in place. */
KERNEL causal_conv1d_update_generic(const __grid_constant__ conv1d_call c)
{
    for (int64_t number = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; number < c.B * c.D;
         number += (int64_t)gridDim.x * blockDim.x) {
        const int64_t b = number / c.D, d = number % c.D;
        int64_t row = given(c.conv_state_indices) ? load_index(c.conv_state_indices, b, 0) : b;
        int64_t position = given(c.cache_seqlens) ? load_index(c.cache_seqlens, b, 0) : 0;
        if (row >= c.N) {
            cot_report_fault(c.fault, COT_FAULT_STATE_INDEX, b);
            row = -1;
        }
        if (position < 0) {
            cot_report_fault(c.fault, COT_FAULT_CACHE_SEQLENS, b);
            position = 0;
        }
        const bool ring = given(c.cache_seqlens);
        for (int64_t t = 0; t < c.T; t++) {
            float z = given(c.bias) ? load3(c.bias, d, 0, 0) : 0.0f;
            for (int64_t k = 0; row >= 0 && k < c.K; k++) {
                const int64_t p = t - (c.K - 1) + k;
                float input;
                if (p >= 0)
                    input = load3(c.x, b, d, p);
                else if (ring)
                    input = load3(c.conv_state, row, d, ((position + p) % c.S + c.S) % c.S);
                else
                    input = load3(c.conv_state, row, d, c.S + p);
                z = fmaf(load3(c.weight, d, k, 0), input, z);
            }
            store3(c.y, b, d, t, row < 0 ? 0.0f : c.silu ? cot_silu<true>(z) : z);
        }
        if (row < 0)
            continue;
        if (ring) {
            for (int64_t t = c.T > c.S ? c.T - c.S : 0; t < c.T; t++)
                store3(c.conv_state, row, d, (position + t) % c.S, load3(c.x, b, d, t));
        } else {
            for (int64_t column = 0; column < c.S; column++) {
                const int64_t from = column + c.T;
                store3(c.conv_state, row, d, column,
                       from < c.S ? load3(c.conv_state, row, d, from) : load3(c.x, b, d, from - c.S));
            }
        }
    }
}
