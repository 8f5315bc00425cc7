/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_hip.h"

#include "ceiling.h"
#include "core/queue.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A sample is a round of calls between two waits. It has as many calls as take round_seconds. */
static const double round_seconds = 8e-3;
enum { ROUNDS = 9, CACHE_FILLS = 2, MAX_IMAGES = 16, MAX_CALLS = 256 };

/* A measured thing: a kernel, or the copy (direction NULL). */
typedef struct runner {
    cot_queue *queue;
    const cot_direction *direction;
    int calls, count;
    double samples[ROUNDS]; /* seconds of one call */
} runner;

/* Copies of the data. Copies within the device use the first and the second half of an image. */
typedef struct data_images {
    device_image image[MAX_IMAGES];
    int count;
    size_t copy_bytes;
} data_images;

static cot_status open_queue(const char *kernels, cot_queue **queue)
{
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_HIP;
    options.kernels = kernels;
    return cot_queue_create(&options, queue);
}

void bench_hip_name(char *text, size_t size)
{
    cot_queue *queue = NULL;
    size_t cache_bytes;
    snprintf(text, size, "unknown device");
    if (open_queue("", &queue) == COT_OK)
        queue->calls->describe(queue, text, size, &cache_bytes);
    cot_queue_destroy(queue);
}

/* Runs `calls` calls and waits. Writes the seconds of one call. */
static cot_status time_calls(const runner *r, data_images *data, char *copies, int calls, double *seconds)
{
    cot_status status = COT_OK;
    const double begin = now();
    for (int i = 0; status == COT_OK && i < calls; i++) {
        char *const pair = copies + 2 * data->copy_bytes * (size_t)(i % data->count);
        status = r->direction != NULL
                     ? cot_op_run(r->direction, r->queue, data->image[i % data->count].args)
                     : r->queue->calls->copy_on_device_async(r->queue, pair + data->copy_bytes, pair, data->copy_bytes);
    }
    if (status == COT_OK)
        status = cot_queue_check(r->queue);
    *seconds = (now() - begin) / calls;
    return status;
}

/* The first round is a warm-up and measures the calls of the others. */
static cot_status run_interleaved(runner *runners, int count, data_images *data, char *copies, bool brief)
{
    cot_status status = COT_OK;
    double seconds = 0;
    for (int i = 0; status == COT_OK && i < count; i++) {
        runners[i].calls = 1;
        if (brief)
            continue;
        status = time_calls(&runners[i], data, copies, data->count, &seconds);
        const double calls = seconds > 0 ? round_seconds / seconds : MAX_CALLS;
        runners[i].calls = (int)cot_round_up(calls < MAX_CALLS ? (int)calls + 1 : MAX_CALLS, data->count);
    }
    for (int round = 0; round < (brief ? 1 : ROUNDS); round++)
        for (int i = 0; status == COT_OK && i < count; i++) {
            runner *r = &runners[(i + round) % count];
            status = time_calls(r, data, copies, r->calls, &r->samples[r->count++]);
        }
    return status;
}

cot_status bench_hip_case(const cot_op_cases *cases, const cot_case *c, const bound_case *bound, bool brief,
                          measurement *m, int count, double *bytes_per_second)
{
    const cot_direction *direction = case_direction(cases, c);
    const double footprint = compulsory_bytes(direction, c->args);
    runner *runners = allocate(COT_MAX_KERNELS + 1, sizeof *runners);
    data_images *data = allocate(1, sizeof *data);
    char name[100], *copies = NULL;
    size_t workspace_bytes = 0, cache_bytes = 0;
    data->copy_bytes = (size_t)(footprint / 2) + 1;
    for (int i = 0; i < count; i++)
        if (m[i].choice->workspace_bytes > workspace_bytes)
            workspace_bytes = m[i].choice->workspace_bytes;
    cot_status status = open_queue("", &runners[0].queue);
    cot_queue *const queue = runners[0].queue;
    if (status == COT_OK)
        status = queue->calls->describe(queue, name, sizeof name, &cache_bytes);
    const double wanted = CACHE_FILLS * (double)cache_bytes / (footprint > 1 ? footprint : 1);
    const int images = brief ? 1 : wanted < MAX_IMAGES ? (int)wanted + 1 : MAX_IMAGES;
    for (; status == COT_OK && data->count < images; data->count++)
        status = device_image_make(&data->image[data->count], bound, direction, queue, workspace_bytes);
    if (status == COT_OK)
        status = queue->calls->alloc(queue, 2 * data->copy_bytes * (size_t)images, (void **)&copies);
    for (int i = 0; status == COT_OK && i < count; i++) {
        char forced[160];
        snprintf(forced, sizeof forced, "%s=%s", cases->op->name, m[i].choice->kernel->name);
        status = open_queue(forced, &runners[i + 1].queue);
        runners[i + 1].direction = direction;
    }
    if (status == COT_OK)
        status = run_interleaved(runners, count + 1, data, copies, brief);
    const double copy = status == COT_OK ? median(runners[0].samples, runners[0].count) : 0;
    *bytes_per_second = copy > 0 ? 2 * (double)data->copy_bytes / copy : 0;
    for (int i = 0; status == COT_OK && i < count; i++)
        m[i].seconds = m[i].interleaved_seconds = median(runners[i + 1].samples, runners[i + 1].count);
    for (int i = 0; i < data->count; i++)
        device_image_free(&data->image[i], queue);
    if (queue != NULL)
        queue->calls->free(queue, copies);
    for (int i = count; i >= 0; i--)
        cot_queue_destroy(runners[i].queue);
    free(data);
    free(runners);
    return status;
}
