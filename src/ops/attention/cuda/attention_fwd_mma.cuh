/* SPDX-License-Identifier: Apache-2.0
 * attention_fwd_mma.cuh: the forward on the instructions of compute capability 8.0, one source for 16-bit products on
 * tensor cores (attention_fwd_mma.cu) and for float32 (attention_f32.cu).
 *
 * A block takes ROWS queries of a head, 16 M a warp, and keeps their q in shared memory and the sums of out in registers.
 * K and V have a tile each. While scores are made, V is on its way; while they go through exp and into out, the next K. */
#ifndef COT_ATTENTION_FWD_MMA_CUH
#define COT_ATTENTION_FWD_MMA_CUH

#include "attention_mma.cuh"

/* Scores become exponentials below the rows' running maximum (in the exponent's base), and so do the sums so far: those of
 * out, and the lane's share of the exponentials' own. */
template <typename E, int M, int N, int D>
DEVICE void soften(float (&x)[M][N][4], float scale, float (&most)[M][2], float (&sum)[M][2], float (&sums)[M][D][4])
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = -INFINITE;
#pragma unroll
            for (int n = 0; n < N; n++)
                top = fmaxf(top, fmaxf(x[m][n][2 * half], x[m][n][2 * half + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            if (!is_f32<E>)
                top *= scale;
            const float before = most[m][half], now = fmaxf(before, top);
            const float base = now == -INFINITE ? 0.0f : now; /* no key yet: no difference is NaN */
            const float shrink = power<E>(before, 1.0f, base);
#pragma unroll
            for (int n = 0; n < D; n++)
                sums[m][n][2 * half] *= shrink, sums[m][n][2 * half + 1] *= shrink;
            most[m][half] = now;
            float rest = 0.0f;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &p = x[m][n][2 * half + e];
                    p = power<E>(p, scale, base);
                    rest += p;
                }
            sum[m][half] = fmaf(sum[m][half], shrink, rest);
        }
}

template <typename E, int DK, int DV, int M, int COLUMNS, int WARPS, bool ALL>
DEVICE void forward(const attention_mma_call &c)
{
    constexpr int ROWS = 16 * M * WARPS, THREADS = 32 * WARPS, N = COLUMNS / 8;
    char *const q_tile = memory, *const k_tile = q_tile + tile_bytes<E, DK>(ROWS, c.pitch),
                *const v_tile = k_tile + tile_bytes<E, DK>(COLUMNS, c.pitch);
    const place at = place_of(c, c.H);
    const sequence s = sequence_at(c, at.b);
    const int64_t h = at.head, hkv = h / (c.H / c.Hkv);
    if (c.packed && at.b == c.B) {
        clear_rows(c, c.out, s.q_row, s.q_rows, h, at.tile, c.dv);
        for (int64_t i = at.tile * (int64_t)THREADS + threadIdx.x; given(c.lse) && i < s.q_rows; i += c.tiles * THREADS)
            ((float *)c.lse.data)[statistic_at(c.lse, 0, h, s.q_row + i)] = -INFINITE;
        return;
    }
    /* Under a causal mask the last tiles see most: they come first. */
    const int i0 = (int)(c.tiles - 1 - at.tile) * ROWS;
    if (i0 >= s.q_rows)
        return;
    const span keys = keys_of(c, s, i0, i0 + ROWS);
    const int first = keys.first / COLUMNS * COLUMNS;
    const additions a = ALL ? additions_of(c, s, h) : additions{};
    const float scale = scale_of<E, ALL>(c);
    float sums[M][DV / 8][4], most[M][2], sum[M][2];
    clear(sums);
#pragma unroll
    for (int m = 0; m < M; m++)
        most[m][0] = most[m][1] = -INFINITE, sum[m][0] = sum[m][1] = 0.0f;
    if (first < keys.end) {
        load_tile<E, ROWS, DK, THREADS>(q_tile, c.q, row_at(c.q, s.b, s.q_row + i0, h), s.Tq - i0, (int)c.d, c.pitch);
        load_tile<E, COLUMNS, DK, THREADS>(k_tile, c.k, row_at(c.k, s.b, s.k_row + first, hkv), s.Tk - first, (int)c.d,
                                           c.pitch);
    }
#pragma unroll 1
    for (int j0 = first; j0 < keys.end; j0 += COLUMNS) {
        const score_tile t = {i0, j0};
        float x[M][N][4];
        wait_for_copies();
        __syncthreads(); /* K is there, and V has been read by all */
        load_tile<E, COLUMNS, DV, THREADS>(v_tile, c.v, row_at(c.v, s.b, s.k_row + j0, hkv), s.Tk - j0, (int)c.dv,
                                           c.pitch);
        multiply_rows<E, DK>(x, q_tile, k_tile, (int)c.d, c.pitch);
        wait_for_copies();
        __syncthreads();
        if (j0 + COLUMNS < keys.end)
            load_tile<E, COLUMNS, DK, THREADS>(k_tile, c.k, row_at(c.k, s.b, s.k_row + j0 + COLUMNS, hkv),
                                               s.Tk - j0 - COLUMNS, (int)c.d, c.pitch);
        finish_scores<E, ALL, false, false>(c, s, a, t, all_visible<false>(c, s, t, ROWS, COLUMNS), x, x);
        soften<E>(x, scale, most, sum, sums);
        if constexpr (ALL) {
            if (c.dropped > 0) {
                uint32_t bits[M];
                draw<false, M, N>(c, a, t, bits);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (!(bits[m] >> (4 * n + e) & 1))
                                x[m][n][e] = 0.0f;
            }
        }
        multiply_scores<E, DV>(sums, x, v_tile, (int)c.dv, c.pitch);
    }
    const int row = lane_row<M>();
    /* The sink is one more key, without a value. */
    const float unit = is_f32<E> ? 1.0f : 1.4426950408889634f,
                sink = given(c.sink) ? load_at(c.sink, h * c.sink.stride[0]) : -INFINITE;
    float factor[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float &all = sum[m][half];
            all += __shfl_xor_sync(0xffffffffu, all, 1);
            all += __shfl_xor_sync(0xffffffffu, all, 2);
            const float top = fmaxf(most[m][half], unit * sink), base = top == -INFINITE ? 0.0f : top;
            const float less = power<E>(most[m][half], 1.0f, base);
            all = fmaf(all, less, power<E>(unit * sink, 1.0f, base));
            factor[m][half] = all == 0.0f ? 0.0f : less * (ALL && c.dropped > 0 ? c.kept : 1.0f) / all;
            const int i = i0 + row + 16 * m + 8 * half;
            if (lane_again() % 4 == 0 && i < s.q_rows && given(c.lse)) {
                float lse = unit * sink == base ? sink + logf(all) /* that key's score has never been in base 2 */
                            : is_f32<E>         ? base + logf(all)
                                                : 0.6931471805599453f * (base + log2f(all));
                if (all == 0.0f || i >= s.Tq)
                    lse = -INFINITE;
                ((float *)c.lse.data)[statistic_at(c.lse, s.b, h, s.q_row + i)] = lse;
            }
        }
    if (given(c.out))
        store_rows<E, DK>(c.out, row_at(c.out, s.b, s.q_row + i0, h), false, s.Tq - i0, s.q_rows - i0, (int)c.dv, sums,
                          factor, q_tile);
}

#endif
