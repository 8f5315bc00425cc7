/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_channel_first.c: y[t] = act(bias + sum_k w[k] * xe[t+k]), for tensors with contiguous time.
 *
 * An item is a range of batch elements, tokens and channels (causal_conv1d_tiling.h). Its tokens are divided
 * into pieces (causal_conv1d_pieces.h). Each row of a piece is convolved with consecutive tokens in the lanes
 * (causal_conv1d_rows.h). The items after those write final_state. */
#include "causal_conv1d_rows.h"

cot_status V_NAME(causal_conv1d_fwd_channel_first)(cot_queue *, const void *, void *);

typedef struct forward_context {
    const conv1d_forward_problem *problem;
    conv1d_packing packing;
    conv1d_tiling tiling;
    int64_t items; /* without the items of final_state */
    bool direct_x, direct_y, stream;
    int64_t max_piece_tokens;
} forward_context;

static void zero_outputs(const cot_tensor *y, const conv1d_piece *piece, int64_t d_begin, int64_t d_end)
{
    static const float zeros[CONV1D_PIECE_TOKENS];
    for (int64_t d = d_begin; d < d_end; d++)
        for (int64_t t = piece->begin; t < piece->end; t += CONV1D_PIECE_TOKENS)
            conv1d_scatter(conv1d_element(y, piece->b, d, t), y->dtype, y->stride[2], zeros,
                           cot_clamp(piece->end - t, 0, CONV1D_PIECE_TOKENS));
}

/* The rows of a piece. If x is f32 and contiguous, the loop reads x in place. Outputs whose inputs reach back to a
 * state or before the first token read a copy in `inputs`; without direct_x all outputs do. */
typedef struct piece_rows {
    const forward_context *context;
    const conv1d_piece *piece;
    bool direct_x, direct_y;
    conv1d_row row;
    uint8_t mixed[CONV1D_PIECE_TOKENS / CONV1D_MIXED_TOKENS + 1];
    float inputs[CONV1D_PIECE_TOKENS + CONV1D_MAX_K], outputs[CONV1D_PIECE_TOKENS];
} piece_rows;

static void forward_row(piece_rows *rows, int64_t d, const float *weight, bool last_channel)
{
    const cot_causal_conv1d_forward_args *a = &rows->context->problem->args;
    const conv1d_piece *piece = rows->piece;
    const int64_t K = rows->row.K, n = piece->end - piece->begin;
    char *y = conv1d_element(&a->y, piece->b, d, piece->begin);
    conv1d_row row = rows->row;
    row.weight = weight;
    row.y = rows->direct_y ? (void *)y : rows->outputs;
    row.n = rows->direct_x ? conv1d_head_length(piece, K) : n;
    if (row.n > 0) {
        const char *next = last_channel ? NULL : conv1d_element(&a->x, piece->b, d + 1, piece->begin);
        row.prefetch = conv1d_prefetch_next_row(rows->inputs, next);
        row.x = rows->inputs;
        conv1d_stage_inputs(piece, &a->x, &a->initial_state, K, d, piece->begin + row.n, rows->inputs);
        conv1d_convolve(&row);
    }
    if (row.n < n) {
        const int64_t head = row.n;
        row.x = (const float *)(const void *)conv1d_element(&a->x, piece->b, d, piece->begin) + head - (K - 1);
        row.y = conv1d_y_element(&row, head);
        row.seq_ids = row.seq_ids != NULL ? row.seq_ids + head : NULL;
        row.mixed = row.mixed != NULL ? rows->mixed + (head > 0) : NULL;
        row.n = n - head;
        row.prefetch = conv1d_prefetch_same_row(row.x);
        conv1d_convolve(&row);
    }
    if (!rows->direct_y)
        conv1d_scatter(y, a->y.dtype, a->y.stride[2], rows->outputs, n);
}

static void forward_piece(const forward_context *context, const conv1d_piece *piece, int64_t d_begin, int64_t d_end,
                          const float *weights)
{
    const cot_causal_conv1d_forward_args *a = &context->problem->args;
    const int64_t K = context->problem->sizes.K;
    piece_rows rows;
    rows.context = context;
    rows.piece = piece;
    rows.direct_x = context->direct_x;
    rows.direct_y = context->direct_y;
    rows.row = (conv1d_row){.K = K,
                            .dtype = rows.direct_y ? a->y.dtype : COT_F32,
                            .silu = a->activation == COT_ACTIVATION_SILU,
                            .stream = rows.direct_y && context->stream};
    if (piece->seq_ids != NULL) {
        conv1d_mark_mixed(rows.mixed, piece->seq_ids, piece->end - piece->begin, K);
        rows.row.seq_ids = piece->seq_ids;
        rows.row.output_offset = K - 1;
        rows.row.mixed = rows.mixed;
    }
    for (int64_t d = d_begin; d < d_end; d++)
        forward_row(&rows, d, weights + (d - d_begin) * (K + 1), d + 1 == d_end);
}

static void forward_item(void *argument, int64_t index, void *scratch)
{
    const forward_context *context = argument;
    const cot_causal_conv1d_forward_args *a = &context->problem->args;
    const conv1d_sizes *sizes = &context->problem->sizes;
    const int64_t K = sizes->K;
    if (index >= context->items) {
        const int64_t state_items = conv1d_state_items(sizes);
        conv1d_store_final_state(sizes, a, (index - context->items) / state_items,
                                 (index - context->items) % state_items);
        return;
    }
    const conv1d_item item = conv1d_item_channel_first(&context->tiling, sizes, index);
    const int64_t d_begin = item.d_begin, d_end = item.d_end;
    float *const weights = scratch;
    conv1d_stage_weights(weights, &a->weight, &a->bias, K, d_begin, d_end);
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
    if (context->stream)
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
        .tiling = conv1d_tiling_channel_first(&p->sizes),
        .direct_x = a->x.dtype == COT_F32 && conv1d_contiguous_time(&a->x),
        .direct_y = conv1d_contiguous_time(&a->y),
        .stream = conv1d_should_stream(&p->sizes, 2),
    };
    /* If the loop reads and writes the tensors in place, no buffer limits the length of a piece. */
    const bool packed = cot_is_present(&a->seq_idx) || cot_is_present(&a->cu_seqlens);
    const bool direct = context.direct_x && context.direct_y;
    context.max_piece_tokens =
        direct && (context.packing.split_at_sequences || !packed) ? CONV1D_MAX_ITEM_TOKENS : CONV1D_PIECE_TOKENS;
    if (cot_is_present(&a->y))
        context.items = conv1d_item_count(&context.tiling);
    int64_t items = context.items;
    if (cot_is_present(&a->final_state) && p->sizes.K > 1)
        items += p->sizes.state_count * conv1d_state_items(&p->sizes);
    cot_parallel_scratch(queue, items, forward_item, &context);
    return COT_OK;
}
