/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_problem.h: the problem structs that the kernels of this op get: checked arguments, and their
 * sizes by name. */
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

/* The sizes of cotangent/causal_conv1d_dense.h. */
typedef struct conv1d_dense_sizes {
    int64_t B, Din, Dout, T, K;
    cot_dtype dtype; /* of x */
} conv1d_dense_sizes;

typedef struct conv1d_dense_forward_problem {
    conv1d_dense_sizes sizes; /* first in both problems */
    cot_causal_conv1d_dense_forward_args args;
} conv1d_dense_forward_problem;

typedef struct conv1d_dense_backward_problem {
    conv1d_dense_sizes sizes;
    cot_causal_conv1d_dense_backward_args args;
} conv1d_dense_backward_problem;

/* The tensor that holds row r of xe (of K-1+T rows), and its column there: a column of the state, or a token. NULL: the
 * row is zero. */
static inline const cot_tensor *conv1d_dense_row_tensor(const conv1d_dense_sizes *sizes, const cot_tensor *x,
                                                        const cot_tensor *state, int64_t r, int64_t *column)
{
    const int64_t state_columns = sizes->K - 1;
    *column = r < state_columns ? r : r - state_columns;
    return r >= state_columns ? x : cot_is_present(state) ? state : NULL;
}

/* ---- passes -------------------------------------------------------------------------------------------- *
 * A pass runs several independent jobs as one parallel loop. A thread that finishes the items of one job continues with
 * the next job, so there are fewer waits, which helps small calls. */
typedef struct conv1d_dense_job {
    int64_t items;
    void (*body)(void *context, int64_t item);
    void (*body_with_scratch)(void *context, int64_t item, void *scratch); /* used if body is NULL */
} conv1d_dense_job;

typedef struct conv1d_dense_pass {
    void *context;
    const conv1d_dense_job *jobs;
} conv1d_dense_pass;

static inline void conv1d_dense_run_item(void *context, int64_t item, void *scratch)
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

static inline void conv1d_dense_run_jobs(cot_queue *queue, void *context, const conv1d_dense_job *jobs, int count)
{
    conv1d_dense_pass pass = {context, jobs};
    int64_t items = 0;
    for (int i = 0; i < count; i++)
        items += jobs[i].items;
    cot_run_items_scratch(queue, items, conv1d_dense_run_item, &pass);
}

#endif
