/* SPDX-License-Identifier: Apache-2.0 */
#include "communicator.h"

#include "cuda/device.h"

#include "core/status.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

/* Declarations of NCCL's interface, as of version 2.18. ncclUniqueId is a struct of 128 bytes, passed by value. */
/* clang-format off */
#define NCCL_FUNCTIONS(X)                                                                    \
    X(ncclGetUniqueId, (gpu_communicator_id *id))                                            \
    X(ncclCommInitRank, (void **comm, int size, gpu_communicator_id id, int rank))           \
    X(ncclCommSplit, (void *comm, int color, int key, void **created, void *config))         \
    X(ncclCommDestroy, (void *comm))
/* clang-format on */

typedef struct nccl_library {
    void *handle;
#define MEMBER(name, parameters) int(*name) parameters;
    NCCL_FUNCTIONS(MEMBER)
#undef MEMBER
    const char *(*ncclGetErrorString)(int result);
} nccl_library;

struct gpu_communicator {
    nccl_library nccl;
    cot_queue *queue; /* holds the primary context of the device */
    void *whole, *part;
    int rank;
};

static bool find_function(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

static cot_status open_library(nccl_library *nccl)
{
    const char *named = getenv("NCCL"), *name = named != NULL ? named : "libnccl.so.2";
    nccl->handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (nccl->handle == NULL)
        return cot_fail(COT_NO_DEVICE, "mpirun with --backend cuda needs NCCL, which cannot be opened: %s", dlerror());
#define FIND(function, parameters)                                \
    if (!find_function(nccl->handle, #function, &nccl->function)) \
        return cot_fail(COT_NO_DEVICE, "%s lacks %s: NCCL 2.18 or later is needed", name, #function);
    NCCL_FUNCTIONS(FIND)
    FIND(ncclGetErrorString, (int))
#undef FIND
    return COT_OK;
}

static cot_status check(const nccl_library *nccl, const char *call, int result)
{
    return result == 0 ? COT_OK : cot_fail(COT_DEVICE_ERROR, "%s: %s", call, nccl->ncclGetErrorString(result));
}

cot_status gpu_communicator_make_id(gpu_communicator_id *id)
{
    nccl_library nccl;
    cot_status status = open_library(&nccl);
    if (status == COT_OK)
        status = check(&nccl, "ncclGetUniqueId", nccl.ncclGetUniqueId(id));
    return status; /* the library stays open, because it listens on the id's address */
}

cot_status gpu_communicator_create(gpu_communicator **out, const gpu_communicator_id *id, int rank, int size,
                                   int device)
{
    gpu_communicator *c = *out = calloc(1, sizeof *c);
    cot_queue_options options;
    if (c == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "out of memory");
    c->rank = rank;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    options.device = device;
    cot_status status = open_library(&c->nccl);
    if (status == COT_OK)
        status = cot_queue_create(&options, &c->queue);
    if (status == COT_OK)
        status = cot_cuda_enter(c->queue->device);
    if (status != COT_OK)
        return status;
    status = check(&c->nccl, "ncclCommInitRank", c->nccl.ncclCommInitRank(&c->whole, size, *id, rank));
    cot_cuda_leave(c->queue->device);
    return status;
}

const void *gpu_communicator_whole(const gpu_communicator *c)
{
    return &c->whole;
}

const void *gpu_communicator_part(gpu_communicator *c, int color)
{
    if (cot_cuda_enter(c->queue->device) != COT_OK)
        return NULL;
    const cot_status status =
        check(&c->nccl, "ncclCommSplit", c->nccl.ncclCommSplit(c->whole, color, c->rank, &c->part, NULL));
    cot_cuda_leave(c->queue->device);
    return status == COT_OK ? &c->part : NULL;
}

void gpu_communicator_destroy(gpu_communicator *c)
{
    if (c == NULL)
        return;
    if (c->queue != NULL && cot_cuda_enter(c->queue->device) == COT_OK) {
        if (c->part != NULL)
            c->nccl.ncclCommDestroy(c->part);
        if (c->whole != NULL)
            c->nccl.ncclCommDestroy(c->whole);
        cot_cuda_leave(c->queue->device);
    }
    cot_queue_destroy(c->queue);
    free(c);
}
