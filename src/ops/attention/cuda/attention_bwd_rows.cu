/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_rows.cu: what the backward does row by row before and after its products. */
#include "attention_place.cuh"

#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/ptx.cuh"
#include "../../../cuda/device/wgmma.cuh"

enum { LANES = 32, WARPS = 8 };

#define KERNEL extern "C" __global__ void __launch_bounds__(LANES *WARPS)

/* A tile of queries of a head. b: of the tensors' views; number: of all tiles, in the order of lse2's rows. */
struct attention_tile {
    int64_t b, h, tile, number;
    int64_t q_row, rows, used; /* of its sequence */
};

/* Tile `above` of all heads, heads beside each other: those lie together in memory. False: there are fewer. */
template <bool ALL>
static __device__ __forceinline__ bool tile_of(const attention_bwd_call &c, unsigned above, attention_tile &t)
{
    const unsigned row = above / (unsigned)c.H;
    t.h = above % (unsigned)c.H;
    if (!ALL) {
        t.b = row / (unsigned)c.tiles;
        t.tile = row % (unsigned)c.tiles;
        t.number = (t.b * c.H + t.h) * c.tiles + t.tile;
        t.q_row = 0;
        t.rows = t.used = c.Tq;
        return t.b < c.B;
    }
    if (row >= (unsigned)c.place.table[c.place.sequences].first_tile)
        return false;
    const int low = attention_sequence_of(c.place, &attention_placed::first_tile, 1, row);
    const attention_placed s = c.place.table[low];
    t.b = c.place.packed ? 0 : low;
    t.tile = (int)row - s.first_tile;
    t.number = (int64_t)s.first_tile * c.H + t.h * (c.place.table[low + 1].first_tile - s.first_tile) + t.tile;
    t.q_row = s.q_row;
    t.rows = s.q_rows;
    t.used = s.used_q;
    return t.rows > 0; /* else there was no room for it */
}

template <typename E> static __device__ __forceinline__ float dot(const cot_words<4> &a, const cot_words<4> &b)
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 x = cot_unpack_pair<E>(a.word[i]), y = cot_unpack_pair<E>(b.word[i]);
        sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
    }
    return sum;
}

/* lse in base 2, D = rowsum(dout * out) - dlse, and zeros for the sums of dq and the counters: D / 8 lanes a query. */
template <int D, bool ALL> static __device__ __forceinline__ void prepare(const attention_bwd_call &c)
{
    constexpr int ROW = D / 8, ROWS = LANES * WARPS / ROW, PARTS = ATTENTION_QUERIES / ROWS;
    cot_launch_dependents();
    const unsigned heads = (unsigned)c.H, above = blockIdx.x / heads; /* parts of a tile are as far apart as tiles */
    attention_tile t;
    if (!tile_of<ALL>(c, above / PARTS * heads + blockIdx.x % heads, t))
        return;
    const int lane = threadIdx.x % ROW, part = (int)(above % PARTS);
    const int64_t i = t.tile * ATTENTION_QUERIES + part * ROWS + threadIdx.x / ROW, row = t.q_row + i;
    const int64_t number = t.number * ATTENTION_QUERIES + part * ROWS + threadIdx.x / ROW;
    if (part == 0 && threadIdx.x < D / 64)
        c.counters[t.number * (D / 64) + threadIdx.x] = 0;
    float delta = 0.0f, lse2 = __int_as_float(0x7f800000);
    if (i < t.used) {
        if (c.delta.data != nullptr) {
            delta = cot_load(c.delta.data, c.delta.dtype,
                             t.b * c.delta.stride[0] + t.h * c.delta.stride[1] + row * c.delta.stride[2]);
        } else if (!ALL || 8 * lane < c.dv) {
            const int64_t out = t.b * c.out.stride[0] + row * c.out.stride[1] + t.h * c.out.stride[2] + 8 * lane;
            const int64_t dout = t.b * c.dout.stride[0] + row * c.dout.stride[1] + t.h * c.dout.stride[2] + 8 * lane;
            if (c.out_in_vectors) {
                const cot_words<4> a = cot_load_words<4>((const uint16_t *)c.out.data + out);
                const cot_words<4> b = cot_load_words<4>((const uint16_t *)c.dout.data + dout);
                delta = c.out.dtype == COT_F16 ? dot<__half>(a, b) : dot<__nv_bfloat16>(a, b);
            } else {
                for (int x = 0; x < 8 && (!ALL || 8 * lane + x < c.dv); x++)
                    delta = fmaf(cot_load(c.out.data, c.out.dtype, out + x),
                                 cot_load(c.dout.data, c.dout.dtype, dout + x), delta);
            }
        }
        const float lse =
            cot_load(c.lse.data, c.lse.dtype, t.b * c.lse.stride[0] + t.h * c.lse.stride[1] + row * c.lse.stride[2]);
        if (lse != -lse2) /* -inf: no key */
            lse2 = fmaf(1.4426950408889634f, lse, -c.raise);
    }
    float4 *sums = (float4 *)(c.dq_sums + (number - threadIdx.x / ROW) * D) + threadIdx.x;
    __stcs(sums, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    __stcs(sums + LANES * WARPS, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    if (c.delta.data == nullptr) {
#pragma unroll
        for (int distance = ROW / 2; distance > 0; distance /= 2)
            delta += __shfl_xor_sync(0xffffffffu, delta, distance);
        if (c.dlse.data != nullptr && i < t.used)
            delta -= cot_load(c.dlse.data, c.dlse.dtype,
                              t.b * c.dlse.stride[0] + t.h * c.dlse.stride[1] + row * c.dlse.stride[2]);
    }
    if (lane == 0) {
        c.row_delta[number] = c.lower * delta;
        c.lse2[number] = lse2;
    }
}

/* dq from its sums, which lie in the order of wgmma's accumulators: 16 queries of 64 columns are 4 KB, a float4 of them
 * two neighbouring columns of row r and two of row r + 8. A warp turns those 4 KB into rows through shared memory, whose
 * rows of 144 bytes take the accumulators' order and give sixteen bytes a lane, both without conflicts of banks. */
template <typename E, int D, bool ALL> static __device__ __forceinline__ void finish(const attention_bwd_call &c)
{
    constexpr unsigned SLICES = D / 64, PARTS = ATTENTION_QUERIES / 16;
    __shared__ __align__(16) uint32_t rows[WARPS][16][36];
    cot_wait_for_kernels_before();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const unsigned number = blockIdx.x * WARPS + warp, part = number % PARTS, slice = number / PARTS % SLICES;
    attention_tile t;
    if (!tile_of<ALL>(c, number / PARTS / SLICES, t))
        return;
    const int64_t first = t.tile * ATTENTION_QUERIES + part * 16;
    const int columns = ALL ? (int)c.d - (int)slice * 64 : 64; /* of this slice that there are */
    if (first >= t.rows || columns <= 0)
        return;
    const float4 *sums = (const float4 *)(c.dq_sums + (t.number * SLICES + slice) * ATTENTION_DQ_SLICE);
    float4 four[8];
#pragma unroll
    for (int group = 0; group < 8; group++)
        four[group] = __ldcs(sums + part * 256 + group * LANES + lane);
    const int64_t at = t.b * c.grad_q.stride[0] + t.q_row * c.grad_q.stride[1] + t.h * c.grad_q.stride[2] + slice * 64;
    if (c.dq_in_vectors) {
#pragma unroll
        for (int group = 0; group < 8; group++) {
            uint32_t *to = &rows[warp][lane / 4][4 * group + lane % 4];
            to[0] = cot_pack_pair<E>(c.scale * four[group].x, c.scale * four[group].y);
            to[8 * 36] = cot_pack_pair<E>(c.scale * four[group].z, c.scale * four[group].w);
        }
        __syncwarp();
#pragma unroll
        for (int row = lane / 8; row < 16; row += 4)
            if (first + row < t.rows && lane % 8 * 8 < columns)
                *(uint4 *)((E *)c.grad_q.data + at + (first + row) * c.grad_q.stride[1] + lane % 8 * 8) =
                    !ALL || first + row < t.used ? *(const uint4 *)&rows[warp][row][lane % 8 * 4]
                                                 : make_uint4(0, 0, 0, 0);
        return;
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const float sums_of[4] = {four[i / 4].x, four[i / 4].y, four[i / 4].z, four[i / 4].w};
        const int64_t row = first + lane / 4 + 8 * (i / 2 % 2);
        const int column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
        if (row >= t.rows || column >= columns)
            continue;
        const int64_t to = at + row * c.grad_q.stride[1] + column;
        const float before = c.accumulate ? cot_load(c.grad_q.data, c.grad_q.dtype, to) : 0.0f;
        cot_store(c.grad_q.data, c.grad_q.dtype, to,
                  !ALL || row < t.used ? fmaf(c.scale, sums_of[i % 4], before) : before);
    }
}

/* dsink[h] = -sum over queries of exp(sink[h] - lse) D: a block a head, each thread every 256th row of a sequence, in
 * double. Rows that do not count have lse2 = inf. */
KERNEL attention_bwd_dsink(const __grid_constant__ attention_bwd_call c)
{
    __shared__ double sums[LANES * WARPS];
    const int64_t h = blockIdx.x;
    const float sink2 = fmaf(1.4426950408889634f, cot_load(c.sink.data, c.sink.dtype, h * c.sink.stride[0]), -c.raise);
    const attention_placed *table = c.place.table;
    double sum = 0;
    for (int b = 0; b < c.place.sequences; b++) {
        if (table != nullptr && table[b].q_rows == 0)
            continue;
        const int64_t tiles = table != nullptr ? table[b + 1].first_tile - table[b].first_tile : c.tiles;
        const int64_t before = table != nullptr ? table[b].first_tile * c.H : b * c.H * c.tiles;
        const int64_t begin = (before + h * tiles) * ATTENTION_QUERIES;
        for (int64_t i = begin + threadIdx.x; i < begin + tiles * ATTENTION_QUERIES; i += LANES * WARPS)
            if (c.lse2[i] != __int_as_float(0x7f800000)) /* else the row passes no gradient, whatever its D is */
                sum -= (double)(exp2f(sink2 - c.lse2[i]) * c.row_delta[i]);
    }
    sums[threadIdx.x] = sum;
    for (int half = LANES * WARPS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x > 0)
        return;
    const int64_t to = h * c.dsink.stride[0];
    const double before = c.accumulate ? cot_load(c.dsink.data, c.dsink.dtype, to) : 0.0;
    cot_store(c.dsink.data, c.dsink.dtype, to, (float)(before + sums[0] / c.lower));
}

#define PREPARE(name, d, all)                                                         \
    KERNEL attention_bwd_prepare_##name(const __grid_constant__ attention_bwd_call c) \
    {                                                                                 \
        prepare<d, all>(c);                                                           \
    }
#define FINISH(name, element, d, all)                                                \
    KERNEL attention_bwd_finish_##name(const __grid_constant__ attention_bwd_call c) \
    {                                                                                \
        finish<element, d, all>(c);                                                  \
    }
PREPARE(d64, 64, false)
PREPARE(d128, 128, false)
PREPARE(d256, 256, false)
PREPARE(d64_all, 64, true)
PREPARE(d128_all, 128, true)
FINISH(bf16_d64, __nv_bfloat16, 64, false)
FINISH(bf16_d128, __nv_bfloat16, 128, false)
FINISH(bf16_d256, __nv_bfloat16, 256, false)
FINISH(f16_d64, __half, 64, false)
FINISH(f16_d128, __half, 128, false)
FINISH(f16_d256, __half, 256, false)
FINISH(bf16_d64_all, __nv_bfloat16, 64, true)
FINISH(bf16_d128_all, __nv_bfloat16, 128, true)
FINISH(f16_d64_all, __half, 64, true)
FINISH(f16_d128_all, __half, 128, true)
