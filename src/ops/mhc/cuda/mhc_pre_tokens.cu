/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_tokens.cu: the per-token work of pre, for kernels whose products work on slices of the columns. One block
 * handles one token.
 *   epilogue forward: sums over the slices, computes the coefficients, reads x to compute h_in
 *   records  backward: dh_pre from x and dh_in, then dz, dh_mix and c of the formulas
 * Rows that are whole aligned vectors are read V elements at a time, other rows one element at a time. */
#include "mhc_cuda.cuh"

enum { THREADS = MHC_CUDA_THREADS, WARPS = THREADS / 32, STREAMS = 4 };

/* V elements in their storage type. */
template <typename E, int V> struct raw_vector {
    cot_vector<E, V> raw;

    __device__ __forceinline__ void load(const E *source)
    {
        raw = cot_load_vector<E, V>(source);
    }
    __device__ __forceinline__ void unpack(float (&values)[V]) const
    {
        cot_unpack(raw, values);
    }
};

template <typename E> struct raw_vector<E, 1> {
    E raw;

    __device__ __forceinline__ void load(const E *source)
    {
        raw = *source;
    }
    __device__ __forceinline__ void unpack(float (&values)[1]) const
    {
        values[0] = cot_to_f32(raw);
    }
};

template <typename E, int V> static __device__ __forceinline__ void store_vector(E *to, const float (&values)[V])
{
    if constexpr (V == 1)
        cot_from_f32(to, values[0]);
    else
        cot_store_vector<E, V>(to, values);
}

/* ---- forward ------------------------------------------------------------------------------------------ */

template <typename E, int V>
static __device__ __forceinline__ void compute_h_in(const mhc_call &c, int64_t token, const float *h_pre)
{
    const E *x = (const E *)c.x.data + token_offset(c, c.x, token);
    E *to = (E *)c.h_in.data + token_offset(c, c.h_in, token);
    for (int64_t d = threadIdx.x * V; d < c.D; d += THREADS * V) {
        float sum[V] = {0};
        for (int first = 0; first < c.n; first += STREAMS) {
            raw_vector<E, V> raw[STREAMS];
#pragma unroll
            for (int i = 0; i < STREAMS; i++)
                if (first + i < c.n)
                    raw[i].load(x + (first + i) * c.x.stride[2] + (V == 1 ? d * c.x.stride[3] : d));
#pragma unroll
            for (int i = 0; i < STREAMS; i++)
                if (first + i < c.n) {
                    float values[V];
                    raw[i].unpack(values);
#pragma unroll
                    for (int v = 0; v < V; v++)
                        sum[v] = fmaf(h_pre[first + i], values[v], sum[v]);
                }
        }
        store_vector<E, V>(to + (V == 1 ? d * c.h_in.stride[2] : d), sum);
    }
}

template <typename E, int V> static __device__ __forceinline__ void epilogue(const mhc_call &c)
{
    __shared__ float group_sums[THREADS], sums[MHC_CUDA_SUMS(MHC_CUDA_MAX_N)], h_pre[MHC_CUDA_MAX_N];
    const int n = c.n, M = n * n + 2 * n, S = MHC_CUDA_SUMS(n), groups = THREADS / S, tid = threadIdx.x;
    /* the last tokens come first: part of their x is still in the L2 cache */
    const int64_t token = c.tokens - 1 - blockIdx.x;
    if (tid < groups * S) {
        const float *source = c.sums + token * c.slices * S + tid % S;
        float sum = 0.0f;
#pragma unroll 4
        for (int64_t slice = tid / S; slice < c.slices; slice += groups)
            sum += source[slice * S];
        group_sums[tid] = sum;
    }
    __syncthreads();
    if (tid < S) {
        float sum = group_sums[tid];
        for (int g = 1; g < groups; g++)
            sum += group_sums[g * S + tid];
        sums[tid] = sum;
    }
    __syncthreads();
    if (tid < M) {
        const float inv_rms = 1.0f / sqrtf(sums[M] / (float)(n * c.D) + c.norm_eps);
        const float alpha = load_f32(c.alpha, alpha_index(n, tid) * c.alpha.stride[0]);
        const float z = fmaf(alpha, sums[tid] * inv_rms, load_f32(c.bias, tid * c.bias.stride[0]));
        const float value = coefficient(c, n, tid, z);
        store_coefficient(c, n, token, tid, sums[tid], value);
        if (tid < n)
            h_pre[tid] = value;
        if (tid == 0 && present(c.inv_rms))
            store_f32(c.inv_rms, token_offset(c, c.inv_rms, token), inv_rms);
    }
    __syncthreads();
    if (present(c.h_in))
        compute_h_in<E, V>(c, token, h_pre);
}

/* ---- backward ----------------------------------------------------------------------------------------- */

/* Computes dh_pre of the token in the first n elements of `to`. */
template <typename E, int V>
static __device__ __forceinline__ void compute_dh_pre(const mhc_call &c, int64_t token, float *to)
{
    __shared__ float warp_sums[WARPS][MHC_CUDA_MAX_N];
    const E *x = (const E *)c.x.data + token_offset(c, c.x, token);
    const E *dh_in = (const E *)c.dh_in.data + token_offset(c, c.dh_in, token);
    float sums[MHC_CUDA_MAX_N] = {0};
    for (int64_t d = threadIdx.x * V; d < c.D; d += THREADS * V) {
        raw_vector<E, V> raw_dh_in;
        float dh_in_values[V];
        raw_dh_in.load(dh_in + (V == 1 ? d * c.dh_in.stride[2] : d));
#pragma unroll
        for (int first = 0; first < MHC_CUDA_MAX_N; first += STREAMS) {
            raw_vector<E, V> raw[STREAMS];
            if (first >= c.n)
                break;
#pragma unroll
            for (int i = 0; i < STREAMS; i++)
                if (first + i < c.n)
                    raw[i].load(x + (first + i) * c.x.stride[2] + (V == 1 ? d * c.x.stride[3] : d));
            if (first == 0)
                raw_dh_in.unpack(dh_in_values);
#pragma unroll
            for (int i = 0; i < STREAMS; i++)
                if (first + i < c.n) {
                    float values[V], run = 0.0f;
                    raw[i].unpack(values);
#pragma unroll
                    for (int v = 0; v < V; v++)
                        run = fmaf(values[v], dh_in_values[v], run);
                    sums[first + i] += run;
                }
        }
    }
#pragma unroll
    for (int i = 0; i < MHC_CUDA_MAX_N; i++)
        if (i < c.n) {
#pragma unroll
            for (int width = 16; width >= 1; width /= 2)
                sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], width);
            if (threadIdx.x % 32 == 0)
                warp_sums[threadIdx.x / 32][i] = sums[i];
        }
    __syncthreads();
    if (threadIdx.x < c.n) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++)
            sum += warp_sums[warp][threadIdx.x];
        to[threadIdx.x] = sum;
    }
}

/* Index in mix_terms of a term of row j: see mhc_call. */
static __device__ __forceinline__ int64_t mix_index(const mhc_call &c, int64_t token, int rows, int term, int j)
{
    if (c.mix_tile == 0)
        return (term * c.tokens + token) * rows + j;
    const int64_t tile = token / c.mix_tile;
    const int row = (int)(token % c.mix_tile), unit = j % 16 / 8 ^ row / 4 % 2;
    return (((tile * MHC_CUDA_MMA_TERMS + term) * (rows / 16) + j / 16) * c.mix_tile + row) * 16 + unit * 8 + j % 8;
}

/* Rows from M on are zero. */
static __device__ __forceinline__ void store_mix_terms(const mhc_call &c, int n, int64_t token, int j, float dh_mix)
{
    const int rows = MHC_CUDA_MMA_ROWS(MHC_CUDA_MMA_M(n));
    if (c.mix_terms == nullptr || j >= rows)
        return;
    dh_mix *= (float)MHC_CUDA_MIX_SCALE;
#pragma unroll
    for (int term = 0; term < MHC_CUDA_MMA_TERMS; term++) {
        const __nv_bfloat16 value = __float2bfloat16_rn(dh_mix);
        c.mix_terms[mix_index(c, token, rows, term, j)] = __bfloat16_as_ushort(value);
        dh_mix -= __bfloat162float(value);
    }
}

/* All other inputs are loaded before dh_pre is computed. Afterwards they would be the only loads in flight. */
template <typename E, int V> static __device__ __forceinline__ void records(const mhc_call &c)
{
    __shared__ float dh_pre[MHC_CUDA_MAX_N], products[THREADS];
    const int n = c.n, M = n * n + 2 * n, j = threadIdx.x;
    const int64_t token = blockIdx.x;
    if (token >= c.tokens) { /* padding of the last tile: its x is read as zero */
        if (c.records != nullptr && j < (int)(sizeof(mhc_token_record) / 4))
            ((uint32_t *)&c.records[token])[j] = 0;
        store_mix_terms(c, n, token, j, 0.0f);
        return;
    }
    float dz = 0.0f, dh_mix = 0.0f, du = 0.0f, h_pre = 0.0f, h_mix = 0.0f, alpha = 0.0f;
    const float inv_rms = load_f32(c.inv_rms, token_offset(c, c.inv_rms, token));
    if (j < M) {
        dz = load_dz(c, n, token, j);
        h_mix = load_f32(c.h_mix, token_offset(c, c.h_mix, token) + j * c.h_mix.stride[2]);
        alpha = load_f32(c.alpha, alpha_index(n, j) * c.alpha.stride[0]);
    }
    if (j < n)
        h_pre = load_f32(c.h_pre, token_offset(c, c.h_pre, token) + j * c.h_pre.stride[2]);
    compute_dh_pre<E, V>(c, token, dh_pre);
    if (j < n) { /* this thread's dh_pre */
        const float sigma = h_pre - c.hc_eps;
        dz = dh_pre[j] * sigma * (1.0f - sigma);
    }
    if (j < M) {
        du = alpha * dz;
        dh_mix = du * inv_rms;
        c.dz[token * M + j] = dz;
        c.dh_mix[token * M + j] = dh_mix;
    }
    products[j] = du * h_mix;
    store_mix_terms(c, n, token, j, dh_mix);
    __syncthreads();
    mhc_token_record *record = c.records == nullptr ? nullptr : &c.records[token];
    if (j < 32) {
        static_assert(MHC_CUDA_MAX_M <= 96, "three terms per lane must cover all rows of phi");
        float sum = products[j] + products[j + 32] + products[j + 64];
#pragma unroll
        for (int width = 16; width >= 1; width /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, width);
        const float factor = -sum * inv_rms * inv_rms * inv_rms / (float)(n * c.D);
        if (j == 0)
            c.factor[token] = factor;
        if (j == 0 && record != nullptr)
            record->factor = factor;
    }
    if (record == nullptr || j >= M)
        return;
    if (j < n)
        record->h_pre[j] = h_pre;
    float rest = dh_mix * (float)MHC_CUDA_MIX_SCALE;
#pragma unroll
    for (int term = 0; term < 3; term++) {
        const __nv_bfloat16 value = __float2bfloat16_rn(rest);
        record->terms[term][j] = __bfloat16_as_ushort(value);
        rest -= __bfloat162float(value);
    }
}

/* ---- instances ---------------------------------------------------------------------------------------- */

#define INSTANCE(name, suffix, element, vector)                       \
    extern "C" __global__ void __launch_bounds__(THREADS)             \
        mhc_pre_##name##_##suffix(const __grid_constant__ mhc_call c) \
    {                                                                 \
        name<element, vector>(c);                                     \
    }
#define INSTANCES(name)                    \
    INSTANCE(name, f32, float, 4)          \
    INSTANCE(name, f16, __half, 8)         \
    INSTANCE(name, bf16, __nv_bfloat16, 8) \
    INSTANCE(name, any_f32, float, 1)      \
    INSTANCE(name, any_f16, __half, 1)     \
    INSTANCE(name, any_bf16, __nv_bfloat16, 1)

INSTANCES(epilogue)
INSTANCES(records)
