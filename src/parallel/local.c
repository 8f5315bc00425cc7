/* SPDX-License-Identifier: Apache-2.0
 *
 * local.c: the engine whose ranks are threads of one process. A sender posts its transfer at the receiver, and the
 * receiver copies the data from the sender's memory. So a message is copied once, and the sender's memory must stay
 * unchanged until the transfer is done. One mutex protects all lists; data is copied without it.
 *
 * On GPUs the receiver enqueues the copy on its side stream. Before the copy, this stream waits for the `ready` events
 * of both sides. After it, it records both `complete` events, for which the two queues' streams wait. If the ranks have
 * GPUs of their own, a copy engine of the receiver reads the sender's memory over NVLink or PCIe: no multiprocessor
 * takes part, unlike in NCCL's transfers.
 *
 * Ranks of one GPU, and ranks with CPU queues, can also lend memory to each other. A borrow is done when the lend is
 * posted, and stays in the list of the borrower's transfers until it is returned. */
#include "group.h"

#include "core/argument_checks.h"
#include "core/status.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_LOCAL_RANKS = 1024 };

/* The state that all handles share. */
typedef struct hub {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    cot_agreement *agreements[2]; /* for each rank, in even and in odd rounds */
    int64_t round;                /* the exchanges of agreements that are complete */
    bool *arrived;                /* for each rank: it has an agreement in this round */
    int arrived_count;
    int handles; /* not yet destroyed */
    bool broken;
    char reason[COT_MAX_REASON];
    bool *left;            /* for each rank: its handle is destroyed */
    cot_transfer **posted; /* for each rank: the sends to it that it has not copied, oldest first */
    const cot_gpu **gpus;  /* for each rank: its GPU, from the agreement of its first call on a CUDA queue on */
    const void **contexts; /* their CUDA contexts, also of ranks that have left */
} hub;

/* The oldest send that matches a receive. Takes it out of the list. */
static cot_transfer *match_send(hub *h, int receiver, const cot_transfer *receive)
{
    for (cot_transfer **link = &h->posted[receiver]; *link != NULL; link = &(*link)->next_in_queue) {
        cot_transfer *send = *link;
        if ((int)send->request[0] == receive->peer && send->tag == receive->tag) {
            *link = send->next_in_queue;
            return send;
        }
    }
    return NULL;
}

/* Starts a borrow whose lend has been found. The mutex is held. */
static cot_status begin_borrow(cot_group *group, cot_transfer *borrow, cot_transfer *lend)
{
    if (borrow->on_device)
        CHECK(cot_gpu_await(group->gpu, COT_MAIN_STREAM, lend->ready));
    borrow->data = lend->data;
    borrow->lender = lend;
    borrow->done = lend->copying = true;
    return COT_OK;
}

/* Ends a borrow. The lender's queue waits for the work of this rank until here. The mutex is held. */
static cot_status end_borrow(cot_group *group, cot_transfer *borrow)
{
    hub *h = group->state;
    cot_transfer *lend = borrow->lender;
    const cot_status status = borrow->on_device ? cot_gpu_record(group->gpu, COT_MAIN_STREAM, &lend->complete) : COT_OK;
    borrow->lender = NULL;
    lend->copying = false;
    lend->done = true;
    pthread_cond_broadcast(&h->changed);
    return status;
}

static cot_status copy_on_device(cot_group *group, const cot_gpu *peer, cot_transfer *receive, cot_transfer *send)
{
    cot_gpu *gpu = group->gpu;
    CHECK(cot_gpu_await(gpu, COT_SIDE_STREAM, send->ready));
    CHECK(cot_gpu_await(gpu, COT_SIDE_STREAM, receive->ready));
    CHECK(cot_gpu_mark_begin(gpu, COT_SIDE_STREAM));
    CHECK(cot_gpu_move_aside(gpu, peer, receive->data, send->data, receive->bytes));
    CHECK(cot_gpu_mark_end(gpu, COT_SIDE_STREAM));
    CHECK(cot_gpu_record(gpu, COT_SIDE_STREAM, &receive->complete));
    return cot_gpu_record(gpu, COT_SIDE_STREAM, &send->complete);
}

/* Copies the data of a send, without the mutex, which is held on entry and on return. */
static cot_status copy(cot_group *group, cot_transfer *receive, cot_transfer *send)
{
    hub *h = group->state;
    cot_status status = COT_OK;
    send->copying = true;
    const cot_gpu *const peer = h->gpus[receive->peer];
    pthread_mutex_unlock(&h->mutex);
    if (receive->on_device)
        status = copy_on_device(group, peer, receive, send);
    else
        memcpy(receive->data, send->data, receive->bytes < send->bytes ? receive->bytes : send->bytes);
    pthread_mutex_lock(&h->mutex);
    send->copying = false;
    return status;
}

static void break_hub(hub *h, const char *reason);

/* Whether a receive of the same message, which was started before, has not got its send. The list begins with the newest
 * transfer. */
static bool is_after_another(const cot_transfer *receive)
{
    for (const cot_transfer *t = receive->next; t != NULL; t = t->next)
        if (t->receive && !t->done && t->peer == receive->peer && t->tag == receive->tag)
            return true;
    return false;
}

/* Serves a receive if its send is posted: copies the data, or begins a borrow. The mutex is held on entry and on return. */
static bool progress(cot_group *group, cot_transfer *receive)
{
    hub *h = group->state;
    cot_transfer *send = is_after_another(receive) ? NULL : match_send(h, group->rank, receive);
    if (send == NULL)
        return false;
    const cot_status status = receive->lends ? begin_borrow(group, receive, send) : copy(group, receive, send);
    if (status != COT_OK) { /* both transfers stay open, so that both ranks see the fault */
        char reason[COT_MAX_REASON];
        snprintf(reason, sizeof reason, "rank %d: %.280s", group->rank, cot_error_message());
        break_hub(h, reason);
        return false;
    }
    if (receive->lends)
        return true;
    send->done = true; /* the sender removes it from its own list */
    cot_group_finished(group, receive);
    pthread_cond_broadcast(&h->changed);
    return true;
}

/* The host waits for a copy that is enqueued: another rank's copy may read this rank's memory. */
static void await_copy(cot_group *group, const cot_transfer *t)
{
    if (t->on_device && t->complete != NULL)
        cot_gpu_synchronize(group->gpu, t->complete);
}

static void drop_events(cot_group *group, cot_transfer *t)
{
    if (t->on_device) {
        cot_gpu_drop(group->gpu, &t->ready);
        cot_gpu_drop(group->gpu, &t->complete);
    }
}

/* Cancels the transfers of this rank, so that no other rank touches its memory. Before it waits for another rank, it
 * returns what it has borrowed. The mutex is held. */
static void cancel_transfers(cot_group *group)
{
    hub *h = group->state;
    for (cot_transfer *t = group->transfers; t != NULL; t = t->next)
        if (t->lender != NULL)
            end_borrow(group, t);
    for (cot_transfer *t = group->transfers; t != NULL; t = t->next) {
        for (cot_transfer **link = &h->posted[t->peer]; !t->receive && *link != NULL; link = &(*link)->next_in_queue)
            if (*link == t) {
                *link = t->next_in_queue;
                break;
            }
        while (t->copying)
            pthread_cond_wait(&h->changed, &h->mutex);
        await_copy(group, t);
        drop_events(group, t);
    }
    group->transfers = NULL;
}

/* Breaks the group for all ranks. The mutex is held. */
static void break_hub(hub *h, const char *reason)
{
    if (!h->broken)
        snprintf(h->reason, sizeof h->reason, "%s", reason);
    h->broken = true;
    pthread_cond_broadcast(&h->changed);
}

static cot_status local_start(cot_group *group, cot_transfer *transfer)
{
    hub *h = group->state;
    if (transfer->on_device && !(transfer->lends && transfer->receive))
        CHECK(cot_gpu_record(group->gpu, COT_MAIN_STREAM, &transfer->ready));
    pthread_mutex_lock(&h->mutex);
    if (transfer->receive) {
        progress(group, transfer);
    } else {
        transfer->request[0] = (uint64_t)group->rank;
        cot_transfer **link = &h->posted[transfer->peer];
        while (*link != NULL)
            link = &(*link)->next_in_queue;
        transfer->next_in_queue = NULL;
        *link = transfer;
        pthread_cond_broadcast(&h->changed);
    }
    pthread_mutex_unlock(&h->mutex);
    return COT_OK;
}

/* Moves all receives of this rank on, also those that are not waited for: their senders may wait. Returns whether
 * there was any. */
static bool progress_all(cot_group *group)
{
    for (cot_transfer *t = group->transfers; t != NULL; t = t->next)
        if (t->receive && !t->done && progress(group, t))
            return true; /* the list has changed */
    return false;
}

/* Returns the first transfer that is not done, or NULL. Removes done sends from the group's list. */
static cot_transfer *first_pending(cot_group *group, cot_transfer *transfers, int count)
{
    cot_transfer *pending = NULL;
    for (int i = 0; i < count; i++) {
        cot_transfer *t = &transfers[i];
        if (!t->started)
            continue;
        if (t->done && !t->receive)
            cot_group_finished(group, t);
        else if (!t->done && pending == NULL)
            pending = t;
    }
    return pending;
}

static struct timespec time_of(double seconds)
{
    const double whole = floor(seconds);
    return (struct timespec){(time_t)whole, (long)(1e9 * (seconds - whole))};
}

/* Sleeps until something changes. Breaks the hub at the deadline. */
static void sleep_until(cot_group *group, const cot_transfer *pending, double deadline)
{
    hub *h = group->state;
    const struct timespec until = time_of(deadline);
    if (pthread_cond_timedwait(&h->changed, &h->mutex, &until) != ETIMEDOUT || h->broken || pending->done ||
        pending->copying)
        return;
    char reason[COT_MAX_REASON];
    snprintf(reason, sizeof reason, "rank %d waited %g seconds for rank %d", group->rank, group->timeout,
             pending->peer);
    break_hub(h, reason);
}

static cot_status local_wait(cot_group *group, cot_transfer *transfers, int count)
{
    hub *h = group->state;
    cot_transfer *pending;
    double deadline = cot_seconds() + group->timeout;
    int waits_for = -1;
    pthread_mutex_lock(&h->mutex);
    while ((pending = first_pending(group, transfers, count)) != NULL && !h->broken) {
        if (progress_all(group) || pending->peer != waits_for) { /* progress: the time begins anew */
            deadline = cot_seconds() + group->timeout;
            waits_for = pending->peer;
            continue;
        }
        if (h->left[pending->peer] && !pending->copying) {
            char reason[COT_MAX_REASON];
            snprintf(reason, sizeof reason, "rank %d has left the group", pending->peer);
            break_hub(h, reason);
            continue;
        }
        if (pending->copying) /* progress */
            deadline = cot_seconds() + group->timeout;
        sleep_until(group, pending, deadline);
    }
    const bool failed = pending != NULL;
    if (failed) {
        cancel_transfers(group);
        group->broken = true;
        snprintf(group->reason, sizeof group->reason, "%s", h->reason);
    }
    pthread_mutex_unlock(&h->mutex);
    if (failed)
        return cot_fail(COT_PEER_ERROR, "the group is broken: %s", group->reason);
    cot_status status = group->on_device ? cot_gpu_mark_begin(group->gpu, COT_MAIN_STREAM) : COT_OK;
    for (int i = 0; i < count; i++) {
        cot_transfer *t = &transfers[i];
        if (status == COT_OK && t->complete != NULL) /* once: no event is left after the first wait */
            status = cot_gpu_await(group->gpu, COT_MAIN_STREAM, t->complete);
        drop_events(group, t);
    }
    if (status == COT_OK && group->on_device)
        status = cot_gpu_mark_end(group->gpu, COT_MAIN_STREAM);
    return status;
}

/* Ranks with CPU queues do, and ranks whose queues have one CUDA context. */
static bool local_shares_memory(cot_group *group)
{
    hub *h = group->state;
    bool shared = true;
    pthread_mutex_lock(&h->mutex);
    for (int r = 0; r < group->size && group->on_device; r++)
        shared = shared && h->contexts[r] == cot_gpu_context(group->gpu);
    pthread_mutex_unlock(&h->mutex);
    return shared;
}

static cot_status local_give_back(cot_group *group, cot_transfer *borrow)
{
    hub *h = group->state;
    pthread_mutex_lock(&h->mutex);
    const cot_status status = end_borrow(group, borrow);
    cot_group_finished(group, borrow);
    pthread_mutex_unlock(&h->mutex);
    return status;
}

/* The first rank without an agreement in this round. */
static int missing_rank(const hub *h)
{
    int r = 0;
    while (h->arrived[r])
        r++;
    return r;
}

/* Waits until the agreements of a round are complete. The mutex is held. */
static void await_round(cot_group *group, int64_t round)
{
    hub *h = group->state;
    double deadline = cot_seconds() + group->timeout;
    for (int count = h->arrived_count; h->round == round && !h->broken;) {
        char reason[COT_MAX_REASON];
        const int missing = missing_rank(h);
        const struct timespec until = time_of(deadline);
        if (h->arrived_count != count) { /* progress: the time begins anew */
            deadline = cot_seconds() + group->timeout;
            count = h->arrived_count;
        } else if (h->left[missing]) {
            snprintf(reason, sizeof reason, "rank %d has left the group", missing);
            break_hub(h, reason);
        } else if (pthread_cond_timedwait(&h->changed, &h->mutex, &until) == ETIMEDOUT && h->round == round &&
                   h->arrived_count == count) {
            snprintf(reason, sizeof reason, "rank %d waited %g seconds for rank %d", group->rank, group->timeout,
                     missing);
            break_hub(h, reason);
        }
    }
}

/* Agreements are copied through the hub. A rank that is a round ahead writes to the other half, and cannot be further
 * ahead. */
static cot_status local_gather(cot_group *group)
{
    hub *h = group->state;
    pthread_mutex_lock(&h->mutex);
    const int64_t round = h->round;
    cot_agreement *const all = h->agreements[round % 2];
    h->gpus[group->rank] = group->gpu;
    h->contexts[group->rank] = group->gpu != NULL ? cot_gpu_context(group->gpu) : NULL;
    all[group->rank] = group->agreement[group->rank];
    h->arrived[group->rank] = true;
    if (++h->arrived_count == group->size && !h->broken) {
        memset(h->arrived, 0, (size_t)group->size * sizeof *h->arrived);
        h->arrived_count = 0;
        h->round++;
        pthread_cond_broadcast(&h->changed);
    }
    await_round(group, round);
    const bool failed = h->round == round;
    if (failed) {
        group->broken = true;
        snprintf(group->reason, sizeof group->reason, "%s", h->reason);
    } else {
        memcpy(group->agreement, all, (size_t)group->size * sizeof *all);
    }
    pthread_mutex_unlock(&h->mutex);
    return failed ? cot_fail(COT_PEER_ERROR, "the group is broken: %s", group->reason) : COT_OK;
}

static void local_abort(cot_group *group)
{
    hub *h = group->state;
    pthread_mutex_lock(&h->mutex);
    break_hub(h, group->reason);
    cancel_transfers(group);
    pthread_mutex_unlock(&h->mutex);
}

static void free_hub(hub *h)
{
    pthread_mutex_destroy(&h->mutex);
    pthread_cond_destroy(&h->changed);
    free(h->left);
    free(h->posted);
    free(h->gpus);
    free(h->contexts);
    free(h->agreements[0]);
    free(h->agreements[1]);
    free(h->arrived);
    free(h);
}

static void local_destroy(cot_group *group)
{
    hub *h = group->state;
    pthread_mutex_lock(&h->mutex);
    cancel_transfers(group);
    h->left[group->rank] = true;
    const bool last = --h->handles == 0;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->mutex);
    if (last)
        free_hub(h);
}

static const cot_engine engine = {.name = "one of threads",
                                  .moves_host = true,
                                  .moves_device = true,
                                  .abort_stops_transfers = true,
                                  .shares_memory = local_shares_memory,
                                  .give_back = local_give_back,
                                  .start = local_start,
                                  .gather = local_gather,
                                  .wait = local_wait,
                                  .abort = local_abort,
                                  .destroy = local_destroy};

static hub *make_hub(int ranks)
{
    hub *h = calloc(1, sizeof *h);
    if (h == NULL)
        return NULL;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&h->mutex, NULL);
    pthread_cond_init(&h->changed, &clock);
    pthread_condattr_destroy(&clock);
    h->left = calloc((size_t)ranks, sizeof *h->left);
    h->posted = calloc((size_t)ranks, sizeof *h->posted);
    h->gpus = calloc((size_t)ranks, sizeof *h->gpus);
    h->contexts = calloc((size_t)ranks, sizeof *h->contexts);
    for (int n = 0; n < 2; n++)
        h->agreements[n] = calloc((size_t)ranks, sizeof *h->agreements[n]);
    h->arrived = calloc((size_t)ranks, sizeof *h->arrived);
    if (h->left != NULL && h->posted != NULL && h->gpus != NULL && h->contexts != NULL && h->agreements[0] != NULL &&
        h->agreements[1] != NULL && h->arrived != NULL)
        return h;
    free_hub(h);
    return NULL;
}

cot_status cot_group_create_local(int32_t ranks, const cot_group_options *options, cot_group **groups)
{
    static const char call[] = "cot_group_create_local";
    double timeout;
    if (ranks < 1 || ranks > MAX_LOCAL_RANKS)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: ranks is %d, expected 1 to %d", call, (int)ranks, MAX_LOCAL_RANKS);
    if (groups == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: groups is null", call);
    CHECK(cot_group_read_options(call, options, &timeout));
    hub *h = make_hub(ranks);
    int made = 0;
    for (; h != NULL && made < ranks; made++) {
        if ((groups[made] = cot_group_make(&engine, made, ranks, timeout)) == NULL)
            break;
        groups[made]->state = h;
    }
    if (made == ranks) {
        h->handles = ranks;
        return COT_OK;
    }
    while (made > 0)
        cot_group_free(groups[--made]);
    if (h != NULL)
        free_hub(h);
    return cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for a group of %d ranks", call, (int)ranks);
}
