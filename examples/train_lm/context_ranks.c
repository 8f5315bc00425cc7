/* SPDX-License-Identifier: Apache-2.0 */
#include "context_ranks.h"

context_ranks context_ranks_of(cot_group *group, int64_t length)
{
    if (group == NULL)
        return (context_ranks){.size = 1, .length = length, .rows = length, .positions = positions_from(0)};
    const int rank = cot_group_rank(group), size = cot_group_size(group);
    const int64_t chunk = length / (2 * size);
    return (context_ranks){.group = group,
                           .rank = rank,
                           .size = size,
                           .length = length,
                           .rows = 2 * chunk,
                           .positions = {rank * chunk, chunk, (2 * size - 1 - rank) * chunk}};
}

void context_ranks_take(const context_ranks *c, int64_t sequences, const int32_t *whole, int32_t *part)
{
    for (int64_t s = 0; s < sequences; s++)
        for (int64_t r = 0; r < c->rows; r++)
            part[s * c->rows + r] = whole[s * c->length + POSITION_OF(c->positions, r)];
}

static cot_parallel_options zigzag(void)
{
    cot_parallel_options options;
    COT_INIT(&options);
    options.cut = COT_CUT_ZIGZAG;
    return options;
}

cot_status context_attention_forward(const context_ranks *c, cot_queue *queue, const cot_attention_forward_args *args)
{
    const cot_parallel_options options = zigzag();
    if (c->group == NULL)
        return cot_attention_forward(queue, args);
    cot_attention_forward_args part = *args;
    part.q_length = part.k_length = c->length;
    return cot_parallel_attention_forward(c->group, queue, &options, &part);
}

cot_status context_attention_backward(const context_ranks *c, cot_queue *queue, const cot_attention_backward_args *args)
{
    const cot_parallel_options options = zigzag();
    if (c->group == NULL)
        return cot_attention_backward(queue, args);
    cot_attention_backward_args part = *args;
    part.q_length = part.k_length = c->length;
    return cot_parallel_attention_backward(c->group, queue, &options, &part);
}

cot_status context_causal_conv1d_forward(const context_ranks *c, cot_queue *queue,
                                         const cot_causal_conv1d_forward_args *args)
{
    cot_parallel_options options = zigzag();
    options.length = c->length;
    return c->group == NULL ? cot_causal_conv1d_forward(queue, args)
                            : cot_parallel_causal_conv1d_forward(c->group, queue, &options, args);
}

cot_status context_causal_conv1d_backward(const context_ranks *c, cot_queue *queue,
                                          const cot_causal_conv1d_backward_args *args)
{
    cot_parallel_options options = zigzag();
    options.length = c->length;
    return c->group == NULL ? cot_causal_conv1d_backward(queue, args)
                            : cot_parallel_causal_conv1d_backward(c->group, queue, &options, args);
}
