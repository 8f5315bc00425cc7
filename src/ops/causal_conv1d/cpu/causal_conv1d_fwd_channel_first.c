/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_channel_first.c: y[t] = act(bias + sum_k w[k] * xe[t+k]), for tensors with contiguous time. xe is x
 * after the K-1 inputs of the state, or after K-1 zeros.
 *
 * An item is a range of batch elements, tokens and channels (causal_conv1d_items.h). Its tokens are divided
 * into pieces (causal_conv1d_pieces.h). Each row of a piece is convolved with consecutive tokens in the lanes
 * (causal_conv1d_rows.h). Further items, after these, write final_state. */
#include "causal_conv1d_rows.h"
#include "causal_conv1d_state.h"

cot_status V_NAME(causal_conv1d_fwd_channel_first)(cot_queue *, const void *, void *);

typedef struct forward_context {
    const conv1d_forward_problem *problem;
    conv1d_packing packing;
    conv1d_item_grid item_grid;
    int64_t output_items; /* without the items of final_state */
    bool x_in_place, y_in_place, nontemporal;
    int64_t max_piece_tokens;
} forward_context;

static void zero_outputs(const cot_tensor *y, const conv1d_piece *piece, int64_t d_begin, int64_t d_end)
{
    static const float zeros[CONV1D_ROW_BUFFER_TOKENS];
    for (int64_t d = d_begin; d < d_end; d++)
        for (int64_t t = piece->begin; t < piece->end; t += CONV1D_ROW_BUFFER_TOKENS)
            conv1d_scatter(conv1d_element(y, piece->b, d, t), y->dtype, y->stride[2], zeros,
                           cot_clamp(piece->end - t, 0, CONV1D_ROW_BUFFER_TOKENS));
}

/* The state that the rows of a piece share, and their buffers. */
typedef struct piece_work {
    const forward_context *context;
    const conv1d_piece *piece;
    conv1d_row row;
    uint8_t mixed[CONV1D_ROW_BUFFER_TOKENS / CONV1D_GROUP_TOKENS + 1];
    float inputs[CONV1D_ROW_BUFFER_TOKENS + CONV1D_MAX_K], outputs[CONV1D_ROW_BUFFER_TOKENS];
} piece_work;

static void forward_row(piece_work *work, int64_t d, const float *weight, bool last_channel)
{
    const cot_causal_conv1d_forward_args *a = &work->context->problem->args;
    const conv1d_piece *piece = work->piece;
    const int64_t K = work->row.K, n = piece->end - piece->begin;
    char *y = conv1d_element(&a->y, piece->b, d, piece->begin);
    conv1d_row row = work->row;
    row.weight = weight;
    row.y = work->context->y_in_place ? (void *)y : work->outputs;
    /* The first `copied` outputs read a copy of their inputs, in `inputs`. The others read x in place. */
    const int64_t copied = work->context->x_in_place ? conv1d_outputs_from_copy(piece, K) : n;
    if (copied > 0) {
        row.n = copied;
        const char *next = last_channel ? NULL : conv1d_element(&a->x, piece->b, d + 1, piece->begin);
        row.prefetch = conv1d_prefetch_next_row(work->inputs, next);
        row.x = work->inputs;
        conv1d_copy_inputs(piece, &a->x, &a->initial_state, K, d, piece->begin + copied, work->inputs);
        conv1d_convolve(&row);
    }
    if (copied < n) {
        row.x = (const float *)(const void *)conv1d_element(&a->x, piece->b, d, piece->begin) + copied - (K - 1);
        row.y = conv1d_y_element(&row, copied);
        row.seq_ids = row.seq_ids != NULL ? row.seq_ids + copied : NULL;
        row.mixed = row.mixed != NULL ? work->mixed + copied / CONV1D_GROUP_TOKENS : NULL;
        row.n = n - copied;
        row.prefetch = conv1d_prefetch_same_row(row.x);
        conv1d_convolve(&row);
    }
    if (!work->context->y_in_place)
        conv1d_scatter(y, a->y.dtype, a->y.stride[2], work->outputs, n);
}

static void forward_piece(const forward_context *context, const conv1d_piece *piece, int64_t d_begin, int64_t d_end,
                          const float *weights)
{
    const cot_causal_conv1d_forward_args *a = &context->problem->args;
    const int64_t K = context->problem->sizes.K;
    piece_work work;
    work.context = context;
    work.piece = piece;
    work.row = (conv1d_row){.K = K,
                            .dtype = context->y_in_place ? a->y.dtype : COT_F32,
                            .silu = a->activation == COT_ACTIVATION_SILU,
                            .nontemporal = context->y_in_place && context->nontemporal};
    if (piece->seq_ids != NULL) {
        conv1d_mark_mixed(work.mixed, piece->seq_ids, piece->end - piece->begin, K);
        work.row.seq_ids = piece->seq_ids;
        work.row.output_offset = K - 1;
        work.row.mixed = work.mixed;
    }
    for (int64_t d = d_begin; d < d_end; d++)
        forward_row(&work, d, weights + (d - d_begin) * (K + 1), d + 1 == d_end);
}

static void forward_item(void *argument, int64_t index, void *scratch)
{
    const forward_context *context = argument;
    const cot_causal_conv1d_forward_args *a = &context->problem->args;
    const conv1d_sizes *sizes = &context->problem->sizes;
    const int64_t K = sizes->K;
    if (index >= context->output_items) {
        const int64_t items_per_span = conv1d_state_items_per_span(sizes);
        conv1d_store_final_state(sizes, a, (index - context->output_items) / items_per_span,
                                 (index - context->output_items) % items_per_span);
        return;
    }
    const conv1d_item item = conv1d_item_channel_first(&context->item_grid, sizes, index);
    const int64_t d_begin = item.d_begin, d_end = item.d_end;
    float *const weights = scratch;
    conv1d_copy_weights(weights, &a->weight, &a->bias, K, d_begin, d_end);
    conv1d_piece_iterator pieces;
    conv1d_piece piece;
    for (int64_t b = item.b_begin; b < item.b_end; b++) {
        conv1d_begin_pieces(&pieces, &context->packing, b, item.t_begin, item.t_end, context->max_piece_tokens);
        while (conv1d_next_piece(&pieces, &piece)) {
            if (piece.padding)
                zero_outputs(&a->y, &piece, d_begin, d_end);
            else
                forward_piece(context, &piece, d_begin, d_end, weights);
        }
    }
    if (context->nontemporal)
        v_fence();
}

cot_status V_NAME(causal_conv1d_fwd_channel_first)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const conv1d_forward_problem *p = problem;
    const cot_causal_conv1d_forward_args *a = &p->args;
    forward_context context = {
        .problem = p,
        .packing = conv1d_packing_of(&p->sizes, &a->seq_idx, &a->cu_seqlens, cot_is_present(&a->initial_state)),
        .item_grid = conv1d_item_grid_channel_first(&p->sizes),
        .x_in_place = a->x.dtype == COT_F32 && conv1d_contiguous_time(&a->x),
        .y_in_place = conv1d_contiguous_time(&a->y),
        .nontemporal = conv1d_uses_nontemporal_stores(&p->sizes, 2),
    };
    /* If the loop reads and writes the tensors in place, no buffer limits the length of a piece. */
    const bool packed = cot_is_present(&a->seq_idx) || cot_is_present(&a->cu_seqlens);
    const bool in_place = context.x_in_place && context.y_in_place;
    context.max_piece_tokens =
        in_place && (context.packing.split_at_sequences || !packed) ? CONV1D_MAX_ITEM_TOKENS : CONV1D_ROW_BUFFER_TOKENS;
    if (cot_is_present(&a->y))
        context.output_items = conv1d_item_count(&context.item_grid);
    int64_t all_items = context.output_items;
    if (cot_is_present(&a->final_state) && p->sizes.K > 1)
        all_items += p->sizes.sequence_count * conv1d_state_items_per_span(&p->sizes);
    cot_run_items_scratch(queue, all_items, forward_item, &context);
    return COT_OK;
}
