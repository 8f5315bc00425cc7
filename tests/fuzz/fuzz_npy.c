/* SPDX-License-Identifier: Apache-2.0
 * fuzz_npy.c: fuzzes the reader of .npy. A file is refused with one line, or every element of its view can be read.
 */
/* -max_len=512: tools/fuzz.sh reads it */
#include "file_input.h"
#include "io/npy.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char name[] = "the.npy", front[] = "\x93NUMPY\x01\x00??";
    file_input input = make_file(data, size, front, sizeof front - 1, 2);
    npy_file file;
    io_error error = {.text = ""};
    if (npy_parse(&file, name, input.bytes, input.size, &error)) {
        read_view(&file.tensor, input.size);
        npy_close(&file);
    } else {
        require_refusal(&error, name);
    }
    free(input.memory);
    return 0;
}
