/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_im2col.cuh: what the im2col kernels share: the tile of x in shared memory, in which the product
 * replaces x by y, and the copies to and from it. */
#ifndef COT_CAUSAL_CONV1D_IM2COL_CUH
#define COT_CAUSAL_CONV1D_IM2COL_CUH

#include "causal_conv1d_common.cuh"

enum {
    TOKENS = CONV1D_IM2COL_TOKENS,
    CHANNELS = CONV1D_IM2COL_CHANNELS,
    THREADS = CONV1D_IM2COL_THREADS,
    HALO = 8, /* rows before the tile's tokens, of which the last W-1 hold inputs */
    ROWS = HALO + TOKENS,
    COPY_ROWS = THREADS / 8, /* rows that the block copies at once, 8 threads per row */
    TERMS = 3,
    STRIPS = 2 /* strips of 16 tokens that a warp or wave processes at once, so that their products overlap */
};

/* The position of a block's tile: batch element b, first channel d, first token t. */
struct tile_position {
    int64_t b, d;
    int t;
};

/* Consecutive blocks access consecutive memory of x. */
static __device__ __forceinline__ tile_position block_tile_position(const conv1d_call &c)
{
    const uint32_t tiles = (uint32_t)((c.T + TOKENS - 1) / TOKENS),
                   groups = (uint32_t)((c.D + CHANNELS - 1) / CHANNELS);
    const bool by_channels = c.x.stride[1] == 1;
    const uint32_t inner = by_channels ? groups : tiles, low = blockIdx.x % inner, rest = blockIdx.x / inner;
    const uint32_t outer = by_channels ? tiles : groups, high = rest % outer;
    return {(int64_t)(rest / outer), (int64_t)(by_channels ? low : high) * CHANNELS,
            (int)(by_channels ? high : low) * TOKENS};
}

/* The offset of 8 channels of a row in the swizzled tile. Adjacent rows are in different banks, and so are rows r and
 * r + 8. */
static __device__ __forceinline__ int swizzled_offset(int row, int group)
{
    return row * CHANNELS + ((group ^ row ^ row >> 3) & 7) * 8;
}

/* The swizzled offset e rows further, for an offset in row r. The lowest 5 bits of r and of e must add without a
 * carry. */
static __device__ __forceinline__ int offset_rows_down(int at, int e)
{
    return (at ^ ((e ^ e >> 3) & 7) * 8) + e * CHANNELS;
}

/* How x or y is copied: vectors of 8 channels of a token, vectors of 8 tokens of a channel, or single elements. */
enum copy_mode { BY_CHANNELS, BY_TOKENS, BY_ELEMENTS };

static __device__ __forceinline__ copy_mode choose_copy_mode(const conv1d_call &c, const conv1d_array &a)
{
    if (a.aligned && a.stride[1] == 1 && c.D % 8 == 0)
        return BY_CHANNELS;
    return a.aligned && a.stride[2] == 1 && c.T % 8 == 0 ? BY_TOKENS : BY_ELEMENTS;
}

static __device__ __forceinline__ int64_t offset(const conv1d_array &a, const tile_position &p, int channel, int token)
{
    return p.b * a.stride[0] + (p.d + channel) * a.stride[1] + (p.t + (int64_t)token) * a.stride[2];
}

static __device__ __forceinline__ bool in_bounds(const conv1d_call &c, const tile_position &p, int channel, int token)
{
    return p.d + channel < c.D && p.t + token >= 0 && p.t + token < c.T;
}

/* Transposes a 2 x 2 block of 16-bit elements, of 2 channels by 2 tokens, in two words. */
static __device__ __forceinline__ void transpose(uint32_t &a, uint32_t &b)
{
    const uint32_t low = __byte_perm(a, b, 0x5410), high = __byte_perm(a, b, 0x7632);
    a = low;
    b = high;
}

/* Copies x to the tile: row r is token r - HALO. Tokens and channels out of bounds are zero-filled, which is the
 * padding. */
template <typename E, int W>
static __device__ __forceinline__ void load(const conv1d_call &c, const tile_position &p, E *tile)
{
    const E *x = (const E *)c.x.data;
    const int thread = (int)threadIdx.x, lane = thread % CONV1D_LANES, warp = thread / CONV1D_LANES;
    const copy_mode mode = choose_copy_mode(c, c.x);
    if (mode == BY_CHANNELS) {
        constexpr int COPIES = TOKENS / COPY_ROWS;
        const int group = thread % 8, row = thread / 8, at = swizzled_offset(HALO + row, group);
        cot_words<4> raw[COPIES + 1];
#pragma unroll
        for (int u = 0; u <= COPIES; u++) { /* the last copy is the halo */
            const int token = u < COPIES ? row + u * COPY_ROWS : row - HALO;
            const bool in_range = (u < COPIES || (row < HALO && row > HALO - W)) && in_bounds(c, p, group * 8, token);
            raw[u] = cot_load_words_if<4>(in_range, x + offset(c.x, p, group * 8, token));
            if (!in_range)
                raw[u] = {};
        }
#pragma unroll
        for (int u = 0; u < COPIES; u++)
            *(cot_words<4> *)(tile + offset_rows_down(at, u * COPY_ROWS)) = raw[u];
        if (row < HALO)
            *(cot_words<4> *)(tile + swizzled_offset(row, group)) = raw[COPIES];
    } else if (mode == BY_TOKENS) { /* a lane copies 8 tokens of 2 of the warp's channels, and 2 halo tokens of one */
        constexpr int COPIES = TOKENS / 64;
        const int pair = lane / 8 * 2, first = lane % 8 * 8, at = swizzled_offset(HALO + first, warp) + pair;
        const int before = lane % 4 * 2, channel = lane / 4, halo = swizzled_offset(before, warp) + channel;
        cot_words<4> raw[COPIES][2];
#pragma unroll
        for (int u = 0; u < COPIES; u++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool in_range = in_bounds(c, p, warp * 8 + pair + i, first + u * 64);
                raw[u][i] = cot_load_words_if<4>(in_range, x + offset(c.x, p, warp * 8 + pair + i, first + u * 64));
                if (!in_range)
                    raw[u][i] = {};
            }
        const bool in_range = in_bounds(c, p, warp * 8 + channel, before - HALO);
        cot_words<1> two = cot_load_words_if<1>(in_range, x + offset(c.x, p, warp * 8 + channel, before - HALO));
        two.word[0] = in_range ? two.word[0] : 0;
        *(uint16_t *)(tile + halo) = (uint16_t)two.word[0];
        *(uint16_t *)(tile + offset_rows_down(halo, 1)) = (uint16_t)(two.word[0] >> 16);
#pragma unroll
        for (int u = 0; u < COPIES; u++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                transpose(raw[u][0].word[i], raw[u][1].word[i]);
                *(uint32_t *)(tile + offset_rows_down(at, u * 64 + 2 * i)) = raw[u][0].word[i];
                *(uint32_t *)(tile + offset_rows_down(at, u * 64 + 2 * i + 1)) = raw[u][1].word[i];
            }
    } else {
        const bool rows = c.x.stride[1] == 1; /* adjacent lanes access adjacent elements */
        for (int e = thread; e < ROWS * CHANNELS; e += THREADS) {
            const int row = rows ? e / CHANNELS : e % ROWS, channel = rows ? e % CHANNELS : e / ROWS;
            const bool in_range = in_bounds(c, p, channel, row - HALO);
            tile[swizzled_offset(row, channel / 8) + channel % 8] =
                in_range ? x[offset(c.x, p, channel, row - HALO)] : E{};
        }
    }
}

/* Copies the tile to y: row r is y of token r. */
template <typename E>
static __device__ __forceinline__ void store(const conv1d_call &c, const tile_position &p, const E *tile)
{
    E *y = (E *)c.y.data;
    const int thread = (int)threadIdx.x, lane = thread % CONV1D_LANES, warp = thread / CONV1D_LANES;
    const copy_mode mode = choose_copy_mode(c, c.y);
    if (mode == BY_CHANNELS) {
        const int group = thread % 8, row = thread / 8, at = swizzled_offset(row, group);
#pragma unroll
        for (int u = 0; u < TOKENS; u += COPY_ROWS)
            cot_store_words_if<4>(in_bounds(c, p, group * 8, row + u), y + offset(c.y, p, group * 8, row + u),
                                  *(const cot_words<4> *)(tile + offset_rows_down(at, u)));
    } else if (mode == BY_TOKENS) {
        const int pair = lane / 8 * 2, first = lane % 8 * 8, at = swizzled_offset(first, warp) + pair;
#pragma unroll
        for (int u = 0; u < TOKENS; u += 64) {
            cot_words<4> raw[2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                raw[0].word[i] = *(const uint32_t *)(tile + offset_rows_down(at, u + 2 * i));
                raw[1].word[i] = *(const uint32_t *)(tile + offset_rows_down(at, u + 2 * i + 1));
                transpose(raw[0].word[i], raw[1].word[i]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                cot_store_words_if<4>(in_bounds(c, p, warp * 8 + pair + i, first + u),
                                      y + offset(c.y, p, warp * 8 + pair + i, first + u), raw[i]);
        }
    } else {
        const bool rows = c.y.stride[1] == 1;
        for (int e = thread; e < TOKENS * CHANNELS; e += THREADS) {
            const int row = rows ? e / CHANNELS : e % TOKENS, channel = rows ? e % CHANNELS : e / TOKENS;
            if (in_bounds(c, p, channel, row))
                y[offset(c.y, p, channel, row)] = tile[swizzled_offset(row, channel / 8) + channel % 8];
        }
    }
}

/* The term of z of token t that comes from the initial state, in float32: the dtype of the state may differ from
 * x's. */
static __device__ __forceinline__ float initial_state_sum(const conv1d_call &c, int64_t b, int64_t d, int t)
{
    const conv1d_array &s = c.initial_state, &w = c.weight;
    float sum = 0.0f;
    for (int k = 0; d < c.D && k < (int)c.K - 1 - t; k++)
        sum = fmaf(cot_load(w.data, w.dtype, d * w.stride[0] + k * w.stride[1]),
                   cot_load(s.data, s.dtype, b * s.stride[0] + d * s.stride[1] + (t + k) * s.stride[2]), sum);
    return sum;
}

#endif
