/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_post_pre_bwd_sm90.cu: the second half of post_pre's backward for n = 2 and 4, f16 and bf16: g and the gradients of
 * post, from the records that pre's backward has stored. g stays in registers.
 *
 *   g = dh_mix (phi gamma) + factor y + h_pre dh_in + dy
 *   df = h_post g,  dx = h_res g       stored
 *   dh_post = f g,  dh_res = x g      summed over the block's columns; mhc_post_pre_sum_slices
 *                                     (mhc_post_pre_bwd_tokens_sm90.cu) adds the slices
 *
 * factor is c of mhc.h. y is computed again from x and f, and rounded.
 *
 * Block (x, y) has 128 columns of all streams. Its tiles of 16 tokens are y, y + gridDim.y and so on. Roles:
 *
 *   8 MMA warps  in two groups that take turns with the tiles. A warp has 32 columns of a tile: four octets, one after
 *                the other. A lane has two columns of an octet, of two tokens: its part of the result of an MMA. dx and
 *                df replace x and f in shared memory
 *   loads warp   loads x, f, dy, dh_in and the operands of the tokens
 *   stores warp  stores dx and df
 *   sums warp    adds the sums of the warps over their columns, and stores them
 *
 *   barrier          arrivals                        who waits            phase ends when
 *   full[stage]      33, the loads warp              MMA warps            everything that it loads has arrived
 *   finished[stage]  32 of each warp of a group      stores, sums warps   dx, df and the sums of the warps are complete
 *   empty[stage]     32, the stores and sums warps   loads warp           dx, df and the sums have been read
 *
 * With n = 4, the loop over the octets has about 440 instructions. A longer loop waits for the instruction cache. The
 * other group of warps fills the latency of a group's products.
 *
 * The f16 terms of dh_mix and phi gamma: mhc_post_pre_bwd_sm90.cuh. */
#include "mhc_post_pre_bwd_sm90.cuh"

#include "../../../cuda/device/bulk.cuh"

enum {
    TILE = MHC_SM90_TILE,
    COLUMNS = MHC_SM90_POST_PRE_COLUMNS,
    CHUNKS = COLUMNS / MHC_SM90_CHUNK_COLUMNS,
    WARP_COLUMNS = 32,
    WARP_OCTETS = WARP_COLUMNS / 8,
    GROUPS = 2,
    GROUP_WARPS = COLUMNS / WARP_COLUMNS,
    MMA_WARPS = GROUPS * GROUP_WARPS,
    MMA_THREADS = MMA_WARPS * 32,
    THREADS = MHC_SM90_POST_PRE_THREADS,
    /* Three warpgroups: 65536 / 384 = 170, rounded down to a multiple of 8: 168 each, 504 in all. */
    MMA_REGISTERS = 216,
    OTHER_REGISTERS = 504 - 2 * MMA_REGISTERS,
    OCTETS = COLUMNS / 8,
    STREAM_BYTES = TILE * COLUMNS * 2, /* [chunk][token][128 bytes, swizzled] */
    SECOND_TOKEN = 8 * 128             /* bytes from a lane's first token to its second, 8 tokens further */
};

/* Sizes that depend on the number of streams. */
template <typename E_, int N_, bool VECTOR_> struct bwd_traits {
    typedef E_ E;
    static constexpr bool VECTOR = VECTOR_;
    enum {
        N = N_,
        M = N * (N + 2),
        /* A multiple of GROUPS: all tiles of a stage belong to one group, which sees every phase of the stage's barriers.
         * A parity cannot tell phases apart that differ by 2. */
        STAGES = N == 4 ? 4 : 6,
        BLOCKS = M / 8, /* of eight coefficients, an operand of MMA */
        /* Words of a lane for an octet of phi gamma in a stream: the places of the blocks of the first and the second
         * terms. The last blocks of both are an operand of one MMA. So are the other two of each term. */
        SECOND_0 = 0,
        SECOND_LAST = BLOCKS - 1,
        FIRST_LAST = BLOCKS,
        FIRST_0 = BLOCKS + 1,
        PHI_WORDS = TERMS * BLOCKS,
        PHI_UNITS = N * PHI_WORDS / 4,
        SUMS = MHC_CUDA_POST_SUMS(N),        /* of dh_res, then of dh_post, then zeros */
        LANE_SUMS = SUMS / 4,                /* a token has four lanes */
        SUMS_IN_DY = LANE_SUMS > WARP_OCTETS /* see sum_place */
    };
};

/* Of a tile. */
template <int N> struct stage_memory {
    unsigned char x[N][STREAM_BYTES], f[STREAM_BYTES]; /* later dx, df */
    unsigned char dy[N][STREAM_BYTES], dh_in[STREAM_BYTES];
};
template <typename Traits> struct shared_memory {
    stage_memory<Traits::N> stages[Traits::STAGES];
    uint4 phi[OCTETS][Traits::PHI_UNITS][32]; /* operands of MMA, see stage_phi */
    mhc_token_operands tokens[Traits::STAGES][TILE];
    float stream_scale[4]; /* what products with phi gamma are multiplied by, besides the scale of the token */
    float phi_max[MMA_WARPS][Traits::N];  /* the largest absolute value in a warp's part of phi gamma */
    float4 sums[TILE][Traits::LANE_SUMS]; /* of the sums warp */
    uint64_t full[Traits::STAGES], finished[Traits::STAGES], empty[Traits::STAGES];
};
extern __shared__ __align__(1024) unsigned char memory[];

#define FOR_EACH_TILE(tile, ring)            \
    cot_pipeline_state<Traits::STAGES> ring; \
    for (int tile = (int)blockIdx.y; (int64_t)tile * TILE < c.tokens; tile += (int)gridDim.y, ring.next())

/* Byte offset of an octet of a token in a stream. */
static __device__ __forceinline__ int octet_offset(int octet, int token)
{
    return octet / 8 * TILE * 128 + swizzled_offset(token, octet % 8);
}

/* The place of one of the sums of a lane over a warp's columns, instead of a word of dh_in or dy that the lane has read: a
 * word of each octet of dh_in, then one of dy. */
template <int N>
static __device__ __forceinline__ float &sum_place(stage_memory<N> &stage, int warp, int token, int quarter, int k)
{
    const int octet = warp * WARP_OCTETS + k % WARP_OCTETS;
    return *(float *)((k < WARP_OCTETS ? stage.dh_in : stage.dy[0]) + octet_offset(octet, token) + quarter * 4);
}

/* The terms of phi gamma of the block's columns, as operands of MMA. Of an octet, a lane has PHI_WORDS words for each
 * stream. The words of a lane follow each other, in units of four. */
template <typename Traits> static __device__ __forceinline__ void stage_phi(const mhc_call &c, shared_memory<Traits> &s)
{
    constexpr int N = Traits::N, BLOCKS = Traits::BLOCKS;
    enum { ITEMS = OCTETS * BLOCKS * 32 / MMA_THREADS }; /* of a thread, in each stream */
    float values[N][ITEMS][2];
#pragma unroll
    for (int i = 0; i < N; i++) {
        float largest = 0.0f;
#pragma unroll
        for (int item = 0; item < ITEMS; item++) {
            const int index = item * MMA_THREADS + (int)threadIdx.x, block = index / 32 % BLOCKS;
            const int64_t d = (int64_t)blockIdx.x * COLUMNS + index / (32 * BLOCKS) * 8 + index % 32 / 4;
            const float gamma =
                d < c.D && present(c.gamma) ? load_f32(c.gamma, i * c.gamma.stride[0] + d * c.gamma.stride[1]) : 1.0f;
#pragma unroll
            for (int v = 0; v < 2; v++) {
                const int j = block * 8 + index % 4 * 2 + v;
                values[i][item][v] =
                    d < c.D ? gamma * load_f32(c.phi, j * c.phi.stride[0] + (i * c.D + d) * c.phi.stride[1]) : 0.0f;
                const float size = fabsf(values[i][item][v]);
                largest = fmaxf(largest, size < INFINITY ? size : 0.0f); /* an infinity affects its own column only */
            }
        }
        largest = max_over_warp(largest);
        if (threadIdx.x % 32 == 0)
            s.phi_max[threadIdx.x / 32][i] = largest;
    }
    cot_named_barrier<1>(MMA_THREADS);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float largest = s.phi_max[0][i];
#pragma unroll
        for (int warp = 1; warp < MMA_WARPS; warp++)
            largest = fmaxf(largest, s.phi_max[warp][i]);
        const term_scale scale(largest, 40);
        if (threadIdx.x == 0)
            s.stream_scale[i] = scale.down * (1.0f / MHC_CUDA_MIX_SCALE);
#pragma unroll
        for (int item = 0; item < ITEMS; item++) {
            const int index = item * MMA_THREADS + (int)threadIdx.x;
            uint32_t terms[TERMS];
            split_f16(values[i][item][0] * scale.up, values[i][item][1] * scale.up, terms);
#pragma unroll
            for (int term = 0; term < TERMS; term++) {
                const int block = index / 32 % BLOCKS,
                          w = i * Traits::PHI_WORDS + (block == BLOCKS - 1
                                                           ? (term == 0 ? Traits::FIRST_LAST : Traits::SECOND_LAST)
                                                           : (term == 0 ? Traits::FIRST_0 : Traits::SECOND_0) + block);
                ((uint32_t *)&s.phi[index / (32 * BLOCKS)][w / 4][index % 32])[w % 4] = terms[term];
            }
        }
    }
    cot_named_barrier<1>(MMA_THREADS);
}

/* ---- loads and stores ----------------------------------------------------------------------------------- */

/* The copies of VECTOR kernels are made by TMA: all rows are whole aligned vectors. In the other kernels the data of a
 * tensor is aligned to its elements only, and the lanes of a warp copy single elements. */

/* Calls f(byte offset in shared memory, offset in the tensor, valid) for the elements of a tile that this lane copies. */
template <typename Function>
static __device__ __forceinline__ void for_each_element(const mhc_call &c, const mhc_array &a, int streams, int tile,
                                                        Function f)
{
    for (int i = 0; i < streams; i++)
        for (int index = threadIdx.x % 32; index < TILE * COLUMNS; index += 32) {
            const int row = index / COLUMNS, column = index % COLUMNS;
            const int64_t token = (int64_t)tile * TILE + row, d = (int64_t)blockIdx.x * COLUMNS + column;
            f(i * STREAM_BYTES + octet_offset(column / 8, row) + column % 8 * 2,
              token * a.stride[1] + i * a.stride[2] + d, token < c.tokens && d < c.D);
        }
}

template <bool VECTOR>
static __device__ __forceinline__ void load_streams(const mhc_call &c, unsigned char *to, const mhc_array &from,
                                                    const CUtensorMap &map, int streams, int tile, uint64_t *barrier)
{
    if constexpr (VECTOR) {
        if (threadIdx.x % 32 == 0)
            cot_tma_load_4d(to, &map, 0, tile * TILE, (int)blockIdx.x * CHUNKS, 0, barrier);
    } else {
        for_each_element(c, from, streams, tile, [&](int offset, int64_t source, bool valid) {
            *(uint16_t *)(to + offset) = valid ? ((const uint16_t *)from.data)[source] : (uint16_t)0;
        });
    }
}

/* Without VECTOR, shared memory has been read on return. */
template <bool VECTOR>
static __device__ __forceinline__ void store_streams(const mhc_call &c, const mhc_array &to, const CUtensorMap &map,
                                                     int streams, int tile, const unsigned char *from)
{
    if (!present(to))
        return;
    if constexpr (VECTOR) {
        if (threadIdx.x % 32 == 0)
            cot_tma_store_4d(&map, 0, tile * TILE, (int)blockIdx.x * CHUNKS, 0, from);
    } else {
        for_each_element(c, to, streams, tile, [&](int offset, int64_t target, bool valid) {
            if (valid)
                ((uint16_t *)to.data)[target] = *(const uint16_t *)(from + offset);
        });
    }
}

template <typename Traits>
static __device__ __forceinline__ void load_tiles(const mhc_post_pre_backward_call &p, shared_memory<Traits> &s)
{
    constexpr int N = Traits::N;
    constexpr bool VECTOR = Traits::VECTOR;
    const mhc_call &c = p.call;
    const int lane = threadIdx.x % 32;
    cot_griddepcontrol_wait(); /* for the operands; everything else is older than the kernels before */
    const uint32_t bytes = !VECTOR         ? 0
                           : present(c.dy) ? (uint32_t)sizeof s.stages[0]
                                           : (uint32_t)(sizeof s.stages[0] - sizeof s.stages[0].dy);
    FOR_EACH_TILE(tile, ring)
    {
        stage_memory<N> &stage = s.stages[ring.stage];
        uint64_t *const full = &s.full[ring.stage];
        cot_mbarrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
        if (lane == 0) {
            const int64_t first = (int64_t)tile * TILE, tokens = min(c.tokens - first, (int64_t)TILE);
            const uint32_t token_bytes = (uint32_t)(tokens * (int64_t)sizeof(mhc_token_operands));
            cot_mbarrier_arrive_expect(full, token_bytes + bytes);
            cot_bulk_load(s.tokens[ring.stage], c.operands + first, token_bytes, full);
        }
        load_streams<VECTOR>(c, stage.x[0], c.x, p.x, N, tile, full);
        load_streams<VECTOR>(c, stage.f, c.f, p.f, 1, tile, full);
        load_streams<VECTOR>(c, stage.dh_in, c.dh_in, p.dh_in, 1, tile, full);
        if (present(c.dy))
            load_streams<VECTOR>(c, stage.dy[0], c.dy, p.dy, N, tile, full);
        arrive_all_lanes(full);
    }
}

template <typename Traits>
static __device__ __forceinline__ void store_tiles(const mhc_post_pre_backward_call &p, shared_memory<Traits> &s)
{
    constexpr int N = Traits::N;
    constexpr bool VECTOR = Traits::VECTOR;
    const mhc_call &c = p.call;
    FOR_EACH_TILE(tile, ring)
    {
        const stage_memory<N> &stage = s.stages[ring.stage];
        cot_mbarrier_wait(&s.finished[ring.stage], ring.parity);
        store_streams<VECTOR>(c, c.dx, p.dx, N, tile, stage.x[0]);
        store_streams<VECTOR>(c, c.df, p.df, 1, tile, stage.f);
        if (VECTOR && threadIdx.x % 32 == 0) {
            cot_bulk_commit();
            cot_bulk_wait_read();
        }
        arrive_all_lanes(&s.empty[ring.stage]);
    }
    if (VECTOR)
        cot_bulk_wait();
}

/* The sums warp. A lane adds the sums of two tokens. */
template <typename Traits>
static __device__ __forceinline__ void add_warp_sums(const mhc_call &c, shared_memory<Traits> &s)
{
    constexpr int LANE_SUMS = Traits::LANE_SUMS, UNITS = Traits::SUMS / 4; /* of a token */
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    FOR_EACH_TILE(tile, ring)
    {
        stage_memory<Traits::N> &stage = s.stages[ring.stage];
        const int64_t first = (int64_t)tile * TILE;
        const int units = (int)min(c.tokens - first, (int64_t)TILE) * UNITS;
        float4 *const to = (float4 *)c.post_sums + (blockIdx.x * c.tokens + first) * UNITS;
        cot_mbarrier_wait(&s.finished[ring.stage], ring.parity);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int k = 0; k < LANE_SUMS; k++) {
                const int token = lane / 4 + half * 8;
                float sum = sum_place(stage, 0, token, quarter, k);
#pragma unroll
                for (int warp = 1; warp < GROUP_WARPS; warp++)
                    sum += sum_place(stage, warp, token, quarter, k);
                ((float *)s.sums[token])[quarter * LANE_SUMS + k] = sum;
            }
        if (Traits::SUMS_IN_DY && !present(c.dy)) /* dy is zero again */
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int warp = 0; warp < GROUP_WARPS; warp++)
                    sum_place(stage, warp, lane / 4 + half * 8, quarter, LANE_SUMS - 1) = 0.0f;
        arrive_all_lanes(&s.empty[ring.stage]);
        if (c.post_sums != nullptr)
#pragma unroll
            for (int start = 0; start < TILE * UNITS; start += 32)
                if (start + lane < units)
                    to[start + lane] = s.sums[0][start + lane];
        __syncwarp(); /* the next tile replaces s.sums */
    }
}

/* ---- products ------------------------------------------------------------------------------------------- */

/* Of a token, in registers. scale: of the products with phi gamma, by stream. */
template <int N> struct token_coefficients {
    float h_res[N][N], h_post[N], h_pre[N], factor, scale[N];

    __device__ __forceinline__ token_coefficients(const mhc_token_operands &token, const float (&stream_scale)[4])
    {
        const float4 *from = (const float4 *)token.h_res; /* four rows of h_res, h_post, h_pre */
#pragma unroll
        for (int i = 0; i < N; i++)
            set(h_res[i], from[i]);
        set(h_post, from[4]);
        set(h_pre, from[5]);
        set(scale, *(const float4 *)stream_scale);
        const float2 others = *(const float2 *)&token.factor;
        factor = others.x;
#pragma unroll
        for (int i = 0; i < N; i++)
            scale[i] *= others.y;
    }

    static __device__ __forceinline__ void set(float (&to)[N], const float4 &from)
    {
        const float all[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
        for (int i = 0; i < N; i++)
            to[i] = all[i];
    }
};

/* dh_mix of a tile's tokens as operands of MMA. */
template <int BLOCKS> struct mix_operands {
    uint32_t terms[TERMS][4]; /* n = 4: coefficients 0 to 15 */
    uint32_t last[4];         /* the first term, then the second term of the last eight coefficients */

    __device__ __forceinline__ mix_operands(const mhc_token_operands *tokens)
    {
        const int lane = threadIdx.x % 32, row = lane % TILE, upper = lane / TILE;
#pragma unroll
        for (int term = 0; term < TERMS && BLOCKS > 1; term++)
            cot_ldmatrix_x4(terms[term], cot_shared_address(&tokens[row].terms[term][upper * 8]));
        cot_ldmatrix_x4(last, cot_shared_address(&tokens[row].terms[upper][(BLOCKS - 1) * 8]));
    }
};

static __device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&A)[4], const uint32_t *B)
{
    cot_mma_f16(sums, A[0], A[1], A[2], A[3], B[0], B[1]);
}

/* Products with an octet of all streams, those of the second terms first. Tensor cores truncate sums: at most 5 products
 * are added to each sum. */
template <typename Traits>
static __device__ __forceinline__ void multiply_octet(const uint4 (&phi)[Traits::PHI_UNITS][32],
                                                      const mix_operands<Traits::BLOCKS> &mix,
                                                      float (&products)[Traits::N][4])
{
    constexpr int N = Traits::N;
    constexpr bool HAS_OTHERS = Traits::BLOCKS == 3; /* blocks besides the last */
    uint32_t B[N][Traits::PHI_WORDS];
#pragma unroll
    for (int unit = 0; unit < Traits::PHI_UNITS; unit++)
        *(uint4 *)&B[0][4 * unit] = phi[unit][threadIdx.x % 32];
#pragma unroll
    for (int o = 0; o < N && HAS_OTHERS; o++)
        multiply(products[o], mix.terms[0], &B[o][Traits::SECOND_0]);
#pragma unroll
    for (int o = 0; o < N && HAS_OTHERS; o++)
        multiply(products[o], mix.terms[1], &B[o][Traits::FIRST_0]);
#pragma unroll
    for (int o = 0; o < N; o++)
        multiply(products[o], mix.last, &B[o][Traits::SECOND_LAST]);
#pragma unroll
    for (int o = 0; o < N && HAS_OTHERS; o++)
        multiply(products[o], mix.terms[0], &B[o][Traits::FIRST_0]);
#pragma unroll
    for (int o = 0; o < N; o++)
        cot_mma_f16_k8(products[o], mix.last[0], mix.last[1], B[o][Traits::FIRST_LAST]);
}

/* Adds the values of the four lanes of a token. Each lane gets LANE_SUMS of the sums. */
template <int LANE_SUMS>
static __device__ __forceinline__ void add_lane_sums(const float (&values)[4 * LANE_SUMS], float (&sums)[LANE_SUMS])
{
    const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
    float lane_pair_sums[2 * LANE_SUMS];
#pragma unroll
    for (int k = 0; k < 2 * LANE_SUMS; k++) {
        const float kept = upper ? values[k + 2 * LANE_SUMS] : values[k],
                    sent = upper ? values[k] : values[k + 2 * LANE_SUMS];
        lane_pair_sums[k] = kept + __shfl_xor_sync(0xffffffffu, sent, 2);
    }
#pragma unroll
    for (int k = 0; k < LANE_SUMS; k++) {
        const float kept = odd ? lane_pair_sums[k + LANE_SUMS] : lane_pair_sums[k],
                    sent = odd ? lane_pair_sums[k] : lane_pair_sums[k + LANE_SUMS];
        sums[k] = kept + __shfl_xor_sync(0xffffffffu, sent, 1);
    }
}

template <typename Traits> static __device__ __forceinline__ void compute(const mhc_call &c, shared_memory<Traits> &s)
{
    typedef typename Traits::E E;
    constexpr int N = Traits::N, STAGES = Traits::STAGES, LANE_SUMS = Traits::LANE_SUMS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % GROUP_WARPS, first_octet = warp * WARP_OCTETS;
    const int token = lane / 4; /* and token + 8 */
    stage_phi(c, s);
    for (int turn = (int)threadIdx.x / 32 / GROUP_WARPS;
         ((int64_t)blockIdx.y + (int64_t)turn * gridDim.y) * TILE < c.tokens; turn += GROUPS) {
        const int number = turn % STAGES;
        stage_memory<N> &stage = s.stages[number];
        const mhc_token_operands *const tokens = s.tokens[number];
        float lane_sums[2][Traits::SUMS] = {0};
        cot_mbarrier_wait(&s.full[number], turn / STAGES & 1);
        const mix_operands<Traits::BLOCKS> mix(tokens);
        const token_coefficients<N> coefficients[2] = {{tokens[token], s.stream_scale},
                                                       {tokens[token + 8], s.stream_scale}};
#pragma unroll 1
        for (int octet = first_octet; octet < first_octet + WARP_OCTETS; octet++) {
            const int offset = octet_offset(octet, token) + lane % 4 * 4;
            float g[N][4] = {0};
            multiply_octet<Traits>(s.phi[octet], mix, g);
            float2 x[2][N], f[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const token_coefficients<N> &k = coefficients[half];
                const int at = offset + half * SECOND_TOKEN;
                const float2 dh_in = cot_unpack_pair<E>(*(const uint32_t *)(stage.dh_in + at));
                f[half] = cot_unpack_pair<E>(*(const uint32_t *)(stage.f + at));
#pragma unroll
                for (int i = 0; i < N; i++)
                    x[half][i] = cot_unpack_pair<E>(*(const uint32_t *)(stage.x[i] + at));
#pragma unroll
                for (int o = 0; o < N; o++) {
                    float2 sum = {k.h_post[o] * f[half].x, k.h_post[o] * f[half].y};
#pragma unroll
                    for (int i = 0; i < N; i++)
                        sum = {fmaf(k.h_res[i][o], x[half][i].x, sum.x), fmaf(k.h_res[i][o], x[half][i].y, sum.y)};
                    const float2 y = cot_unpack_pair<E>(cot_pack_pair<E>(sum.x, sum.y)),
                                 dy = cot_unpack_pair<E>(*(const uint32_t *)(stage.dy[o] + at));
                    g[o][2 * half] =
                        fmaf(k.scale[o], g[o][2 * half], fmaf(k.h_pre[o], dh_in.x, fmaf(k.factor, y.x, dy.x)));
                    g[o][2 * half + 1] =
                        fmaf(k.scale[o], g[o][2 * half + 1], fmaf(k.h_pre[o], dh_in.y, fmaf(k.factor, y.y, dy.y)));
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const token_coefficients<N> &k = coefficients[half];
                const int at = offset + half * SECOND_TOKEN;
                float2 df = {0, 0};
#pragma unroll
                for (int o = 0; o < N; o++) {
                    const float low = g[o][2 * half], high = g[o][2 * half + 1];
                    df = {fmaf(k.h_post[o], low, df.x), fmaf(k.h_post[o], high, df.y)};
                    lane_sums[half][N * N + o] =
                        fmaf(f[half].y, high, fmaf(f[half].x, low, lane_sums[half][N * N + o]));
                }
                *(uint32_t *)(stage.f + at) = cot_pack_pair<E>(df.x, df.y);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    float2 dx = {0, 0};
#pragma unroll
                    for (int o = 0; o < N; o++) {
                        const float low = g[o][2 * half], high = g[o][2 * half + 1];
                        float &sum = lane_sums[half][i * N + o];
                        dx = {fmaf(k.h_res[i][o], low, dx.x), fmaf(k.h_res[i][o], high, dx.y)};
                        sum = fmaf(x[half][i].y, high, fmaf(x[half][i].x, low, sum));
                    }
                    *(uint32_t *)(stage.x[i] + at) = cot_pack_pair<E>(dx.x, dx.y);
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sums[LANE_SUMS];
            add_lane_sums<LANE_SUMS>(lane_sums[half], sums);
#pragma unroll
            for (int k = 0; k < LANE_SUMS; k++)
                sum_place(stage, warp, token + half * 8, lane % 4, k) = sums[k];
        }
        cot_fence_proxy_async();
        arrive_all_lanes(&s.finished[number]);
    }
}

template <typename Traits> static __device__ __forceinline__ void backward(const mhc_post_pre_backward_call &p)
{
    static_assert(sizeof(shared_memory<Traits>) <= MHC_SM90_SHARED_BYTES, "must fit in a block's shared memory");
    constexpr int STAGES = Traits::STAGES;
    shared_memory<Traits> &s = *(shared_memory<Traits> *)memory;
    const mhc_call &c = p.call;
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            cot_mbarrier_init(&s.full[stage], 1 + 32);
            cot_mbarrier_init(&s.finished[stage], 32 * GROUP_WARPS);
            cot_mbarrier_init(&s.empty[stage], 2 * 32);
        }
        cot_mbarrier_init_fence();
    }
    for (int stage = 0; stage < STAGES && !present(c.dy); stage++)
        for (int index = threadIdx.x; index < (int)sizeof s.stages[0].dy / 16; index += THREADS)
            ((uint4 *)s.stages[stage].dy)[index] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    if (warp < MMA_WARPS) {
        cot_setmaxnreg_inc<MMA_REGISTERS>();
        compute(c, s);
    } else {
        cot_setmaxnreg_dec<OTHER_REGISTERS>();
        if (warp == MMA_WARPS)
            load_tiles(p, s);
        else if (warp == MMA_WARPS + 1)
            store_tiles(p, s);
        else if (warp == MMA_WARPS + 2)
            add_warp_sums(c, s);
    }
}

#define INSTANCE(name, element, n, vector)                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)       \
        name(const __grid_constant__ mhc_post_pre_backward_call p) \
    {                                                              \
        backward<bwd_traits<element, n, vector>>(p);               \
    }
#define INSTANCES(dtype, element)                                  \
    INSTANCE(mhc_post_pre_bwd_sm90_##dtype, element, 4, true)      \
    INSTANCE(mhc_post_pre_bwd_any_sm90_##dtype, element, 4, false) \
    INSTANCE(mhc_post_pre_bwd_sm90_n2_##dtype, element, 2, true)   \
    INSTANCE(mhc_post_pre_bwd_any_sm90_n2_##dtype, element, 2, false)
INSTANCES(f16, __half)
INSTANCES(bf16, __nv_bfloat16)
