/* SPDX-License-Identifier: Apache-2.0
 * test_cuda_messages.c: tests the messages about unsupported drivers and devices, missing memory, captures, and faults
 * that kernels report. LD_LIBRARY_PATH must select the driver of fake_cuda.c. With the argument no_driver, it must
 * select a libcuda.so.1 that is not a library. */
#include "support.h"

#include "cuda/branches.h"
#include "cuda/device.h"

#include <cotangent/causal_conv1d.h>
#include <stdio.h>
#include <stdlib.h>

static cot_status create(const char *fault, int device, cot_queue **queue)
{
    setenv("FAKE_CUDA", fault, 1);
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    options.device = device;
    return cot_queue_create(&options, queue);
}

static void assert_refused(const char *fault, const char *message)
{
    cot_queue *queue = NULL;
    assert_fails(create(fault, 0, &queue), COT_NO_DEVICE, message);
    assert_null(queue);
}

static void names_a_missing_driver(void **state)
{
    (void)state;
    cot_queue *queue = NULL;
    assert_fails(create("", 0, &queue), COT_NO_DEVICE, NULL);
    assert_null(queue);
    const char expected[] = "cot_queue_create: no CUDA driver: ";
    assert_memory_equal(cot_error_message(), expected, sizeof expected - 1);
}

static void names_an_unsupported_driver(void **state)
{
    (void)state;
    const char *needed = CUDA_VERSION < 13000 ? "12.0 (R525)" : "13.0 (R580)";
    char message[200];
    snprintf(message, sizeof message,
             "cot_queue_create: the CUDA driver is too old: it supports CUDA 11.8 (R520), this build's GPU code needs "
             "CUDA %s or later",
             needed);
    assert_refused("old", message);
    snprintf(message, sizeof message,
             "cot_queue_create: the CUDA driver is too old: it supports CUDA 12.8 (R570), this build's GPU code needs "
             "CUDA %s or later",
             needed);
    if (CUDA_VERSION >= 13000)
        assert_refused("old12", message);
    snprintf(message, sizeof message,
             "cot_queue_create: Fake GPU (compute capability 8.9) needs PTX, which the CUDA driver is too old for: it "
             "supports CUDA 13.0 (R580), this build's PTX needs CUDA %d.%d%s or later",
             CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10, cot_cuda_branch(CUDA_VERSION));
    assert_refused("old_ptx", message);
    assert_refused("no_start", "cot_queue_create: the CUDA driver does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH");
}

static void names_an_unsupported_device(void **state)
{
    (void)state;
    assert_refused("no_device", "cot_queue_create: the CUDA driver finds no device");
    assert_refused("empty", "cot_queue_create: the CUDA driver finds no device");
    assert_refused("sm70", "cot_queue_create: Fake GPU has compute capability 7.0, the kernels support 8.0 and later");
    cot_queue *queue = NULL;
    assert_fails(create("", 1, &queue), COT_INVALID_ARGUMENT, "cot_queue_create: options.device is 1, expected 0 to 0");
    assert_null(queue);
}

/* The kernels of an op that need Hopper are refused on an older device. */
static void refuses_kernels_of_other_architectures(void **state)
{
    (void)state;
    cot_queue *queue = NULL;
    char data[64];
    cot_causal_conv1d_forward_args args;
    COT_INIT(&args);
    args.x = args.y = cot_tensor_contiguous(data, COT_F32, 3, (int64_t[]){1, 1, 4});
    args.weight = cot_tensor_contiguous(data, COT_F32, 2, (int64_t[]){1, 4});
    setenv("COT_KERNEL", "causal_conv1d=causal_conv1d_fwd_channel_first_sm90", 1);
    assert_ok(create("sm80", 0, &queue));
    unsetenv("COT_KERNEL");
    size_t bytes;
    assert_fails(
        cot_causal_conv1d_forward_workspace(queue, &args, &bytes), COT_UNSUPPORTED,
        "causal_conv1d_forward: the forced kernel causal_conv1d_fwd_channel_first_sm90 refuses: this device is "
        "no Hopper (compute capability 9.0)");
    cot_queue_destroy(queue);
}

static void names_missing_memory(void **state)
{
    (void)state;
    cot_queue *queue = NULL;
    assert_ok(create("no_memory", 0, &queue));
    assert_ok(cot_queue_reserve(queue, 1000));
    assert_fails(
        cot_queue_reserve(queue, 2 << 20), COT_OUT_OF_MEMORY,
        "the queue's pool cannot grow from 1000 to 2097152 bytes: CUDA_ERROR_OUT_OF_MEMORY: as the test asked");
    assert_ok(cot_queue_reserve(queue, 2000)); /* the queue remains usable */
    cot_queue_destroy(queue);
}

static void neither_allocates_nor_waits_while_capturing(void **state)
{
    (void)state;
    cot_queue *queue = NULL;
    CUgraph graph;
    assert_ok(create("", 0, &queue));
    assert_ok(cot_queue_reserve(queue, 64));
    queue->device->driver.cuStreamBeginCapture(NULL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    assert_fails(cot_queue_reserve(queue, 128), COT_WOULD_ALLOCATE,
                 "the queue's pool has 64 bytes, 128 are needed, and the stream is being captured: call "
                 "cot_queue_reserve before");
    assert_fails(cot_queue_check(queue), COT_INVALID_ARGUMENT, "cot_queue_check: the queue's stream is being captured");
    queue->device->driver.cuStreamEndCapture(NULL, &graph);
    assert_ok(cot_queue_reserve(queue, 128));
    cot_queue_destroy(queue);
}

static void *allocate(void *context, size_t bytes)
{
    ++*(int *)context;
    static _Alignas(COT_ALIGNMENT) char memory[1 << 16];
    return bytes <= sizeof memory ? memory : NULL;
}

/* A capture needs no reserved pool if a framework's allocator gives the workspace. */
static void uses_the_queues_allocator_while_capturing(void **state)
{
    (void)state;
    cot_queue *queue = NULL;
    CUgraph graph;
    static float data[3][1024];
    cot_causal_conv1d_backward_args args;
    COT_INIT(&args);
    args.x = cot_tensor_contiguous(data[0], COT_F32, 3, (int64_t[]){2, 8, 64});
    args.dy = cot_tensor_contiguous(data[1], COT_F32, 3, (int64_t[]){2, 8, 64});
    args.weight = cot_tensor_contiguous(data[2], COT_F32, 2, (int64_t[]){8, 4});
    args.dweight = cot_tensor_contiguous(data[2] + 512, COT_F32, 2, (int64_t[]){8, 4});
    assert_ok(create("", 0, &queue));
    queue->device->driver.cuStreamBeginCapture(NULL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    assert_fails(cot_causal_conv1d_backward(queue, &args), COT_WOULD_ALLOCATE, NULL);
    int calls = 0;
    assert_ok(cot_queue_set_allocator(queue, allocate, &calls));
    assert_ok(cot_causal_conv1d_backward(queue, &args));
    assert_int_equal(calls, 1);
    assert_int_equal(queue->device->pool_count, 0);
    queue->device->driver.cuStreamEndCapture(NULL, &graph);
    cot_queue_destroy(queue);
}

static void moves_between_the_streams_of_a_context(void **state)
{
    (void)state;
    cot_queue *queue = NULL;
    CUstream stream;
    assert_ok(create("", 0, &queue));
    queue->device->driver.cuStreamCreate(&stream, 0);
    assert_ok(cot_queue_set_stream(queue, stream));
    assert_ptr_equal(queue->device->stream, stream);
    assert_fails(cot_queue_set_stream(queue, (void *)16), COT_INVALID_ARGUMENT,
                 "cot_queue_set_stream: stream is of another context than the queue");
    assert_ptr_equal(queue->device->stream, stream);
    assert_ok(cot_queue_set_stream(queue, NULL));
    assert_null(queue->device->stream);
    cot_queue_destroy(queue);
}

static void reports_faults_of_kernels(void **state)
{
    (void)state;
    static const char *const words[] = {
        [COT_FAULT_CU_SEQLENS] = "cu_seqlens[7] is out of order or beyond the tensor",
        [COT_FAULT_CACHE_SEQLENS] = "cache_seqlens[7] is negative",
        [COT_FAULT_STATE_INDEX] = "conv_state_indices[7] is beyond the rows of conv_state",
    };
    cot_queue *queue = NULL;
    assert_ok(create("", 0, &queue));
    for (size_t kind = 1; kind < COUNT(words); kind++) {
        char message[200];
        snprintf(message, sizeof message, "cot_queue_check: a kernel met index data at fault: %s", words[kind]);
        *cot_cuda_fault_word(queue) = (unsigned long long)kind << 32 | 7;
        assert_fails(cot_queue_check(queue), COT_INVALID_DATA, message);
        assert_ok(cot_queue_check(queue)); /* reported once */
    }
    *cot_cuda_fault_word(queue) = (unsigned long long)999 << 32;
    assert_fails(cot_queue_check(queue), COT_DEVICE_ERROR, "cot_queue_check: a kernel reported fault 999");
    cot_queue_destroy(queue);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest no_driver[] = {cmocka_unit_test(names_a_missing_driver)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_an_unsupported_driver),
        cmocka_unit_test(names_an_unsupported_device),
        cmocka_unit_test(refuses_kernels_of_other_architectures),
        cmocka_unit_test(names_missing_memory),
        cmocka_unit_test(moves_between_the_streams_of_a_context),
        cmocka_unit_test(neither_allocates_nor_waits_while_capturing),
        cmocka_unit_test(uses_the_queues_allocator_while_capturing),
        cmocka_unit_test(reports_faults_of_kernels),
    };
    if (argc == 2 && strcmp(argv[1], "no_driver") == 0)
        return cmocka_run_group_tests(no_driver, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
