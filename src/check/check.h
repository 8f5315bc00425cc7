/* SPDX-License-Identifier: Apache-2.0
 * check.h: every kernel of every op against its oracle, and the oracle against finite differences. */
#ifndef COT_CHECK_CHECK_H
#define COT_CHECK_CHECK_H

#include "core/cases.h"

typedef struct check_options {
    const char *op;     /* NULL = all */
    const char *kernel; /* only kernels whose name contains this; NULL = all */
    const char *only;   /* only cases whose description contains this; NULL = all */
    cot_backend backend;
    bool quick, report;
    int repeat; /* runs of every case, whose bytes must agree; at least 2 */
    int jobs;   /* cases in hand at a time, a thread each; at least 1 */
    /* Called now and then, by the calling thread, with the share that is done; may be NULL. */
    void (*progress)(void *context, double share, const char *what);
    void *context;
} check_options;

/* What check_run returns when no kernel ran on any case. */
enum { CHECKED_NOTHING = -1 };

/* Prints a line for each kernel, what failed, and last "N passed, N failed, N skipped"; returns the number failed.
 * A test is one kernel on one case. The tests of a kernel whose instruction set this machine lacks are skipped. A check
 * in which no kernel ran, because the options match nothing or because every test was skipped, says why on stderr and
 * returns CHECKED_NOTHING. */
int64_t check_run(const check_options *options);

/* The oracle's gradient of one case against central differences of its own forward: the largest relative error, in
 * norm, over the gradients. */
double check_gradient(const cot_op_cases *cases, const cot_case *c);

/* Does an op (NULL: any) have a kernel of the backend whose name contains the text? */
bool kernel_exists(const char *op, cot_backend backend, const char *text);

/* "bf16 channel-last B2 D64 T100 K4 w=f32+silu": what --only matches. */
void describe_case(const cot_op_cases *cases, const cot_case *c, char *text, size_t size);

#endif
