/* SPDX-License-Identifier: Apache-2.0
 * device.h: the internals of a CUDA queue, and the functions with which ops launch kernels on it. */
#ifndef COT_CUDA_DEVICE_H
#define COT_CUDA_DEVICE_H

#include "core/queue.h"
#include "driver.h"
#include "fault.h"
#include "memory.h"

#include <stdbool.h>

/* The embedded fat binaries of the library, one per .cu file (cot_image_STEM). A null entry ends the list. The build
 * writes it (cot_embed_device_code in cmake/cuda.cmake). */
extern const unsigned char *const cot_cuda_images[];

/* A kernel in an image. Profilers show `name`. */
typedef struct cot_cuda_kernel {
    const unsigned char *image;
    const char *name;
    int shared_bytes; /* dynamic shared memory: the maximum of all launches */
} cot_cuda_kernel;

enum { COT_CUDA_MAX_KERNELS = 512, COT_CUDA_MAX_IMAGES = 64, COT_CUDA_MAX_POOLS = 64 };

struct cot_device {
    cot_cuda_driver driver;
    CUdevice number;
    CUcontext context;
    bool primary; /* the context is the device's primary context, which this queue has retained */
    CUstream stream;
    int multiprocessors, capability; /* 90: compute capability 9.0 */
    int max_shared_bytes;            /* the maximum of a block's shared memory in bytes */
    const unsigned char *images[COT_CUDA_MAX_IMAGES];
    CUlibrary libraries[COT_CUDA_MAX_IMAGES]; /* libraries[i] is loaded from images[i] */
    int library_count;
    struct {
        const cot_cuda_kernel *key;
        CUkernel kernel;
    } kernels[COT_CUDA_MAX_KERNELS];       /* a hash table with open addressing; the key is the descriptor's address */
    CUdeviceptr pools[COT_CUDA_MAX_POOLS]; /* the last one is in use */
    int pool_count;
    size_t pool_bytes;
    CUdeviceptr fault;                                              /* see cot_cuda_fault_word */
    void (*on_launch)(void *context, const cot_launch_info *facts); /* see cot_cuda_observe_launches */
    void *on_launch_context;
};

/* cot_cuda_enter makes the device's context the thread's current context. cot_cuda_leave restores the previous one. */
cot_status cot_cuda_enter(cot_device *device);
void cot_cuda_leave(cot_device *device);

/* Loads an image that is not in cot_cuda_images, for kernels that only the program has. */
cot_status cot_cuda_add_image(cot_queue *queue, const unsigned char *image);

/* Finds the kernel's handle. Sets its limit of dynamic shared memory to kernel->shared_bytes. */
cot_status cot_cuda_find_kernel(cot_device *device, const cot_cuda_kernel *kernel, CUkernel *found);

/* A launch configuration. `cluster` is the cluster size in blocks along x, 0 = no clusters. `dependent` requests
 * programmatic dependent launch. The kernel must then wait for the preceding kernels itself
 * (cot_griddepcontrol_wait) before it uses their results. Devices other than Hopper ignore `dependent`. */
typedef struct cot_cuda_grid {
    unsigned blocks[3], threads, shared_bytes, cluster;
    bool dependent;
} cot_cuda_grid;

/* Enqueues a kernel that takes one struct by value. */
cot_status cot_cuda_launch(cot_queue *queue, const cot_cuda_kernel *kernel, const cot_cuda_grid *grid,
                           const void *parameters);

/* Encodes a tensor map for TMA, without swizzle. `sizes` and `box` are in elements, innermost axis first. `strides` are
 * in bytes, without the innermost axis. Returns COT_DEVICE_ERROR if the driver refuses the map. */
cot_status cot_cuda_tensor_map(cot_queue *queue, CUtensorMap *map, cot_dtype dtype, int rank, const void *data,
                               const int64_t *sizes, const int64_t *strides, const int *box);

/* The same with 128-byte swizzle, for boxes with rows of 128 bytes. In each group of 8 rows (1024 bytes), the 16-byte
 * chunk c of row r is stored at chunk c ^ r. */
cot_status cot_cuda_swizzled_map(cot_queue *queue, CUtensorMap *map, cot_dtype dtype, int rank, const void *data,
                                 const int64_t *sizes, const int64_t *strides, const int *box);

/* The device address of the fault word, where kernels report faults in index data. */
static inline unsigned long long *cot_cuda_fault_word(const cot_queue *queue)
{
    return (unsigned long long *)(uintptr_t)queue->device->fault;
}

#endif
