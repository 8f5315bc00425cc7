/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_fwd_sm90.cu: pre forward and post_pre forward on Hopper. The kernels are for n = 4, bf16 and f16, those with
 * cluster in their names also for n = 2 and f32:
 *
 *   mhc_pre_fwd_cluster_sm90_*        one pass over x, D up to 4096, with n = 2 up to 8192
 *   mhc_pre_fwd_wide_sm90_*           the same with wider blocks (WIDE), D up to 7168. Its entry in the kernel table is
 *                                     mhc_pre_fwd_cluster_sm90
 *   mhc_pre_fwd_split_sm90_*          no clusters (SPLIT), D up to 33792: x is read twice
 *   mhc_post_pre_fwd_cluster_sm90_*, mhc_post_pre_fwd_wide_sm90_*
 *                                     post_pre (POST_PRE), for the same shapes
 *
 * Clusters of BLOCKS blocks process tiles of 16 tokens, in f32 of 8. BLOCKS is 16, or 8 for D up to 2048, or 4 for D up
 * to 1024. Block r of the cluster has columns [256 r, 256 r + 256) of all four streams and computes h_in of these
 * columns. With n = 2 these numbers of columns and the limits of D are twice as large. Each stage holds one tile.
 *
 * Each token has an owner block: token t of a tile in stage s belongs to block (s TILE + t) % BLOCKS. A tile of 16
 * tokens gives every block 1, 2 or 4 tokens. Tiles of 8 tokens (WIDE, f32) in clusters of 16 blocks alternate between
 * the two halves of the blocks. Roles:
 *
 *   producer     loads x of the tile into shared memory by one TMA box
 *   8 MMA warps  128 of the block's 1024 inputs each (index k of mhc.h; WIDE: 224 of 1792). phi gamma, as three bf16
 *                terms (float32's 24 bits), is the A operand and stays in registers. The tokens are the columns of B.
 *                Nine groups of eight rows fill 4.5 m16 tiles. The other half of the fifth m-tile holds the tokens
 *                themselves: the diagonal of its product is the sums of squares. f16 has two terms: each row is scaled
 *                by a power of two that brings its largest element to 2^14 or above, the upper end of f16's range.
 *   2 reducers   sum the warps' partial sums and send each token's sums to its owner block
 *   owner warp   sums over the blocks, stores the tokens' coefficients, sends h_pre to all blocks
 *   4 h_in warps compute h_in of the block's columns, then release the stage
 *
 *   barrier               arrivals             who waits        phase ends when
 *   full[stage]           1, the producer      MMA, h_in warps  x of the tile is in shared memory (POST_PRE: and f)
 *   warp_sums_full        32 of each MMA warp  reducers         the partial sums of all warps are in shared memory
 *   warp_sums_empty       32 of each reducer   MMA warps        the reducers have read them
 *   gathered_full[stage]  1, the owner warp    owner warp       all blocks' sums of the owned tokens have arrived
 *   h_pre_full[stage]     1, an h_in thread    h_in warps       h_pre of all tokens of the tile has arrived
 *   empty[stage]          1 of each h_in warp  producer         x of the tile has been read (SPLIT: 1 of each MMA warp)
 *   in POST_PRE also:
 *   y_full[stage]         256, MMA threads     MMA, h_in warps  y of the tile is in shared memory. The reducers wait for
 *                                                               the first one
 *   coefficients_full[2]  64, reducer threads  MMA warps        the coefficients of post of the tile are there
 *
 * A block stores into a stage of another block without waiting for that block. This is safe. Let u be the tile that
 * follows tile t in the same stage, STAGES rounds later:
 *
 *   1. A block sends sums of u only after it has released its stage of t.
 *   2. It released the stage after it had h_pre of t from all owner warps, so all of them had read their sums of t.
 *   3. An owner warp sends h_pre of u after it has the sums of u from all blocks.
 *   4. By 1, every block has then released its stage of t, so it has read h_pre of t.
 *
 * WIDE, for D beyond 4096: blocks have 448 columns and tiles have 8 tokens. The terms of phi gamma that do not fit in
 * registers are in shared memory and are loaded for every tile. For f16 these are second terms. For bf16 these are the
 * third terms, of one byte each, and in POST_PRE the second terms of one step. Let p be the power of two below the
 * row's largest element in the warp's columns, and unit = 2^-23 p. The split subtracts 192 units from the element and
 * takes two bf16 terms. The rest is r, at most 64 units. It is stored as the byte b = r / unit + 64. As a bf16 number,
 * the two bytes {0x43, b} are 128 + b = 192 + r / unit: the 192 units are added back, and unpacking needs no
 * conversion. The three products add up to the element itself. Example: with p = 1 the element 1.3 is 10905190 units.
 * 192 less are 10904998 units, whose first two bf16 terms are 10878976 and 25984. r is 38 units, b is 102, and {0x43,
 * 102} is 230 = 192 + 38.
 *
 * SPLIT, f16 and bf16, n = 4, D a multiple of 64 up to 33792 (132 slices of 256 columns): the blocks do not
 * communicate. A block has one slice and every gridDim.y-th tile. The reducers store the slice's sums to global
 * memory, and the MMA warps release the stage. mhc_pre_tokens.cu sums over the slices and reads x again for h_in.
 *
 * POST_PRE, post of a layer and pre of the next: x of pre is y of post, which is never read from memory. The producer
 * also loads a tile of f. The MMA warps compute y of a tile in place of x. Then they wait for y_full of the tile
 * before and compute its products. When the reducers have the sums of a tile, they load the coefficients of post of
 * three tiles later. An h_in thread stores y by one TMA box. The order of the sums of y is that of mhc_post.cu, so y
 * has the bits of mhc_post. */
#include "mhc_mma.cuh"
#include "mhc_post_pre_sm90.cuh"

#include "../../../cuda/device/bulk.cuh"

#include <type_traits>

enum { MMA_WARPS = 8 };

/* The configuration of a block with COLUMNS_ columns of each of N_ streams. With more than 1024 columns in all, phi
 * gamma does not fit in registers. Shared memory then holds the second terms of a warp's last steps (f16) or all third
 * terms as bytes (bf16). */
template <typename E_, int N_, int COLUMNS_, int BLOCKS_, bool POST_PRE_ = false> struct fwd_traits {
    typedef E_ E;
    enum {
        N = N_,
        M = N * (N + 2),
        OCTETS = M / 8,
        SUMS = MHC_CUDA_SUMS(N), /* floats of a token: M of h_mix, the sum of squares, padding to 16 bytes */
        IS_F32 = sizeof(E) == 4,
        TERMS = cot_is_f16<E> ? 2 : 3, /* of phi gamma */
        VECTOR = 16 / sizeof(E),
        POST_PRE = POST_PRE_,
        COLUMNS = COLUMNS_,
        CHUNK_COLUMNS = 128 / sizeof(E),
        CHUNKS = COLUMNS / CHUNK_COLUMNS,
        BLOCKS = BLOCKS_, /* of a cluster */
        WIDE = N * COLUMNS > MHC_SM90_K,
        TILE = MHC_SM90_CLUSTER_TILE(WIDE, sizeof(E)),
        OWNED = TILE > BLOCKS ? TILE / BLOCKS : 1, /* tokens of a tile that a block owns, if it owns any */
        STAGES = !POST_PRE                                  ? 6
                 : N == MHC_SM90_N && TILE == MHC_SM90_TILE ? 5
                                                            : 4,
        STREAM_BYTES = CHUNKS * 128 * TILE, /* of one stream in a stage */
        STAGE_BYTES = N * STREAM_BYTES,
        STEPS = N * COLUMNS / 16 / MMA_WARPS, /* steps of 16 k of one MMA warp */
        PAIRS = STEPS / 2,
        CHUNK_STEPS = CHUNK_COLUMNS / 16,
        ROW_GROUPS = TERMS * OCTETS,
        /* Groups of a step that stay in registers, except in the last SHARED_STEPS steps. */
        REGISTER_GROUPS = WIDE ? 2 * OCTETS : ROW_GROUPS,
        /* Steps whose second terms are in shared memory: the smallest number without register spills. */
        SHARED_STEPS = !WIDE           ? 0
                       : cot_is_f16<E> ? 7
                       : POST_PRE      ? 1
                                       : 0,
        BYTE_TERMS = WIDE && !cot_is_f16<E>,
        /* Registers of a thread of the MMA warps, of the owner's warpgroup and of the h_in warps. An owner of several
         * tokens of a tile needs more than an owner of one. */
        LOOPS_POST_PRE = OWNED > 1 && POST_PRE,
        MMA_REGISTERS = LOOPS_POST_PRE     ? (IS_F32          ? 208
                                              : cot_is_f16<E> ? 200
                                                              : 216)
                        : IS_F32           ? 224
                        : WIDE || POST_PRE ? 216
                                           : 208,
        OWNER_REGISTERS = LOOPS_POST_PRE ? (cot_is_f16<E> ? 48 : 40)
                          : IS_F32       ? (OWNED > 1 ? 40 : 32)
                          : OWNED > 1    ? 56
                          : POST_PRE     ? 32
                          : WIDE         ? 40
                                         : 48,
        H_IN_REGISTERS = 512 - 2 * MMA_REGISTERS - OWNER_REGISTERS, /* what is left of 64 K registers */
        SUM_UNROLL = LOOPS_POST_PRE ? 4 : BLOCKS,                   /* blocks whose sums the owner loads at once */
        /* Pairs of steps whose squares the tensor cores sum before a float32 addition. */
        SQUARES_PAIRS = BYTE_TERMS ? 4 : 1
    };
    static __device__ __forceinline__ constexpr bool in_shared(int step, int term)
    {
        return term == 1 && step >= STEPS - SHARED_STEPS;
    }
};

template <typename Traits> struct shared_memory {
    unsigned char x[Traits::STAGES][Traits::STAGE_BYTES]; /* [stream][chunk][token][128 bytes, swizzled] */
    /* The layout of x without streams. */
    unsigned char f[Traits::POST_PRE ? Traits::STAGES : 1][Traits::POST_PRE ? Traits::STREAM_BYTES : 16];
    uint2 second_terms[MMA_WARPS][Traits::SHARED_STEPS > 0 ? Traits::SHARED_STEPS : 1]
                      [Traits::SHARED_STEPS > 0 ? Traits::OCTETS : 1][Traits::SHARED_STEPS > 0 ? 32 : 1];
    /* One word for each step. */
    uint2 third_terms[MMA_WARPS][Traits::BYTE_TERMS ? Traits::PAIRS : 1][Traits::BYTE_TERMS ? Traits::OCTETS : 1]
                     [Traits::BYTE_TERMS ? 32 : 1];
    float warp_sums[MMA_WARPS][Traits::TILE][Traits::SUMS];
    /* Sums from all blocks, for each token of this block in the ring. */
    float gathered[Traits::STAGES * Traits::TILE / Traits::BLOCKS][Traits::BLOCKS][Traits::SUMS];
    float4 h_pre[Traits::STAGES][Traits::TILE]; /* zero from element N on */
    /* Of each token: columns of h_res, then h_post. Tiles alternate between two buffers. */
    post_column<Traits::N> post_coefficients[2][Traits::POST_PRE ? Traits::TILE : 1][Traits::N + 1];
    /* Scales of rows r, 8 + r and 16 + r of a warp. */
    float4 row_scales[Traits::BYTE_TERMS ? MMA_WARPS : 1][Traits::BYTE_TERMS ? 8 : 1];
    uint64_t full[Traits::STAGES], empty[Traits::STAGES], gathered_full[Traits::STAGES], h_pre_full[Traits::STAGES];
    uint64_t warp_sums_full, warp_sums_empty, y_full[Traits::STAGES], coefficients_full[2];
};
extern __shared__ __align__(1024) unsigned char memory[];

#define FOR_EACH_TILE(tile, ring, schedule)  \
    cot_pipeline_state<Traits::STAGES> ring; \
    for (int tile = (schedule).first; tile < (schedule).tiles; tile += (schedule).stride, ring.next())

/* phi gamma in half a step: the lane's two columns, and the lane's row of each octet. */
template <typename Traits>
static __device__ __forceinline__ void load_phi_gamma(const mhc_call &c, int rank, int warp, int step, int half,
                                                      float2 (&weights)[Traits::OCTETS])
{
    const int row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    const int k_step = warp * Traits::STEPS + step, chunk = k_step / Traits::CHUNK_STEPS,
              stream = chunk / Traits::CHUNKS;
    /* An f32 x is loaded four columns at a time: a lane then has the same four in phi gamma. */
    const int d = (rank * Traits::CHUNKS + chunk % Traits::CHUNKS) * Traits::CHUNK_COLUMNS +
                  k_step % Traits::CHUNK_STEPS * 16 + (Traits::IS_F32 ? pair * 4 + half * 2 : half * 8 + pair * 2);
    const bool inside = d < c.D;
    float2 gamma = {1.0f, 1.0f};
    if (present(c.gamma) && inside)
        gamma = *(const float2 *)((const float *)c.gamma.data + stream * c.gamma.stride[0] + d);
#pragma unroll
    for (int octet = 0; octet < Traits::OCTETS; octet++) {
        float2 value = {0.0f, 0.0f};
        if (inside)
            value =
                *(const float2 *)((const float *)c.phi.data + (octet * 8 + row) * c.phi.stride[0] + stream * c.D + d);
        weights[octet] = {value.x * gamma.x, value.y * gamma.y};
    }
}

constexpr float THIRD_CENTER = 192.0f; /* center of the range of a third term, in units: the range is from 128 to 256 */

/* Powers of two that scale the lane's row of each octet, over the warp's columns. f16: the elements are divided by the
 * scale; the largest is then from 2^14 to 2^15. bf16: the third terms are divided by it. Their distance from
 * THIRD_CENTER is at most 2^-17 p = 64 units, where p is the power of two below the row's largest element. */
template <typename Traits>
static __device__ __forceinline__ void find_row_scales(const mhc_call &c, int rank, int warp,
                                                       float (&row_scale)[Traits::OCTETS])
{
    constexpr int OCTETS = Traits::OCTETS;
    float largest[OCTETS] = {0};
#pragma unroll
    for (int s = 0; s < Traits::STEPS; s++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 weights[OCTETS];
            load_phi_gamma<Traits>(c, rank, warp, s, half, weights);
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++)
                largest[octet] = fmaxf(largest[octet], fmaxf(fabsf(weights[octet].x), fabsf(weights[octet].y)));
        }
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        float maximum = largest[octet];
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
        if (Traits::BYTE_TERMS)
            maximum *=
                1.0001f; /* the largest element minus THIRD_CENTER units must stay below twice the power of two */
        const uint32_t exponent = __float_as_uint(maximum) >> 23;
        row_scale[octet] = __uint_as_float(((exponent < 30 ? 30 : exponent) - (Traits::BYTE_TERMS ? 23 : 14)) << 23);
    }
}

/* Packs two third terms into a byte each: the distance from THIRD_CENTER in units, from -64 to 64, plus 64.
 * inverse_unit: 1 / unit. */
static __device__ __forceinline__ uint16_t pack_bytes(float2 value, float inverse_unit)
{
    const int x = __float2int_rn(value.x * inverse_unit) + 64, y = __float2int_rn(value.y * inverse_unit) + 64;
    return (uint16_t)(min(max(x, 0), 128) | min(max(y, 0), 128) << 8);
}

/* Unpacks the third terms of one half of a step as two bf16 numbers. */
static __device__ __forceinline__ uint32_t unpack_bytes(uint32_t word, int half)
{
    return __byte_perm(word, 0x43434343, half == 0 ? 0x4140 : 0x4342);
}

/* Loads phi gamma of the warp's columns of k and splits it into terms, as fragments of A:
 * [step][term * OCTETS + octet][half]. */
template <typename Traits>
static __device__ __forceinline__ void split_phi_gamma(const mhc_call &c, shared_memory<Traits> &shared, int rank,
                                                       int warp,
                                                       uint32_t (&phi)[Traits::STEPS][Traits::REGISTER_GROUPS][2],
                                                       float (&row_scale)[Traits::OCTETS])
{
    /* The terms of an f32 x's phi gamma are bf16. */
    typedef std::conditional_t<Traits::IS_F32, __nv_bfloat16, typename Traits::E> E;
    constexpr int OCTETS = Traits::OCTETS;
    if constexpr (cot_is_f16<E> || Traits::BYTE_TERMS)
        find_row_scales<Traits>(c, rank, warp, row_scale);
    if (Traits::BYTE_TERMS && threadIdx.x % 4 == 0)
        shared.row_scales[warp][threadIdx.x % 32 / 4] = {row_scale[0], row_scale[1], row_scale[2], 0.0f};
#pragma unroll
    for (int s = 0; s < Traits::STEPS; s++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 weights[OCTETS];
            if ((Traits::WIDE || Traits::IS_F32) && (2 * s + half) % 8 == 0)
                __syncwarp(); /* otherwise the compiler loads further ahead than the registers allow */
            load_phi_gamma<Traits>(c, rank, warp, s, half, weights);
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++) {
                float2 rest = weights[octet];
                if constexpr (Traits::BYTE_TERMS)
                    rest = {rest.x - THIRD_CENTER * row_scale[octet], rest.y - THIRD_CENTER * row_scale[octet]};
                if constexpr (cot_is_f16<E>)
                    rest = {rest.x * (1.0f / row_scale[octet]), rest.y * (1.0f / row_scale[octet])};
#pragma unroll
                for (int t = 0; t < Traits::TERMS; t++) {
                    const float2 term_input = rest;
                    const uint32_t term = cot_pack_pair<E>(rest.x, rest.y);
                    const float2 value = cot_unpack_pair<E>(term);
                    rest = {rest.x - value.x, rest.y - value.y};
                    if (Traits::in_shared(s, t))
                        ((uint32_t *)&shared.second_terms[warp][s + Traits::SHARED_STEPS - Traits::STEPS][octet]
                                                         [threadIdx.x % 32])[half] = term;
                    else if (!Traits::BYTE_TERMS || t < 2)
                        phi[s][t * OCTETS + octet][half] = term;
                    else
                        ((uint16_t *)&shared.third_terms[warp][s / 2][octet][threadIdx.x % 32])[s % 2 * 2 + half] =
                            pack_bytes(term_input, 1.0f / row_scale[octet]);
                }
            }
        }
}

/* Assembles the A fragments of a step, some of them from shared memory. third_terms: bytes of this step and the other
 * step of its pair. */
template <typename Traits>
static __device__ __forceinline__ void load_step(const shared_memory<Traits> &s, int warp, int step,
                                                 const uint32_t (&phi)[Traits::STEPS][Traits::REGISTER_GROUPS][2],
                                                 const uint2 (&third_terms)[Traits::OCTETS],
                                                 uint32_t (&A)[Traits::ROW_GROUPS][2])
{
    constexpr int OCTETS = Traits::OCTETS;
#pragma unroll
    for (int group = 0; group < Traits::ROW_GROUPS; group++) {
        if (Traits::BYTE_TERMS && group >= 2 * OCTETS) {
            const uint32_t word = step % 2 == 0 ? third_terms[group % OCTETS].x : third_terms[group % OCTETS].y;
            A[group][0] = unpack_bytes(word, 0), A[group][1] = unpack_bytes(word, 1);
        } else if (Traits::in_shared(step, group / OCTETS)) {
            const uint2 pair =
                s.second_terms[warp][step + Traits::SHARED_STEPS - Traits::STEPS][group % OCTETS][threadIdx.x % 32];
            A[group][0] = pair.x, A[group][1] = pair.y;
        } else {
            A[group][0] = phi[step][group % Traits::REGISTER_GROUPS][0],
            A[group][1] = phi[step][group % Traits::REGISTER_GROUPS][1];
        }
    }
}

/* post_pre: the MMA warps replace x of a tile with y. In pre, this does nothing. A thread has one 16-byte unit of one token,
 * in every STRIDE-th chunk. With tiles of 8 tokens it has the same of the fourth token after it. In wide blocks, the last
 * warp has no chunk. */
template <typename Traits> struct post_of_tiles {
    enum { SHORT = Traits::TILE == 8, STRIDE = SHORT ? MMA_WARPS : 2, CHUNKS = (Traits::CHUNKS + STRIDE - 1) / STRIDE };
    shared_memory<Traits> &s;
    const tile_schedule &schedule;
    cot_pipeline_state<Traits::STAGES> ring;
    cot_pipeline_state<2> coefficients;
    int token, chunk;

    __device__ __forceinline__ post_of_tiles(shared_memory<Traits> &shared, const tile_schedule &of_role)
        : s(shared), schedule(of_role)
    {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        token = (SHORT ? 0 : warp % 4 * 4) + lane / 8;
        chunk = SHORT ? warp : warp / 4;
    }

    __device__ __forceinline__ void apply(const mhc_call &c, int token)
    {
        const int offset = swizzled_offset(chunk * Traits::TILE + token, threadIdx.x % 8);
        /* Computed where it is needed: there is no register left for it. */
        auto is_inside = [&](int more) {
            return ((int)cot_cluster_rank() * Traits::CHUNKS + chunk + more * STRIDE) * Traits::CHUNK_COLUMNS <
                   (int)c.D;
        };
        apply_post<Traits, CHUNKS, STRIDE>(s.x[ring.stage] + offset, s.f[ring.stage] + offset,
                                           s.post_coefficients[coefficients.stage][token], token % 2, is_inside);
    }

    __device__ __forceinline__ void compute(const mhc_call &c, int tile)
    {
        if (!Traits::POST_PRE || tile >= schedule.tiles)
            return;
        if constexpr (Traits::POST_PRE) {
            cot_mbarrier_wait(&s.full[ring.stage], ring.parity);
            cot_mbarrier_wait(&s.coefficients_full[coefficients.stage], coefficients.parity);
            if (!SHORT || chunk < Traits::CHUNKS)
                apply(c, token);
            if (SHORT && chunk < Traits::CHUNKS)
                apply(c, token + 4);
            cot_fence_proxy_async();
            cot_mbarrier_arrive(&s.y_full[ring.stage]);
            ring.next();
            coefficients.next();
        }
    }
};

template <typename Traits, bool SPLIT>
static __device__ __forceinline__ void multiply(const mhc_call &c, shared_memory<Traits> &s,
                                                const tile_schedule &schedule)
{
    typedef typename Traits::E E;
    constexpr int M = Traits::M, OCTETS = Traits::OCTETS, TILE = Traits::TILE;
    constexpr int ROW_GROUPS = Traits::ROW_GROUPS, M_TILES = ROW_GROUPS / 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t phi[Traits::STEPS][Traits::REGISTER_GROUPS][2], parity = 0;
    float row_scale[OCTETS];
    split_phi_gamma<Traits>(c, s, schedule.column_block, warp, phi, row_scale);
    __syncwarp();
    if (!SPLIT)
        cot_cluster_wait();
    /* One ldmatrix loads 8 tokens of 2 steps, which are half a chunk. The lane addresses 16-byte unit lane/8 of its
     * row, swizzled. row_address[0] is for the warp's first two steps, row_address[1] for the next two. */
    uint32_t row_address[2];
#pragma unroll
    for (int next = 0; next < 2; next++) {
        const int pair = warp * Traits::PAIRS + next;
        row_address[next] = cot_shared_address(s.x) + (uint32_t)((pair / 2 * TILE + lane % 8) * 128) +
                            (uint32_t)(((lane / 8 + pair % 2 * 4) ^ lane % 8) * 16);
    }
    post_of_tiles<Traits> post(s, schedule);
    post.compute(c, schedule.first);
    FOR_EACH_TILE(tile, ring, schedule)
    {
        post.compute(c, tile + schedule.stride);
        const uint32_t stage_offset = (uint32_t)(ring.stage * Traits::STAGE_BYTES),
                       first_row = row_address[0] + stage_offset;
        /* Bit 6 selects the other half of the swizzled chunk. */
        const uint32_t row_base[2] = {first_row,
                                      Traits::PAIRS % 2 == 0 ? first_row ^ 64 : row_address[1] + stage_offset};
        cot_mbarrier_wait(Traits::POST_PRE ? &s.y_full[ring.stage] : &s.full[ring.stage], ring.parity);
#pragma unroll
        for (int t = 0; t < TILE / 8; t++) {
            /* Half-filled m-tile: rows 0-7 are the last row group (nine groups), rows 8-15 the tokens, whose diagonal
             * is the squares. `partial` sums at most SQUARES_PAIRS pairs on the tensor cores, last_tile_sums in
             * float32. */
            float sums[M_TILES][4] = {0}, last_tile_sums[4] = {0}, partial[4] = {0};
#pragma unroll
            for (int pair = 0; pair < Traits::PAIRS; pair++) {
                uint32_t x[4];
                cot_ldmatrix_x4(x, row_base[pair % 2] + (uint32_t)((pair / 2 * TILE + t * 8) * 128));
                uint2 third_terms[OCTETS];
                if constexpr (Traits::BYTE_TERMS)
#pragma unroll
                    for (int octet = 0; octet < OCTETS; octet++)
                        third_terms[octet] = s.third_terms[warp][pair][octet][lane];
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    uint32_t A[ROW_GROUPS][2];
                    load_step(s, warp, 2 * pair + u, phi, third_terms, A);
#pragma unroll
                    for (int m = 0; m < M_TILES; m++)
                        mma<E>(sums[m], A[2 * m][0], A[2 * m + 1][0], A[2 * m][1], A[2 * m + 1][1], x[2 * u],
                               x[2 * u + 1]);
                    if constexpr (ROW_GROUPS % 2 != 0)
                        mma<E>(partial, A[ROW_GROUPS - 1][0], x[2 * u], A[ROW_GROUPS - 1][1], x[2 * u + 1], x[2 * u],
                               x[2 * u + 1]);
                    else
                        mma<E>(partial, 0, x[2 * u], 0, x[2 * u + 1], x[2 * u], x[2 * u + 1]);
                }
                /* Tensor cores truncate sums: squares summed only by them would come out too small. */
                if (pair % Traits::SQUARES_PAIRS == Traits::SQUARES_PAIRS - 1 || pair == Traits::PAIRS - 1)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        last_tile_sums[i] += partial[i], partial[i] = 0.0f;
            }
            if (SPLIT && t == TILE / 8 - 1) {
                __syncwarp();
                if (lane == 0)
                    cot_mbarrier_arrive(&s.empty[ring.stage]);
            }
            /* Load the scales before the sums are stored: otherwise the compiler places the loads between the
             * stores. */
            if constexpr (Traits::BYTE_TERMS) {
                const float4 row_scales = s.row_scales[warp][lane / 4];
                row_scale[0] = row_scales.x, row_scale[1] = row_scales.y, row_scale[2] = row_scales.z;
            }
            if (t == 0)
                cot_mbarrier_wait(&s.warp_sums_empty, parity ^ 1);
#pragma unroll
            for (int p = 0; p < 2; p++) {
                float *to = s.warp_sums[warp][t * 8 + lane % 4 * 2 + p];
#pragma unroll
                for (int octet = 0; octet < OCTETS; octet++) { /* add the smallest terms first */
                    const int last_group = ROW_GROUPS - OCTETS + octet;
                    float sum =
                        last_group / 2 == M_TILES ? last_tile_sums[p] : sums[last_group / 2][last_group % 2 * 2 + p];
                    if (Traits::BYTE_TERMS)
                        sum *= row_scale[octet];
#pragma unroll
                    for (int group = last_group - OCTETS; group >= 0; group -= OCTETS)
                        sum += sums[group / 2][group % 2 * 2 + p];
                    to[octet * 8 + lane / 4] = cot_is_f16<E> ? sum * row_scale[octet] : sum;
                }
                if (lane % 4 * 2 + p == lane / 4)
                    to[M] = last_tile_sums[2 + p];
            }
        }
        arrive_all_lanes(&s.warp_sums_full);
        parity ^= 1;
    }
}

/* The same for an f32 x, whose elements are split into three bf16 terms. Products of fourth and higher order are left
 * out. CUDA cores sum the squares. */
template <typename Traits>
static __device__ __forceinline__ void multiply_f32(const mhc_call &c, shared_memory<Traits> &s,
                                                    const tile_schedule &schedule)
{
    constexpr int M = Traits::M, OCTETS = Traits::OCTETS, TERMS = Traits::TERMS, TILE = Traits::TILE;
    constexpr int LAST = Traits::ROW_GROUPS - 1; /* the last group of rows: the others are pairs */
    static_assert(TILE == 8, "a product has the tokens of a tile as its columns");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane / 4, pair = lane % 4;
    uint32_t phi[Traits::STEPS][Traits::ROW_GROUPS][2], parity = 0;
    float row_scale[OCTETS];
    split_phi_gamma<Traits>(c, s, schedule.column_block, warp, phi, row_scale);
    __syncwarp();
    cot_cluster_wait();
    /* A lane has four columns of its token in each of the two steps of a chunk. Lanes of odd tokens load those of the
     * second step first: otherwise the loads of two tokens would use the same banks. */
    const bool swaps = token % 2 != 0;
    const uint32_t row = cot_shared_address(s.x) + (uint32_t)((warp * Traits::PAIRS * TILE + token) * 128) +
                         (uint32_t)(((pair + (swaps ? 4 : 0)) ^ token) * 16);
    post_of_tiles<Traits> post(s, schedule);
    post.compute(c, schedule.first);
    FOR_EACH_TILE(tile, ring, schedule)
    {
        post.compute(c, tile + schedule.stride);
        /* [pair of row groups]: products of the first term of x; of the second and third terms. */
        float sums[LAST / 2][4] = {0}, low_sums[OCTETS][4] = {0};
        /* Of the last group: products of both steps of a chunk. The other half of each is not used. */
        float last_sums[2][4] = {0}, squares = 0.0f;
        uint32_t x = row + (uint32_t)(ring.stage * Traits::STAGE_BYTES);
        cot_mbarrier_wait(Traits::POST_PRE ? &s.y_full[ring.stage] : &s.full[ring.stage], ring.parity);
#pragma unroll
        for (int chunk = 0; chunk < Traits::PAIRS; chunk++, x += TILE * 128) {
            const cot_words<4> first = cot_load_shared<4>(x), second = cot_load_shared<4>(x ^ 64);
#pragma unroll
            for (int u = 0; u < 2; u++) {
                float v[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    v[i] = __uint_as_float(swaps == (u == 0) ? second.word[i] : first.word[i]);
                const uint32_t(&A)[Traits::ROW_GROUPS][2] = phi[2 * chunk + u], (&A_first)[2] = phi[2 * chunk][LAST],
                      (&A_second)[2] = phi[2 * chunk + 1][LAST];
                uint32_t low[TERMS], high[TERMS];
                squares = fmaf(v[3], v[3], fmaf(v[2], v[2], fmaf(v[1], v[1], fmaf(v[0], v[0], squares))));
                cot_split_bf16(v[0], v[1], low);
                cot_split_bf16(v[2], v[3], high);
                /* The last pair of groups may contain one group that this term of x does not need. Its product (fourth
                 * order or higher) is added too. */
#pragma unroll
                for (int p = TERMS - 1; p >= 0; p--)
#pragma unroll
                    for (int group = 0; group < (TERMS - p) * OCTETS && group < LAST; group += 2)
                        cot_mma_bf16(p == 0 ? sums[group / 2] : low_sums[group / 2], A[group][0], A[group + 1][0],
                                     A[group][1], A[group + 1][1], low[p], high[p]);
                cot_mma_bf16(last_sums[u], A_first[0], A_second[0], A_first[1], A_second[1], low[0], high[0]);
            }
        }
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        squares += __shfl_xor_sync(0xffffffffu, squares, 2);
        cot_mbarrier_wait(&s.warp_sums_empty, parity ^ 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *to = s.warp_sums[warp][pair * 2 + half];
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++) { /* add the smallest terms first */
                float sum = 0.0f;
#pragma unroll
                for (int term = TERMS - 1; term >= 0; term--) {
                    const int group = term * OCTETS + octet, low_group = group - OCTETS;
                    if (low_group >= 0)
                        sum += low_sums[low_group / 2][low_group % 2 * 2 + half];
                    sum += group == LAST ? last_sums[0][half] + last_sums[1][2 + half]
                                         : sums[group / 2][group % 2 * 2 + half];
                }
                to[octet * 8 + lane / 4] = sum;
            }
        }
        if (pair == 0)
            s.warp_sums[warp][token][M] = squares;
        arrive_all_lanes(&s.warp_sums_full);
        parity ^= 1;
    }
}

/* Waits until at most PENDING of this thread's bulk groups still read shared memory. */
template <int PENDING> static __device__ __forceinline__ void wait_bulk_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* post_pre: null in pre. */
template <typename Traits>
static __device__ __forceinline__ void compute_h_in(const mhc_call &c, const mhc_post_pre_call *post_pre,
                                                    shared_memory<Traits> &s, const tile_schedule &schedule)
{
    typedef typename Traits::E E;
    constexpr int N = Traits::N, VECTOR = Traits::VECTOR, CHUNK_COLUMNS = Traits::CHUNK_COLUMNS;
    /* 16-byte units in a chunk of one stream. A thread processes one unit in every (128 / UNITS)-th chunk. */
    constexpr int UNITS = Traits::TILE * 8;
    const int thread = threadIdx.x % 128, t = thread % UNITS / 8, unit = thread % 8;
    const int x_offset = (thread / UNITS * Traits::TILE + t) * 128 + (unit ^ (t & 7)) * 16;
    const int d = (schedule.column_block * Traits::CHUNKS + thread / UNITS) * CHUNK_COLUMNS + unit * VECTOR;
    /* Number of the block's chunks below D, counted from the thread's first chunk. */
    const int chunks =
        min((int)Traits::CHUNKS, (int)c.D / CHUNK_COLUMNS - schedule.column_block * Traits::CHUNKS) - thread / UNITS;
    const int64_t stride = c.h_in.stride[c.T > 1 ? 1 : 0]; /* between tokens, for any B */
    auto finish_tile = [&](int tile, const cot_pipeline_state<Traits::STAGES> &ring) {
        if (!Traits::POST_PRE) /* otherwise the caller has waited for y_full */
            cot_mbarrier_wait(&s.full[ring.stage], ring.parity);
        cot_mbarrier_wait(&s.h_pre_full[ring.stage], ring.parity);
        if (thread == 0)
            cot_mbarrier_arrive_expect(&s.h_pre_full[ring.stage], sizeof s.h_pre[0]);
        const bool active = present(c.h_in) && tile * Traits::TILE + t < (int)c.tokens;
        const unsigned char *x = s.x[ring.stage] + x_offset;
        E *to = (E *)c.h_in.data + ((int64_t)tile * Traits::TILE + t) * stride + d;
#pragma unroll
        for (int pass = 0; pass < (Traits::CHUNKS * UNITS + 127) / 128; pass++) {
            const int chunk = pass * (128 / UNITS);
            if (!active || chunk >= chunks)
                break;
            const float4 h = s.h_pre[ring.stage][t];
            const float h_pre[4] = {h.x, h.y, h.z, h.w};
            float sum[VECTOR] = {0};
#pragma unroll
            for (int i = 0; i < N; i++) {
                const uint4 raw = *(const uint4 *)(x + (i * Traits::CHUNKS + chunk) * Traits::TILE * 128);
                cot_vector<E, VECTOR> piece = {{raw.x, raw.y, raw.z, raw.w}};
                float values[VECTOR];
                cot_unpack(piece, values);
#pragma unroll
                for (int v = 0; v < VECTOR; v++)
                    sum[v] = fmaf(h_pre[i], values[v], sum[v]);
            }
            cot_store_vector<E, VECTOR>(to + chunk * CHUNK_COLUMNS, sum);
        }
        __syncwarp();
        if (Traits::POST_PRE && thread == 0)
            wait_bulk_read<1>(); /* the store of y has read the stage; that of the next tile may be pending */
        if (threadIdx.x % 32 == 0)
            cot_mbarrier_arrive(&s.empty[ring.stage]);
    };
    if constexpr (!Traits::POST_PRE) {
        cot_cluster_wait();
        FOR_EACH_TILE(tile, ring, schedule)
        {
            finish_tile(tile, ring);
        }
    } else {
        cot_cluster_wait();
        cot_pipeline_state<Traits::STAGES> y_ring, ring;
        for (int tile = schedule.first; tile < schedule.tiles + schedule.stride; tile += schedule.stride) {
            if (tile < schedule.tiles) {
                cot_mbarrier_wait(&s.y_full[y_ring.stage], y_ring.parity);
                if (thread == 0) {
                    cot_tma_store_4d(&post_pre->y, 0, tile * Traits::TILE, schedule.column_block * Traits::CHUNKS, 0,
                                     s.x[y_ring.stage]);
                    cot_bulk_commit();
                }
                y_ring.next();
            }
            if (tile >= schedule.stride) { /* there is a tile before: first < stride */
                finish_tile(tile - schedule.stride, ring);
                ring.next();
            }
        }
        if (thread == 0)
            cot_bulk_wait_read(); /* the block's shared memory must live until then */
        __syncwarp();
    }
}

/* The rank of the owner block of a token of a tile. Tiles of 8 tokens alternate between the two halves of a cluster of
 * 16 blocks. */
template <typename Traits> static __device__ __forceinline__ int owner_rank_of(int stage, int token)
{
    static_assert(Traits::STAGES * Traits::TILE % Traits::BLOCKS == 0,
                  "a stage must have the same owner blocks for every tile");
    return (stage * Traits::TILE + token) % Traits::BLOCKS;
}

/* The index of a token in `gathered` of its owner block. */
template <typename Traits> static __device__ __forceinline__ int owned_index(int stage, int token)
{
    return (stage * Traits::TILE + token) / Traits::BLOCKS;
}

template <typename Traits, bool SPLIT, typename Call>
static __device__ __forceinline__ void reduce(const Call &p, shared_memory<Traits> &s, const tile_schedule &schedule)
{
    constexpr int SUMS = Traits::SUMS;
    const mhc_call &c = p.call;
    const int thread = threadIdx.x % 64;
    uint32_t parity = 0;
    int buffer = 0;
    const post_coefficient_loads<Traits, 64> coefficients(p, thread);
    auto load_coefficients = [&](int tile) {
        if constexpr (Traits::POST_PRE) {
            coefficients.start((float *)s.post_coefficients[buffer], tile * Traits::TILE, (int)c.tokens);
            if (tile * Traits::TILE < (int)c.tokens) /* nothing waits for a tile that does not exist */
                cot_cp_async_arrive(&s.coefficients_full[buffer]);
            buffer ^= 1;
        }
    };
    if (Traits::POST_PRE)
#pragma unroll 1
        for (int k = 0; k < 3; k++) {
            if (k == 2)
                cot_mbarrier_wait(&s.y_full[0], 0); /* y of the first tile has been computed: its buffer is free */
            load_coefficients(schedule.first + k * schedule.stride);
        }
    if (!SPLIT)
        cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, schedule)
    {
        cot_mbarrier_wait(&s.warp_sums_full, parity);
#pragma unroll
        for (int q = thread; q < Traits::TILE * SUMS / 4; q += 64) {
            const int token = q / (SUMS / 4), first_sum = q % (SUMS / 4) * 4;
            float4 sum = *(const float4 *)&s.warp_sums[0][token][first_sum];
#pragma unroll
            for (int warp = 1; warp < MMA_WARPS; warp++) {
                const float4 other = *(const float4 *)&s.warp_sums[warp][token][first_sum];
                sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
            }
            const int64_t global_token = (int64_t)tile * Traits::TILE + token;
            const int owner_rank = owner_rank_of<Traits>(ring.stage, token);
            if (!SPLIT)
                cot_store_async(
                    cot_mapa(cot_shared_address(
                                 &s.gathered[owned_index<Traits>(ring.stage, token)][schedule.column_block][first_sum]),
                             owner_rank),
                    cot_mapa(cot_shared_address(&s.gathered_full[ring.stage]), owner_rank), __float_as_uint(sum.x),
                    __float_as_uint(sum.y), __float_as_uint(sum.z), __float_as_uint(sum.w));
            else if (global_token < c.tokens)
                *(float4 *)(c.sums + (global_token * c.slices + schedule.column_block) * SUMS + first_sum) = sum;
        }
        arrive_all_lanes(&s.warp_sums_empty);
        parity ^= 1;
        /* The MMA warps computed y of the next tile before these sums, so its buffer is free. */
        load_coefficients(tile + 3 * schedule.stride);
    }
}

/* The element where lane j stores coefficient j. */
template <int N> static __device__ __forceinline__ token_element value_element(const mhc_call &c, int j)
{
    const int M = N * (N + 2), ij = j - 2 * N;
    if (j < N)
        return token_element(c.h_pre, j * c.h_pre.stride[2], true);
    if (j < 2 * N)
        return token_element(c.h_post, (j - N) * c.h_post.stride[2], true);
    return token_element(c.h_res_logits, ij / N * c.h_res_logits.stride[2] + ij % N * c.h_res_logits.stride[3], j < M);
}

/* 1 / sqrt(x) with an error of about 1 ulp: the hardware approximation and one Newton step. 0 and infinity skip the
 * step. */
static __device__ __forceinline__ float rsqrt_newton(float x)
{
    const float y = rsqrtf(x), residual = fmaf(-x * y, y, 1.0f);
    return fmaf(0.5f * y, residual < 1.0f ? residual : 0.0f, y);
}

/* 1 / x by the same method, for x from 1 to 2. */
static __device__ __forceinline__ float reciprocal_newton(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return fmaf(y, fmaf(-x, y, 1.0f), y);
}

/* All blocks wait for h_pre from all owner warps. The path from the last block's sums to h_pre is latency-critical, so
 * it has no division. */
template <typename Traits>
static __device__ __forceinline__ void run_owner(const mhc_call &c, shared_memory<Traits> &s,
                                                 const tile_schedule &schedule)
{
    constexpr int N = Traits::N, M = Traits::M, SUMS = Traits::SUMS;
    const int lane = threadIdx.x % 32;
    const bool is_coefficient = lane < M;
    const float alpha = is_coefficient ? load_f32(c.alpha, alpha_index(N, lane) * c.alpha.stride[0]) : 0.0f;
    const float bias = is_coefficient ? load_f32(c.bias, lane * c.bias.stride[0]) : 0.0f;
    const token_element to_value = value_element<N>(c, lane);
    /* Lane M, which sums the squares, stores inv_rms. */
    const token_element to_sum = is_coefficient ? token_element(c.h_mix, lane * c.h_mix.stride[2], true)
                                                : token_element(c.inv_rms, 0, lane == M);
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, schedule)
    {
        const int first_token = (schedule.column_block - ring.stage * Traits::TILE) & (Traits::BLOCKS - 1);
        if (first_token >= Traits::TILE) /* the other half of the blocks owns the tokens of this tile */
            continue;
        cot_mbarrier_wait(&s.gathered_full[ring.stage], ring.parity);
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive_expect(&s.gathered_full[ring.stage], Traits::OWNED * sizeof s.gathered[0]);
#pragma unroll 1
        for (int k = 0; k < Traits::OWNED; k++) {
            const int tile_token = first_token + k * Traits::BLOCKS;
            float parts[4] = {0};
            if (lane < SUMS)
#pragma unroll(Traits::SUM_UNROLL)
                for (int block = 0; block < Traits::BLOCKS; block++)
                    parts[block % 4] += s.gathered[owned_index<Traits>(ring.stage, tile_token)][block][lane];
            const float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
            const float squares = __shfl_sync(0xffffffffu, sum, M);
            const float inv_rms = rsqrt_newton(__fdividef(squares, (float)(N * c.D)) + c.norm_eps);
            const float z = fmaf(alpha, sum * inv_rms, bias), e = expf(-fabsf(z)), larger = reciprocal_newton(1.0f + e);
            const float sigmoid = z < 0.0f ? e * larger : larger;
            const float value = lane < N ? sigmoid + c.hc_eps : lane < 2 * N ? c.post_scale * sigmoid : z;
            uint32_t h_pre[4] = {0};
#pragma unroll
            for (int i = 0; i < N; i++)
                h_pre[i] = __float_as_uint(__shfl_sync(0xffffffffu, value, i));
            if (lane < Traits::BLOCKS)
                cot_store_async(cot_mapa(cot_shared_address(&s.h_pre[ring.stage][tile_token]), lane),
                                cot_mapa(cot_shared_address(&s.h_pre_full[ring.stage]), lane), h_pre[0], h_pre[1],
                                h_pre[2], h_pre[3]);
            const uint32_t token = (uint32_t)(tile * Traits::TILE + tile_token), b = token / (uint32_t)c.T,
                           t = token - b * (uint32_t)c.T;
            if (token >= c.tokens)
                continue;
            if (to_sum.data != nullptr)
                *to_sum.address(b, t) = is_coefficient ? sum : inv_rms;
            if (to_value.data != nullptr)
                *to_value.address(b, t) = value;
            if (is_coefficient && lane >= 2 * N && c.logits != nullptr)
                c.logits[token * (N * N) + lane - 2 * N] = value;
        }
    }
}

/* The schedule for one role. In post_pre and f32, each role reads blockIdx.x again. Otherwise ptxas keeps the first
 * tile in one register for all roles, and spills it in the role with the fewest registers. */
template <typename Traits> static __device__ __forceinline__ tile_schedule for_role(tile_schedule schedule)
{
    if constexpr (Traits::POST_PRE || Traits::IS_F32) {
        int block;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
        schedule.first = block / Traits::BLOCKS;
    }
    return schedule;
}

/* Call: mhc_mapped_call, or mhc_post_pre_call. */
template <typename Traits, bool SPLIT, typename Call>
static __device__ __forceinline__ void produce(const Call &p, shared_memory<Traits> &s, const tile_schedule &schedule)
{
    if (threadIdx.x % 32 == 0) {
        FOR_EACH_TILE(tile, ring, schedule)
        {
            cot_mbarrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
            cot_mbarrier_arrive_expect(&s.full[ring.stage],
                                       Traits::STAGE_BYTES + (Traits::POST_PRE ? Traits::STREAM_BYTES : 0));
            if constexpr (Traits::POST_PRE)
                cot_tma_load_4d(s.f[ring.stage], &p.f, 0, tile * Traits::TILE, schedule.column_block * Traits::CHUNKS,
                                0, &s.full[ring.stage]);
            cot_tma_load_4d(s.x[ring.stage], &p.x, 0, tile * Traits::TILE, schedule.column_block * Traits::CHUNKS, 0,
                            &s.full[ring.stage]);
        }
    }
    __syncwarp();
    if (!SPLIT)
        cot_cluster_wait(); /* the producer never stores to another block */
}

template <typename Traits, bool SPLIT, typename Call> static __device__ __forceinline__ void forward(const Call &p)
{
    static_assert(sizeof(shared_memory<Traits>) <= MHC_SM90_SHARED_BYTES, "must fit in a block's shared memory");
    shared_memory<Traits> &s = *(shared_memory<Traits> *)memory;
    const mhc_call &c = p.call;
    const int warp = threadIdx.x / 32;
    const tile_schedule schedule = make_schedule<SPLIT, Traits::TILE, Traits::BLOCKS>(c);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Traits::STAGES; stage++) {
            cot_mbarrier_init(&s.full[stage], 1);
            cot_mbarrier_init(&s.empty[stage], SPLIT ? MMA_WARPS : 4);
            cot_mbarrier_init(&s.y_full[stage], 32 * MMA_WARPS);
            cot_mbarrier_init(&s.gathered_full[stage], 1);
            cot_mbarrier_init(&s.h_pre_full[stage], 1);
            cot_mbarrier_arrive_expect(&s.gathered_full[stage], Traits::OWNED * sizeof s.gathered[0]);
            cot_mbarrier_arrive_expect(&s.h_pre_full[stage], sizeof s.h_pre[0]);
        }
        for (int buffer = 0; buffer < 2; buffer++)
            cot_mbarrier_init(&s.coefficients_full[buffer], 2 * 32);
        cot_mbarrier_init(&s.warp_sums_full, 32 * MMA_WARPS);
        cot_mbarrier_init(&s.warp_sums_empty, 2 * 32);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    if (!SPLIT)
        cot_cluster_arrive(); /* the matching wait precedes the first store to another block */
    if (warp < MMA_WARPS) {
        cot_setmaxnreg_inc<(SPLIT ? 224 : Traits::MMA_REGISTERS)>();
        if constexpr (Traits::IS_F32)
            multiply_f32(c, s, for_role<Traits>(schedule));
        else
            multiply<Traits, SPLIT>(c, s, for_role<Traits>(schedule));
    } else if (warp < MMA_WARPS + 4) {
        cot_setmaxnreg_dec<(SPLIT ? 56 : Traits::OWNER_REGISTERS)>();
        if (warp < MMA_WARPS + 2)
            reduce<Traits, SPLIT>(p, s, for_role<Traits>(schedule));
        else if (warp == MMA_WARPS + 2)
            produce<Traits, SPLIT>(p, s, for_role<Traits>(schedule));
        else if constexpr (!SPLIT)
            run_owner(c, s, for_role<Traits>(schedule));
    } else if constexpr (!SPLIT) {
        cot_setmaxnreg_dec<Traits::H_IN_REGISTERS>();
        if constexpr (Traits::POST_PRE)
            compute_h_in(c, &p, s, for_role<Traits>(schedule));
        else
            compute_h_in(c, nullptr, s, for_role<Traits>(schedule));
    }
    if (!SPLIT) {
        cot_cluster_arrive(); /* no block exits while another block may still write to its shared memory */
        cot_cluster_wait();
    }
}

/* blocks: of a cluster. The suffix `_blocksN` gives it, except for 16. */
#define POST_PRE_INSTANCE(name, element, n, columns, blocks)                 \
    extern "C" __global__ void __launch_bounds__(MHC_SM90_FWD_THREADS, 1)    \
        mhc_post_pre_fwd_##name(const __grid_constant__ mhc_post_pre_call p) \
    {                                                                        \
        forward<fwd_traits<element, n, columns, blocks, true>, false>(p);    \
    }
#define INSTANCE(name, element, n, columns, blocks, split, threads)   \
    extern "C" __global__ void __launch_bounds__(threads, 1)          \
        mhc_pre_fwd_##name(const __grid_constant__ mhc_mapped_call p) \
    {                                                                 \
        forward<fwd_traits<element, n, columns, blocks>, split>(p);   \
    }
/* Of pre and of post_pre. */
#define INSTANCES(name, element, n, columns, blocks)                         \
    INSTANCE(name, element, n, columns, blocks, false, MHC_SM90_FWD_THREADS) \
    POST_PRE_INSTANCE(name, element, n, columns, blocks)
#define CLUSTER_INSTANCES(name, element, n)                                         \
    INSTANCES(cluster_sm90_##name, element, n, MHC_SM90_COLUMNS_OF(n), 16)          \
    INSTANCES(cluster_sm90_##name##_blocks8, element, n, MHC_SM90_COLUMNS_OF(n), 8) \
    INSTANCES(cluster_sm90_##name##_blocks4, element, n, MHC_SM90_COLUMNS_OF(n), 4)
#define HALF_INSTANCES(dtype, element)                                  \
    CLUSTER_INSTANCES(dtype, element, 4)                                \
    CLUSTER_INSTANCES(n2_##dtype, element, 2)                           \
    INSTANCES(wide_sm90_##dtype, element, 4, MHC_SM90_WIDE_COLUMNS, 16) \
    INSTANCE(split_sm90_##dtype, element, 4, MHC_SM90_COLUMNS_OF(4), 16, true, MHC_SM90_SPLIT_THREADS)
HALF_INSTANCES(f16, __half)
HALF_INSTANCES(bf16, __nv_bfloat16)
CLUSTER_INSTANCES(f32, float, 4)
CLUSTER_INSTANCES(n2_f32, float, 2)
