/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_im2col.cu: padding, im2col, a matrix product, and bias and SiLU on its result, on tensor cores. For
 * comparison with the direct kernels. Of 8 channels and 16 tokens, two taps at a time (mma.m16n8k16):
 *
 *     A [token][tap, channel]     xe: a tap further is a row further in shared memory, so the columns are only addresses
 *     B [tap, channel][channel]   weights on the diagonals, zeros beside them: seven products of eight are by zero
 *
 * A warp has 8 channels of the block's tile of tokens. y of a token is put 8 rows before it, where inputs lie that the warp
 * has done with. Weights of another dtype than x's are split into three of x's, so that all products are exact; before
 * they are made f16, a power of two brings a channel's largest to the top of its range. An infinity or NaN reaches the
 * channels and taps whose products with it are by zero. */
#include "causal_conv1d_fast.cuh"

#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/ptx.cuh"

enum {
    TOKENS = CONV1D_IM2COL_TOKENS,
    CHANNELS = CONV1D_IM2COL_CHANNELS,
    THREADS = CONV1D_IM2COL_THREADS,
    HALO = 8, /* rows before the tile's tokens, the last W-1 of them inputs */
    ROWS = HALO + TOKENS,
    STEP = THREADS / 8, /* rows that a block's threads move at once, 8 to a row */
    TERMS = 3,
    SIDE_BY_SIDE = 2 /* strips of 16 tokens, whose chains of products overlap */
};

/* What a block has: tokens from t on of channels from d on of row b. */
struct place {
    int64_t b, d;
    int t;
};

/* Blocks follow each other as x lies in memory. */
static __device__ __forceinline__ place place_of(const conv1d_call &c)
{
    const uint32_t tiles = (uint32_t)((c.T + TOKENS - 1) / TOKENS),
                   groups = (uint32_t)((c.D + CHANNELS - 1) / CHANNELS);
    const bool by_channels = c.x.stride[1] == 1;
    const uint32_t inner = by_channels ? groups : tiles, low = blockIdx.x % inner, rest = blockIdx.x / inner;
    const uint32_t outer = by_channels ? tiles : groups, high = rest % outer;
    return {(int64_t)(rest / outer), (int64_t)(by_channels ? low : high) * CHANNELS,
            (int)(by_channels ? high : low) * TOKENS};
}

/* Where 8 channels of a row begin. Neighbouring rows, and every eighth, are in different banks. */
static __device__ __forceinline__ int cell(int row, int group)
{
    return row * CHANNELS + ((group ^ row ^ row >> 3) & 7) * 8;
}

/* A cell of row r moved e rows down, where the lowest five bits of the two add up without a carry. */
static __device__ __forceinline__ int down(int at, int e)
{
    return (at ^ ((e ^ e >> 3) & 7) * 8) + e * CHANNELS;
}

/* How x or y is moved: 8 channels of a token at once, 8 tokens of a channel, or element by element. */
enum way { BY_CHANNELS, BY_TOKENS, BY_ELEMENTS };

static __device__ __forceinline__ way way_of(const conv1d_call &c, const conv1d_array &a)
{
    if (a.aligned && a.stride[1] == 1 && c.D % 8 == 0)
        return BY_CHANNELS;
    return a.aligned && a.stride[2] == 1 && c.T % 8 == 0 ? BY_TOKENS : BY_ELEMENTS;
}

static __device__ __forceinline__ int64_t offset(const conv1d_array &a, const place &p, int channel, int token)
{
    return p.b * a.stride[0] + (p.d + channel) * a.stride[1] + (p.t + (int64_t)token) * a.stride[2];
}

static __device__ __forceinline__ bool inside(const conv1d_call &c, const place &p, int channel, int token)
{
    return p.d + channel < c.D && p.t + token >= 0 && p.t + token < c.T;
}

/* Two words of one channel's tokens and two of the next one's, or of one token's channels: the one form from the other. */
static __device__ __forceinline__ void transpose(uint32_t &a, uint32_t &b)
{
    const uint32_t low = __byte_perm(a, b, 0x5410), high = __byte_perm(a, b, 0x7632);
    a = low;
    b = high;
}

/* Row r of the tile becomes token r - HALO; zeros where there is none, which is the padding. */
template <typename E, int W> static __device__ __forceinline__ void load(const conv1d_call &c, const place &p, E *tile)
{
    const E *x = (const E *)c.x.data;
    const int thread = (int)threadIdx.x, lane = thread % CONV1D_LANES, warp = thread / CONV1D_LANES;
    const way moved = way_of(c, c.x);
    if (moved == BY_CHANNELS) {
        constexpr int STEPS = TOKENS / STEP;
        const int group = thread % 8, row = thread / 8, at = cell(HALO + row, group);
        cot_words<4> raw[STEPS + 1];
#pragma unroll
        for (int u = 0; u <= STEPS; u++) { /* the last one is the halo */
            const int token = u < STEPS ? row + u * STEP : row - HALO;
            const bool there = (u < STEPS || (row < HALO && row > HALO - W)) && inside(c, p, group * 8, token);
            raw[u] = cot_load_words_if<4>(there, x + offset(c.x, p, group * 8, token));
            if (!there)
                raw[u] = {};
        }
#pragma unroll
        for (int u = 0; u < STEPS; u++)
            *(cot_words<4> *)(tile + down(at, u * STEP)) = raw[u];
        if (row < HALO)
            *(cot_words<4> *)(tile + cell(row, group)) = raw[STEPS];
    } else if (moved == BY_TOKENS) { /* a lane 8 tokens of two channels of the warp's, and of the halo two of one */
        constexpr int STEPS = TOKENS / 64;
        const int pair = lane / 8 * 2, first = lane % 8 * 8, at = cell(HALO + first, warp) + pair;
        const int before = lane % 4 * 2, channel = lane / 4, halo = cell(before, warp) + channel;
        cot_words<4> raw[STEPS][2];
#pragma unroll
        for (int u = 0; u < STEPS; u++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool there = inside(c, p, warp * 8 + pair + i, first + u * 64);
                raw[u][i] = cot_load_words_if<4>(there, x + offset(c.x, p, warp * 8 + pair + i, first + u * 64));
                if (!there)
                    raw[u][i] = {};
            }
        const bool there = inside(c, p, warp * 8 + channel, before - HALO);
        cot_words<1> two = cot_load_words_if<1>(there, x + offset(c.x, p, warp * 8 + channel, before - HALO));
        two.word[0] = there ? two.word[0] : 0;
        *(uint16_t *)(tile + halo) = (uint16_t)two.word[0];
        *(uint16_t *)(tile + down(halo, 1)) = (uint16_t)(two.word[0] >> 16);
#pragma unroll
        for (int u = 0; u < STEPS; u++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                transpose(raw[u][0].word[i], raw[u][1].word[i]);
                *(uint32_t *)(tile + down(at, u * 64 + 2 * i)) = raw[u][0].word[i];
                *(uint32_t *)(tile + down(at, u * 64 + 2 * i + 1)) = raw[u][1].word[i];
            }
    } else {
        const bool rows = c.x.stride[1] == 1; /* neighbouring lanes to neighbouring elements */
        for (int e = thread; e < ROWS * CHANNELS; e += THREADS) {
            const int row = rows ? e / CHANNELS : e % ROWS, channel = rows ? e % CHANNELS : e / ROWS;
            const bool there = inside(c, p, channel, row - HALO);
            tile[cell(row, channel / 8) + channel % 8] = there ? x[offset(c.x, p, channel, row - HALO)] : E(0.0f);
        }
    }
}

/* Row r of the tile is y of token r. */
template <typename E> static __device__ __forceinline__ void store(const conv1d_call &c, const place &p, const E *tile)
{
    E *y = (E *)c.y.data;
    const int thread = (int)threadIdx.x, lane = thread % CONV1D_LANES, warp = thread / CONV1D_LANES;
    const way moved = way_of(c, c.y);
    if (moved == BY_CHANNELS) {
        const int group = thread % 8, row = thread / 8, at = cell(row, group);
#pragma unroll
        for (int u = 0; u < TOKENS; u += STEP)
            cot_store_words_if<4>(inside(c, p, group * 8, row + u), y + offset(c.y, p, group * 8, row + u),
                                  *(const cot_words<4> *)(tile + down(at, u)));
    } else if (moved == BY_TOKENS) {
        const int pair = lane / 8 * 2, first = lane % 8 * 8, at = cell(first, warp) + pair;
#pragma unroll
        for (int u = 0; u < TOKENS; u += 64) {
            cot_words<4> raw[2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                raw[0].word[i] = *(const uint32_t *)(tile + down(at, u + 2 * i));
                raw[1].word[i] = *(const uint32_t *)(tile + down(at, u + 2 * i + 1));
                transpose(raw[0].word[i], raw[1].word[i]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                cot_store_words_if<4>(inside(c, p, warp * 8 + pair + i, first + u),
                                      y + offset(c.y, p, warp * 8 + pair + i, first + u), raw[i]);
        }
    } else {
        const bool rows = c.y.stride[1] == 1;
        for (int e = thread; e < TOKENS * CHANNELS; e += THREADS) {
            const int row = rows ? e / CHANNELS : e % TOKENS, channel = rows ? e % CHANNELS : e / TOKENS;
            if (inside(c, p, channel, row))
                y[offset(c.y, p, channel, row)] = tile[cell(row, channel / 8) + channel % 8];
        }
    }
}

/* The diagonals of B: of term i, tap k. The lane's own part is one weight, in the half where its column is, or nothing.
 * Returns what the products have been multiplied by less. */
template <typename E, int W>
static __device__ __forceinline__ float spread(bool split, float (&w)[W], uint32_t (&b)[TERMS][W])
{
    const int column = (int)threadIdx.x % CONV1D_LANES / 4;
    const bool own = column / 2 == (int)threadIdx.x % 4, upper = column % 2 == 1;
    int down = 0;
    if (cot_is_f16<E> && split) {
        float most = 0.0f;
#pragma unroll
        for (int k = 0; k < W; k++)
            most = fmaxf(most, fabsf(w[k]));
        down = max((int)(__float_as_uint(most) >> 23) - 127 - 14, -126);
#pragma unroll
        for (int k = 0; k < W; k++)
            w[k] *= __uint_as_float((uint32_t)(127 - down) << 23);
    }
#pragma unroll
    for (int i = 0; i < TERMS; i++)
#pragma unroll
        for (int k = 0; k < W; k++) {
            const uint32_t both = cot_pack_pair<E>(w[k], w[k]);
            b[i][k] = !own ? 0 : upper ? both & 0xffff0000u : both & 0xffffu;
            w[k] -= cot_unpack_pair<E>(both).x;
        }
    return __uint_as_float((uint32_t)(127 + down) << 23);
}

/* What the initial state adds to z of token t: in float32, since its dtype need not be x's. */
static __device__ __forceinline__ float state_part(const conv1d_call &c, int64_t b, int64_t d, int t)
{
    const conv1d_array &s = c.initial_state, &w = c.weight;
    float sum = 0.0f;
    for (int k = 0; d < c.D && k < (int)c.K - 1 - t; k++)
        sum = fmaf(cot_load(w.data, w.dtype, d * w.stride[0] + k * w.stride[1]),
                   cot_load(s.data, s.dtype, b * s.stride[0] + d * s.stride[1] + (t + k) * s.stride[2]), sum);
    return sum;
}

template <typename E>
static __device__ __forceinline__ void multiply(float (&z)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if constexpr (cot_is_f16<E>)
        cot_mma_f16(z, a[0], a[1], a[2], a[3], b0, b1);
    else
        cot_mma_bf16(z, a[0], a[1], a[2], a[3], b0, b1);
}

template <typename E, int W> static __device__ __forceinline__ void forward(const conv1d_call &c)
{
    __shared__ __align__(128) E tile[ROWS * CHANNELS];
    const place p = place_of(c);
    const int lane = (int)threadIdx.x % CONV1D_LANES, group = (int)threadIdx.x / CONV1D_LANES, g = lane / 4,
              q = lane % 4;
    const bool split = c.weight.dtype != (cot_is_f16<E> ? COT_F16 : COT_BF16);
    const int64_t d = p.d + group * 8;
    float w[W], bias[2], scale[2], first[2];
    uint32_t b[TERMS][W];
    const float own_bias = load_taps<W>(c, d + g < c.D ? d + g : 0, w); /* of the lane's column of B */
    load<E, W>(c, p, tile);
    const float own_scale = spread<E, W>(split, w, b);
#pragma unroll
    for (int i = 0; i < 2; i++) { /* of its columns of the product */
        bias[i] = __shfl_sync(CONV1D_ALL_LANES, own_bias, 4 * (2 * q + i));
        scale[i] = __shfl_sync(CONV1D_ALL_LANES, own_scale, 4 * (2 * q + i));
        first[i] = bias[i];
        if (p.t == 0 && c.initial_state.data != nullptr)
            first[i] += state_part(c, p.b, d + 2 * q + i, g);
    }
    int from[SIDE_BY_SIDE][W / 2];
    const int to = cell(g, group) + 2 * q;
#pragma unroll
    for (int s = 0; s < SIDE_BY_SIDE; s++)
#pragma unroll
        for (int k = 0; k < W; k += 2)
            from[s][k / 2] = cell(16 * s + lane % 16 + lane / 16 + k + HALO - (W - 1), group);
    __syncthreads();
#pragma unroll 2 /* all four spill a register on 8.x */
    for (int strip = 0; strip < TOKENS; strip += 16 * SIDE_BY_SIDE) {
        uint32_t a[SIDE_BY_SIDE][W / 2][4];
        float z[SIDE_BY_SIDE][4] = {};
#pragma unroll
        for (int s = 0; s < SIDE_BY_SIDE; s++)
#pragma unroll
            for (int k = 0; k < W; k += 2)
                cot_ldmatrix_x4(a[s][k / 2], cot_shared_address(tile + down(from[s][k / 2], strip)));
#pragma unroll
        for (int i = TERMS - 1; i >= 0; i--) { /* the smallest first */
            if (i > 0 && !split)
                continue;
#pragma unroll
            for (int k = 0; k < W; k += 2)
#pragma unroll
                for (int s = 0; s < SIDE_BY_SIDE; s++)
                    multiply<E>(z[s], a[s][k / 2], b[i][k], b[i][k + 1]);
        }
        __syncwarp(); /* every lane has the rows that are written over */
#pragma unroll
        for (int s = 0; s < SIDE_BY_SIDE; s++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                z[s][i] = fmaf(z[s][i], scale[i % 2], s == 0 && i < 2 ? first[i % 2] : bias[i % 2]);
                if (c.silu)
                    z[s][i] = cot_silu<false>(z[s][i]);
            }
            *(uint32_t *)(tile + down(to, strip + 16 * s)) = cot_pack_pair<E>(z[s][0], z[s][1]);
            *(uint32_t *)(tile + down(to, strip + 16 * s + 8)) = cot_pack_pair<E>(z[s][2], z[s][3]);
        }
        first[0] = bias[0], first[1] = bias[1];
    }
    __syncthreads();
    store(c, p, tile);
}

#define KERNEL(name, element, width, blocks)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) name(const __grid_constant__ conv1d_call c) \
    {                                                                                                         \
        forward<element, width>(c);                                                                           \
    }
KERNEL(causal_conv1d_fwd_im2col_f16, __half, 4, 4)
KERNEL(causal_conv1d_fwd_im2col_bf16, __nv_bfloat16, 4, 4)
KERNEL(causal_conv1d_fwd_im2col_f16_k8, __half, 8, 2)
KERNEL(causal_conv1d_fwd_im2col_bf16_k8, __nv_bfloat16, 8, 2)
