/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_im2col.cu: forward by padding, im2col, a matrix product on tensor cores, then bias and SiLU. For
 * comparison with the direct kernels. For 8 channels and 16 tokens, one mma.m16n8k16 computes two taps:
 *
 *     A [token][tap, channel]     xe: the next tap is the next row in shared memory, so im2col only changes addresses
 *     B [tap, channel][channel]   weights on the diagonals, else zeros: 7 of 8 products are by zero
 *
 * A warp processes 8 channels of the block's tile of tokens. It stores y of a token 8 rows before the token's input,
 * over inputs that the warp no longer needs. Weights of a dtype other than x's are split into 3 terms of x's dtype,
 * so that all products are exact. Before a split into f16, the weights of a channel are scaled by a power of two,
 * which moves the largest to the top of the range of f16. An infinity or NaN in x also reaches the channels and taps
 * whose weight for it is one of the zeros. */
#include "causal_conv1d_common.cuh"

#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/ptx.cuh"

enum {
    TOKENS = CONV1D_IM2COL_TOKENS,
    CHANNELS = CONV1D_IM2COL_CHANNELS,
    THREADS = CONV1D_IM2COL_THREADS,
    HALO = 8, /* rows before the tile's tokens, of which the last W-1 hold inputs */
    ROWS = HALO + TOKENS,
    COPY_ROWS = THREADS / 8, /* rows that the block copies at once, 8 threads per row */
    TERMS = 3,
    STRIPS = 2 /* strips of 16 tokens that a warp processes at once, so that their products overlap */
};

/* The position of a block's tile: row b, first channel d, first token t. */
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
                in_range ? x[offset(c.x, p, channel, row - HALO)] : E(0.0f);
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

/* Builds the lane's registers of B: b[i][k] for term i and tap k. A lane on the diagonal has one weight, in the half
 * that belongs to its column. The other lanes have zeros. Returns the scale to multiply the products by. */
template <typename E, int W>
static __device__ __forceinline__ float build_diagonals(bool split, float (&w)[W], uint32_t (&b)[TERMS][W])
{
    const int column = (int)threadIdx.x % CONV1D_LANES / 4;
    const bool on_diagonal = column / 2 == (int)threadIdx.x % 4, upper = column % 2 == 1;
    int offset_rows_down = 0;
    if (cot_is_f16<E> && split) {
        float max_abs = 0.0f;
#pragma unroll
        for (int k = 0; k < W; k++)
            max_abs = fmaxf(max_abs, fabsf(w[k]));
        offset_rows_down = max((int)(__float_as_uint(max_abs) >> 23) - 127 - 14, -126);
#pragma unroll
        for (int k = 0; k < W; k++)
            w[k] *= __uint_as_float((uint32_t)(127 - offset_rows_down) << 23);
    }
#pragma unroll
    for (int i = 0; i < TERMS; i++)
#pragma unroll
        for (int k = 0; k < W; k++) {
            const uint32_t both = cot_pack_pair<E>(w[k], w[k]);
            b[i][k] = !on_diagonal ? 0 : upper ? both & 0xffff0000u : both & 0xffffu;
            w[k] -= cot_unpack_pair<E>(both).x;
        }
    return __uint_as_float((uint32_t)(127 + offset_rows_down) << 23);
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

template <typename E>
static __device__ __forceinline__ void mma(float (&z)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if constexpr (cot_is_f16<E>)
        cot_mma_f16(z, a[0], a[1], a[2], a[3], b0, b1);
    else
        cot_mma_bf16(z, a[0], a[1], a[2], a[3], b0, b1);
}

template <typename E, int W> static __device__ __forceinline__ void forward(const conv1d_call &c)
{
    __shared__ __align__(128) E tile[ROWS * CHANNELS];
    const tile_position p = block_tile_position(c);
    const int lane = (int)threadIdx.x % CONV1D_LANES, group = (int)threadIdx.x / CONV1D_LANES, g = lane / 4,
              q = lane % 4;
    const bool split = c.weight.dtype != (cot_is_f16<E> ? COT_F16 : COT_BF16);
    const int64_t d = p.d + group * 8;
    float w[W], bias[2], scale[2], first[2];
    uint32_t b[TERMS][W];
    const float b_column_bias = load_taps<W>(c, d + g < c.D ? d + g : 0, w); /* for the lane's column of B */
    load<E, W>(c, p, tile);
    const float b_column_scale = build_diagonals<E, W>(split, w, b);
#pragma unroll
    for (int i = 0; i < 2; i++) { /* for the lane's 2 columns of the product */
        bias[i] = __shfl_sync(CONV1D_ALL_LANES, b_column_bias, 4 * (2 * q + i));
        scale[i] = __shfl_sync(CONV1D_ALL_LANES, b_column_scale, 4 * (2 * q + i));
        first[i] = bias[i];
        if (p.t == 0 && c.initial_state.data != nullptr)
            first[i] += initial_state_sum(c, p.b, d + 2 * q + i, g);
    }
    int from[STRIPS][W / 2];
    const int to = swizzled_offset(g, group) + 2 * q;
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
#pragma unroll
        for (int k = 0; k < W; k += 2)
            from[s][k / 2] = swizzled_offset(16 * s + lane % 16 + lane / 16 + k + HALO - (W - 1), group);
    __syncthreads();
#pragma unroll 2 /* unrolling all 4 spills a register on compute capability 8.x */
    for (int strip = 0; strip < TOKENS; strip += 16 * STRIPS) {
        uint32_t a[STRIPS][W / 2][4];
        float z[STRIPS][4] = {};
#pragma unroll
        for (int s = 0; s < STRIPS; s++)
#pragma unroll
            for (int k = 0; k < W; k += 2)
                cot_ldmatrix_x4(a[s][k / 2], cot_shared_address(tile + offset_rows_down(from[s][k / 2], strip)));
#pragma unroll
        for (int i = TERMS - 1; i >= 0; i--) { /* the smallest terms first */
            if (i > 0 && !split)
                continue;
#pragma unroll
            for (int k = 0; k < W; k += 2)
#pragma unroll
                for (int s = 0; s < STRIPS; s++)
                    mma<E>(z[s], a[s][k / 2], b[i][k], b[i][k + 1]);
        }
        __syncwarp(); /* every lane has loaded the rows that are overwritten below */
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                z[s][i] = fmaf(z[s][i], scale[i % 2], s == 0 && i < 2 ? first[i % 2] : bias[i % 2]);
                if (c.silu)
                    z[s][i] = cot_silu<false>(z[s][i]);
            }
            *(uint32_t *)(tile + offset_rows_down(to, strip + 16 * s)) = cot_pack_pair<E>(z[s][0], z[s][1]);
            *(uint32_t *)(tile + offset_rows_down(to, strip + 16 * s + 8)) = cot_pack_pair<E>(z[s][2], z[s][3]);
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
