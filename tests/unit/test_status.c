/* SPDX-License-Identifier: Apache-2.0
 * test_status.c: tests the names of statuses, and the error message: its thread, its lifetime, its copies. */
#include "support.h"

#include "core/status.h"

#include <pthread.h>
#include <stdio.h>

static void names_every_status(void **state)
{
    (void)state;
    static const char *const names[] = {
        "COT_OK",
        "COT_INVALID_ARGUMENT",
        "COT_INVALID_SHAPE",
        "COT_INVALID_DTYPE",
        "COT_INVALID_LAYOUT",
        "COT_INVALID_DATA",
        "COT_UNSUPPORTED",
        "COT_WORKSPACE_TOO_SMALL",
        "COT_OUT_OF_MEMORY",
        "COT_WOULD_ALLOCATE",
        "COT_NO_DEVICE",
        "COT_DEVICE_ERROR",
        "COT_PEER_ERROR",
    };
    for (size_t i = 0; i < COUNT(names); i++)
        assert_string_equal(cot_status_name((cot_status)i), names[i]);
    assert_string_equal(cot_status_name((cot_status)COUNT(names)), "COT_?");
}

static void version_is_the_headers(void **state)
{
    (void)state;
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", COT_VERSION_MAJOR, COT_VERSION_MINOR, COT_VERSION_PATCH);
    assert_string_equal(cot_version(), version);
}

static void *message_of_a_new_thread(void *first)
{
    *(bool *)first = cot_error_message()[0] == '\0';
    cot_fail(COT_INVALID_DATA, "from the other thread");
    return NULL;
}

static void message_belongs_to_its_thread(void **state)
{
    (void)state;
    bool empty_at_first = false;
    pthread_t thread;
    assert_int_equal(cot_fail(COT_INVALID_SHAPE, "from %s", "this thread"), COT_INVALID_SHAPE);
    assert_int_equal(pthread_create(&thread, NULL, message_of_a_new_thread, &empty_at_first), 0);
    pthread_join(thread, NULL);
    assert_true(empty_at_first);
    assert_string_equal(cot_error_message(), "from this thread");
}

static void success_leaves_the_message(void **state)
{
    (void)state;
    cot_queue *queue = NULL;
    cot_fail(COT_INVALID_DATA, "kept");
    assert_ok(cot_queue_create(NULL, &queue));
    cot_queue_destroy(queue);
    assert_string_equal(cot_error_message(), "kept");
}

static void copy_is_cut_and_terminated(void **state)
{
    (void)state;
    char buffer[8];
    cot_fail(COT_INVALID_DATA, "12345");
    memset(buffer, 'x', sizeof buffer);
    assert_int_equal(cot_error_copy(NULL, 0), 5);
    assert_int_equal(cot_error_copy(NULL, 8), 5);
    assert_int_equal(cot_error_copy(buffer, 0), 5);
    assert_int_equal(buffer[0], 'x');
    assert_int_equal(cot_error_copy(buffer, 1), 5);
    assert_memory_equal(buffer, "\0xxxxxxx", 8);
    assert_int_equal(cot_error_copy(buffer, 5), 5);
    assert_memory_equal(buffer, "1234\0xxx", 8);
    assert_int_equal(cot_error_copy(buffer, 6), 5);
    assert_memory_equal(buffer, "12345\0xx", 8);
    memset(buffer, 'x', sizeof buffer);
    assert_int_equal(cot_error_copy(buffer, sizeof buffer), 5);
    assert_memory_equal(buffer, "12345\0xx", 8);
}

static void long_message_is_cut(void **state)
{
    (void)state;
    char copy[2048];
    cot_fail(COT_INVALID_DATA, "%01500d", 7);
    const size_t length = strlen(cot_error_message());
    assert_in_range(length, 500, 1499);
    assert_int_equal(cot_error_copy(copy, sizeof copy), length);
    assert_string_equal(copy, cot_error_message());
}

static void stores_the_message_of_another_library(void **state)
{
    (void)state;
    char text[] = "100% of another library";
    assert_int_equal(cot_error_set(COT_UNSUPPORTED, text), COT_UNSUPPORTED);
    text[0] = 'x';
    assert_string_equal(cot_error_message(), "100% of another library");
    assert_int_equal(cot_error_set(COT_INVALID_DATA, NULL), COT_INVALID_DATA);
    assert_string_equal(cot_error_message(), "100% of another library");
}

static void queue_has_its_backend(void **state)
{
    (void)state;
    cot_queue *queue = make_queue(NULL, 1);
    assert_int_equal(cot_queue_backend(queue), COT_BACKEND_CPU);
    assert_int_equal(cot_queue_backend(NULL), COT_BACKEND_CPU);
    cot_queue_destroy(queue);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_every_status),
        cmocka_unit_test(version_is_the_headers),
        cmocka_unit_test(message_belongs_to_its_thread),
        cmocka_unit_test(success_leaves_the_message),
        cmocka_unit_test(copy_is_cut_and_terminated),
        cmocka_unit_test(long_message_is_cut),
        cmocka_unit_test(stores_the_message_of_another_library),
        cmocka_unit_test(queue_has_its_backend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
