/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_channel_first.c: y[t] = act(bias + sum_k w[k] * xe[t+k-K+1]) where time is contiguous.
 *
 * One item is `group` batch rows x `part` tokens x `block` channels (causal_conv1d_tiling.h), in pieces of at most
 * CONV1D_PIECE tokens: each row of a piece is converted to f32 behind its K-1 columns of history, and then convolved
 * from there with tokens in the lanes (causal_conv1d_rows.h). The items behind those write final_state. */
#include "causal_conv1d_rows.h"

cot_status V_NAME(causal_conv1d_fwd_channel_first)(cot_queue *, const void *, void *);

typedef struct forward_context {
    const conv1d_forward_problem *problem;
    conv1d_packing packing;
    conv1d_tiling tiling;
    int64_t items; /* without those of final_state */
    bool stream;
} forward_context;

/* f32 of tokens begin-K+1 .. end-1 of channel d. */
static void stage_inputs(const conv1d_forward_problem *problem, const conv1d_piece *piece, int64_t d, float *to)
{
    const cot_causal_conv1d_forward_args *a = &problem->args;
    const int64_t K = problem->sizes.K;
    int64_t p = piece->begin - (K - 1);
    for (; p < piece->first; p++)
        *to++ = cot_present(&a->initial_state) && piece->state >= 0
                    ? conv1d_load(&a->initial_state, piece->state, d, p - piece->first + K - 1)
                    : 0;
    conv1d_gather(to, conv1d_at(&a->x, piece->b, d, p), a->x.dtype, a->x.stride[2], piece->end - p);
}

static void zero_outputs(const cot_tensor *y, const conv1d_piece *piece, int64_t d_begin, int64_t d_end)
{
    static const float zeros[CONV1D_PIECE];
    for (int64_t d = d_begin; d < d_end; d++)
        conv1d_scatter(conv1d_at(y, piece->b, d, piece->begin), y->dtype, y->stride[2], zeros,
                       piece->end - piece->begin);
}

static void forward_piece(const forward_context *c, const conv1d_piece *piece, int64_t d_begin, int64_t d_end,
                          const float *weights)
{
    const cot_causal_conv1d_forward_args *a = &c->problem->args;
    const int64_t K = c->problem->sizes.K, n = piece->end - piece->begin;
    float inputs[CONV1D_PIECE + CONV1D_MAX_K + VW], outputs[CONV1D_PIECE];
    uint8_t mixed[CONV1D_PIECE / CONV1D_MIXED_BLOCK + 1];
    const bool direct = a->y.stride[2] == 1 || n == 1;
    conv1d_row row = {.n = n,
                      .K = K,
                      .x = inputs,
                      .y = outputs,
                      .dtype = direct ? a->y.dtype : COT_F32,
                      .silu = a->activation == COT_ACTIVATION_SILU,
                      .stream = direct && c->stream};
    if (piece->ids != NULL) {
        conv1d_mark_mixed(mixed, piece->ids, n, K);
        row.ids = piece->ids;
        row.centre = K - 1;
        row.mixed = mixed;
    }
    memset(inputs + K - 1 + n, 0, VW * sizeof *inputs);
    for (int64_t d = d_begin; d < d_end; d++) {
        stage_inputs(c->problem, piece, d, inputs);
        row.weight = weights + (d - d_begin) * (K + 1);
        if (direct)
            row.y = conv1d_at(&a->y, piece->b, d, piece->begin);
        row.next = d + 1 < d_end ? conv1d_at(&a->x, piece->b, d + 1, piece->begin) : NULL;
        conv1d_convolve(&row);
        if (!direct)
            conv1d_scatter(conv1d_at(&a->y, piece->b, d, piece->begin), a->y.dtype, a->y.stride[2], outputs, n);
    }
}

static void forward_item(void *context, int64_t item)
{
    const forward_context *c = context;
    const cot_causal_conv1d_forward_args *a = &c->problem->args;
    const conv1d_sizes *sizes = &c->problem->sizes;
    const conv1d_tiling *tiling = &c->tiling;
    const int64_t K = sizes->K;
    if (item >= c->items) {
        const int64_t blocks = conv1d_state_blocks(sizes);
        conv1d_final_state(sizes, a, (item - c->items) / blocks, (item - c->items) % blocks);
        return;
    }
    const int64_t part = item % tiling->parts, block = item / tiling->parts % tiling->blocks;
    const int64_t group = item / tiling->parts / tiling->blocks;
    const int64_t d_begin = block * tiling->block, d_end = conv1d_clamp(d_begin + tiling->block, 0, sizes->D);
    const int64_t b_begin = group * tiling->group, b_end = conv1d_clamp(b_begin + tiling->group, 0, sizes->B);
    const int64_t t_begin = part * tiling->part, t_end = conv1d_clamp(t_begin + tiling->part, 0, sizes->T);
    float weights[CONV1D_MAX_BLOCK * (CONV1D_MAX_K + 1)];
    conv1d_stage_weights(weights, &a->weight, &a->bias, K, d_begin, d_end);
    conv1d_walk walk;
    conv1d_piece piece;
    for (int64_t b = b_begin; b < b_end; b++) {
        conv1d_start_walk(&walk, &c->packing, b, t_begin, t_end, CONV1D_PIECE);
        while (conv1d_next_piece(&walk, &piece)) {
            if (piece.padding)
                zero_outputs(&a->y, &piece, d_begin, d_end);
            else
                forward_piece(c, &piece, d_begin, d_end, weights);
        }
    }
    if (c->stream)
        v_fence();
}

cot_status V_NAME(causal_conv1d_fwd_channel_first)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const conv1d_forward_problem *p = problem;
    const cot_causal_conv1d_forward_args *a = &p->args;
    forward_context context = {
        .problem = p,
        .packing = conv1d_packing_of(&p->sizes, &a->seq_idx, &a->cu_seqlens, cot_present(&a->initial_state)),
        .tiling = conv1d_tile_channel_first(&p->sizes),
        .stream = conv1d_streams(&p->sizes, 2),
    };
    if (cot_present(&a->y))
        context.items = context.tiling.groups * context.tiling.parts * context.tiling.blocks;
    int64_t items = context.items;
    if (cot_present(&a->final_state) && p->sizes.K > 1)
        items += p->sizes.state_count * conv1d_state_blocks(&p->sizes);
    cot_parallel(queue, items, forward_item, &context);
    return COT_OK;
}
