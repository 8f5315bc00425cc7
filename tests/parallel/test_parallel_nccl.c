/* SPDX-License-Identifier: Apache-2.0
 * test_parallel_nccl.c: groups over NCCL. The ranks are threads of this process, each with a GPU of its own. The program
 * opens libnccl.so.2 at run time, and makes the communicators with ncclCommInitAll.
 *
 *   test_parallel_nccl [--ranks N] [--every N] [--one-device] [TEXT]   each Nth case; only those that contain TEXT
 *   test_parallel_nccl [--ranks N] [--one-device] --fault FAULT
 *
 * FAULT: options (the last rank passes others), silent (it does not come), abort, fails (it fails in the middle of a
 * call), missing (there is no usable NCCL; the message is printed). --one-device: all ranks on device 0, for the fake
 * NCCL. Exit status 77: there are not enough GPUs, or no NCCL. */
#include "device/device_queue.h"
#include "parallel/group.h"
#include "parallel/sharded.h"

#include "cases/draw.h"
#include "check/check.h"
#include "cuda/memory.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 8, ROWS = 32, H = 2, D = 16 };

static int ranks = 2, every = 1;
static bool one_device;
static const char *only;
static void *comms[MAX_RANKS];
static cot_group *groups[MAX_RANKS];
static double timeout;

static int device_of(int rank)
{
    return one_device ? 0 : rank;
}

/* ---- threads ------------------------------------------------------------------------------------------------------ */

typedef struct rank_thread {
    int rank;
    void (*body)(int rank, void *context);
    void *context;
} rank_thread;

static void *run_thread(void *memory)
{
    const rank_thread *t = memory;
    t->body(t->rank, t->context);
    return NULL;
}

static void each_rank(void (*body)(int rank, void *context), void *context)
{
    pthread_t threads[MAX_RANKS];
    rank_thread arguments[MAX_RANKS];
    for (int rank = 0; rank < ranks; rank++) {
        arguments[rank] = (rank_thread){rank, body, context};
        if (pthread_create(&threads[rank], NULL, run_thread, &arguments[rank]) != 0)
            abort();
    }
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
}

/* ---- cases -------------------------------------------------------------------------------------------------------- */

typedef struct case_run {
    const whole_case *w;
    rank_case *r;
} case_run;

static void run_case(int rank, void *context)
{
    const case_run *run = context;
    rank_case_run(&run->r[rank], run->w, groups[rank], device_of(rank));
}

typedef struct progress {
    const sharded_op *op;
    int seen, calls, failures;
    uint64_t state;
} progress;

static bool check_case(const whole_case *w, const cot_parallel_options *options)
{
    static rank_case runs[2][MAX_RANKS];
    bool good = true;
    whole_case_reset(w);
    for (int n = 0; n < 2; n++) {
        for (int rank = 0; rank < ranks; rank++)
            rank_case_make(&runs[n][rank], w, options, ranks, rank);
        each_rank(run_case, &(case_run){w, runs[n]});
    }
    for (int rank = 0; rank < ranks; rank++) {
        const rank_case *r = &runs[0][rank];
        if (r->status != COT_OK || runs[1][rank].status != COT_OK)
            printf("rank %d: \"%s\", then \"%s\"\n", rank, r->message, runs[1][rank].message);
        else if (!rank_case_equal(r, &runs[1][rank], w))
            printf("rank %d: the second run gave other bytes\n", rank);
        else {
            rank_case_collect(r, w, ranks, rank);
            continue;
        }
        good = false;
    }
    good = good && whole_case_check(w, options, ranks);
    for (int n = 0; n < 2; n++)
        for (int rank = 0; rank < ranks; rank++)
            rank_case_free(&runs[n][rank], w);
    return good;
}

static bool visit(void *context, const cot_case *c)
{
    progress *p = context;
    char text[512];
    cot_parallel_options options;
    whole_case w;
    describe_case(sharded_cases(p->op), c, text, sizeof text);
    if (!sharded_admits(p->op, c) || (only != NULL && strstr(text, only) == NULL) || p->seen++ % every != 0 ||
        !p->op->draw(c, ranks, &p->state, &options))
        return true;
    if (!whole_case_make(&w, p->op, c))
        abort();
    p->calls++;
    if (!check_case(&w, &options)) {
        p->failures++;
        printf("failed: %s\n", text);
    }
    whole_case_free(&w);
    return true;
}

static int check_op(const sharded_op *op)
{
    progress p = {.op = op, .state = 13};
    sharded_cases(op)->each(visit, &p);
    printf("%s on %d ranks: %d calls, %d failures\n", op->name, ranks, p.calls, p.failures);
    return p.failures > 0 || (p.calls == 0 && only == NULL);
}

/* ---- faults ------------------------------------------------------------------------------------------------------- */

typedef struct fault_run {
    const char *fault;
    cot_status status[MAX_RANKS];
    char message[MAX_RANKS][512];
    double seconds[MAX_RANKS];
} fault_run;

static void *no_memory(void *context, size_t bytes)
{
    (void)context, (void)bytes;
    return NULL;
}

static void *take_zeros(cot_queue *queue, size_t bytes)
{
    void *memory = NULL;
    if (cot_cuda_alloc(queue, bytes, &memory) != COT_OK || cot_cuda_memset_async(queue, memory, 0, bytes) != COT_OK)
        abort();
    return memory;
}

/* An attention backward of ROWS rows a rank: it needs a workspace. */
static cot_status differentiate(int rank, cot_queue *queue, double scale)
{
    cot_attention_backward_args a;
    cot_parallel_options options;
    const int64_t rows[] = {1, ROWS, H, D}, statistic[] = {1, H, ROWS};
    COT_INIT(&a);
    COT_INIT(&options);
    a.q_length = a.k_length = (int64_t)ranks * ROWS;
    a.scale = scale;
    cot_tensor *const tensors[] = {&a.q, &a.k, &a.v, &a.dout, &a.dq, &a.dk, &a.dv};
    for (int n = 0; n < 7; n++)
        *tensors[n] = cot_tensor_contiguous(take_zeros(queue, sizeof(float) * ROWS * H * D), COT_F32, 4, rows);
    a.lse = cot_tensor_contiguous(take_zeros(queue, sizeof(float) * ROWS * H), COT_F32, 3, statistic);
    a.delta = cot_tensor_contiguous(take_zeros(queue, sizeof(float) * ROWS * H), COT_F32, 3, statistic);
    cot_status status = cot_parallel_attention_backward(groups[rank], queue, &options, &a);
    if (status == COT_OK)
        status = cot_group_check(groups[rank]);
    if (status == COT_OK)
        status = cot_queue_check(queue);
    for (int n = 0; n < 7; n++)
        cot_cuda_free(queue, tensors[n]->data);
    cot_cuda_free(queue, a.lse.data);
    cot_cuda_free(queue, a.delta.data);
    return status;
}

static void run_fault(int rank, void *context)
{
    fault_run *run = context;
    const bool last = rank == ranks - 1;
    cot_queue_options options;
    cot_queue *queue = NULL;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    options.device = device_of(rank);
    if (cot_queue_create(&options, &queue) != COT_OK)
        abort();
    if (last && strcmp(run->fault, "fails") == 0) /* after the agreement */
        cot_queue_set_allocator(queue, no_memory, NULL);
    if (last && strcmp(run->fault, "abort") == 0)
        cot_group_abort(groups[rank], "no data");
    const double begin = cot_seconds();
    if (last && strcmp(run->fault, "silent") == 0)
        run->status[rank] = COT_PEER_ERROR;
    else
        run->status[rank] = differentiate(rank, queue, last && strcmp(run->fault, "options") == 0 ? 0.5 : 0.25);
    run->seconds[rank] = cot_seconds() - begin;
    cot_error_copy(run->message[rank], sizeof run->message[rank]);
    if (strcmp(run->fault, "options") == 0 && differentiate(rank, queue, 0.25) != COT_OK) {
        printf("rank %d: the group did not go on: %s\n", rank, cot_error_message());
        run->status[rank] = COT_OK;
    }
    cot_queue_destroy(queue);
}

/* Every rank has an error in time. */
static int check_fault(const char *fault)
{
    static fault_run run;
    int failures = 0;
    run.fault = fault;
    each_rank(run_fault, &run);
    for (int rank = 0; rank < ranks; rank++) {
        const bool good = run.status[rank] != COT_OK && run.seconds[rank] < timeout + 10;
        printf("rank %d: %s after %.1f s: %s\n", rank, cot_status_name(run.status[rank]), run.seconds[rank],
               run.message[rank]);
        failures += !good;
    }
    return failures;
}

/* ---- groups ------------------------------------------------------------------------------------------------------- */

typedef struct creation {
    bool refused; /* the last rank's options are wrong */
    cot_status status[MAX_RANKS];
    char message[MAX_RANKS][512];
} creation;

static void create_group(int rank, void *context)
{
    creation *c = context;
    cot_group_options options;
    COT_INIT(&options);
    options.timeout = c->refused && rank == ranks - 1 ? -1 : timeout;
    c->status[rank] = cot_group_create_nccl(&comms[rank], &options, &groups[rank]);
    cot_error_copy(c->message[rank], sizeof c->message[rank]);
}

static void destroy_group(int rank, void *context)
{
    (void)context;
    cot_group_destroy(groups[rank]);
}

/* The communicators of all ranks; without a library a placeholder, which is never read. */
static bool make_comms(void)
{
    static int placeholder;
    int devices[MAX_RANKS], (*init)(void **, int, const int *) = NULL;
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    void *found = library != NULL ? dlsym(library, "ncclCommInitAll") : NULL;
    memcpy(&init, &found, sizeof found);
    for (int rank = 0; rank < ranks; rank++)
        devices[rank] = device_of(rank), comms[rank] = &placeholder;
    return init != NULL && init(comms, ranks, devices) == 0;
}

static int open_devices(void)
{
    for (int rank = 0; rank < ranks; rank++) {
        cot_queue *queue;
        const int skipped = open_queue_of_device(device_of(rank), &queue);
        if (skipped)
            return skipped;
        cot_queue_destroy(queue);
    }
    return 0;
}

static int run_all(const char *fault)
{
    static creation c;
    int failures = 0;
    c.refused = fault != NULL && strcmp(fault, "refused") == 0;
    each_rank(create_group, &c);
    for (int rank = 0; rank < ranks; rank++)
        if (c.status[rank] != COT_OK) {
            printf("rank %d: %s: %s\n", rank, cot_status_name(c.status[rank]), c.message[rank]);
            failures++;
        }
    if (failures > 0)
        return 1;
    failures = fault != NULL ? check_fault(fault) : check_op(&sharded_attention) + check_op(&sharded_causal_conv1d);
    each_rank(destroy_group, NULL);
    return failures > 0;
}

int main(int argc, char **argv)
{
    const char *fault = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--ranks") == 0 && i + 1 < argc)
            ranks = atoi(argv[++i]);
        else if (strcmp(argv[i], "--every") == 0 && i + 1 < argc)
            every = atoi(argv[++i]);
        else if (strcmp(argv[i], "--fault") == 0 && i + 1 < argc)
            fault = argv[++i];
        else if (strcmp(argv[i], "--one-device") == 0)
            one_device = true;
        else
            only = argv[i];
    }
    if (ranks < 1 || ranks > MAX_RANKS || every < 1) {
        printf("expected 1 to %d ranks, and --every 1 or more\n", MAX_RANKS);
        return 2;
    }
    sharded_backend = COT_BACKEND_CUDA;
    timeout = fault != NULL ? 3 : 60;
    const int skipped = open_devices();
    if (skipped)
        return skipped;
    const bool has_nccl = make_comms();
    if (fault != NULL && strcmp(fault, "missing") == 0) {
        const cot_status status = cot_group_create_nccl(&comms[0], NULL, &groups[0]);
        printf("%s: %s\n", cot_status_name(status), cot_error_message());
        return status != COT_NO_DEVICE;
    }
    if (!has_nccl) {
        printf("skipped: no libnccl.so.2, or it refuses these devices\n");
        return SKIPPED;
    }
    return run_all(fault);
}
