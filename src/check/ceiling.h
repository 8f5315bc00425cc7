/* SPDX-License-Identifier: Apache-2.0
 * ceiling.h: what this machine can do at best, measured in the same run as the kernels. */
#ifndef COT_CHECK_CEILING_H
#define COT_CHECK_CEILING_H

#include <cotangent/core.h>

/* Two buffers that a copy runs between: together as many bytes as the kernel beside it touches, so that both see the
 * same caches. */
typedef struct copy_ceiling {
    char *from, *to;
    size_t bytes; /* of one buffer */
} copy_ceiling;

copy_ceiling copy_ceiling_make(size_t footprint);
void copy_ceiling_free(copy_ceiling *c);

/* Copies once over the queue's threads: with memcpy, or past the caches with streaming stores. */
void copy_plain(const cot_queue *queue, const copy_ceiling *c);
void copy_streaming(const cot_queue *queue, const copy_ceiling *c);

/* Floating-point operations a second of matrix products over the queue's threads, from the first-level cache: of bf16
 * where the processor has AMX, of f32 for all other dtypes and processors. */
double measure_products(const cot_queue *queue, cot_dtype dtype);

/* The core clock in Hz under light load, from a chain of multiplications. */
double measure_clock(void);

/* Seconds on a clock that only goes forward. */
double now(void);

#endif
