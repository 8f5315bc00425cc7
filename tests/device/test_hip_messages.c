/* SPDX-License-Identifier: Apache-2.0
 * test_hip_messages.c: tests the messages about unsupported HIP runtimes and devices, missing memory, captures, and
 * launches that fail. LD_LIBRARY_PATH must select the runtime of fake_hip.c. With the argument no_runtime, it must
 * select a libamdhip64.so that is not a library. */
#include "support.h"

#include "hip/device.h"

#include <cotangent/dropout.h>
#include <stdlib.h>

static cot_status create(const char *fault, int device, cot_queue **queue)
{
    setenv("FAKE_HIP", fault, 1);
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_HIP;
    options.device = device;
    return cot_queue_create(&options, queue);
}

static void assert_refused(const char *fault, const char *message)
{
    cot_queue *queue = NULL;
    assert_fails(create(fault, 0, &queue), COT_NO_DEVICE, message);
    assert_null(queue);
}

static void names_a_missing_runtime(void **state)
{
    (void)state;
    cot_queue *queue = NULL;
    assert_fails(create("", 0, &queue), COT_NO_DEVICE, NULL);
    assert_null(queue);
    const char expected[] = "cot_queue_create: no HIP runtime of ROCm 6.0 or later: ";
    assert_memory_equal(cot_error_message(), expected, sizeof expected - 1);
}

static void names_an_unsupported_runtime(void **state)
{
    (void)state;
    assert_refused("old", "cot_queue_create: the HIP runtime is too old: it is version 5.7, 6.0 or later is needed");
    assert_refused("no_start", "cot_queue_create: the HIP runtime does not start: hipErrorNotSupported");
}

static void names_an_unsupported_device(void **state)
{
    (void)state;
    assert_refused("no_device", "cot_queue_create: the HIP runtime finds no device");
    assert_refused("empty", "cot_queue_create: the HIP runtime finds no device");
    assert_refused("gfx1100", "cot_queue_create: this build has no code for Fake AMD GPU 0: the kernels support gfx90a "
                              "(MI200) and gfx942 (MI300)");
    cot_queue *queue = NULL;
    assert_fails(create("", 2, &queue), COT_INVALID_ARGUMENT, "cot_queue_create: options.device is 2, expected 0 to 1");
    assert_null(queue);
}

static void names_missing_memory(void **state)
{
    (void)state;
    cot_queue *queue = NULL;
    assert_ok(create("no_memory", 0, &queue));
    assert_ok(cot_queue_reserve(queue, 1000));
    assert_fails(cot_queue_reserve(queue, 2 << 20), COT_OUT_OF_MEMORY,
                 "the queue's pool cannot grow from 1000 to 2097152 bytes: hipErrorOutOfMemory: as the test asked");
    assert_ok(cot_queue_reserve(queue, 2000)); /* the queue remains usable */
    cot_queue_destroy(queue);
}

static void does_not_allocate_while_capturing(void **state)
{
    (void)state;
    cot_queue *queue = NULL;
    assert_ok(create("", 0, &queue));
    setenv("FAKE_HIP", "capturing", 1);
    assert_fails(cot_queue_reserve(queue, 1000), COT_WOULD_ALLOCATE,
                 "the queue's pool has 0 bytes, 1000 are needed, and the stream is being captured: call "
                 "cot_queue_reserve before");
    assert_fails(cot_queue_check(queue), COT_INVALID_ARGUMENT, "cot_queue_check: the queue's stream is being captured");
    cot_queue_destroy(queue);
}

/* The thread's device stays what it was, and a stream must be of the queue's device. */
static void keeps_to_its_device(void **state)
{
    (void)state;
    cot_queue *queue = NULL;
    void *context, *stream;
    assert_ok(create("", 0, &queue));
    assert_int_equal(cot_queue_backend(queue), COT_BACKEND_HIP);
    assert_ok(cot_queue_set_stream(queue, (void *)2));
    assert_fails(cot_queue_set_stream(queue, (void *)1), COT_INVALID_ARGUMENT,
                 "cot_queue_set_stream: stream is of device 1, the queue of device 0");
    assert_fails(cot_queue_cuda(queue, &context, &stream), COT_INVALID_ARGUMENT,
                 "cot_queue_cuda: queue is of HIP, expected one of CUDA");
    cot_queue_destroy(queue);
    int device = -1;
    cot_hip_driver driver;
    assert_ok(cot_hip_driver_open("test", &driver));
    assert_int_equal(driver.hipSetDevice(0), COT_HIP_SUCCESS);
    assert_ok(create("", 1, &queue));
    assert_ok(cot_queue_reserve(queue, 1000));
    assert_int_equal(driver.hipGetDevice(&device), COT_HIP_SUCCESS);
    assert_int_equal(device, 0);
    cot_queue_destroy(queue);
    cot_hip_driver_close(&driver);
}

/* The fault of a launch names the kernel. */
static void names_a_kernel_that_fails(void **state)
{
    (void)state;
    cot_queue *queue = NULL;
    float data[64] = {0};
    cot_dropout_forward_args args;
    COT_INIT(&args);
    args.x = args.y = cot_tensor_contiguous(data, COT_F32, 2, (int64_t[]){8, 8});
    assert_ok(create("", 0, &queue));
    setenv("FAKE_HIP", "launch", 1);
    assert_fails(cot_dropout_forward(queue, &args), COT_DEVICE_ERROR,
                 "dropout_fwd_rows_cdna_f32: hipErrorLaunchFailure: as the test asked");
    setenv("FAKE_HIP", "", 1);
    assert_ok(cot_dropout_forward(queue, &args));
    cot_queue_destroy(queue);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest missing[] = {cmocka_unit_test(names_a_missing_runtime)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_an_unsupported_runtime), cmocka_unit_test(names_an_unsupported_device),
        cmocka_unit_test(names_missing_memory),         cmocka_unit_test(does_not_allocate_while_capturing),
        cmocka_unit_test(keeps_to_its_device),          cmocka_unit_test(names_a_kernel_that_fails),
    };
    if (argc > 1 && strcmp(argv[1], "no_runtime") == 0)
        return cmocka_run_group_tests(missing, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
