/* SPDX-License-Identifier: Apache-2.0
 * bench_hip.h: times kernels on a HIP device with the host's clock, which includes the launches. */
#ifndef COT_BENCH_BENCH_HIP_H
#define COT_BENCH_BENCH_HIP_H

#include "check/bound_case.h"
#include "measurement.h"

/* Times the `count` kernels of m on copies of `bound`, which evict each other from the caches (brief: one copy, one
 * call). Copies within the device, whose two arrays together have the footprint of the case, are interleaved with them.
 * *bytes_per_second is their rate, with the bytes read and written. */
cot_status bench_hip_case(const cot_op_cases *cases, const cot_case *c, const bound_case *bound, bool brief,
                          measurement *m, int count, double *bytes_per_second);

void bench_hip_name(char *text, size_t size);

#endif
