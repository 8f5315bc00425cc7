/* SPDX-License-Identifier: Apache-2.0
 *
 * context_ranks.h: context parallelism. The ranks of a group train on the same sequences, and each holds a part of the rows
 * of every sequence: chunks r and 2N-1-r of 2N (COT_CUT_ZIGZAG), so that causal attention is equal work for all. All
 * operations but attention and the convolution are local to a row. The gradients of the parameters are partial sums. */
#ifndef TRAIN_LM_CONTEXT_RANKS_H
#define TRAIN_LM_CONTEXT_RANKS_H

#include "positions.h"

#include <cotangent/parallel.h>

/* group NULL: one rank, which holds whole sequences. */
typedef struct context_ranks {
    cot_group *group;
    int rank, size;
    int64_t length, rows;    /* tokens of a sequence, and rows of it that this rank holds: length / size */
    row_positions positions; /* of these rows */
} context_ranks;

/* length is a multiple of 2*size. */
context_ranks context_ranks_of(cot_group *group, int64_t length);

/* Copies this rank's rows: whole [sequences,length], part [sequences,rows]. */
void context_ranks_take(const context_ranks *c, int64_t sequences, const int32_t *whole, int32_t *part);

/* Attention and the convolution over the ranks, or by the single call without a group. */
cot_status context_attention_forward(const context_ranks *c, cot_queue *queue, const cot_attention_forward_args *args);
cot_status context_attention_backward(const context_ranks *c, cot_queue *queue,
                                      const cot_attention_backward_args *args);
cot_status context_causal_conv1d_forward(const context_ranks *c, cot_queue *queue,
                                         const cot_causal_conv1d_forward_args *args);
cot_status context_causal_conv1d_backward(const context_ranks *c, cot_queue *queue,
                                          const cot_causal_conv1d_backward_args *args);

#endif
