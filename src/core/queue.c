/* SPDX-License-Identifier: Apache-2.0 */
#include "queue.h"

#include "cpu_features.h"
#include "float_state.h"
#include "status.h"

#include <omp.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_THREADS = 4096 };

/* The process that loaded the library, set once before main. OpenMP's worker threads do not exist in a process that was
 * forked later, where the OpenMP runtime would wait for them forever. */
static pid_t loading_process;

__attribute__((constructor)) static void remember_process(void)
{
    loading_process = getpid();
}

/* Checks the syntax of "op=kernel,op=kernel". The names themselves are checked when an op is called. */
static cot_status check_forced(const char *forced, const char *source)
{
    for (const char *entry = forced; *entry != '\0';) {
        const size_t length = strcspn(entry, ",");
        const char *equals = memchr(entry, '=', length);
        if (equals == NULL || equals == entry || equals + 1 == entry + length)
            return cot_fail(COT_INVALID_ARGUMENT, "cot_queue_create: %s has the entry \"%.*s\", expected op=kernel",
                            source, (int)length, entry);
        entry += length + (entry[length] == ',');
    }
    return COT_OK;
}

cot_status cot_queue_create(const cot_queue_options *options, cot_queue **out)
{
    static const char call[] = "cot_queue_create";
    if (out == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: out is null", call);
    *out = NULL;
    cot_queue_options settings;
    COT_INIT(&settings);
    if (options != NULL) {
        const size_t size = options->struct_size; /* an older header has a shorter struct */
        if (size < offsetof(cot_queue_options, device) || size > sizeof settings)
            return cot_fail(COT_INVALID_ARGUMENT, "%s: options.struct_size is %zu, expected %zu (use COT_INIT)", call,
                            size, sizeof settings);
        memcpy(&settings, options, size);
    }
    if (settings.backend != COT_BACKEND_CPU && settings.backend != COT_BACKEND_CUDA &&
        settings.backend != COT_BACKEND_HIP)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: options.backend is %d, expected 0 (CPU), 1 (CUDA) or 2 (HIP)", call,
                        (int)settings.backend);
    if (settings.threads < 0 || settings.threads > MAX_THREADS)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: options.threads is %d, expected 0 (all) to %d", call,
                        (int)settings.threads, MAX_THREADS);
    const char *forced = settings.kernels != NULL ? settings.kernels : getenv("COT_KERNEL");
    if (forced != NULL) {
        const cot_status status = check_forced(forced, settings.kernels != NULL ? "options.kernels" : "COT_KERNEL");
        if (status != COT_OK)
            return status;
    }
    cot_queue *queue = calloc(1, sizeof *queue);
    if (queue != NULL && forced != NULL && forced[0] != '\0' && (queue->forced = strdup(forced)) == NULL) {
        free(queue);
        queue = NULL;
    }
    if (queue == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for a queue", call);
    queue->backend = settings.backend;
    queue->threads = settings.threads > 0 ? settings.threads : omp_get_max_threads();
    queue->isa = cot_cpu_features();
    if (settings.backend != COT_BACKEND_CPU) {
        queue->calls = settings.backend == COT_BACKEND_CUDA ? &cot_cuda_calls : &cot_hip_calls;
        const cot_status status = queue->calls->open(&settings, &queue->device, &queue->isa);
        if (status != COT_OK) {
            cot_queue_destroy(queue);
            return status;
        }
    }
    *out = queue;
    return COT_OK;
}

void cot_queue_destroy(cot_queue *queue)
{
    if (queue == NULL)
        return;
    if (queue->device != NULL)
        queue->calls->close(queue->device);
    free(queue->pool);
    free(queue->forced);
    free(queue);
}

int32_t cot_queue_threads(const cot_queue *queue)
{
    if (queue == NULL)
        return 0;
    return getpid() == loading_process ? queue->threads : 1;
}

cot_backend cot_queue_backend(const cot_queue *queue)
{
    return queue != NULL ? queue->backend : COT_BACKEND_CPU;
}

cot_status cot_queue_cuda(const cot_queue *queue, void **context, void **stream)
{
    static const char call[] = "cot_queue_cuda";
    if (queue == NULL || context == NULL || stream == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: %s is null", call,
                        queue == NULL     ? "queue"
                        : context == NULL ? "context"
                                          : "stream");
    if (queue->backend != COT_BACKEND_CUDA)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: queue is of %s, expected one of CUDA", call,
                        queue->backend == COT_BACKEND_HIP ? "HIP" : "the CPU");
    queue->calls->handles(queue->device, context, stream);
    return COT_OK;
}

cot_status cot_queue_reserve(cot_queue *queue, size_t bytes)
{
    void *pool;
    if (queue == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "cot_queue_reserve: queue is null");
    return cot_queue_pool(queue, bytes, &pool);
}

cot_status cot_queue_set_allocator(cot_queue *queue, cot_allocator *allocator, void *context)
{
    if (queue == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "cot_queue_set_allocator: queue is null");
    queue->allocator = allocator;
    queue->allocator_context = context;
    return COT_OK;
}

cot_status cot_queue_set_stream(cot_queue *queue, void *stream)
{
    if (queue == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "cot_queue_set_stream: queue is null");
    if (queue->device == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "cot_queue_set_stream: queue is of the CPU, expected one of a GPU");
    return queue->calls->set_stream(queue->device, stream);
}

cot_status cot_queue_check(cot_queue *queue)
{
    if (queue == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "cot_queue_check: queue is null");
    return queue->device != NULL ? queue->calls->check(queue->device) : COT_OK;
}

cot_status cot_queue_pool(cot_queue *queue, size_t bytes, void **pool)
{
    if (queue->device != NULL)
        return queue->calls->pool(queue->device, bytes, pool);
    if (bytes > queue->pool_bytes) {
        void *grown = NULL;
        if (bytes > SIZE_MAX - COT_ALIGNMENT || posix_memalign(&grown, COT_ALIGNMENT, cot_align_up(bytes)) != 0)
            return cot_fail(COT_OUT_OF_MEMORY, "the queue's pool cannot grow from %zu to %zu bytes", queue->pool_bytes,
                            bytes);
        free(queue->pool);
        queue->pool = grown;
        queue->pool_bytes = cot_align_up(bytes);
    }
    *pool = queue->pool;
    return COT_OK;
}

cot_status cot_queue_workspace(cot_queue *queue, const char *call, size_t bytes, void **workspace)
{
    if (queue->allocator == NULL)
        return cot_queue_pool(queue, bytes, workspace);
    *workspace = queue->allocator(queue->allocator_context, bytes);
    if (*workspace == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "%s: the queue's allocator has no workspace of %zu bytes", call, bytes);
    if ((uintptr_t)*workspace % COT_ALIGNMENT != 0)
        return cot_fail(COT_INVALID_LAYOUT,
                        "%s: the queue's allocator returned a workspace at %p, expected a multiple of %d", call,
                        *workspace, COT_ALIGNMENT);
    return COT_OK;
}

const char *cot_queue_forced_kernel(const cot_queue *queue, const char *op, size_t *length)
{
    const size_t op_length = strlen(op);
    for (const char *entry = queue->forced; entry != NULL && *entry != '\0';) {
        const size_t entry_length = strcspn(entry, ",");
        if (entry_length > op_length && entry[op_length] == '=' && strncmp(entry, op, op_length) == 0) {
            *length = entry_length - op_length - 1;
            return entry + op_length + 1;
        }
        entry += entry_length + (entry[entry_length] == ',');
    }
    return NULL;
}

typedef struct plain_body {
    void (*body)(void *context, int64_t item);
    void *context;
} plain_body;

static void run_plain(void *memory, int64_t item, void *scratch)
{
    const plain_body *plain = memory;
    (void)scratch;
    plain->body(plain->context, item);
}

void cot_run_items(const cot_queue *queue, int64_t items, void (*body)(void *, int64_t), void *context)
{
    plain_body plain = {body, context};
    cot_run_items_scratch(queue, items, run_plain, &plain);
}

void cot_run_items_scratch(const cot_queue *queue, int64_t items, void (*body)(void *, int64_t, void *), void *context)
{
    int64_t threads = cot_queue_threads(queue);
    threads = threads < items ? threads : items;
    if (threads <= 1) {
        for (int64_t item = 0; item < items; item++)
            body(context, item, queue->scratch);
        return;
    }
#pragma omp parallel num_threads((int)threads)
    {
        char *const scratch = queue->scratch + (size_t)omp_get_thread_num() * queue->scratch_bytes;
        fenv_t host; /* the state of this OpenMP thread; the calling thread is already in the default state */
        cot_enter_default_float_state(&host);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < items; item++)
            body(context, item, scratch);
        cot_restore_float_state(&host);
    }
}
