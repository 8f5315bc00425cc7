/* SPDX-License-Identifier: Apache-2.0
 * mhc_post_pre_sm90.cuh: post in shared memory, for post_pre's forward (mhc_pre_fwd_sm90.cu) and for the records of its
 * backward (mhc_pre_bwd_cluster_sm90.cu). Traits: fwd_traits or bwd_traits. */
#ifndef COT_MHC_POST_PRE_SM90_CUH
#define COT_MHC_POST_PRE_SM90_CUH

#include "mhc_mma.cuh"

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

/* Replaces x of one token with y: 16 bytes of a chunk; with CHUNKS = 2 also the same 16 bytes of the second chunk after it.
 * The halves of 8 bytes keep few registers in use. Tokens with an odd number begin with the other half: the tokens
 * that are loaded together then use all banks. */
template <typename Traits, int CHUNKS>
static __device__ __forceinline__ void apply_post(unsigned char *x, const unsigned char *f,
                                                  const float4 (&coefficients)[Traits::N + 1], int odd)
{
    typedef typename Traits::E E;
    constexpr int N = Traits::N;
    static_assert(N == 4 && sizeof(E) == 2, "post_pre is for n = 4, f16 and bf16");
    const float4 h_post = coefficients[N];
    const float of_f[N] = {h_post.x, h_post.y, h_post.z, h_post.w};
#pragma unroll
    for (int half = 0; half < 2 * CHUNKS; half++) {
        const int offset = half / 2 * 2 * Traits::TILE * 128 + (half % 2 ^ odd) * 8;
        float2 pairs[N + 1][2]; /* of x, then of f */
#pragma unroll
        for (int i = 0; i <= N; i++) {
            const uint2 raw = *(const uint2 *)((i < N ? x + i * Traits::STREAM_BYTES : f) + offset);
            pairs[i][0] = cot_unpack_pair<E>(raw.x), pairs[i][1] = cot_unpack_pair<E>(raw.y);
        }
        uint2 y[N];
#pragma unroll
        for (int o = 0; o < N; o++) {
            const float4 column = coefficients[o];
            const float of_x[N] = {column.x, column.y, column.z, column.w};
            uint32_t words[2];
#pragma unroll
            for (int w = 0; w < 2; w++) {
                float2 sum = {of_f[o] * pairs[N][w].x, of_f[o] * pairs[N][w].y};
#pragma unroll
                for (int i = 0; i < N; i++)
                    sum = {fmaf(of_x[i], pairs[i][w].x, sum.x), fmaf(of_x[i], pairs[i][w].y, sum.y)};
                words[w] = cot_pack_pair<E>(sum.x, sum.y);
            }
            y[o] = {words[0], words[1]};
        }
#pragma unroll
        for (int o = 0; o < N; o++)
            *(uint2 *)(x + o * Traits::STREAM_BYTES + offset) = y[o];
    }
}

#endif
