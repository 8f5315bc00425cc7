/* SPDX-License-Identifier: Apache-2.0
 * bench.h: the time of every kernel on the cases of the benchmark, beside the machine's own ceilings. */
#ifndef COT_CHECK_BENCH_H
#define COT_CHECK_BENCH_H

#include "core/cases.h"

#include <jansson.h>
#include <signal.h>

typedef struct bench_options {
    const char *op;      /* NULL = all */
    const char *kernel;  /* only kernels whose name contains this; NULL = all */
    const char *only;    /* only cases whose description contains this; NULL = all */
    const cot_case *one; /* this case of `op` instead of the op's list; NULL = the list */
    cot_backend backend;
    int threads;                       /* 0 = all */
    bool chosen_only;                  /* only the kernel that dispatch would take */
    const volatile sig_atomic_t *stop; /* once it is not 0, no further case is begun; NULL = never */
    bool brief;                        /* one call a sample, one sample: for what is run and not measured */
    double load_seconds;               /* GPU: of load on chosen kernels that products bound; 0 = none */
    void (*progress)(void *context, double share, const char *what);
    void *context;
} bench_options;

/* Matrix products bound a case that has more operations per compulsory byte than this: attention and dense convolution. An
 * H200 does 180 bf16 operations while it moves a byte. The measured ceilings do not decide: on a busy machine the copy is slow,
 * and every case would be bound by memory. */
enum { PRODUCTS_BOUND = 90 };

/* Measures, and returns one object a row (the caller's, to be released with json_decref); without a row, the reason is on
 * stderr:
 *   op direction kernel backend dtype layout shape options    what was run
 *   threads ms                                                median time of a call
 *   bytes flops gbps tflops                                   compulsory bytes: each input read, each output written once
 *   ceiling ratio                                             best copy at the same footprint in the same run, GB/s; gbps over it
 *   cycles16                                                  core cycles of one thread for 16 elements of the first tensor
 *   product_ceiling product_ratio                              where products bound: matrix products alone in the same run,
 *                                                              TFLOP/s, on a GPU measured as ms was; tflops over it
 *   turn_ms burst_ms sm_mhz watts pj_per_flop                  GPU; ms is that of the second half of seconds of load where
 *                                                              products bound and burst_ms is there: see bench_device.h
 *   footprint workspace_bytes chosen                          chosen: dispatch would take it
 *   device clock_ghz date commit version                      where and when; the clock is measured in the same run */
json_t *bench_run(const bench_options *options);

/* The rows as a table for people: TFLOP/s and the share of the product ceiling where products bound a case, else GB/s and the
 * share of copy. */
void bench_print(const json_t *rows);

/* The rows as a drawing, through gnuplot: a bar a kernel, as a share of the ceiling. Returns NULL or what failed. */
const char *bench_plot(const json_t *rows, const char *path);

/* "Intel(R) Xeon(R) Processor, 2 cores": the processor this runs on. */
void device_name(char *text, size_t size);

#endif
