/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/mailbox.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { EAGER_BYTES = 1024 };

/* A send that no receive has taken yet. */
typedef struct message {
    int from, to, tag;
    size_t bytes;
    const void *data; /* the sender's memory, or the copy */
    bool taken;       /* only of the sender's memory: the receiver has copied it */
    struct message *next;
    char copy[];
} message;

/* What the ranks of one group share. */
typedef struct office {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    message *messages; /* oldest first */
    char reason[256];  /* of an abort */
    int users;
} office;

typedef struct context {
    office *shared;
    int rank;
    mailbox_fault fault;
    int starts, waits;
    struct receive *receives;
} context;

typedef struct receive {
    int from, tag;
    void *data;
    size_t bytes;
    bool done, same_length;
    struct receive *next;
} receive;

static int contexts;
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;

int mailbox_contexts(void)
{
    return contexts;
}

static void count(int change)
{
    pthread_mutex_lock(&counting);
    contexts += change;
    pthread_mutex_unlock(&counting);
}

static bool is_eager(const message *m)
{
    return m->data == m->copy;
}

static char an_eager_send;

static cot_status start(void *memory, int32_t receives, int32_t peer, int32_t tag, void *data, size_t bytes,
                        void **transfer)
{
    context *c = memory;
    office *o = c->shared;
    if (++c->starts == c->fault.start)
        return cot_error_set(COT_PEER_ERROR, "no cable");
    if (receives) {
        receive *r = malloc(sizeof *r);
        *r = (receive){.from = peer, .tag = tag, .data = data, .bytes = bytes, .next = c->receives};
        c->receives = r;
        *transfer = r;
        return COT_OK;
    }
    const bool eager = bytes <= EAGER_BYTES;
    message *m = malloc(sizeof *m + (eager ? bytes : 0)), **link = &o->messages;
    *m = (message){.from = c->rank, .to = peer, .tag = tag, .bytes = bytes, .data = eager ? m->copy : data};
    if (eager)
        memcpy(m->copy, data, bytes);
    pthread_mutex_lock(&o->mutex);
    while (*link != NULL)
        link = &(*link)->next;
    *link = m;
    pthread_cond_broadcast(&o->changed);
    pthread_mutex_unlock(&o->mutex);
    *transfer = eager ? (void *)&an_eager_send : m;
    return COT_OK;
}

/* Takes the oldest message for a receive. The mutex is held, here and below. */
static message *take(const context *c, const receive *r)
{
    for (message **link = &c->shared->messages; *link != NULL; link = &(*link)->next) {
        message *m = *link;
        if (m->to == c->rank && m->from == r->from && m->tag == r->tag) {
            *link = m->next;
            return m;
        }
    }
    return NULL;
}

/* The oldest receive comes first: an earlier one with the same peer and tag takes the earlier message. */
static void move_on(const context *c, receive *r)
{
    if (r == NULL)
        return;
    move_on(c, r->next);
    message *m = r->done ? NULL : take(c, r);
    if (m == NULL)
        return;
    r->done = true;
    r->same_length = m->bytes == r->bytes;
    if (r->same_length)
        memcpy(r->data, m->data, m->bytes);
    m->taken = true;
    if (is_eager(m))
        free(m);
    pthread_cond_broadcast(&c->shared->changed);
}

static void forget(context *c, receive *r)
{
    receive **link = &c->receives;
    while (*link != r)
        link = &(*link)->next;
    *link = r->next;
    free(r);
}

static bool is_receive(const context *c, const void *transfer)
{
    const receive *r = c->receives;
    while (r != NULL && r != transfer)
        r = r->next;
    return r != NULL;
}

static bool is_done(bool receives, const void *transfer)
{
    return receives ? ((const receive *)transfer)->done : ((const message *)transfer)->taken;
}

/* Every wait moves all receives of the rank on: their senders may wait. */
static cot_status wait(void *memory, void *transfer, double timeout)
{
    context *c = memory;
    office *o = c->shared;
    struct timespec deadline;
    int waited = 0;
    if (++c->waits == c->fault.wait)
        return cot_error_set(COT_PEER_ERROR, "the cable broke");
    if (transfer == &an_eager_send)
        return COT_OK;
    const bool receives = is_receive(c, transfer);
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += (time_t)timeout;
    pthread_mutex_lock(&o->mutex);
    move_on(c, c->receives);
    while (!is_done(receives, transfer) && o->reason[0] == '\0' && waited != ETIMEDOUT) {
        waited = pthread_cond_timedwait(&o->changed, &o->mutex, &deadline);
        move_on(c, c->receives);
    }
    const bool done = is_done(receives, transfer);
    pthread_mutex_unlock(&o->mutex);
    if (!done)
        return cot_error_set(COT_PEER_ERROR, o->reason[0] != '\0' ? o->reason : "time is up");
    if (!receives) {
        free(transfer);
        return COT_OK;
    }
    const bool same = ((const receive *)transfer)->same_length;
    forget(c, transfer);
    return same ? COT_OK : cot_error_set(COT_PEER_ERROR, "the message has another length");
}

/* Takes back the messages whose data is memory of this rank. */
static int32_t give_up(void *memory, const char *reason)
{
    context *c = memory;
    pthread_mutex_lock(&c->shared->mutex);
    while (c->receives != NULL)
        forget(c, c->receives);
    for (message **link = &c->shared->messages; *link != NULL;) {
        message *m = *link;
        if (m->from == c->rank && !is_eager(m)) {
            *link = m->next;
            free(m);
        } else {
            link = &m->next;
        }
    }
    if (c->shared->reason[0] == '\0')
        snprintf(c->shared->reason, sizeof c->shared->reason, "%s", reason);
    pthread_cond_broadcast(&c->shared->changed);
    pthread_mutex_unlock(&c->shared->mutex);
    return 1;
}

static void destroy(void *memory)
{
    context *c = memory;
    office *o = c->shared;
    pthread_mutex_lock(&o->mutex);
    const bool last = --o->users == 0;
    pthread_mutex_unlock(&o->mutex);
    while (last && o->messages != NULL) {
        message *m = o->messages;
        o->messages = m->next;
        free(m);
    }
    if (last) {
        pthread_mutex_destroy(&o->mutex);
        pthread_cond_destroy(&o->changed);
        free(o);
    }
    while (c->receives != NULL)
        forget(c, c->receives);
    free(c);
    count(-1);
}

typedef struct creation {
    context *c;
    int ranks;
    const cot_group_options *options;
    cot_group **group;
    cot_status status;
} creation;

static void *create(void *memory)
{
    creation *n = memory;
    cot_group_callbacks callbacks;
    COT_INIT(&callbacks);
    callbacks.context = n->c;
    callbacks.start = start, callbacks.wait = wait, callbacks.abort = give_up, callbacks.destroy = destroy;
    const int rank = n->c->rank;
    n->status = cot_group_create_custom(&callbacks, rank, n->ranks, n->options, n->group);
    if (n->status != COT_OK)
        destroy(n->c);
    return NULL;
}

cot_status mailbox_groups(int ranks, const cot_group_options *options, const mailbox_fault *fault, cot_group **groups,
                          cot_status *statuses)
{
    office *o = calloc(1, sizeof *o);
    creation *all = calloc((size_t)ranks, sizeof *all);
    pthread_t *threads = calloc((size_t)ranks, sizeof *threads);
    cot_status first = COT_OK;
    pthread_mutex_init(&o->mutex, NULL);
    pthread_cond_init(&o->changed, NULL);
    o->users = ranks;
    for (int rank = 0; rank < ranks; rank++) {
        context *c = calloc(1, sizeof *c);
        *c = (context){.shared = o, .rank = rank};
        if (fault != NULL && fault->rank == rank)
            c->fault = *fault;
        count(1);
        all[rank] = (creation){c, ranks, options, &groups[rank], COT_OK};
    }
    for (int rank = 0; rank < ranks; rank++)
        pthread_create(&threads[rank], NULL, create, &all[rank]);
    for (int rank = 0; rank < ranks; rank++) {
        pthread_join(threads[rank], NULL);
        if (statuses != NULL)
            statuses[rank] = all[rank].status;
        first = first != COT_OK ? first : all[rank].status;
    }
    free(all);
    free(threads);
    return first;
}
