/* SPDX-License-Identifier: Apache-2.0
 * shard.h: the rows of a sequence that a rank, or several neighbouring ranks together, hold. */
#ifndef COT_PARALLEL_SHARD_H
#define COT_PARALLEL_SHARD_H

#include <cotangent/parallel.h>

/* Rows begin .. begin+rows of the whole sequence. They are at rows row .. row+rows of the part that holds them. */
typedef struct cot_segment {
    int64_t begin, rows, row;
} cot_segment;

/* The segments of a part, in ascending order. Segments that meet are joined, and none is empty. */
typedef struct cot_segments {
    cot_segment *list;
    int64_t count, rows; /* rows: the sum over the segments */
} cot_segments;

/* Checks options and length, without which the functions below are undefined. */
cot_status cot_check_cut(const char *call, const cot_parallel_options *options, int64_t length);

/* Copies options of an older or newer header, as the core does. NULL: the defaults. */
cot_status cot_copy_options(const char *call, const cot_parallel_options *options, cot_parallel_options *copy);

/* The segments that ranks first .. first+count of `ranks` hold together. list is NULL if there is no memory. The caller
 * frees list. */
cot_segments cot_segments_of(const cot_parallel_options *options, int64_t length, int64_t ranks, int64_t first,
                             int64_t count);

/* The row of the part that holds row `position` of the whole sequence, or -1. */
int64_t cot_segments_find(const cot_segments *segments, int64_t position);

#endif
