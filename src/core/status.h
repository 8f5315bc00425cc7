/* SPDX-License-Identifier: Apache-2.0
 * status.h: reports the failure of a call, as a status and a message of the calling thread. */
#ifndef COT_CORE_STATUS_H
#define COT_CORE_STATUS_H

#include <cotangent/core.h>

/* Stores the message for cot_error_message() and returns `status`: `return cot_fail(COT_..., "%s: ...", call)`. */
cot_status cot_fail(cot_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
