/* SPDX-License-Identifier: Apache-2.0
 * device_queue.h: opens the queue of a GPU test. */
#ifndef COT_TESTS_DEVICE_QUEUE_H
#define COT_TESTS_DEVICE_QUEUE_H

#include <cotangent/core.h>
#include <stdio.h>

enum { SKIPPED = 77 }; /* exit status of a skipped test, for ctest */

/* Creates a CUDA queue of a device, which the caller destroys. Returns 0, SKIPPED if there is no such device, or 1 on
 * another error. Prints the reason of a failure. */
static inline int open_queue_of_device(int device, cot_queue **queue)
{
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    options.device = device;
    const cot_status status = cot_queue_create(&options, queue);
    if (status == COT_OK)
        return 0;
    const int missing = status == COT_NO_DEVICE || (status == COT_INVALID_ARGUMENT && device > 0);
    fprintf(missing ? stdout : stderr, "%s%s\n", missing ? "skipped: " : "", cot_error_message());
    return missing ? SKIPPED : 1;
}

static inline int open_device_queue(cot_queue **queue)
{
    return open_queue_of_device(0, queue);
}

#endif
