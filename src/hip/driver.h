/* SPDX-License-Identifier: Apache-2.0
 * driver.h: the HIP runtime, loaded at run time. The build needs no header of ROCm: this file declares the functions
 * and the values that the library uses. All of them are the same in ROCm 6 and 7. */
#ifndef COT_HIP_DRIVER_H
#define COT_HIP_DRIVER_H

#include <cotangent/core.h>

/* The values of hipError_t, hipMemcpyKind and hipStreamCaptureStatus that the library tests or passes. */
enum {
    COT_HIP_SUCCESS = 0,
    COT_HIP_OUT_OF_MEMORY = 2,
    COT_HIP_NO_DEVICE = 100,
    COT_HIP_NO_BINARY_FOR_GPU = 209,
    COT_HIP_HOST_TO_DEVICE = 1,
    COT_HIP_DEVICE_TO_HOST = 2,
    COT_HIP_DEVICE_TO_DEVICE = 3,
    COT_HIP_CAPTURE_NONE = 0,
    COT_HIP_STREAM_NON_BLOCKING = 1
};

/* The values of hipFunction_attribute and hipDeviceAttribute_t. */
enum {
    COT_HIP_FUNCTION_SHARED_BYTES = 1,
    COT_HIP_FUNCTION_LOCAL_BYTES = 3,
    COT_HIP_FUNCTION_REGISTERS = 4,
    COT_HIP_DEVICE_MAX_THREADS_PER_MULTIPROCESSOR = 57,
    COT_HIP_DEVICE_MULTIPROCESSORS = 63
};

/* 10000000 * major + 100000 * minor + patch, as hipRuntimeGetVersion returns it. ROCm 6.0 is the first with gfx942. */
enum { COT_HIP_OLDEST_VERSION = 60000000 };

/* All functions that the library uses, as COT_HIP_FUNCTIONS(X): X(name, parameters). tests/device/fake_hip.c implements
 * each of them. Streams, modules and functions are opaque pointers. */
/* clang-format off */
#define COT_HIP_FUNCTIONS(X) \
    X(hipInit, (unsigned flags)) \
    X(hipRuntimeGetVersion, (int *version)) \
    X(hipGetDeviceCount, (int *count)) \
    X(hipGetDevice, (int *device)) \
    X(hipSetDevice, (int device)) \
    X(hipDeviceGetName, (char *name, int size, int device)) \
    X(hipStreamGetDevice, (void *stream, int *device)) \
    X(hipStreamIsCapturing, (void *stream, int *status)) \
    X(hipDeviceGetAttribute, (int *value, int attribute, int device)) \
    X(hipStreamSynchronize, (void *stream)) \
    X(hipStreamCreateWithFlags, (void **stream, unsigned flags)) \
    X(hipStreamDestroy, (void *stream)) \
    X(hipStreamWaitEvent, (void *stream, void *event, unsigned flags)) \
    X(hipEventCreate, (void **event)) \
    X(hipEventDestroy, (void *event)) \
    X(hipEventRecord, (void *event, void *stream)) \
    X(hipEventSynchronize, (void *event)) \
    X(hipEventElapsedTime, (float *milliseconds, void *begin, void *end)) \
    X(hipMalloc, (void **memory, size_t bytes)) \
    X(hipFree, (void *memory)) \
    X(hipHostMalloc, (void **memory, size_t bytes, unsigned flags)) \
    X(hipHostFree, (void *memory)) \
    X(hipMemcpyAsync, (void *to, const void *from, size_t bytes, int kind, void *stream)) \
    X(hipMemsetAsync, (void *memory, int byte, size_t bytes, void *stream)) \
    X(hipModuleLoadData, (void **module, const void *image)) \
    X(hipModuleUnload, (void *module)) \
    X(hipModuleGetFunction, (void **function, void *module, const char *name)) \
    X(hipFuncGetAttribute, (int *value, int attribute, void *function)) \
    X(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor, (int *blocks, void *function, int threads, size_t shared_bytes)) \
    X(hipModuleLaunchKernel, (void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y, \
                              unsigned threads_z, unsigned shared_bytes, void *stream, void **parameters, void **extra))
/* clang-format on */

typedef struct cot_hip_driver {
    void *library;
#define COT_HIP_MEMBER(name, parameters) int(*name) parameters;
    COT_HIP_FUNCTIONS(COT_HIP_MEMBER)
#undef COT_HIP_MEMBER
    const char *(*hipGetErrorName)(int error);
    const char *(*hipGetErrorString)(int error);
} cot_hip_driver;

/* Loads the HIP runtime and initialises it. Returns COT_NO_DEVICE with the message "CALL: ..." if the runtime is
 * missing, too old, or finds no device. */
cot_status cot_hip_driver_open(const char *call, cot_hip_driver *driver);
void cot_hip_driver_close(cot_hip_driver *driver);

/* Returns the status of a failed call, COT_OUT_OF_MEMORY or COT_DEVICE_ERROR, and sets the message
 * "what: hipError...: the runtime's description". */
cot_status cot_hip_fail(const cot_hip_driver *driver, int error, const char *what);

#endif
