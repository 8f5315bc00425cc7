/* SPDX-License-Identifier: Apache-2.0
 * sharded.h: a test case of an op, cut over the ranks of a group. */
#ifndef COT_TESTS_SHARDED_H
#define COT_TESTS_SHARDED_H

#include "check/verify.h"

#include <cotangent/parallel.h>

/* The op and direction of a case, as a call over a group. */
typedef struct sharded_op {
    const char *name;
    /* The axis of a field that is cut, or -1. */
    int (*axis)(const cot_case *c, const char *field);
    /* Changes the copied argument struct for the call over a group. */
    void (*adjust)(const cot_case *c, const void *whole, void *part, cot_parallel_options *options);
    cot_status (*run)(cot_group *group, cot_queue *queue, const cot_parallel_options *options, int direction,
                      const void *args);
    /* Draws options for this number of ranks. Returns false if the case cannot be cut so. */
    bool (*draw)(const cot_case *c, int ranks, uint64_t *state, cot_parallel_options *options);
    /* Whether the test runs the case. */
    bool (*admits)(const cot_case *c);
} sharded_op;

extern const sharded_op sharded_attention, sharded_causal_conv1d;

/* The cases of the op. */
const cot_op_cases *sharded_cases(const sharded_op *op);

/* A case in memory, with the oracle's results. */
typedef struct whole_case {
    const sharded_op *op;
    const cot_direction *direction;
    cot_case c;
    bound_case bound;
    verification expected;
} whole_case;

/* Returns false if the scalar kernel refuses the case. */
bool whole_case_make(whole_case *w, const sharded_op *op, const cot_case *c);
/* Restores the initial values of outputs that accumulate, which rank_case_collect overwrites. */
void whole_case_reset(const whole_case *w);
void whole_case_free(whole_case *w);

/* The arguments of one rank. */
typedef struct rank_case {
    _Alignas(16) char args[COT_MAX_ARGS];
    storage fields[COT_MAX_FIELDS];
    cot_parallel_options options;
    cot_status status;
    char message[512];
} rank_case;

void rank_case_make(rank_case *r, const whole_case *w, const cot_parallel_options *options, int ranks, int rank);
void rank_case_free(rank_case *r, const whole_case *w);

/* Where the ranks run: on CPU queues of one thread, or on CUDA queues, each with its own stream. Set it before
 * the first call. */
extern cot_backend sharded_backend;

/* Whether the test runs the case there: no kernel of a GPU supports f64. */
bool sharded_admits(const sharded_op *op, const cot_case *c);

/* Runs the rank's call. device: the number of the GPU. */
void rank_case_run(rank_case *r, const whole_case *w, cot_group *group, int device);

/* Copies the rank's outputs into those of the whole case. */
void rank_case_collect(const rank_case *r, const whole_case *w, int ranks, int rank);

/* Whether two runs of one rank gave the same bytes. */
bool rank_case_equal(const rank_case *a, const rank_case *b, const whole_case *w);

/* Compares the collected outputs by the error rule. Prints a report of an output that violates it. */
bool whole_case_check(const whole_case *w, const cot_parallel_options *options, int ranks);

#endif
