/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu.h"

#include "rows.h"

#include "core/argument_checks.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/tensor.h"
#include "cuda/driver.h"
#include "cuda/group_rows.h"

#include <stdlib.h>

extern const unsigned char cot_image_group_rows[];

enum {
    COPY_ROWS,
    ADD_SINK,
    SUM_DSINK,
    CLAMP_OFFSETS,
    SUM_ROWS,
    KERNELS,
    MAX_BLOCKS = 1 << 14,
    MAX_HOST_BLOCKS = 4,
    MAX_PEERS = 64
};
enum { MAX_MARKS = 512 }; /* pairs on each stream, in one measurement */

_Static_assert((int)COT_MAX_SOURCES == (int)COT_ROWS_SOURCES, "one launch adds all tensors");

static const char *const kernel_names[KERNELS] = {"cot_group_copy_rows", "cot_group_add_sink", "cot_group_sum_dsink",
                                                  "cot_group_clamp_offsets", "cot_group_sum_rows"};

/* Pairs of timing events on the main and the side stream: begin, end, begin, end, ... */
typedef struct marks {
    void *events[2][2 * MAX_MARKS];
    int count[2];
} marks;

struct cot_gpu {
    cot_cuda_driver driver;
    CUcontext context;
    CUdevice device;
    bool primary; /* the primary context, which this struct has retained */
    CUstream main, side;
    CUlibrary library;
    CUkernel kernels[KERNELS];
    void *last; /* the event at the end of the last call */
    CUdeviceptr memory;
    void *host[MAX_HOST_BLOCKS];
    int host_count;
    bool reached[MAX_PEERS]; /* devices whose memory this one has been allowed to read */
    marks *marks;            /* NULL: nothing is measured */
};

/* Makes a driver call. If it fails, returns from the function with the driver's error message. */
#define CUDA(gpu, what, expression)                              \
    do {                                                         \
        const CUresult result_ = (gpu)->driver.expression;       \
        if (result_ != CUDA_SUCCESS)                             \
            return cot_cuda_fail(&(gpu)->driver, result_, what); \
    } while (0)

static CUdeviceptr address(const void *memory)
{
    return (CUdeviceptr)(uintptr_t)memory;
}

static void drop_marks(cot_gpu *g)
{
    for (int n = 0; g->marks != NULL && n < 2 * MAX_MARKS; n++) {
        cot_gpu_drop(g, &g->marks->events[0][n]);
        cot_gpu_drop(g, &g->marks->events[1][n]);
    }
    free(g->marks);
    g->marks = NULL;
}

/* ---- opening and closing --------------------------------------------------------------------------------------- */

static cot_status load(cot_gpu *g, const char *call)
{
    CUDA(g, call, cuStreamCreate(&g->side, CU_STREAM_NON_BLOCKING));
    CUDA(g, call, cuLibraryLoadData(&g->library, cot_image_group_rows, NULL, NULL, 0, NULL, NULL, 0));
    for (int n = 0; n < KERNELS; n++)
        CUDA(g, call, cuLibraryGetKernel(&g->kernels[n], g->library, kernel_names[n]));
    return COT_OK;
}

static cot_status open_context(cot_gpu *g, const char *call, void *context, int device)
{
    CUcontext primary;
    if (context == NULL) {
        CUDA(g, call, cuDeviceGet(&g->device, device));
    } else {
        CUDA(g, call, cuCtxPushCurrent(context));
        const CUresult result = g->driver.cuCtxGetDevice(&g->device);
        cot_gpu_leave(g);
        if (result != CUDA_SUCCESS)
            return cot_cuda_fail(&g->driver, result, call);
    }
    /* A primary context is retained, because the group may outlive its queues. Another one belongs to the caller. */
    CUDA(g, call, cuDevicePrimaryCtxRetain(&primary, g->device));
    g->primary = context == NULL || context == primary;
    g->context = g->primary ? primary : context;
    if (!g->primary)
        g->driver.cuDevicePrimaryCtxRelease(g->device);
    CUDA(g, call, cuCtxPushCurrent(g->context));
    const cot_status status = load(g, call);
    cot_gpu_leave(g);
    return status;
}

cot_status cot_gpu_open(const char *call, void *context, int device, cot_gpu **out)
{
    cot_gpu *g = calloc(1, sizeof *g);
    if (g == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for a group", call);
    cot_status status = cot_cuda_driver_open(call, &g->driver);
    if (status == COT_OK)
        status = open_context(g, call, context, device);
    if (status == COT_OK)
        *out = g;
    else
        cot_gpu_close(g);
    return status;
}

void cot_gpu_close(cot_gpu *g)
{
    if (g == NULL)
        return;
    if (g->context != NULL && g->driver.cuCtxPushCurrent(g->context) == CUDA_SUCCESS) {
        if (g->last != NULL)
            g->driver.cuEventSynchronize(g->last);
        if (g->side != NULL) {
            g->driver.cuStreamSynchronize(g->side);
            g->driver.cuStreamDestroy(g->side);
        }
        cot_gpu_drop(g, &g->last);
        drop_marks(g);
        if (g->memory != 0)
            g->driver.cuMemFree(g->memory);
        for (int n = 0; n < g->host_count; n++)
            g->driver.cuMemFreeHost(g->host[n]);
        if (g->library != NULL)
            g->driver.cuLibraryUnload(g->library);
        cot_gpu_leave(g);
    }
    if (g->primary)
        g->driver.cuDevicePrimaryCtxRelease(g->device);
    cot_cuda_driver_close(&g->driver);
    free(g);
}

const void *cot_gpu_context(const cot_gpu *g)
{
    return g->context;
}

static cot_status begin_call(cot_gpu *g, const char *call)
{
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    CUDA(g, call, cuStreamIsCapturing(g->main, &capture));
    if (capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: the queue's stream is being captured", call);
    return g->last != NULL ? cot_gpu_await(g, COT_MAIN_STREAM, g->last) : COT_OK;
}

cot_status cot_gpu_enter(cot_gpu *g, const char *call, void *context, void *stream)
{
    if (context != g->context)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: queue is of another CUDA context than the group", call);
    CUDA(g, call, cuCtxPushCurrent(g->context));
    g->main = stream;
    const cot_status status = begin_call(g, call);
    if (status != COT_OK)
        cot_gpu_leave(g);
    return status;
}

cot_status cot_gpu_push(cot_gpu *g)
{
    CUDA(g, "making the group's context current", cuCtxPushCurrent(g->context));
    return COT_OK;
}

void cot_gpu_leave(cot_gpu *g)
{
    CUcontext popped;
    g->driver.cuCtxPopCurrent(&popped);
}

cot_status cot_gpu_end(cot_gpu *g, bool side)
{
    if (side) {
        CHECK(cot_gpu_record(g, COT_SIDE_STREAM, &g->last));
        CHECK(cot_gpu_await(g, COT_MAIN_STREAM, g->last));
    }
    return cot_gpu_record(g, COT_MAIN_STREAM, &g->last);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

cot_status cot_gpu_grow(cot_gpu *g, const char *call, size_t bytes, void **memory)
{
    CUdeviceptr grown;
    CUDA(g, call, cuStreamSynchronize(g->main));
    CUDA(g, call, cuStreamSynchronize(g->side));
    if (g->memory != 0)
        g->driver.cuMemFree(g->memory);
    g->memory = 0;
    *memory = NULL;
    CUDA(g, call, cuMemAlloc(&grown, bytes));
    g->memory = grown;
    *memory = (void *)(uintptr_t)grown;
    return COT_OK;
}

cot_status cot_gpu_alloc(cot_gpu *g, const char *call, size_t bytes, void **memory)
{
    CUdeviceptr created = 0;
    CUDA(g, call, cuMemAlloc(&created, bytes));
    *memory = (void *)(uintptr_t)created;
    return COT_OK;
}

void cot_gpu_free(cot_gpu *g, void *memory)
{
    if (memory != NULL)
        g->driver.cuMemFree(address(memory));
}

cot_status cot_gpu_host_memory(cot_gpu *g, size_t bytes, void **memory)
{
    if (g->host_count == MAX_HOST_BLOCKS)
        return cot_fail(COT_OUT_OF_MEMORY, "a group has no room for more page-locked memory");
    CHECK(cot_gpu_host_alloc(g, bytes, memory));
    g->host[g->host_count++] = *memory;
    return COT_OK;
}

cot_status cot_gpu_host_alloc(cot_gpu *g, size_t bytes, void **memory)
{
    CUDA(g, "allocating page-locked memory", cuMemHostAlloc(memory, bytes, 0));
    return COT_OK;
}

void cot_gpu_host_free(cot_gpu *g, void *memory)
{
    if (memory != NULL)
        g->driver.cuMemFreeHost(memory);
}

cot_status cot_gpu_upload(cot_gpu *g, void *to, const void *host, size_t bytes)
{
    if (bytes > 0)
        CUDA(g, "copying to the device", cuMemcpyHtoDAsync(address(to), host, bytes, g->main));
    return COT_OK;
}

cot_status cot_gpu_move(cot_gpu *g, void *to, const void *from, size_t bytes)
{
    if (bytes > 0)
        CUDA(g, "copying within the device", cuMemcpyDtoDAsync(address(to), address(from), bytes, g->main));
    return COT_OK;
}

cot_status cot_gpu_clear(cot_gpu *g, void *data, size_t bytes)
{
    if (bytes > 0)
        CUDA(g, "filling memory of the device", cuMemsetD8Async(address(data), 0, bytes, g->main));
    return COT_OK;
}

cot_status cot_gpu_download(cot_gpu *g, void *host, const void *from, size_t bytes)
{
    if (bytes > 0)
        CUDA(g, "copying from the device", cuMemcpyDtoHAsync(host, address(from), bytes, g->main));
    CUDA(g, "copying from the device", cuStreamSynchronize(g->main));
    return COT_OK;
}

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

static cot_status launch(cot_gpu *g, int kernel, int64_t blocks, const void *parameters)
{
    const CUlaunchConfig config = {.gridDimX = (unsigned)blocks,
                                   .gridDimY = 1,
                                   .gridDimZ = 1,
                                   .blockDimX = COT_ROWS_THREADS,
                                   .blockDimY = 1,
                                   .blockDimZ = 1,
                                   .hStream = g->main};
    void *arguments[] = {(void *)(uintptr_t)parameters};
    if (blocks > 0)
        CUDA(g, kernel_names[kernel], cuLaunchKernelEx(&config, (CUfunction)g->kernels[kernel], arguments, NULL));
    return COT_OK;
}

/* Appends an axis, joined with the last one where both views have it contiguous. */
static void append_axis(cot_rows_copy *c, int64_t size, int64_t to_stride, int64_t from_stride)
{
    const int last = c->rank - 1;
    if (size == 1)
        return;
    if (last >= 0 && c->to_stride[last] == size * to_stride && c->from_stride[last] == size * from_stride) {
        c->shape[last] *= size, c->to_stride[last] = to_stride, c->from_stride[last] = from_stride;
        return;
    }
    c->shape[c->rank] = size, c->to_stride[c->rank] = to_stride, c->from_stride[c->rank] = from_stride;
    c->rank++;
}

/* Whether every unit of COT_ROWS_VECTOR elements is contiguous and aligned. */
static bool is_vectorized(const cot_rows_copy *c, const void *data, cot_dtype dtype, const int64_t *stride)
{
    const size_t size = cot_dtype_size(dtype);
    bool good = c->rank > 0 && size > 1 && stride[c->rank - 1] == 1 && c->shape[c->rank - 1] % COT_ROWS_VECTOR == 0 &&
                (uintptr_t)data % 16 == 0;
    for (int axis = 0; axis < c->rank - 1; axis++)
        good = good && stride[axis] * (int64_t)size % 16 == 0;
    return good;
}

/* The axis with the smallest stride of `to` comes last: adjacent threads write adjacent elements. */
static int64_t plan_copy(cot_rows_copy *c, const cot_tensor *to, const cot_tensor *from)
{
    const int64_t elements = cot_elements(to);
    int order[COT_MAX_RANK];
    c->to = to->data, c->to_dtype = (int32_t)to->dtype;
    for (int axis = 0; axis < to->rank; axis++) {
        int n = axis;
        for (; n > 0 && to->stride[order[n - 1]] < to->stride[axis]; n--)
            order[n] = order[n - 1];
        order[n] = axis;
    }
    for (int n = 0; n < to->rank; n++) {
        const int axis = order[n];
        append_axis(c, to->shape[axis], to->stride[axis], from != NULL ? from->stride[axis] : to->stride[axis]);
    }
    const bool vector = is_vectorized(c, to->data, to->dtype, c->to_stride) &&
                        (from == NULL || is_vectorized(c, from->data, from->dtype, c->from_stride));
    c->vector = vector ? COT_ROWS_VECTOR : 1;
    c->units = elements / c->vector;
    return cot_min(cot_ceil_div(c->units, COT_ROWS_THREADS), MAX_BLOCKS);
}

cot_status cot_gpu_copy_tensor(cot_gpu *g, const cot_tensor *to, const cot_tensor *from, bool add)
{
    cot_rows_copy c = {.from = from->data, .from_dtype = (int32_t)from->dtype, .add = add};
    const int64_t blocks = plan_copy(&c, to, from);
    return launch(g, COPY_ROWS, blocks, &c);
}

/* One thread adds the same elements of all tensors: each tensor is read once. */
cot_status cot_gpu_sum_tensors(cot_gpu *g, const cot_tensor *to, const cot_tensor from[], int count, bool add)
{
    cot_rows_sum c = {.rows = {.from = from[0].data, .from_dtype = COT_F32, .add = add}, .count = count};
    const int64_t blocks = plan_copy(&c.rows, to, &from[0]);
    for (int n = 0; n < count; n++)
        c.from[n] = from[n].data;
    return launch(g, SUM_ROWS, blocks, &c);
}

cot_status cot_gpu_fill_tensor(cot_gpu *g, const cot_tensor *to, double value)
{
    cot_rows_copy c = {.value = value};
    const int64_t blocks = plan_copy(&c, to, NULL);
    return launch(g, COPY_ROWS, blocks, &c);
}

cot_status cot_gpu_add_sink(cot_gpu *g, const cot_tensor *out, const cot_tensor *lse, const cot_tensor *sink)
{
    const cot_rows_sink c = {.out = out->data,
                             .lse = lse->data,
                             .sink = sink->data,
                             .sink_dtype = (int32_t)sink->dtype,
                             .rows = out->shape[0],
                             .heads = out->shape[1],
                             .d_v = out->shape[2],
                             .sink_stride = sink->stride[0],
                             .out_stride = {out->stride[0], out->stride[1]},
                             .lse_stride = {lse->stride[0], lse->stride[1]}};
    return launch(g, ADD_SINK, cot_ceil_div(c.rows * c.heads, COT_ROWS_THREADS / 32), &c);
}

cot_status cot_gpu_sum_dsink(cot_gpu *g, double *sums, const cot_tensor *lse, const cot_tensor *delta,
                             const cot_tensor *sink)
{
    const cot_rows_dsink c = {.sums = sums,
                              .lse = lse->data,
                              .delta = delta->data,
                              .sink = sink->data,
                              .sink_dtype = (int32_t)sink->dtype,
                              .rows = lse->shape[1],
                              .heads = lse->shape[0],
                              .sink_stride = sink->stride[0],
                              .lse_stride = {lse->stride[0], lse->stride[1]},
                              .delta_stride = {delta->stride[0], delta->stride[1]}};
    return launch(g, SUM_DSINK, c.rows > 0 ? c.heads : 0, &c);
}

cot_status cot_gpu_clamp_offsets(cot_gpu *g, int32_t *to, const cot_tensor *from, int64_t begin, int64_t end)
{
    const cot_rows_clamp c = {
        .to = to, .from = from->data, .count = from->shape[0], .stride = from->stride[0], .begin = begin, .end = end};
    return launch(g, CLAMP_OFFSETS, cot_min(cot_ceil_div(c.count, COT_ROWS_THREADS), MAX_BLOCKS), &c);
}

/* ---- streams and events ------------------------------------------------------------------------------------------ */

static CUstream stream_of(const cot_gpu *g, cot_stream stream)
{
    return stream == COT_SIDE_STREAM ? g->side : g->main;
}

cot_status cot_gpu_record(cot_gpu *g, cot_stream stream, void **event)
{
    CUevent created = *event;
    if (created == NULL)
        CUDA(g, "creating an event", cuEventCreate(&created, CU_EVENT_DISABLE_TIMING));
    *event = created;
    CUDA(g, "recording an event", cuEventRecord(created, stream_of(g, stream)));
    return COT_OK;
}

cot_status cot_gpu_await(cot_gpu *g, cot_stream stream, void *event)
{
    CUDA(g, "waiting for an event", cuStreamWaitEvent(stream_of(g, stream), event, 0));
    return COT_OK;
}

cot_status cot_gpu_poll(cot_gpu *g, void *event, bool *happened)
{
    const CUresult result = g->driver.cuEventQuery(event);
    *happened = result == CUDA_SUCCESS;
    return result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY
               ? COT_OK
               : cot_cuda_fail(&g->driver, result, "waiting for an event");
}

cot_status cot_gpu_synchronize(cot_gpu *g, void *event)
{
    CUDA(g, "waiting for an event", cuEventSynchronize(event));
    return COT_OK;
}

void cot_gpu_drop(cot_gpu *g, void **event)
{
    if (*event != NULL)
        g->driver.cuEventDestroy(*event);
    *event = NULL;
}

cot_status cot_gpu_profile_begin(cot_gpu *g)
{
    drop_marks(g);
    g->marks = calloc(1, sizeof *g->marks);
    return g->marks != NULL ? COT_OK : cot_fail(COT_OUT_OF_MEMORY, "no memory for the events of a measurement");
}

static cot_status mark(cot_gpu *g, cot_stream stream, bool begins)
{
    marks *m = g->marks;
    if (m == NULL || m->count[stream] == 2 * MAX_MARKS || (m->count[stream] % 2 == 0) != begins)
        return COT_OK;
    CUevent created;
    CUDA(g, "creating an event", cuEventCreate(&created, CU_EVENT_DEFAULT));
    m->events[stream][m->count[stream]++] = created;
    CUDA(g, "recording an event", cuEventRecord(created, stream_of(g, stream)));
    return COT_OK;
}

cot_status cot_gpu_mark_begin(cot_gpu *g, cot_stream stream)
{
    return mark(g, stream, true);
}

cot_status cot_gpu_mark_end(cot_gpu *g, cot_stream stream)
{
    return mark(g, stream, false);
}

static cot_status sum_marks(cot_gpu *g, cot_stream stream, double *seconds)
{
    const marks *m = g->marks;
    *seconds = 0;
    for (int n = 0; n + 1 < m->count[stream]; n += 2) {
        float milliseconds;
        CUDA(g, "waiting for an event", cuEventSynchronize(m->events[stream][n + 1]));
        CUDA(g, "reading a time", cuEventElapsedTime(&milliseconds, m->events[stream][n], m->events[stream][n + 1]));
        *seconds += 1e-3 * (double)milliseconds;
    }
    return COT_OK;
}

cot_status cot_gpu_profile_end(cot_gpu *g, double *transfers, double *exposed)
{
    *transfers = *exposed = 0;
    if (g->marks == NULL)
        return COT_OK;
    CHECK(cot_gpu_push(g));
    cot_status status = sum_marks(g, COT_SIDE_STREAM, transfers);
    if (status == COT_OK)
        status = sum_marks(g, COT_MAIN_STREAM, exposed);
    drop_marks(g);
    cot_gpu_leave(g);
    return status;
}

/* Lets this GPU read the peer's memory directly. Where the machine cannot do that, the driver copies through the host. */
static void reach(cot_gpu *g, const cot_gpu *peer)
{
    if (peer->device == g->device || peer->device >= MAX_PEERS || g->reached[peer->device])
        return;
    g->driver.cuCtxEnablePeerAccess(peer->context, 0);
    g->reached[peer->device] = true;
}

cot_status cot_gpu_move_aside(cot_gpu *g, const cot_gpu *peer, void *to, const void *from, size_t bytes)
{
    reach(g, peer);
    CUDA(g, "copying within the device", cuMemcpyDtoDAsync(address(to), address(from), bytes, g->side));
    return COT_OK;
}

cot_status cot_gpu_upload_aside(cot_gpu *g, void *to, const void *host, size_t bytes)
{
    CUDA(g, "copying to the device", cuMemcpyHtoDAsync(address(to), host, bytes, g->side));
    return COT_OK;
}

cot_status cot_gpu_download_aside(cot_gpu *g, void *host, const void *from, size_t bytes)
{
    CUDA(g, "copying from the device", cuMemcpyDtoHAsync(host, address(from), bytes, g->side));
    return COT_OK;
}

void *cot_gpu_side_stream(const cot_gpu *g)
{
    return g->side;
}

void *cot_gpu_last_event(const cot_gpu *g)
{
    return g->last;
}
