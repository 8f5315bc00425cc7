/* SPDX-License-Identifier: Apache-2.0
 * queue.h: where work runs. Kernels see the queue only through cot_parallel and cot_queue_threads. */
#ifndef COT_CORE_QUEUE_H
#define COT_CORE_QUEUE_H

#include "device.h"
#include "integers.h"

#include <cotangent/core.h>

struct cot_queue {
    cot_backend backend;
    int32_t threads;
    uint32_t isa; /* what kernels may use here, see cpu_features.h */
    void *pool;   /* CPU: serves calls that bring no workspace */
    size_t pool_bytes;
    char *scratch; /* CPU: of the call that runs, a slice of scratch_bytes for each thread */
    size_t scratch_bytes;
    char *forced;       /* "op=kernel,op=kernel", or NULL */
    cot_device *device; /* CUDA: all of it */
};

/* Runs body(context, item) for every item of [0, items), over the queue's threads, in no particular order: a
 * result may depend on the item alone, which is what keeps it independent of the number of threads. The
 * threads run in the default floating-point state, in which cot_op_run is. */
void cot_parallel(const cot_queue *queue, int64_t items, void (*body)(void *context, int64_t item), void *context);

/* The same, where an item has more working memory than stacks are for (musl's threads have 128 KB): body gets its
 * thread's slice, cot_kernel.scratch bytes, aligned to COT_ALIGNMENT, with undefined contents. */
void cot_parallel_scratch(const cot_queue *queue, int64_t items,
                          void (*body)(void *context, int64_t item, void *scratch), void *context);

/* The kernel forced for an op: its name, *length long, not terminated; NULL if none is. */
const char *cot_queue_forced(const cot_queue *queue, const char *op, size_t *length);

/* The pool, grown to at least `bytes` where needed. */
cot_status cot_queue_pool(cot_queue *queue, size_t bytes, void **pool);

#endif
