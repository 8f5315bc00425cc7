/* SPDX-License-Identifier: Apache-2.0
 * device.h: what a CUDA queue needs of the backend. src/cuda/device.c implements it over the driver, src/cuda/none.c
 * for builds without nvcc. Core knows no more of CUDA than this. */
#ifndef COT_CORE_DEVICE_H
#define COT_CORE_DEVICE_H

#include <cotangent/core.h>

typedef struct cot_device cot_device;

/* Opens the driver, the context of options->stream (or options->device's primary one), and loads the embedded device
 * code; *isa: what its kernels may use. */
cot_status cot_device_open(const cot_queue_options *options, cot_device **out, uint32_t *isa);

/* Waits for the stream and frees everything. */
void cot_device_close(cot_device *device);

/* Makes the device's context the thread's current one, and the one before current again. */
cot_status cot_device_enter(cot_device *device);
void cot_device_leave(cot_device *device);

/* The pool, grown to at least `bytes` where needed; blocks that it has outgrown live on until the device is closed. */
cot_status cot_device_pool(cot_device *device, size_t bytes, void **pool);

/* cot_queue_set_stream's body. */
cot_status cot_device_set_stream(cot_device *device, void *stream);

/* cot_queue_check's body. */
cot_status cot_device_check(cot_device *device);

#endif
