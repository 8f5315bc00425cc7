/* SPDX-License-Identifier: Apache-2.0
 * test_cuda.c: tests of a CUDA queue: threads, graphs, borrowed streams, and the order in which queues end. Uses the
 * quick cases of every op and direction with a CUDA kernel. `cotangent check --backend cuda` tests the results. Exit
 * status 77, "skipped", without a GPU. */
#include "device_queue.h"
#include "support.h"

#include "bench/bench_device.h"
#include "core/tensor.h"
#include "cuda/device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- calls -------------------------------------------------------------------------------------------- */

typedef struct call {
    const cot_op_cases *cases;
    cot_case c;
} call;

typedef struct calls {
    const cot_op_cases *cases;
    const cot_queue *queue;
    call *list;
    int count;
} calls;

/* Adds a quick case if the device supports it. */
static bool add_call(void *context, const cot_case *c)
{
    calls *all = context;
    cot_choice choices[COT_MAX_KERNELS];
    int count;
    if (!(c->uses & COT_CASE_QUICK) ||
        cot_op_explain(case_direction(all->cases, c), all->queue, c->args, choices, &count) != COT_OK)
        return true;
    all->list = realloc(all->list, (size_t)(all->count + 1) * sizeof *all->list);
    assert_non_null(all->list);
    all->list[all->count++] = (call){all->cases, *c};
    return true;
}

static calls find_calls(void)
{
    cot_queue_options options;
    cot_queue *queue = NULL;
    calls all = {0};
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    assert_ok(cot_queue_create(&options, &queue));
    all.queue = queue;
    for (int i = 0; i < cot_op_count; i++) {
        all.cases = cot_all_cases[i];
        all.cases->each(add_call, &all);
    }
    cot_queue_destroy(queue);
    assert_true(all.count > 0);
    return all;
}

/* Allocates the call's host memory and fills its inputs from `seed`. */
static void bind(const call *one, uint64_t seed, bound_case *b)
{
    cot_case c = one->c;
    c.seed = seed;
    reference ref = reference_make(one->cases, &c);
    bound_case_make(b, &ref, false);
    reference_free(&ref);
}

static bool same_memory(const cot_direction *direction, const bound_case *a, const bound_case *b)
{
    for (int f = 0; f < direction->field_count; f++)
        if (a->fields[f].memory != NULL && memcmp(a->fields[f].memory, b->fields[f].memory, a->fields[f].bytes) != 0)
            return false;
    return true;
}

static void describe(const call *one)
{
    print_error("%s %s %s %s %s\n", one->cases->op->name, case_direction(one->cases, &one->c)->name, one->c.layout,
                one->c.shape, one->c.options);
}

/* ---- two threads, two queues -------------------------------------------------------------------------- */

typedef struct worker {
    const calls *all;
    bound_case *results;
    uint64_t seed;
    cot_status status;
    char message[300];
} worker;

static void *run_all_calls(void *context)
{
    worker *w = context;
    device_queue d;
    w->status = device_queue_open(&d, COT_BACKEND_CUDA, "");
    for (int i = 0; w->status == COT_OK && i < w->all->count; i++) {
        const call *one = &w->all->list[i];
        bind(one, w->seed, &w->results[i]);
        w->status = bound_case_run(&w->results[i], case_direction(one->cases, &one->c), d.queue);
    }
    cot_error_copy(w->message, sizeof w->message);
    device_queue_close(&d);
    return NULL;
}

static worker worker_init(const calls *all, uint64_t seed)
{
    return (worker){.all = all, .results = allocate((size_t)all->count, sizeof(bound_case)), .seed = seed};
}

static void assert_worked(const worker *w)
{
    if (w->status != COT_OK)
        print_error("%s\n", w->message);
    assert_int_equal(w->status, COT_OK);
}

static void worker_end(worker *w)
{
    for (int i = 0; i < w->all->count; i++)
        bound_case_free(&w->results[i], case_direction(w->all->list[i].cases, &w->all->list[i].c));
    free(w->results);
}

static void two_threads_work_at_once(void **state)
{
    (void)state;
    const calls all = find_calls();
    worker alone[2] = {worker_init(&all, 3), worker_init(&all, 4)},
           together[2] = {worker_init(&all, 3), worker_init(&all, 4)};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        run_all_calls(&alone[i]);
        assert_worked(&alone[i]);
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run_all_calls, &together[i]), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_worked(&together[i]);
    }
    for (int i = 0; i < 2; i++)
        for (int n = 0; n < all.count; n++)
            if (!same_memory(case_direction(all.list[n].cases, &all.list[n].c), &alone[i].results[n],
                             &together[i].results[n])) {
                describe(&all.list[n]);
                fail_msg("thread %d gave other bits while another thread ran", i);
            }
    for (int i = 0; i < 2; i++) {
        worker_end(&alone[i]);
        worker_end(&together[i]);
    }
    free(all.list);
}

/* ---- graphs ------------------------------------------------------------------------------------------- */

/* Captures the call on one set of data and replays it on another. Compares the result with a call on the second set. */
static void capture_and_replay(const call *one, device_queue *d)
{
    const cot_direction *direction = case_direction(one->cases, &one->c);
    const cot_cuda_driver *driver = &d->queue->device->driver;
    bound_case first, second, expected;
    device_image image;
    size_t workspace_bytes;
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    bind(one, 5, &first);
    bind(one, 6, &second);
    bind(one, 6, &expected);
    assert_ok(bound_case_run(&expected, direction, d->queue));
    assert_ok(cot_op_workspace(direction, d->queue, first.args, &workspace_bytes));
    assert_ok(device_image_make(&image, &first, direction, d->queue, workspace_bytes));
    assert_ok(cot_op_run(direction, d->queue, image.args)); /* loads modules before the capture */
    assert_ok(cot_queue_check(d->queue));
    assert_int_equal(driver->cuStreamBeginCapture(d->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
    assert_ok(cot_op_run(direction, d->queue, image.args));
    assert_int_equal(driver->cuStreamEndCapture(d->stream, &graph), CUDA_SUCCESS);
    assert_int_equal(cot_cuda_enter(d->queue->device), COT_OK);
    assert_int_equal(driver->cuGraphInstantiateWithFlags(&executable, graph, 0), CUDA_SUCCESS);
    for (int replay = 0; replay < 3; replay++) {
        assert_ok(device_image_write(&image, &second, direction, d->queue));
        assert_int_equal(driver->cuGraphLaunch(executable, d->stream), CUDA_SUCCESS);
        assert_ok(cot_queue_check(d->queue));
        assert_ok(device_image_read(&image, &first, direction, d->queue));
        if (!same_memory(direction, &first, &expected)) {
            describe(one);
            fail_msg("replay %d of the captured call gave other bits than a call", replay);
        }
    }
    driver->cuGraphExecDestroy(executable);
    driver->cuGraphDestroy(graph);
    cot_cuda_leave(d->queue->device);
    device_image_free(&image, d->queue);
    bound_case_free(&first, direction);
    bound_case_free(&second, direction);
    bound_case_free(&expected, direction);
}

static bool takes_input(const call *one, const char *name)
{
    const cot_direction *direction = case_direction(one->cases, &one->c);
    for (int f = 0; f < direction->field_count; f++)
        if (strcmp(direction->fields[f].name, name) == 0)
            return cot_is_present(cot_field_tensor(&direction->fields[f], (void *)one->c.args));
    return false;
}

/* The changed data are all inputs, including index data and dropout's seed_tensor and offset_tensor. */
static void captured_calls_replay_on_changed_data(void **state)
{
    (void)state;
    calls all = find_calls();
    int with_seeds = 0, with_sequences = 0;
    device_queue d;
    assert_ok(device_queue_open(&d, COT_BACKEND_CUDA, ""));
    for (int i = 0; i < all.count; i++) {
        capture_and_replay(&all.list[i], &d);
        with_seeds += takes_input(&all.list[i], "seed_tensor");
        with_sequences += takes_input(&all.list[i], "cu_seqlens");
    }
    assert_true(with_seeds > 0 && with_sequences > 0);
    device_queue_close(&d);
    free(all.list);
}

/* ---- streams and lifetimes ---------------------------------------------------------------------------- */

/* Asserts that the call returns the same bits as on a separate queue. */
static void assert_serves(cot_queue *queue, const call *one, const bound_case *expected)
{
    bound_case b;
    bind(one, 7, &b);
    assert_ok(bound_case_run(&b, case_direction(one->cases, &one->c), queue));
    assert_true(same_memory(case_direction(one->cases, &one->c), &b, expected));
    bound_case_free(&b, case_direction(one->cases, &one->c));
}

/* The thread has no current context before or after any call on a queue. */
static void a_borrowed_stream_is_used_and_kept(void **state)
{
    (void)state;
    calls all = find_calls();
    const call *one = &all.list[0];
    const cot_direction *direction = case_direction(one->cases, &one->c);
    device_queue d;
    bound_case expected;
    CUdevice device;
    assert_ok(device_queue_open(&d, COT_BACKEND_CUDA, ""));
    const cot_cuda_driver *driver = &d.owner->device->driver;
    bind(one, 7, &expected);
    assert_ok(bound_case_run(&expected, direction, d.owner)); /* on the default stream */
    assert_serves(d.queue, one, &expected);
    assert_int_equal(driver->cuCtxGetDevice(&device), CUDA_ERROR_INVALID_CONTEXT);
    cot_queue_destroy(d.queue);
    /* The stream belongs to the caller: it remains usable, also by another queue. */
    assert_int_equal(driver->cuStreamSynchronize(d.stream), CUDA_SUCCESS);
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    options.stream = d.stream;
    assert_ok(cot_queue_create(&options, &d.queue));
    assert_serves(d.queue, one, &expected);
    device_queue_close(&d);
    bound_case_free(&expected, direction);
    free(all.list);
}

static void queues_end_in_any_order(void **state)
{
    (void)state;
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    calls all = find_calls();
    const call *one = &all.list[all.count / 2];
    const cot_direction *direction = case_direction(one->cases, &one->c);
    bound_case expected;
    bind(one, 7, &expected);
    for (int o = 0; o < 6; o++) {
        cot_queue *queues[3] = {0};
        cot_queue_options options;
        COT_INIT(&options);
        options.backend = COT_BACKEND_CUDA;
        for (int i = 0; i < 3; i++) { /* all queues use the default stream of the same context */
            assert_ok(cot_queue_create(&options, &queues[i]));
            assert_ok(cot_queue_reserve(queues[i], 1 << 20));
        }
        if (o == 0)
            assert_ok(bound_case_run(&expected, direction, queues[0]));
        for (int i = 0; i < 3; i++) {
            cot_queue_destroy(queues[orders[o][i]]);
            for (int left = i + 1; left < 3; left++)
                assert_serves(queues[orders[o][left]], one, &expected);
        }
    }
    bound_case_free(&expected, direction);
    free(all.list);
}

int main(void)
{
    cot_queue *queue = NULL;
    const int none = open_device_queue(&queue);
    if (none != 0)
        return none;
    cot_queue_destroy(queue);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_threads_work_at_once),
        cmocka_unit_test(captured_calls_replay_on_changed_data),
        cmocka_unit_test(a_borrowed_stream_is_used_and_kept),
        cmocka_unit_test(queues_end_in_any_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
