/* SPDX-License-Identifier: Apache-2.0
 * device.h: a CUDA queue from the inside, and how ops launch kernels on it. */
#ifndef COT_CUDA_DEVICE_H
#define COT_CUDA_DEVICE_H

#include "core/queue.h"
#include "driver.h"
#include "fault.h"
#include "memory.h"

#include <stdbool.h>

/* The embedded fat binaries of the library, one per .cu file: cot_image_STEM. The build makes this table, which a null pointer
 * ends (cmake/cuda.cmake). */
extern const unsigned char *const cot_cuda_images[];

/* A kernel of one of them; `name` is what a profiler shows. */
typedef struct cot_cuda_kernel {
    const unsigned char *image;
    const char *name;
    int shared_bytes; /* dynamic shared memory, the most that any launch asks for */
} cot_cuda_kernel;

enum { COT_CUDA_MAX_KERNELS = 512, COT_CUDA_MAX_IMAGES = 64, COT_CUDA_MAX_POOLS = 64 };

struct cot_device {
    cot_cuda_driver driver;
    CUdevice number;
    CUcontext context;
    bool primary; /* the context is the primary one, retained by us */
    CUstream stream;
    int multiprocessors, capability; /* 90: compute capability 9.0 */
    int most_shared;                 /* bytes of shared memory that a block may ask for */
    const unsigned char *images[COT_CUDA_MAX_IMAGES];
    CUlibrary libraries[COT_CUDA_MAX_IMAGES]; /* of the images */
    int library_count;
    struct {
        const cot_cuda_kernel *key;
        CUkernel kernel;
    } kernels[COT_CUDA_MAX_KERNELS];       /* open addressing by the descriptor's address */
    CUdeviceptr pools[COT_CUDA_MAX_POOLS]; /* the last one serves */
    int pool_count;
    size_t pool_bytes;
    CUdeviceptr fault;                                               /* cot_fault_word */
    void (*seen)(void *context, const cot_cuda_launch_facts *facts); /* see cot_cuda_observe */
    void *seen_context;
};

/* Loads an image besides those of cot_cuda_images, for kernels that only the program has. */
cot_status cot_cuda_add_image(cot_queue *queue, const unsigned char *image);

/* The kernel's handle; its dynamic shared memory limit is raised. */
cot_status cot_cuda_find_kernel(cot_device *device, const cot_cuda_kernel *kernel, CUkernel *found);

/* Where and how wide a launch is. cluster: blocks in x that form one, 0 = none. dependent: programmatic dependent
 * launch, for a kernel that itself waits for the one before (cot_wait_for_kernels_before) where it first needs its
 * results; ignored but on Hopper. */
typedef struct cot_cuda_grid {
    unsigned blocks[3], threads, shared_bytes, cluster;
    bool dependent;
} cot_cuda_grid;

/* Enqueues a kernel that takes one struct by value. */
cot_status cot_cuda_launch(cot_queue *queue, const cot_cuda_kernel *kernel, const cot_cuda_grid *grid,
                           const void *parameters);

/* A tensor map for bulk tensor loads, without swizzle: sizes and box in elements, innermost axis first, strides in bytes
 * of the axes after that. Fails with COT_DEVICE_ERROR if the driver refuses it. */
cot_status cot_cuda_tensor_map(cot_queue *queue, CUtensorMap *map, cot_dtype dtype, int rank, const void *data,
                               const int64_t *sizes, const int64_t *strides, const int *box);

/* The same with 128-byte swizzle, for boxes whose rows are 128 bytes: in each eight rows, 1024 bytes, unit u of sixteen
 * bytes of row r lies at u ^ r. */
cot_status cot_cuda_swizzled_map(cot_queue *queue, CUtensorMap *map, cot_dtype dtype, int rank, const void *data,
                                 const int64_t *sizes, const int64_t *strides, const int *box);

/* Where kernels report faults in index data. */
static inline unsigned long long *cot_cuda_fault_word(const cot_queue *queue)
{
    return (unsigned long long *)(uintptr_t)queue->device->fault;
}

#endif
