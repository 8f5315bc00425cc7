/* SPDX-License-Identifier: Apache-2.0
 * support.h: common parts of the unit tests: cmocka and its prerequisites, reproducible random numbers, assertions on a
 * status and its message, and queues. */
#ifndef COT_TESTS_SUPPORT_H
#define COT_TESTS_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cases/draw.h"

#include <cotangent/core.h>
#include <stdbool.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define SHAPE(...) ((const int64_t[]){__VA_ARGS__})

/* ---- random numbers ----------------------------------------------------------------------- */

/* An integer of [low, high]. */
static inline int64_t random_int(uint64_t *seed, int64_t low, int64_t high)
{
    return low + (int64_t)(cot_draw(seed) % (uint64_t)(high - low + 1));
}

/* A number of [-1, 1). */
static inline double random_real(uint64_t *seed)
{
    return (double)(cot_draw(seed) >> 11) * 0x1p-52 - 1.0;
}

/* ---- assertions --------------------------------------------------------------------------------------- */

static inline void assert_status_at(cot_status status, cot_status expected, const char *message, const char *file,
                                    int line)
{
    if (status != expected || (message != NULL && strcmp(cot_error_message(), message) != 0)) {
        print_error("got      %s \"%s\"\nexpected %s \"%s\"\n", cot_status_name(status), cot_error_message(),
                    cot_status_name(expected), message != NULL ? message : "");
        _fail(file, line);
    }
}

/* The call succeeds. */
#define assert_ok(call) assert_status_at((call), COT_OK, NULL, __FILE__, __LINE__)

/* The call fails with that status and exactly that message. */
#define assert_fails(call, status, message) assert_status_at((call), (status), (message), __FILE__, __LINE__)

/* ---- queues ------------------------------------------------------------------------------------------- */

/* Creates a CPU queue. `kernels` is that of cot_queue_options; 0 threads means all threads. */
static inline cot_queue *make_queue(const char *kernels, int threads)
{
    cot_queue *queue = NULL;
    cot_queue_options options;
    COT_INIT(&options);
    options.threads = threads;
    options.kernels = kernels;
    assert_ok(cot_queue_create(&options, &queue));
    assert_non_null(queue);
    return queue;
}

#endif
