/* SPDX-License-Identifier: Apache-2.0
 *
 * pretrained.h: models in the files of the Python package transformers: DIR/config.json and DIR/model.safetensors. A model
 * with GPT-2's layers is a GPT2LMHeadModel. A model of only attention and MLP blocks is a LlamaForCausalLM. */
#ifndef TRAIN_LM_PRETRAINED_H
#define TRAIN_LM_PRETRAINED_H

#include "model.h"

#include "io/file.h"

/* True if transformers has such a model. */
bool pretrained_supports(const model_config *config);

/* Replaces both files in `folder`, which exists. Values are float32. */
bool pretrained_write(const model *m, const char *folder, io_error *error);

/* Writes the gradients of all parameters, with the names of the parameters, and the tokens that they belong to: `inputs`
 * and `targets` [sequences,context]. */
bool pretrained_write_gradients(const model *m, const int32_t *inputs, const int32_t *targets, int64_t sequences,
                                int64_t context, const char *path, io_error *error);

/* Reads the values of all parameters, in float32, from a .safetensors file. A file may have fewer rows of the embedding
 * and the head: the other rows become 0. False if a tensor is missing or has another shape; the message names it. */
bool pretrained_read(const model *m, const char *path, io_error *error);

#endif
