/* SPDX-License-Identifier: Apache-2.0
 * device.h: how a test of a GPU begins. */
#ifndef COT_TESTS_DEVICE_H
#define COT_TESTS_DEVICE_H

#include <cotangent/core.h>
#include <stdio.h>

enum { SKIPPED = 77 }; /* what ctest takes for that */

/* A CUDA queue, for the caller to destroy: 0. Where there is none, says why: SKIPPED for want of a device, else 1. */
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
