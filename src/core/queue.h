/* SPDX-License-Identifier: Apache-2.0
 * queue.h: the queue, which holds the resources that kernels run on. CPU kernels use it only through cot_run_items,
 * cot_run_items_scratch and cot_queue_threads. */
#ifndef COT_CORE_QUEUE_H
#define COT_CORE_QUEUE_H

#include "device.h"
#include "integers.h"

#include <cotangent/core.h>

struct cot_queue {
    cot_backend backend;
    int32_t threads;
    uint32_t isa;             /* the available instruction sets, see cpu_features.h */
    cot_allocator *allocator; /* of cot_queue_set_allocator; NULL: the pool */
    void *allocator_context;
    void *pool; /* CPU: the workspace of calls whose arguments have none */
    size_t pool_bytes;
    const void *plan; /* of the running call, as the kernel's `plan` function wrote it */
    char *scratch;    /* CPU: the scratch memory of the running call, scratch_bytes for each thread */
    size_t scratch_bytes;
    char *forced;                  /* "op=kernel,op=kernel", or NULL */
    const cot_device_calls *calls; /* of the GPU backend; NULL on the CPU */
    cot_device *device;            /* the state of the GPU backend; NULL on the CPU */
};

/* Runs body(context, item) for every item in [0, items) on the queue's threads, in no particular order. A result may
 * depend only on the item, so that it does not depend on the number of threads. The threads run in the default
 * floating-point state, as cot_op_run does. */
void cot_run_items(const cot_queue *queue, int64_t items, void (*body)(void *context, int64_t item), void *context);

/* The same for items that need more memory than a stack should hold (threads of musl have 128 KiB of stack). body gets
 * the scratch memory of its thread: cot_kernel.scratch bytes, aligned to COT_ALIGNMENT, with undefined contents. */
void cot_run_items_scratch(const cot_queue *queue, int64_t items,
                           void (*body)(void *context, int64_t item, void *scratch), void *context);

/* The name of the kernel forced for an op, or NULL. The name has *length characters and is not null-terminated. */
const char *cot_queue_forced_kernel(const cot_queue *queue, const char *op, size_t *length);

/* Finds the workspace of a call whose arguments have none: `bytes` bytes of the queue's allocator, or else of the pool,
 * which grows if needed. */
cot_status cot_queue_workspace(cot_queue *queue, const char *call, size_t bytes, void **workspace);

/* Returns the pool, after growing it to at least `bytes` if needed. */
cot_status cot_queue_pool(cot_queue *queue, size_t bytes, void **pool);

#endif
