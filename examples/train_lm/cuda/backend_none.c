/* SPDX-License-Identifier: Apache-2.0
 *
 * backend_none.c: stands for backend_cuda.c and communicator.c in a build without CUDA. */
#include "backend_cuda.h"
#include "communicator.h"

#include <stddef.h>

cot_status backend_cuda_create(backend **out, const cuda_options *options)
{
    (void)options;
    *out = NULL;
    return cot_error_set(COT_NO_DEVICE, "this build has no CUDA: nvcc was not found, or COT_CUDA is OFF");
}

void backend_cuda_destroy(backend *b)
{
    (void)b;
}

cot_tensor backend_cuda_gradients(const backend *b)
{
    (void)b;
    return (cot_tensor){0};
}

size_t backend_cuda_bytes_now(const backend *b)
{
    (void)b;
    return 0;
}

cot_status backend_cuda_bind(backend *b, parameter_table *table)
{
    (void)b, (void)table;
    return COT_NO_DEVICE;
}

void backend_cuda_plan_begin(backend *b)
{
    (void)b;
}

cot_status backend_cuda_plan_end(backend *b)
{
    (void)b;
    return COT_NO_DEVICE;
}

size_t backend_cuda_bytes(const backend *b, const parameter_table *table)
{
    (void)b, (void)table;
    return 0;
}

void backend_cuda_describe(backend *b, char *name, size_t size, size_t *free_bytes, size_t *total_bytes)
{
    (void)b, (void)name, (void)size;
    *free_bytes = *total_bytes = 0;
}

cot_status gpu_communicator_make_id(gpu_communicator_id *id)
{
    (void)id;
    return cot_error_set(COT_NO_DEVICE, "this build has no CUDA: nvcc was not found, or COT_CUDA is OFF");
}

/* The functions below are never called, since no id can be made. */
cot_status gpu_communicator_create(gpu_communicator **out, const gpu_communicator_id *id, int rank, int size,
                                   int device)
{
    (void)id, (void)rank, (void)size, (void)device;
    *out = NULL;
    return COT_NO_DEVICE;
}

const void *gpu_communicator_whole(const gpu_communicator *c)
{
    (void)c;
    return NULL;
}

const void *gpu_communicator_part(gpu_communicator *c, int color)
{
    (void)c, (void)color;
    return NULL;
}

void gpu_communicator_destroy(gpu_communicator *c)
{
    (void)c;
}
