/* SPDX-License-Identifier: Apache-2.0
 * mhc_post_pre_sm90.cuh: post in shared memory, for post_pre's forward (mhc_pre_fwd_sm90.cu) and for the records of its
 * backward (mhc_pre_bwd_cluster_sm90.cu). Traits: fwd_traits or bwd_traits. */
#ifndef COT_MHC_POST_PRE_SM90_CUH
#define COT_MHC_POST_PRE_SM90_CUH

#include "mhc_mma.cuh"

/* A column of h_res of one token, or its h_post. */
template <int N> struct __align__(N * sizeof(float)) post_column
{
    float of[N];
};

/* Loads of the coefficients of post of a tile, by the reducer threads. A thread has one coefficient of every TOKENS-th
 * token. Each token has the columns of h_res, then h_post. */
template <typename Traits, int THREADS> struct post_coefficient_loads {
    enum { N = Traits::N, FLOATS = N * N + N, TOKENS = THREADS / FLOATS };
    const float *from;
    int64_t stride; /* between tokens, for any B */
    int token, place;

    /* Call: mhc_post_pre_call or mhc_post_pre_records_call. In pre there are no such loads. */
    template <typename Call> __device__ __forceinline__ post_coefficient_loads(const Call &p, int thread)
    {
        if constexpr (Traits::POST_PRE) {
            const int ij = thread % FLOATS, i = ij / N, o = ij % N;
            const mhc_array &a = i < N ? p.h_res : p.h_post;
            token = thread < TOKENS * FLOATS ? thread / FLOATS : Traits::TILE; /* beyond the tile: no coefficient */
            place = thread / FLOATS * FLOATS + (i < N ? o * N + i : ij);
            stride = a.stride[p.call.T > 1 ? 1 : 0];
            from = (const float *)a.data + (i < N ? i * a.stride[2] + o * a.stride[3] : o * a.stride[2]);
        }
    }

    /* Zeros for tokens that do not exist. */
    __device__ __forceinline__ void start(float *to, int first_token, int tokens) const
    {
        const uint32_t address = cot_shared_address(to + place);
#pragma unroll TOKENS> 1 ? Traits::TILE : 2
        for (int more = 0; more < Traits::TILE; more += TOKENS)
            if (token + more < Traits::TILE) {
                const int64_t source = first_token + token + more;
                const bool valid = source < tokens;
                cot_cp_async_zfill<4>(valid, address + more * FLOATS * 4, from + (valid ? source * stride : 0));
            }
    }
};

/* Replaces x of one token with y: 16 bytes in each of CHUNKS chunks that are STRIDE chunks apart. is_inside(k): whether
 * the k-th of them is below D. Columns beyond D stay zero: an infinite h_post would make them NaN.
 * The halves of 8 bytes keep few registers in use. Tokens with an odd number begin with the other half: the tokens
 * that are loaded together then use all banks. */
template <typename Traits, int CHUNKS, int STRIDE, typename Inside>
static __device__ __forceinline__ void apply_post(unsigned char *x, const unsigned char *f,
                                                  const post_column<Traits::N> (&coefficients)[Traits::N + 1], int odd,
                                                  Inside is_inside)
{
    typedef typename Traits::E E;
    constexpr int N = Traits::N;
    constexpr bool IS_F32 = sizeof(E) == 4;
    constexpr int PAIRS = IS_F32 ? 1 : 2; /* of columns in 8 bytes */
    const post_column<N> h_post = coefficients[N];
#pragma unroll
    for (int half = 0; half < 2 * CHUNKS; half++) {
        const int offset = half / 2 * STRIDE * Traits::TILE * 128 + (half % 2 ^ odd) * 8;
        float2 pairs[N + 1][PAIRS]; /* of x, then of f */
#pragma unroll
        for (int i = 0; i <= N; i++) {
            const uint2 raw = *(const uint2 *)((i < N ? x + i * Traits::STREAM_BYTES : f) + offset);
            if constexpr (IS_F32)
                pairs[i][0] = {__uint_as_float(raw.x), __uint_as_float(raw.y)};
            else
                pairs[i][0] = cot_unpack_pair<E>(raw.x), pairs[i][1] = cot_unpack_pair<E>(raw.y);
        }
        uint2 y[N];
#pragma unroll
        for (int o = 0; o < N; o++) {
            const post_column<N> column = coefficients[o];
            uint32_t words[2];
#pragma unroll
            for (int w = 0; w < PAIRS; w++) {
                float2 sum = {h_post.of[o] * pairs[N][w].x, h_post.of[o] * pairs[N][w].y};
#pragma unroll
                for (int i = 0; i < N; i++)
                    sum = {fmaf(column.of[i], pairs[i][w].x, sum.x), fmaf(column.of[i], pairs[i][w].y, sum.y)};
                if constexpr (IS_F32)
                    words[0] = __float_as_uint(sum.x), words[1] = __float_as_uint(sum.y);
                else
                    words[w] = cot_pack_pair<E>(sum.x, sum.y);
            }
            y[o] = {words[0], words[1]};
        }
        if (is_inside(half / 2))
#pragma unroll
            for (int o = 0; o < N; o++)
                *(uint2 *)(x + o * Traits::STREAM_BYTES + offset) = y[o];
    }
}

#endif
