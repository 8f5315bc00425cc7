/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_f32_sm90.cu: pre backward in one pass over x and dh_in, for n = 2 and 4, f32: the MMA warps and the
 * reducer. mhc_pre_bwd_cluster_sm90.cuh explains the kernel.
 *
 * Tensor cores multiply bf16. So every float32 factor is split into three bf16 terms, and the six largest products of
 * terms are summed, the smallest ones first. The sum is as exact as one of float32 products.
 *
 * A chunk is 32 columns of one stream, 128 bytes of a token. A warp has four: one of each stream, or for n = 2 two of
 * each. Both products have the columns as their rows (M), so that a lane has the same elements everywhere:
 *
 *   lane (g = lane / 4, q = lane % 4)       x, dh_in, dx [tokens 2q, 2q + 1][columns 4g to 4g + 3]: loads of 16 bytes
 *   m16 tile m of a chunk                   row g is column 4g + 2m, row g + 8 is column 4g + 2m + 1
 *   dphi_part += x^T dh_mix                 A is x: [column][token], B is dh_mix: [token][row of phi]
 *   dx = (phi gamma)^T dh_mix^T + ...       A is phi gamma: [column][row of phi], B is dh_mix: [row of phi][token]
 *
 * A tile has 8 tokens. So for dphi_part an instruction with k = 16 sums two of the products of terms. For dx it sums two
 * octets of rows of phi; the last octet has instructions with k = 8. Both lengths have sums of their own: an instruction
 * waits longer for a sum of the other length.
 *
 * Of the terms of phi gamma, the first and third are in shared memory, the second in registers. The reducer alone
 * computes dh_pre, because the MMA warps take the most time of all warps. It can be two tiles ahead of them. So the
 * records have one slot more than there are stages (make_owned_records explains why). */
#include "mhc_pre_bwd_cluster_sm90.cuh"

enum { WARP_CHUNKS = COLUMN_GROUPS / 2, CHUNK_COLUMNS = 32 };

template <int N_> struct f32_sizes {
    enum {
        N = N_,
        M = N * (N + 2),
        ELEMENT = 4, /* bytes */
        OCTETS = M / 8,
        PAIRS = OCTETS / 2, /* of octets */
        LAST = OCTETS - 1,
        TILE = MHC_SM90_CLUSTER_TILE(false, 4),
        CHUNKS = MHC_SM90_COLUMNS_OF(N) / CHUNK_COLUMNS, /* of a block in each stream */
        CHUNK_BYTES = TILE * 128,
        STREAM_BYTES = CHUNKS * CHUNK_BYTES,
        X_BYTES = N * STREAM_BYTES,
        STAGE_BYTES = X_BYTES + STREAM_BYTES,
        BLOCK_COLUMNS = MHC_SM90_COLUMNS_OF(N),
        STREAM_CHUNKS = WARP_CHUNKS / N /* of a warp in each stream */
    };
    static __device__ __forceinline__ uint32_t first_column(uint32_t warp)
    {
        return warp * STREAM_CHUNKS * CHUNK_COLUMNS;
    }
};

/* First and third terms of phi gamma as A fragments, a register for each pair of columns and octet of rows. n = 4: the
 * first terms of octets 0 and 1, then the third terms. Then of the last octet: the first terms, then the third. */
template <int OCTETS> struct outer_terms {
    uint4 words[MMA_WARPS][WARP_CHUNKS][2][OCTETS][32];
};

template <int N, data_gradient MODE, int BLOCKS> struct f32_traits : cluster_traits<f32_sizes<N>, MODE, BLOCKS> {
    typedef outer_terms<f32_sizes<N>::OCTETS> phi_terms;
    enum { STAGES = 3, POST_BUFFER = 0, RECORD_SLOTS = STAGES + 1, MMA_REGISTERS = 208 };
};

/* The products of terms for dx, in the order of the sum: the term of phi gamma (2 1 0 1 0 0), and that of dh_mix
 * (0 1 2 0 1 0). */
enum { PRODUCTS = 6 };
static __device__ __forceinline__ constexpr int phi_term(int product)
{
    return product < 3 ? 2 - product : product == 3 ? 1 : 0;
}

static __device__ __forceinline__ constexpr int mix_term(int product)
{
    return product < 3 ? product : product == 4 ? 1 : 0;
}

template <typename Traits> static __device__ __forceinline__ constexpr int stream_of_chunk(int chunk)
{
    return chunk / Traits::STREAM_CHUNKS;
}

template <typename Traits> static __device__ __forceinline__ constexpr int column_of_chunk(int chunk)
{
    return chunk % Traits::STREAM_CHUNKS * CHUNK_COLUMNS;
}

/* Distance of a chunk from the warp's first chunk. */
template <typename Traits> static __device__ __forceinline__ constexpr uint32_t chunk_offset(int chunk)
{
    return (uint32_t)(stream_of_chunk<Traits>(chunk) * Traits::STREAM_BYTES +
                      chunk % Traits::STREAM_CHUNKS * Traits::CHUNK_BYTES);
}

/* Offsets in shared memory of the lane's elements of tokens 2q and 2q + 1, in the warp's first chunk of a stage. */
struct lane_offsets {
    uint32_t token[2];

    __device__ __forceinline__ lane_offsets plus(uint32_t offset) const
    {
        return {{token[0] + offset, token[1] + offset}};
    }
};

template <typename Traits> static __device__ __forceinline__ lane_offsets find_lane_offsets(void)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t first = (uint32_t)(warp * Traits::STREAM_CHUNKS * Traits::CHUNK_BYTES);
    return {{first + (uint32_t)swizzled_offset(lane % 4 * 2, lane / 4),
             first + (uint32_t)swizzled_offset(lane % 4 * 2 + 1, lane / 4)}};
}

/* A lane's elements of a chunk: [token][column]. */
struct lane_elements {
    float4 token[2];

    __device__ __forceinline__ float operator()(int t, int column) const
    {
        const float4 &v = token[t];
        return column == 0 ? v.x : column == 1 ? v.y : column == 2 ? v.z : v.w;
    }
};

static __device__ __forceinline__ lane_elements load_elements(const lane_offsets &from)
{
    return {{*(const float4 *)&memory[from.token[0]], *(const float4 *)&memory[from.token[1]]}};
}

/* The reducer: computes dh_pre of the block's columns in float32, and sends each token's to its owner block. A lane has a
 * 16-byte unit of every chunk of two tokens, lane / 8 and lane / 8 + 4. */
template <typename Traits>
static __device__ __forceinline__ void reduce(const mhc_mapped_call &, shared_memory<Traits> &s, int rank, int tiles)
{
    constexpr int N = Traits::N;
    const int lane = threadIdx.x % 32;
    const int offsets[2] = {swizzled_offset(lane / 8, lane % 8), swizzled_offset(lane / 8 + 4, lane % 8)};
    if (lane < Traits::TILE) /* the elements from N on stay zero */
        s.warp_dh_pre[0][lane] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    __syncwarp();
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, tiles)
    {
        float sums[2][N] = {0};
        cot_mbarrier_wait(&s.full[ring.stage], ring.parity);
        const unsigned char *stage = s.stages[ring.stage];
#pragma unroll 1
        for (int chunk = 0; chunk < Traits::CHUNKS; chunk++)
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const unsigned char *from = stage + chunk * Traits::CHUNK_BYTES + offsets[t];
                const float4 dh_in = *(const float4 *)(from + Traits::X_BYTES);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const float4 x = *(const float4 *)(from + i * Traits::STREAM_BYTES);
                    sums[t][i] = fmaf(x.x, dh_in.x, sums[t][i]);
                    sums[t][i] = fmaf(x.y, dh_in.y, sums[t][i]);
                    sums[t][i] = fmaf(x.z, dh_in.z, sums[t][i]);
                    sums[t][i] = fmaf(x.w, dh_in.w, sums[t][i]);
                }
            }
        arrive_all_lanes(&s.dh_pre_read[ring.stage]);
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int i = 0; i < N; i++) {
#pragma unroll
                for (int width = 4; width >= 1; width /= 2)
                    sums[t][i] += __shfl_xor_sync(0xffffffffu, sums[t][i], width);
                if (lane % 8 == i)
                    ((float *)&s.warp_dh_pre[0][lane / 8 + 4 * t])[i] = sums[t][i];
            }
        __syncwarp();
        if (lane < Traits::TILE)
            send_dh_pre(s, ring.stage, rank, lane, s.warp_dh_pre[0][lane]);
        __syncwarp();
    }
}

/* Two elements of a parameter, whose data need not be aligned to both. */
static __device__ __forceinline__ float2 load_pair(const mhc_array &a, int64_t offset)
{
    return make_float2(load_f32(a, offset), load_f32(a, offset + 1));
}

/* Loads phi gamma, divided by MHC_CUDA_MIX_SCALE, of the warp's columns and splits it into terms. second_terms: A
 * fragments [chunk][m][octet]. All loads of a half of the chunks are in flight before the first split: phi is often in
 * memory, not in the L2 cache, and the registers of dphi_part are still free. */
template <typename Traits>
static __device__ __forceinline__ void load_phi(const mhc_call &c, shared_memory<Traits> &s,
                                                uint32_t (&second_terms)[WARP_CHUNKS][2][Traits::OCTETS][2])
{
    constexpr int OCTETS = Traits::OCTETS, HALF = WARP_CHUNKS / 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int first = 0; first < WARP_CHUNKS; first += HALF) {
        float2 phi[HALF][OCTETS][2][2], gamma[HALF][2]; /* [chunk][octet][row][m], [chunk][m] */
#pragma unroll
        for (int k = 0; k < HALF; k++) {
            const int stream = stream_of_chunk<Traits>(first + k);
            const int64_t column = first_column<Traits>() + column_of_chunk<Traits>(first + k) + 4 * g;
            const bool inside = column < c.D;
#pragma unroll
            for (int m = 0; m < 2; m++) {
                gamma[k][m] = make_float2(1.0f, 1.0f);
                if (inside && present(c.gamma))
                    gamma[k][m] = load_pair(c.gamma, stream * c.gamma.stride[0] + column + 2 * m);
#pragma unroll
                for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
                    for (int r = 0; r < 2; r++)
                        phi[k][octet][r][m] = inside ? load_pair(c.phi, (octet * 8 + q * 2 + r) * c.phi.stride[0] +
                                                                            stream * c.D + column + 2 * m)
                                                     : make_float2(0.0f, 0.0f);
            }
        }
#pragma unroll
        for (int k = 0; k < HALF; k++)
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const float2 weight = make_float2(gamma[k][m].x * (1.0f / MHC_CUDA_MIX_SCALE),
                                                  gamma[k][m].y * (1.0f / MHC_CUDA_MIX_SCALE));
                uint4 outer[OCTETS];
#pragma unroll
                for (int octet = 0; octet < OCTETS; octet++) {
                    const float2(&rows)[2][2] = phi[k][octet];
                    uint32_t terms[2][TERMS];
                    cot_split_bf16(rows[0][m].x * weight.x, rows[1][m].x * weight.x, terms[0]);
                    cot_split_bf16(rows[0][m].y * weight.y, rows[1][m].y * weight.y, terms[1]);
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        second_terms[first + k][m][octet][h] = terms[h][1];
                    outer[octet] = make_uint4(terms[0][0], terms[1][0], terms[0][2], terms[1][2]);
                }
                uint4(&to)[OCTETS][32] = s.phi.words[warp][first + k][m];
                if constexpr (Traits::PAIRS == 1) {
                    to[0][lane] = make_uint4(outer[0].x, outer[0].y, outer[1].x, outer[1].y);
                    to[1][lane] = make_uint4(outer[0].z, outer[0].w, outer[1].z, outer[1].w);
                }
                to[Traits::LAST][lane] = outer[Traits::LAST];
            }
        __syncwarp();
    }
}

/* The terms of dh_mix of a tile are 8 x 8 matrices, one of each unit of 16 bytes of the records. A fragment is one
 * register. Returns the lane's address for a load of four matrices, in the first slot. n = 4: for dphi_part the units 0 3
 * 1 4, which are two terms of octet 0, then of octet 1; for dx the units 0 1 3 4. n = 2: the units 0 3 6 6. */
template <bool FOR_DPHI, typename Traits>
static __device__ __forceinline__ uint32_t find_mix_address(const shared_memory<Traits> &s)
{
    const int lane = threadIdx.x % 32, i = lane / 8;
    const int unit = Traits::OCTETS == 1 ? min(i, TERMS - 1) * TERM_OCTETS
                     : FOR_DPHI          ? i % 2 * TERM_OCTETS + i / 2
                                         : i / 2 * TERM_OCTETS + i % 2;
    return cot_shared_address(&s.records[0][lane % 8]) + (uint32_t)unit * 16;
}

/* dphi_part += x^T dh_mix. Tensor cores truncate sums, so float32 additions sum the tiles. The three steps multiply these
 * terms of x and dh_mix: 2 0 and 1 1; 1 0 and 0 2; 0 0 and 0 1. */
template <typename Traits>
static __device__ __forceinline__ void accumulate_dphi(const lane_offsets &x, uint32_t mix,
                                                       float (&dphi_part)[WARP_CHUNKS][2][Traits::OCTETS][4])
{
    constexpr int OCTETS = Traits::OCTETS;
    uint32_t B[OCTETS][2][2], r[4]; /* terms 0 and 1 of each octet, then 0 and 2 */
    cot_ldmatrix_x4_trans(r, mix);
    B[0][0][0] = r[0], B[0][0][1] = r[1];
    if constexpr (OCTETS == 3) {
        B[1][0][0] = r[2], B[1][0][1] = r[3];
        cot_ldmatrix_x4_trans(r, mix + 2 * 16); /* units 2 5 3 6 */
        B[2][0][0] = r[0], B[2][0][1] = r[1], B[0][1][1] = r[3];
        cot_ldmatrix_x4_trans(r, mix + 4 * 16); /* units 4 7 5 8 */
        B[1][1][1] = r[1], B[2][1][1] = r[3];
    } else {
        B[0][1][1] = r[2];
    }
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++)
        B[octet][1][0] = B[octet][0][0];
#pragma unroll
    for (int chunk = 0; chunk < WARP_CHUNKS; chunk++) {
        const lane_elements values = load_elements(x.plus(chunk_offset<Traits>(chunk)));
#pragma unroll
        for (int m = 0; m < 2; m++) {
            uint32_t A[2][TERMS];
            float product[OCTETS][4] = {0};
#pragma unroll
            for (int h = 0; h < 2; h++)
                cot_split_bf16(values(0, 2 * m + h), values(1, 2 * m + h), A[h]);
#pragma unroll
            for (int step = 0; step < 3; step++) {
                const int low = 2 - step, high = step == 0 ? 1 : 0;
#pragma unroll
                for (int octet = 0; octet < OCTETS; octet++)
                    cot_mma_bf16(product[octet], A[0][low], A[1][low], A[0][high], A[1][high], B[octet][step % 2][0],
                                 B[octet][step % 2][1]);
            }
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    dphi_part[chunk][m][octet][i] += product[octet][i];
        }
    }
}

/* Loads dx_post of the lane's tokens and columns; zeros outside the tensor. */
template <typename Traits>
static __device__ __forceinline__ void load_post(const mhc_call &c, int tile, int chunk, uint32_t (&words)[2][4])
{
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int64_t token_stride = c.T > 1 ? c.dx_post.stride[1] : c.dx_post.stride[0],
                  column = first_column<Traits>() + column_of_chunk<Traits>(chunk),
                  tokens = first_column<Traits>() < c.D ? c.tokens : 0;
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const int64_t token = tile * Traits::TILE + 2 * q + t;
        cot_words<4> v = {};
        if (token < tokens)
            v = cot_load_words<4>((const float *)c.dx_post.data + token * token_stride +
                                  stream_of_chunk<Traits>(chunk) * c.dx_post.stride[2] + column + 4 * g);
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[t][i] = v.word[i];
    }
}

/* The terms of phi gamma of one m16 tile as A fragments: of the pair of octets, and of the last octet. */
struct phi_fragment {
    uint4 pair[TERMS];
    uint2 last[TERMS];
};

template <typename Traits>
static __device__ __forceinline__ void load_phi_fragments(
    const shared_memory<Traits> &s, int chunk, const uint32_t (&second_terms)[WARP_CHUNKS][2][Traits::OCTETS][2],
    phi_fragment (&phi)[2])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const uint32_t(&second)[Traits::OCTETS][2] = second_terms[chunk][m];
        const uint4 last = s.phi.words[warp][chunk][m][Traits::LAST][lane];
        phi[m].last[0] = make_uint2(last.x, last.y);
        phi[m].last[1] = make_uint2(second[Traits::LAST][0], second[Traits::LAST][1]);
        phi[m].last[2] = make_uint2(last.z, last.w);
        if constexpr (Traits::PAIRS == 1) {
            phi[m].pair[0] = s.phi.words[warp][chunk][m][0][lane];
            phi[m].pair[1] = make_uint4(second[0][0], second[0][1], second[1][0], second[1][1]);
            phi[m].pair[2] = s.phi.words[warp][chunk][m][1][lane];
        }
    }
}

/* Computes dx and stores it over x in shared memory. With dx_post there are no registers for two sums. */
template <typename Traits>
static __device__ __forceinline__ void compute_dx(const mhc_call &c, shared_memory<Traits> &s,
                                                  const cot_pipeline_state<Traits::STAGES> &ring, const lane_offsets &x,
                                                  uint32_t mix, int tile, const token_record *records,
                                                  const uint32_t (&second_terms)[WARP_CHUNKS][2][Traits::OCTETS][2])
{
    constexpr bool ADD_POST = Traits::MODE == DX_AND_POST;
    const int q = threadIdx.x % 4;
    uint32_t pair[TERMS][2], last[TERMS], r[4], post[2][4]; /* terms of dh_mix of the pair of octets, of the last one */
    cot_ldmatrix_x4(r, mix);
    if constexpr (Traits::PAIRS == 1) {
        pair[0][0] = r[0], pair[0][1] = r[1], pair[1][0] = r[2], pair[1][1] = r[3];
        cot_ldmatrix_x4(r, mix + 6 * 16); /* units 6 7 9 10 */
        pair[2][0] = r[0], pair[2][1] = r[1];
        cot_ldmatrix_x4(r, mix + 4 * 16); /* units 4 5 7 8 */
        last[1] = r[1], last[2] = r[3];
        cot_ldmatrix_x4(r, mix + 2 * 16); /* units 2 3 5 6 */
        last[0] = r[0];
    } else {
        last[0] = r[0], last[1] = r[1], last[2] = r[2];
    }
    const float factor[2] = {records[2 * q].factor, records[2 * q + 1].factor};
    phi_fragment phi[2];
    load_phi_fragments<Traits>(s, 0, second_terms, phi);
#pragma unroll
    for (int chunk = 0; chunk < WARP_CHUNKS; chunk++) {
        if (!ADD_POST && chunk == 1) /* never blocks. Without it the compiler uses more registers than there are */
            cot_mbarrier_wait(&s.full[ring.stage], ring.parity);
        const lane_offsets to = x.plus(chunk_offset<Traits>(chunk));
        const int stream = stream_of_chunk<Traits>(chunk);
        const lane_elements values = load_elements(to),
                            dh_in = load_elements(x.plus(
                                (uint32_t)(Traits::X_BYTES + chunk % Traits::STREAM_CHUNKS * Traits::CHUNK_BYTES)));
        if (ADD_POST)
            load_post<Traits>(c, tile, chunk, post);
        const float h_pre[2] = {records[2 * q].h_pre[stream], records[2 * q + 1].h_pre[stream]};
        if (chunk > 0)
            load_phi_fragments<Traits>(s, chunk, second_terms, phi);
        float sums[2][4] = {0}, pair_sums[2][4] = {0};
#pragma unroll
        for (int i = 0; i < PRODUCTS; i++) {
            const int left = phi_term(i), right = mix_term(i);
            if constexpr (Traits::PAIRS == 1)
#pragma unroll
                for (int m = 0; m < 2; m++)
                    cot_mma_bf16(ADD_POST ? sums[m] : pair_sums[m], phi[m].pair[left].x, phi[m].pair[left].y,
                                 phi[m].pair[left].z, phi[m].pair[left].w, pair[right][0], pair[right][1]);
#pragma unroll
            for (int m = 0; m < 2; m++)
                cot_mma_bf16_k8(sums[m], phi[m].last[left].x, phi[m].last[left].y, last[right]);
        }
#pragma unroll
        for (int t = 0; t < 2; t++) {
            float dx[4];
#pragma unroll
            for (int v = 0; v < 4; v++) { /* column 4g + v: tile m = v / 2, row g + v % 2 * 8 */
                float sum = sums[v / 2][v % 2 * 2 + t];
                if (!ADD_POST)
                    sum += pair_sums[v / 2][v % 2 * 2 + t];
                sum = fmaf(factor[t], values(t, v), sum);
                sum = fmaf(h_pre[t], dh_in(t, v), sum);
                if (ADD_POST)
                    sum += __uint_as_float(post[t][v]);
                dx[v] = sum;
            }
            *(float4 *)&memory[to.token[t]] = make_float4(dx[0], dx[1], dx[2], dx[3]);
        }
    }
}

template <typename Traits>
static __device__ __forceinline__ void store_dphi_part(const mhc_call &c,
                                                       const float (&dphi_part)[WARP_CHUNKS][2][Traits::OCTETS][4],
                                                       int64_t part)
{
    constexpr int N = Traits::N, M = Traits::M;
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int64_t first = first_column<Traits>();
    if (first >= c.D)
        return;
    float *to = c.dphi_parts + part * M * N * c.D + first + 4 * g + 2 * q * N * c.D;
#pragma unroll
    for (int chunk = 0; chunk < WARP_CHUNKS; chunk++) {
#pragma unroll
        for (int octet = 0; octet < Traits::OCTETS; octet++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float(&low)[4] = dphi_part[chunk][0][octet], (&high)[4] = dphi_part[chunk][1][octet];
                __stcs((float4 *)&to[((octet * 8 + r) * N + stream_of_chunk<Traits>(chunk)) * c.D +
                                     column_of_chunk<Traits>(chunk)],
                       make_float4(low[r], low[2 + r], high[r], high[2 + r]));
            }
    }
}

template <typename Traits>
static __device__ __forceinline__ void multiply(const mhc_call &c, shared_memory<Traits> &s, int tiles)
{
    constexpr int OCTETS = Traits::OCTETS;
    uint32_t second_terms[WARP_CHUNKS][2][OCTETS][2];
    load_phi(c, s, second_terms);
    arrive_all_lanes(&s.phi_loaded);
    cot_cluster_wait();
    float dphi_part[WARP_CHUNKS][2][OCTETS][4] = {0};
    const lane_offsets x = find_lane_offsets<Traits>();
    const uint32_t dphi_mix = find_mix_address<true>(s), dx_mix = find_mix_address<false>(s);
    cot_pipeline_state<Traits::RECORD_SLOTS> slot;
    FOR_EACH_TILE(tile, ring, tiles)
    {
        cot_mbarrier_wait(&s.full[ring.stage], ring.parity);
        cot_mbarrier_wait(&s.dh_pre_read[ring.stage], ring.parity);
        cot_mbarrier_wait(&s.records_full[slot.stage], slot.parity);
        /* Re-arms for the slot's next tile. st.async of that tile may come first: the pending arrival keeps the phase
         * open. */
        if (threadIdx.x == 0)
            cot_mbarrier_arrive_expect(&s.records_full[slot.stage], Traits::SENT_BYTES);
        const lane_offsets stage_x = x.plus((uint32_t)(ring.stage * Traits::STAGE_BYTES));
        const uint32_t records_offset = (uint32_t)(slot.stage * (int)sizeof s.records[0]);
        accumulate_dphi<Traits>(stage_x, dphi_mix + records_offset, dphi_part);
        if (present(c.dx)) {
            compute_dx(c, s, ring, stage_x, dx_mix + records_offset, tile, s.records[slot.stage], second_terms);
            cot_fence_proxy_async();
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            cot_mbarrier_arrive(&s.stage_done[ring.stage]);
        slot.next();
    }
    if (present(c.dphi) || present(c.dgamma))
        store_dphi_part<Traits>(c, dphi_part, (int64_t)(blockIdx.x / Traits::BLOCKS));
}

/* blocks: of a cluster. The suffix `_blocksN` gives it, except for 16. post: adds dx_post. */
#define INSTANCE(name, n, mode, blocks)                                       \
    extern "C" __global__ void __launch_bounds__(MHC_SM90_BWD_THREADS, 1)     \
        mhc_pre_bwd_cluster_##name(const __grid_constant__ mhc_mapped_call p) \
    {                                                                         \
        backward<f32_traits<n, mode, blocks>>(p);                             \
    }
#define INSTANCES(suffix, blocks)                           \
    INSTANCE(sm90_f32##suffix, 4, DX, blocks)               \
    INSTANCE(post_sm90_f32##suffix, 4, DX_AND_POST, blocks) \
    INSTANCE(sm90_n2_f32##suffix, 2, DX, blocks)            \
    INSTANCE(post_sm90_n2_f32##suffix, 2, DX_AND_POST, blocks)
INSTANCES(, 16)
INSTANCES(_blocks8, 8)
INSTANCES(_blocks4, 4)
