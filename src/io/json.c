/* SPDX-License-Identifier: Apache-2.0 */
#include "json.h"

#include <stdlib.h>

static _Thread_local bool out_of_memory;
static json_malloc_t saved_malloc;
static json_free_t saved_free;

static void *allocate(size_t bytes)
{
    void *memory = malloc(bytes);
    out_of_memory = out_of_memory || memory == NULL;
    return memory;
}

void io_json_begin(void)
{
    out_of_memory = false;
    json_get_alloc_funcs(&saved_malloc, &saved_free);
    json_set_alloc_funcs(allocate, free);
}

bool io_json_end(void)
{
    json_set_alloc_funcs(saved_malloc, saved_free);
    return !out_of_memory;
}

json_t *io_read_json(const char *text, size_t bytes, const char *path, const char *what, io_error *error)
{
    json_error_t reason;
    io_json_begin();
    json_t *value = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &reason);
    if (!io_json_end()) {
        json_decref(value);
        io_no_memory(error, path, what);
        return NULL;
    }
    if (value == NULL)
        io_fail(error, path, "%s is no JSON that can be read: %s", what, reason.text);
    return value;
}
