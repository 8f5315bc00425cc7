/* SPDX-License-Identifier: Apache-2.0
 *
 * driver.c: the functions of HIP for which fake_hip.c is not enough. A launch runs the kernel before it returns.
 *
 *   EMU_TARGET=gfx90a  the GPU; gfx942 without it
 *   EMU_SEED=N         varies the order of waves, in each launch and block anew (run_block)
 *   EMU_CODE=FILE      a bundle whose kernels replace those of the library, for planted faults */
#include "emulator.h"

#include "hip/driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NOT_FOUND = 500, INVALID_IMAGE = 200, INVALID_VALUE = 1, LAUNCH_FAILURE = 719, MAX_ALLOCATIONS = 65536 };

/* One kernel at a time. The message of the last kernel that stopped is the text of LAUNCH_FAILURE. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local char failure[1024] = "no kernel has stopped";

/* ---- allocations, sorted by address -------------------------------------------------------------------- */

typedef struct allocation {
    uint64_t begin, end;
} allocation;

static allocation allocations[MAX_ALLOCATIONS];
static int allocation_count, last_found;
static pthread_mutex_t allocation_lock = PTHREAD_MUTEX_INITIALIZER;

static int find_allocation(uint64_t address) /* the last one that does not begin after the address, or -1 */
{
    int low = 0, high = allocation_count;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (allocations[middle].begin <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low - 1;
}

void emu_add_allocation(void *memory, size_t bytes)
{
    const uint64_t begin = (uint64_t)(uintptr_t)memory;
    pthread_mutex_lock(&allocation_lock);
    const int at = find_allocation(begin) + 1;
    if (allocation_count == MAX_ALLOCATIONS)
        abort();
    memmove(&allocations[at + 1], &allocations[at], (size_t)(allocation_count++ - at) * sizeof *allocations);
    allocations[at] = (allocation){begin, begin + bytes};
    pthread_mutex_unlock(&allocation_lock);
}

void emu_remove_allocation(void *memory)
{
    const uint64_t begin = (uint64_t)(uintptr_t)memory;
    pthread_mutex_lock(&allocation_lock);
    const int at = find_allocation(begin);
    if (at >= 0 && allocations[at].begin == begin)
        memmove(&allocations[at], &allocations[at + 1], (size_t)(--allocation_count - at) * sizeof *allocations);
    pthread_mutex_unlock(&allocation_lock);
}

bool emu_is_allocated(uint64_t address, size_t bytes)
{
    pthread_mutex_lock(&allocation_lock);
    int at = last_found;
    if (at >= allocation_count || address < allocations[at].begin || address >= allocations[at].end)
        at = find_allocation(address);
    const bool found = at >= 0 && address >= allocations[at].begin && address + bytes <= allocations[at].end;
    last_found = at >= 0 ? at : 0;
    pthread_mutex_unlock(&allocation_lock);
    return found;
}

/* ---- HIP --------------------------------------------------------------------------------------------------- */

#define DECLARE(name, parameters) int name parameters;
COT_HIP_FUNCTIONS(DECLARE)
const char *hipGetErrorName(int error);
const char *hipGetErrorString(int error);

static const char *emulated_target(void)
{
    const char *target = getenv("EMU_TARGET");
    return target != NULL ? target : "gfx942";
}

int hipDeviceGetName(char *name, int size, int device)
{
    (void)device;
    snprintf(name, (size_t)size, "emulator of %s, whose times mean nothing", emulated_target());
    return COT_HIP_SUCCESS;
}

const char *hipGetErrorName(int error)
{
    return error == COT_HIP_OUT_OF_MEMORY ? "hipErrorOutOfMemory"
           : error == LAUNCH_FAILURE      ? "hipErrorLaunchFailure"
           : error == NOT_FOUND           ? "hipErrorNotFound"
           : error == INVALID_IMAGE       ? "hipErrorInvalidImage"
                                          : "hipErrorInvalidValue";
}

const char *hipGetErrorString(int error)
{
    return error == LAUNCH_FAILURE || error == INVALID_IMAGE ? failure : "the emulator refuses the call";
}

int hipMalloc(void **memory, size_t bytes)
{
    *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (*memory == NULL)
        return COT_HIP_OUT_OF_MEMORY;
    emu_add_allocation(*memory, bytes);
    return COT_HIP_SUCCESS;
}

int hipFree(void *memory)
{
    if (memory != NULL)
        emu_remove_allocation(memory);
    free(memory);
    return COT_HIP_SUCCESS;
}

/* Queues load the same images again and again: a loaded one is kept until the process ends. */
enum { MAX_CACHED = 64 };
static struct {
    const void *image;
    emu_code *code;
} cache[MAX_CACHED];

static int load(const void *image, const emu_code **loaded)
{
    int error = COT_HIP_SUCCESS, at = 0;
    while (at < MAX_CACHED - 1 && cache[at].image != NULL && cache[at].image != image)
        at++;
    if (cache[at].image != image) {
        bool missing = false;
        emu_code *code = emu_load(image, emulated_target(), &missing, failure, sizeof failure);
        if (code != NULL)
            cache[at].image = image, cache[at].code = code;
        else
            error = missing ? COT_HIP_NO_BINARY_FOR_GPU : INVALID_IMAGE;
    }
    *loaded = cache[at].code;
    return error;
}

int hipModuleLoadData(void **module, const void *image)
{
    const emu_code *loaded = NULL;
    pthread_mutex_lock(&lock);
    const int error = load(image, &loaded);
    pthread_mutex_unlock(&lock);
    *module = (void *)(uintptr_t)loaded;
    return error;
}

/* The code of EMU_CODE, or NULL. */
static const emu_code *replacement(void)
{
    static char *bundle;
    const char *path = getenv("EMU_CODE");
    FILE *file = path != NULL && bundle == NULL ? fopen(path, "rb") : NULL;
    const emu_code *code = NULL;
    if (file != NULL) {
        fseek(file, 0, SEEK_END);
        const size_t size = (size_t)ftell(file);
        rewind(file);
        bundle = malloc(size);
        if (fread(bundle, 1, size, file) != size)
            abort();
        fclose(file);
    }
    if (path != NULL && (bundle == NULL || load(bundle, &code) != COT_HIP_SUCCESS))
        abort();
    return code;
}

int hipModuleUnload(void *module)
{
    (void)module;
    return COT_HIP_SUCCESS;
}

/* A function is a kernel of a code object; find_code finds that again. */
int hipModuleGetFunction(void **function, void *module, const char *name)
{
    pthread_mutex_lock(&lock);
    const emu_code *code = replacement();
    pthread_mutex_unlock(&lock);
    const emu_kernel *kernel = code != NULL ? emu_find_kernel(code, name) : NULL;
    *function = (void *)(uintptr_t)(kernel != NULL ? kernel : emu_find_kernel(module, name));
    return *function != NULL ? COT_HIP_SUCCESS : NOT_FOUND;
}

static const emu_code *find_code(const emu_kernel *kernel)
{
    for (int k = 0; k < MAX_CACHED && cache[k].image != NULL; k++)
        if (kernel >= cache[k].code->kernels && kernel < cache[k].code->kernels + cache[k].code->kernel_count)
            return cache[k].code;
    return NULL;
}

int hipFuncGetAttribute(int *value, int attribute, void *function)
{
    const emu_kernel *kernel = function;
    *value = attribute == COT_HIP_FUNCTION_SHARED_BYTES  ? (int)kernel->lds_bytes
             : attribute == COT_HIP_FUNCTION_LOCAL_BYTES ? (int)kernel->private_bytes
             : attribute == COT_HIP_FUNCTION_REGISTERS   ? kernel->vectors
                                                         : 0;
    return COT_HIP_SUCCESS;
}

/* A compute unit has 4 SIMDs. Each holds at most 8 waves, which share 512 vector registers of a lane. */
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared_bytes)
{
    enum { SIMDS = 4, MAX_WAVES = 8 };
    const emu_kernel *kernel = function;
    const int waves = (threads + EMU_LANES - 1) / EMU_LANES, fitting = EMU_VECTORS / kernel->vectors;
    const size_t lds_bytes = kernel->lds_bytes + shared_bytes;
    *blocks = SIMDS * (fitting < MAX_WAVES ? fitting : MAX_WAVES) / waves;
    if (lds_bytes > 0 && (size_t)*blocks > EMU_MAX_LDS / lds_bytes)
        *blocks = (int)(EMU_MAX_LDS / lds_bytes);
    return COT_HIP_SUCCESS;
}

int hipModuleLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                          unsigned threads_z, unsigned shared_bytes, void *stream, void **parameters, void **extra)
{
    static unsigned launches;
    const char *seed = getenv("EMU_SEED");
    (void)stream;
    if (x == 0 || y == 0 || z == 0 || threads_x == 0 || threads_x > 1024 || threads_y != 1 || threads_z != 1 ||
        shared_bytes != 0 || extra != NULL)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    const bool ran = emu_run(find_code(function), function, (const uint32_t[3]){x, y, z}, threads_x, parameters[0],
                             seed != NULL ? 100000u * (unsigned)atoi(seed) + ++launches : 0, failure, sizeof failure);
    pthread_mutex_unlock(&lock);
    return ran ? COT_HIP_SUCCESS : LAUNCH_FAILURE;
}
