/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_sm80.cuh: the backward with the instructions of compute capability 8.0, one source for 16-bit products
 * on tensor cores (attention_bwd_sm80.cu) and for float32 (attention_f32_sm80.cu).
 *
 * Two passes. Each thread block owns the sums that it computes, so the order of thread blocks does not matter. Both
 * passes read lse and delta, which a kernel before them writes.
 *
 *   dq        a thread block takes queries of a head and loops     S = Q K^T   dP = dO V^T   dQ += dS K
 *             over tiles of keys
 *   dk, dv    a thread block takes keys of a key-value head and    S^T = K Q^T   dP^T = V dO^T
 *             loops over the group's heads, and over the tiles     dV += P^T dO   dK += dS^T Q
 *             of queries of each head
 *
 * P and dS go from one product to the next in registers. The two passes need seven products.
 * attention_bwd_one_pass_sm80.cu needs five, but adds dq in any order. */
#ifndef COT_ATTENTION_BWD_SM80_CUH
#define COT_ATTENTION_BWD_SM80_CUH

#include "attention_sm80.cuh"

/* ---- dq ------------------------------------------------------------------------------------------------------ */

template <typename E, int D_QK, int D_V, int M, int COLUMNS, int STAGES, int WARPS, bool SCORE_MODS>
DEVICE void backward_q(const attention_sm80_call &c)
{
    constexpr int ROWS = 16 * M * WARPS, THREADS = 32 * WARPS, N = COLUMNS / 8;
    const int k_bytes = tile_bytes<E, D_QK>(COLUMNS, c.pitch), v_bytes = tile_bytes<E, D_V>(COLUMNS, c.pitch);
    char *const q_tile = memory, *const dout_tile = q_tile + tile_bytes<E, D_QK>(ROWS, c.pitch),
                *const k_tiles = dout_tile + tile_bytes<E, D_V>(ROWS, c.pitch),
                *const v_tiles = k_tiles + STAGES * k_bytes;
    const block_coord coord = block_coord_of(c, c.H);
    const sequence s = sequence_at(c, coord.b);
    const int64_t h = coord.head, hkv = h / (c.H / c.Hkv);
    if (c.packed && coord.b == c.B) {
        clear_rows(c, c.dq, s.q_first_row, s.q_rows, h, coord.tile, c.d);
        return;
    }
    const int i0 = (int)(c.tiles - 1 - coord.tile) * ROWS;
    if (i0 >= s.q_rows)
        return;
    const span keys = key_span(c, s, i0, i0 + ROWS);
    const int row = lane_row<M>(), first = keys.first / COLUMNS * COLUMNS;
    const score_mods mods = SCORE_MODS ? score_mods_of(c, s, h) : score_mods{};
    const float scale = exp_scale_of<E, SCORE_MODS>(c);
    float acc[M][D_QK / 8][4], lse[M][2], delta[M][2];
    clear_accumulators(acc);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = i0 + row + 16 * m + 8 * half;
            lse[m][half] = INFINITE, delta[m][half] = 0.0f;
            if (i < s.used_q) {
                lse[m][half] = c.row_lse[statistic_row(c, s, h) + i];
                delta[m][half] = c.row_delta[statistic_row(c, s, h) + i];
            }
        }
    const auto load = [&](int j0, int stage) {
        load_tile<E, COLUMNS, D_QK, THREADS>(k_tiles + stage * k_bytes, c.k,
                                             row_offset(c.k, s.b, s.k_first_row + j0, hkv), s.used_k - j0, (int)c.d,
                                             c.pitch);
        load_tile<E, COLUMNS, D_V, THREADS>(v_tiles + stage * v_bytes, c.v,
                                            row_offset(c.v, s.b, s.k_first_row + j0, hkv), s.used_k - j0, (int)c.d_v,
                                            c.pitch);
    };
    if (first < keys.end) {
        load_tile<E, ROWS, D_QK, THREADS>(q_tile, c.q, row_offset(c.q, s.b, s.q_first_row + i0, h), s.used_q - i0,
                                          (int)c.d, c.pitch);
        load_tile<E, ROWS, D_V, THREADS>(dout_tile, c.dout, row_offset(c.dout, s.b, s.q_first_row + i0, h),
                                         s.used_q - i0, (int)c.d_v, c.pitch);
        load(first, 0);
    }
    int stage = 0;
#pragma unroll 1
    for (int j0 = first; j0 < keys.end; j0 += COLUMNS) {
        const score_tile t = {i0, j0};
        const char *const k_tile = k_tiles + stage * k_bytes, *const v_tile = v_tiles + stage * v_bytes;
        float x[M][N][4], dp[M][N][4], cap_slopes[SCORE_MODS ? M : 1][SCORE_MODS ? N : 1][4];
        wait_for_copies();
        __syncthreads();
        if (STAGES == 2 && j0 + COLUMNS < keys.end)
            load(j0 + COLUMNS, stage ^ 1);
        warp_gemm_abt<E, D_QK>(x, q_tile, k_tile, (int)c.d, c.pitch);
        if constexpr (SCORE_MODS)
            finish_scores<E, SCORE_MODS, false, true>(c, s, mods, t, all_visible<false>(c, s, t, ROWS, COLUMNS), x,
                                                      cap_slopes);
        else
            finish_scores<E, SCORE_MODS, false, false>(c, s, mods, t, all_visible<false>(c, s, t, ROWS, COLUMNS), x, x);
        warp_gemm_abt<E, D_V>(dp, dout_tile, v_tile, (int)c.d_v, c.pitch);
        uint32_t keep_bits[M];
        if (SCORE_MODS && c.dropped > 0)
            dropout_mask<false, M, N>(c, mods, t, keep_bits);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float y = dp[m][n][e];
                    if (SCORE_MODS && c.dropped > 0)
                        y = keep_bits[m] >> (4 * n + e) & 1 ? c.keep_scale * y : 0.0f;
                    x[m][n][e] = exp_scaled<E>(x[m][n][e], scale, lse[m][e / 2]) * (y - delta[m][e / 2]);
                    if constexpr (SCORE_MODS)
                        x[m][n][e] *= cap_slopes[m][n][e];
                }
        warp_gemm_rs<E, D_QK>(acc, x, k_tile, (int)c.d, c.pitch);
        if (STAGES == 2) {
            stage ^= 1;
        } else if (j0 + COLUMNS < keys.end) {
            __syncthreads();
            load(j0 + COLUMNS, 0);
        }
    }
    float factor[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
        factor[m][0] = factor[m][1] = c.scale;
    store_rows<E, D_QK>(c.dq, row_offset(c.dq, s.b, s.q_first_row + i0, h), c.accumulate, s.used_q - i0, s.q_rows - i0,
                        (int)c.d, acc, factor, q_tile);
}

/* ---- dk and dv ------------------------------------------------------------------------------------------------- */

template <typename E, int D_QK, int D_V, int M, int COLUMNS, int STAGES, int WARPS, bool SCORE_MODS, bool WITH_K,
          bool WITH_V>
DEVICE void backward_kv(const attention_sm80_call &c)
{
    constexpr int ROWS = 16 * M * WARPS, THREADS = 32 * WARPS, N = COLUMNS / 8;
    const int q_bytes = tile_bytes<E, D_QK>(COLUMNS, c.pitch), dout_bytes = tile_bytes<E, D_V>(COLUMNS, c.pitch);
    char *const k_tile = memory, *const v_tile = k_tile + tile_bytes<E, D_QK>(ROWS, c.pitch),
                *const q_tiles = v_tile + (WITH_K ? tile_bytes<E, D_V>(ROWS, c.pitch) : 0),
                *const dout_tiles = q_tiles + STAGES * q_bytes,
                *const statistics = dout_tiles + STAGES * dout_bytes; /* for each stage: lse and delta of each column */
    const block_coord coord = block_coord_of(c, c.Hkv);
    const sequence s = sequence_at(c, coord.b);
    const int64_t hkv = coord.head;
    const int gqa_group = (int)(c.H / c.Hkv);
    if (c.packed && coord.b == c.B) {
        if (WITH_K)
            clear_rows(c, c.dk, s.k_first_row, s.k_rows, hkv, coord.tile, c.d);
        if (WITH_V)
            clear_rows(c, c.dv, s.k_first_row, s.k_rows, hkv, coord.tile, c.d_v);
        return;
    }
    const int j0 = coord.tile * ROWS;
    if (j0 >= s.k_rows)
        return;
    const span queries = query_span(c, s, j0, j0 + ROWS);
    const int first = queries.first / COLUMNS * COLUMNS;
    const int steps = first < queries.end ? (queries.end - first + COLUMNS - 1) / COLUMNS : 0;
    const float scale = exp_scale_of<E, SCORE_MODS>(c);
    float acc_dk[WITH_K ? M : 1][WITH_K ? D_QK / 8 : 1][4], acc_dv[WITH_V ? M : 1][WITH_V ? D_V / 8 : 1][4];
    clear_accumulators(acc_dk);
    clear_accumulators(acc_dv);
    const auto load = [&](int h, int i0, int stage) {
        load_tile<E, COLUMNS, D_QK, THREADS>(q_tiles + stage * q_bytes, c.q,
                                             row_offset(c.q, s.b, s.q_first_row + i0, h), s.used_q - i0, (int)c.d,
                                             c.pitch);
        load_tile<E, COLUMNS, D_V, THREADS>(dout_tiles + stage * dout_bytes, c.dout,
                                            row_offset(c.dout, s.b, s.q_first_row + i0, h), s.used_q - i0, (int)c.d_v,
                                            c.pitch);
        if (threadIdx.x < COLUMNS) {
            const bool in_range = i0 + (int)threadIdx.x < s.used_q;
            const int64_t number = in_range ? statistic_row(c, s, h) + i0 + threadIdx.x : 0;
            const uint32_t to = cot_shared_address(statistics + stage * (8 * COLUMNS) + 4 * threadIdx.x);
            cot_cp_async_zfill<4>(in_range, to, c.row_lse + number);
            cot_cp_async_zfill<4>(in_range, to + 4 * COLUMNS, c.row_delta + number);
        }
    };
    int h = (int)hkv * gqa_group, i0 = first, stage = 0;
    if (steps > 0) {
        load_tile<E, ROWS, D_QK, THREADS>(k_tile, c.k, row_offset(c.k, s.b, s.k_first_row + j0, hkv), s.used_k - j0,
                                          (int)c.d, c.pitch);
        if (WITH_K)
            load_tile<E, ROWS, D_V, THREADS>(v_tile, c.v, row_offset(c.v, s.b, s.k_first_row + j0, hkv), s.used_k - j0,
                                             (int)c.d_v, c.pitch);
        load(h, i0, 0);
    }
    score_mods mods = SCORE_MODS && steps > 0 ? score_mods_of(c, s, h) : score_mods{};
#pragma unroll 1
    for (int step = 0; step < steps * gqa_group; step++) {
        const score_tile t = {i0, j0};
        const char *const q_tile = q_tiles + stage * q_bytes, *const dout_tile = dout_tiles + stage * dout_bytes;
        const float *const lse = (const float *)(statistics + stage * (8 * COLUMNS)), *const delta = lse + COLUMNS;
        float x[M][N][4], cap_slopes[SCORE_MODS && WITH_K ? M : 1][SCORE_MODS && WITH_K ? N : 1][4];
        wait_for_copies();
        __syncthreads();
        const bool head_ends = i0 + COLUMNS >= queries.end; /* the next tile belongs to the next head */
        const int next_h = h + head_ends, next_i0 = head_ends ? first : i0 + COLUMNS;
        if (STAGES == 2 && step + 1 < steps * gqa_group)
            load(next_h, next_i0, stage ^ 1);
        warp_gemm_abt<E, D_QK>(x, k_tile, q_tile, (int)c.d, c.pitch);
        if constexpr (SCORE_MODS && WITH_K)
            finish_scores<E, SCORE_MODS, true, true>(c, s, mods, t, all_visible<true>(c, s, t, COLUMNS, ROWS), x,
                                                     cap_slopes);
        else
            finish_scores<E, SCORE_MODS, true, false>(c, s, mods, t, all_visible<true>(c, s, t, COLUMNS, ROWS), x, x);
        uint32_t keep_bits[M];
        if (SCORE_MODS && c.dropped > 0)
            dropout_mask<true, M, N>(c, mods, t, keep_bits);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 of_column = *(const float2 *)(lse + 8 * n + 2 * (reload_lane() % 4));
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[m][n][e] = exp_scaled<E>(x[m][n][e], scale, e % 2 ? of_column.y : of_column.x);
        }
        if constexpr (WITH_K) {
            float dp[M][N][4];
            warp_gemm_abt<E, D_V>(dp, v_tile, dout_tile, (int)c.d_v, c.pitch);
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float2 of_column = *(const float2 *)(delta + 8 * n + 2 * (reload_lane() % 4));
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float y = dp[m][n][e];
                        if (SCORE_MODS && c.dropped > 0)
                            y = keep_bits[m] >> (4 * n + e) & 1 ? c.keep_scale * y : 0.0f;
                        dp[m][n][e] = x[m][n][e] * (y - (e % 2 ? of_column.y : of_column.x));
                        if constexpr (SCORE_MODS)
                            dp[m][n][e] *= cap_slopes[m][n][e];
                    }
            }
            warp_gemm_rs<E, D_QK>(acc_dk, dp, q_tile, (int)c.d, c.pitch);
        }
        if constexpr (WITH_V) {
            if (SCORE_MODS && c.dropped > 0) {
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (!(keep_bits[m] >> (4 * n + e) & 1))
                                x[m][n][e] = 0.0f;
            }
            warp_gemm_rs<E, D_V>(acc_dv, x, dout_tile, (int)c.d_v, c.pitch);
        }
        if (STAGES == 2) {
            stage ^= 1;
        } else if (step + 1 < steps * gqa_group) {
            __syncthreads();
            load(next_h, next_i0, 0);
        }
        if (SCORE_MODS && head_ends && step + 1 < steps * gqa_group)
            mods = score_mods_of(c, s, next_h);
        h = next_h;
        i0 = next_i0;
    }
    float factor[M][2];
    if constexpr (WITH_K) {
#pragma unroll
        for (int m = 0; m < M; m++)
            factor[m][0] = factor[m][1] = c.scale;
        if (is_present(c.dk))
            store_rows<E, D_QK>(c.dk, row_offset(c.dk, s.b, s.k_first_row + j0, hkv), c.accumulate, s.used_k - j0,
                                s.k_rows - j0, (int)c.d, acc_dk, factor, k_tile);
    }
    if constexpr (WITH_V) {
#pragma unroll
        for (int m = 0; m < M; m++)
            factor[m][0] = factor[m][1] = SCORE_MODS && c.dropped > 0 ? c.keep_scale : 1.0f;
        if (is_present(c.dv))
            store_rows<E, WITH_K ? D_V : D_QK>(c.dv, row_offset(c.dv, s.b, s.k_first_row + j0, hkv), c.accumulate,
                                               s.used_k - j0, s.k_rows - j0, (int)c.d_v, acc_dv, factor,
                                               WITH_K ? v_tile : k_tile);
    }
}

#endif
