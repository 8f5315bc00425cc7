/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_fwd_cluster_sm90.cu: pre forward in one pass over x, n = 4, bf16 and f16. Clusters of 16 blocks go through tiles
 * of 16 tokens; block `rank` has columns [256 rank, 256 rank + 256) of all four streams, and so h_in of them, and owns
 * token `rank` of each tile. What goes around, a ring slot a tile:
 *
 *   producer   x of the tile to shared memory, one box
 *   8 products warps, 128 k each: phi gamma as three bf16 terms (float32's 24 bits) is the A operand and stays in
 *              registers, tokens are the columns of B. Nine groups of eight rows, the half m-tile left over holding the
 *              tokens themselves: its diagonal is the sums of squares. Of f16, two terms: a row is scaled by a power of
 *              two that brings its largest element near the top of f16's range.
 *   2 reducers add up the warps' sums and send each token's to its owner
 *   owner      adds up the blocks' sums, writes the token's coefficients, sends h_pre to all blocks
 *   4 h_in     warps: h_in of the block's columns, a token a warp; then the slot is free
 *
 *   barrier           arrivals                     phase ends when
 *   full[slot]        producer's one               the tile has its bytes
 *   partial_full      a warp of products           all warps' sums are there
 *   partial_empty     a reducer                    those are read
 *   gathered[slot]    owner's one                  the sums of all blocks for its token have come
 *   h_pre_full[slot]  h_in's one                   h_pre of all tokens has come
 *   empty[slot]       a warp of h_in               x is read
 *
 * A slot of another block may be written without asking: who sends for tile t+STAGES has freed its own slot of tile t,
 * so it had h_pre of all that tile's tokens, so each owner had read what was sent to it, and likewise the other way.
 *
 * Wide, for a D beyond 4096: blocks have 448 columns and tiles 8 tokens, whose owners are one half of the blocks and the
 * other half in turn. What the registers cannot hold of phi gamma waits in shared memory and is read for every tile: of
 * f16, second terms; of bf16, the third terms, a byte each, in steps of 2^-23 of the power of two below the largest element
 * of a row in the warp's columns. A byte behind the high one of bf16's 128 is a number from 128 to 256, so what is split into
 * terms is the element less 192 steps, and nothing is left to be taken off when the products are made.
 *
 * SPLIT, for a D that has more slices of 256 columns than a cluster has blocks, and for any f16 or bf16: blocks know
 * nothing of each other. A block has a slice and every so many tiles; the reducers store its sums, and the products free
 * the slot. mhc_pre_tokens.cu adds up the slices and reads x again for h_in. */
#include "mhc_mma.cuh"

enum {
    N = MHC_SM90_N,
    M = MHC_SM90_M,
    SUMS = 28, /* of a token: M of h_mix, the squares, padding to whole 16 bytes */
    PRODUCTS = 8,
    OCTETS = M / 8
};
static_assert((int)SUMS == (int)MHC_CUDA_SUMS(MHC_SM90_N), "what the reducers leave for mhc_pre_tokens.cu");

template <typename E> constexpr int terms_of = cot_is_f16<E> ? 2 : 3;
template <typename E> constexpr int groups_of = terms_of<E> *OCTETS;

/* A block with CHUNKS_ times 64 columns of each stream. Beyond four, phi gamma is more than the registers hold: lent to
 * shared memory are the second terms of a warp's last steps or, as bytes, all third terms. */
template <typename E_, int CHUNKS_> struct form {
    typedef E_ E;
    enum {
        CHUNKS = CHUNKS_,
        WIDE = CHUNKS > MHC_SM90_CHUNKS,
        TILE = WIDE ? MHC_SM90_WIDE_TILE : MHC_SM90_TILE,
        STAGES = 6,
        STAGE_BYTES = N * CHUNKS * MHC_SM90_CHUNK * TILE * 2,
        STEPS = N * CHUNKS * MHC_SM90_CHUNK / 16 / PRODUCTS, /* of 16 k, of a warp of products */
        PAIRS = STEPS / 2,
        GROUPS = groups_of<E>,
        HELD = WIDE ? 2 * OCTETS : GROUPS,    /* groups of a step that stay in registers, but for the last steps */
        LENT = WIDE && cot_is_f16<E> ? 7 : 0, /* steps; as many as it takes for the rest not to spill */
        BYTES = WIDE && !cot_is_f16<E>,
        RUN = BYTES ? 4 : 1 /* pairs of steps whose squares the tensor cores add up */
    };
    static __device__ __forceinline__ constexpr bool lent(int step, int term)
    {
        return term == 1 && step >= STEPS - LENT;
    }
};

template <typename F> struct shared_memory {
    unsigned char x[F::STAGES][F::STAGE_BYTES]; /* [stream][chunk][token][128 bytes, swizzled] */
    uint2 phi[PRODUCTS][F::LENT > 0 ? F::LENT : 1][F::LENT > 0 ? OCTETS : 1][F::LENT > 0 ? 32 : 1];
    uint2 third[PRODUCTS][F::BYTES ? F::PAIRS : 1][F::BYTES ? OCTETS : 1][F::BYTES ? 32 : 1]; /* a word a step */
    float partial[PRODUCTS][F::TILE][SUMS];
    float gathered[F::STAGES * F::TILE / MHC_SM90_CLUSTER][MHC_SM90_CLUSTER][SUMS]; /* of slots with an own token */
    float h_pre[F::STAGES][F::TILE][N];
    float4 units[F::BYTES ? PRODUCTS : 1][F::BYTES ? 8 : 1]; /* of a warp's rows, one of each octet */
    uint64_t full[F::STAGES], empty[F::STAGES], gathered_full[F::STAGES], h_pre_full[F::STAGES];
    uint64_t partial_full, partial_empty;
};
extern __shared__ __align__(1024) unsigned char memory[];

#define FOR_EACH_TILE(tile, ring, own) \
    cot_ring<F::STAGES> ring;          \
    for (int tile = (own).first; tile < (own).tiles; tile += (own).step, ring.next())

/* phi gamma of the lane's two columns of half a step, of the lane's row of each octet. */
template <typename F>
static __device__ __forceinline__ void load_weights(const mhc_call &c, int rank, int warp, int s, int half,
                                                    float2 (&weights)[OCTETS])
{
    const int row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    const int step = warp * F::STEPS + s, block = step / 4, stream = block / F::CHUNKS;
    const int d = (rank * F::CHUNKS + block % F::CHUNKS) * MHC_SM90_CHUNK + step % 4 * 16 + half * 8 + pair;
    const bool inside = d < c.D;
    float2 gamma = {1.0f, 1.0f};
    if (given(c.gamma) && inside)
        gamma = *(const float2 *)((const float *)c.gamma.data + stream * c.gamma.stride[0] + d);
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        float2 value = {0.0f, 0.0f};
        if (inside)
            value =
                *(const float2 *)((const float *)c.phi.data + (octet * 8 + row) * c.phi.stride[0] + stream * c.D + d);
        weights[octet] = {value.x * gamma.x, value.y * gamma.y};
    }
}

constexpr float THIRD = 192.0f; /* steps in the middle of what a third term may be: from 128 to 256 */

/* The powers of two that the lane's rows of the warp's columns are divided by, f16's elements, or bf16's third terms, which
 * are off from THIRD by 2^-16 of the largest element at most: the largest is then from 2^14 to 2^15, or that up to 64. */
template <typename F>
static __device__ __forceinline__ void find_units(const mhc_call &c, int rank, int warp, float (&unit)[OCTETS])
{
    float largest[OCTETS] = {0};
#pragma unroll
    for (int s = 0; s < F::STEPS; s++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 weights[OCTETS];
            load_weights<F>(c, rank, warp, s, half, weights);
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++)
                largest[octet] = fmaxf(largest[octet], fmaxf(fabsf(weights[octet].x), fabsf(weights[octet].y)));
        }
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        float most = largest[octet];
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        if (F::BYTES)
            most *= 1.0001f; /* less THIRD steps, it is to stay below twice the power of two */
        const uint32_t exponent = __float_as_uint(most) >> 23;
        unit[octet] = __uint_as_float(((exponent < 30 ? 30 : exponent) - (F::BYTES ? 23 : 14)) << 23);
    }
}

/* Two third terms in a byte each: how far they are from THIRD in steps of 1 / scale, from -64 to 64, and 64. */
static __device__ __forceinline__ uint16_t pack_bytes(float2 value, float scale)
{
    const int x = __float2int_rn(value.x * scale) + 64, y = __float2int_rn(value.y * scale) + 64;
    return (uint16_t)(min(max(x, 0), 128) | min(max(y, 0), 128) << 8);
}

/* Those of one half of a step as two bf16. */
static __device__ __forceinline__ uint32_t unpack_bytes(uint32_t word, int half)
{
    return __byte_perm(word, 0x43434343, half == 0 ? 0x4140 : 0x4342);
}

/* phi gamma of the warp's columns of k, as fragments of A: [step][term*3 + octet of rows][half of the step]. */
template <typename F>
static __device__ __forceinline__ void load_phi(const mhc_call &c, shared_memory<F> &shared, int rank, int warp,
                                                uint32_t (&phi)[F::STEPS][F::HELD][2], float (&unit)[OCTETS])
{
    typedef typename F::E E;
    if constexpr (cot_is_f16<E> || F::BYTES)
        find_units<F>(c, rank, warp, unit);
    if (F::BYTES && threadIdx.x % 4 == 0)
        shared.units[warp][threadIdx.x % 32 / 4] = {unit[0], unit[1], unit[2], 0.0f};
#pragma unroll
    for (int s = 0; s < F::STEPS; s++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 weights[OCTETS];
            if (F::WIDE && (2 * s + half) % 8 == 0)
                __syncwarp(); /* else the compiler loads further ahead, into more registers than there are */
            load_weights<F>(c, rank, warp, s, half, weights);
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++) {
                float2 rest = weights[octet];
                if constexpr (F::BYTES)
                    rest = {rest.x - THIRD * unit[octet], rest.y - THIRD * unit[octet]};
                if constexpr (cot_is_f16<E>)
                    rest = {rest.x * (1.0f / unit[octet]), rest.y * (1.0f / unit[octet])};
#pragma unroll
                for (int t = 0; t < terms_of<E>; t++) {
                    const float2 before = rest;
                    const uint32_t term = cot_pack_pair<E>(rest.x, rest.y);
                    const float2 value = cot_unpack_pair<E>(term);
                    rest = {rest.x - value.x, rest.y - value.y};
                    if (F::lent(s, t))
                        ((uint32_t *)&shared.phi[warp][s + F::LENT - F::STEPS][octet][threadIdx.x % 32])[half] = term;
                    else if (!F::BYTES || t < 2)
                        phi[s][t * OCTETS + octet][half] = term;
                    else
                        ((uint16_t *)&shared.third[warp][s / 2][octet][threadIdx.x % 32])[s % 2 * 2 + half] =
                            pack_bytes(before, 1.0f / unit[octet]);
                }
            }
        }
}

/* A step's fragments, those that are lent from shared memory; third: of this step and its neighbour. */
template <typename F>
static __device__ __forceinline__ void fetch_phi(const shared_memory<F> &s, int warp, int step,
                                                 const uint32_t (&phi)[F::STEPS][F::HELD][2],
                                                 const uint2 (&third)[OCTETS], uint32_t (&A)[F::GROUPS][2])
{
#pragma unroll
    for (int group = 0; group < F::GROUPS; group++) {
        if (F::BYTES && group >= 2 * OCTETS) {
            const uint32_t word = step % 2 == 0 ? third[group % OCTETS].x : third[group % OCTETS].y;
            A[group][0] = unpack_bytes(word, 0), A[group][1] = unpack_bytes(word, 1);
        } else if (F::lent(step, group / OCTETS)) {
            const uint2 two = s.phi[warp][step + F::LENT - F::STEPS][group % OCTETS][threadIdx.x % 32];
            A[group][0] = two.x, A[group][1] = two.y;
        } else {
            A[group][0] = phi[step][group % F::HELD][0], A[group][1] = phi[step][group % F::HELD][1];
        }
    }
}

template <typename F, bool SPLIT>
static __device__ __forceinline__ void products(const mhc_call &c, shared_memory<F> &s, const block_share &own)
{
    typedef typename F::E E;
    constexpr int GROUPS = F::GROUPS, PAIRS = GROUPS / 2, TILE = F::TILE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t phi[F::STEPS][F::HELD][2], parity = 0;
    float unit[OCTETS];
    load_phi<F>(c, s, own.rank, warp, phi, unit);
    __syncwarp();
    if (!SPLIT)
        cot_cluster_wait();
    /* Eight tokens at a time, two steps, half a chunk, a load: unit lane/8 of the lane's row, swizzled. Of the warp's
     * first two steps, and of the next two. */
    uint32_t rows[2];
#pragma unroll
    for (int next = 0; next < 2; next++) {
        const int pair = warp * F::PAIRS + next;
        rows[next] = cot_shared_address(s.x) + (uint32_t)((pair / 2 * TILE + lane % 8) * 128) +
                     (uint32_t)(((lane / 8 + pair % 2 * 4) ^ lane % 8) * 16);
    }
    FOR_EACH_TILE(tile, ring, own)
    {
        const uint32_t slot = (uint32_t)(ring.slot * F::STAGE_BYTES), here = rows[0] + slot;
        const uint32_t row[2] = {here, F::PAIRS % 2 == 0 ? here ^ 64 : rows[1] + slot};
        cot_mbarrier_wait(&s.full[ring.slot], ring.parity);
#pragma unroll
        for (int t = 0; t < TILE / 8; t++) {
            float sums[PAIRS][4] = {0}, last[4] = {0}, run[4] = {0};
#pragma unroll
            for (int pair = 0; pair < F::PAIRS; pair++) {
                uint32_t x[4];
                cot_ldmatrix_x4(x, row[pair % 2] + (uint32_t)((pair / 2 * TILE + t * 8) * 128));
                uint2 third[OCTETS];
                if constexpr (F::BYTES)
#pragma unroll
                    for (int octet = 0; octet < OCTETS; octet++)
                        third[octet] = s.third[warp][pair][octet][lane];
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    uint32_t A[GROUPS][2];
                    fetch_phi(s, warp, 2 * pair + u, phi, third, A);
#pragma unroll
                    for (int m = 0; m < PAIRS; m++)
                        mma<E>(sums[m], A[2 * m][0], A[2 * m + 1][0], A[2 * m][1], A[2 * m + 1][1], x[2 * u],
                               x[2 * u + 1]);
                    if constexpr (GROUPS % 2 != 0)
                        mma<E>(run, A[GROUPS - 1][0], x[2 * u], A[GROUPS - 1][1], x[2 * u + 1], x[2 * u], x[2 * u + 1]);
                    else
                        mma<E>(run, 0, x[2 * u], 0, x[2 * u + 1], x[2 * u], x[2 * u + 1]);
                }
                /* Tensor cores cut sums off: added up by them alone, the squares come out low. */
                if (pair % F::RUN == F::RUN - 1 || pair == F::PAIRS - 1)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        last[i] += run[i], run[i] = 0.0f;
            }
            if (SPLIT && t == TILE / 8 - 1) {
                __syncwarp();
                if (lane == 0)
                    cot_mbarrier_arrive(&s.empty[ring.slot]);
            }
            /* Asked for before the sums are stored: the compiler would ask between the stores. */
            if constexpr (F::BYTES) {
                const float4 units = s.units[warp][lane / 4];
                unit[0] = units.x, unit[1] = units.y, unit[2] = units.z;
            }
            if (t == 0)
                cot_mbarrier_wait(&s.partial_empty, parity ^ 1);
#pragma unroll
            for (int p = 0; p < 2; p++) {
                float *to = s.partial[warp][t * 8 + lane % 4 * 2 + p];
#pragma unroll
                for (int octet = 0; octet < OCTETS; octet++) { /* the smallest terms first */
                    const int low = GROUPS - OCTETS + octet;
                    float sum = low / 2 == PAIRS ? last[p] : sums[low / 2][low % 2 * 2 + p];
                    if (F::BYTES)
                        sum *= unit[octet];
#pragma unroll
                    for (int group = low - OCTETS; group >= 0; group -= OCTETS)
                        sum += sums[group / 2][group % 2 * 2 + p];
                    to[octet * 8 + lane / 4] = cot_is_f16<E> ? sum * unit[octet] : sum;
                }
                if (lane % 4 * 2 + p == lane / 4)
                    to[M] = last[2 + p];
            }
        }
        arrive_as_warp(&s.partial_full);
        parity ^= 1;
    }
}

template <typename F>
static __device__ __forceinline__ void gather_h_in(const mhc_call &c, shared_memory<F> &s, const block_share &own)
{
    typedef typename F::E E;
    constexpr int UNITS = F::TILE * 8; /* of sixteen bytes, of a chunk of a stream: a thread has one in every so many */
    const int thread = threadIdx.x % 128, t = thread % UNITS / 8, unit = thread % 8;
    const int at = (thread / UNITS * F::TILE + t) * 128 + (unit ^ (t & 7)) * 16;
    const int d = (own.rank * F::CHUNKS + thread / UNITS) * MHC_SM90_CHUNK + unit * 8;
    /* Chunks of the block, from the thread's first one on, of those that there are. */
    const int chunks = min((int)F::CHUNKS, (int)c.D / MHC_SM90_CHUNK - own.rank * F::CHUNKS) - thread / UNITS;
    const int64_t stride = c.h_in.stride[c.T > 1 ? 1 : 0]; /* of tokens, whatever B is */
    E *to = (E *)c.h_in.data + ((int64_t)own.first * F::TILE + t) * stride + d;
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, own)
    {
        cot_mbarrier_wait(&s.full[ring.slot], ring.parity);
        cot_mbarrier_wait(&s.h_pre_full[ring.slot], ring.parity);
        if (thread == 0)
            cot_mbarrier_arrive_expect(&s.h_pre_full[ring.slot], sizeof s.h_pre[0]);
        const bool wanted = given(c.h_in) && tile * F::TILE + t < (int)c.tokens;
        const unsigned char *x = s.x[ring.slot] + at;
#pragma unroll
        for (int turn = 0; turn < (F::CHUNKS * UNITS + 127) / 128; turn++) {
            const int chunk = turn * (128 / UNITS);
            if (!wanted || chunk >= chunks)
                break;
            const float4 h = *(const float4 *)s.h_pre[ring.slot][t];
            const float h_pre[N] = {h.x, h.y, h.z, h.w};
            float sum[8] = {0};
#pragma unroll
            for (int i = 0; i < N; i++) {
                const uint4 raw = *(const uint4 *)(x + (i * F::CHUNKS + chunk) * F::TILE * 128);
                const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const float2 pair = cot_unpack_pair<E>(words[w]);
                    sum[2 * w] = fmaf(h_pre[i], pair.x, sum[2 * w]);
                    sum[2 * w + 1] = fmaf(h_pre[i], pair.y, sum[2 * w + 1]);
                }
            }
            cot_store_vector<E, 8>(to + chunk * MHC_SM90_CHUNK, sum);
        }
        to += (int64_t)own.step * F::TILE * stride;
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            cot_mbarrier_arrive(&s.empty[ring.slot]);
    }
}

/* The block that owns a token of a tile: tiles of half as many tokens as a cluster has blocks take turns. */
template <typename F> static __device__ __forceinline__ int owner_of(int slot, int token)
{
    static_assert(F::STAGES * F::TILE % MHC_SM90_CLUSTER == 0, "a slot's owners are always the same");
    return (slot * F::TILE + token) % MHC_SM90_CLUSTER;
}

template <typename F, bool SPLIT>
static __device__ __forceinline__ void reduce(const mhc_call &c, shared_memory<F> &s, const block_share &own)
{
    const int thread = threadIdx.x % 64;
    uint32_t parity = 0;
    if (!SPLIT)
        cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, own)
    {
        cot_mbarrier_wait(&s.partial_full, parity);
#pragma unroll
        for (int q = thread; q < F::TILE * SUMS / 4; q += 64) {
            const int token = q / (SUMS / 4), part = q % (SUMS / 4) * 4;
            float4 sum = *(const float4 *)&s.partial[0][token][part];
#pragma unroll
            for (int warp = 1; warp < PRODUCTS; warp++) {
                const float4 more = *(const float4 *)&s.partial[warp][token][part];
                sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
            }
            const int64_t number = (int64_t)tile * F::TILE + token;
            const int owner = owner_of<F>(ring.slot, token);
            if (!SPLIT)
                cot_store_async(
                    cot_map_shared(
                        cot_shared_address(&s.gathered[ring.slot * F::TILE / MHC_SM90_CLUSTER][own.rank][part]), owner),
                    cot_map_shared(cot_shared_address(&s.gathered_full[ring.slot]), owner), __float_as_uint(sum.x),
                    __float_as_uint(sum.y), __float_as_uint(sum.z), __float_as_uint(sum.w));
            else if (number < c.tokens)
                *(float4 *)(c.sums + (number * c.slices + own.rank) * SUMS + part) = sum;
        }
        arrive_as_warp(&s.partial_empty);
        parity ^= 1;
    }
}

/* Where lane j stores coefficient j. */
static __device__ __forceinline__ token_element value_element(const mhc_call &c, int j)
{
    const int ij = j - 2 * N;
    if (j < N)
        return token_element(c.h_pre, j * c.h_pre.stride[2], true);
    if (j < 2 * N)
        return token_element(c.h_post, (j - N) * c.h_post.stride[2], true);
    return token_element(c.h_res, ij / N * c.h_res.stride[2] + ij % N * c.h_res.stride[3], j < M);
}

/* 1 / sqrt(x) to about a unit in the last place: the approximation and, but for 0 and infinity, a step of Newton's. */
static __device__ __forceinline__ float inverse_root(float x)
{
    const float y = rsqrtf(x), off = fmaf(-x * y, y, 1.0f);
    return fmaf(0.5f * y, off < 1.0f ? off : 0.0f, y);
}

/* The same of 1 / x, for an x from 1 to 2. */
static __device__ __forceinline__ float inverse(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return fmaf(y, fmaf(-x, y, 1.0f), y);
}

/* All blocks wait for h_pre of all owners: the way from the last block's sums to it is kept short, without a division. */
template <typename F>
static __device__ __forceinline__ void own_token(const mhc_call &c, shared_memory<F> &s, const block_share &own)
{
    const int lane = threadIdx.x % 32;
    const bool has = lane < M;
    const float alpha = has ? load_f32(c.alpha, group_of(N, lane) * c.alpha.stride[0]) : 0.0f;
    const float bias = has ? load_f32(c.bias, lane * c.bias.stride[0]) : 0.0f;
    const token_element to_value = value_element(c, lane);
    /* Lane M, which sums up the squares, stores inv_rms. */
    const token_element to_sum =
        has ? token_element(c.h_mix, lane * c.h_mix.stride[2], true) : token_element(c.inv_rms, 0, lane == M);
    cot_cluster_wait();
    FOR_EACH_TILE(tile, ring, own)
    {
        const int place = (own.rank - ring.slot * F::TILE) & (MHC_SM90_CLUSTER - 1);
        if (place >= F::TILE)
            continue;
        const uint32_t token = (uint32_t)(tile * F::TILE + place), b = token / (uint32_t)c.T,
                       t = token - b * (uint32_t)c.T;
        cot_mbarrier_wait(&s.gathered_full[ring.slot], ring.parity);
        __syncwarp();
        if (lane == 0)
            cot_mbarrier_arrive_expect(&s.gathered_full[ring.slot], sizeof s.gathered[0]);
        float parts[4] = {0};
        if (lane < SUMS)
#pragma unroll
            for (int block = 0; block < MHC_SM90_CLUSTER; block++)
                parts[block % 4] += s.gathered[ring.slot * F::TILE / MHC_SM90_CLUSTER][block][lane];
        const float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
        const float squares = __shfl_sync(0xffffffffu, sum, M);
        const float inv_rms = inverse_root(__fdividef(squares, (float)(N * c.D)) + c.norm_eps);
        const float z = fmaf(alpha, sum * inv_rms, bias), e = expf(-fabsf(z)), larger = inverse(1.0f + e);
        const float sigmoid = z < 0.0f ? e * larger : larger;
        const float value = lane < N ? sigmoid + c.hc_eps : lane < 2 * N ? c.post_scale * sigmoid : z;
        uint32_t h_pre[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            h_pre[i] = __float_as_uint(__shfl_sync(0xffffffffu, value, i));
        if (lane < MHC_SM90_CLUSTER)
            cot_store_async(cot_map_shared(cot_shared_address(s.h_pre[ring.slot][place]), lane),
                            cot_map_shared(cot_shared_address(&s.h_pre_full[ring.slot]), lane), h_pre[0], h_pre[1],
                            h_pre[2], h_pre[3]);
        if (token >= c.tokens)
            continue;
        if (to_sum.data != nullptr)
            *to_sum.at(b, t) = has ? sum : inv_rms;
        if (to_value.data != nullptr)
            *to_value.at(b, t) = value;
        if (has && lane >= 2 * N && c.logits != nullptr)
            c.logits[token * (N * N) + lane - 2 * N] = value;
    }
}

template <typename F, bool SPLIT>
static __device__ __forceinline__ void produce(const mhc_mapped_call &p, shared_memory<F> &s, const block_share &own)
{
    if (threadIdx.x % 32 == 0) {
        FOR_EACH_TILE(tile, ring, own)
        {
            cot_mbarrier_wait(&s.empty[ring.slot], ring.parity ^ 1);
            cot_mbarrier_arrive_expect(&s.full[ring.slot], F::STAGE_BYTES);
            cot_tensor_load_4d(s.x[ring.slot], &p.x, 0, tile * F::TILE, own.rank * F::CHUNKS, 0, &s.full[ring.slot]);
        }
    }
    __syncwarp();
    if (!SPLIT)
        cot_cluster_wait(); /* only others send to blocks */
}

template <typename F, bool SPLIT> static __device__ __forceinline__ void forward(const mhc_mapped_call &p)
{
    static_assert(sizeof(shared_memory<F>) <= MHC_SM90_SHARED_BYTES, "a block's shared memory");
    shared_memory<F> &s = *(shared_memory<F> *)memory;
    const mhc_call &c = p.call;
    const int warp = threadIdx.x / 32;
    const block_share own = share_of<SPLIT, F::TILE>(c);
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < F::STAGES; slot++) {
            cot_mbarrier_init(&s.full[slot], 1);
            cot_mbarrier_init(&s.empty[slot], SPLIT ? PRODUCTS : 4);
            cot_mbarrier_init(&s.gathered_full[slot], 1);
            cot_mbarrier_init(&s.h_pre_full[slot], 1);
            cot_mbarrier_arrive_expect(&s.gathered_full[slot], sizeof s.gathered[0]);
            cot_mbarrier_arrive_expect(&s.h_pre_full[slot], sizeof s.h_pre[0]);
        }
        cot_mbarrier_init(&s.partial_full, 32 * PRODUCTS);
        cot_mbarrier_init(&s.partial_empty, 2 * 32);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    if (!SPLIT)
        cot_cluster_arrive(); /* awaited before the first store to another block */
    if (warp < PRODUCTS) {
        cot_more_registers<SPLIT ? 224 : F::WIDE ? 216 : 208>();
        products<F, SPLIT>(c, s, own);
    } else {
        cot_fewer_registers<SPLIT ? 56 : F::WIDE ? 40 : 48>();
        if (warp < PRODUCTS + 2)
            reduce<F, SPLIT>(c, s, own);
        else if (warp == PRODUCTS + 2)
            produce<F, SPLIT>(p, s, own);
        else if constexpr (!SPLIT) {
            if (warp == PRODUCTS + 3)
                own_token(c, s, own);
            else
                gather_h_in(c, s, own);
        }
    }
    if (!SPLIT) {
        cot_cluster_arrive(); /* nobody leaves while another block may write here */
        cot_cluster_wait();
    }
}

#define INSTANCE(name, element, chunks, split, threads)               \
    extern "C" __global__ void __launch_bounds__(threads, 1)          \
        mhc_pre_fwd_##name(const __grid_constant__ mhc_mapped_call p) \
    {                                                                 \
        forward<form<element, chunks>, split>(p);                     \
    }
INSTANCE(cluster_sm90_f16, __half, MHC_SM90_CHUNKS, false, MHC_SM90_FWD_THREADS)
INSTANCE(cluster_sm90_bf16, __nv_bfloat16, MHC_SM90_CHUNKS, false, MHC_SM90_FWD_THREADS)
INSTANCE(wide_sm90_f16, __half, MHC_SM90_WIDE_CHUNKS, false, MHC_SM90_FWD_THREADS)
INSTANCE(wide_sm90_bf16, __nv_bfloat16, MHC_SM90_WIDE_CHUNKS, false, MHC_SM90_FWD_THREADS)
INSTANCE(split_sm90_f16, __half, MHC_SM90_CHUNKS, true, MHC_SM90_SPLIT_THREADS)
INSTANCE(split_sm90_bf16, __nv_bfloat16, MHC_SM90_CHUNKS, true, MHC_SM90_SPLIT_THREADS)
