/* SPDX-License-Identifier: Apache-2.0
 *
 * cudart.c: a libcudart over the emulator's driver, with the functions that examples/c/attention_cuda.c calls. The CUDA
 * runtime itself calls functions of the driver that have no documentation. */
#include "emulator.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

static cudaError_t status_of(CUresult result)
{
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}

cudaError_t cudaMalloc(void **memory, size_t bytes)
{
    CUdeviceptr at = 0;
    const cudaError_t status = status_of(cuMemAlloc(&at, bytes));
    *memory = (void *)(uintptr_t)at;
    return status;
}

cudaError_t cudaFree(void *memory)
{
    return status_of(cuMemFree((CUdeviceptr)(uintptr_t)memory));
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    if (kind == cudaMemcpyHostToDevice)
        return status_of(cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)to, from, bytes, NULL));
    if (kind == cudaMemcpyDeviceToHost)
        return status_of(cuMemcpyDtoHAsync(to, (CUdeviceptr)(uintptr_t)from, bytes, NULL));
    return cudaErrorInvalidValue;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return status_of(cuStreamCreate(stream, CU_STREAM_DEFAULT));
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    return status_of(cuStreamDestroy(stream));
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaSuccess ? "no error" : "an error of the emulator";
}
