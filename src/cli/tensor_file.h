/* SPDX-License-Identifier: Apache-2.0
 * tensor_file.h: the tensors of a file by name, whichever of the two formats it has: one without a name in .npy, any
 * number in .safetensors (a file whose name ends so). */
#ifndef COT_CLI_TENSOR_FILE_H
#define COT_CLI_TENSOR_FILE_H

#include "io/npy.h"
#include "io/safetensors.h"

typedef struct tensor_file {
    bool has_names;
    int count;
    npy_file npy;
    safetensors_file tensors;
} tensor_file;

bool is_safetensors_name(const char *path);

/* On failure there is nothing to close. */
bool tensor_file_open(tensor_file *file, const char *path, io_error *error);
void tensor_file_close(tensor_file *file);

/* "" for the tensor of a .npy. */
const char *tensor_file_name(const tensor_file *file, int number);
bool tensor_file_get(tensor_file *file, int number, cot_tensor *view, io_error *error);

/* The one tensor that FILE.npy, or FILE.safetensors:NAME, stands for. */
bool tensor_file_open_one(tensor_file *file, const char *place, cot_tensor *view, io_error *error);

#endif
