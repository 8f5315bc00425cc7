/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_rows.cu: what the backward does row by row before and after its products. */
#include "attention_cuda.h"

#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/ptx.cuh"
#include "../../../cuda/device/wgmma.cuh"

enum { LANES = 32, WARPS = 8 };

#define KERNEL extern "C" __global__ void __launch_bounds__(LANES *WARPS)

/* A tile of queries of a head, heads beside each other: those lie together in memory. */
struct attention_tile {
    int64_t b, h, tile;
};

static __device__ __forceinline__ attention_tile tile_of(const attention_bwd_call &c, unsigned tiles)
{
    const unsigned row = blockIdx.x / (unsigned)c.H;
    return {row / tiles, blockIdx.x % (unsigned)c.H, row % tiles};
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
template <int D> static __device__ __forceinline__ void prepare(const attention_bwd_call &c)
{
    constexpr int ROW = D / 8, ROWS = LANES * WARPS / ROW, PARTS = ATTENTION_QUERIES / ROWS;
    cot_launch_dependents();
    const attention_tile t = tile_of(c, (unsigned)c.tiles * PARTS);
    const int lane = threadIdx.x % ROW;
    const int64_t head = t.b * c.H + t.h, i = t.tile * ROWS + threadIdx.x / ROW;
    const int64_t number = head * c.tiles * ATTENTION_QUERIES + i;
    if (t.tile % PARTS == 0 && threadIdx.x < D / 64)
        c.counters[(head * c.tiles + t.tile / PARTS) * (D / 64) + threadIdx.x] = 0;
    float delta = 0.0f, lse2 = __int_as_float(0x7f800000);
    if (i < c.Tq) {
        if (c.delta.data != nullptr) {
            delta = cot_load(c.delta.data, c.delta.dtype,
                             t.b * c.delta.stride[0] + t.h * c.delta.stride[1] + i * c.delta.stride[2]);
        } else {
            const int64_t out = t.b * c.out.stride[0] + i * c.out.stride[1] + t.h * c.out.stride[2] + 8 * lane;
            const int64_t dout = t.b * c.dout.stride[0] + i * c.dout.stride[1] + t.h * c.dout.stride[2] + 8 * lane;
            if (c.out_in_vectors) {
                const cot_words<4> a = cot_load_words<4>((const uint16_t *)c.out.data + out);
                const cot_words<4> b = cot_load_words<4>((const uint16_t *)c.dout.data + dout);
                delta = c.out.dtype == COT_F16 ? dot<__half>(a, b) : dot<__nv_bfloat16>(a, b);
            } else {
                for (int x = 0; x < 8; x++)
                    delta = fmaf(cot_load(c.out.data, c.out.dtype, out + x),
                                 cot_load(c.dout.data, c.dout.dtype, dout + x), delta);
            }
        }
        const float lse =
            cot_load(c.lse.data, c.lse.dtype, t.b * c.lse.stride[0] + t.h * c.lse.stride[1] + i * c.lse.stride[2]);
        if (lse != -lse2) /* -inf: no key */
            lse2 = 1.4426950408889634f * lse;
    }
    float4 *sums = (float4 *)(c.dq_sums + (number - threadIdx.x / ROW) * D) + threadIdx.x;
    __stcs(sums, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    __stcs(sums + LANES * WARPS, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    if (c.delta.data == nullptr) {
#pragma unroll
        for (int distance = ROW / 2; distance > 0; distance /= 2)
            delta += __shfl_xor_sync(0xffffffffu, delta, distance);
        if (c.dlse.data != nullptr && i < c.Tq)
            delta -= cot_load(c.dlse.data, c.dlse.dtype,
                              t.b * c.dlse.stride[0] + t.h * c.dlse.stride[1] + i * c.dlse.stride[2]);
    }
    if (lane == 0) {
        c.row_delta[number] = delta;
        c.lse2[number] = lse2;
    }
}

/* dq from its sums, which lie in the order of wgmma's accumulators: 16 queries of 64 columns are 4 KB, a float4 of them
 * two neighbouring columns of row r and two of row r + 8. A warp turns those 4 KB into rows through shared memory, whose
 * rows of 144 bytes take the accumulators' order and give sixteen bytes a lane, both without conflicts of banks. */
template <typename E, int D> static __device__ __forceinline__ void finish(const attention_bwd_call &c)
{
    constexpr unsigned SLICES = D / 64, PARTS = ATTENTION_QUERIES / 16;
    __shared__ __align__(16) uint32_t rows[WARPS][16][36];
    cot_wait_for_kernels_before();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const unsigned number = blockIdx.x * WARPS + warp, part = number % PARTS, slice = number / PARTS % SLICES;
    const unsigned above = number / PARTS / SLICES, heads = (unsigned)c.H, tiles = (unsigned)c.tiles;
    const int64_t h = above % heads, tile = above / heads % tiles, b = above / heads / tiles;
    const int64_t first = tile * ATTENTION_QUERIES + part * 16;
    if (b >= c.B || first >= c.Tq)
        return;
    const float4 *sums =
        (const float4 *)(c.dq_sums + (((b * c.H + h) * c.tiles + tile) * SLICES + slice) * ATTENTION_DQ_SLICE);
    float4 four[8];
#pragma unroll
    for (int group = 0; group < 8; group++)
        four[group] = __ldcs(sums + part * 256 + group * LANES + lane);
    const int64_t at = b * c.dq.stride[0] + h * c.dq.stride[2] + slice * 64;
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
            if (first + row < c.Tq)
                *(uint4 *)((E *)c.dq.data + at + (first + row) * c.dq.stride[1] + lane % 8 * 8) =
                    *(const uint4 *)&rows[warp][row][lane % 8 * 4];
        return;
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const float sums_of[4] = {four[i / 4].x, four[i / 4].y, four[i / 4].z, four[i / 4].w};
        const int64_t row = first + lane / 4 + 8 * (i / 2 % 2);
        if (row >= c.Tq)
            continue;
        const int64_t to = at + row * c.dq.stride[1] + i / 4 * 8 + 2 * (lane % 4) + i % 2;
        const float before = c.accumulate ? cot_load(c.dq.data, c.dq.dtype, to) : 0.0f;
        cot_store(c.dq.data, c.dq.dtype, to, fmaf(c.scale, sums_of[i % 4], before));
    }
}

#define PREPARE(d)                                                                  \
    KERNEL attention_bwd_prepare_d##d(const __grid_constant__ attention_bwd_call c) \
    {                                                                               \
        prepare<d>(c);                                                              \
    }
#define FINISH(name, element, d)                                                            \
    KERNEL attention_bwd_finish_##name##_d##d(const __grid_constant__ attention_bwd_call c) \
    {                                                                                       \
        finish<element, d>(c);                                                              \
    }
PREPARE(64)
PREPARE(128)
PREPARE(256)
FINISH(bf16, __nv_bfloat16, 64)
FINISH(bf16, __nv_bfloat16, 128)
FINISH(bf16, __nv_bfloat16, 256)
FINISH(f16, __half, 64)
FINISH(f16, __half, 128)
FINISH(f16, __half, 256)
