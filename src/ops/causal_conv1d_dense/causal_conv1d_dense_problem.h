/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_problem.h: what the kernels of this op are given: checked arguments and their sizes by name. */
#ifndef COT_CAUSAL_CONV1D_DENSE_PROBLEM_H
#define COT_CAUSAL_CONV1D_DENSE_PROBLEM_H

#include "core/op.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <cotangent/causal_conv1d_dense.h>

/* The order of the op's directions. */
enum { COT_CAUSAL_CONV1D_DENSE_FORWARD, COT_CAUSAL_CONV1D_DENSE_BACKWARD };

extern const cot_op cot_causal_conv1d_dense_op;
extern const cot_direction cot_causal_conv1d_dense_directions[];

/* As in the header. */
typedef struct conv1d_dense_sizes {
    int64_t B, Din, Dout, T, K;
    cot_dtype dtype; /* x's */
} conv1d_dense_sizes;

typedef struct conv1d_dense_forward_problem {
    conv1d_dense_sizes sizes; /* first in both problems */
    cot_causal_conv1d_dense_forward_args args;
} conv1d_dense_forward_problem;

typedef struct conv1d_dense_backward_problem {
    conv1d_dense_sizes sizes;
    cot_causal_conv1d_dense_backward_args args;
} conv1d_dense_backward_problem;

/* xe of channel i at row r of K-1+T: a column of the state, or a token. */
static inline const cot_tensor *conv1d_dense_row(const conv1d_dense_sizes *z, const cot_tensor *x,
                                                 const cot_tensor *state, int64_t r, int64_t *column)
{
    const int64_t history = z->K - 1;
    *column = r < history ? r : r - history;
    return r >= history ? x : cot_is_present(state) ? state : NULL;
}

/* ---- passes -------------------------------------------------------------------------------------------- *
 * Jobs that do not wait for each other are one pass: threads that are through with one begin the next, and small calls
 * wait for each other less often. */
typedef struct conv1d_dense_job {
    int64_t items;
    void (*body)(void *context, int64_t item);
    void (*body_with_scratch)(void *context, int64_t item, void *scratch); /* where body is NULL */
} conv1d_dense_job;

typedef struct conv1d_dense_pass {
    void *context;
    const conv1d_dense_job *jobs;
} conv1d_dense_pass;

static inline void conv1d_dense_item(void *context, int64_t item, void *scratch)
{
    const conv1d_dense_pass *pass = context;
    const conv1d_dense_job *job = pass->jobs;
    while (item >= job->items)
        item -= job++->items;
    if (job->body != NULL)
        job->body(pass->context, item);
    else
        job->body_with_scratch(pass->context, item, scratch);
}

static inline void conv1d_dense_run(cot_queue *queue, void *context, const conv1d_dense_job *jobs, int count)
{
    conv1d_dense_pass pass = {context, jobs};
    int64_t items = 0;
    for (int i = 0; i < count; i++)
        items += jobs[i].items;
    cot_parallel_scratch(queue, items, conv1d_dense_item, &pass);
}

#endif
