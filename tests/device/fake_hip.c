/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_hip.c: a libamdhip64.so without a GPU, for tests of the library's messages about runtimes and devices. Device
 * memory is host memory, copies are performed, launches do nothing.
 *
 *   FAKE_HIP=FAULT  the fault of the runtime: old, no_device, no_start, empty, gfx1100, no_memory, no_host_memory,
 *                  capturing, launch
 *
 * All functions are weak: tests/emulator-amd replaces some of them. */
#include "hip/driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* no_memory: allocations of at least NO_MEMORY_BYTES fail. */
enum { NO_MEMORY_BYTES = 1 << 20, INVALID_DEVICE = 101, NOT_SUPPORTED = 801, LAUNCH_FAILURE = 719 };

static int current, handle; /* every handle is the address of `handle` */

static int fake_is(const char *fault)
{
    const char *wanted = getenv("FAKE_HIP");
    return wanted != NULL && strcmp(wanted, fault) == 0;
}

/* The declarations of the functions, which -Wmissing-prototypes asks for. */
#define DECLARE(name, parameters) int name parameters;
COT_HIP_FUNCTIONS(DECLARE)
const char *hipGetErrorName(int error);
const char *hipGetErrorString(int error);

#define WEAK __attribute__((weak))

WEAK int hipInit(unsigned flags)
{
    (void)flags;
    return fake_is("no_device") ? COT_HIP_NO_DEVICE : fake_is("no_start") ? NOT_SUPPORTED : COT_HIP_SUCCESS;
}

WEAK int hipRuntimeGetVersion(int *version)
{
    *version = fake_is("old") ? 50700000 : 60300000;
    return COT_HIP_SUCCESS;
}

WEAK const char *hipGetErrorName(int error)
{
    return error == COT_HIP_OUT_OF_MEMORY ? "hipErrorOutOfMemory"
           : error == NOT_SUPPORTED       ? "hipErrorNotSupported"
           : error == LAUNCH_FAILURE      ? "hipErrorLaunchFailure"
                                          : "hipErrorOther";
}

WEAK const char *hipGetErrorString(int error)
{
    (void)error;
    return "as the test asked";
}

WEAK int hipGetDeviceCount(int *count)
{
    *count = fake_is("empty") ? 0 : 2;
    return COT_HIP_SUCCESS;
}

WEAK int hipGetDevice(int *device)
{
    *device = current;
    return COT_HIP_SUCCESS;
}

WEAK int hipSetDevice(int device)
{
    if (device < 0 || device > 1)
        return INVALID_DEVICE;
    current = device;
    return COT_HIP_SUCCESS;
}

WEAK int hipDeviceGetName(char *name, int size, int device)
{
    snprintf(name, (size_t)size, "Fake AMD GPU %d", device);
    return COT_HIP_SUCCESS;
}

/* The stream 1 is of device 1, others of device 0. */
WEAK int hipStreamGetDevice(void *stream, int *device)
{
    *device = stream == (void *)1;
    return COT_HIP_SUCCESS;
}

WEAK int hipStreamIsCapturing(void *stream, int *status)
{
    (void)stream;
    *status = fake_is("capturing");
    return COT_HIP_SUCCESS;
}

WEAK int hipDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == COT_HIP_DEVICE_MULTIPROCESSORS ? 304 : 2048;
    return COT_HIP_SUCCESS;
}

/* A stream is memory that nobody uses. */
WEAK int hipStreamCreateWithFlags(void **stream, unsigned flags)
{
    (void)flags;
    *stream = malloc(1);
    return *stream != NULL ? COT_HIP_SUCCESS : COT_HIP_OUT_OF_MEMORY;
}

WEAK int hipStreamDestroy(void *stream)
{
    free(stream);
    return COT_HIP_SUCCESS;
}

WEAK int hipStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    (void)stream, (void)event, (void)flags;
    return COT_HIP_SUCCESS;
}

/* An event is the time of its record: copies and launches end before they return. */
WEAK int hipEventCreate(void **event)
{
    *event = calloc(1, sizeof(struct timespec));
    return *event != NULL ? COT_HIP_SUCCESS : COT_HIP_OUT_OF_MEMORY;
}

WEAK int hipEventDestroy(void *event)
{
    free(event);
    return COT_HIP_SUCCESS;
}

WEAK int hipEventRecord(void *event, void *stream)
{
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, event);
    return COT_HIP_SUCCESS;
}

WEAK int hipEventSynchronize(void *event)
{
    (void)event;
    return COT_HIP_SUCCESS;
}

WEAK int hipEventElapsedTime(float *milliseconds, void *begin, void *end)
{
    const struct timespec *b = begin, *e = end;
    *milliseconds = (float)(1e3 * (double)(e->tv_sec - b->tv_sec) + 1e-6 * (double)(e->tv_nsec - b->tv_nsec));
    return COT_HIP_SUCCESS;
}

WEAK int hipStreamSynchronize(void *stream)
{
    (void)stream;
    return COT_HIP_SUCCESS;
}

WEAK int hipMalloc(void **memory, size_t bytes)
{
    if (fake_is("no_memory") && bytes >= NO_MEMORY_BYTES)
        return COT_HIP_OUT_OF_MEMORY;
    *memory = malloc(bytes);
    return *memory != NULL ? COT_HIP_SUCCESS : COT_HIP_OUT_OF_MEMORY;
}

WEAK int hipFree(void *memory)
{
    free(memory);
    return COT_HIP_SUCCESS;
}

WEAK int hipHostMalloc(void **memory, size_t bytes, unsigned flags)
{
    (void)flags;
    *memory = fake_is("no_host_memory") ? NULL : malloc(bytes);
    return *memory != NULL ? COT_HIP_SUCCESS : COT_HIP_OUT_OF_MEMORY;
}

WEAK int hipHostFree(void *memory)
{
    free(memory);
    return COT_HIP_SUCCESS;
}

WEAK int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream)
{
    (void)kind, (void)stream;
    memcpy(to, from, bytes);
    return COT_HIP_SUCCESS;
}

WEAK int hipMemsetAsync(void *memory, int byte, size_t bytes, void *stream)
{
    (void)stream;
    memset(memory, byte, bytes);
    return COT_HIP_SUCCESS;
}

WEAK int hipModuleLoadData(void **module, const void *image)
{
    (void)image;
    *module = &handle;
    return fake_is("gfx1100") ? COT_HIP_NO_BINARY_FOR_GPU : COT_HIP_SUCCESS;
}

WEAK int hipModuleUnload(void *module)
{
    (void)module;
    return COT_HIP_SUCCESS;
}

WEAK int hipModuleGetFunction(void **function, void *module, const char *name)
{
    (void)module, (void)name;
    *function = &handle;
    return COT_HIP_SUCCESS;
}

WEAK int hipFuncGetAttribute(int *value, int attribute, void *function)
{
    (void)attribute, (void)function;
    *value = 0;
    return COT_HIP_SUCCESS;
}

WEAK int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads,
                                                            size_t shared_bytes)
{
    (void)function, (void)threads, (void)shared_bytes;
    *blocks = 0;
    return COT_HIP_SUCCESS;
}

WEAK int hipModuleLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                               unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void *stream,
                               void **parameters, void **extra)
{
    (void)function, (void)x, (void)y, (void)z, (void)threads_x, (void)threads_y, (void)threads_z, (void)shared_bytes;
    (void)stream, (void)parameters, (void)extra;
    return fake_is("launch") ? LAUNCH_FAILURE : COT_HIP_SUCCESS;
}
