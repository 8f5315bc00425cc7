/* SPDX-License-Identifier: Apache-2.0
 * tensor_file.h: reads the tensors of a .npy or .safetensors file by name. A .npy holds one tensor without a name. A
 * .safetensors file holds any number, and its name has that ending. */
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

/* On failure nothing needs to be closed. */
bool tensor_file_open(tensor_file *file, const char *path, io_error *error);
void tensor_file_close(tensor_file *file);

/* "" for the tensor of a .npy. */
const char *tensor_file_name(const tensor_file *file, int number);
bool tensor_file_get(tensor_file *file, int number, cot_tensor *view, io_error *error);

/* Opens the one tensor that FILE.npy or FILE.safetensors:NAME names. */
bool tensor_file_open_one(tensor_file *file, const char *place, cot_tensor *view, io_error *error);

#endif
