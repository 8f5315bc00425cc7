/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_update_channels.c: decoding, y[t] = act(bias + sum_k w[k] * xe[t+k]), where xe is the last K-1 inputs
 * in conv_state followed by x. Also updates conv_state.
 *
 * An item is a range of channels of one batch element. The lanes of a vector are channels. It gathers the last K-1
 * inputs and tiles of tokens into f32 buffers, convolves them as the forward does (causal_conv1d_columns.h), and
 * scatters the results. */
#include "causal_conv1d_columns.h"

cot_status V_NAME(causal_conv1d_update_channels)(cot_queue *, const void *, void *);

#define DEFINE_CONVOLVE_TILE(width)                                                    \
    static int64_t convolve_tile_##width(const conv1d_tile_args *tile)                 \
    {                                                                                  \
        return conv1d_convolve_tile_body(tile, width == 0 ? tile->K : width, COT_F32); \
    }
CONV1D_EACH_WIDTH(DEFINE_CONVOLVE_TILE)

#define CONVOLVE_TILE_ENTRY(width) convolve_tile_##width
static int64_t (*const convolve_tile_table[CONV1D_INSTANCES])(const conv1d_tile_args *) =
    CONV1D_TABLE(CONVOLVE_TILE_ENTRY);

typedef struct update_context {
    const conv1d_update_problem *problem;
    int64_t channels_per_item, items_along_channels; /* an item is of one batch element */
} update_context;

/* The working state of an item, in the thread's scratch. */
typedef struct update_work {
    const conv1d_update_problem *problem;
    int64_t b, d_begin, channels, pitch;
    int64_t state_row; /* index along axis 0 of conv_state */
    int64_t start;     /* the position of x[0] in a ring, else S */
    _Alignas(64) float column_state[CONV1D_COLUMN_STATE_FLOATS];
    float x[CONV1D_BUFFERED_TILE_FLOATS], y[CONV1D_BUFFERED_TILE_FLOATS];
} update_work;

_Static_assert(sizeof(update_work) <= CONV1D_CHANNEL_LAST_SCRATCH_BYTES,
               "update_work must fit in the thread's scratch");

/* Copies position j + count of each channel's state to position j, for j < S - count, in ascending order. */
V_INLINE void shift_positions(char *state, int64_t size, const cot_tensor *tensor, int64_t channels, int64_t count)
{
    const int64_t channel_stride = tensor->stride[1] * size, position_stride = tensor->stride[2] * size;
    for (int64_t channel = 0; channel < channels; channel++)
        for (int64_t j = 0; j < tensor->shape[2] - count; j++)
            memcpy(state + channel * channel_stride + j * position_stride,
                   state + channel * channel_stride + (j + count) * position_stride, (size_t)size);
}

/* Shifts conv_state by T positions, before the new tokens are stored. A ring needs no shift. */
static void shift_state(const update_work *work)
{
    const cot_tensor *state = &work->problem->args.conv_state;
    const int64_t T = work->problem->sizes.T;
    if (cot_is_present(&work->problem->args.cache_seqlens) || T >= work->problem->S)
        return;
    char *first = conv1d_element(state, work->state_row, work->d_begin, 0);
    if (state->dtype == COT_F32)
        shift_positions(first, 4, state, work->channels, T);
    else
        shift_positions(first, 2, state, work->channels, T);
}

/* Stores token t, given as f32 in `values`, to its position in conv_state, if it is one of the last S tokens. */
static void store_token(const update_work *work, int64_t t, const float *values)
{
    const cot_tensor *state = &work->problem->args.conv_state;
    const int64_t S = work->problem->S, T = work->problem->sizes.T;
    if (t < T - S)
        return;
    const int64_t state_position =
        cot_is_present(&work->problem->args.cache_seqlens) ? (work->start + t) % S : S - T + t;
    conv1d_scatter(conv1d_element(state, work->state_row, work->d_begin, state_position), state->dtype,
                   state->stride[1], values, work->channels);
}

static void pack_state_inputs(update_work *work)
{
    const cot_tensor *state = &work->problem->args.conv_state;
    const int64_t K = work->problem->sizes.K;
    for (int64_t i = 0; i < K - 1; i++) {
        int64_t state_position = work->start - (K - 1) + i;
        state_position = state_position < 0 ? state_position + work->problem->S : state_position;
        conv1d_pack_vector(work->column_state, 2 * K, K + 1 + i,
                           conv1d_element(state, work->state_row, work->d_begin, state_position), state->dtype,
                           state->stride[1], work->channels);
    }
}

static void update_tile(update_work *work, int64_t t, int64_t n)
{
    const cot_causal_conv1d_update_args *a = &work->problem->args;
    const conv1d_tile_args tile = {.n = n,
                                   .K = work->problem->sizes.K,
                                   .channels = work->channels,
                                   .x = (const char *)work->x,
                                   .y = (char *)work->y,
                                   .x_stride = work->pitch * 4,
                                   .y_stride = work->pitch * 4,
                                   .x_dtype = COT_F32,
                                   .y_dtype = COT_F32,
                                   .column_state = work->column_state,
                                   .silu = a->activation == COT_ACTIVATION_SILU};
    conv1d_gather_tile(work->x, work->pitch, &a->x, work->b, work->d_begin, work->channels, t, n);
    const int64_t done_channels = convolve_tile_table[conv1d_instance_index(tile.K)](&tile);
    if (done_channels < work->channels)
        conv1d_convolve_tile_general(&tile, done_channels);
    conv1d_scatter_tile(work->y, work->pitch, &a->y, work->b, work->d_begin, work->channels, t, n);
    for (int64_t i = 0; i < n; i++)
        store_token(work, t + i, work->x + i * work->pitch);
}

static void update_item(void *argument, int64_t index, void *scratch)
{
    const update_context *context = argument;
    const cot_causal_conv1d_update_args *a = &context->problem->args;
    const conv1d_sizes *sizes = &context->problem->sizes;
    update_work *const work = scratch;
    work->problem = context->problem;
    work->b = index / context->items_along_channels;
    work->d_begin = index % context->items_along_channels * context->channels_per_item;
    work->channels = cot_clamp(context->channels_per_item, 0, sizes->D - work->d_begin);
    work->pitch = cot_round_up(work->channels, VW);
    work->state_row = cot_is_present(&a->conv_state_indices) ? conv1d_index(&a->conv_state_indices, work->b) : work->b;
    if (work->state_row < 0) {
        memset(work->y, 0, (size_t)work->pitch * sizeof *work->y);
        for (int64_t t = 0; t < sizes->T; t++)
            conv1d_scatter_tile(work->y, work->pitch, &a->y, work->b, work->d_begin, work->channels, t, 1);
        return;
    }
    const int64_t S = context->problem->S;
    work->start = cot_is_present(&a->cache_seqlens) ? conv1d_index(&a->cache_seqlens, work->b) % S : S;
    conv1d_pack_weights(work->column_state, 2 * sizes->K, &a->weight, &a->bias, sizes->K, work->d_begin,
                        work->channels);
    pack_state_inputs(work);
    shift_state(work);
    const int64_t tile_tokens = conv1d_buffered_tile_tokens(work->channels);
    for (int64_t t = 0; t < sizes->T; t += tile_tokens)
        update_tile(work, t, cot_clamp(tile_tokens, 0, sizes->T - t));
}

cot_status V_NAME(causal_conv1d_update_channels)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const conv1d_update_problem *p = problem;
    update_context context = {.problem = p, .channels_per_item = conv1d_channel_last_item_channels(&p->sizes)};
    context.items_along_channels = cot_ceil_div(p->sizes.D, context.channels_per_item);
    cot_run_items_scratch(queue, p->sizes.B * context.items_along_channels, update_item, &context);
    return COT_OK;
}
