/* SPDX-License-Identifier: Apache-2.0 */
#include "ranks.h"

#include "cuda/communicator.h"

#include <cotangent/parallel.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* A rank waits for the slowest one: longer than a step, a validation or a checkpoint takes. */
enum { TIMEOUT_SECONDS = 3600 };

static cot_group_options group_options(void)
{
    cot_group_options options;
    COT_INIT(&options);
    options.timeout = TIMEOUT_SECONDS;
    return options;
}

/* ---- processes of mpirun ------------------------------------------------------------------------------ */

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

#include <mpi.h>

/* The number of this process among those on the same machine. */
static int number_on_machine(void)
{
    MPI_Comm machine;
    int number = 0;
    if (MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine) == MPI_SUCCESS) {
        MPI_Comm_rank(machine, &number);
        MPI_Comm_free(&machine);
    }
    return number;
}

bool ranks_open(ranks *r, io_error *error)
{
    *r = (ranks){.size = 1, .context_size = 1};
    if (started_ranks() <= 1)
        return true;
    const MPI_Comm world = MPI_COMM_WORLD;
    const cot_group_options options = group_options();
    if (MPI_Init(NULL, NULL) != MPI_SUCCESS)
        return io_fail(error, "mpirun", "MPI_Init failed");
    if (cot_group_create_mpi(&world, &options, &r->group) != COT_OK)
        return io_fail(error, "mpirun", "%s", cot_error_message());
    r->rank = cot_group_rank(r->group);
    r->size = cot_group_size(r->group);
    r->device = number_on_machine();
    return true;
}

static cot_status divide_by_mpi(ranks *r, int context_size)
{
    const cot_group_options options = group_options();
    MPI_Comm context;
    if (context_size == 1)
        return COT_OK;
    if (MPI_Comm_split(MPI_COMM_WORLD, r->rank / context_size, r->rank, &context) != MPI_SUCCESS)
        return cot_error_set(COT_PEER_ERROR, "MPI_Comm_split failed");
    const cot_status status = cot_group_create_mpi(&context, &options, &r->context_group);
    MPI_Comm_free(&context); /* the group has a copy */
    return status;
}

/* If rank 0 cannot make the id, every rank reports why: the first rank that aborts ends the others, and their messages can
   be lost. */
static cot_status divide_by_nccl(ranks *r, int context_size)
{
    const cot_group_options options = group_options();
    struct {
        gpu_communicator_id id;
        char error[512];
    } made = {0};
    cot_status status = r->rank == 0 ? gpu_communicator_make_id(&made.id) : COT_OK;
    if (status != COT_OK)
        snprintf(made.error, sizeof made.error, "%s", cot_error_message());
    if (MPI_Bcast(&made, sizeof made, MPI_CHAR, 0, MPI_COMM_WORLD) != MPI_SUCCESS)
        return cot_error_set(COT_PEER_ERROR, "MPI_Bcast failed");
    if (made.error[0] != '\0')
        return r->rank == 0 ? status : cot_error_set(COT_PEER_ERROR, made.error);
    status = gpu_communicator_create(&r->communicator, &made.id, r->rank, r->size, r->device);
    if (status == COT_OK)
        status = cot_group_create_nccl(gpu_communicator_whole(r->communicator), &options, &r->gpu_group);
    if (status != COT_OK || context_size == 1)
        return status;
    const void *part = gpu_communicator_part(r->communicator, r->rank / context_size);
    return part != NULL ? cot_group_create_nccl(part, &options, &r->context_group) : COT_DEVICE_ERROR;
}

bool ranks_divide(ranks *r, int context_size, bool gpus, bool through_mpi, io_error *error)
{
    r->context_size = context_size;
    if (r->size == 1)
        return true;
    if (gpus && through_mpi)
        r->gpu_group = r->group;
    const bool nccl = gpus && !through_mpi;
    const cot_status status = nccl ? divide_by_nccl(r, context_size) : divide_by_mpi(r, context_size);
    return status == COT_OK || io_fail(error, "mpirun", "%s", cot_error_message());
}

void ranks_close(ranks *r)
{
    if (r->group == NULL)
        return;
    cot_group_destroy(r->context_group);
    if (r->gpu_group != r->group)
        cot_group_destroy(r->gpu_group);
    gpu_communicator_destroy(r->communicator);
    cot_group_destroy(r->group);
    MPI_Finalize();
    *r = (ranks){.size = 1, .context_size = 1};
}

void ranks_abort(const ranks *r, int status)
{
    if (r->group != NULL)
        MPI_Abort(MPI_COMM_WORLD, status);
}

#else

bool ranks_open(ranks *r, io_error *error)
{
    *r = (ranks){.size = 1, .context_size = 1};
    return started_ranks() <= 1 ||
           io_fail(error, "mpirun", "this build of train_lm has no MPI (Debian: libopenmpi-dev)");
}

bool ranks_divide(ranks *r, int context_size, bool gpus, bool through_mpi, io_error *error)
{
    (void)gpus, (void)through_mpi, (void)error;
    r->context_size = context_size;
    return true;
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

#endif

/* ---- threads ------------------------------------------------------------------------------------------ */

typedef struct rank_thread {
    ranks ranks;
    pthread_t thread;
    void (*body)(const ranks *r, void *context);
    void *context;
} rank_thread;

static void *run_thread(void *memory)
{
    const rank_thread *t = memory;
    t->body(&t->ranks, t->context);
    return NULL;
}

static bool run_threads(rank_thread *threads, int count)
{
    int started = 1;
    while (started < count && pthread_create(&threads[started].thread, NULL, run_thread, &threads[started]) == 0)
        started++;
    const bool all = started == count;
    if (all)
        run_thread(&threads[0]);
    else
        ranks_break(&threads[0].ranks, "there is no thread for each rank");
    while (started > 1)
        pthread_join(threads[--started].thread, NULL);
    return all;
}

static cot_status create_groups(cot_group **groups, cot_group **contexts, int count, int context_size)
{
    const cot_group_options options = group_options();
    cot_status status = cot_group_create_local(count, &options, groups);
    for (int i = 0; status == COT_OK && context_size > 1 && i < count; i += context_size)
        status = cot_group_create_local(context_size, &options, contexts + i);
    return status;
}

bool ranks_run_threads(int count, int context_size, void (*body)(const ranks *r, void *context), void *context)
{
    cot_group **groups = calloc((size_t)count, sizeof *groups), **contexts = calloc((size_t)count, sizeof *contexts);
    rank_thread *threads = calloc((size_t)count, sizeof *threads);
    bool good = groups != NULL && contexts != NULL && threads != NULL &&
                create_groups(groups, contexts, count, context_size) == COT_OK;
    for (int i = 0; good && i < count; i++)
        threads[i] = (rank_thread){.ranks = {.group = groups[i],
                                             .gpu_group = groups[i],
                                             .context_group = contexts[i],
                                             .rank = i,
                                             .size = count,
                                             .context_size = context_size,
                                             .device = i},
                                   .body = body,
                                   .context = context};
    good = good && run_threads(threads, count);
    for (int i = 0; groups != NULL && contexts != NULL && i < count; i++) {
        cot_group_destroy(contexts[i]);
        cot_group_destroy(groups[i]);
    }
    free(groups);
    free(contexts);
    free(threads);
    return good;
}

void ranks_break(const ranks *r, const char *reason)
{
    cot_group_abort(r->group, reason);
    if (r->context_group != NULL)
        cot_group_abort(r->context_group, reason);
}

/* ---- sums --------------------------------------------------------------------------------------------- */

cot_status ranks_sum_tensor(const ranks *r, cot_queue *queue, const cot_tensor *tensor)
{
    return r->gpu_group == NULL ? COT_OK : cot_group_all_reduce(r->gpu_group, queue, tensor);
}

double ranks_sum_bytes(const ranks *r, int64_t count)
{
    return r->size == 1 ? 0 : (double)count * (4 + 8 / (double)r->size);
}

cot_status ranks_sum(const ranks *r, double *values, int64_t count)
{
    const cot_tensor tensor = cot_tensor_contiguous(values, COT_F64, 1, &count);
    return r->group == NULL ? COT_OK : cot_group_all_reduce(r->group, NULL, &tensor);
}

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
