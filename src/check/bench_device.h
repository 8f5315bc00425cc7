/* SPDX-License-Identifier: Apache-2.0
 * bench_device.h: the benchmark's timing on a CUDA device: graphs of many calls, over as many copies of the data as push
 * each other out of the second-level cache. */
#ifndef COT_CHECK_BENCH_DEVICE_H
#define COT_CHECK_BENCH_DEVICE_H

#include "bench.h"
#include "bound_case.h"

/* A queue on a stream of its own, which can be captured and runs beside others, as the default stream cannot. Whatever
 * status comes back, close it. */
typedef struct device_queue {
    cot_queue *owner, *queue;
    void *stream;
    size_t cache_bytes;
} device_queue;

cot_status device_queue_open(device_queue *d, const char *kernels);
void device_queue_close(device_queue *d);

/* The time of one kernel on one case. */
typedef struct measurement {
    const cot_choice *choice;
    int threads; /* CPU */
    double seconds;
} measurement;

/* Times the chosen kernel on copies of `bound`. */
cot_status bench_device_kernel(const cot_op_cases *cases, const cot_case *c, const bound_case *bound, measurement *m);

/* Bytes per second, read and written, of the best copy within the device whose arrays have `footprint` bytes together. */
cot_status bench_device_copy(double footprint, double *bytes_per_second);

void bench_device_name(char *text, size_t size);

/* Sorts the samples and returns the middle one. */
double median(double *samples, int count);

/* Each input read once, each output written once. */
double compulsory_bytes(const cot_direction *direction, const void *args);

#endif
