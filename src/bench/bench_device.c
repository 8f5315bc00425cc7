/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_device.h"

#include "ceiling.h"
#include "core/queue.h"
#include "cuda/memory.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* The rounds of all kernels of a case and of the copies are interleaved. A round is a graph of as many calls as fill
 * round_seconds, at least one for each copy of the data. The copies fill the L2 cache CACHE_FILLS times. */
static const double round_seconds = 8e-3;
enum { ROUNDS = 9, CACHE_FILLS = 4, MAX_IMAGES = 64, MAX_CALLS = 256 };

/* Under load, graphs of load_graph_seconds run one after the other. A burst is one call after idle_seconds without
 * work. */
static const double load_graph_seconds = 0.02, idle_seconds = 0.4;
enum { BURSTS = 3, MAX_LOAD_SAMPLES = 4096 };

void device_queue_close(device_queue *d)
{
    cot_queue_destroy(d->queue);
    if (d->stream != NULL)
        d->owner->calls->stream_destroy(d->owner, d->stream);
    cot_queue_destroy(d->owner);
}

cot_status device_queue_open(device_queue *d, cot_backend backend, const char *kernels)
{
    char name[100];
    memset(d, 0, sizeof *d);
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = backend;
    options.kernels = kernels;
    cot_status status = cot_queue_create(&options, &d->owner);
    if (status == COT_OK)
        status = d->owner->calls->describe(d->owner, name, sizeof name, &d->cache_bytes);
    if (status == COT_OK)
        status = d->owner->calls->stream_create(d->owner, &d->stream);
    options.stream = d->stream;
    if (status == COT_OK)
        status = cot_queue_create(&options, &d->queue);
    return status;
}

void bench_device_name(char *text, size_t size)
{
    device_queue d;
    snprintf(text, size, "unknown device");
    if (device_queue_open(&d, COT_BACKEND_CUDA, "") == COT_OK)
        cot_cuda_describe(d.owner, text, size, &d.cache_bytes);
    device_queue_close(&d);
}

/* The number of copies of the data such that each is evicted from the cache before it is used again. */
static int image_count_for(const device_queue *d, double footprint)
{
    const double copies = CACHE_FILLS * (double)d->cache_bytes / (footprint > 1 ? footprint : 1);
    return copies > MAX_IMAGES ? MAX_IMAGES : (int)copies + 1;
}

/* ---- kernels, copies and products --------------------------------------------------------------------- */

/* A measured thing: a kernel, a copy or matrix products. enqueue enqueues `calls` calls over `images` copies of the
 * data. */
typedef struct runner {
    cot_status (*enqueue)(void *runner);
    cot_queue *queue;
    cot_cuda_graph *graph;
    int calls, images;
    double samples[ROUNDS]; /* seconds of one call */
    int count;
    const cot_direction *direction; /* for kernels */
    device_image *image;
    char *memory;         /* for copies: pairs of arrays */
    size_t bytes, stride; /* bytes of an array; distance between arrays */
    cot_dtype dtype;      /* for products */
} runner;

static cot_status enqueue_kernel(void *context)
{
    const runner *r = context;
    cot_status status = COT_OK;
    for (int i = 0; status == COT_OK && i < r->calls; i++)
        status = cot_op_run(r->direction, r->queue, r->image[i % r->images].args);
    return status;
}

static cot_status enqueue_copy(void *context)
{
    const runner *r = context;
    cot_status status = COT_OK;
    for (int i = 0; status == COT_OK && i < r->calls; i++) {
        char *pair = r->memory + 2 * r->stride * (size_t)(i % r->images);
        status = cot_cuda_copy_on_device_async(r->queue, pair + r->stride, pair, r->bytes);
    }
    return status;
}

static cot_status enqueue_products(void *context)
{
    const runner *r = context;
    cot_status status = COT_OK;
    for (int i = 0; status == COT_OK && i < r->calls; i++)
        status = product_rate_enqueue(r->queue, r->dtype);
    return status;
}

/* Captures a graph of `calls` calls, which replaces the previous graph. */
static cot_status capture(runner *r, int calls)
{
    cot_cuda_graph_destroy(r->queue, r->graph);
    r->graph = NULL;
    r->calls = calls;
    return cot_cuda_graph_capture(r->queue, r->enqueue, r, &r->graph);
}

/* Captures a graph of as many calls as take `seconds`. A shorter graph is a warm-up and measures the time of a call. */
static cot_status capture_seconds(runner *r, double seconds)
{
    double elapsed = 0;
    cot_status status = capture(r, r->images);
    for (int i = 0; status == COT_OK && i < 2; i++)
        status = cot_cuda_graph_replay(r->queue, r->graph, &elapsed);
    if (status != COT_OK)
        return status;
    const double seconds_per_call = elapsed / r->calls;
    const int calls = seconds_per_call > 0 && seconds / seconds_per_call < MAX_CALLS
                          ? (int)(seconds / seconds_per_call) + 1
                          : MAX_CALLS;
    return capture(r, (int)cot_round_up(calls, r->images));
}

static cot_status run_interleaved(runner *runners, int count, int rounds)
{
    cot_status status = COT_OK;
    for (int i = 0; status == COT_OK && i < count; i++)
        status = capture_seconds(&runners[i], round_seconds);
    for (int number = 0; number < rounds; number++)
        for (int i = 0; status == COT_OK && i < count; i++) {
            runner *r = &runners[(i + number) % count]; /* a new order in each round, so that the predecessors differ */
            double seconds = 0;
            status = cot_cuda_graph_replay(r->queue, r->graph, &seconds);
            r->samples[r->count++] = seconds / r->calls;
        }
    return status;
}

/* ---- one call after idle time, and seconds of load ----------------------------------------------------- */

static void sleep_seconds(double seconds)
{
    nanosleep(&(struct timespec){(time_t)seconds, (long)(1e9 * (seconds - floor(seconds)))}, NULL);
}

static cot_status time_burst(runner *r, double *seconds)
{
    double samples[BURSTS];
    cot_status status = capture(r, 1);
    if (status == COT_OK)
        status = cot_cuda_graph_replay(r->queue, r->graph, &samples[0]);
    for (int i = 0; status == COT_OK && i < BURSTS; i++) {
        sleep_seconds(idle_seconds);
        status = cot_cuda_graph_replay(r->queue, r->graph, &samples[i]);
    }
    if (status == COT_OK)
        *seconds = median(samples, BURSTS);
    return status;
}

/* Calls the kernel for load_seconds. Only the second half is measured. */
static cot_status time_load(runner *r, double load_seconds, measurement *m)
{
    char bus[64] = "";
    double *samples = allocate(MAX_LOAD_SAMPLES, sizeof *samples), second_half = 0;
    int count = 0;
    cot_status status = capture_seconds(r, load_graph_seconds);
    if (status == COT_OK)
        status = cot_cuda_pci_bus_id(r->queue, bus, sizeof bus);
    power_watch *watch = status == COT_OK ? power_watch_begin(bus) : NULL;
    const double begin = now();
    while (status == COT_OK && now() - begin < load_seconds && count < MAX_LOAD_SAMPLES) {
        if (second_half == 0 && now() - begin >= load_seconds / 2) {
            second_half = now();
            count = 0;
        }
        double elapsed = 0;
        status = cot_cuda_graph_replay(r->queue, r->graph, &elapsed);
        samples[count++] = elapsed / r->calls;
    }
    m->has_power = power_watch_end(watch, second_half, now(), &m->power);
    if (status == COT_OK && count > 0)
        m->seconds = median(samples, count);
    free(samples);
    return status;
}

/* Measures the rate of products under load, once for each dtype: the clock under load depends on the dtype. */
static cot_status measure_load_rate(runner *products, double load_seconds, double *rate)
{
    measurement m = {.seconds = 0};
    if (*rate > 0)
        return COT_OK;
    const cot_status status = time_load(products, load_seconds, &m);
    if (status == COT_OK && m.seconds > 0)
        *rate = product_rate_flops(products->queue, products->dtype) / m.seconds;
    return status;
}

/* ---- one case ----------------------------------------------------------------------------------------- */

/* The driver's copy runs at 67 % of its speed for some sizes, which are a few pages above a round size. So there are
 * two copies: one with the size rounded to pages, and, if that adds little, one with the size rounded to large pages.
 * The faster one counts. */
static cot_status make_copy_runners(device_queue *d, double footprint, runner *runners, int *count)
{
    const int64_t page = 4096, large_page = 2 << 20, half = (int64_t)(footprint / 2);
    const int64_t stride = cot_round_up(half, large_page);
    const size_t sizes[] = {cot_round_up(half, page), stride};
    char *memory = NULL;
    const int pairs = image_count_for(d, footprint);
    const cot_status status = cot_cuda_alloc(d->queue, 2 * stride * (size_t)pairs, (void **)&memory);
    for (int i = 0; status == COT_OK && i < (half > 32 * large_page ? 2 : 1); i++)
        runners[(*count)++] = (runner){.enqueue = enqueue_copy,
                                       .queue = d->queue,
                                       .images = pairs,
                                       .memory = memory,
                                       .bytes = sizes[i],
                                       .stride = stride};
    return status;
}

static cot_status make_kernel_runner(const cot_op_cases *cases, const cot_direction *direction, const measurement *m,
                                     device_queue *d, device_image *image, int images, runner *r)
{
    char forced[160];
    snprintf(forced, sizeof forced, "%s=%s", cases->op->name, m->choice->kernel->name);
    cot_status status = device_queue_open(d, COT_BACKEND_CUDA, forced);
    *r = (runner){.enqueue = enqueue_kernel,
                  .queue = d->queue,
                  .calls = images,
                  .images = images,
                  .direction = direction,
                  .image = image};
    if (status == COT_OK)
        status = enqueue_kernel(r); /* before the capture, because the first call loads the device code */
    return status == COT_OK ? cot_queue_check(d->queue) : status;
}

/* Makes the runner of the kernel that does only products. */
static cot_status make_product_runner(device_queue *d, cot_dtype dtype, runner *r)
{
    *r = (runner){.enqueue = enqueue_products, .queue = d->queue, .calls = 1, .images = 1, .dtype = dtype};
    const cot_status status = product_rate_load(d->queue);
    return status == COT_OK ? enqueue_products(r) : status;
}

cot_status bench_device_case(const cot_op_cases *cases, const cot_case *c, const bound_case *bound, double load_seconds,
                             bool brief, measurement *m, int count, double *bytes_per_second, double *load_rate)
{
    const cot_direction *direction = case_direction(cases, c);
    const double footprint = compulsory_bytes(direction, c->args);
    device_queue *queues = allocate(COT_MAX_KERNELS + 1, sizeof *queues);
    runner *runners = allocate(COT_MAX_KERNELS + 3, sizeof *runners);
    const cot_dtype dtype = cot_field_tensor(&direction->fields[0], (void *)c->args)->dtype;
    const int product_runners = case_is_product_bound(c, direction) && !brief;
    device_image *images = allocate(MAX_IMAGES, sizeof *images);
    size_t workspace_bytes = 0;
    int copies = 0, image_count = 0;
    for (int i = 0; i < count; i++)
        if (m[i].choice->workspace_bytes > workspace_bytes)
            workspace_bytes = m[i].choice->workspace_bytes;
    cot_status status = device_queue_open(&queues[0], COT_BACKEND_CUDA, "");
    if (status == COT_OK)
        status = make_copy_runners(&queues[0], footprint, runners, &copies);
    for (; status == COT_OK && image_count < image_count_for(&queues[0], footprint); image_count++)
        status = device_image_make(&images[image_count], bound, direction, queues[0].queue, workspace_bytes);
    for (int i = 0; status == COT_OK && i < count; i++)
        status = make_kernel_runner(cases, direction, &m[i], &queues[i + 1], images, image_count, &runners[copies + i]);
    runner *products = &runners[copies + count];
    if (status == COT_OK && product_runners > 0)
        status = make_product_runner(&queues[0], dtype, products);
    if (status == COT_OK)
        status = run_interleaved(runners, copies + count + product_runners, brief ? 1 : ROUNDS);
    *bytes_per_second = 0;
    for (int i = 0; status == COT_OK && i < copies; i++) {
        const double seconds = median(runners[i].samples, runners[i].count);
        if (seconds > 0 && 2 * (double)runners[i].bytes / seconds > *bytes_per_second)
            *bytes_per_second = 2 * (double)runners[i].bytes / seconds;
    }
    for (int i = 0; status == COT_OK && i < count; i++) {
        runner *r = &runners[copies + i];
        m[i].seconds = m[i].interleaved_seconds = median(r->samples, r->count);
        if (product_runners == 0)
            continue;
        m[i].product_rate = product_rate_flops(queues[0].queue, dtype) / median(products->samples, products->count);
        if (load_seconds <= 0 || !m[i].choice->chosen)
            continue;
        status = time_burst(r, &m[i].burst_seconds);
        if (status == COT_OK)
            status = time_load(r, load_seconds, &m[i]);
        if (status == COT_OK)
            status = measure_load_rate(products, load_seconds, &load_rate[dtype]);
        m[i].product_rate = load_rate[dtype];
    }
    for (int i = 0; i < copies + count + product_runners; i++)
        if (runners[i].queue != NULL)
            cot_cuda_graph_destroy(runners[i].queue, runners[i].graph);
    for (int i = 0; i < image_count; i++)
        device_image_free(&images[i], queues[0].queue);
    if (copies > 0)
        cot_cuda_free(queues[0].queue, runners[0].memory);
    for (int i = count; i >= 0; i--)
        device_queue_close(&queues[i]);
    free(images);
    free(runners);
    free(queues);
    return status;
}
