/* SPDX-License-Identifier: Apache-2.0
 *
 * positions.h: which tokens of a sequence the rows in memory are. C and CUDA code include it. */
#ifndef TRAIN_LM_POSITIONS_H
#define TRAIN_LM_POSITIONS_H

#include <stdint.h>

/* Row r of a sequence is token first + r, from row `split` on token second + r - split. A rank of context parallelism
 * holds two pieces of each sequence; else there is one. */
typedef struct row_positions {
    int64_t first, split, second;
} row_positions;

static inline row_positions positions_from(int64_t first)
{
    return (row_positions){first, INT64_MAX, 0};
}

/* A macro, because a function would have to be declared for the device too. */
#define POSITION_OF(positions, r) \
    ((r) < (positions).split ? (positions).first + (r) : (positions).second + (r) - (positions).split)

#endif
