/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_im2col_mfma.cu: forward by padding, im2col, a matrix product on the matrix cores of AMD GPUs, then
 * bias and SiLU. For comparison with the direct kernels. For 16 channels and 16 tokens, one 16x16x16 instruction
 * computes a tap:
 *
 *     A [channel][channel]  weights of the tap on the diagonal, else zeros: 15 of 16 products are by zero
 *     B [channel][token]    xe: the next tap is the next row in LDS, so im2col only changes addresses
 *
 * A wave processes 16 channels of the block's tile of tokens. It stores y of a token 8 rows before the token's input,
 * over inputs that the wave no longer needs. A lane has one token and 4 adjacent channels of the result. Weights of a
 * dtype other than x's are split into 3 terms, as in ../cuda/causal_conv1d_fwd_im2col.cu. An infinity or NaN in x also
 * reaches the other channels of the product.
 *
 * The f16 instructions of MI200 take subnormal inputs as zeros. There f16 is multiplied as float32, by four 16x16x4
 * instructions, and the weights are not split. */
#include "../cuda/causal_conv1d_im2col.cuh"

enum { WAVE = 64, SIDE = 16, LANE_CHANNELS = 4 };

typedef float accumulators __attribute__((ext_vector_type(4)));
typedef _Float16 half4 __attribute__((ext_vector_type(4)));
typedef short short4 __attribute__((ext_vector_type(4)));

static_assert(THREADS / WAVE * SIDE == CHANNELS, "16 channels per wave");

/* Builds the lane's registers of A: a[i][k] for term i and tap k. A lane on the diagonal has one weight: of row lane %
 * 16, in column 4 (lane / 16) + lane % 4. The other lanes have zeros. Returns the scale to multiply the products by. */
template <typename E, int W>
static __device__ __forceinline__ float build_diagonals(bool split, float (&w)[W], uint64_t (&a)[TERMS][W])
{
    const int lane = (int)threadIdx.x % WAVE;
    const bool on_diagonal = lane % SIDE / LANE_CHANNELS == lane / SIDE;
    int exponent = 0;
    if (cot_is_f16<E> && split) {
        float max_abs = 0.0f;
#pragma unroll
        for (int k = 0; k < W; k++)
            max_abs = fmaxf(max_abs, fabsf(w[k]));
        exponent = max((int)(__float_as_uint(max_abs) >> 23) - 127 - 14, -126);
#pragma unroll
        for (int k = 0; k < W; k++)
            w[k] *= __uint_as_float((uint32_t)(127 - exponent) << 23);
    }
#pragma unroll
    for (int i = 0; i < TERMS; i++)
#pragma unroll
        for (int k = 0; k < W; k++) {
            const uint32_t both = cot_pack_pair<E>(w[k], w[k]);
            a[i][k] = on_diagonal ? (uint64_t)(both & 0xffffu) << 16 * (lane % LANE_CHANNELS) : 0;
            w[k] -= cot_unpack_pair<E>(both).x;
        }
    return __uint_as_float((uint32_t)(127 + exponent) << 23);
}

/* Whether the matrix cores multiply E as float32. */
#if defined(__gfx90a__)
template <typename E> constexpr bool as_f32 = cot_is_f16<E>;
#else
template <typename E> constexpr bool as_f32 = false;
#endif

template <typename E>
static __device__ __forceinline__ accumulators multiply(uint64_t a, uint64_t b, const accumulators &z)
{
    if constexpr (cot_is_f16<E>)
        return __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(half4, a), __builtin_bit_cast(half4, b), z, 0,
                                                     0, 0);
    else
        return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(short4, a), __builtin_bit_cast(short4, b),
                                                         z, 0, 0, 0);
}

/* The same in float32. w: the weight of a lane on the diagonal. Instruction n has column 4 (lane / 16) + n of A. */
template <typename E>
static __device__ __forceinline__ accumulators multiply_as_f32(float w, uint64_t b, accumulators z)
{
    const int lane = (int)threadIdx.x % WAVE;
    const half4 x = __builtin_bit_cast(half4, b);
#pragma unroll
    for (int n = 0; n < LANE_CHANNELS; n++)
        z = __builtin_amdgcn_mfma_f32_16x16x4f32(lane % SIDE == lane / SIDE * LANE_CHANNELS + n ? w : 0.0f, (float)x[n],
                                                 z, 0, 0, 0);
    return z;
}

/* The offset of 4 of the wave's channels in a row of the tile. */
static __device__ __forceinline__ int lane_offset(int row)
{
    const int wave = (int)threadIdx.x / WAVE, quarter = (int)threadIdx.x % WAVE / SIDE;
    return swizzled_offset(row, wave * 2 + quarter / 2) + quarter % 2 * LANE_CHANNELS;
}

template <typename E, int W> static __device__ __forceinline__ void forward(const conv1d_call &c)
{
    __shared__ __align__(128) E tile[ROWS * CHANNELS];
    const tile_position p = block_tile_position(c);
    const int lane = (int)threadIdx.x % WAVE, token = lane % SIDE, channel = lane / SIDE * LANE_CHANNELS;
    const bool split = !as_f32<E> && c.weight.dtype != (cot_is_f16<E> ? COT_F16 : COT_BF16);
    const int64_t d = p.d + (int)threadIdx.x / WAVE * SIDE;
    float w[W], bias[LANE_CHANNELS], scale[LANE_CHANNELS], first[LANE_CHANNELS];
    uint64_t a[TERMS][W];
    const float row_bias = load_taps<W>(c, d + token < c.D ? d + token : 0, w); /* for the lane's row of A */
    load<E, W>(c, p, tile);
    const float row_scale = as_f32<E> ? 1.0f : build_diagonals<E, W>(split, w, a);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) { /* for the lane's 4 rows of the product */
        bias[i] = __shfl_sync(CONV1D_ALL_LANES, row_bias, channel + i);
        scale[i] = __shfl_sync(CONV1D_ALL_LANES, row_scale, channel + i);
        first[i] = bias[i];
        if (p.t == 0 && c.initial_state.data != nullptr)
            first[i] += initial_state_sum(c, p.b, d + channel + i, token);
    }
    int from[STRIPS][W];
    const int to = lane_offset(token);
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
#pragma unroll
        for (int k = 0; k < W; k++)
            from[s][k] = lane_offset(SIDE * s + token + k + HALO - (W - 1));
    __syncthreads();
#pragma unroll 1
    for (int strip = 0; strip < TOKENS; strip += SIDE * STRIPS) {
        uint64_t b[STRIPS][W];
        accumulators z[STRIPS] = {};
#pragma unroll
        for (int s = 0; s < STRIPS; s++)
#pragma unroll
            for (int k = 0; k < W; k++)
                b[s][k] = *(const uint64_t *)(tile + offset_rows_down(from[s][k], strip));
#pragma unroll
        for (int i = TERMS - 1; i >= 0; i--) { /* the smallest terms first */
            if (i > 0 && !split)
                continue;
#pragma unroll
            for (int k = 0; k < W; k++)
#pragma unroll
                for (int s = 0; s < STRIPS; s++)
                    if constexpr (as_f32<E>)
                        z[s] = multiply_as_f32<E>(w[k], b[s][k], z[s]);
                    else
                        z[s] = multiply<E>(a[i][k], b[s][k], z[s]);
        }
        __syncwarp(); /* every lane has loaded the rows that are overwritten below */
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
            float y[LANE_CHANNELS];
#pragma unroll
            for (int i = 0; i < LANE_CHANNELS; i++) {
                y[i] = fmaf(z[s][i], scale[i], s == 0 ? first[i] : bias[i]);
                if (c.silu)
                    y[i] = cot_silu<false>(y[i]);
            }
            *(uint64_t *)(tile + offset_rows_down(to, strip + SIDE * s)) =
                cot_pack_pair<E>(y[0], y[1]) | (uint64_t)cot_pack_pair<E>(y[2], y[3]) << 32;
        }
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++)
            first[i] = bias[i];
    }
    __syncthreads();
    store(c, p, tile);
}

#define KERNEL(name, element, width)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ conv1d_call) \
    {                                                                                               \
        forward<element, width>(COT_HIP_ARGUMENT(conv1d_call));                                     \
    }
KERNEL(causal_conv1d_fwd_im2col_f16, __half, 4)
KERNEL(causal_conv1d_fwd_im2col_bf16, __nv_bfloat16, 4)
KERNEL(causal_conv1d_fwd_im2col_f16_k8, __half, 8)
KERNEL(causal_conv1d_fwd_im2col_bf16_k8, __nv_bfloat16, 8)
