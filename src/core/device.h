/* SPDX-License-Identifier: Apache-2.0
 * device.h: the interface between queues and the GPU backends. src/cuda/device.c implements it with the CUDA driver,
 * src/hip/device.c with the HIP runtime. none.c of each folder implements it for builds without that backend. Core
 * depends on no other part of a backend. */
#ifndef COT_CORE_DEVICE_H
#define COT_CORE_DEVICE_H

#include <cotangent/core.h>

/* The state of a GPU queue. Each backend defines the struct for its own files. */
typedef struct cot_device cot_device;

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
    /* Device memory for the program, as cuda/memory.h describes it. The library itself uses the pool alone. */
    cot_status (*alloc)(cot_queue *queue, size_t bytes, void **memory);
    void (*free)(cot_queue *queue, void *memory);
    cot_status (*copy_to_device)(cot_queue *queue, void *device, const void *host, size_t bytes);
    cot_status (*copy_to_host)(cot_queue *queue, void *host, const void *device, size_t bytes);
    cot_status (*memset_async)(cot_queue *queue, void *memory, unsigned char byte, size_t bytes);
    cot_status (*copy_on_device_async)(cot_queue *queue, void *to, const void *from, size_t bytes);
    /* The device's name, and the bytes of its last cache. */
    cot_status (*describe)(cot_queue *queue, char *name, size_t size, size_t *cache_bytes);
} cot_device_calls;

extern const cot_device_calls cot_cuda_calls, cot_hip_calls;

#endif
