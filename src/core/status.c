/* SPDX-License-Identifier: Apache-2.0 */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>

/* Long enough for the descriptions of two tensors. Longer messages are truncated. */
enum { MESSAGE_SIZE = 512 };

static _Thread_local char message[MESSAGE_SIZE];

cot_status cot_fail(cot_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return status;
}

cot_status cot_error_set(cot_status status, const char *text)
{
    return text != NULL ? cot_fail(status, "%s", text) : status;
}

const char *cot_error_message(void)
{
    return message;
}

size_t cot_error_copy(char *buffer, size_t size)
{
    const size_t length = strlen(message);
    if (size > 0 && buffer != NULL) {
        const size_t copied = length < size ? length : size - 1;
        memcpy(buffer, message, copied);
        buffer[copied] = '\0';
    }
    return length;
}

const char *cot_status_name(cot_status status)
{
    switch (status) {
    case COT_OK: return "COT_OK";
    case COT_INVALID_ARGUMENT: return "COT_INVALID_ARGUMENT";
    case COT_INVALID_SHAPE: return "COT_INVALID_SHAPE";
    case COT_INVALID_DTYPE: return "COT_INVALID_DTYPE";
    case COT_INVALID_LAYOUT: return "COT_INVALID_LAYOUT";
    case COT_INVALID_DATA: return "COT_INVALID_DATA";
    case COT_UNSUPPORTED: return "COT_UNSUPPORTED";
    case COT_WORKSPACE_TOO_SMALL: return "COT_WORKSPACE_TOO_SMALL";
    case COT_OUT_OF_MEMORY: return "COT_OUT_OF_MEMORY";
    case COT_WOULD_ALLOCATE: return "COT_WOULD_ALLOCATE";
    case COT_NO_DEVICE: return "COT_NO_DEVICE";
    case COT_DEVICE_ERROR: return "COT_DEVICE_ERROR";
    case COT_PEER_ERROR: return "COT_PEER_ERROR";
    }
    return "COT_?";
}

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

const char *cot_version(void)
{
    return TEXT(COT_VERSION_MAJOR) "." TEXT(COT_VERSION_MINOR) "." TEXT(COT_VERSION_PATCH);
}
