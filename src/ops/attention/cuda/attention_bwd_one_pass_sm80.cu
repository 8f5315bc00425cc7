/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_one_pass_sm80.cu: dq, dk and dv in one pass, for compute capability 8.0 and later: five products.
 * Thread blocks add to dq in any order. Without dq_accum, in the deterministic mode, it computes only dk and dv: four
 * products.
 *
 * A thread block takes keys of a key-value head and loops over the group's heads, and over the tiles of queries of
 * each:
 *
 *   S^T = K Q^T   dP^T = V dO^T   dV += P^T dO   dK += dS^T Q   dQ = dS K, which is added to float32 sums in memory
 *
 * A warp computes the scores of 32 keys and of a part of the tile's queries. It accumulates 64 columns of dK and dV for
 * its 32 keys. QUERY_SPLITS warps share the same keys. If there are several, they exchange P and dS through shared
 * memory, in 16 bits. Nothing is rounded twice, because dS is computed from P before P is rounded. */
#include "attention_sm80.cuh"

/* Columns of a tile of P or dS in shared memory: a row is a key, with 64 queries. */
enum { SCORE_COLUMNS = 64 };

/* Stores the warp's scores. They begin at row `row` and unit `unit` (8 queries) of the tile. */
template <typename E, int M, int N>
DEVICE void store_scores(uint32_t tile, int row, int unit, const float (&x)[M][N][4])
{
    const int lane = reload_lane();
    const uint32_t to = tile + (row + lane / 4) * (2 * SCORE_COLUMNS) + 4 * (lane % 4);
#pragma unroll
    for (int n = 0; n < N; n++) {
        const uint32_t address = to + ((unit + n ^ lane / 4) << 4);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(address + (16 * m + 8 * half) * (2 * SCORE_COLUMNS)),
                             "r"(cot_pack_pair<E>(x[m][n][2 * half], x[m][n][2 * half + 1]))
                             : "memory");
    }
}

/* c += A B over K rows of tile b. B begins at column `column`. A is 16 M rows of a tile of scores, which begin at
 * `row`. If TRANSPOSED, A is 16 M of its columns. */
template <typename E, int HEAD_DIM, int K, bool TRANSPOSED, int M, int N>
DEVICE void warp_gemm_ss(float (&c)[M][N][4], uint32_t a, int row, const char *b, int column)
{
    const int lane = reload_lane();
    const int a_row = TRANSPOSED ? lane % 8 + lane / 16 * 8 : row + lane % 16;
    const int a_unit = TRANSPOSED ? lane / 8 % 2 + row / 8 : lane / 16;
    const uint32_t x = a + a_row * (2 * SCORE_COLUMNS), a_unit_offset = (a_unit ^ lane % 8) * 16;
    const uint32_t y = cot_shared_address(b) + lane % 16 * (2 * HEAD_DIM) + column / 64 * 128;
    const uint32_t b_unit_offset = (column % 64 / 8 + lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
        uint32_t a_fragment[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (TRANSPOSED)
                cot_ldmatrix_x4_trans(a_fragment[m], x + k * (32 * SCORE_COLUMNS) + (a_unit_offset ^ 32 * m));
            else
                cot_ldmatrix_x4(a_fragment[m], x + m * (32 * SCORE_COLUMNS) + (a_unit_offset ^ 32 * k));
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b_fragment[4];
            cot_ldmatrix_x4_trans(b_fragment, y + k * (32 * HEAD_DIM) + n / 8 * 128 + (b_unit_offset ^ n % 8 * 16));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma<E>(c[m][n], a_fragment[m], b_fragment[0], b_fragment[1]);
                mma<E>(c[m][n + 1], a_fragment[m], b_fragment[2], b_fragment[3]);
            }
        }
    }
}

/* KEYS: keys of a thread block; QUERIES: queries of a tile. UNSPLIT: one warp has all queries of its keys. It keeps P
 * and dS in registers for dV and dK. dQ is then computed one step late, from the other half of the dS tile, so that a
 * step needs one barrier. */
template <typename E, int HEAD_DIM, int KEYS, int QUERIES, int WARPS>
DEVICE void backward_one_pass(const attention_sm80_call &c)
{
    constexpr int THREADS = 32 * WARPS, QUERY_SPLITS = 32 * WARPS / KEYS, WARP_QUERIES = QUERIES / QUERY_SPLITS,
                  N = WARP_QUERIES / 8;
    constexpr bool UNSPLIT = QUERY_SPLITS == 1;
    constexpr int DKV_COLUMNS = HEAD_DIM / QUERY_SPLITS, DQ_ROWS = QUERIES / 2,
                  DQ_COLUMNS = 2 * HEAD_DIM / WARPS; /* of a warp: columns of dK and dV; rows and columns of dQ */
    static_assert(DKV_COLUMNS == 64 && QUERIES == (UNSPLIT ? 32 : 64), "as tiles are divided");
    constexpr int k_bytes = 2 * KEYS * HEAD_DIM, q_bytes = 2 * QUERIES * HEAD_DIM,
                  score_bytes = 2 * KEYS * SCORE_COLUMNS;
    const int stages = UNSPLIT ? 2 : c.stages;
    char *const k_tile = memory, *const v_tile = k_tile + k_bytes, *const q_tiles = v_tile + k_bytes,
                *const dout_tiles = q_tiles + stages * q_bytes, *const ds_tile = dout_tiles + stages * q_bytes,
                *const p_tile = ds_tile + score_bytes,
                *const statistics =
                    p_tile + (UNSPLIT ? 0 : score_bytes); /* for each stage: lse and delta of each query */
    const block_coord coord = block_coord_of(c, c.Hkv);
    const sequence s = sequence_at(c, coord.b);
    const int64_t hkv = coord.head;
    const int gqa_group = (int)(c.H / c.Hkv);
    if (c.packed && coord.b == c.B) {
        clear_rows(c, c.dk, s.k_first_row, s.k_rows, hkv, coord.tile, c.d);
        clear_rows(c, c.dv, s.k_first_row, s.k_rows, hkv, coord.tile, c.d_v);
        return;
    }
    const int j0 = coord.tile * KEYS;
    if (j0 >= s.k_rows)
        return;
    const span queries = query_span(c, s, j0, j0 + KEYS);
    const int first = queries.first / QUERIES * QUERIES;
    const int steps = first < queries.end ? (queries.end - first + QUERIES - 1) / QUERIES : 0;
    const auto warp_key = [] { return reload_thread() / 32 / QUERY_SPLITS * 32; };
    const auto query_split = [] { return reload_thread() / 32 % QUERY_SPLITS; };
    float acc_dk[2][DKV_COLUMNS / 8][4], acc_dv[2][DKV_COLUMNS / 8][4];
    clear_accumulators(acc_dk);
    clear_accumulators(acc_dv);
    /* The loop reads these from shared memory, because there are not enough registers. */
    struct stored_work {
        int b, q_first_row, used_q, used_k, diagonal, first, end;
    };
    static_assert(sizeof(stored_work) <= ATTENTION_WORK_BYTES, "stored_work must fit");
    volatile stored_work *const stored = (volatile stored_work *)(statistics + 2 * 8 * QUERIES);
    if (threadIdx.x == 0) {
        stored->b = s.b, stored->q_first_row = s.q_first_row, stored->used_q = s.used_q, stored->used_k = s.used_k,
        stored->diagonal = s.diagonal;
        stored->first = first, stored->end = queries.end;
    }
    const auto stored_sequence = [&] {
        return sequence{stored->b, stored->q_first_row, 0, 0, 0, stored->used_q, stored->used_k, stored->diagonal};
    };
    const auto load = [&](const sequence &s, int h, int i0, int stage) {
        load_tile<E, QUERIES, HEAD_DIM, THREADS>(
            q_tiles + stage * q_bytes, c.q, row_offset(c.q, s.b, s.q_first_row + i0, h), s.used_q - i0, (int)c.d, 0);
        load_tile<E, QUERIES, HEAD_DIM, THREADS>(dout_tiles + stage * q_bytes, c.dout,
                                                 row_offset(c.dout, s.b, s.q_first_row + i0, h), s.used_q - i0,
                                                 (int)c.d_v, 0);
        if (threadIdx.x < QUERIES) {
            const bool in_range = i0 + (int)threadIdx.x < s.used_q;
            const int64_t number = in_range ? statistic_row(c, s, h) + i0 + threadIdx.x : 0;
            const uint32_t to = cot_shared_address(statistics + stage * (8 * QUERIES) + 4 * threadIdx.x);
            cot_cp_async_zfill<4>(in_range, to, c.row_lse + number);
            cot_cp_async_zfill<4>(in_range, to + 4 * QUERIES, c.row_delta + number);
        }
    };
    /* Adds dQ = dS K to memory, from half `stage` of the dS tile if UNSPLIT, else from all of it (stage 0). */
    const auto add_dq = [&](int h, int i0, int stage) {
        const sequence s = stored_sequence();
        const int warp = reload_thread() / 32;
        const int row = warp / (WARPS / 2) * DQ_ROWS, column = warp % (WARPS / 2) * DQ_COLUMNS;
        float dq[DQ_ROWS / 16][DQ_COLUMNS / 8][4];
        clear_accumulators(dq);
        warp_gemm_ss<E, HEAD_DIM, KEYS, true>(dq, cot_shared_address(ds_tile), stage * QUERIES + row, k_tile, column);
        float *const to = c.dq_accum + (first_accum_row(c, s, h) + i0 + row) * HEAD_DIM + column * 16 + reload_lane();
#pragma unroll
        for (int m = 0; m < DQ_ROWS / 16; m++)
            if (i0 + row + 16 * m < s.used_q)
#pragma unroll
                for (int n = 0; n < DQ_COLUMNS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + m * (16 * HEAD_DIM) + n * 128 + e * 32),
                                     "f"(dq[m][n][e])
                                     : "memory");
    };
    const auto add_previous_dq = [&](int h, int i0, int stage) {
        if (i0 > first)
            add_dq(h, i0 - QUERIES, stage);
        else
            add_dq(h - 1, stored->first + (steps - 1) * QUERIES, stage);
    };
    int h = (int)hkv * gqa_group, i0 = first, stage = 0;
    if (steps > 0) {
        load_tile<E, KEYS, HEAD_DIM, THREADS>(k_tile, c.k, row_offset(c.k, s.b, s.k_first_row + j0, hkv), s.used_k - j0,
                                              (int)c.d, 0);
        load_tile<E, KEYS, HEAD_DIM, THREADS>(v_tile, c.v, row_offset(c.v, s.b, s.k_first_row + j0, hkv), s.used_k - j0,
                                              (int)c.d_v, 0);
        load(s, h, i0, 0);
    }
#pragma unroll 1
    for (int step = 0; step < steps * gqa_group; step++) {
        const char *const q_tile = q_tiles + stage * q_bytes, *const dout_tile = dout_tiles + stage * q_bytes;
        const float *const lse = (const float *)(statistics + stage * (8 * QUERIES)) + query_split() * WARP_QUERIES,
                           *const delta = lse + QUERIES;
        float x[2][N][4], dp[2][N][4];
        wait_for_copies();
        __syncthreads();
        const bool head_ends = i0 + QUERIES >= stored->end; /* the next tile belongs to the next head */
        const int next_h = h + head_ends, next_i0 = head_ends ? stored->first : i0 + QUERIES;
        if (stages == 2 && step + 1 < steps * gqa_group)
            load(stored_sequence(), next_h, next_i0, stage ^ 1);
        if (UNSPLIT && step > 0 && c.dq_accum != nullptr)
            add_previous_dq(h, i0, stage ^ 1);
        warp_gemm_abt<E, HEAD_DIM>(x, k_tile, q_tile + query_split() * (WARP_QUERIES * 2 * HEAD_DIM), (int)c.d, 0,
                                   warp_key());
        const sequence s = stored_sequence();
        const score_tile t = {i0 + query_split() * WARP_QUERIES, j0 + warp_key()};
        /* apply_mask adds warp_row<2>() to rows */
        finish_scores<E, false, true, false>(c, s, {}, {t.i, t.j - warp_row<2>()},
                                             all_visible<true>(c, s, t, WARP_QUERIES, 32), x, x);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 of_column = *(const float2 *)(lse + 8 * n + 2 * (reload_lane() % 4));
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[m][n][e] = exp_scaled<E>(x[m][n][e], c.score_scale, e % 2 ? of_column.y : of_column.x);
        }
        if (!UNSPLIT)
            store_scores<E>(cot_shared_address(p_tile), warp_key(), query_split() * N, x);
        warp_gemm_abt<E, HEAD_DIM>(dp, v_tile, dout_tile + query_split() * (WARP_QUERIES * 2 * HEAD_DIM), (int)c.d_v, 0,
                                   warp_key());
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 of_column = *(const float2 *)(delta + 8 * n + 2 * (reload_lane() % 4));
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    dp[m][n][e] = x[m][n][e] * (dp[m][n][e] - (e % 2 ? of_column.y : of_column.x));
        }
        store_scores<E>(cot_shared_address(ds_tile), warp_key(), (UNSPLIT ? stage : query_split()) * N, dp);
        if constexpr (UNSPLIT) {
            warp_gemm_rs<E, HEAD_DIM>(acc_dv, x, dout_tile, (int)c.d_v, 0);
            warp_gemm_rs<E, HEAD_DIM>(acc_dk, dp, q_tile, (int)c.d, 0);
        } else {
            const uint32_t p = cot_shared_address(p_tile), ds = cot_shared_address(ds_tile);
            __syncthreads();
            warp_gemm_ss<E, HEAD_DIM, QUERIES, false>(acc_dv, p, warp_key(), dout_tile, query_split() * DKV_COLUMNS);
            warp_gemm_ss<E, HEAD_DIM, QUERIES, false>(acc_dk, ds, warp_key(), q_tile, query_split() * DKV_COLUMNS);
            if (stages == 1) {
                __syncthreads();
                if (step + 1 < steps * gqa_group)
                    load(stored_sequence(), next_h, next_i0, 0);
            }
            if (c.dq_accum != nullptr)
                add_dq(h, i0, 0);
        }
        h = next_h;
        i0 = next_i0;
        stage ^= stages - 1;
    }
    __syncthreads(); /* all warps have stored the last dS and have read k_tile and v_tile */
    if (UNSPLIT && steps > 0 && c.dq_accum != nullptr) {
        add_previous_dq(h, i0, stage ^ 1);
        __syncthreads();
    }
    float factor[2][2] = {{c.scale, c.scale}, {c.scale, c.scale}};
    if (is_present(c.dk))
        store_rows<E, HEAD_DIM>(c.dk, row_offset(c.dk, s.b, s.k_first_row + j0, hkv), c.accumulate, s.used_k - j0,
                                s.k_rows - j0, (int)c.d, acc_dk, factor, k_tile, warp_key(),
                                query_split() * DKV_COLUMNS);
    factor[0][0] = factor[0][1] = factor[1][0] = factor[1][1] = 1.0f;
    if (is_present(c.dv))
        store_rows<E, HEAD_DIM>(c.dv, row_offset(c.dv, s.b, s.k_first_row + j0, hkv), c.accumulate, s.used_k - j0,
                                s.k_rows - j0, (int)c.d_v, acc_dv, factor, v_tile, warp_key(),
                                query_split() * DKV_COLUMNS);
}

#define ONE_PASS(dtype, element, name, d, keys, queries, warps)                                     \
    extern "C" __global__ void __launch_bounds__(32 * (warps))                                      \
        attention_bwd_##dtype##_sm80_one_pass_##name(const __grid_constant__ attention_sm80_call c) \
    {                                                                                               \
        backward_one_pass<element, d, keys, queries, warps>(c);                                     \
    }
#define BOTH(...) ONE_PASS(bf16, __nv_bfloat16, __VA_ARGS__) ONE_PASS(f16, __half, __VA_ARGS__)

ATTENTION_ONE_PASS_TILES(BOTH)
