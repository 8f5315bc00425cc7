/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_cuda.c: a libcuda.so.1 without a GPU. It is for tests of the library's messages about drivers and devices, and
 * of the program's commands around kernels. Device memory is host memory, copies are performed, launches do nothing.
 *
 *   FAKE_CUDA=FAULT       the fault of the driver: old, old12, old_ptx, no_device, no_start, empty, smNN, no_memory, or
 *                         flaky (the 12th large copy to the host delivers wrong bytes). smNN: the compute
 *                         capability; old_ptx: the driver of a GPU of 8.9 compiles no PTX of this version
 *   FAKE_CUDA_COUNT=FILE  the file that receives the number of allocations
 *   FAKE_CUDA_MULTIPROCESSORS=N  the number of multiprocessors (132)
 *   FAKE_CUDA_DEVICES=N          the number of devices (1), at most 8. An event of one device cannot be recorded on a
 *                                stream of another
 *
 * All functions are weak: tests/emulator replaces some of them. */
#include "fake_cuda.h"

#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* no_memory: allocations of at least NO_MEMORY_BYTES fail. */
enum {
    LARGE_COPY_BYTES = 64,
    FLAKY_COPY = 12,
    NO_MEMORY_BYTES = 1 << 20,
    MAX_DEVICES = 8,
    MAX_PUSHED = 16,
    MAX_STREAMS = 64
};

/* The handle of everything that has no device is the address of `handle`. */
static int capturing, handle, allocations, large_copies;

/* The handles of each device's primary context, and of the streams that are created on it. A device's handles are used
 * again after MAX_STREAMS of them. */
static char contexts[MAX_DEVICES], streams[MAX_DEVICES][MAX_STREAMS];
static int streams_created[MAX_DEVICES];

/* The devices of the contexts that this thread has pushed. */
static _Thread_local int pushed[MAX_PUSHED], pushed_count;

__attribute__((destructor)) static void write_count(void)
{
    const char *path = getenv("FAKE_CUDA_COUNT");
    FILE *file = path != NULL && allocations > 0 ? fopen(path, "w") : NULL;
    if (file == NULL)
        return;
    fprintf(file, "%d\n", allocations);
    fclose(file);
}

static int fake_is(const char *fault)
{
    const char *wanted = getenv("FAKE_CUDA");
    return wanted != NULL && strcmp(wanted, fault) == 0;
}

#define WEAK __attribute__((weak)) CUresult CUDAAPI
#define FAKE(name, parameters, body) \
    WEAK name parameters             \
    {                                \
        body;                        \
        return CUDA_SUCCESS;         \
    }
#define ANY_HANDLE (void *)&handle

/* ---- driver and device -------------------------------------------------------------------------------- */

WEAK cuInit(unsigned int flags)
{
    (void)flags;
    return fake_is("no_device")  ? CUDA_ERROR_NO_DEVICE
           : fake_is("no_start") ? CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
                                 : CUDA_SUCCESS;
}

WEAK cuGetErrorName(CUresult error, const char **text)
{
    *text = error == CUDA_ERROR_OUT_OF_MEMORY            ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == CUDA_ERROR_SYSTEM_DRIVER_MISMATCH ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
                                                         : "CUDA_ERROR_OTHER";
    return CUDA_SUCCESS;
}

/* sm89 is compute capability 8.9. */
static int capability(void)
{
    const char *fault = getenv("FAKE_CUDA");
    int number = fake_is("old_ptx") ? 89 : 90;
    if (fault != NULL)
        sscanf(fault, "sm%d", &number);
    return number;
}

WEAK cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    const char *multiprocessors = getenv("FAKE_CUDA_MULTIPROCESSORS");
    (void)device;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability() / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability() % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = multiprocessors != NULL ? atoi(multiprocessors) : 132;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        *value = fake_is("sm80") ? 163 * 1024 : 227 * 1024;
        break;
    default: *value = 1 << 16; break;
    }
    return CUDA_SUCCESS;
}

static int device_count(void)
{
    const char *text = getenv("FAKE_CUDA_DEVICES");
    const int count = text != NULL ? atoi(text) : 1;
    return count >= 1 && count <= MAX_DEVICES ? count : 1;
}

int fake_cuda_device(void)
{
    return pushed_count > 0 ? pushed[pushed_count - 1] : 0;
}

/* A stream that this file has not created is one of the current device. */
int fake_cuda_device_of(CUstream stream)
{
    const char *const made = (const char *)stream, *const all = streams[0];
    return made >= all && made < all + sizeof streams ? (int)(made - all) / MAX_STREAMS : fake_cuda_device();
}

WEAK cuCtxPushCurrent(CUcontext context)
{
    const char *const made = (const char *)context;
    if (pushed_count == MAX_PUSHED)
        return CUDA_ERROR_INVALID_VALUE;
    pushed[pushed_count++] = made >= contexts && made < contexts + MAX_DEVICES ? (int)(made - contexts) : 0;
    return CUDA_SUCCESS;
}

WEAK cuCtxPopCurrent(CUcontext *context)
{
    *context = (CUcontext)&contexts[fake_cuda_device()];
    pushed_count -= pushed_count > 0;
    return CUDA_SUCCESS;
}

/* clang-format off */
FAKE(cuDriverGetVersion, (int *version), *version = fake_is("old") ? 11080 : fake_is("old12") ? 12080 : 13000)
FAKE(cuGetErrorString, (CUresult error, const char **text), (void)error; *text = "as the test asked")
FAKE(cuDeviceGetCount, (int *count), *count = fake_is("empty") ? 0 : device_count())
FAKE(cuDeviceGet, (CUdevice *device, int number), *device = number; if (number >= device_count()) return CUDA_ERROR_INVALID_DEVICE)
FAKE(cuDeviceGetName, (char *name, int size, CUdevice device), (void)device; strncpy(name, "Fake GPU", (size_t)size))
FAKE(cuDeviceGetPCIBusId, (char *text, int size, CUdevice device), (void)device; strncpy(text, "0000:00:00.0", (size_t)size))
FAKE(cuDeviceTotalMem, (size_t *bytes, CUdevice device), (void)device; *bytes = (size_t)1 << 30)
FAKE(cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device), *context = (CUcontext)&contexts[device])
FAKE(cuDevicePrimaryCtxRelease, (CUdevice device), (void)device)
FAKE(cuCtxGetDevice, (CUdevice *device), *device = fake_cuda_device())
FAKE(cuCtxEnablePeerAccess, (CUcontext context, unsigned flags), (void)context; (void)flags)

/* ---- streams, graphs, events -------------------------------------------------------------------------- */

FAKE(cuStreamGetCtx, (CUstream stream, CUcontext *context),
     *context = (uintptr_t)stream == 16 ? (CUcontext)stream : (CUcontext)&contexts[fake_cuda_device_of(stream)])
FAKE(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *status),
     (void)stream; *status = capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE)
FAKE(cuStreamSynchronize, (CUstream stream), (void)stream)
FAKE(cuStreamCreate, (CUstream *stream, unsigned flags),
     (void)flags; const int device = fake_cuda_device();
     *stream = (CUstream)&streams[device][__atomic_fetch_add(&streams_created[device], 1, __ATOMIC_RELAXED) % MAX_STREAMS])
FAKE(cuStreamDestroy, (CUstream stream), (void)stream)
FAKE(cuStreamBeginCapture, (CUstream stream, CUstreamCaptureMode mode), (void)stream; (void)mode; capturing = 1)
FAKE(cuStreamEndCapture, (CUstream stream, CUgraph *graph), (void)stream; *graph = ANY_HANDLE; capturing = 0)
FAKE(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags), (void)stream; (void)event; (void)flags)
FAKE(cuGraphInstantiateWithFlags, (CUgraphExec *created, CUgraph graph, unsigned long long flags),
     (void)graph; (void)flags; *created = ANY_HANDLE)
FAKE(cuGraphLaunch, (CUgraphExec graph, CUstream stream), (void)graph; (void)stream)
FAKE(cuGraphExecDestroy, (CUgraphExec graph), (void)graph)
FAKE(cuGraphDestroy, (CUgraph graph), (void)graph)
FAKE(cuEventSynchronize, (CUevent event), (void)event)
FAKE(cuEventDestroy, (CUevent event), free(event))
/* clang-format on */

WEAK cuEventCreate(CUevent *created, unsigned flags)
{
    fake_event *e = calloc(1, sizeof *e);
    (void)flags;
    *created = (CUevent)e;
    if (e == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    e->device = fake_cuda_device();
    return CUDA_SUCCESS;
}

CUresult fake_cuda_record(fake_event *event, CUstream stream)
{
    if (event->device != fake_cuda_device_of(stream))
        return CUDA_ERROR_INVALID_HANDLE;
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    return CUDA_SUCCESS;
}

WEAK cuEventRecord(CUevent recorded, CUstream stream)
{
    return fake_cuda_record((fake_event *)recorded, stream);
}

__attribute__((visibility("default"))) _Thread_local int fake_cuda_stalled;

WEAK cuEventQuery(CUevent event)
{
    (void)event;
    return fake_cuda_stalled ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

WEAK cuEventElapsedTime(float *milliseconds, CUevent begin, CUevent end)
{
    const struct timespec *b = &((const fake_event *)begin)->time, *e = &((const fake_event *)end)->time;
    *milliseconds = (float)(1e3 * (double)(e->tv_sec - b->tv_sec) + 1e-6 * (double)(e->tv_nsec - b->tv_nsec));
    return CUDA_SUCCESS;
}

/* ---- memory ------------------------------------------------------------------------------------------- */

WEAK cuMemAlloc(CUdeviceptr *memory, size_t bytes)
{
    if (fake_is("no_memory") && bytes >= NO_MEMORY_BYTES)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *created = NULL;
    allocations++;
    const int failed = posix_memalign(&created, 256, bytes);
    *memory = (CUdeviceptr)created;
    return failed ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

WEAK cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    (void)stream;
    memcpy(to, (void *)from, bytes);
    if (bytes > LARGE_COPY_BYTES && ++large_copies == FLAKY_COPY && fake_is("flaky"))
        memset(to, 1, bytes);
    return CUDA_SUCCESS;
}

/* clang-format off */
FAKE(cuMemFree, (CUdeviceptr memory), free((void *)memory))
FAKE(cuMemHostAlloc, (void **memory, size_t bytes, unsigned flags), (void)flags; *memory = malloc(bytes))
FAKE(cuMemFreeHost, (void *memory), free(memory))
FAKE(cuMemGetInfo, (size_t *left, size_t *all), *left = *all = (size_t)1 << 30)
FAKE(cuMemcpyHtoDAsync, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream),
     (void)stream; memcpy((void *)to, from, bytes))
FAKE(cuMemcpyDtoDAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
     (void)stream; memcpy((void *)to, (void *)from, bytes))
FAKE(cuMemsetD8Async, (CUdeviceptr to, unsigned char byte, size_t bytes, CUstream stream),
     (void)stream; memset((void *)to, byte, bytes))

/* ---- kernels ------------------------------------------------------------------------------------------ */

FAKE(cuLibraryLoadData, (CUlibrary *library, const void *code, CUjit_option *a, void **b, unsigned c,
                         CUlibraryOption *d, void **e, unsigned f),
     (void)code; (void)a; (void)b; (void)c; (void)d; (void)e; (void)f; *library = ANY_HANDLE;
     if (fake_is("old_ptx")) return CUDA_ERROR_UNSUPPORTED_PTX_VERSION)
FAKE(cuLibraryUnload, (CUlibrary library), (void)library)
FAKE(cuLibraryGetKernel, (CUkernel *kernel, CUlibrary library, const char *name),
     (void)library; (void)name; *kernel = ANY_HANDLE)
FAKE(cuKernelGetFunction, (CUfunction *function, CUkernel kernel), (void)kernel; *function = ANY_HANDLE)
FAKE(cuKernelSetAttribute, (CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device),
     (void)attribute; (void)value; (void)kernel; (void)device)
FAKE(cuKernelGetAttribute, (int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device),
     (void)kernel; (void)device; *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 40 : 0)
FAKE(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *blocks, CUfunction function, int threads, size_t shared),
     (void)function; (void)threads; (void)shared; *blocks = 4)
FAKE(cuLaunchKernelEx, (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra),
     (void)config; (void)function; (void)parameters; (void)extra)
FAKE(cuTensorMapEncodeTiled, (CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                              const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                              const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                              CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill),
     (void)map; (void)type; (void)rank; (void)data; (void)sizes; (void)strides; (void)box; (void)steps;
     (void)interleave; (void)swizzle; (void)promotion; (void)fill)
/* clang-format on */
