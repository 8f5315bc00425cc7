/* SPDX-License-Identifier: Apache-2.0
 * device.h: the internals of a HIP queue, and the functions with which ops launch kernels on it. No file includes this
 * header and that of src/cuda. */
#ifndef COT_HIP_DEVICE_H
#define COT_HIP_DEVICE_H

#include "core/queue.h"
#include "driver.h"

#include <stdbool.h>

/* The embedded bundles of code objects, one per .cu file (cot_hip_image_STEM). A null entry ends the list. The build
 * writes it (cot_embed_hip_code in cmake/hip.cmake). */
extern const unsigned char *const cot_hip_images[];

/* A kernel in an image. Profilers show `name`. */
typedef struct cot_hip_kernel {
    const unsigned char *image;
    const char *name;
    int shared_bytes; /* dynamic shared memory: the maximum of all launches */
} cot_hip_kernel;

enum { COT_HIP_MAX_KERNELS = 256, COT_HIP_MAX_IMAGES = 32, COT_HIP_MAX_POOLS = 64 };

struct cot_device {
    cot_hip_driver driver;
    int number;   /* of the device */
    int previous; /* the thread's device before cot_hip_enter */
    void *stream;
    const unsigned char *images[COT_HIP_MAX_IMAGES];
    void *modules[COT_HIP_MAX_IMAGES]; /* modules[i] is loaded from images[i] */
    int module_count;
    struct {
        const cot_hip_kernel *key;
        void *function;
    } kernels[COT_HIP_MAX_KERNELS]; /* a hash table with open addressing; the key is the descriptor's address */
    void *pools[COT_HIP_MAX_POOLS]; /* the last one is in use */
    int pool_count;
    size_t pool_bytes;
    void *fault;                                                    /* see cot_hip_fault_word */
    void (*on_launch)(void *context, const cot_launch_info *facts); /* see observe_launches in core/device.h */
    void *on_launch_context;
};

/* A launch configuration. The members after the first three are of CUDA, and must be 0 or have no effect here. */
typedef struct cot_hip_grid {
    unsigned blocks[3], threads, shared_bytes, cluster;
    bool dependent;
} cot_hip_grid;

/* Enqueues a kernel that takes one struct by value. */
cot_status cot_hip_launch(cot_queue *queue, const cot_hip_kernel *kernel, const cot_hip_grid *grid,
                          const void *parameters);

/* The device address of the fault word, where kernels report faults in index data. */
static inline unsigned long long *cot_hip_fault_word(const cot_queue *queue)
{
    return queue->device->fault;
}

#endif
