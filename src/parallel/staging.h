/* SPDX-License-Identifier: Apache-2.0
 * staging.h: transfers of device memory over an engine that moves host memory alone, such as MPI. The data goes through
 * a page-locked buffer on each side:
 *
 *   sender      start: the side stream copies the data into a buffer.
 *               wait:  the host waits for the copy, and gives the buffer to the engine.
 *   receiver    start: gives a buffer to the engine.
 *               wait:  the host waits for the engine; the side stream copies the data to the device, and the main
 *                      stream waits for that copy.
 *
 * So the host waits for the GPU in cot_group_wait. What was enqueued between start and wait runs meanwhile. A wait first
 * gives all sends of the rank to the engine, also those that it does not wait for: another rank may wait for them. */
#ifndef COT_PARALLEL_STAGING_H
#define COT_PARALLEL_STAGING_H

#include "group.h"

/* A page-locked buffer. Buffers are kept for later transfers of the group. */
typedef struct cot_staging {
    void *memory;
    size_t bytes;
    void *copied; /* CUDA event: the last copy from the buffer or into it has ended */
    bool taken;
    struct cot_staging *next;
} cot_staging;

/* Whether the transfers of the current call are staged. */
static inline bool cot_is_staged(const cot_group *group)
{
    return group->on_device && !group->engine->moves_device;
}

cot_status cot_staging_start(cot_group *group, cot_transfer *transfer);
cot_status cot_staging_wait(cot_group *group, cot_transfer *transfers, int count);

/* Frees all buffers. */
void cot_staging_free(cot_group *group);

#endif
