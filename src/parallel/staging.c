/* SPDX-License-Identifier: Apache-2.0 */
#include "staging.h"

#include "core/argument_checks.h"
#include "core/integers.h"
#include "core/status.h"

#include <stdlib.h>

enum { GRANULE = 1 << 16 }; /* sizes are rounded up to it, so that a buffer serves transfers of slightly other sizes */

/* ---- buffers ------------------------------------------------------------------------------------------------------ */

static void free_memory(cot_group *group, cot_staging *buffer)
{
    cot_gpu_host_free(group->gpu, buffer->memory);
    buffer->memory = NULL;
    buffer->bytes = 0;
}

/* Makes the buffer large enough, after the last copy that uses it. */
static cot_status prepare(cot_group *group, cot_staging *buffer, size_t bytes)
{
    if (buffer->event != NULL)
        CHECK(cot_gpu_synchronize(group->gpu, buffer->event));
    if (buffer->bytes >= bytes)
        return COT_OK;
    free_memory(group, buffer);
    CHECK(cot_gpu_host_alloc(group->gpu, bytes, &buffer->memory));
    buffer->bytes = bytes;
    return COT_OK;
}

static bool is_idle(cot_group *group, const cot_staging *buffer)
{
    bool happened = true;
    return buffer->event == NULL || (cot_gpu_poll(group->gpu, buffer->event, &happened) == COT_OK && happened);
}

/* Takes a buffer that is large enough and that no copy uses, or another one that is free, or a new one. */
static cot_status take(cot_group *group, size_t bytes, cot_staging **out)
{
    cot_staging *found = NULL;
    bytes = (size_t)cot_round_up((int64_t)bytes, GRANULE);
    for (cot_staging *b = group->staging; b != NULL; b = b->next) {
        if (b->taken)
            continue;
        found = b;
        if (b->bytes >= bytes && is_idle(group, b))
            break;
    }
    if (found == NULL) {
        found = calloc(1, sizeof *found);
        if (found == NULL)
            return cot_fail(COT_OUT_OF_MEMORY, "no memory for a transfer");
        found->next = group->staging;
        group->staging = found;
    }
    CHECK(prepare(group, found, bytes));
    found->taken = true;
    *out = found;
    return COT_OK;
}

void cot_staging_free(cot_group *group)
{
    if (group->staging == NULL || cot_gpu_push(group->gpu) != COT_OK)
        return;
    while (group->staging != NULL) {
        cot_staging *b = group->staging;
        group->staging = b->next;
        if (b->event != NULL)
            cot_gpu_synchronize(group->gpu, b->event);
        cot_gpu_drop(group->gpu, &b->event);
        free_memory(group, b);
        free(b);
    }
    cot_gpu_leave(group->gpu);
}

/* ---- transfers ---------------------------------------------------------------------------------------------------- */

/* Copies on the side stream, after what the buffer's event stands for, and records the event again. */
static cot_status copy(cot_group *group, const cot_transfer *t)
{
    cot_gpu *gpu = group->gpu;
    CHECK(cot_gpu_await(gpu, true, t->staging->event));
    CHECK(cot_gpu_mark(gpu, true, true));
    CHECK(t->receive ? cot_gpu_upload_aside(gpu, t->device_data, t->data, t->bytes)
                     : cot_gpu_download_aside(gpu, t->data, t->device_data, t->bytes));
    CHECK(cot_gpu_mark(gpu, true, false));
    return cot_gpu_record(gpu, true, &t->staging->event);
}

cot_status cot_staging_start(cot_group *group, cot_transfer *transfer)
{
    cot_transfer *t = transfer;
    CHECK(take(group, t->bytes, &t->staging));
    t->device_data = t->data;
    t->data = t->staging->memory;
    CHECK(cot_gpu_record(group->gpu, false, &t->staging->event));
    if (t->receive)
        return cot_group_issue(group, t);
    cot_transfer **link = &group->staged;
    while (*link != NULL)
        link = &(*link)->next_posted;
    t->next_posted = NULL;
    *link = t;
    return copy(group, t);
}

/* Gives all sends to the engine, in the order in which they were started. */
static cot_status issue_sends(cot_group *group)
{
    while (group->staged != NULL) {
        cot_transfer *t = group->staged;
        group->staged = t->next_posted;
        CHECK(cot_gpu_synchronize(group->gpu, t->staging->event));
        CHECK(cot_group_issue(group, t));
    }
    return COT_OK;
}

cot_status cot_staging_wait(cot_group *group, cot_transfer *transfers, int count)
{
    CHECK(issue_sends(group));
    CHECK(group->engine->wait(group, transfers, count));
    CHECK(cot_gpu_mark(group->gpu, false, true));
    for (int i = 0; i < count; i++) {
        cot_transfer *t = &transfers[i];
        if (t->staging == NULL) /* not started, or it was waited for before */
            continue;
        if (t->receive) {
            CHECK(copy(group, t));
            CHECK(cot_gpu_await(group->gpu, false, t->staging->event));
        }
        t->staging->taken = false;
        t->staging = NULL;
    }
    return cot_gpu_mark(group->gpu, false, false);
}
