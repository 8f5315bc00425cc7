/* SPDX-License-Identifier: Apache-2.0
 * profile.h: one call on a CUDA device from the host's memory back into it, and where its time goes. */
#ifndef COT_CHECK_PROFILE_H
#define COT_CHECK_PROFILE_H

#include "core/cases.h"

#include <jansson.h>

/* Ways to make the call; or-ed together in profile_options. */
enum { PROFILE_FRESH = 1, PROFILE_POOL = 2 }; /* device memory: allocated and freed in every call, or kept */
enum { PROFILE_ONE = 1, PROFILE_TWO = 2 };    /* copies and kernels one after the other, or overlapped */
enum { PROFILE_FUSED = 1, PROFILE_LOOP = 2 }; /* one call for the whole batch, or one for each item */

typedef struct profile_options {
    unsigned memory, streams, batch;
} profile_options;

/* Measures the case in every way that the options name, those first that overlap nothing, and appends one object for
 * each:
 *   op direction kernel dtype layout shape options      what was called; kernel: the row that dispatch took
 *   memory streams batch pieces                         how: pieces = calls, each of some items of the batch. Two streams
 *                                                       with a fused batch are two calls, of a half each.
 *   total_ms                                            from host to host, by the host's clock: median
 *   allocation_ms to_device_ms kernels_ms to_host_ms    of it: allocating and freeing by the host's clock; the others by
 *                                                       the device's, added up over the pieces, so that what overlaps
 *                                                       makes them more than the total
 *   bytes_to_device bytes_to_host allocated_bytes
 *   launches                                            a list: name blocks threads registers local_bytes static_shared
 *                                                       dynamic_shared blocks_per_multiprocessor occupancy waves count
 *   device date commit version
 * The data lies in page-locked memory, which is allocated before; inputs that no item has for itself are copied once.
 * Returns COT_OK, or the status of what failed. A way in which the batch cannot be split is left out, with its reason on
 * standard error; COT_UNSUPPORTED if none is left. */
cot_status profile_case(const cot_op_cases *cases, const cot_case *c, const profile_options *options, json_t *rows);

/* The rows of a file that was written before; NULL, with *why saying what is wrong with it, if they are none. */
json_t *profile_load(const char *path, const char **why);

/* The rows as a table for people; and as a drawing, through gnuplot, a bar a row and a panel a case. Returns NULL or what
 * failed. */
void profile_print(const json_t *rows);
const char *profile_plot(const json_t *rows, const char *path);

#endif
