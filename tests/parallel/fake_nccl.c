/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_nccl.c: a libnccl.so.2 whose ranks are threads of one process, for the emulator's device memory. Work that NCCL
 * would enqueue runs at once: ncclGroupEnd returns when all messages of the group have been copied. Where NCCL's kernels
 * would wait for ever, it gives up after a while. From then on the thread's events never happen (fake_cuda.c), until
 * ncclCommAbort.
 *
 *   FAKE_NCCL=old          version 2.17
 *   FAKE_NCCL=remote       where a rank does not come, ncclCommGetAsyncError reports an error
 *   FAKE_NCCL_PATIENCE=N   gives up after N milliseconds instead of 60000
 *
 * FAKE_NCCL_WITHOUT_SPLIT: the library lacks ncclCommSplit. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    SUCCESS = 0,
    REMOTE_ERROR = 6,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    BYTE = 1,
    MAX_RANKS = 16,
    MAX_OPS = 256
};

typedef int ncclResult_t;

/* A message. It is posted by the sender, and taken by the receiver. */
typedef struct op {
    const void *from;
    void *to;
    size_t count;
    int source, target, gather, receives, done;
    struct op *next;
} op;

typedef struct world {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int size, arrived;
    int id; /* of ncclGetUniqueId */
    struct world *older;
    struct world *child; /* of a split in progress */
    op *posted, **end;
} world;

typedef struct ncclComm {
    world *w;
    int rank, device, stalled;
    ncclResult_t error;
} * ncclComm_t;

/* The messages of a thread's group. */
static _Thread_local struct {
    int depth, count;
    ncclComm_t comm;
    op ops[MAX_OPS];
} group;

static int fake_is(const char *what)
{
    const char *wanted = getenv("FAKE_NCCL");
    return wanted != NULL && strcmp(wanted, what) == 0;
}

static void stall_events(int stalled)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int *flag = driver != NULL ? dlsym(driver, "fake_cuda_stalled") : NULL;
    if (flag != NULL)
        *flag = stalled;
    if (driver != NULL)
        dlclose(driver);
}

static struct timespec deadline(void)
{
    const char *patience = getenv("FAKE_NCCL_PATIENCE");
    const long milliseconds = patience != NULL ? atol(patience) : 60000;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec += milliseconds / 1000;
    t.tv_nsec += milliseconds % 1000 * 1000000;
    if (t.tv_nsec >= 1000000000)
        t.tv_sec++, t.tv_nsec -= 1000000000;
    return t;
}

static world *make_world(int size)
{
    world *w = calloc(1, sizeof *w);
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->changed, NULL);
    w->size = size;
    w->end = &w->posted;
    return w;
}

/* ---- communicators ------------------------------------------------------------------------------------------------ */

ncclResult_t ncclGetVersion(int *version)
{
    *version = fake_is("old") ? 21700 : 22300;
    return SUCCESS;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    return result == REMOTE_ERROR ? "remote process exited or there was a network error" : "another error";
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices)
{
    world *w = make_world(count);
    for (int r = 0; r < count; r++) {
        comms[r] = calloc(1, sizeof *comms[r]);
        *comms[r] = (struct ncclComm){.w = w, .rank = r, .device = devices != NULL ? devices[r] : r};
    }
    return count <= MAX_RANKS ? SUCCESS : INVALID_ARGUMENT;
}

typedef struct {
    char internal[128];
} ncclUniqueId;

static pthread_mutex_t worlds_mutex = PTHREAD_MUTEX_INITIALIZER;
static world *worlds; /* of ncclCommInitRank */
static int ids;

ncclResult_t ncclGetUniqueId(ncclUniqueId *unique)
{
    memset(unique, 0, sizeof *unique);
    pthread_mutex_lock(&worlds_mutex);
    const int id = ++ids;
    pthread_mutex_unlock(&worlds_mutex);
    memcpy(unique->internal, &id, sizeof id);
    return SUCCESS;
}

/* Does not wait for the other ranks. */
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int count, ncclUniqueId unique, int rank)
{
    int id;
    memcpy(&id, unique.internal, sizeof id);
    pthread_mutex_lock(&worlds_mutex);
    world *w = worlds;
    while (w != NULL && w->id != id)
        w = w->older;
    if (w == NULL) {
        w = make_world(count);
        w->id = id, w->older = worlds;
        worlds = w;
    }
    pthread_mutex_unlock(&worlds_mutex);
    *comm = calloc(1, sizeof **comm);
    **comm = (struct ncclComm){.w = w, .rank = rank};
    return rank < count && w->size == count ? SUCCESS : INVALID_ARGUMENT;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *count)
{
    *count = comm->w->size;
    return SUCCESS;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank)
{
    *rank = comm->rank;
    return SUCCESS;
}

ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device)
{
    *device = comm->device;
    return SUCCESS;
}

#ifndef FAKE_NCCL_WITHOUT_SPLIT
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *created, void *config)
{
    world *w = comm->w;
    (void)color, (void)key, (void)config;
    pthread_mutex_lock(&w->mutex);
    if (w->child == NULL)
        w->child = make_world(w->size);
    world *child = w->child;
    if (++w->arrived == w->size) {
        w->arrived = 0;
        w->child = NULL;
        pthread_cond_broadcast(&w->changed);
    }
    while (w->child == child)
        pthread_cond_wait(&w->changed, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
    *created = calloc(1, sizeof **created);
    **created = (struct ncclComm){.w = child, .rank = comm->rank, .device = comm->device};
    return SUCCESS;
}
#endif

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    *error = comm->error;
    return SUCCESS;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    (void)comm;
    return SUCCESS;
}

/* The worlds are not freed: other ranks may use them. */
ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    free(comm);
    return SUCCESS;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    if (comm->stalled)
        stall_events(0);
    return ncclCommDestroy(comm);
}

/* ---- messages ----------------------------------------------------------------------------------------------------- */

static void post(world *w, op *o)
{
    o->next = NULL;
    *w->end = o;
    w->end = &o->next;
}

static void take_back(world *w, const op *o)
{
    for (op **link = &w->posted; *link != NULL; link = &(*link)->next)
        if (*link == o) {
            *link = o->next;
            if (*link == NULL)
                w->end = link;
            return;
        }
}

/* Copies the oldest message for a receive. Returns whether there was one. */
static int receive(world *w, op *o, ncclResult_t *result)
{
    for (op *p = w->posted; p != NULL; p = p->next) {
        if (p->source != o->source || p->target != o->target || p->gather != o->gather)
            continue;
        if (p->count != o->count) {
            fprintf(stderr, "fake nccl: rank %d sends %zu bytes, rank %d receives %zu\n", o->source, p->count,
                    o->target, o->count);
            *result = INVALID_USAGE;
        } else {
            memcpy(o->to, p->from, o->count);
        }
        take_back(w, p);
        p->done = o->done = 1;
        return 1;
    }
    return 0;
}

/* Whether all messages are done. Copies those that have arrived. */
static int progress(world *w, op *ops, int count, ncclResult_t *result)
{
    int all = 1, changed = 0;
    for (int i = 0; i < count; i++) {
        if (ops[i].receives && !ops[i].done)
            changed = receive(w, &ops[i], result) || changed;
        all = all && ops[i].done;
    }
    if (changed)
        pthread_cond_broadcast(&w->changed);
    return all;
}

static ncclResult_t run(ncclComm_t comm, op *ops, int count)
{
    world *w = comm->w;
    const struct timespec until = deadline();
    ncclResult_t result = SUCCESS;
    if (comm->stalled) /* the stream does not come that far */
        return SUCCESS;
    pthread_mutex_lock(&w->mutex);
    for (int i = 0; i < count; i++)
        if (!ops[i].receives)
            post(w, &ops[i]);
    pthread_cond_broadcast(&w->changed);
    while (!progress(w, ops, count, &result))
        if (pthread_cond_timedwait(&w->changed, &w->mutex, &until) != 0) {
            comm->stalled = 1;
            break;
        }
    for (int i = 0; i < count && comm->stalled; i++)
        if (!ops[i].receives && !ops[i].done)
            take_back(w, &ops[i]);
    pthread_mutex_unlock(&w->mutex);
    if (comm->stalled && fake_is("remote"))
        comm->error = REMOTE_ERROR;
    if (comm->stalled)
        stall_events(1);
    return result;
}

ncclResult_t ncclGroupStart(void)
{
    group.depth++;
    return SUCCESS;
}

ncclResult_t ncclGroupEnd(void)
{
    if (--group.depth > 0 || group.count == 0)
        return SUCCESS;
    const int count = group.count;
    group.count = 0;
    return run(group.comm, group.ops, count);
}

static ncclResult_t add(ncclComm_t comm, op o, int type)
{
    if (type != BYTE || group.count == MAX_OPS || o.source == o.target)
        return INVALID_ARGUMENT;
    ncclGroupStart();
    group.comm = comm;
    group.ops[group.count++] = o;
    return ncclGroupEnd();
}

ncclResult_t ncclSend(const void *data, size_t count, int type, int peer, ncclComm_t comm, void *stream)
{
    (void)stream;
    return add(comm, (op){.from = data, .count = count, .source = comm->rank, .target = peer}, type);
}

ncclResult_t ncclRecv(void *data, size_t count, int type, int peer, ncclComm_t comm, void *stream)
{
    (void)stream;
    return add(comm, (op){.to = data, .count = count, .source = peer, .target = comm->rank, .receives = 1}, type);
}

ncclResult_t ncclAllGather(const void *data, void *all, size_t count, int type, ncclComm_t comm, void *stream)
{
    op ops[2 * MAX_RANKS];
    int n = 0;
    (void)stream;
    if (type != BYTE)
        return INVALID_ARGUMENT;
    for (int r = 0; r < comm->w->size; r++) {
        char *const place = (char *)all + (size_t)r * count;
        if (r == comm->rank) {
            memcpy(place, data, count);
            continue;
        }
        ops[n++] = (op){.from = data, .count = count, .source = comm->rank, .target = r, .gather = 1};
        ops[n++] = (op){.to = place, .count = count, .source = r, .target = comm->rank, .gather = 1, .receives = 1};
    }
    return run(comm, ops, n);
}
