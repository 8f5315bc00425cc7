/* SPDX-License-Identifier: Apache-2.0
 * explain.h: what a call of attention over a group does, found without making it. */
#ifndef COT_PARALLEL_EXPLAIN_H
#define COT_PARALLEL_EXPLAIN_H

#include <cotangent/parallel.h>

typedef struct cot_parallel_cost {
    cot_status status; /* of a refused call */
    char refusal[320];
    int64_t calls, merges, messages; /* calls of the core, merges, and sent messages: the most of any rank */
    uint64_t sent_bytes;             /* the most of any rank */
    size_t memory_bytes;             /* that the group keeps, the most of any rank */
    double balance;                  /* pairs of a query and a visible key: the most of any rank, divided by the mean */
} cot_parallel_cost;

/* args: those of the single call, cot_attention_forward_args or cot_attention_backward_args. The tensors need no data.
 * Errors: COT_UNSUPPORTED (packed sequences and seqused, whose values decide), COT_OUT_OF_MEMORY. A refusal of the call
 * itself is cost->status. */
cot_status cot_parallel_explain(cot_queue *queue, int backward, const void *args, int32_t ranks,
                                const cot_parallel_options *options, cot_parallel_cost *cost);

#endif
