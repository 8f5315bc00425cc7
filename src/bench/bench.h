/* SPDX-License-Identifier: Apache-2.0
 * bench.h: times every kernel on the cases of the benchmark and compares it with ceilings measured on the same machine.
 */
#ifndef COT_BENCH_BENCH_H
#define COT_BENCH_BENCH_H

#include "cases/cases.h"

#include <jansson.h>
#include <signal.h>

typedef struct bench_options {
    const char *op;      /* NULL = all */
    const char *kernel;  /* only kernels whose name contains this; NULL = all */
    const char *only;    /* only cases whose description contains this; NULL = all */
    const cot_case *one; /* this case of `op` instead of the op's list; NULL = the list */
    cot_backend backend;
    int threads;                       /* 0 = all */
    bool chosen_only;                  /* only the kernel that dispatch chooses */
    const volatile sig_atomic_t *stop; /* no further case begins when it is not 0; NULL = never */
    bool brief;                        /* one sample of one call: for runs whose times do not matter */
    double load_seconds;               /* GPU: seconds of load with each chosen kernel that products bound; 0 = none */
    void (*progress)(void *context, double share, const char *what);
    void *context;
} bench_options;

/* Measures the cases and returns one object per row, which the caller releases with json_decref. Without a row, the
 * reason is on stderr.
 *   op direction kernel backend dtype layout shape options  the call
 *   threads ms                                              median time of a call
 *   bytes flops gbps tflops                                 compulsory bytes: each input read, each output written once
 *   ceiling ratio                                           best copy with the same footprint in the same run, GB/s;
 *                                                           gbps divided by it
 *   cycles16                                                core cycles of one thread for 16 elements of the first
 *                                                           tensor
 *   product_ceiling product_ratio                           if products bound the case: matrix products alone in the
 *                                                           same run, TFLOP/s, on a GPU measured as ms was; tflops
 *                                                           divided by it
 *   turn_ms burst_ms sm_mhz watts pj_per_flop               GPU; if burst_ms is present, ms was measured in the second
 *                                                           half of seconds of load: see bench_device.h
 *   footprint workspace_bytes chosen                        chosen: dispatch chooses the kernel
 *   device clock_ghz date commit version                    the clock is measured in the same run */
json_t *bench_run(const bench_options *options);

/* Prints the rows as a table. If products bound a case: TFLOP/s and the fraction of the product ceiling; otherwise GB/s
 * and the fraction of the copy's rate. */
void bench_print(const json_t *rows);

/* Draws the rows with gnuplot: a bar for each kernel, as a fraction of the ceiling. Returns NULL, or a message if it
 * fails. */
const char *bench_plot(const json_t *rows, const char *path);

/* Writes the name of this machine's processor, such as "Intel(R) Xeon(R) Processor, 2 cores". */
void device_name(char *text, size_t size);

#endif
