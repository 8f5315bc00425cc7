/* SPDX-License-Identifier: Apache-2.0
 * bench_device.h: the benchmark's timing on a CUDA device: graphs of many calls, over as many copies of the data as push
 * each other out of the second-level cache. */
#ifndef COT_CHECK_BENCH_DEVICE_H
#define COT_CHECK_BENCH_DEVICE_H

#include "bench.h"
#include "bound_case.h"
#include "power.h"

/* A queue on a stream of its own, which can be captured and runs beside others, as the default stream cannot. Whatever
 * status comes back, close it. */
typedef struct device_queue {
    cot_queue *owner, *queue;
    void *stream;
    size_t cache_bytes;
} device_queue;

cot_status device_queue_open(device_queue *d, const char *kernels);
void device_queue_close(device_queue *d);

/* The time of one kernel on one case, of one call. Where products bound, on a GPU, that is the time under load: after seconds of
 * work the GPU is at its power limit, and its clock far below that of an idle one. */
typedef struct measurement {
    const cot_choice *choice;
    int threads; /* CPU */
    double seconds;
    double turn_seconds;  /* GPU: in turns with the other kernels and the copies */
    double burst_seconds; /* GPU, where products bound: one call, the GPU idle before; else 0 */
    double
        product_rate; /* GPU, where products bound: flops per second of products alone, measured as `seconds` was; else 0 */
    bool use_known; /* the next is what the GPU did under load */
    power_use use;
} measurement;

/* Times the `count` kernels of m on copies of `bound`, and, in turns with them, copies within the device whose arrays have as many
 * bytes together: the best one's bytes per second, read and written. Chosen kernels that products bound work for load_seconds
 * besides (0 = they do not). `load_rate` is the rate of products under that load by dtype, 0 before the first measurement. */
cot_status bench_device_case(const cot_op_cases *cases, const cot_case *c, const bound_case *bound, double load_seconds,
                             bool brief, measurement *m, int count, double *bytes_per_second, double *load_rate);

/* The kernels that do nothing but matrix products of a dtype: f32 by FMAs, 16-bit dtypes by the tensor cores. Load them once per
 * queue, then enqueue launches of product_rate_flops operations each. */
cot_status product_rate_load(cot_queue *queue);
cot_status product_rate_enqueue(cot_queue *queue, cot_dtype dtype);
double product_rate_flops(const cot_queue *queue, cot_dtype dtype);

void bench_device_name(char *text, size_t size);

/* Sorts the samples and returns the middle one. */
double median(double *samples, int count);

/* Each input read once, each output written once. */
double compulsory_bytes(const cot_direction *direction, const void *args);

#endif
