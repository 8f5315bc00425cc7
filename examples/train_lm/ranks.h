/* SPDX-License-Identifier: Apache-2.0
 *
 * ranks.h: data parallel training. `mpirun -n N train_lm ...` starts N processes, the ranks. Each one computes the gradients of its
 * share of the --accumulate batches of a step, and all add them in the order of the ranks (libcotangent_parallel). So the
 * parameters are the same on all ranks. Rank 0 prints and writes files. */
#ifndef TRAIN_LM_RANKS_H
#define TRAIN_LM_RANKS_H

#include "io/file.h"

typedef struct cot_group cot_group;

/* group is NULL if there is one rank. */
typedef struct ranks {
    cot_group *group;
    int rank, size;
} ranks;

/* Joins the ranks that mpirun has started. Without mpirun there is one. False with a message if that fails. */
bool ranks_open(ranks *r, io_error *error);

/* Call it on all ranks, at the end of a run that has succeeded. */
void ranks_close(ranks *r);

/* Ends the processes of all ranks, if there are several. */
void ranks_abort(const ranks *r, int status);

/* Replaces each value by the sum over the ranks, in their order. */
cot_status ranks_sum(const ranks *r, double *values, int64_t count);

/* COT_PEER_ERROR if the ranks have different hashes. `what` names in the message what differs. */
cot_status ranks_agree(const ranks *r, uint64_t hash, const char *what);

#endif
