/* SPDX-License-Identifier: Apache-2.0 */
#include "streams.h"

#include <stdint.h>
#include <stdlib.h>

enum { MAX_STREAMS = 1024 };

typedef struct operation {
    stream_function *function; /* NULL: an event */
    void *parameters;
    stream_record *recorded, *awaited; /* of an event: one of the two */
    struct operation *next;
} operation;

typedef struct stream {
    CUstream handle;
    operation *first, **last;
    bool executing;
} stream;

struct stream_record {
    stream *of;
    bool happened;
    int users; /* the event and the operations that refer to it */
};

static stream streams[MAX_STREAMS];
static int stream_count;
static CUresult failure = CUDA_SUCCESS;

bool streams_are_late(void)
{
    return getenv("EMU_STREAMS") != NULL;
}

static stream *find(CUstream handle)
{
    for (int n = 0; n < stream_count; n++)
        if (streams[n].handle == handle)
            return &streams[n];
    if (stream_count == MAX_STREAMS)
        abort();
    stream *made = &streams[stream_count++];
    *made = (stream){.handle = handle};
    made->last = &made->first;
    return made;
}

void streams_forget(stream_record *record)
{
    if (record != NULL && --record->users == 0)
        free(record);
}

static void keep(CUresult result)
{
    if (failure == CUDA_SUCCESS)
        failure = result;
}

static void execute_until(stream *s, const stream_record *end);

/* Executes the first operation. */
static void execute(stream *s)
{
    operation *o = s->first;
    s->first = o->next;
    if (s->first == NULL)
        s->last = &s->first;
    s->executing = true;
    if (o->function != NULL) {
        keep(o->function(o->parameters, failure == CUDA_SUCCESS));
    } else if (o->recorded != NULL) {
        o->recorded->happened = true;
        streams_forget(o->recorded);
    } else {
        execute_until(o->awaited->of, o->awaited);
        streams_forget(o->awaited);
    }
    s->executing = false;
    free(o);
}

/* Executes operations until the event has happened, or all of them. An event that a stream waits for was recorded before
 * the wait was enqueued, so streams cannot wait for each other in a circle. */
static void execute_until(stream *s, const stream_record *end)
{
    while (s->first != NULL && (end == NULL || !end->happened))
        execute(s);
}

/* A linear congruential generator: whether and where to execute early. */
static unsigned draw(unsigned below)
{
    static uint64_t state;
    if (state == 0)
        state = (uint64_t)atoll(getenv("EMU_STREAMS"));
    if (state == 0)
        return 0;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(state >> 33) % below;
}

static void execute_early(void)
{
    if (draw(3) != 1)
        return;
    stream *s = &streams[draw((unsigned)stream_count)];
    for (unsigned n = draw(8); n > 0 && s->first != NULL && !s->executing; n--)
        execute(s);
}

static CUresult add(stream *s, operation values)
{
    operation *o = malloc(sizeof *o);
    if (o == NULL)
        abort();
    *o = values;
    *s->last = o;
    s->last = &o->next;
    execute_early();
    return failure;
}

CUresult streams_enqueue(CUstream handle, stream_function *function, void *parameters)
{
    if (!streams_are_late())
        return function(parameters, true);
    return add(find(handle), (operation){.function = function, .parameters = parameters});
}

CUresult streams_finish(CUstream handle)
{
    execute_until(find(handle), NULL);
    return failure;
}

CUresult streams_finish_all(void)
{
    for (int n = 0; n < stream_count; n++)
        execute_until(&streams[n], NULL);
    return failure;
}

stream_record *streams_record(CUstream handle)
{
    stream_record *r = calloc(1, sizeof *r);
    if (r == NULL)
        abort();
    if (!streams_are_late()) {
        *r = (stream_record){.happened = true, .users = 1};
        return r;
    }
    *r = (stream_record){.of = find(handle), .users = 2};
    add(r->of, (operation){.recorded = r});
    return r;
}

CUresult streams_await(CUstream handle, stream_record *record)
{
    if (record == NULL || record->happened)
        return failure;
    record->users++;
    return add(find(handle), (operation){.awaited = record});
}

CUresult streams_finish_record(stream_record *record)
{
    if (record != NULL && !record->happened)
        execute_until(record->of, record);
    return failure;
}

bool streams_poll(stream_record *record)
{
    if (record == NULL || record->happened)
        return true;
    if (record->of->first != NULL)
        execute(record->of);
    return record->happened;
}
