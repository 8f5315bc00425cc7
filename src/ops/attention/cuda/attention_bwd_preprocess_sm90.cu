/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_preprocess_sm90.cu: the kernels before and after the main kernel of the backward for Hopper:
 * preprocess, postprocess and dsink. */
#include "attention_bwd_store.cuh"
#include "attention_varlen.cuh"

#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/ptx.cuh"
#include "../../../cuda/device/wgmma.cuh"

enum { LANES = 32, WARPS = 8 };

#define KERNEL extern "C" __global__ void __launch_bounds__(LANES *WARPS)

/* A query tile of a head. b: of the tensors' views; index: among all tiles, in the order of lse_log2. */
struct attention_tile {
    int64_t b, h, tile, index;
    int64_t q_first_row, rows, used; /* first row, rows and used rows of its sequence */
    int sequence;                    /* its sequence; only if GENERAL */
};

/* Finds tile number tile_index among the tiles of the first `heads` heads of each batch element. The head is the fastest
 * index, because the heads of a row are adjacent in memory. Returns false if there are fewer tiles. */
template <bool GENERAL>
static __device__ __forceinline__ bool find_tile(const attention_bwd_call &c, unsigned heads, unsigned tile_index,
                                                 attention_tile &t)
{
    const unsigned sequence_tile = tile_index / heads;
    t.h = tile_index % heads;
    if (!GENERAL) {
        t.b = sequence_tile / (unsigned)c.tiles_per_head;
        t.tile = sequence_tile % (unsigned)c.tiles_per_head;
        t.index = (t.b * c.H + t.h) * c.tiles_per_head + t.tile;
        t.q_first_row = 0;
        t.rows = t.used = c.Tq;
        return t.b < c.B;
    }
    if (sequence_tile >= (unsigned)c.sequences.seqlens[c.sequences.count].tiles_before)
        return false;
    const int sequence = attention_find_sequence(c.sequences, &attention_seqlen_info::tiles_before, 1, sequence_tile);
    const attention_seqlen_info sequence_info = c.sequences.seqlens[sequence];
    t.sequence = sequence;
    t.b = c.sequences.packed ? 0 : sequence;
    t.tile = (int)sequence_tile - sequence_info.tiles_before;
    t.index = (int64_t)sequence_info.tiles_before * c.H +
              t.h * (c.sequences.seqlens[sequence + 1].tiles_before - sequence_info.tiles_before) + t.tile;
    t.q_first_row = sequence_info.q_first_row;
    t.rows = sequence_info.q_rows;
    t.used = sequence_info.used_q;
    return t.rows > 0; /* 0 rows: the sequence exceeds max_tiles */
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

/* Whether the tile's queries attend to any key, so that some key block of the main kernel adds to its dQ. If none does,
 * preprocess clears the tile even in deterministic mode. */
template <int QUERIES, bool GENERAL>
static __device__ __forceinline__ bool is_visited(const attention_bwd_call &c, const attention_tile &t)
{
    const int first_query = (int)t.tile * QUERIES;
    attention_unit_range range;
    if (GENERAL) {
        const attention_seqlen_info s = c.sequences.seqlens[t.sequence];
        range = attention_unit_range_of(
            first_query, QUERIES, s.used_q, s.used_k,
            attention_clamp(s.diagonal - c.left, -ATTENTION_UNBOUNDED_32, ATTENTION_UNBOUNDED_32),
            attention_clamp(s.diagonal + c.right, -ATTENTION_UNBOUNDED_32, ATTENTION_UNBOUNDED_32));
    } else {
        range = attention_unit_range_of(
            first_query, QUERIES, (int)c.Tq, (int)c.Tk, -ATTENTION_UNBOUNDED_32,
            c.causal ? attention_clamp(c.diagonal, -ATTENTION_UNBOUNDED_32, ATTENTION_UNBOUNDED_32)
                     : ATTENTION_UNBOUNDED_32);
    }
    return range.last >= range.first;
}

/* Clears a thread's elements of a tile of dQ: in dq_accum, or in dq itself if the main kernel stores dq (stores_dq).
 *   lane               of the ROW_LANES lanes of a row
 *   row                the query's row in the tensor
 *   i                  the query's row in its sequence
 *   statistics_index   the query's index in lse_log2 */
template <int COLUMNS, bool GENERAL>
static __device__ __forceinline__ void clear_dq(const attention_bwd_call &c, const attention_tile &t, int lane,
                                                int64_t row, int64_t i, int64_t statistics_index)
{
    constexpr int ROW_LANES = COLUMNS == 192 ? 32 : COLUMNS / 8, PASS_ROWS = LANES * WARPS / ROW_LANES;
    if (c.stores_dq) {
        uint16_t *const dq = (uint16_t *)c.dq.data + t.b * c.dq.stride[0] + row * c.dq.stride[1] + t.h * c.dq.stride[2];
        if (i < t.rows && 8 * lane < c.d_qk)
            *(uint4 *)(dq + 8 * lane) = make_uint4(0, 0, 0, 0);
        return;
    }
    float4 *accum = (float4 *)(c.dq_accum + (statistics_index - threadIdx.x / ROW_LANES) * COLUMNS) + threadIdx.x;
#pragma unroll
    for (int at = 0; at < PASS_ROWS * COLUMNS / 4; at += LANES * WARPS)
        if (COLUMNS != 192 || at + (int)threadIdx.x < PASS_ROWS * COLUMNS / 4)
            __stcs(accum + at, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
}

/* lse_log2 of a row. It is inf if the query attends to no key: lse is -inf then. */
static __device__ __forceinline__ float lse_log2_of(const attention_bwd_call &c, int64_t b, int64_t h, int64_t row)
{
    const float lse =
        cot_load(c.lse.data, c.lse.dtype, b * c.lse.stride[0] + h * c.lse.stride[1] + row * c.lse.stride[2]);
    return lse == -INFINITY ? INFINITY : fmaf(1.4426950408889634f, lse, -c.p_exponent);
}

/* Writes lse_log2 of all heads, and scaled_delta of the first preprocessed_heads: delta = rowsum(dout * out) - dlse.
 * Clears the counters. Of the first preprocessed_heads, clears dq_accum (stores_dq: dq) of all tiles in
 * nondeterministic mode, else only of tiles that attend to no key.
 *
 * ROW_LANES = COLUMNS / 8 lanes process one query. At 192 tile columns 32 lanes do, 8 of them without columns, because
 * the sum of a row needs a power of two. A thread block takes a strip of a tile: ATTENTION_BWD_PREPROCESS_ROWS times
 * PASS_ROWS rows. */
template <int COLUMNS, bool GENERAL> static __device__ __forceinline__ void preprocess(const attention_bwd_call &c)
{
    constexpr int ROW_LANES = COLUMNS == 192 ? 32 : COLUMNS / 8, PASS_ROWS = LANES * WARPS / ROW_LANES,
                  QUERIES = ATTENTION_BWD_TILE_QUERIES(COLUMNS),
                  STRIPS = QUERIES / (PASS_ROWS * ATTENTION_BWD_PREPROCESS_ROWS);
    cot_griddepcontrol_launch_dependents();
    const int64_t thread = (int64_t)blockIdx.x * (LANES * WARPS) + threadIdx.x;
    for (int64_t i = thread; i < c.counter_count; i += (int64_t)gridDim.x * (LANES * WARPS))
        c.dq_semaphore[i] = 0;
    if (!GENERAL && c.delta_shares > 0) { /* lse_log2 of the heads whose delta the main kernel computes */
        const unsigned rows_per_head = (unsigned)c.tiles_per_head * QUERIES,
                       rows = (unsigned)(c.B * c.H) * rows_per_head;
        for (unsigned i = (unsigned)c.preprocessed_heads * rows_per_head + (unsigned)thread; i < rows;
             i += gridDim.x * (LANES * WARPS)) {
            const unsigned head = i / rows_per_head, row = i % rows_per_head;
            c.lse_log2[i] = row < c.Tq ? lse_log2_of(c, head / (unsigned)c.H, head % (unsigned)c.H, row) : INFINITY;
        }
    }
    /* The strips of a tile are query_heads thread blocks apart. */
    const unsigned query_heads = GENERAL ? (unsigned)c.H : min((unsigned)c.H, (unsigned)c.preprocessed_heads),
                   tile_strip = blockIdx.x / query_heads;
    attention_tile t;
    if (!find_tile<GENERAL>(c, query_heads, tile_strip / STRIPS * query_heads + blockIdx.x % query_heads, t))
        return;
    const int lane = threadIdx.x % ROW_LANES, strip = (int)(tile_strip % STRIPS);
    const int first_row =
        strip * PASS_ROWS * ATTENTION_BWD_PREPROCESS_ROWS + (int)threadIdx.x / ROW_LANES; /* of the tile */
    float delta[ATTENTION_BWD_PREPROCESS_ROWS], lse_log2[ATTENTION_BWD_PREPROCESS_ROWS];
    /* Without stores, so that the loads of all rows come first. */
#pragma unroll
    for (int n = 0; n < ATTENTION_BWD_PREPROCESS_ROWS; n++) {
        const int64_t i = t.tile * QUERIES + first_row + n * PASS_ROWS, row = t.q_first_row + i;
        delta[n] = 0.0f, lse_log2[n] = INFINITY;
        if (i >= t.used)
            continue;
        if (c.delta.data != nullptr) {
            delta[n] = cot_load(c.delta.data, c.delta.dtype,
                                t.b * c.delta.stride[0] + t.h * c.delta.stride[1] + row * c.delta.stride[2]);
        } else if (8 * lane < c.d_v) {
            const int64_t out = t.b * c.out.stride[0] + row * c.out.stride[1] + t.h * c.out.stride[2] + 8 * lane;
            const int64_t dout = t.b * c.dout.stride[0] + row * c.dout.stride[1] + t.h * c.dout.stride[2] + 8 * lane;
            if (c.loads_out_vectors) {
                const cot_words<4> a = cot_load_words<4>((const uint16_t *)c.out.data + out);
                const cot_words<4> b = cot_load_words<4>((const uint16_t *)c.dout.data + dout);
                delta[n] = c.out.dtype == COT_F16 ? dot<__half>(a, b) : dot<__nv_bfloat16>(a, b);
            } else {
                for (int x = 0; x < 8 && (!GENERAL || 8 * lane + x < c.d_v); x++)
                    delta[n] = fmaf(cot_load(c.out.data, c.out.dtype, out + x),
                                    cot_load(c.dout.data, c.dout.dtype, dout + x), delta[n]);
            }
        }
        lse_log2[n] = lse_log2_of(c, t.b, t.h, row);
    }
    /* If the main kernel stores dq, it does not store the rows from t.used on. */
    const bool clear = !c.deterministic || !is_visited<QUERIES, GENERAL>(c, t) ||
                       (GENERAL && c.stores_dq && (t.tile + 1) * QUERIES > t.used);
#pragma unroll
    for (int n = 0; n < ATTENTION_BWD_PREPROCESS_ROWS; n++) {
        const int64_t i = t.tile * QUERIES + first_row + n * PASS_ROWS, row = t.q_first_row + i;
        const int64_t statistics_index = t.index * QUERIES + first_row + n * PASS_ROWS;
        if (clear)
            clear_dq<COLUMNS, GENERAL>(c, t, lane, row, i, statistics_index);
        if (c.delta.data == nullptr) {
#pragma unroll
            for (int distance = ROW_LANES / 2; distance > 0; distance /= 2)
                delta[n] += __shfl_xor_sync(0xffffffffu, delta[n], distance);
            if (c.dlse.data != nullptr && i < t.used)
                delta[n] -= cot_load(c.dlse.data, c.dlse.dtype,
                                     t.b * c.dlse.stride[0] + t.h * c.dlse.stride[1] + row * c.dlse.stride[2]);
        }
        if (lane == 0) {
            c.scaled_delta[statistics_index] = c.dp_scale * delta[n];
            c.lse_log2[statistics_index] = lse_log2[n];
        }
    }
}

/* dq from dq_accum, which is in the order of wgmma accumulators. A strip, 16 queries of 64 columns, is 4 KiB. A float4
 * holds two adjacent columns of row r and two of row r + 8. A warp transposes the 4 KiB to rows through shared memory.
 * Rows of 144 bytes there avoid bank conflicts, both for stores in the accumulators' order and for loads of 16 bytes
 * per lane. */
template <typename E, int COLUMNS, bool GENERAL>
static __device__ __forceinline__ void postprocess(const attention_bwd_call &c)
{
    constexpr unsigned PANELS = COLUMNS / 64, STRIPS = ATTENTION_BWD_TILE_QUERIES(COLUMNS) / 16;
    __shared__ __align__(16) uint32_t staging[WARPS][16][36];
    cot_griddepcontrol_wait();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const unsigned warp_index = blockIdx.x * WARPS + warp, strip = warp_index % STRIPS,
                   panel = warp_index / STRIPS % PANELS;
    attention_tile t;
    if (!find_tile<GENERAL>(c, (unsigned)c.H, warp_index / STRIPS / PANELS, t))
        return;
    const int64_t first_row = t.tile * ATTENTION_BWD_TILE_QUERIES(COLUMNS) + strip * 16;
    const int columns = (int)c.d_qk - (int)panel * 64; /* columns of this panel that exist */
    if (first_row >= t.rows || columns <= 0)
        return;
    const float4 *accum = (const float4 *)(c.dq_accum + t.index * (ATTENTION_BWD_TILE_QUERIES(COLUMNS) * COLUMNS) +
                                           panel * ATTENTION_BWD_DQ_TILE_FLOATS);
    float4 acc[8];
#pragma unroll
    for (int column_group = 0; column_group < 8; column_group++)
        acc[column_group] = __ldcs(accum + strip * 256 + column_group * LANES + lane);
    const int64_t offset = t.b * c.dq.stride[0] + t.q_first_row * c.dq.stride[1] + t.h * c.dq.stride[2] + panel * 64;
    if (c.dq_store_method == ATTENTION_STORE_VECTORS_16) {
#pragma unroll
        for (int column_group = 0; column_group < 8; column_group++) {
            uint32_t *words = &staging[warp][lane / 4][4 * column_group + lane % 4];
            words[0] = cot_pack_pair<E>(c.scale * acc[column_group].x, c.scale * acc[column_group].y);
            words[8 * 36] = cot_pack_pair<E>(c.scale * acc[column_group].z, c.scale * acc[column_group].w);
        }
        __syncwarp();
#pragma unroll
        for (int row = lane / 8; row < 16; row += 4)
            if (first_row + row < t.rows && lane % 8 * 8 < columns)
                *(uint4 *)((E *)c.dq.data + offset + (first_row + row) * c.dq.stride[1] + lane % 8 * 8) =
                    !GENERAL || first_row + row < t.used ? *(const uint4 *)&staging[warp][row][lane % 8 * 4]
                                                         : make_uint4(0, 0, 0, 0);
        return;
    }
    float values[32];
#pragma unroll
    for (int i = 0; i < 8; i++)
        values[4 * i] = acc[i].x, values[4 * i + 1] = acc[i].y, values[4 * i + 2] = acc[i].z,
                   values[4 * i + 3] = acc[i].w;
    store_rows<E, /*GENERAL=*/true>(c, c.dq, c.dq_store_method, {offset, (int)t.rows, (int)t.used},
                                    (int)first_row + lane / 4, 0, columns, c.scale, values);
}

/* dsink[h] = -sum over queries of exp(sink[h] - lse) delta, in double. A thread block takes a head, a thread every
 * 256th row of a sequence. Rows beyond seqused have lse_log2 = inf. */
KERNEL attention_bwd_dsink(const __grid_constant__ attention_bwd_call c)
{
    __shared__ double sums[LANES * WARPS];
    const int64_t h = blockIdx.x;
    const float sink2 =
        fmaf(1.4426950408889634f, cot_load(c.sink.data, c.sink.dtype, h * c.sink.stride[0]), -c.p_exponent);
    const attention_seqlen_info *seqlens = c.sequences.seqlens;
    double sum = 0;
    for (int b = 0; b < c.sequences.count; b++) {
        if (seqlens != nullptr && seqlens[b].q_rows == 0)
            continue;
        const int64_t tiles =
            seqlens != nullptr ? seqlens[b + 1].tiles_before - seqlens[b].tiles_before : c.tiles_per_head;
        const int64_t sequence_first_tile =
            seqlens != nullptr ? seqlens[b].tiles_before * c.H : b * c.H * c.tiles_per_head;
        const int64_t begin = (sequence_first_tile + h * tiles) * c.tile_queries;
        for (int64_t i = begin + threadIdx.x; i < begin + tiles * c.tile_queries; i += LANES * WARPS)
            if (c.lse_log2[i] != __int_as_float(0x7f800000)) /* else the row has no gradient, whatever its delta is */
                sum -= (double)(exp2f(sink2 - c.lse_log2[i]) * c.scaled_delta[i]);
    }
    sums[threadIdx.x] = sum;
    for (int distance = LANES * WARPS / 2; distance > 0; distance /= 2) {
        __syncthreads();
        if (threadIdx.x < distance)
            sums[threadIdx.x] += sums[threadIdx.x + distance];
    }
    if (threadIdx.x > 0)
        return;
    const int64_t to = h * c.dsink.stride[0];
    const double before = c.accumulate ? cot_load(c.dsink.data, c.dsink.dtype, to) : 0.0;
    cot_store(c.dsink.data, c.dsink.dtype, to, (float)(before + sums[0] / c.dp_scale));
}

#define PREPROCESS(name, d, general)                                                     \
    KERNEL attention_bwd_preprocess_##name(const __grid_constant__ attention_bwd_call c) \
    {                                                                                    \
        preprocess<d, general>(c);                                                       \
    }
#define POSTPROCESS(name, element, d, general)                                            \
    KERNEL attention_bwd_postprocess_##name(const __grid_constant__ attention_bwd_call c) \
    {                                                                                     \
        postprocess<element, d, general>(c);                                              \
    }
PREPROCESS(d64, 64, false)
PREPROCESS(d128, 128, false)
PREPROCESS(d192, 192, false)
PREPROCESS(d256, 256, false)
PREPROCESS(d64_general, 64, true)
PREPROCESS(d128_general, 128, true)
PREPROCESS(d192_general, 192, true)
PREPROCESS(d256_general, 256, true)
POSTPROCESS(bf16_d64, __nv_bfloat16, 64, false)
POSTPROCESS(bf16_d128, __nv_bfloat16, 128, false)
POSTPROCESS(bf16_d192, __nv_bfloat16, 192, false)
POSTPROCESS(bf16_d256, __nv_bfloat16, 256, false)
POSTPROCESS(f16_d64, __half, 64, false)
POSTPROCESS(f16_d128, __half, 128, false)
POSTPROCESS(f16_d192, __half, 192, false)
POSTPROCESS(f16_d256, __half, 256, false)
POSTPROCESS(bf16_d64_general, __nv_bfloat16, 64, true)
POSTPROCESS(bf16_d128_general, __nv_bfloat16, 128, true)
POSTPROCESS(bf16_d192_general, __nv_bfloat16, 192, true)
POSTPROCESS(bf16_d256_general, __nv_bfloat16, 256, true)
POSTPROCESS(f16_d64_general, __half, 64, true)
POSTPROCESS(f16_d128_general, __half, 128, true)
POSTPROCESS(f16_d192_general, __half, 192, true)
POSTPROCESS(f16_d256_general, __half, 256, true)
