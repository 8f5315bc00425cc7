/* SPDX-License-Identifier: Apache-2.0
 *
 * communicator.h: a NCCL communicator between processes, each with a GPU of its own. libnccl.so.2 (2.18 or later) is opened
 * at run time; the environment variable NCCL may name it. In a build without CUDA, backend_none.c has these functions,
 * which fail with COT_NO_DEVICE. */
#ifndef TRAIN_LM_COMMUNICATOR_H
#define TRAIN_LM_COMMUNICATOR_H

#include <cotangent/core.h>

typedef struct gpu_communicator gpu_communicator;

/* An id names a communicator. One rank makes it, and passes it to the others. */
typedef struct gpu_communicator_id {
    char bytes[128];
} gpu_communicator_id;

cot_status gpu_communicator_make_id(gpu_communicator_id *id);

/* Joins the communicator as rank `rank` of `size` with the GPU `device`. Collective. */
cot_status gpu_communicator_create(gpu_communicator **out, const gpu_communicator_id *id, int rank, int size,
                                   int device);

/* What cot_group_create_nccl reads: the address of the ncclComm_t of all ranks, or of that of the ranks with the same
 * `color`, which is collective and can be asked for once. NULL with a message if that fails. */
const void *gpu_communicator_whole(const gpu_communicator *c);
const void *gpu_communicator_part(gpu_communicator *c, int color);

void gpu_communicator_destroy(gpu_communicator *c);

#endif
