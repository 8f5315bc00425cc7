/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_sm90.cuh: the matrix products of pre's backward for Hopper: dphi_part and dx of a warp's columns of a
 * tile.
 *
 *   dphi_part += x^T dh_mix
 *       dphi before the multiplication by gamma, over a part of the tokens. dh_mix has three bf16 terms. Tensor cores
 *       truncate sums, so each tile's product is added to dphi_part by float32 additions. dphi_part stays in registers
 *       until the end. An f16 x is multiplied as the two bf16 terms of which it is the sum.
 *   dx = dh_mix (phi gamma) + factor x + h_pre dh_in (+ dx_post)
 *       Uses the first two terms of dh_mix, and the two of phi gamma. The product of the second terms is left out: the
 *       error is at most 2^-15 of each product (the op's README, "Precision"). factor is c of the formulas, because c
 *       is the call. */
#ifndef COT_MHC_PRE_BWD_SM90_CUH
#define COT_MHC_PRE_BWD_SM90_CUH

#include "mhc_mma.cuh"

enum {
    TILE = MHC_SM90_TILE,
    CHUNK_BYTES = TILE * 128, /* bytes of a chunk of one tile */
    MMA_WARPS = 8,
    COLUMN_GROUPS = MHC_SM90_K / 16 / MMA_WARPS, /* groups of an MMA warp; a group is 16 columns of one stream */
    TERMS = 3,
    TERM_OCTETS = 3 /* 16-byte units of one term of a record */
};

/* Sizes that depend on the number of streams, and what they say about groups and warps. An MMA warp has COLUMNS columns of
 * all streams. */
template <int N_> struct bwd_sizes {
    enum {
        N = N_,
        M = N * (N + 2),
        ELEMENT = 2, /* bytes */
        OCTETS = M / 8,
        TILE = ::TILE,
        CHUNKS = MHC_SM90_COLUMNS_OF(N) / MHC_SM90_CHUNK_COLUMNS, /* chunks of a block in each stream */
        STREAM_BYTES = CHUNKS * CHUNK_BYTES,
        X_BYTES = N * STREAM_BYTES,
        STAGE_BYTES = X_BYTES + STREAM_BYTES,
        BLOCK_COLUMNS = MHC_SM90_COLUMNS_OF(N), /* of a block in each stream */
        COLUMNS = BLOCK_COLUMNS / MMA_WARPS,    /* of an MMA warp in each stream */
        CHUNK_WARPS = MHC_SM90_CHUNK_COLUMNS / COLUMNS,
        GROUPS = COLUMN_GROUPS, /* of an MMA warp */
        STREAM_GROUPS = COLUMNS / 16,
        PAIRS = OCTETS / 2 /* pairs of octets: one m16n8k16 multiplies both */
    };
    /* Of a group, counted from the warp's first column and stream. */
    static __device__ __forceinline__ constexpr int column_of(int group)
    {
        return group % STREAM_GROUPS * 16;
    }
    static __device__ __forceinline__ constexpr int stream_of(int group)
    {
        return group / STREAM_GROUPS;
    }
    /* Of a warp: its first column, chunk and stream in the block, and its first 16-byte unit in a chunk of 128 bytes. */
    static __device__ __forceinline__ uint32_t first_column(uint32_t warp)
    {
        return warp * COLUMNS;
    }
    static __device__ __forceinline__ uint32_t first_chunk(uint32_t warp)
    {
        return warp / CHUNK_WARPS;
    }
    static __device__ __forceinline__ uint32_t first_unit(uint32_t warp)
    {
        return warp % CHUNK_WARPS * (8 / CHUNK_WARPS);
    }
    static __device__ __forceinline__ uint32_t first_stream(uint32_t)
    {
        return 0;
    }
};

/* Wide blocks, for n = 4 and kernels without dx, which need no phi gamma in shared memory. An MMA warp has one half of each
 * chunk of one stream. */
struct wide_sizes {
    enum {
        N = MHC_SM90_N,
        M = MHC_SM90_M,
        ELEMENT = 2,
        OCTETS = M / 8,
        TILE = ::TILE,
        CHUNKS = MHC_SM90_WIDE_BLOCK_CHUNKS,
        STREAM_BYTES = CHUNKS * CHUNK_BYTES,
        X_BYTES = N * STREAM_BYTES,
        STAGE_BYTES = X_BYTES + STREAM_BYTES,
        BLOCK_COLUMNS = MHC_SM90_WIDE_COLUMNS,
        GROUPS = 2 * CHUNKS,
        STREAM_GROUPS = GROUPS
    };
    static __device__ __forceinline__ constexpr int column_of(int group)
    {
        return group / 2 * MHC_SM90_CHUNK_COLUMNS + group % 2 * 16;
    }
    static __device__ __forceinline__ constexpr int stream_of(int)
    {
        return 0;
    }
    static __device__ __forceinline__ uint32_t first_column(uint32_t warp)
    {
        return warp % 2 * 32;
    }
    static __device__ __forceinline__ uint32_t first_chunk(uint32_t)
    {
        return 0;
    }
    static __device__ __forceinline__ uint32_t first_unit(uint32_t warp)
    {
        return warp % 2 * 4;
    }
    static __device__ __forceinline__ uint32_t first_stream(uint32_t warp)
    {
        return warp / 2;
    }
};

typedef mhc_token_record token_record;
static_assert(sizeof(token_record) == 176, "must be an odd number of 16-byte units");

/* Terms of phi gamma as B fragments: two registers for each octet and group of a warp. */
template <int COUNT, int OCTETS> struct phi_fragments {
    uint2 words[MMA_WARPS][COUNT][OCTETS][32];

    __device__ __forceinline__ void store(int warp, int group, const uint32_t (&terms)[2 * OCTETS])
    {
#pragma unroll
        for (int v = 0; v < OCTETS; v++)
            words[warp][group][v][threadIdx.x % 32] = make_uint2(terms[2 * v], terms[2 * v + 1]);
    }
    __device__ __forceinline__ void load(int warp, int group, uint32_t (&terms)[2 * OCTETS]) const
    {
#pragma unroll
        for (int v = 0; v < OCTETS; v++) {
            const uint2 pair = words[warp][group][v][threadIdx.x % 32];
            terms[2 * v] = pair.x, terms[2 * v + 1] = pair.y;
        }
    }
};

/* The terms of phi gamma are divided by MHC_CUDA_MIX_SCALE. With f16 and dx_post, ptxas spills if the terms are scaled.
 * Those kernels divide the sums instead. */
template <typename E, bool ADD_POST>
constexpr float phi_scale = cot_is_f16<E> &&ADD_POST ? 1.0f : 1.0f / MHC_CUDA_MIX_SCALE;

/* Loads phi gamma times `scale` of the warp's columns and splits it into two bf16 terms. The first terms go to
 * shared memory. The second terms stay in registers. Those of groups from REGISTER_GROUPS on go to shared memory.
 *
 * All loads of the call are in flight before the first split: phi is often in memory, not in the L2 cache. */
template <int BEGIN, int END, int REGISTER_GROUPS, typename S>
static __device__ __forceinline__ void load_phi(const mhc_call &c, S &s, int64_t d, int warp, float scale,
                                                uint32_t (&second_terms)[REGISTER_GROUPS][2 * S::sizes::OCTETS])
{
    constexpr int OCTETS = S::sizes::OCTETS, PAIRS = S::sizes::PAIRS;
    const int lane = threadIdx.x % 32;
    const bool inside = d < c.D;
    float phi[END - BEGIN][2][OCTETS][2], weights[END - BEGIN][2]; /* [group][t][octet][row], [group][t] */
#pragma unroll
    for (int group = BEGIN; group < END; group++)
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const int64_t column = d + S::sizes::column_of(group) + t * 8 + lane / 4;
            weights[group - BEGIN][t] =
                present(c.gamma) && inside
                    ? load_f32(c.gamma, S::sizes::stream_of(group) * c.gamma.stride[0] + column * c.gamma.stride[1])
                    : 1.0f;
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    phi[group - BEGIN][t][octet][r] =
                        inside ? load_f32(c.phi, (octet * 8 + lane % 4 * 2 + r) * c.phi.stride[0] +
                                                     (S::sizes::stream_of(group) * c.D + column) * c.phi.stride[1])
                               : 0.0f;
        }
#pragma unroll
    for (int group = BEGIN; group < END; group++) {
        uint32_t first[2 * OCTETS], rest[2 * OCTETS];
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const float weight = weights[group - BEGIN][t] * scale;
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++) {
                const float(&values)[2] = phi[group - BEGIN][t][octet];
                uint32_t terms[2];
                cot_split_bf16(values[0] * weight, values[1] * weight, terms);
                /* Order: b0, b1 of the octet pair for columns 0-7, then for 8-15, then the last octet for both. */
                const int index = octet < 2 * PAIRS ? 2 * t + octet : 4 * PAIRS + t;
                first[index] = terms[0];
                rest[index] = terms[1];
            }
        }
        s.phi.store(warp, group, first);
        if constexpr (REGISTER_GROUPS < COLUMN_GROUPS)
            if (group >= REGISTER_GROUPS)
                s.second.store(warp, group - REGISTER_GROUPS, rest);
        if (group < REGISTER_GROUPS)
#pragma unroll
            for (int i = 0; i < 2 * OCTETS; i++)
                second_terms[group][i] = rest[i];
    }
    __syncwarp();
}

/* Address of the 16-byte unit of a group that the lane passes to ldmatrix. The matrix rows are the tile's tokens. */
template <typename Sizes> static __device__ __forceinline__ uint32_t unit_address(uint32_t first, int group)
{
    const int column = Sizes::column_of(group);
    return (first ^ (uint32_t)(column % MHC_SM90_CHUNK_COLUMNS * 2)) +
           (uint32_t)(Sizes::stream_of(group) * Sizes::STREAM_BYTES + column / MHC_SM90_CHUNK_COLUMNS * CHUNK_BYTES);
}

/* dphi_part += x^T dh_mix, for groups BEGIN to END - 1 and OCTETS octets of rows of phi from FIRST on. Each fragment of
 * dphi_part is [16 columns][8 rows of phi].
 *
 * The warp synchronizes after every STEP groups (Sizes::GROUPS: never). Otherwise the compiler loads further ahead, into
 * more registers, and puts some chains of dependent products after all others. */
template <typename E, typename Sizes, int BEGIN, int END, int STEP, int FIRST = 0, int OCTETS = Sizes::OCTETS>
static __device__ __forceinline__ void accumulate_dphi(uint32_t x, uint32_t records,
                                                       float (&dphi_part)[Sizes::GROUPS][Sizes::OCTETS][4])
{
    const int lane = threadIdx.x % 32;
    const uint32_t token = (uint32_t)(lane % 16);
    uint32_t B[TERMS * OCTETS + 1][2];
#pragma unroll
    for (int pair = 0; pair < TERMS * OCTETS; pair += 2) {
        /* The last pair has one octet only, and loads it twice. */
        const int last_index = TERMS * OCTETS - 1, next = pair + 1 < last_index ? pair + 1 : last_index;
        const int unit = pair / OCTETS * TERM_OCTETS + FIRST + pair % OCTETS,
                  next_unit = next / OCTETS * TERM_OCTETS + FIRST + next % OCTETS;
        uint32_t r[4];
        cot_ldmatrix_x4_trans(r, records + token * (uint32_t)sizeof(token_record) +
                                     (uint32_t)(lane < 16 ? unit : next_unit) * 16);
        B[pair][0] = r[0], B[pair][1] = r[1], B[pair + 1][0] = r[2], B[pair + 1][1] = r[3];
    }
#pragma unroll
    for (int group = BEGIN; group < END; group++) {
        uint32_t A[4];
        float product[OCTETS][4] = {0};
        if (group > BEGIN && group % STEP == 0)
            __syncwarp();
        cot_ldmatrix_x4_trans(A, unit_address<Sizes>(x, group));
        if constexpr (cot_is_f16<E>) {
            uint32_t low[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t terms[2];
                const float2 pair = cot_unpack_pair<E>(A[i]);
                cot_split_bf16(pair.x, pair.y, terms);
                A[i] = terms[0], low[i] = terms[1];
            }
            /* The second term of x skips the third term of dh_mix. */
#pragma unroll
            for (int term = TERMS - 2; term >= 0; term--)
#pragma unroll
                for (int octet = 0; octet < OCTETS; octet++)
                    cot_mma_bf16(product[octet], low[0], low[1], low[2], low[3], B[term * OCTETS + octet][0],
                                 B[term * OCTETS + octet][1]);
        }
#pragma unroll
        for (int term = TERMS - 1; term >= 0; term--)
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++)
                cot_mma_bf16(product[octet], A[0], A[1], A[2], A[3], B[term * OCTETS + octet][0],
                             B[term * OCTETS + octet][1]);
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                dphi_part[group][FIRST + octet][i] += product[octet][i];
    }
}

/* Computes dx and stores it over x in shared memory. */
template <typename E, bool ADD_POST, int REGISTER_GROUPS, typename S>
static __device__ __forceinline__ void compute_dx(S &s, uint32_t x, uint32_t dh_in, uint32_t dx_post,
                                                  const cot_pipeline_state<S::STAGES> &ring, int warp,
                                                  uint32_t post_parity,
                                                  const uint32_t (&second_terms)[REGISTER_GROUPS][2 * S::sizes::OCTETS])
{
    constexpr int OCTETS = S::sizes::OCTETS, STREAM_GROUPS = S::sizes::STREAM_GROUPS, LAST = OCTETS - 1,
                  LAST_INDEX = 4 * S::sizes::PAIRS;
    const int lane = threadIdx.x % 32, g = lane / 4;
    const token_record *records = s.records[ring.stage];
    const float factor[2] = {records[g].factor, records[g + 8].factor};
    /* First and second terms of dh_mix: `last` holds the last octet of both. With three octets, A[0] and A[1] hold the
     * other two of each term. */
    uint32_t A[2][4], last[4], dh_in_words[STREAM_GROUPS][4];
    const uint32_t record = cot_shared_address(&records[lane % 16]);
    if constexpr (OCTETS == 3) {
        cot_ldmatrix_x4(A[0], record + (uint32_t)(lane / 16) * 16);
        cot_ldmatrix_x4(A[1], record + (uint32_t)(TERM_OCTETS + lane / 16) * 16);
    }
    cot_ldmatrix_x4(last, record + (uint32_t)(LAST + lane / 16 * TERM_OCTETS) * 16);
#pragma unroll
    for (int group = 0; group < STREAM_GROUPS; group++)
        cot_ldmatrix_x4(dh_in_words[group], unit_address<typename S::sizes>(dh_in, group));
    /* This wait never blocks. Without it the compiler loads ahead into more registers than there are. */
    if (!ADD_POST)
        cot_mbarrier_wait(&s.full[ring.stage], ring.parity);
#pragma unroll
    for (int group = 0; group < COLUMN_GROUPS; group++) {
        uint32_t phi[2 * OCTETS], second[2 * OCTETS], x_words[4], post_words[4];
        float sums[2][4] = {0};
        s.phi.load(warp, group, phi);
        if constexpr (REGISTER_GROUPS < COLUMN_GROUPS)
            if (group >= REGISTER_GROUPS)
                s.second.load(warp, group - REGISTER_GROUPS, second);
        if (group < REGISTER_GROUPS) {
#pragma unroll
            for (int i = 0; i < 2 * OCTETS; i++)
                second[i] = second_terms[group][i];
        }
        /* Smallest products first. Those of the second terms of phi gamma come before those of the first terms, which are
         * still being loaded. One instruction multiplies both terms of the last octet by the first terms. */
#pragma unroll
        for (int t = 0; t < 2; t++)
            cot_mma_bf16_k8(sums[t], last[0], last[1], second[LAST_INDEX + t]);
        if constexpr (OCTETS == 3) {
#pragma unroll
            for (int t = 0; t < 2; t++)
                cot_mma_bf16(sums[t], A[0][0], A[0][1], A[0][2], A[0][3], second[2 * t], second[2 * t + 1]);
#pragma unroll
            for (int t = 0; t < 2; t++)
                cot_mma_bf16(sums[t], A[1][0], A[1][1], A[1][2], A[1][3], phi[2 * t], phi[2 * t + 1]);
        }
#pragma unroll
        for (int t = 0; t < 2; t++)
            cot_mma_bf16(sums[t], last[0], last[1], last[2], last[3], phi[LAST_INDEX + t], phi[LAST_INDEX + t]);
        if constexpr (OCTETS == 3)
#pragma unroll
            for (int t = 0; t < 2; t++)
                cot_mma_bf16(sums[t], A[0][0], A[0][1], A[0][2], A[0][3], phi[2 * t], phi[2 * t + 1]);
        const int stream = S::sizes::stream_of(group);
        const float h_pre[2] = {records[g].h_pre[stream], records[g + 8].h_pre[stream]};
        cot_ldmatrix_x4(x_words, unit_address<typename S::sizes>(x, group));
        if (ADD_POST) {
            if (group % STREAM_GROUPS == 0)
                cot_mbarrier_wait(&s.post_full[stream], post_parity);
            cot_ldmatrix_x4(post_words, unit_address<typename S::sizes>(dx_post, group));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) { /* tokens g and g+8 of columns 2q and 2q+1, then of the columns 8 further */
            const int half = i % 2, t = i / 2;
            const uint32_t dh_in_word = dh_in_words[group % STREAM_GROUPS][i];
            float low = sums[t][2 * half], high = sums[t][2 * half + 1];
            const float2 from_x = cot_unpack_pair<E>(x_words[i]), from_dh_in = cot_unpack_pair<E>(dh_in_word);
            if (phi_scale<E, ADD_POST> == 1.0f)
                low /= MHC_CUDA_MIX_SCALE, high /= MHC_CUDA_MIX_SCALE;
            low = fmaf(factor[half], from_x.x, low);
            high = fmaf(factor[half], from_x.y, high);
            low = fmaf(h_pre[half], from_dh_in.x, low);
            high = fmaf(h_pre[half], from_dh_in.y, high);
            if (ADD_POST) {
                const float2 from_post = cot_unpack_pair<E>(post_words[i]);
                low += from_post.x;
                high += from_post.y;
            }
            x_words[i] = cot_pack_pair<E>(low, high);
        }
        cot_stmatrix_x4(unit_address<typename S::sizes>(x, group), x_words);
        if (ADD_POST && group % STREAM_GROUPS == STREAM_GROUPS - 1) {
            __syncwarp();
            if (lane == 0)
                cot_mbarrier_arrive(&s.post_empty[stream]);
        }
    }
}

/* ---- records ------------------------------------------------------------------------------------------ */

static __device__ __forceinline__ float sum_over_warp(float value)
{
#pragma unroll
    for (int width = 16; width >= 1; width /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, width);
    return value;
}

/* Inputs of a lane for a token's record. value: h_pre, or dz, or the gradient from which dz is computed together with
 * h_post. */
struct token_inputs {
    float value, h_post, h_mix, inv_rms;
};

template <int N>
static __device__ __forceinline__ token_inputs load_inputs(const mhc_call &c, const token_element &value,
                                                           uint32_t token)
{
    constexpr int M = N * (N + 2);
    const int lane = threadIdx.x % 32;
    const uint32_t b = token / (uint32_t)c.T, t = token - b * (uint32_t)c.T;
    token_inputs in = {};
    if (token >= c.tokens)
        return in;
    if (value.data != nullptr)
        in.value = *value.address(b, t);
    if (lane >= N && lane < 2 * N)
        in.h_post =
            load_f32(c.h_post, b * c.h_post.stride[0] + t * c.h_post.stride[1] + (lane - N) * c.h_post.stride[2]);
    if (lane < M)
        in.h_mix = load_f32(c.h_mix, b * c.h_mix.stride[0] + t * c.h_mix.stride[1] + lane * c.h_mix.stride[2]);
    in.inv_rms = load_f32(c.inv_rms, b * c.inv_rms.stride[0] + t * c.inv_rms.stride[1]);
    return in;
}

/* With dh_res, dz of post and res is in the workspace: it includes Sinkhorn's gradient. */
template <int N> static __device__ __forceinline__ token_element input_element(const mhc_call &c, int j)
{
    constexpr int M = N * (N + 2);
    const int ij = j - 2 * N;
    if (j < N)
        return token_element(c.h_pre, j * c.h_pre.stride[2], true);
    if (present(c.dh_res))
        return token_element({c.dz, {c.T * M, M}}, j, j < M);
    if (j < 2 * N)
        return token_element(c.dh_post, (j - N) * c.dh_post.stride[2], true);
    return token_element(c.dh_res_logits, ij / N * c.dh_res_logits.stride[2] + ij % N * c.dh_res_logits.stride[3],
                         j < M);
}

/* ---- end of a tile and of the kernel ----------------------------------------------------------------- */

/* d: the warp's first column, below D except in wide blocks. Columns beyond D are not stored. D is a whole number of
 * chunks. */
template <typename Sizes>
static __device__ __forceinline__ void store_dphi_part(const mhc_call &c,
                                                       const float (&dphi_part)[Sizes::GROUPS][Sizes::OCTETS][4],
                                                       int64_t part, int64_t d)
{
    constexpr int N = Sizes::N, OCTETS = Sizes::OCTETS;
    const int lane = threadIdx.x % 32, stream = (int)Sizes::first_stream(threadIdx.x / 32);
    float *to = c.dphi_parts + part * Sizes::M * N * c.D + d;
#pragma unroll
    for (int group = 0; group < Sizes::GROUPS; group++) {
        if (Sizes::GROUPS > COLUMN_GROUPS && d + Sizes::column_of(group) >= c.D)
            continue;
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                to[((octet * 8 + lane % 4 * 2 + i % 2) * N + stream + Sizes::stream_of(group)) * c.D +
                   Sizes::column_of(group) + lane / 4 + i / 2 * 8] = dphi_part[group][octet][i];
    }
}

/* Addresses in the first stage of the 16-byte units that the lane passes to ldmatrix, for the warp's first group.
 *   by_token    matrices [token][column], in a tensor of one stream or in the first stream of x
 *   by_column   the two middle matrices exchanged, for x as B and for x^T
 *   dx_post     distance from the stages to its first stream */
struct lane_units {
    uint32_t by_token, by_column, dx_post;
};

template <typename S> static __device__ __forceinline__ lane_units find_lane_units(const S &s, int warp)
{
    typedef typename S::sizes sizes;
    const uint32_t lane = threadIdx.x % 32, first_unit = sizes::first_unit(warp),
                   stages = cot_shared_address(s.stages[0]);
    const uint32_t chunk = stages + sizes::first_chunk(warp) * CHUNK_BYTES,
                   chunk_of_x = chunk + sizes::first_stream(warp) * sizes::STREAM_BYTES;
    return {chunk + lane % 16 * 128 + ((first_unit + lane / 16) ^ lane % 8) * 16,
            chunk_of_x + (lane / 16 * 8 + lane % 8) * 128 + ((first_unit + lane / 8 % 2) ^ lane % 8) * 16,
            cot_shared_address(s.dx_post[0]) - stages};
}

/* Adds the tile to dphi_part. HALVES: the second half of the groups is not begun before the first is finished, which
 * takes fewer registers. STEP: see accumulate_dphi. x: this lane's by_column address in the tile's stage. */
template <typename E, bool HALVES, int STEP, typename S>
static __device__ __forceinline__ void accumulate_dphi_of_tile(
    S &s, uint32_t x, const cot_pipeline_state<S::STAGES> &ring,
    float (&dphi_part)[S::sizes::GROUPS][S::sizes::OCTETS][4])
{
    typedef typename S::sizes sizes;
    constexpr int GROUPS = sizes::GROUPS, HALF = HALVES ? GROUPS / 2 : GROUPS;
    const uint32_t records = cot_shared_address(s.records[ring.stage]);
    if constexpr (GROUPS > COLUMN_GROUPS) { /* two octets, then one, take fewer registers than three */
        accumulate_dphi<E, sizes, 0, GROUPS, 2, 0, 2>(x, records, dphi_part);
        accumulate_dphi<E, sizes, 0, GROUPS, 4, 2, 1>(x, records, dphi_part);
        return;
    }
    accumulate_dphi<E, sizes, 0, HALF, STEP>(x, records, dphi_part);
    if constexpr (HALVES) {
        cot_mbarrier_wait(&s.full[ring.stage], ring.parity); /* never blocks, see compute_dx */
        accumulate_dphi<E, sizes, HALF, GROUPS, STEP>(x, records, dphi_part);
    }
}

/* Adds the tile to dphi_part and signals that the MMA warps have finished the stage. */
template <typename E, typename S>
static __device__ __forceinline__ void accumulate_tile(S &s, const lane_units &units,
                                                       const cot_pipeline_state<S::STAGES> &ring,
                                                       float (&dphi_part)[S::sizes::GROUPS][S::sizes::OCTETS][4])
{
    accumulate_dphi_of_tile<E, true, S::sizes::GROUPS>(
        s, units.by_column + (uint32_t)(ring.stage * S::sizes::STAGE_BYTES), ring, dphi_part);
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        cot_mbarrier_arrive(&s.stage_done[ring.stage]);
}

/* Adds the tile to dphi_part, computes its dx if dx is an output, and signals that the MMA warps have finished the
 * stage. HALVES: see accumulate_dphi_of_tile. */
template <typename E, bool ADD_POST, bool HALVES, int REGISTER_GROUPS, typename S>
static __device__ __forceinline__ void multiply_tile(
    const mhc_call &c, S &s, const lane_units &units, const cot_pipeline_state<S::STAGES> &ring, int warp,
    uint32_t post_parity, const uint32_t (&second_terms)[REGISTER_GROUPS][2 * S::sizes::OCTETS],
    float (&dphi_part)[S::sizes::GROUPS][S::sizes::OCTETS][4])
{
    const uint32_t stage_offset = (uint32_t)(ring.stage * S::sizes::STAGE_BYTES);
    /* With a step of 3 groups, ptxas spills in the kernels of f16 and with dx_post. */
    constexpr int STEP = ADD_POST || cot_is_f16<E> ? S::sizes::GROUPS : 3;
    accumulate_dphi_of_tile<E, HALVES, STEP>(s, units.by_column + stage_offset, ring, dphi_part);
    if (present(c.dx)) {
        compute_dx<E, ADD_POST>(s, units.by_token + stage_offset, units.by_token + stage_offset + S::sizes::X_BYTES,
                                units.by_token + units.dx_post, ring, warp, post_parity, second_terms);
        cot_fence_proxy_async();
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        cot_mbarrier_arrive(&s.stage_done[ring.stage]);
}

#endif
