/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_tile.cuh: the parts that both directions share: the elements of a thread, their loads and stores, the mask.
 *
 * docs/kernels/dropout_gpu.md explains chunks, groups and the three versions. The template parameter ACCESS is the
 * version: PLAIN, SHIFTED or STRIDED. THREADS_PER_ROW threads share a row, and thread i of them computes the keep bits of
 * group i of the tile. In float32 a thread has two chunks of a row, THREADS_PER_ROW chunks apart. In SHIFTED rows all
 * tensors have the same distance `shift` from a multiple of 16 bytes. */
#ifndef COT_DROPOUT_TILE_CUH
#define COT_DROPOUT_TILE_CUH

#include "dropout_cuda.h"

#include "../../../core/philox.h"
#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/ptx.cuh"

/* DROPOUT_BLOCKS limits the registers of a thread on Hopper only: the kernels would spill on other devices. */
/* clang-format off */
#if defined(COT_EVERY_GPU)
#error "compile this file for sm_90a: add it to COT_HOPPER_PARTS of cmake/cuda.cmake"
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DROPOUT_BLOCKS(blocks) blocks
#else
#define DROPOUT_BLOCKS(blocks) 1
#endif
#if defined(__HIP__)
#define DROPOUT_ARGUMENT COT_HIP_ARGUMENT(dropout_call)
#else
#define DROPOUT_ARGUMENT argument
#endif
/* The symbol of a kernel begins with the name in the kernel table. */
#if defined(__HIP__)
#define DROPOUT_SYMBOL(stem, instance) stem##_cdna_##instance
#else
#define DROPOUT_SYMBOL(stem, instance) stem##_sm80_##instance
#endif
/* Defines a kernel that calls `body`, for example (forward<E, PLAIN>). `blocks`: the number of resident blocks per
 * multiprocessor on Hopper. */
#define DROPOUT_KERNEL(stem, instance, blocks, body) \
    extern "C" __global__ void __launch_bounds__(DROPOUT_THREADS, DROPOUT_BLOCKS(blocks)) \
        DROPOUT_SYMBOL(stem, instance)(const __grid_constant__ dropout_call argument) \
    { \
        (void)argument; \
        body(DROPOUT_ARGUMENT); \
    }
/* clang-format on */

/* ---- tiles ------------------------------------------------------------------------------------------------ */

/* The number of elements in a chunk, and of chunks that a thread has in a row. */
template <typename E> constexpr int chunk_size = 16 / (int)sizeof(E);
template <typename E> constexpr int chunk_count = COT_DROPOUT_GROUP / chunk_size<E>;

/* A thread's part of a tile. */
struct thread_tile {
    int64_t row_tile;  /* the tile's number along the rows */
    int64_t row;       /* the thread's first row */
    int rows_left;     /* rows of the tensor from `row` on, at most those of a tile */
    int chunk_rows[2]; /* rows_left if the thread has chunk h, else 0 */
    /* Rows whose chunk h is stored as a vector: chunk_rows, or 0 if it crosses a row's end or the rows are STRIDED. */
    int vector_store_rows[2];
    bool vector_load[2]; /* vector loads; elements of other rows are ignored. Else loaded by elements */
    int group;           /* the group whose bits this thread computes; may lie outside the row */
    int64_t column;      /* of the first element of chunk 0; may be negative, or beyond the row */
    int thread_in_row;   /* number among the THREADS_PER_ROW threads of the row */
    int row_in_pass;     /* number among the rows that the block processes at once */
    int column_in_tile;  /* column minus the first column of the tile's first group */
};

/* The offset of row `row` in a tensor of any strides, in elements. */
static __device__ __forceinline__ int64_t row_offset(const dropout_call &c, const dropout_array &a, int64_t row)
{
    int64_t offset = 0;
    for (int axis = c.axes - 1; axis > 0; axis--) {
        offset += row % c.shape[axis] * a.stride[axis];
        row /= c.shape[axis];
    }
    return offset + row * a.stride[0];
}

/* `rows`: rows per thread. shift_source: the tensor whose alignment defines the shift. */
template <typename E, int ACCESS, int THREADS_PER_ROW>
static __device__ __forceinline__ thread_tile make_thread_tile(const dropout_call &c, const dropout_array &shift_source,
                                                               int rows)
{
    thread_tile t;
    const int rows_per_pass = DROPOUT_THREADS / THREADS_PER_ROW;
    t.thread_in_row = threadIdx.x % THREADS_PER_ROW;
    t.row_in_pass = threadIdx.x / THREADS_PER_ROW;
    t.row_tile = blockIdx.y + (int64_t)blockIdx.z * gridDim.y;
    t.row = t.row_tile * (rows_per_pass * rows) + t.row_in_pass;
    const int64_t rows_left = c.R - t.row;
    t.rows_left = rows_left < rows_per_pass * rows ? (int)rows_left : rows_per_pass * rows;
    const int first_group =
        ACCESS == SHIFTED ? (int)blockIdx.x * (THREADS_PER_ROW - 1) - 1 : (int)blockIdx.x * THREADS_PER_ROW;
    int shift = 0;
    if (ACCESS == SHIFTED)
        shift = (int)((uintptr_t)((const E *)shift_source.data + t.row * shift_source.stride[0]) / sizeof(E) %
                      chunk_size<E>);
    t.group = first_group + t.thread_in_row;
    t.column_in_tile = chunk_size<E> * t.thread_in_row - shift;
    t.column = (int64_t)COT_DROPOUT_GROUP * first_group + t.column_in_tile;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        constexpr int N = chunk_size<E>;
        const int64_t column = t.column + THREADS_PER_ROW * N * h;
        bool has_elements = column + N > 0 && column < c.D;
        if (ACCESS == SHIFTED) /* the columns of the first group belong to the tile before */
            has_elements = has_elements && N * (t.thread_in_row + THREADS_PER_ROW * h) >= COT_DROPOUT_GROUP;
        const bool whole = ACCESS == PLAIN || (ACCESS == SHIFTED && column >= 0 && column + N <= c.D);
        /* All rows of the tile have a row before and after them. An aligned chunk at a row's end then reads only bytes
         * that belong to these rows. */
        const bool interior = ACCESS == SHIFTED && c.pitch_at_least_16 && t.row_tile > 0 &&
                              t.row - t.row_in_pass + rows_per_pass * rows < c.R;
        t.chunk_rows[h] = has_elements ? t.rows_left : 0;
        t.vector_store_rows[h] = whole ? t.chunk_rows[h] : 0;
        t.vector_load[h] = whole || interior;
    }
    return t;
}

static __device__ __forceinline__ bool has_chunk(const thread_tile &t, int h)
{
    return t.chunk_rows[h] > 0;
}

/* Iterates over a thread's rows of a tensor. data: the thread's first element in the first row of a batch. pass_bytes:
 * the distance to the thread's next row, in bytes. */
struct row_cursor {
    char *data;
    int64_t pass_bytes;
};

template <int ACCESS, int THREADS_PER_ROW>
static __device__ __forceinline__ row_cursor make_cursor(const thread_tile &t, const dropout_array &a, int size)
{
    return {(char *)a.data + (t.row * a.stride[0] + t.column) * size,
            DROPOUT_THREADS / THREADS_PER_ROW * a.stride[0] * size};
}

/* The address of row i of a batch: of the thread's first element in it, or for STRIDED of the row's first element. The
 * batch begins `batch_row` rows after the thread's first row, t.row. */
template <int ACCESS, int THREADS_PER_ROW>
static __device__ __forceinline__ char *row_pointer(const dropout_call &c, const thread_tile &t, const dropout_array &a,
                                                    const row_cursor &cursor, int size, int batch_row, int i)
{
    if (ACCESS == STRIDED)
        return (char *)a.data + row_offset(c, a, t.row + batch_row + i * (DROPOUT_THREADS / THREADS_PER_ROW)) * size;
    return cursor.data + i * cursor.pass_bytes;
}

/* The address of row i in a mask. It is computed without a cursor: masks in memory are rare, and a cursor takes
 * registers. */
template <int ACCESS, int THREADS_PER_ROW>
static __device__ __forceinline__ uint8_t *mask_row_pointer(const dropout_call &c, const thread_tile &t,
                                                            const dropout_array &a, int batch_row, int i)
{
    const int64_t row = t.row + batch_row + i * (DROPOUT_THREADS / THREADS_PER_ROW);
    return (uint8_t *)a.data + (ACCESS == STRIDED ? row_offset(c, a, row) : row * a.stride[0]);
}

/* ---- elements: loads and stores of raw bits --------------------------------------------------------------- */

/* Of N elements from `column` on, those with the indices from valid_begin to valid_end - 1 lie in the row. */
static __device__ __forceinline__ int valid_begin(int64_t column)
{
    return column < 0 ? (int)-column : 0;
}

template <int N> static __device__ __forceinline__ int valid_end(const dropout_call &c, int64_t column)
{
    return c.D - column < N ? (int)(c.D - column) : N;
}

template <typename E> struct fragment {
    cot_vector<E, chunk_size<E>> chunk[chunk_count<E>];
};

/* The unsigned integer type of an element's bits. */
template <typename E> struct bit_type {
    typedef uint16_t type;
};
template <> struct bit_type<float> {
    typedef uint32_t type;
};

/* Loads the thread's elements in a batch of rows. Elements outside the tensor are undefined; without `needed` all
 * are. */
template <typename E, int ACCESS, int THREADS_PER_ROW, int BATCH>
static __device__ __forceinline__ void load_rows(const dropout_call &c, const thread_tile &t, const dropout_array &a,
                                                 const row_cursor &cursor, int batch_row, bool needed,
                                                 fragment<E> (&to)[BATCH])
{
    typedef typename bit_type<E>::type bits;
    constexpr int N = chunk_size<E>, ROWS_PER_PASS = DROPOUT_THREADS / THREADS_PER_ROW;
#pragma unroll
    for (int i = 0; i < BATCH; i++)
#pragma unroll
        for (int h = 0; h < chunk_count<E>; h++)
            if (ACCESS != STRIDED)
                to[i].chunk[h].raw =
                    cot_load_words_if<4>(needed && t.vector_load[h] && batch_row + i * ROWS_PER_PASS < t.chunk_rows[h],
                                         (const E *)(cursor.data + i * cursor.pass_bytes) + THREADS_PER_ROW * N * h);
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        if (ACCESS == PLAIN || !needed || t.vector_load[h] || t.chunk_rows[h] <= 0) /* loaded above, or not at all */
            continue;
        const int64_t column = t.column + THREADS_PER_ROW * N * h;
        const int begin = valid_begin(column), end = valid_end<N>(c, column);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const bits *from =
                (const bits *)row_pointer<ACCESS, THREADS_PER_ROW>(c, t, a, cursor, sizeof(E), batch_row, i);
            cot_words<4> &raw = to[i].chunk[h].raw;
            raw = {0, 0, 0, 0};
#pragma unroll
            for (int j = 0; j < N; j++)
                if (batch_row + i * ROWS_PER_PASS < t.rows_left && j >= begin && j < end)
                    raw.word[j * 4 / N] |=
                        (uint32_t)from[ACCESS == STRIDED ? (column + j) * a.column_stride : THREADS_PER_ROW * N * h + j]
                        << (j % (N / 4) * 16);
        }
    }
}

/* Stores the chunks of row i that lie within the row, as vectors. */
template <typename E, int ACCESS, int THREADS_PER_ROW>
static __device__ __forceinline__ void store_whole_chunks(const thread_tile &t, const row_cursor &cursor, int batch_row,
                                                          int i, const fragment<E> &from)
{
    constexpr int N = chunk_size<E>, ROWS_PER_PASS = DROPOUT_THREADS / THREADS_PER_ROW;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++)
        if (ACCESS != STRIDED && batch_row + i * ROWS_PER_PASS < t.vector_store_rows[h])
            cot_store_words<4>((E *)(cursor.data + i * cursor.pass_bytes) + THREADS_PER_ROW * N * h, from.chunk[h].raw);
}

/* Stores the other chunks of a batch, element by element. */
template <typename E, int ACCESS, int THREADS_PER_ROW, int BATCH>
static __device__ __forceinline__ void store_partial_chunks(const dropout_call &c, const thread_tile &t,
                                                            const dropout_array &a, const row_cursor &cursor,
                                                            int batch_row, const fragment<E> (&from)[BATCH])
{
    typedef typename bit_type<E>::type bits;
    constexpr int N = chunk_size<E>, ROWS_PER_PASS = DROPOUT_THREADS / THREADS_PER_ROW;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        if (ACCESS == PLAIN || t.chunk_rows[h] <= t.vector_store_rows[h]) /* no other chunks */
            continue;
        const int64_t column = t.column + THREADS_PER_ROW * N * h;
        const uint32_t valid = (1u << valid_end<N>(c, column)) - (1u << valid_begin(column)); /* one bit per element */
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            bits *to = (bits *)row_pointer<ACCESS, THREADS_PER_ROW>(c, t, a, cursor, sizeof(E), batch_row, i);
            const uint32_t row_valid = batch_row + i * ROWS_PER_PASS < t.rows_left ? valid : 0u;
#pragma unroll
            for (int j = 0; j < N; j++)
                if (row_valid >> j & 1u)
                    to[ACCESS == STRIDED ? (column + j) * a.column_stride : THREADS_PER_ROW * N * h + j] =
                        (bits)(from[i].chunk[h].raw.word[j * 4 / N] >> (j % (N / 4) * 16));
        }
    }
}

template <typename E>
static __device__ __forceinline__ void unpack(const fragment<E> &from, float (&values)[COT_DROPOUT_GROUP])
{
    constexpr int N = chunk_size<E>;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        float part[N];
        cot_unpack(from.chunk[h], part);
#pragma unroll
        for (int j = 0; j < N; j++)
            values[N * h + j] = part[j];
    }
}

template <typename E>
static __device__ __forceinline__ void pack(fragment<E> &to, const float (&values)[COT_DROPOUT_GROUP])
{
    constexpr int N = chunk_size<E>;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        float part[N];
#pragma unroll
        for (int j = 0; j < N; j++)
            part[j] = values[N * h + j];
        cot_pack(to.chunk[h], part);
    }
}

/* Loads the bias of the thread's columns, of dtype B. */
template <typename B, typename E, int ACCESS, int THREADS_PER_ROW>
static __device__ __forceinline__ void load_bias_as(const dropout_call &c, const thread_tile &t,
                                                    float (&bias)[COT_DROPOUT_GROUP])
{
    constexpr int N = chunk_size<E>;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        const int64_t column = t.column + THREADS_PER_ROW * N * h;
        const B *from = (const B *)c.bias.data + (ACCESS == STRIDED ? column * c.bias.column_stride : column);
        if (!has_chunk(t, h))
            continue;
        if (ACCESS == PLAIN) {
            float part[N];
            cot_vector<B, N> v;
#pragma unroll
            for (int word = 0; word < v.words; word += 2)
                *(uint2 *)&v.raw.word[word] = *(const uint2 *)((const uint32_t *)from + word);
            cot_unpack(v, part);
#pragma unroll
            for (int j = 0; j < N; j++)
                bias[N * h + j] = part[j];
        } else {
            const int begin = valid_begin(column), end = valid_end<N>(c, column);
#pragma unroll
            for (int j = 0; j < N; j++)
                if (j >= begin && j < end)
                    bias[N * h + j] = cot_to_f32(from[ACCESS == STRIDED ? j * c.bias.column_stride : j]);
        }
    }
}

/* Loads a bias of any dtype. Without a bias the values are -0, so that adding them keeps the sign of a zero. */
template <typename E, int ACCESS, int THREADS_PER_ROW>
static __device__ __forceinline__ void load_bias(const dropout_call &c, const thread_tile &t,
                                                 float (&bias)[COT_DROPOUT_GROUP])
{
#pragma unroll
    for (int j = 0; j < COT_DROPOUT_GROUP; j++)
        bias[j] = -0.0f;
    if (c.bias.data == nullptr)
        return;
    switch (c.bias.dtype) {
    case COT_F16: load_bias_as<__half, E, ACCESS, THREADS_PER_ROW>(c, t, bias); break;
    case COT_BF16: load_bias_as<__nv_bfloat16, E, ACCESS, THREADS_PER_ROW>(c, t, bias); break;
    default: load_bias_as<float, E, ACCESS, THREADS_PER_ROW>(c, t, bias);
    }
}

/* ---- the mask --------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint64_t load_u64(const dropout_array &words)
{
    if (words.data == nullptr)
        return 0;
    const uint32_t *word = (const uint32_t *)words.data;
    return word[0] | (uint64_t)word[words.stride[0]] << 32;
}

/* Seed and offset of the generator, loaded once. */
struct philox_state {
    uint64_t seed, offset;
};

static __device__ __forceinline__ philox_state load_philox(const dropout_call &c)
{
    return {c.seed + load_u64(c.seed_tensor), c.offset + load_u64(c.offset_tensor)};
}

/* The number of columns of the thread's group that lie in the row, 0 to 8. */
static __device__ __forceinline__ int group_columns(const dropout_call &c, const thread_tile &t)
{
    const int64_t columns_left = c.D - (int64_t)COT_DROPOUT_GROUP * t.group;
    return t.group < 0 || columns_left <= 0   ? 0
           : columns_left < COT_DROPOUT_GROUP ? (int)columns_left
                                              : COT_DROPOUT_GROUP;
}

/* In a SHIFTED row of mask bytes, 3 aligned words hold the 8 bytes of the thread's group. Returns whether all 3 lie
 * in the row. */
static __device__ __forceinline__ bool group_is_interior(const dropout_call &c, const thread_tile &t)
{
    return c.given_mask.column_stride == 1 && t.group > 0 && c.D - (int64_t)COT_DROPOUT_GROUP * t.group >= 12;
}

/* Loads the given mask of the thread's group in one row: 8 bytes, or the bits in the first byte. */
template <int ACCESS, int THREADS_PER_ROW>
static __device__ __forceinline__ uint2 load_mask_group(const dropout_call &c, const thread_tile &t, int batch_row,
                                                        int i)
{
    uint2 raw = {0, 0};
    const int columns = group_columns(c, t);
    const uint8_t *from = mask_row_pointer<ACCESS, THREADS_PER_ROW>(c, t, c.given_mask, batch_row, i);
    if (c.source == DROPOUT_BITS) {
        if (columns > 0)
            raw.x = from[ACCESS == PLAIN ? t.group : t.group * c.given_mask.column_stride];
    } else if (ACCESS == PLAIN) {
        const cot_words<2> words = cot_load_words_if<2>(columns > 0, from + (int64_t)COT_DROPOUT_GROUP * t.group);
        raw = {words.word[0], words.word[1]};
    } else {
        from += (int64_t)COT_DROPOUT_GROUP * t.group * c.given_mask.column_stride;
        uint64_t bytes = 0;
#pragma unroll 1
        for (int j = 0; j < columns; j++)
            bytes |= (uint64_t)from[j * c.given_mask.column_stride] << (8 * j);
        raw = {(uint32_t)bytes, (uint32_t)(bytes >> 32)};
    }
    return raw;
}

/* Packs bit 0 of 8 mask bytes into 8 keep bits. */
static __device__ __forceinline__ uint32_t bytes_to_bits(uint2 bytes)
{
    return ((bytes.x & 0x01010101u) * 0x01020408u >> 24 & 15u) | ((bytes.y & 0x01010101u) * 0x10204080u >> 24 & 240u);
}

/* Loads the keep bits of the thread's group in a batch of SHIFTED rows from mask bytes. The loads of all rows are
 * issued before the first use. In all these rows the group has the same distance from a multiple of 4 bytes. */
template <int THREADS_PER_ROW, int BATCH>
static __device__ __forceinline__ void load_keep_shifted(const dropout_call &c, const thread_tile &t, int batch_row,
                                                         uint32_t (&keep)[BATCH])
{
    constexpr int ROWS_PER_PASS = DROPOUT_THREADS / THREADS_PER_ROW;
    const bool inside = group_is_interior(c, t);
    const uint8_t *from = mask_row_pointer<SHIFTED, THREADS_PER_ROW>(c, t, c.given_mask, batch_row, 0) +
                          (int64_t)COT_DROPOUT_GROUP * t.group * c.given_mask.column_stride;
    const int misalignment = (int)((uintptr_t)from % 4);
    uint32_t words[BATCH][3];
    from -= misalignment;
#pragma unroll
    for (int i = 0; i < BATCH; i++, from += ROWS_PER_PASS * c.given_mask.stride[0])
#pragma unroll
        for (int j = 0; j < 3; j++)
            words[i][j] =
                cot_load_words_if<1>(inside && batch_row + i * ROWS_PER_PASS < t.rows_left, from + 4 * j).word[0];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
        keep[i] = bytes_to_bits({__funnelshift_r(words[i][0], words[i][1], 8 * misalignment),
                                 __funnelshift_r(words[i][1], words[i][2], 8 * misalignment)});
    if (inside)
        return;
#pragma unroll
    for (int i = 0; i < BATCH; i++)
        if (batch_row + i * ROWS_PER_PASS < t.rows_left)
            keep[i] = bytes_to_bits(load_mask_group<SHIFTED, THREADS_PER_ROW>(c, t, batch_row, i));
}

/* The same for mask bytes of PLAIN rows, and for mask bits of any rows. There is no branch between the loads of the
 * rows. */
template <int ACCESS, int THREADS_PER_ROW, int BATCH>
static __device__ __forceinline__ void load_keep_plain(const dropout_call &c, const thread_tile &t, int batch_row,
                                                       uint32_t (&keep)[BATCH])
{
    constexpr int ROWS_PER_PASS = DROPOUT_THREADS / THREADS_PER_ROW;
    const bool has_columns = group_columns(c, t) > 0;
    const uint8_t *from = mask_row_pointer<ACCESS, THREADS_PER_ROW>(c, t, c.given_mask, batch_row, 0);
    const int64_t pitch = ROWS_PER_PASS * c.given_mask.stride[0];
    if (c.source == DROPOUT_BITS) {
        from += t.group * c.given_mask.column_stride;
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            keep[i] = has_columns && batch_row + i * ROWS_PER_PASS < t.rows_left ? from[i * pitch] : 0u;
    } else {
        cot_words<2> bytes[BATCH];
        from += (int64_t)COT_DROPOUT_GROUP * t.group;
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            bytes[i] =
                cot_load_words_if<2>(has_columns && batch_row + i * ROWS_PER_PASS < t.rows_left, from + i * pitch);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            keep[i] = bytes_to_bits({bytes[i].word[0], bytes[i].word[1]});
    }
}

/* cot_dropout_keep in fewer instructions, for a threshold of 1 to 65535. The random number and 2^16 minus the threshold
 * are added in the upper halves of 32-bit words. The carry is 1 if number >= threshold. It is shifted into `keep` from
 * the right. */
static __device__ __forceinline__ uint32_t generate_keep_bits(const philox_state &philox, uint64_t group,
                                                              uint32_t threshold, uint32_t keep = 0)
{
    uint32_t words[4];
    cot_dropout_group(philox.seed, philox.offset, group, words);
#pragma unroll
    for (int j = COT_DROPOUT_GROUP - 1; j >= 0; j--) {
#if defined(__HIP__)
        const uint32_t number = j % 2 != 0 ? words[j / 2] : words[j / 2] << 16;
        keep = 2 * keep + (uint32_t)(number >= threshold << 16);
#else
        asm("{\n"
            "    .reg .u32 sum;\n"
            "    add.cc.u32 sum, %1, %2;\n"
            "    addc.u32 %0, %0, %0;\n"
            "}"
            : "+r"(keep)
            : "r"(j % 2 != 0 ? words[j / 2] : words[j / 2] << 16), "r"(0u - (threshold << 16)));
#endif
    }
    return keep;
}

/* The keep bits of the thread's group in a batch of rows. Bits beyond the row are undefined. LOAD_BATCH: the registers
 * suffice to load the mask bytes of all PLAIN rows before the first use. */
template <int ACCESS, int THREADS_PER_ROW, bool LOAD_BATCH, int BATCH>
static __device__ __forceinline__ void group_keep_bits(const dropout_call &c, const thread_tile &t,
                                                       const philox_state &philox, int batch_row,
                                                       uint32_t (&keep)[BATCH])
{
    constexpr int ROWS_PER_PASS = DROPOUT_THREADS / THREADS_PER_ROW;
    if (c.source == DROPOUT_GENERATED) {
        const uint64_t group = (uint64_t)((t.row + batch_row) * c.groups + t.group);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            keep[i] = generate_keep_bits(philox, group + (uint64_t)(i * (ROWS_PER_PASS * c.groups)), c.threshold);
    } else if (c.given_mask.data == nullptr) {
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            keep[i] = c.source == DROPOUT_KEEP_ALL ? 0xffu : 0u;
    } else if ((LOAD_BATCH && ACCESS == PLAIN) || (ACCESS == SHIFTED && c.source == DROPOUT_BITS)) {
        load_keep_plain<ACCESS, THREADS_PER_ROW>(c, t, batch_row, keep);
    } else if (ACCESS == SHIFTED) {
        load_keep_shifted<THREADS_PER_ROW>(c, t, batch_row, keep);
    } else {
        uint2 raw[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (batch_row + i * ROWS_PER_PASS < t.rows_left)
                raw[i] = load_mask_group<ACCESS, THREADS_PER_ROW>(c, t, batch_row, i);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            keep[i] = c.source == DROPOUT_BITS ? raw[i].x : bytes_to_bits(raw[i]);
    }
}

/* The keep bits of the thread's elements in row i of a batch, from the keep bits `keep` that each thread of the row has
 * for its group. 0 if the row does not exist or the scale is 0. */
template <typename E, int ACCESS, int THREADS_PER_ROW>
static __device__ __forceinline__ uint32_t element_keep_bits(const dropout_call &c, const thread_tile &t, int batch_row,
                                                             int i, uint32_t keep)
{
    constexpr int N = chunk_size<E>;
    keep = c.scale != 0.0f && batch_row + i * (DROPOUT_THREADS / THREADS_PER_ROW) < t.rows_left ? keep : 0u;
    if (ACCESS != SHIFTED && chunk_count<E> == 1)
        return keep;
    uint32_t bits = 0;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        const int column_in_tile = t.column_in_tile + THREADS_PER_ROW * N * h, group = column_in_tile >> 3;
        uint32_t two_groups = __shfl_sync(0xffffffffu, keep, group, THREADS_PER_ROW);
        if (ACCESS == SHIFTED)
            two_groups |= __shfl_sync(0xffffffffu, keep, group + 1, THREADS_PER_ROW) << 8;
        bits |= (two_groups >> (column_in_tile & 7) & ((1u << N) - 1)) << (N * h);
    }
    return bits;
}

#endif
