/* SPDX-License-Identifier: Apache-2.0
 * memory.h: device memory and time for the program (check, bench, profile, run). The library itself allocates through
 * the queue's pool alone. In a build without CUDA every call fails with COT_NO_DEVICE. */
#ifndef COT_CUDA_MEMORY_H
#define COT_CUDA_MEMORY_H

#include <cotangent/core.h>

/* Device memory of a CUDA queue; the caller frees it. */
cot_status cot_cuda_alloc(cot_queue *queue, size_t bytes, void **memory);
void cot_cuda_free(cot_queue *queue, void *memory);

/* Page-locked memory of the host, from which and to which copies run beside the host's own work. */
cot_status cot_cuda_alloc_host(cot_queue *queue, size_t bytes, void **memory);
void cot_cuda_free_host(cot_queue *queue, void *memory);

/* Copies on the queue's stream, enqueued. */
cot_status cot_cuda_send(cot_queue *queue, void *device, const void *host, size_t bytes);
cot_status cot_cuda_fetch(cot_queue *queue, void *host, const void *device, size_t bytes);

/* Copies on the queue's stream, and waits. */
cot_status cot_cuda_to_device(cot_queue *queue, void *device, const void *host, size_t bytes);
cot_status cot_cuda_to_host(cot_queue *queue, void *host, const void *device, size_t bytes);

/* Sets every byte, enqueued. */
cot_status cot_cuda_fill(cot_queue *queue, void *memory, unsigned char byte, size_t bytes);

/* A copy within the device, enqueued. */
cot_status cot_cuda_copy(cot_queue *queue, void *to, const void *from, size_t bytes);

/* A stream of the queue's device that can be captured, for a second queue; the caller ends it after that queue. */
cot_status cot_cuda_stream(cot_queue *queue, void **stream);
void cot_cuda_stream_end(cot_queue *queue, void *stream);

/* Events: a moment in the work of a queue, which another queue of the same device can wait for. cot_cuda_elapsed waits
 * for both. */
cot_status cot_cuda_event(cot_queue *queue, void **event);
void cot_cuda_event_end(cot_queue *queue, void *event);
cot_status cot_cuda_record(cot_queue *queue, void *event);
cot_status cot_cuda_wait_for(cot_queue *queue, void *event);
cot_status cot_cuda_elapsed(cot_queue *queue, void *begin, void *end, double *seconds);

/* A launch, and what its kernel takes of a multiprocessor. */
typedef struct cot_cuda_launch_facts {
    const char *name;
    unsigned blocks[3], threads;
    int registers, local_bytes;        /* of a thread */
    int static_shared, dynamic_shared; /* bytes of a block */
    int blocks_per_multiprocessor;     /* that fit */
    double occupancy;                  /* their threads, over what a multiprocessor holds */
    int multiprocessors;
} cot_cuda_launch_facts;

/* From now on `seen` hears of every launch on the queue, before it happens; NULL = nobody does. */
void cot_cuda_observe(cot_queue *queue, void (*seen)(void *context, const cot_cuda_launch_facts *facts), void *context);

/* Work that can be replayed. */
typedef struct cot_cuda_graph cot_cuda_graph;

/* Captures what `enqueue` enqueues on the queue's stream (not the default one). Whatever status comes back, end the graph. */
cot_status cot_cuda_capture(cot_queue *queue, cot_status (*enqueue)(void *context), void *context,
                            cot_cuda_graph **graph);
void cot_cuda_graph_end(cot_queue *queue, cot_cuda_graph *graph);

/* Replays it once, waits, and writes the seconds that the device took. */
cot_status cot_cuda_replay(cot_queue *queue, cot_cuda_graph *graph, double *seconds);

/* "0000:3b:00.0": the device's place on the PCI bus, by which NVML knows it. */
cot_status cot_cuda_bus(cot_queue *queue, char *pci_bus_id, size_t size);

/* "NVIDIA H200", and the bytes of its second-level cache. */
cot_status cot_cuda_describe(cot_queue *queue, char *name, size_t size, size_t *cache_bytes);

#endif
