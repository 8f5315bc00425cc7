/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_fwd_channel_last.c: y[t] = act(bias + sum_k w[k] * xe[t+k-K+1]) where channels are contiguous, or
 * where there are few tokens.
 *
 * One item is `group` batch rows x `part` tokens x `block` channels (causal_conv1d_tiling.h). Tiles of tokens are
 * walked in columns of VW channels (causal_conv1d_columns.h), straight from and to the tensors, or by way of f32
 * buffers where channels are not contiguous. The items behind those write final_state. */
#include "causal_conv1d_columns.h"

cot_status V_NAME(causal_conv1d_fwd_channel_last)(cot_queue *, const void *, void *);

#define WALK(width, dtype)                                                  \
    static int64_t walk_##width##_##dtype(const conv1d_columns *s)          \
    {                                                                       \
        return conv1d_walk_body(s, width == 0 ? s->K : width, COT_##dtype); \
    }
#define WALKS_OF(width) CONV1D_EACH_DTYPE(WALK, width)
CONV1D_EACH_WIDTH(WALKS_OF)

#define WALKS(width)                                                \
    {                                                               \
        walk_##width##_F32, walk_##width##_F16, walk_##width##_BF16 \
    }
static int64_t (*const walks[CONV1D_INSTANCES][3])(const conv1d_columns *) = CONV1D_TABLE(WALKS);

typedef struct forward_context {
    const conv1d_forward_problem *problem;
    conv1d_packing packing;
    conv1d_tiling tiling;
    int64_t items; /* without those of final_state */
    bool direct, stream;
} forward_context;

/* An item's state, in its thread's slice of scratch. */
typedef struct forward_block {
    const forward_context *c;
    int64_t d, channels, ld;
    _Alignas(64) float kept[CONV1D_KEPT];
    float x[CONV1D_STAGED], y[CONV1D_STAGED];
} forward_block;

_Static_assert(sizeof(forward_block) <= CONV1D_LAST_SCRATCH, "it lies in a slice");

/* Tokens [i, i+n) of a piece, all plain or none. */
static void forward_tile(forward_block *s, const conv1d_piece *piece, int64_t i, int64_t n, bool plain)
{
    const forward_context *c = s->c;
    const cot_causal_conv1d_forward_args *a = &c->problem->args;
    const int64_t size = conv1d_size(a->x.dtype), token = piece->begin + i;
    conv1d_columns columns = {.n = n,
                              .K = c->problem->sizes.K,
                              .channels = s->channels,
                              .x = (const char *)s->x,
                              .y = (char *)s->y,
                              .x_stride = s->ld * 4,
                              .y_stride = s->ld * 4,
                              .x_dtype = COT_F32,
                              .y_dtype = COT_F32,
                              .kept = s->kept,
                              .silu = a->activation == COT_ACTIVATION_SILU,
                              .ids = plain ? NULL : piece->ids + i};
    if (c->direct) {
        columns.x = conv1d_at(&a->x, piece->b, s->d, token);
        columns.y = conv1d_at(&a->y, piece->b, s->d, token);
        columns.x_stride = a->x.stride[2] * size;
        columns.y_stride = a->y.stride[2] * size;
        columns.x_dtype = columns.y_dtype = a->x.dtype;
        columns.stream = c->stream;
    } else {
        conv1d_gather_tile(s->x, s->ld, &a->x, piece->b, s->d, s->channels, token, n);
    }
    const int64_t done = plain ? walks[conv1d_instance(columns.K)][columns.x_dtype - COT_F32](&columns) : 0;
    if (done < s->channels)
        conv1d_walk_edge(&columns, done);
    if (!c->direct)
        conv1d_scatter_tile(s->y, s->ld, &a->y, piece->b, s->d, s->channels, token, n);
}

static void forward_piece(forward_block *s, const conv1d_piece *piece)
{
    const cot_causal_conv1d_forward_args *a = &s->c->problem->args;
    const int64_t K = s->c->problem->sizes.K, n = piece->end - piece->begin;
    const int64_t longest = s->c->direct ? CONV1D_TILE : conv1d_staged_tile(s->channels);
    if (piece->padding) {
        memset(s->y, 0, (size_t)s->ld * sizeof *s->y);
        for (int64_t i = 0; i < n; i++)
            conv1d_scatter_tile(s->y, s->ld, &a->y, piece->b, s->d, s->channels, piece->begin + i, 1);
        return;
    }
    conv1d_keep_history(s->kept, 2 * K, &a->x, &a->initial_state, piece, K, s->d, s->channels);
    for (int64_t i = 0; i < n;) {
        bool plain;
        const int64_t end = i + longest < n ? i + longest : n;
        const int64_t count = conv1d_plain_run(piece->ids, i, end, K, &plain);
        forward_tile(s, piece, i, count, plain);
        i += count;
    }
}

static void forward_item(void *context, int64_t item, void *scratch)
{
    const forward_context *c = context;
    const cot_causal_conv1d_forward_args *a = &c->problem->args;
    const conv1d_sizes *sizes = &c->problem->sizes;
    if (item >= c->items) {
        const int64_t blocks = conv1d_state_blocks(sizes);
        conv1d_final_state(sizes, a, (item - c->items) / blocks, (item - c->items) % blocks);
        return;
    }
    const conv1d_item own = conv1d_item_channel_last(&c->tiling, sizes, item);
    forward_block *const s = scratch;
    s->c = c;
    s->d = own.d_begin;
    s->channels = own.d_end - own.d_begin;
    s->ld = conv1d_ld(s->channels);
    conv1d_keep_weights(s->kept, 2 * sizes->K, &a->weight, &a->bias, sizes->K, s->d, s->channels);
    conv1d_walk walk;
    conv1d_piece piece;
    for (int64_t b = own.b_begin; b < own.b_end; b++) {
        conv1d_start_walk(&walk, &c->packing, b, own.t_begin, own.t_end, CONV1D_PIECE);
        while (conv1d_next_piece(&walk, &piece))
            forward_piece(s, &piece);
    }
    if (c->stream)
        v_fence();
}

cot_status V_NAME(causal_conv1d_fwd_channel_last)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const conv1d_forward_problem *p = problem;
    const cot_causal_conv1d_forward_args *a = &p->args;
    const bool direct = conv1d_rows_contiguous(&a->x) && conv1d_rows_contiguous(&a->y);
    forward_context context = {
        .problem = p,
        .packing = conv1d_packing_of(&p->sizes, &a->seq_idx, &a->cu_seqlens, cot_present(&a->initial_state)),
        .tiling = conv1d_tile_channel_last(&p->sizes),
        .direct = direct,
        .stream = direct && cot_present(&a->y) && conv1d_rows_stream(&a->y) && conv1d_streams(&p->sizes, 2),
    };
    if (cot_present(&a->y))
        context.items = conv1d_items(&context.tiling);
    int64_t items = context.items;
    if (cot_present(&a->final_state) && p->sizes.K > 1)
        items += p->sizes.state_count * conv1d_state_blocks(&p->sizes);
    cot_parallel_scratch(queue, items, forward_item, &context);
    return COT_OK;
}
