/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_items.h: how the vector kernels divide a problem into work items, and which problems are larger than a
 * cache. For the kernels and the kernel table. docs/kernels/causal_conv1d_cpu.md defines item, piece, row, tile, column
 * and span, and has a picture of the halo.
 *
 * The division depends on B, D, T, K and the dtype of x. So the number of threads does not change the order of a sum.
 * Inside an item the order also depends on the packing, the strides, the requested gradients and the vector width. */
#ifndef COT_CAUSAL_CONV1D_ITEMS_H
#define COT_CAUSAL_CONV1D_ITEMS_H

#include "ops/causal_conv1d/causal_conv1d_problem.h"

enum {
    CONV1D_MAX_K = 32,               /* wider filters run on the scalar kernel */
    CONV1D_ROW_BUFFER_TOKENS = 2048, /* tokens of the buffers of a row, which fit in L1; channel-last: of a piece */
    CONV1D_MAX_ITEM_TOKENS = 16384,  /* tokens of one item, channel-first */
    /* Number of channels of one item. Wide items are for x of at least CONV1D_WIDE_BYTES: they read few long memory
     * ranges. */
    CONV1D_CHANNEL_FIRST_MAX_ITEM_CHANNELS = 64,
    CONV1D_CHANNEL_LAST_ITEM_CHANNELS = 512,
    CONV1D_CHANNEL_LAST_WIDE_ITEM_CHANNELS = 2048,
};

/* Buffers of a channel-first item, in the thread's scratch: the weights and biases of the item's channels. In the
 * backward also their sums, and the buffers of a row with the rest of its state (piece_work of
 * causal_conv1d_bwd_channel_first.c). */
enum {
    CONV1D_COPIED_WEIGHT_FLOATS = CONV1D_CHANNEL_FIRST_MAX_ITEM_CHANNELS * (CONV1D_MAX_K + 1),
    CONV1D_CHANNEL_FIRST_SCRATCH_BYTES = sizeof(float) * CONV1D_COPIED_WEIGHT_FLOATS,
    CONV1D_BWD_ROW_BUFFERS = 4, /* inputs, dy_f32, g, outputs */
    /* Of one of them: tokens, then halo and padding to whole vectors */
    CONV1D_BWD_ROW_BUFFER_FLOATS = CONV1D_ROW_BUFFER_TOKENS + 4 * CONV1D_MAX_K,
    CONV1D_BWD_CHANNEL_FIRST_SCRATCH_BYTES =
        sizeof(float) * (2 * CONV1D_COPIED_WEIGHT_FLOATS + CONV1D_BWD_ROW_BUFFERS * CONV1D_BWD_ROW_BUFFER_FLOATS) + 1024
};

/* Buffers of a channel-last item, in the thread's scratch. Only filters of K <= 4 have items of
 * CONV1D_CHANNEL_LAST_WIDE_ITEM_CHANNELS (conv1d_channel_last_item_channels). */
enum {
    /* A tile that passes through a buffer: 4 tokens of 2048 channels, or 8 of 512 (conv1d_buffered_tile_tokens), each
     * with CONV1D_PITCH_PADDING, which is at most 16. */
    CONV1D_BUFFERED_TILE_FLOATS = 4 * (CONV1D_CHANNEL_LAST_WIDE_ITEM_CHANNELS + 16),
    /* 2K vectors for each column (see conv1d_pack_vector), and 5K+1 in the backward. */
    CONV1D_COLUMN_STATE_FLOATS = 8 * CONV1D_CHANNEL_LAST_WIDE_ITEM_CHANNELS,
    CONV1D_BWD_COLUMN_STATE_FLOATS = 21 * CONV1D_CHANNEL_LAST_WIDE_ITEM_CHANNELS,
    CONV1D_CHANNEL_LAST_SCRATCH_BYTES =
        sizeof(float) * (CONV1D_COLUMN_STATE_FLOATS + 2 * CONV1D_BUFFERED_TILE_FLOATS) + 256,
    CONV1D_BWD_CHANNEL_LAST_SCRATCH_BYTES =
        sizeof(float) * (CONV1D_BWD_COLUMN_STATE_FLOATS + 3 * CONV1D_BUFFERED_TILE_FLOATS) + 256
};

/* An item is batch_per_item batch elements x tokens_per_item tokens x channels_per_item channels. The last item of an
 * axis may be smaller. Kernels divide an item into pieces, and a piece into rows or tiles:
 * docs/kernels/causal_conv1d_cpu.md. */
typedef struct conv1d_item_grid {
    int64_t batch_per_item, tokens_per_item, channels_per_item;
    int64_t items_along_batch, items_along_tokens, items_along_channels;
} conv1d_item_grid;

/* Target number of elements of an item. Many items balance the load; large items have less start-up cost per
 * element. */
static inline int64_t conv1d_target_elements(const conv1d_sizes *sizes)
{
    const double total = (double)sizes->B * (double)sizes->D * (double)sizes->T;
    return total / 256 > 65536 ? 65536 : total / 256 < 8192 ? 8192 : (int64_t)(total / 256);
}

static inline void conv1d_count_items(conv1d_item_grid *item_grid, const conv1d_sizes *sizes)
{
    item_grid->items_along_batch = cot_ceil_div(sizes->B, item_grid->batch_per_item);
    item_grid->items_along_tokens = cot_ceil_div(sizes->T, item_grid->tokens_per_item);
    item_grid->items_along_channels = cot_ceil_div(sizes->D, item_grid->channels_per_item);
}

static inline int64_t conv1d_item_count(const conv1d_item_grid *item_grid)
{
    return COT_PRODUCT(item_grid->items_along_batch, item_grid->items_along_tokens, item_grid->items_along_channels);
}

static inline conv1d_item_grid conv1d_item_grid_channel_first(const conv1d_sizes *sizes)
{
    const int64_t target_elements = conv1d_target_elements(sizes);
    conv1d_item_grid item_grid;
    item_grid.tokens_per_item = cot_clamp(sizes->T, 1, CONV1D_MAX_ITEM_TOKENS);
    item_grid.channels_per_item = cot_clamp(target_elements / item_grid.tokens_per_item, 1,
                                            cot_clamp(sizes->D, 1, CONV1D_CHANNEL_FIRST_MAX_ITEM_CHANNELS));
    item_grid.batch_per_item = cot_clamp(target_elements / (item_grid.tokens_per_item * item_grid.channels_per_item), 1,
                                         cot_clamp(sizes->B, 1, 1024));
    conv1d_count_items(&item_grid, sizes);
    return item_grid;
}

/* Number of bytes from which x counts as larger than the L3 cache. */
enum { CONV1D_WIDE_BYTES = 64 << 20 };

/* Number of channels of a channel-last item. Their column state (CONV1D_COLUMN_STATE_FLOATS) stays in the L1 cache,
 * that of a wide item in the L2 cache. */
static inline int64_t conv1d_channel_last_item_channels(const conv1d_sizes *sizes)
{
    if (sizes->K > 4)
        return sizes->K <= 8 ? 256 : 64;
    const double elements = (double)sizes->B * (double)sizes->D * (double)sizes->T;
    return elements * (double)cot_dtype_size(sizes->dtype) >= CONV1D_WIDE_BYTES ? CONV1D_CHANNEL_LAST_WIDE_ITEM_CHANNELS
                                                                                : CONV1D_CHANNEL_LAST_ITEM_CHANNELS;
}

/* Each item along the tokens computes K-1 tokens of its neighbours again, and adds one set of partial sums that the
 * reduction reads. So items have many tokens where that leaves at least 32 items. */
static inline conv1d_item_grid conv1d_item_grid_channel_last(const conv1d_sizes *sizes)
{
    const int64_t target_elements = conv1d_target_elements(sizes);
    conv1d_item_grid item_grid;
    item_grid.channels_per_item = cot_clamp(sizes->D, 1, conv1d_channel_last_item_channels(sizes));
    const double target_tokens =
        (double)sizes->B * (double)sizes->D * (double)sizes->T / (32.0 * (double)item_grid.channels_per_item);
    item_grid.tokens_per_item = cot_clamp(sizes->T, 1, target_tokens >= 512 ? 512 : target_tokens >= 256 ? 256 : 128);
    item_grid.batch_per_item = cot_clamp(target_elements / (item_grid.tokens_per_item * item_grid.channels_per_item), 1,
                                         cot_clamp(sizes->B, 1, 1024));
    conv1d_count_items(&item_grid, sizes);
    return item_grid;
}

/* The ranges of a work item. `partial_index` is its index along axis 0 of the partial sums below. */
typedef struct conv1d_item {
    int64_t b_begin, b_end, t_begin, t_end, d_begin, d_end, partial_index;
} conv1d_item;

static inline conv1d_item conv1d_item_at(const conv1d_item_grid *item_grid, const conv1d_sizes *sizes,
                                         int64_t batch_item, int64_t token_item, int64_t channel_item)
{
    conv1d_item item = {.b_begin = batch_item * item_grid->batch_per_item,
                        .t_begin = token_item * item_grid->tokens_per_item,
                        .d_begin = channel_item * item_grid->channels_per_item,
                        .partial_index = batch_item * item_grid->items_along_tokens + token_item};
    item.b_end = cot_clamp(item.b_begin + item_grid->batch_per_item, 0, sizes->B);
    item.t_end = cot_clamp(item.t_begin + item_grid->tokens_per_item, 0, sizes->T);
    item.d_end = cot_clamp(item.d_begin + item_grid->channels_per_item, 0, sizes->D);
    return item;
}

/* Item number `index`, in memory order. Channel-first: consecutive items have the same channels and consecutive
 * tokens. */
static inline conv1d_item conv1d_item_channel_first(const conv1d_item_grid *item_grid, const conv1d_sizes *sizes,
                                                    int64_t index)
{
    const int64_t batch_channel = index / item_grid->items_along_tokens;
    return conv1d_item_at(item_grid, sizes, batch_channel / item_grid->items_along_channels,
                          index % item_grid->items_along_tokens, batch_channel % item_grid->items_along_channels);
}

/* Channel-last: consecutive items have the same tokens and consecutive channels. */
static inline conv1d_item conv1d_item_channel_last(const conv1d_item_grid *item_grid, const conv1d_sizes *sizes,
                                                   int64_t index)
{
    const int64_t batch_token = index / item_grid->items_along_channels;
    return conv1d_item_at(item_grid, sizes, batch_token / item_grid->items_along_tokens,
                          batch_token % item_grid->items_along_tokens, index % item_grid->items_along_channels);
}

/* Number of bytes of all tensors of a call from which outputs are written by non-temporal stores: several times the L2
 * cache of a core (1 or 2 MiB). */
enum { CONV1D_NONTEMPORAL_BYTES = 8 << 20 };

/* Whether outputs are written by non-temporal stores. tensors: number of tensors with the sizes of x in the call. */
static inline bool conv1d_uses_nontemporal_stores(const conv1d_sizes *sizes, int tensors)
{
    return (double)tensors * (double)sizes->B * (double)sizes->D * (double)sizes->T *
               (double)cot_dtype_size(sizes->dtype) >=
           CONV1D_NONTEMPORAL_BYTES;
}

/* The plan of the backward kernels: their item_grid, and the bytes of the partial sums of dweight and dbias,
 * [items_along_batch*items_along_tokens][K+1][D]. */
typedef struct conv1d_items_plan {
    conv1d_item_grid item_grid;
    size_t bytes;
} conv1d_items_plan;

static inline conv1d_items_plan conv1d_items_plan_of(conv1d_item_grid item_grid, const conv1d_sizes *sizes)
{
    return (conv1d_items_plan){item_grid, cot_bytes(COT_PRODUCT(item_grid.items_along_batch,
                                                                item_grid.items_along_tokens, sizes->K + 1, sizes->D),
                                                    sizeof(float))};
}

#endif
