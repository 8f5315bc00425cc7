/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_generic.cu: kernels for every feature, width and stride: one thread per element, dtypes selected at
 * run time. Problems of the fast kernels use some of these too, for rare or small work: states and index data.
 *
 * The backward has three kernels, because dx and dweight both need g of other tokens. The first stores g in the
 * workspace, the second computes dx, the third reduces dweight and dbias. One block computes one sum, in a fixed
 * order. */
#include "causal_conv1d_cuda.h"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/fault.cuh"
#include "../../../cuda/device/ptx.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(256)

/* ---- access ------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ bool is_present(const conv1d_array &a)
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
 * The sequence of a token of batch element b: its positions [first, end), its row of the states (-1: padding, where no
 * token contributes), and with seq_idx an id. Entries of cu_seqlens outside [0, T] are clamped, so that a wrong entry
 * causes no access outside of a tensor. */
struct sequence {
    int64_t b, first, end, state;
    int32_t id;
};

static __device__ int64_t clamped_boundary(const conv1d_call &c, int64_t n)
{
    const int64_t entry = load_index(c.cu_seqlens, n, 0);
    return entry < 0 ? 0 : entry > c.T ? c.T : entry;
}

static __device__ sequence sequence_of(const conv1d_call &c, int64_t b, int64_t t)
{
    sequence s = {b, 0, c.T, b, 0};
    if (is_present(c.seq_idx)) {
        s.id = (int32_t)load_index(c.seq_idx, b, t);
    } else if (is_present(c.cu_seqlens)) {
        int64_t low = -1, high = c.N; /* search the last n with clamped_boundary(n) <= t */
        while (high - low > 1) {
            const int64_t middle = low + (high - low) / 2;
            if (clamped_boundary(c, middle) <= t)
                low = middle;
            else
                high = middle;
        }
        s.state = low;
        s.first = low < 0 ? 0 : clamped_boundary(c, low);
        s.end = low < 0 ? c.T : clamped_boundary(c, low + 1);
        if (low < 0 || t >= s.end)
            s.state = s.id = -1;
    }
    return s;
}

/* The sequence of row `row` of the states. */
static __device__ sequence sequence_of_state(const conv1d_call &c, int64_t row)
{
    sequence s = {row, 0, c.T, row, 0};
    if (is_present(c.cu_seqlens)) {
        s.b = 0;
        s.first = clamped_boundary(c, row);
        s.end = clamped_boundary(c, row + 1);
        s.end = s.end < s.first ? s.first : s.end;
    }
    return s;
}

/* The sequence id of position p of s. Columns of the initial state have the id of the first token. */
static __device__ int32_t id_at(const conv1d_call &c, const sequence &s, int64_t p)
{
    return is_present(c.seq_idx) && s.end > s.first ? (int32_t)load_index(c.seq_idx, s.b, p < s.first ? s.first : p)
                                                    : s.id;
}

/* Does position p contribute to token t? Both are in s. */
static __device__ bool contributes(const conv1d_call &c, const sequence &s, int64_t p, int64_t t)
{
    const int32_t id = id_at(c, s, t);
    return id >= 0 && (p == t || id_at(c, s, p) == id);
}

/* The input at position p of s. Positions before its first token are those of the initial state. */
static __device__ float load_input(const conv1d_call &c, const sequence &s, int64_t d, int64_t p)
{
    if (p >= s.first)
        return load3(c.x, s.b, d, p);
    return is_present(c.initial_state) ? load3(c.initial_state, s.state, d, c.K - 1 + p - s.first) : 0.0f;
}

/* Taps of a chunk sum: a single float32 sum over more than 100 taps would lose accuracy. */
enum { TAP_CHUNK = 16 };

/* z of a token that is not padding. */
static __device__ float preactivation(const conv1d_call &c, const sequence &s, int64_t d, int64_t t)
{
    float z = is_present(c.bias) ? load3(c.bias, d, 0, 0) : 0.0f;
    for (int64_t begin = 0; begin < c.K; begin += TAP_CHUNK) {
        float chunk_sum = 0.0f;
        for (int64_t k = begin; k < c.K && k < begin + TAP_CHUNK; k++) {
            const int64_t p = t - (c.K - 1) + k;
            if (contributes(c, s, p, t))
                chunk_sum = fmaf(load3(c.weight, d, k, 0), load_input(c, s, d, p), chunk_sum);
        }
        z += chunk_sum;
    }
    return z;
}

/* g, the gradient with respect to z. It is 0 for padding. */
static __device__ float preactivation_gradient(const conv1d_call &c, const sequence &s, int64_t d, int64_t t)
{
    if (id_at(c, s, t) < 0)
        return 0.0f;
    const float dy = load3(c.dy, s.b, d, t);
    return c.silu ? cot_silu_gradient<true>(dy, preactivation(c, s, d, t)) : dy;
}

/* ---- element numbers ---------------------------------------------------------------------------------- *
 * A grid-stride loop over the elements of [rows][D][positions]. Adjacent threads have adjacent elements of the axis
 * along which x is contiguous. */
struct element {
    int64_t row, d, position;
};

static __device__ element element_at(int64_t element_number, int64_t D, int64_t positions, bool channels_innermost)
{
    element e;
    if (channels_innermost) {
        e.d = element_number % D;
        e.position = element_number / D % positions;
    } else {
        e.position = element_number % positions;
        e.d = element_number / positions % D;
    }
    e.row = element_number / positions / D;
    return e;
}

#define FOR_EACH_ELEMENT(e, c, rows, positions)                                                                   \
    for (int64_t number_ = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, count_ = (rows) * (c).D * (positions); \
         number_ < count_; number_ += (int64_t)gridDim.x * blockDim.x)                                            \
        if (const element e = element_at(number_, (c).D, positions, (c).x.stride[1] == 1); true)

/* ---- kernels ------------------------------------------------------------------------------------------ */

/* Reports entry n of cu_seqlens if it is out of order or out of range. */
static __device__ void check_boundary(const conv1d_call &c, int64_t n)
{
    const int64_t entry = load_index(c.cu_seqlens, n, 0), before = n > 0 ? load_index(c.cu_seqlens, n - 1, 0) : 0;
    if (n == 0 ? entry != 0 : entry < before || entry > c.T)
        cot_report_fault(c.fault, COT_FAULT_CU_SEQLENS, n);
}

KERNEL causal_conv1d_check_seqlens(const __grid_constant__ conv1d_call c)
{
    for (int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; n <= c.N; n += (int64_t)gridDim.x * blockDim.x)
        check_boundary(c, n);
}

/* Computes seq_idx from cu_seqlens for the fast kernels, and reports wrong entries. */
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

KERNEL causal_conv1d_fwd_generic(const __grid_constant__ conv1d_call c)
{
    FOR_EACH_ELEMENT(e, c, c.B, c.T)
    {
        const sequence s = sequence_of(c, e.row, e.position);
        float y = 0.0f;
        if (s.id >= 0) {
            y = preactivation(c, s, e.d, e.position);
            y = c.silu ? cot_silu<true>(y) : y;
        }
        store3(c.y, e.row, e.d, e.position, y);
    }
}

KERNEL causal_conv1d_final_state(const __grid_constant__ conv1d_call c)
{
    FOR_EACH_ELEMENT(e, c, c.N, c.K - 1)
    {
        const sequence s = sequence_of_state(c, e.row);
        const int64_t p = s.end - (c.K - 1) + e.position;
        const bool kept = s.end == s.first || contributes(c, s, p, s.end - 1);
        store3(c.final_state, e.row, e.d, e.position, kept ? load_input(c, s, e.d, p) : 0.0f);
    }
}

KERNEL causal_conv1d_gradient_generic(const __grid_constant__ conv1d_call c)
{
    FOR_EACH_ELEMENT(e, c, c.B, c.T)
    c.g[(e.row * c.D + e.d) * c.T + e.position] =
        preactivation_gradient(c, sequence_of(c, e.row, e.position), e.d, e.position);
}

KERNEL causal_conv1d_dx_generic(const __grid_constant__ conv1d_call c)
{
    FOR_EACH_ELEMENT(e, c, c.B, c.T)
    {
        const int64_t t = e.position;
        const sequence s = sequence_of(c, e.row, t);
        const float *g = c.g + (e.row * c.D + e.d) * c.T;
        float dx = 0.0f;
        if (s.id >= 0) {
            for (int64_t begin = 0; begin < c.K; begin += TAP_CHUNK) {
                float chunk_sum = 0.0f;
                for (int64_t j = begin; j < c.K && j < begin + TAP_CHUNK && t + j < s.end; j++)
                    if (contributes(c, s, t, t + j))
                        chunk_sum = fmaf(load3(c.weight, e.d, c.K - 1 - j, 0), g[t + j], chunk_sum);
                dx += chunk_sum;
            }
            const int64_t state_position = t - s.end + c.K - 1;
            if (is_present(c.dfinal_state) && state_position >= 0 && contributes(c, s, t, s.end - 1))
                dx += load3(c.dfinal_state, s.state, e.d, state_position);
        }
        store3(c.dx, e.row, e.d, t, dx);
    }
}

/* Recomputes g, for the few tokens that the initial state contributes to. So the fast kernels can use this kernel
 * too. */
KERNEL causal_conv1d_dinitial_state(const __grid_constant__ conv1d_call c)
{
    FOR_EACH_ELEMENT(e, c, c.N, c.K - 1)
    {
        const sequence s = sequence_of_state(c, e.row);
        const int64_t i = e.position, length = s.end - s.first, p = s.first - (c.K - 1) + i;
        float sum = 0.0f;
        for (int64_t begin = 0; begin <= i; begin += TAP_CHUNK) {
            float chunk_sum = 0.0f;
            for (int64_t j = begin; j <= i && j < begin + TAP_CHUNK && j < length; j++)
                if (contributes(c, s, p, s.first + j))
                    chunk_sum =
                        fmaf(load3(c.weight, e.d, i - j, 0), preactivation_gradient(c, s, e.d, s.first + j), chunk_sum);
            sum += chunk_sum;
        }
        if (is_present(c.dfinal_state) && i >= length && (length == 0 || contributes(c, s, p, s.end - 1)))
            sum += load3(c.dfinal_state, e.row, e.d, i - length);
        store3(c.dinitial_state, e.row, e.d, i, sum);
    }
}

/* Block d + k D computes dweight[d][k]. For k = K it computes dbias[d]. */
KERNEL causal_conv1d_dweight_generic(const __grid_constant__ conv1d_call c)
{
    __shared__ float sums[256];
    const int64_t d = blockIdx.x % c.D, k = blockIdx.x / c.D;
    const conv1d_array &out = k < c.K ? c.dweight : c.dbias;
    if (!is_present(out))
        return;
    float sum = 0.0f;
    for (int64_t n = threadIdx.x; n < c.B * c.T; n += 256) {
        const int64_t b = n / c.T, t = n % c.T, p = t - (c.K - 1) + k;
        const float g = c.g[(b * c.D + d) * c.T + t];
        if (k == c.K) {
            sum += g;
        } else {
            const sequence s = sequence_of(c, b, t);
            if (s.id >= 0 && contributes(c, s, p, t))
                sum = fmaf(g, load_input(c, s, d, p), sum);
        }
    }
    sums[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x != 0)
        return;
    const int64_t tap = k < c.K ? k : 0;
    store3(out, d, tap, 0, sums[0] + (c.accumulate ? load3(out, d, tap, 0) : 0.0f));
}

/* Reduces the partial sums of the fast kernels, which may still run when this kernel starts. Block (x, k) reduces sum k
 * of 32 channels. Each warp sums every CONV1D_WARPS-th partial sum, then warp 0 sums the results of the warps in order.
 * W: the width of the kernel that wrote the partial sums. With K < W, the first W-K taps are zeros. */
template <int W> static __device__ __forceinline__ void reduce(const conv1d_call &c)
{
    constexpr int BATCH = 8;
    __shared__ float warp_sums[CONV1D_WARPS][CONV1D_LANES];
    const int lane = threadIdx.x % CONV1D_LANES, warp = threadIdx.x / CONV1D_LANES, k = (int)blockIdx.y;
    const int64_t d = (int64_t)blockIdx.x * CONV1D_LANES + lane;
    const conv1d_array &out = k < W ? c.dweight : c.dbias;
    const int64_t tap = k < W ? k - (W - c.K) : 0;
    if (tap < 0 || !is_present(out))
        return;
    /* Computes all addresses, and so loads all parameters, before the wait. The prefetches enforce this: the compiler
     * does not move a prefetch behind the wait. */
    const float *source = c.partial + (warp * (W + 1) + k) * c.D + d;
    const int64_t step = CONV1D_WARPS * (W + 1) * c.D, to = d * out.stride[0] + tap * out.stride[1];
    const int count = d < c.D ? ((int)c.partial_count - warp + CONV1D_WARPS - 1) / CONV1D_WARPS : 0;
    if (count > 0)
        cot_prefetch_l2(source);
    if (warp == 0 && d < c.D)
        cot_prefetch_l2((const char *)out.data + to * (out.dtype == COT_F32 ? 4 : 2));
    cot_griddepcontrol_wait();
    /* After the wait: earlier, the blocks of the dependents would displace the last blocks of the first kernel. */
    cot_griddepcontrol_launch_dependents();
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < count; i += BATCH) {
        float partials[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++, source += step)
            partials[j] = i + j < count ? *source : 0.0f;
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            sum += partials[j];
    }
    warp_sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || d >= c.D)
        return;
#pragma unroll
    for (int i = 1; i < CONV1D_WARPS; i++)
        sum += warp_sums[i][lane];
    store3(out, d, tap, 0, sum + (c.accumulate ? load3(out, d, tap, 0) : 0.0f));
}

#define REDUCE(width)                                                           \
    KERNEL causal_conv1d_reduce_k##width(const __grid_constant__ conv1d_call c) \
    {                                                                           \
        reduce<width>(c);                                                       \
    }
REDUCE(4)
REDUCE(8)

/* A thread processes one channel of a batch element: its tokens in order, then the state in place. */
KERNEL causal_conv1d_update_generic(const __grid_constant__ conv1d_call c)
{
    for (int64_t element_number = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; element_number < c.B * c.D;
         element_number += (int64_t)gridDim.x * blockDim.x) {
        const int64_t b = element_number / c.D, d = element_number % c.D;
        int64_t row = is_present(c.conv_state_indices) ? load_index(c.conv_state_indices, b, 0) : b;
        int64_t position = is_present(c.cache_seqlens) ? load_index(c.cache_seqlens, b, 0) : 0;
        if (row >= c.N) {
            cot_report_fault(c.fault, COT_FAULT_STATE_INDEX, b);
            row = -1;
        }
        if (position < 0) {
            cot_report_fault(c.fault, COT_FAULT_CACHE_SEQLENS, b);
            position = 0;
        }
        const bool ring = is_present(c.cache_seqlens);
        for (int64_t t = 0; t < c.T; t++) {
            float z = is_present(c.bias) ? load3(c.bias, d, 0, 0) : 0.0f;
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
            for (int64_t position = 0; position < c.S; position++) {
                const int64_t source = position + c.T;
                store3(c.conv_state, row, d, position,
                       source < c.S ? load3(c.conv_state, row, d, source) : load3(c.x, b, d, source - c.S));
            }
        }
    }
}
