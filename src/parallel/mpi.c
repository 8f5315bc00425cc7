/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi.c: the engine whose ranks are the processes of an MPI communicator. All memory that MPI reads or writes belongs to
 * the handle. If the group breaks while requests are open, the handle and its memory are not freed: MPI may still use
 * them. */
#include "group.h"

#include "core/argument_checks.h"
#include "core/integers.h"
#include "core/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#ifdef COT_MPI
#include <mpi.h>

enum { TAG_ABORT = 1, TAG_FIRST = 2 };

typedef struct mpi_state {
    MPI_Comm comm;
    MPI_Datatype unit;           /* COT_ALIGNMENT bytes, so that the counts of large messages fit into an int */
    char notice[COT_MAX_REASON]; /* the abort message that this rank sends */
} mpi_state;

_Static_assert(sizeof(MPI_Request) <= sizeof((cot_transfer *)0)->request, "a transfer holds an MPI_Request");

static MPI_Request request_of(const cot_transfer *transfer)
{
    MPI_Request request;
    memcpy(&request, transfer->request, sizeof request);
    return request;
}

static void keep_request(cot_transfer *transfer, MPI_Request request)
{
    memcpy(transfer->request, &request, sizeof request);
}

/* Cancels the receives. MPI cannot cancel sends. */
static void cancel_transfers(cot_group *group)
{
    for (cot_transfer *t = group->transfers; t != NULL; t = t->next) {
        MPI_Request request = request_of(t);
        group->keep_memory = true;
        if (request == MPI_REQUEST_NULL)
            continue;
        if (t->receive)
            MPI_Cancel(&request);
        MPI_Request_free(&request);
    }
    group->transfers = NULL;
}

static cot_status mark_broken(cot_group *group, const char *reason)
{
    if (!group->broken)
        snprintf(group->reason, sizeof group->reason, "%s", reason);
    group->broken = true;
    cancel_transfers(group);
    return cot_fail(COT_PEER_ERROR, "the group is broken: %s", group->reason);
}

/* Sends the reason to all ranks, without waiting. */
static void tell_all(cot_group *group)
{
    mpi_state *s = group->state;
    snprintf(s->notice, sizeof s->notice, "%s", group->reason);
    for (int r = 0; r < group->size; r++) {
        MPI_Request request;
        if (r != group->rank &&
            MPI_Isend(s->notice, sizeof s->notice, MPI_CHAR, r, TAG_ABORT, s->comm, &request) == MPI_SUCCESS)
            MPI_Request_free(&request);
    }
    group->keep_memory = true;
}

static cot_status mpi_error(cot_group *group, int code)
{
    char text[MPI_MAX_ERROR_STRING] = "", reason[COT_MAX_REASON];
    int length = 0;
    MPI_Error_string(code, text, &length);
    snprintf(reason, sizeof reason, "rank %d: MPI: %.200s", group->rank, text);
    const cot_status status = mark_broken(group, reason);
    tell_all(group);
    return status;
}

static cot_status mpi_start(cot_group *group, cot_transfer *t)
{
    mpi_state *s = group->state;
    MPI_Request request = MPI_REQUEST_NULL;
    const size_t units = t->bytes / COT_ALIGNMENT;
    keep_request(t, request);
    if (units > INT32_MAX)
        return mpi_error(group, MPI_ERR_COUNT);
    const int code = t->receive
                         ? MPI_Irecv(t->data, (int)units, s->unit, t->peer, TAG_FIRST + t->tag, s->comm, &request)
                         : MPI_Isend(t->data, (int)units, s->unit, t->peer, TAG_FIRST + t->tag, s->comm, &request);
    keep_request(t, request);
    return code == MPI_SUCCESS ? COT_OK : mpi_error(group, code);
}

/* Tests the transfers. Sets *pending to the first that is not done, or NULL. */
static int test_all(cot_group *group, cot_transfer *transfers, int count, cot_transfer **pending, bool *progress)
{
    *pending = NULL;
    for (int i = 0; i < count; i++) {
        cot_transfer *t = &transfers[i];
        int done = 0;
        if (!t->started || t->done)
            continue;
        MPI_Request request = request_of(t);
        const int code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        keep_request(t, request);
        if (code != MPI_SUCCESS)
            return code;
        if (done) {
            cot_group_finished(group, t);
            *progress = true;
        } else if (*pending == NULL) {
            *pending = t;
        }
    }
    return MPI_SUCCESS;
}

/* Receives the abort message of another rank, if there is one. */
static int take_notice(cot_group *group, bool *aborted)
{
    mpi_state *s = group->state;
    MPI_Status from;
    int flag = 0;
    const int code = MPI_Iprobe(MPI_ANY_SOURCE, TAG_ABORT, s->comm, &flag, &from);
    *aborted = code == MPI_SUCCESS && flag;
    if (!*aborted)
        return code;
    char reason[COT_MAX_REASON];
    const int received =
        MPI_Recv(reason, sizeof reason, MPI_CHAR, from.MPI_SOURCE, TAG_ABORT, s->comm, MPI_STATUS_IGNORE);
    reason[sizeof reason - 1] = '\0';
    if (received == MPI_SUCCESS)
        mark_broken(group, reason);
    return received;
}

static cot_status mpi_wait(cot_group *group, cot_transfer *transfers, int count)
{
    double deadline = cot_seconds() + group->timeout;
    for (int64_t round = 0;; round++) {
        cot_transfer *pending;
        bool progress = false, aborted = false;
        int code = test_all(group, transfers, count, &pending, &progress);
        if (code == MPI_SUCCESS && pending == NULL)
            return COT_OK;
        if (code == MPI_SUCCESS)
            code = take_notice(group, &aborted);
        if (code != MPI_SUCCESS)
            return mpi_error(group, code);
        if (aborted)
            return cot_fail(COT_PEER_ERROR, "the group is broken: %s", group->reason);
        if (progress)
            deadline = cot_seconds() + group->timeout;
        if (cot_seconds() > deadline) {
            char reason[COT_MAX_REASON];
            snprintf(reason, sizeof reason, "rank %d waited %g seconds for rank %d", group->rank, group->timeout,
                     pending->peer);
            const cot_status status = mark_broken(group, reason);
            tell_all(group);
            return status;
        }
        if (round > 100) /* leaves the core to other processes */
            nanosleep(&(struct timespec){0, 20000}, NULL);
    }
}

static void mpi_abort(cot_group *group)
{
    cancel_transfers(group);
    tell_all(group);
}

/* Takes no part in collective calls after a fault: the other ranks may not come. */
static void mpi_destroy(cot_group *group)
{
    mpi_state *s = group->state;
    bool aborted;
    if (!group->broken)
        take_notice(group, &aborted);
    if (group->broken)
        return;
    MPI_Type_free(&s->unit);
    MPI_Comm_free(&s->comm);
    free(s);
}

static const cot_engine engine = {.name = "one of MPI processes",
                                  .moves_host = true,
                                  .start = mpi_start,
                                  .wait = mpi_wait,
                                  .abort = mpi_abort,
                                  .destroy = mpi_destroy};

/* The largest tag of a group is 2*size + 1; see cot_group_callbacks. */
static cot_status check_tags(const char *call, MPI_Comm comm, int size)
{
    int *largest = NULL, found = 0;
    MPI_Comm_get_attr(comm, MPI_TAG_UB, &largest, &found);
    if (found && TAG_FIRST + 2 * (int64_t)size + 1 > *largest)
        return cot_fail(COT_UNSUPPORTED, "%s: comm has %d ranks, too many for the tags of this MPI, up to %d", call,
                        size, *largest);
    return COT_OK;
}

/* A rank whose options are refused still takes part: the others would wait for it in MPI without a limit of time. */
cot_status cot_group_create_mpi(const void *comm, const cot_group_options *options, cot_group **out)
{
    static const char call[] = "cot_group_create_mpi";
    double timeout;
    int rank = 0, size = 0;
    MPI_Comm callers;
    if (out == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: out is null", call);
    *out = NULL;
    if (comm == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: comm is null, expected a pointer to an MPI_Comm", call);
    memcpy(&callers, comm, sizeof callers);
    mpi_state *s = calloc(1, sizeof *s);
    if (s == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for a group", call);
    if (MPI_Comm_dup(callers, &s->comm) != MPI_SUCCESS) {
        free(s);
        return cot_fail(COT_PEER_ERROR, "%s: MPI_Comm_dup failed", call);
    }
    MPI_Comm_set_errhandler(s->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(s->comm, &rank);
    MPI_Comm_size(s->comm, &size);
    MPI_Type_contiguous(COT_ALIGNMENT, MPI_BYTE, &s->unit);
    MPI_Type_commit(&s->unit);
    cot_status status = cot_group_read_options(call, options, &timeout);
    if (status == COT_OK)
        status = check_tags(call, s->comm, size);
    cot_group *group = cot_group_make(&engine, rank, size, timeout);
    if (group == NULL) {
        MPI_Type_free(&s->unit);
        MPI_Comm_free(&s->comm);
        free(s);
        return cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for a group of %d ranks", call, size);
    }
    group->state = s;
    status = cot_group_agree_on_options(group, call, status);
    if (status != COT_OK) {
        cot_group_destroy(group);
        return status;
    }
    *out = group;
    return COT_OK;
}

#else

cot_status cot_group_create_mpi(const void *comm, const cot_group_options *options, cot_group **out)
{
    (void)comm, (void)options;
    if (out != NULL)
        *out = NULL;
    return cot_fail(COT_NO_DEVICE, "cot_group_create_mpi: this library was built without MPI");
}

#endif
