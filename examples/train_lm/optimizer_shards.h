/* SPDX-License-Identifier: Apache-2.0
 *
 * optimizer_shards.h: the ranks share the work and the memory of the optimiser (--shard-optimizer). Each rank has the
 * moments of a share of the elements, updates that share, and gets the other values from the ranks that have updated
 * them. An update of an element reads no other element, so the values have the bits of an optimiser that is not shared. */
#ifndef TRAIN_LM_OPTIMIZER_SHARDS_H
#define TRAIN_LM_OPTIMIZER_SHARDS_H

#include <cotangent/cotangent.h>

typedef struct cot_group cot_group;

/* size 0 or 1: this rank has everything, and group is not used. */
typedef struct optimizer_shards {
    cot_group *group; /* of all ranks, for the memory of the backend */
    int rank, size;
} optimizer_shards;

typedef struct element_range {
    int64_t begin, end;
} element_range;

/* The share of this rank, of `count` elements. */
element_range optimizer_share(const optimizer_shards *s, int64_t count);

/* Replaces the elements that are not of this rank's share by those of the other ranks. They must be 0 before. queue: of
 * the array's GPU; NULL for host memory. All ranks call it. */
cot_status optimizer_shards_gather(const optimizer_shards *s, cot_queue *queue, cot_dtype dtype, void *array,
                                   int64_t count);

#endif
