/* SPDX-License-Identifier: Apache-2.0
 * measurement.h: the time of one call of a kernel, and what the call has to do at least. */
#ifndef COT_BENCH_MEASUREMENT_H
#define COT_BENCH_MEASUREMENT_H

#include "cases/cases.h"
#include "power.h"

/* Matrix products bound a case that has more operations per compulsory byte than this: attention and dense convolution.
 * An H200 does 180 bf16 operations while it moves one byte. The measured ceilings do not decide this: on a busy machine
 * the copy is slow, and memory would seem to bound every case. */
enum { PRODUCTS_BOUND = 90 };

/* The time of one call of a kernel on one case. On a GPU, if products bound the case, it is the time under load: after
 * seconds of work the GPU is at its power limit, and its clock is far below an idle GPU's. */
typedef struct measurement {
    const cot_choice *choice;
    int threads; /* CPU */
    double seconds;
    double interleaved_seconds; /* GPU: interleaved with the other kernels and the copies */
    double burst_seconds;       /* GPU, if products bound the case: one call after idle time; else 0 */
    double product_rate;        /* if products bound the case: FLOP/s of products alone; else 0 */
    bool has_power;             /* whether `power` is valid: the GPU's averages under load */
    power_average power;
} measurement;

/* Sorts the samples and returns the middle one. */
double median(double *samples, int count);

/* The bytes of a call that reads each input once and writes each output once. */
double compulsory_bytes(const cot_direction *direction, const void *args);

/* More operations per compulsory byte than PRODUCTS_BOUND. */
bool case_is_product_bound(const cot_case *c, const cot_direction *direction);

#endif
