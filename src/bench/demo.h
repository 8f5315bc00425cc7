/* SPDX-License-Identifier: Apache-2.0
 * demo.h: the jobs of the five specifications (docs/original_specifications.md), as calls of the library. They are
 * measured and compared with the oracle, and their figures are printed next to the documents' figures. */
#ifndef COT_BENCH_DEMO_H
#define COT_BENCH_DEMO_H

#include "cases/cases.h"

#include <jansson.h>

typedef struct demo_options {
    const char *number; /* "000" */
    cot_backend backend;
    bool verify;
    bool quick; /* small sizes: tests that it works, not how fast it is */
    void (*progress)(void *context, double share, const char *what);
    void *context;
} demo_options;

/* The numbers of all demos, "000 001 ...", and the title of a document. demo_title returns NULL for an unknown
 * number. */
extern const char demo_numbers[];
const char *demo_title(const char *number);

/* The first op of a demo without a kernel of this backend, or NULL. */
const char *demo_missing_op(const char *number, cot_backend backend);

/* Runs one demo and prints it. Returns rows, which the caller releases: those of bench.h with `demo`, `what` and
 * `verified`, then one for each figure, {demo figure document here device date commit backend}. *good: every call was
 * made, and every output lay within the error rule and the demo's own bounds. */
json_t *demo_run(const demo_options *options, bool *good);

#endif
