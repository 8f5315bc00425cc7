/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_tiling.h: how the vector kernels cut a problem into items. The cut follows from the sizes alone, so
 * that neither the instruction set nor the number of threads changes a sum's order. For kernels and front. */
#ifndef COT_CAUSAL_CONV1D_TILING_H
#define COT_CAUSAL_CONV1D_TILING_H

#include "ops/causal_conv1d/causal_conv1d_problem.h"

enum {
    CONV1D_MAX_K = 32,       /* wider filters go to the scalar kernel */
    CONV1D_PIECE = 2048,     /* tokens that lie in the first-level cache at once, channel-first */
    CONV1D_MAX_PART = 16384, /* tokens of one item */
    CONV1D_MAX_BLOCK = 64,   /* channels of one item, channel-first */
    CONV1D_ROW = 512,        /* channels of one item, channel-last */
    CONV1D_WIDE_ROW = 2048,  /* the same beyond the caches: few long runs of memory */
};

/* Buffers of an item, channel-first, in its thread's slice of scratch: bytes of its channels' weights, and with their sums. */
enum {
    CONV1D_WEIGHTS = CONV1D_MAX_BLOCK * (CONV1D_MAX_K + 1), /* floats, biases included */
    CONV1D_FIRST_SCRATCH = 4 * CONV1D_WEIGHTS,
    CONV1D_BWD_FIRST_SCRATCH = 2 * 4 * CONV1D_WEIGHTS + 4 * 4 * (CONV1D_PIECE + 4 * CONV1D_MAX_K) + 1024
};

/* Buffers of an item, channel-last, in its thread's slice of scratch: in floats, and all of them in bytes. */
enum {
    CONV1D_STAGED = 4 * (CONV1D_WIDE_ROW + 16), /* a tile whose rows pass through a buffer */
    CONV1D_KEPT = 8 * CONV1D_WIDE_ROW,          /* 2K rows, see conv1d_keep: K <= 4 has the widest ones */
    CONV1D_BWD_KEPT = 21 * CONV1D_WIDE_ROW,     /* 5K+1 rows */
    CONV1D_LAST_SCRATCH = 4 * (CONV1D_KEPT + 2 * CONV1D_STAGED) + 256,
    CONV1D_BWD_LAST_SCRATCH = 4 * (CONV1D_BWD_KEPT + 3 * CONV1D_STAGED) + 256
};

/* An item is `group` batch rows x `part` tokens x `block` channels; their numbers, the last of each smaller. */
typedef struct conv1d_tiling {
    int64_t group, part, block;
    int64_t groups, parts, blocks;
} conv1d_tiling;

/* Elements that an item should hold: many items share the work evenly, large ones cost less to begin. */
static inline int64_t conv1d_item_elements(const conv1d_sizes *sizes)
{
    const double all = (double)sizes->B * (double)sizes->D * (double)sizes->T;
    return all / 256 > 65536 ? 65536 : all / 256 < 8192 ? 8192 : (int64_t)(all / 256);
}

static inline void conv1d_count_tiles(conv1d_tiling *tiling, const conv1d_sizes *sizes)
{
    tiling->groups = cot_ceil_div(sizes->B, tiling->group);
    tiling->parts = cot_ceil_div(sizes->T, tiling->part);
    tiling->blocks = cot_ceil_div(sizes->D, tiling->block);
}

static inline int64_t conv1d_items(const conv1d_tiling *tiling)
{
    return COT_PRODUCT(tiling->groups, tiling->parts, tiling->blocks);
}

static inline conv1d_tiling conv1d_tile_channel_first(const conv1d_sizes *sizes)
{
    const int64_t elements = conv1d_item_elements(sizes);
    conv1d_tiling tiling;
    tiling.part = cot_clamp(sizes->T, 1, CONV1D_MAX_PART);
    tiling.block = cot_clamp(elements / tiling.part, 1, cot_clamp(sizes->D, 1, CONV1D_MAX_BLOCK));
    tiling.group = cot_clamp(elements / (tiling.part * tiling.block), 1, cot_clamp(sizes->B, 1, 1024));
    conv1d_count_tiles(&tiling, sizes);
    return tiling;
}

/* A tensor of this many bytes lies beyond the caches for sure. */
enum { CONV1D_WIDE_BYTES = 64 << 20 };

/* Channels of an item, channel-last: what is kept of them (CONV1D_KEPT) stays in the first-level cache, or beyond the
 * caches in the second-level one. */
static inline int64_t conv1d_widest_row(const conv1d_sizes *sizes)
{
    if (sizes->K > 4)
        return sizes->K <= 8 ? 256 : 64;
    const double elements = (double)sizes->B * (double)sizes->D * (double)sizes->T;
    return elements * (double)cot_dtype_size(sizes->dtype) >= CONV1D_WIDE_BYTES ? CONV1D_WIDE_ROW : CONV1D_ROW;
}

/* A part costs what its item begins and ends with, K-1 tokens of its neighbours, and a row of the sums to be read again: long
 * ones where that leaves 32 items. */
static inline conv1d_tiling conv1d_tile_channel_last(const conv1d_sizes *sizes)
{
    const int64_t elements = conv1d_item_elements(sizes);
    conv1d_tiling tiling;
    tiling.block = cot_clamp(sizes->D, 1, conv1d_widest_row(sizes));
    const double share = (double)sizes->B * (double)sizes->D * (double)sizes->T / (32.0 * (double)tiling.block);
    tiling.part = cot_clamp(sizes->T, 1, share >= 512 ? 512 : share >= 256 ? 256 : 128);
    tiling.group = cot_clamp(elements / (tiling.part * tiling.block), 1, cot_clamp(sizes->B, 1, 1024));
    conv1d_count_tiles(&tiling, sizes);
    return tiling;
}

/* What an item owns; `sums` is its row of the partial sums below. */
typedef struct conv1d_item {
    int64_t b_begin, b_end, t_begin, t_end, d_begin, d_end, sums;
} conv1d_item;

static inline conv1d_item conv1d_item_at(const conv1d_tiling *tiling, const conv1d_sizes *sizes, int64_t group,
                                         int64_t part, int64_t block)
{
    conv1d_item item = {.b_begin = group * tiling->group,
                        .t_begin = part * tiling->part,
                        .d_begin = block * tiling->block,
                        .sums = group * tiling->parts + part};
    item.b_end = cot_clamp(item.b_begin + tiling->group, 0, sizes->B);
    item.t_end = cot_clamp(item.t_begin + tiling->part, 0, sizes->T);
    item.d_end = cot_clamp(item.d_begin + tiling->block, 0, sizes->D);
    return item;
}

/* Items in the order of memory: channel-first, the parts of a block of channels follow one another. */
static inline conv1d_item conv1d_item_channel_first(const conv1d_tiling *tiling, const conv1d_sizes *sizes,
                                                    int64_t number)
{
    const int64_t row = number / tiling->parts;
    return conv1d_item_at(tiling, sizes, row / tiling->blocks, number % tiling->parts, row % tiling->blocks);
}

/* Channel-last, the blocks of a part. */
static inline conv1d_item conv1d_item_channel_last(const conv1d_tiling *tiling, const conv1d_sizes *sizes,
                                                   int64_t number)
{
    const int64_t row = number / tiling->blocks;
    return conv1d_item_at(tiling, sizes, row / tiling->parts, row % tiling->parts, number % tiling->blocks);
}

/* Sums of dweight and dbias, [groups*parts][K+1][D]. */
static inline size_t conv1d_partial_bytes(const conv1d_tiling *tiling, const conv1d_sizes *sizes)
{
    return cot_bytes(COT_PRODUCT(tiling->groups, tiling->parts, sizes->K + 1, sizes->D), sizeof(float));
}

#endif
