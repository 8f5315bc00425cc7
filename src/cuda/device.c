/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"

#include "branches.h"
#include "core/cpu_features.h"
#include "core/status.h"
#include "fault_text.h"

#include <stdio.h>
#include <stdlib.h>

static const char create_call[] = "cot_queue_create";

/* Makes a driver call. If it fails, returns from the function with the driver's error message. */
#define CUDA(device, what, expression)                              \
    do {                                                            \
        const CUresult result_ = (device)->driver.expression;       \
        if (result_ != CUDA_SUCCESS)                                \
            return cot_cuda_fail(&(device)->driver, result_, what); \
    } while (0)

/* ---- opening and closing ------------------------------------------------------------------------------ */

static cot_status find_context(cot_device *d, const cot_queue_options *options)
{
    d->stream = options->stream;
    if (d->stream != NULL) {
        CUDA(d, create_call, cuStreamGetCtx(d->stream, &d->context));
        return COT_OK;
    }
    int count = 0;
    CUDA(d, create_call, cuDeviceGetCount(&count));
    if (count == 0)
        return cot_fail(COT_NO_DEVICE, "%s: the CUDA driver finds no device", create_call);
    if (options->device < 0 || options->device >= count)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: options.device is %d, expected 0 to %d", create_call,
                        (int)options->device, count - 1);
    CUDA(d, create_call, cuDeviceGet(&d->number, options->device));
    CUDA(d, create_call, cuDevicePrimaryCtxRetain(&d->context, d->number));
    d->primary = true;
    return COT_OK;
}

static cot_status read_device(cot_device *d, uint32_t *isa)
{
    int major = 0, minor = 0;
    CUDA(d, create_call, cuCtxGetDevice(&d->number));
    CUDA(d, create_call, cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, d->number));
    CUDA(d, create_call, cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, d->number));
    CUDA(d, create_call,
         cuDeviceGetAttribute(&d->multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, d->number));
    CUDA(d, create_call,
         cuDeviceGetAttribute(&d->max_shared_bytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, d->number));
    d->capability = 10 * major + minor;
    if (d->capability < 80) {
        char name[100] = "the device";
        d->driver.cuDeviceGetName(name, sizeof name, d->number);
        return cot_fail(COT_NO_DEVICE, "%s: %s has compute capability %d.%d, the kernels support 8.0 and later",
                        create_call, name, major, minor);
    }
    *isa = COT_ISA_SM80 | (d->capability == 90 ? COT_ISA_SM90 : 0);
    return COT_OK;
}

/* A GPU without machine code gets PTX, which a driver compiles only if it supports the version of CUDA that wrote it. */
static cot_status fail_old_driver_for_ptx(const cot_device *d, const char *call)
{
    int version = 0;
    char name[100] = "the device";
    d->driver.cuDeviceGetName(name, sizeof name, d->number);
    d->driver.cuDriverGetVersion(&version);
    return cot_fail(
        COT_NO_DEVICE,
        "%s: %s (compute capability %d.%d) needs PTX, which the CUDA driver is too old for: it supports CUDA "
        "%d.%d%s, this build's PTX needs CUDA %d.%d%s or later",
        call, name, d->capability / 10, d->capability % 10, version / 1000, version % 1000 / 10,
        cot_cuda_branch(version), CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10, cot_cuda_branch(CUDA_VERSION));
}

/* Loads an image. An image without code for this GPU is skipped: the dispatcher refuses its kernels by their
 * instruction set. */
static cot_status load_image(cot_device *d, const char *call, const unsigned char *image)
{
    if (d->library_count == COT_CUDA_MAX_IMAGES)
        return cot_fail(COT_DEVICE_ERROR, "%s: more than %d images", call, COT_CUDA_MAX_IMAGES);
    CUlibrary *library = &d->libraries[d->library_count];
    const CUresult result = d->driver.cuLibraryLoadData(library, image, NULL, NULL, 0, NULL, NULL, 0);
    if (result == CUDA_ERROR_NO_BINARY_FOR_GPU)
        *library = NULL;
    else if (result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION)
        return fail_old_driver_for_ptx(d, call);
    else if (result != CUDA_SUCCESS)
        return cot_cuda_fail(&d->driver, result, call);
    d->images[d->library_count++] = image;
    return COT_OK;
}

/* Loads all images when the queue is created. The first use of a kernel may be during a stream capture, where loading
 * is an error. */
static cot_status load_images(cot_device *d)
{
    cot_status status = COT_OK;
    for (int i = 0; status == COT_OK && cot_cuda_images[i] != NULL; i++)
        status = load_image(d, create_call, cot_cuda_images[i]);
    return status;
}

cot_status cot_cuda_add_image(cot_queue *queue, const unsigned char *image)
{
    static const char call[] = "cot_cuda_add_image";
    cot_device *d = queue->device;
    for (int i = 0; i < d->library_count; i++)
        if (d->images[i] == image)
            return COT_OK;
    cot_status status = cot_cuda_enter(d);
    if (status != COT_OK)
        return status;
    status = load_image(d, call, image);
    cot_cuda_leave(d);
    return status;
}

/* The word is zero when the queue has been created: kernels may run on another stream than the one of the options. */
static cot_status allocate_fault_word(cot_device *d)
{
    CUstream stream;
    CUDA(d, create_call, cuMemAlloc(&d->fault, sizeof(unsigned long long)));
    CUDA(d, create_call, cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUresult result = d->driver.cuMemsetD8Async(d->fault, 0, sizeof(unsigned long long), stream);
    if (result == CUDA_SUCCESS)
        result = d->driver.cuStreamSynchronize(stream);
    d->driver.cuStreamDestroy(stream);
    return result == CUDA_SUCCESS ? COT_OK : cot_cuda_fail(&d->driver, result, create_call);
}

static void close_device(cot_device *d)
{
    if (d->context != NULL && d->driver.cuCtxPushCurrent(d->context) == CUDA_SUCCESS) {
        if (d->fault != 0)
            d->driver.cuStreamSynchronize(d->stream);
        for (int i = 0; i < d->pool_count; i++)
            d->driver.cuMemFree(d->pools[i]);
        if (d->fault != 0)
            d->driver.cuMemFree(d->fault);
        for (int i = 0; i < d->library_count; i++)
            if (d->libraries[i] != NULL)
                d->driver.cuLibraryUnload(d->libraries[i]);
        cot_cuda_leave(d);
    }
    if (d->primary)
        d->driver.cuDevicePrimaryCtxRelease(d->number);
    cot_cuda_driver_close(&d->driver);
    free(d);
}

static cot_status open_device(const cot_queue_options *options, cot_device **out, uint32_t *isa)
{
    cot_device *d = calloc(1, sizeof *d);
    if (d == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for a queue", create_call);
    cot_status status = cot_cuda_driver_open(create_call, &d->driver);
    if (status != COT_OK) {
        free(d);
        return status;
    }
    status = find_context(d, options);
    if (status == COT_OK)
        status = cot_cuda_enter(d);
    if (status == COT_OK) {
        status = read_device(d, isa);
        if (status == COT_OK)
            status = load_images(d);
        if (status == COT_OK)
            status = allocate_fault_word(d);
        cot_cuda_leave(d);
    }
    if (status != COT_OK) {
        close_device(d);
        return status;
    }
    *out = d;
    return COT_OK;
}

cot_status cot_cuda_enter(cot_device *d)
{
    CUDA(d, "making the queue's context current", cuCtxPushCurrent(d->context));
    return COT_OK;
}

void cot_cuda_leave(cot_device *d)
{
    CUcontext popped;
    d->driver.cuCtxPopCurrent(&popped);
}

static void device_handles(const cot_device *d, void **context, void **stream)
{
    *context = d->context;
    *stream = d->stream;
}

static cot_status set_device_stream(cot_device *d, void *stream)
{
    static const char call[] = "cot_queue_set_stream";
    CUcontext context = d->context;
    if (stream != NULL && stream != d->stream)
        CUDA(d, call, cuStreamGetCtx(stream, &context));
    if (context != d->context)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: stream is of another context than the queue", call);
    d->stream = stream;
    return COT_OK;
}

/* ---- memory ------------------------------------------------------------------------------------------- */

static cot_status query_capture(cot_device *d, bool *capturing)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUDA(d, "asking whether the stream is being captured", cuStreamIsCapturing(d->stream, &status));
    *capturing = status != CU_STREAM_CAPTURE_STATUS_NONE;
    return COT_OK;
}

static cot_status grow_pool(cot_device *d, size_t bytes)
{
    bool capturing = false;
    const cot_status status = query_capture(d, &capturing);
    if (status != COT_OK)
        return status;
    if (capturing)
        return cot_fail(COT_WOULD_ALLOCATE,
                        "the queue's pool has %zu bytes, %zu are needed, and the stream is being captured: call "
                        "cot_queue_reserve before",
                        d->pool_bytes, bytes);
    if (d->pool_count == COT_CUDA_MAX_POOLS)
        return cot_fail(COT_OUT_OF_MEMORY,
                        "the queue's pool has grown %d times already: cot_queue_reserve more at once", d->pool_count);
    /* Grows by at least 50 %: the outgrown blocks are kept, so that many small steps would waste memory. */
    size_t new_bytes = bytes > d->pool_bytes + d->pool_bytes / 2 ? bytes : d->pool_bytes + d->pool_bytes / 2;
    CUresult result = d->driver.cuMemAlloc(&d->pools[d->pool_count], new_bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY && new_bytes > bytes)
        result = d->driver.cuMemAlloc(&d->pools[d->pool_count], new_bytes = bytes);
    if (result != CUDA_SUCCESS) {
        char what[100];
        snprintf(what, sizeof what, "the queue's pool cannot grow from %zu to %zu bytes", d->pool_bytes, bytes);
        return cot_cuda_fail(&d->driver, result, what);
    }
    d->pool_count++;
    d->pool_bytes = new_bytes;
    return COT_OK;
}

static cot_status device_pool(cot_device *d, size_t bytes, void **pool)
{
    if (bytes > d->pool_bytes) {
        cot_status status = cot_cuda_enter(d);
        if (status != COT_OK)
            return status;
        status = grow_pool(d, bytes);
        cot_cuda_leave(d);
        if (status != COT_OK)
            return status;
    }
    *pool = d->pool_count > 0 ? (void *)(uintptr_t)d->pools[d->pool_count - 1] : NULL;
    return COT_OK;
}

/* ---- faults ------------------------------------------------------------------------------------------- */

static cot_status check_fault_word(cot_device *d)
{
    static const char call[] = "cot_queue_check";
    unsigned long long word = 0;
    bool capturing = false;
    const cot_status status = query_capture(d, &capturing);
    if (status != COT_OK)
        return status;
    if (capturing)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: the queue's stream is being captured", call);
    CUDA(d, call, cuMemcpyDtoHAsync(&word, d->fault, sizeof word, d->stream));
    CUDA(d, call, cuStreamSynchronize(d->stream));
    if (word == 0)
        return COT_OK;
    CUDA(d, call, cuMemsetD8Async(d->fault, 0, sizeof word, d->stream));
    CUDA(d, call, cuStreamSynchronize(d->stream));
    return cot_fail_with_fault(word);
}

static cot_status check_device(cot_device *d)
{
    cot_status status = cot_cuda_enter(d);
    if (status != COT_OK)
        return status;
    status = check_fault_word(d);
    cot_cuda_leave(d);
    return status;
}

/* ---- kernels ------------------------------------------------------------------------------------------ */

static cot_status load_kernel(cot_device *d, const cot_cuda_kernel *kernel, CUkernel *found)
{
    for (int i = 0; i < d->library_count; i++) {
        if (d->images[i] != kernel->image)
            continue;
        if (d->libraries[i] == NULL)
            return cot_fail(COT_UNSUPPORTED, "%s has no code for this device", kernel->name);
        CUDA(d, kernel->name, cuLibraryGetKernel(found, d->libraries[i], kernel->name));
        if (kernel->shared_bytes > 0)
            CUDA(d, kernel->name,
                 cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel->shared_bytes, *found,
                                      d->number));
        return COT_OK;
    }
    return cot_fail(COT_DEVICE_ERROR, "%s is in none of the embedded images", kernel->name);
}

static cot_status find_entry(cot_device *d, const cot_cuda_kernel *kernel, int *entry)
{
    int index = (int)((uintptr_t)kernel / sizeof *kernel % COT_CUDA_MAX_KERNELS);
    for (int probes = 0; probes < COT_CUDA_MAX_KERNELS; probes++, index = (index + 1) % COT_CUDA_MAX_KERNELS) {
        *entry = index;
        if (d->kernels[index].key == kernel)
            return COT_OK;
        if (d->kernels[index].key != NULL)
            continue;
        const cot_status status = load_kernel(d, kernel, &d->kernels[index].kernel);
        if (status == COT_OK)
            d->kernels[index].key = kernel;
        return status;
    }
    return cot_fail(COT_DEVICE_ERROR, "%s: more than %d kernels on one queue", kernel->name, COT_CUDA_MAX_KERNELS);
}

cot_status cot_cuda_find_kernel(cot_device *device, const cot_cuda_kernel *kernel, CUkernel *found)
{
    int entry;
    const cot_status status = find_entry(device, kernel, &entry);
    if (status == COT_OK)
        *found = device->kernels[entry].kernel;
    return status;
}

static void report_launch(cot_device *d, const cot_cuda_kernel *kernel, CUkernel found, const cot_cuda_grid *grid)
{
    cot_launch_info facts = {.name = kernel->name,
                             .blocks = {grid->blocks[0], grid->blocks[1], grid->blocks[2]},
                             .threads = grid->threads,
                             .dynamic_shared = (int)grid->shared_bytes,
                             .multiprocessors = d->multiprocessors};
    int max_threads = 0;
    d->driver.cuKernelGetAttribute(&facts.registers, CU_FUNC_ATTRIBUTE_NUM_REGS, found, d->number);
    d->driver.cuKernelGetAttribute(&facts.local_bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, found, d->number);
    d->driver.cuKernelGetAttribute(&facts.static_shared, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, found, d->number);
    d->driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(&facts.blocks_per_multiprocessor, (CUfunction)found,
                                                          (int)grid->threads, grid->shared_bytes);
    d->driver.cuDeviceGetAttribute(&max_threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, d->number);
    facts.occupancy = max_threads > 0 ? (double)facts.blocks_per_multiprocessor * grid->threads / max_threads : 0;
    d->on_launch(d->on_launch_context, &facts);
}

cot_status cot_cuda_launch(cot_queue *queue, const cot_cuda_kernel *kernel, const cot_cuda_grid *grid,
                           const void *parameters)
{
    cot_device *d = queue->device;
    CUkernel found;
    const cot_status status = cot_cuda_find_kernel(d, kernel, &found);
    if (status != COT_OK)
        return status;
    CUlaunchAttribute attributes[2];
    unsigned attribute_count = 0;
    if (grid->dependent &&
        d->capability == 90) /* other devices run the PTX for 8.0, which has no griddepcontrol.wait */
        attributes[attribute_count++] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                                            .value.programmaticStreamSerializationAllowed = 1};
    if (grid->cluster > 0)
        attributes[attribute_count++] =
            (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .value.clusterDim = {grid->cluster, 1, 1}};
    if (grid->cluster > 8) /* the largest portable cluster size */
        CUDA(d, kernel->name,
             cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, found, d->number));
    CUlaunchConfig config = {
        .gridDimX = grid->blocks[0],
        .gridDimY = grid->blocks[1],
        .gridDimZ = grid->blocks[2],
        .blockDimX = grid->threads,
        .blockDimY = 1,
        .blockDimZ = 1,
        .sharedMemBytes = grid->shared_bytes,
        .hStream = d->stream,
        .attrs = attributes,
        .numAttrs = attribute_count,
    };
    void *arguments[] = {(void *)(uintptr_t)parameters};
    if (d->on_launch != NULL)
        report_launch(d, kernel, found, grid);
    CUDA(d, kernel->name, cuLaunchKernelEx(&config, (CUfunction)found, arguments, NULL));
    return COT_OK;
}

static cot_status encode_map(cot_queue *queue, CUtensorMap *map, cot_dtype dtype, int rank, const void *data,
                             const int64_t *sizes, const int64_t *strides, const int *box, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion promotion)
{
    static const CUtensorMapDataType types[] = {[COT_F32] = CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                                                [COT_F16] = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                                [COT_BF16] = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16};
    cuuint64_t size[5], stride[5];
    cuuint32_t boxes[5], steps[5];
    for (int axis = 0; axis < rank; axis++) {
        size[axis] = (cuuint64_t)sizes[axis];
        stride[axis] = axis + 1 < rank ? (cuuint64_t)strides[axis] : 0;
        boxes[axis] = (cuuint32_t)box[axis];
        steps[axis] = 1;
    }
    CUDA(queue->device, "encoding a tensor map",
         cuTensorMapEncodeTiled(map, types[dtype], (cuuint32_t)rank, (void *)(uintptr_t)data, size, stride, boxes,
                                steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return COT_OK;
}

cot_status cot_cuda_tensor_map(cot_queue *queue, CUtensorMap *map, cot_dtype dtype, int rank, const void *data,
                               const int64_t *sizes, const int64_t *strides, const int *box)
{
    return encode_map(queue, map, dtype, rank, data, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

cot_status cot_cuda_swizzled_map(cot_queue *queue, CUtensorMap *map, cot_dtype dtype, int rank, const void *data,
                                 const int64_t *sizes, const int64_t *strides, const int *box)
{
    return encode_map(queue, map, dtype, rank, data, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

const cot_device_calls cot_cuda_calls = {
    .open = open_device,
    .close = close_device,
    .enter = cot_cuda_enter,
    .leave = cot_cuda_leave,
    .pool = device_pool,
    .handles = device_handles,
    .set_stream = set_device_stream,
    .check = check_device,
    .alloc = cot_cuda_alloc,
    .free = cot_cuda_free,
    .copy_to_device = cot_cuda_copy_to_device,
    .copy_to_host = cot_cuda_copy_to_host,
    .memset_async = cot_cuda_memset_async,
    .copy_on_device_async = cot_cuda_copy_on_device_async,
    .describe = cot_cuda_describe,
    .alloc_host = cot_cuda_alloc_host,
    .free_host = cot_cuda_free_host,
    .copy_to_device_async = cot_cuda_copy_to_device_async,
    .copy_to_host_async = cot_cuda_copy_to_host_async,
    .stream_create = cot_cuda_stream_create,
    .stream_destroy = cot_cuda_stream_destroy,
    .event_create = cot_cuda_event_create,
    .event_destroy = cot_cuda_event_destroy,
    .event_record = cot_cuda_event_record,
    .stream_wait_event = cot_cuda_stream_wait_event,
    .event_elapsed = cot_cuda_event_elapsed,
    .observe_launches = cot_cuda_observe_launches,
};
