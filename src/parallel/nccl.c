/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl.c: the engine over a NCCL communicator. libnccl.so.2 is opened at run time.
 *
 * NCCL's calls only enqueue work, here on the side stream. A batch of transfers is one NCCL group. The side stream waits
 * for the queue's stream before it, and the queue's stream waits for the side stream where the call waits for a
 * transfer. NCCL matches the messages of two ranks by their order, so that all ranks start them in the same order.
 *
 * The host waits for the GPU only in an agreement and in cot_group_check. It polls there: NCCL's own errors, and the time
 * that has passed. ncclCommAbort then ends NCCL's kernels, which would wait for ever. The communicator's calls do not
 * block either: the first message between two ranks connects them, which needs both. */
#include "group.h"

#include "core/argument_checks.h"
#include "core/status.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* ---- declarations of NCCL's interface, as of version 2.18 -------------------------------------------------------- */

typedef void *nccl_comm;
typedef int nccl_result;

/* ncclConfig_t up to splitShare. NCCL reads `size` bytes, as of `version`. */
typedef struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
} nccl_config;

enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7, NCCL_BYTE = 1 /* ncclUint8 */, NCCL_OLDEST = 21800 };

/* clang-format off */
#define NCCL_FUNCTIONS(X)                                                                        \
    X(ncclGetVersion, (int *version))                                                            \
    X(ncclCommCount, (nccl_comm comm, int *count))                                               \
    X(ncclCommUserRank, (nccl_comm comm, int *rank))                                             \
    X(ncclCommCuDevice, (nccl_comm comm, int *device))                                           \
    X(ncclCommSplit, (nccl_comm comm, int color, int key, nccl_comm *created, void *config))     \
    X(ncclCommGetAsyncError, (nccl_comm comm, nccl_result *error))                               \
    X(ncclCommFinalize, (nccl_comm comm))                                                        \
    X(ncclCommAbort, (nccl_comm comm))                                                           \
    X(ncclCommDestroy, (nccl_comm comm))                                                         \
    X(ncclGroupStart, (void))                                                                    \
    X(ncclGroupEnd, (void))                                                                      \
    X(ncclSend, (const void *data, size_t count, int type, int peer, nccl_comm comm, void *stream)) \
    X(ncclRecv, (void *data, size_t count, int type, int peer, nccl_comm comm, void *stream))    \
    X(ncclAllGather, (const void *data, void *all, size_t count, int type, nccl_comm comm, void *stream))
/* clang-format on */

typedef struct nccl_state {
    void *library;
#define MEMBER(name, parameters) nccl_result(*name) parameters;
    NCCL_FUNCTIONS(MEMBER)
#undef MEMBER
    const char *(*ncclGetErrorString)(nccl_result result);
    nccl_comm comm;        /* a duplicate of the caller's; NULL after an abort */
    cot_transfer *batch;   /* started, not issued; oldest first */
    cot_agreement *device; /* the agreements of all ranks in device memory, then that of this rank */
    cot_agreement *host;   /* the same in page-locked memory */
    void *gathered;        /* the event after an exchange of agreements */
} nccl_state;

static bool find_function(const nccl_state *s, const char *name, void *function)
{
    void *found = dlsym(s->library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

static cot_status open_library(const char *call, nccl_state *s)
{
    int version = 0;
    s->library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (s->library == NULL)
        return cot_fail(COT_NO_DEVICE, "%s: no NCCL: %s", call, dlerror());
    if (find_function(s, "ncclGetVersion", &s->ncclGetVersion))
        s->ncclGetVersion(&version);
    if (version < NCCL_OLDEST)
        return cot_fail(COT_NO_DEVICE, "%s: libnccl.so.2 is version %d.%d.%d, 2.18 or later is needed", call,
                        version / 10000, version % 10000 / 100, version % 100);
#define FIND(name, parameters)                                                                                \
    if (!find_function(s, #name, &s->name))                                                                   \
        return cot_fail(COT_NO_DEVICE, "%s: libnccl.so.2 (version %d.%d.%d) lacks %s", call, version / 10000, \
                        version % 10000 / 100, version % 100, #name);
    NCCL_FUNCTIONS(FIND)
    FIND(ncclGetErrorString, )
#undef FIND
    return COT_OK;
}

/* ---- faults ------------------------------------------------------------------------------------------------------ */

/* Ends NCCL's kernels of this rank, and frees the communicator. */
static void abort_comm(nccl_state *s)
{
    if (s->comm != NULL)
        s->ncclCommAbort(s->comm);
    s->comm = NULL;
}

/* Forgets all transfers. Their memory is not freed before the streams have passed them. */
static void cancel_transfers(cot_group *group)
{
    nccl_state *s = group->state;
    for (cot_transfer *t = group->transfers; t != NULL; t = t->next) {
        cot_gpu_drop(group->gpu, &t->ready);
        cot_gpu_drop(group->gpu, &t->complete);
    }
    s->batch = NULL;
    group->transfers = NULL;
}

static cot_status mark_broken(cot_group *group, const char *reason)
{
    nccl_state *s = group->state;
    if (!group->broken)
        snprintf(group->reason, sizeof group->reason, "%s", reason);
    group->broken = true;
    cancel_transfers(group);
    abort_comm(s);
    return cot_fail(COT_PEER_ERROR, "the group is broken: %s", group->reason);
}

static cot_status nccl_error(cot_group *group, nccl_result result)
{
    const nccl_state *s = group->state;
    char reason[COT_MAX_REASON];
    snprintf(reason, sizeof reason, "rank %d: NCCL: %.200s", group->rank, s->ncclGetErrorString(result));
    return mark_broken(group, reason);
}

static cot_status timed_out(cot_group *group)
{
    char reason[COT_MAX_REASON];
    snprintf(reason, sizeof reason, "rank %d waited %g seconds for the other ranks", group->rank, group->timeout);
    return mark_broken(group, reason);
}

/* Whether NCCL has found an error by itself: a rank of another process died, for example. */
static nccl_result async_error(const nccl_state *s)
{
    nccl_result error = NCCL_SUCCESS;
    const nccl_result result = s->ncclCommGetAsyncError(s->comm, &error);
    return result != NCCL_SUCCESS ? result : error;
}

static void pause_polling(int64_t round)
{
    if (round > 1000)
        nanosleep(&(struct timespec){0, 20000}, NULL);
}

static bool is_good(nccl_result result)
{
    return result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS;
}

/* Waits until a call that NCCL has begun is done. */
static cot_status settle(cot_group *group, nccl_result result)
{
    const nccl_state *s = group->state;
    const double deadline = cot_seconds() + group->timeout;
    for (int64_t round = 0; result == NCCL_IN_PROGRESS; round++) {
        if (cot_seconds() > deadline)
            return timed_out(group);
        pause_polling(round);
        result = async_error(s);
    }
    return result == NCCL_SUCCESS ? COT_OK : nccl_error(group, result);
}

/* The host waits for an event. The context is current. */
static cot_status await_event(cot_group *group, void *event)
{
    const nccl_state *s = group->state;
    const double deadline = cot_seconds() + group->timeout;
    for (int64_t round = 0;; round++) {
        bool happened;
        CHECK(cot_gpu_poll(group->gpu, event, &happened));
        if (happened)
            return COT_OK;
        const nccl_result error = async_error(s);
        if (!is_good(error))
            return nccl_error(group, error);
        if (cot_seconds() > deadline)
            return timed_out(group);
        pause_polling(round);
    }
}

/* ---- transfers ---------------------------------------------------------------------------------------------------- */

static cot_status nccl_start(cot_group *group, cot_transfer *transfer)
{
    nccl_state *s = group->state;
    cot_transfer **link = &s->batch;
    while (*link != NULL)
        link = &(*link)->next_in_queue;
    transfer->next_in_queue = NULL;
    *link = transfer;
    return COT_OK;
}

static nccl_result issue(const nccl_state *s, const cot_transfer *t, void *stream)
{
    return t->receive ? s->ncclRecv(t->data, t->bytes, NCCL_BYTE, t->peer, s->comm, stream)
                      : s->ncclSend(t->data, t->bytes, NCCL_BYTE, t->peer, s->comm, stream);
}

static cot_status nccl_flush(cot_group *group)
{
    nccl_state *s = group->state;
    void *const stream = cot_gpu_side_stream(group->gpu);
    if (s->batch == NULL)
        return COT_OK;
    CHECK(cot_gpu_record(group->gpu, COT_MAIN_STREAM, &s->batch->ready));
    CHECK(cot_gpu_await(group->gpu, COT_SIDE_STREAM, s->batch->ready));
    CHECK(cot_gpu_mark_begin(group->gpu, COT_SIDE_STREAM));
    nccl_result result = s->ncclGroupStart();
    for (const cot_transfer *t = s->batch; is_good(result) && t != NULL; t = t->next_in_queue)
        result = issue(s, t, stream);
    const nccl_result ended = s->ncclGroupEnd();
    CHECK(settle(group, is_good(result) ? ended : result));
    CHECK(cot_gpu_mark_end(group->gpu, COT_SIDE_STREAM));
    for (cot_transfer *t = s->batch; t != NULL; t = t->next_in_queue)
        CHECK(cot_gpu_record(group->gpu, COT_SIDE_STREAM, &t->complete));
    while (s->batch != NULL) {
        cot_transfer *t = s->batch;
        s->batch = t->next_in_queue;
        cot_group_finished(group, t);
    }
    return COT_OK;
}

static cot_status nccl_wait(cot_group *group, cot_transfer *transfers, int count)
{
    const nccl_state *s = group->state;
    CHECK(nccl_flush(group));
    const nccl_result error = async_error(s);
    if (!is_good(error))
        return nccl_error(group, error);
    CHECK(cot_gpu_mark_begin(group->gpu, COT_MAIN_STREAM));
    for (int i = 0; i < count; i++) {
        cot_transfer *t = &transfers[i];
        if (t->complete != NULL) /* once: no event is left after the first wait */
            CHECK(cot_gpu_await(group->gpu, COT_MAIN_STREAM, t->complete));
        cot_gpu_drop(group->gpu, &t->ready);
        cot_gpu_drop(group->gpu, &t->complete);
    }
    return cot_gpu_mark_end(group->gpu, COT_MAIN_STREAM);
}

static cot_status exchange_agreements(cot_group *group)
{
    nccl_state *s = group->state;
    const size_t all = (size_t)group->size * sizeof *s->host;
    cot_agreement *const own = s->host + group->size, *const own_device = s->device + group->size;
    *own = group->agreement[group->rank];
    CHECK(cot_gpu_upload_aside(group->gpu, own_device, own, sizeof *own));
    CHECK(settle(group, s->ncclAllGather(own_device, s->device, sizeof *own, NCCL_BYTE, s->comm,
                                         cot_gpu_side_stream(group->gpu))));
    CHECK(cot_gpu_download_aside(group->gpu, s->host, s->device, all));
    CHECK(cot_gpu_record(group->gpu, COT_SIDE_STREAM, &s->gathered));
    CHECK(await_event(group, s->gathered));
    memcpy(group->agreement, s->host, all);
    return COT_OK;
}

/* The context is not current if the rank's queue was refused. */
static cot_status nccl_gather(cot_group *group)
{
    CHECK(cot_gpu_push(group->gpu));
    const cot_status status = exchange_agreements(group);
    cot_gpu_leave(group->gpu);
    return status;
}

static cot_status nccl_check(cot_group *group)
{
    void *const last = cot_gpu_last_event(group->gpu);
    if (last == NULL)
        return COT_OK;
    CHECK(cot_gpu_push(group->gpu));
    const cot_status status = await_event(group, last);
    cot_gpu_leave(group->gpu);
    return status;
}

static void nccl_abort(cot_group *group)
{
    cancel_transfers(group);
    abort_comm(group->state);
}

static void nccl_destroy(cot_group *group)
{
    nccl_state *s = group->state;
    if (s->comm != NULL && settle(group, s->ncclCommFinalize(s->comm)) == COT_OK)
        s->ncclCommDestroy(s->comm);
    if (group->gpu != NULL && cot_gpu_push(group->gpu) == COT_OK) {
        cot_gpu_drop(group->gpu, &s->gathered);
        cot_gpu_free(group->gpu, s->device);
        cot_gpu_leave(group->gpu);
    }
    if (s->library != NULL)
        dlclose(s->library);
    free(s);
}

static const cot_engine engine = {.name = "one of NCCL",
                                  .moves_device = true,
                                  .start = nccl_start,
                                  .flush = nccl_flush,
                                  .wait = nccl_wait,
                                  .gather = nccl_gather,
                                  .check = nccl_check,
                                  .abort = nccl_abort,
                                  .destroy = nccl_destroy};

/* ---- creating a group --------------------------------------------------------------------------------------------- */

static cot_status take_memory(cot_group *group, const char *call)
{
    nccl_state *s = group->state;
    const size_t bytes = ((size_t)group->size + 1) * sizeof *s->host;
    void *host = NULL, *device = NULL;
    CHECK(cot_gpu_host_memory(group->gpu, bytes, &host));
    CHECK(cot_gpu_alloc(group->gpu, call, bytes, &device));
    s->host = host, s->device = device;
    return COT_OK;
}

static cot_status duplicate(cot_group *group, nccl_comm callers)
{
    nccl_state *s = group->state;
    nccl_config config = {sizeof config, 0xcafebeef, NCCL_OLDEST, 0, INT_MIN, INT_MIN, INT_MIN, NULL, INT_MIN};
    const double deadline = cot_seconds() + group->timeout;
    nccl_result result = s->ncclCommSplit(callers, 0, group->rank, &s->comm, &config);
    for (int64_t round = 0; result == NCCL_IN_PROGRESS; round++) { /* the caller's communicator does not block */
        if (cot_seconds() > deadline)
            return timed_out(group);
        pause_polling(round);
        if (s->ncclCommGetAsyncError(callers, &result) != NCCL_SUCCESS)
            break;
    }
    return result == NCCL_SUCCESS ? settle(group, async_error(s)) : nccl_error(group, result);
}

/* Opens the GPU of the communicator, and duplicates the communicator. The ranks then learn of a rank whose options were
 * refused: `status`. */
static cot_status connect(cot_group *group, const char *call, nccl_comm callers, cot_status status)
{
    const nccl_state *s = group->state;
    char message[512];
    int device = 0;
    cot_error_copy(message, sizeof message);
    const nccl_result result = s->ncclCommCuDevice(callers, &device);
    if (result != NCCL_SUCCESS)
        return nccl_error(group, result);
    CHECK(cot_gpu_open(call, NULL, device, &group->gpu));
    CHECK(cot_gpu_push(group->gpu));
    cot_status connected = take_memory(group, call);
    if (connected == COT_OK)
        connected = duplicate(group, callers);
    cot_gpu_leave(group->gpu);
    CHECK(connected);
    if (status != COT_OK)
        cot_error_set(status, message);
    return cot_group_agree_on_options(group, call, status);
}

cot_status cot_group_create_nccl(const void *comm, const cot_group_options *options, cot_group **out)
{
    static const char call[] = "cot_group_create_nccl";
    nccl_comm callers;
    int rank = 0, size = 0;
    if (out == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: out is null", call);
    *out = NULL;
    if (comm == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: comm is null, expected a pointer to an ncclComm_t", call);
    memcpy(&callers, comm, sizeof callers);
    if (callers == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: comm points to a null ncclComm_t", call);
    nccl_state *s = calloc(1, sizeof *s);
    if (s == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for a group", call);
    cot_status status = open_library(call, s);
    if (status == COT_OK && (s->ncclCommCount(callers, &size) != NCCL_SUCCESS ||
                             s->ncclCommUserRank(callers, &rank) != NCCL_SUCCESS || size < 1))
        status = cot_fail(COT_INVALID_ARGUMENT, "%s: comm is no communicator that NCCL accepts", call);
    cot_group *group = status == COT_OK ? cot_group_make(&engine, rank, size, 0) : NULL;
    if (group == NULL) {
        if (s->library != NULL)
            dlclose(s->library);
        free(s);
        return status != COT_OK ? status
                                : cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for a group of %d ranks", call, size);
    }
    group->state = s;
    status = connect(group, call, callers, cot_group_read_options(call, options, &group->timeout));
    if (status != COT_OK) {
        cot_group_destroy(group);
        return status;
    }
    *out = group;
    return COT_OK;
}
