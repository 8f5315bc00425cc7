/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_tile.cuh: what both directions share: which elements a thread has, how it reaches them, the mask.
 *
 * A thread has 8 columns of several rows, in chunks of 16 bytes: one of a 16-bit dtype; two of float32, LANES chunks
 * apart, so that neighbours still load side by side. The mask goes by groups of 8 columns, one Philox each: lane l finds
 * the keep bits of group l of the tile. How a chunk is reached:
 *
 *   PLAIN    rows begin at multiples of 16 bytes and D is a multiple of 8: a 16-bit chunk is a group.
 *   SHIFTED  rows of contiguous elements anywhere, with the same distance `shift` from a multiple of 16 bytes in all
 *            tensors: chunks are the aligned 16 bytes of memory, of which a row's first and last may be its own in part.
 *            What moves against the columns is the mask: a chunk takes its bits from two groups, found by two lanes. Lane
 *            0 finds those of the group before and has no elements, so tiles are one group narrower.
 *   STRIDED  any strides, an element at a time. */
#ifndef COT_DROPOUT_TILE_CUH
#define COT_DROPOUT_TILE_CUH

#include "dropout_cuda.h"

#include "../../../core/philox.h"
#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/element.cuh"
#include "../../../cuda/device/ptx.cuh"

enum dropout_access { PLAIN, SHIFTED, STRIDED };

/* dropout_source, which device code cannot include. */
enum { SOURCE_KEEP_ALL, SOURCE_DRAWN, SOURCE_DROP_ALL, SOURCE_BYTES, SOURCE_BITS };

/* A kernel: body<element, access, ...>. `blocks`: that many are to fit on a multiprocessor of Hopper; with as few registers
 * as that leaves, other devices would spill. */
/* clang-format off */
#ifdef COT_EVERY_GPU
#error "Hopper's part has to be compiled for it: COT_HOPPER_PARTS of cmake/cuda.cmake"
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DROPOUT_BLOCKS(blocks) blocks
#else
#define DROPOUT_BLOCKS(blocks) 1
#endif
#define DROPOUT_KERNEL(name, blocks, body) \
    extern "C" __global__ void __launch_bounds__(DROPOUT_THREADS, DROPOUT_BLOCKS(blocks)) \
        name(const __grid_constant__ dropout_call c) \
    { \
        body(c); \
    }
/* clang-format on */

/* ---- where ------------------------------------------------------------------------------------------------ */

/* The elements of a chunk, and the chunks of a thread. */
template <typename E> constexpr int chunk_size = 16 / (int)sizeof(E);
template <typename E> constexpr int chunk_count = COT_DROPOUT_GROUP / chunk_size<E>;

/* A thread's first row and columns. */
struct place {
    int64_t tile_row;  /* which tile, counted along the rows */
    int64_t row;       /* the first of the thread */
    int left;          /* rows from there on, or more than a tile has */
    int chunk_left[2]; /* as many as left if the thread has chunk h, else 0 */
    int whole_left[2]; /* the same if the chunk lies within the row, and is written as a whole; else by elements */
    bool direct[2];    /* it is read as a whole, and what it has of other rows ignored; else by elements */
    int group;         /* that this lane finds the bits of; may lie outside the row */
    int64_t column;    /* of chunk 0's first element; may be negative, or beyond the row */
    int lane, beside;  /* beside: which of the rows beside each other */
    int relative;      /* column less the first column of lane 0's group */
};

/* Where row `row` of a tensor of any strides begins, in elements. */
static __device__ __forceinline__ int64_t row_start(const dropout_call &c, const dropout_array &a, int64_t row)
{
    int64_t at = 0;
    for (int axis = c.axes - 1; axis > 0; axis--) {
        at += row % c.shape[axis] * a.stride[axis];
        row /= c.shape[axis];
    }
    return at + row * a.stride[0];
}

/* first: the tensor whose alignment counts. */
template <typename E, int ACCESS, int LANES>
static __device__ __forceinline__ place find_place(const dropout_call &c, const dropout_array &first, int rows)
{
    place p;
    const int beside_count = DROPOUT_THREADS / LANES;
    p.lane = threadIdx.x % LANES;
    p.beside = threadIdx.x / LANES;
    p.tile_row = blockIdx.y + (int64_t)blockIdx.z * gridDim.y;
    p.row = p.tile_row * (beside_count * rows) + p.beside;
    const int64_t left = c.R - p.row;
    p.left = left < beside_count * rows ? (int)left : beside_count * rows;
    const int first_group = ACCESS == SHIFTED ? (int)blockIdx.x * (LANES - 1) - 1 : (int)blockIdx.x * LANES;
    int shift = 0;
    if (ACCESS == SHIFTED)
        shift = (int)((uintptr_t)((const E *)first.data + p.row * first.stride[0]) / sizeof(E) % chunk_size<E>);
    p.group = first_group + p.lane;
    p.relative = chunk_size<E> * p.lane - shift;
    p.column = (int64_t)COT_DROPOUT_GROUP * first_group + p.relative;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        constexpr int N = chunk_size<E>;
        const int64_t column = p.column + LANES * N * h;
        bool own = column + N > 0 && column < c.D;
        if (ACCESS == SHIFTED) /* lane 0's group belongs to the tile before */
            own = own && N * (p.lane + LANES * h) >= COT_DROPOUT_GROUP;
        const bool whole = ACCESS == PLAIN || (ACCESS == SHIFTED && column >= 0 && column + N <= c.D);
        /* Within 16 bytes of a row that is neither the first nor the last, the rows beside it begin and end. */
        const bool between =
            ACCESS == SHIFTED && c.apart && p.tile_row > 0 && p.row - p.beside + beside_count * rows < c.R;
        p.chunk_left[h] = own ? p.left : 0;
        p.whole_left[h] = whole ? p.chunk_left[h] : 0;
        p.direct[h] = whole || between;
    }
    return p;
}

/* Does the thread have chunk h? */
static __device__ __forceinline__ bool has_chunk(const place &p, int h)
{
    return p.chunk_left[h] > 0;
}

/* The thread's first elements in a tensor's rows, one after the other: those of a batch's first row, and the bytes to the
 * next row's. */
struct walk {
    char *at;
    int64_t apart;
};

template <int ACCESS, int LANES>
static __device__ __forceinline__ walk begin_walk(const place &p, const dropout_array &a, int size)
{
    return {(char *)a.data + (p.row * a.stride[0] + p.column) * size, DROPOUT_THREADS / LANES * a.stride[0] * size};
}

/* Row i of the batch, which itself begins `first` rows after the thread's first: where the thread's elements begin, or,
 * STRIDED, the row itself. */
template <int ACCESS, int LANES>
static __device__ __forceinline__ char *row_of(const dropout_call &c, const place &p, const dropout_array &a,
                                               const walk &w, int size, int first, int i)
{
    if (ACCESS == STRIDED)
        return (char *)a.data + row_start(c, a, p.row + first + i * (DROPOUT_THREADS / LANES)) * size;
    return w.at + i * w.apart;
}

/* The same without a walk, for what is seldom there: that takes fewer registers. */
template <int ACCESS, int LANES>
static __device__ __forceinline__ uint8_t *mask_row_of(const dropout_call &c, const place &p, const dropout_array &a,
                                                       int first, int i)
{
    const int64_t row = p.row + first + i * (DROPOUT_THREADS / LANES);
    return (uint8_t *)a.data + (ACCESS == STRIDED ? row_start(c, a, row) : row * a.stride[0]);
}

/* ---- elements, raw until they are used -------------------------------------------------------------------- */

/* Of N elements from this column on, the first that the row has, and one past the last. */
static __device__ __forceinline__ int first_of_row(int64_t column)
{
    return column < 0 ? (int)-column : 0;
}

template <int N> static __device__ __forceinline__ int end_of_row(const dropout_call &c, int64_t column)
{
    return c.D - column < N ? (int)(c.D - column) : N;
}

template <typename E> struct elements {
    cot_vector<E, chunk_size<E>> chunk[chunk_count<E>];
};

/* An element's bits. */
template <typename E> struct bits_of {
    typedef uint16_t type;
};
template <> struct bits_of<float> {
    typedef uint32_t type;
};

/* A batch of rows. What the thread does not have, or is not wanted, is anything. */
template <typename E, int ACCESS, int LANES, int BATCH>
static __device__ __forceinline__ void load(const dropout_call &c, const place &p, const dropout_array &a,
                                            const walk &w, int first, bool wanted, elements<E> (&to)[BATCH])
{
    typedef typename bits_of<E>::type bits;
    constexpr int N = chunk_size<E>, APART = DROPOUT_THREADS / LANES;
#pragma unroll
    for (int i = 0; i < BATCH; i++)
#pragma unroll
        for (int h = 0; h < chunk_count<E>; h++)
            if (ACCESS != STRIDED)
                to[i].chunk[h].raw = cot_load_words_if<4>(wanted && p.direct[h] && first + i * APART < p.chunk_left[h],
                                                          (const E *)(w.at + i * w.apart) + LANES * N * h);
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        if (ACCESS == PLAIN || !wanted || p.direct[h] || p.chunk_left[h] <= 0)
            continue;
        const int64_t column = p.column + LANES * N * h;
        const int begin = first_of_row(column), end = end_of_row<N>(c, column);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const bits *from = (const bits *)row_of<ACCESS, LANES>(c, p, a, w, sizeof(E), first, i);
            cot_words<4> &raw = to[i].chunk[h].raw;
            raw = {0, 0, 0, 0};
#pragma unroll
            for (int j = 0; j < N; j++)
                if (first + i * APART < p.left && j >= begin && j < end)
                    raw.word[j * 4 / N] |= (uint32_t)from[ACCESS == STRIDED ? (column + j) * a.step : LANES * N * h + j]
                                           << (j % (N / 4) * 16);
        }
    }
}

/* What row i of a batch can write as a whole. */
template <typename E, int ACCESS, int LANES>
static __device__ __forceinline__ void store(const place &p, const walk &w, int first, int i, const elements<E> &from)
{
    constexpr int N = chunk_size<E>, APART = DROPOUT_THREADS / LANES;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++)
        if (ACCESS != STRIDED && first + i * APART < p.whole_left[h])
            cot_store_words<4>((E *)(w.at + i * w.apart) + LANES * N * h, from.chunk[h].raw);
}

/* What a batch must write by elements. */
template <typename E, int ACCESS, int LANES, int BATCH>
static __device__ __forceinline__ void store_parts(const dropout_call &c, const place &p, const dropout_array &a,
                                                   const walk &w, int first, const elements<E> (&from)[BATCH])
{
    typedef typename bits_of<E>::type bits;
    constexpr int N = chunk_size<E>, APART = DROPOUT_THREADS / LANES;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        if (ACCESS == PLAIN || p.chunk_left[h] <= p.whole_left[h])
            continue;
        const int64_t column = p.column + LANES * N * h;
        const uint32_t own = (1u << end_of_row<N>(c, column)) - (1u << first_of_row(column)); /* a bit an element */
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            bits *to = (bits *)row_of<ACCESS, LANES>(c, p, a, w, sizeof(E), first, i);
            const uint32_t there = first + i * APART < p.left ? own : 0u;
#pragma unroll
            for (int j = 0; j < N; j++)
                if (there >> j & 1u)
                    to[ACCESS == STRIDED ? (column + j) * a.step : LANES * N * h + j] =
                        (bits)(from[i].chunk[h].raw.word[j * 4 / N] >> (j % (N / 4) * 16));
        }
    }
}

template <typename E>
static __device__ __forceinline__ void unpack(const elements<E> &from, float (&values)[COT_DROPOUT_GROUP])
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
static __device__ __forceinline__ void pack(elements<E> &to, const float (&values)[COT_DROPOUT_GROUP])
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

/* The bias of the thread's columns, of dtype B. */
template <typename B, typename E, int ACCESS, int LANES>
static __device__ __forceinline__ void load_bias_as(const dropout_call &c, const place &p,
                                                    float (&bias)[COT_DROPOUT_GROUP])
{
    constexpr int N = chunk_size<E>;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        const int64_t column = p.column + LANES * N * h;
        const B *from = (const B *)c.bias.data + (ACCESS == STRIDED ? column * c.bias.step : column);
        if (!has_chunk(p, h))
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
            const int begin = first_of_row(column), end = end_of_row<N>(c, column);
#pragma unroll
            for (int j = 0; j < N; j++)
                if (j >= begin && j < end)
                    bias[N * h + j] = cot_to_f32(from[ACCESS == STRIDED ? j * c.bias.step : j]);
        }
    }
}

/* The same of any dtype. Without a bias, what is added changes nothing, not even the sign of 0. */
template <typename E, int ACCESS, int LANES>
static __device__ __forceinline__ void load_bias(const dropout_call &c, const place &p,
                                                 float (&bias)[COT_DROPOUT_GROUP])
{
#pragma unroll
    for (int j = 0; j < COT_DROPOUT_GROUP; j++)
        bias[j] = -0.0f;
    if (c.bias.data == nullptr)
        return;
    switch (c.bias.dtype) {
    case COT_F16: load_bias_as<__half, E, ACCESS, LANES>(c, p, bias); break;
    case COT_BF16: load_bias_as<__nv_bfloat16, E, ACCESS, LANES>(c, p, bias); break;
    default: load_bias_as<float, E, ACCESS, LANES>(c, p, bias);
    }
}

/* ---- the mask --------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint64_t word64(const dropout_array &words)
{
    if (words.data == nullptr)
        return 0;
    const uint32_t *word = (const uint32_t *)words.data;
    return word[0] | (uint64_t)word[words.stride[0]] << 32;
}

/* What masks are drawn from, read from memory once. */
struct draws {
    uint64_t seed, offset;
};

static __device__ __forceinline__ draws find_draws(const dropout_call &c)
{
    return {c.seed + word64(c.seed_memory), c.offset + word64(c.offset_memory)};
}

/* The columns of the lane's group that the row has, 0 to 8. */
static __device__ __forceinline__ int group_columns(const dropout_call &c, const place &p)
{
    const int64_t left = c.D - (int64_t)COT_DROPOUT_GROUP * p.group;
    return p.group < 0 || left <= 0 ? 0 : left < COT_DROPOUT_GROUP ? (int)left : COT_DROPOUT_GROUP;
}

/* Are the 12 aligned bytes that hold the 8 of the lane's group in a SHIFTED row all of that row? */
static __device__ __forceinline__ bool lies_inside(const dropout_call &c, const place &p)
{
    return c.given.step == 1 && p.group > 0 && c.D - (int64_t)COT_DROPOUT_GROUP * p.group >= 12;
}

/* What a given mask says of the lane's group in a row, raw: 8 bytes, or bits in the first one. */
template <int ACCESS, int LANES>
static __device__ __forceinline__ uint2 load_mask(const dropout_call &c, const place &p, int first, int i)
{
    uint2 raw = {0, 0};
    const int columns = group_columns(c, p);
    const uint8_t *from = mask_row_of<ACCESS, LANES>(c, p, c.given, first, i);
    if (c.source == SOURCE_BITS) {
        if (columns > 0)
            raw.x = from[ACCESS == PLAIN ? p.group : p.group * c.given.step];
    } else if (ACCESS == PLAIN) {
        const cot_words<2> words = cot_load_words_if<2>(columns > 0, from + (int64_t)COT_DROPOUT_GROUP * p.group);
        raw = {words.word[0], words.word[1]};
    } else {
        from += (int64_t)COT_DROPOUT_GROUP * p.group * c.given.step;
        uint64_t bytes = 0;
#pragma unroll 1
        for (int j = 0; j < columns; j++)
            bytes |= (uint64_t)from[j * c.given.step] << (8 * j);
        raw = {(uint32_t)bytes, (uint32_t)(bytes >> 32)};
    }
    return raw;
}

/* Keep bits of 8 bytes. */
static __device__ __forceinline__ uint32_t keep_of_bytes(uint2 bytes)
{
    return ((bytes.x & 0x01010101u) * 0x01020408u >> 24 & 15u) | ((bytes.y & 0x01010101u) * 0x10204080u >> 24 & 240u);
}

/* The keep bits of the lane's group in a batch of SHIFTED rows, from bytes. All rows are asked for before one is used, and
 * their groups lie at the same distance from a multiple of 4. */
template <int LANES, int BATCH>
static __device__ __forceinline__ void find_shifted_keep(const dropout_call &c, const place &p, int first,
                                                         uint32_t (&keep)[BATCH])
{
    constexpr int APART = DROPOUT_THREADS / LANES;
    const bool inside = lies_inside(c, p);
    const uint8_t *from =
        mask_row_of<SHIFTED, LANES>(c, p, c.given, first, 0) + (int64_t)COT_DROPOUT_GROUP * p.group * c.given.step;
    const int skipped = (int)((uintptr_t)from % 4);
    uint32_t words[BATCH][3];
    from -= skipped;
#pragma unroll
    for (int i = 0; i < BATCH; i++, from += APART * c.given.stride[0])
#pragma unroll
        for (int j = 0; j < 3; j++)
            words[i][j] = cot_load_words_if<1>(inside && first + i * APART < p.left, from + 4 * j).word[0];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
        keep[i] = keep_of_bytes({__funnelshift_r(words[i][0], words[i][1], 8 * skipped),
                                 __funnelshift_r(words[i][1], words[i][2], 8 * skipped)});
    if (inside)
        return;
#pragma unroll
    for (int i = 0; i < BATCH; i++)
        if (first + i * APART < p.left)
            keep[i] = keep_of_bytes(load_mask<SHIFTED, LANES>(c, p, first, i));
}

/* The same of PLAIN rows, and of bits: no branch between the rows' loads. */
template <int ACCESS, int LANES, int BATCH>
static __device__ __forceinline__ void find_plain_keep(const dropout_call &c, const place &p, int first,
                                                       uint32_t (&keep)[BATCH])
{
    constexpr int APART = DROPOUT_THREADS / LANES;
    const bool own = group_columns(c, p) > 0;
    const uint8_t *from = mask_row_of<ACCESS, LANES>(c, p, c.given, first, 0);
    const int64_t apart = APART * c.given.stride[0];
    if (c.source == SOURCE_BITS) {
        from += p.group * c.given.step;
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            keep[i] = own && first + i * APART < p.left ? from[i * apart] : 0u;
    } else {
        cot_words<2> bytes[BATCH];
        from += (int64_t)COT_DROPOUT_GROUP * p.group;
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            bytes[i] = cot_load_words_if<2>(own && first + i * APART < p.left, from + i * apart);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            keep[i] = keep_of_bytes({bytes[i].word[0], bytes[i].word[1]});
    }
}

/* cot_dropout_keep in fewer instructions, for a threshold of 1 to 65535: a draw is kept where adding 2^32 less the
 * threshold, both in the upper halves of words, carries; and the carry becomes the next bit, below those of `keep`. */
static __device__ __forceinline__ uint32_t draw_keep(const draws &from, uint64_t group, uint32_t threshold,
                                                     uint32_t keep = 0)
{
    uint32_t words[4];
    cot_dropout_group(from.seed, from.offset, group, words);
#pragma unroll
    for (int j = COT_DROPOUT_GROUP - 1; j >= 0; j--)
        asm("{\n"
            "    .reg .u32 sum;\n"
            "    add.cc.u32 sum, %1, %2;\n"
            "    addc.u32 %0, %0, %0;\n"
            "}"
            : "+r"(keep)
            : "r"(j % 2 != 0 ? words[j / 2] : words[j / 2] << 16), "r"(0u - (threshold << 16)));
    return keep;
}

/* The keep bits of the lane's group in a batch of rows; those beyond the row may be anything. AT_ONCE: there are registers
 * for the bytes of all PLAIN rows. */
template <int ACCESS, int LANES, bool AT_ONCE, int BATCH>
static __device__ __forceinline__ void find_keep(const dropout_call &c, const place &p, const draws &from, int first,
                                                 uint32_t (&keep)[BATCH])
{
    constexpr int APART = DROPOUT_THREADS / LANES;
    if (c.source == SOURCE_DRAWN) {
        const uint64_t group = (uint64_t)((p.row + first) * c.groups + p.group);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            keep[i] = draw_keep(from, group + (uint64_t)(i * (APART * c.groups)), c.threshold);
    } else if (c.given.data == nullptr) {
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            keep[i] = c.source == SOURCE_KEEP_ALL ? 0xffu : 0u;
    } else if ((AT_ONCE && ACCESS == PLAIN) || (ACCESS == SHIFTED && c.source == SOURCE_BITS)) {
        find_plain_keep<ACCESS, LANES>(c, p, first, keep);
    } else if (ACCESS == SHIFTED) {
        find_shifted_keep<LANES>(c, p, first, keep);
    } else {
        uint2 raw[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (first + i * APART < p.left)
                raw[i] = load_mask<ACCESS, LANES>(c, p, first, i);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            keep[i] = c.source == SOURCE_BITS ? raw[i].x : keep_of_bytes(raw[i]);
    }
}

/* The keep bits of the thread's own elements in row i of a batch, from those of the groups of its row's lanes. Where
 * there is no row, or nothing is let through, 0. */
template <typename E, int ACCESS, int LANES>
static __device__ __forceinline__ uint32_t keep_of_elements(const dropout_call &c, const place &p, int first, int i,
                                                            uint32_t keep)
{
    constexpr int N = chunk_size<E>;
    keep = c.scale != 0.0f && first + i * (DROPOUT_THREADS / LANES) < p.left ? keep : 0u;
    if (ACCESS != SHIFTED && chunk_count<E> == 1)
        return keep;
    uint32_t bits = 0;
#pragma unroll
    for (int h = 0; h < chunk_count<E>; h++) {
        const int relative = p.relative + LANES * N * h, group = relative >> 3;
        uint32_t two = __shfl_sync(0xffffffffu, keep, group, LANES);
        if (ACCESS == SHIFTED)
            two |= __shfl_sync(0xffffffffu, keep, group + 1, LANES) << 8;
        bits |= (two >> (relative & 7) & ((1u << N) - 1)) << (N * h);
    }
    return bits;
}

#endif
