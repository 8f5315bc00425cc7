/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_f32_sm80.cu: float32 instances of attention_fwd_sm80.cuh and attention_bwd_sm80.cuh, on FMAs. They support
 * tensors of any float dtype, which are converted to float32 when loaded, every option, and float32 results of 16-bit
 * inputs. The dbias kernel here is also used for 16-bit problems, because a float32 dbias would show the rounding of
 * 16-bit products. */
#include "attention_bwd_sm80.cuh"
#include "attention_fwd_sm80.cuh"

#define KERNEL(name)                                                       \
    extern "C" __global__ void __launch_bounds__(32 * ATTENTION_F32_WARPS) \
        attention_##name(const __grid_constant__ attention_sm80_call c)

enum { MAX_D = ATTENTION_F32_MAX_D, COLUMNS = ATTENTION_F32_COLUMNS, WARPS = ATTENTION_F32_WARPS, N = COLUMNS / 8 };

KERNEL(fwd_f32_sm80_d256)
{
    forward<float, MAX_D, MAX_D, 1, COLUMNS, WARPS, true>(c);
}

KERNEL(bwd_f32_sm80_dq_d256)
{
    backward_q<float, MAX_D, MAX_D, 1, COLUMNS, 1, WARPS, true>(c);
}

KERNEL(bwd_f32_sm80_dk_d256)
{
    backward_kv<float, MAX_D, MAX_D, 1, COLUMNS, 1, WARPS, true, true, false>(c);
}

KERNEL(bwd_f32_sm80_dv_d256)
{
    backward_kv<float, MAX_D, MAX_D, 1, COLUMNS, 1, WARPS, true, false, true>(c);
}

/* ---- dbias ------------------------------------------------------------------------------------------------------- */

/* The part of an axis that index n of dbias stands for, in tiles of `step`: the whole axis if dbias has size 1
 * there. */
struct index_range {
    int64_t first, end;
};

DEVICE index_range index_range_of(int64_t size, int64_t n, int64_t step, int64_t all)
{
    const int64_t end = n + step < all ? n + step : all;
    return size == 1 ? index_range{0, all} : index_range{n, end};
}

/* Adds dY of one tile to acc, as in attention.h: dS without the slope of the softcap. */
DEVICE void add_tile(const attention_sm80_call &c, const sequence &s, const score_mods &mods, int64_t h,
                     const score_tile &t, double (&acc)[N][4])
{
    constexpr int ROWS = ATTENTION_F32_ROWS, THREADS = 32 * WARPS;
    const int64_t hkv = h / (c.H / c.Hkv);
    char *const q = memory, *const dout = q + tile_bytes<float, MAX_D>(ROWS, c.pitch),
                *const k = dout + tile_bytes<float, MAX_D>(ROWS, c.pitch),
                *const v = k + tile_bytes<float, MAX_D>(COLUMNS, c.pitch);
    const int row = lane_row<1>();
    float x[1][N][4], cap_slopes[1][N][4], dp[1][N][4];
    __syncthreads();
    load_tile<float, ROWS, MAX_D, THREADS>(q, c.q, row_offset(c.q, s.b, s.q_first_row + t.i, h), s.used_q - t.i,
                                           (int)c.d, c.pitch);
    load_tile<float, ROWS, MAX_D, THREADS>(dout, c.dout, row_offset(c.dout, s.b, s.q_first_row + t.i, h),
                                           s.used_q - t.i, (int)c.d_v, c.pitch);
    load_tile<float, COLUMNS, MAX_D, THREADS>(k, c.k, row_offset(c.k, s.b, s.k_first_row + t.j, hkv), s.used_k - t.j,
                                              (int)c.d, c.pitch);
    load_tile<float, COLUMNS, MAX_D, THREADS>(v, c.v, row_offset(c.v, s.b, s.k_first_row + t.j, hkv), s.used_k - t.j,
                                              (int)c.d_v, c.pitch);
    __syncthreads();
    warp_gemm_abt<float, MAX_D>(x, q, k, (int)c.d, c.pitch);
    finish_scores<float, true, false, false>(c, s, mods, t, all_visible<false>(c, s, t, ROWS, COLUMNS), x, cap_slopes);
    warp_gemm_abt<float, MAX_D>(dp, dout, v, (int)c.d_v, c.pitch);
    uint32_t keep_bits[1] = {~0u};
    if (c.dropped > 0)
        dropout_mask<false, 1, N>(c, mods, t, keep_bits);
    const float keep_scale = c.dropped > 0 ? c.keep_scale : 1.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = t.i + row + 8 * half;
        if (i >= s.used_q)
            continue;
        const float lse = load_at(c.lse, statistic_offset(c.lse, s.b, h, s.q_first_row + i));
        const float delta = c.row_delta[statistic_row(c, s, h) + i];
        if (lse == -INFINITE)
            continue;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++)
                if (x[0][n][e] != -INFINITE) /* masked: adds nothing, even if lse or dP is NaN */
                    acc[n][e] += exp_scaled<float>(x[0][n][e], 1.0f, lse) *
                                 ((keep_bits[0] >> (4 * n + e) & 1 ? keep_scale * dp[0][n][e] : 0.0f) - delta);
    }
}

/* A block takes a tile of queries and keys of one dbias[b,h]. It loops over all scores that each element stands for, in
 * a fixed order. */
KERNEL(bwd_f32_sm80_dbias_d256)
{
    constexpr int ROWS = ATTENTION_F32_ROWS;
    __shared__ double warp_sums[WARPS][N][8];
    const int64_t *shape = c.bias_shape;
    const unsigned tiles_i = shape[2] == 1 ? 1 : (unsigned)((shape[2] + ROWS - 1) / ROWS);
    const unsigned tiles_j = shape[3] == 1 ? 1 : (unsigned)((shape[3] + COLUMNS - 1) / COLUMNS);
    const unsigned query_tile = blockIdx.x / tiles_j, dbias_head = query_tile / tiles_i,
                   bias_heads = (unsigned)shape[1];
    const int64_t first_i = query_tile % tiles_i * ROWS, first_j = blockIdx.x % tiles_j * COLUMNS;
    const int64_t bias_h = dbias_head % bias_heads, bias_b = dbias_head / bias_heads;
    const index_range batch = index_range_of(shape[0], bias_b, 1, c.B),
                      heads = index_range_of(shape[1], bias_h, 1, c.H);
    double acc[N][4] = {};
    for (int64_t b = batch.first; b < batch.end; b++) {
        const sequence s = sequence_at(c, b);
        const index_range query_range = index_range_of(shape[2], first_i, ROWS, s.used_q),
                          key_range = index_range_of(shape[3], first_j, COLUMNS, s.used_k);
        for (int64_t h = heads.first; h < heads.end; h++) {
            const score_mods mods = score_mods_of(c, s, h);
            for (int64_t i0 = query_range.first; i0 < query_range.end; i0 += ROWS) {
                const span keys = key_span(c, s, (int)i0, (int)i0 + ROWS);
                for (int64_t j0 = key_range.first; j0 < key_range.end; j0 += COLUMNS)
                    if (j0 < keys.end && j0 + COLUMNS > keys.first)
                        add_tile(c, s, mods, h, {(int)i0, (int)j0}, acc);
            }
        }
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (shape[3] == 1)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            double sum = 0;
#pragma unroll
            for (int m = 0; m < N; m++)
                sum += acc[m][2 * half] + acc[m][2 * half + 1];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            acc[0][2 * half] = sum;
        }
    if (shape[2] == 1) {
#pragma unroll
        for (int m = 0; m < N; m++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                double sum = acc[m][e] + acc[m][2 + e];
                sum += __shfl_xor_sync(0xffffffffu, sum, 4);
                sum += __shfl_xor_sync(0xffffffffu, sum, 8);
                sum += __shfl_xor_sync(0xffffffffu, sum, 16);
                if (lane < 4)
                    warp_sums[warp][m][2 * lane + e] = sum;
            }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < N; m++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                acc[m][e] = 0;
                for (int w = 0; w < WARPS; w++)
                    acc[m][e] += warp_sums[w][m][lane % 4 * 2 + e];
            }
    }
#pragma unroll
    for (int m = 0; m < N; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int64_t i = first_i + warp * 16 + lane / 4 + e / 2 * 8, j = first_j + 8 * m + lane % 4 * 2 + e % 2;
            if (i >= shape[2] || j >= shape[3])
                continue;
            const int64_t element =
                bias_b * c.dbias.stride[0] + bias_h * c.dbias.stride[1] + i * c.dbias.stride[2] + j * c.dbias.stride[3];
            const double old = c.accumulate ? load_at(c.dbias, element) : 0.0;
            cot_store(c.dbias.data, c.dbias.dtype, element, (float)(old + acc[m][e]));
        }
}
