/* SPDX-License-Identifier: Apache-2.0
 *
 * product_rate_device.c: launches the kernels that measure a GPU's rate of matrix products (cuda/product_rate*.cu). */
#include "bench_device.h"

#ifdef COT_CUDA
#include "cuda/device.h"
#include "cuda/product_rate.h"

extern const unsigned char cot_image_product_rate[], cot_image_product_rate_sm90[];

/* repeats: a launch takes about 2 ms on an H200. */
typedef struct product_kernel {
    cot_cuda_kernel kernel;
    unsigned threads;
    double flops; /* of one repeat in one block */
    int repeats;
} product_kernel;

#define WGMMA_FLOPS (2.0 * WGMMA_RATE_M * WGMMA_RATE_N * WGMMA_RATE_K)
#define MMA_FLOPS (2.0 * MMA_RATE_M * MMA_RATE_N * MMA_RATE_K * (MMA_RATE_THREADS / 32))
#define FMA_FLOPS (2.0 * FMA_RATE_M * FMA_RATE_N * FMA_RATE_THREADS)
#define WGMMA(name)                                                                                   \
    {                                                                                                 \
        {cot_image_product_rate_sm90, name, WGMMA_RATE_SHARED}, WGMMA_RATE_THREADS, WGMMA_FLOPS, 1800 \
    }
#define MMA(name)                                                            \
    {                                                                        \
        {cot_image_product_rate, name, 0}, MMA_RATE_THREADS, MMA_FLOPS, 4000 \
    }

static const product_kernel wgmma_bf16 = WGMMA("product_rate_wgmma_bf16"), wgmma_f16 = WGMMA("product_rate_wgmma_f16"),
                            mma_bf16 = MMA("product_rate_mma_bf16"), mma_f16 = MMA("product_rate_mma_f16"),
                            fma_f32 = {{cot_image_product_rate, "product_rate_fma_f32", 0},
                                       FMA_RATE_THREADS,
                                       FMA_FLOPS,
                                       25000};

static const product_kernel *kernel_for(const cot_device *device, cot_dtype dtype)
{
    if (dtype == COT_F32)
        return &fma_f32;
    if (device->capability == 90)
        return dtype == COT_F16 ? &wgmma_f16 : &wgmma_bf16;
    return dtype == COT_F16 ? &mma_f16 : &mma_bf16;
}

cot_status product_rate_load(cot_queue *queue)
{
    const cot_status status = cot_cuda_add_image(queue, cot_image_product_rate);
    return status == COT_OK ? cot_cuda_add_image(queue, cot_image_product_rate_sm90) : status;
}

cot_status product_rate_enqueue(cot_queue *queue, cot_dtype dtype)
{
    const product_kernel *k = kernel_for(queue->device, dtype);
    const cot_cuda_grid grid = {.blocks = {(unsigned)queue->device->multiprocessors, 1, 1},
                                .threads = k->threads,
                                .shared_bytes = (unsigned)k->kernel.shared_bytes};
    const product_rate_call call = {.repeats = k->repeats};
    return cot_cuda_launch(queue, &k->kernel, &grid, &call);
}

double product_rate_flops(const cot_queue *queue, cot_dtype dtype)
{
    const product_kernel *k = kernel_for(queue->device, dtype);
    return k->flops * k->repeats * queue->device->multiprocessors;
}

#else

cot_status product_rate_load(cot_queue *queue)
{
    (void)queue;
    return COT_NO_DEVICE;
}

cot_status product_rate_enqueue(cot_queue *queue, cot_dtype dtype)
{
    (void)queue, (void)dtype;
    return COT_NO_DEVICE;
}

double product_rate_flops(const cot_queue *queue, cot_dtype dtype)
{
    (void)queue, (void)dtype;
    return 0;
}

#endif
