/* SPDX-License-Identifier: Apache-2.0 */
#include "memory.h"

#include "core/status.h"
#include "device.h"

/* Runs driver calls in the queue's context, then returns from the function. `result` holds the first failure. */
#define IN_CONTEXT(d, what, calls)                                                          \
    do {                                                                                    \
        CUresult result = CUDA_SUCCESS;                                                     \
        cot_status status_ = cot_cuda_enter(d);                                             \
        if (status_ != COT_OK)                                                              \
            return status_;                                                                 \
        calls;                                                                              \
        cot_cuda_leave(d);                                                                  \
        return result == CUDA_SUCCESS ? COT_OK : cot_cuda_fail(&(d)->driver, result, what); \
    } while (0)

/* Makes the next driver call of a chain, unless an earlier call failed. */
#define THEN(expression) (result = result != CUDA_SUCCESS ? result : (expression))

static CUdeviceptr address(const void *memory)
{
    return (CUdeviceptr)(uintptr_t)memory;
}

cot_status cot_cuda_alloc(cot_queue *queue, size_t bytes, void **memory)
{
    cot_device *d = queue->device;
    CUdeviceptr created = 0;
    IN_CONTEXT(d, "allocating device memory", {
        THEN(d->driver.cuMemAlloc(&created, bytes > 0 ? bytes : 1));
        *memory = (void *)(uintptr_t)created;
    });
}

void cot_cuda_free(cot_queue *queue, void *memory)
{
    cot_device *d = queue->device;
    if (memory == NULL || cot_cuda_enter(d) != COT_OK)
        return;
    d->driver.cuMemFree(address(memory));
    cot_cuda_leave(d);
}

cot_status cot_cuda_alloc_host(cot_queue *queue, size_t bytes, void **memory)
{
    cot_device *d = queue->device;
    *memory = NULL;
    IN_CONTEXT(d, "allocating page-locked memory", THEN(d->driver.cuMemHostAlloc(memory, bytes > 0 ? bytes : 1, 0)));
}

void cot_cuda_free_host(cot_queue *queue, void *memory)
{
    cot_device *d = queue->device;
    if (memory == NULL || cot_cuda_enter(d) != COT_OK)
        return;
    d->driver.cuMemFreeHost(memory);
    cot_cuda_leave(d);
}

cot_status cot_cuda_copy_to_device_async(cot_queue *queue, void *device, const void *host, size_t bytes)
{
    cot_device *d = queue->device;
    if (bytes == 0)
        return COT_OK;
    IN_CONTEXT(d, "copying to the device", THEN(d->driver.cuMemcpyHtoDAsync(address(device), host, bytes, d->stream)));
}

cot_status cot_cuda_copy_to_host_async(cot_queue *queue, void *host, const void *device, size_t bytes)
{
    cot_device *d = queue->device;
    if (bytes == 0)
        return COT_OK;
    IN_CONTEXT(d, "copying from the device",
               THEN(d->driver.cuMemcpyDtoHAsync(host, address(device), bytes, d->stream)));
}

cot_status cot_cuda_copy_to_device(cot_queue *queue, void *device, const void *host, size_t bytes)
{
    cot_device *d = queue->device;
    IN_CONTEXT(d, "copying to the device", {
        if (bytes > 0)
            THEN(d->driver.cuMemcpyHtoDAsync(address(device), host, bytes, d->stream));
        THEN(d->driver.cuStreamSynchronize(d->stream));
    });
}

cot_status cot_cuda_copy_to_host(cot_queue *queue, void *host, const void *device, size_t bytes)
{
    cot_device *d = queue->device;
    IN_CONTEXT(d, "copying from the device", {
        if (bytes > 0)
            THEN(d->driver.cuMemcpyDtoHAsync(host, address(device), bytes, d->stream));
        THEN(d->driver.cuStreamSynchronize(d->stream));
    });
}

cot_status cot_cuda_memset_async(cot_queue *queue, void *memory, unsigned char byte, size_t bytes)
{
    cot_device *d = queue->device;
    IN_CONTEXT(d, "filling memory of the device", {
        if (bytes > 0)
            THEN(d->driver.cuMemsetD8Async(address(memory), byte, bytes, d->stream));
    });
}

cot_status cot_cuda_copy_on_device_async(cot_queue *queue, void *to, const void *from, size_t bytes)
{
    cot_device *d = queue->device;
    IN_CONTEXT(d, "copying within the device", {
        if (bytes > 0)
            THEN(d->driver.cuMemcpyDtoDAsync(address(to), address(from), bytes, d->stream));
    });
}

cot_status cot_cuda_stream_create(cot_queue *queue, void **stream)
{
    cot_device *d = queue->device;
    IN_CONTEXT(d, "creating a stream", {
        CUstream created = NULL;
        THEN(d->driver.cuStreamCreate(&created, CU_STREAM_NON_BLOCKING));
        *stream = created;
    });
}

void cot_cuda_stream_destroy(cot_queue *queue, void *stream)
{
    cot_device *d = queue->device;
    if (cot_cuda_enter(d) != COT_OK)
        return;
    d->driver.cuStreamDestroy(stream);
    cot_cuda_leave(d);
}

cot_status cot_cuda_event_create(cot_queue *queue, void **event)
{
    cot_device *d = queue->device;
    CUevent created = NULL;
    IN_CONTEXT(d, "creating an event", {
        THEN(d->driver.cuEventCreate(&created, CU_EVENT_DEFAULT));
        *event = created;
    });
}

void cot_cuda_event_destroy(cot_queue *queue, void *event)
{
    cot_device *d = queue->device;
    if (event == NULL || cot_cuda_enter(d) != COT_OK)
        return;
    d->driver.cuEventDestroy(event);
    cot_cuda_leave(d);
}

cot_status cot_cuda_event_record(cot_queue *queue, void *event)
{
    cot_device *d = queue->device;
    IN_CONTEXT(d, "recording an event", THEN(d->driver.cuEventRecord(event, d->stream)));
}

cot_status cot_cuda_stream_wait_event(cot_queue *queue, void *event)
{
    cot_device *d = queue->device;
    IN_CONTEXT(d, "waiting for an event", THEN(d->driver.cuStreamWaitEvent(d->stream, event, 0)));
}

cot_status cot_cuda_event_elapsed(cot_queue *queue, void *begin, void *end, double *seconds)
{
    cot_device *d = queue->device;
    IN_CONTEXT(d, "reading events", {
        float milliseconds = 0;
        THEN(d->driver.cuEventSynchronize(begin));
        THEN(d->driver.cuEventSynchronize(end));
        THEN(d->driver.cuEventElapsedTime(&milliseconds, begin, end));
        *seconds = 1e-3 * milliseconds;
    });
}

void cot_cuda_observe_launches(cot_queue *queue, void (*on_launch)(void *, const cot_launch_info *), void *context)
{
    queue->device->on_launch = on_launch;
    queue->device->on_launch_context = context;
}

struct cot_cuda_graph {
    CUgraphExec executable;
    CUevent begin, end;
};

cot_status cot_cuda_graph_capture(cot_queue *queue, cot_status (*enqueue)(void *), void *context,
                                  cot_cuda_graph **graph)
{
    cot_device *d = queue->device;
    cot_status enqueued = COT_OK;
    CUgraph captured = NULL;
    CUresult result = CUDA_SUCCESS;
    cot_cuda_graph *created = calloc(1, sizeof *created);
    *graph = created;
    if (created == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "capturing a graph: out of memory");
    const cot_status status = cot_cuda_enter(d);
    if (status != COT_OK)
        return status;
    THEN(d->driver.cuEventCreate(&created->begin, CU_EVENT_DEFAULT));
    THEN(d->driver.cuEventCreate(&created->end, CU_EVENT_DEFAULT));
    THEN(d->driver.cuStreamBeginCapture(d->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    if (result == CUDA_SUCCESS) {
        enqueued = enqueue(context);
        THEN(d->driver.cuStreamEndCapture(d->stream, &captured));
    }
    if (enqueued == COT_OK)
        THEN(d->driver.cuGraphInstantiateWithFlags(&created->executable, captured, 0));
    if (captured != NULL)
        d->driver.cuGraphDestroy(captured);
    cot_cuda_leave(d);
    if (enqueued != COT_OK)
        return enqueued;
    return result == CUDA_SUCCESS ? COT_OK : cot_cuda_fail(&d->driver, result, "capturing a graph");
}

cot_status cot_cuda_graph_replay(cot_queue *queue, cot_cuda_graph *graph, double *seconds)
{
    cot_device *d = queue->device;
    IN_CONTEXT(d, "timing a graph", {
        float milliseconds = 0;
        THEN(d->driver.cuEventRecord(graph->begin, d->stream));
        THEN(d->driver.cuGraphLaunch(graph->executable, d->stream));
        THEN(d->driver.cuEventRecord(graph->end, d->stream));
        THEN(d->driver.cuEventSynchronize(graph->end));
        THEN(d->driver.cuEventElapsedTime(&milliseconds, graph->begin, graph->end));
        *seconds = 1e-3 * milliseconds;
    });
}

void cot_cuda_graph_destroy(cot_queue *queue, cot_cuda_graph *graph)
{
    cot_device *d = queue->device;
    if (graph == NULL)
        return;
    if (cot_cuda_enter(d) == COT_OK) {
        if (graph->executable != NULL)
            d->driver.cuGraphExecDestroy(graph->executable);
        if (graph->begin != NULL)
            d->driver.cuEventDestroy(graph->begin);
        if (graph->end != NULL)
            d->driver.cuEventDestroy(graph->end);
        cot_cuda_leave(d);
    }
    free(graph);
}

cot_status cot_cuda_pci_bus_id(cot_queue *queue, char *pci_bus_id, size_t size)
{
    cot_device *d = queue->device;
    IN_CONTEXT(d, "asking for the device's place",
               THEN(d->driver.cuDeviceGetPCIBusId(pci_bus_id, (int)size, d->number)));
}

cot_status cot_cuda_describe(cot_queue *queue, char *name, size_t size, size_t *cache_bytes)
{
    cot_device *d = queue->device;
    IN_CONTEXT(d, "asking for the device's name", {
        int cache = 0;
        THEN(d->driver.cuDeviceGetName(name, (int)size, d->number));
        THEN(d->driver.cuDeviceGetAttribute(&cache, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, d->number));
        *cache_bytes = (size_t)cache;
    });
}
