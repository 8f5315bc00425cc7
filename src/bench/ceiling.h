/* SPDX-License-Identifier: Apache-2.0
 * ceiling.h: the machine's ceilings, measured in the same run as the kernels. */
#ifndef COT_BENCH_CEILING_H
#define COT_BENCH_CEILING_H

#include <cotangent/core.h>

/* Two buffers that a copy reads and writes. Together they have as many bytes as the kernel touches that is compared
 * with them, so that both have the same cache hits. */
typedef struct copy_ceiling {
    char *from, *to;
    size_t bytes; /* bytes of one buffer */
} copy_ceiling;

copy_ceiling copy_ceiling_make(size_t footprint);
void copy_ceiling_free(copy_ceiling *c);

/* Copy the buffer once on the queue's threads: copy_plain with memcpy, copy_streaming with streaming stores that bypass
 * the caches. */
void copy_plain(const cot_queue *queue, const copy_ceiling *c);
void copy_streaming(const cot_queue *queue, const copy_ceiling *c);

/* Measures the FLOP/s of matrix products on the queue's threads, with operands in the L1 cache. With AMX:
 * bf16, or f16 and f32 split into two or three bf16. Otherwise f32. */
double measure_products(const cot_queue *queue, cot_dtype dtype);

/* Measures the core clock in Hz under light load, by a chain of multiplications. */
double measure_clock(void);

/* Seconds of a monotonic clock. */
double now(void);

#endif
