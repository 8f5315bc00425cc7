/* SPDX-License-Identifier: Apache-2.0
 * device_queue.h: opens the queue of a GPU test. */
#ifndef COT_TESTS_DEVICE_QUEUE_H
#define COT_TESTS_DEVICE_QUEUE_H

#include <cotangent/core.h>
#include <stdio.h>

enum { SKIPPED = 77 }; /* exit status of a skipped test, for ctest */

/* Creates a CUDA queue, which the caller destroys. Returns 0, SKIPPED if there is no device, or 1 on another error.
 * Prints the reason of a failure. */
static inline int open_device_queue(cot_queue **queue)
{
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    const cot_status status = cot_queue_create(&options, queue);
    if (status == COT_OK)
        return 0;
    fprintf(status == COT_NO_DEVICE ? stdout : stderr, "%s%s\n", status == COT_NO_DEVICE ? "skipped: " : "",
            cot_error_message());
    return status == COT_NO_DEVICE ? SKIPPED : 1;
}

#endif
