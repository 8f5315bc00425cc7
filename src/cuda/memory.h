/* SPDX-License-Identifier: Apache-2.0
 * memory.h: device memory and time for the program (check, bench, profile, run). The library itself allocates through
 * the queue's pool alone. In a build without CUDA every call fails with COT_NO_DEVICE. */
#ifndef COT_CUDA_MEMORY_H
#define COT_CUDA_MEMORY_H

#include <cotangent/core.h>

/* Device memory of a CUDA queue; the caller frees it. */
cot_status cot_cuda_alloc(cot_queue *queue, size_t bytes, void **memory);
void cot_cuda_free(cot_queue *queue, void *memory);

/* Copies on the queue's stream, and waits. */
cot_status cot_cuda_to_device(cot_queue *queue, void *device, const void *host, size_t bytes);
cot_status cot_cuda_to_host(cot_queue *queue, void *host, const void *device, size_t bytes);

/* A copy within the device, enqueued. */
cot_status cot_cuda_copy(cot_queue *queue, void *to, const void *from, size_t bytes);

/* A stream of the queue's device that can be captured, for a second queue; the caller ends it after that queue. */
cot_status cot_cuda_stream(cot_queue *queue, void **stream);
void cot_cuda_stream_end(cot_queue *queue, void *stream);

/* Captures what `enqueue` enqueues on the queue's stream (not the default one), replays it `replays` times, after one
 * replay to warm up, and writes the seconds of each. */
cot_status cot_cuda_time(cot_queue *queue, cot_status (*enqueue)(void *context), void *context, int replays,
                         double *seconds);

/* "NVIDIA H200", and the bytes of its second-level cache. */
cot_status cot_cuda_describe(cot_queue *queue, char *name, size_t size, size_t *cache_bytes);

#endif
