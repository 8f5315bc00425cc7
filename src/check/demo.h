/* SPDX-License-Identifier: Apache-2.0
 * demo.h: the jobs that the five documents behind the project describe (docs/seeds.md), as calls of the library: measured,
 * held against the oracle, and their figures beside the documents'. */
#ifndef COT_CHECK_DEMO_H
#define COT_CHECK_DEMO_H

#include "core/cases.h"

#include <jansson.h>

typedef struct demo_options {
    const char *number; /* "000" */
    cot_backend backend;
    bool verify;
    bool quick; /* small sizes: whether it works, not how fast */
    void (*progress)(void *context, double share, const char *what);
    void *context;
} demo_options;

/* "000 001 ...", and what a document is about; NULL for another number. */
extern const char demo_numbers[];
const char *demo_title(const char *number);

/* Runs one and prints it. Returns rows (the caller's): those of bench.h with `demo`, `what` and `verified`, then one for
 * each figure, {demo figure document here device date commit backend}. *good: every call was made, and every output lay
 * within the error rule and the demo's own bounds. */
json_t *demo_run(const demo_options *options, bool *good);

#endif
