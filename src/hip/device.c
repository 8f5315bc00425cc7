/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"

#include "core/cpu_features.h"
#include "core/status.h"
#include "cuda/fault_text.h"

#include <stdio.h>
#include <stdlib.h>

static const char create_call[] = "cot_queue_create";

/* Makes a call of the runtime. If it fails, returns from the function with the runtime's error message. */
#define HIP(device, what, expression)                             \
    do {                                                          \
        const int error_ = (device)->driver.expression;           \
        if (error_ != COT_HIP_SUCCESS)                            \
            return cot_hip_fail(&(device)->driver, error_, what); \
    } while (0)

/* ---- the current device --------------------------------------------------------------------------------- */

/* Makes the queue's device the thread's current device. leave restores the previous one. */
static cot_status enter(cot_device *d)
{
    static const char what[] = "making the queue's device current";
    HIP(d, what, hipGetDevice(&d->previous));
    if (d->previous != d->number)
        HIP(d, what, hipSetDevice(d->number));
    return COT_OK;
}

static void leave(cot_device *d)
{
    if (d->previous != d->number)
        d->driver.hipSetDevice(d->previous);
}

/* ---- opening and closing -------------------------------------------------------------------------------- */

static cot_status find_device(cot_device *d, const cot_queue_options *options)
{
    int count = 0;
    d->stream = options->stream;
    HIP(d, create_call, hipGetDeviceCount(&count));
    if (count == 0)
        return cot_fail(COT_NO_DEVICE, "%s: the HIP runtime finds no device", create_call);
    if (d->stream != NULL) {
        HIP(d, create_call, hipStreamGetDevice(d->stream, &d->number));
        return COT_OK;
    }
    if (options->device < 0 || options->device >= count)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: options.device is %d, expected 0 to %d", create_call,
                        (int)options->device, count - 1);
    d->number = options->device;
    return COT_OK;
}

/* Loads all images when the queue is created. The first use of a kernel may be during a stream capture, where loading
 * is an error. */
static cot_status load_images(cot_device *d)
{
    for (int i = 0; cot_hip_images[i] != NULL; i++) {
        if (i == COT_HIP_MAX_IMAGES)
            return cot_fail(COT_DEVICE_ERROR, "%s: more than %d images", create_call, COT_HIP_MAX_IMAGES);
        const int error = d->driver.hipModuleLoadData(&d->modules[i], cot_hip_images[i]);
        if (error == COT_HIP_NO_BINARY_FOR_GPU) {
            char name[100] = "the device";
            d->driver.hipDeviceGetName(name, sizeof name, d->number);
            return cot_fail(COT_NO_DEVICE,
                            "%s: this build has no code for %s: the kernels support gfx90a (MI200) and gfx942 (MI300)",
                            create_call, name);
        }
        if (error != COT_HIP_SUCCESS)
            return cot_hip_fail(&d->driver, error, create_call);
        d->images[i] = cot_hip_images[i];
        d->module_count++;
    }
    return COT_OK;
}

static cot_status allocate_fault_word(cot_device *d)
{
    HIP(d, create_call, hipMalloc(&d->fault, sizeof(unsigned long long)));
    HIP(d, create_call, hipMemsetAsync(d->fault, 0, sizeof(unsigned long long), d->stream));
    HIP(d, create_call, hipStreamSynchronize(d->stream)); /* kernels may run on another stream */
    return COT_OK;
}

static void close_device(cot_device *d)
{
    if (d->driver.library != NULL && enter(d) == COT_OK) {
        if (d->fault != NULL) {
            d->driver.hipStreamSynchronize(d->stream);
            d->driver.hipFree(d->fault);
        }
        for (int i = 0; i < d->pool_count; i++)
            d->driver.hipFree(d->pools[i]);
        for (int i = 0; i < d->module_count; i++)
            d->driver.hipModuleUnload(d->modules[i]);
        leave(d);
    }
    cot_hip_driver_close(&d->driver);
    free(d);
}

static cot_status open_device(const cot_queue_options *options, cot_device **out, uint32_t *isa)
{
    cot_device *d = calloc(1, sizeof *d);
    if (d == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for a queue", create_call);
    cot_status status = cot_hip_driver_open(create_call, &d->driver);
    if (status == COT_OK)
        status = find_device(d, options);
    if (status == COT_OK)
        status = enter(d);
    if (status == COT_OK) {
        status = load_images(d);
        if (status == COT_OK)
            status = allocate_fault_word(d);
        leave(d);
    }
    if (status != COT_OK) {
        close_device(d);
        return status;
    }
    *isa = COT_ISA_CDNA;
    *out = d;
    return COT_OK;
}

static void handles(const cot_device *d, void **context, void **stream)
{
    *context = NULL; /* HIP has a current device instead */
    *stream = d->stream;
}

static cot_status set_stream(cot_device *d, void *stream)
{
    static const char call[] = "cot_queue_set_stream";
    int number = d->number;
    if (stream != NULL && stream != d->stream)
        HIP(d, call, hipStreamGetDevice(stream, &number));
    if (number != d->number)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: stream is of device %d, the queue of device %d", call, number,
                        d->number);
    d->stream = stream;
    return COT_OK;
}

/* ---- the pool ------------------------------------------------------------------------------------------- */

static cot_status query_capture(cot_device *d, bool *capturing)
{
    int status = COT_HIP_CAPTURE_NONE;
    HIP(d, "asking whether the stream is being captured", hipStreamIsCapturing(d->stream, &status));
    *capturing = status != COT_HIP_CAPTURE_NONE;
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
    if (d->pool_count == COT_HIP_MAX_POOLS)
        return cot_fail(COT_OUT_OF_MEMORY,
                        "the queue's pool has grown %d times already: cot_queue_reserve more at once", d->pool_count);
    /* Grows by at least 50 %: the outgrown blocks are kept, so that many small steps would waste memory. */
    size_t new_bytes = bytes > d->pool_bytes + d->pool_bytes / 2 ? bytes : d->pool_bytes + d->pool_bytes / 2;
    int error = d->driver.hipMalloc(&d->pools[d->pool_count], new_bytes);
    if (error == COT_HIP_OUT_OF_MEMORY && new_bytes > bytes)
        error = d->driver.hipMalloc(&d->pools[d->pool_count], new_bytes = bytes);
    if (error != COT_HIP_SUCCESS) {
        char what[100];
        snprintf(what, sizeof what, "the queue's pool cannot grow from %zu to %zu bytes", d->pool_bytes, bytes);
        return cot_hip_fail(&d->driver, error, what);
    }
    d->pool_count++;
    d->pool_bytes = new_bytes;
    return COT_OK;
}

static cot_status pool(cot_device *d, size_t bytes, void **memory)
{
    if (bytes > d->pool_bytes) {
        cot_status status = enter(d);
        if (status != COT_OK)
            return status;
        status = grow_pool(d, bytes);
        leave(d);
        if (status != COT_OK)
            return status;
    }
    *memory = d->pool_count > 0 ? d->pools[d->pool_count - 1] : NULL;
    return COT_OK;
}

/* ---- faults --------------------------------------------------------------------------------------------- */

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
    HIP(d, call, hipMemcpyAsync(&word, d->fault, sizeof word, COT_HIP_DEVICE_TO_HOST, d->stream));
    HIP(d, call, hipStreamSynchronize(d->stream));
    if (word == 0)
        return COT_OK;
    HIP(d, call, hipMemsetAsync(d->fault, 0, sizeof word, d->stream));
    HIP(d, call, hipStreamSynchronize(d->stream));
    return cot_fail_with_fault(word);
}

static cot_status check(cot_device *d)
{
    cot_status status = enter(d);
    if (status != COT_OK)
        return status;
    status = check_fault_word(d);
    leave(d);
    return status;
}

/* ---- kernels -------------------------------------------------------------------------------------------- */

static cot_status load_kernel(cot_device *d, const cot_hip_kernel *kernel, void **function)
{
    for (int i = 0; i < d->module_count; i++)
        if (d->images[i] == kernel->image) {
            HIP(d, kernel->name, hipModuleGetFunction(function, d->modules[i], kernel->name));
            return COT_OK;
        }
    return cot_fail(COT_DEVICE_ERROR, "%s is in none of the embedded images", kernel->name);
}

static cot_status find_kernel(cot_device *d, const cot_hip_kernel *kernel, void **function)
{
    int index = (int)((uintptr_t)kernel / sizeof *kernel % COT_HIP_MAX_KERNELS);
    for (int probes = 0; probes < COT_HIP_MAX_KERNELS; probes++, index = (index + 1) % COT_HIP_MAX_KERNELS) {
        if (d->kernels[index].key == NULL) {
            const cot_status status = load_kernel(d, kernel, &d->kernels[index].function);
            if (status != COT_OK)
                return status;
            d->kernels[index].key = kernel;
        }
        if (d->kernels[index].key == kernel) {
            *function = d->kernels[index].function;
            return COT_OK;
        }
    }
    return cot_fail(COT_DEVICE_ERROR, "%s: more than %d kernels on one queue", kernel->name, COT_HIP_MAX_KERNELS);
}

static void report_launch(cot_device *d, const cot_hip_kernel *kernel, void *function, const cot_hip_grid *grid)
{
    cot_launch_info facts = {.name = kernel->name,
                             .blocks = {grid->blocks[0], grid->blocks[1], grid->blocks[2]},
                             .threads = grid->threads,
                             .dynamic_shared = (int)grid->shared_bytes};
    int max_threads = 0;
    d->driver.hipFuncGetAttribute(&facts.registers, COT_HIP_FUNCTION_REGISTERS, function);
    d->driver.hipFuncGetAttribute(&facts.local_bytes, COT_HIP_FUNCTION_LOCAL_BYTES, function);
    d->driver.hipFuncGetAttribute(&facts.static_shared, COT_HIP_FUNCTION_SHARED_BYTES, function);
    d->driver.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(&facts.blocks_per_multiprocessor, function,
                                                                 (int)grid->threads, grid->shared_bytes);
    d->driver.hipDeviceGetAttribute(&facts.multiprocessors, COT_HIP_DEVICE_MULTIPROCESSORS, d->number);
    d->driver.hipDeviceGetAttribute(&max_threads, COT_HIP_DEVICE_MAX_THREADS_PER_MULTIPROCESSOR, d->number);
    facts.occupancy = max_threads > 0 ? (double)facts.blocks_per_multiprocessor * grid->threads / max_threads : 0;
    d->on_launch(d->on_launch_context, &facts);
}

cot_status cot_hip_launch(cot_queue *queue, const cot_hip_kernel *kernel, const cot_hip_grid *grid,
                          const void *parameters)
{
    cot_device *d = queue->device;
    void *function = NULL;
    const cot_status status = find_kernel(d, kernel, &function);
    if (status != COT_OK)
        return status;
    void *arguments[] = {(void *)(uintptr_t)parameters};
    if (d->on_launch != NULL)
        report_launch(d, kernel, function, grid);
    HIP(d, kernel->name,
        hipModuleLaunchKernel(function, grid->blocks[0], grid->blocks[1], grid->blocks[2], grid->threads, 1, 1,
                              grid->shared_bytes, d->stream, arguments, NULL));
    return COT_OK;
}

/* ---- memory of the program -------------------------------------------------------------------------------- */

/* Makes calls of the runtime with the device current. `calls` sets `error`. */
#define ON_DEVICE(d, what, calls)                                                           \
    do {                                                                                    \
        int error = COT_HIP_SUCCESS;                                                        \
        const cot_status status_ = enter(d);                                                \
        if (status_ != COT_OK)                                                              \
            return status_;                                                                 \
        calls;                                                                              \
        leave(d);                                                                           \
        return error == COT_HIP_SUCCESS ? COT_OK : cot_hip_fail(&(d)->driver, error, what); \
    } while (0)

/* Makes the next call of a chain, unless an earlier call failed. */
#define THEN(expression) (error = error != COT_HIP_SUCCESS ? error : (expression))

static cot_status allocate(cot_queue *queue, size_t bytes, void **memory)
{
    cot_device *d = queue->device;
    *memory = NULL;
    ON_DEVICE(d, "allocating device memory", THEN(d->driver.hipMalloc(memory, bytes > 0 ? bytes : 1)));
}

static void release(cot_queue *queue, void *memory)
{
    cot_device *d = queue->device;
    if (memory == NULL || enter(d) != COT_OK)
        return;
    d->driver.hipFree(memory);
    leave(d);
}

static cot_status copy_to_device(cot_queue *queue, void *device, const void *host, size_t bytes)
{
    cot_device *d = queue->device;
    ON_DEVICE(d, "copying to the device", {
        if (bytes > 0)
            THEN(d->driver.hipMemcpyAsync(device, host, bytes, COT_HIP_HOST_TO_DEVICE, d->stream));
        THEN(d->driver.hipStreamSynchronize(d->stream));
    });
}

static cot_status copy_to_host(cot_queue *queue, void *host, const void *device, size_t bytes)
{
    cot_device *d = queue->device;
    ON_DEVICE(d, "copying from the device", {
        if (bytes > 0)
            THEN(d->driver.hipMemcpyAsync(host, device, bytes, COT_HIP_DEVICE_TO_HOST, d->stream));
        THEN(d->driver.hipStreamSynchronize(d->stream));
    });
}

static cot_status memset_async(cot_queue *queue, void *memory, unsigned char byte, size_t bytes)
{
    cot_device *d = queue->device;
    ON_DEVICE(d, "filling memory of the device", {
        if (bytes > 0)
            THEN(d->driver.hipMemsetAsync(memory, byte, bytes, d->stream));
    });
}

static cot_status copy_on_device_async(cot_queue *queue, void *to, const void *from, size_t bytes)
{
    cot_device *d = queue->device;
    ON_DEVICE(d, "copying within the device",
              THEN(d->driver.hipMemcpyAsync(to, from, bytes, COT_HIP_DEVICE_TO_DEVICE, d->stream)));
}

/* The bytes are those of the Infinity Cache of MI300X, the largest. The runtime has the size of the L2 cache alone. */
static cot_status describe(cot_queue *queue, char *name, size_t size, size_t *cache_bytes)
{
    cot_device *d = queue->device;
    *cache_bytes = (size_t)256 << 20;
    ON_DEVICE(d, "reading the device's name", THEN(d->driver.hipDeviceGetName(name, (int)size, d->number)));
}

/* ---- for `cotangent profile` ------------------------------------------------------------------------------ */

static cot_status allocate_host(cot_queue *queue, size_t bytes, void **memory)
{
    cot_device *d = queue->device;
    *memory = NULL;
    ON_DEVICE(d, "allocating page-locked memory", THEN(d->driver.hipHostMalloc(memory, bytes > 0 ? bytes : 1, 0)));
}

static void release_host(cot_queue *queue, void *memory)
{
    cot_device *d = queue->device;
    if (memory == NULL || enter(d) != COT_OK)
        return;
    d->driver.hipHostFree(memory);
    leave(d);
}

static cot_status copy_async(cot_queue *queue, const char *what, void *to, const void *from, size_t bytes, int kind)
{
    cot_device *d = queue->device;
    if (bytes == 0)
        return COT_OK;
    ON_DEVICE(d, what, THEN(d->driver.hipMemcpyAsync(to, from, bytes, kind, d->stream)));
}

static cot_status copy_to_device_async(cot_queue *queue, void *device, const void *host, size_t bytes)
{
    return copy_async(queue, "copying to the device", device, host, bytes, COT_HIP_HOST_TO_DEVICE);
}

static cot_status copy_to_host_async(cot_queue *queue, void *host, const void *device, size_t bytes)
{
    return copy_async(queue, "copying from the device", host, device, bytes, COT_HIP_DEVICE_TO_HOST);
}

static cot_status stream_create(cot_queue *queue, void **stream)
{
    cot_device *d = queue->device;
    ON_DEVICE(d, "creating a stream", THEN(d->driver.hipStreamCreateWithFlags(stream, COT_HIP_STREAM_NON_BLOCKING)));
}

static void stream_destroy(cot_queue *queue, void *stream)
{
    cot_device *d = queue->device;
    if (enter(d) != COT_OK)
        return;
    d->driver.hipStreamDestroy(stream);
    leave(d);
}

static cot_status event_create(cot_queue *queue, void **event)
{
    cot_device *d = queue->device;
    *event = NULL;
    ON_DEVICE(d, "creating an event", THEN(d->driver.hipEventCreate(event)));
}

static void event_destroy(cot_queue *queue, void *event)
{
    cot_device *d = queue->device;
    if (event == NULL || enter(d) != COT_OK)
        return;
    d->driver.hipEventDestroy(event);
    leave(d);
}

static cot_status event_record(cot_queue *queue, void *event)
{
    cot_device *d = queue->device;
    ON_DEVICE(d, "recording an event", THEN(d->driver.hipEventRecord(event, d->stream)));
}

static cot_status stream_wait_event(cot_queue *queue, void *event)
{
    cot_device *d = queue->device;
    ON_DEVICE(d, "waiting for an event", THEN(d->driver.hipStreamWaitEvent(d->stream, event, 0)));
}

static cot_status event_elapsed(cot_queue *queue, void *begin, void *end, double *seconds)
{
    cot_device *d = queue->device;
    ON_DEVICE(d, "reading events", {
        float milliseconds = 0;
        THEN(d->driver.hipEventSynchronize(begin));
        THEN(d->driver.hipEventSynchronize(end));
        THEN(d->driver.hipEventElapsedTime(&milliseconds, begin, end));
        *seconds = 1e-3 * milliseconds;
    });
}

static void observe_launches(cot_queue *queue, void (*on_launch)(void *, const cot_launch_info *), void *context)
{
    queue->device->on_launch = on_launch;
    queue->device->on_launch_context = context;
}

const cot_device_calls cot_hip_calls = {
    .open = open_device,
    .close = close_device,
    .enter = enter,
    .leave = leave,
    .pool = pool,
    .handles = handles,
    .set_stream = set_stream,
    .check = check,
    .alloc = allocate,
    .free = release,
    .copy_to_device = copy_to_device,
    .copy_to_host = copy_to_host,
    .memset_async = memset_async,
    .copy_on_device_async = copy_on_device_async,
    .describe = describe,
    .alloc_host = allocate_host,
    .free_host = release_host,
    .copy_to_device_async = copy_to_device_async,
    .copy_to_host_async = copy_to_host_async,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .stream_wait_event = stream_wait_event,
    .event_elapsed = event_elapsed,
    .observe_launches = observe_launches,
};
