/* SPDX-License-Identifier: Apache-2.0
 * attention_sm80.cuh: device code that the portable kernels share: sequences, tiles in shared memory, products of a
 * warp, masks, modifiers of scores, and stores.
 *
 * A block owns rows (queries, or keys in the kernels of dk and dv), 16 M for each warp. It loops over tiles of the
 * other side, the columns. Scores are accumulators of m16n8k16: element e of slab m and column tile n in lane l is row
 * 16 m + l/4 + 8 (e/2), column 8 n + 2 (l%4) + e%2. Two adjacent column tiles, rounded, are operand A of the next
 * product.
 *
 * 16-bit tiles are stored row by row. Unit u (16 bytes) of row r is at u ^ (r % 8), so that ldmatrix reads eight rows
 * from different banks. Float32 (attention_f32_sm80.cu) has the same fragments and computes with FMAs, so that one
 * source is compiled for both. Its tiles are rows of `pitch` floats. Its sizes and dtypes are known only at run
 * time. */
#ifndef COT_ATTENTION_SM80_CUH
#define COT_ATTENTION_SM80_CUH

#include "attention_sm80.h"

#include "../../../core/philox.h"
#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/fault.cuh"
#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/ptx.cuh"

#define DEVICE static __device__ __forceinline__
#define INFINITE __int_as_float(0x7f800000)

template <typename E> static constexpr bool is_f32 = false;
template <> constexpr bool is_f32<float> = true;

DEVICE bool is_present(const attention_view &t)
{
    return t.data != nullptr;
}

DEVICE float load_at(const attention_view &t, int64_t element)
{
    return cot_load(t.data, t.dtype, element);
}

DEVICE int64_t load_index(const attention_view &t, int64_t i)
{
    return ((const int32_t *)t.data)[i * t.stride[0]];
}

DEVICE int64_t clamp(int64_t value, int64_t low, int64_t high)
{
    return value < low ? low : value > high ? high : value;
}

/* ---- sequences ------------------------------------------------------------------------------------------- */

/* As attention_sequence in attention_problem.h: rows q_first_row .. q_first_row + q_rows - 1. Rows from used_q on are
 * beyond seqused. */
struct sequence {
    int b, q_first_row, k_first_row, q_rows, k_rows, used_q, used_k, diagonal;
};

/* The row where sequence n begins. Values out of order or out of range are clamped, so that no access leaves the
 * tensor. */
DEVICE int sequence_begin(const attention_sm80_call &c, const attention_view &cu, int64_t n, int64_t rows)
{
    const int64_t row = load_index(cu, n);
    if ((row < 0 || row > rows || (n == 0 && row != 0)) && threadIdx.x == 0)
        cot_report_fault(c.fault, COT_FAULT_CU_SEQLENS, n);
    return (int)clamp(row, 0, rows);
}

DEVICE int sequence_length(const attention_sm80_call &c, const attention_view &cu, int n, int first, int64_t rows,
                           int64_t max_length)
{
    const int64_t rest = sequence_begin(c, cu, n + 1, rows) - first;
    if ((rest < 0 || rest > max_length) && threadIdx.x == 0)
        cot_report_fault(c.fault, COT_FAULT_CU_SEQLENS, n + 1);
    return (int)clamp(rest, 0, max_length);
}

DEVICE int used_length(const attention_sm80_call &c, const attention_view &t, int b, int full)
{
    if (!is_present(t))
        return full;
    const int64_t value = load_index(t, b);
    if ((value < 0 || value > full) && threadIdx.x == 0)
        cot_report_fault(c.fault, COT_FAULT_SEQUSED, b);
    return (int)clamp(value, 0, full);
}

/* Sequence number B of a packed batch stands for the rows after the last sequence. All of its queries and keys
 * are beyond seqused. */
DEVICE sequence sequence_at(const attention_sm80_call &c, int b)
{
    sequence s = {b, 0, 0, (int)c.Tq, (int)c.Tk, 0, 0, 0};
    int full_q = (int)c.q_length, full_k = (int)c.k_length;
    if (c.packed) {
        s.q_first_row = sequence_begin(c, c.cu_q, b, c.rows_q);
        s.k_first_row = sequence_begin(c, c.cu_k, b, c.rows_k);
        if (b == c.B) {
            s.q_rows = (int)(c.rows_q - s.q_first_row);
            s.k_rows = (int)(c.rows_k - s.k_first_row);
            return s;
        }
        full_q = s.q_rows = sequence_length(c, c.cu_q, b, s.q_first_row, c.rows_q, c.Tq);
        full_k = s.k_rows = sequence_length(c, c.cu_k, b, s.k_first_row, c.rows_k, c.Tk);
    }
    const int sequence_q_length = used_length(c, c.seqused_q, b, full_q),
              sequence_k_length = used_length(c, c.seqused_k, b, full_k);
    const int q_begin = (int)c.q_begin, k_begin = (int)c.k_begin;
    s.used_q = min(max(sequence_q_length - q_begin, 0), s.q_rows);
    s.used_k = min(max(sequence_k_length - k_begin, 0), s.k_rows);
    s.diagonal = sequence_k_length - sequence_q_length + q_begin - k_begin;
    return s;
}

/* A block's sequence, head and tile. Blocks of one head follow each other, because they read the same rows. */
struct block_coord {
    int b, head, tile;
};

DEVICE block_coord block_coord_of(const attention_sm80_call &c, int64_t heads)
{
    const unsigned tiles = (unsigned)c.tiles, n = blockIdx.x / tiles;
    return {(int)(n / (unsigned)heads), (int)(n % (unsigned)heads), (int)(blockIdx.x % tiles)};
}

/* Offset of row `row` of head h. */
DEVICE int64_t row_offset(const attention_view &t, int64_t b, int64_t row, int64_t h)
{
    return b * t.stride[0] + row * t.stride[1] + h * t.stride[2];
}

DEVICE int64_t statistic_offset(const attention_view &t, int64_t b, int64_t h, int64_t row)
{
    return b * t.stride[0] + h * t.stride[1] + row * t.stride[2];
}

/* Index of the sequence's first row in row_lse and row_delta. */
DEVICE int64_t statistic_row(const attention_sm80_call &c, const sequence &s, int64_t h)
{
    return h * c.rows_q + (c.packed ? (int64_t)s.q_first_row : s.b * c.Tq);
}

/* Row of dq_accum for the sequence's query 0. */
DEVICE int64_t first_accum_row(const attention_sm80_call &c, const sequence &s, int64_t h)
{
    constexpr int64_t ROWS = ATTENTION_ACCUM_ROWS;
    const int64_t tiles = c.packed ? s.q_first_row / ROWS + s.b : s.b * ((c.Tq + ROWS - 1) / ROWS);
    return h * c.accum_rows + tiles * ROWS;
}

/* The range [first, end) of the other side that a tile of rows attends to. The sums here do not overflow: see
 * attention_sm80_admit.h. */
struct span {
    int first, end;
};

DEVICE span key_span(const attention_sm80_call &c, const sequence &s, int i, int i_end)
{
    if (i >= s.used_q)
        return {0, 0};
    const int last = min(i_end, s.used_q) - 1;
    return {min(max(i + s.diagonal - c.left, 0), s.used_k), min(max(last + s.diagonal + c.right + 1, 0), s.used_k)};
}

DEVICE span query_span(const attention_sm80_call &c, const sequence &s, int j, int j_end)
{
    if (j >= s.used_k)
        return {0, 0};
    const int last = min(j_end, s.used_k) - 1;
    return {min(max(j - s.diagonal - c.right, 0), s.used_q), min(max(last - s.diagonal + c.left + 1, 0), s.used_q)};
}

/* Read %tid again. Addresses derived from it are then computed where they are used, in a few instructions. Otherwise
 * the compiler keeps them in registers through the loop over tiles, and the accumulators spill. */
DEVICE int reload_thread(void)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

DEVICE int reload_lane(void)
{
    return reload_thread() % 32;
}

/* The first row of this warp, and of this lane. */
template <int M> DEVICE int warp_row(void)
{
    return reload_thread() / 32 * 16 * M;
}

template <int M> DEVICE int lane_row(void)
{
    const int thread = reload_thread();
    return thread / 32 * 16 * M + thread % 32 / 4;
}

/* ---- tiles ----------------------------------------------------------------------------------------------- */

extern __shared__ __align__(128) char memory[]; /* the tiles of a kernel, one after the other */

template <typename E, int HEAD_DIM> DEVICE int tile_bytes(int rows, int pitch)
{
    return is_f32<E> ? rows * pitch * 4 : rows * HEAD_DIM * 2;
}

/* Address of unit u of row r in a 16-bit tile. */
template <int HEAD_DIM> DEVICE uint32_t unit_address(uint32_t tile, int r, int u)
{
    return tile + r * (2 * HEAD_DIM) + ((u ^ (r & 7)) << 4);
}

/* Waits for this thread's asynchronous copies. A barrier must follow for the other threads' copies. */
DEVICE void wait_for_copies(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Loads rows [0, rows) of `size` columns. `offset` is the first element. The rest of the tile becomes zeros. */
template <typename E, int ROWS, int HEAD_DIM, int THREADS>
DEVICE void load_tile(char *tile, const attention_view &t, int64_t offset, int rows, int size, int pitch)
{
    if constexpr (is_f32<E>) {
        const int width = (size + 7) / 8 * 8;
        for (int n = threadIdx.x; n < ROWS * width; n += THREADS) {
            const int r = n / width, x = n % width;
            float value = 0.0f;
            if (r < rows && x < size)
                value = load_at(t, offset + r * t.stride[1] + x * t.stride[3]);
            ((float *)tile)[r * pitch + x] = value;
        }
        return;
    }
    constexpr int UNITS = HEAD_DIM / 8, STEP = THREADS / 8;
    const uint32_t to = cot_shared_address(tile);
    if (t.vectorized) { /* eight lanes per row, 128 bytes at a time, so that differences between steps are constants */
        static_assert(ROWS % STEP == 0 && STEP % 8 == 0, "whole steps, which leave the swizzle as it is");
        const int thread = reload_thread(), r = thread / 8, u = thread % 8;
        const uint16_t *from = (const uint16_t *)t.data + offset + r * t.stride[1] + 8 * u;
        const int64_t step = STEP * t.stride[1];
        const uint32_t unit = unit_address<HEAD_DIM>(to, r, u);
#pragma unroll
        for (int r0 = 0; r0 < ROWS; r0 += STEP) {
            const bool row_in_range = r + r0 < rows;
#pragma unroll
            for (int u0 = 0; u0 < UNITS; u0 += 8) {
                const bool in_range = row_in_range && 8 * (u + u0) < size;
                cot_cp_async_zfill(in_range, unit + r0 * (2 * HEAD_DIM) + u0 * 16,
                                   in_range ? from + 8 * u0 : (const uint16_t *)t.data);
            }
            from += step;
        }
        return;
    }
#pragma unroll 1
    for (int n = threadIdx.x; n < ROWS * HEAD_DIM; n += THREADS) { /* rare case: few registers matter more than speed */
        const int r = n / HEAD_DIM, x = n % HEAD_DIM;
        uint16_t element = 0;
        if (r < rows && x < size)
            element = ((const uint16_t *)t.data)[offset + r * t.stride[1] + x * t.stride[3]];
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(unit_address<HEAD_DIM>(to, r, x / 8) + 2 * (x % 8)), "h"(element)
                     : "memory");
    }
}

/* ---- products of a warp ------------------------------------------------------------------------------------ */

template <typename E> DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if constexpr (cot_is_f16<E>)
        cot_mma_f16(c, a[0], a[1], a[2], a[3], b0, b1);
    else
        cot_mma_bf16(c, a[0], a[1], a[2], a[3], b0, b1);
}

template <int M, int N> DEVICE void clear_accumulators(float (&c)[M][N][4])
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                c[m][n][e] = 0.0f;
}

/* c = A B^T over `size` columns. A: the warp's rows of tile a; B: rows of tile b, one for each column of c. */
template <typename E, int HEAD_DIM, int M, int N>
DEVICE void warp_gemm_abt(float (&c)[M][N][4], const char *a, const char *b, int size, int pitch,
                          int a_row = warp_row<M>())
{
    clear_accumulators(c);
    const int lane = reload_lane();
    if constexpr (is_f32<E>) {
        const float *x = (const float *)a + (a_row + lane / 4) * pitch, *y = (const float *)b + 2 * (lane % 4) * pitch;
#pragma unroll 1
        for (int k = 0; k < size; k += 4) {
            const float4 upper = *(const float4 *)(x + k), lower = *(const float4 *)(x + 8 * pitch + k);
            const float rows[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float4 column = *(const float4 *)(y + (8 * n + e) * pitch + k);
                    const float values[4] = {column.x, column.y, column.z, column.w};
#pragma unroll
                    for (int s = 0; s < 4; s++) {
                        c[0][n][e] = fmaf(rows[0][s], values[s], c[0][n][e]);
                        c[0][n][2 + e] = fmaf(rows[1][s], values[s], c[0][n][2 + e]);
                    }
                }
        }
    } else {
        const uint32_t x = cot_shared_address(a), y = cot_shared_address(b);
        const uint32_t a_address = x + (a_row + lane % 16) * (2 * HEAD_DIM),
                       b_address = y + (lane % 8 + lane / 16 * 8) * (2 * HEAD_DIM);
        const uint32_t a_unit_offset = (lane / 16 ^ lane % 8) * 16, b_unit_offset = (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll(HEAD_DIM > 192 && N > 2 ? 1 : HEAD_DIM / 64)
        for (int chunk = 0; chunk < HEAD_DIM / 64; chunk++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                uint32_t a_fragment[M][4];
#pragma unroll
                for (int m = 0; m < M; m++)
                    cot_ldmatrix_x4(a_fragment[m],
                                    a_address + chunk * 128 + m * (32 * HEAD_DIM) + (a_unit_offset ^ 32 * k));
#pragma unroll
                for (int n = 0; n < N; n += 2) {
                    uint32_t b_fragment[4];
                    cot_ldmatrix_x4(b_fragment,
                                    b_address + chunk * 128 + n * (16 * HEAD_DIM) + (b_unit_offset ^ 32 * k));
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        mma<E>(c[m][n], a_fragment[m], b_fragment[0], b_fragment[1]);
                        mma<E>(c[m][n + 1], a_fragment[m], b_fragment[2], b_fragment[3]);
                    }
                }
            }
    }
}

/* c += P B. P: accumulators p; B: rows of tile b, one for each column of p. */
template <typename E, int HEAD_DIM, int M, int K, int N>
DEVICE void warp_gemm_rs(float (&c)[M][N][4], const float (&p)[M][K][4], const char *b, int size, int pitch)
{
    static_assert(N == HEAD_DIM / 8, "all columns of the tile");
    const int lane = reload_lane();
    if constexpr (is_f32<E>) {
        const float *y = (const float *)b + 2 * (lane % 4);
#pragma unroll 1
        for (int q = 0; q < 4; q++)
#pragma unroll
            for (int x = 0; x < 2 * K; x++) {
                const int k = x / 2 * 8 + 2 * q + x % 2, from = lane / 4 * 4 + q;
                const float upper = __shfl_sync(0xffffffffu, p[0][x / 2][x % 2], from);
                const float lower = __shfl_sync(0xffffffffu, p[0][x / 2][2 + x % 2], from);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    if (8 * n >= size)
                        break;
                    const float2 row = *(const float2 *)(y + k * pitch + 8 * n);
                    c[0][n][0] = fmaf(upper, row.x, c[0][n][0]);
                    c[0][n][1] = fmaf(upper, row.y, c[0][n][1]);
                    c[0][n][2] = fmaf(lower, row.x, c[0][n][2]);
                    c[0][n][3] = fmaf(lower, row.y, c[0][n][3]);
                }
            }
    } else {
        const uint32_t b_address = cot_shared_address(b) + lane % 16 * (2 * HEAD_DIM),
                       b_unit_offset = (lane / 16 ^ lane % 8) * 16;
#pragma unroll
        for (int k = 0; k < K; k += 2) {
            uint32_t a_fragment[M][4];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int x = 0; x < 4; x++)
                    a_fragment[m][x] = cot_pack_pair<E>(p[m][k + x / 2][x % 2 * 2], p[m][k + x / 2][x % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t b_fragment[4];
                cot_ldmatrix_x4_trans(b_fragment,
                                      b_address + k * (16 * HEAD_DIM) + n / 8 * 128 + (b_unit_offset ^ n % 8 * 16));
#pragma unroll
                for (int m = 0; m < M; m++) {
                    mma<E>(c[m][n], a_fragment[m], b_fragment[0], b_fragment[1]);
                    mma<E>(c[m][n + 1], a_fragment[m], b_fragment[2], b_fragment[3]);
                }
            }
        }
    }
}

/* ---- scores ------------------------------------------------------------------------------------------------ */

/* A tile of scores. Its element (0, 0) is the score of query i and key j. */
struct score_tile {
    int i, j;
};

/* Query and key of element e of slab m and column tile n. `row` is the lane's first row. */
template <bool KEYS_IN_ROWS> DEVICE int2 query_key_of(const score_tile &t, int row, int m, int n, int e)
{
    const int r = row + 16 * m + e / 2 * 8, column = 8 * n + (int)threadIdx.x % 4 * 2 + e % 2;
    return make_int2(t.i + (KEYS_IN_ROWS ? column : r), t.j + (KEYS_IN_ROWS ? r : column));
}

/* Whether every query of the tile attends to all of its keys. Queries after the end count as masked where queries are
 * columns, because nothing else keeps their P from becoming infinite in 16 bits. */
template <bool KEYS_IN_ROWS>
DEVICE bool all_visible(const attention_sm80_call &c, const sequence &s, const score_tile &t, int queries, int keys)
{
    return (!KEYS_IN_ROWS || t.i + queries <= s.used_q) && t.j + keys <= s.used_k &&
           t.j + keys - 1 <= t.i + s.diagonal + c.right && t.j >= t.i + queries - 1 + s.diagonal - c.left;
}

template <bool KEYS_IN_ROWS, int M, int N>
DEVICE void apply_mask(const attention_sm80_call &c, const sequence &s, const score_tile &t, float (&x)[M][N][4])
{
    const int row = lane_row<M>(), of_column = 2 * (reload_lane() % 4);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = row + 16 * m + 8 * half;
            int first, last;
            if (KEYS_IN_ROWS) {
                first = t.j + r - s.diagonal - c.right - t.i;
                last = t.j + r < s.used_k ? min(t.j + r - s.diagonal + c.left, s.used_q - 1) - t.i : -1;
            } else {
                first = t.i + r + s.diagonal - c.left - t.j;
                last = min(t.i + r + s.diagonal + c.right, s.used_k - 1) - t.j;
            }
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int column = 8 * n + of_column + e;
                    if (column < first || column > last)
                        x[m][n][2 * half + e] = -INFINITE;
                }
        }
}

/* Modifiers of scores and P for one sequence and query head: ALiBi, bias, dropout. */
struct score_mods {
    float slope;
    int64_t bias;          /* offset of bias[b,h,0,0], in elements */
    uint64_t seed, offset; /* seed and offset of dropout */
    uint64_t row;          /* row number of query 0 for dropout */
};

DEVICE uint64_t load_u64(const attention_view &t)
{
    if (!is_present(t))
        return 0;
    return (uint64_t)(uint32_t)load_index(t, 0) | (uint64_t)(uint32_t)load_index(t, 1) << 32;
}

DEVICE score_mods score_mods_of(const attention_sm80_call &c, const sequence &s, int64_t h)
{
    score_mods mods = {};
    if (is_present(c.alibi_slopes))
        mods.slope = load_at(c.alibi_slopes, s.b * c.alibi_slopes.stride[0] + h * c.alibi_slopes.stride[1]);
    if (is_present(c.bias))
        mods.bias = s.b * c.bias.stride[0] + h * c.bias.stride[1];
    if (c.dropped > 0) {
        const int64_t rows_per_head = c.packed ? clamp(load_index(c.cu_q, c.B), 0, c.rows_q) : c.B * c.q_length;
        mods.seed = c.seed + load_u64(c.seed_tensor);
        mods.offset = c.offset + load_u64(c.offset_tensor);
        mods.row = (uint64_t)(h * rows_per_head + (c.packed ? (int64_t)s.q_first_row : s.b * c.q_length + c.q_begin));
    }
    return mods;
}

/* Turns products into scores, in base 2 for 16-bit dtypes. WITH_SLOPES: cap_slopes become the derivatives of the
 * softcap. */
template <typename E, bool KEYS_IN_ROWS, bool WITH_SLOPES, int M, int N>
DEVICE void modify_scores(const attention_sm80_call &c, const sequence &s, const score_mods &mods, const score_tile &t,
                          float (&x)[M][N][4], float (&cap_slopes)[M][N][4])
{
    const int row = lane_row<M>();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int2 query_key = query_key_of<KEYS_IN_ROWS>(t, row, m, n, e);
                float y = c.scale * x[m][n][e];
                if (WITH_SLOPES)
                    cap_slopes[m][n][e] = 1.0f;
                if (c.softcap > 0.0f) {
                    /* lse is float32 and would show the cancellation of a shorter formula near 0. */
                    const float z = tanhf(y / c.softcap);
                    y = c.softcap * z;
                    if (WITH_SLOPES)
                        cap_slopes[m][n][e] = fmaf(-z, z, 1.0f);
                }
                if (is_present(c.alibi_slopes)) {
                    const int distance = query_key.x + s.diagonal - query_key.y;
                    y -= mods.slope * (float)abs(distance);
                }
                if (is_present(c.bias) && query_key.x < s.used_q && query_key.y < s.used_k)
                    y += load_at(c.bias, mods.bias + (int64_t)query_key.x * c.bias.stride[2] +
                                             (int64_t)query_key.y * c.bias.stride[3]);
                x[m][n][e] = is_f32<E> ? y : 1.4426950408889634f * y;
            }
}

/* Whether dropout keeps an element, from a word of its group's random bits. */
DEVICE bool keeps_element(uint32_t word, unsigned column, uint32_t dropped)
{
    return (word >> 16 * (column % 2) & 0xffffu) >= dropped;
}

/* Transposes 4 x 4 words over four lanes that are STRIDE apart: lane q of them gets word q of each lane. */
template <int STRIDE> DEVICE void transpose_words(uint32_t (&w)[4])
{
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool odd = threadIdx.x & bit * STRIDE;
#pragma unroll
        for (int first = 0; first < 4; first++) {
            if (first & bit)
                continue;
            const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? w[first] : w[first + bit], bit * STRIDE);
            if (odd)
                w[first] = other;
            else
                w[first + bit] = other;
        }
    }
}

/* Bit 4 n + e of word m: dropout keeps element e of slab m and column tile n. Rows are queries, and the groups of 8
 * keys begin at column tiles. Each of four lanes generates the words of one of four column tiles. The lanes exchange
 * the words. */
template <int N>
DEVICE uint32_t dropout_mask_rows(const attention_sm80_call &c, const score_mods &mods, uint64_t query, uint64_t key)
{
    uint32_t keep_bits = 0;
#pragma unroll
    for (int n = 0; n < N; n += 4) {
        uint32_t words[4];
        cot_dropout_group(mods.seed, mods.offset, query * c.groups + key / COT_DROPOUT_GROUP + n + threadIdx.x % 4,
                          words);
        transpose_words<1>(words);
#pragma unroll
        for (int x = 0; x < 4; x++)
            keep_bits |= (uint32_t)keeps_element(words[x], 0, c.dropped) << 4 * (n + x) |
                         (uint32_t)keeps_element(words[x], 1, c.dropped) << (4 * (n + x) + 1);
    }
    return keep_bits;
}

/* The same for keys in rows. The eight keys of a group are in eight lanes, four apart. Each of these lanes generates
 * the words of one of eight queries or groups. The lanes exchange words in two steps: all four words among the four
 * lanes of the same parity, then the results with the lane of the other parity. */
template <int N>
DEVICE uint32_t dropout_mask_columns(const attention_sm80_call &c, const score_mods &mods, uint64_t query, uint64_t key)
{
    const unsigned lane = threadIdx.x % 32, g = lane / 4;
    uint32_t keep_bits = 0;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t words[4];
        const uint64_t row = query + 8 * (n + g / 4) + 2 * (lane % 4) + g % 2;
        cot_dropout_group(mods.seed, mods.offset, row * c.groups + key / COT_DROPOUT_GROUP + g / 2 % 2, words);
        transpose_words<8>(words);
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const uint32_t others = __shfl_xor_sync(0xffffffffu, words[x], 4);
            const int bit = 4 * (n + x / 2) + 2 * (x % 2);
            keep_bits |= (uint32_t)keeps_element(g % 2 ? others : words[x], g, c.dropped) << bit |
                         (uint32_t)keeps_element(g % 2 ? words[x] : others, g, c.dropped) << (bit + 1);
        }
    }
    return keep_bits;
}

template <bool KEYS_IN_ROWS, int M, int N>
DEVICE void dropout_mask(const attention_sm80_call &c, const score_mods &mods, const score_tile &t,
                         uint32_t (&keep_bits)[M])
{
    const int row = lane_row<M>();
    static_assert(N <= 8, "a word has room for 32 elements");
    const uint64_t first_key = (uint64_t)(c.k_begin + t.j);
#pragma unroll
    for (int m = 0; m < M; m++) {
        keep_bits[m] = 0;
        if (!KEYS_IN_ROWS && N % 4 == 0 && first_key % COT_DROPOUT_GROUP == 0) {
            const uint64_t query = mods.row + (uint64_t)(t.i + row + 16 * m);
            keep_bits[m] = dropout_mask_rows<N / 4 * 4>(c, mods, query, first_key) |
                           dropout_mask_rows<N / 4 * 4>(c, mods, query + 8, first_key) << 2;
            continue;
        }
        if (KEYS_IN_ROWS && first_key % COT_DROPOUT_GROUP == 0) {
            keep_bits[m] = dropout_mask_columns<N>(c, mods, mods.row + (uint64_t)t.i,
                                                   first_key + (uint64_t)(warp_row<M>() + 16 * m));
            continue;
        }
#pragma unroll 1
        for (int x = 0; x < 4 * N; x++) {
            const int2 query_key = query_key_of<KEYS_IN_ROWS>(t, row, m, x / 4, x % 4);
            const uint64_t key = (uint64_t)(c.k_begin + query_key.y);
            uint32_t words[4];
            cot_dropout_group(mods.seed, mods.offset,
                              (mods.row + (uint64_t)query_key.x) * c.groups + key / COT_DROPOUT_GROUP, words);
            const unsigned column = (unsigned)(key % COT_DROPOUT_GROUP);
            const uint32_t word = column < 4 ? (column < 2 ? words[0] : words[1]) : column < 6 ? words[2] : words[3];
            keep_bits[m] |= (uint32_t)keeps_element(word, column, c.dropped) << x;
        }
    }
}

/* exp(x scale - m). m is in the base of the exponent. */
template <typename E> DEVICE float exp_scaled(float x, float scale, float m)
{
    if constexpr (is_f32<E>)
        return expf(x - m);
    else
        return cot_ex2(fmaf(x, scale, -m));
}

/* The scale of scores in exp_scaled. Scores with modifiers are already scaled. */
template <typename E, bool SCORE_MODS> DEVICE float exp_scale_of(const attention_sm80_call &c)
{
    return is_f32<E> || SCORE_MODS ? 1.0f : c.score_scale;
}

/* Turns products into scores: modifiers or, without them, the sign of the scale. Then the mask. */
template <typename E, bool SCORE_MODS, bool KEYS_IN_ROWS, bool WITH_SLOPES, int M, int N>
DEVICE void finish_scores(const attention_sm80_call &c, const sequence &s, const score_mods &mods, const score_tile &t,
                          bool visible, float (&x)[M][N][4], float (&cap_slopes)[M][N][4])
{
    if constexpr (SCORE_MODS) {
        modify_scores<E, KEYS_IN_ROWS, WITH_SLOPES>(c, s, mods, t, x, cap_slopes);
    } else if (c.negative_scale) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[m][n][e] = -x[m][n][e];
    }
    if (!visible)
        apply_mask<KEYS_IN_ROWS>(c, s, t, x);
}

/* ---- results ----------------------------------------------------------------------------------------------- */

/* Stores the warp's 16 M rows, which begin at `row`, and columns [first_column, first_column + 8 N), of which those
 * below `size` exist. Rows below used_rows are multiplied by factor, later rows below `rows` become 0. offset: the
 * element of row 0. `tile` is shared memory that collects vectors of 16 bytes. Only this warp reads the part that it
 * writes. */
template <typename E, int HEAD_DIM, int M, int N>
DEVICE void store_rows(const attention_view &to, int64_t offset, bool accumulate, int used_rows, int rows, int size,
                       const float (&x)[M][N][4], const float (&factor)[M][2], char *tile, int row = warp_row<M>(),
                       int first_column = 0)
{
    const int lane = reload_lane();
    if constexpr (!is_f32<E>) {
        if (to.vectorized && !accumulate) {
            const uint32_t base = cot_shared_address(tile);
            __syncwarp();
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int r = row + 16 * m + 8 * half + lane / 4;
                    const bool in_range = r < used_rows;
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        const uint32_t word = cot_pack_pair<E>(factor[m][half] * x[m][n][2 * half],
                                                               factor[m][half] * x[m][n][2 * half + 1]);
                        asm volatile("st.shared.u32 [%0], %1;" ::"r"(
                                         unit_address<HEAD_DIM>(base, r, first_column / 8 + n) + 4 * (lane % 4)),
                                     "r"(in_range ? word : 0)
                                     : "memory");
                    }
                }
            __syncwarp();
            constexpr int UNITS = N;
#pragma unroll 4
            for (int n = lane; n < 16 * M * UNITS; n += 32) {
                const int r = row + n / UNITS, u = first_column / 8 + n % UNITS;
                if (r >= rows || 8 * u >= size)
                    continue;
                uint32_t word[4];
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                             : "r"(unit_address<HEAD_DIM>(base, r, u))
                             : "memory");
                *(uint4 *)((uint16_t *)to.data + offset + r * to.stride[1] + 8 * u) =
                    make_uint4(word[0], word[1], word[2], word[3]);
            }
            return;
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int r = row + 16 * m + e / 2 * 8 + lane / 4, column = first_column + 8 * n + lane % 4 * 2 + e % 2;
                if (r >= rows || column >= size)
                    continue;
                const int64_t element = offset + r * to.stride[1] + column * to.stride[3];
                float value = r < used_rows ? factor[m][e / 2] * x[m][n][e] : 0.0f;
                if (accumulate)
                    value += load_at(to, element);
                cot_store(to.data, to.dtype, element, value);
            }
}

/* Clears the rows after the last packed sequence. The blocks of a head share the rows. */
DEVICE void clear_rows(const attention_sm80_call &c, const attention_view &to, int64_t first, int rows, int64_t head,
                       int tile, int64_t size)
{
    if (!is_present(to) || c.accumulate)
        return;
    for (int64_t n = tile * (int64_t)blockDim.x + threadIdx.x; n < rows * size; n += c.tiles * blockDim.x)
        cot_store(to.data, to.dtype, row_offset(to, 0, first + n / size, head) + n % size * to.stride[3], 0.0f);
}

#endif
