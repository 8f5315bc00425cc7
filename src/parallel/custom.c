/* SPDX-License-Identifier: Apache-2.0
 *
 * custom.c: the engine whose transfers are functions of the caller. */
#include "group.h"

#include "rows.h"

#include "core/argument_checks.h"
#include "core/status.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_RANKS = 1 << 20 };

_Static_assert(sizeof(void *) <= sizeof((cot_transfer *)0)->request, "a transfer holds the callbacks' value");

static void custom_abort(cot_group *group)
{
    const cot_group_callbacks *f = group->state;
    const bool open = group->transfers != NULL;
    group->transfers = NULL;
    group->keep_memory = f->abort(f->context, group->reason) == 0 && open;
}

/* Breaks the group after a failure of a callback, which has set this thread's message. */
static cot_status broken_by(cot_group *group, const char *what)
{
    snprintf(group->reason, sizeof group->reason, "rank %d: %s: %.200s", group->rank, what, cot_error_message());
    group->broken = true;
    custom_abort(group);
    return cot_fail(COT_PEER_ERROR, "the group is broken: %s", group->reason);
}

static cot_status custom_start(cot_group *group, cot_transfer *t)
{
    const cot_group_callbacks *f = group->state;
    void *value = NULL;
    char what[64];
    if (f->start(f->context, t->receive, t->peer, t->tag, t->data, t->bytes, &value) == COT_OK) {
        memcpy(t->request, &value, sizeof value);
        return COT_OK;
    }
    snprintf(what, sizeof what, "a transfer with rank %d did not start", t->peer);
    return broken_by(group, what);
}

static cot_status custom_wait(cot_group *group, cot_transfer *transfers, int count)
{
    const cot_group_callbacks *f = group->state;
    for (int i = 0; i < count; i++) {
        cot_transfer *t = &transfers[i];
        void *value;
        char what[64];
        if (!t->started || t->done)
            continue;
        memcpy(&value, t->request, sizeof value);
        if (f->wait(f->context, value, group->timeout) != COT_OK) {
            snprintf(what, sizeof what, "waited for rank %d", t->peer);
            return broken_by(group, what);
        }
        cot_group_finished(group, t);
    }
    return COT_OK;
}

static void custom_destroy(cot_group *group)
{
    cot_group_callbacks *f = group->state;
    f->destroy(f->context);
    free(f);
}

static const cot_engine engine = {.name = "one of the caller's functions",
                                  .moves_host = true,
                                  .start = custom_start,
                                  .wait = custom_wait,
                                  .abort = custom_abort,
                                  .destroy = custom_destroy};

static void keep_context(void *context)
{
    (void)context;
}

cot_status cot_group_create_custom(const cot_group_callbacks *callbacks, int32_t rank, int32_t size,
                                   const cot_group_options *options, cot_group **out)
{
    static const char call[] = "cot_group_create_custom";
    cot_group_callbacks copy = {0};
    double timeout;
    if (out == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: out is null", call);
    *out = NULL;
    if (callbacks == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: callbacks is null", call);
    CHECK(cot_copy_args(call, "callbacks.struct_size", callbacks, sizeof copy, &copy));
    if (copy.start == NULL || copy.wait == NULL || copy.abort == NULL || copy.destroy == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: callbacks.%s is null", call,
                        copy.start == NULL   ? "start"
                        : copy.wait == NULL  ? "wait"
                        : copy.abort == NULL ? "abort"
                                             : "destroy");
    if (size < 1 || size > MAX_RANKS)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: size is %d, expected 1 to %d", call, (int)size, MAX_RANKS);
    if (rank < 0 || rank >= size)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: rank is %d, expected 0 to %d", call, (int)rank, (int)size - 1);
    cot_status status = cot_group_read_options(call, options, &timeout);
    cot_group *group = cot_group_make(&engine, rank, size, timeout);
    cot_group_callbacks *state = malloc(sizeof *state);
    if (group == NULL || state == NULL) {
        if (group != NULL)
            cot_group_free(group);
        free(state);
        return cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for a group of %d ranks", call, (int)size);
    }
    *state = copy;
    group->state = state;
    status = cot_group_agree_on_options(group, call, status);
    if (status != COT_OK) {
        state->destroy = keep_context;
        cot_group_destroy(group);
        return status;
    }
    *out = group;
    return COT_OK;
}
