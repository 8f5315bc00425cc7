/* SPDX-License-Identifier: Apache-2.0
 * fake_cuda.h: what fake_cuda.c gives tests/emulator. */
#ifndef COT_TESTS_FAKE_CUDA_H
#define COT_TESTS_FAKE_CUDA_H

#include <cuda.h>
#include <time.h>

typedef struct fake_event {
    struct timespec time;
    int device;
    void *record; /* of tests/emulator */
} fake_event;

/* The number of the device of this thread's current context, and of a stream. */
int fake_cuda_device(void);
int fake_cuda_device_of(CUstream stream);

/* Notes the time of an event. CUDA_ERROR_INVALID_HANDLE for a stream of another device. */
CUresult fake_cuda_record(fake_event *event, CUstream stream);

/* tests/parallel/fake_nccl.c sets it in a thread whose stream waits for another rank for ever. */
extern _Thread_local int fake_cuda_stalled;

#endif
