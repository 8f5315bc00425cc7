/* SPDX-License-Identifier: Apache-2.0
 *
 * ranks.h: training on several ranks: the processes of `mpirun -n N train_lm ...`, or the threads of `train_lm --gpus N`.
 * On GPUs, each rank has one of its own. Ranks with consecutive numbers, context_size of them, hold parts of the same
 * sequences (context_ranks.h). These groups divide the --accumulate batches of a step (data parallel). All ranks add
 * their gradients in the order of the ranks (libcotangent_parallel). So the parameters are the same on all ranks. Rank 0
 * prints and writes files. */
#ifndef TRAIN_LM_RANKS_H
#define TRAIN_LM_RANKS_H

#include "io/file.h"

typedef struct cot_group cot_group;

/* Groups are NULL where they would have one rank. */
typedef struct ranks {
    cot_group *group;     /* of all ranks, for host memory */
    cot_group *gpu_group; /* of all ranks, for the memory of GPUs: over NCCL, or `group` itself */
    cot_group *context_group;
    int rank, size, context_size;
    int device;                            /* the number of the rank's GPU on its machine */
    struct gpu_communicator *communicator; /* of gpu_group, if it is over NCCL */
} ranks;

/* Joins the ranks that mpirun has started. Without mpirun there is one. False with a message if that fails. */
bool ranks_open(ranks *r, io_error *error);

/* After ranks_open, with several ranks: makes the other groups. context_size divides the number of ranks. through_mpi:
 * MPI transfers the memory of GPUs, and not NCCL. */
bool ranks_divide(ranks *r, int context_size, bool gpus, bool through_mpi, io_error *error);

/* Call it on all ranks, at the end of a run that has succeeded. */
void ranks_close(ranks *r);

/* Ends the processes of all ranks, if mpirun has started several. */
void ranks_abort(const ranks *r, int status);

/* Runs body(rank, context) in `count` threads, one for each rank; rank 0 is the calling thread. A body that fails calls
 * ranks_break. False if the threads could not be started. */
bool ranks_run_threads(int count, int context_size, void (*body)(const ranks *r, void *context), void *context);

/* The calls of the other threads fail with the reason, so that none of them waits for this rank. */
void ranks_break(const ranks *r, const char *reason);

/* Replaces each value by the sum over the ranks, in their order. Sums are f64. ranks_sum: in host memory.
 * ranks_sum_tensor: in the memory of the queue's GPU. */
cot_status ranks_sum(const ranks *r, double *values, int64_t count);
cot_status ranks_sum_tensor(const ranks *r, cot_queue *queue, const cot_tensor *tensor);

/* The bytes of memory that ranks_sum_tensor needs for `count` floats. */
double ranks_sum_bytes(const ranks *r, int64_t count);

/* COT_PEER_ERROR if the ranks have different hashes. `what` names in the message what differs. */
cot_status ranks_agree(const ranks *r, uint64_t hash, const char *what);

#endif
