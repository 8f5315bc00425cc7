/* SPDX-License-Identifier: Apache-2.0
 * test_queue.c: tests of a queue: options, the pool, forced kernels, threads, forks and the floating-point state. The
 * queue runs the backward of causal_conv1d, which uses workspace, sums and exponentials. */
#include "support.h"

#include "core/queue.h"

#include <cotangent/causal_conv1d.h>
#include <omp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- the call ----------------------------------------------------------------------------------------- */

enum { B = 3, D = 37, T = 65, K = 4 };

typedef struct work {
    float x[B * D * T], weight[D * K], bias[D], dy[B * D * T];
    struct work_results {
        float dx[B * D * T], dweight[D * K], dbias[D];
    } results;
    cot_causal_conv1d_backward_args args;
} work;

/* `scale` multiplies the inputs: at 1e-20 the sums of products are subnormal. */
static work *new_work(uint64_t seed, float scale)
{
    work *w = calloc(1, sizeof *w);
    assert_non_null(w);
    for (int i = 0; i < B * D * T; i++) {
        w->x[i] = scale * (float)random_real(&seed);
        w->dy[i] = scale * (float)random_real(&seed);
    }
    for (int i = 0; i < D * K; i++)
        w->weight[i] = (float)random_real(&seed);
    for (int i = 0; i < D; i++)
        w->bias[i] = scale * (float)random_real(&seed);
    const int64_t shape[] = {B, D, T}, weight_shape[] = {D, K};
    COT_INIT(&w->args);
    w->args.activation = COT_ACTIVATION_SILU;
    w->args.x = cot_tensor_contiguous(w->x, COT_F32, 3, shape);
    w->args.dy = cot_tensor_contiguous(w->dy, COT_F32, 3, shape);
    w->args.dx = cot_tensor_contiguous(w->results.dx, COT_F32, 3, shape);
    w->args.weight = cot_tensor_contiguous(w->weight, COT_F32, 2, weight_shape);
    w->args.dweight = cot_tensor_contiguous(w->results.dweight, COT_F32, 2, weight_shape);
    w->args.bias = cot_tensor_contiguous(w->bias, COT_F32, 1, shape + 1);
    w->args.dbias = cot_tensor_contiguous(w->results.dbias, COT_F32, 1, shape + 1);
    return w;
}

static cot_status run_work(work *w, cot_queue *queue)
{
    memset(&w->results, 0xff, sizeof w->results); /* NaN */
    return cot_causal_conv1d_backward(queue, &w->args);
}

static struct work_results serial_results(work *w)
{
    cot_queue *queue = make_queue(NULL, 1);
    assert_ok(run_work(w, queue));
    cot_queue_destroy(queue);
    return w->results;
}

/* ---- options ------------------------------------------------------------------------------------------ */

static void default_queue_uses_all_threads(void **state)
{
    (void)state;
    cot_queue *queue = NULL;
    assert_ok(cot_queue_create(NULL, &queue));
    assert_int_equal(cot_queue_threads(queue), omp_get_max_threads());
    cot_queue_destroy(queue);
    queue = make_queue(NULL, 0);
    assert_int_equal(cot_queue_threads(queue), omp_get_max_threads());
    cot_queue_destroy(queue);
    queue = make_queue(NULL, 7);
    assert_int_equal(cot_queue_threads(queue), 7);
    cot_queue_destroy(queue);
    cot_queue_destroy(NULL);
    assert_int_equal(cot_queue_threads(NULL), 0);
}

static void create_refuses(cot_queue_options options, cot_status status, const char *message)
{
    cot_queue *queue = (cot_queue *)&options; /* anything but NULL */
    assert_fails(cot_queue_create(&options, &queue), status, message);
    assert_null(queue);
}

/* With a device, a CUDA queue works like any other. Without a device, the message names the missing part. */
static void cuda_queue_or_a_reason(void **state)
{
    (void)state;
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    cot_queue *queue = NULL;
    const cot_status status = cot_queue_create(&options, &queue);
    if (status == COT_OK) {
        assert_ok(cot_queue_reserve(queue, 1000));
        assert_ok(cot_queue_check(queue));
        options.device = 1 << 20;
        create_refuses(options, COT_INVALID_ARGUMENT, "cot_queue_create: options.device is 1048576");
    } else {
        assert_int_equal(status, COT_NO_DEVICE);
        assert_non_null(strstr(cot_error_message(), "CUDA"));
        assert_null(queue);
    }
    cot_queue_destroy(queue);
}

static void options_are_checked(void **state)
{
    (void)state;
    const size_t size = sizeof(cot_queue_options);
    char message[128];
    assert_fails(cot_queue_create(NULL, NULL), COT_INVALID_ARGUMENT, "cot_queue_create: out is null");
    snprintf(message, sizeof message, "cot_queue_create: options.struct_size is 0, expected %zu (use COT_INIT)", size);
    create_refuses((cot_queue_options){0}, COT_INVALID_ARGUMENT, message);
    snprintf(message, sizeof message, "cot_queue_create: options.struct_size is %zu, expected %zu (use COT_INIT)",
             size + 1, size);
    create_refuses((cot_queue_options){.struct_size = size + 1}, COT_INVALID_ARGUMENT, message);
    create_refuses((cot_queue_options){.struct_size = size, .backend = (cot_backend)3}, COT_INVALID_ARGUMENT,
                   "cot_queue_create: options.backend is 3, expected 0 (CPU), 1 (CUDA) or 2 (HIP)");
    create_refuses((cot_queue_options){.struct_size = size, .threads = -1}, COT_INVALID_ARGUMENT,
                   "cot_queue_create: options.threads is -1, expected 0 (all) to 4096");
    create_refuses((cot_queue_options){.struct_size = size, .threads = 4097}, COT_INVALID_ARGUMENT,
                   "cot_queue_create: options.threads is 4097, expected 0 (all) to 4096");
}

/* ---- forced kernels ----------------------------------------------------------------------------------- */

static void forced_kernels_are_parsed(void **state)
{
    (void)state;
    static const struct {
        const char *kernels, *message;
    } bad[] = {
        {"x", "cot_queue_create: options.kernels has the entry \"x\", expected op=kernel"},
        {"=x", "cot_queue_create: options.kernels has the entry \"=x\", expected op=kernel"},
        {"x=", "cot_queue_create: options.kernels has the entry \"x=\", expected op=kernel"},
        {"a=b,c", "cot_queue_create: options.kernels has the entry \"c\", expected op=kernel"},
        {"a=b,,c=d", "cot_queue_create: options.kernels has the entry \"\", expected op=kernel"},
        {",a=b", "cot_queue_create: options.kernels has the entry \"\", expected op=kernel"},
    };
    for (size_t i = 0; i < COUNT(bad); i++)
        create_refuses((cot_queue_options){.struct_size = sizeof(cot_queue_options), .kernels = bad[i].kernels},
                       COT_INVALID_ARGUMENT, bad[i].message);

    size_t length = 0;
    cot_queue *queue = make_queue("conv=one,conv2=two,mhc=three", 1);
    const char *name = cot_queue_forced_kernel(queue, "conv", &length);
    assert_int_equal(length, 3);
    assert_memory_equal(name, "one", 3);
    name = cot_queue_forced_kernel(queue, "conv2", &length);
    assert_memory_equal(name, "two", 3);
    name = cot_queue_forced_kernel(queue, "mhc", &length);
    assert_int_equal(length, 5);
    assert_memory_equal(name, "three", 5);
    assert_null(cot_queue_forced_kernel(queue, "con", &length));
    assert_null(cot_queue_forced_kernel(queue, "conv22", &length));
    cot_queue_destroy(queue);
    queue = make_queue("", 1);
    assert_null(cot_queue_forced_kernel(queue, "conv", &length));
    cot_queue_destroy(queue);
}

static void environment_forces_where_options_do_not(void **state)
{
    (void)state;
    size_t length = 0;
    work *w = new_work(1, 1);
    setenv("COT_KERNEL", "causal_conv1d=none_such", 1);
    cot_queue *queue = make_queue(NULL, 1);
    assert_fails(run_work(w, queue), COT_INVALID_ARGUMENT,
                 "causal_conv1d_backward: the forced kernel \"none_such\" is none of causal_conv1d's");
    cot_queue_destroy(queue);
    queue = make_queue("causal_conv1d=causal_conv1d_bwd_scalar", 1);
    assert_ok(run_work(w, queue));
    assert_memory_equal(cot_queue_forced_kernel(queue, "causal_conv1d", &length), "causal_conv1d_bwd_scalar", 24);
    cot_queue_destroy(queue);
    setenv("COT_KERNEL", "nonsense", 1);
    assert_fails(cot_queue_create(NULL, &queue), COT_INVALID_ARGUMENT,
                 "cot_queue_create: COT_KERNEL has the entry \"nonsense\", expected op=kernel");
    unsetenv("COT_KERNEL");
    free(w);
}

/* ---- the pool ----------------------------------------------------------------------------------------- */

static void cpu_queue_has_no_stream(void **state)
{
    (void)state;
    cot_queue *queue = make_queue(NULL, 1);
    assert_fails(cot_queue_set_stream(NULL, NULL), COT_INVALID_ARGUMENT, "cot_queue_set_stream: queue is null");
    assert_fails(cot_queue_set_stream(queue, NULL), COT_INVALID_ARGUMENT,
                 "cot_queue_set_stream: queue is of the CPU, expected one of a GPU");
    void *context, *stream;
    assert_fails(cot_queue_cuda(NULL, &context, &stream), COT_INVALID_ARGUMENT, "cot_queue_cuda: queue is null");
    assert_fails(cot_queue_cuda(queue, NULL, &stream), COT_INVALID_ARGUMENT, "cot_queue_cuda: context is null");
    assert_fails(cot_queue_cuda(queue, &context, NULL), COT_INVALID_ARGUMENT, "cot_queue_cuda: stream is null");
    assert_fails(cot_queue_cuda(queue, &context, &stream), COT_INVALID_ARGUMENT,
                 "cot_queue_cuda: queue is of the CPU, expected one of CUDA");
    cot_queue_destroy(queue);
}

static void pool_grows_and_never_shrinks(void **state)
{
    (void)state;
    cot_queue *queue = make_queue(NULL, 1);
    assert_fails(cot_queue_reserve(NULL, 1), COT_INVALID_ARGUMENT, "cot_queue_reserve: queue is null");
    assert_ok(cot_queue_reserve(queue, 0));
    assert_null(queue->pool);
    assert_ok(cot_queue_reserve(queue, 1000));
    assert_int_equal((uintptr_t)queue->pool % COT_ALIGNMENT, 0);
    assert_in_range(queue->pool_bytes, 1000, 1063);
    memset(queue->pool, 1, queue->pool_bytes);
    const void *pool = queue->pool;
    assert_ok(cot_queue_reserve(queue, 10));
    assert_ok(cot_queue_reserve(queue, 1000));
    assert_ptr_equal(queue->pool, pool);

    assert_fails(cot_queue_reserve(queue, SIZE_MAX), COT_OUT_OF_MEMORY,
                 "the queue's pool cannot grow from 1024 to 18446744073709551615 bytes");
    assert_fails(cot_queue_reserve(queue, SIZE_MAX / 2), COT_OUT_OF_MEMORY,
                 "the queue's pool cannot grow from 1024 to 9223372036854775807 bytes");
    assert_ptr_equal(queue->pool, pool); /* the pool is unchanged */
    memset(queue->pool, 1, queue->pool_bytes);
    cot_queue_destroy(queue);
}

static void a_reserved_pool_suffices(void **state)
{
    (void)state;
    work *w = new_work(2, 1);
    size_t bytes = 0;
    cot_queue *queue = make_queue("causal_conv1d=causal_conv1d_bwd_scalar", 2);
    assert_ok(cot_causal_conv1d_backward_workspace(queue, &w->args, &bytes));
    assert_true(bytes > 0);
    assert_ok(cot_queue_reserve(queue, bytes));
    const void *pool = queue->pool;
    memset(queue->pool, 0xff, queue->pool_bytes); /* kernels must not assume zeros */
    assert_ok(run_work(w, queue));
    assert_ptr_equal(queue->pool, pool);
    cot_queue_destroy(queue);

    /* With the caller's workspace, the pool is unused. */
    queue = make_queue("causal_conv1d=causal_conv1d_bwd_scalar", 2);
    w->args.workspace = aligned_alloc(COT_ALIGNMENT, cot_align_up(bytes));
    w->args.workspace_bytes = bytes;
    memset(w->args.workspace, 0xff, bytes);
    assert_ok(run_work(w, queue));
    assert_null(queue->pool);
    cot_queue_destroy(queue);
    queue = make_queue("causal_conv1d=causal_conv1d_bwd_scalar", 1);
    const struct work_results with_workspace = w->results;
    w->args.workspace_bytes = 0;
    free(w->args.workspace);
    w->args.workspace = NULL;
    assert_ok(run_work(w, queue)); /* the first call without a workspace grows the pool */
    assert_in_range(queue->pool_bytes, bytes, bytes + COT_ALIGNMENT);
    assert_memory_equal(&w->results, &with_workspace, sizeof with_workspace);
    cot_queue_destroy(queue);
    free(w);
}

/* ---- threads ------------------------------------------------------------------------------------------ */

static void count_item(void *context, int64_t item)
{
    atomic_fetch_add(&((atomic_int *)context)[item], 1);
}

static void every_item_runs_once(void **state)
{
    (void)state;
    static const int32_t threads[] = {1, 2, 3, 16};
    for (size_t i = 0; i < COUNT(threads); i++) {
        cot_queue *queue = make_queue(NULL, threads[i]);
        for (int items = 0; items <= 40; items++) {
            atomic_int counts[41] = {0};
            cot_run_items(queue, items, count_item, counts);
            for (int item = 0; item <= 40; item++)
                assert_int_equal(atomic_load(&counts[item]), item < items);
        }
        cot_queue_destroy(queue);
    }
}

static void results_do_not_depend_on_the_threads(void **state)
{
    (void)state;
    work *w = new_work(3, 1);
    const struct work_results expected = serial_results(w);
    static const int32_t threads[] = {2, 3, 5, 64};
    for (size_t i = 0; i < COUNT(threads); i++) {
        cot_queue *queue = make_queue(NULL, threads[i]);
        assert_ok(run_work(w, queue));
        assert_memory_equal(&w->results, &expected, sizeof expected);
        cot_queue_destroy(queue);
    }
    free(w);
}

typedef struct worker {
    work *work;
    struct work_results expected;
    bool good;
} worker;

static void *run_worker(void *context)
{
    worker *me = context;
    cot_queue_options options;
    cot_queue *queue = NULL;
    COT_INIT(&options);
    options.threads = 2;
    me->good = cot_queue_create(&options, &queue) == COT_OK;
    for (int round = 0; me->good && round < 50; round++)
        me->good =
            run_work(me->work, queue) == COT_OK && memcmp(&me->work->results, &me->expected, sizeof me->expected) == 0;
    cot_queue_destroy(queue);
    return NULL;
}

static void queues_of_two_threads_are_independent(void **state)
{
    (void)state;
    static worker workers[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        workers[i].work = new_work((uint64_t)(10 + i), 1);
        workers[i].expected = serial_results(workers[i].work);
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run_worker, &workers[i]), 0);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        assert_true(workers[i].good);
        free(workers[i].work);
    }
}

/* ---- fork --------------------------------------------------------------------------------------------- */

/* Runs in the child. It returns an exit code instead of asserting. */
static int child(work *w, cot_queue *inherited, const struct work_results *expected)
{
    alarm(60); /* ends a runtime that waits for threads of the parent */
    if (cot_queue_threads(inherited) != 1)
        return 2;
    if (run_work(w, inherited) != COT_OK || memcmp(&w->results, expected, sizeof *expected) != 0)
        return 3;
    cot_queue *queue = NULL;
    if (cot_queue_create(NULL, &queue) != COT_OK || cot_queue_threads(queue) != 1)
        return 4;
    if (run_work(w, queue) != COT_OK || memcmp(&w->results, expected, sizeof *expected) != 0)
        return 5;
    cot_queue_destroy(queue);
    cot_queue_destroy(inherited);
    return 0;
}

static void a_forked_child_works_serially(void **state)
{
    (void)state;
    work *w = new_work(4, 1);
    cot_queue *queue = make_queue(NULL, 2);
    assert_ok(run_work(w, queue)); /* the parent's worker threads exist now */
    const struct work_results expected = w->results;
    fflush(NULL);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(child(w, queue, &expected));
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(cot_queue_threads(queue), 2); /* the parent is unaffected */
    assert_ok(run_work(w, queue));
    assert_memory_equal(&w->results, &expected, sizeof expected);
    cot_queue_destroy(queue);
    free(w);
}

/* ---- the floating-point state ------------------------------------------------------------------------- */

#if defined(__x86_64__)
#include <immintrin.h>

static void the_hosts_floating_point_state_is_kept_and_ignored(void **state)
{
    (void)state;
    enum { FTZ = 0x8000, DAZ = 0x0040, TOWARDS_ZERO = 0x6000, UPWARDS = 0x4000, FLAGS = 0x3f };
    static const unsigned hosts[] = {FTZ | DAZ, TOWARDS_ZERO, UPWARDS | FTZ};
    static const float scales[] = {1, 1e-20f, 1e-38f};
    const unsigned usual = _mm_getcsr();
    for (size_t s = 0; s < COUNT(scales); s++) {
        work *w = new_work(5, scales[s]);
        const struct work_results expected = serial_results(w);
        if (scales[s] < 1e-30f) { /* the case has subnormal results that are not zero */
            int subnormal = 0;
            for (int i = 0; i < B * D * T; i++)
                subnormal += expected.dx[i] != 0 && expected.dx[i] < 1.1e-38f && expected.dx[i] > -1.1e-38f;
            assert_true(subnormal > 100);
        }
        for (size_t h = 0; h < COUNT(hosts); h++) {
            for (int32_t threads = 1; threads <= 2; threads++) {
                cot_queue *queue = make_queue(NULL, threads);
                _mm_setcsr((usual & ~(unsigned)FLAGS) | hosts[h]);
                const unsigned before = _mm_getcsr();
                const cot_status status = run_work(w, queue);
                const unsigned after = _mm_getcsr();
                _mm_setcsr(usual);
                assert_ok(status);
                assert_int_equal(after & ~(unsigned)FLAGS, before & ~(unsigned)FLAGS);
                assert_memory_equal(&w->results, &expected, sizeof expected);
                cot_queue_destroy(queue);
            }
        }
        free(w);
    }
}
#endif

int main(void)
{
    unsetenv("COT_KERNEL");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_queue_uses_all_threads),
        cmocka_unit_test(options_are_checked),
        cmocka_unit_test(cuda_queue_or_a_reason),
        cmocka_unit_test(forced_kernels_are_parsed),
        cmocka_unit_test(environment_forces_where_options_do_not),
        cmocka_unit_test(cpu_queue_has_no_stream),
        cmocka_unit_test(pool_grows_and_never_shrinks),
        cmocka_unit_test(a_reserved_pool_suffices),
        cmocka_unit_test(every_item_runs_once),
        cmocka_unit_test(results_do_not_depend_on_the_threads),
        cmocka_unit_test(queues_of_two_threads_are_independent),
        cmocka_unit_test(a_forked_child_works_serially),
#if defined(__x86_64__)
        cmocka_unit_test(the_hosts_floating_point_state_is_kept_and_ignored),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
