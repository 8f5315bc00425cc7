/* SPDX-License-Identifier: Apache-2.0 */
#include "tensor_file.h"

#include <stdlib.h>

static const char ENDING[] = ".safetensors";

bool is_safetensors_name(const char *path)
{
    const size_t length = strlen(path), ending = strlen(ENDING);
    return length >= ending && strcmp(path + length - ending, ENDING) == 0;
}

bool tensor_file_open(tensor_file *file, const char *path, io_error *error)
{
    *file = (tensor_file){.has_names = is_safetensors_name(path), .count = 1};
    if (!file->has_names)
        return npy_open(&file->npy, path, error);
    if (!safetensors_open(&file->tensors, path, error))
        return false;
    file->count = file->tensors.count;
    return true;
}

void tensor_file_close(tensor_file *file)
{
    npy_close(&file->npy);
    safetensors_close(&file->tensors);
}

const char *tensor_file_name(const tensor_file *file, int number)
{
    return file->has_names ? file->tensors.entries[number].name : "";
}

bool tensor_file_get(tensor_file *file, int number, cot_tensor *view, io_error *error)
{
    if (file->has_names)
        return safetensors_get(&file->tensors, number, view, error);
    *view = file->npy.tensor;
    return true;
}

bool tensor_file_open_one(tensor_file *file, const char *place, cot_tensor *view, io_error *error)
{
    const char *colon = strstr(place, ".safetensors:");
    if (colon == NULL && is_safetensors_name(place))
        return io_fail(error, place, "holds tensors by name, expected %s:NAME", place);
    if (colon == NULL)
        return tensor_file_open(file, place, error) && tensor_file_get(file, 0, view, error);
    char *path = strndup(place, (size_t)(colon - place) + strlen(ENDING));
    const bool opened = path != NULL ? tensor_file_open(file, path, error) : io_no_memory(error, place, "for its name");
    free(path);
    if (!opened)
        return false;
    if (safetensors_get_named(&file->tensors, colon + strlen(ENDING) + 1, view, error))
        return true;
    tensor_file_close(file);
    return false;
}
