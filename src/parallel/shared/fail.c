/* SPDX-License-Identifier: Apache-2.0
 * fail.c: cot_fail of the shared library, which reports through the public function of libcotangent. */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>

cot_status cot_fail(cot_status status, const char *format, ...)
{
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return cot_error_set(status, message);
}
