/* SPDX-License-Identifier: Apache-2.0 */
#include "ranks.h"

#include <stdio.h>
#include <stdlib.h>

/* The number of ranks that mpirun has started: Open MPI, or a launcher with PMI. 1 without mpirun. */
static int started_ranks(void)
{
    static const char *const NAMES[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
    for (int i = 0; i < 2; i++)
        if (getenv(NAMES[i]) != NULL)
            return atoi(getenv(NAMES[i]));
    return 1;
}

#ifdef TRAIN_LM_MPI

#include <cotangent/parallel.h>
#include <mpi.h>

/* A rank waits for the slowest one: longer than a step, a validation or a checkpoint takes. */
enum { TIMEOUT_SECONDS = 3600 };

bool ranks_open(ranks *r, io_error *error)
{
    *r = (ranks){.size = 1};
    if (started_ranks() <= 1)
        return true;
    const MPI_Comm world = MPI_COMM_WORLD;
    cot_group_options options;
    COT_INIT(&options);
    options.timeout = TIMEOUT_SECONDS;
    if (MPI_Init(NULL, NULL) != MPI_SUCCESS)
        return io_fail(error, "mpirun", "MPI_Init failed");
    if (cot_group_create_mpi(&world, &options, &r->group) != COT_OK)
        return io_fail(error, "mpirun", "%s", cot_error_message());
    r->rank = cot_group_rank(r->group);
    r->size = cot_group_size(r->group);
    return true;
}

void ranks_close(ranks *r)
{
    if (r->group == NULL)
        return;
    cot_group_destroy(r->group);
    MPI_Finalize();
    *r = (ranks){.size = 1};
}

void ranks_abort(const ranks *r, int status)
{
    if (r->group != NULL)
        MPI_Abort(MPI_COMM_WORLD, status);
}

cot_status ranks_sum(const ranks *r, double *values, int64_t count)
{
    if (r->group == NULL)
        return COT_OK;
    const cot_tensor tensor = cot_tensor_contiguous(values, COT_F64, 1, &count);
    return cot_group_all_reduce(r->group, NULL, &tensor);
}

#else

bool ranks_open(ranks *r, io_error *error)
{
    *r = (ranks){.size = 1};
    return started_ranks() <= 1 ||
           io_fail(error, "mpirun", "this build of train_lm has no MPI (Debian: libopenmpi-dev)");
}

void ranks_close(ranks *r)
{
    (void)r;
}

void ranks_abort(const ranks *r, int status)
{
    (void)r;
    (void)status;
}

cot_status ranks_sum(const ranks *r, double *values, int64_t count)
{
    (void)r;
    (void)values;
    (void)count;
    return COT_OK;
}

#endif

/* Each rank writes its hash at its place, in two halves that a double holds exactly. */
cot_status ranks_agree(const ranks *r, uint64_t hash, const char *what)
{
    double *halves = calloc((size_t)(2 * r->size), sizeof *halves);
    if (halves == NULL)
        return cot_error_set(COT_OUT_OF_MEMORY, "out of memory");
    halves[2 * r->rank] = (double)(hash >> 32);
    halves[2 * r->rank + 1] = (double)(hash & UINT32_MAX);
    cot_status status = ranks_sum(r, halves, 2 * r->size);
    for (int i = 0; status == COT_OK && i < r->size; i++)
        if (halves[2 * i] != halves[0] || halves[2 * i + 1] != halves[1]) {
            char message[256];
            snprintf(message, sizeof message, "rank %d has other %s than rank 0", i, what);
            status = cot_error_set(COT_PEER_ERROR, message);
        }
    free(halves);
    return status;
}
