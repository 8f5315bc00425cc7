/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_bwd_rows.cu: dx = c * m * dy * act'(x + bias), and dbias[d] = sum_r dx[r,d] in the same pass. A thread sums
 * the dx of its rows before they are rounded, its block the sums of its threads, and dropout_bwd_reduce those of the
 * blocks, each in a fixed order. */
#include "dropout_tile.cuh"

template <int ACCESS> constexpr int lanes = ACCESS == SHIFTED ? DROPOUT_BWD_SHIFTED_LANES : DROPOUT_BWD_LANES;
template <int ACCESS> constexpr int rows_apart = DROPOUT_THREADS / lanes<ACCESS>; /* of a thread */
template <int ACCESS> constexpr int columns = COT_DROPOUT_GROUP *lanes<ACCESS>;   /* of a tile */
static_assert(columns<SHIFTED> <= DROPOUT_THREADS, "a thread sums a column");

template <typename E, int ACTIVATION> static __device__ __forceinline__ float slope(float z)
{
    constexpr bool PRECISE = sizeof(E) == 4;
    switch (ACTIVATION) {
    case COT_ACTIVATION_SILU: return cot_silu_slope<PRECISE>(z);
    case COT_ACTIVATION_GELU_TANH: return cot_gelu_tanh_slope<PRECISE>(z);
    default: return cot_gelu_erf_slope(z);
    }
}

/* GELU's erf form with 16-bit results: the slope comes with the scale, of z in a unit of its own, and so does the
 * bias. */
template <typename E, int ACTIVATION>
constexpr bool scaled_slope = sizeof(E) == 2 && ACTIVATION == COT_ACTIVATION_GELU_ERF;

/* The rows that a thread has in registers at once. */
template <typename E, int ACCESS, bool ACTIVE> constexpr int batch = (ACTIVE ? 4 : 8) / (int)sizeof(E);

/* Turns a batch of dy into dx, adds it to the sums, and writes what it can write as a whole. */
template <int ACCESS, int ACTIVATION, typename E, int BATCH>
static __device__ __forceinline__ void finish(const dropout_call &c, const place &p, const walk &dx, int first,
                                              elements<E> (&dy)[BATCH], const elements<E> (&x)[BATCH],
                                              const float (&bias)[COT_DROPOUT_GROUP], const uint32_t (&keep)[BATCH],
                                              float (&sums)[COT_DROPOUT_GROUP])
{
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        float g[COT_DROPOUT_GROUP], z[COT_DROPOUT_GROUP];
        unpack(dy[i], g);
        if (ACTIVATION != COT_ACTIVATION_NONE)
            unpack(x[i], z);
#pragma unroll
        for (int j = 0; j < COT_DROPOUT_GROUP; j++) {
            if (scaled_slope<E, ACTIVATION>)
                g[j] *= cot_gelu_erf_slope_scaled(fmaf(z[j], COT_GELU_SLOPE_UNIT, bias[j]), c.scale, c.slope_divisor);
            else
                g[j] *= c.scale;
            bool kept = keep[i] >> j & 1u;
            if (ACTIVATION == COT_ACTIVATION_RELU)
                kept = kept && !(z[j] + bias[j] <= 0.0f);
            else if (ACTIVATION != COT_ACTIVATION_NONE && !scaled_slope<E, ACTIVATION>)
                g[j] *= slope<E, ACTIVATION>(z[j] + bias[j]);
            g[j] = kept ? g[j] : 0.0f;
        }
        pack(dy[i], g);
        if (ACCESS == SHIFTED || c.dx.data != nullptr) /* SHIFTED: nothing is whole then */
            store<E, ACCESS, lanes<ACCESS>>(p, dx, first, i, dy[i]);
#pragma unroll
        for (int j = 0; j < COT_DROPOUT_GROUP; j++)
            sums[j] += g[j];
    }
}

/* The sums of the block, by columns from the first of lane 0's group on. */
template <int ACCESS> using block_sums = float4[rows_apart<ACCESS>][columns<ACCESS> / 4];

template <typename E, int ACCESS>
static __device__ __forceinline__ void sum_block(const dropout_call &c, const place &p,
                                                 const float (&sums)[COT_DROPOUT_GROUP], block_sums<ACCESS> &all)
{
    constexpr int N = chunk_size<E>;
    if (ACCESS == SHIFTED) { /* rows of different shifts leave different columns out */
        for (int i = threadIdx.x; i < rows_apart<ACCESS> * columns<ACCESS> / 4; i += DROPOUT_THREADS)
            all[0][i] = {0.0f, 0.0f, 0.0f, 0.0f};
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        const int first = p.relative + lanes<ACCESS> * N * h;
        if (ACCESS == SHIFTED) {
#pragma unroll
            for (int j = 0; j < N; j++)
                if (has_chunk(p, h))
                    ((float *)all[p.beside])[first + j] = sums[N * h + j];
        } else {
#pragma unroll
            for (int j = 0; j < N; j += 4)
                all[p.beside][(first + j) / 4] = {sums[N * h + j], sums[N * h + j + 1], sums[N * h + j + 2],
                                                  sums[N * h + j + 3]};
        }
    }
    __syncthreads();
    float *out = c.partial + (p.tile_row * c.tiles + blockIdx.x) * columns<ACCESS>;
    if (threadIdx.x < columns<ACCESS>) {
        float sum = 0.0f;
#pragma unroll
        for (int beside = 0; beside < rows_apart<ACCESS>; beside++)
            sum += ((const float *)all[beside])[threadIdx.x];
        out[threadIdx.x] = sum;
    }
}

struct walks {
    walk dy, x, dx;

    __device__ __forceinline__ void step(int rows)
    {
        dy.at += rows * dy.apart;
        x.at += rows * x.apart;
        dx.at += rows * dx.apart;
    }
};

/* The bias that `finish` wants. */
template <typename E, int ACCESS, bool ACTIVE>
static __device__ __forceinline__ void begin_bias(const dropout_call &c, const place &p,
                                                  float (&bias)[COT_DROPOUT_GROUP])
{
    if (ACTIVE)
        load_bias<E, ACCESS, lanes<ACCESS>>(c, p, bias);
    if (scaled_slope<E, COT_ACTIVATION_GELU_ERF> && c.activation == COT_ACTIVATION_GELU_ERF) {
#pragma unroll
        for (int j = 0; j < COT_DROPOUT_GROUP; j++)
            bias[j] *= COT_GELU_SLOPE_UNIT;
    }
}

/* `finish` for the activation of the call. */
template <int ACCESS, bool ACTIVE, typename E, int BATCH>
static __device__ __forceinline__ void finish_any(const dropout_call &c, const place &p, const walk &dx, int first,
                                                  elements<E> (&dy)[BATCH], const elements<E> (&x)[BATCH],
                                                  const float (&bias)[COT_DROPOUT_GROUP], const uint32_t (&keep)[BATCH],
                                                  float (&sums)[COT_DROPOUT_GROUP])
{
    if (!ACTIVE)
        finish<ACCESS, COT_ACTIVATION_NONE>(c, p, dx, first, dy, x, bias, keep, sums);
    else if (c.activation == COT_ACTIVATION_SILU)
        finish<ACCESS, COT_ACTIVATION_SILU>(c, p, dx, first, dy, x, bias, keep, sums);
    else if (c.activation == COT_ACTIVATION_RELU)
        finish<ACCESS, COT_ACTIVATION_RELU>(c, p, dx, first, dy, x, bias, keep, sums);
    else if (c.activation == COT_ACTIVATION_GELU_TANH)
        finish<ACCESS, COT_ACTIVATION_GELU_TANH>(c, p, dx, first, dy, x, bias, keep, sums);
    else
        finish<ACCESS, COT_ACTIVATION_GELU_ERF>(c, p, dx, first, dy, x, bias, keep, sums);
    if (c.dx.data != nullptr)
        store_parts<E, ACCESS, lanes<ACCESS>>(c, p, c.dx, dx, first, dy);
}

/* PLAIN and STRIDED rows. */
template <typename E, int ACCESS, bool ACTIVE> static __device__ __forceinline__ void backward(const dropout_call &c)
{
    constexpr int BATCH = batch<E, ACCESS, ACTIVE>;
    const place p = find_place<E, ACCESS, lanes<ACCESS>>(c, c.dy, DROPOUT_BWD_ROWS);
    float bias[COT_DROPOUT_GROUP], sums[COT_DROPOUT_GROUP] = {0};
    cot_griddepcontrol_launch_dependents();
    begin_bias<E, ACCESS, ACTIVE>(c, p, bias);
    const draws from = find_draws(c);
    walks w = {begin_walk<ACCESS, lanes<ACCESS>>(p, c.dy, sizeof(E)),
               begin_walk<ACCESS, lanes<ACCESS>>(p, c.x, sizeof(E)),
               begin_walk<ACCESS, lanes<ACCESS>>(p, c.dx, sizeof(E))};
#pragma unroll 1
    for (int i = 0; i < DROPOUT_BWD_ROWS; i += BATCH, w.step(BATCH)) {
        const int first = i * rows_apart<ACCESS>;
        elements<E> dy[BATCH], x[BATCH];
        uint32_t keep[BATCH];
        load<E, ACCESS, lanes<ACCESS>>(c, p, c.dy, w.dy, first, true, dy);
        if (ACTIVE)
            load<E, ACCESS, lanes<ACCESS>>(c, p, c.x, w.x, first, true, x);
        find_keep<ACCESS, lanes<ACCESS>, false>(c, p, from, first, keep);
#pragma unroll
        for (int row = 0; row < BATCH; row++)
            keep[row] = keep_of_elements<E, ACCESS, lanes<ACCESS>>(c, p, first, row, keep[row]);
        finish_any<ACCESS, ACTIVE>(c, p, w.dx, first, dy, x, bias, keep, sums);
    }
    if (c.partial != nullptr) {
        __shared__ block_sums<ACCESS> all;
        sum_block<E, ACCESS>(c, p, sums, all);
    }
}

/* ---- SHIFTED rows ------------------------------------------------------------------------------------- *
 * come through shared memory: while a thread works on a batch, the next one is on its way, and with it a mask of bytes
 * that lies in step. A thread reads there what it asked for itself, and nothing else. */

/* A value of this lane, which the compiler cannot compute again: it would, where registers are short. */
template <typename T> static __device__ __forceinline__ T kept(T value)
{
    return __shfl_sync(0xffffffffu, value, threadIdx.x % 32);
}

/* A batch in shared memory: chunks of dy and x, then the bytes of a mask that belong to them. */
template <typename E, bool ACTIVE> struct batch_ahead {
    static constexpr int BATCH = batch<E, SHIFTED, ACTIVE>, CHUNKS = chunk_count<E>, N = chunk_size<E>,
                         TENSORS = ACTIVE ? 2 : 1;
    uint4 chunk[TENSORS][BATCH][CHUNKS][DROPOUT_THREADS];
    unsigned char given[BATCH][CHUNKS][DROPOUT_THREADS][N];

    /* Where in it, from the thread's first chunk, and from the thread's first bytes of a mask on. */
    static __device__ __forceinline__ uint32_t chunk_at(int tensor, int i, int h)
    {
        return ((tensor * BATCH + i) * CHUNKS + h) * DROPOUT_THREADS * 16;
    }
    static __device__ __forceinline__ uint32_t given_at(int i, int h)
    {
        return (i * CHUNKS + h) * DROPOUT_THREADS * N;
    }
};

/* Where a thread reads: chunk h as a whole in `count` of its rows from the begin-th on. */
struct reader {
    int begin[2], count[2];
    uint32_t chunk, given;      /* its own in the first batch of shared memory */
    const char *dy, *x, *bytes; /* of the next row to ask for, the mask's too */
};

/* Asks for a batch from the step-th row on: `at` bytes from the first one in shared memory. What is not there comes as
 * zeros. */
template <typename E, bool ACTIVE>
static __device__ __forceinline__ void ask_for(const dropout_call &c, reader &r, int step, uint32_t at)
{
    typedef batch_ahead<E, ACTIVE> ahead;
    constexpr int ACROSS = lanes<SHIFTED>;
#pragma unroll
    for (int i = 0; i < ahead::BATCH; i++) {
#pragma unroll
        for (int h = 0; h < ahead::CHUNKS; h++) {
            const bool there = (uint32_t)(step + i - r.begin[h]) < (uint32_t)r.count[h];
            cot_cp_async_zfill(there, r.chunk + at + ahead::chunk_at(0, i, h), r.dy + ACROSS * h * 16);
            if (ACTIVE)
                cot_cp_async_zfill(there, r.chunk + at + ahead::chunk_at(1, i, h), r.x + ACROSS * h * 16);
            if (c.given_in_step)
                cot_cp_async_zfill<ahead::N>(there, r.given + at + ahead::given_at(i, h),
                                             r.bytes + ACROSS * h * ahead::N);
        }
        r.dy += c.dy_apart;
        r.x += c.x_apart;
        r.bytes += c.given_apart;
    }
    cot_cp_async_commit_group();
}

/* The keep bits of the thread's own elements in a batch of rows, from the bits of groups. `groups`: those of the lane's
 * group, a byte a row. */
template <typename E, int BATCH>
static __device__ __forceinline__ void keep_of_groups(int relative, uint32_t groups, uint32_t (&keep)[BATCH])
{
    constexpr int N = chunk_size<E>, LANES = lanes<SHIFTED>;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        const int group = (relative + LANES * N * h) >> 3;
        const uint32_t one = __shfl_sync(0xffffffffu, groups, group, LANES),
                       other = __shfl_sync(0xffffffffu, groups, group + 1, LANES);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const uint32_t two = __byte_perm(one, other, (4 + i) << 4 | i) >> (relative & 7);
            if (chunk_count<E> == 1)
                keep[i] = two; /* and more above */
            else
                keep[i] = h == 0 ? two & 15u : (keep[i] & 15u) | (two & 15u) << 4;
        }
    }
}

/* The same, from bytes of a mask beside the thread's chunks. */
template <typename E, bool ACTIVE, int BATCH>
static __device__ __forceinline__ void keep_of_given(uint32_t given, uint32_t (&keep)[BATCH])
{
    typedef batch_ahead<E, ACTIVE> ahead;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        cot_words<2> bytes;
        if (ahead::CHUNKS == 1) {
            bytes = cot_load_shared<2>(given + ahead::given_at(i, 0));
        } else {
            bytes.word[0] = cot_load_shared<1>(given + ahead::given_at(i, 0)).word[0];
            bytes.word[1] = cot_load_shared<1>(given + ahead::given_at(i, 1)).word[0];
        }
        keep[i] = keep_of_bytes({bytes.word[0], bytes.word[1]});
    }
}

/* The same of a batch from the step-th row on, whatever the source. `group`: the number of the lane's in that row. */
template <typename E, bool ACTIVE, int BATCH>
static __device__ __forceinline__ void find_own_keep(const dropout_call &c, const place &p, const draws &from,
                                                     uint64_t group, int step, uint32_t given, uint32_t (&keep)[BATCH])
{
    if (c.given_in_step) {
        keep_of_given<E, ACTIVE>(given, keep);
        return;
    }
    uint32_t groups = 0;
    if (c.source == SOURCE_DRAWN) {
#pragma unroll
        for (int i = BATCH - 1; i >= 0; i--)
            groups = draw_keep(from, group + (uint64_t)(i * c.groups_apart), c.threshold, groups);
    } else {
        find_keep<SHIFTED, lanes<SHIFTED>, false>(c, p, from, step * rows_apart<SHIFTED>, keep);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            groups |= keep[i] << (8 * i);
    }
    keep_of_groups<E>(p.relative, groups, keep);
}

/* Elements `begin` to `end` of a chunk, from memory to its place in shared memory. */
template <typename T> static __device__ __forceinline__ void copy_elements(void *to, const T *from, int begin, int end)
{
#pragma unroll 1
    for (int j = begin; j < end; j++)
        ((T *)to)[j] = from[j];
}

/* Brings what ask_for left out of a batch: ends of rows beyond which a tensor may end. (Before a row its tensor begins
 * at a multiple of 16 bytes at the latest, as all memory does.) */
template <typename E, bool ACTIVE>
static __device__ __forceinline__ void copy_ends(const dropout_call &c, const place &p, const reader &r, int step,
                                                 batch_ahead<E, ACTIVE> &ahead)
{
    typedef typename bits_of<E>::type bits;
    constexpr int N = chunk_size<E>, APART = rows_apart<SHIFTED>;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++)
#pragma unroll 1
        for (int i = 0; i < ahead.BATCH; i++) {
            if ((step + i) * APART >= p.chunk_left[h] || (uint32_t)(step + i - r.begin[h]) < (uint32_t)r.count[h])
                continue;
            const int64_t row = p.row + (step + i) * APART, column = p.column + lanes<SHIFTED> * N * h;
            const int begin = first_of_row(column), end = end_of_row<N>(c, column);
            copy_elements<bits>(&ahead.chunk[0][i][h][threadIdx.x],
                                (const bits *)c.dy.data + row * c.dy.stride[0] + column, begin, end);
            if (ACTIVE)
                copy_elements<bits>(&ahead.chunk[ahead.TENSORS - 1][i][h][threadIdx.x],
                                    (const bits *)c.x.data + row * c.x.stride[0] + column, begin, end);
            if (c.given_in_step)
                copy_elements<uint8_t>(ahead.given[i][h][threadIdx.x],
                                       (const uint8_t *)c.given.data + row * c.given.stride[0] + column, begin, end);
        }
}

template <typename E, bool ACTIVE> static __device__ __forceinline__ void backward_shifted(const dropout_call &c)
{
    typedef batch_ahead<E, ACTIVE> ahead;
    constexpr int BATCH = ahead::BATCH, N = ahead::N, LANES = lanes<SHIFTED>, APART = rows_apart<SHIFTED>;
    static_assert(LANES == 32, "the lanes of a warp are in one row");
    __shared__ union {
        ahead batches[2];
        block_sums<SHIFTED> sums;
    } memory;
    place p = find_place<E, SHIFTED, LANES>(c, c.dy, DROPOUT_BWD_SHIFTED_ROWS);
    float bias[COT_DROPOUT_GROUP], sums[COT_DROPOUT_GROUP] = {0};
    cot_griddepcontrol_launch_dependents();
    begin_bias<E, SHIFTED, ACTIVE>(c, p, bias);
    const draws from = find_draws(c);
    const uint32_t shared = cot_shared_address(&memory);
    reader r;
    r.chunk = kept<uint32_t>(shared + 16 * threadIdx.x);
    r.given = kept<uint32_t>(shared + sizeof memory.batches[0].chunk + N * threadIdx.x);
    r.dy = begin_walk<SHIFTED, LANES>(p, c.dy, sizeof(E)).at;
    r.x = begin_walk<SHIFTED, LANES>(p, c.x, sizeof(E)).at;
    r.bytes = begin_walk<SHIFTED, LANES>(p, c.given, 1).at;
    int ends = 0; /* has the thread any for copy_ends? */
    p.relative = kept<int>(p.relative);
#pragma unroll
    for (int h = 0; h < ahead::CHUNKS; h++) {
        const int rows = (p.chunk_left[h] + APART - 1) / APART;
        const bool end = rows > 0 && p.column + LANES * N * h + N > c.D;
        const bool first = end && p.row == 0, last = end && p.row + (rows - 1) * APART == c.R - 1;
        r.begin[h] = kept<int>(first);
        r.count[h] = kept<int>(rows > first + last ? rows - first - last : 0);
        ends |= kept<int>(first || last);
        p.chunk_left[h] = kept<int>(p.chunk_left[h]);
        p.whole_left[h] = kept<int>(c.dx.data == nullptr ? 0 : p.whole_left[h]);
    }
    walk dx = {begin_walk<SHIFTED, LANES>(p, c.dx, sizeof(E)).at, c.dx_apart};
    uint64_t group = (uint64_t)(p.row * c.groups + p.group);
    uint32_t at = 0;
    ask_for<E, ACTIVE>(c, r, 0, at);
#pragma unroll 1
    for (int step = 0; step < DROPOUT_BWD_SHIFTED_ROWS; step += BATCH) {
        ask_for<E, ACTIVE>(c, r, step + BATCH, (uint32_t)sizeof(ahead) - at);
        cot_cp_async_wait_group<1>();
        if (ends)
            copy_ends(c, p, r, step, memory.batches[at != 0]);
        elements<E> dy[BATCH], x[BATCH];
        uint32_t keep[BATCH];
        find_own_keep<E, ACTIVE>(c, p, from, group, step, r.given + at, keep);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
#pragma unroll
            for (int h = 0; h < ahead::CHUNKS; h++) {
                dy[i].chunk[h].raw = cot_load_shared<4>(r.chunk + at + ahead::chunk_at(0, i, h));
                if (ACTIVE) { /* elsewhere zeros are enough, here the slope may be no number */
                    x[i].chunk[h].raw = cot_load_shared<4>(r.chunk + at + ahead::chunk_at(1, i, h));
                    keep[i] = (step + i) * APART < p.left ? keep[i] : 0u;
                }
            }
        finish_any<SHIFTED, ACTIVE>(c, p, dx, step * APART, dy, x, bias, keep, sums);
        dx.at += BATCH * c.dx_apart;
        group += (uint64_t)(BATCH * c.groups_apart);
        at = (uint32_t)sizeof(ahead) - at;
    }
    if (c.partial == nullptr)
        return;
    cot_cp_async_wait_group<0>();
    __syncthreads();
    sum_block<E, SHIFTED>(c, p, sums, memory.sums);
}

/* The kernels, those with an activation apart: x takes registers too. */
/* clang-format off */
#define KERNELS(dtype, E) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype, 4, (backward<E, PLAIN, false>)) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype##_active, 3, (backward<E, PLAIN, true>)) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype##_shifted, 3, (backward_shifted<E, false>)) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype##_shifted_active, 2, (backward_shifted<E, true>)) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype##_strided, 1, (backward<E, STRIDED, false>)) \
    DROPOUT_KERNEL(dropout_bwd_rows_##dtype##_strided_active, 1, (backward<E, STRIDED, true>))
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
KERNELS(f32, float)
/* clang-format on */

/* dbias from the blocks' sums. A block has 32 columns; its warps take every 8th part, and their sums are added in the
 * warps' order. A column of a SHIFTED tile's edge has sums in two tiles. */
extern "C" __global__ void __launch_bounds__(DROPOUT_THREADS) dropout_bwd_reduce(const __grid_constant__ dropout_call c)
{
    constexpr int WARPS = DROPOUT_THREADS / 32;
    __shared__ float all[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t d = (int64_t)blockIdx.x * 32 + lane, span = c.shifted ? columns<SHIFTED> : columns<PLAIN>;
    const int64_t width = c.shifted ? span - COT_DROPOUT_GROUP : span;
    const int64_t tile = d / width, stride = c.tiles * span;
    const int64_t own = tile * span + d % width + (c.shifted ? COT_DROPOUT_GROUP : 0);
    const int64_t edge = d % width - width + COT_DROPOUT_GROUP; /* 1 and more: also column `edge` of the next tile */
    const bool two = c.shifted && edge > 0 && tile + 1 < c.tiles;
    float sum = 0.0f;
    cot_griddepcontrol_wait();
    if (d < c.D) {
#pragma unroll 16
        for (int64_t part = warp; part < c.parts; part += WARPS) {
            sum += c.partial[part * stride + own];
            if (two)
                sum += c.partial[part * stride + (tile + 1) * span + edge];
        }
    }
    all[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || d >= c.D)
        return;
    for (int i = 1; i < WARPS; i++)
        sum += all[i][lane];
    const int64_t at = d * c.dbias.step;
    cot_store(c.dbias.data, c.dbias.dtype, at, sum + (c.accumulate ? cot_load(c.dbias.data, c.dbias.dtype, at) : 0.0f));
}
