/* SPDX-License-Identifier: Apache-2.0
 * driver.h: the CUDA driver, loaded at run time, so that one binary runs on machines with and without it. */
#ifndef COT_CUDA_DRIVER_H
#define COT_CUDA_DRIVER_H

#include <cotangent/core.h>
#include <cuda.h>

/* All driver functions that the library uses. The macros of cuda.h expand them to versioned names.
 * tests/device/fake_cuda.c implements each of them. */
/* clang-format off */
#define COT_CUDA_FUNCTIONS(X) \
    X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString) \
    X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetAttribute) X(cuDeviceTotalMem) X(cuDeviceGetPCIBusId) \
    X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) \
    X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuCtxGetDevice) X(cuCtxEnablePeerAccess) \
    X(cuStreamGetCtx) X(cuStreamIsCapturing) X(cuStreamSynchronize) X(cuStreamCreate) X(cuStreamDestroy) \
    X(cuStreamBeginCapture) X(cuStreamEndCapture) X(cuStreamWaitEvent) \
    X(cuGraphInstantiateWithFlags) X(cuGraphLaunch) X(cuGraphExecDestroy) X(cuGraphDestroy) \
    X(cuEventCreate) X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize) X(cuEventElapsedTime) X(cuEventDestroy) \
    X(cuMemAlloc) X(cuMemFree) X(cuMemHostAlloc) X(cuMemFreeHost) X(cuMemGetInfo) \
    X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuMemcpyDtoDAsync) X(cuMemsetD8Async) \
    X(cuLibraryLoadData) X(cuLibraryUnload) X(cuLibraryGetKernel) X(cuKernelGetFunction) \
    X(cuKernelSetAttribute) X(cuKernelGetAttribute) X(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
    X(cuLaunchKernelEx) X(cuTensorMapEncodeTiled)
/* clang-format on */

typedef struct cot_cuda_driver {
    void *library;
#define COT_CUDA_MEMBER(name) __typeof__(name) *name;
    COT_CUDA_FUNCTIONS(COT_CUDA_MEMBER)
#undef COT_CUDA_MEMBER
} cot_cuda_driver;

/* Loads libcuda.so.1 and initialises it. Returns COT_NO_DEVICE with the message "CALL: ..." if the driver is missing,
 * too old, or finds no device. */
cot_status cot_cuda_driver_open(const char *call, cot_cuda_driver *driver);
void cot_cuda_driver_close(cot_cuda_driver *driver);

/* Returns the status of a failed driver call, COT_OUT_OF_MEMORY or COT_DEVICE_ERROR, and sets the message
 * "what: CUDA_ERROR_...: the driver's description". */
cot_status cot_cuda_fail(const cot_cuda_driver *driver, CUresult result, const char *what);

#endif
