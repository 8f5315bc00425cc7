/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_channel_last.c: y[t] = act(bias + sum_k w[k] * xe[t+k]), for tensors with contiguous channels,
 * or with few tokens. xe is x after the K-1 inputs of the state, or after K-1 zeros.
 *
 * An item is a range of batch elements, tokens and channels (causal_conv1d_items.h). Tiles of tokens are
 * processed in columns of VW channels (causal_conv1d_columns.h). The loops read and write the tensors in place, or use
 * f32 buffers where channels are not contiguous. The items after those write final_state. */
#include "causal_conv1d_columns.h"
#include "causal_conv1d_state.h"

cot_status V_NAME(causal_conv1d_fwd_channel_last)(cot_queue *, const void *, void *);

#define DEFINE_CONVOLVE_TILE(width, dtype)                                                 \
    static int64_t convolve_tile_##width##_##dtype(const conv1d_tile_args *tile)           \
    {                                                                                      \
        return conv1d_convolve_tile_body(tile, width == 0 ? tile->K : width, COT_##dtype); \
    }
#define DEFINE_CONVOLVE_TILES(width) CONV1D_EACH_DTYPE(DEFINE_CONVOLVE_TILE, width)
CONV1D_EACH_WIDTH(DEFINE_CONVOLVE_TILES)

#define CONVOLVE_TILE_ENTRY(width)                                                             \
    {                                                                                          \
        convolve_tile_##width##_F32, convolve_tile_##width##_F16, convolve_tile_##width##_BF16 \
    }
static int64_t (*const convolve_tile_table[CONV1D_INSTANCES][3])(const conv1d_tile_args *) =
    CONV1D_TABLE(CONVOLVE_TILE_ENTRY);

typedef struct forward_context {
    const conv1d_forward_problem *problem;
    conv1d_packing packing;
    conv1d_item_grid item_grid;
    int64_t output_items; /* without the items of final_state */
    bool direct, nontemporal;
} forward_context;

/* The working state of an item, in the thread's scratch. */
typedef struct forward_work {
    const forward_context *context;
    int64_t d_begin, channels, pitch;
    _Alignas(64) float column_state[CONV1D_COLUMN_STATE_FLOATS];
    float x[CONV1D_BUFFERED_TILE_FLOATS], y[CONV1D_BUFFERED_TILE_FLOATS];
} forward_work;

_Static_assert(sizeof(forward_work) <= CONV1D_CHANNEL_LAST_SCRATCH_BYTES,
               "forward_work must fit in the thread's scratch");

/* Tokens [i, i+n) of a piece. conv1d_single_sequence has the same value for all of them. */
static void forward_tile(forward_work *work, const conv1d_piece *piece, int64_t i, int64_t n, bool single_sequence)
{
    const forward_context *context = work->context;
    const cot_causal_conv1d_forward_args *a = &context->problem->args;
    const int64_t size = conv1d_element_size(a->x.dtype), token = piece->begin + i;
    conv1d_tile_args tile = {.n = n,
                             .K = context->problem->sizes.K,
                             .channels = work->channels,
                             .x = (const char *)work->x,
                             .y = (char *)work->y,
                             .x_stride = work->pitch * 4,
                             .y_stride = work->pitch * 4,
                             .x_dtype = COT_F32,
                             .y_dtype = COT_F32,
                             .column_state = work->column_state,
                             .silu = a->activation == COT_ACTIVATION_SILU,
                             .seq_ids = single_sequence ? NULL : piece->seq_ids + i};
    if (context->direct) {
        tile.x = conv1d_element(&a->x, piece->b, work->d_begin, token);
        tile.y = conv1d_element(&a->y, piece->b, work->d_begin, token);
        tile.x_stride = a->x.stride[2] * size;
        tile.y_stride = a->y.stride[2] * size;
        tile.x_dtype = tile.y_dtype = a->x.dtype;
        tile.nontemporal = context->nontemporal;
    } else {
        conv1d_gather_tile(work->x, work->pitch, &a->x, piece->b, work->d_begin, work->channels, token, n);
    }
    const int64_t done_channels =
        single_sequence ? convolve_tile_table[conv1d_instance_index(tile.K)][tile.x_dtype - COT_F32](&tile) : 0;
    if (done_channels < work->channels)
        conv1d_convolve_tile_general(&tile, done_channels);
    if (!context->direct)
        conv1d_scatter_tile(work->y, work->pitch, &a->y, piece->b, work->d_begin, work->channels, token, n);
}

static void forward_piece(forward_work *work, const conv1d_piece *piece)
{
    const cot_causal_conv1d_forward_args *a = &work->context->problem->args;
    const int64_t K = work->context->problem->sizes.K, n = piece->end - piece->begin;
    const int64_t max_tokens = work->context->direct ? CONV1D_TILE_TOKENS : conv1d_buffered_tile_tokens(work->channels);
    if (piece->padding) {
        memset(work->y, 0, (size_t)work->pitch * sizeof *work->y);
        for (int64_t i = 0; i < n; i++)
            conv1d_scatter_tile(work->y, work->pitch, &a->y, piece->b, work->d_begin, work->channels, piece->begin + i,
                                1);
        return;
    }
    conv1d_pack_history(work->column_state, 2 * K, &a->x, &a->initial_state, piece, K, work->d_begin, work->channels);
    for (int64_t i = 0; i < n;) {
        bool single_sequence;
        const int64_t end = i + max_tokens < n ? i + max_tokens : n;
        const int64_t count = conv1d_single_sequence_run(piece->seq_ids, i, end, K, &single_sequence);
        forward_tile(work, piece, i, count, single_sequence);
        i += count;
    }
}

static void forward_item(void *argument, int64_t index, void *scratch)
{
    const forward_context *context = argument;
    const cot_causal_conv1d_forward_args *a = &context->problem->args;
    const conv1d_sizes *sizes = &context->problem->sizes;
    if (index >= context->output_items) {
        const int64_t items_per_span = conv1d_state_items_per_span(sizes);
        conv1d_store_final_state(sizes, a, (index - context->output_items) / items_per_span,
                                 (index - context->output_items) % items_per_span);
        return;
    }
    const conv1d_item item = conv1d_item_channel_last(&context->item_grid, sizes, index);
    forward_work *const work = scratch;
    work->context = context;
    work->d_begin = item.d_begin;
    work->channels = item.d_end - item.d_begin;
    work->pitch = conv1d_pitch(work->channels);
    conv1d_pack_weights(work->column_state, 2 * sizes->K, &a->weight, &a->bias, sizes->K, work->d_begin,
                        work->channels);
    conv1d_piece_iterator pieces;
    conv1d_piece piece;
    for (int64_t b = item.b_begin; b < item.b_end; b++) {
        conv1d_begin_pieces(&pieces, &context->packing, b, item.t_begin, item.t_end, CONV1D_ROW_BUFFER_TOKENS);
        while (conv1d_next_piece(&pieces, &piece))
            forward_piece(work, &piece);
    }
    if (context->nontemporal)
        v_fence();
}

cot_status V_NAME(causal_conv1d_fwd_channel_last)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const conv1d_forward_problem *p = problem;
    const cot_causal_conv1d_forward_args *a = &p->args;
    const bool direct = conv1d_contiguous_channels(&a->x) && conv1d_contiguous_channels(&a->y);
    forward_context context = {
        .problem = p,
        .packing = conv1d_packing_of(&p->sizes, &a->seq_idx, &a->cu_seqlens, cot_is_present(&a->initial_state)),
        .item_grid = conv1d_item_grid_channel_last(&p->sizes),
        .direct = direct,
        .nontemporal = direct && cot_is_present(&a->y) && conv1d_nontemporal_tokens(&a->y) &&
                       conv1d_uses_nontemporal_stores(&p->sizes, 2),
    };
    if (cot_is_present(&a->y))
        context.output_items = conv1d_item_count(&context.item_grid);
    int64_t all_items = context.output_items;
    if (cot_is_present(&a->final_state) && p->sizes.K > 1)
        all_items += p->sizes.sequence_count * conv1d_state_items_per_span(&p->sizes);
    cot_run_items_scratch(queue, all_items, forward_item, &context);
    return COT_OK;
}
