/* SPDX-License-Identifier: Apache-2.0
 * attention_fwd_sm80.cuh: the forward with the instructions of compute capability 8.0, one source for 16-bit products
 * on tensor cores (attention_fwd_sm80.cu) and for float32 (attention_f32_sm80.cu).
 *
 * A block takes ROWS queries of a head, 16 M for each warp. q stays in shared memory and the accumulators of out in
 * registers. K and V have one tile each. V is loaded while scores are computed, the next K during exp and the product
 * with V. */
#ifndef COT_ATTENTION_FWD_SM80_CUH
#define COT_ATTENTION_FWD_SM80_CUH

#include "attention_sm80.cuh"

/* Turns scores into P with a running row_max (in the base of the exponent). Rescales acc and row_sum, which is this
 * lane's part of the sum. */
template <typename E, int M, int N, int N_OUT>
DEVICE void softmax_step(float (&x)[M][N][4], float scale, float (&row_max)[M][2], float (&row_sum)[M][2],
                         float (&acc)[M][N_OUT][4])
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float tile_max = -INFINITE;
#pragma unroll
            for (int n = 0; n < N; n++)
                tile_max = fmaxf(tile_max, fmaxf(x[m][n][2 * half], x[m][n][2 * half + 1]));
            tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
            tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
            if (!is_f32<E>)
                tile_max *= scale;
            const float old_max = row_max[m][half], new_max = fmaxf(old_max, tile_max);
            const float base =
                new_max == -INFINITE ? 0.0f : new_max; /* no key yet: 0 keeps the differences from being NaN */
            const float rescale = exp_scaled<E>(old_max, 1.0f, base);
#pragma unroll
            for (int n = 0; n < N_OUT; n++)
                acc[m][n][2 * half] *= rescale, acc[m][n][2 * half + 1] *= rescale;
            row_max[m][half] = new_max;
            float tile_sum = 0.0f;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &p = x[m][n][2 * half + e];
                    p = exp_scaled<E>(p, scale, base);
                    tile_sum += p;
                }
            row_sum[m][half] = fmaf(row_sum[m][half], rescale, tile_sum);
        }
}

template <typename E, int D_QK, int D_V, int M, int COLUMNS, int WARPS, bool SCORE_MODS>
DEVICE void forward(const attention_sm80_call &c)
{
    constexpr int ROWS = 16 * M * WARPS, THREADS = 32 * WARPS, N = COLUMNS / 8;
    char *const q_tile = memory, *const k_tile = q_tile + tile_bytes<E, D_QK>(ROWS, c.pitch),
                *const v_tile = k_tile + tile_bytes<E, D_QK>(COLUMNS, c.pitch);
    const block_coord coord = block_coord_of(c, c.H);
    const sequence s = sequence_at(c, coord.b);
    const int64_t h = coord.head, hkv = h / (c.H / c.Hkv);
    if (c.packed && coord.b == c.B) {
        clear_rows(c, c.out, s.q_first_row, s.q_rows, h, coord.tile, c.d_v);
        for (int64_t i = coord.tile * (int64_t)THREADS + threadIdx.x; is_present(c.lse) && i < s.q_rows;
             i += c.tiles * THREADS)
            ((float *)c.lse.data)[statistic_offset(c.lse, 0, h, s.q_first_row + i)] = -INFINITE;
        return;
    }
    /* The last tiles come first, because under a causal mask they attend to the most keys. */
    const int i0 = (int)(c.tiles - 1 - coord.tile) * ROWS;
    if (i0 >= s.q_rows)
        return;
    const span keys = key_span(c, s, i0, i0 + ROWS);
    const int first = keys.first / COLUMNS * COLUMNS;
    const score_mods mods = SCORE_MODS ? score_mods_of(c, s, h) : score_mods{};
    const float scale = exp_scale_of<E, SCORE_MODS>(c);
    float acc[M][D_V / 8][4], row_max[M][2], row_sum[M][2];
    clear_accumulators(acc);
#pragma unroll
    for (int m = 0; m < M; m++)
        row_max[m][0] = row_max[m][1] = -INFINITE, row_sum[m][0] = row_sum[m][1] = 0.0f;
    if (first < keys.end) {
        load_tile<E, ROWS, D_QK, THREADS>(q_tile, c.q, row_offset(c.q, s.b, s.q_first_row + i0, h), s.used_q - i0,
                                          (int)c.d, c.pitch);
        load_tile<E, COLUMNS, D_QK, THREADS>(k_tile, c.k, row_offset(c.k, s.b, s.k_first_row + first, hkv),
                                             s.used_k - first, (int)c.d, c.pitch);
    }
#pragma unroll 1
    for (int j0 = first; j0 < keys.end; j0 += COLUMNS) {
        const score_tile t = {i0, j0};
        float x[M][N][4];
        wait_for_copies();
        __syncthreads(); /* K is loaded, and all warps have read V */
        load_tile<E, COLUMNS, D_V, THREADS>(v_tile, c.v, row_offset(c.v, s.b, s.k_first_row + j0, hkv), s.used_k - j0,
                                            (int)c.d_v, c.pitch);
        warp_gemm_abt<E, D_QK>(x, q_tile, k_tile, (int)c.d, c.pitch);
        wait_for_copies();
        __syncthreads();
        if (j0 + COLUMNS < keys.end)
            load_tile<E, COLUMNS, D_QK, THREADS>(k_tile, c.k, row_offset(c.k, s.b, s.k_first_row + j0 + COLUMNS, hkv),
                                                 s.used_k - j0 - COLUMNS, (int)c.d, c.pitch);
        finish_scores<E, SCORE_MODS, false, false>(c, s, mods, t, all_visible<false>(c, s, t, ROWS, COLUMNS), x, x);
        softmax_step<E>(x, scale, row_max, row_sum, acc);
        if constexpr (SCORE_MODS) {
            if (c.dropped > 0) {
                uint32_t keep_bits[M];
                dropout_mask<false, M, N>(c, mods, t, keep_bits);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (!(keep_bits[m] >> (4 * n + e) & 1))
                                x[m][n][e] = 0.0f;
            }
        }
        warp_gemm_rs<E, D_V>(acc, x, v_tile, (int)c.d_v, c.pitch);
    }
    const int row = lane_row<M>();
    /* The sink acts as one more key without a value. */
    const float base_scale = is_f32<E> ? 1.0f : 1.4426950408889634f,
                sink = is_present(c.sink) ? load_at(c.sink, h * c.sink.stride[0]) : -INFINITE;
    float factor[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float &total = row_sum[m][half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            const float max_with_sink = fmaxf(row_max[m][half], base_scale * sink),
                        base = max_with_sink == -INFINITE ? 0.0f : max_with_sink;
            const float rescale = exp_scaled<E>(row_max[m][half], 1.0f, base);
            total = fmaf(total, rescale, exp_scaled<E>(base_scale * sink, 1.0f, base));
            factor[m][half] =
                total == 0.0f ? 0.0f : rescale * (SCORE_MODS && c.dropped > 0 ? c.keep_scale : 1.0f) / total;
            const int i = i0 + row + 16 * m + 8 * half;
            if (reload_lane() % 4 == 0 && i < s.q_rows && is_present(c.lse)) {
                float lse = base_scale * sink == base
                                ? sink + logf(total) /* the maximum is the sink, which is exact in natural units */
                            : is_f32<E> ? base + logf(total)
                                        : 0.6931471805599453f * (base + log2f(total));
                if (total == 0.0f || i >= s.used_q)
                    lse = -INFINITE;
                ((float *)c.lse.data)[statistic_offset(c.lse, s.b, h, s.q_first_row + i)] = lse;
            }
        }
    if (is_present(c.out))
        store_rows<E, D_QK>(c.out, row_offset(c.out, s.b, s.q_first_row + i0, h), false, s.used_q - i0, s.q_rows - i0,
                            (int)c.d_v, acc, factor, q_tile);
}

#endif
