/* SPDX-License-Identifier: Apache-2.0
 * memory.h: device memory, streams, events and graphs for the command-line program (check, bench, profile, run).
 * The library itself allocates only through the queue's pool. In a build without CUDA every call fails with
 * COT_NO_DEVICE. */
#ifndef COT_CUDA_MEMORY_H
#define COT_CUDA_MEMORY_H

#include "core/device.h"

/* Allocates device memory of a CUDA queue. The caller frees it. */
cot_status cot_cuda_alloc(cot_queue *queue, size_t bytes, void **memory);
void cot_cuda_free(cot_queue *queue, void *memory);

/* Allocates page-locked host memory, whose copies to and from the device run asynchronously. */
cot_status cot_cuda_alloc_host(cot_queue *queue, size_t bytes, void **memory);
void cot_cuda_free_host(cot_queue *queue, void *memory);

/* Enqueue a copy to the device or to the host on the queue's stream. */
cot_status cot_cuda_copy_to_device_async(cot_queue *queue, void *device, const void *host, size_t bytes);
cot_status cot_cuda_copy_to_host_async(cot_queue *queue, void *host, const void *device, size_t bytes);

/* The same, and wait for the copy. */
cot_status cot_cuda_copy_to_device(cot_queue *queue, void *device, const void *host, size_t bytes);
cot_status cot_cuda_copy_to_host(cot_queue *queue, void *host, const void *device, size_t bytes);

/* Enqueues setting every byte. */
cot_status cot_cuda_memset_async(cot_queue *queue, void *memory, unsigned char byte, size_t bytes);

/* Enqueues a copy within the device. */
cot_status cot_cuda_copy_on_device_async(cot_queue *queue, void *to, const void *from, size_t bytes);

/* Creates a stream of the queue's device that can be captured, for a second queue. The caller destroys it after that
 * queue. */
cot_status cot_cuda_stream_create(cot_queue *queue, void **stream);
void cot_cuda_stream_destroy(cot_queue *queue, void *stream);

/* Events mark a point in the work of a queue. Another queue of the same device can wait for an event.
 * cot_cuda_event_elapsed waits for both events and returns the time between them. */
cot_status cot_cuda_event_create(cot_queue *queue, void **event);
void cot_cuda_event_destroy(cot_queue *queue, void *event);
cot_status cot_cuda_event_record(cot_queue *queue, void *event);
cot_status cot_cuda_stream_wait_event(cot_queue *queue, void *event);
cot_status cot_cuda_event_elapsed(cot_queue *queue, void *begin, void *end, double *seconds);

/* From now on `on_launch` is called before every launch on the queue; NULL = no function. */
void cot_cuda_observe_launches(cot_queue *queue, void (*on_launch)(void *context, const cot_launch_info *facts),
                               void *context);

/* A captured graph, which can be replayed. */
typedef struct cot_cuda_graph cot_cuda_graph;

/* Captures the work that `enqueue` enqueues on the queue's stream, which is not the default stream. The caller must end
 * the graph (cot_cuda_graph_destroy), also after a failure. */
cot_status cot_cuda_graph_capture(cot_queue *queue, cot_status (*enqueue)(void *context), void *context,
                                  cot_cuda_graph **graph);
void cot_cuda_graph_destroy(cot_queue *queue, cot_cuda_graph *graph);

/* Replays the graph once, waits, and writes the device time in seconds. */
cot_status cot_cuda_graph_replay(cot_queue *queue, cot_cuda_graph *graph, double *seconds);

/* The device's PCI bus id, such as "0000:3b:00.0", by which NVML finds the device. */
cot_status cot_cuda_pci_bus_id(cot_queue *queue, char *pci_bus_id, size_t size);

/* The device's name, such as "NVIDIA H200", and the size of its L2 cache. */
cot_status cot_cuda_describe(cot_queue *queue, char *name, size_t size, size_t *cache_bytes);

#endif
