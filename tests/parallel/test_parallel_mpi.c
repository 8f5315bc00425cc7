/* SPDX-License-Identifier: Apache-2.0
 * test_parallel_mpi.c: groups whose ranks are the processes of mpirun. Every process makes the same case; the first one
 * collects the results and compares them with the oracle.
 *
 *   test_parallel_mpi             a part of the cases of all ops; each call runs twice with the same bytes
 *   test_parallel_mpi cuda        a smaller part, on CUDA queues of the first GPU; exit status 77: there is none
 *   test_parallel_mpi refused     the last rank's options of the group are wrong: an error on every rank
 *   test_parallel_mpi options     the last rank passes other options: an error on every rank, then a call that works
 *   test_parallel_mpi silent      the last rank does not come: an error on every other rank
 *   test_parallel_mpi abort       the last rank aborts: an error on every other rank
 *   test_parallel_mpi die         the last rank is killed: the end of the job */
#include "parallel/sharded.h"

#include "cases/draw.h"
#include "check/check.h"

#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EVERY = 5, EVERY_CONVOLUTION = 25 }; /* the first of so many cases; the convolution has more */

static int rank, ranks, rarer = 1; /* CUDA queues: one of so many of these cases */
static cot_group *group;

/* Sends the outputs of this rank to the first one, which collects them. */
static void collect(const whole_case *w, rank_case *own, const cot_parallel_options *options)
{
    for (int other = 1; other < ranks; other++) {
        rank_case r;
        if (rank == 0) /* for its shapes */
            rank_case_make(&r, w, options, ranks, other);
        for (int f = 0; f < w->direction->field_count; f++) {
            if (w->direction->fields[f].role == COT_INPUT || own->fields[f].bytes == 0)
                continue;
            if (rank == 0)
                MPI_Recv(r.fields[f].memory, (int)r.fields[f].bytes, MPI_BYTE, other, f, MPI_COMM_WORLD,
                         MPI_STATUS_IGNORE);
            else if (rank == other)
                MPI_Send(own->fields[f].memory, (int)own->fields[f].bytes, MPI_BYTE, 0, f, MPI_COMM_WORLD);
        }
        if (rank == 0) {
            rank_case_collect(&r, w, ranks, other);
            rank_case_free(&r, w);
        }
    }
}

typedef struct progress {
    const sharded_op *op;
    int seen, calls, failures;
    uint64_t state;
} progress;

static bool visit(void *context, const cot_case *c)
{
    progress *p = context;
    cot_parallel_options options;
    const int every = rarer * (p->op == &sharded_attention ? EVERY : EVERY_CONVOLUTION);
    if (!sharded_admits(p->op, c) || p->seen++ % every != 0 || !p->op->draw(c, ranks, &p->state, &options))
        return true;
    whole_case w;
    rank_case first, second;
    if (!whole_case_make(&w, p->op, c))
        abort();
    rank_case_make(&first, &w, &options, ranks, rank);
    rank_case_make(&second, &w, &options, ranks, rank);
    rank_case_run(&first, &w, group, 0);
    rank_case_run(&second, &w, group, 0);
    bool good = first.status == COT_OK && second.status == COT_OK && rank_case_equal(&first, &second, &w);
    if (!good) {
        char text[512];
        describe_case(sharded_cases(p->op), c, text, sizeof text);
        printf("rank %d: %s: \"%s\", then \"%s\"\n", rank, text, first.message, second.message);
    }
    collect(&w, &first, &options);
    if (rank == 0) {
        rank_case_collect(&first, &w, ranks, 0);
        good = whole_case_check(&w, &options, ranks) && good;
    }
    p->calls++;
    p->failures += !good;
    rank_case_free(&first, &w), rank_case_free(&second, &w);
    whole_case_free(&w);
    return true;
}

static int check_op(const sharded_op *op)
{
    progress p = {.op = op, .state = 11};
    sharded_cases(op)->each(visit, &p);
    if (rank == 0 || p.failures > 0)
        printf("%s, rank %d of %d: %d calls, %d failures\n", op->name, rank, ranks, p.calls, p.failures);
    return p.calls == 0 || p.failures > 0;
}

/* One all-reduce. Returns whether the status and, if it is not NULL, the message are as expected. */
static bool sum_gives(int64_t size, cot_status status, const char *message)
{
    float values[8] = {1, 2, 3, 4};
    const cot_tensor t = cot_tensor_contiguous(values, COT_F32, 1, &size);
    cot_queue *queue = NULL;
    if (cot_queue_create(NULL, &queue) != COT_OK)
        abort();
    const cot_status got = cot_group_all_reduce(group, queue, &t);
    cot_queue_destroy(queue);
    if (got == status && (got == COT_OK || strstr(cot_error_message(), message) != NULL))
        return got != COT_OK || values[1] == 2 * (float)ranks;
    printf("rank %d: got %s \"%s\"\n", rank, cot_status_name(got), cot_error_message());
    return false;
}

static bool check_fault(const char *fault)
{
    const bool last = rank == ranks - 1;
    if (strcmp(fault, "options") == 0)
        return sum_gives(last ? 3 : 4, COT_PEER_ERROR, "passes another value of tensor's shape or dtype than rank 0") &&
               sum_gives(4, COT_OK, NULL);
    if (strcmp(fault, "silent") == 0) {
        if (last)
            sleep(3);
        return sum_gives(4, COT_PEER_ERROR, "waited 1 seconds for rank");
    }
    if (strcmp(fault, "abort") == 0) {
        if (last)
            cot_group_abort(group, "no data");
        return sum_gives(4, COT_PEER_ERROR, "no data");
    }
    if (last)
        raise(SIGKILL);
    return sum_gives(4, COT_PEER_ERROR, "waited 1 seconds for rank");
}

static int check_refused(void)
{
    const MPI_Comm comm = MPI_COMM_WORLD;
    cot_group_options options;
    COT_INIT(&options);
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    options.timeout = rank == ranks - 1 ? -1 : 1;
    const cot_status status = cot_group_create_mpi(&comm, &options, &group),
                     expected = rank == ranks - 1 ? COT_INVALID_ARGUMENT : COT_PEER_ERROR;
    const bool good = status == expected && strstr(cot_error_message(), "options.timeout is -1") != NULL;
    if (!good)
        printf("rank %d: got %s \"%s\"\n", rank, cot_status_name(status), cot_error_message());
    MPI_Finalize();
    return !good;
}

static bool has_gpu(void)
{
    cot_queue_options options;
    cot_queue *queue = NULL;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    if (cot_queue_create(&options, &queue) != COT_OK) {
        printf("skipped: %s\n", cot_error_message());
        return false;
    }
    cot_queue_destroy(queue);
    return true;
}

int main(int argc, char **argv)
{
    int failures;
    const char *fault = argc > 1 ? argv[1] : NULL;
    MPI_Init(&argc, &argv);
    if (fault != NULL && strcmp(fault, "cuda") == 0) {
        fault = NULL, rarer = 8, sharded_backend = COT_BACKEND_CUDA;
        if (!has_gpu()) {
            MPI_Finalize();
            return 77;
        }
    }
    const MPI_Comm comm = MPI_COMM_WORLD;
    cot_group_options options;
    COT_INIT(&options);
    options.timeout = fault != NULL ? 1 : 0;
    if (fault != NULL && strcmp(fault, "refused") == 0)
        return check_refused();
    if (cot_group_create_mpi(&comm, &options, &group) != COT_OK) {
        printf("%s\n", cot_error_message());
        MPI_Abort(comm, 1);
    }
    MPI_Barrier(comm); /* the fault comes when all have the group */
    rank = cot_group_rank(group), ranks = cot_group_size(group);
    failures = fault != NULL ? !check_fault(fault) : check_op(&sharded_attention) + check_op(&sharded_causal_conv1d);
    cot_group_destroy(group);
    MPI_Allreduce(MPI_IN_PLACE, &failures, 1, MPI_INT, MPI_SUM, comm);
    MPI_Finalize();
    return failures > 0;
}
