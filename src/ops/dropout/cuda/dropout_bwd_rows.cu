/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_bwd_rows.cu: dx = c * m * dy * act'(x + bias), and dbias[d] = sum_r dx[r,d] in the same pass. A thread sums
 * the dx of its rows before rounding, a block sums over its threads, and dropout_bwd_reduce sums over the blocks. Each
 * sum has a fixed order. */
#include "dropout_tile.cuh"

template <int ACCESS>
constexpr int threads_per_row = ACCESS == SHIFTED ? DROPOUT_BWD_SHIFTED_THREADS_PER_ROW : DROPOUT_BWD_THREADS_PER_ROW;
template <int ACCESS>
constexpr int rows_per_pass = DROPOUT_THREADS / threads_per_row<ACCESS>; /* from a thread's row to its next row */
/* Including the idle group of a SHIFTED tile. */
template <int ACCESS> constexpr int tile_columns = COT_DROPOUT_GROUP *threads_per_row<ACCESS>;
static_assert(tile_columns<SHIFTED> <= DROPOUT_THREADS, "needs at least one thread per column");

template <typename E, int ACTIVATION> static __device__ __forceinline__ float activation_slope(float z)
{
    constexpr bool PRECISE = sizeof(E) == 4;
    switch (ACTIVATION) {
    case COT_ACTIVATION_SILU: return cot_silu_slope<PRECISE>(z);
    case COT_ACTIVATION_GELU_TANH: return cot_gelu_tanh_slope<PRECISE>(z);
    default: return cot_gelu_erf_slope(z);
    }
}

/* GELU's erf form with 16-bit results: cot_gelu_erf_slope_scaled includes the scale and takes COT_GELU_SLOPE_UNIT * z,
 * so the bias is multiplied by this unit too. */
template <typename E, int ACTIVATION>
constexpr bool scaled_slope = sizeof(E) == 2 && ACTIVATION == COT_ACTIVATION_GELU_ERF;

/* The rows that a thread holds in registers at once. */
template <typename E, int ACCESS, bool HAS_ACTIVATION>
constexpr int batch_rows = (HAS_ACTIVATION ? 4 : 8) / (int)sizeof(E);

/* Replaces a batch of dy by dx, adds dx to the column sums, and stores the chunks that lie within the row. */
template <int ACCESS, int ACTIVATION, typename E, int BATCH>
static __device__ __forceinline__ void compute_dx(const dropout_call &c, const thread_tile &t, const row_cursor &dx,
                                                  int batch_row, fragment<E> (&dy)[BATCH],
                                                  const fragment<E> (&x)[BATCH], const float (&bias)[COT_DROPOUT_GROUP],
                                                  const uint32_t (&keep)[BATCH],
                                                  float (&column_sums)[COT_DROPOUT_GROUP])
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
                g[j] *=
                    cot_gelu_erf_slope_scaled(fmaf(z[j], COT_GELU_SLOPE_UNIT, bias[j]), c.scale, c.slope_denominator);
            else
                g[j] *= c.scale;
            bool kept = keep[i] >> j & 1u;
            if (ACTIVATION == COT_ACTIVATION_RELU)
                kept = kept && !(z[j] + bias[j] <= 0.0f);
            else if (ACTIVATION != COT_ACTIVATION_NONE && !scaled_slope<E, ACTIVATION>)
                g[j] *= activation_slope<E, ACTIVATION>(z[j] + bias[j]);
            g[j] = kept ? g[j] : 0.0f;
        }
        pack(dy[i], g);
        if (ACCESS == SHIFTED || c.dx.data != nullptr) /* SHIFTED without dx: vector_store_rows is 0 */
            store_whole_chunks<E, ACCESS, threads_per_row<ACCESS>>(t, dx, batch_row, i, dy[i]);
#pragma unroll
        for (int j = 0; j < COT_DROPOUT_GROUP; j++)
            column_sums[j] += g[j];
    }
}

/* The block's sums, one row for each row that the block processes at once. Column 0 is the first column of the tile's
 * first group. */
template <int ACCESS> using block_sums = float4[rows_per_pass<ACCESS>][tile_columns<ACCESS> / 4];

template <typename E, int ACCESS>
static __device__ __forceinline__ void sum_block(const dropout_call &c, const thread_tile &t,
                                                 const float (&column_sums)[COT_DROPOUT_GROUP],
                                                 block_sums<ACCESS> &block)
{
    constexpr int N = chunk_size<E>;
    if (ACCESS == SHIFTED) { /* rows with different shifts leave different columns unset */
        for (int i = threadIdx.x; i < rows_per_pass<ACCESS> * tile_columns<ACCESS> / 4; i += DROPOUT_THREADS)
            block[0][i] = {0.0f, 0.0f, 0.0f, 0.0f};
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        const int first_column = t.column_in_tile + threads_per_row<ACCESS> * N * h;
        if (ACCESS == SHIFTED) {
#pragma unroll
            for (int j = 0; j < N; j++)
                if (has_chunk(t, h))
                    ((float *)block[t.row_in_pass])[first_column + j] = column_sums[N * h + j];
        } else {
#pragma unroll
            for (int j = 0; j < N; j += 4)
                block[t.row_in_pass][(first_column + j) / 4] = {column_sums[N * h + j], column_sums[N * h + j + 1],
                                                                column_sums[N * h + j + 2], column_sums[N * h + j + 3]};
        }
    }
    __syncthreads();
    float *out = c.partial_sums + (t.row_tile * c.column_tiles + blockIdx.x) * tile_columns<ACCESS>;
    if (threadIdx.x < tile_columns<ACCESS>) {
        float sum = 0.0f;
#pragma unroll
        for (int row_in_pass = 0; row_in_pass < rows_per_pass<ACCESS>; row_in_pass++)
            sum += ((const float *)block[row_in_pass])[threadIdx.x];
        out[threadIdx.x] = sum;
    }
}

struct row_cursors {
    row_cursor dy, x, dx;

    __device__ __forceinline__ void advance(int rows)
    {
        dy.data += rows * dy.pass_bytes;
        x.data += rows * x.pass_bytes;
        dx.data += rows * dx.pass_bytes;
    }
};

/* Loads the bias in the form that compute_dx expects. */
template <typename E, int ACCESS, bool HAS_ACTIVATION>
static __device__ __forceinline__ void prepare_bias(const dropout_call &c, const thread_tile &t,
                                                    float (&bias)[COT_DROPOUT_GROUP])
{
    if (HAS_ACTIVATION)
        load_bias<E, ACCESS, threads_per_row<ACCESS>>(c, t, bias);
    if (scaled_slope<E, COT_ACTIVATION_GELU_ERF> && c.activation == COT_ACTIVATION_GELU_ERF) {
#pragma unroll
        for (int j = 0; j < COT_DROPOUT_GROUP; j++)
            bias[j] *= COT_GELU_SLOPE_UNIT;
    }
}

/* compute_dx for the activation of the call, and the stores of the remaining chunks. */
template <int ACCESS, bool HAS_ACTIVATION, typename E, int BATCH>
static __device__ __forceinline__ void dispatch_activation(const dropout_call &c, const thread_tile &t,
                                                           const row_cursor &dx, int batch_row,
                                                           fragment<E> (&dy)[BATCH], const fragment<E> (&x)[BATCH],
                                                           const float (&bias)[COT_DROPOUT_GROUP],
                                                           const uint32_t (&keep)[BATCH],
                                                           float (&column_sums)[COT_DROPOUT_GROUP])
{
    if (!HAS_ACTIVATION)
        compute_dx<ACCESS, COT_ACTIVATION_NONE>(c, t, dx, batch_row, dy, x, bias, keep, column_sums);
    else if (c.activation == COT_ACTIVATION_SILU)
        compute_dx<ACCESS, COT_ACTIVATION_SILU>(c, t, dx, batch_row, dy, x, bias, keep, column_sums);
    else if (c.activation == COT_ACTIVATION_RELU)
        compute_dx<ACCESS, COT_ACTIVATION_RELU>(c, t, dx, batch_row, dy, x, bias, keep, column_sums);
    else if (c.activation == COT_ACTIVATION_GELU_TANH)
        compute_dx<ACCESS, COT_ACTIVATION_GELU_TANH>(c, t, dx, batch_row, dy, x, bias, keep, column_sums);
    else
        compute_dx<ACCESS, COT_ACTIVATION_GELU_ERF>(c, t, dx, batch_row, dy, x, bias, keep, column_sums);
    if (c.dx.data != nullptr)
        store_partial_chunks<E, ACCESS, threads_per_row<ACCESS>>(c, t, c.dx, dx, batch_row, dy);
}

/* The backward for PLAIN and STRIDED rows. */
template <typename E, int ACCESS, bool HAS_ACTIVATION>
static __device__ __forceinline__ void backward(const dropout_call &c)
{
    constexpr int BATCH = batch_rows<E, ACCESS, HAS_ACTIVATION>;
    const thread_tile t = make_thread_tile<E, ACCESS, threads_per_row<ACCESS>>(c, c.dy, DROPOUT_BWD_ROWS_PER_THREAD);
    float bias[COT_DROPOUT_GROUP], column_sums[COT_DROPOUT_GROUP] = {0};
    cot_griddepcontrol_launch_dependents();
    prepare_bias<E, ACCESS, HAS_ACTIVATION>(c, t, bias);
    const philox_state philox = load_philox(c);
    row_cursors cursors = {make_cursor<ACCESS, threads_per_row<ACCESS>>(t, c.dy, sizeof(E)),
                           make_cursor<ACCESS, threads_per_row<ACCESS>>(t, c.x, sizeof(E)),
                           make_cursor<ACCESS, threads_per_row<ACCESS>>(t, c.dx, sizeof(E))};
#pragma unroll 1
    for (int i = 0; i < DROPOUT_BWD_ROWS_PER_THREAD; i += BATCH, cursors.advance(BATCH)) {
        const int batch_row = i * rows_per_pass<ACCESS>;
        fragment<E> dy[BATCH], x[BATCH];
        uint32_t keep[BATCH];
        load_rows<E, ACCESS, threads_per_row<ACCESS>>(c, t, c.dy, cursors.dy, batch_row, true, dy);
        if (HAS_ACTIVATION)
            load_rows<E, ACCESS, threads_per_row<ACCESS>>(c, t, c.x, cursors.x, batch_row, true, x);
        group_keep_bits<ACCESS, threads_per_row<ACCESS>, false>(c, t, philox, batch_row, keep);
#pragma unroll
        for (int row = 0; row < BATCH; row++)
            keep[row] = element_keep_bits<E, ACCESS, threads_per_row<ACCESS>>(c, t, batch_row, row, keep[row]);
        dispatch_activation<ACCESS, HAS_ACTIVATION>(c, t, cursors.dx, batch_row, dy, x, bias, keep, column_sums);
    }
    if (c.partial_sums != nullptr) {
        __shared__ block_sums<ACCESS> block;
        sum_block<E, ACCESS>(c, t, column_sums, block);
    }
}

/* ---- SHIFTED rows ------------------------------------------------------------------------------------- *
 * SHIFTED rows are loaded through shared memory in two stages: while a thread computes on a batch, cp.async copies the
 * next one, and its mask bytes if they are aligned (mask_bytes_aligned). A thread reads only what it copied itself. */

/* Hides from the compiler how `value` was computed. The compiler then keeps `value` in a register. Otherwise it would
 * compute `value` again when registers are scarce. */
template <typename T> static __device__ __forceinline__ T opaque(T value)
{
    return __shfl_sync(0xffffffffu, value, threadIdx.x % 32);
}

/* A batch in shared memory: chunks of dy and x, then their mask bytes. */
template <typename E, bool HAS_ACTIVATION> struct staged_batch {
    static constexpr int BATCH = batch_rows<E, SHIFTED, HAS_ACTIVATION>, CHUNKS = chunk_count<E>, N = chunk_size<E>,
                         TENSORS = HAS_ACTIVATION ? 2 : 1;
    uint4 chunk[TENSORS][BATCH][CHUNKS][DROPOUT_THREADS];
    unsigned char mask_bytes[BATCH][CHUNKS][DROPOUT_THREADS][N];

    /* Offsets in bytes from the thread's first chunk, and from the thread's first mask bytes. */
    static __device__ __forceinline__ uint32_t chunk_offset(int tensor, int i, int h)
    {
        return ((tensor * BATCH + i) * CHUNKS + h) * DROPOUT_THREADS * 16;
    }
    static __device__ __forceinline__ uint32_t mask_bytes_offset(int i, int h)
    {
        return (i * CHUNKS + h) * DROPOUT_THREADS * N;
    }
};

/* The state of a thread's copies. Chunk h is copied as a whole in row_count of the thread's rows, from
 * first_thread_row on. */
struct prefetch_state {
    int first_thread_row[2], row_count[2];
    uint32_t chunk, mask_bytes; /* shared memory addresses of the thread's chunks and mask bytes in the first stage */
    const char *dy, *x, *bytes; /* the thread's elements and mask bytes in the next row to copy */
};

/* Starts the copies of the batch that begins at the thread's row `thread_row`, to `stage_offset` bytes behind the first
 * stage. Chunks that are not copied as a whole become zeros. */
template <typename E, bool HAS_ACTIVATION>
static __device__ __forceinline__ void prefetch_batch(const dropout_call &c, prefetch_state &r, int thread_row,
                                                      uint32_t stage_offset)
{
    typedef staged_batch<E, HAS_ACTIVATION> staged;
    constexpr int THREADS_PER_ROW = threads_per_row<SHIFTED>;
#pragma unroll
    for (int i = 0; i < staged::BATCH; i++) {
#pragma unroll
        for (int h = 0; h < staged::CHUNKS; h++) {
            const bool valid = (uint32_t)(thread_row + i - r.first_thread_row[h]) < (uint32_t)r.row_count[h];
            cot_cp_async_zfill(valid, r.chunk + stage_offset + staged::chunk_offset(0, i, h),
                               r.dy + THREADS_PER_ROW * h * 16);
            if (HAS_ACTIVATION)
                cot_cp_async_zfill(valid, r.chunk + stage_offset + staged::chunk_offset(1, i, h),
                                   r.x + THREADS_PER_ROW * h * 16);
            if (c.mask_bytes_aligned)
                cot_cp_async_zfill<staged::N>(valid, r.mask_bytes + stage_offset + staged::mask_bytes_offset(i, h),
                                              r.bytes + THREADS_PER_ROW * h * staged::N);
        }
        r.dy += c.dy_pass_bytes;
        r.x += c.x_pass_bytes;
        r.bytes += c.given_mask_pass_bytes;
    }
    cot_cp_async_commit_group();
}

/* The keep bits of the thread's elements in a batch of rows, from those of the groups. `groups`: the keep bits of the
 * thread's group, one byte per row. */
template <typename E, int BATCH>
static __device__ __forceinline__ void element_keep_from_groups(int column_in_tile, uint32_t groups,
                                                                uint32_t (&keep)[BATCH])
{
    constexpr int N = chunk_size<E>, THREADS_PER_ROW = threads_per_row<SHIFTED>;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        const int group = (column_in_tile + THREADS_PER_ROW * N * h) >> 3;
        const uint32_t group_bits = __shfl_sync(0xffffffffu, groups, group, THREADS_PER_ROW),
                       next_group_bits = __shfl_sync(0xffffffffu, groups, group + 1, THREADS_PER_ROW);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const uint32_t two_groups =
                __byte_perm(group_bits, next_group_bits, (4 + i) << 4 | i) >> (column_in_tile & 7);
            if (chunk_count<E> == 1)
                keep[i] = two_groups; /* the bits above the low 8 are not used */
            else
                keep[i] = h == 0 ? two_groups & 15u : (keep[i] & 15u) | (two_groups & 15u) << 4;
        }
    }
}

/* The keep bits of the thread's elements, from mask bytes in shared memory. */
template <typename E, bool HAS_ACTIVATION, int BATCH>
static __device__ __forceinline__ void element_keep_from_bytes(uint32_t mask_bytes, uint32_t (&keep)[BATCH])
{
    typedef staged_batch<E, HAS_ACTIVATION> staged;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        cot_words<2> bytes;
        if (staged::CHUNKS == 1) {
            bytes = cot_load_shared<2>(mask_bytes + staged::mask_bytes_offset(i, 0));
        } else {
            bytes.word[0] = cot_load_shared<1>(mask_bytes + staged::mask_bytes_offset(i, 0)).word[0];
            bytes.word[1] = cot_load_shared<1>(mask_bytes + staged::mask_bytes_offset(i, 1)).word[0];
        }
        keep[i] = bytes_to_bits({bytes.word[0], bytes.word[1]});
    }
}

/* The keep bits of the thread's elements in the batch that begins at the thread's row `thread_row`, for any source of
 * the mask. `group`: the number of the thread's group in that row. */
template <typename E, bool HAS_ACTIVATION, int BATCH>
static __device__ __forceinline__ void shifted_element_keep(const dropout_call &c, const thread_tile &t,
                                                            const philox_state &philox, uint64_t group, int thread_row,
                                                            uint32_t mask_bytes, uint32_t (&keep)[BATCH])
{
    if (c.mask_bytes_aligned) {
        element_keep_from_bytes<E, HAS_ACTIVATION>(mask_bytes, keep);
        return;
    }
    uint32_t groups = 0;
    if (c.source == DROPOUT_GENERATED) {
#pragma unroll
        for (int i = BATCH - 1; i >= 0; i--)
            groups = generate_keep_bits(philox, group + (uint64_t)(i * c.groups_per_pass), c.threshold, groups);
    } else {
        group_keep_bits<SHIFTED, threads_per_row<SHIFTED>, false>(c, t, philox, thread_row * rows_per_pass<SHIFTED>,
                                                                  keep);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            groups |= keep[i] << (8 * i);
    }
    element_keep_from_groups<E>(t.column_in_tile, groups, keep);
}

/* Copies the elements [begin, end) of a chunk from global to shared memory. */
template <typename T> static __device__ __forceinline__ void copy_elements(void *to, const T *from, int begin, int end)
{
#pragma unroll 1
    for (int j = begin; j < end; j++)
        ((T *)to)[j] = from[j];
}

/* Copies by elements the chunks that prefetch_batch leaves out. These chunks extend beyond the end of the tensor's last
 * row, or of its first row, which is the last one in memory if the row stride is negative. The tensor's memory may end
 * there. (Reads before the start of a row stay in its aligned 16 bytes. These belong to the allocation, because
 * allocations begin at multiples of 16 bytes.) */
template <typename E, bool HAS_ACTIVATION>
static __device__ __forceinline__ void copy_row_ends(const dropout_call &c, const thread_tile &t,
                                                     const prefetch_state &r, int thread_row,
                                                     staged_batch<E, HAS_ACTIVATION> &staged)
{
    typedef typename bit_type<E>::type bits;
    constexpr int N = chunk_size<E>, ROWS_PER_PASS = rows_per_pass<SHIFTED>;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++)
#pragma unroll 1
        for (int i = 0; i < staged.BATCH; i++) {
            /* Outside of the tensor, or copied as a whole by prefetch_batch: see prefetch_state. */
            if ((thread_row + i) * ROWS_PER_PASS >= t.chunk_rows[h] ||
                (uint32_t)(thread_row + i - r.first_thread_row[h]) < (uint32_t)r.row_count[h])
                continue;
            const int64_t row = t.row + (thread_row + i) * ROWS_PER_PASS,
                          column = t.column + threads_per_row<SHIFTED> * N * h;
            const int begin = valid_begin(column), end = valid_end<N>(c, column);
            copy_elements<bits>(&staged.chunk[0][i][h][threadIdx.x],
                                (const bits *)c.dy.data + row * c.dy.stride[0] + column, begin, end);
            if (HAS_ACTIVATION)
                copy_elements<bits>(&staged.chunk[staged.TENSORS - 1][i][h][threadIdx.x],
                                    (const bits *)c.x.data + row * c.x.stride[0] + column, begin, end);
            if (c.mask_bytes_aligned)
                copy_elements<uint8_t>(staged.mask_bytes[i][h][threadIdx.x],
                                       (const uint8_t *)c.given_mask.data + row * c.given_mask.stride[0] + column,
                                       begin, end);
        }
}

template <typename E, bool HAS_ACTIVATION>
static __device__ __forceinline__ void backward_shifted(const dropout_call &c)
{
    typedef staged_batch<E, HAS_ACTIVATION> staged;
    constexpr int BATCH = staged::BATCH, N = staged::N, THREADS_PER_ROW = threads_per_row<SHIFTED>,
                  ROWS_PER_PASS = rows_per_pass<SHIFTED>;
    static_assert(THREADS_PER_ROW == 32, "the lanes of a warp are in one row");
    __shared__ union {
        staged batches[2];
        block_sums<SHIFTED> column_sums;
    } memory;
    thread_tile t = make_thread_tile<E, SHIFTED, THREADS_PER_ROW>(c, c.dy, DROPOUT_BWD_SHIFTED_ROWS_PER_THREAD);
    float bias[COT_DROPOUT_GROUP], column_sums[COT_DROPOUT_GROUP] = {0};
    cot_griddepcontrol_launch_dependents();
    prepare_bias<E, SHIFTED, HAS_ACTIVATION>(c, t, bias);
    const philox_state philox = load_philox(c);
    const uint32_t shared = cot_shared_address(&memory);
    prefetch_state r;
    r.chunk = opaque<uint32_t>(shared + 16 * threadIdx.x);
    r.mask_bytes = opaque<uint32_t>(shared + sizeof memory.batches[0].chunk + N * threadIdx.x);
    r.dy = make_cursor<SHIFTED, THREADS_PER_ROW>(t, c.dy, sizeof(E)).data;
    r.x = make_cursor<SHIFTED, THREADS_PER_ROW>(t, c.x, sizeof(E)).data;
    r.bytes = make_cursor<SHIFTED, THREADS_PER_ROW>(t, c.given_mask, 1).data;
    int copies_row_ends = 0; /* the thread has chunks for copy_row_ends */
    t.column_in_tile = opaque<int>(t.column_in_tile);
#pragma unroll
    for (int h = 0; h < staged::CHUNKS; h++) {
        const int rows = (t.chunk_rows[h] + ROWS_PER_PASS - 1) / ROWS_PER_PASS;
        const bool at_row_end = rows > 0 && t.column + THREADS_PER_ROW * N * h + N > c.D;
        const bool in_first_row = at_row_end && t.row == 0,
                   in_last_row = at_row_end && t.row + (rows - 1) * ROWS_PER_PASS == c.R - 1;
        r.first_thread_row[h] = opaque<int>(in_first_row);
        r.row_count[h] = opaque<int>(rows > in_first_row + in_last_row ? rows - in_first_row - in_last_row : 0);
        copies_row_ends |= opaque<int>(in_first_row || in_last_row);
        t.chunk_rows[h] = opaque<int>(t.chunk_rows[h]);
        t.vector_store_rows[h] = opaque<int>(c.dx.data == nullptr ? 0 : t.vector_store_rows[h]);
    }
    row_cursor dx = {make_cursor<SHIFTED, THREADS_PER_ROW>(t, c.dx, sizeof(E)).data, c.dx_pass_bytes};
    uint64_t group = (uint64_t)(t.row * c.groups + t.group);
    uint32_t stage_offset = 0;
    prefetch_batch<E, HAS_ACTIVATION>(c, r, 0, stage_offset);
#pragma unroll 1
    for (int thread_row = 0; thread_row < DROPOUT_BWD_SHIFTED_ROWS_PER_THREAD; thread_row += BATCH) {
        prefetch_batch<E, HAS_ACTIVATION>(c, r, thread_row + BATCH, (uint32_t)sizeof(staged) - stage_offset);
        cot_cp_async_wait_group<1>();
        if (copies_row_ends)
            copy_row_ends(c, t, r, thread_row, memory.batches[stage_offset != 0]);
        fragment<E> dy[BATCH], x[BATCH];
        uint32_t keep[BATCH];
        shifted_element_keep<E, HAS_ACTIVATION>(c, t, philox, group, thread_row, r.mask_bytes + stage_offset, keep);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
#pragma unroll
            for (int h = 0; h < staged::CHUNKS; h++) {
                dy[i].chunk[h].raw = cot_load_shared<4>(r.chunk + stage_offset + staged::chunk_offset(0, i, h));
                if (HAS_ACTIVATION) { /* without an activation zeros suffice; here the slope may be NaN */
                    x[i].chunk[h].raw = cot_load_shared<4>(r.chunk + stage_offset + staged::chunk_offset(1, i, h));
                    keep[i] = (thread_row + i) * ROWS_PER_PASS < t.rows_left ? keep[i] : 0u;
                }
            }
        dispatch_activation<SHIFTED, HAS_ACTIVATION>(c, t, dx, thread_row * ROWS_PER_PASS, dy, x, bias, keep,
                                                     column_sums);
        dx.data += BATCH * c.dx_pass_bytes;
        group += (uint64_t)(BATCH * c.groups_per_pass);
        stage_offset = (uint32_t)sizeof(staged) - stage_offset;
    }
    if (c.partial_sums == nullptr)
        return;
    cot_cp_async_wait_group<0>();
    __syncthreads();
    sum_block<E, SHIFTED>(c, t, column_sums, memory.column_sums);
}

/* Calls with an activation have kernels of their own, because x takes registers. */
/* clang-format off */
#define KERNELS(dtype, E) \
    DROPOUT_KERNEL(dropout_bwd_rows, dtype, 4, (backward<E, PLAIN, false>)) \
    DROPOUT_KERNEL(dropout_bwd_rows, dtype##_active, 3, (backward<E, PLAIN, true>)) \
    DROPOUT_KERNEL(dropout_bwd_rows, dtype##_shifted, 3, (backward_shifted<E, false>)) \
    DROPOUT_KERNEL(dropout_bwd_rows, dtype##_shifted_active, 2, (backward_shifted<E, true>)) \
    DROPOUT_KERNEL(dropout_bwd_rows, dtype##_strided, 1, (backward<E, STRIDED, false>)) \
    DROPOUT_KERNEL(dropout_bwd_rows, dtype##_strided_active, 1, (backward<E, STRIDED, true>))
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
KERNELS(f32, float)
/* clang-format on */

/* Reduces the partial sums to dbias. A block has 32 columns. Each of its 8 warps sums every 8th row tile, and the
 * warps' sums are added in the order of the warps. SHIFTED tiles overlap by one group, so some columns have sums in two
 * tiles. */
extern "C" __global__ void __launch_bounds__(DROPOUT_THREADS)
    dropout_bwd_reduce(const __grid_constant__ dropout_call argument)
{
    (void)argument;
    const dropout_call &c = DROPOUT_ARGUMENT;
    constexpr int WARPS = DROPOUT_THREADS / 32;
    __shared__ float warp_sums[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t d = (int64_t)blockIdx.x * 32 + lane,
                  stored_columns = c.shifted ? tile_columns<SHIFTED> : tile_columns<PLAIN>;
    const int64_t new_columns = c.shifted ? stored_columns - COT_DROPOUT_GROUP : stored_columns;
    const int64_t tile = d / new_columns, stride = c.column_tiles * stored_columns;
    const int64_t index = tile * stored_columns + d % new_columns + (c.shifted ? COT_DROPOUT_GROUP : 0);
    const int64_t edge =
        d % new_columns - new_columns + COT_DROPOUT_GROUP; /* if > 0: also column `edge` of the next tile */
    const bool in_two_tiles = c.shifted && edge > 0 && tile + 1 < c.column_tiles;
    float sum = 0.0f;
    cot_griddepcontrol_wait();
    if (d < c.D) {
#pragma unroll 16
        for (int64_t part = warp; part < c.row_tiles; part += WARPS) {
            sum += c.partial_sums[part * stride + index];
            if (in_two_tiles)
                sum += c.partial_sums[part * stride + (tile + 1) * stored_columns + edge];
        }
    }
    warp_sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || d >= c.D)
        return;
    for (int i = 1; i < WARPS; i++)
        sum += warp_sums[i][lane];
    const int64_t offset = d * c.dbias.column_stride;
    cot_store(c.dbias.data, c.dbias.dtype, offset,
              sum + (c.accumulate ? cot_load(c.dbias.data, c.dbias.dtype, offset) : 0.0f));
}
