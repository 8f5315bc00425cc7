/* SPDX-License-Identifier: Apache-2.0 */
#include "op_times.h"

#include "progress.h"

#include <stdio.h>

static const struct {
    const char *name;
    bool counts_flops;
} OPS[TIMED_OPS] = {
    [OP_CONV1D_FORWARD] = {"causal_conv1d forward", false},
    [OP_CONV1D_BACKWARD] = {"causal_conv1d backward", false},
    [OP_CONV1D_DENSE_FORWARD] = {"causal_conv1d_dense forward", true},
    [OP_CONV1D_DENSE_BACKWARD] = {"causal_conv1d_dense backward", true},
    [OP_ATTENTION_FORWARD] = {"attention forward", true},
    [OP_ATTENTION_BACKWARD] = {"attention backward", true},
    [OP_DROPOUT_FORWARD] = {"dropout forward", false},
    [OP_DROPOUT_BACKWARD] = {"dropout backward", false},
    [OP_MHC_PRE_FORWARD] = {"mhc_pre forward", false},
    [OP_MHC_PRE_BACKWARD] = {"mhc_pre backward", false},
    [OP_MHC_POST_FORWARD] = {"mhc_post forward", false},
    [OP_MHC_POST_BACKWARD] = {"mhc_post backward", false},
    [OP_MHC_POST_PRE_FORWARD] = {"mhc_post_pre forward", false},
    [OP_MHC_POST_PRE_BACKWARD] = {"mhc_post_pre backward", false},
};

/* Of the thread that trains. */
static _Thread_local struct {
    int64_t calls;
    double seconds, work;
} times[TIMED_OPS];

static _Thread_local double begin_seconds;
static _Thread_local bool counting;

void op_times_begin(void)
{
    begin_seconds = progress_now();
}

cot_status op_times_end(timed_op op, double work, cot_status status)
{
    if (!counting)
        return status;
    times[op].seconds += progress_now() - begin_seconds;
    times[op].work += work;
    times[op].calls++;
    return status;
}

void op_times_start(void)
{
    counting = true;
    memset(times, 0, sizeof times);
}

void op_times_stop(void)
{
    counting = false;
}

void op_times_print(void)
{
    printf("\n%-30s %9s %10s %9s %14s\n", "ops in training", "calls", "total ms", "ms a call", "rate");
    for (int op = 0; op < TIMED_OPS; op++)
        if (times[op].calls > 0)
            printf("%-30s %9lld %10.1f %9.4f %7.1f %s\n", OPS[op].name, (long long)times[op].calls,
                   1e3 * times[op].seconds, 1e3 * times[op].seconds / (double)times[op].calls,
                   1e-9 * times[op].work / times[op].seconds, OPS[op].counts_flops ? "GFLOP/s" : "GB/s");
}
