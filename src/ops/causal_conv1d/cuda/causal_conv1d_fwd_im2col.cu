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
#include "causal_conv1d_im2col.cuh"

#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/ptx.cuh"

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
