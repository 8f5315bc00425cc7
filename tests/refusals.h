/* SPDX-License-Identifier: Apache-2.0
 *
 * refusals.h: what the tests of the ops' fronts share: a call is refused with a status and exactly this message, its
 * workspace query alike, and no output is touched. A test defines, for these macros:
 *
 *   fixture                               valid arguments of every call, their memory, `queue`, and the outputs' in `out`
 *   fresh(fixture, kernels)               begins one by BEGIN; kernels as in cot_queue_options; returns it
 *   call(fixture, direction)              makes the call
 *   ask_workspace(fixture, direction, bytes) */
#ifndef COT_TESTS_REFUSALS_H
#define COT_TESTS_REFUSALS_H

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

/* A fault in the arguments' shape is found by the workspace query too; a fault in what the pointers lead to cannot
 * be, since a caller may ask before there is memory. */
enum { SHAPES, DATA };

/* These arguments are refused; ends the fixture. */
#define REFUSED(f, direction, kind, status, message)                                            \
    do {                                                                                        \
        size_t asked = 12345;                                                                   \
        assert_fails(call(f, direction), status, message);                                      \
        assert_fails(ask_workspace(f, direction, &asked), (kind) == SHAPES ? (status) : COT_OK, \
                     (kind) == SHAPES ? (message) : NULL);                                      \
        assert_true((kind) != SHAPES || asked == 12345);                                        \
        assert_untouched_at(&(f)->out, sizeof(f)->out, __FILE__, __LINE__);                     \
        cot_queue_destroy((f)->queue);                                                          \
    } while (0)

/* Fresh arguments with these changes, made to *f, are refused. */
#define REFUSE(direction, kind, status, message, ...) \
    do {                                              \
        fixture space, *f = fresh(&space, NULL);      \
        __VA_ARGS__;                                  \
        REFUSED(f, direction, kind, status, message); \
    } while (0)

/* They are served, and the workspace query agrees. */
#define ACCEPT(direction, ...)                          \
    do {                                                \
        fixture space, *f = fresh(&space, NULL);        \
        size_t asked = 12345;                           \
        __VA_ARGS__;                                    \
        assert_ok(call(f, direction));                  \
        assert_ok(ask_workspace(f, direction, &asked)); \
        cot_queue_destroy(f->queue);                    \
    } while (0)

#endif
