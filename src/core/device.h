/* SPDX-License-Identifier: Apache-2.0
 * device.h: the interface between queues and the CUDA backend. src/cuda/device.c implements it with the CUDA driver,
 * src/cuda/none.c implements it for builds without nvcc. Core depends on no other part of the backend. */
#ifndef COT_CORE_DEVICE_H
#define COT_CORE_DEVICE_H

#include <cotangent/core.h>

typedef struct cot_device cot_device;

/* Opens the driver, takes the context of options->stream (or the primary context of options->device), and loads the
 * embedded device code. Sets *isa to the instruction sets of the device. */
cot_status cot_device_open(const cot_queue_options *options, cot_device **out, uint32_t *isa);

/* Waits for the stream and frees everything. */
void cot_device_close(cot_device *device);

/* cot_device_enter makes the device's context the thread's current context. cot_device_leave restores the previous
 * one. */
cot_status cot_device_enter(cot_device *device);
void cot_device_leave(cot_device *device);

/* Returns the pool, after growing it to at least `bytes` if needed. Outgrown blocks are kept until the device is
 * closed. */
cot_status cot_device_pool(cot_device *device, size_t bytes, void **pool);

/* The CUcontext and the CUstream of the device. */
void cot_device_handles(const cot_device *device, void **context, void **stream);

/* The implementation of cot_queue_set_stream. */
cot_status cot_device_set_stream(cot_device *device, void *stream);

/* The implementation of cot_queue_check. */
cot_status cot_device_check(cot_device *device);

#endif
