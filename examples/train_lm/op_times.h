/* SPDX-License-Identifier: Apache-2.0
 *
 * op_times.h: counts and times the calls of each op of the library. For calls from one thread, and for CPU queues,
 * whose calls return after the work is done. */
#ifndef TRAIN_LM_OP_TIMES_H
#define TRAIN_LM_OP_TIMES_H

#include "real.h"

#include <stdbool.h>

typedef enum timed_op {
    OP_CONV1D_FORWARD,
    OP_CONV1D_BACKWARD,
    OP_CONV1D_DENSE_FORWARD,
    OP_CONV1D_DENSE_BACKWARD,
    OP_ATTENTION_FORWARD,
    OP_ATTENTION_BACKWARD,
    OP_DROPOUT_FORWARD,
    OP_DROPOUT_BACKWARD,
    OP_MHC_PRE_FORWARD,
    OP_MHC_PRE_BACKWARD,
    OP_MHC_POST_FORWARD,
    OP_MHC_POST_BACKWARD,
    OP_MHC_POST_PRE_FORWARD,
    OP_MHC_POST_PRE_BACKWARD,
    TIMED_OPS
} timed_op;

/* Times `call`, a call of the library, and returns its status. `work`: floating-point operations for attention and
 * dense convolutions, otherwise the bytes that the call must read and write. */
#define TIMED(op, work, call) (op_times_begin(), op_times_end(op, work, call))

void op_times_begin(void);
cot_status op_times_end(timed_op op, double work, cot_status status);

/* Sets all counts to 0 and starts counting. op_times_stop stops counting. */
void op_times_start(void);
void op_times_stop(void);

/* Prints a table of the ops that were called. */
void op_times_print(void);

#endif
