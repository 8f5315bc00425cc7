/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_rows.cu: what goes row by row, eight lanes a row: lse and D before the portable backward's products, dsink
 * after them, and delta and merge. */
#include "attention_mma.cuh"

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
DEVICE float dot_of_vectors(const attention_view &a, int64_t a_at, const attention_view &b, int64_t b_at, int64_t size)
{
    float sum = 0.0f;
    for (int64_t x = 8 * (threadIdx.x % LANES); x < size; x += 8 * LANES) {
        const cot_words<4> one = cot_load_words<4>((const uint16_t *)a.data + a_at + x);
        const cot_words<4> other = cot_load_words<4>((const uint16_t *)b.data + b_at + x);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 u = cot_unpack_pair<E>(one.word[i]), w = cot_unpack_pair<E>(other.word[i]);
            sum = fmaf(u.x, w.x, fmaf(u.y, w.y, sum));
        }
    }
    return sum;
}

/* The product of two rows; this lane's part. */
DEVICE float dot(const attention_view &a, int64_t a_at, const attention_view &b, int64_t b_at, int64_t size)
{
    if (a.vectors && b.vectors && a.dtype == b.dtype)
        return a.dtype == COT_F16 ? dot_of_vectors<__half>(a, a_at, b, b_at, size)
                                  : dot_of_vectors<__nv_bfloat16>(a, a_at, b, b_at, size);
    float sum = 0.0f;
#pragma unroll 1 /* unrolled, it makes ptxas spill for compute capability 8.0 */
    for (int64_t x = threadIdx.x % LANES; x < size; x += LANES)
        sum = fmaf(load_at(a, a_at + x * a.stride[3]), load_at(b, b_at + x * b.stride[3]), sum);
    return sum;
}

/* ---- before the products --------------------------------------------------------------------------------------- */

DEVICE void store_statistics(const attention_mma_call &c, int64_t number, float lse, float delta)
{
    if (threadIdx.x % LANES != 0)
        return;
    c.row_lse[number] = lse;
    c.row_delta[number] = delta;
}

KERNEL(prepare, attention_mma_call)
{
    const place at = place_of(c, c.H);
    const sequence s = sequence_at(c, at.b);
    const int64_t h = at.head, first = at.tile * (int64_t)ROWS + threadIdx.x / LANES;
    if (c.packed && at.b == c.B) {
        for (int64_t i = first; i < s.q_rows; i += c.tiles * ROWS)
            store_statistics(c, h * c.rows_q + s.q_row + i, INFINITE, 0.0f);
        return;
    }
    const bool there = first < s.Tq;
    float lse = INFINITE, delta = 0.0f;
    if (there) {
        const int64_t i = s.q_row + first;
        lse = load_at(c.lse, statistic_at(c.lse, s.b, h, i));
        lse = lse == -INFINITE ? INFINITE : c.lse_factor * lse;
        if (given(c.delta))
            delta = load_at(c.delta, statistic_at(c.delta, s.b, h, i));
        else
            delta = dot(c.out, row_at(c.out, s.b, i, h), c.dout, row_at(c.dout, s.b, i, h), c.dv);
    }
    if (!given(c.delta)) {
        delta = add_lanes(delta);
        if (there && given(c.dlse))
            delta -= load_at(c.dlse, statistic_at(c.dlse, s.b, h, s.q_row + first));
    }
    if (first < s.q_rows)
        store_statistics(c, number_of_row(c, s, h) + first, lse, delta);
    if (c.dq_sums != nullptr && at.tile * (int64_t)ROWS < s.Tq) {
        float4 *const sums = (float4 *)(c.dq_sums + (first_sum(c, s, h) + at.tile * (int64_t)ROWS) * c.sum_columns);
        for (int n = threadIdx.x; n < ROWS * (int)c.sum_columns / 4; n += THREADS)
            sums[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

/* ---- dq from its sums -------------------------------------------------------------------------------------------- */

/* A warp takes eight rows of 32 columns at a time, eight columns of a row a lane: even ones and odd ones are four floats
 * each. */
KERNEL(dq_rows, attention_mma_call)
{
    const place at = place_of(c, c.H);
    const sequence s = sequence_at(c, at.b);
    const int64_t h = at.head, size = c.sum_columns;
    if (c.packed && at.b == c.B) {
        clear_rows(c, c.grad_q, s.q_row, s.q_rows, h, at.tile, c.d);
        return;
    }
    const int first = at.tile * ROWS, lane = threadIdx.x % 32;
    for (int n = threadIdx.x / 32; n < (int)size / 32 * (ROWS / 8); n += THREADS / 32) {
        const int row = first + n % (ROWS / 8) * 8 + lane % 8, column = n / (ROWS / 8) * 32 + lane / 8 * 8;
        if (row >= s.q_rows || column >= c.d)
            continue;
        float value[8] = {};
        if (row < s.Tq) {
            const float4 *const from = (const float4 *)(c.dq_sums + (first_sum(c, s, h) + row / 16 * 16) * size +
                                                        column * 16 + row % 16 / 8 * 64 + lane % 8 * 4);
            const float4 even = from[0], odd = from[8];
            value[0] = c.scale * even.x, value[2] = c.scale * even.y, value[4] = c.scale * even.z;
            value[6] = c.scale * even.w, value[1] = c.scale * odd.x, value[3] = c.scale * odd.y;
            value[5] = c.scale * odd.z, value[7] = c.scale * odd.w;
        }
        const int64_t to = row_at(c.grad_q, s.b, s.q_row + row, h) + column * c.grad_q.stride[3];
        if (c.grad_q.vectors && !c.accumulate) {
            uint32_t pair[4];
#pragma unroll
            for (int x = 0; x < 4; x++)
                pair[x] = c.grad_q.dtype == COT_F16 ? cot_pack_pair<__half>(value[2 * x], value[2 * x + 1])
                                                    : cot_pack_pair<__nv_bfloat16>(value[2 * x], value[2 * x + 1]);
            *(uint4 *)((uint16_t *)c.grad_q.data + to) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
            continue;
        }
#pragma unroll
        for (int x = 0; x < 8; x++)
            if (column + x < c.d) {
                const int64_t one = to + x * c.grad_q.stride[3];
                const float before = c.accumulate ? load_at(c.grad_q, one) : 0.0f;
                cot_store(c.grad_q.data, c.grad_q.dtype, one, before + value[x]);
            }
    }
}

/* ---- dsink ------------------------------------------------------------------------------------------------------- */

/* A block a head: each thread takes every THREADSth row. */
KERNEL(dsink, attention_mma_call)
{
    __shared__ double sums[THREADS];
    const int64_t h = blockIdx.x;
    const float sink = load_at(c.sink, h * c.sink.stride[0]);
    double sum = 0;
    for (int64_t i = threadIdx.x; i < c.rows_q; i += THREADS) {
        const float lse = c.row_lse[h * c.rows_q + i];
        if (lse != INFINITE)
            sum -= (double)(expf(sink - lse / c.lse_factor) * c.row_delta[h * c.rows_q + i]);
    }
    sums[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x > 0)
        return;
    const int64_t to = h * c.dsink.stride[0];
    const double before = c.accumulate ? load_at(c.dsink, to) : 0.0;
    cot_store(c.dsink.data, c.dsink.dtype, to, (float)(before + sums[0]));
}

/* ---- delta and merge --------------------------------------------------------------------------------------------- */

KERNEL(delta_rows, attention_delta_call)
{
    const int64_t number = blockIdx.x * (int64_t)ROWS + threadIdx.x / LANES;
    const int64_t h = number % c.H, i = number / c.H % c.Tq, b = number / c.H / c.Tq;
    const bool there = b < c.B;
    const float sum =
        add_lanes(there ? dot(c.out, row_at(c.out, b, i, h), c.dout, row_at(c.dout, b, i, h), c.dv) : 0.0f);
    if (!there || threadIdx.x % LANES != 0)
        return;
    const float less = given(c.dlse) ? load_at(c.dlse, statistic_at(c.dlse, b, h, i)) : 0.0f;
    ((float *)c.delta.data)[statistic_at(c.delta, b, h, i)] = sum - less;
}

KERNEL(merge_rows, attention_merge_call)
{
    const int64_t number = blockIdx.x * (int64_t)ROWS + threadIdx.x / LANES;
    const int64_t h = number % c.H, i = number / c.H % c.Tq, b = number / c.H / c.Tq;
    const bool there = b < c.B;
    float lse_a = 0.0f, lse_b = 0.0f;
    if (there) {
        lse_a = load_at(c.lse_a, statistic_at(c.lse_a, b, h, i));
        lse_b = load_at(c.lse_b, statistic_at(c.lse_b, b, h, i));
    }
    __syncwarp(); /* lse may be lse_a */
    if (!there)
        return;
    const float sink = given(c.sink) ? load_at(c.sink, h * c.sink.stride[0]) : -INFINITE;
    const float most = fmaxf(fmaxf(lse_a, lse_b), sink);
    const bool none = lse_a == -INFINITE && lse_b == -INFINITE && sink == -INFINITE; /* fmaxf drops NaN */
    const float weight_a = none ? 0.0f : expf(lse_a - most), weight_b = none ? 0.0f : expf(lse_b - most);
    const float sum = none ? 1.0f : weight_a + weight_b + expf(sink - most);
    if (given(c.out)) {
        const int64_t at_a = row_at(c.out_a, b, i, h), at_b = row_at(c.out_b, b, i, h), at = row_at(c.out, b, i, h);
        for (int64_t x = threadIdx.x % LANES; x < c.dv; x += LANES) {
            const float first = load_at(c.out_a, at_a + x * c.out_a.stride[3]);
            const float second = load_at(c.out_b, at_b + x * c.out_b.stride[3]);
            cot_store(c.out.data, c.out.dtype, at + x * c.out.stride[3],
                      none ? 0.0f : (weight_a * first + weight_b * second) / sum);
        }
    }
    if (given(c.lse) && threadIdx.x % LANES == 0)
        ((float *)c.lse.data)[statistic_at(c.lse, b, h, i)] = none ? -INFINITE : most + logf(sum);
}
