/* SPDX-License-Identifier: Apache-2.0
 *
 * none.c: stubs of the CUDA backend for a build without nvcc. No CUDA queue can be created. */
#include "core/device.h"
#include "core/status.h"
#include "memory.h"

static cot_status fail_open(const cot_queue_options *options, cot_device **out, uint32_t *isa)
{
    (void)options, (void)out, (void)isa;
    return cot_fail(COT_NO_DEVICE,
                    "cot_queue_create: built without kernels for NVIDIA GPUs (no nvcc was found, or COT_CUDA=OFF)");
}

/* The other calls need a device. */
const cot_device_calls cot_cuda_calls = {.open = fail_open};

/* The functions below are never called, since no device can be opened. */
cot_status cot_cuda_alloc(cot_queue *queue, size_t bytes, void **memory)
{
    (void)queue, (void)bytes, (void)memory;
    return COT_NO_DEVICE;
}

void cot_cuda_free(cot_queue *queue, void *memory)
{
    (void)queue, (void)memory;
}

cot_status cot_cuda_alloc_host(cot_queue *queue, size_t bytes, void **memory)
{
    (void)queue, (void)bytes, (void)memory;
    return COT_NO_DEVICE;
}

void cot_cuda_free_host(cot_queue *queue, void *memory)
{
    (void)queue, (void)memory;
}

cot_status cot_cuda_copy_to_device_async(cot_queue *queue, void *device, const void *host, size_t bytes)
{
    (void)queue, (void)device, (void)host, (void)bytes;
    return COT_NO_DEVICE;
}

cot_status cot_cuda_copy_to_host_async(cot_queue *queue, void *host, const void *device, size_t bytes)
{
    (void)queue, (void)host, (void)device, (void)bytes;
    return COT_NO_DEVICE;
}

cot_status cot_cuda_copy_to_device(cot_queue *queue, void *device, const void *host, size_t bytes)
{
    (void)queue, (void)device, (void)host, (void)bytes;
    return COT_NO_DEVICE;
}

cot_status cot_cuda_copy_to_host(cot_queue *queue, void *host, const void *device, size_t bytes)
{
    (void)queue, (void)host, (void)device, (void)bytes;
    return COT_NO_DEVICE;
}

cot_status cot_cuda_memset_async(cot_queue *queue, void *memory, unsigned char byte, size_t bytes)
{
    (void)queue, (void)memory, (void)byte, (void)bytes;
    return COT_NO_DEVICE;
}

cot_status cot_cuda_copy_on_device_async(cot_queue *queue, void *to, const void *from, size_t bytes)
{
    (void)queue, (void)to, (void)from, (void)bytes;
    return COT_NO_DEVICE;
}

cot_status cot_cuda_stream_create(cot_queue *queue, void **stream)
{
    (void)queue, (void)stream;
    return COT_NO_DEVICE;
}

void cot_cuda_stream_destroy(cot_queue *queue, void *stream)
{
    (void)queue, (void)stream;
}

cot_status cot_cuda_event_create(cot_queue *queue, void **event)
{
    (void)queue, (void)event;
    return COT_NO_DEVICE;
}

void cot_cuda_event_destroy(cot_queue *queue, void *event)
{
    (void)queue, (void)event;
}

cot_status cot_cuda_event_record(cot_queue *queue, void *event)
{
    (void)queue, (void)event;
    return COT_NO_DEVICE;
}

cot_status cot_cuda_stream_wait_event(cot_queue *queue, void *event)
{
    (void)queue, (void)event;
    return COT_NO_DEVICE;
}

cot_status cot_cuda_event_elapsed(cot_queue *queue, void *begin, void *end, double *seconds)
{
    (void)queue, (void)begin, (void)end, (void)seconds;
    return COT_NO_DEVICE;
}

void cot_cuda_observe_launches(cot_queue *queue, void (*on_launch)(void *, const cot_launch_info *), void *context)
{
    (void)queue, (void)on_launch, (void)context;
}

cot_status cot_cuda_graph_capture(cot_queue *queue, cot_status (*enqueue)(void *), void *context,
                                  cot_cuda_graph **graph)
{
    (void)queue, (void)enqueue, (void)context, (void)graph;
    return COT_NO_DEVICE;
}

cot_status cot_cuda_graph_replay(cot_queue *queue, cot_cuda_graph *graph, double *seconds)
{
    (void)queue, (void)graph, (void)seconds;
    return COT_NO_DEVICE;
}

void cot_cuda_graph_destroy(cot_queue *queue, cot_cuda_graph *graph)
{
    (void)queue, (void)graph;
}

cot_status cot_cuda_pci_bus_id(cot_queue *queue, char *pci_bus_id, size_t size)
{
    (void)queue, (void)pci_bus_id, (void)size;
    return COT_NO_DEVICE;
}

cot_status cot_cuda_describe(cot_queue *queue, char *name, size_t size, size_t *cache_bytes)
{
    (void)queue, (void)name, (void)size, (void)cache_bytes;
    return COT_NO_DEVICE;
}
