/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_update_channels.c: decoding, y[t] = act(bias + sum_k w[k] * xe[t+k-K+1]), where xe is the last inputs
 * in conv_state followed by x. Also updates conv_state.
 *
 * An item is a block of channels of one batch row, with channels in the lanes. It gathers the last K-1 inputs and tiles
 * of tokens into f32 rows, convolves them as the forward does (causal_conv1d_columns.h), and scatters the results. */
#include "causal_conv1d_columns.h"

cot_status V_NAME(causal_conv1d_update_channels)(cot_queue *, const void *, void *);

#define DEFINE_CONVOLVE_TILE(width)                                              \
    static int64_t convolve_tile_##width(const conv1d_columns *s)                \
    {                                                                            \
        return conv1d_convolve_tile_body(s, width == 0 ? s->K : width, COT_F32); \
    }
CONV1D_EACH_WIDTH(DEFINE_CONVOLVE_TILE)

#define CONVOLVE_TILE_ENTRY(width) convolve_tile_##width
static int64_t (*const convolve_tile_table[CONV1D_INSTANCES])(const conv1d_columns *) =
    CONV1D_TABLE(CONVOLVE_TILE_ENTRY);

typedef struct update_context {
    const conv1d_update_problem *problem;
    int64_t block, blocks; /* channels of an item; items of a batch row */
} update_context;

/* The working state of an item, in the thread's slice of scratch. */
typedef struct update_block {
    const conv1d_update_problem *problem;
    int64_t b, d, channels, ld;
    int64_t row;   /* of conv_state */
    int64_t start; /* the column of x[0] in a ring, else S */
    _Alignas(64) float column_state[CONV1D_COLUMN_STATE];
    float x[CONV1D_STAGED_TILE], y[CONV1D_STAGED_TILE];
} update_block;

_Static_assert(sizeof(update_block) <= CONV1D_CHANNEL_LAST_SCRATCH, "it lies in a slice");

/* Copies column j + count to column j, for j < S - count, in ascending order. */
V_INLINE void shift_columns(char *state, int64_t size, const cot_tensor *tensor, int64_t channels, int64_t count)
{
    const int64_t channel = tensor->stride[1] * size, column = tensor->stride[2] * size;
    for (int64_t c = 0; c < channels; c++)
        for (int64_t j = 0; j < tensor->shape[2] - count; j++)
            memcpy(state + c * channel + j * column, state + c * channel + (j + count) * column, (size_t)size);
}

/* Shifts conv_state by T columns, before the new tokens are stored. A ring needs no shift. */
static void shift_state(const update_block *s)
{
    const cot_tensor *state = &s->problem->args.conv_state;
    const int64_t T = s->problem->sizes.T;
    if (cot_is_present(&s->problem->args.cache_seqlens) || T >= s->problem->S)
        return;
    char *first = conv1d_element(state, s->row, s->d, 0);
    if (state->dtype == COT_F32)
        shift_columns(first, 4, state, s->channels, T);
    else
        shift_columns(first, 2, state, s->channels, T);
}

/* Stores token t, given as f32 in `row`, to its column of conv_state, if it is one of the last S tokens. */
static void store_token(const update_block *s, int64_t t, const float *row)
{
    const cot_tensor *state = &s->problem->args.conv_state;
    const int64_t S = s->problem->S, T = s->problem->sizes.T;
    if (t < T - S)
        return;
    const int64_t column = cot_is_present(&s->problem->args.cache_seqlens) ? (s->start + t) % S : S - T + t;
    conv1d_scatter(conv1d_element(state, s->row, s->d, column), state->dtype, state->stride[1], row, s->channels);
}

static void pack_state_inputs(update_block *s)
{
    const cot_tensor *state = &s->problem->args.conv_state;
    const int64_t K = s->problem->sizes.K;
    for (int64_t i = 0; i < K - 1; i++) {
        int64_t column = s->start - (K - 1) + i;
        column = column < 0 ? column + s->problem->S : column;
        conv1d_pack_column(s->column_state, 2 * K, K + 1 + i, conv1d_element(state, s->row, s->d, column), state->dtype,
                           state->stride[1], s->channels);
    }
}

static void update_tile(update_block *s, int64_t t, int64_t n)
{
    const cot_causal_conv1d_update_args *a = &s->problem->args;
    const conv1d_columns columns = {.n = n,
                                    .K = s->problem->sizes.K,
                                    .channels = s->channels,
                                    .x = (const char *)s->x,
                                    .y = (char *)s->y,
                                    .x_stride = s->ld * 4,
                                    .y_stride = s->ld * 4,
                                    .x_dtype = COT_F32,
                                    .y_dtype = COT_F32,
                                    .column_state = s->column_state,
                                    .silu = a->activation == COT_ACTIVATION_SILU};
    conv1d_gather_tile(s->x, s->ld, &a->x, s->b, s->d, s->channels, t, n);
    const int64_t done_channels = convolve_tile_table[conv1d_instance_index(columns.K)](&columns);
    if (done_channels < s->channels)
        conv1d_convolve_tile_edge(&columns, done_channels);
    conv1d_scatter_tile(s->y, s->ld, &a->y, s->b, s->d, s->channels, t, n);
    for (int64_t i = 0; i < n; i++)
        store_token(s, t + i, s->x + i * s->ld);
}

static void update_item(void *context, int64_t index, void *scratch)
{
    const update_context *c = context;
    const cot_causal_conv1d_update_args *a = &c->problem->args;
    const conv1d_sizes *sizes = &c->problem->sizes;
    update_block *const s = scratch;
    s->problem = c->problem;
    s->b = index / c->blocks;
    s->d = index % c->blocks * c->block;
    s->channels = cot_clamp(c->block, 0, sizes->D - s->d);
    s->ld = cot_round_up(s->channels, VW);
    s->row = cot_is_present(&a->conv_state_indices) ? conv1d_index(&a->conv_state_indices, s->b) : s->b;
    if (s->row < 0) {
        memset(s->y, 0, (size_t)s->ld * sizeof *s->y);
        for (int64_t t = 0; t < sizes->T; t++)
            conv1d_scatter_tile(s->y, s->ld, &a->y, s->b, s->d, s->channels, t, 1);
        return;
    }
    const int64_t S = c->problem->S;
    s->start = cot_is_present(&a->cache_seqlens) ? conv1d_index(&a->cache_seqlens, s->b) % S : S;
    conv1d_pack_weights(s->column_state, 2 * sizes->K, &a->weight, &a->bias, sizes->K, s->d, s->channels);
    pack_state_inputs(s);
    shift_state(s);
    const int64_t tile_tokens = conv1d_staged_tile_tokens(s->channels);
    for (int64_t t = 0; t < sizes->T; t += tile_tokens)
        update_tile(s, t, cot_clamp(tile_tokens, 0, sizes->T - t));
}

cot_status V_NAME(causal_conv1d_update_channels)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const conv1d_update_problem *p = problem;
    update_context context = {.problem = p, .block = conv1d_row_channels(&p->sizes)};
    context.blocks = cot_ceil_div(p->sizes.D, context.block);
    cot_parallel_scratch(queue, p->sizes.B * context.blocks, update_item, &context);
    return COT_OK;
}
