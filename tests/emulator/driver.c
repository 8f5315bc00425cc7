/* SPDX-License-Identifier: Apache-2.0
 *
 * driver.c: the CUDA driver of the emulator. It extends tests/device/fake_cuda.c by bounds-checked memory and by launches
 * that execute kernels. Environment variables:
 *
 *   FAKE_CUDA=sm80     a device before Hopper: portable kernels, from the PTX for compute capability 8.0
 *   EMU_CODE=FOLDER    the folder that holds STEM.fatbin and STEM.ptx; default: the build's folder
 *   EMU_VERBOSE=1      prints a line per launch
 *   EMU_SEED=N         another schedule, and copies that complete late
 *   EMU_STREAMS=N      operations of streams wait in queues (streams.h)
 *   EMU_TRACE=x,y,z,t  prints every instruction of thread t of block (x, y, z), with its registers */
#include "emulator.h"
#include "streams.h"

#include "../device/fake_cuda.h"

#include <cuda.h>
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SHARED = 227 * 1024, DEFAULT_SHARED = 48 * 1024, MAX_LIBRARIES = 256, FIRST_GRAPH = 256, MAX_PINNED = 512 };

typedef struct library {
    char stem[300], path[2000];
    char *text;
} library;

/* A launch, or a function of the host: a copy, a fill, a product of the test library for cuBLASLt. */
typedef struct launch {
    const emu_kernel *kernel; /* NULL: a function of the host */
    emu_grid grid;
    void *parameters;
    emu_host_function *function;
    int device;
} launch;

typedef struct graph {
    int count, capacity;
    launch *launches;
} graph;

static library libraries[MAX_LIBRARIES];
static int library_count;
static emu_kernel *kernels[4096];
static library *kernel_library[4096];
static int kernel_count;
static _Thread_local graph *captured;

/* Serialises the driver calls of all threads. LOCK_TO_END_OF_SCOPE holds the mutex until the function returns. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static int lock_mutex(void)
{
    return pthread_mutex_lock(&mutex);
}

static void unlock_mutex(const int *locked)
{
    (void)locked;
    pthread_mutex_unlock(&mutex);
}

#define LOCK_TO_END_OF_SCOPE __attribute__((cleanup(unlock_mutex))) const int locked_ = lock_mutex()

static bool fake_is(const char *what)
{
    const char *wanted = getenv("FAKE_CUDA");
    return wanted != NULL && strcmp(wanted, what) == 0;
}

static CUresult report(CUresult result)
{
    fprintf(stderr, "emulator: %s\n", emu_message);
    return result;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **text)
{
    *text = error == CUDA_ERROR_OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
            : error == CUDA_ERROR_INVALID_PTX   ? "CUDA_ERROR_INVALID_PTX"
            : error == CUDA_ERROR_NOT_FOUND     ? "CUDA_ERROR_NOT_FOUND"
                                                : "CUDA_ERROR_INVALID_VALUE";
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text)
{
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "no memory" : emu_message;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetName(char *name, int size, CUdevice device)
{
    (void)device;
    snprintf(name, (size_t)size, "Emulated GPU");
    return CUDA_SUCCESS;
}

/* ---- memory ------------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuMemAlloc(CUdeviceptr *memory, size_t bytes)
{
    LOCK_TO_END_OF_SCOPE;
    void *made = NULL;
    if (bytes == 0 || posix_memalign(&made, 256, bytes) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(made, 0xff, bytes);
    emu_device = fake_cuda_device();
    emu_add_memory((uint64_t)made, bytes);
    *memory = (CUdeviceptr)made;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemFree(CUdeviceptr memory)
{
    LOCK_TO_END_OF_SCOPE;
    streams_finish_all();
    if (emu_remove_memory(memory))
        free((void *)memory);
    return CUDA_SUCCESS;
}

/* ---- code --------------------------------------------------------------------------------------------- */

static char *read_file(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return NULL;
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    char *text = malloc(*bytes + 1);
    *bytes = fread(text, 1, *bytes, file);
    text[*bytes] = 0;
    fclose(file);
    return text;
}

static const char *code_folder(void)
{
    const char *folder = getenv("EMU_CODE");
    return folder != NULL ? folder : EMU_DEFAULT_CODE;
}

/* Finds the build's file with the same bytes as the embedded image. */
static bool find_stem(const void *image, char *stem, size_t capacity)
{
    DIR *folder = opendir(code_folder());
    bool found = false;
    for (struct dirent *entry; folder != NULL && !found && (entry = readdir(folder)) != NULL;) {
        const size_t length = strlen(entry->d_name);
        char path[2000];
        size_t bytes;
        if (length < 7 || strcmp(entry->d_name + length - 7, ".fatbin") != 0 || length >= capacity)
            continue;
        snprintf(path, sizeof path, "%s/%s", code_folder(), entry->d_name);
        char *file = read_file(path, &bytes);
        const uint16_t header = ((const uint16_t *)image)[3];
        const uint64_t body = ((const uint64_t *)image)[1];
        if (file != NULL && bytes >= header + body && memcmp(file, image, header + body) == 0) {
            snprintf(stem, capacity, "%.*s", (int)length - 7, entry->d_name);
            found = true;
        }
        free(file);
    }
    if (folder != NULL)
        closedir(folder);
    return found;
}

CUresult CUDAAPI cuLibraryLoadData(CUlibrary *made, const void *code, CUjit_option *a, void **b, unsigned c,
                                   CUlibraryOption *d, void **e, unsigned f)
{
    LOCK_TO_END_OF_SCOPE;
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    static const void *images[MAX_LIBRARIES];
    int n = 0;
    while (n < library_count && images[n] != code)
        n++;
    if (n == library_count) {
        library *l = &libraries[n];
        if (n == MAX_LIBRARIES || !find_stem(code, l->stem, sizeof l->stem)) {
            snprintf(emu_message, sizeof emu_message,
                     "an image is none of the files %s/*.fatbin: is the build complete?", code_folder());
            return report(CUDA_ERROR_INVALID_IMAGE);
        }
        images[library_count++] = code;
    }
    library *l = &libraries[n];
    size_t bytes;
    snprintf(l->path, sizeof l->path, "%s/%s.compute_%s.ptx", code_folder(), l->stem, fake_is("sm80") ? "80" : "90a");
    FILE *file = fopen(l->path, "rb");
    const char *end = strrchr(l->stem, '_');
    if (file != NULL)
        fclose(file);
    else if (fake_is("sm80") && end != NULL && strcmp(end, "_sm90") == 0)
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    else
        snprintf(l->path, sizeof l->path, "%s/%s.ptx", code_folder(), l->stem);
    if (l->text == NULL)
        l->text = read_file(l->path, &bytes);
    if (l->text == NULL) {
        snprintf(emu_message, sizeof emu_message, "%s is not there", l->path);
        return report(CUDA_ERROR_INVALID_IMAGE);
    }
    *made = (CUlibrary)l;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLibraryGetKernel(CUkernel *kernel, CUlibrary from, const char *name)
{
    LOCK_TO_END_OF_SCOPE;
    library *l = (library *)from;
    for (int k = 0; k < kernel_count; k++)
        if (kernel_library[k] == l && strcmp(kernels[k]->name, name) == 0) {
            *kernel = (CUkernel)kernels[k];
            return CUDA_SUCCESS;
        }
    emu_kernel *parsed = emu_parse(l->path, l->text, name);
    if (parsed == NULL) {
        if (emu_message[0] != 0)
            return report(CUDA_ERROR_INVALID_PTX);
        snprintf(emu_message, sizeof emu_message, "%s has no kernel %s", l->path, name);
        return report(CUDA_ERROR_NOT_FOUND);
    }
    kernel_library[kernel_count] = l;
    kernels[kernel_count++] = parsed;
    parsed->max_dynamic_shared = DEFAULT_SHARED - (parsed->shared_bytes - SHARED_BEGIN);
    *kernel = (CUkernel)parsed;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device)
{
    (void)device;
    emu_kernel *k = (emu_kernel *)kernel;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        return CUDA_SUCCESS;
    if (value + k->shared_bytes - SHARED_BEGIN > MAX_SHARED) {
        snprintf(emu_message, sizeof emu_message, "%s: %d bytes of shared memory, at most %d", k->name,
                 value + k->shared_bytes - SHARED_BEGIN, MAX_SHARED);
        return report(CUDA_ERROR_INVALID_VALUE);
    }
    k->max_dynamic_shared = value;
    return CUDA_SUCCESS;
}

/* ---- launches ----------------------------------------------------------------------------------------- */

static CUresult run(const launch *l)
{
    emu_device = l->device;
    const bool done = l->kernel != NULL ? emu_launch(l->kernel, &l->grid, l->parameters) : l->function(l->parameters);
    return done ? CUDA_SUCCESS : report(CUDA_ERROR_LAUNCH_FAILED);
}

static CUresult run_and_free(void *parameters, bool execute)
{
    launch *l = parameters;
    const CUresult result = execute ? run(l) : CUDA_SUCCESS;
    free(l->parameters);
    free(l);
    return result;
}

/* Enqueues a launch, or adds it to the graph that is being captured. It owns its parameters. */
static CUresult enqueue_or_capture(CUstream stream, launch l)
{
    l.device = fake_cuda_device();
    if (captured == NULL) {
        launch *enqueued = malloc(sizeof *enqueued);
        *enqueued = l;
        return streams_enqueue(stream, run_and_free, enqueued);
    }
    if (captured->count == captured->capacity) {
        captured->capacity = captured->capacity > 0 ? 2 * captured->capacity : FIRST_GRAPH;
        captured->launches = realloc(captured->launches, (size_t)captured->capacity * sizeof *captured->launches);
    }
    captured->launches[captured->count++] = l;
    return CUDA_SUCCESS;
}

bool emu_enqueue(void *stream, emu_host_function *function, const void *parameters, size_t bytes)
{
    LOCK_TO_END_OF_SCOPE;
    launch l = {.function = function, .parameters = malloc(bytes)};
    memcpy(l.parameters, parameters, bytes);
    return enqueue_or_capture(stream, l) == CUDA_SUCCESS;
}

typedef struct transfer {
    uint8_t *to;
    const uint8_t *from; /* NULL: a fill */
    size_t bytes;
    unsigned char byte;
} transfer;

static bool run_transfer(const void *parameters)
{
    const transfer *t = parameters;
    if (t->from != NULL)
        memcpy(t->to, t->from, t->bytes);
    else
        memset(t->to, t->byte, t->bytes);
    return true;
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    const transfer t = {.to = (uint8_t *)to, .from = (const uint8_t *)from, .bytes = bytes};
    return emu_enqueue(stream, run_transfer, &t, sizeof t) ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_FAILED;
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t bytes, CUstream stream)
{
    const transfer t = {.to = (uint8_t *)to, .bytes = bytes, .byte = byte};
    return emu_enqueue(stream, run_transfer, &t, sizeof t) ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_FAILED;
}

/* Page-locked host memory: copies from it and to it are as late as others. */
typedef struct pinned {
    const char *memory;
    size_t bytes;
} pinned;

static pinned pinned_blocks[MAX_PINNED];

CUresult CUDAAPI cuMemHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    LOCK_TO_END_OF_SCOPE;
    (void)flags;
    int n = 0;
    while (n < MAX_PINNED && pinned_blocks[n].memory != NULL)
        n++;
    if (n == MAX_PINNED || (*memory = malloc(bytes)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pinned_blocks[n] = (pinned){*memory, bytes};
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemFreeHost(void *memory)
{
    LOCK_TO_END_OF_SCOPE;
    streams_finish_all();
    for (int n = 0; n < MAX_PINNED; n++)
        if (pinned_blocks[n].memory == memory)
            pinned_blocks[n] = (pinned){NULL, 0};
    free(memory);
    return CUDA_SUCCESS;
}

static bool is_pinned(const void *memory)
{
    for (int n = 0; n < MAX_PINNED; n++)
        if ((const char *)memory >= pinned_blocks[n].memory &&
            (const char *)memory < pinned_blocks[n].memory + pinned_blocks[n].bytes)
            return true;
    return false;
}

typedef struct host_copy {
    void *to;
    const void *from;
    size_t bytes;
    void *staged; /* the copy of pageable memory */
} host_copy;

static CUresult run_host_copy(void *parameters, bool execute)
{
    host_copy *c = parameters;
    if (execute)
        memcpy(c->to, c->from, c->bytes);
    free(c->staged);
    free(c);
    return CUDA_SUCCESS;
}

static CUresult enqueue_host_copy(CUstream stream, host_copy values)
{
    host_copy *c = malloc(sizeof *c);
    *c = values;
    return streams_enqueue(stream, run_host_copy, c);
}

/* The driver copies pageable memory to a buffer of its own before the call returns. */
CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    LOCK_TO_END_OF_SCOPE;
    host_copy c = {.to = (void *)to, .from = from, .bytes = bytes};
    if (streams_are_late() && !is_pinned(from)) {
        c.from = c.staged = malloc(bytes + 1);
        memcpy(c.staged, from, bytes);
    }
    return enqueue_host_copy(stream, c);
}

/* A copy to pageable memory has ended when the call returns. */
CUresult CUDAAPI cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    LOCK_TO_END_OF_SCOPE;
    const CUresult result = enqueue_host_copy(stream, (host_copy){.to = to, .from = (void *)from, .bytes = bytes});
    return is_pinned(to) ? result : streams_finish(stream);
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
    LOCK_TO_END_OF_SCOPE;
    (void)extra;
    const emu_kernel *k = (const emu_kernel *)function;
    emu_grid g = {.blocks = {config->gridDimX, config->gridDimY, config->gridDimZ},
                  .threads = {config->blockDimX, config->blockDimY, config->blockDimZ},
                  .cluster = 1,
                  .dynamic_shared = config->sharedMemBytes};
    for (unsigned a = 0; a < config->numAttrs; a++)
        if (config->attrs[a].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            g.cluster = config->attrs[a].value.clusterDim.x;
    const uint64_t threads = (uint64_t)g.threads[0] * g.threads[1] * g.threads[2];
    if (g.blocks[0] == 0 || g.blocks[1] == 0 || g.blocks[2] == 0 || g.blocks[1] > 65535 || g.blocks[2] > 65535 ||
        threads == 0 || threads > 1024 || g.cluster == 0 || g.cluster > MAX_CLUSTER || g.blocks[0] % g.cluster != 0 ||
        g.dynamic_shared > (unsigned)k->max_dynamic_shared) {
        snprintf(
            emu_message, sizeof emu_message,
            "%s cannot be launched: %u x %u x %u blocks of %llu threads in clusters of %u, %u bytes of shared memory of %d",
            k->name, g.blocks[0], g.blocks[1], g.blocks[2], (unsigned long long)threads, g.cluster, g.dynamic_shared,
            k->max_dynamic_shared);
        return report(CUDA_ERROR_INVALID_VALUE);
    }
    uint8_t *block = calloc(1, (size_t)k->param_bytes + 1);
    for (int p = 0; p < k->param_count; p++)
        memcpy(block + k->param_offset[p], parameters[p],
               (size_t)((p + 1 < k->param_count ? k->param_offset[p + 1] : k->param_bytes) - k->param_offset[p]));
    return enqueue_or_capture(config->hStream, (launch){.kernel = k, .grid = g, .parameters = block});
}

/* A capture records launches, fills and copies within the device. Copies to and from the host are executed while they
 * are captured. */
CUresult CUDAAPI cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode)
{
    (void)stream, (void)mode;
    captured = calloc(1, sizeof *captured);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    (void)stream;
    *status = captured != NULL ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph *made)
{
    (void)stream;
    *made = (CUgraph)captured;
    captured = NULL;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *made, CUgraph from, unsigned long long flags)
{
    (void)flags;
    *made = (CUgraphExec)from;
    return CUDA_SUCCESS;
}

static CUresult run_graph(void *parameters, bool execute)
{
    const graph *g = parameters;
    CUresult result = CUDA_SUCCESS;
    for (int l = 0; execute && l < g->count && result == CUDA_SUCCESS; l++)
        result = run(&g->launches[l]);
    return result;
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec graph_, CUstream stream)
{
    LOCK_TO_END_OF_SCOPE;
    return streams_enqueue(stream, run_graph, graph_);
}

/* ---- streams and events ------------------------------------------------------------------------------- */

CUresult CUDAAPI cuStreamSynchronize(CUstream stream)
{
    LOCK_TO_END_OF_SCOPE;
    return streams_finish(stream);
}

CUresult CUDAAPI cuStreamDestroy(CUstream stream)
{
    LOCK_TO_END_OF_SCOPE;
    return streams_finish(stream);
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent awaited, unsigned flags)
{
    LOCK_TO_END_OF_SCOPE;
    (void)flags;
    return streams_await(stream, ((fake_event *)awaited)->record);
}

CUresult CUDAAPI cuEventDestroy(CUevent destroyed)
{
    LOCK_TO_END_OF_SCOPE;
    fake_event *e = (fake_event *)destroyed;
    streams_forget(e->record);
    free(e);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventRecord(CUevent recorded, CUstream stream)
{
    LOCK_TO_END_OF_SCOPE;
    fake_event *e = (fake_event *)recorded;
    const CUresult result = fake_cuda_record(e, stream);
    if (result != CUDA_SUCCESS)
        return result;
    streams_forget(e->record);
    e->record = streams_record(stream);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventSynchronize(CUevent awaited)
{
    LOCK_TO_END_OF_SCOPE;
    return streams_finish_record(((fake_event *)awaited)->record);
}

CUresult CUDAAPI cuEventQuery(CUevent queried)
{
    LOCK_TO_END_OF_SCOPE;
    return !fake_cuda_stalled && streams_poll(((fake_event *)queried)->record) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* ---- tensor maps -------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                                        const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                        const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                        CUtensorMapFloatOOBfill fill)
{
    (void)promotion;
    static const uint32_t swizzle_bytes[] = {0, 32, 64, 128};
    emu_map m = {.magic = MAP_MAGIC, .rank = rank, .base = (uint64_t)data};
    m.element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1
                : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ||
                        type == CU_TENSOR_MAP_DATA_TYPE_UINT16
                    ? 2
                : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 || type == CU_TENSOR_MAP_DATA_TYPE_INT32 ||
                        type == CU_TENSOR_MAP_DATA_TYPE_UINT32
                    ? 4
                    : 8;
    bool valid = rank >= 1 && rank <= 5 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
                 swizzle <= CU_TENSOR_MAP_SWIZZLE_128B && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && m.base % 16 == 0;
    for (uint32_t a = 0; valid && a < rank; a++) {
        m.size[a] = sizes[a];
        m.stride[a] = a == 0 ? m.element : strides[a - 1];
        m.box[a] = (uint16_t)box[a];
        valid = sizes[a] >= 1 && sizes[a] <= (uint64_t)1 << 32 && box[a] >= 1 && box[a] <= 256 && steps[a] == 1 &&
                (a == 0 || (m.stride[a] % 16 == 0 && m.stride[a] < (uint64_t)1 << 40));
    }
    if (valid) {
        m.swizzle = swizzle_bytes[swizzle];
        valid = m.box[0] * m.element % 16 == 0 && (m.swizzle == 0 || m.box[0] * m.element <= m.swizzle);
    }
    if (!valid) {
        snprintf(emu_message, sizeof emu_message,
                 "a tensor map that the driver would refuse, or the emulator does not support");
        return report(CUDA_ERROR_INVALID_VALUE);
    }
    _Static_assert(sizeof m <= sizeof *map, "a map fits");
    memset(map, 0, sizeof *map);
    memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}
