/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_delta_merge.cu: row kernels with eight lanes per row: lse and delta before the portable backward's
 * products, dq and dsink after them, and delta and merge. */
#include "attention_sm80.cuh"

enum { LANES = ATTENTION_ROW_LANES, THREADS = ATTENTION_ROW_THREADS, ROWS = THREADS / LANES };

#define KERNEL(name, call) \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_##name(const __grid_constant__ call c)

DEVICE float add_lanes(float sum)
{
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return sum;
}

template <typename E>
DEVICE float dot_of_vectors(const attention_view &a, int64_t a_offset, const attention_view &b, int64_t b_offset,
                            int64_t size)
{
    float sum = 0.0f;
    for (int64_t x = 8 * (threadIdx.x % LANES); x < size; x += 8 * LANES) {
        const cot_words<4> a_words = cot_load_words<4>((const uint16_t *)a.data + a_offset + x);
        const cot_words<4> b_words = cot_load_words<4>((const uint16_t *)b.data + b_offset + x);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 u = cot_unpack_pair<E>(a_words.word[i]), w = cot_unpack_pair<E>(b_words.word[i]);
            sum = fmaf(u.x, w.x, fmaf(u.y, w.y, sum));
        }
    }
    return sum;
}

/* This lane's part of the dot product of two rows. */
DEVICE float dot(const attention_view &a, int64_t a_offset, const attention_view &b, int64_t b_offset, int64_t size)
{
    if (a.vectorized && b.vectorized && a.dtype == b.dtype)
        return a.dtype == COT_F16 ? dot_of_vectors<__half>(a, a_offset, b, b_offset, size)
                                  : dot_of_vectors<__nv_bfloat16>(a, a_offset, b, b_offset, size);
    float sum = 0.0f;
#pragma unroll 1 /* unrolled, it makes ptxas spill for compute capability 8.0 */
    for (int64_t x = threadIdx.x % LANES; x < size; x += LANES)
        sum = fmaf(load_at(a, a_offset + x * a.stride[3]), load_at(b, b_offset + x * b.stride[3]), sum);
    return sum;
}

/* ---- before the products ----------------------------------------------------------------------------------------- */

DEVICE void store_statistics(const attention_sm80_call &c, int64_t number, float lse, float delta)
{
    if (threadIdx.x % LANES != 0)
        return;
    c.row_lse[number] = lse;
    c.row_delta[number] = delta;
}

KERNEL(bwd_preprocess, attention_sm80_call)
{
    const block_coord coord = block_coord_of(c, c.H);
    const sequence s = sequence_at(c, coord.b);
    const int64_t h = coord.head, row = coord.tile * (int64_t)ROWS + threadIdx.x / LANES;
    if (c.packed && coord.b == c.B) {
        for (int64_t i = row; i < s.q_rows; i += c.tiles * ROWS)
            store_statistics(c, h * c.rows_q + s.q_first_row + i, INFINITE, 0.0f);
        return;
    }
    const bool in_range = row < s.used_q;
    float lse = INFINITE, delta = 0.0f;
    if (in_range) {
        const int64_t i = s.q_first_row + row;
        lse = load_at(c.lse, statistic_offset(c.lse, s.b, h, i));
        lse = lse == -INFINITE ? INFINITE : c.lse_factor * lse;
        if (is_present(c.delta))
            delta = load_at(c.delta, statistic_offset(c.delta, s.b, h, i));
        else
            delta = dot(c.out, row_offset(c.out, s.b, i, h), c.dout, row_offset(c.dout, s.b, i, h), c.d_v);
    }
    if (!is_present(c.delta)) {
        delta = add_lanes(delta);
        if (in_range && is_present(c.dlse))
            delta -= load_at(c.dlse, statistic_offset(c.dlse, s.b, h, s.q_first_row + row));
    }
    if (row < s.q_rows)
        store_statistics(c, statistic_row(c, s, h) + row, lse, delta);
    if (c.dq_accum != nullptr && coord.tile * (int64_t)ROWS < s.used_q) {
        float4 *const accum =
            (float4 *)(c.dq_accum + (first_accum_row(c, s, h) + coord.tile * (int64_t)ROWS) * c.accum_columns);
        for (int n = threadIdx.x; n < ROWS * (int)c.accum_columns / 4; n += THREADS)
            accum[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

/* ---- dq from dq_accum -------------------------------------------------------------------------------------------- */

/* A warp takes 8 rows of 32 columns at a time, a lane 8 columns of a row. In dq_accum the even columns are four
 * adjacent floats, and so are the odd columns. */
KERNEL(dq_rows, attention_sm80_call)
{
    const block_coord coord = block_coord_of(c, c.H);
    const sequence s = sequence_at(c, coord.b);
    const int64_t h = coord.head, size = c.accum_columns;
    if (c.packed && coord.b == c.B) {
        clear_rows(c, c.dq, s.q_first_row, s.q_rows, h, coord.tile, c.d);
        return;
    }
    const int first_row = coord.tile * ROWS, lane = threadIdx.x % 32;
    for (int n = threadIdx.x / 32; n < (int)size / 32 * (ROWS / 8); n += THREADS / 32) {
        const int row = first_row + n % (ROWS / 8) * 8 + lane % 8, column = n / (ROWS / 8) * 32 + lane / 8 * 8;
        if (row >= s.q_rows || column >= c.d)
            continue;
        float value[8] = {};
        if (row < s.used_q) {
            const float4 *const from = (const float4 *)(c.dq_accum + (first_accum_row(c, s, h) + row / 16 * 16) * size +
                                                        column * 16 + row % 16 / 8 * 64 + lane % 8 * 4);
            const float4 even = from[0], odd = from[8];
            value[0] = c.scale * even.x, value[2] = c.scale * even.y, value[4] = c.scale * even.z;
            value[6] = c.scale * even.w, value[1] = c.scale * odd.x, value[3] = c.scale * odd.y;
            value[5] = c.scale * odd.z, value[7] = c.scale * odd.w;
        }
        const int64_t to = row_offset(c.dq, s.b, s.q_first_row + row, h) + column * c.dq.stride[3];
        if (c.dq.vectorized && !c.accumulate) {
            uint32_t words[4];
#pragma unroll
            for (int x = 0; x < 4; x++)
                words[x] = c.dq.dtype == COT_F16 ? cot_pack_pair<__half>(value[2 * x], value[2 * x + 1])
                                                 : cot_pack_pair<__nv_bfloat16>(value[2 * x], value[2 * x + 1]);
            *(uint4 *)((uint16_t *)c.dq.data + to) = make_uint4(words[0], words[1], words[2], words[3]);
            continue;
        }
#pragma unroll
        for (int x = 0; x < 8; x++)
            if (column + x < c.d) {
                const int64_t element = to + x * c.dq.stride[3];
                const float old = c.accumulate ? load_at(c.dq, element) : 0.0f;
                cot_store(c.dq.data, c.dq.dtype, element, old + value[x]);
            }
    }
}

/* ---- dsink ------------------------------------------------------------------------------------------------------- */

/* A block takes a head, each thread every THREADSth row. */
KERNEL(dsink, attention_sm80_call)
{
    __shared__ double partial_sums[THREADS];
    const int64_t h = blockIdx.x;
    const float sink = load_at(c.sink, h * c.sink.stride[0]);
    double sum = 0;
    for (int64_t i = threadIdx.x; i < c.rows_q; i += THREADS) {
        const float lse = c.row_lse[h * c.rows_q + i];
        if (lse != INFINITE)
            sum -= (double)(expf(sink - lse / c.lse_factor) * c.row_delta[h * c.rows_q + i]);
    }
    partial_sums[threadIdx.x] = sum;
    for (int distance = THREADS / 2; distance > 0; distance /= 2) {
        __syncthreads();
        if (threadIdx.x < distance)
            partial_sums[threadIdx.x] += partial_sums[threadIdx.x + distance];
    }
    if (threadIdx.x > 0)
        return;
    const int64_t element = h * c.dsink.stride[0];
    const double old = c.accumulate ? load_at(c.dsink, element) : 0.0;
    cot_store(c.dsink.data, c.dsink.dtype, element, (float)(old + partial_sums[0]));
}

/* ---- delta and merge --------------------------------------------------------------------------------------------- */

KERNEL(delta_rows, attention_delta_call)
{
    const int64_t number = blockIdx.x * (int64_t)ROWS + threadIdx.x / LANES;
    const int64_t h = number % c.H, i = number / c.H % c.Tq, b = number / c.H / c.Tq;
    const bool in_range = b < c.B;
    const float sum =
        add_lanes(in_range ? dot(c.out, row_offset(c.out, b, i, h), c.dout, row_offset(c.dout, b, i, h), c.d_v) : 0.0f);
    if (!in_range || threadIdx.x % LANES != 0)
        return;
    const float dlse = is_present(c.dlse) ? load_at(c.dlse, statistic_offset(c.dlse, b, h, i)) : 0.0f;
    ((float *)c.delta.data)[statistic_offset(c.delta, b, h, i)] = sum - dlse;
}

KERNEL(merge_rows, attention_merge_call)
{
    const int64_t number = blockIdx.x * (int64_t)ROWS + threadIdx.x / LANES;
    const int64_t h = number % c.H, i = number / c.H % c.Tq, b = number / c.H / c.Tq;
    const bool in_range = b < c.B;
    float lse_a = 0.0f, lse_b = 0.0f;
    if (in_range) {
        lse_a = load_at(c.lse_a, statistic_offset(c.lse_a, b, h, i));
        lse_b = load_at(c.lse_b, statistic_offset(c.lse_b, b, h, i));
    }
    __syncwarp(); /* all lanes have read lse_a, which may be lse */
    if (!in_range)
        return;
    const float sink = is_present(c.sink) ? load_at(c.sink, h * c.sink.stride[0]) : -INFINITE;
    const float max_lse = fmaxf(fmaxf(lse_a, lse_b), sink);
    const bool none = lse_a == -INFINITE && lse_b == -INFINITE && sink == -INFINITE; /* fmaxf drops NaN */
    const float weight_a = none ? 0.0f : expf(lse_a - max_lse), weight_b = none ? 0.0f : expf(lse_b - max_lse);
    const float sum = none ? 1.0f : weight_a + weight_b + expf(sink - max_lse);
    if (is_present(c.out)) {
        const int64_t offset_a = row_offset(c.out_a, b, i, h), offset_b = row_offset(c.out_b, b, i, h),
                      offset = row_offset(c.out, b, i, h);
        for (int64_t x = threadIdx.x % LANES; x < c.d_v; x += LANES) {
            const float a_value = load_at(c.out_a, offset_a + x * c.out_a.stride[3]);
            const float b_value = load_at(c.out_b, offset_b + x * c.out_b.stride[3]);
            cot_store(c.out.data, c.out.dtype, offset + x * c.out.stride[3],
                      none ? 0.0f : (weight_a * a_value + weight_b * b_value) / sum);
        }
    }
    if (is_present(c.lse) && threadIdx.x % LANES == 0)
        ((float *)c.lse.data)[statistic_offset(c.lse, b, h, i)] = none ? -INFINITE : max_lse + logf(sum);
}
