/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_once_mma.cu: dq, dk and dv in one pass, for compute capability 8.0 and later: five products, and dq in any
 * order.
 *
 * A block takes keys of a key-value head and walks over the group's heads and their queries:
 *
 *   S^T = K Q^T   dP^T = V dO^T   dV += P^T dO   dK += dS^T Q   dQ = dS K, which is added to float32 sums in memory
 *
 * A warp makes the scores of 32 keys and of a share of the tile's queries, and of dK and dV it sums 64 columns of its 32
 * keys: where several warps share keys (`SHARES`), they give each other their P and dS through shared memory, in 16 bits.
 * Nothing is rounded twice: dS takes P before it is rounded. */
#include "attention_mma.cuh"

/* A tile of P or dS in shared memory: a key a row, 64 queries. */
enum { SCORE_COLUMNS = 64 };

/* The warp's scores, from this row and this unit of eight queries on. */
template <typename E, int M, int N>
DEVICE void store_scores(uint32_t tile, int row, int unit, const float (&x)[M][N][4])
{
    const int lane = lane_again();
    const uint32_t to = tile + (row + lane / 4) * (2 * SCORE_COLUMNS) + 4 * (lane % 4);
#pragma unroll
    for (int n = 0; n < N; n++) {
        const uint32_t at = to + ((unit + n ^ lane / 4) << 4);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + (16 * m + 8 * half) * (2 * SCORE_COLUMNS)),
                             "r"(cot_pack_pair<E>(x[m][n][2 * half], x[m][n][2 * half + 1]))
                             : "memory");
    }
}

/* c += A B over K rows of tile b, its columns from `column` on. A: rows of a tile of scores from `row` on or, TRANSPOSED,
 * its columns. */
template <typename E, int D, int K, bool TRANSPOSED, int M, int N>
DEVICE void multiply_stored(float (&c)[M][N][4], uint32_t a, int row, const char *b, int column)
{
    const int lane = lane_again();
    const int a_row = TRANSPOSED ? lane % 8 + lane / 16 * 8 : row + lane % 16;
    const int a_unit = TRANSPOSED ? lane / 8 % 2 + row / 8 : lane / 16;
    const uint32_t x = a + a_row * (2 * SCORE_COLUMNS), x_unit = (a_unit ^ lane % 8) * 16;
    const uint32_t y = cot_shared_address(b) + lane % 16 * (2 * D) + column / 64 * 128;
    const uint32_t y_unit = (column % 64 / 8 + lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
        uint32_t rows[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (TRANSPOSED)
                cot_ldmatrix_x4_trans(rows[m], x + k * (32 * SCORE_COLUMNS) + (x_unit ^ 32 * m));
            else
                cot_ldmatrix_x4(rows[m], x + m * (32 * SCORE_COLUMNS) + (x_unit ^ 32 * k));
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t columns[4];
            cot_ldmatrix_x4_trans(columns, y + k * (32 * D) + n / 8 * 128 + (y_unit ^ n % 8 * 16));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma<E>(c[m][n], rows[m], columns[0], columns[1]);
                mma<E>(c[m][n + 1], rows[m], columns[2], columns[3]);
            }
        }
    }
}

/* KEYS of a block, QUERIES of a tile. A warp that has its keys alone keeps P and dS in registers for dV and dK; dQ is then
 * made a step late, from the other half of the tile of dS, so that a step has one barrier. */
template <typename E, int D, int KEYS, int QUERIES, int WARPS> DEVICE void backward_once(const attention_mma_call &c)
{
    constexpr int THREADS = 32 * WARPS, SHARES = 32 * WARPS / KEYS, COLUMNS = QUERIES / SHARES, N = COLUMNS / 8;
    constexpr bool ALONE = SHARES == 1;
    constexpr int OWN = D / SHARES, Q_ROWS = QUERIES / 2,
                  Q_COLUMNS = 2 * D / WARPS; /* of dK and dV, and of dQ, a warp's */
    static_assert(OWN == 64 && QUERIES == (ALONE ? 32 : 64), "as tiles are divided");
    constexpr int k_bytes = 2 * KEYS * D, q_bytes = 2 * QUERIES * D, score_bytes = 2 * KEYS * SCORE_COLUMNS;
    const int stages = ALONE ? 2 : c.stages;
    char *const k_tile = memory, *const v_tile = k_tile + k_bytes, *const q_tiles = v_tile + k_bytes,
                *const dout_tiles = q_tiles + stages * q_bytes, *const ds_tile = dout_tiles + stages * q_bytes,
                *const p_tile = ds_tile + score_bytes,
                *const statistics = p_tile + (ALONE ? 0 : score_bytes); /* a stage: lse and D of each query */
    const place at = place_of(c, c.Hkv);
    const sequence s = sequence_at(c, at.b);
    const int64_t hkv = at.head;
    const int group = (int)(c.H / c.Hkv);
    if (c.packed && at.b == c.B) {
        clear_rows(c, c.grad_k, s.k_row, s.k_rows, hkv, at.tile, c.d);
        clear_rows(c, c.grad_v, s.k_row, s.k_rows, hkv, at.tile, c.dv);
        return;
    }
    const int j0 = at.tile * KEYS;
    if (j0 >= s.k_rows)
        return;
    const span queries = queries_of(c, s, j0, j0 + KEYS);
    const int first = queries.first / QUERIES * QUERIES;
    const int steps = first < queries.end ? (queries.end - first + QUERIES - 1) / QUERIES : 0;
    const auto own_keys = [] { return thread_again() / 32 / SHARES * 32; };
    const auto share = [] { return thread_again() / 32 % SHARES; };
    float sums_k[2][OWN / 8][4], sums_v[2][OWN / 8][4];
    clear(sums_k);
    clear(sums_v);
    /* The loop finds these in shared memory: it has no registers for them. */
    struct walk {
        int b, q_row, Tq, Tk, diagonal, first, end;
    };
    static_assert(sizeof(walk) <= ATTENTION_WALK_BYTES, "it has room");
    volatile walk *const kept = (volatile walk *)(statistics + 2 * 8 * QUERIES);
    if (threadIdx.x == 0) {
        kept->b = s.b, kept->q_row = s.q_row, kept->Tq = s.Tq, kept->Tk = s.Tk, kept->diagonal = s.diagonal;
        kept->first = first, kept->end = queries.end;
    }
    const auto again = [&] { return sequence{kept->b, kept->q_row, 0, 0, 0, kept->Tq, kept->Tk, kept->diagonal}; };
    const auto load = [&](const sequence &s, int h, int i0, int stage) {
        load_tile<E, QUERIES, D, THREADS>(q_tiles + stage * q_bytes, c.q, row_at(c.q, s.b, s.q_row + i0, h), s.Tq - i0,
                                          (int)c.d, 0);
        load_tile<E, QUERIES, D, THREADS>(dout_tiles + stage * q_bytes, c.dout, row_at(c.dout, s.b, s.q_row + i0, h),
                                          s.Tq - i0, (int)c.dv, 0);
        if (threadIdx.x < QUERIES) {
            const bool there = i0 + (int)threadIdx.x < s.Tq;
            const int64_t number = there ? number_of_row(c, s, h) + i0 + threadIdx.x : 0;
            const uint32_t to = cot_shared_address(statistics + stage * (8 * QUERIES) + 4 * threadIdx.x);
            cot_copy_async_or_zeros<4>(there, to, c.row_lse + number);
            cot_copy_async_or_zeros<4>(there, to + 4 * QUERIES, c.row_delta + number);
        }
    };
    /* dQ of the dS in this half of its tile, or in all of it. */
    const auto add_dq = [&](int h, int i0, int stage) {
        const sequence s = again();
        const int warp = thread_again() / 32;
        const int row = warp / (WARPS / 2) * Q_ROWS, column = warp % (WARPS / 2) * Q_COLUMNS;
        float dq[Q_ROWS / 16][Q_COLUMNS / 8][4];
        clear(dq);
        multiply_stored<E, D, KEYS, true>(dq, cot_shared_address(ds_tile), stage * QUERIES + row, k_tile, column);
        float *const to = c.dq_sums + (first_sum(c, s, h) + i0 + row) * D + column * 16 + lane_again();
#pragma unroll
        for (int m = 0; m < Q_ROWS / 16; m++)
            if (i0 + row + 16 * m < s.Tq)
#pragma unroll
                for (int n = 0; n < Q_COLUMNS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + m * (16 * D) + n * 128 + e * 32),
                                     "f"(dq[m][n][e])
                                     : "memory");
    };
    const auto add_last_dq = [&](int h, int i0, int stage) {
        if (i0 > first)
            add_dq(h, i0 - QUERIES, stage);
        else
            add_dq(h - 1, kept->first + (steps - 1) * QUERIES, stage);
    };
    int h = (int)hkv * group, i0 = first, stage = 0;
    if (steps > 0) {
        load_tile<E, KEYS, D, THREADS>(k_tile, c.k, row_at(c.k, s.b, s.k_row + j0, hkv), s.Tk - j0, (int)c.d, 0);
        load_tile<E, KEYS, D, THREADS>(v_tile, c.v, row_at(c.v, s.b, s.k_row + j0, hkv), s.Tk - j0, (int)c.dv, 0);
        load(s, h, i0, 0);
    }
#pragma unroll 1
    for (int step = 0; step < steps * group; step++) {
        const char *const q_tile = q_tiles + stage * q_bytes, *const dout_tile = dout_tiles + stage * q_bytes;
        const float *const lse = (const float *)(statistics + stage * (8 * QUERIES)) + share() * COLUMNS, *const delta =
                                                                                                              lse +
                                                                                                              QUERIES;
        float x[2][N][4], dp[2][N][4];
        wait_for_copies();
        __syncthreads();
        const bool turn = i0 + QUERIES >= kept->end; /* the next tile is of the next head */
        const int next_h = h + turn, next_i0 = turn ? kept->first : i0 + QUERIES;
        if (stages == 2 && step + 1 < steps * group)
            load(again(), next_h, next_i0, stage ^ 1);
        if (ALONE && step > 0 && c.dq_sums != nullptr)
            add_last_dq(h, i0, stage ^ 1);
        multiply_rows<E, D>(x, k_tile, q_tile + share() * (COLUMNS * 2 * D), (int)c.d, 0, own_keys());
        const sequence s = again();
        const score_tile t = {i0 + share() * COLUMNS, j0 + own_keys()};
        /* hide() counts rows by the warp's number */
        finish_scores<E, false, true, false>(c, s, {}, {t.i, t.j - warp_row<2>()},
                                             all_visible<true>(c, s, t, COLUMNS, 32), x, x);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 of_column = *(const float2 *)(lse + 8 * n + 2 * (lane_again() % 4));
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[m][n][e] = power<E>(x[m][n][e], c.score_scale, e % 2 ? of_column.y : of_column.x);
        }
        if (!ALONE)
            store_scores<E>(cot_shared_address(p_tile), own_keys(), share() * N, x);
        multiply_rows<E, D>(dp, v_tile, dout_tile + share() * (COLUMNS * 2 * D), (int)c.dv, 0, own_keys());
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 of_column = *(const float2 *)(delta + 8 * n + 2 * (lane_again() % 4));
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    dp[m][n][e] = x[m][n][e] * (dp[m][n][e] - (e % 2 ? of_column.y : of_column.x));
        }
        store_scores<E>(cot_shared_address(ds_tile), own_keys(), (ALONE ? stage : share()) * N, dp);
        if constexpr (ALONE) {
            multiply_scores<E, D>(sums_v, x, dout_tile, (int)c.dv, 0);
            multiply_scores<E, D>(sums_k, dp, q_tile, (int)c.d, 0);
        } else {
            const uint32_t p = cot_shared_address(p_tile), ds = cot_shared_address(ds_tile);
            __syncthreads();
            multiply_stored<E, D, QUERIES, false>(sums_v, p, own_keys(), dout_tile, share() * OWN);
            multiply_stored<E, D, QUERIES, false>(sums_k, ds, own_keys(), q_tile, share() * OWN);
            if (stages == 1) {
                __syncthreads();
                if (step + 1 < steps * group)
                    load(again(), next_h, next_i0, 0);
            }
            if (c.dq_sums != nullptr)
                add_dq(h, i0, 0);
        }
        h = next_h;
        i0 = next_i0;
        stage ^= stages - 1;
    }
    __syncthreads(); /* the last dS; then k_tile and v_tile are free */
    if (ALONE && steps > 0 && c.dq_sums != nullptr) {
        add_last_dq(h, i0, stage ^ 1);
        __syncthreads();
    }
    float factor[2][2] = {{c.scale, c.scale}, {c.scale, c.scale}};
    if (given(c.grad_k))
        store_rows<E, D>(c.grad_k, row_at(c.grad_k, s.b, s.k_row + j0, hkv), c.accumulate, s.Tk - j0, s.k_rows - j0,
                         (int)c.d, sums_k, factor, k_tile, own_keys(), share() * OWN);
    factor[0][0] = factor[0][1] = factor[1][0] = factor[1][1] = 1.0f;
    if (given(c.grad_v))
        store_rows<E, D>(c.grad_v, row_at(c.grad_v, s.b, s.k_row + j0, hkv), c.accumulate, s.Tk - j0, s.k_rows - j0,
                         (int)c.dv, sums_v, factor, v_tile, own_keys(), share() * OWN);
}

#define ONCE(dtype, element, name, d, keys, queries, warps)                               \
    extern "C" __global__ void __launch_bounds__(32 * (warps))                            \
        attention_once_mma_##dtype##_##name(const __grid_constant__ attention_mma_call c) \
    {                                                                                     \
        backward_once<element, d, keys, queries, warps>(c);                               \
    }
#define BOTH(...) ONCE(bf16, __nv_bfloat16, __VA_ARGS__) ONCE(f16, __half, __VA_ARGS__)

ATTENTION_ONCE_TILES(BOTH)
