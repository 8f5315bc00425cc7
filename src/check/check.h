/* SPDX-License-Identifier: Apache-2.0
 * check.h: compares every kernel of every op with its oracle, and the oracle's gradients with finite differences. */
#ifndef COT_CHECK_CHECK_H
#define COT_CHECK_CHECK_H

#include "cases/cases.h"

typedef struct check_options {
    const char *op;     /* NULL = all */
    const char *kernel; /* only kernels whose name contains this; NULL = all */
    const char *only;   /* only cases whose description contains this; NULL = all */
    cot_backend backend;
    bool quick, report;
    bool hash;  /* prints a hash of each kernel's outputs */
    int repeat; /* runs of every case, all with the same bytes; at least 2 */
    int jobs;   /* cases checked at the same time, with one thread each; at least 1 */
    /* Called from time to time by the calling thread, with the part of the work that is done (0 to 1). May be NULL. */
    void (*progress)(void *context, double share, const char *what);
    void *context;
} check_options;

/* Returned by check_run if no kernel ran on any case. */
enum { CHECKED_NOTHING = -1 };

/* Prints the failures, a line for each kernel, and last "N passed, N failed, N skipped". Returns the number failed. A
 * test is one kernel on one case. The tests of a kernel whose instruction set this machine lacks are skipped. If no
 * kernel ran, it prints the reason on stderr and returns CHECKED_NOTHING: the options match nothing, or every test was
 * skipped. */
int64_t check_run(const check_options *options);

/* Compares the oracle's gradients of one case with central differences of the oracle's forward. Returns the largest
 * error over the gradients, as a norm relative to the gradient's norm. */
double check_gradient(const cot_op_cases *cases, const cot_case *c);

/* Returns whether an op (NULL: any op) has a kernel of the backend whose name contains the text. */
bool kernel_exists(const char *op, cot_backend backend, const char *text);

/* Writes the text that --only matches, such as "forward bf16 channel-last B2 D64 T100 K4 w=f32+silu". */
void describe_case(const cot_op_cases *cases, const cot_case *c, char *text, size_t size);

#endif
