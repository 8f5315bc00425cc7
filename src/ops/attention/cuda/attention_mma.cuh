/* SPDX-License-Identifier: Apache-2.0
 * attention_mma.cuh: what the portable kernels share: sequences, tiles in shared memory, products of a warp, masks and
 * everything else that makes scores.
 *
 * A block has rows of its own (queries, or keys in dk's and dv's kernels), 16 M a warp, and walks over tiles of the other
 * side, `columns`. Scores are accumulators of m16n8k16: element e of slab m and column tile n of lane l is row
 * 16 m + l/4 + 8 (e/2), column 8 n + 2 (l%4) + e%2; a pair of column tiles is, rounded, operand A of the product after.
 *
 * 16-bit tiles lie row by row, unit u of sixteen bytes of row r at u ^ (r % 8): ldmatrix finds eight rows in different
 * banks. Float32 (attention_f32.cu) has the same fragments, on FMAs, so that one source serves both: tiles are rows of
 * `pitch` floats there, sizes and dtypes are known at run time only. */
#ifndef COT_ATTENTION_MMA_CUH
#define COT_ATTENTION_MMA_CUH

#include "attention_mma.h"

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

DEVICE bool given(const attention_view &t)
{
    return t.data != nullptr;
}

DEVICE float load_at(const attention_view &t, int64_t at)
{
    return cot_load(t.data, t.dtype, at);
}

DEVICE int64_t load_index(const attention_view &t, int64_t i)
{
    return ((const int32_t *)t.data)[i * t.stride[0]];
}

DEVICE int64_t clamp(int64_t value, int64_t least, int64_t most)
{
    return value < least ? least : value > most ? most : value;
}

/* ---- sequences ------------------------------------------------------------------------------------------- */

/* As attention_problem.h's attention_sequence: rows q_row .. q_row + q_rows, of which the first Tq count. */
struct sequence {
    int b, q_row, k_row, q_rows, k_rows, Tq, Tk, diagonal;
};

/* Where sequence n begins. What is out of order or beyond the tensor is clamped, so that no fault leads out of it. */
DEVICE int boundary(const attention_mma_call &c, const attention_view &cu, int64_t n, int64_t rows)
{
    const int64_t at = load_index(cu, n);
    if ((at < 0 || at > rows || (n == 0 && at != 0)) && threadIdx.x == 0)
        cot_report_fault(c.fault, COT_FAULT_CU_SEQLENS, n);
    return (int)clamp(at, 0, rows);
}

DEVICE int length(const attention_mma_call &c, const attention_view &cu, int n, int first, int64_t rows, int64_t most)
{
    const int64_t rest = boundary(c, cu, n + 1, rows) - first;
    if ((rest < 0 || rest > most) && threadIdx.x == 0)
        cot_report_fault(c.fault, COT_FAULT_CU_SEQLENS, n + 1);
    return (int)clamp(rest, 0, most);
}

DEVICE int used(const attention_mma_call &c, const attention_view &t, int b, int whole)
{
    if (!given(t))
        return whole;
    const int64_t value = load_index(t, b);
    if ((value < 0 || value > whole) && threadIdx.x == 0)
        cot_report_fault(c.fault, COT_FAULT_SEQUSED, b);
    return (int)clamp(value, 0, whole);
}

/* Number B of packed sequences is what lies beyond the last one: rows that no query or key counts of. */
DEVICE sequence sequence_at(const attention_mma_call &c, int b)
{
    sequence s = {b, 0, 0, (int)c.Tq, (int)c.Tk, 0, 0, 0};
    int whole_q = (int)c.q_length, whole_k = (int)c.k_length;
    if (c.packed) {
        s.q_row = boundary(c, c.cu_q, b, c.rows_q);
        s.k_row = boundary(c, c.cu_k, b, c.rows_k);
        if (b == c.B) {
            s.q_rows = (int)(c.rows_q - s.q_row);
            s.k_rows = (int)(c.rows_k - s.k_row);
            return s;
        }
        whole_q = s.q_rows = length(c, c.cu_q, b, s.q_row, c.rows_q, c.Tq);
        whole_k = s.k_rows = length(c, c.cu_k, b, s.k_row, c.rows_k, c.Tk);
    }
    const int used_q = used(c, c.used_q, b, whole_q), used_k = used(c, c.used_k, b, whole_k);
    const int q_begin = (int)c.q_begin, k_begin = (int)c.k_begin;
    s.Tq = min(max(used_q - q_begin, 0), s.q_rows);
    s.Tk = min(max(used_k - k_begin, 0), s.k_rows);
    s.diagonal = used_k - used_q + q_begin - k_begin;
    return s;
}

/* A block's tile, head and sequence. Blocks of one head follow each other: they read the same rows. */
struct place {
    int b, head, tile;
};

DEVICE place place_of(const attention_mma_call &c, int64_t heads)
{
    const unsigned tiles = (unsigned)c.tiles, n = blockIdx.x / tiles;
    return {(int)(n / (unsigned)heads), (int)(n % (unsigned)heads), (int)(blockIdx.x % tiles)};
}

/* Row `row` of head h. */
DEVICE int64_t row_at(const attention_view &t, int64_t b, int64_t row, int64_t h)
{
    return b * t.stride[0] + row * t.stride[1] + h * t.stride[2];
}

DEVICE int64_t statistic_at(const attention_view &t, int64_t b, int64_t h, int64_t row)
{
    return b * t.stride[0] + h * t.stride[1] + row * t.stride[2];
}

/* Of row_lse and row_delta. */
DEVICE int64_t number_of_row(const attention_mma_call &c, const sequence &s, int64_t h)
{
    return h * c.rows_q + (c.packed ? (int64_t)s.q_row : s.b * c.Tq);
}

/* Of dq_sums: the row of a sequence's query 0. */
DEVICE int64_t first_sum(const attention_mma_call &c, const sequence &s, int64_t h)
{
    constexpr int64_t ROWS = ATTENTION_SUM_ROWS;
    const int64_t tiles = c.packed ? s.q_row / ROWS + s.b : s.b * ((c.Tq + ROWS - 1) / ROWS);
    return h * c.sum_rows + tiles * ROWS;
}

/* What a tile of rows sees of the other side, [first, end). No sum of these numbers overflows: attention_mma_launch.h. */
struct span {
    int first, end;
};

DEVICE span keys_of(const attention_mma_call &c, const sequence &s, int i, int i_end)
{
    if (i >= s.Tq)
        return {0, 0};
    const int last = min(i_end, s.Tq) - 1;
    return {min(max(i + s.diagonal - c.left, 0), s.Tk), min(max(last + s.diagonal + c.right + 1, 0), s.Tk)};
}

DEVICE span queries_of(const attention_mma_call &c, const sequence &s, int j, int j_end)
{
    if (j >= s.Tk)
        return {0, 0};
    const int last = min(j_end, s.Tk) - 1;
    return {min(max(j - s.diagonal - c.right, 0), s.Tq), min(max(last - s.diagonal + c.left + 1, 0), s.Tq)};
}

/* This thread's number and lane, asked for anew: addresses that follow from them are then made where they are used, a few
 * instructions each, and not kept in registers through the loop over tiles, where they made the accumulators spill. */
DEVICE int thread_again(void)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

DEVICE int lane_again(void)
{
    return thread_again() % 32;
}

/* The first of this warp's rows, and of this lane's. */
template <int M> DEVICE int warp_row(void)
{
    return thread_again() / 32 * 16 * M;
}

template <int M> DEVICE int lane_row(void)
{
    const int thread = thread_again();
    return thread / 32 * 16 * M + thread % 32 / 4;
}

/* ---- tiles ----------------------------------------------------------------------------------------------- */

extern __shared__ __align__(128) char memory[]; /* a kernel's tiles, one after the other */

template <typename E, int D> DEVICE int tile_bytes(int rows, int pitch)
{
    return is_f32<E> ? rows * pitch * 4 : rows * D * 2;
}

/* Where unit u of row r of a 16-bit tile lies. */
template <int D> DEVICE uint32_t unit_at(uint32_t tile, int r, int u)
{
    return tile + r * (2 * D) + ((u ^ (r & 7)) << 4);
}

/* Until everything that this thread has asked for is there; a barrier says so to the others. */
DEVICE void wait_for_copies(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Rows [0, rows) of `size` columns from element `at` on; the rest of the tile is zeros. */
template <typename E, int ROWS, int D, int THREADS>
DEVICE void load_tile(char *tile, const attention_view &t, int64_t at, int rows, int size, int pitch)
{
    if constexpr (is_f32<E>) {
        const int width = (size + 7) / 8 * 8;
        for (int n = threadIdx.x; n < ROWS * width; n += THREADS) {
            const int r = n / width, x = n % width;
            float value = 0.0f;
            if (r < rows && x < size)
                value = load_at(t, at + r * t.stride[1] + x * t.stride[3]);
            ((float *)tile)[r * pitch + x] = value;
        }
        return;
    }
    constexpr int UNITS = D / 8, STEP = THREADS / 8;
    const uint32_t to = cot_shared_address(tile);
    if (t.vectors) { /* eight lanes a row, 128 bytes of it at a time: all that changes from step to step is constant */
        static_assert(ROWS % STEP == 0 && STEP % 8 == 0, "whole steps, which leave the swizzle as it is");
        const int thread = thread_again(), r = thread / 8, u = thread % 8;
        const uint16_t *from = (const uint16_t *)t.data + at + r * t.stride[1] + 8 * u;
        const int64_t step = STEP * t.stride[1];
        const uint32_t unit = unit_at<D>(to, r, u);
#pragma unroll
        for (int below = 0; below < ROWS; below += STEP) {
            const bool row_there = r + below < rows;
#pragma unroll
            for (int beside = 0; beside < UNITS; beside += 8) {
                const bool there = row_there && 8 * (u + beside) < size;
                cot_copy_async_or_zeros(there, unit + below * (2 * D) + beside * 16,
                                        there ? from + 8 * beside : (const uint16_t *)t.data);
            }
            from += step;
        }
        return;
    }
#pragma unroll 1
    for (int n = threadIdx.x; n < ROWS * D; n += THREADS) { /* the fewest registers, for what is rare */
        const int r = n / D, x = n % D;
        uint16_t element = 0;
        if (r < rows && x < size)
            element = ((const uint16_t *)t.data)[at + r * t.stride[1] + x * t.stride[3]];
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(unit_at<D>(to, r, x / 8) + 2 * (x % 8)), "h"(element) : "memory");
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

template <int M, int N> DEVICE void clear(float (&c)[M][N][4])
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                c[m][n][e] = 0.0f;
}

/* c = A B^T over `size` columns: the warp's rows of tile a, as many rows of tile b as c has columns. */
template <typename E, int D, int M, int N>
DEVICE void multiply_rows(float (&c)[M][N][4], const char *a, const char *b, int size, int pitch,
                          int a_row = warp_row<M>())
{
    clear(c);
    const int lane = lane_again();
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
        const uint32_t x_row = x + (a_row + lane % 16) * (2 * D), y_row = y + (lane % 8 + lane / 16 * 8) * (2 * D);
        const uint32_t x_unit = (lane / 16 ^ lane % 8) * 16, y_unit = (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll(D > 192 && N > 2 ? 1 : D / 64)
        for (int chunk = 0; chunk < D / 64; chunk++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                uint32_t rows[M][4];
#pragma unroll
                for (int m = 0; m < M; m++)
                    cot_ldmatrix_x4(rows[m], x_row + chunk * 128 + m * (32 * D) + (x_unit ^ 32 * k));
#pragma unroll
                for (int n = 0; n < N; n += 2) {
                    uint32_t columns[4];
                    cot_ldmatrix_x4(columns, y_row + chunk * 128 + n * (16 * D) + (y_unit ^ 32 * k));
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        mma<E>(c[m][n], rows[m], columns[0], columns[1]);
                        mma<E>(c[m][n + 1], rows[m], columns[2], columns[3]);
                    }
                }
            }
    }
}

/* c += P B, P from the accumulators p, B the tile of as many rows as p has columns. */
template <typename E, int D, int M, int K, int N>
DEVICE void multiply_scores(float (&c)[M][N][4], const float (&p)[M][K][4], const char *b, int size, int pitch)
{
    static_assert(N == D / 8, "all columns of the tile");
    const int lane = lane_again();
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
        const uint32_t y_row = cot_shared_address(b) + lane % 16 * (2 * D), y_unit = (lane / 16 ^ lane % 8) * 16;
#pragma unroll
        for (int k = 0; k < K; k += 2) {
            uint32_t rows[M][4];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int x = 0; x < 4; x++)
                    rows[m][x] = cot_pack_pair<E>(p[m][k + x / 2][x % 2 * 2], p[m][k + x / 2][x % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t columns[4];
                cot_ldmatrix_x4_trans(columns, y_row + k * (16 * D) + n / 8 * 128 + (y_unit ^ n % 8 * 16));
#pragma unroll
                for (int m = 0; m < M; m++) {
                    mma<E>(c[m][n], rows[m], columns[0], columns[1]);
                    mma<E>(c[m][n + 1], rows[m], columns[2], columns[3]);
                }
            }
        }
    }
}

/* ---- scores ------------------------------------------------------------------------------------------------ */

/* A tile of scores: that of query i and key j is its element (0, 0). */
struct score_tile {
    int i, j;
};

/* Query and key of element e of slab m and column tile n; `row` is the lane's first. */
template <bool KEYS_IN_ROWS> DEVICE int2 pair_at(const score_tile &t, int row, int m, int n, int e)
{
    const int r = row + 16 * m + e / 2 * 8, column = 8 * n + (int)threadIdx.x % 4 * 2 + e % 2;
    return make_int2(t.i + (KEYS_IN_ROWS ? column : r), t.j + (KEYS_IN_ROWS ? r : column));
}

/* Does every query of a tile see all its keys? Queries past the end count where they are columns: nothing else keeps
 * their P from becoming infinite in 16 bits. */
template <bool KEYS_IN_ROWS>
DEVICE bool all_visible(const attention_mma_call &c, const sequence &s, const score_tile &t, int queries, int keys)
{
    return (!KEYS_IN_ROWS || t.i + queries <= s.Tq) && t.j + keys <= s.Tk &&
           t.j + keys - 1 <= t.i + s.diagonal + c.right && t.j >= t.i + queries - 1 + s.diagonal - c.left;
}

template <bool KEYS_IN_ROWS, int M, int N>
DEVICE void hide(const attention_mma_call &c, const sequence &s, const score_tile &t, float (&x)[M][N][4])
{
    const int row = lane_row<M>(), of_column = 2 * (lane_again() % 4);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = row + 16 * m + 8 * half;
            int first, last;
            if (KEYS_IN_ROWS) {
                first = t.j + r - s.diagonal - c.right - t.i;
                last = t.j + r < s.Tk ? min(t.j + r - s.diagonal + c.left, s.Tq - 1) - t.i : -1;
            } else {
                first = t.i + r + s.diagonal - c.left - t.j;
                last = min(t.i + r + s.diagonal + c.right, s.Tk - 1) - t.j;
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

/* What scores and P have besides, of one sequence and query head. */
struct additions {
    float slope;
    int64_t bias;          /* element of bias[b,h,0,0] */
    uint64_t seed, offset; /* of dropout */
    uint64_t row;          /* of query 0 */
};

DEVICE uint64_t two_words(const attention_view &t)
{
    if (!given(t))
        return 0;
    return (uint64_t)(uint32_t)load_index(t, 0) | (uint64_t)(uint32_t)load_index(t, 1) << 32;
}

DEVICE additions additions_of(const attention_mma_call &c, const sequence &s, int64_t h)
{
    additions a = {};
    if (given(c.slopes))
        a.slope = load_at(c.slopes, s.b * c.slopes.stride[0] + h * c.slopes.stride[1]);
    if (given(c.bias))
        a.bias = s.b * c.bias.stride[0] + h * c.bias.stride[1];
    if (c.dropped > 0) {
        const int64_t all = c.packed ? clamp(load_index(c.cu_q, c.B), 0, c.rows_q) : c.B * c.q_length;
        a.seed = c.seed + two_words(c.seed_memory);
        a.offset = c.offset + two_words(c.offset_memory);
        a.row = (uint64_t)(h * all + (c.packed ? (int64_t)s.q_row : s.b * c.q_length + c.q_begin));
    }
    return a;
}

/* Products become scores, in base 2 for 16-bit dtypes; caps, where there are any: the derivative of the softcap. */
template <typename E, bool KEYS_IN_ROWS, bool WITH_CAPS, int M, int N>
DEVICE void modify(const attention_mma_call &c, const sequence &s, const additions &a, const score_tile &t,
                   float (&x)[M][N][4], float (&caps)[M][N][4])
{
    const int row = lane_row<M>();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int2 pair = pair_at<KEYS_IN_ROWS>(t, row, m, n, e);
                float y = c.scale * x[m][n][e];
                if (WITH_CAPS)
                    caps[m][n][e] = 1.0f;
                if (c.softcap > 0.0f) {
                    const float z =
                        tanhf(y / c.softcap); /* lse is float32 and would show a short form's cancellation near 0 */
                    y = c.softcap * z;
                    if (WITH_CAPS)
                        caps[m][n][e] = fmaf(-z, z, 1.0f);
                }
                if (given(c.slopes)) {
                    const int distance = pair.x + s.diagonal - pair.y;
                    y -= a.slope * (float)abs(distance);
                }
                if (given(c.bias) && pair.x < s.Tq && pair.y < s.Tk)
                    y += load_at(c.bias,
                                 a.bias + (int64_t)pair.x * c.bias.stride[2] + (int64_t)pair.y * c.bias.stride[3]);
                x[m][n][e] = is_f32<E> ? y : 1.4426950408889634f * y;
            }
}

/* One element's fate, in a word of its group's draws. */
DEVICE bool kept(uint32_t word, unsigned column, uint32_t dropped)
{
    return (word >> 16 * (column % 2) & 0xffffu) >= dropped;
}

/* Four words of each of four lanes, STRIDE apart: the lane with number q among them is given word q of each. */
template <int STRIDE> DEVICE void exchange_words(uint32_t (&w)[4])
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

/* Bit 4 n + e of word m: dropout keeps element e of slab m and column tile n. Queries in rows, and groups of 8 keys that
 * begin where column tiles do: each lane of four draws for one column tile of four, and they exchange the words. */
template <int N>
DEVICE uint32_t draw_rows(const attention_mma_call &c, const additions &a, uint64_t query, uint64_t key)
{
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < N; n += 4) {
        uint32_t words[4];
        cot_dropout_group(a.seed, a.offset, query * c.groups + key / COT_DROPOUT_GROUP + n + threadIdx.x % 4, words);
        exchange_words<1>(words);
#pragma unroll
        for (int x = 0; x < 4; x++)
            bits |= (uint32_t)kept(words[x], 0, c.dropped) << 4 * (n + x) | (uint32_t)kept(words[x], 1, c.dropped)
                                                                                << (4 * (n + x) + 1);
    }
    return bits;
}

/* The same with keys in rows: eight keys of a query are eight lanes, four apart. Each draws for one of eight queries or
 * groups, and they exchange the words: with those of the same parity all four, then with the others what they have. */
template <int N>
DEVICE uint32_t draw_columns(const attention_mma_call &c, const additions &a, uint64_t query, uint64_t key)
{
    const unsigned lane = threadIdx.x % 32, g = lane / 4;
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t words[4];
        const uint64_t row = query + 8 * (n + g / 4) + 2 * (lane % 4) + g % 2;
        cot_dropout_group(a.seed, a.offset, row * c.groups + key / COT_DROPOUT_GROUP + g / 2 % 2, words);
        exchange_words<8>(words);
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const uint32_t others = __shfl_xor_sync(0xffffffffu, words[x], 4);
            const int at = 4 * (n + x / 2) + 2 * (x % 2);
            bits |= (uint32_t)kept(g % 2 ? others : words[x], g, c.dropped) << at |
                    (uint32_t)kept(g % 2 ? words[x] : others, g, c.dropped) << (at + 1);
        }
    }
    return bits;
}

template <bool KEYS_IN_ROWS, int M, int N>
DEVICE void draw(const attention_mma_call &c, const additions &a, const score_tile &t, uint32_t (&bits)[M])
{
    const int row = lane_row<M>();
    static_assert(N <= 8, "a word has room for 32 elements");
    const uint64_t first_key = (uint64_t)(c.k_begin + t.j);
#pragma unroll
    for (int m = 0; m < M; m++) {
        bits[m] = 0;
        if (!KEYS_IN_ROWS && N % 4 == 0 && first_key % COT_DROPOUT_GROUP == 0) {
            const uint64_t query = a.row + (uint64_t)(t.i + row + 16 * m);
            bits[m] = draw_rows<N / 4 * 4>(c, a, query, first_key) | draw_rows<N / 4 * 4>(c, a, query + 8, first_key)
                                                                         << 2;
            continue;
        }
        if (KEYS_IN_ROWS && first_key % COT_DROPOUT_GROUP == 0) {
            bits[m] = draw_columns<N>(c, a, a.row + (uint64_t)t.i, first_key + (uint64_t)(warp_row<M>() + 16 * m));
            continue;
        }
#pragma unroll 1
        for (int x = 0; x < 4 * N; x++) {
            const int2 pair = pair_at<KEYS_IN_ROWS>(t, row, m, x / 4, x % 4);
            const uint64_t key = (uint64_t)(c.k_begin + pair.y);
            uint32_t words[4];
            cot_dropout_group(a.seed, a.offset, (a.row + (uint64_t)pair.x) * c.groups + key / COT_DROPOUT_GROUP, words);
            const unsigned column = (unsigned)(key % COT_DROPOUT_GROUP);
            const uint32_t word = column < 4 ? (column < 2 ? words[0] : words[1]) : column < 6 ? words[2] : words[3];
            bits[m] |= (uint32_t)kept(word, column, c.dropped) << x;
        }
    }
}

/* exp(x scale - m): m is in the exponent's base. */
template <typename E> DEVICE float power(float x, float scale, float m)
{
    if constexpr (is_f32<E>)
        return expf(x - m);
    else
        return cot_ex2(fmaf(x, scale, -m));
}

/* The scores' scale: with additions they have been scaled already. */
template <typename E, bool ALL> DEVICE float scale_of(const attention_mma_call &c)
{
    return is_f32<E> || ALL ? 1.0f : c.score_scale;
}

/* Scores from products: additions or, without, the sign of the scale; then what no query sees. */
template <typename E, bool ALL, bool KEYS_IN_ROWS, bool WITH_CAPS, int M, int N>
DEVICE void finish_scores(const attention_mma_call &c, const sequence &s, const additions &a, const score_tile &t,
                          bool visible, float (&x)[M][N][4], float (&caps)[M][N][4])
{
    if constexpr (ALL) {
        modify<E, KEYS_IN_ROWS, WITH_CAPS>(c, s, a, t, x, caps);
    } else if (c.negative) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[m][n][e] = -x[m][n][e];
    }
    if (!visible)
        hide<KEYS_IN_ROWS>(c, s, t, x);
}

/* ---- results ----------------------------------------------------------------------------------------------- */

/* `size` columns of the rows from `row` on, or those of them from `first` on that the warp has: rows below `rows` times
 * a factor, then zeros up to `all`; at: the element of row 0. A tile is given to gather sixteen bytes, of which the warp
 * alone reads that part. */
template <typename E, int D, int M, int N>
DEVICE void store_rows(const attention_view &to, int64_t at, bool accumulate, int rows, int all, int size,
                       const float (&x)[M][N][4], const float (&factor)[M][2], char *tile, int row = warp_row<M>(),
                       int first = 0)
{
    const int lane = lane_again();
    if constexpr (!is_f32<E>) {
        if (to.vectors && !accumulate) {
            const uint32_t base = cot_shared_address(tile);
            __syncwarp();
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int r = row + 16 * m + 8 * half + lane / 4;
                    const bool there = r < rows;
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        const uint32_t pair = cot_pack_pair<E>(factor[m][half] * x[m][n][2 * half],
                                                               factor[m][half] * x[m][n][2 * half + 1]);
                        asm volatile(
                            "st.shared.u32 [%0], %1;" ::"r"(unit_at<D>(base, r, first / 8 + n) + 4 * (lane % 4)),
                            "r"(there ? pair : 0)
                            : "memory");
                    }
                }
            __syncwarp();
            constexpr int UNITS = N;
#pragma unroll 4
            for (int n = lane; n < 16 * M * UNITS; n += 32) {
                const int r = row + n / UNITS, u = first / 8 + n % UNITS;
                if (r >= all || 8 * u >= size)
                    continue;
                uint32_t word[4];
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                             : "r"(unit_at<D>(base, r, u))
                             : "memory");
                *(uint4 *)((uint16_t *)to.data + at + r * to.stride[1] + 8 * u) =
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
                const int r = row + 16 * m + e / 2 * 8 + lane / 4, column = first + 8 * n + lane % 4 * 2 + e % 2;
                if (r >= all || column >= size)
                    continue;
                const int64_t to_at = at + r * to.stride[1] + column * to.stride[3];
                float value = r < rows ? factor[m][e / 2] * x[m][n][e] : 0.0f;
                if (accumulate)
                    value += load_at(to, to_at);
                cot_store(to.data, to.dtype, to_at, value);
            }
}

/* Zeros in the rows beyond the last packed sequence: the tiles of a head take them in turns. */
DEVICE void clear_rows(const attention_mma_call &c, const attention_view &to, int64_t first, int rows, int64_t head,
                       int tile, int64_t size)
{
    if (!given(to) || c.accumulate)
        return;
    for (int64_t n = tile * (int64_t)blockDim.x + threadIdx.x; n < rows * size; n += c.tiles * blockDim.x)
        cot_store(to.data, to.dtype, row_at(to, 0, first + n / size, head) + n % size * to.stride[3], 0.0f);
}

#endif
