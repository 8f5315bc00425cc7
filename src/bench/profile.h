/* SPDX-License-Identifier: Apache-2.0
 * profile.h: measures one call on a GPU with inputs and outputs in host memory: allocation, copies and kernels.
 */
#ifndef COT_BENCH_PROFILE_H
#define COT_BENCH_PROFILE_H

#include "cases/cases.h"

#include <jansson.h>

/* Modes of a call; or-ed together in profile_options. */
enum { PROFILE_FRESH = 1, PROFILE_POOL = 2 }; /* device memory: allocated and freed in every call, or kept */
enum { PROFILE_ONE_STREAM = 1, PROFILE_TWO_STREAMS = 2 }; /* copies and kernels one after the other, or overlapped */
enum { PROFILE_FUSED = 1, PROFILE_LOOP = 2 };             /* one call for the whole batch, or one for each item */

typedef struct profile_options {
    unsigned memory, streams, batch;
} profile_options;

/* Measures the case in every mode that the options name, first those without overlap, and appends one object for each:
 *   op direction kernel dtype layout shape options      the call; kernel: the one that dispatch chose
 *   memory streams batch pieces                         the mode; pieces = calls, each of some items of the batch. Two
 *                                                       streams with a fused batch make two calls, each with half of
 *                                                       the items.
 *   total_ms                                            from host memory to host memory, by the host's clock: median
 *   allocation_ms to_device_ms kernels_ms to_host_ms    parts of it: allocating and freeing by the host's clock, the
 *                                                       others by the device's. They are sums over the pieces: with
 *                                                       overlap they exceed the total.
 *   bytes_to_device bytes_to_host allocated_bytes
 *   launches                                            a list: name blocks threads registers local_bytes static_shared
 *                                                       dynamic_shared blocks_per_multiprocessor occupancy waves count
 *   device date commit version
 * The data lies in page-locked memory, allocated before the measurement. Inputs that all items share are copied
 * once. Returns COT_OK, or the status of the failure. A mode in which the batch cannot be split is skipped, with its
 * reason on standard error. Returns COT_UNSUPPORTED if no mode is left. */
cot_status profile_case(const cot_op_cases *cases, const cot_case *c, cot_backend backend,
                        const profile_options *options, json_t *rows);

/* Loads the rows of a file that --json wrote. Returns NULL if the file has none, with the reason in *why. */
json_t *profile_load(const char *path, const char **why);

/* profile_print prints the rows as a table. profile_plot draws them with gnuplot: a bar for each row and a panel for
 * each case. It returns NULL, or a message if it fails. */
void profile_print(const json_t *rows);
const char *profile_plot(const json_t *rows, const char *path);

#endif
