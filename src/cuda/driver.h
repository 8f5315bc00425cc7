/* SPDX-License-Identifier: Apache-2.0
 * driver.h: the CUDA driver, opened at run time, so that one binary serves machines with and without it. */
#ifndef COT_CUDA_DRIVER_H
#define COT_CUDA_DRIVER_H

#include <cotangent/core.h>
#include <cuda.h>

/* Every driver function in use; cuda.h's macros give the versioned names. tests/fake_cuda.c has each of them too. */
/* clang-format off */
#define COT_CUDA_FUNCTIONS(X) \
    X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString) \
    X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetAttribute) X(cuDeviceTotalMem) X(cuDeviceGetPCIBusId) \
    X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) \
    X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuCtxGetDevice) \
    X(cuStreamGetCtx) X(cuStreamIsCapturing) X(cuStreamSynchronize) X(cuStreamCreate) X(cuStreamDestroy) \
    X(cuStreamBeginCapture) X(cuStreamEndCapture) X(cuStreamWaitEvent) \
    X(cuGraphInstantiateWithFlags) X(cuGraphLaunch) X(cuGraphExecDestroy) X(cuGraphDestroy) \
    X(cuEventCreate) X(cuEventRecord) X(cuEventSynchronize) X(cuEventElapsedTime) X(cuEventDestroy) \
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

/* Opens libcuda.so.1 and initialises it. COT_NO_DEVICE, "CALL: ...", if it is missing, too old, or finds no device. */
cot_status cot_cuda_driver_open(const char *call, cot_cuda_driver *driver);
void cot_cuda_driver_close(cot_cuda_driver *driver);

/* The status of a failed driver call: COT_OUT_OF_MEMORY or COT_DEVICE_ERROR, "what: CUDA_ERROR_...: its words". */
cot_status cot_cuda_fail(const cot_cuda_driver *driver, CUresult result, const char *what);

#endif
