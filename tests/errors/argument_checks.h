/* SPDX-License-Identifier: Apache-2.0
 *
 * argument_checks.h: macros for the tests of the ops' argument checks. A refused call returns a status and an exact
 * message and writes no output; its workspace query returns the same. A test defines, for these macros:
 *
 *   fixture                               a type: valid arguments of each call, their memory, `queue`, outputs `out`
 *   fresh(fixture, kernels)               initialises a fixture by BEGIN and returns it; kernels: of cot_queue_options
 *   call(fixture, direction)              makes the call
 *   query_workspace(fixture, direction, bytes) */
#ifndef COT_TESTS_ARGUMENT_CHECKS_H
#define COT_TESTS_ARGUMENT_CHECKS_H

#include "support.h"

#include <string.h>

#define VIEW(data, dtype, ...) cot_tensor_contiguous(data, dtype, (int)COUNT(SHAPE(__VA_ARGS__)), SHAPE(__VA_ARGS__))

static const unsigned char untouched = 0xa5;

#define BEGIN(f, kernels_)                            \
    do {                                              \
        memset((f), 0, sizeof *(f));                  \
        memset(&(f)->out, untouched, sizeof(f)->out); \
        (f)->queue = make_queue(kernels_, 1);         \
    } while (0)

static inline void assert_untouched_at(const void *outputs, size_t bytes, const char *file, int line)
{
    for (size_t i = 0; i < bytes; i++)
        if (((const unsigned char *)outputs)[i] != untouched) {
            print_error("byte %zu of the outputs was written\n", i);
            _fail(file, line);
        }
}

/* The workspace query also finds a fault in the shapes. It cannot find a fault in the data, because a caller may
 * query before it allocates memory. */
enum { SHAPE_FAULT, DATA_FAULT };

/* Asserts that these arguments are refused. Ends the fixture. */
#define REFUSED(f, direction, kind, status, message)                                                             \
    do {                                                                                                         \
        size_t workspace_bytes = 12345;                                                                          \
        assert_fails(call(f, direction), status, message);                                                       \
        assert_fails(query_workspace(f, direction, &workspace_bytes), (kind) == SHAPE_FAULT ? (status) : COT_OK, \
                     (kind) == SHAPE_FAULT ? (message) : NULL);                                                  \
        assert_true((kind) != SHAPE_FAULT || workspace_bytes == 12345);                                          \
        assert_untouched_at(&(f)->out, sizeof(f)->out, __FILE__, __LINE__);                                      \
        cot_queue_destroy((f)->queue);                                                                           \
    } while (0)

/* Asserts that fresh arguments, with these changes to *f, are refused. */
#define REFUSE(direction, kind, status, message, ...) \
    do {                                              \
        fixture space, *f = fresh(&space, NULL);      \
        __VA_ARGS__;                                  \
        REFUSED(f, direction, kind, status, message); \
    } while (0)

/* Asserts that the call and the workspace query accept them. */
#define ACCEPT(direction, ...)                                      \
    do {                                                            \
        fixture space, *f = fresh(&space, NULL);                    \
        size_t workspace_bytes = 12345;                             \
        __VA_ARGS__;                                                \
        assert_ok(call(f, direction));                              \
        assert_ok(query_workspace(f, direction, &workspace_bytes)); \
        cot_queue_destroy(f->queue);                                \
    } while (0)

#endif
