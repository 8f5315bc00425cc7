/* SPDX-License-Identifier: Apache-2.0
 * bench_parallel.c: times attention over a group of GPUs beside the single call on one GPU, and prints JSON.
 *
 *   bench_parallel [--engine local|nccl] [--ranks N] [--length T] [--heads H] [--kv-heads H] [--size D] [--full]
 *                  [--cut contiguous|zigzag] [--head-ranks C] [--all-gather] [--repeats N] [--no-single] [--gpus N]
 *
 * The ranks are threads of this process, and take turns on N GPUs. local: a group of threads; 1 GPU by default. nccl: a
 * group over NCCL; libnccl.so.2 is opened at run time; a GPU for each rank by default, one for the fake NCCL. The other
 * defaults are local, 2 ranks, T = 32768, 16 heads of 128, a causal mask and the zigzag cut, in bf16.
 *
 * Each repeat runs the single call, then the group, and waits for the GPUs. The times are medians of the wall time.
 * Forward and backward run without a wait between them. ratio = group / single. share_of_ideal = single / (ranks *
 * group), for ranks on GPUs of their own. Exit status 77: there are not enough GPUs, or no NCCL.
 *
 * profile: one more forward and backward, with events around transfers: for the rank that waits longest, the seconds of
 * its transfers and those that its stream waits for them; calls of the core and messages of a rank. */
#include "device/device_queue.h"

#include "cases/draw.h"
#include "core/float16.h"
#include "cuda/memory.h"
#include "parallel/group.h"

#include <cotangent/parallel.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 16, MAX_REPEATS = 100, PATTERN = 1 << 20 };

/* What is timed. */
enum { FORWARD, BACKWARD, BOTH, PARTS };
static const char *const part_names[PARTS] = {"forward", "backward", "both"};

typedef struct settings {
    bool nccl, full, single;
    int ranks, gpus, repeats;
    int64_t length, heads, kv_heads, size;
    cot_parallel_options options;
} settings;

/* Attention of some rows on one queue. */
typedef struct attention {
    cot_queue *queue;
    void *stream;
    cot_attention_forward_args forward;
    cot_attention_backward_args backward;
} attention;

typedef struct rank_state {
    const settings *s;
    int rank;
    cot_group *group;
    void *comm;
    attention own;
    size_t memory;
    uint64_t sent; /* bytes of one forward and backward */
    int64_t calls, messages;
    double transfers, exposed;
} rank_state;

static pthread_barrier_t barrier;
static rank_state ranks[MAX_RANKS];
static double times[2][PARTS][MAX_REPEATS]; /* of the single call, and of the group */

static void check(cot_status status)
{
    if (status == COT_OK)
        return;
    fprintf(stderr, "bench_parallel: %s: %s\n", cot_status_name(status), cot_error_message());
    exit(status == COT_NO_DEVICE ? SKIPPED : 1);
}

/* ---- tensors ------------------------------------------------------------------------------------------------------ */

static cot_tensor take(cot_queue *queue, cot_dtype dtype, int rank, const int64_t *shape)
{
    cot_tensor t = cot_tensor_contiguous(NULL, dtype, rank, shape);
    int64_t elements = 1;
    for (int axis = 0; axis < rank; axis++)
        elements *= shape[axis];
    check(cot_cuda_alloc(queue, (size_t)elements * cot_dtype_size(dtype), &t.data));
    return t;
}

/* Random numbers of about [-1, 1]: a pattern that is repeated. */
static cot_tensor take_random(cot_queue *queue, uint64_t seed, const int64_t *shape)
{
    static uint16_t pattern[PATTERN];
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    const cot_tensor t = take(queue, COT_BF16, 4, shape);
    const size_t bytes = (size_t)(shape[0] * shape[1] * shape[2] * shape[3]) * 2;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < PATTERN; i++)
        cot_store_f64(pattern, COT_BF16, i, (double)cot_draw_below(&seed, 20001) / 10000 - 1);
    size_t done = bytes < sizeof pattern ? bytes : sizeof pattern;
    check(cot_cuda_copy_to_device(queue, t.data, pattern, done));
    pthread_mutex_unlock(&mutex);
    for (; done < bytes; done *= 2)
        check(cot_cuda_copy_on_device_async(queue, (char *)t.data + done, t.data,
                                            done < bytes - done ? done : bytes - done));
    check(cot_queue_check(queue));
    return t;
}

/* The arguments of attention of `rows` rows, on a stream of its own. */
static void make_attention(attention *a, const settings *s, int device, int64_t rows, uint64_t seed)
{
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    options.device = device;
    check(cot_queue_create(&options, &a->queue));
    check(cot_cuda_stream_create(a->queue, &a->stream));
    check(cot_queue_set_stream(a->queue, a->stream));
    const int64_t q[] = {1, rows, s->heads, s->size}, k[] = {1, rows, s->kv_heads, s->size},
                  lse[] = {1, s->heads, rows};
    cot_attention_forward_args *f = &a->forward;
    cot_attention_backward_args *b = &a->backward;
    COT_INIT(f);
    COT_INIT(b);
    f->causal = b->causal = !s->full;
    f->q = b->q = take_random(a->queue, seed, q);
    f->k = b->k = take_random(a->queue, seed + 1, k);
    f->v = b->v = take_random(a->queue, seed + 2, k);
    f->out = b->out = take(a->queue, COT_BF16, 4, q);
    f->lse = b->lse = take(a->queue, COT_F32, 3, lse);
    b->dout = take_random(a->queue, seed + 3, q);
    b->dq = take(a->queue, COT_BF16, 4, q);
    b->dk = take(a->queue, COT_BF16, 4, k);
    b->dv = take(a->queue, COT_BF16, 4, k);
}

static void free_attention(attention *a)
{
    const cot_attention_backward_args *b = &a->backward;
    const cot_tensor *const tensors[] = {&b->q, &b->k, &b->v, &b->out, &b->lse, &b->dout, &b->dq, &b->dk, &b->dv};
    for (size_t n = 0; n < sizeof tensors / sizeof *tensors; n++)
        cot_cuda_free(a->queue, tensors[n]->data);
    check(cot_queue_set_stream(a->queue, NULL));
    cot_cuda_stream_destroy(a->queue, a->stream);
    cot_queue_destroy(a->queue);
}

/* ---- runs --------------------------------------------------------------------------------------------------------- */

static void run_single(attention *a, int part)
{
    if (part != BACKWARD)
        check(cot_attention_forward(a->queue, &a->forward));
    if (part != FORWARD)
        check(cot_attention_backward(a->queue, &a->backward));
    check(cot_queue_check(a->queue));
}

static void run_group(rank_state *r, int part)
{
    if (part != BACKWARD)
        check(cot_parallel_attention_forward(r->group, r->own.queue, &r->s->options, &r->own.forward));
    if (part != FORWARD)
        check(cot_parallel_attention_backward(r->group, r->own.queue, &r->s->options, &r->own.backward));
    check(cot_group_check(r->group));
    check(cot_queue_check(r->own.queue));
}

/* All ranks run a part together. Rank 0 stores the time. n = -1: a warm-up. */
static void time_group(rank_state *r, int part, int n)
{
    pthread_barrier_wait(&barrier);
    const double begin = cot_seconds();
    run_group(r, part);
    pthread_barrier_wait(&barrier);
    if (r->rank == 0 && n >= 0)
        times[1][part][n] = cot_seconds() - begin;
}

static void time_single(attention *whole, const rank_state *r, int part, int n)
{
    pthread_barrier_wait(&barrier);
    if (r->rank == 0 && r->s->single) {
        const double begin = cot_seconds();
        run_single(whole, part);
        if (n >= 0)
            times[0][part][n] = cot_seconds() - begin;
    }
}

static void *run_rank(void *memory)
{
    rank_state *r = memory;
    const settings *s = r->s;
    attention whole = {0};
    int64_t rows;
    const int device = r->rank % s->gpus;
    check(cot_shard_rows(&s->options, s->length, s->ranks, r->rank, &rows));
    if (s->nccl)
        check(cot_group_create_nccl(&r->comm, NULL, &r->group));
    make_attention(&r->own, s, device, rows, 100 * (uint64_t)r->rank);
    r->own.forward.q_length = r->own.forward.k_length = r->own.backward.q_length = r->own.backward.k_length = s->length;
    if (r->rank == 0 && s->single)
        make_attention(&whole, s, device, s->length, 7);
    time_single(&whole, r, BOTH, -1);
    time_group(r, BOTH, -1);
    const uint64_t sent = r->group->sent_bytes;
    const int64_t calls = r->group->calls, messages = r->group->messages;
    check(cot_gpu_profile_begin(r->group->gpu));
    time_group(r, BOTH, -1);
    check(cot_gpu_profile_end(r->group->gpu, &r->transfers, &r->exposed));
    r->sent = r->group->sent_bytes - sent;
    r->calls = r->group->calls - calls, r->messages = r->group->messages - messages;
    for (int n = 0; n < s->repeats; n++)
        for (int part = 0; part < PARTS; part++) {
            time_single(&whole, r, part, n);
            time_group(r, part, n);
        }
    r->memory = r->group->device_bytes;
    pthread_barrier_wait(&barrier);
    if (r->rank == 0 && s->single)
        free_attention(&whole);
    cot_group_destroy(r->group);
    free_attention(&r->own);
    return NULL;
}

/* ---- the report ---------------------------------------------------------------------------------------------------- */

static int compare_times(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *list, int count)
{
    qsort(list, (size_t)count, sizeof *list, compare_times);
    return count % 2 != 0 ? list[count / 2] : (list[count / 2 - 1] + list[count / 2]) / 2;
}

static void print_report(const settings *s, const char *device)
{
    static const char *const cuts[] = {"contiguous", "zigzag", "striped"};
    printf(
        "{\"bench\": \"parallel_attention\", \"device\": \"%s\", \"engine\": \"%s\", \"gpus\": %d, \"ranks\": %d, \"T\": %lld, "
        "\"H\": %lld, \"Hkv\": %lld, \"d\": %lld, \"dtype\": \"bf16\", \"causal\": %s, \"cut\": \"%s\", "
        "\"head_ranks\": %d, \"all_gather\": %s, \"repeats\": %d, \"group_bytes\": %zu, \"sent_bytes\": [",
        device, s->nccl ? "nccl" : "local", s->gpus, s->ranks, (long long)s->length, (long long)s->heads,
        (long long)s->kv_heads, (long long)s->size, s->full ? "false" : "true", cuts[s->options.cut],
        s->options.head_ranks > 0 ? s->options.head_ranks : 1, s->options.all_gather ? "true" : "false", s->repeats,
        ranks[0].memory);
    for (int r = 0; r < s->ranks; r++)
        printf("%s%llu", r > 0 ? ", " : "", (unsigned long long)ranks[r].sent);
    const rank_state *slowest = &ranks[0];
    for (int r = 1; r < s->ranks; r++)
        slowest = ranks[r].exposed > slowest->exposed ? &ranks[r] : slowest;
    printf("], \"profile\": {\"transfer_s\": %.9f, \"exposed_s\": %.9f, \"calls\": %lld, \"messages\": %lld}",
           slowest->transfers, slowest->exposed, (long long)slowest->calls, (long long)slowest->messages);
    for (int part = 0; part < PARTS; part++) {
        const double group = median(times[1][part], s->repeats);
        printf(", \"%s\": {\"group_s\": %.9f", part_names[part], group);
        if (s->single) {
            const double single = median(times[0][part], s->repeats);
            printf(", \"single_s\": %.9f, \"ratio\": %.4f", single, group / single);
            if (s->gpus == s->ranks)
                printf(", \"share_of_ideal\": %.4f", single / (s->ranks * group));
        }
        printf("}");
    }
    printf("}\n");
}

/* ---- options -------------------------------------------------------------------------------------------------------- */

static int usage(const char *argument)
{
    fprintf(stderr, "bench_parallel: unknown or incomplete option %s; the options are at the top of %s\n", argument,
            "tests/parallel/bench_parallel.c");
    return 2;
}

/* Reads a number of 1 or more. */
static bool read_number(const char *text, int64_t most, int64_t *number)
{
    char *end;
    *number = strtoll(text, &end, 10);
    return *text != '\0' && *end == '\0' && *number >= 1 && *number <= most;
}

static bool read_option(settings *s, const char *name, const char *value)
{
    int64_t number = 0;
    if (strcmp(name, "--engine") == 0) {
        s->nccl = strcmp(value, "nccl") == 0;
        return s->nccl || strcmp(value, "local") == 0;
    }
    if (strcmp(name, "--cut") == 0) {
        s->options.cut = strcmp(value, "zigzag") == 0 ? COT_CUT_ZIGZAG : COT_CUT_CONTIGUOUS;
        return s->options.cut == COT_CUT_ZIGZAG || strcmp(value, "contiguous") == 0;
    }
    if (strcmp(name, "--ranks") == 0)
        return read_number(value, MAX_RANKS, &number) && (s->ranks = (int)number) > 0;
    if (strcmp(name, "--gpus") == 0)
        return read_number(value, MAX_RANKS, &number) && (s->gpus = (int)number) > 0;
    if (strcmp(name, "--repeats") == 0)
        return read_number(value, MAX_REPEATS, &number) && (s->repeats = (int)number) > 0;
    if (strcmp(name, "--head-ranks") == 0)
        return read_number(value, MAX_RANKS, &number) && (s->options.head_ranks = (int32_t)number) > 0;
    int64_t *const sizes[] = {&s->length, &s->heads, &s->kv_heads, &s->size};
    static const char *const names[] = {"--length", "--heads", "--kv-heads", "--size"};
    for (int n = 0; n < 4; n++)
        if (strcmp(name, names[n]) == 0)
            return read_number(value, (int64_t)1 << 30, sizes[n]);
    return false;
}

static bool open_nccl(const settings *s)
{
    void *comms[MAX_RANKS];
    int devices[MAX_RANKS], (*init)(void **, int, const int *) = NULL;
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    void *found = library != NULL ? dlsym(library, "ncclCommInitAll") : NULL;
    memcpy(&init, &found, sizeof found);
    for (int r = 0; r < s->ranks; r++)
        devices[r] = r % s->gpus;
    if (init == NULL || init(comms, s->ranks, devices) != 0)
        return false;
    for (int r = 0; r < s->ranks; r++)
        ranks[r].comm = comms[r];
    return true;
}

int main(int argc, char **argv)
{
    settings s = {.single = true, .ranks = 2, .repeats = 5, .length = 32768, .heads = 16, .size = 128};
    pthread_t threads[MAX_RANKS];
    cot_group *groups[MAX_RANKS];
    char device[100] = "";
    size_t cache;
    COT_INIT(&s.options);
    s.options.cut = COT_CUT_ZIGZAG;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--full") == 0)
            s.full = true;
        else if (strcmp(argv[i], "--no-single") == 0)
            s.single = false;
        else if (strcmp(argv[i], "--all-gather") == 0)
            s.options.all_gather = 1;
        else if (i + 1 == argc || !read_option(&s, argv[i], argv[i + 1]))
            return usage(argv[i]);
        else
            i++;
    }
    s.kv_heads = s.kv_heads > 0 ? s.kv_heads : s.heads;
    s.gpus = s.gpus > 0 ? s.gpus : s.nccl ? s.ranks : 1;
    cot_queue *queue;
    for (int number = s.gpus - 1; number >= 0; number--) {
        const int skipped = open_queue_of_device(number, &queue);
        if (skipped)
            return skipped;
        if (number > 0)
            cot_queue_destroy(queue);
    }
    check(cot_cuda_describe(queue, device, sizeof device, &cache));
    if (s.nccl && !open_nccl(&s)) {
        printf("skipped: no libnccl.so.2, or it refuses %d devices\n", s.ranks);
        return SKIPPED;
    }
    if (!s.nccl)
        check(cot_group_create_local(s.ranks, NULL, groups));
    pthread_barrier_init(&barrier, NULL, (unsigned)s.ranks);
    for (int r = 0; r < s.ranks; r++) {
        ranks[r].s = &s, ranks[r].rank = r;
        if (!s.nccl)
            ranks[r].group = groups[r];
        if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0)
            return 1;
    }
    for (int r = 0; r < s.ranks; r++)
        pthread_join(threads[r], NULL);
    print_report(&s, device);
    cot_queue_destroy(queue);
    return 0;
}
