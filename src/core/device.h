/* SPDX-License-Identifier: Apache-2.0
 * device.h: the interface between queues and the GPU backends. src/cuda/device.c implements it with the CUDA driver,
 * src/hip/device.c with the HIP runtime. none.c of each folder implements it for builds without that backend. Core
 * depends on no other part of a backend. */
#ifndef COT_CORE_DEVICE_H
#define COT_CORE_DEVICE_H

#include <cotangent/core.h>

/* The state of a GPU queue. Each backend defines the struct for its own files. */
typedef struct cot_device cot_device;

/* A launch, and the resources of its kernel. A multiprocessor is AMD's compute unit. */
typedef struct cot_launch_info {
    const char *name;
    unsigned blocks[3], threads;
    int registers, local_bytes;        /* per thread; AMD: vector and accumulation registers */
    int static_shared, dynamic_shared; /* bytes per block */
    int blocks_per_multiprocessor;     /* maximum number of resident blocks */
    double occupancy;                  /* resident threads divided by the multiprocessor's maximum */
    int multiprocessors;
} cot_launch_info;

/* The calls of a backend. `open` alone is set in a build without the backend. */
typedef struct cot_device_calls {
    /* Opens the driver, takes the context of options->stream (or that of options->device), and loads the embedded
     * device code. Sets *isa to the instruction sets of the device. */
    cot_status (*open)(const cot_queue_options *options, cot_device **out, uint32_t *isa);
    /* Waits for the stream and frees everything. */
    void (*close)(cot_device *device);
    /* enter makes the device's context the thread's current context. leave restores the previous one. */
    cot_status (*enter)(cot_device *device);
    void (*leave)(cot_device *device);
    /* Returns the pool, after growing it to at least `bytes` if needed. Outgrown blocks are kept until the device is
     * closed. */
    cot_status (*pool)(cot_device *device, size_t bytes, void **pool);
    /* The context (CUDA: CUcontext, HIP: NULL) and the stream of the device. */
    void (*handles)(const cot_device *device, void **context, void **stream);
    /* The implementations of cot_queue_set_stream and cot_queue_check. */
    cot_status (*set_stream)(cot_device *device, void *stream);
    cot_status (*check)(cot_device *device);
    /* Device memory for the program. The caller frees it. The library itself uses the pool alone. Both copies wait for
     * the copy. */
    cot_status (*alloc)(cot_queue *queue, size_t bytes, void **memory);
    void (*free)(cot_queue *queue, void *memory);
    cot_status (*copy_to_device)(cot_queue *queue, void *device, const void *host, size_t bytes);
    cot_status (*copy_to_host)(cot_queue *queue, void *host, const void *device, size_t bytes);
    cot_status (*memset_async)(cot_queue *queue, void *memory, unsigned char byte, size_t bytes);
    cot_status (*copy_on_device_async)(cot_queue *queue, void *to, const void *from, size_t bytes);
    /* The device's name, and the bytes of its last cache. */
    cot_status (*describe)(cot_queue *queue, char *name, size_t size, size_t *cache_bytes);
    /* For `cotangent profile`. Page-locked host memory, whose copies to and from the device run asynchronously. */
    cot_status (*alloc_host)(cot_queue *queue, size_t bytes, void **memory);
    void (*free_host)(cot_queue *queue, void *memory);
    cot_status (*copy_to_device_async)(cot_queue *queue, void *device, const void *host, size_t bytes);
    cot_status (*copy_to_host_async)(cot_queue *queue, void *host, const void *device, size_t bytes);
    /* A stream of the queue's device for a second queue. The caller destroys it after that queue. */
    cot_status (*stream_create)(cot_queue *queue, void **stream);
    void (*stream_destroy)(cot_queue *queue, void *stream);
    /* Events mark a point in the work of a queue. Another queue of the same device can wait for an event. event_elapsed
     * waits for both events and returns the time between them. */
    cot_status (*event_create)(cot_queue *queue, void **event);
    void (*event_destroy)(cot_queue *queue, void *event);
    cot_status (*event_record)(cot_queue *queue, void *event);
    cot_status (*stream_wait_event)(cot_queue *queue, void *event);
    cot_status (*event_elapsed)(cot_queue *queue, void *begin, void *end, double *seconds);
    /* From now on `on_launch` is called before every launch on the queue; NULL = no function. */
    void (*observe_launches)(cot_queue *queue, void (*on_launch)(void *context, const cot_launch_info *facts),
                             void *context);
} cot_device_calls;

extern const cot_device_calls cot_cuda_calls, cot_hip_calls;

#endif
