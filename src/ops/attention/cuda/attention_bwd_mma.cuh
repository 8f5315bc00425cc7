/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_mma.cuh: the backward on the instructions of compute capability 8.0, one source for 16-bit products on
 * tensor cores (attention_bwd_mma.cu) and for float32 (attention_f32.cu).
 *
 * Two passes, each owning what it sums, so that no order of blocks can show and nothing but lse and D is stored between:
 *
 *   dq        a block takes queries of a head and walks over keys:      S = Q K^T   dP = dO V^T   dQ += dS K
 *   dk, dv    a block takes keys of a key-value head and walks over     S^T = K Q^T   dP^T = V dO^T
 *             the group's heads and their queries, in this order:       dV += P^T dO   dK += dS^T Q
 *
 * P and dS go from one product to the next in registers. That is seven products instead of five; the other way, dS would go
 * through shared memory and dq through float32 sums in global memory, in order. */
#ifndef COT_ATTENTION_BWD_MMA_CUH
#define COT_ATTENTION_BWD_MMA_CUH

#include "attention_mma.cuh"

/* ---- dq ------------------------------------------------------------------------------------------------------ */

template <typename E, int DK, int DV, int M, int COLUMNS, int STAGES, int WARPS, bool ALL>
DEVICE void backward_q(const attention_mma_call &c)
{
    constexpr int ROWS = 16 * M * WARPS, THREADS = 32 * WARPS, N = COLUMNS / 8;
    const int k_bytes = tile_bytes<E, DK>(COLUMNS, c.pitch), v_bytes = tile_bytes<E, DV>(COLUMNS, c.pitch);
    char *const q_tile = memory, *const dout_tile = q_tile + tile_bytes<E, DK>(ROWS, c.pitch),
                *const k_tiles = dout_tile + tile_bytes<E, DV>(ROWS, c.pitch),
                *const v_tiles = k_tiles + STAGES * k_bytes;
    const place at = place_of(c, c.H);
    const sequence s = sequence_at(c, at.b);
    const int64_t h = at.head, hkv = h / (c.H / c.Hkv);
    if (c.packed && at.b == c.B) {
        clear_rows(c, c.grad_q, s.q_row, s.q_rows, h, at.tile, c.d);
        return;
    }
    const int i0 = (int)(c.tiles - 1 - at.tile) * ROWS;
    if (i0 >= s.q_rows)
        return;
    const span keys = keys_of(c, s, i0, i0 + ROWS);
    const int row = lane_row<M>(), first = keys.first / COLUMNS * COLUMNS;
    const additions a = ALL ? additions_of(c, s, h) : additions{};
    const float scale = scale_of<E, ALL>(c);
    float sums[M][DK / 8][4], lse[M][2], delta[M][2];
    clear(sums);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = i0 + row + 16 * m + 8 * half;
            lse[m][half] = INFINITE, delta[m][half] = 0.0f;
            if (i < s.Tq) {
                lse[m][half] = c.row_lse[number_of_row(c, s, h) + i];
                delta[m][half] = c.row_delta[number_of_row(c, s, h) + i];
            }
        }
    const auto load = [&](int j0, int stage) {
        load_tile<E, COLUMNS, DK, THREADS>(k_tiles + stage * k_bytes, c.k, row_at(c.k, s.b, s.k_row + j0, hkv),
                                           s.Tk - j0, (int)c.d, c.pitch);
        load_tile<E, COLUMNS, DV, THREADS>(v_tiles + stage * v_bytes, c.v, row_at(c.v, s.b, s.k_row + j0, hkv),
                                           s.Tk - j0, (int)c.dv, c.pitch);
    };
    if (first < keys.end) {
        load_tile<E, ROWS, DK, THREADS>(q_tile, c.q, row_at(c.q, s.b, s.q_row + i0, h), s.Tq - i0, (int)c.d, c.pitch);
        load_tile<E, ROWS, DV, THREADS>(dout_tile, c.dout, row_at(c.dout, s.b, s.q_row + i0, h), s.Tq - i0, (int)c.dv,
                                        c.pitch);
        load(first, 0);
    }
    int stage = 0;
#pragma unroll 1
    for (int j0 = first; j0 < keys.end; j0 += COLUMNS) {
        const score_tile t = {i0, j0};
        const char *const k_tile = k_tiles + stage * k_bytes, *const v_tile = v_tiles + stage * v_bytes;
        float x[M][N][4], dp[M][N][4], caps[ALL ? M : 1][ALL ? N : 1][4];
        wait_for_copies();
        __syncthreads();
        if (STAGES == 2 && j0 + COLUMNS < keys.end)
            load(j0 + COLUMNS, stage ^ 1);
        multiply_rows<E, DK>(x, q_tile, k_tile, (int)c.d, c.pitch);
        if constexpr (ALL)
            finish_scores<E, ALL, false, true>(c, s, a, t, all_visible<false>(c, s, t, ROWS, COLUMNS), x, caps);
        else
            finish_scores<E, ALL, false, false>(c, s, a, t, all_visible<false>(c, s, t, ROWS, COLUMNS), x, x);
        multiply_rows<E, DV>(dp, dout_tile, v_tile, (int)c.dv, c.pitch);
        uint32_t bits[M];
        if (ALL && c.dropped > 0)
            draw<false, M, N>(c, a, t, bits);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float y = dp[m][n][e];
                    if (ALL && c.dropped > 0)
                        y = bits[m] >> (4 * n + e) & 1 ? c.kept * y : 0.0f;
                    x[m][n][e] = power<E>(x[m][n][e], scale, lse[m][e / 2]) * (y - delta[m][e / 2]);
                    if constexpr (ALL)
                        x[m][n][e] *= caps[m][n][e];
                }
        multiply_scores<E, DK>(sums, x, k_tile, (int)c.d, c.pitch);
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
    store_rows<E, DK>(c.grad_q, row_at(c.grad_q, s.b, s.q_row + i0, h), c.accumulate, s.Tq - i0, s.q_rows - i0,
                      (int)c.d, sums, factor, q_tile);
}

/* ---- dk and dv ------------------------------------------------------------------------------------------------- */

template <typename E, int DK, int DV, int M, int COLUMNS, int STAGES, int WARPS, bool ALL, bool WITH_K, bool WITH_V>
DEVICE void backward_kv(const attention_mma_call &c)
{
    constexpr int ROWS = 16 * M * WARPS, THREADS = 32 * WARPS, N = COLUMNS / 8;
    const int q_bytes = tile_bytes<E, DK>(COLUMNS, c.pitch), dout_bytes = tile_bytes<E, DV>(COLUMNS, c.pitch);
    char *const k_tile = memory, *const v_tile = k_tile + tile_bytes<E, DK>(ROWS, c.pitch),
                *const q_tiles = v_tile + (WITH_K ? tile_bytes<E, DV>(ROWS, c.pitch) : 0),
                *const dout_tiles = q_tiles + STAGES * q_bytes,
                *const statistics = dout_tiles + STAGES * dout_bytes; /* a stage: lse and D of each column */
    const place at = place_of(c, c.Hkv);
    const sequence s = sequence_at(c, at.b);
    const int64_t hkv = at.head;
    const int group = (int)(c.H / c.Hkv);
    if (c.packed && at.b == c.B) {
        if (WITH_K)
            clear_rows(c, c.grad_k, s.k_row, s.k_rows, hkv, at.tile, c.d);
        if (WITH_V)
            clear_rows(c, c.grad_v, s.k_row, s.k_rows, hkv, at.tile, c.dv);
        return;
    }
    const int j0 = at.tile * ROWS;
    if (j0 >= s.k_rows)
        return;
    const span queries = queries_of(c, s, j0, j0 + ROWS);
    const int first = queries.first / COLUMNS * COLUMNS;
    const int steps = first < queries.end ? (queries.end - first + COLUMNS - 1) / COLUMNS : 0;
    const float scale = scale_of<E, ALL>(c);
    float sums_k[WITH_K ? M : 1][WITH_K ? DK / 8 : 1][4], sums_v[WITH_V ? M : 1][WITH_V ? DV / 8 : 1][4];
    clear(sums_k);
    clear(sums_v);
    const auto load = [&](int h, int i0, int stage) {
        load_tile<E, COLUMNS, DK, THREADS>(q_tiles + stage * q_bytes, c.q, row_at(c.q, s.b, s.q_row + i0, h), s.Tq - i0,
                                           (int)c.d, c.pitch);
        load_tile<E, COLUMNS, DV, THREADS>(dout_tiles + stage * dout_bytes, c.dout,
                                           row_at(c.dout, s.b, s.q_row + i0, h), s.Tq - i0, (int)c.dv, c.pitch);
        if (threadIdx.x < COLUMNS) {
            const bool there = i0 + (int)threadIdx.x < s.Tq;
            const int64_t number = there ? number_of_row(c, s, h) + i0 + threadIdx.x : 0;
            const uint32_t to = cot_shared_address(statistics + stage * (8 * COLUMNS) + 4 * threadIdx.x);
            cot_copy_async_or_zeros<4>(there, to, c.row_lse + number);
            cot_copy_async_or_zeros<4>(there, to + 4 * COLUMNS, c.row_delta + number);
        }
    };
    int h = (int)hkv * group, i0 = first, stage = 0;
    if (steps > 0) {
        load_tile<E, ROWS, DK, THREADS>(k_tile, c.k, row_at(c.k, s.b, s.k_row + j0, hkv), s.Tk - j0, (int)c.d, c.pitch);
        if (WITH_K)
            load_tile<E, ROWS, DV, THREADS>(v_tile, c.v, row_at(c.v, s.b, s.k_row + j0, hkv), s.Tk - j0, (int)c.dv,
                                            c.pitch);
        load(h, i0, 0);
    }
    additions a = ALL && steps > 0 ? additions_of(c, s, h) : additions{};
#pragma unroll 1
    for (int step = 0; step < steps * group; step++) {
        const score_tile t = {i0, j0};
        const char *const q_tile = q_tiles + stage * q_bytes, *const dout_tile = dout_tiles + stage * dout_bytes;
        const float *const lse = (const float *)(statistics + stage * (8 * COLUMNS)), *const delta = lse + COLUMNS;
        float x[M][N][4], caps[ALL && WITH_K ? M : 1][ALL && WITH_K ? N : 1][4];
        wait_for_copies();
        __syncthreads();
        const bool turn = i0 + COLUMNS >= queries.end; /* the next tile is of the next head */
        const int next_h = h + turn, next_i0 = turn ? first : i0 + COLUMNS;
        if (STAGES == 2 && step + 1 < steps * group)
            load(next_h, next_i0, stage ^ 1);
        multiply_rows<E, DK>(x, k_tile, q_tile, (int)c.d, c.pitch);
        if constexpr (ALL && WITH_K)
            finish_scores<E, ALL, true, true>(c, s, a, t, all_visible<true>(c, s, t, COLUMNS, ROWS), x, caps);
        else
            finish_scores<E, ALL, true, false>(c, s, a, t, all_visible<true>(c, s, t, COLUMNS, ROWS), x, x);
        uint32_t bits[M];
        if (ALL && c.dropped > 0)
            draw<true, M, N>(c, a, t, bits);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 of_column = *(const float2 *)(lse + 8 * n + 2 * (lane_again() % 4));
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[m][n][e] = power<E>(x[m][n][e], scale, e % 2 ? of_column.y : of_column.x);
        }
        if constexpr (WITH_K) {
            float dp[M][N][4];
            multiply_rows<E, DV>(dp, v_tile, dout_tile, (int)c.dv, c.pitch);
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float2 of_column = *(const float2 *)(delta + 8 * n + 2 * (lane_again() % 4));
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float y = dp[m][n][e];
                        if (ALL && c.dropped > 0)
                            y = bits[m] >> (4 * n + e) & 1 ? c.kept * y : 0.0f;
                        dp[m][n][e] = x[m][n][e] * (y - (e % 2 ? of_column.y : of_column.x));
                        if constexpr (ALL)
                            dp[m][n][e] *= caps[m][n][e];
                    }
            }
            multiply_scores<E, DK>(sums_k, dp, q_tile, (int)c.d, c.pitch);
        }
        if constexpr (WITH_V) {
            if (ALL && c.dropped > 0) {
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (!(bits[m] >> (4 * n + e) & 1))
                                x[m][n][e] = 0.0f;
            }
            multiply_scores<E, DV>(sums_v, x, dout_tile, (int)c.dv, c.pitch);
        }
        if (STAGES == 2) {
            stage ^= 1;
        } else if (step + 1 < steps * group) {
            __syncthreads();
            load(next_h, next_i0, 0);
        }
        if (ALL && turn && step + 1 < steps * group)
            a = additions_of(c, s, next_h);
        h = next_h;
        i0 = next_i0;
    }
    float factor[M][2];
    if constexpr (WITH_K) {
#pragma unroll
        for (int m = 0; m < M; m++)
            factor[m][0] = factor[m][1] = c.scale;
        if (given(c.grad_k))
            store_rows<E, DK>(c.grad_k, row_at(c.grad_k, s.b, s.k_row + j0, hkv), c.accumulate, s.Tk - j0,
                              s.k_rows - j0, (int)c.d, sums_k, factor, k_tile);
    }
    if constexpr (WITH_V) {
#pragma unroll
        for (int m = 0; m < M; m++)
            factor[m][0] = factor[m][1] = ALL && c.dropped > 0 ? c.kept : 1.0f;
        if (given(c.grad_v))
            store_rows<E, WITH_K ? DV : DK>(c.grad_v, row_at(c.grad_v, s.b, s.k_row + j0, hkv), c.accumulate, s.Tk - j0,
                                            s.k_rows - j0, (int)c.dv, sums_v, factor, WITH_K ? v_tile : k_tile);
    }
}

#endif
