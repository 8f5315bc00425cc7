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
static cot_status make_room(cot_group *group, cot_staging *buffer, size_t bytes)
{
    if (buffer->copied != NULL)
        CHECK(cot_gpu_synchronize(group->gpu, buffer->copied));
    if (buffer->bytes >= bytes)
        return COT_OK;
    free_memory(group, buffer);
    CHECK(cot_gpu_host_alloc(group->gpu, bytes, &buffer->memory));
    buffer->bytes = bytes;
    return COT_OK;
}

/* A buffer that is large enough and that no copy uses, or NULL. */
static cot_staging *find_ready(const cot_group *group, size_t bytes)
{
    for (cot_staging *b = group->staging; b != NULL; b = b->next) {
        bool ended = true;
        if (b->taken || b->bytes < bytes)
            continue;
        if (b->copied == NULL || (cot_gpu_poll(group->gpu, b->copied, &ended) == COT_OK && ended))
            return b;
    }
    return NULL;
}

/* A buffer that is not taken, or NULL. */
static cot_staging *find_free(const cot_group *group)
{
    cot_staging *b = group->staging;
    while (b != NULL && b->taken)
        b = b->next;
    return b;
}

static cot_status acquire_buffer(cot_group *group, size_t bytes, cot_staging **out)
{
    bytes = (size_t)cot_round_up((int64_t)bytes, GRANULE);
    cot_staging *found = find_ready(group, bytes);
    if (found == NULL)
        found = find_free(group);
    if (found == NULL) {
        found = calloc(1, sizeof *found);
        if (found == NULL)
            return cot_fail(COT_OUT_OF_MEMORY, "no memory for a transfer");
        found->next = group->staging;
        group->staging = found;
    }
    CHECK(make_room(group, found, bytes));
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
        if (b->copied != NULL)
            cot_gpu_synchronize(group->gpu, b->copied);
        cot_gpu_drop(group->gpu, &b->copied);
        free_memory(group, b);
        free(b);
    }
    cot_gpu_leave(group->gpu);
}

/* ---- transfers ---------------------------------------------------------------------------------------------------- */

/* Copies on the side stream, when the main stream has made the device memory ready. */
static cot_status copy_staged(cot_group *group, cot_transfer *t)
{
    cot_gpu *gpu = group->gpu;
    CHECK(cot_gpu_await(gpu, COT_SIDE_STREAM, t->ready));
    cot_gpu_drop(gpu, &t->ready);
    CHECK(cot_gpu_mark_begin(gpu, COT_SIDE_STREAM));
    CHECK(t->receive ? cot_gpu_upload_aside(gpu, t->device_data, t->data, t->bytes)
                     : cot_gpu_download_aside(gpu, t->data, t->device_data, t->bytes));
    CHECK(cot_gpu_mark_end(gpu, COT_SIDE_STREAM));
    return cot_gpu_record(gpu, COT_SIDE_STREAM, &t->staging->copied);
}

cot_status cot_staging_start(cot_group *group, cot_transfer *transfer)
{
    cot_transfer *const t = transfer;
    CHECK(acquire_buffer(group, t->bytes, &t->staging));
    t->device_data = t->data;
    t->data = t->staging->memory;
    CHECK(cot_gpu_record(group->gpu, COT_MAIN_STREAM, &t->ready));
    if (t->receive)
        return cot_group_issue(group, t);
    cot_transfer **link = &group->staged;
    while (*link != NULL)
        link = &(*link)->next_in_queue;
    t->next_in_queue = NULL;
    *link = t;
    return copy_staged(group, t);
}

/* Gives all sends to the engine, in the order in which they were started. */
static cot_status issue_sends(cot_group *group)
{
    while (group->staged != NULL) {
        cot_transfer *t = group->staged;
        group->staged = t->next_in_queue;
        CHECK(cot_gpu_synchronize(group->gpu, t->staging->copied));
        CHECK(cot_group_issue(group, t));
    }
    return COT_OK;
}

cot_status cot_staging_wait(cot_group *group, cot_transfer *transfers, int count)
{
    CHECK(issue_sends(group));
    CHECK(group->engine->wait(group, transfers, count));
    CHECK(cot_gpu_mark_begin(group->gpu, COT_MAIN_STREAM));
    for (int i = 0; i < count; i++) {
        cot_transfer *t = &transfers[i];
        if (t->staging == NULL) /* not started, or it was waited for before */
            continue;
        if (t->receive) {
            CHECK(copy_staged(group, t));
            CHECK(cot_gpu_await(group->gpu, COT_MAIN_STREAM, t->staging->copied));
        }
        t->staging->taken = false;
        t->staging = NULL;
    }
    return cot_gpu_mark_end(group->gpu, COT_MAIN_STREAM);
}
