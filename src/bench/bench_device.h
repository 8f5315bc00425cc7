/* SPDX-License-Identifier: Apache-2.0
 * bench_device.h: times kernels on a CUDA device. It runs graphs of many calls over several copies of the data, which
 * evict each other from the L2 cache. */
#ifndef COT_BENCH_BENCH_DEVICE_H
#define COT_BENCH_BENCH_DEVICE_H

#include "check/bound_case.h"
#include "measurement.h"

/* A queue on its own stream, which can be captured and can overlap with other streams, unlike the default stream. Close
 * it even if opening it failed. */
typedef struct device_queue {
    cot_queue *owner, *queue;
    void *stream;
    size_t cache_bytes;
} device_queue;

cot_status device_queue_open(device_queue *d, cot_backend backend, const char *kernels);
void device_queue_close(device_queue *d);

/* Times the `count` kernels of m on copies of `bound`. Copies within the device, whose two arrays together have the
 * footprint of the case, are interleaved with them. *bytes_per_second is the rate of the best copy, with the bytes read
 * and written. Chosen kernels that products bound also run for load_seconds (0 = they do not). load_rate has the
 * product rate under load of each dtype, or 0 before its first measurement. */
cot_status bench_device_case(const cot_op_cases *cases, const cot_case *c, const bound_case *bound, double load_seconds,
                             bool brief, measurement *m, int count, double *bytes_per_second, double *load_rate);

/* Kernels that do only matrix products of a dtype: f32 by FMAs, 16-bit dtypes by the tensor cores. product_rate_load
 * loads them once per queue. Each launch by product_rate_enqueue does product_rate_flops operations. */
cot_status product_rate_load(cot_queue *queue);
cot_status product_rate_enqueue(cot_queue *queue, cot_dtype dtype);
double product_rate_flops(const cot_queue *queue, cot_dtype dtype);

void bench_device_name(char *text, size_t size);

#endif
