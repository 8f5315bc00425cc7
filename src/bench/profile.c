/* SPDX-License-Identifier: Apache-2.0 */
#include "profile.h"

#include "bench_device.h"
#include "ceiling.h"
#include "commit.h"
#include "core/queue.h"
#include "core/status.h"
#include "core/tensor.h"
#include "check/signature.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* A measurement is the median of SAMPLES calls. It stops after mode_seconds, but not before MIN_SAMPLES. */
static const double mode_seconds = 1.5;
enum { SAMPLES = 15, MIN_SAMPLES = 3, MAX_PIECES = 256, MAX_LAUNCHES = 32 };

/* Events of a piece. The copies to the device run from BEGIN to SENT, the kernels from KERNELS_BEGIN to KERNELS_END,
 * and the copies to the host from KERNELS_END to FETCHED. */
enum { EVENT_BEGIN, EVENT_SENT, EVENT_KERNELS_BEGIN, EVENT_KERNELS_END, EVENT_FETCHED, EVENT_COUNT };

typedef struct mode {
    unsigned memory, streams, batch;
} mode;

typedef struct breakdown {
    double total, allocation, to_device, kernels, to_host;
} breakdown;

typedef struct launches {
    cot_launch_info facts[MAX_LAUNCHES];
    int counts[MAX_LAUNCHES], count;
} launches;

/* Some items of the batch, which are one call. */
typedef struct piece {
    _Alignas(16) char args[COT_MAX_ARGS];
    void *events[EVENT_COUNT];
} piece;

typedef struct profile {
    const cot_op_cases *cases;
    const cot_case *c;
    const cot_direction *direction;
    bound_case bound;
    device_queue queues[2];
    const cot_device_calls *calls; /* of the queues */
    mode mode;
    uint32_t batch_mask; /* bit mask of the fields that are split into pieces */
    int64_t items;
    char *host[COT_MAX_FIELDS], *device[COT_MAX_FIELDS]; /* where each field's elements begin */
    void *workspace[2];
    size_t workspace_bytes;
    piece *pieces;
    int piece_count;
    void *shared_begin, *shared_sent, *shared_fetched; /* two streams: events around the copies of shared fields */
    double bytes_to_device, bytes_to_host, allocated_bytes;
    launches launches;
} profile;

/* ---- fields and their parts --------------------------------------------------------------------------- */

static cot_tensor *field_tensor(const profile *p, int f)
{
    return cot_field_tensor(&p->direction->fields[f], (void *)p->bound.args);
}

static cot_tensor *piece_tensor(const profile *p, int f, int number)
{
    return cot_field_tensor(&p->direction->fields[f], p->pieces[number].args);
}

static bool is_sent(const profile *p, int f)
{
    return cot_is_present(field_tensor(p, f)) &&
           field_has_initial_value(p->direction, &p->direction->fields[f], p->bound.args);
}

static bool is_fetched(const profile *p, int f)
{
    return cot_is_present(field_tensor(p, f)) && p->direction->fields[f].role != COT_INPUT;
}

static bool is_shared(const profile *p, int f)
{
    return (p->batch_mask >> f & 1) == 0;
}

/* Returns how many bytes the elements of a tensor span. *offset is where they begin, relative to the elements of the
 * whole field. */
static size_t span(const profile *p, int f, const cot_tensor *tensor, size_t *offset)
{
    const char *const data = field_tensor(p, f)->data;
    int64_t low, high, field_low, field_high;
    cot_extent(tensor, &low, &high);
    cot_extent(field_tensor(p, f), &field_low, &field_high);
    *offset = (size_t)((char *)tensor->data + low - (data + field_low));
    return (size_t)(high - low);
}

static size_t field_span(const profile *p, int f)
{
    size_t offset;
    return span(p, f, field_tensor(p, f), &offset);
}

/* How many bytes the field's elements begin after an aligned address. The copies in all memories keep this offset. */
static size_t alignment_offset(const profile *p, int f)
{
    int64_t low, high;
    cot_extent(field_tensor(p, f), &low, &high);
    return ((uintptr_t)field_tensor(p, f)->data + (uintptr_t)low) % COT_ALIGNMENT;
}

/* ---- memory ------------------------------------------------------------------------------------------- */

static void free_device(profile *p)
{
    for (int f = 0; f < p->direction->field_count; f++) {
        if (p->device[f] != NULL)
            p->calls->free(p->queues[0].queue, p->device[f] - alignment_offset(p, f));
        p->device[f] = NULL;
    }
    for (int s = 0; s < 2; s++) {
        p->calls->free(p->queues[0].queue, p->workspace[s]);
        p->workspace[s] = NULL;
    }
}

static cot_status allocate_device(profile *p)
{
    cot_status status = COT_OK;
    p->allocated_bytes = 0;
    for (int f = 0; status == COT_OK && f < p->direction->field_count; f++) {
        void *memory = NULL;
        if (!cot_is_present(field_tensor(p, f)))
            continue;
        const size_t bytes = alignment_offset(p, f) + field_span(p, f);
        status = p->calls->alloc(p->queues[0].queue, bytes, &memory);
        if (status == COT_OK)
            p->device[f] = (char *)memory + alignment_offset(p, f);
        p->allocated_bytes += (double)bytes;
    }
    for (unsigned s = 0; status == COT_OK && p->workspace_bytes > 0 && s < p->mode.streams; s++) {
        status = p->calls->alloc(p->queues[0].queue, p->workspace_bytes, &p->workspace[s]);
        p->allocated_bytes += (double)p->workspace_bytes;
    }
    return status;
}

static cot_status allocate_host(profile *p)
{
    for (int f = 0; f < p->direction->field_count; f++) {
        if (!cot_is_present(field_tensor(p, f)))
            continue;
        int64_t low, high;
        cot_extent(field_tensor(p, f), &low, &high);
        void *memory;
        const cot_status status = p->calls->alloc_host(p->queues[0].queue, (size_t)(high - low), &memory);
        if (status != COT_OK)
            return status;
        p->host[f] = memory;
        if (high > low)
            memcpy(memory, (char *)field_tensor(p, f)->data + low, (size_t)(high - low));
    }
    return COT_OK;
}

/* ---- pieces ------------------------------------------------------------------------------------------- */

/* Returns NULL, or why the batch of this call cannot be split. */
static const char *why_not_split(const profile *p)
{
    if (p->batch_mask == 0 || p->items < 2)
        return "it has no batch of two items or more";
    for (int f = 0; f < p->direction->field_count; f++) {
        const cot_field *field = &p->direction->fields[f];
        cot_tensor item = *field_tensor(p, f);
        if (!cot_is_present(&item))
            continue;
        if (is_shared(p, f)) {
            if (field->role == COT_INPUT_OUTPUT || (field->role == COT_OUTPUT && !field->accumulates))
                return "all items write one output, which cannot accumulate";
            continue;
        }
        int64_t low, high;
        item.shape[0] = 1;
        cot_extent(&item, &low, &high);
        if (llabs(item.stride[0]) * (int64_t)cot_dtype_size(item.dtype) < high - low)
            return "its items are interleaved in memory";
    }
    return NULL;
}

/* Makes the arguments of all pieces, with host addresses. call_piece replaces them by device addresses. */
static void split_batch(profile *p)
{
    const int32_t accumulate = 1;
    for (int n = 0; n < p->piece_count; n++) {
        const int64_t first = n * p->items / p->piece_count, end = (n + 1) * p->items / p->piece_count;
        memcpy(p->pieces[n].args, p->bound.args, sizeof p->pieces[n].args);
        for (int f = 0; p->piece_count > 1 && f < p->direction->field_count; f++) {
            cot_tensor *tensor = piece_tensor(p, f, n);
            if (!cot_is_present(tensor))
                continue;
            if (!is_shared(p, f)) {
                tensor->data =
                    (char *)tensor->data + first * tensor->stride[0] * (int64_t)cot_dtype_size(tensor->dtype);
                tensor->shape[0] = end - first;
            } else if (p->direction->fields[f].role == COT_OUTPUT && n > 0) {
                memcpy(p->pieces[n].args + p->direction->accumulate_offset, &accumulate, sizeof accumulate);
            }
        }
    }
}

/* Finds the largest workspace of the pieces. Fails if a piece's call would fail. */
static cot_status find_workspace(profile *p)
{
    p->workspace_bytes = 0;
    for (int n = 0; n < p->piece_count; n++) {
        size_t bytes = 0;
        const cot_status status = cot_op_workspace(p->direction, p->queues[0].queue, p->pieces[n].args, &bytes);
        if (status != COT_OK)
            return status;
        p->workspace_bytes = bytes > p->workspace_bytes ? bytes : p->workspace_bytes;
    }
    return COT_OK;
}

static cot_status call_piece(profile *p, int number, int stream)
{
    _Alignas(16) char args[COT_MAX_ARGS];
    memcpy(args, p->pieces[number].args, sizeof args);
    for (int f = 0; f < p->direction->field_count; f++) {
        cot_tensor *tensor = cot_field_tensor(&p->direction->fields[f], args);
        size_t offset;
        int64_t low, high;
        if (!cot_is_present(tensor))
            continue;
        span(p, f, tensor, &offset);
        cot_extent(tensor, &low, &high);
        tensor->data = p->device[f] + offset - low;
    }
    memcpy(args + p->direction->workspace_offset, &p->workspace[stream], sizeof p->workspace[stream]);
    const size_t bytes = p->workspace[stream] != NULL ? p->workspace_bytes : 0;
    memcpy(args + p->direction->workspace_bytes_offset, &bytes, sizeof bytes);
    return cot_op_run(p->direction, p->queues[stream].queue, args);
}

/* ---- a call ------------------------------------------------------------------------------------------- */

/* Copies fields to the device, or to the host: the piece's part of each field, or whole fields if number < 0. `shared`
 * includes fields that the pieces share, `per_piece` those that they do not share. */
static cot_status copy_fields(profile *p, int number, int stream, bool to_host, bool shared, bool per_piece)
{
    cot_queue *queue = p->queues[stream].queue;
    cot_status status = COT_OK;
    for (int f = 0; status == COT_OK && f < p->direction->field_count; f++) {
        if (!(to_host ? is_fetched(p, f) : is_sent(p, f)) || !(is_shared(p, f) ? shared : per_piece))
            continue;
        size_t offset;
        const size_t bytes = span(p, f, number < 0 ? field_tensor(p, f) : piece_tensor(p, f, number), &offset);
        status = to_host ? p->calls->copy_to_host_async(queue, p->host[f] + offset, p->device[f] + offset, bytes)
                         : p->calls->copy_to_device_async(queue, p->device[f] + offset, p->host[f] + offset, bytes);
        *(to_host ? &p->bytes_to_host : &p->bytes_to_device) += (double)bytes;
    }
    return status;
}

/* Makes the next call of a chain, unless a call before it failed. */
#define THEN(call) (status = status != COT_OK ? status : (call))

/* All copies to the device, then all kernels, then all copies to the host. */
static cot_status run_sequential(profile *p)
{
    cot_queue *queue = p->queues[0].queue;
    void **events = p->pieces[0].events;
    cot_status status = p->calls->event_record(queue, events[EVENT_BEGIN]);
    THEN(copy_fields(p, -1, 0, false, true, true));
    THEN(p->calls->event_record(queue, events[EVENT_SENT]));
    for (int n = 0; n < p->piece_count; n++)
        THEN(call_piece(p, n, 0));
    THEN(p->calls->event_record(queue, events[EVENT_KERNELS_END]));
    THEN(copy_fields(p, -1, 0, true, true, true));
    THEN(p->calls->event_record(queue, events[EVENT_FETCHED]));
    THEN(cot_queue_check(queue));
    return status;
}

/* The pieces alternate between two streams. While one piece computes, the next piece's inputs and the previous piece's
 * outputs are copied. Kernels wait for the previous piece's kernels if all pieces add to the same output. */
static cot_status enqueue_overlapped_piece(profile *p, int n, bool serialize_kernels)
{
    const int stream = n % 2;
    cot_queue *queue = p->queues[stream].queue;
    void **events = p->pieces[n].events;
    cot_status status = COT_OK;
    if (n == 1)
        THEN(p->calls->stream_wait_event(queue, p->shared_sent));
    THEN(p->calls->event_record(queue, events[EVENT_BEGIN]));
    THEN(copy_fields(p, n, stream, false, false, true));
    THEN(p->calls->event_record(queue, events[EVENT_SENT]));
    if (serialize_kernels && n > 0)
        THEN(p->calls->stream_wait_event(queue, p->pieces[n - 1].events[EVENT_KERNELS_END]));
    THEN(p->calls->event_record(queue, events[EVENT_KERNELS_BEGIN]));
    THEN(call_piece(p, n, stream));
    THEN(p->calls->event_record(queue, events[EVENT_KERNELS_END]));
    THEN(copy_fields(p, n, stream, true, false, true));
    THEN(p->calls->event_record(queue, events[EVENT_FETCHED]));
    return status;
}

static cot_status run_overlapped(profile *p)
{
    const int last = p->piece_count - 1;
    cot_queue *last_queue = p->queues[last % 2].queue;
    bool serialize_kernels = false;
    for (int f = 0; f < p->direction->field_count; f++)
        serialize_kernels = serialize_kernels || (is_shared(p, f) && is_fetched(p, f));
    cot_status status = p->calls->event_record(p->queues[0].queue, p->shared_begin);
    THEN(copy_fields(p, -1, 0, false, true, false));
    THEN(p->calls->event_record(p->queues[0].queue, p->shared_sent));
    for (int n = 0; n < p->piece_count; n++)
        THEN(enqueue_overlapped_piece(p, n, serialize_kernels));
    THEN(copy_fields(p, -1, last % 2, true, true, false));
    THEN(p->calls->event_record(last_queue, p->shared_fetched));
    THEN(cot_queue_check(p->queues[0].queue));
    THEN(cot_queue_check(p->queues[1].queue));
    return status;
}

static cot_status add_elapsed(profile *p, void *begin, void *end, double *sum)
{
    double seconds = 0;
    const cot_status status = p->calls->event_elapsed(p->queues[0].queue, begin, end, &seconds);
    *sum += seconds;
    return status;
}

/* Adds the times between the events of the last call. Called after the call's end, because reading events takes
 * time. */
static cot_status add_event_times(profile *p, breakdown *b)
{
    cot_status status = COT_OK;
    if (p->mode.streams == PROFILE_ONE_STREAM) {
        void **events = p->pieces[0].events;
        THEN(add_elapsed(p, events[EVENT_BEGIN], events[EVENT_SENT], &b->to_device));
        THEN(add_elapsed(p, events[EVENT_SENT], events[EVENT_KERNELS_END], &b->kernels));
        THEN(add_elapsed(p, events[EVENT_KERNELS_END], events[EVENT_FETCHED], &b->to_host));
        return status;
    }
    THEN(add_elapsed(p, p->shared_begin, p->shared_sent, &b->to_device));
    THEN(add_elapsed(p, p->pieces[p->piece_count - 1].events[EVENT_FETCHED], p->shared_fetched, &b->to_host));
    for (int n = 0; n < p->piece_count; n++) {
        void **events = p->pieces[n].events;
        THEN(add_elapsed(p, events[EVENT_BEGIN], events[EVENT_SENT], &b->to_device));
        THEN(add_elapsed(p, events[EVENT_KERNELS_BEGIN], events[EVENT_KERNELS_END], &b->kernels));
        THEN(add_elapsed(p, events[EVENT_KERNELS_END], events[EVENT_FETCHED], &b->to_host));
    }
    return status;
}

/* Measures one call, from host memory to host memory. */
static cot_status measure_call(profile *p, breakdown *b)
{
    *b = (breakdown){0};
    p->bytes_to_device = p->bytes_to_host = 0;
    cot_status status = COT_OK;
    const double begin = now();
    if (p->mode.memory == PROFILE_FRESH)
        status = allocate_device(p);
    b->allocation = now() - begin;
    THEN(p->mode.streams == PROFILE_TWO_STREAMS ? run_overlapped(p) : run_sequential(p));
    const double end = now();
    if (p->mode.memory == PROFILE_FRESH)
        free_device(p);
    b->total = now() - begin;
    b->allocation = p->mode.memory == PROFILE_FRESH ? b->allocation + now() - end : 0;
    THEN(add_event_times(p, b));
    return status;
}

/* ---- a mode ------------------------------------------------------------------------------------------- */

static void record_launch(void *context, const cot_launch_info *facts)
{
    launches *recorded = context;
    int i = 0;
    while (i < recorded->count && (strcmp(recorded->facts[i].name, facts->name) != 0 ||
                                   memcmp(recorded->facts[i].blocks, facts->blocks, sizeof facts->blocks) != 0))
        i++;
    if (i == MAX_LAUNCHES)
        return;
    if (i == recorded->count)
        recorded->facts[recorded->count++] = *facts;
    recorded->counts[i]++;
}

static void set_launch_observer(profile *p, void (*observer)(void *, const cot_launch_info *))
{
    for (int s = 0; s < 2; s++)
        p->calls->observe_launches(p->queues[s].queue, observer, &p->launches);
}

static double median_of(const breakdown *samples, int count, size_t member)
{
    double values[SAMPLES];
    for (int i = 0; i < count; i++)
        memcpy(&values[i], (const char *)&samples[i] + member, sizeof values[i]);
    return median(values, count);
}

static json_t *launches_as_json(const launches *recorded)
{
    json_t *list = json_array();
    for (int i = 0; i < recorded->count; i++) {
        const cot_launch_info *l = &recorded->facts[i];
        const double blocks = (double)l->blocks[0] * l->blocks[1] * l->blocks[2];
        const double resident = (double)l->blocks_per_multiprocessor * l->multiprocessors;
        json_array_append_new(
            list, json_pack("{s:s, s:f, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:i}", "name", l->name, "blocks",
                            blocks, "threads", (int)l->threads, "registers", l->registers, "local_bytes",
                            l->local_bytes, "static_shared", l->static_shared, "dynamic_shared", l->dynamic_shared,
                            "blocks_per_multiprocessor", l->blocks_per_multiprocessor, "occupancy", l->occupancy,
                            "waves", resident > 0 ? blocks / resident : 0.0, "count", recorded->counts[i]));
    }
    return list;
}

static json_t *make_row(const profile *p, const char *kernel, const breakdown *samples, int count)
{
    char device[160] = "", date[16];
    size_t cache;
    const time_t seconds = time(NULL);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&seconds));
    p->calls->describe(p->queues[0].queue, device, sizeof device, &cache);
    const cot_tensor *first = field_tensor(p, 0);
#define MEDIAN(member) 1e3 * median_of(samples, count, offsetof(breakdown, member))
    json_t *row = json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:s, s:i}", "op", p->cases->op->name,
                            "direction", p->direction->name, "kernel", kernel, "dtype", cot_dtype_name(first->dtype),
                            "layout", p->c->layout, "shape", p->c->shape, "options", p->c->options, "memory",
                            p->mode.memory == PROFILE_FRESH ? "fresh" : "pool", "streams", (int)p->mode.streams,
                            "batch", p->mode.batch == PROFILE_FUSED ? "fused" : "loop", "pieces", p->piece_count);
    json_t *figures =
        json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:o, s:s, s:s, s:s, s:s}", "total_ms", MEDIAN(total),
                  "allocation_ms", MEDIAN(allocation), "to_device_ms", MEDIAN(to_device), "kernels_ms", MEDIAN(kernels),
                  "to_host_ms", MEDIAN(to_host), "bytes_to_device", p->bytes_to_device, "bytes_to_host",
                  p->bytes_to_host, "allocated_bytes", p->allocated_bytes, "launches", launches_as_json(&p->launches),
                  "device", device, "date", date, "commit", COT_COMMIT, "version", cot_version());
#undef MEDIAN
    json_object_update(row, figures);
    json_decref(figures);
    return row;
}

static cot_status measure_samples(profile *p, const char *kernel, json_t *rows)
{
    breakdown samples[SAMPLES];
    int count = 0;
    p->launches.count = 0;
    memset(p->launches.counts, 0, sizeof p->launches.counts);
    cot_status status = p->mode.memory == PROFILE_POOL ? allocate_device(p) : COT_OK;
    set_launch_observer(p, record_launch);
    THEN(measure_call(p, &samples[0])); /* a warm-up: loads the device code */
    set_launch_observer(p, NULL);
    const double begin = now();
    while (status == COT_OK && count < SAMPLES && (count < MIN_SAMPLES || now() - begin < mode_seconds))
        status = measure_call(p, &samples[count++]);
    free_device(p);
    if (status == COT_OK)
        json_array_append_new(rows, make_row(p, kernel, samples, count));
    return status;
}

static void destroy_events(profile *p)
{
    for (int n = 0; n < p->piece_count; n++)
        for (int m = 0; m < EVENT_COUNT; m++)
            p->calls->event_destroy(p->queues[0].queue, p->pieces[n].events[m]);
    p->calls->event_destroy(p->queues[0].queue, p->shared_begin);
    p->calls->event_destroy(p->queues[0].queue, p->shared_sent);
    p->calls->event_destroy(p->queues[0].queue, p->shared_fetched);
    p->shared_begin = p->shared_sent = p->shared_fetched = NULL;
}

static cot_status create_events(profile *p)
{
    cot_status status = p->calls->event_create(p->queues[0].queue, &p->shared_begin);
    THEN(p->calls->event_create(p->queues[0].queue, &p->shared_sent));
    THEN(p->calls->event_create(p->queues[0].queue, &p->shared_fetched));
    for (int n = 0; n < p->piece_count; n++)
        for (int m = 0; m < EVENT_COUNT; m++)
            THEN(p->calls->event_create(p->queues[0].queue, &p->pieces[n].events[m]));
    return status;
}

static cot_status measure_mode(profile *p, mode m, const char *kernel, json_t *rows)
{
    const int64_t pieces = m.batch == PROFILE_LOOP ? p->items : m.streams;
    const char *why = pieces < 2 && m.batch == PROFILE_FUSED ? NULL : why_not_split(p);
    if (why == NULL && pieces > MAX_PIECES)
        why = "it has more than 256 items";
    if (why != NULL) {
        fprintf(stderr, "cotangent: %s: --streams %u --batch %s is left out: the batch is not split, because %s\n",
                p->direction->call, m.streams, m.batch == PROFILE_FUSED ? "fused" : "loop", why);
        return COT_OK;
    }
    p->mode = m;
    p->piece_count = (int)pieces;
    p->pieces = allocate((size_t)pieces, sizeof *p->pieces);
    split_batch(p);
    cot_status status = find_workspace(p);
    THEN(create_events(p));
    THEN(measure_samples(p, kernel, rows));
    destroy_events(p);
    free(p->pieces);
    p->pieces = NULL;
    return status;
}

/* ---- a case ------------------------------------------------------------------------------------------- */

static cot_status measure_modes(profile *p, const profile_options *options, json_t *rows)
{
    cot_choice choices[COT_MAX_KERNELS];
    const char *kernel = "";
    int count = 0;
    cot_status status = cot_op_explain(p->direction, p->queues[0].queue, p->bound.args, choices, &count);
    for (int i = 0; status == COT_OK && i < count; i++)
        if (choices[i].chosen)
            kernel = choices[i].kernel->name;
    THEN(allocate_host(p));
    for (unsigned streams = PROFILE_ONE_STREAM; streams <= PROFILE_TWO_STREAMS; streams++)
        for (unsigned memory = PROFILE_FRESH; memory <= PROFILE_POOL; memory++)
            for (unsigned batch = PROFILE_LOOP; batch >= PROFILE_FUSED; batch--)
                if ((options->streams & streams) && (options->memory & memory) && (options->batch & batch))
                    THEN(measure_mode(p, (mode){memory, streams, batch}, kernel, rows));
    return status;
}

cot_status profile_case(const cot_op_cases *cases, const cot_case *c, cot_backend backend,
                        const profile_options *options, json_t *rows)
{
    profile *p = allocate(1, sizeof *p);
    const size_t row_count = json_array_size(rows);
    *p = (profile){.cases = cases, .c = c, .direction = case_direction(cases, c)};
    p->batch_mask = batch_fields(p->direction, c->args, &p->items);
    cot_status status = device_queue_open(&p->queues[0], backend, NULL);
    THEN(device_queue_open(&p->queues[1], backend, NULL));
    cot_choice choices[COT_MAX_KERNELS];
    int count;
    THEN(cot_op_explain(p->direction, p->queues[0].queue, c->args, choices, &count)); /* before any allocation */
    if (status == COT_OK) {
        p->calls = p->queues[0].queue->calls;
        bound_case_make_repeating(&p->bound, cases, c);
        status = measure_modes(p, options, rows);
        for (int f = 0; f < p->direction->field_count; f++)
            p->calls->free_host(p->queues[0].queue, p->host[f]);
        bound_case_free(&p->bound, p->direction);
    }
    device_queue_close(&p->queues[0]);
    device_queue_close(&p->queues[1]);
    if (status == COT_OK && json_array_size(rows) == row_count)
        status =
            cot_fail(COT_UNSUPPORTED, "%s: this call can be made in none of the requested modes", p->direction->call);
    free(p);
    return status;
}
