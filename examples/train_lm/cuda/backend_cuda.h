/* SPDX-License-Identifier: Apache-2.0
 *
 * backend_cuda.h: the backend of a GPU (backend.h). In a build without CUDA, backend_none.c has these functions, and
 * backend_cuda_create fails with COT_NO_DEVICE. */
#ifndef TRAIN_LM_BACKEND_CUDA_H
#define TRAIN_LM_BACKEND_CUDA_H

#include "../backend.h"

#include <stddef.h>

typedef struct cuda_options {
    int32_t device;                             /* the number of the GPU */
    cot_dtype dtype;                            /* of values and activations: f32, f16 or bf16 */
    int64_t rows, micro_batches;                /* the most that `load` gets */
    int64_t step_batches;                       /* micro-batches of a step, of all ranks */
    int64_t time, head_size, vocabulary, width; /* time and head_size: of RoPE; head_size 0: no attention */
    int64_t block_count;                        /* dropout's offsets of one forward */
    double loss_scale;                          /* factor of the gradients in 16-bit memory; a power of two */
    adamw_options adamw;
} cuda_options;

/* Opens the GPU and cuBLASLt. COT_NO_DEVICE: the message says which of them is missing. */
cot_status backend_cuda_create(backend **out, const cuda_options *options);
void backend_cuda_destroy(backend *b);

/* A model's memory has two parts. Parameters: values, masters, gradients and moments; copies the host arrays of the table
 * and sets w, w_wide and dw. Passes: between plan_begin and plan_end, `allocate` only counts bytes, and returns addresses
 * that no operation may use. plan_end allocates what was counted: create the same passes again then. */
cot_status backend_cuda_bind(backend *b, parameter_table *table);
void backend_cuda_plan_begin(backend *b);
cot_status backend_cuda_plan_end(backend *b);

/* Between plan_begin and plan_end, before bind: the bytes of device memory that the model will have, apart from the
 * workspaces of the library's ops. */
size_t backend_cuda_bytes(const backend *b, const parameter_table *table);

/* The gradients of all parameters, f32 of rank 1 in device memory, from the end of a step's backward to its update. */
cot_tensor backend_cuda_gradients(const backend *b);

/* The bytes of device memory that the backend has now. */
size_t backend_cuda_bytes_now(const backend *b);

/* The name of the GPU, its free and total memory. */
void backend_cuda_describe(backend *b, char *name, size_t size, size_t *free_bytes, size_t *total_bytes);

#endif
