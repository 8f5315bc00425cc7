/* SPDX-License-Identifier: Apache-2.0
 * fuzz_safetensors.c: fuzzes the reader of .safetensors. A file or a tensor is refused with one line, or every
 * element of the tensor's view can be read. */
/* -max_len=1024: tools/fuzz.sh reads it */
#include "file_input.h"
#include "io/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char name[] = "the.safetensors", front[8] = "";
    file_input input = make_file(data, size, front, sizeof front, sizeof front);
    safetensors_file file;
    io_error error = {.text = ""};
    cot_tensor view;
    if (safetensors_parse(&file, name, input.bytes, input.size, &error)) {
        for (int i = 0; i < file.count; i++) {
            REQUIRE(safetensors_find(&file, file.entries[i].name) == i, "tensor %d is not found by its name", i);
            for (int again = 0; again < 2; again++) { /* the second read uses the state that the first one left */
                if (safetensors_get(&file, i, &view, &error))
                    read_view(&view, input.size);
                else
                    require_refusal(&error, name);
            }
        }
        REQUIRE(!safetensors_get_named(&file, "no such tensor \xff\n", &view, &error), "a tensor that is not there");
        require_refusal(&error, name);
        const char *text = safetensors_metadata(&file, "format");
        REQUIRE(text == NULL || strlen(text) < input.size, "metadata longer than the file");
        safetensors_close(&file);
    } else {
        require_refusal(&error, name);
    }
    free(input.memory);
    return 0;
}
