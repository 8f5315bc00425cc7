/* SPDX-License-Identifier: Apache-2.0 */
#include "profile.h"

#include "bench_device.h"
#include "ceiling.h"
#include "commit.h"
#include "core/queue.h"
#include "core/status.h"
#include "core/tensor.h"
#include "cuda/memory.h"
#include "signature.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* A measurement is the median of this many calls, or of as many as its time allows. */
static const double way_seconds = 1.5;
enum { SAMPLES = 15, SAMPLES_LEAST = 3, MAX_PIECES = 256, MAX_LAUNCHES = 32 };

/* Moments of a piece: its copies to the device begin and end, its kernels begin and end, its copies back end. */
enum { BEGIN, SENT, TURN, COMPUTED, FETCHED, MOMENTS };

typedef struct way {
    unsigned memory, streams, batch;
} way;

typedef struct breakdown {
    double total, allocation, to_device, kernels, to_host;
} breakdown;

typedef struct launches {
    cot_cuda_launch_facts facts[MAX_LAUNCHES];
    int counts[MAX_LAUNCHES], count;
} launches;

/* Some items of the batch: a call of its own. */
typedef struct piece {
    _Alignas(16) char args[COT_MAX_ARGS];
    void *moments[MOMENTS];
} piece;

typedef struct profile {
    const cot_op_cases *cases;
    const cot_case *c;
    const cot_direction *direction;
    bound_case bound;
    device_queue queues[2];
    way way;
    uint32_t batch; /* the fields that have a part in every piece */
    int64_t items;
    char *host[COT_MAX_FIELDS], *device[COT_MAX_FIELDS]; /* of the elements of each field */
    void *workspace[2];
    size_t workspace_bytes;
    piece *pieces;
    int piece_count;
    void *start, *before,
        *after; /* two streams: around the copies of what all pieces share, at the start and the end */
    double bytes_to_device, bytes_to_host, allocated_bytes;
    launches seen;
} profile;

/* ---- fields and their parts --------------------------------------------------------------------------- */

static cot_tensor *whole(const profile *p, int f)
{
    return cot_field_tensor(&p->direction->fields[f], (void *)p->bound.args);
}

static cot_tensor *part(const profile *p, int f, int number)
{
    return cot_field_tensor(&p->direction->fields[f], p->pieces[number].args);
}

static bool goes_to_device(const profile *p, int f)
{
    return cot_present(whole(p, f)) && field_begins_with_value(p->direction, &p->direction->fields[f], p->bound.args);
}

static bool comes_back(const profile *p, int f)
{
    return cot_present(whole(p, f)) && p->direction->fields[f].role != COT_INPUT;
}

static bool is_shared(const profile *p, int f)
{
    return (p->batch >> f & 1) == 0;
}

/* Where the elements of a tensor begin, relative to those of the whole field, and how many bytes they span. */
static size_t span(const profile *p, int f, const cot_tensor *tensor, size_t *offset)
{
    const char *const data = whole(p, f)->data;
    int64_t low, high, whole_low, whole_high;
    cot_extent(tensor, &low, &high);
    cot_extent(whole(p, f), &whole_low, &whole_high);
    *offset = (size_t)((char *)tensor->data + low - (data + whole_low));
    return (size_t)(high - low);
}

static size_t whole_span(const profile *p, int f)
{
    size_t offset;
    return span(p, f, whole(p, f), &offset);
}

/* So far past an aligned address as the case's own data are, in every memory. */
static size_t lead(const profile *p, int f)
{
    int64_t low, high;
    cot_extent(whole(p, f), &low, &high);
    return ((uintptr_t)whole(p, f)->data + (uintptr_t)low) % COT_ALIGNMENT;
}

/* ---- memory ------------------------------------------------------------------------------------------- */

static void free_device(profile *p)
{
    for (int f = 0; f < p->direction->field_count; f++) {
        if (p->device[f] != NULL)
            cot_cuda_free(p->queues[0].queue, p->device[f] - lead(p, f));
        p->device[f] = NULL;
    }
    for (int s = 0; s < 2; s++) {
        cot_cuda_free(p->queues[0].queue, p->workspace[s]);
        p->workspace[s] = NULL;
    }
}

static cot_status allocate_device(profile *p)
{
    cot_status status = COT_OK;
    p->allocated_bytes = 0;
    for (int f = 0; status == COT_OK && f < p->direction->field_count; f++) {
        void *memory = NULL;
        if (!cot_present(whole(p, f)))
            continue;
        const size_t bytes = lead(p, f) + whole_span(p, f);
        status = cot_cuda_alloc(p->queues[0].queue, bytes, &memory);
        if (status == COT_OK)
            p->device[f] = (char *)memory + lead(p, f);
        p->allocated_bytes += (double)bytes;
    }
    for (unsigned s = 0; status == COT_OK && p->workspace_bytes > 0 && s < p->way.streams; s++) {
        status = cot_cuda_alloc(p->queues[0].queue, p->workspace_bytes, &p->workspace[s]);
        p->allocated_bytes += (double)p->workspace_bytes;
    }
    return status;
}

static cot_status allocate_host(profile *p)
{
    for (int f = 0; f < p->direction->field_count; f++) {
        if (!cot_present(whole(p, f)))
            continue;
        int64_t low, high;
        cot_extent(whole(p, f), &low, &high);
        void *memory;
        const cot_status status = cot_cuda_alloc_host(p->queues[0].queue, (size_t)(high - low), &memory);
        if (status != COT_OK)
            return status;
        p->host[f] = memory;
        if (high > low)
            memcpy(memory, (char *)whole(p, f)->data + low, (size_t)(high - low));
    }
    return COT_OK;
}

/* ---- pieces ------------------------------------------------------------------------------------------- */

/* NULL, or why the batch of this call cannot be split. */
static const char *indivisible(const profile *p)
{
    if (p->batch == 0 || p->items < 2)
        return "it has no batch of two items or more";
    for (int f = 0; f < p->direction->field_count; f++) {
        const cot_field *field = &p->direction->fields[f];
        cot_tensor item = *whole(p, f);
        if (!cot_present(&item))
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
            return "its items lie between each other";
    }
    return NULL;
}

/* Arguments with the host's addresses; point_at_device sets the device's. */
static void make_pieces(profile *p)
{
    const int32_t accumulate = 1;
    for (int n = 0; n < p->piece_count; n++) {
        const int64_t first = n * p->items / p->piece_count, end = (n + 1) * p->items / p->piece_count;
        memcpy(p->pieces[n].args, p->bound.args, sizeof p->pieces[n].args);
        for (int f = 0; p->piece_count > 1 && f < p->direction->field_count; f++) {
            cot_tensor *tensor = part(p, f, n);
            if (!cot_present(tensor))
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

/* The workspace that the largest piece asks for; fails where a piece would. */
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
        if (!cot_present(tensor))
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

/* Copies the part of a piece of each field that goes to the device, or comes back; of all of them, or of those that the
 * pieces share or do not share. */
static cot_status copy_fields(profile *p, int number, int stream, bool back, bool shared, bool own)
{
    cot_queue *queue = p->queues[stream].queue;
    cot_status status = COT_OK;
    for (int f = 0; status == COT_OK && f < p->direction->field_count; f++) {
        if (!(back ? comes_back(p, f) : goes_to_device(p, f)) || !(is_shared(p, f) ? shared : own))
            continue;
        size_t offset;
        const size_t bytes = span(p, f, number < 0 ? whole(p, f) : part(p, f, number), &offset);
        status = back ? cot_cuda_fetch(queue, p->host[f] + offset, p->device[f] + offset, bytes)
                      : cot_cuda_send(queue, p->device[f] + offset, p->host[f] + offset, bytes);
        *(back ? &p->bytes_to_host : &p->bytes_to_device) += (double)bytes;
    }
    return status;
}

/* The next call of a chain, unless one before failed. */
#define THEN(call) (status = status != COT_OK ? status : (call))

/* All copies to the device, all kernels, all copies back. */
static cot_status one_after_the_other(profile *p)
{
    cot_queue *queue = p->queues[0].queue;
    void **moments = p->pieces[0].moments;
    cot_status status = cot_cuda_record(queue, moments[BEGIN]);
    THEN(copy_fields(p, -1, 0, false, true, true));
    THEN(cot_cuda_record(queue, moments[SENT]));
    for (int n = 0; n < p->piece_count; n++)
        THEN(call_piece(p, n, 0));
    THEN(cot_cuda_record(queue, moments[COMPUTED]));
    THEN(copy_fields(p, -1, 0, true, true, true));
    THEN(cot_cuda_record(queue, moments[FETCHED]));
    THEN(cot_queue_check(queue));
    return status;
}

/* Pieces on two streams in turns: while one computes, the next one's data come and the last one's results go. Kernels
 * take turns where all add to the same output. */
static cot_status overlapped_piece(profile *p, int n, bool ordered)
{
    const int stream = n % 2;
    cot_queue *queue = p->queues[stream].queue;
    void **moments = p->pieces[n].moments;
    cot_status status = COT_OK;
    if (n == 1)
        THEN(cot_cuda_wait_for(queue, p->before));
    THEN(cot_cuda_record(queue, moments[BEGIN]));
    THEN(copy_fields(p, n, stream, false, false, true));
    THEN(cot_cuda_record(queue, moments[SENT]));
    if (ordered && n > 0)
        THEN(cot_cuda_wait_for(queue, p->pieces[n - 1].moments[COMPUTED]));
    THEN(cot_cuda_record(queue, moments[TURN]));
    THEN(call_piece(p, n, stream));
    THEN(cot_cuda_record(queue, moments[COMPUTED]));
    THEN(copy_fields(p, n, stream, true, false, true));
    THEN(cot_cuda_record(queue, moments[FETCHED]));
    return status;
}

static cot_status overlapped(profile *p)
{
    const int last = p->piece_count - 1;
    cot_queue *last_queue = p->queues[last % 2].queue;
    bool ordered = false;
    for (int f = 0; f < p->direction->field_count; f++)
        ordered = ordered || (is_shared(p, f) && comes_back(p, f));
    cot_status status = cot_cuda_record(p->queues[0].queue, p->start);
    THEN(copy_fields(p, -1, 0, false, true, false));
    THEN(cot_cuda_record(p->queues[0].queue, p->before));
    for (int n = 0; n < p->piece_count; n++)
        THEN(overlapped_piece(p, n, ordered));
    THEN(copy_fields(p, -1, last % 2, true, true, false));
    THEN(cot_cuda_record(last_queue, p->after));
    THEN(cot_queue_check(p->queues[0].queue));
    THEN(cot_queue_check(p->queues[1].queue));
    return status;
}

static cot_status add_elapsed(profile *p, void *begin, void *end, double *sum)
{
    double seconds = 0;
    const cot_status status = cot_cuda_elapsed(p->queues[0].queue, begin, end, &seconds);
    *sum += seconds;
    return status;
}

/* The moments of the call before; after its end, for reading them takes time. */
static cot_status read_moments(profile *p, breakdown *b)
{
    cot_status status = COT_OK;
    if (p->way.streams == PROFILE_ONE) {
        void **moments = p->pieces[0].moments;
        THEN(add_elapsed(p, moments[BEGIN], moments[SENT], &b->to_device));
        THEN(add_elapsed(p, moments[SENT], moments[COMPUTED], &b->kernels));
        THEN(add_elapsed(p, moments[COMPUTED], moments[FETCHED], &b->to_host));
        return status;
    }
    THEN(add_elapsed(p, p->start, p->before, &b->to_device));
    THEN(add_elapsed(p, p->pieces[p->piece_count - 1].moments[FETCHED], p->after, &b->to_host));
    for (int n = 0; n < p->piece_count; n++) {
        void **moments = p->pieces[n].moments;
        THEN(add_elapsed(p, moments[BEGIN], moments[SENT], &b->to_device));
        THEN(add_elapsed(p, moments[TURN], moments[COMPUTED], &b->kernels));
        THEN(add_elapsed(p, moments[COMPUTED], moments[FETCHED], &b->to_host));
    }
    return status;
}

/* From host to host, once. */
static cot_status sample(profile *p, breakdown *b)
{
    *b = (breakdown){0};
    p->bytes_to_device = p->bytes_to_host = 0;
    cot_status status = COT_OK;
    const double begin = now();
    if (p->way.memory == PROFILE_FRESH)
        status = allocate_device(p);
    b->allocation = now() - begin;
    THEN(p->way.streams == PROFILE_TWO ? overlapped(p) : one_after_the_other(p));
    const double end = now();
    if (p->way.memory == PROFILE_FRESH)
        free_device(p);
    b->total = now() - begin;
    b->allocation = p->way.memory == PROFILE_FRESH ? b->allocation + now() - end : 0;
    THEN(read_moments(p, b));
    return status;
}

/* ---- a way -------------------------------------------------------------------------------------------- */

static void note_launch(void *context, const cot_cuda_launch_facts *facts)
{
    launches *seen = context;
    int i = 0;
    while (i < seen->count && (strcmp(seen->facts[i].name, facts->name) != 0 ||
                               memcmp(seen->facts[i].blocks, facts->blocks, sizeof facts->blocks) != 0))
        i++;
    if (i == MAX_LAUNCHES)
        return;
    if (i == seen->count)
        seen->facts[seen->count++] = *facts;
    seen->counts[i]++;
}

static void observe(profile *p, void (*seen)(void *, const cot_cuda_launch_facts *))
{
    for (int s = 0; s < 2; s++)
        cot_cuda_observe(p->queues[s].queue, seen, &p->seen);
}

static double median_of(const breakdown *samples, int count, size_t member)
{
    double values[SAMPLES];
    for (int i = 0; i < count; i++)
        memcpy(&values[i], (const char *)&samples[i] + member, sizeof values[i]);
    return median(values, count);
}

static json_t *launches_as_json(const launches *seen)
{
    json_t *list = json_array();
    for (int i = 0; i < seen->count; i++) {
        const cot_cuda_launch_facts *l = &seen->facts[i];
        const double blocks = (double)l->blocks[0] * l->blocks[1] * l->blocks[2];
        const double resident = (double)l->blocks_per_multiprocessor * l->multiprocessors;
        json_array_append_new(
            list, json_pack("{s:s, s:f, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:i}", "name", l->name, "blocks",
                            blocks, "threads", (int)l->threads, "registers", l->registers, "local_bytes",
                            l->local_bytes, "static_shared", l->static_shared, "dynamic_shared", l->dynamic_shared,
                            "blocks_per_multiprocessor", l->blocks_per_multiprocessor, "occupancy", l->occupancy,
                            "waves", resident > 0 ? blocks / resident : 0.0, "count", seen->counts[i]));
    }
    return list;
}

static json_t *row_of(const profile *p, const char *kernel, const breakdown *samples, int count)
{
    char device[160] = "", date[16];
    size_t cache;
    const time_t seconds = time(NULL);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&seconds));
    cot_cuda_describe(p->queues[0].queue, device, sizeof device, &cache);
    const cot_tensor *first = whole(p, 0);
#define MEDIAN(member) 1e3 * median_of(samples, count, offsetof(breakdown, member))
    json_t *row = json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:s, s:i}", "op", p->cases->op->name,
                            "direction", p->direction->name, "kernel", kernel, "dtype", cot_dtype_name(first->dtype),
                            "layout", p->c->layout, "shape", p->c->shape, "options", p->c->options, "memory",
                            p->way.memory == PROFILE_FRESH ? "fresh" : "pool", "streams", (int)p->way.streams, "batch",
                            p->way.batch == PROFILE_FUSED ? "fused" : "loop", "pieces", p->piece_count);
    json_t *figures =
        json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:o, s:s, s:s, s:s, s:s}", "total_ms", MEDIAN(total),
                  "allocation_ms", MEDIAN(allocation), "to_device_ms", MEDIAN(to_device), "kernels_ms", MEDIAN(kernels),
                  "to_host_ms", MEDIAN(to_host), "bytes_to_device", p->bytes_to_device, "bytes_to_host",
                  p->bytes_to_host, "allocated_bytes", p->allocated_bytes, "launches", launches_as_json(&p->seen),
                  "device", device, "date", date, "commit", COT_COMMIT, "version", cot_version());
#undef MEDIAN
    json_object_update(row, figures);
    json_decref(figures);
    return row;
}

static cot_status measure(profile *p, const char *kernel, json_t *rows)
{
    breakdown samples[SAMPLES];
    int count = 0;
    p->seen.count = 0;
    memset(p->seen.counts, 0, sizeof p->seen.counts);
    cot_status status = p->way.memory == PROFILE_POOL ? allocate_device(p) : COT_OK;
    observe(p, note_launch);
    THEN(sample(p, &samples[0])); /* warms up: what a first call has to load is loaded */
    observe(p, NULL);
    const double begin = now();
    while (status == COT_OK && count < SAMPLES && (count < SAMPLES_LEAST || now() - begin < way_seconds))
        status = sample(p, &samples[count++]);
    free_device(p);
    if (status == COT_OK)
        json_array_append_new(rows, row_of(p, kernel, samples, count));
    return status;
}

static void end_events(profile *p)
{
    for (int n = 0; n < p->piece_count; n++)
        for (int m = 0; m < MOMENTS; m++)
            cot_cuda_event_end(p->queues[0].queue, p->pieces[n].moments[m]);
    cot_cuda_event_end(p->queues[0].queue, p->start);
    cot_cuda_event_end(p->queues[0].queue, p->before);
    cot_cuda_event_end(p->queues[0].queue, p->after);
    p->start = p->before = p->after = NULL;
}

static cot_status make_events(profile *p)
{
    cot_status status = cot_cuda_event(p->queues[0].queue, &p->start);
    THEN(cot_cuda_event(p->queues[0].queue, &p->before));
    THEN(cot_cuda_event(p->queues[0].queue, &p->after));
    for (int n = 0; n < p->piece_count; n++)
        for (int m = 0; m < MOMENTS; m++)
            THEN(cot_cuda_event(p->queues[0].queue, &p->pieces[n].moments[m]));
    return status;
}

static cot_status measure_way(profile *p, way w, const char *kernel, json_t *rows)
{
    const int64_t pieces = w.batch == PROFILE_LOOP ? p->items : w.streams;
    const char *why = pieces < 2 && w.batch == PROFILE_FUSED ? NULL : indivisible(p);
    if (why == NULL && pieces > MAX_PIECES)
        why = "it has more than 256 items";
    if (why != NULL) {
        fprintf(stderr, "cotangent: %s: --streams %u --batch %s is left out: the batch is not split, because %s\n",
                p->direction->call, w.streams, w.batch == PROFILE_FUSED ? "fused" : "loop", why);
        return COT_OK;
    }
    p->way = w;
    p->piece_count = (int)pieces;
    p->pieces = allocate((size_t)pieces, sizeof *p->pieces);
    make_pieces(p);
    cot_status status = find_workspace(p);
    THEN(make_events(p));
    THEN(measure(p, kernel, rows));
    end_events(p);
    free(p->pieces);
    p->pieces = NULL;
    return status;
}

/* ---- a case ------------------------------------------------------------------------------------------- */

static cot_status measure_ways(profile *p, const profile_options *options, json_t *rows)
{
    cot_choice choices[COT_MAX_KERNELS];
    const char *kernel = "";
    int count = 0;
    cot_status status = cot_op_explain(p->direction, p->queues[0].queue, p->bound.args, choices, &count);
    for (int i = 0; status == COT_OK && i < count; i++)
        if (choices[i].chosen)
            kernel = choices[i].kernel->name;
    THEN(allocate_host(p));
    for (unsigned streams = PROFILE_ONE; streams <= PROFILE_TWO; streams++)
        for (unsigned memory = PROFILE_FRESH; memory <= PROFILE_POOL; memory++)
            for (unsigned batch = PROFILE_LOOP; batch >= PROFILE_FUSED; batch--)
                if ((options->streams & streams) && (options->memory & memory) && (options->batch & batch))
                    THEN(measure_way(p, (way){memory, streams, batch}, kernel, rows));
    return status;
}

cot_status profile_case(const cot_op_cases *cases, const cot_case *c, const profile_options *options, json_t *rows)
{
    profile *p = allocate(1, sizeof *p);
    const size_t before = json_array_size(rows);
    *p = (profile){.cases = cases, .c = c, .direction = case_direction(cases, c)};
    p->batch = batch_fields(p->direction, c->args, &p->items);
    cot_status status = device_queue_open(&p->queues[0], NULL);
    THEN(device_queue_open(&p->queues[1], NULL));
    cot_choice choices[COT_MAX_KERNELS];
    int count;
    THEN(cot_op_explain(p->direction, p->queues[0].queue, c->args, choices, &count)); /* before any memory */
    if (status == COT_OK) {
        bound_case_make_repeating(&p->bound, cases, c);
        status = measure_ways(p, options, rows);
        for (int f = 0; f < p->direction->field_count; f++)
            cot_cuda_free_host(p->queues[0].queue, p->host[f]);
        bound_case_free(&p->bound, p->direction);
    }
    device_queue_close(&p->queues[0]);
    device_queue_close(&p->queues[1]);
    if (status == COT_OK && json_array_size(rows) == before)
        status =
            cot_fail(COT_UNSUPPORTED, "%s: this call can be made in none of the ways asked for", p->direction->call);
    free(p);
    return status;
}
