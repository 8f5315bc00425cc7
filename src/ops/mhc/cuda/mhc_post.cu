/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_post.cu: post for contiguous d, rows that are whole aligned vectors, and n as a constant.
 *
 * A block handles one token, whose coefficients are in shared memory. Every element is read once. The backward computes
 * dh_post and dh_res in the same pass; it sums by thread, then over lanes, then over warps. */
#include "mhc_cuda.cuh"

#include "../../../cuda/device/ptx.cuh"

enum {
    WARPS = MHC_CUDA_POST_THREADS / 32,
    MAX_TERMS = 32 /* products that a thread adds before the sum over lanes */
};

/* Elements in one access: 16 bytes, or 8 bytes where the vectors of n streams would not fit in the registers. */
template <typename E, int N> constexpr int vector_of = (N > 4 ? 8 : 16) / (int)sizeof(E);

template <int N> struct coefficients {
    float value[N * N + N]; /* h_res[i][o], then h_post */
};

/* The coefficients that this thread loads. The loads overlap those of the first elements. */
template <int N> struct thread_coefficients {
    float value[(N * N + N + 31) / 32];
};

template <int N> static __device__ __forceinline__ thread_coefficients<N> load_coefficients(const mhc_call &c)
{
    const int64_t token = blockIdx.x, A_offset = token_offset(c, c.h_res, token),
                  h_post_offset = token_offset(c, c.h_post, token);
    thread_coefficients<N> loaded;
#pragma unroll
    for (int r = 0; r < (N * N + N + 31) / 32; r++) {
        const int ij = (int)(threadIdx.x + r * blockDim.x);
        if (ij < N * N)
            loaded.value[r] = load_f32(c.h_res, A_offset + ij / N * c.h_res.stride[2] + ij % N * c.h_res.stride[3]);
        else if (ij < N * N + N)
            loaded.value[r] = load_f32(c.h_post, h_post_offset + (ij - N * N) * c.h_post.stride[2]);
    }
    return loaded;
}

template <int N>
static __device__ __forceinline__ void store_coefficients(const thread_coefficients<N> &loaded, coefficients<N> &s)
{
#pragma unroll
    for (int r = 0; r < (N * N + N + 31) / 32; r++)
        if (threadIdx.x + r * blockDim.x < N * N + N)
            s.value[threadIdx.x + r * blockDim.x] = loaded.value[r];
    __syncthreads();
}

/* Loads through the L1 cache. Bypassing L1, as the other streaming loads do, makes the backward a few percent slower on
 * an H200. */
template <typename E, int V> static __device__ __forceinline__ cot_vector<E, V> load_row(const E *source)
{
    cot_vector<E, V> v;
    static_assert(cot_vector<E, V>::words == 2 || cot_vector<E, V>::words == 4, "a vector must have 8 or 16 bytes");
    if constexpr (cot_vector<E, V>::words == 4) {
        const uint4 words = __ldg((const uint4 *)source);
        v.raw.word[0] = words.x, v.raw.word[1] = words.y, v.raw.word[2] = words.z, v.raw.word[3] = words.w;
    } else {
        const uint2 words = __ldg((const uint2 *)source);
        v.raw.word[0] = words.x, v.raw.word[1] = words.y;
    }
    return v;
}

/* The elements of word w of a vector. */
template <typename E, int V>
static __device__ __forceinline__ void unpack_word(const cot_vector<E, V> &v, int w, float (&values)[4 / sizeof(E)])
{
    cot_vector<E, 4 / sizeof(E)> single;
    single.raw.word[0] = v.raw.word[w];
    cot_unpack(single, values);
}

/* Elements w * P to w * P + P - 1 of a vector, with P elements of another type in a word. */
template <int P, typename G, int V>
static __device__ __forceinline__ void unpack_part(const cot_vector<G, V> &v, int w, float (&values)[P])
{
    if constexpr (P * sizeof(G) == 4)
        unpack_word(v, w, values);
    else
#pragma unroll
        for (int p = 0; p < P; p++)
            values[p] = __uint_as_float(v.raw.word[w * P + p]);
}

template <typename E, int V>
static __device__ __forceinline__ void pack_word(cot_vector<E, V> &v, int w, const float (&values)[4 / sizeof(E)])
{
    cot_vector<E, 4 / sizeof(E)> single;
    cot_pack(single, values);
    v.raw.word[w] = single.raw.word[0];
}

template <typename E, int N> static __device__ __forceinline__ void forward(const mhc_call &c)
{
    constexpr int V = vector_of<E, N>, P = 4 / (int)sizeof(E);
    __shared__ coefficients<N> s;
    const int D = (int)c.D;
    const int64_t token = blockIdx.x;
    const E *x = (const E *)c.x.data + token_offset(c, c.x, token),
            *f = (const E *)c.f.data + token_offset(c, c.f, token);
    E *y = (E *)c.y.data + token_offset(c, c.y, token);
    const thread_coefficients<N> loaded = load_coefficients<N>(c);
    for (int begin = 0; begin < D; begin += (int)blockDim.x * V) {
        const int d = begin + (int)threadIdx.x * V;
        cot_vector<E, V> raw_x[N], raw_f, out[N];
        if (d < D) {
            raw_f = load_row<E, V>(f + d);
#pragma unroll
            for (int i = 0; i < N; i++)
                raw_x[i] = load_row<E, V>(x + i * c.x.stride[2] + d);
        }
        if (begin == 0)
            store_coefficients(loaded, s);
        if (d >= D)
            break;
#pragma unroll
        for (int w = 0; w < V / P; w++) {
            float values[N][P], f_values[P];
            unpack_word(raw_f, w, f_values);
#pragma unroll
            for (int i = 0; i < N; i++)
                unpack_word(raw_x[i], w, values[i]);
#pragma unroll
            for (int o = 0; o < N; o++) {
                float sum[P];
#pragma unroll
                for (int p = 0; p < P; p++) {
                    sum[p] = s.value[N * N + o] * f_values[p];
#pragma unroll
                    for (int i = 0; i < N; i++)
                        sum[p] = fmaf(s.value[i * N + o], values[i][p], sum[p]);
                }
                pack_word(out[o], w, sum);
            }
        }
#pragma unroll
        for (int o = 0; o < N; o++)
            cot_store_words<cot_vector<E, V>::words>(y + o * c.y.stride[2] + d, out[o].raw);
    }
}

/* Layout of the sums: dh_res[i,o] at i*N+o, dh_post[o] at N*N+o, padding after that. */
template <int N> constexpr int sum_count = (N * N + N + 31) / 32 * 32;

template <int N>
static __device__ __forceinline__ void store_sums(const mhc_call &c, const float (&total)[sum_count<N> / 32])
{
    __shared__ float warp_sums[WARPS][sum_count<N>];
    const int64_t token = blockIdx.x;
#pragma unroll
    for (int i = 0; i < sum_count<N> / 32; i++)
        warp_sums[threadIdx.x / 32][threadIdx.x % 32 * (sum_count<N> / 32) + i] = total[i];
    __syncthreads();
    for (int ij = threadIdx.x; ij < N * N + N; ij += blockDim.x) {
        float sum = 0.0f;
        for (int warp = 0; warp < blockDim.x / 32; warp++)
            sum += warp_sums[warp][ij];
        if (ij < N * N && present(c.dh_res))
            store_f32(c.dh_res,
                      token_offset(c, c.dh_res, token) + ij / N * c.dh_res.stride[2] + ij % N * c.dh_res.stride[3],
                      sum);
        if (ij >= N * N && present(c.dh_post))
            store_f32(c.dh_post, token_offset(c, c.dh_post, token) + (ij - N * N) * c.dh_post.stride[2], sum);
    }
}

/* Prefetches x, dy and f of a step of the backward into the L2 cache. The constructor prefetches the first step. Without
 * AHEAD, no other step is prefetched, and each thread prefetches the lines of its own elements. */
template <bool AHEAD, typename E, typename G, int N, int V> struct prefetcher {
    __device__ __forceinline__ prefetcher(const mhc_call &c, const E *x, const E *f, const G *dy)
    {
        const int first = (int)threadIdx.x * V;
        if (first >= (int)c.D)
            return;
        cot_prefetch_l2(f + first);
#pragma unroll
        for (int i = 0; i < N; i++) {
            cot_prefetch_l2(x + i * c.x.stride[2] + first);
            cot_prefetch_l2(dy + i * c.dy.stride[2] + first);
        }
    }
    __device__ __forceinline__ void prefetch(int) const
    {
    }
};

/* AHEAD is for n > 4: its blocks have few threads, which do not keep enough loads in flight. A step has blockDim.x V columns
 * of all rows, of at most 8 bytes for each thread. So x and dy have at most one line of 128 bytes for each thread, if rows
 * begin at multiples of 128 bytes. Of other rows a step misses a part of a line. */
template <typename E, int N, int V> struct prefetcher<true, E, E, N, V> {
    const char *line, *f_line; /* of the first step */
    int limit, f_limit;        /* steps whose first column is below this have the line */

    __device__ __forceinline__ prefetcher(const mhc_call &c, const E *x, const E *f, const E *dy)
    {
        static_assert(2 * N * V * sizeof(E) <= 128, "one line for each thread");
        const int lines = ((int)blockDim.x * V * (int)sizeof(E) + 127) / 128, /* of a row */
            row = (int)threadIdx.x / lines, number = (int)threadIdx.x % lines;
        line = (const char *)(row < N ? x + row * c.x.stride[2] : dy + (row - N) * c.dy.stride[2]) + number * 128;
        limit = row < 2 * N ? (int)c.D - number * 128 / (int)sizeof(E) : 0;
        f_line = (const char *)f + threadIdx.x * 128;
        f_limit = (int)threadIdx.x < lines ? (int)c.D - (int)threadIdx.x * 128 / (int)sizeof(E) : 0;
        prefetch(0);
    }

    /* begin: first column of the step */
    __device__ __forceinline__ void prefetch(int begin) const
    {
        if (begin < limit)
            cot_prefetch_l2(line + (int64_t)begin * (int)sizeof(E));
        if (begin < f_limit)
            cot_prefetch_l2(f_line + (int64_t)begin * (int)sizeof(E));
    }
};

/* G: type of dy. In post_pre, dy is the gradient g of y in float32. */
template <typename E, int N, typename G = E> static __device__ __forceinline__ void backward(const mhc_call &c)
{
    constexpr int V = sizeof(G) == sizeof(E) ? vector_of<E, N> : 4, P = 4 / (int)sizeof(E);
    __shared__ coefficients<N> s;
    const int D = (int)c.D;
    const int64_t token = blockIdx.x;
    const E *x = (const E *)c.x.data + token_offset(c, c.x, token),
            *f = (const E *)c.f.data + token_offset(c, c.f, token);
    const G *dy = (const G *)c.dy.data + token_offset(c, c.dy, token);
    E *dx = (E *)c.dx.data + token_offset(c, c.dx, token), *df = (E *)c.df.data + token_offset(c, c.df, token);
    float sums[sum_count<N>] = {0}, total[sum_count<N> / 32] = {0};
    int terms = 0;
    const thread_coefficients<N> loaded = load_coefficients<N>(c);
    /* The first step is only prefetched: registers for the loads are free only after the coefficients have arrived. */
    const prefetcher<(N > 4 && sizeof(G) == sizeof(E)), E, G, N, V> ahead(c, x, f, dy);
    store_coefficients(loaded, s);
    for (int begin = 0; begin < D; begin += (int)blockDim.x * V) {
        const int d = begin + (int)threadIdx.x * V;
        ahead.prefetch(begin + (int)blockDim.x * V);
        if (d < D) {
            cot_vector<E, V> raw_x[N], raw_f = load_row<E, V>(f + d);
            cot_vector<G, V> raw_dy[N];
#pragma unroll
            for (int i = 0; i < N; i++)
                raw_dy[i] = load_row<G, V>(dy + i * c.dy.stride[2] + d);
#pragma unroll
            for (int i = 0; i < N; i++)
                raw_x[i] = load_row<E, V>(x + i * c.x.stride[2] + d);
#pragma unroll
            for (int w = 0; w < V / P; w++) { /* df and dx replace f and x in the registers */
                float dy_values[N][P], f_values[P], out[P];
                unpack_word(raw_f, w, f_values);
#pragma unroll
                for (int o = 0; o < N; o++) {
                    unpack_part<P>(raw_dy[o], w, dy_values[o]);
#pragma unroll
                    for (int p = 0; p < P; p++) {
                        out[p] = o == 0 ? s.value[N * N] * dy_values[0][p]
                                        : fmaf(s.value[N * N + o], dy_values[o][p], out[p]);
                        sums[N * N + o] = fmaf(f_values[p], dy_values[o][p], sums[N * N + o]);
                    }
                }
                pack_word(raw_f, w, out);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    float x_values[P];
                    unpack_word(raw_x[i], w, x_values);
#pragma unroll
                    for (int o = 0; o < N; o++)
#pragma unroll
                        for (int p = 0; p < P; p++) {
                            out[p] = o == 0 ? s.value[i * N] * dy_values[0][p]
                                            : fmaf(s.value[i * N + o], dy_values[o][p], out[p]);
                            sums[i * N + o] = fmaf(x_values[p], dy_values[o][p], sums[i * N + o]);
                        }
                    pack_word(raw_x[i], w, out);
                }
            }
            if (present(c.df))
                cot_store_words<cot_vector<E, V>::words>(df + d, raw_f.raw);
            if (present(c.dx))
#pragma unroll
                for (int i = 0; i < N; i++)
                    cot_store_words<cot_vector<E, V>::words>(dx + i * c.dx.stride[2] + d, raw_x[i].raw);
        }
        terms += V;
        /* The lanes' sums are added to the total after MAX_TERMS terms, and at the end of the row. */
        if (terms < MAX_TERMS && begin + (int)blockDim.x * V < D)
            continue;
        terms = 0;
        sum_over_lanes(sums);
#pragma unroll
        for (int i = 0; i < sum_count<N> / 32; i++)
            total[i] += sums[i];
#pragma unroll
        for (int i = 0; i < sum_count<N>; i++)
            sums[i] = 0.0f;
    }
    store_sums<N>(c, total);
}

#define INSTANCE(n, suffix, element)                                                                           \
    extern "C" __global__ void __launch_bounds__(MHC_CUDA_POST_THREADS, (n) <= 4 ? 3 : 2)                      \
        mhc_post_fwd_n##n##_##suffix(const __grid_constant__ mhc_call c)                                       \
    {                                                                                                          \
        forward<element, n>(c);                                                                                \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__((n) <= 4 ? MHC_CUDA_POST_THREADS : MHC_CUDA_POST_BWD_THREADS, \
                                                 (n) <= 4 ? 2 : 3)                                             \
        mhc_post_bwd_n##n##_##suffix(const __grid_constant__ mhc_call c)                                       \
    {                                                                                                          \
        backward<element, n>(c);                                                                               \
    }
#define F32_INSTANCE(n, suffix, element)                                                  \
    extern "C" __global__ void __launch_bounds__(MHC_CUDA_POST_THREADS, (n) <= 4 ? 2 : 1) \
        mhc_post_bwd_f32_n##n##_##suffix(const __grid_constant__ mhc_call c)              \
    {                                                                                     \
        backward<element, n, float>(c);                                                   \
    }
#define INSTANCES(n)                 \
    INSTANCE(n, f32, float)          \
    INSTANCE(n, f16, __half)         \
    INSTANCE(n, bf16, __nv_bfloat16) \
    F32_INSTANCE(n, f16, __half)     \
    F32_INSTANCE(n, bf16, __nv_bfloat16)

INSTANCES(1)
INSTANCES(2)
INSTANCES(3)
INSTANCES(4)
INSTANCES(5)
INSTANCES(6)
INSTANCES(7)
INSTANCES(8)
