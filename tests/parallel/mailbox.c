/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/mailbox.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct message {
    int from, to, tag;
    size_t bytes;
    struct message *next;
    char data[];
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

static char a_send;

static cot_status start(void *memory, int32_t receives, int32_t peer, int32_t tag, void *data, size_t bytes,
                        void **transfer)
{
    context *c = memory;
    office *o = c->shared;
    if (++c->starts == c->fault.start)
        return cot_error_set(COT_PEER_ERROR, "no cable");
    if (receives) {
        receive *r = malloc(sizeof *r);
        *r = (receive){peer, tag, data, bytes, c->receives};
        c->receives = r;
        *transfer = r;
        return COT_OK;
    }
    message *m = malloc(sizeof *m + bytes), **link = &o->messages;
    *m = (message){.from = c->rank, .to = peer, .tag = tag, .bytes = bytes};
    memcpy(m->data, data, bytes);
    pthread_mutex_lock(&o->mutex);
    while (*link != NULL)
        link = &(*link)->next;
    *link = m;
    pthread_cond_broadcast(&o->changed);
    pthread_mutex_unlock(&o->mutex);
    *transfer = &a_send;
    return COT_OK;
}

/* Takes the oldest message for a receive. The mutex is held. */
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

static void forget(context *c, receive *r)
{
    receive **link = &c->receives;
    while (*link != r)
        link = &(*link)->next;
    *link = r->next;
    free(r);
}

static cot_status wait(void *memory, void *transfer, double timeout)
{
    context *c = memory;
    office *o = c->shared;
    struct timespec deadline;
    int waited = 0;
    message *m = NULL;
    if (++c->waits == c->fault.wait)
        return cot_error_set(COT_PEER_ERROR, "the cable broke");
    if (transfer == &a_send)
        return COT_OK;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += (time_t)timeout;
    pthread_mutex_lock(&o->mutex);
    while (o->reason[0] == '\0' && (m = take(c, transfer)) == NULL && waited != ETIMEDOUT)
        waited = pthread_cond_timedwait(&o->changed, &o->mutex, &deadline);
    pthread_mutex_unlock(&o->mutex);
    if (m == NULL)
        return cot_error_set(COT_PEER_ERROR, o->reason[0] != '\0' ? o->reason : "time is up");
    const receive *r = transfer;
    const bool same = m->bytes == r->bytes;
    if (same)
        memcpy(r->data, m->data, m->bytes);
    free(m);
    forget(c, transfer);
    return same ? COT_OK : cot_error_set(COT_PEER_ERROR, "the message has another length");
}

static int32_t give_up(void *memory, const char *reason)
{
    context *c = memory;
    while (c->receives != NULL)
        forget(c, c->receives);
    pthread_mutex_lock(&c->shared->mutex);
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
