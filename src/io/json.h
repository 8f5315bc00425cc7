/* SPDX-License-Identifier: Apache-2.0
 * json.h: jansson reports an allocation failure as bad JSON, or ignores it. Here its allocations are watched. */
#ifndef COT_IO_JSON_H
#define COT_IO_JSON_H

#include "file.h"

#include <jansson.h>

/* Watch jansson's allocations between the two calls. io_json_end returns false if one of them failed. */
void io_json_begin(void);
bool io_json_end(void);

/* Reads a text. Returns NULL on failure. `what` begins the message: "PATH: WHAT is no JSON that can be read: .." */
json_t *io_read_json(const char *text, size_t bytes, const char *path, const char *what, io_error *error);

#endif
