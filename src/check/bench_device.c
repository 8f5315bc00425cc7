/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_device.h"

#include "core/queue.h"
#include "cuda/memory.h"

#include <stdio.h>
#include <stdlib.h>

/* A graph has as many calls as fill this time, at least one for each copy of the data, and is replayed so often. The
 * copies fill the second-level cache FLUSH times. */
static const double graph_seconds = 2e-3;
enum { REPLAYS = 15, FLUSH = 4, MAX_IMAGES = 64, MAX_CALLS = 256 };

void device_queue_close(device_queue *d)
{
    cot_queue_destroy(d->queue);
    if (d->stream != NULL)
        cot_cuda_stream_end(d->owner, d->stream);
    cot_queue_destroy(d->owner);
}

cot_status device_queue_open(device_queue *d, const char *kernels)
{
    char name[100];
    memset(d, 0, sizeof *d);
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    options.kernels = kernels;
    cot_status status = cot_queue_create(&options, &d->owner);
    if (status == COT_OK)
        status = cot_cuda_describe(d->owner, name, sizeof name, &d->cache_bytes);
    if (status == COT_OK)
        status = cot_cuda_stream(d->owner, &d->stream);
    options.stream = d->stream;
    if (status == COT_OK)
        status = cot_queue_create(&options, &d->queue);
    return status;
}

void bench_device_name(char *text, size_t size)
{
    device_queue d;
    snprintf(text, size, "unknown device");
    if (device_queue_open(&d, "") == COT_OK)
        cot_cuda_describe(d.owner, text, size, &d.cache_bytes);
    device_queue_close(&d);
}

/* So many copies that each has left the cache when its turn comes again. */
static int copies_for(const device_queue *d, double footprint)
{
    const double copies = FLUSH * (double)d->cache_bytes / (footprint > 1 ? footprint : 1);
    return copies > MAX_IMAGES ? MAX_IMAGES : (int)copies + 1;
}

/* Seconds of one call: of `calls` in a graph, after a short one has told how many that should be. */
static cot_status time_calls(device_queue *d, cot_status (*enqueue)(void *), void *context, int *calls, int copies,
                             double *seconds)
{
    double samples[REPLAYS];
    *calls = copies;
    cot_status status = cot_cuda_time(d->queue, enqueue, context, 1, samples);
    if (status != COT_OK)
        return status;
    const double once = samples[0] / copies;
    const int wanted = once > 0 ? (int)(graph_seconds / once) : MAX_CALLS;
    *calls = (wanted < copies                            ? copies
              : wanted > MAX_CALLS && copies < MAX_CALLS ? MAX_CALLS
                                                         : wanted) /
             copies * copies;
    status = cot_cuda_time(d->queue, enqueue, context, REPLAYS, samples);
    *seconds = median(samples, REPLAYS) / *calls;
    return status;
}

/* ---- a kernel ----------------------------------------------------------------------------------------- */

typedef struct kernel_calls {
    const cot_direction *direction;
    cot_queue *queue;
    device_image *images;
    int image_count, calls;
} kernel_calls;

static cot_status enqueue_kernel(void *context)
{
    const kernel_calls *k = context;
    cot_status status = COT_OK;
    for (int i = 0; status == COT_OK && i < k->calls; i++)
        status = cot_op_run(k->direction, k->queue, k->images[i % k->image_count].args);
    return status;
}

cot_status bench_device_kernel(const cot_op_cases *cases, const cot_case *c, const bound_case *bound, measurement *m)
{
    const cot_direction *direction = case_direction(cases, c);
    char forced[160];
    snprintf(forced, sizeof forced, "%s=%s", cases->op->name, m->choice->kernel->name);
    device_queue d;
    device_image *images = allocate(MAX_IMAGES, sizeof *images);
    cot_status status = device_queue_open(&d, forced);
    const int wanted = status == COT_OK ? copies_for(&d, compulsory_bytes(direction, c->args)) : 0;
    int count = 0;
    for (; status == COT_OK && count < wanted; count++)
        status = device_image_make(&images[count], bound, direction, d.queue, m->choice->workspace_bytes);
    kernel_calls k = {direction, d.queue, images, count, count};
    if (status == COT_OK)
        status = enqueue_kernel(&k); /* outside of a capture: what a first call has to load is loaded */
    if (status == COT_OK)
        status = cot_queue_check(d.queue);
    if (status == COT_OK)
        status = time_calls(&d, enqueue_kernel, &k, &k.calls, count, &m->seconds);
    for (int i = 0; i < count; i++)
        device_image_free(&images[i], d.queue);
    device_queue_close(&d);
    free(images);
    return status;
}

/* ---- the copy ----------------------------------------------------------------------------------------- */

typedef struct copy_calls {
    cot_queue *queue;
    char *memory;
    size_t bytes,
        stride; /* of one array; from one to the next, in whole large pages: memcpy is slow on odd addresses */
    int pairs, calls;
} copy_calls;

static cot_status enqueue_copy(void *context)
{
    const copy_calls *c = context;
    cot_status status = COT_OK;
    for (int i = 0; status == COT_OK && i < c->calls; i++) {
        char *pair = c->memory + 2 * c->stride * (size_t)(i % c->pairs);
        status = cot_cuda_copy(c->queue, pair + c->stride, pair, c->bytes);
    }
    return status;
}

/* The driver's copy takes some sizes, a few pages beyond a round one, at two thirds of its speed; so the best of two:
 * the size in pages, and, where that is hardly more, in large pages. */
cot_status bench_device_copy(double footprint, double *bytes_per_second)
{
    device_queue d;
    cot_status status = device_queue_open(&d, "");
    const size_t page = 4096, large_page = (size_t)2 << 20, half = (size_t)(footprint / 2);
    copy_calls c = {.queue = d.queue, .stride = (half + large_page - 1) / large_page * large_page};
    const size_t sizes[] = {(half + page - 1) / page * page, c.stride};
    *bytes_per_second = 0;
    if (status == COT_OK) {
        c.pairs = copies_for(&d, footprint);
        status = cot_cuda_alloc(d.queue, 2 * c.stride * (size_t)c.pairs, (void **)&c.memory);
    }
    for (int i = 0; status == COT_OK && i < (half > 32 * large_page ? 2 : 1); i++) {
        double seconds = 0;
        c.bytes = sizes[i];
        status = time_calls(&d, enqueue_copy, &c, &c.calls, c.pairs, &seconds);
        const double rate = seconds > 0 ? 2 * (double)c.bytes / seconds : 0;
        *bytes_per_second = rate > *bytes_per_second ? rate : *bytes_per_second;
    }
    if (d.queue != NULL)
        cot_cuda_free(d.queue, c.memory);
    device_queue_close(&d);
    return status;
}
